"""Frames of the live page: each is made and encoded once, for all pages that are open.

While no page is open nothing is made. A page that does not keep up skips frames and is told to ask for what it missed:
neither sampling nor the other pages wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec

from gpu_hpc_exporter.samplers.fleet import FleetSnapshot
from gpu_hpc_exporter.samplers.kernel_recent import RecentActivity
from gpu_hpc_exporter.samplers.window_history import WindowSlice
from gpu_hpc_exporter.web import answers

log = logging.getLogger(__name__)

PERIOD_S: Final = 0.2
"""Time goes on five times a second on the page. GPM's windows come as often while one is open (Fleet.is_watched)."""
_GPUS_EVERY: Final = 5
"""Everything else with every fifth frame."""
_COMPLAINT_S: Final = 60.0
MAX_PAGES: Final = 16
MAX_WAITING: Final = 2
RESYNC: Final = b"event: resync\ndata: {}\n\n"


class Live(Protocol):
    """What the page needs of the exporter."""

    def snapshot(self) -> FleetSnapshot:
        """The GPUs now."""

    def windows_since(self, sequences: Mapping[str, int]) -> tuple[int, Mapping[str, WindowSlice]]:
        """The clock's time now, and of each GPU the windows from its sequence number on, soon after their end."""

    def windows(self, uuid: str, length_ns: int) -> tuple[int, WindowSlice] | None:
        """The clock's time now, and a GPU's windows of the last `length_ns`; None for one that nobody knows."""

    def recent_kernels(self) -> Mapping[tuple[str, str], RecentActivity]:
        """By UUID and job what kernel agents told in the last minutes."""


class Page:
    """The frames that wait for one page, at most two."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._has_frames = asyncio.Event()
        self._is_closed = False

    def push(self, frame: bytes) -> None:
        """One more; where it is one too many, all that wait are given up."""
        if len(self._frames) >= MAX_WAITING:
            self._frames.clear()
            frame = RESYNC
        self._frames.append(frame)
        self._has_frames.set()

    def close(self) -> None:
        """No more frames come."""
        self._is_closed = True
        self._has_frames.set()

    async def next(self) -> bytes | None:
        """What waits, or the next frame; None when no more come."""
        await self._has_frames.wait()
        if self._is_closed:
            return None
        found = b"".join(self._frames)
        self._frames.clear()
        self._has_frames.clear()
        return found


class Hub:
    """Feeds the pages. Lives in one event loop; frames are made in a thread beside it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._pages: set[Page] = set()
        self._task: asyncio.Task[None] | None = None
        self._sequences: Mapping[str, int] = {}
        self._next_complaint_s = 0.0
        self._gpus_frame = b""

    def open(self) -> Page | None:
        """A page that gets every frame from now on, None where there are too many already."""
        if len(self._pages) >= MAX_PAGES:
            return None
        page = Page()
        self._pages.add(page)
        if self._task is None:
            self._sequences = {}
            self._task = asyncio.get_running_loop().create_task(self._run())
        elif self._gpus_frame:
            page.push(self._gpus_frame)
        return page

    def leave(self, page: Page) -> None:
        """No page, no work."""
        self._pages.discard(page)
        if not self._pages and self._task is not None:
            self._task.cancel()
            self._task = None
            self._gpus_frame = b""

    def close(self) -> None:
        """The server ends: let all pages go."""
        for page in self._pages:
            page.close()
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        number, due = 0, time.monotonic()
        while True:
            frame = await asyncio.to_thread(self._whole, self._windows)
            if number % _GPUS_EVERY == 0:
                self._gpus_frame = await asyncio.to_thread(self._whole, self._gpus)
                frame = self._gpus_frame + frame
            if frame:  # an empty piece would end the answer
                for page in self._pages:
                    page.push(frame)
            number += 1
            due = max(due + PERIOD_S, time.monotonic())
            await asyncio.sleep(due - time.monotonic())

    def _whole(self, make: Callable[[], bytes]) -> bytes:
        """A frame, b"" where it cannot be made: whatever is wrong with one, the others go out."""
        try:
            return make()
        except Exception:
            now = time.monotonic()
            if now >= self._next_complaint_s:  # not five times a second
                self._next_complaint_s = now + _COMPLAINT_S
                log.exception("a frame of the live page cannot be made")
            return b""

    def _windows(self) -> bytes:
        now_ns, slices = self._live.windows_since(self._sequences)
        self._sequences = {uuid: part.following for uuid, part in slices.items()}
        return _event("windows", answers.windows(now_ns, slices))

    def _gpus(self) -> bytes:
        return _event("gpus", answers.gpus(self._live.snapshot(), self._live.recent_kernels(), self._live.windows))


def _event(name: str, data: msgspec.Struct) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
