"""Files in the agents' directory that are no honest agent's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, cycle
from pathlib import Path
from typing import Final

from agent_files import AgentWriter
from gpu_hpc_exporter.sources.kernels import layout

TORN: Final = "torn"
TORN_S: Final = 40.0
"""Until the reader has looked three times and given a torn file up."""
OTHERS_S: Final = 20.0
"""Until it has looked at any other."""
_PID: Final = 4_000_000
"""Above those of jobs."""


class HostileFiles:
    """Makes one after the other, each for another reason to be rejected."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._numbers = count()
        self._kinds = cycle((_unknown_magic, _wrong_size, _symlink, _not_regular, _lying, _torn))

    def make(self, *, has_time: bool) -> tuple[str, float, Callable[[], None]]:
        """The reason, after how long it has been looked at, and what removes it. `has_time`: for one that is torn."""
        kind = next(self._kinds)
        if kind is _torn and not has_time:
            kind = next(self._kinds)
        path = self._directory / f"{_PID + next(self._numbers)}-100-bad.shm"
        steps = kind(path)
        reason = next(steps)

        def remove() -> None:
            for _ in steps:
                raise AssertionError
            with suppress(FileNotFoundError):
                path.unlink()

        return reason, TORN_S if kind is _torn else OTHERS_S, remove


def _unknown_magic(path: Path) -> Iterator[str]:
    path.write_bytes(os.urandom(layout.HEADER_SIZE))
    yield "unknown_magic"


def _wrong_size(path: Path) -> Iterator[str]:
    path.write_bytes(layout.MAGIC)
    yield "wrong_size"


def _symlink(path: Path) -> Iterator[str]:
    path.symlink_to("/etc/passwd")
    yield "symlink"


def _not_regular(path: Path) -> Iterator[str]:
    os.mkfifo(path)
    yield "not_regular"


def _lying(path: Path) -> Iterator[str]:
    writer = AgentWriter(path.parent, _PID, name=path.name)
    writer.records[0] = 1 << 61
    writer.publish()
    yield "lying"
    writer.end()


def _torn(path: Path) -> Iterator[str]:
    writer = AgentWriter(path.parent, _PID, name=path.name)
    writer.begin()
    yield TORN
    writer.end()
