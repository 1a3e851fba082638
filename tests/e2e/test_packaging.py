"""What is handed out: source distribution and wheel, and the wheel in an environment of its own.

That the dependencies it declares are enough is seen where they are fetched: tests/unit/test_compose.py installs the
wheel, as the Dockerfile says, into an environment that has nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

from exporter_process import run_exporter
from gpu_hpc_exporter import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SDIST = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]
SHARE = "share/gpu-hpc-exporter"
AGENT = "libgpu_hpc_agent.so"
EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


@dataclass(frozen=True)
class Packages:
    """The source distribution, the wheel that is built of it, and the one that is built of the tree."""

    sdist: Path
    wheel: Path
    wheel_of_tree: Path


def build(source: Path, target: str, directory: Path) -> Path:
    """What pip runs, without asking an index for hatchling."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(directory)]
    subprocess.run(command, cwd=source, capture_output=True, check=True, timeout=120)
    (file,) = directory.iterdir()
    return file


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    """All three, built once."""
    sdist = build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as packed:
        packed.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    wheel = build(source, "wheel", tmp_path_factory.mktemp("wheel"))
    return Packages(sdist, wheel, build(ROOT, "wheel", tmp_path_factory.mktemp("wheel-of-tree")))


@pytest.fixture(scope="module")
def programs(packages: Packages, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a new environment with the wheel, which finds the tests' dependencies but not their exporter."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True, timeout=60)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--quiet", "install"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(packages.wheel)], check=True, timeout=60)
    # A path in such a file is searched, but its own such files, and so the tree's editable install, are not read.
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    return environment / "bin"


def clean(programs: Path, directory: Path) -> list[str]:
    """Begins a command: in that directory, with nothing in the environment but a PATH."""
    return ["env", "-i", f"--chdir={directory}", f"PATH={programs}:/usr/bin:/bin"]


def run(programs: Path, directory: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*clean(programs, directory), *command], capture_output=True, text=True, check=False, timeout=60
    )


def members(wheel: Path) -> Mapping[str, bytes]:
    with zipfile.ZipFile(wheel) as packed:
        return {name: packed.read(name) for name in packed.namelist()}


