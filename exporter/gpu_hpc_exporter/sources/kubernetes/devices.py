"""Every spelling of a GPU in Kubernetes, to the UUID that NVML gives it; never to another GPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gpu_hpc_exporter.model import Gpu

NVIDIA_DRA_DRIVER: Final = "gpu.nvidia.com"

_UUID: Final = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_REPLICA: Final = "(?:::[0-9]{1,5}|-[0-9]{1,5})?"
"""What time-slicing and MPS append: `::7` by NVIDIA's plugin, `-7` by others."""
_NAMED: Final = re.compile(f"((?:gpu|mig)-{_UUID}){_REPLICA}")
_OLD_INSTANCE: Final = re.compile(f"mig-(gpu-{_UUID})/([0-9]{{1,3}})/[0-9]{{1,3}}{_REPLICA}")
"""A MIG instance before driver 470: GPU, GPU instance, compute instance."""
_PREFIX: Final = re.compile("((?:gpu|mig)-[0-9a-f]{8}[0-9a-f-]{0,28})(?:::[0-9]{1,5})?")
_FILE: Final = re.compile("nvidia([0-9]{1,4})(?:/gi([0-9]{1,3}))?(?:/vgpu[0-9]{1,5})?")
"""Google's plugin: the device file's minor number, GPU instance, share."""
_GPU_RESOURCE: Final = re.compile(r"nvidia\.com/(?:gpu|mig-)[\w.-]*")
_DRA_GPU: Final = re.compile("gpu-([0-9]{1,4})")
_MAX_ID: Final = 256


@dataclass(frozen=True, slots=True)
class DynamicDevice:
    """A device by the names that dynamic resource allocation gives it; `cdi`: qualified names of its CDI devices."""

    driver: str
    pool: str
    name: str
    cdi: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SliceDevice:
    """What a ResourceSlice tells of a device. One that is made on demand has a parent and a profile, but no UUID."""

    uuid: str = ""
    parent_uuid: str = ""
    profile: str = ""


SliceKey = tuple[str, str, str]
"""Driver, pool, device."""


class DeviceNames:
    """The GPUs of one inventory by all their names. `minors`: number of `/dev/nvidia<n>` by the GPU's UUID.

    `gpu_resources`: renamed resources that are GPUs, besides `nvidia.com/gpu…` and `nvidia.com/mig-…`.
    """

    def __init__(
        self, gpus: Iterable[Gpu] = (), minors: Mapping[str, int] | None = None, gpu_resources: Iterable[str] = ()
    ) -> None:
        self._gpus = tuple(gpus)
        self._by_uuid = {gpu.uuid.lower(): gpu.uuid for gpu in self._gpus}
        self._gpu_resources = frozenset(gpu_resources)
        minors = minors or {}
        self._by_minor = {minors[gpu.uuid]: gpu for gpu in self._gpus if not gpu.parent_uuid and gpu.uuid in minors}

    @property
    def has_gpus(self) -> bool:
        """Whether there is any GPU in the inventory."""
        return bool(self._gpus)

    def is_gpu_resource(self, resource: str) -> bool:
        """Whether the resource's name says that its devices are GPUs; others may be, as their ids then prove."""
        return resource in self._gpu_resources or _GPU_RESOURCE.fullmatch(resource) is not None

    def resolve(self, resource: str, device_id: str) -> str:
        """UUID of the GPU or MIG instance that a device plugin means, "" where that is not certain."""
        if len(device_id) > _MAX_ID:
            return ""
        text = device_id.lower()
        return self._by_uuid.get(text) or self._by_name(text) or self._by_file(resource, device_id)

    def resolve_dynamic(
        self, devices: Iterable[DynamicDevice], slices: Mapping[SliceKey, SliceDevice]
    ) -> dict[DynamicDevice, str]:
        """UUIDs of the devices that are certainly these GPUs; the others are missing."""
        devices = tuple(dict.fromkeys(devices))
        found = {device: self._by_slice(device, slices) or self._by_driver(device) for device in devices}
        found |= self._made_on_demand([device for device in devices if not found[device]], slices)
        return {device: uuid for device, uuid in found.items() if uuid}

    def _by_name(self, text: str) -> str:
        if named := _NAMED.fullmatch(text):
            return self._by_uuid.get(named[1], "")
        if old := _OLD_INSTANCE.fullmatch(text):
            return self._instance(self._by_uuid.get(old[1], ""), old[2])
        if prefix := _PREFIX.fullmatch(text):
            found = [uuid for lower, uuid in self._by_uuid.items() if lower.startswith(prefix[1])]
            return found[0] if len(found) == 1 else ""
        return ""

    def _by_file(self, resource: str, device_id: str) -> str:
        """Other plugins give out device files too, so only a GPU's resource counts."""
        file = _FILE.fullmatch(device_id)
        if file is None or not self.is_gpu_resource(resource):
            return ""
        gpu = self._by_minor.get(int(file[1]))
        if gpu is None:
            return ""
        return gpu.uuid if file[2] is None else self._instance(gpu.uuid, file[2])

    def _instance(self, parent_uuid: str, gpu_instance: str) -> str:
        """The only MIG row of a GPU instance: rows do not tell its compute instances apart."""
        found = [
            gpu.uuid
            for gpu in self._gpus
            if parent_uuid and gpu.parent_uuid == parent_uuid and gpu.gpu_instance == str(int(gpu_instance))
        ]
        return found[0] if len(found) == 1 else ""

    def _by_slice(self, device: DynamicDevice, slices: Mapping[SliceKey, SliceDevice]) -> str:
        told = slices.get((device.driver, device.pool, device.name))
        return self._by_uuid.get(told.uuid.lower(), "") if told else ""

    def _by_driver(self, device: DynamicDevice) -> str:
        """Without a slice: a UUID among the CDI names, or the number of a GPU.

        NVIDIA's driver has counted by index first, by minor number later: only where both agree is it certain.
        """
        if device.driver != NVIDIA_DRA_DRIVER:
            return ""
        told = {self._by_uuid.get(name.rpartition("=")[2].lower(), "") for name in device.cdi} - {""}
        if len(told) == 1:
            return told.pop()
        numbered = _DRA_GPU.fullmatch(device.name)
        if told or numbered is None:
            return ""
        gpu = self._by_minor.get(int(numbered[1]))
        return gpu.uuid if gpu is not None and gpu.index == int(numbered[1]) else ""

    def _made_on_demand(
        self, devices: list[DynamicDevice], slices: Mapping[SliceKey, SliceDevice]
    ) -> dict[DynamicDevice, str]:
        """MIG instances that the driver made for a claim: the only one of its profile on its GPU."""
        wanted = {device: kind for device in devices if (kind := _kind(device, slices))}
        claims = Counter(wanted.values())
        rows: dict[tuple[str, str], list[str]] = {}
        for gpu in self._gpus:
            rows.setdefault((gpu.parent_uuid.lower(), gpu.profile), []).append(gpu.uuid)
        return {
            device: rows[kind][0]
            for device, kind in wanted.items()
            if claims[kind] == 1 and len(rows.get(kind, ())) == 1
        }


def _kind(device: DynamicDevice, slices: Mapping[SliceKey, SliceDevice]) -> tuple[str, str] | None:
    """Parent and profile of a MIG instance that a slice tells without its UUID."""
    told = slices.get((device.driver, device.pool, device.name))
    if told is None or told.uuid or not (told.parent_uuid and told.profile):
        return None
    return told.parent_uuid.lower(), told.profile
