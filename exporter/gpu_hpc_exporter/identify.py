"""`gpu-hpc-exporter identify PID`: what is found of one process, by which rule, and why not more.

It asks the same sources by the same rules as the exporter does, so it answers "why is my job label empty?".
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from gpu_hpc_exporter.config import Jobs, Slurm, read_config
from gpu_hpc_exporter.jobs.cgroup import Cgroup, parse_cgroup
from gpu_hpc_exporter.jobs.identity import Identification, Settings, identify
from gpu_hpc_exporter.model import Evidence
from gpu_hpc_exporter.samplers.identities import HostLookups
from gpu_hpc_exporter.samplers.job_parts import identity_settings
from gpu_hpc_exporter.sources.kubernetes.settings import settings_of
from gpu_hpc_exporter.sources.kubernetes.source import KubernetesSource
from gpu_hpc_exporter.sources.procfs import PROC, Processes, pid_view
from gpu_hpc_exporter.sources.slurm.source import SlurmSource
from gpu_hpc_exporter.text import bounded

_WAIT_S: Final = 3.0
"""How long kubelet, API server and Slurm may take to answer."""
_POLL_S: Final = 0.1
_MAX_SHOWN: Final = 1024


def add_identify(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], configured: argparse.ArgumentParser
) -> None:
    """The command's flags. configured: those of every command that reads the configuration."""
    parser = subparsers.add_parser(
        "identify",
        parents=[configured],
        help="tell which job a process belongs to, and why",
        description="Print as JSON which job a process belongs to, by which rule, and what kept it from saying more: "
        "why a `job` label is empty. Exit status: 0 told, 1 no such process can be seen.",
    )
    parser.add_argument("pid", type=int, metavar="PID", help="the process, by its number in that /proc")
    parser.add_argument(
        "--procfs", type=Path, default=PROC, metavar="DIR", help=f"the /proc to look in (default: {PROC})"
    )


def run_identify(flags: argparse.Namespace) -> int:
    """Print the answer; status 1 where there is no such process. Raises ConfigError."""
    jobs = read_config(flags.config_file).jobs
    settings = identity_settings(jobs, flags.procfs)
    evidence = Processes(flags.procfs, settings.variables, settings.user_name).read(flags.pid)
    if evidence is None:
        sys.stderr.write(f"gpu-hpc-exporter: no process {flags.pid} can be seen in {flags.procfs}\n")
        return 1
    with _asking(jobs) as lookups:
        is_asking = lookups.kubernetes is not None or jobs.slurm != Slurm()
        found = (_identify_patiently if is_asking else identify)(evidence, lookups, settings)
        answer = describe(evidence, found, settings)
        answer["driver_pids"] = asdict(pid_view(flags.procfs))
        answer["sources"] = _states(lookups)
    sys.stdout.write(json.dumps(answer, indent=2) + "\n")
    return 0


def describe(evidence: Evidence, found: Identification, settings: Settings) -> dict[str, Any]:
    """The answer as it is printed: of the environment only what was used, and all text bounded."""
    return {
        "pid": evidence.pid,
        "job": None if found.job is None else asdict(found.job),
        "rule": found.rule,
        "why_not_more": [bounded(line, _MAX_SHOWN) for line in found.why],
        "cgroup": _told(parse_cgroup(evidence.cgroup)),
        "evidence": {
            "comm": bounded(evidence.comm),
            "command": bounded(evidence.command, _MAX_SHOWN),
            "user": bounded(evidence.user),
            "uid": evidence.uid,
            "start_ticks": evidence.start_ticks,
            "cgroup": [bounded(line, _MAX_SHOWN) for line in evidence.cgroup.splitlines()],
            "environment": {name: bounded(evidence.environment[name]) for name in found.variables},
            "not_readable": list(evidence.missing),
        },
        "looked_for": {
            "rules": len(settings.rules),
            "pod_labels": list(settings.pod_labels),
            "pod_annotations": list(settings.pod_annotations),
            "environment": sorted(settings.variables),
        },
    }


def _told(place: Cgroup) -> dict[str, Any]:
    """What the cgroup tells, without what it does not."""
    told: dict[str, Any] = {}
    for name, value in asdict(place).items():
        if value not in ("", -1, None, False):
            told[name] = bounded(value) if isinstance(value, str) else value
    for name, inner in (("outer", place.outer), ("claim", place.claim)):
        if inner is not None:
            told[name] = _told(inner)
    return told


@contextmanager
def _asking(jobs: Jobs) -> Iterator[HostLookups]:
    """The sources of pods and Slurm jobs that are configured, at work."""
    slurm = SlurmSource(jobs.slurm)
    kubernetes = None
    if jobs.kubernetes.enabled != "off" and Path(jobs.kubernetes.socket).exists():
        wanted = settings_of(jobs.kubernetes, os.environ, socket.gethostname())
        kubernetes = KubernetesSource(wanted, lambda *_: None)
        kubernetes.start()
    slurm.start()
    try:
        yield HostLookups(kubernetes, slurm)
    finally:
        slurm.stop()
        if kubernetes is not None:
            kubernetes.stop()


def _identify_patiently(evidence: Evidence, lookups: HostLookups, settings: Settings) -> Identification:
    """Identify again while sources may still tell more: they answer from memory, and have just begun to ask."""
    deadline = time.monotonic() + _WAIT_S
    found = identify(evidence, lookups, settings)
    while _lacks_names(found) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        found = identify(evidence, lookups, settings)
    return found


def _lacks_names(found: Identification) -> bool:
    return any("not known" in line or "not believed" in line for line in found.why)


def _states(lookups: HostLookups) -> Mapping[str, str]:
    """How the sources are, "not configured" where they are not in use."""
    states = {"slurm": "not configured", "kubelet": "not configured"}
    if lookups.slurm is not None:
        view = lookups.slurm.view
        if view.state is not None:
            states["slurm"] = f"{view.state}: {view.reason}" if view.reason else view.state
    kubelet = lookups.kubernetes.view.parts.get("kubelet") if lookups.kubernetes is not None else None
    if kubelet is not None:
        states["kubelet"] = f"{kubelet.state}: {kubelet.reason}" if kubelet.reason else kubelet.state
    return states
