"""A process as in a pod with `hostUsers: false`: in a user namespace, with a directory mounted id-mapped.

Run as a file: python tests/pod_process.py DIRECTORY. It says on stdout whether the kernel lets us make one ("running
PID" or "refused: why"), leaves an agent's file in the directory as user 0 of its namespace, and ends with stdin.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

from agent_files import AgentWriter

HOST_UID: Final = 165_536
"""Who user 0 of the pod is on the host."""
COUNT: Final = 65_536
_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_REC_PRIVATE: Final = 0x4000 | 0x40000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442
_AT_FDCWD, _AT_EMPTY_PATH, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = -100, 0x1000, 1, 4
_MOUNT_ATTR_IDMAP: Final = 0x100000

libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns"))


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def main(directory: Path) -> None:
    """Make the namespaces, say so, and wait."""
    try:
        said = f"running {_make(directory)}"
    except OSError as error:
        said = f"refused: {error}"
    sys.stdout.write(f"{said}\n")
    sys.stdout.flush()
    if said.startswith("running"):
        sys.stdin.read()
    os._exit(0)  # which ends the pipe that the child waits at


def _make(directory: Path) -> int:
    """Do from outside what a runtime does; the process's pid. Raises OSError."""
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    _check(libc.mount(None, b"/", None, _MS_REC_PRIVATE, None), "mount")
    ours, theirs = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(theirs[1])
        _be_inside(directory, ours[1], theirs[0])
    os.close(ours[1])
    _wait_for(b"u", ours[0])
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{child}/{name}").write_text(f"0 {HOST_UID} {COUNT}\n")
    _mount(directory, child)
    os.write(theirs[1], b"m")
    _wait_for(b"f", ours[0])
    return child


def _wait_for(word: bytes, descriptor: int) -> None:
    if os.read(descriptor, 1) != word:
        raise OSError(f"the process inside ended before {word!r}")


def _mount(directory: Path, child: int) -> None:
    with Path(f"/proc/{child}/ns/user").open() as userns:
        tree = _check(libc.syscall(_OPEN_TREE, _AT_FDCWD, bytes(directory), _OPEN_TREE_CLONE), "open_tree")
        attributes = _MountAttributes(_MOUNT_ATTR_IDMAP, 0, 0, userns.fileno())
        size = ctypes.sizeof(attributes)
        _check(libc.syscall(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, ctypes.byref(attributes), size), "mount_setattr")
        _check(
            libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, bytes(directory), _MOVE_MOUNT_F_EMPTY_PATH), "move_mount"
        )


def _be_inside(directory: Path, says: int, hears: int) -> None:
    """The process; it never returns."""
    try:
        _check(libc.unshare(_CLONE_NEWUSER), "unshare")
        os.write(says, b"u")
        os.read(hears, 1)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        stat = Path("/proc/self/stat").read_text()
        writer = AgentWriter(directory, os.getpid(), int(stat.rpartition(")")[2].split()[19]))
        os.write(says, b"f")
        os.read(hears, 1)
        del writer
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
