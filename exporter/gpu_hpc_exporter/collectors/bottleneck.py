"""The diagnosis: time by class, and how hard each unit worked."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_hpc_exporter import metrics
from gpu_hpc_exporter.exposition import Family
from gpu_hpc_exporter.model import NS
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot
from gpu_hpc_exporter.samplers.ledger import HISTOGRAM_BOUNDS, NANO


class BottleneckCollector:
    """Classes, intensities and their distribution, for GPUs that have had a window."""

    name = "bottleneck"

    def collect(self, snapshot: FleetSnapshot) -> Iterator[Family]:
        """Every class of a GPU is present from its first window on, so that rates start at 0."""
        classes = metrics.BOTTLENECK_SECONDS.family()
        gauges = metrics.BOTTLENECK_INTENSITY.family()
        windows = metrics.BOTTLENECK_INTENSITY_WINDOWS.family()
        for totals in snapshot.gpus:
            if not totals.source_observed_ns:
                continue
            labels = (snapshot.label(totals.gpu.uuid), totals.gpu.uuid)
            for name, class_ns in totals.class_ns.items():
                classes.add(class_ns / NS, *labels, name)
            for unit, intensity in totals.intensities.items():
                gauges.add(intensity, *labels, unit)
            for unit, histogram in totals.histograms.items():
                windows.add_histogram(HISTOGRAM_BOUNDS, histogram.counts, histogram.sum_nano / NANO, *labels, unit)
        yield classes
        yield gauges
        yield windows
