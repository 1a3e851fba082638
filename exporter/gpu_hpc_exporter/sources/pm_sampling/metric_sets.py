"""Which hardware counters PM sampling reads on which chip, and what their values mean.

`metric_sets.json` has one set per family of chips. Each was scheduled in one pass by the host library on a machine
without a GPU; only GH100's has been run. So a set proves itself at run time, and what does not deliver is left
out in `DROP_ORDER`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""Below this length a window can pay for the core counters only. Measured on an H200, decoding and evaluating one
window: 56 us for the core, 73 with the L2 partitions' share, 139 with everything."""
GPM_FLOOR_NS: Final = 100_000_000

_FILE: Final = Path(__file__).with_name("metric_sets.json")
_MAIN_PIPES: Final = ("pipe_tensor", "pipe_shared")
_OTHER_PIPES: Final = ("pipe_fp32", "pipe_int")
_ONLY_WITHOUT_GPM: Final = (*_OTHER_PIPES, "pipe_fp64", "sm_occupancy")
CORE: Final = frozenset(get_args(Part)) - {part for parts in DROP_ORDER for part in parts}
_RATE_LIMIT: Final = 1e14
"""Per second, above which an amount is impossible (L2 of a GB100 moves less than 3e13 bytes/s)."""
_PERCENT_LIMIT: Final = 100 * ROUNDING


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Chips with one set.

    `chips`: by chip, the bytes of a window's records with all counters; the most that CUPTI 12.9 or 13.1 estimates.
    `before_12_9`: what replaces L2, DRAM and other counters that older CUPTIs do not know.
    """

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
class _Plan:
    """Where the parts lie among the values of a window, by how they are read: worked out once, used for each window."""

    amounts: tuple[tuple[Part, int], ...]
    shares: tuple[tuple[Part, int], ...]
    combined: tuple[tuple[Part, slice, Callable[[Iterable[float]], float]], ...]
    """Shares that several counters tell together."""


@dataclass(frozen=True, slots=True)
class MetricSet:
    """The counters to read on one GPU: names by what they are for."""

    chip: str
    metrics: Mapping[Part, Sequence[str]]
    trigger: Literal["time", "sysclk"]
    l2_parts: int
    bytes_per_window: int
    shortfall: str = ""
    """Why core counters are missing that a newer CUPTI has; "" where none are."""
    l2_definition: L2Definition = field(init=False)
    """How missed L2 sectors are found; "" where they cannot be."""
    plan: _Plan = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "l2_definition", _l2_definition(self))
        object.__setattr__(self, "plan", _plan(self.metrics))

    @property
    def names(self) -> list[str]:
        """All counters, in the order of `values`."""
        return [name for names in self.metrics.values() for name in names]

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


def _l2_definition(metric_set: MetricSet) -> L2Definition:
    parts = metric_set.metrics.keys()
    # Sectors that crossed between the two parts of an L2 are counted twice: they must be known to be taken out.
    counts_requests = metric_set.l2_parts == 1 or "l2_cross_partition" in parts
    if "l2_sectors" not in parts or not counts_requests:
        return ""
    if "l2_hit_rate" in parts:
        return "hit_rate"
    return "dram_sectors" if {"dram_read_bytes", "dram_written_bytes"} <= parts else ""


def _plan(metrics: Mapping[Part, Sequence[str]]) -> _Plan:
    amounts: list[tuple[Part, int]] = []
    shares: list[tuple[Part, int]] = []
    combined = []
    position = 0
    for part, names in metrics.items():
        if len(names) > 1:
            # Reads and writes share the DRAM between them; of pipes that work side by side the busiest counts.
            combine = sum if part == "dram_active" else max
            combined.append((part, slice(position, position + len(names)), combine))
        else:
            (amounts if names[0].endswith(".sum") else shares).append((part, position))
        position += len(names)
    return _Plan(tuple(amounts), tuple(shares), tuple(combined))


class UnsupportedError(Exception):
    """PM sampling cannot serve this GPU; the text says why."""


def choose(chip: str, cupti: tuple[int, int], links: Sequence[Link], interval_ns: int, *, has_gpm: bool) -> MetricSet:
    """The set for a GPU with `links`, windows of `interval_ns` and a CUPTI of CUDA `cupti`. Raises UnsupportedError.

    What GPM serves as well is left to it, except the main pipe in windows that are shorter than GPM's: every counter
    makes decoding dearer.
    """
    family = next((family for family in families().values() if chip in family.chips), None)
    if family is None:
        raise UnsupportedError(f"no set of counters for the chip {chip[:32]!r}")
    if cupti < OLDEST:
        raise UnsupportedError("PM sampling needs CUPTI 12.6 or later")
    metrics = family.metrics if cupti >= FULL_SETS_FROM else _before_12_9(family)
    absent: set[str] = set()
    if "nvlink" not in links:  # counters of a link that is down: no window would ever complete
        absent |= {"nvlink_received_bytes", "nvlink_transmitted_bytes"}
    if "c2c" not in links:
        absent |= {"c2c_host_to_gpu_bytes", "c2c_gpu_to_host_bytes"}
    if has_gpm:
        absent |= {*_ONLY_WITHOUT_GPM}
        if interval_ns >= GPM_FLOOR_NS:
            absent |= {*_MAIN_PIPES}
    if interval_ns < SHORT_NS:
        absent |= metrics.keys() - CORE - (set() if has_gpm else {*_MAIN_PIPES, *_OTHER_PIPES})
        if family.l2_parts > 1:  # without the share that crossed between its parts the sectors say nothing
            absent.add("l2_sectors")
    kept = {part: names for part, names in metrics.items() if part not in absent}
    lost = [part for part in family.metrics if part in CORE and part not in metrics]
    shortfall = f"CUPTI before 12.9 has no counters for {', '.join(lost)}" if lost else ""
    return MetricSet(chip, kept, family.trigger, family.l2_parts, family.chips[chip], shortfall)


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

    Percentages become ratios and amounts integers. A part is left out when any of its counters is impossible.
    """
    plan = metric_set.plan
    limit = _RATE_LIMIT * seconds
    parts: dict[Part, float] = {}
    rejected: list[Rejection] = []
    for part, position in plan.amounts:
        value = raw[position]
        if 0.0 <= value <= limit:
            parts[part] = round(value)
        else:
            rejected.append(Rejection(part, problem_of(value, limit)))
    for part, position in plan.shares:
        value = raw[position]
        if 0.0 <= value <= _PERCENT_LIMIT:
            parts[part] = value / 100 if value < 100.0 else 1.0
        else:
            rejected.append(Rejection(part, problem_of(value, _PERCENT_LIMIT)))
    for part, positions, combine in plan.combined:
        values = raw[positions]
        value = combine(values)
        wrong = [each for each in (*values, value) if not 0.0 <= each <= _PERCENT_LIMIT]
        if wrong:
            rejected.append(Rejection(part, problem_of(wrong[0], _PERCENT_LIMIT)))
        else:
            parts[part] = min(1.0, value / 100)
    return _quantities(metric_set, parts), rejected


def _quantities(metric_set: MetricSet, parts: dict[Part, float]) -> dict[Quantity, float]:
    sectors = parts.pop("l2_sectors", None)
    crossing = parts.pop("l2_cross_partition", None)
    hit_rate = parts.pop("l2_hit_rate", None)
    values = cast("dict[Quantity, float]", parts)  # the parts that are left are quantities
    if sectors is None or (metric_set.l2_parts == 2 and crossing is None):
        return values
    requested = sectors if crossing is None else round(sectors * (1.0 - crossing))
    values["l2_sectors"] = requested
    if metric_set.l2_definition == "hit_rate":
        if hit_rate is not None:
            values["l2_missed_sectors"] = round(requested * (1.0 - hit_rate))
    elif "dram_read_bytes" in values and "dram_written_bytes" in values:
        moved = round((values["dram_read_bytes"] + values["dram_written_bytes"]) / L2_SECTOR_BYTES)
        values["l2_missed_sectors"] = min(moved, requested)
    return values
