"""Endless streams of events from the shipped recording: one phase for ever, all of them in turn, or as it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from gpu_hpc_exporter.config import DEFAULT_RECORDING
from gpu_hpc_exporter.diagnosis.kernels import OTHER, Behaviour, pattern
from gpu_hpc_exporter.model import (
    NS,
    Event,
    GpuActivity,
    GpuProcesses,
    IntervalInForce,
    Inventory,
    JobsInForce,
    KernelReport,
    Pattern,
    Readings,
    State,
    StateChange,
    Window,
)
from gpu_hpc_exporter.sources.replay import Recording, loop, play, time_of

HEAD_NS = 2 * NS
TAIL_NS = NS // 5
"""Left out at the begin and at the end of a phase: the rest is its steady state."""
REPORT_NS = 6 * NS
"""A report of kernels tells of the five seconds before it, and of windows that ended up to a second before those."""
_ONCE = Inventory | IntervalInForce | StateChange


@cache
def recording() -> Recording:
    """The shipped recording of an H200."""
    return Recording.load(DEFAULT_RECORDING)


def names() -> tuple[str, ...]:
    """Every phase of the recording in its order."""
    return tuple(phase.name for phase in recording().phases if phase.name != "between")


@dataclass(frozen=True)
class Steady:
    """The steady state of one phase: what was known when it began, at time 0, and what happened in it."""

    before: tuple[Event, ...]
    piece: Recording

    @classmethod
    def of(cls, name: str, holders: str = "") -> Steady:
        """Cut it out of the recording; the jobs at its end, or at the end of phase `holders`, hold the GPU."""
        whole = recording()
        begin, end = _span(name)
        inside = [event for event in whole.events if _begin_of(event) >= begin and time_of(event) <= end]
        jobs = _jobs_at(_span(holders or name)[1])
        held = [replace(event, gpus=jobs.gpus) if isinstance(event, JobsInForce) else event for event in inside]
        slow = _with_patterns(_with_energy(held), jobs)
        piece = replace(whole, events=tuple(slow), duration_ns=end - begin)
        return cls(_known_at(whole, begin, jobs), replace(piece, events=tuple(play(piece, -begin))))


def _span(name: str) -> tuple[int, int]:
    """Begin and end of a phase's steady state, in the recording's nanoseconds."""
    phases = recording().phases
    begin = next(round(phase.start * NS) for phase in phases if phase.name == name)
    end = min(round(phase.start * NS) for phase in phases if round(phase.start * NS) > begin)
    return begin + HEAD_NS, end - TAIL_NS


def _jobs_at(time_ns: int) -> JobsInForce:
    """What was known of jobs at a time."""
    return [event for event in recording().events if isinstance(event, JobsInForce) and event.time_ns <= time_ns][-1]


def _begin_of(event: Event) -> int:
    """From when on it tells; what kernels did right after the begin of a phase is as good as what they did later."""
    if isinstance(event, KernelReport):
        return event.time_ns - REPORT_NS + HEAD_NS
    return event.end_ns - event.duration_ns if isinstance(event, Window) else event.time_ns


def _with_energy(events: Iterable[Event]) -> Iterator[Event]:
    """Energy is read once a minute, and a phase is shorter: here it is the power added up."""
    joules, before_ns = 0.0, 0
    for event in events:
        if isinstance(event, Readings):
            if before_ns:
                joules += event.values["power_gpu_watts"] * (event.time_ns - before_ns) / NS
            before_ns = event.time_ns
            yield replace(event, values={**event.values, "energy_joules": joules})
        else:
            yield event


def _with_patterns(events: Iterable[Event], jobs: JobsInForce) -> Iterator[Event]:
    """Patterns are told after a minute, and a phase is shorter: here they are those of all that its kernels did.

    Kernels of those who hold no GPU are left out. How much equal executions differ no report tells: none is jittery.
    """
    known = list(events)
    holders = {(uuid, share.job.job) for uuid, gpu in jobs.gpus.items() for share in gpu.jobs}
    reports = [event for event in known if isinstance(event, KernelReport)]
    told = [activity for report in reports for activity in report.activities]
    patterns = {pair: _patterns([one for one in told if (one.uuid, one.job) == pair]) for pair in holders}
    for event in known:
        if isinstance(event, KernelReport):
            held = [one for one in event.activities if (one.uuid, one.job) in holders]
            shown = tuple(replace(one, patterns=patterns[one.uuid, one.job]) for one in held)
            yield replace(event, activities=shown)
        else:
            yield event


def _patterns(told: list[GpuActivity]) -> dict[str, Pattern]:
    """Those of the kernels of one job on one GPU."""
    traced_s = sum(one.sums["traced_ns"] for one in told) / NS
    found: dict[str, Pattern] = {}
    for name in {name for one in told for name in one.kernels} - {OTHER}:
        amounts = [one.kernels[name] for one in told if name in one.kernels]
        launches, executions, ns = (
            sum(getattr(amount, what) for amount in amounts) for what in ("launches", "executions", "ns")
        )
        behaviour = Behaviour(traced_s, launches, executions, ns / NS, steady=0, deviation=0.0)
        if shown := pattern(behaviour):
            found[name] = shown
    return found


def _known_at(whole: Recording, begin_ns: int, jobs: JobsInForce) -> tuple[Event, ...]:
    """GPUs, states of the sources, jobs and the newest readings, all told at time 0."""
    earlier = [event for event in whole.events if time_of(event) <= begin_ns]
    once = [replace(event, time_ns=0) for event in earlier if isinstance(event, _ONCE)]
    readings = [event for event in earlier if isinstance(event, Readings)][-1]
    processes = [event for event in earlier if isinstance(event, GpuProcesses)][-1]
    told = replace(jobs, time_ns=0, told_ns=dict.fromkeys(jobs.told_ns, 0))
    return (*once, replace(readings, time_ns=0), replace(processes, time_ns=0), told)


def looped(name: str, holders: str = "") -> Iterator[Event]:
    """One phase without an end, held by its jobs or by another phase's; the driver's counters go on."""
    steady = Steady.of(name, holders)
    yield from steady.before
    yield from loop(steady.piece, 0)


def without_pm(state: State, name: str, holders: str = "") -> Iterator[Event]:
    """One phase where PM sampling delivers nothing and is in this state."""
    for event in looped(name, holders):
        if isinstance(event, StateChange) and event.source == "pm_sampling":
            yield replace(event, state=state, reason="")
        elif not (isinstance(event, Window | IntervalInForce) and event.source == "pm_sampling"):
            yield event


def in_turn(seconds: int) -> Iterator[Event]:
    """Each phase for so long, one after the other."""
    yield from Steady.of(names()[0]).before
    for number, name in enumerate(names()):
        begin_ns = number * seconds * NS
        yield from until(loop(Steady.of(name).piece, begin_ns), begin_ns + seconds * NS)


def as_recorded() -> Iterator[Event]:
    """The whole recording in a loop, as the exporter plays it: it says that it is a recording."""
    yield StateChange(0, "replay", "", "active", recording().path.name)
    yield from loop(recording(), 0)


def until(events: Iterable[Event], end_ns: int) -> Iterator[Event]:
    """The events up to a time."""
    return itertools.takewhile(lambda event: time_of(event) <= end_ns, events)
