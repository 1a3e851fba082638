"""TLS, client certificates and users of `--web.config.file`, with the exporter as it runs and a real Prometheus."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import pytest

from exporter_process import Exporter, run_exporter
from process_figures import cpu_seconds
from prometheus_process import run_prometheus
from web_files import PASSWORD, WITH_CLIENTS, WITH_TLS, Site, basic, make_site, with_users

REPLAY = ("--source=replay", "--log.format=json")
LOOPBACK = "127.0.0.1"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """TLS and one user, whose password costs about 0.2 s to check."""
    return make_site(tmp_path_factory.mktemp("site"), WITH_TLS + with_users(cost=12))


@pytest.fixture(scope="module")
def exporter(site: Site) -> Iterator[Exporter]:
    """The exporter with that, asked as the user."""
    with run_exporter(site.directory, *REPLAY, site.flag, tls=site.client(), authorization=basic()) as running:
        yield running


def log_lines(exporter: Exporter, *levels: str) -> list[str]:
    """Messages of the log at these levels."""
    lines = [json.loads(line) for line in exporter.log.read_text().splitlines()]
    return [line["msg"] for line in lines if line["level"] in levels]


def serial(exporter: Exporter, context: ssl.SSLContext) -> str:
    """The serial number of the certificate that a new connection is shown."""
    with connect(exporter, context) as connection:
        return str((connection.getpeercert() or {})["serialNumber"])


def connect(exporter: Exporter, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A new connection; with TLS 1.3 a client learns only with the first answer whether it is let in."""
    port = int(exporter.url.rpartition(":")[2])
    return context.wrap_socket(socket.create_connection((LOOPBACK, port), timeout=10), server_hostname=LOOPBACK)


def get(connection: socket.socket, path: str = "/-/healthy", *headers: str) -> bytes:
    """The answer to a request on a connection that stays open: its head, and what came with it."""
    lines = "".join(f"{header}\r\n" for header in headers)
    connection.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n{lines}\r\n".encode())
    return connection.recv(65536)


def test_users(exporter: Exporter) -> None:
    """The right password gets everything, a wrong one and an unknown user the same refusal."""
    assert exporter.fetch()[0] == 200
    refusals = [exporter.fetch(Authorization=basic(*who)) for who in (("scraper", "x"), ("nobody", PASSWORD))]
    for status, headers, text in refusals:
        assert (status, text) == (401, "a user and a password are needed\n")
        assert headers["WWW-Authenticate"] == 'Basic realm="gpu-hpc-exporter", charset="UTF-8"'
        assert headers["Content-Type"] == "text/plain; charset=utf-8"  # H06: no error is served as an exposition
    for path in ("/", "/metrics", "/-/reload", "/api/v1/gpus", "/nothing"):
        assert exporter.fetch(path, Authorization="Bearer x")[0] == 401


@pytest.mark.parametrize("user", ["scraper", "nobody"])
def test_an_unknown_user_costs_a_bcrypt_too(exporter: Exporter, user: str) -> None:
    """So that the time of an answer does not tell who is a user: the exporter's CPU time shows that it was computed."""
    exporter.fetch()
    began = cpu_seconds(exporter.process.pid)
    for _ in range(10):
        assert exporter.fetch("/-/healthy")[0] == 200
    handshakes_s = cpu_seconds(exporter.process.pid) - began
    began = cpu_seconds(exporter.process.pid)
    for number in range(10):
        assert exporter.fetch("/-/healthy", Authorization=basic(user, f"wrong {number}"))[0] == 401
    assert cpu_seconds(exporter.process.pid) - began > handshakes_s + 10 * 0.05


def test_scrapes_are_served_while_bcrypt_runs(exporter: Exporter, site: Site) -> None:
    """A password that is being checked keeps no scrape waiting: on one connection several come and go meanwhile."""
    exporter.fetch()
    served = 0
    with connect(exporter, site.client()) as stranger, connect(exporter, site.client()) as scraper:
        assert b" 200 " in get(scraper, "/-/ready", f"Authorization: {basic()}")
        stranger.settimeout(0)
        stranger.sendall(f"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: {basic('scraper', 'x')}\r\n\r\n".encode())
        answer = b""
        while not answer:
            assert b" 200 " in get(scraper, "/-/ready", f"Authorization: {basic()}")
            served += 1
            try:
                answer = stranger.recv(1000)
            except ssl.SSLWantReadError:
                continue
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert served > 5


