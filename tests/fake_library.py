"""What the fake driver libraries have in common: a scenario file, and the calls that processes made with it."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_DEVICES = 64
_RECORD = struct.Struct(f"56s q {_DEVICES}q")


class ScenarioError(ValueError):
    """A scenario that the library cannot read; the message names the line."""


class ScenarioFile:
    """A scenario and the call counts of the processes that run with it."""

    def __init__(self, path: Path, calls: Path, checker: tuple[Path, str], text: str) -> None:
        """Write the scenario to `path`; `checker`: the library whose function of that name parses one."""
        self.path = path
        self._calls = calls
        self._checker = checker
        self._calls.unlink(missing_ok=True)
        self.rewrite(text)

    def rewrite(self, text: str) -> None:
        """Replace the scenario; running processes follow with their next call after 25 ms."""
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.stem}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            self._check(name)
            Path(name).replace(self.path)
        finally:
            Path(name).unlink(missing_ok=True)

    def _check(self, name: str) -> None:
        """Let the library's own parser read a scenario file."""
        file, function = self._checker
        error = ctypes.create_string_buffer(512)
        size = ctypes.c_size_t(len(error))
        if ctypes.CDLL(str(file))[function](os.fsencode(name), error, size) != 0:
            raise ScenarioError(error.value.decode(errors="replace").removeprefix(name + ":"))

    def _records(self) -> Iterator[tuple[str, int, tuple[int, ...]]]:
        """All counters: name, total, per device."""
        if not self._calls.exists() or self._calls.stat().st_size == 0:
            return
        with (
            self._calls.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            content = data[:]
        for name, total, *devices in _RECORD.iter_unpack(content):
            yield name.rstrip(b"\0").decode(), total, tuple(devices)

    def calls(self, device: int | None = None) -> dict[str, int]:
        """How often each function was called, of all calls or of those on one device.

        Functions that were never called are absent.
        """
        counts = (
            (name, total if device is None else devices[device])
            for name, total, devices in self._records()
            if not name.startswith("@")
        )
        return {name: count for name, count in counts if count}

    def noticed(self) -> dict[str, tuple[int, dict[int, int]]]:
        """What the library noticed about its callers: by name the total, and what each device has of it."""
        return {
            name.removeprefix("@"): (total, {device: count for device, count in enumerate(devices) if count})
            for name, total, devices in self._records()
            if name.startswith("@")
        }

    def wait_for_calls(self, function: str, count: int, timeout: float = 60.0) -> int:
        """Wait until a function was called `count` times in all; return the calls so far."""
        deadline = time.monotonic() + timeout
        while (seen := self.calls().get(function, 0)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function}: {seen} calls instead of {count} in {timeout} s")
            time.sleep(0.005)
        return seen
