"""What is read of processes: in copies of a /proc, where every step can be made to fail, and of real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpu_hpc_exporter.jobs.cgroup import parse_cgroup
from gpu_hpc_exporter.model import Evidence
from gpu_hpc_exporter.sources import procfs
from gpu_hpc_exporter.sources.procfs import MAX_PROCESSES, Processes, Users, namespace_pids_of, open_folder, pid_view
from unit.known import CID, CID2

VARIABLES = ("JOB_NAME", "RANK")
HOST_NAMESPACE = "pid:[4026531836]"
OWN_NAMESPACE = "pid:[4026532222]"
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's processes")


class Tree:
    """A copy of a /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root / "proc"
        self.root.mkdir()

    def add(
        self, pid: int, comm: bytes = b"python3", *, start: int = 8765, state: bytes = b"S", uid: int = 1000
    ) -> Path:
        """A process."""
        folder = self.root / str(pid)
        folder.mkdir()
        self.write_stat(pid, comm, start=start, state=state)
        (folder / "cgroup").write_text(f"0::/x-{pid}-{start}\n")
        (folder / "cmdline").write_bytes(b"python3\0train.py\0")
        (folder / "environ").write_bytes(b"PATH=/bin\0JOB_NAME=bert\0SECRET=s\0")
        (folder / "status").write_text(f"Name:\tx\nUid:\t{uid + 1}\t{uid}\t{uid}\t{uid}\n")
        return folder

    def write_stat(self, pid: int, comm: bytes = b"python3", *, start: int, state: bytes = b"S") -> None:
        """As the kernel shows it."""
        zeros = b"0 " * 15
        stat = b"%d (%s) %s 1 %s 1 0 %d %s\n" % (pid, comm, state, zeros, start, zeros)
        (self.root / f"{pid}/stat").write_bytes(stat)

    def end(self, pid: int) -> None:
        """It is gone; the folder is only renamed, so that another one has another inode."""
        (self.root / str(pid)).rename(self.root / f"gone-{pid}-{time.monotonic_ns()}")

    def processes(self) -> Processes:
        """A reader of it."""
        return Processes(self.root, VARIABLES)

    def read(self, pid: int) -> Evidence | None:
        """What is told of one process."""
        return self.processes().read(pid)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An empty copy."""
    return Tree(tmp_path)


def test_evidence(tree: Tree) -> None:
    """Everything of a process, and of its environment only what was asked for."""
    tree.add(4101)
    (tree.root.parent / "etc").mkdir()
    (tree.root.parent / "etc/passwd").write_text("alice:x:1000:1000::/home/alice:/bin/sh\n")
    assert tree.read(4101) == Evidence(
        4101, 8765, "python3", "python3 train.py", 1000, "alice", "0::/x-4101-8765\n", {"JOB_NAME": "bert"}
    )


# E01: whose pids they are


def in_namespace(tree: Tree, namespace: str, driver: str = "") -> Tree:
    """We are in this pid namespace, beside this driver."""
    tree.add(1)
    if namespace:
        (tree.root / "self/ns").mkdir(parents=True)
        (tree.root / "self/ns/pid").symlink_to(namespace)
    if driver:
        (tree.root / "driver/nvidia").mkdir(parents=True)
        (tree.root / "driver/nvidia/version").write_text(driver)
    return tree


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (user@host)  Wed Jan  1 2025\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Wed Jan  1 00:00:00 UTC 2025\nGCC version: 12.2.0\n"


@pytest.mark.parametrize(
    ("namespace", "driver", "wanted"),
    [
        (HOST_NAMESPACE, "580.159.04", {"lookup": True, "lists_all": True}),
        (OWN_NAMESPACE, "535.104.12", {"lookup": False, "lists_all": True}),
        (OWN_NAMESPACE, "535.113.01", {"lookup": False, "lists_all": False}),
        (OWN_NAMESPACE, "", {"lookup": False, "lists_all": False}),
        ("", "580.159.04", {"lookup": False, "lists_all": True}),
    ],
)
def test_e01_host_pids_inside_a_container(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, namespace: str, driver: str, wanted: dict[str, bool]
) -> None:
    """E01: our own /proc counts in the host's namespace; in another one newer drivers list only its own processes."""
    monkeypatch.setattr(procfs, "PROC", tree.root)
    view = pid_view(in_namespace(tree, namespace, CLOSED.format(driver)).root)
    assert {"lookup": view.lookup, "lists_all": view.lists_all} == wanted
    assert bool(view.reason) != view.lookup


