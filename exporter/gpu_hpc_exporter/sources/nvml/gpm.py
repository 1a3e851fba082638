"""GPU Performance Monitoring (Hopper and later): hardware windows of one GPU or MIG instance.

Measured on an H200: taking a sample costs 270 us on a 100 ms beat (50-190 us back to back), each metric
0.6 us, GRAPHICS_UTIL alone 1.4 ms (left out). The hardware refreshes its counters every 100 ms; a window
without a refresh reads NaN for DRAM and a false 0 for SMs and pipes, so such a window is extended until one
arrives and never published.
"""

from __future__ import annotations

import math
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import pynvml

from gpu_hpc_exporter.model import NS, Gpu, Quantity, ReadingRejected, Window, WindowsRejected
from gpu_hpc_exporter.sources.nvml.library import DriverCallError, Handle, driver_errors
from gpu_hpc_exporter.sources.nvml.turns import GPM
from gpu_hpc_exporter.sources.values import ROUNDING, problem_of

FLOOR_NS: Final = 100_000_000
"""GPM's refresh period: shorter windows see no refresh."""
BATCH_NS: Final = NS
"""How often the windows taken are worked off."""
MAX_WINDOW_NS: Final = 5 * NS
"""A longer window would put minutes of suspension into one class; its time counts as lost."""
LATE: Final = 1.5
_MIB: Final = float(1 << 20)
_RATE_LIMIT: Final = 1e13
"""Bytes per second above which a link rate is impossible (NVLink 5 moves 0.9e12 each way)."""
_PERCENT: Final = 0.01

_RATIOS: Final[tuple[tuple[int, Quantity], ...]] = (
    (pynvml.NVML_GPM_METRIC_SM_UTIL, "sm_active"),
    (pynvml.NVML_GPM_METRIC_SM_OCCUPANCY, "sm_occupancy"),
    (pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL, "pipe_tensor"),
    (pynvml.NVML_GPM_METRIC_FP64_UTIL, "pipe_fp64"),
    (pynvml.NVML_GPM_METRIC_FP32_UTIL, "pipe_fp32"),
    (pynvml.NVML_GPM_METRIC_FP16_UTIL, "pipe_fp16"),
    (pynvml.NVML_GPM_METRIC_INTEGER_UTIL, "pipe_int"),
    (pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL, "dram_active"),
    *((pynvml.NVML_GPM_METRIC_NVDEC_0_UTIL + n, "engine_decode") for n in range(8)),
    *((pynvml.NVML_GPM_METRIC_NVJPG_0_UTIL + n, "engine_jpeg") for n in range(8)),
    *((pynvml.NVML_GPM_METRIC_NVOFA_0_UTIL + n, "engine_ofa") for n in range(2)),
    *((pynvml.NVML_GPM_METRIC_NVENC_0_UTIL + n, "engine_encode") for n in range(4)),
)
"""Percent per metric id. Of several engines of one kind the busiest counts: GPM answers 0 also for
engines that the chip does not have, so their mean would be too low."""

_PCIE: Final[tuple[tuple[int, Quantity], ...]] = (
    (pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC, "pcie_host_to_gpu_bytes"),
    (pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC, "pcie_gpu_to_host_bytes"),
)
_NVLINK: Final[tuple[tuple[int, Quantity], ...]] = (
    (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, "nvlink_received_bytes"),
    (pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, "nvlink_transmitted_bytes"),
)
_C2C: Final[tuple[tuple[int, Quantity], ...]] = (
    (pynvml.NVML_GPM_METRIC_C2C_TOTAL_RX_PER_SEC, "c2c_host_to_gpu_bytes"),
    (pynvml.NVML_GPM_METRIC_C2C_TOTAL_TX_PER_SEC, "c2c_gpu_to_host_bytes"),
)
"""MiB per second per metric id, seen from the GPU."""

_CORE: Final = frozenset[Quantity]({"sm_active", "dram_active"})
"""Without these a window says nothing and is rejected whole."""

Outcome = Window | WindowsRejected | ReadingRejected


_Answer = tuple[Quantity, float, float]
"""What one answer is: its quantity, the factor to base units, the highest value that can be true."""

_ANSWER: Final = struct.Struct("4xId24x")
"""nvmlGpmMetric_t without the fields we do not need: nvmlReturn and value. Reading the whole array at once
takes 5 us; pynvml's attribute access takes 40."""


