"""Whose process an agent's file is about: /proc is a copy, users are made up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from gpu_hpc_exporter.jobs.attribution import MAX_ROWS, attribute, row_name
from gpu_hpc_exporter.jobs.identity import Settings
from gpu_hpc_exporter.jobs.lookups import Pod, SlurmJob
from gpu_hpc_exporter.model import Gpu, GpuJobs, Job, JobOnGpu
from gpu_hpc_exporter.samplers.identities import AgentClaim, ForeignFileError, HostLookups, HostProcesses
from gpu_hpc_exporter.sources.kubernetes.view import KubernetesLookups
from gpu_hpc_exporter.sources.procfs import PidView
from gpu_hpc_exporter.sources.slurm.source import SlurmView
from proc_tree import ProcTree
from unit.objects import Clock

SLURM = "0::/system.slice/slurmstepd.scope/job_123/step_batch/user/task_0\n"
FOREVER = 10**18


class Controller:
    """A Slurm that knows one job."""

    view = SlurmView()

    def use_gpus(self, _: object) -> None: ...

    def slurm_job(self, job_id: str) -> SlurmJob | None:
        return SlurmJob("123", "bert", "1000") if job_id == "123" else None

    def slurm_job_of_sluid(self, _: str) -> SlurmJob | None:
        return None


class Pods:
    """A Kubernetes that knows these."""

    def __init__(self, *pods: Pod) -> None:
        self.view = KubernetesLookups(pods={pod.uid: pod for pod in pods})

    def poke(self, _: str) -> None: ...

    def set_gpus(self, _: Iterable[Gpu], __: Mapping[str, int]) -> None: ...


class Host:
    """Processes that the driver lists, on a host where they can be looked up, or cannot."""

    def __init__(self, directory: Path, *pods: Pod, lookup: bool = True) -> None:
        self.tree = ProcTree(directory / "proc")
        lookups = HostLookups(Pods(*pods), Controller())
        self.clock = Clock()
        self.processes = HostProcesses(Settings(), lookups, self.tree.root, PidView(lookup), self.clock)

    def list(self, *pids: int) -> None:
        """The driver lists these."""
        self.processes.jobs_of(pids, FOREVER)

    def in_namespace(self, pid: int, inner: int) -> None:
        """A process's pid in its container."""
        status = self.tree.root / str(pid) / "status"
        status.write_text(status.read_text().replace(f"NSpid:\t{pid}", f"NSpid:\t{pid}\t{inner}"))


def claim(pid: int, start_ticks: int = 100, uid: int = 1000, **environment: str) -> AgentClaim:
    """What a file says."""
    return AgentClaim(pid, start_ticks, uid, environment)


def test_a_process_is_found_by_its_own_pid_and_start(tmp_path: Path) -> None:
    """In a container its pid is another one; the job is what its cgroup says, whatever its environment does."""
    host = Host(tmp_path)
    host.tree.add(4711, cgroup=SLURM, environ={"JOB_NAME": "mine"})
    host.tree.add(4712, start_ticks=200)
    host.in_namespace(4711, 7)
    host.in_namespace(4712, 7)
    host.list(4711, 4712)
    found = host.processes.job_of_agent(claim(7, SLURM_JOB_ID="999"))
    assert found is not None
    assert (found.pid, found.job.job, found.job.source) == (4711, "bert", "slurm")
    assert host.processes.job_of_agent(claim(4711)) is None
    assert host.processes.job_of_agent(claim(7, 300)) is None
    other = host.processes.job_of_agent(claim(7, 200))
    assert other is not None
    assert other.pid == 4712
    assert host.processes.has_seen(4711)
    host.list(4712)
    assert not host.processes.has_seen(4711)


def test_a_process_that_has_ended_is_known_for_a_minute(tmp_path: Path) -> None:
    """What its agent wrote last is read later; then nobody's pid is kept, and at once where another process has it."""
    host = Host(tmp_path)
    host.tree.add(101, cgroup=SLURM)
    host.tree.add(102, start_ticks=150)
    host.list(101, 102)
    host.tree.remove(101, 102)
    host.tree.add(102, start_ticks=200)
    host.clock.now_s = 59
    host.list(102)
    assert host.processes.job_of_agent(claim(101)) is not None
    assert host.processes.job_of_agent(claim(102, 150)) is None
    assert host.processes.job_of_agent(claim(102, 200)) is not None
    host.clock.now_s = 60
    host.list(102)
    assert host.processes.job_of_agent(claim(101)) is None


def test_another_users_file_for_a_process(tmp_path: Path) -> None:
    """Whoever may create files must not speak for others' processes."""
    host = Host(tmp_path)
    host.tree.add(101, cgroup=SLURM)
    host.list(101)
    with pytest.raises(ForeignFileError):
        host.processes.job_of_agent(claim(101, uid=1001))


