"""All that job identity takes on one host, put together from the configuration."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from gpu_hpc_exporter import config
from gpu_hpc_exporter.jobs.identity import Settings
from gpu_hpc_exporter.jobs.rules import RuleError, compile_rules
from gpu_hpc_exporter.model import Sink, State
from gpu_hpc_exporter.samplers.identities import HostLookups, HostProcesses, KubernetesHolders, SlurmHolders
from gpu_hpc_exporter.samplers.jobs import Holders, JobSampler
from gpu_hpc_exporter.samplers.libraries import LibrarySampler
from gpu_hpc_exporter.sources.kubernetes.settings import settings_of
from gpu_hpc_exporter.sources.kubernetes.source import KubernetesSource
from gpu_hpc_exporter.sources.kubernetes.view import Part
from gpu_hpc_exporter.sources.procfs import PROC, Users, pid_view
from gpu_hpc_exporter.sources.slurm.source import SlurmSource

log = logging.getLogger(__name__)


class _Source(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


class JobParts:
    """The sampler of jobs with its sources. `sampler` is the sink that NVML's events have to pass."""

    def __init__(
        self,
        sink: Sink,
        jobs: config.Jobs,
        procfs: Path = PROC,
        clock: Callable[[], int] = time.monotonic_ns,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Raises ConfigError for a rule that cannot be used."""
        self._procfs = procfs
        self._clock = clock
        self._environ = environ
        self._view = pid_view(procfs)
        self._jobs = jobs
        self._libraries = LibrarySampler(procfs)
        self._sources, self.processes, holders = self._build(jobs)
        self.sampler = JobSampler(sink, self.processes, holders, clock)

    def _build(self, jobs: config.Jobs) -> tuple[tuple[_Source, ...], HostProcesses, tuple[Holders, ...]]:
        settings = identity_settings(jobs, self._procfs)
        slurm = SlurmSource(jobs.slurm, self._clock)
        kubernetes = _kubernetes(jobs.kubernetes, self._environ)
        lookups = HostLookups(kubernetes, slurm)
        processes = HostProcesses(settings, lookups, self._procfs, self._view, self._clock)
        processes.use_libraries(self._libraries)
        if kubernetes is None:
            return (slurm,), processes, (SlurmHolders(slurm),)
        pods = KubernetesHolders(kubernetes, lookups, settings, self._procfs)
        return (slurm, kubernetes), processes, (SlurmHolders(slurm), pods)

    def start(self) -> None:
        """Begin in the background."""
        for source in self._sources:
            source.start()
        self._libraries.start()
        self.sampler.start()

    def apply(self, jobs: config.Jobs) -> None:
        """Go on with other settings, while running. Raises ConfigError for a rule that cannot be used."""
        if jobs == self._jobs:
            return
        sources, processes, holders = self._build(jobs)
        before, self._sources, self._jobs = self._sources, sources, jobs
        self.processes = processes
        for source in sources:
            source.start()
        self.sampler.use(processes, holders)
        for source in before:
            source.stop()

    def stop(self) -> bool:
        """End; False where a thread is stuck in what it reads."""
        ended = [self.sampler.stop(), self._libraries.stop()]
        for source in self._sources:
            source.stop()
        return all(ended)


def identity_settings(jobs: config.Jobs, procfs: Path = PROC) -> Settings:
    """How jobs are to be named. Raises ConfigError for a rule that cannot be used."""
    try:
        rules = compile_rules(jobs.rules)
    except RuleError as error:
        raise config.ConfigError(f"jobs.rules: {error}") from error
    return Settings(
        rules=rules,
        pod_labels=jobs.kubernetes.labels,
        pod_annotations=jobs.kubernetes.annotations,
        name_variables=jobs.environment,
        user_name=Users(procfs).name,
    )


def _kubernetes(configured: config.Kubernetes, environ: Mapping[str, str]) -> KubernetesSource | None:
    if configured.enabled == "off":
        return None
    settings = settings_of(configured, environ, socket.gethostname())
    return KubernetesSource(settings, _log_state)


def _log_state(part: Part, state: State, reason: str) -> None:
    """The kubelet's state is a series; the API server's only adds names."""
    if part == "apiserver" and state not in {"active", "unsupported"}:
        log.warning("the Kubernetes API server tells nothing of pods: %s: %s", state, reason)
