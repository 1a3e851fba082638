"""Trace windows: what belongs to them, when they come, what becomes of incomplete ones."""

from __future__ import annotations

import signal
import time
from itertools import pairwise

import pytest

import fake_activity
from fake_activity.agent import FOR_LIFE, Agent, Start
from fake_activity.agent_file import Reason, Snapshot, State

LONG = {"WINDOW_SECONDS": "0.4", "PERIOD_SECONDS": "1.2"}
"""Long enough to say something in a window, on a busy machine too."""
GRAPH_NODES = 2
"""A flag of the file."""
ROOMY = {"WINDOW_SECONDS": "1", "PERIOD_SECONDS": "3"}
"""Where all that is said must fall into the first one."""


def wait_state(agent: Agent, state: State) -> Snapshot:
    """Wait for a state."""
    return agent.wait(lambda now: now.header.state == state)


def test_a_window_has_what_was_launched_in_it(start: Start) -> None:
    """Kernels of before and after leave no record; they are enabled only while tracing."""
    agent = start(**ROOMY)
    agent.begin()
    agent.do("kernel before count=100")
    wait_state(agent, State.TRACING)
    agent.do("kernel inside count=100")
    assert agent.kinds() == FOR_LIFE | {10}
    now = agent.wait(lambda now: now.header.windows_published == 1)
    assert agent.kinds() == FOR_LIFE
    agent.do("kernel after count=100")
    kernels = now.kernels()
    assert {name: kernel.executions for name, kernel in kernels.items()} in (
        {"inside": 100},
        {"inside": 100, "before": 100},  # the first window may begin at once
    )
    now = agent.wait(lambda now: now.header.windows_published == 2)
    assert "after" not in now.kernels()


def test_denominators_are_the_windows(start: Start) -> None:
    """Traced time, ON intervals and the time spent on agree; the reader can subtract two snapshots."""
    agent = start()
    agent.trace()
    first = agent.published()
    agent.do("kernel a count=20 every_us=2000")
    last = agent.published(5)
    windows = last.header.windows_published - first.header.windows_published
    traced = last.device().traced_ns - first.device().traced_ns
    assert 0.045 * windows < traced / 1e9 < 1.0 * windows
    intervals = [(begin, end) for begin, end in last.intervals() if end]
    assert len(intervals) >= last.header.windows_published
    assert all(begin < end for begin, end in intervals)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(intervals))
    closed = intervals[: last.header.windows_published]
    assert sum(end - begin for begin, end in closed) == pytest.approx(last.device().traced_ns, rel=0.2)
    assert last.header.on_ns >= last.device().traced_ns


def test_a_window_waits_for_work_that_runs_later(start: Start) -> None:
    """A kernel that ends long after the window belongs to it, with launch and time; it waits for it."""
    agent = start(**ROOMY)
    agent.trace()
    agent.do("kernel long ns=1800000000")
    now = agent.wait(lambda now: now.header.windows_published == 1)
    kernel = now.kernels()["long"]
    assert (kernel.ns, kernel.latency_count) == (1_800_000_000, 1)
    # B is the end of the only stream's work: it was busy all the time from A on.
    assert now.device().device_traced_ns == now.device().busy_ns == 1_800_000_000
    assert 990_000_000 < now.device().traced_ns < 1_790_000_000


def test_calls_while_it_opens_and_closes(start: Start) -> None:
    """Calls are recorded all the time, kernels in windows: the calls of others are neither unmatched nor in a sum."""
    agent = start()
    agent.do("slow cuptiActivityEnable ms=10", "slow cuptiActivityDisable ms=10")
    agent.begin()
    agent.send("kernel a count=5000 every_us=100")
    now = agent.wait(lambda now: now.header.windows_published >= 3)
    kernel = now.kernels()["a"]
    few = 2 * now.header.windows_published  # those launched at the very moment
    assert now.header.records_unmatched <= few
    assert abs(now.device().launch_api_calls - kernel.launches) <= few
    assert kernel.latency_count >= kernel.launches - few
    assert agent.hear() == "ok"


def test_the_last_window_s_latency(start: Start) -> None:
    """Each slot says what its last window had, and which one that was."""
    agent = start(**ROOMY)
    agent.trace()
    agent.do("kernel a count=10 delay=3000", "kernel b count=2 ns=10")
    now = agent.wait(lambda now: now.header.windows_published == 1)
    a = now.kernels()["a"]
    assert (a.window, a.window_executions, a.window_latency_ns, a.window_latency_count) == (1, 10, 30_000, 10)
    wait_state(agent, State.TRACING)
    agent.do("kernel a count=5 delay=9000 ns=2000")
    now = agent.wait(lambda now: now.header.windows_published >= 2 and now.kernels()["a"].executions == 15)
    a, b = now.kernels()["a"], now.kernels()["b"]
    assert (a.window_executions, a.window_latency_ns, a.window_ns, a.window_max_ns) == (5, 45_000, 10_000, 2000)
    assert (a.latency_ns, a.max_ns) == (75_000, 2000)
    assert (b.window, b.window_executions) == (1, 2)
    assert a.window > 1


