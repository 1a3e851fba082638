"""Who names the jobs beside /proc: kubelet, API server and Slurm, asked by the exporter's own sources."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.config import Slurm
from gpu_hpc_exporter.doctor.check import Check, Checks, Place, status_of, told
from gpu_hpc_exporter.sources.kubernetes.settings import settings_of
from gpu_hpc_exporter.sources.kubernetes.source import KubernetesSource
from gpu_hpc_exporter.sources.kubernetes.view import PARTS, Part, PartState
from gpu_hpc_exporter.sources.slurm.controller import ControllerError, controllers
from gpu_hpc_exporter.sources.slurm.source import SlurmSource

_LOOK_S: Final = 0.05
_NOT_ASKED: Final = "not asked yet"
_NAMES: Final = {"kubelet": "kubelet", "apiserver": "Kubernetes API"}
_ANY_JOB: Final = "1"
"""Slurm is asked about it: that it has no such job is an answer."""


def check_kubernetes(place: Place) -> Checks:
    """Both parts, where this is a node or a pod."""
    configured = place.config.jobs.kubernetes
    in_pod = bool(place.environ.get("KUBERNETES_SERVICE_HOST"))
    if configured.enabled == "off":
        yield Check("kubelet", "ok", "switched off: jobs.kubernetes.enabled")
        return
    if not in_pod and not Path(configured.socket).exists() and configured.api == "auto":
        yield Check("kubelet", "ok", f"no Kubernetes node: no {configured.socket}")
        return
    settings = settings_of(configured, place.environ, socket.gethostname())
    source = KubernetesSource(settings, lambda *_: None)
    source.start()
    try:
        deadline = time.monotonic() + settings.deadline_s + 1
        while _is_open(source) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        parts = source.view.parts
        holders = len({one.pod for held in source.view.allocations.values() for one in held})
        unknown = len(source.view.unknown_devices)
    finally:
        source.stop()
    for part in PARTS:
        yield _part(part, parts[part], f"{holders + unknown} pods or devices" if part == "kubelet" else "")


def _is_open(source: KubernetesSource) -> bool:
    return any(part.reason == _NOT_ASKED for part in source.view.parts.values())


def _part(part: Part, told_of: PartState, found: str) -> Check:
    name = _NAMES[part]
    if told_of.state == "active":
        return Check(name, "ok", f"answers{found and f': {found} hold GPUs'}")
    if part == "apiserver" and told_of.state == "unsupported":
        return Check(name, "ok", f"not asked: {told_of.reason}")
    finding = "no answer yet" if told_of.reason == _NOT_ASKED else told_of.state
    status = "degraded" if told_of.state == "unsupported" else status_of(told_of.state)
    return Check(name, status, f"{finding}: pods are not named", told_of.reason)


def check_slurm(place: Place) -> Checks:
    """What the configuration names; without it ids are told all the same."""
    settings = place.config.jobs.slurm
    if settings == Slurm():
        here = shutil.which("scontrol") is not None or (place.rootfs / "etc/slurm").is_dir()
        names = "not configured: jobs have their ids; jobs.slurm.map_directory or scontrol: true adds names"
        yield Check("Slurm", "ok", names if here else "not configured, and no Slurm here")
        return
    source = SlurmSource(settings)
    if settings.map_directory:
        source.refresh()
        view = source.view
        if view.state == "active":
            finding = f"{settings.map_directory} tells of {len(view.jobs)} jobs"
            yield Check("Slurm map", "degraded" if view.reason else "ok", finding, view.reason)
        else:
            cure = f"let Slurm's prolog write there, or mount it: {settings.map_directory}"
            yield Check("Slurm map", "degraded", told(view.state or "failed", view.reason), cure)
    for controller in controllers(settings):
        name = type(controller).__name__.lower()
        try:
            controller.ask(_ANY_JOB)
        except ControllerError as error:
            yield Check(f"Slurm {name}", "degraded", str(error), "see jobs.slurm of the configuration")
        else:
            yield Check(f"Slurm {name}", "ok", "answers")
