"""Values that one exporter serves of a machine full of different GPUs, each with its own oddity.

The GPUs share a process, so every test here also shows that no oddity reaches another GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from e2e.machine import Machine, mean, mig_uuid_of, observed, run_machine, state, uuid_of, value_series
from exporter_process import Samples

GEMM, COPY, AMPERE, UNSUPPORTED, FOREVER_NAN, HIGH, NEGATIVE, ROUNDED, HIGH_PIPE = range(9)
BLANKS, BLANK_ENERGY, BLANK_REASONS, UNKNOWN_ACTION, DENIED_METRIC, BARE, UNIFIED, OLD_MEMORY, MIG = range(9, 18)
ONE_CLOCK, ONE_ECC, ONE_PCIE, NO_ACTION, RESET, DRAIN, RAW_LINKS, ODD_MIG = range(18, 26)
WITH_WINDOWS: Final = (GEMM, COPY, UNSUPPORTED, ROUNDED, HIGH_PIPE, BLANKS, BLANK_ENERGY, BLANK_REASONS, DENIED_METRIC)

SCENARIO: Final = f"""
device {GEMM} sm 0.96 occupancy 0.14 tensor 0.93 fp32 0.05 integer 0.11 dram 0.17
pcie_rx 2e9 pcie_tx 1e9 nvlink_rx 3e9 nvlink_tx 5e9 nvdec 0.25 nvjpg 0.125 nvofa 0.0625
utilization_gpu 98 utilization_memory 37 memory_used 70000000000
power_mw 612345 power_limit_mw 650000 energy_start_mj 5000000000
temperature 64 memory_temperature 71 temperature_slowdown 91
clock_sm 1755 clock_memory 3201 clock_video 1395 clock_reasons 4
pcie_gen_current 4 pcie_replay 7 nvlink_links 12
ecc_corrected_volatile 1 ecc_uncorrected_volatile 2 ecc_corrected_aggregate 3 ecc_uncorrected_aggregate 4
remapped_pending 1 recovery_action 2
link 3 device {GEMM} state 0
device {COPY} sm 0.99 occupancy 0.4 integer 0.08 dram 0.88 pcie_rx 0 pcie_tx 0
device {AMPERE} architecture 8 compute_capability 8.0
name NVIDIA A100-SXM4-80GB
device {UNSUPPORTED} sm 0.5 power_mw none temperature none
ecc_corrected_volatile none ecc_uncorrected_volatile none ecc_corrected_aggregate none ecc_uncorrected_aggregate none
device {FOREVER_NAN} sm 0.5
gpm 10 nan device {FOREVER_NAN}
device {HIGH} sm 0.5
gpm 2 137.0 device {HIGH}
device {NEGATIVE} sm 0.5
gpm 2 -1.0 device {NEGATIVE}
device {ROUNDED} tensor 0.9 dram 0.1
gpm 2 100.0001 device {ROUNDED}
device {HIGH_PIPE} sm 0.9 fp32 0.25
gpm 5 137.0 device {HIGH_PIPE}
device {BLANKS} sm 0.5 memory_used U64NA power_mw U32NA clock_sm U32NA pcie_replay U32NA utilization_gpu U32NA
temperature_slowdown U32NA memory_temperature U32NA pcie_width_current U32NA ecc_corrected_volatile U64NA
device {BLANK_ENERGY} sm 0.5 power_mw 0 energy_start_mj U64NA
device {BLANK_REASONS} sm 0.5 clock_reasons U64NA
device {UNKNOWN_ACTION} recovery_action 77
device {DENIED_METRIC} sm 0.5 fp32 0.25
gpm 13 !3 device {DENIED_METRIC}
gpm 12 !999 device {DENIED_METRIC}
device {BARE}
fault nvmlDeviceGetHandleByIndex* device {BARE} 0
fault nvmlDeviceGetUUID device {BARE} 0
fault * device {BARE} 3
device {UNIFIED} memory_total none pcie_gen_current none pcie_gen_max none pcie_width_current none
pcie_width_max none pcie_replay none nvlink_links none sm 0.5
name NVIDIA GB10
device {OLD_MEMORY} memory_used 1000000000
fault nvmlDeviceGetMemoryInfo_v2 device {OLD_MEMORY} 13
device {MIG} power_mw 345000 pcie_rx 2e9
mig {MIG} gi 1 profile_slices 3 sm 0.75 tensor 0.5 dram 0.25 memory_used 2000000000
mig {MIG} gi 2 profile_slices 2 sm 0.25 memory_used 1000000000
fault nvmlDeviceGetMemoryInfo* device {MIG} 4
device {ONE_CLOCK} clock_video none clock_max_video none
device {ONE_ECC} ecc_corrected_aggregate none ecc_uncorrected_aggregate none
device {ONE_PCIE} pcie_width_max none
device {NO_ACTION} recovery_action 0
device {RESET} recovery_action 1
device {DRAIN} recovery_action 4
device {RAW_LINKS} pcie_throughput_tx 1000 pcie_throughput_rx 1000
gpm 20 1000.0 device {RAW_LINKS}
gpm 21 2000.0 device {RAW_LINKS}
device {ODD_MIG}
mig {ODD_MIG} gi 1
mig {ODD_MIG} gi 2
mig {ODD_MIG} gi 3
mig {ODD_MIG} gi 4
gpm 2 137.0 mig {ODD_MIG} gi 1
gpm 2 -1.0 mig {ODD_MIG} gi 2
gpm 2 nan mig {ODD_MIG} gi 3
gpm 2 100.0001 mig {ODD_MIG} gi 4
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Iterator[Machine]:
    """The machine, two seconds of windows after its start."""
    with run_machine(tmp_path_factory.mktemp("values"), library, SCENARIO) as running:
        running.wait_until_observed(2.0, *WITH_WINDOWS)
        yield running


