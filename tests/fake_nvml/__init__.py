"""A fake NVIDIA driver library, driven by a scenario file, for tests of real processes.

`build` compiles it, `Scenario` writes what it shall say and reads back how it was called.
README.md describes the scenario language.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fake_library import ScenarioError, ScenarioFile

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["Scenario", "ScenarioError", "Stats", "build", "functions"]

LIBRARY = "libnvidia-ml.so.1"
_SOURCE = Path(__file__).parent
_FLAGS = (
    *("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-g"),
    *("-fPIC", "-shared", "-Wl,-soname,libnvidia-ml.so.1", "-pthread"),
)


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
    gpm_together: int  # GPM calls while another thread was in one, of whichever device, and did not hang
    fields_together: int  # the same of nvmlDeviceGetFieldValues


class Scenario(ScenarioFile):
    """A scenario file and the call counts of the processes that run with it."""

    def __init__(self, directory: Path, library: Path, text: str) -> None:
        """Write the scenario into `directory`, for the library built in `library`."""
        directory.mkdir(parents=True, exist_ok=True)
        self._library = library
        checker = (library / LIBRARY, "fake_nvml_check")
        super().__init__(directory / "scenario.txt", directory / "calls.bin", checker, text)

    @property
    def env(self) -> dict[str, str]:
        """The environment variables that make a process load the fake with this scenario."""
        return {
            "LD_LIBRARY_PATH": str(self._library),
            "FAKE_NVML_SCENARIO": str(self.path),
            "FAKE_NVML_CALLS": str(self._calls),
        }

    def stats(self) -> Stats:
        """Return what the library noticed about its callers so far."""
        found = self.noticed()

        def total(name: str) -> int:
            return found.get(name, (0, {}))[0]

        def peaks(name: str) -> dict[int, int]:
            return found.get(name, (0, {}))[1]

        return Stats(
            reloads=total("reloads"),
            scenario_errors=total("scenario_errors"),
            freed_sample_uses=total("freed_sample_uses"),
            stale_handles=total("stale_handles"),
            live_samples=total("live_samples"),
            hangs=total("hangs"),
            max_inside=peaks("max_inside"),
            gpm_max_inside=peaks("gpm_max_inside"),
            gpm_together=total("gpm_together"),
            fields_together=total("fields_together"),
        )
