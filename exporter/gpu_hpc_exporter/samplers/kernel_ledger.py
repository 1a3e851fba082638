"""What the agents' files add up to: per (GPU, job) and kernel, without a counter ever going back.

Every file has cumulative counters. What each has gained since it was last read goes to its GPU's and job's account, so
that neither the end of a process nor that of an agent takes anything away.

A hundred thousand slots are read in each look. So slots are added up before they are compared: a file's slots that
count for the same account are a group, its sum is one large integer of which each 64 bits are a counter, and what the
sum has gained is what the account gains. Only kernels with series are looked at slot by slot.
"""

from __future__ import annotations

import heapq
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, repeat
from operator import sub
from typing import Final, Literal

from gpu_hpc_exporter.diagnosis.kernels import MIN_GROUP, OTHER, Behaviour, category, pattern
from gpu_hpc_exporter.model import (
    COPY_KINDS,
    DURATION_BUCKETS,
    NS,
    ActivitySum,
    Category,
    CopyAmount,
    CopyKind,
    Durations,
    GpuActivity,
    KernelAmount,
    Pattern,
    Recordable,
)
from gpu_hpc_exporter.samplers.kernel_history import History, Mark
from gpu_hpc_exporter.sources.kernels import layout
from gpu_hpc_exporter.sources.kernels.files import AgentFile, Reading

MAX_KERNELS_OF_GPU: Final = 24
"""Kernels of a GPU that may have series, all its jobs together: those that once got them keep them."""
MAX_KERNELS_OF_JOB: Final = 18
"""Of them those of one job, where no more are asked for: so there is room for jobs that come later."""
MAX_NAMED_KERNELS: Final = 128
"""The same for the whole node."""
MAX_PAIRS: Final = 16
"""(GPU, job) pairs of their own; the jobs of others are `other`."""
MAX_RESERVED: Final = MAX_PAIRS // 2
"""Of them so many at most are kept for GPUs in use that have none yet: jobs on one GPU take no other's names."""
OTHER_JOB: Final = "other"
MAX_SIGNATURES: Final = 8192
"""Different kernels of a (GPU, job) that are told apart."""
_MAX_LIVES: Final = 3
"""Periods after which what the last window told is no longer told."""
_PATTERN_NS: Final = 300 * NS
_CHECKPOINT_NS: Final = 30 * NS
_MIN_PATTERN_NS: Final = 60 * NS

_SUMS: Final[Mapping[ActivitySum, int]] = {
    "traced_ns": layout.D_TRACED,
    "device_traced_ns": layout.D_DEVICE_TRACED,
    "busy_ns": layout.D_BUSY,
    "compute_ns": layout.D_COMPUTE,
    "communication_ns": layout.D_COMMUNICATION,
    "copy_ns": layout.D_COPY,
    "overlap_ns": layout.D_OVERLAP,
    "idle_host_ns": layout.D_IDLE_HOST,
    "idle_queue_ns": layout.D_IDLE_QUEUE,
    "idle_other_ns": layout.D_IDLE_OTHER,
    "launch_api_ns": layout.D_LAUNCH_API,
    "graphs_traced": layout.D_GRAPHS_TRACED,
    "graphs_untraced": layout.D_GRAPHS_UNTRACED,
    "sync_event_ns": layout.D_SYNC_NS + layout.SYNCS.index("event"),
    "sync_stream_ns": layout.D_SYNC_NS + layout.SYNCS.index("stream"),
    "sync_context_ns": layout.D_SYNC_NS + layout.SYNCS.index("context"),
    "sync_unknown_ns": layout.D_SYNC_NS + layout.SYNCS.index("unknown"),
}
_COPIES: Final[Mapping[CopyKind, int]] = {
    kind: layout.D_COPIES
    + layout.COPY_FIELDS
    * (layout.DIRECTIONS.index(kind.split("_")[0]) * len(layout.MEMORIES) + layout.MEMORIES.index(kind.split("_")[1]))
    for kind in COPY_KINDS
}
_MAX_SQUARED: Final = 1e29
"""ns^2 that a kernel may deviate between two reports: an execution of a day has 1e28, recordings take up to 1e30."""
_CUTS: Final = tuple(
    slice(start, start + layout.LANES_SIZE)
    for start in range(
        layout.LANES_OFFSET, layout.LANES_OFFSET + layout.KERNELS * layout.KERNEL_SIZE, layout.KERNEL_SIZE
    )
)
"""Where the row of each slot is in a table."""
_MARK_NS: Final = 30 * NS
"""How often a file's slots are looked at one by one: for the ranks of kernels, and for what is usual."""
_PHASES: Final = 6
_LATE_NS: Final = 60 * NS
"""What is told of a window may come so much later than the window itself: its last records are waited for."""
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


