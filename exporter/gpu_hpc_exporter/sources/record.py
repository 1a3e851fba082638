"""Writes events to a recording, with every identifier of the machine replaced."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from gpu_hpc_exporter import __version__
from gpu_hpc_exporter.model import NS, DriverError, Event, Gpu, GpuFellOff, Inventory, Window
from gpu_hpc_exporter.sources.recording import FORMAT, MAX_TEXT, HeaderLine, Line, PhaseLine, encode_event


class Recorder:
    """A sink that writes `*.jsonl.gz`. Masks UUIDs and serial numbers, keeps models and versions.

    The file is written beside its name and renamed when whole, so a broken-off recording is never taken
    for one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self._start_ns = time.monotonic_ns()
        self._masks: dict[str, str] = {}
        self._has_header = False
        self._marks: list[PhaseLine] = []
        self.windows = 0
        """Windows written so far."""

    def __enter__(self) -> Self:
        # Neither name nor time: the same events give the same file.
        self._raw = self._partial.open("wb")
        self._file = gzip.GzipFile("", "wb", fileobj=self._raw, mtime=0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._file.close()
            self._raw.close()
        if kind is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink(missing_ok=True)

    def put(self, event: Event) -> None:
        """Write one event; those before the first inventory have no GPU to belong to and are dropped."""
        with self._lock:
            if self._file.closed:
                return
            if isinstance(event, Inventory):
                event = self._masked_inventory(event)
                self._write_header(event)
            elif not self._has_header:
                return
            line = encode_event(self._masked(event), self._start_ns)
            if line is not None:
                self._write(line)

    def mark(self, time_ns: int, name: str) -> None:
        """Write that a phase began at `time_ns` (CLOCK_MONOTONIC)."""
        with self._lock:
            self._marks.append(PhaseLine(max(0, time_ns - self._start_ns) / NS, name[:MAX_TEXT]))
            if self._has_header:
                self._write_marks()

    def _write_marks(self) -> None:
        for mark in self._marks:
            self._write(mark)
        self._marks.clear()

    def _masked(self, event: Event) -> Event:
        if isinstance(event, Window):
            self.windows += 1
        if isinstance(event, Inventory | DriverError | GpuFellOff) or not event.uuid:
            return event
        return replace(event, uuid=self._mask(event.uuid))

    def _masked_inventory(self, inventory: Inventory) -> Inventory:
        return replace(inventory, gpus=tuple(self._masked_gpu(gpu) for gpu in inventory.gpus))

    def _masked_gpu(self, gpu: Gpu) -> Gpu:
        return replace(gpu, uuid=self._mask(gpu.uuid), parent_uuid=self._mask(gpu.parent_uuid), serial="")

    def _mask(self, uuid: str) -> str:
        if not uuid:
            return ""
        kind = "MIG" if uuid.startswith("MIG") else "GPU"
        return self._masks.setdefault(uuid, f"{kind}-00000000-0000-0000-0000-{len(self._masks):012d}")

    def _write_header(self, inventory: Inventory) -> None:
        if not self._has_header:
            self._has_header = True
            gpus = [gpu.uuid for gpu in inventory.gpus]
            self._write(HeaderLine(FORMAT, __version__, inventory.driver, ["gpm", "nvml"], gpus))
            self._write_marks()

    def _write(self, line: Line) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")


def read_marks(path: Path, seen: int) -> Iterator[tuple[int, str]]:
    """Phases that a workload appended to `path` after the first `seen`: (CLOCK_MONOTONIC in ns, name).

    A line is `<seconds of CLOCK_MONOTONIC> <name>`. An unfinished last line is left for the next call.
    Raises ValueError, with file and line, for a line of another form.
    """
    if not path.exists():
        return
    complete = path.read_text("utf-8", "replace").split("\n")[:-1]
    for number, line in enumerate(complete[seen:], seen + 1):
        seconds, _, name = line.strip().partition(" ")
        try:
            yield round(float(seconds) * NS), name
        except (ValueError, OverflowError):
            raise ValueError(f"{path}: line {number}: expected `<seconds> <phase>`, found {line[:80]!r}") from None
