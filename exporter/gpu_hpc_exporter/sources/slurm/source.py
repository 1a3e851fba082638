"""Keeps what is known of Slurm's jobs current, in a thread of its own; answers come from memory at once."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.config import Slurm
from gpu_hpc_exporter.jobs.lookups import SlurmJob
from gpu_hpc_exporter.model import NS, Gpu, State
from gpu_hpc_exporter.sources.slurm.controller import ASKABLE, Controller, ControllerError, controllers
from gpu_hpc_exporter.sources.slurm.map_directory import MapDirectory, MapReading

log = logging.getLogger(__name__)

PERIOD_S: Final = 2.0
_FRESH_NS: Final = 300 * NS
"""How long an answer counts; jobs can be renamed."""
_NO_ANSWER_NS: Final = 60 * NS
_MAX_KNOWN: Final = 2048
_FIRST_BACKOFF_NS: Final = 10 * NS
_MAX_BACKOFF_NS: Final = 300 * NS
_JOIN_S: Final = 0.3


@dataclass(frozen=True, slots=True)
class SlurmView:
    """What is known now. `version` changes with `jobs` and `sluids`; `state` is None where nothing is configured.

    reason: why it failed or, where it is active, which files cannot be used; anybody's may be among them.
    """

    version: int = 0
    jobs: Mapping[str, SlurmJob] = field(default_factory=dict)
    sluids: Mapping[str, str] = field(default_factory=dict)
    holders: Mapping[str, tuple[SlurmJob, ...]] = field(default_factory=dict)
    state: State | None = None
    reason: str = ""
    told_ns: int | None = None


@dataclass(slots=True)
class _Asked:
    job: SlurmJob | None
    due_ns: int


class SlurmSource:
    """The map directory and the controller, as far as the configuration names them."""

    def __init__(
        self,
        settings: Slurm,
        clock: Callable[[], int] = time.monotonic_ns,
        asking: tuple[Controller, ...] | None = None,
    ) -> None:
        """`asking`: in place of those that the settings name."""
        self._clock = clock
        self._map = MapDirectory(Path(settings.map_directory)) if settings.map_directory else None
        self._controllers = controllers(settings) if asking is None else asking
        self._gpus: tuple[Gpu, ...] = ()
        self._lock = threading.Lock()
        self._wanted: OrderedDict[str, None] = OrderedDict()
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._backoff_ns = 0
        self._pause_until_ns = 0
        self._problem = ""
        self._reading = MapReading()
        self._was_skipped = False
        self._wake = threading.Event()
        self._stopping = False
        self.view = SlurmView()
        """Replaced as a whole, never changed."""
        self._thread = threading.Thread(target=self._run, name="slurm", daemon=True)

    def start(self) -> None:
        """Begin in the background, if there is anything to do."""
        if self._map is not None or self._controllers:
            self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; a question that is under way ends by itself."""
        self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def use_gpus(self, gpus: tuple[Gpu, ...]) -> None:
        """The GPUs that files may name."""
        self._gpus = gpus
        self._wake.set()

    def slurm_job(self, job_id: str) -> SlurmJob | None:
        """What is known of a job; the controller is asked about one that lacks its name."""
        job = self.view.jobs.get(job_id)
        if job is None or not job.name:
            self._want(job_id)
        return job

    def slurm_job_of_sluid(self, sluid: str) -> SlurmJob | None:
        """The same by SLUID."""
        view = self.view
        job = view.jobs.get(view.sluids.get(sluid, ""))
        if job is None:
            self._want(sluid)
        return job

    def _want(self, job: str) -> None:
        if not self._controllers or not ASKABLE.fullmatch(job):
            return
        with self._lock:
            asked = self._asked.get(job)
            if job in self._wanted or (asked is not None and self._clock() < asked.due_ns):
                return
            self._wanted[job] = None
            while len(self._wanted) > _MAX_KNOWN:
                self._wanted.popitem(last=False)
        self._wake.set()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.refresh()
            except Exception:
                log.exception("what Slurm says of jobs could not be read")
                self.view = replace(self.view, state="failed", reason="internal_error")
            self._wake.wait(PERIOD_S)
            self._wake.clear()

    def refresh(self) -> None:
        """Read the files that have changed and ask about the jobs that somebody wanted to know of."""
        if self._map is not None:
            self._reading = self._map.read(self._gpus)
        self._publish()
        while not self._stopping and (job := self._next()) is not None:
            self._ask(job)
            self._publish()

    def _next(self) -> str | None:
        """The job to ask about now, None also while the controller is left alone."""
        now_ns = self._clock()
        with self._lock:
            if now_ns < self._pause_until_ns or not self._wanted:
                return None
            return self._wanted.popitem(last=False)[0]

    def _ask(self, wanted: str) -> None:
        job: SlurmJob | None = None
        try:
            for controller in self._controllers:
                job = job or controller.ask(wanted)
        except ControllerError as error:
            self._fail(str(error))
            return
        self._problem, self._backoff_ns = "", 0
        with self._lock:
            # One without a name tells no more than its id: ask again before long.
            good_for = _FRESH_NS if job is not None and job.name else _NO_ANSWER_NS
            self._asked[wanted] = _Asked(job, self._clock() + good_for)
            self._asked.move_to_end(wanted)
            while len(self._asked) > _MAX_KNOWN:
                self._asked.popitem(last=False)

    def _fail(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("Slurm's controller cannot be asked: %s", problem)
        self._problem = problem
        self._backoff_ns = min(2 * self._backoff_ns or _FIRST_BACKOFF_NS, _MAX_BACKOFF_NS)
        self._pause_until_ns = self._clock() + self._backoff_ns

    def _publish(self) -> None:
        """What files and controller say together; files, which are of this node, come first."""
        before = self.view
        jobs = dict(self._reading.jobs)
        sluids = dict(self._reading.sluids)
        with self._lock:
            answers = [(wanted, asked.job) for wanted, asked in self._asked.items() if asked.job is not None]
        for wanted, job in answers:
            jobs[job.job_id] = _filled(jobs.get(job.job_id), job)
            if wanted != job.job_id:
                sluids.setdefault(wanted, job.job_id)
        holders: dict[str, list[SlurmJob]] = {}
        for job_id in self._reading.jobs:
            for uuid in jobs[job_id].device_uuids:
                holders.setdefault(uuid, []).append(jobs[job_id])
        is_same = jobs == before.jobs and sluids == before.sluids
        reasons = [reason for reason in (self._reading.reason, self._problem) if reason]
        if self._reading.reason and before.state != "failed":
            log.warning("Slurm's map directory cannot be read: %s", self._reading.reason)
        skipped = _skipped(self._reading)
        if skipped and not self._was_skipped:
            log.warning("%s", skipped)
        self._was_skipped = bool(skipped)
        self.view = SlurmView(
            version=before.version if is_same else before.version + 1,
            jobs=jobs,
            sluids=sluids,
            holders={uuid: tuple(held) for uuid, held in holders.items()},
            state="failed" if reasons else "active",
            reason="; ".join([*reasons, skipped] if skipped else reasons),
            told_ns=before.told_ns if reasons else self._clock(),
        )


def _skipped(reading: MapReading) -> str:
    if not reading.skipped:
        return ""
    files = "1 file" if reading.skipped == 1 else f"{reading.skipped} files"
    return f"{files} of the map directory cannot be used: {reading.problem}"


def _filled(known: SlurmJob | None, told: SlurmJob) -> SlurmJob:
    """What files leave out, from the controller."""
    if known is None:
        return told
    return replace(
        known,
        name=known.name or told.name,
        user=known.user or told.user,
        account=known.account or told.account,
        partition=known.partition or told.partition,
        kind=known.kind or told.kind,
    )