@pytest.fixture(scope="module")
def samples(machine: Machine) -> Samples:
    """What it serves then."""
    return machine.exporter.scrape()


def labels_of(samples: Samples, name: str, **labels: str) -> dict[str, str]:
    """All labels of the one series of this name."""
    (found,) = samples.all(name, **labels)
    return dict(found)


def rejected(samples: Samples, device: int) -> dict[tuple[str, str], float]:
    """Rejected readings of a GPU: count by reading and reason."""
    found = samples.all("gpu_hpc_rejected_readings_total", uuid=uuid_of(device))
    return {(dict(labels)["reading"], dict(labels)["reason"]): count for labels, count in found.items()}


WINDOW_MEANS = [
    (GEMM, "gpu_hpc_sm_active_seconds_total", {}, 0.96),
    (GEMM, "gpu_hpc_sm_occupancy_seconds_total", {}, 0.14),
    (GEMM, "gpu_hpc_pipe_active_seconds_total", {"pipe": "tensor"}, 0.93),
    (GEMM, "gpu_hpc_pipe_active_seconds_total", {"pipe": "fp32"}, 0.05),
    (GEMM, "gpu_hpc_pipe_active_seconds_total", {"pipe": "int"}, 0.11),
    (GEMM, "gpu_hpc_pipe_active_seconds_total", {"pipe": "fp64"}, 0.0),
    (GEMM, "gpu_hpc_dram_active_seconds_total", {}, 0.17),
    (GEMM, "gpu_hpc_engine_active_seconds_total", {"engine": "decode"}, 0.25),
    (GEMM, "gpu_hpc_engine_active_seconds_total", {"engine": "jpeg"}, 0.125),
    (GEMM, "gpu_hpc_engine_active_seconds_total", {"engine": "ofa"}, 0.0625),
    (COPY, "gpu_hpc_sm_active_seconds_total", {}, 0.99),
    (COPY, "gpu_hpc_pipe_active_seconds_total", {"pipe": "int"}, 0.08),
    (COPY, "gpu_hpc_dram_active_seconds_total", {}, 0.88),
]


@pytest.mark.parametrize(("device", "counter", "labels", "expected"), WINDOW_MEANS)
def test_counters_divided_by_observed_are_the_mean(
    samples: Samples, device: int, counter: str, labels: dict[str, str], expected: float
) -> None:
    """A counter of windows over the observed time is the driver's value, within 1e-6."""
    assert mean(samples, counter, uuid_of(device), **labels) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("counter", "rate"),
    [
        ("gpu_hpc_pcie_host_to_gpu_bytes_total", 2e9),
        ("gpu_hpc_pcie_gpu_to_host_bytes_total", 1e9),
        ("gpu_hpc_nvlink_received_bytes_total", 3e9),
        ("gpu_hpc_nvlink_transmitted_bytes_total", 5e9),
    ],
)
def test_b01_link_bytes(samples: Samples, counter: str, rate: float) -> None:
    """B01: bytes of a link over the observed time are the driver's MiB/s in bytes per second, within 0.1 %."""
    assert mean(samples, counter, uuid_of(GEMM)) == pytest.approx(rate, rel=1e-3)