class LyingError(Exception):
    """A file's counters went back, or are beyond what can be."""


@dataclass(slots=True)
class _Seen:
    """What a kernel did so far, since it has series; for patterns."""

    launches: int = 0
    executions: int = 0
    ns: int = 0
    steady: int = 0
    steady_ns2: float = 0.0
    traced_ns: int = 0

    def copy(self) -> _Seen:
        return _Seen(self.launches, self.executions, self.ns, self.steady, self.steady_ns2, self.traced_ns)

    def since(self, before: _Seen, slower: float, *, is_shared: bool) -> Behaviour:
        steady = self.steady - before.steady
        deviation_ns2 = (self.steady_ns2 - before.steady_ns2) / steady if steady > 0 else 0.0
        return Behaviour(
            (self.traced_ns - before.traced_ns) / NS,
            self.launches - before.launches,
            self.executions - before.executions,
            (self.ns - before.ns) / NS,
            steady,
            math.sqrt(max(0.0, deviation_ns2)) / NS,
            slower,
            is_shared,
        )


class Tally:
    """What has been gained since the last report by one kernel, or by all of a category without series: a row."""

    __slots__ = ("gain", "kernel")

    def __init__(self, kernel: Kernel | None = None) -> None:
        self.gain = 0
        self.kernel = kernel

    def take(self) -> int:
        """What there is, of which nothing is left."""
        gain, self.gain = self.gain, 0
        return gain


class Kernel:
    """A signature within a (GPU, job). tally: its category's until it has a series. busy_ns: from the start."""

    __slots__ = ("busy_ns", "category", "checkpoints", "deviation_ns2", "has_series", "name", "pair", "seen", "tally")

    def __init__(self, pair: Pair, name: str, kind: Category) -> None:
        self.pair = pair
        self.name = name
        self.category = kind
        self.tally = pair.tally(kind)
        self.busy_ns = 0
        self.has_series = False
        self.deviation_ns2 = 0.0
        self.seen = _Seen()
        self.checkpoints: deque[tuple[int, _Seen]] = deque()

    def give_series(self) -> None:
        """From now on it is told by name."""
        self.has_series = True
        self.tally = Tally(self)
        self.pair.named.append(self)


class Pair:
    """A job on a GPU: what its processes have gained there since the last report."""

    def __init__(self, uuid: str, job: str) -> None:
        self.uuid = uuid
        self.job = job
        self.kernels: dict[str, Kernel] = {}
        self.named: list[Kernel] = []
        self.tallies: dict[Category, Tally] = {}
        self.rest = Kernel(self, OTHER, "other")
        self.device = 0
        self.traced_ns = 0
        self.files = 0
        self.unrecorded: frozenset[Recordable] = frozenset()
        self.incomplete: frozenset[Recordable] = frozenset()
        self.processes = 0

    def tally(self, kind: Category) -> Tally:
        """That of a category's kernels without series."""
        return self.tallies.setdefault(kind, Tally())

    def kernel(self, name: str) -> Kernel:
        """The account of a signature; the rest's where there are too many."""
        kernel = self.kernels.get(name)
        if kernel is None:
            if self.job == OTHER_JOB or len(self.kernels) >= MAX_SIGNATURES:
                return self.rest
            kernel = self.kernels[name] = Kernel(self, name, category(name))
        return kernel


