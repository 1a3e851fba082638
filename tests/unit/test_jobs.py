"""The sampler of jobs with sources of the test's own, and what is served of its events."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from exporter_process import Samples, parse
from gpu_hpc_exporter.collectors.jobs import JobsCollector
from gpu_hpc_exporter.collectors.windows import WindowsCollector
from gpu_hpc_exporter.exposition import TEXT, encode
from gpu_hpc_exporter.jobs.attribution import MAX_LIBRARIES
from gpu_hpc_exporter.jobs.identity import Settings
from gpu_hpc_exporter.model import (
    Gpu,
    GpuProcess,
    GpuProcesses,
    Job,
    JobSource,
    Library,
    State,
    StateChange,
)
from gpu_hpc_exporter.samplers.fleet import Fleet
from gpu_hpc_exporter.samplers.identities import HostLookups, HostProcesses
from gpu_hpc_exporter.samplers.jobs import Condition, JobSampler
from gpu_hpc_exporter.sources.procfs import PidView
from proc_tree import ProcTree
from unit.objects import G0, G1, GAUGE_WINDOW_NS, M1, NS, Clock, inventory, readings, window

GIB = 1 << 30
BERT = Job("bert", "123", "batch", "ann", source="slurm")
WEB = Job("web", kind="service", source="environ")


class Told:
    """A source of jobs that says what the test says."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job | None] = {}
        self.held: dict[str, tuple[Job, ...]] = {}
        self.loaded: dict[int, tuple[Library, ...]] = {}
        self.can_tell = True
        self.lists_all = True
        self.how = Condition("procfs", "active", told_ns=0)
        self.gpus: tuple[Gpu, ...] = ()

    def jobs_of(self, pids: Collection[int], _: int) -> Mapping[int, Job | None]:
        return {pid: job for pid, job in self.jobs.items() if pid in pids}

    def libraries_of(self, pid: int) -> tuple[Library, ...]:
        return self.loaded.get(pid, ())

    def unknown_cgroups(self) -> Mapping[str, int]:
        return {"root": 3}

    def use_gpus(self, gpus: tuple[Gpu, ...]) -> None:
        self.gpus = gpus

    def holders_of(self, uuid: str) -> tuple[Job, ...]:
        return self.held.get(uuid, ())

    def condition(self) -> Condition:
        return self.how


class Node:
    """A fleet behind a sampler, at a time that the test sets."""

    def __init__(self, *gpus: Gpu) -> None:
        self.clock = Clock(10.0)
        self.fleet = Fleet(self.clock, GAUGE_WINDOW_NS)
        self.processes, self.holders = Told(), Told()
        self.holders.how = Condition("slurm", "active", told_ns=round(7.5 * NS))
        self.sampler = JobSampler(self.fleet, self.processes, (self.holders,), self.clock)
        self.sampler.put(inventory(*gpus))
        self.sampler.put(StateChange(NS, "nvml", "", "active"))

    def list(self, uuid: str, *pids: int, memory: int | None = GIB) -> None:
        """The driver lists these processes now."""
        processes = tuple(GpuProcess(pid, memory, 0.25) for pid in pids)
        self.sampler.put(GpuProcesses(self.clock(), uuid, processes))

    def scrape(self) -> Samples:
        """What is served."""
        snapshot = self.fleet.snapshot()
        families = [*JobsCollector().collect(snapshot), *WindowsCollector().collect(snapshot)]
        return parse(encode(families, TEXT).decode())

    def look(self) -> Samples:
        """One look of the sampler, and what is served then."""
        self.sampler.tick()
        return self.scrape()


@pytest.fixture
def node() -> Node:
    """Two GPUs whose windows and memory are known."""
    node = Node(G0, G1)
    for gpu in (G0, G1):
        node.sampler.put(readings(10, {"memory_used_bytes": 58 * GIB}, gpu.uuid))
        node.sampler.put(window(10, {"sm_active": 0.5, "pipe_fp32": 0.5, "dram_active": 0.5}, uuid=gpu.uuid))
    return node


