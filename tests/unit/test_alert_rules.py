"""Prometheus's own tool takes the rules and runs their tests, and every alert has tests, texts and a runbook.

Convention for alerts (any file in alert-rules/, alert-rules/examples/ and alert-rules/compat/):

- The name starts with GpuHpc. `for` is 3m or more; FIRST_OCCURRENCE below lists the exceptions with their reasons.
- Labels: severity. Annotations: summary, description, runbook_url, dashboard_url. The runbook is
  alert-rules/runbooks/<alert>.md with the sections Meaning, Impact, Diagnosis and Mitigation, all filled.
- An expression reads recorded series, or raw ones over a range of 5 minutes or more. INSTANT below lists the raw series
  that may be read as they are now, with the reasons. The owner is read over a range as well, or a missed
  scrape takes the alert away together with its owner:

      * on(instance,gpu,uuid) group_left(job,namespace,kind)
      (topk by(instance,gpu,uuid) (1, count_over_time(gpu:owner:info[5m])) > bool 0)

  A fault of the hardware that lasts has no owner in its labels, or it would be another alert for each job; its summary
  asks for him.

Convention for their tests (promtool files in alert-rules/tests/; each alert-rules/x.yml has a tests/x.yml, and more may
stand beside it). Each alert has tests whose names begin with the alert's name, a colon and one of four kinds, and that
assert what the kind says in `alert_rule_test` entries with that alertname:

- "GpuHpcX: fires": at least one entry with alerts, with their whole labels and annotations.
- "GpuHpcX: quiet when healthy": none has alerts, and one is asked for at `for` + 5 minutes or later.
- "GpuHpcX: quiet without data": none has alerts; a series among the input ends with `stale`.
- "GpuHpcX: resolves": an entry with alerts, and a later one without.

Words may follow after a comma ("GpuHpcX: fires, for a service as info"); then all tests of that kind must hold to it.
Other tests may have any other unique name; one that begins with "GpuHpcX: " must assert GpuHpcX. A missed scrape is
written `stale`, not `_`. `group_eval_order` lists a group of recorded series and then all groups of alerts: promtool
takes those that are not listed together with the first, in any order.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

RULES = Path(__file__).parents[2] / "alert-rules"
RULE_FILES = sorted([*RULES.glob("*.yml"), *RULES.glob("examples/*.yml"), *RULES.glob("compat/*.yml")])
TESTS = sorted((RULES / "tests").glob("*.yml"))

MINIMAL_FOR: Final = 180
FIRST_OCCURRENCE: Final = {
    "GpuHpcXidCritical": "an event: waiting changes nothing, and the GPU's jobs are lost",
    "GpuHpcEccUncorrectable": "an event: the data are wrong already",
    "GpuHpcRowRemapPending": "a state that only a reset ends",
    "GpuHpcGpuLost": "the exporter itself has tried for long enough",
}
"""Alerts that may have a shorter `for`, and why."""

INSTANT: Final = {
    "gpu_hpc_gpu_info": "whose a GPU is, is a state of now",
    "gpu_hpc_job_info": "as above",
    "gpu_hpc_honor_labels_check": "a constant: only the labels that Prometheus gave it count",
}
"""Raw series that rules may read as they are now, and why. All others need a range: a missed scrape resets `for`."""

SERIES_RECORDED: Final = r"\b[a-z]+:[a-z]\w*:[a-z]\w*"
KINDS: Final = ("fires", "quiet when healthy", "quiet without data", "resolves")
SECTIONS: Final = ("Meaning", "Impact", "Diagnosis", "Mitigation")
DASHBOARDS: Final = ("gpu-hpc-bottleneck", "gpu-hpc-fleet", "gpu-hpc-job", "gpu-hpc-kernels", "gpu-hpc-exporter")
RUNBOOK_BASE: Final = '{{ or $externalLabels.runbook_base "alert-rules/runbooks" }}'
DASHBOARD_BASE: Final = '{{ or $externalLabels.dashboard_base "http://localhost:3000" }}'

FUNCTIONS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        sum min max avg group stddev stdvar count count_values bottomk topk quantile
        abs absent absent_over_time ceil changes clamp clamp_max clamp_min day_of_month day_of_week day_of_year
        days_in_month delta deriv exp floor histogram_quantile hour idelta increase irate label_join label_replace ln
        log10 log2 minute month predict_linear rate resets round scalar sgn sort sort_desc sqrt time timestamp vector
        year avg_over_time min_over_time max_over_time sum_over_time count_over_time quantile_over_time stddev_over_time
        stdvar_over_time last_over_time present_over_time
        """,
    )
)
"""Aggregations and functions that Prometheus 2.42 and 3.x both have, with the same meaning."""
KEYWORDS: Final = frozenset(
    ("by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset")
)
OF_COUNTERS: Final = frozenset(
    # count_over_time: for how much of the time there was one
    (
        "rate",
        "increase",
        "resets",
        "changes",
        "irate",
        "last_over_time",
        "min_over_time",
        "max_over_time",
        "count_over_time",
    )
)

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Alert:
    """An alerting rule with the file that holds it."""

    file: Path
    rule: Json

    @property
    def name(self) -> str:
        return str(self.rule["alert"])

    @property
    def wait(self) -> int:
        """Seconds of `for`."""
        return seconds(self.rule.get("for", "0s"))


