"""Figures of the kernel agent on a real GPU, as tables for docs/benchmarks.md.

    python tests/gpu/agent_figures.py counts    # every launch and copied byte; durations against torch.profiler's
    python tests/gpu/agent_figures.py nodes     # durations of a graph's kernels across windows, against the same
    python tests/gpu/agent_figures.py queued    # launch to start against torch.profiler's
    python tests/gpu/agent_figures.py trace     # a trace of torch.profiler across the agent's windows
    python tests/gpu/agent_figures.py late      # the same where the profiler is first, and the agent comes later
    python tests/gpu/agent_figures.py idle      # time per launch, loaded but off, and without the agent (needs nvcc)
    python tests/gpu/agent_figures.py cost      # rates of four workloads inside and outside the agent's windows
    python tests/gpu/agent_figures.py periods   # the same over whole periods, at the default duty
    python tests/gpu/agent_figures.py settings  # rates by GPU_HPC_AGENT_RECORDS, between windows and in them
    python tests/gpu/agent_figures.py lasting   # rates before an agent comes late (kernels alone), and after it
    python tests/gpu/agent_figures.py graphs    # graphs before, in and between windows; 30 M nodes (needs nvcc)
    python tests/gpu/agent_figures.py replays   # rates of graphs before and after windows (needs nvcc)
    python tests/gpu/agent_figures.py ends      # exits and kills while tracing (needs nvcc)
    python tests/gpu/agent_figures.py forks     # forked workers of a loader while tracing
    python tests/gpu/agent_figures.py endless   # a kernel that outlasts several windows
    python tests/gpu/agent_figures.py waits     # waits that are longer than windows
    python tests/gpu/agent_figures.py threads   # launches of many threads
    python tests/gpu/agent_figures.py driver    # launches by the driver's functions (needs Triton)
    python tests/gpu/agent_figures.py cupti --cupti PATH  # another libcupti (needs nvcc)
    python tests/gpu/agent_figures.py overlap   # all-reduces beside compute and alone (needs two GPUs)

Needs PyTorch with CUDA and a C compiler.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE
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
    parser.add_argument(
        "--kinds", nargs="+", default=["tiny", "eager_step", "graph", "layer"], help="cost, periods, settings"
    )
    parser.add_argument("--cupti", default="", help="the library of cupti")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), args.kinds, args.cupti)
        for what in args.what:
            say(f"\n## {what}\n")
            FIGURES[what](bench, args.seconds)


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  the program's output


class Bench:
    """The built agent, and a directory for its files."""

    def __init__(self, directory: Path, kinds: list[str], cupti: str) -> None:
        self.directory = directory
        self.kinds = kinds
        self.cupti = cupti
        self.files = directory / "agents"
        self.files.mkdir()
        self.library = directory / "libgpu_hpc_agent.so"
        sources = sorted(str(path) for path in AGENT.glob("*.c"))
        flags = ["-std=c11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread"]
        subprocess.run(["cc", *flags, "-o", str(self.library), *sources, "-ldl", "-lm"], check=True)

    def environment(self, **settings: str) -> dict[str, str]:
        """Of a process that the agent is loaded into."""
        return {**os.environ, "CUDA_INJECTION64_PATH": str(self.library), **self.settings(**settings)}

    def settings(self, **settings: str) -> dict[str, str]:
        """The agent's variables, without those that load it."""
        named = {f"GPU_HPC_AGENT_{name.upper()}": value for name, value in settings.items()}
        return {"GPU_HPC_AGENT_DIRECTORY": str(self.files), **named}

    def late(self, **settings: str) -> dict[str, str]:
        """Of a process that loads the agent itself, when it wants to."""
        return {**os.environ, "LATE_AGENT": str(self.library), **self.settings(**settings)}

    def program(self, name: str) -> str:
        """Compiles a CUDA program of this directory; it finds PyTorch's libcupti, as it has none of its own."""
        wheels = importlib.util.find_spec("nvidia")
        places = [Path(place) for place in (wheels.submodule_search_locations or ())] if wheels else []
        folders = {str(found.parent) for place in places for found in place.glob("*/lib/libcupti.so.*")}
        os.environ["LD_LIBRARY_PATH"] = ":".join([*sorted(folders), os.environ.get("LD_LIBRARY_PATH", "")])
        made = self.directory / name
        subprocess.run(["nvcc", "-O2", "-o", str(made), str(HERE / f"{name}.cu"), "-lcuda"], check=True)
        return str(made)

    def file(self) -> Path:
        """The only agent's file."""
        [found] = self.files.glob("*.shm")
        return found

    def clear(self) -> None:
        for old in self.files.iterdir():
            old.unlink()

    def load(
        self, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> tuple[Any, agent_file.Snapshot | None]:
        """What the load says, and its agent's file, which outlives it."""
        self.clear()
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
        f"{header.cupti_version}; state {snapshot.state}, flags {header.flags}, error {header.error_call!r} "
        f"{header.error_code}"
    )


