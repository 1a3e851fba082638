"""Lookups of pods and Slurm jobs that a test makes up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpu_hpc_exporter.jobs.lookups import Pod, SlurmJob

PU = "11111111-2222-3333-4444-555555555555"
PU_ = PU.replace("-", "_")
PU2 = "99999999-2222-3333-4444-555555555555"
PU2_ = PU2.replace("-", "_")
CID = "a" * 64
CID2 = "b" * 64


@dataclass(frozen=True)
class Known:
    """Answers from these and nothing else."""

    pods: tuple[Pod, ...] = ()
    jobs: tuple[SlurmJob, ...] = ()
    containers: Mapping[str, str] = field(default_factory=dict)
    sluids: Mapping[str, str] = field(default_factory=dict)

    def pod(self, uid: str) -> Pod | None:
        """By UID."""
        return next((pod for pod in self.pods if pod.uid == uid), None)

    def pod_of(self, namespace: str, name: str) -> Pod | None:
        """By name."""
        return next((pod for pod in self.pods if (pod.namespace, pod.name) == (namespace, name)), None)

    def container_name(self, container_id: str) -> str:
        """By id."""
        return self.containers.get(container_id, "")

    def slurm_job(self, job_id: str) -> SlurmJob | None:
        """By id."""
        return next((job for job in self.jobs if job.job_id == job_id), None)

    def slurm_job_of_sluid(self, sluid: str) -> SlurmJob | None:
        """By SLUID."""
        return self.slurm_job(self.sluids.get(sluid, ""))
