"""Which processes have a context on which GPU, by the driver's lists, and of which GPUs agents' files may speak."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from gpu_hpc_exporter.model import NS, GpuProcesses
from gpu_hpc_exporter.samplers.totals import MAX_PROCESSES_AGE_NS

REMEMBERED_NS: Final = 60 * NS
"""A process that has ended is remembered so long, since the last that it wrote is read later."""
PATIENCE_NS: Final = 15 * NS
"""How long a process may take to appear in the driver's list."""

Standing = Literal["its", "waits", "foreign"]
"""Whether a file may speak of a GPU: its process is on it, or nobody can tell; it may yet appear there; or neither."""


@dataclass(frozen=True, slots=True)
class _Listed:
    """One GPU's newest list, and when each process of the last minute was last in one."""

    time_ns: int
    pids: frozenset[int]
    seen_ns: Mapping[int, int]


class GpuContexts:
    """The driver's lists of processes. One thread may write and another ask."""

    def __init__(self) -> None:
        self._lists: dict[str, _Listed] = {}

    def put(self, event: GpuProcesses) -> None:
        """Take a list; one that cannot be had is none."""
        if event.processes is None:
            return
        before = self._lists.get(event.uuid)
        oldest_ns = event.time_ns - REMEMBERED_NS
        seen_ns = {pid: at for pid, at in before.seen_ns.items() if at > oldest_ns} if before is not None else {}
        pids = frozenset(process.pid for process in event.processes)
        listed = _Listed(event.time_ns, pids, seen_ns | dict.fromkeys(pids, event.time_ns))
        self._lists = {**self._lists, event.uuid: listed}

    def keep_only(self, uuids: Collection[str]) -> None:
        """Forget all other GPUs."""
        self._lists = {uuid: listed for uuid, listed in self._lists.items() if uuid in uuids}

    def newest(self, uuid: str, now_ns: int) -> frozenset[int] | None:
        """The processes on a GPU; None where no list is fresh."""
        listed = self._lists.get(uuid)
        return listed.pids if listed is not None and now_ns - listed.time_ns <= MAX_PROCESSES_AGE_NS else None

    def in_use(self, now_ns: int) -> frozenset[str]:
        """The GPUs on which there are processes, as far as lists are fresh."""
        return frozenset(uuid for uuid in self._lists if self.newest(uuid, now_ns))

    def has(self, uuid: str, pid: int, now_ns: int) -> bool | None:
        """Whether a process is on a GPU or was in the last minute; None where no list is fresh."""
        listed = self._lists.get(uuid)
        if listed is not None and now_ns - listed.seen_ns.get(pid, now_ns - REMEMBERED_NS) < REMEMBERED_NS:
            return True
        return None if self.newest(uuid, now_ns) is None else False


@dataclass(slots=True)
class AgentGpus:
    """What is known of the GPUs of one file's process.

    own: those that it has been on; a process keeps its contexts. foreign: those of which it spoke and on which it was
    not, and since when that is known.
    """

    own: set[str] = field(default_factory=set)
    foreign: dict[str, int] = field(default_factory=dict)

    def standing(
        self, uuid: str, pid: int | None, contexts: GpuContexts, is_seen: Callable[[int], bool], now_ns: int
    ) -> Standing:
        """Whether the file may speak of a GPU. `pid`: its process's on the host, None where it is not found.

        `is_seen`: whether a process that the driver lists can be looked up. Where one cannot, it may be the file's.
        """
        if uuid in self.own:
            return "its"
        is_on = _is_on(uuid, pid, contexts, is_seen, now_ns)
        if is_on:
            self.own.add(uuid)
            self.foreign.pop(uuid, None)
        if is_on or (is_on is None and uuid not in self.foreign):
            return "its"
        since_ns = self.foreign.setdefault(uuid, now_ns)
        return "waits" if now_ns - since_ns < PATIENCE_NS else "foreign"


def _is_on(
    uuid: str, pid: int | None, contexts: GpuContexts, is_seen: Callable[[int], bool], now_ns: int
) -> bool | None:
    """None where nobody can tell."""
    if pid is not None:
        return contexts.has(uuid, pid, now_ns)
    listed = contexts.newest(uuid, now_ns)
    return False if listed is not None and all(map(is_seen, listed)) else None
