"""What is counted, exactly, when everything is traced."""

from __future__ import annotations

import pytest

import fake_activity
from fake_activity.agent import Agent, Start
from fake_activity.agent_file import D2D, D2H, DEVICE, H2D, P2P, PAGEABLE, PINNED, Snapshot, State, read


def executions(now: Snapshot) -> int:
    """Of all kernels on all devices."""
    return sum(kernel.executions for kernel in now.slots())


def wait_executions(agent: Agent, count: int) -> Snapshot:
    """Wait until so many are published; there must not be more."""
    now = agent.wait(lambda now: executions(now) >= count)
    assert executions(now) == count
    return now


def one_window(agent: Agent, *commands: str) -> Snapshot:
    """What a window has in which all of this was done, however slow the machine is. The first one, or the next."""
    agent.wait(lambda now: now.header.state == State.TRACING)
    before = agent.wait(lambda _: True).header.windows_published
    agent.do(*commands, "entry gpu_hpc_agent_stop")
    return agent.wait(lambda now: now.header.windows_published > before)


ENDLESS = {"WINDOW_SECONDS": "60", "PERIOD_SECONDS": "180"}
"""Until it is stopped."""


def test_kernels_are_counted_to_the_nanosecond(continuous: Agent) -> None:
    """Executions, seconds, squares, longest and histogram, by name, grid and block."""
    continuous.do("kernel gemm count=1000 ns=5000", "kernel gemm count=10 ns=100000 grid=7", "kernel norm ns=70000000")
    now = wait_executions(continuous, 1011)
    slots = {(now.name(k), k.grid[0], k.block[0]): k for k in now.slots()}
    gemm, wide, norm = slots["gemm", 1, 32], slots["gemm", 7, 32], slots["norm", 1, 32]
    assert len(slots) == 3
    assert (gemm.executions, gemm.launches, gemm.ns, gemm.max_ns) == (1000, 1000, 5_000_000, 5000)
    assert gemm.ns_squared == 1000 * 5000.0**2
    assert list(gemm.buckets) == [0, 1000, 0, 0, 0, 0, 0, 0, 0]
    assert (wide.executions, wide.ns, wide.max_ns) == (10, 1_000_000, 100_000)
    assert (norm.executions, norm.ns, list(norm.buckets).index(1)) == (1, 70_000_000, 6)
    assert now.header.records_kept == 2 * 1011
    assert now.header.records_dropped == now.header.records_invalid == now.header.records_unmatched == 0


@pytest.mark.parametrize("order", ["", "reversed=1", "lane=2", "reversed=1 every_us=200"])
def test_calls_meet_their_kernels_in_any_order(continuous: Agent, order: str) -> None:
    """Launch to start, and the time of the calls; records of either side may come first, in other buffers."""
    continuous.do(f"kernel a count=100 delay=6000 api_ns=1500 {order}")
    now = wait_executions(continuous, 100)
    kernel, device = now.kernels()["a"], now.device()
    assert (kernel.latency_count, kernel.latency_ns) == (100, 600_000)
    assert (device.queue_ns, list(device.queue_buckets)) == (600_000, [0, 100, 0, 0, 0, 0, 0, 0, 0])
    assert (device.launch_api_calls, device.launch_api_ns) == (100, 150_000)
    assert now.header.records_unmatched == 0


def test_a_start_before_the_call_s_end_waited_for_nothing(continuous: Agent) -> None:
    """P02: clock steps and very short calls make negative differences: they count as 0."""
    continuous.do("kernel a count=3 delay=-5000 api_ns=9000")
    kernel = wait_executions(continuous, 3).kernels()["a"]
    assert (kernel.latency_count, kernel.latency_ns) == (3, 0)


@pytest.mark.parametrize("mode", ["duty", "continuous"])
@pytest.mark.parametrize("skew_s", [10, -10])
def test_p02_a_gpu_whose_clock_is_off(start: Start, mode: str, skew_s: int) -> None:
    """P02: seconds are of the GPU's own durations, and its kernels are of the window in which they were launched."""
    agent = start(MODE=mode, WINDOW_SECONDS="0.3")
    agent.trace()
    agent.do(f"kernel off count=500 ns=4000 skew={skew_s * 10**9}")
    now = wait_executions(agent, 500)
    assert (now.kernels()["off"].executions, now.kernels()["off"].ns) == (500, 2_000_000)
    assert now.header.records_invalid == now.header.windows_discarded == 0
    published = now.header.windows_published
    agent.do("kernel right count=3 ns=4000 every_us=1000")
    now = agent.wait(lambda now: now.header.windows_published > published and now.state[0] != State.OFF)
    assert now.header.records_dropped == 0


