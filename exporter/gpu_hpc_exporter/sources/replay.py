"""Reads a recording back as events, once or in an endless loop whose counters never go back."""

from __future__ import annotations

import gzip
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from gpu_hpc_exporter.model import CUMULATIVE_READINGS, NS, Event, Inventory, JobsInForce, Reading, Readings, Window
from gpu_hpc_exporter.sources.recording import FORMAT, HeaderLine, Line, PhaseLine, decode_line
from gpu_hpc_exporter.sources.values import RisingCounter

MAX_LINE_BYTES = 1 << 20
MAX_BYTES = 512 << 20


class RecordingError(Exception):
    """A recording cannot be used; the text names file, line and reason."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of the workload and where it began, in seconds from the start."""

    start: float
    name: str


@dataclass(frozen=True, slots=True)
class Recording:
    """A whole recording in memory (a three-minute one of one GPU: about 2 MB). Lines are sorted by time."""

    path: Path
    header: HeaderLine
    phases: tuple[Phase, ...]
    events: tuple[Event, ...]
    duration_ns: int

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read and check every line. Raises RecordingError."""
        header: HeaderLine | None = None
        phases: list[Phase] = []
        events: list[Event] = []
        for line, decoded in _read(path):
            if isinstance(line, HeaderLine):
                header = line
            elif isinstance(line, PhaseLine):
                phases.append(Phase(line.t, line.name))
            events.extend(decoded)
        if header is None:
            raise RecordingError(f"{path}: line 1: a recording begins with a header")
        if not any(isinstance(event, Inventory) for event in events):
            raise RecordingError(f"{path}: no inventory line: the recording names no GPU")
        events.sort(key=time_of)
        phases.sort(key=lambda phase: phase.start)
        duration_ns = max(time_of(events[-1]), round(phases[-1].start * NS) if phases else 0)
        if duration_ns <= 0:
            raise RecordingError(f"{path}: every line is at t=0: there is nothing to play")
        _refuse_overlaps(path, events)
        return cls(path, header, tuple(phases), tuple(events), duration_ns)


def _refuse_overlaps(path: Path, events: list[Event]) -> None:
    """Windows that cover the same time twice would show more time than has passed."""
    ends: dict[tuple[str, str], int] = {}
    for event in events:
        if isinstance(event, Window):
            key = (event.uuid, event.source)
            begin_ns = event.end_ns - event.duration_ns
            if begin_ns < ends.get(key, begin_ns) - event.duration_ns // 2:
                raise RecordingError(f"{path}: the window at t={event.end_ns / NS:g} overlaps the one before it")
            ends[key] = event.end_ns


def time_of(event: Event) -> int:
    """When an event happened (a window: when it ended)."""
    return event.end_ns if isinstance(event, Window) else event.time_ns


def play(recording: Recording, start_ns: int) -> Iterator[Event]:
    """Every event of the recording, shifted to begin at `start_ns`."""
    for event in recording.events:
        yield _shifted(event, start_ns)


def loop(recording: Recording, start_ns: int) -> Iterator[Event]:
    """The recording again and again. What the driver itself counts goes on from where it stood."""
    counters = defaultdict[tuple[str, Reading], RisingCounter](RisingCounter)
    while True:
        for event in recording.events:
            shifted = _shifted(event, start_ns)
            yield _continued(shifted, counters) if isinstance(shifted, Readings) else shifted
        start_ns += recording.duration_ns


def _shifted(event: Event, start_ns: int) -> Event:
    if isinstance(event, Window):
        return replace(event, end_ns=event.end_ns + start_ns)
    if isinstance(event, JobsInForce):
        told_ns = {source: told_ns + start_ns for source, told_ns in event.told_ns.items()}
        return replace(event, time_ns=event.time_ns + start_ns, told_ns=told_ns)
    return replace(event, time_ns=event.time_ns + start_ns)


def _continued(readings: Readings, counters: defaultdict[tuple[str, Reading], RisingCounter]) -> Readings:
    values = dict(readings.values)
    for name in CUMULATIVE_READINGS & values.keys():
        values[name] = counters[readings.uuid, name].advance(values[name])
    return replace(readings, values=values)


def _read(path: Path) -> Iterator[tuple[HeaderLine | PhaseLine, tuple[Event, ...]] | tuple[None, tuple[Event, ...]]]:
    """Header and phases as they are, other lines as their events, in the order of the file."""
    decoder = msgspec.json.Decoder(Line)
    size = 0
    number = 0
    try:
        with gzip.open(path, "rb") as file:
            while raw := file.readline(MAX_LINE_BYTES):
                number += 1
                size += len(raw)
                if size > MAX_BYTES:
                    raise RecordingError(f"{path}: line {number}: longer than {MAX_BYTES >> 20} MiB unpacked")
                if number == 1:
                    _check_header(path, raw)
                line = decoder.decode(raw)
                yield (line, ()) if isinstance(line, HeaderLine | PhaseLine) else (None, decode_line(line, 0))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RecordingError(f"{path}: line {number}: {' '.join(str(error).split())}") from error
    except FileNotFoundError as error:
        raise RecordingError(f"{path}: there is no such file; see --replay.file") from error
    except (OSError, EOFError, zlib.error) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        place = f"after line {number}" if number else "no recording"
        raise RecordingError(f"{path}: {place}: {why}") from error


def _check_header(path: Path, raw: bytes) -> None:
    """The format's number comes first: lines of another format may be anything."""
    try:
        header = msgspec.json.decode(raw, type=_AnyHeader)
    except msgspec.MsgspecError as error:
        raise RecordingError(f"{path}: line 1: a recording begins with a header") from error
    if header.format != FORMAT:
        raise RecordingError(f"{path}: line 1: format {header.format}, this version reads format {FORMAT}")


class _AnyHeader(msgspec.Struct, tag="header", tag_field="type"):
    format: int
