"""What the API says, as plain data: base units, ratios 0-1, null for what is not measured and never 0.

Field names are a contract (docs/api.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, pstdev
from typing import Final

import msgspec

from gpu_hpc_exporter import __version__
from gpu_hpc_exporter.diagnosis.classify import CLASSES, BottleneckClass
from gpu_hpc_exporter.diagnosis.kernels import category
from gpu_hpc_exporter.diagnosis.verdict import Seen, Verdict, may_hang, verdict
from gpu_hpc_exporter.diagnosis.waits import by_kernel, recording, waits
from gpu_hpc_exporter.exposition import clean_label
from gpu_hpc_exporter.model import NS, CopyAmount, CopyKind, GpuActivity, JobOnGpu, Quantity
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot, SourceState
from gpu_hpc_exporter.samplers.kernel_recent import RecentActivity
from gpu_hpc_exporter.samplers.nvml import RELEASED
from gpu_hpc_exporter.samplers.totals import GpuSnapshot
from gpu_hpc_exporter.samplers.window_history import ABSENT, COLUMNS, ROW, STEPS, WindowSlice
from gpu_hpc_exporter.sources.nvml.library import remedy

MAX_PROCESSES: Final = 64
MAX_KERNELS: Final = 12
STEADY_NS: Final = 600 * NS
_STEADY_STEP_NS: Final = 15 * NS
_RATIOS: Final = tuple(round(step / STEPS, 3) if step <= STEPS else None for step in range(ABSENT + 1))
_PIPES: Final[Mapping[Quantity, str]] = {
    "pipe_tensor": "tensor",
    "pipe_fp64": "FP64",
    "pipe_fp32": "FP32",
    "pipe_fp16": "FP16",
    "pipe_int": "integer",
    "pipe_shared": "shared",
}


_DOWN: Final[Mapping[str, str]] = {
    "starting": "the driver is being asked for its GPUs",
    "driver_hung": "a call into the driver does not return: the kernel log may say why",
    "internal_error": "this is a mistake of the exporter: its log has more",
    RELEASED: "the driver was closed on request: `gpu-hpc-exporter resume` opens it at once",
}
"""What is to be said of reasons that are not NVML's."""


class WindowColumns(msgspec.Struct):
    """Windows as columns of equal length, in the order in which they were classed; times on the exporter's clock."""

    end_seconds: list[float]
    duration_seconds: list[float]
    bottleneck: list[str]
    sm_active: list[float | None]
    nvml_utilization: list[float | None]
    sm: list[float | None]
    l2: list[float | None]
    dram: list[float | None]
    pcie: list[float | None]
    nvlink: list[float | None]


class Windows(msgspec.Struct):
    """The event `windows`: what is new of each GPU, by UUID."""

    now_seconds: float
    windows: dict[str, WindowColumns]


class History(msgspec.Struct):
    """One GPU's windows."""

    now_seconds: float
    unix_seconds: float
    gpu: str
    uuid: str
    windows: WindowColumns


class JobRow(msgspec.Struct):
    """A job's part of a GPU; text is "" where unknown, as in gpu_hpc_job_info."""

    job: str
    job_id: str
    kind: str
    user: str
    namespace: str
    pod: str
    container: str
    rank: str
    source: str
    processes: int
    memory_bytes: float | None
    sm_ratio: float | None
    libraries: dict[str, str]


class ProcessRow(msgspec.Struct):
    """A process with a context on the GPU."""

    pid: int
    memory_bytes: int | None
    sm_ratio: float | None


class KernelRow(msgspec.Struct):
    """A kernel of a job, over the last minute; share_ratio: of the time in kernels of that job."""

    job: str
    kernel: str
    category: str
    share_ratio: float
    executions_per_second: float
    mean_seconds: float
    launch_latency_seconds: float | None
    launch_latency_history_seconds: list[float | None]
    pattern: str | None


class CopyRow(msgspec.Struct):
    """Copies of a job over the last minute; sizes: how many of up to 256 B, 4 KiB, 64 KiB, 1, 16, 256 MiB, and more."""

    job: str
    direction: str
    memory: str
    bytes_per_second: float
    copies_per_second: float
    sizes: list[int]


class SourceRow(msgspec.Struct):
    """A source's state, of a GPU or of the host."""

    source: str
    state: str
    reason: str
    seconds: float


class VerdictRow(msgspec.Struct):
    """What holds the GPU back now. alert: null where none is for it. also: what else is wrong."""

    cause: str
    sentence: str
    advice: str
    alert: str | None
    also: list[VerdictRow]


