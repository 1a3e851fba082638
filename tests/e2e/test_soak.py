"""The soak in its short form, and that it finds what is wrong with an exporter that has faults."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from soak.checks import checks
from soak.node import build
from soak.report import report
from soak.run import soak

FAULTY = """
import itertools, os, subprocess, sys, tempfile, threading
from gpu_hpc_exporter import cli, scrape
from gpu_hpc_exporter.collectors.process import ProcessCollector
from gpu_hpc_exporter.samplers.fleet import Fleet
from gpu_hpc_exporter.samplers.kernels import KernelSampler

encoded, rendered, collected, kept = *(itertools.count(1) for _ in range(3)), []
collect, ProcessCollector.collect = ProcessCollector.collect, lambda *arguments: failing_collect(*arguments)
encode, render = scrape.encode, scrape.Scrape.render

def leaking_encode(families, wanted):
    number = next(encoded)
    kept.append((os.open("/dev/null", os.O_RDONLY), bytearray(b"x") * 4_000_000))
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    if number in (10, 11, 12):
        subprocess.Popen(["sleep", "100"])
    for family in families:
        if family.spec.name == "gpu_hpc_windows_total" and number % 5 == 0:
            family.samples = [(beginning, value - 1) for beginning, value in family.samples]
    return encode(families, wanted)

async def failing_render(self, *arguments):
    if next(rendered) % 50 == 0:
        raise KeyError("rendering")
    return await render(self, *arguments)

def failing_collect(self, snapshot):
    if next(collected) % 5 == 0:
        raise KeyError("collecting")
    return collect(self, snapshot)

scrape.encode, scrape.Scrape.render = leaking_encode, failing_render
KernelSampler._place = Fleet._take_xid = lambda *arguments: None
tempfile.mkdtemp()
cli.Exporter.exit_status = property(lambda self: 4, lambda self, status: None)
sys.exit(cli.main())
"""

FOUND = {
    "scrapes answered whole, in the form asked for",
    "different expositions in which no counter went back",
    "kernel executions counted",
    "Xids counted",
    "threads more than before",
    "descriptors more than before",
    "child processes more than before",
    "RSS more than before, MiB",
    "exit status after SIGTERM",
    "files and processes left behind",
    "log lines of errors in the exporter itself",
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both fakes."""
    return build(tmp_path_factory.mktemp("fakes"))


def test_i04_a_short_soak(tmp_path: Path, libraries: Path) -> None:
    """I04: hours of churn leave nothing behind, lose nothing, and no scrape goes without its answer."""
    outcome = soak(tmp_path, libraries, 15, whole=False)
    found = list(checks(outcome))
    assert [check.name for check in found if not (check.holds or check.is_goal)] == [], report(outcome, found)
    happened = {kind for kind, count in outcome.truth.happened.items() if count}
    assert happened >= {"job", "MIG change", "lost GPU", "release"}


def test_a_soak_finds_faults(tmp_path: Path, libraries: Path) -> None:
    """Descriptors, threads and memory that leak, a counter that goes back, events that are lost, and what is left."""
    outcome = soak(tmp_path, libraries, 10, program=("-c", FAULTY), whole=False, patience_s=5)
    found = list(checks(outcome))
    for name in outcome.left:
        if name.startswith("process "):
            os.kill(int(name.removeprefix("process ")), signal.SIGKILL)
    assert {check.name for check in found if not check.holds} >= FOUND, report(outcome, found)