def test_p02_work_that_ran_before_the_window(start: Start) -> None:
    """P02: by another clock; how long the device idled in the window is not known."""
    agent = start(**ENDLESS)
    agent.begin()
    device = one_window(agent, "kernel off count=500 ns=4000 skew=-10000000000").device()
    assert (device.windows_without_union, device.device_traced_ns, device.idle_host_ns) == (1, 0, 0)


def test_p02_parts_of_continuous_tracing(start: Start) -> None:
    """P02: by another clock in each of them."""
    agent = start(MODE="continuous", WINDOW_SECONDS="0.1")
    agent.trace()
    for count in (500, 1000, 1500):
        agent.do("kernel off count=500 ns=4000 skew=-10000000000")
        device = wait_executions(agent, count).device()
    parts = device.windows_without_union
    assert parts >= 3
    assert device.device_traced_ns < device.traced_ns - parts * 50_000_000  # each was longer than that


def test_kernels_outside_of_graphs_are_no_measure(start: Start) -> None:
    """An all-reduce takes as long as the slowest of all ranks lets it."""
    agent = start(**ENDLESS)
    agent.begin()
    now = one_window(agent, "kernel nccl count=10 ns=1000", "graph nccl nodes=1 ns=1500000000")
    assert (now.kernels()["nccl"].executions, now.header.records_dropped) == (11, 0)
    assert now.device().busy_ns > 1_500_000_000


def test_nodes_that_there_is_no_room_for_are_measured_by_this_window(start: Start) -> None:
    """They are not held until it is over."""
    agent = start(**ENDLESS)
    agent.begin()
    late = [f"graph g nodes=1 at={20 + i}000000 ns=1900000000 launched=0" for i in range(5)]
    many = "graph z nodes=66000 at=2000000000 ns=10"
    now = one_window(agent, "base in=0", "graph g nodes=1000 ns=1000", many, *late, "until 100000000")
    assert now.header.records_dropped >= 5
    assert now.device().busy_ns < 10_000_000


def test_other_ways_to_launch(start: Start) -> None:
    """Launches by the driver's functions count where they are wanted; other functions are not recorded at all."""
    agent = start(RECORDS="kernels,copies,driver", MODE="continuous", WINDOW_SECONDS="0.1")
    agent.trace()
    agent.do("kernel a driver=1 count=5", "kernel b driver=1 cbid=652 count=5", "kernel c cbid=430 count=5")
    agent.do("kernel d cbid=10 count=5")  # cudaFree launches nothing, but something unknown may
    agent.do("sync 1 driver=1 ns=60", "sync 3 driver=1 ns=70", "sync 4 driver=1 ns=80")
    now = wait_executions(agent, 20)
    latencies = {name: kernel.latency_count for name, kernel in now.kernels().items()}
    assert latencies == {"a": 5, "b": 5, "c": 5, "d": 0}
    assert list(now.device().sync_ns) == [0, 60, 0, 70, 80]


def test_the_driver_s_functions_are_left_alone_unless_wanted(start: Start) -> None:
    """Kernels and nodes that they launch count, and are no lost ones; their launches are unknown."""
    agent = start(WINDOW_SECONDS="0.4", PERIOD_SECONDS="0.5")
    agent.trace()
    agent.do("kernel a driver=1 count=50", "graph g nodes=5 driver=1 count=10")
    now = wait_executions(agent, 100)
    assert now.kernels()["a"].latency_count == now.device().launch_api_calls == now.header.windows_discarded == 0
    assert "cuptiActivityEnableDriverApi" not in agent.calls()


SOON = {"WINDOW_SECONDS": "0.4", "PERIOD_SECONDS": "0.5"}


def test_a_replay_that_went_on_when_the_window_began(start: Start) -> None:
    """CUPTI 13.0.1 tells some of its nodes with the start of an earlier replay: they would have taken seconds."""
    agent = start(MODE="continuous")
    agent.do("base in=0")
    agent.trace()
    agent.do("graph g nodes=1 at=0 ns=200000000 count=8", "graph g nodes=8", "kernel a")
    now = agent.wait(lambda now: "a" in now.kernels())
    assert (now.kernels()["g"].executions, now.kernels()["g"].max_ns) == (8, 1000)
    assert (now.header.records_dropped, now.header.records_invalid) == (8, 0)


