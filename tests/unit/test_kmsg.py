"""The kernel log: Xids and lost GPUs out of real records, nothing out of others, bounded memory."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.model import Event, GpuFellOff, StateChange, XidError
from gpu_hpc_exporter.samplers.kmsg import KernelLogSampler
from gpu_hpc_exporter.sources.kmsg import KernelLogParser, follow

NOW = 7_000_000_000
XID_79 = "6,1234,5678,-;NVRM: Xid (PCI:0000:99:00): 79, GPU has fallen off the bus."
ONE_RECORD = (
    "3,900,77,-;NVRM: The NVIDIA GPU 0000:b3:00.0\\x0aNVRM: (PCI ID: 10de:26b5) installed in this system has"
    "\\x0aNVRM: fallen off the bus and is not responding to commands."
)
"""The driver prints the three lines in one call, and /dev/kmsg escapes the line breaks of a record."""
MAX_LINE = 16_384


def parse(*lines: str) -> list[XidError | GpuFellOff]:
    """Events of these lines, read one after the other."""
    parser = KernelLogParser()
    return [event for line in lines if (event := parser.parse(line, NOW)) is not None]


def xid(number: int, pci: str) -> XidError:
    """An Xid of the kernel log."""
    return XidError(NOW, number, "kmsg", pci_bus_id=pci)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (XID_79, xid(79, "0000:99:00")),
        ("6,1,2,-;NVRM: Xid (PCI:0000:99:00.0): 79, GPU has fallen off the bus.", xid(79, "0000:99:00")),
        ("4,1,2,-;NVRM: Xid (PCI:00000000:99:00): 62, pid=1, 2027e3fe", xid(62, "00000000:99:00")),
        ("4,1,2,c;NVRM: Xid (PCI:00010000:9A:1F.7): 119, pid=3077, name=python3", xid(119, "00010000:9A:1F")),
        ("NVRM: Xid (PCI:ABCD:EF:00): 13, Graphics SM Warp Exception", xid(13, "ABCD:EF:00")),
        ("Oct  6 17:59:27 n1 kernel: NVRM: Xid (PCI:0000:01:00): 48, pid='<unknown>'", xid(48, "0000:01:00")),
        ("6,1,2,-;NVRM: Xid (PCI:0000:99:00): 140", xid(140, "0000:99:00")),
        pytest.param("NVRM: Xid (PCI:0000:99:00 GPU-I:02): 43, pid=1", xid(43, "0000:99:00")),
        pytest.param("NVRM: Xid (PCI:0000:99:00 GPU-I:02 GPU-CI:00): 94, x", xid(94, "0000:99:00")),
    ],
)
def test_an_xid(line: str, expected: XidError) -> None:
    """Number and PCI device of an Xid, in every way the driver and the log's readers write it."""
    assert parse(line) == [expected]


@pytest.mark.parametrize(
    ("lines", "pci"),
    [
        (
            (
                "NVRM: The NVIDIA GPU 0000:99:00.0",
                "(PCI ID: 10de:0000) installed in this system has",
                "fallen off the bus and is not responding to commands.",
            ),
            "0000:99:00",
        ),
        (
            (
                "3,900,77,-;NVRM: The NVIDIA GPU 0000:B3:00.0",
                " SUBSYSTEM=pci",
                "3,901,77,-;NVRM: (PCI ID: 10de:26b5) installed in this system has",
                "3,902,77,-;NVRM: fallen off the bus and is not responding to commands.",
            ),
            "0000:B3:00",
        ),
        (
            (ONE_RECORD,),
            "0000:b3:00",
        ),
        (("6,1,2,-;NVRM: GPU 0000:99:00.0: GPU has fallen off the bus.",), "0000:99:00"),
        (("NVRM: GPU at PCI:0000:01:00: GPU-00000000", "NVRM: GPU 0000:99:00.0: fallen off the bus."), "0000:99:00"),
    ],
)
def test_a05_a_gpu_that_fell_off_without_an_xid(lines: tuple[str, ...], pci: str) -> None:
    """A05: the message over three lines, in one record or in one line names the GPU that is lost, once."""
    assert parse(*lines) == [GpuFellOff(NOW, pci)]
    assert parse(*lines, *lines) == 2 * [GpuFellOff(NOW, pci)]


