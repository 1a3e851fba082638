"""All GPUs of the host: identity by UUID, states, snapshots under load."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from gpu_hpc_exporter.model import (
    DriverError,
    Event,
    Gpu,
    GpuFellOff,
    IntervalInForce,
    ReadingRejected,
    SourceName,
    State,
    StateChange,
    WindowsRejected,
    XidError,
)
from gpu_hpc_exporter.samplers.fleet import MAX_GONE_INSTANCES, WATCHED_NS, Fleet, FleetSnapshot
from unit.objects import (
    DRIVER,
    G0,
    G1,
    GAUGE_WINDOW_NS,
    M1,
    NS,
    Clock,
    inventory,
    readings,
    running_fleet,
    state,
    window,
)


def sm_seconds(snapshot: FleetSnapshot) -> dict[tuple[str, str], float]:
    """The SM-active counter as a scrape shows it: by gpu label and UUID."""
    return {
        (snapshot.label(totals.gpu.uuid), totals.gpu.uuid): totals.quantities.get("sm_active", 0) / NS
        for totals in snapshot.gpus
    }


def test_a06_index_order_is_not_identity() -> None:
    """A06: [G0,G1], then [G1,G0], then [G1], then both: no counter jumps, no series swaps, labels stay."""
    fleet = running_fleet(G0, G1)
    orders: list[tuple[Gpu, ...]] = [
        (G0, G1),
        (replace(G1, index=0), replace(G0, index=1)),
        (replace(G1, index=0),),
        (G0, G1),
    ]
    seen = []
    for step, order in enumerate(orders):
        fleet.put(inventory(*order))
        for gpu in order:
            busy = 0.25 if gpu.uuid == G0.uuid else 1.0
            fleet.put(window(step + 2, {"sm_active": busy}, uuid=gpu.uuid))
        seen.append(sm_seconds(fleet.snapshot()))
    zero, one = ("0", G0.uuid), ("1", G1.uuid)
    assert seen == [{zero: 0.25, one: 1}, {zero: 0.5, one: 2}, {one: 3}, {zero: 0.75, one: 4}]


def test_the_current_index_is_kept_beside_the_label() -> None:
    """After a reorder the label stays and the inventory's row shows NVML's index of now."""
    fleet = running_fleet(G0, G1)
    fleet.put(inventory(replace(G1, index=0), replace(G0, index=1)))
    snapshot = fleet.snapshot()
    assert {(snapshot.label(t.gpu.uuid), t.gpu.index) for t in snapshot.gpus} == {("0", 1), ("1", 0)}


@pytest.mark.parametrize("moved", [False, True], ids=["with its parent", "after its parent moved"])
def test_a_mig_instance_has_the_label_of_its_parent(*, moved: bool) -> None:
    """An instance shares its parent's label, also when it is made after the parent's index has moved."""
    fleet = running_fleet(G0, G1)
    fleet.put(inventory(replace(G1, index=0), replace(M1, index=0)) if moved else inventory(G0, G1, M1))
    assert fleet.snapshot().label(M1.uuid) == "1"


@pytest.mark.parametrize(
    "event",
    [
        window(5, {"sm_active": 1.0}, uuid=G1.uuid),
        readings(5, {"power_gpu_watts": 1.0}, uuid=G1.uuid),
        WindowsRejected(5 * NS, G1.uuid, "gpm", 1),
        ReadingRejected(5 * NS, G1.uuid, "power_gpu_watts", "nan"),
        IntervalInForce(5 * NS, G1.uuid, "gpm", NS),
        StateChange(5 * NS, "gpm", G1.uuid, "failed", "x"),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_of_unknown_gpus_are_dropped(event: Event) -> None:
    """What belongs to no GPU of any inventory makes no series."""
    fleet = running_fleet(G0)
    before = fleet.snapshot()
    fleet.put(event)
    assert replace(fleet.snapshot(), wall_ns=before.wall_ns) == before


def test_h03_two_rows_of_one_uuid_are_one_gpu() -> None:
    """H03: a driver that gives two GPUs one UUID must not make duplicate series."""
    fleet = running_fleet(replace(G0, uuid="N/A"), replace(G1, uuid="N/A"))
    assert [totals.gpu.uuid for totals in fleet.snapshot().gpus] == ["N/A"]


def gpm_state(now_s: float, since_s: float, last_window_s: float | None, interval_s: float | None = None) -> State:
    """State that a snapshot shows of an active GPM source."""
    fleet = Fleet(Clock(now_s), GAUGE_WINDOW_NS)
    fleet.put(inventory(G0))
    if interval_s is not None:
        fleet.put(IntervalInForce(NS, G0.uuid, "gpm", round(interval_s * NS)))
    fleet.put(StateChange(round(since_s * NS), "gpm", G0.uuid, "active"))
    if last_window_s is not None:
        fleet.put(window(last_window_s, {"sm_active": 0.0}))
    (current,) = fleet.snapshot().states
    assert bool(current.reason) == (current.state == "stale")
    return current.state


@pytest.mark.parametrize(
    ("now_s", "since_s", "last_window_s", "interval_s", "expected"),
    [
        (15, 2, 10, None, "active"),
        (15.001, 2, 10, None, "stale"),
        (15.001, 2, 15, None, "active"),
        (7, 2, None, None, "active"),
        (7.001, 2, None, None, "stale"),  # no window ever came
        (15, 12, 3, None, "active"),  # it began anew and has five seconds again
        (17.001, 12, 3, None, "stale"),
        (30, 2, 10, 10, "active"),
        (30.001, 2, 10, 10, "stale"),  # max(2 windows, 5 s)
    ],
)
def test_active_becomes_stale_without_windows(
    now_s: float, since_s: float, last_window_s: float | None, interval_s: float | None, expected: State
) -> None:
    """An active window source that has delivered nothing for max(2 windows, 5 s) is stale, and says why."""
    assert gpm_state(now_s, since_s, last_window_s, interval_s) == expected


@pytest.mark.parametrize(("source", "current"), [("nvml", "unsupported"), ("gpm", "paused"), ("gpm", "unsupported")])
def test_only_an_active_source_becomes_stale(source: SourceName, current: State) -> None:
    """A source that says why it is silent keeps saying that."""
    fleet = Fleet(Clock(1000), GAUGE_WINDOW_NS)
    fleet.put(inventory(G0))
    fleet.put(StateChange(NS, source, G0.uuid, current, "why"))
    assert [(s.state, s.reason) for s in fleet.snapshot().states] == [(current, "why")]


def test_mig_instances_that_are_gone_for_long_leave_nothing() -> None:
    """Each re-partitioning makes new UUIDs: the oldest are forgotten with all that belongs to them."""
    fleet = running_fleet(G0, G1)
    for number in range(MAX_GONE_INSTANCES + 50):
        fleet.put(inventory(G0, G1, replace(M1, uuid=f"MIG-{number:08x}-0000-0000-0000-000000000000")))
    labels = fleet.snapshot().labels
    assert len(labels) == 2 + MAX_GONE_INSTANCES + 1
    assert {G0.uuid, G1.uuid} < labels.keys()


def test_states_go_with_their_mig_instance() -> None:
    """An instance that was taken apart has no states; those of GPUs and of the host stay."""
    fleet = running_fleet(G0, G1, M1)
    for uuid in (G0.uuid, G1.uuid, M1.uuid):
        fleet.put(StateChange(2 * NS, "nvml", uuid, "active"))
    fleet.put(inventory(G0, G1))
    assert {s.uuid for s in fleet.snapshot().states} == {"", G0.uuid, G1.uuid}


@pytest.mark.parametrize("away", ["paused", "busy", "lost"])
def test_time_away_is_no_lost_window(away: State) -> None:
    """While a source says that it is away no windows are due: an outage makes none of them lost."""
    fleet = running_fleet(G0)
    fleet.put(IntervalInForce(NS, G0.uuid, "gpm", NS // 10))
    fleet.put(window(10, {"sm_active": 1.0}))
    fleet.put(StateChange(11 * NS, "gpm", G0.uuid, away))
    fleet.put(StateChange(3600 * NS, "gpm", G0.uuid, "active"))
    fleet.put(window(3601, {"sm_active": 1.0}))
    assert lost_windows(fleet) == 0
    fleet.put(window(3603, {"sm_active": 1.0}))
    assert lost_windows(fleet) == 10


def lost_windows(fleet: Fleet) -> int:
    """Windows of the first GPU that were due and never came."""
    return fleet.snapshot().gpus[0].windows.get(("gpm", "lost"), 0)


@pytest.mark.parametrize("unread", ["failed", "no_permission"])
def test_windows_of_a_failing_source_are_lost(unread: State) -> None:
    """While a source fails on a GPU that is there, windows were due and are missed."""
    fleet = running_fleet(G0)
    fleet.put(window(10, {"sm_active": 1.0}))
    fleet.put(StateChange(11 * NS, "gpm", G0.uuid, unread))
    fleet.put(window(14, {"sm_active": 1.0}))
    assert lost_windows(fleet) == 3


SOURCES: tuple[SourceName, ...] = ("nvml", "gpm")


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(inventory(G0, at=11), id="no longer listed"),
        pytest.param(GpuFellOff(11 * NS, G1.pci_bus_id), id="fell off"),
        pytest.param(XidError(11 * NS, 79, "kmsg", pci_bus_id=G1.pci_bus_id), id="Xid 79"),
    ],
)
def test_the_outage_of_a_lost_gpu_is_no_lost_window(loss: Event) -> None:
    """A GPU that was lost without a last word of its source and comes back missed no windows meanwhile."""
    fleet = running_fleet(G1, G0)
    fleet.put(IntervalInForce(NS, G1.uuid, "gpm", NS // 10))
    for source in SOURCES:
        fleet.put(state(source, G1.uuid, "active"))
    fleet.put(window(10, {"sm_active": 1.0}, uuid=G1.uuid))
    fleet.put(loss)
    fleet.put(inventory(G1, G0, at=3600))
    for source in SOURCES:
        fleet.put(state(source, G1.uuid, "active", at=3600))
    fleet.put(window(3602, {"sm_active": 1.0}, uuid=G1.uuid))
    assert lost_windows(fleet) == 0


def test_a_new_gauge_window_takes_effect() -> None:
    """After a reload gauges are means over the new span, totals are what they were."""
    fleet = running_fleet(G0, now=40)
    for end in range(11, 41):
        fleet.put(window(end, {"sm_active": float(end > 38)}))
    before = fleet.snapshot().gpus[0]
    fleet.configure(2 * NS, None)
    after = fleet.snapshot().gpus[0]
    assert before.gauges["sm_active"] == pytest.approx(2 / 15, abs=0.01)
    assert after.gauges["sm_active"] == 1.0
    assert after.quantities == before.quantities


def test_it_is_watched_while_somebody_asks_for_new_windows() -> None:
    """A page asks five times a second; a second after the last time nobody needs windows one by one."""
    now = 10 * NS
    fleet = Fleet(lambda: now, 15 * NS)
    assert not fleet.is_watched()
    fleet.windows_since({})
    assert fleet.is_watched()
    now += WATCHED_NS
    assert not fleet.is_watched()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ([], "starting"),
        ([("nvml", G0.uuid, "active", "")], "starting"),
        ([("nvml", "", "active", "")], ""),
        ([("nvml", "", "failed", "driver_not_loaded")], "driver_not_loaded"),
        ([("nvml", "", "failed", "driver_not_loaded"), ("nvml", "", "active", "")], ""),
        ([("replay", "", "active", "h200.jsonl.gz")], ""),
        ([("nvml", "", "failed", "recorded"), ("replay", "", "active", "h200.jsonl.gz")], ""),
        ([("nvml", "", "active", ""), ("nvml", G0.uuid, "lost", "gpu_is_lost")], ""),
    ],
)
def test_up_and_why_not(changes: list[tuple[SourceName, str, State, str]], reason: str) -> None:
    """The fleet is up while the driver, or the recording in its place, can be read, and says why it is not."""
    fleet = Fleet(Clock(), GAUGE_WINDOW_NS)
    for source, uuid, current, why in changes:
        fleet.put(StateChange(NS, source, uuid, current, why))
    snapshot = fleet.snapshot()
    assert (snapshot.down_reason, snapshot.is_up) == (reason, not reason)


def test_a_failure_without_a_reason_is_down() -> None:
    """A source that failed is down also when nobody said why."""
    fleet = Fleet(Clock(), GAUGE_WINDOW_NS)
    fleet.put(StateChange(NS, "nvml", "", "failed"))
    assert not fleet.snapshot().is_up


def test_driver_and_its_errors() -> None:
    """The newest inventory's driver is shown and failed calls are counted by code."""
    fleet = Fleet(Clock(), GAUGE_WINDOW_NS)
    assert fleet.snapshot().driver is None
    fleet.put(inventory(G0))
    for code in ("timeout", "unknown", "timeout"):
        fleet.put(DriverError(NS, code))
    snapshot = fleet.snapshot()
    assert (snapshot.driver, snapshot.driver_errors) == (DRIVER, {"timeout": 2, "unknown": 1})


def test_threads_lose_nothing() -> None:
    """Four threads put windows while snapshots are taken: each snapshot is consistent, the end is exact."""
    fleet = running_fleet(G0, G1)
    writers, windows = 4, 500
    start = threading.Barrier(writers + 1)
    left = threading.Semaphore(0)

    def write(number: int) -> None:
        uuid = (G0, G1)[number % 2].uuid
        start.wait(10)
        for end in range(windows):
            fleet.put(window(end / 1000, {"sm_active": 0.5, "nvlink_received_bytes": 3}, 0.001, uuid))
        left.release()

    with ThreadPoolExecutor(writers) as pool:
        jobs = [pool.submit(write, number) for number in range(writers)]
        start.wait(10)
        done = 0
        while done < writers:
            done += left.acquire(blocking=False)
            for totals in fleet.snapshot().gpus:
                assert totals.observed_ns == sum(totals.class_ns.values())
                assert totals.quantities.get("sm_active", 0) * 2 == totals.observed_ns
        for job in jobs:
            job.result()
    for totals in fleet.snapshot().gpus:
        assert totals.windows["gpm", "valid"] == 2 * windows
        assert totals.quantities == {"sm_active": windows * 1_000_000, "nvlink_received_bytes": 6 * windows}
