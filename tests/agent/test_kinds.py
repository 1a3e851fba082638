"""Which kinds are enabled, and when: switching most of them in a living program breaks it (the fake aborts)."""

from __future__ import annotations

import pytest

import fake_activity
from fake_activity.agent import FOR_LIFE, Start
from fake_activity.agent_file import H2D, PINNED, Reason, State

LAUNCHES, NO_COPIES, NO_WAITS = 1, 8, 16
"""Flags of the file."""
DRIVER, RUNTIME, KERNELS = 4, 5, 10
COPIES = FOR_LIFE
FUNCTIONS = {RUNTIME: "@runtime", DRIVER: "@driver"}
"""Of these single functions are recorded, and the kinds of all their calls are left alone."""


def test_calls_and_copies_are_enabled_inside_cuinit_and_never_switched(start: Start) -> None:
    """Through windows, a stop, another start and the end."""
    agent = start()
    agent.do(f"load {agent.programs.cupti}", "init")
    assert agent.kinds() == FOR_LIFE  # cuInit has just returned
    agent.do("context 0")
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.published(3)
    agent.do("entry gpu_hpc_agent_stop")
    now = agent.wait(lambda now: now.header.state == State.PAUSED)
    assert agent.kinds() == FOR_LIFE
    assert now.header.flags & (LAUNCHES | NO_COPIES | NO_WAITS) == LAUNCHES
    agent.do("entry gpu_hpc_agent_start")
    agent.published(3)
    assert agent.end(3) == 3
    assert agent.said() == ""


@pytest.mark.parametrize(
    ("records", "kinds", "flags"),
    [
        ("kernels", set(), NO_COPIES | NO_WAITS),
        ("kernels,copies", COPIES, NO_WAITS),
        ("calls", {RUNTIME}, LAUNCHES | NO_COPIES),
        ("waits,copies", COPIES | {RUNTIME}, 0),
        ("waits,calls", {RUNTIME}, LAUNCHES | NO_COPIES),
        ("kernels,calls,copies,driver", COPIES | {RUNTIME, DRIVER}, LAUNCHES),
        ("driver", {RUNTIME, DRIVER}, LAUNCHES | NO_COPIES),
        ("kernels,coppies", COPIES | {RUNTIME}, LAUNCHES),
        ("copies,", COPIES, NO_WAITS),
        ("kernels copies", COPIES | {RUNTIME}, LAUNCHES),
        ("", COPIES | {RUNTIME}, LAUNCHES),
    ],
)
def test_what_is_recorded(start: Start, records: str, kinds: set[int], flags: int) -> None:
    """As the variable says; what cannot be read leaves the default, and kernels always are."""
    agent = start(RECORDS=records, MODE="continuous")
    agent.trace()
    calls = agent.calls()
    assert agent.kinds() == kinds & COPIES | {KERNELS}
    assert {api for api, name in FUNCTIONS.items() if calls[name]} == kinds - COPIES
    agent.do("kernel a count=5", "copy h2d memory=pinned bytes=64", "set 64", "sync 4 ns=1000")
    now = agent.wait(lambda now: "a" in now.kernels())
    now = agent.published(2)
    assert now.header.flags & (LAUNCHES | NO_COPIES | NO_WAITS) == flags
    assert now.kernels()["a"].latency_count == (5 if flags & LAUNCHES else 0)
    assert now.copies(H2D, PINNED).count == now.device().sets == (0 if flags & NO_COPIES else 1)
    assert now.device().sync_calls[4] == (0 if flags & NO_WAITS else 1)
    assert now.header.windows_discarded == now.header.records_unmatched == 0
    device = now.device()  # nothing ran after these, and where launches are unknown so is why
    assert device.idle_host_ns + device.idle_queue_ns + device.idle_other_ns > 0
    assert (device.idle_host_ns + device.idle_queue_ns > 0) == bool(flags & LAUNCHES)


