"""Recordings: what is written comes back, nothing identifies the machine, bad files are told by file and line."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.config import DEFAULT_RECORDING
from gpu_hpc_exporter.model import (
    ACTIVITY_SUMS,
    AGENT_STATES,
    CATEGORIES,
    COPY_BUCKETS,
    COPY_KINDS,
    COUNT_QUANTITIES,
    CUMULATIVE_READINGS,
    DURATION_BUCKETS,
    LIBRARY_NAMES,
    QUANTITIES,
    READINGS,
    RECORD_RESULTS,
    STATES,
    CopyAmount,
    Driver,
    DriverError,
    Durations,
    Event,
    Gpu,
    GpuActivity,
    GpuJobs,
    GpuProcess,
    GpuProcesses,
    Incident,
    IntervalInForce,
    Inventory,
    Job,
    JobKind,
    JobOnGpu,
    JobsInForce,
    JobSource,
    KernelAmount,
    KernelReport,
    L2Definition,
    Library,
    Link,
    Pattern,
    Quantity,
    ReadingRejected,
    Readings,
    SamplingIncident,
    SourceName,
    StateChange,
    Window,
    WindowSource,
    WindowsRejected,
)
from gpu_hpc_exporter.samplers.fleet import Fleet, FleetSnapshot
from gpu_hpc_exporter.samplers.replay import ReplayClock, ReplaySampler
from gpu_hpc_exporter.sources.record import Recorder, read_marks
from gpu_hpc_exporter.sources.recording import Line, decode_line, encode_event
from gpu_hpc_exporter.sources.replay import Recording, RecordingError, loop, play, time_of
from unit.objects import G0, G1, GAUGE_WINDOW_NS, M1, NS, Clock, inventory, readings, window

WORKLOADS = {
    "idle",
    "gemm",
    "copy",
    "h2d",
    "d2h",
    "h2d_pageable",
    "embedding_cpu_index",
    "embedding_gpu_index",
    "launch_bound",
    "shared",
    "train",
    "inference_graph",
}

_TEXT = st.text(max_size=40)
_TIME = st.integers(0, 86_400 * NS)
_UUID = st.sampled_from([G0.uuid, G1.uuid, M1.uuid])
_WINDOW_SOURCE = st.sampled_from(get_args(WindowSource))
_QUANTITY_VALUES = st.fixed_dictionaries(
    {}, optional={q: st.integers(0, 2**53) if q in COUNT_QUANTITIES else st.floats(0, 1) for q in QUANTITIES}
)
_READING_VALUES = st.fixed_dictionaries(
    {},
    optional={r: st.floats(0, 1 if r.endswith("_ratio") else 7 if r == "recovery_action" else 150) for r in READINGS},
)
_GPU = st.builds(
    Gpu,
    *[_TEXT, st.integers(0, 63), *[_TEXT] * 10],
    st.lists(st.sampled_from(get_args(Link)), max_size=3).map(tuple),
    st.floats(0, 1),
)
_MEMORY = st.none() | st.integers(0, 2**40).filter(
    lambda n: n not in (2**31 - 1, 2**32 - 1) and not 0 <= n - 0x7FFFFFF0 < 16
)
_SHARE = st.none() | st.floats(0, 1)
_PROCESS = st.builds(GpuProcess, st.integers(1, 2**22), _MEMORY, _SHARE)
_JOB = st.builds(Job, st.text(min_size=1, max_size=40), _TEXT, st.sampled_from(get_args(JobKind)), *[_TEXT] * 6)
_LIBRARY = st.builds(Library, st.sampled_from(LIBRARY_NAMES), st.text(min_size=1, max_size=40))
_LOADED = st.lists(_LIBRARY, max_size=3, unique=True).map(tuple)
_ROWS = st.lists(
    st.builds(JobOnGpu, _JOB, st.integers(0, 99), _MEMORY, _SHARE, _LOADED),
    max_size=3,
    unique_by=lambda row: row.job.job,
)
_GPU_JOBS = st.builds(lambda rows, more: GpuJobs(tuple(rows), len(rows) + more), _ROWS, st.integers(0, 99))
_COUNT = st.integers(0, 2**53)
_SHARES = st.floats(0, 1)
_NAME = st.text(min_size=1, max_size=40)
_DURATIONS = st.builds(
    Durations, _COUNT, st.lists(_COUNT, min_size=DURATION_BUCKETS, max_size=DURATION_BUCKETS).map(tuple)
)
_ACTIVITY = st.builds(
    GpuActivity,
    _UUID,
    _NAME,
    st.dictionaries(_NAME, st.builds(KernelAmount, _COUNT, _COUNT, _COUNT, st.floats(0, 1e20)), max_size=2),
    st.dictionaries(st.sampled_from(CATEGORIES), _DURATIONS, max_size=2),
    _DURATIONS,
    st.dictionaries(
        st.sampled_from(COPY_KINDS),
        st.builds(
            CopyAmount,
            _COUNT,
            _COUNT,
            _COUNT,
            st.lists(_COUNT, min_size=COPY_BUCKETS, max_size=COPY_BUCKETS).map(tuple),
        ),
        max_size=2,
    ),
    st.dictionaries(st.sampled_from(ACTIVITY_SUMS), _COUNT, max_size=3),
    st.dictionaries(_NAME, st.floats(0, 1e6), max_size=2),
    st.dictionaries(_NAME, _COUNT, max_size=2),
    st.dictionaries(_NAME, st.sampled_from(get_args(Pattern)), max_size=2),
)
_EVENTS = st.one_of(
    st.builds(Inventory, _TIME, st.lists(_GPU, max_size=3).map(tuple), st.builds(Driver, _TEXT, _TEXT, _TEXT)),
    st.builds(Window, _UUID, _WINDOW_SOURCE, _TIME, st.integers(1, 60 * NS), _QUANTITY_VALUES, st.booleans()),
    st.builds(WindowsRejected, _TIME, _UUID, _WINDOW_SOURCE, st.integers(1, 1_000_000)),
    st.builds(ReadingRejected, _TIME, _UUID, _TEXT, st.sampled_from(["nan", "negative", "above_range", "sentinel"])),
    st.builds(Readings, _UUID, _TIME, _READING_VALUES),
    st.builds(
        StateChange, _TIME, st.sampled_from(get_args(SourceName)), _UUID | st.just(""), st.sampled_from(STATES), _TEXT
    ),
    st.builds(
        IntervalInForce,
        _TIME,
        _UUID,
        _WINDOW_SOURCE,
        st.integers(1, 60 * NS),
        st.sampled_from(get_args(L2Definition)),
    ),
    st.builds(SamplingIncident, _TIME, _UUID | st.just(""), st.sampled_from(get_args(Incident))),
    st.builds(GpuProcesses, _TIME, _UUID, st.none() | st.lists(_PROCESS, max_size=3).map(tuple)),
    st.builds(
        KernelReport,
        _TIME,
        st.lists(_ACTIVITY, max_size=3, unique_by=lambda activity: (activity.uuid, activity.job)).map(tuple),
        st.dictionaries(st.sampled_from(AGENT_STATES), _COUNT),
        st.lists(_TEXT, max_size=2).map(tuple),
        st.none() | _SHARES,
        st.dictionaries(st.sampled_from(RECORD_RESULTS), _COUNT),
        st.dictionaries(_TEXT, _COUNT, max_size=2),
    ),
    st.builds(JobsInForce, _TIME, st.dictionaries(_UUID, _GPU_JOBS, max_size=2), st.just({}), st.just({})),
)


@given(_EVENTS, st.integers(0, 10**18))
@settings(max_examples=200)
def test_an_event_comes_back_as_it_was(event: Event, start_ns: int) -> None:
    """An event survives the file to the nanosecond within a day, with equal values."""
    event = shifted(event, start_ns)
    line = encode_event(event, start_ns)
    first, *others = decode_line(msgspec.json.decode(msgspec.json.encode(line), type=Line), start_ns)
    assert first == event
    # The line of an interval says as well that the source is active.
    also = (
        [StateChange(event.time_ns, event.source, event.uuid, "active")] if isinstance(event, IntervalInForce) else []
    )
    assert others == also


@pytest.mark.parametrize("count", [2**31 - 16, 2**31 - 1, 2**32 - 1])
def test_any_number_of_bytes_can_be_played_back(count: int) -> None:
    """A window's bytes are our product of rate and time: no count of them is the driver's "not available"."""
    line = encode_event(window(1, {"pcie_host_to_gpu_bytes": count}), 0)
    assert line is not None
    assert decode_line(line, 0) == (window(1, {"pcie_host_to_gpu_bytes": count}),)


def shifted(event: Event, by_ns: int) -> Event:
    """The event at a later time."""
    if isinstance(event, Window):
        return replace(event, end_ns=event.end_ns + by_ns)
    return replace(event, time_ns=event.time_ns + by_ns)


def test_driver_errors_are_not_recorded() -> None:
    """Failed calls belong to the machine's driver, not to what was measured."""
    assert encode_event(DriverError(NS, "timeout"), 0) is None


