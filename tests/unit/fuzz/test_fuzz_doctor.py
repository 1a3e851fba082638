"""What `doctor` and the commands that ask a running exporter are answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_hpc_exporter.control import _one_line
from gpu_hpc_exporter.doctor.check import STATUSES, Check, Place, capabilities
from gpu_hpc_exporter.doctor.driver import _decoded, gpus_on_bus, module_version
from gpu_hpc_exporter.doctor.prometheus import GROUPS, Server, check_prometheus
from gpu_hpc_exporter.doctor.serving import ForeignServerError, Running, _parse, check_port
from gpu_hpc_exporter.model import STATES
from unit.fuzz.foreign import crooked, foreign, fuzz, is_label, soon

PLACE = Place(addresses=((None, 9836),))
TARGET = {
    "labels": {"instance": "node-1:9836", "job": "gpu"},
    "scrapeUrl": "http://node-1:9836/metrics",
    "health": "up",
    "lastError": "",
    "scrapeInterval": "15s",
}
ANSWERS: dict[str, dict[str, Any]] = {
    "query": {"status": "success", "data": {"resultType": "vector", "result": [{"metric": {}, "value": [1.7e9, "1"]}]}},
    "targets": {"status": "success", "data": {"activeTargets": [TARGET, {**TARGET, "scrapeUrl": "http://[::1]:9836"}]}},
    "rules": {
        "status": "success",
        "data": {"groups": [{"name": name, "rules": [{"name": "r", "health": "ok"}]} for name in GROUPS[:3]]},
    },
    "alerts": {
        "status": "success",
        "data": {"alerts": [{"labels": {"alertname": "GpuHpcX"}, "annotations": {"summary": "s"}, "state": "firing"}]},
    },
}


@dataclass(frozen=True)
class Answering(Server):
    """A Prometheus of one's own making, by what is asked of it."""

    answers: Mapping[str, bytes] = field(default_factory=dict)

    def _ask(self, path: str) -> tuple[int, bytes]:
        return 200, self.answers[urlsplit(path).path.rpartition("/")[2]]


def check_lines(checks: list[Check]) -> None:
    """Each is a line of its own."""
    assert checks
    for check in checks:
        assert check.status in STATUSES
        assert check.finding
        for text in (check.name, check.finding, check.remedy):
            assert is_label(text, 1024)


def packed(tree: object) -> bytes:
    """As JSON."""
    return json.dumps(tree).encode()


KEYS = (b'"data":', b'"labels":{', b'"value":[', b'"scrapeUrl":"', b'"result":[', b'"activeTargets":[')


@given(
    st.sampled_from(sorted(ANSWERS)).flatmap(
        lambda what: st.tuples(
            st.just(what), foreign(packed(ANSWERS[what]), tokens=KEYS) | crooked(ANSWERS[what]).map(packed)
        )
    )
)
@fuzz(250)
@example(("query", b'{"data":' + b"[" * 100_000))
@example(("rules", b'{"data":{"groups":[' + b"[" * 100_000))
@example(("query", packed({"data": {"result": [{"metric": {}, "value": ["nan", "1"]}]}})))
@example(("query", packed({"data": {"result": [{"metric": {}, "value": [1e308, "1"]}]}})))
@example(("targets", packed({"data": {"activeTargets": [{**TARGET, "scrapeUrl": "http://["}, TARGET]}})))
@example(("targets", packed({"data": {"activeTargets": [{**TARGET, "scrapeUrl": "http://x:99999"}, TARGET]}})))
@example(("targets", packed({"data": {"activeTargets": [{**TARGET, "scrapeInterval": "9" * 5000 + "s"}]}})))
def test_answers_of_prometheus(answer: tuple[str, bytes]) -> None:
    """Any one answer, and the others as they should be: lines that say what is found, or that it is no Prometheus."""
    what, body = answer
    answers = {name: packed(tree) for name, tree in ANSWERS.items()} | {what: body}
    server = Answering("http", "node-1", 9090, instance="node-1", answers=answers)
    with soon():
        check_lines(list(check_prometheus(PLACE, server)))


def test_a_target_that_is_no_url_hides_no_other() -> None:
    """Whatever else it scrapes."""
    odd = {**TARGET, "scrapeUrl": "http://["}
    answers = {name: packed(tree) for name, tree in ANSWERS.items()}
    answers["targets"] = packed({"data": {"activeTargets": [odd, TARGET]}})
    checks = list(check_prometheus(PLACE, Answering("http", "node-1", 9090, instance="node-1", answers=answers)))
    assert "node-1:9836 of the scrape job gpu is up" in [check.finding for check in checks]


