"""What one user's file can do to the figures of others: nothing beyond the GPUs that its process is on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from agent_files import AgentWriter
from exporter_process import Samples
from gpu_hpc_exporter.model import Gpu, GpuProcess, GpuProcesses, Job, Window
from gpu_hpc_exporter.samplers.kernel_ledger import MAX_KERNELS_OF_JOB, MAX_PAIRS
from gpu_hpc_exporter.samplers.kernels import NamingTime
from gpu_hpc_exporter.sources.kernels import layout
from unit.objects import G0, G1, NS, window
from unit.test_kernel_sampler import Node, executions, run

UNIX_NS = 1_700_000_000 * NS
"""Unix time when the samplers' clock shows 0."""
SLOWDOWN = "gpu_hpc_kernel_agent_slowdown_ratio"
REJECTED = "gpu_hpc_agent_files_rejected_total"
HONEST, LIAR = 101, 66
BERT = Job("bert", "123", "batch", "ann", source="slurm")
EVES = Job("evil", "666", "batch", "eve", source="slurm")


@dataclass
class Shared:
    """A node that two users share: one's process is on the first GPU, the other's on the second, if it is on any."""

    path: Path
    node: Node = field(init=False)
    on: dict[str, tuple[int, ...]] = field(init=False)
    """By UUID the files' pids of the processes that the driver lists."""

    def __post_init__(self) -> None:
        self.on = {G0.uuid: (HONEST,), G1.uuid: (LIAR,)}
        self.node = Node(self.path, G0, G1, unix_ns=UNIX_NS)
        self.honest = self.node.agent(HONEST, BERT, G0.uuid)

    def liar(self, *uuids: str, job: Job | None = EVES) -> AgentWriter:
        """The other user's file, with these GPUs in it."""
        return self.node.agent(LIAR, job, *(uuids or (G0.uuid,)))

    def unix(self, ago_s: float) -> int:
        """Unix time so long ago."""
        return UNIX_NS + self.node.clock() - round(ago_s * NS)

    def look(self, seconds: float = 5) -> Samples:
        """What is served after a look, whose GPUs the driver has told of before."""
        clock = self.node.clock
        clock.now_s += seconds
        for uuid, pids in self.on.items():
            listed = tuple(GpuProcess(10_000 + pid) for pid in pids)
            self.node.sampler.put(GpuProcesses(clock(), uuid, listed))
        self.node.sampler.tick()
        return self.node.scrape()

    def slowdown(self, lie: Callable[[int], object], gpu: Gpu = G0, looks: int = 24) -> float | None:
        """What is told of a GPU that gets on by a tenth more slowly while the honest agent traces it, a second in ten.

        `lie` is called before each look.
        """
        clock = self.node.clock
        for number in range(looks):
            begin_s = clock.now_s
            is_traced = number % 2 == 1
            if is_traced:
                self.honest.trace(self.unix(-3), self.unix(-4))
            for fifth in range(1, 26):
                slow = is_traced and 15 < fifth <= 20
                self.sample(begin_s + fifth / 5, 0.45 if slow else 0.5)
            clock.now_s += 5
            run(self.honest, {b"gemm": (10, 1000)})
            lie(number)
            samples = self.look(0)
        return samples.get(SLOWDOWN, uuid=gpu.uuid)

    def sample(self, end_s: float, pipe: float) -> None:
        """A hardware window of a fifth of a second, on both GPUs."""
        for uuid in (G0.uuid, G1.uuid):
            made: Window = window(end_s, {"pipe_tensor": pipe}, 0.2, uuid)
            self.node.fleet.put(made)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Shared]:
    """Its node."""
    shared = Shared(tmp_path)
    yield shared
    assert shared.node.sampler.stop()


def nothing(_: Shared, __: AgentWriter, ___: int) -> None:
    """No lie: so it is without one."""


def torn(_: Shared, writer: AgentWriter, __: int) -> None:
    """In the middle of writing, for ever."""
    if writer.sequence % 2 == 0:
        writer.begin()


