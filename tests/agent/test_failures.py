"""Whatever fails, the program runs on, and the file says why it is not traced."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import fake_activity
from fake_activity.agent import FOR_LIFE, Agent, Start
from fake_activity.agent_file import Reason, State


def assert_runs_on(agent: Agent) -> None:
    """The program still works; at most one line was said."""
    agent.do("kernel a count=100", "copy h2d count=3")
    assert agent.said().count("\n") <= 1
    assert agent.end() == 0


def test_no_cupti(start: Start) -> None:
    """None is loaded, none lies beside a CUDA runtime, and this machine has none of that driver's version."""
    agent = start()
    agent.do("driver 98000", "init", "context 0")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert now.state == (State.OFF, Reason.NO_CUPTI)
    fake_activity.until(lambda: agent.said() != "")
    assert agent.said() == "gpu-hpc-agent: no libcupti found that can be loaded; this process runs on without\n"
    assert_runs_on(agent)


def test_cupti_beside_the_runtime(start: Start, tmp_path: Path) -> None:
    """As in NVIDIA's wheels of CUDA 12 when nobody has loaded it."""
    agent = start()
    lib = tmp_path / "site-packages/nvidia/cuda_runtime/lib"
    lib.mkdir(parents=True)
    fake_activity.compile_c(lib / "libcudart.so.12", "-xc", "-shared", "-fPIC", os.devnull)
    cupti = tmp_path / "site-packages/nvidia/cuda_cupti/lib/libcupti.so.12"
    cupti.parent.mkdir(parents=True)
    shutil.copy(agent.programs.cupti.parent / "libfake_activity.so", cupti.parent)
    fake_activity.build_cupti(cupti, agent.programs.cupti.parent / "libfake_activity.so")
    assert agent.do(f"load {lib / 'libcudart.so.12'}", "version 28", "init") == "0"
    agent.do("context 0")
    now = agent.wait(lambda now: now.header.state == State.TRACING)
    assert now.header.cupti_version == 28


def test_cupti_of_the_machine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the loader finds it, for programs that have the runtime inside."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(start().programs.cupti.parent))
    agent = start()
    agent.do("init", "context 0")
    agent.wait(lambda now: now.header.state == State.TRACING)


