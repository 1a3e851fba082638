"""Frozen types that flow from sources to totals, already in base units.

A source produces *events*; `samplers.fleet.Fleet` folds them into totals and `sources.record` writes them
to a file. Playing that file back produces the same events, so nothing above the sources can tell a GPU
from a recording. Ratios are 0-1, times integer nanoseconds on the sampler's monotonic clock.

Absent is not zero: a quantity that was not measured has no key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol, get_args

NS: Final = 1_000_000_000
"""Nanoseconds in a second."""

SourceName = Literal["gpm", "pm_sampling", "nvml", "kernels", "kmsg", "replay", "procfs", "kubelet", "slurm"]
JobSource = Literal["procfs", "kubelet", "slurm"]
"""Sources of job identity; they concern the host, never one GPU."""
WindowSource = Literal["gpm", "pm_sampling"]
State = Literal["active", "paused", "busy", "no_permission", "unsupported", "stale", "failed", "lost"]
STATES: tuple[State, ...] = get_args(State)

Link = Literal["pcie", "nvlink", "c2c"]

RatioQuantity = Literal[
    "sm_active",
    "sm_occupancy",
    "pipe_tensor",
    "pipe_fp64",
    "pipe_fp32",
    "pipe_fp16",
    "pipe_int",
    "pipe_shared",
    "engine_decode",
    "engine_encode",
    "engine_ofa",
    "engine_jpeg",
    "dram_active",
    "l2_active",
]
"""Mean share of the window, 0-1."""

CountQuantity = Literal[
    "pcie_host_to_gpu_bytes",
    "pcie_gpu_to_host_bytes",
    "nvlink_received_bytes",
    "nvlink_transmitted_bytes",
    "c2c_host_to_gpu_bytes",
    "c2c_gpu_to_host_bytes",
    "dram_read_bytes",
    "dram_written_bytes",
    "l2_sectors",
    "l2_missed_sectors",
]
"""Amount moved within the window, an integer."""

Quantity = RatioQuantity | CountQuantity
COUNT_QUANTITIES: frozenset[str] = frozenset(get_args(CountQuantity))
QUANTITIES: tuple[Quantity, ...] = (*get_args(RatioQuantity), *get_args(CountQuantity))

L2Definition = Literal["", "dram_sectors", "hit_rate"]
"""What `l2_missed_sectors` are: the sectors that DRAM moved, or those that the chip itself counts as missed."""

L2_SECTOR_BYTES = 32
"""Size of one L2 sector on every chip since Maxwell (CUDA programming guide, device memory accesses)."""

Reading = Literal[
    "nvml_utilization_ratio",
    "memory_controller_busy_ratio",
    "memory_total_bytes",
    "memory_used_bytes",
    "memory_reserved_bytes",
    "memory_free_bytes",
    "power_gpu_watts",
    "power_module_watts",
    "power_limit_watts",
    "energy_joules",
    "temperature_gpu_celsius",
    "temperature_memory_celsius",
    "temperature_slowdown_celsius",
    "clock_sm_hertz",
    "clock_memory_hertz",
    "clock_video_hertz",
    "clock_limit_sm_hertz",
    "clock_limit_memory_hertz",
    "clock_limit_video_hertz",
    "clock_event_gpu_idle",
    "clock_event_applications_clocks_setting",
    "clock_event_sw_power_cap",
    "clock_event_hw_slowdown",
    "clock_event_sync_boost",
    "clock_event_sw_thermal_slowdown",
    "clock_event_hw_thermal_slowdown",
    "clock_event_hw_power_brake_slowdown",
    "clock_event_display_clock_setting",
    "pcie_link_generation_current",
    "pcie_link_generation_max",
    "pcie_link_width_current",
    "pcie_link_width_max",
    "pcie_replays",
    "nvlink_links_present",
    "nvlink_links_active",
    "ecc_corrected_volatile",
    "ecc_corrected_aggregate",
    "ecc_uncorrected_volatile",
    "ecc_uncorrected_aggregate",
    "nvlink_errors_replay",
    "nvlink_errors_recovery",
    "nvlink_errors_crc_flit",
    "nvlink_errors_crc_data",
    "row_remap_pending",
    "row_remap_failed",
    "recovery_action",
    "dram_limit_bytes_per_second",
    "pcie_limit_bytes_per_second",
    "nvlink_limit_bytes_per_second",
    "c2c_limit_bytes_per_second",
]
READINGS: tuple[Reading, ...] = get_args(Reading)

CUMULATIVE_READINGS: frozenset[Reading] = frozenset(
    {
        "energy_joules",
        "pcie_replays",
        "ecc_corrected_volatile",
        "ecc_corrected_aggregate",
        "ecc_uncorrected_volatile",
        "ecc_uncorrected_aggregate",
        "nvlink_errors_replay",
        "nvlink_errors_recovery",
        "nvlink_errors_crc_flit",
        "nvlink_errors_crc_data",
    }
)
"""Readings that the driver itself accumulates; a looping replay must keep them from going back."""

CLOCK_EVENT_PREFIX = "clock_event_"
SLOWDOWN_READINGS: tuple[Reading, ...] = (
    "clock_event_hw_slowdown",
    "clock_event_sw_thermal_slowdown",
    "clock_event_hw_thermal_slowdown",
    "clock_event_hw_power_brake_slowdown",
)
"""Reasons that mean the hardware was held back; a plain software power cap is normal operation."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One row of the inventory: a GPU, or one MIG instance (then `parent_uuid` is set).

    `index` is NVML's current index, of the parent for a MIG instance. `links` are the links the row has:
    a link it lacks counts as idle, one that it has but nobody measures makes a window's class unknown.
    `peak_share` is the part of the parent's bandwidth that belongs to a MIG instance, 1.0 otherwise.
    """

    uuid: str
    index: int
    name: str
    architecture: str = ""
    compute_capability: str = ""
    pci_bus_id: str = ""
    serial: str = ""
    vbios: str = ""
    mig_mode: str = ""
    gpu_instance: str = ""
    profile: str = ""
    parent_uuid: str = ""
    links: tuple[Link, ...] = ()
    peak_share: float = 1.0


JobKind = Literal["", "batch", "service", "interactive"]
"""What waste means for a job: a notebook or a server may idle. "" where unknown, which rules treat as batch."""


@dataclass(frozen=True, slots=True)
class Job:
    """Whose GPU it is. Every field "" where unknown; `job` is never "".

    job_id: Slurm's id or `sluid:<id>`, a pod's UID, a container's id, a systemd unit. source: what told, such as slurm,
    kubernetes, container, systemd, environ, process, or rule for a rule of the user's. rank: of a distributed job.
    """

    job: str
    job_id: str = ""
    kind: JobKind = ""
    user: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    rank: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process with a context on a GPU or MIG instance, by the driver's pid; None where the driver does not say."""

    pid: int
    memory_bytes: int | None = None
    sm_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class GpuProcesses:
    """Every process on a GPU or MIG instance at `time_ns`; None where no list can be had or trusted."""

    time_ns: int
    uuid: str
    processes: tuple[GpuProcess, ...] | None


