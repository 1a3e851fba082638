"""What deploy/ holds, given to the programs that read it: Prometheus, Alertmanager, systemd, schemas of Kubernetes."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import kubernetes_validate  # type: ignore[import-untyped]  # ships no types; one function calls it
import pytest
import yaml

from exporter_process import free_port, run_exporter
from gpu_hpc_exporter import __version__
from gpu_hpc_exporter.config import DEFAULT_FILE, DEFAULT_PORT, Agent, Kubernetes, load_config
from gpu_hpc_exporter.launch import AGENT, DIRECTORY, INJECTION, variables
from gpu_hpc_exporter.sources.kernels.files import make_folder
from prometheus_process import run_prometheus

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes/base"
OPERATOR = DEPLOY / "kubernetes/prometheus-operator"
KERNEL_AGENT = DEPLOY / "kubernetes/kernel-agent"
RULE_FILES = sorted((ROOT / "alert-rules").glob("*.yml"))
SCRAPES = sorted(DEPLOY.glob("*/scrape-*.yml"))
ALERTMANAGER = DEPLOY / "alertmanager/alertmanager.yml"
UNIT = DEPLOY / "systemd/gpu-hpc-exporter.service"
CONFIG = DEPLOY / "systemd/config.yaml"
TASK_PROLOG = DEPLOY / "slurm/task-prolog.sh"
AGENT_PAGE = (ROOT / "docs/kernel-agent.md").read_text()

Labels = Mapping[str, str]
T = TypeVar("T")


def read(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def run(*command: str | Path, status: int = 0, cwd: Path = ROOT) -> str:
    """Both outputs of a command that has to end with this status."""
    done = subprocess.run(
        command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, timeout=60
    )
    assert done.returncode == status, done.stdout
    return done.stdout


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def documents(folder: Path) -> dict[str, Any]:
    """The documents of a folder that go to the cluster, by their kinds, each of which is there once."""
    found = [
        document
        for name in read(folder / "kustomization.yaml")["resources"]
        if name.endswith(".yaml")
        for document in yaml.safe_load_all((folder / name).read_text())
    ]
    assert len({document["kind"] for document in found}) == len(found)
    return {document["kind"]: document for document in found}


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    return documents(BASE)


@pytest.fixture(scope="module")
def pod(manifests: dict[str, Any]) -> Any:
    """The pods' specification."""
    return manifests["DaemonSet"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_kubernetes_knows_every_field(version: str, manifests: dict[str, Any]) -> None:
    """The strict schemas of an old and of a new version: a misspelt key is an error."""
    for document in manifests.values():
        kubernetes_validate.validate(document, version, strict=True)


def test_selectors_find_the_pods(manifests: dict[str, Any]) -> None:
    """The set its pods, the Service the same, and each the port by its name."""
    template = manifests["DaemonSet"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert manifests["DaemonSet"]["spec"]["selector"]["matchLabels"] == labels
    service = manifests["Service"]["spec"]
    assert service["selector"] == labels
    (container,) = template["spec"]["containers"]
    assert container["ports"] == [{"name": "metrics", "containerPort": DEFAULT_PORT}]
    assert service["ports"] == [{"name": "metrics", "port": DEFAULT_PORT, "targetPort": "metrics"}]
    assert service["publishNotReadyAddresses"] is True


def test_account_may_do_what_the_exporter_does(manifests: dict[str, Any], pod: Any) -> None:
    """One name from the pods to the role, in the namespace that kustomize sets."""
    binding, role = manifests["ClusterRoleBinding"], manifests["ClusterRole"]
    name = pod["serviceAccountName"]
    assert manifests["ServiceAccount"]["metadata"]["name"] == name
    namespace = read(BASE / "kustomization.yaml")["namespace"]
    assert manifests["Namespace"]["metadata"]["name"] == namespace
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": namespace}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    allowed = {
        (group, kind): rule["verbs"]
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for kind in rule["resources"]
    }
    assert allowed == {("", "pods"): ["list", "watch"], ("resource.k8s.io", "resourceslices"): ["list"]}


def test_pod_sees_what_it_needs_and_may_no_more(pod: Any) -> None:
    """Where the exporter looks by default is mounted, read-only where it removes nothing; every volume is used."""
    (container,) = pod["containers"]
    mounted = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in mounted.values()} == set(volumes)
    kubelet = str(Path(Kubernetes().socket).parent)
    assert volumes[mounted[kubelet]["name"]]["hostPath"]["path"] == kubelet
    assert mounted[kubelet]["readOnly"] is True
    assert mounted[str(DEFAULT_FILE.parent)]["readOnly"] is True
    assert "readOnly" not in mounted[Agent().directory]
    assert pod["hostPID"] is True
    assert container["env"] == [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]
    assert container["securityContext"] | {"runAsUser": 0, "runAsGroup": 0} == {
        "runAsUser": 0,
        "runAsGroup": 0,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_pods_run_where_anything_says_that_there_is_a_gpu(pod: Any) -> None:
    """The GPU operator's label, one of node feature discovery in each of its formats, or one set by hand."""
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    keys = [expression["key"] for term in terms for expression in term["matchExpressions"]]
    assert len(keys) == len(terms), "two labels in one term would both have to be there"
    assert set(keys) == {
        "nvidia.com/gpu.present",
        "feature.node.kubernetes.io/pci-10de.present",
        "feature.node.kubernetes.io/pci-0302_10de.present",
        "feature.node.kubernetes.io/pci-0300_10de.present",
        "gpu-hpc-exporter",
    }
    assert {(e["operator"], *e["values"]) for term in terms for e in term["matchExpressions"]} == {("In", "true")}


def test_probes_ask_what_the_exporter_answers(pod: Any, tmp_path: Path) -> None:
    """The running exporter says 200 to both, to the second once every GPU was asked."""
    (container,) = pod["containers"]
    probes = [container[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")]
    assert [probe["path"] for probe in probes] == ["/-/healthy", "/-/ready"]
    assert {probe["port"] for probe in probes} == {"metrics"}
    with run_exporter(tmp_path, "--source=replay") as exporter:
        wait_until(lambda: [exporter.fetch(probe["path"])[0] for probe in probes] == [200, 200])


def test_a14_the_exporter_is_not_killed_for_its_memory(pod: Any) -> None:
    """A14: the limit is four times what is asked for, which is more than was measured with PM sampling."""
    memory = {kind: amounts["memory"] for kind, amounts in pod["containers"][0]["resources"].items()}
    assert memory == {"requests": "256Mi", "limits": "1Gi"}


def test_f08_boards_know_one_form_of_the_job_label() -> None:
    """F08: each scrape configuration that is shipped honours the labels, so no board looks for renamed ones."""
    boards = sorted((ROOT / "dashboards").glob("*.json"))
    assert boards
    assert [board.name for board in boards if "exported_" in board.read_text()] == []


def test_kustomizations_name_what_is_there(pod: Any) -> None:
    """Files exist, the image is the one that is renamed, in the version of the package."""
    for file in sorted(DEPLOY.glob("kubernetes/*/kustomization.yaml")):
        assert all((file.parent / name).exists() for name in read(file).get("resources", ()))
    for folder in (BASE, KERNEL_AGENT):
        (image,) = read(folder / "kustomization.yaml")["images"]
        assert image == {"name": pod["containers"][0]["image"], "newTag": __version__}


def test_privileged_component_patches_the_container(manifests: dict[str, Any]) -> None:
    """Its path leads to something, so that kustomize replaces it, and the result is valid."""
    (patch,) = read(DEPLOY / "kubernetes/privileged/kustomization.yaml")["patches"]
    daemon_set = json.loads(json.dumps(manifests["DaemonSet"]))
    assert patch["target"] == {"kind": "DaemonSet", "name": daemon_set["metadata"]["name"]}
    (step,) = yaml.safe_load(patch["patch"])
    assert step["op"] == "replace"
    *way, last = step["path"].removeprefix("/").split("/")
    place = daemon_set
    for key in way:
        place = place[int(key) if key.isdecimal() else key]
    assert last in place
    place[last] = step["value"]
    kubernetes_validate.validate(daemon_set, "1.37", strict=True)


def test_m05_the_table_of_privileges_is_what_manifests_give(pod: Any) -> None:
    """M05: image, unit, Compose and DaemonSet begin with what the page says, and none names what the page does not."""
    page = (ROOT / "docs/privileges.md").read_text()
    table = page[page.index("| what is given |") : page.index("What is missing is told")]
    told = set(re.findall(r"CAP_([A-Z_]+)", table))
    assert "| nothing | NVML readings; GPM windows" in table
    assert re.search(r"^USER 65534\b", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    compose = (ROOT / "docker-compose.yml").read_text()
    asked = set(re.findall(r"cap_add: \[([A-Z_]+)\]", compose))
    assert asked
    assert asked <= told
    assert "cap_drop: [ALL]" in compose
    assert not re.search(r"^\s*cap_add:", compose, re.MULTILINE)
    (given,) = unit()["AmbientCapabilities"]
    assert given.removeprefix("CAP_") in told
    assert "systemd unit as a user of its own, with CAP_SYSLOG alone" in " ".join(page.split())
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for field in re.findall(r"`(hostPID): true`", table):
        assert pod[field] is True


# --- the kernel agent in pods -----------------------------------------------------------------------------------------


def merged(base: Any, patch: Any) -> Any:
    """A strategic merge of pods: lists of things with names by these, other lists are replaced."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {key: merged(base.get(key), patch.get(key)) for key in base | patch}
    key = next((key for key in ("mountPath", "name") if isinstance(patch, list) and key in patch[0]), None)
    if isinstance(base, list) and key:
        parts = {part[key]: part for part in base}
        for part in patch:
            parts[part[key]] = merged(parts.get(part[key]), part)
        return list(parts.values())
    return base if patch is None else patch


@pytest.fixture(scope="module")
def patched() -> dict[str, Any]:
    """The example's job with the agent."""
    kustomization = read(KERNEL_AGENT / "kustomization.yaml")
    (patch,) = kustomization["patches"]
    job = documents(KERNEL_AGENT)["Job"]
    assert patch["target"] == {"kind": "Job", "name": job["metadata"]["name"]}
    change = read(KERNEL_AGENT / patch["path"])
    assert change["kind"] == "Job"
    return dict(merged(job, {"spec": change["spec"]}))


@pytest.mark.parametrize("version", ["1.27", "1.37"])
def test_kubernetes_knows_every_field_of_a_job_with_the_agent(version: str, patched: dict[str, Any]) -> None:
    """And the container is still one, with all that it had."""
    kubernetes_validate.validate(patched, version, strict=True)
    (container,) = patched["spec"]["template"]["spec"]["containers"]
    (before,) = documents(KERNEL_AGENT)["Job"]["spec"]["template"]["spec"]["containers"]
    assert {key: container[key] for key in before} == before


def test_agent_and_exporter_meet_in_one_directory_of_the_host(patched: dict[str, Any], pod: Any) -> None:
    """The default of both, at the same place; neither pod waits for the other to make it."""
    hosts = {"path": Agent().directory, "type": "DirectoryOrCreate"}
    for specification in (pod, patched["spec"]["template"]["spec"]):
        volumes = {volume["name"]: volume for volume in specification["volumes"]}
        (container,) = specification["containers"]
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == Agent().directory]
        assert volumes[mount["name"]]["hostPath"] == hosts
        assert "readOnly" not in mount


def test_pod_finds_the_agent_that_its_init_container_copies(patched: dict[str, Any], pod: Any) -> None:
    """By variables that the container's own `env` overrides, as Kubernetes has it for envFrom."""
    specification = patched["spec"]["template"]["spec"]
    (copier,), (container,) = specification["initContainers"], specification["containers"]
    (written,) = copier["volumeMounts"]
    assert copier["command"][0] == "cp"
    assert Path(copier["command"][1]).name == AGENT.name
    assert copier["command"][2].rstrip("/") == written["mountPath"]
    assert copier["image"] == pod["containers"][0]["image"]
    assert {"name": written["name"], "mountPath": written["mountPath"], "readOnly": True} in container["volumeMounts"]
    (variables,) = read(KERNEL_AGENT / "kustomization.yaml")["configMapGenerator"]
    assert container["envFrom"] == [{"configMapRef": {"name": variables["name"]}}]
    assert "env" not in container
    assert dict(literal.split("=", 1) for literal in variables["literals"]) == {
        INJECTION: f"{written['mountPath']}/{AGENT.name}",
        DIRECTORY: Agent().directory,
    }


def test_init_containers_take_no_gpu_and_no_privilege(patched: dict[str, Any], pod: Any) -> None:
    """The image asks for all GPUs, wherever NVIDIA's runtime is the default."""
    for specification in (pod, patched["spec"]["template"]["spec"]):
        (container,) = specification["initContainers"]
        assert container["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True


def without_capabilities() -> list[str]:
    """What makes root one that may no more than its files; nobody else needs it."""
    return ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--"] if os.geteuid() == 0 else []


def test_init_container_gives_the_directory_the_exporters_mode(pod: Any, tmp_path: Path) -> None:
    """That of one which the kubelet has made, as its owner and without a capability, and again after a restart."""
    (container,) = pod["initContainers"]
    assert container["securityContext"]["runAsUser"] == pod["containers"][0]["securityContext"]["runAsUser"]
    made, fixed = tmp_path / "made", tmp_path / "fixed"
    make_folder(made)
    fixed.mkdir(mode=0o755)
    assert Agent().directory in container["command"]
    command = [str(fixed) if word == Agent().directory else word for word in container["command"]]
    for _ in range(2):
        run(*without_capabilities(), *command)
        assert stat.S_IMODE(fixed.stat().st_mode) == stat.S_IMODE(made.stat().st_mode) == 0o3733


def test_page_shows_what_the_patch_does(patched: dict[str, Any]) -> None:
    """Its fragment of a pod is a part of the whole."""
    (fragment,) = [
        block for block in re.findall(r"```yaml\n(.*?)```", AGENT_PAGE, re.DOTALL) if "initContainers" in block
    ]
    specification = patched["spec"]["template"]["spec"]
    assert merged(specification, yaml.safe_load(fragment)) == specification


# --- the kernel agent without Kubernetes ------------------------------------------------------------------------------


def task_prolog(installed: Path, **environment: str) -> str:
    """What it prints where the exporter is installed there, with nothing in the environment but that."""
    script = TASK_PROLOG.read_text()
    (program,) = unit()["ExecStart"]
    assert script.count(f"{Path(program).parents[1]}/") == 1
    script = script.replace(f"{Path(program).parents[1]}/", f"{installed}/")
    command = ["/bin/sh", "-c", script]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def test_slurms_task_prolog_sets_the_variables(tmp_path: Path) -> None:
    """Where there is an agent, and where the job names no other tool."""
    assert os.access(TASK_PROLOG, os.X_OK)
    assert task_prolog(tmp_path) == ""
    packages = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(tmp_path)}))
    agent = packages / AGENT.relative_to(AGENT.parents[2])
    agent.parent.mkdir(parents=True)
    agent.touch()
    found = f"export {INJECTION}={agent}\n"
    assert task_prolog(tmp_path) == f"{found}export {DIRECTORY}={Agent().directory}\n"
    assert task_prolog(tmp_path, **{DIRECTORY: "/run/mine"}) == found
    assert task_prolog(tmp_path, **{INJECTION: "/opt/tool.so"}) == ""


def test_page_sets_the_variables_of_a_shell() -> None:
    """Its line is run as it stands there; what is set stays."""
    (line,) = re.findall(r"^ *(eval .*run --show.*)$", AGENT_PAGE, re.MULTILINE)
    script = f"{line}\nprintenv {INJECTION} {DIRECTORY}"
    programs = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"

    def values(**more: str) -> list[str]:
        done = subprocess.run(["sh", "-c", script], env={"PATH": programs, **more}, capture_output=True, check=False)
        return done.stdout.decode().splitlines()

    assert AGENT.is_file(), "the installation of the tests has an agent: a C compiler was there"
    assert values() == list(variables(Agent(), {}).values())
    assert values(**{INJECTION: "/opt/tool.so"}) == ["/opt/tool.so"]


# --- for the Prometheus operator --------------------------------------------------------------------------------------


def test_generated_files_are_current() -> None:
    """Whoever changes rules or the scrape configuration has to run scripts/build-deploy."""
    run(sys.executable, ROOT / "scripts/build-deploy", "--check")


@pytest.mark.parametrize(
    ("source", "old", "new", "stale"),
    [
        ("alert-rules/owner.yml", "gpu:owner:info", "gpu:owner:other", "prometheusrule"),
        ("alert-rules/compat/dcgm.yml", "gpu:owner:info", "gpu:owner:other", "prometheusrule"),
        ("deploy/prometheus/scrape-kubernetes.yml", "honor_labels: true", "honor_labels: false", "servicemonitor"),
    ],
)
def test_check_finds_what_was_not_generated(source: str, old: str, new: str, stale: str, tmp_path: Path) -> None:
    """A change of a source fails the check until the script has run."""
    for folder in ("alert-rules", "deploy", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    file, script = tmp_path / source, tmp_path / "scripts/build-deploy"
    run(sys.executable, script)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    said = run(sys.executable, script, "--check", status=1)
    assert re.findall(r"(\w+)\.yaml is not current", said) == [stale]
    run(sys.executable, script)
    run(sys.executable, script, "--check")


@pytest.mark.parametrize(
    ("folder", "files"),
    [(OPERATOR, RULE_FILES), (DEPLOY / "kubernetes/dcgm-exporter", [ROOT / "alert-rules/compat/dcgm.yml"])],
    ids=("exporter", "dcgm"),
)
def test_operator_gets_every_rule(folder: Path, files: Sequence[Path], tmp_path: Path) -> None:
    """The groups of all files, unchanged, as Prometheus takes them; those for DCGM are an object of their own."""
    rule = documents(folder)["PrometheusRule"]
    assert rule["apiVersion"] == "monitoring.coreos.com/v1"
    assert rule["metadata"]["name"] == "gpu-hpc-exporter" + ("" if folder == OPERATOR else "-dcgm")
    assert rule["spec"] == {"groups": [group for file in files for group in read(file)["groups"]]}
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rule["spec"]))
    run("promtool", "check", "rules", file)


