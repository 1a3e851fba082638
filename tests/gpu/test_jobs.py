"""Two jobs on one real GPU are told apart, while they share it and when one is left. Run with `pytest -m gpu`.

As root on a machine with cgroup v2 one of them runs in a cgroup laid out as Slurm's, else both are plain processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from exporter_process import Samples, run_exporter
from gpu.slurm_cgroup import slurm_cgroup

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

HOLD = """
import sys, torch
kept = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(directory: Path, job_name: str, cgroup: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that holds memory of the GPU, perhaps in a cgroup."""
    environment = {**os.environ, "JOB_NAME": job_name}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env=environment,
        cwd=directory,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    if cgroup is not None:
        (cgroup / "cgroup.procs").write_text(str(process.pid))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def cgroup() -> Iterator[Path | None]:
    with slurm_cgroup(123) as directory:
        yield directory


def jobs(samples: Samples) -> set[str]:
    return {dict(labels)["job"] for labels in samples.all("gpu_hpc_job_info", gpu="0")}


def test_two_jobs_on_one_gpu_and_in_turn(tmp_path: Path, cgroup: Path | None) -> None:
    """Both are named while they share the GPU, the seed gauges carry the one that is left, and nobody at the end."""
    first = "slurm-123" if cgroup is not None else "first"
    with run_exporter(tmp_path) as exporter:
        with holding(tmp_path, "second") as second:
            with holding(tmp_path, "first", cgroup):
                samples = exporter.wait_for(lambda s: jobs(s) == {first, "second"}, timeout=30)
                assert samples.one("gpu_hpc_gpu_jobs", gpu="0") == 2
                assert samples.one("gpu_hpc_sm_utilization_ratio", gpu="0", job="") >= 0
                assert samples.one("gpu_hpc_job_memory_used_bytes", gpu="0", job="second") > 1 << 28
            samples = exporter.wait_for(lambda s: jobs(s) == {"second"}, timeout=30)
            assert samples.one("gpu_hpc_sm_utilization_ratio", gpu="0", job="second") >= 0
            assert second.poll() is None
        samples = exporter.wait_for(lambda s: not jobs(s), timeout=30)
        assert samples.one("gpu_hpc_sm_utilization_ratio", gpu="0", job="") >= 0
        assert samples.get("gpu_hpc_rejected_readings_total", gpu="0", reading="processes") is None
