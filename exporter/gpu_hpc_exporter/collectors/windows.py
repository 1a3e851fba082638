"""Counters that sampling windows add up to, and the gauges of the last few seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpu_hpc_exporter import metrics
from gpu_hpc_exporter.exposition import Family, Spec
from gpu_hpc_exporter.model import COUNT_QUANTITIES, NS, Quantity, WindowSource
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot
from gpu_hpc_exporter.samplers.totals import GpuSnapshot

_COUNTERS: Final[tuple[tuple[Spec, tuple[tuple[Quantity, tuple[str, ...]], ...]], ...]] = (
    (metrics.SM_ACTIVE_SECONDS, (("sm_active", ()),)),
    (metrics.SM_OCCUPANCY_SECONDS, (("sm_occupancy", ()),)),
    (
        metrics.PIPE_ACTIVE_SECONDS,
        (
            ("pipe_tensor", ("tensor",)),
            ("pipe_fp64", ("fp64",)),
            ("pipe_fp32", ("fp32",)),
            ("pipe_fp16", ("fp16",)),
            ("pipe_int", ("int",)),
            ("pipe_shared", ("shared",)),
        ),
    ),
    (
        metrics.ENGINE_ACTIVE_SECONDS,
        (
            ("engine_decode", ("decode",)),
            ("engine_encode", ("encode",)),
            ("engine_ofa", ("ofa",)),
            ("engine_jpeg", ("jpeg",)),
        ),
    ),
    (metrics.DRAM_ACTIVE_SECONDS, (("dram_active", ()),)),
    (metrics.DRAM_READ_BYTES, (("dram_read_bytes", ()),)),
    (metrics.DRAM_WRITTEN_BYTES, (("dram_written_bytes", ()),)),
    (metrics.L2_SECTORS, (("l2_sectors", ()),)),
    (metrics.L2_MISSED_SECTORS, (("l2_missed_sectors", ()),)),
    (metrics.L2_ACTIVE_SECONDS, (("l2_active", ()),)),
    (metrics.PCIE_HOST_TO_GPU_BYTES, (("pcie_host_to_gpu_bytes", ()),)),
    (metrics.PCIE_GPU_TO_HOST_BYTES, (("pcie_gpu_to_host_bytes", ()),)),
    (metrics.NVLINK_RECEIVED_BYTES, (("nvlink_received_bytes", ()),)),
    (metrics.NVLINK_TRANSMITTED_BYTES, (("nvlink_transmitted_bytes", ()),)),
    (metrics.C2C_HOST_TO_GPU_BYTES, (("c2c_host_to_gpu_bytes", ()),)),
    (metrics.C2C_GPU_TO_HOST_BYTES, (("c2c_gpu_to_host_bytes", ()),)),
)
"""Per family: which totals it shows, with the labels after gpu and uuid."""

_GAUGES: Final[tuple[tuple[Spec, Quantity], ...]] = (
    (metrics.SM_ACTIVE, "sm_active"),
    (metrics.SM_OCCUPANCY, "sm_occupancy"),
    (metrics.DRAM_UTILIZATION, "dram_active"),
)

_SHARED: Final[tuple[tuple[Spec, tuple[Quantity, ...]], ...]] = (
    (metrics.SM_ACTIVE_SECONDS, ("sm_active",)),
    (metrics.SM_OCCUPANCY_SECONDS, ("sm_occupancy",)),
    (metrics.PIPE_ACTIVE_SECONDS, ("pipe_tensor", "pipe_fp64", "pipe_fp32", "pipe_fp16", "pipe_int", "pipe_shared")),
    (metrics.DRAM_ACTIVE_SECONDS, ("dram_active",)),
    (metrics.PCIE_HOST_TO_GPU_BYTES, ("pcie_host_to_gpu_bytes",)),
    (metrics.NVLINK_RECEIVED_BYTES, ("nvlink_received_bytes",)),
    (metrics.C2C_HOST_TO_GPU_BYTES, ("c2c_host_to_gpu_bytes",)),
)
"""What either source of windows can serve. A link's other direction and a gauge have the source of what stands here."""


