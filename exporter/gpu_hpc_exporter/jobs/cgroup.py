"""What /proc/<pid>/cgroup says of a process: which workload it belongs to, in every layout that runtimes make.

Who made a directory decides what its name proves, and position tells who made it. The rule:

- A path is read from the hierarchy's root, by the rows of one table, each of which is anchored there. Directories at
  the root and in slices are made by root alone: rows there are trusted.
- Below `user@<uid>.service`, and below a `session-<n>.scope`, a user can make directories of any name. There only
  containers of rootless runtimes are recognised, at the one place where these put them; they are marked `delegated`
  and name no pod and no Slurm job, ever.
- Below a system unit nothing is recognised, except for a runtime's or kubelet's own unit, and Podman's payload in a
  unit, which is `delegated` as well: a unit may have given its subtree to a user.
- What lies inside a workload belongs to whoever runs it. Inside containers that Docker, Podman or nerdctl run as
  root, whose owner is as good as root, the innermost workload wins (kind, Docker in Docker, Slurm in a container);
  `outer` tells what it runs in. Inside pods, Slurm jobs and system containers, which are other people's, the outer
  one wins and what is inside is only a `claim`, which a lookup may confirm.
- A path that begins with `/..` is relative to our own cgroup namespace, and as much of its beginning as it shares
  with us cannot be seen. The rows then also begin in the middle. Who could fool that shares a delegated subtree with
  the exporter itself.
- Where the hierarchies of v1 name two different workloads, none is believed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

CgroupKind = Literal["", "slurm", "pod", "container", "build", "helper", "unit", "session"]
"""helper: conmon, slurmstepd and the like, which run workloads and are none. "" where nothing is known."""

UNKNOWN_FORMS: Final = (
    "empty",
    "malformed",
    "root",
    "relative",
    "conflict",
    "container_like",
    "pod_like",
    "slurm_like",
    "other",
)
"""Every value that `Cgroup.unknown` can have besides "": labels of the counter of forms that we could not read."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """A process's place. Every id stands in the text itself; a pod's UID has `-` where systemd wrote `_`.

    form: row of the table that matched. container_id: 64 hex digits, or the name of an LXC, nspawn or `ctr` container.
    owner_uid: the user whose session or Slurm job it is, where the path says so, else -1. delegated: a user of the
    machine may have made this directory. unknown: one of UNKNOWN_FORMS where no row matched, else "".
    """

    kind: CgroupKind = ""
    form: str = ""
    pod_uid: str = ""
    container_id: str = ""
    slurm_job_id: str = ""
    slurm_sluid: str = ""
    slurm_step: str = ""
    slurm_node: str = ""
    unit: str = ""
    session: str = ""
    owner_uid: int = -1
    delegated: bool = False
    outer: Cgroup | None = None
    claim: Cgroup | None = None
    unknown: str = ""


@lru_cache(maxsize=256)
def parse_cgroup(text: str) -> Cgroup:
    """Read the text of a cgroup file: v1, v2 or both. Never raises; what is not certain is not there.

    Processes of one workload have one text: the last few answers are kept.
    """
    paths = list(dict.fromkeys(_paths(text)))
    places = [place for path in paths if (place := _parse(path)) is not None]
    if not places:
        return Cgroup(unknown=_unknown_form(text, paths))
    if len(places) == 1:
        return places[0]
    best = max(places, key=_rank)
    rank = _rank(best)[0]
    ids = _ids(best)
    if rank >= _DELEGATED and any(_rank(place)[0] == rank and not _ids(place) <= ids for place in places):
        return Cgroup(unknown="conflict")
    return best


_MAX_LINES: Final = 64
_MAX_PATH: Final = 4096
_LINE: Final = re.compile(r"[0-9]{1,10}:[^:/]{0,256}:(/[^\n]*)")
_DELETED: Final = " (deleted)"
"""Behind the path of a zombie whose cgroup is gone."""


def _paths(text: str) -> Iterator[str]:
    for line in text.split("\n", _MAX_LINES)[:_MAX_LINES]:
        match = _LINE.fullmatch(line)
        if match and len(match[1]) <= _MAX_PATH:
            yield match[1].removesuffix(_DELETED)


_HEX: Final = r"[0-9a-f]{64}"
_UID: Final = r"(?:[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})"
"""A pod's UID; that of a static pod may be a bare hash."""
_SLICES: Final = r"(?:/[^/]+\.slice)*"
_POD: Final = rf"(?:[^/]+-)?kubepods(?:-burstable|-besteffort)?-pod(?P<pod>{_UID})\.slice"
_LEAF: Final = rf"(?:/(?:(?:cri-containerd|crio|docker|libpod|containerd)-)?(?P<ctr>{_HEX})(?:\.scope)?)?"
_NODE_UNIT: Final = (
    r"(?:(?:/system\.slice)?/"
    r"(?:containerd|docker|kubelet|crio|k3s|k3s-agent|rke2-server|rke2-agent|snap\.microk8s\.[a-z0-9-]+)\.service)?"
)
_JOB: Final = r"/(?:job_(?P<job>[0-9]{1,10})|(?P<sluid>s[0-9A-Z]{12,15}))"
_STEP: Final = r"(?:/step_(?P<step>[a-z0-9+.]{1,32}))"
_CONMON: Final = rf"(?:crio|libpod)-conmon-{_HEX}(?:\.scope)?"
_KUBEPODS: Final = (
    r"(?:/(?!(?:docker|lxc|slurm\w*|ecs|default)/)[a-z][a-z0-9_-]{0,63}){0,2}/kubepods(?:\.slice)?"
    r"(?:/burstable|/besteffort|/guaranteed)?"
)
_USER_MANAGER: Final = r"(?:(?:/user\.slice)?/user-[0-9]{1,10}\.slice)?/user@(?P<uid>[0-9]{1,10})\.service"
_SESSION: Final = (
    r"(?:/user\.slice)?(?:/user-(?P<uid>[0-9]{1,10})\.slice)?/session-(?P<session>[A-Za-z0-9]{1,32})\.scope"
)