def test_probes_need_no_password(exporter: Exporter) -> None:
    """Kubernetes' probes cannot have one: they learn the status and no more."""
    stranger = Exporter(exporter.process, exporter.url, exporter.log, exporter.tls)
    assert (stranger.fetch("/-/healthy")[0], stranger.fetch("/-/healthy")[2]) == (200, "healthy\n")
    assert exporter.wait_for(lambda s: s.get("gpu_hpc_up") == 1)
    assert stranger.fetch("/-/ready")[2] == "ready\n"
    assert stranger.post("/-/healthy") == 401
    assert stranger.fetch("/metrics")[0] == 401


def test_a_stranger_is_not_told_which_gpu_is_not_ready(tmp_path: Path) -> None:
    """Readiness without a password has no reason in it."""
    site = make_site(tmp_path, with_users())
    env = {"LD_LIBRARY_PATH": ""}
    with run_exporter(tmp_path, site.flag, env=env, authorization=basic()) as exporter:
        exporter.wait_for(lambda s: s.all("gpu_hpc_down_info") != {})
        assert exporter.fetch("/-/ready")[2].startswith("not ready: ")
        stranger = Exporter(exporter.process, exporter.url, exporter.log)
        assert stranger.fetch("/-/ready")[0::2] == (503, "not ready: only users are told why\n")


@pytest.mark.parametrize("user", ["right", "wrong", "none"])
def test_control_over_tls(exporter: Exporter, site: Site, user: str) -> None:
    """The commands take Prometheus's HTTP client configuration; without the password not even this machine controls."""
    password = {"right": PASSWORD, "wrong": "x", "none": ""}[user]
    (site.directory / f"{user}.txt").write_text(password + "\n", encoding="utf-8")
    auth = "" if user == "none" else f"basic_auth: {{username: scraper, password_file: {user}.txt}}\n"
    config = site.directory / f"http-{user}.yml"
    config.write_text(auth + "tls_config: {ca_file: ca.pem}\n", encoding="utf-8")
    place = exporter.url.removeprefix("https://")
    result = control(place, f"--http.config.file={config}")
    if user == "right":
        assert result.stderr == "gpu-hpc-exporter: a recording is played: there is nothing to pause\n"
    else:
        told = f"gpu-hpc-exporter: the exporter at {place} asks for a user and a password: see --http.config.file\n"
        assert (result.returncode, result.stderr) == (1, told)


def control(place: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """`pause` as it is typed."""
    command = [sys.executable, "-m", "gpu_hpc_exporter", "pause", f"--address={place}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ("", "what answers at {} ends the connection: does it want TLS? see --http.config.file"),
        ("tls_config: {}\n", "no TLS with what answers at {}: unable to get local issuer certificate; see --http"),
        ("tls_config: {ca_file: ca.pem, server_name: other}\n", "no TLS with what answers at {}: Hostname mismatch"),
        ("tls_config: {insecure_skip_verify: true}\n", "the exporter at {} asks for a user and a password: see --http"),
        ("tls_config: {ca_file: none.pem}\n", "tls_config: none.pem cannot be loaded: No such file or directory"),
        ("tls: {}\n", "{file}: line 1: unknown key `tls`; known keys: basic_auth, tls_config"),
    ],
)
def test_control_that_cannot_ask(exporter: Exporter, site: Site, config: str, told: str) -> None:
    """Each mistake is one line that says where to look."""
    file, place = site.directory / "http.yml", exporter.url.removeprefix("https://")
    file.write_text(config, encoding="utf-8")
    result = control(place, *([f"--http.config.file={file}"] if config else []))
    (line,) = result.stderr.splitlines()
    assert line.startswith("gpu-hpc-exporter: " + told.format(place, file=file))
    assert result.returncode in (1, 2)


def test_client_certificates(tmp_path: Path) -> None:
    """One of the authority is let in, another's or none is not; who has one may control as well."""
    site = make_site(tmp_path, WITH_CLIENTS)
    own = site.client(site.issue("client", "prometheus.example"))
    foreign = make_site(_directory(tmp_path / "foreign"), "").issue("client", "prometheus.example")
    with run_exporter(tmp_path, *REPLAY, site.flag, tls=own) as exporter:
        assert exporter.fetch()[0] == 200
        assert exporter.ask("/-/pause") == (409, "a recording is played: there is nothing to pause\n")
        for context in (site.client(), site.client(foreign)):
            with pytest.raises((urllib.error.URLError, OSError)):
                Exporter(exporter.process, exporter.url, exporter.log, context).fetch()
        assert exporter.fetch()[0] == 200
        assert log_lines(exporter, "error") == []


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


