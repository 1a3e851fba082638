"""One class a window, first match wins: the diagnosis table's section 2, edge by edge."""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.config import DEFAULT_RECORDING
from gpu_hpc_exporter.diagnosis.classify import CLASSES, BottleneckClass, classify
from gpu_hpc_exporter.diagnosis.intensity import Peaks, Shares, Unit, intensities, shares
from gpu_hpc_exporter.model import Inventory, Link, Quantity, Readings, Window
from gpu_hpc_exporter.samplers.totals import GpuTotals
from gpu_hpc_exporter.sources.replay import Recording
from unit.objects import GAUGE_WINDOW_NS, NS

LINKS: tuple[Link, ...] = ("pcie", "nvlink")
QUIET = Shares(sm_active=0.0, sm=0.0, dram=0.0, host=0.0, nvlink=0.0, media=0.0)


def window_class(
    exactly: dict[Unit, float] | None = None, *, slowed: bool = False, **parts: float | None
) -> BottleneckClass:
    """Class of an otherwise quiet window; `exactly` sets intensities that no share divides down to."""
    share = replace(QUIET, **parts)  # type: ignore[arg-type]  # the table below has the fields right
    return classify(share, intensities(share, LINKS) | (exactly or {}), slowed_down=slowed)


@pytest.mark.parametrize(
    ("expected", "parts"),
    [
        ("media", {"media": 0.5}),
        ("media", {"media": 1.0, "sm_active": 0.0999}),
        ("idle", {"media": 0.4999}),
        ("starved", {"media": 1.0, "sm_active": 0.10}),
        ("throttled", {"slowed": True, "sm_active": 0.01}),
        ("throttled", {"slowed": True, "sm_active": 0.96, "sm": 0.93}),
        ("starved", {"slowed": True, "sm_active": 0.0099}),
        ("compute_bound", {"slowed": False, "sm_active": 0.96, "sm": 0.93}),
        ("idle", {}),
        ("idle", {"sm_active": 0.000099, "dram": 0.0099, "host": 0.0099, "nvlink": 0.0099}),
        ("starved", {"sm_active": 0.0001}),
        ("starved", {"dram": 0.01}),
        ("starved", {"host": 0.01}),
        ("starved", {"nvlink": 0.01}),
        ("pcie_bound", {"exactly": {"pcie": 0.85}, "sm_active": 0.5}),
        ("pcie_bound", {"host": 0.7, "sm_active": 0.99, "sm": 0.5999}),
        ("starved", {"exactly": {"pcie": 0.8499}, "sm_active": 0.4}),
        ("compute_bound", {"host": 0.7, "sm_active": 0.99, "sm": 0.60}),
        ("nvlink_bound", {"exactly": {"nvlink": 0.85}, "sm_active": 0.5}),
        ("nvlink_bound", {"nvlink": 0.68, "sm_active": 0.99, "sm": 0.5999}),
        ("starved", {"exactly": {"nvlink": 0.8499}, "sm_active": 0.4}),
        ("compute_bound", {"nvlink": 0.68, "sm_active": 0.99, "sm": 0.60}),
        ("copy_only", {"host": 0.05}),
        ("copy_only", {"nvlink": 0.05, "sm_active": 0.0999}),
        ("starved", {"host": 0.0499, "nvlink": 0.0499}),
        ("starved", {"host": 0.05, "sm_active": 0.10}),
        ("compute_bound", {"sm": 0.60, "sm_active": 0.96}),
        ("compute_bound", {"sm": 1.0, "sm_active": 1.0, "dram": 0.5}),
        ("mixed", {"sm": 0.5999, "sm_active": 0.96}),
        ("dram_bound", {"exactly": {"dram": 0.75}, "sm_active": 0.99}),
        ("dram_bound", {"dram": 0.88, "sm_active": 0.99, "sm": 0.08}),
        ("mixed", {"exactly": {"dram": 0.7499}, "sm_active": 0.99}),
        ("l2_bound", {"l2": 0.55, "sm_active": 0.99}),
        ("l2_bound", {"l2": 1.0, "sm_active": 0.99, "sm": 0.5999}),
        ("latency_bound", {"l2": 0.5499, "sm_active": 0.99}),
        ("compute_bound", {"l2": 1.0, "sm_active": 0.99, "sm": 0.60}),
        ("l2_thrash", {"l2_to_dram": 0.51, "exactly": {"dram": 0.40}, "sm_active": 0.50, "sm": 0.29}),
        ("l2_thrash", {"l2_to_dram": 1.0, "exactly": {"dram": 0.7499}, "sm_active": 0.99, "sm": 0.0}),
        ("mixed", {"l2_to_dram": 0.50, "dram": 0.4, "sm_active": 0.50, "sm": 0.29}),
        ("starved", {"l2_to_dram": 0.51, "dram": 0.4, "sm_active": 0.4999, "sm": 0.29}),
        ("mixed", {"l2_to_dram": 0.51, "dram": 0.4, "sm_active": 0.50, "sm": 0.30}),
        ("latency_bound", {"l2_to_dram": 0.51, "exactly": {"dram": 0.3999}, "sm_active": 0.50, "sm": 0.1}),
        ("dram_bound", {"l2_to_dram": 0.51, "exactly": {"dram": 0.75}, "sm_active": 0.50, "sm": 0.1}),
        ("starved", {"sm_active": 0.01}),
        ("starved", {"sm_active": 0.4999, "sm": 0.4, "dram": 0.3}),
        ("latency_bound", {"sm_active": 0.50}),
        ("mixed", {"sm_active": 0.50, "sm": 0.25, "dram": 0.2}),
        ("mixed", {"sm_active": 0.99, "sm": 0.5}),
        ("latency_bound", {"sm_active": 0.50, "sm": 0.2499, "dram": 0.2}),
        ("latency_bound", {"sm_active": 1.0, "sm": 0.4, "host": 0.3, "nvlink": 0.3}),
        ("unknown", {"sm_active": None}),
        ("unknown", {"sm_active": 0.99, "sm": None}),
    ],
)
def test_class(expected: BottleneckClass, parts: dict[str, float]) -> None:
    """Every class matches inside its edges and not beyond them."""
    assert window_class(**parts) == expected  # type: ignore[arg-type]  # rows name keyword arguments


