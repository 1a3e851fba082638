"""Whose agents' files of pods in user namespaces are: in a made-up /proc and, where the kernel lets us, for real."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import pytest

import pod_process
from agent_files import AgentWriter
from gpu_hpc_exporter.jobs.identity import Settings
from gpu_hpc_exporter.samplers.identities import AgentClaim, ForeignFileError, HostLookups, HostProcesses
from gpu_hpc_exporter.sources.kernels.files import FOLDER_MODE, AgentFiles
from gpu_hpc_exporter.sources.namespaces import Namespaces, read_namespaces
from gpu_hpc_exporter.sources.procfs import PROC, PidView
from pod_process import COUNT, HOST_UID
from proc_tree import ProcTree

FOREVER: Final = 10**18
EXTENT: Final = f"         0 {HOST_UID}      {COUNT}\n"
DEVICE: Final = os.makedev(0, 24)
PLAIN: Final = "31 28 0:24 /agents /run/agents rw,nosuid shared:5 - tmpfs tmpfs rw\n"
IDMAPPED: Final = "612 580 0:24 /agents /run/agents rw,nosuid,relatime,idmapped - tmpfs tmpfs rw\n"


@dataclass
class Pod:
    """A process of a pod's root, and what its agent's file says."""

    proc: Path
    pid: int
    claim: AgentClaim
    is_real: bool

    def processes(self) -> HostProcesses:
        """Those that the driver lists, as the exporter knows them: this one."""
        found = HostProcesses(Settings(), HostLookups(None, None), self.proc, PidView(lookup=True))
        found.jobs_of([self.pid], FOREVER)
        return found


def claims(directory: Path) -> list[AgentClaim]:
    """What the files in a directory say."""
    files = [file for file, _ in AgentFiles(directory).scan()]
    return [AgentClaim(file.pid, file.start_ticks, file.uid, {}, file.device) for file in files]


@contextmanager
def real_pod(directory: Path) -> Iterator[Pod | str]:
    """One of this kernel; why there is none."""
    directory.chmod(FOLDER_MODE)
    command = [sys.executable, pod_process.__file__, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline().strip()
        if said.startswith("running "):
            (claim,) = claims(directory)
            yield Pod(PROC, int(said.split()[1]), claim, is_real=True)
        else:
            yield said
        process.communicate("")


def made_up_pod(directory: Path) -> Pod:
    """The same as the kernel would show it."""
    tree = ProcTree(directory / "proc")
    tree.add(4711, uid=HOST_UID)
    (tree.root / "4711/uid_map").write_text(EXTENT)
    (tree.root / "4711/mountinfo").write_text(PLAIN.replace("0:24", "0:23") + IDMAPPED)
    return Pod(tree.root, 4711, AgentClaim(4711, 100, 0, {}, DEVICE), is_real=False)


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    """A real one, else one that is made up: the assertions are the same."""
    with tempfile.TemporaryDirectory() as name:  # the way to tmp_path is closed for other users
        Path(name).chmod(0o755)
        directory = Path(name) / "agents"
        directory.mkdir()
        with real_pod(directory) as found:
            if isinstance(found, Pod):
                yield found
            else:
                assert found.startswith("refused: ")
                yield made_up_pod(tmp_path)


def test_the_file_of_a_pod_in_a_user_namespace_is_its_own(pod: Pod) -> None:
    """Its owner is who the process is inside, 0, while it is 165536 here; only that number, only that process."""
    processes = pod.processes()
    assert pod.claim.uid == 0
    placed = processes.job_of_agent(pod.claim)
    assert placed is not None
    assert placed.pid == pod.pid
    assert processes.job_of_agent(replace(pod.claim, pid=pod.pid + 1)) is None
    assert processes.job_of_agent(replace(pod.claim, uid=HOST_UID)) is not None  # from a mount that is not id-mapped
    for other in (1, 1000, HOST_UID + 1, HOST_UID + COUNT):
        with pytest.raises(ForeignFileError):
            processes.job_of_agent(replace(pod.claim, uid=other))
    with pytest.raises(ForeignFileError):  # on a file system that the process has not mounted id-mapped
        processes.job_of_agent(replace(pod.claim, device=pod.claim.device + 1))


def test_made_up_and_real_pods_are_alike(pod: Pod, tmp_path: Path) -> None:
    """What is read of both is the same but for the numbers of devices."""
    made_up = made_up_pod(tmp_path)
    ticks = pod.claim.start_ticks
    found, expected = read_namespaces(pod.pid, ticks, pod.proc), read_namespaces(4711, 100, made_up.proc)
    assert expected == Namespaces(4711, ((0, HOST_UID, COUNT),), frozenset({DEVICE}))
    assert found is not None
    assert found.users == expected.users
    assert pod.claim.device in found.idmapped
    assert read_namespaces(pod.pid, ticks + 1, pod.proc) is None


def test_a_pod_speaks_for_no_process_of_the_host(tmp_path: Path) -> None:
    """A user of the host is the same number inside and outside: whoever has another one is a stranger, as ever."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    processes = HostProcesses(Settings(), HostLookups(None, None), PROC, PidView(lookup=True))
    processes.jobs_of([os.getpid()], time.monotonic_ns() + FOREVER)
    writer = AgentWriter(tmp_path, os.getpid(), ticks)
    (own,) = claims(tmp_path)
    assert processes.job_of_agent(own) is not None
    for uid in (os.geteuid() + 1, HOST_UID, HOST_UID + os.geteuid()):
        with pytest.raises(ForeignFileError):
            processes.job_of_agent(replace(own, uid=uid))
    writer.end()


@pytest.mark.parametrize(
    ("users", "mounts"),
    [
        (EXTENT, PLAIN),
        (EXTENT, IDMAPPED.replace("0:24", "0:25")),
        (EXTENT, PLAIN.replace("/run/agents", "/run/idmapped")),
        (EXTENT, ""),
        (EXTENT, "idmapped\n"),
        (Path("/proc/self/uid_map").read_text(), IDMAPPED),
        ("0 1 1\n", IDMAPPED),
        ("", IDMAPPED),
        ("x y z\n0 4294967296123 1\n", IDMAPPED),
    ],
)
def test_what_gives_a_process_no_other_owner(tmp_path: Path, users: str, mounts: str) -> None:
    """No id-mapped mount of that file system (rootless containers have none), or no map in which its user is."""
    pod = made_up_pod(tmp_path)
    (pod.proc / "4711/uid_map").write_text(users)
    (pod.proc / "4711/mountinfo").write_text(mounts)
    with pytest.raises(ForeignFileError):
        pod.processes().job_of_agent(pod.claim)


def test_a_map_and_mounts_of_many_lines(tmp_path: Path) -> None:
    """The kernel takes 340 extents; a pod may have thousands of mounts."""
    pod = made_up_pod(tmp_path)
    extents = [f"{1000 + n} {HOST_UID + n} 1\n" for n in range(340)]
    (pod.proc / "4711/uid_map").write_text("".join(extents))
    (pod.proc / "4711/mountinfo").write_text(PLAIN.replace("0:24", "0:9") * 5000 + IDMAPPED)
    assert pod.processes().job_of_agent(replace(pod.claim, uid=1000)) is not None
    for uid, expected in ((HOST_UID + 339, 1339), (HOST_UID + 340, None), (HOST_UID - 1, None)):
        namespaces = read_namespaces(4711, 100, pod.proc)
        assert namespaces is not None
        assert namespaces.owner_on(DEVICE, uid) == expected
