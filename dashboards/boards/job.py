"""Job: everything about one job on all its GPUs."""

from __future__ import annotations

from boards.panels import (
    COLORED,
    Json,
    colored,
    column,
    dashboard,
    latest,
    now,
    query,
    stat,
    state_timeline,
    steps,
    table,
    texts,
    timeseries,
    variable,
)
from boards.vocabulary import (
    HOURS,
    JOB,
    OF_GPU,
    SHORT_VERDICTS,
    TO_GPU,
    TO_KERNELS_OF_GPU,
    VERDICTS,
    WASTED,
    classes_panel,
    intensity_panel,
)

NODES = 'instance=~"$node"'
HELD = f'gpu_hpc_job_info{{{NODES},job="$job"}}'
GPUS = f"and {OF_GPU} {HELD}"
WHILE = " While the job ran on the GPU or held it; what shares the GPU with it counts too."
EACH = "{{instance}} GPU {{gpu}}"


def build() -> Json:
    """The dashboard."""
    return dashboard(
        JOB,
        "Job",
        "Everything about one job on all its GPUs.",
        [
            variable("job", "Job", "label_values(gpu_hpc_job_info, job)", multi=False),
            # The job's nodes, so that no query has to look at the others.
            variable("node", "Nodes of the job", 'label_values(gpu_hpc_job_info{job="$job"}, instance)', multi=True),
        ],
        [
            (3, [(15, _verdict()), (3, _gpu_hours()), (3, _wasted()), (3, _wasted_share())]),
            (8, [(24, _intensity())]),
            (9, [(14, _classes()), (10, _truth())]),
            (8, [(24, _gpus())]),
            (8, [(12, _sm_active_of_each()), (12, _sm_share_of_each())]),
            (8, [(12, _links()), (12, _dram())]),
            (8, [(8, _memory()), (8, _power()), (8, _held())]),
        ],
    )


def _rate(counter: str, more: str = "") -> str:
    return f"rate({counter}{{{NODES}{more}}}[$__rate_interval])"


def _of_job(counter: str, by: str = "", more: str = "", observed: str = "gpu_hpc_observed_seconds_total") -> str:
    """Rate of a window counter over the time that was observed, mean of the job's GPUs."""
    labels, match = (f" by({by})", " on() group_left()") if by else ("", "")
    pm = ',source="pm_sampling"' if "source" in observed else ""
    return f"sum{labels} ({_rate(counter, more)} {GPUS}) /{match} (sum ({_rate(observed, pm)} {GPUS}) > 0)"


def _over_range(expr: str, by: str = "") -> str:
    return f"sum{by} (sum_over_time(({expr})[$__range:$__interval]))"


def _sampled(panel: Json) -> Json:
    return {**panel, "interval": "1m", "maxDataPoints": 400}


def _verdict() -> Json:
    seconds = f"{_rate('gpu_hpc_bottleneck_seconds_total')} {GPUS}"
    panel = stat(
        "Verdict",
        "What limited the job's GPUs for the largest share of their time, and what helps." + WHILE,
        "none",
        now(f"topk(1, {_over_range(seconds, ' by(class)')})"),
        fields="/^class$/",
        mappings=texts(VERDICTS),
    )
    return _sampled(panel)


_HELD_HOURS = f"{_over_range(f'max by(instance,gpu,uuid) ({HELD})')} {HOURS}"
_WASTED_HOURS = (
    _over_range(f"""{_rate("gpu_hpc_bottleneck_seconds_total", f',class=~"{WASTED}"')} {GPUS}""") + f" {HOURS}"
)


def _gpu_hours() -> Json:
    panel = stat(
        "GPU-hours",
        "Time x GPUs that the job held within the time range.",
        "suffix: GPU-h",
        latest(_HELD_HOURS),
        decimals=1,
        thresholds=steps((None, "text")),
    )
    return _sampled(panel)


def _wasted() -> Json:
    panel = stat(
        "wasted",
        "Time x GPUs in which its GPUs were idle, starved or only copied." + WHILE,
        "suffix: GPU-h",
        latest(_WASTED_HOURS),
        decimals=1,
        thresholds=steps((None, "text")),
    )
    return _sampled(panel)


def _wasted_share() -> Json:
    panel = stat(
        "of its time",
        "Wasted GPU-hours as a share of those that the job held.",
        "percentunit",
        latest(f"{_WASTED_HOURS} / ({_HELD_HOURS} > 0)"),
        decimals=0,
        thresholds=steps((None, "green"), (0.3, "orange"), (0.6, "red")),
    )
    return _sampled(panel)


def _intensity() -> Json:
    return intensity_panel(
        "Mean of the job's GPUs." + WHILE, lambda series, more: f"{_rate(series, ',' + more)} {GPUS}"
    )


def _classes() -> Json:
    return classes_panel(
        "Where the time went",
        "What limited the job's GPUs; the classes add up to 100 % of the time that was observed." + WHILE,
        _of_job("gpu_hpc_bottleneck_seconds_total", "class"),
    )


def _truth() -> Json:
    return timeseries(
        "nvidia-smi's number beside the truth",
        "nvidia-smi: whether any engine worked. SM active: share of the SMs with a resident warp. Means of the job's "
        "GPUs." + WHILE,
        "percentunit",
        query(f"avg(avg_over_time(gpu_hpc_nvml_utilization_ratio{{{NODES}}}[$__rate_interval]) {GPUS})", "nvidia-smi"),
        query(_of_job("gpu_hpc_sm_active_seconds_total"), "SM active"),
        query(_of_job("gpu_hpc_pipe_active_seconds_total", more=',pipe="tensor"'), "tensor pipe"),
        query(_of_job("gpu_hpc_sm_occupancy_seconds_total"), "SM occupancy"),
        max=1,
        overrides=colored({"nvidia-smi": "#8e8e8e", "SM active": "green", "tensor pipe": "red"}),
    )


