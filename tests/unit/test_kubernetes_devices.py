"""Every spelling of a GPU in Kubernetes leads to that GPU or to none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_hpc_exporter.sources.kubernetes.devices import DeviceNames, DynamicDevice, SliceDevice
from gpu_hpc_exporter.sources.kubernetes.minors import read_minors
from unit.objects import G0, G1, M1

MIG = replace(M1, profile="1g.18gb")
GPUS = (G0, G1, MIG)
MINORS = {G0.uuid: 0, G1.uuid: 1}
NAMES = DeviceNames(GPUS, MINORS, ["example.com/h200"])
GPU = "nvidia.com/gpu"


@pytest.mark.parametrize(
    ("resource", "device_id", "expected"),
    [
        (GPU, G0.uuid, G0),
        (GPU, G0.uuid.upper(), G0),
        (GPU, MIG.uuid, MIG),
        ("nvidia.com/gpu.shared", f"{G0.uuid}::0", G0),
        (GPU, f"{G0.uuid}::7", G0),
        (GPU, f"{G0.uuid}-1", G0),
        (GPU, f"{G1.uuid}-0", G1),
        ("nvidia.com/mig-1g.10gb.shared", f"{MIG.uuid}::1", MIG),
        ("nvidia.com/mig-1g.10gb", f"MIG-{G1.uuid}/3/0", MIG),
        ("nvidia.com/mig-1g.10gb.shared", f"MIG-{G1.uuid}/3/0::2", MIG),
        (GPU, "nvidia0", G0),
        (GPU, "nvidia1", G1),
        (GPU, "nvidia0/vgpu2", G0),
        (GPU, "nvidia1/gi3", MIG),
        (GPU, "nvidia1/gi03", MIG),
        (GPU, "nvidia1/gi3/vgpu1", MIG),
        ("example.com/h200", "nvidia1", G1),
        ("example.com/h200", f"{G1.uuid}::3", G1),
        ("other.example.com/anything", G1.uuid, G1),
        (GPU, "MIG-00000000", MIG),
        (GPU, "GPU-00000000-aaaa-bbbb-cccc-000000000001", G1),
    ],
)
def test_f01_every_spelling(resource: str, device_id: str, expected: object) -> None:
    """F01: UUIDs, replicas of time-slicing and MPS, device files, MIG in both forms, renamed resources."""
    assert NAMES.resolve(resource, device_id) == getattr(expected, "uuid", None)


@pytest.mark.parametrize(
    ("resource", "device_id"),
    [
        (GPU, ""),
        (GPU, "0"),
        (GPU, "nvidia2"),
        (GPU, "nvidia0/gi3"),
        (GPU, "nvidia1/gi4"),
        (GPU, "nvidia"),
        (GPU, "nvidia0/"),
        (GPU, "nvidia\u0661"),
        ("smarter-devices/nvidia0", "nvidia0"),
        ("rdma/hca", "nvidia0"),
        (GPU, "GPU-00000000"),  # two GPUs begin so
        (GPU, "GPU-0000"),
        (GPU, "MIG-0000000"),
        (GPU, "GPU-00000000-aaaa-bbbb-cccc-000000000002"),
        (GPU, f"{G0.uuid}::"),
        (GPU, f"{G0.uuid}::1::2"),
        (GPU, f"{G0.uuid}x"),
        (GPU, f"x{G0.uuid}"),
        (GPU, f"{G0.uuid}\n"),
        (GPU, f"MIG-{G0.uuid}/3/0"),
        (GPU, "MIG-GPU-99999999-aaaa-bbbb-cccc-000000000000/3/0"),
        (GPU, f"MIG-{G0.uuid[4:]}"),
        (GPU, "GPU-" + "0" * 100_000),
    ],
)
def test_an_unknown_spelling_is_no_gpu(resource: str, device_id: str) -> None:
    """What could be another GPU, or a device of somebody else's plugin, is none."""
    assert NAMES.resolve(resource, device_id) == ""


def test_without_minor_numbers_no_file_is_a_gpu() -> None:
    """NVML's index is no substitute: the two orders differ on some machines."""
    names = DeviceNames(GPUS)
    assert names.resolve(GPU, "nvidia0") == ""
    assert names.resolve(GPU, G0.uuid) == G0.uuid


def test_two_compute_instances_of_one_gpu_instance_are_not_guessed() -> None:
    """Their rows have the same GPU instance."""
    other = replace(MIG, uuid="MIG-11111111-aaaa-bbbb-cccc-0000000000a1")
    names = DeviceNames((*GPUS, other), MINORS)
    assert names.resolve(GPU, "nvidia1/gi3") == ""
    assert names.resolve(GPU, other.uuid) == other.uuid


@given(st.text(), st.text() | st.from_regex(r"(GPU|MIG|nvidia)[-0-9a-f:/gi]{0,60}", fullmatch=True))
@example(GPU, "MIG-GPU-00000000-aaaa-bbbb-cccc-000000000001/3/0")
@example(GPU, "\udcff\x00")
def test_nothing_maps_to_a_gpu_that_is_not_named(resource: str, device_id: str) -> None:
    """Whatever a device is called: no error, and a UUID only where its own text, or its number, says so."""
    uuid = NAMES.resolve(resource, device_id)
    if uuid and not device_id.startswith("nvidia"):
        told = device_id.lower().removeprefix("mig-gpu-").removeprefix("gpu-").removeprefix("mig-")
        parent = next(gpu for gpu in GPUS if gpu.uuid == uuid).parent_uuid
        assert any(one[4:12] == told[:8] for one in (uuid, parent) if one)


