"""Which profilers run: in a made-up /proc, and with real processes that have a profiler's name."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gpu_hpc_exporter.config import PmSampling
from gpu_hpc_exporter.model import NS
from gpu_hpc_exporter.sources import profilers
from gpu_hpc_exporter.sources.profilers import ProfilerWatch

NAMES = ("ncu", "nv-nsight-cu-cli", "dcgmproftester*")
REAL = f"ncu{os.getpid()}"
"""What real processes are called here: exporters of tests that run beside these give way to real profilers."""


class Proc:
    """A made-up /proc, and the clock that goes with it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.reads: list[str] = []
        self._now_s = 1000.0
        monkeypatch.setattr("time.monotonic_ns", lambda: round(self._now_s * 1e9))
        self.last(100)
        self.run(1, "systemd")

    def last(self, pid: int) -> None:
        """The pid allocated last."""
        (self.root / "loadavg").write_text(f"0.10 0.20 0.30 2/345 {pid}\n")

    def run(self, pid: int, name: str, state: str = "S", *, thread_of: int = 0) -> None:
        """A process, or a thread of one."""
        folder = self.root / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "comm").write_text(name + "\n")
        (folder / "stat").write_text(f"{pid} ({name}) {state} 1 {pid} 0\n")
        (folder / "status").write_text(f"Name:\t{name}\nState:\t{state}\nTgid:\t{thread_of or pid}\nPid:\t{pid}\n")

    def end(self, pid: int) -> None:
        """It is gone."""
        shutil.rmtree(self.root / str(pid))

    def later(self, seconds: float) -> None:
        """Time passes."""
        self._now_s += seconds

    def watch(self, *names: str) -> ProfilerWatch:
        """A watch that notes what it reads."""
        return _Noted(names or NAMES, self)


class _Noted(ProfilerWatch):
    def __init__(self, names: Sequence[str], proc: Proc) -> None:
        super().__init__(names, proc.root)
        self._reads = proc.reads

    def _read(self, name: str) -> str:
        self._reads.append(name)
        return super()._read(name)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    """A made-up /proc in which pid 1 runs."""
    return Proc(tmp_path, monkeypatch)


def test_a_profiler_that_runs_already(proc: Proc) -> None:
    """The first poll looks at every process."""
    proc.run(47, "ncu")
    assert proc.watch().poll() == "ncu (pid 47)"


def test_a_profiler_that_starts_and_ends(proc: Proc) -> None:
    """It is found by its new pid and forgotten when it is gone."""
    watch = proc.watch()
    assert watch.poll() == ""
    proc.run(101, "bash")
    proc.run(102, "ncu")
    proc.last(103)
    assert watch.poll() == "ncu (pid 102)"
    assert watch.poll() == "ncu (pid 102)"
    proc.end(102)
    assert watch.poll() == ""


def test_a_quiet_host_costs_one_read(proc: Proc) -> None:
    """Without new pids no process is looked at, once the young ones are older."""
    watch = proc.watch()
    proc.run(101, "bash")
    watch.poll()
    proc.last(101)
    for _ in range(40):
        proc.later(0.1)
        watch.poll()
    proc.reads.clear()
    for _ in range(20):
        proc.later(0.1)
        watch.poll()
    assert proc.reads == []


def test_a_fork_is_looked_at_again(proc: Proc) -> None:
    """A process has its parent's name until it calls exec; it is not looked at at every poll, nor for ever."""
    watch = proc.watch()
    watch.poll()
    proc.run(101, "bash")
    proc.last(101)
    for _ in range(25):
        assert watch.poll() == ""
        proc.later(0.1)
    assert proc.reads.count("101/comm") <= 7
    proc.run(101, "ncu")
    for _ in range(20):
        watch.poll()
        proc.later(0.1)
    assert watch.poll() == "ncu (pid 101)"


def test_a_pid_before_its_process(proc: Proc) -> None:
    """The kernel counts a pid before the process can be seen; an ended one is soon left alone."""
    watch = proc.watch()
    watch.poll()
    proc.last(102)
    assert watch.poll() == ""
    proc.run(101, "ncu")
    proc.later(0.1)
    assert watch.poll() == "ncu (pid 101)"
    for _ in range(30):
        proc.later(0.1)
        watch.poll()
    assert proc.reads.count("102/comm") == 2


def test_another_namespaces_proc(proc: Proc) -> None:
    """The host's /proc in a container: loadavg tells of the container's pids, so the host's are listed."""
    (proc.root / "self").symlink_to("47")
    proc.run(47, "python3")
    watch = proc.watch()
    assert watch.poll() == ""
    proc.reads.clear()
    proc.run(31, "ncu")  # below the others: the host's pids have begun anew
    assert watch.poll() == "ncu (pid 31)"
    assert "47/comm" not in proc.reads
    proc.end(31)
    assert watch.poll() == ""


