"""Exporter health: can the numbers be trusted, and what do they cost?"""

from __future__ import annotations

from boards.panels import (
    COLORED,
    Json,
    column,
    dashboard,
    now,
    query,
    state_timeline,
    table,
    texts,
    timeseries,
    variable,
)
from boards.vocabulary import EXPORTER, EXPORTER_STATES, SOURCE_STATES, exporter_state

NODES = 'instance=~"$instance"'


def build() -> Json:
    """The dashboard."""
    return dashboard(
        EXPORTER,
        "Exporter health",
        "Can the numbers be trusted, and what do they cost?",
        [
            # From what every exporter serves, also one that sees no GPU.
            variable(
                "instance", "Node", "label_values(gpu_hpc_exporter_build_info, instance)", multi=True, allValue=".+"
            )
        ],
        [
            (6, [(12, _up()), (12, _versions())]),
            (10, [(24, _sources())]),
            (8, [(24, _states())]),
            (8, [(12, _windows()), (12, _lost())]),
            (8, [(12, _durations()), (12, _series())]),
            (8, [(12, _cpu()), (12, _memory())]),
            (8, [(12, _incidents()), (12, _last_window())]),
        ],
    )


def _up() -> Json:
    return state_timeline(
        "State",
        "no driver: the exporter runs and cannot read its GPUs. gone: it answered within the time range and no longer "
        "does.",
        "none",
        query(exporter_state(NODES), "{{instance}}"),
        mappings=texts(EXPORTER_STATES),
    )


def _versions() -> Json:
    return table(
        "Versions",
        "Exporter, Python, driver and CUDA of each node, and whether the newest configuration is in force.",
        [
            column("instance", "Node"),
            column("version", "Exporter"),
            column("python", "Python"),
            column("driver_version", "Driver"),
            column("cuda_version", "CUDA"),
            column(
                "Value #C",
                "Configuration",
                mappings=texts({"1": ("in force", "green"), "0": ("refused", "red")}),
                custom__cellOptions=COLORED,
            ),
        ],
        "Node",
        now(f"max by(instance,version,python) (gpu_hpc_exporter_build_info{{{NODES}}})"),
        now(f"max by(instance,driver_version,cuda_version) (gpu_hpc_driver_info{{{NODES}}})"),
        now(f"max by(instance) (gpu_hpc_config_reload_success{{{NODES}}})"),
        ascending=True,
    )


def _sources() -> Json:
    numbered = {state: str(number) for number, state in enumerate(SOURCE_STATES, start=1)}
    states = " or ".join(
        f'{number} * (max by(instance,gpu,source) (gpu_hpc_source_state{{{NODES},state="{state}"}}) == 1)'
        for state, number in numbered.items()
    )
    return state_timeline(
        "Sources of measurements",
        "State of each source, of each GPU or of the host. What is not measured is absent elsewhere, never 0.",
        "none",
        query(states, "{{instance}} {{source}} {{gpu}}"),
        mappings=texts({numbered[state]: shown for state, shown in SOURCE_STATES.items()}),
    )


def _states() -> Json:
    return table(
        "Sources now, and why",
        "State of each source at the end of the time range, with the reason where it is not active.",
        [
            column("instance", "Node"),
            column("gpu", "GPU"),
            column("source", "Source"),
            column("state", "State", mappings=texts(SOURCE_STATES), custom__cellOptions=COLORED),
            column("reason", "Reason"),
        ],
        "State",
        now(f"max by(instance,gpu,source,state) (gpu_hpc_source_state{{{NODES}}}) == 1"),
        now(f"max by(instance,gpu,source,state,reason) (gpu_hpc_source_state_info{{{NODES}}})"),
    )


def _windows() -> Json:
    return timeseries(
        "Windows taken",
        "Sampling windows that counted, a second, of all chosen nodes' GPUs together (10 for each GPU and source by "
        "default).",
        "cps",
        query(
            f'sum by(source) (rate(gpu_hpc_windows_total{{{NODES},result=~"valid|late"}}[$__rate_interval]))',
            "{{source}}",
        ),
    )


