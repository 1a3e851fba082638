"""The catalogue keeps to Prometheus's conventions, and nothing invalid gets into an exposition."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gpu_hpc_exporter import metrics, metrics_page
from gpu_hpc_exporter.collectors.readings import ReadingsCollector
from gpu_hpc_exporter.diagnosis.classify import CLASSES
from gpu_hpc_exporter.diagnosis.intensity import UNITS
from gpu_hpc_exporter.exposition import MAX_LABEL_BYTES, TEXT, Family, Spec, clean_label, encode
from gpu_hpc_exporter.metrics import CATALOGUE
from gpu_hpc_exporter.model import (
    AGENT_STATES,
    CATEGORIES,
    CLOCK_EVENT_PREFIX,
    CUMULATIVE_READINGS,
    READINGS,
    RECORD_RESULTS,
    STATES,
    Pattern,
    SourceName,
)
from gpu_hpc_exporter.sources.kernels import layout
from gpu_hpc_exporter.sources.kernels.files import REASONS
from unit.objects import G0, readings, running_fleet

METRICS_MD = Path(__file__).parents[2] / "METRICS.md"
SEEDS = {
    "gpu_hpc_sm_utilization_ratio",
    "gpu_hpc_dram_bandwidth_utilization",
    "gpu_hpc_l2_cache_miss_rate",
    "gpu_hpc_kernel_launch_latency_ms",
}
NOT_BASE_UNITS = {
    *("ms", "milliseconds", "us", "microseconds", "ns", "nanoseconds", "minutes", "hours"),
    *("bits", "kb", "mb", "gb", "kib", "mib", "gib", "kilobytes", "megabytes", "gigabytes"),
    *("percent", "mhz", "megahertz", "milliwatts", "mj", "millijoules", "fahrenheit", "kelvin", "ratios"),
}
UNIT_WORDS = {"seconds", "bytes", "ratio", "celsius", "hertz", "watts", "joules"}


def expose(family: Family) -> bytes:
    """The family as Prometheus would get it."""
    return encode([family], TEXT)


def names(spec: Spec) -> set[str]:
    """Label names of a spec."""
    return set(spec.labels)


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.name)
def test_a_name_keeps_to_the_conventions(spec: Spec) -> None:
    """Prefix, lower case, _total on counters and only there, base units, no suffix that a type owns."""
    assert re.fullmatch(r"gpu_hpc(_[a-z][a-z0-9]*)+", spec.name)
    assert (spec.kind == "counter") == spec.name.endswith("_total")
    assert not spec.name.endswith(("_count", "_sum", "_bucket", "_created", "_gauge", "_counter", "_histogram"))
    assert not spec.name.endswith("_info") or (spec.kind == "gauge" and spec.help.startswith("1"))
    words = spec.name.split("_")
    assert spec.name == "gpu_hpc_kernel_launch_latency_ms" or not set(words) & NOT_BASE_UNITS
    base = spec.name.removesuffix("_total").removesuffix("_bytes_per_second")
    used = [word for word in base.split("_") if word in UNIT_WORDS]
    assert base.removesuffix("_squared").split("_")[-len(used) :] == used or not used, "the unit is the last word"
    assert len(used) <= 1


@pytest.mark.parametrize("spec", CATALOGUE, ids=lambda spec: spec.name)
def test_a_spec_is_described(spec: Spec) -> None:
    """H04: one line of help that is a sentence; at most 30 labels, whose names are valid and nobody else's."""
    assert re.fullmatch(r"[^\n|]+[.:a-z]", spec.help)
    assert len(spec.labels) == len(names(spec)) <= 30
    assert all(re.fullmatch(r"[a-z][a-z_]*", label) for label in spec.labels)
    assert not names(spec) & {"type", "le", "quantile", "instance", "hostname", "host"}
    assert ("uuid" in spec.labels) == ("gpu" in spec.labels)
    enumerated = {part.split(":")[0].strip() for part in spec.values.split(";") if part}
    assert enumerated <= names(spec)


