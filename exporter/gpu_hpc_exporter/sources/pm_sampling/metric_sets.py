"""Which hardware counters PM sampling reads on which chip, and what their values mean.

`metric_sets.json` has one set per family of chips. Each was scheduled in one pass by the host library on a machine
without a GPU; only GH100's has been run. So a set proves itself at run time, and what does not deliver is left
out in `DROP_ORDER`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, Literal, cast, get_args

import msgspec

from gpu_hpc_exporter.model import L2_SECTOR_BYTES, L2Definition, Link, Quantity
from gpu_hpc_exporter.sources.values import ROUNDING, Problem, problem_of

Part = Literal[
    "sm_active",
    "l2_sectors",
    "l2_active",
    "l2_cross_partition",
    "l2_hit_rate",
    "dram_read_bytes",
    "dram_written_bytes",
    "dram_active",
    "pcie_host_to_gpu_bytes",
    "pcie_gpu_to_host_bytes",
    "nvlink_received_bytes",
    "nvlink_transmitted_bytes",
    "c2c_host_to_gpu_bytes",
    "c2c_gpu_to_host_bytes",
    "pipe_tensor",
    "pipe_shared",
    "pipe_fp32",
    "pipe_int",
    "pipe_fp64",
    "sm_occupancy",
]
"""What a counter is read for. l2_sectors counts a sector of the other L2 partition twice; l2_cross_partition is the
share of them that did."""

DROP_ORDER: Final[tuple[tuple[Part, ...], ...]] = (
    ("sm_occupancy",),
    ("pipe_fp64",),
    ("c2c_host_to_gpu_bytes", "c2c_gpu_to_host_bytes"),
    ("nvlink_received_bytes", "nvlink_transmitted_bytes"),
    ("l2_hit_rate",),
    ("pipe_int",),
    ("pipe_fp32",),
    ("pipe_tensor", "pipe_shared"),
    ("l2_cross_partition",),
    ("l2_active",),
)
"""What to give up first where a set does not deliver. SM active, L2 sectors, DRAM and PCIe are never given up."""

FULL_SETS_FROM: Final = (12, 9)
"""CUPTI before 12.9 has neither `lts__t_sectors` nor `dram__bytes` for PM sampling."""
OLDEST: Final = (12, 6)
SHORT_NS: Final = 5_000_000
"""Below this length a window can pay for the core counters only: decoding costs 26 us for them, 47 for all."""
GPM_FLOOR_NS: Final = 100_000_000

_FILE: Final = Path(__file__).with_name("metric_sets.json")
_PIPES: Final = ("pipe_tensor", "pipe_shared", "pipe_fp32", "pipe_int")
_ONLY_WITHOUT_GPM: Final = ("pipe_fp64", "sm_occupancy")
CORE: Final = frozenset(get_args(Part)) - {part for parts in DROP_ORDER for part in parts}
_RATE_LIMIT: Final = 1e14
"""Per second, above which an amount is impossible (L2 of a GB100 moves less than 3e13 bytes/s)."""
_PERCENT_LIMIT: Final = 100 * ROUNDING


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chips with one set. `chips`: bytes of a window's records by chip. `before_12_9`: what replaces L2 and DRAM."""

    chips: dict[str, int]
    trigger: Literal["time", "sysclk"]
    l2_parts: Literal[1, 2]
    metrics: dict[Part, list[str]]
    before_12_9: dict[Part, list[str]] | None


@cache
def families() -> Mapping[str, Family]:
    """The table, by name of the family."""
    return msgspec.json.decode(_FILE.read_bytes(), type=dict[str, Family])


@dataclass(frozen=True, slots=True)
class MetricSet:
    """The counters to read on one GPU: names by what they are for."""

    chip: str
    metrics: Mapping[Part, Sequence[str]]
    trigger: Literal["time", "sysclk"]
    l2_parts: int
    bytes_per_window: int

    @property
    def names(self) -> list[str]:
        """All counters, in the order of `values`."""
        return [name for names in self.metrics.values() for name in names]

    @property
    def l2_definition(self) -> L2Definition:
        """How missed L2 sectors are found; "" where they cannot be."""
        if "l2_sectors" not in self.metrics:
            return ""
        if "l2_hit_rate" in self.metrics:
            return "hit_rate"
        has_dram = {"dram_read_bytes", "dram_written_bytes"} <= self.metrics.keys()
        return "dram_sectors" if has_dram and self._counts_requests else ""

    @property
    def _counts_requests(self) -> bool:
        """Whether sectors that crossed between the parts of the L2 can be taken out."""
        return self.l2_parts == 1 or "l2_cross_partition" in self.metrics

    def reduced(self) -> tuple[MetricSet, tuple[Part, ...]]:
        """Without the next ones to give up, and which those are; the same and () where only the core is left."""
        for parts in DROP_ORDER:
            gone = tuple(part for part in parts if part in self.metrics)
            if gone:
                return self.without(*gone), gone
        return self, ()

    def without(self, *parts: Part) -> MetricSet:
        """Without these parts."""
        return replace(self, metrics={part: names for part, names in self.metrics.items() if part not in parts})


