"""The stack of docker-compose.yml, as far as it goes without an engine: what it names exists, fits and runs."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from exporter_process import Exporter, run_exporter
from fake_nvml import Scenario, build
from gpu_hpc_exporter import __version__
from gpu_hpc_exporter.config import DEFAULT_PORT, Agent
from gpu_hpc_exporter.sources.kernels.files import FOLDER_MODE
from prometheus_process import Prometheus, run_prometheus

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
EXPORTERS = {name: service for name, service in SERVICES.items() if "build" in service}
RULES = sorted((ROOT / "alert-rules").glob("*.yml"))
DOCKERFILE = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text())
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+(-[\w-]+)?")

EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
NO_PRIVILEGES = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"]
NO_PRIVILEGES += ["--bounding-set=-all", "--inh-caps=-all", "--"]
READ_ONLY = """
for point in / /tmp /var/tmp /dev/shm; do
    if mountpoint -q "$point"; then mount -o remount,bind,ro "$point" || exit; fi
done
exec "$@"
"""


@dataclass(frozen=True)
class Mount:
    """A line of `volumes`: a path of the repository, or a volume's name, and where it is in the container."""

    source: str
    target: PurePosixPath
    read_only: bool

    @property
    def path(self) -> Path | None:
        return ROOT / self.source if self.source.startswith(".") else None


def mounts(service: str) -> list[Mount]:
    parts = [line.split(":") for line in SERVICES[service].get("volumes", ())]
    return [Mount(source, PurePosixPath(target), mode == ["ro"]) for source, target, *mode in parts]


def in_repository(service: str, path: str) -> Path:
    """The file that a path in the container is, by the mounts."""
    for mount in mounts(service):
        if mount.path and PurePosixPath(path).is_relative_to(mount.target):
            return mount.path / PurePosixPath(path).relative_to(mount.target)
    raise AssertionError(f"{path} of {service} is in no directory of the repository")


def instructions(name: str) -> list[str]:
    """What stands behind an instruction of the Dockerfile, in order."""
    return re.findall(rf"^{name} (.+)$", DOCKERFILE, re.MULTILINE)


def flag(service: str, name: str) -> str:
    (value,) = [
        text.removeprefix(f"--{name}=") for text in SERVICES[service]["command"] if text.startswith(f"--{name}")
    ]
    return str(value)


