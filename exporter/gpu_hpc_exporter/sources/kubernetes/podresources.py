"""Asks the kubelet which container holds which devices, over its unix socket."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpu_hpc_exporter.model import State
from gpu_hpc_exporter.sources.kubernetes.devices import DynamicDevice
from gpu_hpc_exporter.sources.kubernetes.messages import SERVICE, ContainerResources, ListResponseParser, PodResources
from gpu_hpc_exporter.sources.kubernetes.text import clean

if TYPE_CHECKING:
    import grpc

SOCKET: Final = Path("/var/lib/kubelet/pod-resources/kubelet.sock")
MISSING_LIBRARY: Final = "the kubelet speaks gRPC: pip install gpu-hpc-exporter[kubernetes]"
DEADLINE_S: Final = 5.0

_MAX_ANSWER: Final = 16 << 20
"""What Kubernetes' own client takes; the default of gRPC is 4 MB, which nodes with many pods have passed."""
_MAX_HOLDINGS: Final = 8_192
_MAX_DEVICES: Final = 1_024


@dataclass(frozen=True, slots=True)
class Holding:
    """The devices that a container holds. `devices`: resource name and device id, as the device plugin spells it."""

    namespace: str
    pod: str
    container: str
    devices: tuple[tuple[str, str], ...] = ()
    dynamic: tuple[DynamicDevice, ...] = ()


class KubeletError(Exception):
    """The kubelet told nothing that can be used; `state` is what that makes of the source."""

    def __init__(self, state: State, reason: str) -> None:
        super().__init__(reason)
        self.state: State = state


class PodResourcesClient:
    """Asks once per call, over a new connection each time.

    A connection that is kept would outlive the kubelet's socket, and gRPC's own reconnecting waits for minutes;
    a new one costs a millisecond.
    """

    def __init__(self, socket: Path = SOCKET, deadline_s: float = DEADLINE_S) -> None:
        self._socket = socket
        self._deadline_s = deadline_s
        self._parser: ListResponseParser | None = None
        self._channel: grpc.Channel | None = None
        self._is_abandoned = False

    def list(self) -> tuple[Holding, ...]:
        """What every container holds, those without devices left out. Raises KubeletError within the deadline."""
        self._check_socket()
        try:
            # Its handlers at fork would make each start of a child process wait for its threads.
            os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
            import grpc  # noqa: PLC0415  an extra, and 9 MB

            self._parser = self._parser or ListResponseParser()
        except ImportError as error:
            raise KubeletError("unsupported", MISSING_LIBRARY) from error
        try:
            return _holdings(self._parser.parse(self._call()))
        except grpc.RpcError as error:
            raise self._failure(error) from error
        except ValueError as error:
            raise KubeletError("failed", f"{self._socket} answers no PodResources: {clean(str(error))}") from error

    def abandon(self) -> None:
        """End the call under way, and each that would come, from another thread."""
        self._is_abandoned = True
        channel = self._channel
        if channel is not None:
            channel.close()

    def _check_socket(self) -> None:
        try:
            self._socket.stat()
        except PermissionError as error:
            raise KubeletError("no_permission", self._denied()) from error
        except OSError as error:
            reason = f"no kubelet socket at {self._socket}: no Kubernetes node, or its directory is not mounted"
            raise KubeletError("unsupported", reason) from error
        if not os.access(self._socket, os.R_OK | os.W_OK):
            raise KubeletError("no_permission", self._denied())

    def _denied(self) -> str:
        return f"user {os.getuid()} may not open {self._socket}: it is root's, run the exporter's container as root"

    def _call(self) -> bytes:
        import grpc  # noqa: PLC0415  as above

        options = [
            ("grpc.max_receive_message_length", _MAX_ANSWER),
            ("grpc.use_local_subchannel_pool", 1),  # nothing, a wait before reconnecting least of all, outlives a call
            ("grpc.enable_http_proxy", 0),
            ("grpc.default_authority", "localhost"),  # by default the socket's path, which some servers refuse
        ]
        with grpc.insecure_channel(f"unix:{self._socket}", options) as channel:
            self._channel = channel
            if self._is_abandoned:
                channel.close()
            try:
                answer: bytes = channel.unary_unary(f"/{SERVICE}/List")(b"", timeout=self._deadline_s)
                return answer
            finally:
                self._channel = None

    def _failure(self, error: grpc.RpcError) -> KubeletError:
        import grpc  # noqa: PLC0415  as above

        code = error.code() if isinstance(error, grpc.Call) else None
        detail = clean(str(error.details() or "")) if isinstance(error, grpc.Call) else ""
        match code:
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return KubeletError("failed", f"{self._socket} has not answered within {self._deadline_s:g} s")
            case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
                return KubeletError("no_permission", f"{self._socket} refuses: {detail}")
            case grpc.StatusCode.UNIMPLEMENTED:
                return KubeletError("unsupported", f"{self._socket} has no PodResources v1 (Kubernetes before 1.20)")
        name = code.name if code is not None else "no status"
        return KubeletError("failed", f"{self._socket} answers {name}: {detail}")


def _holdings(pods: Iterable[PodResources]) -> tuple[Holding, ...]:
    """Each of its names is bounded, and so is their number."""
    return tuple(islice(_each_holding(pods), _MAX_HOLDINGS))


def _each_holding(pods: Iterable[PodResources]) -> Iterator[Holding]:
    for pod in pods:
        namespace, name = clean(pod.namespace), clean(pod.name)
        for container in pod.containers:
            devices = tuple(islice(_each_device(container), _MAX_DEVICES))
            dynamic = tuple(islice(_each_dynamic(container), _MAX_DEVICES))
            if name and (devices or dynamic):
                yield Holding(namespace, name, clean(container.name), devices, dynamic)


def _each_device(container: ContainerResources) -> Iterator[tuple[str, str]]:
    for group in container.devices:
        resource = clean(group.resource_name)
        for device_id in group.device_ids:
            yield resource, clean(device_id)


def _each_dynamic(container: ContainerResources) -> Iterator[DynamicDevice]:
    for claim in container.dynamic_resources:
        for device in claim.claim_resources:
            yield DynamicDevice(
                clean(device.driver_name),
                clean(device.pool_name),
                clean(device.device_name),
                tuple(clean(cdi.name) for cdi in islice(device.cdi_devices, _MAX_DEVICES)),
            )
