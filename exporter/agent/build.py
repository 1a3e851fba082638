"""Compiles the agent that programs with a GPU load: `python exporter/agent/build.py [OUTPUT]`.

Needs a C compiler for Linux and nothing of CUDA. The package's build (hatch_build.py) does the same.
"""

# ruff: noqa: INP001 - it lies beside C sources, in no package
from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


class CannotBuildError(Exception):
    """There is no agent for this machine; the message says why in one line."""


def _once_apart(compiler: str) -> list[str]:
    """Name the C library's former parts to the linker, those that are here (musl never had any)."""
    found = []
    for name in _ONCE_APART:
        command = [compiler, f"-print-file-name={name}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - as below
        path = result.stdout.strip()
        found += [path] if Path(path).is_absolute() else []
    return ["-Wl,--no-as-needed", *found, "-Wl,--as-needed"] if found else []


def build(output: Path = OUTPUT) -> Path:
    """Compile the agent unless it is newer than its sources; CC names the compiler."""
    if sys.platform != "linux":
        raise CannotBuildError("the kernel agent is for Linux only")
    names = (os.environ.get("CC", ""), "cc", "gcc", "clang")
    compiler = next((found for name in names if name and (found := shutil.which(name))), None)
    if not compiler:
        raise CannotBuildError("no C compiler (cc, gcc or clang) is here")
    newest = max(path.stat().st_mtime for path in SOURCE.iterdir() if path.is_file())
    if output.exists() and output.stat().st_mtime >= newest:
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)  # a running program keeps the old one
    sources = sorted(str(path) for path in SOURCE.glob("*.c"))
    command = [compiler, *_FLAGS, "-o", str(output), *sources, *_once_apart(compiler), "-ldl"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the user's compiler
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["it does not say why"])[-1]
        raise CannotBuildError(f"{compiler} failed: {last}")
    return output


if __name__ == "__main__":
    try:
        print(build(Path(sys.argv[1])) if len(sys.argv) > 1 else build())  # noqa: T201 - the path is the answer
    except CannotBuildError as error:
        sys.exit(f"gpu-hpc-exporter: {error}")