class GpmStream:
    """Back-to-back windows of one GPU or MIG instance. Owned by one thread; never shared.

    `take` is all that has to happen on the beat; `windows` works off what was taken. Doing that once a
    second in one go costs a third of doing it at each beat, when every cache has gone cold.

    Overlapping users of one GPM sample have panicked kernels, so nothing else may touch the samples.
    """

    def __init__(self, handle: Handle, gpu: Gpu, interval_ns: int, gpu_instance_id: int | None = None) -> None:
        """`handle` is the physical GPU's, also for a MIG instance. Raises DriverCallError without support."""
        self._handle = handle
        self._uuid = gpu.uuid
        self._instance = gpu_instance_id
        self.interval_ns = interval_ns
        """How long windows should be; whoever takes the samples may change it."""
        self._request, self._plan = _build_request(gpu)
        start = pynvml.c_nvmlGpmMetricsGet_t.metrics.offset
        self._answers = memoryview(self._request).cast("B")[start : start + len(self._plan) * _ANSWER.size]
        with driver_errors(), GPM.alone():
            if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
                raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
            # The end of the last window, and what comes before the next `windows`.
            self._free = [pynvml.nvmlGpmSampleAlloc() for _ in range(2 + BATCH_NS // interval_ns)]
        self._taken: deque[tuple[int, object]] = deque()

    def close(self) -> None:
        """Free the samples; the stream must not be used after."""
        for sample in (*self._free, *(sample for _, sample in self._taken)):
            try:
                with GPM.alone():
                    pynvml.nvmlGpmSampleFree(sample)
            except pynvml.NVMLError:
                continue  # the library was closed under us and has freed them
        self._free.clear()
        self._taken.clear()

    def take(self) -> bool:
        """Take a sample; whether `windows` has to be called before the next one.

        Raises DriverCallError where the driver fails: the window then lasts until the next sample.
        """
        sample = self._free[-1]
        with driver_errors(), GPM.alone():
            if self._instance is None:
                pynvml.nvmlGpmSampleGet(self._handle, sample)
            else:
                pynvml.nvmlGpmMigSampleGet(self._handle, self._instance, sample)
        self._taken.append((time.monotonic_ns(), self._free.pop()))
        return not self._free

    def windows(self) -> Iterator[Outcome]:
        """Windows between the samples taken, and what was rejected; what is missing between them is lost.

        Raises DriverCallError where the driver cannot evaluate one.
        """
        while len(self._taken) > 1:
            (begin_ns, before), (end_ns, after) = self._taken[0], self._taken[1]
            duration_ns = end_ns - begin_ns
            self._request.sample1, self._request.sample2 = before, after
            try:
                with GPM.alone():
                    pynvml.nvmlGpmMetricsGet(self._request)
            except pynvml.NVMLError as error:
                self._retire(0)
                raise DriverCallError(error) from error
            values, rejected, refreshed = self._decode(end_ns, duration_ns)
            if not refreshed and duration_ns <= MAX_WINDOW_NS:
                self._retire(1)  # extend: the window goes on until the next sample
                continue
            self._retire(0)
            yield from rejected
            if not refreshed or not values.keys() >= _CORE:
                count = max(1, round(duration_ns / self.interval_ns))
                yield WindowsRejected(end_ns, self._uuid, "gpm", count)
            elif duration_ns <= MAX_WINDOW_NS:
                late = duration_ns > LATE * self.interval_ns
                yield Window(self._uuid, "gpm", end_ns, duration_ns, values, late)

    def _retire(self, position: int) -> None:
        _, sample = self._taken[position]
        del self._taken[position]
        self._free.append(sample)

    def _decode(self, now_ns: int, duration_ns: int) -> tuple[dict[Quantity, float], list[ReadingRejected], bool]:
        """Values that can be true, what was rejected, and whether the window saw a refresh."""
        values: dict[Quantity, float] = {}
        rejected: list[ReadingRejected] = []
        refreshed = True
        seconds = duration_ns / NS
        for (quantity, scale, limit), (returned, raw) in zip(
            self._plan, _ANSWER.iter_unpack(self._answers), strict=True
        ):
            if returned != pynvml.NVML_SUCCESS:
                continue
            value = raw * scale
            if not 0.0 <= value <= limit:
                if quantity == "dram_active" and math.isnan(value):
                    refreshed = False
                rejected.append(ReadingRejected(now_ns, self._uuid, quantity, problem_of(value, limit)))
            elif limit == _RATE_LIMIT:
                values[quantity] = round(value * seconds)
            else:
                values[quantity] = max(values.get(quantity, 0.0), min(1.0, value))
        return values, rejected, refreshed


def _build_request(gpu: Gpu) -> tuple[pynvml.c_nvmlGpmMetricsGet_t, list[_Answer]]:
    """The 19 kB structure, made once, and what each of its answers means.

    A MIG instance has no links of its own: the parent keeps them.
    """
    rates = [
        *(_PCIE if "pcie" in gpu.links else ()),
        *(_NVLINK if "nvlink" in gpu.links else ()),
        *(_C2C if "c2c" in gpu.links else ()),
    ]
    plan: list[_Answer] = [
        *((quantity, _PERCENT, ROUNDING) for _, quantity in _RATIOS),
        *((quantity, _MIB, _RATE_LIMIT) for _, quantity in rates),
    ]
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    request.numMetrics = len(plan)
    for position, (metric_id, _) in enumerate([*_RATIOS, *rates]):
        request.metrics[position].metricId = metric_id
    return request, plan
