"""The host: processes and who may read them, the kernel log, kernel agents, limits, the clock."""

from __future__ import annotations

import os
import pwd
import resource
import stat
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.doctor import remedies
from gpu_hpc_exporter.doctor.check import Check, Checks, Place, capabilities, status_of, told
from gpu_hpc_exporter.launch import AGENT, obstacle
from gpu_hpc_exporter.samplers.identities import ONLY_OWN
from gpu_hpc_exporter.samplers.kernels import unreadable as directory_unreadable
from gpu_hpc_exporter.samplers.kmsg import unreadable as log_unreadable
from gpu_hpc_exporter.sources.kernels.files import FOLDER_MODE, AgentFile, AgentFiles
from gpu_hpc_exporter.sources.procfs import pid_view

_PTRACE: Final = 19
_MIN_DESCRIPTORS: Final = 1024
"""Half of them for connections that idle, the rest for agents' files, /proc and scrapes."""
_FIRST_RELEASE_S: Final = 1_767_225_600
"""2026-01-01: a clock that is before it was never set."""


def check_processes(place: Place) -> Checks:
    """Whether the processes on the GPUs, and what names their jobs, can be read."""
    view = pid_view(place.procfs)
    if not view.lookup or view.reason:
        yield Check("pid namespace", "degraded", "jobs of processes are not named", view.reason)
    else:
        yield Check("pid namespace", "ok", "the host's")
    yield Check("cgroups", "ok", _cgroups(place))
    if capabilities(place) >> _PTRACE & 1:
        yield Check("CAP_SYS_PTRACE", "ok", "other users' environments and libraries can be read")
    else:
        yield Check("CAP_SYS_PTRACE", "degraded", ONLY_OWN, "give the exporter CAP_SYS_PTRACE, if they are wanted")


def _cgroups(place: Place) -> str:
    """Which version there is; jobs are told from both."""
    root = place.rootfs / "sys/fs/cgroup"
    if (root / "cgroup.controllers").exists():
        return "version 2"
    if (root / "unified").exists():
        return "version 1, with version 2 beside it"
    return "version 1" if any(root.glob("*/tasks")) else "not mounted here: /proc tells those of processes"


def check_kernel_log(place: Place) -> Checks:
    """Whether Xids can be read from it, as the exporter would open it."""
    try:
        os.close(os.open(place.kmsg, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as error:
        state, reason = log_unreadable(error, place.kmsg)
        yield Check("kernel log", "degraded", told(state, "some Xids will not be seen"), reason)
    else:
        yield Check("kernel log", "ok", f"{place.kmsg} can be read")


def check_limits(_: Place) -> Checks:
    """What the kernel allows this process."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < _MIN_DESCRIPTORS:
        remedy = (
            f"raise the hard limit to {_MIN_DESCRIPTORS} or more: LimitNOFILE= of the unit, `ulimit -Hn` of the shell"
        )
        yield Check("open files", "degraded", f"at most {hard}", remedy)
    else:
        yield Check("open files", "ok", f"at least {_MIN_DESCRIPTORS} allowed")


def check_clock(_: Place) -> Checks:
    """Whether it was ever set; against Prometheus's it is compared where that is asked."""
    now = time.time()
    if now < _FIRST_RELEASE_S:
        date = time.strftime("%Y-%m-%d", time.gmtime(now))
        yield Check(
            "clock", "broken", f"it says {date}", "set it, as by NTP (`timedatectl`): Prometheus refuses such samples"
        )
    else:
        yield Check("clock", "ok", "is set")


def check_agents(place: Place) -> Checks:
    """The kernel agent's library, the directory of its files, and the agents that are at work."""
    settings = place.config.agent
    directory = Path(settings.directory)
    if AGENT.is_file():
        yield Check("agent library", "ok", "is part of this installation")
    else:
        yield Check("agent library", "degraded", obstacle(settings, {}), remedies.AGENT)
    try:
        status = directory.stat()
    except OSError as error:
        state, reason = directory_unreadable(error, settings.directory)
        yield Check("agent directory", "degraded", told(state, reason), _make(directory))
        return
    yield _directory(directory, status)
    counted: Counter[str] = Counter()
    problems: dict[str, str] = {}
    files = AgentFiles(directory)
    try:
        for file, _ in files.scan():
            _count(file, counted, problems)
    except OSError as error:
        state, reason = directory_unreadable(error, settings.directory)
        yield Check("agents", status_of(state), told(state, reason), "only the directory's owner and root may list it")
        return
    finally:
        files.close()
    states = ", ".join(f"{count} {state}" for state, count in sorted(counted.items()))
    yield Check("agents", "ok", states or "none at work: `gpu-hpc-exporter run -- COMMAND` starts a program with one")
    for reason, cure in sorted(problems.items()):
        yield Check("agents", "degraded", f"an agent does not trace: {reason}", cure)
    rejected = {reason: count for reason, count in files.rejected.items() if count}
    if rejected:
        finding = ", ".join(f"{count} {reason}" for reason, count in rejected.items())
        yield Check(
            "agent files", "degraded", f"rejected: {finding}", "remove the files that no agent of this version made"
        )


def _count(file: AgentFile, counted: Counter[str], problems: dict[str, str]) -> None:
    if file.rejected or file.status is None or file.died_s is not None:
        return
    is_beating = file.is_beating(time.time_ns())
    state = file.status.state if is_beating else "silent"
    reason = file.status.reason if is_beating else "no_heartbeat"
    remark = reason if is_beating else ""
    if is_beating and not reason and state in {"tracing", "waiting"} and file.status.unrecorded:
        remark = f"records no {', '.join(sorted(file.status.unrecorded))}"
    counted[f"{state} ({remark})" if remark else state] += 1
    if state != "tracing" and reason in remedies.AGENT_REASONS:
        problems[reason] = remedies.AGENT_REASONS[reason]


def _directory(directory: Path, status: os.stat_result) -> Check:
    if not stat.S_ISDIR(status.st_mode):
        return Check("agent directory", "degraded", f"{directory} is no directory", "remove it, or set agent.directory")
    mode = stat.S_IMODE(status.st_mode)
    finding = f"{directory} has the mode {mode:o} and belongs to {_user(status.st_uid)}"
    if mode & 0o022 != 0o022 or not mode & stat.S_ISVTX:
        return Check("agent directory", "degraded", finding, f"`chmod {FOLDER_MODE:o} {directory}`")
    if not os.access(directory, os.W_OK | os.X_OK):
        return Check("agent directory", "degraded", finding, _make(directory))
    return Check("agent directory", "ok", finding)


def _make(directory: Path) -> str:
    return (
        f"start the exporter as root once, which makes it, or `install -d -m {FOLDER_MODE:o} -o USER {directory}` "
        "for the exporter's user; or set agent.directory"
    )


def _user(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"
