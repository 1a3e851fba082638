"""The GPU's clock in terms of CLOCK_MONOTONIC, from nothing but when windows were seen."""

from __future__ import annotations

from collections import deque
from typing import Final

_MIN_MEMORY: Final = 16
_MAX_MEMORY: Final = 64
_NS_PER_MEMORY: Final = 300_000
"""So many decodes are remembered that clocks which drift apart by 100 ppm do so by less than a window meanwhile."""
_ODD: Final = 2
"""So many of them may look too new, held up before they read the windows, and as many too old, since one was lost."""


class DeviceClock:
    """Maps the GPU's time stamps onto CLOCK_MONOTONIC, to about a quarter of a window.

    The newest window that a decode delivers ended before the decode began, and not longer ago than a window lasts:
    of all differences seen the smallest are just above the truth, and the largest less a window just below it. Once
    settled the offset stays what it is, so that windows stay back to back, until the clocks have drifted apart by more
    than a quarter of a window; then it moves by that.
    """

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._step_ns = interval_ns // 4
        self._memory = min(max(interval_ns // _NS_PER_MEMORY, _MIN_MEMORY), _MAX_MEMORY)
        self._seen: deque[int] = deque(maxlen=self._memory)
        self._offset_ns: int | None = None

    @property
    def settled(self) -> bool:
        """Whether time stamps can be mapped."""
        return self._offset_ns is not None

    def observe(self, device_ns: int, monotonic_ns: int) -> None:
        """A window that ended at `device_ns` was there at `monotonic_ns`."""
        self._seen.append(monotonic_ns - device_ns)
        if self._offset_ns is None or len(self._seen) < self._memory:
            return
        ordered = sorted(self._seen)
        nearest = (ordered[_ODD] + ordered[-1 - _ODD] - self._interval_ns) // 2
        if abs(nearest - self._offset_ns) > self._interval_ns * 5 // 16:
            self._offset_ns += self._step_ns if nearest > self._offset_ns else -self._step_ns

    def settle(self) -> None:
        """Take the best guess so far for the truth; there must be one."""
        self._offset_ns = min(self._seen)

    def to_monotonic(self, device_ns: int) -> int:
        """CLOCK_MONOTONIC of a time stamp, once settled."""
        if self._offset_ns is None:
            raise ValueError("the clock has not settled")
        return device_ns + self._offset_ns