@pytest.mark.parametrize(
    ("winner", "parts"),
    [
        ("media", {"media": 0.9, "slowed": True, "sm_active": 0.05}),  # over throttled
        ("media", {"media": 0.9, "host": 0.9}),  # over pcie_bound
        ("throttled", {"slowed": True, "sm_active": 0.05, "host": 0.9}),  # over pcie_bound
        ("throttled", {"slowed": True, "sm_active": 0.99, "dram": 0.88}),  # over dram_bound
        ("throttled", {"slowed": True, "sm_active": 0.3}),  # over starved
        ("pcie_bound", {"host": 0.9, "nvlink": 0.9}),  # over nvlink_bound
        ("pcie_bound", {"host": 0.9, "dram": 0.88, "sm_active": 0.99}),  # over dram_bound
        ("nvlink_bound", {"nvlink": 0.9, "host": 0.3}),  # over copy_only
        ("copy_only", {"host": 0.3, "dram": 0.88}),  # over dram_bound
        ("copy_only", {"host": 0.3, "sm": 0.9}),  # over compute_bound
        ("compute_bound", {"sm": 0.9, "dram": 0.88, "sm_active": 0.99}),  # over dram_bound
        ("compute_bound", {"sm": 0.6, "sm_active": 0.4}),  # over starved
        ("dram_bound", {"dram": 0.88, "l2": 0.9, "sm_active": 0.99}),  # over l2_bound
        ("dram_bound", {"dram": 0.88, "sm_active": 0.3}),  # over starved
        ("l2_bound", {"l2": 0.9, "l2_to_dram": 0.9, "dram": 0.4, "sm_active": 0.99}),  # over l2_thrash
        ("l2_bound", {"l2": 0.9, "sm_active": 0.3}),  # over starved
        ("l2_thrash", {"l2_to_dram": 0.9, "dram": 0.4, "sm_active": 0.99, "sm": 0.2}),  # over mixed
    ],
)
def test_first_match_wins(winner: BottleneckClass, parts: dict[str, float]) -> None:
    """Of two classes that match, the earlier one of the table is the answer."""
    assert window_class(**parts) == winner  # type: ignore[arg-type]  # rows name keyword arguments


