"""Whose process it is, and by which rule: pure functions over what /proc and other sources have told.

What a process's cgroup says is certain, since root placed it there (`cgroup` has the exceptions). What it says of
itself, in its environment or command line, anybody can make up. So:

- A process in a Slurm job or a pod is never taken for another job's, whatever its environment says.
- `SLURM_JOB_ID` of the environment counts only where the cgroup names no workload. Where the Slurm source knows the
  job, its user must be the process's. Where it does not, the process must be one that slurmd may have started: in
  slurmd's own unit, or on a host where the cgroup says nothing at all; not in a login session or another unit. A
  cgroup that could not be read may say anything: then neither this nor `POD_NAME` counts.
- A Slurm job's SLUID that nobody resolves stays one, unless the Slurm source knows the environment's number as a job
  of the process's user.
- `POD_NAME` counts only for a pod's process whose UID nobody knows, or where the cgroup says nothing at all, and
  never for a pod that is known to have another UID.
- `JOB_NAME` and its like are a name that its own user chose. Such a name comes after those of Slurm and Kubernetes
  and before those of containers and units; `job_id`, `container` and `user` stay what the cgroup says.
- A `delegated` container or unit is named with its user's name before it, and never looked up.
- A user's number inside a container need not be the host's user of that number: jobs there have no `user`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, get_args

from gpu_hpc_exporter.jobs.cgroup import UNKNOWN_FORMS, Cgroup, parse_cgroup
from gpu_hpc_exporter.jobs.lookups import Lookups, Pod, SlurmJob
from gpu_hpc_exporter.jobs.rules import Rule
from gpu_hpc_exporter.model import Evidence, Job, JobKind
from gpu_hpc_exporter.text import MAX_COMM_BYTES, bounded

NAME_VARIABLES: Final = (
    "JOB_NAME",
    "WANDB_NAME",
    "KUBEFLOW_JOB_NAME",
    "KUBEFLOW_RUN_NAME",
    "RAY_JOB_NAME",
    "RAY_CLUSTER_NAME",
)
"""Variables that name a job by default, the first found wins."""
_BATCH_VARIABLES: Final = ("KUBEFLOW_", "RAY_")
POD_LABELS: Final = ("training.kubeflow.org/job-name", "ray.io/cluster", "job-name", "app.kubernetes.io/instance")
RANK_VARIABLES: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SLURM_VARIABLES: Final = ("SLURM_JOB_ID", "SLURM_JOB_NAME")
_POD_VARIABLES: Final = ("POD_NAME", "POD_NAMESPACE")


@dataclass(frozen=True, slots=True)
class Settings:
    """How the user wants jobs to be named.

    pod_labels, pod_annotations: the first that a pod has names its job, labels first. name_variables: variables of the
    environment that name a job, the first found wins. user_name: a user's name by number, the number where unknown.
    """

    rules: tuple[Rule, ...] = ()
    pod_labels: tuple[str, ...] = POD_LABELS
    pod_annotations: tuple[str, ...] = ()
    name_variables: tuple[str, ...] = NAME_VARIABLES
    user_name: Callable[[int], str] = str

    @property
    def variables(self) -> frozenset[str]:
        """Every variable that identification looks at: all that need be read of an environment."""
        return frozenset({*self.name_variables, *RANK_VARIABLES, *_SLURM_VARIABLES, *_POD_VARIABLES})


@dataclass(frozen=True, slots=True)
class Identification:
    """What was found. rule: what named the job. why: what kept it from being named better, or was not believed.

    unknown_form: see `cgroup.UNKNOWN_FORMS`. variables: those of the environment that `job` was made from.
    """

    job: Job | None
    rule: str = ""
    why: tuple[str, ...] = ()
    unknown_form: str = ""
    variables: tuple[str, ...] = ()


class Identities:
    """Identifications of the processes there are, made anew only where something changed.

    `unknown_forms` counts, from the start, processes whose cgroup no row of the parser's table knows.
    """

    def __init__(self, settings: Settings) -> None:
        self.unknown_forms: dict[str, int] = dict.fromkeys(UNKNOWN_FORMS, 0)
        self._settings = settings
        self._version: Hashable = None
        self._kept: dict[int, tuple[Evidence, Identification]] = {}

    def refresh(
        self, evidence: Mapping[int, Evidence], lookups: Lookups, version: Hashable
    ) -> Mapping[int, Identification]:
        """Identify all of these, by pid, and forget all others. `version` differs whenever the lookups' answers may."""
        known = self._kept if version == self._version else {}
        before, self._version, self._kept = self._kept, version, {}
        for pid, told in evidence.items():
            kept = known.get(pid)
            if kept is None or kept[0] is not told:
                kept = (told, identify(told, lookups, self._settings))
                self._count(before.get(pid), kept)
            self._kept[pid] = kept
        return {pid: found for pid, (_, found) in self._kept.items()}

    def _count(self, before: tuple[Evidence, Identification] | None, now: tuple[Evidence, Identification]) -> None:
        """A process counts once, and again only where it moved."""
        form = now[1].unknown_form
        if not form:
            return
        if before and before[0].start_ticks == now[0].start_ticks and before[1].unknown_form == form:
            return
        self.unknown_forms[form] += 1


