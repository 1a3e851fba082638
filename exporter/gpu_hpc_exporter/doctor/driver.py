"""Driver, GPUs and their hardware windows, by a probe in a process of its own."""

from __future__ import annotations

import logging
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from gpu_hpc_exporter.doctor import remedies
from gpu_hpc_exporter.doctor.check import Check, Checks, Place, capabilities, read_text, status_of, told
from gpu_hpc_exporter.doctor.probe import DeviceFile, Doing, Line, Loaded, Opened, Order, Report, SourceState
from gpu_hpc_exporter.model import Gpu
from gpu_hpc_exporter.samplers.pm_sampling import why_not_sampled
from gpu_hpc_exporter.sources import procfs
from gpu_hpc_exporter.sources.nvml.library import remedy

log = logging.getLogger(__name__)

States = Mapping[tuple[str, str], SourceState]
"""By source and UUID."""

_MAX_LINE: Final = 4 << 20
_READ: Final = 65_536
_START_S: Final = 10.0
"""How long the probe's own start and end may take, on top of what the driver may."""
_GONE_S: Final = 0.5
_SILENT: Final = "answers nothing"
_OWN_END: Final = "ended with status"
_CRASHED_IN: Final = re.compile(rb"^  File \".{0,4096}\", line \d{1,9} in (nvml\w{1,64})$")
"""A line of the stack that the probe leaves when the driver's library brings it down: the call, by its pynvml name."""
_NVIDIA: Final = "0x10de"
_DISPLAY: Final = "0x03"
_FILE_VERSION: Final = re.compile(r"\.so\.([0-9]+(?:\.[0-9]+)+)$")
_ADMIN_ONLY: Final = re.compile(r"^RmProfilingAdminOnly:\s*([01])\s*$", re.MULTILINE)
_DEVICE_FILE: Final = re.compile(r"nvidia([0-9]{1,4}|ctl|-uvm)")
_READERS: Final = {"0": "everybody", "1": "administrators only"}
_SYS_ADMIN: Final = 21
_PERFMON: Final = 38


def check_host_driver(place: Place) -> Checks:
    """What files tell: the PCI bus, the kernel module, the persistence daemon."""
    on_bus = gpus_on_bus(place)
    module = module_version(place)
    if not on_bus and not module:
        yield Check("PCI bus", "broken", "no NVIDIA GPU, no NVIDIA kernel module", remedies.NO_GPU)
        return
    yield Check("PCI bus", "ok", f"{len(on_bus)} NVIDIA GPU{'' if len(on_bus) == 1 else 's'}")
    if module:
        yield Check("kernel module", "ok", f"nvidia {module}")
    else:
        yield Check("kernel module", "broken", "driver_not_loaded", remedy("driver_not_loaded"))
    daemon = any((place.rootfs / folder / "nvidia-persistenced/socket").exists() for folder in ("run", "var/run"))
    yield Check(
        "nvidia-persistenced",
        "ok",
        "runs" if daemon else "does not run: the exporter itself keeps the GPUs awake, after a slower start",
    )


def gpus_on_bus(place: Place) -> list[str]:
    """PCI addresses of NVIDIA's display devices and accelerators."""
    return [
        device.name
        for device in sorted((place.rootfs / "sys/bus/pci/devices").glob("*"))
        if read_text(device / "vendor").strip() == _NVIDIA and read_text(device / "class").startswith(_DISPLAY)
    ]


def module_version(place: Place) -> str:
    """Of the kernel module that is loaded, "" without one."""
    return procfs.module_version(place.procfs) or read_text(place.rootfs / "sys/module/nvidia/version").strip()


def check_driver(place: Place, *, samples_pm: bool) -> Checks:
    """What the driver does when it is asked. samples_pm: nobody else samples, so PM sampling can be tried."""
    on_bus, module = gpus_on_bus(place), module_version(place)
    report: Report | None = None
    doing, end = "start the probe", ""
    for line in _probe(place, samples_pm=samples_pm):
        match line:
            case Doing(what):
                doing = what
            case Opened(files):
                if files or module:
                    yield _device_files(files)
            case Loaded():
                yield from _library(line, module, is_wanted=bool(on_bus or module))
            case Report():
                report = line
            case str():
                end = line
    if report is not None:
        yield from _reported(place, report, on_bus)
    else:
        yield Check("driver", "broken", f"the probe {end}, about to {doing}", _cure(end))


def _cure(end: str) -> str:
    if end == _SILENT:
        return remedies.HUNG
    return remedies.OWN_FAULT if end.startswith(_OWN_END) else remedies.CRASHED


