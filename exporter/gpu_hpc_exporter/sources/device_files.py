"""Which of NVIDIA's device files this process and its children hold: each one keeps a GPU from being reset."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

_DEVICE: Final = re.compile(r"/dev/nvidia[^\s]*")
"""Also below another root, as in a driver container, and with ` (deleted)` behind it."""
_PID: Final = re.compile(rb"(?<!\S)[0-9]{1,10}(?!\S)")


def held_here(proc: Path = Path("/proc")) -> set[str]:
    """Device files that this process has open or mapped, such as "/dev/nvidia0"."""
    return _files(proc / "self")


def held_by_children(proc: Path = Path("/proc")) -> set[str]:
    """The same for its children and theirs, such as "/dev/nvidia0 (process 4711)".

    A child whose files we may not see, since it has more privilege, is named itself.
    """
    held = set()
    for pid in _descendants(proc):
        try:
            held |= {f"{name} (process {pid})" for name in _files(proc / str(pid))}
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        except PermissionError:
            held.add(f"whatever process {pid} has open")
    return held


def _files(process: Path) -> set[str]:
    """Raises OSError where the process is gone or its files are not ours to see."""
    found = set()
    for number in os.listdir(process / "fd"):  # noqa: PTH208  names are enough
        with suppress(FileNotFoundError):  # closed since it was listed
            found |= set(_DEVICE.findall((process / "fd" / number).readlink().as_posix()))
    return found | set(_DEVICE.findall((process / "maps").read_text("utf-8", "replace")))


def _descendants(proc: Path) -> set[int]:
    """Children, and theirs: a wrapper's child is what holds the GPU."""
    found: set[int] = set()
    waiting = _children(proc / "self")
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting |= _children(proc / str(pid))
    return found


def _children(process: Path) -> set[int]:
    """Children of every thread; empty on a kernel that does not list them."""
    found: set[int] = set()
    for task in (process / "task").glob("*/children"):
        with suppress(OSError):  # the thread has ended
            found |= {int(pid) for pid in _PID.findall(task.read_bytes())}
    return found
