"""Alerts against reality: what holds while an H200 does one thing for an hour, and what does not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bundle.conftest import History
from history.expected import BERT, EXPECTED, LLAMA
from history.fleet_data import Played
from history.phases import names
from history.rules import alerts
from prometheus_process import Matrix

LOOK_S = 20 * 60
STEP = 30
STEPS = LOOK_S // STEP + 1
RISING = re.compile(r"gpu_hpc_.+_(total|count|sum|bucket)\{|gpu_hpc_last_window_timestamp")

RAN: Mapping[str, set[str]] = {
    "h2d": set(),
    "d2h": set(),
    "h2d_pageable": set(),
    "embedding_cpu_index": {"vectorized_gather_kernel"},
    "embedding_gpu_index": {"vectorized_gather_kernel", "elementwise_kernel_with_index"},
    "launch_bound": {"vectorized_elementwise_kernel[MulFunctor]"},
}
"""Kernels that some phases ran, and no others."""
PASSING = "GpuHpcL2Thrashing"
"""Where training ends and inference begins, means of five minutes pass through its range for less than its `for`."""


@pytest.fixture(scope="module")
def results(history: History) -> Mapping[str, Matrix]:
    """By alert: the result of its expression over the last 20 minutes."""
    start = history.end - LOOK_S
    return {alert.name: history.prometheus.query_range(alert.expr, start, history.end, STEP) for alert in alerts()}


def of_instance(matrix: Matrix, instance: str) -> Matrix:
    """What a result has of one node."""
    return {labels: values for labels, values in matrix.items() if ("instance", instance) in labels}


def test_every_phase_and_no_unknown_alert_is_expected() -> None:
    """The table names what there is."""
    assert set(EXPECTED) == set(names())
    assert set().union(*(holding for _, holding in EXPECTED.values())) <= {alert.name for alert in alerts()}


@pytest.mark.parametrize("phase", EXPECTED)
def test_exactly_these_alerts_hold(history: History, results: Mapping[str, Matrix], phase: str) -> None:
    """Throughout the last 20 minutes of a phase, on its GPU, with its job; all others at no time."""
    job, holding = EXPECTED[phase]
    node = history.phases[phase]
    found = {name: of_instance(matrix, node.instance) for name, matrix in results.items()}
    steps = {name: [len(values) for values in matrix.values()] for name, matrix in found.items() if matrix}
    assert steps == {name: [STEPS] for name in holding}
    for name in holding:
        (labels,) = map(dict, found[name])
        assert (labels["gpu"], labels["uuid"], labels.get("job", "")) == ("0", node.uuid(0), job)


def test_what_holds_of_the_recording_itself(results: Mapping[str, Matrix]) -> None:
    """A GPU that does each thing for 18 seconds is none of the causes; a third of its first job is bad loops."""
    found = {name: of_instance(matrix, "h200-demo") for name, matrix in results.items()}
    jobs = {name: {dict(labels)["job"] for labels in matrix} for name, matrix in found.items() if matrix}
    assert jobs == {"GpuHpcLaunchBound": {BERT}, "GpuHpcSyncStorm": {BERT}}


def test_changes_from_one_phase_to_the_next_are_no_causes(history: History) -> None:
    """While a GPU goes from one phase to the next, nothing holds that holds in none of them."""
    known = set().union(*(holding for _, holding in EXPECTED.values()))
    others = [alert for alert in alerts() if alert.name not in {*known, PASSING}]
    found = {
        alert.name: of_instance(history.prometheus.query_range(alert.expr, history.start, history.end, 60), "h200-tour")
        for alert in others
    }
    assert {name for name, matrix in found.items() if matrix} == set()


@pytest.mark.parametrize("phase", RAN)
def test_kernels_of_a_phase_are_its_own(history: History, phase: str) -> None:
    """The agent looks throughout, and nothing of the phase before is told of it."""
    node = f'{{instance="{history.phases[phase].instance}",job="{EXPECTED[phase][0]}"}}[10m]'
    span = (history.end - LOOK_S, history.end, STEP)
    ((_, traced),) = history.prometheus.query_range(f"rate(gpu_hpc_kernel_traced_seconds_total{node})", *span).items()
    assert len(traced) == STEPS
    assert all(0.1 < value < 0.5 for _, value in traced)
    ran = history.prometheus.query_range(f"rate(gpu_hpc_kernel_executions_total{node}) > 0", *span)
    assert {dict(labels)["kernel"] for labels in ran} == RAN[phase]


@pytest.mark.parametrize(("phase", "direction"), [("h2d", "host_to_gpu"), ("d2h", "gpu_to_host")])
def test_the_saturated_direction_is_known(history: History, phase: str, direction: str) -> None:
    """PcieSaturated names the direction of the greater recorded rate: it is greater by far."""
    series = f'gpu:pcie_bytes:rate5m{{instance="{history.phases[phase].instance}"}}'
    rates = history.prometheus.query_range(series, history.end - LOOK_S, history.end, STEP)
    least = {dict(labels)["direction"]: min(value for _, value in values) for labels, values in rates.items()}
    (other,) = least.keys() - {direction}
    assert least[direction] > 40e9
    assert least[other] < 4e9


def test_the_history_is_whole(history: History) -> None:
    """Every node has been observed without gaps, its counters never go back, its job is the user's own."""
    ask = history.prometheus
    observed = ask.query_range("rate(gpu_hpc_observed_seconds_total[5m])", history.end - LOOK_S, history.end, 60)
    assert len(observed) == len(EXPECTED) + 3
    assert all(0.97 < value < 1.02 for values in observed.values() for _, value in values)
    # What is counted of a job ends with the job, in each round of the whole recording.
    counters = '__name__=~"gpu_hpc_.+_(total|count|sum|bucket)"'
    lasting = f'{{{counters},instance!="h200-demo"}} or {{{counters},job!~"{BERT}|{LLAMA}"}}'
    named = f'label_replace({lasting}, "name", "$1", "__name__", "(.+)")'
    resets = f"resets({named}[{history.end - history.start}s:{STEP}s]) > 0"
    assert ask.query_range(resets, history.end, history.end, 1) == {}
    jobs = ask.query_range("count by(job) (gpu_hpc_sm_utilization_ratio)", history.end, history.end, 1)
    assert {dict(labels).get("job", "") for labels in jobs} == {"", *(job for job, _ in EXPECTED.values())}


def test_a_phase_goes_on_as_it_went(end: int, played: Mapping[str, Played], tmp_path: Path) -> None:
    """Ten minutes that were prolonged to an hour say what an hour that was played says: the same series and values."""
    prolonged = played["train"]
    whole = Played(replace(prolonged.run, times=1), tmp_path / "train.txt")
    whole.run.write(whole.file)
    (last, got), (last_of_whole, wanted) = (list(one.scrapes())[-1] for one in (prolonged, whole))
    assert last == last_of_whole == end
    told = dict(got)
    assert told.keys() == dict(wanted).keys()
    for series, value in wanted:
        if RISING.match(series):
            # One round of the phase more or less in ten minutes is 3 percent.
            assert float(told[series]) == pytest.approx(float(value), rel=0.03, abs=2), series
