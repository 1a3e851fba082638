"""Which workload a cgroup file names: every layout of field case G01 and more, and who must not be believed."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.jobs.cgroup import UNKNOWN_FORMS, Cgroup, parse_cgroup
from unit.known import CID, CID2, PU, PU2, PU_

USER = "/user.slice/user-1000.slice"
MANAGER = f"{USER}/user@1000.service"
POD_SCOPE = f"kubepods-pod{PU_}.slice/cri-containerd-{CID}.scope"
SLUID = "s0EXAMPLE0SLU00"
STATIC = "0123456789abcdef0123456789abcdef"


def told(text: str) -> dict[str, Any]:
    """What the parser says, without its empty fields, its row's name and its chain."""
    return {
        name: value
        for name, value in asdict(parse_cgroup(text)).items()
        if value not in ("", -1, None, False) and name not in {"form", "outer", "claim"}
    }


def v1(path: str) -> str:
    """A file of version 1, where every hierarchy has the same path."""
    return "".join(f"{number}:{name}:{path}\n" for number, name in enumerate(("memory", "cpu,cpuacct", "pids"), 2))


def pod(container_id: str = CID, uid: str = PU) -> dict[str, Any]:
    """What is said of a pod's process."""
    return {"kind": "pod", "pod_uid": uid} | ({"container_id": container_id} if container_id else {})


def container(container_id: str = CID, **more: Any) -> dict[str, Any]:
    """What is said of a container's process."""
    return {"kind": "container", "container_id": container_id, **more}


def slurm(job: str = "123", step: str = "0", **more: Any) -> dict[str, Any]:
    """What is said of a Slurm job's process."""
    return {"kind": "slurm", "slurm_job_id": job, **({"slurm_step": step} if step else {}), **more}


def own(**more: Any) -> dict[str, Any]:
    """What is said of something that user 1000 can make."""
    return {"owner_uid": 1000, "delegated": True, **more}


G01 = (
    (
        f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{PU_}.slice/cri-containerd-{CID}.scope",
        pod(),
    ),
    (f"0::/kubepods/besteffort/pod{PU}/{CID}", pod()),
    (f"0::/kubepods.slice/kubepods-pod{PU_}.slice/crio-{CID}.scope", pod()),
    (f"0::/kubepods.slice/kubepods-pod{PU_}.slice/crio-conmon-{CID}.scope", {"kind": "helper"}),
    (
        f"1:name=systemd:/system.slice/containerd.service/kubepods-burstable-pod{PU_}.slice:cri-containerd:{CID}",
        pod(),
    ),
    (f"12:devices:/docker/{CID}\n0::/system.slice/containerd.service", container()),
    (f"0::/system.slice/docker-{CID}.scope", container()),
    (f"0::/docker/{CID}", container()),
    (f"0::/machine.slice/libpod-{CID}.scope/container", container()),
    (f"0::{MANAGER}/user.slice/libpod-{CID}.scope", container(**own())),
    (f"0::{USER}/session-3.scope/libpod-payload-{CID}", container(**own(session="3"))),
    ("0::/docker/buildkit/t0examplet0examplet0exampl", {"kind": "build"}),
    (
        f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{PU_}.slice/cri-containerd-{CID}.scope",
        pod(),
    ),
    ("0::/", {"unknown": "root"}),
    ("", {"unknown": "empty"}),
    ("garbage\x00\udcff", {"unknown": "malformed"}),
)


