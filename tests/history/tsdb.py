"""Back-fills a real Prometheus: text to blocks, recording rules over them, and a server on both."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from history.rules import RECORDED
from prometheus_process import Prometheus, run_prometheus

STEP = 30
"""Seconds between evaluations of the recorded series."""
TIMEOUT_S = 900
"""A benchmark's import of hundreds of nodes takes minutes; tests have a limit of their own."""
EMPTY_CONFIG = "global: {}\n"


def promtool(*arguments: str | Path | float) -> None:
    """Run promtool, whose output is the failure."""
    command = ["promtool", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


def import_openmetrics(directory: Path, lines: Iterable[str]) -> None:
    """Make blocks of lines of OpenMetrics with timestamps; they become the database of `directory`."""
    file = directory / "samples.txt"
    with file.open("w", encoding="utf-8") as text:
        text.writelines(lines)
        text.write("# EOF\n")
    promtool("tsdb", "create-blocks-from", "openmetrics", "--quiet", file, directory / "tsdb")
    file.unlink()


def import_rules(directory: Path, start: int, end: int, rules: Sequence[Path] = RECORDED) -> None:
    """Add the recorded series from `start` to `end`; their rules read the database alone (one level)."""
    blocks = directory / "rules"
    with run_prometheus(directory, EMPTY_CONFIG) as server:
        options = (f"--url={server.url}", f"--start={start}", f"--end={end}", f"--eval-interval={STEP}s")
        promtool("tsdb", "create-blocks-from", "rules", *options, f"--output-dir={blocks}", *rules)
    for block in blocks.iterdir():
        if block.is_dir():
            shutil.move(block, directory / "tsdb" / block.name)
    shutil.rmtree(blocks)


@contextmanager
def backfilled(directory: Path, lines: Iterable[str], start: int, end: int) -> Iterator[Prometheus]:
    """A Prometheus with these samples and the recorded series over them."""
    import_openmetrics(directory, lines)
    import_rules(directory, start, end)
    with run_prometheus(directory, EMPTY_CONFIG) as server:
        yield server
