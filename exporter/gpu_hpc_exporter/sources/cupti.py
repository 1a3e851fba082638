"""CUPTI's PM sampling and profiler host calls, and the few of libcuda that they need, by ctypes.

Loaded in the helper process only: a broken or hanging CUPTI must not take the exporter with it. The structures
are those of CUDA 12.6, the oldest that has PM sampling; later libraries read `structSize` and know by it which
fields exist, while an older one refuses a size that it does not know. A test compiles NVIDIA's own headers and
compares every size and offset.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_char_p, c_double, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, ClassVar, Final

PM_SAMPLING: Final = 1
"""CUpti_ProfilerType: the host object schedules for PM sampling."""
SYSCLK_INTERVAL: Final = 0
TIME_INTERVAL: Final = 1
"""CUpti_PmSampling_TriggerMode: the sampling interval is in cycles of the system clock, or in nanoseconds."""

_RESULTS: Final = {
    1: "invalid_parameter",
    2: "invalid_device",
    7: "invalid_operation",
    8: "out_of_memory",
    9: "hardware",
    10: "parameter_size_not_sufficient",
    11: "api_not_implemented",
    14: "not_compatible",
    15: "not_initialized",
    17: "invalid_metric_name",
    26: "hardware_busy",
    27: "not_supported",
    33: "virtualized_device_not_supported",
    35: "insufficient_privileges",
    36: "old_profiler_api_initialized",
    38: "legacy_profiler_not_supported",
    40: "virtualized_device_insufficient_privileges",
    41: "confidential_computing_not_supported",
    42: "cmp_device_not_supported",
    43: "mig_device_not_supported",
    44: "sli_device_not_supported",
    45: "wsl_device_not_supported",
    46: "invalid_chip_name",
    999: "unknown",
}
"""CUptiResult by name in lower case, as far as these calls answer it."""
_UNKNOWN_CHIP: Final = ("cuptiProfilerHostInitialize", 1)
"""How CUPTI before 13.1 says invalid_chip_name."""
_CUDA_RESULTS: Final = {
    2: "out_of_memory",
    3: "not_initialized",
    34: "stub_library",
    46: "device_unavailable",
    100: "no_device",
    101: "invalid_device",
    802: "system_not_ready",
    803: "system_driver_mismatch",
    804: "compat_not_supported_on_device",
    999: "unknown",
}


class CuptiError(Exception):
    """A call of CUPTI or libcuda failed; `name` is the library's name of the code, `call` that of the function."""

    def __init__(self, call: str, code: int, names: dict[int, str] = _RESULTS) -> None:
        self.call = call
        self.code = code
        self.name = "invalid_chip_name" if (call, code) == _UNKNOWN_CHIP else names.get(code, f"code_{code}")
        super().__init__(f"{call}: {self.name}")

    @property
    def busy(self) -> bool:
        """Somebody else holds the counters."""
        return self.name == "hardware_busy"

    @property
    def denied(self) -> bool:
        """The process may not read the counters."""
        return self.name in ("insufficient_privileges", "virtualized_device_insufficient_privileges")

    @property
    def unsupported(self) -> bool:
        """The answer will not change while the GPU and its mode stay what they are."""
        return self.name.endswith("not_supported") or self.name == "invalid_chip_name"


class Params(ctypes.Structure):
    """Parameters of one call. The first two fields are the same in all of them."""

    _fields_: ClassVar[Any] = []

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.structSize = size_of(type(self))


def size_of(params: type[Params]) -> int:
    """What CUPTI calls STRUCT_SIZE: up to the end of the last field, without the padding after it."""
    name = params._fields_[-1][0]
    field = getattr(params, name)
    return int(field.offset + field.size)


_HEAD: Final = [("structSize", c_size_t), ("pPriv", c_void_p)]
_OBJECT: Final = [*_HEAD, ("pPmSamplingObject", c_void_p)]
_HOST: Final = [*_HEAD, ("pHostObject", c_void_p)]


class ProfilerInitialize(Params):
    _fields_ = _HEAD


