"""The thread that owns one GPU: it alone calls the driver for it, on the beat of the sampling windows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from gpu_hpc_exporter.model import (
    NS,
    DriverError,
    Gpu,
    GpuProcesses,
    IntervalInForce,
    ReadingRejected,
    Readings,
    Sink,
    SourceName,
    State,
    StateChange,
    Window,
)
from gpu_hpc_exporter.samplers.ticker import Ticker
from gpu_hpc_exporter.samplers.watch import CallWatch
from gpu_hpc_exporter.sources.nvml.gpm import GpmStream
from gpu_hpc_exporter.sources.nvml.inventory import Device
from gpu_hpc_exporter.sources.nvml.library import DriverCallError, Handle
from gpu_hpc_exporter.sources.nvml.processes import PERIOD_NS, REPROBE_NS, ProcessReader
from gpu_hpc_exporter.sources.nvml.readings import BOARD_GROUPS, VGPU_GROUPS, Group, ReadingTable, instance_groups

log = logging.getLogger(__name__)

PUBLISH_PERIOD_NS: Final = NS
_SELDOM_NS: Final = NS // 2
_GPM_REPROBE_NS: Final = 3600 * NS
_MAX_GPM_BACKOFF_NS: Final = 30 * NS
_MAX_GPM_FAILURES: Final = 20
"""Failures in a row after which GPM is asked hourly, as on vGPUs that claim to support it and never deliver."""
_SILENCE_NS: Final = 60 * NS
_BUSY: Final = 0.9
_MAX_FAILED_PASSES: Final = 3
"""Passes in a row in which every reading fails: access to the GPU is lost, whatever the code."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long GPM's windows are: `interval_ns`, or longer for a GPU that somebody else samples more finely.

    Of such a GPU they tell only what the finer windows lack, and each sample costs the driver 0.3 ms.
    `is_watched` tells whether somebody looks at windows as they come: then each is worked off on its beat, which costs
    50 us more than ten at once.
    """

    interval_ns: int
    has_finer_windows: Callable[[str], bool] = lambda _: False
    is_watched: Callable[[], bool] = lambda: False

    def of(self, uuid: str) -> int:
        """The length of a GPU's windows now, in ns."""
        return max(self.interval_ns, _SELDOM_NS) if self.has_finer_windows(uuid) else self.interval_ns


@dataclass(slots=True)
class _Row:
    """One row of the inventory, as its owner reads it: a whole GPU or a MIG instance."""

    gpu: Gpu
    table: ReadingTable
    processes: ProcessReader | None
    processes_due_ns: int = 0
    gpm: GpmStream | None = None
    gpm_due_ns: int = 0
    gpm_failures: int = 0
    is_busy: bool = False
    silent_since_ns: int | None = None
    rebuilt: bool = False
    states: dict[SourceName, tuple[State, str]] = field(default_factory=dict)