@pytest.mark.parametrize(("text", "expected"), G01)
def test_g01_cgroup_text_zoo(text: str, expected: dict[str, Any]) -> None:
    """Every line of the case, with and without a line's end."""
    assert told(text) == expected
    assert told(f"{text}\n") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Kubernetes
        (v1(f"/kubepods/burstable/pod{PU}/{CID}") + "0::/system.slice/containerd.service\n", pod()),
        (f"0::/kubepods/pod{PU}/{CID}", pod()),
        (f"0::/kubepods/pod{PU}", pod("")),
        (f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{PU_}.slice", pod("")),
        (f"0::/kubepods/burstable/pod{PU}/crio-{CID}", pod()),
        (f"0::/kubepods/burstable/pod{PU}/crio-conmon-{CID}", {"kind": "helper"}),
        (f"0::/kubepods.slice/kubepods-pod{PU_}.slice/crio-{CID}.scope/container", pod()),
        (f"0::/kubepods.slice/kubepods-pod{PU_}.slice/docker-{CID}.scope", pod()),
        (f"0::/kubepods.slice/kubepods-pod{STATIC}.slice/cri-containerd-{CID}.scope", pod(uid=STATIC)),
        (f"0::/kubelet/kubepods/besteffort/pod{PU}/{CID}", pod()),
        (f"0::/system.slice/k3s.service/kubepods/burstable/pod{PU}/{CID}", pod()),
        (f"0::/kubepods.slice/kubepods-pod{PU_}.slice/cri-containerd-{CID}.scope/init.scope", pod()),
        (f"0::/kubepods.slice/kubepods-pod{PU_}.slice/cri-containerd-{CID}.scope (deleted)", pod()),
        ("0::/kubepods.slice/kubepods-podnotauid.slice/x", {"unknown": "other"}),
        (f"0::/kubepods.slice/kubepods-podnotauid.slice/{CID}", {"unknown": "container_like"}),
        # Relative to our own namespace
        (f"0::/../../{POD_SCOPE}", pod()),
        (f"0::/../../../kubepods-burstable.slice/kubepods-burstable-pod{PU_}.slice/cri-containerd-{CID}.scope", pod()),
        (f"0::/../../pod{PU}/{CID}", pod()),
        (f"0::/../../../besteffort/pod{PU}/{CID}", pod()),
        (f"0::/../../../../kubepods/besteffort/pod{PU}/{CID}", pod()),
        (f"0::/../cri-containerd-{CID}.scope", container()),
        (f"0::/../{CID}", container()),
        ("0::/../../job_123/step_0/user/task_0", slurm()),
        ("0::/../../system.slice/slurmstepd.scope/job_123/step_0/user/task_0", slurm()),
        ("0::/../../system.slice/sshd.service", {"kind": "unit", "unit": "sshd.service"}),
        ("0::/../app.slice/sshd.service", {"unknown": "relative"}),
        (f"0::/../../{USER[1:]}/session-3.scope", {"kind": "session", **own(session="3")}),
        ("0::/..", {"unknown": "relative"}),
        # Docker and containerd
        (f"0::/system.slice/docker.service/docker/{CID}", container()),
        (f"0::/ecs/cluster/task/{CID}", container()),
        (f"0::/my.slice/docker-{CID}.scope", container()),
        (f"0::/system.slice/nerdctl-{CID}.scope", container()),
        (f"0::{MANAGER}/user.slice/nerdctl-{CID}.scope", container(**own())),
        (f"0::{MANAGER}/user.slice/docker-{CID}.scope", container(**own())),
        (f"0::/default/{CID}", container()),
        (f"0::/moby/{CID}", container()),
        (f"0::/k8s.io/{CID}", container()),
        ("0::/default/my-training", container("my-training")),
        ("0::/system.slice/docker.service", {"kind": "unit", "unit": "docker.service"}),
        # Podman
        (f"0::/machine.slice/machine-libpod_pod_{CID2}.slice/libpod-{CID}.scope/container", container()),
        (f"0::/machine.slice/libpod-conmon-{CID}.scope", {"kind": "helper"}),
        (f"0::/libpod_parent/libpod-{CID}", container()),
        (f"0::/libpod_parent/{CID2}/libpod-{CID}", container()),
        (f"0::{MANAGER}/user.slice/user-libpod_pod_{CID2}.slice/libpod-{CID}.scope/container", container(**own())),
        (f"0::{MANAGER}/user.slice/libpod-conmon-{CID}.scope", {"kind": "helper", **own()}),
        (
            f"0::{MANAGER}/app.slice/trainer.service/libpod-payload-{CID}",
            container(**own(unit="trainer.service")),
        ),
        (
            f"0::/system.slice/trainer.service/libpod-payload-{CID}",
            container(unit="trainer.service", delegated=True),
        ),
        # LXC, Incus, nspawn
        ("0::/lxc/101/ns/system.slice/ssh.service", container("101")),
        ("0::/lxc.payload.gpu-box/init.scope", container("gpu-box")),
        ("0::/lxc.payload/gpu-box", container("gpu-box")),
        ("0::/lxc.monitor.gpu-box", {"kind": "helper"}),
        ("0::/machine.slice/systemd-nspawn@gpu-box.service/payload", container("gpu-box")),
        # Slurm
        (v1("/slurm/uid_1000/job_123/step_0/task_0"), slurm(owner_uid=1000)),
        (
            v1("/slurm/uid_1000/job_123/step_batch/task_0") + "1:name=systemd:/system.slice/slurmd.service\n",
            slurm(step="batch", owner_uid=1000),
        ),
        ("4:memory:/slurm_node7/uid_1000/job_123/step_0", slurm(owner_uid=1000, slurm_node="node7")),
        ("4:memory:/slurm/uid_1000/job_123", slurm(step="", owner_uid=1000)),
        ("0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0", slurm()),
        ("0::/system.slice/slurmstepd.scope/job_123/step_batch/user/task_0", slurm(step="batch")),
        ("0::/system.slice/slurmstepd.scope/job_123/step_extern/user/task_special", slurm(step="extern")),
        ("0::/system.slice/slurmstepd.scope/job_123/step_interactive/user/task_0", slurm(step="interactive")),
        ("0::/system.slice/slurmstepd.scope/job_123/step_0+1/user/task_0", slurm(step="0+1")),
        ("0::/system.slice/slurmstepd.scope/job_123/step_0/slurm", slurm()),
        ("0::/system.slice/node7_slurmstepd.scope/job_123/step_0/user/task_0", slurm(slurm_node="node7")),
        ("0::/system.slice/slurmstepd.scope/system", {"kind": "helper"}),
        ("0::/system.slice/slurmd.service", {"kind": "unit", "unit": "slurmd.service"}),
        # systemd
        ("0::/system.slice/triton.service", {"kind": "unit", "unit": "triton.service"}),
        ("0::/system.slice/system-vllm.slice/vllm@70b.service", {"kind": "unit", "unit": "vllm@70b.service"}),
        ("0::/system.slice/run-r12ab.scope", {"kind": "unit", "unit": "run-r12ab.scope"}),
        (f"0::{MANAGER}/app.slice/notebook.service", {"kind": "unit", "unit": "notebook.service", **own()}),
        (f"0::{MANAGER}/app.slice/tmux-spawn-1.scope", {"kind": "session", **own()}),
        (f"0::{MANAGER}/init.scope", {"kind": "session", **own()}),
        (f"0::{USER}/session-3.scope", {"kind": "session", **own(session="3")}),
        (f"1:name=systemd:{USER}/session-3.scope\n4:pids:{USER}\n3:cpu:/", {"kind": "session", **own(session="3")}),
        ("0::/init.scope", {"kind": "helper"}),
        ("0::/user.slice", {}),
        # Nobody's
        (f"0::/somewhere/{CID}", {"unknown": "container_like"}),
        (f"0::/some/where/else/pod{PU}/x", {"unknown": "pod_like"}),
        ("0::/batch/job_123", {"unknown": "slurm_like"}),
        ("0::/htcondor/slot1", {"unknown": "other"}),
    ],
)
def test_layouts(text: str, expected: dict[str, Any]) -> None:
    """What runtimes, kubelets, Slurm and systemd make of each process's place."""
    assert told(text) == expected


