"""What a Prometheus makes of the exporter on this machine, by its HTTP API."""

from __future__ import annotations

import http.client
import math
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, TypeVar

import msgspec

from gpu_hpc_exporter.config import ConfigError
from gpu_hpc_exporter.doctor import remedies
from gpu_hpc_exporter.doctor.check import Check, Checks, Place
from gpu_hpc_exporter.http_client import HttpClient

T = TypeVar("T")

GROUPS: Final = (
    *("gpu-hpc-exporter-intensity", "gpu-hpc-exporter-classes", "gpu-hpc-exporter-waste", "gpu-hpc-exporter-units"),
    *("gpu-hpc-exporter-links", "gpu-hpc-exporter-readings", "gpu-hpc-exporter-health", "gpu-hpc-exporter-kernels"),
    *("gpu-hpc-exporter-owner", "gpu-hpc-exporter-down", "gpu-hpc-source", "gpu-hpc-honor-labels-missing"),
    *("gpu-hpc-series", "gpu-hpc-collector-failed", "gpu-hpc-config-reload-failed"),
    *("gpu-hpc-dram-saturated-sm-idle", "gpu-hpc-pcie-saturated", "gpu-hpc-l2-thrashing", "gpu-hpc-nvlink-saturated"),
    *("gpu-hpc-utilization-misleading", "gpu-hpc-gpu-starved", "gpu-hpc-job-gpu-underused"),
    *("gpu-hpc-idle-but-allocated", "gpu-hpc-collective-hung", "gpu-hpc-xid-critical", "gpu-hpc-ecc-uncorrectable"),
    *("gpu-hpc-ecc-corrected-storm", "gpu-hpc-row-remap", "gpu-hpc-gpu-lost", "gpu-hpc-driver-call-hung"),
    *("gpu-hpc-nvlink-degraded", "gpu-hpc-thermal-slowdown", "gpu-hpc-power-brake", "gpu-hpc-clocks-low"),
    *("gpu-hpc-pcie-link-degraded", "gpu-hpc-memory-nearly-full", "gpu-hpc-small-copy-storm"),
    *("gpu-hpc-pageable-copies", "gpu-hpc-launch-bound", "gpu-hpc-launch-queueing", "gpu-hpc-sync-storm"),
    *("gpu-hpc-kernel-jitter", "gpu-hpc-communication-exposed", "gpu-hpc-agent-paused"),
)
"""Of alert-rules/*.yml, whose test compares them."""
_TIMEOUT_S: Final = 5.0
_MAX_ANSWER: Final = 16 << 20
_MAX_SHOWN: Final = 20
_MAX_INTERVAL_S: Final = 60.0
"""Above it the rules' windows of five minutes hold too few samples."""
_MAX_SKEW_S: Final = 5.0
_PORTS: Final = {"http": 80, "https": 443}
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_DURATION: Final = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?(?:([0-9]+)ms)?")
_UNITS_S: Final = (86_400.0, 3600.0, 60.0, 1.0, 0.001)

Text = Annotated[str, msgspec.Meta(max_length=65_536)]


class _Target(msgspec.Struct, rename="camel"):
    labels: dict[str, Text]
    scrape_url: Text = ""
    health: Text = ""
    last_error: Text = ""
    scrape_interval: Text = ""


class _Targets(msgspec.Struct, rename="camel"):
    active_targets: list[_Target]


class _Rule(msgspec.Struct, rename="camel"):
    name: Text = ""
    health: Text = ""
    last_error: Text = ""


class _Group(msgspec.Struct):
    name: Text
    rules: list[_Rule] = []


class _Rules(msgspec.Struct):
    groups: list[_Group]


class _Alert(msgspec.Struct):
    labels: dict[str, Text]
    annotations: dict[str, Text] = {}
    state: Text = ""


class _Alerts(msgspec.Struct):
    alerts: list[_Alert]


class _Row(msgspec.Struct):
    metric: dict[str, Text]
    value: tuple[float, str]


class _Vector(msgspec.Struct):
    result: list[_Row]


