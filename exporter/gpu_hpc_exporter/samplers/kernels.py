"""Reads the agents' files every five seconds and says what all kernels of the host did meanwhile.

In a thread of its own: neither a slow directory nor a name that takes long holds up anything else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, get_args

from gpu_hpc_exporter import config
from gpu_hpc_exporter.diagnosis.kernels import name_within, signature
from gpu_hpc_exporter.jobs.attribution import UNPLACED, pod_row, row_name
from gpu_hpc_exporter.model import (
    AGENT_STATES,
    NS,
    RECORD_RESULTS,
    AgentState,
    Event,
    GpuJobs,
    GpuProcesses,
    Inventory,
    Job,
    JobsInForce,
    KernelReport,
    RecordResult,
    Sink,
    State,
    StateChange,
)
from gpu_hpc_exporter.samplers.gpu_contexts import PATIENCE_NS, AgentGpus, GpuContexts, Standing
from gpu_hpc_exporter.samplers.identities import AgentClaim, ForeignFileError, Placement
from gpu_hpc_exporter.samplers.kernel_ledger import KernelLedger, LyingError
from gpu_hpc_exporter.samplers.tracing import Moment, TracingTimes, is_named
from gpu_hpc_exporter.sources.kernels.demangle import Demangler
from gpu_hpc_exporter.sources.kernels.files import AgentFile, AgentFiles, Reading, Status, make_folder

log = logging.getLogger(__name__)

PERIOD_S: Final = 5.0
_MAX_SHARE: Final = 0.02
_LONGEST_PERIOD_S: Final = 10.0
"""Well below the age at which a report is no longer served."""
_JOIN_S: Final = 0.3
_NAMING_S: Final = 0.1
"""How long one look goes on finding names; kernels whose names come later lose nothing."""
_TWIN_NS: Final = 30 * NS
"""How long a second file of one process is waited for to become the only one, as after exec."""
_SILENT_NS: Final = 30 * NS
_MAX_MISSING: Final = 128
"""GPUs and MIG instances that were listed once and are not now; the fleet keeps counters of as many instances."""


class Owners(Protocol):
    """Whose the processes are that files tell of; safe to ask from this thread."""

    @property
    def can_tell(self) -> bool: ...

    def job_of_agent(self, claim: AgentClaim, may_be: Callable[[int], bool]) -> Placement | None: ...

    def declared_job(self, claim: AgentClaim) -> Job: ...

    def has_seen(self, pid: int) -> bool: ...


@dataclass(slots=True)
class _Owner:
    """What is known of whose a file is.

    placed: by its process, which stays true when that has ended. is_own_word: by nothing but what it says of itself, on
    a host where no process can be looked up. is_foreign, has_wrong_times: it has been noted for GPUs on which its
    process is not, and for times that cannot be.
    """

    first_ns: int
    claim: AgentClaim
    job: Job | None = None
    placed: Placement | None = None
    is_own_word: bool = False
    gpus: AgentGpus = field(default_factory=AgentGpus)
    is_foreign: bool = False
    has_wrong_times: bool = False
    twin_ns: int | None = None
    records: tuple[int, int, int, int] | None = None


class KernelSampler:
    """Feeds a sink with reports until stopped; a sink itself, which learns of GPUs, processes and jobs in passing."""

    def __init__(
        self,
        sink: Sink,
        settings: config.Agent,
        clock: Callable[[], int] = time.monotonic_ns,
        wall: Callable[[], int] = time.time_ns,
    ) -> None:
        """`clock`: the samplers' own; `wall`: Unix time, which agents write."""
        self._sink = sink
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._settings = settings
        self._in_use: config.Agent | None = None
        self._files = self._files_of(settings)
        self._owners: Callable[[], Owners] | None = None
        self._gpus: dict[str, str] = {}
        self._contexts = GpuContexts()
        self._jobs: JobsInForce | None = None
        self._told: tuple[State, str] | None = None
        self._demangler = Demangler(_signature)
        self._known: dict[tuple[str, int], _Owner] = {}
        self._rejected: dict[str, int] = {}
        self._tracing = TracingTimes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kernels", daemon=True)

    def use_owners(self, owners: Callable[[], Owners]) -> None:
        """Ask these, as they are at each look, whose processes are."""
        self._owners = owners

    def put(self, event: Event) -> None:
        """Pass an event on; take note of GPUs, their processes and jobs."""
        self._sink.put(event)
        if isinstance(event, JobsInForce):
            self._jobs = event
        elif isinstance(event, Inventory):
            self._know({_hex(gpu.uuid): gpu.uuid for gpu in event.gpus})
        elif isinstance(event, GpuProcesses):
            self._contexts.put(event)

    def _know(self, listed: dict[str, str]) -> None:
        """A GPU that is not listed now, while its driver hangs, or because it is lost, has jobs that did something."""
        missing = [item for item in self._gpus.items() if item[0] not in listed]
        self._gpus = dict(missing[-_MAX_MISSING:]) | listed
        self._contexts.keep_only(self._gpus.values())

    def start(self) -> None:
        """Begin in the background."""
        self._thread.start()

    def apply(self, settings: config.Agent) -> None:
        """Go on with other settings from the next look on."""
        with self._lock:
            self._settings = settings

    def stop(self) -> bool:
        """End; False where the thread is stuck in what it reads."""
        self._stop.set()
        if self._thread.ident is None:
            self._end()
            return True
        self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        wait_s = 0.0
        try:
            while not self._stop.wait(wait_s):
                began_s = time.thread_time()
                try:
                    self.tick()
                except Exception:
                    log.exception("what kernels did cannot be told")
                    self._in_use = None  # begin anew: counters go on from where they are
                    self._tell("failed", "internal_error")
                wait_s = wait_after(time.thread_time() - began_s)
        finally:
            self._end()

    def _end(self) -> None:
        self._demangler.close()
        self._files.close()

    def tick(self) -> None:
        """Look once."""
        with self._lock:
            settings = self._settings
        if settings != self._in_use:
            self._begin(settings)
        look = _Look(self._clock(), self._wall())
        self._ledger.in_use = self._contexts.in_use(look.now_ns)
        files = []
        try:
            for file, reading in self._files.scan():
                self._take(look, file, reading)
                if not file.rejected:
                    files.append(file)
        except OSError as error:
            self._tell(*unreadable(error, settings.directory))
            return
        moment = Moment(look.now_ns, look.wall_ns, self._clock())
        tracing = self._tracing.look(moment, [(file, self._reach(file, look)) for file in files])
        for file in self._tracing.odd:
            self._note_times(self._known[file.key], file)
        self._ledger.keep_only(look.files)
        self._known = {key: owner for key, owner in self._known.items() if key in look.files}
        self._demangler.rest()
        self._tell("active", "")
        self._sink.put(
            KernelReport(
                look.now_ns,
                self._ledger.report(look.now_ns, self._is_in_force, self._is_shared),
                {state: look.states[state] for state in AGENT_STATES},
                tuple(sorted(look.reasons)),
                look.overhead_ratio,
                {result: look.records[result] for result in RECORD_RESULTS},
                self._newly_rejected(),
                tracing,
                frozenset(look.pids) if self._owners is not None and self._owners().can_tell else None,
            )
        )

    def _newly_rejected(self) -> dict[str, int]:
        before, self._rejected = self._rejected, dict(self._files.rejected)
        return {reason: count - before.get(reason, 0) for reason, count in self._rejected.items()}

    def _begin(self, settings: config.Agent) -> None:
        if self._in_use is None or settings.directory != self._in_use.directory:
            make_folder(Path(settings.directory))
            self._files.close()
            self._files = self._files_of(settings)
            self._ledger = KernelLedger(settings.top_k)
            self._known = {}
            self._rejected = {}
        self._ledger.top_k = settings.top_k
        self._in_use = settings

    def _files_of(self, settings: config.Agent) -> AgentFiles:
        return AgentFiles(Path(settings.directory), lambda: self._clock() / NS)

    def _take(self, look: _Look, file: AgentFile, reading: Reading | None) -> None:
        owner = self._known.get(file.key)
        if owner is None:
            claim = AgentClaim(file.pid, file.start_ticks, file.uid, file.environment, file.device)
            owner = self._known[file.key] = _Owner(look.now_ns, claim)
        try:
            is_known = self._identify(owner, file, look)
        except ForeignFileError:
            # Its own process may not be listed yet, only one of another container with the same pid and start.
            if file.died_s is None and look.now_ns - owner.first_ns < PATIENCE_NS:
                look.files.add(file.key)
                file.rewind()
            else:
                self._reject(file, "foreign_owner")
            return
        if self._is_twin(owner, file, look):
            return
        look.files.add(file.key)
        if file.died_s is not None:
            self._ledger.stop_latest(file)
        if reading is not None and (not is_known or owner.job is None or self._must_wait(owner, file, look)):
            file.rewind()
        elif reading is not None and not self._add(look, owner, file, reading):
            return
        look.count(owner, file, is_heard=self._is_heard(owner, file, look))

    def _add(self, look: _Look, owner: _Owner, file: AgentFile, reading: Reading) -> bool:
        """Add what a file has gained to its owner's account; whether it may be true."""
        try:
            is_possible = self._ledger.take(
                file,
                reading,
                lambda uuid: self._place(uuid, owner, file, look),
                lambda name: self._name(name, file.uid, look),
                look.now_ns,
            )
        except LyingError:
            self._reject(file, "lying")
            look.files.discard(file.key)
            return False
        if not is_possible:
            self._note_times(owner, file)
        return True

    def _note_times(self, owner: _Owner, file: AgentFile) -> None:
        """Once a file."""
        if not owner.has_wrong_times:
            owner.has_wrong_times = True
            self._files.note(file, "wrong_times")

    def _identify(self, owner: _Owner, file: AgentFile, look: _Look) -> bool:
        """Whether it is known whose the file is, as well as it ever will be for now. Raises ForeignFileError."""
        if self._owners is None:
            return False
        owners = self._owners()
        placed = owners.job_of_agent(owner.claim, lambda pid: False not in self._listed(pid, file, look))
        if placed is not None:
            owner.placed, owner.job = placed, placed.job
            return True
        is_seen = owner.placed is not None and file.died_s is None and owners.has_seen(owner.placed.pid)
        if owner.placed is not None and is_seen and None not in self._listed(owner.placed.pid, file, look):
            owner.placed = owner.job = None  # it is there, and so is another whose file this may be
        if owner.placed is not None:
            return True
        waits = owners.can_tell and file.died_s is None and look.now_ns - owner.first_ns < PATIENCE_NS
        if not waits and (owner.job is None or file.died_s is None):
            owner.job = owners.declared_job(owner.claim)
            owner.is_own_word = not owners.can_tell
        return owner.job is not None

    def _listed(self, pid: int, file: AgentFile, look: _Look) -> set[bool | None]:
        """Whether a process is on the GPUs of which a file speaks; None of one whose list is not fresh."""
        return {self._contexts.has(uuid, pid, look.now_ns) for uuid in self._named(file)}

    def _is_twin(self, owner: _Owner, file: AgentFile, look: _Look) -> bool:
        """Whether another living file is about the same process: one process, one file.

        Of processes of which nothing is known yet, those in other containers may have the same pid and start; so may
        one that has done nothing yet.
        """
        if file.died_s is not None or not self._named(file):
            return False
        claim = owner.claim
        process: Hashable = owner.placed.pid if owner.placed is not None else None
        if process is None:
            process = (claim.uid, claim.pid, claim.start_ticks, frozenset(claim.environment.items()))
        first = look.processes.setdefault(process, claim)
        if first is claim:
            owner.twin_ns = None
            return False
        owner.twin_ns = look.now_ns if owner.twin_ns is None else owner.twin_ns
        look.files.add(file.key)
        if first.environment == claim.environment and look.now_ns - owner.twin_ns >= _TWIN_NS:
            self._reject(file, "duplicate")
        else:
            file.rewind()  # of another environment: its own process may be listed later
        return True

    def _reject(self, file: AgentFile, reason: str) -> None:
        file.reject(reason)
        self._ledger.forget(file)

    def _must_wait(self, owner: _Owner, file: AgentFile, look: _Look) -> bool:
        """Whether a process may yet appear on a GPU of which its file speaks; the file is noted where it will not.

        One that has ended before it could is believed: it may have lived between two lists.
        """
        standings = self._standings(owner, file, look)
        if "waits" in standings and file.died_s is None:
            return True
        if "foreign" in standings and not owner.is_foreign:
            owner.is_foreign = True
            self._files.note(file, "foreign_gpu")
        return False

    def _is_heard(self, owner: _Owner, file: AgentFile, look: _Look) -> bool:
        """Whether the agent's figures of itself count: its process may be, or may have been, on a GPU."""
        if owner.placed is not None or self._reach(file, look):
            return True
        return file.died_s is not None and "waits" in self._standings(owner, file, look)

    def _standings(self, owner: _Owner, file: AgentFile, look: _Look) -> set[Standing]:
        """Those of all GPUs that a file names."""
        return {self._standing(owner, file, uuid, look) for uuid in self._named(file)}

    def _standing(self, owner: _Owner, file: AgentFile, uuid: str, look: _Look) -> Standing:
        """Whether a file may speak of a GPU. Where no process can be looked up it may."""
        owners = self._owners() if self._owners is not None else None
        if owners is None or not owners.can_tell:
            return "its"
        pid = owner.placed.pid if owner.placed is not None else None
        now_ns = look.now_ns if file.died_s is None else min(round(file.died_s * NS), look.now_ns)
        return owner.gpus.standing(uuid, pid, self._contexts, owners.has_seen, now_ns)

    def _reach(self, file: AgentFile, look: _Look) -> frozenset[str]:
        """The GPUs of whose tracing a file may speak: while it names none, those that its process is known to be on."""
        owner = self._known[file.key]
        if not is_named(file):
            if owner.placed is None:
                return frozenset()
            pid = owner.placed.pid
            return frozenset(uuid for uuid in self._gpus.values() if self._contexts.has(uuid, pid, look.now_ns) is True)
        return frozenset(uuid for uuid in self._named(file) if self._standing(owner, file, uuid, look) == "its")

    def _named(self, file: AgentFile) -> list[str]:
        """The GPUs of ours that a file names."""
        gpus = self._gpus  # another thread may put others in its place
        return [gpus[uuid] for uuid in file.uuids if uuid in gpus]

    def _place(self, uuid: str, owner: _Owner, file: AgentFile, look: _Look) -> tuple[str, str] | None:
        known = self._gpus.get(uuid)
        if known is None or self._standing(owner, file, known, look) == "foreign":
            return None
        rows = self._rows(known)
        pod = pod_row(owner.claim.environment, rows) if owner.is_own_word else ""
        return known, pod or row_name(owner.job or UNPLACED, rows)

    def _name(self, name: bytes, uid: int, look: _Look) -> str | None:
        known = self._demangler.known(name)
        if known is None and look.naming.has_some_for(uid):
            began_s = time.monotonic()
            known = self._demangler.ask(name, uid)
            look.naming.spend(uid, time.monotonic() - began_s)
        return known

    def _rows(self, uuid: str) -> GpuJobs | None:
        return self._jobs.gpus.get(uuid) if self._jobs is not None else None

    def _is_in_force(self, uuid: str, job: str) -> bool:
        rows = self._rows(uuid)
        return rows is not None and any(row.job.job == job for row in rows.jobs)

    def _is_shared(self, uuid: str, job: str) -> bool:
        rows = self._rows(uuid)
        return rows is not None and any(row.job.job != job for row in rows.jobs)

    def _tell(self, state: State, reason: str) -> None:
        if self._told == (state, reason):
            return
        self._told = (state, reason)
        self._sink.put(StateChange(self._clock(), "kernels", "", state, reason))
        if state != "active":
            level = logging.INFO if state == "unsupported" else logging.WARNING
            log.log(level, "kernel agents' files are %s: %s", state, reason)