def test_names_are_unique() -> None:
    """No two families, nor two of a histogram's series and a family, share a name."""
    series = [spec.name for spec in CATALOGUE]
    histograms = [spec.name for spec in CATALOGUE if spec.kind == "histogram"]
    series += [name + suffix for name in histograms for suffix in ("_bucket", "_count", "_sum")]
    assert len(set(series)) == len(series)
    bases = [spec.name.removesuffix("_total") for spec in CATALOGUE]
    assert len(set(bases)) == len(bases)  # OpenMetrics names a counter's family without _total


def test_the_four_seed_names() -> None:
    """G09: the four names that users know exist, as gauges with a job, which no other series of devices has."""
    jobs_own = {spec.name for section in ("Jobs", "Kernels") for spec in metrics.SECTIONS[section]}
    seeds = {spec.name: spec for spec in CATALOGUE if "job" in spec.labels and spec.name not in jobs_own}
    assert seeds.keys() == SEEDS
    for spec in seeds.values():
        assert (spec.kind, spec.labels[:3]) == ("gauge", ("gpu", "uuid", "job"))


def test_g09_i06_each_jobs_own_labels_are_on_few_series() -> None:
    """G09, I06: a job's id is on the series for joins alone, nothing has a pid: or each job would be a copy of all."""
    assert [spec.name for spec in CATALOGUE if "job_id" in spec.labels] == ["gpu_hpc_job_info"]
    for_joins = {"user", "namespace", "pod", "container", "rank"}
    assert [spec.name for spec in CATALOGUE if for_joins & names(spec)] == ["gpu_hpc_job_info"]
    assert not [spec.name for spec in CATALOGUE if names(spec) & {"pid", "tid", "process", "worker"}]


def test_every_constant_is_in_the_catalogue() -> None:
    """A spec that no section lists would be served without being documented."""
    assert {spec for spec in vars(metrics).values() if isinstance(spec, Spec)} == set(CATALOGUE)


@pytest.mark.parametrize(
    ("spec", "label", "values"),
    [
        (metrics.BOTTLENECK_SECONDS, "class", CLASSES),
        (metrics.BOTTLENECK_INTENSITY, "unit", UNITS),
        (metrics.BOTTLENECK_INTENSITY_WINDOWS, "unit", UNITS),
        (metrics.SOURCE_STATE, "state", STATES),
        (metrics.SOURCE_STATE, "source", get_args(SourceName)),
        (metrics.KERNEL_EXECUTIONS, "category", CATEGORIES),
        (metrics.KERNEL_PATTERN, "pattern", get_args(Pattern)),
        (metrics.AGENTS, "state", AGENT_STATES),
        (metrics.AGENT_PAUSE_INFO, "reason", (*layout.REASONS[1:], "no_heartbeat", "unknown")),
        (metrics.AGENT_RECORDS, "result", RECORD_RESULTS),
        (metrics.AGENT_FILES_REJECTED, "reason", REASONS),
        (
            metrics.CLOCK_EVENT_SECONDS,
            "reason",
            tuple(r.removeprefix(CLOCK_EVENT_PREFIX) for r in READINGS if r.startswith(CLOCK_EVENT_PREFIX)),
        ),
    ],
)
def test_documented_label_values_are_the_real_ones(spec: Spec, label: str, values: tuple[str, ...]) -> None:
    """The lists in the catalogue are those of the code, in its order."""
    listed = dict(part.strip().split(": ") for part in spec.values.split(";"))
    assert tuple(listed[label].split(", ")) == values


def test_metrics_md_is_current() -> None:
    """METRICS.md is what the generator writes now."""
    assert METRICS_MD.read_text("utf-8") == metrics_page.render()