@dataclass(slots=True)
class _Group:
    """Slots of a file that count for the same account; the sum of their rows, as last read."""

    tally: Tally
    slots: list[int] = field(default_factory=list)
    cuts: list[slice] = field(default_factory=list)
    total: int = 0


@dataclass(slots=True)
class _Account:
    """What was last read of one file, and where it belongs.

    places: by the process's device, None where that is no GPU of ours. slots: device and signature of each kernel,
    its mangled name while the signature is not known; waiting: which those are; targets: whose each is. series: how
    many kernels had series when the slots were grouped. table: all counters as last counted, those of waiting slots
    as they were before. busy: nanoseconds of each slot that its kernel's rank knows of; due_ns: when it must know
    more. latest: what each kernel with a series did in the last window: launch-to-start time, its number, and the
    longest execution. slower: by how much the slowest group of each exceeds what is normal for it. read_ns: when it
    was last read, or 0. unrecorded: what the file's windows then left out. ran: where anything ran in the last
    window, while the process lives.
    """

    due_ns: int
    places: dict[int, Pair | None] = field(default_factory=dict)
    slots: list[tuple[int, bytes | str]] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    targets: list[Kernel] = field(default_factory=list)
    groups: dict[Tally, _Group] = field(default_factory=dict)
    series: int = -1
    table: bytes = b""
    busy: array[int] = field(default_factory=lambda: array("Q"))
    overflow: list[int] = field(default_factory=lambda: [0] * layout.DEVICES)
    devices: dict[int, int] = field(default_factory=dict)
    window: int = 0
    latest: dict[Kernel, tuple[int, int, int]] = field(default_factory=dict)
    latest_until_ns: int = 0
    read_ns: int = 0
    unrecorded: frozenset[Recordable] = frozenset()
    ran: set[Pair] = field(default_factory=set)
    history: History = field(default_factory=History)
    slower: dict[Kernel, float] = field(default_factory=dict)


_NOWHERE: Final = Kernel(Pair("", ""), "", "other")
"""Where gains on GPUs go that are none of ours, and for now those of kernels whose names are not known yet."""