def open_for_ever(shared: Shared, writer: AgentWriter, number: int) -> None:
    """Traces since it began."""
    if number == 0:
        writer.trace(shared.unix(1), 0)
    writer.publish()


def always(shared: Shared, writer: AgentWriter, _: int) -> None:
    """One trace after the other."""
    writer.trace(shared.unix(5), shared.unix(2.5))
    writer.trace(shared.unix(2.5), shared.unix(0.001))
    writer.publish()


def nonsense(shared: Shared, writer: AgentWriter, _: int) -> None:
    """Traces that end before they begin."""
    writer.trace(shared.unix(1), shared.unix(2))
    writer.publish()


def in_the_future(shared: Shared, writer: AgentWriter, _: int) -> None:
    """A trace of tomorrow."""
    writer.trace(shared.unix(-86_400), 0)
    writer.publish()


def a_flood_of_traces(shared: Shared, writer: AgentWriter, _: int) -> None:
    """More than the ring holds."""
    for place in range(layout.INTERVALS + 1):
        writer.trace(shared.unix(4 - place / 100), shared.unix(3.995 - place / 100))
    writer.publish()


def comes_and_goes(shared: Shared, writer: AgentWriter, _: int) -> None:
    """A file that is taken away while its process lives, and put back under another name."""
    name = writer.path.with_name(f"{LIAR}-100-{shared.node.clock():x}.shm")
    name.write_bytes(writer.path.read_bytes())
    writer.path.unlink(missing_ok=True)
    writer.path = name


LIES = (nothing, torn, open_for_ever, always, nonsense, in_the_future, a_flood_of_traces, comes_and_goes)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(
    ("is_on", "names"),
    [(True, ()), (True, (G0.uuid, G1.uuid)), (False, (G0.uuid, G1.uuid))],
    ids=["on a GPU, names none", "on a GPU, names all", "on none, names all"],
)
def test_a_file_silences_no_gpu_that_its_process_is_not_on(
    shared: Shared, lie: Callable[[Shared, AgentWriter, int], None], names: tuple[str, ...], *, is_on: bool
) -> None:
    """What tracing costs the first GPU is told, whatever the file of somebody else says who is not on it."""
    if not is_on:
        shared.on[G1.uuid] = ()
    liar = shared.node.agent(LIAR, EVES if is_on else None, *(names or ("GPU-" + "0" * 32,)))
    liar.next_window()
    liar.publish()
    found = shared.slowdown(lambda number: lie(shared, liar, number))
    assert found == pytest.approx(0.1, abs=0.01)


def jobs_on(samples: Samples, uuid: str) -> set[str]:
    """The jobs of which something is told there."""
    return {dict(row)["job"] for row in samples.all("gpu_hpc_kernel_traced_seconds_total", uuid=uuid)}


def both_gpus(writer: AgentWriter) -> None:
    """Another window, on two devices."""
    window_number = writer.next_window()
    for device in (0, 1):
        writer.kernel(b"gemm", device).run(window_number, 10, 1000)
    writer.beat()


def test_kernels_on_a_gpu_that_its_process_is_not_on(shared: Shared, caplog: pytest.LogCaptureFixture) -> None:
    """They are nobody's; counted and named once; those on its own GPU are its own, and none is lost meanwhile."""
    liar = shared.liar(G0.uuid, G1.uuid)
    for _ in range(5):
        both_gpus(liar)
        samples = shared.look()
    assert jobs_on(samples, G0.uuid) == {"bert"}
    assert jobs_on(samples, G1.uuid) == {"evil"}
    assert sum(executions(samples, uuid=G1.uuid).values()) == 50
    assert samples.one(REJECTED, reason="foreign_gpu") == 1
    assert [record.getMessage() for record in caplog.records if "foreign_gpu" in record.getMessage()] == [
        f"agent file {liar.path} of user {liar.path.stat().st_uid} is in part rejected: foreign_gpu"
    ]
    shared.on[G0.uuid] = (HONEST, LIAR)  # now it is
    shared.look()
    both_gpus(liar)
    samples = shared.look()
    assert sum(executions(samples, uuid=G0.uuid, job="evil").values()) == 10


