"""Work for the kernel agent to watch, in a process of its own: prints as JSON what it did.

    python tests/gpu/agent_load.py WHAT [--kind KIND] [--seconds S] [--profile]

Needs PyTorch with CUDA; `reduce` two GPUs, and RANK and RENDEZVOUS (a file) in the environment.
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
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


def traced() -> tuple[torch.Tensor, Path]:
    """Something small to work on, and the agent's file, once it traces."""
    x = torch.randn(1024, device="cuda")
    x.mul_(1.0)
    torch.cuda.synchronize()
    wait_until_tracing()
    path = own_file()
    assert path is not None
    return x, path


def wait_for_window() -> None:
    """Until the agent has published one."""
    path = own_file()
    if path is not None:
        agent_file.wait_for(
            path, lambda s: s.header.windows_published > 0 and s.state[0] == agent_file.State.WAITING, 60
        )


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
    return {name: (count, mean) for name, (count, mean, _) in longest_by_kernel(profiler).items()}


def profiled(_: argparse.Namespace) -> dict[str, Any]:
    """The same work under torch.profiler."""
    work = known_work()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
    return {"kernels": by_kernel(profiler)}


def nodes(args: argparse.Namespace) -> dict[str, Any]:
    """Replays of a graph across windows, or profiled: of each of its kernels how many, mean and longest time in us."""
    step = graph()
    step()
    torch.cuda.synchronize()
    if args.profile:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            step()
        return {"nodes": longest_by_kernel(profiler)}
    path = own_file()
    assert path is not None
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        step()
        torch.cuda.synchronize()
    now = agent_file.read(path)
    found = {now.name(k): (k.executions, k.ns / k.executions / 1000, k.max_ns / 1000) for k in now.slots()}
    return {"nodes": found, **header_of(path)}


def longest_by_kernel(profiler: Any) -> dict[str, tuple[int, float, float]]:
    """Count, mean and longest duration in microseconds of each kernel of a profile."""
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem"):
            found.setdefault(event.name, []).append(event.time_range.elapsed_us())
    return {name: (len(times), sum(times) / len(times), max(times)) for name, times in found.items()}


def trace(args: argparse.Namespace) -> dict[str, Any]:
    """A trace of torch.profiler that lasts over several of the agent's windows: what it has.

    Kernels, waits, and events, whose function is none of those that the agent records.

    It begins while the agent traces, or (`--between`) after a window of the agent's, or (`--first`) before the agent,
    which is started in the middle of it.
    """
    x = torch.randn(1 << 22, device="cuda")
    x.mul_(1.0)
    torch.cuda.synchronize()
    agent = late_agent() if args.first else None
    wait_until_tracing()
    if args.between:
        wait_for_window()
    event = torch.cuda.Event()
    launched = waited = 0
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        if agent is not None:
            agent.gpu_hpc_agent_start()
        end = time.monotonic() + args.seconds
        while time.monotonic() < end:
            for _ in range(100):
                x.mul_(1.0)
            event.record()
            torch.cuda.synchronize()
            launched, waited = launched + 100, waited + 1
            time.sleep(0.01)
    traced = sum(count for count, _ in by_kernel(profiler).values())
    calls = collections.Counter(event.name.removesuffix("WithFlags") for event in profiler.events())
    waits, events = calls["cudaDeviceSynchronize"], calls["cudaEventRecord"]
    path = own_file()
    state = []
    if path is not None:
        paused = agent_file.wait_for(path, lambda s: s.state[0] == agent_file.State.PAUSED, 60)
        state = [str(s) for s in paused.state]
    return {"launched": launched, "traced": traced, "waited": waited, "waits": waits, "events": events, "agent": state}


def late_agent() -> ctypes.CDLL | None:
    """The agent that is to be loaded now, if any."""
    return ctypes.CDLL(os.environ["LATE_AGENT"]) if "LATE_AGENT" in os.environ else None


