"""PM sampling of one GPU over its whole life: tries, proves itself, gives up what does not deliver, recovers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from gpu_hpc_exporter.model import NS, Incident, Quantity, State
from gpu_hpc_exporter.sources.cupti import Cupti, CuptiError
from gpu_hpc_exporter.sources.pm_sampling.clock import DeviceClock
from gpu_hpc_exporter.sources.pm_sampling.libraries import Version
from gpu_hpc_exporter.sources.pm_sampling.metric_sets import (
    CORE,
    MetricSet,
    UnsupportedError,
    choose,
    to_quantities,
)
from gpu_hpc_exporter.sources.pm_sampling.protocol import (
    MAX_TEXT,
    Alive,
    FromHelper,
    GpuState,
    Happened,
    Rejected,
    Sampling,
    Target,
    Windows,
)
from gpu_hpc_exporter.sources.pm_sampling.session import Decoded, GpuSession, MetricsRefusedError, Sample

log = logging.getLogger(__name__)

MAX_WINDOW_NS: Final = 100_000_000
"""Longest hardware window: longer intervals are served by several of them."""
_PERIOD_NS: Final = 1_473_000_000
"""How often windows are decoded: each time costs 2.5 ms however few there are (measured). Not a whole number of
windows, so that over several decodes the newest window is seen at every age, which is what tells the GPU's clock."""
_SHORT_PERIOD_NS: Final = 485_300_000
_SHORT_NS: Final = 5_000_000
_PROOF_NS: Final = NS
"""A set that has delivered no window by then never will: so counters of links that are down show themselves."""
_SILENCE_NS: Final = 3 * NS
"""A session that delivers no window for so long has broken down, though every call succeeds."""
_MAX_BREAKDOWNS: Final = 3
"""A set that has delivered before is not at fault at once: first the session is made anew so often."""
_STEADY_NS: Final = 60 * NS
"""After so long without an error the next one is the first."""
_SETTLE_STEPS: Final = 8
_MAX_HALVINGS: Final = 3
_RECOVERY_NS: Final = 60 * NS
"""Without an overflow for so long, halved sampling goes back one step."""
_FIRST_BACKOFF_NS: Final = NS // 2
_MAX_BACKOFF_NS: Final = 30 * NS
_DENIED_RETRY_NS: Final = 600 * NS
_SLOW_SHARE: Final = 0.05
_MAX_SLOW: Final = 3
"""Decodes in a row that take more than a twentieth of the time: some counters stream a record per SM when they
overflow (measured: 90 ms a decode in place of 6)."""


class Session(Protocol):
    """What is wanted of a GpuSession."""

    def start(self) -> None: ...
    def decode(self) -> Decoded: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...


class Device(Protocol):
    """One GPU that can be sampled, of a chip that the library of this version knows by name."""

    @property
    def version(self) -> Version: ...
    @property
    def chip(self) -> str: ...
    def open(self, metric_set: MetricSet, interval_ns: int, windows_per_decode: int) -> Session: ...


@dataclass(frozen=True, slots=True)
class CuptiDevice:
    """A GPU as CUPTI sees it: by CUDA's ordinal."""

    cupti: Cupti
    version: Version
    ordinal: int
    chip: str

    def open(self, metric_set: MetricSet, interval_ns: int, windows_per_decode: int) -> Session:
        """A session to start. Raises CuptiError and MetricsRefusedError."""
        return GpuSession(self.cupti, self.ordinal, metric_set, interval_ns, windows_per_decode)


def period_ns(interval_ns: int) -> int:
    """How often windows of this length are decoded."""
    return _SHORT_PERIOD_NS if interval_ns < _SHORT_NS else max(_PERIOD_NS, interval_ns)