def test_who_is_on_no_gpu_has_no_kernels(shared: Shared) -> None:
    """Not by its own word; nor does what it says of itself count among what all agents say."""
    shared.on[G1.uuid] = ()
    liar = shared.node.agent(LIAR, None, G0.uuid, JOB_NAME="mine")
    liar.state, liar.overhead, liar.records = "tracing", 1.0, [0, 10**9, 0, 0]
    for _ in range(8):
        run(liar, {b"gemm": (10, 1000)})
        samples = shared.look()
    assert jobs_on(samples, G0.uuid) == {"bert"}
    assert samples.one("gpu_hpc_agent_overhead_ratio") == shared.honest.overhead
    assert samples.one("gpu_hpc_agent_records_total", result="dropped") == 0
    assert samples.one(REJECTED, reason="foreign_gpu") == 1


def test_who_may_be_one_that_cannot_be_looked_up(shared: Shared) -> None:
    """Under hidepid: after a while its own word counts, as long as nobody can tell better."""
    shared.on[G1.uuid] = (77,)
    shared.node.owners.unseen.add(10_000 + 77)
    hidden = shared.node.agent(LIAR, None, G1.uuid, JOB_NAME="mine")
    for _ in range(5):
        run(hidden, {b"gemm": (10, 1000)})
        samples = shared.look()
    assert sum(executions(samples, uuid=G1.uuid, job="mine").values()) == 50


def test_a_process_that_lived_between_two_lists(shared: Shared) -> None:
    """It was on no list, and is no liar: it can have been nowhere long. When it was traced stays untold."""
    shared.on[G1.uuid] = ()
    short = shared.node.agent(LIAR, None, G1.uuid, JOB_NAME="mine")
    short.records = [40, 3, 2, 1]
    run(short, {b"gemm": (10, 1000)})
    shared.look()
    run(short, {b"gemm": (10, 1000)})
    short.end()
    for _ in range(6):
        samples = shared.look()
    assert sum(executions(samples, uuid=G1.uuid).values()) == 20
    assert samples.one("gpu_hpc_agent_records_total", result="dropped") == 3
    assert samples.one(REJECTED, reason="foreign_gpu") == 0


def test_a_process_that_the_driver_lists_late(shared: Shared) -> None:
    """Nothing of what it did before is lost, nor of one that has ended before the look."""
    shared.on[G1.uuid] = ()
    late = shared.liar(G1.uuid)
    for number in range(4):
        run(late, {b"gemm": (10, 1000)})
        if number == 2:
            shared.on[G1.uuid] = (LIAR,)
        samples = shared.look()
        assert sum(executions(samples, uuid=G1.uuid).values()) == (0 if number < 2 else 10 * (number + 1))
    assert samples.one(REJECTED, reason="foreign_gpu") == 0
    shared.on[G1.uuid] = (LIAR, 5)
    shared.look()
    short = shared.node.agent(5, EVES, G1.uuid)
    run(short, {b"gemm": (7, 1000)})
    short.end()
    shared.on[G1.uuid] = (LIAR,)
    assert sum(executions(shared.look(), uuid=G1.uuid).values()) == 47


def test_huge_sums_leave_others_their_series(shared: Shared) -> None:
    """On a GPU that both use: of two jobs each has half of the series, however busy the other says that it is."""
    shared.on[G0.uuid] = (HONEST, LIAR)
    liar = shared.liar(G0.uuid)
    for phase in range(6):
        run(liar, {b"evil%cx" % (65 + 12 * phase + n): (1, 10**15 * (phase + 1)) for n in range(12)})
        shared.look(30)
    assert len(executions(shared.node.scrape(), job="evil")) == 1 + MAX_KERNELS_OF_JOB
    run(shared.honest, {b"kernel%cx" % (65 + n): (100, 1000 + n) for n in range(12)})
    shared.look(30)
    run(shared.honest, {b"kernel%cx" % (65 + n): (100, 1000 + n) for n in range(12)})
    names = set(executions(shared.look(30), job="bert"))
    assert names == {"other", *(f"kernel{chr(65 + n)}x" for n in range(6, 12))}