@pytest.mark.parametrize("ids", ["same_id=0", "same_id=1"])
def test_kernels_that_are_lost(start: Start, ids: str) -> None:
    """Windows without a thread's kernels are discarded: nothing of them is published, and after six it ends."""
    agent = start(WINDOW_SECONDS="0.1", PERIOD_SECONDS="0.2")
    agent.trace()
    published = agent.published().header.windows_published
    agent.do("lose 1000000")
    agent.send(f"kernel a count=400000 every_us=100 {ids}")
    now = wait_state(agent, State.OFF)
    assert now.state == (State.OFF, Reason.WINDOWS_DISCARDED)
    assert now.header.windows_discarded >= 6
    assert "a" not in now.kernels()
    assert now.header.windows_published <= published + 1  # the one that it began in


def test_a_thread_beside_one_whose_kernels_are_lost(start: Start) -> None:
    """What one thread launches does not hide that nothing is known of another's."""
    agent = start(**LONG)
    agent.trace()
    agent.do("lose 1000000")
    agent.send("kernel a count=9000 every_us=300")
    agent.wait(lambda now: now.header.windows_discarded >= 1)
    assert agent.hear() == "ok"
    now = agent.published()  # a thread that launches no more is no matter
    assert "a" not in now.kernels()


def test_lost_kernels_beside_those_of_the_driver_s_functions(start: Start) -> None:
    """Kernels whose launches are not recorded, as NCCL's, do not stand for launches whose kernels are lost."""
    agent = start(WINDOW_SECONDS="1", PERIOD_SECONDS="1.2")
    agent.trace()
    agent.do("kernel a count=2000 threads=1", "kernel nccl driver=1 count=90 threads=1")
    agent.do("lose 1000000", "kernel b count=60")
    now = agent.wait(lambda now: now.header.windows_discarded + now.header.windows_published == 1)
    assert now.header.windows_discarded == 1


def test_a_thread_whose_kernels_are_lost_beside_very_many(start: Start) -> None:
    """More than are counted at a time: those that lack nothing give their places to others."""
    agent = start(WINDOW_SECONDS="1.5", PERIOD_SECONDS="2")
    agent.trace("global_buffers")
    agent.do("kernel few count=2 threads=300", "lose 1000000", "kernel a count=2000 every_us=100")
    now = agent.wait(lambda now: now.header.windows_discarded + now.header.windows_published == 1)
    assert now.header.windows_discarded == 1


@pytest.mark.parametrize(
    "others",
    [
        "kernel captured work=0 count=50",
        "capture count=50 threads=2",
        "kernel failing work=0 result=9 count=50 threads=2",
    ],
)
def test_launches_without_kernels(start: Start, others: str) -> None:
    """Captured beside others of their thread, captured alone, failed: nothing is lost, and windows are published."""
    agent = start(**LONG)
    agent.trace()
    for _ in range(3):
        wait_state(agent, State.TRACING)
        agent.do("kernel a count=100", others)
        now = agent.published()
        assert now.header.windows_discarded == 0
    assert now.kernels()["a"].executions >= 100


def test_a_thread_without_a_number_is_not_taken_for_another(start: Start) -> None:
    """Number 0 has no place among those of whose launches the kernels are counted; 233 would get the same."""
    agent = start(**ROOMY)
    agent.trace()
    agent.do(*(f"kernel a thread={thread} lane=1 count=50" for thread in (0, 233)), "capture count=50")
    now = agent.published()
    assert (now.header.windows_discarded, now.kernels()["a"].latency_count) == (0, 100)


def test_seldom_long_kernels_are_awaited(start: Start) -> None:
    """Windows in which nothing ran do not make the agent forget how long the others take."""
    agent = start(WINDOW_SECONDS="0.5", PERIOD_SECONDS="0.7", DRAIN_SECONDS="30")
    agent.trace()
    agent.do("kernel long ns=2500000000")
    agent.wait(lambda now: now.header.windows_discarded == 1)
    agent.published(3)
    wait_state(agent, State.TRACING)
    agent.do("kernel long ns=2500000000")
    now = agent.wait(lambda now: "long" in now.kernels() or now.header.windows_discarded > 1)
    assert now.header.windows_discarded == 1


