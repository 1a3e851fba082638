"""Which of the driver's numbers can be true: the one place that rejects sentinels and impossible values."""

from __future__ import annotations

import math
from typing import Final, Literal

from gpu_hpc_exporter.model import COUNT_QUANTITIES, Quantity, Reading

Problem = Literal["nan", "negative", "above_range", "sentinel"]

ROUNDING: Final = 1.005
"""A ratio up to here is rounding and counts as 1; anything above is wrong and is rejected."""

_INTEGER_SENTINELS: Final = frozenset({2**64 - 1, 2**32 - 1, 2**63 - 1, 2**31 - 1})
"""NVML's marks for "not available"."""
_BLANKS: Final = ((0x7FFFFFF0, 0x7FFFFFFF), (0x7FFFFFFFFFFFFFF0, 2**64), (140737488355328.0, 140737488355342.0))
"""DCGM's marks for blank, unsupported, denied and not found, as int32, int64 and double, all of which have been
seen exported as readings. 64-bit marks are also recognised after the rounding of a conversion to double."""

_EXACT: Final = float(2**53)
_UPPER_BY_SUFFIX: Final[tuple[tuple[str, float], ...]] = (
    ("_ratio", ROUNDING),
    ("_celsius", 200.0),
    ("_watts", 20_000.0),
    ("_joules", 1e13),  # 700 W for 450 years
    ("_hertz", 20e9),
    ("_bytes", float(2**46)),
    ("_bytes_per_second", 1e15),
    ("recovery_action", 7.0),  # nvmlDeviceGpuRecoveryAction_t of nvml.h; another number is no action that we know
)
"""Far above any device that exists, far below any sentinel."""


def problem_of_reading(reading: Reading, value: float) -> Problem | None:
    """Why a slow reading cannot be true, or None. Temperatures alone may be below zero."""
    lower = -100.0 if reading.endswith("_celsius") else 0.0
    upper = next((limit for suffix, limit in _UPPER_BY_SUFFIX if reading.endswith(suffix)), _EXACT)
    return _problem(value, lower, upper)


def problem_of_quantity(quantity: Quantity, value: float) -> Problem | None:
    """Why a window's quantity cannot be true, or None. Amounts are our own products: no sentinel among them."""
    upper = _EXACT if quantity in COUNT_QUANTITIES else 1.0
    return None if 0.0 <= value <= upper else problem_of(value, upper)


def problem_of(value: float, upper: float) -> Problem:
    """Why a value outside 0 to `upper` cannot be true."""
    return _problem(value, 0.0, upper) or "above_range"


def _problem(value: float, lower: float, upper: float) -> Problem | None:
    if math.isnan(value):
        return "nan"
    if value in _INTEGER_SENTINELS or any(low <= value <= high for low, high in _BLANKS):
        return "sentinel"
    if value < lower:
        return "negative"
    return "above_range" if value > upper else None


class RisingCounter:
    """A counter of the driver that goes on from where it was when the driver sets it back.

    A step back is a driver's restart, or the next round of a looping recording; `rate()` would take it for a
    reset and add the whole value.
    """

    def __init__(self) -> None:
        self._shown = 0.0
        self._offset = 0.0
        self._total = 0.0

    def advance(self, shown: float) -> float:
        """What to serve now that the driver shows this; exactly that until the first step back."""
        self._offset += max(0.0, self._shown - shown)
        self._shown = shown
        self._total = max(self._total, shown + self._offset)  # rounding of the offset must not step back either
        return self._total