def record(path: Path, *events: Event) -> bytes:
    """Write events that happened before the recording began, hence all at t=0; the file's bytes."""
    with Recorder(path) as recorder:
        for event in events:
            recorder.put(event)
    return path.read_bytes()


BATCH = Job("bert", "123", "batch", "ann", source="slurm")
IN_POD = Job("web", "11111111-2222-3333-4444-555555555555", namespace="x", pod="web-0", source="kubernetes")
TOLD: dict[JobSource, int] = {"procfs": 2 * NS, "slurm": NS}


EVERYTHING: tuple[Event, ...] = (
    inventory(G0, G1, M1),
    window(2, {"sm_active": 0.5}),
    readings(2, {"power_gpu_watts": 300.0}, G1.uuid),
    WindowsRejected(2 * NS, M1.uuid, "gpm", 3),
    ReadingRejected(2 * NS, G0.uuid, "power_gpu_watts", "nan"),
    StateChange(2 * NS, "gpm", M1.uuid, "active"),
    IntervalInForce(2 * NS, G1.uuid, "gpm", NS),
    SamplingIncident(2 * NS, G0.uuid, "overflow"),
    DriverError(2 * NS, "timeout"),
    GpuProcesses(2 * NS, G0.uuid, (GpuProcess(4101, 5, 0.5), GpuProcess(4102))),
    JobsInForce(
        2 * NS,
        {G1.uuid: GpuJobs((JobOnGpu(IN_POD, 1, 5, 0.5, (Library("nccl", "2.21.5"),)), JobOnGpu(BATCH)), 3)},
        {"root": 1},
        TOLD,
    ),
    inventory(G1),
)