def test_many_jobs_on_one_gpu_leave_others_their_names(shared: Shared) -> None:
    """Forty processes, each of a job of its own, on the second GPU, before anybody's on the first."""
    pids = tuple(range(1000, 1040))
    shared.on[G1.uuid] = pids
    for pid in pids:
        run(shared.node.agent(pid, Job(f"evil{pid}", source="environ"), G1.uuid), {b"x": (1, 1000)})
    samples = shared.look()
    assert len(jobs_on(samples, G1.uuid) - {"other"}) == MAX_PAIRS - 1
    run(shared.honest, {b"gemm": (10, 1000)})
    assert jobs_on(shared.look(), G0.uuid) == {"bert"}


@pytest.mark.parametrize("counter", [layout.D_TRACED, layout.D_BUSY, layout.D_IDLE_OTHER])
def test_no_more_than_the_time_that_has_passed(shared: Shared, counter: int) -> None:
    """A window of a year within five seconds: left out, counted once, and the next one counts."""
    shared.on[G0.uuid] = (HONEST, LIAR)
    liar = shared.liar(G0.uuid)
    run(liar, {b"gemm": (10, 1000)})
    shared.look()
    for _ in range(2):
        liar.add(counter, 365 * 86_400 * NS)
        run(liar, {b"gemm": (10, 1000)})
        samples = shared.look()
        assert samples.one("gpu_hpc_kernel_traced_seconds_total", job="evil") == 1
    run(liar, {b"gemm": (10, 1000)})
    samples = shared.look()
    assert samples.one("gpu_hpc_kernel_traced_seconds_total", job="evil") == 2
    assert samples.one("gpu_hpc_kernel_busy_seconds_total", job="evil") == 0
    assert samples.one(REJECTED, reason="wrong_times") == 1


def test_a_process_says_nothing_from_before_it_began(shared: Shared) -> None:
    """What a file has in it when it is first seen is no more than its process's age."""
    liar = AgentWriter(shared.path, LIAR, start_ticks=1 << 40, uuids=(G1.uuid,))
    shared.node.owners.jobs[LIAR] = EVES
    liar.add(layout.D_BUSY, 120 * NS)
    run(liar, {b"gemm": (10, 1000)})
    samples = shared.look()
    assert samples.one("gpu_hpc_kernel_busy_seconds_total", job="evil") == 0
    assert samples.one(REJECTED, reason="wrong_times") == 1


def test_odd_times_are_counted(shared: Shared) -> None:
    """On its own GPU a file may say nonsense, which is told of it once, and silences that GPU alone."""
    liar = shared.liar(G1.uuid)
    assert shared.slowdown(lambda number: nonsense(shared, liar, number), G1) is None
    samples = shared.node.scrape()
    assert samples.one(SLOWDOWN, uuid=G0.uuid) == pytest.approx(0.1, abs=0.01)
    assert samples.one(REJECTED, reason="wrong_times") == 1


def test_names_of_one_user_leave_others_time() -> None:
    """However long the names of each take, the next has half of what is left."""
    naming = NamingTime(0.1)
    shares = []
    for uid in range(5):
        count = 0
        while naming.has_some_for(uid):
            naming.spend(uid, 0.0001)
            count += 1
        shares.append(count)
    assert shares[0] == pytest.approx(500, abs=2)
    assert all(after == pytest.approx(before / 2, abs=2) for before, after in pairwise(shares))
    assert not naming.has_some_for(0)
    naming.spend(9, 0.5)  # a worker that had to be waited for
    assert not naming.has_some_for(10)
