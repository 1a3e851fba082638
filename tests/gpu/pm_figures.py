"""Figures of PM sampling on a real GPU, as tables for docs/benchmarks.md.

    python tests/gpu/pm_figures.py long       # six minutes at 10 ms: every window, every workload, memory
    python tests/gpu/pm_figures.py l2         # the two workloads of L2 alone
    python tests/gpu/pm_figures.py intervals  # 100, 10 and 1 ms under GEMM and copy: windows, CPU
    python tests/gpu/pm_figures.py jitter     # lengths of windows at 100, 10 and 1 ms
    python tests/gpu/pm_figures.py launches   # time per launch with and without sampling (needs nvcc)
    python tests/gpu/pm_figures.py kill       # 20 times kill -9 of the helper (needs nvcc)
    python tests/gpu/pm_figures.py ncu        # whether ncu gets the counters, and how soon they are back

Needs PyTorch with CUDA and the exporter installed; run as root, or with NVreg_RestrictProfilingToAdminUsers=0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from exporter_process import Exporter, Samples, run_exporter
from gpu_hpc_exporter.sources.pm_sampling.process import HelperProcess
from gpu_hpc_exporter.sources.pm_sampling.protocol import Order, Target, Windows
from process_figures import cpu_seconds, status_number

HERE = Path(__file__).parent
GAUGE_WINDOW_S = 10
SECTOR = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=FIGURES)
    parser.add_argument("--seconds", type=float, default=0.0, help="length of a phase (default: each figure's own)")
    parser.add_argument("--library", default="", help="libcupti to use (default: the exporter's choice)")
    args = parser.parse_args()
    Settings.library = args.library
    for what in args.what:
        say(f"\n## {what}\n")
        with tempfile.TemporaryDirectory() as directory:
            FIGURES[what](Path(directory), args.seconds)


class Settings:
    """What every figure is measured with."""

    library = ""


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  the program's output


@contextmanager
def sampling(directory: Path, interval_ms: float) -> Iterator[Exporter]:
    """An exporter whose PM sampling is active."""
    config = directory / f"config-{interval_ms}.yaml"
    config.write_text(
        f"sampling_interval_ms: {interval_ms}\ngauge_window_seconds: {GAUGE_WINDOW_S}\n"
        f"pm_sampling: {{mode: required, library: {json.dumps(Settings.library)}}}\n"
    )
    with run_exporter(directory, f"--config.file={config}") as exporter:
        wait_until_active(exporter)
        yield exporter
        exporter.stop()


def wait_until_active(exporter: Exporter) -> float:
    """Wait until PM sampling is active; the seconds that took."""
    begin = time.monotonic()
    exporter.wait_for(is_active, 30)
    return time.monotonic() - begin


def pause(exporter: Exporter) -> None:
    """Pause PM sampling; return when that shows, since expositions are kept for a second."""
    exporter.ask("/-/pause?seconds=600")
    exporter.wait_for(lambda samples: not is_active(samples))


def is_active(samples: Samples) -> bool:
    return samples.get("gpu_hpc_source_state", gpu="0", source="pm_sampling", state="active") == 1


def helper_pid(exporter: Exporter) -> int:
    lists = Path(f"/proc/{exporter.process.pid}/task").glob("*/children")
    children = [pid for path in lists for pid in path.read_text().split()]
    return next(int(pid) for pid in children if b"pm_helper" in Path(f"/proc/{pid}/cmdline").read_bytes())


def rss_mb(pid: int) -> float:
    return status_number(pid, "VmRSS") * 1.024 / 1000


@contextmanager
def workload(directory: Path, seconds: float, *phases: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The workload program, once its first phase has begun."""
    marks = directory / f"marks-{time.monotonic_ns()}"
    marks.touch()
    command = [sys.executable, str(HERE / "workload.py"), "--seconds", str(seconds), "--marks", str(marks)]
    process = subprocess.Popen([*command, "--counts", str(counts_of(marks)), "--phases", *phases])
    while not marks.read_text():
        time.sleep(0.05)
    try:
        yield process, marks
    finally:
        process.kill()
        process.wait()


def counts_of(marks: Path) -> Path:
    return marks.with_name(marks.name + ".counts")


class Span:
    """What grew between two scrapes."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._pids = (exporter.process.pid, helper_pid(exporter))
        self._cpu = [cpu_seconds(pid) for pid in self._pids]
        self._begin = time.monotonic()
        self._before = exporter.scrape()

    def end(self) -> None:
        self.after = self._exporter.scrape()
        seconds = time.monotonic() - self._begin
        self.cpu_percent = [
            100 * (cpu_seconds(pid) - cpu) / seconds for pid, cpu in zip(self._pids, self._cpu, strict=True)
        ]
        self.rss = [rss_mb(pid) for pid in self._pids]

    def growth(self, name: str, **labels: str) -> float:
        return (self.after.get(name, gpu="0", **labels) or 0.0) - (self._before.get(name, gpu="0", **labels) or 0.0)

    def rate(self, name: str) -> float:
        """Per second that PM sampling observed."""
        return self.growth(name) / self.growth("gpu_hpc_source_observed_seconds_total", source="pm_sampling")


def long(directory: Path, seconds: float) -> None:
    """All workloads at 10 ms in one run of six minutes, the helper's memory along the way."""
    phases = ("idle", "gemm", "copy", "h2d", "d2h", "l2_copy", "train", "inference_graph", "launch_bound", "l2_reads")
    every_phase(directory, seconds or 33, phases)


def l2(directory: Path, seconds: float) -> None:
    """Copies within L2 and reads that saturate it, at 10 ms."""
    every_phase(directory, seconds or 15, ("l2_copy", "l2_reads"))


def every_phase(directory: Path, length: float, phases: Sequence[str]) -> None:
    """A table of what was measured in each phase, and of the windows and the helper's memory."""
    with sampling(directory, 10) as exporter:
        whole = Span(exporter)
        pid = helper_pid(exporter)
        say("| phase | DRAM GB/s | own | PCIe in | own | L2 share to DRAM | miss rate | L2 of peak | classes |")
        say("|---|---|---|---|---|---|---|---|---|")
        memory = []
        found: dict[str, Span] = {}
        with workload(directory, length, *phases) as (process, marks):
            for name, begin in phases_of(process, marks):
                time.sleep(max(0.0, begin + 3 - time.monotonic()))
                span = Span(exporter)
                time.sleep(max(0.0, begin + length - 3 - time.monotonic()))
                span.end()
                found[name] = span
                memory.append(rss_mb(pid))
            counts = [json.loads(line) for line in counts_of(marks).read_text().splitlines()]
        for count in counts:
            say(row(count, found[count["phase"]]))
        whole.end()
        say(f"\nhelper's memory at the end of each phase, MB: {[round(value, 1) for value in memory]}")
        say_windows("whole run", whole, 10)


def row(count: Mapping[str, float | str], span: Span) -> str:
    def own(key: str) -> str:
        seconds = float(count["end"]) - float(count["begin"])
        return f"{float(count[key]) / seconds / 1e9:.2f}" if key in count else ""

    dram = span.rate("gpu_hpc_dram_read_bytes_total") + span.rate("gpu_hpc_dram_written_bytes_total")
    sectors = span.growth("gpu_hpc_l2_sectors_total")
    share = span.growth("gpu_hpc_l2_missed_sectors_total") / sectors if sectors else float("nan")
    miss = span.after.get("gpu_hpc_l2_cache_miss_rate", gpu="0")
    observed = span.growth("gpu_hpc_observed_seconds_total")
    classes = {
        dict(labels)["class"]: span.growth("gpu_hpc_bottleneck_seconds_total", **{"class": dict(labels)["class"]})
        for labels in span.after.all("gpu_hpc_bottleneck_seconds_total", gpu="0")
    }
    told = ", ".join(f"{name} {value / observed:.3f}" for name, value in classes.items() if value > 0.002 * observed)
    host = span.rate("gpu_hpc_pcie_host_to_gpu_bytes_total") / 1e9
    return (
        f"| {count['phase']} | {dram / 1e9:.1f} | {own('dram_bytes')} | {host:.2f} | {own('host_to_gpu_bytes')} "
        f"| {share:.4f} | {'absent' if miss is None else f'{miss:.4f}'} "
        f"| {span.rate('gpu_hpc_l2_active_seconds_total'):.3f} | {told} |"
    )


def say_windows(label: str, span: Span, interval_ms: float) -> None:
    windows = {
        result: span.growth("gpu_hpc_windows_total", source="pm_sampling", result=result)
        for result in ("valid", "late", "lost", "rejected")
    }
    due = span.growth("gpu_hpc_source_observed_seconds_total", source="pm_sampling") * 1000 / interval_ms
    say(
        f"| {label} | {interval_ms:g} ms | {windows} | due {due:.2f} | exporter {span.cpu_percent[0]:.3f} % "
        f"| helper {span.cpu_percent[1]:.3f} % | sum {sum(span.cpu_percent):.3f} % "
        f"| RSS {span.rss[0]:.1f} + {span.rss[1]:.1f} MB |"
    )


def intervals(directory: Path, seconds: float) -> None:
    """CPU and windows at 100, 10 and 1 ms under GEMM and copy."""
    length = seconds or 20
    for interval_ms in (100, 10, 1):
        with (
            sampling(directory, interval_ms) as exporter,
            workload(directory, length + 3, "gemm", "copy") as (process, marks),
        ):
            for phase, begin in phases_of(process, marks):
                time.sleep(max(0.0, begin + 1.5 - time.monotonic()))
                span = Span(exporter)
                time.sleep(length)
                span.end()
                say_windows(phase, span, interval_ms)


