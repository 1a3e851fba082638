"""GPU bottleneck: why is this GPU slow?"""

from __future__ import annotations

from boards.panels import (
    Json,
    colored,
    dashboard,
    heatmap,
    latest,
    now,
    override,
    query,
    stat,
    state_timeline,
    steps,
    texts,
    timeseries,
    variable,
)
from boards.vocabulary import (
    BOTTLENECK,
    KNOWN,
    TO_JOB_OF_SERIES,
    TO_KERNELS_OF_SERIES,
    VERDICTS,
    classes_panel,
    intensity_panel,
    observed,
    of_dcgm,
)

GPU = 'instance=~"$instance",gpu=~"$gpu"'
JOBS_OF_DCGM = of_dcgm("gpu:owner:info", f'{GPU},job!=""')
WINDOWS = "gpu_hpc_bottleneck_intensity_window_ratio"
SEVERAL = " Of several chosen GPUs: their mean."
EACH = "{{instance}} GPU {{gpu}}"


def build() -> Json:
    """The dashboard."""
    return dashboard(
        BOTTLENECK,
        "GPU bottleneck",
        "Why is this GPU slow? Choose a GPU; of several the panels show the mean, where they do not name each.",
        [
            variable("instance", "Node", f"label_values({KNOWN}}}, instance)", multi=True, allValue=".+"),
            variable("gpu", "GPU", f'label_values({KNOWN},instance=~"$instance"}}, gpu)', multi=True, allValue=".+"),
            # One distribution panel for each unit that this GPU has: a GPU without NVLink gets no empty one.
            variable("unit", "Unit", f"label_values({WINDOWS}_count{{{GPU}}}, unit)", multi=True, hidden=True),
        ],
        [
            (3, [(15, _verdict()), (3, _verdict_share()), (3, _nvidia_smi()), (3, _sm_active())]),
            (8, [(24, _intensity())]),
            (9, [(24, _classes())]),
            (8, [(14, _truth()), (10, _jobs())]),
            (8, [(24, _distribution())]),
            (8, [(12, _links()), (12, _dram())]),
            (8, [(12, _pipes()), (12, _l2())]),
            (8, [(12, _clocks()), (12, _clock_events())]),
            (8, [(8, _power()), (8, _temperature()), (8, _memory())]),
        ],
    )


def _with(label: str, value: str) -> str:
    return f'{GPU},{label}="{value}"'


def _range_share(counter: str, labels: str) -> str:
    return (
        f"sum{labels} (increase({counter}{{{GPU}}}[$__range])) / on() group_left() "
        f"(sum (increase(gpu_hpc_observed_seconds_total{{{GPU}}}[$__range])) > 0)"
    )


_LARGEST = f"topk(1, {_range_share('gpu_hpc_bottleneck_seconds_total', ' by(class)')})"


def _verdict() -> Json:
    return stat(
        "Verdict",
        "What limited the GPU for the largest share of the time range, and what helps." + SEVERAL,
        "none",
        now(_LARGEST),
        fields="/^class$/",
        mappings=texts(VERDICTS),
    )


def _verdict_share() -> Json:
    return stat(
        "for this share of the time",
        "How much of the observed time the verdict stands for; the panel below shows the rest.",
        "percentunit",
        latest(f"max({_LARGEST})"),
        decimals=0,
        thresholds=steps((None, "text")),
    )


def _nvidia_smi() -> Json:
    return stat(
        "nvidia-smi says",
        "Mean of GPU-Util over the time range: whether any engine worked, copies included; it says nothing about how "
        "hard." + SEVERAL,
        "percentunit",
        latest(
            f"avg(avg_over_time(gpu_hpc_nvml_utilization_ratio{{{GPU}}}[$__range])) "
            f"or avg(avg_over_time({of_dcgm('gpu:nvml_utilization:avg5m', GPU)}[$__range]))"
        ),
        decimals=0,
        thresholds=steps((None, "text")),
    )


def _sm_active() -> Json:
    return stat(
        "SMs had work",
        "Mean share of the SMs with at least one resident warp over the time range." + SEVERAL,
        "percentunit",
        latest(
            _range_share("gpu_hpc_sm_active_seconds_total", "").replace(" on() group_left()", "")
            + f" or avg(avg_over_time({of_dcgm('gpu:sm_active:ratio_rate5m', GPU)}[$__range]))"
        ),
        decimals=0,
        thresholds=steps((None, "red"), (0.3, "orange"), (0.5, "green")),
    )


def _intensity() -> Json:
    return intensity_panel(SEVERAL, lambda series, more: f"rate({series}{{{GPU},{more}}}[$__rate_interval])", GPU)