def test_names_of_client_certificates(tmp_path: Path) -> None:
    """client_allowed_sans: the authority alone is not enough."""
    site = make_site(tmp_path, WITH_CLIENTS.replace("}", ", client_allowed_sans: [prometheus.example]}"))
    own, other = (site.client(site.issue(name, f"{name}.example")) for name in ("prometheus", "other"))
    with run_exporter(tmp_path, *REPLAY, site.flag, tls=own) as exporter:
        assert exporter.fetch()[0] == 200
        with pytest.raises((urllib.error.URLError, OSError)):
            Exporter(exporter.process, exporter.url, exporter.log, other).fetch()


def test_an_old_tls_version_is_refused(exporter: Exporter, site: Site) -> None:
    """TLS 1.2 is the least by default, and 1.3 is what is spoken."""
    context = site.client()
    with connect(exporter, context) as connection:
        assert connection.version() == "TLSv1.3"
    # Every way of saying that is deprecated, which is the point.
    with pytest.warns(DeprecationWarning, match="TLS"):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(ssl.SSLError):
        connect(exporter, context)


def test_a_rotated_certificate(tmp_path: Path) -> None:
    """A new connection gets the new certificate without a signal; one that is open goes on undisturbed."""
    site = make_site(tmp_path, WITH_TLS)
    with run_exporter(tmp_path, *REPLAY, site.flag, tls=site.client()) as exporter:
        old = serial(exporter, site.client())
        with connect(exporter, site.client()) as held:
            assert get(held).startswith(b"HTTP/1.1 200 ")
            site.issue()
            while serial(exporter, site.client()) == old:
                assert get(held).startswith(b"HTTP/1.1 200 ")
            assert get(held).startswith(b"HTTP/1.1 200 ")
            assert (held.getpeercert() or {})["serialNumber"] == old
        assert exporter.scrape().one("gpu_hpc_config_reload_success") == 1
        assert len([line for line in log_lines(exporter, "info") if "has changed: reloaded" in line]) >= 1


@pytest.mark.parametrize("way", ["SIGHUP", "POST", "by itself"])
def test_a_broken_new_file_keeps_the_old_one(tmp_path: Path, way: str) -> None:
    """A line and a metric say so; who could ask still can. Users that are taken away go with the next good one."""
    site = make_site(tmp_path, WITH_TLS + with_users())
    with run_exporter(tmp_path, *REPLAY, site.flag, tls=site.client(), authorization=basic()) as exporter:

        def reload(text: str) -> None:
            site.write(text)
            if way == "SIGHUP":
                exporter.process.send_signal(signal.SIGHUP)
            elif way == "POST":
                exporter.ask("/-/reload")

        assert exporter.scrape().one("gpu_hpc_config_reload_success") == 1
        reload("basic_auth_user: {}\n")
        samples = exporter.wait_for(lambda s: s.one("gpu_hpc_config_reload_success") == 0)
        assert samples.one("gpu_hpc_up") == 1
        lines = log_lines(exporter, "error")
        assert 1 <= len(lines) <= 2  # by itself for the connection that asks for the reload, and as asked
        told = f"{site.file}: line 1: unknown key `basic_auth_user`; did you mean `basic_auth_users`?"
        assert all(told in line for line in lines)
        reload(WITH_TLS + with_users(somebody="else"))
        new = Exporter(exporter.process, exporter.url, exporter.log, exporter.tls, basic("somebody", "else"))
        while (status := new.fetch()[0]) != 200:
            assert status == 401
        assert exporter.fetch()[0] == 401
        new.wait_for(lambda s: s.one("gpu_hpc_config_reload_success") == 1)


def test_users_that_are_taken_away_are_gone_from_open_connections(tmp_path: Path) -> None:
    """A connection that was let in is asked again with every request."""
    site = make_site(tmp_path, with_users())
    with run_exporter(tmp_path, *REPLAY, site.flag, authorization=basic()) as exporter:
        port = int(exporter.url.rpartition(":")[2])
        with socket.create_connection((LOOPBACK, port), timeout=10) as held:
            who = f"Authorization: {basic()}"
            assert get(held, "/-/healthy", who).startswith(b"HTTP/1.1 200 ")
            site.write(with_users(somebody="else"))
            assert exporter.post("/-/reload") in (200, 401)  # the file may have been read for this connection already
            assert get(held, "/-/healthy", who).startswith(b"HTTP/1.1 401 ")


