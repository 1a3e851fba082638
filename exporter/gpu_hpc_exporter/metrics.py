"""The catalogue: every series this exporter serves, and the only place that defines a name.

METRICS.md is generated from it (`python -m gpu_hpc_exporter.metrics_page`). Names are a contract.
"""

from __future__ import annotations

from typing import Final

from gpu_hpc_exporter.exposition import Spec

G: Final = ("gpu", "uuid")
JOB: Final = (*G, "job")

_WINDOWED = "Mean over the gauge window (gauge_window_seconds, default 15); absent when windows stop."
_PM = 'Only from PM sampling: divide by gpu_hpc_source_observed_seconds_total{source="pm_sampling"}.'
_L2_MISS = (
    "Share of the requested L2 sectors that went to DRAM (0-1), over the gauge window (gauge_window_seconds, default "
    "15); absent without PM sampling and while L2 moves less than 5 percent of the DRAM peak."
)
_SAMPLED = "NVML reading, taken once a second."
_SELDOM = "NVML reading, taken every 15 seconds."
_RARELY = (
    "NVML reading, taken every 60 seconds since it costs the driver milliseconds: use rates over 5 minutes or more."
)


# Device windows
OBSERVED_SECONDS = Spec(
    "gpu_hpc_observed_seconds_total",
    "counter",
    "Time that classified windows cover; the denominator of every ratio of window counters.",
    G,
)
SOURCE_OBSERVED_SECONDS = Spec(
    "gpu_hpc_source_observed_seconds_total",
    "counter",
    "Time that this source's windows cover; the denominator of series that only it serves (DRAM bytes and L2: "
    "pm_sampling).",
    (*G, "source"),
    "source: gpm, pm_sampling",
)
SM_ACTIVE_SECONDS = Spec(
    "gpu_hpc_sm_active_seconds_total",
    "counter",
    "Integral over time of the share of SMs with at least one resident warp.",
    G,
)
SM_OCCUPANCY_SECONDS = Spec(
    "gpu_hpc_sm_occupancy_seconds_total", "counter", "Integral over time of resident warps divided by their maximum.", G
)
PIPE_ACTIVE_SECONDS = Spec(
    "gpu_hpc_pipe_active_seconds_total",
    "counter",
    "Integral over time of the share of cycles in which this SM pipe was active. Turing has one, shared, for tensor, "
    "FP64 and FP16.",
    (*G, "pipe"),
    "pipe: tensor, fp64, fp32, fp16, int, shared",
)
ENGINE_ACTIVE_SECONDS = Spec(
    "gpu_hpc_engine_active_seconds_total",
    "counter",
    "Integral over time of the busiest media engine of this kind.",
    (*G, "engine"),
    "engine: decode, encode, ofa, jpeg",
)
DRAM_ACTIVE_SECONDS = Spec(
    "gpu_hpc_dram_active_seconds_total",
    "counter",
    "Integral over time of the DRAM bandwidth's used share of its peak.",
    G,
)
DRAM_READ_BYTES = Spec("gpu_hpc_dram_read_bytes_total", "counter", f"Bytes read from DRAM. {_PM}", G)
DRAM_WRITTEN_BYTES = Spec("gpu_hpc_dram_written_bytes_total", "counter", f"Bytes written to DRAM. {_PM}", G)
L2_SECTORS = Spec(
    "gpu_hpc_l2_sectors_total",
    "counter",
    f"Sectors of 32 bytes requested of L2; copies between the partitions of a split L2 are taken out. {_PM}",
    G,
)
L2_MISSED_SECTORS = Spec(
    "gpu_hpc_l2_missed_sectors_total",
    "counter",
    f"Requested L2 sectors that went to DRAM; gpu_hpc_metric_source_info tells how they are known. {_PM}",
    G,
)
L2_ACTIVE_SECONDS = Spec(
    "gpu_hpc_l2_active_seconds_total",
    "counter",
    f"Integral over time of the L2 bandwidth's used share of its peak. {_PM}",
    G,
)
PCIE_HOST_TO_GPU_BYTES = Spec(
    "gpu_hpc_pcie_host_to_gpu_bytes_total",
    "counter",
    "Bytes that the GPU received over PCIe, protocol included (about 5 percent above the payload of large copies).",
    G,
)
PCIE_GPU_TO_HOST_BYTES = Spec(
    "gpu_hpc_pcie_gpu_to_host_bytes_total",
    "counter",
    "Bytes that the GPU sent over PCIe, protocol included.",
    G,
)
NVLINK_RECEIVED_BYTES = Spec(
    "gpu_hpc_nvlink_received_bytes_total", "counter", "Payload bytes received over all NVLinks.", G
)
NVLINK_TRANSMITTED_BYTES = Spec(
    "gpu_hpc_nvlink_transmitted_bytes_total", "counter", "Payload bytes sent over all NVLinks.", G
)
C2C_HOST_TO_GPU_BYTES = Spec(
    "gpu_hpc_c2c_host_to_gpu_bytes_total", "counter", "Bytes that the GPU received over NVLink-C2C (Grace).", G
)
C2C_GPU_TO_HOST_BYTES = Spec(
    "gpu_hpc_c2c_gpu_to_host_bytes_total", "counter", "Bytes that the GPU sent over NVLink-C2C (Grace).", G
)
DRAM_LIMIT = Spec(
    "gpu_hpc_dram_bandwidth_limit_bytes_per_second",
    "gauge",
    "Peak DRAM bandwidth: bus width x maximum memory clock x 2. A MIG instance has its slices' share.",
    G,
)
PCIE_LIMIT = Spec(
    "gpu_hpc_pcie_bandwidth_limit_bytes_per_second",
    "gauge",
    "Peak PCIe bandwidth per direction: current width x maximum generation, less the line code.",
    G,
)
NVLINK_LIMIT = Spec(
    "gpu_hpc_nvlink_bandwidth_limit_bytes_per_second",
    "gauge",
    "Peak NVLink bandwidth per direction: links present x link speed.",
    G,
)
C2C_LIMIT = Spec(
    "gpu_hpc_c2c_bandwidth_limit_bytes_per_second", "gauge", "Peak NVLink-C2C bandwidth per direction (Grace).", G
)
BOTTLENECK_SECONDS = Spec(
    "gpu_hpc_bottleneck_seconds_total",
    "counter",
    "Time by what limited the GPU, one class per window; the classes add up to gpu_hpc_observed_seconds_total.",
    (*G, "class"),
    "class: media, throttled, idle, pcie_bound, nvlink_bound, copy_only, compute_bound, dram_bound, l2_bound, "
    "l2_thrash, starved, mixed, latency_bound, unknown",
)
BOTTLENECK_INTENSITY = Spec(
    "gpu_hpc_bottleneck_intensity_ratio",
    "gauge",
    f"How close this unit was to what real code can reach of it (0-1). {_WINDOWED}",
    (*G, "unit"),
    "unit: sm, l2, dram, pcie, nvlink",
)
BOTTLENECK_INTENSITY_WINDOWS = Spec(
    "gpu_hpc_bottleneck_intensity_window_ratio",
    "histogram",
    "Distribution of this unit's intensity (0-1) over sampling windows, one observation a window.",
    (*G, "unit"),
    "unit: sm, l2, dram, pcie, nvlink",
)
SM_ACTIVE = Spec(
    "gpu_hpc_sm_active_ratio",
    "gauge",
    "Share of SMs with at least one resident warp (0-1). Of a MIG instance, the share of the whole GPU instance's SMs: "
    f"one busy compute instance of three equal ones reads 1/3. {_WINDOWED}",
    G,
)
SM_OCCUPANCY = Spec(
    "gpu_hpc_sm_occupancy_ratio", "gauge", f"Resident warps divided by their maximum (0-1). {_WINDOWED}", G
)
DRAM_UTILIZATION = Spec(
    "gpu_hpc_dram_bandwidth_utilization_ratio", "gauge", f"Used share of the peak DRAM bandwidth (0-1). {_WINDOWED}", G
)
SM_UTILIZATION_SEED = Spec(
    "gpu_hpc_sm_utilization_ratio",
    "gauge",
    "Used share of the SMs' throughput (0-1): the busiest of the tensor, FP64, FP32, FP16 and integer pipes. "
    f"Residency is gpu_hpc_sm_active_ratio. {_WINDOWED}",
    (*G, "job"),
    'job: "" while the GPU is idle, shared by several jobs, or nobody can tell',
)
DRAM_UTILIZATION_SEED = Spec(
    "gpu_hpc_dram_bandwidth_utilization",
    "gauge",
    f"The same as gpu_hpc_dram_bandwidth_utilization_ratio (0-1), with the job. {_WINDOWED}",
    (*G, "job"),
    'job: "" while the GPU is idle, shared by several jobs, or nobody can tell',
)
L2_MISS_RATIO = Spec("gpu_hpc_l2_cache_miss_ratio", "gauge", _L2_MISS, G)
L2_MISS_SEED = Spec(
    "gpu_hpc_l2_cache_miss_rate",
    "gauge",
    "The same as gpu_hpc_l2_cache_miss_ratio (0-1), with the job. " + _L2_MISS,
    (*G, "job"),
    'job: "" while the GPU is idle, shared by several jobs, or nobody can tell',
)
METRIC_SOURCE_INFO = Spec(
    "gpu_hpc_metric_source_info",
    "gauge",
    "1 for what serves a metric now that several sources or definitions can serve; gauges and a link's other "
    "direction have the source of the counter that is named. driver_ratio: as the driver gives it; bytes_over_peak: "
    "bytes moved over the peak; dram_sectors: sectors that DRAM moved over requested ones, at most 1; hit_rate: 1 less "
    "the hit rate that the chip counts.",
    (*G, "metric", "source", "definition"),
    'source: gpm, pm_sampling; definition: "", driver_ratio, bytes_over_peak, dram_sectors, hit_rate',
)
LAUNCH_LATENCY_SEED = Spec(
    "gpu_hpc_kernel_launch_latency_ms",
    "gauge",
    "Mean time from a kernel launch call's return to the kernel's start, milliseconds, in the last finished trace "
    "window of the job's agents; absent after three periods without one, and with CUPTI before 12.5.",
    (*G, "job", "kernel"),
    "kernel: as in gpu_hpc_kernel_seconds_total, without other",
)

