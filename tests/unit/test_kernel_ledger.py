"""Everything that files count is told once, whatever is known when."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from agent_files import AgentWriter, Kernel
from gpu_hpc_exporter.samplers.kernel_ledger import KernelLedger
from gpu_hpc_exporter.sources.kernels.files import AgentFiles
from unit.objects import G0, NS

NAMES = [b"gemm", b"softmax", b"copy", b"x", b"fill"]


class Step(NamedTuple):
    """What runs (file, slot, executions), which names are known from now on, and whose each file is."""

    runs: list[tuple[int, int, int]]
    known: set[bytes]
    jobs: tuple[str, str, str]
    seconds: int


STEPS = st.builds(
    Step,
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 7), st.integers(1, 500)), max_size=6),
    st.sets(st.sampled_from(NAMES)),
    st.tuples(*[st.sampled_from(["a", "b"])] * 3),
    st.integers(1, 50),
)
LAST = Step([], set(NAMES), ("a", "b", "a"), 5)


@settings(deadline=None, max_examples=60)
@given(steps=st.lists(STEPS, max_size=12), top_k=st.integers(1, 3))
def test_every_execution_is_told_once(steps: list[Step], top_k: int) -> None:
    """Of three files, slots of equal names, names that are found late, jobs whose names change, series that begin."""
    with TemporaryDirectory() as directory:
        _play(Path(directory), steps, top_k)


def _play(path: Path, steps: list[Step], top_k: int) -> None:
    ledger, files, now_ns = KernelLedger(top_k), AgentFiles(path), 0
    assert not [*files.scan()]
    writers = [AgentWriter(path, pid, uuids=(G0.uuid,)) for pid in range(3)]
    known: set[bytes] = set()

    def name_of(name: bytes) -> str | None:
        return name.decode() if name in known else None

    told: Counter[str] = Counter()
    ran: Counter[str] = Counter()
    for step in (*steps, LAST):
        known.update(step.known)
        now_ns += step.seconds * NS
        for number, slot, count in step.runs:
            _run(writers[number], slot, count)
            ran.update({"executions": count, "ns": count * 1000, NAMES[slot % 5].decode(): count})
        for writer in writers:
            writer.next_window()
            writer.beat()
        for file, reading in files.scan():
            assert reading is not None
            ledger.take(file, reading, partial(_place, step.jobs[file.pid]), name_of, now_ns)
        for activity in ledger.report(now_ns, lambda *_: True, lambda *_: True):
            for name, amount in activity.kernels.items():
                told.update({"executions": amount.executions, "ns": amount.ns, name: amount.executions})
                assert amount.executions == amount.launches >= 0
            told["buckets"] += sum(sum(row.buckets) for row in activity.durations.values())
    for writer in writers:
        writer.end()
    assert told["executions"] == told["buckets"] == ran["executions"]
    assert told["ns"] == ran["ns"]
    assert all(told[name.decode()] <= ran[name.decode()] for name in NAMES)


def test_files_are_not_looked_at_together_after_a_stall(tmp_path: Path) -> None:
    """A kernel that begins to run gets series when its file's slots are looked at, of one file after the other."""
    ledger, files = KernelLedger(top_k=24), AgentFiles(tmp_path)
    assert not [*files.scan()]
    writers = [AgentWriter(tmp_path, pid, uuids=(G0.uuid,)) for pid in range(6)]
    for writer in writers:
        writer.kernels = [Kernel(b"always"), Kernel(b"late")]

    def look(second: int, running: int) -> int:
        for writer in writers:
            for slot in range(running):
                _run(writer, slot, 1)
            writer.next_window()
            writer.beat()
        for file, reading in files.scan():
            assert reading is not None
            ledger.take(file, reading, partial(_place, f"job{file.pid}"), bytes.decode, second * NS)
        told = ledger.report(second * NS, lambda *_: True, lambda *_: True)
        return sum("late" in activity.kernels for activity in told)

    before = [look(second, 1) for second in (*range(0, 40, 5), 100)]
    after = [look(second, 2) for second in range(105, 135, 5)]
    for writer in writers:
        writer.end()
    assert set(before) == {0}
    assert after == [1, 2, 3, 4, 5, 6]


def _place(job: str, uuid: str) -> tuple[str, str]:
    assert uuid == "00000000aaaabbbbcccc000000000000"
    return G0.uuid, job


def _run(writer: AgentWriter, slot: int, count: int) -> None:
    while len(writer.kernels) <= slot:
        writer.kernels.append(Kernel(NAMES[len(writer.kernels) % 5]))
    writer.kernels[slot].run(writer.window + 1, count, 1000)
