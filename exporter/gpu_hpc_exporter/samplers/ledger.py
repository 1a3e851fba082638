"""What windows add up to: exact integrals per source, time by class, the distribution of intensities.

At 4.8 TB/s a double stops counting single bytes after half an hour; Python's integers never do.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, get_args

from gpu_hpc_exporter.diagnosis.classify import CLASSES, BottleneckClass, classify
from gpu_hpc_exporter.diagnosis.intensity import UNITS, Peaks, Unit, intensities, shares
from gpu_hpc_exporter.model import COUNT_QUANTITIES, NS, Link, Quantity, WindowSource
from gpu_hpc_exporter.samplers.merge import Stretch
from gpu_hpc_exporter.samplers.window_history import WindowHistory

NANO: Final = 1_000_000_000
"""Ratios are added up in units of 1e-9, far below what the counters resolve."""
HISTOGRAM_BOUNDS: Final = (0.05, 0.1, 0.2, 0.35, 0.5, 0.6, 0.7, 0.75, 0.85, 0.9, 0.95, 1.0)

SM: Final = "sm"
"""Key of the busiest pipe's mean, beside those of quantities and intensities."""
INTENSITY: Final[Mapping[Unit, str]] = {unit: f"intensity_{unit}" for unit in UNITS}
_CHECKPOINT_NS: Final = NS


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts per bucket of `HISTOGRAM_BOUNDS` (the last one is +Inf, not cumulated) and the sum in 1e-9."""

    counts: tuple[int, ...]
    sum_nano: int


class _Histogram:
    __slots__ = ("counts", "sum_nano")

    def __init__(self) -> None:
        self.counts = [0] * (len(HISTOGRAM_BOUNDS) + 1)
        self.sum_nano = 0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(HISTOGRAM_BOUNDS, value)] += 1
        self.sum_nano += round(value * NANO)


class _Sum:
    """An integral since the start, and the time in which it was measured: mean = value / measured."""

    __slots__ = ("measured_ns", "value")

    def __init__(self) -> None:
        self.value = 0
        self.measured_ns = 0


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    time_ns: int
    sums: Mapping[str, tuple[int, int]]
    class_ns: Mapping[BottleneckClass, int]


@dataclass(frozen=True, slots=True)
class Recent:
    """What came together in the gauge window: value and time per key, time by class."""

    sums: Mapping[str, tuple[int, int]]
    class_ns: Mapping[BottleneckClass, int]

    def has(self, key: str) -> bool:
        """Whether this was measured at all."""
        return self.sums.get(key, (0, 0))[1] > 0


class Track:
    """Everything that the windows of one source were counted for."""

    def __init__(self) -> None:
        self.sums: dict[str, _Sum] = {}
        self.class_ns: dict[BottleneckClass, int] = dict.fromkeys(CLASSES, 0)
        self._checkpoints: deque[_Checkpoint] = deque()

    def add(self, key: str, value: int, measured_ns: int) -> None:
        total = self.sums.get(key)
        if total is None:
            total = self.sums[key] = _Sum()
        total.value += value
        total.measured_ns += measured_ns

    def checkpoint(self, time_ns: int, gauge_window_ns: int) -> None:
        """Remember the sums once a second: a gauge is the difference of two counters."""
        checkpoints = self._checkpoints
        if checkpoints and time_ns - checkpoints[-1].time_ns < _CHECKPOINT_NS:
            return
        sums = {key: (total.value, total.measured_ns) for key, total in self.sums.items()}
        checkpoints.append(_Checkpoint(time_ns, sums, self.class_ns.copy()))
        # One checkpoint at or before the start of the gauge window has to stay.
        while len(checkpoints) > 1 and checkpoints[1].time_ns <= time_ns - gauge_window_ns:
            checkpoints.popleft()

    def since(self, start_ns: int) -> Recent:
        """What came since `start_ns`, to a second."""
        before = next((c for c in self._checkpoints if c.time_ns >= start_ns), self._checkpoints[-1])
        sums = {}
        for key, total in self.sums.items():
            value, measured_ns = before.sums.get(key, (0, 0))
            sums[key] = (total.value - value, total.measured_ns - measured_ns)
        return Recent(sums, {c: ns - before.class_ns[c] for c, ns in self.class_ns.items()})


class Ledger:
    """Adds up stretches of windows. `peaks`, `links` and `slowed_down` are those of now."""

    def __init__(self, links: tuple[Link, ...]) -> None:
        self.links = links
        self.peaks = Peaks()
        self.slowed_down = False
        """Whether a hardware slowdown, thermal or power-brake reason is active."""
        self.tracks: dict[WindowSource, Track] = {source: Track() for source in get_args(WindowSource)}
        self.history = WindowHistory()
        self._histograms: dict[Unit, _Histogram] = {}

    def integrate(self, source: WindowSource, stretch: Stretch) -> None:
        """Count everything that was measured in a stretch."""
        duration_ns = stretch.end_ns - stretch.begin_ns
        sums = self.tracks[source].sums
        for quantity, value in stretch.values.items():
            total = sums.get(quantity)
            if total is None:
                total = sums[quantity] = _Sum()
            total.value += round(value) if quantity in COUNT_QUANTITIES else round(value * duration_ns)
            total.measured_ns += duration_ns

    def integrate_part(self, source: WindowSource, stretch: Stretch, quantity: Quantity, part_ns: int) -> None:
        """Count one quantity for a part of a stretch."""
        value = stretch.values[quantity]
        share = part_ns / (stretch.end_ns - stretch.begin_ns) if quantity in COUNT_QUANTITIES else part_ns
        self.tracks[source].add(quantity, round(value * share), part_ns)

    def classify(self, source: WindowSource, stretch: Stretch, part_ns: int) -> None:
        """Observe the intensities of a stretch and count `part_ns` of it for its class."""
        share = shares(stretch.values, stretch.end_ns - stretch.begin_ns, self.peaks, self.links)
        intensity = intensities(share, self.links)
        track = self.tracks[source]
        if share.sm is not None:
            track.add(SM, round(share.sm * part_ns), part_ns)
        for unit, value in intensity.items():
            histogram = self._histograms.get(unit)
            if histogram is None:
                histogram = self._histograms[unit] = _Histogram()
            histogram.observe(value)
            track.add(INTENSITY[unit], round(value * part_ns), part_ns)
        name = classify(share, intensity, slowed_down=self.slowed_down)
        track.class_ns[name] += part_ns
        self.history.add(stretch.begin_ns, part_ns, intensity, share.sm_active, name)

    def quantity_totals(self, quantities: Iterable[Quantity]) -> dict[Quantity, int]:
        """Of those of `quantities` that were ever measured the total, over all sources."""
        tracks = self.tracks.values()
        return {q: sum(t.sums[q].value for t in tracks if q in t.sums) for q in quantities if self._has(q)}

    def class_ns(self) -> dict[BottleneckClass, int]:
        """Time by class, over all sources."""
        return {name: sum(track.class_ns[name] for track in self.tracks.values()) for name in CLASSES}

    def histograms(self) -> dict[Unit, Histogram]:
        """The distribution of each unit's intensity over windows."""
        return {unit: Histogram(tuple(h.counts), h.sum_nano) for unit, h in self._histograms.items()}

    def _has(self, quantity: Quantity) -> bool:
        return any(quantity in track.sums for track in self.tracks.values())


def means(recents: Iterable[Recent]) -> dict[str, float]:
    """Mean of each key that was measured, over what several sources delivered."""
    values: dict[str, int] = {}
    measured: dict[str, int] = {}
    for recent in recents:
        for key, (value, measured_ns) in recent.sums.items():
            if measured_ns > 0:
                values[key] = values.get(key, 0) + value
                measured[key] = measured.get(key, 0) + measured_ns
    return {key: value / measured[key] for key, value in values.items()}