def identify(evidence: Evidence, lookups: Lookups, settings: Settings) -> Identification:
    """Whose process this is; always some job, since a process has at least a user and a name."""
    parsed = parse_cgroup(evidence.cgroup)
    case = _Case(evidence, lookups, settings)
    place = _confirmed(parsed, case)
    found = _by_place(place, case)
    if not found.job:
        _name_by_itself(found, place, case)
    if evidence.environment:
        rank_variable = next((name for name in RANK_VARIABLES if _RANK.fullmatch(case.variable(name))), "")
        found.rank = case.use(rank_variable) if rank_variable else ""
    if found.kind != "batch" and _is_jupyter(evidence):
        found.kind = "interactive"
    if settings.rules:
        _apply_rules(found, case)
    if parsed.unknown:
        case.why.append(f"cgroup: its path names no job, pod, container or service that is known ({parsed.unknown})")
    case.why.extend(evidence.missing)
    return Identification(found.as_job(), found.rule, tuple(case.why), parsed.unknown, tuple(dict.fromkeys(case.used)))


_RANK: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_JOB_ID: Final = re.compile(r"[0-9]{1,10}", re.ASCII)
_JUPYTER: Final = re.compile(r"(?:^|[\s/])(?:ipykernel(?:_launcher)?|jupyter(?:-[a-z]+)?)(?=\s|$)", re.ASCII)
_KINDS: Final = frozenset(get_args(JobKind))


def _is_jupyter(evidence: Evidence) -> bool:
    command = evidence.command
    return ("jupyter" in command or "ipykernel" in command) and _JUPYTER.search(command) is not None


@dataclass(slots=True)
class _Case:
    """One process to identify, and what was noticed on the way."""

    evidence: Evidence
    lookups: Lookups
    settings: Settings
    why: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)

    def variable(self, name: str) -> str:
        text = self.evidence.environment.get(name)
        return text.strip() if text else ""

    def use(self, name: str) -> str:
        self.used.append(name)
        return self.variable(name)

    @property
    def is_hidden(self) -> bool:
        """Whether the cgroup says nothing only since it could not be read."""
        return any(missing.startswith("cgroup:") for missing in self.evidence.missing)

    def owner(self, place: Cgroup) -> str:
        """Whose session or job it is, where the path says so, else whose process."""
        return self.settings.user_name(place.owner_uid) if place.owner_uid >= 0 else self.evidence.user

    def is_by_user(self, user: str) -> bool:
        """Whether the process's user is this one, given by name or number."""
        return bool(user) and user in {self.evidence.user, str(self.evidence.uid)}


@dataclass(slots=True)
class _Found:
    """A job in the making: a field is "" until something tells."""

    source: str
    rule: str = ""
    job: str = ""
    job_id: str = ""
    kind: JobKind = ""
    user: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    rank: str = ""

    def name(self, job: str, rule: str, source: str = "") -> None:
        self.job, self.rule, self.source = job, rule, source or self.source

    def as_job(self) -> Job:
        return Job(
            job=bounded(self.job),
            job_id=bounded(self.job_id),
            kind=self.kind,
            user=bounded(self.user),
            namespace=bounded(self.namespace),
            pod=bounded(self.pod),
            container=bounded(self.container),
            rank=bounded(self.rank),
            source=self.source,
        )