@pytest.mark.parametrize("kind", [OPEN, CLOSED])
@pytest.mark.parametrize(
    ("driver", "lists_all"),
    [
        ("470.256.02", True),
        ("535.104.12", True),
        ("535.113.01", False),
        ("550.54.14", False),
        ("1000.1", False),
        ("x" + "9" * 5000 + ".1", False),
    ],
)
def test_e01_the_hosts_proc_inside_a_container(
    tree: Tree,
    driver: str,
    lists_all: bool,  # noqa: FBT001  a parameter of the case
    kind: str,
) -> None:
    """E01: what newer drivers list there are pids of our namespace, which would be somebody else's on the host."""
    view = pid_view(in_namespace(tree, OWN_NAMESPACE, kind.format(driver)).root)
    assert (view.lookup, view.lists_all, "hostPID" in view.reason) == (lists_all, lists_all, not lists_all)


def test_e01_another_proc_is_the_hosts(tree: Tree) -> None:
    """As mounted into a container; one without processes is no /proc, one without pid 1 hides other users'."""
    assert "is it a /proc" in pid_view(tree.root).reason
    assert not pid_view(tree.root).lookup
    assert not pid_view(tree.root / "nowhere").lookup
    tree.add(4101)
    hidden = pid_view(tree.root)
    assert hidden.lookup
    assert "hidepid" in hidden.reason
    tree.add(1)
    assert pid_view(tree.root) == procfs.PidView(lookup=True)


@pytest.mark.parametrize("pid", [0, -1, 4294967295, 2**22 + 1, 4102])
def test_e01_pids_that_are_none(tree: Tree, pid: int) -> None:
    """What NVML says for a process that it may not name, and one that there is not."""
    tree.add(4101)
    assert tree.read(pid) is None
    assert tree.processes().refresh([pid]) == {}


def test_e01_a_process_that_started_after_it_was_listed(tree: Tree) -> None:
    """It is another one: the pid was given away."""
    tree.add(4101, b"sshd", start=1000)
    second_ns, ticks = 10**9, os.sysconf("SC_CLK_TCK")
    started_ns = 1000 * second_ns // ticks
    processes = tree.processes()
    assert processes.refresh([4101], started_ns - 1) == {}
    assert set(processes.refresh([4101], started_ns)) == {4101}
    assert processes.refresh([4101], started_ns - 1) == {}


# E04, E05: what old kernels and odd programs show


@pytest.mark.parametrize(
    ("line", "expected"), [("", ()), ("NSpid:\t4101\t17\t1\n", (4101, 17, 1)), ("NSpid:\tx\n", ()), ("NSpid:\n", ())]
)
def test_e04_nspid_is_optional(tree: Tree, line: str, expected: tuple[int, ...]) -> None:
    """Kernels before 4.1 do not tell."""
    folder = tree.add(4101)
    (folder / "status").write_text(f"Name:\tx\nUid:\t0\t1000\t0\t0\n{line}")
    with open_folder(folder) as opened:
        assert namespace_pids_of(opened) == expected
    told = tree.read(4101)
    assert told is not None
    assert told.uid == 1000


@pytest.mark.parametrize(
    "comm",
    [b"train\xff.py", b'a\n"b\\c\r', b"a) S 1 (b", b"((", b"))", b"", b" ", b"a,b", b"(sd-pam)", b"1 (x) Z 9 9"],
)
def test_e05_odd_names(tree: Tree, comm: bytes) -> None:
    """Whatever bytes a name has, it is that name, and the start time is the start time."""
    tree.add(4101, comm)
    told = tree.read(4101)
    assert told is not None
    assert told.comm.encode("utf-8", "surrogateescape") == comm
    assert told.start_ticks == 8765