def test_operator_scrapes_as_prometheus_does(manifests: dict[str, Any]) -> None:
    """F08: the monitor finds the Service, keeps the labels of jobs and calls instances by their nodes."""
    monitor = documents(OPERATOR)["ServiceMonitor"]
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    assert monitor["spec"]["selector"]["matchLabels"] == manifests["Service"]["metadata"]["labels"]
    assert read(OPERATOR / "kustomization.yaml")["namespace"] == read(BASE / "kustomization.yaml")["namespace"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint == {
        "port": manifests["Service"]["spec"]["ports"][0]["name"],
        "honorLabels": True,
        "interval": "15s",
        "scrapeTimeout": "10s",
        "relabelings": [
            {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "instance"},
            {"regex": "pod|container|endpoint|service|namespace", "action": "labeldrop"},
        ],
    }


# --- scrape configurations --------------------------------------------------------------------------------------------


def scrape_config(file: Path) -> dict[str, Any]:
    """The one job of a snippet. Debian's Prometheus has no Kubernetes discovery, so its place stays empty here."""
    (scrape,) = read(file)["scrape_configs"]
    scrape.pop("kubernetes_sd_configs", None)
    return dict(scrape)


@pytest.mark.parametrize("file", SCRAPES, ids=lambda path: path.name)
def test_scrape_config_is_valid(file: Path, tmp_path: Path) -> None:
    """F08: a file of its own, under the job name that all share, that leaves the exporter's labels alone."""
    scrape = scrape_config(file)
    assert scrape["job_name"] == "gpu-hpc-exporter"
    assert scrape["honor_labels"] is True
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    for nodes in (DEPLOY / "prometheus").glob("gpu-nodes*.yml"):
        shutil.copy(nodes, tmp_path)
    assert "WARNING" not in run("promtool", "check", "config", config)


def targets(directory: Path, scrape: dict[str, Any]) -> list[Labels]:
    """The labels that a real Prometheus gives to the targets of a job."""
    # Nothing is scraped: the addresses are other people's.
    config = {"global": {"scrape_interval": "1h"}, "scrape_configs": [scrape | {"scrape_interval": "1h"}]}
    with run_prometheus(directory, yaml.safe_dump(config)) as prometheus:
        found: list[Any] = wait_until(lambda: prometheus.api("targets", state="active")["activeTargets"])
        return [target["labels"] for target in found]


def test_kubernetes_targets_are_called_by_their_nodes(tmp_path: Path) -> None:
    """One port of each pod, and no label that would pass for one of a job's."""
    scrape = scrape_config(DEPLOY / "prometheus/scrape-kubernetes.yml")
    node = {"__meta_kubernetes_pod_node_name": "node-a", "pod": "gpu-hpc-exporter-x1", "namespace": "gpu-hpc-exporter"}
    node |= {"container": "gpu-hpc-exporter", "endpoint": "metrics", "service": "gpu-hpc-exporter"}
    scrape["static_configs"] = [
        {"targets": ["127.0.0.1:1"], "labels": node | {"__meta_kubernetes_pod_container_port_name": "metrics"}},
        {"targets": ["127.0.0.1:2"], "labels": node | {"__meta_kubernetes_pod_container_port_name": "other"}},
    ]
    assert targets(tmp_path, scrape) == [{"instance": "node-a", "job": "gpu-hpc-exporter"}]


def test_file_targets_are_called_by_their_nodes(tmp_path: Path) -> None:
    """The file beside the snippet is what it reads, and the port is the exporter's."""
    nodes = DEPLOY / "prometheus/gpu-nodes.yml"
    assert {key for group in read(nodes) for key in group} == {"targets"}, "labels do not tell nodes of one name apart"
    assert {target.rpartition(":")[2] for group in read(nodes) for target in group["targets"]} == {str(DEFAULT_PORT)}
    shutil.copy(nodes, tmp_path)
    found = targets(tmp_path, scrape_config(DEPLOY / "prometheus/scrape-file-sd.yml"))
    assert sorted(labels["instance"] for labels in found) == ["node01", "node02"]


# --- Alertmanager -----------------------------------------------------------------------------------------------------


def alert(name: str, **labels: str) -> Labels:
    """An alert's labels as the rules make them."""
    gpu = {"instance": "node-a", "gpu": "0", "uuid": "GPU-0", "job": "bert"}
    return {"alertname": f"GpuHpc{name}", "severity": "warning", **gpu, **labels}


def wait_until(ask: Callable[[], T], timeout: float = 60.0) -> T:
    """The first answer that is true."""
    deadline = time.monotonic() + timeout
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"not in {timeout} s"
        time.sleep(0.05)
    return answer


@contextmanager
def run_alertmanager(directory: Path) -> Iterator[str]:
    """Start the Alertmanager with the snippet on a free port and kill it at the end; its address."""
    url, log = f"http://127.0.0.1:{free_port()}", directory / "alertmanager.log"
    command = ["prometheus-alertmanager", f"--config.file={ALERTMANAGER}", f"--storage.path={directory / 'data'}"]
    command += [f"--web.listen-address={url.removeprefix('http://')}", "--cluster.listen-address="]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=10):
                return True
        except OSError:  # not listening yet
            return False

    try:
        wait_until(is_ready)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def alertmanager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with run_alertmanager(tmp_path_factory.mktemp("alertmanager")) as url:
        yield url


