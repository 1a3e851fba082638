"""Runs a real Prometheus server on a configuration of the test's own and asks it PromQL."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exporter_process import Labels, free_port

Vector = Mapping[Labels, float]
Matrix = Mapping[Labels, list[tuple[float, float]]]


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus server. Results are keyed by label sets, `__name__` included."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def api(self, path: str, **parameters: str | float) -> Any:
        """The `data` of an answer of `/api/v1/PATH`; an error of Prometheus fails with its text."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def query(self, promql: str) -> Vector:
        """The instant vector of an expression now."""
        data = self.api("query", query=promql)
        assert data["resultType"] == "vector", f"{promql} is a {data['resultType']}"
        return {frozenset(row["metric"].items()): float(row["value"][1]) for row in data["result"]}

    def query_range(self, promql: str, start: float, end: float, step: float) -> Matrix:
        """The values of an expression between two Unix times: (time, value) by label set."""
        data = self.api("query_range", query=promql, start=start, end=end, step=step)
        return {
            frozenset(row["metric"].items()): [(float(at), float(value)) for at, value in row["values"]]
            for row in data["result"]
        }

    def wait_for(self, promql: str, condition: Callable[[Vector], bool] = bool, timeout: float = 60.0) -> Vector:
        """Ask until `condition` holds, by default until there is a result."""
        deadline = time.monotonic() + timeout
        while not condition(result := self.query(promql)):
            assert time.monotonic() < deadline, f"{promql}: {result} after {timeout} s; log:\n{self.log.read_text()}"
            time.sleep(0.1)
        return result


@contextmanager
def run_prometheus(directory: Path, config: str) -> Iterator[Prometheus]:
    """Start Prometheus with this configuration file's text on a free port, wait until it is ready, kill it at the end.

    Files that the configuration names by a relative path are looked up in `directory`.
    """
    port = free_port()
    file, log = directory / "prometheus.yml", directory / "prometheus.log"
    file.write_text(config, encoding="utf-8")
    command = ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={directory / 'tsdb'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    server = Prometheus(process, f"http://127.0.0.1:{port}", log)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        process.kill()
        process.wait()


def _wait_until_ready(server: Prometheus, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            with urllib.request.urlopen(f"{server.url}/-/ready", timeout=10):
                return
        except OSError:  # not listening yet, or 503 while it starts
            assert server.process.poll() is None, f"Prometheus ended; log:\n{server.log.read_text()}"
            assert time.monotonic() < deadline, "Prometheus does not become ready"
            time.sleep(0.05)
