"""What is served of PM sampling beside GPM: its series, where a metric comes from, states, incidents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import pytest

from exporter_process import Samples, parse
from gpu_hpc_exporter.collectors import COLLECTORS
from gpu_hpc_exporter.config import DEFAULT_RECORDING, Config, PmSampling
from gpu_hpc_exporter.exporter import Exporter, ReplaySource
from gpu_hpc_exporter.exposition import TEXT, encode
from gpu_hpc_exporter.model import (
    GpuFellOff,
    Incident,
    IntervalInForce,
    L2Definition,
    Quantity,
    Reading,
    SamplingIncident,
    SourceName,
    State,
    StateChange,
    Window,
    WindowSource,
)
from gpu_hpc_exporter.samplers.fleet import Fleet
from gpu_hpc_exporter.sources.replay import Recording
from unit.objects import G0, G1, GAUGE_WINDOW_NS, M1, NS, Clock, inventory, readings, running_fleet, state, window

PEAKS: dict[Reading, float] = {"dram_limit_bytes_per_second": 4e12, "pcie_limit_bytes_per_second": 50e9}
GPM: dict[Quantity, float] = {
    "sm_active": 0.5,
    "sm_occupancy": 0.25,
    "pipe_tensor": 0.4,
    "dram_active": 0.3,
    "pcie_host_to_gpu_bytes": 1000,
    "pcie_gpu_to_host_bytes": 500,
}
PM: dict[Quantity, float] = {
    "sm_active": 0.6,
    "dram_read_bytes": 1_500_000_000_000,
    "dram_written_bytes": 500_000_000_000,
    "l2_sectors": 100_000_000_000,
    "l2_missed_sectors": 40_000_000_000,
    "l2_active": 0.7,
    "pcie_host_to_gpu_bytes": 1050,
    "pcie_gpu_to_host_bytes": 550,
}


def pm(end: float, values: Mapping[Quantity, float] = PM, seconds: float = 1.0, uuid: str = G0.uuid) -> Window:
    """A PM sampling window."""
    return replace(window(end, values, seconds, uuid), source="pm_sampling")


def served(fleet: Fleet) -> Samples:
    """The exposition, parsed."""
    snapshot = fleet.snapshot()
    families = (family for collector in COLLECTORS for family in collector.collect(snapshot))
    return parse(encode(families, TEXT).decode())


def both(definition: L2Definition = "dram_sectors", now: float = 10.0) -> Fleet:
    """A GPU of which both sources told of the second that ended at 10 s."""
    fleet = running_fleet(G0, now=now)
    fleet.put(readings(9, PEAKS))
    for source in get_args(WindowSource):
        fleet.put(state(source, G0.uuid, "active", at=8))
        fleet.put(IntervalInForce(8 * NS, G0.uuid, source, NS, definition if source == "pm_sampling" else ""))
    fleet.put(pm(10))
    fleet.put(window(10, GPM))
    return fleet


@pytest.mark.parametrize(
    ("series", "expected"),
    [
        ("gpu_hpc_dram_read_bytes_total", 1.5e12),
        ("gpu_hpc_dram_written_bytes_total", 0.5e12),
        ("gpu_hpc_l2_sectors_total", 1e11),
        ("gpu_hpc_l2_missed_sectors_total", 4e10),
        ("gpu_hpc_l2_active_seconds_total", 0.7),
        ("gpu_hpc_l2_cache_miss_ratio", 0.4),
        ("gpu_hpc_l2_cache_miss_rate", 0.4),
        ("gpu_hpc_dram_active_seconds_total", 0.5),
        ("gpu_hpc_dram_bandwidth_utilization", 0.5),
        ("gpu_hpc_sm_active_ratio", 0.6),
        ("gpu_hpc_sm_occupancy_ratio", 0.25),
        ("gpu_hpc_sm_utilization_ratio", 0.4),
        ("gpu_hpc_pcie_host_to_gpu_bytes_total", 1050),
        ("gpu_hpc_observed_seconds_total", 1),
    ],
)
def test_series_of_both_sources(series: str, expected: float) -> None:
    """PM sampling's word where it has one, GPM's for the rest."""
    assert served(both()).one(series, gpu="0") == pytest.approx(expected)


def truths(samples: Samples) -> dict[str, tuple[str, str]]:
    """Per metric its source and definition."""
    rows = [dict(labels) for labels in samples.all("gpu_hpc_metric_source_info")]
    assert len({row["metric"] for row in rows}) == len(rows)
    return {row["metric"].removeprefix("gpu_hpc_"): (row["source"], row["definition"]) for row in rows}


@pytest.mark.parametrize("definition", ["dram_sectors", "hit_rate"])
def test_where_metrics_come_from(definition: L2Definition) -> None:
    """One row a metric that two sources or definitions can serve, naming those of now."""
    assert truths(served(both(definition))) == {
        "sm_active_seconds_total": ("pm_sampling", ""),
        "sm_occupancy_seconds_total": ("gpm", ""),
        "pipe_active_seconds_total": ("gpm", ""),
        "dram_active_seconds_total": ("pm_sampling", "bytes_over_peak"),
        "pcie_host_to_gpu_bytes_total": ("pm_sampling", ""),
        "bottleneck_seconds_total": ("pm_sampling", ""),
        "l2_cache_miss_ratio": ("pm_sampling", definition),
        "l2_cache_miss_rate": ("pm_sampling", definition),
    }


def test_where_metrics_come_from_after_a_pause() -> None:
    """GPM serves all that it can; L2 is told until it vanishes, and then no more."""
    fleet = both(now=11)
    fleet.put(state("pm_sampling", G0.uuid, "paused", at=10.5))
    fleet.put(window(11, GPM))
    found = truths(served(fleet))
    assert {source for metric, (source, _) in found.items() if not metric.startswith("l2")} == {"gpm"}
    assert found["dram_active_seconds_total"] == ("gpm", "driver_ratio")
    assert found["l2_cache_miss_rate"] == ("pm_sampling", "dram_sectors")


def test_a_share_that_the_chip_gives_is_no_quotient_of_bytes() -> None:
    """Before CUPTI 12.9 PM sampling has a DRAM share and no bytes."""
    fleet = running_fleet(G0)
    fleet.put(pm(10, {"sm_active": 0.5, "dram_active": 0.3}))
    assert truths(served(fleet))["dram_active_seconds_total"] == ("pm_sampling", "driver_ratio")


@pytest.mark.parametrize("gpu", [G0, M1], ids=["GPU", "MIG instance"])
def test_nothing_is_said_of_sources_where_there_is_no_choice(gpu: object) -> None:
    """A MIG instance has GPM only; a GPU without windows has none."""
    fleet = running_fleet(G0, G1, M1)
    if gpu is M1:
        fleet.put(window(10, GPM, uuid=M1.uuid))
    assert served(fleet).all("gpu_hpc_metric_source_info") == {}


def test_without_pm_sampling_there_are_no_series_of_it() -> None:
    """Absent is not zero."""
    fleet = running_fleet(G0)
    fleet.put(window(10, GPM))
    names = {name for name, _ in served(fleet).values}
    assert not [name for name in names if "l2" in name or "dram_read" in name or "incident" in name or "helper" in name]


PAUSES = [s for s in get_args(State) if s != "active"]


@pytest.mark.parametrize("why", PAUSES)
def test_what_only_pm_sampling_serves_is_absent_while_it_does_not(why: State) -> None:
    """Its gauges vanish within the stale time; its counters stay, and GPM's series go on."""
    fleet = both(now=15.001)
    fleet.put(state("pm_sampling", G0.uuid, why, at=10.5))
    for second in range(11, 16):
        fleet.put(window(second, GPM))
    samples = served(fleet)
    assert samples.get("gpu_hpc_l2_cache_miss_rate") is None
    assert samples.get("gpu_hpc_bottleneck_intensity_ratio", unit="l2") is None
    assert samples.one("gpu_hpc_l2_sectors_total") == 1e11
    assert samples.one("gpu_hpc_sm_active_ratio") == 0.5
    assert samples.one("gpu_hpc_observed_seconds_total") == pytest.approx(6)
    assert samples.one("gpu_hpc_source_observed_seconds_total", source="pm_sampling") == 1


