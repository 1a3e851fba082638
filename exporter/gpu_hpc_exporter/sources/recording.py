"""The recording format: `*.jsonl.gz`, one JSON object a line, `"type"` first, `t` in seconds from the start.

Lines are `header`, `phase`, `inventory`, `reading`, `missed`, `rejected` and `state`. Values are in base
units. A recording comes from somebody else's machine, so every line is checked against these types and
every problem names file and line.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from gpu_hpc_exporter.model import (
    Driver,
    DriverError,
    Event,
    Gpu,
    IntervalInForce,
    Inventory,
    Quantity,
    Reading,
    ReadingRejected,
    Readings,
    SourceName,
    State,
    StateChange,
    Window,
    WindowsMissed,
    WindowSource,
)

FORMAT: Final = 1
NS: Final = 1_000_000_000

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""From the start of the recording; 30 years at most, so that nanoseconds stay exact integers."""
Text = Annotated[str, msgspec.Meta(max_length=400)]


class HeaderLine(msgspec.Struct, tag="header", tag_field="type", frozen=True):
    """First line of every recording."""

    format: int
    project_version: Text
    driver: Driver
    sources: list[Text]
    gpus: list[Text]


class PhaseLine(msgspec.Struct, tag="phase", tag_field="type", frozen=True):
    """From `t` on the workload did this."""

    t: Seconds
    name: Text


class InventoryLine(msgspec.Struct, tag="inventory", tag_field="type", frozen=True):
    """The GPUs from `t` on."""

    t: Seconds
    driver: Driver
    gpus: list[Gpu]


class ReadingLine(msgspec.Struct, tag="reading", tag_field="type", frozen=True, omit_defaults=True):
    """A window (`dt` > 0, `v` by quantity) or a set of slow readings (source nvml, `v` by reading)."""

    t: Seconds
    gpu: Text
    source: Literal["gpm", "nvml"]
    v: dict[Text, float]
    dt: Seconds = 0.0
    late: bool = False


class MissedLine(msgspec.Struct, tag="missed", tag_field="type", frozen=True):
    """Windows that were due and did not come."""

    t: Seconds
    gpu: Text
    source: WindowSource
    result: Literal["lost", "rejected"]
    count: Annotated[int, msgspec.Meta(ge=1)]


class RejectedLine(msgspec.Struct, tag="rejected", tag_field="type", frozen=True):
    """A reading that cannot be true."""

    t: Seconds
    gpu: Text
    reading: Text
    reason: Literal["nan", "negative", "above_range", "sentinel"]


class StateLine(msgspec.Struct, tag="state", tag_field="type", frozen=True, omit_defaults=True):
    """A source changed state for one GPU, or for the host where `gpu` is ""."""

    t: Seconds
    source: SourceName
    state: State
    gpu: Text = ""
    reason: Text = ""
    interval: Seconds = 0.0


Line = HeaderLine | PhaseLine | InventoryLine | ReadingLine | MissedLine | RejectedLine | StateLine


def encode_event(event: Event, start_ns: int) -> Line | None:
    """The line for an event, or None for what a recording does not keep."""
    seconds = max(0, (event.end_ns if isinstance(event, Window) else event.time_ns) - start_ns) / NS
    match event:
        case Window(uuid, source, _, duration_ns, values, late):
            return ReadingLine(seconds, uuid, source, {str(k): v for k, v in values.items()}, duration_ns / NS, late)
        case Readings(uuid, _, readings):
            return ReadingLine(seconds, uuid, "nvml", {str(k): v for k, v in readings.items()})
        case Inventory(_, gpus, driver):
            return InventoryLine(seconds, driver, list(gpus))
        case WindowsMissed(_, uuid, source, result, count):
            return MissedLine(seconds, uuid, source, result, count)
        case ReadingRejected(_, uuid, reading, reason):
            return RejectedLine(seconds, uuid, reading, reason)
        case StateChange(_, source_name, uuid, state, why):
            return StateLine(seconds, source_name, state, uuid, why)
        case IntervalInForce(_, uuid, source, interval_ns):
            return StateLine(seconds, source, "active", uuid, "", interval_ns / NS)
        case DriverError():
            return None


def decode_line(line: Line, start_ns: int) -> tuple[Event, ...]:
    """The events of a line, () for header and phases. Raises msgspec.ValidationError for unknown names."""
    if isinstance(line, HeaderLine | PhaseLine):
        return ()
    time_ns = start_ns + round(line.t * NS)
    match line:
        case ReadingLine(source="nvml"):
            return (Readings(line.gpu, time_ns, msgspec.convert(line.v, dict[Reading, float])),)
        case ReadingLine():
            values = msgspec.convert(line.v, dict[Quantity, float])
            return (Window(line.gpu, "gpm", time_ns, round(line.dt * NS), values, line.late),)
        case InventoryLine():
            return (Inventory(time_ns, tuple(line.gpus), line.driver),)
        case MissedLine():
            return (WindowsMissed(time_ns, line.gpu, line.source, line.result, line.count),)
        case RejectedLine():
            return (ReadingRejected(time_ns, line.gpu, line.reading, line.reason),)
        case StateLine(source="gpm") if line.interval:
            interval = IntervalInForce(time_ns, line.gpu, "gpm", round(line.interval * NS))
            return (interval, StateChange(time_ns, line.source, line.gpu, line.state, line.reason))
        case StateLine():
            return (StateChange(time_ns, line.source, line.gpu, line.state, line.reason),)
