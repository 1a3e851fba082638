"""Samples every GPU through NVML: one owner thread per GPU, and one for the library.

The library's owner opens NVML, lists the GPUs, starts their owners and, when all of them have failed,
closes NVML and begins again with growing pauses. Only a GPU's owner ever calls the driver for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from gpu_hpc_exporter.model import (
    DriverError,
    Gpu,
    IntervalInForce,
    Inventory,
    ReadingRejected,
    Readings,
    Sink,
    SourceName,
    State,
    StateChange,
)
from gpu_hpc_exporter.samplers.ticker import Ticker
from gpu_hpc_exporter.sources.nvml.gpm import FLOOR_NS, GpmStream
from gpu_hpc_exporter.sources.nvml.inventory import Device, list_devices
from gpu_hpc_exporter.sources.nvml.library import (
    DriverCallError,
    DriverUnavailableError,
    Handle,
    close_library,
    driver_versions,
    open_library,
)
from gpu_hpc_exporter.sources.nvml.readings import BOARD_GROUPS, Group, ReadingTable, instance_groups

log = logging.getLogger(__name__)

_NS: Final = 1_000_000_000
PUBLISH_PERIOD_NS: Final = _NS
_FIRST_BACKOFF_S: Final = 1.0
_MAX_BACKOFF_S: Final = 60.0
_GPM_REPROBE_NS: Final = 3600 * _NS
_JOIN_S: Final = 1.0


class NvmlSampler:
    """Feeds a sink from NVML until stopped. A missing or broken driver is a state, never an exception."""

    def __init__(self, sink: Sink, interval_ns: int) -> None:
        self._sink = sink
        self._interval_ns = max(interval_ns, FLOOR_NS)
        if interval_ns < FLOOR_NS:
            log.warning(
                "sampling_interval_ms %g is below GPM's floor: it samples every %d ms",
                interval_ns / 1e6,
                FLOOR_NS // 1_000_000,
            )
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def start(self) -> None:
        """Begin sampling in the background."""
        self._thread.start()

    def stop(self) -> None:
        """End sampling; returns after at most a few seconds, also with a call stuck in the driver."""
        self._stop.set()
        self._wake.set()
        self._thread.join(2 * _JOIN_S)

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        last_reason = ""
        while not self._stop.is_set():
            try:
                open_library()
                last_reason, backoff = "", _FIRST_BACKOFF_S
                self._sample_until_lost()
            except DriverUnavailableError as error:
                if error.reason != last_reason:
                    log.error("no GPU can be read, trying again up to every %d s: %s", _MAX_BACKOFF_S, error)
                last_reason = error.reason
                self._host_state("failed", error.reason)
            except DriverCallError as error:
                close_library()
                log.warning("the GPUs cannot be listed (%s): trying again", error.name)
                self._sink.put(DriverError(time.monotonic_ns(), error.name))
                self._host_state("failed", error.name)
            self._stop.wait(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    def _sample_until_lost(self) -> None:
        """Sample all GPUs; returns when every one has failed or at a stop, with the library closed."""
        devices = list_devices()
        self._sink.put(Inventory(time.monotonic_ns(), _rows(devices), driver_versions()))
        self._host_state("active", "")
        if not devices:
            log.warning("the driver is up and shows no GPU")
        owners = [_DeviceOwner(device, self._sink, self._interval_ns, self._wake.set) for device in devices]
        for owner in owners:
            owner.ticker.start()
        while not self._stop.is_set():
            self._wake.wait()  # a stop, or an owner that has lost its GPU
            self._wake.clear()
            if owners and all(owner.ticker.ended for owner in owners):
                break
        for owner in owners:
            owner.ticker.stop()
        deadline = time.monotonic() + _JOIN_S
        # Closing the library under a call in progress is undefined: leave it open rather than crash.
        ended = [owner.ticker.join(max(0.0, deadline - time.monotonic())) for owner in owners]
        if all(ended):
            for owner in owners:
                owner.close()
            close_library()

    def _host_state(self, state: State, reason: str) -> None:
        self._sink.put(StateChange(time.monotonic_ns(), "nvml", "", state, reason))


def _rows(devices: tuple[Device, ...]) -> tuple[Gpu, ...]:
    rows: list[Gpu] = []
    for device in devices:
        rows.append(device.gpu)
        rows.extend(instance.gpu for instance in device.instances)
    return tuple(rows)


@dataclass(slots=True)
class _Row:
    """One row of the inventory, as its owner reads it: a whole GPU or a MIG instance."""

    gpu: Gpu
    table: ReadingTable
    gpm: GpmStream | None = None
    gpm_due_ns: int = 0
    gpm_failures: int = 0
    states: dict[SourceName, tuple[State, str]] = field(default_factory=dict)


class _DeviceOwner:
    """Owns one physical GPU and its MIG instances: every driver call for them happens in its thread."""

    def __init__(self, device: Device, sink: Sink, interval_ns: int, on_end: Callable[[], None]) -> None:
        self._device = device
        self._sink = sink
        self._interval_ns = interval_ns
        self._publish_due_ns = 0
        self._rows = [self._row(device.gpu, device.handle, BOARD_GROUPS)]
        for instance in device.instances:
            groups = instance_groups(device.handle, instance.gpu.peak_share)
            self._rows.append(self._row(instance.gpu, instance.handle, groups))
        self.ticker = Ticker(f"nvml-gpu{device.gpu.index}", interval_ns, self._tick, on_end)

    def close(self) -> None:
        """Free what the driver holds for this GPU, after the thread has ended."""
        for row in self._rows:
            if row.gpm is not None:
                row.gpm.close()

    @staticmethod
    def _row(gpu: Gpu, handle: Handle, groups: tuple[Group, ...]) -> _Row:
        label = f"GPU {gpu.index} ({gpu.uuid})"
        return _Row(gpu, ReadingTable(handle, label, groups))

    def _tick(self) -> bool:
        now_ns = time.monotonic_ns()
        try:
            for row in self._rows:
                self._take(row, now_ns)
            if now_ns >= self._publish_due_ns:
                for row in self._rows:
                    self._read(row, now_ns)
                    self._publish(row, now_ns)
                # The first window is published at once, later ones once a second.
                first = self._publish_due_ns == 0
                self._publish_due_ns = now_ns + (self._interval_ns if first else PUBLISH_PERIOD_NS)
        except DriverCallError as error:
            self._lose(error)
            return False
        return True

    def _lose(self, error: DriverCallError) -> None:
        name = error.name
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
        if result.answered:
            self._sink.put(Readings(row.gpu.uuid, now_ns, result.values))
            self._set_state(row, "nvml", "active", "")
        else:
            self._set_state(row, "nvml", "failed", result.errors[0] if result.errors else "not_supported")

    def _take(self, row: _Row, now_ns: int) -> None:
        if now_ns < row.gpm_due_ns:
            return
        row.gpm_due_ns = 0
        if row.gpm is None:
            row.gpm = self._open_gpm(row)
            if row.gpm is None:
                row.gpm_due_ns = now_ns + _GPM_REPROBE_NS
                return
        try:
            if row.gpm.take():
                self._publish(row, now_ns)
        except DriverCallError as error:
            self._gpm_failed(row, error, now_ns)

    def _publish(self, row: _Row, now_ns: int) -> None:
        """Work off the samples taken since the last time."""
        if row.gpm is None or now_ns < row.gpm_due_ns:
            return
        try:
            for outcome in row.gpm.windows():
                self._sink.put(outcome)
        except DriverCallError as error:
            self._gpm_failed(row, error, now_ns)
            return
        row.gpm_failures = 0
        self._set_state(row, "gpm", "active", "")

    def _open_gpm(self, row: _Row) -> GpmStream | None:
        if row.gpu.mig_mode == "enabled" and not row.gpu.parent_uuid:
            self._set_state(row, "gpm", "unsupported", "MIG is enabled: the instances have the windows")
            return None
        instance = int(row.gpu.gpu_instance) if row.gpu.parent_uuid else None
        try:
            stream = GpmStream(self._device.handle, row.gpu, self._interval_ns, instance)
        except DriverCallError as error:
            if error.fatal:
                raise
            if error.unsupported:
                self._set_state(row, "gpm", "unsupported", "GPM needs a Hopper GPU or later (compute capability 9.0)")
            else:
                self._set_state(row, "gpm", "failed", error.name)
            return None
        self._sink.put(IntervalInForce(time.monotonic_ns(), row.gpu.uuid, "gpm", self._interval_ns))
        return stream

    def _gpm_failed(self, row: _Row, error: DriverCallError, now_ns: int) -> None:
        """A window that fails is lost; the next tries come ever more seldom, up to hourly."""
        if error.fatal:
            raise error
        self._sink.put(DriverError(now_ns, error.name))
        if error.unsupported:
            self._set_state(row, "gpm", "unsupported", error.name)
            row.gpm_due_ns = now_ns + _GPM_REPROBE_NS
            return
        self._set_state(row, "gpm", "no_permission" if error.denied else "failed", error.name)
        row.gpm_due_ns = now_ns + min(_NS << min(row.gpm_failures, 12), _GPM_REPROBE_NS)
        row.gpm_failures += 1

    def _set_state(self, row: _Row, source: SourceName, state: State, reason: str) -> None:
        if row.states.get(source) == (state, reason):
            return
        row.states[source] = (state, reason)
        self._sink.put(StateChange(time.monotonic_ns(), source, row.gpu.uuid, state, reason))
        if state not in ("active", "lost"):
            log.warning("GPU %d (%s): %s is %s: %s", row.gpu.index, row.gpu.uuid, source, state, reason)
