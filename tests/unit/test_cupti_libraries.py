"""Which CUPTI is taken of those that a machine has, and what is said where none will do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gpu_hpc_exporter.sources.cupti import Cupti, LibraryUnusableError
from gpu_hpc_exporter.sources.pm_sampling import libraries
from gpu_hpc_exporter.sources.pm_sampling.libraries import Candidate, Version, choose_library, version_of_api


class Machine:
    """A machine that has what a test puts there, and nothing else."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.site = root / "site-packages"
        self.toolkit = root / "usr/local/cuda"
        self.system = root / "usr/lib64"
        self.environment: dict[str, str] = {}

    def wheel(self, distribution: str, version: str, library: str) -> str:
        """Install a wheel; answers its library's path."""
        info = self.site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n", "utf-8")
        (info / "RECORD").write_text(f"{library},,\n{library}.txt,,\n", "utf-8")
        return self.file(self.site / library)

    def cuda(self, name: str, version_json: bytes | None, library: str = "extras/CUPTI/lib64/libcupti.so.12") -> str:
        """Install a toolkit; answers its library's path. The environment does not know of it yet."""
        folder = self._root / name
        path = self.file(folder / library)
        if version_json is not None:
            (folder / "version.json").write_bytes(version_json)
        return path

    @staticmethod
    def file(path: Path) -> str:
        """A file with nothing in it: nothing is loaded here."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return str(path)

    def choose(self, *driver: int) -> Candidate:
        """The choice for a driver of this CUDA."""
        return choose_library((driver[0], driver[1]), self.environment)

    def refusal(self, *driver: int) -> str:
        """What is said where no choice is left."""
        with pytest.raises(LibraryUnusableError) as refusal:
            self.choose(*driver)
        text = str(refusal.value)
        assert "\n" not in text
        return text


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A bare machine."""
    bare = Machine(tmp_path)
    monkeypatch.setattr(sys, "path", [str(bare.site)])
    monkeypatch.setattr(libraries, "_TOOLKIT", str(bare.toolkit))
    monkeypatch.setattr(libraries, "_SYSTEM_FOLDERS", (str(bare.system),))
    return bare


def told(version: str) -> bytes:
    """A toolkit's version.json."""
    return json.dumps({"cuda": {"version": "99.9"}, "cuda_cupti": {"version": version}}).encode()


CU12 = ("nvidia-cuda-cupti-cu12", "12.9.79", "nvidia/cuda_cupti/lib/libcupti.so.12")
CU13 = ("nvidia-cuda-cupti", "13.1.115", "nvidia/cu13/lib/libcupti.so.13")


@pytest.mark.parametrize(
    ("driver", "newest"),
    [((12, 9), "cu12"), ((13, 0), "cu12"), ((13, 1), "cu13"), ((13, 5), "cu13"), ((14, 0), "cu13")],
)
def test_the_newest_wheel_that_the_driver_runs(machine: Machine, driver: Version, newest: str) -> None:
    """A library newer than the driver's CUDA would answer errors."""
    paths = {"cu12": machine.wheel(*CU12), "cu13": machine.wheel(*CU13)}
    machine.wheel("nvidia-cuda-runtime-cu12", "12.9.79", "nvidia/cuda_runtime/lib/libcudart.so.12")
    assert machine.choose(*driver).path == paths[newest]


def test_names_of_wheels_are_compared_as_pip_does(machine: Machine) -> None:
    """Case and underscores are the packager's; a package that has our library's name in its own is not NVIDIA's."""
    path = machine.wheel("NVIDIA_cuda_cupti-CU12", "12.9.79", "nvidia/cuda_cupti/lib/libcupti.so.12")
    machine.wheel("my-nvidia-cuda-cupti", "12.9.80", "other/libcupti.so.12")
    assert machine.choose(13, 5) == Candidate(path, (12, 9))


