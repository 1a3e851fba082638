"""The helper process as the exporter runs it, on a fake CUPTI that crashes, hangs, refuses and lies."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from e2e.machine import PATIENT_HELPER, uuid_of
from fake_cupti import CuptiScenario, build
from gpu_hpc_exporter.model import Link
from gpu_hpc_exporter.sources.pm_sampling.process import HelperProcess, helper_environment
from gpu_hpc_exporter.sources.pm_sampling.protocol import (
    Alive,
    FromHelper,
    GpuState,
    Happened,
    Order,
    Ready,
    Sampling,
    Target,
    Unusable,
    Windows,
)

MS = 1_000_000
BUSY_GPU = """
    costs real
    device 0
    value * *.sum 1e9/s
    value * *pct* 50
    value * lts__t_sectors.sum 1e10/s
"""
M = TypeVar("M", bound=FromHelper)


class Helper:
    """A running helper and all that it has said."""

    def __init__(self, scenario: CuptiScenario, process: HelperProcess) -> None:
        self.scenario = scenario
        self.process = process
        self.heard: list[FromHelper] = []

    def hear_until(self, condition: Callable[[], object], timeout: float = 60) -> None:
        """Listen until the condition holds; it must hold before the helper ends."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"not heard in {timeout} s: {self.heard[-5:]}"
            messages = self.process.read(0.05)
            assert messages is not None, f"the helper {self.exit_text()}: {self.heard[-5:]}"
            self.heard += messages

    def hear_the_end(self) -> str:
        """Listen until the helper ends by itself; how it ended."""
        deadline = time.monotonic() + 60
        while (messages := self.process.read(0.05)) is not None:
            self.heard += messages
            assert time.monotonic() < deadline, "the helper goes on"
        return self.exit_text()

    def exit_text(self) -> str:
        """How it ended, once it has."""
        self.process.end()
        return self.process.exit_text()

    def all(self, kind: type[M]) -> list[M]:
        """What was heard of one kind."""
        return [message for message in self.heard if isinstance(message, kind)]

    def columns(self, quantity: str, device: int = 0) -> list[float]:
        """The values of one quantity, window by window."""
        frames = [frame for frame in self.all(Windows) if frame.uuid == uuid_of(device)]
        return [
            value for frame in frames for name, column in frame.values.items() if name == quantity for value in column
        ]

    def windows(self, device: int = 0) -> list[tuple[int, int]]:
        """Begin and end of each window of a device."""
        frames = [frame for frame in self.all(Windows) if frame.uuid == uuid_of(device)]
        times = [time for frame in frames for time in zip(frame.ends_ns, frame.durations_ns, strict=True)]
        return [(end - duration, end) for end, duration in times]

    def states(self, device: int = 0) -> list[tuple[str, str]]:
        """States of a device in order, with their reasons."""
        return [(each.state, each.reason) for each in self.all(GpuState) if each.uuid == uuid_of(device)]

    def incidents(self) -> list[str]:
        """What was to be counted."""
        return [message.incident for message in self.all(Happened)]

    def has_windows(self, count: int, *devices: int) -> Callable[[], bool]:
        """Whether so many windows of each device were heard."""
        return lambda: all(len(self.windows(device)) >= count for device in devices or (0,))


class Run(Protocol):
    """Starts a helper that ends with the test."""

    def __call__(
        self,
        text: str,
        *,
        interval_ms: int = 10,
        devices: Sequence[int] = (0,),
        links: tuple[Link, ...] = ("pcie",),
        library: Path | None = None,
        has_gpm: bool = True,
        command: Sequence[str] = PATIENT_HELPER,
    ) -> Helper: ...


