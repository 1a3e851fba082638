"""Keeps the helper process for PM sampling: starts it, turns its messages into events, gives way, starts it again.

The exporter itself never loads CUPTI. Whatever the helper does (crash, hang, be refused) is a state of the source,
and people's profilers come first: while one runs, the helper does not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Final

from gpu_hpc_exporter.config import PmSampling
from gpu_hpc_exporter.model import (
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
from gpu_hpc_exporter.sources.profilers import ProfilerWatch

log = logging.getLogger(__name__)

_POLL_S: Final = 0.2
"""How often to look for profilers and requests: ncu takes 0.6 s from its start to its first kernel."""
_SETTLE_S: Final = 1.0
"""After a profiler has ended, wait so long: scripts run it again and again."""
_SILENCE_S: Final = 5.0
"""The helper is heard from once a second; one that is silent for so long hangs."""
_START_SILENCE_S: Final = 60.0
"""Initialising CUDA on a node of eight GPUs that nobody keeps awake takes half a minute."""
_FIRST_BACKOFF_S: Final = 0.5
_MAX_BACKOFF_S: Final = 60.0
_STEADY_S: Final = 60.0
_UNUSABLE_RETRY_S: Final = 600.0
_MAX_HANGS: Final = 3
_EXCLUDED_S: Final = 3600.0
_TURING: Final = (7, 5)
_HOPPER: Final = (9, 0)
"""From Hopper on GPM and PM sampling do not disturb each other, nor does DCGM; before, the counters have one owner."""
_STOP_S: Final = 2.5


class PmSampler:
    """Feeds a sink with PM sampling's windows until stopped; a sink itself, which learns of the GPUs in passing."""

    def __init__(self, sink: Sink, settings: PmSampling, interval_ns: int) -> None:
        self._sink = sink
        self._settings = settings
        self._interval_ns = interval_ns
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._idle = threading.Event()
        self._stopping = False
        self._gpus: tuple[Gpu, ...] = ()
        self._paused_until = 0.0
        self._pause_reason = ""
        self._profilers = ProfilerWatch(settings.yield_to)
        self._clear_since = 0.0
        self._next_start = 0.0
        self._backoff_s = _FIRST_BACKOFF_S
        self._hangs: dict[str, int] = {}
        self._excluded: dict[str, float] = {}
        self._told: dict[str, tuple[State, str]] = {}
        self._thread = threading.Thread(target=self._run, name="pm-sampling", daemon=True)

    def put(self, event: Event) -> None:
        """Pass an event on; a new inventory may mean other GPUs to sample."""
        self._sink.put(event)
        if isinstance(event, Inventory):
            with self._lock:
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
            self._profilers = ProfilerWatch(settings.yield_to)
            self._next_start = 0.0
        self._changed.set()

    def pause(self, seconds: float, reason: str) -> None:
        """End the helper and start none for so long; returns when it is gone, within about a second."""
        with self._lock:
            self._paused_until = time.monotonic() + seconds
            self._pause_reason = reason
        self._idle.clear()
        self._changed.set()
        if self._thread.is_alive():
            self._idle.wait(_STOP_S)

    def resume(self) -> None:
        """End a pause."""
        with self._lock:
            self._paused_until = 0.0
        self._changed.set()

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
        state, reason = self._obstacle()
        if not targets or state is not None or time.monotonic() < self._next_start:
            if state is not None:
                self._tell_all(targets, state, reason)
            self._idle.set()
            self._changed.wait(_POLL_S if targets else None)
            return
        self._sample(targets)

    def _targets(self) -> tuple[Gpu, ...]:
        """The GPUs to sample. For the others it is said why not."""
        with self._lock:
            gpus, mode = self._gpus, self._settings.mode
        if mode == "off":
            return ()
        now = time.monotonic()
        chosen = []
        for gpu in gpus:
            if gpu.parent_uuid:
                continue
            reason = _unsupported(gpu, mode)
            if reason:
                self._tell(gpu.uuid, "unsupported", reason)
            elif self._excluded.get(gpu.uuid, 0.0) > now:
                self._tell(gpu.uuid, "failed", "it made the helper process hang again and again")
            else:
                chosen.append(gpu)
        return tuple(chosen)

    def _obstacle(self) -> tuple[State | None, str]:
        """Why the helper must not run now, or None."""
        with self._lock:
            paused = time.monotonic() < self._paused_until
            reason = self._pause_reason
            gpus = self._gpus
        if paused:
            return "paused", reason
        profiler = self._profilers.poll()
        if profiler:
            self._clear_since = time.monotonic() + _SETTLE_S
            return "paused", f"{profiler} runs"
        if time.monotonic() < self._clear_since:
            return "paused", "a profiler has just ended"
        if any(_capability(gpu) < _HOPPER for gpu in gpus):
            dcgm = self._profilers.hosts_dcgm()
            if dcgm:
                return "busy", f"{dcgm} runs: before Hopper the counters have one owner"
        return None, ""

    def _sample(self, gpus: Sequence[Gpu]) -> None:
        """Run a helper until it has to end, or does."""
        with self._lock:
            settings, interval_ns = self._settings, self._interval_ns
        order = Order(interval_ns, [Target(gpu.uuid, gpu.links, _has_gpm(gpu)) for gpu in gpus])
        try:
            helper = HelperProcess(settings.helper, settings.library, order)
        except OSError as error:
            self._tell_all(gpus, "failed", f"the helper process cannot be started: {error.strerror or error}")
            self._back_off()
            return
        self._idle.clear()
        began = time.monotonic()
        problem = "the exporter's own thread failed"
        try:
            problem = self._follow(helper, gpus)
        finally:
            gone = helper.end()
            if time.monotonic() - began > _STEADY_S:
                self._backoff_s = _FIRST_BACKOFF_S
            if not gone:
                problem = f"the helper process {helper.pid} does not end"
            if problem:
                log.warning("PM sampling: %s (%s): starting it again", problem, helper.exit_text())
                self._tell_all(gpus, "failed", problem)
                self._sink.put(SamplingIncident(time.monotonic_ns(), "", "helper_restarted"))
                self._back_off()

    def _follow(self, helper: HelperProcess, gpus: Sequence[Gpu]) -> str:
        """Take the helper's messages until it has to end (""), or should not go on (why)."""
        ear = _Ear()
        next_look = 0.0
        while True:
            try:
                messages = helper.read(_POLL_S)
            except ProtocolError as error:
                return str(error)
            if messages is None:
                return "the helper process has ended"
            for message in messages:
                ear.hear(message)
                self._take(message, gpus)
            if ear.is_deaf():
                self._note_hang(ear.uuid)
                return f"the helper process hangs ({ear.doing or 'decode'})"
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
        state, reason = self._obstacle()
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
                if state == "active":
                    self._hangs.pop(uuid, None)
                self._tell(uuid, state, reason)
            case Sampling(uuid, interval_ns, l2_definition):
                self._sink.put(IntervalInForce(now_ns, uuid, "pm_sampling", interval_ns, l2_definition))
            case Happened(uuid, incident):
                self._sink.put(SamplingIncident(now_ns, uuid, incident))
            case Rejected(uuid, reading, reason):
                self._sink.put(ReadingRejected(now_ns, uuid, reading, reason))
            case Unusable(state, reason):
                self._tell_all(gpus, state, reason)
                self._next_start = time.monotonic() + _UNUSABLE_RETRY_S
            case Ready(library, version):
                log.info("PM sampling uses %s (CUPTI %s)", library, version)
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
        self._hangs[uuid] = self._hangs.get(uuid, 0) + 1
        if self._hangs[uuid] >= _MAX_HANGS:
            self._hangs[uuid] = 0
            self._excluded[uuid] = time.monotonic() + _EXCLUDED_S

    def _back_off(self) -> None:
        self._next_start = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)

    def _tell_all(self, gpus: Sequence[Gpu], state: State, reason: str) -> None:
        for gpu in gpus:
            self._tell(gpu.uuid, state, reason)

    def _tell(self, uuid: str, state: State, reason: str) -> None:
        if self._told.get(uuid) == (state, reason):
            return
        self._told[uuid] = (state, reason)
        if state not in ("active", "paused"):
            log.warning("%s: pm_sampling is %s: %s", uuid, state, reason)
        self._sink.put(StateChange(time.monotonic_ns(), "pm_sampling", uuid, state, reason))


