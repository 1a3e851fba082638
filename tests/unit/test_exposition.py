"""Our encoder writes, byte for byte, what prometheus_client's own encoders write."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from decimal import Decimal
from enum import IntEnum

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from gpu_hpc_exporter.exposition import OPENMETRICS, TEXT, Family, Kind, Spec, clean_label, encode, format_value

NAMES = ("b", "a", "c")
VALUES = st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**70), 2**70), st.booleans())
ROWS = st.lists(st.tuples(st.tuples(*[st.text(max_size=300)] * len(NAMES)), VALUES), max_size=5)


class Ready(Collector):
    """A registry of one family of prometheus_client's own."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        """The family."""
        yield self._metric


def both(spec: Spec, rows: list[tuple[tuple[str, ...], float]]) -> tuple[Family, Metric]:
    """The same samples as a family of ours and as one of prometheus_client's."""
    family, metric = spec.family(), Metric(spec.name.removesuffix("_total"), spec.help, spec.kind)
    for labels, value in rows:
        family.add(value, *labels)
        metric.add_sample(spec.name, dict(zip(NAMES, map(clean_label, labels), strict=True)), value)
    return family, metric


@given(ROWS, st.sampled_from(["gauge", "counter"]), st.text(max_size=50).filter(lambda text: "\r" not in text))
@settings(max_examples=200)
def test_samples_are_written_as_the_library_writes_them(
    rows: list[tuple[tuple[str, ...], float]], kind: Kind, text: str
) -> None:
    """Names, HELP, TYPE, order and escapes of labels, and numbers of any size, in both formats."""
    name = "gpu_hpc_x_total" if kind == "counter" else "gpu_hpc_x"
    try:
        text.encode()
    except UnicodeEncodeError:
        return  # the library cannot write it; HELP texts are our own
    family, metric = both(Spec(name, kind, text, NAMES), rows)
    assert encode([family], TEXT) == generate_latest(Ready(metric))
    assert encode([family], OPENMETRICS) == openmetrics.generate_latest(Ready(metric))  # type: ignore[no-untyped-call]  # has no types


@given(st.lists(st.integers(0, 2**60), min_size=4, max_size=4), st.floats(0, 1e18))
def test_histograms_are_written_as_the_library_writes_them(counts: list[int], total: float) -> None:
    """Buckets are cumulated, the last one is +Inf, count and sum follow."""
    bounds = (0.05, 1.0, 2.5e7)
    family = Spec("gpu_hpc_h", "histogram", "h", ("a",)).family()
    family.add_histogram(bounds, counts, total, "x")
    metric = Metric("gpu_hpc_h", "h", "histogram")
    cumulated = 0
    for bound, count in zip((*map(format_value, bounds), "+Inf"), counts, strict=True):
        cumulated += count
        metric.add_sample("gpu_hpc_h_bucket", {"a": "x", "le": bound}, cumulated)
    metric.add_sample("gpu_hpc_h_count", {"a": "x"}, cumulated)
    metric.add_sample("gpu_hpc_h_sum", {"a": "x"}, total)
    assert encode([family], TEXT) == generate_latest(Ready(metric))
    assert encode([family], OPENMETRICS) == openmetrics.generate_latest(Ready(metric))  # type: ignore[no-untyped-call]  # has no types


def test_a_family_of_the_library_keeps_its_form() -> None:
    """process_* come from prometheus_client and leave as they would have left there."""
    for metric in ProcessCollector(registry=None).collect():
        family = Family.of_metric(metric)
        assert encode([family], TEXT) == generate_latest(Ready(metric))


@pytest.mark.parametrize("wanted", [TEXT, OPENMETRICS], ids=lambda f: f.media_type)
def test_nothing_is_an_exposition_too(wanted: object) -> None:
    """Without a family there is only the end mark that OpenMetrics asks for."""
    assert encode([], TEXT if wanted is TEXT else OPENMETRICS) == (b"" if wanted is TEXT else b"# EOF\n")


def test_churn_of_labels_does_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginnings of lines that are kept are bounded, and what is written stays right when they are dropped."""
    monkeypatch.setattr("gpu_hpc_exporter.exposition._MAX_KEPT", 10)
    spec = Spec("gpu_hpc_x", "gauge", "x", ("a",))
    for number in range(100):
        family = spec.family()
        family.add(1, str(number))
        assert f'gpu_hpc_x{{a="{number}"}} 1.0' in encode([family], TEXT).decode()


@pytest.mark.parametrize(
    "value", [None, "", "1", b"1", Decimal(1), [1], math.inf, -math.inf, math.nan, 10**400, 1j], ids=repr
)
def test_h07_only_finite_numbers_are_written(value: object) -> None:
    """H07: nothing that is not a finite number gets into an exposition, and nothing of it raises."""
    family = Spec("gpu_hpc_x", "gauge", "x").family()
    family.add(value)  # type: ignore[arg-type]  # what a careless collector might pass
    family.add(2**63)
    family.add(-0.0)
    assert [line for line in encode([family], TEXT).decode().splitlines() if line[0] != "#"] == [
        "gpu_hpc_x 9.223372036854776e+18",
        "gpu_hpc_x -0.0",
    ]


class Scalar(float):
    """A number that calls itself as NumPy's do."""

    def __repr__(self) -> str:
        return f"np.float64({float(self)!r})"


class Level(IntEnum):
    """A number with a name."""

    HIGH = 3


class Convertible:
    """What could be made a number, as an array of one element could."""

    def __float__(self) -> float:
        return 1.0

    __abs__ = __float__


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.floats().map(Scalar),
    st.sampled_from(Level),
    st.complex_numbers(),
    st.decimals(),
    st.fractions(),
    st.text(),
    st.binary(),
    st.datetimes(),
    st.timedeltas(),
    st.lists(st.floats(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.floats(), max_size=2),
    st.builds(Convertible),
    st.builds(object),
    st.just(float),
)


@given(ANYTHING)
@settings(max_examples=500)
@example(Scalar(1.5))
@example(Level.HIGH)
@example(2**1024)
@example(Decimal("NaN"))
def test_h07_whatever_is_given_is_a_finite_number_or_nothing(value: object) -> None:
    """H07: every type of Python's: a line that Go reads as the float, or none; what comes after is not touched."""
    family = Spec("gpu_hpc_x", "gauge", "x", ("a",)).family()
    family.add(value, "1")  # type: ignore[arg-type]  # what a careless collector might pass
    family.add(2, "2")
    *told, last = [line for line in encode([family], TEXT).decode().splitlines() if line[0] != "#"]
    assert last == 'gpu_hpc_x{a="2"} 2.0'
    if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        (line,) = told
        assert float(re.fullmatch(r'gpu_hpc_x{a="1"} ([-+.e0-9]+)', line)[1]) == float(value)  # type: ignore[index]  # or it fails
    else:
        assert told == []