def test_windows_given_up_early_do_not_end_tracing(start: Start) -> None:
    """Six in a row are too many only of those that were awaited as long as may be."""
    agent = start(WINDOW_SECONDS="0.1", PERIOD_SECONDS="0.2", DRAIN_SECONDS="2.1")
    agent.trace()
    agent.send("kernel long ns=60000000000 count=100000 every_us=1000")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert now.state == (State.OFF, Reason.WINDOWS_DISCARDED)
    assert now.header.windows_discarded == 7  # the first was awaited for 2 s


def test_a_window_that_never_becomes_complete_is_discarded(start: Start) -> None:
    """Nothing of it is published, it is counted, and its late records do not fall into the next one."""
    agent = start(DRAIN_SECONDS="0.1", **ROOMY)
    agent.trace()
    agent.do("kernel endless ns=60000000000", "kernel short count=50 lane=3")
    now = agent.wait(lambda now: now.header.windows_discarded == 1)
    assert not now.kernels()
    assert now.device().traced_ns == 0
    assert now.header.records_dropped == 101  # the calls too, whose buffer was forced out
    assert now.header.records_invalid == 1  # the endless one's
    now = agent.wait(lambda now: now.header.windows_published == 1)  # the endless one is not waited for
    assert not now.kernels()
    assert now.header.records_dropped == 101
    assert now.state[0] in (State.WAITING, State.TRACING)


def test_a_wait_that_goes_on_for_long(start: Start) -> None:
    """Its record stays unfinished and may keep a thread's buffer; nothing but itself is missing."""
    agent = start(DRAIN_SECONDS="0.3", **ROOMY)
    agent.trace()
    agent.do("unfinished wait", "kernel a count=50", "kernel b count=50 threads=2")
    now = agent.wait(lambda now: now.header.windows_published == 1)
    assert (now.kernels()["a"].executions, now.kernels()["a"].latency_count) == (50, 50)
    assert now.kernels()["b"].executions == 100
    header = now.header
    assert (header.windows_discarded, header.records_dropped, header.records_invalid) == (0, 0, 0)
    wait_state(agent, State.TRACING)
    agent.do("kernel a count=1")
    assert agent.published().kernels()["a"].executions == 51


def sync_of(now: Snapshot) -> tuple[int, int]:
    """Waits for the device: how many began, and their ns."""
    device = now.device()
    return device.sync_calls[4], device.sync_ns[4]


def test_a_wait_that_began_before_the_window_counts_from_its_begin(start: Start) -> None:
    """It begins in no window."""
    agent = start(WINDOW_SECONDS="4")
    agent.trace()
    agent.do("base in=0", "until 300000000", "sync 4 ns=60000000000", "entry gpu_hpc_agent_stop")
    now = agent.wait(lambda now: now.header.windows_published == 1)
    calls, ns = sync_of(now)
    assert calls == 0
    assert 300_000_000 <= ns <= now.device().traced_ns


def test_a_wait_that_ends_after_the_window_counts_up_to_its_end(start: Start) -> None:
    """Its record comes in the pause, or with the next window's, and counts with that one's."""
    agent = start(WINDOW_SECONDS="0.6", PERIOD_SECONDS="2")
    agent.trace()
    first = agent.published()
    assert sync_of(first) == (0, 0)
    [(opened, closed), *_] = first.intervals()  # the window lies in it
    since = closed - 200_000_000
    agent.do(f"sync 4 since={since}")
    calls, ns = sync_of(agent.published())
    assert calls == 1
    assert opened + first.device().traced_ns - since <= ns <= closed - since


@pytest.mark.parametrize("version", [20, 130001])
def test_a_wait_over_many_windows_counts_in_two(start: Start, version: int) -> None:
    """In that in which or after which it ends, and in the one before; by calls or (before CUPTI 12.5) records of waits.

    All of it at once would be held against a time in which the GPU did something else. That it lasted for more than an
    hour makes no record invalid.
    """
    agent = start(WINDOW_SECONDS="0.1", PERIOD_SECONDS="0.3")
    agent.trace(f"version {version}")
    agent.published(5)
    wait_state(agent, State.TRACING)
    agent.do("sync 4 ns=10000000000000")
    now = agent.published(2)
    calls, ns = sync_of(now)
    lengths = sorted(end - begin for begin, end in now.intervals() if end)
    assert calls == 0
    assert lengths[0] * 0.9 <= ns <= lengths[-1] + lengths[-2]
    assert (now.header.records_dropped, now.header.records_invalid) == (0, 0)
    assert sync_of(agent.published(2)) == (calls, ns)