def test_a_wheel_without_its_library_is_passed_over(machine: Machine) -> None:
    """Images get slimmed."""
    Path(machine.wheel(*CU13)).unlink()
    path = machine.wheel(*CU12)
    assert machine.choose(13, 5).path == path


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
@pytest.mark.parametrize(
    "library",
    [
        "extras/CUPTI/lib64/libcupti.so.12",
        "lib64/libcupti.so.12",
        "targets/x86_64-linux/lib/libcupti.so.12",
        "targets/sbsa-linux/lib/libcupti.so.12",
        "lib/libcupti.so.12",
    ],
)
def test_a_toolkit_says_its_version(machine: Machine, variable: str, library: str) -> None:
    """In version.json, which is CUPTI's own and not that of CUDA as a whole."""
    path = machine.cuda("opt/cuda", told("12.9.79"), library)
    machine.environment = {variable: str(Path(path[: -len(library)]))}
    assert machine.choose(12, 9) == Candidate(path, (12, 9))
    assert "libcupti.so.12 is 12.9" in machine.refusal(12, 8)


@pytest.mark.parametrize(
    "version_json",
    [None, b"", b"{", b"[]", b"null", b'"text"', b'{"cuda_cupti": 7}', b'{"cuda_cupti": {}}', b"\xff", told("new")],
)
def test_a_toolkit_that_does_not_say_it_is_tried_all_the_same(machine: Machine, version_json: bytes | None) -> None:
    """Loading it will tell; unless its file is already named after a CUDA that the driver does not run."""
    path = machine.cuda("opt/cuda", version_json)
    machine.environment = {"CUDA_HOME": str(Path(path).parents[3])}
    assert machine.choose(12, 6) == Candidate(path, None)
    newer = machine.cuda("opt/cuda-13", version_json, "lib64/libcupti.so.13")
    machine.environment = {"CUDA_HOME": str(Path(newer).parents[1])}
    assert f"{newer} is 13" in machine.refusal(12, 9)


def test_a_version_that_is_told_beats_one_that_is_not(machine: Machine) -> None:
    """Even an older one: a wrong library would be found out only after loading it."""
    machine.environment = {"CUDA_HOME": str(Path(machine.cuda("opt/cuda", None)).parents[3])}
    path = machine.wheel("nvidia-cuda-cupti-cu12", "12.6.80", CU12[2])
    assert machine.choose(13, 0) == Candidate(path, (12, 6))


def test_the_loader_s_path_is_searched(machine: Machine) -> None:
    """With the version that the toolkit around a folder tells; empty and missing folders do no harm."""
    untold = machine.file(machine.system / "libcupti.so.12")
    assert machine.choose(12, 9) == Candidate(untold, None)
    path = machine.cuda("opt/cuda-12.8", told("12.8.90"))
    machine.environment = {"LD_LIBRARY_PATH": f":/nowhere::{Path(path).parent}:"}
    assert machine.choose(12, 9) == Candidate(path, (12, 8))


def test_other_files_are_no_library(machine: Machine) -> None:
    """Nor are CUDA 11's, and the names that only linkers use."""
    for name in ("libcupti.so", "libcupti.so.11", "libcupti.so.11.8", "libcupti.so.12.txt", "libcupti_static.a"):
        machine.file(machine.system / name)
    assert "no CUPTI" in machine.refusal(13, 0)


def test_places_in_order_of_preference(machine: Machine) -> None:
    """Of equally new ones: the wheel, CUDA_HOME, the usual toolkit, LD_LIBRARY_PATH."""
    loader = machine.cuda("opt/module", told("12.9.79"))
    machine.environment = {"LD_LIBRARY_PATH": str(Path(loader).parent)}
    assert machine.choose(13, 0).path == loader
    usual = machine.cuda("usr/local/cuda", told("12.9.79"))
    assert machine.choose(13, 0).path == usual
    home = machine.cuda("opt/cuda", told("12.9.79"))
    machine.environment["CUDA_HOME"] = str(Path(home).parents[3])
    assert machine.choose(13, 0).path == home
    wheel = machine.wheel(*CU12)
    assert machine.choose(13, 0).path == wheel


