"""All GPUs of the host: folds events from every sampler into totals and hands out snapshots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from gpu_hpc_exporter.model import (
    Driver,
    DriverError,
    Event,
    IntervalInForce,
    Inventory,
    ReadingRejected,
    Readings,
    SourceName,
    State,
    StateChange,
    Window,
    WindowsMissed,
)
from gpu_hpc_exporter.samplers.totals import GpuSnapshot, GpuTotals


@dataclass(frozen=True, slots=True)
class SourceState:
    """State of one source, for one GPU or, with `uuid` "", for the host, in force since `since_ns`."""

    source: SourceName
    uuid: str
    state: State
    reason: str
    since_ns: int


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Everything that a scrape may show, frozen at `now_ns` of the samplers' clock, `wall_ns` of Unix time.

    `gpus` holds the GPUs of the newest inventory. `labels` maps every UUID ever seen to its `gpu` label.
    """

    now_ns: int
    wall_ns: int
    driver: Driver | None
    gpus: tuple[GpuSnapshot, ...]
    labels: Mapping[str, str]
    states: tuple[SourceState, ...]
    driver_errors: Mapping[str, int]

    def host_state(self, source: SourceName) -> SourceState | None:
        """State of a source for the host as a whole."""
        return next((s for s in self.states if s.source == source and not s.uuid), None)

    @property
    def is_up(self) -> bool:
        """Whether the driver, or the recording in its place, can be read."""
        return not self.down_reason

    @property
    def down_reason(self) -> str:
        """Why nothing can be read, "" while something can."""
        main = self.host_state("replay") or self.host_state("nvml")
        if main is None:
            return "starting"
        return "" if main.state == "active" else main.reason

    def label(self, uuid: str) -> str:
        """The `gpu` label of a UUID, "" for the host."""
        return self.labels.get(uuid, "")


class Fleet:
    """A sink for events and a source of snapshots; safe to use from any thread.

    State is keyed by UUID. The `gpu` label is the index at which this process first saw the UUID and stays,
    since indices move when a GPU is lost or the machine reboots.
    """

    def __init__(self, clock: Callable[[], int], gauge_window_ns: int) -> None:
        self._clock = clock
        self._gauge_window_ns = gauge_window_ns
        self._lock = threading.Lock()
        self._totals: dict[str, GpuTotals] = {}
        self._visible: tuple[str, ...] = ()
        self._labels: dict[str, str] = {}
        self._driver: Driver | None = None
        self._states: dict[tuple[SourceName, str], SourceState] = {}
        self._driver_errors: dict[str, int] = {}

    def put(self, event: Event) -> None:
        """Fold one event; events of GPUs that no inventory has named are dropped."""
        with self._lock:
            self._fold(event)

    def snapshot(self) -> FleetSnapshot:
        """The state of all GPUs now."""
        with self._lock:
            now = self._clock()
            return FleetSnapshot(
                now_ns=now,
                wall_ns=time.time_ns(),
                driver=self._driver,
                gpus=tuple(self._totals[uuid].snapshot(now) for uuid in self._visible),
                labels=self._labels.copy(),
                states=tuple(self._current(state, now) for state in self._states.values()),
                driver_errors=self._driver_errors.copy(),
            )

    def _fold(self, event: Event) -> None:
        match event:
            case Inventory():
                self._take_inventory(event)
            case StateChange():
                state = SourceState(event.source, event.uuid, event.state, event.reason, event.time_ns)
                self._states[event.source, event.uuid] = state
            case DriverError():
                self._driver_errors[event.code] = self._driver_errors.get(event.code, 0) + 1
            case Window() | WindowsMissed() | ReadingRejected() | Readings() | IntervalInForce():
                totals = self._totals.get(event.uuid)
                if totals is not None:
                    _fold_into(totals, event)
            case _:
                assert_never(event)

    def _take_inventory(self, inventory: Inventory) -> None:
        self._driver = inventory.driver
        self._visible = tuple(gpu.uuid for gpu in inventory.gpus)
        for gpu in inventory.gpus:
            self._labels.setdefault(gpu.uuid, self._labels.get(gpu.parent_uuid, str(gpu.index)))
            if gpu.uuid in self._totals:
                self._totals[gpu.uuid].gpu = gpu
            else:
                self._totals[gpu.uuid] = GpuTotals(gpu, self._gauge_window_ns)
        self._states = {key: state for key, state in self._states.items() if not key[1] or key[1] in self._visible}

    def _current(self, state: SourceState, now_ns: int) -> SourceState:
        """`active` becomes `stale` where windows stopped without an error."""
        totals = self._totals.get(state.uuid)
        if state.source != "gpm" or state.state != "active" or totals is None:
            return state
        if not totals.is_stale("gpm", state.since_ns, now_ns):
            return state
        return replace(state, state="stale", reason="no valid window arrived")


def _fold_into(totals: GpuTotals, event: Window | WindowsMissed | ReadingRejected | Readings | IntervalInForce) -> None:
    match event:
        case Window():
            totals.add_window(event)
        case WindowsMissed():
            totals.add_missed(event)
        case ReadingRejected():
            totals.add_rejected(event.reading, event.reason)
        case Readings():
            totals.add_readings(event)
        case IntervalInForce():
            totals.add_interval(event.source, event.interval_ns)
