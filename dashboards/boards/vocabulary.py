"""Words, colors and selectors that several dashboards use."""

from __future__ import annotations

from collections.abc import Callable

from boards.panels import Json, colored, link, override, query, state_timeline, steps, timeseries

BOTTLENECK, FLEET, JOB = "gpu-hpc-bottleneck", "gpu-hpc-fleet", "gpu-hpc-job"
KERNELS, EXPORTER = "gpu-hpc-kernels", "gpu-hpc-exporter"
"""Fixed uids."""

OF_GPU = "on(instance,gpu,uuid)"
WASTED = "idle|starved|copy_only"
"""Classes in which a GPU that a job holds does not work for it."""

CLASSES = {
    "compute_bound": (
        "#37872d",
        "Compute bound: the SMs' pipes are the limit. Healthy.",
    ),
    "mixed": ("#73bf69", "Mixed: kernels of several kinds take turns, no single limit. Normal for training."),
    "dram_bound": ("#ff9830", "DRAM bound: memory bandwidth is the limit. Fuse element-wise work, lower precision."),
    "l2_bound": ("#fade2a", "L2 bound: the bandwidth of the L2 cache is the limit. Reuse data in the SMs."),
    "l2_thrash": (
        "#e0b400",
        "L2 thrashing: data leave the cache before they are used again. Tile.",
    ),
    "pcie_bound": ("#5794f2", "PCIe bound: the host link is full. Pin memory, prefetch, move less."),
    "nvlink_bound": ("#1f60c4", "NVLink bound: the links between GPUs are full. Overlap or compress communication."),
    "copy_only": ("#8ab8ff", "Copies only: copy engines work while the SMs wait. Overlap copies with kernels."),
    "latency_bound": (
        "#b4a26a",
        "Latency bound: warps wait for data or each other. More work in each kernel.",
    ),
    "starved": (
        "#f2495c",
        "Starved: gaps between kernels, or small ones. Look at input, launches and syncs.",
    ),
    "throttled": ("#c4162a", "Throttled: heat or power holds the clocks down. Look at cooling and power."),
    "media": ("#b877d9", "Media: the video engines work."),
    "idle": ("#8e8e8e", "Idle: nothing ran for most of the time."),
    "unknown": ("#565c66", "Unknown: the counters that would tell are not measured here."),
}
"""What limited the GPU: color, and what it means in one sentence."""

CLASS_COLORS = {name: color for name, (color, _) in CLASSES.items()}
VERDICTS = {name: (sentence, color) for name, (color, sentence) in CLASSES.items()}
SHORT_VERDICTS = {name: (name.replace("_", " "), color) for name, (color, _) in CLASSES.items()}
SOURCE_STATES = {
    "active": ("active", "green"),
    "paused": ("paused", "blue"),
    "busy": ("busy", "purple"),
    "unsupported": ("unsupported", "#8e8e8e"),
    "no_permission": ("no permission", "orange"),
    "stale": ("stale", "orange"),
    "failed": ("failed", "red"),
    "lost": ("lost", "dark-red"),
}
"""State of a source of measurements: text and color."""

UNITS = {"sm": "SM", "l2": "L2", "dram": "DRAM", "pcie": "PCIe", "nvlink": "NVLink"}
SEVERE = {"sm": 0.85, "l2": 0.5, "dram": 0.9, "pcie": 0.85, "nvlink": 0.85}
"""From where on a unit's intensity is severe."""


EXPORTER_STATES = {"1": ("up", "green"), "0": ("no driver", "red"), "-1": ("gone", "red")}
"""Values of `exporter_state`: text and color."""

HOURS = "* $__interval_ms / 3600000"
"""Turns a count of samples that are $__interval apart into hours."""

