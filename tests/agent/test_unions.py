"""Busy, compute, communication, copy, overlap and idle time of one window, with every interval given."""

from __future__ import annotations

import pytest

from fake_activity.agent import Start
from fake_activity.agent_file import Device, State

MS = 1_000_000
NAMES = ("busy", "compute", "communication", "copy", "overlap", "idle_host", "idle_queue", "idle_other")


def device_after(start: Start, *commands: str, version: int = 130001) -> Device:
    """One window around the commands, whose `at` count from its beginning on; it ends after 20 ms."""
    agent = start(MODE="continuous", WINDOW_SECONDS="60")
    agent.trace(f"version {version}")
    agent.do("base in=1000000", *commands, f"until {20 * MS}", "entry gpu_hpc_agent_stop")
    return agent.wait(lambda now: now.header.windows_published == 1).device()


def in_us(device: Device) -> dict[str, int]:
    """The eight in microseconds; the end of the window is not ours, idle time after the last work is left out."""
    return {name: round(getattr(device, f"{name}_ns") / 1000) for name in NAMES}


OVERLAPPING = (
    "kernel gemm at=0 ns=1000000 stream=1",
    "kernel gemm at=200000 ns=700000 stream=2",  # beside the first: busy once
    "kernel ncclDevKernel_AllReduce at=600000 ns=1200000 stream=3",
    "kernel gemm at=1500000 ns=400000 stream=1",
    "copy h2d at=1850000 ns=650000",
)


def test_unions_and_overlap(start: Start) -> None:
    """What runs at the same time counts once; A is the latest of the streams' first starts, 0.6 ms here."""
    device = device_after(start, *OVERLAPPING)
    found = in_us(device)
    assert found["compute"] == 400 + 400
    assert found["communication"] == 1200
    assert found["overlap"] == 400 + 300
    assert found["copy"] == 650
    assert found["busy"] == 1900
    assert device.device_traced_ns == sum(
        getattr(device, f"{name}_ns") for name in ("busy", "idle_host", "idle_queue", "idle_other")
    )


def test_a_seldom_used_stream_does_not_shorten_the_window(start: Start) -> None:
    """A and B are made of streams with at least 1 % of the kernels' time."""
    device = device_after(start, "kernel gemm at=0 ns=5000000 stream=1", "kernel tiny at=4000000 ns=1000 stream=2")
    assert in_us(device)["busy"] == 5000


MANGLED = ["ncclKernel_Broadcast_RING_LL", "_Z40ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgs"]


@pytest.mark.parametrize("name", MANGLED)
def test_communication_by_name(start: Start, name: str) -> None:
    """NCCL's kernels, mangled or not."""
    found = in_us(device_after(start, f"kernel {name} at=0 ns=1000000"))
    assert (found["communication"], found["compute"]) == (1000, 0)


def test_names_that_only_hold_nccl_are_compute(start: Start) -> None:
    """A kernel is what it begins with."""
    found = in_us(device_after(start, "kernel my_nccl_helper at=0 ns=1000000"))
    assert (found["communication"], found["compute"]) == (0, 1000)


def test_idle_time_by_reason(start: Start) -> None:
    """Nothing launched: host. Launched, not started: queue. Launch of what came next unknown: other."""
    device = device_after(
        start,
        "kernel a at=0 ns=1000000",
        "kernel a at=2000000 launched=1700000 ns=1000000",  # 0.7 ms host, 0.3 ms queue
        "kernel a at=4000000 launched=2500000 ns=1000000",  # 1 ms queue
        "kernel a at=6000000 call=0 ns=1000000",  # 1 ms other
        "kernel a at=7100000 launched=7050000 ns=100000",  # 0.05 ms each
        "copy h2d at=8000000 launched=7500000 ns=200000",  # a copy is launched when its call begins: 0.501 ms queue
    )
    found = in_us(device)
    assert found["busy"] == 4300
    assert found["idle_queue"] == 300 + 1000 + 50 + 501
    assert found["idle_other"] == 1000
    # To the end of the window nothing more is launched.
    assert found["idle_host"] == pytest.approx(device.device_traced_ns / 1000 - 4300 - 1851 - 1000, abs=1)
    assert found["idle_host"] > 12_000


def test_a_launch_that_waits_behind_a_later_gap_counts(start: Start) -> None:
    """Something launched long ago that starts later makes an earlier gap a queue too."""
    device = device_after(
        start,
        "kernel a at=0 ns=1000000",
        "kernel a at=2000000 launched=1900000 ns=1000000",
        "kernel a at=3000000 launched=500000 ns=1000000",
    )
    assert in_us(device)["idle_queue"] == 1000


def test_replays_of_graphs(start: Start) -> None:
    """With ids that fit, a gap before a replay is split by the replay's launch."""
    device = device_after(
        start,
        "graph g at=0 nodes=10 ns=100000",
        "graph g at=2000000 launched=1500000 nodes=10 ns=100000",
        version=130101,
    )
    found = in_us(device)
    assert (found["busy"], found["idle_queue"], found["idle_other"]) == (2000, 500, 0)


def test_no_kernel_no_union(start: Start) -> None:
    """Without kernels the first window's beginning is unknown: it adds nothing, and is counted."""
    device = device_after(start, "copy h2d at=0 ns=1000000")
    assert device.windows_without_union == 1
    assert device.device_traced_ns == 0 < device.traced_ns


def test_more_streams_than_have_room(start: Start) -> None:
    """No union rather than a wrong one."""
    commands = [f"kernel a at={i} stream={i}" for i in range(300)]
    device = device_after(start, *commands)
    assert device.windows_without_union == 1


def test_more_streams_than_can_have_a_hundredth(start: Start) -> None:
    """None tells where the time begins that all of them were seen in."""
    device = device_after(start, *(f"kernel a at={i} stream={i}" for i in range(120)))
    assert (device.windows_without_union, device.device_traced_ns, device.idle_host_ns) == (1, 0, 0)


def test_the_first_part_of_continuous_tracing(start: Start) -> None:
    """What runs on beyond its end is in the next part."""
    agent = start(MODE="continuous", WINDOW_SECONDS="0.3")
    agent.trace()
    agent.do("kernel long ns=2000000000")
    agent.published(4)
    agent.do("entry gpu_hpc_agent_stop")
    device = agent.wait(lambda now: now.state[0] == State.PAUSED).device()
    assert device.busy_ns <= 2_000_000_000
    assert device.device_traced_ns <= device.traced_ns


def test_parts_of_continuous_tracing_fit_together(start: Start) -> None:
    """Work across the border of two publications is in both, in parts: nothing is lost, nothing counts twice."""
    agent = start(MODE="continuous", WINDOW_SECONDS="0.02")
    agent.trace()
    agent.do("kernel a ns=1000")
    agent.wait(lambda now: now.device().device_traced_ns > 0)
    agent.do(*(f"kernel a count=1 ns=7000000 every_us=9000 stream={i % 3}" for i in range(40)))
    agent.do("entry gpu_hpc_agent_stop")
    now = agent.wait(lambda now: now.state[0] == 2)
    kernel, device = now.kernels()["a"], now.device()
    assert now.header.windows_published > 5
    assert device.busy_ns <= kernel.ns
    assert abs(device.busy_ns - 40 * 7_000_000) < 8_000_000  # all but what ran in the first part or after the last
    assert device.device_traced_ns == device.busy_ns + device.idle_host_ns + device.idle_queue_ns + device.idle_other_ns