def in_git(*patterns: str) -> set[str]:
    """Files of the working tree that are, or will be, of the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


# --- what is in them --------------------------------------------------------------------------------------------------


def test_the_source_distribution_has_the_files_of_git_and_no_others(packages: Packages) -> None:
    """What lies about in a checkout (wheels, libraries, captures, other READMEs) stays there."""
    top = f"gpu_hpc_exporter-{__version__}/"
    assert packages.sdist.name == f"gpu_hpc_exporter-{__version__}.tar.gz"
    with tarfile.open(packages.sdist) as packed:
        names = {name.removeprefix(top) for name in packed.getnames()}
        assert all(member.isreg() for member in packed.getmembers())
    wanted = in_git("pyproject.toml", ".gitignore", *(name.removeprefix("/") for name in SDIST["include"]))
    left_out = tuple(f"{name.removeprefix('/')}/" for name in SDIST["exclude"] if name.startswith("/"))
    assert names == {name for name in wanted if not name.startswith(left_out)} | {"PKG-INFO"}
    assert all((ROOT / name.removeprefix("/")).exists() for name in SDIST["include"])


def test_both_wheels_are_the_same(packages: Packages) -> None:
    """Of the sources as of the tree: same name, same files, same bytes."""
    assert packages.wheel.name == packages.wheel_of_tree.name
    ours, theirs = members(packages.wheel), members(packages.wheel_of_tree)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_the_wheel_has_the_package_and_what_goes_with_it(packages: Packages) -> None:
    """All files of the package, the agent, a recording; rules, dashboards and deployments, none of their tests."""
    names = set(members(packages.wheel))
    package = {name.removeprefix("exporter/") for name in in_git("exporter/gpu_hpc_exporter")}
    assert {name for name in names if name.startswith("gpu_hpc_exporter/")} == {
        *package,
        f"gpu_hpc_exporter/agent/{AGENT}",
    }
    data = f"gpu_hpc_exporter-{__version__}.data/data/{SHARE}/"
    shared = {name.removeprefix(data) for name in names if name.startswith(data)}
    left_out = ("alert-rules/tests/", "dashboards/boards/", "deploy/compose/")
    wanted = in_git("alert-rules", "dashboards", "deploy")
    assert shared == {name for name in wanted if not name.startswith(left_out)}
    others = {name for name in names if not name.startswith(("gpu_hpc_exporter/", data))}
    assert all(name.startswith(f"gpu_hpc_exporter-{__version__}.dist-info/") for name in others)


def test_metadata(packages: Packages) -> None:
    """What pip and an index show: licence with its texts, versions of Python, extras, commands."""
    found = members(packages.wheel)
    info = f"gpu_hpc_exporter-{__version__}.dist-info"
    metadata: Message = message_from_bytes(found[f"{info}/METADATA"])
    assert (metadata["Name"], metadata["Version"]) == ("gpu-hpc-exporter", __version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    licences = metadata.get_all("License-File") or []
    assert {f"{info}/licenses/{name}" for name in licences} <= found.keys()
    assert "LICENSE" in licences
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).lstrip().startswith("# gpu-hpc-exporter")
    lowest = metadata["Requires-Python"].removeprefix(">=")
    classifiers = metadata.get_all("Classifier") or []
    assert f"Programming Language :: Python :: {lowest}" in classifiers
    assert set(metadata.get_all("Provides-Extra") or []) == {"check", "cupti", "kubernetes", "test"}
    scripts = found[f"{info}/entry_points.txt"].decode()
    assert all(f"{name} = {place}" in scripts for name, place in PROJECT["project"]["scripts"].items())


# --- installed --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    ["", "doctor", "identify", "run", "record", "pause", "release", "resume"],
    ids=lambda name: name or "none",
)
def test_help(programs: Path, tmp_path: Path, command: str) -> None:
    """Of every command: a line of what it does, and no path torn at its hyphens."""
    done = run(programs, tmp_path, "gpu-hpc-exporter", *filter(None, [command]), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    usage, _, rest = done.stdout.partition("\n\n")
    assert usage.startswith(f"usage: gpu-hpc-exporter {command}".rstrip())
    assert rest[0].isupper()
    assert "gpu-hpc-\n" not in done.stdout


def test_the_helper_is_installed(programs: Path, tmp_path: Path) -> None:
    """A command of its own, for a rule of sudo's."""
    done = run(programs, tmp_path, "gpu-hpc-pm-helper", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: gpu-hpc-pm-helper ")


def test_doctor(programs: Path, tmp_path: Path) -> None:
    """It judges the machine, whatever that has, and finds the agent of this installation."""
    done = run(programs, tmp_path, "gpu-hpc-exporter", "doctor", "--json")
    told = json.loads(done.stdout)
    assert done.returncode == ("ok", "degraded", "broken").index(told["status"])
    assert (told["version"], done.stderr) == (__version__, "")
    (agent,) = [check for check in told["checks"] if check["name"] == "agent library"]
    assert agent["status"] == "ok"


def test_run_names_the_agent_of_this_installation(programs: Path, tmp_path: Path) -> None:
    """Not the tree's."""
    done = run(programs, tmp_path, "gpu-hpc-exporter", "run", "--show")
    named = dict(line.split("=", 1) for line in done.stdout.splitlines())
    agent = Path(named["CUDA_INJECTION64_PATH"])
    assert agent.is_relative_to(programs.parent)
    assert agent.is_file()


def test_replay(programs: Path, tmp_path: Path) -> None:
    """The recording that came with it is served, and the page."""
    command = [*clean(programs, tmp_path), "gpu-hpc-exporter", "--source=replay", "--replay.speed=10"]
    with run_exporter(tmp_path, program=["-c", EXECUTE, *command]) as exporter:
        samples = exporter.wait_for(lambda found: bool(found.all("gpu_hpc_sm_active_seconds_total")))
        assert samples.one("gpu_hpc_replay") == 1
        status, _, page = exporter.fetch("/")
        assert (status, "<html" in page) == (200, True)
        assert Path(f"/proc/{exporter.process.pid}/cwd").readlink() == tmp_path


def test_what_goes_with_it_can_be_found(programs: Path) -> None:
    """In the environment itself, under one folder."""
    share = programs.parent / SHARE
    for pattern in ("alert-rules/*.yml", "alert-rules/runbooks/*.md", "dashboards/*.json", "deploy/systemd/*.service"):
        assert sorted(file.name for file in share.glob(pattern)) == sorted(file.name for file in ROOT.glob(pattern))
