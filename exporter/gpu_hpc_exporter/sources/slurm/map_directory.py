"""Files in which a prolog says whose each GPU is, removed by the epilog.

Two forms may stand side by side. A file named by a GPU (NVML's index, `<index>.<GPU instance id>` for a MIG instance,
or a UUID) holds one job id a line: what dcgm-exporter's --hpc-job-mapping-dir reads; whatever follows the id on its
line is ignored. A line `key=value` says more of a job, which `job_id=` begins; in a file named `job-<anything>` the key
`gpus` names the GPUs, separated by commas. Keys: job_id, sluid, name, user, account, partition, kind, gpus.

Everybody may be able to write there: files are bounded, links and FIFOs are not followed, text is what can be decoded.
Only files of root's, of our own user's and of the directory's owner's are believed. Where two of them contradict each
other about a job, nothing is said of what they differ in.
"""

from __future__ import annotations

import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.jobs.lookups import SlurmJob
from gpu_hpc_exporter.model import Gpu, JobKind
from gpu_hpc_exporter.text import bounded

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
    """What the directory says now.

    skipped: files that could not be used, `problem`: the first of them and why. reason: why nothing could be read.
    """

    jobs: Mapping[str, SlurmJob] = field(default_factory=dict)
    sluids: Mapping[str, str] = field(default_factory=dict)
    skipped: int = 0
    problem: str = ""
    reason: str = ""


_Stamp = tuple[int, int, int, int]
_File = tuple[_Stamp, tuple[_Entry, ...] | str]
"""When a file was what it is, and its jobs, or why it cannot be used."""
_NO_FILE: Final = "no regular file"
_TOO_LONG: Final = f"longer than {MAX_FILE_BYTES} bytes"


class MapDirectory:
    """Reads the files that have changed since the last time. Belongs to one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, _File] = {}
        self._trusted: frozenset[int] = frozenset()

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
        return _merge(self._known, _names(gpus))

    def _refresh(self, folder: int) -> None:
        trusted = frozenset({0, os.geteuid(), os.fstat(folder).st_uid})
        if trusted != self._trusted:
            self._known.clear()
        self._trusted = trusted
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
            if not stat.S_ISREG(found.st_mode):
                return stamp, _NO_FILE
            text = _read(folder, name, self._trusted)
        except FileNotFoundError:
            return None
        except _UnusableError as error:
            return stamp, str(error)
        except OSError as error:
            return (0, 0, 0, 0), error.strerror or "cannot be read"
        return stamp, tuple(_parse(text, name))


class _UnusableError(Exception):
    """A file that is not read; the text says why."""


def _read(folder: int, name: str, trusted: frozenset[int]) -> str:
    """A file's text. Raises _UnusableError, OSError."""
    file = os.open(name, _OPENING, dir_fd=folder)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _UnusableError(_NO_FILE)
        if status.st_uid not in trusted:
            raise _UnusableError(f"owned by user {status.st_uid}, who is not trusted")
        data = os.read(file, MAX_FILE_BYTES + 1)
    finally:
        os.close(file)
    if len(data) > MAX_FILE_BYTES:
        raise _UnusableError(_TOO_LONG)
    return data.decode("utf-8", "replace")


def _parse(text: str, file: str) -> Iterator[_Entry]:
    """The jobs of a file; lines that are neither an id nor a known key are left out."""
    own = () if file.startswith(_JOB_FILE) else (file,)
    values: dict[str, str] = {}
    for line in text.split("\n"):  # nothing else ends a line: a job's name may hold what Python takes for an end
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


def _merge(files: Mapping[str, _File], names: Mapping[str, str]) -> MapReading:
    """All files together: a job's GPUs add up; what is told of it differently is not told."""
    told: dict[str, list[_Entry]] = {}
    numbers: dict[str, set[str]] = defaultdict(set)
    problems = []
    for file, (_, entries) in files.items():
        if isinstance(entries, str):
            problems.append((file, entries))
            continue
        for entry in entries:
            if entry.job_id not in told and len(told) >= MAX_JOBS:
                continue
            told.setdefault(entry.job_id, []).append(entry)
            if entry.sluid:
                numbers[entry.sluid].add(entry.job_id)
    jobs = {job_id: _joined(job_id, entries, names) for job_id, entries in told.items()}
    sluids = {sluid: next(iter(job_ids)) for sluid, job_ids in numbers.items() if len(job_ids) == 1}
    problem = f"{bounded(problems[0][0], _MAX_NAME_BYTES)}: {problems[0][1]}" if problems else ""
    return MapReading(jobs, sluids, len(problems), problem)


_MAX_NAME_BYTES: Final = 64


def _joined(job_id: str, entries: Iterable[_Entry], names: Mapping[str, str]) -> SlurmJob:
    entries = tuple(dict.fromkeys(entries))
    devices = (name.lower() for entry in entries for name in entry.devices)
    kinds = {entry.kind for entry in entries if entry.kind}
    return SlurmJob(
        job_id,
        name=_only(entry.name for entry in entries),
        user=_only(entry.user for entry in entries),
        account=_only(entry.account for entry in entries),
        partition=_only(entry.partition for entry in entries),
        kind=kinds.pop() if len(kinds) == 1 else "",
        device_uuids=tuple(dict.fromkeys(names[name] for name in devices if name in names)),
    )


def _only(values: Iterable[str]) -> str:
    """The one value that is told, "" where there are none or several."""
    told = set(values) - {""}
    return told.pop() if len(told) == 1 else ""
