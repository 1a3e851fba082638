"""The helper process: alone loads CUPTI, samples every GPU it is told to and writes what it finds to stdout.

    python -m gpu_hpc_exporter.pm_helper [--library FILE]

The exporter starts it, writes one order to its stdin and keeps that open; when stdin ends, so does the helper. What
CUPTI does wrong (crash, hang, leak) ends here.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from gpu_hpc_exporter.model import NS, State
from gpu_hpc_exporter.sources import cupti as api
from gpu_hpc_exporter.sources.cupti import Cuda, Cupti, CuptiError, LibraryUnusableError
from gpu_hpc_exporter.sources.pm_sampling.libraries import Version, choose_library, version_of_api
from gpu_hpc_exporter.sources.pm_sampling.metric_sets import OLDEST
from gpu_hpc_exporter.sources.pm_sampling.protocol import (
    MAX_TEXT,
    Alive,
    FromHelper,
    GpuState,
    Order,
    ProtocolError,
    Ready,
    Target,
    Unusable,
    decode_order,
    encode,
    take_frame,
)
from gpu_hpc_exporter.sources.pm_sampling.sampling import DENIED, CuptiDevice, GpuSampling

log = logging.getLogger(__name__)

_STDIN: Final = 0
_STDOUT: Final = 1
_BEAT_NS: Final = 2 * NS
"""The exporter hears from us at least so often; what it does not hear from hangs."""
_GRACE_S: Final = 0.4
"""How long an orderly end may take once stdin has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `gpu-hpc-pm-helper`; where it has loaded CUPTI it does not return."""
    parser = argparse.ArgumentParser(
        prog="gpu-hpc-pm-helper",
        allow_abbrev=False,
        description="The part of gpu-hpc-exporter that loads CUPTI. The exporter starts it, by the command in "
        "pm_sampling.helper where more privilege is needed; started by hand it waits for an order on its input.",
    )
    parser.add_argument(
        "--library", default="", metavar="FILE", help="libcupti to load (default: the newest that fits the driver)"
    )
    flags = parser.parse_args(arguments)
    # The exporter turns our lines into lines of its log, with time and level.
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # The end of stdin ends us: a service manager or a terminal that signals the exporter signals us too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        order = _read_order()
    except ProtocolError as error:
        sys.stderr.write(f"gpu-hpc-pm-helper: {error}; it is started by gpu-hpc-exporter\n")
        return 2
    if order is None:
        return 0
    status = 0
    try:
        _Helper(order, flags.library).run()
    except BrokenPipeError:
        pass  # the exporter is gone
    except Exception:
        log.exception("unexpected")
        status = 1
    # No Disable, no interpreter's end: the process's end frees the rest, and at once.
    os._exit(status)


def _read_order() -> Order | None:
    buffer = bytearray()
    while (body := take_frame(buffer)) is None:
        data = os.read(_STDIN, 65536)
        if not data:
            return None
        buffer += data
    return decode_order(body)


class _Helper:
    def __init__(self, order: Order, library: str) -> None:
        self._order = order
        self._library = library
        self._samplings: list[GpuSampling] = []

    def run(self) -> None:
        """Sample until stdin ends."""
        threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
        try:
            cuda = _load_cuda()
            cupti, version = self._load(cuda)
            self._send(Alive("start CUDA"))
            cuda.initialize()
            ordinals = {uuid: ordinal for ordinal, uuid in enumerate(cuda.uuids())}
            cupti.call(api.ProfilerInitialize())
            self._send(Ready(cupti.path[:MAX_TEXT], f"{version[0]}.{version[1]}"))
        except LibraryUnusableError as error:
            self._send(Unusable("unsupported", str(error)[:MAX_TEXT]))
        except CuptiError as error:
            state: State = "no_permission" if error.denied else "failed"
            self._send(Unusable(state, DENIED if error.denied else str(error)))
        else:
            self._samplings = list(self._open_all(ordinals, cupti, version))
            self._loop()
            return
        # The exporter ends us when it has read that.
        select.select([_STDIN], [], [])

    def _load(self, cuda: Cuda) -> tuple[Cupti, Version]:
        driver = (cuda.version // 1000, cuda.version % 1000 // 10)
        path = self._library or choose_library(driver).path
        self._send(Alive(f"load {path}"[:MAX_TEXT]))
        cupti = Cupti(path)
        version = version_of_api(cupti.version)
        if not OLDEST <= version <= driver:
            raise LibraryUnusableError(
                f"{path} is CUPTI {version[0]}.{version[1]}: expected 12.6 to the driver's {driver[0]}.{driver[1]}"
            )
        return cupti, version

    def _open_all(self, ordinals: Mapping[str, int], cupti: Cupti, version: Version) -> Sequence[GpuSampling]:
        samplings = []
        for target in self._order.targets:
            ordinal = ordinals.get(target.uuid)
            if ordinal is None:
                self._send(GpuState(target.uuid, "unsupported", "CUDA does not show this GPU to the helper"))
                continue
            sampling = self._open(cupti, version, ordinal, target)
            if sampling is not None:
                samplings.append(sampling)
        return samplings

    def _open(self, cupti: Cupti, version: Version, ordinal: int, target: Target) -> GpuSampling | None:
        chip = api.DeviceGetChipName(deviceIndex=ordinal)
        try:
            cupti.call(chip)
        except CuptiError as error:
            state: State = "unsupported" if error.unsupported else "no_permission" if error.denied else "failed"
            self._send(GpuState(target.uuid, state, DENIED if error.denied else str(error)))
            return None
        name = (chip.pChipName or b"").decode("ascii", "replace")
        device = CuptiDevice(cupti, version, ordinal, name)
        return GpuSampling(device, target, self._order.interval_ns, self._send)

    def _loop(self) -> None:
        """Do what is due for each GPU in turn; one thread, since CUPTI does not say that it bears more."""
        while True:
            now_ns = time.monotonic_ns()
            dues = [s.due_ns for s in self._samplings if s.due_ns is not None]
            wait_ns = min([due - now_ns for due in dues] + [_BEAT_NS])
            if select.select([_STDIN], [], [], max(0, wait_ns) / NS)[0]:
                break
            due = [s for s in self._samplings if s.due_ns is not None and s.due_ns <= time.monotonic_ns()]
            for sampling in due:
                if len(self._samplings) > 1:
                    self._send(Alive("decode", sampling.uuid))  # if it hangs, the exporter knows for which
                sampling.step()
            if not due:
                self._send(Alive())
        for sampling in self._samplings:
            with suppress(CuptiError):
                sampling.stop()

    @staticmethod
    def _send(message: FromHelper) -> None:
        data = encode(message)
        while data:
            data = data[os.write(_STDOUT, data) :]


def _load_cuda() -> Cuda:
    cuda = Cuda()
    try:
        cuda.version  # noqa: B018  whether it is a driver at all
    except AttributeError as error:
        raise LibraryUnusableError(f"libcuda.so.1 is no driver of NVIDIA's: {error}") from error
    return cuda


def _end_with_stdin() -> None:
    """When stdin ends the loop ends us; where it cannot, since a call hangs, this does."""
    select.select([_STDIN], [], [])
    time.sleep(_GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
