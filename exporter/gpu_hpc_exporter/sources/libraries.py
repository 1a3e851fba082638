"""Which CUDA libraries a process has mapped, and their versions, from /proc and from the process's own files.

A version is in a file's name where it was installed whole (libcudart.so.12.4.127). Wheels shorten the name: then it is
in the name of the wheel's dist-info folder. NCCL alone also has it in its .rodata; cudart, cuDNN and cuBLAS have it
nowhere in their files. Without any of it the number that the name ends in is what is told.

The files are the users', and so is what is in them: nothing is followed out of the process's root, only regular files
are opened, and of none more is read than is bounded here. So little of ELF is needed that a few lines with bounds are
shorter than what would put bounds on pyelftools, which reads whatever a file's headers ask for.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from gpu_hpc_exporter.model import Library, LibraryName
from gpu_hpc_exporter.sources.procfs import PROC, start_ticks_of
from gpu_hpc_exporter.text import bounded

MAX_MAPS: Final = 4 << 20
MAX_LIBRARIES: Final = 8
"""Most libraries of one process that are told."""
PATIENCE_S: Final = 1.0
"""How long one process may take. One call that hangs is not cut short: ask from a thread that nothing waits for."""
_MAX_PATH: Final = 1024
_MAX_DEPTH: Final = 64
_MAX_FOLDER: Final = 20_000
_MAX_DISTRIBUTIONS: Final = 64
_MAX_KEPT: Final = 1024
_CHUNK: Final = 64 << 10

_FILE_NAME: Final = re.compile(
    rb"lib(cudart|cudnn|cublas|nccl|torch_cpu|torch|cuda)(?:-[0-9a-f]{8})?\.so((?:\.[0-9]{1,8}){0,5})"
)
"""The hash is auditwheel's."""
_LIBRARIES: Final[dict[bytes, LibraryName]] = {
    b"cudart": "cudart",
    b"cudnn": "cudnn",
    b"cublas": "cublas",
    b"nccl": "nccl",
    b"torch_cpu": "torch",
    b"torch": "torch",
    b"cuda": "cuda_driver",
}
_WHOLE_NAME: Final = re.compile(r"[0-9]+(\.[0-9]+){2,}")
"""The 11.0 of libcudart.so.11.0 is that of all of CUDA 11."""
_WHOLE_DRIVER_NAME: Final = re.compile(r"[0-9]{3,}(\.[0-9]+)+")
_DISTRIBUTION: Final = re.compile(
    r"(?:(torch)|nvidia_(cuda_runtime|cudnn|cublas|nccl)(?:_cu[0-9]+)?)"
    r"-([0-9]+(?:\.[0-9]+){1,5}[0-9A-Za-z.+_]{0,40})(?:-py[0-9.]+)?\.(?:dist|egg)-info"
)
_NCCL_VERSION: Final = re.compile(rb"NCCL version ([0-9]{1,4}(?:\.[0-9]{1,4}){1,3})")


class Mapped(NamedTuple):
    """A library that is mapped; `numbers` are those that the file's name ends in."""

    name: LibraryName
    folder: bytes
    file: bytes
    numbers: str


def mapped_libraries(maps: bytes) -> list[Mapped]:
    """Libraries by the text of a `maps`, each file once; without files that are deleted or whose names are odd."""
    found: dict[tuple[LibraryName, bytes, str], Mapped] = {}
    for line in maps.split(b"\n"):
        if b"/lib" not in line:
            continue
        folder, slash, file = line.rpartition(b"/")
        match = _FILE_NAME.fullmatch(file)
        fields = folder.split(None, 5)
        if match is None or len(fields) < 6 or not _is_plain(fields[5] + slash):
            continue
        name, numbers = _LIBRARIES[match[1]], match[2][1:].decode()
        found.setdefault((name, fields[5], numbers), Mapped(name, fields[5], file, numbers))
        if len(found) >= 2 * MAX_LIBRARIES:
            break
    return list(found.values())


def _is_plain(folder: bytes) -> bool:
    """The kernel writes a line feed as \\012 and a backslash as it is: what has one may be either."""
    return folder.startswith(b"/") and len(folder) <= _MAX_PATH and b"\\" not in folder


class ProcessLibraries:
    """Reads the libraries of processes, remembering what files of what content told. For one thread."""

    def __init__(self, root: Path = PROC) -> None:
        self._root = root
        self._distributions: dict[_Content, dict[str, set[str]]] = {}
        self._nccl_versions: dict[_Content, str] = {}

    def read(self, pid: int, start_ticks: int) -> tuple[Library, ...] | None:
        """Libraries of the process that started then; None where it has ended or does not let us read."""
        give_up_s = time.monotonic() + PATIENCE_S
        try:
            with _opened(os.open(self._root / str(pid), _FOLDER)) as process:
                maps = _read_maps(process)
                if start_ticks_of(process) != start_ticks:
                    return None
                found = mapped_libraries(maps)
                if not found:
                    return ()
                with _opened(os.open("root", _FOLDER, dir_fd=process)) as root:
                    return self._versions(root, found, give_up_s)
        except OSError:
            return None

    def _versions(self, root: int, found: list[Mapped], give_up_s: float) -> tuple[Library, ...]:
        libraries = set()
        for mapped in found:
            version = _told_by_name(mapped)
            if not version and time.monotonic() < give_up_s:
                version = self._distribution(root, mapped) or self._nccl(root, mapped)
            if not version and mapped.name != "cuda_driver":
                version = mapped.numbers.partition(".")[0]
            if version:
                libraries.add(Library(mapped.name, bounded(version)))
        return tuple(sorted(libraries)[:MAX_LIBRARIES])

    def _distribution(self, root: int, mapped: Mapped) -> str:
        """By the one dist-info beside the library's package whose version begins like the file's; "" without one."""
        place = _site_folder(mapped)
        if place is None:
            return ""
        try:
            with _opened(_open_below(root, place, stat.S_IFDIR)) as folder:
                content = _content(folder)
                told = self._distributions.get(content)
                if told is None:
                    told = _keep(self._distributions, content, _list_distributions(folder))
        except OSError:
            return ""
        major = mapped.numbers.partition(".")[0]
        versions = [v for v in told.get(mapped.name, ()) if not major or v.partition(".")[0] == major]
        return versions[0] if len(versions) == 1 else ""

    def _nccl(self, root: int, mapped: Mapped) -> str:
        if mapped.name != "nccl":
            return ""
        try:
            with _opened(_open_below(root, mapped.folder + b"/" + mapped.file, stat.S_IFREG)) as file:
                content = _content(file)
                told = self._nccl_versions.get(content)
                if told is None:
                    match = _NCCL_VERSION.search(read_rodata(file))
                    told = _keep(self._nccl_versions, content, match[1].decode() if match else "")
                return told
        except OSError:
            return ""