def test_an_agent_that_came_after_cuinit_records_kernels_alone(start: Start) -> None:
    """Its program computes already."""
    agent = start(MODE="continuous")
    agent.do("unset_injection")
    agent.begin()
    agent.do("entry gpu_hpc_agent_start")
    agent.wait(lambda now: now.header.state == State.TRACING)
    assert agent.kinds() == {10}
    agent.do("kernel a count=5", "copy h2d memory=pinned")
    now = agent.wait(lambda now: "a" in now.kernels())
    assert now.header.flags & (LAUNCHES | NO_COPIES | NO_WAITS) == NO_COPIES | NO_WAITS
    assert now.kernels()["a"].latency_count == now.header.records_unmatched == 0


def test_without_a_file_nothing_is_enabled(start: Start) -> None:
    """Nobody would see what it costs the program."""
    agent = start(directory="/proc/self")
    agent.begin()
    assert agent.kinds() == set()


def test_a_kind_that_cannot_be_enabled(start: Start) -> None:
    """Those before it would be recorded for the program's life, for nobody."""
    agent = start()
    agent.begin("fault cuptiActivityEnable code=35 after=1")
    now = agent.wait(lambda now: now.header.state == State.OFF)
    assert (now.header.reason, now.header.error_code) == (Reason.CUPTI_ERROR, 35)
    assert now.header.error_call == b"cuptiActivityEnable"
    assert agent.kinds() == set()


def test_copies_of_pauses_count_nowhere(start: Start) -> None:
    """They are recorded all the time; those of windows count, each once, and the buffers of the others are emptied."""
    agent = start(WINDOW_SECONDS="0.5", PERIOD_SECONDS="1.5")
    agent.trace("records_per_buffer 10")
    agent.do("copy h2d memory=pinned bytes=8 count=30", "set 8 count=7")
    first = agent.wait(lambda now: now.header.windows_published == 1)
    counted = first.copies(H2D, PINNED).count
    assert (counted, first.device().sets) == (30, 7)
    while agent.wait(lambda _: True).header.state == State.WAITING:
        agent.do("copy h2d memory=pinned bytes=8 count=100", "set 8 count=100")
    assert agent.calls()["@buffers"] < 64
    agent.do("copy h2d memory=pinned bytes=8 count=5", "set 8 count=3")
    now = agent.wait(lambda now: now.header.windows_published == 2)
    # The last of those said in the pause may have come a moment later.
    assert now.copies(H2D, PINNED).count - counted in range(5, 106)
    assert now.device().sets - 7 in range(3, 104)
    assert now.header.records_dropped == now.header.windows_discarded == 0


def test_a_tool_that_had_cupti_before_cuinit(start: Start) -> None:
    """Its kinds are its own; when we may trace after all, kernels are enough."""
    agent = start(RESUME_AFTER_PROFILER_MINUTES="0.005")
    agent.begin("subscribe")
    assert agent.kinds() == set()
    agent.wait(lambda now: now.state == (State.PAUSED, Reason.PROFILER))
    agent.do("unsubscribe")
    now = agent.wait(lambda now: now.header.windows_published > 0)
    assert agent.kinds() <= {10}
    assert now.header.flags & (LAUNCHES | NO_COPIES | NO_WAITS) == NO_COPIES | NO_WAITS


def test_after_a_profiler_kernels_are_enough(start: Start) -> None:
    """It has disabled the calls, ours too. The kinds of copies are still enabled."""
    agent = start(RESUME_AFTER_PROFILER_MINUTES="0.01", WINDOW_SECONDS="0.2", PERIOD_SECONDS="1")
    agent.trace()
    agent.published()
    agent.do("profile")
    agent.wait(lambda now: now.state == (State.PAUSED, Reason.PROFILER))
    agent.do("profiled", "unsubscribe")
    before = agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel a count=5", "copy h2d memory=pinned")
    now = agent.wait(lambda now: "a" in now.kernels())
    assert now.header.flags & (LAUNCHES | NO_COPIES | NO_WAITS) == NO_COPIES | NO_WAITS
    assert now.copies(H2D, PINNED).count == before.copies(H2D, PINNED).count == 0
    assert now.kernels()["a"].latency_count == 0


