"""Keeps the helper process for PM sampling: starts it, turns its messages into events, gives way, starts it again.

The exporter itself never loads CUPTI. Whatever the helper does (crash, hang, be refused) is a state of the source,
and people's profilers come first: while one runs, the helper does not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.config import PmSampling
from gpu_hpc_exporter.model import (
    NS,
    Event,
    Gpu,
    IntervalInForce,
    Inventory,
    ReadingRejected,
    SamplingIncident,
    Sink,
    State,
    StateChange,
    Window,
)
from gpu_hpc_exporter.sources.pm_sampling.metric_sets import GPM_FLOOR_NS
from gpu_hpc_exporter.sources.pm_sampling.process import HelperProcess
from gpu_hpc_exporter.sources.pm_sampling.protocol import (
    Alive,
    FromHelper,
    GpuState,
    Happened,
    Order,
    ProtocolError,
    Ready,
    Rejected,
    Sampling,
    Target,
    Unusable,
    Windows,
)
from gpu_hpc_exporter.sources.procfs import PROC
from gpu_hpc_exporter.sources.profilers import ProfilerWatch

log = logging.getLogger(__name__)

_POLL_S: Final = 0.2
"""How often to look for profilers and requests: from its start to its first kernel ncu takes 0.6 s, of which the
helper's end needs 0.12."""
_NOTHING_TO_DO_S: Final = 60.0
_UNUSABLE_RETRY_S: Final = 600.0
_MAX_HANGS: Final = 3
_EXCLUDED_S: Final = 3600.0
_FUTURE_NS: Final = NS
"""Windows that end later than this from now are no windows."""
_BEFORE_NS: Final = NS
"""Nor are windows that begin longer than this before the helper was started."""
_MAX_STRETCH: Final = 64
"""Nor those longer than so many intervals and a second: halved sampling makes them 8 times as long, and chips that
count cycles in place of time up to 8 times when they idle."""
STARTING: Final = "the helper process is starting"
"""Why a GPU of which nothing was told yet is paused, until its helper's first word of it."""
_MAX_LINES: Final = 6
_LINES_S: Final = 60.0
"""So many state changes of a GPU are logged in that time: a helper's reasons may change for ever."""
_TURING: Final = (7, 5)
_HOPPER: Final = (9, 0)
"""From Hopper on GPM and PM sampling do not disturb each other, nor does DCGM; before, the counters have one owner."""
_STOP_S: Final = 2.5


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, in seconds.

    settle: after a profiler has ended, since scripts run it again and again.
    silence: the helper is heard from once a second; one that is silent for so long hangs.
    start: initialising CUDA on a node of eight GPUs that nobody keeps awake takes half a minute.
    first_backoff, max_backoff: until a helper that ended unasked is started again; after `steady` it is the first time.
    """

    settle: float = 1.0
    silence: float = 5.0
    start: float = 60.0
    first_backoff: float = 0.5
    max_backoff: float = 60.0
    steady: float = 60.0


class PmSampler:
    """Feeds a sink with PM sampling's windows until stopped; a sink itself, which learns of the GPUs in passing."""

    def __init__(
        self,
        sink: Sink,
        settings: PmSampling,
        interval_ns: int,
        patience: Patience = Patience(),
        procfs: Path = PROC,
    ) -> None:
        self._sink = sink
        self._patience = patience
        self._settings = settings
        self._interval_ns = interval_ns
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._idle = threading.Event()
        self._stopping = False
        self._gpus: tuple[Gpu, ...] = ()
        self._returned: set[str] = set()
        """GPUs that were away meanwhile: whoever forgot their states has to be told again."""
        self._paused_until = 0.0
        self._pause_reason = ""
        self._procfs = procfs
        self._profilers = ProfilerWatch(settings.yield_to, procfs)
        self._clear_since = 0.0
        self._next_start = 0.0
        self._backoff_s = patience.first_backoff
        self._hangs: dict[str, list[float]] = {}
        self._excluded: dict[str, float] = {}
        self._told: dict[str, tuple[State, str]] = {}
        self._logged: dict[str, list[float]] = {}
        self.library = ""
        """The library that the last helper has loaded, for people."""
        self._undead: HelperProcess | None = None
        """The last helper that did not end."""
        self._thread = threading.Thread(target=self._run, name="pm-sampling", daemon=True)

    def put(self, event: Event) -> None:
        """Pass an event on; a new inventory may mean other GPUs to sample."""
        self._sink.put(event)
        if isinstance(event, Inventory):
            with self._lock:
                if event.gpus == self._gpus:
                    return
                self._returned |= {gpu.uuid for gpu in event.gpus} - {gpu.uuid for gpu in self._gpus}
                self._gpus = event.gpus
            self._changed.set()

    def start(self) -> None:
        """Begin in the background."""
        self._thread.start()

    def stop(self) -> bool:
        """End the helper and the thread; whether both are gone."""
        self._stopping = True
        self._changed.set()
        if self._thread.ident is None:
            return True
        self._thread.join(_STOP_S)
        return not self._thread.is_alive()

    def apply(self, settings: PmSampling, interval_ns: int) -> None:
        """Go on with other settings."""
        with self._lock:
            if (settings, interval_ns) == (self._settings, self._interval_ns):
                return
            self._settings = settings
            self._interval_ns = interval_ns
            self._profilers = ProfilerWatch(settings.yield_to, self._procfs)
            self._next_start = 0.0
        self._changed.set()

    def pause(self, seconds: float, reason: str) -> bool:
        """End the helper and start none for so long; whether it is gone, within about a second."""
        with self._lock:
            self._paused_until = time.monotonic() + seconds
            self._pause_reason = reason
        self._idle.clear()
        self._changed.set()
        if self._thread.is_alive():
            return self._idle.wait(_STOP_S) and self._undead is None
        return self._undead is None

    def resume(self) -> None:
        """End a pause, and any wait before the next try."""
        with self._lock:
            self._paused_until = 0.0
            self._next_start = 0.0
            self._backoff_s = self._patience.first_backoff
        self._changed.set()

    def has_finer_windows(self, uuid: str) -> bool:
        """Whether a GPU's windows come, and are shorter than GPM's can be."""
        state, _ = self._told.get(uuid, (None, ""))
        return state == "active" and self._interval_ns < GPM_FLOOR_NS

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._wait_or_sample()
            except Exception:
                log.exception("PM sampling failed unexpectedly: beginning anew")
                self._tell_all(self._targets(), "failed", "internal_error")
                self._back_off()
        self._idle.set()

    def _wait_or_sample(self) -> None:
        self._changed.clear()
        targets = self._targets()
        state, reason = self._obstacle(targets)
        if not targets or state is not None or time.monotonic() < self._next_start:
            if state is not None:
                self._tell_all(targets, state, reason)
            if self._undead is not None and self._undead.end():
                self._undead = None
            self._idle.set()
            self._changed.wait(_POLL_S if targets else _NOTHING_TO_DO_S)
            return
        self._sample(targets)

    def _targets(self) -> tuple[Gpu, ...]:
        """The GPUs to sample. For the others it is said why not."""
        with self._lock:
            gpus, mode = self._gpus, self._settings.mode
            for uuid in self._returned:
                self._told.pop(uuid, None)
            self._returned.clear()
        now = time.monotonic()
        self._excluded = {uuid: until for uuid, until in self._excluded.items() if until > now}
        chosen = []
        for gpu in gpus:
            if gpu.parent_uuid:
                continue
            reason = why_not_sampled(gpu, mode)
            if reason:
                self._tell(gpu.uuid, "unsupported", reason)
            elif gpu.uuid in self._excluded:
                self._tell(gpu.uuid, "failed", "it made the helper process hang again and again")
            else:
                chosen.append(gpu)
        return tuple(chosen)

    def _obstacle(self, targets: Sequence[Gpu]) -> tuple[State | None, str]:
        """Why the helper must not run now, or None."""
        with self._lock:
            paused = time.monotonic() < self._paused_until
            reason = self._pause_reason
        if paused:
            return "paused", reason
        profiler = self._profilers.poll()
        if profiler:
            self._clear_since = time.monotonic() + self._patience.settle
            # Without its pid, which would make another series of each run.
            return "paused", f"{profiler.partition(' (pid ')[0]} runs"
        if time.monotonic() < self._clear_since:
            return "paused", "a profiler has just ended"
        if any(_capability(gpu) < _HOPPER for gpu in targets):
            dcgm = self._profilers.hosts_dcgm()
            if dcgm:
                return "busy", f"{dcgm} runs: before Hopper the counters have one owner"
        return None, ""

    def _sample(self, gpus: Sequence[Gpu]) -> None:
        """Run a helper until it has to end, or does."""
        with self._lock:
            settings, interval_ns = self._settings, self._interval_ns
        started_ns = time.monotonic_ns()
        order = Order(interval_ns, [Target(gpu.uuid, gpu.links, _has_gpm(gpu)) for gpu in gpus])
        try:
            helper = HelperProcess(settings.helper, settings.library, order)
        except OSError as error:
            self._tell_all(gpus, "failed", f"the helper process cannot be started: {error.strerror or error}")
            self._back_off()
            return
        self._idle.clear()
        for gpu in gpus:
            if gpu.uuid not in self._told:
                self._tell(gpu.uuid, "paused", STARTING)
        bounds = _Bounds(frozenset(gpu.uuid for gpu in gpus), started_ns - _BEFORE_NS, _MAX_STRETCH * interval_ns + NS)
        began = time.monotonic()
        problem = "the exporter's own thread failed"
        try:
            problem = self._follow(helper, gpus, bounds)
        finally:
            gone = helper.end()
            if time.monotonic() - began > self._patience.steady:
                self._backoff_s = self._patience.first_backoff
            if not gone:
                self._undead = helper
                problem = f"the helper process {helper.pid} does not end"
            if problem:
                log.warning("PM sampling: %s (%s): starting it again", problem, helper.exit_text())
                self._tell_all(gpus, "failed", problem)
                self._sink.put(SamplingIncident(time.monotonic_ns(), "", "helper_restarted"))
                self._back_off()

    def _follow(self, helper: HelperProcess, gpus: Sequence[Gpu], bounds: _Bounds) -> str:
        """Take the helper's messages until it has to end (""), or should not go on (why)."""
        ear = _Ear(self._patience)
        next_look = 0.0
        while True:
            try:
                messages = helper.read(_POLL_S)
                for message in messages or ():
                    ear.hear(message)
                    bounds.check(message)
                    self._take(message, gpus)
            except ProtocolError as error:
                return str(error)
            if messages is None:
                return "" if self._stopping else "the helper process has ended"
            if ear.is_deaf():
                self._note_hang(ear.uuid)
                return f"the helper process hangs ({ear.doing or 'decode'}{ear.uuid and f' of {ear.uuid}'})"
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _POLL_S
                if self._has_to_end(gpus):
                    return ""
            if time.monotonic() < self._next_start:
                return ""  # it said that it is of no use here

    def _has_to_end(self, gpus: Sequence[Gpu]) -> bool:
        """Whether a stop, a pause, a profiler, other GPUs or other settings are due."""
        if self._stopping or self._changed.is_set():
            return True
        if any(until <= time.monotonic() for until in self._excluded.values()):
            return True
        state, reason = self._obstacle(gpus)
        if state is None:
            return False
        log.info("PM sampling gives way: %s", reason)
        self._tell_all(gpus, state, reason)
        return True

    def _take(self, message: FromHelper, gpus: Sequence[Gpu]) -> None:
        now_ns = time.monotonic_ns()
        match message:
            case Windows():
                self._put_windows(message)
            case GpuState(uuid, state, reason):
                self._tell(uuid, state, reason)
            case Sampling(uuid, interval_ns, l2_definition):
                self._sink.put(IntervalInForce(now_ns, uuid, "pm_sampling", interval_ns, l2_definition))
            case Happened(uuid, incident):
                self._sink.put(SamplingIncident(now_ns, uuid, incident))
            case Rejected(uuid, reading, reason):
                self._sink.put(ReadingRejected(now_ns, uuid, reading, reason))
            case Unusable(state, reason):
                self._tell_all(gpus, state, reason)
                if state == "failed":  # such as a fabric manager that is still starting
                    self._back_off()
                else:
                    self._next_start = time.monotonic() + _UNUSABLE_RETRY_S
            case Ready(library, version):
                self.library = f"{library} (CUPTI {version})"
                log.log(self._level(logging.INFO, ""), "PM sampling uses %s", self.library)
            case Alive():
                pass

    def _put_windows(self, windows: Windows) -> None:
        quantities = tuple(windows.values)
        rows = zip(windows.ends_ns, windows.durations_ns, *windows.values.values(), strict=True)
        for end_ns, duration_ns, *values in rows:
            window = Window(
                windows.uuid, "pm_sampling", end_ns, duration_ns, dict(zip(quantities, values, strict=True))
            )
            self._sink.put(window)

    def _note_hang(self, uuid: str) -> None:
        """A GPU for which the helper hangs again and again is left out for a while, so that the others are served."""
        if not uuid:
            return
        now = time.monotonic()
        hangs = [*(at for at in self._hangs.get(uuid, ()) if now - at < _EXCLUDED_S), now]
        if len(hangs) >= _MAX_HANGS:
            self._excluded[uuid] = now + _EXCLUDED_S
            hangs = []
        self._hangs[uuid] = hangs

    def _back_off(self) -> None:
        self._next_start = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, self._patience.max_backoff)

    def _tell_all(self, gpus: Sequence[Gpu], state: State, reason: str) -> None:
        for gpu in gpus:
            self._tell(gpu.uuid, state, reason)

    def _tell(self, uuid: str, state: State, reason: str) -> None:
        if self._told.get(uuid) == (state, reason):
            return
        is_known = (state, reason) in self._told.values()
        self._told[uuid] = (state, reason)
        if state in ("no_permission", "unsupported"):  # as the host is set up: one line for all of its GPUs
            level = logging.WARNING if state == "no_permission" else logging.INFO
            log.log(
                logging.DEBUG if is_known else self._level(level, uuid),
                "%s: pm_sampling is %s: %s",
                uuid,
                state,
                reason,
            )
        elif state not in ("active", "paused"):
            log.log(self._level(logging.WARNING, uuid), "%s: pm_sampling is %s: %s", uuid, state, reason)
        self._sink.put(StateChange(time.monotonic_ns(), "pm_sampling", uuid, state, reason))

    def _level(self, level: int, uuid: str) -> int:
        """At which level to log a line about a GPU: DEBUG where there were too many lately."""
        now = time.monotonic()
        lines = [at for at in self._logged.get(uuid, ()) if now - at < _LINES_S]
        if len(lines) < _MAX_LINES:
            lines.append(now)
        else:
            level = logging.DEBUG
        self._logged[uuid] = lines
        return level


