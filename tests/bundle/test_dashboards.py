"""The Grafana dashboards: valid JSON of Grafana's, a lint of our own, and every query asked of a real Prometheus."""

from __future__ import annotations

import itertools
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import yaml

from bundle.conftest import History
from bundle.dashboard_pictures import TOUR_S, draw_all
from bundle.dashboard_queries import DASHBOARDS, UIDS, Choice, Json, Result, View, board, escaped
from bundle.dashboard_types import errors, install
from exporter_process import parse
from gpu_hpc_exporter.diagnosis.classify import CLASSES
from gpu_hpc_exporter.metrics import SECTIONS
from gpu_hpc_exporter.model import AGENT_STATES, CATEGORIES, COPY_KINDS, Pattern
from history.kernels import ACT_S, ACTS
from history.rules import alerts
from process_figures import cpu_seconds

pytestmark = pytest.mark.timeout(300)  # whichever test is first waits for the history
ROOT = DASHBOARDS.parent
GOLDEN = ROOT / "tests" / "golden"
SIX_HOURS = 6 * 3600

NOT_HERE = {
    "gpu_hpc_nvlink_": "the recorded GPU has no NVLink",
    'unit="nvlink"': "the recorded GPU has no NVLink",
    "gpu_hpc_c2c_": "the recorded machine is no Grace",
    "gpu_hpc_driver_errors_total": "no driver call failed",
    "gpu_hpc_rejected_readings_total": "every reading could be true",
    "gpu_hpc_processes_without_agent": "a recording has no processes to look up",
}
"""Queries without data in the recording, each in a panel that has others."""
OPENED: list[tuple[str, dict[str, Choice]]] = [
    *((uid, {}) for uid in UIDS),
    ("gpu-hpc-bottleneck", {"instance": "h200-tour"}),
    ("gpu-hpc-bottleneck", {"instance": "h200-demo", "gpu": "0"}),
    ("gpu-hpc-bottleneck", {"instance": ["h200-gemm", "h200-copy"]}),
    ("gpu-hpc-fleet", {"instance": "h200-train"}),
    ("gpu-hpc-job", {"job": "llama_pretrain"}),
    ("gpu-hpc-job", {"job": "bert_finetune", "node": ["h200-copy", "h200-shared"]}),
    ("gpu-hpc-kernels", {"instance": "h200-kernels", "gpu": "0", "job": "bert_finetune"}),
    ("gpu-hpc-exporter", {"instance": "h200-demo"}),
]
"""What persons look at: a dashboard and what they chose."""
SIDE_BY_SIDE = {"Kernel time by what kernels do", "Host time in CUDA", "Host waited for GPU"}
"""Sums over streams or threads: nothing bounds them."""
NOT_OURS = {"process_cpu_seconds_total", "process_resident_memory_bytes"}
"""Series of the Prometheus client that the exporter serves."""
CHOSEN = {"type": "prometheus", "uid": "${datasource}"}
"""The data source of every query: the variable's."""
SEVERE = {"SM": 0.85, "L2": 0.5, "DRAM": 0.9, "PCIe": 0.85, "NVLink": 0.85}
"""The project's diagnosis table."""


def panels(uid: str) -> list[Json]:
    """The panels of a dashboard as it is stored."""
    found: list[Json] = board(uid)["panels"]
    return found


def named(uid: str, title: str) -> Json:
    """The panel with this title."""
    return next(panel for panel in panels(uid) if panel["title"] == title)


EVERY_PANEL = [pytest.param(panel, id=f"{uid}-{panel['title']}") for uid in UIDS for panel in panels(uid)]


# What is committed


def test_dashboards_are_what_their_source_builds(tmp_path: Path) -> None:
    """`python -m boards` in dashboards/ writes exactly the committed files."""
    subprocess.run([sys.executable, "-m", "boards", str(tmp_path)], cwd=DASHBOARDS, check=True, timeout=60)
    built = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    committed = {file.name: file.read_text(encoding="utf-8") for file in DASHBOARDS.glob("*.json")}
    assert built == committed
    assert set(committed) == {f"{uid}.json" for uid in UIDS}


# Grafana's types


