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
    CopyAmount,
    Durations,
    GpuActivity,
    KernelAmount,
    KernelReport,
)
from gpu_hpc_exporter.samplers.fleet import Fleet, FleetSnapshot
from gpu_hpc_exporter.sources.record import Recorder
from gpu_hpc_exporter.sources.recording import Line, decode_line, encode_event
from gpu_hpc_exporter.sources.replay import Recording, loop, time_of
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
    2 * NS, (ACTIVITY, replace(ACTIVITY, uuid=M1.uuid)), {"tracing": 1}, ("profiler",), 0.5, {"kept": 7}, {"torn": 1}
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
    ],
)
def test_a_line_that_cannot_be_true_is_refused(report: KernelReport) -> None:
    """A recording is somebody else's: nothing negative, nothing twice, nothing of another shape."""
    encoded = msgspec.json.encode(encode_event(report, 0))
    with pytest.raises(msgspec.ValidationError):
        decode_line(msgspec.json.decode(encoded, type=Line), 0)
