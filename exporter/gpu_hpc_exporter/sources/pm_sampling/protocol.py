"""What the exporter and its helper process say to each other over the helper's stdin and stdout.

A frame is a 4-byte little-endian length and a MessagePack map. The helper may have more privilege than the
exporter and a library of its own that misbehaves, so neither side trusts the other's frames: they are bounded and
checked against these types.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Final, Literal

import msgspec

from gpu_hpc_exporter.model import COUNT_QUANTITIES, Incident, L2Definition, Link, Quantity, State
from gpu_hpc_exporter.sources.pm_sampling.metric_sets import Part

MAX_FRAME: Final = 16 << 20
MAX_TEXT: Final = 400
_LENGTH: Final = struct.Struct("<I")

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Duration = Annotated[int, msgspec.Meta(ge=1, le=3_600_000_000_000)]
MAX_COUNT: Final = float(2**53)
Value = Annotated[float, msgspec.Meta(ge=0.0, le=1e30)]


class Target(msgspec.Struct, frozen=True):
    """A GPU to sample."""

    uuid: Text
    links: tuple[Link, ...]
    has_gpm: bool


class Order(msgspec.Struct, frozen=True, tag="order"):
    """Exporter to helper, once, at the start: sample these GPUs until stdin ends."""

    interval_ns: Annotated[int, msgspec.Meta(ge=1_000_000, le=60_000_000_000)]
    targets: list[Target]


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The library is loaded."""

    library: Text
    version: Text


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """There will be no windows of any GPU, and why."""

    state: State
    reason: Text


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """About to do something for this GPU (or "" for none) that may take long or hang."""

    doing: Text = ""
    uuid: Text = ""


class GpuState(msgspec.Struct, frozen=True, tag="state"):
    """What became of one GPU's sampling."""

    uuid: Text
    state: State
    reason: Text = ""


class Sampling(msgspec.Struct, frozen=True, tag="sampling"):
    """How a GPU is sampled from now on."""

    uuid: Text
    interval_ns: Nanoseconds
    l2_definition: L2Definition


class Happened(msgspec.Struct, frozen=True, tag="happened"):
    """To be counted."""

    uuid: Text
    incident: Incident


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """A value that cannot be true was left out of a window."""

    uuid: Text
    reading: Part
    reason: Literal["nan", "negative", "above_range", "sentinel"]


class Windows(msgspec.Struct, frozen=True, tag="windows"):
    """Windows of one GPU in columns: their ends on CLOCK_MONOTONIC, lengths, and values by quantity.

    Windows that lack a value have another set of columns, so they come in a frame of their own.
    """

    uuid: Text
    ends_ns: list[Nanoseconds]
    durations_ns: list[Duration]
    values: dict[Quantity, list[Value]]

    def __post_init__(self) -> None:
        lengths = {len(self.ends_ns), len(self.durations_ns), *map(len, self.values.values())}
        if len(lengths) > 1:
            raise ValueError("columns of different lengths")
        for quantity, column in self.values.items():
            if max(column, default=0.0) > (MAX_COUNT if quantity in COUNT_QUANTITIES else 1.0):
                raise ValueError(f"{quantity} above what can be true")


FromHelper = Ready | Unusable | Alive | GpuState | Sampling | Happened | Rejected | Windows

_encoder: Final = msgspec.msgpack.Encoder()
_from_helper: Final = msgspec.msgpack.Decoder(FromHelper)
_order: Final = msgspec.msgpack.Decoder(Order)


class ProtocolError(Exception):
    """The other side sent what is no frame of ours."""


def encode(message: FromHelper | Order) -> bytes:
    """A message as a frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into messages of the helper."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[FromHelper]:
        """The messages that are complete now. Raises ProtocolError; the stream is of no use after."""
        self._buffer += data
        while (body := take_frame(self._buffer)) is not None:
            try:
                yield _from_helper.decode(body)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ProtocolError(f"the helper sent no message of ours: {str(error)[:MAX_TEXT]}") from error


def take_frame(buffer: bytearray) -> bytes | None:
    """Cut the first frame's body off, None while it is not complete. Raises ProtocolError for an absurd length."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > MAX_FRAME:
        raise ProtocolError(f"a frame of {length} bytes: more than {MAX_FRAME}")
    if len(buffer) < _LENGTH.size + length:
        return None
    body = bytes(buffer[_LENGTH.size : _LENGTH.size + length])
    del buffer[: _LENGTH.size + length]
    return body


def decode_order(body: bytes) -> Order:
    """The order in a frame's body. Raises ProtocolError."""
    try:
        return _order.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"no order of ours: {str(error)[:MAX_TEXT]}") from error