def send(alertmanager: str, alerts: Sequence[Labels]) -> None:
    """As Prometheus sends what fires."""
    now = datetime.now(UTC)
    times = {"startsAt": now.isoformat(), "endsAt": (now + timedelta(hours=1)).isoformat()}
    body = json.dumps([{"labels": labels, **times} for labels in alerts]).encode()
    request = urllib.request.Request(f"{alertmanager}/api/v2/alerts", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10):
        pass


def ask(alertmanager: str, path: str) -> Any:
    with urllib.request.urlopen(f"{alertmanager}/api/v2/{path}", timeout=10) as answer:
        return json.load(answer)


def test_alertmanager_takes_the_snippet() -> None:
    """And the alerts that it names are those of the rules."""
    run("amtool", "check-config", ALERTMANAGER)
    alerts = {
        rule["alert"]
        for file in RULE_FILES
        for group in read(file)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    named = set(re.findall(r"GpuHpc[A-Z]\w+", ALERTMANAGER.read_text()))
    assert named
    assert named <= alerts


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        (alert("GpuLost", severity="critical"), "gpu-on-call"),
        (alert("PcieSaturated"), "gpu-team"),
        (alert("L2Thrashing", severity="info"), "nobody"),
        ({"alertname": "HostDown", "severity": "critical"}, "default"),
    ],
    ids=lambda value: value["alertname"] if isinstance(value, dict) else value,
)
def test_severity_says_who_hears(labels: Labels, receiver: str) -> None:
    """Other people's alerts are left to other routes."""
    arguments = [f"{name}={value}" for name, value in labels.items()]
    said = run("amtool", "config", "routes", "test", f"--config.file={ALERTMANAGER}", *arguments)
    assert said.splitlines()[-1] == receiver


