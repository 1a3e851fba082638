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
    # nvidia-smi shows 12 percent there: what it says is not misleading.
    "embedding_cpu_index": (BERT, {"GpuHpcGpuStarved", "GpuHpcJobGpuUnderused"}),
    # SM active 0.0003: too little for underused, and busy with launches all the time, so not idle either.
    "launch_bound": (BERT, {"GpuHpcGpuStarved"}),
    "shared": ("", set()),
    "train": (LLAMA, set()),
    "inference_graph": (LLAMA, {"GpuHpcGpuStarved", "GpuHpcJobGpuUnderused"}),
}
"""By phase: the GPU's only job, and the alerts that hold; no other one does."""
