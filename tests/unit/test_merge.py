"""Two sources of windows: who counts what, at every change of who leads, and never twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.diagnosis.classify import BottleneckClass
from gpu_hpc_exporter.model import Gpu, Quantity, Reading, Readings, State, Window, WindowSource
from gpu_hpc_exporter.samplers.totals import GpuSnapshot, GpuTotals
from unit.objects import G0, GAUGE_WINDOW_NS, NS, readings, window

MS = NS // 1000
PEAKS: dict[Reading, float] = {"dram_limit_bytes_per_second": 4e12, "pcie_limit_bytes_per_second": 50e9}


def new_totals(gpu: Gpu = G0) -> GpuTotals:
    """Totals of a GPU with PCIe whose peaks are known."""
    totals = GpuTotals(gpu, GAUGE_WINDOW_NS)
    totals.add_readings(Readings(gpu.uuid, 0, PEAKS))
    return totals


def gpm(end: float, seconds: float = 0.1, **values: float) -> Window:
    """A GPM window of a GPU that is half active."""
    return window(end, {"sm_active": 0.5, **values}, seconds)  # type: ignore[dict-item]  # names of quantities


def pm(end: float, seconds: float = 0.1, **values: float) -> Window:
    """A PM sampling window of the same GPU, which that source sees as 0.6 active."""
    return replace(gpm(end, seconds, **{"sm_active": 0.6, **values}), source="pm_sampling")


def after(*windows: Window, totals: GpuTotals | None = None) -> GpuSnapshot:
    """Totals after these windows."""
    totals = totals or new_totals()
    for one in windows:
        totals.add_window(one)
    return totals.snapshot(windows[-1].end_ns)


def ms(snapshot: GpuSnapshot, quantity: Quantity = "sm_active") -> float:
    """An integral in milliseconds."""
    return snapshot.quantities.get(quantity, 0) / MS


def classes(snapshot: GpuSnapshot) -> dict[BottleneckClass, float]:
    """Classified time in milliseconds."""
    return {name: round(ns / MS) for name, ns in snapshot.class_ns.items() if round(ns / MS)}


def test_pm_sampling_leads_from_its_first_window() -> None:
    """From then on what it carries is counted from it, the rest from GPM, and each source's time is its own."""
    snapshot = after(
        gpm(1.0, pipe_tensor=0.25), pm(1.1, l2_active=0.5), gpm(1.1, pipe_tensor=0.25), pm(1.2, l2_active=0.5)
    )
    assert (ms(snapshot), ms(snapshot, "pipe_tensor"), ms(snapshot, "l2_active")) == (50 + 60 + 60, 50, 100)
    assert snapshot.source_observed_ns == {"gpm": 200 * MS, "pm_sampling": 200 * MS}
    assert (snapshot.leader, snapshot.observed_ns) == ("pm_sampling", 200 * MS)  # the last one waits for GPM
    assert snapshot.truths == {"sm_active": "pm_sampling", "pipe_tensor": "gpm", "l2_active": "pm_sampling"}


@pytest.mark.parametrize(
    ("first", "expected_ms"),
    [
        (pm(0.9), 50),  # all of it is GPM's already
        (pm(1.0), 50),
        (pm(1.05), 50 + 30),  # the half after GPM's last window
        (pm(1.1), 50 + 60),
        (pm(1.3), 50 + 60),  # what GPM will say of the time before is still to come
    ],
)
def test_what_gpm_has_counted_is_not_counted_again(first: Window, expected_ms: float) -> None:
    """PM sampling's first windows may be of a time that GPM has told of."""
    assert ms(after(gpm(1.0), first)) == pytest.approx(expected_ms)


def test_gpm_counts_the_time_before_pm_sampling_began() -> None:
    """A GPM window that comes later than PM sampling's first one, and is older, is counted up to there."""
    snapshot = after(gpm(1.0), pm(1.35), gpm(1.1), gpm(1.2), gpm(1.3), gpm(1.4), totals=(totals := new_totals()))
    assert ms(snapshot) == pytest.approx(50 * 3.5 + 60)
    assert snapshot.observed_ns == 450 * MS
    assert after(pm(1.45), gpm(1.5), totals=totals).observed_ns == 550 * MS