TO_GPU = link(
    "Why is this GPU slow?",
    BOTTLENECK,
    instance="${__data.fields.instance:percentencode}",
    gpu="${__data.fields.gpu:percentencode}",
)
TO_JOB = link("Job ${__data.fields.job}", JOB, job="${__data.fields.job:percentencode}")
TO_KERNELS_OF_GPU = link(
    "Kernels of this GPU",
    KERNELS,
    instance="${__data.fields.instance:percentencode}",
    gpu="${__data.fields.gpu:percentencode}",
)
TO_KERNELS_OF_JOB = link("Kernels of ${__data.fields.job}", KERNELS, job="${__data.fields.job:percentencode}")
"""Links of a table's cells."""
TO_JOB_OF_SERIES = link("Job ${__field.labels.job}", JOB, job="${__field.labels.job:percentencode}")
TO_KERNELS_OF_SERIES = link("Kernels of ${__field.labels.job}", KERNELS, job="${__field.labels.job:percentencode}")
"""Links of a series that has a job."""


def exporter_state(nodes: str) -> str:
    """By node: 1 with a driver, 0 without, -1 where an exporter answered within the range and no longer does."""
    return (
        f"max by(instance) (gpu_hpc_up{{{nodes}}}) "
        f"or max by(instance) (last_over_time(gpu_hpc_up{{{nodes}}}[$__range])) * 0 - 1"
    )


def heat(severe: float) -> Json:
    """Bands of an intensity, the last one severe."""
    bands = [(None, "#80808022"), (0.05, "#ffe9a8"), (0.25, "#fdb462"), (0.5, "#f46d43")]
    return steps(*[band for band in bands if band[0] is None or band[0] < severe], (severe, "#c4162a"))


def observed(counter: str, selector: str, by: str = "", denominator: str = "gpu_hpc_observed_seconds_total") -> str:
    """Rate of a window counter by some labels, over the time that was observed, of all chosen GPUs together."""
    labels = f" by({by})" if by else ""
    match = " on() group_left()" if by else ""
    return (
        f"sum{labels} (rate({counter}{{{selector}}}[$__rate_interval])) /{match} "
        f"(sum (rate({denominator}{{{_source(selector, denominator)}}}[$__rate_interval])) > 0)"
    )


def _source(selector: str, denominator: str) -> str:
    return f'{selector},source="pm_sampling"' if "source" in denominator else selector


KNOWN = '{__name__=~"gpu_hpc_gpu_info|gpu:owner:info"'
"""Begin of a selector of what tells that there is a GPU: the exporter, or its recorded owner where only DCGM does."""


def of_dcgm(series: str, selector: str) -> str:
    """What alert-rules/compat/dcgm.yml records of GPUs that dcgm-exporter alone measures."""
    return f'{series}{{{selector},source="dcgm"}}'


def intensities(rate: Callable[[str, str], str], dcgm: str = "") -> list[Json]:
    """Mean intensity of each unit over windows, a query for each unit so that they keep this order.

    `rate` writes the rate of a series of the windows' histogram with one more matcher, GPU by GPU. `dcgm` selects the
    GPUs of which dcgm-exporter tells where none has windows.
    """
    name = "gpu_hpc_bottleneck_intensity_window_ratio"
    return [
        query(
            f"sum ({rate(f'{name}_sum', matcher)}) / (sum ({rate(f'{name}_count', matcher)}) > 0)"
            + (f" or avg({of_dcgm('gpu:bottleneck_intensity:mean5m', f'{dcgm},{matcher}')})" if dcgm else ""),
            UNITS[unit],
        )
        for unit, matcher in ((unit, f'unit="{unit}"') for unit in UNITS)
    ]


def intensity_panel(description: str, rate: Callable[[str, str], str], dcgm: str = "") -> Json:
    """A row for each unit, the darker the closer to its limit."""
    return state_timeline(
        "How close each unit was to its limit",
        "100 % is what real code can reach of the unit; dark red is severe: SM, PCIe and NVLink from 85 %, DRAM from "
        "90 %. L2 is the share of the requested sectors that the cache did not have, severe from 50 %; it has gaps "
        "while L2 has next to nothing to do. " + description,
        "percentunit",
        *intensities(rate, dcgm),
        decimals=0,
        min=0,
        max=1,
        overrides=[override(UNITS[unit], thresholds=heat(severe)) for unit, severe in SEVERE.items()],
    )


def classes_panel(title: str, description: str, expr: str) -> Json:
    """Shares of time by class, stacked; `expr` gives one series for each class."""
    return timeseries(
        title,
        description,
        "percentunit",
        query(expr, "{{class}}"),
        stack=True,
        max=1,
        overrides=colored(CLASS_COLORS),
    )
