"""What happens on a node of eight GPUs in a week, and how fast the soak lets it happen.

Nobody can speed up the exporter's clocks: its windows, beats and look-ups stay those of life. What is compressed is
what comes and goes around it, since that is what leaks are made of. Each second of a run has the events of 8.4 minutes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from random import Random
from typing import Final

WEEK_S: Final = 1200.0
"""Seconds of a run that have the events of a week: 504 times as fast as life."""

EVENTS: Final[Mapping[str, int]] = {
    "job": 336,  # one every four hours on each GPU
    "short process": 13_440,  # ten an hour on each GPU, as of notebooks, tests and start-up checks
    "pod": 1_400,  # 200 a day
    "xid": 70,  # ten a day
    "failed reading": 560,  # ten a day on each GPU
    "hung call": 7,  # one a day
    "lost GPU": 7,  # one a day
    "MIG change": 28,  # four a day
    "profiler": 28,  # four a day, for which the exporter is paused
    "release": 14,
    "reload": 70,  # ten a day, every second one with a mistake
    "helper killed": 7,  # one a day
    "kubelet trouble": 14,  # two a day: it hangs, refuses or restarts
    "hostile agent file": 140,  # twenty a day
}
"""How often each happens in a week; the run tells how often it did."""

_FIRST_BY: Final = 0.4
"""Share of a run by which even the rarest has happened once."""


class Calendar:
    """When each event is due in a run, by chance of a seed. Rare ones happen once also in a short run."""

    def __init__(self, seconds: float, chance: Random) -> None:
        self._seconds = seconds
        self._chance = chance
        self._due = [(self._first(kind), kind) for kind in EVENTS]
        heapq.heapify(self._due)

    def due(self, now_s: float) -> Iterator[str]:
        """The events that have become due, `now_s` after the begin."""
        while self._due[0][0] <= min(now_s, self._seconds):
            at_s, kind = self._due[0]
            # As arrivals that know nothing of each other: at times several come at once.
            heapq.heapreplace(self._due, (at_s + self._chance.expovariate(EVENTS[kind] / WEEK_S), kind))
            yield kind

    def end(self) -> None:
        """Nothing becomes due any more."""
        self._seconds = 0.0

    def _first(self, kind: str) -> float:
        return self._chance.random() * min(WEEK_S / EVENTS[kind], _FIRST_BY * self._seconds)
