"""Objects of the Kubernetes API: what is kept of them, and of what is none."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fake_apiserver import pod, slice_of
from gpu_hpc_exporter.jobs.lookups import Pod
from gpu_hpc_exporter.sources.kubernetes.devices import SliceDevice
from gpu_hpc_exporter.sources.kubernetes.objects import Wanted, WatchEvent, decode, read_pod, read_pods, read_slices

CID, CID2 = 64 * "a", 64 * "b"
WANTED = Wanted(("job-name", "team"), ("example.com/owner",))


def read(told: Any) -> Pod:
    """The pod that is told of."""
    record = read_pod(json.dumps(told).encode(), WANTED)
    assert record is not None
    return record.pod


def test_what_is_kept_of_a_pod() -> None:
    """The labels and annotations that were asked for, the controller's kind, containers by id."""
    told = pod(
        "uid-1",
        "train-0",
        labels={"job-name": "train", "pod-template-hash": "x"},
        annotations={"example.com/owner": "Ann", "other": "y" * 100_000},
        ownerReferences=[{"kind": "Node"}, {"kind": "Job", "controller": True}],
        containerStatuses=[{"name": "main", "containerID": f"containerd://{CID}"}, {"name": "waiting"}],
        initContainerStatuses=[{"name": "init", "containerID": f"cri-o://{CID2}"}],
        phase="Running",
    )
    assert read(told) == Pod(
        "uid-1",
        "train-0",
        "default",
        {"job-name": "train"},
        {"example.com/owner": "Ann"},
        "Job",
        {CID: "main", CID2: "init"},
    )


@pytest.mark.parametrize("phase", ["Succeeded", "Failed", "Running", ""])
def test_a_pod_that_has_ended(phase: str) -> None:
    """Its phase says so."""
    record = read_pod(json.dumps(pod("u", "n", phase=phase)).encode(), WANTED)
    assert record
    assert record.has_ended == (phase in {"Succeeded", "Failed"})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (rb'"a\udcff"', "a\ufffd"),
        (rb'"\ud800"', "\ufffd"),
        (rb'"\ud83d\ude00 \\ud800"', "\U0001f600 \\ud800"),
        (b'"\xff"', "\ufffd"),
        (b'"\xc0\x80"', "\ufffd\ufffd"),
        (rb'"a\u0000\nb"', "a\ufffd\ufffdb"),
    ],
)
def test_h01_an_annotation_that_is_not_unicode(value: bytes, expected: str) -> None:
    """H01: it is replaced, and the pod stays."""
    raw = b'{"metadata":{"uid":"u","name":"n","annotations":{"x":"\\udcff","example.com/owner":%s}}}' % value
    record = read_pod(raw, WANTED)
    assert record
    assert record.pod.annotations == {"example.com/owner": expected}


def test_h04_long_texts() -> None:
    """H04: each is bounded, and two that differ at their end stay two."""
    owners = [
        read(pod("u" * 999, "n" * 999, annotations={"example.com/owner": "x" * 100_000 + end})) for end in ("a", "b")
    ]
    first, second = (one.annotations["example.com/owner"] for one in owners)
    assert first != second
    assert max(len(text) for one in owners for text in (one.uid, one.name, *one.annotations.values())) == 200


@pytest.mark.parametrize("wrong", [1, [], {}, None, True])
@pytest.mark.parametrize("place", ["labels", "annotations"])
def test_a_label_of_a_wrong_type_is_left_out(place: str, wrong: object) -> None:
    """The others stay."""
    metadata: dict[str, Any] = {place: {"job-name": wrong, "team": "t", "example.com/owner": "o"}}
    told = read(pod("u", "n", **metadata))
    assert {**told.labels, **told.annotations} in ({"team": "t"}, {"example.com/owner": "o"})


def test_a_list_leaves_out_what_is_no_pod() -> None:
    """And keeps the others."""
    items = [pod("u", "n"), {}, [], 1, None, {"metadata": {"uid": 1}}, {"metadata": {"name": "n"}}]
    raw = json.dumps({"metadata": {"resourceVersion": "7"}, "items": items}).encode()
    pods, version = read_pods(raw, WANTED)
    assert (list(pods), version) == (["u"], "7")


NESTED = b"[" * 200_000 + b"]" * 200_000


@given(
    st.binary() | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(lambda x: json.dumps(x).encode())
)
@example(NESTED)
@example(b'{"metadata":{"uid":"u","name":"n","x":' + NESTED + b"}}")
@example(b'{"items":[' + NESTED + b"]}")
@example(b'{"metadata":{"resourceVersion":"' + b"9" * 100_000 + b'"}}')
def test_arbitrary_bytes_are_refused_in_order(raw: bytes) -> None:
    """With ValueError or None, never otherwise."""
    assert read_pod(raw, WANTED) is None or b"uid" in raw
    for reader in (lambda raw: read_pods(raw, WANTED), read_slices, lambda raw: decode(raw, WatchEvent)):
        with suppress(ValueError):
            reader(raw)


@pytest.mark.parametrize("version", ["v1", "v1beta2", "v1beta1"])
def test_f07_devices_of_resource_slices(version: str) -> None:
    """F07: in the forms of all versions, also with the driver's domain before an attribute."""
    devices: dict[str, dict[str, Any]] = {
        "gpu-0": {"uuid": {"string": "GPU-0"}, "minor": {"int": 0}},
        "gpu-1": {"gpu.nvidia.com/uuid": {"string": "GPU-1"}},
        "gpu-2-mig": {"parentUUID": {"string": "GPU-2"}, "profile": {"string": "1g.10gb"}},
        "wrong": {"uuid": {"string": 7}},
    }
    old = slice_of({"gpu-0": {"uuid": {"string": "GPU-old"}}, "gone": {}}, generation=1, version=version)
    new = slice_of(devices, generation=2, version=version)
    raw = json.dumps({"metadata": {}, "items": [new, old, {"spec": {"devices": 1}}, 5]}).encode()
    assert read_slices(raw) == {
        ("gpu.nvidia.com", "node-1", "gpu-0"): SliceDevice("GPU-0"),
        ("gpu.nvidia.com", "node-1", "gpu-1"): SliceDevice("GPU-1"),
        ("gpu.nvidia.com", "node-1", "gpu-2-mig"): SliceDevice("", "GPU-2", "1g.10gb"),
        ("gpu.nvidia.com", "node-1", "wrong"): SliceDevice(),
    }
