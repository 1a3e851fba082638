"""What a job's kernels waited for, from what its agents told of the last minutes. Pure.

The formulas are those of the recorded series gpu:kernel_…, gpu:host_… and gpu:communication_… in alert-rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from gpu_hpc_exporter.diagnosis.kernels import Behaviour, pattern
from gpu_hpc_exporter.model import NS, ActivitySum, CopyKind, GpuActivity, KernelAmount, Recordable

_FROM_HOST: tuple[CopyKind, ...] = ("h2d_pinned", "h2d_pageable")
_PINNED: tuple[CopyKind, ...] = ("h2d_pinned", "d2h_pinned")
_PAGEABLE: tuple[CopyKind, ...] = ("h2d_pageable", "d2h_pageable")
_SYNC: tuple[ActivitySum, ...] = ("sync_event_ns", "sync_stream_ns", "sync_context_ns", "sync_unknown_ns")


@dataclass(frozen=True, slots=True)
class Copying:
    """A job's copies, per second that an agent looked. count, bytes: from host to GPU."""

    count: float = 0.0
    bytes: float = 0.0
    pageable_bytes: float = 0.0
    pinned_bytes: float = 0.0
    pageable_to_gpu: bool = True


@dataclass(frozen=True, slots=True)
class Waits:
    """Rates are per second that an agent looked; None where nothing of the kind happened, or where it is not recorded.

    queue_s: mean from launch to start. host_wait: seconds a second that the host's threads waited for the GPU, in
    copies too where the time of such calls is recorded; above 1 where several wait. many_short: share of the launches
    outside graphs that were of kernels that show that pattern in these looks. busy: share of the time in which a
    kernel or copy ran, at most: processes may take turns. exposed: communication beside which nothing computed, as a
    share of the time in which any kernel ran. jittery: share of the time in kernels of jittery_kernel, the one of that
    pattern that has most of it.
    """

    job: str
    executions: float
    copying: Copying | None
    many_short: float | None
    queue_s: float | None
    host_wait: float | None
    busy: float | None
    exposed: float | None
    jittery: float | None = None
    jittery_kernel: str = ""


def waits(activities: Sequence[GpuActivity]) -> Waits | None:
    """Of one job on one GPU, the newest report last; None where no agent looked."""
    traced_s = _total(activities, "traced_ns") / NS
    if not activities or traced_s <= 0:
        return None
    kernels = by_kernel(activities)
    launches = sum(amount.launches for amount in kernels.values())
    short = sum(amount.launches for amount in kernels.values() if _is_many_short(amount, traced_s))
    launching = recording(activities, "launches")
    queued = sum(sum(a.queue.buckets) for a in launching)
    overlap = _total(activities, "overlap_ns")
    communication = _total(activities, "communication_ns")
    running = _total(activities, "compute_ns") + communication - overlap
    jittery_kernel, jittery = _jittery(activities[-1], kernels)
    return Waits(
        job=activities[-1].job,
        executions=sum(amount.executions for amount in kernels.values()) / traced_s,
        copying=_copying(recording(activities, "copies")),
        many_short=short / launches if launches else None,
        queue_s=sum(a.queue.ns for a in launching) / NS / queued if queued else None,
        host_wait=_host_wait(recording(activities, "waits")),
        busy=_busy([activity for activity in activities if activity.has_all_copies]),
        exposed=max(0, communication - overlap) / running if running > 0 else None,
        jittery=jittery,
        jittery_kernel=jittery_kernel,
    )


def recording(activities: Iterable[GpuActivity], what: Recordable) -> list[GpuActivity]:
    """Those that can tell of it."""
    return [activity for activity in activities if what not in activity.unrecorded]


def _copying(activities: Sequence[GpuActivity]) -> Copying | None:
    traced_s = _total(activities, "traced_ns") / NS
    if traced_s <= 0:
        return None

    def copied(*kinds: CopyKind) -> float:
        return sum(a.copies[kind].bytes for a in activities for kind in kinds if kind in a.copies) / traced_s

    return Copying(
        count=sum(sum(a.copies[kind].buckets) for a in activities for kind in _FROM_HOST if kind in a.copies)
        / traced_s,
        bytes=copied(*_FROM_HOST),
        pageable_bytes=copied(*_PAGEABLE),
        pinned_bytes=copied(*_PINNED),
        pageable_to_gpu=copied("h2d_pageable") >= copied("d2h_pageable"),
    )


def _host_wait(activities: Sequence[GpuActivity]) -> float | None:
    traced_s = _total(activities, "traced_ns") / NS
    if traced_s <= 0:
        return None
    copying = recording(recording(activities, "copies"), "launches")
    pageable_api_ns = sum(a.copies[kind].api_ns for a in copying for kind in _PAGEABLE if kind in a.copies)
    return (sum(_total(activities, name) for name in _SYNC) + pageable_api_ns) / NS / traced_s


def _busy(activities: Sequence[GpuActivity]) -> float | None:
    device_traced_ns = _total(activities, "device_traced_ns")
    if not device_traced_ns:
        return None
    processes = max(1, *(activity.processes for activity in activities))
    return min(1.0, _total(activities, "busy_ns") / device_traced_ns * processes)


def by_kernel(activities: Iterable[GpuActivity]) -> dict[str, KernelAmount]:
    """What each kernel did in all of them."""
    found: dict[str, KernelAmount] = {}
    for activity in activities:
        for name, more in activity.kernels.items():
            found[name] = found.get(name, KernelAmount()) + more
    return found


def _jittery(newest: GpuActivity, kernels: Mapping[str, KernelAmount]) -> tuple[str, float | None]:
    total_ns = sum(amount.ns for amount in kernels.values())
    found = [name for name, shown in newest.patterns.items() if shown == "jittery" and name in kernels]
    if not (found and total_ns):
        return "", None
    most = max(found, key=lambda name: kernels[name].ns)
    return most, kernels[most].ns / total_ns


def _is_many_short(amount: KernelAmount, traced_s: float) -> bool:
    """The pattern, asked of these looks and not of five minutes."""
    seen = Behaviour(traced_s, amount.launches, amount.executions, amount.ns / NS, steady=0, deviation=0.0)
    return pattern(seen) == "many_short"


def _total(activities: Sequence[GpuActivity], name: ActivitySum) -> int:
    return sum(activity.sums.get(name, 0) for activity in activities)
