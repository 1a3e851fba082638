"""Where the driver's library is looked for, and what is said where it cannot be opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from gpu_hpc_exporter.config import DEFAULT_DRIVER_ROOT
from gpu_hpc_exporter.sources.device_files import device_problem
from gpu_hpc_exporter.sources.nvml import library
from gpu_hpc_exporter.sources.nvml.library import DriverUnavailableError, find_library, open_library, remedy


@pytest.mark.parametrize(
    "folder",
    [
        "",
        "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/",
        "/run/nvidia/driver/usr/lib/aarch64-linux-gnu/",
        "/run/nvidia/driver/usr/lib64/",
        "/home/kubernetes/bin/nvidia/lib64/",
        "/usr/local/nvidia/lib64/",
        "/usr/lib/wsl/lib/",
        "nowhere",
    ],
)
def test_m07_where_set_ups_of_containers_have_the_library(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """M07: the loader's own first, then the driver container's, GKE's and WSL's, by default."""
    tried: list[str] = []

    def load(path: str) -> object:
        tried.append(path)
        if path != f"{folder}libnvidia-ml.so.1":
            raise OSError(path)
        return object()

    monkeypatch.setattr(library, "ctypes", SimpleNamespace(CDLL=load))
    assert find_library(DEFAULT_DRIVER_ROOT) == (folder != "nowhere")
    assert tried[0] == "libnvidia-ml.so.1"
    assert len(tried) == len(set(tried))


def host(root: Path, *files: str) -> Path:
    """A root whose kernel module is loaded, with these device files."""
    (root / "proc/driver/nvidia").mkdir(parents=True)
    (root / "proc/driver/nvidia/version").touch()
    (root / "dev").mkdir()
    for file in files:
        (root / "dev" / file).touch()
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((), "/dev/nvidiactl is not there"),
        (("nvidia0",), "/dev/nvidiactl is not there"),
        (("nvidiactl", "nvidia-uvm"), "/dev/nvidia0 is not there"),
        (("nvidiactl", "nvidia3", "nvidia-uvm"), ""),
    ],
)
def test_m03_the_device_file_that_is_missing(tmp_path: Path, files: tuple[str, ...], expected: str) -> None:
    """M03: by name; a container may have any of the GPUs."""
    assert device_problem(host(tmp_path, *files)) == expected


@pytest.mark.parametrize(
    ("denied", "expected"),
    [("nvidiactl", "/dev/nvidiactl: Permission denied"), ("nvidia1", "/dev/nvidia1: Permission denied")],
)
def test_m03_the_device_file_that_is_denied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, denied: str, expected: str
) -> None:
    """M03: by name; the kernel's answers are made up, since root is never denied a file."""
    root, really = host(tmp_path, "nvidiactl", "nvidia0", "nvidia1"), os.open

    def refuse(path: Path, *more: int) -> int:
        if Path(path).name == denied:
            raise PermissionError(13, os.strerror(13))
        return really(path, *more)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != denied)
    assert device_problem(root) == expected


def test_m03_without_the_module_there_need_be_no_file(tmp_path: Path) -> None:
    """M03: `modprobe nvidia` is what helps then."""
    assert device_problem(tmp_path) == ""


@pytest.mark.parametrize("code", [4, 9, 999])
@pytest.mark.parametrize("problem", ["", "/dev/nvidiactl is not there"])
def test_m03_what_is_missing_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch, code: int, problem: str) -> None:
    """M03: whatever NVML calls it; else what NVML's answer is mostly due to."""
    monkeypatch.setattr(library, "device_problem", lambda: problem)
    monkeypatch.setattr(library, "find_library", lambda _: True)
    monkeypatch.setattr(pynvml, "nvmlInitWithFlags", failing(code))
    with pytest.raises(DriverUnavailableError) as unavailable:
        open_library(Path("/nowhere"))
    text = str(unavailable.value)
    if problem:
        assert f"but {problem}: " in text
        assert "PrivateDevices=no" in text
    else:
        assert text == remedy(unavailable.value.reason)
    assert "\n" not in text


def test_m06_unknown_error_at_the_start_names_its_causes() -> None:
    """M06: the toolkit's setting for rootless use, and a device cgroup that was rewritten."""
    text = str(DriverUnavailableError("unknown"))
    assert "no-cgroups=true" in text
    assert "systemd" in text


def failing(code: int) -> Callable[[int], None]:
    """A call of NVML's that answers this."""

    def call(_: int) -> None:
        raise pynvml.NVMLError(code)

    return call
