"""What GPUs there are and which driver runs them."""

from __future__ import annotations

from collections.abc import Iterator

from gpu_hpc_exporter import metrics
from gpu_hpc_exporter.exposition import Family
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot


class GpusCollector:
    """Identity of the GPUs, for joins and for people."""

    name = "gpus"

    def collect(self, snapshot: FleetSnapshot) -> Iterator[Family]:
        """One info sample per GPU and MIG instance."""
        info = metrics.GPU_INFO.family()
        for totals in snapshot.gpus:
            gpu = totals.gpu
            info.add(
                1,
                snapshot.label(gpu.uuid),
                gpu.uuid,
                gpu.name,
                gpu.architecture,
                gpu.compute_capability,
                str(gpu.index),
                gpu.pci_bus_id,
                gpu.serial,
                gpu.vbios,
                gpu.mig_mode,
                gpu.gpu_instance,
                gpu.profile,
                gpu.parent_uuid,
            )
        yield info
        if snapshot.driver is not None:
            driver = metrics.DRIVER_INFO.family()
            driver.add(1, snapshot.driver.driver_version, snapshot.driver.cuda_version, snapshot.driver.nvml_version)
            yield driver