def seeds(samples: Samples, uuid: str) -> set[str]:
    """The job that the users' gauges name."""
    return {dict(labels)["job"] for labels in samples.all("gpu_hpc_dram_bandwidth_utilization", uuid=uuid)}


def test_seeds_name_the_one_job_and_no_job_where_there_are_none_or_two(node: Node) -> None:
    """DESIGN 7: idle and shared are "", so that a sum over jobs never doubles a device."""
    node.processes.jobs = {1: BERT, 2: WEB, 3: BERT}
    node.list(G0.uuid, 1, 3)
    node.list(G1.uuid)
    samples = node.look()
    assert (seeds(samples, G0.uuid), seeds(samples, G1.uuid)) == ({"bert"}, {""})
    assert samples.one("gpu_hpc_job_processes", uuid=G0.uuid, job="bert") == 2
    assert samples.one("gpu_hpc_job_sm_ratio", uuid=G0.uuid, job="bert") == 0.5
    node.list(G0.uuid, 1, 2)
    assert seeds(node.look(), G0.uuid) == {""}
    node.list(G0.uuid)
    samples = node.look()
    assert seeds(samples, G0.uuid) == {""}
    assert not samples.all("gpu_hpc_job_info")
    assert samples.one("gpu_hpc_gpu_jobs", uuid=G0.uuid) == 0


def test_b14_memory_that_no_process_has(node: Node) -> None:
    """B14: used less the processes', never below 0, absent where the driver does not tell each one's."""
    node.list(G0.uuid, 1, memory=5 * GIB)
    node.list(G1.uuid, 1, 2, memory=40 * GIB)
    samples = node.scrape()
    assert samples.one("gpu_hpc_memory_unattributed_bytes", uuid=G0.uuid) == 53 * GIB
    assert samples.one("gpu_hpc_memory_unattributed_bytes", uuid=G1.uuid) == 0
    (rejected,) = [gpu.rejected for gpu in node.fleet.snapshot().gpus if gpu.gpu is G1]
    assert rejected == {("memory_unattributed_bytes", "negative"): 1}
    node.list(G0.uuid, 1, memory=None)
    assert node.scrape().get("gpu_hpc_memory_unattributed_bytes", uuid=G0.uuid) is None


def test_what_cannot_be_told_is_absent(node: Node) -> None:
    """No list that can be trusted, or no /proc that is the host's: no count of jobs, no row."""
    node.processes.jobs = {1: BERT}
    node.list(G0.uuid, 1)
    node.sampler.put(GpuProcesses(10 * NS, G1.uuid, None))
    samples = node.look()
    assert samples.one("gpu_hpc_gpu_jobs", uuid=G0.uuid) == 1
    assert samples.get("gpu_hpc_gpu_jobs", uuid=G1.uuid) is None
    node.processes.can_tell = False
    node.holders.held = {G1.uuid: (WEB,)}
    samples = node.look()
    assert samples.get("gpu_hpc_gpu_jobs", uuid=G0.uuid) is None
    assert samples.one("gpu_hpc_gpu_processes", uuid=G0.uuid) == 1
    assert samples.one("gpu_hpc_job_processes", uuid=G1.uuid, job="web") == 0


def test_a_process_of_which_proc_does_not_tell_is_a_job_of_its_own(node: Node) -> None:
    """Without a row, the other job would seem to be alone on the GPU."""
    node.processes.jobs = {1: BERT, 2: None}
    node.list(G0.uuid, 1, 2)
    samples = node.look()
    assert seeds(samples, G0.uuid) == {""}
    assert samples.one("gpu_hpc_job_info", job="unknown", job_id="", source="") == 1