# Device readings
GPU_INFO = Spec(
    "gpu_hpc_gpu_info",
    "gauge",
    "1 for each GPU and MIG instance, with what identifies it. index is NVML's current index.",
    (
        *G,
        "name",
        "architecture",
        "compute_capability",
        "index",
        "pci_bus_id",
        "serial",
        "vbios",
        "mig_mode",
        "gpu_instance",
        "profile",
        "parent_uuid",
    ),
)
DRIVER_INFO = Spec(
    "gpu_hpc_driver_info",
    "gauge",
    "1, with the versions of the driver stack.",
    ("driver_version", "cuda_version", "nvml_version"),
)
NVML_UTILIZATION = Spec(
    "gpu_hpc_nvml_utilization_ratio",
    "gauge",
    "The GPU-Util of nvidia-smi (0-1): whether any engine worked, copies included; says nothing about how hard. "
    + _SAMPLED,
    G,
)
NVML_BUSY_SECONDS = Spec(
    "gpu_hpc_nvml_busy_seconds_total", "counter", "Integral over time of gpu_hpc_nvml_utilization_ratio.", G
)
MEMORY_CONTROLLER_BUSY = Spec(
    "gpu_hpc_memory_controller_busy_ratio",
    "gauge",
    "NVML's share of time in which device memory was read or written at all (0-1); not bandwidth. " + _SAMPLED,
    G,
)
MEMORY_TOTAL = Spec(
    "gpu_hpc_memory_total_bytes", "gauge", "Device memory, the driver's reserve included. " + _SAMPLED, G
)
MEMORY_USED = Spec(
    "gpu_hpc_memory_used_bytes",
    "gauge",
    "Device memory in use, without the driver's reserve where gpu_hpc_memory_reserved_bytes tells it (R510 and later), "
    "else with it. " + _SAMPLED,
    G,
)
MEMORY_RESERVED = Spec(
    "gpu_hpc_memory_reserved_bytes", "gauge", "Device memory that the driver reserves. " + _SAMPLED, G
)
MEMORY_FREE = Spec("gpu_hpc_memory_free_bytes", "gauge", "Device memory that can be allocated. " + _SAMPLED, G)
POWER = Spec(
    "gpu_hpc_power_watts",
    "gauge",
    "Power drawn, as the driver averages it over about a second. " + _SAMPLED,
    (*G, "scope"),
    "scope: gpu, module (Grace)",
)
POWER_LIMIT = Spec("gpu_hpc_power_limit_watts", "gauge", "Power limit in force. " + _SELDOM, G)
ENERGY = Spec("gpu_hpc_energy_joules_total", "counter", "Energy used since the driver was loaded. " + _RARELY, G)
TEMPERATURE = Spec(
    "gpu_hpc_temperature_celsius", "gauge", "Temperature. " + _SAMPLED, (*G, "sensor"), "sensor: gpu, memory"
)
TEMPERATURE_SLOWDOWN = Spec(
    "gpu_hpc_temperature_slowdown_celsius", "gauge", "Temperature at which this device slows itself down.", G
)
CLOCK = Spec("gpu_hpc_clock_hertz", "gauge", "Current clock. " + _SAMPLED, (*G, "domain"), "domain: sm, memory, video")
CLOCK_LIMIT = Spec(
    "gpu_hpc_clock_limit_hertz", "gauge", "Highest clock of the device.", (*G, "domain"), "domain: sm, memory, video"
)
CLOCK_EVENT_SECONDS = Spec(
    "gpu_hpc_clock_event_seconds_total",
    "counter",
    "Time in which this reason held the clocks down, from readings once a second.",
    (*G, "reason"),
    "reason: gpu_idle, applications_clocks_setting, sw_power_cap, hw_slowdown, sync_boost, sw_thermal_slowdown, "
    "hw_thermal_slowdown, hw_power_brake_slowdown, display_clock_setting",
)
PCIE_GENERATION = Spec(
    "gpu_hpc_pcie_link_generation",
    "gauge",
    "PCIe generation; an idle link runs below its maximum. " + _SELDOM,
    (*G, "state"),
    "state: current, max",
)
PCIE_WIDTH = Spec("gpu_hpc_pcie_link_width", "gauge", "PCIe lanes. " + _SELDOM, (*G, "state"), "state: current, max")
PCIE_REPLAYS = Spec(
    "gpu_hpc_pcie_replays_total", "counter", "PCIe packets sent again since the driver was loaded. " + _RARELY, G
)
NVLINK_LINKS = Spec(
    "gpu_hpc_nvlink_links", "gauge", "NVLinks of the GPU. " + _SELDOM, (*G, "state"), "state: present, active"
)
NVLINK_ERRORS = Spec(
    "gpu_hpc_nvlink_errors_total",
    "counter",
    "NVLink errors since the driver was loaded, all links together. " + _RARELY,
    (*G, "error"),
    "error: replay, recovery, crc_flit, crc_data",
)
ECC_ERRORS = Spec(
    "gpu_hpc_ecc_errors_total",
    "counter",
    "ECC errors; volatile: since the driver was loaded, aggregate: of the board's life. " + _SELDOM,
    (*G, "severity", "scope"),
    "severity: corrected, uncorrected; scope: volatile, aggregate",
)
ROW_REMAP_PENDING = Spec(
    "gpu_hpc_row_remap_pending", "gauge", "1 when a row remapping waits for a reset. " + _SELDOM, G
)
ROW_REMAP_FAILED = Spec("gpu_hpc_row_remap_failed", "gauge", "1 when a row remapping has failed. " + _SELDOM, G)
RECOVERY_ACTION = Spec(
    "gpu_hpc_recovery_action",
    "gauge",
    "What the driver asks for: 0 none, 1 reset the GPU, 2 reboot the node, 3 drain P2P, 4 drain and reset, "
    "5 recover the IMEX domain, 6 reset the bus, 7 reboot the system. " + _SELDOM,
    G,
)
XID_ERRORS = Spec(
    "gpu_hpc_xid_errors_total",
    "counter",
    "Xids since the exporter started, from NVML's events and the kernel log; one that both report counts once. "
    "Without a readable kernel log, NVML may miss the worst (79, 119, 120). Zeros exist for the critical ones.",
    (*G, "xid"),
)
XID_LAST_TIMESTAMP = Spec(
    "gpu_hpc_xid_last_timestamp_seconds", "gauge", "Unix time of the newest Xid with this number.", (*G, "xid")
)

