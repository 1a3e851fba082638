"""What a host tells of its processes: files of /proc, of their roots and of the kernel's log."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_hpc_exporter.config import JobRule
from gpu_hpc_exporter.jobs.attribution import attribute
from gpu_hpc_exporter.jobs.cgroup import parse_cgroup
from gpu_hpc_exporter.jobs.identity import Settings, identify
from gpu_hpc_exporter.jobs.rules import GROUPS, compile_rules
from gpu_hpc_exporter.model import Evidence, JobOnGpu, XidError
from gpu_hpc_exporter.sources import kmsg
from gpu_hpc_exporter.sources.device_files import held_by_children, held_here
from gpu_hpc_exporter.sources.libraries import MAX_LIBRARIES, ProcessLibraries, mapped_libraries
from gpu_hpc_exporter.sources.namespaces import read_namespaces
from gpu_hpc_exporter.sources.nvml.library import loaded_file
from gpu_hpc_exporter.sources.procfs import Processes, Users
from gpu_hpc_exporter.sources.profilers import ProfilerWatch
from gpu_hpc_exporter.text import MAX_BYTES
from unit.fuzz.foreign import MAX_DAMAGED, damaged, foreign, fuzz, is_label, soon
from unit.known import CID, PU_, Known
from unit.test_libraries import NCCL_ELF

VARIABLES = ("JOB_NAME", "RANK", "SLURM_JOB_ID")
ZEROS = b"0 " * 15
STAT = b"4101 (pt (main) x) S 1 " + ZEROS + b"1 0 8765 " + ZEROS + b"\n"
STATUS = b"Name:\tx\nTgid:\t4101\nPid:\t4101\nUid:\t1001\t1000\t1000\t1000\nNSpid:\t4101\t17\n"
CGROUPS = (
    b"0::/kubepods.slice/kubepods-pod" + PU_.encode() + b".slice/cri-containerd-" + CID.encode() + b".scope\n",
    b"0::/system.slice/slurmstepd.scope/job_4711/step_0/user/task_0\n",
    b"12:devices:/slurm/uid_1000/job_4711/step_batch\n4:memory:/slurm/uid_1000/job_4711\n1:name=systemd:/\n",
    b"0::/user.slice/user-1000.slice/session-3.scope\n",
    b"0::/system.slice/docker-" + CID.encode() + b".scope\n",
)
SEGMENTS = (b"/job_4711", b"/kubepods", b".slice", b".scope", b"/..", b"/user@1000.service", CID.encode(), b"0::", b"_")
ENVIRON = b"PATH=/bin\0JOB_NAME=bert\0RANK=3\0SLURM_JOB_ID=4711\0SECRET=s\0"
NAMES = (b"JOB_NAME=", b"RANK=", b"SLURM_JOB_ID=", b"\0")
USERS = b"         0        900        200\n       200       1100         10\n"
MOUNTS = (
    b"31 28 0:24 /a /run/agents rw,nosuid,idmapped shared:5 - tmpfs tmpfs rw\n28 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
)
COMMAND = b"python3\0-m\0ipykernel\0--job=bert\0"
PASSWD = b"root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000:A. L.:/home/alice:/bin/sh\nbob:x:1001:1000::/:/bin/sh\n"
RULES = compile_rules(
    [JobRule(command_line="--job=(?P<job>[^ ]+)"), JobRule(cgroup="job_(?P<job_id>[0-9]+)", kind="batch")]
)


@pytest.fixture(scope="module")
def proc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a /proc with one process, for all examples."""
    root = tmp_path_factory.mktemp("host") / "proc"
    (root / "4101/root").mkdir(parents=True)
    (root / "4101/ns").mkdir()
    (root.parent / "etc").mkdir()
    return root


def lay(proc: Path, **files: bytes) -> None:
    """Give the process these files, and others that are whole."""
    whole = {"stat": STAT, "status": STATUS, "cgroup": CGROUPS[0], "environ": ENVIRON, "cmdline": COMMAND}
    for name, content in {**whole, **files}.items():
        (proc / f"4101/{name}").write_bytes(content)


