"""The command: its flags, the order of the checks, and how they are printed."""

from __future__ import annotations

import argparse
import json
import logging
import os
import pwd
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from gpu_hpc_exporter import __version__
from gpu_hpc_exporter.config import (
    DEFAULT_PORT,
    ConfigError,
    parse_address,
    parse_duration,
    parse_telemetry_path,
)
from gpu_hpc_exporter.doctor.check import STATUSES, Check, Checks, Place, in_time, worst
from gpu_hpc_exporter.doctor.driver import check_driver, check_host_driver
from gpu_hpc_exporter.doctor.host import check_agents, check_clock, check_kernel_log, check_limits, check_processes
from gpu_hpc_exporter.doctor.jobs import check_kubernetes, check_slurm
from gpu_hpc_exporter.doctor.prometheus import Server, check_prometheus, parse_server
from gpu_hpc_exporter.doctor.serving import (
    ForeignServerError,
    Running,
    check_port,
    check_web_configuration,
    find_running,
    read_configuration,
)
from gpu_hpc_exporter.http_client import read_http_client

_LIMIT_S: Final = 12.0
"""How long a check may take that waits for no driver; the longest asks the kubelet, for 6 s."""
_PROBE_S: Final = 15.0
"""What the probe may take longer than the driver."""
_NAME_WIDTH: Final = 21
_TIMEOUT: Final = "30s"

Group = tuple[str, Callable[[], Checks], float]
"""Title, checks, and how long one of them may take."""


def add_doctor(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser], configured: argparse.ArgumentParser
) -> None:
    """The command's flags. configured: those of every command that reads the configuration."""
    parser = subparsers.add_parser(
        "doctor",
        parents=[configured],
        help="tell what is right and wrong with this machine, and what to do",
        description="Check driver, GPUs, permissions, jobs, the exporter and Prometheus's view of it; each line is ok, "
        "degraded (some series are missing) or broken, with its remedy. Needs no root, no GPU and no running exporter; "
        "permissions are those of the user who runs it.\n"
        "Exit status, that of the worst line: 0 all ok, 1 degraded, 2 broken. 1 is the normal state of an exporter "
        "without privileges (CAP_SYS_PTRACE, kernel log); 2 is also a mistake in the command line.\n"
        "The exporter's own flags, such as --web.listen-address, stand before the command.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, as docs/troubleshooting.md describes it")
    parser.add_argument("--prometheus", metavar="URL", help="ask this Prometheus what it makes of the exporter")
    parser.add_argument(
        "--prometheus.http.config.file",
        dest="prometheus_http_config_file",
        type=Path,
        metavar="FILE",
        help="basic_auth and tls_config for it, as for promtool",
    )
    parser.add_argument(
        "--http.config.file",
        dest="http_config_file",
        type=Path,
        metavar="FILE",
        help="the same for this machine's exporter, where it serves with TLS or users",
    )
    parser.add_argument(
        "--instance", default="", metavar="NAME", help="this machine's label `instance` there (default: find out)"
    )
    parser.add_argument(
        "--timeout", default=_TIMEOUT, metavar="TIME", help=f"how long a driver call may take (default: {_TIMEOUT})"
    )
    parser.add_argument(
        "--path.rootfs",
        dest="path_rootfs",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="where the host's root is mounted, for /dev, /sys and /run (default: /)",
    )


def run_doctor(flags: argparse.Namespace) -> int:
    """Check and print; the exit status. Raises ConfigError for a flag."""
    if flags.log_level != "debug":  # the lines say it all
        logging.disable(logging.CRITICAL)
    client = read_http_client(flags.prometheus_http_config_file)
    server = parse_server(flags.prometheus, flags.instance, client) if flags.prometheus else None
    timeout_s = parse_duration(flags.timeout)
    if not 1 <= timeout_s <= 600:
        raise ConfigError(f"--timeout `{flags.timeout}`: expected 1s to 10m")
    config, configuration = read_configuration(flags.config_file)
    place = Place(
        config=config,
        driver_root=flags.path_driver_root,
        procfs=flags.path_procfs,
        kmsg=flags.path_kmsg,
        rootfs=flags.path_rootfs,
        addresses=tuple(parse_address(text) for text in flags.web_listen_address or [f":{DEFAULT_PORT}"]),
        telemetry_path=parse_telemetry_path(flags.web_telemetry_path),
        client=read_http_client(flags.http_config_file),
        environ=os.environ,
        timeout_s=timeout_s,
    )
    groups = _groups(place, configuration, flags.web_config_file, server)
    checks = _print_json(groups) if flags.json else _print_text(groups)
    return STATUSES.index(worst(checks))


