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
_XID: Final = re.compile(rf"NVRM: Xid \(PCI:{_PCI}(?: [^)]*)?\): (?P<xid>[0-9]{{1,6}})(?![0-9])")
"""On MIG GPUs the instance stands behind the address: `(PCI:0000:99:00 GPU-I:02 GPU-CI:00)`."""
_NAMED_GPU: Final = re.compile(rf"NVRM: The NVIDIA GPU {_PCI}")
_FELL_OFF: Final = "fallen off the bus"
_GPU_FELL_OFF: Final = re.compile(rf"NVRM: (?:The NVIDIA )?GPU {_PCI}.*{_FELL_OFF}")
_MESSAGE_LINES: Final = 6
"""The message's three lines, of which only the first says NVRM, and what the log puts in between."""


class KernelLogParser:
    """Log lines to events. The message without an Xid spreads over three lines, so the parser remembers."""

    def __init__(self) -> None:
        self._named = ""
        self._lines_left = 0

    def parse(self, line: str, time_ns: int) -> XidError | GpuFellOff | None:
        """What one line says of a GPU, if anything."""
        xid = _XID.search(line)
        if xid:
            return XidError(time_ns, int(xid["xid"]), "kmsg", pci_bus_id=xid["pci"])
        fell_off = _GPU_FELL_OFF.search(line)
        if fell_off:
            return GpuFellOff(time_ns, fell_off["pci"])
        named = _NAMED_GPU.search(line)
        if named:
            self._named, self._lines_left = named["pci"], _MESSAGE_LINES
        self._lines_left -= 1
        if self._named and self._lines_left >= 0 and _FELL_OFF in line:
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
