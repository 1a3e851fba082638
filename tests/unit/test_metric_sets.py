"""Sets of counters: CUPTI takes every one of them, the right one is chosen, and values come out in base units."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Final, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cupti_host import Answer, Question, Report, ask, wheel_file
from gpu_hpc_exporter.model import COUNT_QUANTITIES, L2Definition, Link, Quantity
from gpu_hpc_exporter.sources.pm_sampling.metric_sets import (
    CORE,
    DROP_ORDER,
    MetricSet,
    Part,
    Rejection,
    UnsupportedError,
    choose,
    families,
    to_quantities,
)
from gpu_hpc_exporter.sources.values import Problem

Value = float | tuple[float, ...]

MS: Final = 1_000_000
ALL_LINKS: Final[tuple[Link, ...]] = ("pcie", "nvlink", "c2c")
LIBRARIES: Final = {
    (12, 9): ("nvidia-cuda-cupti-cu12", "libcupti.so.12"),
    (13, 1): ("nvidia-cuda-cupti", "libcupti.so.13"),
}
UNKNOWN_CHIPS: Final = {(12, 9): {"GB110", "GB112", "GB207", "GB20C"}, (13, 1): set[str]()}
UNKNOWN_COUNTERS: Final = {
    ((12, 9), "GB20B"): {
        "lts__t_sectors.sum",
        "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
        "lts__average_t_sector_hit_rate_realtime.pct",
    }
}
CHIPS: Final = [chip for family in families().values() for chip in family.chips]
WITH_FALLBACK: Final = [chip for family in families().values() if family.before_12_9 for chip in family.chips]

DRAM: Final[set[Part]] = {"dram_read_bytes", "dram_written_bytes"}
PCIE: Final[set[Part]] = {"pcie_host_to_gpu_bytes", "pcie_gpu_to_host_bytes"}
NVLINK: Final[set[Part]] = {"nvlink_received_bytes", "nvlink_transmitted_bytes"}
C2C: Final[set[Part]] = {"c2c_host_to_gpu_bytes", "c2c_gpu_to_host_bytes"}
L2: Final[set[Part]] = {"l2_sectors"}
TENSOR: Final[set[Part]] = {"pipe_tensor"}
PIPES: Final[set[Part]] = {"pipe_tensor", "pipe_fp32", "pipe_int"}
FULL_CORE: Final[set[Part]] = {"sm_active", "l2_sectors", *DRAM, *PCIE}
TWO_PARTS: Final[set[Part]] = {*FULL_CORE, "l2_active", "l2_cross_partition"}
OLD_CORE: Final[set[Part]] = {"sm_active", "dram_active", *PCIE}


def full_set(chip: str, cupti: tuple[int, int] = (13, 1)) -> MetricSet:
    """All that can be read on a chip."""
    return choose(chip, cupti, ALL_LINKS, 100 * MS, has_gpm=False)


def reductions(metric_set: MetricSet) -> Iterator[tuple[MetricSet, tuple[Part, ...]]]:
    """Step by step to the end: what is left, and what was given up for it."""
    while (step := metric_set.reduced())[1]:
        yield step
        metric_set = step[0]


def chosen_sets(cupti: tuple[int, int]) -> Iterator[MetricSet]:
    """Every set that can come to be used with a CUPTI, reduced ones too."""
    for chip, links, ms, has_gpm in product(CHIPS, (("pcie",), ALL_LINKS), (100, 10, 1), (False, True)):
        metric_set = choose(chip, cupti, links, ms * MS, has_gpm=has_gpm)
        yield metric_set
        yield from (reduced for reduced, _ in reductions(metric_set))


@cache
def report(cupti: tuple[int, int]) -> tuple[Report, Mapping[tuple[str, ...], Answer]]:
    """What a CUPTI says of its chips, and of every set: by chip and names."""
    sets = {(metric_set.chip, *metric_set.names) for metric_set in chosen_sets(cupti)}
    sets |= {(chip, *full_set(chip, (12, 8)).names) for chip in WITH_FALLBACK}
    questions = [Question(chip, names) for chip, *names in sets]
    answered = ask(wheel_file(*LIBRARIES[cupti]), questions)
    return answered, {(q.chip, *q.names): answer for q, answer in zip(questions, answered.answers, strict=True)}


@pytest.mark.parametrize("cupti", LIBRARIES)
def test_a_library_knows_the_chips_that_it_is_said_to_know(cupti: tuple[int, int]) -> None:
    """No chip of the table is news to all, and none that PM sampling serves is missing there."""
    answered, _ = report(cupti)
    assert set(CHIPS) - set(answered.chips) == UNKNOWN_CHIPS[cupti]
    # The other way round: only Volta, whose counters PM sampling does not have.
    assert set(answered.chips) - set(CHIPS) <= {"GV100", "GV11B"}


@pytest.mark.parametrize("cupti", LIBRARIES)
def test_every_set_takes_one_pass(cupti: tuple[int, int]) -> None:
    """In full, as chosen, and reduced; on every chip that the library knows."""
    _, answers = report(cupti)
    asked = {(metric_set.chip, *metric_set.names) for metric_set in chosen_sets(cupti)}
    wrong = {}
    for chip, *names in asked:
        answer = answers[(chip, *names)]
        unknown = UNKNOWN_COUNTERS.get((cupti, chip), set()) & set(names)
        if chip not in UNKNOWN_CHIPS[cupti] and (answer.passes, set(answer.unknown)) != (not unknown, unknown):
            wrong[chip, *names] = answer
    assert not wrong


@pytest.mark.parametrize("cupti", LIBRARIES)
def test_what_replaces_counters_before_12_9_takes_one_pass(cupti: tuple[int, int]) -> None:
    """The libraries of 12.6 and 12.8 answer the same (tried), but are not here: later ones know the names too."""
    _, answers = report(cupti)
    passes = {chip: answers[(chip, *full_set(chip, (12, 8)).names)].passes for chip in WITH_FALLBACK}
    known = {chip for chip in WITH_FALLBACK if chip not in UNKNOWN_CHIPS[cupti]}
    # 12.9 alone wants two passes for both FMA pipes of a GB20x; 12.8 does not, and 12.9 does not use that set.
    two = {"GB202", "GB203", "GB205", "GB206"} if cupti == (12, 9) else set()
    assert passes == {chip: 0 if chip not in known else 2 if chip in two else 1 for chip in passes}


def test_bytes_per_window_are_the_library_s_own_estimate() -> None:
    """Of the set with everything, for a full chip; where versions differ the larger, since a buffer too small loses."""
    estimates = {
        chip: max(report(cupti)[1][(chip, *full_set(chip).names)].bytes_per_window for cupti in LIBRARIES)
        for chip in CHIPS
    }
    assert estimates == {chip: size for family in families().values() for chip, size in family.chips.items()}


def test_the_table_is_consistent() -> None:
    """What the code takes for granted of the data."""
    assert len(set(CHIPS)) == len(CHIPS)
    for family in families().values():
        for metrics in filter(None, (family.metrics, family.before_12_9)):
            names = [name for part in metrics.values() for name in part]
            assert len(set(names)) == len(names)
            for part, counters in metrics.items():
                is_amount = part in COUNT_QUANTITIES
                assert all(name.endswith(".sum") == is_amount for name in counters)
                assert not (is_amount and len(counters) > 1)
        assert (family.l2_parts == 2) == ("l2_cross_partition" in family.metrics)
    by_cycles = {name for name, family in families().items() if family.trigger == "sysclk"}
    assert by_cycles == {"TU10x", "TU11x", "GA100"}


@pytest.mark.parametrize(
    ("chip", "cupti", "links", "ms", "has_gpm", "expected"),
    [
        pytest.param("GH100", (13, 0), ("pcie",), 100, True, TWO_PARTS, id="GPM serves pipes"),
        pytest.param("GH100", (13, 0), ("pcie",), 10, True, TWO_PARTS | TENSOR, id="windows shorter than GPM's"),
        pytest.param("GH100", (13, 0), ("pcie",), 1, True, FULL_CORE - L2, id="very short windows"),
        pytest.param("GH100", (13, 0), ("pcie",), 5, True, TWO_PARTS | TENSOR, id="just not very short"),
        pytest.param("GH100", (12, 9), ("pcie", "nvlink"), 100, True, TWO_PARTS | NVLINK, id="NVLink"),
        pytest.param("GH100", (12, 9), ("pcie", "nvlink"), 1, True, FULL_CORE - L2, id="no NVLink at 1 ms"),
        pytest.param("GH100", (13, 1), ALL_LINKS, 100, True, TWO_PARTS | NVLINK | C2C, id="C2C"),
        pytest.param("GH100", (13, 0), ("pcie",), 100, False, TWO_PARTS | PIPES, id="GH100 without GPM"),
        pytest.param(
            "GA100", (13, 0), ALL_LINKS, 100, False,
            {*TWO_PARTS, *NVLINK, *PIPES, "pipe_fp64", "sm_occupancy"},
            id="A100",
        ),
        pytest.param("GA100", (13, 0), ("pcie",), 1, False, (FULL_CORE - L2) | PIPES, id="A100 at 1 ms"),
        pytest.param(
            "AD102", (13, 0), ("pcie",), 100, False,
            {*FULL_CORE, *PIPES, "l2_active", "l2_hit_rate", "sm_occupancy"},
            id="L40S",
        ),
        pytest.param(
            "TU104", (12, 9), ("pcie",), 10, False,
            {*FULL_CORE, "l2_active", "pipe_shared", "pipe_fp32", "pipe_int", "pipe_fp64", "sm_occupancy"},
            id="T4: one pipe for tensor, FP64 and FP16",
        ),
        pytest.param(
            "TU116", (12, 9), ("pcie",), 10, False,
            {*FULL_CORE, "l2_active", "pipe_fp32", "pipe_int", "pipe_fp64", "sm_occupancy"},
            id="Turing without tensor cores",
        ),
        pytest.param(
            "GB100", (12, 9), ("pcie",), 10, False,
            {*TWO_PARTS, *PIPES, "pipe_fp64", "sm_occupancy"},
            id="B200 without GPM",
        ),
        pytest.param("GB100", (12, 9), ("pcie",), 10, True, TWO_PARTS | TENSOR, id="B200"),
        pytest.param(
            "GA10B", (13, 0), ("pcie",), 100, False,
            {*PIPES, "sm_active", "l2_sectors", "l2_active", "l2_hit_rate", "sm_occupancy"},
            id="an SoC has no DRAM and PCIe of its own",
        ),
        pytest.param("GH100", (12, 8), ("pcie",), 100, True, OLD_CORE | {"l2_active"}, id="H100 with CUPTI 12.8"),
        pytest.param("GH100", (12, 6), ("pcie",), 1, True, OLD_CORE, id="H100 with CUPTI 12.6 at 1 ms"),
        pytest.param(
            "GA100", (12, 6), ("pcie",), 100, False,
            {*OLD_CORE, *PIPES, "pipe_fp64", "sm_occupancy"},
            id="A100 with CUPTI 12.6",
        ),
        pytest.param("GB202", (12, 8), ("pcie",), 10, True, OLD_CORE | TENSOR, id="GB202, 12.8"),
    ],
)  # fmt: skip
def test_what_is_chosen(
    chip: str, cupti: tuple[int, int], links: tuple[Link, ...], ms: int, *, has_gpm: bool, expected: set[Part]
) -> None:
    """By chip, version, links, length of windows, and whether GPM is there."""
    metric_set = choose(chip, cupti, links, ms * MS, has_gpm=has_gpm)
    assert set(metric_set.metrics) == expected
    assert len(metric_set.names) == sum(len(names) for names in metric_set.metrics.values())


@pytest.mark.parametrize("chip", WITH_FALLBACK)
def test_a_lost_core_counter_is_told(chip: str) -> None:
    """With an old CUPTI the set says what is missing and why; with a new one nothing is."""
    assert full_set(chip).shortfall == ""
    assert full_set(chip, (12, 8)).shortfall == (
        "CUPTI before 12.9 has no counters for l2_sectors, dram_read_bytes, dram_written_bytes"
    )


@pytest.mark.parametrize(
    ("chip", "cupti", "reason"),
    [
        ("TU104", (12, 8), "cupti<12.9"),
        ("GB112", (12, 8), "cupti<12.9"),
        ("GH100", (12, 5), "12.6 or later"),
        ("GH100", (0, 0), "12.6 or later"),
        ("GV100", (13, 0), "'GV100'"),
        ("gh100", (13, 0), "'gh100'"),
        ("", (13, 0), "''"),
        ("GH100\n", (13, 0), r"'GH100\n'"),
        ("TU10x", (13, 0), "'TU10x'"),
        ("\0\x1b[2J" + "X" * 100_000, (13, 0), r"'\x00\x1b[2JX"),
    ],
)
def test_what_cannot_be_served_says_why(chip: str, cupti: tuple[int, int], reason: str) -> None:
    """In one printable line, whatever the library calls the chip."""
    with pytest.raises(UnsupportedError) as refusal:
        choose(chip, cupti, ("pcie",), 100 * MS, has_gpm=True)
    text = str(refusal.value)
    assert reason in text
    assert text.isprintable()
    assert len(text) < 200


def test_every_part_is_either_core_or_given_up_once() -> None:
    """SM active, L2 sectors, DRAM and PCIe are the core; the rest stands in the order once."""
    given_up = [part for parts in DROP_ORDER for part in parts]
    assert sorted([*given_up, *CORE]) == sorted(get_args(Part))
    assert FULL_CORE | {"dram_active"} == CORE


@pytest.mark.parametrize("cupti", [(12, 8), (13, 1)])
@pytest.mark.parametrize("chip", CHIPS)
def test_reducing_ends_at_the_core(chip: str, cupti: tuple[int, int]) -> None:
    """Part after part in DROP_ORDER, each step with some, no core part ever; then nothing more."""
    if cupti < (12, 9) and chip not in WITH_FALLBACK:
        return
    whole = metric_set = full_set(chip, cupti)
    order: list[Part] = []
    for reduced, gone in reductions(whole):
        assert reduced.metrics.keys() == metric_set.metrics.keys() - set(gone)
        metric_set = reduced
        order += gone
    assert order == [part for parts in DROP_ORDER for part in parts if part in whole.metrics]
    assert metric_set.metrics.keys() == whole.metrics.keys() & CORE
    assert metric_set.reduced() == (metric_set, ())


def test_what_is_missed_least_is_given_up_first() -> None:
    """One chip with a hit rate, one with all links: the order that chip_sets.md found."""
    orders = [[gone for _, gone in reductions(full_set(chip))] for chip in ("GB203", "GB100")]
    assert orders == [
        [("sm_occupancy",), ("l2_hit_rate",), ("pipe_fp32",), ("pipe_tensor",), ("l2_active",)],
        [
            ("sm_occupancy",),
            ("pipe_fp64",),
            ("c2c_host_to_gpu_bytes", "c2c_gpu_to_host_bytes"),
            ("nvlink_received_bytes", "nvlink_transmitted_bytes"),
            ("pipe_int",),
            ("pipe_fp32",),
            ("pipe_tensor",),
            ("l2_cross_partition",),
            ("l2_active",),
        ],
    ]


@pytest.mark.parametrize(
    ("metric_set", "definition"),
    [
        (full_set("GH100"), "dram_sectors"),
        (full_set("GH100").without("l2_cross_partition"), ""),
        (full_set("GH100").without("dram_written_bytes"), ""),
        (full_set("GH100").without("l2_sectors"), ""),
        (full_set("GH100", (12, 8)), ""),
        (full_set("TU104"), "dram_sectors"),
        (full_set("AD102"), "hit_rate"),
        (full_set("AD102").without("l2_hit_rate"), "dram_sectors"),
        (full_set("GA10B"), "hit_rate"),
        (full_set("GA10B").without("l2_hit_rate"), ""),
    ],
    ids=lambda value: value or "none" if isinstance(value, str) else value.chip,
)
def test_how_missed_sectors_are_found(metric_set: MetricSet, definition: L2Definition) -> None:
    """And whether they are: the definition is told before the first window, so windows must keep to it."""
    assert metric_set.l2_definition == definition
    values, _ = to_quantities(metric_set, [1.0] * len(metric_set.names), 1.0)
    assert ("l2_missed_sectors" in values) == (definition != "")


GH100: Final = choose("GH100", (13, 0), ("pcie", "nvlink"), 10 * MS, has_gpm=True)
AD102: Final = full_set("AD102")
SETS: Final = [full_set(chip) for chip in CHIPS] + [full_set(chip, (12, 8)) for chip in WITH_FALLBACK] + [GH100]


def converted(metric_set: MetricSet, parts: Mapping[Part, Value], seconds: float = 0.01) -> dict[Quantity, float]:
    """Quantities of a window with these values, 0 elsewhere; nothing may be rejected."""
    values, rejected = to_quantities(metric_set, raw_values(metric_set, parts), seconds)
    assert not rejected
    return values


def raw_values(metric_set: MetricSet, parts: Mapping[Part, Value]) -> list[float]:
    """CUPTI's values: one for each counter, or a tuple where a part has several."""
    raw: list[float] = []
    for part, names in metric_set.metrics.items():
        value = parts.get(part, 0.0)
        raw += value if isinstance(value, tuple) else (value,) * len(names)
    assert len(raw) == len(metric_set.names)
    return raw


