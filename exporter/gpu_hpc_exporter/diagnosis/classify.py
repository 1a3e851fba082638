"""Where one window's time went: exactly one class, the first that matches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from gpu_hpc_exporter.diagnosis import thresholds as th
from gpu_hpc_exporter.diagnosis.intensity import Shares, Unit

BottleneckClass = Literal[
    "media",
    "throttled",
    "idle",
    "pcie_bound",
    "nvlink_bound",
    "copy_only",
    "compute_bound",
    "dram_bound",
    "l2_bound",
    "l2_thrash",
    "starved",
    "mixed",
    "latency_bound",
    "unknown",
]
CLASSES: tuple[BottleneckClass, ...] = get_args(BottleneckClass)


def classify(share: Shares, intensity: Mapping[Unit, float], *, slowed_down: bool) -> BottleneckClass:
    """Class of a window with these shares and intensities.

    `slowed_down`: a hardware slowdown, thermal or power-brake reason is active.

    Not measured is neither low nor high, so a class that rests on it does not match. Where only a class
    that needs the missing unit would be left, the answer is `unknown`: unseen time is not idle time.
    """
    return _by_engine(share, slowed_down=slowed_down) or _by_limit(share, intensity) or _by_activity(share, intensity)


def _by_engine(share: Shares, *, slowed_down: bool) -> BottleneckClass | None:
    """Classes decided by what ran at all."""
    if share.media >= th.MEDIA_BUSY and _below(share.sm_active, th.MEDIA_SM_ACTIVE):
        return "media"
    if slowed_down and _at_least(share.sm_active, th.THROTTLED_SM_ACTIVE):
        return "throttled"
    quiet = (share.host, share.nvlink, share.dram)
    if _below(share.sm_active, th.IDLE_SM_ACTIVE) and all(_below(s, th.IDLE_SHARE) for s in quiet):
        return "idle"
    return None


def _by_limit(share: Shares, intensity: Mapping[Unit, float]) -> BottleneckClass | None:
    """Classes decided by one unit near its limit."""
    # A pipe is active only where a warp is resident, so residency bounds pipes that nobody measures.
    sm = share.sm if share.sm is not None else share.sm_active
    sm_has_room = _below(sm, th.COMPUTE_BOUND)
    if intensity.get("pcie", 0.0) >= th.LINK_BOUND and sm_has_room:
        return "pcie_bound"
    if intensity.get("nvlink", 0.0) >= th.LINK_BOUND and sm_has_room:
        return "nvlink_bound"
    link = max(share.host or 0.0, share.nvlink or 0.0)
    if _below(share.sm_active, th.COPY_ONLY_SM_ACTIVE) and link >= th.COPY_ONLY_LINK:
        return "copy_only"
    if _at_least(share.sm, th.COMPUTE_BOUND):
        return "compute_bound"
    if intensity.get("dram", 0.0) >= th.DRAM_BOUND:
        return "dram_bound"
    if _at_least(share.l2, th.L2_BOUND) and sm_has_room:
        return "l2_bound"
    return "l2_thrash" if _is_l2_thrash(share, intensity, sm) else None


def _is_l2_thrash(share: Shares, intensity: Mapping[Unit, float], sm: float | None) -> bool:
    low, high = th.L2_THRASH_DRAM
    return (
        share.l2_to_dram is not None
        and share.l2_to_dram > th.L2_THRASH_SHARE
        and _at_least(share.sm_active, th.L2_THRASH_SM_ACTIVE)
        and _below(sm, th.L2_THRASH_SM)
        and low <= intensity.get("dram", 0.0) <= high
    )


def _by_activity(share: Shares, intensity: Mapping[Unit, float]) -> BottleneckClass:
    """Classes of time in which nothing was near a limit."""
    if share.sm_active is None:
        return "unknown"
    if share.sm_active < th.STARVED_SM_ACTIVE:
        maybe_idle = share.sm_active < th.IDLE_SM_ACTIVE and share.dram is None
        return "unknown" if share.host is None or share.nvlink is None or maybe_idle else "starved"
    if share.sm is None or share.dram is None:
        return "unknown"
    return "mixed" if intensity["sm"] + intensity["dram"] >= th.MIXED else "latency_bound"


def _below(value: float | None, limit: float) -> bool:
    return value is not None and value < limit


def _at_least(value: float | None, limit: float) -> bool:
    return value is not None and value >= limit
