"""Libraries that processes have loaded: from maps, file names, wheels and ELF files, whatever these look like."""

from __future__ import annotations

import os
import re
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.model import LIBRARY_NAMES, Library
from gpu_hpc_exporter.samplers.libraries import AGAIN_S, LibrarySampler
from gpu_hpc_exporter.sources import libraries as libraries_module
from gpu_hpc_exporter.sources.libraries import (
    MAX_LIBRARIES,
    MAX_MAPS,
    ProcessLibraries,
    _open_below,
    _opened,
    mapped_libraries,
    read_rodata,
)
from gpu_hpc_exporter.sources.procfs import Processes
from proc_tree import ProcTree

SITE = "/opt/env/lib/python3.12/site-packages"
LIB = "/usr/lib/x86_64-linux-gnu"
NCCL = "/opt/app/libnccl.so.2"
NCCL_TEXT = b"NCCL INFO\0NCCL version %s\0NCCL version 2.21.5+cuda12.4\0\0/dev/shm\0"


class Host:
    """One process, number 101, in a copy of a /proc."""

    def __init__(self, directory: Path) -> None:
        self.tree = ProcTree(directory / "proc")
        self.tree.add(101)
        self.reader = ProcessLibraries(self.tree.root)

    def load(self, *files: str) -> Path:
        """The process maps these files; its root."""
        return self.tree.load(101, *files)

    def install(self, *packages: str, site: str = SITE) -> Path:
        """Folders of packages in the process's root; where they are."""
        folder = self.load() / site[1:]
        for package in packages:
            (folder / package).mkdir(parents=True)
        return folder

    def put(self, file: str, content: bytes) -> Path:
        """A file in the process's root."""
        path = self.load() / file[1:]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def told(self) -> set[tuple[str, str]]:
        """Name and version of what is told."""
        told = self.reader.read(101, 100)
        assert told is not None
        assert len(set(told)) == len(told) <= MAX_LIBRARIES
        return {(library.name, library.version) for library in told}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A process that has loaded nothing."""
    return Host(tmp_path)


def elf(*sections: tuple[bytes, bytes]) -> bytes:
    """A library with these sections; the names of sections are the last one."""
    names = b"\0" + b"".join(name + b"\0" for name, _ in sections) + b".shstrtab\0"
    bodies = [b"", *(body for _, body in sections), names]
    offsets = [64 + sum(map(len, bodies[:number])) for number in range(len(bodies))]
    table_at = 64 + sum(map(len, bodies))
    header = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF\x02\x01\x01",
        3,
        62,
        1,
        0,
        0,
        table_at,
        0,
        64,
        0,
        0,
        64,
        len(bodies),
        len(bodies) - 1,
    )
    name_offsets = [
        names.index(b"\0" + name + b"\0") + 1 if name else 0 for name in (b"", *(n for n, _ in sections), b".shstrtab")
    ]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 1, 2, 0, offset, len(body), 0, 0, 1, 0)
        for name, offset, body in zip(name_offsets, offsets, bodies, strict=True)
    )
    return header + b"".join(bodies) + table


NCCL_ELF = elf((b".text", b"NCCL version 9.9.9\0" * 9), (b".rodata", NCCL_TEXT), (b".nv_fatbin", b"\1" * 999))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (f"{LIB}/libcuda.so.580.159.04", ("cuda_driver", "580.159.04")),
        (f"{LIB}/libcuda.so.440.44", ("cuda_driver", "440.44")),
        ("/usr/local/cuda/compat/libcuda.so.1", None),
        (f"{LIB}/tegra/libcuda.so.1.1", None),
        ("/usr/local/cuda-12.4/targets/x86_64-linux/lib/libcudart.so.12.4.127", ("cudart", "12.4.127")),
        ("/usr/local/with blank/libcudart.so.11.8.89", ("cudart", "11.8.89")),
        ("/x/torch/lib/libcudart-d0da41ae.so.11.0", ("cudart", "11")),
        (f"{LIB}/libcudnn.so.9.1.0", ("cudnn", "9.1.0")),
        ("/opt/odd/libcudnn.so.9", ("cudnn", "9")),
        (f"{LIB}/libcublas.so.12.4.5.8", ("cublas", "12.4.5.8")),
        (f"{LIB}/libnccl.so.2.21.5", ("nccl", "2.21.5")),
        (f"{LIB}/libnccl.so", None),
        ("/opt/pytorch/build/lib/libtorch.so", None),
        (f"{LIB}/libcublasLt.so.12.4.5.8", None),
        (f"{LIB}/libcudnn_ops.so.9.1.0", None),
        (f"{LIB}/libcudadebugger.so.580.159.04", None),
        (f"{LIB}/libnccl-net.so.0.0.1", None),
        (f"{LIB}/libc.so.6", None),
        (f"{LIB}/libcudart.so.12.4.127 (deleted)", None),
        ("/memfd:libcudart.so.12.4.127 (deleted)", None),
        ("/memfd:x/libcudart.so.12.4.127 (deleted)", None),
        ("[heap]/libcudart.so.12.4.127", None),
        ("/opt/a\\012b/libcudart.so.12.4.127", None),
        ("/opt/\n/libcudart.so.12.4.127", None),
        ("/" + "x" * 4000 + "/libcudart.so.12.4.127", None),
        ("/opt/libcudart.so.12.4.127\\012", None),
        ("/opt/libcudart.so." + "1" * 300, None),
        ("/opt/libcudart.so.1.2.3.4.5.6.7", None),
        ("/opt/libcudart.so.12.4.127\udcff", None),
    ],
)
def test_versions_by_the_name_of_the_file(host: Host, file: str, expected: tuple[str, str] | None) -> None:
    """Whole versions as they are; of what is short only what is true; names that are odd, or of others, are nothing."""
    host.load(file)
    assert host.told() == ({expected} if expected else set())


WHEELS = (
    f"{SITE}/nvidia/cuda_runtime/lib/libcudart.so.12",
    f"{SITE}/nvidia/cudnn/lib/libcudnn.so.9",
    f"{SITE}/nvidia/cublas/lib/libcublas.so.12",
    f"{SITE}/nvidia/nccl/lib/libnccl.so.2",
    f"{SITE}/torch/lib/libtorch_cpu.so",
    f"{SITE}/torch/lib/libtorch.so",
)


def test_versions_of_wheels(host: Host) -> None:
    """What PyTorch brings: short names, the versions beside them."""
    host.load(*WHEELS)
    host.install(
        "nvidia_cuda_runtime_cu12-12.4.127.dist-info",
        "nvidia_cuda_runtime_cu11-11.8.89.dist-info",
        "nvidia_cudnn_cu12-9.1.0.70.dist-info",
        "nvidia_cublas_cu12-12.4.5.8.dist-info",
        "nvidia_nccl_cu12-2.21.5.dist-info",
        "torch-2.5.1+cu124.dist-info",
        "torchvision-0.20.1+cu124.dist-info",
        "torch_geometric-2.6.1.dist-info",
    )
    whole = {("cudart", "12.4.127"), ("cudnn", "9.1.0.70"), ("cublas", "12.4.5.8"), ("nccl", "2.21.5")}
    assert host.told() == {*whole, ("torch", "2.5.1+cu124")}


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        (("torch-2.6.0a0+ecf3bae40a.nv25.1.dist-info",), "2.6.0a0+ecf3bae40a.nv25.1"),
        (("torch-1.13.1-py3.10.egg-info",), "1.13.1"),
        (("torch-2.5.1.dist-info", "torch-2.6.0.dist-info"), None),
        (("torch-2.5.1" + "x" * 90 + ".dist-info",), None),
        (('torch-2.5.1"}\n.dist-info',), None),
        (("torch-2.5.1\udcff.dist-info",), None),
        (("torch.dist-info",), None),
        ((), None),
    ],
)
def test_versions_of_torch(host: Host, packages: tuple[str, ...], expected: str | None) -> None:
    """One package that says it, or none: two versions side by side tell nothing of what is loaded."""
    host.load(f"{SITE}/torch/lib/libtorch.so")
    host.install(*packages)
    assert host.told() == ({("torch", expected)} if expected else set())


def test_wheels_of_cuda_13(host: Host) -> None:
    """They share a folder, and their names have lost the number."""
    host.load(f"{SITE}/nvidia/cu13/lib/libcudart.so.13", f"{SITE}/nvidia/cu13/lib/libcublas.so.13")
    host.install("nvidia_cuda_runtime-13.1.80.dist-info", "nvidia_cublas-13.2.0.9.dist-info")
    assert host.told() == {("cudart", "13.1.80"), ("cublas", "13.2.0.9")}


def test_several_versions_in_one_process(host: Host) -> None:
    """Each is told: two CUDA runtimes in one process are a find."""
    host.load(f"{LIB}/libcudart.so.11.8.89", f"{LIB}/libcudart.so.12.4.127", f"{LIB}/libcudart.so.12.4.127")
    assert host.told() == {("cudart", "11.8.89"), ("cudart", "12.4.127")}


def test_versions_within_files(host: Host) -> None:
    """NCCL's own constant where neither its name nor a package tells; nothing like it in code or in other files."""
    host.load(NCCL, "/opt/app/libcudart.so.12")
    assert host.told() == {("nccl", "2"), ("cudart", "12")}
    host.put("/opt/app/libcudart.so.12", NCCL_ELF)
    file = host.put(NCCL, NCCL_ELF)
    assert host.told() == {("nccl", "2.21.5"), ("cudart", "12")}
    file.write_bytes(NCCL_ELF.replace(b"2.21.5", b"2.22.3"))
    assert host.told() == {("nccl", "2.22.3"), ("cudart", "12")}