class KernelLedger:
    """Accounts of all files and all (GPU, job) pairs. Belongs to one thread."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._accounts: dict[tuple[str, int], _Account] = {}
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._served: set[str] = set()
        """GPUs of which some kernel has a series."""
        self.in_use: Collection[str] = ()
        """GPUs on which there are processes, as far as that is known."""

    def take(
        self,
        file: AgentFile,
        reading: Reading,
        place: Callable[[str], tuple[str, str] | None],
        name_of: Callable[[bytes], str | None],
        now_ns: int,
    ) -> bool:
        """Add what a file has gained; whether all of it could be.

        What was gained on a device in more time than has passed is left out.
        `place`: UUID and job of a device by its UUID in hex, None where it is no GPU of ours. `name_of`: a kernel's
        signature, None where it has yet to be found: then its gain waits. Raises LyingError.
        """
        account = self._accounts.get(file.key)
        if account is None:
            # Not all files in one look.
            phase = len(self._accounts) % _PHASES
            account = self._accounts[file.key] = _Account(now_ns + phase * _MARK_NS // _PHASES)
            if file.is_old:
                # What was counted before this exporter began belongs to the one before it.
                _adopt(account, reading, file.windows)
        if file.is_behind and len(reading.table) > len(account.table):
            account.table += reading.table[len(account.table) :]  # what they did until there was room is lost
            file.is_behind = False
        account.table = account.table.ljust(len(reading.table), b"\0")  # new slots stood at 0
        self._settle(account, reading, place)
        has_joined = self._resolve(account, reading, name_of)
        most_ns = now_ns - account.read_ns if account.read_ns else _age_ns(file)
        is_possible = self._add_devices(account, reading, most_ns + _LATE_NS)
        account.read_ns = now_ns
        self._add_kernels(account, reading, file)
        self._add_overflow(account, reading)
        is_unserved = any(pair is not None and pair.uuid not in self._served for pair in account.places.values())
        if has_joined or is_unserved or now_ns >= account.due_ns:
            _add_busy(account)
        if now_ns >= account.due_ns:
            # In the phase that it had: after a stall too, not all files in one look.
            account.due_ns = now_ns + _MARK_NS - (now_ns - account.due_ns) % _MARK_NS
            _compare(account, now_ns)
        file.must_read = bool(account.waiting)
        account.unrecorded = file.status.unrecorded if file.status is not None else frozenset()
        period_s = file.status.period_s if file.status is not None else 0.0
        account.latest_until_ns = now_ns + round(_MAX_LIVES * period_s * NS)
        return is_possible

    def keep_only(self, keys: Collection[tuple[str, int]]) -> None:
        """Forget all other files."""
        for key in self._accounts.keys() - set(keys):
            self._forget(key)

    def forget(self, file: AgentFile) -> None:
        """A file that is gone; what it told stays with its job."""
        self._forget(file.key)

    def _forget(self, key: tuple[str, int]) -> None:
        account = self._accounts.pop(key, None)
        if account is not None:
            for pair in {pair for pair in account.places.values() if pair is not None}:
                pair.files -= 1

    def stop_latest(self, file: AgentFile) -> None:
        """A process that has ended has no last window."""
        account = self._accounts.get(file.key)
        if account is not None:
            account.latest = {}
            account.slower = {}
            account.ran = set()

    def report(
        self, now_ns: int, is_wanted: Callable[[str, str], bool], is_shared: Callable[[str, str], bool]
    ) -> tuple[GpuActivity, ...]:
        """Everything gained since the report before.

        `is_wanted`: whether a job is known to use a GPU; pairs without files that are not wanted either are forgotten.
        `is_shared`: whether others than this job are known to hold the GPU.
        """
        self._forget_pairs(is_wanted)
        self._note_unrecorded()
        gains = {pair: _Gains(pair) for pair in self._pairs.values()}
        self._choose({pair for pair, gained in gains.items() if gained.rest})
        now = self._now(now_ns)
        busy = [(pair.uuid, pair.job) for pair in self._pairs.values() if pair.files > 0]

        def shares(pair: Pair) -> bool:
            others = any(uuid == pair.uuid and job != pair.job for uuid, job in busy)
            return others or is_shared(pair.uuid, pair.job)

        return tuple(_activity(pair, gained, now, now_ns, is_shared=shares(pair)) for pair, gained in gains.items())

    # From files to accounts

    def _settle(self, account: _Account, reading: Reading, place: Callable[[str], tuple[str, str] | None]) -> None:
        """Find out whose each device's counters are; a job that has got another name is another from now on."""
        places = {index: self._pair(place(uuid)) for index, uuid, _ in reading.devices}
        if places != account.places:
            before, account.places = account.places, places
            for pair in {pair for pair in before.values() if pair is not None}:
                pair.files -= 1
            for pair in {pair for pair in places.values() if pair is not None}:
                pair.files += 1
            account.targets, account.groups, account.series = [], {}, -1
            account.latest = {}
            account.slower = {}

    def _pair(self, key: tuple[str, str] | None) -> Pair | None:
        if key is None:
            return None
        pair = self._pairs.get(key)
        if pair is None:
            if key[1] != OTHER_JOB and not self._has_room(key[0]):
                return self._pair((key[0], OTHER_JOB))
            pair = self._pairs[key] = Pair(*key)
        return pair

    def _has_room(self, uuid: str) -> bool:
        """Whether one more job may have a name on this GPU."""
        own = [pair.uuid for pair in self._pairs.values() if pair.job != OTHER_JOB]
        waiting = {*self.in_use} - {*own}
        reserved = 0 if uuid not in own else min(len(waiting), MAX_RESERVED)
        return len(own) + reserved < MAX_PAIRS

    def _resolve(self, account: _Account, reading: Reading, name_of: Callable[[bytes], str | None]) -> bool:
        """Find out whose each new slot is, and each whose name was not known before; whether any joined a group."""
        first = len(reading.table) // layout.KERNEL_SIZE - len(reading.names)
        account.slots += reading.names[len(account.slots) - first :]  # all names come again when a file was rewound
        begin, waited = len(account.targets), account.waiting
        account.waiting = set()
        account.targets += [_NOWHERE] * (len(account.slots) - begin)
        resolved: Collection[int] = (*(slot for slot in waited if slot < begin), *range(begin, len(account.slots)))
        for slot in resolved:
            device, name = account.slots[slot]
            pair = account.places.get(device)
            found = name_of(name) if isinstance(name, bytes) else name
            if found is None:
                account.waiting.add(slot)
                continue
            account.slots[slot] = (device, found)
            account.targets[slot] = pair.kernel(found) if pair is not None else _NOWHERE
        series = sum(len(pair.named) for pair in account.places.values() if pair is not None)
        if series != account.series:
            account.series, account.groups = series, {}
            resolved = range(len(account.slots))
        for slot in resolved:
            _join(account, slot)
        return bool(resolved)

    def _add_devices(self, account: _Account, reading: Reading, most_ns: int) -> bool:
        """Add what each device has gained, but for those that did anything for longer than `most_ns`; whether none did.

        Raises LyingError.
        """
        is_possible = True
        account.ran = set()
        for index, _, counters in reading.devices:
            gain = counters - account.devices.get(index, 0)
            account.devices[index] = counters
            if (counters | gain) & layout.DEVICE_HIGH:
                raise LyingError
            times = layout.unpack_lanes(gain, layout.D_TIMES)
            if max(times) > most_ns:
                is_possible = False
                continue
            pair = account.places.get(index)
            if pair is not None:
                pair.device += gain
                if times[layout.D_DEVICE_TRACED]:
                    account.ran.add(pair)
        return is_possible

    def _add_kernels(self, account: _Account, reading: Reading, file: AgentFile) -> None:
        """Add what each group has gained. A counter of it that goes back leaves the highest bits of its lane set.

        Raises LyingError.
        """
        table = reading.table
        if len(table) < len(account.table):
            raise LyingError
        if account.window != file.windows:
            account.window, account.latest = file.windows, {}
        for group in account.groups.values():
            total = _total(table, group.cuts)
            gain = total - group.total
            if not gain:
                continue
            if gain & layout.HIGH:
                raise LyingError
            group.total = total
            group.tally.gain += gain
            if group.tally.kernel is not None:
                _add_details(account, group.tally.kernel, group.slots, table)
        account.table = _with_rows_of(account.table, table, account.waiting) if account.waiting else table

    def _add_overflow(self, account: _Account, reading: Reading) -> None:
        """Kernels for which there was no room: they have no names."""
        for index, pair in account.places.items():
            row = _row(reading.overflow, index)
            gain = row - account.overflow[index]
            account.overflow[index] = row
            if gain & layout.HIGH:
                raise LyingError
            if gain and pair is not None:
                pair.rest.tally.gain += gain

    # From accounts to reports

    def _choose(self, gained: Collection[Pair]) -> None:
        """Give series to the busiest kernels of each GPU. Only what has run since the last time can have become one."""
        named: dict[str, list[Kernel]] = {}
        for pair in self._pairs.values():
            named.setdefault(pair.uuid, []).extend(pair.named)
        left = MAX_NAMED_KERNELS - sum(len(kernels) for kernels in named.values())
        for uuid, kernels in named.items():
            room = min(MAX_KERNELS_OF_GPU - len(kernels), left)
            if room > 0:
                left -= _give_series(
                    [pair for pair in self._pairs.values() if pair.uuid == uuid], gained, self.top_k, room
                )
        self._served = {pair.uuid for pair in self._pairs.values() if pair.named}

    def _forget_pairs(self, is_wanted: Callable[[str, str], bool]) -> None:
        for key, pair in list(self._pairs.items()):
            if pair.files <= 0 and not is_wanted(*key):
                del self._pairs[key]

    def _note_unrecorded(self) -> None:
        """Find out what none of a pair's files records, and what some do not whose processes run there.

        Without files it keeps what they told. Where some record copies or waits, the pair has their sums, though its
        traced time is that of all: rates are then too low, never too high. A second traced time, of those that
        record, would be a series more for each, for a mixture that passes with the process that a profiler has
        touched.
        """
        found: dict[Pair, frozenset[Recordable]] = {}
        running: dict[Pair, list[frozenset[Recordable]]] = {}
        for account in self._accounts.values():
            for pair in account.places.values():
                if pair is not None:
                    found[pair] = found.get(pair, account.unrecorded) & account.unrecorded
            for pair in account.ran:
                running.setdefault(pair, []).append(account.unrecorded)
        for pair, unrecorded in found.items():
            pair.unrecorded = unrecorded
            each = running.get(pair, [])
            pair.processes = len(each)
            pair.incomplete = frozenset[Recordable]().union(*each)

    def _now(self, now_ns: int) -> _Now:
        """Of all processes' last windows, and of their last comparisons, those that are not too old."""
        now = _Now()
        for account in self._accounts.values():
            if now_ns > account.latest_until_ns:
                account.latest, account.slower = {}, {}
            for kernel, (latency_ns, count, longest_ns) in account.latest.items():
                have = now.latest.setdefault(kernel, [0, 0, 0])
                have[0] += latency_ns
                have[1] += count
                have[2] = max(have[2], longest_ns)
            for kernel, slower in account.slower.items():
                now.slower[kernel] = max(slower, now.slower.get(kernel, 0.0))
        return now


