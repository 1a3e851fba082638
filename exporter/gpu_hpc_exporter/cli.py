"""Flags and wiring: the only place that names concrete sources."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import logging
import math
import os
import resource
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gpu_hpc_exporter import __version__, control
from gpu_hpc_exporter.access import Access
from gpu_hpc_exporter.app import DEFAULT_PAUSE_S, DEFAULT_RELEASE_S, MAX_PAUSE_S, MAX_RELEASE_S, build_app, serve
from gpu_hpc_exporter.config import (
    DEFAULT_DRIVER_ROOT,
    DEFAULT_FILE,
    DEFAULT_PORT,
    DEFAULT_RECORDING,
    ConfigError,
    parse_address,
    parse_duration,
    parse_telemetry_path,
    read_config,
)
from gpu_hpc_exporter.doctor.command import add_doctor, run_doctor
from gpu_hpc_exporter.exporter import Exporter, HardwareSource, ReplaySource, Source
from gpu_hpc_exporter.identify import add_identify, run_identify
from gpu_hpc_exporter.launch import add_run, run_program
from gpu_hpc_exporter.logs import configure_logging
from gpu_hpc_exporter.samplers.gpu_owner import Pace
from gpu_hpc_exporter.samplers.job_parts import JobParts
from gpu_hpc_exporter.samplers.kernels import KernelSampler
from gpu_hpc_exporter.samplers.nvml import NvmlSampler
from gpu_hpc_exporter.samplers.pm_sampling import PmSampler
from gpu_hpc_exporter.samplers.watch import CallWatches
from gpu_hpc_exporter.sources.kmsg import DEFAULT_PATH as KMSG
from gpu_hpc_exporter.sources.procfs import PROC
from gpu_hpc_exporter.sources.record import Recorder, read_marks
from gpu_hpc_exporter.sources.replay import Recording, RecordingError

log = logging.getLogger(__name__)

_MARKS_POLL_S = 0.5
_JOIN_S = 0.3
_MAX_SPEED = 1000
_SWITCH_INTERVAL_S = 0.0005
_HELP_WIDTH: Final = 78


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `gpu-hpc-exporter`; the exit status is 2 for anything the user has to change."""
    flags = build_parser().parse_args(arguments)
    configure_logging(flags.log_level, flags.log_format)
    if sys.__stderr__ is not None:
        faulthandler.enable(sys.__stderr__)  # a library of the driver that crashes: the log says in which call
    try:
        if flags.command == "doctor":
            return run_doctor(flags)
        if flags.command == "identify":
            return run_identify(flags)
        if flags.command == "run":
            return run_program(flags)
        if flags.command == "record":
            return record(flags)
        if flags.command in _CONTROLS:
            return control.ask(parse_address(flags.address), _control_path(flags), flags.http_config_file)
        return asyncio.run(run(flags))
    except (ConfigError, RecordingError) as problem:
        sys.stderr.write(f"gpu-hpc-exporter: {problem}\n")
        return 2


async def run(flags: argparse.Namespace) -> int:
    """Sample and serve until SIGTERM, SIGINT or, where configured, access to the GPUs has long been lost."""
    addresses = [parse_address(text) for text in flags.web_listen_address or [f":{DEFAULT_PORT}"]]
    app_path = parse_telemetry_path(flags.web_telemetry_path)
    access = Access(flags.web_config_file)
    exporter = Exporter(lambda: read_config(flags.config_file), _source(flags), access)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stop.set)
    loop.add_signal_handler(signal.SIGHUP, exporter.reload_soon)
    _raise_descriptor_limit()
    # The default of 5 ms would let a rendering in its thread hold up the event loop for as long, again and again.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # What is loaded by now stays: leave it out of every later garbage collection.
    gc.collect()
    gc.freeze()
    exporter.start()
    guard = asyncio.create_task(exporter.stop_when_lost(stop))
    try:
        await serve(build_app(exporter, app_path, access), addresses, stop, access)
    finally:
        guard.cancel()
        access.close()
        ended = await asyncio.to_thread(exporter.stop)
    log.info("stopped")
    if not ended or not _join_threads():
        # A thread that is stuck, in the driver or in a file, must not keep the process from ending.
        logging.shutdown()
        os._exit(exporter.exit_status)
    return exporter.exit_status


