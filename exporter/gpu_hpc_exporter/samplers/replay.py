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
    """A monotonic clock in nanoseconds that runs `speed` times as fast as the machine's."""

    def __init__(self, speed: float = 1.0) -> None:
        self._speed = speed
        self._start_ns = time.monotonic_ns()

    def __call__(self) -> int:
        return self._start_ns + round((time.monotonic_ns() - self._start_ns) * self._speed)

    def real_seconds(self, replayed_ns: int) -> float:
        """How long a span of replayed time lasts, in seconds of the machine's clock."""
        return replayed_ns / NS / self._speed


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
            ahead_ns = time_of(event) - self._clock()
            behind = 0 if ahead_ns > 0 else behind + 1
            if behind % _BREATHER == _BREATHER - 1 and self._stop.wait(_BREATHER_S):
                return
            if ahead_ns > 0 and self._stop.wait(self._clock.real_seconds(ahead_ns)):
                return
            if self._stop.is_set():
                return
            self._sink.put(event)
