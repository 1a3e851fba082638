"""Whether a workload notices the exporter: its rate with the exporter running and stopped, in alternating pairs.

    python tests/gpu/throughput.py --pairs 40 --seconds 0.5 --workloads gemm train launch_bound
    python tests/gpu/throughput.py --switch pause --workloads gemm   # PM sampling alone, active and paused

Starts the exporter once and stops and continues it (SIGSTOP, SIGCONT), or pauses and resumes PM sampling, around
short blocks of the workload, in random order within each pair, while something scrapes it. Prints the median of
the ratios rate with / rate without, its 95 % interval (bootstrap), and the SM clocks and what held them down in the
blocks of either kind. Needs PyTorch with CUDA and the exporter installed.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pynvml

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from exporter_process import Exporter, Samples, run_exporter
from gpu.workload import PHASES, Step

SCRAPE_INTERVAL_S = 1.0
SETTLE_S = 0.15
"""The exporter samples ten times a second: let a pair's block begin with a running or a stopped one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one block")
    parser.add_argument("--switch", choices=("stop", "pause"), default="stop")
    parser.add_argument("--workloads", nargs="+", choices=PHASES, default=["gemm", "train", "launch_bound"])
    args = parser.parse_args()
    print("| workload | pairs | median of with / without | 95 % interval |\n|---|---|---|---|")  # noqa: T201  its output
    with tempfile.TemporaryDirectory() as directory, run_exporter(Path(directory)) as exporter:
        stop = threading.Event()
        scraper = threading.Thread(target=scrape_until, args=(exporter, stop))
        scraper.start()
        for name in args.workloads:
            clocks = Clocks()
            ratios = measure(Switch(exporter, args.switch), clocks, PHASES[name](), args.pairs, args.seconds)
            low, high = interval(ratios)
            median = statistics.median(ratios)
            print(f"| {name} | {len(ratios)} | {median:.4f} | {low:.4f}-{high:.4f} |", flush=True)  # noqa: T201  its output
            print(f"\n{clocks}\n", flush=True)  # noqa: T201  its output
        exporter.process.send_signal(signal.SIGCONT)
        stop.set()
        scraper.join()


def scrape_until(exporter: Exporter, stop: threading.Event) -> None:
    """Scrape once a second; while the exporter is stopped a scrape waits, as it should."""
    while not stop.wait(SCRAPE_INTERVAL_S):
        exporter.fetch()


class Switch:
    """Turns the exporter, or its PM sampling, on and off."""

    def __init__(self, exporter: Exporter, how: str) -> None:
        self._exporter = exporter
        self._how = how

    def turn(self, *, on: bool) -> None:
        """Return when it is so."""
        if self._how == "stop":
            self._exporter.process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)
            time.sleep(SETTLE_S)
            return
        self._exporter.ask("/-/resume" if on else "/-/pause?seconds=600")
        # Expositions are kept for a second: a state must be seen, not assumed.
        self._exporter.wait_for(lambda samples: is_sampling(samples) == on, 30)


def is_sampling(samples: Samples) -> bool:
    """Whether PM sampling is active."""
    return samples.get("gpu_hpc_source_state", gpu="0", source="pm_sampling", state="active") == 1


class Clocks:
    """SM clocks in MHz and the reasons that held them down, read during blocks with and without the exporter."""

    def __init__(self) -> None:
        pynvml.nvmlInit()
        self._device = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._clocks: dict[bool, list[int]] = {True: [], False: []}
        self._reasons: dict[bool, Counter[int]] = {True: Counter(), False: Counter()}

    def read(self, *, with_exporter: bool) -> None:
        """Note the clock now."""
        self._clocks[with_exporter].append(pynvml.nvmlDeviceGetClockInfo(self._device, pynvml.NVML_CLOCK_SM))
        self._reasons[with_exporter][pynvml.nvmlDeviceGetCurrentClocksEventReasons(self._device)] += 1

    def __str__(self) -> str:
        lines = []
        for kind, clocks in self._clocks.items():
            reasons = ", ".join(f"{mask:#x}: {count}" for mask, count in self._reasons[kind].most_common())
            lines.append(
                f"SM clock {'with' if kind else 'without'}: {len(clocks)} readings, quartiles "
                f"{[round(value) for value in statistics.quantiles(clocks, n=4)]} MHz, clock event reasons {reasons}"
            )
        return "\n".join(lines)


def measure(switch: Switch, clocks: Clocks, step: Step, pairs: int, seconds: float) -> list[float]:
    step()
    ratios = []
    for _ in range(pairs):
        rates = {}
        for with_exporter in random.sample((True, False), 2):
            switch.turn(on=with_exporter)
            step()
            rates[with_exporter] = rate(step, seconds, partial(clocks.read, with_exporter=with_exporter))
        ratios.append(rates[True] / rates[False])
    return ratios


def rate(step: Step, seconds: float, after_step: Callable[[], None]) -> float:
    """Steps per second; each step waits for the GPU."""
    begin, steps = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        step()
        after_step()
        steps += 1
    return steps / (time.perf_counter() - begin)


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % interval of the median by bootstrap."""
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


if __name__ == "__main__":
    main()
