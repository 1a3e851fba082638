"""Golden expositions of the fake driver's scenarios: which series there are, with the values that do not move.

pytest tests/e2e/test_scenarios.py --update-golden
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from e2e.machine import run_machine
from exporter_process import Samples

HERE = Path(__file__).parent.parent
SCENARIOS = sorted((HERE / "scenarios").glob("*.txt"))
GOLDEN = HERE / "golden" / "scenarios"

PROCFS = Path(__file__).parent.parent / "root" / "systemd-unit" / "proc"
MOVING = re.compile(
    r"_total|_window_ratio_|_timestamp_seconds|_age_seconds|_collector_duration_|_hung_seconds|^process_|build_info|_ratio\{|_utilization\{"
)
"""Series whose values depend on when the scrape came; of them 0 and more than 0 are told apart."""


def settled(samples: Samples) -> bool:
    """Whether everything that this scenario will ever show is there: two seconds of windows, or no way to have any."""
    states = [labels for labels, value in samples.all("gpu_hpc_source_state", source="gpm").items() if value]
    active = [labels for labels in states if ("state", "active") in labels]
    observed = samples.all("gpu_hpc_observed_seconds_total").values()
    read_twice = len(samples.all("gpu_hpc_nvml_busy_seconds_total")) == len(
        samples.all("gpu_hpc_nvml_utilization_ratio")
    )
    whole = read_twice and len(states) == len(samples.all("gpu_hpc_gpu_info")) > 0 and len(active) == len(observed)
    is_down = samples.get("gpu_hpc_up") == 0 and samples.get("gpu_hpc_down_info", reason="starting") is None
    return is_down or (whole and min(observed, default=3.0) > 2)


def shape(text: str) -> str:
    """The exposition with moving values as 0 or +."""
    lines = []
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if line.startswith("#") or not MOVING.search(series):
            lines.append(line)
        elif 'result="late"' in series or 'result="lost"' in series:
            lines.append(f"{series} *")  # a busy machine has some, a quiet one none
        elif "_collector_duration_" not in series and not series.startswith(("process_", "gpu_hpc_exporter_build")):
            lines.append(f"{series} {'0' if float(value) == 0 else '+'}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.stem)
def test_scenario_is_the_golden_one(
    tmp_path: Path, library: Path, scenario: Path, request: pytest.FixtureRequest
) -> None:
    """The same driver gives the same series; a change of them is a change to review."""
    golden = GOLDEN / f"{scenario.stem}.prom"
    # Neither this machine's kernel log nor what its /proc may show belongs to the scenario.
    flags = ("--path.kmsg=/none", f"--path.procfs={PROCFS}")
    with run_machine(tmp_path, library, scenario.read_text(), *flags) as machine:
        if scenario.stem == "no_gpu":
            machine.exporter.wait_for(lambda samples: samples.get("gpu_hpc_up") == 1)
        else:
            machine.exporter.wait_for(settled)
        machine.exporter.wait_for(lambda samples: bool(samples.all("gpu_hpc_source_state", source="kernels")))
        text = shape(machine.exporter.fetch()[2])
    if request.config.getoption("--update-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert golden.exists(), f"no golden {golden.name}: run with --update-golden and review the diff"
    assert text == golden.read_text()


def test_no_scenario_golden_is_left_over() -> None:
    """Every golden file belongs to a scenario."""
    assert {path.stem for path in GOLDEN.glob("*.prom")} == {path.stem for path in SCENARIOS}