def test_a_recording_identifies_no_machine(tmp_path: Path) -> None:
    """UUIDs and serial numbers are masked, the same GPU by the same mask; models and versions stay."""
    raw = gzip.decompress(record(tmp_path / "r.jsonl.gz", *EVERYTHING)).decode()
    for gpu in (G0, G1, M1):
        assert gpu.uuid not in raw
        assert not gpu.serial or gpu.serial not in raw
    lines = [json.loads(line) for line in raw.splitlines()]
    masks = [gpu["uuid"] for gpu in lines[1]["gpus"]]
    assert len(set(masks)) == 3
    assert [mask[:3] for mask in masks] == ["GPU", "GPU", "MIG"]
    assert lines[1]["gpus"][2]["parent_uuid"] == masks[1] == lines[-1]["gpus"][0]["uuid"]
    assert [line["gpu"] for line in lines[2:-2]] == [masks[n] for n in (0, 1, 2, 0, 2, 1, 0, 0)]
    assert lines[-3]["processes"] == [
        {"pid": 1, "memory_bytes": 5, "sm_ratio": 0.5},
        {"pid": 2, "memory_bytes": None, "sm_ratio": None},
    ]
    assert list(lines[-2]["gpus"]) == [masks[1]]
    assert IN_POD.job_id not in raw
    assert "4101" not in raw
    assert all(name in raw for name in ("bert", "123", "ann", "web-0"))
    assert ("NVIDIA H200" in raw, "580.159.04" in raw) == (True, True)


def test_the_same_events_give_the_same_bytes(tmp_path: Path) -> None:
    """A recording depends on its events only, not on when and where it was written."""
    files = [tmp_path / name / "r.jsonl.gz" for name in ("one", "two")]
    for file in files:
        file.parent.mkdir()
    assert record(files[0], *EVERYTHING) == record(files[1], *EVERYTHING)
    assert files[0].read_bytes()[4:8] == bytes(4)  # gzip's time of writing


@pytest.mark.parametrize(
    ("events", "sources"),
    [
        ([], []),
        ([window(2, {}), StateChange(NS, "pm_sampling", G0.uuid, "no_permission")], ["gpm"]),
        ([readings(2, {}), window(2, {})], ["gpm", "nvml"]),
        ([replace(window(2, {}), source="pm_sampling"), window(2, {})], ["gpm", "pm_sampling"]),
    ],
)
def test_the_header_tells_what_was_recorded(tmp_path: Path, events: list[Event], sources: list[str]) -> None:
    """Sources of which there are values, whenever they came."""
    raw = gzip.decompress(record(tmp_path / "r.jsonl.gz", inventory(G0), *events))
    assert json.loads(raw.splitlines()[0])["sources"] == sources


