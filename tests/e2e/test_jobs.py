"""Jobs on /metrics: the fake driver's processes, a /proc of the test's own, and a prolog's files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.machine import Machine, state, uuid_of
from exporter_process import Samples, run_exporter
from fake_nvml import Scenario
from proc_tree import ProcTree

GIB = 1 << 30
HOST = Path(__file__).parents[1] / "jobs_host.py"
SLURM = "0::/system.slice/slurmstepd.scope/job_{}/step_batch/user/task_0\n"
POD = "0::/kubepods.slice/kubepods-pod11111111_2222_3333_4444_555555555555.slice/cri-containerd-{}.scope\n"
SEEDS = ("gpu_hpc_sm_utilization_ratio", "gpu_hpc_dram_bandwidth_utilization")


class Node:
    """A machine with two GPUs whose jobs can be told from its /proc and from a map directory."""

    def __init__(self, directory: Path) -> None:
        self.proc = ProcTree(directory / "proc")
        self.map = directory / "map"
        self.map.mkdir()
        self.config = directory / "jobs.yaml"
        self.config.write_text(
            "pm_sampling: {mode: off}\n"
            f"jobs: {{kubernetes: {{enabled: off}}, slurm: {{map_directory: {self.map}}}}}\n"
        )


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
            env = {**scenario.env, "JOBS_PROCFS": str(node.proc.root), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
            flags = (f"--config.file={node.config}", "--log.format=json", "--path.kmsg=/none")
            exporter = stack.enter_context(run_exporter(tmp_path, *flags, env=env, program=(str(HOST),)))
            return Machine(scenario, exporter)

        yield begin


TWO_GPUS = f"device 0\n  sm 0.96\n  memory_used {58 * GIB}\ndevice 1\n  sm 0.5\n"


def jobs_of(samples: Samples, device: int) -> dict[str, dict[str, str]]:
    """Rows of gpu_hpc_job_info of a GPU, by job."""
    rows = [dict(labels) for labels in samples.all("gpu_hpc_job_info", uuid=uuid_of(device))]
    assert len({row["job"] for row in rows}) == len(rows), "one row for each (GPU, job)"
    return {row["job"]: row for row in rows}


def seed_jobs(samples: Samples, device: int) -> set[str]:
    """What the users' gauges say."""
    return {dict(labels)["job"] for name in SEEDS for labels in samples.all(name, uuid=uuid_of(device))}


def test_two_jobs_share_a_gpu_and_take_turns(run: Run, node: Node) -> None:
    """A Slurm job and a plain process with JOB_NAME: each is told apart; what has ended is gone at once."""
    node.proc.add(101, cgroup=SLURM.format(123))
    node.proc.add(102, environ={"JOB_NAME": "web"})
    (node.map / "job-123").write_text("job_id=123\nname=bert\nuser=ann\nkind=batch\ngpus=0\n")
    first = f"process 0 pid 101 memory {5 * GIB} sm 40\n"
    second = f"process 0 pid 102 memory {2 * GIB}\n"
    machine = run(first + second)
    samples = machine.exporter.wait_for(lambda s: {"bert", "web"} <= jobs_of(s, 0).keys())
    rows = jobs_of(samples, 0)
    assert rows.keys() == {"bert", "web"}
    assert (rows["bert"]["job_id"], rows["bert"]["kind"], rows["bert"]["user"]) == ("123", "batch", "ann")
    assert set(rows["web"]) == {
        *("gpu", "uuid", "job", "job_id", "kind", "user", "namespace", "pod", "container", "rank", "source"),
    }
    gpu = {"uuid": uuid_of(0)}
    assert samples.one("gpu_hpc_gpu_jobs", **gpu) == 2
    assert samples.one("gpu_hpc_gpu_processes", **gpu) == 2
    assert samples.one("gpu_hpc_job_processes", job="bert", **gpu) == 1
    assert samples.one("gpu_hpc_job_memory_used_bytes", job="bert", **gpu) == 5 * GIB
    assert samples.one("gpu_hpc_job_sm_ratio", job="bert", **gpu) == 0.4
    assert samples.get("gpu_hpc_job_sm_ratio", job="web", **gpu) is None
    assert samples.one("gpu_hpc_memory_unattributed_bytes", **gpu) == 51 * GIB
    assert samples.one("gpu_hpc_gpu_jobs", uuid=uuid_of(1)) == 0
    assert state(samples, "procfs") == state(samples, "slurm") == "active"
    assert samples.one("gpu_hpc_job_map_age_seconds", source="slurm") < 60
    machine.exporter.wait_for(lambda s: seed_jobs(s, 0) == {""})

    machine.scenario.rewrite(TWO_GPUS + first)
    samples = machine.exporter.wait_for(lambda s: seed_jobs(s, 0) == {"bert"})
    assert jobs_of(samples, 0).keys() == {"bert"}
    assert samples.get("gpu_hpc_job_memory_used_bytes", job="web", **gpu) is None

    (node.map / "job-123").unlink()
    machine.scenario.rewrite(TWO_GPUS + second.replace("\n", " sm 70\n"))
    samples = machine.exporter.wait_for(lambda s: seed_jobs(s, 0) == {"web"} and jobs_of(s, 0).keys() == {"web"})
    # The driver's share of a process that is new is not waited for.
    assert samples.one("gpu_hpc_job_sm_ratio", job="web", **gpu) == 0.7

    machine.scenario.rewrite(TWO_GPUS)
    samples = machine.exporter.wait_for(lambda s: seed_jobs(s, 0) == {""} and not jobs_of(s, 0))
    assert samples.one("gpu_hpc_gpu_jobs", **gpu) == 0


