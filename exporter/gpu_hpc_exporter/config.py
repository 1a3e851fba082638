"""Configuration: a YAML file, then flags; frozen and checked. Every mistake is told with its file and line."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from gpu_hpc_exporter.model import JobKind
from gpu_hpc_exporter.yaml_file import ConfigError as ConfigError  # noqa: PLC0414  the form of a re-export
from gpu_hpc_exporter.yaml_file import read_yaml

DEFAULT_FILE: Final = Path("/etc/gpu-hpc-exporter/config.yaml")
DEFAULT_PORT: Final = 9836
DEFAULT_DRIVER_ROOT: Final = Path("/run/nvidia/driver")
"""Where NVIDIA's GPU operator mounts the driver container's root."""
DEFAULT_RECORDING: Final = Path(__file__).parent / "recordings" / "nvidia-h200__580.159.04.jsonl.gz"
"""What `--source=replay` plays when no file is named: twelve workloads recorded on an H200."""

RULE_GROUPS: Final = ("job", "job_id", "kind", "user", "namespace", "pod", "container", "rank")
"""Named groups that a rule's regular expressions may have."""

Positive = Annotated[int, msgspec.Meta(ge=1)]


class PmSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CUPTI PM sampling.

    mode: `auto` is on from Hopper on and off before; `required` is on wherever the GPU can.
    yield_to: names of programs, `*` allowed, while one of which runs the counters are left alone.
    library: path of libcupti.so; "" takes the newest that fits the driver.
    helper: command that starts the helper process in place of this Python, such as `["sudo", "-n",
        "/opt/gpu-hpc-exporter/bin/gpu-hpc-pm-helper"]`, so that it can have more privilege than the exporter.
    """

    mode: Literal["auto", "off", "required"] = "auto"
    yield_to: tuple[str, ...] = (
        "ncu",  # also what ncu-ui starts; the user interfaces themselves profile nothing
        "nv-nsight-cu-cli",  # ncu before 2020
        "nsys",
        "nsys-launcher",
        "nvprof",
        "ngfx",
        "ngfx-capture",
        "ngfx-replay",
        "dcgmproftester*",
    )
    library: str = ""
    helper: tuple[str, ...] = ()


class Agent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Kernel agents.

    directory: where they leave their files; `run` tells it to what it starts.
    resume_after_profiler: minutes after which an agent traces again where a profiler has been at work; `run` tells it.
    top_k: kernels of each GPU, the busiest, that get series of their own.
    """

    directory: str = "/run/gpu-hpc-exporter/agents"
    resume_after_profiler: Literal["never"] | Positive = "never"
    top_k: Annotated[int, msgspec.Meta(ge=1, le=24)] = 12


class JobRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule of the user's: regular expressions, each of which must be found in what it is named after.

    Their named groups (job, job_id, kind, user, namespace, pod, container, rank) are what the rule says of the job.
    kind: what the job is where no group tells.
    """

    command_line: str = ""
    user: str = ""
    cgroup: str = ""
    kind: JobKind = ""

    def __post_init__(self) -> None:
        """Refuse what would never apply, or would at the first process that comes."""
        patterns = [self.command_line, self.user, self.cgroup]
        if not any(patterns):
            raise ValueError("a rule needs at least one of command_line, user and cgroup")
        groups: set[str] = set()
        for pattern in patterns:
            try:
                groups |= re.compile(pattern).groupindex.keys()
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"regular expression `{pattern}`: {error}") from error
        unknown = sorted(groups - set(RULE_GROUPS))
        if unknown:
            raise ValueError(f"named group `{unknown[0]}`: expected one of {', '.join(RULE_GROUPS)}")
        if not (groups or self.kind):
            raise ValueError("a rule needs a named group, such as (?P<job>...), or a kind")


class Kubernetes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Pods and the GPUs they hold.

    enabled: `auto` asks the kubelet where its socket exists.
    labels, annotations: the first that a pod has names its job, labels first.
    api: API server to read labels, annotations and controllers from; `auto` is the pod's own cluster.
    token_file, ca_file: for a configured API server; "" takes the pod's service account, if there is one.
    node_name: this node for the API server; "" takes the environment variable NODE_NAME, else the host's name.
    gpu_resources: renamed resources that are GPUs; only for device plugins that give no UUIDs.
    """

    enabled: Literal["auto", "off"] = "auto"
    socket: str = "/var/lib/kubelet/pod-resources/kubelet.sock"
    labels: tuple[str, ...] = (
        "training.kubeflow.org/job-name",
        "ray.io/cluster",
        "job-name",
        "app.kubernetes.io/instance",
    )
    annotations: tuple[str, ...] = ()
    api: Annotated[
        str, msgspec.Meta(pattern=r"^(auto|off|https?://\S+)$", description="auto, off, or a URL of http or https")
    ] = "auto"
    token_file: str = ""
    ca_file: str = ""
    node_name: str = ""
    gpu_resources: tuple[str, ...] = ()


