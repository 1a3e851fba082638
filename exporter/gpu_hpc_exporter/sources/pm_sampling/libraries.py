"""Where CUPTI is: NVIDIA's wheels in this Python, CUDA_HOME, the loader's path; the newest that fits the driver."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
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
_CUDA_FOLDERS: Final = ("extras/CUPTI/lib64", "lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A CUPTI that might do; `version` None where only loading it tells."""

    path: str
    version: Version | None


def version_of_api(number: int) -> Version:
    """The CUDA release of what cuptiGetVersion answers; (0, 0) for one before PM sampling."""
    if number >= 100_000:
        return number // 10_000, number // 100 % 100
    return _API_VERSIONS.get(number, (0, 0))


def choose_library(driver: Version, environment: Mapping[str, str] = os.environ) -> Candidate:
    """The best library for a driver that runs CUDA up to `driver`. Raises LibraryUnusableError.

    A library newer than the driver's CUDA answers errors, one before 12.9 lacks most counters; so: the newest
    between, else the newest from 12.6 on, else one whose version nobody tells.
    """
    found = list(_candidates(environment))
    fitting = [(c.version, c) for c in found if c.version is not None and OLDEST <= c.version <= driver]
    full = [pair for pair in fitting if pair[0] >= FULL_SETS_FROM]
    # Of equally new ones the first found: wheels before CUDA_HOME before the loader's.
    for choice in (full, fitting):
        if choice:
            newest = max(version for version, _ in choice)
            return next(candidate for version, candidate in choice if version == newest)
    untold = [candidate for candidate in found if candidate.version is None]
    if untold:
        return untold[0]
    seen = ", ".join(f"{c.path} is {c.version[0]}.{c.version[1]}" for c in found if c.version)
    raise LibraryUnusableError(
        f"no CUPTI between 12.6 and the driver's {driver[0]}.{driver[1]} was found"
        f"{f' ({seen})' if seen else ''}: pip install 'gpu-hpc-exporter[cupti]', or set pm_sampling.library"
    )


def _candidates(environment: Mapping[str, str]) -> Iterator[Candidate]:
    yield from _wheels()
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(variable):
            yield from _in_cuda_home(Path(environment[variable]))
    yield from _in_cuda_home(Path("/usr/local/cuda"))
    for folder in environment.get("LD_LIBRARY_PATH", "").split(":"):
        if folder:
            yield from (Candidate(str(file), None) for file in _libraries(Path(folder)))


def _wheels() -> Iterator[Candidate]:
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"] or ""
        if not _WHEELS.fullmatch(name.lower().replace("_", "-")):
            continue
        for file in distribution.files or ():
            if _LIBRARY.fullmatch(file.name):
                yield Candidate(str(distribution.locate_file(file)), _version(distribution.version))


def _in_cuda_home(root: Path) -> Iterator[Candidate]:
    version = None
    try:
        tools = json.loads((root / "version.json").read_text("utf-8"))
        version = _version(str(tools["cuda_cupti"]["version"]))
    except (OSError, ValueError, KeyError, TypeError):
        version = None  # an old or cut-down toolkit: the library itself will tell
    for folder in _CUDA_FOLDERS:
        for file in _libraries(root / folder):
            yield Candidate(str(file), version)
            return


def _libraries(folder: Path) -> Iterator[Path]:
    try:
        files = sorted(folder.iterdir(), reverse=True)
    except OSError:
        return
    yield from (file for file in files if _LIBRARY.fullmatch(file.name))


def _version(text: str) -> Version | None:
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None
