"""Ordinary objects that the unit tests start from: two GPUs, a MIG instance, short ways to make events."""

from __future__ import annotations

from collections.abc import Mapping

from gpu_hpc_exporter.model import (
    Driver,
    Gpu,
    Inventory,
    Quantity,
    Reading,
    Readings,
    SourceName,
    State,
    StateChange,
    Window,
)
from gpu_hpc_exporter.samplers.fleet import Fleet

NS = 1_000_000_000
GAUGE_WINDOW_NS = 15 * NS

G0 = Gpu(
    "GPU-00000000-aaaa-bbbb-cccc-000000000000",
    0,
    "NVIDIA H200",
    pci_bus_id="00000000:17:00.0",
    serial="1650000000001",
    links=("pcie",),
)
G1 = Gpu(
    "GPU-00000000-aaaa-bbbb-cccc-000000000001",
    1,
    "NVIDIA H200",
    pci_bus_id="00000000:99:00.0",
    serial="1650000000002",
    links=("pcie",),
)
M1 = Gpu("MIG-00000000-aaaa-bbbb-cccc-0000000000a1", 1, "NVIDIA H200", gpu_instance="3", parent_uuid=G1.uuid)
DRIVER = Driver("580.159.04", "13.0", "13.580.159.04")


class Clock:
    """A clock that stands still until it is set."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> int:
        return round(self.now_s * NS)


def inventory(*gpus: Gpu, at: float = 1.0, counted: int = 0) -> Inventory:
    """These GPUs, in this order."""
    return Inventory(round(at * NS), gpus, DRIVER, counted)


def window(
    end: float, values: Mapping[Quantity, float], seconds: float = 1.0, uuid: str = G0.uuid, *, late: bool = False
) -> Window:
    """A GPM window that ended at `end` seconds."""
    return Window(uuid, "gpm", round(end * NS), round(seconds * NS), values, late)


def state(source: SourceName, uuid: str, state: State, at: float = 2.0) -> StateChange:
    """A source's new state, with the state as its reason unless it is active."""
    return StateChange(round(at * NS), source, uuid, state, "" if state == "active" else state)


def readings(at: float, values: Mapping[Reading, float], uuid: str = G0.uuid) -> Readings:
    """Slow readings of `at` seconds."""
    return Readings(uuid, round(at * NS), values)


def running_fleet(*gpus: Gpu, now: float = 10.0) -> Fleet:
    """A fleet whose driver is up; its clock stands at `now` seconds."""
    fleet = Fleet(Clock(now), GAUGE_WINDOW_NS)
    fleet.put(inventory(*gpus))
    fleet.put(StateChange(NS, "nvml", "", "active"))
    return fleet