@pytest.mark.parametrize("source", get_args(WindowSource))
@pytest.mark.parametrize(("now", "expected"), [(15, "active"), (15.001, "stale")])
def test_either_source_becomes_stale(source: WindowSource, now: float, expected: State) -> None:
    """Five seconds without a window, whatever the other source does."""
    fleet = both(now=now)
    other = window(now, GPM) if source == "pm_sampling" else pm(now)
    fleet.put(other)
    states = {s.source: s.state for s in fleet.snapshot().states if s.uuid}
    assert states == {"gpm": "active", "pm_sampling": "active", source: expected}


@pytest.mark.parametrize("away", ["paused", "busy", "lost"])
def test_no_window_is_lost_while_pm_sampling_is_away(away: State) -> None:
    """Time in which it gives way is no lost window."""
    fleet = both(now=30)
    fleet.put(state("pm_sampling", G0.uuid, away, at=10.5))
    fleet.put(state("pm_sampling", G0.uuid, "active", at=20))
    fleet.put(pm(25))
    assert served(fleet).one("gpu_hpc_windows_total", source="pm_sampling", result="lost") == 0
    fleet.put(pm(28))
    assert served(fleet).one("gpu_hpc_windows_total", source="pm_sampling", result="lost") == 2


def test_a_lost_gpu_is_lost_to_both_sources() -> None:
    """Each source that has spoken of it says lost, and the outage makes no lost windows."""
    fleet = both(now=101)
    fleet.put(inventory(at=11))
    assert {s.source: s.state for s in fleet.snapshot().states if s.uuid} == dict.fromkeys(
        ("gpm", "nvml", "pm_sampling"), "lost"
    )
    fleet.put(inventory(G0, at=100))
    for one in (pm(101), window(101, GPM)):
        fleet.put(one)
    fleet.put(GpuFellOff(101 * NS, G0.pci_bus_id))
    fleet.put(inventory(G0, at=102))
    assert not [key for key, count in fleet.snapshot().gpus[0].windows.items() if key[1] == "lost" and count]


