"""Totals of one GPU: its windows, its slow readings and what went wrong, and a frozen copy of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, get_args

from gpu_hpc_exporter.diagnosis.classify import BottleneckClass
from gpu_hpc_exporter.diagnosis.intensity import UNITS, Peaks, Unit, dram_share, l2_miss_share
from gpu_hpc_exporter.diagnosis.slowdown import AgentSlowdown
from gpu_hpc_exporter.model import (
    CLOCK_EVENT_PREFIX,
    COUNT_QUANTITIES,
    CUMULATIVE_READINGS,
    NS,
    QUANTITIES,
    READINGS,
    SLOWDOWN_READINGS,
    Gpu,
    GpuProcess,
    GpuProcesses,
    Incident,
    IntervalInForce,
    L2Definition,
    Quantity,
    Reading,
    Readings,
    State,
    Tracing,
    Window,
    WindowSource,
    WindowsRejected,
)
from gpu_hpc_exporter.samplers.ledger import INTENSITY, SM, Histogram, Ledger, Recent, means
from gpu_hpc_exporter.samplers.merge import Merge, Stretch
from gpu_hpc_exporter.samplers.window_history import WindowHistory
from gpu_hpc_exporter.sources.values import RisingCounter

WINDOW_SOURCES: Final[tuple[WindowSource, ...]] = get_args(WindowSource)
MIN_STALE_NS: Final = 5 * NS
"""Values vanish after max(2 windows, 5 s) without a new one: never frozen, never 0."""
MAX_XIDS: Final = 64
"""Different Xids remembered per GPU; the kernel log is input from outside."""
_CLOCK_EVENTS: Final = tuple(
    (r, r.removeprefix(CLOCK_EVENT_PREFIX)) for r in READINGS if r.startswith(CLOCK_EVENT_PREFIX)
)
_MAX_READING_GAP_NS: Final = 5 * NS
_MEMORY_STEP_NS: Final = 60 * NS
MEMORY_BEFORE_NS: Final = 1800 * NS
"""Memory that fills up is compared with what was in use half an hour ago."""
MAX_PROCESSES_AGE_NS: Final = 6 * NS
"""Three times the period at which they are listed."""


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """What one GPU's totals were at one moment; times in integer nanoseconds.

    `quantities`: integral of each ratio over time in ns, or the amount of each count. `gauges`, `rates` (of counts, per
    second) and `intensities`: means over the gauge window, `recent_class_ns`: its time by class; empty where windows
    stopped. `leader`: whose windows are classified now, `truths`: from whose windows each quantity is counted now.
    `l2_miss_ratio`: missed by requested sectors over the gauge window, `l2_definition` what "missed" means.
    `readings`: empty when stale. `processes`: None when stale, or where no list can be had or trusted.
    `memory_used`, `memory_used_before`: share of the memory that programs can have, now and half an hour ago; None
    where not known.
    `agent_slowdown`: share of its progress that is lost while a kernel agent traces, None where nobody can say.
    """

    gpu: Gpu
    quantities: Mapping[Quantity, int]
    observed_ns: int
    source_observed_ns: Mapping[WindowSource, int]
    class_ns: Mapping[BottleneckClass, int]
    recent_class_ns: Mapping[BottleneckClass, int]
    histograms: Mapping[Unit, Histogram]
    gauges: Mapping[Quantity, float]
    rates: Mapping[Quantity, float]
    sm_utilization: float | None
    l2_miss_ratio: float | None
    l2_definition: L2Definition
    intensities: Mapping[Unit, float]
    leader: WindowSource | None
    truths: Mapping[Quantity, WindowSource]
    windows: Mapping[tuple[WindowSource, str], int]
    last_window_ns: Mapping[WindowSource, int]
    intervals_ns: Mapping[WindowSource, int]
    readings: Mapping[Reading, float]
    nvml_busy_ns: int | None
    clock_event_ns: Mapping[str, int]
    rejected: Mapping[tuple[str, str], int]
    incidents: Mapping[Incident, int]
    processes: tuple[GpuProcess, ...] | None
    memory_used: float | None
    memory_used_before: float | None
    agent_slowdown: float | None


class GpuTotals:
    """Adds up the events of one GPU. Not thread-safe: the fleet serialises access."""

    def __init__(self, gpu: Gpu, gauge_window_ns: int) -> None:
        self.gauge_window_ns = gauge_window_ns
        self._ledger = Ledger(gpu.links)
        self._merge = Merge(self._ledger)
        self._slowdown = AgentSlowdown()
        self.gpu = gpu
        self._observed_ns: dict[WindowSource, int] = {}
        self._windows: dict[tuple[WindowSource, str], int] = {}
        self._last_window_ns: dict[WindowSource, int] = {}
        self._chain_end_ns: dict[WindowSource, int] = {}
        self._intervals_ns: dict[WindowSource, int] = {}
        self._l2_definition: L2Definition = ""
        self._readings = Readings(gpu.uuid, -MIN_STALE_NS, {})
        self._memory_used: deque[tuple[int, float]] = deque()
        self._is_slowed_down = False
        self._rising = {reading: RisingCounter() for reading in CUMULATIVE_READINGS}
        self._nvml_busy_ns: int | None = None
        self._clock_event_ns: dict[str, int] = {}
        self._rejected: dict[tuple[str, str], int] = {}
        self._incidents: dict[Incident, int] = {}
        self._processes = GpuProcesses(-MAX_PROCESSES_AGE_NS, gpu.uuid, None)
        self._xids: dict[tuple[int, str], int] = {}
        self._xid_wall_ns: dict[int, int] = {}

    @property
    def gpu(self) -> Gpu:
        """The inventory's newest row."""
        return self._gpu

    @gpu.setter
    def gpu(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._ledger.links = gpu.links

    @property
    def history(self) -> WindowHistory:
        """The windows of the last minutes."""
        return self._ledger.history

    def add_window(self, window: Window) -> None:
        """Count one window; whether it is the source of its quantities and of the class, the merge decides."""
        source, end_ns, duration_ns = window.source, window.end_ns, window.duration_ns
        begin_ns = end_ns - duration_ns
        self._count_gap(source, begin_ns, window)
        self._ledger.tracks[source].checkpoint(begin_ns, self.gauge_window_ns)
        is_fresh = self.has_fresh_readings(end_ns)
        self._ledger.slowed_down = self._is_slowed_down and is_fresh
        self.history.nvml_utilization = self._readings.values.get("nvml_utilization_ratio") if is_fresh else None
        values = window.values if source == "gpm" else self._with_dram_share(window.values, duration_ns)
        stretch = Stretch(begin_ns, end_ns, values)
        covered_ns = self._merge.add_gpm(stretch) if source == "gpm" else self._merge.add_pm(stretch)
        self._slowdown.add_window(source, begin_ns, end_ns, values)
        self._observed_ns[source] = self._observed_ns.get(source, 0) + covered_ns
        self._last_window_ns[source] = end_ns
        self._count_windows(source, "late" if window.late else "valid", 1)

    def _with_dram_share(self, values: Mapping[Quantity, float], duration_ns: int) -> Mapping[Quantity, float]:
        """PM sampling counts bytes; what share of the peak they are, only the driver's readings tell."""
        if "dram_active" in values:
            return values
        share = dram_share(values, duration_ns, self._ledger.peaks.dram)
        return values if share is None else {**values, "dram_active": share}

    def add_window_rejected(self, rejected: WindowsRejected) -> None:
        """Count windows with impossible values; the next one follows them without a gap."""
        self._count_windows(rejected.source, "rejected", rejected.count)
        self._chain_end_ns[rejected.source] = rejected.time_ns

    def interrupt(self, source: WindowSource) -> None:
        """What follows is no gap: the source was paused or the GPU away, and its state says so."""
        self._chain_end_ns.pop(source, None)
        self._stop(source)

    def take_state(self, source: WindowSource, state: State, time_ns: int) -> None:
        """A source that is not active delivers nothing: the other one counts in its place."""
        if state == "active":
            if source == "gpm":
                self._merge.start_gpm(time_ns)
        elif state in ("paused", "busy", "lost"):
            self.interrupt(source)
        else:
            self._stop(source)

    def _stop(self, source: WindowSource) -> None:
        if source == "gpm":
            self._merge.stop_gpm()
        else:
            self._merge.stop_pm()

    def add_interval(self, interval: IntervalInForce) -> None:
        """Note how a source samples now."""
        self._intervals_ns[interval.source] = interval.interval_ns
        if interval.source == "pm_sampling":
            self._l2_definition = interval.l2_definition

    def add_incident(self, incident: Incident) -> None:
        """Count something that PM sampling had to do."""
        self._incidents[incident] = self._incidents.get(incident, 0) + 1

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
        self._note_memory(readings)
        self._is_slowed_down = any(readings.values.get(reason, 0) for reason in SLOWDOWN_READINGS)
        self._ledger.peaks = Peaks(
            dram=readings.values.get("dram_limit_bytes_per_second"),
            pcie=readings.values.get("pcie_limit_bytes_per_second"),
            nvlink=readings.values.get("nvlink_limit_bytes_per_second"),
            c2c=readings.values.get("c2c_limit_bytes_per_second"),
        )

    def _note_memory(self, readings: Readings) -> None:
        """Once a minute; the oldest that is kept is the newest that is half an hour old."""
        used, now_ns, kept = memory_used(readings.values), readings.time_ns, self._memory_used
        if used is None or (kept and now_ns - kept[-1][0] < _MEMORY_STEP_NS):
            return
        kept.append((now_ns, used))
        while len(kept) > 1 and now_ns - kept[1][0] >= MEMORY_BEFORE_NS:
            kept.popleft()

    def _memory_before(self, now_ns: int) -> float | None:
        """Of no time before the last gap of five minutes: nobody knows what happened in it."""
        kept = self._memory_used
        if not kept or now_ns - kept[0][0] < MEMORY_BEFORE_NS:
            return None
        return kept[0][1] if now_ns - kept[0][0] < MEMORY_BEFORE_NS + 5 * _MEMORY_STEP_NS else None

    def add_processes(self, processes: GpuProcesses) -> None:
        """Replace the list of processes; more memory than is in use cannot be theirs alone, which is counted."""
        self._processes = processes
        used = self._fresh_readings(processes.time_ns).get("memory_used_bytes")
        attributed = attributed_bytes(processes.processes)
        if used is not None and attributed is not None and attributed > used:
            self.add_rejected("memory_unattributed_bytes", "negative")

    def add_tracing(self, time_ns: int, tracing: Tracing | None) -> None:
        """When agents traced this GPU, up to `time_ns`; None where that is not known."""
        self._slowdown.add_tracing(time_ns, tracing)

    def snapshot(self, now_ns: int) -> GpuSnapshot:
        """An immutable copy as of `now_ns`, with values that went stale left out."""
        recent = {
            source: self._ledger.tracks[source].since(now_ns - self.gauge_window_ns)
            for source, end_ns in self._last_window_ns.items()
            if not self.is_stale(source, end_ns, now_ns)
        }
        mean = means(recent.values())
        class_ns = self._ledger.class_ns()
        return GpuSnapshot(
            gpu=self.gpu,
            quantities=self._ledger.quantity_totals(QUANTITIES),
            observed_ns=sum(class_ns.values()),
            source_observed_ns=self._observed_ns.copy(),
            class_ns=class_ns,
            recent_class_ns={c: sum(r.class_ns[c] for r in recent.values()) for c in class_ns} if recent else {},
            histograms=self._ledger.histograms(),
            gauges={q: mean[q] for q in QUANTITIES if q not in COUNT_QUANTITIES and q in mean},
            rates={q: mean[q] * NS for q in QUANTITIES if q in COUNT_QUANTITIES and q in mean},
            sm_utilization=mean.get(SM),
            l2_miss_ratio=self._l2_miss_ratio(mean),
            l2_definition=self._l2_definition,
            intensities={u: mean[INTENSITY[u]] for u in UNITS if INTENSITY[u] in mean},
            leader=self._leader(recent),
            truths={q: self._truth(q, recent) for q in QUANTITIES if q in mean},
            windows=self._windows.copy(),
            last_window_ns=self._last_window_ns.copy(),
            intervals_ns=self._intervals_ns.copy(),
            readings=self._fresh_readings(now_ns),
            nvml_busy_ns=self._nvml_busy_ns,
            clock_event_ns=self._clock_event_ns.copy(),
            rejected=self._rejected.copy(),
            incidents=self._incidents.copy(),
            processes=self._fresh_processes(now_ns),
            memory_used=memory_used(self._fresh_readings(now_ns)),
            memory_used_before=self._memory_before(now_ns),
            agent_slowdown=self._slowdown.slowdown(now_ns),
        )

    def _l2_miss_ratio(self, mean: Mapping[str, float]) -> float | None:
        requested, missed = (mean.get(q) for q in ("l2_sectors", "l2_missed_sectors"))
        return l2_miss_share(requested, missed, 1 / NS, self._ledger.peaks.dram)  # means are per nanosecond

    def _leader(self, recent: Mapping[WindowSource, Recent]) -> WindowSource | None:
        if "pm_sampling" in recent and (self._merge.leads or "gpm" not in recent):
            return "pm_sampling"
        return "gpm" if recent else None

    def _truth(self, quantity: Quantity, recent: Mapping[WindowSource, Recent]) -> WindowSource:
        """Where a quantity that was measured lately comes from: from GPM unless PM sampling carries it."""
        is_gpms = "gpm" in recent and recent["gpm"].has(quantity)
        return "gpm" if is_gpms and quantity not in self._merge.carried else "pm_sampling"

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

    def _count_gap(self, source: WindowSource, begin_ns: int, window: Window) -> None:
        """Windows that were due between the last one and this one are lost."""
        gap_ns = begin_ns - self._chain_end_ns.get(source, begin_ns)
        if gap_ns > 0:
            interval_ns = self._intervals_ns.get(source, window.duration_ns)
            if gap_ns > interval_ns // 2:
                self._count_windows(source, "lost", max(1, round(gap_ns / interval_ns)))
        self._chain_end_ns[source] = window.end_ns

    def _count_windows(self, source: WindowSource, result: str, count: int) -> None:
        key = (source, result)
        self._windows[key] = self._windows.get(key, 0) + count

    def _fresh_readings(self, now_ns: int) -> Mapping[Reading, float]:
        return self._readings.values if self.has_fresh_readings(now_ns) else {}

    def _fresh_processes(self, now_ns: int) -> tuple[GpuProcess, ...] | None:
        is_fresh = now_ns - self._processes.time_ns <= MAX_PROCESSES_AGE_NS
        return self._processes.processes if is_fresh else None

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


def memory_used(readings: Mapping[Reading, float]) -> float | None:
    """Share of the memory that programs can have, None where the driver does not tell."""
    used, total = readings.get("memory_used_bytes"), readings.get("memory_total_bytes")
    if used is None or total is None:
        return None
    available = total - readings.get("memory_reserved_bytes", 0.0)
    return used / available if available > 0 else None


def attributed_bytes(processes: tuple[GpuProcess, ...] | None) -> int | None:
    """Memory of all processes together, None where the driver does not tell that of each."""
    if processes is None:
        return None
    known = [process.memory_bytes for process in processes if process.memory_bytes is not None]
    return sum(known) if len(known) == len(processes) else None
