"""Collectors turn a snapshot into metric families: one file a subsystem, pure, no I/O.

To add one: its module, its specs in `metrics.py`, a test, and its line in `COLLECTORS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from gpu_hpc_exporter.collectors.bottleneck import BottleneckCollector
from gpu_hpc_exporter.collectors.gpus import GpusCollector
from gpu_hpc_exporter.collectors.health import HealthCollector
from gpu_hpc_exporter.collectors.jobs import JobsCollector
from gpu_hpc_exporter.collectors.kernels import KernelsCollector
from gpu_hpc_exporter.collectors.process import ProcessCollector
from gpu_hpc_exporter.collectors.readings import ReadingsCollector
from gpu_hpc_exporter.collectors.sources import SourcesCollector
from gpu_hpc_exporter.collectors.windows import WindowsCollector
from gpu_hpc_exporter.exposition import Family
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot


class Collector(Protocol):
    """What a scrape asks of a subsystem. May raise: the other collectors' families are served all the same."""

    name: str

    def collect(self, snapshot: FleetSnapshot) -> Iterator[Family]: ...


COLLECTORS: Final[tuple[Collector, ...]] = (
    SourcesCollector(),
    GpusCollector(),
    WindowsCollector(),
    BottleneckCollector(),
    ReadingsCollector(),
    HealthCollector(),
    JobsCollector(),
    KernelsCollector(),
    ProcessCollector(),
)
