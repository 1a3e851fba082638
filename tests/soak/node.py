"""The node that soaks: eight fake GPUs, their processes, a kubelet, Slurm's files, agents' files and a kernel log."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import fake_cupti
import fake_nvml
from e2e.machine import uuid_of
from fake_kubelet import FakeKubelet
from proc_tree import ProcTree

GPUS: Final = 8
STEADY: Final = frozenset(range(4))
"""GPUs to which nothing happens but jobs: their windows are counted against the clock."""
FRAGILE: Final = (4, 5)
"""GPUs that fall off the bus, and whose driver calls hang."""
DIVIDED: Final = (6, 7)
"""GPUs that are partitioned and made whole again."""
SM_ACTIVE: Final = 0.5
MIB: Final = 1 << 20

_CUPTI: Final = """
costs none
{devices}
value * *pct* 50
value * dram__bytes_*.sum 1e12/s
value * lts__t_sectors.sum 2e11/s
value * *srcnode_fbp* 25
value * pcie__*.sum 1e9/s
"""


@dataclass(frozen=True)
class Instance:
    """A MIG instance."""

    gi: int
    uuid: str


@dataclass(frozen=True)
class Process:
    """A process on a GPU, or on one of its instances."""

    pid: int
    device: int
    gi: int | None = None


@dataclass
class Driver:
    """What the driver says: the scenario in parts that come and go."""

    instances: dict[int, list[Instance]] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    lines: dict[str, None] = field(default_factory=dict)
    """Faults and Xids, as the scenario has them."""

    def text(self) -> str:
        """The scenario."""
        return "\n".join([*self._gpus(), *map(_process, self.processes.values()), *self.lines])

    def _gpus(self) -> Iterator[str]:
        for device in range(GPUS):
            used = f"memory_used {(8 + len(self.processes)) * 1024 * MIB}"
            yield f"device {device} sm {SM_ACTIVE} tensor 0.4 dram 0.17 pcie_rx 1e9 nvlink_rx 1e9 {used}"
            for instance in self.instances.get(device, ()):
                yield f"mig {device} gi {instance.gi} sm {SM_ACTIVE} uuid {instance.uuid}"


def _process(process: Process) -> str:
    place = "" if process.gi is None else f" gi {process.gi} ci 0"
    return f"process {process.device} pid {process.pid} memory {512 * MIB} sm 40{place}"


class Node:
    """All of it, in one directory. The exporter's temporary files go into a folder of their own."""

    def __init__(self, directory: Path, libraries: Path) -> None:
        """`libraries`: where both fake libraries were built."""
        self.driver = Driver()
        self.nvml = fake_nvml.Scenario(directory, libraries, self.driver.text())
        devices = "\n".join(f"device {device}" for device in range(GPUS))
        self.cupti = fake_cupti.CuptiScenario(directory, libraries, _CUPTI.format(devices=devices))
        self.proc = ProcTree(directory / "proc")
        self.agents = directory / "agents"
        self.agents.mkdir()
        self.slurm = directory / "map"
        self.slurm.mkdir()
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self.kmsg = directory / "kmsg"
        os.mkfifo(self.kmsg)
        self.kubelet = FakeKubelet(directory / "kubelet.sock")
        self.config = directory / "config.yaml"
        self._settings = (
            f"pm_sampling: {{library: {libraries / 'libcupti.so.12'}, yield_to: []}}\n"
            f"agent: {{directory: {self.agents}}}\n"
            f"jobs: {{slurm: {{map_directory: {self.slurm}}},\n"
            f"  kubernetes: {{socket: {self.kubelet.socket}, api: off}}}}\n"
        )
        self.configure("")

    @property
    def env(self) -> dict[str, str]:
        """The exporter's environment."""
        return {**self.nvml.env, **self.cupti.env, "TMPDIR": str(self.temporary)}

    @property
    def flags(self) -> tuple[str, ...]:
        """The exporter's flags."""
        places = (f"--config.file={self.config}", f"--path.procfs={self.proc.root}", f"--path.kmsg={self.kmsg}")
        return ("--log.format=json", *places)

    @contextmanager
    def running(self) -> Iterator[None]:
        """With a kubelet that answers."""
        self.kubelet.start()
        try:
            yield
        finally:
            self.kubelet.stop()

    def configure(self, more: str) -> None:
        """Another configuration, to be loaded."""
        self.config.write_text(self._settings + more, encoding="utf-8")

    def places(self) -> list[tuple[int, Instance | None, str]]:
        """Where jobs can run: each GPU that is not divided, and each instance; with its UUID."""
        whole = [(d, None, uuid_of(d)) for d in range(GPUS) if d not in self.driver.instances]
        return [*whole, *((d, i, i.uuid) for d, all_of in self.driver.instances.items() for i in all_of)]


def build(directory: Path) -> Path:
    """Both fake libraries in one folder, as drivers have it; the driver's memory is told apart from the exporter's."""
    fake_cupti.build(directory)
    script = directory / "exports.map"
    script.write_text("{ global: nvml*; fake_nvml_check; local: *; };\n", encoding="utf-8")
    sources = Path(fake_nvml.__file__).parent.glob("*.c")
    options = ("-std=c11", "-D_GNU_SOURCE", "-O1", "-fPIC", "-shared", "-pthread", "-lm")
    apart = ("-include", str(Path(__file__).with_name("shared_memory.h")), f"-Wl,--version-script={script}")
    library = directory / fake_nvml.LIBRARY
    names = (f"-Wl,-soname,{library.name}", "-o", str(library))
    subprocess.run(["cc", *map(str, sources), *options, *apart, *names], check=True)
    return directory
