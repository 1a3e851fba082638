"""What the agents' files add up to: per (GPU, job) and kernel, without a counter ever going back.

Every file has cumulative counters. What each has gained since it was last read goes to its GPU's and job's account, so
that neither the end of a process nor that of an agent takes anything away. A row of counters is added up as one large
integer: a hundred thousand of them are read in a tenth of a second.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

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
)
from gpu_hpc_exporter.sources.kernels import layout
from gpu_hpc_exporter.sources.kernels.files import AgentFile, Reading

MAX_KERNELS_OF_GPU: Final = 24
"""Kernels of a GPU that may have series, all its jobs together: those that once got them keep them."""
MAX_NAMED_KERNELS: Final = 128
"""The same for the whole node."""
MAX_PAIRS: Final = 16
"""(GPU, job) pairs of their own; the jobs of others are `other`."""
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
_NO_COUNTERS: Final = (0,) * 182
_MAX_COUNTER: Final = 1 << 60
_NS_SHIFT: Final = 64 * layout.L_NS
_LANE: Final = (1 << 64) - 1


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

    def since(self, before: _Seen) -> Behaviour:
        steady = self.steady - before.steady
        deviation_ns2 = (self.steady_ns2 - before.steady_ns2) / steady if steady > 0 else 0.0
        return Behaviour(
            (self.traced_ns - before.traced_ns) / NS,
            self.launches - before.launches,
            self.executions - before.executions,
            (self.ns - before.ns) / NS,
            steady,
            math.sqrt(max(0.0, deviation_ns2)) / NS,
        )


class Kernel:
    """A signature within a (GPU, job). `gain`: its row since the last report; busy_ns: from the start."""

    __slots__ = ("busy_ns", "category", "checkpoints", "deviation_ns2", "gain", "has_series", "name", "pair", "seen")

    def __init__(self, pair: Pair, name: str, kind: Category) -> None:
        self.pair = pair
        self.name = name
        self.category = kind
        self.gain = 0
        self.busy_ns = 0
        self.has_series = False
        self.deviation_ns2 = 0.0
        self.seen = _Seen()
        self.checkpoints: deque[tuple[int, _Seen]] = deque()


class Pair:
    """A job on a GPU: what its processes have gained there since the last report."""

    def __init__(self, uuid: str, job: str) -> None:
        self.uuid = uuid
        self.job = job
        self.kernels: dict[str, Kernel] = {}
        self.rest = Kernel(self, OTHER, "other")
        self.named: list[Kernel] = []
        self.device = list(_NO_COUNTERS)
        self.traced_ns = 0
        self.last_ns = 0
        self.files = 0

    def kernel(self, name: str) -> Kernel:
        """The account of a signature; the rest's where there are too many."""
        kernel = self.kernels.get(name)
        if kernel is None:
            if self.job == OTHER_JOB or len(self.kernels) >= MAX_SIGNATURES:
                return self.rest
            kernel = self.kernels[name] = Kernel(self, name, category(name))
        return kernel


@dataclass(slots=True)
class _Account:
    """What was last read of one file, and where it belongs.

    places: by the process's device, None where that is no GPU of ours. slots: device and signature of each kernel, its
    mangled name while the signature is not known; targets: what its gain goes to, None meanwhile; rows: its counters as
    last read. details: executions, nanoseconds and their squares of slots whose kernels have series. latest: what each
    of those kernels did in the last window: launch-to-start time, its number, and the longest execution.
    """

    places: dict[int, Pair | None] = field(default_factory=dict)
    slots: list[tuple[int, bytes | str]] = field(default_factory=list)
    targets: list[Kernel | None] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    details: dict[int, tuple[int, int, float]] = field(default_factory=dict)
    overflow: list[int] = field(default_factory=lambda: [0] * layout.DEVICES)
    devices: dict[int, tuple[int, ...]] = field(default_factory=dict)
    window: int = 0
    waiting: set[int] = field(default_factory=set)
    latest: dict[Kernel, list[int]] = field(default_factory=dict)
    latest_until_ns: int = 0


_NOWHERE: Final = Kernel(Pair("", ""), "", "other")
"""Where gains on GPUs go that are none of ours."""