def test_b01_gpm_tells_mebibytes_of_the_gpu(machine: Machine) -> None:
    """B01: GPM's 20 is what the GPU sends, in 2^20 bytes/s; NVML's own rates, of an unsure unit, are not asked for."""
    samples = machine.wait_until_observed(1.0, RAW_LINKS)
    uuid = uuid_of(RAW_LINKS)
    assert mean(samples, "gpu_hpc_pcie_gpu_to_host_bytes_total", uuid) == pytest.approx(1_048_576_000, rel=1e-6)
    assert mean(samples, "gpu_hpc_pcie_host_to_gpu_bytes_total", uuid) == pytest.approx(2_097_152_000, rel=1e-6)
    assert "nvmlDeviceGetPcieThroughput" not in machine.scenario.calls()


@pytest.mark.parametrize(
    ("device", "gauge", "expected"),
    [
        (GEMM, "gpu_hpc_sm_active_ratio", 0.96),
        (GEMM, "gpu_hpc_sm_occupancy_ratio", 0.14),
        (GEMM, "gpu_hpc_sm_utilization_ratio", 0.93),
        (GEMM, "gpu_hpc_dram_bandwidth_utilization_ratio", 0.17),
        (GEMM, "gpu_hpc_dram_bandwidth_utilization", 0.17),
        (COPY, "gpu_hpc_sm_active_ratio", 0.99),
        (COPY, "gpu_hpc_sm_utilization_ratio", 0.08),
        (COPY, "gpu_hpc_dram_bandwidth_utilization", 0.88),
    ],
)
def test_gauges_are_the_mean(samples: Samples, device: int, gauge: str, expected: float) -> None:
    """A gauge over a steady load is the driver's value, within 1e-6; utilization is the busiest pipe."""
    assert samples.one(gauge, uuid=uuid_of(device), gpu=str(device)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("device", "name"), [(GEMM, "compute_bound"), (COPY, "dram_bound")])
def test_all_time_falls_into_the_class_of_the_limit(samples: Samples, device: int, name: str) -> None:
    """A steady load is one class from the first window on, and the classes add up to the observed time."""
    classes = samples.all("gpu_hpc_bottleneck_seconds_total", uuid=uuid_of(device))
    assert len(classes) == 14
    assert sum(classes.values()) == pytest.approx(observed(samples, uuid_of(device)), rel=1e-9)
    assert samples.one("gpu_hpc_bottleneck_seconds_total", uuid=uuid_of(device), **{"class": name}) == pytest.approx(
        observed(samples, uuid_of(device)), rel=1e-9
    )


@pytest.mark.parametrize(
    ("device", "unit", "expected"),
    [
        (GEMM, "sm", 0.93),
        (GEMM, "dram", 0.17 / 0.8),
        (GEMM, "pcie", 2e9 / (0.7 * 16 * 32e9 * 128 / 130 / 8)),
        (GEMM, "nvlink", 5e9 / (0.7 * 12 * 26.562e9)),
        (COPY, "dram", 1.0),
    ],
)
def test_intensities(samples: Samples, device: int, unit: str, expected: float) -> None:
    """Intensity is the used share of what real code reaches of the unit's peak, at most 1 (diagnosis.md, section 1)."""
    gauge = samples.one("gpu_hpc_bottleneck_intensity_ratio", uuid=uuid_of(device), unit=unit)
    assert gauge == pytest.approx(expected, rel=1e-3)
    windows = samples.one("gpu_hpc_bottleneck_intensity_window_ratio_count", uuid=uuid_of(device), unit=unit)
    total = samples.one("gpu_hpc_bottleneck_intensity_window_ratio_sum", uuid=uuid_of(device), unit=unit)
    assert total / windows == pytest.approx(expected, rel=1e-3)


def test_gpu_info_identifies_the_gpu(samples: Samples) -> None:
    """gpu_info carries all that identifies a GPU, and gpu is NVML's index."""
    assert labels_of(samples, "gpu_hpc_gpu_info", uuid=uuid_of(COPY)) == {
        "gpu": "1",
        "uuid": uuid_of(COPY),
        "name": "NVIDIA H200",
        "architecture": "hopper",
        "compute_capability": "9.0",
        "index": "1",
        "pci_bus_id": "00000000:1e:00.0",
        "serial": "1650000000001",
        "vbios": "96.00.A5.00.01",
        "mig_mode": "disabled",
        "gpu_instance": "",
        "profile": "",
        "parent_uuid": "",
    }
    assert labels_of(samples, "gpu_hpc_driver_info") == {
        "driver_version": "580.159.04",
        "cuda_version": "13.0",
        "nvml_version": "13.580.159.04",
    }