class DeviceGetChipName(Params):
    _fields_ = [*_HEAD, ("deviceIndex", c_size_t), ("pChipName", c_char_p)]


class HostInitialize(Params):
    _fields_ = [
        *_HEAD,
        ("profilerType", c_int),
        ("pChipName", c_char_p),
        ("pCounterAvailabilityImage", c_void_p),
        ("pHostObject", c_void_p),
    ]


class HostDeinitialize(Params):
    _fields_ = _HOST


class HostGetSupportedChips(Params):
    _fields_ = [*_HEAD, ("numChips", c_size_t), ("ppChipNames", ctypes.POINTER(c_char_p))]


class HostConfigAddMetrics(Params):
    _fields_ = [*_HOST, ("ppMetricNames", ctypes.POINTER(c_char_p)), ("numMetrics", c_size_t)]


class HostGetConfigImageSize(Params):
    _fields_ = [*_HOST, ("configImageSize", c_size_t)]


class HostGetConfigImage(Params):
    _fields_ = [*_HOST, ("configImageSize", c_size_t), ("pConfigImage", c_void_p)]


class HostGetNumOfPasses(Params):
    _fields_ = [*_HEAD, ("configImageSize", c_size_t), ("pConfigImage", c_void_p), ("numOfPasses", c_size_t)]


class HostEvaluateToGpuValues(Params):
    _fields_ = [
        *_HOST,
        ("pCounterDataImage", c_void_p),
        ("counterDataImageSize", c_size_t),
        ("rangeIndex", c_size_t),
        ("ppMetricNames", ctypes.POINTER(c_char_p)),
        ("numMetrics", c_size_t),
        ("pMetricValues", ctypes.POINTER(c_double)),
    ]


class PmEnable(Params):
    _fields_ = [*_HEAD, ("deviceIndex", c_size_t), ("pPmSamplingObject", c_void_p)]


class PmDisable(Params):
    _fields_ = _OBJECT


class PmStart(Params):
    _fields_ = _OBJECT


class PmStop(Params):
    _fields_ = _OBJECT


class PmSetConfig(Params):
    _fields_ = [
        *_OBJECT,
        ("configSize", c_size_t),
        ("pConfig", c_void_p),
        ("hardwareBufferSize", c_size_t),
        ("samplingInterval", c_uint64),
        ("triggerMode", c_int),
        # 12.8 added hwBufferAppendMode, which is KEEP_OLDEST where it is left out; 12.6 refuses a longer structure.
    ]


class PmDecodeData(Params):
    _fields_ = [
        *_OBJECT,
        ("pCounterDataImage", c_void_p),
        ("counterDataImageSize", c_size_t),
        ("decodeStopReason", c_int),
        ("overflow", c_uint8),
    ]


class PmGetCounterDataSize(Params):
    _fields_ = [
        *_OBJECT,
        ("pMetricNames", ctypes.POINTER(c_char_p)),
        ("numMetrics", c_size_t),
        ("maxSamples", c_uint32),
        ("counterDataSize", c_size_t),
    ]


class PmCounterDataImageInitialize(Params):
    _fields_ = [*_OBJECT, ("counterDataSize", c_size_t), ("pCounterData", c_void_p)]


class PmGetCounterDataInfo(Params):
    _fields_ = [
        *_HEAD,
        ("pCounterDataImage", c_void_p),
        ("counterDataImageSize", c_size_t),
        ("numTotalSamples", c_size_t),
        ("numPopulatedSamples", c_size_t),
        ("numCompletedSamples", c_size_t),
    ]


class PmCounterDataGetSampleInfo(Params):
    _fields_ = [
        *_OBJECT,
        ("pCounterDataImage", c_void_p),
        ("counterDataImageSize", c_size_t),
        ("sampleIndex", c_size_t),
        ("startTimestamp", c_uint64),
        ("endTimestamp", c_uint64),
    ]