def test_cupti_of_the_toolkit(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CUDA_HOME says, of the driver's major version."""
    cupti = tmp_path / "cuda/extras/CUPTI/lib64/libcupti.so.13"
    cupti.parent.mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    agent = start()
    shutil.copy(agent.programs.cupti.parent / "libfake_activity.so", cupti.parent)
    fake_activity.build_cupti(cupti, agent.programs.cupti.parent / "libfake_activity.so")
    agent.do("init", "context 0")
    agent.wait(lambda now: now.header.state == State.TRACING)


@pytest.mark.parametrize("content", [b"", b"no library", b"\x7fELF\x02\x01\x01"])
def test_a_file_that_is_no_library(start: Start, tmp_path: Path, content: bytes) -> None:
    """Beside the runtime lies something of that name."""
    agent = start()
    fake_activity.compile_c(tmp_path / "libcudart.so.98", "-xc", "-shared", "-fPIC", os.devnull)
    (tmp_path / "libcupti.so.98").write_bytes(content)
    agent.do(f"load {tmp_path / 'libcudart.so.98'}", "driver 98000", "init", "context 0")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert now.state == (State.OFF, Reason.NO_CUPTI)
    assert_runs_on(agent)


NEEDED = [
    *("cuptiGetVersion", "cuptiSubscribe", "cuptiUnsubscribe", "cuptiActivityRegisterCallbacks"),
    *("cuptiActivityEnable", "cuptiActivityDisable", "cuptiActivityFlushAll", "cuptiActivityGetNextRecord"),
]
OPTIONAL = [
    *("cuptiActivityGetNumDroppedRecords", "cuptiActivitySetAttribute", "cuptiGetTimestamp"),
    *("cuptiActivityEnableRuntimeApi", "cuptiActivityEnableDriverApi"),
]


@pytest.mark.parametrize("name", NEEDED)
def test_a_needed_function_is_missing(start: Start, tmp_path: Path, name: str) -> None:
    """It is not used at all."""
    agent = start()
    cupti = tmp_path / "libcupti.so.13"
    fake_activity.build_cupti(cupti, agent.programs.cupti.parent / "libfake_activity.so", missing=[name])
    agent.do(f"load {cupti}", "init", "context 0")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert now.state == (State.OFF, Reason.MISSING_FUNCTION)
    assert_runs_on(agent)


def test_optional_functions_are_missing(start: Start, tmp_path: Path) -> None:
    """It traces without them."""
    agent = start(MODE="continuous")
    cupti = tmp_path / "libcupti.so.13"
    fake_activity.build_cupti(cupti, agent.programs.cupti.parent / "libfake_activity.so", missing=OPTIONAL)
    agent.do(f"load {cupti}", "version 28", "init", "context 0")
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel a count=9")
    now = agent.wait(lambda now: "a" in now.kernels())
    assert not now.header.flags & 1
    assert_runs_on(agent)


@pytest.mark.parametrize("version", [0, 17, 29, 99, 120000, 130500, 140000])
def test_a_version_that_nobody_tried(start: Start, version: int) -> None:
    """It is not touched, unless forced."""
    agent = start()
    agent.begin(f"version {version}")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert now.state == (State.OFF, Reason.UNKNOWN_VERSION)
    assert now.header.cupti_version == version
    assert agent.calls()["cuptiGetVersion"] == 1
    assert not {"cuptiSubscribe", "cuptiActivityEnable"} & agent.calls().keys()
    assert_runs_on(agent)


def test_an_unknown_version_can_be_forced(start: Start) -> None:
    """At the user's risk."""
    agent = start(ANY_VERSION="1")
    agent.begin("version 140000")
    agent.wait(lambda now: now.header.state == State.TRACING)


FATAL = [
    *((name, 0) for name in NEEDED if name != "cuptiActivityGetNextRecord"),
    *(("cuptiActivityEnableRuntimeApi", after) for after in (0, 9)),
    *(("cuptiActivityEnable", after) for after in (2, 3)),
    *((name, 3) for name in ("cuptiActivityDisable", "cuptiSubscribe", "cuptiUnsubscribe")),
]
"""With how many calls that succeed: in cuInit, and in windows."""


@pytest.mark.parametrize(("name", "after"), FATAL)
@pytest.mark.parametrize("mode", ["duty", "continuous"])
def test_a_failing_call_ends_it(start: Start, name: str, after: int, mode: str) -> None:
    """From the first or a later call on; kernels are disabled again."""
    agent = start(MODE=mode)
    agent.begin(f"fault {name} code=999 after={after}")
    if mode == "continuous" and name == "cuptiActivityDisable":  # which each stop calls once
        for _ in range(after):
            agent.wait(lambda now: now.header.state == State.TRACING)
            agent.do("entry gpu_hpc_agent_stop")
            agent.wait(lambda now: now.header.state == State.PAUSED)
            agent.do("entry gpu_hpc_agent_start")
        agent.wait(lambda now: now.header.state == State.TRACING)
        agent.do("entry gpu_hpc_agent_stop")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert now.state == (State.OFF, Reason.CUPTI_ERROR)
    if name != "cuptiGetVersion":
        assert (now.header.error_code, now.header.error_call.decode()) == (999, name)
    if name != "cuptiActivityDisable":
        assert agent.kinds() <= FOR_LIFE
    fake_activity.until(lambda: agent.said() != "")  # it speaks after it has written
    assert agent.said() == "gpu-hpc-agent: a call of CUPTI failed; this process runs on without\n"
    assert_runs_on(agent)


def test_a_failing_call_of_the_driver_s_functions_ends_it(start: Start) -> None:
    """They are asked for where their calls are wanted."""
    agent = start(RECORDS="kernels,driver")
    agent.begin("fault cuptiActivityEnableDriverApi code=999")
    header = agent.wait(lambda now: now.header.state == State.OFF).header
    assert (header.error_code, header.error_call.decode()) == (999, "cuptiActivityEnableDriverApi")
    fake_activity.until(lambda: agent.said() != "")
    assert_runs_on(agent)


@pytest.mark.parametrize("mode", ["duty", "continuous"])
def test_j02_every_call_is_for_administrators_only(start: Start, mode: str) -> None:
    """J02: CUPTI answers 35 to all: one line, the code in the file, and the program is not touched."""
    agent = start(MODE=mode)
    agent.begin(*(f"fault {name} code=35" for name in (*NEEDED, *OPTIONAL) if name != "cuptiGetVersion"))
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert (now.state, now.header.error_code) == ((State.OFF, Reason.CUPTI_ERROR), 35)
    assert agent.kinds() == set()
    fake_activity.until(lambda: agent.said() != "")
    assert_runs_on(agent)


@pytest.mark.parametrize(
    "name",
    ["cuptiActivityGetNextRecord", "cuptiActivityGetNumDroppedRecords", "cuptiGetTimestamp", "cuDriverGetVersion"],
)
def test_other_failing_calls_do_not_matter(start: Start, name: str) -> None:
    """It goes on with less."""
    agent = start()
    agent.begin(f"fault {name} code=1")
    agent.wait(lambda now: now.header.windows_published > 1)
    assert_runs_on(agent)


@pytest.mark.parametrize("name", ["cuDeviceGetUuid_v2", "cuDevicePrimaryCtxGetState"])
def test_a_failing_driver(start: Start, name: str) -> None:
    """A device without a UUID is still counted; contexts that cannot be seen are waited for."""
    agent = start(MODE="continuous", ATTACH_SECONDS="0.1")
    agent.begin(f"fault {name} code=999")
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel a")
    now = agent.wait(lambda now: "a" in now.kernels())
    assert now.device().used
    assert any(now.device().uuid) == (name != "cuDeviceGetUuid_v2")
    assert_runs_on(agent)


def test_a_driver_that_does_not_start(start: Start) -> None:
    """The agent waits; nothing else happens."""
    agent = start(ATTACH_SECONDS="0")
    agent.begin("fault cuDeviceGetCount code=100")
    agent.wait(lambda now: now.state == (State.WAITING, Reason.NO_CONTEXT))
    assert agent.kinds() == FOR_LIFE
    assert_runs_on(agent)


def test_invalid_times_end_it(start: Start) -> None:
    """K02: more than one in a hundred."""
    agent = start(MODE="continuous")
    agent.trace()
    agent.do("kernel a count=50", "kernel b invalid=zero count=2")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert now.state == (State.OFF, Reason.INVALID_RECORDS)
    assert now.kernels()["a"].executions == 50
    assert agent.kinds() == FOR_LIFE


def test_the_first_invalid_time_of_a_graph_ends_it_on_old_versions(start: Start) -> None:
    """K02: before 13.0.1 it was the sign that all following ones are wrong."""
    agent = start(MODE="continuous", WINDOW_SECONDS="0.2")
    agent.trace("version 130000")
    agent.do("graph g nodes=100 count=50", "kernel b invalid=zero")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert now.state == (State.OFF, Reason.INVALID_RECORDS)


@pytest.mark.parametrize("version", [28, 130001])
def test_ten_thousand_buffers(start: Start, version: int) -> None:
    """K04, K07: CUPTI asks and gives nothing back: what has no room is lost, counted, and memory stays bounded."""
    agent = start(MODE="continuous", DRAIN_SECONDS="60", WINDOW_SECONDS="0.2")
    agent.trace(f"version {version}", "records_per_buffer 1")
    before = resident_mib(agent.pid)
    agent.do("stall 1", "kernel a count=10000 call=0")
    assert agent.calls()["@buffers"] == 64 + 1024
    # Large ones have been touched: CUPTI clears each buffer that it gets.
    assert resident_mib(agent.pid) - before < 64 + 4 + 8
    agent.do("stall 0")
    now = agent.wait(lambda now: now.header.records_dropped > 0)
    agent.do("kernel a count=3 call=0")
    room = 64 + 1024
    now = agent.wait(lambda now: "a" in now.kernels() and now.kernels()["a"].executions == room + 3)
    assert now.header.records_dropped == 10_000 - room
    assert now.header.records_kept == room + 3


@pytest.mark.parametrize("version", [18, 26, 27])
def test_an_old_cupti_is_never_refused_a_buffer(start: Start, version: int) -> None:
    """K04: it would crash; tracing ends instead."""
    agent = start(MODE="continuous")
    agent.trace(f"version {version}", "records_per_buffer 1")
    agent.do("stall 1", "kernel a count=10000 call=0")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert now.state == (State.OFF, Reason.BUFFERS)
    assert 10 not in agent.kinds()
    assert_runs_on(agent)


def test_no_thread_can_be_started(start: Start) -> None:
    """A limit of processes: what was enabled inside cuInit is disabled there, since nobody would empty the buffers."""
    agent = start()
    agent.begin("fault pthread_create code=11")
    assert agent.kinds() == set()
    assert agent.calls()["@runtime"] == 0
    assert agent.said() == "gpu-hpc-agent: its thread cannot be started; this process runs on without\n"
    assert_runs_on(agent)


def resident_mib(pid: int) -> float:
    """RSS of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 2**20


def test_no_directory(start: Start, tmp_path: Path) -> None:
    """One line, no file, no tracing."""
    agent = start(directory=tmp_path / "nowhere")
    agent.begin()
    fake_activity.until(lambda: agent.said() != "")
    line = "gpu-hpc-agent: no file can be made in GPU_HPC_AGENT_DIRECTORY; this process runs on without\n"
    assert agent.said() == line
    assert not any(name.startswith("cu") for name in agent.calls())
    assert_runs_on(agent)


@pytest.fixture
def small_directory(tmp_path: Path) -> Path:
    """A directory that only has room for a part of a file."""
    directory = tmp_path / "small"
    directory.mkdir()
    return directory


LIMITED = """
import os, resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it, and what it starts would, too
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_a_file_that_may_not_grow(programs: fake_activity.Programs, tmp_path: Path, small_directory: Path) -> None:
    """RLIMIT_FSIZE, like a full disk: no SIGXFSZ, no SIGBUS, nothing left behind."""
    env = {
        **os.environ,
        "CUDA_INJECTION64_PATH": str(programs.agent),
        "GPU_HPC_AGENT_DIRECTORY": str(small_directory),
    }
    process = subprocess.Popen(
        ["python3", "-c", LIMITED, str(programs.host)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        text=True,
    )
    assert process.stdin
    assert process.stderr
    with process:
        process.stdin.write(f"load {programs.cupti}\ninit\ncontext 0\n")
        process.stdin.flush()
        assert "no file can be made" in process.stderr.readline()
        process.stdin.write("kernel a count=100\nexit 0\n")
        process.stdin.flush()
        assert process.wait(60) == 0
    assert list(small_directory.iterdir()) == []
    del tmp_path


def test_a_directory_where_nothing_can_be_made(start: Start) -> None:
    """Read-only, even for root."""
    agent = start(directory=Path("/proc/self"))
    agent.begin()
    fake_activity.until(lambda: agent.said() != "")
    assert not any(name.startswith("cu") for name in agent.calls())
    assert_runs_on(agent)