READINGS: list[tuple[str, dict[str, str], float]] = [
    ("gpu_hpc_nvml_utilization_ratio", {}, 0.98),
    ("gpu_hpc_memory_controller_busy_ratio", {}, 0.37),
    ("gpu_hpc_memory_total_bytes", {}, 150754820096),
    ("gpu_hpc_memory_used_bytes", {}, 70e9),
    ("gpu_hpc_memory_reserved_bytes", {}, 640679936),
    ("gpu_hpc_memory_free_bytes", {}, 150754820096 - 640679936 - 70e9),
    ("gpu_hpc_power_watts", {"scope": "gpu"}, 612.345),
    ("gpu_hpc_power_limit_watts", {}, 650),
    ("gpu_hpc_temperature_celsius", {"sensor": "gpu"}, 64),
    ("gpu_hpc_temperature_celsius", {"sensor": "memory"}, 71),
    ("gpu_hpc_temperature_slowdown_celsius", {}, 91),
    ("gpu_hpc_clock_hertz", {"domain": "sm"}, 1.755e9),
    ("gpu_hpc_clock_hertz", {"domain": "memory"}, 3.201e9),
    ("gpu_hpc_clock_hertz", {"domain": "video"}, 1.395e9),
    ("gpu_hpc_clock_limit_hertz", {"domain": "sm"}, 1.98e9),
    ("gpu_hpc_clock_limit_hertz", {"domain": "memory"}, 3.201e9),
    ("gpu_hpc_clock_limit_hertz", {"domain": "video"}, 1.545e9),
    ("gpu_hpc_pcie_link_generation", {"state": "current"}, 4),
    ("gpu_hpc_pcie_link_generation", {"state": "max"}, 5),
    ("gpu_hpc_pcie_link_width", {"state": "current"}, 16),
    ("gpu_hpc_pcie_link_width", {"state": "max"}, 16),
    ("gpu_hpc_pcie_replays_total", {}, 7),
    ("gpu_hpc_nvlink_links", {"state": "present"}, 12),
    ("gpu_hpc_nvlink_links", {"state": "active"}, 11),
    ("gpu_hpc_ecc_errors_total", {"severity": "corrected", "scope": "volatile"}, 1),
    ("gpu_hpc_ecc_errors_total", {"severity": "uncorrected", "scope": "volatile"}, 2),
    ("gpu_hpc_ecc_errors_total", {"severity": "corrected", "scope": "aggregate"}, 3),
    ("gpu_hpc_ecc_errors_total", {"severity": "uncorrected", "scope": "aggregate"}, 4),
    ("gpu_hpc_row_remap_pending", {}, 1),
    ("gpu_hpc_row_remap_failed", {}, 0),
    ("gpu_hpc_recovery_action", {}, 2),
    ("gpu_hpc_dram_bandwidth_limit_bytes_per_second", {}, 6144 / 8 * 3201e6 * 2),
    ("gpu_hpc_pcie_bandwidth_limit_bytes_per_second", {}, 16 * 32e9 * 128 / 130 / 8),
    ("gpu_hpc_nvlink_bandwidth_limit_bytes_per_second", {}, 12 * 26.562e9),
]


@pytest.mark.parametrize(("name", "labels", "expected"), READINGS)
def test_readings_are_in_base_units(samples: Samples, name: str, labels: dict[str, str], expected: float) -> None:
    """Every reading has the catalogue's name and its base unit."""
    assert samples.one(name, uuid=uuid_of(GEMM), **labels) == pytest.approx(expected, rel=1e-12)


def test_energy_and_integrated_readings_grow(machine: Machine) -> None:
    """Energy is in joules; busy time and time under a clock event reason grow with the reading."""
    samples = machine.exporter.wait_for(
        lambda now: (now.get("gpu_hpc_nvml_busy_seconds_total", uuid=uuid_of(GEMM)) or 0) >= 0.97
    )
    assert 5e6 <= samples.one("gpu_hpc_energy_joules_total", uuid=uuid_of(GEMM)) <= 5e6 + 60 * 612.345
    capped = samples.one("gpu_hpc_clock_event_seconds_total", uuid=uuid_of(GEMM), reason="sw_power_cap")
    assert samples.one("gpu_hpc_nvml_busy_seconds_total", uuid=uuid_of(GEMM)) == pytest.approx(0.98 * capped)
    assert samples.one("gpu_hpc_clock_event_seconds_total", uuid=uuid_of(GEMM), reason="hw_slowdown") == 0


