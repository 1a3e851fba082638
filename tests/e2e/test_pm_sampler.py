"""The sampler that keeps the helper process: other GPUs, pauses, profilers, faults, and helpers that are not ours."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from e2e.machine import uuid_of
from fake_cupti import CuptiScenario
from gpu_hpc_exporter.config import PmSampling
from gpu_hpc_exporter.model import (
    NS,
    Driver,
    Event,
    Gpu,
    IntervalInForce,
    Inventory,
    SamplingIncident,
    StateChange,
    Window,
)
from gpu_hpc_exporter.samplers import pm_sampling
from gpu_hpc_exporter.samplers.pm_sampling import Patience, PmSampler
from gpu_hpc_exporter.sources import profilers
from gpu_hpc_exporter.sources.pm_sampling import process
from gpu_hpc_exporter.sources.procfs import PROC
from proc_tree import ProcTree

MS = 1_000_000
QUICK = Patience(settle=0.3, silence=4, first_backoff=0.05, max_backoff=0.2)
"""A helper says something every two seconds, and a busy machine may hold it up."""
STARTING = ("paused", "the helper process is starting")
E = TypeVar("E", bound=Event)


def gpu(device: int, capability: str = "9.0", mig_mode: str = "") -> Gpu:
    """A GPU as NVML lists it."""
    return Gpu(uuid_of(device), device, "NVIDIA", compute_capability=capability, mig_mode=mig_mode, links=("pcie",))


class Recorder:
    """A sink that keeps everything and can be waited for."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._news = threading.Condition()

    def put(self, event: Event) -> None:
        """Keep an event."""
        with self._news:
            self._events.append(event)
            self._news.notify_all()

    def all(self, kind: type[E]) -> list[E]:
        """Events of one kind so far."""
        return [event for event in list(self._events) if isinstance(event, kind)]

    def wait_for(self, condition: Callable[[], object], timeout: float = 60) -> None:
        """Wait for events until the condition holds."""
        with self._news:
            assert self._news.wait_for(lambda: bool(condition()), timeout), f"not in {timeout} s: {self._events[-5:]}"

    def windows(self, device: int = 0) -> list[Window]:
        """Windows of a device."""
        return [window for window in self.all(Window) if window.uuid == uuid_of(device)]

    def wait_for_new_windows(self, *devices: int) -> None:
        """Wait until windows that end from now on have come."""
        now = time.monotonic_ns()
        self.wait_for(
            lambda: all((came := self.windows(d)) and came[-1].end_ns > now for d in devices or (0,)),
        )

    def states(self, device: int = 0) -> list[tuple[str, str]]:
        """States of a device in order, with their reasons, after the one before its helper's first word."""
        return [each for each in self.all_states(device) if each != STARTING]

    def all_states(self, device: int = 0) -> list[tuple[str, str]]:
        """States of a device in order, with their reasons."""
        return [(each.state, each.reason) for each in self.all(StateChange) if each.uuid == uuid_of(device)]

    def wait_for_state(self, state: str, reason: str = "", device: int = 0) -> None:
        """Wait until a device is in a state, for a reason that has this in it."""
        self.wait_for(lambda: (now := self.states(device)) and now[-1][0] == state and reason in now[-1][1])

    def restarts(self) -> list[int]:
        """When helpers were said to have ended unasked."""
        return [each.time_ns for each in self.all(SamplingIncident) if each.incident == "helper_restarted"]


class Machine:
    """The sampler, what it reads, and what it tells."""

    def __init__(self, scenario: CuptiScenario, sampler: PmSampler, sink: Recorder) -> None:
        self.scenario, self.sampler, self.sink = scenario, sampler, sink

    def list_gpus(self, *gpus: Gpu) -> None:
        """Let NVML list these."""
        self.sampler.put(Inventory(time.monotonic_ns(), gpus, Driver(), len(gpus)))