def test_grafana_types_accept_every_dashboard(tmp_path: Path) -> None:
    """Every field is one that Grafana knows, with a value that it knows."""
    install()
    sources = {uid: (DASHBOARDS / f"{uid}.json").read_text(encoding="utf-8") for uid in UIDS}
    assert errors(tmp_path, sources) == {uid: [] for uid in UIDS}


MISTAKES = [
    ('"schemaVersion"', '"schemaVersoin"'),
    ('"keepTime"', '"keeptime"'),
    ('"h": 3', '"h": "3"'),
    ('"refresh": 2', '"refresh": 3'),
    ('"uid": "${datasource}"', '"uid": "prom"'),
    ('"legendFormat"', '"legend"'),
    ('"format": "heatmap"', '"format": "heat"'),
    ('"type": "heatmap"', '"type": "heatmaps"'),
    ('"reduceOptions"', '"reduceOption"'),
    ('"mergeValues"', '"mergeValue"'),
    ('"showValue": "auto"', '"showValue": "sometimes"'),
    ('"drawStyle": "line"', '"drawStyle": "lines"'),
    ('"fillOpacity": 10', '"fillOpactiy": 10'),
    ('"unit": "watt"', '"units": "watt"'),
    ('"id": "thresholds"', '"id": "threshold"'),
    ('"id": "custom.lineStyle"', '"id": "custom.linestyle"'),
    ('"mode": "fixed"', '"mode": "fix"'),
    ('"repeat": "unit"', '"repeats": "unit"'),
]


def test_grafana_types_refuse_misspelt_fields_and_wrong_values(tmp_path: Path) -> None:
    """Each mistake anywhere in a dashboard is an error of the compiler."""
    install()
    good = (DASHBOARDS / "gpu-hpc-bottleneck.json").read_text(encoding="utf-8")
    assert all(right in good for right, _ in MISTAKES)
    sources = {f"mistake-{number}": good.replace(*mistake, 1) for number, mistake in enumerate(MISTAKES)}
    accepted = [name for name, found in errors(tmp_path, sources).items() if not found]
    assert accepted == []


# A lint of our own


@pytest.mark.parametrize("uid", UIDS)
def test_dashboard_works_by_import_and_by_provisioning(uid: str) -> None:
    """O01: a fixed uid, no id, no import-time inputs, and a data source that the person chooses."""
    dashboard = board(uid)
    assert dashboard["uid"] == uid
    assert not {"id", "__inputs", "__requires", "__elements"} & set(dashboard)
    first = dashboard["templating"]["list"][0]
    assert (first["type"], first["query"], first["name"]) == ("datasource", "prometheus", "datasource")
    assert not re.search(r"\$\{?DS_", json.dumps(dashboard))
    asked = [*panels(uid), *dashboard["templating"]["list"][1:], *dashboard["annotations"]["list"]]
    without = {"row", "text", "custom", "constant", "interval", "textbox"}
    for one in (one for one in asked if one.get("type") not in without):
        assert one["datasource"] == CHOSEN, one.get("title") or one.get("name")
    found = list(values_of(dashboard, "datasource"))
    assert all(one == CHOSEN for one in found), found


def values_of(part: object, key: str) -> Iterator[object]:
    """All that stands under a key, however deep."""
    if isinstance(part, dict):
        yield from ([part[key]] if key in part else [])
    for one in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        yield from values_of(one, key)


@pytest.mark.parametrize("uid", UIDS)
def test_dashboards_link_to_each_other(uid: str) -> None:
    """By their common tag, keeping the time range and the variables."""
    dashboard = board(uid)
    assert dashboard["tags"] == ["gpu-hpc"]
    (link,) = dashboard["links"]
    assert (link["type"], link["tags"], link["keepTime"], link["includeVars"]) == (
        "dashboards",
        ["gpu-hpc"],
        True,
        True,
    )


@pytest.mark.parametrize("uid", UIDS)
def test_variables_come_from_info_metrics_and_are_looked_up_for_the_time_range(uid: str) -> None:
    """C09: info metrics are there whatever a GPU can measure; `unit` is what is measured: its panel is repeated."""
    for variable in board(uid)["templating"]["list"][1:]:
        assert variable["refresh"] == 2, variable["name"]
        query = variable["query"]["query"]
        # Where another exporter alone tells of a GPU, its recorded owner does.
        metrics = re.match(r'label_values\((?:(\w+)|\{__name__=~"([\w:|]+)")', query)
        assert metrics
        names = re.split(r"\|", metrics[1] or metrics[2])
        assert all(re.search("[_:]info$", name) for name in names) or variable["name"] == "unit"


