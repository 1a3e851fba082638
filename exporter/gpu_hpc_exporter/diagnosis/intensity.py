"""How hard each unit worked in one window, as shares of its peak and as intensities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

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


@dataclass(slots=True)  # not frozen: that would treble what making one costs, and every window makes one
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


_PIPES: Final[tuple[Quantity, ...]] = (
    "pipe_tensor",
    "pipe_fp64",
    "pipe_fp32",
    "pipe_fp16",
    "pipe_int",
    "pipe_shared",
)
_MEDIA: Final[tuple[Quantity, ...]] = ("engine_decode", "engine_encode", "engine_jpeg")


def shares(values: Mapping[Quantity, float], duration_ns: int, peaks: Peaks, links: tuple[Link, ...]) -> Shares:
    """Shares of one window of `duration_ns` on a GPU that has `links`."""
    get = values.get
    seconds = duration_ns / NS
    host: float | None = 0.0
    nvlink: float | None = 0.0
    if "pcie" in links:
        host = _link_share(get("pcie_host_to_gpu_bytes"), get("pcie_gpu_to_host_bytes"), seconds, peaks.pcie)
    if "c2c" in links:
        # Where a C2C link carries host traffic (Grace), the busier of the two; both must be measured.
        c2c = _link_share(get("c2c_host_to_gpu_bytes"), get("c2c_gpu_to_host_bytes"), seconds, peaks.c2c)
        host = None if host is None or c2c is None else max(host, c2c)
    if "nvlink" in links:
        nvlink = _link_share(get("nvlink_received_bytes"), get("nvlink_transmitted_bytes"), seconds, peaks.nvlink)
    return Shares(
        get("sm_active"),
        busiest_pipe(values),
        get("dram_active"),
        host,
        nvlink,
        _busiest(values, _MEDIA) or 0.0,
        get("l2_active"),
        l2_miss_share(get("l2_sectors"), get("l2_missed_sectors"), seconds, peaks.dram),
    )


def intensities(share: Shares, links: tuple[Link, ...]) -> dict[Unit, float]:
    """Intensity per unit, 0-1; units that were not measured, or that the GPU lacks, have no key."""
    found: dict[Unit, float] = {}
    if share.sm is not None:
        found["sm"] = share.sm
    if share.l2_to_dram is not None:
        found["l2"] = share.l2_to_dram
    if share.dram is not None:
        found["dram"] = min(1.0, share.dram / th.DRAM_REACHABLE)
    if share.host is not None and ("pcie" in links or "c2c" in links):
        found["pcie"] = min(1.0, share.host / th.LINK_REACHABLE)
    if share.nvlink is not None and "nvlink" in links:
        found["nvlink"] = min(1.0, share.nvlink / th.LINK_REACHABLE)
    return found


def busiest_pipe(values: Mapping[Quantity, float]) -> float | None:
    """Activity of the pipe that was active longest, None where none was measured."""
    return _busiest(values, _PIPES)


def dram_share(values: Mapping[Quantity, float], duration_ns: int, peak: float | None) -> float | None:
    """Share of the DRAM peak that the bytes read and written in `duration_ns` are, None without bytes or peak."""
    read, written = values.get("dram_read_bytes"), values.get("dram_written_bytes")
    if read is None or written is None or not peak:
        return None
    return min(1.0, (read + written) * NS / (peak * duration_ns))


def l2_miss_share(
    requested: float | None, missed: float | None, seconds: float, dram_peak: float | None
) -> float | None:
    """Share of the requested L2 sectors that went to DRAM, None while L2 moves too little for it to say anything."""
    if requested is None or missed is None or not dram_peak:
        return None
    if requested * L2_SECTOR_BYTES < th.L2_MIN_TRAFFIC * dram_peak * seconds:
        return None
    return min(1.0, missed / requested)


def _busiest(values: Mapping[Quantity, float], quantities: tuple[Quantity, ...]) -> float | None:
    busiest: float | None = None
    for quantity in quantities:
        value = values.get(quantity)
        if value is not None and (busiest is None or value > busiest):
            busiest = value
    return busiest


def _link_share(one_way: float | None, other_way: float | None, seconds: float, peak: float | None) -> float | None:
    """Share of the busier direction; may exceed 1 by the protocol's overhead, which is not a fault."""
    if not peak or one_way is None or other_way is None:
        return None
    return max(one_way, other_way) / (seconds * peak)