def helpers() -> list[int]:
    """Pids of this process's helpers that have not ended."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        children = ""
        with suppress(ProcessLookupError, FileNotFoundError):  # a thread that ends leaves its children to another one
            children = (task / "children").read_text()
        for pid in children.split():
            with suppress(ProcessLookupError, FileNotFoundError):  # it ends while it is looked at
                stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                if stat[0] != "Z" and "gpu_hpc_exporter.pm_helper" in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(int(pid))
    return found


@contextmanager
def its_end() -> Iterator[Callable[[float], bool]]:
    """Whether the one helper that runs now ends within so many seconds."""
    (pid,) = helpers()
    descriptor = os.pidfd_open(pid)
    try:
        yield lambda timeout: bool(select.select([descriptor], [], [], timeout)[0])
    finally:
        os.close(descriptor)


class Start(Protocol):
    """Starts a sampler that ends with the test."""

    def __call__(
        self, text: str, *gpus: Gpu, interval_ms: int = 10, procfs: Path | None = None, **settings: object
    ) -> Machine: ...


@pytest.fixture
def start(tmp_path: Path, cupti: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a sampler on what a scenario says.

    It gives way to nobody: its host's processes are the test's own, since other tests may run beside it. How long it
    waits for a helper that was killed is no matter here: a busy machine takes its time.
    """
    monkeypatch.setattr(process, "_KILL_S", 20)
    monkeypatch.setattr(pm_sampling, "_STOP_S", 60)
    host = ProcTree(tmp_path / "host")
    machines: list[Machine] = []

    def starter(
        text: str, *gpus: Gpu, interval_ms: int = 10, procfs: Path | None = None, **settings: object
    ) -> Machine:
        scenario = CuptiScenario(tmp_path, cupti, "costs none\n" + textwrap.dedent(text))
        for name, value in scenario.env.items():
            monkeypatch.setenv(name, value)
        sink = Recorder()
        wanted = {"library": str(cupti / "libcupti.so.12"), "yield_to": (), **settings}
        section = PmSampling(**wanted)  # type: ignore[arg-type]  # keys of the section
        sampler = PmSampler(sink, section, interval_ms * MS, QUICK, procfs or host.root)
        machines.append(Machine(scenario, sampler, sink))
        sampler.start()
        machines[-1].list_gpus(*(gpus or [gpu(0)]))
        return machines[-1]

    yield starter
    ended = [machine.sampler.stop() for machine in machines]
    assert all(ended)
    assert helpers() == []
    assert all(machine.scenario.stats().dead_object_uses == 0 for machine in machines)


def test_other_gpus_restart_the_helper(start: Start) -> None:
    """A GPU more is sampled too; the same list again changes nothing."""
    machine = start("device 0\ndevice 1")
    machine.sink.wait_for_new_windows(0)
    first = helpers()
    machine.list_gpus(gpu(0))
    machine.sink.wait_for_new_windows(0)
    assert helpers() == first
    machine.list_gpus(gpu(0), gpu(1))
    machine.sink.wait_for_new_windows(0, 1)
    assert helpers() != first
    assert machine.sink.states(0) == [("active", "")]
    assert machine.sink.restarts() == []


def test_a_gpu_that_returns_is_told_anew(start: Start) -> None:
    """Whoever forgot a lost GPU's states hears them again when it is back."""
    machine = start("device 0")
    machine.sink.wait_for_new_windows()
    with its_end() as ends:
        machine.list_gpus()
        assert ends(60)
    machine.list_gpus(gpu(0))
    machine.sink.wait_for(lambda: machine.sink.states() == [("active", "")] * 2)


def test_pause_and_resume(start: Start) -> None:
    """J01: pause returns when the helper is gone; it ends by itself, or when asked."""
    machine = start("device 0")
    machine.sink.wait_for_new_windows()
    began = time.monotonic()
    machine.sampler.pause(0.5, "asked for")
    assert helpers() == []
    assert machine.sink.states()[-1] == ("paused", "asked for")
    came = len(machine.sink.windows())
    machine.sink.wait_for(lambda: len(machine.sink.windows()) > came)
    assert time.monotonic() - began > 0.5
    assert machine.sink.windows()[came].end_ns > (began + 0.5) * NS
    machine.sampler.pause(600, "asked for")
    assert helpers() == []
    machine.sampler.resume()
    machine.sink.wait_for_new_windows()
    assert machine.sink.restarts() == []


@contextmanager
def program(folder: Path, name: str) -> Iterator[None]:
    """A process with a profiler's name, which is that of the file; where one program is many, it is by argv[0]."""
    path = shutil.copy("/bin/sleep", folder / name)
    with subprocess.Popen(["sleep", "60"], executable=path) as running:
        try:
            yield
        finally:
            running.kill()


