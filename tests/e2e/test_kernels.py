"""Kernels on /metrics: the real exporter, a fake driver, a /proc of the test's own, and files as agents write them."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent_files import AgentWriter
from e2e.machine import Machine, mig_uuid_of, state, uuid_of
from exporter_process import Samples, run_exporter
from fake_nvml import Scenario
from gpu_hpc_exporter.sources.kernels import layout
from gpu_hpc_exporter.sources.replay import Recording
from proc_tree import ProcTree

SLURM = "0::/system.slice/slurmstepd.scope/job_{}/step_batch/user/task_0\n"
ADD = b"_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"
ADD_NAME = "vectorized_elementwise_kernel[CUDAFunctor_add]"
TWO_GPUS = "device 0\n  sm 0.5\ndevice 1\n  sm 0.5\n"
EXECUTIONS = "gpu_hpc_kernel_executions_total"
SLOWDOWN = "gpu_hpc_kernel_agent_slowdown_ratio"


class Node:
    """A machine with two GPUs, its processes and their agents."""

    def __init__(self, directory: Path) -> None:
        self.proc = ProcTree(directory / "proc")
        self.agents = directory / "agents"
        self.agents.mkdir()
        self.config = directory / "config.yaml"
        self.config.write_text(
            "pm_sampling: {mode: off}\njobs: {kubernetes: {enabled: off}}\n"
            f"agent: {{directory: {self.agents}, top_k: 3}}\n"
        )

    def agent(self, pid: int, *uuids: str, cgroup: str = "0::/\n", **environment: str) -> AgentWriter:
        """A process of the user who runs the tests, and its file."""
        self.proc.add(pid, cgroup=cgroup, environ=environment, uid=Path(self.agents).stat().st_uid)
        return AgentWriter(self.agents, pid, uuids=uuids, environment=environment)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node without processes."""
    return Node(tmp_path)


Run = Callable[[str], Machine]


@pytest.fixture
def run(tmp_path: Path, library: Path, node: Node) -> Iterator[Run]:
    """Start the exporter on the node with these processes."""
    with ExitStack() as stack:

        def begin(processes: str) -> Machine:
            scenario = Scenario(tmp_path, library, TWO_GPUS + processes)
            flags = (f"--config.file={node.config}", "--log.format=json", "--path.kmsg=/none")
            proc = f"--path.procfs={node.proc.root}"
            exporter = stack.enter_context(run_exporter(tmp_path, *flags, proc, env=scenario.env))
            machine = Machine(scenario, exporter)
            exporter.wait_for(lambda samples: state(samples, "kernels") != "")
            return machine

        yield begin


def work(writer: AgentWriter, name: bytes, count: int, each_ns: int, device: int = 0) -> None:
    """A window in which a kernel ran so often."""
    writer.kernel(name, device).run(writer.next_window(), count, each_ns, 1_500_000)
    writer.beat()


def total(samples: Samples, **labels: str) -> float:
    """Executions of all kernels with these labels."""
    return sum(samples.all(EXECUTIONS, **labels).values())


