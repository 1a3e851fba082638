"""One session of PM sampling on one GPU: set up, decode, take down. Belongs to one thread."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from gpu_hpc_exporter.model import NS
from gpu_hpc_exporter.sources import cupti as api
from gpu_hpc_exporter.sources.cupti import Cupti, CuptiError
from gpu_hpc_exporter.sources.pm_sampling.metric_sets import MetricSet

_MIN_BUFFER: Final = 2 << 20
_MAX_BUFFER: Final = 64 << 20
_BUFFER_RESERVE: Final = 4
"""The hardware buffer holds the windows of so many decodes: it is host memory, and what does not fit is lost."""
_IMAGE_RESERVE: Final = 2
"""The image holds the windows of so many decodes. When one fills up, CUPTI drops the rest of what it has read
(measured: of 970 windows of 1 ms an image for 300 kept 334), so it must never fill up."""
_IMAGE_SPARE: Final = 20
_ASSUMED_SYSCLK_HZ: Final = 1.5e9
"""Where the trigger counts cycles, their frequency is nobody's business to know beforehand: windows come out somewhat
longer or shorter and their time stamps say how long."""

Sample = tuple[int, int, tuple[float, ...]]
"""Begin and end in ns of the GPU's clock, and CUPTI's values in the order of the set's names."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one decode gave. `overflow`: the hardware buffer had been full, windows are lost."""

    samples: list[Sample]
    overflow: bool


