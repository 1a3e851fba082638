"""The exporter's own process: CPU, memory, descriptors, under the names that every client library uses."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import ProcessCollector as ProcessReader

from gpu_hpc_exporter.exposition import Family
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot


class ProcessCollector:
    """`process_*` of this process, read from /proc."""

    name = "process"

    def __init__(self) -> None:
        self._reader = ProcessReader(registry=None)

    def collect(self, _: FleetSnapshot) -> Iterator[Family]:
        """The snapshot says nothing of the process itself."""
        yield from map(Family.of_metric, self._reader.collect())
