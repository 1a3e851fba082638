"""What a kernel agent could tell of a job, made up: one GPU's recording shows no NCCL, no jitter and no pauses."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpu_hpc_exporter.diagnosis.kernels import category
from gpu_hpc_exporter.model import (
    COPY_BUCKETS,
    DURATION_BUCKETS,
    NS,
    ActivitySum,
    Category,
    CopyAmount,
    CopyKind,
    Durations,
    Event,
    GpuActivity,
    Inventory,
    JobsInForce,
    KernelAmount,
    KernelReport,
    Library,
    Pattern,
    Tracing,
)
from gpu_hpc_exporter.sources.replay import time_of
from history.phases import looped, recording

JOB = "bert_finetune"
"""Of the two jobs of the phase `shared` the one with an agent."""
ACT_S = 600
REPORT_S, PERIOD_S = 5, 10
"""An agent looks for a second before each period begins."""
_LIBRARIES = (
    Library("cuda_driver", "580.159.04"),
    Library("cudart", "12.8.90"),
    Library("cublas", "12.8.4.1"),
    Library("nccl", "2.27.3"),
    Library("torch", "2.8.0"),
)


@dataclass(frozen=True)
class Kernel:
    """In a second: executions, so many us each with this spread (deviation as a share of the mean), so many launched.

    wait_us: from launch to start.
    """

    name: str
    executions: int
    us: float
    launches: int
    spread: float = 0.1
    wait_us: float = 12.0
    pattern: Pattern | None = None

    @property
    def longest_us(self) -> float:
        return self.us * (1 + 3 * self.spread)

    @property
    def amount(self) -> KernelAmount:
        ns = self.us * 1000
        deviation = self.executions * (ns * self.spread) ** 2
        return KernelAmount(self.executions, self.launches, round(self.executions * ns), deviation)


@dataclass(frozen=True)
class Act:
    """What a job does for a while, in each second: kernels, copies (number, bytes of each), and sums."""

    kernels: tuple[Kernel, ...]
    copies: dict[CopyKind, tuple[int, int]]
    sums: dict[ActivitySum, float]

    def seen(self, uuid: str, *, looked: bool) -> GpuActivity:
        """What is told of a second of it, or of none where nobody looked."""
        kernels = {one.name: one.amount if looked else KernelAmount() for one in self.kernels}
        told = GpuActivity(
            uuid,
            JOB,
            kernels,
            latency_ms={one.name: one.wait_us / 1000 for one in self.kernels if one.launches},
            longest_ns={one.name: round(one.longest_us * 1000) for one in self.kernels},
            patterns={one.name: one.pattern for one in self.kernels if one.pattern},
        )
        if not looked:
            return told
        waits = [(one.wait_us, one.launches) for one in self.kernels]
        return replace(
            told,
            durations=self._durations(),
            queue=_durations(waits),
            copies={kind: _copies(kind, *copies) for kind, copies in self.copies.items()},
            sums={
                "traced_ns": NS,
                "device_traced_ns": NS,
                **{name: round(value if "graphs" in name else value * NS) for name, value in self.sums.items()},
            },
        )

    def _durations(self) -> dict[Category, Durations]:
        kinds: dict[Category, list[tuple[float, int]]] = {}
        for one in self.kernels:
            kinds.setdefault(category(one.name), []).append((one.us, one.executions))
        return {kind: _durations(rows) for kind, rows in kinds.items()}


def _durations(rows: list[tuple[float, int]]) -> Durations:
    """Half of them as long as said, a quarter each half and twice as long."""
    buckets = [0] * DURATION_BUCKETS
    for us, count in rows:
        for part, factor in ((count // 2, 1.0), (count // 4, 0.5), (count - count // 2 - count // 4, 2.0)):
            place = next((n for n in range(DURATION_BUCKETS - 1) if us * factor <= 8**n), DURATION_BUCKETS - 1)
            buckets[place] += part
    return Durations(round(sum(us * 1000 * count for us, count in rows)), tuple(buckets))


def _copies(kind: CopyKind, count: int, size: int) -> CopyAmount:
    place = next((n for n in range(COPY_BUCKETS - 1) if size <= 256 * 16**n), COPY_BUCKETS - 1)
    buckets = tuple(count if n == place else 0 for n in range(COPY_BUCKETS))
    ns = round(count * (1500 + size / (6 if "pageable" in kind else 50)))
    api = ns + count * 4000 if "pageable" in kind else count * 3000
    return CopyAmount(count * size, ns, api, buckets)


_GEMM = "nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT"
_ATTENTION, _NORM = "flash_fwd_kernel", "vectorized_layer_norm_kernel"
_ADD, _GELU = "vectorized_elementwise_kernel[CUDAFunctor_add]", "triton_poi_fused_gelu"
_ADAM, _REDUCE = "multi_tensor_apply_kernel[FusedAdamMathFunctor]", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
_INDEX, _OTHER = "index_elementwise_kernel[gpu_index_kernel]", "other"

ACTS = (
    # Trains as it should: graphs, few launches, communication under compute.
    Act(
        (
            Kernel(_GEMM, 2400, 210, 600, wait_us=900),
            Kernel(_ATTENTION, 600, 320, 150, wait_us=900),
            Kernel(_NORM, 1200, 35, 300, wait_us=800),
            Kernel(_GELU, 1200, 28, 300, wait_us=800),
            Kernel(_ADAM, 25, 1400, 25, wait_us=2000, pattern="few_long"),
            Kernel(_REDUCE, 100, 1100, 100, wait_us=1500),
            Kernel(_OTHER, 800, 9, 200, wait_us=500),
        ),
        {"h2d_pinned": (50, 4 << 20), "d2h_pinned": (5, 4096), "d2d_device": (150, 1 << 20)},
        {
            "busy_ns": 0.93,
            "compute_ns": 0.9,
            "communication_ns": 0.11,
            "overlap_ns": 0.09,
            "copy_ns": 0.01,
            "idle_host_ns": 0.03,
            "idle_queue_ns": 0.03,
            "idle_other_ns": 0.01,
            "launch_api_ns": 0.02,
            "graphs_traced": 25,
            "sync_stream_ns": 0.05,
        },
    ),
    # A tensor on the CPU in the loop: small copies from pageable memory, waits, tiny kernels.
    Act(
        (
            Kernel(_ADD, 14_000, 3.1, 14_000, 0.2, 4, "many_short"),
            Kernel(_INDEX, 2000, 6.5, 2000, 0.4, 5, "many_short"),
            Kernel(_GEMM, 900, 150, 900, wait_us=8),
            Kernel(_NORM, 900, 30, 900, wait_us=8),
            Kernel(_OTHER, 2600, 4, 2600, wait_us=5),
        ),
        {"h2d_pageable": (2400, 2048), "d2h_pageable": (300, 256), "h2d_pinned": (20, 4 << 20)},
        {
            "busy_ns": 0.27,
            "compute_ns": 0.25,
            "copy_ns": 0.02,
            "idle_host_ns": 0.64,
            "idle_queue_ns": 0.05,
            "idle_other_ns": 0.04,
            "launch_api_ns": 0.12,
            "sync_stream_ns": 0.31,
            "sync_event_ns": 0.02,
            "sync_context_ns": 0.01,
        },
    ),
    # Waits for other ranks, and one kernel is disturbed.
    Act(
        (
            Kernel(_GEMM, 1500, 230, 1500, 1.6, 60, "jittery"),
            Kernel(_REDUCE, 60, 8200, 60, 0.5, 900),
            Kernel(_GELU, 700, 28, 700),
            Kernel(_ADAM, 15, 1400, 15, pattern="few_long"),
            Kernel(_OTHER, 500, 9, 500),
        ),
        {"h2d_pinned": (30, 4 << 20), "p2p_device": (60, 8 << 20), "d2d_device": (100, 1 << 20)},
        {
            "busy_ns": 0.84,
            "compute_ns": 0.39,
            "communication_ns": 0.49,
            "overlap_ns": 0.05,
            "copy_ns": 0.02,
            "idle_host_ns": 0.08,
            "idle_queue_ns": 0.06,
            "idle_other_ns": 0.02,
            "launch_api_ns": 0.04,
            "graphs_untraced": 8,
            "sync_event_ns": 0.12,
        },
    ),
)
"""One after the other, ACT_S seconds each."""


def with_kernels() -> Iterator[Event]:
    """A shared GPU, one of whose two jobs has an agent and does ACTS in turn."""
    recorded = (_with_libraries(event) for event in looped("shared") if not isinstance(event, KernelReport))
    return heapq.merge(recorded, _reports(), key=time_of)


def _with_libraries(event: Event) -> Event:
    if not isinstance(event, JobsInForce):
        return event
    gpus = {
        uuid: replace(gpu, jobs=tuple(replace(job, libraries=_LIBRARIES) for job in gpu.jobs))
        for uuid, gpu in event.gpus.items()
    }
    return replace(event, gpus=gpus)


def _reports() -> Iterator[KernelReport]:
    """One every REPORT_S, of the time before it; another process of the job gives way to a profiler in the last act."""
    uuid = next(event.gpus[0].uuid for event in recording().events if isinstance(event, Inventory))
    for at in itertools.count(0, REPORT_S):
        act = ACTS[max(at - 1, 0) // ACT_S % len(ACTS)]
        looked = at % PERIOD_S == 0
        records = sum(kernel.executions for kernel in act.kernels) if looked else 0
        profiled = act is ACTS[-1]
        yield KernelReport(
            at * NS,
            (act.seen(uuid, looked=looked),),
            {"tracing": int(looked), "waiting": int(not looked) + int(not profiled), "paused": int(profiled), "off": 0},
            ("profiler",) if profiled else (),
            act.sums["launch_api_ns"] / 10,
            {"kept": records, "unmatched": records // 500, "dropped": records // 20_000, "invalid": 0},
            tracing={uuid: Tracing(((NS, 0),))} if looked else {},
        )