def test_functions_are_enabled_inside_cuinit_and_never_switched(start: Start) -> None:
    """The fake aborts. A call in a pause counts nowhere, nor does that of a function that we do not want."""
    agent = start(WINDOW_SECONDS="0.2", PERIOD_SECONDS="1")
    agent.do(f"load {agent.programs.cupti}", "init")
    functions = agent.calls()["@runtime"]
    assert 10 < functions < 30
    agent.do("context 0")
    agent.wait(lambda now: now.header.windows_published == 1)
    agent.do("kernel a count=100 work=0")
    now = agent.wait(lambda now: now.header.windows_published == 2)
    assert now.device().launch_api_calls == now.header.records_dropped == 0
    assert agent.calls()["@runtime"] == functions
    assert agent.calls()["@driver"] == 0


def test_calls_of_functions_that_another_tool_wants(start: Start) -> None:
    """It enabled their kind and takes no subscription; ours are among them and count, each once."""
    agent = start(MODE="continuous")
    agent.trace("all_calls 1")
    agent.do("kernel a count=5", "kernel b count=2000 cbid=10 work=0")  # 10: cudaFree
    now = agent.wait(lambda now: "a" in now.kernels())
    assert now.kernels()["a"].latency_count == now.device().launch_api_calls == 5


@pytest.mark.parametrize("mode", ["duty", "continuous"])
def test_calls_that_do_not_come_are_told_to_be_unknown(start: Start, mode: str) -> None:
    """The driver's functions launch all, or a tool that came and went has disabled the calls: absent, not zero.

    Until they come again, and not only a few.
    """
    agent = start(MODE=mode, WINDOW_SECONDS="0.5", PERIOD_SECONDS="1")
    agent.trace()
    agent.do(
        "kernel few driver=1 count=50", "kernel a count=1", "kernel b driver=1 count=200", "copy h2d memory=pinned"
    )
    assert agent.published(2).header.flags & (LAUNCHES | NO_WAITS) == LAUNCHES  # there were calls
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel c driver=1 count=200")
    now = agent.wait(lambda now: now.header.flags & NO_WAITS != 0)
    assert now.header.flags & (LAUNCHES | NO_COPIES | NO_WAITS) == NO_WAITS
    assert now.kernels()["c"].executions == 200
    agent.published()
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel d driver=1 count=200", "copy h2d memory=pinned", "kernel e count=5")
    now = agent.wait(lambda now: "e" in now.kernels() and now.copies(H2D, PINNED).count == 2)
    assert now.kernels()["e"].latency_count == 0
    for few in ("copy h2d memory=pinned", "kernel d driver=1 count=200", "sync 4 ns=1000"):
        agent.wait(lambda now: now.header.state == State.TRACING)
        agent.do(few)
        now = agent.published()
        assert now.header.flags & (LAUNCHES | NO_WAITS) == NO_WAITS
        assert not any(now.device().sync_ns)
    idle_ns = now.device().idle_host_ns
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel f count=50")
    now = agent.wait(lambda now: "f" in now.kernels())
    assert now.device().idle_host_ns == idle_ns
    agent.wait(lambda now: now.header.flags & (LAUNCHES | NO_WAITS) == LAUNCHES)
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel g count=7", "sync 4 ns=1000")
    now = agent.wait(lambda now: "g" in now.kernels() and now.kernels()["g"].latency_count == 7)
    assert (now.kernels()["f"].executions, now.device().sync_ns[4]) == (50, 1000)
    assert now.header.windows_discarded == 0


def test_callbacks_are_registered_once(start: Start) -> None:
    """Each time is a risk to a program whose threads ask for buffers."""
    agent = start(WINDOW_SECONDS="0.2", PERIOD_SECONDS="0.4")
    agent.begin()
    agent.send("kernel a every_us=1000 count=2000")
    now = agent.wait(lambda now: now.header.windows_published >= 3)
    assert now.kernels()["a"].executions > 3
    assert agent.hear() == "ok"
    assert agent.calls()["cuptiActivityRegisterCallbacks"] == 1


