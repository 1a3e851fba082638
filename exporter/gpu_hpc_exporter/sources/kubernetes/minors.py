"""Numbers of the GPUs' device files, `/dev/nvidia<n>`: they need not follow the order in which NVML counts."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Final

_UUID: Final = re.compile(rb"^GPU UUID:\s*(GPU-[0-9a-f-]{36})\s*$", re.MULTILINE)
_MINOR: Final = re.compile(rb"^Device Minor:\s*([0-9]{1,4})\s*$", re.MULTILINE)
_MAX_FILE: Final = 16_384
_MAX_GPUS: Final = 256


def read_minors(procfs: Path = Path("/proc")) -> dict[str, int]:
    """Minor number by UUID, as the driver tells; empty where it does not, as in some containers."""
    minors: dict[str, int] = {}
    with suppress(OSError):
        for directory in sorted((procfs / "driver/nvidia/gpus").iterdir())[:_MAX_GPUS]:
            with suppress(OSError), (directory / "information").open("rb") as file:
                text = file.read(_MAX_FILE)
                uuid, minor = _UUID.search(text), _MINOR.search(text)
                if uuid and minor:
                    minors[uuid[1].decode()] = int(minor[1])
    return minors