def test_incidents_are_counted_from_zero() -> None:
    """Zeros as soon as PM sampling has windows on a GPU; the helper's restarts are the host's."""
    fleet = both()
    series = "gpu_hpc_pm_sampling_incidents_total"
    rows = {dict(labels)["incident"]: value for labels, value in served(fleet).all(series, uuid=G0.uuid).items()}
    assert rows == {"overflow": 0, "set_reduced": 0, "rate_halved": 0}
    incidents: tuple[Incident, ...] = ("overflow", "overflow", "rate_halved", "helper_restarted")
    for incident in incidents:
        fleet.put(SamplingIncident(10 * NS, "" if incident == "helper_restarted" else G0.uuid, incident))
    fleet.put(SamplingIncident(10 * NS, G1.uuid, "overflow"))  # of no GPU that there is
    samples = served(fleet)
    assert {dict(labels)["incident"]: value for labels, value in samples.all(series).items()} == {
        "overflow": 2,
        "set_reduced": 0,
        "rate_halved": 1,
    }
    assert samples.one("gpu_hpc_helper_restarts_total") == 1


def test_restarts_are_zero_once_pm_sampling_has_said_anything() -> None:
    """Also where it is not permitted; never where it does not exist."""
    fleet = running_fleet(G0)
    assert served(fleet).get("gpu_hpc_helper_restarts_total") is None
    fleet.put(state("pm_sampling", G0.uuid, "no_permission"))
    samples = served(fleet)
    assert samples.one("gpu_hpc_helper_restarts_total") == 0
    assert samples.all("gpu_hpc_pm_sampling_incidents_total") == {}


def test_required_sources_are_told() -> None:
    """1 for what the configuration requires, 0 for other sources that have a state, after a reload as well."""
    fleet = Fleet(Clock(), GAUGE_WINDOW_NS)
    fleet.configure(GAUGE_WINDOW_NS, None, frozenset[SourceName]({"pm_sampling"}))
    fleet.put(inventory(G0))
    fleet.put(StateChange(NS, "nvml", "", "active"))

    def required() -> dict[str, float]:
        rows = served(fleet).all("gpu_hpc_source_required")
        return {dict(labels)["source"]: value for labels, value in rows.items()}

    assert required() == {"nvml": 0, "pm_sampling": 1}
    fleet.put(state("pm_sampling", G0.uuid, "no_permission"))
    fleet.configure(GAUGE_WINDOW_NS, None)
    assert required() == {"nvml": 0, "pm_sampling": 0}
    fleet.configure(GAUGE_WINDOW_NS, None, frozenset[SourceName]({"pm_sampling"}))
    assert required() == {"nvml": 0, "pm_sampling": 1}


@pytest.mark.parametrize(("mode", "expected"), [("auto", set()), ("off", set()), ("required", {"pm_sampling"})])
def test_the_configuration_requires_pm_sampling(
    mode: Literal["auto", "off", "required"], expected: set[SourceName]
) -> None:
    """`pm_sampling.mode: required` is what alerts on its absence rest on."""
    config = Config(pm_sampling=PmSampling(mode=mode))
    exporter = Exporter(lambda: config, ReplaySource(Recording.load(DEFAULT_RECORDING), 1.0))
    assert exporter.snapshot().required == expected
