"""The driver's lists of processes, read by the real reader through the fake driver, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from e2e.machine import Start, uuid_of
from fake_nvml import Scenario, build

GIB = 1 << 30
U64NA = 2**64 - 1
U32NA = 2**32 - 1

READ = """
import json, sys, time
import pynvml
from gpu_hpc_exporter.sources.nvml.processes import ProcessReader

total, instance, index, times, moments = json.loads(sys.argv[1])
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
if index is not None:
    handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
reader = ProcessReader(handle, "GPU 0", instance, lambda call: None)
for second in moments:
    found = reader.read(total, int(second * 1e9))
begin = time.thread_time()
for _ in range(times):
    reader.read(total, 0)
seconds = (time.thread_time() - begin) / times if times else 0
processes = found.processes and [[p.pid, p.memory_bytes, p.sm_ratio] for p in found.processes]
print(json.dumps([processes if found.processes is not None else None,
                  found.problem, list(found.errors), found.is_unsupported, seconds]))
"""


class Told:
    """What the reader said of the first GPU, or of its MIG instance at an index."""

    def __init__(self, answer: list[Any], calls: Mapping[str, int]) -> None:
        self.calls = calls
        self.processes, self.problem, self.errors, self.is_unsupported, self.seconds = answer
        if self.processes is not None:
            self.processes = [tuple(process) for process in self.processes]


def read(
    directory: Path,
    library: Path,
    text: str,
    *,
    total: float | None = 80 * GIB,
    instance: int | None = None,
    index: int | None = None,
    times: int = 0,
    moments: tuple[float, ...] = (0,),
) -> Told:
    """Run the reader on a machine whose driver does what the scenario says, at these seconds of its life."""
    scenario = Scenario(directory, library, text)
    environment: Mapping[str, str] = {**os.environ, **scenario.env}
    command = [sys.executable, "-c", READ, json.dumps([total, instance, index, times, moments])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return Told(json.loads(done.stdout), scenario.calls())


THREE = "".join(f"process 0 pid {4100 + n} memory {n * GIB}\n" for n in (1, 2, 3))


@pytest.mark.parametrize("stride", [16, 24, 32])
def test_a09_entries_of_every_size_a_driver_has_written_are_read_right(
    tmp_path: Path, library: Path, stride: int
) -> None:
    """A09: the size of an entry is seen, not believed: no pid is scrambled, no memory is given to another process."""
    told = read(tmp_path, library, f"device 0\nprocess_stride {stride}\n{THREE}")
    assert told.processes == [(4101, GIB, None), (4102, 2 * GIB, None), (4103, 3 * GIB, None)]
    assert told.problem is None


@pytest.mark.parametrize("stride", [20, 40, 48])
def test_a09_entries_of_an_unknown_size_are_no_processes(tmp_path: Path, library: Path, stride: int) -> None:
    """A09: a size that nobody knows makes the list worthless, and that is counted."""
    told = read(tmp_path, library, f"device 0\nprocess_stride {stride}\n{THREE}")
    assert (told.processes, told.problem) == (None, "above_range")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("process 0 pid 0", "sentinel"),  # E01: what newer drivers say of a process in another namespace
        (f"process 0 pid {U32NA}", "sentinel"),
        ("process 0 pid 2147483648", "above_range"),
        (f"process 0 pid 9 memory {80 * GIB + 1}", "above_range"),
        (f"process 0 pid 9 memory {U64NA - 1}", "above_range"),
        ("process 0 pid 9 gi 4102", "above_range"),
        ("process 0 pid 9 ci 65", "above_range"),
    ],
)
def test_a09_e01_one_entry_that_cannot_be_true_makes_the_list_worthless(
    tmp_path: Path, library: Path, line: str, problem: str
) -> None:
    """A09, E01: nothing is guessed from the entries around it."""
    told = read(tmp_path, library, f"device 0\n{THREE}{line}\n")
    assert (told.processes, told.problem) == (None, problem)


def test_b04_b13_memory_that_the_driver_does_not_tell_is_absent(tmp_path: Path, library: Path) -> None:
    """B04, B13: U64NA is no number of bytes, whatever the device's total."""
    told = read(tmp_path, library, "device 0\nprocess 0 pid 7 memory U64NA\n", total=16 * GIB)
    assert told.processes == [(7, None, None)]


def test_a_process_in_several_lists_is_one(tmp_path: Path, library: Path) -> None:
    """A client of MPS, or a process that computes and draws, is listed twice."""
    lines = f"process 0 pid 7 memory {GIB}\nprocess 0 pid 7 memory {GIB} type graphics\nprocess 0 pid 8 type mps\n"
    assert read(tmp_path, library, f"device 0\n{lines}").processes == [(7, GIB, None), (8, 0, None)]