def test_a_replay_that_goes_on_when_the_window_ends(start: Start) -> None:
    """Some of its nodes end when their records are asked for; those that take as long as always are sound.

    Of the others it is known that they ran, and for no longer than it ever took.
    """
    agent = start(WINDOW_SECONDS="1", PERIOD_SECONDS="3")
    agent.trace("base in=0")
    agent.do("graph g nodes=4 ns=1000000", "graph queued nodes=1500 ns=1000000", "graph g nodes=1 ns=1500000000")
    now = agent.published()
    assert (now.kernels()["g"].executions, now.kernels()["g"].ns) == (4, 4_000_000)
    assert (now.kernels()["queued"].executions, now.kernels()["queued"].max_ns) == (1500, 1_000_000)
    assert (now.header.records_dropped, now.header.records_invalid, now.header.windows_discarded) == (1, 0, 0)
    assert now.device().busy_ns == pytest.approx(1_505_000_000, rel=0.01)


STALE_ONES = [
    "graph g nodes=1 at=-30000000000 ns=30000000000 call=0",  # ends in the window, but never began there
    "graph g nodes=1 at=-9000000000 ns=1000000 call=0",  # all of an earlier replay
    "graph g nodes=1 at=-3000000000 ns=3000000000 call=0 count=70000",  # more than are held
]


@pytest.mark.parametrize("stale", STALE_ONES)
def test_stale_nodes_reach_back_in_no_sum(start: Start, stale: str) -> None:
    """Whatever they say of themselves, the device was not traced before the window, nor busy."""
    agent = start(WINDOW_SECONDS="1", PERIOD_SECONDS="3")
    agent.trace()
    agent.do("base in=0", "graph h nodes=10", "kernel x ns=1000000", stale)
    now = agent.published()
    assert now.kernels().keys() == {"h", "x"}
    assert now.device().device_traced_ns < 1_500_000_000
    assert now.header.records_dropped in (1, 70000)


def test_p02_one_of_two_gpus_whose_clock_is_off(start: Start) -> None:
    """P02: that nodes of one lie in the window says nothing of those of the other."""
    agent = start(WINDOW_SECONDS="1", PERIOD_SECONDS="3")
    agent.trace("devices 2")
    agent.do("context 1", "kernel x", "kernel x device=1 skew=-10000000000", "graph g nodes=500")
    agent.do("graph g nodes=500 device=1 skew=-10000000000")
    now = agent.published()
    assert now.kernels(1)["g"].executions == 500
    assert now.header.records_dropped == 0


LATE = [f"graph g nodes=1 at={20 + i}000000 ns=1900000000 launched=0" for i in range(50)]
"""Replays with the end of a flush."""


def test_kernels_without_a_slot_of_their_own_are_no_longer_than_others(start: Start) -> None:
    """The device's slot for all of them is the measure then."""
    agent = start(**ENDLESS)
    agent.begin()
    now = one_window(
        agent, "base in=0", "kernel n count=4096 distinct=4096", "graph g nodes=1000 ns=1000", *LATE, "until 100000000"
    )
    overflow = now.file.kernels[4096]
    assert (overflow.executions, overflow.ns, now.header.records_dropped) == (1000, 1_000_000, 50)


def test_a_discarded_window_teaches_nothing(start: Start) -> None:
    """The clock was set in it, so that a node took 10 s."""
    agent = start(**ENDLESS)
    agent.trace()
    agent.do("graph g nodes=1 ns=10000000000", "clock 11000000000", "entry gpu_hpc_agent_stop")
    agent.wait(lambda now: now.header.windows_discarded == 1)
    agent.do("entry gpu_hpc_agent_start")
    now = one_window(agent, "graph g nodes=10 ns=1000", "graph g nodes=1 ns=1500000000")
    assert (now.kernels()["g"].executions, now.kernels()["g"].max_ns) == (10, 1000)


def test_a_clock_that_is_right_for_kernels_is_for_nodes(start: Start) -> None:
    """A node that ran before the window was recorded is another replay's, though no other node tells."""
    agent = start(**ENDLESS)
    agent.begin()
    now = one_window(agent, "base in=0", "kernel x", "graph g nodes=1 at=-9000000000 ns=1000000000 call=0")
    assert now.kernels().keys() == {"x"}
    assert now.header.records_dropped == 1
    assert now.device().busy_ns <= 1000