@pytest.mark.parametrize("state", [s for s in get_args(State) if s != "active"])
def test_gpm_takes_over_where_pm_sampling_ends(state: State) -> None:
    """What GPM delivered meanwhile and PM sampling did not cover counts, the window across its end in part."""
    totals = new_totals()
    after(gpm(1.0), pm(1.1), gpm(1.1), gpm(1.2), gpm(1.3), pm(1.23, 0.13), totals=totals)
    assert ms(totals.snapshot(NS)) == pytest.approx(50 + 0.6 * 230)
    totals.take_state("pm_sampling", state, NS)
    snapshot = totals.snapshot(NS)
    assert ms(snapshot) == pytest.approx(50 + 0.6 * 230 + 35)
    assert snapshot.observed_ns == 400 * MS
    assert ms(after(gpm(1.4), totals=totals)) == pytest.approx(50 + 0.6 * 230 + 85)
    assert totals.snapshot(NS).leader == "gpm"


@pytest.mark.parametrize(("silence_s", "leader"), [(5.0, "pm_sampling"), (5.1, "gpm")])
def test_silence_of_five_seconds_ends_the_lead(silence_s: float, leader: WindowSource) -> None:
    """PM sampling without a word leads for five seconds of GPM's time; nothing of them is lost then."""
    totals = new_totals()
    after(gpm(1.0), pm(1.1), totals=totals)
    ends = [1.1 + tenth / 10 for tenth in range(round(silence_s * 10) + 1)]
    snapshot = after(*(gpm(end) for end in ends), totals=totals)
    assert snapshot.leader == leader
    assert snapshot.observed_ns == 200 * MS + (round(silence_s * NS) if leader == "gpm" else 0)


def test_a_late_burst_after_the_pause_counts_nothing_twice() -> None:
    """What PM sampling says of time that GPM has taken over counts for its own quantities only."""
    totals = new_totals()
    after(gpm(1.0), pm(1.1, l2_sectors=7), gpm(1.2, 0.2), totals=totals)
    totals.take_state("pm_sampling", "paused", NS)
    snapshot = after(pm(1.2, l2_sectors=7), pm(1.3, l2_sectors=7), gpm(1.3), totals=totals)
    assert ms(snapshot) == pytest.approx(50 + 60 + 50 + 60)
    assert snapshot.observed_ns == 400 * MS
    assert snapshot.quantities["l2_sectors"] == 21


def test_gaps_between_pm_windows_are_gpms() -> None:
    """Windows that PM sampling lost are time that GPM has seen."""
    snapshot = after(gpm(1.0), pm(1.1), gpm(1.1), gpm(1.2), gpm(1.3), pm(1.35), gpm(1.4), pm(1.45))
    assert ms(snapshot) == pytest.approx(50 + 60 + 50 + 25 + 60 + 60)
    assert snapshot.windows["pm_sampling", "lost"] == 2


def test_a_quantity_that_pm_sampling_drops_goes_back_to_gpm() -> None:
    """A reduced set hands over one quantity, with what GPM had held; another set hands it back."""
    pcie: dict[str, float] = {"pcie_host_to_gpu_bytes": 1000}
    snapshot = after(
        *(gpm(1.0, **pcie), pm(1.1, pcie_host_to_gpu_bytes=1100), gpm(1.1, **pcie)),
        *(gpm(1.2, **pcie), pm(1.2), gpm(1.3, **pcie), pm(1.25, 0.05, pcie_host_to_gpu_bytes=550)),
        pm(1.35, pcie_host_to_gpu_bytes=1100),
    )
    assert snapshot.quantities["pcie_host_to_gpu_bytes"] == 1000 + 1100 + 1000 + 1000 + 550
    assert ms(snapshot) == pytest.approx(50 + 60 * 3.5 - 30 + 30)


def test_dram_share_comes_from_bytes_where_the_peak_is_known() -> None:
    """(read + written) / (peak x time) is the truth; without a peak GPM's ratio stays it."""
    moved = {"dram_read_bytes": 150e9, "dram_written_bytes": 50e9}  # half of 4 TB/s in 100 ms
    known = after(pm(1.1, **moved), gpm(1.1, dram_active=0.4))
    assert (ms(known, "dram_active"), known.truths["dram_active"]) == (50, "pm_sampling")
    unknown = GpuTotals(G0, GAUGE_WINDOW_NS)
    snapshot = after(pm(1.1, **moved), gpm(1.1, dram_active=0.4), totals=unknown)
    assert (ms(snapshot, "dram_active"), snapshot.truths["dram_active"]) == (40, "gpm")
    assert snapshot.quantities["dram_read_bytes"] == 150_000_000_000


