"""Processes and allocations become one row for each (GPU, job)."""

from __future__ import annotations

from dataclasses import replace

from gpu_hpc_exporter.jobs.attribution import MAX_ROWS, attribute, row_name
from gpu_hpc_exporter.model import GpuJobs, Job, JobOnGpu

BERT = Job("bert", "123", "batch", "ann", rank="0", source="slurm")
POD = Job("web", "11111111-2222-3333-4444-555555555555", "service", "", "x", "web-0", "main", "", "kubernetes")
GIB = 1 << 30


def names(jobs: GpuJobs) -> list[str]:
    """The rows' names."""
    return [row.job.job for row in jobs.jobs]


def test_ranks_of_one_job_are_one_row() -> None:
    """Sums, and no rank, since several have none."""
    ranks = [JobOnGpu(replace(BERT, rank=str(n)), 1, GIB, 0.25) for n in range(3)]
    assert attribute(ranks, []) == GpuJobs((JobOnGpu(replace(BERT, rank=""), 3, 3 * GIB, 0.75),), 1)
    assert attribute(ranks[:1], []).jobs[0].job.rank == "0"


def test_what_one_process_does_not_tell_is_absent() -> None:
    """A sum over some of the processes would be too little; a process that did not run has no share."""
    shares = [JobOnGpu(BERT, 1, GIB, 0.25), JobOnGpu(BERT, 1, None, None)]
    (row,) = attribute(shares, []).jobs
    assert (row.processes, row.memory_bytes, row.sm_ratio) == (2, None, 0.25)
    (row,) = attribute([JobOnGpu(BERT, 1, 1, 0.9), JobOnGpu(BERT, 1, 1, 0.9)], []).jobs
    assert row.sm_ratio is None


def test_g07_a_job_that_holds_the_gpu_is_there_without_a_process() -> None:
    """G07: and only once where it has processes, however these are named."""
    assert attribute([], [BERT]) == GpuJobs((JobOnGpu(BERT),), 1)
    assert attribute([JobOnGpu(BERT, 1)], [replace(BERT, rank="")]).jobs == (JobOnGpu(BERT, 1),)
    renamed = replace(POD, job="by a rule", job_id="", source="rule")
    assert names(attribute([JobOnGpu(renamed, 1)], [POD])) == ["by a rule"]
    assert names(attribute([JobOnGpu(BERT, 1)], [POD])) == ["bert", "web"]


def test_g04_a_holder_may_be_the_job_whose_sluid_nobody_can_resolve() -> None:
    """G04: two rows for one job would make the GPU look shared."""
    sluid = replace(BERT, job="slurm-s0EXAMPLE0SLU00", job_id="sluid:s0EXAMPLE0SLU00")
    assert names(attribute([JobOnGpu(sluid, 1)], [BERT])) == ["slurm-s0EXAMPLE0SLU00"]
    assert names(attribute([JobOnGpu(sluid, 1)], [POD])) == ["slurm-s0EXAMPLE0SLU00", "web"]


def test_h03_namesakes_are_one_row_and_count_as_they_are() -> None:
    """H03: what they tell differently is empty, so that nobody is told a wrong job's id."""
    jobs = attribute([JobOnGpu(BERT, 1, 1), JobOnGpu(replace(BERT, job_id="124"), 1, 1)], [])
    assert jobs == GpuJobs((JobOnGpu(replace(BERT, job_id=""), 2, 2),), 2)
    elsewhere = replace(POD, namespace="y", job_id="u")
    assert attribute([JobOnGpu(POD, 1), JobOnGpu(elsewhere, 1)], []).count == 2
    workers = [JobOnGpu(replace(POD, pod=f"web-{n}", job_id=f"u{n}"), 1) for n in range(2)]
    assert attribute(workers, []) == GpuJobs((JobOnGpu(replace(POD, pod="", job_id=""), 2),), 1)


def test_the_smallest_of_many_jobs_are_one_row() -> None:
    """I06: at most 16 rows; a real job of that name has its own, in brackets, as is told of its agents' files."""
    shares = [JobOnGpu(Job(f"j{n:02}"), 1, n + 1) for n in range(40)]
    shares.append(JobOnGpu(Job("other"), 1, 10**9))
    jobs = attribute(shares, [])
    assert (len(jobs.jobs), jobs.count) == (MAX_ROWS, 41)
    assert names(jobs) == [*(f"j{n:02}" for n in range(26, 40)), "other[]", "other"]
    assert jobs.jobs[-1].processes == 26
    assert jobs.jobs[-1].memory_bytes == sum(range(1, 27))
    assert row_name(Job("other"), jobs) == row_name(Job("other"), None) == "other[]"
    assert row_name(Job("j00"), jobs) == "other"
    assert names(attribute([], [Job("other", source="slurm")])) == ["other[]"]


def test_h03_a_name_of_ones_own_takes_nothing_from_a_namesake() -> None:
    """H03: whoever calls itself like somebody's job is another job, with its user before the name."""
    forged = Job("bert", "", "", "bob", source="environ")
    jobs = attribute([JobOnGpu(BERT, 1, GIB), JobOnGpu(forged, 1, 9 * GIB)], [])
    assert jobs == GpuJobs((JobOnGpu(BERT, 1, GIB), JobOnGpu(replace(forged, job="bob/bert"), 1, 9 * GIB)), 2)
    assert names(attribute([JobOnGpu(forged, 1)], [BERT])) == ["bert", "bob/bert"]
    assert names(attribute([JobOnGpu(replace(forged, job_id="123"), 1)], [BERT])) == ["bert", "bob/bert"]
    both = attribute([JobOnGpu(replace(forged, user=user), 1, 1) for user in ("ann", "bob")], [])
    assert (names(both), both.count) == (["ann/bert", "bob/bert"], 2)
    containers = [Job("bert", c * 64, container=c * 12, source="environ") for c in "ab"]
    assert names(attribute([JobOnGpu(job, 1) for job in containers], [])) == ["aaaaaaaaaaaa/bert", "bbbbbbbbbbbb/bert"]


def test_h03_what_is_one_job_stays_one() -> None:
    """Its process outside the cgroup whose user is its own; a unit of two users; two of one user's own."""
    outside = replace(BERT, source="environ")
    assert attribute([JobOnGpu(BERT, 1), JobOnGpu(outside, 1)], []).count == 1
    unit = Job("triton.service", "triton.service", user="root", source="systemd")
    assert attribute([JobOnGpu(unit, 1), JobOnGpu(replace(unit, user="triton"), 1)], []).count == 1
    own = Job("bert", user="ann", source="environ")
    assert attribute([JobOnGpu(own, 1), JobOnGpu(replace(own, rank="1"), 1)], []) == GpuJobs((JobOnGpu(own, 2),), 1)
    rule = Job("bert", user="ann", source="rule")
    assert attribute([JobOnGpu(rule, 1), JobOnGpu(replace(rule, user="bob"), 1)], []).count == 2
