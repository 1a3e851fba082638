"""Text of the workload's own making, made fit for a label."""

from __future__ import annotations

import hashlib
from typing import Final

MAX_BYTES: Final = 128
"""Longest text of a job, as UTF-8: sites limit a label's value to 200 bytes and drop the whole target above."""
MAX_COMM_BYTES: Final = 64
"""Longest name of a program."""
_HASH_DIGITS: Final = 8


def bounded(text: str, limit: int = MAX_BYTES) -> str:
    """Valid UTF-8 of at most `limit` bytes, without control bytes and other unprintable ones.

    What is cut ends in `~` and 8 digits of the whole text's hash, so that two long texts stay two.
    """
    if not text or (text.isascii() and text.isprintable() and len(text) <= limit):
        return text
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    encoded = shown.encode()
    if len(encoded) <= limit:
        return shown
    suffix = "~" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_DIGITS]
    return encoded[: limit - len(suffix)].decode("utf-8", "ignore") + suffix