def test_metrics_md_names_every_series_and_no_other() -> None:
    """Each series name in the page's tables is a spec, each spec is there, and no example is made up."""
    text = METRICS_MD.read_text("utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.MULTILINE)
    assert rows == [(spec.name, spec.kind) for spec in CATALOGUE]
    mentioned = set(re.findall(r"\bgpu_hpc_\w+", text)) - {"gpu_hpc_exporter"}
    assert mentioned == {spec.name for spec in CATALOGUE}


def test_b03_what_can_go_down_is_no_counter() -> None:
    """B03: every reading is served, as a counter exactly where the driver accumulates it."""
    kinds = {}
    for reading in READINGS:
        fleet = running_fleet(G0)
        fleet.put(readings(10, {reading: 1.0}))
        for family in ReadingsCollector().collect(fleet.snapshot()):
            if family.samples:
                kinds[reading] = family.spec.kind
    integrated = {r for r in READINGS if r.startswith(CLOCK_EVENT_PREFIX)}  # served as seconds, over two readings
    assert kinds.keys() == set(READINGS) - integrated
    assert {reading for reading, kind in kinds.items() if kind == "counter"} == CUMULATIVE_READINGS


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_absent(value: float) -> None:
    """Absent is not zero, and not NaN either."""
    family = metrics.SM_ACTIVE.family()
    family.add(value, "0", "G")
    assert family.samples == []


def test_a_wrong_number_of_labels_is_an_error() -> None:
    """A collector that forgets a label fails in its tests, not in a dashboard."""
    with pytest.raises(ValueError, match="zip"):
        metrics.SM_ACTIVE.family().add(1, "0")


def test_large_totals_stay_integers() -> None:
    """The exposition has the double nearest to an exact total."""
    family = metrics.PCIE_REPLAYS.family()
    family.add(2**53 + 2, "0", "G")
    (parsed,) = text_string_to_metric_families(expose(family).decode())
    assert parsed.samples[0].value == 2**53 + 2


_ANY_TEXT = st.text(st.characters(), max_size=300) | st.text('\\"\n{}=, \r\0\x85\u2028', max_size=20)


@given(_ANY_TEXT)
@settings(max_examples=300)
@example("a\udcff")  # H01: what os.fsdecode makes of a bad byte
@example("\ud800")
@example('a\n"b\\c\r\0')  # E05
@example("k" * 10_000)  # H04
@example("\N{GRINNING FACE}" * 2_500)
@example("x" + "\N{EURO SIGN}" * 100)
def test_h01_h04_e05_any_label_makes_a_valid_exposition(text: str) -> None:
    """H01, H04, E05: any text gives an exposition that parses, in UTF-8, with at most 200 bytes a value."""
    family = metrics.DOWN_INFO.family()
    family.add(1, text)
    exposition = expose(family).decode("utf-8")
    (parsed,) = text_string_to_metric_families(exposition)
    (sample,) = parsed.samples
    value = sample.labels["reason"]
    assert value == clean_label(text)
    assert len(value.encode("utf-8")) <= MAX_LABEL_BYTES
    assert exposition.count("\n") == 3


@given(_ANY_TEXT)
@settings(max_examples=100)
def test_cleaning_a_label_twice_changes_nothing(text: str) -> None:
    """What is clean stays, printable text is not touched and no character is cut in half."""
    clean = clean_label(text)
    assert clean_label(clean) == clean
    assert clean.isprintable()
    if text.isprintable() and len(text.encode("utf-8")) <= MAX_LABEL_BYTES:
        assert clean == text
    kept = clean[:-9] if len(clean) < len(text) or clean[-9:-8] == "~" else clean  # what was cut ends in ~ and a hash
    assert all(new in {old, "\N{REPLACEMENT CHARACTER}"} for new, old in zip(kept, text, strict=False))


@given(st.lists(st.integers(0, 2**60), min_size=1, max_size=20), st.floats(0, 1e12))
@settings(max_examples=100)
def test_histograms_are_cumulative(counts: list[int], total: float) -> None:
    """Buckets only grow, +Inf is the count, and the exposition parses as one histogram."""
    bounds = [n / 10 for n in range(1, len(counts))]
    family = metrics.BOTTLENECK_INTENSITY_WINDOWS.family()
    family.add_histogram(bounds, counts, total, "0", "G", "sm")
    (parsed,) = text_string_to_metric_families(expose(family).decode())
    assert parsed.type == "histogram"
    by_name = {sample.name.rpartition("_")[2]: sample.value for sample in parsed.samples}
    buckets = {sample.labels["le"]: sample.value for sample in parsed.samples if sample.name.endswith("_bucket")}
    assert list(buckets) == [*map(repr, bounds), "+Inf"]
    assert list(buckets.values()) == sorted(buckets.values())
    assert buckets["+Inf"] == by_name["count"] == float(sum(counts))
    assert by_name["sum"] == total
