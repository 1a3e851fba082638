"""Text of strangers as labels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_hpc_exporter.sources.kubernetes.text import clean


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pod-0", "pod-0"),
        ("a\udcff", "a\ufffd"),
        (b"\xff", "\ufffd"),
        ("\ud800", "\ufffd"),
        ("a\n\x00\u202e", "a" + 3 * "\ufffd"),
    ],
)
def test_h01_whatever_is_not_unicode_is_replaced(text: str | bytes, expected: str) -> None:
    """H01: and so are control characters."""
    assert clean(text) == expected


@given(st.text() | st.binary(), st.integers(20, 200))
def test_h04_any_text_is_bounded(text: str | bytes, limit: int) -> None:
    """H04: at most so many bytes of valid UTF-8."""
    assert len(clean(text, limit).encode()) <= limit


def test_h04_long_texts_stay_apart() -> None:
    """H04: by a hash."""
    assert clean("x" * 4_000 + "a") != clean("x" * 4_000 + "b")
    assert clean("x" * 200) == "x" * 200
