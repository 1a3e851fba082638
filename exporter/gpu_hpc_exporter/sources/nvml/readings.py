"""The slow readings of one GPU: a table of calls, each with its own period and its own failures.

Costs were measured on an H200 with driver 580.159, once a second with cold caches: most calls 50-70 us,
PCIe link and recovery action 180 us, the PCIe replay counter 500 us, maximum clocks 1.8 ms each, energy
3.9 ms. Costly ones are read rarely and constant ones once.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pynvml

from gpu_hpc_exporter.model import NS, Reading
from gpu_hpc_exporter.sources.nvml.library import FATAL, UNSUPPORTED, DriverCallError, Handle
from gpu_hpc_exporter.sources.nvml.turns import FIELDS
from gpu_hpc_exporter.sources.values import Problem, problem_of_reading

log = logging.getLogger(__name__)

SECOND: Final = NS
SELDOM: Final = 15 * NS
"""The usual scrape interval: a rate over five minutes sees 20 fresh values."""
RARELY: Final = 60 * NS
ONCE: Final = 3600 * NS
"""Constants of the board; asked again hourly, since a driver reload may change them."""
REPROBE: Final = 3600 * NS

_MILLI: Final = 1000
_U64_NOT_AVAILABLE: Final = 2**64 - 1
_CORRECTED: Final = pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED
_UNCORRECTED: Final = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
_VOLATILE: Final = pynvml.NVML_VOLATILE_ECC
_AGGREGATE: Final = pynvml.NVML_AGGREGATE_ECC
_MHZ: Final = 1_000_000

PCIE_LANE_BYTES_PER_SECOND: Final[dict[int, float]] = {
    # PCI Express Base Specification: transfer rate x line code, per lane and direction.
    1: 2.5e9 * 8 / 10 / 8,
    2: 5.0e9 * 8 / 10 / 8,
    3: 8.0e9 * 128 / 130 / 8,
    4: 16.0e9 * 128 / 130 / 8,
    5: 32.0e9 * 128 / 130 / 8,
    6: 64.0e9 * 242 / 256 / 8,  # FLIT mode: 242 of 256 bytes carry transactions
}

_CLOCK_EVENT_BITS: Final[tuple[tuple[int, Reading], ...]] = (
    (0x001, "clock_event_gpu_idle"),
    (0x002, "clock_event_applications_clocks_setting"),
    (0x004, "clock_event_sw_power_cap"),
    (0x008, "clock_event_hw_slowdown"),
    (0x010, "clock_event_sync_boost"),
    (0x020, "clock_event_sw_thermal_slowdown"),
    (0x040, "clock_event_hw_thermal_slowdown"),
    (0x080, "clock_event_hw_power_brake_slowdown"),
    (0x100, "clock_event_display_clock_setting"),
)
"""nvmlClocksEventReason* of nvml.h."""

_NVLINK_ERRORS: Final[tuple[tuple[int, Reading], ...]] = (
    (pynvml.NVML_NVLINK_ERROR_DL_REPLAY, "nvlink_errors_replay"),
    (pynvml.NVML_NVLINK_ERROR_DL_RECOVERY, "nvlink_errors_recovery"),
    (pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT, "nvlink_errors_crc_flit"),
    (pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA, "nvlink_errors_crc_data"),
)

_NO_LINK: Final = UNSUPPORTED | {pynvml.NVML_ERROR_NOT_FOUND}

Values = dict[Reading, float]
Counts = dict[int, int]
"""A counter of each NVLink that tells it, by the link's number."""


@dataclass(frozen=True, slots=True)
class Group:
    """Readings that one driver call (or a few that belong together) delivers; of counts the table publishes the sum."""

    name: str
    period_ns: int
    read: Callable[[Handle], Mapping[Reading, float | Counts]]


@dataclass(slots=True)
class _Slot:
    group: Group
    due_ns: int = 0


