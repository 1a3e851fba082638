"""What NVIDIA's libraries and the helper process that loads one of them answer."""

from __future__ import annotations

import re
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pynvml
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_hpc_exporter.model import COUNT_QUANTITIES, Window
from gpu_hpc_exporter.sources.nvml import gpm, inventory, library, processes, readings
from gpu_hpc_exporter.sources.nvml.library import DriverCallError
from gpu_hpc_exporter.sources.pm_sampling import libraries
from gpu_hpc_exporter.sources.pm_sampling.protocol import (
    MAX_COUNT,
    MAX_FRAME,
    MAX_TEXT,
    FrameReader,
    FromHelper,
    Order,
    ProtocolError,
    Target,
    Windows,
    decode_order,
    encode,
    take_frame,
)
from gpu_hpc_exporter.sources.values import problem_of_quantity, problem_of_reading
from unit.fuzz.foreign import crooked, foreign, fuzz, outcome, soon
from unit.objects import G0

# The helper's frames

MESSAGES: tuple[dict[str, Any], ...] = (
    {"type": "ready", "library": "/x/libcupti.so.12", "version": "12.9"},
    {"type": "unusable", "state": "failed", "reason": "why"},
    {"type": "alive", "doing": "decode", "uuid": G0.uuid},
    {"type": "state", "uuid": G0.uuid, "state": "active", "reason": ""},
    {"type": "sampling", "uuid": G0.uuid, "interval_ns": 1_000_000, "l2_definition": "hit_rate"},
    {"type": "happened", "uuid": G0.uuid, "incident": "overflow"},
    {"type": "rejected", "uuid": G0.uuid, "reading": "sm_active", "reason": "nan"},
    {
        "type": "windows",
        "uuid": G0.uuid,
        "ends_ns": [5, 6],
        "durations_ns": [1, 1],
        "values": {"sm_active": [0.5, 1.0], "dram_active": [0.0, 0.25]},
    },
)


def framed(body: bytes) -> bytes:
    """With its length before it."""
    return struct.pack("<I", len(body)) + body


def packed(message: object) -> bytes:
    """As MessagePack in a frame. A dictionary's numbers may be such as no honest helper sends."""
    try:
        return framed(msgspec.msgpack.encode(message))
    except OverflowError:  # no integer of MessagePack is so large
        return framed(b"\xc1")


STREAM = b"".join(packed(message) for message in MESSAGES)
LENGTHS = tuple(struct.pack("<I", length) for length in (0, 1, MAX_FRAME, MAX_FRAME + 1, 1 << 31))
FLOATS = tuple(b"\xcb" + struct.pack(">d", value) for value in (float("nan"), float("inf"), -0.0, 1e300))


def check_message(message: FromHelper) -> None:
    """What is told is within its types, and a window is whole."""
    assert isinstance(message, get_args(FromHelper))
    for text in msgspec.structs.astuple(message):
        assert not isinstance(text, str) or len(text) <= MAX_TEXT
    if isinstance(message, Windows):
        assert len(message.ends_ns) == len(message.durations_ns)
        for quantity, column in message.values.items():
            assert len(column) == len(message.ends_ns)
            assert all(0 <= value <= (MAX_COUNT if quantity in COUNT_QUANTITIES else 1.0) for value in column)


@given(
    foreign(STREAM, *map(packed, MESSAGES), tokens=(*LENGTHS, *FLOATS, b"\xde\xff\xff", b"\xdd\xff\xff\xff\xff"))
    | st.lists(crooked(*MESSAGES).map(packed), max_size=3).map(b"".join),
    st.integers(1, 5000),
)
@fuzz(400)
@example(framed(b"\x82\xa4type\xa5alive\xa1x" + b"\x91" * 100_000), 5000)
@example(framed(b"\x81" * 100_000), 5000)
@example(packed({**MESSAGES[-1], "values": {"sm_active": [float("nan"), 0.0]}}), 5000)
@example(packed({**MESSAGES[-1], "values": {}}), 5000)
def test_frames(stream: bytes, step: int) -> None:
    """Any bytes, in pieces of any size: whole messages of ours and then perhaps an error, the same ones each time."""

    def heard(step: int) -> tuple[list[FromHelper], bool]:
        reader, messages = FrameReader(), list[FromHelper]()
        pieces = (stream[start : start + step] for start in range(0, len(stream), step))
        _, problem = outcome(
            lambda: messages.extend(one for piece in pieces for one in reader.feed(piece)), ProtocolError
        )
        assert len(problem) < 2 * MAX_TEXT
        return messages, bool(problem)

    told, is_broken = heard(step)
    assert (told, is_broken) == heard(len(stream) + 1)
    for message in told:
        check_message(message)