def test_nodes_with_the_start_of_an_earlier_replay_overlap_nothing(start: Start) -> None:
    """One stream, compute and communication by turns: each ran at its end, for as long as it ever took."""
    agent = start(**ENDLESS)
    agent.begin()
    sound = ["graph g nodes=1 ns=1000000 at=0", "graph nccl nodes=1 ns=1000000 at=1000000"]
    stale = [
        f"graph {'nccl' if i % 2 else 'g'} nodes=1 at=-3000000000 ns={3_010_000_000 + i * 1_000_000} call=0"
        for i in range(10)
    ]
    now = one_window(agent, "base in=0", *sound, *stale, "until 100000000")
    assert now.header.records_dropped == 10
    assert (now.device().busy_ns, now.device().overlap_ns) == (12_000_000, 0)


def test_waits_of_a_program_that_launched_nothing(start: Start) -> None:
    """They count for the device that it has, whichever that is."""
    agent = start(**ENDLESS)
    agent.do(f"load {agent.programs.cupti}", "devices 2", "init", "context 1")
    now = one_window(agent, "sync 4 ns=1000 count=10")
    assert (now.device(0).used, now.device(1).sync_calls[4], now.device(1).sync_ns[4]) == (0, 10, 10_000)


def test_dropped_nodes_overlap_nothing(start: Start) -> None:
    """One stream, compute and communication by turns, all with the end of a flush."""
    agent = start(WINDOW_SECONDS="1", PERIOD_SECONDS="3")
    agent.trace()
    agent.do("base in=0", "graph g nodes=1 ns=1000000 at=0", "graph nccl nodes=1 ns=1000000 at=1000000")
    late = [f"graph {'nccl' if i % 2 else 'g'} nodes=1 at={600 + i}000000 ns=900000000 launched=0" for i in range(10)]
    agent.do(*late)
    now = agent.published()
    assert now.header.records_dropped == 10
    assert now.device().overlap_ns < 1_000_000
    assert now.device().busy_ns == pytest.approx(12_000_000, rel=0.01)


def test_sound_nodes_may_come_in_any_order(start: Start) -> None:
    """A buffer with what ran after the window may be emptied before the one with what ran in it."""
    agent = start(WINDOW_SECONDS="1", PERIOD_SECONDS="3")
    agent.trace()
    agent.do("stall 1", "base in=0", "kernel x")
    agent.do("graph g nodes=1 ns=1000000 delay=1500000000 lane=0", "graph g nodes=5 ns=1000000 lane=1")
    agent.do("until 1700000000", "stall 0")
    now = agent.published()
    assert (now.kernels()["g"].executions, now.header.records_dropped) == (6, 0)


@pytest.mark.parametrize("version", [130001, 130101])
def test_nodes_longer_than_a_window(start: Start, version: int) -> None:
    """Nothing says that their times are wrong, and the GPU was busy."""
    agent = start(WINDOW_SECONDS="1", PERIOD_SECONDS="3")
    agent.trace(f"version {version}")
    agent.do("kernel x ns=1000000", "graph g nodes=1 ns=1500000000")
    now = agent.published()
    device = now.device()
    assert (now.kernels()["g"].executions, now.header.records_dropped) == (1, 0)
    assert device.busy_ns >= 1_500_000_000
    assert device.idle_host_ns + device.idle_queue_ns + device.idle_other_ns < 400_000_000
    assert (device.graph_launches_traced, device.graph_launches_untraced) == (1, 0)


def test_a_replay_of_nodes_that_are_all_different(start: Start) -> None:
    """Each runs once in it: those that cross the window's end, or come after it, have nothing to be held against."""
    agent = start(WINDOW_SECONDS="1", PERIOD_SECONDS="3")
    agent.trace()
    agent.do("base in=0")
    agent.do(*(f"graph g{i} nodes=1 ns=100000000 at={i * 100_000_000}" for i in range(20)))
    now = agent.published()
    assert len(now.kernels()) == 20
    assert now.header.records_dropped == 0


@pytest.mark.parametrize("skew_s", [10, -10])
def test_p02_nodes_of_a_gpu_whose_clock_is_off(start: Start, skew_s: int) -> None:
    """P02: none lies in the window, so that none is wrong for it."""
    agent = start(WINDOW_SECONDS="1", PERIOD_SECONDS="3")
    agent.trace()
    agent.do(f"kernel x skew={skew_s * 10**9}", f"graph g nodes=500 skew={skew_s * 10**9}")
    now = agent.published()
    assert (now.kernels()["g"].executions, now.header.records_dropped) == (500, 0)


