"""Demangled names of kernels, from a worker process that may be lost at any name."""

from __future__ import annotations

import logging
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.sources.kernels.demangle_worker import MAX_OUTPUT

log = logging.getLogger(__name__)

MAX_NAMES: Final = 32_768
"""Names whose answers are kept; the oldest are forgotten."""
MAX_INPUT: Final = 8_192
"""Longer names are not demangled."""
_PATIENCE_S: Final = 0.5
_IDLE_S: Final = 30.0
_SILENCE_S: Final = 600.0
"""So long names wait for a worker that does not start or answer, as where no process can be had."""
_MAX_LOST: Final = 10
"""Workers that one user's names may cost in an hour; later ones of that user are not demangled."""
_LOSS_S: Final = 3600.0
_MAX_OWNERS: Final = 1024
_KEPT_VARIABLES: Final = ("LD_LIBRARY_PATH",)
"""Some Pythons do not start without it."""
_LENGTH: Final = struct.Struct("<I")
_WORKER: Final = Path(__file__).with_name("demangle_worker.py")


@dataclass(slots=True)
class _Question:
    """What the worker was asked, for whom, and how much of the answer has come."""

    name: bytes
    owner: int
    answer: bytearray = field(default_factory=bytearray)


class Demangler:
    """Answers from what it keeps, else from its worker, which lives while there are new names. Belongs to one thread.

    `finish` makes of a name, given as mangled and demangled (or "" where it could not be), what is kept of it.

    A worker that ends at a name costs that name's user, since names are what ends it. One that is slow costs nobody: it
    has one question, which stays open, and the names wait.
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
        self._open: _Question | None = None
        self._used_s = 0.0
        self._silent_since_s: float | None = None
        self._has_told = False
        self._lost_at: dict[int, list[float]] = {}
        self.lost = 0
        """Names so far at which a worker ended: by their making, or since it does not start at all."""

    def __len__(self) -> int:
        """How many names are kept."""
        return len(self._known)

    def known(self, name: bytes) -> str | None:
        """What is kept of a name; None where it has yet to be looked at."""
        return self._known.get(name)

    def ask(self, name: bytes, owner: int = 0) -> str | None:
        """What is to be made of a name that a file of this user has; takes half a second at most.

        None where there is no answer yet: it is to be asked for again. What is made of a name that nobody could try to
        demangle is not kept, so that it is tried for the next who asks.
        """
        known = self._known.get(name)
        if known is not None:
            return known
        if not name.startswith(b"_Z"):
            return self._keep(name, name.decode("utf-8", "replace"))
        mangled = _mangled(name)
        if len(mangled) > MAX_INPUT or b"\0" in mangled:
            return self._keep(name, "")
        self._collect(0)
        if name not in self._known and len(self._losses(owner)) >= _MAX_LOST:
            return self._finished(name, "")
        if self._open is None and name not in self._known:
            self._put(name, owner)
            self._collect(_PATIENCE_S)
        known = self._known.get(name)
        return self._finished(name, "") if known is None and self._is_silent() else known

    def rest(self) -> None:
        """End a worker that nobody has needed for a while, or that has not answered for as long."""
        if self._process is not None and self._clock() - self._used_s > _IDLE_S:
            self.close()

    def close(self) -> None:
        """End the worker, if there is one."""
        process, self._process, self._open = self._process, None, None
        if process is not None:
            process.kill()
            process.communicate()

    def _keep(self, name: bytes, text: str) -> str:
        known = self._finished(name, text)
        if len(self._known) >= MAX_NAMES:
            del self._known[next(iter(self._known))]
        self._known[name] = known
        return known

    def _finished(self, name: bytes, text: str) -> str:
        return self._finish(name.decode("utf-8", "replace"), text)

    def _losses(self, owner: int) -> list[float]:
        """When workers ended at names of this user, within the last hour."""
        oldest_s = self._clock() - _LOSS_S
        return [at_s for at_s in self._lost_at.get(owner, ()) if at_s > oldest_s]

    def _charge(self, owner: int) -> None:
        self.lost += 1
        if len(self._lost_at) >= _MAX_OWNERS:
            self._lost_at.clear()
        self._lost_at[owner] = [*self._losses(owner), self._clock()]

    def _is_silent(self) -> bool:
        """Whether nothing has been answered for so long that names cannot wait any more. Told once."""
        if self._silent_since_s is None or self._clock() - self._silent_since_s < _SILENCE_S:
            return False
        if not self._has_told:
            self._has_told = True
            log.warning("kernels' names cannot be demangled: the process that does it does not start or answer")
        return True

    def _put(self, name: bytes, owner: int) -> None:
        """Ask the worker. One that does not start, or has ended without a question, is nobody's fault."""
        now_s = self._clock()
        if self._silent_since_s is None or now_s - self._used_s > 2 * _IDLE_S:  # nobody has asked meanwhile
            self._silent_since_s = now_s
        self._used_s = now_s
        try:
            if self._process is None:
                self._process = self._start()
            if self._process.stdin is not None:
                # A pipe takes far more than one name at once, so that writing never waits.
                mangled = _mangled(name)
                self._process.stdin.write(_LENGTH.pack(len(mangled)) + mangled)
                self._open = _Question(name, owner)
        except OSError:
            self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  our own file, by this Python
            [sys.executable, "-I", "-S", str(self._worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ},
        )

    def _collect(self, patience_s: float) -> None:
        """Take the answer to the open question, if it comes in time. That the worker ends is an answer."""
        question, process = self._open, self._process
        if question is None or process is None or process.stdout is None:
            return
        try:
            text = _read(process.stdout.fileno(), question.answer, time.monotonic() + patience_s)
        except (OSError, EOFError):
            self.close()
            self._charge(question.owner)
            text = b""
        if text is not None:
            self._open = self._silent_since_s = None
            self._keep(question.name, text.decode("utf-8", "replace"))


def _mangled(name: bytes) -> bytes:
    """Without what compilers append to copies of a function, which is no part of its name."""
    return name.partition(b".")[0]


def _read(descriptor: int, answer: bytearray, deadline: float) -> bytes | None:
    """The text of an answer, of which some may have come before; None where the rest does not come in time.

    Raises EOFError where there will be none.
    """
    while True:
        size = _LENGTH.size
        if len(answer) >= size:
            (length,) = _LENGTH.unpack_from(answer)
            if length > MAX_OUTPUT:
                raise EOFError
            size += length
            if len(answer) >= size:
                return bytes(answer[_LENGTH.size : size])
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return None
        more = os.read(descriptor, size - len(answer))
        if not more:
            raise EOFError
        answer += more
