"""Which processes have a context on a GPU or MIG instance, how much memory each has, and its share of the SMs.

The driver's entries have had three sizes under one name of the function (16 bytes before MIG, 24, and 32 in the first
R535 drivers), and the call succeeds whichever the caller reads: pids then get scrambled. So the size is seen from how
much of a marked buffer was written, and one entry that cannot be true makes the whole list worthless.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import pynvml

from gpu_hpc_exporter.model import NS, GpuProcess
from gpu_hpc_exporter.sources.nvml.library import DriverCallError, Handle, find_function
from gpu_hpc_exporter.sources.values import Problem

log = logging.getLogger(__name__)

PERIOD_NS: Final = 2 * NS
SHARES_PERIOD_NS: Final = 15 * NS
"""The shares of the SMs cost the driver 5.2 ms of CPU on an H200, the lists together 0.3 ms."""
REPROBE_NS: Final = 3600 * NS

_LISTS: Final = (
    ("compute processes", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics processes", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("MPS processes", "nvmlDeviceGetMPSComputeRunningProcesses"),
)
"""A process may be in several: one that computes and draws, or a client of MPS."""
_VERSIONS: Final = ("_v3", "_v2", "")

_MARK: Final = 0xA5
_STRIDES: Final = (16, 24, 32)
_MAX_STRIDE: Final = 64
"""Room for each entry, so that a driver with larger ones than any known overruns nothing."""
_FIRST_ROOM: Final = 64
_MAX_ROOM: Final = 65_536
_ENTRY: Final = struct.Struct("=I4xQII")
_SHORT_ENTRY: Final = struct.Struct("=I4xQ")
_U32_NOT_AVAILABLE: Final = 2**32 - 1
_U64_NOT_AVAILABLE: Final = 2**64 - 1
_MAX_PID: Final = 4_194_304
"""PID_MAX_LIMIT of Linux."""
_MAX_INSTANCE: Final = 64
"""No GPU has had instance ids above 14."""
_MAX_BYTES: Final = 2**46

_SAMPLE: Final = struct.Struct("=I4xQIIII")
"""nvmlProcessUtilizationSample_t: pid, time stamp in us, percent of SM, memory, encoder, decoder."""


_Entry = tuple[int, int | None]
"""Pid and memory."""


@dataclass(frozen=True, slots=True)
class ProcessList:
    """One reading: None for no list that can be had or trusted, and then why."""

    processes: tuple[GpuProcess, ...] | None = None
    problem: Problem | None = None
    errors: tuple[str, ...] = ()
    is_unsupported: bool = False


class _UntrueError(Exception):
    """An entry, or the size of all, cannot be true."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.problem: Problem = problem


class ProcessReader:
    """Reads one GPU's or MIG instance's processes; owned by one thread."""

    def __init__(self, handle: Handle, label: str, instance: int | None, on_call: Callable[[str], None]) -> None:
        """`instance`: a MIG instance's GPU instance id. `on_call` is told each call's name before it is made."""
        self._handle = handle
        self._label = label
        self._instance = instance
        self._on_call = on_call
        self._functions = [(name, _newest(function)) for name, function in _LISTS]
        self._buffer = ctypes.create_string_buffer(_FIRST_ROOM * _MAX_STRIDE)
        # Nobody has shares of an instance's SMs: the driver refuses for a GPU with MIG.
        self._shares = _SmShares(handle) if instance is None else None
        self._shares_due_ns = 0
        self._shares_of: frozenset[int] = frozenset()
        self._last_shares: Mapping[int, float] = {}

    def read(self, total_bytes: float | None, now_ns: int) -> ProcessList:
        """The processes at `now_ns`; `total_bytes` is the memory there is. Raises DriverCallError for fatal codes only.

        Shares of the SMs are up to 15 seconds old, but for a process that is new.
        """
        memory: dict[int, int | None] = {}
        try:
            answered = [self._read_list(name, function, total_bytes, memory) for name, function in self._functions]
        except _UntrueError as error:
            return ProcessList(problem=error.problem)
        except pynvml.NVMLError as error:
            failure = _not_fatal(error)
            return ProcessList(errors=(failure.name,))
        if not any(answered):
            log.info("%s does not tell of processes: their series are absent", self._label)
            return ProcessList(is_unsupported=True)
        shares, errors = self._read_shares(memory, now_ns)
        processes = (GpuProcess(pid, memory[pid], shares.get(pid)) for pid in sorted(memory))
        return ProcessList(tuple(processes), errors=errors)

    def _read_list(self, name: str, function: Any, total_bytes: float | None, memory: dict[int, int | None]) -> bool:
        """Add a list's processes; False where the driver has no such list."""
        if function is None:
            return False
        self._on_call(name)
        try:
            count = self._call(function)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
                return False
            raise
        if not count:
            return True
        raw = self._buffer.raw
        for pid, used in _decode(raw, count, total_bytes, self._instance):
            known = memory.get(pid)
            memory[pid] = used if known is None or used is None else max(known, used)
        return True

    def _call(self, function: Any) -> int:
        """Fill the buffer, a larger one where there are more processes; how many entries were written."""
        while True:
            room = len(self._buffer) // _MAX_STRIDE
            ctypes.memset(self._buffer, _MARK, len(self._buffer))
            count = ctypes.c_uint(room)
            code = function(self._handle, ctypes.byref(count), self._buffer)
            if code == pynvml.NVML_SUCCESS and count.value <= room:
                return count.value
            if code == pynvml.NVML_SUCCESS or (code == pynvml.NVML_ERROR_INSUFFICIENT_SIZE and room >= _MAX_ROOM):
                raise _UntrueError("above_range")
            if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                raise pynvml.NVMLError(code)
            more = min(max(2 * room, count.value + _FIRST_ROOM), _MAX_ROOM)
            self._buffer = ctypes.create_string_buffer(more * _MAX_STRIDE)

    def _read_shares(self, memory: dict[int, int | None], now_ns: int) -> tuple[Mapping[int, float], tuple[str, ...]]:
        if self._shares is None or not memory:
            return {}, ()
        known = memory.keys() <= self._shares_of
        self._shares_of = frozenset(memory)
        if known and now_ns < self._shares_due_ns:
            return self._last_shares, ()
        self._on_call("process utilization")
        self._shares_due_ns, self._last_shares = now_ns + SHARES_PERIOD_NS, {}
        try:
            self._last_shares = self._shares.read()
            return self._last_shares, ()
        except pynvml.NVMLError as error:
            failure = _not_fatal(error)
            if failure.unsupported:
                self._shares = None
                return {}, ()
            return {}, (failure.name,)