def test_unsound_nodes_beside_calls_that_do_not_come(start: Start) -> None:
    """A tool has disabled the calls: that is noticed all the same."""
    agent = start(WINDOW_SECONDS="0.5", PERIOD_SECONDS="1")
    agent.do("base in=0")
    agent.trace()
    agent.do("graph g nodes=5", "kernel a")
    agent.published()
    agent.do("all_calls 0")
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel a count=500", "graph g nodes=1 at=0 ns=100000000")
    now = agent.wait(lambda now: now.kernels()["a"].executions == 501)
    assert now.header.records_dropped == 1
    assert now.header.flags & 17 == 16  # no launches, no waits


def test_a_graph_launched_while_a_window_opened(start: Start) -> None:
    """Its nodes run to the window's end; the launch is not counted, but known."""
    agent = start(**SOON)
    agent.begin("slow cuptiGetTimestamp ms=150")
    fake_activity.until(lambda: 10 in agent.kinds())
    agent.do("graph g nodes=300 ns=2000000", "slow cuptiGetTimestamp ms=0")
    now = agent.published()
    assert "g" in now.kernels()
    assert now.device().graph_launches_untraced + now.device().graph_launches_traced == 0


def test_what_finds_no_other_half_is_unmatched(start: Start) -> None:
    """K03: a call without a kernel (it failed), a kernel without a call; when the window closes both are counted."""
    agent = start(MODE="continuous")
    agent.trace()
    agent.do(
        "kernel a count=4 call=0", "kernel b count=3 work=0 api_ns=700", "kernel c count=2", "entry gpu_hpc_agent_stop"
    )
    now = agent.wait(lambda now: now.state[0] == 2)
    assert executions(now) == 6
    assert now.header.records_unmatched == 7
    assert now.device().launch_api_calls == 5
    assert now.device().launch_api_ns == 3 * 700 + 2 * 1000


def test_ids_come_round(start: Start) -> None:
    """70,000 kernels whose calls never come fill the places twice; matching goes on, also over the end of 32 bits."""
    agent = start(MODE="continuous", WINDOW_SECONDS="60")
    agent.trace()
    agent.do("correlation 4294930000", "kernel a count=70000 call=0", "kernel b count=2000", "entry gpu_hpc_agent_stop")
    now = wait_executions(agent, 72_000)
    assert now.kernels()["b"].latency_count == 2000
    assert now.header.records_unmatched == 70_000 - 1  # 0 is no id


@pytest.mark.parametrize("invalid", ["zero", "negative", "huge"])
def test_invalid_times_are_in_no_sum(continuous: Agent, invalid: str) -> None:
    """K02: CUPTI had no memory for the times, or erred."""
    continuous.do("kernel good count=1000", f"kernel bad count=3 invalid={invalid}", "kernel good count=1000")
    now = wait_executions(continuous, 2000)
    assert now.kernels().keys() == {"good"}
    assert now.header.records_invalid == 3
    assert now.kernels()["good"].ns == 2_000_000


def test_copies_by_direction_and_memory(continuous: Agent) -> None:
    """Number, bytes, sizes, seconds on the device and in the calls; copies within the host are none."""
    continuous.do(
        "copy h2d memory=pageable bytes=8 count=50 ns=1200 api_ns=9000",
        "copy h2d memory=pinned bytes=65536 count=2 ns=3000",
        "copy d2h memory=pageable bytes=300 ns=2000 cbid=31",
        "copy d2h memory=pinned bytes=300000000",
        "copy d2d bytes=5000 count=3",
        "copy p2p bytes=70000",
        "copy h2h bytes=4",
        "set bytes=1000 count=2 ns=800",
    )
    now = continuous.wait(lambda now: now.device().sets == 2)
    small = now.copies(H2D, PAGEABLE)
    assert (small.count, small.bytes, small.ns, small.api_ns, small.api_calls) == (50, 400, 60_000, 450_000, 50)
    assert list(small.buckets) == [50, 0, 0, 0, 0, 0, 0]
    assert list(now.copies(H2D, PINNED).buckets) == [0, 0, 2, 0, 0, 0, 0]
    assert list(now.copies(D2H, PAGEABLE).buckets) == [0, 1, 0, 0, 0, 0, 0]
    assert list(now.copies(D2H, PINNED).buckets) == [0, 0, 0, 0, 0, 0, 1]
    assert (now.copies(D2D, DEVICE).count, now.copies(P2P, DEVICE).count) == (3, 1)
    assert now.copies(P2P, DEVICE).api_calls == 1
    assert sum(now.copies(d, m).count for d in range(4) for m in range(3)) == 58
    assert (now.device().set_bytes, now.device().set_ns) == (2000, 1600)
    assert now.device().launch_api_calls == 0


