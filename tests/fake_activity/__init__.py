"""A CUDA driver and a CUPTI whose kernels, copies and waits are what a host program's commands say.

`build` compiles the libraries, the host program and (from the project's sources) the agent. `Host` runs the program.
README.md lists the commands.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_SOURCE = Path(__file__).parent
AGENT_SOURCE = _SOURCE.parents[1] / "exporter" / "agent"
_FLAGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O1", "-g", "-fPIC", "-pthread", "-Wl,-z,defs")
AGENT_FLAGS = (
    *("-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O2", "-g", "-fPIC", "-fvisibility=hidden"),
    *("-pthread", "-shared", "-Wl,-z,nodelete", "-Wl,-z,defs"),
)


@dataclass(frozen=True)
class Programs:
    """What `build` made, all in one directory."""

    host: Path
    cupti: Path
    agent: Path


def compile_c(output: Path, *arguments: str, compiler: str = "gcc", folder: Path = _SOURCE) -> None:
    """Run a C compiler; its messages are part of the error."""
    command = [compiler, "-o", str(output), *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{compiler} failed:\n{result.stderr}")


def build(directory: Path, *, sanitize: Sequence[str] = ()) -> Programs:
    """Compile everything into `directory`; `sanitize`: flags for all of it."""
    directory.mkdir(parents=True, exist_ok=True)
    shared = directory / "libfake_activity.so"
    cuda = directory / "libcuda.so.1"
    programs = Programs(directory / "host", directory / "libcupti.so.13", directory / "agent.so")
    library = (*_FLAGS, *sanitize, "-shared", "-Wl,-rpath,$ORIGIN")
    if sanitize:
        library = tuple(flag for flag in library if flag != "-Wl,-z,defs")
    compile_c(shared, *library, "-Wl,-soname,libfake_activity.so", "engine.c")
    compile_c(cuda, *library, "-Wl,-soname,libcuda.so.1", "cuda.c", str(shared))
    build_cupti(programs.cupti, shared, sanitize=sanitize)
    compile_c(programs.host, *_FLAGS, *sanitize, "-Wl,-rpath,$ORIGIN", "host.c", str(cuda), str(shared), "-ldl")
    build_agent(programs.agent, sanitize=sanitize)
    return programs


def build_cupti(output: Path, shared: Path, *, missing: Sequence[str] = (), sanitize: Sequence[str] = ()) -> None:
    """Compile a libcupti without the functions named `missing`."""
    script = output.with_suffix(".map")
    hidden = "".join(f"{name}; " for name in missing)
    script.write_text(f"{{ global: cupti*; local: {hidden}*; }};\n", encoding="utf-8")
    flags = tuple(flag for flag in _FLAGS if not sanitize or flag != "-Wl,-z,defs")
    exports = (f"-Wl,--version-script={script}", f"-Wl,-soname,{output.name}", "-Wl,-rpath,$ORIGIN")
    compile_c(output, *flags, *sanitize, "-shared", *exports, "cupti.c", str(shared))


def build_agent(output: Path, *, compiler: str = "gcc", sanitize: Sequence[str] = ()) -> None:
    """Compile the agent from the project's sources."""
    flags = tuple(flag for flag in AGENT_FLAGS if not sanitize or flag != "-Wl,-z,defs")
    sources = sorted(path.name for path in AGENT_SOURCE.glob("*.c"))
    compile_c(output, *flags, *sanitize, *sources, "-ldl", compiler=compiler, folder=AGENT_SOURCE)


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until the condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {seconds} s")
        time.sleep(0.005)


class HostError(RuntimeError):
    """The host program ended instead of answering; the message has what it wrote to stderr."""


class Host:
    """A running host program, used as a context manager: it is killed at the end if it still runs."""

    def __init__(self, programs: Programs, stderr: Path, env: dict[str, str]) -> None:
        """Start it with the agent injected; `env` adds to the environment. Its stderr goes to a file."""
        self._stderr = stderr
        environment = {"CUDA_INJECTION64_PATH": str(programs.agent), **os.environ, **env}
        with stderr.open("ab") as file:
            self.process = subprocess.Popen(
                [str(programs.host)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                text=True,
                bufsize=1,
            )
        self.pid = int(self._line().removeprefix("ready"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                pipe.close()

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line.endswith("\n"):
            raise HostError(f"status {self.process.wait()}: {self.said()}")
        return line.strip()

    def do(self, *commands: str) -> str:
        """Send commands; return the answer to the last, without its `ok`."""
        answer = ""
        for command in commands:
            self.send(command)
            answer = self._line().removeprefix("ok").strip()
        return answer

    def send(self, command: str) -> None:
        """Send a command without waiting for its answer."""
        assert self.process.stdin
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """Read a line that was not waited for."""
        return self._line()

    def end(self, status: int = 0, seconds: float = 60) -> int:
        """Let the program exit; return its status."""
        self.send(f"exit {status}")
        return self.process.wait(seconds)

    def calls(self) -> dict[str, int]:
        """How often each function was called, and what was noticed (names with @)."""
        return {name: int(count) for name, count in (word.split("=") for word in self.do("calls").split())}

    def kinds(self) -> set[int]:
        """The activity kinds that are enabled."""
        return {int(kind) for kind in self.do("kinds").split()}

    def said(self) -> str:
        """What it has written to stderr so far."""
        return self._stderr.read_text(encoding="utf-8", errors="replace")
