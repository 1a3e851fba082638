"""What /proc tells of processes, read so that a process that ends meanwhile, or whose pid is given away, fools nobody.

A process's directory is opened once and everything is read below it: the kernel ties an open directory of /proc to
its process, not to the number, so nothing of a later process of that number can get in.
"""

from __future__ import annotations

import os
import pwd
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from gpu_hpc_exporter.model import NS, Evidence

PROC: Final = Path("/proc")
MAX_PID: Final = 1 << 22
"""The kernel's highest pid. NVML says 0 or 2^32-1 for a process that it may not name."""
MAX_PROCESSES: Final = 4096
"""Most processes that are looked at in one refresh; those above it are not known."""

_INITIAL_NAMESPACE: Final = "pid:[4026531836]"
"""The host's own pid namespace: its number is a constant of the kernel (PROC_PID_INIT_INO)."""
_FIRST_TRANSLATING: Final = (535, 113, 1)
"""The first driver that lists to a process the processes of its own namespace only, by their pids there: the first with
os_find_ns_pid in NVIDIA/open-gpu-kernel-modules. Those before list all, by the host's pids."""
_MODULE_VERSION: Final = re.compile(r"Kernel Module.*?\s([0-9]{1,5}(?:\.[0-9]{1,5}){1,3})\s")


@dataclass(frozen=True, slots=True)
class PidView:
    """Whether the driver's pids can be looked up in this /proc. reason: why not, or not all.

    lists_all: the driver lists the processes of all namespaces to us, by the host's pids.
    """

    lookup: bool
    reason: str = ""
    lists_all: bool = True


def module_version(root: Path = PROC) -> str:
    """Of the driver's kernel module that is loaded, "" without one."""
    try:
        text = (root / "driver/nvidia/version").read_text("utf-8", "replace")
    except OSError:
        return ""
    match = _MODULE_VERSION.search(text)
    return match[1] if match else ""


def pid_view(root: Path = PROC) -> PidView:
    """Detect it once. Any /proc but our own counts as the host's."""
    try:
        own = os.readlink(root / "self/ns/pid")  # noqa: PTH115  a link whose target is no path
    except OSError:
        own = ""
    if own not in {"", _INITIAL_NAMESPACE} and not _lists_all(module_version(root)):
        reason = "own pid namespace, and this driver lists no processes of others: run with hostPID"
        return PidView(lookup=False, reason=reason, lists_all=False)
    if root == PROC and own != _INITIAL_NAMESPACE:
        return PidView(lookup=False, reason="own pid namespace: run with hostPID, or mount the host's /proc")
    if (root / "1").exists():
        return PidView(lookup=True)
    if any(name.isdecimal() for name in _names(root)):
        return PidView(lookup=True, reason="hidepid: only processes of our own user are visible")
    return PidView(lookup=False, reason="no processes there: is it a /proc?")


def _lists_all(version: str) -> bool:
    """Whether a driver does so to a process in a namespace of its own. One whose version is not known does not."""
    return bool(version) and tuple(map(int, version.split("."))) < _FIRST_TRANSLATING


def _names(root: Path) -> list[str]:
    try:
        return os.listdir(root)  # noqa: PTH208  names are enough
    except OSError:
        return []


class Users:
    """Names of users by number: of the passwd file beside /proc and, on this host's own, of whatever else pwd asks.

    A name that cannot be had is the number. Answers are kept for some minutes.
    """

    def __init__(self, root: Path = PROC) -> None:
        self._passwd = root.resolve().parent / "etc/passwd"
        self._asks_pwd = root == PROC
        self._names: dict[int, str] = {}
        self._due = 0.0

    def name(self, uid: int) -> str:
        now = time.monotonic()
        if now >= self._due or len(self._names) > _MAX_USERS:
            self._due = now + _USERS_KEPT_S
            self._names = _parse_passwd(self._passwd)
        name = self._names.get(uid)
        if name is None:
            name = self._names[uid] = (self._asks_pwd and _ask_pwd(uid)) or str(uid)
        return name