class PrometheusError(Exception):
    """It cannot be asked; the text says why, and never with what credentials."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where Prometheus is. instance: what it calls this machine, "" to find out."""

    scheme: str
    host: str
    port: int
    prefix: str = ""
    instance: str = ""
    client: HttpClient = field(default_factory=HttpClient)

    @property
    def url(self) -> str:
        """For people."""
        place = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{place}:{self.port}{self.prefix}"

    def get(self, path: str, kind: type[T], **query: str) -> T:
        """The `data` of an answer of its API. Raises PrometheusError.

        Without redirects and proxies: whoever names a URL means it, and the credentials are for its host alone.
        """
        try:
            answer, body = self._ask(f"{self.prefix}/api/v1/{path}?{urllib.parse.urlencode(query)}")
        except (OSError, http.client.HTTPException) as error:
            raise PrometheusError(f"{self.url} cannot be asked: {error or type(error).__name__}") from error
        if answer == http.client.UNAUTHORIZED:
            raise PrometheusError(f"{self.url} asks for a user and a password: see --prometheus.http.config.file")
        if answer != http.client.OK:
            raise PrometheusError(
                f"{self.url} answers {answer} to {path}: is it a Prometheus, and the path before /api?"
            )
        if len(body) > _MAX_ANSWER:
            raise PrometheusError(f"{self.url} answers more than {_MAX_ANSWER >> 20} MiB to {path}")
        try:
            return msgspec.convert(msgspec.json.decode(body, type=dict[str, Any]).get("data"), kind, strict=False)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise PrometheusError(f"{self.url} answers {path} as no Prometheus does: {error}") from error

    def _ask(self, path: str) -> tuple[int, bytes]:
        connection = self.client.connect(self.host, self.port, _TIMEOUT_S)
        try:
            connection.request("GET", path, headers=self.client.headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_MAX_ANSWER + 1)
        finally:
            connection.close()

    def names(self) -> frozenset[str]:
        """What this machine may be called in a target: by name, and by the address that Prometheus sees."""
        if self.instance:
            return frozenset({self.instance})
        name = socket.gethostname()
        found = {name, name.partition(".")[0]} | (_LOOPBACK if self.host in _LOOPBACK else set())
        with (
            suppress(OSError),
            socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_DGRAM) as probe,
        ):
            probe.connect((self.host, self.port))  # sends nothing: the kernel chooses the way
            found.add(str(probe.getsockname()[0]))
        return frozenset(found)


def parse_server(url: str, instance: str = "", client: HttpClient | None = None) -> Server:
    """A server by its URL. Raises ConfigError, which does not repeat a URL that may hold a password."""
    if "@" in url:
        raise ConfigError(
            "--prometheus: user and password in a URL would stand in lists of processes and in logs: "
            "put them into a file for --prometheus.http.config.file"
        )
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError("--prometheus: this is no URL: expected one like http://prometheus:9090") from error
    if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"--prometheus `{url}`: expected a URL like http://prometheus:9090")
    client = client or HttpClient()
    context = (client.context or ssl.create_default_context()) if parts.scheme == "https" else None
    prefix = parts.path.rstrip("/")
    return Server(
        parts.scheme, parts.hostname, port or _PORTS[parts.scheme], prefix, instance, replace(client, context=context)
    )


def check_prometheus(place: Place, server: Server) -> Checks:
    """Target, labels, interval, rules and alerts; one line where nothing can be asked."""
    try:
        before = time.time()
        ((at, _),) = (row.value for row in server.get("query", _Vector, query="vector(1)").result)
        yield Check("Prometheus", "ok", f"{server.url} answers")
        yield _skew(at - (before + time.time()) / 2)
        yield from _targets(place, server)
        yield from _rules(server.get("rules", _Rules).groups)
    except PrometheusError as error:
        yield Check("Prometheus", "broken", str(error), "see --prometheus")
    except ValueError:
        yield Check("Prometheus", "broken", f"{server.url} answers as no Prometheus does", "see --prometheus")


def _skew(seconds: float) -> Check:
    if abs(seconds) <= _MAX_SKEW_S:
        return Check("its clock", "ok", "agrees with this machine's")
    if not math.isfinite(seconds):
        return Check("its clock", "degraded", "it tells no time", "see --prometheus: is it a Prometheus?")
    finding = f"it is {abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} this machine's"
    return Check("its clock", "degraded", finding, "set both by NTP (`timedatectl`)")


