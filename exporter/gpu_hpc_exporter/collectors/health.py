"""What is wrong with the GPUs: lost ones, Xids, driver calls that never return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpu_hpc_exporter import metrics
from gpu_hpc_exporter.exposition import Family
from gpu_hpc_exporter.model import NS
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot

CRITICAL_XIDS: Final = (48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140)
"""Xids of hardware, firmware and lost GPUs (NVIDIA's Xid catalogue). Application faults (13, 31, 43, 45) are not.

Their zeros exist from the start: a counter that is born at 1 never increases, and its alert never fires.
"""


class HealthCollector:
    """Counts of GPUs and of what happened to them."""

    name = "health"

    def collect(self, snapshot: FleetSnapshot) -> Iterator[Family]:
        """Served whole also for GPUs whose values are withdrawn."""
        gpus = metrics.GPUS.family()
        gpus.add(snapshot.expected, "expected")
        gpus.add(sum(not totals.gpu.parent_uuid for totals in snapshot.gpus), "visible")
        lost = metrics.GPU_LOST.family()
        for gpu in snapshot.lost:
            lost.add(1, snapshot.label(gpu.uuid), gpu.uuid, gpu.pci_bus_id)
        hung = metrics.DRIVER_CALL_HUNG.family()
        for call in snapshot.hung:
            hung.add(call.seconds, snapshot.label(call.uuid), call.uuid, call.call)
        yield from (gpus, lost, hung)
        if snapshot.host_state("replay") is None:  # nobody watches for Xids there: a zero would be invented
            yield from self._xids(snapshot)

    @staticmethod
    def _xids(snapshot: FleetSnapshot) -> Iterator[Family]:
        errors = metrics.XID_ERRORS.family()
        newest = metrics.XID_LAST_TIMESTAMP.family()
        for uuid, xids in snapshot.xids.items():
            labels = (snapshot.label(uuid), uuid)
            for xid in sorted({*CRITICAL_XIDS, *xids}):
                count, wall_ns = xids.get(xid, (0, None))
                errors.add(count, *labels, str(xid))
                if wall_ns is not None:
                    newest.add(wall_ns / NS, *labels, str(xid))
        yield from (errors, newest)