ORDER = Order(1_000_000, [Target(G0.uuid, ("pcie",), has_gpm=True)])


@given(foreign(encode(ORDER), tokens=LENGTHS) | crooked(msgspec.to_builtins(ORDER)).map(packed))
@fuzz(200)
@example(framed(b"\x91" * 100_000))
def test_orders(stream: bytes) -> None:
    """Any bytes on the helper's stdin: an order within its bounds, an error, or nothing yet."""
    buffer = bytearray(stream)
    with suppress(ProtocolError):
        body = take_frame(buffer)
        if body is None:
            assert len(stream) < 4 + MAX_FRAME
            return
        order = decode_order(body)
        assert 1_000_000 <= order.interval_ns <= 60_000_000_000
        assert decode_order(encode(order)[4:]) == order


# Where CUPTI lies

TOOLKIT = b'{"cuda": {"version": "12.9.1"}, "cuda_cupti": {"name": "CUDA CUPTI", "version": "12.9.79"}}'


@given(foreign(TOOLKIT, tokens=(b'"cuda_cupti":', b'"version":', b"12.9")))
@fuzz(150)
@example(b"[" * 100_000)
@example(b'{"cuda_cupti": {"version": "' + b"9" * 5000 + b'.9"}}')
@example(b'{"cuda_cupti": {"version": ' + b"9" * 5000 + b"}}")
def test_versions_of_toolkits(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Any version.json: a version of two numbers, or none."""
    folder = tmp_path_factory.getbasetemp() / "toolkit"
    folder.mkdir(exist_ok=True)
    (folder / "version.json").write_bytes(content)
    found = libraries._toolkit_version(folder)  # noqa: SLF001  what the file reaches first
    assert found is None or (len(found) == 2 and min(found) >= 0)


METADATA = b"Metadata-Version: 2.1\nName: nvidia-cuda-cupti-cu12\nVersion: 12.9.79\nAuthor: M\xc3\xbcller\n\nText\n"
RECORD = b"nvidia/cuda_cupti/lib/libcupti.so.12,sha256=x,1\nnvidia/__init__.py,,\n"


@pytest.fixture(scope="module")
def site() -> Iterator[Callable[[bytes, bytes], None]]:
    """A folder of this Python's packages in which one package's metadata are what a test says."""
    with tempfile.TemporaryDirectory() as name:
        package = Path(name) / "nvidia_cuda_cupti_cu12-12.9.79.dist-info"
        library_folder = Path(name) / "nvidia/cuda_cupti/lib"
        package.mkdir()
        library_folder.mkdir(parents=True)
        (library_folder / "libcupti.so.12").touch()
        before = sys.path[:]
        sys.path[:] = [name]

        def put(metadata: bytes, record: bytes) -> None:
            (package / "METADATA").write_bytes(metadata)
            (package / "RECORD").write_bytes(record)

        yield put
        sys.path[:] = before


@given(
    foreign(METADATA, tokens=(b"Name: nvidia-cuda-cupti\n", b"Version: ", b"\n")),
    foreign(RECORD, tokens=(b"libcupti.so.12", b',"', b"\n", b"../")),
)
@fuzz(150)
@example(METADATA, RECORD)
@example(METADATA.replace(b"\xc3\xbc", b"\xfc"), RECORD)
@example(METADATA.replace(b"12.9.79", b"9" * 5000 + b".1"), RECORD)
@example(b"Name: nvidia-cuda-cupti-cu12\n", RECORD)
@example(METADATA, b'"' + b"x" * 140_000)
@example(METADATA, b"a\0b,,\n")
def test_metadata_of_packages(site: Callable[[bytes, bytes], None], metadata: bytes, record: bytes) -> None:
    """Any package, broken or not: the libraries that it names, or none; never what keeps others from being found."""
    site(metadata, record)
    for candidate in libraries._wheels():  # noqa: SLF001  what packages reach first
        assert Path(candidate.path).is_file()
        assert candidate.version is None or min(candidate.version) >= 0
    if (metadata, record) == (METADATA, RECORD):
        assert [candidate.version for candidate in libraries._wheels()] == [(12, 9)]  # noqa: SLF001  as above


# NVML

TEXTS = foreign(G0.uuid.encode(), b"NVIDIA H200", b"00000000:17:00.0", tokens=(b"GPU-", b"\xff"))
NUMBERS = st.integers(0, 16) | st.sampled_from([1 << 31, (1 << 32) - 1])


@pytest.fixture
def answers() -> Iterator[dict[str, Any]]:
    """A driver that answers as a test says, by the function's name without what they have in common."""
    told: dict[str, Any] = {}

    def answer(name: str) -> Callable[..., Any]:
        def call(*_: object, **__: object) -> Any:
            found = told.get(name, pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))
            if isinstance(found, Exception):
                raise found
            return found.decode() if isinstance(found, bytes) else found  # as pynvml does

        return call

    names = [name for name in vars(pynvml) if name.startswith(("nvmlDeviceGet", "nvmlSystemGet"))]
    before = {name: getattr(pynvml, name) for name in names}
    for name in names:
        setattr(pynvml, name, answer(name.removeprefix("nvmlDeviceGet").removeprefix("nvmlSystemGet")))
    yield told
    for name, function in before.items():
        setattr(pynvml, name, function)