def nodes(bench: Bench, seconds: float) -> None:
    """Durations of a graph's kernels, replayed across windows, against torch.profiler's."""
    environment = bench.environment(window_seconds="0.3", period_seconds="1", budget="100")
    told, _none = bench.load("nodes", "--seconds", str(seconds or 20), environment=environment)
    reference, _none = bench.load("nodes", "--profile")
    say("| kernel | counted | mean, us | longest | torch.profiler: count | mean | longest |\n" + "|---" * 7 + "|")
    wanted = {demangled(name): value for name, value in reference["nodes"].items()}
    for name, (count, mean, longest) in told["nodes"].items():
        theirs = wanted.get(demangled(name), (0, float("nan"), float("nan")))
        ours = f"{count} | {mean:.2f} | {longest:.2f}"
        say(f"| {demangled(name)[:60]} | {ours} | {theirs[0]} | {theirs[1]:.2f} | {theirs[2]:.2f} |")
    say(f"agent: { {name: value for name, value in told.items() if name != 'nodes'} }")


def demangled(name: str) -> str:
    return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()


def queued(bench: Bench, _: float) -> None:
    """Mean launch to start of a small kernel behind one of a known length, against torch.profiler's."""
    told, _none = bench.load("queued", environment=bench.environment(mode="continuous", budget="1"))
    reference, _none = bench.load("queued", "--profile")
    say("| cycles before | counted | mean, us | torch.profiler: count | mean, us | difference |\n" + "|---" * 6 + "|")
    for cycles, (count, mean) in told["queued"].items():
        number, theirs = reference["queued"][cycles]
        say(f"| {cycles} | {count} | {mean:.2f} | {number} | {theirs:.2f} | {mean - theirs:+.2f} us |")


def trace(bench: Bench, seconds: float) -> None:
    """What torch.profiler traces of known work, without the agent and with it, in a window or after one."""
    agent = bench.environment(**THIRD)
    for label, options, environment in (
        ("without", (), None),
        ("with the agent, 1 s in 3 s, from within a window", (), agent),
        ("from between windows", ("--between",), agent),
    ):
        told, _ = bench.load("trace", "--seconds", str(seconds or 30), *options, environment=environment)
        say_traced(label, told)


def say_traced(label: str, told: Mapping[str, Any]) -> None:
    say(
        f"{label}: {told['traced']} of {told['launched']} kernels, {told['waits']} of {told['waited']} waits and "
        f"{told['events']} events in the trace; agent then: {told['agent']}"
    )


THIRD = {"period_seconds": "3", "budget": "1"}


def late(bench: Bench, seconds: float) -> None:
    """The same where the profiler is at work already when the agent comes."""
    told, _ = bench.load("trace", "--seconds", str(seconds or 30), "--first", environment=bench.late(**THIRD))
    say_traced("the profiler first", told)


