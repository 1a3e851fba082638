"""Jobs that run on the soaking node: their processes, whose they are, and their agents' files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Final

from agent_files import AgentWriter
from soak.node import Instance, Node, Process
from soak.truth import Truth

SLURM: Final = "0::/system.slice/slurmstepd.scope/job_{}/step_batch/user/task_0\n"
POD: Final = "0::/kubepods.slice/kubepods-pod{}.slice/cri-containerd-{:064x}.scope\n"
SERVICES: Final = ("web", "search", "chat")
"""Jobs that end and come again under the same name."""
NEW_NAMES: Final = 200
"""Kernels of a job that no other job has."""
_COMMON: Final = tuple(
    f"_ZN2at6native29vectorized_elementwise_kernelILi{n}ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_".encode()
    for n in range(1, 9)
)
_PIDS: Final = 3000
"""Pids are used again after so many processes, as on a machine that is never restarted."""

Place = tuple[int, Instance | None, str]


@dataclass
class Rank:
    """A process of a job with its agent's file. `names`: its kernels."""

    process: Process
    uuid: str
    agent: AgentWriter
    names: Sequence[bytes]


@dataclass
class Job:
    """What runs at these places."""

    name: str
    ranks: list[Rank]


class Jobs:
    """Begins and ends jobs and processes; keeps count of what they do."""

    def __init__(self, node: Node, truth: Truth, chance: Random) -> None:
        self._node = node
        self._truth = truth
        self._chance = chance
        self._numbers = count()
        self._processes = count()
        self.running: list[Job] = []

    def begin(self, places: Sequence[Place]) -> Job:
        """A job with a process at each place: a Slurm job, a pod, or a service that has only its name."""
        number = next(self._numbers)
        kind = number % 3
        service = SERVICES[number // 3 % len(SERVICES)]
        environment = {"JOB_NAME": service, "SLURM_JOB_ID": str(number)} if kind == 2 else {"RANK": "0"}
        cgroup = (SLURM.format(number), POD.format(_pod_uid(number), number), "0::/user.slice/a.scope\n")[kind]
        if kind == 0:
            gpus = ",".join(str(device) for device, _, _ in places)
            text = f"job_id={number}\nname=train-{number}\nuser=ann\nkind=batch\ngpus={gpus}\n"
            (self._node.slurm / f"job-{number}").write_text(text, encoding="utf-8")
        names = [*_COMMON, *(f"_Z{len(name)}{name}Pfi".encode() for name in _new_names(number))]
        self._truth.kernel_names += NEW_NAMES
        ranks = [self._rank(place, cgroup, environment, names) for place in places]
        job = Job(f"{number}", ranks)
        self.running.append(job)
        return job

    def process(self, device: int, instance: Instance | None) -> Process:
        """A process without an agent."""
        return self._start(device, instance, "0::/user.slice/b.scope\n", {})[0]

    def end(self, job: Job) -> None:
        """All of a job's processes end."""
        if job not in self.running:
            return
        self.running.remove(job)
        for rank in job.ranks:
            rank.agent.end()
            self.end_process(rank.process)
        (self._node.slurm / f"job-{job.name}").unlink(missing_ok=True)

    def end_process(self, process: Process) -> None:
        """A process is gone, from the driver's list too."""
        if self._node.driver.processes.get(process.pid) == process:
            del self._node.driver.processes[process.pid]
            self._node.proc.remove(process.pid)

    def end_those_on(self, device: int) -> None:
        """Whatever runs on a GPU ends, as when it is lost."""
        for job in [job for job in self.running if any(rank.process.device == device for rank in job.ranks)]:
            self.end(job)
        for process in [p for p in self._node.driver.processes.values() if p.device == device]:
            self.end_process(process)

    def work(self) -> None:
        """Every process's agent ends another trace window."""
        for job in self.running:
            for rank in job.ranks:
                self._trace(rank)

    def _trace(self, rank: Rank) -> None:
        window = rank.agent.next_window()
        for name in self._chance.sample(rank.names, 20):
            times = self._chance.randrange(1, 1000)
            rank.agent.kernel(name).run(window, times, self._chance.randrange(1000, 100_000), 5_000)
            self._truth.executions[rank.uuid] += times
        for place, result in enumerate(("kept", "dropped", "invalid", "unmatched")):
            records = self._chance.randrange(1000 if place == 0 else 3)
            rank.agent.records[place] += records
            self._truth.records[result] += records
        rank.agent.beat()

    def _rank(self, place: Place, cgroup: str, environment: dict[str, str], names: Sequence[bytes]) -> Rank:
        device, instance, uuid = place
        process, start_ticks = self._start(device, instance, cgroup, environment)
        agent = AgentWriter(self._node.agents, process.pid, start_ticks, (uuid,), environment)
        return Rank(process, uuid, agent, names)

    def _start(
        self, device: int, instance: Instance | None, cgroup: str, environment: dict[str, str]
    ) -> tuple[Process, int]:
        number = next(self._processes)
        while (pid := 1000 + number % _PIDS) in self._node.driver.processes:
            number = next(self._processes)
        start_ticks = 100 + number // _PIDS
        uid = os.getuid()
        self._node.proc.add(pid, cgroup=cgroup, environ=environment, uid=uid, start_ticks=start_ticks)
        process = Process(pid, device, instance.gi if instance is not None else None)
        self._node.driver.processes[pid] = process
        return process, start_ticks


def _new_names(number: int) -> list[str]:
    return [f"kernel_{number}_{n}" for n in range(NEW_NAMES)]


def _pod_uid(number: int) -> str:
    return f"{number:08x}_2222_3333_4444_555555555555"
