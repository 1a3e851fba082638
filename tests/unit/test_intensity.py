"""Shares and intensities: every row of the diagnosis table's section 1."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.diagnosis.intensity import UNITS, Peaks, Shares, Unit, intensities, shares
from gpu_hpc_exporter.model import COUNT_QUANTITIES, QUANTITIES, Link, Quantity, RatioQuantity
from unit.objects import NS

PEAKS = Peaks(dram=3.2e12, pcie=1e10, nvlink=1e11, c2c=2e11)
ALL_LINKS: tuple[Link, ...] = get_args(Link)
PCIE_IDLE: dict[Quantity, float] = {"pcie_host_to_gpu_bytes": 0, "pcie_gpu_to_host_bytes": 0}
C2C_IDLE: dict[Quantity, float] = {"c2c_host_to_gpu_bytes": 0, "c2c_gpu_to_host_bytes": 0}
PIPES: tuple[Quantity, ...] = ("pipe_tensor", "pipe_fp64", "pipe_fp32", "pipe_fp16", "pipe_int")
L2_FLOOR_SECTORS = 5_000_000_000
"""Sectors of 32 bytes that are 5 percent of PEAKS.dram in one second."""


def idle(**changed: float | None) -> Shares:
    """An idle GPU but for what is named."""
    quiet: dict[str, float | None] = dict.fromkeys(("sm_active", "sm", "dram", "host", "nvlink"), 0.0)
    return Shares(**{"media": 0.0, **quiet, **changed})  # type: ignore[arg-type]  # media is never None here


@pytest.mark.parametrize("busiest", PIPES)
def test_the_busiest_pipe_is_the_sm(busiest: Quantity) -> None:
    """Of the five pipes the busiest one counts, whichever it is."""
    values: dict[Quantity, float] = {**dict.fromkeys(PIPES, 0.2), busiest: 0.7}
    assert shares(values, NS, PEAKS, ()).sm == 0.7


@pytest.mark.parametrize(
    ("values", "links", "field", "expected"),
    [
        ({"sm_active": 0.4}, (), "sm_active", 0.4),
        ({}, (), "sm_active", None),
        ({"pipe_int": 0.3}, (), "sm", 0.3),
        ({"sm_active": 0.9, "sm_occupancy": 0.9}, (), "sm", None),  # residency is not use
        ({"dram_active": 0.88}, (), "dram", 0.88),
        ({}, (), "dram", None),
        # The busier direction, over the link's own peak.
        ({"pcie_host_to_gpu_bytes": 6e9, "pcie_gpu_to_host_bytes": 1e9}, ("pcie",), "host", 0.6),
        ({"pcie_host_to_gpu_bytes": 1e9, "pcie_gpu_to_host_bytes": 6e9}, ("pcie",), "host", 0.6),
        ({"nvlink_received_bytes": 3e10, "nvlink_transmitted_bytes": 1e10}, ("nvlink",), "nvlink", 0.3),
        ({"nvlink_received_bytes": 1e10, "nvlink_transmitted_bytes": 3e10}, ("nvlink",), "nvlink", 0.3),
        # The busier of PCIe and C2C, each over its own peak: 4e10 bytes are 0.2 of C2C and would be 4 of PCIe.
        ({**PCIE_IDLE, "c2c_host_to_gpu_bytes": 4e10, "c2c_gpu_to_host_bytes": 0}, ("pcie", "c2c"), "host", 0.2),
        ({**C2C_IDLE, "pcie_host_to_gpu_bytes": 4e9, "pcie_gpu_to_host_bytes": 0}, ("pcie", "c2c"), "host", 0.4),
        ({"c2c_host_to_gpu_bytes": 0, "c2c_gpu_to_host_bytes": 4e10}, ("c2c",), "host", 0.2),
        (dict.fromkeys((*PCIE_IDLE, *C2C_IDLE), 4e9), ("pcie", "c2c"), "host", 0.4),  # the busier, not the sum
        # A link that exists and was not measured in both directions is not idle.
        ({}, ("pcie",), "host", None),
        ({"pcie_host_to_gpu_bytes": 6e9}, ("pcie",), "host", None),
        (PCIE_IDLE, ("pcie", "c2c"), "host", None),
        (C2C_IDLE, ("pcie", "c2c"), "host", None),
        ({"nvlink_received_bytes": 1e9}, ("nvlink",), "nvlink", None),
        # A link that the GPU lacks is idle, whatever is said of it.
        ({}, (), "host", 0.0),
        ({}, (), "nvlink", 0.0),
        ({"nvlink_received_bytes": 1e9, "nvlink_transmitted_bytes": 1e9}, ("pcie",), "nvlink", 0.0),
        # Media: decoder, encoder and JPEG; the optical flow engine is no media engine.
        ({"engine_decode": 0.6, "engine_encode": 0.1, "engine_jpeg": 0.2}, (), "media", 0.6),
        ({"engine_encode": 0.6}, (), "media", 0.6),
        ({"engine_jpeg": 0.6}, (), "media", 0.6),
        ({"engine_ofa": 0.6}, (), "media", 0.0),
        ({}, (), "media", 0.0),
        ({"l2_active": 0.8}, (), "l2", 0.8),
        ({}, (), "l2", None),
    ],
)
def test_share(values: dict[Quantity, float], links: tuple[Link, ...], field: str, expected: float | None) -> None:
    """A share is what was moved or used in the second, over the nominal peak; None where it was not measured."""
    assert getattr(shares(values, NS, PEAKS, links), field) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("peaks", [Peaks(), Peaks(0.0, 0.0, 0.0, 0.0)], ids=["unknown", "zero"])
@pytest.mark.parametrize("link", ALL_LINKS)
def test_no_peak_no_share(link: Link, peaks: Peaks) -> None:
    """Bytes over an unknown peak are no share: neither 0 nor an error."""
    measured: dict[Quantity, float] = dict.fromkeys(QUANTITIES, 1000)
    found = shares(measured, NS, peaks, (link,))
    assert (found.nvlink if link == "nvlink" else found.host) is None
    assert found.l2_to_dram is None


@pytest.mark.parametrize("seconds", [0.1, 1, 5])
def test_shares_are_rates_not_amounts(seconds: float) -> None:
    """The same rate gives the same share in a window of any length."""
    values: dict[Quantity, float] = {
        "pcie_host_to_gpu_bytes": 6e9 * seconds,
        "pcie_gpu_to_host_bytes": 0,
        "l2_sectors": 2 * L2_FLOOR_SECTORS * seconds,
        "l2_missed_sectors": L2_FLOOR_SECTORS * seconds,
    }
    found = shares(values, round(seconds * NS), PEAKS, ("pcie",))
    assert found.host == pytest.approx(0.6)
    assert found.l2_to_dram == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("requested", "missed", "expected"),
    [
        (L2_FLOOR_SECTORS, 0, 0.0),
        (L2_FLOOR_SECTORS - 1, 0, None),  # below 5 percent of the DRAM peak the share says nothing
        (0, 0, None),
        (100 * L2_FLOOR_SECTORS, 100 * L2_FLOOR_SECTORS, 1.0),  # a copy
        (100 * L2_FLOOR_SECTORS, 19 * L2_FLOOR_SECTORS, 0.19),  # a GEMM
        (100 * L2_FLOOR_SECTORS, 101 * L2_FLOOR_SECTORS, 1.0),  # a quotient of two counters is limited
        (None, L2_FLOOR_SECTORS, None),
        (L2_FLOOR_SECTORS, None, None),
    ],
)
def test_l2_share_to_dram(requested: int | None, missed: int | None, expected: float | None) -> None:
    """The part of the requested sectors that went to DRAM, absent while L2 moves next to nothing."""
    values: dict[Quantity, float] = {}
    if requested is not None:
        values["l2_sectors"] = requested
    if missed is not None:
        values["l2_missed_sectors"] = missed
    assert shares(values, NS, PEAKS, ()).l2_to_dram == expected


@pytest.mark.parametrize(
    ("unit", "share", "expected"),
    [
        ("sm", idle(sm=0.85), 0.85),
        ("l2", idle(l2_to_dram=0.19), 0.19),
        ("dram", idle(dram=0.4), 0.5),
        ("dram", idle(dram=0.8), 1.0),
        ("dram", idle(dram=0.88), 1.0),
        ("pcie", idle(host=0.35), 0.5),
        ("pcie", idle(host=0.7), 1.0),
        ("pcie", idle(host=1.02), 1.0),
        ("nvlink", idle(nvlink=0.35), 0.5),
        ("nvlink", idle(nvlink=0.7), 1.0),
        ("nvlink", idle(nvlink=1.02), 1.0),
    ],
)
def test_intensity_is_the_share_of_what_code_can_reach(unit: Unit, share: Shares, expected: float) -> None:
    """DRAM is scaled by 0.8 and links by 0.7 of their peaks, at most to 1; SM and L2 are not scaled."""
    assert intensities(share, ("pcie", "nvlink"))[unit] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("share", "links", "units"),
    [
        (idle(), (), {"sm", "dram"}),
        (idle(), ("pcie",), {"sm", "dram", "pcie"}),
        (idle(), ("c2c",), {"sm", "dram", "pcie"}),
        (idle(), ("nvlink",), {"sm", "dram", "nvlink"}),
        (idle(l2_to_dram=0.0), ALL_LINKS, set(UNITS)),
        (idle(sm=None, dram=None, host=None, nvlink=None), ALL_LINKS, set()),
    ],
)
def test_only_measured_units_that_exist_have_an_intensity(
    share: Shares, links: tuple[Link, ...], units: set[Unit]
) -> None:
    """A unit that the GPU lacks, or that was not measured, has no intensity, not even 0."""
    assert intensities(share, links).keys() == units


_RATIOS = st.floats(0, 1)
_AMOUNTS = st.integers(0, 10**13)
_VALUES = st.fixed_dictionaries(
    {}, optional={q: _AMOUNTS if q in COUNT_QUANTITIES else _RATIOS for q in QUANTITIES}
).map(dict[Quantity, float])
_PEAKS = st.builds(Peaks, *[st.none() | st.floats(1.0, 1e13)] * 4)
_LINKS = st.sets(st.sampled_from(ALL_LINKS)).map(tuple)
_DURATIONS = st.integers(1, 60 * NS)


@given(_VALUES, _DURATIONS, _PEAKS, _LINKS)
@settings(max_examples=200)
def test_intensities_are_ratios(
    values: dict[Quantity, float], duration_ns: int, peaks: Peaks, links: tuple[Link, ...]
) -> None:
    """Whatever valid values a window has, every intensity lies in 0-1."""
    for unit, intensity in intensities(shares(values, duration_ns, peaks, links), links).items():
        assert 0.0 <= intensity <= 1.0, unit


@given(_VALUES.filter(bool), _DURATIONS, _PEAKS, _LINKS, st.data())
@settings(max_examples=200)
def test_intensities_grow_with_every_input(
    values: dict[Quantity, float], duration_ns: int, peaks: Peaks, links: tuple[Link, ...], data: st.DataObject
) -> None:
    """More of anything never lowers an intensity, but for L2 requests, which can only lower their share."""
    quantity = data.draw(st.sampled_from(sorted(values)))
    more = data.draw(_AMOUNTS if quantity in COUNT_QUANTITIES else _RATIOS)
    raised = {**values, quantity: max(values[quantity], more)}
    before = intensities(shares(values, duration_ns, peaks, links), links)
    after = intensities(shares(raised, duration_ns, peaks, links), links)
    for unit in before.keys() & after.keys():
        if quantity == "l2_sectors":
            assert after[unit] <= before[unit]
        else:
            assert after[unit] >= before[unit]


def test_every_ratio_quantity_reaches_a_share_or_is_known_not_to() -> None:
    """Occupancy and the optical flow engine say nothing about a limit; every other ratio moves a share."""
    nothing = shares({}, NS, PEAKS, ())
    silent = {q for q in get_args(RatioQuantity) if shares({q: 0.5}, NS, PEAKS, ()) == nothing}
    assert silent == {"sm_occupancy", "engine_ofa"}
