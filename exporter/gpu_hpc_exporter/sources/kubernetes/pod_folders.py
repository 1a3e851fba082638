"""Names of pods by UID without an API server: the kubelet keeps a folder of logs for each, named after all three."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.jobs.lookups import Pod

FOLDER: Final = Path("/var/log/pods")
_MAX_FOLDERS: Final = 4096
_NAME: Final = re.compile(r"([a-z0-9-]{1,63})_([a-z0-9.-]{1,253})_([0-9a-f-]{32,36})")


class PodFolders:
    """The pods of this node, as far as their folders tell; read again when a folder came or went."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._folder = folder
        self._stamp: tuple[int, int] | None = None
        self.pods: Mapping[str, Pod] = {}
        """By UID; replaced when it changes."""

    def refresh(self) -> None:
        """Look whether something has changed. Where there is nothing to read, nothing is known."""
        try:
            found = self._folder.stat()
            stamp = (found.st_mtime_ns, found.st_ino)
            if stamp == self._stamp:
                return
            with os.scandir(self._folder) as entries:
                names = [entry.name for entry in islice(entries, _MAX_FOLDERS)]
        except OSError:
            self._stamp, self.pods = None, {}
            return
        matches = (match for match in map(_NAME.fullmatch, names) if match)
        self._stamp, self.pods = stamp, {m[3]: Pod(m[3], m[2], m[1]) for m in matches}
