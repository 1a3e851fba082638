"""Which alerts each phase of the recording must raise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

BERT: Final = "bert_finetune"
LLAMA: Final = "llama_pretrain"
EXPECTED: Final[Mapping[str, tuple[str, set[str]]]] = {
    "idle": ("", set()),
    "gemm": (BERT, set()),
    "copy": (BERT, {"GpuHpcDramSaturatedSmIdle"}),
    "h2d": (BERT, {"GpuHpcPcieSaturated", "GpuHpcUtilizationMisleading"}),
    "d2h": (BERT, {"GpuHpcPcieSaturated", "GpuHpcUtilizationMisleading"}),
    # At an eighth of what the link can do; nvidia-smi shows 15 percent.
    "h2d_pageable": (BERT, {"GpuHpcGpuStarved", "GpuHpcPageableCopies"}),
    # nvidia-smi shows 9 percent there: what it says is not misleading. Its only kernel is a short one at each step.
    "embedding_cpu_index": (
        BERT,
        {
            "GpuHpcGpuStarved",
            "GpuHpcJobGpuUnderused",
            "GpuHpcLaunchBound",
            "GpuHpcSmallCopyStorm",
            "GpuHpcSyncStorm",
        },
    ),
    # Mended, and still nothing but lookups: copies and waits are gone, short kernels are left.
    "embedding_gpu_index": (BERT, {"GpuHpcGpuStarved", "GpuHpcJobGpuUnderused", "GpuHpcLaunchBound"}),
    # SM active 0.0002: too little for underused, and busy with launches all the time, so not idle either.
    "launch_bound": (BERT, {"GpuHpcGpuStarved", "GpuHpcLaunchBound"}),
    "shared": ("", set()),
    "train": (LLAMA, set()),
    "inference_graph": (LLAMA, {"GpuHpcGpuStarved", "GpuHpcJobGpuUnderused"}),
}
"""By phase: the GPU's only job, and the alerts that hold; no other one does."""
OF_KERNELS: Final = frozenset({"GpuHpcLaunchBound", "GpuHpcPageableCopies", "GpuHpcSmallCopyStorm", "GpuHpcSyncStorm"})
"""Those of them that need the job's kernel agent, and therefore know the job."""
