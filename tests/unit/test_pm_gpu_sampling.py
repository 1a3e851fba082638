"""One GPU's sampling over its life, on a simulated GPU and clock: minutes of trouble in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.model import NS
from gpu_hpc_exporter.sources.cupti import CuptiError
from gpu_hpc_exporter.sources.pm_sampling.metric_sets import CORE, MetricSet
from gpu_hpc_exporter.sources.pm_sampling.protocol import (
    FromHelper,
    GpuState,
    Happened,
    Sampling,
    Target,
    Windows,
    encode,
)
from gpu_hpc_exporter.sources.pm_sampling.sampling import GpuSampling
from gpu_hpc_exporter.sources.pm_sampling.session import Decoded, MetricsRefusedError, Sample

APART_NS = 10**18
"""The GPU's clock minus ours."""
MS = 1_000_000
H200 = Target("GPU-1", ("pcie", "nvlink"), has_gpm=True)


@dataclass
class Gpu:
    """A simulated GPU, its library, the clock, and what the sampling said."""

    version: tuple[int, int] = (12, 9)
    chip: str = "GH100"
    now: int = 1000 * NS
    decode_cost_ns: int = 5 * MS
    silent: Callable[[MetricSet], bool] = lambda _: False
    overflows: Callable[[int], bool] = lambda _: False
    """By the interval."""
    refuses: Callable[[MetricSet], Sequence[str] | None] = lambda _: None
    refused: list[str] = field(default_factory=list)
    open_errors: list[int] = field(default_factory=list)
    start_errors: list[int] = field(default_factory=list)
    decode_errors: list[int] = field(default_factory=list)
    opened: list[tuple[int, MetricSet]] = field(default_factory=list)
    open_sessions: int = 0
    said: list[tuple[int, FromHelper]] = field(default_factory=list)

    def open(self, metric_set: MetricSet, interval_ns: int, windows_per_decode: int) -> Session:
        """A session, as CUPTI gives them: one at a time, after 0.3 s."""
        assert self.open_sessions == 0, "the session before was not closed"
        assert windows_per_decode >= 1
        refused = self.refuses(metric_set)
        if refused is not None:
            self.refused += [part for part, names in metric_set.metrics.items() if set(names) & set(refused)]
            raise MetricsRefusedError(refused)
        self.opened.append((self.now, metric_set))
        if self.open_errors:
            raise CuptiError("cuptiPmSamplingSetConfig", self.open_errors.pop(0))
        self.now += 300 * MS
        self.open_sessions += 1
        return Session(self, metric_set, interval_ns)

    def sample(self, interval_ns: int = 10 * MS, target: Target = H200) -> GpuSampling:
        """A sampling of this GPU."""
        return GpuSampling(self, target, interval_ns, self._hear, lambda: self.now)

    def _hear(self, message: FromHelper) -> None:
        encode(message)
        self.said.append((self.now, message))

    def run(self, sampling: GpuSampling, seconds: float) -> None:
        """Do what is due for so long."""
        end = self.now + round(seconds * NS)
        while sampling.due_ns is not None and sampling.due_ns <= end:
            self.now = max(self.now, sampling.due_ns)
            sampling.step()
            assert sampling.due_ns is None or sampling.due_ns > self.now - NS, "it lags behind"
        self.now = max(self.now, end)

    def windows(self) -> list[tuple[int, int]]:
        """Begin and end of each window that was told."""
        frames = [message for _, message in self.said if isinstance(message, Windows)]
        ends = [pair for frame in frames for pair in zip(frame.ends_ns, frame.durations_ns, strict=True)]
        return [(end - duration, end) for end, duration in ends]

    def states(self) -> list[tuple[str, str]]:
        """States in order, with their reasons."""
        return [(message.state, message.reason) for _, message in self.said if isinstance(message, GpuState)]

    def incidents(self) -> list[str]:
        """What was to be counted."""
        return [message.incident for _, message in self.said if isinstance(message, Happened)]

    def intervals(self) -> list[int]:
        """Lengths of windows in force, in ms."""
        return [message.interval_ns // MS for _, message in self.said if isinstance(message, Sampling)]


class Session:
    """Hands out windows as CUPTI does: the first one begins long ago, each comes once."""

    def __init__(self, gpu: Gpu, metric_set: MetricSet, interval_ns: int) -> None:
        self._gpu, self._set, self._interval_ns = gpu, metric_set, interval_ns
        self._next = 0
        self._is_full = False

    def start(self) -> None:
        self._began = self._gpu.now
        if self._gpu.start_errors:
            self.close()
            raise CuptiError("cuptiPmSamplingStart", self._gpu.start_errors.pop(0))

    def stop(self) -> None:
        pass

    def close(self) -> None:
        self._gpu.open_sessions -= 1
        self._gpu.now += 65 * MS

    def decode(self) -> Decoded:
        gpu = self._gpu
        if gpu.decode_errors:
            raise CuptiError("cuptiPmSamplingDecodeData", gpu.decode_errors.pop(0))
        self._is_full |= gpu.overflows(self._interval_ns)
        if self._is_full:
            raise CuptiError("cuptiPmSamplingDecodeData", 8)
        first, self._next = self._next, (gpu.now - self._began) // self._interval_ns
        gpu.now += gpu.decode_cost_ns
        if gpu.silent(self._set):
            return Decoded([], overflow=False)
        return Decoded([self._window(number) for number in range(first, self._next)], overflow=False)

    def _window(self, number: int) -> Sample:
        begin = self._began + number * self._interval_ns + APART_NS
        values = tuple(1.0 for _ in self._set.names)
        return begin - (187 * NS if number == 0 else 0), begin + self._interval_ns, values


def touch(windows: Sequence[tuple[int, int]]) -> bool:
    """Whether each window begins where the one before it ends."""
    return all(before[1] == after[0] for before, after in pairwise(windows))


@pytest.mark.parametrize("interval_ms", [1, 10, 100, 250])
def test_windows_touch_and_cover_the_time(interval_ms: int) -> None:
    """All but the first window come, once, back to back, at the time when they were; active is said once."""
    gpu = Gpu()
    gpu.run(gpu.sample(interval_ms * MS), 30)
    length = min(interval_ms, 100) * MS
    windows = gpu.windows()
    assert touch(windows)
    assert {end - begin for begin, end in windows} == {length}
    assert abs(windows[0][0] - (1000 * NS + 300 * MS + length)) <= length
    assert windows[-1][1] > gpu.now - 1.6 * NS
    assert (gpu.states(), gpu.incidents(), gpu.intervals()) == ([("active", "")], [], [length // MS])


def test_b11_silence_from_the_start_reduces_the_set() -> None:
    """Counters of a link that is down: the set is reduced in order until windows come, each step counted."""
    gpu = Gpu(silent=lambda metrics: "nvlink_received_bytes" in metrics.metrics)
    gpu.run(gpu.sample(), 10)
    assert gpu.incidents() == ["set_reduced"]
    assert gpu.states() == [("active", "")]
    assert "nvlink_received_bytes" in gpu.opened[0][1].metrics
    assert "l2_hit_rate" in gpu.opened[-1][1].metrics or "l2_hit_rate" not in gpu.opened[0][1].metrics
    assert touch(gpu.windows())


def test_b11_a_short_silence_costs_no_counters() -> None:
    """Decodes that succeed without windows, for 15 s: said, and afterwards all counters are read again."""
    gpu = Gpu()
    sampling = gpu.sample()
    gpu.run(sampling, 5)
    gpu.silent = lambda _: True
    gpu.run(sampling, 6)
    assert gpu.states()[-1] == ("failed", "no window comes any more")
    came = len(gpu.windows())
    gpu.silent = lambda _: False
    gpu.run(sampling, 10)
    assert gpu.states()[-1] == ("active", "")
    assert len(gpu.windows()) > came + 500
    assert gpu.opened[-1][1] == gpu.opened[0][1]


def test_b11_a_long_silence_is_retried_ever_more_seldom() -> None:
    """An hour without any window: tries are bounded; when windows return they come with all counters."""
    gpu = Gpu()
    sampling = gpu.sample()
    gpu.run(sampling, 5)
    before = len(gpu.opened)
    gpu.silent = lambda _: True
    gpu.run(sampling, 3600)
    assert gpu.states()[-1][0] == "failed"
    assert len(gpu.opened) - before < 1500
    gpu.silent = lambda _: False
    gpu.run(sampling, 45)
    assert gpu.states()[-1] == ("active", "")


def test_a_link_that_goes_down_later_costs_only_its_counters() -> None:
    """The set delivered until a link went down: after some tries it is reduced and windows come."""
    gpu = Gpu()
    sampling = gpu.sample()
    gpu.run(sampling, 5)
    gpu.silent = lambda metrics: "nvlink_received_bytes" in metrics.metrics
    gpu.run(sampling, 30)
    assert gpu.states()[-1] == ("active", "")
    assert "nvlink_received_bytes" not in gpu.opened[-1][1].metrics
    assert gpu.windows()[-1][1] > gpu.now - 2 * NS


def test_overflow_in_steady_state_halves_the_rate_and_recovers() -> None:
    """Each overflow is counted and halves the rate; after a minute without one it doubles again, step by step."""
    gpu = Gpu()
    sampling = gpu.sample()
    gpu.run(sampling, 5)
    gpu.overflows = lambda interval_ns: interval_ns < 40 * MS
    gpu.run(sampling, 5)
    assert gpu.intervals() == [10, 20, 40]
    assert gpu.incidents() == ["overflow", "rate_halved", "overflow", "rate_halved"]
    gpu.overflows = lambda _: False
    gpu.run(sampling, 50)
    assert gpu.intervals()[-1] == 40
    gpu.run(sampling, 120)
    assert gpu.intervals() == [10, 20, 40, 20, 10]
    assert gpu.states() == [("active", "")]
    assert {metrics.bytes_per_window for _, metrics in gpu.opened} == {gpu.opened[0][1].bytes_per_window}
    assert gpu.opened[-1][1] == gpu.opened[0][1]


def test_a_set_that_floods_from_the_start_is_reduced() -> None:
    """A set that has never delivered is at fault itself: it is reduced, down to the core, then tried again later."""
    gpu = Gpu(overflows=lambda _: True)
    gpu.run(gpu.sample(), 20)
    assert "rate_halved" not in gpu.incidents()
    assert gpu.incidents().count("set_reduced") >= 3
    assert min(len(metrics.metrics) for _, metrics in gpu.opened) <= len(CORE)
    assert gpu.states()[-1] == ("failed", "the hardware buffer overflows")


def test_busy_is_waited_out() -> None:
    """J01: five times busy, then windows; it is said once, tried ever more seldom, nothing is counted."""
    gpu = Gpu(open_errors=[26] * 5)
    gpu.run(gpu.sample(), 40)
    assert [state for state, _ in gpu.states()] == ["busy", "active"]
    gaps = [after - before for (before, _), (after, _) in pairwise(gpu.opened)]
    assert gaps == sorted(gaps)
    assert gpu.incidents() == []


def test_j02_no_permission_is_said_once_and_hardly_retried() -> None:
    """J02: one state with the remedy; the next try is minutes away."""
    gpu = Gpu(open_errors=[35] * 1000)
    gpu.run(gpu.sample(), 1500)
    assert [state for state, _ in gpu.states()] == ["no_permission"]
    assert "NVreg_RestrictProfilingToAdminUsers=0" in gpu.states()[0][1]
    assert len(gpu.opened) <= 3


@pytest.mark.parametrize("code", [27, 33, 41, 42, 43, 44, 45])
def test_what_will_never_work_is_not_tried_again(code: int) -> None:
    """A GPU that cannot be sampled is unsupported, with CUPTI's word for it."""
    gpu = Gpu(open_errors=[code] * 1000)
    sampling = gpu.sample()
    gpu.run(sampling, 1500)
    ((state, reason),) = gpu.states()
    assert state == "unsupported"
    assert "not_supported" in reason
    assert (len(gpu.opened), sampling.due_ns) == (1, None)


def test_errors_of_start_and_decode_are_retried_ever_more_seldom() -> None:
    """Also where each session works for a moment: a day of errors is no day of sessions."""
    gpu = Gpu()
    sampling = gpu.sample()
    gpu.start_errors = [8, 999]
    gpu.run(sampling, 10)
    assert gpu.states()[-1] == ("active", "")
    before = len(gpu.opened)
    for _ in range(600):
        gpu.decode_errors = [999] if gpu.states()[-1][0] == "active" else []
        gpu.run(sampling, 1)
    assert len(gpu.opened) - before < 40


def test_j07_unknown_counters_are_left_out_one_by_one() -> None:
    """J07: what the library does not know is left out, the rest is read; several passes reduce the set."""
    gpu = Gpu(refuses=lambda metrics: metrics.metrics.get("pipe_tensor"))
    gpu.run(gpu.sample(), 5)
    assert gpu.states() == [("active", "")]
    assert gpu.refused == ["pipe_tensor"]
    assert "pipe_tensor" not in gpu.opened[-1][1].metrics
    gpu = Gpu(refuses=lambda metrics: () if len(metrics.names) > 10 else None)
    gpu.run(gpu.sample(), 5)
    assert gpu.states() == [("active", "")]
    assert len(gpu.opened[-1][1].names) <= 10


def test_j07_an_unknown_core_counter_is_named() -> None:
    """J07: never silence; and a reason of whatever length is a message."""
    gpu = Gpu(refuses=lambda metrics: metrics.metrics["dram_read_bytes"])
    gpu.run(gpu.sample(), 5)
    ((state, reason),) = gpu.states()
    assert (state, "dram__" in reason) == ("unsupported", True)
    gpu = Gpu(refuses=lambda metrics: metrics.names)
    gpu.run(gpu.sample(), 5)
    ((state, reason),) = gpu.states()
    assert (state, len(reason) <= 400) == ("unsupported", True)


def test_dear_decodes_cost_counters_but_never_the_core() -> None:
    """Decodes of 90 ms: counters are given up one by one, then the core goes on."""
    gpu = Gpu(decode_cost_ns=90 * MS)
    gpu.run(gpu.sample(), 120)
    assert gpu.states() == [("active", "")]
    assert set(gpu.opened[-1][1].metrics) <= CORE
    assert gpu.windows()[-1][1] > gpu.now - 2 * NS


def test_old_libraries_say_what_they_lack() -> None:
    """With CUPTI 12.6 core counters are missing: sampling goes on and the state says so."""
    gpu = Gpu(version=(12, 6))
    gpu.run(gpu.sample(), 5)
    ((state, reason),) = gpu.states()
    assert state == "active"
    assert "before 12.9" in reason


TROUBLE = ["silence", "overflow", "decode", "open", "start", "dear", "nothing"]


@settings(max_examples=40, deadline=None)
@given(
    interval_ms=st.sampled_from([4, 10, 100]),
    steps=st.lists(st.tuples(st.sampled_from(TROUBLE), st.floats(0.1, 20), st.sampled_from([8, 26, 999])), max_size=6),
)
def test_whatever_comes_windows_are_told_once_and_return(interval_ms: int, steps: list[tuple[str, float, int]]) -> None:
    """Any sequence of trouble: no window twice, none from the future, and all is well a minute after."""
    gpu = Gpu()
    sampling = gpu.sample(interval_ms * MS)
    for trouble, seconds, code in steps:
        gpu.silent = lambda _, on=trouble == "silence": on  # type: ignore[misc]  # bound at once
        gpu.overflows = lambda _, on=trouble == "overflow": on  # type: ignore[misc]  # bound at once
        gpu.decode_cost_ns = (90 if trouble == "dear" else 5) * MS
        gpu.decode_errors = [code] * 3 if trouble == "decode" else []
        gpu.open_errors = [code] * 3 if trouble == "open" else []
        gpu.start_errors = [code] * 3 if trouble == "start" else []
        gpu.run(sampling, seconds)
    gpu.silent, gpu.overflows, gpu.decode_cost_ns = (lambda _: False), (lambda _: False), 5 * MS
    gpu.decode_errors, gpu.open_errors, gpu.start_errors = [], [], []
    gpu.run(sampling, 70)
    assert gpu.states()[-1] == ("active", "")
    windows = gpu.windows()
    assert windows[-1][1] > gpu.now - 2 * NS
    # Each session finds the offset of the clocks anew, to within a window.
    slack = max(gpu.intervals()) * MS
    assert all(after[0] >= before[1] - slack for before, after in pairwise(windows))
    assert all(end <= gpu.now for _, end in windows)
