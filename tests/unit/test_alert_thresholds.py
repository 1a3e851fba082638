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

from gpu_hpc_exporter import metrics
from gpu_hpc_exporter.collectors.health import CRITICAL_XIDS
from gpu_hpc_exporter.diagnosis import thresholds as th
from gpu_hpc_exporter.sources.nvml.readings import PCIE_LANE_BYTES_PER_SECOND

RULES: Final = Path(__file__).parents[2] / "alert-rules"
KERNELS: Final = RULES / "kernels.yml"
FILES: Final = (RULES / "bottleneck.yml", RULES / "jobs.yml", KERNELS)
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
COPIES: Final = 'gpu:host_copies:rate10m{direction="h2d"}'
TRACED: Final = "gpu:kernel_traced:rate10m"
FIGURES_OF_GPUS: Final = ("gpu:bottleneck", "gpu:sm", "gpu:nvml", "gpu:starved", "gpu:busy")

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
    ("SmallCopyStorm", SM_ACTIVE, "<"): th.STARVED_SM_ACTIVE,
    ("LaunchBound", SM_ACTIVE, "<"): th.STARVED_SM_ACTIVE,
    ("LaunchQueueing", SM_ACTIVE, "<"): th.STARVED_SM_ACTIVE,
    ("DramSaturatedSmIdle", DRAM, ">"): th.DRAM_SATURATED,
    ("UtilizationMisleading", "gpu:nvml_utilization:avg5m", ">"): th.MISLEADING_NVML,
    ("SmallCopyStorm", COPIES, ">"): th.SMALL_COPIES_PER_S,
    ("SmallCopyStorm", 'gpu:host_copy_bytes:rate10m{direction="h2d"}', "<"): th.SMALL_COPY_BYTES,
    ("SmallCopyStorm", COPIES, ">="): th.SMALL_COPIES_PER_KERNEL,
    ("PageableCopies", 'gpu:host_copy_bytes:rate10m{memory="pageable"}', ">"): th.PAGEABLE_BYTES_PER_S,
    ("LaunchBound", "gpu:kernel_many_short:ratio_rate10m", ">"): th.MANY_SHORT,
    ("LaunchQueueing", "gpu:kernel_queue_seconds:mean10m", ">"): th.QUEUE_S,
    ("SyncStorm", "gpu:host_wait:rate10m", ">"): th.HOST_WAIT,
    ("SyncStorm", "gpu:kernel_busy:ratio_rate10m", "<"): th.HOST_WAIT_BUSY,
    ("SyncStorm", SM_ACTIVE, "<"): th.HOST_WAIT_SM_ACTIVE,
    ("CommunicationExposed", "gpu:communication_exposed:ratio_rate10m", ">"): th.COMMUNICATION_EXPOSED,
    ("CollectiveHung", SM_ACTIVE, ">"): th.HUNG_SM_ACTIVE,
    ("CollectiveHung", "gpu:sm_active:stddev10m", "<"): th.HUNG_DEVIATION,
    ("CollectiveHung", SM, "<"): th.HUNG_SM,
    ("CollectiveHung", "gpu:nvml_utilization:avg5m", "<"): th.HUNG_NVML,
    ("CollectiveHung", 'gpu:owner:info{job!=""}', ">="): th.HUNG_GPUS,
    ("KernelJitter", "gpu:kernel_jittery:ratio_rate10m", ">"): th.JITTERY,
}
OWN: Final[set[Comparison]] = {
    ("DramSaturatedSmIdle", OBSERVED, ">"),
    ("PcieSaturated", OBSERVED, ">"),
    ("NvlinkSaturated", OBSERVED, ">"),
    ("L2Thrashing", OBSERVED, ">"),
    ("UtilizationMisleading", OBSERVED, ">"),
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
    ("CollectiveHung", OBSERVED, ">"),
    ("SmallCopyStorm", OBSERVED, ">"),
    ("SmallCopyStorm", TRACED, ">"),
    ("PageableCopies", TRACED, ">"),
    ("LaunchBound", OBSERVED, ">"),
    ("LaunchBound", TRACED, ">"),
    ("LaunchQueueing", OBSERVED, ">"),
    ("LaunchQueueing", TRACED, ">"),
    ("SyncStorm", OBSERVED, ">"),
    ("SyncStorm", TRACED, ">"),
    ("KernelJitter", TRACED, ">"),
    ("CommunicationExposed", TRACED, ">"),
}


_COMPARED: Final = r"(gpu:\w+:\w+(?:{[^}]*})?)|([<>=!]=?)\s*([\d.]+(?:e\d+)?)"


def comparisons(expression: str) -> dict[tuple[str, str], float]:
    """Numbers that an expression compares with, by the last series before them and the operator."""
    found: dict[tuple[str, str], float] = {}
    series = ""
    for name, operator, number in re.findall(_COMPARED, expression):
        if name:
            series = name
        else:
            assert (series, operator) not in found, f"{series} {operator} stands twice"
            found[series, operator] = float(number)
    return found


ALERTS: Final = {
    rule["alert"].removeprefix("GpuHpc"): (file, rule["expr"])
    for file in FILES
    for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}
