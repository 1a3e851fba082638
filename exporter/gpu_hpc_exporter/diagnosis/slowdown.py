"""How much a GPU slows down while kernel agents trace it, from windows that know nothing of agents.

An agent can add up what its own calls cost the host, but not what the device loses meanwhile. So each time of tracing
is held against the untraced time just before and after it, in the rates at which the GPU got on: the busiest pipe's
activity and DRAM traffic. Both are proportional to the work done, whatever the work is; SM activity is not, since a
slowed kernel keeps its SMs. Of the two the one whose figure is more certain speaks: a unit that the work hardly uses
is mostly noise. (Pipes count per cycle, so a clock that changes with tracing would hide there, not in DRAM traffic.)

Untraced time on both sides makes a steady drift cancel out. The figure is a ratio of means, not a mean or median of
ratios: nothing is left out for how it turned out, so noise, bursts and idle phases, which meet traced time as often as
untraced, move it neither way; they only widen its interval, and a wide one is not told.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, get_args

from gpu_hpc_exporter.diagnosis.intensity import busiest_pipe
from gpu_hpc_exporter.model import NS, Quantity, Tracing, WindowSource

MIN_COMPARISONS: Final = 10
MAX_COMPARISONS: Final = 60
MAX_HALF_WIDTH: Final = 0.03
"""Half the 95 % interval of a figure that is told. A steady loop (2 % noise in a second) gets there with 10 times of
tracing; one that varies by 9 % from one second to the next needs all 60."""
MAX_AGE_NS: Final = 1800 * NS
"""Older comparisons are of another time, perhaps of another job."""
STALE_NS: Final = 300 * NS
"""So long after the newest comparison the figure is gone: five times the longest pause between two traces."""
MIN_SIGNAL: Final = 0.001
"""A unit less active than that on average tells of the counters, not of the work."""
LONGEST_NS: Final = 10 * NS
"""Tracing that goes on for longer has no neighbourhood to be compared with."""
PATIENCE_NS: Final = 3 * NS
"""Windows of a time are all there so long after it."""
_KEPT_NS: Final = 60 * NS
_MARGIN_NS: Final = 30_000_000
"""What agents' and windows' times may be apart, but at least half a window: PM sampling's clock is no better."""
_PIECE_NS: Final = 50_000_000
"""Windows that are shorter are put together, to be fewer."""
_MIN_COVERAGE: Final = 0.5

Span = tuple[int, int]
"""Begin and end, in ns of the samplers' clock."""


class Pair(NamedTuple):
    """Mean activity of one unit, 0-1, while an agent traced and around that time."""

    traced: float
    untraced: float


class Estimate(NamedTuple):
    """1 - traced / untraced, and half its 95 % interval."""

    slowdown: float
    half_width: float


def estimate(pairs: Sequence[Pair]) -> Estimate | None:
    """The slowdown of all pairs together; None for too few of them, or where the unit did next to nothing.

    The usual ratio estimator: r = sum(traced) / sum(untraced), with the variance of the residuals traced - r * untraced
    (W. G. Cochran, Sampling Techniques, 3rd ed., section 2.11) and Student's t for n - 1 degrees of freedom.
    """
    count = len(pairs)
    if count < MIN_COMPARISONS:
        return None
    untraced = math.fsum(pair.untraced for pair in pairs) / count
    if untraced < MIN_SIGNAL:
        return None
    ratio = math.fsum(pair.traced for pair in pairs) / count / untraced
    squares = math.fsum((pair.traced - ratio * pair.untraced) ** 2 for pair in pairs)
    error = math.sqrt(squares / (count - 1) / count) / untraced
    return Estimate(1 - ratio, _student(count - 1) * error)


def _student(freedom: int) -> float:
    """97.5 % quantile of Student's t, to 0.005 from 9 degrees of freedom on (Abramowitz and Stegun, 26.7.5)."""
    return 1.96 + 2.372 / freedom + 2.823 / freedom**2


@dataclass(slots=True)
class _Piece:
    """One window, or short ones without a gap between them: activity times time, and the time it was measured in."""

    begin_ns: int
    end_ns: int
    pipe: float = 0.0
    pipe_ns: int = 0
    dram: float = 0.0
    dram_ns: int = 0


class _Comparison(NamedTuple):
    """What one time of tracing showed; None for a unit that was not measured in enough of it."""

    end_ns: int
    pipe: Pair | None
    dram: Pair | None


