"""A host program with an agent inside, and the agent's file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fake_activity
from fake_activity import Host, Programs
from fake_activity.agent_file import Snapshot, State, wait_for

FOR_LIFE = {1, 2, 22}
"""Kinds enabled inside cuInit and never switched: copies, sets, copies between GPUs. Single functions are, too."""

FAST = {
    "GPU_HPC_AGENT_WINDOW_SECONDS": "0.05",
    "GPU_HPC_AGENT_PERIOD_SECONDS": "0.1",
    "GPU_HPC_AGENT_FLUSH_SECONDS": "0.01",
    "GPU_HPC_AGENT_DRAIN_SECONDS": "5",
    "GPU_HPC_AGENT_LAUNCH_COST_MICROSECONDS": "0",
    "GPU_HPC_AGENT_NODE_COST_MICROSECONDS": "0",
}


class Agent(Host):
    """A host program and the file of the agent inside it."""

    def __init__(self, programs: Programs, directory: Path, stderr: Path, env: dict[str, str]) -> None:
        """Start the program; the agent begins with its `init`."""
        self.programs = programs
        self.directory = directory
        super().__init__(programs, stderr, FAST | {"GPU_HPC_AGENT_DIRECTORY": str(directory)} | env)

    def begin(self, *before: str) -> None:
        """Load CUPTI, initialise CUDA with the agent, and make a context."""
        assert self.do(f"load {self.programs.cupti}") == "loaded"
        assert self.do(*before, "init") == "0"
        self.do("context 0")

    def trace(self, *before: str) -> None:
        """Begin, and wait until the agent traces."""
        self.begin(*before)
        self.wait(lambda now: now.header.state == State.TRACING)

    @property
    def path(self) -> Path:
        """The agent's file; there must be one."""
        paths = list(self.directory.glob(f"{self.pid}-*.shm"))
        assert len(paths) == 1, paths
        return paths[0]

    def wait(self, condition: Callable[[Snapshot], bool], seconds: float = 60) -> Snapshot:
        """Read the file until the condition holds."""
        self.find(seconds)
        return wait_for(self.path, condition, seconds)

    def find(self, seconds: float = 60) -> Path:
        """Wait until the file is there."""
        fake_activity.until(lambda: any(self.directory.glob("*.shm")), seconds)
        return self.path

    def published(self, more: int = 1) -> Snapshot:
        """Wait until so many more windows are published."""
        number = self.wait(lambda _: True).header.windows_published + more
        return self.wait(lambda now: now.header.windows_published >= number)


Start = Callable[..., Agent]
"""Starts a program; keywords: `programs`, `directory`, and environment variables without their GPU_HPC_AGENT_."""