@dataclass(slots=True)
class _Gains:
    """What a (GPU, job) has gained since the last report: rows by category, of kernels with series, and of the rest."""

    categories: dict[Category, int] = field(default_factory=dict)
    named: dict[Kernel, int] = field(default_factory=dict)
    rest: int = 0

    def add(self, kernel: Kernel, gain: int) -> None:
        self.categories[kernel.category] = self.categories.get(kernel.category, 0) + gain
        if kernel.has_series:
            self.named[kernel] = gain
        else:
            self.rest += gain


class KernelLedger:
    """Accounts of all files and all (GPU, job) pairs. Belongs to one thread."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._accounts: dict[tuple[str, int], _Account] = {}
        self._pairs: dict[tuple[str, str], Pair] = {}
        self._touched: list[Kernel] = []

    def take(
        self,
        file: AgentFile,
        reading: Reading,
        place: Callable[[str], tuple[str, str] | None],
        name_of: Callable[[bytes], str | None],
        now_ns: int,
    ) -> None:
        """Add what a file has gained.

        `place`: UUID and job of a device by its UUID in hex, None where it is no GPU of ours. `name_of`: a kernel's
        signature, None where it has yet to be found: then its gain waits. Raises LyingError.
        """
        is_new = file.key not in self._accounts
        account = self._accounts.setdefault(file.key, _Account())
        self._settle(account, reading, place)
        late = self._extend(account, reading, name_of)
        if is_new and file.is_old:
            # What was counted before this exporter began belongs to the one before it.
            _adopt(account, reading, file.windows)
            file.must_read = bool(account.waiting)
            return
        self._add_devices(account, reading)
        self._add_kernels(account, reading, file, late)
        file.must_read = bool(account.waiting)
        period_s = file.status.period_s if file.status is not None else 0.0
        account.latest_until_ns = now_ns + round(_MAX_LIVES * period_s * NS)

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

    def report(self, now_ns: int, is_wanted: Callable[[str, str], bool]) -> tuple[GpuActivity, ...]:
        """Everything gained since the report before. Pairs without files that are not wanted either are forgotten."""
        self._forget_pairs(is_wanted)
        others: dict[str, list[Kernel]] = {}
        gained = {pair: _Gains() for pair in self._pairs.values()}
        for kernel in self._touched:
            gain, kernel.gain = kernel.gain, 0
            kernel.busy_ns += gain >> _NS_SHIFT & _LANE
            gains = gained.get(kernel.pair)
            if gains is not None:
                gains.add(kernel, gain)
                if not kernel.has_series:
                    others.setdefault(kernel.pair.uuid, []).append(kernel)
        self._touched = []
        self._choose(others)
        latest = self._latest(now_ns)
        return tuple(_activity(pair, gains, latest, now_ns) for pair, gains in gained.items())

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
            account.targets = []
            account.latest = {}
            account.details = {}

    def _pair(self, key: tuple[str, str] | None) -> Pair | None:
        if key is None:
            return None
        pair = self._pairs.get(key)
        if pair is None:
            own = sum(pair.job != OTHER_JOB for pair in self._pairs.values())
            if own >= MAX_PAIRS and key[1] != OTHER_JOB:
                return self._pair((key[0], OTHER_JOB))
            pair = self._pairs[key] = Pair(*key)
        return pair

    def _extend(self, account: _Account, reading: Reading, name_of: Callable[[bytes], str | None]) -> Collection[int]:
        """Targets of new slots, and of those whose names were not known before; the latter are answered."""
        account.slots += reading.names
        account.rows += [0] * len(reading.names)
        begin = len(account.targets)
        late = account.waiting
        account.waiting = set()
        account.targets += [None] * (len(account.slots) - begin)
        for slot in (*(slot for slot in late if slot < begin), *range(begin, len(account.slots))):
            device, name = account.slots[slot]
            pair = account.places.get(device)
            found = name_of(name) if isinstance(name, bytes) else name
            if found is None:
                account.waiting.add(slot)
                continue
            account.slots[slot] = (device, found)
            account.targets[slot] = pair.kernel(found) if pair is not None else _NOWHERE
        return late

    def _add_devices(self, account: _Account, reading: Reading) -> None:
        for index, _, counters in reading.devices:
            before = account.devices.get(index, _NO_COUNTERS)
            account.devices[index] = counters
            if counters == before:
                continue
            gains = [now - was for now, was in zip(counters, before, strict=True)]
            if min(gains) < 0 or max(counters) >= _MAX_COUNTER:
                raise LyingError
            pair = account.places.get(index)
            if pair is not None:
                pair.device = [have + gain for have, gain in zip(pair.device, gains, strict=True)]

    def _add_kernels(self, account: _Account, reading: Reading, file: AgentFile, late: Collection[int]) -> None:
        """Add the gains of the slots that a window has changed since they were last read, and of `late` ones.

        This runs a hundred thousand times in each look: no call and no object too many. A counter that goes back leaves
        the highest bits of its lane set. Raises LyingError.
        """
        table, rows, targets, touched = reading.table, account.rows, account.targets, self._touched
        last, account.window = account.window, file.windows
        if account.window != last:
            account.latest = {}
        to_int, size, high = int.from_bytes, layout.KERNEL_SIZE, layout.HIGH
        slots = zip(layout.ROW.iter_unpack(table), targets, rows, strict=False)
        for slot, ((lanes, window), target, before) in enumerate(slots):
            if target is None or (window <= last and slot not in late):
                continue
            row = to_int(lanes, "little")
            gain = row - before
            if not gain:
                continue
            if gain & high:
                raise LyingError
            rows[slot] = row
            if not target.gain:
                touched.append(target)
            target.gain += gain
            if target.has_series:
                _add_details(account, target, slot, layout.DETAILS.unpack_from(table, slot * size))
        self._add_overflow(account, reading)

    def _add_overflow(self, account: _Account, reading: Reading) -> None:
        """Kernels for which there was no room: they have no names."""
        for index, pair in account.places.items():
            start = index * layout.KERNEL_SIZE + layout.LANES_OFFSET
            row = int.from_bytes(reading.overflow[start : start + layout.LANES_SIZE], "little")
            gain = row - account.overflow[index]
            account.overflow[index] = row
            if gain & layout.HIGH:
                raise LyingError
            if gain and pair is not None:
                if not pair.rest.gain:
                    self._touched.append(pair.rest)
                pair.rest.gain += gain

    # From accounts to reports

    def _choose(self, others: Mapping[str, list[Kernel]]) -> None:
        """Give series to the busiest kernels of each GPU. Only what has run since the last time can have become one."""
        named: dict[str, list[Kernel]] = {}
        for pair in self._pairs.values():
            named.setdefault(pair.uuid, []).extend(pair.named)
        left = MAX_NAMED_KERNELS - sum(len(kernels) for kernels in named.values())
        for uuid, kernels in others.items():
            have = named.get(uuid, [])
            room = min(MAX_KERNELS_OF_GPU - len(have), left)
            if room > 0:
                left -= _give_series(have, kernels, self.top_k, room)

    def _forget_pairs(self, is_wanted: Callable[[str, str], bool]) -> None:
        for key, pair in list(self._pairs.items()):
            if pair.files <= 0 and not is_wanted(*key):
                del self._pairs[key]

    def _latest(self, now_ns: int) -> dict[Kernel, list[int]]:
        """Launch-to-start time and number, and the longest execution, of all processes' last windows."""
        latest: dict[Kernel, list[int]] = {}
        for account in self._accounts.values():
            if now_ns > account.latest_until_ns:
                account.latest = {}
            for kernel, (latency_ns, count, longest_ns) in account.latest.items():
                have = latest.setdefault(kernel, [0, 0, 0])
                have[0] += latency_ns
                have[1] += count
                have[2] = max(have[2], longest_ns)
        return latest


