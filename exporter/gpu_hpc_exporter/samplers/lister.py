"""Lists the GPUs, each in a thread of its own, so that one that hangs does not keep the others from being found."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gpu_hpc_exporter.samplers.watch import CallWatches
from gpu_hpc_exporter.sources.nvml.inventory import HUNG, Device, Fingerprint, count_devices, describe
from gpu_hpc_exporter.sources.nvml.library import DriverCallError

log = logging.getLogger(__name__)

DEADLINE_S: Final = 2.0
"""A GPU is described in milliseconds; one that takes longer is left out until it answers."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The GPUs that answer, how many the driver counts, and what identifies this listing."""

    devices: tuple[Device, ...]
    counted: int
    fingerprint: Fingerprint
    refusal: str = ""
    """Where each GPU that the driver counts answers with an error: the first one's name."""


class _Job:
    """Describes the GPU at one index, in a thread."""

    def __init__(self, index: int, watches: CallWatches, on_late: Callable[[], None]) -> None:
        self._index = index
        self._watches = watches
        self._on_late = on_late
        self._is_late = False
        self._lock = threading.Lock()
        self.device: Device | None = None
        self.error = ""
        self.thread = threading.Thread(target=self._run, name=f"list-gpu{index}", daemon=True)
        self.thread.start()

    def wait(self, timeout: float) -> bool:
        """Whether it ended in time; if not, the lister is told when it does."""
        self.thread.join(timeout)
        with self._lock:
            self._is_late = self.device is None and not self.error
        return not self._is_late

    def _run(self) -> None:
        watch = self._watches.watch("")
        watch.current = (f"list GPU {self._index}", time.monotonic_ns())
        device, error = None, ""
        try:
            device = describe(self._index)
        except DriverCallError as failure:
            error = failure.name
        finally:
            self._watches.drop(watch)
        with self._lock:
            self.device, self.error = device, error
            is_late = self._is_late
        if is_late:
            self._on_late()


class GpuLister:
    """Lists the GPUs again and again. An index whose thread is still stuck is not asked again."""

    def __init__(self, watches: CallWatches, on_late: Callable[[], None]) -> None:
        """`on_late` is called when a GPU answers after its deadline: it is time to list again."""
        self._watches = watches
        self._on_late = on_late
        self._stuck: dict[int, _Job] = {}
        self._told: dict[int, str] = {}

    def expect(self, lost: dict[int, str]) -> None:
        """These GPUs were reported as lost: that they do not answer is no news."""
        self._told.update(lost)

    def list_devices(self, skipped: frozenset[int]) -> Listing:
        """Every GPU that answers in time, the others and those `skipped` left out.

        Raises DriverCallError where not even the count can be read.
        """
        counted = count_devices()
        self._stuck = {index: job for index, job in self._stuck.items() if job.thread.is_alive()}
        asked = [index for index in range(counted) if index not in self._stuck and index not in skipped]
        jobs = {index: _Job(index, self._watches, self._on_late) for index in asked}
        deadline = time.monotonic() + DEADLINE_S
        for index, job in jobs.items():
            if not job.wait(max(0.0, deadline - time.monotonic())):
                self._stuck[index] = job
                self._tell(index, f"nothing for {DEADLINE_S:g} s")
            elif job.error:
                self._tell(index, job.error)
            else:
                self._told.pop(index, None)
        devices = [job.device for job in jobs.values() if job.device is not None]
        fingerprint = tuple(_fingerprint(jobs.get(index)) for index in range(counted))
        errors = [job.error for job in jobs.values() if job.error]
        refusal = errors[0] if errors and len(errors) == counted else ""
        return Listing(_without_duplicates(devices), counted, fingerprint, refusal)

    @property
    def stuck(self) -> frozenset[int]:
        """Indices of the GPUs that hang while they are listed."""
        return frozenset(index for index, job in self._stuck.items() if job.thread.is_alive())

    def _tell(self, index: int, problem: str) -> None:
        """Once per GPU and problem, not at each listing."""
        if self._told.get(index) != problem:
            self._told[index] = problem
            log.warning("GPU %d does not answer (%s): it is left out, the others go on", index, problem)


def _fingerprint(job: _Job | None) -> tuple[str, ...]:
    if job is None or (job.device is None and not job.error):
        return HUNG
    if job.device is None:
        return (job.error,)
    return (job.device.gpu.uuid, *(instance.gpu.uuid for instance in job.device.instances))


def _without_duplicates(devices: list[Device]) -> tuple[Device, ...]:
    """GPUs by UUID: of two that claim the same one, as broken drivers do, the first stays."""
    first: dict[str, Device] = {}
    for device in devices:
        if device.gpu.uuid in first:
            log.warning("GPU %d has the UUID of another (%s): it is left out", device.gpu.index, device.gpu.uuid)
        else:
            first[device.gpu.uuid] = device
    return tuple(first.values())