def test_a05_an_xid_79_is_one_event() -> None:
    """A05: the Xid's own line says "fallen off the bus" too; the line after it, without Xid, is the same loss."""
    lines = ("NVRM: GPU at PCI:0000:99:00: GPU-0", XID_79, "6,1,2,-;NVRM: GPU 0000:99:00.0: GPU serial number is 1.")
    assert parse(*lines) == [xid(79, "0000:99:00")]


@pytest.mark.parametrize(
    "lines",
    [
        ("",),
        ("6,1,2,-;usb 1-2: new high-speed USB device number 3 using xhci_hcd",),
        ("6,1,2,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.159.04",),
        ("6,1,2,-;NVRM: GPU at PCI:0000:99:00: GPU-00000000-aaaa-bbbb-cccc-000000000000",),
        ("6,1,2,-;NVRM: Xid (PCI:0000:99:00): ",),
        ("6,1,2,-;NVRM: Xid (PCI:99:00): 79",),
        ("6,1,2,-;NVRM: Xid (0000:99:00): 79",),
        ("6,1,2,-;NVRM: xid (PCI:0000:99:00): 79",),
        ("6,1,2,-;NVRM: Xid (PCI:0000:99:zz): 79",),
        ("6,1,2,-;fallen off the bus and is not responding to commands.",),  # of what?
        ("6,1,2,-;thunderbolt 0-1: device has fallen off the bus",),
        pytest.param(
            (
                "6,1,2,-;NVRM: GPU at PCI:0000:99:00: GPU-00000000-aaaa-bbbb-cccc-000000000000",
                "4,3,4,-;NVRM: loading NVIDIA UNIX x86_64 Kernel Module",
                "4,900,999999999,-;thunderbolt 0-1: device has fallen off the bus",
            )
        ),
    ],
)
def test_unrelated_lines(lines: tuple[str, ...]) -> None:
    """Lines of others, and lines of the driver about nothing bad, make no event."""
    assert parse(*lines) == []


_PIECES = st.sampled_from(
    [
        "NVRM: ",
        "Xid ",
        "(PCI:",
        "0000:99:00",
        ".0",
        "): ",
        "79",
        "GPU ",
        "The NVIDIA ",
        "at ",
        "fallen off the bus",
        ";",
    ]
)
_LINES = st.lists(_PIECES | st.text(max_size=10), max_size=12).map("".join)


@given(st.lists(_LINES, max_size=6))
@settings(max_examples=300)
@example(["NVRM: Xid (PCI:0000:99:00): " + "9" * 5000])
@example(["NVRM: Xid (PCI:0000:99:00): \N{ARABIC-INDIC DIGIT SEVEN}"])
@example(["NVRM: GPU " * 2000 + "fallen off the bus"])
def test_any_lines_are_events_or_nothing(lines: list[str]) -> None:
    """No text raises, and what comes out is a plausible Xid or loss on a PCI device."""
    for event in parse(*lines):
        assert 0 <= (event.xid if isinstance(event, XidError) else 0) < 1_000_000
        assert event.pci_bus_id.lower().strip("0123456789abcdef:") == ""
        assert event.time_ns == NOW


def test_a_number_that_is_too_long_is_no_xid() -> None:
    """A number is taken whole or not at all."""
    assert parse("NVRM: Xid (PCI:0000:99:00): 7900000001, x") == []


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"one\ntwo\n", ["one", "two"]),
        (b"one\n\ntwo\nunfinished", ["one", "", "two"]),
        (b"bad \xff byte\n", ["bad \N{REPLACEMENT CHARACTER} byte"]),
        (b"\n".join(b"%d" % n for n in range(5000)) + b"\n", [str(n) for n in range(5000)]),
    ],
    ids=["empty", "two", "unfinished", "not UTF-8", "5,000 lines"],
)
def test_a_file_is_followed_to_its_end(tmp_path: Path, content: bytes, lines: list[str]) -> None:
    """Complete lines in their order, whatever bytes are in them; the descriptor is closed at the end."""
    path = tmp_path / "kmsg"
    path.write_bytes(content)
    assert list(follow(path)) == lines
    assert path not in open_files()