def test_the_exporter_is_up(samples: Samples) -> None:
    """GPUs with oddities do not make the exporter down, and no collector fails on them."""
    assert samples.one("gpu_hpc_up") == 1
    assert samples.all("gpu_hpc_down_info") == {}
    assert len(samples.all("gpu_hpc_gpu_info")) == 26 + 2 + 4
    assert set(samples.all("gpu_hpc_scrape_collector_success").values()) == {1.0}


def test_a_gpu_without_gpm_has_readings_only(samples: Samples) -> None:
    """Before Hopper: readings, an unsupported GPM state with its reason, no series of windows."""
    uuid = uuid_of(AMPERE)
    assert samples.one("gpu_hpc_power_watts", uuid=uuid, scope="gpu") == 76
    assert state(samples, "gpm", uuid) == "unsupported"
    assert "Hopper" in labels_of(samples, "gpu_hpc_source_state_info", uuid=uuid, source="gpm")["reason"]
    assert state(samples, "nvml", uuid) == "active"
    windows = {"observed", "sm_active", "sm_util", "pipe", "bottleneck", "dram_active", "dram_bandwidth_utilization"}
    found = {name for name in value_series(samples, uuid) if any(word in name for word in windows)}
    assert found == set()


def test_a07_unsupported_readings_are_absent_and_logged_once(machine: Machine) -> None:
    """A07: power, temperature and ECC are absent where the GPU lacks them, the rest is there, each told once."""
    uuid = uuid_of(UNSUPPORTED)
    samples = machine.wait_until_observed(4.0, UNSUPPORTED)  # every reading was due several times
    assert samples.get("gpu_hpc_power_watts", uuid=uuid, scope="gpu") is None
    assert samples.get("gpu_hpc_temperature_celsius", uuid=uuid, sensor="gpu") is None
    assert samples.all("gpu_hpc_ecc_errors_total", uuid=uuid) == {}
    present = {name for name in value_series(samples, uuid_of(COPY)) if name != "gpu_hpc_ecc_errors_total"}
    assert present - value_series(samples, uuid) <= {"gpu_hpc_power_watts"}  # its module's sensor is absent as well
    assert samples.one("gpu_hpc_sm_active_ratio", uuid=uuid) == pytest.approx(0.5)
    lines = [line["msg"] for line in machine.log_lines() if uuid in line["msg"] and "does not offer" in line["msg"]]
    assert len(lines) == len(set(lines))
    assert {word for line in lines for word in ("power", "temperature", "ECC") if f"offer {word}" in line} == {
        "power",
        "temperature",
        "ECC",
    }
    assert machine.scenario.calls(UNSUPPORTED)["nvmlDeviceGetPowerUsage"] == 1


@pytest.mark.parametrize(
    ("device", "name", "present"),
    [
        (ONE_CLOCK, "gpu_hpc_clock_hertz", {"domain": "sm"}),
        (ONE_CLOCK, "gpu_hpc_clock_hertz", {"domain": "memory"}),
        (ONE_CLOCK, "gpu_hpc_clock_limit_hertz", {"domain": "sm"}),
        (ONE_ECC, "gpu_hpc_ecc_errors_total", {"severity": "uncorrected", "scope": "volatile"}),
        (ONE_PCIE, "gpu_hpc_pcie_link_width", {"state": "current"}),
        (ONE_PCIE, "gpu_hpc_pcie_bandwidth_limit_bytes_per_second", {}),
    ],
)
def test_a07_each_field_is_independent(samples: Samples, device: int, name: str, present: dict[str, str]) -> None:
    """A07: one value that is not supported does not take its neighbours with it."""
    assert samples.get(name, uuid=uuid_of(device), **present) is not None


def test_d03_a_gpu_that_only_has_a_name_is_served(samples: Samples) -> None:
    """D03: a GPU that answers Not Supported to everything keeps its identity and has no values."""
    assert samples.one("gpu_hpc_gpu_info", uuid=uuid_of(BARE)) == 1
    assert value_series(samples, uuid_of(BARE)) == set()
    assert state(samples, "gpm", uuid_of(BARE)) == "unsupported"


def test_d03_a_gpu_that_only_has_a_name_does_not_make_the_exporter_unready(machine: Machine) -> None:
    """D03: a GPU that will never have a reading "must also work": the others' readiness does not wait for it."""
    status, _, text = machine.exporter.fetch("/-/ready")
    assert (status, text) == (200, "ready\n")