@pytest.mark.parametrize("uid", UIDS)
def test_c09_a_vgpu_can_be_chosen(uid: str) -> None:
    """C09: who it is and its utilization, of all that a vGPU serves, have the series of each variable that names it."""
    page = (GOLDEN / "scenarios" / "vgpu.prom").read_text(encoding="utf-8")
    served = set(re.findall(r"^(\w+_(?:gpu_info|utilization_ratio)){", page, re.MULTILINE))
    assert served == {"gpu_hpc_gpu_info", "gpu_hpc_nvml_utilization_ratio"}
    of_gpus = {"fleet": {"instance"}, "bottleneck": {"instance", "gpu"}, "kernels": {"instance", "gpu"}}
    variables = {one["name"]: one["query"] for one in board(uid)["templating"]["list"][1:]}
    for name in of_gpus.get(uid.removeprefix("gpu-hpc-"), set()):
        assert served & set(re.findall(r"[\w:]*info\b", variables[name]["query"])), name


@pytest.mark.parametrize("uid", ["gpu-hpc-bottleneck", "gpu-hpc-kernels"])
def test_o04_heatmaps_have_their_buckets_in_order(uid: str) -> None:
    """O04: each is told the bounds as numbers, of a rate by `le` alone, without the bucket that has no end."""
    heatmaps = [panel for panel in panels(uid) if panel["type"] == "heatmap"]
    assert heatmaps
    for panel in heatmaps:
        (target,) = panel["targets"]
        assert (target["format"], target["legendFormat"]) == ("heatmap", "{{le}}")
        assert panel["options"]["calculate"] is False
        assert re.match(r"sum by\(le\) \((rate|increase)\(\w+_bucket{", target["expr"]), target["expr"]
        assert 'le!="+Inf"' in target["expr"]


def test_o04_bounds_are_numbers_in_ascending_order() -> None:
    """O04: as the exporter writes them, `+Inf` last; no scrape configuration of ours makes other histograms of them."""
    rows: dict[tuple[str, frozenset[tuple[str, str]]], list[float]] = {}
    page = next(GOLDEN.glob("*__train.prom")).read_text(encoding="utf-8")
    for name, labels in parse(page).values:
        if name.endswith("_bucket"):
            whose = frozenset(label for label in labels if label[0] != "le")
            rows.setdefault((name, whose), []).append(float(dict(labels)["le"]))
    assert rows
    assert all(bounds == sorted({*bounds, float("inf")}) for bounds in rows.values())
    for file in (ROOT / "deploy").rglob("*.y*ml"):
        assert not re.search("native_histograms|nhcb", file.read_text(encoding="utf-8")), file


@pytest.mark.parametrize("uid", UIDS)
def test_variables_are_matched_as_grafana_escapes_them(uid: str) -> None:
    """Those that may have several values are escaped for =~; the others are not, and take =."""
    multi = {variable["name"]: variable["multi"] for variable in board(uid)["templating"]["list"][1:]}
    queries = [target["expr"] for panel in panels(uid) for target in panel["targets"]]
    queries += [variable["query"]["query"] for variable in board(uid)["templating"]["list"][1:]]
    uses = [use for query in queries for use in re.findall(r'(=~|!~|!=|=)"\$\{?(\w+)', query)]
    assert uses
    assert {(operator, multi[name]) for operator, name in uses} <= {("=~", True), ("=", False)}
    assert sum(len(re.findall(r"\$\{?(?!_)\w", query)) for query in queries) == len(uses), "used outside of a matcher"


@pytest.mark.parametrize("panel", EVERY_PANEL)
def test_panel_says_what_it_shows(panel: Json) -> None:
    """Title, description, unit, the chosen data source in the panel and in each of its queries."""
    assert panel["title"]
    assert len(panel["description"]) >= 30
    assert panel["description"].endswith(".")
    assert panel["fieldConfig"]["defaults"]["unit"]
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    assert [panel["datasource"], *(target["datasource"] for target in panel["targets"])] == [datasource] * (
        1 + len(panel["targets"])
    )


