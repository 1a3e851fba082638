"""Data from elsewhere, as its parsers may meet it: anything at all, and what is valid but for some damage.

Each run of the tests tries the same examples, so that a failure is the change's and no chance. To look further:

    FUZZ_FACTOR=100 .venv/bin/python -m pytest tests/unit/fuzz --timeout 0

tries that many times as many, other ones each time. What it finds is shrunk and printed; its minimal example is to be
pinned by `@example` beside the correction.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

T = TypeVar("T")

FACTOR: Final = int(os.environ.get("FUZZ_FACTOR", "1"))
MAX_DAMAGED: Final = 1 << 17
"""Damage makes nothing longer than that; what a parser does with more is for examples of their own."""
_PLACES: Final = 1 << 16
_CHUNKS: Final = (
    *(b"\0", b"\n", b"\r", b"\x0b", b" ", b"\t", b'"', b"'", b"\\", b"/", b":", b"=", b",", b";", b"#", b"%", b"&"),
    *(b"{", b"}", b"[", b"]", b"(", b")", b"<", b">", b"-", b".", b"*", b"0", b"-1", b"9" * 30, b"1e999", b"NaN"),
    *(b"null", b"true", b"[[[[[[[[", b'{"a":', b"\xff", b"\xc3", b"\xed\xa0\x80", b"\\ud800", b"\xff\xff\xff\x7f"),
    *("\N{ARABIC-INDIC DIGIT SEVEN}".encode(), "\N{RIGHT-TO-LEFT OVERRIDE}".encode(), "\N{LINE SEPARATOR}".encode()),
    *("\N{NEXT LINE}".encode(), b"\x7f", b"\x1b[2J", b"..", b"/../"),
)
"""What separates, nests, ends and escapes in one format or another, and numbers that are none."""


@dataclass(frozen=True)
class _Damage:
    """One mistake in data. place: in parts of its length. `chunk` `count` times, or as many of the data's own bytes."""

    kind: str
    place: int
    size: int
    chunk: bytes
    count: int

    def apply(self, data: bytes) -> bytes:
        at = self.place * (len(data) + 1) // _PLACES
        end = at + self.size
        match self.kind:
            case "flip":
                return data[:at] + bytes(octet ^ (1 << self.size % 8) for octet in data[at : at + 1]) + data[at + 1 :]
            case "overwrite":
                return data[:at] + self.chunk + data[at + len(self.chunk) :]
            case "insert":
                return data[:at] + self.chunk * self.count + data[at:]
            case "truncate":
                return data[:at]
            case "drop":
                return data[:at] + data[end:]
            case _:
                return data[:end] + data[at:end] * self.count + data[end:]


def damaged(*valid: bytes, tokens: Sequence[bytes] = (), limit: int = MAX_DAMAGED) -> st.SearchStrategy[bytes]:
    """One of these, mostly with some bytes flipped, overwritten, cut off, left out or repeated, few or many times.

    tokens: words of the format, which get into odd places besides what is odd in every format. limit: of its length.
    """
    damage = st.builds(
        _Damage,
        st.sampled_from(("flip", "overwrite", "insert", "truncate", "drop", "repeat")),
        st.integers(0, _PLACES - 1),
        st.integers(0, 64),
        st.sampled_from((*tokens, *_CHUNKS)) | st.binary(min_size=1, max_size=4),
        st.sampled_from((1, 1, 2, 3, 70, 2000)),
    )
    return st.builds(_damaged, st.sampled_from(valid), st.lists(damage, max_size=4), st.just(limit))


def _damaged(data: bytes, damages: Sequence[_Damage], limit: int) -> bytes:
    for damage in damages:
        data = damage.apply(data)[:limit]
    return data


def foreign(*valid: bytes, tokens: Sequence[bytes] = (), limit: int = MAX_DAMAGED) -> st.SearchStrategy[bytes]:
    """Anything at all, or one of these with damage."""
    some = damaged(*valid, tokens=tokens, limit=limit)
    return st.binary(max_size=200) | some | some


_ODD: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from((-1, 1 << 31, 1 << 63, 1 << 64, 10**80, 1e308, -1e308, 1e-320, "", "x" * 5000, "\0", "\x1b[2J"))
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def crooked(*valid: object) -> st.SearchStrategy[Any]:
    """One of these trees of dictionaries and lists, with other values in some places: of other types, odd, or none."""
    changes = st.lists(st.tuples(st.integers(0, _PLACES - 1), _ODD | st.just(_GONE)), max_size=3)
    return st.builds(_bent, st.sampled_from(valid), changes)


_GONE: Final = object()
"""In place of what is left out."""


def _bent(tree: object, changes: Sequence[tuple[int, object]]) -> object:
    for place, value in changes:
        found, _ = _replaced(tree, place * _size(tree) // _PLACES, value)
        tree = None if found is _GONE else found
    return tree


def _size(tree: object) -> int:
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return 1 + sum(map(_size, inner))


def _replaced(tree: object, place: int, value: object) -> tuple[object, int]:
    """The tree with another value at a place, counted in the order in which they are written; how many are left."""
    if place == 0:
        return value, -1
    place -= 1
    if not isinstance(tree, dict | list):
        return tree, place
    pairs = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree))
    for number, (key, inner) in enumerate(pairs):
        if place < 0:
            break
        found, place = _replaced(inner, place, value)
        pairs[number] = (key, found)
    kept = [(key, inner) for key, inner in pairs if inner is not _GONE]
    return dict(kept) if isinstance(tree, dict) else [inner for _, inner in kept], place


def fuzz(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Try so many examples, times FUZZ_FACTOR. However long one takes: a machine that is busy is no finding."""
    tried: Callable[[Callable[..., None]], Callable[..., None]] = settings(
        max_examples=examples * FACTOR,
        derandomize=FACTOR == 1,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return tried


def outcome(run: Callable[[], T], *errors: type[Exception]) -> tuple[T | None, str]:
    """What it gives, or None and what one of these errors says."""
    try:
        return run(), ""
    except errors as error:
        return None, str(error) or type(error).__name__


@contextmanager
def soon(seconds: float = 5.0) -> Iterator[None]:
    """What is inside takes no more CPU time than that: ample for what is linear, far from enough for what is not."""
    began = time.process_time()
    yield
    assert time.process_time() - began < seconds


def is_label(text: str, limit: int) -> bool:
    """Whether a text can be a label's value of so many bytes: valid UTF-8 that can be printed."""
    return text.isprintable() and len(text.encode()) <= limit
