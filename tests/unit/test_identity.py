"""Whose process it is: names, ids and kinds in the order of the rules, and what is not believed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.jobs.cgroup import UNKNOWN_FORMS
from gpu_hpc_exporter.jobs.identity import Identification, Identities, Settings, identify
from gpu_hpc_exporter.jobs.lookups import Pod, SlurmJob
from gpu_hpc_exporter.jobs.rules import Rule, RuleError, compile_rules
from gpu_hpc_exporter.model import Evidence, Job, JobKind
from gpu_hpc_exporter.sources.procfs import Processes, Users
from gpu_hpc_exporter.text import bounded
from unit.known import CID, CID2, PU, PU2, PU_, Known

NOBODY = Known()
POD_CGROUP = f"0::/kubepods.slice/kubepods-pod{PU_}.slice/cri-containerd-{CID}.scope\n"
SLURM_CGROUP = "0::/system.slice/slurmstepd.scope/job_123/step_0/user/task_0\n"
SLUID_CGROUP = "0::/system.slice/slurmstepd.scope/s0EXAMPLE0SLU00/step_0/user/task_0\n"
SESSION = "0::/user.slice/user-1000.slice/session-3.scope\n"
SLURMD = "0::/system.slice/slurmd.service\n"
DOCKER = f"0::/system.slice/docker-{CID}.scope\n"
POD = Pod(PU, "train-0", "team-x", {"app": "x"}, containers={CID: "pytorch"})
BERT = SlurmJob("123", "bert", "alice", "lab", "gpu", "batch")


def names(uid: int) -> str:
    """Users of the made-up host."""
    return {0: "root", 1000: "alice", 1001: "bob"}.get(uid, str(uid))


SETTINGS = Settings(user_name=names)


def process(cgroup: str, uid: int = 1000, **environment: str) -> Evidence:
    """A Python program in this cgroup."""
    return Evidence(4101, 8765, "python3", "python3 train.py", uid, names(uid), cgroup, environment)


def found(evidence: Evidence, known: Known = NOBODY, settings: Settings = SETTINGS) -> Identification:
    """Identify it."""
    return identify(evidence, known, settings)


def job_of(evidence: Evidence, known: Known = NOBODY, settings: Settings = SETTINGS) -> dict[str, object]:
    """The job's fields that are not ""."""
    job = found(evidence, known, settings).job
    assert job is not None
    return {name: value for name, value in asdict(job).items() if value}