def test_a_library_as_a_compiler_makes_it(host: Host, tmp_path: Path) -> None:
    """Sections of a real file."""
    source = tmp_path / "nccl.c"
    source.write_text('const char *version(void) { return "NCCL version 2.30.1+cuda13.0"; }\n')
    subprocess.run(("cc", "-shared", "-fPIC", "-o", tmp_path / "nccl.so", source), check=True)
    host.load(NCCL)
    host.put(NCCL, (tmp_path / "nccl.so").read_bytes())
    assert host.told() == {("nccl", "2.30.1")}


# Bad input


def test_links_lead_nowhere(host: Host, tmp_path: Path) -> None:
    """A container's link to the host's files, absolute, relative or half way, is not followed."""
    outside = tmp_path / "outside/nvidia/nccl/lib"
    outside.mkdir(parents=True)
    (outside / "libnccl.so.2").write_bytes(NCCL_ELF)
    (outside.parents[2] / "nvidia_nccl_cu12-2.21.5.dist-info").mkdir()
    root = host.load(
        "/a/nvidia/nccl/lib/libnccl.so.2", "/b/libnccl.so.2", "/../../../outside/nvidia/nccl/lib/libnccl.so.2"
    )
    (root / "a").symlink_to(tmp_path / "outside")
    (root / "b").mkdir()
    (root / "b/libnccl.so.2").symlink_to("../../../../outside/nvidia/nccl/lib/libnccl.so.2")
    assert (root / "a/nvidia/nccl/lib/libnccl.so.2").read_bytes() == (root / "b/libnccl.so.2").read_bytes()
    assert host.told() == {("nccl", "2")}


