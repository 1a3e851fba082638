"""A kernel that does nothing but read from L2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
ROUNDS = 512
PROGRAMS = 2112
"""16 for each of an H200's 132 SMs."""


@triton.jit
def _read(source, target, blocks, rounds: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202  Triton compiles annotations too
    program = tl.program_id(0)
    lanes = tl.arange(0, block)
    total = tl.zeros((block,), dtype=tl.int32)
    for turn in range(rounds):
        # Neighbours read different blocks, and `.cg` keeps L1 out of it.
        place = (program * 37 + turn * 613) % blocks
        total += tl.load(source + place * block + lanes, cache_modifier=".cg")
    tl.store(target + program * block + lanes, total)


_targets: dict[int, torch.Tensor] = {}


def read_repeatedly(source: torch.Tensor) -> float:
    """Queue reads of an int32 tensor that fits into L2; the bytes that they read."""
    target = _targets.setdefault(source.data_ptr(), torch.empty(PROGRAMS * BLOCK, dtype=torch.int32, device="cuda"))
    _read[(PROGRAMS,)](source, target, source.numel() // BLOCK, ROUNDS, BLOCK, num_warps=8)
    return float(PROGRAMS * ROUNDS * BLOCK * 4)
