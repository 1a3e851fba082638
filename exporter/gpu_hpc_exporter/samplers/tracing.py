"""When agents traced which GPU, by the samplers' clock, from the intervals in their files.

Agents note Unix time, which may be set while they trace. So an interval is converted once, when it is new, with the
offset between the clocks at that look, and only while that offset stands still: after a step of either clock, and after
anything else that leaves open when an agent traced, the whole time since the look before counts as unknown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpu_hpc_exporter.model import Tracing
from gpu_hpc_exporter.sources.kernels import layout
from gpu_hpc_exporter.sources.kernels.files import AgentFile, Status
from gpu_hpc_exporter.sources.recording import MAX_SPANS

STEP_NS: Final = 20_000_000
"""Clocks whose offset changes by more between two looks were set: slewing at 500 ppm is 5 ms in the longest period."""
_NO_UUID: Final = "0" * 32

Span = tuple[int, int]


class Moment(NamedTuple):
    """A look at the files: the samplers' clock and Unix time when it began, the samplers' clock when all were read."""

    now_ns: int
    wall_ns: int
    read_ns: int

    @property
    def offset_ns(self) -> int:
        """From the samplers' clock to Unix time."""
        return self.wall_ns - self.now_ns


@dataclass(slots=True)
class _Progress:
    """How far a file is known: intervals that have ended, and since when the next one goes on."""

    ended: int = 0
    open_since_ns: int | None = None
    has_died: bool = False


class _DoubtError(Exception):
    """When an agent traced cannot be told."""


class TracingTimes:
    """Follows the intervals of all files from look to look. Belongs to one thread."""

    def __init__(self) -> None:
        self._before: Moment | None = None
        self._files: dict[tuple[str, int], _Progress] = {}

    def look(self, moment: Moment, files: Iterable[AgentFile], gpus: Mapping[str, str]) -> Mapping[str, Tracing] | None:
        """What was traced since the look before, by UUID; None where that is not known.

        `gpus`: UUIDs by their digits in hex. A file that is there for the first time is taken to be new.
        """
        before, self._before = self._before, moment
        known, self._files = self._files, {}
        is_known = before is not None and abs(moment.offset_ns - before.offset_ns) <= STEP_NS
        ended: dict[str, list[Span]] = {}
        open_ns: dict[str, int] = {}
        for file in files:
            progress = self._files[file.key] = known.pop(file.key, _Progress())
            if progress.has_died:
                continue
            try:
                spans = _advance(progress, file, moment, before or moment)
                uuids = _uuids(file, gpus) if spans or progress.open_since_ns is not None else ()
            except _DoubtError:
                is_known = is_known and _is_elsewhere(file, gpus)
                continue
            for uuid in uuids:
                ended.setdefault(uuid, []).extend(spans)
                if progress.open_since_ns is not None:
                    open_ns[uuid] = max(open_ns.get(uuid, 0), moment.now_ns - progress.open_since_ns)
        is_known = is_known and all(progress.has_died for progress in known.values())
        if not is_known or any(len(spans) > MAX_SPANS for spans in ended.values()):
            self._begin_anew(moment)
            return None
        return {uuid: Tracing(tuple(spans), open_ns.get(uuid, 0)) for uuid, spans in ended.items()}

    def _begin_anew(self, moment: Moment) -> None:
        """Of what goes on now nothing is known but that it does."""
        for progress in self._files.values():
            if progress.open_since_ns is not None:
                progress.open_since_ns = moment.now_ns


def _advance(progress: _Progress, file: AgentFile, moment: Moment, before: Moment) -> list[Span]:
    """Intervals that have ended since the look before, as (begin, end) in ns before this one. Raises _DoubtError."""
    status = file.status
    progress.has_died = file.died_s is not None
    if status is None or file.torn:
        raise _DoubtError
    if status.traces == progress.ended:
        return []
    try:
        return _converted(progress, status, moment, before)
    except _DoubtError:
        is_open = status.traces > 0 and not _interval(status, status.traces - 1)[1]
        progress.ended = status.traces - is_open
        progress.open_since_ns = moment.now_ns if is_open else None
        raise


def _converted(progress: _Progress, status: Status, moment: Moment, before: Moment) -> list[Span]:
    """As above, where there are any."""
    if not 0 < status.traces - progress.ended <= layout.INTERVALS:
        raise _DoubtError
    spans: list[Span] = []
    for number in range(progress.ended, status.traces):
        begin_ns, end_ns = _interval(status, number)
        begin_ns -= moment.offset_ns
        earliest_ns = before.now_ns - STEP_NS
        if progress.open_since_ns is not None:
            begin_ns = earliest_ns = progress.open_since_ns
        has_ended = end_ns != 0
        end_ns = end_ns - moment.offset_ns if has_ended else moment.read_ns
        is_last = number == status.traces - 1
        if not earliest_ns <= begin_ns <= end_ns <= moment.read_ns + STEP_NS or not (has_ended or is_last):
            raise _DoubtError
        if begin_ns >= moment.now_ns:  # the next look will tell
            break
        if not has_ended or end_ns > moment.now_ns:
            progress.open_since_ns = begin_ns
            break
        spans.append((moment.now_ns - begin_ns, moment.now_ns - end_ns))
        progress.ended, progress.open_since_ns = number + 1, None
    if progress.has_died and progress.open_since_ns is not None:
        raise _DoubtError
    return spans


def _interval(status: Status, number: int) -> Span:
    begin_ns, end_ns = layout.INTERVAL.unpack_from(status.intervals, number % layout.INTERVALS * layout.INTERVAL.size)
    return begin_ns, end_ns


def _is_elsewhere(file: AgentFile, gpus: Mapping[str, str]) -> bool:
    """Whether a file's process is known to use none of our GPUs."""
    return bool(file.uuids) and _NO_UUID not in file.uuids and gpus.keys().isdisjoint(file.uuids)


def _uuids(file: AgentFile, gpus: Mapping[str, str]) -> tuple[str, ...]:
    """Those of our GPUs that a file's process uses. Raises _DoubtError where it has not told yet."""
    if not file.uuids or _NO_UUID in file.uuids:
        raise _DoubtError
    return tuple(gpus[uuid] for uuid in file.uuids if uuid in gpus)
