"""Whether PM sampling holds the clocks of a real GPU down. Run with `pytest -m gpu`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

THROUGHPUT = Path(__file__).parent / "throughput.py"


def test_j03_sampling_holds_no_clock_down() -> None:
    """J03: matrix products with PM sampling active and paused, in turn: the same SM clocks, and as many steps."""
    command = [sys.executable, str(THROUGHPUT), "--switch", "pause", "--pairs", "20", "--seconds", "0.3"]
    said = subprocess.run([*command, "--workloads", "gemm"], capture_output=True, text=True, check=True).stdout
    print(said)  # noqa: T201  the measured figures, with what held the clocks down
    ratio = re.search(r"\| gemm \| 20 \| ([\d.]+) \|", said)
    assert ratio
    assert float(ratio[1]) == pytest.approx(1, abs=0.03)
    clocks = {
        kind: int(median) for kind, median in re.findall(r"SM clock (\w+): .*quartiles \[\d+, (\d+), \d+\]", said)
    }
    assert clocks["with"] == pytest.approx(clocks["without"], rel=0.03)