def queued(args: argparse.Namespace) -> dict[str, Any]:
    """Small kernels that wait behind one of a known length: how long from the end of their launch call to their start.

    In microseconds by length of the kernel before, from the profiler or from the agent, whose slot of the small
    kernel is read before and after.
    """
    x = torch.randn(1024, device="cuda")
    x.mul_(1.0)
    torch.cuda.synchronize()
    wait_until_tracing()
    found: dict[str, tuple[int, float]] = {}
    for cycles in QUEUED_CYCLES:
        before = small_kernel_latency()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) if args.profile else nullcontext() as p:
            for _ in range(500):
                torch.cuda._sleep(cycles)  # noqa: SLF001  a kernel of a chosen length, as PyTorch's own tests make it
                x.mul_(1.0)
                torch.cuda.synchronize()
        if p is not None:
            found[str(cycles)] = profiled_latency(p)
        else:
            after = small_kernel_latency()
            number = after[0] - before[0]
            found[str(cycles)] = number, (after[1] - before[1]) / max(1, number) / 1000
    return {"queued": found}


QUEUED_CYCLES = (5_000, 20_000, 100_000, 400_000, 2_000_000)


def small_kernel_latency() -> tuple[int, int]:
    """Number, and nanoseconds in all, of launch to start of the element-wise kernel, once the agent has told of all."""
    path = own_file()
    if path is None:
        return 0, 0
    published = agent_file.read(path).header.windows_published
    snapshot = agent_file.wait_for(path, lambda s: s.header.windows_published >= published + 2, 60)
    slots = [kernel for kernel in snapshot.slots() if "elementwise" in snapshot.name(kernel)]
    return sum(s.latency_count for s in slots), sum(s.latency_ns for s in slots)


def profiled_latency(profiler: Any) -> tuple[int, float]:
    """The same of a profile, by correlation id."""
    events = profiler.profiler.kineto_results.events()
    ends = {e.correlation_id(): e.start_ns() + e.duration_ns() for e in events if e.name() == "cudaLaunchKernel"}
    waits = [
        max(0, e.start_ns() - ends[e.correlation_id()])
        for e in events
        if "elementwise" in e.name() and e.correlation_id() in ends
    ]
    return len(waits), sum(waits) / max(1, len(waits)) / 1000


def reduce(args: argparse.Namespace) -> dict[str, Any]:
    """All-reduces over two GPUs, alone or beside matrix products: the share of their time that compute covers."""
    rank = int(os.environ["RANK"])
    method = f"file://{os.environ['RENDEZVOUS']}"
    distributed.init_process_group("nccl", init_method=method, rank=rank, world_size=2)
    data = torch.zeros(64 << 20, device="cuda")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(a)

    def step() -> None:
        handle = distributed.all_reduce(data, async_op=True)
        if args.kind == "beside":
            for _ in range(4):
                torch.matmul(a, a, out=out)
        handle.wait()

    def steps(number: int) -> None:
        for _ in range(number):
            step()
        torch.cuda.synchronize()

    steps(20)
    distributed.barrier()
    if args.profile:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            steps(200)
        ratio = covered(profiler)
    else:
        wait_until_tracing()
        distributed.barrier()
        for _ in range(max(1, round(args.seconds))):
            steps(200)
        path = own_file()
        assert path is not None
        snapshot = agent_file.wait_for(path, lambda s: s.header.windows_published >= MANY_WINDOWS, 60)
        devices = [d for d in snapshot.file.devices if d.used]
        assert len(devices) == 1, "a rank uses one GPU"
        ratio = devices[0].overlap_ns / max(1, devices[0].communication_ns)
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    said = "" if args.profile else bytes(devices[0].uuid).hex()
    distributed.barrier()
    distributed.destroy_process_group()
    return {"ratio": ratio, "uuid": uuid, "agent_uuid": said}


MANY_WINDOWS = 4