def test_one_notification_for_one_job(alertmanager: str) -> None:
    """All its GPUs are one group; another job, and another alert, are groups of their own."""
    many = [alert("PcieSaturated", instance=f"node-{n}", uuid=f"GPU-{n}", job="large") for n in range(64)]
    others = [alert("PcieSaturated", instance="group", job="small"), alert("GpuStarved", instance="group", job="large")]
    send(alertmanager, [*many, *others])

    def sizes() -> dict[tuple[str, str], int]:
        groups = [
            group for group in ask(alertmanager, "alerts/groups") if group["labels"].get("job") in ("large", "small")
        ]
        return {(group["labels"]["alertname"], group["labels"]["job"]): len(group["alerts"]) for group in groups}

    wanted = {
        ("GpuHpcPcieSaturated", "large"): 64,
        ("GpuHpcPcieSaturated", "small"): 1,
        ("GpuHpcGpuStarved", "large"): 1,
    }
    assert wait_until(lambda: (found := sizes()) and sum(found.values()) == 66 and found) == wanted


def test_one_notification_for_one_sick_node(alertmanager: str) -> None:
    """Critical alerts are grouped by the node: jobs that change make no other group, another node does."""
    sick = [
        alert("NvlinkDegraded", severity="critical", instance=f"sick-{n // 8}", uuid=f"GPU-{n}", gpu=str(n % 8), job="")
        for n in range(16)
    ]
    killed = [
        alert("EccUncorrectable", severity="critical", instance="sick-0", uuid=f"GPU-{job}", job=job) for job in "ab"
    ]
    send(alertmanager, [*sick, *killed])

    def sizes() -> dict[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], list[int]] = {}
        for group in ask(alertmanager, "alerts/groups"):
            if (instance := group["labels"].get("instance", "")).startswith("sick-"):
                found.setdefault((group["labels"]["alertname"], instance), []).append(len(group["alerts"]))
        return found

    wanted = {
        ("GpuHpcNvlinkDegraded", "sick-0"): [8],
        ("GpuHpcNvlinkDegraded", "sick-1"): [8],
        ("GpuHpcEccUncorrectable", "sick-0"): [2],
    }
    assert wait_until(lambda: (found := sizes()) == wanted and found) == wanted