_Trust = Literal["", "delegated", "opens"]


@dataclass(frozen=True, slots=True)
class _Row:
    """A layout.

    needs: what every path of the layout contains, asked first since it costs next to nothing. trust: `delegated` where
    a user may have made it, `opens` where whoever is inside is as good as root.
    """

    form: str
    kind: CgroupKind
    needs: str
    pattern: re.Pattern[str]
    trust: _Trust = ""


def _row(form: str, kind: CgroupKind, needs: str, pattern: str, trust: _Trust = "") -> _Row:
    return _Row(form, kind, needs, re.compile(rf"{pattern}(?=/|\Z)", re.ASCII), trust)


_CTR: Final = rf"(?P<ctr>{_HEX})"
_PAYLOAD: Final = rf"/(?P<unit>[^/]+\.service)/libpod-payload-{_CTR}"
_LIBPOD_PARENT: Final = rf"/libpod_parent(?:/{_HEX})?/libpod-(?:payload-)?{_CTR}"

_ROWS: Final = (
    # What users can make comes first: no row below may look inside.
    _row("podman_user_unit", "container", "libpod-payload-", rf"{_USER_MANAGER}{_SLICES}{_PAYLOAD}", "delegated"),
    _row(
        "rootless",
        "container",
        "user@",
        rf"{_USER_MANAGER}{_SLICES}/(?:libpod|docker|nerdctl)-{_CTR}\.scope",
        "delegated",
    ),
    _row(
        "rootless_cgroupfs",
        "container",
        "libpod_parent",
        rf"{_USER_MANAGER}(?:/user\.slice)?{_LIBPOD_PARENT}",
        "delegated",
    ),
    _row("conmon_user", "helper", "conmon-", rf"{_USER_MANAGER}{_SLICES}/{_CONMON}", "delegated"),
    _row("unit_user", "unit", "user@", rf"{_USER_MANAGER}{_SLICES}/(?P<unit>[^/]+\.service)", "delegated"),
    _row("user_manager", "session", "user@", _USER_MANAGER, "delegated"),
    _row("podman_session", "container", "libpod-", rf"{_SESSION}/libpod-(?:payload-)?{_CTR}(?:\.scope)?", "delegated"),
    _row("session", "session", "session-", _SESSION, "delegated"),
    # Helpers, before the workloads beside which they live.
    _row("conmon", "helper", "conmon-", rf"{_NODE_UNIT}{_SLICES}/{_CONMON}"),
    _row("conmon_cgroupfs", "helper", "conmon-", rf"(?:{_KUBEPODS}/pod{_UID}|/libpod_parent)/{_CONMON}"),
    _row("lxc_monitor", "helper", "lxc.monitor", r"/lxc\.monitor[./][^/]+"),
    # Kubernetes.
    _row(
        "kubernetes_colons", "pod", "kubepods", rf"{_NODE_UNIT}{_SLICES}/{_POD}:(?:cri-containerd|crio|docker):{_CTR}"
    ),
    _row("kubernetes_systemd", "pod", "kubepods", rf"{_NODE_UNIT}{_SLICES}/{_POD}{_LEAF}"),
    _row("kubernetes_cgroupfs", "pod", "kubepods", rf"{_NODE_UNIT}{_KUBEPODS}/pod(?P<pod>{_UID}){_LEAF}"),
    # Slurm: version 2, where a node of several slurmd puts its name before; version 1, with its name behind.
    _row("slurm_v2", "slurm", "slurmstepd.scope", rf"{_SLICES}/(?:(?P<node>[^/]+)_)?slurmstepd\.scope{_JOB}{_STEP}?"),
    _row("slurm_v1", "slurm", "/slurm", rf"/slurm(?:_(?P<node>[^/]+))?(?:/uid_(?P<uid>[0-9]{{1,10}}))?{_JOB}{_STEP}?"),
    _row("slurmstepd", "helper", "slurm", rf"(?:{_SLICES}/(?:[^/]+_)?slurmstepd\.scope|/slurm(?:_[^/]+)?)"),
    # Containers.
    _row("docker_build", "build", "buildkit", r"(?:/system\.slice)?(?:/docker\.service)?(?:/docker)?/buildkit/[^/]+"),
    _row("scope", "container", ".scope", rf"{_SLICES}/(?:docker|libpod|nerdctl)-{_CTR}\.scope", "opens"),
    _row("cri_scope", "container", ".scope", rf"{_SLICES}/(?:cri-containerd|crio|containerd)-{_CTR}\.scope"),
    _row("docker_cgroupfs", "container", "/docker/", rf"(?:/system\.slice/docker\.service)?/docker/{_CTR}", "opens"),
    _row("podman_cgroupfs", "container", "libpod_parent", _LIBPOD_PARENT, "opens"),
    _row("podman_unit", "container", "libpod-payload-", rf"{_SLICES}{_PAYLOAD}", "delegated"),
    _row("ecs", "container", "/ecs/", rf"/ecs(?:/[^/]+){{1,2}}/{_CTR}"),
    _row("containerd_namespace", "container", "/", rf"/(?:default|moby|nerdctl|actions_job)/{_CTR}", "opens"),
    _row("containerd_cri", "container", "/k8s.io/", rf"/k8s\.io/{_CTR}"),
    _row("containerd_ctr", "container", "/default/", r"/default/(?P<ctr>[A-Za-z0-9][A-Za-z0-9_.-]{0,127})"),
    _row("lxc", "container", "/lxc", r"/(?:lxc/|lxc\.payload[./])(?P<ctr>[^/]{1,255})"),
    _row("nspawn", "container", "nspawn@", r"/machine\.slice/systemd-nspawn@(?P<ctr>[^/]{1,255})\.service"),
    _row("machine", "container", "/machine-", r"/machine\.slice/machine-(?P<ctr>[^/]{1,255})\.scope"),
    # systemd.
    _row("init", "helper", "/init.scope", r"/init\.scope"),
    _row("unit", "unit", ".s", rf"{_SLICES}/(?P<unit>[^/]+\.(?:service|scope))"),
    _row("user_slice", "session", "/user-", r"/user\.slice/user-(?P<uid>[0-9]{1,10})\.slice\Z"),
    _row("slice", "", ".slice", r"(?:/[^/]+\.slice)+\Z"),
)