@pytest.fixture
def run(tmp_path: Path, cupti: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Start helpers on what a scenario says. They are not killed, though a busy machine holds them up."""
    monkeypatch.setattr("gpu_hpc_exporter.sources.pm_sampling.process._EXIT_S", 20)
    helpers: list[Helper] = []

    def runner(
        text: str,
        *,
        interval_ms: int = 10,
        devices: Sequence[int] = (0,),
        links: tuple[Link, ...] = ("pcie",),
        library: Path | None = None,
        has_gpm: bool = True,
        command: Sequence[str] = PATIENT_HELPER,
    ) -> Helper:
        scenario = CuptiScenario(tmp_path, cupti, "costs none\n" + textwrap.dedent(text))
        for name, value in scenario.env.items():
            if name != "LD_LIBRARY_PATH" or name not in os.environ:
                monkeypatch.setenv(name, value)
        order = Order(interval_ms * MS, [Target(uuid_of(device), links, has_gpm=has_gpm) for device in devices])
        process = HelperProcess(command, str(library or cupti / "libcupti.so.12"), order)
        helpers.append(Helper(scenario, process))
        return helpers[-1]

    yield runner
    for helper in helpers:
        helper.process.end()
        # No object of CUPTI's was used after its end, whatever went wrong.
        assert helper.scenario.stats().dead_object_uses == 0


def touch(windows: Sequence[tuple[int, int]]) -> bool:
    """Whether each window begins where the one before it ends."""
    return all(before[1] == after[0] for before, after in pairwise(windows))


def wait_for_hang(helper: Helper, count: int = 1) -> None:
    """Listen until a call hangs."""
    helper.hear_until(lambda: helper.scenario.stats().hangs >= count)


@pytest.mark.parametrize(("interval_ms", "count"), [(100, 8), (10, 120), (1, 600)])
def test_each_window_comes_once_with_its_values(run: Run, interval_ms: int, count: int) -> None:
    """Windows touch, have the length asked for, and their sum over time is what the hardware counted."""
    began = time.monotonic_ns()
    helper = run(BUSY_GPU, interval_ms=interval_ms)
    helper.hear_until(helper.has_windows(count))
    windows = helper.windows()
    assert touch(windows)
    assert {end - begin for begin, end in windows} == {interval_ms * MS}
    # The first sample of a session begins minutes before it: it is none of ours.
    assert windows[0][0] > began
    assert windows[-1][1] <= time.monotonic_ns()
    seconds = (windows[-1][1] - windows[0][0]) / 1e9
    assert sum(helper.columns("dram_read_bytes")) == pytest.approx(1e9 * seconds, rel=1e-6)
    assert set(helper.columns("sm_active")) == {0.5}
    assert helper.states() == [("active", "")]
    assert helper.incidents() == []
    assert [message.interval_ns for message in helper.all(Sampling)] == [interval_ms * MS]
    stats = helper.scenario.stats()
    assert stats.lost_windows == {}
    assert stats.max_inside == {0: 1}
    # None that was decoded by now is left out but the first sample; the last ones may be on their way.
    helper.hear_until(helper.has_windows(stats.windows[0] - 1))
    assert touch(helper.windows())


def test_it_ends_with_stdin(run: Run) -> None:
    """A clean end: Stop was called, so the counters are free."""
    helper = run(BUSY_GPU)
    helper.hear_until(helper.has_windows(10))
    assert helper.process.end()
    assert helper.process.exit_text() == "ended with status 0"
    assert helper.scenario.calls()["cuptiPmSamplingStop"] == 1


@pytest.mark.parametrize(
    ("call", "doing"),
    [
        ("cuInit", "start CUDA"),
        ("cuptiGetVersion", "load"),
        ("cuptiPmSamplingSetConfig", "set up PM sampling"),
        ("cuptiPmSamplingStart", "set up PM sampling"),
        ("cuptiPmSamplingDecodeData after_calls 3", "set up PM sampling"),
    ],
)
def test_it_ends_in_the_midst_of_a_hanging_call(run: Run, call: str, doing: str) -> None:
    """J: what hangs is named before it hangs, and the helper still ends with stdin, by itself."""
    helper = run(BUSY_GPU + f"fault {call} hang", command=())
    wait_for_hang(helper)
    helper.hear_until(lambda: helper.all(Alive))
    assert helper.all(Alive)[-1].doing.startswith(doing)
    assert helper.process.end()
    assert helper.process.exit_text() == "ended with status 1"


EXPORTER = """
import sys, time
from gpu_hpc_exporter.sources.pm_sampling.process import HelperProcess
from gpu_hpc_exporter.sources.pm_sampling.protocol import Order, Target, Windows
helper = HelperProcess((), sys.argv[1], Order(10_000_000, [Target(sys.argv[2], ("pcie",), has_gpm=True)]))
print(helper.pid, flush=True)
while True:
    if any(isinstance(message, Windows) for message in helper.read(1) or ()):
        print("windows", flush=True)
"""


@pytest.mark.parametrize("fault", ["", "fault cuptiPmSamplingDecodeData hang from 0.2"])
def test_it_ends_when_the_exporter_is_killed(tmp_path: Path, cupti: Path, fault: str) -> None:
    """A14: kill -9 of the exporter leaves no helper behind, also while a call hangs."""
    scenario = CuptiScenario(tmp_path, cupti, textwrap.dedent(BUSY_GPU) + fault)
    command = [sys.executable, "-c", EXPORTER, str(cupti / "libcupti.so.12"), uuid_of(0)]
    with subprocess.Popen(command, env=os.environ | scenario.env, stdout=subprocess.PIPE, text=True) as exporter:
        assert exporter.stdout is not None
        helper = os.pidfd_open(int(exporter.stdout.readline()))
        assert exporter.stdout.readline() == "windows\n"
        deadline = time.monotonic() + 60
        while fault and not scenario.stats().hangs:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        exporter.kill()
        assert select.select([helper], [], [], 60.0)[0], "the helper outlives the exporter"
        os.close(helper)


def test_signals_for_the_exporter_do_not_end_it(run: Run) -> None:
    """Ctrl-C and a service manager reach the whole group: the exporter decides when the helper ends."""
    helper = run(BUSY_GPU)
    helper.hear_until(helper.has_windows(1))
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(helper.process.pid, number)
    seen = len(helper.windows())
    helper.hear_until(helper.has_windows(seen + 1))
    assert os.getsid(helper.process.pid) != os.getsid(0)


@pytest.mark.parametrize(
    ("action", "how"),
    [("crash", "was ended by signal 11"), ("oom", "was ended by signal 9"), ("exit 3", "ended with status 3")],
)
def test_k10_a_sudden_death_is_the_helpers_own(run: Run, action: str, how: str) -> None:
    """K10: a crash, an OOM kill or an exit in CUPTI: the exporter reads the end, and how it was."""
    helper = run(BUSY_GPU + f"fault cuptiPmSamplingDecodeData after_calls 2 {action}")
    assert helper.hear_the_end() == how


def copy(source: Path, folder: Path, name: str) -> Path:
    """A library under another name."""
    folder.mkdir(exist_ok=True)
    return Path(shutil.copy(source, folder / name))


def unusable(helper: Helper) -> Unusable:
    """What the helper says once it knows that there will be no windows; it stays to be ended."""
    helper.hear_until(lambda: helper.all(Unusable))
    (message,) = helper.all(Unusable)
    assert "\n" not in message.reason
    assert helper.exit_text() == "ended with status 0"
    return message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("version 22", "expected 12.6"),
        ("version 130101\ndriver_cuda 12090", "is CUPTI 13.1: expected 12.6 to the driver's 12.9"),
        ("version 24\ndriver_cuda 12050", "to the driver's 12.5"),
    ],
)
def test_k10_a_library_of_the_wrong_version(run: Run, text: str, reason: str) -> None:
    """K10: too old or newer than the driver: unsupported, with the version."""
    message = unusable(run(f"device 0\n{text}"))
    assert (message.state, reason in message.reason) == ("unsupported", True)


def test_k10_a_file_that_is_no_cupti(run: Run, tmp_path: Path, cupti: Path) -> None:
    """K10: text, nothing at all, another library, one without PM sampling: unsupported, and which file it was."""
    (tmp_path / "text.so").write_text("#!/bin/sh\n")
    (tmp_path / "empty.so").touch()
    old = build(tmp_path / "old", missing=["cuptiPmSamplingEnable"])
    for library in (
        tmp_path / "text.so",
        tmp_path / "empty.so",
        tmp_path / "missing.so",
        cupti / "libnvperf_host.so",
        old / "libcupti.so.12",
    ):
        message = unusable(run("device 0", library=library))
        assert (message.state, str(library) in message.reason) == ("unsupported", True), message
        assert len(message.reason) <= 400


def test_k10_without_a_driver(run: Run, tmp_path: Path, cupti: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No libcuda, or one that is none."""
    copy(cupti / "libcupti.so.12", tmp_path / "alone", "libcupti.so.12")
    copy(cupti / "libnvperf_host.so", tmp_path / "odd", "libcuda.so.1")
    for folder, reason in (("alone", "libcuda.so.1 is not there"), ("odd", "libcuda.so.1 is no driver")):
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path / folder))
        message = unusable(run("device 0"))
        assert (message.state, reason in message.reason) == ("unsupported", True), message