def test_waits_by_function_and_thread(continuous: Agent) -> None:
    """A thread's device is known from its kernels, which may come later than the wait; else it is the main one."""
    continuous.do("devices 2", "context 1")
    continuous.do("sync 3 ns=5000 count=10 threads=1", "sync 4 ns=7000", "sync 1 ns=600", "sync 3 cbid=239 ns=80")
    continuous.do("sync 3 cbid=147 ns=1", "sync 4 cbid=126 ns=9000")  # a stream's wait for an event holds no host up
    continuous.do("kernel a count=3", "kernel b device=1 wait_ns=40 threads=2")
    now = wait_executions(continuous, 5)
    assert (list(now.device(0).sync_ns), list(now.device(0).sync_calls)) == (
        [0, 600, 0, 50_080, 16_000],
        [0, 1, 0, 11, 2],
    )
    assert (list(now.device(1).sync_ns), list(now.device(1).sync_calls)) == ([0, 0, 0, 80, 0], [0, 0, 0, 2, 0])


@pytest.mark.parametrize("work", ["graph g nodes=5", "copy h2d"])
def test_waits_of_threads_that_launch_no_kernels(start: Start, work: str) -> None:
    """Graphs and copies tell a thread's device as kernels do."""
    agent = start(MODE="continuous")
    agent.trace("version 130101", "devices 2")
    agent.do("kernel a count=30", f"{work} device=1 wait_ns=40 threads=2")
    now = agent.wait(lambda now: now.device(1).sync_calls[3] + now.device(0).sync_calls[3] == 2)
    assert (now.device(0).sync_ns[3], now.device(1).sync_ns[3]) == (0, 80)


def test_waits_of_threads_that_come_and_go(start: Start) -> None:
    """More than there are places for: later threads find one, and those that stay find theirs again."""
    agent = start(MODE="continuous", WINDOW_SECONDS="0.5")
    agent.trace("devices 2")
    agent.do("kernel b device=1", *(f"kernel a thread={thread}" for thread in range(1, 301)), "kernel b device=1")
    wait_executions(agent, 302)
    agent.do("kernel b device=1 wait_ns=50", "kernel b device=1 wait_ns=40 threads=2", "kernel a thread=7 count=9")
    now = wait_executions(agent, 314)
    assert (now.device(0).sync_ns[3], now.device(1).sync_ns[3]) == (0, 130)


def test_waits_of_a_thread_with_the_highest_number(continuous: Agent) -> None:
    """It is a thread like any other, from the first launch on."""
    continuous.do("devices 2", f"kernel b thread={2**32 - 1} wait_ns=40", "kernel main device=1 count=300")
    now = wait_executions(continuous, 301)
    assert (now.device(0).sync_ns[3], now.device(1).sync_ns[3]) == (40, 0)


def test_waits_by_type_and_context(start: Start) -> None:
    """CUPTI before 12.5 cannot record single functions: its records of waits know the context, not the thread."""
    agent = start(MODE="continuous")
    agent.trace("version 22", "devices 2")
    agent.do("context 1")
    assert agent.kinds() == {1, 2, 10, 22, 38}
    agent.do("sync 3 ns=5000 count=10 context=9", "sync 4 ns=7000 context=1", "sync 77 context=1")
    agent.do("kernel a context=9 device=1", "kernel a context=1 device=0")
    now = wait_executions(agent, 2)
    assert (list(now.device(1).sync_ns), list(now.device(1).sync_calls)) == ([0, 0, 0, 50_000, 0], [0, 0, 0, 10, 0])
    assert (list(now.device(0).sync_ns), list(now.device(0).sync_calls)) == ([1000, 0, 0, 0, 7000], [1, 0, 0, 0, 1])


def test_two_devices(continuous: Agent) -> None:
    """Each has its own sums, UUID and kernels, though names are equal; unused ones stay empty."""
    continuous.do("devices 3", "context 1")
    continuous.do("kernel a count=5 device=0", "kernel a count=7 device=1 ns=2000", "copy h2d device=1 memory=pinned")
    now = wait_executions(continuous, 12)
    assert now.kernels(0)["a"].executions == 5
    assert now.kernels(1)["a"].ns == 14_000
    assert now.copies(H2D, PINNED, device=1).count == 1
    assert [now.device(i).used for i in range(4)] == [1, 1, 0, 0]
    assert bytes(now.device(0).uuid)[:2] == bytes([1, 17])
    now = continuous.wait(lambda now: bool(any(now.device(1).uuid)))
    assert bytes(now.device(1).uuid)[:2] == bytes([2, 18])
    assert now.device(2).traced_ns == 0 < now.device(1).traced_ns <= now.device(0).traced_ns


