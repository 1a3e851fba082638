"""A machine for `doctor`: a root with the files that a driver makes, the fake libraries, and the command itself."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from exporter_process import free_port
from fake_cupti import CuptiScenario
from fake_nvml import Scenario

VERSION = "580.159.04"
CUPTI = "costs none\ndevice 0\n"
"""Windows of zeros, of one GPU."""
ALL_CAPABILITIES = "000001ffffffffff"


@dataclass
class DoctorMachine:
    """Its files, below `root`, and what the command's environment has beside them."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    flags: Sequence[str] = ()
    """The exporter's own, before the command."""

    def __post_init__(self) -> None:
        """A Linux host without a GPU, and a configuration whose agents' directory is here."""
        self.write("proc/self/status", f"Name:\tpython\nCapEff:\t{ALL_CAPABILITIES}\n")
        self.write("proc/1/comm", "systemd\n")
        self.write("sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
        self.write("dev/kmsg", "")
        self.agents = self.root / "run/gpu-hpc-exporter/agents"
        self.agents.mkdir(parents=True)
        self.agents.chmod(0o3733)
        self.configure()

    @property
    def proc(self) -> Path:
        """Its /proc."""
        return self.root / "proc"

    @property
    def config(self) -> Path:
        """Its configuration file."""
        return self.root / "etc/config.yaml"

    def write(self, name: str, text: str) -> Path:
        """A file."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def configure(self, more: str = "") -> None:
        """The configuration file."""
        kubelet = f"jobs: {{kubernetes: {{socket: {self.root}/var/lib/kubelet/pod-resources/kubelet.sock}}}}\n"
        self.write("etc/config.yaml", f"agent: {{directory: {self.agents}}}\n{more or kubelet}")

    def add_driver(self, gpus: int = 1, *, version: str = VERSION, admin_only: int = 0) -> None:
        """What a host with GPUs and the kernel module has."""
        module = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Wed Jan  1 00:00:00 UTC 2025\n"
        self.write("proc/driver/nvidia/version", module)
        self.write("proc/driver/nvidia/params", f"ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: {admin_only}\n")
        self.write("dev/nvidiactl", "")
        self.write("run/nvidia-persistenced/socket", "")
        for number in range(gpus):
            self.write(f"dev/nvidia{number}", "")
            self.add_card(number)

    def add_card(self, number: int = 0) -> None:
        """A GPU on the PCI bus."""
        self.write(f"sys/bus/pci/devices/0000:{number + 1:02x}:00.0/vendor", "0x10de\n")
        self.write(f"sys/bus/pci/devices/0000:{number + 1:02x}:00.0/class", "0x030200\n")

    def install(self, libraries: Path, *, version: str = VERSION) -> Path:
        """The fakes' libraries where a distribution has the driver's, with its version; where that is."""
        folder = self.root / "usr/lib64"
        shutil.copytree(libraries, folder)
        (folder / "libnvidia-ml.so.1").rename(folder / f"libnvidia-ml.so.{version}")
        (folder / "libnvidia-ml.so.1").symlink_to(f"libnvidia-ml.so.{version}")
        self.configure(f"pm_sampling: {{library: {folder}/libcupti.so.12}}\n")
        return folder

    def boot(self, libraries: Path, nvml: str, cupti: str = CUPTI, *, version: str = VERSION) -> CuptiScenario:
        """The driver's library, which says what the scenarios say."""
        folder = self.install(libraries, version=version)
        nvml_scenario = Scenario(self.root / "nvml", folder, nvml)
        cupti_scenario = CuptiScenario(self.root / "cupti", folder, cupti)
        self.environment = nvml_scenario.env | cupti_scenario.env
        return cupti_scenario

    def command(self, *flags: str, before: Sequence[str] = ()) -> list[str]:
        """The command line."""
        here = [f"--config.file={self.config}", f"--web.listen-address=127.0.0.1:{self.port}"]
        here += [f"--path.procfs={self.proc}", f"--path.kmsg={self.root}/dev/kmsg", f"--path.driver-root={self.root}"]
        return [
            *before,
            sys.executable,
            "-m",
            "gpu_hpc_exporter",
            *here,
            *self.flags,
            "doctor",
            f"--path.rootfs={self.root}",
            *flags,
        ]

    def run(
        self, *flags: str, before: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """What the command prints, and its status."""
        environment = {**os.environ, "PATH": "/usr/bin:/bin", **self.environment, **(env or {})}
        return subprocess.run(
            self.command(*flags, before=before),
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def examine(self, *flags: str, **more: Any) -> Examination:
        """The same as JSON."""
        result = self.run("--json", *flags, **more)
        assert not result.stderr, result.stderr
        return Examination(result.returncode, json.loads(result.stdout))

    def shown(self, text: str) -> str:
        """Output as it is on a machine whose root is /: as the golden files and the documentation have it."""
        text = text.replace(str(self.root), "").replace(f"127.0.0.1:{self.port}", ":9836")
        text = re.sub(
            r"^gpu-hpc-exporter \S+ as \S+$", "gpu-hpc-exporter VERSION as USER", text, count=1, flags=re.MULTILINE
        )
        return re.sub(r"belongs to \S+", "belongs to root", text)


@dataclass(frozen=True)
class Examination:
    """An answer in JSON."""

    status: int
    told: Mapping[str, Any]

    def lines(self, name: str) -> list[tuple[str, str, str]]:
        """Status, finding and remedy of the checks of a name."""
        return [(c["status"], c["finding"], c["remedy"]) for c in self.told["checks"] if c["name"] == name]

    def line(self, name: str) -> tuple[str, str, str]:
        """The one check of a name."""
        lines = self.lines(name)
        assert len(lines) == 1, f"{name}: {lines} in {json.dumps(self.told, indent=1)}"
        return lines[0]