CALLS: Final[dict[type[Params], tuple[str, str]]] = {
    ProfilerInitialize: ("cuptiProfilerInitialize", "CUpti_Profiler_Initialize_Params"),
    DeviceGetChipName: ("cuptiDeviceGetChipName", "CUpti_Device_GetChipName_Params"),
    HostInitialize: ("cuptiProfilerHostInitialize", "CUpti_Profiler_Host_Initialize_Params"),
    HostDeinitialize: ("cuptiProfilerHostDeinitialize", "CUpti_Profiler_Host_Deinitialize_Params"),
    HostGetSupportedChips: ("cuptiProfilerHostGetSupportedChips", "CUpti_Profiler_Host_GetSupportedChips_Params"),
    HostConfigAddMetrics: ("cuptiProfilerHostConfigAddMetrics", "CUpti_Profiler_Host_ConfigAddMetrics_Params"),
    HostGetConfigImageSize: ("cuptiProfilerHostGetConfigImageSize", "CUpti_Profiler_Host_GetConfigImageSize_Params"),
    HostGetConfigImage: ("cuptiProfilerHostGetConfigImage", "CUpti_Profiler_Host_GetConfigImage_Params"),
    HostGetNumOfPasses: ("cuptiProfilerHostGetNumOfPasses", "CUpti_Profiler_Host_GetNumOfPasses_Params"),
    HostEvaluateToGpuValues: ("cuptiProfilerHostEvaluateToGpuValues", "CUpti_Profiler_Host_EvaluateToGpuValues_Params"),
    PmEnable: ("cuptiPmSamplingEnable", "CUpti_PmSampling_Enable_Params"),
    PmDisable: ("cuptiPmSamplingDisable", "CUpti_PmSampling_Disable_Params"),
    PmSetConfig: ("cuptiPmSamplingSetConfig", "CUpti_PmSampling_SetConfig_Params"),
    PmStart: ("cuptiPmSamplingStart", "CUpti_PmSampling_Start_Params"),
    PmStop: ("cuptiPmSamplingStop", "CUpti_PmSampling_Stop_Params"),
    PmDecodeData: ("cuptiPmSamplingDecodeData", "CUpti_PmSampling_DecodeData_Params"),
    PmGetCounterDataSize: ("cuptiPmSamplingGetCounterDataSize", "CUpti_PmSampling_GetCounterDataSize_Params"),
    PmCounterDataImageInitialize: (
        "cuptiPmSamplingCounterDataImageInitialize",
        "CUpti_PmSampling_CounterDataImage_Initialize_Params",
    ),
    PmGetCounterDataInfo: ("cuptiPmSamplingGetCounterDataInfo", "CUpti_PmSampling_GetCounterDataInfo_Params"),
    PmCounterDataGetSampleInfo: (
        "cuptiPmSamplingCounterDataGetSampleInfo",
        "CUpti_PmSampling_CounterData_GetSampleInfo_Params",
    ),
}
"""Per structure: the function that takes it and NVIDIA's name of it."""


class LibraryUnusableError(Exception):
    """A file is no CUPTI that PM sampling can use; the text says which and why, in one line."""


class Cupti:
    """A loaded libcupti. Each call takes its parameters filled in and raises CuptiError for any other answer than 0."""

    def __init__(self, path: str) -> None:
        """`path`: a file, or a name for the loader. Raises LibraryUnusableError, or CuptiError without a version."""
        _load_companions(Path(path).parent if "/" in path else None)
        try:
            self._library = ctypes.CDLL(path)
            self._functions = {params: self._function(name) for params, (name, _) in CALLS.items()}
            version = self._library.cuptiGetVersion
        except (OSError, AttributeError) as error:
            raise LibraryUnusableError(f"{path} is no CUPTI with PM sampling (12.6 or later): {error}") from error
        self.path = path
        number = c_uint32()
        code = version(ctypes.byref(number))
        if code:
            raise CuptiError("cuptiGetVersion", code)
        self.version = number.value
        """cuptiGetVersion's answer: 28 for CUDA 12.9.1, and from CUDA 13 on 10000 x major + 100 x minor."""

    def _function(self, name: str) -> Callable[[Any], int]:
        function: Callable[[Any], int] = self._library[name]
        return function

    def call(self, params: Params) -> None:
        """Make the call that these parameters belong to. Raises CuptiError."""
        code = self._functions[type(params)](ctypes.byref(params))
        if code:
            raise CuptiError(CALLS[type(params)][0], code)

    def bind(self, params: Params) -> Callable[[], int]:
        """The call with these very parameters, for a tight loop; answers CUPTI's code."""
        function, reference = self._functions[type(params)], ctypes.byref(params)
        return lambda: function(reference)


