"""Which GPUs and MIG instances there are, by UUID, and what they can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pynvml

from gpu_hpc_exporter.model import Gpu, Link
from gpu_hpc_exporter.sources.nvml.library import FATAL, Handle, driver_errors, error_name
from gpu_hpc_exporter.sources.nvml.readings import count_nvlinks, field_value

T = TypeVar("T")

MIG_SLICES: Final = 7
"""GPU slices that a MIG-capable GPU is cut into (NVIDIA MIG user guide, A100 to B200)."""
_MAX_GPUS: Final = 1024
_MAX_INSTANCES: Final = 64
"""Far above what there is: each one counted is asked, and a driver that is broken may count to 2^32."""

_ARCHITECTURES: Final[dict[int, str]] = {
    code: name.removeprefix("NVML_DEVICE_ARCH_").lower()
    for name, code in vars(pynvml).items()
    if name.startswith("NVML_DEVICE_ARCH_") and isinstance(code, int) and not name.endswith("UNKNOWN")
}


@dataclass(frozen=True, slots=True)
class Instance:
    """One MIG instance: its own handle for readings, its GPU instance id for GPM."""

    handle: Handle
    gpu_instance_id: int
    gpu: Gpu


@dataclass(frozen=True, slots=True)
class Device:
    """One physical GPU with its MIG instances; NVML gives both handles."""

    handle: Handle
    gpu: Gpu
    instances: tuple[Instance, ...] = ()
    is_vgpu: bool = False
    """A guest's share of a GPU: calls for the physical board fail there, or fill the guest's kernel log."""


Fingerprint = tuple[tuple[str, ...], ...]
"""Per index: the GPU's UUID and those of its MIG instances, or the error it answers."""


HUNG: Final = ("hung",)
"""In place of a GPU that must not be asked, since a call for it has not returned."""


def count_devices() -> int:
    """How many physical GPUs the driver counts. Raises DriverCallError."""
    with driver_errors():
        return min(int(pynvml.nvmlDeviceGetCount()), _MAX_GPUS)


def describe(index: int) -> Device:
    """The GPU at an index. Raises DriverCallError."""
    with driver_errors():
        return _describe(pynvml.nvmlDeviceGetHandleByIndex(index), index)


def take_fingerprint(skipped: frozenset[int]) -> Fingerprint:
    """What there is now, from calls of a few microseconds; those `skipped` are not asked.

    Raises DriverCallError without a count.
    """
    return tuple(HUNG if index in skipped else _identify(index) for index in range(count_devices()))


def _identify(index: int) -> tuple[str, ...]:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _uuid(handle)
        instances = _instance_handles(handle) if _mig_mode(handle) == "enabled" else ()
        return (uuid, *map(_uuid, instances))
    except pynvml.NVMLError as error:
        return (error_name(error),)


def _describe(handle: Handle, index: int) -> Device:
    mode = _optional(lambda: pynvml.nvmlDeviceGetVirtualizationMode(handle))
    is_vgpu = mode == pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU
    major_minor = _optional(lambda: pynvml.nvmlDeviceGetCudaComputeCapability(handle))
    gpu = Gpu(
        uuid=_uuid(handle),
        index=index,
        name=_text(lambda: pynvml.nvmlDeviceGetName(handle)),
        architecture=_ARCHITECTURES.get(_optional(lambda: pynvml.nvmlDeviceGetArchitecture(handle)) or -1, ""),
        compute_capability="{}.{}".format(*major_minor) if major_minor else "",
        pci_bus_id=_text(lambda: pynvml.nvmlDeviceGetPciInfo(handle).busId).lower(),
        serial=_text(lambda: pynvml.nvmlDeviceGetSerial(handle)),
        vbios=_text(lambda: pynvml.nvmlDeviceGetVbiosVersion(handle)),
        mig_mode=_mig_mode(handle),
        links=() if is_vgpu else _links(handle),
    )
    instances = _list_instances(handle, gpu) if gpu.mig_mode == "enabled" else ()
    return Device(handle, gpu, instances, is_vgpu)


def _mig_mode(handle: Handle) -> str:
    modes = _optional(lambda: pynvml.nvmlDeviceGetMigMode(handle))
    if modes is None:
        return ""
    return "enabled" if modes[0] == pynvml.NVML_DEVICE_MIG_ENABLE else "disabled"


def _links(handle: Handle) -> tuple[Link, ...]:
    """Links that exist and are up: one that is down moves nothing and must not count as unmeasured."""
    links: list[Link] = []
    if _optional(lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)):
        links.append("pcie")
    nvlinks = _optional(lambda: count_nvlinks(handle))
    if nvlinks and nvlinks[1]:
        links.append("nvlink")
    if _optional(lambda: field_value(handle, pynvml.NVML_FI_DEV_C2C_LINK_COUNT)):
        links.append("c2c")
    return tuple(links)


def _list_instances(parent: Handle, gpu: Gpu) -> tuple[Instance, ...]:
    return tuple(_describe_instance(handle, gpu) for handle in _instance_handles(parent))


def _instance_handles(parent: Handle) -> tuple[Handle, ...]:
    """Handles of the MIG instances; places without one are skipped."""
    places = range(min(_optional(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(parent)) or 0, _MAX_INSTANCES))
    found = (_instance_at(parent, place) for place in places)
    return tuple(handle for handle in found if handle is not None)


def _instance_at(parent: Handle, place: int) -> Handle | None:
    return _optional(lambda: pynvml.nvmlDeviceGetMigDeviceHandleByIndex(parent, place))


def _describe_instance(handle: Handle, parent: Gpu) -> Instance:
    instance_id = int(pynvml.nvmlDeviceGetGpuInstanceId(handle))
    attributes = _optional(lambda: pynvml.nvmlDeviceGetAttributes(handle))
    slices = int(attributes.gpuInstanceSliceCount) if attributes else 0
    memory_gb = round(attributes.memorySizeMB / 1024) if attributes else 0
    return Instance(
        handle,
        instance_id,
        Gpu(
            uuid=_uuid(handle),
            index=parent.index,
            name=parent.name,
            architecture=parent.architecture,
            compute_capability=parent.compute_capability,
            pci_bus_id=parent.pci_bus_id,
            mig_mode="enabled",
            gpu_instance=str(instance_id),
            profile=f"{slices}g.{memory_gb}gb" if slices else "",
            parent_uuid=parent.uuid,
            peak_share=slices / MIG_SLICES if slices else 0.0,
        ),
    )


def _optional(call: Callable[[], T]) -> T | None:
    """The call's answer, or None where the GPU does not give it; fatal codes pass through."""
    try:
        return call()
    except pynvml.NVMLError as error:
        if error.value in FATAL:
            raise
        return None


def _uuid(handle: Handle) -> str:
    """Raises NVMLError also for one that is no text or empty: nothing could be told apart by it."""
    try:
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    except UnicodeDecodeError as error:  # pynvml decodes strictly
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN) from error
    if not uuid:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
    return uuid


def _text(call: Callable[[], Any]) -> str:
    try:
        answer = _optional(call)
    except UnicodeDecodeError:
        return "\N{REPLACEMENT CHARACTER}"
    if isinstance(answer, bytes):
        return answer.decode("utf-8", "replace")
    return "" if answer is None else str(answer)