@pytest.mark.parametrize("panel", EVERY_PANEL)
def test_rates_of_counters_fit_the_resolution(panel: Json) -> None:
    """rate() reads $__rate_interval, increase() that or the whole range; no range is a constant."""
    for target in panel["targets"]:
        ranges = re.findall(r"\b(rate|increase)\(\w+(?:\{[^}]*\})?\[([^\]]+)\]", target["expr"])
        assert len(ranges) == len(re.findall(r"\b(?:i?rate|increase|delta)\(", target["expr"]))
        assert {span for function, span in ranges if function == "rate"} <= {"$__rate_interval"}
        assert {span for _, span in ranges} <= {"$__rate_interval", "$__range"}
        assert not re.search(r"\[\d", target["expr"])


@pytest.mark.parametrize("uid", UIDS)
def test_panels_have_ids_of_their_own_and_do_not_overlap(uid: str) -> None:
    """And they fill Grafana's 24 columns without a hole."""
    ids = [panel["id"] for panel in panels(uid)]
    assert len(ids) == len(set(ids))
    cells = list(itertools.chain.from_iterable(map(_cells, panels(uid))))
    assert len(cells) == len(set(cells))
    assert len(cells) == 24 * (1 + max(y for _, y in cells))


def _cells(panel: Json) -> Iterator[tuple[int, int]]:
    grid = panel["gridPos"]
    columns = range(grid["x"], grid["x"] + grid["w"])
    return itertools.product(columns, range(grid["y"], grid["y"] + grid["h"]))


def links(panel: Json) -> list[Json]:
    """The data links of a panel."""
    properties = [item for change in panel["fieldConfig"]["overrides"] for item in change["properties"]]
    lists = [panel["fieldConfig"]["defaults"].get("links", [])]
    lists += [item["value"] for item in properties if item["id"] == "links"]
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize("panel", EVERY_PANEL)
def test_data_links_keep_time_range_and_data_source_and_set_variables_that_exist(panel: Json) -> None:
    """Labels in them are percent-encoded: a job's name may be anything."""
    for link in links(panel):
        match = re.fullmatch(r"/d/([\w-]+)\?\$\{__url_time_range\}&var-datasource=\$\{datasource\}&(.*)", link["url"])
        assert match, link["url"]
        known = {variable["name"] for variable in board(match[1])["templating"]["list"]}
        for part in match[2].split("&"):
            name, _, value = part.partition("=")
            assert name.removeprefix("var-") in known
            assert re.fullmatch(r"\$\{__(data\.fields|field\.labels)\.\w+:percentencode\}", value)


def test_data_links_lead_from_the_fleet_to_a_gpu_to_a_job() -> None:
    """From the job back to each of its GPUs, and from all three to the kernels."""
    way = {(uid, link["url"].split("?")[0]) for uid in UIDS for panel in panels(uid) for link in links(panel)}
    assert way == {
        ("gpu-hpc-fleet", "/d/gpu-hpc-bottleneck"),
        ("gpu-hpc-fleet", "/d/gpu-hpc-job"),
        ("gpu-hpc-fleet", "/d/gpu-hpc-exporter"),
        ("gpu-hpc-bottleneck", "/d/gpu-hpc-job"),
        ("gpu-hpc-job", "/d/gpu-hpc-bottleneck"),
        ("gpu-hpc-fleet", "/d/gpu-hpc-kernels"),
        ("gpu-hpc-bottleneck", "/d/gpu-hpc-kernels"),
        ("gpu-hpc-job", "/d/gpu-hpc-kernels"),
        ("gpu-hpc-kernels", "/d/gpu-hpc-job"),
    }


@pytest.mark.parametrize("uid", ["gpu-hpc-bottleneck", "gpu-hpc-job"])
def test_every_class_has_a_verdict_and_a_color(uid: str) -> None:
    """The classes of the exporter, no other."""
    (mapping,) = named(uid, "Verdict")["fieldConfig"]["defaults"]["mappings"]
    assert set(mapping["options"]) == set(CLASSES)
    overrides = named(uid, "Where the time went")["fieldConfig"]["overrides"]
    colors = {change["matcher"]["options"]: change["properties"][0]["value"]["fixedColor"] for change in overrides}
    assert set(colors) == set(CLASSES)
    assert len(set(colors.values())) == len(CLASSES)


