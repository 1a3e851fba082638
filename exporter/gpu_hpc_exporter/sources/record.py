"""Writes events to a recording, with every identifier of the machine replaced."""

from __future__ import annotations

import gzip
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self, get_args

import msgspec

from gpu_hpc_exporter import __version__
from gpu_hpc_exporter.model import (
    NS,
    DriverError,
    Event,
    Gpu,
    GpuFellOff,
    GpuJobs,
    GpuProcesses,
    Inventory,
    Job,
    JobsInForce,
    KernelReport,
    Readings,
    SourceName,
    Window,
)
from gpu_hpc_exporter.sources.recording import FORMAT, MAX_TEXT, HeaderLine, Line, PhaseLine, encode_event

_RANDOM_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{32,64}")


class Recorder:
    """A sink that writes `*.jsonl.gz`. Masks UUIDs, pids and serial numbers, keeps models, versions and names of jobs.

    The file is written beside its name and renamed when whole, so a broken-off recording is never taken
    for one. The header, which comes first, tells what was recorded: it is written last, as a gzip member of its own.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(path.name + ".partial")
        self._lock = threading.Lock()
        self._encoder = msgspec.json.Encoder()
        self._start_ns = time.monotonic_ns()
        self._masks: dict[str, str] = {}
        self._first: Inventory | None = None
        self._sources: set[SourceName] = set()
        self._marks: list[PhaseLine] = []
        self.windows = 0
        """Windows written so far."""

    def __enter__(self) -> Self:
        self._body = tempfile.TemporaryFile(dir=self._path.parent)
        self._file = _gzip(self._body)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock, self._body:
            self._file.close()
            if kind is None:
                self._finish()

    def _finish(self) -> None:
        self._body.seek(0)
        try:
            with self._partial.open("wb") as file:
                with _gzip(file) as head:
                    head.write(self._header())
                shutil.copyfileobj(self._body, file)
            self._partial.replace(self._path)
        except BaseException:
            self._partial.unlink(missing_ok=True)
            raise

    def put(self, event: Event) -> None:
        """Write one event; those before the first inventory have no GPU to belong to and are dropped."""
        with self._lock:
            if self._file.closed:
                return
            if isinstance(event, Inventory):
                event = self._masked_inventory(event)
                self._begin(event)
            elif self._first is None:
                return
            line = encode_event(self._masked(event), self._start_ns)
            if line is not None:
                self._write(line)

    def mark(self, time_ns: int, name: str) -> None:
        """Write that a phase began at `time_ns` (CLOCK_MONOTONIC)."""
        with self._lock:
            self._marks.append(PhaseLine(max(0, time_ns - self._start_ns) / NS, name[:MAX_TEXT]))
            if self._first is not None:
                self._write_marks()

    def _write_marks(self) -> None:
        for mark in self._marks:
            self._write(mark)
        self._marks.clear()

    def _masked(self, event: Event) -> Event:
        if isinstance(event, Window):
            self.windows += 1
            self._sources.add(event.source)
        elif isinstance(event, Readings):
            self._sources.add("nvml")
        if isinstance(event, JobsInForce):
            return replace(event, gpus={self._mask(u): self._masked_jobs(jobs) for u, jobs in event.gpus.items()})
        if isinstance(event, KernelReport):
            self._sources.add("kernels")
            masked = tuple(replace(activity, uuid=self._mask(activity.uuid)) for activity in event.activities)
            tracing = None if event.tracing is None else {self._mask(u): told for u, told in event.tracing.items()}
            return replace(event, activities=masked, tracing=tracing)
        if isinstance(event, Inventory | DriverError | GpuFellOff) or not event.uuid:
            return event
        if isinstance(event, GpuProcesses) and event.processes is not None:
            numbered = tuple(replace(process, pid=n) for n, process in enumerate(event.processes, 1))
            event = replace(event, processes=numbered)
        return replace(event, uuid=self._mask(event.uuid))

    def _masked_jobs(self, jobs: GpuJobs) -> GpuJobs:
        return replace(jobs, jobs=tuple(replace(row, job=self._masked_job(row.job)) for row in jobs.jobs))

    def _masked_job(self, job: Job) -> Job:
        """The ids of pods and containers are nobody's business; names say what a recording is about."""
        return replace(job, job_id=self._mask(job.job_id)) if _RANDOM_ID.fullmatch(job.job_id) else job

    def _masked_inventory(self, inventory: Inventory) -> Inventory:
        return replace(inventory, gpus=tuple(self._masked_gpu(gpu) for gpu in inventory.gpus))

    def _masked_gpu(self, gpu: Gpu) -> Gpu:
        return replace(gpu, uuid=self._mask(gpu.uuid), parent_uuid=self._mask(gpu.parent_uuid), serial="")

    def _mask(self, uuid: str) -> str:
        if not uuid:
            return ""
        kind = "MIG" if uuid.startswith("MIG") else "GPU"
        return self._masks.setdefault(uuid, f"{kind}-00000000-0000-0000-0000-{len(self._masks):012d}")

    def _begin(self, inventory: Inventory) -> None:
        if self._first is None:
            self._first = inventory
            self._write_marks()

    def _header(self) -> bytes:
        """The first line; nothing where no inventory came, for then nothing was recorded."""
        if self._first is None:
            return b""
        sources = [source for source in get_args(SourceName) if source in self._sources]
        gpus = [gpu.uuid for gpu in self._first.gpus]
        return self._encoded(HeaderLine(FORMAT, __version__, self._first.driver, sources, gpus))

    def _write(self, line: Line) -> None:
        self._file.write(self._encoded(line))

    def _encoded(self, line: Line) -> bytes:
        return self._encoder.encode(line) + b"\n"


def _gzip(file: IO[bytes]) -> gzip.GzipFile:
    """Neither name nor time within: the same events give the same file."""
    return gzip.GzipFile("", "wb", fileobj=file, mtime=0)


def read_marks(path: Path, seen: int) -> Iterator[tuple[int, str]]:
    """Phases that a workload appended to `path` after the first `seen`: (CLOCK_MONOTONIC in ns, name).

    A line is `<seconds of CLOCK_MONOTONIC> <name>`. An unfinished last line is left for the next call.
    Raises ValueError, with file and line, for a line of another form.
    """
    if not path.exists():
        return
    complete = path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]  # as text, a \r would end a line too
    for number, line in enumerate(complete[seen:], seen + 1):
        seconds, _, name = line.strip().partition(" ")
        try:
            yield round(float(seconds) * NS), name
        except (ValueError, OverflowError):
            raise ValueError(f"{path}: line {number}: expected `<seconds> <phase>`, found {line[:80]!r}") from None