@pytest.mark.parametrize("when", [State.WAITING, State.TRACING])
def test_a_wait_after_the_clock_was_set_back(start: Start, when: State) -> None:
    """By its times it may lie in a window that was published before."""
    agent = start(WINDOW_SECONDS="1", PERIOD_SECONDS="2")
    agent.trace()
    agent.published()
    wait_state(agent, when)
    agent.do("clock -2000000000")
    discarded = when == State.TRACING
    agent.wait(lambda now: now.header.windows_discarded == discarded and now.header.state == State.WAITING)
    wait_state(agent, State.TRACING)
    agent.do("base in=0", "until 300000000", "sync 4 ns=100000000")
    assert sync_of(agent.published())[1] == 100_000_000


def test_a_wait_that_ends_in_a_pause_counts_in_two_windows(start: Start) -> None:
    """In that after which it ends, and in the one before."""
    agent = start(WINDOW_SECONDS="0.1", PERIOD_SECONDS="2")
    agent.trace()
    now = agent.published(2)
    assert now.header.state == State.WAITING
    agent.do("sync 4 ns=10000000000000")
    calls, ns = sync_of(agent.published())
    assert calls == 0
    assert ns == pytest.approx(now.device().traced_ns, rel=0.1)


def test_a_wait_after_the_clock_was_set_back_while_stopped(start: Start) -> None:
    """As in a pause of our own: by its times it may lie in a window that was published before."""
    agent = start(WINDOW_SECONDS="60", PERIOD_SECONDS="180")
    agent.trace()
    agent.do("base in=0", "until 3000000000", "entry gpu_hpc_agent_stop")
    agent.wait(lambda now: now.header.windows_published == 1 and now.state == (State.PAUSED, Reason.STOPPED))
    agent.do("clock -2000000000", "sync 4 ns=1000000 count=20 threads=4", "kernel a threads=200")
    fake_activity.until(lambda: agent.calls()["@buffers"] == 0)  # the threads' buffers came back
    agent.do("entry gpu_hpc_agent_start")
    wait_state(agent, State.TRACING)
    agent.do("entry gpu_hpc_agent_stop")
    assert sync_of(agent.wait(lambda now: now.header.windows_published == 2)) == (0, 0)


def test_nodes_of_discarded_windows_count_for_their_limit(start: Start) -> None:
    """CUPTI has made them all the same."""
    agent = start(NODE_RECORDS="1000", WINDOW_SECONDS="60", PERIOD_SECONDS="180", DRAIN_SECONDS="0.1")
    agent.trace()
    agent.do("graph g nodes=900", "unfinished kernel", "entry gpu_hpc_agent_stop")
    agent.wait(lambda now: now.header.windows_discarded == 1)
    agent.do("entry gpu_hpc_agent_start")
    wait_state(agent, State.TRACING)
    agent.do("graph g nodes=100", "entry gpu_hpc_agent_stop")
    agent.wait(lambda now: now.header.windows_published == 1)
    agent.do("entry gpu_hpc_agent_start")
    now = agent.wait(lambda now: not now.header.flags & GRAPH_NODES)
    assert now.header.node_records == 1000


def test_a_wait_over_a_discarded_window_does_not_count_there(start: Start) -> None:
    """That time counts as traced nowhere."""
    agent = start(WINDOW_SECONDS="0.3", PERIOD_SECONDS="2", DRAIN_SECONDS="0.1")
    agent.trace()
    agent.do("unfinished kernel")
    agent.wait(lambda now: now.header.windows_discarded == 1)
    agent.do("sync 4 ns=60000000000")
    assert sync_of(agent.published()) == (0, 0)


def test_kernels_first_seen_in_a_discarded_window(start: Start) -> None:
    """Readers look at a new slot's name and device once, as soon as it is among those in use."""
    agent = start(DRAIN_SECONDS="0.1", **LONG)
    agent.trace("devices 2")
    agent.do("kernel seldom device=1", "unfinished kernel")
    agent.wait(lambda now: now.header.windows_discarded == 1)
    wait_state(agent, State.TRACING)
    agent.do("kernel other")
    now = agent.published()
    slots = now.file.kernels[: now.header.kernels]
    assert [(now.name(k), k.device, k.executions) for k in slots] == [("seldom", 1, 0), ("other", 0, 1)]


DISTURBED = {"WINDOW_SECONDS": "0.3", "PERIOD_SECONDS": "0.5", "DRAIN_SECONDS": "0.2"}


