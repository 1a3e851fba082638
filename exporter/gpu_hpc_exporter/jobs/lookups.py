"""What the host knows besides its processes: pods, containers and Slurm jobs, as their sources last told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from gpu_hpc_exporter.model import JobKind


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod. `controller`: kind of what owns it, such as Job, ReplicaSet or RayCluster, "" where unknown.

    `containers`: names by container id (64 hex digits), as far as the API server told.
    """

    uid: str
    name: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    controller: str = ""
    containers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A GPU or MIG instance, by NVML's UUID, that a container of a pod holds; `pod_uid` "" where unknown."""

    device_uuid: str
    namespace: str
    pod: str
    container: str
    pod_uid: str = ""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """A Slurm job. `device_uuids`: the GPUs it holds, where the source tells."""

    job_id: str
    name: str = ""
    user: str = ""
    account: str = ""
    partition: str = ""
    kind: JobKind = ""
    device_uuids: tuple[str, ...] = ()


class Lookups(Protocol):
    """Answers from memory at once; None for what nobody has told."""

    def pod(self, uid: str) -> Pod | None: ...

    def pod_of(self, namespace: str, name: str) -> Pod | None: ...

    def container_name(self, container_id: str) -> str: ...

    def slurm_job(self, job_id: str) -> SlurmJob | None: ...

    def slurm_job_of_sluid(self, sluid: str) -> SlurmJob | None: ...