class WindowsCollector:
    """Exact integrals over all windows since the start, and means over the gauge window."""

    name = "windows"

    def collect(self, snapshot: FleetSnapshot) -> Iterator[Family]:
        """Families without a sample are left out."""
        yield from self._counters(snapshot)
        yield from self._gauges(snapshot)
        yield from self._l2_misses(snapshot)
        yield from self._accounting(snapshot)
        yield from self._truths(snapshot)

    @staticmethod
    def _counters(snapshot: FleetSnapshot) -> Iterator[Family]:
        for spec, parts in _COUNTERS:
            family = spec.family()
            for totals in snapshot.gpus:
                uuid = totals.gpu.uuid
                for quantity, labels in parts:
                    total = totals.quantities.get(quantity)
                    if total is not None:
                        # Division of two integers rounds once: the double nearest to the exact total.
                        value = total if quantity in COUNT_QUANTITIES else total / NS
                        family.add(value, snapshot.label(uuid), uuid, *labels)
            if family.samples:
                yield family

    @staticmethod
    def _gauges(snapshot: FleetSnapshot) -> Iterator[Family]:
        for spec, quantity in _GAUGES:
            family = spec.family()
            for totals in snapshot.gpus:
                if quantity in totals.gauges:
                    family.add(totals.gauges[quantity], snapshot.label(totals.gpu.uuid), totals.gpu.uuid)
            yield family
        sm = metrics.SM_UTILIZATION_SEED.family()
        dram = metrics.DRAM_UTILIZATION_SEED.family()
        for totals in snapshot.gpus:
            uuid = totals.gpu.uuid
            if totals.sm_utilization is not None:
                sm.add(totals.sm_utilization, snapshot.label(uuid), uuid, snapshot.job_of(uuid))
            if "dram_active" in totals.gauges:
                dram.add(totals.gauges["dram_active"], snapshot.label(uuid), uuid, snapshot.job_of(uuid))
        yield sm
        yield dram

    @staticmethod
    def _l2_misses(snapshot: FleetSnapshot) -> Iterator[Family]:
        ratio = metrics.L2_MISS_RATIO.family()
        rate = metrics.L2_MISS_SEED.family()
        for totals in snapshot.gpus:
            if totals.l2_miss_ratio is not None:
                labels = (snapshot.label(totals.gpu.uuid), totals.gpu.uuid)
                ratio.add(totals.l2_miss_ratio, *labels)
                rate.add(totals.l2_miss_ratio, *labels, snapshot.job_of(totals.gpu.uuid))
        if ratio.samples:
            yield from (ratio, rate)

    @staticmethod
    def _truths(snapshot: FleetSnapshot) -> Iterator[Family]:
        """Which source serves what several can; a MIG instance has GPM only."""
        info = metrics.METRIC_SOURCE_INFO.family()
        for totals in snapshot.gpus:
            if totals.gpu.parent_uuid:
                continue
            for spec, source, definition in _served(totals):
                info.add(1, snapshot.label(totals.gpu.uuid), totals.gpu.uuid, spec.name, source, definition)
        if info.samples:
            yield info

    @staticmethod
    def _accounting(snapshot: FleetSnapshot) -> Iterator[Family]:
        observed = metrics.OBSERVED_SECONDS.family()
        by_source = metrics.SOURCE_OBSERVED_SECONDS.family()
        for totals in snapshot.gpus:
            labels = (snapshot.label(totals.gpu.uuid), totals.gpu.uuid)
            for source, source_ns in totals.source_observed_ns.items():
                by_source.add(source_ns / NS, *labels, source)
            if totals.source_observed_ns:
                observed.add(totals.observed_ns / NS, *labels)
        yield observed
        yield by_source


def _served(totals: GpuSnapshot) -> Iterator[tuple[Spec, WindowSource, str]]:
    """What is served of a GPU now, from which source and by which definition."""
    for spec, quantities in _SHARED:
        for source in sorted({totals.truths[q] for q in quantities if q in totals.truths}):
            yield spec, source, _definition(totals, quantities, source)
    if totals.leader is not None:
        yield metrics.BOTTLENECK_SECONDS, totals.leader, ""
    if totals.l2_miss_ratio is not None:
        yield metrics.L2_MISS_RATIO, "pm_sampling", totals.l2_definition
        yield metrics.L2_MISS_SEED, "pm_sampling", totals.l2_definition


def _definition(totals: GpuSnapshot, quantities: tuple[Quantity, ...], source: WindowSource) -> str:
    """What a DRAM share is, "" for what every source means alike."""
    if "dram_active" not in quantities:
        return ""
    return "bytes_over_peak" if source == totals.truths.get("dram_read_bytes") else "driver_ratio"