@pytest.mark.parametrize(
    ("fault", "state", "reason"),
    [
        ("cuInit 802", "failed", "cuInit: system_not_ready"),
        ("cuInit 100", "failed", "cuInit: no_device"),
        ("cuDeviceGetCount 999", "failed", "cuDeviceGetCount: unknown"),
        ("cuptiProfilerInitialize 35", "no_permission", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("cuptiProfilerInitialize 999", "failed", "cuptiProfilerInitialize: unknown"),
    ],
)
def test_what_fails_for_all_gpus_is_said_once(run: Run, fault: str, state: str, reason: str) -> None:
    """The driver or the profiler does not start."""
    message = unusable(run(f"device 0\nfault {fault}"))
    assert (message.state, reason in message.reason) == (state, True), message


@pytest.mark.parametrize("call", ["Enable", "SetConfig", "Start"])
def test_j02_no_permission(run: Run, call: str) -> None:
    """J02: wherever the answer 35 comes, it is one line with the remedy, and the helper lives on."""
    helper = run(f"device 0\nfault cuptiPmSampling{call} 35")
    helper.hear_until(helper.states)
    ((state, reason),) = helper.states()
    assert (state, "\n" in reason) == ("no_permission", False)
    assert "NVreg_RestrictProfilingToAdminUsers=0" in reason
    helper.hear_until(lambda: len(helper.all(Alive)) >= 3)
    assert helper.states() == [(state, reason)]


@pytest.mark.parametrize("calls", ["cupti*", "cuptiP*", "cuptiDeviceGetChipName", "cuptiPm*"])
def test_j02_no_permission_for_any_call(run: Run, calls: str) -> None:
    """J02: every call answers 35, or those of a part: one reason with the remedy, and never a dead helper."""
    helper = run(f"device 0\nfault {calls} 35")
    helper.hear_until(lambda: helper.states() or helper.all(Unusable))
    told = [*helper.states(), *((message.state, message.reason) for message in helper.all(Unusable))]
    ((state, reason),) = told
    assert state == "no_permission"
    assert "NVreg_RestrictProfilingToAdminUsers=0" in reason
    assert helper.windows() == []
    assert helper.process.read(0.05) is not None


@pytest.mark.parametrize(
    ("code", "word"), [(27, "not_supported"), (43, "mig_device_not_supported"), (41, "confidential_computing")]
)
def test_what_cupti_does_not_support(run: Run, code: int, word: str) -> None:
    """The other GPU is sampled, this one is said to be unsupported."""
    helper = run(f"device 0\ndevice 1\nfault cuptiPmSamplingEnable device 0 {code}", devices=[0, 1])
    helper.hear_until(helper.has_windows(5, 1))
    ((state, reason),) = helper.states(0)
    assert (state, word in reason) == ("unsupported", True)


def test_a_chip_that_nobody_knows(run: Run) -> None:
    """A chip without a set of counters, and one that the library does not know: said, not passed over."""
    helper = run("device 0 chip XX100\ndevice 1 chip GB100\nchips GH100", devices=[0, 1])
    helper.hear_until(lambda: helper.states(0) and helper.states(1))
    assert helper.states(0)[0] == ("unsupported", "no set of counters for the chip 'XX100'")
    assert helper.states(1)[0][0] in ("failed", "unsupported")


def test_j01_busy_is_waited_out(run: Run, tmp_path: Path, cupti: Path) -> None:
    """J01: another owner has the counters: said, tried again, never stolen; windows come when they are free."""
    scenario = CuptiScenario(tmp_path, cupti, "device 0")
    with scenario.other_owner(0):
        helper = run("device 0\ncosts none")
        helper.hear_until(lambda: helper.scenario.calls().get("cuptiPmSamplingSetConfig", 0) >= 2)
        assert [state for state, _ in helper.states()] == ["busy"]
        assert "cuptiPmSamplingStart" not in helper.scenario.calls()
        # What was enabled for the try was disabled again.
        assert helper.scenario.stats().live_samplers <= 1
    helper.hear_until(helper.has_windows(5))
    assert [state for state, _ in helper.states()] == ["busy", "active"]


def test_b11_counters_that_silence_the_gpu_are_given_up(run: Run) -> None:
    """B11: NVLink counters of links that are down: no window, then the set without them, counted."""
    helper = run("device 0\nno_samples when nvl*", links=("pcie", "nvlink"))
    helper.hear_until(helper.has_windows(5))
    assert helper.incidents() == ["set_reduced"]
    assert helper.columns("nvlink_received_bytes") == []
    assert len(helper.columns("l2_sectors")) >= 5
    assert helper.states() == [("active", "")]


def test_counters_that_flood_are_given_up(run: Run) -> None:
    """A counter that overflows the buffer from the start costs itself, not the others."""
    helper = run("device 0\nflood nvl*", links=("pcie", "nvlink"))
    helper.hear_until(helper.has_windows(5))
    assert helper.incidents() == ["overflow", "set_reduced"]
    assert helper.columns("nvlink_received_bytes") == []


def test_an_overflow_halves_the_rate(run: Run) -> None:
    """Steady state: the overflow is counted, windows go on at half the rate."""
    helper = run("device 0\nfault cuptiPmSamplingDecodeData from 0.2 8 times 1")
    helper.hear_until(lambda: len(helper.all(Sampling)) >= 2)
    came = len(helper.windows())
    assert came > 0
    helper.hear_until(helper.has_windows(came + 5))
    assert [message.interval_ns // MS for message in helper.all(Sampling)] == [10, 20]
    assert helper.incidents() == ["overflow", "rate_halved"]
    assert {end - begin for begin, end in helper.windows()[came:]} == {20 * MS}
    assert helper.states() == [("active", "")]


@pytest.mark.parametrize(("pipe", "other"), [("tensor", "fp64"), ("fp64", "tensor")])
def test_j07_unknown_counters(run: Run, pipe: str, other: str) -> None:
    """J07: a counter that the library does not know is left out and the set goes on."""
    helper = run(f"device 0 chip GA100\nunknown_metric *pipe_{pipe}*", has_gpm=False)
    helper.hear_until(helper.has_windows(5))
    assert helper.columns(f"pipe_{pipe}") == []
    assert len(helper.columns(f"pipe_{other}")) >= 5
    assert len(helper.columns("l2_sectors")) >= 5
    assert helper.states() == [("active", "")]


@pytest.mark.parametrize("pattern", ["dram__*", "*"])
def test_j07_an_unknown_core_counter_is_named(run: Run, pattern: str) -> None:
    """J07: unsupported, with names in the reason: never silence, however many names there are."""
    helper = run(f"device 0\nunknown_metric {pattern}")
    helper.hear_until(helper.states)
    ((state, reason),) = helper.states()
    assert (state, "dram__bytes_read.sum" in reason) == ("unsupported", True)


def test_j07_a_set_that_is_refused_as_a_whole(run: Run) -> None:
    """J07: each counter alone is fine, all together are not: the set is reduced until it is taken."""
    helper = run("device 0\nfault cuptiProfilerHostConfigAddMetrics 1 times 1")
    helper.hear_until(helper.has_windows(5))
    assert helper.incidents() == ["set_reduced"]


@pytest.mark.parametrize("count", [6, 8])
def test_j07_too_many_counters_for_one_pass(run: Run, count: int) -> None:
    """J07: as many as the core needs are enough."""
    helper = run(f"device 0\nmax_metrics {count}")
    helper.hear_until(helper.has_windows(5))
    assert set(helper.incidents()) == {"set_reduced"}
    assert len(helper.columns("dram_read_bytes")) >= 5


@pytest.mark.parametrize("count", [1, 4])
def test_j07_no_pass_is_large_enough(run: Run, count: int) -> None:
    """J07: fewer counters in one pass than the core needs: there is a reason, and no loop without a pause."""
    helper = run(f"device 0\nmax_metrics {count}")
    helper.hear_until(helper.states)
    ((state, reason),) = helper.states()
    assert (state, reason) == ("failed", "the library cannot read these counters in one pass")


def test_j04_each_session_ends_once(run: Run) -> None:
    """J04: sessions that fail and begin again: each object ends once, nothing is used after it (the fake aborts)."""
    helper = run("device 0\nfault cuptiPmSamplingDecodeData 999 times 3")
    helper.hear_until(helper.has_windows(5))
    calls, stats = helper.scenario.calls(), helper.scenario.stats()
    assert calls["cuptiPmSamplingEnable"] == calls["cuptiProfilerHostInitialize"] == 4
    assert calls["cuptiPmSamplingDisable"] == calls["cuptiProfilerHostDeinitialize"] == 3
    assert calls["cuptiProfilerInitialize"] == 1
    assert (stats.live_samplers, stats.live_hosts, stats.dead_object_uses) == (1, 1, 0)
    assert helper.states()[-1] == ("active", "")


@pytest.mark.parametrize("reason", [0, 4, 99])
def test_j04_windows_that_repeat_or_lack(run: Run, reason: int) -> None:
    """J04: any stop reason is taken; windows that come twice are told once, gaps stay gaps."""
    helper = run(f"device 0\ndrop every 5\nduplicate every 7\nstop_reason {reason}")
    helper.hear_until(helper.has_windows(20))
    windows = helper.windows()
    assert all(after[0] >= before[1] for before, after in pairwise(windows))
    gaps = [(after[0] - before[1]) // MS for before, after in pairwise(windows)]
    assert set(gaps) == {0, 10}
    assert {end - begin for begin, end in windows} == {10 * MS}


def test_gpus_are_found_by_uuid(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the driver's order nor the exporter's CUDA_VISIBLE_DEVICES decides which GPU a value belongs to."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    values = "".join(f"value {device} *pct* {device}0\n" for device in (1, 2, 3))
    helper = run("device 3\ndevice 1\ndevice 2\n" + values, devices=[1, 2, 3, 7])
    helper.hear_until(helper.has_windows(3, 1, 2, 3))
    assert [set(helper.columns("sm_active", device)) for device in (1, 2, 3)] == [{0.1}, {0.2}, {0.3}]
    assert helper.states(7) == [("unsupported", "CUDA does not show this GPU to the helper")]


def test_nothing_is_injected_into_the_helper(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would load code of other people into it stays outside; CUDA sees the ordered GPUs only."""
    for name in ("CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "LD_PRELOAD", "LD_AUDIT"):
        assert name not in helper_environment({name: "/evil.so", "HOME": "/root"}, [])
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/evil.so")
    helper = run("device 0")
    helper.hear_until(lambda: helper.all(Ready))
    environment = Path(f"/proc/{helper.process.pid}/environ").read_text().split("\0")
    assert f"CUDA_VISIBLE_DEVICES={uuid_of(0)}" in environment
    assert "CUDA_MPS_PIPE_DIRECTORY=/nonexistent" in environment
    assert not [entry for entry in environment if "evil" in entry]


def test_of_two_gpus_the_hanging_one_is_named(run: Run) -> None:
    """The last word before the silence says for which GPU it is."""
    hang = "fault cuptiPmSamplingDecodeData device 1 after_calls 6 hang"
    helper = run(f"device 0\ndevice 1\n{hang}", devices=[0, 1], command=())
    wait_for_hang(helper)
    helper.hear_until(lambda: isinstance(helper.heard[-1], Alive))
    assert helper.all(Alive)[-1] == Alive("decode", uuid_of(1))


def test_its_lines_become_lines_of_our_log(run: Run, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """What the helper or its libraries write to stderr is logged by us, line by line, and does not fill the log."""
    with caplog.at_level("INFO"):
        helper = run("device 0\nunknown_metric *pipe_tensor*")
        helper.hear_until(lambda: "does not know" in caplog.text)
        assert f"helper {helper.process.pid}: " in caplog.text
        noisy = tmp_path / "noisy"
        noisy.write_text("#!/bin/sh\nseq 100000 >&2\nprintf 'half a line' >&2\n")
        noisy.chmod(0o755)
        caplog.clear()
        process = HelperProcess([str(noisy)], "", Order(MS, []))
        while process.read(0.1) is not None:
            pass
        assert process.end()
    assert 0 < len(caplog.records) <= 100


def test_a_helper_that_is_gone_before_it_reads_the_order() -> None:
    """The wrong command: no exception, but the end and its status."""
    for _ in range(20):
        process = HelperProcess(["/bin/false"], "", Order(MS, [Target("GPU-" + "x" * 300, (), has_gpm=True)] * 100))
        while (messages := process.read(1)) is not None:
            assert messages == []
        assert process.end()
        assert process.exit_text() == "ended with status 1"


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x05\0\0\0hello", b""])
def test_started_by_hand(data: bytes) -> None:
    """Somebody runs it in a shell: one line that says what it is, or nothing."""
    result = subprocess.run(
        [sys.executable, "-m", "gpu_hpc_exporter.pm_helper"], input=data, capture_output=True, timeout=60, check=False
    )
    assert result.stdout == b""
    assert result.returncode == (2 if data else 0)
    assert (b"started by gpu-hpc-exporter" in result.stderr, result.stderr.count(b"\n")) == (
        bool(data),
        int(bool(data)),
    )
