"""The GPU's clock in terms of CLOCK_MONOTONIC, from nothing but when windows were seen."""

from __future__ import annotations

from collections import deque
from typing import Final

_MEMORY: Final = 64
_MIN_STEP_NS: Final = 5_000_000


class DeviceClock:
    """Maps the GPU's time stamps onto CLOCK_MONOTONIC, to about a quarter of a window.

    A window that a decode delivers ended before the decode began, so of all differences seen the smallest is the
    nearest to the truth. Once settled the offset stays what it is, so that windows stay back to back, until the
    clocks have drifted apart.
    """

    def __init__(self, interval_ns: int) -> None:
        self._step_ns = max(interval_ns // 4, _MIN_STEP_NS)
        self._seen: deque[int] = deque(maxlen=_MEMORY)
        self._offset_ns: int | None = None

    @property
    def settled(self) -> bool:
        """Whether time stamps can be mapped."""
        return self._offset_ns is not None

    def observe(self, device_ns: int, monotonic_ns: int) -> None:
        """A window that ended at `device_ns` was there at `monotonic_ns`."""
        self._seen.append(monotonic_ns - device_ns)
        if self._offset_ns is None or len(self._seen) < _MEMORY:
            return
        nearest = min(self._seen)
        if abs(nearest - self._offset_ns) > self._step_ns:
            self._offset_ns = nearest

    def settle(self) -> None:
        """Take the best guess so far for the truth; there must be one."""
        self._offset_ns = min(self._seen)

    def to_monotonic(self, device_ns: int) -> int:
        """CLOCK_MONOTONIC of a time stamp, once settled."""
        if self._offset_ns is None:
            raise ValueError("the clock has not settled")
        return device_ns + self._offset_ns