class GpuRow(msgspec.Struct):
    """One GPU or MIG instance; means over the gauge window unless said."""

    gpu: str
    uuid: str
    name: str
    profile: str
    parent_uuid: str
    verdict: VerdictRow
    bottleneck_ratio: dict[str, float]
    intensity_ratio: dict[str, float | None]
    sm_active_ratio: float | None
    sm_occupancy_ratio: float | None
    sm_utilization_ratio: float | None
    l2_cache_miss_ratio: float | None
    dram_bandwidth_utilization_ratio: float | None
    nvml_utilization_ratio: float | None
    pcie_host_to_gpu_bytes_per_second: float | None
    pcie_gpu_to_host_bytes_per_second: float | None
    nvlink_received_bytes_per_second: float | None
    nvlink_transmitted_bytes_per_second: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: float | None
    clock_sm_hertz: float | None
    clock_limit_sm_hertz: float | None
    jobs: list[JobRow]
    job_count: int
    processes: list[ProcessRow] | None
    process_count: int | None
    kernels: list[KernelRow]
    copies: list[CopyRow]
    sources: list[SourceRow]


class Gpus(msgspec.Struct):
    """The event `gpus`, and /api/v1/gpus."""

    version: str
    now_seconds: float
    unix_seconds: float
    up: bool
    down_reason: str | None
    down_advice: str | None
    expected_gpus: int
    recording: str | None
    driver_version: str | None
    gpus: list[GpuRow]
    lost: list[str]
    sources: list[SourceRow]
    agents: dict[str, int] | None


WindowsOf = Callable[[str, int], tuple[int, WindowSlice] | None]


def gpus(snapshot: FleetSnapshot, recent: Mapping[tuple[str, str], RecentActivity], windows_of: WindowsOf) -> Gpus:
    """Everything but the windows. All text from outside is bounded. `windows_of`: as Live.windows."""
    replay = snapshot.host_state("replay")
    by_uuid: dict[str, list[SourceState]] = {}
    for state in snapshot.states:
        by_uuid.setdefault(state.uuid, []).append(state)
    kernels: dict[str, list[RecentActivity]] = {}
    if snapshot.kernels.agents is not None:
        for (uuid, _), activity in recent.items():
            kernels.setdefault(uuid, []).append(activity)
    return Gpus(
        version=__version__,
        now_seconds=round(snapshot.now_ns / NS, 3),
        unix_seconds=round(snapshot.wall_ns / NS, 3),
        up=snapshot.is_up,
        down_reason=clean_label(snapshot.down_reason) or None,
        down_advice=_down_advice(snapshot.down_reason),
        expected_gpus=snapshot.expected,
        recording=clean_label(replay.reason) if replay is not None else None,
        driver_version=snapshot.driver.driver_version or None if snapshot.driver is not None else None,
        gpus=[
            _gpu(snapshot, totals, by_uuid.get(totals.gpu.uuid, []), kernels.get(totals.gpu.uuid, []), windows_of)
            for totals in snapshot.gpus
        ],
        lost=[clean_label(gpu.uuid) for gpu in snapshot.lost],
        sources=_sources(by_uuid.get("", []), snapshot.now_ns),
        agents={str(name): count for name, count in (snapshot.kernels.agents or {}).items()} or None,
    )


def _down_advice(reason: str) -> str | None:
    return (_DOWN.get(reason) or remedy(clean_label(reason))) if reason else None


def windows(now_ns: int, slices: Mapping[str, WindowSlice]) -> Windows:
    """The new windows of each GPU that has some."""
    return Windows(round(now_ns / NS, 3), {uuid: columns(part) for uuid, part in slices.items() if part.ends_ns})


def columns(part: WindowSlice) -> WindowColumns:
    """Rows of small numbers as columns of ratios."""
    ratio, cells = _RATIOS, part.cells
    by_name: dict[str, list[float | None]] = {
        name: [ratio[cell] for cell in cells[place::ROW]] for place, name in enumerate(COLUMNS)
    }
    return WindowColumns(
        end_seconds=[round(ns / NS, 3) for ns in part.ends_ns],
        duration_seconds=[round(ns / NS, 4) for ns in part.durations_ns],
        bottleneck=[CLASSES[cell] for cell in cells[ROW - 1 :: ROW]],
        **by_name,
    )