def test_causes_silence_their_effects(alertmanager: str) -> None:
    """Only on the same GPU of the same node, and never one another."""
    silenced = [
        alert("JobGpuUnderused", instance="lost"),
        alert("GpuStarved", instance="lost", job=""),
        alert("PcieSaturated", instance="xid"),
        alert("JobGpuUnderused", instance="idle"),
        alert("L2Thrashing", instance="dram", severity="info"),
    ]
    heard = [
        alert("GpuLost", instance="lost", severity="critical"),
        alert("XidCritical", instance="lost", severity="critical"),
        alert("XidCritical", instance="xid", severity="critical"),
        alert("IdleButAllocated", instance="idle"),
        alert("DramSaturatedSmIdle", instance="dram"),
        # Another GPU, another node, the node itself, somebody else's alert.
        alert("GpuStarved", instance="lost", uuid="GPU-1", gpu="1"),
        alert("JobGpuUnderused", instance="idle-not"),
        {"alertname": "GpuHpcExporterDown", "severity": "warning", "instance": "lost"},
        {"alertname": "HostDown", "severity": "critical", "instance": "lost", "uuid": "GPU-0"},
        # An effect without its cause, and a cause that is another's.
        alert("L2Thrashing", instance="idle", severity="info"),
        alert("PcieSaturated", instance="idle"),
    ]
    send(alertmanager, [*silenced, *heard])
    sent = [{name: value for name, value in labels.items() if value} for labels in (*silenced, *heard)]

    def suppressed() -> list[Labels]:
        found = [entry for entry in ask(alertmanager, "alerts") if entry["labels"] in sent]
        return [entry["labels"] for entry in found if entry["status"]["state"] == "suppressed"]

    def key(labels: Labels) -> str:
        return json.dumps(labels, sort_keys=True)

    wait_until(lambda: len(suppressed()) >= len(silenced))
    assert sorted(suppressed(), key=key) == sorted(sent[: len(silenced)], key=key)
    assert len([entry for entry in ask(alertmanager, "alerts") if entry["labels"] in sent]) == len(sent)