def test_e05_bounded_reads(tree: Tree) -> None:
    """A command line of 4,478 bytes, a huge cgroup file (whole lines of it), a huge environment that tells late."""
    folder = tree.add(4101)
    (folder / "cmdline").write_bytes(b"x" * 4478)
    (folder / "cgroup").write_bytes(b"0::/y\n" * 100_000)
    (folder / "environ").write_bytes(b"A=%s\0JOB_NAME=late\0B=%s\0RANK=1\0" % (b"x" * 100_000, b"x" * 300_000))
    told = tree.read(4101)
    assert told is not None
    assert (len(told.command), len(told.cgroup)) == (4096, 16380)
    assert told.environment == {"JOB_NAME": "late"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (b"JOB_NAME=a\0JOB_NAME=b\0", {"JOB_NAME": "a"}),
        (b"JOB_NAME\0RANK=\0", {"RANK": ""}),
        (b"XJOB_NAME=a\0JOB_NAMEX=b\0JOB_NAM=c\0", {}),
        (b"X=1\nJOB_NAME=a\0", {}),
        (b"JOB_NAME=a=b\0", {"JOB_NAME": "a=b"}),
        (b"JOB_NAME=\xff\0", {"JOB_NAME": "\udcff"}),
        (b"JOB_NAME=" + b"x" * 5000, {"JOB_NAME": "x" * 1024}),
        (b"\0\0=\0", {}),
        (b"", {}),
    ],
)
def test_environment(tree: Tree, environ: bytes, expected: dict[str, str]) -> None:
    """As getenv finds it, and bounded."""
    (tree.add(4101) / "environ").write_bytes(environ)
    told = tree.read(4101)
    assert told is not None
    assert told.environment == expected


def test_environment_is_not_even_read_where_nothing_is_wanted(tree: Tree) -> None:
    """No variables, no file."""
    (tree.add(4101) / "environ").unlink()
    told = Processes(tree.root).read(4101)
    assert told is not None
    assert told.missing == ()


def test_g03_mountinfo_is_never_asked(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """It mixes ids of overlays, sandboxes and containers: only the cgroup tells a process's container."""
    folder = tree.add(4101)
    (folder / "cgroup").write_text(f"0::/docker/{CID}\n")
    (folder / "mountinfo").write_text(
        f"1 2 0:3 / / rw - overlay overlay upperdir=/var/lib/docker/overlay2/{CID2}/diff\n"
    )
    with when_read(monkeypatch, "mountinfo", lambda: pytest.fail("read")):
        told = tree.read(4101)
    assert told is not None
    assert parse_cgroup(told.cgroup).container_id == CID
    assert CID2 not in str(told)


# Bad input


@contextmanager
def when_read(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[], object]) -> Iterator[None]:
    """Something happens just before a file is read."""
    read = procfs._read  # noqa: SLF001  the only place where a step can be hit

    def acting(folder: int, file: str, limit: int) -> bytes:
        if file == name:
            act()
        return read(folder, file, limit)

    with monkeypatch.context() as patch:
        patch.setattr(procfs, "_read", acting)
        yield


STEPS = ("stat", "cgroup", "cmdline", "environ")


