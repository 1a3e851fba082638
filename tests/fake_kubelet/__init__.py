"""A fake kubelet: a real gRPC server of PodResources v1 on a unix socket, that hangs and lies as it is told.

Its messages are put together by hand, from the field numbers of the public API: that the exporter reads them proves
more than two ends that share one table.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

__all__ = ["Claim", "Container", "FakeKubelet", "Pod", "encode"]


@dataclass(frozen=True)
class Claim:
    """A device by dynamic resource allocation."""

    device: str
    driver: str = "gpu.nvidia.com"
    pool: str = "node-1"
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True)
class Container:
    """A container; `devices`: resource name and ids."""

    name: str
    devices: Sequence[tuple[str, Sequence[str]]] = ()
    claims: Sequence[Claim] = ()


@dataclass(frozen=True)
class Pod:
    """A pod by its name; `raw_name` stands for a name that is not UTF-8."""

    name: str
    containers: Sequence[Container] = ()
    namespace: str = "default"
    raw_name: bytes = b""


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _field(number: int, content: bytes | str) -> bytes:
    content = content.encode() if isinstance(content, str) else content
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _claim(claim: Claim) -> bytes:
    cdi = b"".join(_field(1, _field(1, name)) for name in claim.cdi)
    resource = cdi + _field(2, claim.driver) + _field(3, claim.pool) + _field(4, claim.device) + _field(5, "share")
    return _field(2, "claim") + _field(3, "default") + _field(4, resource)


def _container(container: Container) -> bytes:
    topology = _field(3, _field(1, b"\x08\x01"))
    devices = b"".join(
        _field(2, _field(1, resource) + b"".join(_field(2, one) for one in ids) + topology)
        for resource, ids in container.devices
    )
    cpus = _field(3, bytes(range(64)))
    memory = _field(4, _field(1, "memory") + b"\x10\x80\x80\x04")
    claims = b"".join(_field(5, _claim(claim)) for claim in container.claims)
    return _field(1, container.name) + devices + cpus + memory + claims


def encode(pods: Sequence[Pod]) -> bytes:
    """A ListPodResourcesResponse."""
    return b"".join(
        _field(
            1,
            _field(1, pod.raw_name or pod.name)
            + _field(2, pod.namespace)
            + b"".join(_field(3, _container(container)) for container in pod.containers),
        )
        for pod in pods
    )


@dataclass
class FakeKubelet:
    """Answers with `pods`, or with `raw` where set; while `hangs` is set, not at all; `code` refuses."""

    socket: Path
    pods: Sequence[Pod] = ()
    raw: bytes | None = None
    code: Any = None
    hangs: bool = False
    calls: int = 0
    asked: threading.Condition = field(default_factory=threading.Condition)
    _server: Any = None
    _pool: ThreadPoolExecutor | None = None

    def start(self) -> None:
        """Listen."""
        handler = grpc.unary_unary_rpc_method_handler(self._list)
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool, options=[("grpc.max_send_message_length", -1)])
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("v1.PodResourcesLister", {"List": handler}),)
        )
        self._server.add_insecure_port(f"unix:{self.socket}")
        self._server.start()

    def stop(self) -> None:
        """End, calls under way included; the socket goes."""
        with self.asked:
            self.hangs = False
            self.asked.notify_all()
        self._server.stop(None).wait()
        assert self._pool is not None
        self._pool.shutdown()
        self.socket.unlink(missing_ok=True)

    def wait_for_calls(self, calls: int, timeout: float = 20) -> bool:
        """Whether it has been asked so often in time."""
        with self.asked:
            return self.asked.wait_for(lambda: self.calls >= calls, timeout)

    def _list(self, request: bytes, context: Any) -> bytes:
        assert request == b""
        with self.asked:
            self.calls += 1
            self.asked.notify_all()
            context.add_callback(self._wake)
            self.asked.wait_for(lambda: not (self.hangs and context.is_active()))
        if self.code is not None:
            context.abort(self.code, "as the test says")
        return encode(self.pods) if self.raw is None else self.raw

    def _wake(self) -> None:
        with self.asked:
            self.asked.notify_all()


@contextmanager
def running(socket: Path, pods: Sequence[Pod] = ()) -> Iterator[FakeKubelet]:
    """A fake kubelet that listens."""
    kubelet = FakeKubelet(socket, pods)
    kubelet.start()
    try:
        yield kubelet
    finally:
        kubelet.stop()