@pytest.mark.parametrize(
    ("expected", "parts"),
    [
        # idle and starved need both links, and idle needs DRAM
        ("unknown", {"host": None}),
        ("unknown", {"nvlink": None}),
        ("unknown", {"dram": None}),
        ("unknown", {"sm_active": 0.3, "host": None}),
        ("unknown", {"sm_active": 0.3, "nvlink": None}),
        ("starved", {"sm_active": 0.3, "dram": None}),
        ("starved", {"sm_active": 0.3, "sm": None}),
        ("idle", {"sm": None}),
        # mixed and latency_bound need pipes and DRAM
        ("unknown", {"sm_active": 0.99, "sm": None, "dram": 0.5}),
        ("unknown", {"sm_active": 0.99, "sm": 0.5, "dram": None}),
        ("latency_bound", {"sm_active": 0.99, "host": None, "nvlink": None}),
        ("mixed", {"sm_active": 0.99, "sm": 0.5, "host": None, "nvlink": None}),
        # what was measured still decides
        ("media", {"media": 0.9, "sm_active": 0.0, "host": None, "dram": None}),
        ("copy_only", {"host": None, "nvlink": 0.3}),
        ("compute_bound", {"sm": 0.9, "sm_active": 0.99, "host": None, "nvlink": None, "dram": None}),
        ("dram_bound", {"dram": 0.88, "sm_active": 0.99, "sm": None, "host": None}),
        ("pcie_bound", {"host": 0.9, "sm_active": 0.3, "sm": None}),
        ("l2_bound", {"l2": 0.9, "sm_active": 0.3, "sm": None, "dram": None}),
        ("unknown", {"l2": 0.9, "sm_active": 0.99, "sm": None}),  # residency of 0.99 leaves open that pipes are busy
        ("unknown", {"exactly": {"pcie": 0.9}, "sm_active": 0.99, "sm": None}),
        # L2 that nobody measures is never the reason
        ("idle", {"l2": None, "l2_to_dram": None}),
        ("starved", {"sm_active": 0.3, "l2": None, "l2_to_dram": None}),
        ("mixed", {"sm_active": 0.99, "sm": 0.5, "l2": None, "l2_to_dram": None}),
    ],
)
def test_not_measured_is_neither_low_nor_high(expected: BottleneckClass, parts: dict[str, float]) -> None:
    """A class that rests on a unit that the GPU has and nobody measured is unknown; the others still match."""
    assert window_class(**parts) == expected  # type: ignore[arg-type]  # rows name keyword arguments


H200 = Peaks(dram=4.814e12, pcie=63.0e9, nvlink=478e9)


def h200_class(values: dict[Quantity, float]) -> BottleneckClass:
    """Class of one second on an H200 with PCIe and NVLink, its links idle unless named."""
    quiet: dict[Quantity, float] = dict.fromkeys(
        (
            "pcie_host_to_gpu_bytes",
            "pcie_gpu_to_host_bytes",
            "nvlink_received_bytes",
            "nvlink_transmitted_bytes",
            "pipe_tensor",
            "pipe_int",
            "dram_active",
        ),
        0,
    )
    share = shares(quiet | values, NS, H200, LINKS)
    return classify(share, intensities(share, LINKS), slowed_down=False)


@pytest.mark.parametrize(
    ("expected", "values"),
    [
        ("compute_bound", {"sm_active": 0.96, "pipe_tensor": 0.93, "sm_occupancy": 0.14, "dram_active": 0.17}),
        ("dram_bound", {"sm_active": 0.99, "pipe_int": 0.08, "dram_active": 0.88}),
        ("pcie_bound", {"sm_active": 0.0, "pcie_host_to_gpu_bytes": 58e9}),
        ("idle", {"sm_active": 0.0}),
        ("starved", {"sm_active": 0.01}),  # embedding lookup with a CPU index
        (
            "nvlink_bound",
            {"sm_active": 0.2, "dram_active": 0.28, "nvlink_received_bytes": 325e9, "nvlink_transmitted_bytes": 325e9},
        ),
    ],
    ids=["gemm", "copy", "h2d", "idle", "embedding", "all-reduce"],
)
def test_measured_h200_workloads(expected: BottleneckClass, values: dict[Quantity, float]) -> None:
    """What an H200 really read under known workloads gets the workload's name."""
    assert h200_class(values) == expected


