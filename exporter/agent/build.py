"""Compiles the agent that programs with a GPU load: `python exporter/agent/build.py [OUTPUT]`.

Needs a C compiler for Linux and nothing of CUDA. CC names another one, `CC=aarch64-linux-gnu-gcc` for another machine.
The package's build (hatch_build.py) does the same.
"""

# ruff: noqa: INP001 - it lies beside C sources, in no package
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

SOURCE = Path(__file__).resolve().parent
OUTPUT = SOURCE.parent / "gpu_hpc_exporter" / "agent" / "libgpu_hpc_agent.so"
_FLAGS = (
    *("-std=c11", "-O2", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-fstack-protector-strong"),
    *("-Wall", "-Wextra", "-Wpedantic"),
    # It stays where it is loaded, and needs nothing that is found only later.
    *("-Wl,-z,nodelete", "-Wl,-z,relro", "-Wl,-z,now", "-Wl,-z,defs", "-Wl,-s"),
)
# Parts of libc since glibc 2.34. Before, the functions that we need were there and nowhere else, and a program that
# does not use threads itself may not have loaded them.
_ONCE_APART = ("libpthread.so.0", "libdl.so.2")
_OLDEST_GLIBC = (2, 17)
"""What it is written for, and the oldest that wheels for aarch64 can name."""
_GLIBC = re.compile(r"(libc|libpthread|libdl)\.so\.[0-9]+|ld-linux-(x86-64|aarch64)\.so\.[0-9]+")
_MACHINES = {62: "x86_64", 183: "aarch64"}
"""e_machine of elf.h, for the machines that CUDA is for."""


class CannotBuildError(Exception):
    """There is no agent for this machine; the message says why in one line."""


def _find_compiler() -> list[str]:
    """What CC says, with its arguments and nothing in its place; else the first that is here."""
    wanted = os.environ.get("CC", "").split()
    for command in [wanted] if wanted else [["cc"], ["gcc"], ["clang"]]:
        if program := shutil.which(command[0]):
            return [program, *command[1:]]
    if wanted:
        raise CannotBuildError(f"CC names {wanted[0]}, which is not here")
    raise CannotBuildError("no C compiler (cc, gcc or clang) is here")


def _answer(*command: str) -> str:
    """What a program prints; "" where it fails."""
    environment = {**os.environ, "LC_ALL": "C"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603 - as below
    return "" if result.returncode else result.stdout.strip()


def _once_apart(compiler: list[str]) -> list[str]:
    """Name the C library's former parts to the linker, those that are here (musl never had any)."""
    paths = [_answer(*compiler, f"-print-file-name={name}") for name in _ONCE_APART]
    found = [path for path in paths if Path(path).is_absolute()]
    return ["-Wl,--no-as-needed", *found, "-Wl,--as-needed"] if found else []


def build(output: Path = OUTPUT) -> Path:
    """Compile the agent unless it is newer than its sources; CC names the compiler."""
    if sys.platform != "linux":
        raise CannotBuildError("the kernel agent is for Linux only")
    compiler = _find_compiler()
    newest = max(path.stat().st_mtime for path in SOURCE.iterdir() if path.is_file())
    if output.exists() and output.stat().st_mtime >= newest:
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)  # a running program keeps the old one
    sources = sorted(str(path) for path in SOURCE.glob("*.c"))
    command = [*compiler, *_FLAGS, "-o", str(output), *sources, *_once_apart(compiler), "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the user's compiler
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it does not say why"])[-1]
        raise CannotBuildError(f"{compiler[0]} failed: {last}")
    return output


def platform_tag(agent: Path) -> str:
    """The platform in the name of a wheel with this agent, as PEP 600 has it.

    `manylinux_<glibc>_<machine>` with the newest glibc that a symbol of it asks for, at least 2.17; `linux_<machine>`,
    which package indexes refuse, where it asks for more than glibc or that cannot be seen: then only machines like this
    one are known to have it.
    """
    machine = _MACHINES.get(int.from_bytes(agent.read_bytes()[18:20], "little"))
    if not machine:
        return sysconfig.get_platform().replace("-", "_").replace(".", "_")
    glibc = _newest_glibc(agent)
    return f"manylinux_{glibc[0]}_{glibc[1]}_{machine}" if glibc else f"linux_{machine}"


def _newest_glibc(agent: Path) -> tuple[int, int] | None:
    """The newest glibc that it needs, None where that is not all that it needs."""
    readelf = shutil.which(_answer(*_find_compiler(), "-print-prog-name=readelf"))
    read = _answer(readelf, "-dVW", str(agent)) if readelf else ""
    if any(not _GLIBC.fullmatch(name) for name in re.findall(r"\(NEEDED\).*\[(.*)\]", read)):
        return None
    needed = re.findall(r"Name: (\S+)", read.rpartition("Version needs")[2])
    found = [re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", name) for name in needed]
    versions = [(int(version[1]), int(version[2])) for version in found if version]
    return max(_OLDEST_GLIBC, *versions) if versions and len(versions) == len(needed) else None


if __name__ == "__main__":
    try:
        print(build(Path(sys.argv[1])) if len(sys.argv) > 1 else build())  # noqa: T201 - the path is the answer
    except CannotBuildError as error:
        sys.exit(f"gpu-hpc-exporter: {error}")
