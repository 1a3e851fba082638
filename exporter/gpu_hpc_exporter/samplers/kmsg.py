"""Follows the kernel log in a thread of its own, for as long as it can be read."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from gpu_hpc_exporter.model import Sink, State, StateChange
from gpu_hpc_exporter.sources.kmsg import KernelLogParser, follow

log = logging.getLogger(__name__)


def unreadable(error: OSError, path: Path) -> tuple[State, str]:
    """What an error at the kernel log makes of the source, and why."""
    if isinstance(error, PermissionError):
        return "no_permission", f"{path} needs CAP_SYSLOG or kernel.dmesg_restrict=0: Xids come from NVML"
    if isinstance(error, FileNotFoundError):
        return "unsupported", f"{path} is not there: Xids come from NVML alone"
    return "failed", f"{path}: {error.strerror}"


class KernelLogSampler:
    """Feeds a sink with what the kernel log says of GPUs. A log that cannot be read is a state."""

    def __init__(self, sink: Sink, path: Path) -> None:
        self._sink = sink
        self._path = path
        # A daemon: it sleeps in read() and nothing has to be released.
        self._thread = threading.Thread(target=self._run, name="kmsg", daemon=True)

    def start(self) -> None:
        """Begin following in the background."""
        self._thread.start()

    def _run(self) -> None:
        parser = KernelLogParser()
        self._state("active", "")
        try:
            for line in follow(self._path):
                event = parser.parse(line, time.monotonic_ns())
                if event is not None:
                    log.warning("kernel log: %s", line.rpartition(";")[2][:300])
                    self._sink.put(event)
        except OSError as error:
            self._state(*unreadable(error, self._path))
        else:
            self._state("failed", f"{self._path} ended")

    def _state(self, state: State, reason: str) -> None:
        if state != "active":
            log.info("kernel log is %s: %s", state, reason)
        self._sink.put(StateChange(time.monotonic_ns(), "kmsg", "", state, reason))
