"""Says every two seconds whose the GPUs are: the processes on them and what holds them without a process, as jobs.

None of it happens in a scrape or in a thread that calls the driver: a /proc, a kubelet or a Slurm that hangs costs the
names of jobs and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from gpu_hpc_exporter.jobs.attribution import UNPLACED, attribute
from gpu_hpc_exporter.model import (
    Event,
    Gpu,
    GpuJobs,
    GpuProcess,
    GpuProcesses,
    Inventory,
    Job,
    JobOnGpu,
    JobsInForce,
    JobSource,
    Library,
    Sink,
    State,
    StateChange,
)
from gpu_hpc_exporter.samplers.totals import MAX_PROCESSES_AGE_NS

log = logging.getLogger(__name__)

PERIOD_S: Final = 2.0
_FIRST_WAIT_S: Final = 0.5
_JOIN_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class Condition:
    """How a source is, and when it last told what it knows."""

    source: JobSource
    state: State
    reason: str = ""
    told_ns: int | None = None


class Processes(Protocol):
    """Whose the processes are. Names are fit for labels: two that would become one there are one here."""

    @property
    def can_tell(self) -> bool:
        """Whether the driver's pids can be looked up at all."""

    @property
    def lists_all(self) -> bool:
        """Whether the driver lists all processes to us; else what it lists is no count of them."""

    def jobs_of(self, pids: Collection[int], listed_ns: int) -> Mapping[int, Job | None]:
        """The job of each process that runs; None for one of which /proc does not tell.

        Who started after `listed_ns` is not who the driver listed.
        """

    def libraries_of(self, pid: int) -> tuple[Library, ...]:
        """What a process that has a job has loaded, as far as that is known by now."""

    def unknown_cgroups(self) -> Mapping[str, int]:
        """Processes so far whose control group has a form that tells no job, by that form."""

    def condition(self) -> Condition:
        """How /proc can be read."""


class Holders(Protocol):
    """Which jobs hold GPUs, whether or not they run anything there. Names are as above."""

    def use_gpus(self, gpus: tuple[Gpu, ...]) -> None:
        """The GPUs that there are now."""

    def holders_of(self, uuid: str) -> tuple[Job, ...]:
        """The jobs that hold this GPU or MIG instance."""

    def condition(self) -> Condition | None:
        """How the source is; None where it is not in use."""


class JobSampler:
    """Feeds a sink with jobs until stopped; a sink itself, which learns of GPUs and their processes in passing."""

    def __init__(
        self,
        sink: Sink,
        processes: Processes,
        holders: tuple[Holders, ...] = (),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._sink = sink
        self._parts = (processes, holders)
        self._clock = clock
        self._lock = threading.Lock()
        self._gpus: tuple[Gpu, ...] = ()
        self._gpus_told: tuple[Gpu, ...] = ()
        self._newest: dict[str, GpuProcesses] = {}
        self._told: dict[JobSource, tuple[State, str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def use(self, processes: Processes, holders: tuple[Holders, ...]) -> None:
        """Ask others from the next look on."""
        with self._lock:
            self._parts = (processes, holders)
            self._gpus_told = ()

    def put(self, event: Event) -> None:
        """Pass an event on; take note of GPUs and processes. A list that lacks others' processes is none."""
        if isinstance(event, GpuProcesses) and not self._parts[0].lists_all:
            event = replace(event, processes=None)
        self._sink.put(event)
        if isinstance(event, GpuProcesses):
            with self._lock:
                self._newest[event.uuid] = event
        elif isinstance(event, Inventory):
            self._take_gpus(event.gpus)

    def _take_gpus(self, gpus: tuple[Gpu, ...]) -> None:
        with self._lock:
            self._gpus = gpus
            listed = {gpu.uuid for gpu in gpus}
            self._newest = {uuid: event for uuid, event in self._newest.items() if uuid in listed}

    def start(self) -> None:
        """Begin in the background."""
        self._thread.start()

    def stop(self) -> bool:
        """End; False where the thread is stuck in what it reads."""
        self._stop.set()
        if self._thread.ident is None:
            return True
        self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s = _FIRST_WAIT_S
        while not self._stop.wait(wait_s):
            wait_s = PERIOD_S
            try:
                self.tick()
            except Exception:
                log.exception("whose the GPUs are cannot be told")
                self._tell(Condition("procfs", "failed", "internal_error"))

    def tick(self) -> None:
        """Look once."""
        now_ns = self._clock()
        with self._lock:
            processes, holders = self._parts
            gpus, told = self._gpus, self._gpus_told
            self._gpus_told = gpus
            newest = {u: e for u, e in self._newest.items() if now_ns - e.time_ns <= MAX_PROCESSES_AGE_NS}
        if gpus != told:
            for one in holders:
                one.use_gpus(gpus)
        known_processes = _known_processes(processes, newest.values()) if processes.can_tell else None
        known: dict[str, GpuJobs] = {}
        for gpu in gpus:
            listed = newest.get(gpu.uuid)
            running = _running(listed.processes if listed is not None else None, known_processes)
            holding = [job for one in holders for job in one.holders_of(gpu.uuid)]
            if running is not None or holding:
                known[gpu.uuid] = attribute(running or (), holding)
        conditions = [c for c in (processes.condition(), *(one.condition() for one in holders)) if c is not None]
        for condition in conditions:
            self._tell(condition)
        told_ns = {c.source: c.told_ns for c in conditions if c.told_ns is not None}
        self._sink.put(JobsInForce(now_ns, known, dict(processes.unknown_cgroups()), told_ns))

    def _tell(self, condition: Condition) -> None:
        told = (condition.state, condition.reason)
        if self._told.get(condition.source) == told:
            return
        self._told[condition.source] = told
        self._sink.put(StateChange(self._clock(), condition.source, "", condition.state, condition.reason))
        if condition.state != "active":
            level = logging.INFO if condition.state == "unsupported" else logging.WARNING
            log.log(level, "%s is %s: %s", condition.source, condition.state, condition.reason)


def _known_processes(processes: Processes, lists: Collection[GpuProcesses]) -> dict[int, JobOnGpu]:
    """What is known of each process, but for what the driver tells, by pid."""
    pids = {process.pid for listed in lists for process in listed.processes or ()}
    oldest_ns = min((listed.time_ns for listed in lists), default=0)
    jobs = processes.jobs_of(pids, oldest_ns)
    return {
        pid: JobOnGpu(UNPLACED if job is None else job, 1, libraries=processes.libraries_of(pid))
        for pid, job in jobs.items()
    }


def _running(processes: tuple[GpuProcess, ...] | None, known: Mapping[int, JobOnGpu] | None) -> list[JobOnGpu] | None:
    """A GPU's processes by job; None where nobody can tell. A process that has ended meanwhile is nobody's."""
    if processes is None or known is None:
        return None
    placed = ((process, known[process.pid]) for process in processes if process.pid in known)
    return [JobOnGpu(one.job, 1, p.memory_bytes, p.sm_ratio, one.libraries) for p, one in placed]
