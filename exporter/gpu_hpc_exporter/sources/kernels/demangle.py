"""Demangled names of kernels, from a worker process that may be lost at any name."""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.sources.kernels.demangle_worker import MAX_OUTPUT

MAX_NAMES: Final = 32_768
"""Names whose answers are kept; the oldest are forgotten."""
MAX_INPUT: Final = 8_192
"""Longer names are not demangled."""
_PATIENCE_S: Final = 0.5
_IDLE_S: Final = 30.0
_MAX_LOST: Final = 10
"""Workers that one user's names may cost; later ones of that user are not demangled."""
_MAX_OWNERS: Final = 1024
_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH",)
"""Some Pythons do not start without it."""
_LENGTH: Final = struct.Struct("<I")
_WORKER: Final = Path(__file__).with_name("demangle_worker.py")


class Demangler:
    """Answers from what it keeps, else from its worker, which lives while there are new names. Belongs to one thread.

    `finish` makes of a name, given as mangled and demangled (or "" where it could not be), what is kept of it.
    """

    def __init__(
        self,
        finish: Callable[[str, str], str],
        worker: Path = _WORKER,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._finish = finish
        self._worker = worker
        self._clock = clock
        self._known: dict[bytes, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._used_s = 0.0
        self._lost_by: dict[int, int] = {}
        self.lost = 0
        """Names so far with which a worker was lost: by their making, or since it does not start at all."""

    def __len__(self) -> int:
        """How many names are kept."""
        return len(self._known)

    def known(self, name: bytes) -> str | None:
        """What is kept of a name; None where it has yet to be looked at."""
        return self._known.get(name)

    def ask(self, name: bytes, owner: int = 0) -> str:
        """What is to be kept of a name that a file of this user has; takes half a second at most."""
        known = self._known.get(name)
        if known is None:
            plain = name.decode("utf-8", "replace")
            text = self._demangled(name, owner) if name.startswith(b"_Z") else plain
            known = self._finish(plain, text)
            if len(self._known) >= MAX_NAMES:
                del self._known[next(iter(self._known))]
            self._known[name] = known
        return known

    def rest(self) -> None:
        """End a worker that nobody has needed for a while."""
        if self._process is not None and self._clock() - self._used_s > _IDLE_S:
            self.close()

    def close(self) -> None:
        """End the worker, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _demangled(self, name: bytes, owner: int) -> str:
        name = name.partition(b".")[0]  # what compilers append to copies of a function is no part of its name
        if len(name) > MAX_INPUT or b"\0" in name or self._lost_by.get(owner, 0) >= _MAX_LOST:
            return ""
        try:
            answer = self._exchange(name)
        except (OSError, EOFError):
            self.close()
            self.lost += 1
            if len(self._lost_by) >= _MAX_OWNERS:
                self._lost_by.clear()
            self._lost_by[owner] = self._lost_by.get(owner, 0) + 1
            return ""
        return answer.decode("utf-8", "replace")

    def _exchange(self, name: bytes) -> bytes:
        """Ask the worker. Raises OSError or EOFError where it is lost."""
        self._used_s = self._clock()
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603  our own file, by this Python
                [sys.executable, "-I", "-S", str(self._worker)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise EOFError
        # A pipe takes far more than one name at once, so that writing never waits.
        stdin.write(_LENGTH.pack(len(name)) + name)
        deadline = time.monotonic() + _PATIENCE_S
        (length,) = _LENGTH.unpack(_read(stdout.fileno(), _LENGTH.size, deadline))
        if length > MAX_OUTPUT:
            raise EOFError
        return _read(stdout.fileno(), length, deadline)


def _read(descriptor: int, size: int, deadline: float) -> bytes:
    """Exactly so many bytes. Raises EOFError where they do not come in time, or not at all."""
    data = b""
    while len(data) < size:
        wait_s = deadline - time.monotonic()
        if wait_s <= 0 or not select.select([descriptor], [], [], wait_s)[0]:
            raise EOFError
        more = os.read(descriptor, size - len(data))
        if not more:
            raise EOFError
        data += more
    return data
