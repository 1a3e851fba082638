"""The directory of the agents' files, read so that no file, whoever made it, costs more than itself.

Anybody may create files there. So: each is opened without following links and without waiting, must be regular, have
one name, and be exactly as large and laid out as this version's; nothing in it is an offset that is followed unchecked;
it is read with pread, never mapped, since its owner may shorten it at any time. What does not fit is counted by
reason, told in the log once, and not opened again; where that may be for now only it is looked at again, and not told.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.model import Recordable
from gpu_hpc_exporter.sources.kernels import layout

log = logging.getLogger(__name__)

MAX_ENTRIES: Final = 4096
"""Names in the directory that one scan looks at; the next one goes on where it ended."""
_MAX_REFUSED: Final = 4 * MAX_ENTRIES
MAX_FILES: Final = 1024
MAX_FILES_OF_USER: Final = 256
MAX_KERNELS_OF_USER: Final = 300_000
"""Slots in use in all files of a user: each costs the reader about 500 bytes."""
MAX_STRINGS_OF_USER: Final = 64 << 20
"""Bytes of names in all files of a user; they are kept until they are demangled."""
MAX_KERNELS: Final = 450_000
MAX_STRINGS: Final = 96 << 20
"""The same of all users, since root in a container is as many as it likes: one who has all that a user may have leaves
room for 64 processes with 2,000 kernels each."""
KEPT_DEAD_S: Final = 60.0
"""A file stays so long after its process has ended, for whoever else reads it."""
KEPT_UNREAD_S: Final = 600.0
"""And so long if it cannot be read: whether its process lives is not known then."""
REASONS: Final = (
    *("unreadable", "symlink", "not_regular", "linked", "unknown_magic", "unknown_version", "wrong_size"),
    *("wrong_layout", "too_many", "duplicate", "foreign_owner", "lying", "torn", "foreign_gpu", "wrong_times"),
)
"""Why files are rejected; by the last three only in part: a torn one for now, what one says of GPUs on which its
process is not, and of times that cannot be. Without room, and mostly where unreadable, for now too; of a known file
without room only the kernels that are new."""

_NAME: Final = re.compile(r"[0-9]{1,10}-[0-9]{1,20}-[0-9A-Za-z]{1,32}\.shm", re.ASCII)
_UNFINISHED: Final = re.compile(r"[0-9]{1,10}-[0-9]{1,20}-[0-9A-Za-z]{1,32}\.tmp", re.ASCII)
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_OWN_ERRORS: Final = {errno.ELOOP: "symlink", errno.ENXIO: "unreadable", errno.EWOULDBLOCK: "unreadable"}
"""What opening meets only where the file itself is odd: a socket, one with a lease. Others are the host's, or pass."""
_ALL_USERS: Final = -1
_ATTEMPTS: Final = 4
_RETRIES: Final = 64
"""Second attempts in one scan, all files together."""
_RETRY_S: Final = 0.0005
_TORN_SCANS: Final = 3
_MAX_LOGGED: Final = 20
_MAX_UNLINKED: Final = 64
_FLOCK: Final = struct.Struct("@hhqqi4x")
_HEARTBEAT_S: Final = 5.0
_STEP_NS: Final = 10**9
_MAX_VARIABLES: Final = 64


class RejectedError(Exception):
    """A file that cannot be an honest agent's; the text is one of REASONS."""


@dataclass(slots=True)
class Status:
    """The changing part of a header; times by CLOCK_REALTIME.

    traces: how many times of tracing there were, the one that goes on included; intervals: the last of them, packed.
    unrecorded: what windows leave out of the counters now.
    """

    heartbeat_ns: int
    state: str
    reason: str
    overhead_ratio: float
    records: tuple[int, int, int, int]
    """Kept, dropped, invalid, unmatched."""
    windows: int
    period_s: float
    kernels: int
    strings: int
    traces: int
    intervals: bytes
    unrecorded: frozenset[Recordable]


