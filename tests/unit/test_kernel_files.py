"""The agents' directory, with honest files and those of somebody who means harm."""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_files import AgentWriter, Kernel
from gpu_hpc_exporter.sources.kernels import files as files_module
from gpu_hpc_exporter.sources.kernels import layout
from gpu_hpc_exporter.sources.kernels.files import KEPT_DEAD_S, AgentFile, AgentFiles, Reading
from unit.objects import G0


class Folder:
    """A directory and its reader, at a time that the test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now_s = 100.0
        self.files = AgentFiles(path, lambda: self.now_s)

    def scan(self) -> list[tuple[AgentFile, Reading | None]]:
        """All that one look finds."""
        return list(self.files.scan())

    def writer(self, pid: int = 101, name: str = "") -> AgentWriter:
        """An honest file with one kernel and one window."""
        writer = AgentWriter(self.path, pid, uuids=(G0.uuid,), environment={"RANK": "3", "X": "a=b"}, name=name)
        writer.kernel(b"gemm").run(writer.next_window(), 10, 5000, 2000)
        writer.publish()
        return writer

    def pids(self) -> list[int]:
        """Whose files one look finds."""
        return sorted(file.pid for file, _ in self.scan())

    @property
    def rejected(self) -> dict[str, int]:
        """Why files were rejected."""
        return {reason: count for reason, count in self.files.rejected.items() if count}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """An empty one."""
    return Folder(tmp_path)


def test_a_directory_that_is_not_there_is_made_where_we_may(tmp_path: Path) -> None:
    """Anybody may leave a file there, only we list them, files inherit our group. Elsewhere nothing happens."""
    path = tmp_path / "gpu-hpc-exporter" / "agents"
    files_module.make_folder(path)
    assert path.stat().st_mode & 0o7777 == 0o3733
    path.chmod(0o700)
    files_module.make_folder(path)
    assert path.stat().st_mode & 0o7777 == 0o700
    (tmp_path / "file").touch()
    files_module.make_folder(tmp_path / "file" / "agents")


def test_an_honest_file(folder: Folder) -> None:
    """What it says comes once for each published window, names once; status always."""
    writer = folder.writer()
    ((file, reading),) = folder.scan()
    assert (file.pid, file.start_ticks, file.uid, file.is_old) == (101, 100, os.getuid(), True)
    assert file.environment == {"RANK": "3", "X": "a=b"}
    assert reading is not None
    assert reading.names == [(0, b"gemm")]
    ((index, uuid, counters),) = reading.devices
    traced_ns = layout.unpack_lanes(counters, layout.COUNTERS)[layout.D_TRACED]
    assert (index, uuid, traced_ns) == (0, G0.uuid[4:].replace("-", ""), 10**9)
    writer.state = "tracing"
    writer.beat()
    ((file, reading),) = folder.scan()
    assert reading is None
    assert file.status is not None
    assert file.status.state == "tracing"
    writer.kernel(b"relu").run(writer.next_window(), 1, 1)
    writer.publish()
    ((_, reading),) = folder.scan()
    assert reading is not None
    assert reading.names == [(0, b"relu")]
    assert len(reading.table) == 2 * layout.KERNEL_SIZE
    assert folder.rejected == {}


def test_later_files_are_new(folder: Folder) -> None:
    """Only those of the first look were counted by somebody before."""
    folder.scan()
    folder.writer()
    ((file, _),) = folder.scan()
    assert not file.is_old


def put_magic(folder: Folder) -> None:
    folder.writer().write(0, b"NOTANAGT")


def put_version(folder: Folder) -> None:
    folder.writer().write(8, struct.pack("<I", 2))


def put_layout(folder: Folder) -> None:
    folder.writer().write(24, struct.pack("<I", 1 << 31))


def put_truncated(folder: Folder) -> None:
    os.truncate(folder.writer().path, 50)


def put_empty(folder: Folder) -> None:
    (folder.path / "1-1-a.shm").touch()


def put_giant(folder: Folder) -> None:
    os.truncate(folder.writer().path, 1 << 40)


def put_symlink(folder: Folder) -> None:
    (folder.path / "1-1-a.shm").symlink_to("/etc/passwd")


def put_dangling(folder: Folder) -> None:
    (folder.path / "1-1-a.shm").symlink_to("/nonexistent")


def put_fifo(folder: Folder) -> None:
    os.mkfifo(folder.path / "1-1-a.shm")


def put_directory(folder: Folder) -> None:
    (folder.path / "1-1-a.shm").mkdir()


def put_hard_link(folder: Folder) -> None:
    os.link(folder.writer().path, folder.path / "elsewhere")


def put_kernels(folder: Folder) -> None:
    writer = folder.writer()
    writer.write(layout.STATUS_OFFSET + layout.STATUS.size - 20, struct.pack("<I", layout.KERNELS + 1))


def put_name_beyond(folder: Folder) -> None:
    folder.writer().write(layout.KERNEL_OFFSET + 4, struct.pack("<I", 0xFFFFFFF0))


def put_long_name(folder: Folder) -> None:
    folder.writer().write(layout.KERNEL_OFFSET + 8, struct.pack("<I", 0xFFFFFFFF))


def put_device(folder: Folder) -> None:
    folder.writer().write(layout.KERNEL_OFFSET, struct.pack("<I", 16))


@pytest.mark.parametrize(
    ("put", "reason"),
    [
        (put_magic, "unknown_magic"),
        (put_version, "unknown_version"),
        (put_layout, "wrong_layout"),
        (put_truncated, "wrong_size"),
        (put_empty, "wrong_size"),
        (put_giant, "wrong_size"),
        (put_symlink, "symlink"),
        (put_dangling, "symlink"),
        (put_fifo, "not_regular"),
        (put_directory, "not_regular"),
        (put_hard_link, "linked"),
        (put_kernels, "lying"),
        (put_name_beyond, "lying"),
        (put_long_name, "lying"),
        (put_device, "lying"),
    ],
)
def test_hostile_files(folder: Folder, caplog: pytest.LogCaptureFixture, put: object, reason: str) -> None:
    """Counted and named once, by reason; an honest file beside them is read."""
    assert callable(put)
    put(folder)
    honest = folder.writer(555)
    for _ in range(3):
        assert [file.name for file, _ in folder.scan()] == [honest.path.name]
    assert folder.rejected == {reason: 1}
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [reason]


class Opening:
    """`os.open`, which fails for some names with an error that root, or an idle host, never meets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: dict[str, int] = {}
        self.opened: list[str] = []
        self._open = os.open
        monkeypatch.setattr(os, "open", self)

    def __call__(self, name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self.opened.append(name)
        if name in self.errors:
            raise OSError(self.errors[name], "")
        return self._open(name, flags, mode, dir_fd=dir_fd)


@pytest.fixture
def opening(monkeypatch: pytest.MonkeyPatch) -> Opening:
    """Of all files of a test."""
    return Opening(monkeypatch)


@pytest.mark.parametrize("error", ["EMFILE", "ENFILE", "ENOMEM", "EIO", "EACCES", "EPERM"])
def test_a_file_that_cannot_be_opened_for_now(
    folder: Folder, opening: Opening, caplog: pytest.LogCaptureFixture, error: str
) -> None:
    """Told once, and tried again: a known one keeps its place, and a late one is as old as it is."""
    known, late = folder.writer(1), folder.writer(2)
    opening.errors[late.path.name] = getattr(errno, error)
    assert folder.pids() == [1]
    opening.errors[known.path.name] = getattr(errno, error)
    known.kernel(b"relu").run(known.next_window(), 1, 1)
    known.publish()
    for _ in range(3):
        ((file, reading),) = folder.scan()
        assert (file.pid, reading) == (1, None)
        assert file.torn  # when it traced meanwhile nobody knows
    opening.errors.clear()
    (_, reading), (file, late_reading) = folder.scan()
    assert reading is not None
    assert reading.names == [(0, b"relu")]
    assert (file.pid, file.is_old, late_reading is None) == (2, True, False)
    assert folder.rejected == {"unreadable": 2}
    assert len(caplog.records) == 2


def test_a_known_file_that_can_be_opened_no_more(folder: Folder, opening: Opening) -> None:
    """Its place is free after a while, and what it had counted is not counted again when it can."""
    writer = folder.writer(1)
    assert folder.pids() == [1]
    opening.errors[writer.path.name] = errno.EACCES
    for _ in range(2):
        ((file, reading),) = folder.scan()
        assert (file.pid, reading) == (1, None)
        folder.now_s += 599
    folder.now_s += 2
    assert not list(folder.scan())
    opening.errors.clear()
    ((file, reading),) = folder.scan()
    assert (file.pid, file.is_old, reading is None) == (1, True, False)
    assert folder.rejected == {"unreadable": 1}


def test_a_name_counts_once(folder: Folder) -> None:
    """An agent has a slot for each grid and block of a kernel."""
    writer = folder.writer(1)
    for _ in range(5):
        writer.kernels.append(Kernel(b"relu", 0))
        writer.next_window()
        writer.publish()
        ((file, reading),) = folder.scan()
        assert reading is not None
        assert file.strings == len(b"gemm" + b"relu")


def test_a_file_that_cannot_be_read_for_now(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever read of a new one fails."""
    folder.writer(1)
    pread = os.pread
    for failing in range(8):
        left = iter([False] * failing)

        def fail(*args: int, left: Iterator[bool] = left) -> bytes:
            if next(left, True):
                raise OSError(errno.EIO, "")
            return pread(*args)

        monkeypatch.setattr(os, "pread", fail)
        folder.files = AgentFiles(folder.path)
        assert all(reading is None for _, reading in folder.scan())
        monkeypatch.undo()
        ((file, reading),) = folder.scan()
        assert reading is not None
        assert file.is_old
        assert folder.rejected == {"unreadable": 1}


@pytest.mark.parametrize("error", ["ELOOP", "ENXIO", "EWOULDBLOCK"])
def test_a_file_that_is_odd_is_opened_once(folder: Folder, opening: Opening, error: str) -> None:
    """What opening says of the file itself stays true."""
    name = folder.writer().path.name
    opening.errors[name] = getattr(errno, error)
    for _ in range(3):
        assert folder.pids() == []
    assert opening.opened.count(name) == 1
    assert sum(folder.rejected.values()) == 1


def test_a_file_that_is_shortened_later(folder: Folder) -> None:
    """No SIGBUS, since nothing is mapped; rejected, and accepted anew only as another file."""
    writer = folder.writer()
    folder.scan()
    os.truncate(writer.path, 100)
    assert folder.scan() == []
    os.truncate(writer.path, layout.FILE_SIZE)
    assert folder.scan() == []
    assert folder.rejected == {"wrong_size": 1}
    writer.path.unlink()
    other = folder.writer(name=writer.path.name)
    assert [file.inode for file, _ in folder.scan()] == [other.path.stat().st_ino]


def test_names_that_are_no_agents(folder: Folder) -> None:
    """Neither opened nor counted nor removed: the directory may be somebody's home."""
    for name in ("notes.txt", "a-b-c.shm", "1-2-3.shm.bak", "settings", "1-2-x" + "y" * 40 + ".shm"):
        (folder.path / name).touch()
        os.utime(folder.path / name, (0, 0))
    assert folder.scan() == []
    assert folder.rejected == {}
    assert len(list(folder.path.iterdir())) == 5


def test_a_torn_file(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that stays odd is waited for a bounded time, told once, and forgiven."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    writer = folder.writer()
    folder.scan()
    writer.kernel(b"relu").run(writer.next_window(), 1, 1)
    writer.begin()
    for _ in range(5):
        ((file, reading),) = folder.scan()
        assert reading is None
        assert file.kernels == 1
    assert folder.rejected == {"torn": 1}
    assert len(slept) == 15
    writer.publish()
    ((_, reading),) = folder.scan()
    assert reading is not None
    assert reading.names == [(0, b"relu")]


def test_many_torn_files_share_their_attempts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many files somebody leaves torn, one look waits 64 times half a millisecond."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for pid in range(200):
        folder.writer(pid).begin()
    folder.scan()
    assert len(slept) == 64


def test_a_process_that_ends(folder: Folder) -> None:
    """Its last window is read; the file goes a minute later, and only that file."""
    writer, other = folder.writer(), folder.writer(102)
    folder.scan()
    writer.kernel(b"gemm").run(writer.next_window(), 1, 1)
    writer.end()
    found = {file.pid: (file, reading) for file, reading in folder.scan()}
    file, reading = found[101]
    assert reading is not None
    assert file.died_s == 100
    assert found[102][0].died_s is None
    folder.now_s += KEPT_DEAD_S - 1
    assert {file.pid for file, _ in folder.scan()} == {101, 102}
    assert writer.path.exists()
    folder.now_s += 1
    folder.scan()
    assert not writer.path.exists()
    assert other.path.exists()
    assert {file.pid for file, _ in folder.scan()} == {102}


@pytest.mark.parametrize("ahead_s", [6, 3600, 10**9])
def test_a_process_that_ends_with_a_beat_in_the_future(folder: Folder, ahead_s: int) -> None:
    """The clock was set back, or its file lies: it goes as any other."""
    writer = folder.writer()
    folder.scan()
    writer.beat(time.time_ns() + ahead_s * 10**9)
    writer.unlock()
    ((file, _),) = folder.scan()
    assert file.died_s == 100
    folder.now_s += KEPT_DEAD_S
    folder.scan()
    assert not writer.path.exists()


@pytest.mark.parametrize("step_s", [-3600, -6, 6, 3600])
@pytest.mark.parametrize("lock", ["held", "free"])
def test_a_clock_that_is_set_ends_nobody(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, step_s: int, lock: str
) -> None:
    """Whether it was set before or after the last beat, and though a program has closed all files, ours too."""
    wall = time.time_ns
    writer = folder.writer()
    if lock == "free":
        writer.unlock()
    folder.scan()
    monkeypatch.setattr(time, "time_ns", lambda: wall() + step_s * 10**9)
    ((file, _),) = folder.scan()
    assert (file.died_s, file.is_beating(time.time_ns())) == (None, False)
    writer.beat()
    ((file, _),) = folder.scan()
    assert (file.died_s, file.is_beating(time.time_ns())) == (None, True)
    writer.end()
    ((file, _),) = folder.scan()
    assert file.died_s == 100


@pytest.mark.parametrize("error", [PermissionError(1, "no"), OSError(errno.EROFS, "read-only")])
def test_a_dead_file_that_cannot_be_removed(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError
) -> None:
    """Somebody else's sticky directory, or one mounted read-only: its place is free all the same; told once."""

    def refuse(_name: str, **_kwargs: object) -> None:
        raise error

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(files_module, "MAX_FILES_OF_USER", 2)
    for pid in (1, 2):
        folder.writer(pid).end()
    folder.scan()
    folder.now_s += KEPT_DEAD_S
    folder.scan()
    folder.writer(3)
    for _ in range(3):
        assert folder.pids() == [3]
    assert folder.rejected == {}
    (record,) = caplog.records
    assert str(error.strerror) in record.getMessage()


def test_a_name_that_has_become_anothers_is_not_removed(folder: Folder) -> None:
    """The file of a process that lives, under the name of one that has ended."""
    writer = folder.writer()
    writer.end()
    folder.scan()
    folder.now_s += KEPT_DEAD_S
    scan = folder.files.scan()
    next(scan)
    writer.path.rename(folder.path / "9-9-a.shm")
    other = folder.writer(name=writer.path.name)
    assert [file.inode for file, _ in scan] == []
    assert other.path.exists()


def test_leftovers_of_agents_that_never_began(folder: Folder) -> None:
    """Old ones go, a young one may still become a file."""
    old, young = folder.path / "1-2-ab.tmp", folder.path / "1-3-ab.tmp"
    for path in (old, young):
        path.touch()
    os.utime(old, (0, time.time() - 2 * KEPT_DEAD_S))
    folder.scan()
    assert (old.exists(), young.exists()) == (False, True)


def test_a_user_has_so_many_files(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were there first stay; one that goes makes room for another."""
    monkeypatch.setattr(files_module, "MAX_FILES_OF_USER", 3)
    first = [folder.writer(pid) for pid in (1, 2, 3)]
    folder.scan()
    folder.writer(4, name="0-0-first.shm")
    assert sorted(file.pid for file, _ in folder.scan()) == [1, 2, 3]
    assert folder.rejected == {"too_many": 1}
    assert sorted(file.pid for file, _ in folder.scan()) == [1, 2, 3]
    assert folder.rejected == {"too_many": 1}
    first[0].path.unlink()
    assert sorted(file.pid for file, _ in folder.scan()) == [2, 3, 4]
    first[1].path.unlink()
    folder.writer(5)
    assert sorted(file.pid for file, _ in folder.scan()) == [3, 4, 5]


@pytest.mark.parametrize("limit", ["MAX_KERNELS_OF_USER", "MAX_STRINGS_OF_USER", "MAX_KERNELS", "MAX_STRINGS"])
def test_so_much_in_files(folder: Folder, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """Memory is bounded, of a user and of all: what a file has that is known stays, what is new waits for room."""
    monkeypatch.setattr(files_module, limit, 25)
    writers = [folder.writer(pid) for pid in (1, 2, 3)]
    assert len(folder.scan()) == 3
    for writer in writers[1:]:
        writer.kernel(b"gemm").run(writer.next_window(), 7, 1)
    for number in range(24):
        writers[1].kernel(b"%d" % number).run(writers[1].window, 1, 1)
    for writer in writers:
        writer.publish()
    found = {file.pid: reading for file, reading in folder.scan()}
    assert [len(reading.table) // layout.KERNEL_SIZE for reading in found.values() if reading is not None] == [1, 1]
    assert folder.pids() == [1, 2, 3]
    assert folder.rejected == {"too_many": 1}
    writers[0].path.unlink()
    writers[2].path.unlink()
    monkeypatch.setattr(files_module, limit, 200)
    writers[1].next_window()
    writers[1].publish()
    found = {file.pid: reading for file, reading in folder.scan()}
    reading = found[2]
    assert reading is not None
    assert len(reading.names) == 24


def test_a_file_that_is_read_anew_when_there_is_no_room(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps its place, and its process is heard; all of it comes when there is room."""
    writer = folder.writer()
    ((file, _),) = folder.scan()
    file.rewind()
    monkeypatch.setattr(files_module, "MAX_KERNELS", 0)
    writer.beat(7)
    ((file, reading),) = folder.scan()
    assert reading is None
    assert file.status is not None
    assert file.status.heartbeat_ns == 7
    monkeypatch.undo()
    ((file, reading),) = folder.scan()
    assert reading is not None
    assert reading.names == [(0, b"gemm")]


def write_hostile(path: Path, uid: int, names: bytes = b"", size: int = 0) -> None:
    """A file of zeros but for its header, with as many kernels as there may be, each with a name somewhere in these."""
    writer = AgentWriter(path, uid, uuids=(G0.uuid,))
    writer.publish()
    kernels = b"".join(
        struct.pack("<10I", 0, slot if size else 0, size, *[0] * 7).ljust(layout.KERNEL_SIZE, b"\0")
        for slot in range(layout.KERNELS)
    )
    writer.write(layout.KERNEL_OFFSET, kernels)
    writer.write(layout.STRINGS_OFFSET, names)
    writer.write(layout.STATUS_OFFSET + layout.STATUS.size - 20, struct.pack("<II", layout.KERNELS, len(names)))
    os.chown(writer.path, uid, -1)


@pytest.mark.skipif(os.getuid() != 0, reason="gives files to other users")
def test_all_users_have_so_much_together(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root in a container is as many users as it likes; who was there before loses nothing."""
    monkeypatch.setattr(files_module, "MAX_KERNELS", 3 * layout.KERNELS + 2)
    honest = folder.writer(1)
    folder.scan()
    for uid in range(70_000, 70_009):
        write_hostile(folder.path, uid)

    def look(name: bytes) -> tuple[AgentFile, list[tuple[int, bytes]]]:
        honest.kernel(name).run(honest.next_window(), 7, 1)
        honest.publish()
        found = {file.pid: (file, reading) for file, reading in folder.scan()}
        assert sum(file.kernels for file, _ in found.values()) <= files_module.MAX_KERNELS
        file, reading = found[1]
        assert reading is not None
        return file, reading.names

    assert look(b"relu")[1] == [(0, b"relu")]
    served = [file.name for file, _ in folder.scan()]
    assert len(served) == 4
    assert folder.rejected == {"too_many": 6}
    for _ in range(3):
        assert look(b"late")[1] == []
        assert [file.name for file, _ in folder.scan()] == served
    assert folder.rejected == {"too_many": 7}
    (folder.path / served[1]).unlink()
    assert look(b"late")[1] == [(0, b"late")]
    assert folder.rejected == {"too_many": 7}


def test_names_that_overlap_are_no_agents(folder: Folder) -> None:
    """4,096 names within 8 KiB would take 16 MiB to keep; names that several kernels have are kept once."""
    write_hostile(folder.path, os.getuid(), os.urandom(8192), 4096)
    honest = folder.writer(102)
    for device in range(8):
        honest.kernel(b"long" * 1000, device).run(honest.next_window(), 1, 1)
    honest.publish()
    honest.write(layout.STATUS_OFFSET + layout.STATUS.size - 16, struct.pack("<I", 4010))
    for slot in range(1, 9):
        honest.write(layout.KERNEL_OFFSET + slot * layout.KERNEL_SIZE + 4, struct.pack("<I", 5))
    ((file, reading),) = folder.scan()
    assert (file.pid, file.strings) == (102, 4004)
    assert reading is not None
    assert len({id(name) for _, name in reading.names}) == 2
    assert folder.rejected == {"lying": 1}


def test_a_directory_full_of_names(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A look ends after so many; a known file stays known, a new one is found some looks later; told once."""
    monkeypatch.setattr(files_module, "MAX_ENTRIES", 50)
    known = folder.writer(pid=1)
    folder.scan()
    for number in range(300):
        (folder.path / f"{number}-1-a.shm").touch()
    found = [{file.pid for file, _ in folder.scan()}]
    folder.writer(pid=2)
    found += [{file.pid for file, _ in folder.scan()} for _ in range(14)]
    assert all(1 in pids for pids in found)
    assert found[-1] == {1, 2}
    for _ in range(21):
        folder.scan()
    assert folder.rejected == {"wrong_size": 300}
    assert sum("found late" in record.getMessage() for record in caplog.records) == 1
    known.path.unlink()
    assert {file.pid for file, _ in folder.scan()} == {2}
    folder.files.close()


def test_a_missing_directory(tmp_path: Path) -> None:
    """The caller's to tell."""
    with pytest.raises(FileNotFoundError):
        list(AgentFiles(tmp_path / "none").scan())


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentWriter]:
    """One file for all examples."""
    path = tmp_path_factory.mktemp("damaged")
    writer = AgentWriter(path, uuids=(G0.uuid,))
    for name in (b"a", b"b" * 4000, b"_ZN1fE"):
        writer.kernel(name).run(writer.next_window(), 3, 100)
    writer.publish()
    yield writer
    writer.end()


@given(st.integers(0, layout.STRINGS_OFFSET + 9000), st.binary(min_size=1, max_size=64))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_bytes_anywhere(damaged: AgentWriter, place: int, data: bytes) -> None:
    """Whatever stands in a file, reading it ends, and either gives names within bounds or rejects it."""
    reader = AgentFiles(damaged.path.parent)
    damaged.write(place, data)
    try:
        for _ in range(2):
            for _, reading in reader.scan():
                assert reading is None or all(len(name) <= layout.MAX_NAME for _, name in reading.names)
    finally:
        damaged.write(0, bytes(layout.STATUS_OFFSET))
        damaged.write(
            0,
            layout.IDENTITY.pack(layout.MAGIC, layout.VERSION, *layout.SHAPE, 1, 1, 0, 0, 0),
        )
        damaged.publish()