def _classes() -> Json:
    return classes_panel(
        "Where the time went",
        "What limited the GPU, one class for each sampling window; the classes add up to 100 % of the time that was "
        "observed. Time that nobody observed is missing, not idle." + SEVERAL,
        observed("gpu_hpc_bottleneck_seconds_total", GPU, "class"),
    )


def _truth() -> Json:
    return timeseries(
        "nvidia-smi's number beside the truth",
        "nvidia-smi: whether any engine worked. SM active: share of the SMs with a resident warp. SM utilisation: how "
        "busy the busiest pipe of the SMs was. Occupancy: resident warps of those that fit." + SEVERAL,
        "percentunit",
        query(
            f"avg(avg_over_time(gpu_hpc_nvml_utilization_ratio{{{GPU}}}[$__rate_interval])) "
            f"or avg({of_dcgm('gpu:nvml_utilization:avg5m', GPU)})",
            "nvidia-smi",
        ),
        query(
            observed("gpu_hpc_sm_active_seconds_total", GPU) + f" or avg({of_dcgm('gpu:sm_active:ratio_rate5m', GPU)})",
            "SM active",
        ),
        query(
            f'sum(rate({WINDOWS}_sum{{{GPU},unit="sm"}}[$__rate_interval])) '
            f'/ (sum(rate({WINDOWS}_count{{{GPU},unit="sm"}}[$__rate_interval])) > 0) '
            f"or avg({of_dcgm('gpu:bottleneck_intensity:mean5m', _with('unit', 'sm'))})",
            "SM utilisation",
        ),
        query(
            observed("gpu_hpc_sm_occupancy_seconds_total", GPU)
            + f" or avg({of_dcgm('gpu:sm_occupancy:ratio_rate5m', GPU)})",
            "SM occupancy",
        ),
        max=1,
        overrides=colored({"nvidia-smi": "#8e8e8e", "SM active": "green", "SM utilisation": "red"}),
    )


def _jobs() -> Json:
    return state_timeline(
        "Jobs on the GPU",
        "When which job ran here or held the GPU. Click on one for everything about it on all its GPUs, or for its "
        "kernels.",
        "none",
        query(f"max by(job) (gpu_hpc_job_info{{{GPU}}} or {JOBS_OF_DCGM})", "{{job}}"),
        mappings=texts({"1": ("holds the GPU", "#5794f2")}),
        links=[TO_JOB_OF_SERIES, TO_KERNELS_OF_SERIES],
    )


def _distribution() -> Json:
    buckets = f'sum by(le) (rate({WINDOWS}_bucket{{{GPU},unit=~"$unit",le!="+Inf"}}[$__rate_interval]))'
    return heatmap(
        "Distribution of the windows: $unit",
        "How intensely the sampling windows (100 ms by default) used this unit: a color at the top and one at the "
        "bottom mean bursts that the mean hides.",
        f'{buckets} / on() group_left() (sum (rate({WINDOWS}_count{{{GPU},unit=~"$unit"}}[$__rate_interval])) > 0)',
        unit="percentunit",
        cells="percentunit",
        repeat="unit",
        repeatDirection="h",
        maxPerRow=4,
    )


def _links() -> Json:
    ways = {
        "PCIe host to GPU": ("pcie", "host_to_gpu"),
        "PCIe GPU to host": ("pcie", "gpu_to_host"),
        "NVLink received": ("nvlink", "received"),
        "NVLink sent": ("nvlink", "transmitted"),
        "C2C host to GPU": ("c2c", "host_to_gpu"),
        "C2C GPU to host": ("c2c", "gpu_to_host"),
    }
    return timeseries(
        "Bytes over the links",
        "PCIe with its protocol, NVLink payload, C2C on Grace; only links that the GPU has." + SEVERAL,
        "Bps",
        *(
            query(
                observed(f"gpu_hpc_{link}_{way}_bytes_total", GPU)
                + f" or avg({of_dcgm(f'gpu:{link}_bytes:rate5m', _with('direction', way))})",
                name,
            )
            for name, (link, way) in ways.items()
        ),
    )


def _dram() -> Json:
    pm = "gpu_hpc_source_observed_seconds_total"
    return timeseries(
        "Bytes to and from DRAM",
        "Read and written, beside the peak of the memory's interface; needs PM sampling, except for the peak."
        + SEVERAL,
        "Bps",
        query(observed("gpu_hpc_dram_read_bytes_total", GPU, denominator=pm), "read"),
        query(observed("gpu_hpc_dram_written_bytes_total", GPU, denominator=pm), "written"),
        query(f"avg(gpu_hpc_dram_bandwidth_limit_bytes_per_second{{{GPU}}})", "peak"),
        overrides=[_limit("peak")],
    )


