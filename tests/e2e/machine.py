"""A machine with the fake driver: its scenario and the exporter that runs on it."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from exporter_process import Exporter, Samples, run_exporter
from fake_nvml import Scenario

PATIENT_HELPER = (
    sys.executable,
    "-c",
    "import sys, gpu_hpc_exporter.pm_helper as helper; helper._GRACE_S = 20; sys.exit(helper.main())",
)
"""The helper process; a busy machine may hold up its orderly end. Where a call of its hangs, it ends 20 s late."""
IDENTITY = frozenset(
    {
        "gpu_hpc_gpu_info",
        "gpu_hpc_job_info",  # somebody may hold a GPU that is lost
        "gpu_hpc_gpu_lost",
        "gpu_hpc_source_state",
        "gpu_hpc_source_state_info",
        "gpu_hpc_window_seconds",
        "gpu_hpc_windows_total",
        "gpu_hpc_last_window_timestamp_seconds",
        "gpu_hpc_rejected_readings_total",
        "gpu_hpc_driver_call_hung_seconds",
        "gpu_hpc_xid_errors_total",
        "gpu_hpc_xid_last_timestamp_seconds",
    }
)
"""Series of a GPU that say who it is and how its sources are; all others are values."""


def uuid_of(device: int) -> str:
    """The UUID that the fake gives a device."""
    return f"GPU-00000000-aaaa-bbbb-cccc-{device:012d}"


def mig_uuid_of(device: int, gi: int) -> str:
    """The UUID that the fake gives a MIG instance."""
    return f"MIG-00000000-aaaa-bbbb-cccc-{device * 65536 + 0xA0 + gi:012x}"


def value_series(samples: Samples, uuid: str) -> set[str]:
    """Names of the series that give a value of a GPU."""
    return {name for name, labels in samples.values if ("uuid", uuid) in labels} - IDENTITY


def state(samples: Samples, source: str, uuid: str = "") -> str:
    """The one state that a source is in."""
    states = samples.all("gpu_hpc_source_state", source=source, uuid=uuid)
    return "".join(dict(labels)["state"] for labels, value in states.items() if value == 1)


def observed(samples: Samples, uuid: str) -> float:
    """Seconds that classified windows of a GPU cover so far."""
    return samples.get("gpu_hpc_observed_seconds_total", uuid=uuid) or 0.0


def mean(samples: Samples, counter: str, uuid: str, **labels: str) -> float:
    """A counter of windows over the time observed: the mean since the start."""
    return samples.one(counter, uuid=uuid, **labels) / observed(samples, uuid)


@dataclass(frozen=True)
class Machine:
    """The fake driver and the exporter that reads it."""

    scenario: Scenario
    exporter: Exporter

    def log_lines(self, *levels: str) -> list[Mapping[str, str]]:
        """What the exporter has logged so far, at these levels or at all."""
        lines = [json.loads(line) for line in self.exporter.log.read_text().splitlines()]
        return [line for line in lines if not levels or line["level"] in levels]

    def wait_until_observed(self, seconds: float, *devices: int) -> Samples:
        """Wait until windows cover this much time on each of the devices."""
        return self.exporter.wait_for(lambda samples: all(observed(samples, uuid_of(d)) >= seconds for d in devices))


@contextmanager
def run_machine(directory: Path, library: Path, text: str, *flags: str) -> Iterator[Machine]:
    """Run the exporter on a machine whose driver does what the scenario `text` says.

    Without a configuration of its own a test is about NVML: PM sampling is off, and no agent has a file. This machine's
    kernel log, in which a real GPU may have told something, is none of it.
    """
    scenario = Scenario(directory, library, textwrap.dedent(text))
    if not any(flag.startswith("--config.file") for flag in flags):
        config = directory / "nvml-only.yaml"
        config.write_text("pm_sampling: {mode: off}\nagent: {directory: /proc/none/agents}\n", encoding="utf-8")
        flags = (*flags, f"--config.file={config}")
    if not any(flag.startswith("--path.kmsg") for flag in flags):
        flags = (*flags, "--path.kmsg=/none")
    with run_exporter(directory, "--log.format=json", *flags, env=scenario.env) as exporter:
        yield Machine(scenario, exporter)


class Start(Protocol):
    """Starts a machine that ends with the test."""

    def __call__(self, text: str, *flags: str) -> Machine: ...