@dataclass(slots=True)
class _Now:
    """By kernel: launch-to-start time and number and the longest execution; by how much its slowest group is slower."""

    latest: dict[Kernel, list[int]] = field(default_factory=dict)
    slower: dict[Kernel, float] = field(default_factory=dict)


class _Gains:
    """What a (GPU, job) has gained since the last report: rows by category, of kernels with series, and of the rest."""

    def __init__(self, pair: Pair) -> None:
        self.categories = {kind: gain for kind, tally in pair.tallies.items() if (gain := tally.take())}
        self.rest = sum(self.categories.values())
        self.named = {kernel: kernel.tally.take() for kernel in pair.named}
        for kernel, gain in self.named.items():
            if gain:
                self.categories[kernel.category] = self.categories.get(kernel.category, 0) + gain


def _activity(pair: Pair, gains: _Gains, now: _Now, now_ns: int, *, is_shared: bool) -> GpuActivity:
    counters, pair.device = layout.unpack_lanes(pair.device, layout.COUNTERS), 0
    pair.traced_ns += counters[layout.D_TRACED]
    kernels = {kernel.name: _amount(kernel, gains.named.get(kernel, 0)) for kernel in pair.named}
    kernels[OTHER] = _amount(pair.rest, gains.rest)
    patterns = {
        kernel.name: found
        for kernel in pair.named
        if (found := _pattern(kernel, now_ns, now.slower.get(kernel, 0.0), is_shared=is_shared)) is not None
    }
    told = {kernel.name: now.latest[kernel] for kernel in pair.named if kernel in now.latest}
    queue = counters[layout.D_QUEUE_BUCKETS : layout.D_QUEUE_BUCKETS + DURATION_BUCKETS]
    return GpuActivity(
        pair.uuid,
        pair.job,
        kernels,
        {kind: _durations(gain) for kind, gain in gains.categories.items()},
        Durations(counters[layout.D_QUEUE_NS], queue),
        {kind: _copies(counters, start) for kind, start in _COPIES.items()},
        {name: counters[place] for name, place in _SUMS.items()},
        {name: ns / count / 1e6 for name, (ns, count, _) in told.items() if count},
        {name: longest_ns for name, (_, _, longest_ns) in told.items()},
        patterns,
        pair.unrecorded,
        pair.incomplete,
        pair.processes,
    )