def _limit(name: str) -> Json:
    return override(
        name,
        color={"mode": "fixed", "fixedColor": "red"},
        custom__lineStyle={"fill": "dash", "dash": [8, 8]},
        custom__fillOpacity=0,
    )


def _pipes() -> Json:
    return timeseries(
        "Pipes of the SMs",
        "Share of the cycles in which each pipe worked. Matrix code whose tensor pipe rests runs on the wrong units."
        + SEVERAL,
        "percentunit",
        query(
            observed("gpu_hpc_pipe_active_seconds_total", GPU, "pipe")
            + f" or avg by(pipe) ({of_dcgm('gpu:pipe_active:ratio_rate5m', GPU)})",
            "{{pipe}}",
        ),
        max=1,
    )


def _l2() -> Json:
    pm = "gpu_hpc_source_observed_seconds_total"
    sectors = [
        f"sum(rate(gpu_hpc_l2_{kind}_total{{{GPU}}}[$__rate_interval]))" for kind in ("missed_sectors", "sectors")
    ]
    return timeseries(
        "L2 cache",
        "Bandwidth: used share of L2's peak. Went to DRAM: share of the requested sectors that the cache did not have; "
        "it says little while the bandwidth is low. Needs PM sampling." + SEVERAL,
        "percentunit",
        query(observed("gpu_hpc_l2_active_seconds_total", GPU, denominator=pm), "bandwidth"),
        query(f"{sectors[0]} / ({sectors[1]} > 0)", "went to DRAM"),
        max=1,
    )


def _clocks() -> Json:
    return timeseries(
        "SM clock",
        "Of each GPU, beside the highest clock of the device.",
        "hertz",
        query(
            f'max by(instance,gpu) (avg_over_time(gpu_hpc_clock_hertz{{{GPU},domain="sm"}}[$__rate_interval]))', EACH
        ),
        query(f'max(gpu_hpc_clock_limit_hertz{{{GPU},domain="sm"}})', "highest"),
        overrides=[_limit("highest")],
    )


def _clock_events() -> Json:
    return timeseries(
        "What held the clocks down",
        "Share of the time by the driver's reason. gpu_idle and sw_power_cap (the GPU reaches its power limit at full "
        "work) are normal; hw_slowdown, thermal and power-brake reasons are not." + SEVERAL,
        "percentunit",
        query(
            f"avg by(reason) (rate(gpu_hpc_clock_event_seconds_total{{{GPU}}}[$__rate_interval])) "
            f"or avg by(reason) ({of_dcgm('gpu:clock_event:ratio_rate5m', GPU)})",
            "{{reason}}",
        ),
        max=1,
        overrides=colored(
            {
                "gpu_idle": "#8e8e8e",
                "sw_power_cap": "#5794f2",
                "hw_slowdown": "red",
                "hw_thermal_slowdown": "dark-red",
                "sw_thermal_slowdown": "orange",
                "hw_power_brake_slowdown": "purple",
            }
        ),
    )


def _power() -> Json:
    return timeseries(
        "Power",
        "Of each GPU, beside the limit in force.",
        "watt",
        query(
            f'max by(instance,gpu) (avg_over_time(gpu_hpc_power_watts{{{GPU},scope="gpu"}}[$__rate_interval]))', EACH
        ),
        query(f"max(gpu_hpc_power_limit_watts{{{GPU}}})", "limit"),
        overrides=[_limit("limit")],
    )


def _temperature() -> Json:
    return timeseries(
        "Temperature",
        "Of each sensor, beside the temperature at which the device slows itself down.",
        "celsius",
        query(f"max by(instance,gpu,sensor) (gpu_hpc_temperature_celsius{{{GPU}}})", EACH + " {{sensor}}"),
        query(f"min(gpu_hpc_temperature_slowdown_celsius{{{GPU}}})", "slows down"),
        overrides=[_limit("slows down")],
    )


def _memory() -> Json:
    return timeseries(
        "Memory",
        "Device memory of each job, and what no process accounts for: managed memory, the driver, leftovers.",
        "bytes",
        query(f"sum by(job) (gpu_hpc_job_memory_used_bytes{{{GPU}}})", "{{job}}"),
        query(f"sum(gpu_hpc_memory_unattributed_bytes{{{GPU}}})", "unattributed"),
        query(f"sum(gpu_hpc_memory_used_bytes{{{GPU}}})", "used"),
        query(f"sum(gpu_hpc_memory_total_bytes{{{GPU}}})", "total"),
        overrides=[_limit("total")],
    )
