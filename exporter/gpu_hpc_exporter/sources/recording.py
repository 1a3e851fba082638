"""The recording format: `*.jsonl.gz`, one JSON object a line, `"type"` first, `t` in seconds from the start.

Lines are `header`, `phase`, `inventory`, `reading`, `windows_rejected`, `rejected`, `state`, `incident`, `processes`,
`job` and `kernel`. Values are in base units. A recording comes from somebody else's machine, so every line is checked
against these types and every problem names file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from gpu_hpc_exporter.model import (
    COPY_BUCKETS,
    DURATION_BUCKETS,
    NS,
    AgentState,
    Driver,
    DriverError,
    Event,
    Gpu,
    GpuActivity,
    GpuFellOff,
    GpuJobs,
    GpuProcess,
    GpuProcesses,
    Incident,
    IntervalInForce,
    Inventory,
    JobsInForce,
    JobSource,
    KernelReport,
    L2Definition,
    Quantity,
    Reading,
    ReadingRejected,
    Readings,
    RecordResult,
    SamplingIncident,
    SourceName,
    State,
    StateChange,
    Tracing,
    Window,
    WindowSource,
    WindowsRejected,
    XidError,
)
from gpu_hpc_exporter.sources.values import problem_of_quantity, problem_of_reading

T = TypeVar("T")

FORMAT: Final = 1

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""From the start of the recording; 30 years at most, so that nanoseconds stay exact integers."""
MAX_WINDOW_S: Final = 60
MAX_TEXT: Final = 400
_MAX_JOBS: Final = 4096
_MAX_LIBRARIES: Final = 64
MAX_PROCESSES: Final = 65_536
MAX_ACTIVITIES: Final = 256
_MAX_KERNELS: Final = 64
MAX_SPANS: Final = 256
"""Times of tracing of one GPU in one line."""
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


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
    source: WindowSource | Literal["nvml"]
    v: dict[Text, float]
    dt: Seconds = 0.0
    late: bool = False


class WindowsRejectedLine(msgspec.Struct, tag="windows_rejected", tag_field="type", frozen=True):
    """Windows whose values cannot be true."""

    t: Seconds
    gpu: Text
    source: WindowSource
    count: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class RejectedLine(msgspec.Struct, tag="rejected", tag_field="type", frozen=True):
    """A reading that cannot be true."""

    t: Seconds
    gpu: Text
    reading: Text
    reason: Literal["nan", "negative", "above_range", "sentinel"]


class StateLine(msgspec.Struct, tag="state", tag_field="type", frozen=True, omit_defaults=True):
    """A source changed state for one GPU, or for the host where `gpu` is "".

    `interval` > 0: it is active with windows of so many seconds, and `l2` is what its missed L2 sectors are.
    """

    t: Seconds
    source: SourceName
    state: State
    gpu: Text = ""
    reason: Text = ""
    interval: Seconds = 0.0
    l2: L2Definition = ""


class IncidentLine(msgspec.Struct, tag="incident", tag_field="type", frozen=True, omit_defaults=True):
    """Something that PM sampling had to do on one GPU, or on the host where `gpu` is ""."""

    t: Seconds
    incident: Incident
    gpu: Text = ""


class ProcessesLine(msgspec.Struct, tag="processes", tag_field="type", frozen=True):
    """Every process on a GPU, null where no list can be trusted."""

    t: Seconds
    gpu: Text
    processes: Annotated[list[GpuProcess], msgspec.Meta(max_length=MAX_PROCESSES)] | None


class JobLine(msgspec.Struct, tag="job", tag_field="type", frozen=True, omit_defaults=True):
    """Whose the GPUs are from `t` on, and how many seconds before that each source had told."""

    t: Seconds
    gpus: dict[Text, GpuJobs]
    age: dict[JobSource, Seconds] = {}


class KernelLine(msgspec.Struct, tag="kernel", tag_field="type", frozen=True, omit_defaults=True):
    """What all kernel agents told of the time since the line before."""

    t: Seconds
    activities: Annotated[list[GpuActivity], msgspec.Meta(max_length=MAX_ACTIVITIES)] = []
    agents: dict[AgentState, Count] = {}
    reasons: list[Text] = []
    overhead: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    records: dict[RecordResult, Count] = {}
    rejected: dict[Text, Count] = {}
    tracing: dict[Text, Tracing | None] | None = None


Line = (
    HeaderLine
    | PhaseLine
    | InventoryLine
    | ReadingLine
    | WindowsRejectedLine
    | RejectedLine
    | StateLine
    | IncidentLine
    | ProcessesLine
    | JobLine
    | KernelLine
)


_Measured = (
    Inventory
    | Window
    | WindowsRejected
    | ReadingRejected
    | Readings
    | StateChange
    | IntervalInForce
    | SamplingIncident
    | XidError
    | GpuFellOff
    | DriverError
)