@given(st.sampled_from(SETS), st.data(), st.floats(1e-4, 1.0))
def test_whatever_cupti_answers_only_possible_values_come_out(
    metric_set: MetricSet, data: st.DataObject, seconds: float
) -> None:
    """Ratios within 0 and 1, amounts as integers; each part with an impossible counter is rejected, once."""
    likely = st.one_of(st.floats(0, 100), st.floats(0, 1e9), st.floats())
    raw = data.draw(st.lists(likely, min_size=len(metric_set.names), max_size=len(metric_set.names)))
    values, rejected = to_quantities(metric_set, tuple(raw), seconds)

    assert all(0 <= value <= 1 for quantity, value in values.items() if quantity not in COUNT_QUANTITIES)
    amounts = [value for quantity, value in values.items() if quantity in COUNT_QUANTITIES]
    assert all(isinstance(value, int) and 0 <= value <= 1e14 * seconds for value in amounts)
    assert values.get("l2_missed_sectors", 0) <= values.get("l2_sectors", 0)

    told = [rejection.part for rejection in rejected]
    assert sorted(told) == sorted(impossible_parts(metric_set, raw, seconds))
    # What is not rejected is told, and nothing else; L2 is made of several parts.
    expected = {part for part in metric_set.metrics if part not in told and not part.startswith("l2_")}
    assert {quantity for quantity in values if not quantity.startswith("l2_")} == expected