class _Sum:
    """What several counters, not all of which tell each time, had at the first look and have gained since.

    Their plain sum would fall when one is missing and later count anew all that this one has ever counted.
    """

    def __init__(self) -> None:
        self._known: Counts = {}
        self._total = 0

    def advance(self, counts: Counts) -> int:
        """The sum now. Nothing is gained by a counter that is seen for the first time later, or was set back."""
        if not self._known:
            self._total = sum(counts.values())
        self._total += sum(max(0, count - self._known.get(link, count)) for link, count in counts.items())
        self._known.update(counts)
        return self._total


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass over the table: all values that hold now, and what went wrong on the way."""

    values: Mapping[Reading, float]
    problems: tuple[tuple[Reading, Problem], ...]
    errors: tuple[str, ...]
    answered: bool


class ReadingTable:
    """Reads the groups that are due; a failing group loses its own values only.

    What a GPU does not support is asked again after an hour, not once a second. What cannot be true is logged once
    for each reading.
    """

    def __init__(self, handle: Handle, label: str, groups: tuple[Group, ...], on_call: Callable[[str], None]) -> None:
        """`on_call` is told the name of each group before its driver calls."""
        self._handle = handle
        self._on_call = on_call
        self._label = label
        self._slots = [_Slot(group) for group in groups]
        self._kept: dict[str, Values] = {}
        self._sums = defaultdict[Reading, _Sum](_Sum)
        self._doubted: set[Reading] = set()

    def read(self, now_ns: int) -> Pass:
        """Values as of `now_ns`. Raises DriverCallError only for codes after which no call can succeed."""
        problems: list[tuple[Reading, Problem]] = []
        errors: list[str] = []
        succeeded = False
        for slot in self._slots:
            if now_ns < slot.due_ns:
                continue
            name = slot.group.name
            slot.due_ns = now_ns + slot.group.period_ns
            self._on_call(name)
            try:
                self._kept[name] = self._checked(self._summed(slot.group.read(self._handle)), problems)
                succeeded = True
            except pynvml.NVMLError as error:
                self._kept.pop(name, None)
                self._note(slot, error, now_ns, errors)
        values: Values = {}
        for kept in self._kept.values():
            values.update(kept)
        # Values kept from earlier passes must not pass for an answer where every call fails now.
        answered = succeeded or (bool(values) and not errors)
        return Pass(values, tuple(problems), tuple(errors), answered)

    def _note(self, slot: _Slot, error: pynvml.NVMLError, now_ns: int, errors: list[str]) -> None:
        failure = DriverCallError(error)
        if failure.fatal:
            raise failure from error
        if failure.unsupported:
            slot.due_ns = now_ns + REPROBE
            log.info("%s does not offer %s: its series are absent", self._label, slot.group.name)
        else:
            errors.append(failure.name)

    def _summed(self, values: Mapping[Reading, float | Counts]) -> Values:
        found: Values = {}
        for reading, value in values.items():
            if not isinstance(value, dict):
                found[reading] = value
            elif value:  # where no link tells, nobody knows the sum
                found[reading] = self._sum(reading, value)
        return found

    def _sum(self, reading: Reading, counts: Counts) -> int:
        """A count that cannot be true stands for the sum, which cannot either."""
        wrong = [count for count in counts.values() if problem_of_reading(reading, count)]
        return wrong[0] if wrong else self._sums[reading].advance(counts)

    def _checked(self, values: Values, problems: list[tuple[Reading, Problem]]) -> Values:
        good: Values = {}
        for reading, value in values.items():
            problem = problem_of_reading(reading, value)
            if problem is None:
                good[reading] = value
                continue
            problems.append((reading, problem))
            if reading not in self._doubted:
                self._doubted.add(reading)
                log.warning("%s: %s reads %g (%s): it is absent and counted", self._label, reading, value, problem)
        return good


def field_value(handle: Handle, field: int, scope: int = 0) -> float:
    """One field value as a number; raises NVMLError with the field's own return code."""
    with FIELDS.alone():
        (answer,) = pynvml.nvmlDeviceGetFieldValues(handle, [(field, scope)])
    if answer.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(answer.nvmlReturn)
    kinds = {
        pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
        pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    }
    kind = kinds.get(answer.valueType)
    if kind is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return float(getattr(answer.value, kind))


def count_nvlinks(handle: Handle) -> tuple[int, int]:
    """NVLinks present and active; raises NOT_SUPPORTED on a GPU without any."""
    links = _nvlinks(handle)
    return len(links), sum(links.values())


def _nvlinks(handle: Handle) -> dict[int, bool]:
    """The numbers of the NVLinks that there are, among which some may be missing, and whether each is active.

    Raises NOT_SUPPORTED without any, and whatever else a link answers: a smaller count would pass for broken links.
    """
    links: dict[int, bool] = {}
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            links[link] = pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_INVALID_ARGUMENT:  # the chip has fewer
                break
            if error.value not in _NO_LINK:
                raise
    if not links:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return links


def _utilization(handle: Handle) -> Values:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return {"nvml_utilization_ratio": rates.gpu / 100, "memory_controller_busy_ratio": rates.memory / 100}


def _memory(handle: Handle) -> Values:
    """Version 2 keeps the driver's reserve apart; version 1, on old drivers, counts it as used."""
    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value in FATAL or error.value == pynvml.NVML_ERROR_NOT_SUPPORTED:
            raise
        info = pynvml.nvmlDeviceGetMemoryInfo(handle)
    if not info.total:  # integrated GPUs answer SUCCESS with zeros: they have no memory of their own
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    values: Values = {
        "memory_total_bytes": info.total,
        "memory_used_bytes": info.used,
        "memory_free_bytes": info.free,
    }
    if hasattr(info, "reserved"):
        values["memory_reserved_bytes"] = info.reserved
    return values


