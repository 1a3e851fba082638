"""Nodes as they go wrong, side by side in one database: no rule may take one's trouble for another's."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpu_hpc_exporter.model import SourceName, State
from history.expected import EXPECTED, OF_KERNELS
from history.fleet_data import PLAYED_S, STEP, Node, Run, play_all
from history.phases import looped, without_pm
from history.player import Samples, parse
from history.scrapes import Target, down, stored

GOLDEN = Path(__file__).parents[1] / "golden" / "scenarios"
HOLDERS = ("idle", "gemm", "shared")
"""Phases whose jobs are none, one, two."""
SPAN_S = 90 * 60
"""How long nodes are there: longer than any `offset` of a rule."""
AWAY_S = 20 * 60
"""For how long an exporter has been gone or down."""
RENAMED_S = 3 * 60
"""How long ago the scrape job was renamed: within Prometheus's look-back of five minutes."""
OLD_JOB = "gpus"
_BUILD_INFO = ('gpu_hpc_exporter_build_info{python="3.11.0",revision="",version="0.1.0"}', "1.0")


@dataclass(frozen=True)
class Work:
    """What a GPU does: a phase, by so many jobs (0, 1, 2). `pm`: the state of PM sampling where it delivers nothing."""

    phase: str
    jobs: int
    pm: State | None = None

    def __str__(self) -> str:
        return f"{self.phase}-{self.jobs}-{self.pm or 'pm'}"

    def run(self, start: int, end: int) -> Run:
        """It and nothing else, for so long."""
        holders = HOLDERS[self.jobs]
        stream = partial(without_pm, self.pm) if self.pm else looped
        required = frozenset[SourceName]({"pm_sampling"} if self.pm == "no_permission" else ())
        events = partial(stream, self.phase, holders)
        return Run(str(self), events, start, end, STEP, (end - start) // PLAYED_S, required)

    def alerts_of_kernels(self) -> set[str]:
        """What holds of the job that did the phase, where it is there."""
        return set(EXPECTED[self.phase][1] & OF_KERNELS) if self.jobs else set()

    def alerts(self) -> set[str]:
        """What else holds: a job alone can be told that it wastes its GPU."""
        holding = set(EXPECTED[self.phase][1] - OF_KERNELS)
        if self.jobs != 1:
            holding.discard("GpuHpcJobGpuUnderused")
        elif self.phase == "idle":
            holding.add("GpuHpcIdleButAllocated")
        return holding

    @property
    def job(self) -> str:
        """The only job."""
        return EXPECTED[HOLDERS[self.jobs]][0]


EIGHT = (
    *(Work(phase, jobs) for phase in ("copy", "embedding_cpu_index") for jobs in range(3)),
    Work("h2d", 2),
    Work("idle", 1),
)
"""The GPUs of a large node."""
TWO = (Work("copy", 1), Work("embedding_cpu_index", 1))
NO_PM = (Work("copy", 1, "unsupported"), Work("embedding_cpu_index", 1, "unsupported"))
DENIED = (Work("gemm", 1, "no_permission"),)


@dataclass(frozen=True)
class Scenario:
    """A node, what Prometheus stores of it, and what its GPUs do as far as it is known at the end."""

    instance: str
    lines: Iterable[str]
    works: tuple[Work, ...] = ()


def scenarios(directory: Path, end: int) -> Iterator[Scenario]:
    """All of them; data end at `end`."""
    works = {*EIGHT, *TWO, *NO_PM, *DENIED}
    played = play_all(directory, [work.run(end - SPAN_S, end) for work in works])
    numbers = itertools.count(100, len(EIGHT))

    def node(target: Target, gpus: Iterable[Work]) -> Node:
        return Node(target, tuple(played[str(work)] for work in gpus), next(numbers))

    for instance, honors in (("a", True), ("b", True), ("dishonored-a", False), ("dishonored-b", False)):
        yield Scenario(instance, node(Target(instance, honor_labels=honors), EIGHT).lines(), EIGHT)
    for instance, gpus in (("no-pm", NO_PM), ("denied", DENIED)):
        yield Scenario(instance, node(Target(instance), gpus).lines(), gpus)
    for instance, ago in (("renamed", RENAMED_S), ("renamed-long-ago", AWAY_S)):
        names = node(Target(instance, OLD_JOB), TWO), node(Target(instance), TWO)
        yield Scenario(instance, _renamed(*names, end - ago), TWO)
    yield Scenario("gone", _earlier(node(Target("gone"), TWO).lines(), AWAY_S))
    times = range(end - AWAY_S + STEP, end + 1, STEP)
    target = Target("down")
    yield Scenario("down", itertools.chain(_earlier(node(target, TWO).lines(), AWAY_S), down(target, times)))
    scrapes = [time for time, _ in played[str(TWO[0])].scrapes()]
    for file in ("no_gpu", "mismatch", "no_permission"):
        yield Scenario(file, stored(Target(file), zip(scrapes, itertools.repeat(golden(file)), strict=False)))


def _renamed(old: Node, new: Node, since: int) -> Iterator[str]:
    """A node whose scrape job had another name until `since`; it stays in Prometheus's sight for five minutes."""
    yield from (line for line in old.lines() if _time(line) <= since)
    yield from (line for line in replace(new, first_uuid=old.first_uuid).lines() if _time(line) > since)


def _earlier(lines: Iterable[str], seconds: int) -> Iterator[str]:
    for line in lines:
        sample, _, time = line.rpartition(" ")
        yield f"{sample} {int(time) - seconds}\n"


def _time(line: str) -> int:
    return int(line.rpartition(" ")[2])


def golden(name: str) -> Samples:
    """The exposition of a scenario of the fake driver, with numbers where the golden file has signs for them."""
    signs = {"+": "1.0", "*": "0.0"}
    samples = [(series, signs.get(value, value)) for series, value in parse((GOLDEN / f"{name}.prom").read_text())]
    return [*samples, _BUILD_INFO]
