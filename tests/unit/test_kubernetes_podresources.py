"""The kubelet, real gRPC over a unix socket: what it tells, and all the ways in which it does not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_kubelet import Claim, Container, FakeKubelet, Pod, encode, running
from gpu_hpc_exporter.sources.kubernetes import podresources
from gpu_hpc_exporter.sources.kubernetes.devices import DynamicDevice
from gpu_hpc_exporter.sources.kubernetes.messages import ListResponseParser
from gpu_hpc_exporter.sources.kubernetes.podresources import Holding, KubeletError, PodResourcesClient
from unit.objects import G0, G1

GPU = "nvidia.com/gpu"
PODS = (
    Pod("train-0", [Container("main", [(GPU, [G0.uuid, G1.uuid])]), Container("sidecar")], "ml"),
    Pod("web-1", [Container("web")]),
    Pod("shared-2", [Container("main", [("nvidia.com/gpu.shared", [f"{G0.uuid}::0"])])]),
    Pod("dynamic-3", [Container("main", claims=[Claim("gpu-0", cdi=("k8s.gpu.nvidia.com/claim=c-gpu-0",))])]),
)
HOLDINGS = (
    Holding("ml", "train-0", "main", ((GPU, G0.uuid), (GPU, G1.uuid))),
    Holding("default", "shared-2", "main", (("nvidia.com/gpu.shared", f"{G0.uuid}::0"),)),
    Holding(
        "default",
        "dynamic-3",
        "main",
        dynamic=(DynamicDevice("gpu.nvidia.com", "node-1", "gpu-0", ("k8s.gpu.nvidia.com/claim=c-gpu-0",)),),
    ),
)


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[FakeKubelet]:
    """One that tells of four pods."""
    with running(tmp_path / "kubelet.sock", PODS) as fake:
        yield fake


def failure_of(client: PodResourcesClient) -> KubeletError:
    """Why it tells nothing."""
    with pytest.raises(KubeletError) as failure:
        client.list()
    assert len(str(failure.value)) < 600
    return failure.value


def test_what_containers_hold(kubelet: FakeKubelet) -> None:
    """By device plugins and by claims; containers without devices are left out."""
    assert PodResourcesClient(kubelet.socket).list() == HOLDINGS


def test_bytes_of_kubernetes_own_definition(kubelet: FakeKubelet) -> None:
    """Encoded by protoc from k8s.io/kubelet's api.proto of July 2026, with a value in each field."""
    kubelet.raw = bytes.fromhex(
        "0ac0010a016e12026e731ab2010a016312240a0e6e76696469612e636f6d2f67707512054750552d6112054750552d621a040a020801"
        "1a40000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f30313233"
        "3435363738393a3b3c3d3e3f220e0a066d656d6f72791080808080042a351202636c1a026e73222b0a090a076b38732f783d79120e67"
        "70752e6e76696469612e636f6d1a046e6f646522056770752d302a017322020102"
    )
    dynamic = DynamicDevice("gpu.nvidia.com", "node", "gpu-0", ("k8s/x=y",))
    expected = Holding("ns", "n", "c", ((GPU, "GPU-a"), (GPU, "GPU-b")), (dynamic,))
    assert PodResourcesClient(kubelet.socket).list() == (expected,)


def test_h01_names_that_are_not_unicode(kubelet: FakeKubelet) -> None:
    """H01: they are replaced, and the other pods stay."""
    kubelet.pods = (Pod("", [Container("a\nb", [(GPU, ["\x00"])])], raw_name=b"\xff\xc0\x80"), *PODS)
    first, *others = PodResourcesClient(kubelet.socket).list()
    assert (first.pod, first.container) == (3 * "\ufffd", "a\ufffdb")
    assert tuple(others) == HOLDINGS


def test_h04_names_of_any_length(kubelet: FakeKubelet) -> None:
    """H04: two that are equal for their first 200 bytes stay two."""
    kubelet.pods = [Pod("é" * 2_000 + end, [Container("main", [(GPU, [G0.uuid])])]) for end in "ab"]
    first, second = PodResourcesClient(kubelet.socket).list()
    assert first.pod != second.pod
    assert len(first.pod.encode()) <= 200 >= len(second.pod.encode())


def test_a_kubelet_that_hangs(kubelet: FakeKubelet) -> None:
    """It is left after the deadline, and asked with success once it answers again."""
    kubelet.hangs = True
    client = PodResourcesClient(kubelet.socket, deadline_s=0.2)
    assert "has not answered within 0.2 s" in str(failure_of(client))
    kubelet.hangs = False
    assert PodResourcesClient(kubelet.socket).list() == HOLDINGS


def test_a_call_under_way_is_abandoned(kubelet: FakeKubelet) -> None:
    """By another thread, at once, and for ever."""
    kubelet.hangs = True
    client = PodResourcesClient(kubelet.socket, deadline_s=60)
    failures: list[KubeletError] = []
    thread = threading.Thread(target=lambda: failures.append(failure_of(client)))
    thread.start()
    assert kubelet.wait_for_calls(1)
    client.abandon()
    thread.join(10)
    assert failures
    assert failure_of(client).state == "failed"
    assert kubelet.calls == 1


def test_a_kubelet_that_restarts(kubelet: FakeKubelet) -> None:
    """It has another socket under the same name; in between it is missing."""
    client = PodResourcesClient(kubelet.socket)
    client.list()
    kubelet.stop()
    assert failure_of(client).state == "unsupported"
    kubelet.start()
    assert client.list() == HOLDINGS