def test_two_jobs_their_kernels_and_their_end(run: Run, node: Node) -> None:
    """A Slurm job of two ranks and a process that names itself, on one GPU; one rank ends and nothing goes back."""
    processes = "process 0 pid 101\nprocess 0 pid 102\nprocess 0 pid 103\n"
    machine = run(processes)
    ranks = [node.agent(pid, uuid_of(0), cgroup=SLURM.format(123)) for pid in (101, 102)]
    alone = node.agent(103, uuid_of(0), JOB_NAME="web")
    for rank in ranks:
        work(rank, ADD, 1000, 20_000)
    work(alone, b"triton_poi_fused_7", 10, 1000)
    samples = machine.exporter.wait_for(lambda s: total(s, job="slurm-123") == 2000 and total(s, job="web") == 10)
    labels = {"gpu": "0", "uuid": uuid_of(0), "job": "slurm-123", "kernel": ADD_NAME}
    assert samples.one(EXECUTIONS, category="elementwise", **labels) == 0
    assert samples.one("gpu_hpc_agents", state="waiting") == 3
    assert samples.one("gpu_hpc_gpu_processes", uuid=uuid_of(0)) == 3
    for rank in ranks:
        work(rank, ADD, 50, 20_000)
    samples = machine.exporter.wait_for(lambda s: s.one(EXECUTIONS, **labels) == 100)
    assert samples.one("gpu_hpc_kernel_launch_latency_ms", **labels) == 1.5
    assert samples.one("gpu_hpc_kernel_seconds_total", **labels) == 0.002
    assert samples.one("gpu_hpc_kernel_traced_seconds_total", job="slurm-123") == 4
    assert {dict(row)["kernel"] for row in samples.all(EXECUTIONS, job="web")} == {"triton_poi_fused", "other"}
    assert {dict(row)["job"] for row in samples.all("gpu_hpc_job_info")} == {"slurm-123", "web"}

    ranks[0].end()
    machine.scenario.rewrite(TWO_GPUS + "process 0 pid 102\nprocess 0 pid 103\n")
    work(ranks[1], ADD, 1, 20_000)
    samples = machine.exporter.wait_for(lambda s: s.one(EXECUTIONS, **labels) == 101)
    machine.exporter.wait_for(lambda s: s.one("gpu_hpc_agents", state="waiting") == 2)
    assert machine.exporter.scrape().one(EXECUTIONS, **labels) == 101


def test_mig_instances_by_their_own_uuid(run: Run, node: Node) -> None:
    """The agent's driver tells the instance's UUID; the row is the instance's."""
    machine = run("mig 0 gi 3 ci 0\nmig 0 gi 4 ci 0\nprocess 0 pid 101 gi 3 ci 0 memory 4096\n")
    uuid = mig_uuid_of(0, 3)
    work(node.agent(101, uuid, cgroup=SLURM.format(5)), b"gemm", 7, 1000)
    samples = machine.exporter.wait_for(lambda s: total(s) == 7)
    assert {(dict(row)["uuid"], dict(row)["gpu"]) for row in samples.all(EXECUTIONS)} == {(uuid, "0")}