@pytest.mark.parametrize("mode", ["duty", "continuous"])
@pytest.mark.parametrize("seconds", [10, -10, -7200, 1_700_000_000])
def test_a_clock_that_is_set_while_it_traces(start: Start, mode: str, seconds: int) -> None:
    """A wait seems to last for years, calls to have begun before the window: nothing of it is published or learned."""
    agent = start(MODE=mode, **DISTURBED)
    agent.trace()
    ns = seconds * 10**9
    agent.do("kernel a count=100", f"clock {ns}", "kernel a count=200", f"sync 4 ns={max(ns, 1000)}")
    now = agent.wait(lambda now: now.header.windows_discarded == 1)
    assert not now.kernels()
    wait_state(agent, State.TRACING)
    agent.do("kernel b count=9 wait_ns=50")
    now = agent.wait(lambda now: "b" in now.kernels())
    assert now.kernels().keys() == {"b"}
    assert now.kernels()["b"].latency_count == 9
    assert (list(now.device().sync_ns), now.header.windows_discarded) == ([0, 0, 0, 450, 0], 1)


@pytest.mark.parametrize("mode", ["duty", "continuous"])
def test_a_program_that_is_suspended_while_it_traces(start: Start, mode: str) -> None:
    """As schedulers do: that window's waits say nothing, and its length is no reason to trace no more."""
    agent = start(MODE=mode, LONGEST_PERIOD_SECONDS="2", **DISTURBED)
    agent.trace()
    agent.do("kernel a count=100")
    agent.process.send_signal(signal.SIGSTOP)
    time.sleep(3)  # nothing happens that could be awaited
    agent.process.send_signal(signal.SIGCONT)
    now = agent.wait(lambda now: now.header.windows_discarded == 1)
    wait_state(agent, State.TRACING)
    agent.do("kernel b count=9")
    now = agent.wait(lambda now: "b" in now.kernels())
    assert now.device().traced_ns < 2.5e9
    assert now.header.windows_discarded == 1


def test_work_that_is_never_finished(start: Start) -> None:
    """One lost record costs one window, not the agent."""
    agent = start(DRAIN_SECONDS="0.1", **ROOMY)
    agent.trace()
    agent.do("unfinished kernel", "kernel lost count=5")
    now = agent.wait(lambda now: now.header.windows_discarded == 1)
    assert (now.header.windows_published, now.header.records_invalid) == (0, 1)
    wait_state(agent, State.TRACING)
    agent.do("kernel a count=5")
    now = agent.wait(lambda now: now.header.windows_published == 1)
    assert {name: kernel.executions for name, kernel in now.kernels().items()} == {"a": 5}
    assert now.header.windows_discarded == 1


CONTINUOUS = {"MODE": "continuous", "DRAIN_SECONDS": "0.2"}


@pytest.mark.parametrize("work", ["unfinished kernel", "kernel endless ns=600000000000"])
def test_a_kernel_that_runs_for_minutes_is_all_that_continuous_tracing_loses(start: Start, work: str) -> None:
    """Its thread's records come all the same, and later parts are published as if nothing had been."""
    agent = start(**CONTINUOUS)
    agent.trace()
    agent.do(work, "kernel same_thread count=50")
    now = agent.wait(lambda now: "same_thread" in now.kernels())
    assert now.kernels()["same_thread"].executions == 50
    header = now.header
    assert (header.records_dropped, header.records_invalid, header.windows_discarded) == (1, 0, 0)
    without = now.device().windows_without_union
    assert without >= 1
    agent.do("kernel later count=5")
    now = agent.wait(lambda now: "later" in now.kernels())
    agent.published(10)
    assert now.state == (State.TRACING, Reason.NONE)
    assert now.kernels()["later"].executions == 5
    assert now.device().windows_without_union == without
    assert now.header.records_dropped == 1


def test_a_wait_that_continuous_tracing_never_sees_return(start: Start) -> None:
    """It counts when it has ended: what is published is complete."""
    agent = start(**CONTINUOUS | {"WINDOW_SECONDS": "0.5"})
    agent.trace()
    agent.do("kernel a", "unfinished wait", "kernel b count=50")
    now = agent.wait(lambda now: "b" in now.kernels())
    assert now.kernels()["b"].executions == 50
    assert (now.header.records_dropped, now.header.records_invalid) == (0, 0)
    assert now.device().windows_without_union == 0


def test_continuous_tracing_forces_nothing_out_of_a_profiler(start: Start) -> None:
    """One that began while records were awaited gets them finished (the fake aborts)."""
    agent = start(**CONTINUOUS | {"DRAIN_SECONDS": "2"})
    agent.trace()
    agent.do("unfinished kernel")
    flushes = agent.calls().get("cuptiActivityFlushAll", 0)
    fake_activity.until(lambda: agent.calls().get("cuptiActivityFlushAll", 0) > flushes + 30)  # it waits
    agent.do("profile")
    assert wait_state(agent, State.PAUSED).state == (State.PAUSED, Reason.PROFILER)
    assert agent.end() == 0


