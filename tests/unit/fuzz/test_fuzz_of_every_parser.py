"""Every module that makes something of bytes from elsewhere has a fuzz test, or says here why it needs none."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import gpu_hpc_exporter

HERE: Final = Path(__file__).parent
PACKAGE: Final = Path(gpu_hpc_exporter.__file__).parent
SIGNS: Final = {
    *("decode", "loads", "b64decode", "compose", "FromString", "unpack", "unpack_from", "iter_unpack"),
    *("read_text", "read_bytes", "readline", "pread"),
}
"""Methods that make something of bytes, or read a file whole; what reads piece by piece has to decode as well."""

FUZZED: Final = {
    "access": "test_fuzz_http",
    "control": "test_fuzz_doctor",
    "doctor.check": "test_fuzz_doctor",
    "doctor.driver": "test_fuzz_doctor",
    "doctor.prometheus": "test_fuzz_doctor",
    "doctor.serving": "test_fuzz_doctor",
    "http_client": "test_fuzz_files",
    "samplers.tracing": "../test_kernel_tracing",
    "sources.device_files": "test_fuzz_host",
    "sources.kernels.demangle": "test_fuzz_kernels",
    "sources.kernels.files": "test_fuzz_kernels",
    "sources.kernels.layout": "test_fuzz_kernels",
    "sources.kmsg": "test_fuzz_host",
    "sources.kubernetes.client": "test_fuzz_kubernetes",
    "sources.kubernetes.messages": "test_fuzz_kubernetes",
    "sources.kubernetes.minors": "test_fuzz_kubernetes",
    "sources.kubernetes.objects": "test_fuzz_kubernetes",
    "sources.kubernetes.text": "test_fuzz_kubernetes",
    "sources.libraries": "test_fuzz_host",
    "sources.namespaces": "test_fuzz_host",
    "sources.nvml.gpm": "test_fuzz_driver",
    "sources.nvml.inventory": "test_fuzz_driver",
    "sources.nvml.library": "test_fuzz_host",
    "sources.nvml.processes": "test_fuzz_driver",
    "sources.pm_sampling.libraries": "test_fuzz_driver",
    "sources.pm_sampling.protocol": "test_fuzz_driver",
    "sources.procfs": "test_fuzz_host",
    "sources.profilers": "test_fuzz_host",
    "sources.record": "test_fuzz_files",
    "sources.replay": "test_fuzz_files",
    "sources.slurm.controller": "test_fuzz_slurm",
    "sources.slurm.map_directory": "test_fuzz_slurm",
    "text": "test_fuzz_slurm",
    "web_config": "test_fuzz_files",
    "yaml_file": "test_fuzz_files",
}
OWN: Final = {
    "doctor.probe": "its order is the doctor's",
    "jobs.rules": "the words of RE2's errors",
    "pm_helper": "a chip's name, which becomes text whatever it is, and frames by `sources.pm_sampling.protocol`",
    "sources.cupti": "names of files in this process's own maps",
    "sources.kernels.demangle_worker": "requests of the exporter's",
    "sources.pm_sampling.metric_sets": "a file of this package",
    "sources.pm_sampling.process": "lines for the log, text whatever they are, and the kernel's own figures",
    "sources.pm_sampling.sampling": "only a method of that name",
    "web.routes": "files of this package",
}


def parsers() -> Iterator[str]:
    """Modules of the package in which one of the signs is called."""
    for file in PACKAGE.rglob("*.py"):
        calls = (node.func for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Call))
        if any(isinstance(call, ast.Attribute) and call.attr in SIGNS for call in calls):
            yield ".".join(file.relative_to(PACKAGE).with_suffix("").parts)


def imported(test: str) -> set[str]:
    """Modules of the package that a file of tests imports from or as a whole."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((HERE / f"{test}.py").read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            module = node.module.removeprefix("gpu_hpc_exporter").removeprefix(".")
            found |= {module, *(f"{module}.{name.name}".removeprefix(".") for name in node.names)}
    return found


def test_every_parser_is_fuzzed() -> None:
    """A new one is to be added to a test of this folder and to the table, or to those that read what is our own."""
    assert set(parsers()) == FUZZED.keys() | OWN.keys()
    assert FUZZED.keys().isdisjoint(OWN)


def test_the_tests_are_of_what_the_table_says() -> None:
    """Each has the module at hand, and examples for it."""
    for module, test in FUZZED.items():
        assert module in imported(test), f"{test} does not import {module}"
        assert "@given(" in (HERE / f"{test}.py").read_text("utf-8")