def _power(handle: Handle) -> Values:
    return {"power_gpu_watts": pynvml.nvmlDeviceGetPowerUsage(handle) / _MILLI}


def _module_power(handle: Handle) -> Values:
    watts = field_value(handle, pynvml.NVML_FI_DEV_POWER_AVERAGE, pynvml.NVML_POWER_SCOPE_MODULE) / _MILLI
    return {"power_module_watts": watts}


def _power_limit(handle: Handle) -> Values:
    return {"power_limit_watts": pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / _MILLI}


def _energy(handle: Handle) -> Values:
    return {"energy_joules": pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / _MILLI}


def _gpu_temperature(handle: Handle) -> Values:
    return {"temperature_gpu_celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)}


def _memory_temperature(handle: Handle) -> Values:
    return {"temperature_memory_celsius": field_value(handle, pynvml.NVML_FI_DEV_MEMORY_TEMP)}


def _slowdown_temperature(handle: Handle) -> Values:
    kind = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    return {"temperature_slowdown_celsius": pynvml.nvmlDeviceGetTemperatureThreshold(handle, kind)}


def _clock(domain: int, reading: Reading) -> Callable[[Handle], Values]:
    return lambda handle: {reading: pynvml.nvmlDeviceGetClockInfo(handle, domain) * _MHZ}


def _clock_limit(domain: int, reading: Reading) -> Callable[[Handle], Values]:
    return lambda handle: {reading: pynvml.nvmlDeviceGetMaxClockInfo(handle, domain) * _MHZ}


def _clock_events(handle: Handle) -> Values:
    mask = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    if mask == _U64_NOT_AVAILABLE:  # every bit set: one reading that cannot be true, not nine reasons that are
        return {"clock_event_gpu_idle": float(mask)}
    return {reading: float(bool(mask & bit)) for bit, reading in _CLOCK_EVENT_BITS}


def _pcie_generation(handle: Handle) -> Values:
    return {"pcie_link_generation_current": pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)}


def _pcie_generation_limit(handle: Handle) -> Values:
    return {"pcie_link_generation_max": pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)}


def _pcie_width(handle: Handle) -> Values:
    return {"pcie_link_width_current": pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)}


def _pcie_width_limit(handle: Handle) -> Values:
    return {"pcie_link_width_max": pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)}


def _pcie_limit(handle: Handle) -> Values:
    """The maximum generation, since idle links clock down; the current width, since lanes that are lost stay lost."""
    width = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)
    lane = PCIE_LANE_BYTES_PER_SECOND.get(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    return {"pcie_limit_bytes_per_second": width * lane} if width and lane else {}


def _pcie_replays(handle: Handle) -> Values:
    return {"pcie_replays": pynvml.nvmlDeviceGetPcieReplayCounter(handle)}


def _dram_limit(handle: Handle) -> Values:
    """Bus width x maximum memory clock x 2, since the memory transfers on both edges of its clock."""
    width = pynvml.nvmlDeviceGetMemoryBusWidth(handle)
    clock = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)
    if not width or not clock:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return {"dram_limit_bytes_per_second": width / 8 * clock * _MHZ * 2}


def _nvlink(handle: Handle) -> Values:
    present, active = count_nvlinks(handle)
    return {"nvlink_links_present": present, "nvlink_links_active": active}


def _nvlink_limit(handle: Handle) -> Values:
    """Links present x the speed of one, which the driver gives in MB/s per direction."""
    links = _nvlinks(handle)
    speed = _nvlink_speed(handle, links) * 1e6
    return {"nvlink_limit_bytes_per_second": len(links) * speed} if speed else {}


def _nvlink_speed(handle: Handle, links: Mapping[int, bool]) -> float:
    """The speed that all links have, which Hopper's driver does not tell, or else the highest of those that are up."""
    with contextlib.suppress(pynvml.NVMLError):
        if common := field_value(handle, pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON):
            return common
    speed_of = pynvml.NVML_FI_DEV_NVLINK_GET_SPEED
    return max((field_value(handle, speed_of, link) for link, is_active in links.items() if is_active), default=0.0)


def _c2c_limit(handle: Handle) -> Values:
    links = field_value(handle, pynvml.NVML_FI_DEV_C2C_LINK_COUNT)
    if not links:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return {"c2c_limit_bytes_per_second": links * field_value(handle, pynvml.NVML_FI_DEV_C2C_LINK_GET_MAX_BW) * 1e6}


def _nvlink_errors(handle: Handle) -> dict[Reading, Counts]:
    """Error counters of all links that tell them; one that an active link does not offer is absent."""
    links = _nvlinks(handle)
    told = {reading: _nvlink_error_counts(handle, links, kind) for kind, reading in _NVLINK_ERRORS}
    values = {reading: counts for reading, counts in told.items() if counts is not None}
    if not values:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return values


