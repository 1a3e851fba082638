"""Compiles dashboards with TypeScript against Grafana's own types."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

TYPES = Path(__file__).resolve().parent.parent / "dashboards_types"
_ERROR = re.compile(r"^(?P<file>[\w-]+)\.ts\(\d+,\d+\): error (?P<text>.*)$", re.MULTILINE)


def install() -> None:
    """The compiler and the types, as the lock file pins them, unless they are there; once for tests in parallel."""
    installed, wanted = TYPES / "node_modules" / ".package-lock.json", TYPES / "package-lock.json"
    with wanted.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime:
            npm_ci(TYPES)


def npm_ci(directory: Path) -> None:
    """Install what the directory's lock file pins, from the network as far as it has not been fetched before."""
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline", "--fetch-retries=5"]
    _run(command, directory, expected={0})


def errors(directory: Path, sources: Mapping[str, str]) -> dict[str, list[str]]:
    """What the compiler says of each dashboard's JSON text, by the name it has been given."""
    for name, text in sources.items():
        module = f'import type {{ Board }} from "{TYPES}/board.js";\nexport const board: Board = {text};\n'
        (directory / f"{name}.ts").write_text(module, encoding="utf-8")
    settings = {"extends": str(TYPES / "tsconfig.json"), "files": [f"{name}.ts" for name in sources]}
    (directory / "tsconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    compiler = TYPES / "node_modules" / "typescript" / "bin" / "tsc"
    output = _run(["node", str(compiler), "-p", ".", "--pretty", "false"], directory, expected={0, 2})
    found: dict[str, list[str]] = {name: [] for name in sources}
    for match in _ERROR.finditer(output):
        found[match["file"]].append(match["text"])
    assert not output or any(found.values()), output
    return found


def _run(command: list[str], directory: Path, expected: set[int]) -> str:
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode in expected, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