def test_files_that_are_none(host: Host, tmp_path: Path) -> None:
    """A FIFO, a folder and a socket in a file's place, a file in a folder's: nothing waits, nothing is told of them."""
    files = [f"/opt/{n}/libnccl.so.2" for n in range(3)]
    root = host.load(*files, f"{SITE}/torch/lib/libtorch.so")
    for file in files:
        (root / file[1:]).parent.mkdir(parents=True)
    os.mkfifo(root / files[0][1:])
    (root / files[1][1:]).mkdir()
    host.put(SITE, b"no folder")
    assert host.told() == {("nccl", "2")}
    (host.tree.root / "101/maps").unlink()
    os.mkfifo(host.tree.root / "101/maps")
    assert host.told() == set()
    (host.tree.root / "101/maps").unlink()
    assert host.reader.read(101, 100) is None
    assert not list(tmp_path.glob("core*"))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/etc/passwd")])
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """To open a device or a FIFO can already have an effect."""
    make(tmp_path / "x")
    with _opened(os.open(tmp_path, os.O_RDONLY)) as root, pytest.raises(OSError, match="of another kind"):
        _open_below(root, b"/x", stat.S_IFREG)


def test_huge_input_is_not_read(host: Host) -> None:
    """Maps without an end, a folder with more than anybody installs, a library of a terabyte: soon done, no memory."""
    folder = host.install("torch-2.5.1.dist-info")
    for number in range(1000):
        (folder / f"package-{number}").touch()
    file = host.put(NCCL, NCCL_ELF)
    os.truncate(file, 1 << 40)
    host.load(NCCL, f"{SITE}/torch/lib/libtorch.so")
    with (host.tree.root / "101/maps").open("r+b") as maps:
        maps.seek(0, os.SEEK_END)
        maps.write(b"7f00-7f01 r--p 00000000 00:2c 1 /opt/x.so\n" * 200_000)
        maps.write(f"7f00-7f01 r--p 00000000 00:2c 1 {LIB}/libcudart.so.12.4.127\n".encode())
        assert maps.tell() > MAX_MAPS
    began_s = time.thread_time()
    assert host.told() == {("nccl", "2.21.5"), ("torch", "2.5.1")}
    assert time.thread_time() - began_s < 1.0