class GpuOwner:
    """Owns one physical GPU and its MIG instances: every driver call for them happens in its thread."""

    def __init__(
        self,
        device: Device,
        sink: Sink,
        pace: Pace,
        watch: CallWatch,
        on_end: Callable[[], None],
    ) -> None:
        """`watch` is told of every driver call; `on_end` is called when the GPU is lost or at a stop."""
        self._device = device
        self._watch = watch
        self._failed_passes = 0
        self.lost_reason = ""
        """Why the GPU was lost, "" while it is not."""
        self._sink = sink
        self._pace = pace
        self._interval_ns = pace.interval_ns
        self._publish_due_ns = 0
        board = VGPU_GROUPS if device.is_vgpu else BOARD_GROUPS
        self._rows = [self._row(device.gpu, device.handle, board)]
        for instance in device.instances:
            groups = instance_groups(device.handle, instance.gpu.peak_share)
            self._rows.append(self._row(instance.gpu, instance.handle, groups))
        self.ticker = Ticker(f"nvml-gpu{device.gpu.index}", pace.interval_ns, self._tick, self._close, on_end)

    def _close(self) -> None:
        """The thread's last act: publish what was sampled and free what the driver holds for this GPU."""
        for row in self._rows:
            self._begin_call("GPM free")
            with suppress(DriverCallError):  # the GPU was lost just now: there is nobody left to tell
                self._publish(row, time.monotonic_ns())
            if row.gpm is not None:
                row.gpm.close()
        self._watch.current = None

    def _row(self, gpu: Gpu, handle: Handle, groups: tuple[Group, ...]) -> _Row:
        label = f"GPU {gpu.index} ({gpu.uuid})"
        processes = None
        if gpu.parent_uuid or gpu.mig_mode != "enabled":  # with MIG, the processes are the instances'
            instance = int(gpu.gpu_instance) if gpu.parent_uuid else None
            processes = ProcessReader(handle, label, instance, self._begin_call)
        return _Row(gpu, ReadingTable(handle, label, groups, self._begin_call), processes)

    def _begin_call(self, call: str) -> None:
        self._watch.current = (call, time.monotonic_ns())

    def _tick(self) -> bool:
        """One beat. All that has to happen on it is the sample: ten times a second every cache has gone cold."""
        now_ns = time.monotonic_ns()
        is_due = now_ns >= self._publish_due_ns
        try:
            self._sample(now_ns)
            if is_due or self._pace.is_watched():
                for row in self._rows:
                    if is_due:
                        self._read(row, now_ns)
                    self._begin_call("GPM metrics")
                    self._publish(row, now_ns)
            if is_due:
                # The first window is published at once, later ones once a second.
                first = self._publish_due_ns == 0
                self._publish_due_ns = now_ns + (self._interval_ns if first else PUBLISH_PERIOD_NS)
                self._keep_pace(now_ns)
        except DriverCallError as error:
            self._lose(error.name)
            return False
        finally:
            self._watch.current = None
        return self._failed_passes < _MAX_FAILED_PASSES

    def _sample(self, now_ns: int) -> None:
        self._watch.current = ("GPM sample", now_ns)
        for row in self._rows:
            if now_ns < row.gpm_due_ns:
                continue
            try:
                if row.gpm is None:
                    self._open_gpm(row, now_ns)
                elif row.gpm.take():
                    self._publish(row, now_ns)
            except DriverCallError as error:
                self._gpm_failed(row, error, now_ns)

    def _keep_pace(self, now_ns: int) -> None:
        interval_ns = self._pace.of(self._device.gpu.uuid)
        if interval_ns == self._interval_ns:
            return
        self._interval_ns = self.ticker.period_ns = interval_ns
        for row in self._rows:
            if row.gpm is not None:
                row.gpm.interval_ns = interval_ns
                self._sink.put(IntervalInForce(now_ns, row.gpu.uuid, "gpm", interval_ns))

    @property
    def index(self) -> int:
        """The GPU's index at the time of the listing."""
        return self._device.gpu.index

    @property
    def label(self) -> str:
        """The GPU, for people."""
        return f"GPU {self.index} ({self._device.gpu.uuid})"

    def tell_paused(self, reason: str) -> None:
        """Say of every source that was in use that it pauses. Only after the thread has ended."""
        for row in self._rows:
            for source, (state, _) in row.states.items():
                if state not in ("unsupported", "lost"):
                    self._sink.put(StateChange(time.monotonic_ns(), source, row.gpu.uuid, "paused", reason))

    def _lose(self, name: str) -> None:
        self.lost_reason = name
        log.error("GPU %d (%s) is lost (%s): its series end", self._device.gpu.index, self._device.gpu.uuid, name)
        self._sink.put(DriverError(time.monotonic_ns(), name))
        for row in self._rows:
            self._set_state(row, "nvml", "lost", name)
            if row.gpm is not None:
                self._set_state(row, "gpm", "lost", name)

    def _read(self, row: _Row, now_ns: int) -> None:
        result = row.table.read(now_ns)
        for code in result.errors:
            self._sink.put(DriverError(now_ns, code))
        for reading, problem in result.problems:
            self._sink.put(ReadingRejected(now_ns, row.gpu.uuid, reading, problem))
        row.is_busy = result.values.get("nvml_utilization_ratio", 0.0) >= _BUSY
        if result.answered:
            self._sink.put(Readings(row.gpu.uuid, now_ns, result.values))
            self._read_processes(row, now_ns, result.values.get("memory_total_bytes"))
            self._set_state(row, "nvml", "active", "")
            self._failed_passes = 0
        elif result.errors:
            self._set_state(row, "nvml", "failed", result.errors[0])
            self._failed_passes += not row.gpu.parent_uuid
            if self._failed_passes == _MAX_FAILED_PASSES:
                self._lose(result.errors[0])
        else:
            self._set_state(row, "nvml", "unsupported", "the driver offers no reading of this GPU")

    def _read_processes(self, row: _Row, now_ns: int, total_bytes: float | None) -> None:
        if row.processes is None or now_ns < row.processes_due_ns:
            return
        found = row.processes.read(total_bytes, now_ns)
        row.processes_due_ns = now_ns + (REPROBE_NS if found.is_unsupported else PERIOD_NS)
        for code in found.errors:
            self._sink.put(DriverError(now_ns, code))
        if found.problem is not None:
            self._sink.put(ReadingRejected(now_ns, row.gpu.uuid, "processes", found.problem))
        self._sink.put(GpuProcesses(now_ns, row.gpu.uuid, found.processes))

    def _publish(self, row: _Row, now_ns: int) -> None:
        """Work off the samples taken since the last time."""
        if row.gpm is None or now_ns < row.gpm_due_ns:
            return
        try:
            for outcome in row.gpm.windows():
                self._sink.put(outcome)
                if isinstance(outcome, Window) and any(outcome.values.values()):
                    row.silent_since_ns, row.rebuilt = None, False
        except DriverCallError as error:
            self._gpm_failed(row, error, now_ns)
            return
        row.gpm_failures = 0
        if self._is_silent(row, now_ns):
            self._rebuild_gpm(row, now_ns)
            return
        self._set_state(row, "gpm", "active", "")

    def _open_gpm(self, row: _Row, now_ns: int) -> None:
        """Open GPM and take the first sample, or say why there will be no windows; to be asked again in an hour."""
        row.gpm_due_ns = now_ns + _GPM_REPROBE_NS
        if row.gpu.mig_mode == "enabled" and not row.gpu.parent_uuid:
            self._set_state(row, "gpm", "unsupported", "MIG is enabled: the instances have the windows")
            return
        instance = int(row.gpu.gpu_instance) if row.gpu.parent_uuid else None
        try:
            row.gpm = GpmStream(self._device.handle, row.gpu, self._interval_ns, instance)
        except DriverCallError as error:
            if error.fatal:
                raise
            if error.unsupported:
                self._set_state(row, "gpm", "unsupported", "GPM needs a Hopper GPU or later (compute capability 9.0)")
            else:
                self._set_state(row, "gpm", "failed", error.name)
            return
        row.gpm_due_ns = 0
        self._sink.put(IntervalInForce(now_ns, row.gpu.uuid, "gpm", self._interval_ns))
        row.gpm.take()

    @staticmethod
    def _is_silent(row: _Row, now_ns: int) -> bool:
        """Whether every counter has read exactly 0 for a minute while NVML calls the GPU busy.

        A real idle GPU is not busy, and copies, which leave the SMs at 0, show on PCIe and DRAM.
        """
        if not row.is_busy:
            row.silent_since_ns = None
            return False
        if row.silent_since_ns is None:
            row.silent_since_ns = now_ns
        return now_ns - row.silent_since_ns > _SILENCE_NS

    def _rebuild_gpm(self, row: _Row, now_ns: int) -> None:
        """Open GPM anew; if it is silent even then, leave it for an hour: no window is better than a false idle."""
        self._set_state(row, "gpm", "failed", "every counter reads 0 while the GPU is busy")
        if row.gpm is not None:
            row.gpm.close()
        row.gpm, row.silent_since_ns = None, None
        row.gpm_due_ns = now_ns + _GPM_REPROBE_NS if row.rebuilt else now_ns
        row.rebuilt = True

    def _gpm_failed(self, row: _Row, error: DriverCallError, now_ns: int) -> None:
        """A window that fails is lost; the next tries come ever more seldom, in the end hourly."""
        if error.fatal:
            raise error
        self._sink.put(DriverError(now_ns, error.name))
        if error.unsupported:
            self._set_state(row, "gpm", "unsupported", error.name)
            row.gpm_due_ns = now_ns + _GPM_REPROBE_NS
            return
        self._set_state(row, "gpm", "no_permission" if error.denied else "failed", error.name)
        row.gpm_failures += 1
        is_hopeless = row.gpm_failures > _MAX_GPM_FAILURES
        backoff = _GPM_REPROBE_NS if is_hopeless else min(NS << row.gpm_failures - 1, _MAX_GPM_BACKOFF_NS)
        row.gpm_due_ns = now_ns + backoff

    def _set_state(self, row: _Row, source: SourceName, state: State, reason: str) -> None:
        if row.states.get(source) == (state, reason):
            return
        row.states[source] = (state, reason)
        self._sink.put(StateChange(time.monotonic_ns(), source, row.gpu.uuid, state, reason))
        if state not in ("active", "lost"):
            log.warning("GPU %d (%s): %s is %s: %s", row.gpu.index, row.gpu.uuid, source, state, reason)
