"""What tracing costs a GPU, from windows: noise makes no figure, a slowdown is found, what is not there is not zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.diagnosis.slowdown import (
    MAX_COMPARISONS,
    MAX_HALF_WIDTH,
    MIN_COMPARISONS,
    STALE_NS,
    AgentSlowdown,
    Pair,
    estimate,
)
from gpu_hpc_exporter.model import Quantity, Tracing, WindowSource
from unit.objects import NS

MS = 1_000_000
WINDOW_NS = 100 * MS
LOOK_S = 5
Spans = list[tuple[float, float]]
Rate = Callable[[float], float]
"""What a GPU would do at a time in seconds, were it not traced."""


@dataclass
class Gpu:
    """A GPU whose agent slows it down, sampled in windows and told of every five seconds."""

    slowdown: float
    rate: Rate
    spans: Spans
    quantity: Quantity = "pipe_tensor"
    interval_ns: int = WINDOW_NS
    source: WindowSource = "gpm"
    is_lost: Callable[[int], bool] = lambda _: False
    doubtful: frozenset[int] = frozenset()
    """Looks at which nobody knows what was traced."""
    extra: Callable[[], dict[Quantity, float]] = dict
    meter: AgentSlowdown = field(default_factory=AgentSlowdown)
    now_ns: int = 0

    def run(self, seconds: int) -> float | None:
        """So long, and what it then says."""
        looks = range(self.now_ns // NS // LOOK_S, (self.now_ns // NS + seconds) // LOOK_S)
        number = self.now_ns // self.interval_ns
        for look in looks:
            self.now_ns = (look + 1) * LOOK_S * NS
            while (number + 1) * self.interval_ns <= self.now_ns:
                if not self.is_lost(number):
                    self.sample(number)
                number += 1
            self.meter.add_tracing(self.now_ns, None if look in self.doubtful else self.told())
        return self.meter.slowdown(self.now_ns)

    def sample(self, number: int) -> None:
        """The window with this number."""
        begin_ns, end_ns = number * self.interval_ns, (number + 1) * self.interval_ns
        traced = covered_ns(self.spans, begin_ns, end_ns) / self.interval_ns
        value = self.rate((begin_ns + end_ns) / 2 / NS) * (1 - self.slowdown * traced)
        self.meter.add_window(self.source, begin_ns, end_ns, {self.quantity: value, **self.extra()})

    def told(self) -> Tracing:
        """What agents' files say at this look."""
        before_s, now_s = self.now_ns / NS - LOOK_S, self.now_ns / NS
        ended = [(now_s - b, now_s - e) for b, e in self.spans if before_s < e <= now_s]
        lasting = [now_s - b for b, e in self.spans if b < now_s < e]
        return Tracing(tuple((round(b * NS), round(e * NS)) for b, e in ended), round(max(lasting, default=0) * NS))


def covered_ns(spans: Spans, begin_ns: int, end_ns: int) -> float:
    """Time between the two in which at least one span lies."""
    covered, until = 0.0, float(begin_ns)
    for begin_s, end_s in sorted(span for span in spans if span[0] * NS < end_ns and span[1] * NS > begin_ns):
        covered += max(0.0, min(end_s * NS, end_ns) - max(begin_s * NS, until))
        until = max(until, end_s * NS)
    return covered


def traces(count: int, random: Random, period_s: float = 10.0, length_s: float = 1.0) -> Spans:
    """One in each period, after a pause that differs by a quarter, as agents make them."""
    found, at = [], 12.0
    for _ in range(count):
        found.append((at, at + length_s))
        at += length_s + (period_s - length_s) * random.uniform(0.75, 1.25)
    return found


def noisy(random: Random, window: float, second: float) -> Rate:
    """Busy to 40 %, give or take these shares, from window to window and from second to second."""
    seconds: dict[int, float] = {}

    def rate(at_s: float) -> float:
        level = seconds.setdefault(int(at_s), random.uniform(1 - second, 1 + second))
        return 0.4 * level * random.uniform(1 - window, 1 + window)

    return rate


def bursts(random: Random) -> Rate:
    """Each second exponentially more or less than the mean: most do little, a few do nearly everything."""
    seconds: dict[int, float] = {}
    return lambda at_s: seconds.setdefault(int(at_s), min(1.0, random.expovariate(8)))


def phases(random: Random) -> Rate:
    """Full or idle for 3 s to half a minute at a time."""
    edges, level = [0.0], [random.random() < 0.5]

    def rate(at_s: float) -> float:
        while edges[-1] <= at_s:
            edges.append(edges[-1] + random.uniform(3, 30))
            level.append(not level[-1])
        return 0.8 * level[sum(edge <= at_s for edge in edges)]

    return rate


