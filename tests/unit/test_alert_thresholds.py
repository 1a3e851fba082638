"""The thresholds of alerts are those of the exporter's diagnosis where both ask the same.

Every comparison with a number in the alerts of causes stands in one of two tables below: SHARED, with the exporter's
constant, or OWN, of which the exporter has no twin. One that is in neither fails, as does one that is no more there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest
import yaml

from gpu_hpc_exporter.collectors.health import CRITICAL_XIDS
from gpu_hpc_exporter.diagnosis import thresholds as th

RULES: Final = Path(__file__).parents[2] / "alert-rules"
FILES: Final = (RULES / "bottleneck.yml", RULES / "jobs.yml")
Comparison = tuple[str, str, str]
"""Alert less its prefix, series, operator."""

SM: Final = 'gpu:bottleneck_intensity:mean5m{unit="sm"}'
L2: Final = 'gpu:bottleneck_intensity:mean5m{unit="l2"}'
DRAM: Final = 'gpu:bottleneck_intensity:mean5m{unit="dram"}'
PCIE: Final = 'gpu:bottleneck_intensity:mean5m{unit="pcie"}'
NVLINK: Final = 'gpu:bottleneck_intensity:mean5m{unit="nvlink"}'
LINKS: Final = 'gpu:bottleneck_intensity:mean5m{unit=~"pcie|nvlink"}'
SM_ACTIVE: Final = "gpu:sm_active:ratio_rate5m"
SM_ACTIVE_30M: Final = "gpu:sm_active:ratio_rate30m"
OBSERVED: Final = "gpu:observed:ratio_rate5m"
OBSERVED_30M: Final = "gpu:observed:ratio_rate30m"

SHARED: Final[dict[Comparison, float]] = {
    ("DramSaturatedSmIdle", SM, "<"): th.L2_THRASH_SM,
    ("PcieSaturated", PCIE, ">"): th.LINK_BOUND,
    ("PcieSaturated", SM, "<"): th.COMPUTE_BOUND,
    ("NvlinkSaturated", NVLINK, ">"): th.LINK_BOUND,
    ("NvlinkSaturated", SM, "<"): th.COMPUTE_BOUND,
    ("L2Thrashing", L2, ">"): th.L2_THRASH_SHARE,
    ("L2Thrashing", DRAM, ">="): th.L2_THRASH_DRAM[0],
    ("L2Thrashing", DRAM, "<="): th.L2_THRASH_DRAM[1],
    ("L2Thrashing", SM, "<"): th.L2_THRASH_SM,
    ("UtilizationMisleading", SM_ACTIVE, "<"): th.COPY_ONLY_SM_ACTIVE,
    ("CollectiveHung", SM_ACTIVE, "<"): th.STARVED_SM_ACTIVE,
    ("CollectiveHung", DRAM, "<"): th.IDLE_SHARE,
    ("CollectiveHung", LINKS, ">="): th.IDLE_SHARE,
}
OWN: Final[set[Comparison]] = {
    ("DramSaturatedSmIdle", DRAM, ">"),
    ("DramSaturatedSmIdle", OBSERVED, ">"),
    ("PcieSaturated", OBSERVED, ">"),
    ("NvlinkSaturated", OBSERVED, ">"),
    ("L2Thrashing", OBSERVED, ">"),
    ("UtilizationMisleading", OBSERVED, ">"),
    ("UtilizationMisleading", "gpu:nvml_utilization:avg5m", ">"),
    ("GpuStarved", "gpu:starved:ratio_rate10m", ">"),
    ("GpuStarved", "gpu:busy:ratio_rate10m", ">"),
    ("GpuStarved", "gpu:observed:ratio_rate10m", ">"),
    ("JobGpuUnderused", SM_ACTIVE_30M, ">"),
    ("JobGpuUnderused", SM_ACTIVE_30M, "<"),
    ("JobGpuUnderused", OBSERVED_30M, ">"),
    ("IdleButAllocated", SM_ACTIVE_30M, "<"),
    ("IdleButAllocated", "gpu:busy:ratio_rate30m", "<"),
    ("IdleButAllocated", "gpu:nvml_utilization:avg5m", ">"),
    ("IdleButAllocated", OBSERVED_30M, ">"),
    ("CollectiveHung", SM_ACTIVE, ">"),
    ("CollectiveHung", "gpu:sm_active:stddev10m", "<"),
    ("CollectiveHung", SM, "<"),
    ("CollectiveHung", OBSERVED, ">"),
    ("CollectiveHung", "gpu:nvml_utilization:avg5m", "<"),
    ("CollectiveHung", 'gpu:owner:info{job!=""}', ">="),
}


def comparisons(expression: str) -> dict[tuple[str, str], float]:
    """Numbers that an expression compares with, by the last series before them and the operator."""
    found: dict[tuple[str, str], float] = {}
    series = ""
    for name, operator, number in re.findall(r"(gpu:\w+:\w+(?:{[^}]*})?)|([<>=!]=?)\s*([\d.]+)", expression):
        if name:
            series = name
        else:
            assert (series, operator) not in found, f"{series} {operator} stands twice"
            found[series, operator] = float(number)
    return found


THRESHOLDS: Final = {
    (rule["alert"].removeprefix("GpuHpc"), *comparison): value
    for file in FILES
    for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
    for comparison, value in comparisons(rule["expr"]).items()
}


def test_every_threshold_is_known_as_shared_or_as_own() -> None:
    assert not SHARED.keys() & OWN
    assert THRESHOLDS.keys() == SHARED.keys() | OWN


@pytest.mark.parametrize("comparison", SHARED, ids=" ".join)
def test_shared_thresholds_are_equal(comparison: Comparison) -> None:
    assert THRESHOLDS[comparison] == SHARED[comparison]


def test_own_thresholds_fit_those_of_the_diagnosis() -> None:
    """Whatever the figures are: DRAM that is saturated bounds, and no GPU is idle and underused."""
    assert THRESHOLDS["DramSaturatedSmIdle", DRAM, ">"] > th.DRAM_BOUND
    assert THRESHOLDS["IdleButAllocated", SM_ACTIVE_30M, "<"] > th.IDLE_SM_ACTIVE
    assert THRESHOLDS["IdleButAllocated", SM_ACTIVE_30M, "<"] < THRESHOLDS["JobGpuUnderused", SM_ACTIVE_30M, ">"]
    assert THRESHOLDS["JobGpuUnderused", SM_ACTIVE_30M, "<"] < th.STARVED_SM_ACTIVE


def test_most_of_the_time_must_have_been_measured() -> None:
    """Every alert of these files asks for it, over the range of its own figure."""
    asked = {name: value for (name, series, _), value in THRESHOLDS.items() if series.startswith("gpu:observed:")}
    assert asked == dict.fromkeys({name for name, *_ in THRESHOLDS}, 0.5)


def test_critical_xids_are_those_of_which_the_exporter_serves_zeros() -> None:
    """A critical Xid without a zero before it could be missed; one that no rule asks for would page nobody."""
    asked = re.findall(r'xid=~"([\d|]+)"', (RULES / "recording.yml").read_text(encoding="utf-8"))
    assert {tuple(map(int, xids.split("|"))) for xids in asked} == {CRITICAL_XIDS}
