"""What each job has of a GPU: processes and allocations put together, one row for each name of a job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from gpu_hpc_exporter.jobs.identity import SLUID_ID
from gpu_hpc_exporter.model import GpuJobs, Job, JobOnGpu
from gpu_hpc_exporter.text import bounded

MAX_ROWS: Final = 16
"""Jobs of one GPU that have a row of their own; the smallest of more are one row."""
MAX_LIBRARIES: Final = 12
"""Most libraries of a job on one GPU that are told, each version of one counted."""
OTHER: Final = "other"
"""All jobs without a row of their own; a job of that name gets brackets."""
UNPLACED: Final = Job("unknown")
"""Whose the processes are that run and of which /proc does not tell: without a row, another job would seem alone."""
_MOST_RATIO: Final = 1.005


def attribute(running: Iterable[JobOnGpu], holders: Iterable[Job]) -> GpuJobs:
    """The jobs of one GPU. `running`: one for each process; `holders`: jobs that hold the GPU, processes or not."""
    shares = list(running)
    shares += [JobOnGpu(job) for job in holders if not _runs(job, shares)]
    shares = [share if share.job.job != OTHER else replace(share, job=_bracketed(share.job)) for share in shares]
    certain = frozenset((share.job.job_id, share.job.user) for share in shares if share.job.source == "slurm")
    rows = []
    count = 0
    for same in _by_name(_apart(shares, certain)):
        jobs = _distinct(same)
        count += len({_identity(job, certain) for job in jobs})
        rows.append(_summed(_merged(jobs), same))
    return GpuJobs(tuple(_bounded(rows)), count)


def row_name(job: Job, known: GpuJobs | None) -> str:
    """The name under which a job of one process stands among the jobs of its GPU, or would if it were there.

    A name that the process chose itself gives it no other's row.
    """
    job = _bracketed(job)
    rows = {row.job.job: row.job for row in known.jobs} if known is not None else {}
    owner = job.user or job.container or job.pod
    own = bounded(f"{owner}/{job.job}") if job.source == "environ" and owner else job.job
    if own in rows:
        return own
    same = rows.get(job.job)
    if same is None:
        return OTHER if OTHER in rows and len(rows) >= MAX_ROWS else job.job
    is_its = job.source != "environ" or same.source in {"environ", ""} or same.job_id == job.job_id != ""
    return job.job if is_its else own


def pod_row(environment: Mapping[str, str], known: GpuJobs | None) -> str:
    """The row of the pod that a process says it is in, if that pod holds this GPU; "" without one.

    For hosts where no process can be looked up: there its word is all that there is, and it can only be one of few.
    """
    pod, namespace = environment.get("POD_NAME", ""), environment.get("POD_NAMESPACE", "")
    rows = known.jobs if known is not None and pod and namespace else ()
    return next((row.job.job for row in rows if (row.job.pod, row.job.namespace) == (pod, namespace)), "")


def _bracketed(job: Job) -> Job:
    return replace(job, job=f"{OTHER}[]") if job.job == OTHER else job


_Certain = frozenset[tuple[str, str]]
"""Id and user of the Slurm jobs whose processes or allocations prove that they are here."""


def _by_name(shares: Iterable[JobOnGpu]) -> list[list[JobOnGpu]]:
    by_name: dict[str, list[JobOnGpu]] = defaultdict(list)
    for share in shares:
        by_name[share.job.job].append(share)
    return list(by_name.values())


def _apart(shares: Sequence[JobOnGpu], certain: _Certain) -> list[JobOnGpu]:
    """Names that processes chose themselves get their user's before them where another job has the same name."""
    apart: list[JobOnGpu] = []
    for same in _by_name(shares):
        jobs = _distinct(same)
        names = {job: _own_name(job, certain) for job in jobs}
        if len({_identity(job, certain) for job in jobs}) > 1 and len(set(names.values())) > 1:
            apart += [replace(share, job=replace(share.job, job=names[share.job])) for share in same]
        else:
            apart += same
    return apart


def _own_name(job: Job, certain: _Certain) -> str:
    owner = job.user or job.container or job.pod
    if job.source != "environ" or (job.job_id, job.user) in certain or not owner:
        return job.job
    return bounded(f"{owner}/{job.job}")


def _distinct(shares: Sequence[JobOnGpu]) -> list[Job]:
    first = shares[0].job
    others = {share.job for share in shares if share.job is not first and share.job != first}
    return [first, *others]


def _runs(holder: Job, shares: Sequence[JobOnGpu]) -> bool:
    """Whether a job that holds the GPU is among those whose processes run there, or may well be."""
    for share in shares:
        job = share.job
        is_forged = job.source == "environ" and holder.user and job.user != holder.user
        if holder.job_id and job.job_id == holder.job_id and not is_forged:
            return True
        if holder.pod and (job.namespace, job.pod) == (holder.namespace, holder.pod):
            return True
        if holder.source == "slurm" and job.job_id.startswith(SLUID_ID):
            return True  # nobody has told yet which id this is
    return False


def _identity(job: Job, certain: _Certain) -> tuple[str, str, str, str]:
    """Namesakes are two jobs where source, namespace, id or user differ.

    But a job of a namespace may have several pods, and what is one by its cgroup may run as several users.
    """
    source = "slurm" if (job.job_id, job.user) in certain else job.source
    is_slurm = job.job_id.isdigit() or job.job_id.startswith(SLUID_ID)
    job_id = job.job_id if is_slurm or not job.namespace else ""
    return source, job.namespace, job_id, "" if source in _BY_CGROUP else job.user


_BY_CGROUP: Final = frozenset({"slurm", "kubernetes", "container", "systemd"})


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
        tuple(sorted({library for share in running for library in share.libraries})[:MAX_LIBRARIES]),
    )


def _bounded(rows: list[JobOnGpu]) -> list[JobOnGpu]:
    if len(rows) <= MAX_ROWS:
        return sorted(rows, key=lambda row: row.job.job)
    largest = sorted(rows, key=lambda row: (-(row.memory_bytes or 0), -row.processes, row.job.job))
    kept, folded = largest[: MAX_ROWS - 1], largest[MAX_ROWS - 1 :]
    return [*sorted(kept, key=lambda row: row.job.job), _summed(Job(OTHER), folded)]
