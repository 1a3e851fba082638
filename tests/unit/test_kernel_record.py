"""Reports of kernels in recordings: masked, checked, and played so that no counter goes back."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from gpu_hpc_exporter.model import (
    COPY_BUCKETS,
    DURATION_BUCKETS,
    RECORDABLES,
    CopyAmount,
    Durations,
    GpuActivity,
    KernelAmount,
    KernelReport,
    Recordable,
    Tracing,
    Window,
)
from gpu_hpc_exporter.samplers.fleet import Fleet, FleetSnapshot
from gpu_hpc_exporter.sources.record import Recorder
from gpu_hpc_exporter.sources.recording import Line, decode_line, encode_event
from gpu_hpc_exporter.sources.replay import Recording, loop, play, time_of
from unit.objects import G0, GAUGE_WINDOW_NS, M1, NS, Clock, inventory

ONES = (1,) * DURATION_BUCKETS
ACTIVITY = GpuActivity(
    G0.uuid,
    "bert",
    {"gemm": KernelAmount(10, 5, 1000, 4.0), "other": KernelAmount(1, 1, 10)},
    {"gemm": Durations(1000, ONES)},
    Durations(20, ONES),
    {"h2d_pinned": CopyAmount(5, 6, 7, (1,) * COPY_BUCKETS)},
    {"traced_ns": NS, "busy_ns": 5},
    {"gemm": 0.5},
    {"gemm": 200},
    {"gemm": "few_long"},
)
REPORT = KernelReport(
    2 * NS,
    (ACTIVITY, replace(ACTIVITY, uuid=M1.uuid)),
    {"tracing": 1},
    ("profiler",),
    0.5,
    {"kept": 7},
    {"torn": 1},
    {M1.uuid: Tracing(((3 * NS, 2 * NS),), 5), G0.uuid: Tracing(open_ns=7)},
)


def totals(snapshot: FleetSnapshot) -> dict[str, float]:
    """Everything that only grows."""
    found: dict[str, float] = {f"records {name}": value for name, value in snapshot.kernels.records.items()}
    found |= {f"rejected {name}": value for name, value in snapshot.kernels.rejected.items()}
    for job in snapshot.kernels.jobs:
        found |= {f"{job.uuid} {name}": amount.executions for name, amount in job.kernels.items()}
        found |= {f"{job.uuid} {name} ns2": amount.deviation_ns2 for name, amount in job.kernels.items()}
        found |= {f"{job.uuid} {name}": sum(durations.buckets) for name, durations in job.durations.items()}
        found |= {f"{job.uuid} {name} bytes": copies.bytes for name, copies in job.copies.items()}
        found |= {f"{job.uuid} {name}": value for name, value in job.sums.items()}
        if job.queue is not None:
            found[f"{job.uuid} queue"] = sum(job.queue.buckets)
    return found


def test_a_report_is_recorded_and_played_without_going_back(tmp_path: Path) -> None:
    """UUIDs masked, names kept, the header tells of the source; three loops add up to three times as much."""
    path = tmp_path / "r.jsonl.gz"
    with Recorder(path) as recorder:
        recorder.put(inventory(G0, M1))
        recorder.put(replace(REPORT, time_ns=time.monotonic_ns() + NS))
    lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert lines[0]["sources"] == ["kernels"]
    assert lines[2]["type"] == "kernel"
    masks = [gpu["uuid"] for gpu in lines[1]["gpus"]]
    assert [activity["uuid"] for activity in lines[2]["activities"]] == masks
    assert set(lines[2]["tracing"]) == set(masks)
    assert G0.uuid not in str(lines)
    recording = replace(
        Recording.load(path), duration_ns=5 * NS, events=(inventory(G0, M1, at=0), replace(REPORT, time_ns=5 * NS))
    )
    clock = Clock()
    fleet = Fleet(clock, GAUGE_WINDOW_NS)
    before: dict[str, float] = {}
    for event in islice(loop(recording, NS), 6):
        clock.now_s = time_of(event) / NS
        fleet.put(event)
        after = totals(fleet.snapshot())
        assert all(after[name] >= value for name, value in before.items())
        before = after
    assert before[f"{G0.uuid} gemm ns2"] == 12
    assert before[f"{M1.uuid} busy_ns"] == 15
    assert before["records kept"] == 21
    (first, _) = fleet.snapshot().kernels.jobs
    assert (first.now.latency_ms, first.now.patterns) == ({"gemm": 0.5}, {"gemm": "few_long"})


@pytest.mark.parametrize(
    "report",
    [
        replace(REPORT, activities=(ACTIVITY, ACTIVITY)),
        replace(REPORT, activities=(replace(ACTIVITY, job=""),)),
        replace(REPORT, activities=(replace(ACTIVITY, kernels={"": KernelAmount()}),)),
        replace(REPORT, activities=(replace(ACTIVITY, kernels={f"k{n}": KernelAmount() for n in range(65)}),)),
        replace(REPORT, activities=(replace(ACTIVITY, kernels={"a": KernelAmount(-1)}),)),
        replace(REPORT, activities=(replace(ACTIVITY, queue=Durations(1, (1, 2))),)),
        replace(REPORT, activities=(replace(ACTIVITY, durations={"gemm": Durations(-1, ONES)}),)),
        replace(REPORT, activities=(replace(ACTIVITY, copies={"d2d_device": CopyAmount(1, 1, 1, (1,))}),)),
        replace(REPORT, activities=(replace(ACTIVITY, sums={"busy_ns": -5}),)),
        replace(REPORT, activities=(replace(ACTIVITY, latency_ms={"gemm": -0.1}),)),
        replace(REPORT, overhead_ratio=2.0),
        replace(REPORT, records={"kept": -1}),
        replace(REPORT, tracing={G0.uuid: Tracing(((1, 2),))}),
        replace(REPORT, tracing={G0.uuid: Tracing(((1, -1),))}),
        replace(REPORT, tracing={G0.uuid: Tracing(open_ns=-1)}),
        replace(REPORT, tracing={G0.uuid: Tracing(((2, 1),) * 257)}),
    ],
)
def test_a_line_that_cannot_be_true_is_refused(report: KernelReport) -> None:
    """A recording is somebody else's: nothing negative, nothing twice, nothing of another shape."""
    encoded = msgspec.json.encode(encode_event(report, 0))
    with pytest.raises(msgspec.ValidationError):
        decode_line(msgspec.json.decode(encoded, type=Line), 0)


