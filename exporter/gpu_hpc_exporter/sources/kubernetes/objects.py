"""Objects of the Kubernetes API, out of JSON that may be anything."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from gpu_hpc_exporter.jobs.lookups import Pod
from gpu_hpc_exporter.sources.kubernetes.devices import SliceDevice, SliceKey
from gpu_hpc_exporter.sources.kubernetes.text import clean

T = TypeVar("T")

_ENDED: Final = ("Succeeded", "Failed")
_CONTAINER_ID: Final = re.compile("(?:[a-z0-9.-]{1,32}://)?([0-9a-f]{64})")
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
"""An escape of JSON, two that make a surrogate pair together; half a pair is the group."""
_MAX_CONTAINERS: Final = 256
_MAX_PODS: Final = 4_096
_MAX_SLICE_DEVICES: Final = 4_096


class _Owner(msgspec.Struct, frozen=True):
    kind: str = ""
    controller: bool = False


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    uid: str = ""
    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    labels: dict[str, msgspec.Raw] | None = None
    annotations: dict[str, msgspec.Raw] | None = None
    owner_references: list[_Owner] | None = None


class _ContainerStatus(msgspec.Struct, frozen=True):
    name: str = ""
    container_id: str = msgspec.field(default="", name="containerID")


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    container_statuses: list[_ContainerStatus] | None = None
    init_container_statuses: list[_ContainerStatus] | None = None
    ephemeral_container_statuses: list[_ContainerStatus] | None = None


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class _PodObject(msgspec.Struct, frozen=True):
    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _PodStatus = _PodStatus()


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """A line of a watch."""

    type: str
    object: msgspec.Raw


class ErrorStatus(msgspec.Struct, frozen=True):
    """Why the server refuses, in a body or in a watch's ERROR."""

    code: int = 0
    reason: str = ""
    message: str = ""


class _Bookmark(msgspec.Struct, frozen=True):
    metadata: _ListMetadata


class _Attribute(msgspec.Struct, frozen=True):
    string: str = ""


class _BasicDevice(msgspec.Struct, frozen=True):
    attributes: dict[str, msgspec.Raw] | None = None


class _SliceDevice(msgspec.Struct, frozen=True):
    name: str = ""
    attributes: dict[str, msgspec.Raw] | None = None
    basic: _BasicDevice | None = None  # v1beta1


class _Pool(msgspec.Struct, frozen=True):
    name: str = ""
    generation: int = 0


class _SliceSpec(msgspec.Struct, frozen=True):
    driver: str = ""
    pool: _Pool = _Pool()
    devices: list[msgspec.Raw] | None = None


class _Slice(msgspec.Struct, frozen=True):
    spec: _SliceSpec


@dataclass(frozen=True, slots=True)
class Wanted:
    """Keys of the labels and annotations to keep of a pod; the others are not held in memory."""

    labels: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PodRecord:
    """A pod as the API server tells. `has_ended`: it holds its GPUs in the kubelet's books only."""

    pod: Pod
    node: str
    version: str
    has_ended: bool


def decode(raw: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Raises ValueError for what is no such object; text that is not Unicode is no reason."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        pass
    try:
        return msgspec.json.decode(_mend(bytes(raw)), type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(clean(str(error))) from error


def read_pods(raw: bytes, wanted: Wanted) -> tuple[dict[str, PodRecord], str]:
    """Pods by UID and the list's version. A pod that cannot be read is left out. Raises ValueError."""
    listed = decode(raw, _List)
    records = (read_pod(item, wanted) for item in islice(listed.items or (), _MAX_PODS))
    return {record.pod.uid: record for record in records if record}, listed.metadata.resource_version


def read_pod(raw: bytes | msgspec.Raw, wanted: Wanted) -> PodRecord | None:
    """A pod, None for what is none."""
    try:
        told = decode(raw, _PodObject)
    except ValueError:
        return None
    metadata = told.metadata
    if not (metadata.uid and metadata.name):
        return None
    pod = Pod(
        uid=clean(metadata.uid),
        name=clean(metadata.name),
        namespace=clean(metadata.namespace),
        labels=_pick(metadata.labels, wanted.labels),
        annotations=_pick(metadata.annotations, wanted.annotations),
        controller=next((clean(owner.kind) for owner in metadata.owner_references or () if owner.controller), ""),
        containers=_containers(told.status),
    )
    return PodRecord(pod, told.spec.node_name, metadata.resource_version, told.status.phase in _ENDED)


def read_version(raw: msgspec.Raw) -> str:
    """The version that a bookmark tells. Raises ValueError."""
    return decode(raw, _Bookmark).metadata.resource_version


def read_slices(raw: bytes) -> dict[SliceKey, SliceDevice]:
    """Devices of the newest generation of each pool. Raises ValueError."""
    slices = []
    for item in islice(decode(raw, _List).items or (), _MAX_PODS):
        try:
            slices.append(decode(item, _Slice).spec)
        except ValueError:
            continue
    newest: dict[tuple[str, str], int] = {}
    for told in slices:
        key = (told.driver, told.pool.name)
        newest[key] = max(newest.get(key, 0), told.pool.generation)
    current = [told for told in slices if told.pool.generation == newest[told.driver, told.pool.name]]
    pairs = (pair for told in current for pair in _slice_devices(told))
    return dict(islice(pairs, _MAX_SLICE_DEVICES))


def _slice_devices(told: _SliceSpec) -> list[tuple[SliceKey, SliceDevice]]:
    devices = []
    for raw in told.devices or ():
        try:
            device = decode(raw, _SliceDevice)
        except ValueError:
            continue
        attributes = (device.basic.attributes if device.basic else device.attributes) or {}
        uuid, parent, profile = (
            _attribute(attributes, told.driver, name) for name in ("uuid", "parentUUID", "profile")
        )
        key = (clean(told.driver), clean(told.pool.name), clean(device.name))
        devices.append((key, SliceDevice(uuid, parent, profile)))
    return devices


def _attribute(attributes: Mapping[str, msgspec.Raw], driver: str, name: str) -> str:
    """An attribute's text; its name may have the driver's domain before it."""
    raw = attributes.get(name, attributes.get(f"{driver}/{name}"))
    if raw is None:
        return ""
    try:
        return clean(decode(raw, _Attribute).string)
    except ValueError:
        return ""


def _pick(texts: Mapping[str, msgspec.Raw] | None, keys: tuple[str, ...]) -> dict[str, str]:
    picked: dict[str, str] = {}
    for key in keys:
        if texts and key in texts:
            try:
                picked[key] = clean(decode(texts[key], str))
            except ValueError:
                continue
    return picked


def _containers(status: _PodStatus) -> dict[str, str]:
    kinds: tuple[Any, ...] = (
        status.init_container_statuses,
        status.ephemeral_container_statuses,
        status.container_statuses,
    )
    names: dict[str, str] = {}
    for container in islice((one for kind in kinds for one in kind or ()), _MAX_CONTAINERS):
        if found := _CONTAINER_ID.fullmatch(container.container_id):
            names[found[1]] = clean(container.name)
    return names


def _mend(raw: bytes) -> bytes:
    """JSON in which whatever is not Unicode has been replaced."""
    text = raw.decode("utf-8", "replace").encode()
    return _ESCAPE.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], text)
