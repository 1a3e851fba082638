"""Processes, pods and Slurm jobs of one host become jobs on GPUs: /proc is a copy, the peers are the test's own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from exporter_process import parse
from gpu_hpc_exporter.collectors import COLLECTORS
from gpu_hpc_exporter.config import ConfigError, JobRule, Jobs, Kubernetes, Slurm
from gpu_hpc_exporter.exposition import TEXT, encode
from gpu_hpc_exporter.jobs.identity import Settings
from gpu_hpc_exporter.jobs.lookups import Allocation, Pod
from gpu_hpc_exporter.model import Gpu, GpuProcess, GpuProcesses, StateChange
from gpu_hpc_exporter.samplers.fleet import Fleet
from gpu_hpc_exporter.samplers.identities import HostLookups, HostProcesses, KubernetesHolders
from gpu_hpc_exporter.samplers.job_parts import JobParts
from gpu_hpc_exporter.samplers.jobs import JobSampler
from gpu_hpc_exporter.sources.kubernetes.pod_folders import PodFolders
from gpu_hpc_exporter.sources.kubernetes.view import KubernetesLookups, PartState
from gpu_hpc_exporter.sources.procfs import PidView
from proc_tree import ProcTree
from unit.objects import G0, G1, GAUGE_WINDOW_NS, NS, Clock, inventory, readings

PU = "11111111-2222-3333-4444-555555555555"
CID = "a" * 64
IN_POD = f"0::/kubepods.slice/kubepods-pod{PU.replace('-', '_')}.slice/cri-containerd-{CID}.scope\n"
POD = Pod(PU, "bert-0", "ml", {"training.kubeflow.org/job-name": "bert"}, controller="PyTorchJob")
HELD = Allocation(G0.uuid, "ml", "bert-0", "main", PU)


class Kubelet:
    """A Kubernetes source that says what the test says."""

    def __init__(self, *pods: Pod, held: Iterable[Allocation] = ()) -> None:
        by_uuid: dict[str, tuple[Allocation, ...]] = {}
        for one in held:
            by_uuid[one.device_uuid] = (*by_uuid.get(one.device_uuid, ()), one)
        self.view = KubernetesLookups(
            pods={pod.uid: pod for pod in pods},
            pods_by_name={(pod.namespace, pod.name): pod for pod in pods},
            allocations=by_uuid,
            parts={"kubelet": PartState("active", told_s=9.0)},
        )
        self.poked: list[str] = []
        self.gpus: tuple[Gpu, ...] = ()

    def poke(self, key: str) -> None:
        self.poked.append(key)

    def set_gpus(self, gpus: Iterable[Gpu], _: Mapping[str, int]) -> None:
        self.gpus = tuple(gpus)


class Host:
    """A host with two GPUs, and what is known of its jobs."""

    def __init__(self, directory: Path, kubelet: Kubelet) -> None:
        self.tree = ProcTree(directory / "proc")
        self.folders = directory / "pods"
        self.clock = Clock(10.0)
        self.fleet = Fleet(self.clock, GAUGE_WINDOW_NS)
        lookups = HostLookups(kubelet, None, PodFolders(self.folders))
        settings = Settings()
        self.processes = HostProcesses(settings, lookups, self.tree.root, PidView(lookup=True), self.clock)
        holders = KubernetesHolders(kubelet, lookups, settings, self.tree.root)
        self.sampler = JobSampler(self.fleet, self.processes, (holders,), self.clock)
        self.sampler.put(inventory(G0, G1))

    def jobs(self, *pids: int) -> dict[str, tuple[str, int]]:
        """Name of each job on the first GPU, which has these processes, with its pod and number of processes."""
        self.sampler.put(GpuProcesses(self.clock(), G0.uuid, tuple(GpuProcess(pid) for pid in pids)))
        self.sampler.tick()
        rows = self.fleet.snapshot().jobs[G0.uuid].jobs
        return {row.job.job: (row.job.pod, row.processes) for row in rows}


def test_a_pod_that_holds_a_gpu_is_named_as_its_processes_are(tmp_path: Path) -> None:
    """G07, F07, H03: with and without a process there is the same one row."""
    host = Host(tmp_path, Kubelet(POD, held=[HELD]))
    assert host.jobs() == {"bert": ("bert-0", 0)}
    held = host.fleet.snapshot().jobs[G0.uuid].jobs[0].job
    host.tree.add(101, cgroup=IN_POD)
    assert host.jobs(101) == {"bert": ("bert-0", 1)}
    running = host.fleet.snapshot().jobs[G0.uuid].jobs[0].job
    assert (held.job_id, held.kind, held.namespace) == (running.job_id, running.kind, running.namespace)
    assert held.container == "main"


def test_without_an_api_server_uid_and_podresources_suffice(tmp_path: Path) -> None:
    """The kubelet's folders join the two: nothing is guessed from who shares a GPU."""
    nameless = Allocation(G0.uuid, "ml", "bert-0", "main")
    kubelet = Kubelet(held=[nameless])
    host = Host(tmp_path, kubelet)
    host.tree.add(101, cgroup=IN_POD)
    assert host.jobs(101).keys() == {"bert-0", "a" * 12}
    assert PU in kubelet.poked
    (host.folders / f"ml_bert-0_{PU}").mkdir(parents=True)
    (host.folders / "no pod").mkdir()
    assert host.jobs(101) == {"bert-0": ("bert-0", 1)}


