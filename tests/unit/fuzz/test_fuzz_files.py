"""Files that people bring: configurations, certificates, recordings, marks of a workload."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_hpc_exporter.config import DEFAULT_RECORDING, Config, load_config
from gpu_hpc_exporter.doctor.serving import read_configuration
from gpu_hpc_exporter.http_client import read_http_client
from gpu_hpc_exporter.sources.record import read_marks
from gpu_hpc_exporter.sources.recording import decode_line
from gpu_hpc_exporter.sources.replay import Recording, RecordingError, loop
from gpu_hpc_exporter.web_config import load_web_config, tls_context
from gpu_hpc_exporter.yaml_file import ConfigError, list_mistakes
from unit.fuzz.foreign import crooked, foreign, fuzz, outcome, soon

MAX_LINE = 2000
SLOW = 3000
"""Bytes of YAML: it takes a millisecond for each hundred."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file for all examples."""
    return tmp_path_factory.mktemp("files") / "x"


def problem(run: Callable[[], object]) -> str:
    """What is told of a file, "" for nothing."""
    return outcome(run, ConfigError, RecordingError)[1]


def check_problem(text: str, file: Path) -> None:
    """One line, not too long, that begins with the file."""
    assert text.startswith(f"{file}: ")
    assert "\n" not in text
    assert len(text) < MAX_LINE


CONFIG: dict[str, Any] = {
    "sampling_interval_ms": 100,
    "gauge_window_seconds": 15,
    "expected_gpus": 8,
    "exit_after_lost_minutes": 5,
    "series_limit": 20_000,
    "pm_sampling": {"mode": "auto", "yield_to": ["ncu"], "library": "", "helper": ["sudo", "-n"]},
    "agent": {"directory": "/run/x", "resume_after_profiler": 5, "top_k": 12},
    "jobs": {
        "rules": [{"command_line": "(?P<job>[a-z]+)", "kind": "batch"}, {"cgroup": "x(?P<job_id>[0-9]+)"}],
        "environment": ["JOB_NAME"],
        "kubernetes": {"enabled": "auto", "labels": ["a"], "api": "https://x:6443", "gpu_resources": []},
        "slurm": {"map_directory": "/x", "scontrol": "true", "slurmrestd": {"url": "http://x", "version": "v0.0.40"}},
    },
}
YAML = b"""# comment
sampling_interval_ms: 100
pm_sampling: {mode: auto, yield_to: [ncu, "nsys*"]}
jobs:
  rules:
    - command_line: '(?P<job>[a-z]+)'
      kind: batch
    - &a {cgroup: "x"}
  environment: [JOB_NAME, *a]
"""
MARKS = (b"&a ", b"*a", b"<<: ", b"? ", b": ", b"- ", b"|\n", b">\n", b"!!binary ", b"---\n", b"...\n", b"%YAML 1.1\n")
BOMB = b"a0: &a0 [x, x]\n" + b"".join(b"a%d: &a%d [*a%d, *a%d]\n" % (n, n, n - 1, n - 1) for n in range(1, 60))
CHAINS = [
    b"a0: &a0 {x: 1}\n" + b"".join(b"a%d: &a%d {x: *a%d}\n" % (n, n, n - 1) for n in range(1, depth))
    for depth in (210, 400)
]


@given(
    foreign(YAML, json.dumps(CONFIG).encode(), tokens=MARKS, limit=SLOW)
    | crooked(CONFIG).map(json.dumps).map(str.encode)
)
@fuzz(120)
@example(b'library: "\\UFFFFFFFF"\n')
@example(b'library: "\\U00110000"\n')
@example(b"%YAML " + b"9" * 5000 + b".1\n---\na: 1\n")
@example(BOMB)
@example(CHAINS[0])
@example(CHAINS[1])
@example(b"jobs: &a {rules: *a}\n")
@example(b"jobs: &a [*a]\n")
@example(b"&a [*a]: 1\n")
@example(b"series_limit: " + b"9" * 5000 + b"\n")
@example(b"sampling_interval_ms: .nan\n")
@example(b"a" * 5000 + b": 1\n")
@example(b'"x` - at `$.jobs": 1\n')
@example(b"jobs: {rules: [{'x` - at `$.y': 1}]}\n")
@example(b"{a: " * 150 + b"1" + b"}" * 150)
def test_configurations(file: Path, content: bytes) -> None:
    """Any file: a configuration within its bounds, or one line; and `doctor` begins with the same."""
    file.write_bytes(content)
    with soon():
        told = problem(lambda: load_config(file))
    if told:
        check_problem(told, file)
    assert list_mistakes(file, Config)[:1] == [told][: bool(told)]
    config, checks = read_configuration(file)
    assert 1 <= config.sampling_interval_ms <= 4000
    assert config.series_limit >= 100
    assert all(check.finding and "\n" not in check.finding for check in checks)