TREES: Mapping[str, Job] = {
    "kubernetes-containerd-systemd": Job("train-0", PU, "", "", "team-x", "train-0", "pytorch", "3", "kubernetes"),
    "kubernetes-containerd-cgroupfs": Job("train-0", PU, "", "", "team-x", "train-0", "pytorch", "", "kubernetes"),
    "kubernetes-containerd-v1": Job("train-0", PU, "", "", "team-x", "train-0", "pytorch", "", "kubernetes"),
    "kubernetes-containerd-colons": Job("train-0", PU, "", "", "team-x", "train-0", "pytorch", "", "kubernetes"),
    "kubernetes-crio": Job("train-0", PU, "", "", "team-x", "train-0", "pytorch", "", "kubernetes"),
    "kubernetes-crio-conmon": Job("root/python3", "", "", "root", source="process"),
    "kubernetes-docker": Job("train-0", PU, "", "", "team-x", "train-0", "pytorch", "", "kubernetes"),
    "kubernetes-kind": Job("train-0", PU, "", "", "team-x", "train-0", "pytorch", "", "kubernetes"),
    "kubernetes-kind-seen-from-host": Job("train-0", PU, "", "", "team-x", "train-0", "pytorch", "", "kubernetes"),
    "kubernetes-relative": Job("train-0", PU, "", "", "team-x", "train-0", "pytorch", "", "kubernetes"),
    "docker-systemd": Job("bert_finetune", CID, "", "", container="aaaaaaaaaaaa", source="environ"),
    "docker-cgroupfs": Job("aaaaaaaaaaaa", CID, container="aaaaaaaaaaaa", source="container"),
    "docker-hybrid": Job("aaaaaaaaaaaa", CID, container="aaaaaaaaaaaa", source="container"),
    "docker-in-docker": Job("bbbbbbbbbbbb", CID2, container="bbbbbbbbbbbb", source="container"),
    "docker-build": Job("root/python3", user="root", source="process"),
    "podman-rootful": Job("aaaaaaaaaaaa", CID, container="aaaaaaaaaaaa", source="container"),
    "podman-rootless": Job("alice/aaaaaaaaaaaa", CID, "", "alice", container="aaaaaaaaaaaa", source="container"),
    "podman-session": Job("alice/aaaaaaaaaaaa", CID, "", "alice", container="aaaaaaaaaaaa", source="container"),
    "podman-quadlet": Job(
        "trainer.service", "trainer.service", "", "root", container="aaaaaaaaaaaa", source="container"
    ),
    "containerd-nerdctl": Job("aaaaaaaaaaaa", CID, container="aaaaaaaaaaaa", source="container"),
    "containerd-ctr": Job("my-training", "my-training", container="my-training", source="container"),
    "lxc-payload": Job("gpu-box", "gpu-box", container="gpu-box", source="container"),
    "lxc-proxmox": Job("101", "101", container="101", source="container"),
    "slurm-v2": Job("bert", "123", "batch", "alice", rank="1", source="slurm"),
    "slurm-v2-batch": Job("bert", "123", "batch", "alice", source="slurm"),
    "slurm-v2-extern": Job("bert", "123", "batch", "alice", source="slurm"),
    "slurm-v2-multiple": Job("bert", "123", "batch", "alice", source="slurm"),
    "slurm-v2-sluid": Job("bert", "123", "batch", "alice", source="slurm"),
    "slurm-v1": Job("bert", "123", "batch", "alice", source="slurm"),
    "slurm-v1-node": Job("bert", "123", "batch", "alice", source="slurm"),
    "slurm-v1-adopted": Job("bert", "123", "batch", "alice", source="slurm"),
    "slurm-in-docker": Job("bert", "123", "batch", "alice", container="aaaaaaaaaaaa", source="slurm"),
    "slurm-without-cgroups": Job("bert", "123", "batch", "alice", source="environ"),
    "systemd-unit": Job("triton.service", "triton.service", "service", "root", source="systemd"),
    "systemd-user-unit": Job("alice/notebook.service", "alice/notebook.service", "", "alice", source="systemd"),
    "systemd-session": Job("alice/python3", "", "interactive", "alice", source="process"),
    "plain": Job("bert_finetune", "", "", "alice", source="environ"),
    "look-alike-pod": Job("alice/python3", "", "interactive", "alice", source="process"),
    "look-alike-docker": Job("alice/python3", "", "interactive", "alice", source="process"),
    "look-alike-slurm": Job("alice/python3", "", "interactive", "alice", source="process"),
}
ROOT = Path(__file__).parent.parent / "root"


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.iterdir()))
def test_trees(name: str) -> None:
    """Every layout, read from a tree and identified on a host that knows a pod and bob's Slurm job 123 or alice's."""
    root = ROOT / name / "proc"
    settings = Settings(user_name=Users(root).name)
    evidence = Processes(root, settings.variables, settings.user_name).read(4101)
    assert evidence is not None
    # In the look-alike's case job 123 is somebody else's, as is the pod.
    bert = replace(BERT, user="bob") if name.startswith("look-alike") else BERT
    known = Known((POD,), (bert,), sluids={"s0EXAMPLE0SLU00": "123"})
    assert identify(evidence, known, settings).job == TREES[name]


# The order of names


@pytest.mark.parametrize(
    ("labels", "annotations", "expected"),
    [
        ({"training.kubeflow.org/job-name": "bert", "ray.io/cluster": "r"}, {}, "bert"),
        ({"ray.io/cluster": "r", "job-name": "j"}, {}, "r"),
        ({"app.kubernetes.io/instance": "i", "job-name": "j"}, {}, "j"),
        ({"app.kubernetes.io/instance": "i"}, {}, "i"),
        ({"job-name": "  "}, {"example.org/job": "note"}, "note"),
        ({}, {}, "train-0"),
    ],
)
def test_a_pods_job(labels: Mapping[str, str], annotations: Mapping[str, str], expected: str) -> None:
    """The first label of the list, then an annotation, then the pod's name; the environment changes nothing."""
    pod = replace(POD, labels=labels, annotations=annotations)
    settings = replace(SETTINGS, pod_annotations=("example.org/job",))
    evidence = process(POD_CGROUP, 0, JOB_NAME="forged", SLURM_JOB_ID="999", POD_NAME="other", POD_NAMESPACE="team-y")
    assert job_of(evidence, Known((pod,)), settings) | {"kind": ""} == {
        "job": expected,
        "job_id": PU,
        "kind": "",
        "namespace": "team-x",
        "pod": "train-0",
        "container": "pytorch",
        "source": "kubernetes",
    }