SEEDS = st.integers(0, 1 << 32)
CASES = settings(max_examples=25, deadline=None, derandomize=True)


@given(SEEDS, st.floats(0, 0.9), st.floats(0, 0.9), st.sampled_from(["noisy", "bursts", "phases"]))
@CASES
def test_noise_is_no_slowdown(seed: int, window: float, second: float, kind: str) -> None:
    """Whatever the work does by itself: a figure, where there is one, is 0 within twice its stated bound."""
    random = Random(seed)
    rate = {"noisy": noisy(random, window, second), "bursts": bursts(random), "phases": phases(random)}[kind]
    gpu = Gpu(0.0, rate, traces(70, random))
    for _ in range(7):
        found = gpu.run(100)
        assert found is None or abs(found) <= 2 * MAX_HALF_WIDTH


@given(SEEDS, st.floats(0, 0.5), st.sampled_from([20, 100]), st.sampled_from(["gpm", "pm_sampling"]))
@CASES
def test_a_known_slowdown_is_found(seed: int, slowdown: float, interval_ms: int, source: WindowSource) -> None:
    """Of work that varies by a few percent, to its stated bound and a little; with windows of either length."""
    random = Random(seed)
    rate = noisy(random, 0.1, 0.03)
    gpu = Gpu(slowdown, rate, traces(20, random), interval_ns=interval_ms * MS, source=source)
    found = gpu.run(200)
    assert found is not None
    assert found == pytest.approx(slowdown, abs=1.5 * MAX_HALF_WIDTH)


@given(SEEDS, st.floats(0, 0.6), st.floats(0, 0.5))
@CASES
def test_windows_that_are_not_there_are_not_zero(seed: int, lost: float, slowdown: float) -> None:
    """Steady work gives the exact figure or none, whichever windows were lost."""
    random = Random(seed)
    gone = [random.random() < lost for _ in range(6000)]
    gpu = Gpu(slowdown, lambda _: 0.5, traces(40, random), is_lost=lambda number: gone[number])
    found = gpu.run(400)
    assert found is None or found == pytest.approx(slowdown, abs=1e-9)
    assert found is not None or lost > 0.1


@given(SEEDS, st.floats(0.01, 0.5), st.sampled_from([-0.003, 0.003]))
@CASES
def test_a_drift_cancels_out(seed: int, slowdown: float, drift: float) -> None:
    """Work that gets steadily faster or slower, by 0.7 % a second."""
    gpu = Gpu(slowdown, lambda at_s: max(0.0, 0.4 + drift * (at_s - 100)), traces(20, Random(seed)))
    assert gpu.run(200) == pytest.approx(slowdown, abs=0.002)


@given(SEEDS, st.integers(2, 4), st.floats(0.05, 0.5))
@CASES
def test_processes_that_trace_at_different_times(seed: int, processes: int, slowdown: float) -> None:
    """The time of each is traced time, and no other's untraced time; some overlap, some follow one another."""
    random = Random(seed)
    spans = [span for _ in range(processes) for span in traces(30, random)]
    found = Gpu(slowdown, lambda _: 0.5, spans).run(300)
    assert found == pytest.approx(slowdown, abs=1e-9)


def test_processes_that_always_trace_at_once() -> None:
    """Times that overlap are one, however often a look comes between their ends."""
    spans = [(12.0 + 9.7 * n + late, 12.8 + 9.7 * n + late) for n in range(20) for late in (0.0, 0.4)]
    assert Gpu(0.2, lambda _: 0.5, spans).run(200) == pytest.approx(0.2, abs=1e-9)


def test_one_that_still_traces() -> None:
    """The time after a trace is untraced only until another one begins, though that one has not ended yet."""
    spans = [(12.0 + 40 * n + late, 12.0 + 40 * n + end) for n in range(14) for late, end in ((0.0, 1.0), (1.8, 11.8))]
    assert Gpu(0.2, lambda _: 0.5, spans).run(550) == pytest.approx(0.2, abs=1e-9)


@pytest.mark.parametrize(("steady", "wild"), [("pipe_fp32", "dram_active"), ("dram_active", "pipe_fp32")])
def test_the_more_certain_unit_speaks(steady: Quantity, wild: Quantity) -> None:
    """DRAM traffic that is noise says nothing beside a pipe that is steady, and the other way round."""
    random = Random(1)
    gpu = Gpu(0.1, lambda _: 0.3, traces(30, random), steady, extra=lambda: {wild: random.random()})
    assert gpu.run(300) == pytest.approx(0.1, abs=1e-9)


