"""Building the agent: any C compiler, no CUDA, and a clear message without a compiler."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from fake_activity import AGENT_SOURCE, build_agent
from gpu_hpc_exporter import __version__
from gpu_hpc_exporter.config import Agent

ROOT = AGENT_SOURCE.parents[1]
COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]
CROSS_COMPILER = "aarch64-linux-gnu-gcc"
AGENT_IN_WHEEL = "gpu_hpc_exporter/agent/libgpu_hpc_agent.so"


@pytest.mark.parametrize("compiler", [*COMPILERS, CROSS_COMPILER])
def test_no_compiler_warns(tmp_path: Path, compiler: str) -> None:
    """With -Wall -Wextra -Wpedantic -Werror, as C11."""
    build_agent(tmp_path / "agent.so", compiler=compiler)


def run_build(output: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Run the build script as a user does."""
    command = [sys.executable, str(AGENT_SOURCE / "build.py"), str(output)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"PATH": path})


def test_the_script_builds_a_small_library_that_needs_only_libc(tmp_path: Path) -> None:
    """Three functions are visible; nothing of the program's can be taken for one of ours."""
    output = tmp_path / "new" / "agent.so"
    result = run_build(output, os.environ["PATH"])
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, str(output), "")
    symbols = subprocess.run(["nm", "-D", "--defined-only", str(output)], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in symbols.stdout.splitlines()}
    assert names == {"InitializeInjection", "gpu_hpc_agent_start", "gpu_hpc_agent_stop"}
    dynamic = subprocess.run(["readelf", "-d", str(output)], capture_output=True, text=True, check=True).stdout
    needed = {line.split("[")[1].rstrip("]") for line in dynamic.splitlines() if "(NEEDED)" in line}
    assert needed <= {"libc.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
    # Where these are parts of their own, nobody else need have loaded them.
    assert {"libdl.so.2", "libpthread.so.0"} <= needed
    assert "NODELETE" in dynamic
    assert output.stat().st_size < 200_000


@pytest.mark.parametrize("compiler", [*COMPILERS, CROSS_COMPILER])
def test_it_runs_with_an_old_glibc(tmp_path: Path, compiler: str) -> None:
    """2.17 has all that it needs: on an older one than it needs the driver could not load it, and cuInit would fail."""
    output = tmp_path / "agent.so"
    script = [sys.executable, str(AGENT_SOURCE / "build.py"), str(output)]
    subprocess.run(script, check=True, capture_output=True, env={**os.environ, "CC": compiler})
    versions = subprocess.run(["readelf", "-VW", str(output)], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"Name: (\S+)", versions.split("Version needs")[-1]))
    assert any(name.startswith("GLIBC_2") for name in needed)
    for name in needed:
        number = re.fullmatch(r"GLIBC_([0-9.]+)", name)
        assert number, name
        assert tuple(map(int, number[1].split("."))) <= (2, 17), name


def test_what_is_newer_than_its_sources_is_not_built_again(tmp_path: Path) -> None:
    """An editable install stays quick."""
    output = tmp_path / "agent.so"
    assert run_build(output, os.environ["PATH"]).returncode == 0
    first = output.stat()
    assert run_build(output, os.environ["PATH"]).returncode == 0
    assert output.stat().st_mtime_ns == first.st_mtime_ns
    os.utime(output, (0, 0))
    assert run_build(output, os.environ["PATH"]).returncode == 0
    assert output.stat().st_mtime_ns != 0