def _nvlink_error_counts(handle: Handle, links: Mapping[int, bool], kind: int) -> Counts | None:
    counts: Counts = {}
    for link, is_active in links.items():
        try:
            counts[link] = int(pynvml.nvmlDeviceGetNvLinkErrorCounter(handle, link, kind))
        except pynvml.NVMLError as error:
            if error.value not in UNSUPPORTED:
                raise
            if is_active:
                return None
    return counts


def _ecc(severity: int, scope: int, reading: Reading) -> Callable[[Handle], Values]:
    return lambda handle: {reading: int(pynvml.nvmlDeviceGetTotalEccErrors(handle, severity, scope))}


def _row_remap(handle: Handle) -> Values:
    _, _, pending, failed = pynvml.nvmlDeviceGetRemappedRows(handle)
    return {"row_remap_pending": pending, "row_remap_failed": failed}


def _recovery_action(handle: Handle) -> Values:
    return {"recovery_action": field_value(handle, pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION)}


BOARD_GROUPS: Final = (
    Group("utilization", SECOND, _utilization),
    Group("memory", SECOND, _memory),
    Group("power", SECOND, _power),
    Group("module power", SECOND, _module_power),
    Group("temperature", SECOND, _gpu_temperature),
    Group("memory temperature", SECOND, _memory_temperature),
    Group("SM clock", SECOND, _clock(pynvml.NVML_CLOCK_SM, "clock_sm_hertz")),
    Group("memory clock", SECOND, _clock(pynvml.NVML_CLOCK_MEM, "clock_memory_hertz")),
    Group("video clock", SECOND, _clock(pynvml.NVML_CLOCK_VIDEO, "clock_video_hertz")),
    Group("clock event reasons", SECOND, _clock_events),
    Group("PCIe generation", SELDOM, _pcie_generation),
    Group("PCIe width", SELDOM, _pcie_width),
    Group("PCIe bandwidth limit", SELDOM, _pcie_limit),
    Group("energy", RARELY, _energy),
    Group("power limit", SELDOM, _power_limit),
    Group("PCIe replays", RARELY, _pcie_replays),
    Group("NVLink state", SELDOM, _nvlink),
    Group("NVLink errors", RARELY, _nvlink_errors),
    Group("ECC errors (corrected volatile)", SELDOM, _ecc(_CORRECTED, _VOLATILE, "ecc_corrected_volatile")),
    Group("ECC errors (corrected aggregate)", SELDOM, _ecc(_CORRECTED, _AGGREGATE, "ecc_corrected_aggregate")),
    Group("ECC errors (uncorrected volatile)", SELDOM, _ecc(_UNCORRECTED, _VOLATILE, "ecc_uncorrected_volatile")),
    Group("ECC errors (uncorrected aggregate)", SELDOM, _ecc(_UNCORRECTED, _AGGREGATE, "ecc_uncorrected_aggregate")),
    Group("row remapping", SELDOM, _row_remap),
    Group("recovery action", SELDOM, _recovery_action),
    Group("slowdown temperature", ONCE, _slowdown_temperature),
    Group("SM clock limit", ONCE, _clock_limit(pynvml.NVML_CLOCK_SM, "clock_limit_sm_hertz")),
    Group("memory clock limit", ONCE, _clock_limit(pynvml.NVML_CLOCK_MEM, "clock_limit_memory_hertz")),
    Group("video clock limit", ONCE, _clock_limit(pynvml.NVML_CLOCK_VIDEO, "clock_limit_video_hertz")),
    Group("maximum PCIe generation", ONCE, _pcie_generation_limit),
    Group("maximum PCIe width", ONCE, _pcie_width_limit),
    Group("DRAM bandwidth limit", ONCE, _dram_limit),
    Group("NVLink bandwidth limit", RARELY, _nvlink_limit),
    Group("C2C bandwidth limit", ONCE, _c2c_limit),
)
"""Everything of a whole board."""

_PHYSICAL: Final = ("PCIe", "NVLink", "ECC", "row")
VGPU_GROUPS: Final = tuple(group for group in BOARD_GROUPS if not any(word in group.name for word in _PHYSICAL))
"""A vGPU guest's share: each call on the physical board would fill the guest's kernel log with a line."""


def instance_groups(parent: Handle, peak_share: float) -> tuple[Group, ...]:
    """What belongs to one MIG instance: its memory, and its share of the parent's DRAM bandwidth."""

    def dram_limit(_: Any) -> Values:
        whole = _dram_limit(parent)["dram_limit_bytes_per_second"]
        if not peak_share:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return {"dram_limit_bytes_per_second": whole * peak_share}

    return (Group("memory", SECOND, _memory), Group("DRAM bandwidth limit", ONCE, dram_limit))