def _confirmed(place: Cgroup, case: _Case) -> Cgroup:
    """What is inside somebody's workload counts where Slurm knows such a job of the process's user."""
    claim = place.claim
    if claim is None:
        return place
    told = _slurm_job(claim, case.lookups)
    if told is not None and case.is_by_user(told.user):
        return replace(claim, outer=replace(place, claim=None))
    case.why.append(
        f"cgroup: the {claim.kind} inside the {place.kind} is not believed: whoever runs it may have made it"
    )
    return place


def _slurm_job(place: Cgroup, lookups: Lookups) -> SlurmJob | None:
    if place.slurm_job_id:
        return lookups.slurm_job(place.slurm_job_id)
    return lookups.slurm_job_of_sluid(place.slurm_sluid) if place.slurm_sluid else None


def _by_place(place: Cgroup, case: _Case) -> _Found:
    """What the cgroup tells; `job` stays "" where Slurm and Kubernetes have no name to give."""
    match place.kind:
        case "slurm":
            return _by_slurm(place, case)
        case "pod":
            return _by_pod(place, case)
        case "container":
            return _by_container(place, case)
        case "unit":
            return _by_unit(place, case)
        case "session":
            return _Found("process", kind="interactive", user=case.evidence.user)
        case _:
            return _Found("process", user=case.evidence.user)


# Slurm


def _by_slurm(place: Cgroup, case: _Case) -> _Found:
    told = _slurm_job(place, case.lookups)
    job_id = place.slurm_job_id or (told.job_id if told else "") or _own_job_id(case)
    if told is None and job_id:
        told = case.lookups.slurm_job(job_id)
    step_kind: JobKind = _STEP_KINDS.get(place.slurm_step, "")
    found = _Found(
        "slurm", job_id=job_id or f"{SLUID_ID}{place.slurm_sluid}", kind=(told.kind if told else "") or step_kind
    )
    found.user = (told.user if told else "") or ("" if place.outer else case.owner(place))
    if told and told.name:
        found.name(told.name, "Slurm job name")
    else:
        _name_slurm_job(found, job_id, place, case)
    if place.outer is not None:
        _add_outer(found, place.outer, case.lookups)
    return found


_STEP_KINDS: Final[Mapping[str, JobKind]] = {"batch": "batch", "interactive": "interactive"}


def _own_job_id(case: _Case) -> str:
    """The job's number by the process's own word, where the cgroup has a SLUID that nobody can resolve."""
    job_id = case.variable("SLURM_JOB_ID")
    if not _JOB_ID.fullmatch(job_id):
        case.why.append(f"the Slurm job's number is not known for its SLUID: {SLUID_HINT}")
        return ""
    told = case.lookups.slurm_job(job_id)
    if told is None or not told.user:
        case.why.append(f"SLURM_JOB_ID of the environment is not believed: {_UNCONFIRMED}; {SLUID_HINT}")
        return ""
    if not case.is_by_user(told.user):
        case.why.append("SLURM_JOB_ID of the environment is not believed: that job is another user's")
        return ""
    return case.use("SLURM_JOB_ID")


_UNCONFIRMED: Final = "no source of Slurm jobs confirms it here"
SLUID_ID: Final = "sluid:"
"""What a `job_id` begins with that is a SLUID, since nobody told the number."""
SLUID_HINT: Final = (
    "set CgroupJobIdPaths=yes in cgroup.conf, or configure jobs.slurm.scontrol, slurmrestd or map_directory"
)
"""How Slurm's jobs get their numbers where control groups are named by SLUID."""


def _name_slurm_job(found: _Found, job_id: str, place: Cgroup, case: _Case) -> None:
    own_id, own_name = case.variable("SLURM_JOB_ID"), case.variable("SLURM_JOB_NAME")
    if not job_id:
        pass  # why not has been told
    elif own_id and own_id != job_id:
        case.why.append("SLURM_JOB_ID of the environment is not believed: the cgroup says otherwise")
    elif own_id and own_name:
        found.name(case.use("SLURM_JOB_NAME"), "SLURM_JOB_NAME of the job's own environment")
        return
    case.why.append("the Slurm job's name is not known: no source of Slurm jobs told of it")
    found.name(f"slurm-{job_id or place.slurm_sluid}", "Slurm job id")