@cache
def recorded_classes() -> dict[str, Counter[BottleneckClass]]:
    """Windows by class for each phase of the recording that comes with the exporter."""
    recording = Recording.load(DEFAULT_RECORDING)
    starts = [phase.start for phase in recording.phases]
    (gpu,) = next(event for event in recording.events if isinstance(event, Inventory)).gpus
    totals = GpuTotals(gpu, GAUGE_WINDOW_NS)
    found: dict[str, Counter[BottleneckClass]] = {phase.name: Counter() for phase in recording.phases}
    before = dict.fromkeys(CLASSES, 0)
    for event in recording.events:
        if isinstance(event, Readings):
            totals.add_readings(event)
        elif isinstance(event, Window):
            totals.add_window(event)
            after = dict(totals.snapshot(event.end_ns).class_ns)
            position = bisect(starts, (event.end_ns - event.duration_ns / 2) / NS) - 1
            if position >= 0:
                found[recording.phases[position].name].update(c for c in CLASSES if after[c] != before[c])
            before = after
    return found


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        ("idle", "idle"),
        ("gemm", "compute_bound"),
        ("copy", "dram_bound"),
        ("h2d", "pcie_bound"),
        ("d2h", "pcie_bound"),
        ("h2d_pageable", "copy_only"),
        ("embedding_cpu_index", "starved"),
        ("embedding_gpu_index", "starved"),
        ("launch_bound", "starved"),
        ("shared", "compute_bound"),
        ("inference_graph", "starved"),
    ],
)
def test_recorded_workloads(phase: str, expected: BottleneckClass) -> None:
    """At least 98 percent of a recorded workload's windows get the class that names its limit."""
    classes = recorded_classes()[phase]
    assert classes[expected] >= 0.98 * classes.total(), classes


def test_recorded_training() -> None:
    """Half of its L2 sectors come from DRAM, now a little more and now less: nothing else than mixed and l2_thrash."""
    classes = recorded_classes()["train"]
    assert classes.keys() == {"mixed", "l2_thrash"}
    assert classes["mixed"] >= 0.8 * classes.total(), classes


_SHARE = st.none() | st.sampled_from([0.0, 0.01, 0.05, 0.1, 0.5, 0.6, 1.0]) | st.floats(0, 1)
_LINK = _SHARE | st.floats(1, 1.1)
_SHARES = st.builds(Shares, _SHARE, _SHARE, _SHARE, _LINK, _LINK, st.floats(0, 1), _SHARE, _SHARE)
_LINKS = st.sets(st.sampled_from(get_args(Link))).map(tuple)


@given(_SHARES, _LINKS, st.booleans())
@settings(max_examples=300)
def test_any_window_has_one_class(share: Shares, links: tuple[Link, ...], slowed: bool) -> None:  # noqa: FBT001 - drawn
    """Whatever was measured or not, the answer is a class of the list, and rests on nothing unmeasured."""
    found = classify(share, intensities(share, links), slowed_down=slowed)
    assert found in CLASSES
    if share.host is None or share.nvlink is None:
        assert found not in {"idle", "starved"}
    if share.sm is None or share.dram is None:
        assert found not in {"mixed", "latency_bound"}
    if None not in (share.sm_active, share.sm, share.dram, share.host, share.nvlink):
        assert found != "unknown"


@given(_SHARES, st.booleans())
@settings(max_examples=100)
def test_a_link_that_is_lacking_counts_as_idle(share: Shares, slowed: bool) -> None:  # noqa: FBT001 - drawn
    """A GPU without links gets the class of one whose links are idle."""
    idle = replace(share, host=0.0, nvlink=0.0)
    with_links, without = intensities(idle, LINKS), intensities(idle, ())
    assert classify(idle, without, slowed_down=slowed) == classify(idle, with_links, slowed_down=slowed)