@pytest.mark.parametrize("uid", ["gpu-hpc-bottleneck", "gpu-hpc-job"])
def test_severe_intensities_are_those_of_the_diagnosis(uid: str) -> None:
    """The last color of each unit begins there."""
    overrides = named(uid, "How close each unit was to its limit")["fieldConfig"]["overrides"]
    last = {change["matcher"]["options"]: change["properties"][0]["value"]["steps"][-1] for change in overrides}
    assert {unit: step["value"] for unit, step in last.items()} == SEVERE


def test_kernel_figures_turn_red_where_alerts_fire() -> None:
    """The last color of a figure begins at the threshold of the alert that asks for the same."""
    thresholds = {
        "Launch to start": ("GpuHpcLaunchQueueing", "gpu:kernel_queue_seconds:mean10m"),
        "Host waited for GPU": ("GpuHpcSyncStorm", "gpu:host_wait:rate10m"),
        "Exposed communication": ("GpuHpcCommunicationExposed", "gpu:communication_exposed:ratio_rate10m"),
    }
    exprs = {alert.name: alert.expr for alert in alerts()}
    for title, (alert, series) in thresholds.items():
        match = re.search(rf"{series} > (\S+)", exprs[alert])
        assert match, alert
        last = named("gpu-hpc-kernels", title)["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]
        assert last["value"] == float(match[1]), title


def test_kernel_dashboard_knows_every_category_pattern_and_state() -> None:
    """A color or text for each that the exporter may tell."""
    uid = "gpu-hpc-kernels"
    for title in ("Kernel time by what kernels do", "Mean length of kernels"):
        assert colors(named(uid, title)) == {*CATEGORIES, "not told apart"}
    (column,) = [
        change
        for change in named(uid, "Kernels with the most GPU time")["fieldConfig"]["overrides"]
        if change["matcher"]["options"] == "pattern"
    ]
    (mapping,) = next(item["value"] for item in column["properties"] if item["id"] == "mappings")
    assert set(mapping["options"]) == set(get_args(Pattern))
    assert colors(named(uid, "Agents of the node")) == {*AGENT_STATES, "without", "GPU processes"}
    for title in ("Bytes copied", "Copies", "Mean size of a copy"):
        assert colors(named(uid, title)) == {kind.replace("_", " ") for kind in COPY_KINDS}


def colors(panel: Json) -> set[str]:
    """Names of series with a color of their own."""
    return {change["matcher"]["options"] for change in panel["fieldConfig"]["overrides"]}


@pytest.mark.parametrize("panel", panels("gpu-hpc-kernels"), ids=lambda panel: panel["title"])
def test_kernel_panels_say_why_they_are_empty(panel: Json) -> None:
    """Most jobs have no agent: no zero, and no bare `No data` either."""
    assert len(panel["fieldConfig"]["defaults"]["noValue"]) >= (6 if panel["type"] == "stat" else 40)


def test_only_catalogue_metrics_and_recorded_series_appear() -> None:
    """A name that nobody serves or records would be an empty panel."""
    catalogue = {spec.name for specs in SECTIONS.values() for spec in specs if not spec.needs}
    histograms = {spec.name for specs in SECTIONS.values() for spec in specs if spec.kind == "histogram"}
    catalogue |= {name + part for name in histograms for part in ("_bucket", "_sum", "_count")}
    rules = [yaml.safe_load(file.read_text(encoding="utf-8")) for file in (ROOT / "alert-rules").glob("*.yml")]
    recorded = {
        rule["record"] for file in rules for group in file["groups"] for rule in group["rules"] if "record" in rule
    }
    for uid in UIDS:
        texts = [target["expr"] for panel in panels(uid) for target in panel["targets"]]
        texts += [variable["query"]["query"] for variable in board(uid)["templating"]["list"][1:]]
        used = set(itertools.chain.from_iterable(map(metrics_in, texts)))
        assert used
        assert used <= catalogue | recorded | NOT_OURS


def metrics_in(expr: str) -> set[str]:
    """Names of series in an expression: what is left without strings, ranges, label lists, functions, variables."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]', "", expr)
    bare = re.sub(r"\{[^}]*\}|\$\w+|\b(by|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    bare = re.sub(r"^label_values\((.*), \w+\)$", r"\1", bare)
    words = re.findall(r"(?<![\w:])[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", bare)
    return {word for word in words if word not in {"or", "and", "sum", "topk"}}


def test_names_are_found_in_expressions() -> None:
    """The test above sees what is there."""
    expr = 'topk by(a,b) (1, sum(rate(x_total{job="y{z}"}[$__rate_interval])) / on(c) group_left() (gpu:z:w > 0) or q)'
    assert metrics_in(expr) == {"x_total", "gpu:z:w", "q"}


def test_provisioning_names_the_folder_and_the_scrape_interval_of_the_compose_file() -> None:
    """Else Grafana finds no dashboard, or $__rate_interval holds too few scrapes."""
    (provider,) = _yaml("dashboards/provisioning/dashboards/gpu-hpc.yml")["providers"]
    (source,) = _yaml("dashboards/provisioning/datasources/prometheus.yml")["datasources"]
    compose = _yaml("docker-compose.yml")["services"]
    mounts = [mount.split(":")[:2] for mount in compose["grafana"]["volumes"]]
    assert ["./dashboards", provider["options"]["path"]] in mounts
    assert ["./dashboards/provisioning", "/etc/grafana/provisioning"] in mounts
    assert source["type"] == "prometheus"
    scraped = _yaml("deploy/compose/prometheus.yml")["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraped


def _yaml(path: str) -> Json:
    loaded: Json = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    return loaded


# Every query, asked of a real Prometheus


@pytest.fixture(
    scope="module", params=OPENED, ids=lambda opened: f"{opened[0]}-{'-'.join(map(str, opened[1].values()))}"
)
def view(request: pytest.FixtureRequest, history: History) -> View:
    """A dashboard as a person has opened it on the last four hours."""
    uid, chosen = request.param
    return View(history.prometheus, uid, history.end - TOUR_S, history.end, chosen)


def explained(result: Result) -> bool:
    """The recording cannot have data for this query."""
    return any(part in result.expr for part in NOT_HERE)


def test_variables_have_values(view: View) -> None:
    """Every variable's query finds some."""
    assert all(view.options.values())


def test_every_query_returns_data(view: View) -> None:
    """O05: also those that are not drawn as such: instant queries over time, and the others at the end of the range."""
    for panel, own in view.panels():
        results = view.results(panel, own)
        for result in results:
            assert bool(result.rows) != explained(result), f"{panel['title']}: {result.expr}"
            other = view.over_time(result.expr, 1800) if result.target["instant"] else view.at_end(result.expr)
            assert other or not result.rows or _past(result), f"{panel['title']}: {result.expr}"
        assert any(result.rows for result in results), panel["title"]


def _past(result: Result) -> bool:
    """What a query showed over time may be over at the end: L2 with nothing to do, a job that has ended."""
    return not result.target["instant"] and ("gpu_hpc_job_info" in result.expr or 'unit="l2"' in result.expr)


def test_results_have_the_labels_that_are_shown(view: View) -> None:
    """Series have the labels of their legend alone, which tells them apart; tables those of their columns."""
    for panel, own in view.panels():
        results = view.results(panel, own)
        if panel["type"] == "table":
            _check_table(panel, results)
            continue
        names = [result.name(row) for result in results for row in result.rows]
        assert len(names) == len(set(names)), f"{panel['title']}: {names}"
        for result in results:
            shown = set(re.findall(r"\{\{(\w+)\}\}", result.target["legendFormat"]))
            shown |= set(re.findall(r"\w+", panel["options"].get("reduceOptions", {}).get("fields", "")))
            for row in result.rows:
                assert set(row["metric"]) <= shown, f"{panel['title']}: {result.expr}"
                assert shown - set(row["metric"]) <= {"gpu"}, f"{panel['title']}: {result.expr}"
            if panel["type"] == "stat":
                assert len(result.rows) == 1


def _check_table(panel: Json, results: list[Result]) -> None:
    columns = {change["matcher"]["options"] for change in panel["fieldConfig"]["overrides"]}
    values = {f"Value #{result.target['refId']}" for result in results} if len(results) > 1 else {"Value"}
    labels = [label for result in results for row in result.rows for label in row["metric"]]
    hidden = set(panel["transformations"][1]["options"]["excludeByName"])
    optional = {"gpu", "job", "kind", "rank", "reason"}
    assert set(labels) | values <= columns | hidden
    assert columns - set(labels) - values <= optional
    keys = [tuple(sorted(row["metric"].items())) for row in results[0].rows]
    assert len(keys) == len(set(keys))


def test_values_are_in_their_units_range(view: View) -> None:
    """O05: shares are 0-1 (rates of readings once a second may be a little above); nothing is negative or NaN."""
    for panel, own in view.panels():
        share = panel["fieldConfig"]["defaults"]["unit"] == "percentunit" and panel["title"] not in SIDE_BY_SIDE
        for result in view.results(panel, own):
            values = [float(value) for row in result.rows for _, value in row.get("values", [row.get("value", (0, 0))])]
            assert all(0 <= value <= (1.05 if share else float("inf")) for value in values), panel["title"]


def test_shares_of_the_time_add_up(history: History) -> None:
    """The stack of each phase's hour is full, and its verdict is the phase's class."""
    expected = {
        "idle": "idle",
        "gemm": "compute_bound",
        "copy": "dram_bound",
        "h2d": "pcie_bound",
        "d2h": "pcie_bound",
        "h2d_pageable": "copy_only",
        "embedding_cpu_index": "starved",
        "embedding_gpu_index": "starved",
        "launch_bound": "starved",
        "shared": "compute_bound",
        "train": "mixed",
        "inference_graph": "starved",
    }
    assert set(expected) == set(history.phases)
    uid = "gpu-hpc-bottleneck"
    for phase, node in history.phases.items():
        view = View(history.prometheus, uid, history.end - 1800, history.end, {"instance": node.instance})
        (stack,) = view.results(named(uid, "Where the time went"), {})
        totals: dict[float, float] = {}
        for row in stack.rows:
            for at, value in row["values"]:
                totals[at] = totals.get(at, 0.0) + float(value)
        assert all(total == pytest.approx(1, abs=0.02) for total in totals.values()), phase
        (verdict,) = view.results(named(uid, "Verdict"), {})
        assert [row["metric"]["class"] for row in verdict.rows] == [expected[phase]]


def test_wasted_gpu_hours_are_those_of_the_phases(history: History) -> None:
    """An hour of a starved job is one wasted GPU-hour, an hour of matrix products none; idle without a job none."""
    uid = "gpu-hpc-fleet"
    for phase, hours in {"launch_bound": 1.0, "gemm": 0.0}.items():
        chosen: dict[str, Choice] = {"instance": history.phases[phase].instance}
        view = View(history.prometheus, uid, history.end - 3600, history.end, chosen)
        (wasted,) = view.results(named(uid, "Wasted GPU-hours"), {})
        assert [float(row["value"][1]) for row in wasted.rows] == [pytest.approx(hours, abs=0.1)]
    free = View(history.prometheus, uid, history.end - 3600, history.end, {"instance": "h200-idle"})
    (wasted,) = free.results(named(uid, "Wasted GPU-hours"), {})
    assert wasted.rows == []


KERNEL_UID = "gpu-hpc-kernels"


@pytest.mark.parametrize("number", range(len(ACTS)))
def test_kernel_figures_are_what_the_job_did(history: History, number: int) -> None:
    """Through agents' reports, /metrics, Prometheus and queries, of one act alone."""
    act = ACTS[number]
    end = history.end - (len(ACTS) - 1 - number) * ACT_S
    view = View(history.prometheus, KERNEL_UID, end - ACT_S + 60, end, {"instance": "h200-kernels"})
    told = act.seen("", looked=True)
    seconds = sum(kernel.amount.ns for kernel in act.kernels) / 1e9
    launches = sum(kernel.launches for kernel in act.kernels)
    waits = [value for name, value in told.sums.items() if name.startswith("sync_")]
    waits += [copies.api_ns for kind, copies in told.copies.items() if "pageable" in kind]
    communication, overlap = (told.sums.get(name, 0) for name in ("communication_ns", "overlap_ns"))
    exposed = communication - overlap
    expected = {
        "GPU ran": act.sums["busy_ns"],
        "It waited for the host": act.sums["idle_host_ns"],
        "Launch to start": sum(kernel.wait_us * kernel.launches for kernel in act.kernels) / launches / 1e6,
        "Host waited for GPU": sum(waits) / 1e9,
        "Exposed communication": exposed / (told.sums["compute_ns"] + exposed),
        "Launches": launches,
        "Mean kernel": seconds / sum(kernel.executions for kernel in act.kernels),
        "Jobs with an agent": 0.5,
    }
    figures = {title: view.results(named(KERNEL_UID, title), {})[0].rows for title in expected}
    found = {title: float(rows[0]["value"][1]) for title, rows in figures.items()}
    assert found == pytest.approx(expected, rel=0.01, abs=1e-9)

    odd = next(kernel for kernel in act.kernels if kernel.pattern)
    results = view.results(named(KERNEL_UID, "Kernels with the most GPU time"), {})
    rows = [next(row for row in result.rows if row["metric"]["kernel"] == odd.name) for result in results]
    *values, spread, _ = (float(row["value"][1]) for row in rows)
    wanted = [odd.amount.ns / 1e9 / seconds, odd.executions, odd.launches, odd.us / 1e6, odd.longest_us / 1e6]
    assert values == pytest.approx([*wanted, odd.wait_us / 1e6], rel=0.01)
    assert spread == pytest.approx(odd.spread, rel=0.01)
    assert rows[-1]["metric"]["pattern"] == odd.pattern


def test_a_job_without_an_agent_shows_no_zero(history: History) -> None:
    """Nothing is drawn of its kernels; that it has no agent is."""
    chosen: dict[str, Choice] = {"instance": "h200-kernels", "job": "llama_pretrain"}
    view = View(history.prometheus, KERNEL_UID, history.end - 3600, history.end, chosen)
    known = {panel["title"] for panel, own in view.panels() if any(result.rows for result in view.results(panel, own))}
    of_node = {"Agents of the node", "Why agents do not trace", "Records that agents could not use", "What agents cost"}
    assert known == {"Jobs with an agent", "Which jobs have an agent", "Libraries of the jobs", *of_node}
    (coverage,) = view.results(named(KERNEL_UID, "Jobs with an agent"), {})
    assert [row["value"][1] for row in coverage.rows] == ["0"]
    (states,) = view.results(named(KERNEL_UID, "Which jobs have an agent"), {})
    assert [{value for _, value in row["values"]} for row in states.rows] == [{"0"}]


@pytest.mark.parametrize("uid", UIDS)
def test_values_with_special_characters_are_no_query_error(uid: str, history: History) -> None:
    """A node or job whose name is full of a regular expression's characters matches nothing and breaks nothing."""
    odd = r"10.0.0.1:9836 (a|b)*+?[c]{1}^$ \d"
    chosen: dict[str, Choice] = {"instance": odd, "gpu": odd, "job": odd, "node": [odd, "x.y"]}
    view = View(history.prometheus, uid, history.end - 3600, history.end, chosen)
    for panel, own in view.panels():
        for result in view.results(panel, own):
            rows = [row for row in result.rows if float(row.get("value", (0, 0))[1]) or row.get("values")]
            assert not rows or "vector(0)" in result.expr, result.expr


def test_values_are_escaped_as_grafana_does() -> None:
    """Twice, since the regular expression is inside a string of PromQL."""
    assert escaped("h200.a:9836") == r"h200\\.a:9836"
    assert escaped("a|b") == r"a\\|b"
    assert escaped("a\\b") == r"a\\\\b"


def test_dashboard_of_a_gpu_is_fast_over_six_hours(history: History) -> None:
    """All its queries, one after the other, take Prometheus less than 2 s of a core."""
    view = View(
        history.prometheus, "gpu-hpc-bottleneck", history.end - SIX_HOURS, history.end, {"instance": "h200-demo"}
    )
    begin = cpu_seconds(history.prometheus.process.pid)
    for panel, own in view.panels():
        view.results(panel, own)
    assert 0 < cpu_seconds(history.prometheus.process.pid) - begin < 2


# Pictures


def test_every_dashboard_can_be_drawn(history: History, tmp_path: Path) -> None:
    """The documentation's pictures are as large as new ones; `scripts/draw-dashboards` renews them."""
    directory = Path(os.environ.get("DASHBOARD_PICTURES", tmp_path))
    for drawn in draw_all(history.prometheus, history.end, directory):
        assert _size(drawn) == _size(ROOT / "docs" / "img" / drawn.name)


def _size(png: Path) -> tuple[int, int]:
    """Width and height in pixels, from the header."""
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    return width, height