class _Ear:
    """What the helper was last heard to be about, and whether it has been silent for too long."""

    def __init__(self, patience: Patience) -> None:
        self.doing = "load CUDA"
        self.uuid = ""
        self._patience = patience
        self._patience_s = patience.start
        self._heard = time.monotonic()

    def hear(self, message: FromHelper) -> None:
        """Note a message."""
        self._heard = time.monotonic()
        if isinstance(message, Alive):
            self.doing, self.uuid = message.doing, message.uuid
        elif isinstance(message, Ready | Windows):
            self.doing, self.uuid = "", ""
        if isinstance(message, Ready):
            self._patience_s = self._patience.silence

    def is_deaf(self) -> bool:
        """Whether nothing was heard for too long."""
        return time.monotonic() - self._heard > self._patience_s


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What a helper's messages can be about: the GPUs that were ordered, windows since its start of about a length."""

    uuids: AbstractSet[str]
    earliest_ns: int
    longest_ns: int

    def check(self, message: FromHelper) -> None:
        """Raise ProtocolError for what cannot be."""
        uuid = getattr(message, "uuid", "")
        if uuid not in self.uuids and (uuid or not isinstance(message, Alive | Ready | Unusable)):
            raise ProtocolError("the helper speaks of a GPU that it was not told to sample")
        if not isinstance(message, Windows) or not message.ends_ns:
            return
        if max(message.ends_ns) > time.monotonic_ns() + _FUTURE_NS:
            raise ProtocolError("the helper sent windows from the future")
        if max(message.durations_ns) > self.longest_ns:
            raise ProtocolError("the helper sent windows far longer than the interval")
        if min(map(sub, message.ends_ns, message.durations_ns)) < self.earliest_ns:
            raise ProtocolError("the helper sent windows from before it was started")


def _capability(gpu: Gpu) -> tuple[int, int]:
    """Compute capability, (0, 0) where unknown."""
    major, _, minor = gpu.compute_capability.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def _has_gpm(gpu: Gpu) -> bool:
    return _capability(gpu) >= _HOPPER


def why_not_sampled(gpu: Gpu, mode: str) -> str:
    """Why a GPU is not sampled at all, or ""."""
    if mode == "off":
        return "pm_sampling.mode is off"
    if gpu.mig_mode == "enabled":
        return "MIG is enabled: PM sampling needs the whole GPU"
    if _capability(gpu) < _TURING:
        return "PM sampling needs a Turing GPU or later (compute capability 7.5)"
    if mode == "auto" and _capability(gpu) < _HOPPER:
        return "off before Hopper, where it would keep other profilers out: pm_sampling.mode: required turns it on"
    return ""
