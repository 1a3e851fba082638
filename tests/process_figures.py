"""What a process has used, for benchmarks."""

from __future__ import annotations

import re
import time
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Time on a CPU of all threads, those that have ended too, to the nanosecond. Raises OSError where it is gone."""
    return time.clock_gettime(~pid << 3 | 2)  # the process's clock, as clock_getcpuclockid(3) names it on Linux


def status_number(pid: int, key: str) -> float:
    """A number of /proc/PID/status, such as VmRSS in KiB or Threads; NaN where there is none."""
    match = re.search(rf"^{key}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return float(match[1]) if match else float("nan")