@dataclass(slots=True)
class AgentFile:
    """One process's file. is_old: it was there at the first scan. kernels, strings: slots and bytes of names read.

    device: of its file system (st_dev). must_read: its kernels are wanted though no new window has come. died_s: when
    its process was seen to be gone. unread_s: since when it could not be opened. is_behind: for new kernels there was
    no room; whoever counts takes them from where they stand. uuids: of its devices, in hex, once a window has been
    published.
    """

    name: str
    inode: int
    uid: int
    pid: int
    start_ticks: int
    is_old: bool
    environment: dict[str, str]
    status: Status | None = None
    windows: int = -1
    kernels: int = 0
    strings: int = 0
    device: int = 0
    must_read: bool = False
    died_s: float | None = None
    unread_s: float | None = None
    is_behind: bool = False
    torn: int = 0
    rejected: str = ""
    uuids: tuple[str, ...] = ()
    _names: set[int] = field(default_factory=set)
    """Hashes of those that were read."""

    @property
    def key(self) -> tuple[str, int]:
        """What tells it from another file that gets its name later."""
        return self.name, self.inode

    def rewind(self) -> None:
        """Read all of it again next time."""
        self.windows, self.kernels, self.strings = -1, 0, 0
        self._names.clear()

    def reject(self, reason: str) -> None:
        """Read it no more."""
        self.rejected = reason

    def new_bytes(self, reading: Reading) -> int:
        """Bytes of the names that a reading brings; one has a slot for each grid and block, and counts once."""
        fresh = {hash(name): len(name) for _, name in reading.names}
        strings = sum(size for name, size in fresh.items() if name not in self._names)
        self._names |= fresh.keys()
        return strings

    def is_beating(self, now_ns: int) -> bool:
        """Whether its agent's thread has run in the last seconds. One in the future was before the clock was set."""
        return self.status is not None and abs(now_ns - self.status.heartbeat_ns) < _HEARTBEAT_S * 1e9


@dataclass(slots=True)
class Reading:
    """A consistent copy of a file's counters: rows of its kernels, and of those that have no name, one a device.

    names: device and mangled name of each slot that is new; devices: index, UUID in hex and counters, as one integer,
    of those in use.
    """

    devices: list[tuple[int, str, int]]
    table: bytes
    overflow: bytes
    names: list[tuple[int, bytes]]


@dataclass(slots=True)
class _Scan:
    """One look at the directory. offset_ns: of the clock at the look before. is_whole: at all of its names."""

    descriptor: int
    now_s: float
    offset_ns: int
    retries: int = _RETRIES
    is_whole: bool = True
    by_user: Counter[int] = field(default_factory=Counter)
    kernels: Counter[int] = field(default_factory=Counter)
    strings: Counter[int] = field(default_factory=Counter)

    def add(self, uid: int, kernels: int, strings: int) -> None:
        """Count so much more of a user's."""
        for who in (uid, _ALL_USERS):
            self.kernels[who] += kernels
            self.strings[who] += strings

    def is_clock_set(self) -> bool:
        """Whether Unix time was set since the look before: then only the next one can tell who beats."""
        return abs(_offset_ns() - self.offset_ns) > _STEP_NS

    def has_room(self, file: AgentFile, status: Status) -> bool:
        """Whether its user, and all users together, may have what is new of a file."""
        if status.kernels <= file.kernels:
            return True
        kernels, strings = status.kernels - file.kernels, max(0, status.strings - file.strings)
        return (
            self.kernels[file.uid] + kernels <= MAX_KERNELS_OF_USER
            and self.strings[file.uid] + strings <= MAX_STRINGS_OF_USER
            and self.kernels[_ALL_USERS] + kernels <= MAX_KERNELS
            and self.strings[_ALL_USERS] + strings <= MAX_STRINGS
        )


class _Listing:
    """A directory's names, some at a time."""

    def __init__(self, descriptor: int) -> None:
        self._entries = os.scandir(descriptor)
        self.close = self._entries.close

    def take(self, count: int) -> list[os.DirEntry[str]]:
        """The next ones; fewer where there are no more."""
        return [*islice(self._entries, count)]