_FOLDER: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_PATH_ONLY: Final = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW
_Content = tuple[int, int, int, int]
_Told = TypeVar("_Told")


@contextmanager
def _opened(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _read_maps(process: int) -> bytes:
    """Whole lines of `maps`, from its beginning. Raises OSError. Never waits: in a copy of a /proc it may be a FIFO."""
    with _opened(os.open("maps", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=process)) as file:
        chunks = []
        size = 0
        while size < MAX_MAPS and (chunk := os.read(file, _CHUNK)):
            chunks.append(chunk)
            size += len(chunk)
    return b"".join(chunks).rpartition(b"\n")[0]


def _told_by_name(mapped: Mapped) -> str:
    whole = _WHOLE_DRIVER_NAME if mapped.name == "cuda_driver" else _WHOLE_NAME
    return mapped.numbers if whole.fullmatch(mapped.numbers) else ""


def _site_folder(mapped: Mapped) -> bytes | None:
    """Where dist-info folders lie: `<site>` of `<site>/torch/lib` and of `<site>/nvidia/cudnn/lib`."""
    site, _, package = mapped.folder.removesuffix(b"/lib").rpartition(b"/")
    if package == b"torch":
        return site
    return site.removesuffix(b"/nvidia") if site.endswith(b"/nvidia") else None


def _open_below(root: int, path: bytes, kind: int) -> int:
    """Open a file of this kind. Raises OSError, also where a link is on the way: maps tells paths without any."""
    parts = path.removeprefix(b"/").split(b"/")
    if len(parts) > _MAX_DEPTH or not {b"", b".", b".."}.isdisjoint(parts):
        raise OSError(errno.EINVAL, "no path")
    here = os.dup(root)
    try:
        for part in parts:
            below = os.open(part, _PATH_ONLY, dir_fd=here)
            os.close(here)
            here = below
        if stat.S_IFMT(os.fstat(here).st_mode) != kind:
            raise OSError(errno.EINVAL, "of another kind")
        return os.open(f"/proc/self/fd/{here}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    finally:
        os.close(here)


def _content(file: int) -> _Content:
    """What changes when the content does; ctime cannot be set."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_ctime_ns


def _keep(known: dict[_Content, _Told], content: _Content, told: _Told) -> _Told:
    if len(known) >= _MAX_KEPT:
        known.clear()
    known[content] = told
    return told


def _list_distributions(folder: int) -> dict[str, set[str]]:
    """Versions of those libraries' packages, by library."""
    told: dict[str, set[str]] = {}
    with os.scandir(folder) as entries:
        names = (entry.name for entry in islice(entries, _MAX_FOLDER))
        matches = (match for name in names if (match := _DISTRIBUTION.fullmatch(name)))
        for match in islice(matches, _MAX_DISTRIBUTIONS):
            package = match[1] or match[2]
            told.setdefault("cudart" if package == "cuda_runtime" else package, set()).add(match[3])
    return told


_ELF_64_LITTLE: Final = b"\x7fELF\x02\x01"
_HEADER_BYTES: Final = 64
_SECTION_BYTES: Final = 64
_MAX_SECTIONS: Final = 256
_MAX_SECTION_NAMES: Final = 64 << 10
_MAX_RODATA: Final = 4 << 20


def read_rodata(file: int) -> bytes:
    """The constants of a library, the first of them; b"" where the file is no whole ELF file of 64 bits."""
    header = _read_at(file, 0, _HEADER_BYTES)
    if len(header) < _HEADER_BYTES or not header.startswith(_ELF_64_LITTLE):
        return b""
    (offset,) = struct.unpack_from("<Q", header, 40)
    _, count, names_at = struct.unpack_from("<HHH", header, 58)
    table = _read_at(file, offset, min(count, _MAX_SECTIONS) * _SECTION_BYTES)
    whole = len(table) // _SECTION_BYTES * _SECTION_BYTES
    sections = list(struct.iter_unpack("<I20xQQ24x", table[:whole]))
    if names_at >= len(sections):
        return b""
    _, offset, size = sections[names_at]
    names = _read_at(file, offset, min(size, _MAX_SECTION_NAMES))
    for name, offset, size in sections:
        if names[name:].startswith(b".rodata\0"):
            return _read_at(file, offset, min(size, _MAX_RODATA))
    return b""


def _read_at(file: int, offset: int, size: int) -> bytes:
    return os.pread(file, size, offset) if offset <= _MAX_OFFSET else b""


_MAX_OFFSET: Final = 1 << 40
