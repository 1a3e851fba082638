"""What holds a GPU back now, in one sentence, and what to do about it. Pure.

Sentences and advice are those of the alerts (alert-rules/*.yml), as far as there is one for the cause: a test holds the
two together. An alert asks whether it lasted for minutes, a verdict looks at the last seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from gpu_hpc_exporter.diagnosis import thresholds as th
from gpu_hpc_exporter.diagnosis.classify import BottleneckClass
from gpu_hpc_exporter.diagnosis.intensity import Unit
from gpu_hpc_exporter.diagnosis.waits import Copying, Waits


@dataclass(frozen=True, slots=True)
class Verdict:
    """cause: a stable name for programs. alert: the alert of that cause, "" where there is none.

    also: what else is wrong with the job or the GPU, whatever bounds it now.
    """

    cause: str
    sentence: str
    advice: str
    alert: str = ""
    also: tuple[Verdict, ...] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """Means of the last seconds. class_share: by class, adds up to 1, empty where nothing was measured.

    to_gpu, to_host: bytes a second over the host link. job: the only one that holds the GPU, "" where there is none.
    waits: of each job with an agent. gap: why nothing is measured. power_brake: as against heat. job_gpus: how many
    GPUs here the job holds. deviation: of SM active over ten minutes, None where so much is not known. memory,
    memory_before: share in use now and half an hour ago.
    """

    class_share: Mapping[BottleneckClass, float]
    intensity: Mapping[Unit, float]
    sm_active: float | None = None
    nvml_utilization: float | None = None
    l2_to_dram: float | None = None
    pipe: str = ""
    to_gpu: float | None = None
    to_host: float | None = None
    job: str = ""
    waits: Sequence[Waits] = field(default_factory=tuple)
    gap: str = ""
    power_brake: bool = False
    job_gpus: int = 0
    deviation: float | None = None
    memory: float | None = None
    memory_before: float | None = None


ADVICE: Final[Mapping[str, str]] = {
    "DramSaturatedSmIdle": "The work is bound by memory: fuse element-wise operations, use flash attention, a lower "
    "precision and channels-last layouts. In a server that decodes tokens this is the goal state.",
    "PcieSaturated to GPU": "Pin the host's memory, prefetch, and preprocess on the GPU.",
    "PcieSaturated to host": "Return less, compress, and keep results on the GPU.",
    "PcieSaturated": "See which direction is busy, then move less: keep data on the GPU.",
    "L2Thrashing": "Reuse what L2 holds: tile the loops, choose the layout that is read in order, make the working set "
    "smaller.",
    "NvlinkSaturated": "Overlap communication with compute, compress gradients, and look at the topology: which ranks "
    "talk to which.",
    "UtilizationMisleading": "The busy number is copies or one resident warp. Judge this GPU by its SM activity, and "
    "see where its time went on the dashboard.",
    "GpuStarved": "Look for what the GPU waits for: the input pipeline, synchronisation with the host, the overhead of "
    "many short launches. The kernel agent tells them apart: start the job as `gpu-hpc-exporter run -- COMMAND`.",
    "IdleButAllocated": "Release the GPU: end the job, or let it ask for fewer.",
    "SmallCopyStorm": "A tensor on the CPU takes part in the GPU's work and is copied each time. Create it where it is "
    "used: `torch.arange(..., device=x.device)`. Look for `torch.arange`, `torch.tensor`, masks and indices without "
    "`device=` in the loop.",
    "PageableCopies": "Such a copy goes through a small pinned buffer of the driver, is slow and blocks the thread "
    "that asks for it. Pin the memory (`pin_memory=True` in the DataLoader) and copy with `non_blocking=True`.",
    "LaunchBound": "The host cannot launch as fast as the GPU could run. Launch less: CUDA graphs, `torch.compile`, "
    "foreach or fused optimizers, larger batches.",
    "LaunchQueueing": "Work waits for other work though most of the GPU is free: one stream for what could run side by "
    "side, events between streams, copies in the default stream, or kernels with few blocks that take long.",
    "SyncStorm": "While the host waits it launches nothing, and then the GPU waits. Look for `.item()`, `.cpu()`, "
    "`print(loss)`, `torch.cuda.synchronize()` and tensors that are created on the CPU in the loop.",
    "CommunicationExposed": "Overlap it with compute (bucket size, asynchronous collectives, a stream of its own), "
    "move less, and see which way the data go: NVLink and InfiniBand instead of PCIe and the host. It may also be the "
    "wait for a slower rank.",
    "KernelJitter": "Executions with equal name, grid and block differ by more than their mean. See whether another "
    "job shares the GPU, whether its clocks change, and whether the kernel waits for memory of the host or of another "
    "GPU.",
    "CollectiveHung": "Find the rank that left: the job's GPU that is idle or gone, its log, its node. Then end and "
    "restart the job.",
    "MemoryNearlyFull": "Look for tensors that stay referenced (losses kept for logging, caches that grow) and for "
    "fragmentation, before an allocation fails.",
    "ThermalSlowdown": "Look at fans, air flow or coolant, and the inlet's temperature; compare with the node's other "
    "GPUs. Lower the power limit until it is repaired.",
    "PowerBrake": "Look at the node's power supplies, the GPU's power cables and the rack's power budget in the BMC's "
    "event log.",
}
"""By alert less its prefix. PcieSaturated says one of three, by the busy direction."""


def verdict(seen: Seen) -> Verdict:
    """What took most of the time that was not idle, and what else is wrong."""
    found = _hung(seen) if may_hang(seen) else None
    return replace(found or _of_time(seen), also=(*_jitter(seen.waits), *_memory(seen)))


def may_hang(seen: Seen) -> bool:
    """Whether all but the deviation speaks for a collective that spins."""
    links = [seen.intensity.get("pcie", 0.0), seen.intensity.get("nvlink", 0.0)]
    return (
        bool(seen.job)
        and seen.job_gpus >= th.HUNG_GPUS
        and th.HUNG_SM_ACTIVE < (seen.sm_active or 0.0) < th.STARVED_SM_ACTIVE
        and seen.intensity.get("sm", 1.0) < th.HUNG_SM
        and seen.intensity.get("dram", 1.0) < th.IDLE_SHARE
        and max(links) < th.IDLE_SHARE
        and not (seen.nvml_utilization is not None and seen.nvml_utilization < th.HUNG_NVML)
    )


def _hung(seen: Seen) -> Verdict | None:
    if seen.deviation is None or seen.deviation >= th.HUNG_DEVIATION:
        return None
    text = (
        f"Collective hangs in {seen.job}: for 10 minutes the same {_percent(seen.sm_active)} of the SMs spin and no "
        f"data move, on one of the job's {seen.job_gpus} GPUs here"
    )
    return Verdict("collective_hung", text, ADVICE["CollectiveHung"], "CollectiveHung")


def _jitter(waits: Sequence[Waits]) -> Iterator[Verdict]:
    for found in waits:
        if found.jittery is not None and found.jittery > th.JITTERY:
            text = (
                f"A kernel takes ever different times in {found.job}: {found.jittery_kernel}, "
                f"{_percent(found.jittery)} of the time in kernels"
            )
            yield Verdict("kernel_jitter", text, ADVICE["KernelJitter"], "KernelJitter")


def _memory(seen: Seen) -> Iterator[Verdict]:
    now, before = seen.memory, seen.memory_before
    if now is None or before is None:
        return
    if now > th.MEMORY_NEARLY_FULL and before > th.MEMORY_WAS_FULL and now - before > th.MEMORY_RISE:
        where = f"in {seen.job}" if seen.job else "(no single job)"
        text = f"Memory nearly full {where}: {now:.1%} used and still rising after half an hour above 80%"
        yield Verdict("memory_nearly_full", text, ADVICE["MemoryNearlyFull"], "MemoryNearlyFull")


def _of_time(seen: Seen) -> Verdict:
    share = seen.class_share
    if not share:
        return Verdict(
            "not_measured", f"Not measured now{f': {seen.gap}' if seen.gap else ''}.", "See the sources below."
        )
    if share.get("idle", 0.0) >= th.IDLE_TIME:
        return _idle(seen)
    starved = share.get("starved", 0.0) + share.get("copy_only", 0.0)
    others = [name for name in share if name not in ("idle", "starved", "copy_only")]
    main = max(others, key=share.__getitem__, default=None)
    if main is None or starved >= share[main]:
        return _starved(seen, starved / (1 - share.get("idle", 0.0)))
    return _of_class(main, seen)


def _idle(seen: Seen) -> Verdict:
    if not seen.job:
        return Verdict("idle", "Idle: no kernel and no copy ran.", "")
    return Verdict(
        "idle_but_allocated",
        f"GPU idle but allocated to {seen.job}: no kernel and no copy ran.",
        f"If that lasts: {_lower(ADVICE['IdleButAllocated'])}",
        "IdleButAllocated",
    )


def _of_class(name: BottleneckClass, seen: Seen) -> Verdict:
    sm, job = _percent(seen.intensity.get("sm")), _in_job(seen)
    dram, nvlink = _percent(seen.intensity.get("dram")), _percent(seen.intensity.get("nvlink"))
    match name:
        case "pcie_bound":
            return _pcie(seen)
        case "nvlink_bound":
            text = f"NVLink saturated{job}: NVLink {nvlink} of what is reachable, busiest pipe {sm}"
            return Verdict("nvlink_saturated", text, ADVICE["NvlinkSaturated"], "NvlinkSaturated")
        case "dram_bound":
            idle = seen.intensity.get("sm", 1.0) < th.L2_THRASH_SM
            beside = " while the SMs idle" if idle else ""
            text = f"DRAM saturated{beside}{job}: DRAM {dram} of what is reachable, busiest pipe {sm}"
            alert = "DramSaturatedSmIdle" if idle and seen.intensity.get("dram", 0.0) > th.DRAM_SATURATED else ""
            return Verdict("dram_saturated", text, ADVICE["DramSaturatedSmIdle"], alert)
        case "l2_thrash":
            text = (
                f"Little reuse in L2{job}: {_percent(seen.l2_to_dram)} of the requested sectors went to DRAM, "
                f"DRAM {dram} of what is reachable"
            )
            return Verdict("l2_thrashing", text, ADVICE["L2Thrashing"], "L2Thrashing")
        case "throttled":
            alert = "PowerBrake" if seen.power_brake else "ThermalSlowdown"
            why = "Power brake" if seen.power_brake else "Thermal slowdown"
            return Verdict("throttled", f"{why}{job}: the hardware holds its clocks down.", ADVICE[alert], alert)
        case _:
            sentence, advice = _PLAIN[name]
            return Verdict(name, sentence.format(job=job, sm=sm, dram=dram, pipe=seen.pipe or "busiest"), advice)


_PLAIN: Final[Mapping[str, tuple[str, str]]] = {
    "compute_bound": (
        "Compute-bound{job}: the {pipe} pipe is busy for {sm} of the time. This is what the GPU is for.",
        "To go faster, do less: a lower precision, fewer operations, or more GPUs.",
    ),
    "l2_bound": (
        "L2's bandwidth is saturated{job}: SM {sm}, DRAM {dram} of what is reachable.",
        "Keep more in registers and shared memory, and read each line of L2 once: larger tiles, wider loads.",
    ),
    "media": ("The video engines work{job}, the SMs do not.", "Normal for transcoding and for decoding input."),
    "mixed": (
        "No single limit{job}: compute and memory take turns, SM {sm}, DRAM {dram} of what is reachable.",
        "Normal for training. The top kernels below tell where a faster kernel would pay.",
    ),
    "latency_bound": (
        "Latency-bound{job}: SMs hold work, but nothing is near its limit, SM {sm}, DRAM {dram} of what is reachable.",
        "Low occupancy or loads that depend on each other: larger grids and batches, more independent work per thread.",
    ),
    "unknown": (
        "Cannot be told{job}: a unit that this GPU has is not measured.",
        "See the sources below: what is missing, and why.",
    ),
}


def _pcie(seen: Seen) -> Verdict:
    to_gpu, to_host = seen.to_gpu, seen.to_host
    for found in seen.waits:
        if found.copying is not None and _copies_pageable(found.copying):
            return _pageable(found.job, found.copying)
    key, way = "PcieSaturated", "(direction unknown)"
    if to_gpu is not None and to_host is not None:
        key, way = (f"{key} to GPU", "host to GPU") if to_gpu >= to_host else (f"{key} to host", "GPU to host")
    text = (
        f"Host link saturated {way}{_in_job(seen)}: PCIe {_percent(seen.intensity.get('pcie'))} of what is reachable, "
        f"busiest pipe {_percent(seen.intensity.get('sm'))}{_misleading(seen)}"
    )
    return Verdict("pcie_saturated", text, ADVICE[key], "PcieSaturated")


def _starved(seen: Seen, share: float) -> Verdict:
    active = _percent(seen.sm_active)
    for found in seen.waits:
        reason = _kernel_cause(found, seen.sm_active, active)
        if reason is not None:
            return reason
    text = (
        f"GPU starved{_in_job(seen)}: in {_percent(share)} of the time that was not idle, kernels were too few or too "
        f"small, or only copies ran; idle {_percent(seen.class_share.get('idle', 0.0))} of the time{_misleading(seen)}"
    )
    return Verdict("starved", text, ADVICE["GpuStarved"], "GpuStarved")


def _kernel_cause(found: Waits, sm_active: float | None, active: str) -> Verdict | None:
    """What the agent saw explains it."""
    copying = found.copying
    if copying is not None and _copies_small(copying, found.executions):
        text = (
            f"Storm of small copies in {found.job}: {copying.count:.0f} copies a second from host to GPU, "
            f"{copying.bytes / copying.count:.0f} B each, SM active {active}"
        )
        return Verdict("small_copy_storm", text, ADVICE["SmallCopyStorm"], "SmallCopyStorm")
    if copying is not None and _copies_pageable(copying):
        return _pageable(found.job, copying)
    if found.many_short is not None and found.many_short > th.MANY_SHORT:
        text = (
            f"Launches bound {found.job}: {_percent(found.many_short)} of its launches are of kernels that take less "
            f"than 50 us each and are launched over 1,000 times a second, SM active {active}"
        )
        return Verdict("launch_bound", text, ADVICE["LaunchBound"], "LaunchBound")
    if found.exposed is not None and found.exposed > th.COMMUNICATION_EXPOSED:
        text = (
            f"Communication is exposed in {found.job}: in {_percent(found.exposed)} of the time in which kernels ran, "
            "NCCL's ran and nothing computed"
        )
        return Verdict("communication_exposed", text, ADVICE["CommunicationExposed"], "CommunicationExposed")
    if _waits_often(found) and sm_active is not None and sm_active < th.HOST_WAIT_SM_ACTIVE:
        text = (
            f"{found.job} waits for the GPU too often: in {_percent(found.host_wait)} of the time (of all its threads) "
            f"it synchronises or waits inside copies, SM active {active}"
        )
        return Verdict("sync_storm", text, ADVICE["SyncStorm"], "SyncStorm")
    if found.queue_s is not None and found.queue_s > th.QUEUE_S:
        wait = f"{1000 * found.queue_s:.3g}ms from launch to start"
        text = f"Kernels queue in {found.job}: {wait}, though SM active is {active}"
        return Verdict("launch_queueing", text, ADVICE["LaunchQueueing"], "LaunchQueueing")
    return None


def _copies_small(copying: Copying, executions: float) -> bool:
    return (
        copying.count > th.SMALL_COPIES_PER_S
        and copying.bytes < th.SMALL_COPY_BYTES * copying.count
        and copying.count >= th.SMALL_COPIES_PER_KERNEL * executions
    )


def _waits_often(found: Waits) -> bool:
    waits_long = found.host_wait is not None and found.host_wait > th.HOST_WAIT
    return waits_long and found.busy is not None and found.busy < th.HOST_WAIT_BUSY


def _copies_pageable(copying: Copying) -> bool:
    return copying.pageable_bytes > th.PAGEABLE_BYTES_PER_S and copying.pageable_bytes > copying.pinned_bytes


def _pageable(job: str, copying: Copying) -> Verdict:
    way = "host to GPU" if copying.pageable_to_gpu else "GPU to host"
    text = (
        f"Copies use pageable memory in {job}: {copying.pageable_bytes / 1e9:.3g} GB/s of "
        f"{(copying.pageable_bytes + copying.pinned_bytes) / 1e9:.3g} GB/s, mostly {way}"
    )
    return Verdict("pageable_copies", text, ADVICE["PageableCopies"], "PageableCopies")


def _misleading(seen: Seen) -> str:
    """The number that people know, where it says the opposite."""
    busy, active = seen.nvml_utilization, seen.sm_active
    if busy is None or active is None or busy <= th.MISLEADING_NVML or active >= th.COPY_ONLY_SM_ACTIVE:
        return ""
    return f"; nvidia-smi's utilization misleads: it says {_percent(busy)} while {active:.1%} of the SMs had work"


def _in_job(seen: Seen) -> str:
    return f" in {seen.job}" if seen.job else ""


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0%}"


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
