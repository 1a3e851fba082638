"""The exporter with job identity in it, as its command line will have it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from gpu_hpc_exporter import cli
from gpu_hpc_exporter.config import Config
from gpu_hpc_exporter.exporter import HardwareSource
from gpu_hpc_exporter.samplers.gpu_owner import Pace
from gpu_hpc_exporter.samplers.job_parts import JobParts
from gpu_hpc_exporter.samplers.nvml import NvmlSampler


class WithJobs(HardwareSource):
    """NVML's events pass the sampler of jobs on their way to the fleet."""

    def start(self, config: Config) -> None:
        interval_ns = round(config.sampling_interval_ms * 1e6)
        self._jobs = JobParts(self._fleet, config.jobs, Path(os.environ["JOBS_PROCFS"]))
        self._nvml = NvmlSampler(self._jobs.sampler, Pace(interval_ns), self._driver_root, self._watches)
        self._nvml.start()
        self._jobs.start()

    def stop(self) -> bool:
        ended = self._nvml.stop()
        return self._jobs.stop() and ended


vars(cli)["HardwareSource"] = WithJobs
sys.exit(cli.main())
