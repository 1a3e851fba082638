"""What switching kinds of records on and off, a thousand times a second, does to programs that launch all the time.

    python tests/gpu/switching.py [--seconds 30]

Needs PyTorch with CUDA and a C compiler. For each way of switching a process that launches small operations and one of
small training steps, as many side by side as there are pairs of cores; a process that dies is a finding, no error.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

KERNELS, COPIES, PEER_COPIES, SETS, RUNTIME = 10, 1, 22, 2, 5
"""CUpti_ActivityKind."""
AGENT = Path(__file__).resolve().parents[2] / "exporter/agent"
LOADS = ("tiny", "eager_step")


@dataclass(frozen=True)
class Way:
    """Kinds that are enabled once, and those that are switched, with the functions whose calls the agent records."""

    switched: tuple[int, ...]
    for_life: tuple[int, ...] = ()
    functions: bool = False
    probes: bool = False


WAYS = {
    "kernels": Way((KERNELS,)),
    "copies between GPUs": Way((PEER_COPIES,)),
    "copies": Way((COPIES,)),
    "sets": Way((SETS,)),
    "the runtime's calls": Way((RUNTIME,)),
    "the runtime's calls, kernels": Way((RUNTIME, KERNELS)),
    "the same; copies and sets for life": Way((RUNTIME, KERNELS), (COPIES, PEER_COPIES, SETS)),
    "all of these": Way((RUNTIME, COPIES, PEER_COPIES, SETS, KERNELS)),
    "functions, kernels; the runtime's calls for life": Way((KERNELS,), (RUNTIME,), functions=True),
    "kernels; the runtime's calls, copies, sets for life": Way((KERNELS,), (RUNTIME, COPIES, PEER_COPIES, SETS)),
    "nothing: the subscription is taken and given back": Way((), probes=True),
}


class CWay(ctypes.Structure):
    """struct way of switching.c."""

    _fields_ = (
        *((name, ctypes.c_int32 * 8) for name in ("for_life", "switched")),
        *((name, ctypes.c_int32) for name in ("functions", "probes")),
        ("seconds", ctypes.c_double),
    )


class CSeen(ctypes.Structure):
    """struct seen of switching.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("rounds", "both", "kernels", "calls", "nothing", "repeated"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--measure", nargs=3, metavar=("LIBRARY", "WAY", "LOAD"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        library, name, load = args.measure
        measure(library, name, load, args.seconds)
        return
    pairs: SimpleQueue[str] = SimpleQueue()
    cores = sorted(os.sched_getaffinity(0))
    places = [f"{a},{b}" for a, b in zip(cores[::2], cores[1::2], strict=False)]
    for place in places:
        pairs.put(place)
    say(
        "| switched | program | rounds | looks: all there, kernels alone, calls alone, nothing "
        "| calls with the id of the one before | end |\n" + "|---" * 6 + "|"
    )
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "switching.so"
        sources = [Path(__file__).with_suffix(".c"), AGENT / "cupti.c"]
        flags = ["-std=gnu11", "-O2", "-fPIC", "-shared", "-pthread", f"-I{AGENT}"]
        subprocess.run(["cc", *flags, "-o", library, *sources, "-ldl"], check=True)

        def row(way: str, load: str) -> str:
            place = pairs.get()
            own = [sys.executable, __file__, "--seconds", str(args.seconds), "--measure", str(library), way, load]
            done = subprocess.run(["taskset", "-c", place, *own], stdout=subprocess.PIPE, text=True, check=False)
            pairs.put(place)
            seen = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
            looks = ", ".join(str(seen[name]) for name in ("both", "kernels", "calls", "nothing")) if seen else ""
            end = f"signal {-done.returncode}" if done.returncode < 0 else f"status {done.returncode}"
            return f"| {way} | {load} | {seen.get('rounds', '')} | {looks} | {seen.get('repeated', '')} | {end} |"

        with ThreadPoolExecutor(len(places)) as pool:
            for line in pool.map(row, *zip(*((way, load) for way in WAYS for load in LOADS), strict=True)):
                say(line)


def say(line: str) -> None:
    print(line, flush=True)  # noqa: T201  the program's output


def measure(library: str, name: str, load: str, seconds: float) -> None:
    """Launch until the switching thread is over; says what it saw."""
    # Here, since the parent needs no GPU, and must not hold one.
    import torch  # noqa: PLC0415  as said

    from gpu.agent_load import KINDS  # noqa: PLC0415  as said

    step = KINDS[load]()
    step()
    torch.cuda.synchronize()
    switching = ctypes.CDLL(library)
    switching.is_over.restype = ctypes.c_bool
    switching.what_was_seen.restype = CSeen
    chosen = WAYS[name]
    way = CWay(functions=chosen.functions, probes=chosen.probes, seconds=seconds)
    for kinds, place in ((chosen.for_life, way.for_life), (chosen.switched, way.switched)):
        for i, kind in enumerate(kinds):
            place[i] = kind
    if reason := switching.begin(ctypes.byref(way)):
        sys.exit(f"switching: libcupti cannot be used ({reason})")
    while not switching.is_over():
        step()
        torch.cuda.synchronize()
    seen = switching.what_was_seen()
    say(json.dumps({field: getattr(seen, field) for field, *_ in CSeen._fields_}))


if __name__ == "__main__":
    main()
