"""The worker that demangles, and what becomes of names that are made to hurt it."""

from __future__ import annotations

import logging
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_hpc_exporter.sources.kernels import demangle
from gpu_hpc_exporter.sources.kernels.demangle import Demangler

ADD = b"_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_15CUDAFunctor_addIfEESt5arrayIPcLm3EEEEviT0_T1_"


WORKER = Path(demangle.__file__).with_name("demangle_worker.py")


class Made:
    """Demanglers that keep what they get, by a clock of the test's own, all ended with it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.all: list[Demangler] = []

    def __call__(self, worker: Path = WORKER) -> Demangler:
        """One more."""

        def finish(mangled: str, text: str) -> str:
            return text or f"not demangled: {mangled[:20]}"

        self.all.append(Demangler(finish, worker, lambda: self.now_s))
        return self.all[-1]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """They wait for as long as a slow machine takes."""
    monkeypatch.setattr(demangle, "_PATIENCE_S", 60)
    making = Made()
    yield making
    for demangler in making.all:
        demangler.close()


@pytest.fixture
def demangler(made: Made) -> Demangler:
    """One of them."""
    return made()


def process_of(demangler: Demangler) -> subprocess.Popen[bytes]:
    """Its worker."""
    process = demangler._process  # noqa: SLF001  what becomes of it is the point
    assert process is not None
    return process


def wait_for_answer(demangler: Demangler) -> None:
    """Until its worker has written something, or has ended."""
    stdout = process_of(demangler).stdout
    assert stdout is not None
    assert select.select([stdout], [], [], 60)[0]


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
    assert str(text).startswith("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>")
    assert demangler.known(ADD) == text
    assert demangler.known(b"x") is None
    assert demangler.ask(b"_Z1fv.llvm.123") == "f()"
    assert demangler.ask(b"triton_poi_0\xff") == "triton_poi_0\N{REPLACEMENT CHARACTER}"
    assert demangler.lost == 0


@pytest.mark.parametrize("name", [bomb(36), b"_Z" + b"a" * 9000, b"_ZN\x00", b"_Z", b"_Z" + b"N" * 4000])
def test_names_that_cannot_be_demangled(demangler: Demangler, name: bytes) -> None:
    """Gigabytes, too long, broken, or deep: answered in time, and the next honest name as ever."""
    assert demangler.ask(name) == f"not demangled: {name[:20].decode()}"
    assert str(demangler.ask(ADD)).startswith("void at::native")


def test_one_users_names_cost_only_that_user(made: Made, demangler: Demangler) -> None:
    """After ten lost workers nothing of theirs is demangled for an hour; that of others is, and the same names too."""
    for number in range(30):
        name = bomb(36, f"f{number}")
        assert demangler.ask(name, owner=1001) == f"not demangled: {name[:20].decode()}"
    assert demangler.lost == 10
    assert demangler.ask(bomb(36, "f0"), owner=1002) == "not demangled: _Z2f01AIiiES_IS0_S0_"
    assert demangler.lost == 10  # what a worker has ended at is not tried again
    assert demangler.ask(ADD, owner=1001) == "not demangled: _ZN2at6native29vecto"
    assert demangler.known(ADD) is None
    made.now_s = 3599
    assert demangler.ask(ADD, owner=1001) == "not demangled: _ZN2at6native29vecto"
    assert str(demangler.ask(ADD, owner=1002)).startswith("void")
    assert demangler.ask(b"_Z1fv", owner=1001) == "not demangled: _Z1fv"
    made.now_s = 3600
    assert demangler.ask(b"_Z1fv", owner=1001) == "f()"


def test_slow_moments_cost_nobody(demangler: Demangler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is held up is neither waited for again nor lost, no name is known wrongly, and all come later."""
    assert demangler.ask(b"_Z1fv") == "f()"
    process = process_of(demangler)
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(demangle, "_PATIENCE_S", 0)
    names = [b"_Z1%cv" % letter for letter in b"abcdeghijklm"]
    assert {demangler.ask(name, 0) for name in names} == {None}
    assert {demangler.known(name) for name in names} == {None}
    process.send_signal(signal.SIGCONT)
    wait_for_answer(demangler)
    monkeypatch.setattr(demangle, "_PATIENCE_S", 60)
    assert [demangler.ask(name, 0) for name in names] == [f"{chr(letter)}()" for letter in b"abcdeghijklm"]
    assert demangler.lost == 0
    assert process_of(demangler) is process