def test_two_users_containers_that_start_together(tmp_path: Path) -> None:
    """Programs of the same inner pid and start: each file is its owner's process's, whichever was found first."""
    host = Host(tmp_path)
    for uid in (1000, 1001):
        host.tree.add(4000 + uid, uid=uid)
        host.in_namespace(4000 + uid, 1)
    host.list(5000, 5001)
    for uid in (1000, 1001):
        found = host.processes.job_of_agent(claim(1, uid=uid))
        assert found is not None
        assert found.pid == 4000 + uid
    with pytest.raises(ForeignFileError):
        host.processes.job_of_agent(claim(1, uid=1002))


UIDS = ("11111111-2222-3333-4444-555555555555", "66666666-2222-3333-4444-555555555555")


def test_pods_that_start_together(tmp_path: Path) -> None:
    """All of one user, with the same inner pid and start: by the pod that a file names, by its GPUs, or for now not."""
    host = Host(tmp_path, *(Pod(uid, "bert-0", f"team-{n}") for n, uid in enumerate(UIDS)))
    for n, uid in enumerate(UIDS):
        host.tree.add(101 + n, cgroup=f"0::/kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice\n")
        host.in_namespace(101 + n, 1)
    host.list(101, 102)

    def pid_of(*may_be: int, **environment: str) -> int | None:
        found = host.processes.job_of_agent(AgentClaim(1, 100, 1000, environment), lambda pid: pid in may_be)
        return None if found is None else found.pid

    for n, uid in enumerate(UIDS):
        assert pid_of(101, 102, POD_UID=uid, POD_NAME="x") == 101 + n
        assert pid_of(101, 102, POD_NAME="bert-0", POD_NAMESPACE=f"team-{n}", HOSTNAME="x") == 101 + n
        assert pid_of(101, 102, HOSTNAME="bert-0", POD_NAMESPACE=f"team-{n}") == 101 + n
        assert pid_of(102 - n, POD_UID=uid) is None  # its pod's, and not its GPUs': not yet, or a made-up name
        assert pid_of(101 + n) == pid_of(101 + n, HOSTNAME="bert-0") == pid_of(101 + n, HOSTNAME="node-7") == 101 + n
    assert pid_of(101, 102) is None
    assert pid_of(101, 102, HOSTNAME="bert-0") is None
    assert pid_of() is None
    host.list(102)
    assert pid_of() is None  # the other has ended, and is not forgotten
    host.clock.now_s = 60
    host.list(102)
    assert pid_of() == 102


def test_its_own_word_never_goes_over_a_cgroup(tmp_path: Path) -> None:
    """Where cgroups can be read, an id of Slurm's or a pod's name is not believed of who is not found."""
    job = Host(tmp_path).processes.declared_job(claim(101, SLURM_JOB_ID="123", POD_NAME="web-0", JOB_NAME="mine"))
    assert (job.job, job.source, job.job_id) == ("mine", "environ", "")
    job = Host(tmp_path).processes.declared_job(claim(101, SLURM_JOB_ID="123"))
    assert (job.job, job.source) == ("1000/unknown", "process")


def test_its_own_word_where_nobody_can_look(tmp_path: Path) -> None:
    """As for a process without a cgroup: Slurm's id if Slurm knows it as this user's."""
    host = Host(tmp_path, lookup=False)
    assert host.processes.declared_job(claim(101, SLURM_JOB_ID="123")).job == "bert"
    stranger = host.processes.declared_job(claim(101, uid=1001, SLURM_JOB_ID="123"))
    assert (stranger.job, stranger.job_id) == ("1001/unknown", "")


BERT = Job("bert", "123", "batch", "ann", source="slurm")
EVES = Job("bert", user="eve", source="environ")


def on_gpu(*jobs: Job) -> GpuJobs:
    """These jobs, one process each."""
    return attribute([JobOnGpu(job, 1) for job in jobs], [])


def test_a_row_has_the_name_that_the_job_has_there() -> None:
    """The same as in job_info: namesakes apart, small ones of many in other."""
    assert row_name(BERT, None) == "bert"
    assert row_name(BERT, on_gpu(BERT)) == "bert"
    assert row_name(EVES, on_gpu(EVES)) == "bert"
    both = on_gpu(BERT, EVES)
    assert {row.job.job for row in both.jobs} == {row_name(BERT, both), row_name(EVES, both)} == {"bert", "eve/bert"}
    assert row_name(EVES, on_gpu(BERT)) == "eve/bert"
    many = on_gpu(*(Job(f"job{n}", source="slurm", job_id=str(n)) for n in range(MAX_ROWS + 3)))
    missing = {f"job{n}" for n in range(MAX_ROWS + 3)} - {row.job.job for row in many.jobs}
    assert {row_name(Job(name, source="slurm"), many) for name in missing} == {"other"}
