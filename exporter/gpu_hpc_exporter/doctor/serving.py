"""The exporter itself: its configuration, its port, and the one that runs there already."""

from __future__ import annotations

import http.client
import os
import re
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from gpu_hpc_exporter import __version__
from gpu_hpc_exporter.config import DEFAULT_FILE, Config, ConfigError, load_config
from gpu_hpc_exporter.doctor.check import Check, Checks, Place, status_of, told
from gpu_hpc_exporter.http_client import HttpClient
from gpu_hpc_exporter.model import STATES, State
from gpu_hpc_exporter.samplers.job_parts import identity_settings
from gpu_hpc_exporter.sources.nvml.library import remedy
from gpu_hpc_exporter.web_config import load_web_config, tls_context
from gpu_hpc_exporter.yaml_file import list_mistakes

_TIMEOUT_S: Final = 5.0
_MAX_ANSWER: Final = 16 << 20
_FAMILIES: Final = (
    *("gpu_hpc_exporter_build_info", "gpu_hpc_up", "gpu_hpc_down_info", "gpu_hpc_replay"),
    *("gpu_hpc_source_state", "gpu_hpc_source_state_info"),
)
_WANTED: Final = re.compile(rf"(?:# (?:HELP|TYPE) )?(?:{'|'.join(_FAMILIES)})(?:[ {{]|$)")


def read_configuration(path: Path | None) -> tuple[Config, list[Check]]:
    """The configuration, the default one where it cannot be used, and a line for each of its mistakes."""
    file = path or DEFAULT_FILE
    if path is None and not file.exists():
        return Config(), [Check("configuration", "ok", f"no {file}: defaults")]
    try:
        config = load_config(file)
        identity_settings(config.jobs)
    except ConfigError as error:
        mistakes = list_mistakes(file, Config) or [str(error)]
        cure = "correct it: the exporter does not start with it, and goes on with its old one after a reload"
        return Config(), [Check("configuration", "broken", mistake, cure) for mistake in mistakes]
    return config, [Check("configuration", "ok", str(file))]


def check_web_configuration(file: Path) -> Checks:
    """TLS, certificates and users, as the exporter would load them."""
    try:
        tls_context(file, load_web_config(file))
    except ConfigError as error:
        yield Check("web configuration", "broken", str(error), "correct it: the exporter does not start with it")
    else:
        yield Check("web configuration", "ok", str(file))


@dataclass(frozen=True, slots=True)
class Running:
    """An exporter that serves already. states: of its sources that do not deliver, by (source, gpu): state and reason.

    guard: how it keeps us from reading it; then nothing else is known of it.
    """

    version: str = ""
    is_up: bool = False
    down_reason: str = ""
    is_replay: bool = False
    guard: str = ""
    states: dict[tuple[str, str], tuple[State, str]] = field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """Whether it holds the counters of this machine's GPUs, or may."""
        return not self.is_replay


class ForeignServerError(Exception):
    """What answers is no exporter that can be read; the text says what it does."""


def find_running(place: Place) -> Running | None:
    """The exporter at the first address where something listens, None without one. Raises ForeignServerError."""
    for host, port in place.addresses:
        target = host if host not in (None, "0.0.0.0", "::") else "127.0.0.1"  # noqa: S104  these listen, we ask
        try:
            with socket.create_connection((target, port), timeout=_TIMEOUT_S):
                pass
        except OSError:
            continue
        return _ask(place, str(target), port)
    return None


def _ask(place: Place, host: str, port: int) -> Running:
    """By TLS that proves nothing if it does not speak plain HTTP and nobody told how to ask: no secret is sent."""
    try:
        status, text = _get(place.client.connect(host, port, _TIMEOUT_S), place)
    except (OSError, http.client.HTTPException) as error:
        if place.client != HttpClient():
            raise ForeignServerError(f"what listens cannot be asked as --http.config.file says: {error}") from error
        try:
            connection = _unproven().connect(host, port, _TIMEOUT_S)
        except OSError:
            raise ForeignServerError(f"what listens does not answer HTTP ({type(error).__name__})") from error
        try:
            status, text = _get(connection, place)
        except (OSError, http.client.HTTPException):
            # With TLS 1.3 a client learns only now that it should have shown a certificate.
            return Running(guard="it speaks TLS and answers no stranger: --http.config.file names a certificate")
    if status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        return Running(guard=f"it answers {status}: --http.config.file names user and password")
    if "gpu_hpc_exporter_build_info" not in text:
        raise ForeignServerError(f"what listens serves no gpu_hpc_exporter_build_info at {place.telemetry_path}")
    return _parse(text)


