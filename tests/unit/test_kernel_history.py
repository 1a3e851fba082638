"""What is kept of a file's last hour, and what it is compared with."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_hpc_exporter.samplers.kernel_history import APART_NS, HOUR_NS, MIN_HISTORY_NS, MINUTE_NS, History, Mark
from unit.objects import NS


def mark(time_s: float, *runs: tuple[int, int]) -> Mark:
    """Executions and nanoseconds of each slot."""
    return Mark(round(time_s * NS), array("Q", [count for count, _ in runs]), array("Q", [ns for _, ns in runs]))


@given(st.lists(st.integers(5, 600), min_size=1, max_size=400))
def test_memory_is_bounded_and_the_hour_is_there(steps_s: list[int]) -> None:
    """However irregularly marks come: of the last minute all, before it few, and one for the hour as soon as may be."""
    history = History()
    times = [0]
    for step_s in steps_s:
        times.append(times[-1] + step_s * NS)
    for number, time_ns in enumerate(times, 1):
        history.add(mark(time_ns / NS))
        kept, seen = history.times_ns, times[:number]
        assert set(kept) <= set(seen)
        assert sorted(kept) == kept
        young = [one for one in seen if time_ns - one < MINUTE_NS]
        assert kept[len(kept) - len(young) :] == young
        old = [one for one in seen if time_ns - one >= MINUTE_NS]
        if old:
            assert kept[len(kept) - len(young) - 1] == old[-1]  # what the minute begins with
        assert len(kept) - len(young) <= 5
        hours = [one for one in seen if time_ns - one >= HOUR_NS]
        if hours:
            assert HOUR_NS <= time_ns - kept[0] <= HOUR_NS + APART_NS + 1200 * NS
        else:
            assert kept[0] == 0


def test_each_slot_is_compared_with_itself() -> None:
    """The slowest counts; one that came later was nothing before; slots of others do not count."""
    history = History()
    history.add(mark(0, (1000, 1000), (1000, 100_000)))
    history.add(mark(600, (2000, 2000), (2000, 200_000)))
    now = mark(660, (2100, 2300), (2100, 300_000), (200, 999_999))
    assert history.slowest(now, [0]) == pytest.approx(3 / (1300 / 1100))
    assert history.slowest(now, [0, 1]) == pytest.approx(10 / 2 * 1.1)
    assert history.slowest(now, [2]) == 0  # all of it is of the last minute
    assert history.slowest(now, []) == 0


@pytest.mark.parametrize(("known_s", "tells"), [(MIN_HISTORY_NS / NS, True), (MIN_HISTORY_NS / NS - 1, False)])
def test_too_short_a_history_tells_nothing(known_s: float, *, tells: bool) -> None:
    """Ten minutes, or the minute would be compared with little but itself."""
    history = History()
    history.add(mark(0, (0, 0)))
    history.add(mark(known_s - 60, (1000, 1000)))
    assert (history.slowest(mark(known_s, (1100, 2000)), [0]) > 0) == tells
