"""Totals of one GPU: exact integrals, histograms, gauges that vanish, readings that go stale."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.diagnosis.classify import CLASSES, BottleneckClass
from gpu_hpc_exporter.diagnosis.intensity import Unit
from gpu_hpc_exporter.model import (
    CLOCK_EVENT_PREFIX,
    READINGS,
    SLOWDOWN_READINGS,
    IntervalInForce,
    Quantity,
    Reading,
    WindowsRejected,
)
from gpu_hpc_exporter.samplers.ledger import HISTOGRAM_BOUNDS, NANO
from gpu_hpc_exporter.samplers.totals import GpuTotals
from unit.objects import G0, GAUGE_WINDOW_NS, NS, readings, window

BUSY: dict[Quantity, float] = {"sm_active": 0.96, "pipe_tensor": 0.93, "dram_active": 0.17}
CLOCK_EVENTS: tuple[Reading, ...] = tuple(r for r in READINGS if r.startswith(CLOCK_EVENT_PREFIX))


def new_totals() -> GpuTotals:
    """Totals of a GPU without links, so that every window has a class."""
    return GpuTotals(replace(G0, links=()), GAUGE_WINDOW_NS)


def at(seconds: float) -> int:
    """Seconds as nanoseconds."""
    return round(seconds * NS)


def test_bytes_stay_exact_beyond_what_a_double_counts() -> None:
    """Three windows of one byte on top of 55 hours at 4.8 TB/s are three bytes more."""
    totals = new_totals()
    two_million_windows = 2_000_000 * 480_000_000_000
    assert float(two_million_windows) + 1 == float(two_million_windows)  # why integers
    totals.add_window(window(1, {"nvlink_received_bytes": two_million_windows}, 0.1))
    for end in (1.1, 1.2, 1.3):
        totals.add_window(window(end, {"nvlink_received_bytes": 1}, 0.1))
    assert totals.snapshot(at(2)).quantities == {"nvlink_received_bytes": two_million_windows + 3}


def test_ratios_are_integrated_over_time() -> None:
    """A ratio's total is its integral in nanoseconds: half busy for 100 ms is 50 ms."""
    totals = new_totals()
    totals.add_window(window(1.0, {"sm_active": 0.5, "pipe_tensor": 1.0}, 0.1))
    totals.add_window(window(1.3, {"sm_active": 0.25}, 0.2))
    snapshot = totals.snapshot(at(2))
    assert snapshot.quantities == {"sm_active": at(0.1), "pipe_tensor": at(0.1)}
    assert (snapshot.observed_ns, snapshot.source_observed_ns) == (at(0.3), {"gpm": at(0.3)})


_RATIO = st.floats(0, 1)
_VALUES = st.fixed_dictionaries(
    {}, optional={"sm_active": _RATIO, "pipe_int": _RATIO, "dram_active": _RATIO, "engine_decode": _RATIO}
).map(dict[Quantity, float])
_WINDOWS = st.lists(st.tuples(_VALUES, st.integers(1, 10 * NS)), max_size=20)


@given(_WINDOWS)
@settings(max_examples=100)
def test_classes_add_up_to_the_observed_time(windows: list[tuple[dict[Quantity, float], int]]) -> None:
    """Every window falls into one class whole, and into one bucket of each measured unit."""
    totals, end = new_totals(), 0
    for values, duration in windows:
        end += duration
        totals.add_window(replace(window(0, values), end_ns=end, duration_ns=duration))
    snapshot = totals.snapshot(end)
    assert set(snapshot.class_ns) == set(CLASSES)
    assert sum(snapshot.class_ns.values()) == snapshot.observed_ns == end
    measured: tuple[tuple[Unit, Quantity], ...] = (("sm", "pipe_int"), ("dram", "dram_active"))
    for unit, quantity in measured:
        histogram = snapshot.histograms.get(unit)
        assert sum(histogram.counts if histogram else ()) == sum(quantity in values for values, _ in windows)


