"""From pids to jobs on this host: /proc, and what Kubernetes and Slurm tell, as the sampler of jobs wants them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from gpu_hpc_exporter.jobs.attribution import UNPLACED
from gpu_hpc_exporter.jobs.identity import SLUID_HINT, SLUID_ID, Identities, Settings, identify
from gpu_hpc_exporter.jobs.lookups import Allocation, Pod, SlurmJob
from gpu_hpc_exporter.model import NS, Evidence, Gpu, Job, Library
from gpu_hpc_exporter.samplers.jobs import Condition
from gpu_hpc_exporter.samplers.libraries import LibrarySampler
from gpu_hpc_exporter.sources.kubernetes.minors import read_minors
from gpu_hpc_exporter.sources.kubernetes.pod_folders import PodFolders
from gpu_hpc_exporter.sources.kubernetes.view import KubernetesLookups
from gpu_hpc_exporter.sources.namespaces import Namespaces, read_namespaces
from gpu_hpc_exporter.sources.procfs import PROC, PidView, pid_view
from gpu_hpc_exporter.sources.procfs import Processes as ProcessFiles
from gpu_hpc_exporter.sources.slurm.source import SlurmView
from gpu_hpc_exporter.text import bounded

log = logging.getLogger(__name__)

ONLY_OWN: Final = "environments of other users' processes cannot be read: names that only stand there are missing"

_MPS: Final = "nvidia-cuda-mps"
"""What the kernel keeps of nvidia-cuda-mps-server."""


class Kubernetes(Protocol):
    """What asks kubelet and API server in the background."""

    @property
    def view(self) -> KubernetesLookups: ...

    def poke(self, key: str) -> None: ...

    def set_gpus(self, gpus: Iterable[Gpu], minors: Mapping[str, int]) -> None: ...


class Slurm(Protocol):
    """What reads the map directory and asks the controller in the background."""

    @property
    def view(self) -> SlurmView: ...

    def use_gpus(self, gpus: tuple[Gpu, ...]) -> None: ...

    def slurm_job(self, job_id: str) -> SlurmJob | None: ...

    def slurm_job_of_sluid(self, sluid: str) -> SlurmJob | None: ...


class HostLookups:
    """Both sources' answers, and a version of them that changes when an answer may."""

    def __init__(self, kubernetes: Kubernetes | None, slurm: Slurm | None, folders: PodFolders | None = None) -> None:
        self.kubernetes = kubernetes
        self.slurm = slurm
        self._folders = folders if folders is not None else PodFolders()
        self._pods: tuple[object, ...] = ()
        self._pods_version = 0

    def version(self) -> tuple[int, int]:
        """Kubernetes' view is made anew with each answer, mostly the same: only other pods are another version."""
        if self.kubernetes is not None:
            view = self.kubernetes.view
            self._folders.refresh()
            pods = (view.pods, view.pods_by_name, view.container_names, self._folders.pods)
            self._pods_version += pods != self._pods
            self._pods = pods
        return self._pods_version, self.slurm.view.version if self.slurm is not None else 0

    def pod(self, uid: str) -> Pod | None:
        """From memory; the kubelet is asked at once about a pod that the API server has not told of."""
        if self.kubernetes is None:
            return None
        pod = self.kubernetes.view.pod(uid)
        if pod is None:
            self.kubernetes.poke(uid)
        return pod or self._folders.pods.get(uid)

    def pod_of(self, namespace: str, name: str) -> Pod | None:
        """The pod that has this name now."""
        return self.kubernetes.view.pod_of(namespace, name) if self.kubernetes is not None else None

    def container_name(self, container_id: str) -> str:
        """Name of a container by id."""
        return self.kubernetes.view.container_name(container_id) if self.kubernetes is not None else ""

    def slurm_job(self, job_id: str) -> SlurmJob | None:
        """A job by id."""
        return self.slurm.slurm_job(job_id) if self.slurm is not None else None

    def slurm_job_of_sluid(self, sluid: str) -> SlurmJob | None:
        """A job by SLUID."""
        return self.slurm.slurm_job_of_sluid(sluid) if self.slurm is not None else None


