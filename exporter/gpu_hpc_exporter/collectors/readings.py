"""NVML's slow readings, as a table from reading to series."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from gpu_hpc_exporter import metrics
from gpu_hpc_exporter.exposition import Family, Spec
from gpu_hpc_exporter.model import NS, Reading
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot

_TABLE: Final[tuple[tuple[Spec, tuple[tuple[Reading, tuple[str, ...]], ...]], ...]] = (
    (metrics.NVML_UTILIZATION, (("nvml_utilization_ratio", ()),)),
    (metrics.MEMORY_CONTROLLER_BUSY, (("memory_controller_busy_ratio", ()),)),
    (metrics.MEMORY_TOTAL, (("memory_total_bytes", ()),)),
    (metrics.MEMORY_USED, (("memory_used_bytes", ()),)),
    (metrics.MEMORY_RESERVED, (("memory_reserved_bytes", ()),)),
    (metrics.MEMORY_FREE, (("memory_free_bytes", ()),)),
    (metrics.POWER, (("power_gpu_watts", ("gpu",)), ("power_module_watts", ("module",)))),
    (metrics.POWER_LIMIT, (("power_limit_watts", ()),)),
    (metrics.ENERGY, (("energy_joules", ()),)),
    (metrics.TEMPERATURE, (("temperature_gpu_celsius", ("gpu",)), ("temperature_memory_celsius", ("memory",)))),
    (metrics.TEMPERATURE_SLOWDOWN, (("temperature_slowdown_celsius", ()),)),
    (
        metrics.CLOCK,
        (("clock_sm_hertz", ("sm",)), ("clock_memory_hertz", ("memory",)), ("clock_video_hertz", ("video",))),
    ),
    (
        metrics.CLOCK_LIMIT,
        (
            ("clock_limit_sm_hertz", ("sm",)),
            ("clock_limit_memory_hertz", ("memory",)),
            ("clock_limit_video_hertz", ("video",)),
        ),
    ),
    (
        metrics.PCIE_GENERATION,
        (("pcie_link_generation_current", ("current",)), ("pcie_link_generation_max", ("max",))),
    ),
    (metrics.PCIE_WIDTH, (("pcie_link_width_current", ("current",)), ("pcie_link_width_max", ("max",)))),
    (metrics.PCIE_REPLAYS, (("pcie_replays", ()),)),
    (metrics.NVLINK_LINKS, (("nvlink_links_present", ("present",)), ("nvlink_links_active", ("active",)))),
    (
        metrics.ECC_ERRORS,
        (
            ("ecc_corrected_volatile", ("corrected", "volatile")),
            ("ecc_corrected_aggregate", ("corrected", "aggregate")),
            ("ecc_uncorrected_volatile", ("uncorrected", "volatile")),
            ("ecc_uncorrected_aggregate", ("uncorrected", "aggregate")),
        ),
    ),
    (
        metrics.NVLINK_ERRORS,
        (
            ("nvlink_errors_replay", ("replay",)),
            ("nvlink_errors_recovery", ("recovery",)),
            ("nvlink_errors_crc_flit", ("crc_flit",)),
            ("nvlink_errors_crc_data", ("crc_data",)),
        ),
    ),
    (metrics.ROW_REMAP_PENDING, (("row_remap_pending", ()),)),
    (metrics.ROW_REMAP_FAILED, (("row_remap_failed", ()),)),
    (metrics.RECOVERY_ACTION, (("recovery_action", ()),)),
    (metrics.DRAM_LIMIT, (("dram_limit_bytes_per_second", ()),)),
    (metrics.PCIE_LIMIT, (("pcie_limit_bytes_per_second", ()),)),
    (metrics.NVLINK_LIMIT, (("nvlink_limit_bytes_per_second", ()),)),
    (metrics.C2C_LIMIT, (("c2c_limit_bytes_per_second", ()),)),
)
"""Per family: which readings it shows, with the labels after gpu and uuid."""


class ReadingsCollector:
    """What NVML said last; readings older than five seconds are absent."""

    name = "readings"

    def collect(self, snapshot: FleetSnapshot) -> Iterator[Family]:
        """Families that no GPU fills are left out."""
        for spec, parts in _TABLE:
            family = spec.family()
            for totals in snapshot.gpus:
                for reading, labels in parts:
                    value = totals.readings.get(reading)
                    if value is not None:
                        family.add(value, snapshot.label(totals.gpu.uuid), totals.gpu.uuid, *labels)
            if family.samples:
                yield family
        busy = metrics.NVML_BUSY_SECONDS.family()
        events = metrics.CLOCK_EVENT_SECONDS.family()
        for totals in snapshot.gpus:
            gpu = (snapshot.label(totals.gpu.uuid), totals.gpu.uuid)
            if totals.nvml_busy_ns is not None:
                busy.add(totals.nvml_busy_ns / NS, *gpu)
            for reason, event_ns in totals.clock_event_ns.items():
                events.add(event_ns / NS, *gpu, reason)
        yield busy
        yield events
