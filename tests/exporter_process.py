"""Runs the real exporter as a user would and reads what it serves."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Samples:
    """Parsed samples of one exposition."""

    values: Mapping[tuple[str, Labels], float]

    def get(self, name: str, **labels: str) -> float | None:
        """The one sample of `name` whose labels include `labels`, None without one."""
        found = self.all(name, **labels)
        assert len(found) <= 1, f"{name}{labels} is ambiguous: {found}"
        return next(iter(found.values()), None)

    def one(self, name: str, **labels: str) -> float:
        value = self.get(name, **labels)
        assert value is not None, f"no sample {name}{labels}"
        return value

    def grown(self, before: Samples, name: str, **labels: str) -> float:
        """What the one sample has more than it had before."""
        return self.one(name, **labels) - before.one(name, **labels)

    def all(self, name: str, **labels: str) -> dict[Labels, float]:
        wanted = frozenset(labels.items())
        return {have: value for (n, have), value in self.values.items() if n == name and wanted <= have}


def parse(text: str) -> Samples:
    """Parse a text exposition; two samples of one series are an error, as they are for Prometheus."""
    values: dict[tuple[str, Labels], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in values, f"duplicate series {key}"
            values[key] = sample.value
    return Samples(values)


@dataclass(frozen=True)
class Exporter:
    """A running exporter. tls: how to ask it with TLS; authorization: header of every request."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    tls: ssl.SSLContext | None = None
    authorization: str = ""

    def fetch(self, path: str = "/metrics", **headers: str) -> tuple[int, Mapping[str, str], str]:
        """Status, headers and text of one answer."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.url + path, headers={**self._who(), **named})
        try:
            with urllib.request.urlopen(request, timeout=10, context=self.tls) as answer:
                return answer.status, dict(answer.headers), answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read().decode()

    def post(self, path: str) -> int:
        """Status of a POST without a body."""
        return self.ask(path)[0]

    def ask(self, path: str) -> tuple[int, str]:
        """Status and text of a POST without a body."""
        request = urllib.request.Request(self.url + path, method="POST", headers=self._who())
        try:
            with urllib.request.urlopen(request, timeout=10, context=self.tls) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def _who(self) -> dict[str, str]:
        return {"Authorization": self.authorization} if self.authorization else {}

    def scrape(self) -> Samples:
        return parse(self.fetch()[2])

    def wait_for(self, condition: Callable[[Samples], bool], timeout: float = 60.0) -> Samples:
        """Scrape until `condition` holds."""
        deadline = time.monotonic() + timeout
        while True:
            samples = self.scrape()
            if condition(samples):
                return samples
            assert time.monotonic() < deadline, f"condition not met in {timeout} s; log:\n{self.log.read_text()}"
            time.sleep(0.05)

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM; the exit status. No later than Kubernetes would kill it."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


_PORTS = range(12_000, 32_000)
"""Below those that the kernel gives to whoever connects."""
_next_port = itertools.count(os.getpid() * 12_361)
"""By the golden section, so that processes whose numbers are near each other begin far from each other."""


def free_port() -> int:
    """Nobody listens there, and this process gives it out once. Other tests, at the same time, begin elsewhere."""
    while True:
        port = _PORTS[next(_next_port) % len(_PORTS)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def run_exporter(
    directory: Path,
    *flags: str,
    env: Mapping[str, str] | None = None,
    program: Sequence[str] = ("-m", "gpu_hpc_exporter"),
    tls: ssl.SSLContext | None = None,
    authorization: str = "",
) -> Iterator[Exporter]:
    """Start the exporter on a free port, wait until it answers, and kill it in the end."""
    port = free_port()
    log = directory / f"exporter-{port}.log"
    command = [sys.executable, *program, f"--web.listen-address=127.0.0.1:{port}", *flags]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, env={**os.environ, **(env or {})}, stderr=stderr)
    exporter = Exporter(process, f"http{'s' if tls else ''}://127.0.0.1:{port}", log, tls, authorization)
    try:
        _wait_until_it_answers(exporter)
        yield exporter
    finally:
        process.kill()
        process.wait()


def _wait_until_it_answers(exporter: Exporter, timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            exporter.fetch("/-/healthy")
            return
        except (urllib.error.URLError, ConnectionError):
            ended = exporter.process.poll()
            assert ended is None, f"the exporter ended with {ended}; log:\n{exporter.log.read_text()}"
            assert time.monotonic() < deadline, "the exporter does not answer"
            time.sleep(0.02)