QUIET: Mapping[str, float] = {"pcie_host_to_gpu_bytes": 0, "pcie_gpu_to_host_bytes": 0, "dram_active": 0.1}


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ([gpm(1.1, pipe_tensor=0.9)], {"compute_bound": 100}),
        ([gpm(1.05, 0.05, pipe_tensor=0.9), gpm(1.1, 0.05, pipe_tensor=0.3)], {"compute_bound": 100}),  # 0.6
        ([gpm(1.08, 0.08, pipe_tensor=0.9), gpm(1.1, 0.02, pipe_tensor=0.0)], {"compute_bound": 100}),  # 0.72
        ([gpm(1.04, 0.04, pipe_tensor=0.9), gpm(1.1, 0.06, pipe_tensor=0.2)], {"mixed": 100}),  # 0.48
        ([gpm(1.05, 0.05, pipe_tensor=0.9), gpm(1.1, 0.05)], {"compute_bound": 100}),  # half of the time is enough
        ([gpm(1.04, 0.04, pipe_tensor=0.9), gpm(1.1, 0.06)], {"unknown": 100}),  # less is not
    ],
)
def test_gpm_fills_in_what_pm_sampling_does_not_measure(
    beside: list[Window], expected: Mapping[BottleneckClass, float]
) -> None:
    """Pipes of a PM window are the mean of GPM's over its time, where GPM tells of at least half of it."""
    assert classes(after(pm(1.1, **QUIET), *beside, totals=leading())) == expected


def leading() -> GpuTotals:
    """Totals of a GPU whose GPM is active and has told of nothing."""
    totals = new_totals()
    totals.take_state("gpm", "active", NS)
    return totals


def test_short_windows_lie_within_one_of_gpms() -> None:
    """Ten windows of 10 ms wait for the 100 ms of GPM and are classified one by one; amounts are scaled."""
    totals = new_totals(replace(G0, links=("pcie", "nvlink")))
    totals.add_readings(Readings(G0.uuid, 0, {**PEAKS, "nvlink_limit_bytes_per_second": 1e9}))
    totals.add_window(gpm(1.0))
    for tenth in range(1, 11):
        totals.add_window(pm(1.0 + tenth / 100, 0.01, **QUIET))
    assert totals.snapshot(NS).observed_ns == 100 * MS
    link = {"nvlink_received_bytes": 7e7, "nvlink_transmitted_bytes": 0.0}  # 0.7 of the peak in 100 ms
    snapshot = after(gpm(1.1, pipe_tensor=0.1, **link), totals=totals)
    assert classes(snapshot) == {"unknown": 100, "nvlink_bound": 100}
    assert sum(snapshot.histograms["nvlink"].counts) == 10
    assert snapshot.intensities["nvlink"] == pytest.approx(1.0)


def test_windows_wait_for_gpm_three_seconds_at_most() -> None:
    """GPM that has fallen behind, or says that it is not active, keeps no class waiting."""
    totals = new_totals()
    totals.add_window(gpm(1.0))
    for tenth in range(1, 31):
        totals.add_window(pm(1 + tenth / 10))
    assert totals.snapshot(4 * NS).observed_ns == 100 * MS
    assert after(pm(4.1), totals=totals).observed_ns == 3200 * MS
    totals = new_totals()
    after(gpm(1.0), pm(1.1), totals=totals)
    totals.take_state("gpm", "failed", NS)
    assert totals.snapshot(NS).observed_ns == 200 * MS
    assert after(pm(1.2), totals=totals).observed_ns == 300 * MS


def test_a_pause_leaves_nothing_waiting() -> None:
    """Windows that wait for GPM are classified when PM sampling stops."""
    totals = new_totals()
    after(gpm(1.0), pm(1.1), totals=totals)
    totals.take_state("pm_sampling", "paused", NS)
    assert totals.snapshot(NS).observed_ns == 200 * MS


def test_windows_that_overlap_count_their_time_once() -> None:
    """Where the GPU's clock was put back, time is counted from where it was, amounts are all new; repeats are not."""
    link: dict[str, float] = {"pcie_host_to_gpu_bytes": 0.8 * 0.7 * 5e9, "pcie_gpu_to_host_bytes": 0}
    snapshot = after(pm(1.1, **link), pm(1.1, **link), pm(1.15, **link))
    assert snapshot.quantities["pcie_host_to_gpu_bytes"] == 2 * 2.8e9
    assert (ms(snapshot), snapshot.observed_ns) == (90, 150 * MS)
    assert snapshot.source_observed_ns == {"pm_sampling": 150 * MS}
    assert snapshot.intensities["pcie"] == pytest.approx(0.8)