WEB: dict[str, Any] = {
    "tls_server_config": {
        "cert_file": "cert.pem",
        "key_file": "key.pem",
        "client_ca_file": "ca.pem",
        "client_auth_type": "RequireAndVerifyClientCert",
        "client_allowed_sans": ["x"],
        "min_version": "TLS12",
        "cipher_suites": ["TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"],
        "curve_preferences": ["X25519"],
    },
    "http_server_config": {"http2": True, "headers": {"X-Frame-Options": "deny", "Content-Security-Policy": "x"}},
    "basic_auth_users": {"scraper": "$2y$10$" + "a" * 53},
    "rate_limit": {"interval": "1s", "burst": 10},
}
CLIENT: dict[str, Any] = {
    "basic_auth": {"username": "u", "password": "secret-word", "password_file": ""},
    "tls_config": {"ca_file": "", "cert_file": "", "server_name": "x", "insecure_skip_verify": True},
}


def as_yaml(*valid: object) -> st.SearchStrategy[bytes]:
    """JSON is YAML too."""
    return crooked(*valid).map(json.dumps).map(str.encode) | foreign(
        *(json.dumps(tree).encode() for tree in valid), tokens=MARKS, limit=SLOW
    )


@given(as_yaml(WEB))
@fuzz(150)
@example(b"http_server_config: {headers: {x-frame-options: deny}}\n")
@example(b"basic_auth_users: {a: {b: c}}\n")
@example(b"basic_auth_users: [1]\n")
@example(b"rate_limit: {interval: " + b"9" * 5000 + b"s, burst: 1}\n")
def test_web_configurations(file: Path, content: bytes) -> None:
    """Any file: users and TLS that are whole, or one line that repeats no hash."""
    file.write_bytes(content)
    told = problem(lambda: load_web_config(file))
    if told:
        check_problem(told, file)
        assert "a" * 40 not in told
    else:
        users = load_web_config(file).basic_auth_users
        assert all(name.isprintable() and hashed.startswith("$2") for name, hashed in users.items())


@given(as_yaml(CLIENT, {"basic_auth": None}))
@fuzz(150)
@example(b"basic_auth: {usernme: x}\n")
@example(b"tls_config: {ca: x}\n")
@example(b"basic_auth: {username: 1, password: [x]}\n")
@example(b"tls_config: {ca_file: /dev/null}\n")
@example(b"basic_auth: {password_file: /}\n")
def test_configurations_of_clients(file: Path, content: bytes) -> None:
    """Any file: how to ask, or one line without the password."""
    file.write_bytes(content)
    told = problem(lambda: read_http_client(file))
    if told:
        assert "\n" not in told
        assert len(told) < MAX_LINE
        assert "secret-word" not in told
    else:
        assert set(read_http_client(file).headers) <= {"Authorization"}


PEM = (
    b"-----BEGIN CERTIFICATE-----\nMIIBszCCAVmgAwIBAgIUe0\n-----END CERTIFICATE-----\n",
    b"-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIA==\n-----END PRIVATE KEY-----\n",
    b"-----BEGIN ENCRYPTED PRIVATE KEY-----\nMC4CAQ==\n-----END ENCRYPTED PRIVATE KEY-----\n",
)


@given(foreign(*PEM, tokens=(b"-----BEGIN ", b"-----END ", b"==", b"DEK-Info: ")), foreign(*PEM), foreign(*PEM))
@fuzz(50)
def test_certificates(file: Path, cert: bytes, key: bytes, ca: bytes) -> None:
    """Any files that a web configuration names: one line."""
    folder = file.parent
    for name, content in (("cert.pem", cert), ("key.pem", key), ("ca.pem", ca)):
        (folder / name).write_bytes(content)
    file.write_bytes(json.dumps(WEB).encode())
    told = problem(lambda: tls_context(file, load_web_config(file)))
    assert told
    assert "\n" not in told
    client = {"tls_config": {"ca_file": "ca.pem", "cert_file": "cert.pem", "key_file": "key.pem"}}
    file.write_bytes(json.dumps(client).encode())
    told = problem(lambda: read_http_client(file))
    assert told.startswith("tls_config: ")
    assert "\n" not in told


# Recordings


def first_lines() -> list[dict[str, Any]]:
    """One line of each type of the recording that comes with the exporter, in their order."""
    found: dict[str, dict[str, Any]] = {}
    with gzip.open(DEFAULT_RECORDING) as lines:
        for line in lines:
            told = json.loads(line)
            found.setdefault(told["type"], told)
    return list(found.values())


