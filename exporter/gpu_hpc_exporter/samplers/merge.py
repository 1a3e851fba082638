"""Two sources of windows, one account of time: who counts what, and when.

PM sampling leads while it delivers: what its windows carry, and the class of the time, are counted from them.
GPM counts the rest, and all time that PM sampling left open: before its first window, after its last one, in
gaps between. Both deliver late and in bursts, so a GPM window waits until PM sampling has passed it or has
stopped, and a PM window waits for its class until GPM has told what PM sampling does not measure. No time is
counted twice, and none is left out that GPM or, while it leads, PM sampling has seen, but for gaps shorter than half
a window.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

from gpu_hpc_exporter.model import COUNT_QUANTITIES, NS, Quantity, WindowSource

SILENCE_NS: Final = 5 * NS
"""PM sampling that is so far behind GPM has stopped: it leads no more."""
PATIENCE_NS: Final = 3 * NS
"""PM windows wait for GPM while it is at most so far behind them."""
_MAX_SPANS: Final = 64
"""Spans remembered where GPM does not come; what would be more is taken for one span."""

CLASS: Final = "class"
"""Stands beside the quantities for the class of the time, which every window can tell."""
Name = Quantity | Literal["class"]


class Stretch(NamedTuple):
    """What a window measured from `begin_ns` to `end_ns`; amounts are those of the whole stretch."""

    begin_ns: int
    end_ns: int
    values: Mapping[Quantity, float]

    def overlap_ns(self, begin_ns: int, end_ns: int) -> int:
        """Time that this stretch shares with another one."""
        return max(0, min(self.end_ns, end_ns) - max(self.begin_ns, begin_ns))


class Account(Protocol):
    """What the merge tells to count."""

    def integrate(self, source: WindowSource, stretch: Stretch) -> None: ...

    def integrate_part(self, source: WindowSource, stretch: Stretch, quantity: Quantity, part_ns: int) -> None: ...

    def classify(self, source: WindowSource, stretch: Stretch, part_ns: int) -> None: ...


@dataclass(slots=True)
class _Span:
    """Time that PM sampling has covered without a gap and with the same quantities."""

    begin_ns: int
    end_ns: int
    carried: frozenset[Name]


class Merge:
    """Takes the windows of both sources, each source's in their order, and tells an account what to count."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.leads = False
        """Whether PM sampling is the source of what its windows carry."""
        self.carried: frozenset[Name] = frozenset()
        """What PM sampling is the source of, nothing while it does not lead."""
        self._quantities: AbstractSet[Quantity] = frozenset()
        self._gpm_comes = False
        self._gpm_end_ns = 0
        self._gpm_told_ns = 0
        """Up to where GPM has told all that it will."""
        self._pm_end_ns = 0
        self._spans: deque[_Span] = deque()
        self._counted: dict[Name, int] = {}
        """Up to where GPM's windows have been dealt with, by what they measure."""
        self._floors: dict[Name, int] = {}
        """Up to where GPM has counted what PM sampling has only now begun to carry."""
        self._held: deque[Stretch] = deque()
        self._waiting: deque[tuple[Stretch, int]] = deque()
        self._beside = _Beside()

    def add_gpm(self, stretch: Stretch) -> int:
        """A window of GPM's: count what is its own, keep the rest until PM sampling has passed it; its time in ns."""
        self._gpm_comes = True
        self._gpm_end_ns = self._gpm_told_ns = stretch.end_ns
        if self.leads and stretch.end_ns - self._pm_end_ns > SILENCE_NS:
            self.stop_pm()
        self._beside.add(stretch, is_alone=not self.leads)
        length_ns = stretch.end_ns - stretch.begin_ns
        if not self._spans:
            self._account.integrate("gpm", stretch)
            self._account.classify("gpm", stretch, length_ns)
            self._counted.update(dict.fromkeys(_names(stretch), stretch.end_ns))
            return length_ns
        if stretch.end_ns > self._pm_end_ns and self.leads:
            self._held.append(stretch)
            self._count_gpm(stretch, _names(stretch) - self.carried)
        else:
            self._count_gpm(stretch, _names(stretch))
        self._forget_spans()
        self._classify_ready()
        return length_ns

    def add_pm(self, stretch: Stretch) -> int:
        """A window of PM sampling's: count it, and class it once GPM has told the rest; its time in ns, if new."""
        before_ns = self._pm_end_ns
        if stretch.end_ns <= before_ns:
            return 0
        length_ns = stretch.end_ns - stretch.begin_ns
        if (
            not self.leads
            or 2 * (stretch.begin_ns - before_ns) > length_ns
            or stretch.values.keys() != self._quantities
        ):
            self._begin_span(stretch)
        if stretch.begin_ns < before_ns:
            self._count_time_from(before_ns, stretch)
            length_ns = stretch.end_ns - before_ns
        self._spans[-1].end_ns = self._pm_end_ns = stretch.end_ns
        if self._floors:
            self._count_after_floors(stretch)
        else:
            self._account.integrate("pm_sampling", stretch)
            self._waiting.append((stretch, length_ns))
        while self._held and self._held[0].end_ns <= stretch.end_ns:
            held = self._held.popleft()
            self._count_gpm(held, self._left_of(held))
        self._classify_ready()
        return length_ns

    def stop_pm(self) -> None:
        """PM sampling delivers no more: GPM counts everything after its last window."""
        self.leads = False
        self.carried = frozenset()
        self._classify_until(self._pm_end_ns)
        for held in self._held:
            self._count_gpm(held, self._left_of(held))
        self._held.clear()

    def start_gpm(self, time_ns: int) -> None:
        """GPM is active from now on: its first windows are worth waiting for."""
        self._gpm_comes = True
        self._gpm_told_ns = max(self._gpm_told_ns, time_ns)

    def stop_gpm(self) -> None:
        """GPM delivers no more: nothing waits for it."""
        self._gpm_comes = False
        self._classify_ready()

    def _begin_span(self, stretch: Stretch) -> None:
        self.leads = True
        self._quantities = stretch.values.keys()
        self.carried = frozenset(_names(stretch))
        for held in self._held:  # what PM sampling carries no longer is GPM's again
            self._count_gpm(held, self._left_of(held) - self.carried)
        begin_ns = max(stretch.begin_ns, self._pm_end_ns)
        self._floors = {name: ns for name, ns in self._counted.items() if name in self.carried and ns > begin_ns}
        self._spans.append(_Span(begin_ns, begin_ns, self.carried))
        if len(self._spans) > _MAX_SPANS:
            first, second = self._spans.popleft(), self._spans[0]
            second.begin_ns, second.carried = first.begin_ns, first.carried | second.carried

    def _count_time_from(self, time_ns: int, stretch: Stretch) -> None:
        """The GPU's clock was put back a little: of this window part of the time is not new, but all amounts are."""
        for name in _names(stretch) - COUNT_QUANTITIES:
            self._floors[name] = max(time_ns, self._floors.get(name, 0))

    def _forget_spans(self) -> None:
        """GPM's windows come in order: what is before all of them still to come or held covers none of them."""
        until_ns = self._held[0].begin_ns if self._held else self._gpm_end_ns
        while self._spans and self._spans[0].end_ns <= until_ns and not (self.leads and len(self._spans) == 1):
            self._spans.popleft()

    def _left_of(self, held: Stretch) -> set[Name]:
        return {name for name in _names(held) if self._counted.get(name, 0) < held.end_ns}

    def _count_gpm(self, stretch: Stretch, names: Iterable[Name]) -> None:
        """Count the part that PM sampling does not cover, by quantity."""
        covered = [(s.carried, stretch.overlap_ns(s.begin_ns, s.end_ns)) for s in self._spans]
        for name in names:
            self._counted[name] = stretch.end_ns
            part_ns = stretch.end_ns - stretch.begin_ns
            for carried, overlap_ns in covered:
                if name in carried:
                    part_ns -= overlap_ns
            if part_ns > 0:
                self._count_part("gpm", stretch, name, part_ns)

    def _count_part(self, source: WindowSource, stretch: Stretch, name: Name, part_ns: int) -> None:
        if name != CLASS:
            self._account.integrate_part(source, stretch, name, part_ns)
        elif source == "gpm":
            self._account.classify(source, stretch, part_ns)
        else:
            self._waiting.append((stretch, part_ns))

    def _count_after_floors(self, stretch: Stretch) -> None:
        for name in _names(stretch):
            part_ns = stretch.end_ns - max(stretch.begin_ns, self._floors.get(name, 0))
            if part_ns > 0:
                self._count_part("pm_sampling", stretch, name, part_ns)
        self._floors = {name: ns for name, ns in self._floors.items() if ns > stretch.end_ns}

    def _classify_ready(self) -> None:
        waits = self._gpm_comes and self._pm_end_ns - self._gpm_told_ns <= PATIENCE_NS
        self._classify_until(self._gpm_told_ns if waits else self._pm_end_ns)

    def _classify_until(self, time_ns: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0].end_ns <= time_ns:
            stretch, part_ns = waiting.popleft()
            values = {**self._beside.values(stretch), **stretch.values}
            self._account.classify("pm_sampling", Stretch(stretch.begin_ns, stretch.end_ns, values), part_ns)