def test_f01_f09_pods_that_share_a_gpu_and_one_that_never_asked_for_it(tmp_path: Path) -> None:
    """F01, F09: a GPU maps to a set of pods, and the cgroup is a second source."""
    other = Allocation(G0.uuid, "ml", "web-0", "main", "22222222-2222-3333-4444-555555555555")
    host = Host(tmp_path, Kubelet(POD, held=[other]))
    host.tree.add(101, cgroup=IN_POD)
    assert host.jobs(101) == {"bert": ("bert-0", 1), "web-0": ("web-0", 0)}
    assert host.fleet.snapshot().job_of(G0.uuid) == ""


def test_f02_pods_that_share_a_gpu_do_not_multiply_its_values(tmp_path: Path) -> None:
    """F02: three pods on a GPU of 300 W are three rows of job_info and 300 W, which no pod is told to draw."""
    held = [Allocation(G0.uuid, "ml", f"web-{n}", "main", f"{n}" * 8 + PU[8:]) for n in range(3)]
    host = Host(tmp_path, Kubelet(held=held))
    host.fleet.put(StateChange(NS, "nvml", "", "active"))
    host.fleet.put(readings(9.5, {"power_gpu_watts": 300}))
    assert len(host.jobs()) == 3
    families = [family for collector in COLLECTORS for family in collector.collect(host.fleet.snapshot())]
    page = parse(encode(families, TEXT).decode())
    assert [*page.all("gpu_hpc_power_watts").values()] == [300]
    pods = {dict(labels)["pod"] for labels in page.all("gpu_hpc_job_info", uuid=G0.uuid)}
    assert pods == {"web-0", "web-1", "web-2"}
    told = {name for name, labels in page.values if dict(labels).get("pod")}
    assert told == {"gpu_hpc_job_info"}


def test_the_server_of_mps_is_no_job_beside_its_clients(tmp_path: Path) -> None:
    """A GPU with MPS would always look shared; without clients of its user, it is what it is."""
    host = Host(tmp_path, Kubelet())
    host.tree.add(101, comm=b"nvidia-cuda-mps", uid=1000)
    host.tree.add(102, uid=1000, environ={"JOB_NAME": "a"})
    host.tree.add(103, uid=1001, environ={"JOB_NAME": "b"})
    assert host.jobs(101, 102).keys() == {"a"}
    assert len(host.jobs(101, 103)) == 2


def test_a_process_that_proc_lacks_twice_is_somebodys(tmp_path: Path) -> None:
    """It may have ended the first time; with hidepid it never shows."""
    host = Host(tmp_path, Kubelet())
    host.tree.add(102, environ={"JOB_NAME": "a"})
    assert host.jobs(101, 102).keys() == {"a"}
    assert host.jobs(101, 102).keys() == {"a", "unknown"}
    host.tree.add(101, environ={"JOB_NAME": "b"})
    assert host.jobs(101, 102).keys() == {"a", "b"}