@pytest.mark.parametrize("step", STEPS)
def test_a_process_that_vanishes_at_each_step(tree: Tree, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """It is gone, and with it what was read by then."""
    folder = tree.add(4101)
    with when_read(monkeypatch, step, lambda: shutil.rmtree(folder)):
        assert tree.read(4101) is None


@pytest.mark.parametrize("step", STEPS)
def test_a_pid_that_is_given_away_at_each_step(tree: Tree, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Nothing of the later process gets in: what is told is the first one, or nothing."""
    tree.add(4101)

    def reuse() -> None:
        tree.end(4101)
        tree.add(4101, b"sshd", start=9999)

    with when_read(monkeypatch, step, reuse):
        told = tree.read(4101)
    assert told is not None
    assert (told.comm, told.start_ticks, told.cgroup) == ("python3", 8765, "0::/x-4101-8765\n")
    later = tree.read(4101)
    assert later is not None
    assert (later.comm, later.cgroup) == ("sshd", "0::/x-4101-9999\n")


@pytest.mark.parametrize("file", ["cgroup", "cmdline", "environ"])
def test_files_that_cannot_be_read(tree: Tree, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """The rest is told, and what is missing is, too."""
    tree.add(4101)

    def deny() -> None:
        raise PermissionError(13, "Permission denied")

    processes = tree.processes()
    with when_read(monkeypatch, file, deny):
        told = processes.refresh([4101])[4101]
    assert told.missing == (f"{file}: permission denied",)
    assert processes.denied == (file == "environ")
    assert processes.refresh([4101])[4101].missing == ()
    assert processes.denied == 0


@pytest.mark.parametrize(
    "stat", [b"", b"garbage", b"4101 (x", b"4101 (x) S 1 2", b"4101 (x) S " + b"x " * 30, b"\xff" * 5000, b")("]
)
def test_stat_that_makes_no_sense(tree: Tree, stat: bytes) -> None:
    """Without a start time there is no telling which process it is."""
    (tree.add(4101) / "stat").write_bytes(stat)
    assert tree.read(4101) is None


def test_status_that_makes_no_sense(tree: Tree) -> None:
    """Then the user is not known."""
    folder = tree.add(4101)
    (folder / "status").write_bytes(b"Uid:\tx\n\xff")
    told = tree.read(4101)
    assert told is not None
    assert (told.uid, told.user) == (-1, "")
    (folder / "status").unlink()
    told = tree.read(4101)
    assert told is not None
    assert told.uid == -1


@pytest.mark.timeout(60)
def test_a_fifo_does_not_block(tree: Tree) -> None:
    """I03: whatever stands in a copy of a /proc."""
    folder = tree.add(4101)
    (folder / "environ").unlink()
    os.mkfifo(folder / "environ")
    told = tree.read(4101)
    assert told is not None
    assert told.environment == {}


def test_folders_that_are_none(tree: Tree) -> None:
    """A file in place of a process, no /proc at all."""
    (tree.root / "4101").write_text("x")
    assert tree.read(4101) is None
    nowhere = Processes(tree.root / "nowhere", VARIABLES)
    assert nowhere.read(4101) is None
    assert nowhere.refresh([4101]) == {}


def test_zombie(tree: Tree) -> None:
    """Its cgroup still tells whose it is."""
    folder = tree.add(4101, state=b"Z")
    for name in ("cmdline", "environ"):
        (folder / name).write_bytes(b"")
    told = tree.read(4101)
    assert told is not None
    assert (told.cgroup, told.command) == ("0::/x-4101-8765\n", "")
    assert told.missing[0].startswith("zombie")


def test_what_a_process_was_outlives_it(tree: Tree) -> None:
    """A zombie that was known when it lived is what it was."""
    folder = tree.add(4101)
    processes = tree.processes()
    alive = processes.refresh([4101])[4101]
    tree.write_stat(4101, start=8765, state=b"Z")
    (folder / "cgroup").write_text("0::/\n")
    assert processes.refresh([4101])[4101] is alive


# Refreshes


def test_the_same_evidence_is_the_same_object(tree: Tree) -> None:
    """So that what was made of it can be kept; what changed is another one, and what is gone is forgotten."""
    tree.add(4101)
    tree.add(4102)
    processes = tree.processes()
    first = processes.refresh([4101, 4102, 4101])
    second = processes.refresh([4101, 4102])
    assert first[4101] is second[4101]
    tree.end(4101)
    tree.add(4101, b"sshd", start=9999)
    third = processes.refresh([4101, 4102])
    assert third[4101].comm == "sshd"
    assert third[4102] is first[4102]
    assert set(processes.refresh([4102])) == {4102}
    assert len(processes) == 1
    tree.end(4102)
    assert processes.refresh([4102]) == {}
    assert len(processes) == 0


def test_i06_short_processes_leave_nothing_behind(tree: Tree) -> None:
    """10,000 of them: nothing of them is kept, and memory stays within 5 MB."""
    for pid in range(1, 101):
        tree.add(pid)
    processes = tree.processes()
    processes.refresh(range(1, 101))
    before = resident_bytes()
    for round_ in range(100):
        for pid in range(1, 101):
            tree.write_stat(pid, start=10_000 + round_)
        assert len(processes.refresh(range(1, 101))) == 100
        assert len(processes) == 100
    assert processes.refresh([]) == {}
    assert len(processes) == 0
    assert resident_bytes() - before < 5 << 20


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_bounded_number(tree: Tree) -> None:
    """More pids than any node has are not looked at."""
    tree.add(4101)
    assert tree.processes().refresh([*range(100_000, 100_000 + MAX_PROCESSES), 4101]) == {}


# Users


def test_users(tree: Tree) -> None:
    """Of the passwd file beside the /proc; a name that cannot be had is the number."""
    etc = tree.root.parent / "etc"
    etc.mkdir()
    (etc / "passwd").write_bytes(
        b"root:x:0:0\n:x:5:5\nbad\nalice:x:1000:1000:::\nb\xff:x:1001:1\nmallory:x:1000:1\nx:x:y:1\n"
    )
    users = Users(tree.root)
    assert [users.name(uid) for uid in (0, 5, 1000, 1001, 7, 65534)] == [
        "root", "5", "alice", "b\N{REPLACEMENT CHARACTER}", "7", "65534"
    ]  # fmt: skip


def test_users_without_a_file(tree: Tree) -> None:
    """No file, or one that is none."""
    assert Users(tree.root).name(0) == "0"
    (tree.root.parent / "etc/passwd").mkdir(parents=True)
    assert Users(tree.root).name(0) == "0"


def test_users_change(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are read again after some minutes."""
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    (tree.root.parent / "etc").mkdir()
    passwd = tree.root.parent / "etc/passwd"
    passwd.write_text("alice:x:1000:1000\n")
    users = Users(tree.root)
    assert users.name(1000) == "alice"
    passwd.write_text("bob:x:1000:1000\n")
    assert users.name(1000) == "alice"
    now[0] += 301
    assert users.name(1000) == "bob"


def test_users_of_this_host() -> None:
    """Whatever the host asks besides the file."""
    assert Users().name(0) == "root"
    assert Users().name(3_999_999_999) == "3999999999"


# Real processes


@contextmanager
def children(number: int, *command: str, **kwargs: object) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Programs that run meanwhile."""
    started = [subprocess.Popen(command or ("sleep", "100"), stdin=subprocess.PIPE, **kwargs) for _ in range(number)]  # type: ignore[call-overload]  # as Popen takes them
    try:
        yield started
    finally:
        for child in started:
            child.kill()
            child.communicate()


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it is so."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def comm_of(pid: int) -> str:
    """Its name now."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_a_real_process() -> None:
    """All of it, by the kernel."""
    with children(1, env={"JOB_NAME": "bert", "SECRET": "s"}) as (child,):
        # The kernel gives a program its name before its arguments.
        wait_for(lambda: Path(f"/proc/{child.pid}/cmdline").read_bytes() == b"sleep\x00100\x00")
        told = Processes(variables=VARIABLES).read(child.pid)
        assert told is not None
        assert (told.comm, told.command, told.environment) == ("sleep", "sleep 100", {"JOB_NAME": "bert"})
        assert (told.uid, told.user) == (os.geteuid(), Users().name(os.geteuid()))
        assert told.cgroup == Path(f"/proc/{child.pid}/cgroup").read_text()
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - told.start_ticks / os.sysconf("SC_CLK_TCK")
        assert 0 <= age_s < 60
    assert Processes().read(child.pid) is None


def test_a_real_zombie() -> None:
    """Until its parent has asked for it."""
    with subprocess.Popen(("true",)) as child:
        wait_for(lambda: Path(f"/proc/{child.pid}/stat").read_text().split()[2] == "Z")
        told = Processes(variables=VARIABLES).read(child.pid)
        assert told is not None
        assert told.comm == "true"
        assert told.cgroup
        assert told.missing[0].startswith("zombie")


@pytest.mark.parametrize("number", [3, 80])
def test_a_warm_refresh_reads_no_file(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Neither of few processes, which are asked for, nor of many, which are listed."""
    reads: list[str] = []
    read = procfs._read  # noqa: SLF001  to count

    def counting(folder: int, name: str, limit: int) -> bytes:
        reads.append(name)
        return read(folder, name, limit)

    monkeypatch.setattr(procfs, "_read", counting)
    with children(number) as started:
        pids = [child.pid for child in started]
        wait_for(lambda: all(comm_of(pid) == "sleep" for pid in pids))
        processes = Processes(variables=VARIABLES)
        first = processes.refresh(pids)
        assert (len(first), len(reads)) == (number, 4 * number)
        second = processes.refresh(pids)
        assert len(reads) == 4 * number
        assert all(second[pid] is first[pid] for pid in pids)
        for child in started[:2]:
            child.kill()
            child.communicate()
        assert set(processes.refresh(pids)) == set(pids[2:])
        assert len(reads) == 4 * number


def test_exec_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that becomes another program is read again within moments, one that stays less and less often."""
    offset = [0.0]
    monotonic = time.monotonic
    with children(1, "sh", "-c", "read x; exec sleep 100") as (child,):
        wait_for(lambda: comm_of(child.pid) == "sh")
        monkeypatch.setattr("time.monotonic", lambda: monotonic() + offset[0])
        processes = Processes(variables=VARIABLES)
        assert processes.refresh([child.pid])[child.pid].comm == "sh"
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.flush()
        wait_for(lambda: comm_of(child.pid) == "sleep")
        offset[0] += 1.5
        told = processes.refresh([child.pid])[child.pid]
        assert told.comm == "sleep"
        offset[0] += 2.5
        assert processes.refresh([child.pid])[child.pid] is told


NOBODY = 65534


def read_as_nobody(pid: int) -> str:
    """What another user is told of a process."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            processes = Processes(variables=VARIABLES)
            told = processes.refresh([pid])[pid]
            os.write(theirs, f"{told.comm} {told.uid} {told.environment} {told.missing} {processes.denied}".encode())
        finally:
            os._exit(0)
    os.close(theirs)
    os.waitpid(child, 0)
    with os.fdopen(ours) as answer:
        return answer.read()


@AS_ROOT
def test_other_users_environments() -> None:
    """A non-root exporter reads its own user's alone, and says so; the rest it does read."""
    environment = {"JOB_NAME": "bert"}
    with children(1, env=environment) as (mine,), children(1, env=environment, user=NOBODY, group=NOBODY) as (theirs,):
        wait_for(lambda: comm_of(mine.pid) == comm_of(theirs.pid) == "sleep")
        assert read_as_nobody(mine.pid) == "sleep 0 {} ('environ: permission denied',) 1"
        assert read_as_nobody(theirs.pid) == f"sleep {NOBODY} {environment} () 0"


@AS_ROOT
def test_the_user_of_a_process_that_hides() -> None:
    """One that gave up its rights, and may not be traced, is still its user's."""
    code = (
        "import os,sys; os.setgid(65534); os.setuid(65534); sys.stdout.write('x'); sys.stdout.flush(); sys.stdin.read()"
    )
    with children(1, sys.executable, "-c", code, stdout=subprocess.PIPE) as (child,):
        assert child.stdout is not None
        child.stdout.read(1)
        assert Path(f"/proc/{child.pid}/environ").stat().st_uid == 0
        told = Processes().read(child.pid)
        assert told is not None
        assert told.uid == NOBODY


@pytest.mark.parametrize("threads", [4])
def test_churn(threads: int) -> None:
    """Processes that come and go all the time: nothing raises, and nothing is told of what is not there."""
    stop = threading.Event()

    def spawn() -> None:
        while not stop.is_set():
            subprocess.run(("true",), check=False)

    workers = [threading.Thread(target=spawn) for _ in range(threads)]
    for worker in workers:
        worker.start()
    processes = Processes(variables=VARIABLES)
    try:
        for _ in range(60):
            pids = _all_pids()
            for pid, told in processes.refresh(pids).items():
                assert told.pid == pid
                assert told.cgroup
    finally:
        stop.set()
        for worker in workers:
            worker.join()
    assert processes.refresh([]) == {}


def _all_pids() -> Sequence[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]  # noqa: PTH208  names are enough