EXPOSITION = (
    b"# HELP gpu_hpc_up x\n# TYPE gpu_hpc_up gauge\ngpu_hpc_up 1\n"
    b'# TYPE gpu_hpc_exporter_build_info gauge\ngpu_hpc_exporter_build_info{version="0.1"} 1\n'
    b'gpu_hpc_source_state{source="nvml",gpu="0",uuid="x",state="lost"} 1\n'
    b'gpu_hpc_source_state_info{source="nvml",gpu="0",state="lost",reason="a \\"b\\""} 1\n'
    b'gpu_hpc_down_info{reason="starting"} 1\ngpu_hpc_replay 0\n'
)
PIECES = (
    b"gpu_hpc_up{",
    b'="',
    b'"}',
    b"\\",
    b"# TYPE gpu_hpc_up ",
    b" 1 x",
    b"gpu_hpc_source_state{",
    b",",
    b"} NaN",
    b" # {",
)


@given(foreign(EXPOSITION, tokens=PIECES))
@fuzz(300)
@example(b"gpu_hpc_up{\n")
@example(b'gpu_hpc_up{a="b\n')
@example(b"# TYPE gpu_hpc_up\n")
@example(b"gpu_hpc_up{a=}1\n")
@example(b"gpu_hpc_up \n")
@example(b"gpu_hpc_up 1 " + b"9" * 5000 + b"\n")
def test_what_serves_at_the_exporters_port(body: bytes) -> None:
    """Any exposition: what it says of an exporter, or that it cannot be read; and then lines."""
    with soon():
        found: Running | ForeignServerError
        try:
            found = _parse(body.decode("utf-8", "replace"))
            assert all(state in STATES for state, _ in found.states.values())
        except ForeignServerError as error:
            found = error
        check_lines(list(check_port(PLACE, found)))


PROBE = (
    {"type": "Doing", "what": "load"},
    {"type": "opened", "files": [{"path": "/dev/nvidia0", "problem": ""}]},
    {"type": "loaded", "file": "/x", "missing": []},
)


@given(
    foreign(b'{"type":"doing","what":"load"}', b"CUDA banner", tokens=(b'{"type":', b"\n"))
    | crooked(*PROBE).map(packed)
)
@fuzz(200)
@example(b"[" * 100_000)
@example(b'{"type":"doing","what":' + b"[" * 100_000)
def test_lines_of_the_probe(line: bytes) -> None:
    """A driver library may write to the probe's stdout: what is no line of ours is passed over."""
    told = _decoded(line)
    assert told is None or b'"type"' in line


PROC_STATUS = b"Name:\tx\nCapEff:\t000001ffffffffff\n"
MODULE = b"NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Jan  1 00:00:00 UTC 2026\nGCC version: 13\n"


@given(
    foreign(PROC_STATUS, tokens=(b"CapEff:\t", b"\n")),
    foreign(MODULE, tokens=(b"Kernel Module  ", b"580.", b" ")),
    foreign(b"0x10de\n"),
    foreign(b"0x030200\n"),
)
@fuzz(120)
@example(b"CapEff:" + b"\n" * 16_000, b"Kernel Module " * 1100, b"0x10de", b"0x03")
def test_files_of_the_driver(
    tmp_path_factory: pytest.TempPathFactory, status: bytes, version: bytes, vendor: bytes, kind: bytes
) -> None:
    """Any files: some capabilities, some version, few GPUs."""
    root = tmp_path_factory.getbasetemp() / "driver"
    device = root / "sys/bus/pci/devices/0000:17:00.0"
    for folder in (device, root / "proc/self", root / "proc/driver/nvidia"):
        folder.mkdir(parents=True, exist_ok=True)
    for file, content in (
        (root / "proc/self/status", status),
        (root / "proc/driver/nvidia/version", version),
        (device / "vendor", vendor),
        (device / "class", kind),
    ):
        file.write_bytes(content)
    place = Place(procfs=root / "proc", rootfs=root)
    with soon():
        assert 0 <= capabilities(place) < 1 << 64
        assert module_version(place).encode() in version.decode("utf-8", "replace").encode()
        assert gpus_on_bus(place) in ([], ["0000:17:00.0"])
    check_lines([Check("kernel module", "ok", f"nvidia {module_version(place)}")])


@given(foreign(b"paused until 12:00\n", tokens=(b"\x1b[2J", b"\r")))
@fuzz(100)
def test_answers_to_control(body: bytes) -> None:
    """Any answer is one line that does nothing to a terminal."""
    assert _one_line(body.decode("utf-8", "replace").strip()).isprintable()