def test_f09_a_pod_that_no_source_knows() -> None:
    """Its UID stands in the cgroup; its name may come from its own environment, never that of a known other pod."""
    assert job_of(process(POD_CGROUP)) == {"job": "aaaaaaaaaaaa", "job_id": PU, "source": "kubernetes"}
    assert job_of(process(POD_CGROUP, JOB_NAME="bert"))["job"] == "bert"
    own = process(POD_CGROUP, POD_NAME="train-7", POD_NAMESPACE="team-x")
    assert job_of(own) == {
        "job": "train-7",
        "job_id": PU,
        "namespace": "team-x",
        "pod": "train-7",
        "source": "environ",
    }
    other = found(own, Known((Pod(PU2, "train-7", "team-x"),)))
    assert other.job == Job("aaaaaaaaaaaa", PU, source="kubernetes")
    assert any("POD_NAME" in line for line in other.why)
    no_container = process(f"0::/kubepods/pod{PU}\n")
    assert job_of(no_container) == {"job": PU, "job_id": PU, "source": "kubernetes"}


@pytest.mark.parametrize("cgroup", [DOCKER, SLURMD, SESSION])
def test_pod_name_counts_nowhere_else(cgroup: str) -> None:
    """A process of the host or of another container is in no pod."""
    assert "pod" not in job_of(process(cgroup, POD_NAME="train-0", POD_NAMESPACE="team-x"))


def test_pod_name_where_the_cgroup_says_nothing() -> None:
    """As within one's own namespace; but the processes of a known pod have its cgroup."""
    evidence = process("0::/\n", POD_NAME="train-0", POD_NAMESPACE="team-x")
    assert job_of(evidence)["pod"] == "train-0"
    assert job_of(evidence, Known((POD,)))["job"] == "alice/python3"


def test_names_of_the_environment() -> None:
    """JOB_NAME, WANDB_NAME and what is configured come before a container's and a unit's name, ids stay."""
    assert job_of(process(DOCKER, JOB_NAME="bert", WANDB_NAME="run")) == {
        "job": "bert",
        "job_id": CID,
        "container": "aaaaaaaaaaaa",
        "source": "environ",
    }
    assert job_of(process("0::/system.slice/train.service\n", WANDB_NAME="run")) == {
        "job": "run",
        "job_id": "train.service",
        "kind": "service",
        "user": "alice",
        "source": "environ",
    }
    assert job_of(process(SESSION, JOB_NAME="  "))["job"] == "alice/python3"
    ray = replace(SETTINGS, name_variables=("RAY_CLUSTER_NAME",))
    assert job_of(process("0::/\n", RAY_CLUSTER_NAME="c", JOB_NAME="x"), settings=ray) == {
        "job": "c",
        "kind": "batch",
        "user": "alice",
        "source": "environ",
    }


def test_containers() -> None:
    """The name where somebody tells it, else 12 digits of the id; users' own containers are never looked up."""
    known = Known(containers={CID: "trainer"})
    assert job_of(process(DOCKER), known) == {
        "job": "trainer",
        "job_id": CID,
        "container": "trainer",
        "source": "container",
    }
    forged = process(f"0::/user.slice/user-1001.slice/user@1001.service/user.slice/libpod-{CID}.scope\n", 101000)
    assert job_of(forged, known) == {
        "job": "bob/aaaaaaaaaaaa",
        "job_id": CID,
        "user": "bob",
        "container": "aaaaaaaaaaaa",
        "source": "container",
    }


def test_processes() -> None:
    """User and program where nothing else is known, also where not even those are."""
    assert job_of(process("0::/\n")) == {"job": "alice/python3", "user": "alice", "source": "process"}
    assert job_of(Evidence(1, 1)) == {"job": "unknown/unknown", "source": "process"}
    assert found(process("0::/\n")).unknown_form == "root"


# Slurm