def _add_outer(found: _Found, outer: Cgroup, lookups: Lookups) -> None:
    """A Slurm job whose slurmd runs in a pod or a container is in that, too."""
    pod = lookups.pod(outer.pod_uid) if outer.kind == "pod" else None
    if pod is not None:
        found.namespace, found.pod = pod.namespace, pod.name
        found.container = _container_of(pod, outer.container_id, lookups)
    elif outer.kind == "container":
        found.container = lookups.container_name(outer.container_id) or _short(outer.container_id)


# Kubernetes


def _by_pod(place: Cgroup, case: _Case) -> _Found:
    found = _Found("kubernetes", job_id=place.pod_uid)
    pod = case.lookups.pod(place.pod_uid)
    if pod is None:
        case.why.append("the pod's name is not known: neither kubelet nor API server told of its UID")
        found.container = case.lookups.container_name(place.container_id) if place.container_id else ""
        return found
    found.namespace, found.pod, found.kind = pod.namespace, pod.name, _pod_kind(pod)
    found.container = _container_of(pod, place.container_id, case.lookups)
    for what, keys, values in (
        ("label", case.settings.pod_labels, pod.labels),
        ("annotation", case.settings.pod_annotations, pod.annotations),
    ):
        key = next((key for key in keys if values.get(key, "").strip()), "")
        if key:
            found.name(values[key].strip(), f"Kubernetes {what} {key}")
            return found
    found.name(pod.name, "Kubernetes pod name")
    return found


def _container_of(pod: Pod, container_id: str, lookups: Lookups) -> str:
    if not container_id:
        return ""
    return pod.containers.get(container_id) or lookups.container_name(container_id)


_BATCH_OWNERS: Final = frozenset(
    {
        "Job",
        "CronJob",
        "JobSet",
        "TrainJob",
        "PyTorchJob",
        "TFJob",
        "MPIJob",
        "XGBoostJob",
        "PaddleJob",
        "JAXJob",
        "RayJob",
        "RayCluster",
        "AppWrapper",
        "Workflow",
        "SparkApplication",
    }
)
_BATCH_LABELS: Final = (
    "training.kubeflow.org/job-name",
    "trainer.kubeflow.org/trainjob-ancestor-step",
    "batch.kubernetes.io/job-name",
    "job-name",
    "jobset.sigs.k8s.io/jobset-name",
    "ray.io/cluster",
)
_NOTEBOOK_LABELS: Final = (("notebook-name", ""), ("component", "singleuser-server"))


def _pod_kind(pod: Pod) -> JobKind:
    if any(key in pod.labels and value in {"", pod.labels[key]} for key, value in _NOTEBOOK_LABELS):
        return "interactive"
    if pod.labels.get("ray.io/originated-from-crd") == "RayService":
        return "service"
    if pod.controller in _BATCH_OWNERS or any(key in pod.labels for key in _BATCH_LABELS):
        return "batch"
    return "service" if pod.controller else ""


# Containers, units, processes


def _by_container(place: Cgroup, case: _Case) -> _Found:
    name = ""
    if not place.delegated:
        # An id of a container within a container, too: whoever made it up runs the outer one as root.
        name = case.lookups.container_name(place.container_id)
    found = _Found("container", job_id=place.container_id, container=name or _short(place.container_id))
    if place.delegated:
        found.user = case.owner(place)
        if place.unit and place.owner_uid < 0:
            found.job_id = place.unit
    return found


def _short(container_id: str) -> str:
    """As people know it: 12 digits of an id; a name stays one."""
    return container_id[:12] if _HEX_ID.fullmatch(container_id) else container_id


_HEX_ID: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)


def _by_unit(place: Cgroup, case: _Case) -> _Found:
    if place.delegated:
        user = case.owner(place)
        return _Found("systemd", job_id=f"{user}/{place.unit}", user=user)
    kind: JobKind = "service" if place.unit.endswith(".service") else ""
    return _Found("systemd", job_id=place.unit, kind=kind, user=case.evidence.user)


