"""Where CUPTI is: NVIDIA's wheels in this Python, CUDA_HOME, the loader's path; the newest that fits the driver."""

from __future__ import annotations

import csv
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.sources.cupti import LibraryUnusableError
from gpu_hpc_exporter.sources.pm_sampling.metric_sets import FULL_SETS_FROM, OLDEST

Version = tuple[int, int]
"""Major and minor of the CUDA release that a CUPTI came with."""

_WHEELS: Final = re.compile(r"nvidia-cuda-cupti(-cu\d+)?")
_LIBRARY: Final = re.compile(r"libcupti\.so\.1[2-9]")
_API_VERSIONS: Final[dict[int, Version]] = {24: (12, 6), 26: (12, 8), 27: (12, 9), 28: (12, 9)}
"""cuptiGetVersion before CUDA 13, which answers 10000 x major + 100 x minor (NVIDIA's cupti_version.h)."""
_TOOLKIT: Final = "/usr/local/cuda"
_TOOLKIT_FOLDERS: Final = ("extras/CUPTI/lib64", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib")
_TOOLKIT_DEPTH: Final = 4
"""So many folders up from its libraries, at most, a toolkit has its version.json."""
_SYSTEM_FOLDERS: Final = (f"/usr/lib/{platform.machine()}-linux-gnu", "/usr/lib64")
"""Where distributions put their own packages of CUPTI."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A CUPTI that might do; `version` None where only loading it tells all of it."""

    path: str
    version: Version | None

    @property
    def major(self) -> int:
        """CUDA's, as the file's name says."""
        return int(self.path.rpartition(".")[2])


def version_of_api(number: int) -> Version:
    """The CUDA release of what cuptiGetVersion answers; (0, 0) for one before PM sampling."""
    if number >= 100_000:
        return number // 10_000, number // 100 % 100
    return _API_VERSIONS.get(number, (0, 0))


def choose_library(driver: Version, environment: Mapping[str, str] = os.environ) -> Candidate:
    """The best library for a driver that runs CUDA up to `driver`. Raises LibraryUnusableError.

    That is the newest which is not newer than the driver's CUDA (it would answer errors), else one whose version
    nobody tells.
    """
    if driver < OLDEST:
        raise LibraryUnusableError(
            f"the driver runs CUDA up to {driver[0]}.{driver[1]}: PM sampling needs one that runs 12.6 or later"
        )
    found = list(dict.fromkeys(_candidates(environment)))
    fitting = [(c.version, c) for c in found if c.version is not None and OLDEST <= c.version <= driver]
    if fitting:
        # Of equally new ones the first found: wheels before CUDA_HOME before the loader's.
        return max(fitting, key=lambda pair: pair[0])[1]
    untold = [c for c in found if c.version is None and c.major <= driver[0]]
    if untold:
        return untold[0]
    seen = ", ".join(f"{c.path} is {'.'.join(map(str, c.version or (c.major,)))}" for c in found)
    raise LibraryUnusableError(
        f"no CUPTI between 12.6 and the driver's {driver[0]}.{driver[1]} was found"
        f"{f' ({seen})' if seen else ''}: pip install {_remedy(driver)}, or set pm_sampling.library"
    )


def _remedy(driver: Version) -> str:
    """What pip finds the right library for: the extra's is too new for some drivers."""
    if driver >= FULL_SETS_FROM:
        return "'gpu-hpc-exporter[cupti]'"
    return f"'nvidia-cuda-cupti-cu12>=12.6,<{driver[0]}.{driver[1] + 1}'"


def _candidates(environment: Mapping[str, str]) -> Iterator[Candidate]:
    yield from _wheels()
    for root in (environment.get("CUDA_HOME"), environment.get("CUDA_PATH"), _TOOLKIT):
        if root:
            yield from _first(Path(root) / folder for folder in _TOOLKIT_FOLDERS)
    for folder in (*environment.get("LD_LIBRARY_PATH", "").split(":"), *_SYSTEM_FOLDERS):
        if folder:
            yield from _in_folder(Path(folder))


def _wheels() -> Iterator[Candidate]:
    for distribution in metadata.distributions():
        try:
            found = list(_of_wheel(distribution))
        except (ValueError, TypeError, KeyError, OSError, csv.Error):
            continue  # any package's metadata may be broken, and most are none of ours
        yield from found


def _of_wheel(distribution: metadata.Distribution) -> Iterator[Candidate]:
    """The libraries of one package of this Python. What is raised for broken metadata is Python's own choice."""
    names, versions = (distribution.metadata.get_all(key) or [""] for key in ("Name", "Version"))
    if _WHEELS.fullmatch(str(names[0]).lower().replace("_", "-")):
        for file in distribution.files or ():
            path = Path(str(distribution.locate_file(file)))
            if _LIBRARY.fullmatch(file.name) and path.is_file():
                yield Candidate(str(path), _version(str(versions[0])))


def _first(folders: Iterable[Path]) -> Iterator[Candidate]:
    """What the first of the folders that has any has: those of a toolkit are links to one another."""
    for folder in folders:
        found = list(_in_folder(folder))
        if found:
            yield from found
            return


def _in_folder(folder: Path) -> Iterator[Candidate]:
    try:
        names = sorted((file.name for file in folder.iterdir()), reverse=True)
    except OSError:
        return
    libraries = [folder / name for name in names if _LIBRARY.fullmatch(name)]
    if libraries:
        version = _toolkit_version(folder)
        yield from (Candidate(str(file), version) for file in libraries)


def _toolkit_version(folder: Path) -> Version | None:
    """As the toolkit around the folder says; None for an old or cut-down one: loading the library will tell."""
    for root in (folder, *folder.parents)[:_TOOLKIT_DEPTH]:
        try:
            tools = json.loads((root / "version.json").read_text("utf-8"))
            return _version(str(tools["cuda_cupti"]["version"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return None


def _version(text: str) -> Version | None:
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])", text)
    return (int(match[1]), int(match[2])) if match else None