def _raise_descriptor_limit() -> None:
    """As many descriptors as we may have: idle connections must not take the scrapes' away."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _join_threads() -> bool:
    """Wait a moment for the workers that the interpreter would wait for without end; whether they ended."""
    deadline = time.monotonic() + _JOIN_S
    workers = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))
    return not any(worker.is_alive() for worker in workers)


def record(flags: argparse.Namespace) -> int:
    """Record this machine's GPUs for a while."""
    config = read_config(flags.config_file)
    if flags.source != "hardware":
        raise ConfigError("record reads this machine's GPUs: leave out --source")
    duration = parse_duration(flags.duration)
    if duration <= 0:
        raise ConfigError(f"duration `{flags.duration}`: expected more than nothing")
    if flags.file.is_dir() or not flags.file.parent.is_dir():
        raise ConfigError(f"{flags.file}: expected a file in a folder that exists")
    with Recorder(flags.file) as recorder:
        interval_ns = round(config.sampling_interval_ms * 1e6)
        kernels = KernelSampler(recorder, config.agent)
        jobs = JobParts(kernels, config.jobs, flags.path_procfs)
        kernels.use_owners(lambda: jobs.processes)
        pm = PmSampler(jobs.sampler, config.pm_sampling, interval_ns, procfs=flags.path_procfs)
        nvml = NvmlSampler(pm, Pace(interval_ns, pm.has_finer_windows), flags.path_driver_root, CallWatches())
        # `timeout`, systemd and containers end a program with SIGTERM: what was recorded by then is kept.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        kernels.start()
        jobs.start()
        pm.start()
        nvml.start()
        try:
            _follow_marks(recorder, flags.marks, duration)
        except KeyboardInterrupt:
            log.info("interrupted: the recording ends here")
        finally:
            pm.stop()
            nvml.stop()
            jobs.stop()
            kernels.stop()
        if not recorder.windows:
            raise RecordingError(f"{flags.file}: no window was recorded: see the log above for why")
    log.info("recorded %d windows to %s", recorder.windows, flags.file)
    return 0


def _follow_marks(recorder: Recorder, marks: Path | None, duration: float) -> None:
    deadline = time.monotonic() + duration
    seen = 0
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, _MARKS_POLL_S))
        if marks is not None:
            try:
                for time_ns, name in read_marks(marks, seen):
                    recorder.mark(time_ns, name)
                    seen += 1
            except ValueError as problem:
                raise RecordingError(str(problem)) from problem


def _control_path(flags: argparse.Namespace) -> str:
    if flags.command == "resume":
        return "/-/resume"
    # Whole seconds, and never fewer than were asked for; the exporter knows its limits.
    return f"/-/{flags.command}?seconds={math.ceil(parse_duration(flags.duration))}"


def _source(flags: argparse.Namespace) -> Source:
    if flags.source == "replay":
        recording = Recording.load(flags.replay_file or DEFAULT_RECORDING)
        log.warning("playing the recording %s: these are not this machine's GPUs", recording.path)
        return ReplaySource(recording, flags.replay_speed or 1.0)
    if flags.replay_file or flags.replay_speed:
        raise ConfigError("--replay.file and --replay.speed go with --source=replay")
    return HardwareSource(flags.path_driver_root, flags.path_kmsg, flags.path_procfs)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Examples stay as they are written, and paths are not broken at their hyphens, so that they can be copied."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _Parser(argparse.ArgumentParser):
    """The command and its subcommands: flags are written out, since an abbreviation may mean another one tomorrow."""

    def __init__(self, *, description: str = "", **options: Any) -> None:
        text = "\n".join(textwrap.fill(line, _HELP_WIDTH, break_on_hyphens=False) for line in description.split("\n"))
        super().__init__(description=text, formatter_class=_HelpFormatter, allow_abbrev=False, **options)


