"""The exporter's process from outside: memory, threads, descriptors, children; and how fast they grow."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from process_figures import cpu_seconds, status_number

PERIOD_S = 1.0


def children(pid: int) -> dict[int, str]:
    """Command lines of a process's children by pid."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            for child in (task / "children").read_text().split():
                found[int(child)] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return found


@dataclass(frozen=True)
class Figure:
    """One look. Memory in MiB, without shared pages: those are the fake driver's."""

    at_s: float
    rss: float
    threads: int
    descriptors: int
    children: int
    helper_rss: float


def look(pid: int) -> Figure:
    """How a process is now."""
    of_it = children(pid)
    helpers = [child for child, command in of_it.items() if "pm_helper" in command]
    return Figure(
        time.monotonic(),
        _rss(pid),
        round(status_number(pid, "Threads")),
        sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()),
        len(of_it),
        sum(map(_rss, helpers)),
    )


def _rss(pid: int) -> float:
    try:
        return (status_number(pid, "VmRSS") - status_number(pid, "RssShmem")) / 1024
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


class Watch:
    """Looks once a second, from a thread."""

    def __init__(self, pid: int) -> None:
        self.figures: list[Figure] = []
        self._pid = pid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def __enter__(self) -> Self:
        self._cpu_s, self._began_s = cpu_seconds(self._pid), time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def cpu_share(self) -> float:
        """CPU time of the process so far, in cores."""
        return (cpu_seconds(self._pid) - self._cpu_s) / (time.monotonic() - self._began_s)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            try:
                self.figures.append(look(self._pid))
            except (FileNotFoundError, ProcessLookupError):  # it has ended: others will tell
                return


@dataclass(frozen=True)
class Slope:
    """A straight line's rise per second, and half of its 95 % interval."""

    per_second: float
    uncertainty: float


def slope(points: Sequence[tuple[float, float]]) -> Slope:
    """Fitted to points of time and value by least squares.

    What follows each other closely is not independent: the interval is that of means of ten stretches of the time.
    """
    count = min(10, len(points))
    if count < 3:
        return Slope(0.0, float("inf"))
    size = len(points) / count
    means = [_mean(points[round(n * size) : round((n + 1) * size)]) for n in range(count)]
    center_s, center = _mean(means)
    spread = sum((at_s - center_s) ** 2 for at_s, _ in means)
    rise = sum((at_s - center_s) * (value - center) for at_s, value in means) / spread
    rest = sum((value - center - rise * (at_s - center_s)) ** 2 for at_s, value in means)
    return Slope(rise, _STUDENT_95[count - 2] * (rest / (count - 2) / spread) ** 0.5)


_STUDENT_95 = {1: 12.7, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31}
"""Student's t, two-sided, by degrees of freedom."""


def _mean(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return sum(at_s for at_s, _ in points) / len(points), sum(value for _, value in points) / len(points)