@given(
    st.fixed_dictionaries({"HandleByIndex": st.just(1), "Count": NUMBERS, "UUID": TEXTS}),
    st.fixed_dictionaries(
        {},
        optional={
            "Name": TEXTS,
            "Serial": TEXTS,
            "VbiosVersion": TEXTS,
            "PciInfo": TEXTS.map(lambda text: SimpleNamespace(busId=text)),
            "DriverVersion": TEXTS,
            "NVMLVersion": TEXTS,
            "CudaDriverVersion_v2": st.integers(-(2**31), 2**31 - 1),
            "Architecture": NUMBERS,
            "CudaComputeCapability": st.tuples(st.integers(), st.integers()),
            "MigMode": st.tuples(NUMBERS, NUMBERS),
            "MaxMigDeviceCount": NUMBERS,
            "MigDeviceHandleByIndex": st.just(2),
            "GpuInstanceId": NUMBERS,
            "CurrPcieLinkWidth": NUMBERS,
            "VirtualizationMode": NUMBERS,
        },
    ),
)
@fuzz(200)
@example({"HandleByIndex": 1, "Count": (1 << 32) - 1, "UUID": b"\xff"}, {})
@example(
    {"HandleByIndex": 1, "Count": 1, "UUID": b"G"},
    {"MigMode": (1, 1), "MaxMigDeviceCount": (1 << 32) - 1, "MigDeviceHandleByIndex": 2, "GpuInstanceId": 1},
)
def test_gpus(answers: dict[str, Any], needed: dict[str, Any], more: dict[str, Any]) -> None:
    """Any answers: GPUs with valid text, or an error of the driver's; so few that they can be listed."""
    answers.clear()
    answers.update(needed | more)
    with soon():
        assert inventory.count_devices() <= 1024
        found = inventory.take_fingerprint(frozenset(range(1, 1024)))
        assert all(isinstance(text, str) for row in found for text in row)
        versions = library.driver_versions()
        assert all(isinstance(text, str) for text in (versions.driver_version, versions.cuda_version))
        with suppress(DriverCallError):
            device = inventory.describe(0)
            for gpu in (device.gpu, *(instance.gpu for instance in device.instances)):
                for text in (gpu.uuid, gpu.name, gpu.serial, gpu.vbios, gpu.pci_bus_id):
                    text.encode()
                assert gpu.uuid
                assert gpu.peak_share >= 0


DOUBLES = st.floats() | st.sampled_from([0.0, 50.0, 100.0, 100.4, 2.0**32 - 1, 2.0**63, 140737488355328.0, 1e13])


@given(st.lists(st.tuples(st.sampled_from([0, 0, 0, 3, 999]), DOUBLES), max_size=40), st.integers(1, 4))
@fuzz(150)
@example([(0, float("nan"))] * 40, 2)
def test_windows_of_gpm(answers: dict[str, Any], metrics: list[tuple[int, float]], samples: int) -> None:
    """Any figures: windows of values that can be, and what was wrong with the others."""
    raw = b"".join(struct.pack("=4xId24x", returned, value) for returned, value in metrics)

    def evaluate(request: Any) -> None:
        start = pynvml.c_nvmlGpmMetricsGet_t.metrics.offset
        whole = memoryview(request).cast("B")
        whole[start : start + len(raw)] = raw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlGpmQueryDeviceSupport", lambda _: SimpleNamespace(isSupportedDevice=1))
        patch.setattr(pynvml, "nvmlGpmSampleAlloc", lambda: None)
        patch.setattr(pynvml, "nvmlGpmSampleFree", lambda _: None)
        patch.setattr(pynvml, "nvmlGpmSampleGet", lambda *_: None)
        patch.setattr(pynvml, "nvmlGpmMetricsGet", evaluate)
        stream = gpm.GpmStream(1, G0, gpm.FLOOR_NS)
        for _ in range(samples + 1):
            stream.take()
        for one in stream.windows():
            if isinstance(one, Window):
                assert one.values.keys() >= {"sm_active", "dram_active"}
                assert all(problem_of_quantity(name, value) is None for name, value in one.values.items())
        stream.close()
    answers.clear()