class _Ear:
    """What the helper was last heard to be about, and whether it has been silent for too long."""

    def __init__(self) -> None:
        self.doing = "load CUDA"
        self.uuid = ""
        self._patience_s = _START_SILENCE_S
        self._heard = time.monotonic()

    def hear(self, message: FromHelper) -> None:
        """Note a message."""
        self._heard = time.monotonic()
        self.doing, self.uuid = (message.doing, message.uuid) if isinstance(message, Alive) else ("", "")
        if isinstance(message, Ready):
            self._patience_s = _SILENCE_S

    def is_deaf(self) -> bool:
        """Whether nothing was heard for too long."""
        return time.monotonic() - self._heard > self._patience_s


def _capability(gpu: Gpu) -> tuple[int, int]:
    """Compute capability, (0, 0) where unknown."""
    major, _, minor = gpu.compute_capability.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else (0, 0)


def _has_gpm(gpu: Gpu) -> bool:
    return _capability(gpu) >= _HOPPER


def _unsupported(gpu: Gpu, mode: str) -> str:
    """Why a GPU is not sampled at all, or ""."""
    if gpu.mig_mode == "enabled":
        return "MIG is enabled: PM sampling needs the whole GPU"
    if _capability(gpu) < _TURING:
        return "PM sampling needs a Turing GPU or later (compute capability 7.5)"
    if mode == "auto" and _capability(gpu) < _HOPPER:
        return "off before Hopper, where it would keep other profilers out: pm_sampling.mode: required turns it on"
    return ""
