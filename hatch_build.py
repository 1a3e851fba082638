"""The package's build: puts the kernel agent into the wheel where a C compiler is here, and leaves it out elsewhere."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _agent_builder(root: str) -> ModuleType:
    """Load exporter/agent/build.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("agent_build", Path(root, "exporter", "agent", "build.py"))
    if not spec or not spec.loader:
        raise ImportError("exporter/agent/build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class AgentBuildHook(BuildHookInterface):
    """Without the agent everything but the kernel series works."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it before the files of the wheel are gathered; an editable install finds it in the tree."""
        builder = _agent_builder(self.root)
        try:
            agent = builder.build()
        except builder.CannotBuildError as error:
            self.app.display_warning(f"gpu-hpc-exporter is built without the kernel agent: {error}")
            return
        build_data["artifacts"].append(f"/{agent.relative_to(self.root).as_posix()}")
        if version != "editable":
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
