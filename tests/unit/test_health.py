"""What is wrong with GPUs: lost ones, hung calls, Xids, as the fleet knows it and as the series tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from exporter_process import parse
from gpu_hpc_exporter.collectors.health import CRITICAL_XIDS, HealthCollector
from gpu_hpc_exporter.exposition import TEXT, encode
from gpu_hpc_exporter.model import Event, Gpu, GpuFellOff, State, StateChange, XidError
from gpu_hpc_exporter.samplers.fleet import Fleet, FleetSnapshot
from gpu_hpc_exporter.samplers.totals import MAX_XIDS
from gpu_hpc_exporter.samplers.watch import CallWatches, HungCall
from unit.objects import G0, G1, GAUGE_WINDOW_NS, M1, NS, Clock, inventory, readings, running_fleet, state, window

LOST = state("nvml", G1.uuid, "lost", at=5)


def two_gpus(*more: Gpu) -> Fleet:
    """Two GPUs, and what else is named, that are read well."""
    fleet = running_fleet(G0, G1, *more)
    for gpu in (G0, G1, *more):
        fleet.put(state("nvml", gpu.uuid, "active"))
        fleet.put(readings(9, {"power_gpu_watts": 300.0}, gpu.uuid))
    return fleet


def uuids(snapshot: FleetSnapshot) -> tuple[list[str], list[str]]:
    """UUIDs of the GPUs that are shown, and of those that are lost."""
    return [totals.gpu.uuid for totals in snapshot.gpus], [gpu.uuid for gpu in snapshot.lost]


@pytest.mark.parametrize(
    "event",
    [
        LOST,
        inventory(G0, at=5),
        inventory(replace(G0, index=1), at=5),
        GpuFellOff(5 * NS, "0000:99:00"),
        XidError(5 * NS, 79, "kmsg", pci_bus_id="0000:99:00"),
        XidError(5 * NS, 79, "nvml", uuid=G1.uuid),
    ],
    ids=["state", "not listed", "not listed, indices moved", "fell off", "Xid 79, kernel log", "Xid 79, NVML"],
)
def test_a04_a05_a_lost_gpu_is_named_and_withdrawn(event: Event) -> None:
    """A04, A05: however the loss is told, the other GPU goes on, and the lost one stays known, with its label."""
    fleet = two_gpus()
    assert uuids(fleet.snapshot()) == ([G0.uuid, G1.uuid], [])
    fleet.put(event)
    snapshot = fleet.snapshot()
    assert uuids(snapshot) == ([G0.uuid], [G1.uuid])
    assert ({gpu.uuid for gpu in snapshot.known}, snapshot.label(G1.uuid)) == ({G0.uuid, G1.uuid}, "1")
    assert (snapshot.expected, snapshot.is_up) == (2, True)


def test_a_gpu_that_goes_before_its_first_reading_is_lost() -> None:
    """A GPU that was listed once and is not any more is lost, whether or not it was ever read."""
    fleet = running_fleet(G0, G1)
    fleet.put(inventory(G0, at=5))
    assert uuids(fleet.snapshot()) == ([G0.uuid], [G1.uuid])


def test_the_state_of_a_gpu_that_is_no_longer_listed_says_so() -> None:
    """Both of its sources are lost, since the inventory and because of it."""
    fleet = two_gpus()
    fleet.put(state("gpm", G1.uuid, "active"))
    fleet.put(inventory(G0, at=5))
    told = {(s.source, s.state, s.reason, s.since_ns) for s in fleet.snapshot().states if s.uuid == G1.uuid}
    assert told == {(source, "lost", "the driver no longer lists it", 5 * NS) for source in ("nvml", "gpm")}


@pytest.mark.parametrize("event", [LOST, inventory(G0, at=5), GpuFellOff(5 * NS, "0000:99:00")])
def test_a_gpu_that_returns_is_not_lost(event: Event) -> None:
    """Listed and read again, the GPU goes on from where its totals stood, under its label."""
    fleet = two_gpus()
    fleet.put(window(4, {"sm_active": 1.0}, uuid=G1.uuid))
    fleet.put(event)
    fleet.put(inventory(G0, replace(G1, index=7), at=8))
    fleet.put(state("nvml", G1.uuid, "active", at=8))
    snapshot = fleet.snapshot()
    assert uuids(snapshot) == ([G0.uuid, G1.uuid], [])
    assert (snapshot.gpus[1].quantities, snapshot.gpus[1].gpu.index) == ({"sm_active": NS}, 7)
    assert snapshot.label(G1.uuid) == "1"


@pytest.mark.parametrize(
    ("read_at", "uuid", "is_lost"),
    [
        (5.1, G1.uuid, True),
        (15.0, G1.uuid, True),
        (15.001, G1.uuid, False),
        (60.0, G1.uuid, False),
        (60.0, G0.uuid, True),
    ],
)
def test_later_readings_prove_the_kernel_log_wrong(read_at: float, uuid: str, *, is_lost: bool) -> None:
    """Readings under way when the log spoke say nothing; ten seconds later they do, of their own GPU only."""
    fleet = two_gpus()
    fleet.put(GpuFellOff(5 * NS, "0000:99:00"))
    fleet.put(readings(read_at, {"power_gpu_watts": 300.0}, uuid))
    assert uuids(fleet.snapshot())[1] == ([G1.uuid] if is_lost else [])


def test_a_mig_instance_goes_with_its_parent() -> None:
    """An instance of a lost GPU is withdrawn and not counted as lost itself."""
    fleet = two_gpus(M1)
    fleet.put(LOST)
    assert uuids(fleet.snapshot()) == ([G0.uuid], [G1.uuid])
    fleet.put(state("nvml", G1.uuid, "active"))
    assert uuids(fleet.snapshot()) == ([G0.uuid, G1.uuid, M1.uuid], [])


def test_a_mig_instance_that_is_gone_is_not_lost() -> None:
    """An instance was taken apart on purpose: it is no longer known, the GPUs are."""
    fleet = two_gpus(M1)
    fleet.put(inventory(G0, G1))
    snapshot = fleet.snapshot()
    assert uuids(snapshot) == ([G0.uuid, G1.uuid], [])
    assert {gpu.uuid for gpu in snapshot.known} == {G0.uuid, G1.uuid}


@pytest.mark.parametrize(
    ("configured", "steps", "expected"),
    [
        (None, [], 0),
        (None, [inventory()], 0),
        (None, [inventory(G0, G1)], 2),
        (None, [inventory(G0, G1, M1)], 2),
        (None, [inventory(G0, G1), inventory(G0)], 2),
        (None, [inventory(G0), inventory(G0, G1), inventory()], 2),
        (None, [inventory(G0, counted=8)], 8),  # seven do not even answer
        (None, [inventory(G0, counted=8), inventory(G0, G1, counted=2)], 8),
        (8, [inventory(G0, G1)], 8),
        (1, [inventory(G0, G1)], 1),
        (4, [inventory(counted=8)], 4),
        pytest.param(0, [inventory(G0)], 0),
    ],
)
def test_a04_expected_gpus(configured: int | None, steps: list[Event], expected: int) -> None:
    """A04: the configured number, or the most that the driver has ever counted or listed."""
    fleet = Fleet(Clock(), GAUGE_WINDOW_NS, configured)
    for step in steps:
        fleet.put(step)
    assert fleet.snapshot().expected == expected


def test_expected_gpus_can_be_configured_anew() -> None:
    """A reload changes the expectation; without one the most ever seen counts again."""
    fleet = two_gpus()
    for configured, expected in ((8, 8), (None, 2)):
        fleet.configure(GAUGE_WINDOW_NS, configured)
        assert fleet.snapshot().expected == expected


def test_a12_a_hung_call_withdraws_the_gpu() -> None:
    """A12: values of the GPU whose call hangs are not served, it is not lost, and its label stays."""
    watches = CallWatches()
    clock = Clock(10)
    fleet = Fleet(clock, GAUGE_WINDOW_NS, None, watches.hung)
    fleet.put(inventory(G0, G1, M1))
    watch = watches.watch(G1.uuid, M1.uuid)
    watch.current = ("memory", 10 * NS)
    assert uuids(fleet.snapshot()) == ([G0.uuid, G1.uuid, M1.uuid], [])
    clock.now_s = 16
    snapshot = fleet.snapshot()
    assert uuids(snapshot) == ([G0.uuid], [])
    assert snapshot.hung == (HungCall(G1.uuid, "memory", 6.0), HungCall(M1.uuid, "memory", 6.0))
    assert (snapshot.label(G1.uuid), snapshot.label(M1.uuid), len(snapshot.known)) == ("1", "1", 3)
    watch.current = None
    assert uuids(fleet.snapshot()) == ([G0.uuid, G1.uuid, M1.uuid], [])


@pytest.mark.parametrize(("current", "is_served"), [("failed", False), ("paused", True), ("active", True)])
def test_a02_no_gpu_is_served_while_the_driver_cannot_be_read(current: State, *, is_served: bool) -> None:
    """A02: also one that was not lost by itself: what was read last would pass for what is. A release is no failure."""
    fleet = two_gpus()
    fleet.put(StateChange(6 * NS, "nvml", "", current, "unknown"))
    served, lost = uuids(fleet.snapshot())
    assert (served, lost) == ([G0.uuid, G1.uuid] if is_served else [], [])
    fleet.put(StateChange(7 * NS, "nvml", "", "active"))
    assert uuids(fleet.snapshot())[0] == [G0.uuid, G1.uuid]


def test_a_hung_call_of_the_library_withdraws_no_gpu() -> None:
    """While listing the GPUs hangs, the threads of the GPUs go on and their values are true."""
    fleet = Fleet(Clock(10), GAUGE_WINDOW_NS, None, lambda _: (HungCall("", "list GPUs", 9.0),))
    fleet.put(inventory(G0))
    assert uuids(fleet.snapshot()) == ([G0.uuid], [])


def xid_counts(fleet: Fleet) -> Mapping[str, Mapping[int, int]]:
    """Xids by UUID and number."""
    return {u: {x: count for x, (count, _) in xids.items()} for u, xids in fleet.snapshot().xids.items()}


@pytest.mark.parametrize(
    ("origins", "expected"),
    [
        ("n", 1),
        ("k", 1),
        ("nk", 1),
        ("kn", 1),
        ("nnkk", 2),
        ("nknk", 2),
        ("kkkn", 3),
        ("nnn", 3),
    ],
)
def test_an_xid_that_both_origins_tell_counts_once(origins: str, expected: int) -> None:
    """NVML and the kernel log tell of the same Xids: the one that saw more counts."""
    fleet = two_gpus()
    for origin in origins:
        fleet.put(
            XidError(NS, 13, "nvml", uuid=G1.uuid)
            if origin == "n"
            else XidError(NS, 13, "kmsg", pci_bus_id="0000:99:00")
        )
    assert xid_counts(fleet) == {G0.uuid: {}, G1.uuid: {13: expected}}


def test_different_xids_are_different() -> None:
    """Each number of each GPU has a count of its own, and none of these loses the GPU."""
    fleet = two_gpus()
    for number, gpu in ((13, G0), (13, G1), (48, G1), (48, G1)):
        fleet.put(XidError(NS, number, "nvml", uuid=gpu.uuid))
    assert xid_counts(fleet) == {G0.uuid: {13: 1}, G1.uuid: {13: 1, 48: 2}}
    assert uuids(fleet.snapshot()) == ([G0.uuid, G1.uuid], [])


@pytest.mark.parametrize("ours", ["00000000:AB:00.0", "0000:ab:00.0", "00000000:ab:00"])
@pytest.mark.parametrize(
    ("told", "is_ours"),
    [
        ("0000:ab:00", True),
        ("0000:AB:00", True),
        ("0000:ab:00.0", True),
        ("00000000:AB:00", True),
        ("00000000:ab:00.0", True),
        ("0001:ab:00", False),
        ("0000:ab:01", False),
        ("0000:a:00", False),
        ("", False),
        ("ab:00", False),
        (":", False),
        pytest.param("00010000:ab:00", False),
    ],
)
def test_pci_addresses(ours: str, told: str, *, is_ours: bool) -> None:
    """NVML and the kernel write one address in several forms; an unknown device is nobody's."""
    fleet = two_gpus()
    fleet.put(inventory(replace(G0, pci_bus_id=ours), replace(M1, pci_bus_id=ours, parent_uuid=G0.uuid)))
    fleet.put(XidError(NS, 48, "kmsg", pci_bus_id=told))
    fleet.put(GpuFellOff(NS, told))
    assert xid_counts(fleet)[G0.uuid] == ({48: 1} if is_ours else {})
    assert (G0.uuid in uuids(fleet.snapshot())[1]) == is_ours


