"""The windows that the live page shows: ten minutes of each GPU, bounded, in order, nothing made up."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_hpc_exporter.diagnosis.classify import CLASSES, BottleneckClass
from gpu_hpc_exporter.samplers.window_history import ABSENT, CAPACITY, COLUMNS, ROW, STEPS, WindowHistory, WindowSlice
from unit.objects import G0, G1, M1, NS, inventory, readings, running_fleet, window

MS = 1_000_000


def history_of(count: int, length_ns: int = 100 * MS) -> WindowHistory:
    """So many windows one after the other; SM active tells which one it is."""
    history = WindowHistory()
    for number in range(count):
        history.add(number * length_ns, length_ns, {"sm": 0.5}, (number % STEPS) / STEPS, "mixed")
    return history


def rows(part: WindowSlice) -> list[tuple[int, int]]:
    """End in ms and the step of SM active of each window."""
    cells = [part.cells[place : place + ROW] for place in range(0, len(part.cells), ROW)]
    return [(end // MS, row[0]) for end, row in zip(part.ends_ns, cells, strict=True)]


@given(count=st.integers(0, 3 * CAPACITY), asked=st.integers(-5, 4 * CAPACITY))
def test_what_is_kept_follows_the_sequence_number(count: int, asked: int) -> None:
    """From any number on: the newest ten minutes at most, in order, whatever has been overwritten."""
    history = _shared(count)
    part = history.since(asked)
    first = max(asked, count - CAPACITY, 0)
    expected = [((number + 1) * 100, number % STEPS) for number in range(first, count)]
    assert (part.following, rows(part)) == (count, expected)


_MADE: dict[int, WindowHistory] = {}


def _shared(count: int) -> WindowHistory:
    if count not in _MADE:
        _MADE[count] = history_of(count)
    return _MADE[count]


def test_memory_is_bounded() -> None:
    """Twice ten minutes take no more room than ten minutes."""
    part = history_of(2 * CAPACITY).since(0)
    assert (len(part.ends_ns), len(part.cells)) == (CAPACITY, CAPACITY * ROW)


def test_a_range_of_time() -> None:
    """What ended after a time, as long as it is kept."""
    history = history_of(50)
    assert [end for end, _ in rows(history.after(4700 * MS))] == [4800, 4900, 5000]
    assert len(history.after(-1).ends_ns) == 50
    assert len(history.after(5000 * MS).ends_ns) == 0


def test_short_windows_are_joined() -> None:
    """Ten windows of 10 ms are one of 90 ms and the beginning of the next: means, and the class of most of its time."""
    history = WindowHistory()
    for number in range(10):
        name: BottleneckClass = "dram_bound" if number < 5 else "idle"
        history.add(number * 10 * MS, 10 * MS, {"sm": 1.0} if number % 2 else {}, float(number < 5), name)
    part = history.since(0)
    assert (list(part.ends_ns), list(part.durations_ns)) == ([90 * MS], [90 * MS])
    assert part.cells[0] == round(5 / 9 * STEPS)
    assert part.cells[COLUMNS.index("sm")] == STEPS, "a mean over what was measured, not over all"
    assert part.cells[COLUMNS.index("l2")] == ABSENT
    assert CLASSES[part.cells[-1]] == "dram_bound"


def test_short_windows_on_both_sides_of_a_gap_are_not_joined() -> None:
    """What was not seen is in no window."""
    history = WindowHistory()
    for begin in (0, 10, 1000, 1010, 1020, 1030, 1040, 1050, 1060, 1070, 1080):
        history.add(begin * MS, 10 * MS, {}, 0.0, "idle")
    part = history.since(0)
    assert list(zip(part.ends_ns, part.durations_ns, strict=True)) == [(20 * MS, 20 * MS), (1090 * MS, 90 * MS)]


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 300)), max_size=60))
def test_no_time_is_lost_or_counted_twice(windows: list[tuple[int, int]]) -> None:
    """Whatever lengths and gaps: windows do not overlap, and their lengths add up to what was told, less what waits."""
    history, time_ns, told = WindowHistory(), 0, 0
    for length, gap in windows:
        time_ns += gap * MS
        history.add(time_ns, length * MS, {}, None, "unknown")
        time_ns += length * MS
        told += length * MS
    part = history.since(0)
    spans = [(end - duration, end) for end, duration in zip(part.ends_ns, part.durations_ns, strict=True)]
    # A gap of less than a window does not end a joined one, which then seems to begin later than it did.
    assert all(before[1] <= after[1] for before, after in itertools.pairwise(spans))
    assert told - 90 * MS < sum(part.durations_ns) <= told or told == sum(part.durations_ns)


def test_absent_is_not_zero() -> None:
    """A unit that nobody measures and nvidia-smi before its first reading are absent."""
    history = WindowHistory()
    history.add(0, 100 * MS, {"dram": 0.0}, None, "unknown")
    cells = history.since(0).cells
    assert [cells[COLUMNS.index(name)] for name in ("sm_active", "nvml_utilization", "dram", "pcie")] == [
        ABSENT,
        ABSENT,
        0,
        ABSENT,
    ]


def test_the_fleet_keeps_what_it_classifies() -> None:
    """Windows of a GPU arrive with their class and with what nvidia-smi says, while that is fresh."""
    fleet = running_fleet(replace(G0, links=()), now=30)
    fleet.put(readings(9, {"nvml_utilization_ratio": 1.0}))
    fleet.put(window(10, {"sm_active": 0.0, "pipe_tensor": 0.0, "dram_active": 0.0}))
    fleet.put(window(20, {"sm_active": 1.0, "pipe_tensor": 0.9, "dram_active": 0.1}))
    found = fleet.windows(G0.uuid, 600 * NS)
    assert found is not None
    now_ns, part = found
    nvml = COLUMNS.index("nvml_utilization")
    assert (now_ns, list(part.ends_ns)) == (30 * NS, [10 * NS, 20 * NS])
    assert [CLASSES[part.cells[place]] for place in (ROW - 1, 2 * ROW - 1)] == ["idle", "compute_bound"]
    assert [part.cells[nvml], part.cells[ROW + nvml]] == [STEPS, ABSENT]
    assert fleet.windows("GPU-nobody", NS) is None


def test_new_windows_are_told_once() -> None:
    """A follower gets nothing of the past, then each window once; a GPU that came later too."""
    fleet = running_fleet(replace(G0, links=()), now=30)
    fleet.put(window(10, {"sm_active": 0.0}))
    _, first = fleet.windows_since({})
    assert [len(part.ends_ns) for part in first.values()] == [0]
    fleet.put(window(11, {"sm_active": 0.0}))
    following = {uuid: part.following for uuid, part in first.items()}
    _, second = fleet.windows_since(following)
    assert list(second[G0.uuid].ends_ns) == [11 * NS]
    fleet.put(inventory(replace(G0, links=()), G1))
    _, third = fleet.windows_since({uuid: part.following for uuid, part in second.items()})
    assert {uuid: len(part.ends_ns) for uuid, part in third.items()} == {G0.uuid: 0, G1.uuid: 0}


def test_an_instance_that_is_gone_leaves_no_windows() -> None:
    """MIG instances that were taken apart cost no memory; one that comes back begins anew."""
    fleet = running_fleet(G1, M1, now=30)
    fleet.put(window(10, {"sm_active": 0.0}, uuid=M1.uuid))
    fleet.put(inventory(G1, at=11))
    fleet.put(inventory(G1, M1, at=12))
    fleet.put(window(13, {"sm_active": 0.0}, uuid=M1.uuid))
    found = fleet.windows(M1.uuid, 600 * NS)
    assert found is not None
    assert list(found[1].ends_ns) == [13 * NS]


@pytest.mark.parametrize("value", [0.0, 0.004, 0.005, 0.5, 0.999, 1.0])
def test_ratios_are_kept_to_half_a_percent(value: float) -> None:
    """Fine enough for a colour."""
    history = WindowHistory()
    history.add(0, 100 * MS, {"sm": value}, value, "mixed")
    assert history.since(0).cells[0] / STEPS == pytest.approx(value, abs=0.5 / STEPS)