def test_g04_sluid() -> None:
    """Slurm 26.05 names directories by SLUID; what merely begins with an s is none."""
    for place in ("system.slice/slurmstepd.scope", "system.slice/node7_slurmstepd.scope"):
        found = parse_cgroup(f"0::/{place}/{SLUID}/step_0/user/task_0")
        assert (found.kind, found.slurm_sluid, found.slurm_job_id) == ("slurm", SLUID, "")
    assert parse_cgroup("0::/system.slice/slurmstepd.scope/system").slurm_sluid == ""


def test_g06_adopted_session() -> None:
    """An SSH session that Slurm adopted stays in its session's scope for systemd: Slurm's hierarchies count."""
    text = f"9:memory:/slurm/uid_1000/job_123/step_extern\n5:devices:/\n1:name=systemd:{USER}/session-3.scope\n"
    found = parse_cgroup(text)
    assert (found.kind, found.slurm_job_id, found.slurm_step) == ("slurm", "123", "extern")


@pytest.mark.parametrize(
    "path",
    [
        f"{MANAGER}/kubepods.slice/{POD_SCOPE}",
        f"{MANAGER}/user.slice/kubepods.slice/{POD_SCOPE}",
        f"{MANAGER}/app.slice/x.scope/kubepods/pod{PU}/{CID}",
        f"{MANAGER}/user.slice/cri-containerd-{CID}.scope",
        f"{MANAGER}/kubepods/pod{PU}/{CID}",
        f"{MANAGER}/docker/{CID}",
        f"{MANAGER}/system.slice/slurmstepd.scope/job_123/step_0/user/task_0",
        f"{MANAGER}/slurm/uid_1000/job_123/step_0",
        f"{MANAGER}/lxc.payload.gpu-box",
        f"{USER}/session-3.scope/docker-{CID}.scope",
        f"{USER}/session-3.scope/kubepods.slice/{POD_SCOPE}",
        f"{USER}/session-3.scope/job_123/step_0",
        f"{USER}/session-3.scope/x/libpod-{CID}.scope",
        f"/..{MANAGER}/kubepods.slice/{POD_SCOPE}",
        f"/../../user@1000.service/kubepods.slice/{POD_SCOPE}",
        f"/../session-3.scope/docker-{CID}.scope",
        f"/system.slice/jupyter-bob.service/kubepods.slice/{POD_SCOPE}",
        f"/system.slice/jupyter-bob.service/docker/{CID}",
        "/system.slice/jupyter-bob.service/slurm/uid_1000/job_123/step_0",
        f"/system.slice/run-r1.scope/docker-{CID}.scope",
        f"{MANAGER}/app.slice/own.service/slurmstepd.scope/job_123/step_0",
    ],
)
def test_look_alikes_of_users_name_nothing(path: str) -> None:
    """What a user can make by mkdir is the user's session or unit and nobody's pod, container or Slurm job."""
    for text in (f"0::{path}\n", f"1:name=systemd:{path}\n4:memory:/user.slice\n"):
        found = parse_cgroup(text)
        assert found.kind in {"session", "unit"}, found
        assert found.pod_uid + found.container_id + found.slurm_job_id + found.slurm_sluid == ""
        assert found.claim is None