def _probe(place: Place, *, samples_pm: bool) -> Iterator[Line | str]:
    """The lines of a probe; at last how it ended, where that was without its report."""
    settings = place.config.pm_sampling
    order = Order(
        str(place.driver_root),
        str(place.procfs),
        tuple(device_files(place)),
        round(place.config.sampling_interval_ms * 1e6),
        place.timeout_s,
        settings if samples_pm else None,
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "gpu_hpc_exporter.doctor.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if log.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        if process.stdin is None or process.stdout is None:
            raise OSError("no pipes to the probe")
        with suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(msgspec.json.encode(order))
        is_told, call = False, ""
        for data in _lines(process.stdout.fileno(), time.monotonic() + place.timeout_s + _START_S):
            line = _decoded(data)
            if line is not None:
                is_told = isinstance(line, Report)
                yield line
            elif not call and (crashed := _CRASHED_IN.search(data)):
                call = crashed[1].decode("ascii")
        if not is_told:
            yield _ending(process) + (f" in {call}" if call else "")
    finally:
        # What hangs in the driver cannot be ended: it is left behind, and waited for no longer than this.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GONE_S)


def _lines(descriptor: int, deadline: float) -> Iterator[bytes]:
    """Complete lines until the end, the deadline, or more than can be a line of ours."""
    buffer = b""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while len(buffer) <= _MAX_LINE and selector.select(max(0.0, deadline - time.monotonic())):
            data = os.read(descriptor, _READ)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            yield from lines


def _decoded(data: bytes) -> Line | None:
    """A line of the probe's; None for what a library in it has written among them."""
    try:
        return msgspec.json.decode(data, type=Line)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(_GONE_S)
    except subprocess.TimeoutExpired:
        return _SILENT
    return f"was ended by signal {-status}" if status < 0 else f"{_OWN_END} {status}"


def device_files(place: Place) -> list[str]:
    """Device files of NVIDIA's that there are, without those of MIG's capabilities."""
    names = [entry.name for entry in (place.rootfs / "dev").glob("nvidia*") if _DEVICE_FILE.fullmatch(entry.name)]
    return [str(place.rootfs / "dev" / name) for name in sorted(names)]


def _device_files(files: Sequence[DeviceFile]) -> Check:
    denied = [f"{file.path}: {file.problem}" for file in files if file.problem]
    if denied:
        return Check("device files", "broken", "; ".join(denied), remedy("no_permission"))
    names = {Path(file.path).name for file in files}
    if "nvidiactl" not in names or not any(name[6:].isdecimal() for name in names):
        lacking = "/dev/nvidiactl" if "nvidiactl" not in names else "/dev/nvidia0"
        return Check("device files", "broken", f"{lacking} is not there", remedies.NO_DEVICE_FILES)
    return Check("device files", "ok", f"{', '.join(file.path for file in files)} can be opened")


def _library(found: Loaded, module: str, *, is_wanted: bool) -> Checks:
    file, missing = found.file, found.missing
    if found.problem:
        finding = f"{file}: {found.problem}" if file else found.problem
        yield Check("driver library", "broken", finding, remedies.FOREIGN)
        return
    if not file:
        if is_wanted:
            yield Check("driver library", "broken", "library_not_found", remedy("library_not_found"))
        return
    match = _FILE_VERSION.search(file)
    if match and module and match[1] != module:
        finding = f"{file} is {match[1]}, the kernel module {module}"
        yield Check("driver library", "broken", finding, remedy("lib_rm_version_mismatch"))
    elif missing:
        yield Check("driver library", "degraded", f"{file} lacks {', '.join(missing)}", remedies.OLD_LIBRARY)
    else:
        yield Check("driver library", "ok", file)


def _reported(place: Place, report: Report, on_bus: Sequence[str]) -> Checks:
    states: States = {(one.source, one.uuid): one for one in report.states}
    yield from _hung(report)
    library = states.get(("nvml", ""))
    if library is not None and library.state == "failed":
        if library.reason != "library_not_found" or on_bus:
            yield Check("NVML", "broken", library.reason, remedy(library.reason))
        return
    if library is None:
        return
    versions = report.driver
    yield Check(
        "NVML", "ok", f"driver {versions.driver_version or '?'}, runs CUDA up to {versions.cuda_version or '?'}"
    )
    yield _count(place, report, on_bus)
    for gpu in report.gpus:
        yield from _gpu(gpu, states, frozenset(call.uuid for call in report.hung))
    yield from _pm_sampling(place, report, states)


def _hung(report: Report) -> Checks:
    for call in report.hung:
        gpu = next((f" of GPU {gpu.index}" for gpu in report.gpus if gpu.uuid == call.uuid), "")
        finding = f"the call `{call.call}`{gpu} has not returned for {call.seconds:.0f} s"
        yield Check("driver call", "broken", finding, remedies.HUNG)


def _count(place: Place, report: Report, on_bus: Sequence[str]) -> Check:
    """GPUs that answer, that the driver counts, on the bus, expected: the same number, or one is missing."""
    answering = sum(not gpu.parent_uuid for gpu in report.gpus)
    wanted = place.config.expected_gpus
    if not answering:
        finding = "the driver shows no GPU" if not report.counted else f"none of {report.counted} GPUs answers"
        return Check("GPUs", "broken", finding, remedies.MISSING)
    for other, by in ((report.counted, "the driver counts"), (len(on_bus), "on the PCI bus"), (wanted, "are expected")):
        if other is not None and answering < other:
            return Check("GPUs", "degraded", f"{answering} answer, {other} {by}", remedies.MISSING)
    return Check("GPUs", "ok", f"{answering} of {report.counted} answer")


def _gpu(gpu: Gpu, states: States, hung: frozenset[str]) -> Checks:
    label = label_of(gpu)
    identity = ", ".join(filter(None, (gpu.name, gpu.architecture, gpu.compute_capability, gpu.profile, gpu.uuid)))
    nvml = states.get(("nvml", gpu.uuid))
    if gpu.uuid in hung:
        yield Check(label, "broken", f"{identity}: a driver call hangs", remedies.HUNG)
    elif nvml is None or nvml.state != "active":
        finding = told(nvml.state, nvml.reason) if nvml else "no reading came"
        yield Check(label, "broken", f"{identity}: {finding}", remedies.LOST)
    else:
        yield Check(label, "ok", identity)
    gpm = states.get(("gpm", gpu.uuid))
    if gpm is None or gpu.uuid in hung:
        return
    yield _windows(f"GPM {label}", gpm, remedies.AGAIN)


def _windows(name: str, source: SourceState, cure: str) -> Check:
    if source.state == "active":
        if not source.window_ns:
            return Check(name, "degraded", "no window came", cure)
        return Check(name, "ok", f"windows of {source.window_ns / 1e6:g} ms{source.reason and f'; {source.reason}'}")
    status = status_of(source.state)
    if source.state == "no_permission":
        return Check(name, status, "no_permission", source.reason)
    return Check(name, status, told(source.state, source.reason), cure if status != "ok" else "")


def label_of(gpu: Gpu) -> str:
    """A GPU or MIG instance, as people count them."""
    return f"GPU {gpu.index} MIG {gpu.gpu_instance}" if gpu.parent_uuid else f"GPU {gpu.index}"


def _pm_sampling(place: Place, report: Report, states: States) -> Checks:
    sampled = {gpu: states[("pm_sampling", gpu.uuid)] for gpu in report.gpus if ("pm_sampling", gpu.uuid) in states}
    if not sampled:
        return
    targets = [source for gpu, source in sampled.items() if not why_not_sampled(gpu, place.config.pm_sampling.mode)]
    if report.cupti:
        yield Check("CUPTI", "ok", report.cupti)
    unusable = next((one.reason for one in targets if one.state == "unsupported"), "")
    if not report.cupti and unusable:
        yield Check("CUPTI", "degraded", "no library that PM sampling can use", unusable)
    if targets and (place.procfs / "driver/nvidia/params").exists():
        yield _permission(place, next((one.reason for one in targets if one.state == "no_permission"), ""))
    for gpu, source in sampled.items():
        name = f"PM sampling {label_of(gpu)}"
        if source in targets and source.state == "unsupported":
            yield Check(name, "degraded", "unsupported", source.reason)
        else:
            yield _windows(name, source, remedies.BUSY if source.state == "busy" else remedies.AGAIN)


def _permission(place: Place, denial: str) -> Check:
    """NVreg_RestrictProfilingToAdminUsers, by its name in the loaded module. denial: what PM sampling says of it."""
    match = _ADMIN_ONLY.search(read_text(place.procfs / "driver/nvidia/params"))
    value = match[1] if match else "?"
    finding = f"{_READERS.get(value, 'unknown')} (RmProfilingAdminOnly: {value})"
    if value == "1":
        is_admin = capabilities(place) & (1 << _SYS_ADMIN | 1 << _PERFMON)
        finding += f"; this user {'has' if is_admin else 'lacks'} CAP_SYS_ADMIN"
    return Check("counter permission", "degraded" if denial else "ok", finding, denial)
