"""How hard each unit worked in one window, as shares of its peak and as intensities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from gpu_hpc_exporter.diagnosis import thresholds as th
from gpu_hpc_exporter.model import L2_SECTOR_BYTES, NS, Link, Quantity

Unit = Literal["sm", "l2", "dram", "pcie", "nvlink"]
UNITS: tuple[Unit, ...] = get_args(Unit)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Nominal bandwidths in bytes per second, per direction for links; None where unknown."""

    dram: float | None = None
    pcie: float | None = None
    nvlink: float | None = None
    c2c: float | None = None


@dataclass(frozen=True, slots=True)
class Shares:
    """Share of each unit's nominal peak in one window (0-1).

    None: the GPU has the unit and it was not measured. 0.0: idle, or the GPU lacks it.
    `sm` is the busiest pipe, `host` the busier of PCIe and C2C, `media` the busiest video or JPEG engine,
    `l2` its bandwidth and `l2_to_dram` the share of requested sectors that went to DRAM.
    """

    sm_active: float | None
    sm: float | None
    dram: float | None
    host: float | None
    nvlink: float | None
    media: float
    l2: float | None = None
    l2_to_dram: float | None = None


_LINK_QUANTITIES: dict[Link, tuple[Quantity, Quantity]] = {
    "pcie": ("pcie_host_to_gpu_bytes", "pcie_gpu_to_host_bytes"),
    "c2c": ("c2c_host_to_gpu_bytes", "c2c_gpu_to_host_bytes"),
    "nvlink": ("nvlink_received_bytes", "nvlink_transmitted_bytes"),
}


def shares(values: Mapping[Quantity, float], duration_ns: int, peaks: Peaks, links: tuple[Link, ...]) -> Shares:
    """Shares of one window of `duration_ns` on a GPU that has `links`."""
    pipes = (
        values.get("pipe_tensor"),
        values.get("pipe_fp64"),
        values.get("pipe_fp32"),
        values.get("pipe_fp16"),
        values.get("pipe_int"),
    )
    engines = (values.get("engine_decode"), values.get("engine_encode"), values.get("engine_jpeg"))
    seconds = duration_ns / NS
    link_peaks: dict[Link, float | None] = {"pcie": peaks.pcie, "c2c": peaks.c2c, "nvlink": peaks.nvlink}
    used = {
        link: _link_share(values, link, seconds, peak) if link in links else 0.0 for link, peak in link_peaks.items()
    }
    return Shares(
        sm_active=values.get("sm_active"),
        sm=_busiest(pipes),
        dram=values.get("dram_active"),
        # Where a C2C link carries host traffic (Grace), the busier of the two; both must be measured.
        host=None if used["pcie"] is None or used["c2c"] is None else max(used["pcie"], used["c2c"]),
        nvlink=used["nvlink"],
        media=_busiest(engines) or 0.0,
        l2=values.get("l2_active"),
        l2_to_dram=_l2_to_dram(values, seconds, peaks.dram),
    )


def intensities(share: Shares, links: tuple[Link, ...]) -> dict[Unit, float]:
    """Intensity per unit, 0-1; units that were not measured, or that the GPU lacks, have no key."""
    has_host_link = "pcie" in links or "c2c" in links
    scaled: dict[Unit, float | None] = {
        "sm": share.sm,
        "l2": share.l2_to_dram,
        "dram": _of_reachable(share.dram, th.DRAM_REACHABLE),
        "pcie": _of_reachable(share.host, th.LINK_REACHABLE) if has_host_link else None,
        "nvlink": _of_reachable(share.nvlink, th.LINK_REACHABLE) if "nvlink" in links else None,
    }
    return {unit: value for unit, value in scaled.items() if value is not None}


def _of_reachable(share: float | None, reachable: float) -> float | None:
    return None if share is None else min(1.0, share / reachable)


def _busiest(values: tuple[float | None, ...]) -> float | None:
    measured = [value for value in values if value is not None]
    return max(measured) if measured else None


def _link_share(values: Mapping[Quantity, float], link: Link, seconds: float, peak: float | None) -> float | None:
    """Share of the busier direction; may exceed 1 by the protocol's overhead, which is not a fault."""
    one_way, other_way = (values.get(quantity) for quantity in _LINK_QUANTITIES[link])
    if not peak or one_way is None or other_way is None:
        return None
    return max(one_way, other_way) / (seconds * peak)


def _l2_to_dram(values: Mapping[Quantity, float], seconds: float, dram_peak: float | None) -> float | None:
    requested, missed = values.get("l2_sectors"), values.get("l2_missed_sectors")
    if requested is None or missed is None or not dram_peak:
        return None
    if requested * L2_SECTOR_BYTES < th.L2_MIN_TRAFFIC * dram_peak * seconds:
        return None
    return min(1.0, missed / requested)