class ForeignFileError(Exception):
    """An agent's file tells of a process that is another user's."""


@dataclass(frozen=True, slots=True)
class AgentClaim:
    """Which process an agent's file says that it is about: its pid in its own namespace, and when it started.

    uid: whose file it is; device: the file system (st_dev) that it is on. environment: the process's, as it says.
    """

    pid: int
    start_ticks: int
    uid: int
    environment: Mapping[str, str]
    device: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """A process's job, and its pid on the host."""

    job: Job
    pid: int


@dataclass(frozen=True, slots=True)
class _Placed:
    """A process on a GPU, its job, and when it was last there."""

    evidence: Evidence
    job: Job
    namespaces: Namespaces
    seen_ns: int

    def is_meant(self, claim: AgentClaim) -> bool:
        """Whether a file is about this process, whoever made it."""
        return (self.namespaces.pid, self.evidence.start_ticks) == (claim.pid, claim.start_ticks)

    def is_named(self, claim: AgentClaim) -> bool:
        """Whether a file's environment names this process's pod, by its UID, its name, or what its host is called."""
        said, job = claim.environment, self.job
        if said.get("POD_UID"):
            return said["POD_UID"] == job.job_id
        may_be_its = bool(job.pod) and said.get("POD_NAMESPACE") in {None, "", job.namespace}
        return may_be_its and job.pod == (said.get("POD_NAME") or said.get("HOSTNAME"))

    def is_denied(self, claim: AgentClaim) -> bool:
        """Whether a file's environment names another pod than this process's."""
        said, job = claim.environment, self.job
        if said.get("POD_UID"):
            return bool(job.pod) and said["POD_UID"] != job.job_id
        return bool(job.pod and said.get("POD_NAME")) and said["POD_NAME"] != job.pod

    def owns(self, claim: AgentClaim) -> bool:
        """Whether the file's owner is the process's user, as we see it or, by an id-mapped mount, as it sees itself."""
        uid = self.evidence.uid
        return uid in {claim.uid, -1} or self.namespaces.owner_on(claim.device, uid) == claim.uid


def _anyone(_: int) -> bool:
    return True


_REMEMBERED_NS: Final = 60 * NS
"""So long after its end a process is known: what its agent wrote last is read later."""
_MAX_REMEMBERED: Final = 1024
_SLUID_PATIENCE_NS: Final = 60 * NS