LibraryName = Literal["cuda_driver", "cudart", "cublas", "cudnn", "nccl", "torch"]
LIBRARY_NAMES: Final[tuple[LibraryName, ...]] = get_args(LibraryName)


@dataclass(frozen=True, slots=True, order=True)
class Library:
    """A library that a process has loaded. version: such as 12.4.127, only 12 where no more is known, never ""."""

    name: LibraryName
    version: str


@dataclass(frozen=True, slots=True)
class JobOnGpu:
    """A job's part of a GPU; `processes` is 0 where it holds the GPU and runs nothing there.

    libraries: those of its processes there, each once, as far as they are known.
    """

    job: Job
    processes: int = 0
    memory_bytes: int | None = None
    sm_ratio: float | None = None
    libraries: tuple[Library, ...] = ()


@dataclass(frozen=True, slots=True)
class GpuJobs:
    """The jobs of one GPU or MIG instance, no two with one name. `count`: how many there are, unmerged."""

    jobs: tuple[JobOnGpu, ...]
    count: int


@dataclass(frozen=True, slots=True)
class JobsInForce:
    """Whose the GPUs are, by UUID; replaces what was said before, so that a job that is not here is gone.

    `unknown_cgroups` counts processes since the start whose cgroup had a form that nobody knows. `told_ns`: when each
    source last told what it knows.
    """

    time_ns: int
    gpus: Mapping[str, GpuJobs]
    unknown_cgroups: Mapping[str, int]
    told_ns: Mapping[JobSource, int]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What /proc tells of a process. All text is the workload's own making: unescaped, with surrogates for odd bytes.

    start_ticks: when it started, in clock ticks since boot; with `pid` it names one process for ever. comm: its name.
    command: its arguments with blanks between them, the beginning. uid: -1 where unknown; user: its name, else its
    number. cgroup: the file's text. environment: only the variables that were asked for. missing: what could not be
    read, and why, such as "environ: permission denied".
    """

    pid: int
    start_ticks: int
    comm: str = ""
    command: str = ""
    uid: int = -1
    user: str = ""
    cgroup: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


Category = Literal[
    "gemm",
    "attention",
    "convolution",
    "reduction",
    "elementwise",
    "optimizer",
    "communication",
    "copy",
    "generated",
    "other",
]
"""What kind of work a kernel does."""
CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)
Pattern = Literal["contended", "many_short", "few_long", "jittery"]

CopyKind = Literal["h2d_pinned", "h2d_pageable", "d2h_pinned", "d2h_pageable", "d2d_device", "p2p_device"]
"""Direction of a copy, and where the host's side of it lies."""
COPY_KINDS: Final[tuple[CopyKind, ...]] = get_args(CopyKind)