def test_an_active_gpm_is_waited_for() -> None:
    """PM windows that come before GPM's first ones are classified with them; not for ever."""
    totals = new_totals()
    totals.take_state("gpm", "active", NS)
    totals.add_window(pm(1.1, **QUIET))
    assert totals.snapshot(NS).observed_ns == 0
    assert classes(after(gpm(1.1, pipe_tensor=0.9), totals=totals)) == {"compute_bound": 100}
    totals = new_totals()
    totals.take_state("gpm", "active", NS)
    for tenth in range(1, 31):
        totals.add_window(pm(1 + tenth / 10))
    assert totals.snapshot(NS).observed_ns == 0
    assert after(pm(4.1), totals=totals).observed_ns == 3100 * MS


def test_many_gaps_before_gpm_comes_count_nothing_twice() -> None:
    """Of more gaps than are remembered the oldest are given up; the newest are GPM's."""
    totals = new_totals()
    totals.add_window(gpm(1.0))
    for n in range(100):
        totals.add_window(pm(1.01 + n * 0.02, 0.01))
    snapshot = after(*(gpm(1 + tenth / 10) for tenth in range(1, 21)), totals=totals)
    assert 100 + 1000 + 500 < snapshot.observed_ns / MS < 2000
    assert ms(snapshot) == pytest.approx(50 + 600 + (snapshot.observed_ns / MS - 1100) / 2)


def test_pm_sampling_alone_is_whole() -> None:
    """Where there is no GPM (A100), windows are classified at once from what they carry."""
    snapshot = after(pm(1.1, pipe_tensor=0.9, **QUIET), pm(1.2, pipe_tensor=0.9, **QUIET))
    assert (classes(snapshot), snapshot.leader) == ({"compute_bound": 200}, "pm_sampling")
    assert snapshot.sm_utilization == pytest.approx(0.9)


def test_what_only_pm_sampling_measures_vanishes_with_it() -> None:
    """Five seconds after its last window its gauges and intensities are gone; GPM's and all counters stay."""
    totals = new_totals()
    busy = {"l2_sectors": 1e10, "l2_missed_sectors": 4e9, "l2_active": 0.5}
    after(gpm(1.0), pm(1.1, **busy), gpm(1.1), totals=totals)
    totals.take_state("pm_sampling", "paused", NS)
    for tenth in range(12, 70):
        totals.add_window(gpm(tenth / 10))
    before, gone = totals.snapshot(round(6.1 * NS)), totals.snapshot(round(6.1 * NS) + 1)
    assert (before.l2_miss_ratio, before.intensities["l2"], before.gauges["l2_active"]) == (0.4, 0.4, 0.5)
    assert (gone.l2_miss_ratio, gone.gauges, gone.intensities) == (None, {"sm_active": 0.5}, {})
    assert gone.quantities["l2_sectors"] == 10**10
    assert sum(gone.histograms["l2"].counts) == 1


@pytest.mark.parametrize(
    ("sectors", "missed", "peak", "expected"),
    [
        (1e10, 2e9, 4e12, 0.2),
        (1e10, 1.1e10, 4e12, 1.0),
        (0.05 * 4e12 / 32 / 10, 0, 4e12, 0.0),
        (0.05 * 4e12 / 32 / 10 - 1, 0, 4e12, None),
        (1e10, 2e9, 0.0, None),
    ],
)
def test_l2_miss_ratio(sectors: float, missed: float, peak: float, expected: float | None) -> None:
    """Missed by requested sectors of the gauge window, absent below 5 percent of the DRAM peak and without one."""
    totals = GpuTotals(G0, GAUGE_WINDOW_NS)
    totals.add_readings(readings(0, {"dram_limit_bytes_per_second": peak}))
    snapshot = after(pm(1.1, l2_sectors=sectors, l2_missed_sectors=missed), totals=totals)
    assert snapshot.l2_miss_ratio == (None if expected is None else pytest.approx(expected))


# Random histories. Every window of a source sees the same rates, so that totals are rates by covered time.

Interval = tuple[int, int]


@dataclass(frozen=True)
class Delivery:
    """A window, or that PM sampling says `state`, as it arrives."""

    at_ns: int
    window: Window | None
    state: State | None = None


