"""Opening and closing the library, its error codes by name, and what to do about the usual ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pynvml

from gpu_hpc_exporter.model import Driver
from gpu_hpc_exporter.sources.device_files import device_problem

Handle = Any
"""pynvml's device handle, an untyped ctypes pointer."""

_ERROR_NAMES: Final[dict[int, str]] = {
    code: name.removeprefix("NVML_ERROR_").lower()
    for name, code in vars(pynvml).items()
    if name.startswith("NVML_ERROR_") and isinstance(code, int)
}

FATAL: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_GPU_IS_LOST,
        pynvml.NVML_ERROR_RESET_REQUIRED,
    }
)
"""Codes after which no call on the device can succeed until the library is opened again."""

UNSUPPORTED: Final = frozenset({pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND})
"""Codes that will not change while the driver and the GPU's mode stay what they are."""

_REMEDIES: Final[dict[str, str]] = {
    "library_not_found": (
        "libnvidia-ml.so.1 was not found: install the NVIDIA driver, or in a container give it the driver's "
        "libraries (NVIDIA container toolkit with capability `utility`, the pod's runtimeClassName, or "
        "--path.driver-root)"
    ),
    "driver_not_loaded": "the kernel module is not loaded: `modprobe nvidia`, or look into `dmesg` for why it failed",
    "lib_rm_version_mismatch": (
        "the driver library and the kernel module differ, as after an unattended upgrade: "
        "reboot, or reload the kernel module"
    ),
    "no_permission": "the device nodes /dev/nvidia* cannot be opened: check their mode and the device cgroup",
    "unknown": (
        "the driver answers Unknown Error: in a container the device cgroup was probably rewritten (systemd "
        "daemon-reload), so restart the container, or the toolkit was told no-cgroups=true for rootless use"
    ),
}


_OF_DEVICE_FILES: Final = frozenset({"no_permission", "driver_not_loaded", "unknown"})
"""Answers that a device file which is missing or denied may be the cause of."""
_DEVICE_FILES: Final = (
    "in a container give it the GPUs (NVIDIA container toolkit), in a systemd unit set PrivateDevices=no and "
    "DeviceAllow= for them, on a host `nvidia-modprobe -u -c=0` makes them"
)


class DriverCallError(Exception):
    """A driver call failed. `name` is NVML's name of the code in lower case.

    `fatal`: no call on this GPU can succeed until the library is opened again. `unsupported`: the answer
    will not change while the driver and the GPU's mode stay what they are.
    """

    def __init__(self, error: pynvml.NVMLError) -> None:
        self.name = error_name(error)
        self.fatal = error.value in FATAL
        self.unsupported = error.value in UNSUPPORTED
        self.denied = error.value == pynvml.NVML_ERROR_NO_PERMISSION
        super().__init__(self.name)


@contextmanager
def driver_errors() -> Iterator[None]:
    """Lets `DriverCallError` out of a source instead of pynvml's exceptions."""
    try:
        yield
    except pynvml.NVMLError as error:
        raise DriverCallError(error) from error


class DriverUnavailableError(Exception):
    """The library cannot be opened. `reason` is NVML's name of the code, the text says what to do.

    It names the device file that is at fault, since NVML answers "not loaded" also where a sandbox hides one.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        problem = device_problem() if reason in _OF_DEVICE_FILES else ""
        super().__init__(f"the kernel module is loaded, but {problem}: {_DEVICE_FILES}" if problem else remedy(reason))


def remedy(reason: str) -> str:
    """What to do where the library cannot be opened, by NVML's name of the code in lower case."""
    return _REMEDIES.get(reason, f"NVML answers {reason}")


def error_name(error: pynvml.NVMLError) -> str:
    """NVML's name of an error code in lower case, `code_<n>` for one this pynvml does not know."""
    return _ERROR_NAMES.get(error.value, f"code_{error.value}")


_LIBRARY: Final = "libnvidia-ml.so.1"
_LIBRARY_FOLDERS: Final = (
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "lib64",
    "lib",
)
"""Where a driver root (a host's root, or the driver container's) keeps the library."""
_CONTAINER_FOLDERS: Final = (
    "/usr/local/nvidia/lib64",  # GKE's and NVIDIA's images
    "/home/kubernetes/bin/nvidia/lib64",  # GKE's host path
    "/usr/lib/wsl/lib",  # WSL 2
)


def find_library(driver_root: Path) -> bool:
    """Load the library, from the common container set-ups where the loader's own path lacks it; whether it is there.

    Once a file with this soname is loaded, pynvml's own load by name finds it.
    """
    return any(not _load_problem(path) for path in _places(driver_root))


def why_not_loaded(driver_root: Path) -> str:
    """What the loader says of the first file of that name which is there but no library, "" where there is none."""
    problems = map(_load_problem, _places(driver_root))
    return next((problem for problem in problems if problem and not problem.endswith(_NO_FILE)), "")


_NO_FILE: Final = "No such file or directory"


def _places(driver_root: Path) -> tuple[str, ...]:
    folders = [*(driver_root / folder for folder in _LIBRARY_FOLDERS), *map(Path, _CONTAINER_FOLDERS)]
    return (_LIBRARY, *(str(folder / _LIBRARY) for folder in folders))


def _load_problem(path: str) -> str:
    try:
        ctypes.CDLL(path)
    except OSError as error:
        return str(error)
    return ""


def loaded_file(maps: Path = Path("/proc/self/maps")) -> str:
    """Where the library lies that this process has loaded, links resolved; "" where it has none."""
    for line in maps.read_text("utf-8", "replace").splitlines():
        path = line.partition("/")[2]
        if path.rpartition("/")[2].startswith("libnvidia-ml.so"):
            return f"/{path}"
    return ""


def find_function(name: str) -> Any:
    """A function of the opened library as ctypes has it, None where the library lacks it."""
    try:
        return getattr(ctypes.CDLL(_LIBRARY), name, None)
    except OSError:
        return None


def open_library(driver_root: Path) -> None:
    """Load and initialise NVML, or raise `DriverUnavailableError`."""
    find_library(driver_root)
    try:
        pynvml.nvmlInitWithFlags(0)
    except pynvml.NVMLError as error:
        raise DriverUnavailableError(error_name(error)) from error
    except (OSError, AttributeError) as error:
        # A file of that name that is no NVML: truncated, another architecture, an empty stub.
        raise DriverUnavailableError("library_not_found") from error


def close_library() -> None:
    """Take back one opening; the last one releases everything. Never raises, since nothing can be done about it."""
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return


def driver_versions() -> Driver:
    """Versions of driver, CUDA and NVML, each "" where the driver does not say."""
    cuda = _text_or_empty(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    return Driver(
        driver_version=_text_or_empty(pynvml.nvmlSystemGetDriverVersion),
        # NVML encodes 13.0 as 13000: 1000 * major + 10 * minor.
        cuda_version=f"{int(cuda) // 1000}.{int(cuda) % 1000 // 10}" if cuda else "",
        nvml_version=_text_or_empty(pynvml.nvmlSystemGetNVMLVersion),
    )


def _text_or_empty(call: Callable[[], object]) -> str:
    try:
        return str(call())
    except (pynvml.NVMLError, UnicodeDecodeError):
        return ""
