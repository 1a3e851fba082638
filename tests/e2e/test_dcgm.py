"""A real Prometheus scrapes what dcgm-exporter serves: every promise of docs/dcgm.md, and nothing told twice.

Three nodes. gpu-node-1 and gpu-node-2 have dcgm-exporter alone (tests/dcgm has what it serves), with 25 minutes behind
them in which their GPUs did the same; the third has our exporter as well, for one of its GPUs.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from bundle.dashboard_queries import View
from exporter_process import run_exporter
from history.tsdb import import_openmetrics, import_rules
from prometheus_process import Prometheus, Vector, run_prometheus

ROOT = Path(__file__).parents[2]
RULES = ROOT / "alert-rules"
COMPAT = RULES / "compat" / "dcgm.yml"
SAMPLES = ROOT / "tests" / "dcgm"
KUBERNETES, SLURM = "h200_kubernetes_4.8", "h200_slurm_renamed"
BESIDE = "gpu-node-3"
PAGE = (ROOT / "docs" / "dcgm.md").read_text(encoding="utf-8")

PATH = r"(?:alert-rules|deploy|dashboards)/[\w./*-]+\.(?:csv|yml|yaml|json)"

PAST_S = 25 * 60
NEW_S = 9 * 60
"""How long ago the errors of the sick GPU were new."""
STEP = 15
ERRORS = re.compile(r"(DCGM_FI_DEV_ECC_DBE\w+|DCGM_FI_DEV_XID\w+|DCGM_EXP_XID\w+)\{.*\} [1-9]\d*$")
TARGET = (
    'job="dcgm-exporter",instance="10.0.0.1:9400",'
    'pod="dcgm-exporter-x7k2p",namespace="gpu-operator",container="exporter"'
)
"""What Kubernetes's service discovery gives a target; without honor_labels the job's pod has to give way."""

FIRING = {
    0: {"DramSaturatedSmIdle"},
    1: {"PcieSaturated", "UtilizationMisleading"},
    2: {"NvlinkSaturated"},
    3: {"ThermalSlowdown", "XidCritical", "EccUncorrectable", "RowRemapPending"},
}
"""What must be said of each GPU of a sample, and nothing else."""
OWNERS = {
    "gpu-node-1": {"0": "bert-finetune-0", "1": "loader-0", "2": "allreduce-0", "3": ""},
    "gpu-node-2": {"0": "4710", "1": "4711", "2": "4712", "3": ""},
}


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.prom").read_text(encoding="utf-8")


def beside(uuid: str) -> str:
    """What dcgm-exporter serves on the third node, whose first GPU has this UUID."""
    text = sample(KUBERNETES).replace("11111111-0000", "33333333-0000").replace("gpu-node-1", BESIDE)
    return text.replace("GPU-33333333-0000-4000-8000-000000000000", uuid)


@contextmanager
def served(texts: Mapping[str, str]) -> Iterator[int]:
    """A server of these expositions by path; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(texts[self.path.strip("/")].encode())

        def log_message(self, *_: object) -> None:
            """One line for each scrape is too much."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def stored(name: str, now: int) -> Iterator[str]:
    """Lines of OpenMetrics: the past of a node as Prometheus stores what it scraped."""
    kubernetes = name == KUBERNETES
    target = TARGET if kubernetes else 'job="dcgm",instance="10.0.0.2:9400"'
    lines = [line for line in sample(name).splitlines() if not line.startswith("#")]
    if kubernetes:
        lines = [re.sub(r",(pod|namespace|container)=", r",exported_\1=", line) for line in lines]
    lines = [line.replace("{", f"{{{target},") for line in lines]
    for at in range(now - PAST_S, now, STEP):
        yield f"up{{{target}}} 1 {at}\n"
        yield from (f"{line} {at}\n" for line in lines if at > now - NEW_S or not ERRORS.match(line))


def config(port: int, exporter: str) -> str:
    target = {key: value for key, value in re.findall(r'(\w+)="([^"]*)"', TARGET) if key != "job"}
    relabel = [{"target_label": key, "replacement": value} for key, value in target.items()]

    def job(name: str, address: str, path: str, **more: object) -> dict[str, object]:
        return {"job_name": name, "metrics_path": path, "static_configs": [{"targets": [address]}], **more}

    address = f"127.0.0.1:{port}"
    instance = [{"target_label": "instance", "replacement": BESIDE}]
    jobs = [
        job("dcgm-exporter", address, f"/{KUBERNETES}", relabel_configs=relabel),
        job(
            "dcgm",
            address,
            f"/{SLURM}",
            relabel_configs=[{"target_label": "instance", "replacement": "10.0.0.2:9400"}],
        ),
        job("dcgm-beside", address, f"/{BESIDE}"),
        job("gpu-hpc-exporter", exporter, "/metrics", honor_labels=True, relabel_configs=instance),
    ]
    rules = [f"{RULES}/*.yml", str(COMPAT)]
    document = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "4s"},
        "rule_files": rules,
        "scrape_configs": jobs,
    }
    return yaml.safe_dump(document)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """With the past of two nodes, scraping all three, once it has recorded something of each."""
    directory = tmp_path_factory.mktemp("prometheus")
    with run_exporter(tmp_path_factory.mktemp("exporter"), "--source=replay") as exporter:
        ((labels, _),) = exporter.scrape().all("gpu_hpc_gpu_info").items()
        texts = {KUBERNETES: sample(KUBERNETES), SLURM: sample(SLURM), BESIDE: beside(dict(labels)["uuid"])}
        now = int(time.time())
        import_openmetrics(directory, (line for name in (KUBERNETES, SLURM) for line in stored(name, now)))
        import_rules(directory, now - 12 * 60, now, [COMPAT])
        with (
            served(texts) as port,
            run_prometheus(directory, config(port, exporter.url.removeprefix("http://"))) as server,
        ):
            server.wait_for('count(gpu:observed:ratio_rate5m{instance="gpu-node-3"}) == 4', timeout=60)
            server.wait_for('gpu:bottleneck_intensity:mean5m{instance="gpu-node-3",source=""}', timeout=60)
            yield server


def by_gpu(vector: Vector, label: str) -> dict[tuple[str, str], set[str]]:
    """Values of a label by node and GPU."""
    found: dict[tuple[str, str], set[str]] = {}
    for labels in map(dict, vector):
        found.setdefault((labels["instance"], labels["gpu"]), set()).add(labels.get(label, ""))
    return found


def table(heading: str) -> dict[str, str]:
    """The first two columns of the table below a heading of the page, without marks and links."""
    _, found, below = PAGE.partition(f"## {heading}\n")
    assert found, heading
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", below.split("\n## ")[0], re.MULTILINE)
    assert len(rows) > 1, heading
    return {_plain(first): _plain(second) for first, second in rows[1:]}


def _plain(cell: str) -> str:
    return re.sub(r"[`*]|\[|\]\([^)]*\)", "", cell)


def test_prometheus_takes_what_dcgm_exporter_serves(prometheus: Prometheus) -> None:
    """Every sample of every target, and every rule."""
    prometheus.wait_for("count(up == 1) == 4")  # a busy machine may miss the two seconds that a scrape may take here
    assert {target["health"] for target in prometheus.api("targets")["activeTargets"]} == {"up"}
    assert prometheus.query("scrape_samples_scraped - scrape_samples_post_metric_relabeling != 0") == {}
    groups = prometheus.api("rules")["groups"]
    assert {rule["lastError"] for group in groups for rule in group["rules"] if rule.get("lastError")} == set()
    # What was recorded of the past overlaps the past itself.
    log = prometheus.log.read_text().splitlines()
    assert [line for line in log if "Overlapping blocks" not in line] == []


@pytest.mark.parametrize("node", OWNERS)
def test_every_gpu_gets_its_alerts_and_no_other(prometheus: Prometheus, node: str) -> None:
    """Pending counts: what was there before Prometheus started does not count for `for`."""
    expected = {(node, str(gpu)): {f"GpuHpc{name}" for name in names} for gpu, names in FIRING.items()}
    asked = f'ALERTS{{instance="{node}"}}'
    found = prometheus.wait_for(asked, lambda vector: by_gpu(vector, "alertname") == expected)
    assert by_gpu(found, "alertname") == expected
    for labels in map(dict, found):
        if labels["alertname"] in {"GpuHpcDramSaturatedSmIdle", "GpuHpcPcieSaturated", "GpuHpcNvlinkSaturated"}:
            assert labels["job"] == OWNERS[node][labels["gpu"]]
    once = prometheus.query(f'ALERTS{{instance="{node}",alertname=~"GpuHpc(XidCritical|EccUncorrectable)"}}')
    assert {dict(labels)["alertstate"] for labels in once} == {"firing"}


@pytest.mark.parametrize("node", OWNERS)
def test_owners_are_the_jobs_of_dcgm_exporter(prometheus: Prometheus, node: str) -> None:
    """Of Kubernetes's pods and of a mapping directory; dcgm-exporter's own pod is nobody's job."""
    found = by_gpu(prometheus.query(f'gpu:owner:info{{instance="{node}"}}'), "job")
    assert found == {(node, gpu): {job} for gpu, job in OWNERS[node].items()}


def test_nothing_is_told_twice(prometheus: Prometheus) -> None:
    """One row for each GPU and series, also where both exporters tell of it: then ours does."""
    groups = yaml.safe_load(COMPAT.read_text(encoding="utf-8"))["groups"]
    names = "|".join({rule["record"] for group in groups for rule in group["rules"]})
    twice = f'count by(__name__,uuid,unit,pipe,direction,reason,xid) ({{__name__=~"{names}"}}) > 1'
    # At the first evaluation that knows of both, the one before is still in sight.
    prometheus.wait_for(twice, lambda vector: vector == {})
    rows = '{__name__=~"gpu:(observed:ratio_rate5m|nvml_utilization:avg5m|owner:info|clock_event:ratio_rate5m)"'
    sources = by_gpu(prometheus.query(f'{rows},instance="{BESIDE}"}}'), "source")
    assert sources == {(BESIDE, "0"): {""}, **{(BESIDE, gpu): {"dcgm"} for gpu in "123"}}
    assert by_gpu(prometheus.query(f'gpu:bottleneck_intensity:mean5m{{instance="{BESIDE}",gpu="0"}}'), "source") == {
        (BESIDE, "0"): {""}
    }


def test_alerts_are_those_of_the_page() -> None:
    """Each has its tests in both spellings, by promtool; what is not told by DCGM is not promised."""
    promised = set(table("What it tells you"))
    cases = [
        test["name"]
        for file in (RULES / "tests").glob("dcgm*.yml")
        for test in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]
    ]
    for kind in ("fires", "quiet when healthy", "quiet without data", "resolves"):
        tested = {name.removeprefix("GpuHpc").split(":")[0] for name in cases if f": {kind}" in name}
        assert tested == promised, kind
    assert set().union(*FIRING.values()) <= promised


@pytest.mark.parametrize("node", OWNERS)
@pytest.mark.parametrize(("uid", "heading"), [("gpu-hpc-bottleneck", "GPU bottleneck"), ("gpu-hpc-fleet", "Fleet")])
def test_panels_are_those_of_the_page(prometheus: Prometheus, node: str, uid: str, heading: str) -> None:
    """Every query of a dashboard is asked; the promised panels have something to show, and no other has."""
    end = int(time.time())
    view = View(prometheus, uid, end - 600, end, {"instance": [node]})
    shown = {panel["title"]: any(result.rows for result in view.results(panel, own)) for panel, own in view.panels()}
    promised = {title: answer.startswith("yes") for title, answer in table(heading).items()}
    assert {title for title, has in shown.items() if has} == {title for title, has in promised.items() if has}
    repeated = {panel["title"] for panel in view.board["panels"] if panel.get("repeat")}
    assert shown.keys() | repeated == promised.keys()


def test_heatmap_reads_what_was_measured(prometheus: Prometheus) -> None:
    """Row by row, for each GPU: the unit that it is bound by is the darkest, and what DCGM lacks has no row."""
    end = int(time.time())
    darkest = {"0": "DRAM", "1": "PCIe", "2": "NVLink", "3": "SM"}
    for gpu, unit in darkest.items():
        view = View(prometheus, "gpu-hpc-bottleneck", end - 600, end, {"instance": ["gpu-node-2"], "gpu": [gpu]})
        ((panel, own),) = [
            (panel, own) for panel, own in view.panels() if panel["title"] == "How close each unit was to its limit"
        ]
        rows = {result.target["legendFormat"]: result.rows for result in view.results(panel, own)}
        last = {name: float(found[0]["values"][-1][1]) for name, found in rows.items() if found}
        assert last.keys() == {"SM", "DRAM", "PCIe", "NVLink"}
        assert max(last, key=lambda name: last[name]) == unit, last


def test_page_names_files_that_exist_and_a_query_that_answers(prometheus: Prometheus) -> None:
    """What a reader copies from it is there; the worst unit comes first."""
    links = set(re.findall(r"\]\(([^)h][^)]*)\)", PAGE))
    code = {name for block in re.findall(r"```\n(.*?)```", PAGE, re.DOTALL) for name in re.findall(PATH, block)}
    inline = set(re.findall(rf"`({PATH})`", PAGE))
    assert links
    assert code
    assert inline
    assert [link for link in links if not (ROOT / "docs" / link.partition("#")[0]).exists()] == []
    assert [name for name in code | inline if not list(ROOT.glob(name))] == []
    (query,) = re.findall(r"^ +(sort_desc\(.+\))$", PAGE, re.MULTILINE)
    rows = prometheus.api("query", query=query)["result"]
    values = [float(row["value"][1]) for row in rows]
    assert values == sorted(values, reverse=True)
    assert {row["metric"]["unit"] for row in rows} == {"sm", "dram", "pcie", "nvlink"}


def test_counters_file_is_what_the_rules_read() -> None:
    """Every field of it is read by a rule, every rule has its field, the samples have them all, each says its price."""
    text = (RULES / "compat" / "dcgm-counters.csv").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line]
    fields = [line.split(",")[0] for line in lines if not line.startswith("#")]
    assert len(fields) == len(set(fields))
    for before, line in itertools.pairwise(lines):
        if not line.startswith("#"):
            assert re.fullmatch(r"# buys: .+; costs: .+", before), line
            assert re.fullmatch(r"DCGM_\w+, (gauge|counter), [^,\"]+", line), line
    served_fields = set(re.findall(r"^(DCGM_\w+)\{", sample(KUBERNETES), re.MULTILINE))
    assert served_fields == set(fields)
    read = COMPAT.read_text(encoding="utf-8")
    selectors = {*re.findall(r'__name__=~"([^"]+)"', read), *re.findall(r"(DCGM_\w+)\{", read)}
    of_counters = {name for name in selectors if name.endswith("_BYTES_TOTAL")}
    for field in [*fields, *re.findall(r"^(DCGM_\w+)\{", sample(SLURM), re.MULTILINE)]:
        assert any(re.fullmatch(selector, field) for selector in selectors), field
    for selector in selectors - of_counters:
        assert any(re.fullmatch(selector, field) for field in fields), selector
