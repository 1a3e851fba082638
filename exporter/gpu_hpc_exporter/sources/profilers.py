"""Which profilers run on this host: PM sampling yields to them, for they need the counters it holds.

A process is known by its name as the kernel keeps it (/proc/<pid>/comm, 15 bytes, chosen by the process
itself). Processes in other PID namespaces are seen only from the host's, or in the host's /proc.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.sources.procfs import PROC

log = logging.getLogger(__name__)

DCGM: Final = ("nv-hostengine", "dcgm-exporter")
"""What holds the counters for good on GPUs before Hopper."""

_NS_PER_S: Final = 1_000_000_000
_COMM_BYTES: Final = 15
_MAX_RANGE: Final = 32
"""New pids that are looked at one by one; from there on listing those that live is cheaper."""
_FIRST_WAIT_NS: Final = 50_000_000
_LAST_WAIT_NS: Final = 1_600_000_000
"""A young process is looked at again after twice the wait each time, for three seconds in all."""
_MIN_LIST_PERIOD_NS: Final = 10 * _NS_PER_S
_MAX_LIST_PERIOD_NS: Final = 120 * _NS_PER_S
_LIST_SHARE: Final = 10_000
"""The regular listing takes at most a ten-thousandth of the time."""
_NAMES_SHARE: Final = 1_000
"""Listing the pids alone, where the kernel does not tell the newest: one of 230 processes takes 0.1 ms."""
_MAX_READ: Final = 1024
_ENDED: Final = "ZXx"
"""States of a process that has ended and whose parent has not asked for it."""


class ProfilerWatch:
    """Polled every 100-200 ms for ever, by one thread.

    Most polls read one file, /proc/loadavg, whose last field is the pid allocated last; where that cannot be had,
    as in another namespace's /proc, they list the pids. Only new pids are looked at, again for some seconds,
    since a fork has its parent's name until it calls exec. A process that turns into a profiler when it is old is
    found by the threads and children it makes, or by a full listing every 10 to 120 s. Measured on an H200's VM
    with 230 processes: 56 us a poll on a 100 ms beat, when every cache has gone cold, so 0.03 % of a core at
    200 ms; 3 us back to back.
    """

    def __init__(self, names: Sequence[str], proc: Path = PROC) -> None:
        """`names` are those of programs, `*` and `?` allowed; they are cut as the kernel cuts them."""
        self._proc = str(proc)
        self._loadavg = _open_kept(self, proc / "loadavg")
        self._is_foreign = _is_foreign(proc)
        self._profiler = _matcher(names)
        self._dcgm = _matcher(DCGM)
        self._newest = 0
        self._young: dict[int, tuple[int, int]] = {}
        self._profilers: dict[int, str] = {}
        self._dcgm_hosts: dict[int, str] = {}
        self._known: set[int] = set()
        self._list_due_ns = 0
        self._names_due_ns = 0
        self._told = False

    def poll(self) -> str:
        """A profiler that runs now, such as "ncu (pid 4711)", the same one while it lives; "" without any."""
        now_ns = time.monotonic_ns()
        # Asked before the listing: what starts in between is seen twice rather than never.
        newest = self._newest_pid()
        if now_ns >= self._list_due_ns:
            self._list_all(now_ns)
        elif not newest:
            self._young.update(dict.fromkeys(self._unknown_pids(now_ns), (now_ns, _FIRST_WAIT_NS)))
        elif newest != self._newest:
            self._young.update(dict.fromkeys(self._new_pids(newest), (now_ns, _FIRST_WAIT_NS)))
        self._newest = newest
        if self._young:
            self._look_at_young(now_ns)
        return self._first_alive(self._profilers, self._profiler)

    def hosts_dcgm(self) -> str:
        """What hosts DCGM, such as "nv-hostengine (pid 812)", "" without any; as found by the polls so far."""
        return self._first_alive(self._dcgm_hosts, self._dcgm)

    def _newest_pid(self) -> int:
        """The pid allocated last, 0 where the kernel does not tell: it tells of the reader's namespace, of no other."""
        if self._is_foreign:
            return 0
        try:
            return int(os.pread(self._loadavg, _MAX_READ, 0).rpartition(b" ")[2])
        except (OSError, ValueError):
            self._tell("loadavg")
            return 0

    def _unknown_pids(self, now_ns: int) -> Iterable[int]:
        """Pids that were not there when they were last listed, not asked for at every poll where there are many."""
        if now_ns < self._names_due_ns:
            return ()
        pids = set(self._pids())
        new = pids - self._known
        self._known = pids
        self._names_due_ns = now_ns + _NAMES_SHARE * (time.monotonic_ns() - now_ns)
        return new

    def _new_pids(self, newest: int) -> Iterable[int]:
        """Pids allocated since the last poll; they begin anew after the highest one."""
        last = self._newest
        if 0 < newest - last <= _MAX_RANGE:
            return range(last + 1, newest + 1)
        if newest > last:
            return [pid for pid in self._pids() if last < pid <= newest]
        return [pid for pid in self._pids() if pid > last or pid <= newest]

    def _list_all(self, now_ns: int) -> None:
        """Look at every process there is."""
        pids = self._pids()
        if 1 not in pids:
            self._tell("1")
        for pid in pids:
            self._look(pid)
        self._known = set(pids)
        cost_ns = time.monotonic_ns() - now_ns
        self._list_due_ns = now_ns + min(max(_LIST_SHARE * cost_ns, _MIN_LIST_PERIOD_NS), _MAX_LIST_PERIOD_NS)

    def _pids(self) -> list[int]:
        try:
            return [int(name) for name in os.listdir(self._proc) if name.isdecimal()]  # noqa: PTH208  names are enough
        except OSError:
            return []

    def _look_at_young(self, now_ns: int) -> None:
        for pid, (due_ns, wait_ns) in list(self._young.items()):
            if now_ns < due_ns:
                continue
            # The first time it may not be there yet: its number is given out before it can be seen.
            is_there = self._look(pid) or wait_ns == _FIRST_WAIT_NS
            if is_there and wait_ns <= _LAST_WAIT_NS:
                self._young[pid] = (now_ns + wait_ns, 2 * wait_ns)
            else:
                del self._young[pid]

    def _look(self, pid: int) -> bool:
        """Note a process, or a thread's process, that is one of ours; whether there is one with this pid."""
        try:
            name = self._read(f"{pid}/comm").removesuffix("\n")
            for matcher, found in ((self._profiler, self._profilers), (self._dcgm, self._dcgm_hosts)):
                if matcher.match(name):
                    found.setdefault(self._process_of(pid), name)
        except OSError:
            return False
        return True

    def _process_of(self, pid: int) -> int:
        """The process that a thread belongs to: threads have pids too, which the directory does not list."""
        group = re.search(r"^Tgid:\s*([0-9]+)", self._read(f"{pid}/status"), re.MULTILINE)
        return int(group[1]) if group else pid

    def _first_alive(self, found: dict[int, str], matcher: re.Pattern[str]) -> str:
        """The first one that still lives under such a name: a pid may by now be another program's."""
        for pid in list(found):
            if self._is_alive(pid, matcher):
                return f"{ascii(found[pid])[1:-1]} (pid {pid})"
            del found[pid]
        return ""

    def _is_alive(self, pid: int, matcher: re.Pattern[str]) -> bool:
        try:
            stat = self._read(f"{pid}/stat")
        except OSError:
            return False
        # `4711 (ncu) S 1 …`: the name may itself hold brackets and blanks.
        name, _, rest = stat.partition("(")[2].rpartition(")")
        return matcher.match(name) is not None and rest.lstrip()[:1] not in _ENDED

    def _read(self, name: str) -> str:
        """The beginning of a file of /proc. Raises OSError; pathlib would cost as much as the kernel does."""
        descriptor = os.open(f"{self._proc}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _MAX_READ).decode("utf-8", "surrogateescape")
        finally:
            os.close(descriptor)

    def _tell(self, what: str) -> None:
        if not self._told:
            self._told = True
            log.info(
                "%s/%s cannot be read (hidepid, or no /proc): profilers of other users may go unseen, pause for them",
                self._proc,
                what,
            )


def _open_kept(owner: object, path: Path) -> int:
    """A descriptor for as long as `owner` lives, -1 without one: opening it anew would double a poll's cost."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
    weakref.finalize(owner, os.close, descriptor)
    return descriptor


def _is_foreign(proc: Path) -> bool:
    """Whether it is another PID namespace's: we have another pid there."""
    try:
        return os.readlink(proc / "self") != str(os.getpid())  # noqa: PTH115  a link whose target is a number
    except OSError:
        return False


def _matcher(names: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(_as_comm(name)) for name in names) or "(?!)")


def _as_comm(name: str) -> str:
    """A program's name, or a pattern of names, as far as the kernel keeps it."""
    name = name.rpartition("/")[2]
    literal = re.split(r"[*?\[]", name, maxsplit=1)[0]
    return literal[:_COMM_BYTES] if len(literal) >= _COMM_BYTES else name