class AgentFiles:
    """The files of one directory and what was rejected. Belongs to one thread."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._clock = clock
        self._files: dict[str, AgentFile] = {}
        self._refused: dict[str, int] = {}
        self._told: dict[str, dict[str, int]] = {"too_many": {}, "unreadable": {}}
        """Files that were counted and are looked at again: there may be room later, or they can be read."""
        self._old: dict[str, int] | None = None
        self._listing: _Listing | None = None
        self._is_flooded = False
        self._is_stuck = False
        self._offset_ns = _offset_ns()
        self._logged = 0
        self.rejected: dict[str, int] = dict.fromkeys(REASONS, 0)
        """Files so far by reason."""

    def scan(self) -> Iterator[tuple[AgentFile, Reading | None]]:
        """Every file that there is, with its counters where a window has been published since they were last read.

        Raises OSError where the directory cannot be read. A file that the reader rejects is left out from then on. One
        that is known and cannot be read this time keeps its place: nothing of it is to be counted twice.
        """
        with _open_folder(self._directory) as folder:
            scan = _Scan(folder, self._clock(), self._offset_ns)
            self._offset_ns = _offset_ns()
            present = self._present(scan)
            self._files = {name: file for name, file in self._files.items() if present.get(name) == file.inode}
            self._refused = self._still_there(self._refused, present, is_whole=scan.is_whole)
            for reason, told in self._told.items():
                self._told[reason] = self._still_there(told, present, is_whole=scan.is_whole)
            for file in self._files.values():
                scan.by_user[file.uid] += 1
                scan.add(file.uid, file.kernels, file.strings)
            old = self._old = present if self._old is None else self._old
            for name, inode in present.items():
                found = self._try(scan, name, inode, is_old=old.get(name) == inode)
                if found is None:
                    continue
                file, reading = found
                yield file, reading
                if file.rejected:
                    self._refuse(name, inode, file.rejected, scan)
                elif file.died_s is not None and scan.now_s - file.died_s >= KEPT_DEAD_S:
                    self._remove(scan, file)

    def note(self, file: AgentFile, reason: str) -> None:
        """Count and name a file of which a part is not believed; all else of it is read on."""
        self._count(file.name, reason, file.uid, part="in part ")

    def _present(self, scan: _Scan) -> dict[str, int]:
        """Inodes by name, known files first, so that new ones cannot push them out; old leftovers are removed."""
        names: dict[str, int] = {}
        leftovers: list[str] = []
        entries, is_whole = self._next_entries(scan)
        for entry in entries:
            if _NAME.fullmatch(entry.name):
                names[entry.name] = entry.inode()
            elif _UNFINISHED.fullmatch(entry.name):
                leftovers.append(entry.name)
        for name in leftovers[:_MAX_UNLINKED]:
            with suppress(OSError):
                status = os.stat(name, dir_fd=scan.descriptor, follow_symlinks=False)
                if stat.S_ISREG(status.st_mode) and time.time() - status.st_mtime > KEPT_DEAD_S:
                    os.unlink(name, dir_fd=scan.descriptor)
        known: dict[str, int] = {}
        for name in self._files:
            if name in names:
                known[name] = names[name]
            elif not is_whole:
                with suppress(OSError):
                    known[name] = os.stat(name, dir_fd=scan.descriptor, follow_symlinks=False).st_ino
        scan.is_whole = is_whole
        return known | names

    def _next_entries(self, scan: _Scan) -> tuple[list[os.DirEntry[str]], bool]:
        """The next names of the directory, of which somebody may have made millions; whether these are all."""
        is_first = self._listing is None
        self._listing = self._listing or _Listing(scan.descriptor)
        entries = self._listing.take(MAX_ENTRIES)
        has_ended = len(entries) < MAX_ENTRIES
        if has_ended:
            self.close()
        elif not self._is_flooded:
            self._is_flooded = True
            log.warning("%s has %d names or more: new files in it are found late", self._directory, MAX_ENTRIES)
        return entries, is_first and has_ended

    def _still_there(self, names: dict[str, int], present: Mapping[str, int], *, is_whole: bool) -> dict[str, int]:
        """Those of these files that are present, or that may be where not all names were looked at."""
        kept = [item for item in names.items() if present.get(item[0], None if is_whole else item[1]) == item[1]]
        return dict(kept[-_MAX_REFUSED:])

    def close(self) -> None:
        """End a listing that has not come to its end."""
        if self._listing is not None:
            self._listing.close()
            self._listing = None

    def _try(self, scan: _Scan, name: str, inode: int, *, is_old: bool) -> tuple[AgentFile, Reading | None] | None:
        """What there is of a file now; None of one that is refused, has gone, or is new and cannot be read."""
        if name in self._refused:
            return None
        try:
            return self._look(scan, name, self._files.get(name), is_old=is_old)
        except RejectedError as problem:
            self._refuse(name, inode, str(problem), scan)
        except FileNotFoundError:  # it has just gone
            pass
        except OSError:
            file = self._files.get(name)
            self._tell_once(name, inode, "unreadable", file)
            if file is not None and not self._is_given_up(scan, file):
                file.torn += 1
                return file, None
        return None

    def _is_given_up(self, scan: _Scan, file: AgentFile) -> bool:
        """Whether a known file could not be read for so long that its process has ended for all that is known.

        Can it be read again, what it counted until then is not counted twice.
        """
        file.unread_s = scan.now_s if file.unread_s is None else file.unread_s
        is_over = scan.now_s - file.unread_s >= KEPT_UNREAD_S
        if is_over and self._old is not None:
            self._forget(scan, file.name)
            self._old[file.name] = file.inode
            if len(self._old) > _MAX_REFUSED:
                del self._old[next(iter(self._old))]
        return is_over

    def _look(
        self, scan: _Scan, name: str, file: AgentFile | None, *, is_old: bool
    ) -> tuple[AgentFile, Reading | None]:
        """Raises RejectedError, and OSError where it cannot be read now."""
        try:
            descriptor = os.open(name, _OPEN, dir_fd=scan.descriptor)
        except OSError as error:
            if error.errno in _OWN_ERRORS:
                raise RejectedError(_OWN_ERRORS[error.errno]) from error
            raise
        try:
            status = os.fstat(descriptor)
            if file is None:
                file = self._accept(scan, name, descriptor, status, is_old=is_old)
            elif status.st_size != layout.FILE_SIZE:
                raise RejectedError("wrong_size")
            elif status.st_uid != file.uid:
                raise RejectedError("foreign_owner")
            # First whether it has ended, then the last that it wrote.
            is_free = _is_free(descriptor)
            is_wanted = file.died_s is None or file.must_read
            reading = self._read(scan, file, descriptor) if is_wanted else None
            if is_free and file.died_s is None and not file.is_beating(time.time_ns()) and not scan.is_clock_set():
                file.died_s = scan.now_s
            return file, reading
        finally:
            os.close(descriptor)

    def _accept(self, scan: _Scan, name: str, descriptor: int, status: os.stat_result, *, is_old: bool) -> AgentFile:
        """What a new file must be like."""
        if not stat.S_ISREG(status.st_mode):
            raise RejectedError("not_regular")
        if status.st_nlink != 1:
            raise RejectedError("linked")
        if len(self._files) >= MAX_FILES or scan.by_user[status.st_uid] >= MAX_FILES_OF_USER:
            raise RejectedError("too_many")
        head = os.pread(descriptor, layout.IDENTITY.size, 0)
        if not layout.MAGIC.startswith(head[: len(layout.MAGIC)]):
            raise RejectedError("unknown_magic")
        if len(head) < layout.IDENTITY.size:
            raise RejectedError("wrong_size")
        _, version, *fields = layout.IDENTITY.unpack(head)
        if version != layout.VERSION:
            raise RejectedError("unknown_version")
        if status.st_size != layout.FILE_SIZE:
            raise RejectedError("wrong_size")
        count = len(layout.SHAPE)
        if tuple(fields[:count]) != layout.SHAPE:
            raise RejectedError("wrong_layout")
        pid, start_ticks, _, _, _ = fields[count:]
        environment = _environment(os.pread(descriptor, layout.MAX_ENVIRONMENT, layout.ENVIRONMENT_OFFSET))
        file = AgentFile(
            name, status.st_ino, status.st_uid, pid, start_ticks, is_old, environment, device=status.st_dev
        )
        scan.by_user[file.uid] += 1
        self._files[name] = file
        return file

    def _read(self, scan: _Scan, file: AgentFile, descriptor: int) -> Reading | None:
        for attempt in range(_ATTEMPTS):
            if attempt:
                if scan.retries <= 0:
                    break
                scan.retries -= 1
                time.sleep(_RETRY_S)
            head = os.pread(descriptor, layout.HEAD_SIZE, 0)
            if len(head) < layout.HEAD_SIZE:
                raise RejectedError("wrong_size")
            (sequence,) = layout.SEQUENCE.unpack_from(head, layout.SEQUENCE_OFFSET)
            if sequence % 2:
                continue
            status = _parse_status(head)
            is_new = status.windows != file.windows or file.must_read
            if is_new and not scan.has_room(file, status):
                is_new = self._leave_out(file, status)
            reading = _copy(descriptor, file, status) if is_new else None
            if os.pread(descriptor, layout.SEQUENCE.size, layout.SEQUENCE_OFFSET) != layout.SEQUENCE.pack(sequence):
                continue
            file.torn, file.unread_s = 0, None
            file.status = status
            if reading is not None:
                file.windows, file.must_read = status.windows, False
                kernels, strings = status.kernels - file.kernels, file.new_bytes(reading)
                scan.add(file.uid, kernels, strings)
                file.kernels, file.strings = status.kernels, file.strings + strings
                file.uuids = tuple(uuid for _, uuid, _ in reading.devices)
            return reading
        file.torn += 1
        if file.torn == _TORN_SCANS:
            self.note(file, "torn")
        return None

    def _leave_out(self, file: AgentFile, status: Status) -> bool:
        """Let new kernels wait until there is room; whether there are others. Raises RejectedError for a new file."""
        if file.status is None:
            raise RejectedError("too_many")
        self._tell_once(file.name, file.inode, "too_many", file)
        file.is_behind = True
        status.kernels = file.kernels
        return file.windows >= 0

    def _refuse(self, name: str, inode: int, reason: str, scan: _Scan) -> None:
        file = self._forget(scan, name)
        if reason == "too_many":
            self._tell_once(name, inode, reason, None)
        else:
            self._refused[name] = inode
            self._count(name, reason, file.uid if file is not None else None)

    def _forget(self, scan: _Scan, name: str) -> AgentFile | None:
        """Give a file's place to others."""
        file = self._files.pop(name, None)
        if file is not None:
            scan.by_user[file.uid] -= 1
            scan.add(file.uid, -file.kernels, -file.strings)
        return file

    def _tell_once(self, name: str, inode: int, reason: str, file: AgentFile | None) -> None:
        """Count and name a file that is looked at again, or of which only a part is left out."""
        if name in self._told[reason]:
            return
        self._told[reason][name] = inode
        if file is not None:
            self.note(file, reason)
        else:
            self._count(name, reason, None)

    def _count(self, name: str, reason: str, uid: int | None, part: str = "") -> None:
        self.rejected[reason] += 1
        self._logged += 1
        if self._logged <= _MAX_LOGGED:
            owner = f" of user {uid}" if uid is not None else ""
            more = "; others will only be counted" if self._logged == _MAX_LOGGED else ""
            log.warning("agent file %s%s is %srejected: %s%s", self._directory / name, owner, part, reason, more)

    def _remove(self, scan: _Scan, file: AgentFile) -> None:
        """Delete the file of a process that has ended, if the name is still its own; it is told no more in any case."""
        self._forget(scan, file.name)
        self._refused[file.name] = file.inode
        try:
            if os.stat(file.name, dir_fd=scan.descriptor, follow_symlinks=False).st_ino == file.inode:
                os.unlink(file.name, dir_fd=scan.descriptor)
        except FileNotFoundError:
            pass
        except OSError as error:
            if not self._is_stuck:
                self._is_stuck = True
                reason = error.strerror
                log.warning("agent files of processes that have ended stay in %s: %s", self._directory, reason)