FILE_OF: Final = {name: file for name, (file, _) in ALERTS.items()}
THRESHOLDS: Final = {
    (name, *comparison): value
    for name, (_, expression) in ALERTS.items()
    for comparison, value in comparisons(expression).items()
}


def test_every_threshold_is_known_as_shared_or_as_own() -> None:
    assert not SHARED.keys() & OWN
    assert THRESHOLDS.keys() == SHARED.keys() | OWN


@pytest.mark.parametrize("comparison", SHARED, ids=" ".join)
def test_shared_thresholds_are_equal(comparison: Comparison) -> None:
    assert THRESHOLDS[comparison] == SHARED[comparison]


def test_memory_nearly_full() -> None:
    """Its one series stands there three times: now, half an hour ago, and the difference."""
    groups = yaml.safe_load((RULES / "hardware.yml").read_text(encoding="utf-8"))["groups"]
    (expression,) = [r["expr"] for g in groups for r in g["rules"] if r["alert"] == "GpuHpcMemoryNearlyFull"]
    numbers = [float(number) for number in re.findall(r"> ([\d.]+)", expression)]
    assert numbers == [th.MEMORY_NEARLY_FULL, th.MEMORY_WAS_FULL, th.MEMORY_RISE]


def test_own_thresholds_fit_those_of_the_diagnosis() -> None:
    """Whatever the figures are: DRAM that is saturated bounds, and no GPU is idle and underused."""
    assert THRESHOLDS["DramSaturatedSmIdle", DRAM, ">"] > th.DRAM_BOUND
    assert THRESHOLDS["IdleButAllocated", SM_ACTIVE_30M, "<"] > th.IDLE_SM_ACTIVE
    assert THRESHOLDS["IdleButAllocated", SM_ACTIVE_30M, "<"] < THRESHOLDS["JobGpuUnderused", SM_ACTIVE_30M, ">"]
    assert THRESHOLDS["JobGpuUnderused", SM_ACTIVE_30M, "<"] < th.STARVED_SM_ACTIVE


def test_most_of_the_time_must_have_been_measured() -> None:
    """Every alert that reads a GPU's figures asks for it, over the range of its own figure."""
    asked = {name: value for (name, series, _), value in THRESHOLDS.items() if series.startswith("gpu:observed:")}
    of_gpus = {name for name, series, _ in THRESHOLDS if series.startswith(FIGURES_OF_GPUS)}
    assert asked == dict.fromkeys(of_gpus, 0.5)


def test_alerts_of_jobs_kernels_ask_whether_an_agent_looked() -> None:
    """In both halves of the 10 minutes: that series is absent otherwise."""
    asked = {name: value for (name, series, _), value in THRESHOLDS.items() if series == TRACED}
    alerts = {name for name, file in FILE_OF.items() if file == KERNELS} - {"AgentPaused"}
    assert asked == dict.fromkeys(alerts, 0)


def test_reasons_of_paused_agents_are_errors_with_a_line_in_the_runbook() -> None:
    """Or the alert says that they are none; the exporter's list of reasons is the measure."""
    known = set(re.findall(r"\w+", metrics.AGENT_PAUSE_INFO.values.removeprefix("reason: ")))
    (wanted,) = re.findall(r'reason!~"([\w|]+)"', KERNELS.read_text(encoding="utf-8"))
    no_errors = {"no_context", "profiler", "configured", "stopped", "budget"}
    assert set(wanted.split("|")) == no_errors < known
    runbook = (RULES / "runbooks" / "GpuHpcAgentPaused.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", runbook, flags=re.MULTILINE)) == known - no_errors


def test_critical_xids_are_those_of_which_the_exporter_serves_zeros() -> None:
    """A critical Xid without a zero before it could be missed; one that no rule asks for would page nobody."""
    files = (RULES / "recording.yml", RULES / "compat" / "dcgm.yml")
    texts = [file.read_text(encoding="utf-8") for file in files]
    asked = [xids for text in texts for xids in re.findall(r'(?:xid|err_code)=~"([\d|]+)"', text)]
    assert {tuple(map(int, xids.split("|"))) for xids in asked} == {CRITICAL_XIDS}


def test_intensities_of_dcgm_are_of_what_the_diagnosis_calls_reachable() -> None:
    """The same shares of the peaks, and the same lanes of PCIe."""
    groups = yaml.safe_load((RULES / "compat" / "dcgm.yml").read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"] if rule["record"] == "gpu:bottleneck_intensity:mean5m"]
    expressions = {rule["labels"]["unit"]: rule["expr"] for rule in rules}
    assert expressions.keys() == {"sm", "dram", "pcie", "nvlink"}
    assert [float(share) for share in re.findall(r"/ (0\.\d+), 1\)", expressions["dram"])] == [th.DRAM_REACHABLE]
    for link in ("pcie", "nvlink"):
        assert [float(share) for share in re.findall(r"\((0\.\d+) \*", expressions[link])] == [th.LINK_REACHABLE]
    lanes = re.findall(r'vector\((\d+)\), "gen", "(\d)"', expressions["pcie"])
    assert {int(number): float(rate) for rate, number in lanes} == pytest.approx(PCIE_LANE_BYTES_PER_SECOND)