class UnsupportedError(Exception):
    """PM sampling cannot serve this GPU; the text says why."""


def choose(chip: str, cupti: tuple[int, int], links: Sequence[Link], interval_ns: int, *, has_gpm: bool) -> MetricSet:
    """The set for a GPU with `links`, windows of `interval_ns` and a CUPTI of CUDA `cupti`. Raises UnsupportedError.

    What GPM serves as well is left to it, except pipes in windows that are shorter than GPM's.
    """
    family = next((family for family in families().values() if chip in family.chips), None)
    if family is None:
        raise UnsupportedError(f"no set of counters for the chip {chip[:32]!r}")
    if cupti < OLDEST:
        raise UnsupportedError("PM sampling needs CUPTI 12.6 or later")
    metrics = dict(family.metrics)
    if cupti < FULL_SETS_FROM:
        metrics = _before_12_9(family)
    absent: set[str] = set()
    if "nvlink" not in links:  # counters of a link that is down: no window would ever complete
        absent |= {"nvlink_received_bytes", "nvlink_transmitted_bytes"}
    if "c2c" not in links:
        absent |= {"c2c_host_to_gpu_bytes", "c2c_gpu_to_host_bytes"}
    if has_gpm:
        absent |= {*_ONLY_WITHOUT_GPM}
        if interval_ns >= GPM_FLOOR_NS:
            absent |= {*_PIPES}
    if interval_ns < SHORT_NS:
        absent |= metrics.keys() - CORE
    kept = {part: names for part, names in metrics.items() if part not in absent}
    return MetricSet(chip, kept, family.trigger, family.l2_parts, family.chips[chip])


def _before_12_9(family: Family) -> dict[Part, list[str]]:
    if family.before_12_9 is None:
        raise UnsupportedError("cupti<12.9: this chip's L2 and DRAM counters need CUPTI 12.9")
    replaced = ("l2", "dram")
    kept = {part: names for part, names in family.metrics.items() if not part.startswith(replaced)}
    return {**kept, **family.before_12_9}


@dataclass(frozen=True, slots=True)
class Rejection:
    """A counter answered what cannot be true."""

    part: Part
    problem: Problem


def to_quantities(
    metric_set: MetricSet, raw: Sequence[float], seconds: float
) -> tuple[dict[Quantity, float], list[Rejection]]:
    """Values of one window of `seconds` in base units, from CUPTI's in the order of `names`; and what is impossible.

    Percentages become ratios and amounts integers; of several counters for one part the busiest counts, but the
    shares of reads and writes that old CUPTIs give for DRAM add up.
    """
    parts: dict[Part, float] = {}
    rejected: list[Rejection] = []
    position = 0
    for part, names in metric_set.metrics.items():
        values = raw[position : position + len(names)]
        position += len(names)
        value = values[0] if len(values) == 1 else sum(values) if part == "dram_active" else max(values)
        limit = _RATE_LIMIT * seconds if names[0].endswith(".sum") else _PERCENT_LIMIT
        if not 0.0 <= value <= limit or value != value:  # noqa: PLR0124  NaN is the one that differs from itself
            rejected.append(Rejection(part, problem_of(value, limit)))
        else:
            parts[part] = round(value) if names[0].endswith(".sum") else min(1.0, value / 100)
    return _quantities(metric_set, parts), rejected


def _quantities(metric_set: MetricSet, parts: dict[Part, float]) -> dict[Quantity, float]:
    crossing = parts.pop("l2_cross_partition", None)
    hit_rate = parts.pop("l2_hit_rate", None)
    counted = parts.pop("l2_sectors", None)
    values = cast("dict[Quantity, float]", parts)  # the parts that are left are quantities
    if counted is None or (metric_set.l2_parts == 2 and crossing is None):
        return values
    requested = round(counted * (1.0 - (crossing or 0.0)))
    values["l2_sectors"] = requested
    if hit_rate is not None:
        values["l2_missed_sectors"] = round(requested * (1.0 - hit_rate))
    elif "dram_read_bytes" in values and "dram_written_bytes" in values:
        moved = (values["dram_read_bytes"] + values["dram_written_bytes"]) / L2_SECTOR_BYTES
        values["l2_missed_sectors"] = min(requested, round(moved))
    return values
