"""Files in which a prolog says whose each GPU is, removed by the epilog.

Two forms may stand side by side. A file named by a GPU (NVML's index, `<index>.<GPU instance id>` for a MIG instance,
or a UUID) holds one job id a line: what dcgm-exporter's --hpc-job-mapping-dir reads; whatever follows the id on its
line is ignored. A line `key=value` says more of a job, which `job_id=` begins; in a file named `job-<anything>` the key
`gpus` names the GPUs, separated by commas. Keys: job_id, sluid, name, user, account, partition, kind, gpus.

Everybody may be able to write there: files are bounded, links and FIFOs are not followed, text is what can be decoded.
"""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.jobs.lookups import SlurmJob
from gpu_hpc_exporter.model import Gpu, JobKind

MAX_FILES: Final = 4096
MAX_FILE_BYTES: Final = 65_536
MAX_JOBS: Final = 4096
_MAX_VALUE: Final = 200
_KINDS: Final[Mapping[str, JobKind]] = {"batch": "batch", "service": "service", "interactive": "interactive"}
_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+\[\]%:-]{0,63}")
_DEVICE: Final = re.compile(r"[0-9]{1,4}(\.[0-9]{1,4})?|(GPU|MIG)-[0-9A-Fa-f-]{1,60}")
_JOB_FILE: Final = "job-"
_OPENING: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Entry:
    """One job as one file tells of it. `devices`: names as they stand there."""

    job_id: str
    sluid: str = ""
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    kind: JobKind = ""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MapReading:
    """What the directory says now. `skipped`: files that could not be used, `reason`: why nothing could be read."""

    jobs: Mapping[str, SlurmJob] = field(default_factory=dict)
    sluids: Mapping[str, str] = field(default_factory=dict)
    skipped: int = 0
    reason: str = ""


_Stamp = tuple[int, int, int, int]
_File = tuple[_Stamp, tuple[_Entry, ...] | None]
"""When a file was what it is, and its jobs; None where it cannot be used."""


class MapDirectory:
    """Reads the files that have changed since the last time. Belongs to one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, _File] = {}

    def read(self, gpus: tuple[Gpu, ...]) -> MapReading:
        """The jobs and what they hold of these GPUs."""
        try:
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            self._known.clear()
            return MapReading(reason=f"{self._path}: {error.strerror}")
        try:
            self._refresh(folder)
        except OSError as error:
            return MapReading(reason=f"{self._path}: {error.strerror}")
        finally:
            os.close(folder)
        return _merge(self._known.values(), _names(gpus))

    def _refresh(self, folder: int) -> None:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MAX_FILES)]
        wanted = [name for name in names if _DEVICE.fullmatch(name) or name.startswith(_JOB_FILE)]
        known = {name: self._entries_of(folder, name) for name in sorted(wanted)}
        self._known = {name: entries for name, entries in known.items() if entries is not None}

    def _entries_of(self, folder: int, name: str) -> _File | None:
        """As known where the file is unchanged; None for one that has just gone."""
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            stamp = (found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size)
            known = self._known.get(name)
            if known is not None and known[0] == stamp:
                return known
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
                return stamp, None
            text = _read(folder, name)
        except FileNotFoundError:
            return None
        except OSError:
            return (0, 0, 0, 0), None
        return stamp, None if text is None else tuple(_parse(text, name))


def _read(folder: int, name: str) -> str | None:
    """A file's text; None for what is no regular file any more or has grown beyond the limit."""
    file = os.open(name, _OPENING, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        data = os.read(file, MAX_FILE_BYTES + 1)
    finally:
        os.close(file)
    return None if len(data) > MAX_FILE_BYTES else data.decode("utf-8", "replace")


def _parse(text: str, file: str) -> Iterator[_Entry]:
    """The jobs of a file; lines that are neither an id nor a known key are left out."""
    own = () if file.startswith(_JOB_FILE) else (file,)
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, is_pair, value = (part.strip() for part in line.partition("="))
        if is_pair:
            if key == "job_id" and "job_id" in values:
                yield from _entry(values, own)
                values = {}
            values[key] = value
        elif key and not file.startswith(_JOB_FILE):
            yield from _entry({"job_id": key.split(maxsplit=1)[0]}, own)
    yield from _entry(values, own)


def _entry(values: Mapping[str, str], own: tuple[str, ...]) -> Iterator[_Entry]:
    job_id = values.get("job_id", "")
    if not _ID.fullmatch(job_id):
        return
    named = (name.strip() for name in values.get("gpus", "").split(","))
    text = {key: values.get(key, "")[:_MAX_VALUE] for key in ("sluid", "name", "user", "account", "partition")}
    yield _Entry(
        job_id,
        text["sluid"],
        text["name"],
        text["user"],
        text["account"],
        text["partition"],
        _KINDS.get(values.get("kind", ""), ""),
        own or tuple(name for name in named if _DEVICE.fullmatch(name)),
    )


def _names(gpus: tuple[Gpu, ...]) -> dict[str, str]:
    """UUID by every name that a file may give a GPU or MIG instance."""
    names = {gpu.uuid.lower(): gpu.uuid for gpu in gpus}
    ambiguous: set[str] = set()
    for gpu in gpus:
        name = f"{gpu.index}.{gpu.gpu_instance}" if gpu.parent_uuid else str(gpu.index)
        if name in names:  # compute instances that share a GPU instance
            ambiguous.add(name)
        names[name] = gpu.uuid
    return {name: uuid for name, uuid in names.items() if name not in ambiguous}


def _merge(files: Iterable[_File], names: Mapping[str, str]) -> MapReading:
    """All files together: the first that tells something of a job counts, its GPUs add up."""
    jobs: dict[str, SlurmJob] = {}
    sluids: dict[str, str] = {}
    devices: dict[str, dict[str, None]] = defaultdict(dict)
    skipped = 0
    for _, entries in files:
        skipped += entries is None
        for entry in entries or ():
            if entry.job_id not in jobs and len(jobs) >= MAX_JOBS:
                continue
            jobs[entry.job_id] = _joined(jobs.get(entry.job_id), entry)
            devices[entry.job_id].update((names[name.lower()], None) for name in entry.devices if name.lower() in names)
            if entry.sluid:
                sluids.setdefault(entry.sluid, entry.job_id)
    whole = {job_id: replace(job, device_uuids=tuple(devices[job_id])) for job_id, job in jobs.items()}
    return MapReading(whole, sluids, skipped)


def _joined(known: SlurmJob | None, entry: _Entry) -> SlurmJob:
    job = known or SlurmJob(entry.job_id)
    return replace(
        job,
        name=job.name or entry.name,
        user=job.user or entry.user,
        account=job.account or entry.account,
        partition=job.partition or entry.partition,
        kind=job.kind or entry.kind,
    )