# Jobs
JOB_INFO = Spec(
    "gpu_hpc_job_info",
    "gauge",
    "1 for each job that runs on this GPU or holds it, with what is known of it. What several processes, pods or "
    "namesakes tell differently is empty; source says what told. Join on (instance, gpu, uuid); device series have no "
    "job, since copies of them would add up.",
    (*G, "job", "job_id", "kind", "user", "namespace", "pod", "container", "rank", "source"),
    'job: other for all but the largest of a GPU, other[] for one of that name; kind: "", batch, service, interactive',
)
GPU_JOBS = Spec(
    "gpu_hpc_gpu_jobs",
    "gauge",
    "Jobs that run on this GPU or hold it; absent where nobody can tell.",
    G,
)
JOB_MEMORY_USED = Spec(
    "gpu_hpc_job_memory_used_bytes",
    "gauge",
    "Device memory of this job's processes as the driver tells it; managed (unified) memory is not in it.",
    JOB,
)
JOB_PROCESSES = Spec(
    "gpu_hpc_job_processes", "gauge", "Processes of this job with a context on this GPU; 0 where it only holds it.", JOB
)
JOB_SM = Spec(
    "gpu_hpc_job_sm_ratio",
    "gauge",
    "Share of the time in which kernels of this job's processes ran (0-1), as the driver samples it, taken every 15 "
    "seconds and when a process begins; says nothing of how hard. Absent where the driver has no new sample.",
    JOB,
)
PROCESS_LIBRARY_INFO = Spec(
    "gpu_hpc_process_library_info",
    "gauge",
    "1 for each library that processes of this job on this GPU have loaded, as seen when they began and a minute "
    "later; several versions are several rows. version is only the first number where neither file nor package tells "
    "more. Absent where the files of the processes may not be read (same user, or CAP_SYS_PTRACE) and for libraries "
    "that are linked statically.",
    (*JOB, "library", "version"),
    "library: cuda_driver, cudart, cublas, cudnn, nccl, torch",
)
MEMORY_UNATTRIBUTED = Spec(
    "gpu_hpc_memory_unattributed_bytes",
    "gauge",
    "Device memory in use less that of all processes (at least 0): managed memory, the driver, leftovers of processes "
    "that died. Absent where the driver does not tell the memory of each process.",
    G,
)
GPU_PROCESSES = Spec(
    "gpu_hpc_gpu_processes", "gauge", "Processes with a context on this GPU, taken every 2 seconds.", G
)
JOB_MAP_AGE = Spec(
    "gpu_hpc_job_map_age_seconds",
    "gauge",
    "How long ago this source last told what it knows of jobs.",
    ("source",),
    "source: procfs, kubelet, slurm",
)
UNKNOWN_CGROUPS = Spec(
    "gpu_hpc_unknown_cgroups_total",
    "counter",
    "Processes on GPUs whose control group has a form that tells no job.",
    ("form",),
)
HONOR_LABELS_CHECK = Spec(
    "gpu_hpc_honor_labels_check",
    "gauge",
    'Always 1. Prometheus without `honor_labels: true` replaces job with its target\'s: then exported_job is "check".',
    ("job",),
    "job: check",
)

