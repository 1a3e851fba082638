"""NVIDIA's device files: those that this process and its children hold, each of which keeps a GPU from being reset.

And what is wrong with them where the driver cannot be opened.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Final

_DEVICE: Final = re.compile(r"/dev/nvidia[^\s]*")
"""Also below another root, as in a driver container, and with ` (deleted)` behind it."""
_PID: Final = re.compile(rb"(?<!\S)[0-9]{1,10}(?!\S)")


def device_problem(root: Path = Path("/")) -> str:
    """The first of the device files that is missing or may not be opened, and why; "" where all are well.

    Also "" where the kernel module is not loaded, or hidden: then there need be none.
    """
    if not (root / "proc/driver/nvidia/version").exists():
        return ""
    control = root / "dev/nvidiactl"
    try:
        os.close(os.open(control, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except FileNotFoundError:
        return "/dev/nvidiactl is not there"
    except OSError as error:
        return f"/dev/nvidiactl: {error.strerror}"
    # Not opened: that would wake up a GPU which nobody uses.
    gpus = sorted((root / "dev").glob("nvidia[0-9]*"))
    if not gpus:
        return "/dev/nvidia0 is not there"
    denied = next((gpu for gpu in gpus if not os.access(gpu, os.R_OK | os.W_OK)), None)
    return f"/dev/{denied.name}: {os.strerror(errno.EACCES)}" if denied else ""


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
