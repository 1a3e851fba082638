"""What the exporter says of a real GPU, against what the workload itself counted. Run with `pytest -m gpu`.

The figures are an H200's (driver 580.159): see docs/benchmarks.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter_process import Exporter, Samples, run_exporter

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

WORKLOAD = Path(__file__).parent / "workload.py"
PHASE_SECONDS = 20.0
"""Longer than the gauge window, so that gauges late in a phase know nothing of the one before."""
EDGE = 2.0
"""Seconds left out at each end of a phase."""

EXPECTED = {
    # Means of DESIGN's table for an H200, absolute tolerance 0.03.
    ("gemm", "gpu_hpc_sm_active_seconds_total"): 0.96,
    ("gemm", "gpu_hpc_pipe_active_seconds_total/tensor"): 0.93,
    ("gemm", "gpu_hpc_sm_occupancy_seconds_total"): 0.14,
    ("gemm", "gpu_hpc_dram_active_seconds_total"): 0.17,
    ("copy", "gpu_hpc_sm_active_seconds_total"): 0.99,
    ("copy", "gpu_hpc_pipe_active_seconds_total/int"): 0.08,
    ("copy", "gpu_hpc_dram_active_seconds_total"): 0.88,
    ("h2d", "gpu_hpc_sm_active_seconds_total"): 0.00,
}
CLASSES = {"gemm": "compute_bound", "copy": "dram_bound", "h2d": "pcie_bound", "idle": "idle"}


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    with run_exporter(tmp_path_factory.mktemp("exporter")) as running:
        running.wait_for(
            lambda s: s.get("gpu_hpc_source_state", gpu="0", source="pm_sampling", state="active") == 1, timeout=60
        )
        yield running


@pytest.fixture(scope="module")
def phases(exporter: Exporter, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Samples, Samples, float]]:
    """Per phase: the exposition early in it, the one late in it, and the workload's own bytes per second."""
    directory = tmp_path_factory.mktemp("workload")
    marks, counts = directory / "marks", directory / "counts"
    marks.touch()
    found: dict[str, tuple[Samples, Samples, float]] = {}
    command = [sys.executable, str(WORKLOAD), "--seconds", str(PHASE_SECONDS)]
    command += ["--marks", str(marks), "--counts", str(counts), "--phases", "idle", "gemm", "copy", "h2d", "l2_copy"]
    workload = subprocess.Popen(command)
    seen = 0
    while workload.poll() is None:
        lines = marks.read_text().splitlines()
        for line in lines[seen:]:
            begin, name = line.split()
            if name != "between":
                time.sleep(max(0.0, float(begin) + EDGE - time.monotonic()))
                early = exporter.scrape()
                time.sleep(max(0.0, float(begin) + PHASE_SECONDS - EDGE - time.monotonic()))
                found[name] = (early, exporter.scrape(), 0.0)
        seen = len(lines)
        time.sleep(0.05)
    assert workload.returncode == 0
    for line in counts.read_text().splitlines():
        count = json.loads(line)
        moved = sum(value for key, value in count.items() if key.endswith("_bytes") and key != "l2_bytes")
        early, late, _ = found[count["phase"]]
        found[count["phase"]] = (early, late, moved / (count["end"] - count["begin"]))
    return found


def growth(before: Samples, after: Samples, series: str) -> float:
    name, _, pipe = series.partition("/")
    labels = {"pipe": pipe} if pipe else {}
    return after.grown(before, name, gpu="0", **labels)


@pytest.mark.parametrize(("phase", "series"), EXPECTED)
def test_share_is_within_three_percent(
    phases: dict[str, tuple[Samples, Samples, float]], phase: str, series: str
) -> None:
    """Counters over the middle of a phase give the known mean of that workload."""
    before, after, _ = phases[phase]
    share = growth(before, after, series) / growth(before, after, "gpu_hpc_observed_seconds_total")
    print(f"{phase} {series}: {share:.4f}, expected {EXPECTED[phase, series]}")  # noqa: T201  the measured figure
    assert share == pytest.approx(EXPECTED[phase, series], abs=0.03)


def test_pcie_bytes_match_the_copys_own_count(phases: dict[str, tuple[Samples, Samples, float]]) -> None:
    """B01: a pinned copy's payload plus the protocol: 0.97 to 1.08 of what the workload counted."""
    before, after, own = phases["h2d"]
    rate = growth(before, after, "gpu_hpc_pcie_host_to_gpu_bytes_total") / growth(
        before, after, "gpu_hpc_observed_seconds_total"
    )
    print(f"h2d: {rate / 1e9:.2f} GB/s, own count {own / 1e9:.2f} GB/s, ratio {rate / own:.4f}")  # noqa: T201  the figure
    assert 0.97 <= rate / own <= 1.08


def test_nvidia_smi_reads_busy_while_the_sms_idle(phases: dict[str, tuple[Samples, Samples, float]]) -> None:
    """The case the product exists for: GPU-Util 100 % during copies that no SM takes part in."""
    _, late, _ = phases["h2d"]
    assert late.one("gpu_hpc_nvml_utilization_ratio", gpu="0") > 0.9
    assert late.one("gpu_hpc_sm_active_ratio", gpu="0") < 0.05


@pytest.mark.parametrize("phase", CLASSES)
def test_class_of_the_phase(phases: dict[str, tuple[Samples, Samples, float]], phase: str) -> None:
    """At least 95 % of a steady phase falls into the class that names its limit."""
    before, after, _ = phases[phase]
    grown = after.grown(before, "gpu_hpc_bottleneck_seconds_total", gpu="0", **{"class": CLASSES[phase]})
    assert grown >= 0.95 * growth(before, after, "gpu_hpc_observed_seconds_total")


@pytest.mark.parametrize("source", ["gpm", "pm_sampling"])
def test_no_window_is_lost(phases: dict[str, tuple[Samples, Samples, float]], exporter: Exporter, source: str) -> None:
    """Windows follow each other without a gap under load."""
    assert phases
    samples = exporter.scrape()
    counts = {
        result: samples.one("gpu_hpc_windows_total", gpu="0", source=source, result=result)
        for result in ("valid", "late", "lost", "rejected")
    }
    assert (counts["lost"], counts["rejected"]) == (0, 0)
    assert counts["late"] <= 0.02 * counts["valid"]


def test_dram_bytes_are_the_copys_own_count(phases: dict[str, tuple[Samples, Samples, float]]) -> None:
    """Read and written together, within 1 % of what the copy counted itself."""
    before, after, own = phases["copy"]
    moved = sum(growth(before, after, f"gpu_hpc_dram_{way}_bytes_total") for way in ("read", "written"))
    observed = after.grown(before, "gpu_hpc_source_observed_seconds_total", gpu="0", source="pm_sampling")
    assert moved / observed == pytest.approx(own, rel=0.01)


@pytest.mark.parametrize(("phase", "low", "high"), [("copy", 0.95, 1.0), ("l2_copy", 0.0, 0.05), ("gemm", 0.0, 0.35)])
def test_l2_miss_rate(phases: dict[str, tuple[Samples, Samples, float]], phase: str, low: float, high: float) -> None:
    """A copy that fits nowhere misses always, one that fits into L2 never, a matrix product now and then."""
    _, late, _ = phases[phase]
    assert low <= late.one("gpu_hpc_l2_cache_miss_rate", gpu="0") <= high
