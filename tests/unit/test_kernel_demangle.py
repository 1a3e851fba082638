"""The worker that demangles, and what becomes of names that are made to hurt it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_hpc_exporter.sources.kernels import demangle
from gpu_hpc_exporter.sources.kernels.demangle import Demangler

ADD = b"_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"


@pytest.fixture
def demangler() -> Iterator[Demangler]:
    """One that keeps what it gets."""
    made = Demangler(lambda mangled, text: text or f"not demangled: {mangled[:20]}")
    yield made
    made.close()


def bomb(depth: int, function: str = "f") -> bytes:
    """A short name that doubles with each step: a pair of pairs of pairs."""
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    name = f"_Z{len(function)}{function}1AIiiE"
    for step in range(depth):
        reference = f"S{digits[step]}_" if step < 36 else f"S1{digits[step - 36]}_"
        name += f"S_I{reference}{reference}E"
    return name.encode()


def test_names_are_demangled_once(demangler: Demangler) -> None:
    """Those of C++; all others are what they are."""
    text = demangler.ask(ADD)
    assert text.startswith("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>")
    assert demangler.known(ADD) == text
    assert demangler.known(b"x") is None
    assert demangler.ask(b"_Z1fv.llvm.123") == "f()"
    assert demangler.ask(b"triton_poi_0\xff") == "triton_poi_0\N{REPLACEMENT CHARACTER}"
    assert demangler.lost == 0


@pytest.mark.parametrize("name", [bomb(36), b"_Z" + b"a" * 9000, b"_ZN\x00", b"_Z", b"_Z" + b"N" * 4000])
def test_names_that_cannot_be_demangled(demangler: Demangler, name: bytes) -> None:
    """Gigabytes, too long, broken, or deep: answered in time, and the next honest name as ever."""
    assert demangler.ask(name) == f"not demangled: {name[:20].decode()}"
    assert demangler.ask(ADD).startswith("void at::native")


def test_one_users_names_cost_only_that_user(demangler: Demangler) -> None:
    """After ten lost workers nothing of theirs is demangled any more; that of others is."""
    for number in range(30):
        assert demangler.ask(bomb(36, f"f{number}"), owner=1001).startswith("not demangled")
    assert demangler.lost == 10
    assert demangler.ask(ADD + b"1", owner=1001).startswith("not demangled")
    assert demangler.ask(ADD, owner=1002).startswith("void")


def test_a_name_that_becomes_long_is_cut(demangler: Demangler) -> None:
    """16 KiB are enough to tell a name."""
    assert len(demangler.ask(bomb(14))) == 16_384


def test_what_is_kept_is_bounded(demangler: Demangler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest names go."""
    monkeypatch.setattr(demangle, "MAX_NAMES", 3)
    for number in range(10):
        demangler.ask(b"%d" % number)
    assert len(demangler) == 3
    assert demangler.known(b"9") == "9"
    assert demangler.known(b"6") is None


def test_without_the_library_names_stay_mangled(tmp_path: Path) -> None:
    """A worker that does not start: every answer comes all the same."""
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit(1)\n")
    demangler = Demangler(lambda _, text: text or "none", worker)
    assert {demangler.ask(ADD + b"%d" % n) for n in range(20)} == {"none"}
    demangler.close()


def test_a_worker_ends_when_it_is_not_needed() -> None:
    """Half a minute without a new name; and it begins anew."""
    now = [0.0]
    demangler = Demangler(lambda _, text: text, clock=lambda: now[0])
    demangler.ask(ADD)
    demangler.rest()
    process = demangler._process  # noqa: SLF001  whether it is there is the point
    assert process is not None
    now[0] = 31
    demangler.rest()
    assert process.poll() is not None
    assert demangler.ask(b"_Z1fv") == "f()"
    demangler.close()


def test_the_worker_ends_with_its_input() -> None:
    """As when the exporter is killed."""
    worker = Path(demangle.__file__).with_name("demangle_worker.py")
    ended = subprocess.run([sys.executable, "-I", "-S", worker], input=b"", capture_output=True, timeout=20, check=True)
    assert ended.stdout == b""