@pytest.mark.parametrize("profile", ["", "demo", "gpu"])
def test_compose_takes_the_file(profile: str) -> None:
    """Compose itself, with the profile of .env, and with either."""
    env = {**os.environ, **({"COMPOSE_PROFILES": profile} if profile else {})}
    done = subprocess.run(
        ["docker-compose", "config", "--quiet"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_service_is_pinned_watched_and_confined(name: str) -> None:
    """One image for ever, a health check, no privilege, no port for other machines."""
    service = SERVICES[name]
    assert PINNED.fullmatch(service["image"])
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "cap_add" not in service
    assert "privileged" not in service
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["ports"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])


@pytest.mark.parametrize("name", SERVICES)
def test_mounts_are_there(name: str) -> None:
    """What is mounted of the repository exists and cannot be changed from inside; volumes are declared.

    Of the host nothing is mounted but the directory of the kernel agents' files.
    """
    for mount in mounts(name):
        if mount.path:
            assert mount.path.exists(), mount
            assert mount.read_only, mount
        elif mount.source.startswith("/"):
            assert mount.source == Agent().directory
        else:
            assert mount.source in COMPOSE["volumes"]


def test_each_profile_has_one_exporter_under_one_name() -> None:
    """Prometheus need not know which; .env asks for the recording, and git keeps .env."""
    assert {name: service["profiles"] for name, service in EXPORTERS.items()} == {
        "exporter-demo": ["demo"],
        "exporter-gpu": ["gpu"],
    }
    assert all(service["networks"]["default"]["aliases"] == ["exporter"] for service in EXPORTERS.values())
    assert all(service["image"] == f"gpu-hpc-exporter:{__version__}" for service in EXPORTERS.values())
    assert (ROOT / ".env").read_text().splitlines()[-1] == "COMPOSE_PROFILES=demo"
    ignored = subprocess.run(["git", "check-ignore", "-q", ".env"], cwd=ROOT, check=False, timeout=60)
    assert ignored.returncode != 0


def test_gpu_profile_reserves_the_gpus() -> None:
    """M06: all of them, with what CUPTI needs, and the host's processes to name jobs."""
    service = EXPORTERS["exporter-gpu"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu", "utility", "compute"]}
    assert service["pid"] == "host"
    assert "command" not in service
    assert "NVIDIA_DRIVER_CAPABILITIES=utility,compute" in " ".join(instructions("ENV"))


def test_gpu_profile_has_the_agents_directory() -> None:
    """In the place that the variables of programs name, to read and to tidy up; the comment's command makes it."""
    (mount,) = mounts("exporter-gpu")
    assert (mount.source, str(mount.target), mount.read_only) == (Agent().directory, Agent().directory, False)
    assert not mounts("exporter-demo")
    (command,) = re.findall(r"#   (install -d .+)", (ROOT / "docker-compose.yml").read_text())
    user, group = instructions("USER")[0].split(":")
    assert command == f"install -d -m {FOLDER_MODE:o} -o {user} -g {group} {Agent().directory}"


def test_dockerfile_is_pinned_and_not_root() -> None:
    """Both stages come of the same Python, since the second runs the environment of the first, which has a compiler."""
    build, final = instructions("FROM")
    assert PINNED.fullmatch(final)
    assert build.removesuffix(" AS build") == final.replace("-slim", "")
    assert "-slim" in final
    assert instructions("USER") == ["65534:65534"]
    assert instructions("EXPOSE") == [str(DEFAULT_PORT)]


def test_engine_is_sent_what_is_copied() -> None:
    """Nothing else: all is ignored but that."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    assert sorted(line.removeprefix("!") for line in lines if line.startswith("!")) == sorted(copied())


# --- the image, built as the Dockerfile says --------------------------------------------------------------------------


@cache
def confined() -> list[str]:
    """What makes a command run as in the container: another user, no capability, nothing that can be written.

    Who is not root is already nobody, and root of a container may not make file systems read-only.
    """
    if os.geteuid() != 0:
        return []
    namespace = ["unshare", "--mount"]
    done = subprocess.run([*namespace, "true"], check=False, capture_output=True, timeout=60)
    return [*([*namespace, "sh", "-c", READ_ONLY, "sh"] if done.returncode == 0 else []), *NO_PRIVILEGES]


def outsiders_python() -> Path:
    """A Python that an unprivileged user may run: the tests' own may lie in a home directory."""
    candidates = [Path(sys.base_prefix) / "bin/python3", Path("/usr/bin/python3")]
    for candidate in candidates:
        # By way of `env`, since what setpriv starts itself is looked up with the privileges that end thereby.
        command = [*confined(), "env", str(candidate), "-c", "import sys, venv; sys.exit(sys.version_info < (3, 11))"]
        done = subprocess.run(command, check=False, capture_output=True, timeout=60)
        if done.returncode == 0:
            return candidate
    raise AssertionError(f"none of {candidates} is a Python that every user may run: {done.stderr.decode()}")


def copied() -> list[str]:
    """What the Dockerfile copies of the repository."""
    lines = [line.split()[:-1] for line in instructions("COPY") if not line.startswith("--from")]
    return list(itertools.chain(*lines))


@pytest.fixture(scope="module")
def image() -> Iterator[Path]:
    """Root directory in which the Dockerfile's own commands ran on nothing but what it copies."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        (root / "src").mkdir()
        for source in copied():
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, root / "src" / source, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, root / "src")
        (command,) = instructions("RUN")
        for old, new in {
            "python -m venv": f"{outsiders_python()} -m venv",
            "python -m pip": f"{sys.executable} -m pip --quiet --disable-pip-version-check",
            " --no-cache-dir": "",
            "/wheels": f"{root}/wheels",
            "/opt/": f"{root}/opt/",
        }.items():
            assert old in command
            command = command.replace(old, new)
        done = subprocess.run(
            ["sh", "-c", command], cwd=root / "src", capture_output=True, text=True, check=False, timeout=240
        )
        assert done.returncode == 0, done.stderr
        yield root


def environment(image: Path) -> list[str]:
    """Nothing but the image's own PATH: no HOME, no settings."""
    path = (
        instructions("ENV")[0].removeprefix("PATH=").replace("$PATH", "/usr/bin:/bin").replace("/opt/", f"{image}/opt/")
    )
    return ["env", "-i", f"PATH={path}"]


@pytest.fixture(scope="module")
def exporter(image: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    """The demo's exporter: the image's entry point with the service's command, as the image's user."""
    (entry,) = instructions("ENTRYPOINT")
    command = [*confined(), *environment(image), *json.loads(entry), *EXPORTERS["exporter-demo"]["command"]]
    log = tmp_path_factory.mktemp("exporter")
    with run_exporter(log, program=["-c", EXECUTE, *command]) as running:
        running.wait_for(lambda _: running.fetch("/-/ready")[0] == 200)
        yield running


@pytest.fixture(scope="module")
def prometheus(exporter: Exporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus on the stack's own configuration and rules; only the exporter's address is another."""
    directory = tmp_path_factory.mktemp("prometheus")
    config = prometheus_directory(directory).read_text()
    assert config.count("exporter:9836") == 1
    config = config.replace("exporter:9836", exporter.url.removeprefix("http://"))
    with run_prometheus(directory, config) as running:
        yield running


def prometheus_directory(directory: Path) -> Path:
    """Lays what the container has beside its configuration file into a directory; the configuration file."""
    file = PurePosixPath(flag("prometheus", "config.file"))
    for mount in mounts("prometheus"):
        if mount.path and mount.target.parent == file.parent:
            (directory / mount.target.name).symlink_to(mount.path)
    config = in_repository("prometheus", str(file))
    link = directory / file.name
    link.unlink()
    return Path(shutil.copy(config, link))


def test_image_has_the_extras_and_the_recording(image: Path) -> None:
    """What a container needs beyond the core, what the demo plays, and the rules for who has nothing but the image."""
    rules = image / "opt/gpu-hpc-exporter/share/gpu-hpc-exporter/alert-rules"
    assert sorted(file.name for file in rules.glob("*.yml")) == [file.name for file in RULES]
    (packages,) = (image / "opt/gpu-hpc-exporter/lib").glob("python3*/site-packages")
    assert (packages / "nvidia/cuda_cupti").is_dir()
    assert (packages / "grpc").is_dir()
    assert list((packages / "gpu_hpc_exporter/recordings").glob("*.jsonl.gz"))
    assert (packages / "gpu_hpc_exporter/agent/libgpu_hpc_agent.so").is_file()


def test_pods_can_copy_the_agent_out_of_the_image(image: Path) -> None:
    """The command of their init container, as its user, from the place that the Dockerfile's link gives it."""
    patch = yaml.safe_load((ROOT / "deploy/kubernetes/kernel-agent/kernel-agent.yaml").read_text())
    (container,) = patch["spec"]["template"]["spec"]["initContainers"]
    (mount,) = container["volumeMounts"]
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)  # as the volume is
        places = {f"{mount['mountPath']}/": f"{name}/"}
        command = [places.get(word, word.replace("/opt/", f"{image}/opt/")) for word in container["command"]]
        user = NO_PRIVILEGES if os.geteuid() == 0 else []
        subprocess.run([*user, *command], check=True, timeout=60)
        (copy,) = Path(name).iterdir()
        assert not copy.is_symlink()
        assert copy.read_bytes().startswith(b"\x7fELF")
        assert copy.stat().st_mode & 0o444 == 0o444, "another user has to read it"


def test_exporter_runs_without_any_privilege(exporter: Exporter) -> None:
    """M05: the fixture waited for windows; that it was confined is the kernel's word."""
    status = Path(f"/proc/{exporter.process.pid}/status").read_text()
    assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE) or os.geteuid() != 0
    assert not re.search(r"^Uid:\t0\t", status, re.MULTILINE)
    if "unshare" in confined():
        root = re.search(r" / / (\S+)", Path(f"/proc/{exporter.process.pid}/mountinfo").read_text())
        assert root
        assert "ro" in root[1].split(",")


def test_m05_base_metrics_without_any_privilege(image: Path) -> None:
    """M05: readings and windows of GPUs, as the image's user, without a capability, HOME or a place to write to."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        root.chmod(0o755)
        scenario = Scenario(root, build(root / "driver"), "device 0 sm 0.5 dram 0.25\ndevice 1 sm 0.75\n")
        scenario.path.chmod(0o644)
        variables = [f"{key}={scenario.env[key]}" for key in ("LD_LIBRARY_PATH", "FAKE_NVML_SCENARIO")]
        (entry,) = instructions("ENTRYPOINT")
        command = [*confined(), *environment(image), *variables, *json.loads(entry)]
        with run_exporter(root, program=["-c", EXECUTE, *command]) as running:
            samples = running.wait_for(lambda samples: len(samples.all("gpu_hpc_sm_active_ratio")) == 2)
            assert sorted(samples.all("gpu_hpc_sm_active_ratio").values()) == pytest.approx([0.5, 0.75], abs=1e-3)
            for reading in ("gpu_hpc_power_watts", "gpu_hpc_memory_used_bytes", "gpu_hpc_energy_joules_total"):
                assert len(samples.all(reading)) >= 2, reading
            assert samples.one("gpu_hpc_up") == 1
            assert running.fetch("/-/ready")[0] == 200
            assert running.post("/-/reload") == 200
            assert re.search(r"^CapEff:\t0+$", Path(f"/proc/{running.process.pid}/status").read_text(), re.MULTILINE)
            assert running.stop() == 0
        assert "Traceback" not in running.log.read_text()


def test_exporters_health_check(image: Path, exporter: Exporter) -> None:
    """Done as in the container, it passes for the running exporter and fails where none is."""
    command = EXPORTERS["exporter-demo"]["healthcheck"]["test"][1:]
    assert EXPORTERS["exporter-gpu"]["healthcheck"]["test"][1:] == command

    def check(address: str) -> int:
        here = [text.replace(f"http://127.0.0.1:{DEFAULT_PORT}", address) for text in command]
        assert here != command
        return subprocess.run([*environment(image), *here], check=False, capture_output=True, timeout=60).returncode

    assert check(exporter.url) == 0
    assert check("http://127.0.0.1:1") != 0


def test_prometheus_health_check(prometheus: Prometheus) -> None:
    """As above; promtool is in Prometheus's image too."""
    command = SERVICES["prometheus"]["healthcheck"]["test"][1:]

    def check(address: str) -> int:
        here = [text.replace("http://127.0.0.1:9090", address) for text in command]
        assert here != command
        return subprocess.run(here, check=False, capture_output=True, timeout=60).returncode

    assert check(prometheus.url) == 0
    assert check("http://127.0.0.1:1") != 0


def test_promtool_takes_the_configuration(tmp_path: Path) -> None:
    """With every file of rules that the repository has, none of their tests."""
    config = prometheus_directory(tmp_path)
    done = subprocess.run(
        ["promtool", "check", "config", config], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(RULES)} rule files found" in done.stdout


def test_dcgm_override_takes_the_rules_for_it_too(tmp_path: Path) -> None:
    """Compose takes both files together: Prometheus gets another configuration in the same place, and all rules."""
    files = ("--file=docker-compose.yml", "--file=deploy/compose/dcgm.yml")
    done = subprocess.run(
        ["docker-compose", *files, "config"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    # Compose 1 prints a volume as text, Compose 2 as a mapping.
    volumes = yaml.safe_load(done.stdout)["services"]["prometheus"]["volumes"]
    mounted = {Path(one["source"] if isinstance(one, dict) else one.split(":")[0]) for one in volumes}
    config = ROOT / "deploy/compose/prometheus-dcgm.yml"
    assert mounted == {config, ROOT / "alert-rules", Path("prometheus")}
    shutil.copytree(ROOT / "alert-rules", tmp_path / "rules")
    copied = shutil.copy(config, tmp_path)
    checked = subprocess.run(
        ["promtool", "check", "config", copied], capture_output=True, text=True, check=False, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(RULES) + 1} rule files found" in checked.stdout


def test_prometheus_scrapes_the_exporter(prometheus: Prometheus) -> None:
    """By the name that either profile gives it, with the labels of the jobs on the GPU left alone."""
    prometheus.wait_for('up{job="gpu-hpc-exporter"} == 1')
    assert prometheus.wait_for('gpu_hpc_honor_labels_check{job="check"}')
    assert not prometheus.query('{exported_job!=""}')


def test_prometheus_evaluates_every_rule(prometheus: Prometheus) -> None:
    """No rule fails on the recording's series, and what is recorded is there."""

    def all_evaluated() -> bool:
        return all(rule["health"] != "unknown" for rule in rules_of(prometheus))

    prometheus.wait_for("gpu:owner:info")
    prometheus.wait_for("gpu:sm_active:ratio_rate5m", lambda found: bool(found) and all_evaluated(), timeout=120)
    rules = rules_of(prometheus)
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert len(rules) == sum(
        len(group["rules"]) for file in RULES for group in yaml.safe_load(file.read_text())["groups"]
    )


def rules_of(prometheus: Prometheus) -> list[dict[str, Any]]:
    return [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]


# --- Grafana ----------------------------------------------------------------------------------------------------------


def provisioned(kind: str) -> list[dict[str, Any]]:
    """The entries of the provisioning files of a kind."""
    folder = in_repository("grafana", f"/etc/grafana/provisioning/{kind}")
    return [entry for file in sorted(folder.glob("*.y*ml")) for entry in _entries(file, kind)]


def _entries(file: Path, kind: str) -> list[dict[str, Any]]:
    content = yaml.safe_load(file.read_text())
    assert content["apiVersion"] == 1
    return list(content["providers" if kind == "dashboards" else kind])


def test_grafana_asks_the_stacks_prometheus() -> None:
    """By its name in the stack, as often as it looks."""
    (source,) = provisioned("datasources")
    assert source["type"] == "prometheus"
    assert source["url"] == "http://prometheus:9090"
    assert source["isDefault"] is True
    config = yaml.safe_load(in_repository("prometheus", flag("prometheus", "config.file")).read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]


def test_grafana_finds_every_dashboard() -> None:
    """The providers' folders are mounted, and hold the dashboard that Grafana opens with."""
    found = [
        dashboard
        for provider in provisioned("dashboards")
        for dashboard in in_repository("grafana", provider["options"]["path"]).glob("*.json")
    ]
    assert sorted(found) == sorted((ROOT / "dashboards").glob("*.json"))
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert json.loads(in_repository("grafana", home).read_text())["uid"] == "gpu-hpc-bottleneck"


def test_grafana_lets_everybody_look_and_nobody_in() -> None:
    """Viewers without a login, no administrator with a well-known password."""
    environment = SERVICES["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ENABLED"] == "true"
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