def test_a_tool_that_came_and_went_in_a_pause(start: Start) -> None:
    """Its callbacks are still there: a window is empty, and the next one registers ours."""
    agent = start(WINDOW_SECONDS="0.3", PERIOD_SECONDS="1")
    agent.trace()
    agent.published()
    agent.do("profile", "kernel its count=9", "profiled", "unsubscribe")
    agent.published()
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel a count=5")
    now = agent.published()
    assert now.kernels().keys() == {"a"}
    assert now.kernels()["a"].executions == 5


def test_a_tool_that_came_and_went_in_a_pause_with_our_buffers(start: Start) -> None:
    """That of the copies went with it, and never comes back: as if the tool had been seen."""
    agent = start(RESUME_AFTER_PROFILER_MINUTES="0.01", WINDOW_SECONDS="0.1", PERIOD_SECONDS="0.2", DRAIN_SECONDS="0.1")
    agent.trace()
    agent.published()
    agent.do("copy h2d memory=pinned", "profile frees=1", "kernel its count=9", "profiled", "unsubscribe")
    fake_activity.until(lambda: agent.do("kernel a count=5") == "" and "a" in agent.wait(lambda _: True).kernels())
    now = agent.published()
    assert now.header.flags & (LAUNCHES | NO_COPIES | NO_WAITS) == NO_COPIES | NO_WAITS
    assert "its" not in now.kernels()


@pytest.mark.parametrize(
    ("version", "others"), [(20, "all_calls 1"), (130001, "all_waits"), (130001, "all_calls 1"), (20, "all_waits")]
)
def test_waits_that_another_tool_wants_too(start: Start, version: int, others: str) -> None:
    """They count once, as we asked for them; and without calls of our own launches lack nothing."""
    agent = start(WINDOW_SECONDS="0.5", PERIOD_SECONDS="1")
    agent.trace(f"version {version}", others)
    agent.do("sync 4 ns=1000", "kernel a count=100")
    now = agent.published()
    assert (now.device().sync_calls[4], now.device().sync_ns[4]) == (1, 1_000)
    assert (now.kernels()["a"].executions, now.header.windows_discarded) == (100, 0)


def test_calls_of_a_pause_that_found_no_room_are_not_dropped(start: Start) -> None:
    """More threads than there are buffers: nobody lacks their calls."""
    agent = start(WINDOW_SECONDS="0.3", PERIOD_SECONDS="3")
    agent.trace()
    agent.published()
    agent.do("kernel a work=0 threads=700", "kernel a work=0 threads=700")
    now = agent.published()
    assert (now.header.records_dropped, now.header.windows_discarded) == (0, 0)


@pytest.mark.parametrize("version", [25, 130001])
def test_threads_that_come_and_go_in_a_pause(start: Start, version: int) -> None:
    """They leave their buffers with CUPTI, which is asked for them before it has all; a subscriber changes nothing."""
    agent = start(WINDOW_SECONDS="0.3", PERIOD_SECONDS="0.6", RESUME_AFTER_PROFILER_MINUTES="0.001")
    agent.trace(f"version {version}")
    agent.published()
    agent.do("subscribe")
    agent.wait(lambda now: now.state == (State.PAUSED, Reason.PROFILER))
    for _ in range(20):
        agent.do("kernel a work=0 threads=100")
        fake_activity.until(lambda: agent.calls()["@buffers"] < 500)
    agent.do("unsubscribe")
    agent.published()


def test_a_tool_that_frees_what_more_threads_than_large_buffers_had(start: Start) -> None:
    """Small ones are of the heap, too."""
    agent = start(WINDOW_SECONDS="0.8", PERIOD_SECONDS="1.5", RESUME_AFTER_PROFILER_MINUTES="0.01")
    agent.trace()
    agent.published()
    agent.do("kernel a work=0 threads=200", "profile frees=1", "kernel a threads=4", "profiled", "unsubscribe")
    agent.wait(lambda now: now.state == (State.PAUSED, Reason.PROFILER))
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel b threads=200")
    now = agent.wait(lambda now: "b" in now.kernels())
    assert now.kernels()["b"].executions == 200