class AgentSlowdown:
    """Compares one GPU's traced with its untraced time. A window costs 2 us, or 0.3 us where no agent traces.

    What agents did is known from some time on; a report without it (`None`) begins that time anew.
    """

    def __init__(self) -> None:
        self._pieces: dict[WindowSource, deque[_Piece]] = {source: deque() for source in get_args(WindowSource)}
        self._wanted_until_ns: int | None = None
        self._known_from_ns: int | None = None
        self._compared_ns = 0
        """Up to here all tracing has been compared, or has turned out not to be comparable."""
        self._traced: list[Span] = []
        """In the order of time, none touching another."""
        self._comparisons: deque[_Comparison] = deque(maxlen=MAX_COMPARISONS)
        self._estimate: Estimate | None = None

    def add_window(self, source: WindowSource, begin_ns: int, end_ns: int, values: Mapping[Quantity, float]) -> None:
        """Keep for a while what a window measured; each source's come in the order of time."""
        if self._wanted_until_ns is None or end_ns > self._wanted_until_ns:
            return
        pieces = self._pieces[source]
        if pieces:
            begin_ns = max(begin_ns, pieces[-1].end_ns)  # no time twice where the GPU's clock was put back
        length_ns = end_ns - begin_ns
        if length_ns <= 0:
            return
        if not pieces or begin_ns != pieces[-1].end_ns or begin_ns - pieces[-1].begin_ns >= _PIECE_NS:
            pieces.append(_Piece(begin_ns, end_ns))
            while pieces[0].end_ns < end_ns - _KEPT_NS:
                pieces.popleft()
        piece = pieces[-1]
        piece.end_ns = end_ns
        pipe, dram = busiest_pipe(values), values.get("dram_active")
        if pipe is not None:
            piece.pipe += pipe * length_ns
            piece.pipe_ns += length_ns
        if dram is not None:
            piece.dram += dram * length_ns
            piece.dram_ns += length_ns

    def add_tracing(self, time_ns: int, tracing: Tracing | None) -> None:
        """All tracing of this GPU that has ended since the report before this one, of `time_ns`; None: not known."""
        if tracing is None or self._known_from_ns is None:
            self._known_from_ns = self._compared_ns = time_ns
            self._traced = []
        if tracing is None:
            return
        if tracing.ended or tracing.open_ns:
            self._wanted_until_ns = time_ns + STALE_NS
        spans = [(time_ns - begin_ago_ns, time_ns - end_ago_ns) for begin_ago_ns, end_ago_ns in tracing.ended]
        self._traced = _union([*self._traced, *spans])
        # While one goes on, it may yet turn out to be one with what ended before it.
        self._compare(min(time_ns - tracing.open_ns, time_ns - PATIENCE_NS))
        self._traced = [span for span in self._traced if span[1] > time_ns - _KEPT_NS]

    def slowdown(self, now_ns: int) -> float | None:
        """Share of the GPU's progress that is lost while an agent traces, by chance below 0; None where unsure."""
        if self._estimate is None or now_ns - self._comparisons[-1].end_ns > STALE_NS:
            return None
        return self._estimate.slowdown if self._estimate.half_width <= MAX_HALF_WIDTH else None

    def _compare(self, known_ns: int) -> None:
        """Compare what was traced and lies, with the time after it, before `known_ns`."""
        for place, (begin_ns, end_ns) in enumerate(self._traced):
            if begin_ns < self._compared_ns:
                continue
            if 2 * end_ns - begin_ns > known_ns:
                break
            self._compared_ns = end_ns
            after_ns = self._traced[place + 1][0] if place + 1 < len(self._traced) else known_ns
            before_ns = max(self._known_from_ns or 0, self._traced[place - 1][1] if place else 0)
            length_ns = min(end_ns - begin_ns, begin_ns - before_ns, after_ns - end_ns)
            if end_ns - begin_ns <= LONGEST_NS and length_ns >= _MIN_COVERAGE * (end_ns - begin_ns):
                around = (begin_ns - length_ns, begin_ns), (begin_ns, end_ns), (end_ns, end_ns + length_ns)
                self._add_comparison(end_ns, around)

    def _add_comparison(self, end_ns: int, around: tuple[Span, Span, Span]) -> None:
        pipe = dram = None
        for pieces in self._pieces.values():
            before, traced, after = (_means(pieces, span) for span in around)
            pipe = pipe or _pair(before.pipe, traced.pipe, after.pipe)
            dram = dram or _pair(before.dram, traced.dram, after.dram)
        if pipe is None and dram is None:
            return
        comparisons = self._comparisons
        comparisons.append(_Comparison(end_ns, pipe, dram))
        while comparisons[0].end_ns < end_ns - MAX_AGE_NS:
            comparisons.popleft()
        units = [c.pipe for c in comparisons], [c.dram for c in comparisons]
        estimates = [estimate([pair for pair in pairs if pair is not None]) for pairs in units]
        known = [one for one in estimates if one is not None]
        self._estimate = min(known, key=lambda one: one.half_width, default=None)


class _Means(NamedTuple):
    """Mean activity in a span, None where too little of it was measured."""

    pipe: float | None
    dram: float | None


def _means(pieces: Sequence[_Piece], span: Span) -> _Means:
    """Of the pieces that lie wholly in the span, clear of its edges."""
    begin_ns, end_ns = span
    pipe, pipe_ns, dram, dram_ns = 0.0, 0, 0.0, 0
    for place in range(bisect_left(pieces, begin_ns, key=lambda piece: piece.begin_ns), len(pieces)):
        piece = pieces[place]
        if piece.end_ns > end_ns:
            break
        margin_ns = max(_MARGIN_NS, (piece.end_ns - piece.begin_ns) // 2)
        if piece.begin_ns - begin_ns >= margin_ns and end_ns - piece.end_ns >= margin_ns:
            pipe, pipe_ns = pipe + piece.pipe, pipe_ns + piece.pipe_ns
            dram, dram_ns = dram + piece.dram, dram_ns + piece.dram_ns
    needed_ns = _MIN_COVERAGE * (end_ns - begin_ns)
    return _Means(
        pipe / pipe_ns if pipe_ns and pipe_ns >= needed_ns else None,
        dram / dram_ns if dram_ns and dram_ns >= needed_ns else None,
    )


def _pair(before: float | None, traced: float | None, after: float | None) -> Pair | None:
    return None if before is None or traced is None or after is None else Pair(traced, (before + after) / 2)


def _union(spans: Iterable[Span]) -> list[Span]:
    """The time that any of the spans covers."""
    found: list[Span] = []
    for begin_ns, end_ns in sorted(spans):
        if found and begin_ns <= found[-1][1]:
            found[-1] = (found[-1][0], max(end_ns, found[-1][1]))
        else:
            found.append((begin_ns, end_ns))
    return found
