"""What the agent itself writes, in a program with a fake GPU, is what the exporter reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import fake_activity
from fake_activity.agent import Agent
from gpu_hpc_exporter.model import Job
from gpu_hpc_exporter.sources.kernels.files import AgentFiles
from unit.objects import G0, inventory
from unit.test_kernel_sampler import ADD, ADD_NAME, Node, executions


def test_the_agents_own_file(tmp_path: Path) -> None:
    """Two batches of kernels and a copy, from the fake driver's records to series; the file of a process that ended."""
    directory = tmp_path / "agents"
    directory.mkdir()
    node = Node(directory, G0)
    node.owners.can_tell = False
    programs = fake_activity.build(tmp_path / "programs")
    environment = {"GPU_HPC_AGENT_MODE": "continuous", "SLURM_JOB_ID": "7"}
    with Agent(programs, directory, tmp_path / "stderr", environment) as agent:
        agent.trace()
        agent.published()
        ((file, reading),) = AgentFiles(directory).scan()
        assert reading is not None
        assert (file.pid, file.environment["SLURM_JOB_ID"]) == (agent.pid, "7")
        ((_, uuid, _),) = reading.devices
        node.sampler.put(inventory(replace(G0, uuid=f"GPU-{uuid}")))
        node.owners.own_words[agent.pid] = Job("bert", source="environ")
        agent.do(f"kernel {ADD.decode()} count=1000 ns=5000 delay=6000 api_ns=1500")
        agent.wait(lambda now: sum(kernel.executions for kernel in now.slots()) == 1000)
        assert executions(node.look(), job="bert") == {ADD_NAME: 0, "other": 1000}
        agent.do(f"kernel {ADD.decode()} count=200 ns=7000 delay=6000 api_ns=1500")
        agent.wait(lambda now: sum(kernel.executions for kernel in now.slots()) == 1200)
        samples = node.look()
        assert samples.one("gpu_hpc_agents", state="tracing") == 1
        agent.end()
    labels = {"job": "bert", "kernel": ADD_NAME}
    assert samples.one("gpu_hpc_kernel_executions_total", **labels) == 200
    assert samples.one("gpu_hpc_kernel_launches_total", **labels) == 200
    assert samples.one("gpu_hpc_kernel_seconds_total", **labels) == pytest.approx(200 * 7e-6)
    assert samples.one("gpu_hpc_kernel_duration_seconds_count", category="elementwise") == 1200
    assert samples.one("gpu_hpc_kernel_queue_seconds_count") == 1200
    assert samples.one("gpu_hpc_launch_api_seconds_total") == pytest.approx(1200 * 1.5e-6)
    assert samples.one("gpu_hpc_kernel_traced_seconds_total") > 0
    assert samples.one("gpu_hpc_agent_records_total", result="kept") >= 2400
    assert samples.one("gpu_hpc_agent_records_total", result="unmatched") == 0
    assert all(value == 0 for value in samples.all("gpu_hpc_agent_files_rejected_total").values())
    assert node.sampler.stop()