@pytest.mark.parametrize(("position", "bound"), list(enumerate(HISTOGRAM_BOUNDS)))
def test_bucket_edges_are_inclusive(position: int, bound: float) -> None:
    """An intensity equal to a bound is counted in that bucket (le), one just above in the next."""
    totals = new_totals()
    totals.add_window(window(1, {"pipe_tensor": bound}))
    totals.add_window(window(2, {"pipe_tensor": bound + 1e-6}))
    histogram = totals.snapshot(at(2)).histograms["sm"]
    assert [n for n, count in enumerate(histogram.counts) for _ in range(count)] == [position, position + 1]
    assert histogram.sum_nano == 2 * round(bound * NANO) + 1000


def test_a_unit_that_was_not_measured_has_no_histogram() -> None:
    """No observation of 0 is made up for what no window measured."""
    totals = new_totals()
    totals.add_window(window(1, {"pipe_tensor": 0.0, "sm_active": 0.0}))
    assert totals.snapshot(at(1)).histograms.keys() == {"sm"}


def test_gauges_are_weighted_by_time() -> None:
    """A window three times as long counts three times as much; the SM is the busiest pipe of each window."""
    totals = new_totals()
    totals.add_window(window(1.0, {"sm_active": 0.0, "pipe_int": 0.2, "pipe_fp32": 0.1, "dram_active": 0.8}, 0.1))
    totals.add_window(window(1.3, {"sm_active": 1.0, "pipe_int": 0.1, "pipe_fp32": 0.6, "dram_active": 0.0}, 0.3))
    snapshot = totals.snapshot(at(1.3))
    assert snapshot.gauges == pytest.approx(
        {"sm_active": 0.75, "pipe_int": 0.125, "pipe_fp32": 0.475, "dram_active": 0.2}
    )
    assert snapshot.sm_utilization == pytest.approx(0.5)
    assert snapshot.intensities == pytest.approx({"sm": 0.5, "dram": 0.25})


@pytest.mark.parametrize(("busy_until", "expected"), [(20, 0.0), (21, 0.0), (22, 1 / 15), (28.5, 0.5), (36, 1.0)])
def test_gauges_are_means_of_the_last_window_only(busy_until: float, expected: float) -> None:
    """What happened before the last 15 s is no part of a gauge, to a second."""
    totals = new_totals()
    for tenth in range(10, 361):
        busy = float(tenth / 10 <= busy_until)
        totals.add_window(window(tenth / 10, {"sm_active": busy}, 0.1))
    assert totals.snapshot(at(36)).gauges["sm_active"] == pytest.approx(expected, abs=1 / 14)


def test_gauges_of_partly_measured_windows_use_their_own_time() -> None:
    """A quantity that only some windows measured is the mean over those, not diluted by the others."""
    totals = new_totals()
    totals.add_window(window(1, {"sm_active": 0.2, "dram_active": 0.4}))
    totals.add_window(window(2, {"sm_active": 0.4}))
    totals.add_window(window(3, {"sm_active": 0.6, "dram_active": 0.6}))
    snapshot = totals.snapshot(at(3))
    assert snapshot.gauges == pytest.approx({"sm_active": 0.4, "dram_active": 0.5})
    assert snapshot.intensities == pytest.approx({"dram": (0.5 + 0.75) / 2})


@pytest.mark.parametrize(("interval_s", "limit_s"), [(None, 5), (0.1, 5), (2.5, 5), (10, 20)])
def test_gauges_vanish_when_windows_stop_and_come_back(interval_s: float | None, limit_s: float) -> None:
    """Gauges go after max(2 windows, 5 s), counters stay, and what comes back knows only the new windows."""
    totals = new_totals()
    if interval_s is not None:
        totals.add_interval(IntervalInForce(0, G0.uuid, "gpm", at(interval_s)))
    totals.add_window(window(10, BUSY))
    assert totals.snapshot(at(10 + limit_s)).gauges == pytest.approx(BUSY)
    gone = totals.snapshot(at(10 + limit_s) + 1)
    assert (gone.gauges, gone.intensities, gone.sm_utilization, gone.recent_class_ns) == ({}, {}, None, {})
    assert gone.quantities["sm_active"] == at(0.96)
    totals.add_window(window(100, {"sm_active": 0.1}))
    back = totals.snapshot(at(100))
    assert back.gauges == pytest.approx({"sm_active": 0.1})
    assert {name: ns for name, ns in back.recent_class_ns.items() if ns} == {"starved": NS}