def test_events_of_unknown_devices_make_nothing() -> None:
    """Xids of GPUs that belong to somebody else, such as a virtual machine, are not ours."""
    fleet = two_gpus()
    before = fleet.snapshot()
    for event in (
        XidError(NS, 79, "nvml", uuid="GPU-of-another"),
        XidError(NS, 79, "kmsg", pci_bus_id="0000:aa:00"),
        GpuFellOff(NS, "0000:aa:00"),
    ):
        fleet.put(event)
    assert replace(fleet.snapshot(), wall_ns=before.wall_ns) == before


def test_the_kernel_log_cannot_make_series_without_end() -> None:
    """At most MAX_XIDS different numbers are remembered per GPU; those already known go on counting."""
    fleet = two_gpus()
    for number in range(1000, 1000 + 2 * MAX_XIDS):
        fleet.put(XidError(NS, number, "kmsg", pci_bus_id=G0.pci_bus_id))
    fleet.put(XidError(NS, 1000, "kmsg", pci_bus_id=G0.pci_bus_id))
    fleet.put(XidError(NS, 1000 + MAX_XIDS, "kmsg", pci_bus_id=G0.pci_bus_id))
    counts = xid_counts(fleet)
    assert len(counts[G0.uuid]) == MAX_XIDS
    assert (counts[G0.uuid][1000], counts[G1.uuid]) == (2, {})


