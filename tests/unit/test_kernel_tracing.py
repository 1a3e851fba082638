"""When agents traced, from their files: by the samplers' clock, and unknown rather than wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_files import AgentWriter
from gpu_hpc_exporter.model import Tracing
from gpu_hpc_exporter.samplers.tracing import ODD_LOOKS, STEP_NS, Moment, TracingTimes, is_named
from gpu_hpc_exporter.sources.kernels import layout
from gpu_hpc_exporter.sources.kernels.files import AgentFile, AgentFiles
from gpu_hpc_exporter.sources.recording import MAX_SPANS
from unit.objects import G0, G1, NS

MS = 1_000_000
UNIX_NS = 1_700_000_000 * NS
"""Unix time when the samplers' clock shows 0."""
GPUS = {gpu.uuid.partition("-")[2].replace("-", ""): gpu.uuid for gpu in (G0, G1)}
UNKNOWN = {G0.uuid: None}
Told = Mapping[str, Tracing | None] | None


class Host:
    """A directory of agents and the two clocks, which a test sets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = AgentFiles(path)
        self.times = TracingTimes()
        self.unix_ns = UNIX_NS
        self.now_ns = 100 * NS

    def agent(self, pid: int = 101, *uuids: str) -> AgentWriter:
        """A process that has published a window."""
        writer = AgentWriter(self.path, pid, uuids=uuids or (G0.uuid,))
        writer.next_window()
        writer.publish()
        return writer

    def unix(self, ago_s: float) -> int:
        """Unix time so long ago, by a clock that shows what it shows now."""
        return self.unix_ns + self.now_ns - round(ago_s * NS)

    def trace(self, writer: AgentWriter, begin_ago_s: float, end_ago_s: float | None) -> tuple[int, int]:
        """An interval of an agent's; None: it goes on."""
        interval = self.unix(begin_ago_s), 0 if end_ago_s is None else self.unix(end_ago_s)
        writer.trace(*interval)
        writer.publish()
        return interval

    def look(self, later_s: float = 0, scan_s: float = 0) -> Told:
        """What a look so much later tells, which lasts so long."""
        self.now_ns += round(later_s * NS)
        files = [(file, self.reach(file)) for file, _ in self.files.scan()]
        moment = Moment(self.now_ns, self.unix_ns + self.now_ns, self.now_ns + round(scan_s * NS))
        return self.times.look(moment, files)

    def reach(self, file: AgentFile) -> frozenset[str]:
        """Whoever has named no device yet is known to be on the first GPU."""
        named = (GPUS[uuid] for uuid in file.uuids if uuid in GPUS)
        return frozenset(named if is_named(file) else {G0.uuid})


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host that has been looked at twice while nothing was there."""
    host = Host(tmp_path)
    assert host.look() is None  # what was before is unknown
    assert host.look(5) == {}
    return host


def ns(begin_s: float, end_s: float) -> tuple[int, int]:
    """Seconds as nanoseconds."""
    return round(begin_s * NS), round(end_s * NS)


def test_intervals_by_gpu(host: Host) -> None:
    """Those that have ended since the last look, each once, of all processes; and how long others have lasted."""
    both, one = host.agent(101, G0.uuid, G1.uuid), host.agent(102, G1.uuid)
    host.now_ns += 5 * NS
    host.trace(both, 4, 3)
    host.trace(both, 2, 1)
    host.trace(one, 3.5, 2.5)
    begin_ns, _ = host.trace(one, 0.5, None)
    told = host.look()
    assert told is not None
    assert told[G0.uuid] == Tracing((ns(4, 3), ns(2, 1)))
    other = told[G1.uuid]
    assert other is not None
    assert sorted(other.ended) == [ns(2, 1), ns(3.5, 2.5), ns(4, 3)]
    assert other.open_ns == NS // 2
    one.trace(begin_ns, host.unix(-0.5))
    one.publish()
    assert host.look(5) == {G1.uuid: Tracing((ns(5.5, 4.5),))}
    assert host.look(5) == {}


def test_a_ring_that_goes_round(host: Host) -> None:
    """Interval 64 takes the place of the first; those that were lost in between cannot be told."""
    writer = host.agent()
    for number in range(70):
        host.now_ns += 5 * NS
        host.trace(writer, 4, 3)
        assert host.look() == {G0.uuid: Tracing((ns(4, 3),))}, number
    host.now_ns += 5 * NS
    for number in range(layout.INTERVALS + 1):
        host.trace(writer, 4 - number / 100, 3.995 - number / 100)
    assert host.look() == UNKNOWN
    assert host.look(5) == {}


def test_an_interval_that_ends_during_the_look(host: Host) -> None:
    """A look tells of the time before it; what was written while it read the files is the next one's."""
    writer = host.agent()
    host.now_ns += 5 * NS
    host.trace(writer, 1, -0.1)
    writer.trace(host.unix(-0.2), host.unix(-0.3))
    writer.publish()
    assert host.look(scan_s=0.4) == {G0.uuid: Tracing((), NS)}
    assert host.look(5) == {G0.uuid: Tracing((ns(6, 4.9), ns(4.8, 4.7)))}