def test_libraries_of_the_processes(run: Run, node: Node) -> None:
    """Versions by file names, by a wheel and by NCCL itself, of each job; gone with it. No agent has part in it."""
    node.proc.add(101, environ={"JOB_NAME": "bert"})
    node.proc.add(102, environ={"JOB_NAME": "web"})
    site = "/env/site-packages"
    root = node.proc.load(
        101, "/lib/libcuda.so.580.159.04", f"{site}/nvidia/cudnn/lib/libcudnn.so.9", f"{site}/torch/lib/libtorch_cpu.so"
    )
    (root / site[1:] / "nvidia_cudnn_cu12-9.1.0.70.dist-info").mkdir(parents=True)
    (root / site[1:] / "torch-2.5.1+cu124.dist-info").mkdir()
    node.proc.load(102, "/lib/libcudart.so.12.4.127", "/lib/libcudart.so.11.8.89", '/lib/"}\\012/libnccl.so.2.21.5')
    both = "process 0 pid 101\nprocess 0 pid 102\n"
    machine = run(both)
    expected = {
        ("bert", "cuda_driver", "580.159.04"),
        ("bert", "cudnn", "9.1.0.70"),
        ("bert", "torch", "2.5.1+cu124"),
        ("web", "cudart", "12.4.127"),
        ("web", "cudart", "11.8.89"),
    }

    def rows(samples: Samples) -> set[tuple[str, str, str]]:
        found = [dict(labels) for labels in samples.all("gpu_hpc_process_library_info", uuid=uuid_of(0), gpu="0")]
        return {(row["job"], row["library"], row["version"]) for row in found}

    machine.exporter.wait_for(lambda s: rows(s) == expected)
    machine.scenario.rewrite(TWO_GPUS + "process 0 pid 102\n")
    samples = machine.exporter.wait_for(lambda s: {job for job, _, _ in rows(s)} == {"web"})
    assert rows(samples) == {row for row in expected if row[0] == "web"}


def test_g07_a_gpu_that_is_held_and_runs_nothing(run: Run, node: Node) -> None:
    """G07: the most wasted GPUs are those whose job has no process there."""
    (node.map / "0").write_text("123\n")
    (node.map / "1").write_text("job_id=9\nname=idle notebook\nkind=interactive\n")
    samples = run("").exporter.wait_for(lambda s: seed_jobs(s, 1) == {"idle notebook"})
    assert jobs_of(samples, 0)["slurm-123"]["source"] == "slurm"
    assert samples.one("gpu_hpc_job_processes", job="idle notebook") == 0
    assert samples.get("gpu_hpc_job_memory_used_bytes", job="idle notebook") is None