def encode_event(event: Event, start_ns: int) -> Line | None:
    """The line for an event, or None for what a recording does not keep."""
    seconds = max(0, (event.end_ns if isinstance(event, Window) else event.time_ns) - start_ns) / NS
    if isinstance(event, GpuProcesses | JobsInForce):
        return _encode_jobs(event, seconds)
    if isinstance(event, KernelReport):
        return _encode_kernels(event, seconds)
    return _encode_measured(event, seconds)


def _encode_jobs(event: GpuProcesses | JobsInForce, seconds: float) -> Line:
    if isinstance(event, GpuProcesses):
        return ProcessesLine(seconds, event.uuid, None if event.processes is None else list(event.processes))
    ages = {source: max(0, event.time_ns - told_ns) / NS for source, told_ns in event.told_ns.items()}
    return JobLine(seconds, dict(event.gpus), ages)


def _encode_kernels(report: KernelReport, seconds: float) -> Line:
    return KernelLine(
        seconds,
        list(report.activities),
        dict(report.agents),
        [reason[:MAX_TEXT] for reason in report.reasons],
        report.overhead_ratio,
        dict(report.records),
        dict(report.rejected),
        None if report.tracing is None else dict(report.tracing),
    )


def _encode_measured(event: _Measured, seconds: float) -> Line | None:
    match event:
        case Window(uuid, source, _, duration_ns, values, late):
            return ReadingLine(seconds, uuid, source, {str(k): v for k, v in values.items()}, duration_ns / NS, late)
        case Readings(uuid, _, readings):
            return ReadingLine(seconds, uuid, "nvml", {str(k): v for k, v in readings.items()})
        case Inventory(_, gpus, driver):
            return InventoryLine(seconds, driver, list(gpus))
        case WindowsRejected(_, uuid, source, count):
            return WindowsRejectedLine(seconds, uuid, source, count)
        case ReadingRejected(_, uuid, reading, reason):
            return RejectedLine(seconds, uuid, reading, reason)
        case StateChange(_, source_name, uuid, state, why):
            return StateLine(seconds, source_name, state, uuid, why[:MAX_TEXT])
        case IntervalInForce(_, uuid, source, interval_ns, l2):
            return StateLine(seconds, source, "active", uuid, "", interval_ns / NS, l2)
        case SamplingIncident(_, uuid, incident):
            return IncidentLine(seconds, incident, uuid)
        case XidError() | GpuFellOff() | DriverError():
            return None


def _check(values: Mapping[T, float], problem_of: Callable[[T, float], str | None]) -> None:
    for name, value in values.items():
        problem = problem_of(name, value)
        if problem is not None:
            raise msgspec.ValidationError(f"{name} = {value}: {problem}")


def _decode_reading(line: ReadingLine, time_ns: int) -> Readings | Window:
    if line.source == "nvml":
        readings = msgspec.convert(line.v, dict[Reading, float])
        _check(readings, problem_of_reading)
        return Readings(line.gpu, time_ns, readings)
    values = msgspec.convert(line.v, dict[Quantity, float])
    _check(values, problem_of_quantity)
    if not 0 < line.dt <= MAX_WINDOW_S:
        raise msgspec.ValidationError(f"a window of {line.dt} s: expected more than 0, at most {MAX_WINDOW_S}")
    return Window(line.gpu, line.source, time_ns, round(line.dt * NS), values, line.late)


def _decode_processes(line: ProcessesLine, time_ns: int) -> GpuProcesses:
    for process in line.processes or ():
        _check_share(process.memory_bytes, process.sm_ratio)
    return GpuProcesses(time_ns, line.gpu, None if line.processes is None else tuple(line.processes))


def _decode_jobs(line: JobLine, time_ns: int) -> JobsInForce:
    """A job without a name, or two with one, would be series that nobody can tell apart."""
    for jobs in line.gpus.values():
        names = [row.job.job for row in jobs.jobs]
        if not all(names) or len(set(names)) < len(names):
            raise msgspec.ValidationError("a GPU's jobs need names, each another one")
        if not len(names) <= jobs.count <= _MAX_JOBS:
            raise msgspec.ValidationError(f"count = {jobs.count}: expected {len(names)} to {_MAX_JOBS}")
        for row in jobs.jobs:
            _check_share(row.memory_bytes, row.sm_ratio)
            if row.processes < 0:
                raise msgspec.ValidationError(f"processes = {row.processes}: negative")
            if len(set(row.libraries)) < len(row.libraries) or not all(one.version for one in row.libraries):
                raise msgspec.ValidationError("a job's libraries need versions, each another one")
            if len(row.libraries) > _MAX_LIBRARIES:
                raise msgspec.ValidationError(f"{len(row.libraries)} libraries: expected up to {_MAX_LIBRARIES}")
    told = {source: time_ns - round(age * NS) for source, age in line.age.items()}
    return JobsInForce(time_ns, line.gpus, {}, told)