def test_between_12_6_and_12_9_the_newest_will_do(machine: Machine) -> None:
    """Though it lacks most counters, which the set of counters tells."""
    paths = [
        machine.wheel("nvidia-cuda-cupti-cu12", "12.6.80", "a/libcupti.so.12"),
        machine.wheel("nvidia-cuda-cupti-cu12", "12.8.90", "b/libcupti.so.12"),
        machine.wheel("nvidia-cuda-cupti-cu12", "12.5.82", "c/libcupti.so.12"),
    ]
    assert [machine.choose(12, minor).path for minor in (6, 7, 8, 9)] == [paths[0], paths[0], paths[1], paths[1]]
    assert machine.choose(13, 0).path == paths[1]


@pytest.mark.parametrize(
    ("driver", "remedy"),
    [
        ((13, 0), "pip install 'gpu-hpc-exporter[cupti]'"),
        ((12, 9), "pip install 'gpu-hpc-exporter[cupti]'"),
        ((12, 8), "pip install 'nvidia-cuda-cupti-cu12>=12.6,<12.9'"),
        ((12, 6), "pip install 'nvidia-cuda-cupti-cu12>=12.6,<12.7'"),
    ],
)
def test_none_names_the_remedy(machine: Machine, driver: Version, remedy: str) -> None:
    """One that the driver runs: what the extra installs is too new for a driver before 12.9."""
    text = machine.refusal(*driver)
    assert f"driver's {driver[0]}.{driver[1]}" in text
    assert text.endswith(f": {remedy}, or set pm_sampling.library")


def test_none_that_fits_is_told_with_what_was_found(machine: Machine) -> None:
    """Each once, though several variables may lead to it."""
    machine.wheel(*CU13)
    path = machine.cuda("opt/cuda", told("12.5.82"))
    home = str(Path(path).parents[3])
    machine.environment = {"CUDA_HOME": home, "CUDA_PATH": home, "LD_LIBRARY_PATH": str(Path(path).parent)}
    text = machine.refusal(12, 8)
    assert "libcupti.so.13 is 13.1" in text
    assert text.count(f"{path} is 12.5") == 1


def test_a_driver_that_is_too_old_is_told_so(machine: Machine) -> None:
    """No library would help."""
    machine.wheel(*CU12)
    text = machine.refusal(12, 4)
    assert "12.4" in text
    assert "pip" not in text


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        (0, (0, 0)),
        (18, (0, 0)),
        (23, (0, 0)),
        (24, (12, 6)),
        (26, (12, 8)),
        (27, (12, 9)),
        (28, (12, 9)),
        (29, (0, 0)),
        (99_999, (0, 0)),
        (120_900, (12, 9)),
        (130_000, (13, 0)),
        (130_101, (13, 1)),
        (2**32 - 1, (429496, 72)),
    ],
)
def test_versions_as_cupti_answers_them(answer: int, version: Version) -> None:
    """Numbers of its own before CUDA 13; what is garbage is older or newer than any driver, never one that fits."""
    assert version_of_api(answer) == version


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    """Told in one line that names it."""
    path = tmp_path / "libcupti.so.12"
    path.write_text("404 not found", "utf-8")
    with pytest.raises(LibraryUnusableError, match=rf"{path} is no CUPTI with PM sampling") as refusal:
        Cupti(str(path))
    assert "\n" not in str(refusal.value)


def test_a_library_that_is_no_cupti() -> None:
    """The C library stands for a CUPTI before 12.6: it has none of the calls."""
    with pytest.raises(LibraryUnusableError, match=r"libc\.so\.6 is no CUPTI with PM sampling"):
        Cupti("libc.so.6")


def test_a_companion_that_is_broken(tmp_path: Path) -> None:
    """CUPTI would only say `unknown` at its first call."""
    (tmp_path / "libnvperf_host.so").write_text("404 not found", "utf-8")
    with pytest.raises(LibraryUnusableError, match=r"libnvperf_host\.so cannot be loaded"):
        Cupti(str(tmp_path / "libcupti.so.12"))