# --- systemd ----------------------------------------------------------------------------------------------------------


def unit() -> dict[str, list[str]]:
    """The [Service] section: the values of each key."""
    section = UNIT.read_text().split("[Service]\n")[1].split("\n[")[0]
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", section, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Without a word: an unknown or misspelt key would be one. The program stands in for the installed one."""
    (program,) = unit()["ExecStart"]
    file = tmp_path / UNIT.name
    file.write_text(UNIT.read_text().replace(program, "/bin/true"))
    assert run("systemd-analyze", "verify", "--man=no", file) == ""
    run("systemd-analyze", "security", "--offline=yes", "--threshold=40", file)


def test_unit_starts_what_is_installed() -> None:
    """The package's own command, without an option that would need to be kept."""
    (program,) = unit()["ExecStart"]
    assert Path(program).name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_unit_confines_and_still_sees_the_gpus() -> None:
    """M03, M04: no sandbox around devices, processes and the kernel log; a list of the devices; a user that exists."""
    service = unit()
    assert service["DeviceAllow"] == ["char-195 rw", "char-nvidia* rw", "/dev/kmsg r"]
    assert service["DevicePolicy"] == ["closed"]
    assert service["ProtectProc"] == ["default"]
    assert service["ProcSubset"] == ["all"]
    assert service["ProtectKernelLogs"] == ["no"]
    assert not {"PrivateDevices", "PrivateUsers", "PrivatePIDs", "ProtectClock", "SystemCallFilter"} & set(service)
    assert service["DynamicUser"] == ["yes"]
    assert "User" not in service
    assert re.search(r"^StartLimitIntervalSec=0$", UNIT.read_text().split("[Service]")[0], re.MULTILINE)
    assert service["Restart"] == ["on-failure"]
    assert service["NoNewPrivileges"] == ["yes"]
    assert service["AmbientCapabilities"] == service["CapabilityBoundingSet"] == ["CAP_SYSLOG"]


