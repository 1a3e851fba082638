"""Programs compiled once, and host programs with an agent inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import fake_activity
from fake_activity import Programs
from fake_activity.agent import Agent, Start


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """The libraries, the host program and the agent."""
    return fake_activity.build(tmp_path_factory.mktemp("programs"))


@pytest.fixture
def start(programs: Programs, tmp_path: Path) -> Iterator[Start]:
    """Starts host programs; keywords are environment variables without their GPU_HPC_AGENT_."""
    directory = tmp_path / "agents"
    directory.mkdir()
    with ExitStack() as stack:

        def begin(*, programs: Programs = programs, directory: Path = directory, **variables: str) -> Agent:
            env = {f"GPU_HPC_AGENT_{name}": value for name, value in variables.items()}
            return stack.enter_context(Agent(programs, directory, tmp_path / "stderr", env))

        yield begin


@pytest.fixture
def continuous(start: Start) -> Agent:
    """A program that is traced all the time."""
    agent = start(MODE="continuous")
    agent.trace()
    return agent
