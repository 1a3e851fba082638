"""A copy of a /proc with processes of the test's own making."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path


class ProcTree:
    """A folder that looks like a host's /proc. Processes are as root's unless they are told otherwise."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.add(1, comm=b"systemd", cgroup="0::/init.scope\n")

    def add(
        self,
        pid: int,
        *,
        comm: bytes = b"python",
        cgroup: str = "0::/user.slice/user-1000.slice/session-3.scope\n",
        environ: Mapping[str, str] = {},
        uid: int = 1000,
        start_ticks: int = 100,
        command: bytes = b"python\0train.py\0",
    ) -> None:
        """A process, or another one in its place."""
        folder = self.root / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        fields = " ".join(["S", "1", *["0"] * 17, str(start_ticks), *["0"] * 30])
        (folder / "stat").write_bytes(f"{pid} (".encode() + comm + f") {fields}\n".encode())
        (folder / "comm").write_bytes(comm + b"\n")
        (folder / "status").write_text(f"Name:\tx\nPid:\t{pid}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{pid}\n")
        (folder / "cmdline").write_bytes(command)
        (folder / "cgroup").write_text(cgroup)
        (folder / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in environ.items()))

    def load(self, pid: int, *files: str) -> Path:
        """Map these files of a process's root, which is made if it has none; the folder that is its root."""
        folder = self.root / str(pid)
        (folder / "root").mkdir(exist_ok=True)
        with (folder / "maps").open("ab") as maps:
            for number, file in enumerate(files, 1):
                for flags in ("r--p", "r-xp"):
                    line = f"7f{number:010x}-7f{number + 1:010x} {flags} 00000000 00:2c {number:<26}{file}\n"
                    maps.write(line.encode("utf-8", "surrogateescape"))
        return folder / "root"

    def remove(self, *pids: int) -> None:
        """Processes that have ended."""
        for pid in pids:
            shutil.rmtree(self.root / str(pid))