COUNTS = st.integers(0, 200) | st.sampled_from(
    [2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**64 - 1, 0x7FFFFFFFFFFFFFF0]
)
READ = sorted(set(re.findall(r"pynvml\.nvmlDeviceGet(\w+)", Path(readings.__file__).read_text("utf-8"))))
KINDS = st.integers(0, 8)


@st.composite
def odd_answers(draw: st.DrawFn) -> dict[str, Any]:
    """Numbers for whatever is asked, in the forms that are expected of some calls; a few are refused."""
    told: dict[str, Any] = dict.fromkeys(READ, draw(COUNTS))
    for name in draw(st.lists(st.sampled_from(READ), max_size=30)):
        told[name] = draw(COUNTS)
    for name in draw(st.lists(st.sampled_from(READ), max_size=5)):
        told[name] = pynvml.NVMLError(draw(st.sampled_from([3, 4, 15, 999])))
    kind, number = draw(KINDS), draw(COUNTS)
    value = SimpleNamespace(dVal=draw(DOUBLES), uiVal=number, ulVal=number, ullVal=number, sllVal=-number)
    told["FieldValues"] = [SimpleNamespace(nvmlReturn=draw(st.sampled_from([0, 0, 3])), valueType=kind, value=value)]
    told["UtilizationRates"] = SimpleNamespace(gpu=draw(COUNTS), memory=draw(COUNTS))
    told["MemoryInfo"] = SimpleNamespace(
        total=draw(COUNTS), used=draw(COUNTS), free=draw(COUNTS), reserved=draw(COUNTS)
    )
    told["RemappedRows"] = (0, 0, draw(COUNTS), draw(COUNTS))
    return told


@given(odd_answers())
@fuzz(150)
def test_readings(answers: dict[str, Any], told: dict[str, Any]) -> None:
    """Any numbers: values that can be, and what was wrong with the others."""
    answers.clear()
    answers.update(told)
    calls: list[str] = []
    table = readings.ReadingTable(1, "GPU 0", readings.BOARD_GROUPS, calls.append)
    with suppress(DriverCallError):
        found = table.read(1)
        for name, value in found.values.items():
            assert problem_of_reading(name, value) is None
        assert all(problem for _, problem in found.problems)
        assert set(calls) == {group.name for group in readings.BOARD_GROUPS}


ROOM = 64 * 8
TOTAL = float(141 << 30)


def entries(stride: int) -> bytes:
    """Three processes in a buffer that was marked, as a driver with entries of this size writes them."""
    rows = (
        struct.pack("=I4xQII", pid, pid << 20, 2**32 - 1, 2**32 - 1)[:stride].ljust(stride, b"\0") for pid in (7, 8, 9)
    )
    return b"".join(rows).ljust(ROOM, b"\xa5")


@given(
    foreign(*map(entries, (16, 24, 32)), tokens=(b"\xff" * 4, b"\xff" * 8, b"\0" * 8)),
    st.integers(1, 8),
    st.none() | st.integers(0, 20),
)
@fuzz(300)
def test_lists_of_processes(raw: bytes, count: int, instance: int | None) -> None:
    """Any buffer: as many processes as the driver says, each of which can be, or none of them."""
    raw = raw[:ROOM].ljust(ROOM, b"\xa5")
    with suppress(processes._UntrueError):  # noqa: SLF001  what a list reaches first
        found = processes._decode(raw, count, TOTAL, instance)  # noqa: SLF001  as above
        assert len(found) == count
        for pid, used in found:
            assert 0 < pid <= 1 << 22
            assert used is None or 0 <= used <= TOTAL


def test_every_message_is_understood() -> None:
    """What is damaged above is valid where it is not."""
    assert [type(message).__name__ for message in FrameReader().feed(STREAM)] == [
        *("Ready", "Unusable", "Alive", "GpuState", "Sampling", "Happened", "Rejected", "Windows")
    ]