_USERS_KEPT_S: Final = 300.0
_MAX_USERS: Final = 100_000
_MAX_PASSWD: Final = 8 << 20


def _parse_passwd(path: Path) -> dict[int, str]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(_MAX_PASSWD)
    except OSError:
        return {}
    names: dict[int, str] = {}
    whole = data if len(data) < _MAX_PASSWD else data[: data.rfind(b"\n")]  # half a number would be another user's
    for line in whole.decode("utf-8", "replace").split("\n", _MAX_USERS)[:_MAX_USERS]:
        name, _, rest = line.partition(":")
        uid = rest.split(":", 2)[1:2]
        if name and uid and _NUMBER.fullmatch(uid[0]):
            names.setdefault(int(uid[0]), name)
    return names


_NUMBER: Final = re.compile(r"[0-9]{1,10}", re.ASCII)


def _ask_pwd(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return ""


class Processes:
    """Evidence of processes, kept while they live.

    `variables`: those of their environments that are wanted; nothing else of an environment is kept. A refresh mostly
    asks only whether each process is still the same: by the number of its directory's inode, which the kernel gives
    out anew for each, all of them from one listing of /proc. Evidence is read again from time to time, since a
    process may call exec or be moved to a job's cgroup when it is old; a few processes a refresh, the young ones
    soonest.
    """

    def __init__(
        self,
        root: Path = PROC,
        variables: Collection[str] = (),
        user_name: Callable[[int], str] | None = None,
    ) -> None:
        self._root = root
        self._variables = frozenset(name.encode() for name in variables)
        self._files = _FILES if self._variables else _FILES[:-1]
        self._width = min((len(name) + 1 for name in self._variables), default=1)
        self._beginnings = frozenset((name + b"=")[: self._width] for name in self._variables)
        self._user_name = user_name or Users(root).name
        self._entries: dict[int, _Entry] = {}

    def refresh(self, pids: Iterable[int], listed_ns: int | None = None) -> dict[int, Evidence]:
        """Evidence by pid of those that there are; all others are forgotten. The same object while nothing changed.

        `listed_ns`: when the driver listed them, by CLOCK_BOOTTIME: what started later is another process.
        """
        wanted = [pid for pid in dict.fromkeys(pids) if 0 < pid <= MAX_PID][:MAX_PROCESSES]
        entries: dict[int, _Entry] = {}
        try:
            with open_folder(self._root) as descriptor:
                root = _Root(descriptor)
                marks = self._marks(root, wanted)
                now = time.monotonic()
                reread_until = now + _REREAD_BUDGET_S
                for pid in wanted:
                    entry = self._entries.get(pid)
                    is_same = entry is not None and marks.get(pid) == entry.mark
                    if not is_same or (entry is not None and now >= entry.due and time.monotonic() < reread_until):
                        entry = self._look(root, pid, entry, now)
                    if entry is not None and (listed_ns is None or entry.started_ns <= listed_ns):
                        entries[pid] = entry
        except OSError:
            entries = {}
        self._entries = entries
        return {pid: entry.evidence for pid, entry in entries.items()}

    def read(self, pid: int) -> Evidence | None:
        """Evidence of one process, None where there is none."""
        if not 0 < pid <= MAX_PID:
            return None
        try:
            with open_folder(self._root) as descriptor:
                entry = self._load(_Root(descriptor), pid)
        except OSError:
            return None
        return entry.evidence if entry else None

    @property
    def denied(self) -> int:
        """How many of the processes of the last refresh did not let us read their environment."""
        return sum(_DENIED in entry.evidence.missing for entry in self._entries.values())

    def __len__(self) -> int:
        """How many processes are kept."""
        return len(self._entries)

    def _marks(self, root: _Root, pids: list[int]) -> Mapping[int, int]:
        """What stays the same of each known process while it lives; nothing of those that there are not."""
        if not root.is_procfs:
            return {}  # a copy's inodes tell nothing of processes
        known = [pid for pid in pids if pid in self._entries]
        if len(known) > _FEW:
            with os.scandir(root.descriptor) as listing:
                return {int(entry.name): entry.inode() for entry in listing if entry.name.isdecimal()}
        marks = {}
        for pid in known:
            with suppress(OSError):
                marks[pid] = os.stat(str(pid), dir_fd=root.descriptor).st_ino
        return marks

    def _look(self, root: _Root, pid: int, before: _Entry | None, now: float) -> _Entry | None:
        """Read a process anew. Young entries are due again soon: what forks calls exec, what is adopted is moved."""
        entry = self._load(root, pid)
        if entry is None:
            return None
        if before is not None and before.evidence.start_ticks == entry.evidence.start_ticks:
            entry.wait = min(2 * before.wait, _LAST_WAIT_S)
            if before.evidence == entry.evidence or _ZOMBIE in entry.evidence.missing:
                entry.evidence = before.evidence  # of one that has ended, what it was tells more
        entry.due = now + entry.wait
        return entry

    def _load(self, root: _Root, pid: int) -> _Entry | None:
        try:
            folder = os.open(str(pid), _FOLDER | os.O_PATH, dir_fd=root.descriptor)
        except OSError:
            return None
        try:
            stat = _parse_stat(_read(folder, "stat", _MAX_STAT))
            if stat is None:
                return None
            status = os.fstat(folder)
            evidence = self._evidence(pid, folder, stat, status.st_uid if root.is_procfs else _uid_told(folder))
            if evidence.missing:
                # Files that are absent since the process is gone, and for no other reason, are no evidence.
                os.stat("stat", dir_fd=folder)
            return _Entry(evidence, status.st_ino)
        except OSError:
            return None
        finally:
            os.close(folder)

    def _evidence(self, pid: int, folder: int, stat: _Stat, uid: int) -> Evidence:
        told = {"cgroup": b"", "cmdline": b"", "environ": b""}
        missing = [_ZOMBIE] if stat.state in _ENDED else []
        for name, limit, end in self._files:
            try:
                data = _read(folder, name, limit)
                told[name] = data if len(data) < limit else data[: data.rfind(end) + 1]
            except OSError as error:
                missing.append(f"{name}: {_reason(error)}")
        return Evidence(
            pid,
            stat.start_ticks,
            stat.comm,
            told["cmdline"].replace(b"\0", b" ").rstrip().decode("utf-8", "surrogateescape"),
            uid,
            self._user_name(uid) if uid >= 0 else "",
            told["cgroup"].decode("utf-8", "surrogateescape"),
            self._environment(told["environ"]),
            tuple(missing),
        )

    def _environment(self, data: bytes) -> dict[str, str]:
        """The wanted variables; the first of a name counts, as for getenv."""
        found: dict[str, str] = {}
        width, beginnings = self._width, self._beginnings
        # Most variables are not wanted, and their first bytes say so at a tenth of the cost.
        for item in [item for item in data.split(b"\0") if item[:width] in beginnings]:
            name, equals, value = item.partition(b"=")
            if equals and name in self._variables:
                found.setdefault(_text(name), _text(value[:_MAX_VALUE]))
        return found


_REREAD_BUDGET_S: Final = 0.0005
"""How long one refresh goes on reading known processes again: about ten of them."""
_FIRST_WAIT_S: Final = 1.0
_LAST_WAIT_S: Final = 64.0
_FEW: Final = 64
"""Up to so many processes asking for each costs less than a listing of all that there are."""

_FOLDER: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_FILE: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_MAX_STAT: Final = 4096
_MAX_STATUS: Final = 16 << 10
_FILES: Final = (("cgroup", 16 << 10, b"\n"), ("cmdline", 4096, b""), ("environ", 256 << 10, b"\0"))
"""What is read besides `stat`, as far as it goes, and what ends each entry: half a path or value would be another."""
_MAX_VALUE: Final = 1024
_CHUNK: Final = 4096
_ENDED: Final = frozenset({"Z", "X", "x"})
_ZOMBIE: Final = "zombie: only its cgroup is left"
_DENIED: Final = "environ: permission denied"
_PROC_ROOT_INODE: Final = 1
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


class _Stat(NamedTuple):
    comm: str
    state: str
    start_ticks: int


@dataclass(slots=True)
class _Entry:
    """`mark`: its directory's inode. due: when to read it again, `wait` after it was last read."""

    evidence: Evidence
    mark: int
    wait: float = _FIRST_WAIT_S
    due: float = 0.0

    @property
    def started_ns(self) -> int:
        return self.evidence.start_ticks * NS // _TICKS_PER_SECOND


class _Root:
    """An open /proc, or an open copy of one."""

    def __init__(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        self.descriptor = descriptor
        self.is_procfs = os.major(status.st_dev) == 0 and status.st_ino == _PROC_ROOT_INODE


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """A folder of /proc: what is read below it is of one process. Raises OSError."""
    descriptor = os.open(path, _FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read(folder: int, name: str, limit: int) -> bytes:
    """The beginning of a file. Raises OSError. Never waits: in a copy of a /proc it may be a FIFO."""
    descriptor = os.open(name, _FILE, dir_fd=folder)
    try:
        data = os.read(descriptor, _CHUNK)
        return data if len(data) < _CHUNK else _read_on(descriptor, data, limit)
    finally:
        os.close(descriptor)


def read_whole(folder: int, name: str, limit: int) -> bytes:
    """All of a file of a process, as far as it goes; some of /proc come in pieces. Raises OSError."""
    descriptor = os.open(name, _FILE, dir_fd=folder)
    try:
        return _read_on(descriptor, b"", limit)
    finally:
        os.close(descriptor)


def _read_on(descriptor: int, data: bytes, limit: int) -> bytes:
    while len(data) < limit and (more := os.read(descriptor, limit - len(data))):
        data += more
    return data[:limit]


def _reason(error: OSError) -> str:
    return "permission denied" if isinstance(error, PermissionError) else (error.strerror or "cannot be read").lower()


def _parse_stat(data: bytes) -> _Stat | None:
    """`4711 (a name) S 1 …`: the name may itself hold brackets and blanks."""
    name, _, rest = data.partition(b"(")[2].rpartition(b")")
    fields = rest.split(None, _START_FIELD + 1)
    if len(fields) <= _START_FIELD or not _TICKS.fullmatch(fields[_START_FIELD]):
        return None
    return _Stat(_text(name), _text(fields[0]), int(fields[_START_FIELD]))


def start_ticks_of(folder: int) -> int | None:
    """When the process of an open folder of /proc started, as in Evidence. Raises OSError."""
    stat = _parse_stat(_read(folder, "stat", _MAX_STAT))
    return stat.start_ticks if stat is not None else None


_START_FIELD: Final = 19
"""`starttime`, counted from the state."""
_TICKS: Final = re.compile(rb"[0-9]{1,20}")


def _uid_told(folder: int) -> int:
    """The effective user by `status`, -1 without one; for copies of a /proc, whose files belong to anybody.

    In a /proc itself each process's directory belongs to that user, whatever else the process has done to hide, and
    that is much cheaper to ask.
    """
    try:
        match = _UID_LINE.search(_read(folder, "status", _MAX_STATUS))
    except OSError:
        return -1
    return int(match[1]) if match else -1


_UID_LINE: Final = re.compile(rb"^Uid:\s*[0-9]+\s+([0-9]{1,10})", re.MULTILINE)
_NSPID_LINE: Final = re.compile(rb"^NSpid:((?:\s+[0-9]{1,10})+)$", re.MULTILINE)


def namespace_pids_of(folder: int) -> tuple[int, ...]:
    """The pids in each of its namespaces, the host's first, of the process of an open folder of /proc.

    () where a kernel before 4.1 does not tell. Raises OSError.
    """
    match = _NSPID_LINE.search(_read(folder, "status", _MAX_STATUS))
    return tuple(int(number) for number in match[1].split()) if match else ()


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