def test_headers(tmp_path: Path) -> None:
    """Every answer has the usual ones; the file adds to them and replaces them. No other origin is let in."""
    headers = "http_server_config: {headers: {X-Frame-Options: sameorigin, Strict-Transport-Security: max-age=60}}\n"
    site = make_site(tmp_path, headers)
    with run_exporter(tmp_path, *REPLAY, site.flag) as exporter:
        for path, status in (("/metrics", 200), ("/", 200), ("/nothing", 404), ("/-/reload", 405)):
            answered, got, _ = exporter.fetch(path, Origin="http://evil.example")
            assert answered == status
            assert got["X-Content-Type-Options"] == "nosniff"
            assert got["X-Frame-Options"] == "sameorigin"
            assert got["Strict-Transport-Security"] == "max-age=60"
            assert got["Referrer-Policy"] == "no-referrer"
            policy = got["Content-Security-Policy"]
            assert "frame-ancestors 'none'" in policy
            assert "script-src 'self'" in policy
            assert "unsafe" not in policy
            assert not [name for name in got if name.lower().startswith("access-control-")]
            assert "aiohttp" not in got["Server"]


def test_rate_limit(tmp_path: Path) -> None:
    """What is over the limit is refused, health never."""
    site = make_site(tmp_path, "rate_limit: {interval: 1h, burst: 3}\n")
    with run_exporter(tmp_path, *REPLAY, site.flag) as exporter:
        assert [exporter.fetch("/-/ready")[0] == 429 for _ in range(5)] == [False, False, False, True, True]
        assert exporter.fetch("/-/healthy")[0] == 200


@pytest.mark.parametrize(("text", "told"), [("tls: {}\n", "line 1: unknown key `tls`; "), (None, "No such file")])
def test_a_mistake_stops_the_start(tmp_path: Path, text: str | None, told: str) -> None:
    """Rather none than one without its users: status 2 and one line."""
    file = tmp_path / "web.yml"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "gpu_hpc_exporter", "--source=replay", f"--web.config.file={file}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    (line,) = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (2, "")
    assert line.startswith(f"gpu-hpc-exporter: {file}: {told}")


CONFIG = """
global: {{scrape_interval: 3s, scrape_timeout: 3s}}
scrape_configs:
  - job_name: gpu-hpc
    honor_labels: true
    scheme: https
    basic_auth: {{username: scraper, password: "{password}"}}
    tls_config: {{ca_file: {site}/ca.pem, cert_file: {site}/client.pem, key_file: {site}/client.key}}
    static_configs: [{{targets: ["{target}"]}}]
  - job_name: stranger
    honor_labels: true
    scheme: https
    tls_config: {{ca_file: {site}/ca.pem, cert_file: {site}/client.pem, key_file: {site}/client.key}}
    static_configs: [{{targets: ["{target}"]}}]
"""


def test_prometheus_scrapes_with_password_and_certificate(tmp_path: Path) -> None:
    """A real Prometheus: basic_auth and tls_config get every scrape, and go on over a new certificate."""
    site = make_site(tmp_path, WITH_CLIENTS + with_users(cost=10))
    own = site.client(site.issue("client", "prometheus.example"))
    with run_exporter(tmp_path, *REPLAY, site.flag, tls=own, authorization=basic()) as exporter:
        target = exporter.url.removeprefix("https://")
        config = CONFIG.format(target=target, site=tmp_path, password=PASSWORD)
        with run_prometheus(_directory(tmp_path / "prometheus"), config) as prometheus:
            prometheus.wait_for('count_over_time(up{job="gpu-hpc"}[1m]) >= 2')
            site.issue()
            prometheus.wait_for('count_over_time(up{job="gpu-hpc"}[1m]) >= 4')
            assert set(prometheus.query('min_over_time(up{job="gpu-hpc"}[1m])').values()) == {1.0}
            assert set(prometheus.query('up{job="stranger"}').values()) == {0.0}
            targets = prometheus.api("targets")["activeTargets"]
            errors = {target["labels"]["job"]: target["lastError"] for target in targets}
            assert errors["gpu-hpc"] == ""
            assert "401" in errors["stranger"]
