"""How the exporter's sources are: up or down and why, states, windows, rejected readings, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpu_hpc_exporter import metrics
from gpu_hpc_exporter.exposition import Family
from gpu_hpc_exporter.model import NS, STATES, Incident
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot

_GPU_INCIDENTS: Final[tuple[Incident, ...]] = ("overflow", "set_reduced", "rate_halved")


class SourcesCollector:
    """Tells "0" from "not measured": every state of every source, and what was counted on the way."""

    name = "sources"

    def collect(self, snapshot: FleetSnapshot) -> Iterator[Family]:
        """Served whole also on a node without a driver."""
        yield from self._health(snapshot)
        yield from self._states(snapshot)
        yield from self._windows(snapshot)
        yield from self._incidents(snapshot)
        errors = metrics.DRIVER_ERRORS.family()
        for code, count in snapshot.driver_errors.items():
            errors.add(count, code)
        yield errors

    @staticmethod
    def _health(snapshot: FleetSnapshot) -> Iterator[Family]:
        up = metrics.UP.family()
        up.add(1 if snapshot.is_up else 0)
        yield up
        if not snapshot.is_up:
            down = metrics.DOWN_INFO.family()
            down.add(1, snapshot.down_reason)
            yield down
        replay = metrics.REPLAY.family()
        replay.add(1 if snapshot.host_state("replay") else 0)
        yield replay

    @staticmethod
    def _states(snapshot: FleetSnapshot) -> Iterator[Family]:
        states = metrics.SOURCE_STATE.family()
        reasons = metrics.SOURCE_STATE_INFO.family()
        for current in snapshot.states:
            labels = (snapshot.label(current.uuid), current.uuid, current.source)
            for state in STATES:
                states.add(1 if state == current.state else 0, *labels, state)
            if current.state != "active":
                reasons.add(1, *labels, current.state, current.reason)
        required = metrics.SOURCE_REQUIRED.family()
        for source in sorted({current.source for current in snapshot.states} | snapshot.required):
            required.add(1 if source in snapshot.required else 0, source)
        yield from (states, reasons, required)

    @staticmethod
    def _windows(snapshot: FleetSnapshot) -> Iterator[Family]:
        interval = metrics.WINDOW_SECONDS.family()
        windows = metrics.WINDOWS.family()
        last = metrics.LAST_WINDOW.family()
        rejected = metrics.REJECTED_READINGS.family()
        for totals in snapshot.gpus:
            gpu = (snapshot.label(totals.gpu.uuid), totals.gpu.uuid)
            for source, interval_ns in totals.intervals_ns.items():
                interval.add(interval_ns / NS, *gpu, source)
                for result in ("valid", "late", "lost", "rejected"):
                    windows.add(totals.windows.get((source, result), 0), *gpu, source, result)
            for source, end_ns in totals.last_window_ns.items():
                last.add((snapshot.wall_ns - (snapshot.now_ns - end_ns)) / NS, *gpu, source)
            for (reading, reason), count in totals.rejected.items():
                rejected.add(count, *gpu, reading, reason)
        yield from (interval, windows, last, rejected)

    @staticmethod
    def _incidents(snapshot: FleetSnapshot) -> Iterator[Family]:
        """Zeros exist from the beginning: a counter that is born at 1 never increases."""
        if any(current.source == "pm_sampling" for current in snapshot.states):
            restarts = metrics.HELPER_RESTARTS.family()
            restarts.add(snapshot.helper_restarts)
            yield restarts
        incidents = metrics.PM_SAMPLING_INCIDENTS.family()
        for totals in snapshot.gpus:
            if totals.incidents or "pm_sampling" in totals.intervals_ns:
                for incident in _GPU_INCIDENTS:
                    labels = (snapshot.label(totals.gpu.uuid), totals.gpu.uuid, incident)
                    incidents.add(totals.incidents.get(incident, 0), *labels)
        if incidents.samples:
            yield incidents