_RELATIVE_ROWS: Final = (
    *(row for row in _ROWS if row.form not in {"unit", "slice", "user_slice", "podman_unit", "init"}),
    _row("relative_pod", "pod", "/pod", rf"(?:/burstable|/besteffort)?/pod(?P<pod>{_UID}){_LEAF}"),
    _row("relative_slurm", "slurm", "/step_", rf"(?:/uid_(?P<uid>[0-9]{{1,10}}))?{_JOB}{_STEP}"),
    _row("relative_container", "container", "/", rf"/{_CTR}"),
    _row(
        "relative_unit",
        "unit",
        "/system.slice/",
        r"/system\.slice(?:/[^/]+\.slice)*/(?P<unit>[^/]+\.(?:service|scope))",
    ),
)
"""For the end of a path: a unit proves nothing where the slice it stands in may be a user's."""

_PARENTS: Final = re.compile(r"(?:/\.\.)+(?=/|\Z)")
_INSIDE: Final = re.compile(r"(?:/(?:ns|container|payload|init|supervisor|\.lxc)(?=/|\Z))+")
"""Directories that runtimes put between a container and what runs in it."""
_WORKLOADS: Final = frozenset({"slurm", "pod", "container"})
_MAX_DEPTH: Final = 8


def _parse(path: str) -> Cgroup | None:
    parents = _PARENTS.match(path)
    if parents:
        return _place(path[parents.end() :], _RELATIVE_ROWS, 0)
    return _place(path, _ROWS, 0)


