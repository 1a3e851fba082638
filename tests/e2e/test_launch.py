"""`run -- COMMAND`: the program as it would have been, with the agent's variables in its environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import fake_activity
from fake_activity.agent_file import State, wait_for
from gpu_hpc_exporter.launch import AGENT

TELL = [sys.executable, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
NAMES = ("CUDA_INJECTION64_PATH", "GPU_HPC_AGENT_DIRECTORY", "GPU_HPC_AGENT_RESUME_AFTER_PROFILER_MINUTES")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A configuration whose agents' directory can be written."""
    (tmp_path / "agents").mkdir()
    file = tmp_path / "config.yaml"
    file.write_text(f"agent:\n  directory: {tmp_path / 'agents'}\n")
    return file


def run(config: Path, *command: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the launcher to its program's end."""
    clean = {name: value for name, value in os.environ.items() if name not in NAMES}
    launcher = [sys.executable, "-m", "gpu_hpc_exporter", f"--config.file={config}", "run", *command]
    return subprocess.run(
        launcher, env={**clean, **(env or {})}, capture_output=True, text=True, check=False, timeout=60
    )


def environment(result: subprocess.CompletedProcess[str]) -> dict[str, str]:
    told: dict[str, str] = json.loads(result.stdout)
    return {name: told[name] for name in NAMES if name in told}


def test_the_program_gets_the_agent_and_its_directory(config: Path) -> None:
    result = run(config, "--", *TELL)
    assert (result.returncode, result.stderr) == (0, "")
    assert environment(result) == {NAMES[0]: str(AGENT), NAMES[1]: str(config.parent / "agents")}


def test_resume_after_profiler_reaches_the_agent(config: Path) -> None:
    config.write_text(config.read_text() + "  resume_after_profiler: 5\n")
    assert environment(run(config, "--", *TELL))[NAMES[2]] == "5"


def test_another_tool_that_is_injected_stays(config: Path) -> None:
    """There is one place for it, and nsys or another agent has it: one line, and the program runs."""
    result = run(config, "--", *TELL, env={NAMES[0]: "/opt/tool.so"})
    assert environment(result) == {NAMES[0]: "/opt/tool.so"}
    assert result.stderr.splitlines() == [
        f"gpu-hpc-exporter: {NAMES[0]} is already set, to /opt/tool.so: the program runs without kernel series"
    ]


def test_a_directory_that_is_not_there_is_told_and_harms_nothing(config: Path) -> None:
    config.write_text("agent: {directory: /nowhere/agents}\n")
    result = run(config, "--", *TELL)
    assert result.returncode == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpu-hpc-exporter: /nowhere/agents cannot be written")


def test_show_prints_the_variables(config: Path) -> None:
    result = run(config, "--show")
    assert result.stdout == f"{NAMES[0]}={AGENT}\n{NAMES[1]}={config.parent / 'agents'}\n"


def test_a_shell_takes_what_show_prints_whatever_is_in_it(config: Path) -> None:
    """A directory with a blank, or with what a shell would run, reaches the program as it is."""
    directory = f"{config.parent}/of agents'; echo $(id)"
    config.write_text(json.dumps({"agent": {"directory": directory}}))
    shown = run(config, "--show").stdout
    script = f"eval \"$(sed 's/^/export /')\"\nprintenv {NAMES[0]} {NAMES[1]}"
    told = subprocess.run(["sh", "-c", script], input=shown, env={}, capture_output=True, text=True, check=True).stdout
    assert told.splitlines() == [str(AGENT), directory]


@pytest.mark.parametrize(("command", "status"), [(("--", "sh", "-c", "exit 7"), 7), (("--", "/nowhere"), 127), ((), 2)])
def test_the_exit_status_is_the_programs(config: Path, command: tuple[str, ...], status: int) -> None:
    """As shells have it: 127 for a program that is not there, 2 for no program."""
    result = run(config, *command)
    assert result.returncode == status
    assert len(result.stderr.splitlines()) == (status in (2, 127))


def test_a_cuda_program_is_traced(config: Path, tmp_path: Path) -> None:
    """The agent of the installation in a program that loads what CUDA_INJECTION64_PATH names, as the driver does."""
    programs = fake_activity.build(tmp_path)
    told = environment(run(config, "--", *TELL))
    with fake_activity.Host(programs, tmp_path / "stderr", {**told, "GPU_HPC_AGENT_MODE": "continuous"}) as host:
        host.do(f"load {programs.cupti}")
        host.do("init")
        host.do("context 0")
        directory = config.parent / "agents"
        fake_activity.until(lambda: any(directory.glob("*.shm")))
        wait_for(next(directory.glob("*.shm")), lambda now: now.header.state == State.TRACING)
