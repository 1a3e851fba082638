"""What reports told of a job on a GPU in the last minutes, for the live page."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gpu_hpc_exporter.model import NS, GpuActivity

RECENT_NS: Final = 60 * NS
"""Agents look once in ten seconds or more seldom: a minute holds some looks."""
_LOOKS: Final = 2
_LATENCY_POINTS: Final = 120
"""Ten minutes of reports of five seconds."""


@dataclass(frozen=True, slots=True)
class RecentActivity:
    """A job's reports on a GPU, the oldest first.

    activities: of the last minute. newest: those of them that tell of the last two looks; agents look for a second at a
    time, and a minute ago the job may have done something else. latencies_ms: by kernel, of ten minutes, None where not
    measured.
    """

    activities: tuple[GpuActivity, ...] = ()
    newest: tuple[GpuActivity, ...] = ()
    latencies_ms: Mapping[str, tuple[float | None, ...]] | None = None


class RecentReports:
    """Keeps a job's reports: whole ones of a minute, latencies of ten. Not thread-safe."""

    def __init__(self) -> None:
        self._activities: deque[tuple[int, GpuActivity]] = deque()
        self._latencies: deque[Mapping[str, float]] = deque(maxlen=_LATENCY_POINTS)

    def add(self, time_ns: int, activity: GpuActivity) -> None:
        """The newest one."""
        self._activities.append((time_ns, activity))
        while time_ns - self._activities[0][0] >= RECENT_NS:
            self._activities.popleft()
        self._latencies.append(activity.latency_ms)

    def frozen(self) -> RecentActivity:
        """A copy, with latencies of those kernels that have one now."""
        now = self._latencies[-1]
        latencies = {kernel: tuple(point.get(kernel) for point in self._latencies) for kernel in now}
        activities = tuple(activity for _, activity in self._activities)
        looked = [activity for activity in activities if activity.sums.get("traced_ns")]
        return RecentActivity(activities, tuple(looked[-_LOOKS:]), latencies)