def idle(bench: Bench, _: float) -> None:
    """An empty kernel's launch on one core: agent loaded but off, waiting between windows, and not there."""
    program = bench.program("launches")
    core = str(max(os.sched_getaffinity(0)))
    ways: dict[str, Mapping[str, str] | None] = {
        "off": bench.environment(mode="off"),
        "waiting": bench.environment(period_seconds="30", window_seconds="0.01"),
    }
    times: dict[str, list[float]] = {"without": [], **{way: [] for way in ways}}
    for _ in range(10):
        for way in random.sample(list(times), len(times)):
            done = subprocess.run(
                ["taskset", "-c", core, program],
                env=ways.get(way),
                input="2000000\n100000\n",  # the first window is within a quarter of a period: while these run
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
    say("| workload | windows | c_on | 95 % interval | at 1 s in 10 s | agent |\n" + "|---" * 6 + "|")
    environment = bench.environment(period_seconds="1.6", budget="100")
    for kind in bench.kinds:
        told, _ = bench.load("blocks", "--kind", kind, "--seconds", str(seconds or 68), environment=environment)
        agent = told["agent"]
        state = (
            f"{agent['state']}, {agent['windows_published']} published, {agent['windows_discarded']} discarded; "
            f"records kept {agent['records_kept']}, dropped {agent['records_dropped']}, "
            f"invalid {agent['records_invalid']}, unmatched {agent['records_unmatched']}; flags {agent['flags']}"
        )
        slower = slowdowns(told["chunks"], told["intervals"])
        if not slower:
            say(f"| {kind} | 0 | | | | {state} |")
            continue
        state += f"; {told['kernels'] / steps_in(told['chunks'], told['intervals']):.2f} kernels a step of them"
        mean, (low, high) = statistics.mean(slower), interval(slower)
        say(f"| {kind} | {len(slower)} | {mean:.4f} | {low:.4f} to {high:.4f} | {mean / 10:.4f} | {state} |")


def periods(bench: Bench, seconds: float) -> None:
    """How much slower each workload is over whole periods, a quarter as long as the default, than between windows."""
    say("| workload | periods | their seconds | slower by | 95 % interval | agent's estimate |\n" + "|---" * 6 + "|")
    for kind in bench.kinds:
        quarter = bench.environment(window_seconds="0.25", period_seconds="2.5")
        length = seconds or PERIODS_SECONDS[kind]
        told, _ = bench.load("blocks", "--kind", kind, "--seconds", str(length), environment=quarter)
        chunks, intervals = told["chunks"], told["intervals"]
        begins = [begin for begin, _ in intervals]
        found = []
        for (begin, end), after in zip(intervals, begins[1:], strict=False):
            whole, between = per_step(chunks, begin, after), per_step(chunks, end, after)
            if whole is not None and between is not None:
                found.append(whole / between - 1)
        if len(found) < 2:
            say(f"| {kind} | {len(found)} | | | | {told['agent']} |")
            continue
        low, high = interval(found)
        length = (begins[-1] - begins[0]) / 1e9
        say(
            f"| {kind} | {len(found)} | {length:.0f} | {statistics.mean(found):.4f} | {low:.4f} to {high:.4f} "
            f"| {told['agent']['overhead_ratio']:.4f} |"
        )


PERIODS_SECONDS = {"tiny": 105, "eager_step": 45, "graph": 75, "layer": 25}
"""Seven periods of each, as long as the agent's schedule makes them."""


def settings(bench: Bench, seconds: float) -> None:
    """How long a step takes between the agent's windows, and in them, by what it records; processes in turns."""
    say(
        "| workload | recorded | a step between windows, us: median (all) | more | in windows | more |\n"
        + "|---" * 6
        + "|"
    )
    for kind in bench.kinds:
        steps: dict[str, list[tuple[float, float]]] = {records: [] for records in RECORDED}
        for _ in range(SETTINGS_TURNS):
            for records in random.sample(RECORDED, len(RECORDED)):
                environment = bench.environment(**HALF, records=records) if records else None
                told, _none = bench.load(
                    "blocks", "--kind", kind, "--seconds", str(seconds or 5), environment=environment
                )
                steps[records].append(step_times(told["chunks"], told["intervals"]))
        plain = statistics.median(between for between, _ in steps[NOTHING])
        for records, times in steps.items():
            between, inside = (statistics.median(column) for column in zip(*times, strict=True))
            everyone = ", ".join(f"{each:.1f}" for each, _ in times)
            more = f"{between / plain - 1:+.2%} | {inside:.1f} | {inside / plain - 1:+.2%}"
            say(f"| {kind} | {records or 'without the agent'} | {between:.1f} ({everyone}) | {more} |")


NOTHING = ""
RECORDED = [
    NOTHING,
    "kernels",
    "kernels,copies",
    "kernels,waits,copies",
    "kernels,calls",
    "kernels,calls,copies",
    "kernels,calls,copies,driver",
]
HALF_NS = 500_000_000
HALF = {"window_seconds": "0.5", "period_seconds": "1", "budget": "100"}
SETTINGS_TURNS = 2


def step_times(chunks: list[tuple[int, int, int]], intervals: list[tuple[int, int]]) -> tuple[float, float]:
    """Median microseconds of a step, in pauses and in windows; without windows both in half seconds."""
    windows = [(opened, closed) for opened, closed in intervals if closed]
    pauses = [(closed, opened) for (_, closed), (opened, _) in pairwise(windows)]
    if not windows:
        windows = pauses = [(begin, begin + HALF_NS) for begin in range(chunks[0][0], chunks[-1][1], HALF_NS)]

    def median_of(spans: list[tuple[int, int]]) -> float:
        steps = [per_step(chunks, *span) for span in spans]
        return statistics.median(step for step in steps if step is not None) / 1000

    return median_of(pauses), median_of(windows)


def lasting(bench: Bench, seconds: float) -> None:
    """Time per step after the agent's last window, over that before the agent was loaded; processes in turns."""
    say("| workload | without the agent | after its windows | ratio, 95 % interval |\n" + "|---" * 4 + "|")
    for kind in bench.kinds:
        ratios: dict[str, list[float]] = {"without": [], "with": []}
        ways = {"without": None, "with": bench.late(period_seconds="1", window_seconds="0.5", budget="100")}
        for _ in range(LASTING_PAIRS):
            for way in random.sample(list(ways), 2):
                options = ["--kind", kind, "--seconds", str(seconds or 3)]
                ratios[way].append(bench.load("lasting", *options, environment=ways[way])[0]["ratio"])
        pairs = [late / plain for late, plain in zip(ratios["with"], ratios["without"], strict=True)]
        low, high = interval(pairs)
        plain, late = (statistics.mean(ratios[way]) for way in ratios)
        say(f"| {kind} | {plain:.4f} | {late:.4f} | {statistics.mean(pairs):.4f} ({low:.4f} to {high:.4f}) |")


LASTING_PAIRS = 6


def steps_in(chunks: list[tuple[int, int, int]], intervals: list[tuple[int, int]]) -> float:
    """How many steps the program made while it was traced: known work, of which none may be missing."""
    return sum(
        count * max(0, min(end, closed) - max(begin, opened)) / (end - begin)
        for opened, closed in intervals
        if closed
        for begin, end, count in chunks
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


class Graphs:
    """graphs.cu at work, and the agent in it, if any."""

    def __init__(self, bench: Bench, environment: Mapping[str, str] | None) -> None:
        bench.clear()
        self._bench = bench
        self._process = subprocess.Popen([bench.program("graphs")], env=environment, stdin=PIPE, stdout=PIPE, text=True)
        self.replayed: dict[bool, int] = {True: 0, False: 0}
        """Nodes by whether the agent traced."""
        self._tracing = False

    def ask(self, command: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise RuntimeError(f"graphs.cu ended at {command!r}")
        return answer

    def replay(self, graph: int, nodes: int, seconds: float) -> float:
        """Replays a graph for about so long; nodes per second."""
        count, took = 8, 0.0
        total, spent = 0, 0.0
        while spent < seconds:
            took = float(self.ask(f"replay {graph} {count}"))
            total, spent = total + count, spent + took
            count = max(1, min(round(count * 0.1 / took), 100_000))
        self.replayed[self._tracing] += total * nodes
        return total * nodes / spent

    def trace(self, *, on: bool) -> agent_file.Snapshot:
        """Start or stop the agent, and wait until it has: then all is published."""
        if self.ask("start" if on else "stop") != "0":
            raise RuntimeError("no agent in graphs.cu")
        self._tracing = on
        wanted = agent_file.State.TRACING if on else agent_file.State.PAUSED
        return agent_file.wait_for(self._bench.file(), lambda s: s.state[0] == wanted, 60)

    def snapshot(self) -> agent_file.Snapshot:
        return agent_file.read(self._bench.file())

    def end(self) -> int:
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(30)


NODES = 500
"""Of each graph."""


def graphs(bench: Bench, seconds: float) -> None:
    """Graphs in two contexts, captured before, in and between windows; then 30 M nodes; rates before and after."""
    plain = Graphs(bench, None)
    growth = memory_of_graphs(plain)
    say(f"GPU memory of the same graphs without the agent: {growth:+.0f} MiB; exit status {plain.end()}")
    work = Graphs(bench, bench.environment(mode="continuous", budget="100"))
    early = captured(work)
    agent_file.wait_for(bench.file(), lambda s: s.state[0] == agent_file.State.PAUSED, 60)
    memory = int(work.ask("memory"))
    all_graphs = list(early)
    for number in range(4):
        work.trace(on=True)
        if number == 1:
            all_graphs += captured(work)
        for graph in all_graphs:
            work.replay(graph, NODES, 0.3)
        work.trace(on=False)
        if number == 2:
            all_graphs += captured(work)
        for graph in all_graphs:
            work.replay(graph, NODES, 0.1)
    told_of(work, "graphs before, in and between windows", memory)
    while work.replayed[True] < MANY_NODES:
        work.trace(on=True)
        for graph in all_graphs:
            work.replay(graph, NODES, seconds or 1)
        work.trace(on=False)
        told_of(work, "soak", memory)
    say(f"exit status {work.end()}")


def replays(bench: Bench, seconds: float) -> None:
    """Rates before the first window and right after others, by the length of the nodes; then nodes are not wanted."""
    for clocks in (0, *NODE_CLOCKS):
        for way in ("without", "with"):
            work = Graphs(bench, bench.environment(mode="continuous", budget="100") if way == "with" else None)
            early = captured(work, clocks)
            if way == "with":
                agent_file.wait_for(bench.file(), lambda s: s.state[0] == agent_file.State.PAUSED, 60)
            before = [work.replay(early[i % 2], NODES, seconds or 0.4) for i in range(10)]
            after = []
            for number in range(10):
                if way == "with":
                    work.trace(on=True)
                    work.replay(early[number % 2], NODES, 0.2)
                    work.trace(on=False)
                after.append(work.replay(early[number % 2], NODES, seconds or 0.4))
            ratios = [b / a for a, b in zip(before, after, strict=True)]
            low, high = interval(ratios)
            say(
                f"nodes of {1e6 / statistics.mean(before):.2f} us, {way} windows: rate after, of that before: "
                f"{statistics.mean(ratios):.4f} ({low:.4f} to {high:.4f}); exit status {work.end()}"
            )
    without_nodes(bench)


NODE_CLOCKS = (4000,)
"""2 us."""


def captured(work: Graphs, clocks: int = 0) -> list[int]:
    """A graph in each context, which has run."""
    made = [int(work.ask(f"graph {context} {NODES} {clocks}")) for context in (0, 1)]
    for graph in made:
        work.replay(graph, NODES, 0.2)
    return made


def memory_of_graphs(work: Graphs) -> float:
    """What four more graphs take of the GPU's memory, MiB, after the first two."""
    captured(work)
    memory = int(work.ask("memory"))
    captured(work)
    captured(work)
    return (int(work.ask("memory")) - memory) / (1 << 20)


def without_nodes(bench: Bench) -> None:
    """Replays where nodes are not wanted: the window that shows the first graph ends, later ones have no kernels."""
    work = Graphs(bench, bench.environment(mode="continuous", budget="100", graph_nodes="0"))
    graph = captured(work)[0]
    agent_file.wait_for(bench.file(), lambda s: s.state[0] == agent_file.State.PAUSED, 60)
    work.trace(on=True)
    work.replay(graph, NODES, 2)
    work.trace(on=False)
    header, device = work.snapshot().header, work.snapshot().device()
    say(
        f"nodes not wanted: {header.node_records} records of nodes, {device.graph_launches_untraced} replays untraced, "
        f"{device.graph_launches_traced} traced, of {work.replayed[True] // NODES}; exit status {work.end()}"
    )


MANY_NODES = 30_000_000


def told_of(work: Graphs, label: str, memory: int) -> None:
    """What the agent told of the nodes so far."""
    snapshot = work.snapshot()
    header, device = snapshot.header, snapshot.device()
    counted = sum(kernel.executions - kernel.launches for kernel in snapshot.slots())
    growth = (int(work.ask("memory")) - memory) / (1 << 20)
    say(
        f"{label}: {counted} of {work.replayed[True]} nodes; replays traced {device.graph_launches_traced}, untraced "
        f"{device.graph_launches_untraced}; dropped {header.records_dropped}, invalid {header.records_invalid}; "
        f"windows {header.windows_published}, discarded {header.windows_discarded}; GPU memory {growth:+.0f} MiB; "
        f"state {snapshot.state}; CUPTI {header.cupti_version}"
    )


def ends(bench: Bench, _: float) -> None:
    """A program ends 20 times while it is traced, and is killed 20 times."""
    program = bench.program("launches")
    environment = bench.environment(mode="continuous", budget="100")
    codes: list[int] = []
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(20):
        for way, chosen in (("with", environment), ("without", None)):
            bench.clear()
            begin = time.monotonic()
            done = subprocess.run([program], env=chosen, input="200000\n300000\n", text=True, stdout=PIPE, check=False)
            seconds[way].append(time.monotonic() - begin)
            codes.append(done.returncode)
    medians = {way: round(statistics.median(times), 3) for way, times in seconds.items()}
    say(f"ends: statuses {sorted(set(codes))}, median seconds of a run {medians}")
    killed = 0
    for _ in range(20):
        bench.clear()
        process = subprocess.Popen([program], env=environment, stdin=PIPE, stdout=PIPE, text=True)
        assert process.stdin is not None
        process.stdin.write("20000000\n")
        process.stdin.flush()
        deadline = time.monotonic() + 20
        while not list(bench.files.glob("*.shm")) and time.monotonic() < deadline:
            time.sleep(0.01)
        snapshot = agent_file.wait_for(bench.file(), lambda s: s.header.windows_published >= 1, 20)
        process.kill()
        process.wait()
        killed += snapshot.header.records_kept > 0
    say(f"kills: {killed} of 20 left a file with records")


def forks(bench: Bench, seconds: float) -> None:
    """Workers of a loader, which are forked while the agent traces."""
    options = ["--seconds", str(seconds or 20)]
    told, _none = bench.load("workers", *options, environment=bench.environment(mode="continuous", budget="1"))
    plain, _none = bench.load("workers", *options)
    say(f"forks: {told['batches']} batches of forked loaders, {plain['batches']} without; {told['files']} agent's file")


def endless(bench: Bench, seconds: float) -> None:
    """A kernel that lasts for longer than the agent waits for records, in duty and in continuous mode."""
    for mode in ("duty", "continuous"):
        environment = bench.environment(mode=mode, period_seconds="3", budget="1")
        told, _ = bench.load("endless", "--seconds", str(seconds or 60), environment=environment)
        say(
            f"{mode}: the kernel took {told['lasted']:.1f} s; agent then: {told['during']}; 15 s later: {told['after']}"
        )


def waits(bench: Bench, seconds: float) -> None:
    """Share of the time that a program waits, by its own clock and as the agent tells it, by the length of a wait."""
    for length in (seconds,) if seconds else (0.05, 0.4, 3):
        for mode in ("duty", "continuous"):
            environment = bench.environment(mode=mode, period_seconds="3", budget="1")
            told, _ = bench.load("waits", "--seconds", str(length), environment=environment)
            say(f"waits of {length} s, {mode}: {told}")


def threads(bench: Bench, seconds: float) -> None:
    """Launches of 200 threads: all are counted, with their launches."""
    options = ["--seconds", str(seconds or 20)]
    told, _ = bench.load("threads", *options, environment=bench.environment(mode="continuous", budget="100"))
    say(f"threads: {told}")


def driver(bench: Bench, seconds: float) -> None:
    """Kernels launched by the driver's functions, whose calls are recorded where that is asked for."""
    environment = bench.environment(period_seconds="2", budget="1", records="kernels,calls,copies,driver")
    told, _ = bench.load("driver_launches", "--seconds", str(seconds or 15), environment=environment)
    say(f"driver: {told}")


def cupti(bench: Bench, _: float) -> None:
    """Launches counted through the libcupti that is named, which is loaded before any other."""
    program = bench.program("launches")
    bench.clear()
    environment = {**bench.environment(mode="continuous", budget="100"), "LD_PRELOAD": bench.cupti}
    with subprocess.Popen([program], env=environment, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("1\n")
        process.stdin.flush()
        process.stdout.readline()
        agent_file.wait_for(bench.file(), lambda s: s.state[0] in {agent_file.State.TRACING, agent_file.State.OFF}, 30)
        process.stdin.write("100000\n")
        process.stdin.flush()
        process.stdout.readline()
        published = agent_file.read(bench.file()).header.windows_published
        snapshot = agent_file.wait_for(bench.file(), lambda s: s.header.windows_published >= published + 2, 30)
        process.stdin.close()
    header, device = snapshot.header, snapshot.device()
    say(
        f"CUPTI {header.cupti_version}: {sum(k.executions for k in snapshot.slots())} of 100000 launches, mean launch "
        f"to start {device.queue_ns / max(1, sum(device.queue_buckets)) / 1000:.2f} us, invalid "
        f"{header.records_invalid}, unmatched {header.records_unmatched}; state {snapshot.state}; status "
        f"{process.returncode}"
    )


def overlap(bench: Bench, seconds: float) -> None:
    """Share of all-reduces' time that compute covers, from the agent and from torch.profiler; the UUIDs of the GPUs."""
    for kind in ("beside", "alone"):
        for options in ([], ["--profile"]):
            bench.clear()
            meeting = bench.directory / f"meeting-{kind}-{len(options)}"
            command = [sys.executable, str(HERE / "agent_load.py"), "reduce", "--kind", kind, *options]
            plain = {} if options else bench.environment(period_seconds="3", budget="1")
            ranks = []
            for rank, visible in enumerate(("0,1", "1,0")):
                own = {"RANK": str(rank), "RENDEZVOUS": str(meeting), "CUDA_VISIBLE_DEVICES": visible}
                environment = {**os.environ, **plain, **own}
                arguments = ["--seconds", str(seconds or 15)]
                ranks.append(subprocess.Popen([*command, *arguments], env=environment, stdout=PIPE, text=True))
            for rank, process in enumerate(ranks):
                output = process.communicate(timeout=200)[0]
                told = json.loads(output.splitlines()[-1])
                say(f"{kind}, {'torch.profiler' if options else 'agent'}, rank {rank}: {told}")


FIGURES = {
    figure.__name__: figure
    for figure in (
        *(counts, nodes, queued, trace, late, idle, cost, periods, settings, lasting, graphs, replays, ends, forks),
        *(endless, waits, threads, driver, cupti, overlap),
    )
}


if __name__ == "__main__":
    main()
