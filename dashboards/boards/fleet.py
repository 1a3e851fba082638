"""Fleet: which GPUs and jobs are worst, and is everything being measured?"""

from __future__ import annotations

from boards.panels import (
    BAR,
    COLORED,
    Json,
    colored,
    column,
    dashboard,
    latest,
    link,
    now,
    query,
    stat,
    steps,
    table,
    texts,
    timeseries,
    variable,
)
from boards.vocabulary import (
    EXPORTER,
    EXPORTER_STATES,
    FLEET,
    HOURS,
    KNOWN,
    OF_GPU,
    SHORT_VERDICTS,
    SOURCE_STATES,
    TO_GPU,
    TO_JOB,
    TO_KERNELS_OF_GPU,
    TO_KERNELS_OF_JOB,
    WASTED,
    classes_panel,
    exporter_state,
    of_dcgm,
)

NODES = 'instance=~"$instance"'
OWNER = f'gpu:owner:info{{{NODES},job!=""}}'
JOBS_OF_DCGM = of_dcgm("gpu:owner:info", f'{NODES},job!=""')
RED = {"mode": "fixed", "fixedColor": "red"}
WASTE = steps((None, "green"), (0.3, "orange"), (0.6, "red"))
SAMPLED = " Sampled every 5 minutes, more coarsely over ranges above a day."


def build() -> Json:
    """The dashboard."""
    result = dashboard(
        FLEET,
        "Fleet",
        "The worst GPUs and jobs first, what they waste, and the state of every exporter and source.",
        [variable("instance", "Node", f"label_values({KNOWN}}}, instance)", multi=True, allValue=".+")],
        [
            (3, [(4, _gpus()), (4, _missing()), (4, _jobs_now()), (4, _wasted()), (4, _wasted_share()), (4, _down())]),
            (9, [(24, _worst_jobs())]),
            (10, [(24, _worst_gpus())]),
            (9, [(14, _classes()), (10, _truth())]),
            (9, [(12, _exporters()), (12, _sources())]),
        ],
    )
    return {**result, "time": {"from": "now-6h", "to": "now"}, "refresh": "1m"}


def _over_range(expr: str, by: str) -> str:
    """GPU-hours of the range in which `expr` was 1."""
    return f"sum{by} (sum_over_time(({expr})[$__range:$__interval])) {HOURS}"


def _class_shares(classes: str) -> str:
    return f'sum by(instance,gpu,uuid) (gpu:bottleneck_class:ratio_rate5m{{{NODES},class=~"{classes}"}})'


def _held(classes: str) -> str:
    return f"{_class_shares(classes)} * {OF_GPU} group_left(job,kind) {OWNER}"


def _sampled(panel: Json) -> Json:
    return {**panel, "interval": "5m", "maxDataPoints": 300}


def _gpus() -> Json:
    expr = f"count(max by(instance,gpu,uuid) ({KNOWN},{NODES}}}))"
    return stat(
        "GPUs", "GPUs and MIG instances that are measured.", "none", latest(expr), thresholds=steps((None, "text"))
    )


def _missing() -> Json:
    # What GpuHpcGpusMissing compares: what a node has had within 14 days, of nodes that answer.
    expected = f"max by(instance) (instance:gpus_expected:max14d{{{NODES}}})"
    visible = f'max by(instance) (gpu_hpc_gpus{{{NODES},state="visible"}})'
    return stat(
        "GPUs missing",
        "GPUs that their nodes should have, or had within 14 days, and that cannot be read. Only of nodes that answer.",
        "none",
        latest(f"sum({expected} - {visible})"),
        thresholds=steps((None, "green"), (1, "red")),
    )


def _jobs_now() -> Json:
    return stat(
        "Jobs",
        "Jobs that run on a GPU or hold one.",
        "none",
        latest(f"count(count by(job) (gpu_hpc_job_info{{{NODES}}} or {JOBS_OF_DCGM}))"),
        thresholds=steps((None, "text")),
    )