def make_folder(path: Path) -> None:
    """Make the agents' directory where we may: anybody may leave a file, only we list them, files get our group.

    A parent such as /run/gpu-hpc-exporter is made too. Where we may not, it stays as it is.
    """
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        path.mkdir()
        path.chmod(FOLDER_MODE)


FOLDER_MODE: Final = 0o3733


@contextmanager
def _open_folder(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _offset_ns() -> int:
    return time.time_ns() - time.monotonic_ns()


def _is_free(descriptor: int) -> bool:
    """Whether nobody holds the lock that an agent has while its process lives."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted)
    return bool(_FLOCK.unpack(answer)[0] == fcntl.F_UNLCK)


def _parse_status(head: bytes) -> Status:
    """Raises RejectedError where a count is beyond its place."""
    values = layout.STATUS.unpack_from(head, layout.STATUS_OFFSET)
    heartbeat_ns, state, reason = values[:3]
    overhead = values[9]
    records = values[14:18]
    windows, period_s = values[19], values[23]
    kernels, strings, traces = values[26], values[27], values[29]
    if kernels > layout.KERNELS or strings > layout.STRINGS or max(records) >= _MAX_RECORDS or windows >= 1 << 60:
        raise RejectedError("lying")
    return Status(
        heartbeat_ns,
        layout.STATES[state] if state < len(layout.STATES) else "off",
        layout.REASONS[reason] if reason < len(layout.REASONS) else "unknown",
        overhead if 0 <= overhead <= 1 else 0.0,
        records,
        windows,
        period_s if 0 < period_s <= _MAX_PERIOD_S else _MAX_PERIOD_S,
        kernels,
        strings,
        traces,
        head[layout.INTERVALS_OFFSET :],
        _unrecorded(values[5]),
    )


def _unrecorded(flags: int) -> frozenset[Recordable]:
    found: set[Recordable] = set()
    if not flags & layout.FLAG_LAUNCHES:
        found.add("launches")
    if flags & layout.FLAG_NO_COPIES:
        found.add("copies")
    if flags & layout.FLAG_NO_WAITS:
        found.add("waits")
    return frozenset(found)


_MAX_PERIOD_S: Final = 600.0
_MAX_RECORDS: Final = 1 << 48
"""A million a second for nine years: what all files count can still be told to the one."""


def _copy(descriptor: int, file: AgentFile, status: Status) -> Reading:
    """All counters, and the names of new slots. Raises RejectedError for a shortened file or an impossible name."""
    table = _exactly(descriptor, status.kernels * layout.KERNEL_SIZE, layout.KERNEL_OFFSET)
    overflow = _exactly(descriptor, layout.DEVICES * layout.KERNEL_SIZE, layout.OVERFLOW_OFFSET)
    data = _exactly(descriptor, layout.DEVICES * layout.DEVICE_SIZE, layout.DEVICE_OFFSET)
    devices = []
    for index in range(layout.DEVICES):
        device = data[index * layout.DEVICE_SIZE : (index + 1) * layout.DEVICE_SIZE]
        if any(device[layout.USED : layout.USED + 4]):
            counters = int.from_bytes(device[layout.COUNTERS_OFFSET :], "little")
            devices.append((index, device[: layout.USED].hex(), counters))
    return Reading(devices, table, overflow, _names(descriptor, file.kernels, table, status))


def _names(descriptor: int, known: int, table: bytes, status: Status) -> list[tuple[int, bytes]]:
    if status.kernels <= known:
        return []
    strings = _exactly(descriptor, status.strings, layout.STRINGS_OFFSET)
    names = []
    found: dict[bytes, bytes] = {}
    for slot in range(known, status.kernels):
        device, offset, size = layout.KEY.unpack_from(table, slot * layout.KERNEL_SIZE)
        if device >= layout.DEVICES or size > layout.MAX_NAME or offset + size > status.strings:
            raise RejectedError("lying")
        name = strings[offset : offset + size]
        names.append((device, found.setdefault(name, name)))
    if sum(map(len, found)) > status.strings:  # they overlap, and each would be kept
        raise RejectedError("lying")
    return names


def _exactly(descriptor: int, size: int, offset: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) < size:
        raise RejectedError("wrong_size")
    return data


def _environment(data: bytes) -> dict[str, str]:
    """Variables of the snapshot, as the process's own word; the first of a name counts."""
    found: dict[str, str] = {}
    for item in data.split(b"\0")[:_MAX_VARIABLES]:
        name, equals, value = item.partition(b"=")
        if name and equals:
            found.setdefault(name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))
    return found