def test_a_device_beyond_the_file_s_room_is_dropped(continuous: Agent) -> None:
    """Ordinal 16 and later."""
    continuous.do("kernel a device=16 count=3", "kernel b device=15")
    now = wait_executions(continuous, 1)
    assert now.kernels(15).keys() == {"b"}
    assert now.header.records_dropped == 3


def test_kernels_on_such_a_device_are_not_lost_ones(start: Start) -> None:
    """Their launches lack nothing: windows of programs that use many devices are published."""
    agent = start(**SOON)
    agent.trace()
    agent.do("kernel a device=16 count=500", "kernel b count=10")
    now = agent.wait(lambda now: "b" in now.kernels())
    assert (now.header.windows_discarded, now.header.records_dropped, now.header.records_unmatched) == (0, 500, 0)
    assert now.device().launch_api_calls == 510


@pytest.mark.parametrize("threads", [64, 200])
def test_more_threads_than_large_buffers(start: Start, threads: int) -> None:
    """CUPTI gives each thread a buffer of its own: nothing is lost, as long as there are any."""
    agent = start(WINDOW_SECONDS="60", PERIOD_SECONDS="60")
    agent.trace()
    agent.do(f"kernel a count=40 threads={threads} every_us=10000", "entry gpu_hpc_agent_stop")
    now = agent.wait(lambda now: now.header.windows_published == 1)
    kernel = now.kernels()["a"]
    assert (kernel.executions, kernel.latency_count) == (40 * threads, 40 * threads)
    assert now.header.records_dropped == 0


@pytest.mark.parametrize("buffers", ["kinds", "global_buffers"])
def test_many_threads(continuous: Agent, buffers: str) -> None:
    """Eight threads launch at once, into buffers of their own or into common ones."""
    continuous.do(buffers, "kernel a count=5000 threads=8 distinct=100 ns=1000")
    now = wait_executions(continuous, 40_000)
    kernels = now.kernels()
    assert len(kernels) == 100
    assert {kernel.executions for kernel in kernels.values()} == {400}
    assert {kernel.latency_count for kernel in kernels.values()} == {400}
    assert now.header.records_kept == 80_000


def test_a_hundred_thousand_names(continuous: Agent) -> None:
    """The first 4,096 have slots, all others share one; nothing is lost."""
    continuous.do("kernel n count=100000 distinct=100000", "kernel n count=50 distinct=50")
    now = wait_executions(continuous, 100_050)
    kernels = now.kernels()
    assert len(kernels) == 4097
    assert kernels["n_7"].executions == 2
    assert kernels["other"].executions == 100_000 - 4096
    assert now.header.kernels == 4096
    assert now.header.flags & 4


def test_very_long_names(continuous: Agent) -> None:
    """Names are cut at 4 KiB; when no room is left the rest shares a slot."""
    continuous.do("kernel long count=2 long=8000", "kernel n count=1000 distinct=1000 long=4090", "kernel short")
    now = wait_executions(continuous, 1003)
    kernels = now.kernels()
    cut = next(name for name in kernels if name.startswith("long"))
    assert cut == "long" + "x" * 4092
    assert kernels[cut].executions == 2
    assert kernels["other"].executions + len(kernels) - 2 == 1001
    assert now.header.strings_used <= 1536 << 10


def test_a_name_s_memory_is_used_again(continuous: Agent) -> None:
    """An unloaded module's name lies where another's is now: the text counts, not the place."""
    for number, name in enumerate(["first", "second", "fir", "firsty", "first"], start=1):
        continuous.do(f"kernel {name} place=3 count=10")
        wait_executions(continuous, 10 * number)
    now = wait_executions(continuous, 50)
    executed = {name: kernel.executions for name, kernel in now.kernels().items()}
    assert executed == {"first": 20, "second": 10, "fir": 10, "firsty": 10}


def test_nodes_of_graphs(start: Start) -> None:
    """K03: from 13.1.1 on a replay's nodes have its id: which replays were traced is known one by one."""
    agent = start(MODE="continuous")
    agent.trace("version 130101")
    agent.do("graph g nodes=100 count=20 ns=1000", "kernel a count=4")
    now = wait_executions(agent, 2004)
    node = now.kernels()["g"]
    assert (node.executions, node.launches, node.ns, node.latency_count) == (2000, 0, 2_000_000, 0)
    assert (now.device().graph_launches_traced, now.device().graph_launches_untraced) == (20, 0)
    assert now.device().launch_api_calls == 24
    assert now.header.node_records == 2000
    assert now.header.records_unmatched == 0