def _name_by_itself(found: _Found, place: Cgroup, case: _Case) -> None:
    """The name where neither Slurm nor Kubernetes gave one: its environment's, else the container's, and so on."""
    if _by_own_slurm_id(found, place, case) or _by_own_pod_name(found, place, case):
        return
    variable = next((name for name in case.settings.name_variables if case.variable(name)), "")
    if variable:
        found.name(case.use(variable), f"environment {variable}", "environ")
        if not found.kind and variable.startswith(_BATCH_VARIABLES):
            found.kind = "batch"
        return
    match place.kind:
        case "pod":
            name = found.container or _short(place.container_id)
            found.name(name or place.pod_uid, "container" if name else "pod UID")
        case "container" if place.delegated:
            found.name(place.unit or f"{found.user}/{found.container}", "container of a user's own")
        case "container":
            found.name(found.container, "container")
        case "unit":
            found.name(found.job_id, "systemd unit")
        case _:
            user = bounded(case.evidence.user or "unknown", _MAX_USER_BYTES)
            comm = bounded(case.evidence.comm or "unknown", MAX_COMM_BYTES)
            found.name(f"{user}/{comm}", "user and program", "process")


_MAX_USER_BYTES: Final = 48


def _by_own_slurm_id(found: _Found, place: Cgroup, case: _Case) -> bool:
    job_id = case.variable("SLURM_JOB_ID")
    if place.kind in {"pod", "container", "build"} or not _JOB_ID.fullmatch(job_id):
        return False
    if case.is_hidden:
        case.why.append("SLURM_JOB_ID of the environment is not believed: the cgroup could not be read")
        return False
    told = case.lookups.slurm_job(job_id)
    if told is not None and told.user:
        if not case.is_by_user(told.user):
            case.why.append("SLURM_JOB_ID of the environment is not believed: that job is another user's")
            return False
    elif not _may_be_slurmds(place):
        case.why.append("SLURM_JOB_ID of the environment is not believed: " + _UNCONFIRMED)
        return False
    found.job_id = case.use("SLURM_JOB_ID")
    found.kind = told.kind if told else ""
    if told and told.name:
        found.name(told.name, "environment SLURM_JOB_ID", "environ")
    elif case.variable("SLURM_JOB_NAME"):
        found.name(case.use("SLURM_JOB_NAME"), "environment SLURM_JOB_NAME", "environ")
    else:
        found.name(f"slurm-{job_id}", "environment SLURM_JOB_ID", "environ")
    return True


def _may_be_slurmds(place: Cgroup) -> bool:
    """Whether slurmd may have started it although no cgroup of a job is there (proctrack/linuxproc, pgid)."""
    return _says_nothing(place) or (place.kind == "unit" and place.unit.startswith("slurmd") and not place.delegated)


def _says_nothing(place: Cgroup) -> bool:
    """A slice says something: that it is no job's directory."""
    return not place.kind and not place.form and place.unknown in {"", "empty", "root"}


def _by_own_pod_name(found: _Found, place: Cgroup, case: _Case) -> bool:
    name, namespace = case.variable("POD_NAME"), case.variable("POD_NAMESPACE")
    if not name or not (place.kind == "pod" or _says_nothing(place)):
        return False
    if case.is_hidden:
        case.why.append("POD_NAME of the environment is not believed: the cgroup could not be read")
        return False
    told = case.lookups.pod_of(namespace, name) if namespace else None
    if place.kind == "pod" and told is not None and told.uid and told.uid != place.pod_uid:
        case.why.append("POD_NAME of the environment is not believed: that pod has another UID")
        return False
    if place.kind != "pod" and told is not None:
        case.why.append("POD_NAME of the environment is not believed: that pod's processes have its cgroup")
        return False
    found.pod = case.use("POD_NAME")
    found.namespace = case.use("POD_NAMESPACE") if namespace else ""
    found.name(name, "environment POD_NAME", "environ")
    return True


# Rules of the user's


def _apply_rules(found: _Found, case: _Case) -> None:
    """The first rule that applies says what it is, over everything else."""
    for number, rule in enumerate(case.settings.rules, 1):
        told = rule.match(case.evidence)
        if told is None:
            continue
        kind = told.pop("kind", "")
        if kind in _KINDS:
            found.kind = _as_kind(kind)
        for name, text in told.items():
            setattr(found, name, text)
        if "job" in told:
            found.rule, found.source = f"rule {number}", "rule"
        return


def _as_kind(text: str) -> JobKind:
    return next(kind for kind in get_args(JobKind) if kind == text)