def test_without_a_compiler(tmp_path: Path) -> None:
    """One line."""
    result = run_build(tmp_path / "agent.so", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == "gpu-hpc-exporter: no C compiler (cc, gcc or clang) is here\n"


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    """Its last line is the reason; nothing is left behind."""
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho nonsense >&2\nexit 1\n", "utf-8")
    compiler.chmod(0o755)
    result = run_build(tmp_path / "agent.so", str(tmp_path))
    assert result.returncode == 1
    assert result.stderr == f"gpu-hpc-exporter: {compiler} failed: nonsense\n"
    assert not (tmp_path / "agent.so").exists()


def test_a_compiler_that_is_not_there(tmp_path: Path) -> None:
    """Whoever asks for another machine's does not get this one's instead."""
    script = [sys.executable, str(AGENT_SOURCE / "build.py"), str(tmp_path / "agent.so")]
    environment = {**os.environ, "CC": "m68k-gcc -O1"}
    result = subprocess.run(script, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 1
    assert result.stderr == "gpu-hpc-exporter: CC names m68k-gcc, which is not here\n"


# --- the platform of a wheel ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def platform_tag() -> Callable[[Path], str]:
    """The function of the build script, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("agent_build", AGENT_SOURCE / "build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[Path], str] = module.platform_tag
    return function


def library_that_needs(folder: Path, library: str, versions: Sequence[str]) -> Path:
    """One with a symbol of each version of a stand-in for this library."""
    names = [f"theirs{number}" for number in range(len(versions) or 1)]
    (folder / "theirs.c").write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names), "utf-8")
    declared = "".join(f"int {name}(void);\n" for name in names)
    total = " + ".join(f"{name}()" for name in names)
    (folder / "ours.c").write_text(f"{declared}int ours(void) {{ return {total}; }}\n", "utf-8")
    script = "".join(f"{version} {{ {name}; }};\n" for version, name in zip(versions, names, strict=False))
    (folder / "versions").write_text(script or "{ *; };\n", "utf-8")
    theirs, ours = folder / library, folder / "ours.so"
    flags = ["-shared", "-fPIC", "-nostdlib"]
    options = [f"-Wl,-soname,{library}", f"-Wl,--version-script={folder / 'versions'}"]
    subprocess.run(["gcc", *flags, *options, "-o", theirs, folder / "theirs.c"], check=True)
    subprocess.run(["gcc", *flags, "-o", ours, folder / "ours.c", theirs], check=True)
    return ours


@pytest.mark.parametrize(
    ("library", "versions", "platform_name"),
    [
        ("libc.so.6", ["GLIBC_2.4", "GLIBC_2.34", "GLIBC_2.3.2"], "manylinux_2_34"),
        ("libpthread.so.0", ["GLIBC_2.3.2"], "manylinux_2_17"),  # nothing older is promised
        ("libc.so.6", ["GLIBC_3.1"], "manylinux_3_1"),
        ("libc.so.6", ["GLIBC_2.4", "GLIBC_PRIVATE"], "linux"),
        ("libc.so.6", ["GLIBC_ABI_DT_RELR", "GLIBC_2.36"], "linux"),
        ("libc.musl-x86_64.so.1", [], "linux"),
        ("libcudart.so.12", ["GLIBC_2.2.5"], "linux"),
    ],
)
def test_platform_is_the_glibc_that_is_needed(
    platform_tag: Callable[[Path], str], tmp_path: Path, library: str, versions: Sequence[str], platform_name: str
) -> None:
    """Where it needs something else too, only a machine like this one is sure to have it."""
    assert platform_tag(library_that_needs(tmp_path, library, versions)) == f"{platform_name}_{platform.machine()}"


# --- the package ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the package is built from, and an agent that an earlier build for who knows what has left."""
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "exporter", folder / "exporter", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "CHANGELOG.md", "METRICS.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    stale = folder / "exporter" / AGENT_IN_WHEEL
    stale.parent.mkdir(exist_ok=True)
    stale.write_text("stale", "utf-8")
    return folder


def build_package(source: Path, target: str, environment: Mapping[str, str] = os.environ) -> tuple[Path, str]:
    """What pip runs, without asking an index for hatchling; the file and what was said."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(source / "dist")]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True, env=environment)
    (file,) = (source / "dist").iterdir()
    return file, result.stderr


def install(wheel: Path, folder: Path) -> dict[str, str]:
    """Unpack it as pip does, beside the dependencies that are here; the variables that a program would get from it."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(folder)}
    show = [sys.executable, "-m", "gpu_hpc_exporter", "run", "--show"]
    shown = subprocess.run(show, cwd=folder, capture_output=True, text=True, check=True, env=environment)
    return dict(line.split("=", 1) for line in shown.stdout.splitlines())


def test_a_wheel_of_the_source_distribution_has_the_agent(checkout: Path, tmp_path: Path) -> None:
    """Compiled anew, named after what it needs, found by `run`, and loadable."""
    archive, _ = build_package(checkout, "sdist")
    assert archive.name == f"gpu_hpc_exporter-{__version__}.tar.gz"
    with tarfile.open(archive) as packed:
        assert not [name for name in packed.getnames() if name.endswith(".so")]
        packed.extractall(tmp_path, filter="data")
    wheel, said = build_package(tmp_path / archive.name.removesuffix(".tar.gz"), "wheel")
    assert wheel.name == f"gpu_hpc_exporter-{__version__}-py3-none-manylinux_2_17_{platform.machine()}.whl"
    assert "without" not in said
    shown = install(wheel, tmp_path / "installed")
    agent = tmp_path / "installed" / AGENT_IN_WHEEL
    assert shown == {"CUDA_INJECTION64_PATH": str(agent), "GPU_HPC_AGENT_DIRECTORY": Agent().directory}
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).InitializeInjection"
    subprocess.run([sys.executable, "-c", load, agent], check=True)


def test_a_wheel_without_a_compiler_is_for_every_machine(checkout: Path, tmp_path: Path) -> None:
    """It says what it lacks, and does not take what lies about."""
    wheel, said = build_package(checkout, "wheel", {"PATH": str(tmp_path)})
    assert wheel.name == f"gpu_hpc_exporter-{__version__}-py3-none-any.whl"
    reason = "no C compiler (cc, gcc or clang) is here"
    assert f"gpu-hpc-exporter is built without the kernel agent: {reason}" in said
    assert AGENT_IN_WHEEL not in zipfile.ZipFile(wheel).namelist()
    assert install(wheel, tmp_path / "installed") == {}


def test_a_wheel_for_another_machine(checkout: Path) -> None:
    """The name follows the compiler, and so does what is inside."""
    wheel, _ = build_package(checkout, "wheel", {**os.environ, "CC": CROSS_COMPILER})
    assert wheel.name == f"gpu_hpc_exporter-{__version__}-py3-none-manylinux_2_17_aarch64.whl"
    elf = zipfile.ZipFile(wheel).read(AGENT_IN_WHEEL)
    assert int.from_bytes(elf[18:20], "little") == 183, "EM_AARCH64"
    assert (checkout / "exporter" / AGENT_IN_WHEEL).read_text("utf-8") == "stale"