def chain(found: Cgroup) -> list[tuple[str, str]]:
    """Kinds and ids from the winner outwards."""
    links: list[tuple[str, str]] = []
    place: Cgroup | None = found
    while place is not None:
        links.append((place.kind, place.slurm_job_id or place.container_id))
        place = place.outer
    return links


@pytest.mark.parametrize(
    ("path", "winners", "claim"),
    [
        (f"/docker/{CID}/docker/{CID2}", [("container", CID2), ("container", CID)], None),
        (f"/system.slice/docker-{CID}.scope/docker/{CID2}", [("container", CID2), ("container", CID)], None),
        (f"/docker/{CID}/kubepods/besteffort/pod{PU}/{CID2}", [("pod", CID2), ("container", CID)], None),
        (
            f"/docker/{CID}/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{PU_}.slice/cri-containerd-{CID2}.scope",
            [("pod", CID2), ("container", CID)],
            None,
        ),
        (
            f"/docker/{CID}/system.slice/slurmstepd.scope/job_123/step_0/user/task_0",
            [("slurm", "123"), ("container", CID)],
            None,
        ),
        (
            f"/docker/{CID}/docker/{CID2}/slurm/uid_0/job_5/step_0",
            [("slurm", "5"), ("container", CID2), ("container", CID)],
            None,
        ),
        (f"/machine.slice/libpod-{CID}.scope/container/slurm/uid_0/job_5", [("slurm", "5"), ("container", CID)], None),
        # Inside other people's workloads: the outer one, and a claim
        (f"/kubepods/pod{PU}/{CID}/docker/{CID2}", [("pod", CID)], ("container", CID2)),
        (f"/kubepods/pod{PU}/{CID}/kubepods/pod{PU2}/{CID2}", [("pod", CID)], ("pod", CID2)),
        (
            f"/kubepods.slice/{POD_SCOPE}/system.slice/slurmstepd.scope/job_123/step_0",
            [("pod", CID)],
            ("slurm", "123"),
        ),
        (f"/kubepods.slice/{POD_SCOPE}/crio-conmon-{CID2}", [("pod", CID)], None),
        (f"/slurm/uid_1000/job_123/step_0/docker/{CID}", [("slurm", "123")], ("container", CID)),
        (
            "/system.slice/slurmstepd.scope/job_123/step_0/user/slurm/uid_1000/job_999",
            [("slurm", "123")],
            None,
        ),
        (f"/lxc/101/ns/docker/{CID}", [("container", "101")], ("container", CID)),
        (f"/lxc.payload.box/kubepods.slice/{POD_SCOPE}", [("container", "box")], ("pod", CID)),
        # Units and sessions inside a container are its own business
        (f"/docker/{CID}/system.slice/ssh.service", [("container", CID)], None),
        (f"/docker/{CID}{MANAGER}/user.slice/libpod-{CID2}.scope", [("container", CID)], None),
        (f"{MANAGER}/user.slice/libpod-{CID}.scope/docker/{CID2}", [("container", CID)], None),
    ],
)
def test_nested(path: str, winners: list[tuple[str, str]], claim: tuple[str, str] | None) -> None:
    """The innermost that is certain: of containers whose owner is as good as root, else the outer one."""
    found = parse_cgroup(f"0::{path}\n")
    assert chain(found) == winners
    assert (chain(found.claim)[0] if found.claim else None) == claim