def test_more_processes_than_there_was_room_for(tmp_path: Path, library: Path) -> None:
    """The buffer grows as far as it has to."""
    lines = "".join(f"process 0 pid {n} memory 4096 sm 1\n" for n in range(1, 501))
    told = read(tmp_path, library, f"device 0\nprocess_stride 32\n{lines}")
    assert told.processes == [(n, 4096, 0.01) for n in range(1, 501)]


def test_sm_shares(tmp_path: Path, library: Path) -> None:
    """A share where the driver has a sample; percentages that cannot be true are left out."""
    lines = "process 0 pid 7 sm 40\nprocess 0 pid 8\nprocess 0 pid 9 sm 101\nprocess 0 pid 10 sm 0\n"
    told = read(tmp_path, library, f"device 0\n{lines}")
    assert told.processes == [(7, 0, 0.4), (8, 0, None), (9, 0, None), (10, 0, 0.0)]


def test_sm_shares_are_asked_for_seldom(tmp_path: Path, library: Path) -> None:
    """They cost the driver milliseconds: every 15 seconds, and what was said is kept between."""
    told = read(tmp_path, library, "device 0\nprocess 0 pid 7 sm 40\n", moments=(0, 2, 14.9))
    assert told.processes == [(7, 0, 0.4)]
    assert told.calls["nvmlDeviceGetProcessUtilization"] == 1
    told = read(tmp_path, library, "device 0\nprocess 0 pid 7 sm 40\n", moments=(0, 15, 17))
    assert told.calls["nvmlDeviceGetProcessUtilization"] == 2


def test_no_processes_are_a_list_too(tmp_path: Path, library: Path) -> None:
    """Nobody on the GPU is something else than nobody knows."""
    told = read(tmp_path, library, "device 0\n")
    assert (told.processes, told.problem, told.errors, told.is_unsupported) == ([], None, [], False)


def test_mig_instances_have_their_own(tmp_path: Path, library: Path) -> None:
    """An instance's handle gives its processes, without shares of SMs; ids of another instance cannot be true."""
    text = f"device 0\nmig 0 gi 3 ci 0\nprocess 0 pid 7 gi 3 ci 0 memory {GIB} sm 50\nprocess 0 pid 8 gi 4 ci 0\n"
    assert read(tmp_path, library, text, instance=3, index=0).processes == [(7, GIB, None)]
    wrong = read(tmp_path, library, text, instance=5, index=0)
    assert (wrong.processes, wrong.problem) == (None, "above_range")


@pytest.mark.parametrize(
    ("fault", "errors", "is_unsupported", "is_known"),
    [
        ("nvmlDeviceGet*RunningProcesses* 3", [], True, False),
        ("nvmlDeviceGetComputeRunningProcesses* 999", ["unknown"], False, False),
        ("nvmlDeviceGetProcessUtilization 999", ["unknown"], False, True),
        ("nvmlDeviceGetProcessUtilization 3", [], False, True),
        ("nvmlDeviceGetGraphicsRunningProcesses* 3", [], False, True),
    ],
)
def test_what_a_driver_refuses(
    tmp_path: Path, library: Path, *, fault: str, errors: list[str], is_unsupported: bool, is_known: bool
) -> None:
    """Unsupported is said once, an error is counted; a list that is missing takes no other with it."""
    told = read(tmp_path, library, f"device 0\n{THREE}fault {fault}\n")
    assert (told.errors, told.is_unsupported, told.processes is not None) == (errors, is_unsupported, is_known)


def test_a_driver_with_older_functions_only(tmp_path: Path) -> None:
    """Before R510 there is no third version."""
    kinds = ("Compute", "Graphics", "MPSCompute")
    old = build(tmp_path / "old", missing=[f"nvmlDeviceGet{kind}RunningProcesses_v3" for kind in kinds])
    assert read(tmp_path, old, f"device 0\n{THREE}").processes == [(4100 + n, n * GIB, None) for n in (1, 2, 3)]


def test_a_list_that_never_comes_is_named_and_costs_its_gpu_only(start: Start) -> None:
    """A12: the call that hangs is told by its name; the other GPU goes on."""
    hang = "fault nvmlDeviceGetComputeRunningProcesses_v3 device 0 hang\n"
    machine = start(f"device 0\ndevice 1\nprocess 1 pid 7\n{hang}")
    samples = machine.exporter.wait_for(lambda s: bool(s.all("gpu_hpc_driver_call_hung_seconds")))
    assert samples.one("gpu_hpc_driver_call_hung_seconds", uuid=uuid_of(0), call="compute processes") > 3
    assert samples.one("gpu_hpc_gpu_processes", uuid=uuid_of(1)) == 1
    assert machine.exporter.stop() == 0


def test_the_cost_beside_the_drivers_own(tmp_path: Path, library: Path) -> None:
    """What we add to the driver's four calls, which the fake answers in microseconds, is no load for their thread."""
    lines = "".join(f"process 0 pid {n} memory 4096 sm 1\n" for n in range(1, 126))
    told = read(tmp_path, library, f"device 0\n{lines}", times=300)
    assert told.seconds < 0.002
