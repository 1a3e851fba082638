"""What Kubernetes tells: lists and watches of the API server, the kubelet's protobuf, names of folders, variables."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_hpc_exporter import config
from gpu_hpc_exporter.jobs.lookups import Pod
from gpu_hpc_exporter.model import State
from gpu_hpc_exporter.sources.kubernetes import messages, podresources
from gpu_hpc_exporter.sources.kubernetes.apiserver import ApiWatch, _ExpiredError
from gpu_hpc_exporter.sources.kubernetes.client import ApiClient, ApiError, Server, _read_token, _retry_after
from gpu_hpc_exporter.sources.kubernetes.devices import DeviceNames, SliceDevice, SliceKey
from gpu_hpc_exporter.sources.kubernetes.minors import read_minors
from gpu_hpc_exporter.sources.kubernetes.objects import PodRecord, Wanted, read_pods, read_slices
from gpu_hpc_exporter.sources.kubernetes.pod_folders import PodFolders
from gpu_hpc_exporter.sources.kubernetes.settings import ApiSettings, settings_of
from gpu_hpc_exporter.sources.kubernetes.text import MAX_BYTES
from gpu_hpc_exporter.sources.kubernetes.view import PartState, Told, build
from unit.fuzz.foreign import crooked, foreign, fuzz, is_label, outcome, soon
from unit.known import CID, PU
from unit.objects import G0, G1, M1

WANTED = Wanted(("job-name",), ("note",))
GPUS = (G0, G1, M1)
NODE = "node-1"


def pod_object(name: str = "train-0", uid: str = PU, node: str = NODE) -> dict[str, Any]:
    """A pod as the API server tells it."""
    return {
        "metadata": {
            "uid": uid,
            "name": name,
            "namespace": "team-x",
            "resourceVersion": "17",
            "labels": {"job-name": "bert", "x": "y"},
            "annotations": {"note": "n"},
            "ownerReferences": [{"kind": "Job", "controller": True}],
        },
        "spec": {"nodeName": node},
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "trainer", "containerID": f"containerd://{CID}"}],
            "initContainerStatuses": None,
        },
    }


def packed(value: object) -> bytes:
    """As JSON, without blanks, as the API server writes it."""
    return json.dumps(value, separators=(",", ":")).encode()


EVENTS: tuple[object, ...] = (
    {"type": "ADDED", "object": pod_object()},
    {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "18"}}},
    {"type": "DELETED", "object": pod_object()},
    {"type": "MODIFIED", "object": pod_object(node="node-2")},
    {"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}},
)
WATCH = b"\n".join(map(packed, EVENTS))
KEYS = (b'"metadata":{', b'"uid":"', b'"items":[', b'"labels":{', b'"type":"ADDED"', b'"object":', b'"code":', b'"}')
DEEP = b'{"metadata":{"resourceVersion":"1","x":' + b"[" * 100_000


def check_pod(pod: Pod) -> None:
    """Every text of a pod can be a label's value."""
    texts = (pod.uid, pod.name, pod.namespace, pod.controller, *pod.containers.values())
    assert all(is_label(text, MAX_BYTES) for text in texts)
    assert pod.uid
    assert pod.name
    for kept, wanted in ((pod.labels, WANTED.labels), (pod.annotations, WANTED.annotations)):
        assert set(kept) <= set(wanted)
        assert all(is_label(text, MAX_BYTES) for text in kept.values())
    assert all(len(identity) == 64 for identity in pod.containers)


LIST = {"metadata": {"resourceVersion": "17"}, "items": [pod_object(), pod_object("b", "u2"), {"odd": 1}]}
PODS = packed(LIST)


@given(foreign(PODS, tokens=KEYS) | crooked(LIST).map(packed))
@fuzz(300)
@example(DEEP)
@example(PODS.replace(b"train-0", b"\\ud800\xff"))
@example(PODS.replace(b"[{", b"[" * 50_000, 1))
def test_lists_of_pods(raw: bytes) -> None:
    """Any answer: pods whose texts are bounded, or ValueError."""
    read, problem = outcome(lambda: read_pods(raw, WANTED), ValueError)
    assert len(problem) < 1000
    for uid, record in (read or ({}, ""))[0].items():
        assert uid == record.pod.uid
        check_pod(record.pod)


@given(crooked(pod_object()))
@fuzz(150)
def test_a_crooked_pod_loses_no_other(crooked_pod: object) -> None:
    """Whatever one pod's object is, those beside it are told."""
    pods, version = read_pods(packed({**LIST, "items": [pod_object(), crooked_pod, pod_object("b", "u2")]}), WANTED)
    assert version == "17"
    assert "u2" in pods