# Kernels
_RATE = "Divide its rate by that of gpu_hpc_kernel_traced_seconds_total."
_UNION = "Divide its rate by that of gpu_hpc_kernel_device_traced_seconds_total."
_KERNEL = (
    "kernel: name without namespaces, template arguments and parameters, [functor] kept, at most 128 bytes, of "
    "the busiest of each GPU, other for the rest"
)
_CATEGORY = (
    "category: gemm, attention, convolution, reduction, elementwise, optimizer, communication, copy, generated, other"
)
_COPIES = "direction: h2d, d2h, d2d, p2p; memory: pinned, pageable, device"
KERNEL_SECONDS = Spec(
    "gpu_hpc_kernel_seconds_total",
    "counter",
    "Time that executions of this kernel took in trace windows, counted since it has a series; those of a job's "
    f"processes add up. {_RATE}",
    (*JOB, "kernel", "category"),
    f"{_KERNEL}; {_CATEGORY}",
)
KERNEL_EXECUTIONS = Spec(
    "gpu_hpc_kernel_executions_total",
    "counter",
    f"Executions of this kernel in trace windows, those inside CUDA graphs included. {_RATE}",
    (*JOB, "kernel", "category"),
    _CATEGORY,
)
KERNEL_LAUNCHES = Spec(
    "gpu_hpc_kernel_launches_total",
    "counter",
    f"Launches of this kernel outside CUDA graphs in trace windows. {_RATE}",
    (*JOB, "kernel", "category"),
    _CATEGORY,
)
KERNEL_SECONDS_SQUARED = Spec(
    "gpu_hpc_kernel_seconds_squared_total",
    "counter",
    "Sum of squared distances of durations from the mean of executions with equal full name, grid and block in the "
    "same process and 5 s, in square seconds: divided by executions and rooted, the pooled deviation.",
    (*JOB, "kernel"),
)
KERNEL_MAX_SECONDS = Spec(
    "gpu_hpc_kernel_max_seconds",
    "gauge",
    "Longest execution of this kernel in the last finished trace window; absent after three periods without one.",
    (*JOB, "kernel"),
)
KERNEL_DURATION = Spec(
    "gpu_hpc_kernel_duration_seconds",
    "histogram",
    "Durations of all kernels of the job in trace windows, by what they do; category is empty, and all are together, "
    "while agents trace more than 8 (GPU, job) pairs of this node.",
    (*JOB, "category"),
    f"{_CATEGORY}, or empty",
)
KERNEL_QUEUE = Spec(
    "gpu_hpc_kernel_queue_seconds",
    "histogram",
    "From a launch call's return to the kernel's start, all kernels of the job in trace windows; absent where its "
    "agents record no calls, as with CUPTI before 12.5.",
    JOB,
)
MEMCPY_BYTES = Spec(
    "gpu_hpc_memcpy_bytes",
    "histogram",
    "Sizes of copies in trace windows, by direction and by where the host's side of them lies.",
    (*JOB, "direction", "memory"),
    _COPIES,
)
MEMCPY_SECONDS = Spec(
    "gpu_hpc_memcpy_seconds_total",
    "counter",
    f"Time that copies took on the device in trace windows. {_RATE}",
    (*JOB, "direction", "memory"),
    _COPIES,
)
COPY_API_SECONDS = Spec(
    "gpu_hpc_copy_api_seconds_total",
    "counter",
    f"Host time in calls that copy, in trace windows; blocking ones wait for the copy inside. {_RATE}",
    (*JOB, "direction", "memory"),
    _COPIES,
)
SYNC_SECONDS = Spec(
    "gpu_hpc_sync_seconds_total",
    "counter",
    "Time that host threads waited for the GPU in trace windows, by what they waited for; of each what lies in the "
    f"window in which, or after which, it ends, and in the one before; counted when it has ended. {_RATE}",
    (*JOB, "call"),
    "call: event, stream, context, unknown",
)
LAUNCH_API_SECONDS = Spec(
    "gpu_hpc_launch_api_seconds_total",
    "counter",
    f"Host time in launch calls in trace windows, those of graphs included. {_RATE}",
    JOB,
)
GRAPH_LAUNCHES = Spec(
    "gpu_hpc_graph_launches_total",
    "counter",
    f"Launches of CUDA graphs in trace windows, with or without records of their nodes. {_RATE}",
    (*JOB, "nodes"),
    "nodes: traced, untraced",
)
KERNEL_BUSY_SECONDS = Spec(
    "gpu_hpc_kernel_busy_seconds_total",
    "counter",
    "Time in which at least one kernel or copy of a process ran; absent where agents of the job record no copies. "
    f"{_UNION}",
    JOB,
)
KERNEL_ACTIVITY_SECONDS = Spec(
    "gpu_hpc_kernel_activity_seconds_total",
    "counter",
    f"Time in which at least one of this kind ran; kinds overlap. {_UNION}",
    (*JOB, "activity"),
    'activity: compute, communication (kernels whose names begin with nccl, while category="communication" has custom '
    "all-reduces too, by their names), copy",
)
KERNEL_OVERLAP_SECONDS = Spec(
    "gpu_hpc_kernel_overlap_seconds_total",
    "counter",
    f"Time in which communication ran while compute ran too. {_UNION}",
    JOB,
)
KERNEL_IDLE_SECONDS = Spec(
    "gpu_hpc_kernel_idle_seconds_total",
    "counter",
    "Time in which nothing of a process ran. host: nothing was launched; queue: something was and had not started; "
    f"other: the launch of what ended it is not known. {_UNION}",
    (*JOB, "reason"),
    "reason: host, queue, other",
)
KERNEL_DEVICE_TRACED_SECONDS = Spec(
    "gpu_hpc_kernel_device_traced_seconds_total",
    "counter",
    "Time in which busy, activity, overlap and idle seconds were observed, for each process of the job.",
    JOB,
)
KERNEL_PROCESSES = Spec(
    "gpu_hpc_kernel_processes",
    "gauge",
    "Processes of this job of which an agent saw work on this GPU in its last trace window.",
    JOB,
)
KERNEL_TRACED_SECONDS = Spec(
    "gpu_hpc_kernel_traced_seconds_total",
    "counter",
    "Trace windows' length, for each process of the job: the denominator of what kernels, copies and calls add up to.",
    JOB,
)
KERNEL_PATTERN = Spec(
    "gpu_hpc_kernel_pattern",
    "gauge",
    "1 for a kernel that behaved so over the last five minutes, the first that holds. contended: while other jobs "
    "hold the GPU, executions of equal name, grid and block took five times as long in the last minute as in the last "
    "hour; many_short: at least 1,000 launches outside graphs a second and less than 50 us each; few_long: at least "
    "1 ms each and fewer than 50 a second; jittery: executions of equal name, grid and block deviate by more than "
    "their mean.",
    (*JOB, "kernel", "pattern"),
    "pattern: contended, many_short, few_long, jittery",
)
AGENTS = Spec(
    "gpu_hpc_agents",
    "gauge",
    "Processes with a kernel agent, by its state; gpu_hpc_gpu_processes says how many there could be.",
    ("state",),
    "state: tracing, waiting, paused, off",
)
PROCESSES_WITHOUT_AGENT = Spec(
    "gpu_hpc_processes_without_agent",
    "gauge",
    "Processes with a context on this GPU that have no kernel agent, as where only a launcher has one; absent where "
    "processes cannot be looked up.",
    G,
)
AGENT_PAUSE_INFO = Spec(
    "gpu_hpc_agent_pause_info",
    "gauge",
    "1 for each reason why agents do not trace, or trace less than they were told to.",
    ("reason",),
    "reason: no_context, profiler, configured, stopped, no_cuda, no_cupti, missing_function, unknown_version, "
    "cupti_error, budget, invalid_records, buffers, windows_discarded, no_heartbeat, unknown",
)
AGENT_OVERHEAD = Spec(
    "gpu_hpc_agent_overhead_ratio",
    "gauge",
    "Largest share of a process's time that its agent costs by its own cost model, with what CUPTI leaves each launch "
    "slower by (0-1); absent while none traces.",
)
AGENT_SLOWDOWN = Spec(
    "gpu_hpc_kernel_agent_slowdown_ratio",
    "gauge",
    "Share of a GPU's progress (its busiest pipe or its DRAM traffic, whichever is more certain) that is lost while a "
    "kernel agent traces there, against the untraced time just before and after: 0 none, 0.05 is 5% slower, a little "
    "below 0 is chance. Of the last 10 to 60 traces; absent while its 95% interval is wider than +-0.03. Times the "
    "traced share of the time it is the mean loss to windows; what CUPTI costs between them is not in it.",
    G,
)
AGENT_RECORDS = Spec(
    "gpu_hpc_agent_records_total",
    "counter",
    "Records of agents. dropped: lost, of discarded windows, or nodes of graphs with times of another replay; invalid: "
    "without possible times; unmatched: launches and kernels without their other half.",
    ("result",),
    "result: kept, dropped, invalid, unmatched",
)
AGENT_FILES_REJECTED = Spec(
    "gpu_hpc_agent_files_rejected_total",
    "counter",
    "Files in the agents' directory that are no honest agent's, or of another version. In part only: torn, in the "
    "middle of writing for three looks; foreign_gpu, what they say of GPUs on which the driver does not list their "
    "process; wrong_times, times that cannot be; too_many, kernels that are new in a file. Tried again: unreadable, "
    "too_many.",
    ("reason",),
    "reason: unreadable, symlink, not_regular, linked, unknown_magic, unknown_version, wrong_size, wrong_layout, "
    "too_many, duplicate, foreign_owner, lying, torn, foreign_gpu, wrong_times",
)

