"""What is known of Kubernetes at one moment: immutable, answered from memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from gpu_hpc_exporter.jobs.lookups import Allocation, Pod
from gpu_hpc_exporter.model import State
from gpu_hpc_exporter.sources.kubernetes.devices import (
    NVIDIA_DRA_DRIVER,
    DeviceNames,
    DynamicDevice,
    SliceDevice,
    SliceKey,
)
from gpu_hpc_exporter.sources.kubernetes.objects import PodRecord
from gpu_hpc_exporter.sources.kubernetes.podresources import Holding

Part = Literal["kubelet", "apiserver"]
PARTS: Final[tuple[Part, ...]] = ("kubelet", "apiserver")


@dataclass(frozen=True, slots=True)
class PartState:
    """How one of the two tells. `told_s`: when it last did, on the monotonic clock, None if never."""

    state: State
    reason: str = ""
    told_s: float | None = None


@dataclass(frozen=True, slots=True)
class KubernetesLookups:
    """Pods and who holds which GPU. `allocations`: by UUID of the GPU or MIG instance, one for each container.

    unknown_devices: devices of containers, as they are spelled, that are GPUs but none of the inventory's.
    """

    pods: Mapping[str, Pod] = field(default_factory=dict)
    pods_by_name: Mapping[tuple[str, str], Pod] = field(default_factory=dict)
    container_names: Mapping[str, str] = field(default_factory=dict)
    allocations: Mapping[str, tuple[Allocation, ...]] = field(default_factory=dict)
    unknown_devices: frozenset[str] = frozenset()
    parts: Mapping[Part, PartState] = field(default_factory=dict)

    def pod(self, uid: str) -> Pod | None:
        """The pod with this UID."""
        return self.pods.get(uid)

    def pod_of(self, namespace: str, name: str) -> Pod | None:
        """The pod that has this name now."""
        return self.pods_by_name.get((namespace, name))

    def container_name(self, container_id: str) -> str:
        """Name of the container with this id of 64 hex digits, "" where unknown."""
        return self.container_names.get(container_id, "")

    def allocations_of(self, device_uuid: str) -> tuple[Allocation, ...]:
        """Containers that hold this GPU or MIG instance: several share one."""
        return self.allocations.get(device_uuid, ())

    def age_seconds(self, part: Part, now_s: float) -> float | None:
        """How long ago the part last told, None if it never did."""
        told = self.parts.get(part)
        return None if told is None or told.told_s is None else max(0.0, now_s - told.told_s)


@dataclass(frozen=True, slots=True)
class Told:
    """All that both have told. `names_hold`: whether the API server's names are recent enough to be the pods' still."""

    holdings: tuple[Holding, ...] = ()
    records: Mapping[str, PodRecord] = field(default_factory=dict)
    slices: Mapping[SliceKey, SliceDevice] = field(default_factory=dict)
    names_hold: bool = True


def build(told: Told, names: DeviceNames, parts: Mapping[Part, PartState]) -> KubernetesLookups:
    """The view of what has been told."""
    pods = {uid: record.pod for uid, record in told.records.items()}
    by_name = _by_name(told.records.values()) if told.names_hold else {}
    allocations, unknown = _allocate(told, names, by_name)
    return KubernetesLookups(
        pods=pods,
        pods_by_name={key: record.pod for key, record in by_name.items()},
        container_names={container: name for pod in pods.values() for container, name in pod.containers.items()},
        allocations=allocations,
        unknown_devices=unknown,
        parts=dict(parts),
    )


def unresolved(told: Told, names: DeviceNames) -> frozenset[DynamicDevice]:
    """Dynamic devices that no ResourceSlice known so far explains."""
    devices = frozenset(device for holding in told.holdings for device in holding.dynamic)
    return devices - names.resolve_dynamic(devices, told.slices).keys()


def _by_name(records: Iterable[PodRecord]) -> dict[tuple[str, str], PodRecord]:
    """Of two pods of one name, of which one is on its way out, the one that has not ended."""
    found: dict[tuple[str, str], PodRecord] = {}
    for record in records:
        key = (record.pod.namespace, record.pod.name)
        if key not in found or found[key].has_ended:
            found[key] = record
    return found


def _allocate(
    told: Told, names: DeviceNames, by_name: Mapping[tuple[str, str], PodRecord]
) -> tuple[dict[str, tuple[Allocation, ...]], frozenset[str]]:
    dynamic = names.resolve_dynamic((device for holding in told.holdings for device in holding.dynamic), told.slices)
    found: dict[str, dict[Allocation, None]] = {}
    unknown: set[str] = set()
    for holding in told.holdings:
        record = by_name.get((holding.namespace, holding.pod))
        if record is not None and record.has_ended:
            continue  # the kubelet goes on listing it until somebody deletes the pod
        uuids, strange = _devices(holding, names, dynamic)
        unknown |= strange
        for uuid in uuids:
            uid = record.pod.uid if record else ""
            allocation = Allocation(uuid, holding.namespace, holding.pod, holding.container, uid)
            found.setdefault(uuid, {})[allocation] = None
    return {uuid: tuple(allocations) for uuid, allocations in found.items()}, frozenset(unknown)


def _devices(holding: Holding, names: DeviceNames, dynamic: Mapping[DynamicDevice, str]) -> tuple[set[str], set[str]]:
    """UUIDs that a container holds, and the spellings of its GPUs that are unknown."""
    uuids: set[str] = set()
    unknown: set[str] = set()
    for resource, device_id in holding.devices:
        if uuid := names.resolve(resource, device_id):
            uuids.add(uuid)
        elif names.is_gpu_resource(resource):
            unknown.add(f"{resource} {device_id}")
    for device in holding.dynamic:
        if uuid := dynamic.get(device, ""):
            uuids.add(uuid)
        elif device.driver == NVIDIA_DRA_DRIVER:
            unknown.add(f"{device.driver} {device.pool}/{device.name}")
    return uuids, unknown