class HostProcesses:
    """Jobs of this host's processes."""

    def __init__(
        self,
        settings: Settings,
        lookups: HostLookups,
        root: Path = PROC,
        view: PidView | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`view`: whether the driver's pids are those of `root`; looked at once if it is not given."""
        self._view = pid_view(root) if view is None else view
        self._files = ProcessFiles(root, settings.variables, settings.user_name)
        self._identities = Identities(settings)
        self._lookups = lookups
        self._clock = clock
        self._missing: frozenset[int] = frozenset()
        self._was_denied = False
        self._sluids: dict[str, int] = {}
        self._has_told_of_sluids = False
        self._told_ns: int | None = None
        self._settings = settings
        self._root = root
        self._placed: Mapping[int, _Placed] = {}
        self._seen: Collection[int] = frozenset()
        self._libraries: LibrarySampler | None = None
        self._loaded: Mapping[int, tuple[Library, ...]] = {}

    def use_libraries(self, libraries: LibrarySampler) -> None:
        """Let it look at what the processes have loaded."""
        self._libraries = libraries

    @property
    def can_tell(self) -> bool:
        """Whether the driver's pids can be looked up here."""
        return self._view.lookup

    @property
    def lists_all(self) -> bool:
        """Whether the driver lists all processes to us."""
        return self._view.lists_all

    def jobs_of(self, pids: Collection[int], listed_ns: int) -> Mapping[int, Job | None]:
        """A process that /proc lacks has ended since it was listed, unless it is listed and lacking again."""
        # /proc counts from the boot, sleep included.
        since_boot_ns = listed_ns + time.clock_gettime_ns(time.CLOCK_BOOTTIME) - self._clock()
        evidence = self._files.refresh(pids, since_boot_ns)
        found = self._identities.refresh(evidence, self._lookups, self._lookups.version())
        self._was_denied = self._was_denied or self._files.denied > 0
        self._told_ns = self._clock()
        servers = _mps_servers(evidence)
        jobs: dict[int, Job | None] = {pid: one.job for pid, one in found.items() if pid not in servers}
        self._tell_of_sluids(jobs.values())
        missing = frozenset(pid for pid in pids if pid not in found)
        jobs |= dict.fromkeys(missing & self._missing)
        self._missing = missing
        here = {pid: (evidence[pid], job) for pid, job in jobs.items() if job is not None and pid in evidence}
        self._place(here)
        self._seen = evidence.keys()
        if self._libraries is not None:
            self._loaded = self._libraries.refresh({pid: one.start_ticks for pid, (one, _) in here.items()})
        return jobs

    def _place(self, here: Mapping[int, tuple[Evidence, Job]]) -> None:
        """Remember these, and for a while those that were there before. Namespaces are looked up once."""
        now_ns = self._clock()
        before = self._placed
        ended = [pid for pid, one in before.items() if pid not in here and now_ns - one.seen_ns < _REMEMBERED_NS]
        placed = {pid: before[pid] for pid in ended[-_MAX_REMEMBERED:]}
        for pid, (evidence, job) in here.items():
            known = before.get(pid)
            if known is not None and known.evidence.start_ticks == evidence.start_ticks:
                namespaces = known.namespaces
            else:
                namespaces = read_namespaces(pid, evidence.start_ticks, self._root) or Namespaces(pid)
            placed[pid] = _Placed(evidence, job, namespaces, now_ns)
        self._placed = placed

    def _tell_of_sluids(self, jobs: Iterable[Job | None]) -> None:
        """Once, of a job whose number nobody has told for a minute: a controller may take its time."""
        if self._has_told_of_sluids:
            return
        now_ns = self._clock()
        unknown = {job.job_id for job in jobs if job is not None and job.job_id.startswith(SLUID_ID)}
        self._sluids = {job_id: self._sluids.get(job_id, now_ns) for job_id in unknown}
        late = [job_id for job_id, since_ns in self._sluids.items() if now_ns - since_ns >= _SLUID_PATIENCE_NS]
        if late:
            self._has_told_of_sluids = True
            log.warning("a Slurm job's number is not known, only its SLUID (%s): %s", late[0], SLUID_HINT)

    def libraries_of(self, pid: int) -> tuple[Library, ...]:
        """What a process has loaded, as far as that has been looked at."""
        return self._loaded.get(pid, ())

    def job_of_agent(self, claim: AgentClaim, may_be: Callable[[int], bool] = _anyone) -> Placement | None:
        """The job of the process on a GPU that an agent's file is about; None where no such process is known.

        Programs of containers that start together may have the same pid there and the same start. Of several of the
        file's owner, it is that of the pod that the file names, and one that `may_be` the file's by what else it tells;
        None where that leaves more than one, or none. For another thread than the one that looks the processes up.
        Raises ForeignFileError where the file belongs to somebody else than all processes that it can be about.
        """
        meant = {pid: placed for pid, placed in self._placed.items() if placed.is_meant(claim)}
        found = {pid: placed for pid, placed in meant.items() if placed.owns(claim)}
        if meant and not found:
            raise ForeignFileError
        if len(found) > 1:
            found = {pid: placed for pid, placed in found.items() if placed.is_named(claim)} or found
            found = {pid: placed for pid, placed in found.items() if may_be(pid)}
        found = {pid: placed for pid, placed in found.items() if not placed.is_denied(claim)}
        if len(found) != 1:
            return None
        ((pid, placed),) = found.items()
        return Placement(placed.job, pid)

    def has_seen(self, pid: int) -> bool:
        """Whether a process that the driver lists could be looked up when that was last tried; for any thread."""
        return pid in self._seen

    def declared_job(self, claim: AgentClaim) -> Job:
        """What a process says of itself, believed as far as its environment is believed without its cgroup."""
        # Where cgroups can be read this one could have been: it is hidden, and may be that of any job.
        missing = ("cgroup: no such process",) if self.can_tell else ()
        user = self._settings.user_name(claim.uid)
        said = Evidence(
            claim.pid, claim.start_ticks, uid=claim.uid, user=user, environment=claim.environment, missing=missing
        )
        return identify(said, self._lookups, self._settings).job or UNPLACED

    def unknown_cgroups(self) -> Mapping[str, int]:
        """By form, from the start."""
        return self._identities.unknown_forms

    def condition(self) -> Condition:
        """`no_permission` where something cannot be seen that a more privileged exporter would see."""
        if not self._view.lookup:
            return Condition("procfs", "unsupported", self._view.reason)
        reason = self._view.reason or (ONLY_OWN if self._was_denied else "")
        return Condition("procfs", "no_permission" if reason else "active", reason, self._told_ns)


def _mps_servers(evidence: Mapping[int, Evidence]) -> set[int]:
    """MPS's servers, which work for clients of the same user that are listed themselves: no job of their own."""
    servers = {pid for pid, told in evidence.items() if told.comm.startswith(_MPS)}
    if not servers:
        return servers
    clients = {told.uid for pid, told in evidence.items() if pid not in servers}
    return {pid for pid in servers if evidence[pid].uid in clients}


class SlurmHolders:
    """Jobs that hold GPUs, by the map directory."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm

    def use_gpus(self, gpus: tuple[Gpu, ...]) -> None:
        """The GPUs that files may name."""
        self._slurm.use_gpus(gpus)

    def holders_of(self, uuid: str) -> tuple[Job, ...]:
        """Named as a process of theirs would be."""
        return tuple(_slurm_holder(job) for job in self._slurm.view.holders.get(uuid, ()))

    def condition(self) -> Condition | None:
        """None where nothing of Slurm is configured."""
        view = self._slurm.view
        return None if view.state is None else Condition("slurm", view.state, view.reason, view.told_ns)


def _slurm_holder(job: SlurmJob) -> Job:
    return Job(bounded(job.name) or f"slurm-{job.job_id}", job.job_id, job.kind, bounded(job.user), source="slurm")


class KubernetesHolders:
    """Pods that hold GPUs, by the kubelet."""

    def __init__(self, kubernetes: Kubernetes, lookups: HostLookups, settings: Settings, procfs: Path = PROC) -> None:
        self._kubernetes = kubernetes
        self._lookups = lookups
        self._settings = settings
        self._procfs = procfs

    def use_gpus(self, gpus: tuple[Gpu, ...]) -> None:
        """The GPUs that device plugins may name."""
        self._kubernetes.set_gpus(gpus, read_minors(self._procfs))

    def holders_of(self, uuid: str) -> tuple[Job, ...]:
        """Named as a process of theirs would be."""
        return tuple(self._holder(allocation) for allocation in self._kubernetes.view.allocations_of(uuid))

    def _holder(self, allocation: Allocation) -> Job:
        pod = self._lookups.pod(allocation.pod_uid) if allocation.pod_uid else None
        if pod is None:
            return Job(
                bounded(allocation.pod),
                allocation.pod_uid,
                namespace=allocation.namespace,
                pod=allocation.pod,
                container=allocation.container,
                source="kubernetes",
            )
        # A process that is nowhere but in the pod has all that the pod tells, and no more.
        nobody = Evidence(0, 0, cgroup=f"0::/kubepods/pod{pod.uid}")
        job = identify(nobody, self._lookups, self._settings).job
        return replace(job or Job(pod.name, source="kubernetes"), container=allocation.container)

    def condition(self) -> Condition | None:
        """The kubelet's; that of the API server is in the log."""
        told = self._kubernetes.view.parts.get("kubelet")
        if told is None:
            return None
        told_ns = None if told.told_s is None else round(told.told_s * NS)
        return Condition("kubelet", told.state, told.reason, told_ns)