def test_nodes_of_graphs_with_wrong_ids(continuous: Agent) -> None:
    """K03: before, ids do not fit: all replays of a window with nodes count as traced."""
    continuous.do("graph g nodes=100 count=20 match=0")
    now = wait_executions(continuous, 2000)
    assert now.device().graph_launches_traced + now.device().graph_launches_untraced == 20
    assert now.kernels()["g"].latency_count == 0
    assert now.header.records_unmatched == 0


@pytest.mark.parametrize("version", [130001, 130101])
def test_graphs_whose_nodes_are_not_wanted(start: Start, version: int) -> None:
    """Kernels are traced until there is a graph; then copies and calls alone, and nothing is said of busy or idle."""
    agent = start(MODE="continuous", GRAPH_NODES="0")
    agent.trace(f"version {version}")
    agent.do("kernel a count=6")
    agent.wait(lambda now: "a" in now.kernels())
    agent.do("graph g nodes=100 ns=1000")
    agent.wait(lambda now: now.header.intervals_total == 2 and now.state[0] == 1)
    before = read(agent.path)
    agent.do("graph g nodes=100 count=20 ns=1000", "kernel a count=5", "copy h2d memory=pinned bytes=64 count=3")
    agent.do("entry gpu_hpc_agent_stop")
    now = agent.wait(lambda now: now.state[0] == 2)
    assert now.kernels()["a"].executions == 6
    assert now.header.node_records == before.header.node_records <= 100
    assert now.device().graph_launches_untraced - before.device().graph_launches_untraced == 20
    assert now.device().launch_api_calls - before.device().launch_api_calls == 25
    assert now.copies(H2D, PINNED).count == 3
    assert now.device().device_traced_ns == before.device().device_traced_ns
    assert now.header.records_unmatched == 0
    assert not now.header.flags & 2


def test_node_records_have_a_limit(start: Start) -> None:
    """After so many in a life no kernel is recorded."""
    agent = start(MODE="continuous", NODE_RECORDS="1000")
    agent.trace()
    agent.do("graph g nodes=100 count=12 match=0")
    now = agent.wait(lambda now: not now.header.flags & 2)
    agent.wait(lambda now: now.header.intervals_total == 2 and now.state[0] == 1)
    agent.do("graph g nodes=100 count=5 match=0", "kernel a count=6", "copy h2d memory=pinned bytes=64")
    now = agent.wait(lambda now: now.copies(H2D, PINNED).count == 1)
    assert now.header.node_records == now.kernels()["g"].executions == 1200
    assert "a" not in now.kernels()


def test_without_records_of_calls(start: Start) -> None:
    """Before 12.5 single functions cannot be recorded: launch to start is absent, and said to be."""
    agent = start(MODE="continuous")
    agent.trace("version 20")
    agent.do("kernel a count=10")
    now = wait_executions(agent, 10)
    assert not now.header.flags & 1
    assert now.kernels()["a"].launches == 10
    assert now.kernels()["a"].latency_count == now.device().launch_api_calls == now.header.records_unmatched == 0
    assert agent.kinds() == {1, 2, 10, 22, 38}
    assert agent.calls()["attribute_8"] == 1


def test_a_foreign_buffer_is_left_alone(continuous: Agent) -> None:
    """CUPTI gives our callback another tool's buffer, or none."""
    continuous.do("foreign", "kernel a")
    now = wait_executions(continuous, 1)
    assert now.header.records_kept == 2


def test_a_program_that_copies_all_the_time(start: Start) -> None:
    """One is always in flight, so that its thread's buffer is never complete: forced out, it lacks nothing."""
    agent = start(WINDOW_SECONDS="0.5", PERIOD_SECONDS="1", DRAIN_SECONDS="0.3")
    agent.trace()
    agent.send("copy h2d memory=pinned bytes=8 ns=50000000 every_us=10000 count=400")
    now = agent.wait(lambda now: now.header.windows_published >= 3)
    assert 0.5 * 300 * 0.2 < now.copies(H2D, PINNED).count <= 300  # 100 a second are wanted, of a busy machine fewer
    assert now.header.windows_discarded == now.header.records_invalid == now.header.records_dropped == 0
    assert agent.hear() == "ok"