def _gpu(
    snapshot: FleetSnapshot,
    totals: GpuSnapshot,
    states: Sequence[SourceState],
    told: Sequence[RecentActivity],
    windows_of: WindowsOf,
) -> GpuRow:
    gpu, gauges, rates, readings = totals.gpu, totals.gauges, totals.rates, totals.readings
    known = snapshot.jobs.get(gpu.uuid)
    processes = totals.processes
    recent_ns = sum(totals.recent_class_ns.values())
    share = {name: ns / recent_ns for name, ns in totals.recent_class_ns.items() if ns} if recent_ns else {}
    seen = _seen(snapshot, totals, share, states, told)
    if may_hang(seen):
        seen = replace(seen, deviation=_deviation(windows_of(gpu.uuid, STEADY_NS)))
    return GpuRow(
        gpu=snapshot.label(gpu.uuid),
        uuid=clean_label(gpu.uuid),
        name=clean_label(gpu.name),
        profile=clean_label(gpu.profile),
        parent_uuid=clean_label(gpu.parent_uuid),
        verdict=_verdict_row(verdict(seen)),
        bottleneck_ratio={name: round(part, 4) for name, part in share.items()},
        intensity_ratio={
            unit: _rounded(totals.intensities.get(unit)) for unit in ("sm", "l2", "dram", "pcie", "nvlink")
        },
        sm_active_ratio=_rounded(gauges.get("sm_active")),
        sm_occupancy_ratio=_rounded(gauges.get("sm_occupancy")),
        sm_utilization_ratio=_rounded(totals.sm_utilization),
        l2_cache_miss_ratio=_rounded(totals.l2_miss_ratio),
        dram_bandwidth_utilization_ratio=_rounded(gauges.get("dram_active")),
        nvml_utilization_ratio=readings.get("nvml_utilization_ratio"),
        pcie_host_to_gpu_bytes_per_second=rates.get("pcie_host_to_gpu_bytes"),
        pcie_gpu_to_host_bytes_per_second=rates.get("pcie_gpu_to_host_bytes"),
        nvlink_received_bytes_per_second=rates.get("nvlink_received_bytes"),
        nvlink_transmitted_bytes_per_second=rates.get("nvlink_transmitted_bytes"),
        memory_used_bytes=readings.get("memory_used_bytes"),
        memory_total_bytes=readings.get("memory_total_bytes"),
        power_watts=readings.get("power_gpu_watts"),
        power_limit_watts=readings.get("power_limit_watts"),
        temperature_celsius=readings.get("temperature_gpu_celsius"),
        clock_sm_hertz=readings.get("clock_sm_hertz"),
        clock_limit_sm_hertz=readings.get("clock_limit_sm_hertz"),
        jobs=[_job(row) for row in known.jobs] if known is not None else [],
        job_count=known.count if known is not None else 0,
        processes=None
        if processes is None
        else [ProcessRow(p.pid, p.memory_bytes, p.sm_ratio) for p in processes[:MAX_PROCESSES]],
        process_count=None if processes is None else len(processes),
        kernels=[row for activity in told for row in _kernels(activity)],
        copies=[row for activity in told for row in _copies(recording(activity.activities, "copies"))],
        sources=_sources(states, snapshot.now_ns),
    )


def _seen(
    snapshot: FleetSnapshot,
    totals: GpuSnapshot,
    class_share: Mapping[BottleneckClass, float],
    states: Sequence[SourceState],
    told: Sequence[RecentActivity],
) -> Seen:
    gauges, rates, readings = totals.gauges, totals.rates, totals.readings
    return Seen(
        class_share=class_share,
        intensity=totals.intensities,
        sm_active=gauges.get("sm_active"),
        nvml_utilization=readings.get("nvml_utilization_ratio"),
        l2_to_dram=totals.l2_miss_ratio,
        pipe=_busiest_pipe(totals),
        to_gpu=rates.get("pcie_host_to_gpu_bytes"),
        to_host=rates.get("pcie_gpu_to_host_bytes"),
        job=clean_label(snapshot.job_of(totals.gpu.uuid)),
        job_gpus=_job_gpus(snapshot, totals.gpu.uuid),
        memory=totals.memory_used,
        memory_before=totals.memory_used_before,
        waits=[w for activity in told if (w := waits(activity.newest)) is not None],
        gap=_gap(states),
        power_brake=bool(readings.get("clock_event_hw_power_brake_slowdown")),
    )


def _job_gpus(snapshot: FleetSnapshot, uuid: str) -> int:
    """How many GPUs of this machine the one job of a GPU holds, 0 where it has none or several."""
    if not snapshot.job_of(uuid):
        return 0
    job = snapshot.jobs[uuid].jobs[0].job
    names = ((row.job.job, row.job.namespace) for held in snapshot.jobs.values() for row in held.jobs)
    return sum(name == (job.job, job.namespace) for name in names)