class Heard:
    """What a watch tells its receiver."""

    def __init__(self) -> None:
        self.pods: Mapping[str, PodRecord] = {}
        self.states: list[tuple[State, str]] = []

    def take_pods(self, pods: Mapping[str, PodRecord]) -> None:
        """Keep them."""
        self.pods = pods

    def take_slices(self, slices: Mapping[SliceKey, SliceDevice]) -> None:
        """Not of interest here."""

    def take_state(self, state: State, reason: str) -> None:
        """Keep it."""
        self.states.append((state, reason))

    def hear(self) -> None:
        """Not of interest here."""


@given(foreign(WATCH, tokens=(*KEYS, b"\n")) | st.lists(crooked(*EVENTS).map(packed)).map(b"\n".join))
@fuzz(300)
@example(b'{"type":"ADDED","object":' + b"[" * 100_000)
@example(b'{"type":"ERROR","object":{"code":' + b"9" * 4400 + b"}}")
@example(b'{"type":"ERROR","object":{"code":' + b"9" * 400 + b',"message":"' + b"x" * 9000 + b'"}}')
@example(b'{"type":"' + b"x" * 9000 + b'","object":{}}')
def test_watches(lines: bytes) -> None:
    """Any lines: only this node's pods, and an error that is short, or the one that says that all is to be listed."""
    heard = Heard()
    watch = ApiWatch(ApiSettings(Server("http://x"), NODE, WANTED), heard)
    take = watch._take  # noqa: SLF001  what a batch of a watch reaches first
    _, problem = outcome(lambda: take(lines.split(b"\n")), ApiError, _ExpiredError)
    assert len(problem) < 1000
    for record in heard.pods.values():
        check_pod(record.pod)
        assert record.node == NODE


SLICE = {
    "spec": {
        "driver": "gpu.nvidia.com",
        "pool": {"name": NODE, "generation": 2},
        "devices": [
            {"name": "gpu-0", "attributes": {"uuid": {"string": G0.uuid}}},
            {"name": "gpu-1-mig", "basic": {"attributes": {"parentUUID": {"string": G1.uuid}}}},
            {"odd": []},
        ],
    }
}
SLICED = {"metadata": {"resourceVersion": "1"}, "items": [SLICE, {"spec": 7}]}
SLICES = packed(SLICED)


@given(foreign(SLICES, tokens=(*KEYS, b'"generation":', b'"devices":[', b'"string":"')) | crooked(SLICED).map(packed))
@fuzz(250)
@example(SLICES.replace(b":2}", b":" + b"9" * 80 + b"}"))
@example(DEEP)
def test_resource_slices(raw: bytes) -> None:
    """Any answer: devices whose texts are bounded, or ValueError."""
    with suppress(ValueError):
        for key, device in read_slices(raw).items():
            assert all(is_label(text, MAX_BYTES) for text in (*key, device.uuid, device.parent_uuid, device.profile))


@pytest.mark.parametrize("raw", [b"[" * (8 << 20), b'{"a":' * (1 << 20), b'"' + b"\\ud800" * (1 << 20) + b'"'])
def test_answers_of_megabytes(raw: bytes) -> None:
    """Refused in linear time."""
    with soon(), pytest.raises(ValueError, match=r"."):
        read_pods(raw, WANTED)


def varint(number: int) -> bytes:
    """Protobuf's own."""
    octets = bytearray()
    while number > 127:
        octets.append(number & 127 | 128)
        number >>= 7
    return bytes([*octets, number])


def field(number: int, body: bytes) -> bytes:
    """A field of bytes."""
    return varint(number << 3 | 2) + varint(len(body)) + body


CONTAINER = (
    field(1, b"trainer")
    + field(2, field(1, b"nvidia.com/gpu") + field(2, G0.uuid.encode()) + field(2, b"GPU-x"))
    + field(5, field(4, field(1, field(1, b"nvidia.com/gpu=0")) + field(2, b"gpu.nvidia.com") + field(4, b"gpu-0")))
)
LISTED = field(1, field(1, b"train-0") + field(2, b"team-x") + field(3, CONTAINER)) * 2
PARSER = messages.ListResponseParser()


