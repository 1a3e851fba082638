"""Looks, in a thread of its own, at what libraries the processes on GPUs have loaded: seldom, slowly, and never again.

The files are read where the users keep them, on network file systems too: one that hangs costs the libraries of
processes that begin after that, and nothing else.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.model import Library
from gpu_hpc_exporter.sources.libraries import ProcessLibraries
from gpu_hpc_exporter.sources.procfs import PROC

log = logging.getLogger(__name__)

AGAIN_S: Final = 60.0
"""Frameworks load some libraries when they first use them: so long after the first look there is a last one."""
_SHARE: Final = 0.05
"""Of a core's time, while processes are being looked at."""
_JOIN_S: Final = 0.3

_Key = tuple[int, int]
"""Pid and start of a process."""


@dataclass(slots=True)
class _Process:
    """due_s: when to look at it next, None after the last look."""

    due_s: float | None = -math.inf
    libraries: tuple[Library, ...] = ()


class LibrarySampler:
    """Remembers the libraries of the processes that it was last asked for; of no others."""

    def __init__(self, root: Path = PROC, clock: Callable[[], float] = time.monotonic) -> None:
        self._reader = ProcessLibraries(root)
        self._clock = clock
        self._lock = threading.Lock()
        self._processes: dict[_Key, _Process] = {}
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="libraries", daemon=True)

    def refresh(self, processes: Mapping[int, int]) -> dict[int, tuple[Library, ...]]:
        """What is known of these processes, given as pid and start; they will be looked at. Answers at once."""
        with self._lock:
            before = self._processes
            self._processes = {key: before.get(key) or _Process() for key in processes.items()}
            if self._processes.keys() - before.keys():
                self._wake.set()
            return {pid: process.libraries for (pid, _), process in self._processes.items()}

    def start(self) -> None:
        """Begin in the background."""
        self._thread.start()

    def stop(self) -> bool:
        """End; False where the thread is stuck in what it reads."""
        self._stop.set()
        self._wake.set()
        if self._thread.ident is None:
            return True
        self._thread.join(_JOIN_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stop.wait(pause_s):
            began_s = time.thread_time()
            self._wake.clear()
            try:
                wait_s = self.tick()
            except Exception:
                log.exception("what a process has loaded cannot be told")
                wait_s = 0.0
            pause_s = (time.thread_time() - began_s) / _SHARE
            if wait_s != 0:
                self._wake.wait(wait_s)

    def tick(self) -> float | None:
        """Look at one process if one is due; how many seconds from now the next one is, None where there is none."""
        with self._lock:
            now_s = self._clock()
            due = [(process.due_s, key) for key, process in self._processes.items() if process.due_s is not None]
            if not due:
                return None
            due_s, key = min(due)
            if due_s > now_s:
                return due_s - now_s
            process = self._processes[key]
            process.due_s = now_s + AGAIN_S if due_s == -math.inf else None
        libraries = self._reader.read(*key)
        if libraries is not None:
            process.libraries = libraries
        return 0.0
