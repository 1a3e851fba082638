"""The kernel log's words on GPUs: Xids, among them those that NVML's events never deliver, and lost GPUs.

Reading /dev/kmsg needs `kernel.dmesg_restrict=0` or CAP_SYSLOG, and the device in the container.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.model import GpuFellOff, XidError

DEFAULT_PATH: Final = Path("/dev/kmsg")
_MAX_RECORD: Final = 8192
"""The kernel's own limit for one record."""

_PCI: Final = r"(?P<pci>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})(?:\.[0-7])?"
_XID: Final = re.compile(rf"NVRM: Xid \(PCI:{_PCI}\): (?P<xid>\d{{1,6}})")
_NAMED_GPU: Final = re.compile(rf"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?{_PCI}")
_FELL_OFF: Final = re.compile(r"fallen off the bus")


class KernelLogParser:
    """Log lines to events. The message without an Xid spreads over three lines, so the parser remembers."""

    def __init__(self) -> None:
        self._named: str = ""

    def parse(self, line: str, time_ns: int) -> XidError | GpuFellOff | None:
        """What one line says of a GPU, if anything."""
        xid = _XID.search(line)
        if xid:
            return XidError(time_ns, int(xid["xid"]), "kmsg", pci_bus_id=xid["pci"])
        named = _NAMED_GPU.search(line)
        if named:
            self._named = named["pci"]
        if self._named and _FELL_OFF.search(line):
            pci, self._named = self._named, ""
            return GpuFellOff(time_ns, pci)
        return None


def follow(path: Path) -> Iterator[str]:
    """New records of the kernel log as they come; blocks in between. Raises OSError where it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if path.is_char_device():
            os.lseek(descriptor, 0, os.SEEK_END)
        pending = b""
        while True:
            try:
                data = os.read(descriptor, _MAX_RECORD)
            except BrokenPipeError:
                continue  # records were overwritten before we read them: go on with the oldest there is
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            pending = pending[-_MAX_RECORD:]
            for line in lines:
                yield line.decode("utf-8", "replace")
    finally:
        os.close(descriptor)