def test_a_slow_start_is_waited_for(demangler: Demangler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that starts is the one that answers, to whoever asks then."""
    monkeypatch.setattr(demangle, "_PATIENCE_S", 0)
    assert demangler.ask(bomb(36), 1001) is None
    process = process_of(demangler)
    assert demangler.ask(ADD, 1002) is None
    assert process_of(demangler) is process
    wait_for_answer(demangler)
    monkeypatch.setattr(demangle, "_PATIENCE_S", 60)
    assert str(demangler.ask(ADD, 1002)).startswith("void")
    assert demangler.known(bomb(36)) is not None  # that its worker ended was found out by the way
    assert demangler.lost == 1


def test_a_worker_that_never_answers(made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is another one after half a minute; after ten minutes names come as they are, once that has been told."""
    worker = tmp_path / "worker.py"
    worker.write_text("import sys\nsys.stdin.buffer.read()\n")
    demangler = made(worker)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(demangle, "_PATIENCE_S", 0)
        workers = set()
        for made.now_s in range(0, 600, 10):
            assert demangler.ask(b"_Z1fv") is None
            workers.add(process_of(demangler).pid)
            demangler.rest()
        assert len(workers) == 12
        for made.now_s in (600, 610):
            assert demangler.ask(b"_Z1fv") == "not demangled: _Z1fv"
        assert [record.getMessage() for record in caplog.records] == [
            "kernels' names cannot be demangled: the process that does it does not start or answer"
        ]
    worker.write_bytes(WORKER.read_bytes())
    made.now_s = 700
    demangler.rest()
    assert demangler.ask(b"_Z1fv") == "f()"
    assert demangler.lost == 0


def test_an_old_silence_is_over(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a worker was slow an hour ago makes no name of now come as it is."""
    demangler = made()
    monkeypatch.setattr(demangle, "_PATIENCE_S", 0)
    assert demangler.ask(b"_Z1fv") is None
    made.now_s = 3600
    demangler.rest()
    assert demangler.ask(b"_Z1gv") is None


def test_a_worker_that_cannot_be_started(demangler: Demangler) -> None:
    """For want of a process, say: the name waits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere")
        assert demangler.ask(b"_Z1fv") is None
    assert demangler.ask(b"_Z1fv") == "f()"
    process_of(demangler).kill()
    process_of(demangler).wait()
    assert demangler.ask(b"_Z1gv") is None  # it ended while nobody asked
    assert demangler.ask(b"_Z1gv") == "g()"
    assert demangler.lost == 0


def test_a_name_that_waits_for_ever_ends_its_worker() -> None:
    """One that uses no CPU time, as where there is no memory: the exporter cannot tell it from a slow machine."""
    program = (
        f"import sys, signal; sys.path.insert(0, {str(WORKER.parent)!r}); import demangle_worker as worker\n"
        "worker._SECONDS = 0.01\n"
        "worker._functions = lambda: (lambda *_: signal.pause(), None)\n"
        "worker.main()\n"
    )
    command = [sys.executable, "-I", "-c", program]
    ended = subprocess.run(command, input=b"\5\0\0\0_Z1fv", capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (-signal.SIGALRM, b"")


def test_a_name_that_becomes_long_is_cut(demangler: Demangler) -> None:
    """16 KiB are enough to tell a name."""
    assert len(str(demangler.ask(bomb(14)))) == 16_384


def test_what_is_kept_is_bounded(demangler: Demangler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest names go."""
    monkeypatch.setattr(demangle, "MAX_NAMES", 3)
    for number in range(10):
        demangler.ask(b"%d" % number)
    assert len(demangler) == 3
    assert demangler.known(b"9") == "9"
    assert demangler.known(b"6") is None


def test_without_the_library_names_stay_mangled(made: Made, tmp_path: Path) -> None:
    """A worker that does not start: every answer comes all the same."""
    worker = tmp_path / "worker.py"
    worker.write_text("raise SystemExit(1)\n")
    demangler = made(worker)
    assert {demangler.ask(ADD + b"%d" % n) for n in range(20)} == {f"not demangled: {ADD[:20].decode()}"}


def test_a_worker_ends_when_it_is_not_needed(made: Made, demangler: Demangler) -> None:
    """Half a minute without a new name; and it begins anew."""
    demangler.ask(ADD)
    demangler.rest()
    process = process_of(demangler)
    made.now_s = 31
    demangler.rest()
    assert process.poll() is not None
    assert demangler.ask(b"_Z1fv") == "f()"


def test_the_worker_ends_with_its_input() -> None:
    """As when the exporter is killed."""
    ended = subprocess.run([sys.executable, "-I", "-S", WORKER], input=b"", capture_output=True, timeout=20, check=True)
    assert ended.stdout == b""