def series(snapshot: FleetSnapshot) -> dict[str, dict[tuple[str, ...], float]]:
    """Samples of the collector by name and label values, each once."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in HealthCollector().collect(snapshot):
        found.setdefault(family.spec.name, {})
        for (name, labels), value in parse(encode([family], TEXT).decode()).values.items():
            key = tuple(dict(labels)[label] for label in family.spec.labels)
            found.setdefault(name, {})[key] = value
    return found


def test_zeros_of_critical_xids_exist_for_every_gpu() -> None:
    """A counter born at 1 never increases: every GPU has its zeros from the start, a lost one too."""
    fleet = two_gpus(M1)
    zeros = {(str(n), g.uuid, str(x)): 0.0 for n, g in enumerate((G0, G1)) for x in CRITICAL_XIDS}
    assert series(fleet.snapshot())["gpu_hpc_xid_errors_total"] == zeros
    fleet.put(LOST)
    assert series(fleet.snapshot())["gpu_hpc_xid_errors_total"] == zeros
    fleet.put(inventory(G0))
    assert series(fleet.snapshot())["gpu_hpc_xid_errors_total"] == zeros


def test_xids_have_counts_and_a_time() -> None:
    """A critical Xid counts from its zero, another one appears with its first, and both have the newest's time."""
    fleet = two_gpus()
    for number in (79, 13, 13):
        fleet.put(XidError(NS, number, "nvml", uuid=G1.uuid))
    snapshot = fleet.snapshot()
    found = series(snapshot)
    counted = {key: value for key, value in found["gpu_hpc_xid_errors_total"].items() if value}
    assert counted == {("1", G1.uuid, "79"): 1, ("1", G1.uuid, "13"): 2}
    newest = found["gpu_hpc_xid_last_timestamp_seconds"]
    assert newest.keys() == counted.keys()
    assert all(0 <= snapshot.wall_ns / NS - seconds < 60 for seconds in newest.values())