def _activity(pair: Pair, gains: _Gains, latest: Mapping[Kernel, list[int]], now_ns: int) -> GpuActivity:
    counters, pair.device = pair.device, list(_NO_COUNTERS)
    pair.traced_ns += counters[layout.D_TRACED]
    kernels = {kernel.name: _amount(kernel, gains.named.get(kernel, 0)) for kernel in pair.named}
    kernels[OTHER] = _amount(pair.rest, gains.rest)
    patterns = {kernel.name: found for kernel in pair.named if (found := _pattern(kernel, now_ns)) is not None}
    told = {kernel.name: latest[kernel] for kernel in pair.named if kernel in latest}
    queue = tuple(counters[layout.D_QUEUE_BUCKETS : layout.D_QUEUE_BUCKETS + DURATION_BUCKETS])
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
    )


def _adopt(account: _Account, reading: Reading, window: int) -> None:
    """Begin where the file stands."""
    account.rows = [int.from_bytes(lanes, "little") for lanes, _ in layout.ROW.iter_unpack(reading.table)]
    account.overflow = [int.from_bytes(lanes, "little") for lanes, _ in layout.ROW.iter_unpack(reading.overflow)]
    account.devices = {index: counters for index, _, counters in reading.devices}
    account.window = window
    if any(row & layout.HIGH for row in (*account.rows, *account.overflow)):
        raise LyingError


