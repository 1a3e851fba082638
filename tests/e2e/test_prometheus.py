"""A real Prometheus that scrapes the exporter."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import pytest

from exporter_process import Exporter, run_exporter
from prometheus_process import Prometheus, run_prometheus

SM_ACTIVE = (
    "rate(gpu_hpc_sm_active_seconds_total[10s]) / on(instance,gpu,uuid) group_left() "
    "(rate(gpu_hpc_observed_seconds_total[10s]) > 0)"
)
CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: gpu-hpc
    honor_labels: true
    static_configs: [{{targets: ["{target}"]}}]
"""


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    """Replay at ten times the speed."""
    with run_exporter(tmp_path_factory.mktemp("exporter"), "--source=replay", "--replay.speed=10") as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(exporter: Exporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus with a few scrapes of it."""
    config = CONFIG.format(target=exporter.url.removeprefix("http://"))
    with run_prometheus(tmp_path_factory.mktemp("prometheus"), config) as running:
        running.wait_for("count_over_time(up[1m]) >= 5")
        yield running


def test_the_target_is_healthy(prometheus: Prometheus) -> None:
    """Prometheus scrapes without an error and takes every sample."""
    prometheus.wait_for("up == 1")  # a busy machine may miss the second that a scrape may take here
    (target,) = prometheus.api("targets")["activeTargets"]
    assert (target["health"], target["lastError"]) == ("up", "")
    assert prometheus.query("scrape_samples_scraped - scrape_samples_post_metric_relabeling != 0") == {}
    assert "msg" not in prometheus.log.read_text()  # at level warn: no duplicate, no out-of-order sample


def test_the_documented_ratio_is_a_ratio(prometheus: Prometheus) -> None:
    """The SM active share of diagnosis.md section 4 has values, all between 0 and 1."""
    ((labels, _),) = prometheus.wait_for(SM_ACTIVE).items()
    assert dict(labels)["gpu"] == "0"
    now = time.time()
    ((_, values),) = prometheus.query_range(SM_ACTIVE, now - 30, now, 1).items()
    assert values
    assert all(0 <= value <= 1 for _, value in values)


def test_shares_of_the_classes_add_up_to_one(prometheus: Prometheus) -> None:
    """Time by class over observed time: one share for each of the 14 classes, together 1.

    The counters add up exactly; rate() extrapolates a counter that has just left 0 less than the others.
    """
    shares = prometheus.wait_for(
        "rate(gpu_hpc_bottleneck_seconds_total[10s]) / on(instance,gpu,uuid) group_left() "
        "(rate(gpu_hpc_observed_seconds_total[10s]) > 0)"
    )
    assert len(shares) == 14
    assert all(0 <= share <= 1 for share in shares.values())
    assert math.fsum(shares.values()) == pytest.approx(1, rel=0.25)
    ((_, error),) = prometheus.query(
        "sum by(instance,gpu,uuid)(gpu_hpc_bottleneck_seconds_total) "
        "/ on(instance,gpu,uuid) gpu_hpc_observed_seconds_total - 1"
    ).items()
    assert abs(error) <= 1e-9
    assert (
        len(prometheus.query('gpu_hpc_bottleneck_seconds_total{class=~"compute_bound|dram_bound|pcie_bound|idle"}'))
        == 4
    )


def test_mean_intensity_comes_from_the_histogram(prometheus: Prometheus) -> None:
    """The mean intensity over a range, from the histogram's sum and count, lies between 0 and 1 for each unit."""
    name = "gpu_hpc_bottleneck_intensity_window_ratio"
    means = prometheus.wait_for(f"rate({name}_sum[10s]) / (rate({name}_count[10s]) > 0)")
    units = {dict(labels)["unit"] for labels in means}
    assert units | {"l2"} == {"sm", "l2", "dram", "pcie"}  # L2's is absent while next to nothing moves through it
    assert all(0 <= value <= 1 for value in means.values())


def test_the_users_names_have_no_job_of_the_scraper(prometheus: Prometheus) -> None:
    """F08, DESIGN 3.8: with honor_labels neither a job nor an idle GPU's empty one is replaced by Prometheus's job."""
    names = "gpu_hpc_sm_utilization_ratio|gpu_hpc_dram_bandwidth_utilization"
    for job in ("", "bert_finetune"):
        found = prometheus.wait_for(f'{{__name__=~"{names}",job="{job}"}}', lambda vector: len(vector) == 2, timeout=60)
        assert not any("exported_job" in dict(labels) for labels in found)
    assert prometheus.query(f'{{__name__=~"{names}",job="gpu-hpc"}}') == {}
    assert len(prometheus.query('gpu_hpc_up{job="gpu-hpc"}')) == 1


def test_exposed_series_is_what_prometheus_counts(prometheus: Prometheus, exporter: Exporter) -> None:
    """What Prometheus scrapes is gpu_hpc_exposed_series, which counts itself."""
    scraped = prometheus.wait_for("scrape_samples_scraped == on(instance) gpu_hpc_exposed_series")
    assert len(scraped) == 1
    samples = exporter.scrape()
    assert len(samples.values) == samples.one("gpu_hpc_exposed_series")