def interrupted_recording(path: Path) -> None:
    """A recording that the user breaks off."""
    with Recorder(path) as recorder:
        recorder.put(inventory(G0))
        raise KeyboardInterrupt


def test_a_recording_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    """Nobody finds half a recording under its name, neither meanwhile nor after a failure."""
    path = tmp_path / "r.jsonl.gz"
    with pytest.raises(KeyboardInterrupt):
        interrupted_recording(path)
    assert not path.exists()
    with Recorder(path) as recorder:
        recorder.put(inventory(G0))
        assert not path.exists()
    assert path.exists()
    recorder.put(window(2, {}))  # a sampler that has not stopped yet


def test_a_recording_that_breaks_off_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither under its name nor under another."""
    with pytest.raises(KeyboardInterrupt):
        interrupted_recording(tmp_path / "r.jsonl.gz")
    assert list(tmp_path.iterdir()) == []


def test_events_without_a_gpu_are_not_recorded(tmp_path: Path) -> None:
    """A recording begins with its header and the first inventory; what came before has nothing to belong to."""
    raw = gzip.decompress(record(tmp_path / "r.jsonl.gz", window(1, {"sm_active": 1.0}), *EVERYTHING))
    assert [json.loads(line)["type"] for line in raw.splitlines()][:3] == ["header", "inventory", "reading"]


def test_a_written_recording_can_be_loaded(tmp_path: Path) -> None:
    """What the recorder writes, marks included, is what the replay reads."""
    path = tmp_path / "r.jsonl.gz"
    with Recorder(path) as recorder:
        recorder.put(inventory(G0))
        recorder.mark(time.monotonic_ns(), "gemm")
        assert recorder.windows == 0
        recorder.put(replace(window(0, {"sm_active": 0.5}), end_ns=time.monotonic_ns()))
        assert recorder.windows == 1
    recording = Recording.load(path)
    assert [phase.name for phase in recording.phases] == ["gemm"]
    assert [type(event) for event in play(recording, 0)] == [Inventory, Window]


def test_a_mark_before_the_first_inventory_does_not_spoil_the_recording(tmp_path: Path) -> None:
    """A workload may begin before the driver has listed the GPUs; the recording must stay readable."""
    path = tmp_path / "r.jsonl.gz"
    with Recorder(path) as recorder:
        recorder.mark(1, "idle")
        recorder.put(inventory(G0))
        recorder.put(replace(window(0, {"sm_active": 0.5}), end_ns=time.monotonic_ns()))
    Recording.load(path)


HEADER = b'{"type":"header","format":1,"project_version":"0","driver":{},"sources":["gpm"],"gpus":["G"]}\n'
GPUS = b'{"type":"inventory","t":0,"driver":{},"gpus":[{"uuid":"G","index":0,"name":"n","links":["pcie"]}]}\n'
READING = b'{"type":"reading","t":1,"gpu":"G","source":"gpm","v":{"sm_active":0.5},"dt":0.1}\n'
GOOD = HEADER + GPUS + READING


def problem_of_file(path: Path) -> str:
    """What Recording.load says, without the file's name, which has to come first."""
    with pytest.raises(RecordingError) as caught:
        Recording.load(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def with_line(line: bytes) -> bytes:
    """A good recording with one more line, its fourth."""
    return gzip.compress(GOOD + line)


JOBS = (
    b'{"type":"job","t":1,"gpus":{"G":{"count":2,"jobs":[{"job":{"job":"%s"},"processes":%s},{"job":{"job":"b"}}]}}}\n'
)
LIBRARIES = JOBS.replace(
    b'"processes":%s',
    b'"libraries":[{"name":"nccl","version":"%s"},{"name":"nccl","version":"%s"}]',
) % (b"a", b"%s", b"%s")
MANY_LIBRARIES = (
    LIBRARIES.replace(
        b'{"name":"nccl","version":"%s"}]',
        b",".join(b'{"name":"nccl","version":"%d"}' % number for number in range(64)) + b"]",
    )
    % b"x"
)

BAD_FILES = {
    "empty": (b"", "line 1: "),
    "nothing packed": (gzip.compress(b""), "line 1: "),
    "not gzip": (b"no gzip", "no recording: "),
    "truncated": (gzip.compress(GOOD + READING * 1000)[:-30], "after line "),
    "damaged": (gzip.compress(GOOD)[:-8] + b"\0" * 8, "after line 3: "),
    "no header": (gzip.compress(GPUS + READING), "line 1: "),
    "format 2": (gzip.compress(GOOD.replace(b'"format":1', b'"format":2')), "line 1: format 2"),
    "no GPU": (gzip.compress(HEADER), "no inventory"),
    "no time": (gzip.compress(HEADER + GPUS), "every line is at t=0"),
    "blank line": (with_line(b"\n"), "line 4: "),
    "not JSON": (with_line(b"not json\n"), "line 4: "),
    "unknown type": (with_line(b'{"type":"surprise"}\n'), "line 4: Invalid value 'surprise'"),
    "t is NaN": (with_line(READING.replace(b'"t":1', b'"t":NaN')), "line 4: "),
    "t is negative": (with_line(READING.replace(b'"t":1', b'"t":-1')), "line 4: "),
    "t is far away": (with_line(READING.replace(b'"t":1', b'"t":1e10')), "line 4: "),
    "value is no double": (with_line(READING.replace(b"0.5", b"1e999")), "line 4: "),
    "2 MB line": (with_line(READING.replace(b'"G"', b'"' + b"g" * (2 << 20) + b'"')), "line 4: "),
    "not UTF-8": (with_line(READING.replace(b'"G"', b'"\xff"')), "line 4: "),
    "unknown quantity": (
        with_line(READING.replace(b"sm_active", b"sm_surprise")),
        "line 4: ",
    ),
    "line break in a name": (
        with_line(b'{"type":"sur\\nprise"}\n'),
        "line 4: ",
    ),
    "100,000 brackets": (
        with_line(b'{"type":"phase","t":1,"name":"x","more":' + b"[" * 100_000 + b"\n"),
        "line 4: ",
    ),
    "format 2 with a new type": (
        gzip.compress(GOOD.replace(b'"format":1', b'"format":2') + b'{"type":"new_in_2"}\n'),
        "line 1: format 2",
    ),
    "window of length 0": (
        with_line(READING.replace(b',"dt":0.1', b"")),
        "line 4: ",
    ),
    "impossible value": (
        with_line(READING.replace(b"0.5", b"1e308")),
        "line 4: ",
    ),
    "a job without a name": (with_line(JOBS % (b"", b"0")), "line 4: a GPU's jobs need names"),
    "a job twice": (with_line(JOBS % (b"b", b"0")), "line 4: a GPU's jobs need names"),
    "a library twice": (with_line(LIBRARIES % (b"1", b"1")), "line 4: a job's libraries need versions"),
    "a library without a version": (with_line(LIBRARIES % (b"1", b"")), "line 4: a job's libraries need versions"),
    "an unknown library": (with_line((LIBRARIES % (b"1", b"2")).replace(b"nccl", b"ncc")), "line 4: Invalid enum"),
    "many libraries": (with_line(MANY_LIBRARIES), "line 4: 65 libraries: expected up to 64"),
    "less than no process": (with_line(JOBS % (b"a", b"-1")), "line 4: processes = -1: negative"),
    "a share above all": (
        with_line(b'{"type":"processes","t":1,"gpu":"G","processes":[{"pid":1,"sm_ratio":1.5}]}\n'),
        "line 4: memory_bytes = None, sm_ratio = 1.5: above_range",
    ),
    "memory that is none": (
        with_line(
            b'{"type":"processes","t":1,"gpu":"G","processes":[{"pid":1,"memory_bytes":18446744073709551615}]}\n'
        ),
        "line 4: ",
    ),
    "negative value": (
        with_line(READING.replace(b"0.5", b"-0.5")),
        "line 4: ",
    ),
}


@pytest.mark.parametrize(
    ("raw", "start"),
    [pytest.param(raw, start, id=name) for name, (raw, start) in BAD_FILES.items()],
)
def test_a_bad_file_is_told_by_file_and_line(tmp_path: Path, raw: bytes, start: str) -> None:
    """Whatever is wrong with a recording, the answer is one line that names file, line and reason."""
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(raw)
    problem = problem_of_file(path)
    assert problem.startswith(start)
    assert len(problem) < 300
    assert problem.splitlines() == [problem]


@pytest.mark.parametrize(("name", "start"), [("missing.jsonl.gz", "there is no such file"), (".", "no recording: ")])
def test_a_file_that_cannot_be_opened(tmp_path: Path, name: str, start: str) -> None:
    """A missing file and a directory are told like any other bad file."""
    assert problem_of_file(tmp_path / name).startswith(start)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=5,
)
_LINE_LIKE = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["header", "phase", "inventory", "reading", "windows_rejected", "rejected", "state", "incident", "x"]
        )
    },
    optional={
        "t": _JSON | st.floats(0, 10),
        "gpu": st.just("G") | _JSON,
        "source": st.sampled_from(["gpm", "pm_sampling", "nvml"]) | _JSON,
        "v": st.dictionaries(st.sampled_from([*QUANTITIES, *READINGS]), _JSON | st.floats(0, 1), max_size=3) | _JSON,
        "dt": _JSON | st.floats(0.1, 10),
        "state": st.sampled_from(STATES) | _JSON,
        "driver": st.just({}) | _JSON,
        "gpus": st.lists(st.fixed_dictionaries({"uuid": _TEXT, "index": st.integers(), "name": _TEXT}), max_size=2),
        "name": _TEXT | _JSON,
        "reason": st.just("nan") | _JSON,
        "incident": st.just("overflow") | _JSON,
        "l2": st.just("hit_rate") | _JSON,
    },
).map(lambda line: json.dumps(line).encode() + b"\n")
_FILES = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(gzip.compress),
    st.binary(max_size=200).map(lambda junk: gzip.compress(GOOD + junk)),
    st.lists(_LINE_LIKE, max_size=3).map(lambda lines: gzip.compress(GOOD + b"".join(lines))),
    st.tuples(st.integers(0, 200), st.integers(0, 255)).map(
        lambda flip: bytes(b ^ flip[1] if n == flip[0] else b for n, b in enumerate(gzip.compress(GOOD, mtime=0)))
    ),
)