def test_slurm_job() -> None:
    """Its name where somebody tells it, else its id; of the environment the name of the same job."""
    assert job_of(process(SLURM_CGROUP), Known(jobs=(BERT,))) == {
        "job": "bert",
        "job_id": "123",
        "kind": "batch",
        "user": "alice",
        "source": "slurm",
    }
    assert job_of(process(SLURM_CGROUP)) == {"job": "slurm-123", "job_id": "123", "user": "alice", "source": "slurm"}
    named = process(SLURM_CGROUP, SLURM_JOB_ID="123", SLURM_JOB_NAME="own")
    assert job_of(named)["job"] == "own"
    assert job_of(named, Known(jobs=(BERT,)))["job"] == "bert"
    assert job_of(process(SLURM_CGROUP, SLURM_JOB_NAME="own"))["job"] == "slurm-123"


@pytest.mark.parametrize(
    ("step", "told", "expected"),
    [
        ("batch", "", "batch"),
        ("interactive", "", "interactive"),
        ("0", "", ""),
        ("extern", "", ""),
        ("0", "interactive", "interactive"),
        ("batch", "interactive", "interactive"),
    ],
)
def test_slurm_kind(step: str, told: JobKind, expected: str) -> None:
    """What the controller says, else what the step's name says."""
    known = Known(jobs=(replace(BERT, kind=told),))
    job = found(process(f"0::/system.slice/slurmstepd.scope/job_123/step_{step}/user/task_0\n"), known).job
    assert job is not None
    assert job.kind == expected


def test_g04_sluid() -> None:
    """Resolved by a source, else by the environment where a source confirms it, else told as it is, with a hint."""
    known = Known(jobs=(BERT,), sluids={"s0EXAMPLE0SLU00": "123"})
    assert job_of(process(SLUID_CGROUP), known)["job_id"] == "123"
    confirmed = found(
        process(SLUID_CGROUP, SLURM_JOB_ID="123", SLURM_JOB_NAME="own"), Known(jobs=(replace(BERT, name=""),))
    )
    assert confirmed.job == Job("own", "123", "batch", "alice", source="slurm")
    assert job_of(process(SLUID_CGROUP, SLURM_JOB_ID="123"), Known(jobs=(BERT,)))["job"] == "bert"
    unknown = found(process(SLUID_CGROUP))
    assert unknown.job == Job("slurm-s0EXAMPLE0SLU00", "sluid:s0EXAMPLE0SLU00", user="alice", source="slurm")
    assert any("CgroupJobIdPaths=yes" in line for line in unknown.why)


@pytest.mark.parametrize("jobs", [(), (replace(BERT, user=""),)])
def test_g04_nobody_confirms_the_number_of_a_sluid(jobs: tuple[SlurmJob, ...]) -> None:
    """The environment's own word is not enough."""
    alone = found(process(SLUID_CGROUP, SLURM_JOB_ID="123", SLURM_JOB_NAME="own"), Known(jobs=jobs))
    assert alone.job == Job("slurm-s0EXAMPLE0SLU00", "sluid:s0EXAMPLE0SLU00", user="alice", source="slurm")
    assert any("CgroupJobIdPaths=yes" in line and "not believed" in line for line in alone.why)


@pytest.mark.parametrize("jobs", [(), (BERT,)])
def test_a_cgroup_that_cannot_be_read_is_not_one_that_says_nothing(jobs: tuple[SlurmJob, ...]) -> None:
    """It may name another job or pod."""
    for environment in (SLURM_ENVIRONMENT, {"POD_NAME": "train-0", "POD_NAMESPACE": "team-x"}):
        evidence = replace(process(""), environment=environment, missing=("cgroup: permission denied",))
        hidden = found(evidence, Known(jobs=jobs))
        assert hidden.job == Job("alice/python3", user="alice", source="process")
        assert any("the cgroup could not be read" in line for line in hidden.why)


def test_g04_forged_sluid() -> None:
    """A job of another user's is not taken for it."""
    evidence = process(SLUID_CGROUP, uid=1001, SLURM_JOB_ID="123", SLURM_JOB_NAME="bert")
    forged = found(evidence, Known(jobs=(BERT,)))
    assert forged.job == Job("slurm-s0EXAMPLE0SLU00", "sluid:s0EXAMPLE0SLU00", user="bob", source="slurm")
    assert any("not believed" in line for line in forged.why)


