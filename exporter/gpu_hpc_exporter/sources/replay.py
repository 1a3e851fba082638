"""Reads a recording back as events, once or in an endless loop whose counters never go back."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from gpu_hpc_exporter.model import CUMULATIVE_READINGS, Event, Inventory, Reading, Readings, Window
from gpu_hpc_exporter.sources.recording import FORMAT, NS, HeaderLine, Line, PhaseLine, decode_line

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
        lines = list(_lines(path))
        header = lines[0] if lines else None
        if not isinstance(header, HeaderLine):
            raise RecordingError(f"{path}: line 1: a recording begins with a header")
        if header.format != FORMAT:
            raise RecordingError(f"{path}: line 1: format {header.format}, this version reads format {FORMAT}")
        timed = sorted((line for line in lines if not isinstance(line, HeaderLine)), key=lambda line: line.t)
        events = tuple(event for line in timed for event in _decoded(path, line))
        if not any(isinstance(event, Inventory) for event in events):
            raise RecordingError(f"{path}: no inventory line: the recording names no GPU")
        if timed[-1].t <= 0:
            raise RecordingError(f"{path}: every line is at t=0: there is nothing to play")
        phases = tuple(Phase(line.t, line.name) for line in timed if isinstance(line, PhaseLine))
        return cls(path, header, phases, events, round(timed[-1].t * NS))


def time_of(event: Event) -> int:
    """When an event happened (a window: when it ended)."""
    return event.end_ns if isinstance(event, Window) else event.time_ns


def play(recording: Recording, start_ns: int) -> Iterator[Event]:
    """Every event of the recording, shifted to begin at `start_ns`."""
    for event in recording.events:
        yield _shifted(event, start_ns)


def loop(recording: Recording, start_ns: int) -> Iterator[Event]:
    """The recording again and again. What the driver itself counts goes on from where it stood."""
    offsets: dict[tuple[str, Reading], float] = {}
    growth = _growth(recording)
    while True:
        for event in recording.events:
            shifted = _shifted(event, start_ns)
            yield _continued(shifted, offsets) if isinstance(shifted, Readings) else shifted
        start_ns += recording.duration_ns
        for key, grown in growth.items():
            offsets[key] = offsets.get(key, 0.0) + grown


def _shifted(event: Event, start_ns: int) -> Event:
    if isinstance(event, Window):
        return replace(event, end_ns=event.end_ns + start_ns)
    return replace(event, time_ns=event.time_ns + start_ns)


def _continued(readings: Readings, offsets: dict[tuple[str, Reading], float]) -> Readings:
    values = {name: value + offsets.get((readings.uuid, name), 0.0) for name, value in readings.values.items()}
    return replace(readings, values=values)


def _growth(recording: Recording) -> dict[tuple[str, Reading], float]:
    first: dict[tuple[str, Reading], float] = {}
    last: dict[tuple[str, Reading], float] = {}
    for event in recording.events:
        if isinstance(event, Readings):
            for name, value in event.values.items():
                if name in CUMULATIVE_READINGS:
                    first.setdefault((event.uuid, name), value)
                    last[event.uuid, name] = value
    return {key: last[key] - first[key] for key in first}


def _lines(path: Path) -> Iterator[Line]:
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
                yield decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise RecordingError(f"{path}: line {number}: {error}") from error
    except (OSError, EOFError, zlib.error) as error:
        raise RecordingError(f"{path}: after line {number}: {error}") from error


def _decoded(path: Path, line: Line) -> tuple[Event, ...]:
    try:
        return decode_line(line, 0)
    except msgspec.ValidationError as error:
        raise RecordingError(
            f"{path}: {type(line).__name__} at t={line.t if hasattr(line, 't') else 0}: {error}"
        ) from error