def build_parser() -> argparse.ArgumentParser:
    """Every flag and command."""
    parser = _Parser(
        prog="gpu-hpc-exporter",
        description="Finds out why a GPU is slow: hardware counters as Prometheus series, labelled with the cause.\n"
        "Without a command it samples this machine's GPUs and serves them; stops at SIGTERM or SIGINT, reads its "
        "configuration again at SIGHUP.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"gpu-hpc-exporter {__version__}")
    _add_config_file(parser, default=None)
    _add_serving(parser.add_argument_group("serving"))
    _add_source(parser.add_argument_group("what is read"))
    _add_log(parser.add_argument_group("the log, on standard error"))
    _add_commands(parser)
    return parser


def _add_config_file(parser: argparse.ArgumentParser, default: str | None) -> None:
    parser.add_argument(
        "--config.file",
        dest="config_file",
        type=Path,
        default=default,
        metavar="FILE",
        help=f"YAML configuration (default: {DEFAULT_FILE}, if it exists)",
    )


def _add_serving(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--web.listen-address",
        dest="web_listen_address",
        action="append",
        metavar="HOST:PORT",
        help=f"address to serve on, repeatable (default: :{DEFAULT_PORT}, which is every address of this machine)",
    )
    group.add_argument(
        "--web.config.file",
        dest="web_config_file",
        type=Path,
        metavar="FILE",
        help="TLS, client certificates and users, in the format of Prometheus's exporter-toolkit (default: plain HTTP "
        "for everybody)",
    )
    group.add_argument(
        "--web.telemetry-path",
        dest="web_telemetry_path",
        default="/metrics",
        metavar="PATH",
        help="where metrics are served (default: /metrics)",
    )


def _add_source(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--path.driver-root",
        dest="path_driver_root",
        type=Path,
        default=DEFAULT_DRIVER_ROOT,
        metavar="DIR",
        help=f"where to look for the driver's library if the loader lacks it (default: {DEFAULT_DRIVER_ROOT})",
    )
    group.add_argument(
        "--path.procfs",
        dest="path_procfs",
        type=Path,
        default=PROC,
        metavar="DIR",
        help=f"the host's /proc, where processes and their cgroups are looked up (default: {PROC})",
    )
    group.add_argument(
        "--path.kmsg",
        dest="path_kmsg",
        type=Path,
        default=KMSG,
        metavar="FILE",
        help=f"the kernel log, for Xids that the driver's library does not tell (default: {KMSG})",
    )
    group.add_argument(
        "--source",
        choices=("hardware", "replay"),
        default="hardware",
        help="this machine's GPUs, or a recording, which needs no GPU (default: hardware)",
    )
    group.add_argument(
        "--replay.file",
        dest="replay_file",
        type=Path,
        metavar="FILE",
        help="recording to play, as `record` writes them (default: that of an H200 which comes with the exporter)",
    )
    group.add_argument(
        "--replay.speed",
        dest="replay_speed",
        type=_speed,
        metavar="N",
        help=f"play N times as fast, up to {_MAX_SPEED} (default: 1)",
    )


def _add_log(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log.level",
        dest="log_level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least important lines to write (default: info)",
    )
    group.add_argument(
        "--log.format",
        dest="log_format",
        choices=("logfmt", "json"),
        default="logfmt",
        help="form of a line (default: logfmt)",
    )


def _add_commands(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands (COMMAND --help tells more)")
    # Every command that reads the configuration takes the flag behind its name too.
    configured = argparse.ArgumentParser(add_help=False)
    _add_config_file(configured, default=argparse.SUPPRESS)
    add_doctor(commands, configured)
    add_identify(commands, configured)
    add_run(commands, configured)
    _add_record(commands, configured)
    _add_controls(commands)


def _add_record(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], configured: argparse.ArgumentParser
) -> None:
    recorder = commands.add_parser(
        "record",
        parents=[configured],
        help="record this machine's GPUs",
        description="Record this machine's GPUs for a while, to play with --source=replay or to attach to a bug "
        "report. UUIDs are replaced and serial numbers left out; names of jobs, users, pods and namespaces stay. "
        "SIGINT and SIGTERM end it early and keep what was recorded.",
    )
    recorder.add_argument("--duration", default="3m", metavar="TIME", help="how long, such as 90s or 3m (default: 3m)")
    recorder.add_argument(
        "--marks",
        type=Path,
        metavar="FILE",
        help="lines `<seconds of CLOCK_MONOTONIC> <phase>` that the workload appends, as names of the phases",
    )
    recorder.add_argument("file", type=Path, metavar="FILE", help="recording to write, NAME.jsonl.gz")


def _add_controls(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for name, (what, default_s, most_s) in _CONTROLS.items():
        command = commands.add_parser(
            name,
            help=what,
            description=f"Ask the exporter on this machine to {what}. Exit status: 0 done, 1 not done, with the reason "
            "on standard error.",
        )
        command.add_argument(
            "--address",
            default=f"127.0.0.1:{DEFAULT_PORT}",
            metavar="HOST:PORT",
            help=f"where the exporter serves (default: 127.0.0.1:{DEFAULT_PORT})",
        )
        command.add_argument(
            "--http.config.file",
            dest="http_config_file",
            type=Path,
            metavar="FILE",
            help="where it serves with TLS or users: basic_auth and tls_config, as for Prometheus's promtool",
        )
        if default_s:
            text = f"how long, such as 90s or 5m, up to {most_s // 3600}h (default: {default_s}s)"
            command.add_argument("--for", dest="duration", default=f"{default_s}s", metavar="TIME", help=text)


_EPILOG: Final = """examples:
  gpu-hpc-exporter --source=replay            a recording of an H200, on any machine: http://localhost:9836/
  gpu-hpc-exporter doctor                     what is wrong on this machine, and what to do
  gpu-hpc-exporter run -- python train.py     a program with the kernel agent inside
  gpu-hpc-exporter pause --for 10m            leave the counters to a profiler

exit status: 0 stopped as asked, 2 something is for you to change (it says what), 3 all GPUs lost for as long as
exit_after_lost_minutes says; commands have their own."""

_CONTROLS: Final = {
    "pause": ("end PM sampling for a while, so that a profiler finds the counters free", DEFAULT_PAUSE_S, MAX_PAUSE_S),
    "release": (
        "close the NVIDIA driver for a while, so that a GPU can be reset, unbound or re-partitioned",
        DEFAULT_RELEASE_S,
        MAX_RELEASE_S,
    ),
    "resume": ("end a pause or a release", 0, 0),
}


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed <= _MAX_SPEED:
        raise argparse.ArgumentTypeError(f"`{text}` is no number above 0 and up to {_MAX_SPEED}")
    return speed
