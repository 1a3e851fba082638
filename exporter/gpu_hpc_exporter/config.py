"""Configuration: a YAML file, then flags; frozen and checked. Every mistake is told with its file and line."""

from __future__ import annotations

import difflib
import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
import yaml

from gpu_hpc_exporter.model import JobKind

DEFAULT_FILE: Final = Path("/etc/gpu-hpc-exporter/config.yaml")
DEFAULT_PORT: Final = 9836
DEFAULT_DRIVER_ROOT: Final = Path("/run/nvidia/driver")
"""Where NVIDIA's GPU operator mounts the driver container's root."""
DEFAULT_RECORDING: Final = Path(__file__).parent / "recordings" / "nvidia-h200__580.159.04.jsonl.gz"
"""What `--source=replay` plays when no file is named: ten workloads recorded on an H200."""

RULE_GROUPS: Final = ("job", "job_id", "kind", "user", "namespace", "pod", "container", "rank")
"""Named groups that a rule's regular expressions may have."""

_MAX_PROBLEM: Final = 400
_MAX_FILE: Final = 1 << 20

Positive = Annotated[int, msgspec.Meta(ge=1)]


class ConfigError(Exception):
    """The configuration cannot be used; the text names place, mistake and remedy in one line."""


class PmSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CUPTI PM sampling.

    mode: `auto` is on from Hopper on and off before; `required` is on wherever the GPU can.
    yield_to: names of programs, `*` allowed, while one of which runs the counters are left alone.
    library: path of libcupti.so; "" takes the newest that fits the driver.
    helper: command that starts the helper process in place of this Python, such as `["sudo", "-n",
        "/usr/local/bin/gpu-hpc-pm-helper"]`, so that it can have more privilege than the exporter.
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
    api: Annotated[str, msgspec.Meta(pattern=r"^(auto|off|https?://\S+)$")] = "auto"
    token_file: str = ""
    ca_file: str = ""
    node_name: str = ""
    gpu_resources: tuple[str, ...] = ()


class Slurmrestd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Slurm's REST service: its URL, a file with a token, whose token it is, and the API's version."""

    url: Annotated[str, msgspec.Meta(pattern=r"^(https?://\S+)?$")] = ""
    token_file: str = ""
    user: str = ""
    version: Annotated[str, msgspec.Meta(pattern=r"^v[0-9.]+$")] = "v0.0.40"


class Slurm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names and GPUs of Slurm jobs, whose ids processes tell by themselves.

    map_directory: where a prolog writes a file for each GPU, as for dcgm-exporter's --hpc-job-mapping-dir.
    scontrol: `true`, or the program's path: ask the controller for jobs that the files do not tell of.
    """

    map_directory: str = ""
    scontrol: Annotated[str, msgspec.Meta(pattern=r"^(true|false|/.*)$")] = "false"
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
    if path.exists() and not path.is_file() and not path.is_dir():
        # A FIFO or a device could block for ever, and with it every later reload.
        raise ConfigError(f"{path}: is no regular file")
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE + 1)
        if len(content) > _MAX_FILE:
            raise ConfigError(f"{path}: longer than {_MAX_FILE >> 20} MiB: this is no configuration")
        text = content.decode("utf-8")
        # Scalars stay text, which msgspec converts as the types say: no YAML surprises such as dates or octals.
        tree = yaml.compose(text, Loader=yaml.BaseLoader)
        data = yaml.load(text, Loader=yaml.BaseLoader)  # noqa: S506  constructs only text, lists and mappings
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}: line {line}: {error.problem}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if tree is not None and not isinstance(tree, yaml.MappingNode):
        raise ConfigError(
            f"{path}: line 1: expected lines `key: value`; known keys: {', '.join(Config.__struct_fields__)}"
        )
    _refuse_duplicates(path, tree)
    _refuse_unusable_text(path, tree)
    try:
        return msgspec.convert({} if tree is None else _without_empty(data), Config, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(path, tree, str(error))) from error


def _without_empty(data: object) -> object:
    """A key without a value, such as a section whose lines are all comments, is as good as none."""
    if not isinstance(data, dict):
        return data
    return {key: _without_empty(value) for key, value in data.items() if value != ""}


def _refuse_unusable_text(path: Path, node: yaml.Node | None) -> None:
    """Escapes can write what no path, name or label can hold: NUL, and halves of surrogate pairs."""
    if isinstance(node, yaml.ScalarNode):
        if "\0" in node.value or any("\ud800" <= character <= "\udfff" for character in node.value):
            line = node.start_mark.line + 1
            raise ConfigError(f"{path}: line {line}: text with a NUL or half a surrogate pair cannot be used")
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_unusable_text(path, item)
    elif isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            _refuse_unusable_text(path, name)
            _refuse_unusable_text(path, value)


def _refuse_duplicates(path: Path, node: yaml.Node | None) -> None:
    """YAML forbids two equal keys and most parsers let the last one win."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicates(path, item)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for name, value in node.value:
            if name.value in seen:
                raise ConfigError(f"{path}: line {name.start_mark.line + 1}: key `{name.value}` stands here twice")
            if isinstance(name, yaml.ScalarNode):
                seen.add(name.value)
            _refuse_duplicates(path, value)


def _explain(path: Path, tree: yaml.Node | None, problem: str) -> str:
    """Msgspec's message with the line that it is about and, for an unknown key, the likely one meant."""
    where, keys = re.search(r"at `\$\.?(.*?)`", problem, re.DOTALL), list[str]()
    if where:
        keys = [key for key in re.split(r"\.|\[.*?\]", where[1]) if key]
    unknown = re.search(r"unknown field `(.*?)`(?: - at|$)", problem, re.DOTALL)
    if unknown:
        suggestion = _suggestion(keys, unknown[1])
        keys.append(unknown[1])
        problem = f"unknown key `{'.'.join(keys)}`{suggestion}"
    else:
        problem = f"{'.'.join(keys)}: {problem.split(' - at ')[0]}" if keys else problem
    return f"{path}: line {_line_of(tree, keys)}: {' '.join(problem.split())[:_MAX_PROBLEM]}"


def _suggestion(section: list[str], key: str) -> str:
    struct: Any = Config
    for name in section:
        struct = get_type_hints(struct)[name]
        struct = get_args(struct)[0] if get_origin(struct) is tuple else struct
    known = struct.__struct_fields__
    near = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean `{near[0]}`?" if near else f"; known keys: {', '.join(known)}"


def _line_of(node: yaml.Node | None, keys: list[str]) -> int:
    line = 1
    for key in keys:
        if not isinstance(node, yaml.MappingNode):
            break
        for name, value in node.value:
            if name.value == key:
                line, node = name.start_mark.line + 1, value
                break
    return line


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