@pytest.mark.parametrize("tracing", [None, {}, {G0.uuid: Tracing(((3, 2), (1, 0)), 4)}, {G0.uuid: None}])
def test_when_agents_traced_comes_back_as_it_was(tracing: dict[str, Tracing | None] | None) -> None:
    """Not known, not at all, or when; lines from before there was such a thing do not know."""
    encoded = msgspec.json.encode(encode_event(replace(REPORT, tracing=tracing), 0))
    (decoded,) = decode_line(msgspec.json.decode(encoded, type=Line), 0)
    assert decoded == replace(REPORT, tracing=tracing)
    if tracing is None:
        assert b'tracing":null' not in encoded


@pytest.mark.parametrize("unrecorded", [(), ("copies",), RECORDABLES], ids=str)
def test_what_is_not_recorded_comes_back_as_it_was(unrecorded: tuple[Recordable, ...]) -> None:
    """And a line from before there was such a thing has recorded everything."""
    report = replace(REPORT, activities=(replace(ACTIVITY, unrecorded=frozenset(unrecorded)),))
    encoded = msgspec.json.encode(encode_event(report, 0))
    (decoded,) = decode_line(msgspec.json.decode(encoded, type=Line), 0)
    assert decoded == report
    old = json.loads(encoded)
    del old["activities"][0]["unrecorded"]
    (decoded,) = decode_line(msgspec.json.decode(json.dumps(old), type=Line), 0)
    assert decoded == replace(REPORT, activities=(ACTIVITY,))


def test_a_recording_tells_what_tracing_costs(tmp_path: Path) -> None:
    """Windows and reports, through a file: the figure is the one that the GPU's owner saw."""
    path, began_ns = tmp_path / "r.jsonl.gz", time.monotonic_ns()
    with Recorder(path) as recorder:
        recorder.put(inventory(G0, M1))
        for tenth in range(1, 1600):
            value = 0.45 if tenth % 100 > 90 else 0.5
            recorder.put(Window(G0.uuid, "gpm", began_ns + tenth * NS // 10, NS // 10, {"pipe_tensor": value}))
            if tenth % 50 == 0:
                told = {G0.uuid: Tracing(((NS, 0),))} if tenth % 100 == 0 else {}
                recorder.put(replace(REPORT, time_ns=began_ns + tenth * NS // 10, activities=(), tracing=told))
    clock = Clock()
    fleet = Fleet(clock, GAUGE_WINDOW_NS)
    for event in play(Recording.load(path), 7 * NS):
        clock.now_s = time_of(event) / NS
        fleet.put(event)
    found = {totals.gpu.uuid: totals.agent_slowdown for totals in fleet.snapshot().gpus}
    assert list(found.values()) == [pytest.approx(0.1, abs=0.01), None]
