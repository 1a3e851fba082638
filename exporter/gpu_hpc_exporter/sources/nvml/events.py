"""NVML's event set: Xids as the driver reports them. It misses some of the worst, see `sources.kmsg`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import pynvml

from gpu_hpc_exporter.sources.nvml.inventory import Device
from gpu_hpc_exporter.sources.nvml.library import DriverCallError, driver_errors


class XidEvents:
    """Xid events of several GPUs. Owned by one thread."""

    def __init__(self, devices: Sequence[Device]) -> None:
        """Registers every GPU that supports it. Raises DriverCallError where none does."""
        with driver_errors():
            self._set = pynvml.nvmlEventSetCreate()
        self._uuids: dict[int | None, str] = {}
        for device in devices:
            try:
                pynvml.nvmlDeviceRegisterEvents(device.handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
            except pynvml.NVMLError as error:
                refusal = DriverCallError(error)
            else:
                self._uuids[_address(device.handle)] = device.gpu.uuid
        if devices and not self._uuids:
            self.close()
            raise refusal

    def take(self) -> Iterator[tuple[str, int]]:
        """(UUID, Xid) of every event since the last call. Raises DriverCallError.

        The set queues events, so asking it now and then loses none, and no thread sits in the driver in
        between, where it would keep the library from being closed.
        """
        while True:
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except pynvml.NVMLError as error:
                if error.value == pynvml.NVML_ERROR_TIMEOUT:
                    return
                raise DriverCallError(error) from error
            uuid = self._uuids.get(_address(event.device))
            if uuid is not None:
                yield uuid, int(event.eventData)

    def close(self) -> None:
        """Free the set."""
        try:
            pynvml.nvmlEventSetFree(self._set)
        except pynvml.NVMLError:
            return


def _address(handle: object) -> int | None:
    """What a handle points to: NVML gives the same pointer for the same GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value  # type: ignore[arg-type]  # pynvml's pointers are untyped