def test_d01_an_integrated_gpu_has_no_memory_and_no_links(samples: Samples) -> None:
    """D01: memory and PCIe that are Not Supported are absent, not 0; windows go on."""
    names = value_series(samples, uuid_of(UNIFIED))
    assert not {name for name in names if name.startswith(("gpu_hpc_memory_t", "gpu_hpc_memory_u", "gpu_hpc_pcie_"))}
    assert mean(samples, "gpu_hpc_sm_active_seconds_total", uuid_of(UNIFIED)) == pytest.approx(0.5, abs=1e-6)


def test_b06_parts_of_the_memory_are_its_total(samples: Samples) -> None:
    """B06: used without the reserve, reserved and free are the total."""
    parts = [samples.one(f"gpu_hpc_memory_{part}_bytes", uuid=uuid_of(GEMM)) for part in ("used", "reserved", "free")]
    assert sum(parts) == samples.one("gpu_hpc_memory_total_bytes", uuid=uuid_of(GEMM))
    assert parts[0] == 70e9


def test_b06_memory_of_an_old_driver(samples: Samples) -> None:
    """B06: without version 2 of the call, used holds the reserve, and used + free (+ reserved) is the total."""
    uuid = uuid_of(OLD_MEMORY)
    used, free = (
        samples.one("gpu_hpc_memory_used_bytes", uuid=uuid),
        samples.one("gpu_hpc_memory_free_bytes", uuid=uuid),
    )
    assert samples.get("gpu_hpc_memory_reserved_bytes", uuid=uuid) is None
    assert used + free == samples.one("gpu_hpc_memory_total_bytes", uuid=uuid)


def test_gpm_nan_for_ever_is_stale(machine: Machine) -> None:
    """A GPU whose DRAM is NaN has no window, never a false 0; after 5 s GPM is stale and readings go on."""
    uuid = uuid_of(FOREVER_NAN)
    samples = machine.exporter.wait_for(lambda now: state(now, "gpm", uuid) == "stale")
    assert samples.get("gpu_hpc_observed_seconds_total", uuid=uuid) is None
    assert samples.get("gpu_hpc_sm_active_ratio", uuid=uuid) is None
    assert samples.get("gpu_hpc_sm_active_seconds_total", uuid=uuid) is None
    assert samples.one("gpu_hpc_power_watts", uuid=uuid, scope="gpu") == 76
    assert labels_of(samples, "gpu_hpc_source_state_info", uuid=uuid, source="gpm")["reason"]


@pytest.mark.parametrize(("device", "reason"), [(HIGH, "above_range"), (NEGATIVE, "negative")])
def test_c03_impossible_sm_values_are_rejected(samples: Samples, device: int, reason: str) -> None:
    """A11, C03: 137 % and -1 % make no window; readings and windows rejected are counted."""
    assert rejected(samples, device)["sm_active", reason] > 0
    assert set(rejected(samples, device)) == {("sm_active", reason)}
    assert samples.one("gpu_hpc_windows_total", uuid=uuid_of(device), result="rejected") > 0
    assert samples.one("gpu_hpc_windows_total", uuid=uuid_of(device), result="valid") == 0
    assert samples.get("gpu_hpc_sm_active_ratio", uuid=uuid_of(device)) is None
    assert observed(samples, uuid_of(device)) == 0


@pytest.mark.parametrize(("gi", "reason"), [(1, "above_range"), (2, "negative"), (3, "nan")])
def test_c03_impossible_values_of_an_instance_are_rejected(machine: Machine, gi: int, reason: str) -> None:
    """A11, C03: the same of a MIG instance; its neighbour, whose 100.0001 % is rounding, and its slices are served."""
    neighbour = mig_uuid_of(ODD_MIG, 4)
    samples = machine.exporter.wait_for(lambda now: observed(now, neighbour) > 0.5)
    assert samples.one("gpu_hpc_sm_active_ratio", uuid=neighbour) == 1
    uuid = mig_uuid_of(ODD_MIG, gi)
    counted = samples.all("gpu_hpc_rejected_readings_total", uuid=uuid)
    assert {(dict(row)["reading"], dict(row)["reason"]) for row in counted} == {("sm_active", reason)}
    assert samples.get("gpu_hpc_sm_active_ratio", uuid=uuid) is None
    assert observed(samples, uuid) == 0
    assert labels_of(samples, "gpu_hpc_gpu_info", uuid=uuid)["profile"].startswith("1g.")


def test_c03_rounding_counts_as_one(samples: Samples) -> None:
    """C03: 100.0001 % is rounding: exported as exactly 1 and not rejected."""
    assert samples.one("gpu_hpc_sm_active_ratio", uuid=uuid_of(ROUNDED)) == 1
    assert rejected(samples, ROUNDED) == {}