@st.composite
def intervals(draw: st.DrawFn, lengths: list[int], gaps: list[int]) -> list[Interval]:
    """Stretches of time in ms: runs of contiguous windows, between them gaps or (-1) a clock that was put back."""
    time, before = draw(st.integers(0, 3000)), 0
    found = []
    for _ in range(draw(st.integers(1, 4))):
        length, gap = draw(st.sampled_from(lengths)), draw(st.sampled_from(gaps))
        time += gap if gap >= 0 else -(min(length, before) // 4)
        before = length
        for _ in range(draw(st.integers(1, 30))):
            found.append((time, time + length))
            time += length
    return found


def has_pcie(source: WindowSource, end: int) -> bool:
    """PM sampling gives up a counter in every other second."""
    return source == "gpm" or end // 1000 % 2 == 0


def delivered(source: WindowSource, times: Iterable[Interval], burst: int, lag: int) -> Iterator[Delivery]:
    """Windows at the end of the burst that they belong to, `lag` later."""
    for begin, end in times:
        length = end - begin
        values: dict[Quantity, float] = {"sm_active": 0.5}
        if has_pcie(source, end):
            values["pcie_host_to_gpu_bytes"] = 1000 * length
        values["pipe_int" if source == "gpm" else "l2_active"] = 0.25
        values["nvlink_received_bytes" if source == "gpm" else "l2_sectors"] = 7 * length + 1
        yield Delivery((-(-end // burst) * burst + lag) * MS, Window(G0.uuid, source, end * MS, length * MS, values))


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Interval], list[Interval], list[Delivery]]:
    """GPM's time, PM sampling's time, and what arrives when."""
    gpms = draw(intervals([100, 110, 130], draw(st.sampled_from([[0], [0, 70, 3000]]))))
    pms = draw(intervals([1, 10, 100], [-1, 0, 70, 400, 2500, 7000]))
    bursts, lags = st.sampled_from([1, 100, 1000, 1300]), st.sampled_from([0, 30, 900, 2000, 7000])
    events = [
        *delivered("gpm", gpms, draw(bursts), draw(lags)),
        *delivered("pm_sampling", pms, draw(bursts), draw(lags)),
    ]
    states: st.SearchStrategy[State] = st.sampled_from(["active", "paused", "busy", "stale", "failed"])
    events += [Delivery(at * MS, None, draw(states)) for at in draw(st.lists(st.integers(0, 20_000), max_size=3))]
    return gpms, pms, sorted(events, key=lambda event: event.at_ns)


def covered(times: Iterable[Interval]) -> int:
    """Length of the union."""
    total = until = 0
    for begin, end in sorted(times):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


@given(histories())
@settings(max_examples=300)
def test_no_time_is_counted_twice_and_none_is_lost(
    history: tuple[list[Interval], list[Interval], list[Delivery]],
) -> None:
    """Whatever comes when: at least what GPM saw, at most what either did, and all of it where GPM has no gap."""
    gpms, pms, events = history
    totals, taken = new_totals(), []
    for event in events:
        if event.window is not None:
            totals.add_window(event.window)
        elif event.state is not None:
            totals.take_state("pm_sampling", event.state, event.at_ns)
        taken.append(totals.snapshot(event.at_ns))
    totals.take_state("gpm", "failed", NS)
    totals.take_state("pm_sampling", "paused", NS)
    taken.append(totals.snapshot(60 * NS))
    check_growth(taken)
    last = taken[-1]
    put_back = sum(end - begin for begin, end in pms) - covered(pms)
    with_pcie = [time for time in pms if has_pcie("pm_sampling", time[1])]
    shared: tuple[tuple[float, float, list[Interval]], ...] = (
        (last.observed_ns / MS, 0.001, pms),
        (2 * ms(last), 0.001, pms),
        (last.quantities["pcie_host_to_gpu_bytes"] / 1000, put_back + len(events) / 1000, with_pcie),
    )
    is_whole = all(before[1] == behind[0] for before, behind in pairwise(gpms)) and gpms[0][0] <= pms[0][0]
    for counted, rounding, seen in shared:
        either = covered([*gpms, *seen])
        assert (either if is_whole else covered(gpms)) - rounding <= counted <= either + rounding
    own: tuple[tuple[Quantity, list[Interval]], ...] = (("nvlink_received_bytes", gpms), ("l2_sectors", pms))
    for quantity, times in own:
        assert last.quantities[quantity] == sum(7 * (end - begin) + 1 for begin, end in times)
    assert last.source_observed_ns == {"gpm": covered(gpms) * MS, "pm_sampling": covered(pms) * MS}


def check_growth(taken: list[GpuSnapshot]) -> None:
    """No counter goes back, and classes always add up to the observed time."""
    for snapshot in taken:
        assert snapshot.observed_ns == sum(snapshot.class_ns.values())
    for before, behind in pairwise(taken):
        assert all(behind.quantities[q] >= total for q, total in before.quantities.items())
        assert all(behind.class_ns[c] >= total for c, total in before.class_ns.items())
        assert all(behind.histograms[u].sum_nano >= h.sum_nano for u, h in before.histograms.items())
