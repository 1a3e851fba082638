"""Which driver calls are under way, so that one that never returns is seen and named by everybody else."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

CALL_DEADLINE_NS: Final = 3_000_000_000
"""A driver call for one GPU that takes longer hangs. The slowest one of a healthy GPU takes 6 ms."""
LIBRARY_CALLS: Final = ("nvmlInit", "nvmlShutdown", "list GPUs")
"""Calls of the thread that owns the library: while one hangs, no GPU can be opened anew."""
LIBRARY_DEADLINE_NS: Final = 30_000_000_000
"""The same for the library: opening it initialises every GPU that no other process holds."""


@dataclass(frozen=True, slots=True)
class HungCall:
    """A call for one GPU (or, with `uuid` "", for the library) that has not returned for `seconds`."""

    uuid: str
    call: str
    seconds: float


class CallWatch:
    """What one thread is doing in the driver. Written by its thread, read by any other without a lock.

    `current` is the call under way and when it began, None while the thread is elsewhere; a plain attribute,
    since it is set on every beat.
    """

    def __init__(self, uuids: tuple[str, ...], deadline_ns: int) -> None:
        self._uuids = uuids
        self._deadline_ns = deadline_ns
        self.current: tuple[str, int] | None = None

    def hung(self, now_ns: int, deadline_ns: int | None = None) -> list[HungCall]:
        """The call under way, once per GPU of this thread, if it has passed its deadline, or a shorter one."""
        current = self.current
        allowed_ns = self._deadline_ns if deadline_ns is None else min(self._deadline_ns, deadline_ns)
        if current is None or now_ns - current[1] <= allowed_ns:
            return []
        return [HungCall(uuid, current[0], (now_ns - current[1]) / 1e9) for uuid in self._uuids]


class CallWatches:
    """The watches of all threads that call the driver, those of abandoned threads included."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: list[CallWatch] = []

    def watch(self, *uuids: str, deadline_ns: int = CALL_DEADLINE_NS) -> CallWatch:
        """A new watch for a thread that calls the driver for these GPUs."""
        watch = CallWatch(uuids, deadline_ns)
        with self._lock:
            self._watches.append(watch)
        return watch

    def drop(self, watch: CallWatch) -> None:
        """Forget the watch of a thread that has ended."""
        with self._lock:
            self._watches.remove(watch)

    def hung(self, now_ns: int, deadline_ns: int | None = None) -> tuple[HungCall, ...]:
        """Every call past its deadline, or past a shorter one for all."""
        with self._lock:
            return tuple(call for watch in self._watches for call in watch.hung(now_ns, deadline_ns))
