"""Asks the driver in a process of its own: what it does wrong (hang, crash) ends here, and is told by the one outside.

    python -m gpu_hpc_exporter.doctor.probe

Reads one order from stdin and writes lines of JSON. It does what the exporter does, with the exporter's own samplers,
until every source of every GPU has said what it can do.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from gpu_hpc_exporter.config import PmSampling
from gpu_hpc_exporter.model import (
    Driver,
    Event,
    Gpu,
    IntervalInForce,
    Inventory,
    SourceName,
    State,
    StateChange,
    Window,
    WindowSource,
)
from gpu_hpc_exporter.samplers.gpu_owner import Pace
from gpu_hpc_exporter.samplers.nvml import NvmlSampler
from gpu_hpc_exporter.samplers.pm_sampling import STARTING, Patience, PmSampler
from gpu_hpc_exporter.samplers.watch import CALL_DEADLINE_NS, CallWatches, HungCall
from gpu_hpc_exporter.sources.nvml.library import find_function, find_library, loaded_file, why_not_loaded

_MAX_ORDER: Final = 1 << 20
_LOOK_S: Final = 0.05
_GRACE_S: Final = 2.0
"""So much longer than a single call everything together may take."""
FUNCTIONS: Final = (
    *("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleGet", "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet"),
    *("nvmlDeviceGetFieldValues", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons"),
)
"""Of the driver's library, those whose absence costs series and that drivers in use lack."""


class Order(msgspec.Struct, frozen=True):
    """What to look at. pm_sampling: None where somebody else samples. device_files: to be opened, as a driver does."""

    driver_root: str
    procfs: str
    device_files: tuple[str, ...]
    interval_ns: int
    timeout_s: float
    pm_sampling: PmSampling | None


class Doing(msgspec.Struct, frozen=True, tag="doing"):
    """About to do what may take long or hang."""

    what: str


class DeviceFile(msgspec.Struct, frozen=True):
    """A device file, and why it cannot be opened, "" if it can."""

    path: str
    problem: str


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The device files have been tried."""

    files: tuple[DeviceFile, ...]


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The library has been loaded; file "": it was not. missing: functions that it lacks. problem: why it is none."""

    file: str
    missing: tuple[str, ...]
    problem: str = ""


class SourceState(msgspec.Struct, frozen=True):
    """What a source of a GPU says; uuid "" for the library. window_ns: how long its windows are, 0 if none came."""

    source: Literal["nvml", "gpm", "pm_sampling"]
    uuid: str
    state: State
    reason: str = ""
    window_ns: int = 0


class Report(msgspec.Struct, frozen=True, tag="report"):
    """All that was found. cupti: the library that PM sampling has loaded, "" if none."""

    driver: Driver
    gpus: tuple[Gpu, ...]
    counted: int
    states: tuple[SourceState, ...]
    hung: tuple[HungCall, ...]
    cupti: str


Line = Doing | Opened | Loaded | Report


def main() -> None:
    """Probe and end, whatever is stuck. Where the driver's library crashes, the stack is among the lines."""
    faulthandler.enable(sys.stdout, all_threads=False)
    logging.basicConfig(level=logging.DEBUG, format="%(message)s")
    order = msgspec.json.decode(sys.stdin.buffer.read(_MAX_ORDER), type=Order)
    _say(Doing("open the device files"))
    _say(Opened(tuple(_open(path) for path in order.device_files)))
    _say(Doing("load libnvidia-ml.so.1"))
    _say(_load(Path(order.driver_root)))
    _say(Doing("ask the driver"))
    _sample(order)
    sys.stdout.flush()
    os._exit(0)


def _say(line: Line) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(line) + b"\n")
    sys.stdout.buffer.flush()


def _load(driver_root: Path) -> Loaded:
    if not find_library(driver_root):
        return Loaded("", (), why_not_loaded(driver_root))
    if find_function("nvmlInitWithFlags") is None:
        return Loaded(loaded_file(), (), "it has no nvmlInitWithFlags")
    return Loaded(loaded_file(), tuple(name for name in FUNCTIONS if find_function(name) is None))