def test_g06_environment_never_wins_over_the_cgroup() -> None:
    """An adopted session has no environment of Slurm's; a forged one changes nothing."""
    adopted = "0::/system.slice/slurmstepd.scope/job_123/step_extern/user/task_special\n"
    assert job_of(process(adopted))["job_id"] == "123"
    for cgroup in (adopted, SLURM_CGROUP):
        forged = found(process(cgroup, SLURM_JOB_ID="999", SLURM_JOB_NAME="other", JOB_NAME="x", POD_NAME="y"))
        assert forged.job == Job("slurm-123", "123", user="alice", source="slurm")
        assert any("SLURM_JOB_ID" in line for line in forged.why)


SLURM_ENVIRONMENT = {"SLURM_JOB_ID": "123", "SLURM_JOB_NAME": "own"}


@pytest.mark.parametrize(
    ("cgroup", "jobs", "uid", "expected"),
    [
        # Confirmed: the source knows the job, and it is this user's
        (SESSION, (BERT,), 1000, "bert"),
        (SLURMD, (BERT,), 1000, "bert"),
        ("0::/\n", (BERT,), 1000, "bert"),
        ("0::/\n", (replace(BERT, user="1000"),), 1000, "bert"),
        ("0::/\n", (replace(BERT, name=""),), 1000, "own"),
        # Another user's
        (SESSION, (BERT,), 1001, "bob/python3"),
        (SLURMD, (BERT,), 1001, "slurmd.service"),
        ("0::/\n", (BERT,), 1001, "bob/python3"),
        # Not confirmed: only where slurmd may have started it
        (SLURMD, (), 1000, "own"),
        ("0::/\n", (), 1000, "own"),
        ("", (), 1000, "own"),
        ("0::/\n", (replace(BERT, user="", name=""),), 1000, "own"),
        (SESSION, (), 1000, "alice/python3"),
        (SESSION, (replace(BERT, user=""),), 1000, "alice/python3"),
        ("0::/system.slice/jupyter.service\n", (), 1000, "jupyter.service"),
        (
            "0::/user.slice/user-1000.slice/user@1000.service/app.slice/slurmd.service\n",
            (),
            1000,
            "alice/slurmd.service",
        ),
        ("0::/htcondor/slot1\n", (), 1000, "alice/python3"),
        ("0::/user.slice\n", (), 1000, "alice/python3"),
        ("0::/user.slice\n1:name=systemd:/\n", (), 1000, "alice/python3"),
        # Never in somebody's workload
        (DOCKER, (BERT,), 1000, "aaaaaaaaaaaa"),
        (POD_CGROUP, (BERT,), 1000, "aaaaaaaaaaaa"),
    ],
)
def test_slurm_by_environment(cgroup: str, jobs: tuple[SlurmJob, ...], uid: int, expected: str) -> None:
    """G06: where the cgroup names no job, the environment may, as long as nobody could be wronged by it."""
    assert job_of(process(cgroup, uid, **SLURM_ENVIRONMENT), Known(jobs=jobs))["job"] == expected


@pytest.mark.parametrize("job_id", ["", "0x7b", "123; rm", "1" * 11, "\u0661\u0662\u0663", "123_4"])
def test_what_is_no_job_id(job_id: str) -> None:
    """Ids are digits."""
    assert job_of(process("0::/\n", SLURM_JOB_ID=job_id))["job"] == "alice/python3"


def test_claims_inside_other_peoples_workloads() -> None:
    """A Slurm job inside a pod counts where Slurm knows it as this user's; nothing else inside a pod does."""
    inside = f"0::/kubepods/pod{PU}/{CID}/system.slice/slurmstepd.scope/job_123/step_0\n"
    known = Known((POD,), (BERT,))
    confirmed = found(process(inside), known)
    assert confirmed.job == Job("bert", "123", "batch", "alice", "team-x", "train-0", "pytorch", "", "slurm")
    for evidence, knows in ((process(inside, 1001), known), (process(inside), Known((POD,)))):
        denied = found(evidence, knows)
        assert denied.job is not None
        assert denied.job.job == "train-0"
        assert any("not believed" in line for line in denied.why)
    nested_pod = process(f"0::/kubepods/pod{PU}/{CID}/kubepods/pod{PU2}/{CID2}\n")
    assert job_of(nested_pod, Known((POD, Pod(PU2, "victim", "team-y"))))["pod"] == "train-0"