def check_evidence(evidence: Evidence) -> None:
    """What is kept of a process is little, and of its environment only what was asked for."""
    assert 0 <= evidence.start_ticks < 1 << 64
    assert -1 <= evidence.uid < 10**10
    assert len(evidence.comm) <= 4096
    assert len(evidence.command) <= 4096
    assert len(evidence.cgroup) <= 16 << 10
    assert set(evidence.environment) <= set(VARIABLES)
    assert all(len(value) <= 1024 for value in evidence.environment.values())


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "stat": foreign(STAT, tokens=(b"(", b") S ", b"8765")),
            "status": foreign(STATUS, tokens=(b"Uid:", b"NSpid:", b"1000\t")),
            "cgroup": foreign(*CGROUPS, tokens=SEGMENTS),
            "environ": foreign(ENVIRON, tokens=NAMES),
            "uid_map": foreign(USERS, tokens=(b"1000", b"65536", b"\n")),
            "mountinfo": foreign(MOUNTS, tokens=(b",idmapped", b"0:24", b" - ")),
            "cmdline": foreign(COMMAND, tokens=(b"--job=", b"jupyter", b"ipykernel")),
        },
    ),
    foreign(PASSWD, tokens=(b":x:1000:", b"\n", b"alice")),
)
@fuzz(200)
@example({"stat": b"4101 (x) S " + b"1 " * 18 + b"9" * 4000 + b" 0\n"}, PASSWD)
@example({"status": b"Uid:" + b"\n" * 16_000}, b":" * 100_000)
@example({"status": b"NSpid:" + b"\t1" * 9000}, b"\n" * 100_000)
@example({"uid_map": b"0 0 9999999999\n" * 9000, "mountinfo": b"1 1 9999:9999999 / / idmapped \n" * 9000}, PASSWD)
def test_processes(proc: Path, files: dict[str, bytes], passwd: bytes) -> None:
    """Any files: nothing, or little that is known, from which comes a job whose texts can be labels."""
    (proc.parent / "etc/passwd").write_bytes(passwd)
    lay(proc, **files)
    namespaces = read_namespaces(4101, 8765, proc)
    if namespaces is not None:
        assert 0 <= namespaces.pid < 10**10
        owner = namespaces.owner_on(next(iter(namespaces.idmapped), 0), 1000)
        assert owner is None or 0 <= owner < 10**11
    users = Users(proc)
    processes = Processes(proc, VARIABLES, users.name)
    evidence = processes.read(4101)
    assert processes.refresh([4101]) == ({} if evidence is None else {4101: evidence})
    if evidence is None:
        return
    check_evidence(evidence)
    job = identify(evidence, Known(), Settings(RULES, user_name=users.name)).job
    assert job is not None
    assert job.job
    for name in GROUPS:
        assert is_label(getattr(job, name), MAX_BYTES)
    assert attribute([JobOnGpu(job, 1)], ()).count == 1