def _decode_kernels(line: KernelLine, time_ns: int) -> KernelReport:
    """What is added up must be no less than nothing; a (GPU, job) that is there twice would be counted twice."""
    pairs = [(activity.uuid, activity.job) for activity in line.activities]
    if not all(job for _, job in pairs) or len(set(pairs)) < len(pairs):
        raise msgspec.ValidationError("activities need jobs, each (GPU, job) once")
    for activity in line.activities:
        _check_activity(activity)
    _check_tracing(tracing for tracing in (line.tracing or {}).values() if tracing is not None)
    return KernelReport(
        time_ns,
        tuple(line.activities),
        line.agents,
        tuple(line.reasons),
        line.overhead,
        line.records,
        line.rejected,
        line.tracing,
    )


def _check_tracing(gpus: Iterable[Tracing]) -> None:
    for tracing in gpus:
        if len(tracing.ended) > MAX_SPANS:
            raise msgspec.ValidationError(f"{len(tracing.ended)} times of tracing: expected up to {MAX_SPANS}")
        if not 0 <= tracing.open_ns < _MAX_AMOUNT or any(
            not 0 <= end_ns <= begin_ns < _MAX_AMOUNT for begin_ns, end_ns in tracing.ended
        ):
            raise msgspec.ValidationError("times of tracing begin before they end, and end before the line")


def _check_activity(activity: GpuActivity) -> None:
    if len(activity.kernels) > _MAX_KERNELS or not all(activity.kernels):
        raise msgspec.ValidationError(f"{len(activity.kernels)} kernels: expected up to {_MAX_KERNELS}, with names")
    durations = [*activity.durations.values(), activity.queue]
    copies = list(activity.copies.values())
    if any(len(row.buckets) != DURATION_BUCKETS for row in durations):
        raise msgspec.ValidationError(f"durations have {DURATION_BUCKETS} buckets")
    if any(len(row.buckets) != COPY_BUCKETS for row in copies):
        raise msgspec.ValidationError(f"copies have {COPY_BUCKETS} buckets")
    amounts: list[float] = [*activity.sums.values(), *activity.latency_ms.values(), *activity.longest_ns.values()]
    for kernel in activity.kernels.values():
        amounts += [kernel.executions, kernel.launches, kernel.ns, kernel.deviation_ns2]
    for row in durations:
        amounts += [row.ns, *row.buckets]
    for copy in copies:
        amounts += [copy.bytes, copy.ns, copy.api_ns, *copy.buckets]
    amounts.append(activity.processes)
    wrong = [amount for amount in amounts if not 0 <= amount < _MAX_AMOUNT]
    if wrong:
        raise msgspec.ValidationError(f"an amount of {wrong[0]}: expected 0 or more")


_MAX_AMOUNT: Final = 1e30


def _check_share(memory_bytes: int | None, sm_ratio: float | None) -> None:
    problem = None if memory_bytes is None else problem_of_reading("memory_used_bytes", memory_bytes)
    problem = problem or (None if sm_ratio is None else problem_of_quantity("sm_active", sm_ratio))
    if problem is not None:
        raise msgspec.ValidationError(f"memory_bytes = {memory_bytes}, sm_ratio = {sm_ratio}: {problem}")


def decode_line(line: Line, start_ns: int) -> tuple[Event, ...]:
    """The events of a line, () for header and phases. Raises msgspec.ValidationError for unknown names."""
    if isinstance(line, HeaderLine | PhaseLine):
        return ()
    time_ns = start_ns + round(line.t * NS)
    match line:
        case ReadingLine():
            return (_decode_reading(line, time_ns),)
        case InventoryLine():
            return (Inventory(time_ns, tuple(line.gpus), line.driver),)
        case WindowsRejectedLine():
            return (WindowsRejected(time_ns, line.gpu, line.source, line.count),)
        case RejectedLine():
            return (ReadingRejected(time_ns, line.gpu, line.reading, line.reason),)
        case StateLine(source="gpm" | "pm_sampling" as source) if line.interval:
            interval = IntervalInForce(time_ns, line.gpu, source, round(line.interval * NS), line.l2)
            return (interval, StateChange(time_ns, line.source, line.gpu, line.state, line.reason))
        case StateLine():
            return (StateChange(time_ns, line.source, line.gpu, line.state, line.reason),)
        case IncidentLine():
            return (SamplingIncident(time_ns, line.gpu, line.incident),)
        case ProcessesLine() | JobLine() | KernelLine():
            return (_decode_jobs_or_kernels(line, time_ns),)


def _decode_jobs_or_kernels(line: ProcessesLine | JobLine | KernelLine, time_ns: int) -> Event:
    match line:
        case ProcessesLine():
            return _decode_processes(line, time_ns)
        case JobLine():
            return _decode_jobs(line, time_ns)
        case KernelLine():
            return _decode_kernels(line, time_ns)
