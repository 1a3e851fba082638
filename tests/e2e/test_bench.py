"""The benchmark script runs as its own text says; its figures are looked at by people."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent.parent / "scripts" / "bench"


def test_i01_many_instances_and_pods_are_scraped_in_time(tmp_path: Path) -> None:
    """I01: eight GPUs in 56 instances, 200 pods, ten scrapers: Prometheus waits ten seconds.

    A quiet machine needs less than 20 ms, which `scripts/bench` is for.
    """
    told = tmp_path / "figures.json"
    options = ["--fake", "8", "--instances", "7", "--pods", "200", "--seconds", "4", "--json", str(told)]
    subprocess.run([sys.executable, BENCH, "load", *options], capture_output=True, timeout=120, check=True)
    figures = json.loads(told.read_text())
    assert figures["series"] > 5000
    assert figures["scrape p99, ms"] < 5000


def test_kernels_of_agents_run_on_beside_pages(tmp_path: Path) -> None:
    """The agents' processes and files are those that the exporter reads, and their counters go on."""
    told = tmp_path / "figures.json"
    options = ["--fake", "2", "--agents", "6", "--kernels", "20", "--seconds", "4", "--pages", "1", "--json", str(told)]
    subprocess.run([sys.executable, BENCH, "pages", *options], capture_output=True, timeout=120, check=True)
    figures = json.loads(told.read_text())
    assert figures["kernel executions per second"] > 100  # 777 by what the files say: 6 x 20 x 13 every 2 s
    assert figures["kernel series"] > 0
    assert figures["readers that stop, RSS more, MiB"] < 50


def test_a_flood_reaches_the_exporter_and_its_scraper_is_served(tmp_path: Path) -> None:
    """More connections than two peers may have open: some are refused, and no scrape is."""
    told = tmp_path / "figures.json"
    options = ["--peers", "2", "--connections", "400", "--floods", "1", "--json", str(told)]
    result = subprocess.run(
        [sys.executable, BENCH, "flood", *options], capture_output=True, text=True, timeout=120, check=True
    )
    assert "connections refused so far" in result.stderr
    figures = json.loads(told.read_text())
    kinds = [
        f"{how}{whose}"
        for how in ("kept connection", "new connections")
        for whose in ("", ", the same beside a flood of another program's port")
    ]
    for kind in kinds:
        assert figures[f"{kind}: scrapes"] > 0
        assert figures[f"{kind}: scrapes refused or failed"] == 0
        assert 0 < figures[f"{kind}: scrape median, ms"] <= figures[f"{kind}: scrape maximum, ms"]
        assert figures[f"{kind}: CPU seconds of the exporter for a flood"] > 0


def test_a_flood_with_too_few_descriptors_says_so() -> None:
    """One line, and no figures."""
    options = ["flood", "--connections", "400"]
    command = f"ulimit -n 200; exec {shlex.join([sys.executable, str(BENCH), *options])}"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    assert "a flood needs 450 descriptors: the hard limit is 200" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


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
            ("more, percent of a core", "frames per second and page", "readers that stop, RSS more, MiB"),
        ),
    ],
    ids=["cost", "load", "pages"],
)
def test_bench_prints_its_figures(arguments: tuple[str, ...], figures: tuple[str, ...]) -> None:
    """A table with the figures that the docs quote."""
    result = subprocess.run(
        [sys.executable, BENCH, *arguments], capture_output=True, text=True, timeout=120, check=True
    )
    for figure in figures:
        assert f"| {figure}" in result.stdout or figure in result.stdout