def test_hostile_files_beside_an_honest_one(run: Run, node: Node) -> None:
    """Counted by reason; names of 4 kB, of gigabytes and of no text make an exposition that parses."""
    machine = run("process 0 pid 101\n")
    (node.agents / "1-1-a.shm").symlink_to("/etc/passwd")
    (node.agents / "2-1-a.shm").write_bytes(b"GPUHPCAG")
    AgentWriter(node.agents, 3).write(8, b"\x63")
    AgentWriter(node.agents, 4).write(layout.STATUS_OFFSET, b"\xff" * layout.STATUS.size)
    bomb = "_Z1f1AIiiE" + "".join(f"S_IS{c}_S{c}_E" for c in "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    writer = node.agent(101, uuid_of(0), cgroup=SLURM.format(5))
    names = [b"k" * 4000, b"k" * 3999 + b"x", bomb.encode(), b'a\xff\n"\\', b"x<" * 2000, b""]
    window = writer.next_window()
    for name in names:
        writer.kernel(name).run(window, 10, 10_000)
    writer.beat()
    samples = machine.exporter.wait_for(lambda s: total(s) == 10 * len(names))
    rejected = {dict(row)["reason"]: v for row, v in samples.all("gpu_hpc_agent_files_rejected_total").items() if v}
    assert rejected == {"symlink": 1, "wrong_size": 1, "unknown_version": 1, "lying": 1}
    series = samples.all(EXECUTIONS)
    assert len(series) == 4
    assert all(len(dict(row)["kernel"].encode()) <= 128 for row in series)
    warned = [line["msg"] for line in machine.log_lines("warning") if "agent file" in line["msg"]]
    assert sorted(line.rpartition(": ")[2] for line in warned) == sorted(rejected)


def test_a_directory_that_is_not_there_is_no_alarm(run: Run, node: Node) -> None:
    """A host without agents: the source is unsupported, with the reason; a reload names another directory."""
    config = node.config.read_text()
    node.config.write_text(config.replace(str(node.agents), "/proc/agents/here"))
    machine = run("")
    samples = machine.exporter.scrape()
    assert state(samples, "kernels") == "unsupported"
    (reason,) = [dict(row)["reason"] for row in samples.all("gpu_hpc_source_state_info", source="kernels")]
    assert reason.startswith("/proc/agents/here is not there")
    assert not samples.all("gpu_hpc_agents")
    assert not [line for line in machine.log_lines("warning", "error") if "agent" in line["msg"]]
    node.config.write_text(config)
    assert machine.exporter.post("/-/reload") == 200
    machine.exporter.wait_for(lambda s: state(s, "kernels") == "active" and bool(s.all("gpu_hpc_agents")))


def test_a_recording_has_kernels(node: Node, tmp_path: Path, library: Path) -> None:
    """`record` writes what the agents told, and the replay of it serves the same."""
    scenario = Scenario(tmp_path, library, TWO_GPUS + "process 0 pid 101\n")
    writer = node.agent(101, uuid_of(0), cgroup=SLURM.format(5))
    work(writer, b"gemm", 7, 1000)
    file = tmp_path / "r.jsonl.gz"
    flags = [f"--config.file={node.config}", f"--path.procfs={node.proc.root}", "record", "--duration=8s", str(file)]
    command = [sys.executable, "-m", "gpu_hpc_exporter", *flags]
    with subprocess.Popen(command, env=scenario.env, stderr=subprocess.DEVNULL) as process:
        assert process.wait(60) == 0
    assert "kernels" in Recording.load(file).header.sources
    with run_exporter(tmp_path, "--source=replay", f"--replay.file={file}") as exporter:
        samples = exporter.wait_for(lambda s: bool(s.all(EXECUTIONS)))
    assert {dict(row)["job"] for row in samples.all(EXECUTIONS)} == {"slurm-5"}


def test_what_tracing_costs_the_gpu(run: Run, node: Node) -> None:
    """A GPU that does a tenth less while its agent traces, beside one whose agent costs it nothing."""
    base = "device 0\n  tensor {}\n  sm 0.9\ndevice 1\n  tensor 0.5\n  sm 0.9\n"
    base += "process 0 pid 101\nprocess 1 pid 102\n"
    machine = run("process 0 pid 101\nprocess 1 pid 102\n")
    machine.scenario.rewrite(base.format(0.6))
    writers = [node.agent(101 + gpu, uuid_of(gpu), cgroup=SLURM.format(5)) for gpu in (0, 1)]
    for writer in writers:
        work(writer, ADD, 10, 20_000)
    machine.exporter.wait_for(lambda s: total(s) == 20)
    pause = threading.Event()
    for _ in range(100):  # a busy machine garbles some rounds
        pause.wait(0.7)  # the work goes on untraced, then traced, as long as such things take
        begin_ns = time.time_ns()
        trace_all(writers, begin_ns, 0)
        machine.scenario.rewrite(base.format(0.54))
        pause.wait(0.7)
        machine.scenario.rewrite(base.format(0.6))
        trace_all(writers, begin_ns, time.time_ns())
        samples = machine.exporter.scrape()
        slowdown = [samples.get(SLOWDOWN, gpu=str(gpu), uuid=uuid_of(gpu)) for gpu in (0, 1)]
        if slowdown == [pytest.approx(0.1, abs=0.02), pytest.approx(0, abs=0.005)]:
            return
    pytest.fail(f"not told, or wrong: {slowdown}")


def trace_all(writers: list[AgentWriter], begin_ns: int, end_ns: int) -> None:
    """Note in each file that tracing has begun, or, where `end_ns` is not 0, ended."""
    for writer in writers:
        writer.trace(begin_ns, end_ns)
        writer.beat()