LINES = first_lines()


def as_recording(lines: list[Any]) -> bytes:
    """Packed."""
    return gzip.compress(b"".join(json.dumps(line).encode() + b"\n" for line in lines), 1, mtime=0)


SHORT = [*LINES, {"type": "phase", "t": 2.0, "name": "end"}]
PACKED = as_recording(SHORT)
PLAIN = gzip.decompress(PACKED)


@st.composite
def recordings(draw: st.DrawFn) -> bytes:
    """A recording with one line that is crooked, or left out, or there twice."""
    place = draw(st.integers(0, len(SHORT) - 1))
    lines = draw(st.lists(crooked(SHORT[place]), max_size=2))
    return as_recording([*SHORT[:place], *lines, *SHORT[place + 1 :]])


@given(
    recordings()
    | foreign(PACKED)
    | foreign(PLAIN, tokens=(b'"t":', b'"v":{', b'"type":"reading"', b"\n")).map(lambda text: gzip.compress(text, 1))
)
@fuzz(250)
@example(gzip.compress(PLAIN + b"[" * 100_000))
@example(gzip.compress(PLAIN.replace(b"NVIDIA", b"\xff")))
@example(PACKED + PACKED)
@example(PACKED + b"junk")
def test_recordings(file: Path, raw: bytes) -> None:
    """Any file: a recording that can be played round and round, or one line that names file and line."""
    file.write_bytes(raw)
    told = problem(lambda: Recording.load(file))
    if told:
        check_problem(told, file)
        return
    recording = Recording.load(file)
    assert recording.duration_ns > 0
    times = [
        event.end_ns if hasattr(event, "end_ns") else event.time_ns
        for event, _ in zip(loop(recording, 7), range(300), strict=False)
    ]
    assert min(times) >= 7
    assert decode_line(recording.header, 0) == ()


@given(st.integers(1, len(PACKED) - 1))
@fuzz(150)
def test_a_recording_that_is_cut_off(file: Path, length: int) -> None:
    """Wherever it ends too early, it is none."""
    file.write_bytes(PACKED[:length])
    check_problem(problem(lambda: Recording.load(file)), file)


@pytest.mark.parametrize(
    "content",
    [
        bytes(64 << 20),
        b"\n" * (8 << 20),
        PLAIN + bytes(64 << 20),
        PLAIN + b" " * (64 << 20),
        PLAIN + b'{"type":"phase","t":0,"name":"' + b"x" * (64 << 20) + b'"}\n',
        PLAIN + b'{"type":"windows_rejected",' + b"[" * (64 << 20),
    ],
    ids=["zeros", "empty lines", "zeros behind", "blanks", "a name", "depth"],
)
def test_recordings_that_grow(file: Path, content: bytes) -> None:
    """A few kB that become 64 MB: refused at the first line that is too long, with the memory of a few lines."""
    file.write_bytes(gzip.compress(content, 1))
    del content
    tracemalloc.start()
    try:
        with soon():
            told = problem(lambda: Recording.load(file))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    check_problem(told, file)
    assert peak < 16 << 20


MARKED = b"12.5 train\n13.75 inference with graph\n14 unfinished"


@given(foreign(MARKED, tokens=(b"1e308 ", b"nan x\n", b"inf x\n", b"-1 ", b"\n")), st.integers(0, 3))
@fuzz(150)
@example(b"1e308 x\n", 0)
@example(b"nan x\n", 0)
@example(b"\n0\r", 1)
@example(b"9" * 5000 + b" x\n", 0)
def test_marks_of_a_workload(file: Path, content: bytes, seen: int) -> None:
    """Any file: whole lines with a time, or ValueError that names the line."""
    file.write_bytes(content)
    marks, told = outcome(lambda: list(read_marks(file, seen)), ValueError)
    if marks is None:
        assert told.startswith(f"{file}: line ")
        assert "\n" not in told
        assert len(told) < 500
        return
    assert len(marks) == max(0, content.decode("utf-8", "replace").count("\n") - seen)


@pytest.mark.parametrize(
    ("content", "load"),
    [
        (YAML.replace(b", *a", b"").replace(b'&a {cgroup: "x"}', b"{cgroup: x, kind: batch}"), load_config),
        (json.dumps(CONFIG).encode(), load_config),
        (json.dumps(WEB).encode(), load_web_config),
        (json.dumps({"basic_auth": CLIENT["basic_auth"]}).encode(), read_http_client),
        (PACKED, Recording.load),
    ],
)
def test_what_is_damaged_is_valid(file: Path, content: bytes, load: Callable[[Path], object]) -> None:
    """Without damage every file of these is taken."""
    file.write_bytes(content)
    assert load(file)
