"""The benchmark script runs as its own text says; its figures are looked at by people."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "scripts" / "bench"


def test_i01_many_instances_and_pods_are_scraped_in_time(tmp_path: Path) -> None:
    """I01: eight GPUs in 56 instances, 200 pods, ten scrapers; a quiet machine needs a thirtieth of the time."""
    told = tmp_path / "figures.json"
    options = ["--fake", "8", "--instances", "7", "--pods", "200", "--seconds", "4", "--json", str(told)]
    subprocess.run([sys.executable, BENCH, "load", *options], capture_output=True, timeout=120, check=True)
    figures = json.loads(told.read_text())
    assert figures["series"] > 5000
    assert figures["scrape p99, ms"] < 500


@pytest.mark.parametrize(
    ("arguments", "figures"),
    [
        (
            ("cost", "--seconds", "1", "--scrape-interval", "0.5", "--", "--source=replay"),
            ("CPU per GPU", "RSS", "first window"),
        ),
        (
            ("load", "--fake", "2", "--seconds", "2", "--scrapers", "2"),
            ("scrape p99", "event loop p99", "driver calls"),
        ),
        (
            ("pages", "--fake", "2", "--seconds", "4", "--pages", "2"),
            ("more, percent of a core", "frames per second and page"),
        ),
    ],
    ids=["cost", "load", "pages"],
)
def test_bench_prints_its_figures(arguments: tuple[str, ...], figures: tuple[str, ...]) -> None:
    """A table with the figures that the docs quote."""
    result = subprocess.run([sys.executable, BENCH, *arguments], capture_output=True, text=True, timeout=60, check=True)
    for figure in figures:
        assert f"| {figure}" in result.stdout or figure in result.stdout