def test_continuous_tracing_forces_nothing_out_of_a_tool_that_keeps_the_subscription(start: Start) -> None:
    """After resuming nobody can tell whether it is at work; parts are published without what is unfinished."""
    agent = start(RESUME_AFTER_PROFILER_MINUTES="0", **CONTINUOUS)
    agent.begin("subscribe")
    wait_state(agent, State.TRACING)
    agent.do("unfinished kernel")
    agent.published(3)
    assert agent.wait(lambda _: True).state == (State.TRACING, Reason.NONE)
    assert agent.end() == 0


def test_nothing_is_forced_out_of_a_profiler(start: Start) -> None:
    """One that began while a window's records were awaited gets them finished (the fake aborts)."""
    agent = start(DRAIN_SECONDS="0.3", WINDOW_SECONDS="0.5", PERIOD_SECONDS="5")
    agent.trace()
    agent.do("unfinished kernel")
    wait_state(agent, State.WAITING)
    agent.do("profile")
    now = wait_state(agent, State.PAUSED)
    assert now.state == (State.PAUSED, Reason.PROFILER)
    assert now.header.windows_discarded == 1
    assert agent.end() == 0


def test_nothing_is_forced_out_of_a_tool_that_keeps_the_subscription(start: Start) -> None:
    """After resuming nobody can tell whether it is at work: the window is discarded as it is (the fake aborts)."""
    agent = start(RESUME_AFTER_PROFILER_MINUTES="0", DRAIN_SECONDS="0.1", WINDOW_SECONDS="0.5", PERIOD_SECONDS="0.7")
    agent.begin("subscribe")
    wait_state(agent, State.TRACING)
    agent.do("unfinished kernel")
    agent.wait(lambda now: now.header.windows_discarded == 1)
    assert agent.end() == 0


def test_windows_that_are_never_complete_end_it(start: Start) -> None:
    """A CUPTI that keeps buffers without records can never say that all are back."""
    agent = start(DRAIN_SECONDS="0.02")
    agent.trace("keep_empty", "stall 1")
    agent.do("kernel a count=5")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert now.state == (State.OFF, Reason.WINDOWS_DISCARDED)
    assert agent.kinds() == FOR_LIFE
    assert now.header.windows_published == 0


def test_costs_lengthen_the_pauses(start: Start) -> None:
    """K01: 500 launches, 40 us each, are 20 ms: for 1 % of the time they may come every 2 s."""
    agent = start(LAUNCH_COST_MICROSECONDS="40", BUDGET="0.01", **LONG)
    agent.trace()
    agent.do("kernel a count=500")
    now = agent.wait(lambda now: now.header.windows_published == 1)
    header = now.header
    assert header.period_seconds == pytest.approx(500 * 40e-6 / 0.01, rel=0.01)
    always = 500 * 2.3e-6 / (now.device().traced_ns / 1e9)  # whenever it launches
    assert header.overhead_ratio == pytest.approx(0.01 + always, rel=0.01)
    assert (header.launch_cost_us, header.budget) == (40, 0.01)


@pytest.mark.parametrize(("records", "ns"), [("kernels", 1000), ("kernels,copies", 2300), ("kernels,calls", 2300)])
def test_what_is_slower_for_life_is_told_and_lengthens_no_pause(start: Start, records: str, ns: int) -> None:
    """Each launch, in pauses too."""
    agent = start(RECORDS=records, LAUNCH_COST_MICROSECONDS="0", WINDOW_SECONDS="0.4", PERIOD_SECONDS="0.6")
    agent.trace()
    agent.do("kernel a count=500")
    now = agent.wait(lambda now: now.header.windows_published == 1)
    assert now.header.overhead_ratio * now.device().traced_ns / 500 == pytest.approx(ns, rel=0.01)
    assert now.header.period_seconds == pytest.approx(0.6)


def test_nodes_cost_less_than_launches(start: Start) -> None:
    """A graph launch is one launch; its nodes cost their own."""
    agent = start(LAUNCH_COST_MICROSECONDS="40", NODE_COST_MICROSECONDS="1", BUDGET="0.01", **LONG)
    agent.trace()
    agent.do("graph g nodes=1000 count=100")
    now = agent.wait(lambda now: now.header.windows_published == 1)
    assert now.header.period_seconds == pytest.approx((100 * 40e-6 + 100_000 * 1e-6) / 0.01, rel=0.01)


