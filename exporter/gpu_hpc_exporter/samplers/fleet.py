"""All GPUs of the host: folds events from every sampler into totals and hands out snapshots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, assert_never

from gpu_hpc_exporter.model import (
    Driver,
    DriverError,
    Event,
    Gpu,
    GpuFellOff,
    GpuJobs,
    GpuProcesses,
    IntervalInForce,
    Inventory,
    JobsInForce,
    JobSource,
    KernelReport,
    ReadingRejected,
    Readings,
    SamplingIncident,
    SourceName,
    State,
    StateChange,
    Tracing,
    Window,
    WindowsRejected,
    XidError,
)
from gpu_hpc_exporter.samplers.kernel_recent import RecentActivity
from gpu_hpc_exporter.samplers.kernel_totals import KernelSnapshot, KernelTotals
from gpu_hpc_exporter.samplers.totals import WINDOW_SOURCES, GpuSnapshot, GpuTotals
from gpu_hpc_exporter.samplers.watch import LIBRARY_CALLS, HungCall
from gpu_hpc_exporter.samplers.window_history import WindowSlice

FELL_OFF_XID: Final = 79
"""NVIDIA's Xid for a GPU that has fallen off the bus."""
MAX_GONE_INSTANCES: Final = 128
"""MIG instances that are gone and whose counters are kept; the oldest are forgotten."""
MAX_JOBS_AGE_NS: Final = 10_000_000_000
"""What was said of jobs vanishes when nobody has said it anew for so long: five times its period."""
WATCHED_NS: Final = 1_000_000_000
"""So long after somebody asked for new windows it is worth while to have them soon; a page asks five times a second."""
_FELL_OFF_DOUBT_NS: Final = 10_000_000_000
"""Readings that still arrive this long after the kernel log called a GPU lost prove it wrong."""


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

    `gpus` holds the GPUs of the newest inventory that can be read now: neither lost nor behind a hung call, and none
    while the driver cannot be read.
    `known` are all physical GPUs and MIG instances that are there or should be, `lost` those of them that
    were there and are not. `xids` holds, per physical GPU and Xid, the count and the newest one's Unix time in
    ns. `labels` maps every UUID ever seen to its `gpu` label. `required` are the sources that the configuration
    asks for, `helper_restarts` counts how often PM sampling's helper process ended unasked. `jobs`: whose the GPUs are,
    by UUID, without those of which nobody knows; `unknown_cgroups` and `jobs_told_ns` as in JobsInForce. `kernels`:
    what the kernel agents tell.
    """

    now_ns: int
    wall_ns: int
    driver: Driver | None
    gpus: tuple[GpuSnapshot, ...]
    known: tuple[Gpu, ...]
    lost: tuple[Gpu, ...]
    expected: int
    labels: Mapping[str, str]
    states: tuple[SourceState, ...]
    driver_errors: Mapping[str, int]
    hung: tuple[HungCall, ...]
    xids: Mapping[str, Mapping[int, tuple[int, int]]]
    required: frozenset[SourceName]
    helper_restarts: int
    jobs: Mapping[str, GpuJobs]
    unknown_cgroups: Mapping[str, int]
    jobs_told_ns: Mapping[JobSource, int]
    kernels: KernelSnapshot

    def job_of(self, uuid: str) -> str:
        """The one job of a GPU, "" where it is idle, shared or unknown."""
        known = self.jobs.get(uuid)
        return known.jobs[0].job.job if known is not None and known.count == len(known.jobs) == 1 else ""

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
        if any(call.call in LIBRARY_CALLS for call in self.hung if not call.uuid):
            return "driver_hung"
        if main is None:
            return "starting"
        return "" if main.state == "active" else main.reason or main.state

    def has_state(self, source: SourceName, uuid: str) -> bool:
        """Whether a source has said anything of a GPU yet."""
        return any(state.source == source and state.uuid == uuid for state in self.states)

    def label(self, uuid: str) -> str:
        """The `gpu` label of a UUID, "" for the host."""
        return self.labels.get(uuid, "")


class Fleet:
    """A sink for events and a source of snapshots; safe to use from any thread.

    State is keyed by UUID. The `gpu` label is the index at which this process first saw the UUID and stays,
    since indices move when a GPU is lost or the machine reboots.
    """

    def __init__(
        self,
        clock: Callable[[], int],
        gauge_window_ns: int,
        expected_gpus: int | None = None,
        hung_calls: Callable[[int], tuple[HungCall, ...]] = lambda _: (),
    ) -> None:
        self._clock = clock
        self._gauge_window_ns = gauge_window_ns
        self._expected_gpus = expected_gpus
        self._hung_calls = hung_calls
        self._required: frozenset[SourceName] = frozenset()
        self._lock = threading.Lock()
        self._totals: dict[str, GpuTotals] = {}
        self._visible: tuple[str, ...] = ()
        self._labels: dict[str, str] = {}
        self._most_visible = 0
        self._driver: Driver | None = None
        self._states: dict[tuple[SourceName, str], SourceState] = {}
        self._fell_off: dict[str, int] = {}
        self._driver_errors: dict[str, int] = {}
        self._helper_restarts = 0
        self._jobs = JobsInForce(-MAX_JOBS_AGE_NS, {}, {}, {})
        self._kernels = KernelTotals()
        self._watched_until_ns = 0

    def configure(
        self, gauge_window_ns: int, expected_gpus: int | None, required: frozenset[SourceName] = frozenset()
    ) -> None:
        """Take over settings; totals stay. `required`: sources that the configuration asks for."""
        with self._lock:
            self._required = required
            self._gauge_window_ns = gauge_window_ns
            self._expected_gpus = expected_gpus
            for totals in self._totals.values():
                totals.gauge_window_ns = gauge_window_ns

    def put(self, event: Event) -> None:
        """Fold one event; events of GPUs that no inventory has named are dropped."""
        with self._lock:
            self._fold(event)

    def snapshot(self) -> FleetSnapshot:
        """The state of all GPUs now."""
        with self._lock:
            now = self._clock()
            hung = self._hung_calls(now)
            lost = {uuid for uuid in self._totals if self._is_lost(uuid)}
            unreadable = {call.uuid for call in hung} | lost
            library = self._states.get(("nvml", ""))
            visible = () if library is not None and library.state == "failed" else self._visible
            physical = [uuid for uuid, totals in self._totals.items() if not totals.gpu.parent_uuid]
            return FleetSnapshot(
                now_ns=now,
                wall_ns=time.time_ns(),
                driver=self._driver,
                gpus=tuple(self._totals[uuid].snapshot(now) for uuid in visible if uuid not in unreadable),
                known=tuple(t.gpu for u, t in self._totals.items() if not t.gpu.parent_uuid or u in self._visible),
                lost=tuple(self._totals[uuid].gpu for uuid in physical if uuid in lost),
                expected=self._most_visible if self._expected_gpus is None else self._expected_gpus,
                labels=self._labels.copy(),
                states=tuple(self._current(state, now, hung) for state in sorted(self._states.values(), key=_place)),
                driver_errors=self._driver_errors.copy(),
                hung=hung,
                xids={uuid: self._totals[uuid].xids() for uuid in physical},
                required=self._required,
                helper_restarts=self._helper_restarts,
                jobs=self._jobs.gpus if now - self._jobs.time_ns <= MAX_JOBS_AGE_NS else {},
                unknown_cgroups=self._jobs.unknown_cgroups,
                jobs_told_ns=self._jobs.told_ns,
                kernels=self._kernels.snapshot(now),
            )

    def windows_since(self, sequences: Mapping[str, int]) -> tuple[int, Mapping[str, WindowSlice]]:
        """The clock's time now, and of each visible GPU the windows from its sequence number on.

        Of a GPU that has none here, none: only the number from which to go on.
        """
        with self._lock:
            now = self._clock()
            self._watched_until_ns = now + WATCHED_NS
            histories = {uuid: self._totals[uuid].history for uuid in self._visible}
            return now, {u: h.since(sequences.get(u, h.following)) for u, h in histories.items()}

    def is_watched(self) -> bool:
        """Whether somebody waits for new windows; asked at every beat of every GPU, so without the lock."""
        return self._clock() < self._watched_until_ns

    def windows(self, uuid: str, length_ns: int) -> tuple[int, WindowSlice] | None:
        """The clock's time now, and a GPU's windows of the last `length_ns`; None for one that nobody knows."""
        with self._lock:
            totals = self._totals.get(uuid)
            now = self._clock()
            return None if totals is None else (now, totals.history.after(now - length_ns))

    def recent_kernels(self) -> Mapping[tuple[str, str], RecentActivity]:
        """By UUID and job what kernel agents told in the last minutes."""
        with self._lock:
            return self._kernels.recent()

    def _fold(self, event: Event) -> None:
        match event:
            case Window() | WindowsRejected() | ReadingRejected() | Readings() | IntervalInForce() | GpuProcesses():
                totals = self._totals.get(event.uuid)
                if totals is not None:
                    self._fold_into(totals, event)
            case SamplingIncident():
                self._take_incident(event)
            case JobsInForce() | KernelReport():
                self._take_jobs(event)
            case Inventory():
                self._take_inventory(event)
            case StateChange():
                self._take_state(event)
            case DriverError():
                self._driver_errors[event.code] = self._driver_errors.get(event.code, 0) + 1
            case XidError():
                self._take_xid(event)
            case GpuFellOff():
                self._take_fell_off(self._uuid_at(event.pci_bus_id), event.time_ns)
            case _:
                assert_never(event)

    def _fold_into(
        self,
        totals: GpuTotals,
        event: Window | WindowsRejected | ReadingRejected | Readings | IntervalInForce | GpuProcesses,
    ) -> None:
        match event:
            case Window():
                totals.add_window(event)
            case WindowsRejected():
                totals.add_window_rejected(event)
            case ReadingRejected():
                totals.add_rejected(event.reading, event.reason)
            case Readings():
                totals.add_readings(event)
                if event.time_ns - self._fell_off.get(event.uuid, event.time_ns) > _FELL_OFF_DOUBT_NS:
                    del self._fell_off[event.uuid]
            case IntervalInForce():
                totals.add_interval(event)
            case GpuProcesses():
                totals.add_processes(event)

    def _take_jobs(self, event: JobsInForce | KernelReport) -> None:
        if isinstance(event, JobsInForce):
            self._jobs = event
        else:
            self._kernels.add(event)
            for uuid, totals in self._totals.items():
                tracing = None if event.tracing is None else event.tracing.get(uuid, _UNTRACED)
                totals.add_tracing(event.time_ns, tracing)

    def _take_inventory(self, inventory: Inventory) -> None:
        self._driver = inventory.driver
        self._visible = tuple(dict.fromkeys(gpu.uuid for gpu in inventory.gpus))
        for gpu in inventory.gpus:
            self._labels.setdefault(gpu.uuid, self._labels.get(gpu.parent_uuid, str(gpu.index)))
            if gpu.uuid in self._totals:
                self._totals[gpu.uuid].gpu = gpu
            else:
                self._totals[gpu.uuid] = GpuTotals(gpu, self._gauge_window_ns)
            self._fell_off.pop(gpu.uuid, None)
            self._forget_loss(gpu.uuid)
        # A GPU that is gone is lost. A MIG instance may have been taken apart, or its parent is away: it is
        # shown no more, and its counters go on if it comes back.
        gone = [uuid for uuid in self._totals if uuid not in self._visible]
        instances = [uuid for uuid in gone if self._totals[uuid].gpu.parent_uuid]
        for uuid in gone:
            if uuid not in instances:
                self._lose(uuid, inventory.time_ns, "the driver no longer lists it")
        for uuid in instances:
            self._interrupt(uuid)
            self._totals[uuid].history.forget()
        self._states = {key: state for key, state in self._states.items() if key[1] not in instances}
        for uuid in instances[: max(0, len(instances) - MAX_GONE_INSTANCES)]:
            del self._totals[uuid], self._labels[uuid]
        visible = sum(not gpu.parent_uuid for gpu in inventory.gpus)
        self._most_visible = max(self._most_visible, inventory.counted, visible)

    def _take_state(self, change: StateChange) -> None:
        if change.uuid and change.uuid not in self._totals:
            return
        state = SourceState(change.source, change.uuid, change.state, change.reason, change.time_ns)
        self._states[change.source, change.uuid] = state
        if change.uuid and change.source in WINDOW_SOURCES:
            self._totals[change.uuid].take_state(change.source, change.state, change.time_ns)

    def _take_incident(self, event: SamplingIncident) -> None:
        if event.incident == "helper_restarted":
            self._helper_restarts += 1
        elif event.uuid in self._totals:
            self._totals[event.uuid].add_incident(event.incident)

    def _take_xid(self, error: XidError) -> None:
        uuid = error.uuid or self._uuid_at(error.pci_bus_id)
        totals = self._totals.get(uuid)
        if totals is not None:
            totals.add_xid(error.xid, error.origin, time.time_ns())
            if error.xid == FELL_OFF_XID:
                self._take_fell_off(uuid, error.time_ns)

    def _take_fell_off(self, uuid: str, time_ns: int) -> None:
        if uuid in self._totals:
            self._fell_off[uuid] = time_ns
            self._interrupt(uuid)

    def _uuid_at(self, pci_bus_id: str) -> str:
        """The physical GPU on a PCI device, "" if it is none of ours. Domains have four or eight digits."""
        wanted = _pci_address(pci_bus_id)
        if wanted is None:
            return ""
        matches = (
            u for u, t in self._totals.items() if not t.gpu.parent_uuid and _pci_address(t.gpu.pci_bus_id) == wanted
        )
        return next(matches, "")

    def _lose(self, uuid: str, time_ns: int, reason: str) -> None:
        sources: tuple[SourceName, ...] = ("nvml", *WINDOW_SOURCES)
        for source in sources:
            known = self._states.get((source, uuid))
            if known.state != "lost" if known else source == "nvml":
                self._states[source, uuid] = SourceState(source, uuid, "lost", reason, time_ns)
        self._interrupt(uuid)

    def _interrupt(self, uuid: str) -> None:
        for source in WINDOW_SOURCES:
            self._totals[uuid].interrupt(source)

    def _forget_loss(self, uuid: str) -> None:
        """A GPU that is listed again is judged by what its owner will say."""
        self._states = {k: s for k, s in self._states.items() if k[1] != uuid or s.state != "lost"}

    def _is_lost(self, uuid: str) -> bool:
        """Whether a GPU, or the parent of a MIG instance, cannot be reached."""
        gpu = self._totals[uuid].gpu
        physical = gpu.parent_uuid or uuid
        state = self._states.get(("nvml", physical))
        return physical in self._fell_off or (state is not None and state.state == "lost")

    def _current(self, state: SourceState, now_ns: int, hung: tuple[HungCall, ...]) -> SourceState:
        """What the events cannot say: `failed` behind a hung call, `stale` where windows stopped without an error."""
        totals = self._totals.get(state.uuid)
        if state.state != "active" or totals is None:
            return state
        call = next((call.call for call in hung if call.uuid == state.uuid), None)
        if call is not None:
            return replace(state, state="failed", reason=f"the driver does not return from: {call}")
        if state.source == "nvml" and not totals.has_fresh_readings(now_ns):
            return replace(state, state="stale", reason="no reading arrived")
        if state.source in WINDOW_SOURCES and totals.is_stale(state.source, state.since_ns, now_ns):
            return replace(state, state="stale", reason="no valid window arrived")
        return state


_UNTRACED: Final = Tracing()


def _place(state: SourceState) -> tuple[str, str]:
    """The host's states first, then by GPU: the order of an exposition does not depend on who was first."""
    return state.uuid, state.source


def _pci_address(pci_bus_id: str) -> tuple[int, ...] | None:
    """Domain, bus and device of `00000000:17:00.0`, `0000:17:00.0` or the kernel's `0000:17:00`."""
    try:
        return tuple(int(part, 16) for part in pci_bus_id.partition(".")[0].split(":"))
    except ValueError:
        return None