def test_a_profiler_that_began_before_there_was_a_context(start: Start) -> None:
    """After cuInit had enabled ours, which stay as it finds them."""
    agent = start()
    agent.do(f"load {agent.programs.cupti}", "init", "profile", "context 0")
    agent.wait(lambda now: now.state == (State.PAUSED, Reason.PROFILER))
    assert agent.calls()["@touched"] == 0


def test_calls_before_the_first_window_are_not_dropped(start: Start) -> None:
    """They are recorded as soon as cuInit is over; nobody lacks them."""
    agent = start()
    agent.do(f"load {agent.programs.cupti}", "records_per_buffer 1", "init")
    agent.do("kernel a count=100 work=0", "context 0")
    assert agent.published().header.records_dropped == 0


def test_calls_of_a_tool_are_not_dropped(start: Start) -> None:
    """Our functions are still on after it; they are not ours to count any more."""
    agent = start(RESUME_AFTER_PROFILER_MINUTES="0.01", WINDOW_SECONDS="0.5", PERIOD_SECONDS="1")
    agent.trace("records_per_buffer 1")
    agent.do("subscribe")
    agent.wait(lambda now: now.state == (State.PAUSED, Reason.PROFILER))
    agent.do("unsubscribe")
    dropped = agent.published().header.records_dropped
    agent.do("kernel a count=100")
    assert agent.published(2).header.records_dropped == dropped


@pytest.mark.parametrize("version", [27, 130001])
def test_threads_of_a_pause_leave_no_buffers_with_cupti(start: Start, version: int) -> None:
    """CUPTI keeps that of a thread that has ended until it is asked; more threads than buffers copy in one pause."""
    agent = start(WINDOW_SECONDS="0.3", PERIOD_SECONDS="6")
    agent.trace(f"version {version}")
    agent.published()
    for _ in range(3):
        agent.do("copy h2d memory=pinned threads=500")
        fake_activity.until(lambda: agent.calls()["@buffers"] < 64)
    agent.wait(lambda now: now.header.state == State.TRACING)
    agent.do("kernel a count=50")
    now = agent.published()
    assert now.kernels()["a"].executions == 50
    assert now.header.records_dropped == 0


def test_buffers_come_back_when_it_is_over(start: Start) -> None:
    """Copies are recorded on, and CUPTI before 12.9 must not be without a buffer."""
    agent = start()
    agent.begin("version 27", "fault cuptiActivityDisable code=999")
    agent.wait(lambda now: now.header.state == State.OFF)
    for _ in range(3):
        agent.do("copy h2d memory=pinned threads=500")
        fake_activity.until(lambda: agent.calls()["@buffers"] < 64)


def test_buffers_of_a_discarded_window_that_come_back_while_the_next_one_opens(start: Start) -> None:
    """What they hold does not count for it."""
    agent = start(WINDOW_SECONDS="0.3", PERIOD_SECONDS="0.6", DRAIN_SECONDS="0.1")
    agent.trace("records_per_buffer 1")
    agent.do("stall 1", "kernel stale count=5")
    agent.wait(lambda now: now.header.windows_discarded == 1)
    probes = agent.calls()["cuptiSubscribe"]
    agent.do("slow cuptiSubscribe ms=1000")
    fake_activity.until(lambda: agent.calls()["cuptiSubscribe"] > probes)
    agent.do("stall 0", "set 8", "slow cuptiSubscribe ms=0")
    assert not agent.published(2).kernels()


def test_a_tool_that_keeps_the_subscription_may_replace_the_callbacks(start: Start) -> None:
    """Nobody can tell when: they are registered for each window."""
    agent = start(RESUME_AFTER_PROFILER_MINUTES="0", WINDOW_SECONDS="0.05", PERIOD_SECONDS="0.1")
    agent.begin("subscribe")
    agent.published(3)
    fake_activity.until(lambda: agent.calls()["cuptiActivityRegisterCallbacks"] >= 3)