def impossible_parts(metric_set: MetricSet, raw: list[float], seconds: float) -> Iterator[Part]:
    """Parts that have a counter which cannot be true, by another way than the code's."""
    remaining = iter(raw)
    for part, names in metric_set.metrics.items():
        values = [next(remaining) for _ in names]
        if part == "dram_active":
            values.append(sum(values))
        limit = 1e14 * seconds if part in COUNT_QUANTITIES else 100.5
        if any(math.isnan(value) or value < 0 or value > limit for value in values):
            yield part


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [
        ("sm_active", math.nan, "nan"),
        ("sm_active", -0.001, "negative"),
        ("sm_active", 100.51, "above_range"),
        ("sm_active", math.inf, "above_range"),
        ("sm_active", -math.inf, "negative"),
        ("dram_read_bytes", math.nan, "nan"),
        ("dram_read_bytes", -1.0, "negative"),
        ("dram_read_bytes", 1.01e12, "above_range"),
        ("dram_read_bytes", float(2**64 - 1), "sentinel"),
        ("l2_hit_rate", 101.0, "above_range"),
        ("pipe_fp32", (math.nan, 20.0), "nan"),
        ("pipe_fp32", (20.0, math.nan), "nan"),
        ("pipe_fp32", (20.0, -20.0), "negative"),
        ("pipe_fp32", (20.0, 101.0), "above_range"),
    ],
)
def test_an_impossible_value_is_rejected(part: Part, value: Value, problem: Problem) -> None:
    """With its reason, and alone: the window's other values stand."""
    values, rejected = to_quantities(AD102, raw_values(AD102, {part: value, "pipe_int": 50.0}), 0.01)
    assert rejected == [Rejection(part, problem)]
    assert part not in values
    assert values["pipe_int"] == 0.5