def test_h03_names_that_become_one_are_one_row(tmp_path: Path) -> None:
    """H03: two jobs whose names differ in what no label may hold."""
    host = Host(tmp_path, Kubelet())
    host.tree.add(101, environ={"JOB_NAME": "a\1b"})
    host.tree.add(102, environ={"JOB_NAME": "a\2b"})
    assert host.jobs(101, 102) == {"a\N{REPLACEMENT CHARACTER}b": ("", 2)}


def test_other_pods_are_another_version(tmp_path: Path) -> None:
    """What is the same but told anew is not: 1,000 processes are not identified again every ten seconds."""
    kubelet = Kubelet(POD)
    lookups = HostLookups(kubelet, None, PodFolders(tmp_path))
    first = lookups.version()
    kubelet.view = Kubelet(POD).view
    assert lookups.version() == first
    kubelet.view = Kubelet().view
    assert lookups.version() != first


@pytest.mark.parametrize("count", [1000])
def test_the_cost_of_a_thousand_processes(tmp_path: Path, count: int) -> None:
    """What a look costs with a /proc that is a copy: told, put together, folded. Measured: 0.1 s of a core."""
    host = Host(tmp_path, Kubelet(POD))
    pids = [100 + n for n in range(count)]
    for pid in pids:
        host.tree.add(pid, environ={"JOB_NAME": f"job-{pid % 40}"})
    began = time.thread_time()
    host.jobs(*pids)
    assert time.thread_time() - began < 1.0


def test_parts_are_put_together_from_the_configuration(tmp_path: Path) -> None:
    """Sources that are not configured have no state; a rule that cannot be used is an error that names it."""
    tree = ProcTree(tmp_path / "proc")
    tree.add(101, command=b"python\0--run=night\0")
    (tmp_path / "0").write_text("123\n")
    fleet = Fleet(time.monotonic_ns, GAUGE_WINDOW_NS)
    jobs = Jobs((JobRule(command_line=r"--run=(?P<job>\w+)"),), kubernetes=Kubernetes("off"))
    parts = JobParts(fleet, jobs, tree.root)
    parts.sampler.put(inventory(G0))
    parts.sampler.put(GpuProcesses(time.monotonic_ns(), G0.uuid, (GpuProcess(101),)))
    parts.sampler.tick()
    assert fleet.snapshot().job_of(G0.uuid) == "night"
    assert {state.source for state in fleet.snapshot().states} == {"procfs"}
    with pytest.raises(ConfigError, match=r"jobs\.rules: rule 1, user `\(\?=a\)b\(\?P<job>c\)`: "):
        JobParts(fleet, Jobs((JobRule(user="(?=a)b(?P<job>c)"),)), tree.root)
    parts.start()
    parts.apply(Jobs(slurm=Slurm(map_directory=str(tmp_path)), kubernetes=Kubernetes("off")))
    deadline = time.monotonic() + 60
    while "slurm-123" not in {row.job.job for row in fleet.snapshot().jobs[G0.uuid].jobs}:
        assert time.monotonic() < deadline
        parts.sampler.put(GpuProcesses(time.monotonic_ns(), G0.uuid, ()))
        time.sleep(0.05)
    assert any(parts.stop() for _ in range(20))  # each waits a while for threads that a busy machine holds up


def test_g04_what_would_resolve_sluids_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """G04: with the setting's name, but not of jobs whose number a controller tells a little later."""
    host = Host(tmp_path, Kubelet())
    for pid, sluid in ((101, "s0EXAMPLE0SLU00"), (102, "s0EXAMPLE0SLU01"), (103, "s0EXAMPLE0SLU02")):
        host.tree.add(pid, cgroup=f"0::/system.slice/slurmstepd.scope/{sluid}/step_0/user/task_0\n")
    host.jobs(101)
    host.clock.now_s += 59
    host.jobs(101)
    host.jobs(102)
    host.clock.now_s += 59
    host.jobs(102)
    assert "SLUID" not in caplog.text
    for _ in range(3):
        host.clock.now_s += 59
        assert host.jobs(102, 103) == {"slurm-s0EXAMPLE0SLU01": ("", 1), "slurm-s0EXAMPLE0SLU02": ("", 1)}
    (line,) = [record for record in caplog.records if "SLUID" in record.getMessage()]
    assert line.levelname == "WARNING"
    assert "s0EXAMPLE0SLU01" in line.getMessage()
    assert "CgroupJobIdPaths=yes" in line.getMessage()