# Kinds and ranks


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        (replace(POD, controller="Job"), "batch"),
        (replace(POD, controller="PyTorchJob"), "batch"),
        (replace(POD, controller="RayCluster"), "batch"),
        (replace(POD, controller="ReplicaSet"), "service"),
        (replace(POD, controller="StatefulSet"), "service"),
        (replace(POD, controller="DaemonSet"), "service"),
        (POD, ""),
        (replace(POD, labels={"ray.io/cluster": "r"}), "batch"),
        (replace(POD, labels={"ray.io/cluster": "r", "ray.io/originated-from-crd": "RayService"}), "service"),
        (replace(POD, labels={"batch.kubernetes.io/job-name": "j"}), "batch"),
        (replace(POD, labels={"notebook-name": "n"}, controller="StatefulSet"), "interactive"),
        (replace(POD, labels={"component": "singleuser-server"}), "interactive"),
        (replace(POD, labels={"component": "api"}, controller="ReplicaSet"), "service"),
    ],
)
def test_a_pods_kind(pod: Pod, expected: str) -> None:
    """By what owns it, and by labels where that is not known."""
    assert job_of(process(POD_CGROUP), Known((pod,))).get("kind", "") == expected


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/opt/conda/bin/python -m ipykernel_launcher -f /run/kernel-1.json", "interactive"),
        ("/usr/bin/python3 /usr/local/bin/jupyter-lab --no-browser", "interactive"),
        ("jupyter notebook", "interactive"),
        ("python train.py --data /home/jupyter/data", "service"),
        ("python my_jupyter_things.py", "service"),
        ("", "service"),
    ],
)
def test_notebooks_are_interactive(command: str, expected: str) -> None:
    """Whatever unit or controller runs them, unless it is a batch job that runs a notebook."""
    evidence = replace(process("0::/system.slice/hub.service\n"), command=command)
    assert job_of(evidence)["kind"] == expected
    assert job_of(replace(evidence, cgroup=SLURM_CGROUP), Known(jobs=(BERT,)))["kind"] == "batch"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3", "SLURM_PROCID": "1"}, "3"),
        ({"SLURM_PROCID": "1", "PMI_RANK": "2"}, "1"),
        ({"OMPI_COMM_WORLD_RANK": "5"}, "5"),
        ({"PMI_RANK": "0"}, "0"),
        ({"RANK": "first", "PMI_RANK": "7"}, "7"),
        ({"RANK": "-1"}, ""),
        ({"RANK": "1" * 20}, ""),
        ({}, ""),
    ],
)
def test_rank(environment: Mapping[str, str], expected: str) -> None:
    """The first variable that is a number."""
    job = found(replace(process(SLURM_CGROUP), environment=environment)).job
    assert job is not None
    assert job.rank == expected


# Rules of the user's


@dataclass(frozen=True)
class Text:
    """A rule as the configuration has it."""

    command_line: str = ""
    user: str = ""
    cgroup: str = ""
    kind: JobKind = ""


def ruled(*rules: Text) -> Settings:
    """Settings with these rules."""
    return replace(SETTINGS, rules=compile_rules(rules))


def test_rules_come_first() -> None:
    """The first that applies names the job, over everything; what it does not tell stays as it was found."""
    evidence = replace(process(SLURM_CGROUP), command="vllm serve meta/llama --port 1")
    chosen = ruled(
        Text(command_line="trtllm (?P<job>.*)"),
        Text(command_line=r"vllm serve (?P<job>\S+)", user="^(?P<user>al)ice$", kind="service"),
        Text(command_line="(?P<job>.*)"),
    )
    result = found(evidence, Known(jobs=(BERT,)), chosen)
    assert result.job == Job("meta/llama", "123", "service", "al", source="rule")
    assert result.rule == "rule 2"


