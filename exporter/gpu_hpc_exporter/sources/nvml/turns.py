"""Functions of the driver's library that one thread at a time may call, whichever the GPU.

NVIDIA's manual calls the library safe for threads. But with two GPUs, each sampled by its own thread, the process
died of a segmentation fault within seconds (two H200, driver 580.159.04), and others have seen processes and kernels
crash where GPM samples of different GPUs were taken at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PATIENCE_S: Final = 1.0
"""Who has been inside for so long hangs in the kernel, and its GPU alone is to suffer. Less than a third of the time
after which a thread counts as hung: one that waits behind two others that do is not taken for a third."""


class Turns:
    """Lets one thread at a time inside; who hangs there is left behind, and the turn passes on."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._turn = threading.Lock()
        self._since_s = math.inf

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait for the turn, at most about as long as one of the others may take."""
        turn = self._wait()
        try:
            yield
        finally:
            if turn is self._turn:
                self._since_s = math.inf
            turn.release()

    def _wait(self) -> threading.Lock:
        while True:
            turn = self._turn
            if turn.acquire(timeout=self._patience_s):
                if turn is self._turn:
                    self._since_s = time.monotonic()
                    return turn
                turn.release()  # it came back from where it hung
            elif turn is self._turn and time.monotonic() - self._since_s >= self._patience_s:
                self._turn = threading.Lock()


GPM: Final = Turns()
"""nvmlGpm..."""
FIELDS: Final = Turns()
"""nvmlDeviceGetFieldValues."""