@given(foreign(LISTED, tokens=(b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x00", b"\x1a\x00", b"\x0b", b"\x80" * 11)))
@fuzz(300)
@example(field(1, field(1, b"\xff" * 300) + field(3, CONTAINER)))
@example(field(1, field(1, b"p") + field(3, field(2, field(1, b"r") + field(2, b"") * 3000))))
@example(field(1, b"") * 60_000)
@example(b"\x0b" * 100_000)
def test_the_kubelets_answer(raw: bytes) -> None:
    """Any bytes: holdings whose texts are bounded, which name GPUs that there are or none; or ValueError."""
    try:
        holdings = podresources._holdings(PARSER.parse(raw))  # noqa: SLF001  what an answer reaches first
    except ValueError:
        return
    for holding in holdings:
        assert holding.pod
        assert len(holding.devices) + len(holding.dynamic) <= 2048
        texts = (
            holding.namespace,
            holding.pod,
            holding.container,
            *(text for pair in holding.devices for text in pair),
        )
        assert all(is_label(text, MAX_BYTES) for text in texts)
    view = build(Told(holdings), DeviceNames(GPUS), {"kubelet": PartState("active")})
    assert set(view.allocations) <= {gpu.uuid for gpu in GPUS}


@given(st.text(max_size=20) | st.from_regex(r"[0-9]{1,30}", fullmatch=True))
@fuzz(100)
@example("\N{SUPERSCRIPT TWO}")
@example("9" * 5000)
def test_times_to_wait(text: str) -> None:
    """Any header: some seconds."""
    assert 0 <= _retry_after(text) < 1e8


class Refusal:
    """An API server that refuses everything with one body."""

    def __init__(self) -> None:
        self.body = b""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request."""
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 500 No\r\nContent-Length: {len(self.body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + self.body)
        await writer.drain()
        writer.close()


STATUS = packed({"kind": "Status", "code": 500, "reason": "InternalError", "message": "etcd is away"})


@given(st.lists(foreign(STATUS, tokens=(b'"message":"', b'"code":', b"\\u202e")), min_size=10, max_size=10))
@fuzz(10)
@example([b'{"message":"' + b"\x1b" * 5000 + b'"}', b'{"x":' + b"[" * 5000])
def test_refusals(bodies: list[bytes]) -> None:
    """Whatever stands in an answer of 500: one short line without control characters."""

    async def ask() -> None:
        refusal = Refusal()
        server = await asyncio.start_server(refusal.answer, "127.0.0.1", 0)
        async with server:
            client = ApiClient(Server(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
            for refusal.body in bodies:
                with pytest.raises(ApiError) as caught:
                    await client.read("/api", {})
                assert is_label(str(caught.value), 300)
                assert str(caught.value).startswith("/api answers 500")

    asyncio.run(ask())


@given(foreign(b"eyJhbGciOiJSUzI1NiJ9.e30.c2ln\n"))
@fuzz(100)
def test_tokens(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Any file: what can stand in a header, or ValueError."""
    file = tmp_path_factory.getbasetemp() / "token"
    file.write_bytes(content)
    with suppress(ValueError):
        token = _read_token(file)
        assert token.isascii()
        assert token.isprintable()
        assert " " not in token


FOLDER_NAMES = st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=40)


@given(st.lists(FOLDER_NAMES | st.from_regex(r"[a-z0-9-]{1,9}_[a-z0-9._]{1,9}_[0-9a-f-]{30,38}", fullmatch=True)))
@fuzz(40)
def test_folders_of_pods(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    """Any names: pods whose parts stand in one of them."""
    folder = tmp_path_factory.mktemp("pods")
    for name in set(names) - {".", ".."}:
        (folder / name).mkdir()
    folders = PodFolders(folder)
    folders.refresh()
    for uid, pod in folders.pods.items():
        assert (uid, f"{pod.namespace}_{pod.name}_{uid}" in names) == (pod.uid, True)


INFORMATION = b"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-00000000-aaaa-bbbb-cccc-000000000000\nDevice Minor: \t 3\n"


@given(foreign(INFORMATION, tokens=(b"GPU UUID: ", b"Device Minor: ", b"\n")))
@fuzz(150)
@example(b"GPU UUID:" + b"\n" * 16_000)
@example(b"Device Minor:\n" * 1100)
def test_minor_numbers(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Any file: at most one UUID and its number, which stand there."""
    folder = tmp_path_factory.getbasetemp() / "proc/driver/nvidia/gpus/0000:17:00.0"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "information").write_bytes(content)
    with soon():
        for uuid, minor in read_minors(folder.parents[3]).items():
            assert uuid.encode() in content
            assert str(minor).encode() in content
            assert 0 <= minor < 10_000


VARIABLES = st.sampled_from(["KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "NODE_NAME"])
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30) | st.sampled_from(
    ["10.0.0.1", "fd00::1", "443", "x/y", "a b", "node-1", "NODE", "-", "0" * 400]
)


@given(st.dictionaries(VARIABLES, VALUES), VALUES)
@fuzz(60)
@example({"KUBERNETES_SERVICE_HOST": "[", "NODE_NAME": "n"}, "h")
@example({"KUBERNETES_SERVICE_HOST": "h", "KUBERNETES_SERVICE_PORT": "x@y", "NODE_NAME": "n"}, "h")
def test_variables_of_a_pod(tmp_path_factory: pytest.TempPathFactory, environ: dict[str, str], host: str) -> None:
    """Any environment: a server and a name of this node that Kubernetes could have given it, or none and why not."""
    account = tmp_path_factory.getbasetemp()
    (account / "token").write_text("t")
    found = settings_of(config.Kubernetes(), environ, host, account)
    if found.api is None:
        assert is_label(found.no_api_reason, 400)
        assert found.no_api_reason
    else:
        assert re.fullmatch(r"[a-z0-9.-]{1,253}", found.api.node)
        assert environ["KUBERNETES_SERVICE_HOST"] in found.api.server.url
