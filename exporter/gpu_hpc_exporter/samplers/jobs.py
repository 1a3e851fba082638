"""Says every two seconds whose the GPUs are: the processes on them and what holds them without a process, as jobs.

None of it happens in a scrape or in a thread that calls the driver: a /proc, a kubelet or a Slurm that hangs costs the
names of jobs and nothing else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, Protocol

from gpu_hpc_exporter.exposition import clean_label
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
    Sink,
    State,
    StateChange,
)
from gpu_hpc_exporter.samplers.totals import MAX_PROCESSES_AGE_NS

log = logging.getLogger(__name__)

PERIOD_S: Final = 2.0
_JOIN_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class Condition:
    """How a source is, and when it last told what it knows."""

    source: JobSource
    state: State
    reason: str = ""
    told_ns: int | None = None


class Processes(Protocol):
    """Whose the processes are."""

    def jobs_of(self, pids: Collection[int]) -> Mapping[int, Job | None]:
        """The job of each process that runs; None for one of which /proc does not tell."""

    def unknown_cgroups(self) -> Mapping[str, int]:
        """Processes so far whose control group has a form that tells no job, by that form."""

    def condition(self) -> Condition:
        """How /proc can be read."""


class Holders(Protocol):
    """Which jobs hold GPUs, whether or not they run anything there."""

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
        self._processes = processes
        self._holders = holders
        self._clock = clock
        self._lock = threading.Lock()
        self._gpus: tuple[Gpu, ...] = ()
        self._newest: dict[str, GpuProcesses] = {}
        self._told: dict[JobSource, tuple[State, str]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def put(self, event: Event) -> None:
        """Pass an event on; take note of GPUs and processes."""
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
        for holders in self._holders:
            holders.use_gpus(gpus)

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
        while not self._stop.wait(PERIOD_S):
            try:
                self.tick()
            except Exception:
                log.exception("whose the GPUs are cannot be told")
                self._tell(Condition("procfs", "failed", "internal_error"))

    def tick(self) -> None:
        """Look once."""
        now_ns = self._clock()
        with self._lock:
            gpus = self._gpus
            newest = {u: e for u, e in self._newest.items() if now_ns - e.time_ns <= MAX_PROCESSES_AGE_NS}
        pids = {process.pid for event in newest.values() for process in event.processes or ()}
        jobs = self._named(self._processes.jobs_of(pids))
        can_tell = self._processes.condition().state == "active"
        known: dict[str, GpuJobs] = {}
        for gpu in gpus:
            event = newest.get(gpu.uuid)
            processes = event.processes if event is not None and can_tell else None
            of_gpu = self._jobs_on(gpu.uuid, processes, jobs)
            if of_gpu is not None:
                known[gpu.uuid] = of_gpu
        conditions = list(self._conditions())
        for condition in conditions:
            self._tell(condition)
        told_ns = {c.source: c.told_ns for c in conditions if c.told_ns is not None}
        self._sink.put(JobsInForce(now_ns, known, dict(self._processes.unknown_cgroups()), told_ns))

    @staticmethod
    def _named(jobs: Mapping[int, Job | None]) -> dict[int, Job]:
        """Names as they will be served: two that become one there are one job here."""
        return {pid: UNPLACED if job is None else _clean(job) for pid, job in jobs.items()}

    def _jobs_on(self, uuid: str, processes: tuple[GpuProcess, ...] | None, jobs: Mapping[int, Job]) -> GpuJobs | None:
        """The jobs of one GPU; None where nobody can tell. A process that has ended meanwhile is nobody's."""
        holders = tuple(_clean(job) for source in self._holders for job in source.holders_of(uuid))
        if processes is None and not holders:
            return None
        running = (
            JobOnGpu(jobs[process.pid], 1, process.memory_bytes, process.sm_ratio)
            for process in processes or ()
            if process.pid in jobs
        )
        return attribute(running, holders)

    def _conditions(self) -> Iterator[Condition]:
        yield self._processes.condition()
        for holders in self._holders:
            condition = holders.condition()
            if condition is not None:
                yield condition

    def _tell(self, condition: Condition) -> None:
        told = (condition.state, condition.reason)
        if self._told.get(condition.source) == told:
            return
        self._told[condition.source] = told
        self._sink.put(StateChange(self._clock(), condition.source, "", condition.state, condition.reason))
        if condition.state != "active":
            log.warning("%s is %s: %s", condition.source, condition.state, condition.reason)


def _clean(job: Job) -> Job:
    name = clean_label(job.job)
    return job if name == job.job else replace(job, job=name)
