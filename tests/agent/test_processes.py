"""Identity, fork, exec, exit, death."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

import fake_activity
from fake_activity.agent import Start
from fake_activity.agent_file import Header, State, is_locked, read, wait_for


def test_who_it_is(start: Start) -> None:
    """Name, mode, owner, lock, identity and the environment's snapshot."""
    os.environ["RANK"], os.environ["SECRET_TOKEN"] = "3", "hush"
    try:
        agent = start()
    finally:
        del os.environ["RANK"], os.environ["SECRET_TOKEN"]
    agent.begin()
    now = agent.wait(lambda _: True)
    header, path = now.header, agent.path
    ticks = int(Path(f"/proc/{agent.pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    assert path.name.startswith(f"{agent.pid}-{ticks}-")
    assert path.suffix == ".shm"
    assert (header.pid, header.start_ticks, header.uid) == (agent.pid, ticks, os.getuid())
    assert (header.magic, header.version, header.file_size) == (b"GPUHPCAG", 1, path.stat().st_size)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.stat().st_blocks * 512 >= header.file_size  # reserved: no SIGBUS on a full disk
    assert now.environment["RANK"] == "3"
    assert "SECRET_TOKEN" not in now.environment
    assert is_locked(path)


def test_a_strict_umask_does_not_shut_the_exporter_out(start: Start) -> None:
    """The group reads."""
    before = os.umask(0o077)
    try:
        agent = start()
    finally:
        os.umask(before)
    agent.begin()
    assert stat.S_IMODE(agent.find().stat().st_mode) == 0o640


def test_the_heart_beats(start: Start) -> None:
    """Once a second, whatever the state."""
    agent = start(MODE="off")
    began_ns = time.time_ns()
    agent.begin()
    first = agent.wait(lambda now: now.header.state == State.OFF).header.heartbeat_ns
    second = agent.wait(lambda now: now.header.heartbeat_ns > first).header.heartbeat_ns
    assert began_ns <= first < second <= time.time_ns()


@pytest.mark.parametrize("mode", ["duty", "continuous"])
def test_exit_while_tracing(start: Start, mode: str) -> None:
    """K06: no call of CUPTI after the exit began (the fake aborts), no delay, the status is the program's."""
    agent = start(MODE=mode)
    agent.trace()
    agent.do("kernel a count=1000")
    assert agent.end(7) == 7
    assert agent.said() == ""
    now = read(agent.path)
    assert now.header.magic == b"GPUHPCAG"
    assert not is_locked(agent.path)


def test_exit_while_a_call_hangs(start: Start) -> None:
    """The exit waits for it 100 ms, not for ever."""
    agent = start(MODE="continuous")
    agent.trace()
    flushes = agent.calls().get("cuptiActivityFlushAll", 0)
    agent.do("slow cuptiActivityFlushAll ms=600000")
    fake_activity.until(lambda: agent.calls()["cuptiActivityFlushAll"] > flushes)
    assert agent.end() == 0


def test_exit_while_a_window_opens(start: Start) -> None:
    """K06: in the middle of the call that enables kernels: no other begins (the fake aborts)."""
    agent = start()
    agent.begin("slow cuptiActivityEnable ms=100")
    fake_activity.until(lambda: 10 in agent.kinds())
    assert agent.end() == 0
    assert agent.said() == ""


def test_sigkill(start: Start) -> None:
    """What was published stays, and can be read; the lock is free."""
    agent = start(MODE="continuous")
    agent.trace()
    agent.do("kernel a count=1000")
    agent.wait(lambda now: "a" in now.kernels())
    agent.process.send_signal(signal.SIGKILL)
    assert agent.process.wait(60) == -signal.SIGKILL
    now = read(agent.path)
    assert now.kernels()["a"].executions == 1000
    assert not is_locked(agent.path)


@pytest.mark.parametrize("ending", ["", "exit=1"])
def test_a_fork_in_the_middle(start: Start, ending: str) -> None:
    """E06: the child launches (as data loaders do by mistake) and ends either way; the parent's trace is unharmed."""
    agent = start(MODE="continuous")
    agent.trace()
    agent.do("kernel a count=100")
    for _ in range(5):
        assert agent.do(f"fork count=50 {ending}") == "status=0"
    agent.do("kernel a count=100")
    now = agent.wait(lambda now: "a" in now.kernels() and now.kernels()["a"].executions == 200)
    assert now.kernels().keys() == {"a"}
    assert len(list(agent.directory.iterdir())) == 1
    assert agent.end() == 0


def test_a_child_does_not_hold_the_file(start: Start) -> None:
    """E06: data loaders outlive a killed parent: neither the lock nor the mapping may stay with them."""
    agent = start(MODE="continuous")
    agent.trace()
    child = int(agent.do("fork wait=1"))
    try:
        assert agent.path.name not in Path(f"/proc/{child}/maps").read_text()
        assert is_locked(agent.path)
        agent.process.kill()
        agent.process.wait()
        fake_activity.until(lambda: not is_locked(agent.path))
    finally:
        os.kill(child, signal.SIGKILL)


def test_exec(start: Start) -> None:
    """The new program has a file of its own; the old one is free."""
    agent = start(MODE="continuous")
    agent.trace()
    agent.do("kernel a")
    agent.wait(lambda now: "a" in now.kernels())
    old = agent.path
    agent.send("exec")
    assert agent.hear().endswith(f"ready {agent.pid}")
    assert not is_locked(old)
    old = old.rename(old.with_suffix(".old"))
    agent.trace()
    assert is_locked(agent.find())
    assert not is_locked(old)


def test_a_program_that_closes_every_descriptor(start: Start) -> None:
    """Ours is one of them; nobody writes into what has its number now."""
    agent = start(MODE="continuous")
    agent.trace()
    assert "-1" not in agent.do("close_all").split()
    agent.do("kernel a count=10")
    agent.wait(lambda now: "a" in now.kernels())
    assert agent.do("fork count=1") == "status=0"
    assert agent.end() == 0


def test_nobody_reads(start: Start) -> None:
    """K07: without an exporter nothing waits; and whoever removes the file does no harm."""
    agent = start(MODE="continuous")
    agent.trace()
    agent.path.unlink()
    agent.do("kernel a count=1000", "kernel b count=1000 threads=4")
    assert agent.end() == 0


@pytest.mark.parametrize("version", [28, 130001])
def test_k07_an_exporter_that_comes_late_finds_all(start: Start, version: int) -> None:
    """K07: a million records that nobody reads meanwhile are in the file's sums or among the dropped, one by one."""
    agent = start(MODE="continuous", FLUSH_SECONDS="0.01")
    agent.trace(f"version {version}")
    agent.do("set count=1000000", "entry gpu_hpc_agent_stop")
    header = agent.wait(lambda now: now.state[0] == State.PAUSED).header
    assert header.records_kept + header.records_dropped == 1_000_000
    assert header.records_kept > 0
    assert agent.wait(lambda _: True).device().sets == header.records_kept
    assert header.records_invalid == header.records_unmatched == 0
    assert agent.end() == 0


def test_an_unfinished_file_has_another_name(start: Start) -> None:
    """Only whole ones end in .shm: as soon as it is there, it can be read."""
    agent = start()
    agent.send(f"load {agent.programs.cupti}")
    agent.hear()
    agent.send("init")
    fake_activity.until(lambda: any(agent.directory.glob("*.shm")))
    path = next(agent.directory.glob("*.shm"))
    assert wait_for(path, lambda _: True).header.file_size == path.stat().st_size


def test_what_is_read_is_never_torn(start: Start) -> None:
    """Sums of one window appear together: a publication of 4,000 kernels takes longer than a read."""
    agent = start(MODE="continuous", WINDOW_SECONDS="0.002", FLUSH_SECONDS="0.001")
    agent.trace()
    agent.send("kernel a count=400000 distinct=4000 call=0")
    seen: set[int] = set()
    while len(seen) < 60:
        now = read(agent.path)
        seen.add(now.header.windows_published)
        slots = now.slots()
        assert sum(kernel.executions for kernel in slots) == now.header.records_kept
        assert all(sum(kernel.buckets) == kernel.executions for kernel in slots)
        assert all(kernel.ns == 1000 * kernel.executions for kernel in slots)
    assert agent.hear() == "ok"


def test_no_signal_lands_on_the_agent_s_thread(start: Start) -> None:
    """It blocks all that can be blocked; handlers of the program's run on the program's threads."""
    agent = start()
    agent.trace()
    tasks = [task for task in Path(f"/proc/{agent.pid}/task").iterdir() if task.name != str(agent.pid)]
    assert [(task / "comm").read_text().strip() for task in tasks] == ["gpu-hpc-agent"]
    status = dict(line.split(":", 1) for line in (tasks[0] / "status").read_text().splitlines())
    blocked = int(status["SigBlk"], 16)
    assert all(blocked & 1 << (number - 1) for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP))


def test_a_fork_while_the_file_is_made(start: Start) -> None:
    """Reserving its blocks may take long: the child must not hold the lock then either."""
    agent = start()
    agent.do("slow posix_fallocate ms=1000", f"load {agent.programs.cupti}", "init")
    fake_activity.until(lambda: agent.calls().get("posix_fallocate", 0) > 0)
    child = int(agent.do("fork wait=1"))
    try:
        path = agent.find()
        assert is_locked(path)
        assert path.name not in Path(f"/proc/{child}/maps").read_text()
        agent.process.kill()
        agent.process.wait()
        fake_activity.until(lambda: not is_locked(path))
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_while_kinds_are_enabled(start: Start) -> None:
    """Inside cuInit, by another thread: the child must not hold the file."""
    agent = start()
    agent.do(f"load {agent.programs.cupti}", "slow cuptiActivityEnable ms=100")
    child = int(agent.do("init fork=1").split()[0])
    try:
        path = agent.find()
        agent.process.kill()
        agent.process.wait()
        fake_activity.until(lambda: not is_locked(path), 5)
    finally:
        os.kill(child, signal.SIGKILL)


def test_signals_while_the_file_is_made(start: Start) -> None:
    """It is made on the program's thread."""
    agent = start()
    agent.begin("alarms")
    agent.find(5)
    assert agent.said() == ""


def test_a_program_with_more_rights_than_its_user(start: Start) -> None:
    """Setuid: the environment is not to be trusted, and nothing at all is done."""
    agent = start()
    agent.do(f"load {agent.programs.cupti}", "secure", "init", "context 0", "entry gpu_hpc_agent_start")
    agent.do("kernel a count=10")
    assert len(list(Path(f"/proc/{agent.pid}/task").iterdir())) == 1
    assert list(agent.directory.iterdir()) == []
    assert agent.end() == 0
    assert agent.said() == ""


def test_a_program_without_standard_descriptors(programs: fake_activity.Programs, tmp_path: Path) -> None:
    """What it writes to stderr all the same does not land in our file."""
    directory = tmp_path / "agents"
    directory.mkdir()
    env = {**os.environ, "CUDA_INJECTION64_PATH": str(programs.agent), "GPU_HPC_AGENT_DIRECTORY": str(directory)}
    command = ["sh", "-c", 'exec "$0" 2>&-', str(programs.host)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True) as process:
        assert process.stdin
        process.stdin.write("init\n")
        process.stdin.flush()
        fake_activity.until(lambda: any(directory.glob("*.shm")))
        path = next(directory.glob("*.shm"))
        wait_for(path, lambda now: now.header.magic == b"GPUHPCAG")
        files = {int(fd.name): fd.readlink() for fd in Path(f"/proc/{process.pid}/fd").iterdir()}
        assert [fd > 2 for fd, target in files.items() if target == path] == [True]
        process.stdin.write("exit 0\n")
        process.stdin.flush()
        assert process.wait(60) == 0


def test_a_changed_file_leads_nowhere(start: Start) -> None:
    """Others of the same user may write it: what it says is never used as a place."""
    agent = start(MODE="continuous")
    agent.trace()
    agent.do("kernel a")
    agent.wait(lambda now: "a" in now.kernels())
    with agent.path.open("r+b") as file:
        for name in ("strings_used", "kernels", "intervals_total", "windows_published"):
            os.pwrite(file.fileno(), b"\xfe" * 4, getattr(Header, name).offset)
    agent.do("kernel b count=10 distinct=10")
    agent.wait(lambda now: "b_9" in now.kernels())
    agent.do("entry gpu_hpc_agent_stop", "entry gpu_hpc_agent_start")
    assert agent.end() == 0


def test_without_memory(start: Start) -> None:
    """RLIMIT_AS: sums without unions, and the program keeps what is left."""
    agent = start(WINDOW_SECONDS="0.4", PERIOD_SECONDS="0.8")
    agent.trace()
    size = int(Path(f"/proc/{agent.pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")
    resource.prlimit(agent.pid, resource.RLIMIT_AS, (size + (32 << 20), resource.RLIM_INFINITY))
    agent.do("kernel a count=1000")
    now = agent.wait(lambda now: "a" in now.kernels())
    assert now.device().windows_without_union >= 1
    assert now.device().busy_ns == 0
    assert now.kernels()["a"].executions == 1000
    assert agent.end() == 0
