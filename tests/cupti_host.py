"""What NVIDIA's wheels bring, and what their CUPTI schedules on which chip; needs neither a GPU nor a driver.

    python tests/cupti_host.py LIBRARY <questions >report

Every library is asked in a process of its own: two versions do not bear each other, and a crash must stay there.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from gpu_hpc_exporter.sources import cupti as api
from gpu_hpc_exporter.sources.cupti import Cupti, CuptiError


class Question(msgspec.Struct, frozen=True):
    """Can this chip sample these counters?"""

    chip: str
    names: list[str]


class Answer(msgspec.Struct):
    """`passes` 0 where the chip or some counters, then in `unknown`, are not known."""

    passes: int = 0
    bytes_per_window: int = 0
    unknown: list[str] = []


class Report(msgspec.Struct):
    """What a library says of itself, and its answers in the order of the questions."""

    version: int
    chips: list[str]
    answers: list[Answer]


def wheel_file(distribution: str, name: str) -> Path:
    """A file of an installed wheel by the end of its path."""
    wheel = metadata.distribution(distribution)
    file = next(file for file in wheel.files or () if str(file).endswith(f"/{name}"))
    return Path(str(wheel.locate_file(file)))


def ask(library: Path, questions: Sequence[Question]) -> Report:
    """Ask a library, in a new process whose loader does not know where it is."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    program = [sys.executable, __file__, str(library)]
    questioned = msgspec.json.encode(questions)
    answered = subprocess.run(program, input=questioned, stdout=subprocess.PIPE, env=environment, check=True)
    return msgspec.json.decode(answered.stdout, type=Report)


class _NvpwInitializeHost(api.Params):
    _fields_: ClassVar[Any] = [("structSize", ctypes.c_size_t), ("pPriv", ctypes.c_void_p)]


class _NvpwSampleSize(api.Params):
    """NVPW_PeriodicSampler_Config_GetGpuEstimatedSampleSize_Params of nvperf_host.h."""

    _fields_: ClassVar[Any] = [
        *_NvpwInitializeHost._fields_,
        ("pConfig", ctypes.c_void_p),
        ("configSize", ctypes.c_size_t),
        ("sampleSize", ctypes.c_size_t),
    ]


class _Host:
    def __init__(self, library: Path) -> None:
        self._cupti = Cupti(str(library))
        self._nvperf = ctypes.CDLL(str(library.with_name("libnvperf_host.so")))
        self._nvpw("NVPW_InitializeHost", _NvpwInitializeHost())

    def report(self, questions: Sequence[Question]) -> Report:
        chips = api.HostGetSupportedChips()
        self._cupti.call(chips)
        known = [(chips.ppChipNames[index] or b"").decode() for index in range(chips.numChips)]
        answers = [self._answer(question) if question.chip in known else Answer() for question in questions]
        return Report(self._cupti.version, known, answers)

    def _answer(self, question: Question) -> Answer:
        answer = self._schedule(question.chip, question.names)
        if answer is None:
            unknown = [name for name in question.names if self._schedule(question.chip, [name]) is None]
            answer = Answer(unknown=unknown)
        return answer

    def _schedule(self, chip: str, names: list[str]) -> Answer | None:
        """None where CUPTI does not know a name."""
        host = api.HostInitialize(profilerType=api.PM_SAMPLING, pChipName=chip.encode())
        self._cupti.call(host)
        handle = host.pHostObject
        try:
            added = api.HostConfigAddMetrics(
                pHostObject=handle, ppMetricNames=api.names_array(names), numMetrics=len(names)
            )
            try:
                self._cupti.call(added)
            except CuptiError as error:
                if error.name != "invalid_parameter":
                    raise
                return None
            return self._measure(handle)
        finally:
            self._cupti.call(api.HostDeinitialize(pHostObject=handle))

    def _measure(self, handle: int) -> Answer:
        size = api.HostGetConfigImageSize(pHostObject=handle)
        self._cupti.call(size)
        # Both libraries want it aligned to 8 bytes.
        image = (ctypes.c_uint64 * -(-size.configImageSize // 8))()
        config = {"configImageSize": size.configImageSize, "pConfigImage": ctypes.addressof(image)}
        self._cupti.call(api.HostGetConfigImage(pHostObject=handle, **config))
        passes = api.HostGetNumOfPasses(**config)
        self._cupti.call(passes)
        sample = _NvpwSampleSize(pConfig=ctypes.addressof(image), configSize=size.configImageSize)
        self._nvpw("NVPW_PeriodicSampler_Config_GetGpuEstimatedSampleSize", sample)
        return Answer(passes.numOfPasses, sample.sampleSize)

    def _nvpw(self, name: str, params: api.Params) -> None:
        code = self._nvperf[name](ctypes.byref(params))
        if code:
            raise RuntimeError(f"{name}: {code}")


if __name__ == "__main__":
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=list[Question])
    sys.stdout.buffer.write(msgspec.json.encode(_Host(Path(sys.argv[1])).report(asked)))