@pytest.mark.parametrize("extra", range(4))
def test_what_is_cut_off_is_not_half_a_value(proc: Path, extra: int) -> None:
    """The bounds of what is read fall into the middle of an id, of a number and of a variable."""
    path = b"1:devices:/slurm/uid_1000/job_4711"
    before = (16 << 10) - len(path) - extra
    filler = b"".join(b"%d:x:/%s\n" % (number, b"y" * (before // 4 - 6)) for number in range(4))
    environ = b"x" * ((256 << 10) - len(b"\0RANK=12") - extra) + b"\0RANK=12345\0"
    lay(proc, cgroup=filler + b"\n" * (before - len(filler)) + path + b"2345\n", environ=environ)
    evidence = Processes(proc, VARIABLES).read(4101)
    assert evidence is not None
    assert parse_cgroup(evidence.cgroup).slurm_job_id in {"", "47112345"}
    assert evidence.environment.get("RANK", "12345") == "12345"


@given(damaged(*CGROUPS, tokens=SEGMENTS))
@fuzz(300)
def test_cgroups(data: bytes) -> None:
    """No id that does not stand there whole: between slashes, or after a word of its layout."""
    text = data.decode("utf-8", "surrogateescape")
    place = parse_cgroup(text)
    for inner in (place, place.outer, place.claim):
        if inner is not None and inner.slurm_job_id:
            assert re.search(rf"/job_{inner.slurm_job_id}(/|$| )", text, re.MULTILINE)
        if inner is not None and re.fullmatch("[0-9a-f]{64}", inner.container_id):
            assert re.search(rf"(?<![0-9a-f]){inner.container_id}(?![0-9a-f])", text)


@pytest.mark.parametrize("piece", ["0::/a.slice", "/job_1", "0::/kubepods", "/..", ":" * 9, "/x.slice", "\n", "user@1"])
def test_a_cgroup_of_a_megabyte(piece: str) -> None:
    """In linear time, whatever stands there over and over."""
    with soon():
        parse_cgroup(piece * (1 << 17))
        parse_cgroup("0::" + piece * 500)


MAPS = b"".join(
    b"7f%02d0000-7f%02d1000 r-xp 00000000 00:2c %d                 %s\n" % (number, number, number, path)
    for number, path in enumerate(
        (
            b"/usr/lib/libcudart.so.12.4.127",
            b"/usr/lib/libcuda.so.580.159.04",
            b"/site/nvidia/nccl/lib/libnccl.so.2",
            b"/site/torch/lib/libtorch_cpu.so",
            b"/usr/lib/libnvidia-ml.so.580.159.04",
        )
    )
)
PATHS = (b"/lib", b"libnccl.so.2", b"/site/nvidia/nccl/lib/", b"\\012", b" (deleted)", b"/../")


@given(foreign(MAPS, tokens=PATHS), foreign(NCCL_ELF, tokens=(b"NCCL version 2.3", b".rodata\0", b"\xff" * 8)))
@fuzz(120)
@example(b"/lib" * 30_000, NCCL_ELF)
@example(MAPS, NCCL_ELF[:40] + b"\xff" * 24 + NCCL_ELF[64:])
def test_libraries(proc: Path, maps: bytes, elf: bytes) -> None:
    """Any maps and any library: few versions, each of which can be a label; never more than stands there."""
    site = proc / "4101/root/site"
    (site / "nvidia/nccl/lib").mkdir(parents=True, exist_ok=True)
    (site / "torch-2.6.0+cu124.dist-info").mkdir(exist_ok=True)
    (site / "nvidia/nccl/lib/libnccl.so.2").write_bytes(elf)
    lay(proc, maps=maps)
    found = ProcessLibraries(proc).read(4101, 8765)
    assert found is not None
    assert len(found) <= MAX_LIBRARIES
    for library in found:
        assert is_label(library.version, MAX_BYTES)
        assert library.version.encode() in maps + elf + b"2.6.0+cu124"
    (proc / "4101/maps").write_bytes(maps)
    path = loaded_file(proc / "4101/maps")
    assert not path or path.encode("utf-8", "replace") in maps.decode("utf-8", "replace").encode()


DISTRIBUTIONS = st.from_regex(r"(torch|nvidia_nccl_cu[0-9]+)-[0-9.a-z+\-]{1,20}\.(dist|egg)-info", fullmatch=True)


@given(
    st.lists(DISTRIBUTIONS | st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40))
)
@fuzz(30)
def test_names_of_distributions(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    """Any names beside a library: its version is one of theirs, or what its own name says."""
    root = tmp_path_factory.mktemp("dist")
    site = root / "4101/root/site"
    site.mkdir(parents=True)
    for name in set(names) - {".", ".."}:
        (site / name).mkdir()
    lay(root, maps=MAPS)
    for library in ProcessLibraries(root).read(4101, 8765) or ():
        assert is_label(library.version, MAX_BYTES)
        assert any(library.version in text for text in (*names, MAPS.decode()))


@pytest.mark.parametrize(
    "piece", [b"/lib/libnccl.so.2\n", b"7f-7f r-xp 0 0 0 /lib", b" ", b"/", b"\n", b"/libcuda.so.1"]
)
def test_maps_of_megabytes(piece: bytes) -> None:
    """In linear time."""
    with soon():
        mapped_libraries(piece * ((4 << 20) // len(piece)))


@given(
    foreign(b"0.00 0.01 0.05 1/230 4101\n", tokens=(b" 4102\n", b"/")),
    foreign(b"ncu\n", b"nv-hostengine\n", tokens=(b"ncu", b"*", b"dcgm")),
    foreign(STATUS, tokens=(b"Tgid:\t",)),
    foreign(STAT, tokens=(b"(ncu) S ",)),
)
@fuzz(150)
@example(b"9" * 1000, b"ncu\n", b"Tgid:\t" + b"9" * 1000, STAT)
@example(b"1 -5", b"ncu\n", STATUS, STAT.replace(b"pt (main) x", b"ncu"))
@example(b"1 4101", b"ncu\n", STATUS, STAT.replace(b"pt (main) x", b"ncu"))
def test_profilers(proc: Path, loadavg: bytes, comm: bytes, status: bytes, stat: bytes) -> None:
    """Any files: no profiler, or a process that has the name of one."""
    (proc / "loadavg").write_bytes(loadavg)
    lay(proc, comm=comm, status=status, stat=stat)
    watch = ProfilerWatch(["ncu", "dcgmproftester*"], proc)
    for _ in range(2):
        found = watch.poll()
        assert is_label(found, 64)
        assert not found or (b"ncu" in comm and b"(ncu" in stat) or b"dcgmproftester" in comm + stat
    assert is_label(watch.hosts_dcgm(), 64)


@given(
    foreign(MAPS + b"7f-7f rw-s 0 00:05 9 /dev/nvidia0\n", tokens=(b"/dev/nvidia", b"/dev/nvidiactl (deleted)")),
    st.binary(max_size=40),
)
@fuzz(100)
@example(MAPS, b"\xff 1x 2")
@example(MAPS, b"1 " + b"9" * 5000)
def test_device_files(proc: Path, maps: bytes, children: bytes) -> None:
    """Any maps, any list of children: names of device files that stand there, or nothing."""
    own = proc / "self"
    (own / "fd").mkdir(parents=True, exist_ok=True)
    (own / "task/1").mkdir(parents=True, exist_ok=True)
    (own / "maps").write_bytes(maps)
    (own / "task/1/children").write_bytes(children)
    for name in held_here(proc):
        assert name.encode() in maps.decode("utf-8", "replace").encode()
    held_by_children(proc)


LOG = (
    b"6,1,2,-;NVRM: Xid (PCI:0000:99:00 GPU-I:02): 79, pid=1, GPU has fallen off the bus.\n"
    b"4,2,3,-;NVRM: The NVIDIA GPU 0000:99:00.0\nNVRM: (PCI ID: 10de:2335)\nNVRM: has fallen off the bus\n"
)
WORDS = (b"NVRM: Xid (PCI:0000:99:00): ", b"NVRM: The NVIDIA GPU 0000:17:00.0", b"fallen off the bus", b"\n", b"79")


@given(foreign(LOG, LOG * 20, tokens=WORDS))
@fuzz(200)
@example(LOG[:-1] * 1500)
@example(b"x" * 100_000)
@example(b"NVRM: GPU 0000:17:00 " * 6000 + b"\n")
def test_the_kernel_log(proc: Path, data: bytes) -> None:
    """Any file: Xids and losses of devices that stand there, from lines that are no longer than two records."""
    file = proc / "kmsg"
    file.write_bytes(data)
    parser = kmsg.KernelLogParser()
    with soon():
        for line in kmsg.follow(file):
            assert len(line) <= 2 * 8192
            event = parser.parse(line, 1)
            if event is not None:
                assert event.pci_bus_id.encode() in data
            if isinstance(event, XidError):
                assert str(event.xid).zfill(1).encode() in data
                assert 0 <= event.xid < 1_000_000


@pytest.fixture
def pipe() -> Iterator[tuple[int, Path]]:
    """A pipe and the path of its reading end, as a device that tells bit by bit."""
    reading, writing = os.pipe()
    yield writing, Path(f"/proc/self/fd/{reading}")
    os.close(reading)


@given(st.lists(st.binary(max_size=30) | st.sampled_from([LOG[:50], LOG[50:], b"\n"]), max_size=8))
@fuzz(40)
def test_the_kernel_log_in_pieces(pieces: list[bytes]) -> None:
    """However it is cut, its lines are the same."""
    reading, writing = os.pipe()

    def write() -> None:
        with suppress(BrokenPipeError):
            for piece in pieces:
                os.write(writing, piece)
        os.close(writing)

    writer = threading.Thread(target=write)
    writer.start()
    lines = list(kmsg.follow(Path(f"/proc/self/fd/{reading}")))
    writer.join()
    os.close(reading)
    assert lines == b"".join(pieces).decode("utf-8", "replace").split("\n")[:-1] or b"\xff" in b"".join(pieces)


def test_damage_is_bounded() -> None:
    """What the tests of this folder feed to parsers has a length of its own choosing."""
    assert max(map(len, (STAT, MAPS, LOG, NCCL_ELF))) < MAX_DAMAGED