def test_a_cheap_window_keeps_the_period(start: Start) -> None:
    """Pauses never become shorter than configured."""
    agent = start(LAUNCH_COST_MICROSECONDS="1", **LONG)
    agent.trace()
    agent.do("kernel a count=3")
    now = agent.wait(lambda now: now.header.windows_published == 1)
    assert now.header.period_seconds == pytest.approx(1.2)
    always = 3 * 2.3e-6 / (now.device().traced_ns / 1e9)
    assert now.header.overhead_ratio == pytest.approx(3e-6 / 1.2 + always, rel=0.01)


def test_too_dear_at_the_longest_period(start: Start) -> None:
    """K01: it stops for good, and says why."""
    agent = start(LAUNCH_COST_MICROSECONDS="400", LONGEST_PERIOD_SECONDS="2", **LONG)
    agent.trace()
    agent.do("kernel a count=300")
    now = wait_state(agent, State.OFF)
    assert now.state == (State.OFF, Reason.BUDGET)
    assert now.kernels()["a"].executions == 300
    fake_activity.until(lambda: agent.said() != "")
    assert agent.said() == "gpu-hpc-agent: tracing costs more than its budget; this process runs on without\n"


def test_continuous_tracing_has_no_budget_unless_given(start: Start) -> None:
    """Whoever asks for all gets all."""
    agent = start(MODE="continuous", LAUNCH_COST_MICROSECONDS="1000")
    agent.trace()
    for _ in range(8):
        agent.do("kernel a count=100")
        now = agent.published()
    assert now.state == (State.TRACING, Reason.NONE)
    assert now.header.overhead_ratio > 0.01


def test_continuous_tracing_steps_down(start: Start) -> None:
    """With a budget it becomes windows after five parts that were too dear."""
    agent = start(MODE="continuous", LAUNCH_COST_MICROSECONDS="4000", BUDGET="0.9")
    agent.trace()
    agent.send("kernel a count=4000 every_us=500")
    now = agent.wait(lambda now: now.state == (State.WAITING, Reason.BUDGET))
    assert agent.hear() == "ok"
    assert now.header.mode == 1
    now = agent.wait(lambda now: now.header.windows_published > 7 and now.state == (State.TRACING, Reason.BUDGET))
    assert now.header.period_seconds > now.header.window_seconds


def test_long_queues_need_long_windows(start: Start) -> None:
    """Four times the 95th percentile of launch to start, by its bucket's bound."""
    agent = start(**LONG)
    agent.trace()
    agent.do("kernel a count=100 delay=100000000")  # in the bucket up to 262 ms
    agent.wait(lambda now: now.header.windows_published == 1)
    wait_state(agent, State.TRACING)
    now = agent.wait(lambda now: now.header.windows_published == 2)
    assert now.header.window_seconds == pytest.approx(4 * 0.262144, rel=0.2)
    assert now.header.period_seconds == pytest.approx(3 * 4 * 0.262144)  # the pauses too: still a third of the time


def test_stop_and_start(start: Start) -> None:
    """K06: stopping ends and publishes the window; starting opens another."""
    agent = start(WINDOW_SECONDS="30")
    agent.trace()
    agent.do("kernel a count=7", "entry gpu_hpc_agent_stop")
    now = agent.wait(lambda now: now.state == (State.PAUSED, Reason.STOPPED))
    assert now.kernels()["a"].executions == 7
    assert agent.kinds() == FOR_LIFE
    agent.do("entry gpu_hpc_agent_start")
    wait_state(agent, State.TRACING)
    agent.do("kernel a count=2", "entry gpu_hpc_agent_stop")
    now = agent.wait(lambda now: now.header.windows_published == 2)
    assert now.kernels()["a"].executions == 9


def test_k06_a_thousand_windows_beside_replays_of_graphs(start: Start) -> None:
    """K06: kinds go on and off a thousand times, nothing is finalised (the fake aborts), the end is the program's."""
    agent = start(PERIOD_SECONDS="0.002", WINDOW_SECONDS="0.001", FLUSH_SECONDS="0.001", BUDGET="1")
    agent.trace("version 130101")
    published = 0
    while published < 1000:
        agent.do("graph g nodes=20 count=20 threads=2 every_us=100", "kernel a count=20 every_us=50")
        now = agent.wait(lambda _: True)
        assert now.state[0] != State.OFF, now.state
        published = now.header.windows_published
    assert agent.calls()["cuptiActivityEnable"] >= 1000
    assert now.header.records_invalid == 0
    assert agent.end(3) == 3
    assert agent.said() == ""


def test_a_library_loaded_by_the_program_itself(start: Start) -> None:
    """No injection: gpu_hpc_agent_start alone, in a process that already computes."""
    agent = start(MODE="continuous")
    agent.do("unset_injection")
    agent.begin()
    assert not any(agent.directory.iterdir())
    agent.do("entry gpu_hpc_agent_start")
    wait_state(agent, State.TRACING)
    agent.do("kernel a")
    agent.wait(lambda now: "a" in now.kernels())