def test_c03_an_impossible_pipe_costs_only_itself(samples: Samples) -> None:
    """C03: a pipe at 137 % is absent and counted; the window's other values are served."""
    uuid = uuid_of(HIGH_PIPE)
    assert samples.get("gpu_hpc_pipe_active_seconds_total", uuid=uuid, pipe="tensor") is None
    assert rejected(samples, HIGH_PIPE)["pipe_tensor", "above_range"] > 0
    assert mean(samples, "gpu_hpc_sm_active_seconds_total", uuid) == pytest.approx(0.9, abs=1e-6)
    assert mean(samples, "gpu_hpc_pipe_active_seconds_total", uuid, pipe="fp32") == pytest.approx(0.25, abs=1e-6)


def test_b04_gpm_values_with_an_error_code_are_absent(samples: Samples) -> None:
    """B04: a GPM metric whose own return code is an error is absent, though its value reads 0."""
    uuid = uuid_of(DENIED_METRIC)
    assert samples.get("gpu_hpc_pipe_active_seconds_total", uuid=uuid, pipe="fp16") is None
    assert samples.get("gpu_hpc_pipe_active_seconds_total", uuid=uuid, pipe="fp32") is None
    assert mean(samples, "gpu_hpc_sm_active_seconds_total", uuid) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "labels", "reading"),
    [
        ("gpu_hpc_memory_used_bytes", {}, "memory_used_bytes"),
        ("gpu_hpc_power_watts", {"scope": "gpu"}, "power_gpu_watts"),
        ("gpu_hpc_clock_hertz", {"domain": "sm"}, "clock_sm_hertz"),
        ("gpu_hpc_pcie_replays_total", {}, "pcie_replays"),
        ("gpu_hpc_nvml_utilization_ratio", {}, "nvml_utilization_ratio"),
        ("gpu_hpc_temperature_slowdown_celsius", {}, "temperature_slowdown_celsius"),
        ("gpu_hpc_temperature_celsius", {"sensor": "memory"}, "temperature_memory_celsius"),
        ("gpu_hpc_pcie_link_width", {"state": "current"}, "pcie_link_width_current"),
        ("gpu_hpc_pcie_bandwidth_limit_bytes_per_second", {}, "pcie_limit_bytes_per_second"),
        (
            "gpu_hpc_ecc_errors_total",
            {"severity": "corrected", "scope": "volatile"},
            "ecc_corrected_volatile",
        ),
    ],
)
def test_b04_sentinels_are_absent_and_counted(
    samples: Samples, name: str, labels: dict[str, str], reading: str
) -> None:
    """B04: a value that means "not available" is absent and counted; its neighbours stay."""
    assert samples.get(name, uuid=uuid_of(BLANKS), **labels) is None
    assert sum(count for (what, _), count in rejected(samples, BLANKS).items() if what == reading) >= 1
    assert samples.one("gpu_hpc_memory_total_bytes", uuid=uuid_of(BLANKS)) == 150754820096
    assert samples.one("gpu_hpc_clock_hertz", uuid=uuid_of(BLANKS), domain="memory") == 3.201e9


def test_b04_an_energy_sentinel_is_no_energy(samples: Samples) -> None:
    """B04: an energy of 2^64-1 millijoules is absent and counted, not 18 petajoules."""
    assert samples.get("gpu_hpc_energy_joules_total", uuid=uuid_of(BLANK_ENERGY)) is None
    assert any(reading == "energy_joules" for reading, _ in rejected(samples, BLANK_ENERGY))


def test_b04_a_blank_mask_of_clock_reasons_slows_nothing_down(samples: Samples) -> None:
    """B04: a mask of 2^64-1 is no reason at all: no time under a slowdown, no throttled class."""
    uuid = uuid_of(BLANK_REASONS)
    assert not samples.get("gpu_hpc_clock_event_seconds_total", uuid=uuid, reason="hw_slowdown")
    assert samples.one("gpu_hpc_bottleneck_seconds_total", uuid=uuid, **{"class": "throttled"}) == 0


def test_a16_an_unknown_recovery_action_is_absent(samples: Samples) -> None:
    """A16: a value outside the driver's enumeration is absent and counted, never a guessed number."""
    assert samples.get("gpu_hpc_recovery_action", uuid=uuid_of(UNKNOWN_ACTION)) is None
    assert rejected(samples, UNKNOWN_ACTION) == {("recovery_action", "above_range"): 1}


