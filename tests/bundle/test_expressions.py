"""Every expression on databases of every shape: no query error, no false alarm, and the right one names the node."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from history.expected import BERT, OF_KERNELS
from history.fleet_data import HOUR
from history.rules import Rule, alerts, rules
from history.scenarios import Scenario, scenarios
from history.tsdb import EMPTY_CONFIG, backfilled
from prometheus_process import Matrix, Prometheus, run_prometheus

LOOK_S = 150
"""Shorter than the time since the scrape job was renamed."""
STEP = 30
STEPS = LOOK_S // STEP + 1
HOST: frozenset[str] = frozenset({""})
"""The `gpu` of an alert about the node."""
DISHONORED = {"GpuHpcHonorLabelsMissing": HOST}
DOWN = {"GpuHpcExporterDown": HOST}

TROUBLE: Mapping[str, Mapping[str, frozenset[str]]] = {
    "dishonored-a": DISHONORED,
    "dishonored-b": DISHONORED,
    "denied": {"GpuHpcSourceDenied": frozenset({"0"})},
    "gone": DOWN,
    "down": DOWN,
    "mismatch": DOWN,
    "no_permission": DOWN,
}
"""By node: the alerts that name its trouble, and for which GPUs."""


@pytest.fixture(scope="module")
def nodes(end: int, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Scenario]:
    """All nodes by name."""
    return {node.instance: node for node in scenarios(tmp_path_factory.mktemp("played"), end)}


@pytest.fixture(scope="module")
def database(end: int, nodes: Mapping[str, Scenario], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """All of them in one."""
    lines = itertools.chain.from_iterable(node.lines for node in nodes.values())
    # Recorded from ten minutes after an even hour on, as the history is.
    with backfilled(tmp_path_factory.mktemp("scenarios"), lines, end - 3 * HOUR, end) as prometheus:
        yield prometheus


@pytest.fixture(scope="module")
def results(end: int, database: Prometheus) -> Mapping[str, Matrix]:
    """By alert: the result of its expression over the last minutes."""
    return {alert.name: database.query_range(alert.expr, end - LOOK_S, end, STEP) for alert in alerts()}


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[Prometheus]:
    """A Prometheus without any data."""
    with run_prometheus(tmp_path, EMPTY_CONFIG) as prometheus:
        yield prometheus


def holding(results: Mapping[str, Matrix], instance: str) -> Mapping[str, set[str]]:
    """By alert that holds at any time on a node: its GPUs, "" where it names none."""
    found: dict[str, set[str]] = {}
    for name, matrix in results.items():
        for labels in map(dict, matrix):
            if labels.get("instance") == instance:
                found.setdefault(name, set()).add(labels.get("gpu", ""))
    return found


def expected(node: Scenario) -> Mapping[str, set[str]]:
    """What should hold: what its GPUs do, and the node's own trouble."""
    wanted = {name: set(gpus) for name, gpus in TROUBLE.get(node.instance, {}).items()}
    # Where the labels are not honored nobody knows whose name `job` is: no GPU has an owner.
    most_jobs = 0 if "GpuHpcHonorLabelsMissing" in wanted else 2
    for gpu, work in enumerate(node.works):
        for name in replace(work, jobs=min(work.jobs, most_jobs)).alerts() | work.alerts_of_kernels():
            wanted.setdefault(name, set()).add(str(gpu))
    return wanted


def test_an_empty_database_has_no_alert_and_no_error(empty: Prometheus) -> None:
    """Nothing is known, so nothing is wrong; no expression is absent()'s."""
    assert {rule.name: empty.query(rule.expr) for rule in rules()} == {rule.name: {} for rule in rules()}


def test_exactly_the_right_alerts_name_each_node(nodes: Mapping[str, Scenario], results: Mapping[str, Matrix]) -> None:
    """What its GPUs do and what is wrong with it, and nothing else."""
    assert {instance: holding(results, instance) for instance in nodes} == {
        instance: expected(node) for instance, node in nodes.items()
    }


def test_alerts_hold_at_every_step_once_for_each_gpu(
    nodes: Mapping[str, Scenario], results: Mapping[str, Matrix]
) -> None:
    """O05: a renamed scrape job or two jobs on a GPU neither double nor interrupt an alert; none is of no node."""
    for name, matrix in results.items():
        places = [(dict(labels)["instance"], dict(labels).get("gpu", "")) for labels in matrix]
        assert len(places) == len(set(places)), f"{name} is there twice: {places}"
        assert set(map(len, matrix.values())) <= {STEPS}, name
        assert {instance for instance, _ in places} <= nodes.keys(), name


def test_owners_are_the_jobs(nodes: Mapping[str, Scenario], results: Mapping[str, Matrix]) -> None:
    """Where the labels are honored, an alert about what a GPU does names its only job; one of kernels always does."""
    for name, matrix in results.items():
        for labels in map(dict, matrix):
            node, gpu = nodes[labels["instance"]], labels.get("gpu")
            if name in OF_KERNELS:
                assert labels["job"] == BERT, f"{name} {labels}"
            elif gpu and name not in TROUBLE.get(node.instance, {}) and TROUBLE.get(node.instance) is not DISHONORED:
                assert labels.get("job", "") == node.works[int(gpu)].job, f"{name} {labels}"


@pytest.mark.parametrize("rule", [rule for rule in rules() if not rule.is_alert], ids=str)
def test_recorded_series_are_unique_and_true(end: int, database: Prometheus, rule: Rule) -> None:
    """O05: Prometheus refuses a rule whose labels make two results one; shares are shares; nothing is NaN."""
    rows = database.api("query", query=rule.expr, time=end)["result"]
    recorded = [frozenset({**row["metric"], **rule.labels, "__name__": ""}.items()) for row in rows]
    assert len(recorded) == len(set(recorded))
    values = [float(row["value"][1]) for row in rows]
    assert all(map(math.isfinite, values))
    if "ratio" in rule.name or "intensity" in rule.name:
        assert all(0 <= value <= 1.02 for value in values), values  # rate() extrapolates up to a step
