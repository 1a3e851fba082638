"""Totals of one GPU: windows and readings added up in integers, so that nothing is lost to rounding.

At 4.8 TB/s a double stops counting single bytes after half an hour; Python's integers never do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from gpu_hpc_exporter.diagnosis.classify import CLASSES, BottleneckClass, classify
from gpu_hpc_exporter.diagnosis.intensity import UNITS, Peaks, Unit, intensities, shares
from gpu_hpc_exporter.model import (
    CLOCK_EVENT_PREFIX,
    COUNT_QUANTITIES,
    CUMULATIVE_READINGS,
    NS,
    QUANTITIES,
    READINGS,
    SLOWDOWN_READINGS,
    Gpu,
    Quantity,
    Reading,
    Readings,
    Window,
    WindowSource,
    WindowsRejected,
)
from gpu_hpc_exporter.sources.values import RisingCounter

NANO: Final = 1_000_000_000
"""Ratios are added up in units of 1e-9, far below what the counters resolve."""

HISTOGRAM_BOUNDS: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.6, 0.7, 0.75, 0.85, 0.9, 0.95, 1.0)
MIN_STALE_NS: Final = 5 * NS
"""Values vanish after max(2 windows, 5 s) without a new one: never frozen, never 0."""
MAX_XIDS: Final = 64
"""Different Xids remembered per GPU; the kernel log is input from outside."""
_CLOCK_EVENTS: Final = tuple(
    (r, r.removeprefix(CLOCK_EVENT_PREFIX)) for r in READINGS if r.startswith(CLOCK_EVENT_PREFIX)
)
_CHECKPOINT_NS: Final = NS
_MAX_READING_GAP_NS: Final = 5 * NS


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per bucket of `HISTOGRAM_BOUNDS` (the last one is +Inf, not cumulated) and the sum in 1e-9."""

    counts: tuple[int, ...]
    sum_nano: int


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """What one GPU's totals were at one moment; times in integer nanoseconds.

    `quantities`: integral of each ratio over time in ns, or the amount of each count. `gauges` and
    `intensities`: means over the gauge window, `recent_class_ns`: its time by class; empty where windows
    stopped. `readings`: empty when stale.
    """

    gpu: Gpu
    quantities: Mapping[Quantity, int]
    observed_ns: int
    source_observed_ns: Mapping[WindowSource, int]
    class_ns: Mapping[BottleneckClass, int]
    recent_class_ns: Mapping[BottleneckClass, int]
    histograms: Mapping[Unit, Histogram]
    gauges: Mapping[Quantity, float]
    sm_utilization: float | None
    intensities: Mapping[Unit, float]
    windows: Mapping[tuple[WindowSource, str], int]
    last_window_ns: Mapping[WindowSource, int]
    intervals_ns: Mapping[WindowSource, int]
    readings: Mapping[Reading, float]
    nvml_busy_ns: int | None
    clock_event_ns: Mapping[str, int]
    rejected: Mapping[tuple[str, str], int]


@dataclass(slots=True)
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(HISTOGRAM_BOUNDS) + 1))
    sum_nano: int = 0

    def observe(self, value: float) -> None:
        bucket = 0
        for bound in HISTOGRAM_BOUNDS:
            if value <= bound:
                break
            bucket += 1
        self.counts[bucket] += 1
        self.sum_nano += round(value * NANO)


@dataclass(slots=True)
class _Sums:
    """Integrals since the start, with the time that each key was measured: mean = value / measured."""

    value: dict[str, int] = field(default_factory=dict)
    measured_ns: dict[str, int] = field(default_factory=dict)

    def add(self, key: str, value: int, duration_ns: int) -> None:
        self.value[key] = self.value.get(key, 0) + value
        self.measured_ns[key] = self.measured_ns.get(key, 0) + duration_ns

    def copy(self) -> _Sums:
        return _Sums(self.value.copy(), self.measured_ns.copy())

    def means_since(self, before: _Sums) -> dict[str, float]:
        means = {}
        for key, measured in self.measured_ns.items():
            span = measured - before.measured_ns.get(key, 0)
            if span > 0:
                means[key] = (self.value[key] - before.value.get(key, 0)) / span
        return means


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    time_ns: int
    sums: _Sums
    class_ns: Mapping[BottleneckClass, int]