def _open(path: str) -> DeviceFile:
    """Files that can be opened stay open: closing the last one of a GPU lets the driver shut it down."""
    try:
        os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        return DeviceFile(path, error.strerror or "cannot be opened")
    return DeviceFile(path, "")


class _Notes:
    """Takes note of what the samplers say."""

    def __init__(self, *, samples_pm: bool) -> None:
        self.inventory: Inventory | None = None
        self.states: Mapping[tuple[SourceName, str], tuple[State, str]] = {}
        self.windows: set[tuple[SourceName, str]] = set()
        self.intervals_ns: dict[tuple[SourceName, str], int] = {}
        self._samples_pm = samples_pm

    def put(self, event: Event) -> None:
        """Called from any thread: what others read is replaced, not changed."""
        if isinstance(event, Inventory):
            self.inventory = event
        elif isinstance(event, StateChange):
            self.states = {**self.states, (event.source, event.uuid): (event.state, event.reason)}
        elif isinstance(event, Window):
            self.windows.add((event.source, event.uuid))
        elif isinstance(event, IntervalInForce):
            self.intervals_ns[event.source, event.uuid] = event.interval_ns

    def is_complete(self, hung: frozenset[str]) -> bool:
        """Whether every source has said what it can do; those of GPUs that hang never will."""
        if self.inventory is None:
            return self.states.get(("nvml", ""), ("paused", ""))[0] == "failed"
        return all(self._is_settled(gpu) for gpu in self.inventory.gpus if gpu.uuid not in hung)

    def _is_settled(self, gpu: Gpu) -> bool:
        state, _ = self.states.get(("nvml", gpu.uuid), ("paused", ""))
        if state in ("lost", "paused"):
            return state == "lost"
        no_pm = not self._samples_pm or bool(gpu.parent_uuid)
        return self._has_settled("gpm", gpu.uuid) and (no_pm or self._has_settled("pm_sampling", gpu.uuid))

    def _has_settled(self, source: WindowSource, uuid: str) -> bool:
        state, reason = self.states.get((source, uuid), ("paused", STARTING))
        if state == "active":
            return (source, uuid) in self.windows
        return reason != STARTING


def _sample(order: Order) -> None:
    """Run the exporter's samplers, and say what they said."""
    notes = _Notes(samples_pm=order.pm_sampling is not None)
    watches = CallWatches()
    settings = order.pm_sampling or PmSampling(mode="off")
    pm = PmSampler(notes, settings, order.interval_ns, Patience(start=order.timeout_s), Path(order.procfs))
    nvml = NvmlSampler(pm, Pace(order.interval_ns), Path(order.driver_root), watches)
    if order.pm_sampling is not None:
        pm.start()
    nvml.start()
    deadline = time.monotonic() + order.timeout_s + _GRACE_S
    while time.monotonic() < deadline:
        hung = watches.hung(time.monotonic_ns(), round(order.timeout_s * 1e9))
        if notes.is_complete(frozenset(call.uuid for call in hung)) or (hung and notes.inventory is None):
            break
        time.sleep(_LOOK_S)
    hung = watches.hung(time.monotonic_ns(), min(CALL_DEADLINE_NS, round(order.timeout_s * 1e9)))
    _say(_report(notes, hung, pm.library))
    pm.stop()


def _report(notes: _Notes, hung: tuple[HungCall, ...], cupti: str) -> Report:
    inventory = notes.inventory or Inventory(0, (), Driver())
    states = []
    for (source, uuid), (state, reason) in sorted(notes.states.items()):
        if source in ("nvml", "gpm", "pm_sampling"):
            window = notes.intervals_ns.get((source, uuid), 0) if (source, uuid) in notes.windows else 0
            states.append(SourceState(source, uuid, state, reason, window))
    return Report(inventory.driver, inventory.gpus, inventory.counted, tuple(states), hung, cupti)


if __name__ == "__main__":
    main()