def libraries(samples: Samples, uuid: str) -> set[tuple[str, str, str]]:
    """Job, library and version of a GPU's rows."""
    rows = [dict(labels) for labels in samples.all("gpu_hpc_process_library_info", uuid=uuid)]
    return {(row["job"], row["library"], row["version"]) for row in rows}


def test_libraries_of_a_job_are_those_of_its_processes_here(node: Node) -> None:
    """Each version once, those of another GPU or job are not among them, and all of it goes with the job."""
    nccl, torch, old = Library("nccl", "2.21.5"), Library("torch", "2.5.1"), Library("nccl", "2.18.3")
    node.processes.jobs = {1: BERT, 2: BERT, 3: WEB, 4: BERT, 5: None}
    node.processes.loaded = {1: (nccl, torch), 2: (nccl, old), 3: (torch,), 4: (Library("cudnn", "9"),)}
    node.list(G0.uuid, 1, 2, 3, 5)
    node.list(G1.uuid, 4)
    samples = node.look()
    bert = {("bert", "nccl", "2.21.5"), ("bert", "nccl", "2.18.3"), ("bert", "torch", "2.5.1")}
    assert libraries(samples, G0.uuid) == bert | {("web", "torch", "2.5.1")}
    assert libraries(samples, G1.uuid) == {("bert", "cudnn", "9")}
    assert set(samples.all("gpu_hpc_process_library_info").values()) == {1}
    node.list(G0.uuid, 3)
    assert libraries(node.look(), G0.uuid) == {("web", "torch", "2.5.1")}
    node.list(G0.uuid)
    assert not libraries(node.look(), G0.uuid)


def test_the_rows_of_libraries_are_bounded(node: Node) -> None:
    """However many versions the processes of a job have, and however many jobs there are."""
    node.processes.jobs = {pid: Job(f"job-{pid % 40}") for pid in range(400)}
    node.processes.loaded = {pid: tuple(Library("torch", f"{pid}.{n}") for n in range(8)) for pid in range(400)}
    node.list(G0.uuid, *range(400))
    rows = libraries(node.look(), G0.uuid)
    assert len(rows) == 16 * MAX_LIBRARIES
    assert libraries(node.look(), G0.uuid) == rows


def test_what_nobody_says_anew_vanishes(node: Node) -> None:
    """Never frozen: a driver that stops listing and a sampler that hangs both end the rows."""
    node.processes.jobs = {1: BERT}
    node.list(G0.uuid, 1)
    node.look()
    node.clock.now_s = 17
    assert node.scrape().get("gpu_hpc_gpu_processes", uuid=G0.uuid) is None
    assert node.scrape().all("gpu_hpc_job_info")
    node.clock.now_s = 21
    samples = node.scrape()
    assert not samples.all("gpu_hpc_job_info")
    assert not samples.all("gpu_hpc_gpu_jobs")
    assert samples.one("gpu_hpc_job_map_age_seconds", source="slurm") == 13.5
    assert not node.look().all("gpu_hpc_job_info")


def test_states_are_told_once(node: Node) -> None:
    """And again when they change."""
    node.look()
    node.look()
    states = {state.source: state.state for state in node.fleet.snapshot().states if not state.uuid}
    assert states == {"nvml": "active", "procfs": "active", "slurm": "active"}
    failed: tuple[JobSource, State] = ("slurm", "failed")
    node.holders.how = Condition(*failed, reason="gone")
    node.look()
    assert node.fleet.snapshot().host_state("slurm") == replace(node.fleet.snapshot().states[2], reason="gone")


def test_holders_learn_of_the_gpus(node: Node) -> None:
    """From the inventory, in the sampler's own thread."""
    assert not node.holders.gpus
    node.look()
    assert list(node.holders.gpus) == [G0, G1]
    node.sampler.put(inventory(G1, M1))
    node.look()
    assert list(node.holders.gpus) == [G1, M1]
    other = Told()
    node.sampler.use(node.processes, (other,))
    node.look()
    assert list(other.gpus) == [G1, M1]