def test_a_socket_without_a_listener(tmp_path: Path) -> None:
    """As a kubelet that was killed leaves it."""
    import socket  # noqa: PLC0415  this one test needs it

    path = tmp_path / "kubelet.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    failure = failure_of(PodResourcesClient(path))
    assert failure.state == "failed"
    assert "UNAVAILABLE" in str(failure)


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (grpc.StatusCode.PERMISSION_DENIED, "no_permission"),
        (grpc.StatusCode.UNIMPLEMENTED, "unsupported"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "failed"),
        (grpc.StatusCode.INTERNAL, "failed"),
    ],
)
def test_a_kubelet_that_refuses(kubelet: FakeKubelet, code: grpc.StatusCode, state: str) -> None:
    """The state says what it makes of the source."""
    kubelet.code = code
    assert failure_of(PodResourcesClient(kubelet.socket)).state == state


@pytest.mark.parametrize("raw", [b"\xff" * 100, b"\x0a\x05ab", b"<html>", b"\x0a\xff\xff\xff\xff\x0f"])
def test_a_kubelet_that_lies(kubelet: FakeKubelet, raw: bytes) -> None:
    """What is no answer is told as such."""
    kubelet.raw = raw
    failure = failure_of(PodResourcesClient(kubelet.socket))
    assert failure.state == "failed"
    assert "answers no PodResources" in str(failure)


def test_a_large_answer(kubelet: FakeKubelet) -> None:
    """Above the 4 MB that gRPC takes by default, with no more containers and devices kept than make sense."""
    many = [f"{G0.uuid}::{replica}" for replica in range(2_000)]
    kubelet.pods = [Pod(f"pod-{number}", [Container("main", [(GPU, many)])]) for number in range(100)]
    assert len(encode(kubelet.pods)) > 8_000_000
    holdings = PodResourcesClient(kubelet.socket).list()
    assert len(holdings) == 100
    assert max(len(holding.devices) for holding in holdings) == 1_024


def test_an_answer_that_is_too_large(kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not taken into memory."""
    monkeypatch.setattr(podresources, "_MAX_ANSWER", 1_000)
    kubelet.raw = b"\x0a\x00" * 10_000
    failure = failure_of(PodResourcesClient(kubelet.socket))
    assert failure.state == "failed"
    assert "RESOURCE_EXHAUSTED" in str(failure)


def test_calls_leave_nothing_behind(kubelet: FakeKubelet) -> None:
    """No descriptor and no thread, whether they succeed or not."""
    client, hasty = PodResourcesClient(kubelet.socket), PodResourcesClient(kubelet.socket, deadline_s=0.01)

    def used() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()  # noqa: PTH208

    for _ in range(3):
        client.list()
    before = used()
    for _ in range(5):
        for _ in range(10):
            client.list()
        kubelet.hangs = True
        failure_of(hasty)
        kubelet.hangs = False
    descriptors, threads = used()
    assert descriptors <= before[0] + 3
    assert threads <= before[1] + 3


def test_no_node_of_kubernetes(tmp_path: Path) -> None:
    """Without a socket nothing is loaded or asked."""
    failure = failure_of(PodResourcesClient(tmp_path / "kubelet.sock"))
    assert failure.state == "unsupported"
    assert "no Kubernetes node" in str(failure)


def test_without_grpc(kubelet: FakeKubelet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state tells how to get it."""
    monkeypatch.setitem(sys.modules, "grpc", None)
    failure = failure_of(PodResourcesClient(kubelet.socket))
    assert failure.state == "unsupported"
    assert "pip install gpu-hpc-exporter[kubernetes]" in str(failure)


def test_the_source_is_imported_without_grpc() -> None:
    """It is 9 MB, and most installations have no use for it."""
    code = (
        "import sys, gpu_hpc_exporter.sources.kubernetes.source; print('grpc' in sys.modules, 'google' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert result.stdout.split() == ["False", "False"]


def environment() -> dict[str, str]:
    """For a child that finds the same exporter: no HOME, and nowhere to write."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": "/nonexistent"}


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(("mode", "expected"), [(0o777, "3"), (0o600, "no_permission user 65534 may not open")])
def test_m05_as_nobody(kubelet: FakeKubelet, tmp_path: Path, mode: int, expected: str) -> None:
    """M05: what the socket allows works without root, HOME or /tmp; what it does not has a state that says so."""
    within = tmp_path.relative_to(tempfile.gettempdir())
    for directory in (tmp_path, *tmp_path.parents[: len(within.parts) - 1]):
        directory.chmod(0o755)
    kubelet.socket.chmod(mode)
    code = f"""
import os
from pathlib import Path
import grpc
from gpu_hpc_exporter.sources.kubernetes.podresources import KubeletError, PodResourcesClient
PodResourcesClient(Path({str(kubelet.socket)!r})).list()  # what it imports may be root's alone on a developer's machine
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    print(len(PodResourcesClient(Path({str(kubelet.socket)!r})).list()))
except KubeletError as error:
    print(error.state, error)
"""
    command = [sys.executable, "-B", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(), cwd="/")
    assert result.stdout.startswith(expected)


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_an_answer_or_none(raw: bytes) -> None:
    """Never anything but ValueError."""
    with suppress(ValueError):
        podresources._holdings(ListResponseParser().parse(raw))  # noqa: SLF001  what a fuzzed answer reaches first