def test_rules_that_tell_only_a_kind() -> None:
    """Such a rule leaves the name as it is; an empty group tells nothing, nor does a kind that there is not."""
    assert job_of(process(SESSION), settings=ruled(Text(user="alice", kind="batch"))) == {
        "job": "alice/python3",
        "kind": "batch",
        "user": "alice",
        "source": "process",
    }
    odd = ruled(Text(cgroup=r"session-(?P<rank>[0-9]+)(?P<job>x?)", command_line="(?P<kind>train)"))
    assert job_of(process(SESSION), settings=odd) == {
        "job": "alice/python3",
        "kind": "interactive",
        "user": "alice",
        "rank": "3",
        "source": "process",
    }


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        (Text(command_line="("), "rule 1, command_line `(`: missing )"),
        (Text(user=r"(?=a)b"), "rule 1, user `(?=a)b`: invalid"),
        (Text(cgroup=r"(a)\1"), "rule 1, cgroup"),
        (Text(command_line="(?P<jbo>x)"), "named group `jbo`: expected one of job, job_id"),
        (Text(command_line="\ud800"), "no valid text"),
        (Text(kind="batch"), "needs at least one of command_line"),
    ],
)
def test_rules_that_cannot_be_used(rule: Text, complaint: str) -> None:
    """Said before anything runs, with the expression and the reason."""
    with pytest.raises(RuleError) as error:
        compile_rules([rule])
    assert complaint in str(error.value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "expression", [r"(?P<job>(a+)+)$", r"(?P<job>(a|a)*)b$", r"(.*a){12}x(?P<job>.)", r"(a?){30}a{30}(?P<job>b)"]
)
def test_hostile_command_lines_cost_little(expression: str) -> None:
    """Expressions that would take Python's `re` for ever, over a command line made for it."""
    (rule,) = compile_rules([Text(command_line=expression)])
    evidence = replace(process(SESSION), command="a" * 4095 + "!" + "a" * 1_000_000)
    begin = time.process_time()
    for _ in range(20):
        assert rule.match(evidence) is None
    assert time.process_time() - begin < 2.0


def test_rules_see_text_with_odd_bytes() -> None:
    """What is no UTF-8 matches as if it were a question mark, and harms nothing."""
    evidence = replace(process(SESSION), command="train \udcff\ud800\0x")
    assert (
        job_of(evidence, settings=ruled(Text(command_line="train (?P<job>.+)")))["job"]
        == "??\N{REPLACEMENT CHARACTER}x"
    )


# Text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train\udcff.py", "train\N{REPLACEMENT CHARACTER}.py"),
        ('a\n"b\\c\r\0', 'a\N{REPLACEMENT CHARACTER}"b\\c\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}'),
        ("a,b", "a,b"),
        ("\ud800", "\N{REPLACEMENT CHARACTER}"),
        ("a\u202eb", "a\N{REPLACEMENT CHARACTER}b"),
        ("größe", "größe"),
        ("", ""),
        ("x" * 128, "x" * 128),
    ],
)
def test_e05_h01_odd_names(text: str, expected: str) -> None:
    """Surrogates and control bytes are replaced; commas, quotes and backslashes are the exposition's to escape."""
    assert bounded(text) == expected


def test_h04_long_names_stay_two() -> None:
    """Cut on a character's boundary, with a hash of the whole."""
    one, other = bounded("ä" * 2000 + "1"), bounded("ä" * 2000 + "2")
    assert one != other
    assert {len(one.encode()), len(other.encode())} <= {127, 128}
    assert one.startswith("ä" * 59 + "~")
    assert bounded("x" * 129)[-9] == "~"


def test_e05_no_command_line_in_a_label() -> None:
    """A program's name is cut to 64 bytes, and the command line is nowhere."""
    job = found(replace(process(SESSION), comm="c" * 100, command="secret " * 600)).job
    assert job is not None
    user, _, comm = job.job.partition("/")
    assert (user, len(comm)) == ("alice", 64)
    assert "secret" not in str(job)


TEXTS = st.one_of(st.text(max_size=300), st.binary(max_size=300).map(lambda b: b.decode("utf-8", "surrogateescape")))
CGROUPS = st.sampled_from([POD_CGROUP, SLURM_CGROUP, SLUID_CGROUP, SESSION, SLURMD, DOCKER, "0::/\n", ""])