@pytest.mark.parametrize(("first", "last"), [(100, 140), (100, 5000), (32000, 310), (32000, 20)])
def test_many_new_pids_and_a_wrap(proc: Proc, first: int, last: int) -> None:
    """Where the range is long or begins anew, what lives in it is looked at, and nothing else."""
    proc.last(first)
    proc.run(15, "old")
    watch = proc.watch()
    watch.poll()
    proc.reads.clear()
    proc.run(last - 3, "ncu")
    proc.last(last)
    assert watch.poll() == f"ncu (pid {last - 3})"
    assert len(proc.reads) <= 6


@pytest.mark.parametrize("state", ["Z", "X"])
def test_a_zombie_does_not_profile(proc: Proc, state: str) -> None:
    """A profiler whose parent does not ask for its end keeps its name, and nothing else."""
    proc.run(47, "ncu", state)
    watch = proc.watch()
    assert watch.poll() == ""
    proc.run(48, "ncu")
    proc.last(148)
    proc.later(200)
    assert watch.poll() == "ncu (pid 48)"
    proc.run(48, "ncu", state)
    assert watch.poll() == ""


def test_a_pid_that_is_used_again(proc: Proc) -> None:
    """The same pid with another name is another process."""
    proc.run(47, "ncu")
    watch = proc.watch()
    watch.poll()
    proc.run(47, "ncu) S (bash")
    assert watch.poll() == ""


def test_a_thread_stands_for_its_process(proc: Proc) -> None:
    """An old process that became a profiler is found by a thread's pid, named by its own, and outlives the thread."""
    watch = proc.watch()
    watch.poll()
    proc.run(50, "ncu")
    proc.run(101, "ncu", thread_of=50)
    proc.last(101)
    assert watch.poll() == "ncu (pid 50)"
    proc.end(101)
    assert watch.poll() == "ncu (pid 50)"


def test_a_thread_with_a_profilers_name(proc: Proc) -> None:
    """A thread of an ordinary process may be called what it likes."""
    watch = proc.watch()
    watch.poll()
    proc.run(50, "python3")
    proc.run(101, "ncu", thread_of=50)
    proc.last(101)
    assert watch.poll() == ""


def test_an_old_process_that_calls_exec(proc: Proc) -> None:
    """A shell that turns into a profiler after a long sleep makes no new pid: the regular listing finds it."""
    proc.run(50, "bash")
    watch = proc.watch()
    watch.poll()
    proc.later(5)
    proc.run(50, "ncu")
    assert watch.poll() == ""
    proc.later(6)
    assert watch.poll() == "ncu (pid 50)"


def test_the_one_told_stays_while_it_lives(proc: Proc) -> None:
    """A second profiler does not change the reason that people see."""
    proc.run(50, "ncu")
    watch = proc.watch()
    assert watch.poll() == "ncu (pid 50)"
    proc.run(101, "dcgmproftester1")
    proc.last(101)
    assert watch.poll() == "ncu (pid 50)"
    proc.end(50)
    assert watch.poll() == "dcgmproftester1 (pid 101)"


@pytest.mark.parametrize(
    ("name", "comm", "found"),
    [
        ("ncu", "ncu", True),
        ("ncu", "ncu-ui", False),
        ("ncu", "NCU", False),
        ("ncu", "xncu", False),
        ("n.u", "ncu", False),
        ("/usr/local/cuda/bin/ncu", "ncu", True),
        ("nv-nsight-cu-cli", "nv-nsight-cu-cl", True),
        ("dcgmproftester*", "dcgmproftester1", True),
        ("a-program-with-a-long-name-*", "a-program-with-", True),
        ("n?u", "ncu", True),
        ("*", "anything", True),
        ("", "", True),
    ],
)
def test_names(proc: Proc, name: str, comm: str, *, found: bool) -> None:
    """Whole names, as the kernel cuts them, with wildcards."""
    proc.end(1)
    proc.run(50, comm)
    assert bool(proc.watch(name).poll()) == found


def test_no_names_at_all(proc: Proc) -> None:
    """An empty list yields to nobody."""
    proc.run(50, "ncu")
    assert ProfilerWatch((), proc.root).poll() == ""


def test_a_name_is_untrusted(proc: Proc) -> None:
    """A process chooses its name: what is shown is short and printable."""
    proc.end(1)
    (proc.root / "50").mkdir()
    for file, content in (
        ("comm", b"ncu\x1b[2J\n\xff\xe2\x80\xae\n"),
        ("stat", b"50 (ncu\x1b[2J\n\xff\xe2\x80\xae) S 1\n"),
    ):
        (proc.root / "50" / file).write_bytes(content)
    (proc.root / "50" / "status").write_bytes(b"Tgid:\t50\n")
    text = proc.watch("ncu*").poll()
    assert text == r"ncu\x1b[2J\n\udcff\u202e (pid 50)"
    assert text.isascii()
    assert text.isprintable()


