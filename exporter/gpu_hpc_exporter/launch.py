"""`gpu-hpc-exporter run -- COMMAND`: a program with the kernel agent inside, and otherwise as it would have been.

The driver loads what CUDA_INJECTION64_PATH names when a process first calls CUDA. There is one such place, so a tool
that is already named there stays; and whatever is wrong with the agent, the program runs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.config import Agent, read_config

AGENT: Final = Path(__file__).parent / "agent" / "libgpu_hpc_agent.so"
INJECTION: Final = "CUDA_INJECTION64_PATH"
DIRECTORY: Final = "GPU_HPC_AGENT_DIRECTORY"
RESUME: Final = "GPU_HPC_AGENT_RESUME_AFTER_PROFILER_MINUTES"

_NOT_FOUND: Final = 127
_NOT_EXECUTABLE: Final = 126


def add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser], configured: argparse.ArgumentParser) -> None:
    """The command's flags. configured: those of every command that reads the configuration."""
    command = commands.add_parser(
        "run",
        parents=[configured],
        usage="gpu-hpc-exporter run [-h] [--config.file FILE] (--show | -- COMMAND)",
        help="run a program with the kernel agent inside",
        description="Run a program with the kernel agent inside, so that its kernels, copies and waits have series. "
        "Whatever is wrong with the agent, the program runs. Exit status: the program's; 127 where there is none of "
        "that name, 126 where it cannot be run.",
    )
    command.add_argument(
        "--show", action="store_true", help="print the environment variables that do it instead, quoted for a shell"
    )
    command.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program and its arguments"
    )


def run_program(flags: argparse.Namespace) -> int:
    """Become the program; the exit status where that cannot be, as shells have it."""
    program = flags.program[1:] if flags.program[:1] == ["--"] else flags.program
    settings = read_config(flags.config_file).agent
    if flags.show:
        sys.stdout.write(
            "".join(f"{name}={shlex.quote(value)}\n" for name, value in variables(settings, os.environ).items())
        )
        return 0
    if not program:
        sys.stderr.write("gpu-hpc-exporter: run: expected a program, as in: gpu-hpc-exporter run -- python train.py\n")
        return 2
    problem = obstacle(settings, os.environ)
    if problem:
        sys.stderr.write(f"gpu-hpc-exporter: {problem}: the program runs without kernel series\n")
    environment = {**os.environ, **variables(settings, os.environ)}
    try:
        os.execvpe(program[0], program, environment)  # noqa: S606  what the user has just typed
    except OSError as error:
        sys.stderr.write(f"gpu-hpc-exporter: {program[0]}: {error.strerror}\n")
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE


def variables(settings: Agent, environment: Mapping[str, str]) -> dict[str, str]:
    """What a program's environment lacks for the agent; what the user has set stays."""
    if environment.get(INJECTION) or not AGENT.is_file():
        return {}
    wanted = {INJECTION: str(AGENT), DIRECTORY: settings.directory}
    if settings.resume_after_profiler != "never":
        wanted[RESUME] = f"{settings.resume_after_profiler:g}"
    return {name: value for name, value in wanted.items() if name == INJECTION or not environment.get(name)}


def obstacle(settings: Agent, environment: Mapping[str, str]) -> str:
    """Why there will be no kernel series of a program that is started now, "" if nothing is known against them."""
    if environment.get(INJECTION):
        return f"{INJECTION} is already set, to {ascii(environment[INJECTION])[1:-1]}"
    if not AGENT.is_file():
        return "this installation has no kernel agent (it was built without a C compiler)"
    directory = environment.get(DIRECTORY) or settings.directory
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} cannot be written (the exporter makes it when it runs as root, or see agent.directory)"
    return ""