class Slurmrestd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slurm's REST service: its URL, a file with a token, whose token it is, and the API's version."""

    url: Annotated[str, msgspec.Meta(pattern=r"^(https?://\S+)?$", description="a URL of http or https")] = ""
    token_file: str = ""
    user: str = ""
    version: Annotated[str, msgspec.Meta(pattern=r"^v[0-9.]+$", description="a version like v0.0.40")] = "v0.0.40"


class Slurm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names and GPUs of Slurm jobs, whose ids processes tell by themselves.

    map_directory: where a prolog writes a file for each GPU, as for dcgm-exporter's --hpc-job-mapping-dir.
    scontrol: `true`, or the program's path: ask the controller for jobs that the files do not tell of.
    """

    map_directory: str = ""
    scontrol: Annotated[
        str, msgspec.Meta(pattern=r"^(true|false|/.*)$", description="true, false, or a path that begins with /")
    ] = "false"
    slurmrestd: Slurmrestd = Slurmrestd()


class Jobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose GPU it is.

    rules: the first that applies to a process says what it is.
    environment: variables that name a process's job where neither Slurm nor Kubernetes does; the first found wins.
    """

    rules: tuple[JobRule, ...] = ()
    environment: tuple[str, ...] = (
        *("JOB_NAME", "WANDB_NAME"),
        *("KUBEFLOW_JOB_NAME", "KUBEFLOW_RUN_NAME", "RAY_JOB_NAME", "RAY_CLUSTER_NAME"),
    )
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration file.

    sampling_interval_ms: length of the sampling windows, at most 4000, since readings go on their beat and count as
        stale after 5 s; GPM's stay at 100 when it is shorter, PM sampling's when it is longer.
    gauge_window_seconds: span over which gauges are means.
    expected_gpus: GPUs that this node should have; by default the most ever seen.
    exit_after_lost_minutes: end with status 3 once access to all GPUs has been lost for so long, so that an
        orchestrator restarts the container; by default never.
    series_limit: most samples in an exposition; families above it are left out and counted.
    """

    sampling_interval_ms: Annotated[float, msgspec.Meta(ge=1, le=4_000)] = 100
    gauge_window_seconds: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 15
    expected_gpus: Annotated[int, msgspec.Meta(ge=0, le=1024)] | None = None
    exit_after_lost_minutes: Annotated[float, msgspec.Meta(gt=0)] | None = None
    series_limit: Annotated[int, msgspec.Meta(ge=100)] = 20_000
    pm_sampling: PmSampling = PmSampling()
    agent: Agent = Agent()
    jobs: Jobs = Jobs()


def read_config(path: Path | None) -> Config:
    """The configuration of a file, by default of the usual one if it is there. Raises ConfigError."""
    if path is not None:
        return load_config(path)
    return load_config(DEFAULT_FILE) if DEFAULT_FILE.exists() else Config()


def load_config(path: Path) -> Config:
    """Read and check a configuration file. Raises ConfigError."""
    return read_yaml(path, Config).value


_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[A-Za-z0-9._-]*)):(?P<port>[0-9]{1,5})")


def parse_address(text: str) -> tuple[str | None, int]:
    """`:9836`, `127.0.0.1:9836`, `localhost:9836` or `[::1]:9836` → (host or None for all, port)."""
    match = _ADDRESS.fullmatch(text)
    if not match or int(match["port"]) > 65535 or (match["v6"] and not _is_ipv6(match["v6"])):
        raise ConfigError(f"listen address `{text}`: expected HOST:PORT, :PORT or [IPV6]:PORT")
    return match["v6"] or match["host"] or None, int(match["port"])


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def parse_telemetry_path(text: str) -> str:
    """A path such as `/metrics`. Raises ConfigError for anything that cannot be a path of ours."""
    if not re.fullmatch(r"(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)+", text) or text.startswith("/-"):
        raise ConfigError(f"--web.telemetry-path `{text}`: expected a path like /metrics (not / and not below /-)")
    return text


_DURATION: Final = re.compile(r"(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,6}(?:\.[0-9]{1,9})?)s?)?")


def parse_duration(text: str) -> float:
    """`90`, `90s`, `3m`, `1h30m` → seconds."""
    match = _DURATION.fullmatch(text)
    if not text or not match or not any(match.groups()):
        raise ConfigError(f"duration `{text}`: expected a form like 90s, 3m or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds
