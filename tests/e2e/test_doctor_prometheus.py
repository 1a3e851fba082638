"""`doctor --prometheus`: a real Prometheus, configured well and badly, and servers that are none."""

from __future__ import annotations

import base64
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from doctor_machine import DoctorMachine, Examination
from exporter_process import Exporter, run_exporter
from prometheus_process import Prometheus, run_prometheus

RULES = Path(__file__).parents[2] / "alert-rules"
WELL = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [rules/*.yml]
scrape_configs:
  - job_name: gpu-hpc
    honor_labels: true
    static_configs: [{{targets: ["{target}"]}}]
"""
BADLY = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: [rules/owner.yml, rules/own.yml]
scrape_configs:
  - job_name: gpu-hpc
    static_configs: [{{targets: ["{target}"]}}]
"""
OWN = """
groups:
  - name: gpu-hpc-source
    rules:
      - alert: GpuHpcSourceDenied
        expr: vector(1)
        labels: {instance: "INSTANCE"}
        annotations: {summary: denied here}
      - {alert: GpuHpcElsewhere, expr: "vector(1)", labels: {instance: another}}
      - {record: "gpu:sick", expr: "gpu_hpc_exporter_build_info * on() group_left() gpu_hpc_bottleneck_seconds_total"}
"""


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    """A recording is as good as a GPU to a Prometheus."""
    with run_exporter(tmp_path_factory.mktemp("exporter"), "--source=replay") as running:
        yield running


@pytest.fixture
def machine(tmp_path: Path, exporter: Exporter) -> DoctorMachine:
    """The machine on which that exporter runs."""
    made = DoctorMachine(tmp_path / "root")
    made.port = port_of(exporter)
    return made


def port_of(exporter: Exporter) -> int:
    return int(exporter.url.rpartition(":")[2])


@contextmanager
def scraping(directory: Path, config: str, target: str) -> Iterator[Prometheus]:
    """A Prometheus that has scraped the target and evaluated its rules."""
    rules = directory / "rules"
    rules.mkdir()
    for file in RULES.glob("*.yml"):
        shutil.copy(file, rules)
    (rules / "own.yml").write_text(OWN.replace("INSTANCE", target))
    if config is WELL:
        (rules / "own.yml").unlink()
    with run_prometheus(directory, config.format(target=target)) as prometheus:
        prometheus.wait_for("up")
        yield prometheus


def test_a_prometheus_that_is_configured_well(machine: DoctorMachine, exporter: Exporter, tmp_path: Path) -> None:
    """Its target is found by itself, its rules are complete and none is sick."""
    target = exporter.url.removeprefix("http://")
    with scraping(tmp_path, WELL, target) as prometheus:
        prometheus.wait_for('gpu_hpc_honor_labels_check{job!="gpu-hpc"}')
        examined = machine.examine(f"--prometheus={prometheus.url}")
    lines = [check for check in examined.told["checks"] if check["group"] == "Prometheus"]
    assert {check["status"] for check in lines} == {"ok"}, lines
    assert [check["name"] for check in lines] == [
        *("Prometheus", "its clock", "target", "honor_labels", "scrape interval", "alerts", "rules"),
    ]
    assert examined.line("target")[1] == f"{target} of the scrape job gpu-hpc is up"


def test_a_prometheus_that_is_configured_badly(machine: DoctorMachine, exporter: Exporter, tmp_path: Path) -> None:
    """No honor_labels, too seldom for the gauges, rules missing, one sick, an alert that fires."""
    machine.configure("gauge_window_seconds: 1\n")
    target = exporter.url.removeprefix("http://")
    with scraping(
        tmp_path, BADLY.replace("interval: 1s, scrape_timeout", "interval: 2s, scrape_timeout"), target
    ) as prometheus:
        prometheus.wait_for('gpu_hpc_honor_labels_check{exported_job!=""}')
        prometheus.wait_for('ALERTS{alertname="GpuHpcSourceDenied"}')
        examined = wait_for_sick_rule(machine, prometheus)
    status, finding, remedy = examined.line("honor_labels")
    assert (status, "gpu-hpc" in finding) == ("degraded", True)
    assert "`honor_labels: true`" in remedy
    status, finding, remedy = examined.line("scrape interval")
    assert (status, finding) == ("degraded", "every 2s, gauges are means over 1 s")
    assert "gauge_window_seconds: 2" in remedy
    missing, sick = examined.lines("rules")
    assert missing[0] == "degraded"
    assert "gpu-hpc-exporter-down" in missing[1]
    assert "gpu-hpc-exporter-owner" not in missing[1]
    assert sick[1].startswith("gpu:sick fails: ")
    assert examined.line("alert")[:2] == ("degraded", "GpuHpcSourceDenied fires: denied here")


def wait_for_sick_rule(machine: DoctorMachine, prometheus: Prometheus) -> Examination:
    """Until Prometheus has found that the rule fails, which takes the series of two scrapes."""
    for _ in range(10):
        examined = machine.examine(f"--prometheus={prometheus.url}")
        if len(examined.lines("rules")) == 2:
            return examined
    raise AssertionError(prometheus.api("rules"))


def test_a_target_that_is_down_and_one_that_is_not_there(machine: DoctorMachine, tmp_path: Path) -> None:
    """N04: the error is Prometheus's own; without a target there is a hint how to name it."""
    with run_exporter(tmp_path, "--source=replay") as gone:
        target = gone.url.removeprefix("http://")
        machine.port = port_of(gone)
    with scraping(tmp_path, WELL, target) as prometheus:
        prometheus.wait_for("up == 0")
        status, finding, _ = machine.examine(f"--prometheus={prometheus.url}").line("target")
        assert (status, "connection refused" in finding) == ("broken", True)
        machine.port += 1
        status, _, remedy = machine.examine(f"--prometheus={prometheus.url}").line("target")
        assert (status, "--instance" in remedy) == ("broken", True)
        assert machine.examine(f"--prometheus={prometheus.url}", f"--instance={target}").line("target")[0] == "broken"


class _Server(http.server.BaseHTTPRequestHandler):
    """Wants ann's password, and has one answer for her."""

    answer = b""
    seen: list[str]

    def do_GET(self) -> None:
        wanted = "Basic " + base64.b64encode(b"ann:s3cret").decode()
        self.seen.append(self.headers.get("Authorization", ""))
        self.send_response(200 if self.headers.get("Authorization") == wanted else 401)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def serving(answer: bytes) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and what it was told of who asks."""
    seen: list[str] = []
    handler = type("Server", (_Server,), {"answer": answer, "seen": seen})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()


@pytest.fixture
def credentials(tmp_path: Path) -> str:
    """The flag that names a file with ann's password."""
    file = tmp_path / "http.yaml"
    file.write_text("basic_auth: {username: ann, password: s3cret}\n")
    return f"--prometheus.http.config.file={file}"


def test_a_password(machine: DoctorMachine, credentials: str) -> None:
    """It comes from a file, and stands nowhere in what is printed."""
    empty = json.dumps({"status": "success", "data": {"resultType": "vector", "result": []}}).encode()
    with serving(empty) as (url, seen):
        status, finding, _ = machine.examine(f"--prometheus={url}").line("Prometheus")
        assert (status, "--prometheus.http.config.file" in finding) == ("broken", True)
        result = machine.run(f"--prometheus={url}", credentials)
        assert "answers as no Prometheus does" in result.stdout
    assert len(seen) == 2
    assert seen[0] == ""
    assert seen[1].startswith("Basic ")
    assert "s3cret" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "answer", [b"<html>", b'{"data": []}', b'{"data": {"result": [{"metric": {}, "value": [0]}]}}', b"[" * 100_000]
)
def test_a_server_that_is_no_prometheus(machine: DoctorMachine, answer: bytes, credentials: str) -> None:
    """One line, whatever it answers."""
    with serving(answer) as (url, _):
        examined = machine.examine(f"--prometheus={url}", credentials)
    status, finding, _ = examined.line("Prometheus")
    assert (status, "as no Prometheus does" in finding) == ("broken", True)


def test_nobody_there(machine: DoctorMachine) -> None:
    """It is refused."""
    examined = machine.examine("--prometheus=http://127.0.0.1:1")
    assert "Connection refused" in examined.line("Prometheus")[1]