def _groups(place: Place, configuration: list[Check], web_config: Path | None, server: Server | None) -> list[Group]:
    """In the order in which causes come before effects."""
    running = _running(place)
    samples_pm = not (isinstance(running, Running) and running.samples)
    groups: list[Group] = [
        ("exporter", lambda: iter(configuration), _LIMIT_S),
        ("", lambda: check_port(place, running), _LIMIT_S),
        ("driver and GPUs", lambda: check_host_driver(place), _LIMIT_S),
        ("", lambda: check_driver(place, samples_pm=samples_pm), place.timeout_s + _PROBE_S),
        ("jobs", lambda: check_processes(place), _LIMIT_S),
        ("", lambda: check_kubernetes(place), _LIMIT_S),
        ("", lambda: check_slurm(place), _LIMIT_S),
        ("kernel agent", lambda: check_agents(place), _LIMIT_S),
        ("host", lambda: check_kernel_log(place), _LIMIT_S),
        ("", lambda: check_limits(place), _LIMIT_S),
        ("", lambda: check_clock(place), _LIMIT_S),
    ]
    if web_config is not None:
        groups.insert(1, ("", lambda: check_web_configuration(web_config), _LIMIT_S))
    if server is not None:
        groups.append(("Prometheus", lambda: check_prometheus(place, server), _LIMIT_S))
    return groups


def _running(place: Place) -> Running | ForeignServerError | None:
    """Within the time of a check, in a thread of its own: who answers a byte a second could keep us for ever."""
    found: list[Running | ForeignServerError | None] = []

    def ask() -> None:
        try:
            found.append(find_running(place))
        except ForeignServerError as error:
            found.append(error)

    thread = threading.Thread(target=ask, name="find the exporter", daemon=True)
    thread.start()
    thread.join(_LIMIT_S)
    return found[0] if found else ForeignServerError(f"what listens has not answered within {_LIMIT_S:g} s")


def _all(groups: Iterable[Group]) -> Iterator[tuple[str, Check]]:
    """Each check under its title, as it comes."""
    title = ""
    for name, run, limit_s in groups:
        title = name or title
        for check in in_time(title, run, limit_s):
            yield title, check


def _print_text(groups: Iterable[Group]) -> list[Check]:
    _say(f"gpu-hpc-exporter {__version__} as {_user()}")
    checks: list[Check] = []
    last = ""
    for title, check in _all(groups):
        if title != last:
            _say(f"\n{title}")
            last = title
        _say(f"  {check.status:<9} {check.name:<{_NAME_WIDTH}} {check.finding}")
        if check.remedy:
            _say(f"{'':12}-> {check.remedy}")
        checks.append(check)
    _say(f"\n{summary(checks)}")
    return checks


def _print_json(groups: Iterable[Group]) -> list[Check]:
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for title, check in _all(groups):
        checks.append(check)
        rows.append(
            {
                "group": title,
                "name": check.name,
                "status": check.status,
                "finding": check.finding,
                "remedy": check.remedy,
            }
        )
    _say(json.dumps({"version": __version__, "user": _user(), "status": worst(checks), "checks": rows}, indent=2))
    return checks


def _say(text: str) -> None:
    """At once, so that a check that takes long is the next one."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def summary(checks: Sequence[Check]) -> str:
    """The last line."""
    counts = {status: sum(check.status == status for check in checks) for status in STATUSES}
    return f"{worst(checks)}: {counts['broken']} broken, {counts['degraded']} degraded, {counts['ok']} ok"


def _user() -> str:
    with suppress(KeyError):
        return pwd.getpwuid(os.geteuid()).pw_name
    return f"user {os.geteuid()}"