@pytest.mark.parametrize("name", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.10gb.shared"])
def test_resources_that_are_gpus(name: str) -> None:
    """A device of such a resource that nobody knows is worth telling."""
    assert NAMES.is_gpu_resource(name)


@pytest.mark.parametrize("name", ["nvidia.com/hostdev", "rdma/hca", "nvidia.com/GH100_H100", "", "xnvidia.com/gpu"])
def test_resources_that_may_be_anything(name: str) -> None:
    """NVIDIA's network plugins use the same domain."""
    assert not NAMES.is_gpu_resource(name)


WHOLE = DynamicDevice("gpu.nvidia.com", "node-1", "gpu-0")
INSTANCE = DynamicDevice("gpu.nvidia.com", "node-1", "gpu-1-mig-1g18gb-19-0")


def key(device: DynamicDevice) -> tuple[str, str, str]:
    """Of a device in the ResourceSlices."""
    return device.driver, device.pool, device.name


def test_f07_a_resource_slice_names_the_gpu() -> None:
    """F07: the UUID of the slice counts, not the number in the name."""
    slices = {key(WHOLE): SliceDevice(uuid=G1.uuid), key(INSTANCE): SliceDevice(uuid=MIG.uuid)}
    assert NAMES.resolve_dynamic([WHOLE, INSTANCE], slices) == {WHOLE: G1.uuid, INSTANCE: MIG.uuid}


def test_f07_without_a_slice() -> None:
    """F07: a number counts where index and minor agree, a UUID among the CDI names always, nothing else."""
    cdi = replace(INSTANCE, cdi=("k8s.gpu.nvidia.com/device=" + MIG.uuid, "k8s.gpu.nvidia.com/claim=x-gpu-1"))
    assert NAMES.resolve_dynamic([WHOLE, INSTANCE, cdi], {}) == {WHOLE: G0.uuid, cdi: MIG.uuid}
    crossed = DeviceNames(GPUS, {G0.uuid: 1, G1.uuid: 0})
    assert crossed.resolve_dynamic([WHOLE], {}) == {}
    other_driver = replace(WHOLE, driver="gpu.example.com")
    assert NAMES.resolve_dynamic([other_driver, replace(WHOLE, name="gpu-7"), replace(WHOLE, name="")], {}) == {}


def test_f07_cdi_names_of_two_gpus_are_not_guessed() -> None:
    """F07: a device is one GPU."""
    both = replace(WHOLE, cdi=(f"a.b/c={G0.uuid}", f"a.b/c={G1.uuid}"))
    assert NAMES.resolve_dynamic([both], {}) == {}


def test_f07_an_instance_made_on_demand() -> None:
    """F07: the slice has a parent and a profile only; certain while the GPU has one such instance for one claim."""
    slices = {key(INSTANCE): SliceDevice(parent_uuid=G1.uuid, profile="1g.18gb")}
    assert NAMES.resolve_dynamic([INSTANCE, INSTANCE], slices) == {INSTANCE: MIG.uuid}
    second = replace(MIG, uuid="MIG-11111111-aaaa-bbbb-cccc-0000000000a1", gpu_instance="4")
    assert DeviceNames((*GPUS, second)).resolve_dynamic([INSTANCE], slices) == {}
    other = replace(INSTANCE, name="gpu-1-mig-1g18gb-19-1")
    two = {**slices, key(other): SliceDevice(parent_uuid=G1.uuid, profile="1g.18gb")}
    assert NAMES.resolve_dynamic([INSTANCE, other], two) == {}
    assert NAMES.resolve_dynamic([INSTANCE], {key(INSTANCE): SliceDevice(parent_uuid=G0.uuid, profile="1g.18gb")}) == {}


@given(st.text(), st.text(), st.text(), st.lists(st.text(), max_size=3))
def test_arbitrary_dynamic_devices_never_raise(driver: str, pool: str, name: str, cdi: list[str]) -> None:
    """Nor do they become a GPU: none of this names one."""
    assert NAMES.resolve_dynamic([DynamicDevice(driver, pool, name, tuple(cdi))], {}) == {}


def write_information(procfs: Path, bus: str, text: str) -> None:
    """A GPU's file as the driver writes it."""
    directory = procfs / "driver/nvidia/gpus" / bus
    directory.mkdir(parents=True)
    (directory / "information").write_text(text)


def test_minor_numbers_of_the_driver(tmp_path: Path) -> None:
    """As far as the driver tells; a GPU that is not initialised has no UUID yet."""
    for bus, uuid, minor in (("0000:17:00.0", G0.uuid, 4), ("0000:99:00.0", "GPU-????????-????-????-????", 5)):
        text = f"Model: \t\t NVIDIA H200\nIRQ:   \t\t 60\nGPU UUID: \t {uuid}\nBus Location: \t {bus}\n"
        write_information(tmp_path, bus, f"{text}Device Minor: \t {minor}\nGPU Excluded:\t No\n")
    write_information(tmp_path, "0000:a0:00.0", "Device Minor: \t 6\n" + "x" * 100_000)
    (tmp_path / "driver/nvidia/gpus/0000:b0:00.0").mkdir()
    assert read_minors(tmp_path) == {G0.uuid: 4}


def test_without_a_driver_there_are_no_minor_numbers(tmp_path: Path) -> None:
    """As in a container that does not show /proc/driver."""
    assert read_minors(tmp_path) == {}
