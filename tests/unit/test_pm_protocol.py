"""What exporter and helper say to each other: any split of the bytes, and what no helper of ours would send."""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_hpc_exporter.model import COUNT_QUANTITIES, STATES, CountQuantity, Incident, Quantity, RatioQuantity
from gpu_hpc_exporter.sources.pm_sampling.metric_sets import Part
from gpu_hpc_exporter.sources.pm_sampling.protocol import (
    MAX_FRAME,
    MAX_TEXT,
    Alive,
    FrameReader,
    FromHelper,
    GpuState,
    Happened,
    Order,
    ProtocolError,
    Ready,
    Rejected,
    Sampling,
    Target,
    Unusable,
    Windows,
    decode_order,
    encode,
    take_frame,
)

QUANTITIES = (*get_args(RatioQuantity), *get_args(CountQuantity))

text = st.text(max_size=20)
times = st.integers(0, 2**62)


@st.composite
def windows(draw: st.DrawFn) -> Windows:
    """Windows of some quantities, in columns."""
    count = draw(st.integers(0, 4))

    def column(items: st.SearchStrategy[Any]) -> Any:
        return draw(st.lists(items, min_size=count, max_size=count))

    quantities: list[Quantity] = draw(st.lists(st.sampled_from(QUANTITIES), unique=True, max_size=3))
    values = {
        quantity: column(st.floats(0.0, 2.0**53 if quantity in COUNT_QUANTITIES else 1.0)) for quantity in quantities
    }
    return Windows("GPU-1", column(times), column(st.integers(1, 10**12)), values)


messages: st.SearchStrategy[FromHelper] = st.one_of(
    st.builds(Ready, text, text),
    st.builds(Unusable, st.sampled_from(STATES), text),
    st.builds(Alive, text, text),
    st.builds(GpuState, text, st.sampled_from(STATES), text),
    st.builds(Sampling, text, times, st.sampled_from(["", "hit_rate"])),
    st.builds(Happened, text, st.sampled_from(get_args(Incident))),
    st.builds(Rejected, text, st.sampled_from(get_args(Part)), st.sampled_from(["nan", "negative"])),
    windows(),
)


def frame(body: bytes) -> bytes:
    """A body with its length before it."""
    return struct.pack("<I", len(body)) + body


def packed(**fields: Any) -> bytes:
    """A frame with a map that need not be one of ours."""
    return frame(msgspec.msgpack.encode(fields))


def feed(data: bytes) -> list[FromHelper]:
    """What a new reader makes of some bytes."""
    return list(FrameReader().feed(data))


@given(st.lists(messages, max_size=5), st.data())
def test_messages_survive_any_split_of_the_bytes(sent: list[FromHelper], data: st.DataObject) -> None:
    """What goes in comes out, in order, however the pipe cuts it; what is cut off at the end is not made up."""
    stream = b"".join(encode(message) for message in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader = FrameReader()
    heard = [
        message
        for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)
        for message in reader.feed(stream[begin:end])
    ]
    assert heard == sent
    if stream:
        assert feed(stream[:-1]) == sent[:-1]


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_or_nothing(data: bytes) -> None:
    """Whatever comes, the reader raises no other error, with and without a right length before it."""
    for stream in (data, frame(data)):
        heard: list[FromHelper] = []
        with suppress(ProtocolError):
            heard = feed(stream)
        assert all(isinstance(message, get_args(FromHelper)) for message in heard)


WINDOWS = {"type": "windows", "uuid": "GPU-1", "ends_ns": [5], "durations_ns": [1], "values": {"sm_active": [0.5]}}
BAD = {
    "an absurd length": b"\xff\xff\xff\x7f",
    "one byte too long": struct.pack("<I", MAX_FRAME + 1),
    "an empty frame": frame(b""),
    "nested for ever": frame(b"\x82\xa4type\xa5alive\xa1x" + b"\x91" * 100_000 + b"\x01"),
    "an order": encode(Order(1_000_000, [])),
    "no type": packed(uuid="GPU-1"),
    "a long text": packed(type="state", uuid="", state="failed", reason="x" * (MAX_TEXT + 1)),
    "a state of its own": packed(type="state", uuid="", state="fine"),
    "a reading of its own": packed(type="rejected", uuid="", reading="evil", reason="nan"),
    "an incident of its own": packed(type="happened", uuid="", incident="evil"),
    "no UTF-8": frame(b"\x82\xa4type\xa5alive\xa5doing\xa1\xff"),
    "columns of different lengths": packed(**WINDOWS | {"values": {"sm_active": [0.5, 0.5]}}),
    "a window without values for some quantity": packed(**WINDOWS | {"values": {"sm_active": []}}),
    "a window of no time": packed(**WINDOWS | {"durations_ns": [0]}),
    "a window of years": packed(**WINDOWS | {"durations_ns": [10**17]}),
    "time before the machine": packed(**WINDOWS | {"ends_ns": [-1]}),
    "NaN": packed(**WINDOWS | {"values": {"sm_active": [float("nan")]}}),
    "infinity": packed(**WINDOWS | {"values": {"sm_active": [float("inf")]}}),
    "a negative value": packed(**WINDOWS | {"values": {"sm_active": [-0.5]}}),
    "a ratio above 1": packed(**WINDOWS | {"values": {"sm_active": [1.001]}}),
    "a count beyond what a float holds": packed(**WINDOWS | {"values": {"l2_missed_sectors": [2.0**54]}}),
    "a quantity of its own": packed(**WINDOWS | {"values": {"evil": [0.5]}}),
    "an array that claims to be huge": frame(b"\x82\xa4type\xa7windows\xa7ends_ns\xdd\xff\xff\xff\xff"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_no_helper_of_ours_sends(what: str) -> None:
    """The helper is not trusted: each of these is an error of the protocol, none goes further."""
    assert feed(packed(**WINDOWS)) != []
    with pytest.raises(ProtocolError):
        feed(BAD[what])


def test_an_order_comes_through() -> None:
    """What the exporter orders is what the helper does; what is none is refused."""
    order = Order(10_000_000, [Target("GPU-1", ("pcie", "nvlink"), has_gpm=True)])
    data = bytearray(encode(order)[:-1])
    assert take_frame(data) is None
    data += encode(order)[-1:]
    body = take_frame(data)
    assert body is not None
    assert decode_order(body) == order
    assert data == b""
    for bad in (
        b"",
        body[:-1],
        msgspec.msgpack.encode({"type": "order", "interval_ns": 1, "targets": []}),
        b"\x91" * 9**5,
    ):
        with pytest.raises(ProtocolError):
            decode_order(bad)