def _targets(place: Place, server: Server) -> Checks:
    """Which target is this machine's exporter, and how it is scraped."""
    names = server.names()
    ports = {port for _, port in place.addresses}
    targets = server.get("targets", _Targets, state="active").active_targets
    ours = [target for target in targets if _is_ours(target, names, ports)]
    if not ours:
        known = f"{len(targets)} targets, none is {' or '.join(sorted(names))} with port {_list(map(str, ports))}"
        yield Check("target", "broken", known, f"{remedies.SCRAPE}; --instance says what it is called there")
        return
    for target in ours:
        instance, job = target.labels.get("instance", ""), target.labels.get("job", "")
        if target.health == "up":
            yield Check("target", "ok", f"{instance} of the scrape job {job} is up")
        else:
            cure = "see the error: the exporter's process, a firewall, TLS or a password of the scrape job"
            yield Check("target", "broken", f"{instance} of {job} is {target.health}: {target.last_error}", cure)
        yield _honor_labels(server, instance, job)
        yield _interval(target, place.config.gauge_window_seconds)
    yield from _alerts(server.get("alerts", _Alerts).alerts, {one.labels.get("instance", "") for one in ours})


def _is_ours(target: _Target, names: frozenset[str], ports: Collection[int]) -> bool:
    with suppress(ValueError):
        url = urllib.parse.urlsplit(target.scrape_url)
        if url.port not in ports and target.labels.get("instance") not in names:
            return False
        instance = target.labels.get("instance", "").rpartition(":")[0] or target.labels.get("instance", "")
        return not names.isdisjoint({url.hostname or "", instance, target.labels.get("instance", "")})
    return False


def _honor_labels(server: Server, instance: str, job: str) -> Check:
    query = f'gpu_hpc_honor_labels_check{{instance="{_escaped(instance)}",exported_job!=""}}'
    if server.get("query", _Vector, query=query).result:
        return Check(
            "honor_labels",
            "degraded",
            f"the scrape job {job} lacks it: it stands where jobs should",
            remedies.HONOR_LABELS,
        )
    return Check("honor_labels", "ok", "jobs keep their names")


def _interval(target: _Target, window_s: float) -> Check:
    seconds = _seconds(target.scrape_interval)
    finding = f"every {target.scrape_interval}, gauges are means over {window_s:g} s"
    if seconds > _MAX_INTERVAL_S:
        return Check(
            "scrape interval", "degraded", finding, "at most 60 s: the rules look at five minutes; 15s is best"
        )
    if seconds > window_s:
        cure = f"gauge_window_seconds: {seconds:g} or more: gauges miss what is between two scrapes (counters do not)"
        return Check("scrape interval", "degraded", finding, cure)
    return Check("scrape interval", "ok", finding)


def _seconds(duration: str) -> float:
    """Prometheus's `1m30s`; 0 where it is none."""
    match = _DURATION.fullmatch(duration)
    return sum(float(part or 0) * unit for part, unit in zip(match.groups(), _UNITS_S, strict=True)) if match else 0.0


def _rules(groups: Sequence[_Group]) -> Checks:
    loaded = {group.name for group in groups}
    missing = [name for name in GROUPS if name not in loaded]
    if missing:
        finding = f"{len(missing)} of {len(GROUPS)} groups are missing: {_list(missing)}"
        yield Check("rules", "degraded", finding, remedies.RULES)
    else:
        yield Check("rules", "ok", f"all {len(GROUPS)} groups are loaded")
    sick: Mapping[str, str] = {
        rule.name: rule.last_error
        for group in groups
        if group.name in GROUPS
        for rule in group.rules
        if rule.health == "err"
    }
    for name, error in list(sick.items())[:_MAX_SHOWN]:
        yield Check("rules", "degraded", f"{name} fails: {error}", "copy the rule files anew, all of one release")


def _alerts(alerts: Sequence[_Alert], instances: Collection[str]) -> Checks:
    """Our own that fire, of this machine or of none."""
    firing = [
        alert
        for alert in alerts
        if alert.state == "firing"
        and alert.labels.get("alertname", "").startswith("GpuHpc")
        and alert.labels.get("instance", "") in {"", *instances}
    ]
    for alert in firing[:_MAX_SHOWN]:
        name = alert.labels["alertname"]
        cure = alert.annotations.get("runbook_url") or f"alert-rules/runbooks/{name}.md"
        yield Check("alert", "degraded", f"{name} fires: {alert.annotations.get('summary', '')}", f"see {cure}")
    if not firing:
        yield Check("alerts", "ok", "none of this machine fires")


def _list(names: Collection[str] | Any) -> str:
    shown = list(names)
    more = f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    return ", ".join(shown[:_MAX_SHOWN]) + more


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
