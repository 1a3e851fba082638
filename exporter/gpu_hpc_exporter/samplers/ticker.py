"""A thread with a steady beat that can be stopped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from gpu_hpc_exporter.model import NS

log = logging.getLogger(__name__)


class Ticker:
    """Calls `tick` every `period_ns` in a daemon thread until it answers False, raises, or `stop`; it may change that.

    A tick that overruns is followed by the next whole beat: missed ones are not made up for. `last` is
    called in the thread as its last act, then, when it has ended for everybody, `on_end`.
    """

    def __init__(
        self, name: str, period_ns: int, tick: Callable[[], bool], last: Callable[[], None], on_end: Callable[[], None]
    ) -> None:
        self.period_ns = period_ns
        self._tick = tick
        self._last = last
        self._on_end = on_end
        self.ended = False
        """Whether there will be no more ticks."""
        self._stopping = False
        # A daemon: a driver call that never returns must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; the first tick comes at once."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after the tick in progress."""
        self._stopping = True

    def join(self, timeout: float) -> bool:
        """Wait for the end; whether it came."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        due = time.monotonic_ns()
        try:
            while self._tick():
                due += self.period_ns
                now = time.monotonic_ns()
                if due <= now:
                    due += (now - due) // self.period_ns * self.period_ns + self.period_ns
                while now < due:
                    # Sleeping costs half of waiting for an event; a stop is seen within a quarter second.
                    time.sleep(min(due - now, NS // 4) / NS)
                    if self._stopping:
                        return
                    now = time.monotonic_ns()
        except Exception:
            log.exception("sampler %s ended by an unexpected error", self._thread.name)
        finally:
            self._end()

    def _end(self) -> None:
        try:
            self._last()
        finally:
            self.ended = True
            self._on_end()
