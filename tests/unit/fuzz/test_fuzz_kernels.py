"""What kernel agents' files hold, and what a worker answers that demangles names."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agent_files import AgentWriter
from gpu_hpc_exporter.config import Agent
from gpu_hpc_exporter.diagnosis.kernels import MAX_NAME, category, name_within, signature
from gpu_hpc_exporter.model import Event, Job, KernelReport
from gpu_hpc_exporter.samplers.identities import AgentClaim, Placement
from gpu_hpc_exporter.samplers.kernels import KernelSampler
from gpu_hpc_exporter.sources.kernels import layout
from gpu_hpc_exporter.sources.kernels.demangle import Demangler
from gpu_hpc_exporter.sources.kernels.demangle_worker import MAX_OUTPUT
from gpu_hpc_exporter.sources.kernels.files import REASONS, AgentFiles
from gpu_hpc_exporter.sources.recording import Line, decode_line, encode_event
from gpu_hpc_exporter.text import MAX_BYTES
from unit.fuzz.foreign import foreign, fuzz, is_label, soon
from unit.objects import G0, G1, NS, Clock, inventory

PARTS = {
    "identity": (0, layout.IDENTITY.size),
    "sequence": (layout.SEQUENCE_OFFSET, layout.SEQUENCE.size),
    "status": (layout.STATUS_OFFSET, layout.STATUS.size),
    "intervals": (layout.INTERVALS_OFFSET, layout.INTERVAL.size * 4),
    "environment": (layout.ENVIRONMENT_OFFSET, 64),
    "devices": (layout.DEVICE_OFFSET, 2 * layout.DEVICE_SIZE),
    "kernels": (layout.KERNEL_OFFSET, 4 * layout.KERNEL_SIZE),
    "overflow": (layout.OVERFLOW_OFFSET, 2 * layout.KERNEL_SIZE),
    "names": (layout.STRINGS_OFFSET, 80),
}
WORDS = (
    *(struct.pack("<Q", 1 << power) for power in (0, 12, 31, 59, 60, 63)),
    *(struct.pack("<d", value) for value in (math.nan, math.inf, -math.inf, -1.0, 1e29, 1e31, 1e308)),
    *(b"\xff" * 8, b"\xff" * 4, b"\0" * 16, struct.pack("<I", layout.KERNELS), struct.pack("<I", layout.STRINGS)),
)


@dataclass(frozen=True)
class Overwritten:
    """Bytes at a place of a part of the file."""

    part: str
    place: int
    data: bytes

    def apply(self, writer: AgentWriter) -> None:
        """Aligned, mostly, since what stands there is."""
        offset, size = PARTS[self.part]
        at = self.place % size
        writer.write(offset + (at if self.place % 5 == 0 else at & ~7), self.data)


DAMAGE = st.builds(
    Overwritten,
    st.sampled_from(sorted(PARTS)),
    st.integers(0, 4096),
    st.sampled_from(WORDS) | st.binary(min_size=1, max_size=12),
)


class Notes:
    """The reports that a sampler makes."""

    def __init__(self) -> None:
        self.reports: list[KernelReport] = []

    def put(self, event: Event) -> None:
        """Keep a report."""
        if isinstance(event, KernelReport):
            self.reports.append(event)


class Owners:
    """Every process is the same job's."""

    can_tell = True

    def job_of_agent(self, claim: AgentClaim, _: Callable[[int], bool]) -> Placement:
        """By the claim's pid."""
        return Placement(Job("bert", "1", source="slurm"), claim.pid)

    def has_seen(self, _: int) -> bool:
        """All of them."""
        return True

    def declared_job(self, _: AgentClaim) -> Job:
        """Never asked."""
        return Job("x")


def write(folder: Path, pid: int) -> AgentWriter:
    """A file with kernels on two devices, and a window."""
    writer = AgentWriter(folder, pid, uuids=(G0.uuid, G1.uuid), environment={"RANK": "3"})
    run(writer)
    return writer


def run(writer: AgentWriter) -> None:
    """Another window, in which everything runs."""
    window = writer.next_window()
    for name, device in ((b"gemm", 0), (b"_Z4fillv", 0), (b"x" * 40, 1)):
        writer.kernel(name, device).run(window, 200, 5000, 2000)
    writer.trace(writer.heartbeat_ns - NS, writer.heartbeat_ns)
    writer.publish()


def check_report(report: KernelReport) -> None:
    """It can be recorded, and played again; no amount in it is negative or no number."""
    line = encode_event(report, 0)
    (played,) = decode_line(msgspec.json.decode(msgspec.json.encode(line), type=Line), 0)
    assert played == replace(report, pids=None)  # of no meaning elsewhere
    for activity in report.activities:
        assert activity.uuid in {G0.uuid, G1.uuid}
        assert all(is_label(name, MAX_BYTES) for name in activity.kernels)
    assert report.overhead_ratio is None or 0 <= report.overhead_ratio <= 1
    assert set(report.rejected) <= set(REASONS)