@pytest.mark.parametrize(
    "text",
    [
        "4:memory:/slurm/uid_1000/job_123/step_0\n5:devices:/slurm/uid_1001/job_124/step_0\n",
        f"4:memory:/kubepods/pod{PU}/{CID}\n5:devices:/kubepods/pod{PU2}/{CID2}\n",
        f"4:memory:/slurm/uid_1000/job_123/step_0\n0::/system.slice/docker-{CID}.scope\n",
    ],
)
def test_contradicting_hierarchies_name_nothing(text: str) -> None:
    """Of two workloads neither can be believed."""
    assert told(text) == {"unknown": "conflict"}


def test_hierarchies_that_know_more_or_less() -> None:
    """What one hierarchy adds to another is no contradiction, and what a user made never wins."""
    partly = f"4:memory:/docker/{CID}/kubepods/pod{PU}/{CID2}\n1:name=systemd:/docker/{CID}\n"
    assert chain(parse_cgroup(partly)) == [("pod", CID2), ("container", CID)]
    forged = f"1:name=systemd:{MANAGER}/user.slice/docker-{CID2}.scope\n4:memory:/slurm/uid_1000/job_123/step_0\n"
    assert chain(parse_cgroup(forged)) == [("slurm", "123")]


def test_units_that_are_none_of_ours() -> None:
    """Names with odd bytes and escapes are passed on as they are."""
    assert parse_cgroup("0::/system.slice/a\\x2db\udcff\x01.service").unit == "a\\x2db\udcff\x01.service"


