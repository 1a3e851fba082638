"""The shipped recording, served by the real exporter."""

from __future__ import annotations

import itertools
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from exporter_process import Exporter, Labels, Samples, parse, run_exporter
from gpu_hpc_exporter.config import DEFAULT_RECORDING

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
LATENCY = "gpu_hpc_kernel_launch_latency_ms"
"""Served while kernels ran lately, which is not so in all of the recording."""
RECORDING_SECONDS = 241.0
"""A little less than the shipped recording lasts."""
CLASSES = {"compute_bound", "dram_bound", "pcie_bound", "idle", "starved", "mixed"}
"""Classes that the recorded workloads pass through."""


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    """Replay at 50 times the speed, once it has windows of both sources."""
    with run_exporter(tmp_path_factory.mktemp("replay"), "--source=replay", "--replay.speed=50") as running:
        running.wait_for(lambda samples: bool(samples.all("gpu_hpc_l2_sectors_total")))
        yield running


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Expositions over more than two loops of the recording."""
    texts: list[str] = []
    with run_exporter(tmp_path_factory.mktemp("loops"), "--source=replay", "--replay.speed=100") as running:

        def enough(_: Samples) -> bool:
            text = running.fetch()[2]
            if not texts or text != texts[-1]:
                texts.append(text)
            is_long = (parse(text).get("gpu_hpc_observed_seconds_total") or 0) > 2.2 * RECORDING_SECONDS
            return is_long and len(texts) >= 4

        running.wait_for(enough, timeout=100)
    return texts


def test_a_recording_says_that_it_is_one(exporter: Exporter) -> None:
    """gpu_hpc_replay is 1, the exporter is up and ready, and the log warns that these are not this machine's GPUs."""
    samples = exporter.scrape()
    assert samples.one("gpu_hpc_replay") == 1
    assert samples.one("gpu_hpc_up") == 1
    assert samples.one("gpu_hpc_source_state", source="replay", state="active") == 1
    assert samples.one("gpu_hpc_gpu_info", architecture="hopper") == 1
    status, _, text = exporter.fetch("/-/ready")
    assert (status, text) == (200, "ready\n")
    assert "not this machine's GPUs" in exporter.log.read_text()


def test_the_api_names_the_recording(exporter: Exporter) -> None:
    """It says which recording is played and shows its GPU; the page is HTML."""
    status, headers, _ = exporter.fetch("/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    told = json.loads(exporter.fetch("/api/v1/gpus")[2])
    assert told["recording"] == DEFAULT_RECORDING.name
    assert [gpu["name"] for gpu in told["gpus"]] == ["NVIDIA H200"]


def test_promtool_has_no_complaint(exporter: Exporter) -> None:
    """`promtool check metrics` accepts every name, type and HELP, but for the users' own name of the latency."""
    texts = [""]

    def has_kernels(_: Samples) -> bool:
        texts.append(exporter.fetch()[2])
        return f"{LATENCY}{{" in texts[-1]

    exporter.wait_for(has_kernels)
    result = subprocess.run(
        ["promtool", "check", "metrics"], input=texts[-1], capture_output=True, text=True, check=False
    )
    told = f"{LATENCY} metric names should not contain abbreviated units\n"
    assert (result.returncode, result.stdout, result.stderr) == (3, "", told)


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    """What Prometheus asks for is OpenMetrics, parses strictly and has the same families as the text format."""
    differences = []
    # As fast as life: each format has a page of its own that is up to a second old, and families come and go.
    with run_exporter(tmp_path, "--source=replay") as exporter:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            status, headers, text = exporter.fetch(Accept=PROMETHEUS_ACCEPT)
            assert (status, headers["Content-Type"]) == (200, OPENMETRICS)
            families = {family.name: family.type for family in parse_openmetrics(text)}  # type: ignore[no-untyped-call]  # no types
            assert text.endswith("# EOF\n")
            plain = {family.name: family.type for family in text_string_to_metric_families(exporter.fetch()[2])}
            differences.append({*families.items()} ^ {*plain.items()})
            if not differences[-1]:
                return
            time.sleep(0.2)
    pytest.fail(f"in no pair of scrapes were they the same: {differences[-3:]}")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(("accept", "content_type"), [("*/*", TEXT), ("", TEXT), (PROMETHEUS_ACCEPT, OPENMETRICS)])
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_h06_content_type_is_exact(
    exporter: Exporter, method: str, accept: str, content_type: str, encoding: str
) -> None:
    """H06: Prometheus 3 refuses any other Content-Type, whatever the method and the encoding."""
    headers = {"Accept": accept, "Accept-Encoding": encoding}
    request = urllib.request.Request(f"{exporter.url}/metrics", headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert (answer.status, answer.headers["Content-Type"]) == (200, content_type)


def test_unknown_paths_and_methods_are_refused(exporter: Exporter) -> None:
    """A path that does not exist is 404, a method that makes no sense 405; neither is a 200 page."""
    assert exporter.fetch("/nothing")[0] == 404
    assert exporter.fetch("/metrics/")[0] == 404
    for method in ("POST", "PUT", "DELETE"):
        request = urllib.request.Request(f"{exporter.url}/metrics", data=b"", method=method)
        with pytest.raises(urllib.error.HTTPError, match="405") as refused:
            urllib.request.urlopen(request, timeout=10)
        refused.value.close()


def monotonic_series(text: str) -> dict[tuple[str, Labels], float]:
    """Counters and what of a histogram only grows; what is counted of a job ends with the job, in every loop."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type in ("counter", "histogram") and "job" not in sample.labels
    }


def test_no_counter_goes_back_over_loops(scrapes: list[str]) -> None:
    """N08: over more than two loops of the recording no counter falls and none vanishes."""
    for before, after in itertools.pairwise(map(monotonic_series, scrapes)):
        fallen = {key: (value, after.get(key)) for key, value in before.items() if not after.get(key, -1) >= value}
        assert fallen == {}


def test_classes_add_up_in_every_scrape(scrapes: list[str]) -> None:
    """The 14 classes add up to the observed time within 1e-9, and the recorded workloads show theirs."""
    for samples in map(parse, scrapes):
        if not samples.all("gpu_hpc_observed_seconds_total"):
            continue
        classes = samples.all("gpu_hpc_bottleneck_seconds_total")
        assert len(classes) == 14
        assert sum(classes.values()) == pytest.approx(samples.one("gpu_hpc_observed_seconds_total"), rel=1e-9)
    last = parse(scrapes[-1]).all("gpu_hpc_bottleneck_seconds_total")
    assert {dict(labels)["class"] for labels, seconds in last.items() if seconds > 1} >= CLASSES


def test_ratios_stay_within_their_range(scrapes: list[str]) -> None:
    """Every gauge that is a ratio, the users' names included, is between 0 and 1 in every scrape."""
    seen = set()
    for samples in map(parse, scrapes):
        for (name, labels), value in samples.values.items():
            if name.endswith(("_ratio", "_utilization")):
                seen.add(name)
                assert 0 <= value <= 1, f"{name}{dict(labels)} {value}"
    assert {"gpu_hpc_sm_utilization_ratio", "gpu_hpc_dram_bandwidth_utilization"} <= seen