def _gpus() -> Json:
    active = (
        f"sum by(instance,gpu,uuid) ({_rate('gpu_hpc_sm_active_seconds_total')}) "
        f"/ (sum by(instance,gpu,uuid) ({_rate('gpu_hpc_observed_seconds_total')}) > 0)"
    )
    seconds = f"sum by(instance,gpu,uuid,class) ({_rate('gpu_hpc_bottleneck_seconds_total')})"
    panel = table(
        "GPUs of the job",
        "Every GPU that the job held within the time range, the busiest first; a rank that differs from the others is "
        "worth a look. Click on a GPU for the reason or its kernels." + WHILE,
        [
            column("instance", "Node", links=[TO_GPU, TO_KERNELS_OF_GPU]),
            column("gpu", "GPU", links=[TO_GPU, TO_KERNELS_OF_GPU]),
            column("rank", "Rank"),
            column("class", "Mostly", mappings=texts(SHORT_VERDICTS), custom__cellOptions=COLORED),
            column("Value #B", "SMs had work", "percentunit", decimals=0),
            column("Value #D", "nvidia-smi says", "percentunit", decimals=0),
            column("Value #E", "Most memory", "bytes"),
            column("user", "User"),
            column("source", "Told by"),
        ],
        "SMs had work",
        now(f"max by(instance,gpu,uuid,rank,user,source) (last_over_time({HELD}[$__range]))"),
        now(f"avg_over_time(({active} {GPUS})[$__range:$__interval])"),
        now(f"topk by(instance,gpu,uuid) (1, sum_over_time(({seconds} {GPUS})[$__range:$__interval]))"),
        now(
            f"avg_over_time((max by(instance,gpu,uuid) (gpu_hpc_nvml_utilization_ratio{{{NODES}}}) {GPUS})"
            "[$__range:$__interval])"
        ),
        now(
            f'max by(instance,gpu,uuid) (max_over_time(gpu_hpc_job_memory_used_bytes{{{NODES},job="$job"}}[$__range]))'
        ),
    )
    return _sampled(panel)


def _sm_active_of_each() -> Json:
    return state_timeline(
        "SMs with work, GPU by GPU",
        "Share of the SMs with a resident warp on each of the job's GPUs: a pale row among dark ones is a rank that "
        "waits or has left." + WHILE,
        "percentunit",
        query(
            f"sum by(instance,gpu) ({_rate('gpu_hpc_sm_active_seconds_total')} {GPUS}) "
            f"/ (sum by(instance,gpu) ({_rate('gpu_hpc_observed_seconds_total')} {GPUS}) > 0)",
            EACH,
        ),
        decimals=0,
        min=0,
        max=1,
        thresholds=steps((None, "#80808022"), (0.01, "#c7e9c0"), (0.3, "#74c476"), (0.5, "#238b45"), (0.85, "#00441b")),
    )


def _sm_share_of_each() -> Json:
    return timeseries(
        "How much of the time its kernels ran",
        "Share of the time in which kernels of this job ran, GPU by GPU, as the driver samples it; says nothing of how "
        "hard. On a shared GPU it tells the jobs apart.",
        "percentunit",
        query(f'max by(instance,gpu) (gpu_hpc_job_sm_ratio{{{NODES},job="$job"}})', EACH),
        max=1,
    )


def _links() -> Json:
    link_bytes = {
        "PCIe host to GPU": "gpu_hpc_pcie_host_to_gpu_bytes_total",
        "PCIe GPU to host": "gpu_hpc_pcie_gpu_to_host_bytes_total",
        "NVLink received": "gpu_hpc_nvlink_received_bytes_total",
        "NVLink sent": "gpu_hpc_nvlink_transmitted_bytes_total",
    }
    return timeseries(
        "Bytes over the links",
        "Mean of the job's GPUs; only links that they have." + WHILE,
        "Bps",
        *(query(_of_job(counter), name) for name, counter in link_bytes.items()),
    )


def _dram() -> Json:
    pm = "gpu_hpc_source_observed_seconds_total"
    return timeseries(
        "Bytes to and from DRAM",
        "Mean of the job's GPUs; needs PM sampling." + WHILE,
        "Bps",
        query(_of_job("gpu_hpc_dram_read_bytes_total", observed=pm), "read"),
        query(_of_job("gpu_hpc_dram_written_bytes_total", observed=pm), "written"),
    )


def _memory() -> Json:
    return timeseries(
        "Memory of the job",
        "Device memory of the job's processes on each GPU; managed memory is not in it.",
        "bytes",
        query(f'max by(instance,gpu) (gpu_hpc_job_memory_used_bytes{{{NODES},job="$job"}})', EACH),
    )


def _power() -> Json:
    return timeseries(
        "Power",
        "Of all the job's GPUs together." + WHILE,
        "watt",
        query(f'sum(max by(instance,gpu,uuid) (gpu_hpc_power_watts{{{NODES},scope="gpu"}}) {GPUS})', "all GPUs"),
    )


def _held() -> Json:
    return timeseries(
        "GPUs and processes",
        "GPUs that the job held, its processes on them, and how many of the GPUs it shared with others.",
        "short",
        query(f"count(max by(instance,gpu,uuid) ({HELD}))", "GPUs"),
        query(f'sum(max by(instance,gpu,uuid) (gpu_hpc_job_processes{{{NODES},job="$job"}}))', "processes"),
        query(
            f"count((max by(instance,gpu,uuid) (gpu_hpc_gpu_jobs{{{NODES}}}) > 1) {GPUS}) or vector(0)", "shared GPUs"
        ),
        decimals=0,
    )
