"""What the event loop's thread does while the exporter is asked: nothing that can wait for anything else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from exporter_process import Exporter, run_exporter
from fake_nvml import Scenario

WATCH = '''
"""Loaded by Python before the program: writes down what a running event loop's thread does itself."""

import asyncio
import sys
import threading
import time
import traceback

FORBIDDEN = ("open", "os.", "ctypes.", "subprocess.", "time.sleep", "socket.getaddrinfo", "socket.gethostby", "shutil.")
HARMLESS = {"os.putenv", "os.unsetenv"}
written = open(__WRITTEN__, "a", buffering=1)
lock = threading.Lock()
busy = threading.local()


def write(text):
    with lock:
        written.write(text + "\\n")


def hear(event, arguments):
    if not event.startswith(FORBIDDEN) or event in HARMLESS or getattr(busy, "hears", False):
        return
    if asyncio._get_running_loop() is None:
        return
    busy.hears = True
    try:
        frames = traceback.extract_stack()[:-1]
        places = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames[-6:]))
        write(f"{event} {arguments!r:.80} {places}")
    finally:
        busy.hears = False


def timed(handle, run=asyncio.Handle._run):
    # The thread's own time: what it waits for is heard above, and other programs' time is not its fault.
    began = time.thread_time()
    run(handle)
    spent = time.thread_time() - began
    if spent > 0.05:
        write(f"{spent:.3f} s in {handle!r:.300}")


asyncio.Handle._run = timed
sys.addaudithook(hear)
'''
ASKED = (
    "/",
    "/metrics",
    "/-/ready",
    "/-/healthy",
    "/api/v1/gpus",
    "/api/v1/history?gpu=0&seconds=60",
    "/web/page/main.js",
    "/nothing",
)


@pytest.fixture
def watched(tmp_path: Path, library: Path) -> Iterator[tuple[Exporter, Path]]:
    """An exporter with eight GPUs, and the file with what its event loop did."""
    written = tmp_path / "event-loop.txt"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WATCH.replace("__WRITTEN__", repr(str(written))))
    config = tmp_path / "config.yaml"
    config.write_text("pm_sampling: {mode: off}\n")
    scenario = Scenario(tmp_path, library, "".join(f"device {number} sm 0.5\n" for number in range(8)))
    with ExitStack() as stack:
        places = (str(tmp_path / "site"), os.environ.get("PYTHONPATH", ""))
        env = {**scenario.env, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        exporter = stack.enter_context(run_exporter(tmp_path, f"--config.file={config}", env=env))
        exporter.wait_for(lambda samples: len(samples.all("gpu_hpc_sm_active_ratio")) == 8)
        yield exporter, written


def test_i03_the_loop_touches_no_file_and_no_library(watched: tuple[Exporter, Path]) -> None:
    """I03: nothing of the sort on any path, at a reload, a pause or a release; no callback computes for 50 ms."""
    exporter, written = watched
    exporter.fetch("/metrics")
    at_the_start = written.read_text()
    assert "yaml_file.py" in at_the_start, "nothing is heard"

    def ask() -> None:
        for _ in range(10):
            for path in ASKED:
                exporter.fetch(path)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for path in ("/-/reload", "/-/pause?seconds=60", "/-/resume", "/-/release?seconds=60", "/-/resume"):
        assert exporter.post(path) == 200, path
    for thread in threads:
        thread.join()
    assert written.read_text().removeprefix(at_the_start) == ""
