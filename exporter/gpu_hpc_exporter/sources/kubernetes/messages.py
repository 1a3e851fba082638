"""The messages of the kubelet's PodResources API v1, as far as they are read here.

Their descriptors are built when they are first needed: generated code would say the same in an unreadable form,
and would tie us to the versions of protobuf that its compiler knew. Every text is declared as bytes, which is the
same on the wire: one that is not UTF-8 then spoils nothing else. So is each pod, to be read by itself: in one piece an
answer of empty messages takes thirty times its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, Protocol, cast

SERVICE: Final = "v1.PodResourcesLister"

_PACKAGE: Final = "v1"
_MAX_PODS: Final = 4_096
_MAX_POD: Final = 1 << 20
"""A container with 1,000 devices and 500 processors takes 60 kB."""
_FIELDS: Final[dict[str, tuple[tuple[int, str, str], ...]]] = {
    "ListPodResourcesResponse": ((1, "pod_resources", "repeated bytes"),),
    "PodResources": ((1, "name", "bytes"), (2, "namespace", "bytes"), (3, "containers", "ContainerResources")),
    "ContainerResources": (
        (1, "name", "bytes"),
        (2, "devices", "ContainerDevices"),
        (5, "dynamic_resources", "DynamicResource"),
    ),
    "ContainerDevices": ((1, "resource_name", "bytes"), (2, "device_ids", "repeated bytes")),
    "DynamicResource": ((4, "claim_resources", "ClaimResource"),),
    "ClaimResource": (
        (1, "cdi_devices", "CDIDevice"),
        (2, "driver_name", "bytes"),
        (3, "pool_name", "bytes"),
        (4, "device_name", "bytes"),
    ),
    "CDIDevice": ((1, "name", "bytes"),),
}
"""Number, name and type of each field; a field whose type is a message is repeated."""


class CdiDevice(Protocol):
    """A device by its qualified name, `vendor.com/class=name`."""

    @property
    def name(self) -> bytes: ...


class ClaimResource(Protocol):
    """A device of a claim."""

    @property
    def cdi_devices(self) -> Sequence[CdiDevice]: ...
    @property
    def driver_name(self) -> bytes: ...
    @property
    def pool_name(self) -> bytes: ...
    @property
    def device_name(self) -> bytes: ...


class DynamicResource(Protocol):
    """A claim."""

    @property
    def claim_resources(self) -> Sequence[ClaimResource]: ...


class ContainerDevices(Protocol):
    """Devices of one resource of a device plugin."""

    @property
    def resource_name(self) -> bytes: ...
    @property
    def device_ids(self) -> Sequence[bytes]: ...


class ContainerResources(Protocol):
    """What a container holds."""

    @property
    def name(self) -> bytes: ...
    @property
    def devices(self) -> Sequence[ContainerDevices]: ...
    @property
    def dynamic_resources(self) -> Sequence[DynamicResource]: ...


class PodResources(Protocol):
    """What a pod holds."""

    @property
    def name(self) -> bytes: ...
    @property
    def namespace(self) -> bytes: ...
    @property
    def containers(self) -> Sequence[ContainerResources]: ...


class ListResponseParser:
    """Reads answers to List. Raises ImportError without protobuf."""

    def __init__(self) -> None:
        from google.protobuf import descriptor_pool, message, message_factory  # noqa: PLC0415  an extra

        pool = descriptor_pool.DescriptorPool()
        pool.AddSerializedFile(_describe())
        response, pod = (
            message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
            for name in ("ListPodResourcesResponse", "PodResources")
        )
        self._response, self._pod = response, pod
        self._error = message.DecodeError

    def parse(self, raw: bytes) -> Iterator[PodResources]:
        """The pods of an answer, one after the other. Raises ValueError for what is none."""
        try:
            response: Any = self._response.FromString(raw)
            for pod in islice(response.pod_resources, _MAX_PODS):
                if len(pod) <= _MAX_POD:
                    yield cast("PodResources", self._pod.FromString(pod))
        except self._error as error:
            raise ValueError(str(error)) from error


def _describe() -> bytes:
    from google.protobuf import descriptor_pb2  # noqa: PLC0415  an extra

    file = descriptor_pb2.FileDescriptorProto(name="podresources.proto", package=_PACKAGE, syntax="proto3")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for number, field_name, kind in fields:
            message.field.add(name=field_name, number=number, **_type(kind))
    return file.SerializeToString()


def _type(kind: str) -> dict[str, Any]:
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field  # noqa: PLC0415  an extra

    if kind in _FIELDS:
        return {"type": Field.TYPE_MESSAGE, "type_name": f".{_PACKAGE}.{kind}", "label": Field.LABEL_REPEATED}
    is_repeated = kind.startswith("repeated")
    return {"type": Field.TYPE_BYTES, "label": Field.LABEL_REPEATED if is_repeated else Field.LABEL_OPTIONAL}
