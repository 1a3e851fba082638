"""Starting, reading and ending the helper process."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.sources.pm_sampling.protocol import FrameReader, FromHelper, Order, encode

log = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 18
_MAX_LINE: Final = 400
_MAX_LINES: Final = 100
"""Lines of a helper's stderr that are logged, in all: what a library prints must not fill the log."""
_EXIT_S: Final = 0.8
"""An orderly end takes 0.1 s; the helper itself gives up after 0.4."""
_KILL_S: Final = 0.5
_LOOK_S: Final = 0.02
_REMOVED: Final = ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD", "LD_AUDIT")
"""Variables that would load foreign code into the helper."""
_NO_MPS: Final = "/nonexistent"
"""Where no MPS server listens: without the variable CUDA would look for one in /tmp/nvidia-mps."""


class HelperProcess:
    """A running helper. Belongs to one thread."""

    def __init__(self, command: Sequence[str], library: str, order: Order) -> None:
        """`command` is what to run in place of this Python, () for that. Raises OSError."""
        program = [*command] or [sys.executable, "-m", "gpu_hpc_exporter.pm_helper"]
        arguments = ["--library", library] if library else []
        self._process = subprocess.Popen(  # noqa: S603  the command is the administrator's
            [*program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # Ctrl-C is for the exporter, which then ends us; and what a wrapper starts is in our group.
            start_new_session=True,
            env=helper_environment(os.environ, [target.uuid for target in order.targets]),
            close_fds=True,
        )
        self._is_gone = False
        self._is_drained = False
        self._reader = FrameReader()
        self._selector = selectors.DefaultSelector()
        self._lines_left = _MAX_LINES
        self._line = b""
        if self._process.stdin is None or self._process.stdout is None or self._process.stderr is None:
            raise OSError("no pipes to the helper")
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        for pipe in (self._stdout, self._stderr):
            self._selector.register(pipe, selectors.EVENT_READ)
            os.set_blocking(pipe.fileno(), False)
        with suppress(BrokenPipeError):  # it has ended already: `read` will tell
            self._stdin.write(encode(order))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def read(self, timeout_s: float) -> list[FromHelper] | None:
        """Messages that came within `timeout_s`, perhaps none; None when the helper has ended.

        It has as soon as the process that we started has, though another may keep its stdout open: what the pipe
        holds by then is still read, once. Raises ProtocolError where what came is no message.
        """
        if self._is_drained:
            return None
        self._is_drained = self._process.poll() is not None
        ready = [key.fileobj for key, _ in self._selector.select(0 if self._is_drained else timeout_s)]
        if self._stderr in ready:
            self._log_lines()
        if self._stdout not in ready:
            return []
        data = self._stdout.read(_READ_BYTES)
        if data == b"":
            return None
        return list(self._reader.feed(data or b""))

    def end(self) -> bool:
        """End it, in an orderly way if it will; whether it and all that it started in its process group are gone.

        What holds the GPU's counters dies with it. Nothing can be read any more; it may be called again.
        """
        with suppress(BrokenPipeError):  # it had gone before it read the order
            self._stdin.close()
        if not self._wait(_EXIT_S):
            # It may run with more privilege than we have; or the last of it has just ended.
            with suppress(PermissionError, ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._wait(_KILL_S)
        if not self._stderr.closed:
            self._log_lines()
        self._selector.close()
        self._stdout.close()
        self._stderr.close()
        return self._is_gone

    def exit_text(self) -> str:
        """How it ended, for people."""
        status = self._process.poll()
        if status is None:
            return "is still running"
        return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def _log_lines(self) -> None:
        """Log what it and its libraries have written to stderr, line by line."""
        data = self._stderr.read(_READ_BYTES)
        if data == b"":
            with suppress(KeyError):  # unregistered before
                self._selector.unregister(self._stderr)
        *lines, self._line = (self._line + (data or b"")).split(b"\n")
        if len(self._line) > _MAX_LINE or data == b"":
            lines, self._line = [*lines, self._line], b""
        for line in lines:
            if line.strip() and self._lines_left > 0:
                self._lines_left -= 1
                log.info("helper %d: %s", self.pid, line[:_MAX_LINE].decode("utf-8", "replace"))

    def _wait(self, timeout_s: float) -> bool:
        """Whether the whole group is gone within that time. Once gone its number may be another's: never ask again."""
        deadline = time.monotonic() + timeout_s
        while not self._is_gone:
            self._is_gone = self._process.poll() is not None and not _group_lives(self.pid)
            if time.monotonic() >= deadline:
                break
            if not self._is_gone:
                time.sleep(_LOOK_S)
        return self._is_gone


def _group_lives(group: int) -> bool:
    """Whether any process of a group runs, whose leader was our child and has been waited for.

    A zombie does not: it holds nothing, and where nobody reaps orphans it stays for ever.
    """
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ends while it is looked at
            state, _, its_group = stat.read_bytes().rpartition(b")")[2].split()[:3]
            if int(its_group) == group and state not in (b"Z", b"X"):
                return True
    return False


def helper_environment(environment: Mapping[str, str], uuids: Sequence[str]) -> dict[str, str]:
    """The exporter's environment, less what injects code; CUDA shows just these GPUs, in the order of their slots."""
    kept = {name: value for name, value in environment.items() if name not in _REMOVED}
    kept["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    kept["CUDA_VISIBLE_DEVICES"] = ",".join(uuids)
    kept["CUDA_MPS_PIPE_DIRECTORY"] = _NO_MPS
    kept["MALLOC_ARENA_MAX"] = "1"  # each arena would keep memory of its own
    return kept
