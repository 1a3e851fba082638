"""Which of the driver's numbers can be true."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.model import READINGS, Reading
from gpu_hpc_exporter.sources.values import ROUNDING, Problem, problem_of, problem_of_reading

U64NA, U32NA = 2**64 - 1, 2**32 - 1
INT32_BLANKS = (2147483632, 2147483633, 2147483634, 2147483647)
INT64_BLANKS = (9223372036854775792, 9223372036854775794, 9223372036854775807)


@pytest.mark.parametrize("value", [U64NA, U32NA, *INT32_BLANKS, *INT64_BLANKS])
@pytest.mark.parametrize("reading", READINGS)
def test_b04_whole_number_sentinels(reading: Reading, value: int) -> None:
    """B04: the library's and DCGM's marks for "not available" are told apart from numbers in every reading."""
    assert problem_of_reading(reading, value) == "sentinel"


@pytest.mark.parametrize(
    ("reading", "value"),
    [
        ("memory_used_bytes", float(U64NA)),
        ("memory_used_bytes", float(INT64_BLANKS[1])),
        ("nvml_utilization_ratio", U32NA / 100),
        ("nvml_utilization_ratio", 140737488355328.0),  # DCGM's blank double
        ("power_gpu_watts", U32NA / 1000),
        ("clock_sm_hertz", U32NA * 10**6),
        ("temperature_memory_celsius", float(U32NA)),
        ("c2c_limit_bytes_per_second", float(U64NA) * 1e6),
        ("energy_joules", U64NA / 1000),
        ("ecc_corrected_volatile", float(U64NA)),
        ("recovery_action", float(U64NA)),
        ("pcie_replays", float(INT64_BLANKS[0])),
        ("memory_used_bytes", 140737488355328.0),  # 128 TiB
        ("energy_joules", math.inf),
    ],
)
def test_b04_sentinels_after_conversion(reading: Reading, value: float) -> None:
    """B04: a sentinel that was converted to a double or to base units first is rejected all the same."""
    assert problem_of_reading(reading, value) is not None


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (1.37, "above_range"),
        (-0.01, "negative"),
        (math.nan, "nan"),
        (math.inf, "above_range"),
        (-math.inf, "negative"),
        (ROUNDING + 1e-6, "above_range"),
        (U32NA, "sentinel"),
        (float(INT32_BLANKS[0]), "sentinel"),
    ],
)
def test_c03_ratios_out_of_range(value: float, problem: Problem) -> None:
    """A11, C03: 137 %, -1 and NaN are rejected and named, by the windows' check as by the readings'."""
    assert problem_of(value, ROUNDING) == problem
    assert problem_of_reading("nvml_utilization_ratio", value) == problem


@pytest.mark.parametrize("value", [0.0, 0.5, 1.0, 1.000001, 1.005])
def test_c03_rounding_is_no_fault(value: float) -> None:
    """C03: up to 100.5 % is rounding."""
    assert problem_of_reading("nvml_utilization_ratio", value) is None


@pytest.mark.parametrize(
    ("value", "problem"), [(0, None), (4, None), (7, None), (8, "above_range"), (77, "above_range")]
)
def test_a16_recovery_actions_that_there_are(value: int, problem: Problem | None) -> None:
    """A16: a number that the driver's header does not have is no action."""
    assert problem_of_reading("recovery_action", value) == problem


@pytest.mark.parametrize(("value", "problem"), [(-20.0, None), (-100.1, "negative"), (200.1, "above_range")])
def test_temperatures_alone_may_be_below_zero(value: float, problem: Problem | None) -> None:
    """A cold sensor is true down to -100 degrees; a watt below zero is not."""
    assert problem_of_reading("temperature_gpu_celsius", value) == problem
    assert problem_of_reading("power_gpu_watts", -0.1) == "negative"


def ordinary(reading: Reading) -> st.SearchStrategy[float]:
    """Values that real devices give; whole numbers are multiples of what devices count in."""
    suffixes: dict[str, st.SearchStrategy[float]] = {
        "_ratio": st.integers(0, 100).map(lambda percent: percent / 100),
        "_celsius": st.floats(-40, 130),
        "_watts": st.integers(0, 15_000_000).map(lambda milliwatts: milliwatts / 1000),
        "_hertz": st.integers(0, 10_000).map(lambda megahertz: megahertz * 1e6),
        "_bytes": st.integers(0, 2**32).map(lambda pages: pages * 4096),
        "_bytes_per_second": st.integers(0, 20_000_000).map(lambda megabytes: megabytes * 1e6),
    }
    if reading == "recovery_action":
        return st.integers(0, 7)
    counts = st.integers(0, INT32_BLANKS[0] - 1)
    return next((values for suffix, values in suffixes.items() if reading.endswith(suffix)), counts)


@given(st.sampled_from(READINGS).flatmap(lambda reading: st.tuples(st.just(reading), ordinary(reading))))
@settings(max_examples=300)
def test_ordinary_values_pass(reading_and_value: tuple[Reading, float]) -> None:
    """Nothing that a real device reads is rejected."""
    reading, value = reading_and_value
    assert problem_of_reading(reading, value) is None