def covered(profiler: Any) -> float:
    """Share of the time of NCCL's kernels in which another kernel ran too."""
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = [(e.time_range.start, e.time_range.end, e.name.startswith("nccl")) for e in events if e.name[:3] != "Mem"]
    edges = sorted((time, kind, step) for begin, end, kind in spans for time, step in ((begin, 1), (end, -1)))
    running, last, communication, both = {False: 0, True: 0}, 0.0, 0.0, 0.0
    for time_us, kind, change in edges:
        if running[True]:
            communication += time_us - last
            both += (time_us - last) * (running[False] > 0)
        running[kind] += change
        last = time_us
    return both / communication


def workers(args: argparse.Namespace) -> dict[str, Any]:
    """Loader processes that are forked while the agent traces: how many batches came, and files of agents."""
    wait = torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    wait_until_tracing()
    batches = 0
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        numbers = torch.utils.data.TensorDataset(torch.randn(256, 64))
        for (batch,) in torch.utils.data.DataLoader(numbers, batch_size=8, num_workers=4, pin_memory=True):
            wait += batch.cuda(non_blocking=True).sum()
            batches += 1
    torch.cuda.synchronize()
    files = len(list(Path(os.environ.get("GPU_HPC_AGENT_DIRECTORY", "")).glob("*.shm")))
    return {"batches": batches, "files": files}


def waits(args: argparse.Namespace) -> dict[str, Any]:
    """A kernel of so many seconds and the wait for it, again and again: what the agent tells of the waits."""
    _, path = traced()
    first = agent_file.read(path)
    begin, waited, number = time.monotonic(), 0.0, 0
    while time.monotonic() - begin < 15:
        torch.cuda._sleep(int(args.seconds * CYCLES_PER_SECOND))  # noqa: SLF001  as above
        called = time.monotonic()
        torch.cuda.synchronize()
        waited, number = waited + time.monotonic() - called, number + 1
    share = waited / (time.monotonic() - begin)
    now = agent_file.read(path)
    # How long the last window's records were awaited: a wait that goes on when it closes may keep them.
    ended = [end for _, end in now.intervals() if 0 < end <= now.header.last_window_ns]
    awaited = (now.header.last_window_ns - max(ended)) / 1e9 if ended else None  # tracing goes on
    before, after = first.device(), now.device()
    told = (sum(after.sync_ns) - sum(before.sync_ns)) / max(1, after.traced_ns - before.traced_ns)
    return {"waits": number, "share": share, "told": told, "awaited": awaited, **header_of(path)}


def threads(args: argparse.Namespace) -> dict[str, Any]:
    """Launches of many threads at once, on a stream each; each waits for its own."""

    def launch(number: int) -> int:
        x = torch.randn(1024, device="cuda")
        stream = torch.cuda.Stream()
        ready.wait()
        with torch.cuda.stream(stream):
            for _ in range(number):
                x.mul_(1.0)
        stream.synchronize()
        return number

    _, path = traced()
    ready = threading.Barrier(MANY_THREADS)
    with ThreadPoolExecutor(MANY_THREADS) as pool:
        launched = sum(pool.map(launch, [int(args.seconds * 100)] * MANY_THREADS))
    published = agent_file.read(path).header.windows_published
    now = agent_file.wait_for(path, lambda s: s.header.windows_published >= published + 2, 60)
    counted = sum(k.executions for k in now.slots() if "Mul" in now.name(k) or "mul" in now.name(k))
    latencies = sum(k.latency_count for k in now.slots())
    return {
        "threads": MANY_THREADS,
        "launched": launched,
        "counted": counted,
        "latencies": latencies,
        **header_of(path),
    }


MANY_THREADS = 200