class _SmShares:
    """Each process's share of the SMs since the last time, as the driver sampled it."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle
        self._function = find_function("nvmlDeviceGetProcessUtilization")
        self._buffer = ctypes.create_string_buffer(_FIRST_ROOM * _SAMPLE.size)
        self._seen_us = 0

    def read(self) -> dict[int, float]:
        """By pid; a process that the driver has no newer sample of is not in it."""
        shares: dict[int, list[int]] = defaultdict(list)
        newest = self._seen_us
        count = self._call()
        for pid, at_us, percent, *_ in _SAMPLE.iter_unpack(self._buffer.raw[: count * _SAMPLE.size]):
            if at_us > self._seen_us and percent <= 100:
                shares[pid].append(percent)
                newest = max(newest, at_us)
        self._seen_us = newest
        return {pid: sum(percents) / len(percents) / 100 for pid, percents in shares.items()}

    def _call(self) -> int:
        if self._function is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        while True:
            room = len(self._buffer) // _SAMPLE.size
            count = ctypes.c_uint(room)
            since = ctypes.c_ulonglong(self._seen_us)
            code = self._function(self._handle, self._buffer, ctypes.byref(count), since)
            if code == pynvml.NVML_SUCCESS:
                return min(count.value, room)
            if code == pynvml.NVML_ERROR_NOT_FOUND:
                return 0
            if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE or room >= _MAX_ROOM:
                raise pynvml.NVMLError(code)
            more = min(max(2 * room, count.value), _MAX_ROOM)
            self._buffer = ctypes.create_string_buffer(more * _SAMPLE.size)


def _newest(function: str) -> Any:
    found = (find_function(function + version) for version in _VERSIONS)
    return next((one for one in found if one is not None), None)


def _not_fatal(error: pynvml.NVMLError) -> DriverCallError:
    failure = DriverCallError(error)
    if failure.fatal:
        raise failure from error
    return failure


def _decode(raw: bytes, count: int, total_bytes: float | None, instance: int | None) -> tuple[_Entry, ...]:
    """Pid and memory of each entry; raises _UntrueError."""
    written = len(raw.rstrip(bytes([_MARK])))
    stride, rest = divmod(written, count)
    if not rest and stride in _STRIDES:
        return _entries(raw, count, stride, total_bytes, instance)
    if written <= count * max(_STRIDES):
        raise _UntrueError("above_range")
    # A driver that clears the whole buffer hides the size: only one may give entries that can be true.
    possible: set[tuple[_Entry, ...]] = set()
    for stride in _STRIDES:
        with suppress(_UntrueError):
            possible.add(_entries(raw, count, stride, total_bytes, instance))
    if len(possible) != 1:
        raise _UntrueError("above_range")
    return possible.pop()


def _entries(
    raw: bytes, count: int, stride: int, total_bytes: float | None, instance: int | None
) -> tuple[_Entry, ...]:
    limit = min(total_bytes or _MAX_BYTES, _MAX_BYTES)
    entries: list[_Entry] = []
    for at in range(0, count * stride, stride):
        if stride == _SHORT_ENTRY.size:
            pid, used = _SHORT_ENTRY.unpack_from(raw, at)
        else:
            pid, used, *ids = _ENTRY.unpack_from(raw, at)
            _check_instance(ids[0], instance)
            _check_instance(ids[1], None)
        if pid in {0, _U32_NOT_AVAILABLE}:  # what a driver says of a process in another pid namespace
            raise _UntrueError("sentinel")
        if pid > _MAX_PID or (used > limit and used != _U64_NOT_AVAILABLE):
            raise _UntrueError("above_range")
        entries.append((pid, None if used == _U64_NOT_AVAILABLE else used))
    return tuple(entries)


def _check_instance(found: int, own: int | None) -> None:
    if found == _U32_NOT_AVAILABLE:
        return
    if found > _MAX_INSTANCE or (own is not None and found != own):
        raise _UntrueError("above_range")
