"""A cgroup laid out as slurmstepd makes it, for programs that stand in for a Slurm job's tasks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


@contextmanager
def slurm_cgroup(job_id: int) -> Iterator[Path | None]:
    """The directory of a task's cgroup, None where none can be made: that needs root and a writable cgroup v2."""
    task = ROOT / f"system.slice/slurmstepd.scope/job_{job_id}/step_0/user/task_0"
    missing = [folder for folder in (task, *task.parents) if not folder.exists()]
    try:
        task.mkdir(parents=True)
    except OSError:
        yield None
        return
    try:
        yield task
    finally:
        for folder in missing:
            folder.rmdir()