def _wasted() -> Json:
    panel = stat(
        "Wasted GPU-hours",
        "Time x GPUs in which a job held a GPU that was idle, starved or only copied. GPUs that several jobs share are "
        "left out." + SAMPLED,
        "suffix: GPU-h",
        latest(_over_range(_held(WASTED), "")),
        decimals=1,
        thresholds=steps((None, "text")),
    )
    return _sampled(panel)


def _wasted_share() -> Json:
    panel = stat(
        "of the GPU-hours held",
        "Wasted GPU-hours as a share of the GPU-hours that jobs held." + SAMPLED,
        "percentunit",
        latest(f"{_over_range(_held(WASTED), '')} / ({_over_range(OWNER, '')} > 0)"),
        decimals=0,
        thresholds=WASTE,
    )
    return _sampled(panel)


def _down() -> Json:
    return stat(
        "Exporters not well",
        "Exporters that answered within the time range and no longer do, or that cannot read their driver.",
        "none",
        latest(f"count(({exporter_state(NODES)}) < 1) or vector(0)"),
        thresholds=steps((None, "green"), (1, "red")),
    )


def _worst_jobs() -> Json:
    def hours(classes: str) -> str:
        return _over_range(_held(classes), " by(job,kind)")

    held = _over_range(OWNER, " by(job,kind)")
    panel = table(
        "Worst jobs",
        "GPU-hours that each job wasted: it held the GPU, which was idle, starved (gaps between kernels, small ones) "
        "or only copied. Normal for services and notebooks. GPUs that several jobs share are left out." + SAMPLED,
        [
            column("job", "Job", links=[TO_JOB, TO_KERNELS_OF_JOB]),
            column("kind", "Kind"),
            column(
                "Value #A",
                "Wasted",
                "suffix: GPU-h",
                decimals=2,
                custom__cellOptions=BAR,
                color={"mode": "fixed", "fixedColor": "red"},
            ),
            column("Value #B", "of its time", "percentunit", decimals=0, thresholds=WASTE, custom__cellOptions=COLORED),
            column("Value #C", "Idle", "suffix: GPU-h", decimals=2),
            column("Value #D", "Starved", "suffix: GPU-h", decimals=2),
            column("Value #E", "Copies only", "suffix: GPU-h", decimals=2),
            column("Value #F", "Held", "suffix: GPU-h", decimals=2),
        ],
        "Wasted",
        now(hours(WASTED)),
        now(f"{hours(WASTED)} / ({held} > 0)"),
        *(now(hours(name)) for name in ("idle", "starved", "copy_only")),
        now(held),
    )
    return _sampled(panel)


def _worst_gpus() -> Json:
    def mean(expr: str) -> str:
        return f"avg_over_time(({expr})[$__range:$__interval])"

    def recorded(series: str) -> str:
        return mean(f"max by(instance,gpu,uuid) ({series}{{{NODES}}})")

    panel = table(
        "Worst GPUs",
        "GPUs by the share of the time range in which they were idle, starved or only copied, held or not. Owner: the "
        "only job on it at the end of the range. Click on a GPU for the reason." + SAMPLED,
        [
            column("instance", "Node", links=[TO_GPU, TO_KERNELS_OF_GPU]),
            column("gpu", "GPU", links=[TO_GPU, TO_KERNELS_OF_GPU]),
            column("class", "Mostly", mappings=texts(SHORT_VERDICTS), custom__cellOptions=COLORED),
            column(
                "Value #A",
                "Not working",
                "percentunit",
                decimals=0,
                max=1,
                min=0,
                custom__cellOptions=BAR,
                thresholds=WASTE,
            ),
            column("Value #C", "nvidia-smi says", "percentunit", decimals=0),
            column("Value #D", "SMs had work", "percentunit", decimals=0),
            column("Value #E", "DRAM of peak", "percentunit", decimals=0),
            column("job", "Owner", links=[TO_JOB, TO_KERNELS_OF_JOB]),
        ],
        "Not working",
        now(mean(_class_shares(WASTED))),
        now(
            "topk by(instance,gpu,uuid) (1, "
            f"sum_over_time(gpu:bottleneck_class:ratio_rate5m{{{NODES}}}[$__range:$__interval]))"
        ),
        now(recorded("gpu:nvml_utilization:avg5m")),
        now(recorded("gpu:sm_active:ratio_rate5m")),
        now(recorded("gpu:dram_active:ratio_rate5m")),
        now(f"max by(instance,gpu,uuid,job) (gpu:owner:info{{{NODES}}})"),
    )
    return _sampled(panel)


