"""The package's build: puts the kernel agent into the wheel where a C compiler is here, and leaves it out elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory
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
    """Without the agent everything but the kernel series works, and the wheel is for every machine."""

    _folder: TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile it before the files of the wheel are gathered; an editable install finds it in the tree.

        For a wheel it is compiled anew and elsewhere: that of the tree may be another machine's.
        """
        builder = _agent_builder(self.root)
        try:
            if version == "editable":
                builder.build()
                return
            self._folder = TemporaryDirectory(prefix="gpu-hpc-agent-")
            agent = builder.build(Path(self._folder.name, builder.OUTPUT.name))
        except builder.CannotBuildError as error:
            self.app.display_warning(f"gpu-hpc-exporter is built without the kernel agent: {error}")
            return
        build_data["force_include"][str(agent)] = f"gpu_hpc_exporter/agent/{agent.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{builder.platform_tag(agent)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002  hatchling's
        """Remove what was compiled for the wheel."""
        if self._folder:
            self._folder.cleanup()