def _unproven() -> HttpClient:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return HttpClient(context=context)


def _get(connection: http.client.HTTPConnection, place: Place) -> tuple[int, str]:
    try:
        connection.request("GET", place.telemetry_path, headers={"Accept": "text/plain", **place.client.headers})
        answer = connection.getresponse()
        return answer.status, answer.read(_MAX_ANSWER).decode("utf-8", "replace")
    finally:
        connection.close()


def _parse(text: str) -> Running:
    lines = [line for line in text.split("\n") if _WANTED.match(line)]
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
    except Exception as error:  # the library's parser raises whatever comes of what it does not expect
        raise ForeignServerError("its exposition cannot be parsed") from error
    reasons = {
        (labels.get("source"), labels.get("gpu"), labels.get("state")): labels.get("reason", "")
        for labels, _ in found.get("gpu_hpc_source_state_info", ())
    }
    states: dict[tuple[str, str], tuple[State, str]] = {}
    for labels, value in found.get("gpu_hpc_source_state", ()):
        source, gpu = labels.get("source", ""), labels.get("gpu", "")
        for state in STATES:
            if value == 1 and labels.get("state") == state != "active":
                states[(source, gpu)] = (state, reasons.get((source, gpu, state), ""))
    down = found.get("gpu_hpc_down_info", [({}, 0.0)])
    return Running(
        version=found.get("gpu_hpc_exporter_build_info", [({}, 1.0)])[0][0].get("version", "?"),
        is_up=any(value == 1 for _, value in found.get("gpu_hpc_up", ())),
        down_reason=down[0][0].get("reason", ""),
        is_replay=any(value == 1 for _, value in found.get("gpu_hpc_replay", ())),
        states=states,
    )


def check_port(place: Place, running: Running | ForeignServerError | None) -> Checks:
    """Whether the exporter can listen, or does."""
    names = ", ".join(_shown(address) for address in place.addresses)
    if isinstance(running, ForeignServerError):
        yield Check("port", "broken", f"{names} is taken: {running}", "end that program, or see --web.listen-address")
        return
    if running is None:
        for address in place.addresses:
            yield _bindable(address)
        return
    if running.guard:
        yield Check("port", "ok", f"{names} is served: {running.guard}; its states are not known here")
        return
    yield Check("port", "ok", f"{names} is served by gpu-hpc-exporter {running.version}")
    if running.version != __version__:
        finding = f"it is {running.version}, this command {__version__}"
        yield Check("exporter", "degraded", finding, "restart the exporter, so that what is installed runs")
    if running.is_replay:
        yield Check(
            "exporter", "degraded", "it plays a recording", "start it without --source=replay for this machine's GPUs"
        )
    elif not running.is_up:
        yield Check("exporter", "broken", f"it reads no GPU: {running.down_reason}", _cure(running.down_reason))
    else:
        yield Check("exporter", "ok", "it reads GPUs; its states below")
    for (source, gpu), (state, reason) in sorted(running.states.items()):
        status = status_of(state)
        cure = "" if status == "ok" else reason or "see its log"
        finding = told(state, reason) if status == "ok" else state
        yield Check(f"its {source}{f' GPU {gpu}' if gpu else ''}", status, finding, cure)


def _cure(reason: str) -> str:
    if reason == "released":
        return "`gpu-hpc-exporter resume` ends the release"
    return "see its log; the checks of driver and GPUs say more" if reason == "starting" else remedy(reason)


def _bindable(address: tuple[str | None, int]) -> Check:
    """A server's own words for what keeps it from listening."""
    host, port = address
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    try:
        with socket.create_server((host or "", port), family=family, reuse_port=False):
            pass
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        return Check("port", "broken", f"cannot listen on {_shown(address)}: {why}", "see --web.listen-address")
    return Check("port", "ok", f"{_shown(address)} is free")


def _shown(address: tuple[str | None, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if host and ":" in host else f"{host or ''}:{port}"