def _add_details(account: _Account, kernel: Kernel, slot: int, details: tuple[Any, ...]) -> None:
    """The spread of a slot, whose executions are of equal name, grid and block, and its part of the last window.

    What a slot did before its kernel had series does not count: with nothing to compare, this time is the first.
    """
    executions, ns, squared, window, longest_ns, latency_ns, count = details
    before = account.details.get(slot)
    account.details[slot] = (executions, ns, squared)
    if before is not None and executions:
        was, was_ns, was_squared = before
        gain = (squared - ns * ns / executions) - (was_squared - was_ns * was_ns / was if was else 0.0)
        gain = gain if 0 < gain < math.inf else 0.0
        kernel.deviation_ns2 += gain
        if executions >= MIN_GROUP:
            kernel.seen.steady += executions - was
            kernel.seen.steady_ns2 += gain
    if window == account.window:
        have = account.latest.get(kernel)
        if have is None:
            account.latest[kernel] = [latency_ns, count, longest_ns]
        else:
            have[0] += latency_ns
            have[1] += count
            have[2] = max(have[2], longest_ns)


def _give_series(named: list[Kernel], others: list[Kernel], top_k: int, room: int) -> int:
    """How many of the others got series, since they are among the busiest of all."""
    least_ns = sorted((kernel.busy_ns for kernel in named), reverse=True)[top_k - 1 : top_k] or [0]
    candidates = [k for k in others if k.busy_ns > least_ns[0] and k is not k.pair.rest]
    busiest = heapq.nsmallest(top_k, [*named, *candidates], key=_by_time)
    chosen = [kernel for kernel in busiest if not kernel.has_series][:room]
    for kernel in chosen:
        kernel.has_series = True
        kernel.pair.named.append(kernel)
    return len(chosen)


def _by_time(kernel: Kernel) -> tuple[int, str, str]:
    return -kernel.busy_ns, kernel.pair.job, kernel.name


def _amount(kernel: Kernel, gain: int) -> KernelAmount:
    lanes = layout.unpack_lanes(gain)
    executions, launches, ns = lanes[layout.L_EXECUTIONS], lanes[layout.L_LAUNCHES], lanes[layout.L_NS]
    deviation, kernel.deviation_ns2 = kernel.deviation_ns2, 0.0
    kernel.seen.executions += executions
    kernel.seen.launches += launches
    kernel.seen.ns += ns
    kernel.seen.traced_ns = kernel.pair.traced_ns
    return KernelAmount(executions, launches, ns, deviation)


def _durations(gain: int) -> Durations:
    lanes = layout.unpack_lanes(gain)
    return Durations(lanes[layout.L_NS], tuple(lanes[layout.L_BUCKETS : layout.L_BUCKETS + DURATION_BUCKETS]))


def _copies(counters: list[int], start: int) -> CopyAmount:
    buckets = counters[start + layout.C_BUCKETS : start + layout.C_BUCKETS + layout.COPY_BUCKETS]
    return CopyAmount(
        counters[start + layout.C_BYTES],
        counters[start + layout.C_NS],
        counters[start + layout.C_API_NS],
        tuple(buckets),
    )


def _pattern(kernel: Kernel, now_ns: int) -> Pattern | None:
    """What the last five minutes look like, from a minute on."""
    marks = kernel.checkpoints
    if not marks or now_ns - marks[-1][0] >= _CHECKPOINT_NS:
        marks.append((now_ns, kernel.seen.copy()))
        while len(marks) > 1 and now_ns - marks[1][0] >= _PATTERN_NS:
            marks.popleft()
    begin_ns, before = marks[0]
    return pattern(kernel.seen.since(before)) if now_ns - begin_ns >= _MIN_PATTERN_NS else None
