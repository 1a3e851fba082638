"""What a check says, and where it looks."""

from __future__ import annotations

import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

from gpu_hpc_exporter.config import Config
from gpu_hpc_exporter.http_client import HttpClient
from gpu_hpc_exporter.model import State
from gpu_hpc_exporter.text import bounded

Status = Literal["ok", "degraded", "broken"]
"""ok: as good as this machine and its configuration can be; degraded: some series are missing; broken: all are."""
STATUSES: Final[tuple[Status, ...]] = get_args(Status)
_MAX_TEXT: Final = 1024
_MAX_FILE: Final = 16_384


@dataclass(frozen=True, slots=True)
class Check:
    """One line. finding: what was found. remedy: what to do, "" where there is nothing to do."""

    name: str
    status: Status
    finding: str
    remedy: str = ""

    def __post_init__(self) -> None:
        """Some of the text is a driver's, a file's or a server's: one line of it, and no longer than that."""
        for name in ("name", "finding", "remedy"):
            object.__setattr__(self, name, bounded(" ".join(getattr(self, name).split()), _MAX_TEXT))


Checks = Iterator[Check]


@dataclass(frozen=True, slots=True)
class Place:
    """The machine to look at.

    rootfs: where its root is mounted. addresses, telemetry_path, client: where its exporter serves, and how to ask it.
    timeout_s: how long a call into the driver may take.
    """

    config: Config = field(default_factory=Config)
    driver_root: Path = Path("/run/nvidia/driver")
    procfs: Path = Path("/proc")
    kmsg: Path = Path("/dev/kmsg")
    rootfs: Path = Path("/")
    addresses: tuple[tuple[str | None, int], ...] = ()
    telemetry_path: str = "/metrics"
    client: HttpClient = field(default_factory=HttpClient)
    environ: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float = 30.0


_OF_STATE: Final[Mapping[State, Status]] = {
    "active": "ok",
    "paused": "ok",  # on request, or for a profiler: as it should be
    "unsupported": "ok",  # by this hardware, or switched off
    "lost": "broken",
}


def status_of(state: State) -> Status:
    """What a source's state means for its series."""
    return _OF_STATE.get(state, "degraded")


def worst(checks: Iterable[Check]) -> Status:
    """The worst status, ok without any check."""
    return max((check.status for check in checks), key=STATUSES.index, default="ok")


def told(state: str, reason: str) -> str:
    """A source's state as it is said."""
    return f"{state}: {reason}" if reason else state


def in_time(name: str, run: Callable[[], Checks], limit_s: float) -> Checks:
    """What `run` yields, as it does; in place of what does not come in time, or fails, one line that says so.

    In a thread: a directory of a dead file server holds up its reader for ever. One that is stuck is left behind.
    """
    found: queue.SimpleQueue[Check | None] = queue.SimpleQueue()

    def work() -> None:
        try:
            for check in run():
                found.put(check)
        except Exception as error:  # noqa: BLE001  a check of an odd machine must not keep the others from being made
            found.put(Check(name, "degraded", f"the check itself failed: {error!r}", "report this line as a bug"))
        found.put(None)

    threading.Thread(target=work, name=f"check {name}", daemon=True).start()
    while True:
        try:
            check = found.get(timeout=limit_s)
        except queue.Empty:
            hangs = f"does not return within {limit_s:g} s"
            yield Check(
                name, "broken", hangs, "see what it waits for: a file server, a peer or the kernel (`dmesg -T`)"
            )
            return
        if check is None:
            return
        yield check


def capabilities(place: Place) -> int:
    """The effective ones of this process, as bits; 0 where /proc does not tell."""
    match = re.search(r"^CapEff:\s*([0-9a-f]{1,16})$", read_text(place.procfs / "self/status"), re.MULTILINE)
    return int(match[1], 16) if match else 0


def read_text(path: Path) -> str:
    """The beginning of a small file, "" where it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE).decode("utf-8", "replace")
    except OSError:
        return ""
