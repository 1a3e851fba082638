"""Figures of the kernel agent on a real GPU, as tables for docs/benchmarks.md.

    python tests/gpu/agent_figures.py counts    # every launch and copied byte; durations against torch.profiler's
    python tests/gpu/agent_figures.py trace     # a trace of torch.profiler across the agent's windows
    python tests/gpu/agent_figures.py idle      # time per launch, loaded but off, and without the agent (needs nvcc)
    python tests/gpu/agent_figures.py cost      # rates of four workloads inside and outside the agent's windows

Needs PyTorch with CUDA and a C compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fake_activity import agent_file
from gpu.agent_load import COPIES

HERE = Path(__file__).resolve().parent
AGENT = HERE.parents[1] / "exporter/agent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=FIGURES)
    parser.add_argument("--seconds", type=float, default=0.0, help="length of a run (default: each figure's own)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory))
        for what in args.what:
            say(f"\n## {what}\n")
            FIGURES[what](bench, args.seconds)


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  the program's output


class Bench:
    """The built agent, and a directory for its files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = directory / "agents"
        self.files.mkdir()
        self.library = directory / "libgpu_hpc_agent.so"
        sources = sorted(str(path) for path in AGENT.glob("*.c"))
        flags = ["-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
        subprocess.run(["cc", *flags, "-o", str(self.library), *sources, "-ldl", "-lm"], check=True)

    def environment(self, **settings: str) -> dict[str, str]:
        """Of a process that the agent is loaded into."""
        named = {f"GPU_HPC_AGENT_{name.upper()}": value for name, value in settings.items()}
        agent = {"CUDA_INJECTION64_PATH": str(self.library), "GPU_HPC_AGENT_DIRECTORY": str(self.files)}
        return {**os.environ, **agent, **named}

    def load(
        self, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> tuple[Any, agent_file.Snapshot | None]:
        """What the load says, and its agent's file, which outlives it."""
        for old in self.files.iterdir():
            old.unlink()
        command = [sys.executable, str(HERE / "agent_load.py"), *arguments]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
        found = list(self.files.glob("*.shm"))
        return json.loads(done.stdout), agent_file.read(found[0]) if found else None


def counts(bench: Bench, _: float) -> None:
    """Continuous tracing of known work: every launch and byte; mean durations against torch.profiler's."""
    told, snapshot = bench.load("counts", environment=bench.environment(mode="continuous", budget="1"))
    assert snapshot is not None
    reference, _none = bench.load("profile")
    kernels: dict[str, tuple[int, float]] = {}
    for kernel in snapshot.slots():
        name = snapshot.name(kernel)
        count, ns = kernels.get(name, (0, 0.0))
        kernels[name] = (count + kernel.executions, ns + kernel.ns)
    say(f"asked for: {told}")
    say("| kernel | counted | mean, us | torch.profiler: count | mean, us | difference |\n|---|---|---|---|---|---|")
    wanted = {demangled(name): value for name, value in reference["kernels"].items()}
    for name, (count, ns) in sorted(kernels.items(), key=lambda item: -item[1][1]):
        mean = ns / count / 1000
        other, theirs = wanted.get(demangled(name), (0, float("nan")))
        say(f"| {demangled(name)[:60]} | {count} | {mean:.3f} | {other} | {theirs:.3f} | {mean - theirs:+.3f} us |")
    for label, (direction, memory) in {
        "h2d pinned": (agent_file.H2D, agent_file.PINNED),
        "h2d pageable": (agent_file.H2D, agent_file.PAGEABLE),
        "d2h pinned": (agent_file.D2H, agent_file.PINNED),
    }.items():
        copies = snapshot.copies(direction, memory)
        number, size = COPIES[label]
        say(f"copies {label}: {copies.count} of {number}, {copies.bytes} of {number * size} bytes")
    device = snapshot.device()
    queued = sum(device.queue_buckets)
    say(f"launch to start: mean {device.queue_ns / max(1, queued) / 1000:.2f} us of {queued}")
    header = snapshot.header
    say(
        f"records kept {header.records_kept}, dropped {header.records_dropped}, invalid {header.records_invalid}, "
        f"unmatched {header.records_unmatched}; windows {header.windows_published}, discarded "
        f"{header.windows_discarded}; agent's thread {header.agent_cpu_ns / 1e6:.1f} ms of CPU; CUPTI "
        f"{header.cupti_version}; state {snapshot.state}, error {header.error_call!r} {header.error_code}"
    )


def demangled(name: str) -> str:
    return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()


def trace(bench: Bench, seconds: float) -> None:
    """torch.profiler's trace has every kernel, with the agent and without."""
    for label, environment in (
        ("without", None),
        ("with the agent, 1 s in 3 s", bench.environment(period_seconds="3", budget="1")),
    ):
        told, _ = bench.load("trace", "--seconds", str(seconds or 10), environment=environment)
        say(f"{label}: {told['traced']} of {told['launched']} kernels in the trace; agent then: {told['agent']}")


def idle(bench: Bench, _: float) -> None:
    """An empty kernel's launch on one core: agent loaded but off, waiting between windows, and not there."""
    program = bench.directory / "launches"
    subprocess.run(["nvcc", "-O2", "-o", str(program), str(HERE / "launches.cu")], check=True)
    core = str(max(os.sched_getaffinity(0)))
    ways: dict[str, Mapping[str, str] | None] = {
        "off": bench.environment(mode="off"),
        "waiting": bench.environment(period_seconds="3600", window_seconds="0.01"),
    }
    times: dict[str, list[float]] = {"without": [], **{way: [] for way in ways}}
    for _ in range(10):
        for way in random.sample(list(times), len(times)):
            done = subprocess.run(
                ["taskset", "-c", core, str(program)],
                env=ways.get(way),
                input="200000\n100000\n",
                capture_output=True,
                text=True,
                check=True,
            )
            times[way].append(float(done.stdout.split()[1]))
    for way in ways:
        differences = [a - b for a, b in zip(times[way], times["without"], strict=True)]
        low, high = interval(differences)
        say(
            f"{way}: {statistics.mean(times[way]):.0f} ns a launch, without {statistics.mean(times['without']):.0f}; "
            f"difference {statistics.mean(differences):+.0f} ns (95 % interval of the mean {low:+.0f} to {high:+.0f})"
        )


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the mean, by bootstrap."""
    means = sorted(statistics.mean(random.choices(values, k=len(values))) for _ in range(2000))
    return means[50], means[1949]


def cost(bench: Bench, seconds: float) -> None:
    """c_on: how much slower each workload is while the agent traces, from blocks of 1 s in one process."""
    say("| workload | windows | c_on | 95 % interval | at 1 s in 10 s | records | agent |\n" + "|---" * 7 + "|")
    environment = bench.environment(period_seconds="1.6", budget="100")
    for kind in ("tiny", "eager_step", "graph", "layer"):
        told, _ = bench.load("blocks", "--kind", kind, "--seconds", str(seconds or 68), environment=environment)
        slower = slowdowns(told["chunks"], told["intervals"])
        if not slower:
            say(f"| {kind} | 0 | | | | | {told['agent']} |")
            continue
        mean, (low, high) = statistics.mean(slower), interval(slower)
        agent = told["agent"]
        say(
            f"| {kind} | {len(slower)} | {mean:.4f} | {low:.4f} to {high:.4f} | {mean / 10:.4f} "
            f"| {agent['records_kept']} kept, {agent['records_dropped']} dropped | {agent['state']} |"
        )


def slowdowns(chunks: list[tuple[int, int, int]], intervals: list[tuple[int, int]]) -> list[float]:
    """Per window: time per step inside it over that in the pauses on either side, less 1."""
    found = []
    for number in range(1, len(intervals) - 1):
        begin, end = intervals[number]
        inside = per_step(chunks, begin, end)
        around = per_step(chunks, intervals[number - 1][1], begin), per_step(chunks, end, intervals[number + 1][0])
        if inside is not None and None not in around:
            found.append(inside / statistics.mean(side for side in around if side is not None) - 1)
    return found


def per_step(chunks: list[tuple[int, int, int]], begin: int, end: int) -> float | None:
    """Nanoseconds a step of the chunks that lie wholly in a span of time."""
    whole = [(stop - start, count) for start, stop, count in chunks if begin <= start and stop <= end]
    return sum(time for time, _ in whole) / sum(count for _, count in whole) if whole else None


FIGURES = {"counts": counts, "trace": trace, "idle": idle, "cost": cost}


if __name__ == "__main__":
    main()
