"""Configuration: a YAML file, then flags; frozen and checked. Every mistake is told with its file and line."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated, Final

import msgspec
import yaml

DEFAULT_FILE: Final = Path("/etc/gpu-hpc-exporter/config.yaml")
DEFAULT_PORT: Final = 9836
DEFAULT_RECORDING: Final = Path(__file__).parent / "recordings" / "nvidia-h200__580.159.04.jsonl.gz"
"""What `--source=replay` plays when no file is named: nine workloads recorded on an H200."""


class ConfigError(Exception):
    """The configuration cannot be used; the text names place, mistake and remedy in one line."""


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration file.

    sampling_interval_ms: length of the sampling windows; GPM's floor is 100.
    gauge_window_seconds: span over which gauges are means.
    """

    sampling_interval_ms: Annotated[float, msgspec.Meta(ge=1, le=60_000)] = 100
    gauge_window_seconds: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 15


def load_config(path: Path) -> Config:
    """Read and check a configuration file. Raises ConfigError."""
    try:
        text = path.read_text("utf-8")
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path}: line {line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    try:
        return msgspec.convert({} if data is None else data, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(path, tree, str(error))) from error


def _explain(path: Path, tree: yaml.Node | None, problem: str) -> str:
    """Msgspec's message with the line that it is about and, for an unknown key, the likely one meant."""
    where, keys = re.search(r"at `\$\.?(.*?)`", problem), list[str]()
    if where:
        keys = [key for key in where[1].split(".") if key]
    unknown = re.search(r"unknown field `(.*?)`", problem)
    if unknown:
        keys.append(unknown[1])
        problem = f"unknown key `{unknown[1]}`{_suggestion(unknown[1])}"
    else:
        problem = f"{'.'.join(keys)}: {problem.split(' - at ')[0]}" if keys else problem
    return f"{path}: line {_line_of(tree, keys)}: {problem}"


def _suggestion(key: str) -> str:
    near = difflib.get_close_matches(key, Config.__struct_fields__, n=1)
    return f"; did you mean `{near[0]}`?" if near else f"; known keys: {', '.join(Config.__struct_fields__)}"


def _line_of(node: yaml.Node | None, keys: list[str]) -> int:
    line = 1
    for key in keys:
        if not isinstance(node, yaml.MappingNode):
            break
        for name, value in node.value:
            if name.value == key:
                line, node = name.start_mark.line + 1, value
    return line


_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^:\[\]]*)):(?P<port>\d{1,5})")


def parse_address(text: str) -> tuple[str | None, int]:
    """`:9836`, `127.0.0.1:9836`, `localhost:9836` or `[::1]:9836` → (host or None for all, port)."""
    match = _ADDRESS.fullmatch(text)
    if not match or int(match["port"]) > 65535:
        raise ConfigError(f"listen address `{text}`: expected HOST:PORT, :PORT or [IPV6]:PORT")
    return match["v6"] or match["host"] or None, int(match["port"])


_DURATION: Final = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?")


def parse_duration(text: str) -> float:
    """`90`, `90s`, `3m`, `1h30m` → seconds."""
    match = _DURATION.fullmatch(text)
    if not text or not match or not any(match.groups()):
        raise ConfigError(f"duration `{text}`: expected a form like 90s, 3m or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds
