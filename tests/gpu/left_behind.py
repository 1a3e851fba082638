"""What CUPTI costs between windows: an operation and a graph before anything was enabled, and after three windows.

    python tests/gpu/left_behind.py

Needs PyTorch with CUDA and a C compiler. A process each for every set of kinds, three times; they start together, since
PyTorch takes seconds to import, and measure one after the other.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

COPIES, SETS_ALONE, RUNTIME, DRIVER = (1, 22, 2), (2,), (5,), (4,)
"""CUpti_ActivityKind. Kernels are switched in every window."""
KERNELS = 10
SETS: dict[str, tuple[int, ...] | None] = {
    "nothing: callbacks registered": None,
    "kernels": (),
    "kernels; sets": SETS_ALONE,
    "kernels; copies": COPIES[:2],
    "kernels; copies, sets": COPIES,
    "kernels, the runtime's launches; its calls": RUNTIME,
    "kernels, the runtime's launches; its calls, copies, sets": (*COPIES, *RUNTIME),
    "the same; the driver's calls": (*COPIES, *RUNTIME, *DRIVER),
}
"""What is switched in windows; what stays enabled, None: nothing is enabled at all."""
AGENT = Path(__file__).resolve().parents[2] / "exporter/agent"
WINDOWS, TIMES = 3, 3
CHUNK = 5000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", nargs=3, metavar=("LIBRARY", "LOCK", "SET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    say(
        "| switched in three windows; enabled for life | an operation before, us | more, ns: median (all) "
        "| a replay of 96 kernels before, us | more, ns: median (all) |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "left_behind.so"
        sources = [Path(__file__).with_suffix(".c"), AGENT / "cupti.c"]
        subprocess.run(["cc", "-O2", "-fPIC", "-shared", f"-I{AGENT}", "-o", library, *sources, "-ldl"], check=True)
        for name in SETS:
            command = [sys.executable, __file__, "--measure", str(library), f"{directory}/lock", name]
            processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(TIMES)]
            rows = [tuple(map(float, process.communicate()[0].split())) for process in processes]
            operations, replays = ([(row[i], row[i + 2]) for row in rows] for i in (0, 1))
            say(f"| {name} | {more(operations)} | {more(replays)} |")


def more(pairs: list[tuple[float, float]]) -> str:
    """Of microseconds before and after: those before, and by how much those after are more."""
    differences = sorted(round(1000 * (after - before)) for before, after in pairs)
    before = statistics.median(before for before, _ in pairs)
    return f"{before:.2f} | {statistics.median(differences)} ({differences})"


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  the program's output


def measure(library: str, lock: str, name: str) -> None:
    """Say the least microseconds of an operation and of a replay: before the kinds were enabled, and after windows."""
    # Here, since the parent needs no GPU, and must not hold one.
    import torch  # noqa: PLC0415  as said

    from gpu.workload import inference_graph  # noqa: PLC0415  as said

    x = torch.randn(1024, device="cuda")

    def work(seconds: float) -> float:
        """Microseconds an operation, of the fastest chunk."""
        least, end = float("inf"), time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.perf_counter()
            for _ in range(CHUNK):
                x.mul_(1.0)
            torch.cuda.synchronize()
            least = min(least, (time.perf_counter() - begin) / CHUNK * 1e6)
        return least

    def replay(seconds: float) -> float:
        """Microseconds a replay of a graph that was captured now, of the fastest step."""
        step, least, end = inference_graph(), float("inf"), time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.perf_counter()
            replays = step()["replays"]
            least = min(least, (time.perf_counter() - begin) / replays * 1e6)
        return least

    x.mul_(1.0)
    replay(0.1)
    with Path(lock).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        work(1)
        before = work(1.6), replay(0.6)
        cupti = ctypes.CDLL(library)
        if reason := cupti.attach():
            sys.exit(f"left_behind: libcupti cannot be used ({reason})")
        for_life = SETS[name]
        if for_life is not None:
            enable(cupti, for_life)
            for _ in range(WINDOWS):
                window(cupti, for_life, lambda: work(0.1))
        say(" ".join(map(str, (*before, work(1.6), replay(0.6)))))


def enable(cupti: ctypes.CDLL, for_life: tuple[int, ...]) -> None:
    """As the agent does inside cuInit: of calls none is recorded yet."""
    for kind in for_life:
        cupti.cupti_enable(kind)
        if kind in (*RUNTIME, *DRIVER):
            cupti.cupti_record_calls(kind, False)  # noqa: FBT003  C has no keywords


def window(cupti: ctypes.CDLL, for_life: tuple[int, ...], work: Callable[[], float]) -> None:
    """Kernels are recorded for a while, and calls where their kind is enabled."""
    apis = [kind for kind in for_life if kind in (*RUNTIME, *DRIVER)]
    for kind in apis:
        cupti.cupti_record_calls(kind, True)  # noqa: FBT003  C has no keywords
    cupti.cupti_enable(KERNELS)
    work()
    cupti.cupti_disable(KERNELS)
    for kind in apis:
        cupti.cupti_record_calls(kind, False)  # noqa: FBT003  C has no keywords
    cupti.cupti_flush(False)  # noqa: FBT003  C has no keywords


if __name__ == "__main__":
    main()