def _place(path: str, rows: tuple[_Row, ...], depth: int) -> Cgroup | None:
    """The first row's place, and what is inside it."""
    if len(path) <= 1:
        return None
    for row in rows:
        if row.needs in path and (match := row.pattern.match(path)):
            break
    else:
        return None
    place = _from_match(row, match.groupdict())
    if row.kind not in _WORKLOADS or row.trust == "delegated" or depth >= _MAX_DEPTH:
        return place
    rest = path[match.end() :]
    between = _INSIDE.match(rest)
    inner = _place(rest[between.end() :] if between else rest, _ROWS, depth + 1)
    if inner is None or inner.kind not in _WORKLOADS or inner.delegated:
        return place
    return _innermost(inner, place) if row.trust == "opens" else replace(place, claim=inner)


def _innermost(inner: Cgroup, outer: Cgroup) -> Cgroup:
    return replace(inner, outer=outer if inner.outer is None else _innermost(inner.outer, outer))


def _from_match(row: _Row, found: dict[str, str | None]) -> Cgroup:
    uid = found.get("uid")
    return Cgroup(
        kind=row.kind,
        form=row.form,
        pod_uid=(found.get("pod") or "").replace("_", "-"),
        container_id=found.get("ctr") or "",
        slurm_job_id=found.get("job") or "",
        slurm_sluid=found.get("sluid") or "",
        slurm_step=found.get("step") or "",
        slurm_node=found.get("node") or "",
        unit=found.get("unit") or "",
        session=found.get("session") or "",
        owner_uid=int(uid) if uid else -1,
        delegated=row.trust == "delegated",
    )


_CERTAIN: Final = 4
_DELEGATED: Final = 3


def _rank(place: Cgroup) -> tuple[int, int]:
    """What to believe where hierarchies differ: the more certain, then the more exact."""
    exact = len(_ids(place)) + bool(place.unit or place.session)
    if place.kind in _WORKLOADS:
        return (_DELEGATED if place.delegated else _CERTAIN), exact
    return {"build": 2, "helper": 2, "unit": 1, "session": 1}.get(place.kind, 0), exact


def _ids(place: Cgroup | None) -> frozenset[str]:
    if place is None:
        return frozenset()
    own = {place.pod_uid, place.container_id, place.slurm_job_id, place.slurm_sluid} - {""}
    return _ids(place.outer) | own | _ids(place.claim)


_LOOKS: Final = (
    ("container_like", re.compile(_HEX)),
    ("pod_like", re.compile(rf"pod{_UID}")),
    ("slurm_like", re.compile(r"slurm|/job_[0-9]")),
)


def _unknown_form(text: str, paths: list[str]) -> str:
    """What to call a place that no row knows; from a short list, since it becomes a label."""
    if not paths:
        return "malformed" if text.strip() else "empty"
    if all(path == "/" for path in paths):
        return "root"
    for form, pattern in _LOOKS:
        if any(pattern.search(path) for path in paths):
            return form
    return "relative" if any(path.startswith("/..") for path in paths) else "other"
