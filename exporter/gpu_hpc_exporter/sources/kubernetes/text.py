"""Text of strangers, made fit to be a label's value."""

from __future__ import annotations

import hashlib
from typing import Final

MAX_BYTES: Final = 200
"""Some sites refuse a whole scrape for one longer value."""
_HASH_DIGITS: Final = 8


def clean(text: str | bytes, limit: int = MAX_BYTES) -> str:
    """Valid UTF-8 without control characters of at most `limit` bytes; what is cut is told apart by a hash."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "replace")
    if not text.isprintable():  # lone surrogates are not printable either
        text = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    encoded = text.encode()
    if len(encoded) <= limit:
        return text
    digest = hashlib.sha256(encoded).hexdigest()[:_HASH_DIGITS]
    return f"{encoded[: limit - _HASH_DIGITS - 1].decode('utf-8', 'ignore')}-{digest}"
