"""A fake NVIDIA driver library, driven by a scenario file, for tests of real processes.

`build` compiles it, `Scenario` writes what it shall say and reads back how it was called.
README.md describes the scenario language.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

__all__ = ["Scenario", "ScenarioError", "Stats", "build", "functions"]

LIBRARY = "libnvidia-ml.so.1"
_SOURCE = Path(__file__).parent
_DEVICES = 32
_RECORD = struct.Struct(f"56s q {_DEVICES}q")
_FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g"),
    *("-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1", "-pthread"),
)


class ScenarioError(ValueError):
    """A scenario that the library cannot read; the message names the line."""


def functions() -> frozenset[str]:
    """Return the names of all NVML functions that the fake exports."""
    text = (_SOURCE / "functions.def").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^FN\((\w+),", text, re.MULTILINE))


def build(directory: Path, *, missing: Collection[str] = ()) -> Path:
    """Compile the library into `directory` and return that, for LD_LIBRARY_PATH.

    `missing` names exported functions to leave out, as an old driver does.
    """
    unknown = set(missing) - functions()
    if unknown:
        raise ValueError(f"the fake never exports {', '.join(sorted(unknown))}")
    directory.mkdir(parents=True, exist_ok=True)
    hidden = "".join(f"{name}; " for name in sorted(missing))
    exports = f"{{ global: nvml*; fake_nvml_check; local: {hidden}*; }};\n"
    with tempfile.TemporaryDirectory(dir=directory) as work:
        script = Path(work, "exports.map")
        script.write_text(exports, encoding="utf-8")
        _compile(script, Path(work, LIBRARY))
        Path(work, LIBRARY).replace(directory / LIBRARY)
    return directory


def _compile(script: Path, output: Path) -> None:
    """Run the system's C compiler; its messages are part of the error."""
    sources = sorted(str(path) for path in _SOURCE.glob("*.c"))
    command = ["cc", *_FLAGS, f"-Wl,--version-script={script}", "-o", str(output), *sources, "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"cc failed:\n{result.stderr}")


@dataclass(frozen=True)
class Stats:
    """What the library noticed about its callers, over all processes of a scenario."""

    reloads: int  # rewrites that a process picked up
    scenario_errors: int  # rewrites that could not be parsed (the old scenario stays)
    freed_sample_uses: int  # GPM samples used after, or freed during, their use
    stale_handles: int  # calls with a device handle from before a shutdown
    live_samples: int  # GPM samples allocated and not freed
    hangs: int  # calls that entered a `hang` fault
    max_inside: Mapping[int, int]  # device: most threads at once in its calls
    gpm_max_inside: Mapping[int, int]  # device: most threads at once in its GPM calls


class Scenario:
    """A scenario file and the call counts of the processes that run with it."""

    def __init__(self, directory: Path, library: Path, text: str) -> None:
        """Write the scenario into `directory`, for the library built in `library`."""
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "scenario.txt"
        self._library = library
        self._calls = directory / "calls.bin"
        self._calls.unlink(missing_ok=True)
        self.rewrite(text)

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that make a process load the fake with this scenario."""
        return {
            "LD_LIBRARY_PATH": str(self._library),
            "FAKE_NVML_SCENARIO": str(self.path),
            "FAKE_NVML_CALLS": str(self._calls),
        }

    def rewrite(self, text: str) -> None:
        """Replace the scenario; running processes follow with their next call after 25 ms."""
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix="scenario.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        try:
            self._check(name)
            Path(name).replace(self.path)
        finally:
            Path(name).unlink(missing_ok=True)

    def _check(self, name: str) -> None:
        """Let the library's own parser read a scenario file."""
        library = ctypes.CDLL(str(self._library / LIBRARY))
        error = ctypes.create_string_buffer(512)
        size = ctypes.c_size_t(len(error))
        if library.fake_nvml_check(os.fsencode(name), error, size) != 0:
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

    def stats(self) -> Stats:
        """Return what the library noticed about its callers so far."""
        found = {name: (total, devices) for name, total, devices in self._records()}

        def total(name: str) -> int:
            return found.get("@" + name, (0, ()))[0]

        def peaks(name: str) -> dict[int, int]:
            devices = found.get("@" + name, (0, ()))[1]
            return {device: peak for device, peak in enumerate(devices) if peak}

        return Stats(
            reloads=total("reloads"),
            scenario_errors=total("scenario_errors"),
            freed_sample_uses=total("freed_sample_uses"),
            stale_handles=total("stale_handles"),
            live_samples=total("live_samples"),
            hangs=total("hangs"),
            max_inside=peaks("max_inside"),
            gpm_max_inside=peaks("gpm_max_inside"),
        )

    def wait_for_calls(self, function: str, count: int, timeout: float = 10.0) -> int:
        """Wait until a function was called `count` times in all; return the calls so far."""
        deadline = time.monotonic() + timeout
        while (seen := self.calls().get(function, 0)) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function}: {seen} calls instead of {count} in {timeout} s")
            time.sleep(0.005)
        return seen