def test_nothing_is_shown_before_the_first_window() -> None:
    """A GPU without windows has no gauges and no totals, not zeros."""
    snapshot = new_totals().snapshot(at(1))
    assert (snapshot.gauges, snapshot.quantities, snapshot.histograms, snapshot.readings) == ({}, {}, {}, {})
    assert (snapshot.observed_ns, snapshot.nvml_busy_ns, snapshot.sm_utilization) == (0, None, None)


@pytest.mark.parametrize("reason", CLOCK_EVENTS)
@pytest.mark.parametrize(("age_s", "is_fresh"), [(0, True), (5, True), (5.001, False)])
def test_throttled_needs_a_slowdown_reason_in_fresh_readings(reason: Reading, age_s: float, *, is_fresh: bool) -> None:
    """Hardware, thermal and power-brake reasons throttle; a software power cap or a stale reading does not."""
    totals = new_totals()
    totals.add_readings(readings(10, dict.fromkeys(CLOCK_EVENTS, 0.0) | {reason: 1.0}))
    totals.add_window(window(10 + age_s, BUSY))
    expected: BottleneckClass = "throttled" if reason in SLOWDOWN_READINGS and is_fresh else "compute_bound"
    assert totals.snapshot(at(20)).class_ns[expected] == NS


def test_readings_are_absent_after_five_seconds() -> None:
    """Readings never freeze: five seconds after the last ones they are gone, and new ones replace all of them."""
    totals = new_totals()
    totals.add_readings(readings(10, {"power_gpu_watts": 300.0, "memory_used_bytes": 1.0}))
    assert totals.snapshot(at(15)).readings == {"power_gpu_watts": 300.0, "memory_used_bytes": 1.0}
    assert totals.snapshot(at(15) + 1).readings == {}
    totals.add_readings(readings(16, {"power_gpu_watts": 310.0}))
    assert totals.snapshot(at(16)).readings == {"power_gpu_watts": 310.0}


def test_b08_busy_seconds_of_an_alternating_load_are_half() -> None:
    """B08: utilisation 1,0,1,0 at 1 Hz integrates to half of the time."""
    totals = new_totals()
    for second in range(21):
        totals.add_readings(readings(10 + second, {"nvml_utilization_ratio": float(second % 2)}))
    assert totals.snapshot(at(30)).nvml_busy_ns == at(10)


def test_b03_a_rate_that_falls_is_a_total_that_rises() -> None:
    """B03: what a link moved in each window is added up: rate() sees the falling rate, and no reset."""
    totals, shown = new_totals(), []
    for second, moved in enumerate((16721, 24531, 24493, 12129), 1):
        totals.add_window(window(second, {**BUSY, "nvlink_received_bytes": moved}))
        shown.append(totals.snapshot(at(second)).quantities["nvlink_received_bytes"])
    assert shown == [16721, 41252, 65745, 77874]


@pytest.mark.parametrize(("gap_s", "expected_s"), [(1, 1), (5, 5), (5.001, None), (3600, None), (0, None), (-1, None)])
def test_a_gap_in_the_readings_is_not_integrated(gap_s: float, expected_s: float | None) -> None:
    """Time between readings counts up to five seconds; a longer pause is unseen, and time never runs backwards."""
    totals = new_totals()
    for second in (10, 10 + gap_s):
        totals.add_readings(readings(second, {"nvml_utilization_ratio": 1.0, "clock_event_hw_slowdown": 1.0}))
    snapshot = totals.snapshot(at(10 + gap_s))
    assert snapshot.nvml_busy_ns == (None if expected_s is None else at(expected_s))
    assert snapshot.clock_event_ns == ({} if expected_s is None else {"hw_slowdown": at(expected_s)})