class NamingTime:
    """The time that one look has for finding names: a user gets half of what those before have left, and no more."""

    def __init__(self, left_s: float) -> None:
        self._left_s = left_s
        self._spent_s: dict[int, float] = {}

    def has_some_for(self, uid: int) -> bool:
        """Whether another name of this user's files may be looked for."""
        return self._spent_s.get(uid, 0.0) < self._left_s

    def spend(self, uid: int, seconds: float) -> None:
        """So long it took."""
        self._left_s -= seconds
        self._spent_s[uid] = self._spent_s.get(uid, 0.0) + seconds


class _Look:
    """One look at all files, and what was counted in it."""

    def __init__(self, now_ns: int, wall_ns: int) -> None:
        self.now_ns = now_ns
        self.wall_ns = wall_ns
        self.naming = NamingTime(_NAMING_S)
        self.files: set[tuple[str, int]] = set()
        self.processes: dict[Hashable, AgentClaim] = {}
        self.pids: set[int] = set()
        self.states: Counter[AgentState] = Counter()
        self.reasons: set[str] = set()
        self.overhead_ratio: float | None = None
        self.records: Counter[RecordResult] = Counter()

    def count(self, owner: _Owner, file: AgentFile, *, is_heard: bool) -> None:
        """What this file's agent says of itself; figures only where it `is_heard`: its process may be on a GPU."""
        status = file.status
        if status is None:
            return
        if is_heard:
            self._count_records(owner, file, status)
        if file.died_s is not None:
            return
        if owner.placed is not None:
            self.pids.add(owner.placed.pid)
        state: AgentState = next((known for known in get_args(AgentState) if known == status.state), "off")
        reason = status.reason
        if self.wall_ns - status.heartbeat_ns > _SILENT_NS:
            state, reason = "paused", "no_heartbeat"
        self.states[state] += 1
        if reason:
            self.reasons.add(reason)
        if is_heard and state in {"tracing", "waiting"}:
            self.overhead_ratio = max(self.overhead_ratio or 0.0, status.overhead_ratio)

    def _count_records(self, owner: _Owner, file: AgentFile, status: Status) -> None:
        before = owner.records or (status.records if file.is_old else (0, 0, 0, 0))
        for result, now, was in zip(RECORD_RESULTS, status.records, before, strict=True):
            self.records[result] += max(0, now - was)
        owner.records = status.records


def wait_after(cost_s: float) -> float:
    """Seconds until the next look after one that took so much CPU time: 2 % of a core, if that can be."""
    return min(max(PERIOD_S, cost_s / _MAX_SHARE), _LONGEST_PERIOD_S)


def _signature(mangled: str, demangled: str) -> str:
    return signature(demangled or name_within(mangled))


def _hex(uuid: str) -> str:
    """`GPU-01234567-89ab-…` as 32 digits."""
    return uuid.partition("-")[2].replace("-", "").lower()


def unreadable(error: OSError, directory: str) -> tuple[State, str]:
    """What an error at the agents' directory makes of the source, and why."""
    if isinstance(error, FileNotFoundError):
        return "unsupported", f"{directory} is not there: no kernel agent can leave its file"
    if isinstance(error, PermissionError):
        return "no_permission", f"{directory} cannot be read"
    return "failed", f"{directory}: {error.strerror}"