def test_when_there_is_a_figure() -> None:
    """From the tenth comparison on, until five minutes after the last; none of a GPU that hardly does a thing.

    The first trace is not compared: windows are kept once agents trace.
    """
    spans: Spans = [(12.0 + 10 * n, 13.0 + 10 * n) for n in range(MIN_COMPARISONS + 1)]
    gpu = Gpu(0.2, lambda _: 0.5, spans)
    assert gpu.run(115) is None
    assert gpu.run(5) == pytest.approx(0.2)
    last_ns = round(spans[-1][1] * NS)
    assert gpu.meter.slowdown(last_ns + STALE_NS) == pytest.approx(0.2)
    assert gpu.meter.slowdown(last_ns + STALE_NS + 1) is None
    assert Gpu(0.2, lambda _: 0.0, spans).run(200) is None
    assert Gpu(0.2, lambda _: 0.0005, spans).run(200) is None
    assert Gpu(0.2, lambda _: 0.5, spans, quantity="sm_active").run(200) is None


def test_the_newest_comparisons_count() -> None:
    """What was before the last 60 is forgotten, and so is what is older than half an hour."""
    gpu = Gpu(0.2, lambda _: 0.5, [(12.0 + 10 * n, 13.0 + 10 * n) for n in range(120 + MAX_COMPARISONS)])
    gpu.run(1210)
    gpu.slowdown = 0.1
    assert gpu.run(550) != pytest.approx(0.1, abs=0.001)
    assert gpu.run(50) == pytest.approx(0.1)
    spans: Spans = [(12.0 + 220 * n, 13.0 + 220 * n) for n in range(12)]
    assert Gpu(0.1, lambda _: 0.5, spans).run(2500) is None


@pytest.mark.parametrize(
    "spans",
    [
        [(12.0 + 20 * n, 22.5 + 20 * n) for n in range(20)],
        [(12.0 + 1.3 * n, 13.0 + 1.3 * n) for n in range(200)],
        [(12.0 + 10 * n, 12.2 + 10 * n) for n in range(30)],
        [(12.0, 1000.0)],
        [],
    ],
)
def test_what_cannot_be_compared(spans: Spans) -> None:
    """Traces longer than 10 s, such that leave too little between them, that hold no windows, that never end, none."""
    gpu = Gpu(0.2, lambda _: 0.5, spans)
    assert gpu.run(300) is None


def test_windows_as_long_as_traces_tell_nothing() -> None:
    """A window that is in part traced is neither traced nor untraced."""
    assert Gpu(0.2, lambda _: 0.5, traces(30, Random(1)), interval_ns=500 * MS).run(300) is None


def test_a_doubt_begins_anew() -> None:
    """What lies before and around a look that could not tell is not compared: it would be wrong here."""
    spans = traces(30, Random(2))
    hidden = [span for span in spans if 100 < span[0] < 160]
    gpu = Gpu(0.2, lambda _: 0.5, spans, doubtful=frozenset(range(20, 33)))
    gpu.run(95)
    gpu.rate = lambda at_s: 0.5 if at_s < 98 or at_s > 165 else 0.1 + 0.005 * (at_s - 98)
    assert len(hidden) > 3
    assert gpu.run(205) == pytest.approx(0.2, abs=1e-9)
    always = Gpu(0.2, lambda _: 0.5, spans, doubtful=frozenset(range(0, 100, 2)))
    assert always.run(300) is None


TIMES = st.integers(0, 1 << 62)


@given(st.lists(st.tuples(TIMES, st.lists(st.tuples(TIMES, TIMES), max_size=5), TIMES), max_size=10))
def test_times_that_are_nonsense(reports: list[tuple[int, list[tuple[int, int]], int]]) -> None:
    """Nothing is raised, nothing told."""
    meter = AgentSlowdown()
    for number, (time_ns, spans, open_ns) in enumerate(sorted(reports)):
        meter.add_tracing(time_ns, Tracing(tuple((max(span), min(span)) for span in spans), open_ns))
        meter.add_window("gpm", time_ns + number, time_ns + number + WINDOW_NS, {"pipe_int": 0.5})
        assert meter.slowdown(time_ns) is None


@pytest.mark.parametrize(("count", "student"), [(10, 2.262), (20, 2.093), (60, 2.001)])
def test_the_interval_is_students(count: int, student: float) -> None:
    """With untraced activity all 1 it is the textbook's interval of a mean."""
    random = Random(count)
    pairs = [Pair(random.uniform(0.5, 1), 1.0) for _ in range(count)]
    found = estimate(pairs)
    assert found is not None
    values = [pair.traced for pair in pairs]
    deviation = math.sqrt(sum((value - mean(values)) ** 2 for value in values) / (count - 1))
    assert found.slowdown == pytest.approx(1 - mean(values))
    assert found.half_width == pytest.approx(student * deviation / math.sqrt(count), rel=0.003)
    assert estimate(pairs[: MIN_COMPARISONS - 1]) is None
