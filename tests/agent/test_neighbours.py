"""Other tools that use CUPTI in the same process."""

from __future__ import annotations

import pytest

import fake_activity
from fake_activity.agent import Start
from fake_activity.agent_file import Reason, State, read

PAUSED = (State.PAUSED, Reason.PROFILER)


def test_a_profiler_that_was_first_keeps_everything(start: Start) -> None:
    """J08: its subscription is seen before the first window: nothing is registered, enabled or disabled."""
    agent = start()
    agent.begin("profile")
    now = agent.wait(lambda now: now.state == PAUSED)
    agent.do("kernel a count=500")
    assert agent.do("profiled") == "500"
    assert agent.calls()["@touched"] == 0
    assert now.header.windows_published == now.header.intervals_total == 0
    assert agent.said() == ""


@pytest.mark.parametrize("mode", ["duty", "continuous"])
def test_a_profiler_that_begins_in_a_window_gets_all(start: Start, mode: str) -> None:
    """J08: it has replaced our callbacks; our kinds are its kinds now, so we do not disable them."""
    agent = start(MODE=mode, WINDOW_SECONDS="1", PERIOD_SECONDS="1.5")
    agent.trace()
    agent.do("kernel ours count=10", "profile", "kernel its count=200")
    now = agent.wait(lambda now: now.state == PAUSED)
    agent.do("kernel its count=300")
    # The ten of before lay in our buffers, which CUPTI now gives to it.
    assert agent.do("profiled") in ("500", "510")
    assert agent.calls()["@touched"] == 0
    assert now.header.windows_discarded == 1
    assert now.intervals()[-1][1] > 0
    assert not now.kernels()


def test_a_profiler_that_begins_in_a_pause(start: Start) -> None:
    """J08: seen before the next window."""
    agent = start(WINDOW_SECONDS="0.5", PERIOD_SECONDS="1")
    agent.trace()
    agent.do("kernel ours count=10")
    agent.published()
    agent.do("profile", "kernel its count=100")
    now = agent.wait(lambda now: now.state == PAUSED)
    assert agent.do("profiled") == "100"
    assert agent.calls()["@touched"] == 0
    assert now.kernels()["ours"].executions == 10


def test_it_stays_paused_unless_told_otherwise(start: Start) -> None:
    """Even if the subscription is free again."""
    agent = start()
    agent.begin("profile")
    agent.wait(lambda now: now.state == PAUSED)
    agent.do("profiled", "unsubscribe")
    heartbeat = agent.wait(lambda _: True).header.heartbeat_ns
    now = agent.wait(lambda now: now.header.heartbeat_ns > heartbeat)
    assert now.state == PAUSED


@pytest.mark.parametrize("keeps_slot", [False, True])
def test_it_resumes_when_configured(start: Start, *, keeps_slot: bool) -> None:
    """J08: after the given time, though torch.profiler keeps the subscription; buffers that it got are forgotten."""
    agent = start(RESUME_AFTER_PROFILER_MINUTES="0.008", WINDOW_SECONDS="0.5", PERIOD_SECONDS="0.6")
    agent.trace()
    agent.do("kernel ours count=10", "profile", "kernel its count=100")
    agent.wait(lambda now: now.state == PAUSED)
    agent.do("profiled")
    if not keeps_slot:
        agent.do("unsubscribe")
    now = agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel ours count=33")
    now = agent.wait(lambda now: "ours" in now.kernels())
    assert now.kernels().keys() == {"ours"}
    assert now.kernels()["ours"].executions == 33


@pytest.mark.parametrize("rounds", [1, 30])
def test_a_profiler_that_frees_what_it_gets(start: Start, rounds: int) -> None:
    """XLA's does so with the buffers that CUPTI had of ours, in a window and in a pause; we have others afterwards."""
    agent = start(RESUME_AFTER_PROFILER_MINUTES="0.004", WINDOW_SECONDS="0.1", PERIOD_SECONDS="0.2")
    agent.trace()
    for _ in range(rounds):
        agent.do("copy h2d threads=5", "kernel ours count=10 threads=5", "profile frees=1", "kernel its count=9")
        agent.wait(lambda now: now.state == PAUSED)
        assert int(agent.do("profiled")) >= 9
        agent.do("unsubscribe")
        agent.wait(lambda now: now.header.state in (State.WAITING, State.TRACING))
        published = agent.published().header.windows_published
    fake_activity.until(lambda: agent.do("kernel late count=5") == "" and "late" in read(agent.path).kernels())
    assert read(agent.path).header.windows_published > published
    assert agent.end(3) == 3
    assert agent.said() == ""


def test_buffers_that_come_back_after_all(start: Start) -> None:
    """What was written before the profiler came does not fall into a window after it."""
    agent = start(RESUME_AFTER_PROFILER_MINUTES="0.008", WINDOW_SECONDS="0.5", PERIOD_SECONDS="0.6")
    agent.trace()
    agent.do("stall 1", "kernel before count=10", "profile")
    agent.wait(lambda now: now.state == PAUSED)
    agent.do("profiled", "unsubscribe")
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("stall 0", "kernel after count=33 lane=5")
    now = agent.wait(lambda now: "after" in now.kernels())
    assert now.kernels().keys() == {"after"}
    assert now.kernels()["after"].executions == 33


def test_a_failing_probe_is_no_profiler(start: Start) -> None:
    """Any other error ends it."""
    agent = start()
    agent.begin("fault cuptiSubscribe code=27")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert now.state == (State.OFF, Reason.CUPTI_ERROR)
    assert (now.header.error_code, now.header.error_call) == (27, b"cuptiSubscribe")
