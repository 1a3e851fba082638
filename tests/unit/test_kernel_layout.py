"""What the reader takes from an agent's file stands where the agent's header says, as its compiler sees it."""

from __future__ import annotations

import re
import struct
import subprocess
from pathlib import Path
from typing import Final

import pytest

from gpu_hpc_exporter.sources.kernels import layout

HEADER: Final = Path(__file__).parents[2] / "exporter" / "agent" / "layout.h"
CONSTANTS: Final = {
    "AGENT_LAYOUT_VERSION": layout.VERSION,
    "AGENT_DEVICES": layout.DEVICES,
    "AGENT_KERNELS": layout.KERNELS,
    "AGENT_STRINGS": layout.STRINGS,
    "AGENT_NAME": layout.MAX_NAME,
    "AGENT_BUCKETS": layout.BUCKETS,
    "AGENT_COPY_BUCKETS": layout.COPY_BUCKETS,
    "AGENT_ENVIRONMENT": layout.MAX_ENVIRONMENT,
    "AGENT_INTERVALS": layout.INTERVALS,
    **{f"AGENT_{name.upper()}": number for number, name in enumerate(layout.STATES)},
    **{f"AGENT_REASON_{(name or 'none').upper()}": number for number, name in enumerate(layout.REASONS)},
    **{f"AGENT_SYNC_{name.upper()}": number for number, name in enumerate(layout.SYNCS)},
    **{f"AGENT_{name.upper()}": number for number, name in enumerate(layout.DIRECTIONS)},
    **{f"AGENT_{name.upper()}": number for number, name in enumerate(layout.MEMORIES)},
    "AGENT_DIRECTIONS": len(layout.DIRECTIONS),
    "AGENT_MEMORIES": len(layout.MEMORIES),
    "AGENT_SYNCS": len(layout.SYNCS),
    "AGENT_FLAG_LAUNCHES": layout.FLAG_LAUNCHES,
    "AGENT_FLAG_NO_COPIES": layout.FLAG_NO_COPIES,
    "AGENT_FLAG_NO_WAITS": layout.FLAG_NO_WAITS,
}
SIZES: Final = {
    "agent_header": layout.HEADER_SIZE,
    "agent_device": layout.DEVICE_SIZE,
    "agent_kernel": layout.KERNEL_SIZE,
    "agent_copies": 8 * layout.COPY_FIELDS,
    "agent_file": layout.FILE_SIZE,
    "agent_interval": layout.INTERVAL.size,
}
HEADER_FIELDS: Final = (
    *("magic", "version", "header_size", "file_size", "device_offset", "device_stride", "device_count"),
    *("kernel_offset", "kernel_stride", "kernel_count", "overflow_count", "strings_offset", "strings_size"),
    *("pid", "start_ticks", "uid", "mode", "created_ns"),
)
STATUS_FIELDS: Final = (
    *("heartbeat_ns", "state", "reason", "state_since_ns", "error_code", "flags", "error_call", "cupti_version"),
    *("driver_version", "overhead_ratio", "launch_cost_us", "node_cost_us", "budget", "agent_cpu_ns"),
    *("records_kept", "records_dropped", "records_invalid", "records_unmatched", "node_records"),
    *("windows_published", "windows_discarded", "last_window_ns", "window_seconds", "period_seconds", "on_ns"),
    *("buffers_out", "kernels", "strings_used", "environment_size", "intervals_total"),
)
LANE_FIELDS: Final = {
    "executions": layout.L_EXECUTIONS,
    "launches": layout.L_LAUNCHES,
    "ns": layout.L_NS,
    "ns_squared": layout.L_SQUARED,
    "max_ns": layout.L_MAX,
    "latency_ns": layout.L_LATENCY_NS,
    "latency_count": layout.L_LATENCY_COUNT,
    "buckets": layout.L_BUCKETS,
}
DETAIL_FIELDS: Final = (
    *("executions", "ns", "ns_squared", "window", "window_max_ns", "window_latency_ns", "window_latency_count"),
)
DEVICE_FIELDS: Final = {
    "traced_ns": layout.D_TRACED,
    "device_traced_ns": layout.D_DEVICE_TRACED,
    "busy_ns": layout.D_BUSY,
    "compute_ns": layout.D_COMPUTE,
    "communication_ns": layout.D_COMMUNICATION,
    "copy_ns": layout.D_COPY,
    "overlap_ns": layout.D_OVERLAP,
    "idle_host_ns": layout.D_IDLE_HOST,
    "idle_queue_ns": layout.D_IDLE_QUEUE,
    "idle_other_ns": layout.D_IDLE_OTHER,
    "launch_api_ns": layout.D_LAUNCH_API,
    "queue_ns": layout.D_QUEUE_NS,
    "queue_buckets": layout.D_QUEUE_BUCKETS,
    "graph_launches_traced": layout.D_GRAPHS_TRACED,
    "graph_launches_untraced": layout.D_GRAPHS_UNTRACED,
    "sync_ns": layout.D_SYNC_NS,
    "copies": layout.D_COPIES,
}
COPIES_FIELDS: Final = {
    "count": layout.C_COUNT,
    "bytes": layout.C_BYTES,
    "ns": layout.C_NS,
    "api_ns": layout.C_API_NS,
    "api_calls": layout.C_API_CALLS,
    "buckets": layout.C_BUCKETS,
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """What a C compiler makes of the header: numbers by constant, size or `structure.field`."""
    folder = tmp_path_factory.mktemp("layout")
    source, program = folder / "probe.c", folder / "probe"
    source.write_text(probe(), "utf-8")
    subprocess.run(["gcc", "-std=c11", f"-I{HEADER.parent}", str(source), "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: int(number) for name, number in map(str.split, lines)}


def probe() -> str:
    """A program that prints the numbers."""
    fields = [
        ("agent_header", field) for field in (*HEADER_FIELDS, "sequence", *STATUS_FIELDS, "intervals", "environment")
    ]
    fields += [("agent_kernel", field) for field in ("device", "name_offset", "name_size", *LANE_FIELDS, "window")]
    fields += [("agent_kernel", field) for field in DETAIL_FIELDS]
    fields += [("agent_device", field) for field in ("uuid", "used", *DEVICE_FIELDS)]
    fields += [("agent_copies", field) for field in COPIES_FIELDS]
    fields += [("agent_interval", field) for field in ("begin_ns", "end_ns")]
    fields += [("agent_file", field) for field in ("header", "devices", "kernels", "strings")]
    show = 'printf("%s %llu\\n", "{}", (unsigned long long)({}));'
    lines = [show.format(name, name) for name in CONSTANTS]
    lines += [show.format(f"size.{name}", f"sizeof(struct {name})") for name in SIZES]
    lines += [show.format(f"{s}.{f}", f"offsetof(struct {s}, {f})") for s, f in fields]
    bounds = ("static const unsigned long long durations[] = AGENT_DURATION_BOUNDS, copies[] = AGENT_COPY_BOUNDS;",)
    lines += [show.format(f"duration.{n}", f"durations[{n}]") for n in range(len(layout.DURATION_BOUNDS_NS))]
    lines += [show.format(f"copy.{n}", f"copies[{n}]") for n in range(len(layout.COPY_BOUNDS))]
    return "\n".join(['#include "layout.h"', "#include <stdio.h>", *bounds, "int main(void) {", *lines, "}"])


def offsets(kinds: str, start: int = 0) -> list[int]:
    """Where the fields of a packed structure of Python's begin."""
    found, before = [], ""
    for item in _items(kinds):
        found.append(start + struct.calcsize("<" + before))
        before += item
    return found


def data_offsets(kinds: str) -> list[int]:
    """The same without padding."""
    return [place for place, item in zip(offsets(kinds), _items(kinds), strict=True) if not item.endswith("x")]


def _items(kinds: str) -> list[str]:
    """`<2I40sQ` → I, I, 40s, Q."""
    items = []
    for count, kind in re.findall(r"(\d*)([a-zA-Z])", kinds):
        items += [f"{count}{kind}"] if kind in "sx" else [kind] * int(count or 1)
    return items


def test_constants_and_sizes(compiled: dict[str, int]) -> None:
    """Versions, counts, enumerations, bounds of buckets and sizes are the header's."""
    assert {name: compiled[name] for name in CONSTANTS} == CONSTANTS
    assert {name: compiled[f"size.{name}"] for name in SIZES} == SIZES
    assert [compiled[f"duration.{n}"] for n in range(8)] == list(layout.DURATION_BOUNDS_NS)
    assert [compiled[f"copy.{n}"] for n in range(6)] == list(layout.COPY_BOUNDS)


def test_the_header_is_where_it_should_be(compiled: dict[str, int]) -> None:
    """Each field that the two structures unpack, the sequence between them, intervals and the environment."""
    identity = offsets(layout.IDENTITY.format)
    assert [compiled[f"agent_header.{field}"] for field in HEADER_FIELDS] == identity
    assert compiled["agent_header.sequence"] == layout.SEQUENCE_OFFSET
    status = offsets(layout.STATUS.format, layout.STATUS_OFFSET)
    assert [compiled[f"agent_header.{field}"] for field in STATUS_FIELDS] == status
    assert compiled["agent_header.intervals"] == layout.INTERVALS_OFFSET
    interval = [compiled[f"agent_interval.{field}"] for field in ("begin_ns", "end_ns")]
    assert interval == offsets(layout.INTERVAL.format)
    assert compiled["agent_header.environment"] == layout.ENVIRONMENT_OFFSET == layout.HEAD_SIZE
    parts = ("header", "devices", "kernels", "strings")
    wanted = [0, layout.DEVICE_OFFSET, layout.KERNEL_OFFSET, layout.STRINGS_OFFSET]
    assert [compiled[f"agent_file.{part}"] for part in parts] == wanted


def test_kernels_are_where_they_should_be(compiled: dict[str, int]) -> None:
    """The key, the row of counters, and what belongs to the last window."""
    key = [compiled[f"agent_kernel.{field}"] for field in ("device", "name_offset", "name_size")]
    assert key == offsets(layout.KEY.format)
    for field, number in LANE_FIELDS.items():
        assert compiled[f"agent_kernel.{field}"] == layout.LANES_OFFSET + 8 * number, field
    details = [compiled[f"agent_kernel.{field}"] for field in DETAIL_FIELDS]
    assert (data_offsets(layout.DETAILS.format), data_offsets(layout.SPREAD.format)) == (details, details[:3])
    assert layout.DETAILS.size == layout.SPREAD.size == layout.KERNEL_SIZE


def test_devices_are_where_they_should_be(compiled: dict[str, int]) -> None:
    """UUID, use, counters and copies."""
    first = compiled["agent_device.traced_ns"]
    assert (compiled["agent_device.uuid"], compiled["agent_device.used"]) == (0, layout.USED)
    assert first == layout.COUNTERS_OFFSET
    for field, number in DEVICE_FIELDS.items():
        assert compiled[f"agent_device.{field}"] == first + 8 * number, field
    for field, number in COPIES_FIELDS.items():
        assert compiled[f"agent_copies.{field}"] == 8 * number, field
    assert layout.COUNTERS_OFFSET + 8 * layout.COUNTERS == layout.DEVICE_SIZE