def open_files() -> set[Path]:
    """What this process has open; others' threads may open and close what they like meanwhile."""
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(descriptor.readlink())
    return found


@contextmanager
def written(path: Path, pieces: list[bytes], go: Callable[[], object] = lambda: None) -> Iterator[None]:
    """A FIFO into which another process, here a thread, writes pieces; `go` is waited for before each."""
    os.mkfifo(path)

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY)
        for piece in pieces:
            go()
            os.write(descriptor, piece)
        os.close(descriptor)

    writer = threading.Thread(target=write)
    writer.start()
    yield
    writer.join(60)
    assert not writer.is_alive()


def test_lines_that_arrive_in_pieces(tmp_path: Path) -> None:
    """A line is whole when its end has come, however it was cut, and is given at once."""
    path = tmp_path / "fifo"
    turn = threading.Semaphore(0)
    with written(path, [b"NVRM: X", b"id\n\xe2", b"\x82\xac\nla", b"st\n", b"cut"], lambda: turn.acquire(timeout=60)):
        turn.release(2)
        lines = follow(path)
        assert next(lines) == "NVRM: Xid"  # while the writer waits for the next turn
        turn.release(3)
        assert list(lines) == ["\N{EURO SIGN}", "last"]


def test_an_overlong_line_stays_bounded(tmp_path: Path) -> None:
    """A line of a megabyte costs no megabyte, and the lines around it are whole."""
    path = tmp_path / "fifo"
    with written(path, [b"before\n", *[b"x" * 65_536] * 16, b"\nafter\n"]):
        before, overlong, after = follow(path)
    assert (before, after) == ("before", "after")
    assert set(overlong) == {"x"}
    assert len(overlong) <= MAX_LINE


class Events:
    """A sink that keeps events and tells when the log's end has come."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.ended = threading.Event()

    def put(self, event: Event) -> None:
        """Keep one."""
        self.events.append(event)
        if isinstance(event, StateChange) and event.state != "active":
            self.ended.set()


def sampled(path: Path) -> list[Event]:
    """What the sampler makes of a log until it ends."""
    sink = Events()
    KernelLogSampler(sink, path).start()
    assert sink.ended.wait(60)
    return sink.events


def test_events_of_the_log_reach_the_sink(tmp_path: Path) -> None:
    """The state is active, then come the events; a log that ends has failed."""
    path = tmp_path / "kmsg"
    path.write_text(f"{XID_79}\n6,1,2,-;eth0: link up\n")
    active, event, ended = sampled(path)
    assert isinstance(event, XidError)
    assert (event.xid, event.pci_bus_id, event.origin) == (79, "0000:99:00", "kmsg")
    assert isinstance(active, StateChange)
    assert isinstance(ended, StateChange)
    assert (active.source, active.uuid, active.state, ended.state) == ("kmsg", "", "active", "failed")
    assert ended.reason == f"{path} ended"


@pytest.mark.parametrize(("name", "state"), [("missing", "unsupported"), (".", "failed")])
def test_a_log_that_cannot_be_read_is_a_state(tmp_path: Path, name: str, state: str) -> None:
    """A log that is not there or not readable is told with its path, and nothing is raised."""
    last = sampled(tmp_path / name)[-1]
    assert isinstance(last, StateChange)
    assert (last.state, str(tmp_path) in last.reason) == (state, True)


def test_a05_the_page_names_the_xids_that_only_the_log_tells() -> None:
    """A05: whoever cannot give the exporter the kernel log learns what is missed."""
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    (told,) = re.findall(r"kernel log, which alone tells of some of the worst \(([\d, ]+)\)", page)
    assert set(told.split(", ")) == {"79", "119", "120"}