def _classes() -> Json:
    return classes_panel(
        "Where the fleet's time went",
        "What limited the GPUs, mean of all chosen nodes; the classes add up to 100 % of the time that was observed.",
        f"avg by(class) (gpu:bottleneck_class:ratio_rate5m{{{NODES}}})",
    )


def _truth() -> Json:
    return timeseries(
        "Utilisation of the fleet",
        "Mean of all GPUs: what nvidia-smi says, and the share of the SMs that had work.",
        "percentunit",
        query(f"avg(gpu:nvml_utilization:avg5m{{{NODES}}})", "nvidia-smi"),
        query(f"avg(gpu:sm_active:ratio_rate5m{{{NODES}}})", "SM active"),
        query(f'avg(gpu:bottleneck_intensity:mean5m{{{NODES},unit="sm"}})', "SM utilisation"),
        max=1,
        overrides=colored({"nvidia-smi": "#8e8e8e", "SM active": "green", "SM utilisation": "red"}),
    )


def _exporters() -> Json:
    windows = [
        f"sum by(instance) (increase(gpu_hpc_windows_total{{{NODES}{result}}}[$__range]))"
        for result in (',result="lost"', "")
    ]
    to_exporter = [link("Exporter", EXPORTER, instance="${__data.fields.instance:percentencode}")]
    return table(
        "Exporters",
        "Every exporter that answered within the time range. no driver: it runs and cannot read its GPUs. gone: it no "
        "longer answers.",
        [
            column("instance", "Node", links=to_exporter),
            column("Value #A", "State", mappings=texts(EXPORTER_STATES), custom__cellOptions=COLORED),
            column("Value #B", "GPUs"),
            column("Value #C", "expected"),
            column(
                "Value #D",
                "Windows lost",
                "percentunit",
                decimals=1,
                thresholds=steps((None, "text"), (0.02, "orange"), (0.1, "red")),
                custom__cellOptions=COLORED,
            ),
            column("Value #E", "Recording", mappings=texts({"1": ("played", "blue"), "0": ("no", "text")})),
            column("version", "Version"),
        ],
        "State",
        now(exporter_state(NODES)),
        now(f'max by(instance) (gpu_hpc_gpus{{{NODES},state="visible"}})'),
        now(f'max by(instance) (gpu_hpc_gpus{{{NODES},state="expected"}})'),
        now(f"{windows[0]} / ({windows[1]} > 0)"),
        now(f"max by(instance) (gpu_hpc_replay{{{NODES}}})"),
        now(f"max by(instance,version) (gpu_hpc_exporter_build_info{{{NODES}}})"),
        ascending=True,
    )


def _sources() -> Json:
    return table(
        "Sources",
        "In how many places each source of measurements is in which state; the exporter dashboard names places and "
        "reasons. unsupported is normal where a node has no such thing (a kubelet, for example).",
        [
            column("source", "Source"),
            column("state", "State", mappings=texts(SOURCE_STATES), custom__cellOptions=COLORED),
            column("Value", "Places"),
        ],
        "Places",
        now(f"count by(source,state) (max by(instance,gpu,source,state) (gpu_hpc_source_state{{{NODES}}}) == 1)"),
    )
