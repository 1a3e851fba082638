"""When agents traced which GPU, by the samplers' clock, from the intervals in their files.

Agents note Unix time, which may be set while they trace. So an interval is converted once, when it is new, with the
offset between the clocks at that look, and only while that offset stands still: after a step of either clock, and after
anything else that leaves open when an agent traced, the whole time since the look before counts as unknown: on all GPUs
after a step, else on those that the file in question may speak of, so that it silences no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpu_hpc_exporter.model import Tracing
from gpu_hpc_exporter.sources.kernels import layout
from gpu_hpc_exporter.sources.kernels.files import AgentFile, Status
from gpu_hpc_exporter.sources.recording import MAX_SPANS

STEP_NS: Final = 20_000_000
"""Clocks whose offset changes by more between two looks were set: slewing at 500 ppm is 5 ms in the longest period."""
ODD_LOOKS: Final = 3
"""A clock that is set, and an agent that is killed, make one such look."""
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
    """How far a file is known: intervals that have ended, since when the next one goes on, on which GPUs it tells.

    odd: looks in a row at which its intervals made no sense.
    """

    ended: int = 0
    open_since_ns: int | None = None
    has_died: bool = False
    gpus: frozenset[str] = frozenset()
    odd: int = 0

    @property
    def has_traced(self) -> bool:
        return self.ended > 0 or self.open_since_ns is not None


class _DoubtError(Exception):
    """When an agent traced cannot be told."""


class TracingTimes:
    """Follows the intervals of all files from look to look. Belongs to one thread."""

    def __init__(self) -> None:
        self._before: Moment | None = None
        self._files: dict[tuple[str, int], _Progress] = {}
        self.odd: list[AgentFile] = []
        """Files whose times made no sense at the last look, for the third time in a row."""

    def look(
        self, moment: Moment, files: Sequence[tuple[AgentFile, frozenset[str]]]
    ) -> Mapping[str, Tracing | None] | None:
        """What was traced since the look before, by UUID, None for a GPU of which that is not known; None: of none.

        Each file comes with the GPUs that it may speak of: of those that it names, or, while it names none, of those
        that its process is known to be on. A file that is there for the first time is taken to be new.
        """
        before, self._before = self._before, moment
        known, self._files = self._files, {}
        is_step = before is None or abs(moment.offset_ns - before.offset_ns) > STEP_NS
        look = _Look(moment, before or moment)
        for file, gpus in files:
            progress = self._files[file.key] = known.pop(file.key, _Progress())
            if not progress.has_died:
                self._follow(look, progress, file, gpus)
            if is_step:
                progress.odd = 0
        for progress in known.values():
            look.doubt(() if progress.has_died else progress.gpus)
        self.odd = [file for file, _ in files if self._files[file.key].odd == ODD_LOOKS]
        if is_step:
            self._begin_anew(moment)
            return None
        return look.told()

    def _follow(self, look: _Look, progress: _Progress, file: AgentFile, gpus: frozenset[str]) -> None:
        """Take what one file tells."""
        if progress.has_traced:
            look.doubt(gpus - progress.gpus)  # what it traced there until now nobody was told
        progress.gpus = gpus
        try:
            spans = _advance(progress, file, look.moment, look.before)
        except _DoubtError:
            look.doubt(gpus)
            return
        open_ns = 0 if progress.open_since_ns is None else look.moment.now_ns - progress.open_since_ns
        if not spans and not open_ns:
            return
        if is_named(file):
            look.add(gpus, spans, open_ns)
        else:
            look.doubt(gpus)

    def _begin_anew(self, moment: Moment) -> None:
        """Of what goes on now nothing is known but that it does."""
        for progress in self._files.values():
            if progress.open_since_ns is not None:
                progress.open_since_ns = moment.now_ns


class _Look:
    """What one look found, by GPU."""

    def __init__(self, moment: Moment, before: Moment) -> None:
        self.moment = moment
        self.before = before
        self._ended: dict[str, list[Span]] = {}
        self._open_ns: dict[str, int] = {}
        self._doubtful: set[str] = set()

    def add(self, gpus: Iterable[str], spans: list[Span], open_ns: int) -> None:
        """Times of tracing on these GPUs."""
        for uuid in gpus:
            self._ended.setdefault(uuid, []).extend(spans)
            self._open_ns[uuid] = max(self._open_ns.get(uuid, 0), open_ns)

    def doubt(self, gpus: Iterable[str]) -> None:
        """Nobody knows when these were traced."""
        self._doubtful.update(gpus)

    def told(self) -> Mapping[str, Tracing | None]:
        """All of it."""
        doubtful = self._doubtful | {uuid for uuid, spans in self._ended.items() if len(spans) > MAX_SPANS}
        traced = {uuid: Tracing(tuple(spans), self._open_ns[uuid]) for uuid, spans in self._ended.items()}
        return traced | dict.fromkeys(doubtful)


def _advance(progress: _Progress, file: AgentFile, moment: Moment, before: Moment) -> list[Span]:
    """Intervals that have ended since the look before, as (begin, end) in ns before this one. Raises _DoubtError."""
    status = file.status
    progress.has_died = file.died_s is not None
    if status is None or file.torn:
        raise _DoubtError
    if status.traces == progress.ended:
        progress.odd = 0
        return []
    try:
        spans = _converted(progress, status, moment, before)
    except _DoubtError:
        progress.odd += 1
        is_open = status.traces > 0 and not _interval(status, status.traces - 1)[1]
        progress.ended = status.traces - is_open
        progress.open_since_ns = moment.now_ns if is_open else None
        raise
    progress.odd = 0
    return spans


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


def is_named(file: AgentFile) -> bool:
    """Whether a file has told which devices its process uses."""
    return bool(file.uuids) and _NO_UUID not in file.uuids