def test_a16_an_unknown_recovery_action_is_told_once(machine: Machine) -> None:
    """A16: with the GPU and the number, at its first reading and not at each."""
    (line,) = [line["msg"] for line in machine.log_lines("warning") if "recovery_action" in line["msg"]]
    assert uuid_of(UNKNOWN_ACTION) in line
    assert "77" in line


@pytest.mark.parametrize(("device", "action"), [(NO_ACTION, 0), (RESET, 1), (GEMM, 2), (DRAIN, 4)])
def test_a16_known_recovery_actions_are_served(samples: Samples, device: int, action: int) -> None:
    """A16: as the driver numbers them; 0 is "none", not nothing."""
    assert samples.one("gpu_hpc_recovery_action", uuid=uuid_of(device)) == action


def test_mig_instances_have_rows_of_their_own(samples: Samples) -> None:
    """MIG: a row per instance with the MIG UUID, the parent's gpu label, its id and profile, and its windows."""
    parent = uuid_of(MIG)
    for gi, slices, sm, used in ((1, 3, 0.75, 2e9), (2, 2, 0.25, 1e9)):
        uuid = mig_uuid_of(MIG, gi)
        info = labels_of(samples, "gpu_hpc_gpu_info", uuid=uuid)
        assert (info["gpu"], info["index"], info["gpu_instance"]) == (str(MIG), str(MIG), str(gi))
        assert info["profile"].startswith(f"{slices}g.")
        assert (info["parent_uuid"], info["mig_mode"]) == (parent, "enabled")
        assert mean(samples, "gpu_hpc_sm_active_seconds_total", uuid) == pytest.approx(sm, abs=1e-6)
        assert samples.one("gpu_hpc_memory_used_bytes", uuid=uuid, gpu=str(MIG)) == used
        assert not {name for name in value_series(samples, uuid) if "pcie" in name or "power" in name}
        limit = samples.one("gpu_hpc_dram_bandwidth_limit_bytes_per_second", uuid=uuid)
        assert limit == pytest.approx(6144 / 8 * 3201e6 * 2 * slices / 7)
        assert all("gpu_instance" not in dict(labels) for labels in samples.all("gpu_hpc_sm_active_ratio", uuid=uuid))


def test_mig_parents_keep_the_board(samples: Samples) -> None:
    """MIG: the parent has power, temperature and PCIe, and neither windows nor bottleneck series."""
    parent = uuid_of(MIG)
    assert samples.one("gpu_hpc_power_watts", uuid=parent, scope="gpu") == 345
    assert samples.one("gpu_hpc_temperature_celsius", uuid=parent, sensor="gpu") == 31
    assert samples.one("gpu_hpc_pcie_link_width", uuid=parent, state="current") == 16
    assert labels_of(samples, "gpu_hpc_gpu_info", uuid=parent)["mig_mode"] == "enabled"
    assert state(samples, "gpm", parent) == "unsupported"
    assert not {name for name in value_series(samples, parent) if "observed" in name or "bottleneck" in name}


def test_c01_what_a_mig_parent_denies_is_absent(samples: Samples) -> None:
    """C01: utilization that is Not Supported and memory that is denied are absent on the parent, not 0."""
    parent = uuid_of(MIG)
    assert samples.get("gpu_hpc_nvml_utilization_ratio", uuid=parent) is None
    assert samples.get("gpu_hpc_memory_used_bytes", uuid=parent) is None
    assert samples.one("gpu_hpc_driver_errors_total", code="no_permission") >= 1
    assert labels_of(samples, "gpu_hpc_gpu_info", uuid=parent)["mig_mode"] == "enabled"


def test_c01_idleness_is_that_of_the_instances(samples: Samples) -> None:
    """C01: what the alert of an idle GPU needs, a parent lacks and its instances have."""
    read_by_the_alert = {"gpu_hpc_observed_seconds_total", "gpu_hpc_sm_active_seconds_total"}
    assert not read_by_the_alert & value_series(samples, uuid_of(MIG))
    for gi in (1, 2):
        assert read_by_the_alert <= value_series(samples, mig_uuid_of(MIG, gi))
    rules = (Path(__file__).parents[2] / "alert-rules" / "jobs.yml").read_text(encoding="utf-8")
    idle = rules.partition("alert: GpuHpcIdleButAllocated")[2].partition("for:")[0]
    assert re.search(r"gpu:sm_active:\S+ < \S+\s+and on\(instance,gpu,uuid\)", idle)
    assert re.search(r"and on\(instance,gpu,uuid\)\s+gpu:observed:\S+ > 0\.5", idle)
