"""Everything at once under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: no report."""

from __future__ import annotations

import pytest

import fake_activity
from fake_activity.agent import Start
from fake_activity.agent_file import State

SANITIZERS = {
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"],
    "thread": ["-fsanitize=thread", "-Wno-tsan"],  # it does not understand the fence before another process reads,
}
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:exitcode=66",  # the fake's names and buffers live for ever
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "exitcode=66",
}
WORK = [
    "kernel a count=2000 threads=8 distinct=300",
    "kernel n count=6000 distinct=6000 threads=2",
    "kernel long count=20 long=8000 distinct=10",
    "kernel a reversed=1 count=500",
    "kernel a call=0 count=100 threads=2",
    "kernel a work=0 count=100",
    "kernel a device=15 count=3",
    "kernel a device=31 count=3",
    "graph g nodes=50 count=100 threads=2",
    "copy h2d memory=pinned count=100 threads=4",
    "copy p2p count=10",
    "set count=10",
    "sync 3 count=50 threads=4",
    "foreign",
]


@pytest.fixture(scope="module", params=SANITIZERS)
def sanitized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> fake_activity.Programs:
    """All programs with a sanitizer inside."""
    return fake_activity.build(tmp_path_factory.mktemp(request.param), sanitize=SANITIZERS[request.param])


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> None:
    """How the sanitizers report."""
    for name, value in OPTIONS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("mode", ["duty", "continuous"])
@pytest.mark.parametrize("version", [26, 130101])
def test_no_report(start: Start, sanitized: fake_activity.Programs, mode: str, version: int) -> None:
    """K06: threads, odd records, windows opening and closing, stop and start, a fork, and an exit while tracing."""
    agent = start(programs=sanitized, MODE=mode)
    agent.trace(f"version {version}")
    for _ in range(2):
        agent.do(*WORK, "entry gpu_hpc_agent_stop")
        agent.wait(lambda now: now.header.state == State.PAUSED, seconds=30)
        agent.do("entry gpu_hpc_agent_start")
        agent.wait(lambda now: now.header.state == State.TRACING, seconds=30)
    agent.do("kernel a count=500 threads=4")
    assert agent.end(seconds=30) == 0
    assert agent.said() == ""


def test_no_report_of_invalid_records(start: Start, sanitized: fake_activity.Programs) -> None:
    """Few enough to go on."""
    agent = start(programs=sanitized, MODE="continuous", WINDOW_SECONDS="60")
    agent.trace()
    agent.do(*WORK, "kernel bad invalid=negative count=2", "kernel bad invalid=zero", "entry gpu_hpc_agent_stop")
    now = agent.wait(lambda now: now.header.state == State.PAUSED, seconds=30)
    assert now.header.records_invalid == 3
    assert agent.end(seconds=30) == 0
    assert agent.said() == ""


def test_no_report_in_a_fork(start: Start, sanitized: fake_activity.Programs) -> None:
    """The child runs our handlers and callbacks."""
    agent = start(programs=sanitized, MODE="continuous")
    agent.trace()
    assert agent.do("kernel a count=100 threads=2", "fork count=20") == "status=0"
    assert agent.end(seconds=30) == 0
    assert agent.said() == ""


@pytest.mark.parametrize("mode", ["duty", "continuous"])
def test_no_report_of_lost_kernels(start: Start, sanitized: fake_activity.Programs, mode: str) -> None:
    """Threads whose kernels are lost beside others; a stop and an exit in the middle."""
    agent = start(programs=sanitized, MODE=mode, WINDOW_SECONDS="0.2", PERIOD_SECONDS="0.4")
    agent.trace()
    agent.do("kernel b count=3000 threads=3 lose=5 every_us=100", "lose 1000000")
    agent.do("kernel a count=3000 every_us=50", "entry gpu_hpc_agent_stop")
    agent.wait(lambda now: now.header.state == State.PAUSED)
    agent.do("entry gpu_hpc_agent_start", "kernel a count=3000 every_us=50")
    assert agent.end(seconds=30) == 0
    assert agent.said() == ""


def test_no_report_under_pressure(start: Start, sanitized: fake_activity.Programs) -> None:
    """All buffers are out, and come back at once, on eight threads."""
    agent = start(programs=sanitized, MODE="continuous", DRAIN_SECONDS="60")
    agent.trace("records_per_buffer 1")
    agent.do("stall 1", "kernel a count=160 threads=8", "stall 0", "kernel a count=10 threads=8")
    now = agent.wait(lambda now: now.header.records_dropped > 0, seconds=30)
    assert now.kernels()
    assert agent.end(seconds=30) == 0
    assert agent.said() == ""


def test_no_report_with_a_profiler(start: Start, sanitized: fake_activity.Programs) -> None:
    """It takes our callbacks and buffers away."""
    agent = start(programs=sanitized, RESUME_AFTER_PROFILER_MINUTES="0.02")
    agent.trace()
    agent.do("kernel a count=100 threads=4", "copy h2d threads=4", "profile frees=1", "kernel b count=100 threads=4")
    agent.wait(lambda now: now.header.state == State.PAUSED)
    agent.do("profiled")
    agent.wait(lambda now: now.header.state == State.TRACING, seconds=30)
    assert agent.end(seconds=30) == 0
    assert agent.said() == ""
