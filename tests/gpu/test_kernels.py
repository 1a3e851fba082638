"""The kernel series of a real loop, started with the agent as users do. Run with `pytest -m gpu`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from exporter_process import Exporter, Samples, run_exporter

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

WORKLOAD = Path(__file__).parent / "workload.py"
FAST = {"GPU_HPC_AGENT_PERIOD_SECONDS": "3", "GPU_HPC_AGENT_BUDGET": "1"}


@dataclass(frozen=True)
class Job:
    """A phase of workload.py, with the agent, as a job of that name."""

    exporter: Exporter
    phase: str

    def total(self, samples: Samples, name: str, **labels: str) -> float:
        """The sum over the job's series; 0 where there is none yet."""
        return sum(samples.all(name, job=self.phase, **labels).values())

    def traced_more(self, seconds: float) -> Samples:
        """A scrape after the agent has traced for longer than so many seconds in all."""
        name = "gpu_hpc_kernel_traced_seconds_total"
        return self.exporter.wait_for(lambda s: self.total(s, name) > seconds, timeout=90)


@contextmanager
def running(exporter: Exporter, agents: Path, phase: str) -> Iterator[Job]:
    """Start it; it ends when it is not needed any more."""
    launcher = [sys.executable, "-m", "gpu_hpc_exporter", "run", "--"]
    command = [*launcher, sys.executable, str(WORKLOAD), "--seconds", "120", "--phases", phase]
    environment = {**os.environ, **FAST, "GPU_HPC_AGENT_DIRECTORY": str(agents), "JOB_NAME": phase}
    with subprocess.Popen(command, env=environment) as process:
        try:
            yield Job(exporter, phase)
        finally:
            process.kill()


@dataclass(frozen=True)
class Rates:
    """Growth per traced second between two scrapes."""

    job: Job
    before: Samples
    after: Samples

    def of(self, name: str, **labels: str) -> float:
        """Of a counter, summed over the series with these labels."""
        traced = self._growth("gpu_hpc_kernel_traced_seconds_total")
        return self._growth(name, **labels) / traced

    def _growth(self, name: str, **labels: str) -> float:
        return self.job.total(self.after, name, **labels) - self.job.total(self.before, name, **labels)


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    directory = tmp_path / "agents"
    directory.mkdir()
    return directory


@pytest.fixture
def exporter(tmp_path: Path, agents: Path) -> Iterator[Exporter]:
    config = tmp_path / "config.yaml"
    config.write_text(f"agent:\n  directory: {agents}\n")
    with run_exporter(tmp_path, f"--config.file={config}") as running_exporter:
        yield running_exporter


def rates(exporter: Exporter, agents: Path, phase: str) -> Rates:
    """Of a few windows of a phase, after its first ones."""
    with running(exporter, agents, phase) as job:
        return Rates(job, job.traced_more(2), job.traced_more(5))


def test_an_index_made_on_the_cpu_is_seen_and_its_mending_too(exporter: Exporter, agents: Path) -> None:
    """Each lookup copies 1 KiB from pageable memory and waits for it; with `device=` there is neither."""
    loop = rates(exporter, agents, "embedding_cpu_index")
    copies = loop.of("gpu_hpc_memcpy_bytes_count", direction="h2d", memory="pageable")
    size = loop.of("gpu_hpc_memcpy_bytes_sum", direction="h2d", memory="pageable") / copies
    executions = loop.of("gpu_hpc_kernel_executions_total")
    waits = loop.of("gpu_hpc_sync_seconds_total", call="stream")
    print(f"{copies:.0f} copies/s of {size:.0f} B, {executions:.0f} kernels/s, waits {waits:.3f}")  # noqa: T201  measured
    assert copies > 1000
    assert size == pytest.approx(1024, rel=0.01)
    assert copies == pytest.approx(executions, rel=0.05)
    assert waits > 0.02
    mended = rates(exporter, agents, "embedding_gpu_index")
    assert mended.of("gpu_hpc_memcpy_bytes_count", direction="h2d") < 1
    assert mended.of("gpu_hpc_kernel_executions_total") > 1000
    assert mended.of("gpu_hpc_sync_seconds_total", call="stream") < 0.01
