"""All that docs/benchmarks.md says of a GPU, measured again: for a new chip, a new driver, a new CUPTI, another agent.

    python tests/gpu/all_figures.py FOLDER                  # about an hour with one GPU
    python tests/gpu/all_figures.py FOLDER cost-graph waits  # some of them; --list names all

Each figure leaves FOLDER/NAME.txt, and the status is 1 if one failed. Figures of the kernel agent run side by side, one
on each GPU; what reads every GPU's counters has the machine for itself. Needs what the programs beside it need.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Figure:
    """A command; about how many seconds it takes on an H200; alone: nothing else may run meanwhile; GPUs it needs."""

    name: str
    command: Sequence[str]
    seconds: int
    alone: bool = False
    gpus: int = 1


def program(name: str, file: str, *arguments: str, seconds: int, alone: bool = False) -> Figure:
    return Figure(name, (sys.executable, str(HERE / file), *arguments), seconds, alone)


def agents(what: str, *arguments: str, seconds: int, kind: str = "") -> Figure:
    options = ("--kinds", kind) if kind else ()
    name = f"{what}-{kind}" if kind else what
    return program(name, "agent_figures.py", what, *options, *arguments, seconds=seconds)


def suite(name: str, gpus: int = 1) -> Figure:
    command = (sys.executable, "-m", "pytest", "-s", "-m", "gpu", str(HERE / f"test_{name}.py"))
    return Figure(name, command, seconds=120, alone=True, gpus=gpus)


def all_figures(folder: Path) -> tuple[Figure, ...]:
    """The longest of those that run side by side come first."""
    return (
        *(
            agents("cost", "--seconds", "95", kind=kind, seconds=120)
            for kind in ("eager_step", "tiny", "graph", "layer")
        ),
        *(agents("periods", "--seconds", "105", kind=kind, seconds=125) for kind in ("eager_step", "tiny", "graph")),
        agents("periods", kind="layer", seconds=45),
        agents("lasting", kind="tiny", seconds=250),
        agents("replays", seconds=240),
        *(agents("settings", kind=kind, seconds=190) for kind in ("tiny", "eager_step", "graph")),
        agents("waits", seconds=150),
        agents("endless", seconds=150),
        agents("graphs", seconds=120),
        agents("trace", seconds=90),
        agents("late", seconds=60),
        agents("ends", seconds=90),
        agents("idle", seconds=60),
        agents("forks", seconds=60),
        agents("counts", seconds=40),
        agents("nodes", seconds=40),
        agents("queued", seconds=40),
        agents("threads", seconds=40),
        agents("driver", seconds=40),
        program(
            "capture", "capture.py", "--seconds", "18", str(folder / "recording.jsonl.gz"), seconds=270, alone=True
        ),
        program("switching", "switching.py", "--seconds", "30", seconds=180, alone=True),
        *(suite(name) for name in ("hardware", "kernels", "clocks", "jobs")),
        suite("two_gpus", gpus=2),
        replace(agents("overlap", seconds=180), alone=True, gpus=2),
        *(
            program(f"pm-{what}", "pm_figures.py", what, seconds=180, alone=True)
            for what in ("intervals", "jitter", "l2")
        ),
        *(
            program(f"pm-{what}", "pm_figures.py", what, seconds=180, alone=True)
            for what in ("launches", "kill", "ncu")
        ),
        program("pm-long", "pm_figures.py", "long", seconds=400, alone=True),
        program("throughput", "throughput.py", "--switch", "pause", seconds=150, alone=True),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="figures to measure (default: all)")
    parser.add_argument("--list", action="store_true", help="say the names and how many seconds each takes")
    args = parser.parse_args()
    known = {figure.name: figure for figure in all_figures(args.folder)}
    unknown = sorted(set(args.names) - known.keys())
    if unknown:
        parser.error(f"no figure is called {', '.join(unknown)}: --list names all")
    chosen = [known[name] for name in args.names or known]
    if args.list:
        for figure in chosen:
            say(f"{figure.name:20} {figure.seconds:4} s{'  alone' if figure.alone else ''}")
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    here = gpus()
    for figure in chosen:
        if figure.gpus > here:
            say(f"{figure.name:20} left out: needs {figure.gpus} GPUs")
    sys.exit(max(run([figure for figure in chosen if figure.gpus <= here], args.folder, here), default=0))


def run(chosen: Sequence[Figure], folder: Path, gpus: int) -> Iterable[int]:
    """Measure them; 1 for each that failed."""
    statuses: list[int] = []
    waiting: queue.SimpleQueue[Figure] = queue.SimpleQueue()
    for figure in chosen:
        if not figure.alone:
            waiting.put(figure)

    def on(gpu: int) -> None:
        while not waiting.empty():
            try:
                figure = waiting.get_nowait()
            except queue.Empty:
                return
            statuses.append(measure(figure, folder, {"CUDA_VISIBLE_DEVICES": str(gpu)}))

    threads = [threading.Thread(target=on, args=(gpu,)) for gpu in range(gpus)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses += [measure(figure, folder, {}) for figure in chosen if figure.alone]
    return statuses


def gpus() -> int:
    listed = subprocess.run(["nvidia-smi", "-L"], stdout=subprocess.PIPE, text=True, check=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def measure(figure: Figure, folder: Path, environment: dict[str, str]) -> int:
    """Run one into its file, for three times as long as it should take at most; 1 if it failed."""
    began = time.monotonic()
    with (
        (folder / f"{figure.name}.txt").open("wb") as output,
        subprocess.Popen(
            figure.command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            end = f"status {process.wait(60 + 3 * figure.seconds)}"
        except subprocess.TimeoutExpired:
            end = "took too long"
            os.killpg(process.pid, signal.SIGKILL)
    say(f"{figure.name:20} {time.monotonic() - began:6.0f} s  {end}")
    return int(end != "status 0")


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  the program's output


if __name__ == "__main__":
    main()