@pytest.mark.parametrize(("percent", "ratio"), [(0.0, 0.0), (37.5, 0.375), (100.0, 1.0), (100.4, 1.0)])
def test_percentages_become_ratios(percent: float, ratio: float) -> None:
    """What is above 100 by rounding counts as 1."""
    assert converted(AD102, {"sm_active": percent})["sm_active"] == ratio
    assert converted(AD102, {"pipe_fp32": (percent, 0.0)})["pipe_fp32"] == ratio


def test_several_counters_of_one_part() -> None:
    """The busier of two FMA pipes counts; shares of reads and writes in the DRAM's time add up to no more than it."""
    assert converted(AD102, {"pipe_fp32": (30.0, 40.0)})["pipe_fp32"] == 0.4
    old = full_set("GH100", (12, 8))
    assert converted(old, {"dram_active": (40.0, 30.0)})["dram_active"] == 0.7
    assert converted(old, {"dram_active": (60.0, 40.2)})["dram_active"] == 1.0
    _, rejected = to_quantities(old, raw_values(old, {"dram_active": (60.0, 41.0)}), 0.01)
    assert rejected == [Rejection("dram_active", "above_range")]


def test_amounts_are_integers() -> None:
    """CUPTI's doubles are rounded, not cut."""
    values = converted(AD102, {"dram_read_bytes": 1234.6, "l2_sectors": 0.4})
    assert (values["dram_read_bytes"], values["l2_sectors"]) == (1235, 0)
    assert isinstance(values["dram_read_bytes"], int)