def phases_of(process: subprocess.Popen[bytes], marks: Path) -> Iterator[tuple[str, float]]:
    """Phases of a running workload as they begin, and when."""
    seen = 0
    while process.poll() is None:
        for line in marks.read_text().splitlines()[seen:]:
            seen += 1
            begin, name = line.split()
            if name != "between":
                yield name, float(begin)
        time.sleep(0.05)


def jitter(_: Path, seconds: float) -> None:
    """Lengths of windows by the GPU's own time stamps."""
    smi = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    uuid = re.findall(r"GPU-[0-9a-f-]+", smi)[0]
    for interval_ns in (100_000_000, 10_000_000, 1_000_000):
        helper = HelperProcess((), Settings.library, Order(interval_ns, [Target(uuid, ("pcie",), has_gpm=True)]))
        durations: list[int] = []
        begin, first = time.monotonic(), 0.0
        while time.monotonic() - begin < (seconds or 6):
            for message in helper.read(0.2) or []:
                if isinstance(message, Windows):
                    first = first or time.monotonic() - begin
                    durations += message.durations_ns
        helper.end()
        say(
            f"| {interval_ns / 1e6:g} ms | {len(durations)} windows | deviation {statistics.pstdev(durations):.1f} ns "
            f"| {min(durations)}-{max(durations)} ns | first after {first:.2f} s |"
        )


def launches(directory: Path, _: float) -> None:
    """A launch's host time with PM sampling active and paused, in alternating blocks on one core."""
    program = directory / "launches"
    subprocess.run(["nvcc", "-O2", "-o", str(program), str(HERE / "launches.cu")], check=True)
    command = ["taskset", "-c", str(max(os.sched_getaffinity(0))), str(program)]
    with (
        sampling(directory, 100) as exporter,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as loop,
    ):

        def block(count: int) -> float:
            assert loop.stdin
            assert loop.stdout
            loop.stdin.write(f"{count}\n")
            loop.stdin.flush()
            return float(loop.stdout.readline())

        block(200_000)
        differences, without = [], []
        for _ in range(12):
            times = {}
            for active in random.sample((True, False), 2):
                if active:
                    exporter.ask("/-/resume")
                    wait_until_active(exporter)
                else:
                    pause(exporter)
                times[active] = block(100_000)
            differences.append(times[True] - times[False])
            without.append(times[False])
        low, high = bootstrap(differences)
        say(
            f"12 pairs of 100,000 launches: {statistics.median(without):.1f} ns a launch without sampling, "
            f"with it {statistics.median(differences):+.1f} ns (95 % interval {low:+.1f} to {high:+.1f})"
        )
        loop.kill()


def bootstrap(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median."""
    medians = sorted(statistics.median(random.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def kill(directory: Path, _: float) -> None:
    """Kill -9 of the helper, twenty times; then a CUDA program."""
    program = directory / "launches"
    subprocess.run(["nvcc", "-O2", "-o", str(program), str(HERE / "launches.cu")], check=True)
    took = []
    with sampling(directory, 1) as exporter:
        for _ in range(20):
            pid = helper_pid(exporter)
            os.kill(pid, signal.SIGKILL)
            begin = time.monotonic()
            exporter.wait_for(lambda samples: not is_active(samples))
            exporter.ask("/-/resume")
            wait_until_active(exporter)
            took.append(time.monotonic() - begin)
        restarts = exporter.scrape().one("gpu_hpc_helper_restarts_total")
    after = subprocess.run([str(program)], input="1000\n", text=True, capture_output=True, check=False)
    say(
        f"20 x kill -9 at 1 ms windows: sampling was back after {min(took):.1f}-{max(took):.1f} s, "
        f"{restarts:.0f} restarts counted; a CUDA program after it ended with {after.returncode}"
    )


def ncu(directory: Path, _: float) -> None:
    """How often a first launch can be profiled: by yielding alone, and after a pause."""
    source = directory / "small.cu"
    source.write_text(
        "__global__ void k(float *x) { x[threadIdx.x] += 1; }\n"
        "int main() { float *d; cudaMalloc(&d, 4096); k<<<1, 256>>>(d); return cudaDeviceSynchronize(); }\n"
    )
    subprocess.run(["nvcc", "-o", str(directory / "small"), str(source)], check=True)
    command = ["ncu", "--clock-control", "none", str(directory / "small")]
    with sampling(directory, 100) as exporter:
        for way in ("yield", "pause"):
            good, back = 0, []
            for _ in range(10):
                if way == "pause":
                    pause(exporter)
                result = subprocess.run(command, capture_output=True, text=True, check=False)
                good += result.returncode == 0 and "==ERROR==" not in result.stdout
                if way == "pause":
                    exporter.ask("/-/resume")
                back.append(wait_until_active(exporter))
            say(f"{way}: {good} of 10 first launches profiled; sampling back after {min(back):.2f}-{max(back):.2f} s")


FIGURES = {
    "long": long,
    "l2": l2,
    "intervals": intervals,
    "jitter": jitter,
    "launches": launches,
    "kill": kill,
    "ncu": ncu,
}


if __name__ == "__main__":
    main()
