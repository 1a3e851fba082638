"""Plays a recording into a sink on its own clock, in real time or faster."""

from __future__ import annotations

import threading
import time
from typing import Final

from gpu_hpc_exporter.model import NS, Sink, StateChange
from gpu_hpc_exporter.sources.replay import Recording, loop, time_of

_BREATHER: Final = 1000
_BREATHER_S: Final = 0.05
"""A recording that is shorter than it takes to play never catches up: rest after so many events."""


class ReplayClock:
    """A monotonic clock in nanoseconds that runs `speed` times as fast as the machine's, up to the next event.

    Where a machine cannot keep up, the recording plays more slowly: nothing of it is out of date for being late.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self._start_ns = self._next_ns = time.monotonic_ns()

    def __call__(self) -> int:
        return min(self._planned_ns(), self._next_ns)

    def run_to(self, next_ns: int) -> float:
        """Let the clock run up to the next event; in how many of the machine's seconds that is, 0 where it is late."""
        self._next_ns = next_ns
        return max(0.0, (next_ns - self._planned_ns()) / NS / self._speed)

    def _planned_ns(self) -> int:
        return self._start_ns + round((time.monotonic_ns() - self._start_ns) * self._speed)


class ReplaySampler:
    """Feeds a sink from a recording in an endless loop until stopped."""

    def __init__(self, sink: Sink, recording: Recording, clock: ReplayClock) -> None:
        self._sink = sink
        self._recording = recording
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)

    def start(self) -> None:
        """Begin playing in the background."""
        self._thread.start()

    def stop(self) -> None:
        """End playing."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        start_ns = self._clock()
        self._sink.put(StateChange(start_ns, "replay", "", "active", str(self._recording.path.name)))
        behind = 0
        for event in loop(self._recording, start_ns):
            ahead_s = self._clock.run_to(time_of(event))
            behind = 0 if ahead_s else behind + 1
            if behind % _BREATHER == _BREATHER - 1 and self._stop.wait(_BREATHER_S):
                return
            if ahead_s and self._stop.wait(ahead_s):
                return
            if self._stop.is_set():
                return
            self._sink.put(event)