@given(_FILES)
@settings(max_examples=300)
@example(gzip.compress(GOOD))
def test_arbitrary_bytes_are_a_recording_or_a_recording_error(fuzz_file: Path, raw: bytes) -> None:
    """No file whatever makes anything but a RecordingError come out."""
    fuzz_file.write_bytes(raw)
    try:
        recording = Recording.load(fuzz_file)
    except RecordingError:
        return
    assert recording.duration_ns > 0


@pytest.fixture(scope="module")
def fuzz_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all examples."""
    return tmp_path_factory.mktemp("fuzz") / "r.jsonl.gz"


@pytest.fixture(scope="module")
def shipped() -> Recording:
    """The recording that comes with the exporter."""
    return Recording.load(DEFAULT_RECORDING)


def test_the_shipped_recording(shipped: Recording) -> None:
    """It has twelve workloads, of two jobs with agents, one GPU with a masked identity, and minutes of windows."""
    assert {phase.name for phase in shipped.phases} - {"between"} == WORKLOADS
    assert shipped.header.gpus == ["GPU-00000000-0000-0000-0000-000000000000"]
    assert all(not gpu.serial for event in shipped.events if isinstance(event, Inventory) for gpu in event.gpus)
    assert shipped.duration_ns > 200 * NS
    windows = Counter(event.source for event in shipped.events if isinstance(event, Window))
    assert windows.keys() == {"gpm", "pm_sampling"}
    assert min(windows.values()) > 2000
    told = [event for event in shipped.events if isinstance(event, JobsInForce)]
    together = {tuple(sorted(share.job.job for share in gpu.jobs)) for event in told for gpu in event.gpus.values()}
    assert together == {(), ("bert_finetune",), ("bert_finetune", "llama_pretrain"), ("llama_pretrain",)}
    reports = [event for event in shipped.events if isinstance(event, KernelReport)]
    assert len(reports) > 0.95 * shipped.duration_ns / (5 * NS)
    traced = Counter[str]()
    for activity in (activity for report in reports for activity in report.activities):
        traced[activity.job] += activity.sums["traced_ns"]
    assert traced.keys() == {"bert_finetune", "llama_pretrain"}
    assert min(traced.values()) > 10 * NS


def counter_totals(snapshot: FleetSnapshot) -> dict[tuple[str, object], float]:
    """Every cumulative number of the one GPU in a snapshot."""
    (gpu,) = snapshot.gpus
    totals: dict[tuple[str, object], float] = {("observed", ""): gpu.observed_ns, ("busy", ""): gpu.nvml_busy_ns or 0}
    totals |= {("quantity", key): value for key, value in gpu.quantities.items()}
    totals |= {("class", key): value for key, value in gpu.class_ns.items()}
    totals |= {("clock event", key): value for key, value in gpu.clock_event_ns.items()}
    totals |= {("windows", key): value for key, value in gpu.windows.items()}
    totals |= {("histogram", key): histogram.sum_nano for key, histogram in gpu.histograms.items()}
    totals |= {("reading", key): value for key, value in gpu.readings.items() if key in CUMULATIVE_READINGS}
    return totals


def looped(recording: Recording, loops: int) -> Iterator[Event]:
    """The first loops of an endless replay."""
    return islice(loop(recording, NS), loops * len(recording.events))


def test_b03_n08_nothing_goes_back_where_a_recording_begins_again(shipped: Recording) -> None:
    """B03, N08: over three loops no counter and no cumulative reading goes back, and time goes on."""
    clock = Clock()
    fleet = Fleet(clock, GAUGE_WINDOW_NS)
    before: dict[tuple[str, object], float] = {}
    last_end_ns = last_time_ns = 0
    for number, event in enumerate(looped(shipped, 3)):
        assert time_of(event) >= last_time_ns
        last_time_ns = time_of(event)
        clock.now_s = last_time_ns / NS
        if isinstance(event, Window):
            assert event.end_ns > last_end_ns
            last_end_ns = event.end_ns
        fleet.put(event)
        if number % 50 == 0 or isinstance(event, Readings):
            after = counter_totals(fleet.snapshot())
            assert {key for key, value in after.items() if value < before.get(key, 0)} == set()
            before = {**before, **after}
    assert last_end_ns > 2.9 * shipped.duration_ns


def test_two_sources_are_played_as_they_were_recorded(tmp_path: Path) -> None:
    """Windows of both, what the second one's missed sectors are, and its incidents come back and are served alike."""
    now_ns = time.monotonic_ns() + 10 * NS
    events: list[Event] = [inventory(G0), readings(0, {"dram_limit_bytes_per_second": 4e12})]
    events.append(IntervalInForce(now_ns, G0.uuid, "pm_sampling", NS // 100, "hit_rate"))
    for n in range(1, 41):
        end_ns = now_ns + n * NS // 100
        l2: dict[Quantity, float] = {"sm_active": 0.5, "l2_sectors": 10**9, "l2_missed_sectors": n * 10**7}
        events.append(Window(G0.uuid, "pm_sampling", end_ns, NS // 100, l2))
        if n % 10 == 0:
            events.append(Window(G0.uuid, "gpm", end_ns, NS // 10, {"sm_active": 0.5, "pipe_int": 0.1}))
    events.append(SamplingIncident(now_ns + NS, G0.uuid, "rate_halved"))
    path = tmp_path / "r.jsonl.gz"
    record(path, *events)
    played, live = Fleet(Clock(), GAUGE_WINDOW_NS), Fleet(Clock(), GAUGE_WINDOW_NS)
    for event in play(Recording.load(path), now_ns):
        played.put(event)
    for event in events:
        live.put(event)
    (one,), (other,) = played.snapshot().gpus, live.snapshot().gpus
    assert one.quantities == other.quantities
    assert one.quantities["l2_missed_sectors"] == 820 * 10**7
    assert (one.class_ns, one.histograms) == (other.class_ns, other.histograms)
    assert (one.l2_definition, one.incidents, one.leader) == ("hit_rate", {"rate_halved": 1}, "pm_sampling")


def test_cumulative_readings_never_go_back_in_hours_of_looping(shipped: Recording) -> None:
    """What the driver counts goes on exactly from where it stood, loop after loop (100 loops are six hours)."""
    only_readings = replace(shipped, events=tuple(e for e in shipped.events if isinstance(e, Readings)))
    last: dict[str, float] = {}
    for event in looped(only_readings, 100):
        assert isinstance(event, Readings)
        for name in CUMULATIVE_READINGS & event.values.keys():
            assert event.values[name] >= last.get(name, 0.0), name
            last[name] = event.values[name]


def test_a_loop_goes_on_by_what_the_recording_grew() -> None:
    """Energy that grew by 50 J in the recording grows by 50 J in each loop; gauges repeat as they were."""
    events = (
        inventory(G0, at=0),
        readings(1, {"energy_joules": 100.0, "power_gpu_watts": 9.0}),
        readings(4, {"energy_joules": 150.0, "power_gpu_watts": 3.0}),
    )
    recording = replace(Recording.load(DEFAULT_RECORDING), events=events, duration_ns=4 * NS)
    played = [(e.time_ns // NS, *e.values.values()) for e in looped(recording, 3) if isinstance(e, Readings)]
    assert played == [(2, 100, 9), (5, 150, 3), (6, 150, 9), (9, 200, 3), (10, 200, 9), (13, 250, 3)]


class Watching:
    """A sink that asks, after every set of readings, whether the fleet still serves them."""

    def __init__(self, fleet: Fleet) -> None:
        self.served: list[bool] = []
        self.is_enough = threading.Event()
        self.fleet = fleet

    def put(self, event: Event) -> None:
        self.fleet.put(event)
        if isinstance(event, Readings):
            self.served.append(bool(self.fleet.snapshot().gpus[0].readings))
            if len(self.served) >= 50:
                self.is_enough.set()


@contextmanager
def playing(recording: Recording, speed: float) -> Iterator[Watching]:
    """A recording while it is played."""
    clock = ReplayClock(speed)
    sink = Watching(Fleet(clock, GAUGE_WINDOW_NS))
    sampler = ReplaySampler(sink, recording, clock)
    sampler.start()
    try:
        yield sink
    finally:
        sampler.stop()


def test_nothing_grows_old_where_a_machine_cannot_keep_up(shipped: Recording) -> None:
    """A replay far faster than any machine plays: what has just been read is served, however late it comes."""
    with playing(shipped, 1e9) as sink:
        assert sink.is_enough.wait(60)
    assert all(sink.served)


def test_what_a_recording_lacks_grows_old(shipped: Recording) -> None:
    """Its time goes on between events: readings that end in the recording are served no more after five seconds."""
    events = (inventory(G0, at=0), readings(1, {"power_gpu_watts": 9.0}), inventory(G0, at=10_000))
    with playing(replace(shipped, events=events, duration_ns=10_000 * NS), 100) as sink:
        deadline = time.monotonic() + 60
        while not sink.served or sink.fleet.snapshot().gpus[0].readings:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    assert sink.served == [True]


@pytest.mark.parametrize(
    ("text", "seen", "expected"),
    [
        ("", 0, []),
        ("1.5 gemm\n2 copy\n", 0, [(1_500_000_000, "gemm"), (2_000_000_000, "copy")]),
        ("1.5 gemm\n2 copy\n", 1, [(2_000_000_000, "copy")]),
        ("1.5 gemm\n2 copy\n", 2, []),
        ("1.5 gemm\n2 co", 0, [(1_500_000_000, "gemm")]),  # the workload is still writing
        ("1 two words \n", 0, [(NS, "two words")]),
        ("1\n", 0, [(NS, "")]),
    ],
)
def test_marks(tmp_path: Path, text: str, seen: int, expected: list[tuple[int, str]]) -> None:
    """Complete lines after those already seen, as nanoseconds and name; an unfinished one is left."""
    path = tmp_path / "marks"
    path.write_text(text)
    assert list(read_marks(path, seen)) == expected


def test_no_marks_yet(tmp_path: Path) -> None:
    """The workload may not have made its file yet."""
    assert list(read_marks(tmp_path / "marks", 0)) == []


@pytest.mark.parametrize(
    "line",
    [
        "gemm 1.5",
        "",
        "inf gemm",
        "nan gemm",
    ],
)
def test_a_malformed_mark_is_told_by_file_and_line(tmp_path: Path, line: str) -> None:
    """A line of another form is a ValueError that names file, line and what was found."""
    path = tmp_path / "marks"
    path.write_text(f"1 idle\n{line}\n")
    marks = read_marks(path, 0)
    assert next(marks) == (NS, "idle")
    with pytest.raises(ValueError, match=f"^{path}: line 2: expected `<seconds> <phase>`"):
        next(marks)


def test_t_of_a_day_is_exact() -> None:
    """Nanoseconds come back exactly although the file has seconds as a double."""
    for time_ns in range(1, 86_400 * NS, 86_400 * NS // 997):
        line = encode_event(StateChange(time_ns, "nvml", "", "active"), 0)
        assert line is not None
        assert time_of(decode_line(line, 0)[0]) == time_ns