def test_unit_makes_the_directory_of_the_agents_files(tmp_path: Path) -> None:
    """As its own user's, with the exporter's mode; the sandbox leaves it writable; without it the service starts."""
    service = unit()
    (command,) = service["ExecStartPre"]
    assert command.startswith("-+/"), "as root, and what fails is no harm"
    words = command.removeprefix("-+").split()
    assert words[-1] == Agent().directory
    assert service["ReadWritePaths"] == [f"-{words[-1]}"]
    user = UNIT.name.removesuffix(".service")
    assert words[words.index("-o") + 1] == words[words.index("-g") + 1] == user
    here = {user: "", "-o": "", "-g": "", words[-1]: str(tmp_path / "run/agents")}
    run("sh", "-c", 'umask 077; exec "$@"', "sh", *filter(None, (here.get(word, word) for word in words)))
    assert stat.S_IMODE((tmp_path / "run/agents").stat().st_mode) == 0o3733
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o755


def test_sample_configuration_is_one(tmp_path: Path) -> None:
    """As it is, and with what stands there commented out."""
    load_config(CONFIG)
    file = tmp_path / "config.yaml"
    file.write_text(re.sub(r"^( *)# (\w+: .*)$", r"\1\2", CONFIG.read_text(), flags=re.MULTILINE))
    config = load_config(file)
    assert config.expected_gpus == 8
    assert config.exit_after_lost_minutes == 10
    assert config.jobs.slurm.map_directory == "/run/gpu-jobs"