def driver_launches(args: argparse.Namespace) -> dict[str, Any]:
    """Kernels of Triton's, which the driver's functions launch: how many have a launch-to-start time, if asked for."""
    # Here, since this load alone needs Triton.
    from gpu.l2_reads import read_repeatedly  # noqa: PLC0415  as said

    source = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")
    read_repeatedly(source)
    end = time.monotonic() + args.seconds
    while time.monotonic() < end:
        read_repeatedly(source)
        torch.cuda.synchronize()
    path = own_file()
    assert path is not None
    slots = agent_file.read(path).slots()
    executions, latencies = sum(k.executions for k in slots), sum(k.latency_count for k in slots)
    return {"executions": executions, "latencies": latencies, **header_of(path)}


def endless(args: argparse.Namespace) -> dict[str, Any]:
    """One kernel that runs for long beside short ones of another stream, then short ones alone."""
    x, path = traced()
    begin = time.monotonic()
    torch.cuda._sleep(int(args.seconds * CYCLES_PER_SECOND))  # noqa: SLF001  as above
    other = torch.cuda.Stream()
    sleeper = torch.cuda.Event()
    sleeper.record()
    while not sleeper.query():
        with torch.cuda.stream(other):
            x.mul_(1.0)
        time.sleep(0.001)
    lasted = time.monotonic() - begin
    during = header_of(path)
    for _ in range(15_000):
        x.mul_(1.0)
        time.sleep(0.001)
    torch.cuda.synchronize()
    return {"lasted": lasted, "during": during, "after": header_of(path)}


CYCLES_PER_SECOND = 1.98e9


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
    if path is None:
        return {"chunks": chunks, "intervals": [], "kernels": 0, "agent": {}}
    snapshot = agent_file.read(path)
    kernels = sum(kernel.executions for kernel in snapshot.slots())
    return {"chunks": chunks, "intervals": snapshot.intervals(), "kernels": kernels, "agent": header_of(path)}


def lasting(args: argparse.Namespace) -> dict[str, Any]:
    """Steps before the agent comes, beside it for the half of the time, and after it was stopped."""
    step = KINDS[args.kind]()

    def seconds_a_step(length: float) -> float:
        begin, count = time.monotonic(), 0
        while time.monotonic() - begin < length:
            for _ in range(20):
                step()
            torch.cuda.synchronize()
            count += 20
        return (time.monotonic() - begin) / count

    seconds_a_step(2)
    before = seconds_a_step(args.seconds)
    agent = late_agent()
    if agent is not None:
        agent.gpu_hpc_agent_start()
    seconds_a_step(args.seconds)
    path = own_file()
    if agent is not None and path is not None:
        agent.gpu_hpc_agent_stop()
        agent_file.wait_for(path, lambda s: s.state[0] == agent_file.State.PAUSED, 60)
    seconds_a_step(1)
    after = seconds_a_step(args.seconds)
    windows = agent_file.read(path).header.windows_published if path is not None else 0
    return {"ratio": after / before, "windows": windows}


def header_of(path: Path) -> dict[str, Any]:
    snapshot = agent_file.read(path)
    names = [
        *("windows_published", "windows_discarded", "records_kept", "records_dropped", "records_invalid"),
        *("records_unmatched", "node_records", "overhead_ratio", "window_seconds", "period_seconds", "flags"),
    ]
    return {"state": [str(s) for s in snapshot.state], **{n: getattr(snapshot.header, n) for n in names}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--kind", choices=(*KINDS, "alone", "beside"), default="tiny")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--profile", action="store_true", help="ask torch.profiler, not the agent")
    parser.add_argument("--first", action="store_true", help="trace: the profiler begins before the agent")
    parser.add_argument("--between", action="store_true", help="trace: the profiler begins after one of its windows")
    args = parser.parse_args()
    json.dump(WHAT[args.what](args), sys.stdout)


WHAT: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    **{
        work.__name__: work
        for work in (counts, blocks, lasting, nodes, trace, queued, reduce, workers, waits, endless, threads)
    },
    "driver_launches": driver_launches,
    "profile": profiled,
}


if __name__ == "__main__":
    main()
