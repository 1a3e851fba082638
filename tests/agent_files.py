"""Files as kernel agents write them, of a test's own making: honest ones, and ones that lie."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.sources.kernels import layout

_FLOCK: Final = struct.Struct("@hhqqi4x")


@dataclass
class Kernel:
    """A slot. Durations are added one by one or as a number of equal ones."""

    name: bytes
    device: int = 0
    executions: int = 0
    launches: int = 0
    ns: int = 0
    squared: float = 0.0
    longest_ns: int = 0
    latency_ns: int = 0
    latency_count: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * layout.BUCKETS)
    window: int = 0
    latest: list[int] = field(default_factory=lambda: [0] * 5)

    def run(self, window: int, count: int, each_ns: int, latency_ns: int = 0, *, in_graph: bool = False) -> None:
        """So many executions in the window with this number, each as long, started so long after their launch."""
        if self.window != window:
            self.window, self.latest = window, [0] * 5
        self.executions += count
        self.launches += 0 if in_graph else count
        self.ns += count * each_ns
        self.squared += count * float(each_ns) ** 2
        self.longest_ns = max(self.longest_ns, each_ns)
        self.latency_ns += count * latency_ns
        self.latency_count += count
        place = next((n for n, bound in enumerate(layout.DURATION_BOUNDS_NS) if each_ns <= bound), layout.BUCKETS - 1)
        self.buckets[place] += count
        was = self.latest
        self.latest = [
            *(was[0] + count, was[1] + count * each_ns, max(was[2], each_ns)),
            *(was[3] + count * latency_ns, was[4] + count),
        ]

    def pack(self, offset: int) -> bytes:
        """The slot's 216 bytes."""
        lanes = (self.executions, self.launches, self.ns)
        more = (self.longest_ns, self.latency_ns, self.latency_count, *self.buckets, self.window, *self.latest)
        key = struct.pack("<10I", self.device, offset, len(self.name), 0, 1, 1, 1, 128, 1, 1)
        return key + struct.pack("<3Qd18Q", *lanes, self.squared, *more)


class AgentWriter:
    """One process's file, written as an agent does: the lock held, the sequence odd in between."""

    def __init__(
        self,
        directory: Path,
        pid: int = 101,
        start_ticks: int = 100,
        uuids: tuple[str, ...] = (),
        environment: Mapping[str, str] = {},
        *,
        name: str = "",
    ) -> None:
        self.path = directory / (name or f"{pid}-{start_ticks}-{time.monotonic_ns():x}.shm")
        self.kernels: list[Kernel] = []
        self.overflow = [Kernel(b"", device) for device in range(layout.DEVICES)]
        self.devices = [[0] * 182 for _ in uuids]
        self.uuids = uuids
        self.window = 0
        self.sequence = 0
        self.state = "waiting"
        self.reason = ""
        self.overhead = 0.004
        self.flags = layout.FLAG_LAUNCHES
        self.intervals: list[tuple[int, int]] = []
        self.records = [0, 0, 0, 0]
        self.period_s = 10.0
        self.heartbeat_ns = time.time_ns()
        self._environment = b"".join(f"{key}={value}\0".encode() for key, value in environment.items())
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        os.ftruncate(self._descriptor, layout.FILE_SIZE)
        identity = layout.IDENTITY.pack(
            layout.MAGIC, layout.VERSION, *layout.SHAPE, pid, start_ticks, os.getuid(), 0, time.time_ns()
        )
        self.write(0, identity)
        self.write(layout.ENVIRONMENT_OFFSET, self._environment)
        self._lock(fcntl.F_WRLCK)
        self.publish()

    def write(self, offset: int, data: bytes) -> None:
        """Bytes at a place, whatever they do to the file."""
        os.pwrite(self._descriptor, data, offset)

    def kernel(self, name: bytes, device: int = 0) -> Kernel:
        """The slot of a kernel, a new one the first time."""
        found = next((k for k in self.kernels if (k.name, k.device) == (name, device)), None)
        if found is None:
            found = Kernel(name, device)
            self.kernels.append(found)
        return found

    def add(self, counter: int, value: int, device: int = 0) -> None:
        """Add to one of a device's counters."""
        self.devices[device][counter] += value

    def next_window(self, seconds: float = 1.0) -> int:
        """Begin another window of this length on all devices; its number."""
        self.window += 1
        for counters in self.devices:
            counters[layout.D_TRACED] += round(seconds * 1e9)
        return self.window

    def begin(self) -> None:
        """From here on a reader must not trust what it sees."""
        self.sequence += 1
        self.write(layout.SEQUENCE_OFFSET, layout.SEQUENCE.pack(self.sequence))

    def publish(self) -> None:
        """Write everything as it is now."""
        if self.sequence % 2 == 0:
            self.begin()
        strings, rows = b"", []
        for kernel in self.kernels:
            rows.append(kernel.pack(len(strings)))
            strings += kernel.name + b"\0"
        self.write(layout.KERNEL_OFFSET, b"".join(rows))
        self.write(layout.OVERFLOW_OFFSET, b"".join(kernel.pack(0) for kernel in self.overflow))
        self.write(layout.STRINGS_OFFSET, strings)
        devices = [
            struct.pack("<16sII182Q", bytes.fromhex(uuid.partition("-")[2].replace("-", "")), 1, 0, *counters)
            for uuid, counters in zip(self.uuids, self.devices, strict=True)
        ]
        self.write(layout.DEVICE_OFFSET, b"".join(devices))
        self.write(layout.STATUS_OFFSET, self._status(len(strings)))
        self.write(layout.INTERVALS_OFFSET, self._last_intervals())
        self.sequence += 1
        self.write(layout.SEQUENCE_OFFSET, layout.SEQUENCE.pack(self.sequence))

    def _status(self, strings: int) -> bytes:
        return layout.STATUS.pack(
            *(self.heartbeat_ns, layout.STATES.index(self.state), layout.REASONS.index(self.reason)),
            *(0, 0, self.flags, b""),
            *(130001, 13000, self.overhead, 4.0, 0.5, 0.01, 0, *self.records, 0, self.window, 0, 0, 1.0),
            *(self.period_s, 0, 0, len(self.kernels), strings, len(self._environment)),
            len(self.intervals),
        )

    def _last_intervals(self) -> bytes:
        ring = [(0, 0)] * layout.INTERVALS
        for number, interval in enumerate(self.intervals):
            ring[number % layout.INTERVALS] = interval
        return b"".join(layout.INTERVAL.pack(*interval) for interval in ring)

    def trace(self, begin_ns: int, end_ns: int) -> None:
        """Another time when tracing was on, by Unix time; `end_ns` 0: it still is. The last one may so be ended."""
        if self.intervals and self.intervals[-1] == (begin_ns, 0):
            self.intervals.pop()
        self.intervals.append((begin_ns, end_ns))

    def beat(self, now_ns: int | None = None) -> None:
        """The heartbeat, of now or of another time."""
        self.heartbeat_ns = time.time_ns() if now_ns is None else now_ns
        self.publish()

    def unlock(self) -> None:
        """The process has ended, or closed all files; what it has mapped it can write on."""
        self._lock(fcntl.F_UNLCK)

    def _lock(self, kind: int) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, 0, 1, 0))

    def end(self) -> None:
        """The process is gone, and has been silent for a while when it went."""
        self.beat(time.time_ns() - 10**10)
        os.close(self._descriptor)
