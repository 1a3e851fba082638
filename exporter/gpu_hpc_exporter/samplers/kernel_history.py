"""What the kernels of a file did in the last minute and in the last hour, to be compared."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from gpu_hpc_exporter.diagnosis.kernels import Runs, slowdown
from gpu_hpc_exporter.model import NS

MINUTE_NS: Final = 60 * NS
HOUR_NS: Final = 3600 * NS
APART_NS: Final = 1800 * NS
"""Marks older than a minute are so far apart: each costs 16 bytes a slot."""
MIN_HISTORY_NS: Final = 600 * NS
"""Before so much is known nothing is told. The minute is part of what it is compared with, and weighs a tenth then."""


class Mark(NamedTuple):
    """What a file's slots had executed at a time, and the nanoseconds that it took, from the process's begin on."""

    time_ns: int
    executions: array[int]
    ns: array[int]

    def runs(self, slot: int) -> Runs:
        """Of a slot; none of one that came later."""
        return Runs(self.executions[slot], self.ns[slot]) if slot < len(self.ns) else Runs(0, 0)


class History:
    """Marks of one file, half a minute apart: of the last hour to hour and a half, and few of them."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    @property
    def times_ns(self) -> Sequence[int]:
        """When the marks were made."""
        return [mark.time_ns for mark in self._marks]

    def slowest(self, now: Mark, slots: Iterable[int]) -> float:
        """The largest `slowdown` of these slots, each compared with itself; 0 where not enough is known.

        The minute is what came after the youngest mark that is a minute old or older; the hour, what came after the
        oldest one: an hour to an hour and a half, or less where less is known.
        """
        recent = [mark for mark in self._marks if now.time_ns - mark.time_ns >= MINUTE_NS]
        if not recent or now.time_ns - recent[0].time_ns < MIN_HISTORY_NS:
            return 0.0
        old, late = recent[0], recent[-1]
        return max((_slowdown(now.runs(slot), late.runs(slot), old.runs(slot)) for slot in slots), default=0.0)

    def add(self, now: Mark) -> None:
        """Keep it, and of what is older than a minute only what is needed."""
        marks = [*self._marks, now]
        while len(marks) > 1 and now.time_ns - marks[1].time_ns >= HOUR_NS:
            del marks[0]
        kept = marks[:1]
        for mark, after in pairwise(marks[1:]):
            is_late = now.time_ns - after.time_ns < MINUTE_NS
            if is_late or mark.time_ns - kept[-1].time_ns >= APART_NS:
                kept.append(mark)
        self._marks = kept + marks[1:][-1:]


def _slowdown(now: Runs, late: Runs, old: Runs) -> float:
    return slowdown(now.since(late), now.since(old))