ActivitySum = Literal[
    "traced_ns",
    "device_traced_ns",
    "busy_ns",
    "compute_ns",
    "communication_ns",
    "copy_ns",
    "overlap_ns",
    "idle_host_ns",
    "idle_queue_ns",
    "idle_other_ns",
    "launch_api_ns",
    "graphs_traced",
    "graphs_untraced",
    "sync_event_ns",
    "sync_stream_ns",
    "sync_context_ns",
    "sync_unknown_ns",
]
"""What agents add up for each GPU of a process: nanoseconds and numbers."""
ACTIVITY_SUMS: Final[tuple[ActivitySum, ...]] = get_args(ActivitySum)

Recordable = Literal["launches", "copies", "waits"]
"""What agents may record beside kernels: calls that launch or copy, the copies themselves, waits of the host."""
RECORDABLES: Final[tuple[Recordable, ...]] = get_args(Recordable)
NEEDED_FOR: Final[Mapping[ActivitySum, tuple[Recordable, ...]]] = {
    "busy_ns": ("copies",),
    "copy_ns": ("copies",),
    "idle_host_ns": ("launches", "copies"),
    "idle_queue_ns": ("launches", "copies"),
    "idle_other_ns": ("launches", "copies"),
    "launch_api_ns": ("launches",),
    "graphs_traced": ("launches",),
    "graphs_untraced": ("launches",),
    "sync_event_ns": ("waits",),
    "sync_stream_ns": ("waits",),
    "sync_context_ns": ("waits",),
    "sync_unknown_ns": ("waits",),
}
"""Sums that say nothing, or something else than their name, where one of these is not recorded."""
SUMS_WITH_COPIES: Final[frozenset[ActivitySum]] = frozenset(
    {"busy_ns", "copy_ns", "idle_host_ns", "idle_queue_ns", "idle_other_ns"}
)
"""Sums for which all agents of the job must record copies: divided by the time that all looked at, they are no lower
bound, or none that serves, since a GPU that seems to idle is what alerts look for. Idle time of those that record no
launches is `other`."""

DURATION_BUCKETS: Final = 9
"""Up to 1 us times 8^0 ... 8^7, and longer."""
COPY_BUCKETS: Final = 7
"""Up to 256, 4096, 65536, ... 268435456 bytes, and more."""