@pytest.mark.parametrize("step_s", [3600.0, 0.5, 0.03, -0.03, -0.5, -3600.0])
@pytest.mark.parametrize("ends_before_the_step", [True, False])
def test_a_clock_that_is_set(host: Host, step_s: float, *, ends_before_the_step: bool) -> None:
    """P02: what was traced around the step is unknown; later intervals are exact. None is negative or in the future."""
    writer = host.agent()
    host.now_ns += 5 * NS
    begin_ns, _ = host.trace(writer, 0.5, None)
    assert host.look() == {G0.uuid: Tracing((), NS // 2)}
    host.now_ns += 5 * NS
    if ends_before_the_step:
        writer.trace(begin_ns, host.unix(4.5))
    host.unix_ns += round(step_s * NS)
    writer.publish()
    assert host.look() is None
    host.now_ns += 5 * NS
    if not ends_before_the_step:
        writer.trace(begin_ns, host.unix(3))
    host.trace(writer, 2, 1)
    later = host.look()
    # Of the one that went on at the step only what was after that look is known: that it did.
    assert later == {G0.uuid: Tracing((ns(2, 1),) if ends_before_the_step else (ns(5, 3), ns(2, 1)))}


def test_a_clock_that_is_slewed(host: Host) -> None:
    """500 ppm are no step; an interval is as long as it was when it began and ended."""
    writer = host.agent()
    for _ in range(20):
        host.now_ns += 10 * NS
        host.unix_ns += 5 * MS
        host.trace(writer, 3, 2)
        assert host.look() == {G0.uuid: Tracing((ns(3, 2),))}
    assert STEP_NS > 5 * MS


Case = Callable[[Host], object]
DOUBTS: Mapping[str, Case] = {
    "an end before the begin": lambda host: host.trace(host.agent(), 2, 3),
    "in the future": lambda host: host.trace(host.agent(), -100, None),
    "ends in the future": lambda host: host.trace(host.agent(), 2, -100),
    "before the last look": lambda host: host.trace(host.agent(), 20, 19),
    "begun before the last look": lambda host: host.trace(host.agent(), 20, 1),
    "gone on since before the last look": lambda host: host.trace(host.agent(), 20, None),
    "no end, and others after it": lambda host: (
        host.trace(writer := host.agent(), 3, None),
        host.trace(writer, 2, 1),
    ),
    "no device yet": lambda host: host.trace(AgentWriter(host.path, 101), 2, 1),
    "a device without UUID": lambda host: host.trace(host.agent(101, "GPU-" + "0" * 32), 2, 1),
    "too many": lambda host: [
        host.trace(writer, 4 - number / 100, 3.995 - number / 100)
        for writer in [host.agent(100 + process) for process in range(MAX_SPANS // 64 + 1)]
        for number in range(64)
    ],
}


@pytest.mark.parametrize("case", DOUBTS.values(), ids=DOUBTS.keys())
def test_what_leaves_doubts(host: Host, case: Case) -> None:
    """One look tells nothing of that GPU, and the one after it, when all is as it should be, does; others always do."""
    writer, elsewhere = host.agent(1), host.agent(2, G1.uuid)
    host.now_ns += 5 * NS
    kept = case(host)
    host.trace(writer, 2, 1)
    host.trace(elsewhere, 2, 1)
    assert host.look() == {G0.uuid: None, G1.uuid: Tracing((ns(2, 1),))}
    for path in host.path.iterdir():
        if path not in {writer.path, elsewhere.path}:
            path.unlink()
    host.look(5)
    host.now_ns += 5 * NS
    host.trace(writer, 2, 1)
    assert host.look() == {G0.uuid: Tracing((ns(2, 1),))}
    del kept


def test_a_process_that_ends_while_it_traces(host: Host) -> None:
    """Nobody knows when it stopped: one look tells nothing, later ones do not mind the file."""
    writer = host.agent()
    host.now_ns += 5 * NS
    host.trace(writer, 1, None)
    assert host.look() == {G0.uuid: Tracing((), NS)}
    writer.end()
    assert host.look(5) == UNKNOWN
    assert host.look(5) == {}


def test_a_process_that_ends_in_between(host: Host) -> None:
    """Its last interval is told, then nothing more, neither with its file nor without it."""
    writer = host.agent()
    host.now_ns += 5 * NS
    host.trace(writer, 3, 2)
    writer.end()
    assert host.look() == {G0.uuid: Tracing((ns(3, 2),))}
    assert host.look(5) == {}
    writer.path.unlink()
    assert host.look(5) == {}


def test_a_file_that_is_being_written(host: Host) -> None:
    """Neither a new one nor a known one can tell at that look."""
    for pid in (101, 102):
        writer = host.agent(pid)
        if pid == 102:
            assert host.look(5) == {}
        writer.begin()
        assert host.look(5) == UNKNOWN
        writer.publish()
        assert host.look(5) == {}


def test_a_file_that_somebody_takes_away(host: Host) -> None:
    """Whether its process goes on tracing cannot be known at that look."""
    writer = host.agent()
    assert host.look(5) == {}
    writer.path.unlink()
    assert host.look(5) == UNKNOWN
    assert host.look(5) == {}


def test_an_exporter_that_begins_while_an_agent_traces(tmp_path: Path) -> None:
    """What it finds begins with its first look, at which nothing is known yet."""
    host = Host(tmp_path)
    writer = host.agent()
    host.trace(writer, 30, 29)
    begin_ns, _ = host.trace(writer, 7, None)
    assert host.look() is None
    assert host.look(5) == {G0.uuid: Tracing((), 5 * NS)}
    writer.trace(begin_ns, host.unix(-1))
    writer.publish()
    assert host.look(5) == {G0.uuid: Tracing((ns(10, 4),))}


def test_a_gpu_that_is_none_of_ours(host: Host) -> None:
    """It is nobody's business, and leaves no doubt about ours."""
    writer = host.agent(101, "GPU-ffffffff-aaaa-bbbb-cccc-000000000000")
    host.now_ns += 5 * NS
    host.trace(writer, 2, 1)
    assert host.look() == {}
    writer.intervals.append((2, 1))  # whatever it says
    writer.publish()
    assert host.look(5) == {}


def test_a_file_that_is_odd_again_and_again(host: Host) -> None:
    """Told once for each row of such looks; one or two of them befall an honest agent."""
    writer = host.agent()
    told = []
    for number in range(8):
        host.now_ns += 5 * NS
        host.trace(writer, *((2, 1) if number == 2 else (1, 2)))
        host.look()
        told.append([file.pid for file in host.times.odd])
    assert [len(pids) for pids in told] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert ODD_LOOKS == 3


def test_a_gpu_that_joins_late(host: Host) -> None:
    """A process of which it turns out that it is on another GPU too: what it traced there before is unknown."""
    writer = host.agent()
    host.now_ns += 5 * NS
    host.trace(writer, 2, 1)
    assert host.look() == {G0.uuid: Tracing((ns(2, 1),))}
    writer.uuids, writer.devices = (G0.uuid, G1.uuid), [*writer.devices, [0] * layout.COUNTERS]
    writer.next_window()
    writer.publish()
    assert host.look(5) == {G1.uuid: None}
    host.now_ns += 5 * NS
    host.trace(writer, 2, 1)
    assert host.look() == dict.fromkeys((G0.uuid, G1.uuid), Tracing((ns(2, 1),)))


@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1)), max_size=3),
            st.integers(-(10**10), 10**10),
        ),
        max_size=6,
    )
)
@settings(max_examples=50, deadline=None)
def test_files_that_say_anything(
    tmp_path_factory: pytest.TempPathFactory, looks: list[tuple[list[tuple[int, int]], int]]
) -> None:
    """Whatever stands in a file and whatever the clocks do: what is told is in order and before the look."""
    host = Host(tmp_path_factory.mktemp("agents"))
    writer = host.agent()
    for intervals, step_ns in looks:
        writer.intervals = intervals
        writer.publish()
        host.unix_ns += step_ns
        for tracing in filter(None, (host.look(5) or {}).values()):
            assert all(0 <= end_ns <= begin_ns for begin_ns, end_ns in tracing.ended)
            assert tracing.open_ns >= 0
