"""Which of NVIDIA's device files are held, in a made-up /proc and in the real one."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from gpu_hpc_exporter.sources.device_files import held_by_children, held_here


def make_process(proc: Path, name: str, files: list[str], mapped: str = "", children: str = "") -> Path:
    """A process with these files open and mapped."""
    process = proc / name
    (process / "fd").mkdir(parents=True)
    for number, target in enumerate(files):
        (process / "fd" / str(number)).symlink_to(target)
    (process / "maps").write_text(f"7f00-7f01 rw-s 00000000 00:05 1 {mapped}\n")
    for thread, those in enumerate(children.split("|")):
        (process / "task" / str(thread)).mkdir(parents=True)
        (process / "task" / str(thread) / "children").write_text(those)
    return process


@pytest.mark.parametrize(
    ("target", "held"),
    [
        ("/dev/nvidia0", {"/dev/nvidia0"}),
        ("/dev/nvidiactl", {"/dev/nvidiactl"}),
        ("/dev/nvidia-uvm", {"/dev/nvidia-uvm"}),
        ("/dev/nvidia-caps/nvidia-cap1", {"/dev/nvidia-caps/nvidia-cap1"}),
        ("/dev/nvidia0 (deleted)", {"/dev/nvidia0"}),
        ("/run/nvidia/driver/dev/nvidia0", {"/dev/nvidia0"}),
        ("/dev/null", set()),
        ("/usr/lib/libnvidia-ml.so.580", set()),
        ("/proc/driver/nvidia/params", set()),
        ("socket:[12]", set()),
    ],
)
@pytest.mark.parametrize("way", ["open", "mapped"])
def test_device_files(tmp_path: Path, target: str, held: set[str], way: str) -> None:
    """Device nodes only, wherever they are; a mapping holds one as well as a descriptor."""
    make_process(tmp_path, "self", ["/dev/null", target] if way == "open" else [], target if way == "mapped" else "")
    assert held_here(tmp_path) == held
    assert held_by_children(tmp_path) == set()


def test_children_of_every_thread(tmp_path: Path) -> None:
    """A child is named by its pid; one that ended meanwhile holds nothing."""
    make_process(tmp_path, "self", [], children="7 8 |9")
    make_process(tmp_path, "7", ["/dev/nvidia0"])
    make_process(tmp_path, "9", ["/dev/null"], mapped="/dev/nvidiactl", children="10")
    make_process(tmp_path, "10", ["/dev/nvidia1"])
    assert held_here(tmp_path) == set()
    assert held_by_children(tmp_path) == {
        "/dev/nvidia0 (process 7)",
        "/dev/nvidiactl (process 9)",
        "/dev/nvidia1 (process 10)",
    }


def test_a_child_with_more_privilege(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has open cannot be seen, so that it lives is what is told."""
    make_process(tmp_path, "self", [], children="7")
    make_process(tmp_path, "7", ["/dev/nvidia0"])
    real = os.listdir

    def denied(path: Path) -> list[str]:
        if path.parent.name == "7":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", denied)
    assert held_by_children(tmp_path) == {"whatever process 7 has open"}


def test_this_process_and_a_real_child(tmp_path: Path) -> None:
    """The real /proc, with a file that has a device's name: open in a child, then nowhere."""
    device = tmp_path / "dev" / "nvidia0"
    device.parent.mkdir()
    device.write_text("")
    with device.open() as file, subprocess.Popen(["sleep", "60"], stdin=file) as child:
        assert held_here() == {"/dev/nvidia0"}
        deadline = time.monotonic() + 60
        while held_by_children() != {f"/dev/nvidia0 (process {child.pid})"}:
            assert time.monotonic() < deadline
        child.kill()
    assert held_here() == set()
    assert held_by_children() == set()
