"""Entries of the driver's process lists, byte by byte."""

from __future__ import annotations

import struct

import pytest

from gpu_hpc_exporter.sources.nvml.processes import _decode, _UntrueError

GIB = 1 << 30
NA = 2**32 - 1
TOTAL = 80 * GIB
ROOM = 64 * 64


def entry(pid: int, memory: int, stride: int, protected: int = 0) -> bytes:
    """One entry as a driver of that size writes it."""
    return struct.pack("=I4xQIIQ", pid, memory, NA, NA, protected)[:stride]


def buffer(stride: int, fill: bytes, count: int = 3, protected: int = 0) -> bytes:
    """What a driver leaves of our buffer."""
    written = b"".join(entry(4101 + n, (n + 1) * GIB, stride, protected) for n in range(count))
    return written + fill * (ROOM - len(written))


@pytest.mark.parametrize("stride", [16, 24, 32])
@pytest.mark.parametrize("fill", [b"\xa5", b"\0"])
@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_a09_the_size_is_seen_or_proved(stride: int, fill: bytes, count: int) -> None:
    """A09: also where a driver clears the whole buffer first."""
    expected = tuple((4101 + n, (n + 1) * GIB) for n in range(count))
    assert _decode(buffer(stride, fill, count), count, TOTAL, None) == expected


def test_a09_what_could_be_several_things_is_none() -> None:
    """A09: where a wrong size also gives entries that can be true, nobody can tell which are."""
    odd = struct.pack("=I4xQII", 4101, GIB, NA, NA) + struct.pack("=I4xQII", 7, 9, 3, 0)
    assert len(odd) == 48
    with pytest.raises(_UntrueError):
        _decode((odd + b"\0" * ROOM)[:ROOM], 2, TOTAL, None)


def test_a09_the_misreadings_of_the_field_case() -> None:
    """A09: what was read with the wrong size there, (0, 4102) or (2147483648, 2^64-1), is refused here."""
    for pid, memory in ((0, 4102), (NA, 0), (2147483648, 2**64 - 1)):
        raw = entry(4101, GIB, 24) + entry(pid, memory, 24) + b"\xa5" * ROOM
        with pytest.raises(_UntrueError):
            _decode(raw, 2, TOTAL, None)
