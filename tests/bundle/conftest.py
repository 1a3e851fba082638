"""Databases that the tests of rules and dashboards share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from history.fleet_data import DEMO_S, Node, Played, history_runs, newest_end, play_all
from history.phases import names
from history.scrapes import Target
from history.tsdb import backfilled
from prometheus_process import Prometheus

SET_UP_S = 1200


@dataclass(frozen=True)
class History:
    """A Prometheus with hours of the shipped recording and the recorded series over them.

    `start` and `end` (Unix time) span all of it. `phases`: by name, the node that has done nothing else for the hour
    before `end`. The nodes h200-demo and h200-tour play them all: the recording as it is, and 20 minutes of each. On
    h200-kernels one of two jobs has a kernel agent.
    """

    prometheus: Prometheus
    start: int
    end: int
    phases: Mapping[str, Node]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What a test does is limited as everywhere; making the shared databases takes longer on a busy machine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(SET_UP_S))


@pytest.fixture(scope="session")
def end() -> int:
    """When all data end (Unix time)."""
    return newest_end(time.time())


@pytest.fixture(scope="session")
def played(end: int, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Played]:
    """Everything that the nodes of `history` are made of."""
    return play_all(tmp_path_factory.mktemp("played"), history_runs(end))


@pytest.fixture(scope="session")
def history(end: int, played: Mapping[str, Played], tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    """Made once for all tests."""
    directory = tmp_path_factory.mktemp("history")
    shown = ("demo", "tour", *names(), "kernels")
    nodes = {name: Node(Target(f"h200-{name}"), (played[name],), number) for number, name in enumerate(shown)}
    lines = itertools.chain.from_iterable(node.lines() for node in nodes.values())
    with backfilled(directory, lines, end - DEMO_S, end) as prometheus:
        yield History(prometheus, end - DEMO_S, end, {name: nodes[name] for name in names()})