def test_a_source_that_raises_ends_nothing(node: Node) -> None:
    """The thread goes on, the state says so."""
    told = threading.Event()

    class Odd(Told):
        def jobs_of(self, pids: Collection[int], _: int) -> Mapping[int, Job | None]:
            told.set()
            raise RuntimeError("odd", pids)

    node.sampler.use(Odd(), ())
    node.sampler.start()
    assert told.wait(20)
    assert any(node.sampler.stop() for _ in range(20))  # each waits a little for a thread that a busy machine holds up
    state = node.fleet.snapshot().host_state("procfs")
    assert state is not None
    assert (state.state, state.reason) == ("failed", "internal_error")


def series_of(jobs: int) -> int:
    """Series that a node of eight GPUs serves of so many jobs on each, all that can be told."""
    gpus = [replace(G0, uuid=f"GPU-{n}", index=n) for n in range(8)]
    node = Node(*gpus)
    for gpu in gpus:
        node.sampler.put(readings(10, {"memory_used_bytes": 58 * GIB}, gpu.uuid))
        pids = [gpu.index * 100 + n for n in range(jobs)]
        node.processes.jobs |= {pid: Job(f"job-{pid}") for pid in pids}
        node.list(gpu.uuid, *pids)
    return len([name for name, _ in node.look().values if name.startswith("gpu_hpc_")])


def test_the_series_of_jobs_are_bounded() -> None:
    """Four for each (GPU, job), three for each GPU, a few for the node; beyond 16 jobs a GPU no more."""
    fixed = series_of(0)
    assert fixed == 8 * 3 + 4
    assert series_of(1) == fixed + 8 * 4
    assert series_of(16) == fixed + 8 * 16 * 4
    assert series_of(40) == fixed + 8 * (16 * 4 - 1)  # shares of that many jobs are more than there is


def rss_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_i06_g09_ten_thousand_short_processes_leave_nothing_behind(tmp_path: Path) -> None:
    """I06, G09: no series and no memory of processes that have ended, each with a job of its own."""
    tree = ProcTree(tmp_path / "proc")
    clock = Clock(10.0)
    fleet = Fleet(clock, GAUGE_WINDOW_NS)
    processes = HostProcesses(Settings(), HostLookups(None, None), tree.root, PidView(lookup=True), clock)
    sampler = JobSampler(fleet, processes, (), clock)
    sampler.put(inventory(G0))

    for slot in range(500):
        tree.add(2 + slot, start_ticks=0)

    def round_of(number: int) -> int:
        pids = range(2 + 500 * number, 502 + 500 * number)
        for pid in pids:
            folder = tree.root / str(pid)
            if number:
                (tree.root / str(pid - 500)).rename(folder)
            (folder / "environ").write_text(f"JOB_NAME=run-{pid}")
            (folder / "cgroup").write_text(f"0::/odd/{pid}\n")
        clock.now_s += 2
        sampler.put(GpuProcesses(clock(), G0.uuid, tuple(GpuProcess(pid, 4096) for pid in pids)))
        sampler.tick()
        encode(JobsCollector().collect(fleet.snapshot()), TEXT)
        return len(fleet.snapshot().jobs[G0.uuid].jobs)

    assert round_of(0) == 16  # what is filled once, such as the lines that an exposition keeps
    before = rss_bytes()
    for number in range(1, 20):
        round_of(number)
    clock.now_s += 2
    sampler.put(GpuProcesses(clock(), G0.uuid, ()))
    sampler.tick()
    gc.collect()
    text = encode(JobsCollector().collect(fleet.snapshot()), TEXT).decode()
    assert "run-" not in text
    assert not parse(text).all("gpu_hpc_job_info")
    assert sum(parse(text).all("gpu_hpc_unknown_cgroups_total").values()) == 10_000
    assert rss_bytes() - before < 5 << 20