def test_nothing_is_traced_before_there_is_a_context(start: Start) -> None:
    """K09: a launcher that only counts devices is never traced, and says so in its file."""
    agent = start()
    agent.do(f"load {agent.programs.cupti}", "init")
    now = agent.wait(lambda now: now.state == (State.WAITING, Reason.NO_CONTEXT))
    assert agent.kinds() == FOR_LIFE
    assert now.header.windows_published == now.header.intervals_total == 0
    agent.do("context 0")
    now = wait_state(agent, State.TRACING)
    assert (now.header.cupti_version, now.header.driver_version) == (130001, 13000)


def test_nothing_is_touched_before_there_is_a_context_where_kernels_are_all(start: Start) -> None:
    """K09: nothing is enabled for life then."""
    agent = start(RECORDS="kernels")
    agent.do(f"load {agent.programs.cupti}", "init")
    now = agent.wait(lambda now: now.state == (State.WAITING, Reason.NO_CONTEXT))
    assert not any(name.startswith("cupti") for name in agent.calls())
    assert now.header.cupti_version == 0
    agent.do("context 0")
    wait_state(agent, State.TRACING)


def test_buffers_are_asked_back_before_they_run_out(start: Start) -> None:
    """CUPTI has taken more than half of them in the middle of a window."""
    agent = start(WINDOW_SECONDS="60", PERIOD_SECONDS="60")
    agent.trace()
    agent.do(*(f"kernel a lane={lane}" for lane in range(1, 31)))
    assert agent.calls().get("cuptiActivityFlushAll", 0) == 0
    agent.do(*(f"kernel a lane={lane}" for lane in range(31, 40)))
    fake_activity.until(lambda: agent.calls().get("cuptiActivityFlushAll", 0) > 0)
    assert agent.wait(lambda _: True).header.state == State.TRACING


def test_buffers_are_not_asked_back_without_end(start: Start) -> None:
    """More threads have one each than are spared: what they give back they take again at once."""
    agent = start(WINDOW_SECONDS="60", PERIOD_SECONDS="60")
    agent.trace()
    begin = time.monotonic()
    agent.do("kernel a count=1000 every_us=1000 threads=60")
    flushes = agent.calls().get("cuptiActivityFlushAll", 0)
    assert 1 <= flushes <= 2 + 50 * (time.monotonic() - begin)


def test_a_context_that_cannot_be_seen(start: Start) -> None:
    """Programs with contexts of their own making are traced after a while."""
    agent = start(ATTACH_SECONDS="0.1")
    agent.do(f"load {agent.programs.cupti}", "init")
    wait_state(agent, State.TRACING)
    agent.send("kernel a count=100000 every_us=1000")
    agent.wait(lambda now: "a" in now.kernels())


def test_mode_off(start: Start) -> None:
    """The kill switch: the file says so, and nothing else is done."""
    agent = start(MODE="off")
    agent.begin()
    now = wait_state(agent, State.OFF)
    assert now.state == (State.OFF, Reason.CONFIGURED)
    assert not any(name.startswith("cu") for name in agent.calls())
    assert agent.said() == ""


def test_a_misspelt_mode_is_off(start: Start) -> None:
    """Whoever meant something else than duty does not get it."""
    agent = start(MODE="Continous")
    agent.begin()
    assert wait_state(agent, State.OFF).state == (State.OFF, Reason.CONFIGURED)


def test_values_that_are_no_numbers_leave_the_defaults(start: Start) -> None:
    """Not a reason to fail."""
    agent = start(BUDGET="1e-3", LAUNCH_COST_MICROSECONDS="4,5", NODE_COST_MICROSECONDS="-1")
    agent.begin()
    header = wait_state(agent, State.TRACING).header
    assert (header.budget, header.launch_cost_us, header.node_cost_us) == (0.01, 4, 1.5)


@pytest.mark.parametrize(
    "value", ["9" * 400 + "." + "9" * 400, "9" * 4000, "." * 3, "1e3", "-0", "0x10", " 1", "NaN", "inf"]
)
def test_hostile_numbers_leave_the_defaults(start: Start, value: str) -> None:
    """Infinity over infinity neither: a window of that length would never end."""
    agent = start(WINDOW_SECONDS=value, LAUNCH_COST_MICROSECONDS=value, NODE_RECORDS=value, PERIOD_SECONDS="2")
    agent.begin()
    now = agent.wait(lambda now: now.header.windows_published == 1)
    assert now.header.window_seconds == pytest.approx(1, rel=0.2)
    assert now.header.launch_cost_us == 4
