"""The GPU's clock in terms of ours: simulated decodes over an hour, with drift, late reads and clocks far apart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.model import NS
from gpu_hpc_exporter.sources.pm_sampling.clock import DeviceClock
from gpu_hpc_exporter.sources.pm_sampling.sampling import period_ns

HOUR_NS = 3600 * NS
START_NS = 5_000 * NS


@dataclass
class Gpu:
    """A GPU's clock, which runs `ppm` fast and differs by `apart_ns`; its windows touch."""

    interval_ns: int
    ppm: float
    apart_ns: int

    def device_time(self, monotonic_ns: int) -> int:
        return round(monotonic_ns + (monotonic_ns - START_NS) * self.ppm / 1e6) + self.apart_ns

    def monotonic(self, device_ns: int) -> float:
        return START_NS + (device_ns - self.apart_ns - START_NS) / (1 + self.ppm / 1e6)

    def newest_end(self, monotonic_ns: int) -> int:
        return self.device_time(monotonic_ns) // self.interval_ns * self.interval_ns


def decodes(gpu: Gpu, clock: DeviceClock, late_ns: int, seed: int) -> Iterator[tuple[int, int]]:
    """An hour of decodes as the helper makes them: when each one begins, and the end of the newest window it gives.

    Each is called up to 1 ms late, and sometimes held up between looking at the clock and reading the windows.
    """
    chance = random.Random(seed)
    now = START_NS
    for _ in range(8):  # at the start the helper looks often
        now += gpu.interval_ns * 3 // 8
        clock.observe(gpu.newest_end(now), now)
    clock.settle()
    while now < START_NS + HOUR_NS:
        now += period_ns(gpu.interval_ns) + chance.randrange(1_000_000)
        held_up = late_ns if chance.random() < 0.02 else 0
        end = gpu.newest_end(now + held_up)
        clock.observe(end, now)
        yield now, end


@settings(max_examples=15, deadline=None)
@given(
    interval_ms=st.sampled_from([1, 2, 10, 20, 100]),
    ppm=st.floats(-100, 100),
    apart_ns=st.integers(-(10**9), 2 * 10**18),
    late_ns=st.integers(0, 500_000),
    seed=st.integers(0, 2**32),
)
def test_an_hour_of_windows(interval_ms: int, ppm: float, apart_ns: int, late_ns: int, seed: int) -> None:
    """Windows are mapped to within about one, and what a decode is held up; they overlap by a quarter of one."""
    gpu = Gpu(interval_ms * 1_000_000, ppm, apart_ns)
    clock = DeviceClock(gpu.interval_ns)
    last = clock_end = 0
    steps = 0
    for _, end in decodes(gpu, clock, late_ns, seed):
        mapped = clock.to_monotonic(end)
        assert abs(mapped - gpu.monotonic(end)) <= gpu.interval_ns * 9 // 8 + late_ns
        if last:
            step = (mapped - clock_end) - (end - last)
            assert step >= -gpu.interval_ns // 4
            steps += step != 0
        last, clock_end = end, mapped
    # Between the steps windows stay back to back: 99 of 100 decodes leave the offset alone where nothing drifts.
    drift_ns = abs(ppm) / 1e6 * HOUR_NS
    assert steps <= 60 + 5 * drift_ns / gpu.interval_ns


def test_without_drift_windows_stay_back_to_back() -> None:
    """Once the clock has settled to a quarter of a window it is left alone."""
    gpu = Gpu(10_000_000, 0.0, 10**18)
    clock = DeviceClock(gpu.interval_ns)
    offsets = [clock.to_monotonic(end) - end for _, end in decodes(gpu, clock, 0, 1)]
    assert len(set(offsets)) <= 2
    assert all(abs(offset + gpu.apart_ns) <= gpu.interval_ns // 4 for offset in offsets)


@pytest.mark.parametrize("interval_ms", [1, 10, 100])
def test_the_newest_window_is_seen_at_every_age(interval_ms: int) -> None:
    """The time between decodes is no multiple of a window's: punctual decodes would see one age only."""
    interval_ns = interval_ms * 1_000_000
    ages = {period_ns(interval_ns) * number % interval_ns for number in range(64)}
    gaps = [after - before for before, after in zip(sorted(ages), [*sorted(ages)[1:], interval_ns], strict=True)]
    assert max(gaps) <= interval_ns // 8


def test_time_stamps_need_a_settled_clock() -> None:
    """Nobody gets a time before the offset is known."""
    clock = DeviceClock(10_000_000)
    assert not clock.settled
    with pytest.raises(ValueError, match="not settled"):
        clock.to_monotonic(5)