class _Rates(NamedTuple):
    """What GPM measured: ratios, and amounts per nanosecond."""

    ratios: dict[Quantity, float]
    amounts: dict[Quantity, float]

    def over(self, length_ns: int) -> dict[Quantity, float]:
        """As values of a window of this length."""
        return {**self.ratios, **{quantity: rate * length_ns for quantity, rate in self.amounts.items()}}


class _Beside:
    """What GPM measured in the time of a PM window. Windows are asked for in the order of time."""

    def __init__(self) -> None:
        self._stretches: deque[Stretch] = deque()
        self._first_rates: _Rates | None = None

    def add(self, stretch: Stretch, *, is_alone: bool) -> None:
        """Keep a GPM window; `is_alone`: only the newest one can lie beside a PM window."""
        if is_alone:
            self._stretches.clear()
            self._first_rates = None
        self._stretches.append(stretch)

    def values(self, window: Stretch) -> Mapping[Quantity, float]:
        """Means, and amounts for the length of `window`, of what GPM measured in at least half of its time."""
        stretches = self._stretches
        while stretches and stretches[0].end_ns <= window.begin_ns:
            stretches.popleft()
            self._first_rates = None
        if not stretches:
            return {}
        length_ns = window.end_ns - window.begin_ns
        first = stretches[0]
        if window.end_ns > first.end_ns or window.begin_ns < first.begin_ns:
            return _rates(stretches, window).over(length_ns)
        if self._first_rates is None:
            self._first_rates = _rates((first,), window)
        return self._first_rates.over(length_ns)


def _names(stretch: Stretch) -> set[Name]:
    return {CLASS, *stretch.values}


def _rates(stretches: Iterable[Stretch], window: Stretch) -> _Rates:
    """Time-weighted means over `window` of what the stretches measured in at least half of its time."""
    sums: dict[Quantity, float] = {}
    times: dict[Quantity, int] = {}
    for stretch in stretches:
        overlap_ns = stretch.overlap_ns(window.begin_ns, window.end_ns)
        if not overlap_ns:
            continue
        length_ns = stretch.end_ns - stretch.begin_ns
        for quantity, value in stretch.values.items():
            rate = value / length_ns if quantity in COUNT_QUANTITIES else value
            sums[quantity] = sums.get(quantity, 0.0) + rate * overlap_ns
            times[quantity] = times.get(quantity, 0) + overlap_ns
    rates = _Rates({}, {})
    for quantity, time_ns in times.items():
        if 2 * time_ns >= window.end_ns - window.begin_ns:
            mean = sums[quantity] / time_ns
            if quantity in COUNT_QUANTITIES:
                rates.amounts[quantity] = mean
            else:
                rates.ratios[quantity] = min(1.0, mean)  # the quotient may round up
    return rates
