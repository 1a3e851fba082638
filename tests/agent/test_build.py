"""Building the agent: any C compiler, no CUDA, and a clear message without a compiler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fake_activity import AGENT_SOURCE, build_agent

COMPILERS = [name for name in ("gcc", "clang") if shutil.which(name)]


@pytest.mark.parametrize("compiler", COMPILERS)
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


@pytest.mark.parametrize("compiler", COMPILERS)
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