@pytest.mark.parametrize("trouble", ["no /proc", "no loadavg", "a strange loadavg", "hidepid"])
def test_an_unreadable_proc_is_told_once(proc: Proc, caplog: pytest.LogCaptureFixture, trouble: str) -> None:
    """Nothing is raised, one line says what that means, and what can be seen still is."""
    caplog.set_level(logging.INFO)
    proc.run(50, "ncu")
    if trouble == "no /proc":
        shutil.rmtree(proc.root)
    elif trouble == "no loadavg":
        (proc.root / "loadavg").unlink()
    elif trouble == "a strange loadavg":
        (proc.root / "loadavg").write_text("unknown\n")
    else:
        proc.end(1)
    watch = proc.watch()
    for _ in range(5):
        assert watch.poll() == ("" if trouble == "no /proc" else "ncu (pid 50)")
        assert watch.hosts_dcgm() == ""
        proc.later(5)
    assert len(caplog.records) == 1
    assert "cannot be read" in caplog.text


def test_dcgm(proc: Proc) -> None:
    """DCGM is no profiler to yield to, and is told apart."""
    proc.run(50, "nv-hostengine")
    watch = proc.watch()
    assert watch.hosts_dcgm() == ""
    assert watch.poll() == ""
    assert watch.hosts_dcgm() == "nv-hostengine (pid 50)"
    proc.end(50)
    assert watch.hosts_dcgm() == ""
    proc.run(101, "dcgm-exporter")
    proc.last(101)
    watch.poll()
    assert watch.hosts_dcgm() == "dcgm-exporter (pid 101)"


@pytest.fixture
def no_listing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes are listed at first and not again: what is found later is found in another way."""
    monkeypatch.setattr(profilers, "_MIN_LIST_PERIOD_NS", 3600 * NS)
    monkeypatch.setattr(profilers, "_MAX_LIST_PERIOD_NS", 3600 * NS)


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll as the exporter does until the condition holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def copy_of_sleep(folder: Path, name: str) -> str:
    """The program `sleep` under another name."""
    return shutil.copy(shutil.which("sleep") or "", str(folder / name))


@pytest.mark.parametrize("name", ["ncu", "nsys", "nv-nsight-cu-cli", "dcgmproftester12"])
def test_names_by_default(proc: Proc, name: str) -> None:
    """The profilers that hold the counters, by the names that the kernel keeps of them."""
    proc.run(50, name[:15])
    assert ProfilerWatch(PmSampling().yield_to, proc.root).poll() == f"{name[:15]} (pid 50)"


@pytest.mark.usefixtures("no_listing")
@pytest.mark.parametrize("name", [REAL, f"{REAL}-with-a-long-name"], ids=["short", "long"])
def test_a_real_process(tmp_path: Path, name: str) -> None:
    """The real /proc: found within a few polls, gone when it has ended, as a zombie too."""
    program = copy_of_sleep(tmp_path, name)
    watch = ProfilerWatch((name,))
    assert watch.poll() == ""
    with subprocess.Popen(["sleep", "600"], executable=program) as process:
        wait_for(lambda: watch.poll() == f"{name[:15]} (pid {process.pid})")
        process.kill()
        wait_for(lambda: watch.poll() == "")  # nobody has asked for its end yet


@pytest.mark.usefixtures("no_listing")
def test_a_real_wrapper_that_thinks_first(tmp_path: Path) -> None:
    """A shell script that starts the program of its own name, as NVIDIA's ncu does, after a while."""
    program = copy_of_sleep(tmp_path, REAL)
    script = tmp_path / "bin" / REAL
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nsleep 0.3\nexec "{program}" 600\n')
    script.chmod(0o755)
    watch = ProfilerWatch((REAL,))
    watch.poll()
    with subprocess.Popen([str(script)]) as process:
        expected = f"{REAL} (pid {process.pid})"
        wait_for(lambda: watch.poll() == expected)
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            assert watch.poll() == expected
            time.sleep(0.02)
        process.kill()


@pytest.mark.usefixtures("no_listing")
def test_a_real_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old process that turns into a profiler is found by a thread that it starts, without the regular listing.

    One of several: where more than 32 pids are new, as beside other tests, threads are not looked at.
    """
    for bound in ("_MIN_LIST_PERIOD_NS", "_MAX_LIST_PERIOD_NS"):
        monkeypatch.setattr(f"gpu_hpc_exporter.sources.profilers.{bound}", 600 * 10**9)
    python = tmp_path / REAL
    python.symlink_to(sys.executable)
    start = "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()"
    script = f"import sys, threading, time\nfor _ in sys.stdin: {start}"
    with subprocess.Popen(["sh", "-c", f"read line; exec {python} -c '{script}'"], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        watch = ProfilerWatch((REAL,))
        began = time.monotonic()
        watch.poll()
        while time.monotonic() - began < 4:  # until it is young no more
            assert watch.poll() == ""
            time.sleep(0.1)

        def is_found() -> bool:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()
            return watch.poll() == f"{REAL} (pid {process.pid})"

        wait_for(is_found)
        process.kill()


def test_a_poll_is_cheap() -> None:
    """Back to back a poll that finds nothing new takes some microseconds; the bound leaves room for slow machines."""
    watch = ProfilerWatch(PmSampling().yield_to)
    watch.poll()
    costs = []
    for _ in range(300):
        began = time.thread_time_ns()
        watch.poll()
        costs.append(time.thread_time_ns() - began)
    assert sorted(costs)[len(costs) // 2] < 100_000