@given(st.lists(st.lists(DAMAGE, max_size=3), min_size=1, max_size=3))
@fuzz(60)
@example(
    [[], [Overwritten("kernels", 64, struct.pack("<d", 1e300))], [Overwritten("kernels", 64, b"\xff" * 7 + b"\x7f")]]
)
@example([[], [Overwritten("kernels", 64, struct.pack("<d", 1e31))]])
@example(
    [[], [Overwritten("kernels", 64 + layout.KERNEL_SIZE * slot, struct.pack("<d", 9e28)) for slot in range(2)]] * 9
)
@example([[Overwritten("status", 8 * word, b"\xff" * 8) for word in range(3)]] * 2)
def test_agents_files(looks: list[list[Overwritten]]) -> None:
    """Whatever stands in a file, look after look: reports that can be recorded, and the honest file beside it whole."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        notes, clock = Notes(), Clock(10)
        sampler = KernelSampler(notes, Agent(name), clock)
        owners = Owners()
        sampler.use_owners(lambda: owners)
        sampler.put(inventory(G0, G1))
        sampler.tick()
        honest, other = write(folder, 101), write(folder, 102)
        executions = 0
        for damages in looks:
            for damage in damages:
                damage.apply(other)
            clock.now_s += 5
            sampler.tick()
            run(honest)
            run(other)
        for damage in looks[-1]:
            damage.apply(other)
        clock.now_s += 5
        sampler.tick()
        for report in notes.reports:
            check_report(report)
            executions += sum(
                kernel.executions for activity in report.activities for kernel in activity.kernels.values()
            )
        assert executions >= 600 * (len(looks) + 1)
        assert all(
            kernel.deviation_ns2 >= 0
            for report in notes.reports
            for one in report.activities
            for kernel in one.kernels.values()
        )
        for writer in (honest, other):
            writer.end()
        assert sampler.stop()


@given(
    st.integers(0, 3),
    foreign(layout.MAGIC + b"\1\0\0\0", tokens=(layout.MAGIC,)),
    st.sampled_from((0, layout.FILE_SIZE)),
)
@fuzz(60)
def test_small_files(number: int, content: bytes, size: int) -> None:
    """Any file of a right name, short or as long as it should be: rejected by one of the reasons."""
    with TemporaryDirectory() as name:
        file = Path(name) / f"1-{number}-a.shm"
        with file.open("wb") as opened:
            opened.write(content)
            opened.truncate(size or len(content))
        files = AgentFiles(Path(name))
        assert list(files.scan()) == []
        assert sum(files.rejected.values()) == 1


ANSWER = struct.pack("<I", 3) + b"f()"


@pytest.fixture(scope="module")
def worker() -> Iterator[tuple[Path, Path]]:
    """A worker that answers what stands in a file, and that file."""
    with TemporaryDirectory() as name:
        answers, program = Path(name) / "answers", Path(name) / "worker.py"
        program.write_text(
            f"import sys\nsys.stdin.buffer.read(8)\nsys.stdout.buffer.write(open({str(answers)!r}, 'rb').read())\n"
        )
        yield program, answers


@given(foreign(ANSWER, tokens=(b"\xff\xff\xff\x7f", struct.pack("<I", MAX_OUTPUT), struct.pack("<I", MAX_OUTPUT + 1))))
@fuzz(40)
@example(struct.pack("<I", MAX_OUTPUT) + b"x" * MAX_OUTPUT)
@example(struct.pack("<I", MAX_OUTPUT + 1) + b"x" * (MAX_OUTPUT + 1))
@example(struct.pack("<I", 2) + b"\xff\xfe")
def test_workers_answers(worker: tuple[Path, Path], answer: bytes) -> None:
    """Any bytes of a worker: a name of its own length, whole, or the mangled one; the next worker is asked anew."""
    program, answers = worker
    answers.write_bytes(answer)
    demangler = Demangler(lambda mangled, text: text or mangled, program)
    found = demangler.ask(b"_Z1fv")
    length = int.from_bytes(answer[:4], "little") if len(answer) >= 4 else -1
    if 0 < length <= MAX_OUTPUT and len(answer) >= 4 + length:
        assert (found, demangler.lost) == (answer[4 : 4 + length].decode("utf-8", "replace"), 0)
    else:
        assert (found, demangler.lost) == ("_Z1fv", int(length != 0))
    demangler.close()


NAMES = (
    b"void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>(int)",
    b"_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfEEEEvT1_",
    b"triton_poi_fused_add_0d1d2de",
    b"void (anonymous namespace)::f<(int)1>(int, void (*)(int))",
)
TOKENS = (b"<", b">", b"::", b"(anonymous namespace)::", b"Functor", b"_12", b"[abi:", b"999", b"_ZN", b"operator")


@given(foreign(*NAMES, tokens=TOKENS))
@fuzz(250)
@example(b"a_" + b"1" * 60 + b"x")
@example(b"a" + b"_12" * 3000 + b"x")
def test_names_of_kernels(name: bytes) -> None:
    """Any name, mangled or not: a signature that can be a label and is its own; and a kind."""
    text = name.decode("utf-8", "replace")
    for plain in (text, name_within(text)):
        found = signature(plain)
        assert is_label(found, MAX_BYTES)
        assert found
        assert signature(found) == found
        assert category(found) == category(found)


@pytest.mark.parametrize("piece", [*TOKENS, b"a<", b"f(", b" ", b"_", b"1a", b"9" * 4, b"{}", b"&*", b"Op>", b"1d"])
def test_long_names_of_kernels(piece: bytes) -> None:
    """In linear time, up to what is looked at."""
    with soon():
        for start, end in (("", ""), ("a_", "x"), ("_Z1", "_")):
            text = start + (piece * (MAX_NAME // len(piece))).decode() + end
            assert len(signature(text[:MAX_NAME]).encode()) <= MAX_BYTES
            name_within("_ZN" + text)