def _deviation(found: tuple[int, WindowSlice] | None) -> float | None:
    """Of SM active over ten minutes in means of 15 s, as a scraper sees it; None where half of it was not measured."""
    now_ns, part = found or (0, None)
    if part is None or not part.ends_ns or now_ns - part.ends_ns[0] < STEADY_NS - _STEADY_STEP_NS:
        return None
    active = part.cells[COLUMNS.index("sm_active") :: ROW]
    if ABSENT in active or sum(part.durations_ns) < STEADY_NS // 2:
        return None
    steps = round(STEADY_NS / _STEADY_STEP_NS)
    size = -(-len(active) // steps)
    means = [mean(active[begin : begin + size]) / STEPS for begin in range(0, len(active), size)]
    return pstdev(means)


def _verdict_row(found: Verdict) -> VerdictRow:
    alert = f"GpuHpc{found.alert}" if found.alert else None
    also = [_verdict_row(other) for other in found.also]
    return VerdictRow(found.cause, found.sentence, found.advice, alert, also)


def _busiest_pipe(totals: GpuSnapshot) -> str:
    busiest = max(_PIPES, key=lambda pipe: totals.gauges.get(pipe, -1.0))
    return _PIPES[busiest] if busiest in totals.gauges else ""


def _gap(states: Iterable[SourceState]) -> str:
    """Why no window comes: the first source of windows that says so."""
    reasons = (f"{s.source} {s.state}: {s.reason}" for s in states if s.source in ("gpm", "pm_sampling") and s.reason)
    return clean_label(next(reasons, ""))


def _job(row: JobOnGpu) -> JobRow:
    job = row.job
    return JobRow(
        job=clean_label(job.job),
        job_id=clean_label(job.job_id),
        kind=job.kind,
        user=clean_label(job.user),
        namespace=clean_label(job.namespace),
        pod=clean_label(job.pod),
        container=clean_label(job.container),
        rank=clean_label(job.rank),
        source=clean_label(job.source),
        processes=row.processes,
        memory_bytes=row.memory_bytes,
        sm_ratio=row.sm_ratio,
        libraries={library.name: clean_label(library.version) for library in row.libraries},
    )


def _kernels(told: RecentActivity) -> list[KernelRow]:
    activities = told.activities
    traced_s = _traced_s(activities)
    if not activities or traced_s <= 0:
        return []
    amounts = by_kernel(activities)
    total_ns = sum(amount.ns for amount in amounts.values())
    now, latencies = activities[-1], told.latencies_ms or {}
    ran = [(name, amount) for name, amount in amounts.items() if amount.executions]
    busiest = sorted(ran, key=lambda row: -row[1].ns)[:MAX_KERNELS]
    return [
        KernelRow(
            job=clean_label(now.job),
            kernel=clean_label(name),
            category=category(name),
            share_ratio=round(amount.ns / total_ns, 4) if total_ns else 0.0,
            executions_per_second=amount.executions / traced_s,
            mean_seconds=amount.ns / NS / amount.executions,
            launch_latency_seconds=_from_ms(now.latency_ms.get(name)),
            launch_latency_history_seconds=[_from_ms(ms) for ms in latencies.get(name, ())],
            pattern=now.patterns.get(name),
        )
        for name, amount in busiest
    ]


def _copies(activities: Sequence[GpuActivity]) -> list[CopyRow]:
    traced_s = _traced_s(activities)
    sums: dict[CopyKind, CopyAmount] = {}
    for activity in activities:
        for kind, amount in activity.copies.items():
            sums[kind] = sums[kind] + amount if kind in sums else amount
    if traced_s <= 0:
        return []
    job = clean_label(activities[-1].job)
    rows = []
    for kind, amount in sums.items():
        direction, _, memory = kind.partition("_")
        if any(amount.buckets):
            sizes = list(amount.buckets)
            rows.append(CopyRow(job, direction, memory, amount.bytes / traced_s, sum(sizes) / traced_s, sizes))
    return rows


def _traced_s(activities: Iterable[GpuActivity]) -> float:
    return sum(activity.sums.get("traced_ns", 0) for activity in activities) / NS


def _sources(states: Iterable[SourceState], now_ns: int) -> list[SourceRow]:
    return [
        SourceRow(s.source, s.state, clean_label(s.reason), round(max(0, now_ns - s.since_ns) / NS, 1)) for s in states
    ]


def _from_ms(value: float | None) -> float | None:
    return None if value is None else value / 1000


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