# The exporter about itself
UP = Spec("gpu_hpc_up", "gauge", "1 while the driver, or the recording, can be read.")
DOWN_INFO = Spec("gpu_hpc_down_info", "gauge", "1, with why gpu_hpc_up is 0.", ("reason",))
REPLAY = Spec("gpu_hpc_replay", "gauge", "1 when a recording is played instead of reading this machine's GPUs.")
GPUS = Spec(
    "gpu_hpc_gpus",
    "gauge",
    "Physical GPUs: expected (configured, or the most that the driver has counted) and visible (readable now).",
    ("state",),
    "state: expected, visible",
)
GPU_LOST = Spec(
    "gpu_hpc_gpu_lost",
    "gauge",
    "1 for a GPU that was there and cannot be reached any more: fallen off the bus, or no longer listed.",
    (*G, "pci_bus_id"),
)
SOURCE_STATE = Spec(
    "gpu_hpc_source_state",
    "gauge",
    "1 for the state that this source is in, 0 for the others; gpu and uuid are empty for the host's.",
    (*G, "source", "state"),
    "source: gpm, pm_sampling, nvml, kernels, kmsg, replay, procfs, kubelet, slurm; state: active, paused, busy, "
    "no_permission, unsupported, stale, failed, lost",
)
SOURCE_REQUIRED = Spec(
    "gpu_hpc_source_required",
    "gauge",
    "1 where the configuration requires this source (pm_sampling.mode: required), 0 where it may be missing.",
    ("source",),
    "source: gpm, pm_sampling, nvml, kernels, kmsg, replay, procfs, kubelet, slurm",
)
SOURCE_STATE_INFO = Spec(
    "gpu_hpc_source_state_info",
    "gauge",
    "1, with the reason for a state other than active.",
    (*G, "source", "state", "reason"),
)
WINDOW_SECONDS = Spec(
    "gpu_hpc_window_seconds",
    "gauge",
    "Length of the sampling windows in force.",
    (*G, "source"),
    "source: gpm, pm_sampling",
)
WINDOWS = Spec(
    "gpu_hpc_windows_total",
    "counter",
    "Sampling windows. late: counted, longer than 1.5 intervals. lost: due and not taken. rejected: impossible values.",
    (*G, "source", "result"),
    "source: gpm, pm_sampling; result: valid, late, lost, rejected",
)
LAST_WINDOW = Spec(
    "gpu_hpc_last_window_timestamp_seconds", "gauge", "Unix time at which the newest window ended.", (*G, "source")
)
REJECTED_READINGS = Spec(
    "gpu_hpc_rejected_readings_total",
    "counter",
    "Readings that cannot be true and were left out.",
    (*G, "reading", "reason"),
    "reason: nan, negative, above_range, sentinel",
)
DRIVER_ERRORS = Spec(
    "gpu_hpc_driver_errors_total", "counter", "Failed driver calls by NVML's name of the code.", ("code",)
)
DRIVER_CALL_HUNG = Spec(
    "gpu_hpc_driver_call_hung_seconds",
    "gauge",
    "For how long this driver call has not returned; the GPU's other series are withdrawn meanwhile.",
    (*G, "call"),
)
HELPER_RESTARTS = Spec(
    "gpu_hpc_helper_restarts_total",
    "counter",
    "How often PM sampling's helper process ended unasked and was restarted.",
)
PM_SAMPLING_INCIDENTS = Spec(
    "gpu_hpc_pm_sampling_incidents_total",
    "counter",
    "What PM sampling had to cope with. overflow: the hardware buffer was full, windows are lost. set_reduced: "
    "counters that did not deliver were left out. rate_halved: windows were made twice as long.",
    (*G, "incident"),
    "incident: overflow, set_reduced, rate_halved",
)
CONFIG_RELOAD_SUCCESS = Spec(
    "gpu_hpc_config_reload_success", "gauge", "1 when the configuration in force is the newest one that was asked for."
)
CONFIG_RELOAD_TIMESTAMP = Spec(
    "gpu_hpc_config_reload_timestamp_seconds", "gauge", "Unix time at which the configuration in force was loaded."
)
SERIES_LIMIT = Spec("gpu_hpc_series_limit", "gauge", "Most samples of an exposition, from the configuration.")
DROPPED_SERIES = Spec(
    "gpu_hpc_dropped_series_total",
    "counter",
    "Samples left out of expositions.",
    ("reason",),
    "reason: series_limit, duplicate",
)
COLLECTOR_SUCCESS = Spec(
    "gpu_hpc_scrape_collector_success",
    "gauge",
    "1 when this collector gave its families to this scrape.",
    ("collector",),
)
COLLECTOR_DURATION = Spec(
    "gpu_hpc_scrape_collector_duration_seconds", "gauge", "How long this collector took in this scrape.", ("collector",)
)
EXPOSED_SERIES = Spec("gpu_hpc_exposed_series", "gauge", "Samples in this exposition, this one included.")
BUILD_INFO = Spec(
    "gpu_hpc_exporter_build_info", "gauge", "1, with the exporter's version.", ("version", "revision", "python")
)

