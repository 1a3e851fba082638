"""What a process has used, for benchmarks."""

from __future__ import annotations

import os
import re
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Time on a CPU of all threads, in nanosecond resolution where the kernel counts it (schedstat)."""
    try:
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except FileNotFoundError:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status_number(pid: int, key: str) -> float:
    """A number of /proc/PID/status, such as VmRSS in KiB or Threads; NaN where there is none."""
    match = re.search(rf"^{key}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return float(match[1]) if match else float("nan")