@dataclass(frozen=True, slots=True)
class KernelAmount:
    """What a kernel did. launches: executions outside graphs.

    deviation_ns2: sum of squared distances, in ns^2, from the mean of executions of equal name, grid and block in one
    process between two looks.
    """

    executions: int = 0
    launches: int = 0
    ns: int = 0
    deviation_ns2: float = 0.0

    def __add__(self, more: KernelAmount) -> KernelAmount:
        """What it did before and after."""
        return KernelAmount(
            self.executions + more.executions,
            self.launches + more.launches,
            self.ns + more.ns,
            self.deviation_ns2 + more.deviation_ns2,
        )


@dataclass(frozen=True, slots=True)
class Durations:
    """How long things took: in all, and how many fell into each bucket (not cumulated)."""

    ns: int
    buckets: tuple[int, ...]

    def __add__(self, more: Durations) -> Durations:
        """Those before and after."""
        return Durations(self.ns + more.ns, _add_each(self.buckets, more.buckets))


def _add_each(have: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(one + other for one, other in zip(have, more, strict=True))


@dataclass(frozen=True, slots=True)
class CopyAmount:
    """Copies of one kind: bytes, time on the device, host time in the calls, number by size (not cumulated)."""

    bytes: int
    ns: int
    api_ns: int
    buckets: tuple[int, ...]

    def __add__(self, more: CopyAmount) -> CopyAmount:
        """Those before and after."""
        buckets = _add_each(self.buckets, more.buckets)
        return CopyAmount(self.bytes + more.bytes, self.ns + more.ns, self.api_ns + more.api_ns, buckets)


@dataclass(frozen=True, slots=True)
class GpuActivity:
    """What a job's kernels did on a GPU or MIG instance since the report before: all down to `sums`.

    kernels: by signature, "other" for all without a name of their own. latency_ms, longest_ns: from launch to start,
    and the longest execution, of the last finished trace windows. Only kernels that have a series are named.
    unrecorded: what no agent of the job records here, so that its amounts are not known, whatever they are; incomplete:
    what some do not of those that run something. processes: how many those are.
    """

    uuid: str
    job: str
    kernels: Mapping[str, KernelAmount] = field(default_factory=dict)
    durations: Mapping[Category, Durations] = field(default_factory=dict)
    queue: Durations = Durations(0, (0,) * DURATION_BUCKETS)
    copies: Mapping[CopyKind, CopyAmount] = field(default_factory=dict)
    sums: Mapping[ActivitySum, int] = field(default_factory=dict)
    latency_ms: Mapping[str, float] = field(default_factory=dict)
    longest_ns: Mapping[str, int] = field(default_factory=dict)
    patterns: Mapping[str, Pattern] = field(default_factory=dict)
    unrecorded: frozenset[Recordable] = frozenset()
    incomplete: frozenset[Recordable] = frozenset()
    processes: int = 1

    @property
    def has_all_copies(self) -> bool:
        """Whether all agents of processes that run something record copies."""
        return "copies" not in self.unrecorded | self.incomplete


AgentState = Literal["tracing", "waiting", "paused", "off"]
AGENT_STATES: Final[tuple[AgentState, ...]] = get_args(AgentState)
RecordResult = Literal["kept", "dropped", "invalid", "unmatched"]
RECORD_RESULTS: Final[tuple[RecordResult, ...]] = get_args(RecordResult)


@dataclass(frozen=True, slots=True)
class Tracing:
    """When agents traced a GPU, in ns before the report that says so, whichever clock that has.

    ended: begin and end of all times that ended since the report before, in no order, some perhaps at once; open_ns:
    how long the longest of those that go on has lasted, 0 where none does.
    """

    ended: tuple[tuple[int, int], ...] = ()
    open_ns: int = 0


@dataclass(frozen=True, slots=True)
class KernelReport:
    """What all agents of the host have told since the report before. A (GPU, job) that is not here is gone.

    agents: processes by state; reasons: of those that do not trace; overhead_ratio: the largest, None without agents.
    records, rejected: records, and files by reason, since the report before. tracing: by UUID, GPUs that are not there
    were not traced, None where that is not known; None: it is known of none, as after a step of the clock. pids: of the
    processes on GPUs that have an agent, as the driver lists them; None where those cannot be looked up.
    """

    time_ns: int
    activities: tuple[GpuActivity, ...] = ()
    agents: Mapping[AgentState, int] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    overhead_ratio: float | None = None
    records: Mapping[RecordResult, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    tracing: Mapping[str, Tracing | None] | None = None
    pids: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Driver:
    """Versions of the driver stack, "" where unknown."""

    driver_version: str = ""
    cuda_version: str = ""
    nvml_version: str = ""


@dataclass(frozen=True, slots=True)
class Inventory:
    """All GPUs that answer now; replaces the inventory before it. The driver counts `counted` physical ones."""

    time_ns: int
    gpus: tuple[Gpu, ...]
    driver: Driver
    counted: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """Means of one sampling window that ended at `end_ns`. `late`: longer than 1.5 intervals."""

    uuid: str
    source: WindowSource
    end_ns: int
    duration_ns: int
    values: Mapping[Quantity, float]
    late: bool = False


@dataclass(frozen=True, slots=True)
class WindowsRejected:
    """Windows up to `time_ns` whose values cannot be true: the time they cover is not observed.

    Windows that never came need no event: the next one begins later than the last one ended.
    """

    time_ns: int
    uuid: str
    source: WindowSource
    count: int


@dataclass(frozen=True, slots=True)
class ReadingRejected:
    """The driver answered with a value that cannot be true."""

    time_ns: int
    uuid: str
    reading: str
    reason: Literal["nan", "negative", "above_range", "sentinel"]


@dataclass(frozen=True, slots=True)
class Readings:
    """Everything known of a GPU's slow readings at `time_ns`; a missing key is not measured now."""

    uuid: str
    time_ns: int
    values: Mapping[Reading, float]


@dataclass(frozen=True, slots=True)
class StateChange:
    """A source changed state for one GPU, or for the host where `uuid` is ""."""

    time_ns: int
    source: SourceName
    uuid: str
    state: State
    reason: str = ""


@dataclass(frozen=True, slots=True)
class IntervalInForce:
    """How a source really samples a GPU now: the length of its windows, and what its missed L2 sectors are."""

    time_ns: int
    uuid: str
    source: WindowSource
    interval_ns: int
    l2_definition: L2Definition = ""


Incident = Literal["overflow", "set_reduced", "rate_halved", "helper_restarted"]


@dataclass(frozen=True, slots=True)
class SamplingIncident:
    """Something that PM sampling had to do, to be counted; `uuid` "" for what concerns the whole host.

    overflow: the hardware buffer was full, windows are lost. set_reduced: counters that did not deliver were
    left out. rate_halved: windows were made twice as long. helper_restarted: the helper process ended unasked.
    """

    time_ns: int
    uuid: str
    incident: Incident


@dataclass(frozen=True, slots=True)
class XidError:
    """The driver reported an Xid for the GPU with this UUID, or on this PCI device where `uuid` is "".

    NVML's events and the kernel log both tell of it; `origin` keeps the two apart, so that one Xid that both
    report is counted once.
    """

    time_ns: int
    xid: int
    origin: Literal["nvml", "kmsg"]
    uuid: str = ""
    pci_bus_id: str = ""


@dataclass(frozen=True, slots=True)
class GpuFellOff:
    """The kernel log says that the GPU on this PCI device no longer answers."""

    time_ns: int
    pci_bus_id: str


@dataclass(frozen=True, slots=True)
class DriverError:
    """One failed driver call, by NVML's name of the code, for the counter of errors."""

    time_ns: int
    code: str


Event = (
    Inventory
    | Window
    | WindowsRejected
    | ReadingRejected
    | Readings
    | StateChange
    | IntervalInForce
    | SamplingIncident
    | GpuProcesses
    | JobsInForce
    | KernelReport
    | XidError
    | GpuFellOff
    | DriverError
)


class Sink(Protocol):
    """Takes events from any thread, quickly and without raising."""

    def put(self, event: Event) -> None: ...