class GpuSampling:
    """Samples one GPU. `step` does what is due, at `due_ns` of CLOCK_MONOTONIC, and sends what came of it.

    An error ends the session, never the sampling: it is told as a state and tried again, ever more seldom.
    """

    def __init__(
        self,
        device: Device,
        target: Target,
        interval_ns: int,
        send: Callable[[FromHelper], None],
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._device = device
        self._now_ns = now_ns
        self.uuid = target.uuid
        self._wanted_ns = min(interval_ns, MAX_WINDOW_NS)
        self._send = send
        self.due_ns: int | None = now_ns()
        """When `step` is wanted next; None: never again."""
        self._session: Session | None = None
        self._state: tuple[State, str] | None = None
        self._halvings = 0
        self._failures = 0
        self._slow = 0
        self._overflowed_ns = 0
        self._active_ns: int | None = None
        self._set: MetricSet | None = None
        self._proven: MetricSet | None = None
        """The set that last delivered."""
        try:
            self._set = choose(device.chip, device.version, target.links, self._wanted_ns, has_gpm=target.has_gpm)
        except UnsupportedError as error:
            self._give_up(str(error))
        self._full_set = self._set

    def step(self) -> None:
        """Open a session, or decode what has come."""
        try:
            if self._session is None:
                self._send(Alive("set up PM sampling", self.uuid))
                self._open()
            else:
                self._decode(self._session)
        except CuptiError as error:
            self._failed(error)

    def stop(self) -> None:
        """End sampling as fast as can be: the process ends after, which frees the rest."""
        if self._session is not None:
            self._session.stop()

    @property
    def _interval_ns(self) -> int:
        return self._wanted_ns << self._halvings

    def _open(self) -> None:
        if self._set is None:
            return
        windows_per_decode = max(1, period_ns(self._interval_ns) // self._interval_ns)
        try:
            session = self._device.open(self._set, self._interval_ns, windows_per_decode)
        except MetricsRefusedError as refusal:
            self._go_without(self._set, refusal)
            return
        session.start()
        self._session = session
        self._began_ns = self._came_ns = self._now_ns()
        self._clock = DeviceClock(self._interval_ns)
        self._waiting: list[Sample] = []
        self._last_end = 0
        self._is_first = True
        self._slow = 0
        self._send(Sampling(self.uuid, self._interval_ns, self._set.l2_definition))
        self.due_ns = self._began_ns + min(2 * self._interval_ns, _PERIOD_NS)

    def _go_without(self, metric_set: MetricSet, refusal: MetricsRefusedError) -> None:
        """Try again without what the library refused; a core counter that it does not know is not passed over."""
        lost = [part for part, names in metric_set.metrics.items() if set(names) & set(refusal.names)]
        core = [name for part in lost if part in CORE for name in metric_set.metrics[part]]
        if core:
            self._give_up(f"the library does not know {', '.join(core)}")
        elif lost:
            log.info("GPU %s: the library does not know %s", self.uuid, refusal)
            self._set = metric_set.without(*lost)
        else:
            self._reduce(str(refusal))

    def _decode(self, session: Session) -> None:
        before_ns = self._now_ns()
        decoded = session.decode()
        samples = self._fresh(decoded.samples)
        if samples:
            self._clock.observe(samples[-1][1], before_ns)
            self._came_ns = before_ns
        self._waiting += samples
        if decoded.overflow:
            self._overflow()
            return
        now_ns = self._now_ns()
        if not self._clock.settled:
            self._settle(now_ns)
            return
        self._tell()
        if now_ns - self._came_ns > max(_SILENCE_NS, 4 * self._interval_ns):
            self._break_down("no window comes any more")
            return
        self._watch_cost(now_ns - before_ns)
        if self._session is None:
            return
        if self._halvings and now_ns - self._overflowed_ns > _RECOVERY_NS:
            self._overflowed_ns = now_ns
            self._change_rate(self._halvings - 1)
            return
        self.due_ns = before_ns + period_ns(self._interval_ns)

    def _settle(self, now_ns: int) -> None:
        """At the start, look often until a window or two have come: that tells the GPU's clock, and that they come."""
        since_ns = now_ns - self._began_ns
        if self._waiting and since_ns > min(4 * self._interval_ns, _PROOF_NS):
            self._clock.settle()
            self._active_ns = now_ns
            self._proven = self._set
            self._set_state("active", self._set.shortfall if self._set else "")
            self._tell()
        elif not self._waiting and since_ns > max(_PROOF_NS, 4 * self._interval_ns):
            if self._is_proven and self._failures < _MAX_BREAKDOWNS:
                self._break_down("no window comes any more")
            else:
                self._reduce("no window came within a second")
            return
        self.due_ns = now_ns + self._interval_ns // _SETTLE_STEPS * 3 if not self._clock.settled else now_ns + NS // 4

    def _fresh(self, samples: Iterable[Sample]) -> list[Sample]:
        """Samples that were not told before. A session's first one begins at some time before the session."""
        fresh = []
        for sample in samples:
            if sample[0] < self._last_end - self._interval_ns // 2 or sample[1] <= sample[0]:
                continue
            self._last_end = sample[1]
            if self._is_first:
                self._is_first = False
                continue
            fresh.append(sample)
        return fresh

    def _tell(self) -> None:
        """Send the windows that wait; in one frame as long as they have the same values."""
        if self._set is None:
            return
        frame: Windows | None = None
        for begin, end, raw in self._waiting:
            values, rejected = to_quantities(self._set, raw, (end - begin) / NS)
            for rejection in rejected:
                self._send(Rejected(self.uuid, rejection.part, rejection.problem))
            if frame is not None and frame.values.keys() != values.keys():
                self._send(frame)
                frame = None
            if frame is None:
                columns: dict[Quantity, list[float]] = {quantity: [] for quantity in values}
                frame = Windows(self.uuid, [], [], columns)
            frame.ends_ns.append(self._clock.to_monotonic(end))
            frame.durations_ns.append(end - begin)
            for quantity, value in values.items():
                frame.values[quantity].append(value)
        self._waiting = []
        if frame is not None:
            self._send(frame)

    def _watch_cost(self, spent_ns: int) -> None:
        """Give up counters that make decoding dear. Short windows are dear by nature; the core stays at any cost."""
        if (
            self._set is None
            or not self._set.reduced()[1]
            or self._interval_ns < _SHORT_NS
            or spent_ns < _SLOW_SHARE * period_ns(self._interval_ns)
        ):
            self._slow = 0
            return
        self._slow += 1
        if self._slow >= _MAX_SLOW:
            self._reduce(f"a decode takes {spent_ns // 1_000_000} ms")

    def _overflow(self) -> None:
        """Windows are lost. A new set has not proved itself; a proved one samples half as often from now on."""
        self._count("overflow")
        self._overflowed_ns = self._now_ns()
        if self._clock.settled:
            self._tell()
        if not self._is_proven or self._halvings == _MAX_HALVINGS:
            self._reduce("the hardware buffer overflows")
        else:
            self._change_rate(self._halvings + 1)

    def _change_rate(self, halvings: int) -> None:
        if halvings > self._halvings:
            self._count("rate_halved")
        self._halvings = halvings
        log.warning("GPU %s: PM sampling windows are now %g ms", self.uuid, self._interval_ns / 1e6)
        self._close()
        self.due_ns = self._now_ns()

    def _reduce(self, why: str) -> None:
        """Go on with fewer counters, in the order of what is missed least; with the core alone, later."""
        self._close()
        if self._set is None:
            return
        self._set, gone = self._set.reduced()
        if gone:
            self._count("set_reduced")
            log.warning("GPU %s: %s: going on without %s", self.uuid, why, ", ".join(gone))
            self.due_ns = self._now_ns()
        else:
            # What the core alone does not cure was not the fault of the other counters.
            self._set, self._proven = self._full_set, None
            self._break_down(why)

    def _break_down(self, why: str) -> None:
        """End a session that does not deliver and try again later."""
        self._close()
        self._set_state("failed", why)
        self._back_off()

    @property
    def _is_proven(self) -> bool:
        return self._proven is not None and self._set is self._proven

    def _failed(self, error: CuptiError) -> None:
        if error.name == "out_of_memory" and self._session is not None:
            # CUPTI's answer to a full hardware buffer when it decodes.
            self._overflow()
            return
        self._close()
        if error.unsupported:
            self._give_up(str(error))
        elif error.busy:
            self._set_state("busy", "another process holds the GPU's counters")
            self._back_off()
        elif error.denied:
            self._set_state("no_permission", DENIED)
            self.due_ns = self._now_ns() + _DENIED_RETRY_NS
        else:
            self._set_state("failed", str(error))
            self._back_off()

    def _back_off(self) -> None:
        if self._active_ns is not None and self._now_ns() - self._active_ns > _STEADY_NS:
            self._failures = 0
        self._active_ns = None
        self.due_ns = self._now_ns() + min(_FIRST_BACKOFF_NS << min(self._failures, 16), _MAX_BACKOFF_NS)
        self._failures += 1

    def _give_up(self, reason: str) -> None:
        self._set_state("unsupported", reason)
        self.due_ns = None

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _count(self, incident: Incident) -> None:
        self._send(Happened(self.uuid, incident))

    def _set_state(self, state: State, reason: str) -> None:
        reason = reason[:MAX_TEXT]
        if self._state != (state, reason):
            self._state = (state, reason)
            self._send(GpuState(self.uuid, state, reason))


DENIED: Final = (
    "reading the counters is for administrators here: load the driver with NVreg_RestrictProfilingToAdminUsers=0, "
    "or give the helper CAP_SYS_ADMIN (CAP_PERFMON on drivers that know it)"
)
"""The one line for an administrator."""