def test_counts_of_gpus_and_the_lost_one() -> None:
    """8 expected, 1 visible, and the lost one is named with its PCI address; instances are no GPUs."""
    fleet = two_gpus(M1)
    fleet.configure(GAUGE_WINDOW_NS, 8)
    healthy = series(fleet.snapshot())
    assert healthy["gpu_hpc_gpus"] == {("expected",): 8, ("visible",): 2}
    assert healthy["gpu_hpc_gpu_lost"] == {}
    fleet.put(LOST)
    lost = series(fleet.snapshot())
    assert lost["gpu_hpc_gpus"] == {("expected",): 8, ("visible",): 1}
    assert lost["gpu_hpc_gpu_lost"] == {("1", G1.uuid, "00000000:99:00.0"): 1}


def test_hung_calls_are_series() -> None:
    """Which call of which GPU has not returned and for how long; the library's has no GPU."""
    fleet = Fleet(
        Clock(10),
        GAUGE_WINDOW_NS,
        None,
        lambda _: (HungCall("", "list GPUs", 9.0), HungCall(G0.uuid, "memory", 6.5)),
    )
    fleet.put(inventory(G0, G1))
    found = series(fleet.snapshot())
    assert found["gpu_hpc_driver_call_hung_seconds"] == {("", "", "list GPUs"): 9.0, ("0", G0.uuid, "memory"): 6.5}
    assert found["gpu_hpc_gpus"] == {("expected",): 2, ("visible",): 1}
    assert len(found["gpu_hpc_xid_errors_total"]) == 2 * len(CRITICAL_XIDS)


def test_without_gpus_there_are_counts_only() -> None:
    """A node without a driver expects none and sees none."""
    fleet = Fleet(Clock(), GAUGE_WINDOW_NS)
    fleet.put(StateChange(NS, "nvml", "", "failed", "driver_not_loaded"))
    found = series(fleet.snapshot())
    assert found.pop("gpu_hpc_gpus") == {("expected",): 0, ("visible",): 0}
    assert not any(found.values())