def _age_ns(file: AgentFile) -> int:
    """How long a file's process has run, as it says."""
    started_ns = file.start_ticks * NS // _TICKS_PER_SECOND
    return max(0, time.clock_gettime_ns(time.CLOCK_BOOTTIME) - started_ns)


def _row(table: bytes, slot: int) -> int:
    return int.from_bytes(table[_CUTS[slot]], "little")


def _total(table: bytes, cuts: Iterable[slice]) -> int:
    """The sum of these rows."""
    to_int: Callable[[bytes, Literal["little"]], int] = int.from_bytes
    order: repeat[Literal["little"]] = repeat("little")
    return sum(map(to_int, map(table.__getitem__, cuts), order))


def _column(table: bytes, lane: int) -> array[int]:
    """One counter of all slots."""
    words = memoryview(table).cast("Q")
    return array("Q", words[layout.LANES_OFFSET // 8 + lane :: layout.KERNEL_SIZE // 8].tobytes())


def _join(account: _Account, slot: int) -> None:
    """Put a slot into its kernel's group. What it gains from where it stood counts there."""
    tally = account.targets[slot].tally
    if tally is _NOWHERE.tally:
        return
    group = account.groups.get(tally)
    if group is None:
        group = account.groups[tally] = _Group(tally)
    group.slots.append(slot)
    group.cuts.append(_CUTS[slot])
    group.total += _row(account.table, slot)


def _with_rows_of(old: bytes, new: bytes, slots: Iterable[int]) -> bytes:
    """The new table, but for these slots: what they gain is counted when it is known whose it is."""
    table = bytearray(new)
    for slot in slots:
        cut = _CUTS[slot]
        table[cut] = old[cut]
    return bytes(table)


def _adopt(account: _Account, reading: Reading, window: int) -> None:
    """Begin where the file stands. Raises LyingError."""
    account.table = reading.table
    account.overflow = [_row(reading.overflow, device) for device in range(layout.DEVICES)]
    account.devices = {index: counters for index, _, counters in reading.devices}
    account.window = window
    count = len(reading.table) // layout.KERNEL_SIZE
    account.busy = _column(account.table, layout.L_NS)
    if any(row & layout.HIGH for row in (*(_row(reading.table, slot) for slot in range(count)), *account.overflow)):
        raise LyingError


def _add_busy(account: _Account) -> None:
    """What each slot's kernel has run: it decides which get series."""
    before, account.busy = account.busy, _column(account.table, layout.L_NS)
    for kernel, gain in zip(account.targets, map(sub, account.busy, chain(before, repeat(0))), strict=True):
        kernel.busy_ns += gain


def _add_details(account: _Account, kernel: Kernel, slots: Iterable[int], table: bytes) -> None:
    """The spread of slots, each of whose executions are of equal name, grid and block, and their part of the window.

    Of the executions since the look before: a kernel that gets other sizes of data has another mean, and no jitter.
    """
    starts = [slot * layout.KERNEL_SIZE for slot in slots]
    after = map(layout.DETAILS.unpack_from, repeat(table), starts)
    before = map(layout.SPREAD.unpack_from, repeat(account.table), starts)
    # All in local variables: a look has ten thousand of these slots.
    seen, last = kernel.seen, account.window
    deviation_ns2, steady, steady_ns2 = kernel.deviation_ns2, seen.steady, seen.steady_ns2
    latency_ns, count, longest_ns = account.latest.get(kernel, (0, 0, -1))
    for now, (was, was_ns, was_squared) in zip(after, before, strict=True):
        executions, ns, squared, window, slot_longest_ns, slot_latency_ns, slot_count = now
        if executions <= was:
            continue
        gain_ns = ns - was_ns
        gain = squared - was_squared - gain_ns * (gain_ns / (executions - was))
        gain = gain if 0 < gain < _MAX_SQUARED else 0.0
        deviation_ns2 += gain
        if executions >= MIN_GROUP:
            steady += executions - was
            steady_ns2 += gain
        if window == last:
            latency_ns += slot_latency_ns
            count += slot_count
            longest_ns = max(longest_ns, slot_longest_ns)
    kernel.deviation_ns2 = min(deviation_ns2, _MAX_SQUARED)
    seen.steady, seen.steady_ns2 = steady, steady_ns2
    if longest_ns >= 0:
        account.latest[kernel] = (latency_ns, count, longest_ns)


def _compare(account: _Account, now_ns: int) -> None:
    """Find kernels that took longer in the last minute than is usual for them."""
    now = Mark(now_ns, _column(account.table, layout.L_EXECUTIONS), account.busy)
    account.slower = {
        group.tally.kernel: account.history.slowest(now, group.slots)
        for group in account.groups.values()
        if group.tally.kernel is not None
    }
    account.history.add(now)


def _give_series(pairs: Collection[Pair], gained: Collection[Pair], top_k: int, room: int) -> int:
    """How many more of a GPU's kernels got series: the busiest of all, and the busiest of each job to an equal share.

    Without that share a job that says that it runs for centuries would leave the others none.
    """
    share = max(1, top_k // len(pairs))
    named = [kernel for pair in pairs for kernel in pair.named]
    found = _busiest(named, [pair for pair in pairs if pair in gained], top_k)
    for pair in pairs:
        if pair in gained and len(pair.named) < share:
            found += [kernel for kernel in _busiest(pair.named, [pair], share) if kernel not in found]
    chosen = 0
    for kernel in found:
        if chosen < room and len(kernel.pair.named) < max(MAX_KERNELS_OF_JOB, top_k):
            kernel.give_series()
            chosen += 1
    return chosen


def _busiest(named: Collection[Kernel], pairs: Iterable[Pair], count: int) -> list[Kernel]:
    """Those of these pairs' kernels that are among so many busiest and have no series."""
    least_ns = sorted((kernel.busy_ns for kernel in named), reverse=True)[count - 1 : count] or [0]
    least = least_ns[0]
    candidates = [k for pair in pairs for k in pair.kernels.values() if k.busy_ns > least and not k.has_series]
    busiest = heapq.nsmallest(count, [*named, *candidates], key=_by_time)
    return [kernel for kernel in busiest if not kernel.has_series]


def _by_time(kernel: Kernel) -> tuple[int, str, str]:
    return -kernel.busy_ns, kernel.pair.job, kernel.name


def _amount(kernel: Kernel, gain: int) -> KernelAmount:
    lanes = layout.unpack_lanes(gain, layout.LANES)
    executions, launches, ns = lanes[layout.L_EXECUTIONS], lanes[layout.L_LAUNCHES], lanes[layout.L_NS]
    deviation, kernel.deviation_ns2 = kernel.deviation_ns2, 0.0
    kernel.seen.executions += executions
    kernel.seen.launches += launches
    kernel.seen.ns += ns
    kernel.seen.traced_ns = kernel.pair.traced_ns
    return KernelAmount(executions, launches, ns, deviation)


def _durations(gain: int) -> Durations:
    lanes = layout.unpack_lanes(gain, layout.LANES)
    return Durations(lanes[layout.L_NS], lanes[layout.L_BUCKETS : layout.L_BUCKETS + DURATION_BUCKETS])


def _copies(counters: tuple[int, ...], start: int) -> CopyAmount:
    return CopyAmount(
        counters[start + layout.C_BYTES],
        counters[start + layout.C_NS],
        counters[start + layout.C_API_NS],
        counters[start + layout.C_BUCKETS : start + layout.C_BUCKETS + layout.COPY_BUCKETS],
    )


def _pattern(kernel: Kernel, now_ns: int, slower: float, *, is_shared: bool) -> Pattern | None:
    """What the last five minutes look like, from a minute on."""
    marks = kernel.checkpoints
    if not marks or now_ns - marks[-1][0] >= _CHECKPOINT_NS:
        marks.append((now_ns, kernel.seen.copy()))
        while len(marks) > 1 and now_ns - marks[1][0] >= _PATTERN_NS:
            marks.popleft()
    begin_ns, before = marks[0]
    if now_ns - begin_ns < _MIN_PATTERN_NS:
        return None
    return pattern(kernel.seen.since(before, slower, is_shared=is_shared))