def _load_companions(folder: Path | None) -> None:
    """Load what libcupti opens by name later, from beside it: the loader's own path does not have it."""
    if folder is None:
        return
    for name in ("libnvperf_host.so", "libnvperf_target.so"):
        file = folder / name
        if file.exists():
            try:
                ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise LibraryUnusableError(f"{file} cannot be loaded: {error}") from error
            give_back_zero_pages(file)


def give_back_zero_pages(library: Path) -> None:
    """Return to the system what a library just loaded has zeroed for nothing.

    The start-up code of libnvperf_host and libnvperf_target (12.9 to 13.1) writes 100 MB of static tables each,
    of which two thirds are zeros (measured). A private page of zeros that is given back reads as zeros again.
    Call it before anything else runs in the process: what another thread writes meanwhile would be lost.
    """
    libc = ctypes.CDLL(None)
    zero = bytes(mmap.PAGESIZE)
    for begin, end in _zeroed_regions(library):
        run = 0
        for offset in range(0, end - begin + 1, mmap.PAGESIZE):
            if offset < end - begin and ctypes.string_at(begin + offset, mmap.PAGESIZE) == zero:
                run += mmap.PAGESIZE
            elif run:
                libc.madvise(c_void_p(begin + offset - run), c_size_t(run), mmap.MADV_DONTNEED)
                run = 0


def _zeroed_regions(library: Path) -> Iterator[tuple[int, int]]:
    """Where a loaded library's zero-initialised data lies: the anonymous mapping behind its last one."""
    last_end = None
    for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
        place, mode, _, _, inode, *name = line.split(maxsplit=5)
        begin, end = (int(bound, 16) for bound in place.split("-"))
        if name and Path(name[0]) == library.resolve():
            last_end = end
        elif inode == "0" and begin == last_end and mode.startswith("rw"):
            yield begin, end


class Cuda:
    """The driver's libcuda: its version, and which devices this process sees, by UUID. No context is made."""

    def __init__(self) -> None:
        """Raises LibraryUnusableError without the library."""
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise LibraryUnusableError(
                f"libcuda.so.1 is not there: the driver's compute part is missing ({error})"
            ) from error

    def initialize(self) -> None:
        """Open the driver. Raises CuptiError where it does not start."""
        self._check("cuInit", self._library.cuInit(0))

    @property
    def version(self) -> int:
        """Highest CUDA version that the driver runs: 1000 x major + 10 x minor; known before `initialize`."""
        number = c_int()
        self._check("cuDriverGetVersion", self._library.cuDriverGetVersion(ctypes.byref(number)))
        return number.value

    def uuids(self) -> Iterator[str]:
        """UUIDs in the order of CUDA's ordinals, as NVML writes them."""
        count = c_int()
        self._check("cuDeviceGetCount", self._library.cuDeviceGetCount(ctypes.byref(count)))
        for ordinal in range(count.value):
            raw = (c_uint8 * 16)()
            device = c_int()
            self._check("cuDeviceGet", self._library.cuDeviceGet(ctypes.byref(device), ordinal))
            self._check("cuDeviceGetUuid", self._library.cuDeviceGetUuid(ctypes.byref(raw), device))
            text = bytes(raw).hex()
            yield f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    @staticmethod
    def _check(call: str, code: int) -> None:
        if code:
            raise CuptiError(call, code, _CUDA_RESULTS)


def names_array(names: Sequence[str]) -> ctypes.Array[c_char_p]:
    """Metric names as C strings; must stay alive as long as CUPTI may read them."""
    return (c_char_p * len(names))(*(name.encode() for name in names))