class MetricsRefusedError(Exception):
    """The library does not know some counters of the set, or does not take all together (then `names` is empty)."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(", ".join(names) or "the library cannot read these counters in one pass")


class GpuSession:
    """Windows of one GPU from `start` on. Every call raises CuptiError where CUPTI fails.

    CUPTI reads the configuration image, the names and the counter data image as long as the session lives, so
    they live as long. Its deinitialisation is not reference-counted: it is done once.
    """

    def __init__(
        self, cupti: Cupti, ordinal: int, metric_set: MetricSet, interval_ns: int, windows_per_decode: int
    ) -> None:
        """`ordinal` is CUDA's, not NVML's. Raises CuptiError, or MetricsRefusedError for another set to try."""
        self._cupti = cupti
        self._names = metric_set.names
        self._names_array = api.names_array(self._names)
        self._host: int | None = None
        self._object: int | None = None
        self._started = False
        try:
            self._config = self._schedule(metric_set.chip)
            enable = api.PmEnable(deviceIndex=ordinal)
            cupti.call(enable)
            self._object = enable.pPmSamplingObject
            self._configure(metric_set, interval_ns, windows_per_decode)
            self._make_image(_IMAGE_RESERVE * windows_per_decode + _IMAGE_SPARE)
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """Begin sampling; where that fails the session is closed."""
        try:
            self._cupti.call(api.PmStart(pPmSamplingObject=self._object))
        except CuptiError:
            self.close()
            raise
        self._started = True

    def stop(self) -> None:
        """End sampling: the counters are free for others once the process has ended or the session is closed."""
        if self._started:
            self._started = False
            self._cupti.call(api.PmStop(pPmSamplingObject=self._object))

    def close(self) -> None:
        """Release everything; never raises, since nothing can be done about it."""
        with suppress(CuptiError):
            self.stop()
        if self._object is not None:
            with suppress(CuptiError):
                self._cupti.call(api.PmDisable(pPmSamplingObject=self._object))
            self._object = None
        if self._host is not None:
            with suppress(CuptiError):
                self._cupti.call(api.HostDeinitialize(pHostObject=self._host))
            self._host = None

    def decode(self) -> Decoded:
        """The windows completed since the last time."""
        self._check("cuptiPmSamplingDecodeData", self._call_decode())
        overflow = bool(self._decode.overflow)
        self._check("cuptiPmSamplingGetCounterDataInfo", self._call_info())
        samples = [self._sample(index) for index in range(self._info.numCompletedSamples)]
        self._check("cuptiPmSamplingCounterDataImageInitialize", self._call_initialize())
        return Decoded(samples, overflow)

    def _sample(self, index: int) -> Sample:
        self._sample_info.sampleIndex = index
        self._evaluate.rangeIndex = index
        self._check("cuptiPmSamplingCounterDataGetSampleInfo", self._call_sample_info())
        self._check("cuptiProfilerHostEvaluateToGpuValues", self._call_evaluate())
        return self._sample_info.startTimestamp, self._sample_info.endTimestamp, tuple(self._values)

    @staticmethod
    def _check(call: str, code: int) -> None:
        if code:
            raise CuptiError(call, code)

    def _schedule(self, chip: str) -> ctypes.Array[ctypes.c_uint8]:
        """The configuration image for the set. Raises MetricsRefusedError."""
        initialize = api.HostInitialize(profilerType=api.PM_SAMPLING, pChipName=chip.encode())
        self._cupti.call(initialize)
        self._host = initialize.pHostObject
        try:
            self._add(self._host, self._names)
        except CuptiError as error:
            refused = [name for name in self._names if not self._knows(chip, name)]
            if not refused and error.name not in ("invalid_parameter", "invalid_metric_name"):
                raise
            raise MetricsRefusedError(refused) from error
        size = api.HostGetConfigImageSize(pHostObject=self._host)
        self._cupti.call(size)
        image: ctypes.Array[ctypes.c_uint8] = (ctypes.c_uint8 * size.configImageSize)()
        address = ctypes.addressof(image)
        self._cupti.call(
            api.HostGetConfigImage(pHostObject=self._host, configImageSize=len(image), pConfigImage=address)
        )
        passes = api.HostGetNumOfPasses(configImageSize=len(image), pConfigImage=address)
        self._cupti.call(passes)
        if passes.numOfPasses != 1:
            raise MetricsRefusedError(())
        return image

    def _add(self, host: int | None, names: Sequence[str]) -> None:
        array = api.names_array(names)
        self._cupti.call(api.HostConfigAddMetrics(pHostObject=host, ppMetricNames=array, numMetrics=len(names)))

    def _knows(self, chip: str, name: str) -> bool:
        """Whether the library takes this counter alone."""
        initialize = api.HostInitialize(profilerType=api.PM_SAMPLING, pChipName=chip.encode())
        self._cupti.call(initialize)
        try:
            self._add(initialize.pHostObject, [name])
        except CuptiError:
            return False
        finally:
            self._cupti.call(api.HostDeinitialize(pHostObject=initialize.pHostObject))
        return True

    def _configure(self, metric_set: MetricSet, interval_ns: int, windows_per_decode: int) -> None:
        by_time = metric_set.trigger == "time"
        wanted = _BUFFER_RESERVE * metric_set.bytes_per_window * windows_per_decode
        self._cupti.call(
            api.PmSetConfig(
                pPmSamplingObject=self._object,
                configSize=len(self._config),
                pConfig=ctypes.addressof(self._config),
                hardwareBufferSize=min(max(wanted, _MIN_BUFFER), _MAX_BUFFER),
                samplingInterval=interval_ns if by_time else round(interval_ns / NS * _ASSUMED_SYSCLK_HZ),
                triggerMode=api.TIME_INTERVAL if by_time else api.SYSCLK_INTERVAL,
            )
        )

    def _make_image(self, max_samples: int) -> None:
        """The counter data image and every structure of the loop, made once."""
        count = len(self._names)
        size = api.PmGetCounterDataSize(
            pPmSamplingObject=self._object, pMetricNames=self._names_array, numMetrics=count, maxSamples=max_samples
        )
        self._cupti.call(size)
        self._image = (ctypes.c_uint8 * size.counterDataSize)()
        image = {"pCounterDataImage": ctypes.addressof(self._image), "counterDataImageSize": len(self._image)}
        self._values = (ctypes.c_double * count)()
        self._decode = api.PmDecodeData(pPmSamplingObject=self._object, **image)
        self._info = api.PmGetCounterDataInfo(**image)
        self._sample_info = api.PmCounterDataGetSampleInfo(pPmSamplingObject=self._object, **image)
        self._evaluate = api.HostEvaluateToGpuValues(
            pHostObject=self._host,
            ppMetricNames=self._names_array,
            numMetrics=count,
            pMetricValues=self._values,
            **image,
        )
        initialize = api.PmCounterDataImageInitialize(
            pPmSamplingObject=self._object,
            counterDataSize=len(self._image),
            pCounterData=ctypes.addressof(self._image),
        )
        bind = self._cupti.bind
        self._call_decode, self._call_info = bind(self._decode), bind(self._info)
        self._call_sample_info, self._call_evaluate = bind(self._sample_info), bind(self._evaluate)
        self._initialize = initialize
        self._call_initialize = bind(initialize)
        self._check("cuptiPmSamplingCounterDataImageInitialize", self._call_initialize())