@pytest.mark.parametrize(
    "text",
    [
        "0::" + "/x.slice" * 100_000,
        "0::/" + "a" * 1_000_000,
        "0::/a\n" * 100_000,
        f"0::{('/docker/' + CID) * 50}",
        "0::" + "/../" * 1000,
        "9" * 100 + "::/",
        "0::/" + "-" * 4000 + "kubepods-pod",
    ],
)
@pytest.mark.timeout(60)
def test_huge_texts_are_bounded(text: str) -> None:
    """Neither time nor depth grows without end."""
    assert isinstance(parse_cgroup(text), Cgroup)


SEGMENTS = st.sampled_from(
    [
        "",
        "..",
        "system.slice",
        "user.slice",
        "user-1000.slice",
        "user@1000.service",
        "session-3.scope",
        "kubepods",
        "kubepods.slice",
        f"kubepods-pod{PU_}.slice",
        f"pod{PU}",
        f"pod{PU2}",
        f"cri-containerd-{CID}.scope",
        f"docker-{CID}.scope",
        f"libpod-payload-{CID}",
        f"libpod-{CID2}.scope",
        "docker",
        "lxc",
        "slurm",
        "slurmstepd.scope",
        "uid_1000",
        "job_123",
        "step_0",
        "step_extern",
        SLUID,
        CID,
        CID2,
        "x.service",
        "ns",
        "\udcff\x01",
    ]
)
FILES = st.lists(
    st.tuples(st.sampled_from(["0:", "1:name=systemd", "4:memory"]), st.lists(SEGMENTS, max_size=9)), max_size=4
).map(lambda lines: "".join(f"{head}:/{'/'.join(path)}\n" for head, path in lines).encode("utf-8", "surrogateescape"))


@given(st.one_of(st.binary(max_size=300), FILES))
@example(b"\xff")
@settings(max_examples=1500, deadline=None)
def test_any_bytes(data: bytes) -> None:
    """Nothing raises, and no id comes out that did not go in."""
    text = data.decode("utf-8", "surrogateescape")
    found = parse_cgroup(text)
    assert found.unknown in {"", *UNKNOWN_FORMS}
    for place in (found, found.outer, found.claim):
        if place is not None:
            for value in (place.container_id, place.slurm_job_id, place.slurm_sluid, place.unit, place.session):
                assert value in text
            assert place.pod_uid in text.replace("_", "-")
            assert place.owner_uid == -1 or str(place.owner_uid) in text


@given(st.lists(SEGMENTS, max_size=9))
@settings(max_examples=1500, deadline=None)
def test_nothing_below_a_users_manager_is_anybody_elses(path: list[str]) -> None:
    """Whatever a user makes in a subtree of her own, no pod and no Slurm job comes out, and nothing but her own."""
    for root in (MANAGER, f"{USER}/session-3.scope"):
        found = parse_cgroup(f"0::{root}/{'/'.join(path)}\n")
        assert found.owner_uid == 1000
        assert found.delegated
        assert found.pod_uid + found.slurm_job_id + found.slurm_sluid == ""
        assert (found.outer, found.claim) == (None, None)


def test_every_tree_has_a_layout_of_its_own() -> None:
    """The trees of tests/root: all but the three that say nothing are known."""
    root = Path(__file__).parent.parent / "root"
    unknown = {tree.name for tree in root.iterdir() if parse_cgroup((tree / "proc/4101/cgroup").read_text()).unknown}
    assert unknown == {"plain"}
    assert all(re.fullmatch(r"[a-z0-9-]+", tree.name) for tree in root.iterdir())
