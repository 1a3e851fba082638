"""Fake CUDA driver and CUPTI libraries, driven by a scenario file, for tests of real processes.

`build` compiles them, `CuptiScenario` writes what they shall say and reads back how they were called.
README.md describes the scenario language.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fake_library import ScenarioError, ScenarioFile

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

__all__ = ["CuptiScenario", "ScenarioError", "Stats", "build", "functions"]

RUNTIME = "libfake_cupti.so"  # scenario, clock and counts, which the two libraries share
DRIVER = "libcuda.so.1"
PERFWORKS = ("libnvperf_host.so", "libnvperf_target.so")  # NVIDIA ships them beside libcupti; empty here
_SOURCE = Path(__file__).parent
_FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g"),
    *("-fPIC", "-shared", "-pthread", "-Wl,-rpath,$ORIGIN"),
)


def functions() -> frozenset[str]:
    """Return the names of all CUDA and CUPTI functions that the fake exports."""
    text = (_SOURCE / "functions.def").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^FN\((\w+),", text, re.MULTILINE))


def build(directory: Path, *, soname: str = "libcupti.so.12", missing: Collection[str] = ()) -> Path:
    """Compile all libraries into `directory` and return that, for LD_LIBRARY_PATH.

    `soname` names the CUPTI library; `missing` names exported functions to leave out, as old versions do.
    The directory may be that of fake_nvml's `build`: one LD_LIBRARY_PATH then serves both.
    """
    unknown = set(missing) - functions()
    if unknown:
        raise ValueError(f"the fake never exports {', '.join(sorted(unknown))}")
    directory.mkdir(parents=True, exist_ok=True)
    hidden = "".join(f"{name}; " for name in sorted(missing))
    with tempfile.TemporaryDirectory(dir=directory) as name:
        work = Path(name)
        script = work / "exports.map"
        script.write_text(f"{{ global: cu*; local: {hidden}*; }};\n", encoding="utf-8")
        runtime = work / RUNTIME
        exports = f"-Wl,--version-script={script}"
        _compile(runtime, "runtime.c", "scenario.c")
        _compile(work / DRIVER, "cuda.c", exports, str(runtime))
        _compile(work / soname, "host.c", "sampling.c", "images.c", exports, str(runtime))
        for library in PERFWORKS:
            _compile(work / library, "-xc", os.devnull)
        for library in (RUNTIME, DRIVER, soname, *PERFWORKS):
            (work / library).replace(directory / library)
    return directory


def _compile(output: Path, *arguments: str) -> None:
    """Run the system's C compiler; its messages are part of the error."""
    command = ["cc", *_FLAGS, f"-Wl,-soname,{output.name}", "-o", str(output), *arguments]
    result = subprocess.run(command, cwd=_SOURCE, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"cc failed:\n{result.stderr}")


@dataclass(frozen=True)
class Stats:
    """What the libraries noticed about their callers, over all processes of a scenario."""

    reloads: int  # rewrites that a process picked up
    scenario_errors: int  # rewrites that could not be parsed (the old scenario stays)
    dead_object_uses: int  # objects used after their end; the process was aborted
    live_samplers: int  # PM sampling objects enabled and not disabled (killed processes leave theirs)
    live_hosts: int  # profiler host objects initialised and not deinitialised (as above)
    windows: Mapping[int, int]  # device: windows decoded
    lost_windows: Mapping[int, int]  # device: windows that overflowed the hardware buffer
    hangs: int  # calls that entered a `hang` fault
    max_inside: Mapping[int, int]  # device: most threads of one process at once in its calls


class CuptiScenario(ScenarioFile):
    """A scenario file and the call counts of the processes that run with it.

    Its files differ in name from those of fake_nvml's `Scenario`: both may live in one directory.
    """

    def __init__(self, directory: Path, library: Path, text: str) -> None:
        """Write the scenario into `directory`, for the libraries built in `library`."""
        self._locks = directory / "cupti_locks"
        self._locks.mkdir(parents=True, exist_ok=True)
        self._library = library
        checker = (library / RUNTIME, "fake_cupti_check")
        super().__init__(directory / "cupti_scenario.txt", directory / "cupti_calls.bin", checker, text)

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that make a process load the fakes with this scenario."""
        return {
            "LD_LIBRARY_PATH": str(self._library),
            "FAKE_CUPTI_SCENARIO": str(self.path),
            "FAKE_CUPTI_CALLS": str(self._calls),
            "FAKE_CUPTI_LOCKS": str(self._locks),
        }

    @contextmanager
    def other_owner(self, device: int) -> Iterator[None]:
        """Own the device's counters meanwhile, as another profiler does: CUPTI is then busy."""
        with (self._locks / f"gpu{device}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield

    def stats(self) -> Stats:
        """Return what the libraries noticed about their callers so far."""
        found = self.noticed()

        def total(name: str) -> int:
            return found.get(name, (0, {}))[0]

        def by_device(name: str) -> dict[int, int]:
            return found.get(name, (0, {}))[1]

        return Stats(
            reloads=total("reloads"),
            scenario_errors=total("scenario_errors"),
            dead_object_uses=total("dead_object_uses"),
            live_samplers=total("live_samplers"),
            live_hosts=total("live_hosts"),
            windows=by_device("windows"),
            lost_windows=by_device("lost_windows"),
            hangs=total("hangs"),
            max_inside=by_device("max_inside"),
        )
