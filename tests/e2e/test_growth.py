"""The exporter's own memory, threads and descriptors, while what it looks at comes and goes."""

from __future__ import annotations

from pathlib import Path

from e2e.machine import Machine, Start
from exporter_process import Samples
from process_figures import status_number

ROUNDS = 14
PROCESSES = 400
"""In each round."""
WARM_UP = 4
"""Rounds until what is filled once is full."""
SCRAPES = 100
FEW_THREADS = 5
"""Of the pools, which have one more where a busy machine holds up those that there are."""
MIB = 2**20


def figures(machine: Machine) -> tuple[float, int, int]:
    """MiB that are resident, threads and open descriptors."""
    pid = machine.exporter.process.pid
    descriptors = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return status_number(pid, "VmRSS") / 1024, round(status_number(pid, "Threads")), descriptors


def used(samples: Samples) -> float | None:
    """By which a round is told from the one before."""
    return samples.get("gpu_hpc_memory_used_bytes", gpu="0")


def scenario(number: int) -> str:
    """A GPU with processes that no other round has."""
    pids = range(100_000 + PROCESSES * number, 100_000 + PROCESSES * (number + 1))
    return "\n".join(
        [f"device 0 sm 0.5 memory_used {number * MIB}", *(f"process 0 pid {pid} memory 8" for pid in pids)]
    )


def test_i04_nothing_grows_with_what_comes_and_goes(start: Start) -> None:
    """I04: thousands of processes and scrapes leave no memory, no thread and no descriptor behind."""
    machine = start(scenario(1))
    seen = []
    for number in range(1, ROUNDS + 1):
        machine.scenario.rewrite(scenario(number))
        machine.exporter.wait_for(lambda samples: used(samples) == number * MIB)  # noqa: B023  called before the next
        for _ in range(SCRAPES):
            machine.exporter.fetch()
        seen.append(figures(machine))
    assert machine.exporter.scrape().one("gpu_hpc_gpu_processes", gpu="0") == PROCESSES
    memory, threads, descriptors = zip(*seen[WARM_UP:], strict=True)
    assert memory[-1] - memory[0] < 3, seen
    assert max(threads) - min(threads) <= FEW_THREADS, seen
    assert max(descriptors) - min(descriptors) <= 2, seen  # a connection may be closing