class GpuTotals:
    """Adds up the events of one GPU. Not thread-safe: the fleet serialises access."""

    def __init__(self, gpu: Gpu, gauge_window_ns: int) -> None:
        self.gpu = gpu
        self.gauge_window_ns = gauge_window_ns
        self._sums = _Sums()
        self._checkpoints: deque[_Checkpoint] = deque()
        self._observed_ns: dict[WindowSource, int] = {}
        self._class_ns: dict[BottleneckClass, int] = dict.fromkeys(CLASSES, 0)
        self._histograms: dict[Unit, _Histogram] = {}
        self._windows: dict[tuple[WindowSource, str], int] = {}
        self._last_window_ns: dict[WindowSource, int] = {}
        self._chain_end_ns: dict[WindowSource, int] = {}
        self._intervals_ns: dict[WindowSource, int] = {}
        self._readings = Readings(gpu.uuid, -MIN_STALE_NS, {})
        self._rising = {reading: RisingCounter() for reading in CUMULATIVE_READINGS}
        self._peaks = Peaks()
        self._nvml_busy_ns: int | None = None
        self._clock_event_ns: dict[str, int] = {}
        self._rejected: dict[tuple[str, str], int] = {}
        self._xids: dict[tuple[int, str], int] = {}
        self._xid_wall_ns: dict[int, int] = {}

    def add_window(self, window: Window) -> None:
        """Integrate one window, classify it and observe its intensities."""
        duration = window.duration_ns
        self._count_gap(window)
        self._checkpoint(window.end_ns - duration)
        for quantity, value in window.values.items():
            amount = round(value) if quantity in COUNT_QUANTITIES else round(value * duration)
            self._sums.add(quantity, amount, duration)
        share = shares(window.values, duration, self._peaks, self.gpu.links)
        if share.sm is not None:
            self._sums.add("sm", round(share.sm * duration), duration)
        intensity = intensities(share, self.gpu.links)
        for unit, value in intensity.items():
            self._histograms.setdefault(unit, _Histogram()).observe(value)
            self._sums.add(f"intensity_{unit}", round(value * duration), duration)
        self._class_ns[classify(share, intensity, slowed_down=self._slowed_down(window.end_ns))] += duration
        self._observed_ns[window.source] = self._observed_ns.get(window.source, 0) + duration
        self._last_window_ns[window.source] = window.end_ns
        self._count_windows(window.source, "late" if window.late else "valid", 1)

    def add_window_rejected(self, rejected: WindowsRejected) -> None:
        """Count windows with impossible values; the next one follows them without a gap."""
        self._count_windows(rejected.source, "rejected", rejected.count)
        self._chain_end_ns[rejected.source] = rejected.time_ns

    def break_chain(self, source: WindowSource) -> None:
        """What follows is no gap: the source was paused or the GPU away, and its state says so."""
        self._chain_end_ns.pop(source, None)

    def add_interval(self, source: WindowSource, interval_ns: int) -> None:
        """Note the window length in force."""
        self._intervals_ns[source] = interval_ns

    def add_rejected(self, reading: str, reason: str) -> None:
        """Count a value that cannot be true."""
        key = (reading, reason)
        self._rejected[key] = self._rejected.get(key, 0) + 1

    def add_xid(self, xid: int, origin: str, wall_ns: int) -> None:
        """Count an Xid, per origin: the one that saw more counts, since both tell of the same."""
        known = xid in self._xid_wall_ns
        if not known and len(self._xid_wall_ns) >= MAX_XIDS:
            return
        self._xids[xid, origin] = self._xids.get((xid, origin), 0) + 1
        self._xid_wall_ns[xid] = wall_ns

    def add_readings(self, readings: Readings) -> None:
        """Replace the slow readings; integrate those that are a state over time."""
        elapsed = readings.time_ns - self._readings.time_ns
        if 0 < elapsed <= _MAX_READING_GAP_NS:
            self._integrate_readings(readings.values, elapsed)
        self._readings = replace(readings, values=self._never_back(readings.values))
        self._peaks = Peaks(
            dram=readings.values.get("dram_limit_bytes_per_second"),
            pcie=readings.values.get("pcie_limit_bytes_per_second"),
            nvlink=readings.values.get("nvlink_limit_bytes_per_second"),
            c2c=readings.values.get("c2c_limit_bytes_per_second"),
        )

    def snapshot(self, now_ns: int) -> GpuSnapshot:
        """An immutable copy as of `now_ns`, with values that went stale left out."""
        before = self._gauge_start(now_ns)
        means = self._sums.means_since(before.sums) if before else {}
        return GpuSnapshot(
            gpu=self.gpu,
            quantities={q: self._sums.value[q] for q in QUANTITIES if q in self._sums.value},
            observed_ns=sum(self._class_ns.values()),
            source_observed_ns=self._observed_ns.copy(),
            class_ns=self._class_ns.copy(),
            recent_class_ns={c: ns - before.class_ns[c] for c, ns in self._class_ns.items()} if before else {},
            histograms={u: Histogram(tuple(h.counts), h.sum_nano) for u, h in self._histograms.items()},
            gauges={q: means[q] for q in QUANTITIES if q not in COUNT_QUANTITIES and q in means},
            sm_utilization=means.get("sm"),
            intensities={u: means[f"intensity_{u}"] for u in UNITS if f"intensity_{u}" in means},
            windows=self._windows.copy(),
            last_window_ns=self._last_window_ns.copy(),
            intervals_ns=self._intervals_ns.copy(),
            readings=self._fresh_readings(now_ns),
            nvml_busy_ns=self._nvml_busy_ns,
            clock_event_ns=self._clock_event_ns.copy(),
            rejected=self._rejected.copy(),
        )

    def xids(self) -> dict[int, tuple[int, int]]:
        """Per Xid: how often, and the Unix time of the newest in ns."""
        counts: dict[int, int] = {}
        for (xid, _), count in self._xids.items():
            counts[xid] = max(counts.get(xid, 0), count)
        return {xid: (count, self._xid_wall_ns[xid]) for xid, count in counts.items()}

    def has_fresh_readings(self, now_ns: int) -> bool:
        """Whether the newest readings are at most five seconds old."""
        return now_ns - self._readings.time_ns <= MIN_STALE_NS

    def is_stale(self, source: WindowSource, since_ns: int, now_ns: int) -> bool:
        """Whether `source`, running since `since_ns`, delivered no window for max(2 windows, 5 s)."""
        limit = max(2 * self._intervals_ns.get(source, 0), MIN_STALE_NS)
        return now_ns - max(since_ns, self._last_window_ns.get(source, since_ns)) > limit

    def _count_gap(self, window: Window) -> None:
        """Windows that were due between the last one and this one are lost."""
        begin_ns = window.end_ns - window.duration_ns
        gap_ns = begin_ns - self._chain_end_ns.get(window.source, begin_ns)
        interval_ns = self._intervals_ns.get(window.source, window.duration_ns)
        if gap_ns > interval_ns // 2:
            self._count_windows(window.source, "lost", max(1, round(gap_ns / interval_ns)))
        self._chain_end_ns[window.source] = window.end_ns

    def _count_windows(self, source: WindowSource, result: str, count: int) -> None:
        key = (source, result)
        self._windows[key] = self._windows.get(key, 0) + count

    def _slowed_down(self, now_ns: int) -> bool:
        readings = self._fresh_readings(now_ns)
        return any(readings.get(reason, 0) for reason in SLOWDOWN_READINGS)

    def _fresh_readings(self, now_ns: int) -> Mapping[Reading, float]:
        return self._readings.values if self.has_fresh_readings(now_ns) else {}

    def _never_back(self, values: Mapping[Reading, float]) -> Mapping[Reading, float]:
        return {r: self._rising[r].advance(v) if r in self._rising else v for r, v in values.items()}

    def _integrate_readings(self, values: Mapping[Reading, float], elapsed_ns: int) -> None:
        busy = values.get("nvml_utilization_ratio")
        if busy is not None:
            self._nvml_busy_ns = (self._nvml_busy_ns or 0) + round(busy * elapsed_ns)
        for reading, reason in _CLOCK_EVENTS:
            active = values.get(reading)
            if active is not None:
                self._clock_event_ns[reason] = self._clock_event_ns.get(reason, 0) + round(active * elapsed_ns)

    def _checkpoint(self, time_ns: int) -> None:
        """Remember the sums once a second: a gauge is the difference of two counters."""
        if self._checkpoints and time_ns - self._checkpoints[-1].time_ns < _CHECKPOINT_NS:
            return
        self._checkpoints.append(_Checkpoint(time_ns, self._sums.copy(), self._class_ns.copy()))
        # One checkpoint at or before the start of the gauge window has to stay.
        while len(self._checkpoints) > 1 and self._checkpoints[1].time_ns <= time_ns - self.gauge_window_ns:
            self._checkpoints.popleft()

    def _gauge_start(self, now_ns: int) -> _Checkpoint | None:
        """The sums as the gauge window began (to a second), None when windows stopped."""
        if all(self.is_stale(source, last, now_ns) for source, last in self._last_window_ns.items()):
            return None
        start = now_ns - self.gauge_window_ns
        return next((c for c in self._checkpoints if c.time_ns >= start), self._checkpoints[-1])