@pytest.mark.parametrize(
    ("sectors", "crossing", "dram_bytes", "share"),
    [
        pytest.param(2.028e9, 34.7, 42.38e9, 1.00, id="2 GiB copy"),
        pytest.param(0.917e9, 22.8, 6.8e6, 0.0003, id="copy that stays in L2"),
        pytest.param(1.64e9, 14.5, 8.2e9, 0.19, id="8192 GEMM"),
        pytest.param(17.3e6, 0.0, 0.553e9, 1.00, id="copy from the host"),
    ],
)
def test_shares_that_missed_l2_as_measured_on_an_h200(
    sectors: float, crossing: float, dram_bytes: float, share: float
) -> None:
    """Windows of 10 ms, worked out by hand: DRAM sectors over L2 sectors without those counted twice."""
    values = converted(
        GH100,
        {"l2_sectors": sectors, "l2_cross_partition": crossing, "dram_read_bytes": dram_bytes / 2,
         "dram_written_bytes": dram_bytes / 2},
    )  # fmt: skip
    assert values["l2_sectors"] == pytest.approx(sectors * (1 - crossing / 100))
    assert values["l2_missed_sectors"] / values["l2_sectors"] == pytest.approx(share, rel=0.05)


def test_more_dram_than_l2_sectors_is_all_missed() -> None:
    """DRAM moves more than was asked of L2 when it writes back what was dirty before."""
    values = converted(GH100, {"l2_sectors": 1000.0, "dram_written_bytes": 64_000.0})
    assert values["l2_missed_sectors"] == values["l2_sectors"] == 1000


def test_a_hit_rate_tells_missed_sectors() -> None:
    """DRAM has no part in it; and without the rate there is no answer, since the definition was told."""
    values = converted(AD102, {"l2_sectors": 1000.0, "l2_hit_rate": 25.0, "dram_read_bytes": 32.0})
    assert (values["l2_sectors"], values["l2_missed_sectors"]) == (1000, 750)
    values, _ = to_quantities(AD102, raw_values(AD102, {"l2_sectors": 1000.0, "l2_hit_rate": math.nan}), 0.01)
    assert values["l2_sectors"] == 1000
    assert "l2_missed_sectors" not in values


@pytest.mark.parametrize("metric_set", [GH100.without("l2_cross_partition"), GH100], ids=["absent", "rejected"])
def test_sectors_counted_twice_are_not_served(metric_set: MetricSet) -> None:
    """On an L2 of two parts nothing is said of sectors where the share that crossed is not known."""
    values, _ = to_quantities(metric_set, raw_values(metric_set, {"l2_cross_partition": math.nan}), 0.01)
    assert not {"l2_sectors", "l2_missed_sectors"} & values.keys()
    assert "l2_active" in values
