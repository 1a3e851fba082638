"""The windows of the last ten minutes of one GPU, for the live page: a ring of small numbers."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from gpu_hpc_exporter.diagnosis.classify import CLASSES, BottleneckClass
from gpu_hpc_exporter.diagnosis.intensity import UNITS, Unit

CAPACITY: Final = 6000
"""Windows: ten minutes of 100 ms, in 24 bytes each."""
WHOLE_NS: Final = 90_000_000
"""Shorter windows are joined until they are as long: nobody sees 1 ms in ten minutes."""

Column = Literal["sm_active", "nvml_utilization", "sm", "l2", "dram", "pcie", "nvlink"]
COLUMNS: Final[tuple[Column, ...]] = get_args(Column)
STEPS: Final = 200
"""A ratio is kept in steps of 0.005."""
ABSENT: Final = 255
ROW: Final = len(COLUMNS) + 1
"""Bytes of a window: each column's ratio, then the class's number."""
_CLASS_NUMBERS: Final = {name: number for number, name in enumerate(CLASSES)}


_Part = tuple[int, Mapping[Unit, float], float | None, BottleneckClass]
"""Length in ns, intensities, SM active, class."""


@dataclass(frozen=True, slots=True)
class WindowSlice:
    """Windows in the order in which they were classed. `following`: the sequence number of the one that comes next.

    ends_ns: on the samplers' clock. cells: `ROW` bytes a window.
    """

    following: int
    ends_ns: array[int]
    durations_ns: array[int]
    cells: bytes


class WindowHistory:
    """Takes classified windows of one GPU. Not thread-safe: the fleet serialises access."""

    def __init__(self) -> None:
        self.nvml_utilization: float | None = None
        """What nvidia-smi says now, kept beside each window."""
        self._count = 0
        self._ends_ns = array("q")
        self._durations_ns = array("q")
        self._cells = bytearray()
        self._parts: list[_Part] = []
        self._parts_ns = 0
        self._parts_end_ns = 0

    def add(
        self,
        begin_ns: int,
        part_ns: int,
        intensity: Mapping[Unit, float],
        sm_active: float | None,
        bottleneck: BottleneckClass,
    ) -> None:
        """One window, or the part of it that this source tells of."""
        if self._parts and not 0 <= begin_ns - self._parts_end_ns <= WHOLE_NS:
            self._join()
        if part_ns >= WHOLE_NS and not self._parts:
            self._append(begin_ns + part_ns, part_ns, intensity, sm_active, bottleneck)
            return
        self._parts.append((part_ns, intensity, sm_active, bottleneck))
        self._parts_ns += part_ns
        self._parts_end_ns = begin_ns + part_ns
        if self._parts_ns >= WHOLE_NS:
            self._join()

    def forget(self) -> None:
        """Let go of all windows; sequence numbers go on."""
        self._count += CAPACITY - self._count % CAPACITY  # the ring begins at its first place again
        self._ends_ns, self._durations_ns, self._cells = array("q"), array("q"), bytearray()
        self._parts, self._parts_ns = [], 0

    @property
    def following(self) -> int:
        """The sequence number of the window that comes next."""
        return self._count

    def since(self, sequence: int) -> WindowSlice:
        """The windows from this sequence number on that are still kept."""
        size = len(self._ends_ns)
        missing = min(size, max(0, self._count - sequence))
        first = (self._count - missing) % CAPACITY
        last = first + missing
        if last <= size:
            return self._slice(first, last)
        older, newer = self._slice(first, size), self._slice(0, last - size)
        return WindowSlice(
            self._count,
            older.ends_ns + newer.ends_ns,
            older.durations_ns + newer.durations_ns,
            older.cells + newer.cells,
        )

    def after(self, time_ns: int) -> WindowSlice:
        """The windows that ended after `time_ns`, to a window or two: sources take turns."""
        whole = self.since(0)
        first = bisect_right(whole.ends_ns, time_ns)
        return self.since(self._count - len(whole.ends_ns) + first)

    def _slice(self, first: int, last: int) -> WindowSlice:
        cells = bytes(self._cells[first * ROW : last * ROW])
        return WindowSlice(self._count, self._ends_ns[first:last], self._durations_ns[first:last], cells)

    def _append(
        self,
        end_ns: int,
        duration_ns: int,
        intensity: Mapping[Unit, float],
        sm_active: float | None,
        bottleneck: BottleneckClass,
    ) -> None:
        get, nvml = intensity.get, self.nvml_utilization
        row = [
            ABSENT if sm_active is None else int(sm_active * STEPS + 0.5),
            ABSENT if nvml is None else int(nvml * STEPS + 0.5),
            *[ABSENT if (value := get(unit)) is None else int(value * STEPS + 0.5) for unit in UNITS],
            _CLASS_NUMBERS[bottleneck],
        ]
        if len(self._ends_ns) < CAPACITY:
            self._ends_ns.append(end_ns)
            self._durations_ns.append(duration_ns)
            self._cells.extend(row)
        else:
            place = self._count % CAPACITY
            self._ends_ns[place] = end_ns
            self._durations_ns[place] = duration_ns
            self._cells[place * ROW : (place + 1) * ROW] = bytes(row)
        self._count += 1

    def _join(self) -> None:
        """The collected parts as one window: means over what measured a unit, the class that took most of the time."""
        parts, self._parts = self._parts, []
        length_ns, self._parts_ns = self._parts_ns, 0
        class_ns: dict[BottleneckClass, int] = {}
        sums: dict[Unit, float] = {}
        times: dict[Unit, int] = {}
        active, active_ns = 0.0, 0
        for part_ns, intensity, sm_active, bottleneck in parts:
            class_ns[bottleneck] = class_ns.get(bottleneck, 0) + part_ns
            if sm_active is not None:
                active += sm_active * part_ns
                active_ns += part_ns
            for unit, value in intensity.items():
                sums[unit] = sums.get(unit, 0.0) + value * part_ns
                times[unit] = times.get(unit, 0) + part_ns
        means = {unit: value / times[unit] for unit, value in sums.items()}
        longest = max(class_ns, key=class_ns.__getitem__)
        self._append(self._parts_end_ns, length_ns, means, active / active_ns if active_ns else None, longest)