def test_hostile_names_and_files(run: Run, node: Node) -> None:
    """E05, H01: whatever processes and files are called, the page parses and no row is another's."""
    node.proc.add(101, comm=b'a\n"b\\c\r\xff')
    node.proc.add(102, environ={"JOB_NAME": "x" * 200 + "1"})
    node.proc.add(103, environ={"JOB_NAME": "x" * 200 + "2"})
    node.proc.add(104, environ={"SLURM_JOB_ID": "999"}, cgroup=SLURM.format(123))
    os.mkfifo(node.map / "0")
    (node.map / "1").symlink_to("/etc/passwd")
    (node.map / "job-1").write_bytes(b"job_id=123\nname=\xff\xfe{}\"'\n" + b"x" * 70_000)
    (node.map / "job-2").write_bytes(b'job_id=123\nname=\xff"\n')
    processes = "".join(f"process 0 pid {pid}\n" for pid in (101, 102, 103, 104))
    samples = run(processes).exporter.wait_for(lambda s: len(jobs_of(s, 0)) == 4)
    assert all(len(value.encode()) <= 200 for row in jobs_of(samples, 0).values() for value in row.values())
    assert {row["job_id"] for row in jobs_of(samples, 0).values()} == {"", "123"}
    assert '\N{REPLACEMENT CHARACTER}"' in jobs_of(samples, 0)


def test_a09_a_list_that_cannot_be_true_names_nobody(run: Run, node: Node) -> None:
    """A09: entries of an unknown size are counted, and no job is made of them; GPU 1 is not concerned."""
    node.proc.add(101)
    machine = run("process 0 pid 101\nprocess 0 pid 102\nprocess_stride 40\n")
    samples = machine.exporter.wait_for(lambda s: s.get("gpu_hpc_gpu_jobs", uuid=uuid_of(1)) == 0)
    assert samples.one("gpu_hpc_rejected_readings_total", uuid=uuid_of(0), reading="processes") >= 1
    for name in ("gpu_hpc_gpu_jobs", "gpu_hpc_gpu_processes", "gpu_hpc_memory_unattributed_bytes"):
        assert samples.get(name, uuid=uuid_of(0)) is None
    assert not jobs_of(samples, 0)


def test_e01_a_driver_that_lists_our_own_namespace_alone(run: Run, node: Node) -> None:
    """E01: what runs outside is not in its lists, and what is in them is not of this /proc: no count, no job."""
    (node.proc.root / "self/ns").mkdir(parents=True)
    (node.proc.root / "self/ns/pid").symlink_to("pid:[4026532222]")
    (node.proc.root / "driver/nvidia").mkdir(parents=True)
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Wed Jan  1 00:00:00 UTC 2025\n"
    (node.proc.root / "driver/nvidia/version").write_text(version)
    node.proc.add(101, environ={"JOB_NAME": "bert"})
    machine = run("process 0 pid 101\n")
    samples = machine.exporter.wait_for(
        lambda s: (
            s.get("gpu_hpc_source_state", source="procfs", state="unsupported", uuid="") == 1
            and s.get("gpu_hpc_memory_used_bytes", uuid=uuid_of(0)) is not None
        )
    )
    for name in ("gpu_hpc_gpu_jobs", "gpu_hpc_gpu_processes", "gpu_hpc_memory_unattributed_bytes"):
        assert samples.get(name, uuid=uuid_of(0)) is None
    assert not jobs_of(samples, 0)
    (info,) = [dict(labels) for labels in samples.all("gpu_hpc_source_state_info", source="procfs")]
    assert "run with hostPID" in info["reason"]


def test_mig_instances_have_jobs_and_their_parent_has_none(run: Run, node: Node) -> None:
    """Rows go by the instance's UUID."""
    node.proc.add(101, cgroup=SLURM.format(5))
    mig = "mig 0 gi 3 ci 0\nmig 0 gi 4 ci 0\nprocess 0 pid 101 gi 3 ci 0 memory 4096\n"
    samples = run(mig).exporter.wait_for(lambda s: bool(s.all("gpu_hpc_job_info", job="slurm-5")))
    (row,) = [dict(labels) for labels in samples.all("gpu_hpc_job_info")]
    assert row["uuid"].startswith("MIG-")
    assert row["gpu"] == "0"
    assert sorted(samples.all("gpu_hpc_gpu_jobs", gpu="0").values()) == [0, 1]
    assert samples.get("gpu_hpc_gpu_jobs", uuid=uuid_of(0)) is None


def test_e01_pids_that_are_not_of_this_proc_are_nobodys(run: Run, node: Node) -> None:
    """E01: a process that began after the driver listed it is another one; one that /proc lacks has no name."""
    node.proc.add(101, comm=b"sshd", start_ticks=10**12)
    samples = run("process 0 pid 101\nprocess 0 pid 4242\n").exporter.wait_for(lambda s: bool(jobs_of(s, 0)))
    assert jobs_of(samples, 0).keys() == {"unknown"}
    assert samples.one("gpu_hpc_job_processes", job="unknown") == 2