def promtool(*arguments: str | Path) -> None:
    """Run promtool, whose output is the failure."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def load(file: Path) -> Any:
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def rules(file: Path) -> list[Json]:
    return [rule for group in load(file)["groups"] for rule in group["rules"]]


ALERTS = [Alert(file, rule) for file in RULE_FILES for rule in rules(file) if "alert" in rule]
EXPRESSIONS = [(file, rule) for file in RULE_FILES for rule in rules(file)]
CASES = [test for file in TESTS for test in load(file)["tests"]]
every_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
every_expression = pytest.mark.parametrize(
    "rule", [rule for _, rule in EXPRESSIONS], ids=lambda rule: rule.get("alert") or rule["record"]
)


def seconds(duration: str) -> int:
    """Of a duration of Prometheus, such as 1h30m."""
    units = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    return sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([smhd])", str(duration)))


def bare(expression: str) -> str:
    """An expression without strings and comments."""
    return re.sub(r"\"[^\"]*\"|'[^']*'", '""', re.sub(r"#.*", "", expression))


def kind_of(test: Json, alert: Alert) -> str | None:
    """Which of the four kinds a test is of for this alert."""
    title = str(test["name"]).removeprefix(f"{alert.name}: ")
    return title.split(",")[0] if title != test["name"] else None


def asserted(test: Json, alert: Alert) -> list[tuple[int, list[Json]]]:
    """What a test expects of this alert: (second, alerts), in order of time."""
    entries = [entry for entry in test.get("alert_rule_test", []) if entry["alertname"] == alert.name]
    return sorted(((seconds(entry["eval_time"]), entry["exp_alerts"] or []) for entry in entries), key=lambda e: e[0])


def cases_of(alert: Alert, kind: str) -> Iterator[tuple[Json, list[tuple[int, list[Json]]]]]:
    found = [test for test in CASES if kind_of(test, alert) == kind]
    assert found, f'no test is named "{alert.name}: {kind}"'
    for test in found:
        entries = asserted(test, alert)
        assert entries, f"{test['name']!r} asserts nothing of {alert.name}"
        assert test["input_series"]
        yield test, entries


@pytest.mark.parametrize("file", RULE_FILES, ids=lambda path: path.name)
def test_rules_are_valid(file: Path) -> None:
    """Each file of rules is one that Prometheus loads without a warning, and has a file of tests."""
    promtool("check", "rules", "--lint=all", "--lint-fatal", file)
    assert (RULES / "tests" / file.name).exists()


@pytest.mark.parametrize("file", TESTS, ids=lambda path: path.name)
def test_rules_do_what_their_tests_say(file: Path) -> None:
    """`promtool test rules`."""
    promtool("test", "rules", file)


@pytest.mark.parametrize("file", TESTS, ids=lambda path: path.name)
def test_promtool_evaluates_in_one_order(file: Path) -> None:
    """Groups of alerts come after what they read."""
    used = [load((file.parent / name).resolve()) for name in load(file)["rule_files"]]
    with_alerts = {group["name"] for part in used for group in part["groups"] if "alert" in group["rules"][0]}
    order = load(file).get("group_eval_order", [])
    assert with_alerts <= set(order[1:]), "promtool takes groups that are not listed together with the first"


def test_names_are_unique() -> None:
    names = [test["name"] for file in TESTS for test in load(file)["tests"] if test["name"].startswith("GpuHpc")]
    assert len(names) == len(set(names))
    alerts = [alert.name for alert in ALERTS]
    assert len(alerts) == len(set(alerts))
    groups = [group["name"] for file in RULE_FILES for group in load(file)["groups"]]
    assert len(groups) == len(set(groups))


def test_tests_are_about_alerts_that_exist() -> None:
    """A misspelt alert in a test would be quiet for ever."""
    known = {alert.name for alert in ALERTS}
    for test in CASES:
        about = {entry["alertname"] for entry in test.get("alert_rule_test", [])}
        assert about <= known, test["name"]
        if (prefix := test["name"].split(":")[0]).startswith("GpuHpc"):
            assert prefix in about, test["name"]


@every_alert
def test_alert_fires(alert: Alert) -> None:
    for test, entries in cases_of(alert, "fires"):
        expected = [one for _, alerts in entries for one in alerts]
        assert expected, test["name"]
        for one in expected:
            assert one["exp_labels"].keys() >= {"severity"}
            assert one["exp_annotations"].keys() >= {"summary", "description", "runbook_url", "dashboard_url"}


@every_alert
def test_alert_is_quiet_when_healthy(alert: Alert) -> None:
    for test, entries in cases_of(alert, "quiet when healthy"):
        assert all(not alerts for _, alerts in entries), test["name"]
        assert entries[-1][0] >= alert.wait + 300, f"{test['name']}: too early for the alert to fire at all"


@every_alert
def test_alert_is_quiet_without_data(alert: Alert) -> None:
    for test, entries in cases_of(alert, "quiet without data"):
        assert all(not alerts for _, alerts in entries), test["name"]
        assert any("stale" in str(series["values"]).split() for series in test["input_series"]), test["name"]


@every_alert
def test_alert_resolves(alert: Alert) -> None:
    for test, entries in cases_of(alert, "resolves"):
        pairs = pairwise(alerts for _, alerts in entries)
        assert any(before and not after for before, after in pairs), test["name"]


@every_alert
def test_alert_says_what_is_wrong_and_what_to_do(alert: Alert) -> None:
    rule, name = alert.rule, alert.name
    notes = {key: re.sub(r"\s+}}", " }}", text) for key, text in rule["annotations"].items()}
    assert re.fullmatch(r"GpuHpc[A-Z]\w+", name)
    assert set(re.findall(r"critical|warning|info", rule["labels"]["severity"]))
    assert alert.wait >= MINIMAL_FOR or name in FIRST_OCCURRENCE
    assert notes.keys() == {"summary", "description", "runbook_url", "dashboard_url"}
    assert all(text.strip() for text in notes.values())
    assert notes["runbook_url"] == f"{RUNBOOK_BASE}/{name}.md"
    assert notes["dashboard_url"].startswith(tuple(f"{DASHBOARD_BASE}/d/{uid}" for uid in DASHBOARDS))
    for value in re.findall(r"=({{.*?}})", notes["dashboard_url"]):
        assert "urlquery" in value, "what is put into a URL must be escaped"
    whose = r"gpu:(?:owner|job):info(?!({[^}]*})?\[)"
    assert not re.search(whose, rule["expr"]), "a missed scrape takes the owner away"


@every_alert
def test_alert_names_the_mig_instance(alert: Alert) -> None:
    """Instances of a GPU have its index: only their UUIDs tell them apart. The board's own faults are the GPU's."""
    summary = alert.rule["annotations"]["summary"]
    if "$labels.gpu" in summary and (alert.file.stem != "hardware" or alert.name == "GpuHpcMemoryNearlyFull"):
        assert '{{ if match "^MIG-" $labels.uuid }} {{ $labels.uuid }}{{ end }}' in summary


@every_alert
def test_alert_opens_a_dashboard_with_variables_that_it_has(alert: Alert) -> None:
    """Grafana drops others without a word."""
    uid, _, chosen = alert.rule["annotations"]["dashboard_url"].rpartition("/d/")[2].partition("?")
    board = json.loads((RULES.parent / "dashboards" / f"{uid}.json").read_text(encoding="utf-8"))
    known = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"var-(\w+)=", chosen)) <= known
    assert (uid == "gpu-hpc-kernels") == ("var-job=" in chosen and alert.file.stem == "kernels")


@every_alert
def test_alert_has_a_runbook(alert: Alert) -> None:
    text = (RULES / "runbooks" / f"{alert.name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {alert.name}\n")
    parts = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)[1:]
    bodies = dict(zip(parts[::2], parts[1::2], strict=True))
    assert tuple(bodies) == SECTIONS
    for section, body in bodies.items():
        assert len(body.strip()) >= 40, f"{section} is not filled"


def test_runbooks_have_alerts() -> None:
    assert {path.stem for path in (RULES / "runbooks").glob("*.md")} <= {alert.name for alert in ALERTS}


@every_expression
def test_functions_exist_in_every_supported_prometheus(rule: Json) -> None:
    called = set(re.findall(r"([A-Za-z_]\w*)\s*\(", bare(rule["expr"])))
    assert called - KEYWORDS <= FUNCTIONS
    # Modifiers that 2.42 lacks, or has behind a flag.
    assert not re.search(r"@|\batan2\b|\blimitk\b|\bfill", bare(rule["expr"]))


@every_expression
def test_ranges_bridge_a_missed_scrape(rule: Json) -> None:
    """N05, N08: raw series are read over 5 minutes or more, counters by functions that make sense of them."""
    expression = re.sub(r"{[^}]*}", "", bare(rule["expr"]))
    read = re.findall(r"(?:(\w+)\s*\(\s*)?\b(gpu_hpc_\w+)\s*(?:\[(\w+)[^]]*\])?", expression)
    for function, series, window in read:
        if not window:
            assert series in INSTANT, f"{series} is read as it is now"
            continue
        assert seconds(window) >= 300, f"{series}[{window}]"
        if series.endswith(("_total", "_sum", "_count")):
            assert function in OF_COUNTERS, f"{function}({series})"


@every_expression
def test_denominators_are_guarded(rule: Json) -> None:
    """O05: a 0 below the line would make infinity, which is above every threshold."""
    _, *denominators = bare(rule["expr"]).split("/")
    assert all("> 0)" in below or re.match(r"\s*(0\.0*)?[1-9]", below) for below in denominators)


@pytest.mark.parametrize("file", RULE_FILES, ids=lambda path: path.name)
def test_recorded_series_read_raw_series_alone(file: Path) -> None:
    """One level: `promtool tsdb create-blocks-from rules` cannot see what other rules record."""
    for rule in rules(file):
        if "record" in rule:
            assert re.fullmatch(SERIES_RECORDED, rule["record"])
            assert ":" not in re.sub(r"\[[^]]*\]", "", bare(rule["expr"])), rule["record"]


def scraped(minutes: int, scrape_s: int, first: float, grows: float = 0, *, missed: str = "stale") -> str:
    """What each scrape of a series found that grows by so much a second; of every fifth one there is nothing."""
    values = (first + grows * second for second in range(0, 60 * minutes, scrape_s))
    return " ".join(missed if number % 5 == 4 else f"{value:g}" for number, value in enumerate(values))


@pytest.mark.parametrize("scrape_s", [15, 30, 60])
def test_n05_every_fifth_scrape_fails(scrape_s: int, tmp_path: Path) -> None:
    """N05, N04: at any interval of scrapes a healthy node and one without GPUs are quiet; what is sick stays told."""
    minutes = 40
    sick = {"n2": "driver", "n3": "heat", "n4": "lost"}
    series: dict[str, str] = {}
    for node in ("n0", "n1", *sick):
        ill, host = sick.get(node, ""), f'{{instance="{node}"'
        target = f'{host},job="nodes"'
        gpu = f'{target},gpu="0",uuid="GPU-{node}"'
        constant = {
            f'gpu_hpc_exporter_build_info{target},version="0.1.0",revision="",python="3.11.2"}}': 1,
            f"gpu_hpc_up{target}}}": int(node != "n0" and ill != "driver"),
            f'gpu_hpc_honor_labels_check{host},job="check"}}': 1,
            f'gpu_hpc_gpus{target},state="expected"}}': 0 if node == "n0" else 2,
        }
        if node == "n0" or ill == "driver":
            reason = "library_not_found" if node == "n0" else "driver_not_loaded"
            constant[f'gpu_hpc_down_info{target},reason="{reason}"}}'] = 1
        else:
            constant[f'gpu_hpc_gpus{target},state="visible"}}'] = 1 if ill == "lost" else 2
            bus = '00000000:17:00.0",mig_mode="disabled",parent_uuid="'
            constant[f'gpu_hpc_gpu_info{gpu},name="NVIDIA H200",index="0",pci_bus_id="{bus}"}}'] = 1
            constant[f'gpu_hpc_temperature_celsius{gpu},sensor="gpu"}}'] = 86
            constant[f"gpu_hpc_temperature_slowdown_celsius{gpu}}}"] = 87
            constant[f'gpu_hpc_xid_errors_total{gpu},xid="79"}}'] = 0
            constant[f'gpu_hpc_ecc_errors_total{gpu},severity="uncorrected",scope="volatile"}}'] = 0
        if ill == "lost":
            other = f'{target},gpu="1",uuid="GPU-other",pci_bus_id="00000000:99:00.0"}}'
            constant[f"gpu_hpc_gpu_lost{other}"] = 1
        series |= {name: scraped(minutes, scrape_s, value) for name, value in constant.items()}
        series[f"up{target}}}"] = scraped(minutes, scrape_s, 1, missed="0")
        if node != "n0" and ill != "driver":
            name = f'gpu_hpc_clock_event_seconds_total{gpu},reason="sw_thermal_slowdown"}}'
            series[name] = scraped(minutes, scrape_s, 0, 0.5 if ill == "heat" else 0)
    expected = [
        ("GpuHpcExporterDown", "n2"),
        ("GpuHpcGpuLost", "n4"),
        ("GpuHpcThermalSlowdown", "n3"),
    ]
    firing = {
        "expr": 'count by(alertname, instance) (ALERTS{alertstate="firing"})',
        "exp_samples": [{"labels": f'{{alertname="{name}",instance="{node}"}}', "value": 1} for name, node in expected],
    }
    wholes = [load(RULES / "tests" / name) for name in ("exporter.yml", "hardware.yml")]
    file = tmp_path / "missed.yml"
    tests = {
        "name": f"every fifth scrape fails, {scrape_s} s",
        "interval": f"{scrape_s}s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{**firing, "eval_time": f"{minute}m"} for minute in range(15, minutes)],
    }
    rule_files = dict.fromkeys(str(RULES / "tests" / name) for whole in wholes for name in whole["rule_files"])
    order = list(dict.fromkeys(group for whole in wholes for group in whole["group_eval_order"]))
    whole = {"rule_files": list(rule_files), "evaluation_interval": "1m", "group_eval_order": order, "tests": [tests]}
    file.write_text(yaml.safe_dump(whole))
    promtool("test", "rules", file)


def test_fleet_dashboard_counts_missing_gpus_as_the_alert_does(tmp_path: Path) -> None:
    """Its panel says 1 where GpuHpcGpusMissing fires for a GPU that the exporter no longer expects after a restart."""
    panels = json.loads((RULES.parent / "dashboards/gpu-hpc-fleet.json").read_text(encoding="utf-8"))["panels"]
    (panel,) = [panel for panel in panels if panel["title"] == "GPUs missing"]
    (target,) = panel["targets"]
    asked = {"expr": re.sub(r"\$\w+", ".*", target["expr"]), "exp_samples": [{"labels": "{}", "value": 1}]}
    whole = load(RULES / "tests" / "memory.yml")
    (case,) = [test for test in whole["tests"] if "GpuHpcGpusMissing: " in test["name"]]
    fires = [{**asked, "eval_time": entry["eval_time"]} for entry in case["alert_rule_test"] if entry["exp_alerts"]]
    assert fires
    files = [str(RULES / "tests" / name) for name in whole["rule_files"]]
    file = tmp_path / "panel.yml"
    file.write_text(yaml.safe_dump({**whole, "rule_files": files, "tests": [{**case, "promql_expr_test": fires}]}))
    promtool("test", "rules", file)


def test_alerts_read_series_that_are_recorded() -> None:
    recorded = {rule["record"] for file in RULE_FILES for rule in rules(file) if "record" in rule}
    for alert in ALERTS:
        texts = (alert.rule["expr"], *alert.rule["annotations"].values())
        read = {name for text in texts for name in re.findall(SERIES_RECORDED, text)}
        assert read <= recorded, alert.name


def test_every_recorded_series_has_a_test_with_its_value() -> None:
    expected = {
        name
        for test in CASES
        for one in test.get("promql_expr_test", [])
        if one["exp_samples"]
        for name in re.findall(SERIES_RECORDED, one["expr"])
    }
    assert {rule["record"] for rule in rules(RULES / "recording.yml")} <= expected


def test_series_of_dcgm_are_series_of_the_exporter_with_their_own_test() -> None:
    """They mean the same to whoever reads them, and say whose they are."""
    of_dcgm = rules(RULES / "compat" / "dcgm.yml")
    ours = {rule["record"] for name in ("owner.yml", "recording.yml") for rule in rules(RULES / name)}
    assert {rule["record"] for rule in of_dcgm} <= ours
    assert {rule["labels"]["source"] for rule in of_dcgm} == {"dcgm"}
    tested = {
        name
        for test in load(RULES / "tests" / "dcgm-values.yml")["tests"]
        for one in test["promql_expr_test"]
        if one["exp_samples"]
        for name in re.findall(SERIES_RECORDED, one["expr"])
    }
    assert {rule["record"] for rule in of_dcgm} == tested


def test_series_of_dcgm_are_named_alike() -> None:
    """Whatever reads a series of DCGM's names node and GPU by the same functions, or only asks for the GPU's uuid."""
    uuid = '"uuid", "", "uuid", "UUID", "gpu_uuid")'
    node = ', "node", ";", "Hostname", "hostname", "instance"),\n"node", "$1", "node", ";*([^;]+?)(:[0-9]+)?(;.*)?"))'
    whole = re.escape(uuid + node + ', "instance", "$1", "node", "(.+)"))')
    for rule in rules(RULES / "compat" / "dcgm.yml"):
        expression = re.sub(r"\n\s*", "\n", rule["expr"])
        assert expression.count("label_join(label_join(") == len(re.findall(whole, expression)) >= 1, rule["record"]
        named = rf"label_join\(label_join\(.*?{whole}|label_join\(.*?{re.escape(uuid)}"
        assert "DCGM_" not in re.sub(named, "", expression, flags=re.DOTALL), rule["record"]
