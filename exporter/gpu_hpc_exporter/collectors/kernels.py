"""What the kernel agents tell: kernels, copies and waits of each job on each GPU, and how the agents are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from gpu_hpc_exporter import metrics
from gpu_hpc_exporter.diagnosis.kernels import OTHER, category
from gpu_hpc_exporter.exposition import Family, Spec
from gpu_hpc_exporter.model import DURATION_BUCKETS, NS, ActivitySum, Durations
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot
from gpu_hpc_exporter.samplers.kernel_totals import JobActivity

DURATION_BOUNDS: Final = tuple(8**power / 1e6 for power in range(DURATION_BUCKETS - 1))
COPY_BOUNDS: Final = (256, 4096, 65_536, 1 << 20, 1 << 24, 1 << 28)
MAX_CATEGORY_PAIRS: Final = 8
"""Up to so many (GPU, job) pairs durations are told by category."""
_NS2: Final = 1e18

Pairs = list[tuple[tuple[str, str, str], JobActivity]]
"""Labels gpu, uuid and job, and what they are about."""

_SUMS: Final[tuple[tuple[Spec, ActivitySum, tuple[str, ...]], ...]] = (
    (metrics.SYNC_SECONDS, "sync_event_ns", ("event",)),
    (metrics.SYNC_SECONDS, "sync_stream_ns", ("stream",)),
    (metrics.SYNC_SECONDS, "sync_context_ns", ("context",)),
    (metrics.SYNC_SECONDS, "sync_unknown_ns", ("unknown",)),
    (metrics.LAUNCH_API_SECONDS, "launch_api_ns", ()),
    (metrics.KERNEL_BUSY_SECONDS, "busy_ns", ()),
    (metrics.KERNEL_ACTIVITY_SECONDS, "compute_ns", ("compute",)),
    (metrics.KERNEL_ACTIVITY_SECONDS, "communication_ns", ("communication",)),
    (metrics.KERNEL_ACTIVITY_SECONDS, "copy_ns", ("copy",)),
    (metrics.KERNEL_OVERLAP_SECONDS, "overlap_ns", ()),
    (metrics.KERNEL_IDLE_SECONDS, "idle_host_ns", ("host",)),
    (metrics.KERNEL_IDLE_SECONDS, "idle_queue_ns", ("queue",)),
    (metrics.KERNEL_IDLE_SECONDS, "idle_other_ns", ("other",)),
    (metrics.KERNEL_DEVICE_TRACED_SECONDS, "device_traced_ns", ()),
    (metrics.KERNEL_TRACED_SECONDS, "traced_ns", ()),
)
_GRAPHS: Final[tuple[tuple[ActivitySum, str], ...]] = (("graphs_traced", "traced"), ("graphs_untraced", "untraced"))


class KernelsCollector:
    """The jobs' kernels. Of a GPU that cannot be read now nothing is told."""

    name = "kernels"

    def collect(self, snapshot: FleetSnapshot) -> Iterator[Family]:
        """A job that ended is in no family. The one named `other`, of jobs beyond the budget, has sums alone."""
        readable = {totals.gpu.uuid for totals in snapshot.gpus}
        pairs = [
            ((snapshot.label(job.uuid), job.uuid, job.job), job)
            for job in snapshot.kernels.jobs
            if job.uuid in readable
        ]
        detailed = [pair for pair in pairs if pair[1].job != OTHER]
        families = [
            *_kernels(pairs),
            _durations(detailed),
            _queue(detailed),
            *_copies(pairs, detailed),
            *_sums(pairs),
            _processes(pairs),
            *_agents(snapshot),
        ]
        yield from (family for family in families if family.samples)


def _kernels(pairs: Pairs) -> Iterator[Family]:
    seconds, executions = metrics.KERNEL_SECONDS.family(), metrics.KERNEL_EXECUTIONS.family()
    launches, squared = metrics.KERNEL_LAUNCHES.family(), metrics.KERNEL_SECONDS_SQUARED.family()
    for labels, job in pairs:
        for name, amount in job.kernels.items():
            kind = category(name)
            seconds.add(amount.ns / NS, *labels, name, kind)
            executions.add(amount.executions, *labels, name, kind)
            launches.add(amount.launches, *labels, name, kind)
            if name != OTHER:
                squared.add(amount.deviation_ns2 / _NS2, *labels, name)
    yield from (seconds, executions, launches, squared)
    yield _now(metrics.KERNEL_MAX_SECONDS, pairs, lambda job: ((k, ns / NS) for k, ns in job.now.longest_ns.items()))
    yield _now(metrics.LAUNCH_LATENCY_SEED, pairs, lambda job: job.now.latency_ms.items())
    patterns = metrics.KERNEL_PATTERN.family()
    for labels, job in pairs:
        for name, pattern in job.now.patterns.items():
            patterns.add(1, *labels, name, pattern)
    yield patterns