def test_a_folder_is_read_only_so_far(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its order is chance: with a lower bound than there are entries, what is found is a few of them."""
    monkeypatch.setattr(libraries_module, "_MAX_FOLDER", 10)
    host.load(f"{SITE}/torch/lib/libtorch.so")
    host.install(*(f"torch-2.5.{number}.dist-info" for number in range(50)))
    assert host.told() == set()
    (told,) = host.reader._distributions.values()  # noqa: SLF001  what is kept is bounded as well
    assert len(told["torch"]) == 10


def test_a_thousand_libraries_are_eight(host: Host) -> None:
    """And the same eight each time."""
    host.load(*(f"/opt/{number}/libcudart.so.12.{number}.1" for number in range(1000)))
    first = host.told()
    assert len(first) == MAX_LIBRARIES
    assert host.told() == first


def test_time_is_bounded(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once patience is over, names alone are told."""
    host.load(NCCL, f"{LIB}/libcudart.so.12.4.127")
    host.put(NCCL, NCCL_ELF)
    monkeypatch.setattr(libraries_module, "PATIENCE_S", -1.0)
    assert host.told() == {("nccl", "2"), ("cudart", "12.4.127")}


@given(st.binary(max_size=400))
def test_any_maps(maps: bytes) -> None:
    """Nothing raises, whatever a maps holds."""
    mapped_libraries(maps)


_PATH = st.lists(st.text("ab0 .\\\n(/\x80", min_size=1, max_size=5), max_size=4).map(
    lambda parts: "/" + "/".join(parts)
)
_FILE = st.sampled_from(
    ["libcudart.so.12.4.127", "libcuda.so.580.1.2", "libnccl.so.2", "libx.so", "libnccl.so.2 (deleted)"]
)


@given(st.lists(st.tuples(_PATH, _FILE, st.sampled_from(["", " ", "\n", "\0", "junk\n"])), max_size=30))
def test_maps_with_hostile_paths(entries: list[tuple[str, str, str]]) -> None:
    """All that is found are libraries by their names, at paths that stand there as they are, few of them."""
    lines = [f"7f00-7f01 r-xp 00000000 00:2c 17 {path}/{file}{after}" for path, file, after in entries]
    maps = "\n".join(lines).encode()
    found = mapped_libraries(maps)
    assert len(found) <= 2 * MAX_LIBRARIES
    for mapped in found:
        assert mapped.name in LIBRARY_NAMES
        assert mapped.folder.startswith(b"/")
        assert not re.search(rb"[\\\n]", mapped.folder)
        assert mapped.folder + b"/" + mapped.file in maps
    plain = [(path, file) for path, file, after in entries if not after and not re.search(r"[\\\n]|^/ *$", path)]
    if len(entries) < MAX_LIBRARIES:
        known = {(mapped.folder.decode(), mapped.file.decode()) for mapped in found}
        assert {one for one in plain if one[1] in {"libcudart.so.12.4.127", "libnccl.so.2"}} <= known


@contextmanager
def opened_content(content: bytes) -> Iterator[int]:
    """A file in memory."""
    file = os.memfd_create("elf")
    try:
        os.write(file, content)
        yield file
    finally:
        os.close(file)


def test_constants_of_a_library() -> None:
    """Those of the section of that name; b"" where there is none."""
    with opened_content(NCCL_ELF) as file:
        assert read_rodata(file) == NCCL_TEXT
    with opened_content(elf((b".text", b"x"), (b".rodata.str", b"y"))) as file:
        assert read_rodata(file) == b""


@given(
    st.lists(
        st.tuples(st.integers(0, len(NCCL_ELF) - 1) | st.integers(0, 63), st.binary(min_size=1, max_size=8)), max_size=4
    ),
    st.integers(0, len(NCCL_ELF)),
)
@settings(max_examples=400)
def test_broken_elf_files(changes: list[tuple[int, bytes]], length: int) -> None:
    """Cut off and overwritten anywhere: nothing raises but what a failed read does, and little is read."""
    content = bytearray(NCCL_ELF[:length] if changes and length % 2 else NCCL_ELF)
    for offset, some in changes:
        content[offset : offset + len(some)] = some
    with opened_content(bytes(content)) as file:
        assert len(read_rodata(file)) <= len(content)


@pytest.mark.parametrize("value", [0, 1, 64, 255, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("place", ["table", "offset", "size"])
def test_lying_elf_files(value: int, place: str) -> None:
    """Offsets and sizes of anything up to 2^64."""
    content = bytearray(NCCL_ELF)
    (table,) = struct.unpack_from("<Q", content, 40)
    for section in range(5):
        at = {"table": 40, "offset": table + 64 * section + 24, "size": table + 64 * section + 32}[place]
        struct.pack_into("<Q", content, at, value)
    with opened_content(bytes(content)) as file:
        assert len(read_rodata(file)) <= len(content)


# Real processes


@contextmanager
def child_with(library: Path) -> Iterator[int]:
    """The pid of a process that has loaded it."""
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(flush=True); sys.stdin.read()"
    command = (sys.executable, "-c", code, library)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.send_signal(signal.SIGKILL)


def test_a_real_process(tmp_path: Path) -> None:
    """By the real /proc, through the process's root; nothing once the file is gone or the process another one."""
    site = tmp_path / "site-packages"
    library = site / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    source = tmp_path / "empty.c"
    source.write_text("int nothing;\n")
    subprocess.run(("cc", "-shared", "-fPIC", "-o", library, source), check=True)
    (site / "nvidia_nccl_cu12-2.21.5.dist-info").mkdir()
    reader = ProcessLibraries()
    with child_with(library) as pid:
        evidence = Processes().read(pid)
        assert evidence is not None
        assert reader.read(pid, evidence.start_ticks) == (Library("nccl", "2.21.5"),)
        assert reader.read(pid, evidence.start_ticks + 1) is None
        library.unlink()
        assert reader.read(pid, evidence.start_ticks) == ()
    assert reader.read(pid, evidence.start_ticks) is None


def test_processes_of_other_users(tmp_path: Path) -> None:
    """Without CAP_SYS_PTRACE theirs are not known: the first process is root's."""
    evidence = Processes().read(1)
    assert evidence is not None
    answer = tmp_path / "answer"
    answer.touch()
    answer.chmod(0o666)
    with answer.open("w") as file:
        child = os.fork()
        if not child:
            try:
                if os.geteuid() == 0:
                    os.setresuid(65534, 65534, 65534)
                file.write(repr(ProcessLibraries().read(1, evidence.start_ticks)))
                file.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    assert answer.read_text() == "None"


# When


class Clock:
    """Seconds that the test sets."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def looks(sampler: LibrarySampler) -> int:
    """All looks that are due; how many they were."""
    for number in range(10_000):
        if sampler.tick() != 0:
            return number
    pytest.fail("looks without an end")


def test_a_process_is_looked_at_twice_in_its_life(host: Host) -> None:
    """When it begins and a minute later, since some libraries are loaded late; then never again."""
    clock = Clock()
    sampler = LibrarySampler(host.tree.root, clock)
    host.load(f"{LIB}/libcudart.so.12.4.127")
    assert sampler.tick() is None
    assert sampler.refresh({101: 100}) == {101: ()}
    assert looks(sampler) == 1
    assert sampler.tick() == AGAIN_S
    cudart, cudnn = Library("cudart", "12.4.127"), Library("cudnn", "9.1.0")
    assert sampler.refresh({101: 100}) == {101: (cudart,)}
    host.load(f"{LIB}/libcudnn.so.9.1.0")
    clock.now_s += AGAIN_S - 1
    assert looks(sampler) == 0
    assert sampler.refresh({101: 100}) == {101: (cudart,)}
    clock.now_s += 1
    assert looks(sampler) == 1
    assert sampler.refresh({101: 100}) == {101: (cudart, cudnn)}
    clock.now_s += 1e6
    host.load(f"{LIB}/libnccl.so.2.21.5")
    assert sampler.tick() is None
    assert sampler.refresh({101: 100}) == {101: (cudart, cudnn)}


def test_what_was_seen_outlives_a_look_that_fails(host: Host) -> None:
    """A process that ends between two looks still has what it had while the driver lists it; another one has not."""
    clock = Clock()
    sampler = LibrarySampler(host.tree.root, clock)
    host.load(f"{LIB}/libcudart.so.12.4.127")
    sampler.refresh({101: 100})
    looks(sampler)
    host.tree.remove(101)
    clock.now_s += AGAIN_S
    assert looks(sampler) == 1
    assert sampler.refresh({101: 100}) == {101: (Library("cudart", "12.4.127"),)}
    assert sampler.refresh({101: 200}) == {101: ()}
    assert looks(sampler) == 1
    assert sampler.refresh({}) == {}
    assert sampler.tick() is None


def ends(sampler: LibrarySampler) -> bool:
    """Whether it stops; each try waits a little for a thread that a busy machine holds up."""
    return any(sampler.stop() for _ in range(20))


def test_in_the_background(host: Host) -> None:
    """A thread looks; an idle one ends at once."""
    host.load(f"{LIB}/libcudart.so.12.4.127")
    sampler = LibrarySampler(host.tree.root)
    sampler.start()
    deadline = time.monotonic() + 60
    while not sampler.refresh({101: 100})[101]:
        assert time.monotonic() < deadline
    assert ends(sampler)


def test_a_file_system_that_hangs_holds_up_nobody(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was known stays known, questions are answered at once; a surprise in one process ends nothing."""
    host.load(f"{LIB}/libcudart.so.12.4.127")
    is_stuck, may_go_on, goes_on = threading.Event(), threading.Event(), threading.Event()
    read = ProcessLibraries.read

    def hang(self: ProcessLibraries, pid: int, start_ticks: int) -> tuple[Library, ...] | None:
        if pid == 102:
            raise RuntimeError("odd")
        if pid == 103:
            is_stuck.set()
            may_go_on.wait(60)
            goes_on.set()
        return read(self, pid, start_ticks)

    monkeypatch.setattr(ProcessLibraries, "read", hang)
    sampler = LibrarySampler(host.tree.root)
    sampler.refresh({101: 100, 102: 100, 103: 100})
    sampler.start()
    assert is_stuck.wait(60)
    assert sampler.refresh({101: 100, 103: 100, 104: 100})[101] == (Library("cudart", "12.4.127"),)
    assert not sampler.stop()
    assert not goes_on.is_set()
    may_go_on.set()
    assert ends(sampler)


def test_what_a_thousand_processes_cost(tmp_path: Path) -> None:
    """Cold, each once, of an environment that they share (3 s); warm, nothing is read, and it takes no time."""
    tree = ProcTree(tmp_path / "proc")
    shared = tmp_path / "shared"
    host = Host(tmp_path / "one")
    host.load(*WHEELS)
    host.install(
        "torch-2.5.1.dist-info", "nvidia_nccl_cu12-2.21.5.dist-info", *(f"p{n}-1.dist-info" for n in range(400))
    )
    (host.tree.root / "101/root").rename(shared)
    others = "".join(f"7f00-7f01 r--p 00000000 00:2c {n} {LIB}/libother{n}.so.1\n" for n in range(3000))
    maps = (host.tree.root / "101/maps").read_text() + others
    pids = range(2, 1002)
    for pid in pids:
        tree.add(pid)
        (tree.root / f"{pid}/maps").write_text(maps)
        (tree.root / f"{pid}/root").symlink_to(shared)
    clock = Clock()
    sampler = LibrarySampler(tree.root, clock)
    wanted = dict.fromkeys(pids, 100)
    sampler.refresh(wanted)
    began_s = time.thread_time()
    assert looks(sampler) == 1000
    cold_s = time.thread_time() - began_s
    clock.now_s += AGAIN_S
    assert looks(sampler) == 1000
    tree.remove(*pids)
    began_s = time.thread_time()
    for _ in range(10):
        told = sampler.refresh(wanted)
        assert sampler.tick() is None
    warm_s = (time.thread_time() - began_s) / 10
    expected = {("cudart", "12"), ("cudnn", "9"), ("cublas", "12"), ("nccl", "2.21.5"), ("torch", "2.5.1")}
    assert {(one.name, one.version) for libraries in told.values() for one in libraries} == expected
    assert cold_s < 30
    assert warm_s < 0.02
