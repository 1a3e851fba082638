"""Where things stand in an agent's file: `exporter/agent/layout.h` in Python. A test compares the two.

Integers are little endian; all but headers, names and keys are unsigned 64-bit counters, which lets a whole row of
them be added up as one large integer (`lanes`).
"""

from __future__ import annotations

import struct
from typing import Final

MAGIC: Final = b"GPUHPCAG"
VERSION: Final = 1
HEADER_SIZE: Final = 5448
DEVICES: Final = 16
DEVICE_SIZE: Final = 1480
KERNELS: Final = 4096
KERNEL_SIZE: Final = 216
STRINGS: Final = 1536 << 10
MAX_NAME: Final = 4096
MAX_ENVIRONMENT: Final = 4096
DEVICE_OFFSET: Final = HEADER_SIZE
KERNEL_OFFSET: Final = DEVICE_OFFSET + DEVICES * DEVICE_SIZE
OVERFLOW_OFFSET: Final = KERNEL_OFFSET + KERNELS * KERNEL_SIZE
STRINGS_OFFSET: Final = OVERFLOW_OFFSET + DEVICES * KERNEL_SIZE
FILE_SIZE: Final = STRINGS_OFFSET + STRINGS

DURATION_BOUNDS_NS: Final = tuple(1000 * 8**power for power in range(8))
COPY_BOUNDS: Final = (256, 4096, 65_536, 1 << 20, 1 << 24, 1 << 28)

IDENTITY: Final = struct.Struct("<8sIIQIIIIIIIIIIQIIQ")
"""magic, version, header_size, file_size; device offset, stride, count; kernel offset, stride, count, overflow count;
strings offset, size; pid, start_ticks, uid, mode, created_ns. What follows may change while it is read."""
SHAPE: Final = (
    *(HEADER_SIZE, FILE_SIZE, DEVICE_OFFSET, DEVICE_SIZE, DEVICES),
    *(KERNEL_OFFSET, KERNEL_SIZE, KERNELS, DEVICES, STRINGS_OFFSET, STRINGS),
)
"""From header_size to strings size, as every file of this version has them."""
SEQUENCE_OFFSET: Final = IDENTITY.size
SEQUENCE: Final = struct.Struct("<Q")

STATUS_OFFSET: Final = SEQUENCE_OFFSET + SEQUENCE.size
STATUS: Final = struct.Struct("<QIIQiI40sIIddddQ5Q3QddQIIIIQ")
"""From heartbeat_ns to intervals_total."""
ENVIRONMENT_OFFSET: Final = HEADER_SIZE - MAX_ENVIRONMENT
INTERVALS: Final = 64
INTERVALS_OFFSET: Final = STATUS_OFFSET + STATUS.size
INTERVAL: Final = struct.Struct("<QQ")
"""Begin and end of tracing by CLOCK_REALTIME; end 0: it goes on."""
HEAD_SIZE: Final = INTERVALS_OFFSET + INTERVALS * INTERVAL.size
"""All of a header that changes: everything but the environment."""

STATES: Final = ("waiting", "tracing", "paused", "off")
REASONS: Final = (
    "",
    "no_context",
    "profiler",
    "configured",
    "stopped",
    "no_cuda",
    "no_cupti",
    "missing_function",
    "unknown_version",
    "cupti_error",
    "budget",
    "invalid_records",
    "buffers",
    "windows_discarded",
)

FLAG_LAUNCHES: Final = 1 << 0
FLAG_NO_COPIES: Final = 1 << 3
FLAG_NO_WAITS: Final = 1 << 4

USED: Final = 16
"""After a device's UUID."""
COUNTERS_OFFSET: Final = 24
COUNTERS: Final = 182
D_TRACED, D_DEVICE_TRACED, D_BUSY, D_COMPUTE, D_COMMUNICATION, D_COPY, D_OVERLAP = range(7)
D_IDLE_HOST, D_IDLE_QUEUE, D_IDLE_OTHER = 7, 8, 9
D_TIMES: Final = 10
"""The first counters of a device are nanoseconds of the clock, of each of which there is only one at a time."""
D_LAUNCH_API, D_QUEUE_NS, D_QUEUE_BUCKETS = 11, 13, 14
D_GRAPHS_TRACED, D_GRAPHS_UNTRACED = 23, 24
D_SYNC_NS: Final = 28
SYNCS: Final = ("unknown", "event", "stream_wait_event", "stream", "context")
D_COPIES: Final = 38
DIRECTIONS: Final = ("h2d", "d2h", "d2d", "p2p")
MEMORIES: Final = ("pinned", "pageable", "device")
COPY_FIELDS: Final = 12
C_COUNT, C_BYTES, C_NS, C_API_NS, C_API_CALLS, C_BUCKETS = range(6)
BUCKETS: Final = 9
COPY_BUCKETS: Final = 7

KEY: Final = struct.Struct("<III")
"""device, name_offset, name_size."""
LANES_OFFSET: Final = 40
LANES: Final = 16
L_EXECUTIONS, L_LAUNCHES, L_NS, L_SQUARED, L_MAX, L_LATENCY_NS, L_LATENCY_COUNT, L_BUCKETS = range(8)
LANES_SIZE: Final = 8 * LANES
DETAILS: Final = struct.Struct("<40xQ8xQd96xQ16x3Q")
"""executions, ns, ns_squared, window; of that window: max_ns, latency_ns, latency_count."""
SPREAD: Final = struct.Struct("<40xQ8xQd144x")
"""The first three of them."""

HIGH: Final = sum(0xF << (64 * lane + 60) for lane in range(LANES) if lane != L_SQUARED)
"""No honest counter gets so far: 2^60 ns are 36 years. ns_squared is a double."""
DEVICE_HIGH: Final = sum(0xF << (64 * lane + 60) for lane in range(COUNTERS))


def unpack_lanes(lanes: int, count: int) -> tuple[int, ...]:
    """The first counters of a row."""
    return struct.unpack(f"<{count}Q", (lanes & ((1 << 64 * count) - 1)).to_bytes(8 * count, "little"))