SECTIONS: Final[dict[str, tuple[Spec, ...]]] = {
    "Device windows": (
        OBSERVED_SECONDS,
        SOURCE_OBSERVED_SECONDS,
        SM_ACTIVE_SECONDS,
        SM_OCCUPANCY_SECONDS,
        PIPE_ACTIVE_SECONDS,
        ENGINE_ACTIVE_SECONDS,
        DRAM_ACTIVE_SECONDS,
        DRAM_READ_BYTES,
        DRAM_WRITTEN_BYTES,
        L2_SECTORS,
        L2_MISSED_SECTORS,
        L2_ACTIVE_SECONDS,
        PCIE_HOST_TO_GPU_BYTES,
        PCIE_GPU_TO_HOST_BYTES,
        NVLINK_RECEIVED_BYTES,
        NVLINK_TRANSMITTED_BYTES,
        C2C_HOST_TO_GPU_BYTES,
        C2C_GPU_TO_HOST_BYTES,
        DRAM_LIMIT,
        PCIE_LIMIT,
        NVLINK_LIMIT,
        C2C_LIMIT,
        BOTTLENECK_SECONDS,
        BOTTLENECK_INTENSITY,
        BOTTLENECK_INTENSITY_WINDOWS,
        SM_ACTIVE,
        SM_OCCUPANCY,
        DRAM_UTILIZATION,
        L2_MISS_RATIO,
        SM_UTILIZATION_SEED,
        DRAM_UTILIZATION_SEED,
        L2_MISS_SEED,
        LAUNCH_LATENCY_SEED,
        METRIC_SOURCE_INFO,
    ),
    "Device readings": (
        GPU_INFO,
        DRIVER_INFO,
        NVML_UTILIZATION,
        NVML_BUSY_SECONDS,
        MEMORY_CONTROLLER_BUSY,
        MEMORY_TOTAL,
        MEMORY_USED,
        MEMORY_RESERVED,
        MEMORY_FREE,
        POWER,
        POWER_LIMIT,
        ENERGY,
        TEMPERATURE,
        TEMPERATURE_SLOWDOWN,
        CLOCK,
        CLOCK_LIMIT,
        CLOCK_EVENT_SECONDS,
        PCIE_GENERATION,
        PCIE_WIDTH,
        PCIE_REPLAYS,
        NVLINK_LINKS,
        NVLINK_ERRORS,
        ECC_ERRORS,
        ROW_REMAP_PENDING,
        ROW_REMAP_FAILED,
        RECOVERY_ACTION,
        XID_ERRORS,
        XID_LAST_TIMESTAMP,
    ),
    "Jobs": (
        JOB_INFO,
        GPU_JOBS,
        JOB_MEMORY_USED,
        JOB_PROCESSES,
        JOB_SM,
        PROCESS_LIBRARY_INFO,
        MEMORY_UNATTRIBUTED,
        GPU_PROCESSES,
        JOB_MAP_AGE,
        UNKNOWN_CGROUPS,
        HONOR_LABELS_CHECK,
    ),
    "Kernels": (
        KERNEL_SECONDS,
        KERNEL_EXECUTIONS,
        KERNEL_LAUNCHES,
        KERNEL_SECONDS_SQUARED,
        KERNEL_MAX_SECONDS,
        KERNEL_DURATION,
        KERNEL_QUEUE,
        MEMCPY_BYTES,
        MEMCPY_SECONDS,
        COPY_API_SECONDS,
        SYNC_SECONDS,
        LAUNCH_API_SECONDS,
        GRAPH_LAUNCHES,
        KERNEL_BUSY_SECONDS,
        KERNEL_ACTIVITY_SECONDS,
        KERNEL_OVERLAP_SECONDS,
        KERNEL_IDLE_SECONDS,
        KERNEL_DEVICE_TRACED_SECONDS,
        KERNEL_PROCESSES,
        KERNEL_TRACED_SECONDS,
        KERNEL_PATTERN,
        AGENTS,
        PROCESSES_WITHOUT_AGENT,
        AGENT_PAUSE_INFO,
        AGENT_OVERHEAD,
        AGENT_SLOWDOWN,
        AGENT_RECORDS,
        AGENT_FILES_REJECTED,
    ),
    "The exporter about itself": (
        UP,
        DOWN_INFO,
        REPLAY,
        GPUS,
        GPU_LOST,
        SOURCE_STATE,
        SOURCE_REQUIRED,
        SOURCE_STATE_INFO,
        WINDOW_SECONDS,
        WINDOWS,
        LAST_WINDOW,
        REJECTED_READINGS,
        DRIVER_ERRORS,
        DRIVER_CALL_HUNG,
        HELPER_RESTARTS,
        PM_SAMPLING_INCIDENTS,
        CONFIG_RELOAD_SUCCESS,
        CONFIG_RELOAD_TIMESTAMP,
        SERIES_LIMIT,
        DROPPED_SERIES,
        COLLECTOR_SUCCESS,
        COLLECTOR_DURATION,
        EXPOSED_SERIES,
        BUILD_INFO,
    ),
}
CATALOGUE: Final[tuple[Spec, ...]] = tuple(spec for section in SECTIONS.values() for spec in section)