def test_windows_are_counted_by_result() -> None:
    """Valid and late windows count as they come, rejected ones by the windows they stand for."""
    totals = new_totals()
    for end, late in ((1, False), (2, True), (3, False)):
        totals.add_window(window(end, BUSY, late=late))
    totals.add_window_rejected(WindowsRejected(at(6), G0.uuid, "gpm", 3))
    totals.add_rejected("sm_active", "above_range")
    totals.add_rejected("sm_active", "above_range")
    snapshot = totals.snapshot(at(6))
    counts = {("gpm", "valid"): 2, ("gpm", "late"): 1, ("gpm", "rejected"): 3}
    assert (snapshot.windows, snapshot.rejected) == (counts, {("sm_active", "above_range"): 2})
    assert (snapshot.observed_ns, snapshot.last_window_ns) == (at(3), {"gpm": at(3)})


@pytest.mark.parametrize(
    ("interval_s", "gap_s", "lost"),
    [
        (0.1, 0.0, 0),
        (0.1, 0.05, 0),  # jitter
        (0.1, 0.051, 1),
        (0.1, 0.1, 1),
        (0.1, 0.149, 1),
        (0.1, 1.0, 10),
        (0.1, 3600.0, 36_000),
        (1.0, 0.5, 0),
        (1.0, 2.4, 2),
        (None, 0.5, 2),  # nobody has told the interval: the window's own length
    ],
)
def test_windows_that_never_came_are_lost(interval_s: float | None, gap_s: float, lost: int) -> None:
    """Where a window begins later than the last one ended, those that were due between are counted."""
    totals = new_totals()
    if interval_s is not None:
        totals.add_interval(IntervalInForce(0, G0.uuid, "gpm", at(interval_s)))
    totals.add_window(window(10, BUSY, 0.2))
    totals.add_window(window(10.2 + gap_s, BUSY, 0.2))
    assert totals.snapshot(at(20)).windows.get(("gpm", "lost"), 0) == lost


@pytest.mark.parametrize(("rejected_until", "lost"), [(10.5, 0), (10.3, 2), (10.6, 0)])
def test_rejected_windows_leave_no_gap(rejected_until: float, lost: int) -> None:
    """Time that rejected windows cover is not lost as well; what is missing after them is."""
    totals = new_totals()
    totals.add_interval(IntervalInForce(0, G0.uuid, "gpm", at(0.1)))
    totals.add_window(window(10, BUSY, 0.1))
    totals.add_window_rejected(WindowsRejected(at(rejected_until), G0.uuid, "gpm", 5))
    totals.add_window(window(10.6, BUSY, 0.1))
    counts = {("gpm", "valid"): 2, ("gpm", "rejected"): 5} | ({("gpm", "lost"): lost} if lost else {})
    assert totals.snapshot(at(11)).windows == counts


def test_a_broken_chain_has_no_gap() -> None:
    """After a pause the first window follows nothing; the gaps after it count again."""
    totals = new_totals()
    totals.add_interval(IntervalInForce(0, G0.uuid, "gpm", at(1)))
    totals.interrupt("gpm")  # also before there is one
    totals.add_window(window(10, BUSY))
    totals.interrupt("gpm")
    totals.add_window(window(100, BUSY))
    assert ("gpm", "lost") not in totals.snapshot(at(100)).windows
    totals.add_window(window(104, BUSY))
    assert totals.snapshot(at(104)).windows["gpm", "lost"] == 3


@given(_WINDOWS.filter(bool))
@settings(max_examples=50)
def test_totals_only_grow_and_snapshots_never_change(windows: list[tuple[dict[Quantity, float], int]]) -> None:
    """Each snapshot is at least the one before it, and stays what it was when more windows come."""
    totals, end, taken = new_totals(), 0, []
    for values, duration in windows:
        end += duration
        totals.add_window(replace(window(0, values), end_ns=end, duration_ns=duration))
        snapshot = totals.snapshot(end)
        taken.append((snapshot, dict(snapshot.quantities), dict(snapshot.class_ns)))
    for snapshot, quantities, class_ns in taken:
        assert (snapshot.quantities, snapshot.class_ns) == (quantities, class_ns)
    for (before, *_), (after, *_) in pairwise(taken):
        assert all(after.quantities[q] >= total for q, total in before.quantities.items())
        assert all(after.class_ns[c] >= total for c, total in before.class_ns.items())
