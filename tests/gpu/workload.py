"""Workloads whose bottleneck is known, run one after the other on one GPU; twelve of them by default.

    python tests/gpu/workload.py --seconds 22 --marks marks.txt --counts counts.jsonl

Needs PyTorch with CUDA. Each phase appends `<CLOCK_MONOTONIC> <phase>` to the marks file when it begins,
which `gpu-hpc-exporter record --marks` turns into phases of the recording, and its own count of what it
did to the counts file: the truth that the exporter's counters are compared with.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

Step = Callable[[], dict[str, float]]
"""Queues a batch of work, waits for it, and answers what it did."""

DEVICE = "cuda"
GIB = 1 << 30


def idle() -> Step:
    def step() -> dict[str, float]:
        time.sleep(0.1)
        return {}

    return step


def gemm() -> Step:
    """8192 x 8192 bf16 matrix products on random data: tensor cores near their limit."""
    size = 8192
    a = torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn_like(a)
    out = torch.empty_like(a)

    def step() -> dict[str, float]:
        for _ in range(50):
            torch.matmul(a, b, out=out)
        torch.cuda.synchronize()
        return {"flop": 50 * 2 * size**3}

    return step


def copy() -> Step:
    """Device-to-device copies of 2 GiB: DRAM near its limit, SMs resident and waiting."""
    source = torch.empty(2 * GIB, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)

    def step() -> dict[str, float]:
        for _ in range(50):
            target.copy_(source)
        torch.cuda.synchronize()
        return {"dram_bytes": 50 * 2 * source.numel()}

    return step


def _host_copies(*, to_device: bool) -> Step:
    host = torch.empty(GIB // 4, dtype=torch.uint8, pin_memory=True).random_()
    device = torch.empty(GIB // 4, dtype=torch.uint8, device=DEVICE)
    source, target = (host, device) if to_device else (device, host)
    name = "host_to_gpu_bytes" if to_device else "gpu_to_host_bytes"

    def step() -> dict[str, float]:
        for _ in range(20):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return {name: 20 * source.numel()}

    return step


def h2d() -> Step:
    """Pinned host-to-device copies: the copy engine alone works, nvidia-smi reads 100 %."""
    return _host_copies(to_device=True)


def h2d_pageable() -> Step:
    """The same copies from memory that is not pinned: the driver stages them piece by piece, and the call waits."""
    host = torch.empty(GIB // 4, dtype=torch.uint8).random_()
    device = torch.empty(GIB // 4, dtype=torch.uint8, device=DEVICE)

    def step() -> dict[str, float]:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        return {"host_to_gpu_bytes": host.numel()}

    return step


def d2h() -> Step:
    """Pinned device-to-host copies."""
    return _host_copies(to_device=False)


def _embedding(index: Callable[[], torch.Tensor]) -> Step:
    table = nn.Embedding(50_000, 64, device=DEVICE)

    @torch.no_grad()
    def step() -> dict[str, float]:
        for _ in range(1000):
            table(index())
        torch.cuda.synchronize()
        return {"steps": 1000}

    return step


def embedding_cpu_index() -> Step:
    """An embedding lookup whose index is made on the CPU at every step: the classic hidden copy."""
    return _embedding(lambda: torch.arange(128).to(DEVICE))


def embedding_gpu_index() -> Step:
    """The same lookup, mended: the index is made where it is used."""
    return _embedding(lambda: torch.arange(128, device=DEVICE))


def launch_bound() -> Step:
    """Kernels of 1,024 elements: the GPU waits for launches."""
    x = torch.randn(1024, device=DEVICE)

    def step() -> dict[str, float]:
        for _ in range(5000):
            x.mul_(1.0)
        torch.cuda.synchronize()
        return {"launches": 5000}

    return step


def train() -> Step:
    """Training steps of a small transformer with autocast and fused AdamW."""
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    data = torch.randn(32, 512, 1024, device=DEVICE)

    def step() -> dict[str, float]:
        for _ in range(5):
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                loss = model(data).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return {"steps": 5}

    return step


def inference_graph() -> Step:
    """A captured graph of a narrow, deep network with batch 8, replayed: decoding's many small kernels."""
    blocks = [m for _ in range(48) for m in (nn.Linear(2048, 2048, bias=False), nn.GELU())]
    model = nn.Sequential(*blocks).to(DEVICE, torch.bfloat16).eval()
    x = torch.randn(8, 2048, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            model(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(x)

    def step() -> dict[str, float]:
        for _ in range(200):
            graph.replay()
        torch.cuda.synchronize()
        return {"replays": 200}

    return step


def l2_copy() -> Step:
    """Device-to-device copies of 8 MiB, replayed as a graph: everything stays in L2."""
    source = torch.empty(8 << 20, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    target.copy_(source)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1000):
            target.copy_(source)

    def step() -> dict[str, float]:
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        return {"l2_bytes": 5 * 1000 * 2 * source.numel()}

    return step


def l2_reads() -> Step:
    """Reads of 16 MiB again and again, past L1: L2 near its limit, DRAM idle."""
    # Here, since this phase alone needs it: Triton comes with PyTorch for CUDA, and compiles at the first call.
    from gpu.l2_reads import read_repeatedly  # noqa: PLC0415  as said

    source = torch.empty(16 << 20, dtype=torch.uint8, device=DEVICE).random_().view(torch.int32)

    def step() -> dict[str, float]:
        moved = sum(read_repeatedly(source) for _ in range(5))
        torch.cuda.synchronize()
        return {"l2_bytes": moved}

    return step


def peer() -> Step:
    """Copies of 1 GiB to the next GPU, over NVLink where there is one. Needs two GPUs."""
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda:0").random_()
    target = torch.empty_like(source, device="cuda:1")

    def step() -> dict[str, float]:
        for _ in range(20):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return {"peer_bytes": 20 * source.numel()}

    return step


def shared() -> Step:
    """Matrix products, while another job holds memory of the GPU too."""
    return gemm()


RECORDED: tuple[Callable[[], Step], ...] = (
    *(idle, gemm, copy, h2d, d2h, h2d_pageable),
    *(embedding_cpu_index, embedding_gpu_index, launch_bound, shared, train, inference_graph),
)
"""The phases of a recording, in their order."""
PHASES: dict[str, Callable[[], Step]] = {make.__name__: make for make in (*RECORDED, l2_copy, l2_reads, peer)}


def run(step: Step, until: float) -> tuple[float, dict[str, float]]:
    """Repeat `step` until CLOCK_MONOTONIC reaches `until`; when it really ended, and what was done."""
    totals: dict[str, float] = {}
    while (now := time.monotonic()) < until:
        for key, amount in step().items():
            totals[key] = totals.get(key, 0.0) + amount
    return now, totals


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=22, help="length of each phase")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=[make.__name__ for make in RECORDED])
    parser.add_argument("--marks", type=Path)
    parser.add_argument("--counts", type=Path)
    parser.add_argument("--hold", action="store_true", help="keep the GPU when done, until standard input ends")
    args = parser.parse_args()
    for name in args.phases:
        step = PHASES[name]()
        step()  # warm-up: allocation, module load, handles
        begin = time.monotonic()
        if args.marks is not None:
            append(args.marks, f"{begin:.6f} {name}")
        end, totals = run(step, begin + args.seconds)
        if args.marks is not None:
            append(args.marks, f"{end:.6f} between")
        if args.counts is not None:
            append(args.counts, json.dumps({"phase": name, "begin": begin, "end": end, **totals}))
        del step
        torch.cuda.empty_cache()
    if args.hold:
        sys.stdout.write("done\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
