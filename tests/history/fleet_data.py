"""Hours of expositions, played once for all databases, and the nodes that are made of them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpu_hpc_exporter.model import Event, SourceName
from history.kernels import ACT_S, ACTS, with_kernels
from history.phases import as_recorded, in_turn, looped, names
from history.player import Samples, expositions, parse
from history.scrapes import Target, as_gpu, prolonged, stored

HOUR = 3600
PHASE_S = HOUR
"""How long each phase is looped."""
PLAYED_S = 600
"""How much of it is played: a steady state goes on as it went (a test compares the two)."""
STEP = 30
DEMO_S = 7 * HOUR
TOUR_S = 20 * 60
"""How long each phase lasts on the node that plays one after the other: longer than the ranges of rates."""
FINE_STEP = 15
KERNELS_PLAYED_S = len(ACTS) * ACT_S
KERNELS_S = 8 * KERNELS_PLAYED_S
"""How long a job with an agent is there, which does the same all the time."""
_MARK = "@"


@dataclass(frozen=True)
class Run:
    """One exporter with one GPU: what happens to it from `start` to `end` (Unix time), scraped every `step` seconds.

    It is played for a part of the time, after which it goes on as it went, `times` as long together.
    """

    name: str
    events: Callable[[], Iterator[Event]]
    start: int
    end: int
    step: int
    times: int = 1
    required: frozenset[SourceName] = frozenset()

    @property
    def played_s(self) -> int:
        """How many seconds are played."""
        return (self.end - self.start) // self.times

    def write(self, file: Path) -> None:
        """Play it into a file: for each scrape its time, then series and values."""
        with file.open("w", encoding="utf-8") as text:
            for time, samples in expositions(self.events(), self.start, self.played_s, self.step, self.required):
                text.write(f"{_MARK}{time}\n")
                text.writelines(f"{series} {value}\n" for series, value in samples)


@dataclass(frozen=True)
class Played:
    """A run that has been played."""

    run: Run
    file: Path

    def scrapes(self) -> Iterator[tuple[int, Samples]]:
        """Time and samples of each scrape."""
        return prolonged(self._read(), self.run.played_s, self.run.times)

    def _read(self) -> Iterator[tuple[int, Samples]]:
        text = "\n" + self.file.read_text(encoding="utf-8")
        for part in text.split(f"\n{_MARK}")[1:]:
            time, _, body = part.partition("\n")
            yield int(time), parse(body)


def newest_end(now: float) -> int:
    """When a history ends: data of an hour begin ten minutes after an even hour, and all is over by `now`.

    Blocks of rules would overlap the block before them where they begin at its edge.
    """
    return (int(now) - 2 * HOUR) // (2 * HOUR) * 2 * HOUR + 10 * 60 + PHASE_S


def history_runs(end: int) -> list[Run]:
    """20 minutes of each phase (`tour`), the recording as it is (`demo`), a job with an agent (`kernels`), each phase.

    The longest to play are first.
    """
    start, times = end - PHASE_S, PHASE_S // PLAYED_S
    return [
        Run("tour", partial(in_turn, TOUR_S), end - len(names()) * TOUR_S, end, FINE_STEP),
        Run("demo", as_recorded, end - DEMO_S, end, FINE_STEP, DEMO_S // HOUR),
        Run("kernels", with_kernels, end - KERNELS_S, end, FINE_STEP, KERNELS_S // KERNELS_PLAYED_S),
        *(Run(name, partial(looped, name), start, end, STEP, times) for name in names()),
    ]


def play_all(directory: Path, runs: Iterable[Run]) -> Mapping[str, Played]:
    """Play runs on all cores; by name."""
    played = {run.name: Played(run, directory / f"{run.name}.txt") for run in runs}
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        for running in [pool.submit(one.run.write, one.file) for one in played.values()]:
            running.result()
    return played


def uuid(number: int) -> str:
    """The UUID of a GPU: no two nodes share one."""
    return f"GPU-00000000-0000-0000-0000-{number:012d}"


@dataclass(frozen=True)
class Node:
    """A node of one GPU or several, each of which does what was played; `first_uuid` is the number of the first's UUID.

    The first one's exporter tells of the host as well.
    """

    target: Target
    gpus: tuple[Played, ...]
    first_uuid: int

    @property
    def instance(self) -> str:
        return self.target.instance

    def uuid(self, gpu: int) -> str:
        """The UUID of one of its GPUs."""
        return uuid(self.first_uuid + gpu)

    def lines(self) -> Iterator[str]:
        """What Prometheus stores of it, as OpenMetrics."""
        for gpu, played in enumerate(self.gpus):
            renamed = as_gpu(gpu, self.uuid(gpu), with_host=gpu == 0)
            yield from stored(self.target, played.scrapes(), renamed)
