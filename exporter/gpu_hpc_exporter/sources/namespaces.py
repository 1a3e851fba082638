"""A process's numbers in its own namespaces, as its host's /proc tells them.

A pod with `hostUsers: false` runs in a user namespace: its user 0 is, say, 65536 on the host. Its volumes are mounted
id-mapped, so that what it writes there belongs on the host to the number that the user has inside: 0.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.sources.procfs import PROC, namespace_pids_of, open_folder, read_whole, start_ticks_of

_MAX_MAP: Final = 32 << 10
"""The kernel takes up to 340 lines, of 33 bytes each."""
_MAX_MOUNTS: Final = 1 << 20
_EXTENT: Final = re.compile(rb"^\s*([0-9]{1,10})\s+([0-9]{1,10})\s+([0-9]{1,10})$", re.MULTILINE)
_MOUNT: Final = re.compile(rb"^[0-9]+ [0-9]+ ([0-9]{1,4}):([0-9]{1,7}) \S+ \S+ (\S+) ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Namespaces:
    """What a process is inside.

    pid: in the innermost PID namespace. users: first number inside, first outside, and how many, of each extent of its
    user namespace; () for our own. idmapped: devices (st_dev) of file systems that it has mounted id-mapped.
    """

    pid: int
    users: tuple[tuple[int, int, int], ...] = ()
    idmapped: frozenset[int] = frozenset()

    def owner_on(self, device: int, uid: int) -> int | None:
        """To whom a file on this device belongs that the process made by way of an id-mapped mount, being `uid` here.

        None where it has no such mount, or is in our own user namespace.
        """
        if device not in self.idmapped:
            return None
        return next((inside + uid - outside for inside, outside, n in self.users if 0 <= uid - outside < n), None)


def read_namespaces(pid: int, start_ticks: int, root: Path = PROC) -> Namespaces | None:
    """Those of the process with this start time; None where it has ended."""
    try:
        with open_folder(root / str(pid)) as folder:
            if start_ticks_of(folder) != start_ticks:
                return None
            pids = namespace_pids_of(folder)
            users = _users(folder)
            return Namespaces(pids[-1] if pids else pid, users, _idmapped(folder) if users else frozenset())
    except OSError:
        return None


def _users(folder: int) -> tuple[tuple[int, int, int], ...]:
    """A map that is the same as ours is our own namespace's, whose numbers are what we see."""
    try:
        text = read_whole(folder, "uid_map", _MAX_MAP)
    except OSError:  # a kernel without user namespaces
        return ()
    extents = tuple((int(inside), int(outside), int(n)) for inside, outside, n in _EXTENT.findall(text))
    return () if extents == _own_users() else extents


def _own_users() -> tuple[tuple[int, int, int], ...]:
    try:
        text = (PROC / "self/uid_map").read_bytes()
    except OSError:
        return ()
    return tuple((int(inside), int(outside), int(n)) for inside, outside, n in _EXTENT.findall(text))


def _idmapped(folder: int) -> frozenset[int]:
    try:
        text = read_whole(folder, "mountinfo", _MAX_MOUNTS)
    except OSError:
        return frozenset()
    found = _MOUNT.findall(text)
    return frozenset(
        os.makedev(int(major), int(minor)) for major, minor, how in found if b"idmapped" in how.split(b",")
    )
