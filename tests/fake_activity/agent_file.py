"""The agent's file as ctypes structures (exporter/agent/layout.h; test_layout.py compares), and reading it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import sys
import time
from collections.abc import Callable
from ctypes import c_char, c_double, c_int32, c_uint8, c_uint32, c_uint64
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Final

DEVICES: Final = 16
KERNELS: Final = 4096
STRINGS: Final = 1536 << 10
BUCKETS: Final = 9
H2D, D2H, D2D, P2P = range(4)
PINNED, PAGEABLE, DEVICE = range(3)


class State(IntEnum):
    WAITING = 0
    TRACING = 1
    PAUSED = 2
    OFF = 3


class Reason(IntEnum):
    NONE = 0
    NO_CONTEXT = 1
    PROFILER = 2
    CONFIGURED = 3
    STOPPED = 4
    NO_CUDA = 5
    NO_CUPTI = 6
    MISSING_FUNCTION = 7
    UNKNOWN_VERSION = 8
    CUPTI_ERROR = 9
    BUDGET = 10
    INVALID_RECORDS = 11
    BUFFERS = 12
    WINDOWS_DISCARDED = 13


class Interval(ctypes.Structure):
    _fields_: ClassVar[Any] = [("begin_ns", c_uint64), ("end_ns", c_uint64)]


class Copies(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, c_uint64) for name in ("count", "bytes", "ns", "api_ns", "api_calls")),
        ("buckets", c_uint64 * 7),
    ]


class Device(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("uuid", c_uint8 * 16),
        ("used", c_uint32),
        ("padding", c_uint32),
        *(
            (name, c_uint64)
            for name in (
                *("traced_ns", "device_traced_ns", "busy_ns", "compute_ns", "communication_ns", "copy_ns"),
                *("overlap_ns", "idle_host_ns", "idle_queue_ns", "idle_other_ns", "windows_without_union"),
                *("launch_api_ns", "launch_api_calls", "queue_ns"),
            )
        ),
        ("queue_buckets", c_uint64 * BUCKETS),
        *((n, c_uint64) for n in ("graph_launches_traced", "graph_launches_untraced", "sets", "set_bytes", "set_ns")),
        ("sync_ns", c_uint64 * 5),
        ("sync_calls", c_uint64 * 5),
        ("copies", Copies * 3 * 4),
    ]


class Kernel(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        *((name, c_uint32) for name in ("device", "name_offset", "name_size", "padding")),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        *((name, c_uint64) for name in ("executions", "launches", "ns")),
        ("ns_squared", c_double),
        *((name, c_uint64) for name in ("max_ns", "latency_ns", "latency_count")),
        ("buckets", c_uint64 * BUCKETS),
        *(
            (name, c_uint64)
            for name in (
                *("window", "window_executions", "window_ns", "window_max_ns", "window_latency_ns"),
                "window_latency_count",
            )
        ),
    ]


class Header(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("magic", c_char * 8),
        *((name, c_uint32) for name in ("version", "header_size")),
        ("file_size", c_uint64),
        *(
            (name, c_uint32)
            for name in (
                *("device_offset", "device_stride", "device_count", "kernel_offset", "kernel_stride", "kernel_count"),
                *("overflow_count", "strings_offset", "strings_size", "pid"),
            )
        ),
        ("start_ticks", c_uint64),
        *((name, c_uint32) for name in ("uid", "mode")),
        *((name, c_uint64) for name in ("created_ns", "sequence", "heartbeat_ns")),
        *((name, c_uint32) for name in ("state", "reason")),
        ("state_since_ns", c_uint64),
        ("error_code", c_int32),
        ("flags", c_uint32),
        ("error_call", c_char * 40),
        *((name, c_uint32) for name in ("cupti_version", "driver_version")),
        *((name, c_double) for name in ("overhead_ratio", "launch_cost_us", "node_cost_us", "budget")),
        *(
            (name, c_uint64)
            for name in (
                *("agent_cpu_ns", "records_kept", "records_dropped", "records_invalid", "records_unmatched"),
                *("node_records", "windows_published", "windows_discarded", "last_window_ns"),
            )
        ),
        *((name, c_double) for name in ("window_seconds", "period_seconds")),
        ("on_ns", c_uint64),
        *((name, c_uint32) for name in ("buffers_out", "kernels", "strings_used", "environment_size")),
        ("intervals_total", c_uint64),
        ("intervals", Interval * 64),
        ("environment", c_uint8 * 4096),
    ]


class File(ctypes.Structure):
    _fields_: ClassVar[Any] = [
        ("header", Header),
        ("devices", Device * DEVICES),
        ("kernels", Kernel * (KERNELS + DEVICES)),
        ("strings", c_uint8 * STRINGS),
    ]


@dataclass(frozen=True)
class Snapshot:
    """A consistent copy of a file."""

    file: File
    data: bytes

    @property
    def header(self) -> Header:
        header: Header = self.file.header
        return header

    @property
    def state(self) -> tuple[State, Reason]:
        return State(self.header.state), Reason(self.header.reason)

    @property
    def environment(self) -> dict[str, str]:
        entries = bytes(self.header.environment)[: self.header.environment_size].split(b"\0")[:-1]
        pairs = (entry.decode().partition("=") for entry in entries)
        return {name: value for name, _, value in pairs}

    def device(self, number: int = 0) -> Device:
        device: Device = self.file.devices[number]
        return device

    def copies(self, direction: int, memory: int, device: int = 0) -> Copies:
        copies: Copies = self.device(device).copies[direction][memory]
        return copies

    def name(self, kernel: Kernel) -> str:
        start = File.strings.offset + kernel.name_offset
        assert self.data[start + kernel.name_size] == 0
        return self.data[start : start + kernel.name_size].decode()

    def kernels(self, device: int | None = None) -> dict[str, Kernel]:
        """Kernels with executions by name; their names must differ. Overflow slots are `other`."""
        found: dict[str, Kernel] = {}
        for place, kernel in enumerate(self.file.kernels):
            if kernel.executions and device in (None, kernel.device):
                name = self.name(kernel) if place < KERNELS else "other"
                assert name not in found
                found[name] = kernel
        return found

    def slots(self) -> list[Kernel]:
        """All kernels with executions."""
        return [kernel for kernel in self.file.kernels if kernel.executions]

    def intervals(self) -> list[tuple[int, int]]:
        """The ON intervals that the file still has, oldest first."""
        total = self.header.intervals_total
        ring = self.header.intervals
        return [(ring[i % 64].begin_ns, ring[i % 64].end_ns) for i in range(max(0, total - 64), total)]


def read(path: Path) -> Snapshot:
    """Copy a file whose agent is not writing at the moment."""
    offset = Header.sequence.offset
    deadline = time.monotonic() + 60
    with path.open("rb") as file:
        while time.monotonic() < deadline:
            before = struct.unpack("Q", os.pread(file.fileno(), 8, offset))[0]
            data = os.pread(file.fileno(), ctypes.sizeof(File), 0)
            after = struct.unpack("Q", os.pread(file.fileno(), 8, offset))[0]
            if before == after and before % 2 == 0:
                return Snapshot(File.from_buffer_copy(data), data)
    raise TimeoutError("the agent never ceases to write")


def wait_for(path: Path, condition: Callable[[Snapshot], bool], seconds: float = 60) -> Snapshot:
    """Read until the condition holds."""
    deadline = time.monotonic() + seconds
    while True:
        snapshot = read(path)
        if condition(snapshot):
            return snapshot
        if time.monotonic() > deadline:
            said = {name: getattr(snapshot.header, name) for name, *_ in Header._fields_ if name[:3] != "int"}
            raise TimeoutError(f"{snapshot.state}: {said}")
        time.sleep(0.005)


def is_locked(path: Path) -> bool:
    """Whether a living process holds the file."""
    with path.open("r+b") as file:
        lock = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        answer = fcntl.fcntl(file.fileno(), fcntl.F_OFD_GETLK, lock)
        return bool(struct.unpack("hhqqi", answer)[0] != fcntl.F_UNLCK)


def describe(snapshot: Snapshot) -> str:
    """What a person wants to know of a file."""
    header = snapshot.header
    plain = [name for name, *_ in Header._fields_ if isinstance(getattr(header, name), int | float)]
    lines = [f"{' '.join(part.name.lower() for part in snapshot.state)} {header.error_call.decode()}"]
    lines += [f"{name} {getattr(header, name)}" for name in plain[14:]]
    for number in range(DEVICES):
        device = snapshot.device(number)
        if device.used:
            lines.append(f"device {number} {bytes(device.uuid).hex()}")
            sums = {name: getattr(device, name) for name, *_ in Device._fields_[3:] if name != "copies"}
            lines += [f"  {name} {sum_ if isinstance(sum_, int) else list(sum_)}" for name, sum_ in sums.items()]
            for direction, memory in ((d, m) for d in range(4) for m in range(3)):
                copies = snapshot.copies(direction, memory, number)
                if copies.count:
                    kind = f"{('h2d', 'd2h', 'd2d', 'p2p')[direction]} {('pinned', 'pageable', 'device')[memory]}"
                    lines.append(
                        f"  {kind} count {copies.count} bytes {copies.bytes} ns {copies.ns} api {copies.api_ns}"
                    )
    for kernel in sorted(snapshot.slots(), key=lambda kernel: -kernel.ns)[:20]:
        mean = kernel.ns / kernel.executions / 1000
        latency = kernel.latency_ns / max(kernel.latency_count, 1) / 1000
        name = snapshot.name(kernel)[:100] if kernel.name_size else "other"
        lines.append(f"  {kernel.executions} x {mean:.3f} us, launch to start {latency:.3f} us  {name}")
    return "\n".join(lines)


if __name__ == "__main__":  # python tests/fake_activity/agent_file.py FILE…
    for argument in sys.argv[1:]:
        sys.stdout.write(f"{argument}\n{describe(read(Path(argument)))}\n")
