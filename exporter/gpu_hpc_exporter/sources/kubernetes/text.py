"""Text of strangers, made fit to be a label's value."""

from __future__ import annotations

from typing import Final

from gpu_hpc_exporter.text import bounded

MAX_BYTES: Final = 200
"""Some sites refuse a whole scrape for one longer value."""


def clean(text: str | bytes, limit: int = MAX_BYTES) -> str:
    """Text as `bounded` leaves it; bytes that are not UTF-8 spoil nothing but themselves."""
    return bounded(text.decode("utf-8", "replace") if isinstance(text, bytes) else text, limit)
