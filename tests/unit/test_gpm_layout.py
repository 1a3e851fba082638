"""What sources/nvml/gpm.py unpacks by hand is laid out as NVIDIA's binding says."""

from __future__ import annotations

import ctypes

import pynvml
import pytest

from gpu_hpc_exporter.model import Gpu, Link
from gpu_hpc_exporter.sources.nvml.gpm import _ANSWER, _C2C, _NVLINK, _PCIE, _RATIOS, _build_request
from unit.objects import G0

METRICS = (*_RATIOS, *_PCIE, *_NVLINK, *_C2C)


def gpu_with(*links: Link) -> Gpu:
    """A GPU that has these links."""
    return Gpu(G0.uuid, 0, "NVIDIA H200", links=links)


def test_an_answer_is_unpacked_at_the_binding_s_offsets() -> None:
    """Return code and value are read where nvmlGpmMetric_t has them, and one answer is as long as the struct."""
    metric = pynvml.c_nvmlGpmMetric_t()
    assert _ANSWER.size == ctypes.sizeof(metric)
    metric.metricId, metric.nvmlReturn, metric.value = 0xAAAAAAAA, 0xBBBBBBBB, 12.5
    assert _ANSWER.unpack(bytes(metric)) == (0xBBBBBBBB, 12.5)


def test_answers_follow_one_another_in_the_request() -> None:
    """The array of answers in nvmlGpmMetricsGet_t has no gaps, so that it can be unpacked in one go."""
    request, plan = _build_request(gpu_with("pcie", "nvlink", "c2c"))
    for position in range(len(plan)):
        request.metrics[position].nvmlReturn = position
        request.metrics[position].value = position / 2
    start = pynvml.c_nvmlGpmMetricsGet_t.metrics.offset
    answers = bytes(request)[start : start + len(plan) * _ANSWER.size]
    assert list(_ANSWER.iter_unpack(answers)) == [(n, n / 2) for n in range(len(plan))]


def test_metric_ids_are_distinct_and_fit() -> None:
    """No metric is asked for twice, GRAPHICS_UTIL (1.4 ms a call) never, and all fit into the struct."""
    ids = [metric_id for metric_id, _ in METRICS]
    assert len(set(ids)) == len(ids)
    assert pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL not in ids
    assert len(ids) <= pynvml.NVML_GPM_METRIC_MAX == len(pynvml.c_nvmlGpmMetricsGet_t().metrics)


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        ((), _RATIOS),
        (("pcie",), (*_RATIOS, *_PCIE)),
        (("pcie", "nvlink"), (*_RATIOS, *_PCIE, *_NVLINK)),
        (("pcie", "nvlink", "c2c"), METRICS),
    ],
)
def test_only_links_that_exist_are_asked_for(links: tuple[Link, ...], expected: tuple[tuple[int, str], ...]) -> None:
    """The request names the ratios and both directions of each link, in the plan's order."""
    request, plan = _build_request(gpu_with(*links))
    asked = [request.metrics[position].metricId for position in range(request.numMetrics)]
    assert asked == [metric_id for metric_id, _ in expected]
    assert [quantity for quantity, _, _ in plan] == [quantity for _, quantity in expected]