def test_it_gives_way_to_profilers(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon after ncu's start the helper is gone, and some time after its end windows are back."""
    monkeypatch.setattr(profilers, "_MIN_LIST_PERIOD_NS", 3600 * NS)  # it is found without a listing of all processes
    monkeypatch.setattr(profilers, "_MAX_LIST_PERIOD_NS", 3600 * NS)
    name = f"ncu{os.getpid()}"
    machine = start("device 0", procfs=PROC, yield_to=("nsys", name))
    machine.sink.wait_for_new_windows()
    with its_end() as ends, program(tmp_path, name):
        assert ends(60)
        machine.sink.wait_for_state("paused", f"{name} runs")
        machine.sampler.resume()
        assert helpers() == []
    began = time.monotonic()
    machine.sink.wait_for_new_windows()
    assert time.monotonic() - began > 0.3
    assert machine.sink.restarts() == []


def test_other_settings(start: Start, cupti: Path) -> None:
    """Another interval takes effect without a restart counted; off ends the helper and says so."""
    machine = start("device 0")
    machine.sink.wait_for_new_windows()
    settings = PmSampling(library=str(cupti / "libcupti.so.12"), yield_to=())
    first = helpers()
    machine.sampler.apply(settings, 10 * MS)
    machine.sink.wait_for_new_windows()
    assert helpers() == first
    machine.sampler.apply(settings, 20 * MS)
    machine.sink.wait_for(lambda: machine.sink.all(IntervalInForce)[-1].interval_ns == 20 * MS)
    machine.sink.wait_for_new_windows()
    with its_end() as ends:
        machine.sampler.apply(PmSampling(mode="off", yield_to=()), 20 * MS)
        assert ends(60)
    machine.sink.wait_for_state("unsupported", "pm_sampling.mode is off")
    machine.sampler.apply(settings, 20 * MS)
    machine.sink.wait_for_new_windows()
    assert machine.sink.restarts() == []


@pytest.mark.parametrize("call", ["cuptiPmSamplingDecodeData after_calls 5", "cuInit"])
def test_stop_is_bounded_while_the_helper_hangs(start: Start, call: str) -> None:
    """A call of CUPTI's that never returns does not keep the exporter from ending."""
    machine = start(f"device 0\nfault {call} hang")
    deadline = time.monotonic() + 60
    while not machine.scenario.stats().hangs:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert machine.sampler.stop()
    assert helpers() == []


def test_a14_kill_9_of_the_helper(start: Start) -> None:
    """A14: after each of twenty kills windows return; each is counted, none is waited out for long."""
    machine = start("device 0")
    for count in range(1, 21):
        machine.sink.wait_for_new_windows()
        (pid,) = helpers()
        os.kill(pid, signal.SIGKILL)
        machine.sink.wait_for(lambda count=count: len(machine.sink.restarts()) == count)  # type: ignore[misc]  # bound at once
        assert machine.sink.states()[-1] == ("failed", "the helper process has ended")
    machine.sink.wait_for_state("active")


def test_j_a_helper_that_always_crashes_is_started_ever_more_seldom(start: Start) -> None:
    """The waits double up to their bound; the state says failed, once."""
    machine = start("device 0\nfault cuInit crash")
    machine.sink.wait_for(lambda: len(machine.sink.restarts()) >= 5)
    assert machine.sink.states() == [("failed", "the helper process has ended")]
    times = machine.sink.restarts()
    waits = [(after - before) / NS for before, after in pairwise(times)]
    assert all(wait > least for wait, least in zip(waits, [0.05, 0.1, 0.2, 0.2], strict=False))


def test_of_two_gpus_the_one_that_hangs_is_left_out(start: Start) -> None:
    """Decode hangs for one GPU again and again, long after it was active: it is named, then the other is served."""
    machine = start("device 0\ndevice 1\nfault cuptiPmSamplingDecodeData device 1 hang from 0.2", gpu(0), gpu(1))
    machine.sink.wait_for_state("failed", f"hangs (decode of {uuid_of(1)})")
    machine.sink.wait_for_state("failed", "hang again and again", device=1)
    machine.sink.wait_for_new_windows(0)
    assert ("active", "") in machine.sink.states(1)
    assert len(machine.sink.restarts()) == 3
    assert machine.scenario.stats().hangs == 3


def test_gpus_before_hopper(start: Start) -> None:
    """Off in mode auto, since DCGM and profilers would find the counters taken; on where it is required."""
    text = "device 0 chip GA100\ndevice 1"
    machine = start(text, gpu(0, "8.0"), gpu(1))
    machine.sink.wait_for_new_windows(1)
    machine.sink.wait_for_state("unsupported", "off before Hopper")
    assert machine.sink.windows(0) == []
    machine = start(text, gpu(0, "8.0"), mode="required")
    machine.sink.wait_for_new_windows(0)
    assert machine.sink.states(0)[-1][0] == "active"


def test_dcgm_is_respected_before_hopper(start: Start, tmp_path: Path) -> None:
    """Where the counters have one owner nv-hostengine keeps them; from Hopper on both work side by side."""
    host = ProcTree(tmp_path / "proc")
    host.add(812, comm=b"nv-hostengine")
    old = start("device 0 chip GA100", gpu(0, "8.0"), procfs=host.root, mode="required")
    old.sink.wait_for_state("busy", "nv-hostengine")
    assert helpers() == []
    host.remove(812)
    old.sink.wait_for_new_windows()
    assert old.sampler.stop()
    host.add(812, comm=b"nv-hostengine")
    # An older GPU that is not sampled, and a MIG instance, do not matter.
    instance = Gpu("MIG-1", 1, "NVIDIA", parent_uuid=uuid_of(1))
    new = start("device 0", gpu(0), gpu(2, "7.0"), gpu(1, mig_mode="enabled"), instance, procfs=host.root)
    new.sink.wait_for_new_windows()
    assert new.sink.states(1) == [("unsupported", "MIG is enabled: PM sampling needs the whole GPU")]
    assert "Turing" in new.sink.states(2)[0][1]


def test_j02_one_line_for_the_administrator(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    """J02: two GPUs without permission are two states and one warning, which names the remedy."""
    machine = start("device 0\ndevice 1\nfault cuptiPmSamplingSetConfig 35", gpu(0), gpu(1))
    for device in (0, 1):
        machine.sink.wait_for_state("no_permission", "NVreg_RestrictProfilingToAdminUsers=0", device)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "NVreg_RestrictProfilingToAdminUsers=0" in warnings[0]


def test_k10_an_unusable_library(start: Start, tmp_path: Path) -> None:
    """K10: the state says which file; the helper ends and is not started again at once; nothing is counted."""
    library = tmp_path / "odd.so"
    library.write_text("no library")
    machine = start("device 0", library=str(library))
    machine.sink.wait_for_state("unsupported", str(library))
    machine.sampler.pause(0, "")  # returns once the helper is gone
    assert helpers() == []
    assert machine.sink.restarts() == []


def test_a_driver_that_is_not_ready_is_asked_again(start: Start) -> None:
    """The fabric manager is still starting: sampling begins soon after it has."""
    machine = start("device 0\nfault cuInit 802")
    machine.sink.wait_for_state("failed", "system_not_ready")
    machine.scenario.rewrite("costs none\ndevice 0")
    machine.sink.wait_for_new_windows()


ROGUE = """
import struct, sys, time
from gpu_hpc_exporter.sources.pm_sampling.protocol import *
sys.stdout.buffer.write({data})
sys.stdout.flush()
sys.stdin.buffer.read()
time.sleep(60)
"""
WINDOW = "encode(Windows(sys.argv[1], [{}], [{}], {{'sm_active': [{}]}}))"
RAW_WINDOW = (
    WINDOW.format("time.monotonic_ns()", 10**7, 0.5) + ".replace(struct.pack('>d', 0.5), struct.pack('>d', 1.5))"
)
DATA = {
    "no message of ours": "b'\\x03\\0\\0\\0abc'",
    "a frame of": "b'\\xff' * 8",
    "not told to sample": "encode(GpuState('GPU-other', 'active'))",
    "from before it was started": WINDOW.format("time.monotonic_ns() - 2 * 10**9", 10**7, 0.5),
    "far longer than": WINDOW.format("time.monotonic_ns()", 2 * 10**9, 0.5),
    "sm_active above what can be true": RAW_WINDOW,
    "from the future": "encode(Windows(sys.argv[1], [time.monotonic_ns() + 10**10], [10**7], {'sm_active': [0.5]}))",
}


@pytest.mark.parametrize("reason", DATA)
def test_a_helper_that_is_not_ours(start: Start, tmp_path: Path, reason: str) -> None:
    """What no helper of ours sends ends it, though it does not want to end; nothing of it is taken."""
    script = tmp_path / "rogue.py"
    script.write_text(ROGUE.format(data=DATA[reason]))
    machine = start("device 0", helper=(sys.executable, str(script), uuid_of(0)), library="")
    machine.sink.wait_for_state("failed", reason)
    machine.sink.wait_for(machine.sink.restarts)
    assert {state for state, _ in machine.sink.states()} == {"failed"}
    assert machine.sink.all(Window) == []


WRAPPER = """#!/bin/sh
exec 3<&0
{python} -m gpu_hpc_exporter.pm_helper "$@" <&3 &
{then}
"""
UNTIL_TOLD = 'until [ -e "$WRAPPED/end" ]; do sleep 0.05; done'


@pytest.mark.parametrize("then", ["wait", "sleep 1000", pytest.param(UNTIL_TOLD, id="until told")])
def test_what_a_wrapper_started_ends_with_it(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """The whole group is killed, though the helper is stopped; a wrapper that exits has ended, whoever is left."""
    mark = tmp_path.as_posix()
    monkeypatch.setenv("WRAPPED", mark)
    script = tmp_path / "wrap.sh"
    script.write_text(WRAPPER.format(python=sys.executable, then=then))
    script.chmod(0o755)
    machine = start("device 0", helper=(str(script),))
    machine.sink.wait_for(machine.sink.windows)
    pids = [pid for pid in group_members(mark) if "pm_helper" in Path(f"/proc/{pid}/cmdline").read_text()]
    assert len(pids) == 1
    if then == UNTIL_TOLD:
        (tmp_path / "end").touch()
        machine.sink.wait_for_state("failed", "has ended")
    else:
        os.kill(pids[0], signal.SIGSTOP)
    assert machine.sampler.pause(600, "asked for")
    monkeypatch.delenv("WRAPPED")
    assert [pid for pid in group_members(mark) if pid != os.getpid()] == []


def test_a_helper_that_cannot_be_killed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pause does not claim that what runs with more privilege, or hangs in the driver, has ended; later it has."""
    machine = start("device 0")
    machine.sink.wait_for_new_windows()
    (pid,) = helpers()
    with monkeypatch.context() as patch:
        patch.setattr(process, "_EXIT_S", 0.1)
        patch.setattr(process, "_KILL_S", 0.1)
        real = os.killpg

        def denied(group: int, _: int) -> None:
            real(group, 0)
            raise PermissionError(1, "Operation not permitted")

        patch.setattr(os, "killpg", denied)
        os.kill(pid, signal.SIGSTOP)
        assert not machine.sampler.pause(600, "asked for")
        assert helpers() == [pid]
    machine.sink.wait_for(lambda: not helpers() or machine.sampler.pause(600, "asked for"))
    assert machine.sampler.pause(600, "asked for")
    assert helpers() == []


def group_members(mark: str) -> list[int]:
    """Living processes that were started with this mark in their environment, children or not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state = stat.read_text().rpartition(")")[2].split()[0]
            if state != "Z" and f"WRAPPED={mark}" in (stat.parent / "environ").read_text("utf-8", "replace"):
                found.append(int(stat.parent.name))
    return found


def test_a_state_from_the_start_and_few_lines(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A helper that has said nothing yet is a state; reasons that change for ever are told, and few are logged."""
    script = tmp_path / "rogue.py"
    said = "time.sleep(0.3) or b''.join(encode(GpuState(sys.argv[1], 'failed', f'{n} odd')) for n in range(500))"
    script.write_text(ROGUE.format(data=said))
    machine = start("device 0", helper=(sys.executable, str(script), uuid_of(0)), library="")
    machine.sink.wait_for(lambda: machine.sink.all_states() == [STARTING])
    machine.sink.wait_for_state("failed", "499 odd")
    assert len(machine.sink.states()) == 500
    assert 0 < len([each for each in caplog.records if "odd" in each.getMessage() and each.levelname != "DEBUG"]) < 10


def test_a_helper_that_is_not_there(start: Start) -> None:
    """A wrong command is a state, not an exception."""
    machine = start("device 0", helper=("/nowhere/helper",))
    machine.sink.wait_for_state("failed", "cannot be started: No such file")