@given(CGROUPS, st.dictionaries(st.sampled_from(sorted(SETTINGS.variables)), TEXTS), TEXTS, TEXTS)
@settings(max_examples=400, deadline=None)
def test_hostile_processes(cgroup: str, environment: Mapping[str, str], comm: str, command: str) -> None:
    """Whatever a process says: every label is bounded and valid, and ids are what the cgroup says."""
    evidence = Evidence(4101, 1, comm, command, 1001, "bob", cgroup, environment)
    job = found(evidence, Known((POD,), (BERT,), {CID: "trainer"})).job
    assert job is not None
    assert job.job
    for text in asdict(job).values():
        assert len(text.encode()) <= 128
        assert text.isprintable()
    if cgroup == POD_CGROUP:
        assert (job.job, job.job_id, job.pod, job.namespace) == ("train-0", PU, "train-0", "team-x")
    elif cgroup == SLURM_CGROUP:
        assert (job.job, job.job_id, job.user) == ("bert", "123", "alice")
    else:
        assert job.job_id != "123"
        assert job.job_id != PU


# Keeping


class Counting(Known):
    """Counts how often it is asked."""

    asked = 0

    def slurm_job(self, job_id: str) -> SlurmJob | None:
        """By id."""
        Counting.asked += 1
        return super().slurm_job(job_id)


def test_identities_are_kept_while_nothing_changes() -> None:
    """The same evidence and version: no look-up. Another version, or other evidence: anew. Gone: forgotten."""
    identities, lookups = Identities(SETTINGS), Counting(jobs=(BERT,))
    evidence = {pid: replace(process(SLURM_CGROUP), pid=pid) for pid in range(1, 11)}
    first = identities.refresh(evidence, lookups, version=1)
    asked = Counting.asked
    assert asked >= 10
    assert identities.refresh(evidence, lookups, version=1) == first
    assert Counting.asked == asked
    identities.refresh(evidence, lookups, version=2)
    assert Counting.asked == 2 * asked
    assert set(identities.refresh({1: evidence[1]}, lookups, version=2)) == {1}
    assert identities.refresh({}, lookups, version=2) == {}


def test_unknown_forms_are_counted_once_a_process() -> None:
    """G01: again only where it is another process, or was moved to another unknown place."""
    identities = Identities(SETTINGS)
    assert set(identities.unknown_forms) == set(UNKNOWN_FORMS)
    odd = process("0::/htcondor/slot1\n")
    for version, evidence in enumerate((odd, odd, replace(odd, comm="exec"), odd)):
        identities.refresh({4101: evidence}, NOBODY, version)
    assert identities.unknown_forms["other"] == 1
    identities.refresh({4101: replace(odd, start_ticks=9999)}, NOBODY, 9)
    identities.refresh({4101: replace(odd, start_ticks=9999, cgroup="0::/\n")}, NOBODY, 9)
    assert (identities.unknown_forms["other"], identities.unknown_forms["root"]) == (2, 1)


@pytest.mark.parametrize(
    "text",
    [
        "0::/\n",
        "",
        "garbage\x00\udcff",
        f"0::/somewhere/{CID}\n",
        f"0::/some/where/else/pod{PU}/x\n",
        "0::/batch/job_123\n",
        f"0::/kubepods.slice/kubepods-podnotauid.slice/{CID}\n",
        f"4:memory:/kubepods/pod{PU}/{CID}\n5:devices:/kubepods/pod{PU2}/{CID2}\n",
    ],
)
def test_g01_what_no_layout_tells_has_no_id(text: str) -> None:
    """G01: never a wrong one, though somebody knows a pod, a container and a job of what stands there."""
    identities = Identities(SETTINGS)
    one = identities.refresh({4101: process(text)}, Known((POD,), (BERT,)), 0)[4101]
    assert one.job == Job("alice/python3", user="alice", source="process")
    assert sum(identities.unknown_forms.values()) == identities.unknown_forms[one.unknown_form] == 1


def test_identification_is_cheap() -> None:
    """1,000 processes cold, a hundred of one job: measured 9 ms; ten times as much is a mistake."""
    evidence = {
        pid: replace(process(SLURM_CGROUP.replace("123", str(pid // 100)), RANK=str(pid)), pid=pid)
        for pid in range(1000)
    }
    best = 1.0
    for _ in range(3):
        begin = time.process_time()
        Identities(SETTINGS).refresh(evidence, Known(jobs=(BERT,)), 0)
        best = min(best, time.process_time() - begin)
    assert best < 0.09


def test_a_rule_is_frozen() -> None:
    """It is shared between threads."""
    assert isinstance(compile_rules([Text(user="x", kind="batch")])[0], Rule)