def _lost() -> Json:
    return timeseries(
        "Windows lost, late or rejected",
        "Share of all windows that were due. lost: not taken. late: counted, but longer than 1.5 intervals. rejected: "
        "impossible values.",
        "percentunit",
        query(
            f'sum by(source,result) (rate(gpu_hpc_windows_total{{{NODES},result!="valid"}}[$__rate_interval])) '
            "/ on(source) group_left() "
            f"(sum by(source) (rate(gpu_hpc_windows_total{{{NODES}}}[$__rate_interval])) > 0)",
            "{{source}} {{result}}",
        ),
    )


def _durations() -> Json:
    return timeseries(
        "Time for a scrape",
        "How long each part of a scrape took, the slowest node; measuring goes on by itself and is not in it.",
        "s",
        query(
            "max by(collector) "
            f"(max_over_time(gpu_hpc_scrape_collector_duration_seconds{{{NODES}}}[$__rate_interval]))",
            "{{collector}}",
        ),
        stack=True,
    )


def _series() -> Json:
    return timeseries(
        "Series against their limit",
        "Samples in an exposition as a share of series_limit; above it whole families are left out.",
        "percentunit",
        query(
            f"max by(instance) (gpu_hpc_exposed_series{{{NODES}}}) "
            f"/ max by(instance) (gpu_hpc_series_limit{{{NODES}}})",
            "{{instance}}",
        ),
        max=1,
        thresholds=_near(),
    )


def _near() -> Json:
    return {"mode": "absolute", "steps": [{"value": None, "color": "green"}, {"value": 0.8, "color": "red"}]}


def _cpu() -> Json:
    return timeseries(
        "CPU",
        "Share of one core that the exporter uses, without PM sampling's helper process.",
        "percentunit",
        query(
            f"max by(instance) (rate(process_cpu_seconds_total{{{NODES}}}[$__rate_interval]) "
            f"and on(instance,job) gpu_hpc_exporter_build_info{{{NODES}}})",
            "{{instance}}",
        ),
    )


def _memory() -> Json:
    return timeseries(
        "Memory",
        "Resident memory of the exporter, without PM sampling's helper process.",
        "bytes",
        query(
            f"max by(instance) (process_resident_memory_bytes{{{NODES}}} "
            f"and on(instance,job) gpu_hpc_exporter_build_info{{{NODES}}})",
            "{{instance}}",
        ),
    )


def _incidents() -> Json:
    kinds = {
        "helper restarted": f"sum(increase(gpu_hpc_helper_restarts_total{{{NODES}}}[$__rate_interval]))",
        "PM sampling: {{incident}}": (
            f"sum by(incident) (increase(gpu_hpc_pm_sampling_incidents_total{{{NODES}}}[$__rate_interval]))"
        ),
        "driver error {{code}}": f"sum by(code) (increase(gpu_hpc_driver_errors_total{{{NODES}}}[$__rate_interval]))",
        "reading rejected: {{reason}}": (
            f"sum by(reason) (increase(gpu_hpc_rejected_readings_total{{{NODES}}}[$__rate_interval]))"
        ),
        "series dropped: {{reason}}": (
            f"sum by(reason) (increase(gpu_hpc_dropped_series_total{{{NODES}}}[$__rate_interval]))"
        ),
    }
    return timeseries(
        "Incidents",
        "What went wrong, of all chosen nodes together: the helper process ended unasked, PM sampling lost windows or "
        "counters, driver calls failed, readings could not be true, series were left out.",
        "short",
        *(query(expr, legend) for legend, expr in kinds.items()),
        decimals=0,
    )


def _last_window() -> Json:
    return timeseries(
        "Age of the newest window",
        "How long before the scrape the newest sampling window ended, the worst GPU of each source.",
        "s",
        query(
            f"clamp_min(max by(instance,source) (timestamp(gpu_hpc_last_window_timestamp_seconds{{{NODES}}}) "
            f"- gpu_hpc_last_window_timestamp_seconds{{{NODES}}}), 0)",
            "{{instance}} {{source}}",
        ),
    )
