"""What each job has of a GPU: processes and allocations put together, one row for each name of a job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from gpu_hpc_exporter.model import GpuJobs, Job, JobOnGpu

MAX_ROWS: Final = 16
"""Jobs of one GPU that have a row of their own; the smallest of more are one row."""
OTHER: Final = "other"
UNPLACED: Final = Job("unknown")
"""Whose the processes are that run and of which /proc does not tell: without a row, another job would seem alone."""
_MOST_RATIO: Final = 1.005


def attribute(running: Iterable[JobOnGpu], holders: Iterable[Job]) -> GpuJobs:
    """The jobs of one GPU. `running`: one for each process; `holders`: jobs that hold the GPU, processes or not."""
    shares = list(running)
    shares += [JobOnGpu(job) for job in holders if not _runs(job, shares)]
    by_name: dict[str, list[JobOnGpu]] = defaultdict(list)
    for share in shares:
        by_name[share.job.job].append(share)
    rows = []
    count = 0
    for same in by_name.values():
        jobs = _distinct(same)
        count += len({_identity(job) for job in jobs})
        rows.append(_summed(_merged(jobs), same))
    return GpuJobs(tuple(_bounded(rows)), count)


def _distinct(shares: Sequence[JobOnGpu]) -> list[Job]:
    first = shares[0].job
    others = {share.job for share in shares if share.job is not first and share.job != first}
    return [first, *others]


def _runs(holder: Job, shares: Sequence[JobOnGpu]) -> bool:
    """Whether a job that holds the GPU is among those whose processes run there, or may well be."""
    for share in shares:
        job = share.job
        if holder.job_id and job.job_id == holder.job_id:
            return True
        if holder.pod and (job.namespace, job.pod) == (holder.namespace, holder.pod):
            return True
        if holder.source == "slurm" and job.job_id.startswith("sluid:"):
            return True  # nobody has told yet which id this is
    return False


def _identity(job: Job) -> tuple[str, str, str]:
    """Namesakes are two jobs where Slurm or a namespace tells them apart; a job may have several pods."""
    is_slurm = job.job_id.isdigit() or job.job_id.startswith("sluid:")
    return job.job, job.namespace, job.job_id if is_slurm else ""


def _merged(jobs: Sequence[Job]) -> Job:
    """One job of several: what they tell differently is not told."""
    if len(jobs) == 1:
        return jobs[0]
    names = (field.name for field in fields(Job))
    blank: dict[str, Any] = {name: "" for name in names if len({getattr(job, name) for job in jobs}) > 1}
    return replace(jobs[0], **blank)


def _summed(job: Job, shares: Sequence[JobOnGpu]) -> JobOnGpu:
    """Sums of what is known of each; of memory the driver tells all or nothing can be said."""
    running = [share for share in shares if share.processes]
    memory = [share.memory_bytes for share in running if share.memory_bytes is not None]
    ratios = [share.sm_ratio for share in running if share.sm_ratio is not None]
    return JobOnGpu(
        job,
        sum(share.processes for share in running),
        sum(memory) if memory and len(memory) == len(running) else None,
        # Clients of MPS run at the same time: then shares of time do not add up, and are no share of anything.
        min(sum(ratios), 1.0) if ratios and sum(ratios) <= _MOST_RATIO else None,
    )


def _bounded(rows: list[JobOnGpu]) -> list[JobOnGpu]:
    if len(rows) <= MAX_ROWS:
        return sorted(rows, key=lambda row: row.job.job)
    largest = sorted(rows, key=lambda row: (-(row.memory_bytes or 0), -row.processes, row.job.job))
    kept = [row for row in largest if row.job.job != OTHER][: MAX_ROWS - 1]
    folded = [row for row in largest if row not in kept]
    return [*sorted(kept, key=lambda row: row.job.job), _summed(Job(OTHER), folded)]
