"""The structures, codes and functions that sources/cupti.py knows are those of NVIDIA's headers, old and new."""

from __future__ import annotations

import subprocess
from typing import Any, Final

import pytest

from cupti_host import wheel_file
from gpu_hpc_exporter.sources import cupti as api
from gpu_hpc_exporter.sources.cupti import _CUDA_RESULTS, _RESULTS, CALLS, Params, size_of

NEW_IN_13_1: Final = {46: "CUPTI_ERROR_INVALID_CHIP_NAME"}
CONSTANTS: Final = {
    "CUPTI_PROFILER_TYPE_PM_SAMPLING": api.PM_SAMPLING,
    "CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_SYSCLK_INTERVAL": api.SYSCLK_INTERVAL,
    "CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_TIME_INTERVAL": api.TIME_INTERVAL,
    **{f"CUPTI_ERROR_{name.upper()}": code for code, name in _RESULTS.items() if code not in NEW_IN_13_1},
    **{f"CUDA_ERROR_{name.upper()}": code for code, name in _CUDA_RESULTS.items()},
}
PROBE: Final = """
#include <cstdio>
#include <type_traits>
#include <cupti_pmsampling.h>
#include <cupti_profiler_host.h>
#include <cupti_profiler_target.h>
#include <cupti_result.h>
#include <cupti_target.h>
#include <cupti_version.h>

#define CALL(function, params) \\
    static_assert(std::is_same<decltype(&function), CUptiResult (*)(params*)>::value, #function " takes " #params); \\
    std::printf("%s %zu\\n", #params, size_t(params##_STRUCT_SIZE));
#define FIELD(params, field) \\
    std::printf("%s.%s %zu %zu\\n", #params, #field, offsetof(params, field), sizeof(((params*)nullptr)->field));
#define CONSTANT(name) std::printf("%s %d\\n", #name, int(name));

int main() {
    static_assert(std::is_same<decltype(&cuptiGetVersion), CUptiResult (*)(uint32_t*)>::value, "cuptiGetVersion");
"""


@pytest.fixture(scope="module", params=["nvidia-cuda-cupti-cu12", "nvidia-cuda-cupti"])
def header(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, ...]]:
    """What the compiler makes of a version's headers: numbers by structure, `structure.field` or constant."""
    folder = tmp_path_factory.mktemp("probe")
    source, program = folder / "probe.cpp", folder / "probe"
    source.write_text(probe_text(), "utf-8")
    # cuda.h of 12.9 serves both: no structure of ours has anything of it inside.
    includes = [wheel_file(request.param, "cupti.h"), wheel_file("nvidia-cuda-runtime-cu12", "cuda.h")]
    options = [f"-I{file.parent}" for file in includes]
    subprocess.run(["g++", "-std=c++17", *options, str(source), "-o", str(program)], check=True)
    lines = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: tuple(map(int, numbers)) for name, *numbers in map(str.split, lines)}


def probe_text() -> str:
    """A program that prints what this test compares."""
    lines = [f"CALL({function}, {name})" for function, name in CALLS.values()]
    lines += [f"FIELD({name}, {field})" for params, (_, name) in CALLS.items() for field in fields(params)]
    lines += [f"CONSTANT({name})" for name in CONSTANTS]
    lines += ["#if CUPTI_API_VERSION >= 130100", *(f"CONSTANT({name})" for name in NEW_IN_13_1.values()), "#endif"]
    return PROBE + "\n".join(lines) + "\n}\n"


def fields(params: type[Params]) -> list[str]:
    """Names of a structure's fields, in their order."""
    return [name for name, _ in params._fields_]


@pytest.mark.parametrize("params", CALLS, ids=lambda params: params.__name__)
def test_a_structure_is_the_beginning_of_nvidia_s(params: type[Params], header: dict[str, tuple[int, ...]]) -> None:
    """Each field lies where the headers have it and is as long; what a later version has behind it is not sent."""
    name = CALLS[params][1]
    descriptors: dict[str, Any] = {field: getattr(params, field) for field in fields(params)}
    ours = {f"{name}.{field}": (place.offset, place.size) for field, place in descriptors.items()}
    assert ours == {field: header[field] for field in ours}
    assert params().structSize == size_of(params) <= header[name][0]


def test_constants_and_codes_are_named_as_in_the_headers(header: dict[str, tuple[int, ...]]) -> None:
    """What errors are told by, and what is sent in an enumeration's place."""
    assert {name: header[name] for name in CONSTANTS} == {name: (value,) for name, value in CONSTANTS.items()}
    for code, name in NEW_IN_13_1.items():
        assert header.get(name, (code,)) == (code,)
        assert name == f"CUPTI_ERROR_{_RESULTS[code].upper()}"


def test_the_size_that_cuda_12_6_takes() -> None:
    """Cuda 12.6.80, whose headers are not here, refuses any other (tried); later ones take it too."""
    assert size_of(api.PmSetConfig) == 60


def test_every_structure_belongs_to_a_call() -> None:
    """A structure that no call takes would not be compared."""
    assert set(CALLS) == {params for params in Params.__subclasses__() if params.__module__ == api.__name__}