def _now(spec: Spec, pairs: Pairs, values: Callable[[JobActivity], Iterable[tuple[str, float]]]) -> Family:
    family = spec.family()
    for labels, job in pairs:
        for kernel, value in values(job):
            family.add(value, *labels, kernel)
    return family


def _durations(pairs: Pairs) -> Family:
    family = metrics.KERNEL_DURATION.family()
    for labels, job in pairs:
        if len(pairs) <= MAX_CATEGORY_PAIRS:
            for kind, durations in job.durations.items():
                _add_durations(family, durations, *labels, kind)
        elif job.durations:
            rows = list(job.durations.values())
            buckets = tuple(map(sum, zip(*(row.buckets for row in rows), strict=True)))
            _add_durations(family, Durations(sum(row.ns for row in rows), buckets), *labels, "")
    return family


def _queue(pairs: Pairs) -> Family:
    family = metrics.KERNEL_QUEUE.family()
    for labels, job in pairs:
        if job.queue is not None:
            _add_durations(family, job.queue, *labels)
    return family


def _add_durations(family: Family, durations: Durations, *labels: str) -> None:
    family.add_histogram(DURATION_BOUNDS, durations.buckets, durations.ns / NS, *labels)


def _copies(pairs: Pairs, detailed: Pairs) -> Iterator[Family]:
    sizes, seconds, api = (
        metrics.MEMCPY_BYTES.family(),
        metrics.MEMCPY_SECONDS.family(),
        metrics.COPY_API_SECONDS.family(),
    )
    for labels, job in detailed:
        for kind, copies in job.copies.items():
            direction, memory = kind.split("_")
            sizes.add_histogram(COPY_BOUNDS, copies.buckets, copies.bytes, *labels, direction, memory)
            if "launches" not in job.now.unrecorded:
                api.add(copies.api_ns / NS, *labels, direction, memory)
    for labels, job in pairs:
        for kind, copies in job.copies.items():
            direction, memory = kind.split("_")
            seconds.add(copies.ns / NS, *labels, direction, memory)
    yield from (sizes, seconds, api)


def _processes(pairs: Pairs) -> Family:
    family = metrics.KERNEL_PROCESSES.family()
    for labels, job in pairs:
        family.add(job.now.processes, *labels)
    return family


def _sums(pairs: Pairs) -> Iterator[Family]:
    families = {spec.name: spec.family() for spec, _, _ in _SUMS}
    graphs = metrics.GRAPH_LAUNCHES.family()
    for labels, job in pairs:
        for spec, name, more in _SUMS:
            if name in job.sums:
                families[spec.name].add(job.sums[name] / NS, *labels, *more)
        for name, nodes in _GRAPHS:
            if name in job.sums:
                graphs.add(job.sums[name], *labels, nodes)
    yield from (*families.values(), graphs)


def _agents(snapshot: FleetSnapshot) -> Iterator[Family]:
    told = snapshot.kernels
    agents, reasons = metrics.AGENTS.family(), metrics.AGENT_PAUSE_INFO.family()
    overhead, records = metrics.AGENT_OVERHEAD.family(), metrics.AGENT_RECORDS.family()
    slowdown, rejected = metrics.AGENT_SLOWDOWN.family(), metrics.AGENT_FILES_REJECTED.family()
    without = metrics.PROCESSES_WITHOUT_AGENT.family()
    for state, count in (told.agents or {}).items():
        agents.add(count, state)
    for reason in told.reasons:
        reasons.add(1, reason)
    if told.overhead_ratio is not None:
        overhead.add(told.overhead_ratio)
    for totals in snapshot.gpus:
        gpu = (snapshot.label(totals.gpu.uuid), totals.gpu.uuid)
        if totals.agent_slowdown is not None:
            slowdown.add(totals.agent_slowdown, *gpu)
        if totals.processes is not None and told.pids is not None:
            without.add(sum(process.pid not in told.pids for process in totals.processes), *gpu)
    for result, count in told.records.items():
        records.add(count, result)
    for reason, count in told.rejected.items():
        rejected.add(count, reason)
    yield from (agents, without, reasons, overhead, slowdown, records, rejected)
