"""Work for the kernel agent to watch, in a process of its own: prints as JSON what it did.

    python tests/gpu/agent_load.py counts|profile|blocks|trace [--kind KIND] [--seconds S]

Needs PyTorch with CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fake_activity import agent_file
from gpu.workload import inference_graph

CHUNK_S = 0.02
LAUNCHES, PRODUCTS = 100_000, 300
COPIES = {"h2d pinned": (1000, 1 << 20), "h2d pageable": (50, 8 << 20), "d2h pinned": (200, 1 << 18)}


def own_file() -> Path | None:
    """The file of this process's agent, None without one."""
    directory = os.environ.get("GPU_HPC_AGENT_DIRECTORY", "")
    found = [*Path(directory).glob(f"{os.getpid()}-*.shm")] if directory else []
    return found[0] if found else None


def wait_until_tracing() -> None:
    path = own_file()
    if path is not None:
        agent_file.wait_for(path, lambda s: s.state[0] == agent_file.State.TRACING, 60)


def known_work() -> Callable[[], dict[str, int]]:
    """Launches, matrix products and copies of which it answers how many."""
    x = torch.randn(1024, device="cuda")
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)
    device = torch.empty(8 << 20, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    pageable = torch.empty(8 << 20, dtype=torch.uint8)

    def work() -> dict[str, int]:
        for _ in range(LAUNCHES):
            x.mul_(1.0)
        for _ in range(PRODUCTS):
            torch.matmul(a, a, out=out)
        for _ in range(COPIES["h2d pinned"][0]):
            device[: 1 << 20].copy_(pinned, non_blocking=True)
        for _ in range(COPIES["h2d pageable"][0]):
            device.copy_(pageable)
        for _ in range(COPIES["d2h pinned"][0]):
            pinned[: 1 << 18].copy_(device[: 1 << 18], non_blocking=True)
        torch.cuda.synchronize()
        return {"elementwise": LAUNCHES, "gemm": PRODUCTS}

    torch.matmul(a, a, out=out)
    x.mul_(1.0)
    torch.cuda.synchronize()
    return work


def counts(_: argparse.Namespace) -> dict[str, Any]:
    """Known work while the agent traces all the time, and how long one launch waited for its start."""
    work = known_work()
    wait_until_tracing()
    done = work()
    path = own_file()
    if path is not None:
        published = agent_file.read(path).header.windows_published
        agent_file.wait_for(path, lambda s: s.header.windows_published >= published + 2, 60)
    return {**done, "copies": COPIES}


def by_kernel(profiler: Any) -> dict[str, tuple[int, float]]:
    """Count and mean duration in microseconds of each kernel of a profile."""
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem"):
            found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return {name: (len(times), sum(times) / len(times)) for name, times in found.items()}


def profiled(_: argparse.Namespace) -> dict[str, Any]:
    """The same work under torch.profiler."""
    work = known_work()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    return {"kernels": by_kernel(profiler)}


def trace(args: argparse.Namespace) -> dict[str, Any]:
    """A trace of torch.profiler that lasts over several of the agent's windows: how many kernels it has."""
    x = torch.randn(1 << 22, device="cuda")
    x.mul_(1.0)
    torch.cuda.synchronize()
    wait_until_tracing()
    launched = 0
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            for _ in range(100):
                x.mul_(1.0)
            torch.cuda.synchronize()
            launched += 100
            time.sleep(0.01)
    traced = sum(count for count, _ in by_kernel(profiler).values())
    path = own_file()
    state = []
    if path is not None:
        paused = agent_file.wait_for(path, lambda s: s.state[0] == agent_file.State.PAUSED, 60)
        state = [str(s) for s in paused.state]
    return {"launched": launched, "traced": traced, "agent": state}


def tiny() -> Callable[[], object]:
    x = torch.randn(1024, device="cuda")

    def step() -> None:
        for _ in range(500):
            x.mul_(1.0)

    return step


def eager_step() -> Callable[[], object]:
    """A small training step with an optimizer that walks the parameters one by one."""
    model = nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(512, 512), nn.ReLU()))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    data = torch.randn(64, 512, device="cuda")

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def layer() -> Callable[[], object]:
    """A 4096-wide layer: bound by the GPU."""
    model = nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
    data = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        with torch.no_grad():
            model(data)

    return step


def graph() -> Callable[[], object]:
    """Replays of a captured decoder's many small kernels."""
    return inference_graph()


KINDS = {make.__name__: make for make in (tiny, eager_step, graph, layer)}


def blocks(args: argparse.Namespace) -> dict[str, Any]:
    """Repeat a step; in chunks of 20 ms, when each began and ended (Unix ns), and how many steps it had."""
    step = KINDS[args.kind]()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    begin = time.monotonic()
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    count = max(1, round(20 * CHUNK_S / (time.monotonic() - begin)))
    wait_until_tracing()
    chunks = []
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        before = time.time_ns()
        for _ in range(count):
            step()
        torch.cuda.synchronize()
        chunks.append((before, time.time_ns(), count))
    path = own_file()
    intervals = [] if path is None else agent_file.read(path).intervals()
    header = {} if path is None else header_of(path)
    return {"chunks": chunks, "intervals": intervals, "agent": header}


def header_of(path: Path) -> dict[str, Any]:
    snapshot = agent_file.read(path)
    names = [
        *("windows_published", "windows_discarded", "records_kept", "records_dropped", "records_invalid"),
        *("records_unmatched", "node_records", "overhead_ratio", "window_seconds", "period_seconds"),
    ]
    return {"state": [str(s) for s in snapshot.state], **{n: getattr(snapshot.header, n) for n in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("counts", "profile", "blocks", "trace"))
    parser.add_argument("--kind", choices=KINDS, default="tiny")
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    what = {"counts": counts, "profile": profiled, "blocks": blocks, "trace": trace}[args.what]
    json.dump(what(args), sys.stdout)


if __name__ == "__main__":
    main()
