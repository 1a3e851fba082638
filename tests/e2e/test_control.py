"""Pause, resume and release, over HTTP and on the command line, while the fake driver counts who calls it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from e2e.machine import Machine, Start, observed, run_machine, state, uuid_of, value_series
from exporter_process import Samples, free_port, run_exporter
from fake_nvml import Scenario

ONE = "device 0 sm 0.5\n"
TWO = ONE + "device 1 sm 0.25\n"
HANG = "fault nvmlDeviceGetTemperature* device 1 hang\n"
UNTIL = r"released until \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"


def command(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """The exporter's command, as an administrator types it."""
    line = [sys.executable, "-m", "gpu_hpc_exporter", *arguments]
    return subprocess.run(
        line, env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=60, check=False
    )


def address(machine: Machine) -> str:
    """The flag that names the machine's exporter."""
    return "--address=" + machine.exporter.url.removeprefix("http://")


def is_up(samples: Samples) -> bool:
    """Whether the driver can be read."""
    return samples.one("gpu_hpc_up") == 1


def goes_on(machine: Machine, before: Samples, *devices: int) -> Samples:
    """Wait until the counters have passed what they were before."""
    return machine.exporter.wait_for(
        lambda s: is_up(s) and all(observed(s, uuid_of(d)) > observed(before, uuid_of(d)) + 0.5 for d in devices)
    )


def test_a13_release_closes_the_driver(start: Start) -> None:
    """A13: nothing of the driver is open or called, the server answers all the time, and then everything goes on."""
    machine = start(TWO)
    exporter = machine.exporter
    before = machine.wait_until_observed(0.7, 0, 1)
    began = time.monotonic()
    status, text = exporter.ask("/-/release?seconds=8")
    assert status == 200, text
    assert re.fullmatch(rf"{UNTIL}: NVML is closed, PM sampling has ended, no /dev/nvidia\* is open\n", text)
    calls = machine.scenario.calls()
    assert calls["nvmlShutdown"] >= 1
    stats = machine.scenario.stats()
    assert (stats.live_samples, stats.stale_handles, stats.freed_sample_uses) == (0, 0, 0)

    assert exporter.fetch("/-/healthy")[0] == 200
    ready, _, why = exporter.fetch("/-/ready")
    assert (ready, bool(re.fullmatch(f"not ready: {UNTIL}\n", why))) == (503, True)
    samples = exporter.wait_for(lambda s: not is_up(s))
    assert samples.one("gpu_hpc_down_info", reason="released") == 1
    for source, uuid in (("nvml", ""), ("nvml", uuid_of(0)), ("gpm", uuid_of(1))):
        assert state(samples, source, uuid) == "paused"
        assert samples.one("gpu_hpc_source_state_info", source=source, uuid=uuid, reason="released") == 1
    assert observed(samples, uuid_of(0)) >= observed(before, uuid_of(0))
    assert samples.all("gpu_hpc_gpu_lost") == {}
    assert json.loads(exporter.fetch("/api/v1/gpus")[2])["down_reason"] == "released"
    assert machine.scenario.calls() == calls

    after = goes_on(machine, before, 0, 1)
    assert time.monotonic() - began > 8
    assert exporter.fetch("/-/ready")[0] == 200
    assert after.all("gpu_hpc_down_info") == {}
    assert after.one("gpu_hpc_sm_active_ratio", uuid=uuid_of(1)) == pytest.approx(0.25, abs=1e-6)
    active = after.one("gpu_hpc_sm_active_seconds_total", uuid=uuid_of(0))
    assert active / observed(after, uuid_of(0)) == pytest.approx(0.5, abs=1e-6)
    assert machine.scenario.calls()["nvmlInitWithFlags"] == calls["nvmlInitWithFlags"] + 1
    assert machine.log_lines("warning", "error") == []


def test_a13_no_device_file_is_open_after_a_release(tmp_path: Path, library: Path) -> None:
    """A13: the driver's device file is open while GPUs are read, not while they are released, and open again after."""
    device = tmp_path / "dev" / "nvidia0"
    device.parent.mkdir()
    env = {**Scenario(tmp_path, library, ONE).env, "FAKE_NVML_DEVICE_FILE": str(device)}
    config = tmp_path / "config.yaml"
    config.write_text("pm_sampling: {mode: off}\n")
    with run_exporter(tmp_path, f"--config.file={config}", env=env) as exporter:
        descriptors = Path(f"/proc/{exporter.process.pid}/fd")

        def held() -> set[Path]:
            return {file.readlink() for file in descriptors.iterdir() if file.is_symlink()}

        exporter.wait_for(lambda s: observed(s, uuid_of(0)) > 0)
        assert device in held()
        assert exporter.ask("/-/release?seconds=60")[0] == 200
        assert device not in held()
        assert exporter.post("/-/resume") == 200
        exporter.wait_for(is_up)
        assert device in held()


def test_values_are_absent_while_released(start: Start) -> None:
    """Readings and gauges neither freeze nor fall to 0: after some seconds they are not there."""
    machine = start(ONE)
    machine.wait_until_observed(0.5, 0)
    assert machine.exporter.post("/-/release?seconds=60") == 200
    counted = ("_total", "_bucket", "_count", "_sum", "_info")
    machine.exporter.wait_for(lambda s: all(name.endswith(counted) for name in value_series(s, uuid_of(0))))


def test_resume_ends_a_release(start: Start) -> None:
    """On the command line, in one line each; a release that is asked for again lasts longer, not shorter."""
    machine = start(TWO)
    before = machine.wait_until_observed(0.5, 0, 1)
    first = command("release", "--for=1h", address(machine))
    assert (first.returncode, first.stderr) == (0, "")
    assert command("release", "--for", "5s", address(machine)).stdout == first.stdout
    resumed = command("resume", address(machine))
    assert (resumed.returncode, resumed.stdout, resumed.stderr) == (0, "resumed\n", "")
    goes_on(machine, before, 0, 1)
    assert command("resume", address(machine)).stdout == "nothing was paused or released\n"


def test_a_gpu_that_is_gone_after_a_release(start: Start) -> None:
    """The GPU that was unbound meanwhile is lost, the other one goes on; it comes back with its counters."""
    machine = start(TWO)
    before = machine.wait_until_observed(0.5, 0, 1)
    assert machine.exporter.post("/-/release") == 200
    machine.scenario.rewrite(TWO + "order 1\n")
    assert machine.exporter.post("/-/resume") == 200
    samples = goes_on(machine, before, 1)
    assert samples.one("gpu_hpc_gpu_lost", uuid=uuid_of(0)) == 1
    assert machine.exporter.post("/-/release") == 200
    machine.scenario.rewrite(TWO)
    assert machine.exporter.post("/-/resume") == 200
    goes_on(machine, before, 0, 1)


def test_a12_a_release_beside_a_hung_call(start: Start) -> None:
    """A12: it answers meanwhile which GPU hangs; once the call returns, the driver is closed after all."""
    machine = start(TWO)
    exporter = machine.exporter
    before = machine.wait_until_observed(0.5, 0, 1)
    machine.scenario.rewrite(TWO + HANG)
    exporter.wait_for(lambda s: s.get("gpu_hpc_driver_call_hung_seconds", uuid=uuid_of(1)) is not None)
    status, text = exporter.ask("/-/release?seconds=60")
    assert status == 503
    assert text.startswith(f"not released: GPU 1 ({uuid_of(1)}) does not return from: temperature; ")
    assert machine.scenario.calls().get("nvmlShutdown", 0) == 0
    assert exporter.fetch("/-/healthy")[0] == 200
    assert exporter.fetch("/-/ready")[2].startswith("not ready: released until ")
    samples = exporter.scrape()
    assert samples.get("gpu_hpc_driver_call_hung_seconds", uuid=uuid_of(1), call="temperature") is not None
    assert state(samples, "nvml", uuid_of(0)) == "paused"

    machine.scenario.rewrite(TWO)
    machine.scenario.wait_for_calls("nvmlShutdown", 1)
    assert exporter.ask("/-/release")[0] == 200
    samples = exporter.wait_for(lambda s: state(s, "nvml", uuid_of(1)) == "paused")
    assert samples.all("gpu_hpc_driver_call_hung_seconds") == {}
    calls = machine.scenario.calls()
    time.sleep(0.5)
    assert machine.scenario.calls() == calls
    assert exporter.post("/-/resume") == 200
    goes_on(machine, before, 0, 1)
    stats = machine.scenario.stats()
    assert (stats.hangs, stats.stale_handles, stats.freed_sample_uses) == (1, 0, 0)


@pytest.mark.parametrize("function", ["nvmlShutdown", "nvmlEventSetFree", "nvmlGpmSampleFree"])
def test_a12_a_release_that_hangs_itself(start: Start, function: str) -> None:
    """A12: what hangs while everything is closed is told as well."""
    machine = start(ONE)
    machine.wait_until_observed(0.5, 0)
    machine.scenario.rewrite(ONE + f"fault {function} hang\n")
    machine.scenario.wait_for_calls("nvmlGpmSampleGet", machine.scenario.calls()["nvmlGpmSampleGet"] + 2)
    status, text = machine.exporter.ask("/-/release")
    assert status == 503
    assert re.match(r"not released: (GPU 0 \(\S+\) does not|the driver does not) return from", text)
    assert machine.exporter.fetch("/-/healthy")[0] == 200


def test_a_release_while_the_driver_opens(start: Start) -> None:
    """A driver that does not return from its initialisation is told; the release is kept once it does."""
    machine = start(ONE + "fault nvmlInit* hang\n")
    status, text = machine.exporter.ask("/-/release?seconds=60")
    assert (status, text.partition(";")[0]) == (503, "not released: the driver does not return from: nvmlInit")
    machine.scenario.rewrite(ONE)
    machine.scenario.wait_for_calls("nvmlShutdown", 1)
    assert machine.exporter.ask("/-/release")[0] == 200
    assert machine.exporter.post("/-/resume") == 200
    machine.wait_until_observed(0.3, 0)


def test_a_release_without_a_driver(start: Start) -> None:
    """Nothing is open and nothing is tried: an update of the driver is not disturbed."""
    machine = start("device 0\nfault nvmlInit* 9\n")
    machine.exporter.wait_for(lambda s: s.get("gpu_hpc_down_info", reason="driver_not_loaded") == 1)
    assert machine.exporter.ask("/-/release?seconds=60")[0] == 200
    machine.exporter.wait_for(lambda s: s.get("gpu_hpc_down_info", reason="released") == 1)
    machine.scenario.rewrite(ONE)
    calls = machine.scenario.calls()
    time.sleep(2.5)  # the first retries would have come
    assert machine.scenario.calls() == calls
    assert machine.exporter.post("/-/resume") == 200
    machine.wait_until_observed(0.3, 0)


def test_reload_and_pause_while_released(tmp_path: Path, library: Path) -> None:
    """Neither opens the driver; the new settings hold afterwards."""
    config = tmp_path / "config.yaml"
    config.write_text("exit_after_lost_minutes: 0.01\n")
    with run_machine(tmp_path, library, ONE, f"--config.file={config}") as machine:
        before = machine.wait_until_observed(0.5, 0)
        assert machine.exporter.post("/-/release") == 200
        calls = machine.scenario.calls()
        config.write_text("exit_after_lost_minutes: 0.01\nsampling_interval_ms: 200\n")
        assert machine.exporter.post("/-/reload") == 200
        assert machine.exporter.post("/-/pause?seconds=5") == 200
        time.sleep(2.5)
        assert machine.scenario.calls() == calls
        assert machine.exporter.process.poll() is None
        assert machine.exporter.post("/-/resume") == 200
        goes_on(machine, before, 0)
        machine.exporter.wait_for(lambda s: s.get("gpu_hpc_window_seconds", uuid=uuid_of(0), source="gpm") == 0.2)


def test_a14_sigterm_while_released(start: Start) -> None:
    """A14: the way out is short, whatever was asked for before."""
    machine = start(TWO)
    machine.wait_until_observed(0.3, 0, 1)
    assert machine.exporter.post("/-/release") == 200
    assert machine.exporter.stop() == 0


SLEEPER = """#!/bin/sh
echo $$ >> {pids}
exec sleep 600
"""


def alive(pids: Path) -> list[int]:
    """The helper processes that live, of those that ever started."""
    started = [int(pid) for pid in pids.read_text().split()] if pids.exists() else []
    return [pid for pid in started if Path(f"/proc/{pid}").exists()]


def wait_for_helper(machine: Machine, pids: Path) -> None:
    """Wait until a helper process runs."""
    deadline = time.monotonic() + 60
    while not alive(pids):
        assert time.monotonic() < deadline, machine.exporter.log.read_text()
        time.sleep(0.02)


@pytest.fixture
def with_helper(tmp_path: Path, library: Path) -> Iterator[tuple[Machine, Path]]:
    """A machine whose helper process is a script that does nothing, and the file to which it writes its pids."""
    pids, helper, config = tmp_path / "pids", tmp_path / "helper", tmp_path / "config.yaml"
    helper.write_text(SLEEPER.format(pids=pids))
    helper.chmod(0o755)
    config.write_text(f"pm_sampling: {{mode: required, yield_to: [], helper: [{helper}]}}\n")
    with run_machine(tmp_path, library, ONE, f"--config.file={config}") as machine:
        wait_for_helper(machine, pids)
        yield machine, pids


def test_a_pause_ends_the_helper_and_leaves_nvml_alone(with_helper: tuple[Machine, Path]) -> None:
    """J01: the counters are free when the command returns; GPM disturbs no profiler, so its windows go on."""
    machine, pids = with_helper
    before = machine.wait_until_observed(0.3, 0)
    paused = command("pause", "--for", "10m", address(machine))
    assert (paused.returncode, paused.stderr) == (0, "")
    assert re.fullmatch(r"paused until \S+Z: PM sampling has ended\n", paused.stdout)
    assert alive(pids) == []
    samples = goes_on(machine, before, 0)
    assert state(samples, "gpm", uuid_of(0)) == "active"
    assert state(samples, "pm_sampling", uuid_of(0)) == "paused"
    assert samples.one("gpu_hpc_source_state_info", source="pm_sampling", reason="paused on request") == 1
    assert machine.exporter.fetch("/-/ready")[0] == 200
    assert machine.scenario.calls().get("nvmlShutdown", 0) == 0
    assert alive(pids) == []
    assert command("resume", address(machine)).stdout == "resumed\n"
    wait_for_helper(machine, pids)


def test_a_pause_ends_by_itself(with_helper: tuple[Machine, Path]) -> None:
    """After the time that was asked for, the helper is started again without another word."""
    machine, pids = with_helper
    assert machine.exporter.post("/-/pause?seconds=5") == 200
    assert alive(pids) == []
    wait_for_helper(machine, pids)


def test_a_release_ends_the_helper(with_helper: tuple[Machine, Path]) -> None:
    """Both the helper and NVML are gone when it is answered, and both come back; SIGTERM leaves no helper either."""
    machine, pids = with_helper
    before = machine.wait_until_observed(0.3, 0)
    assert machine.exporter.post("/-/release?seconds=60") == 200
    assert alive(pids) == []
    samples = machine.exporter.wait_for(lambda s: not is_up(s))
    assert state(samples, "pm_sampling", uuid_of(0)) == "paused"
    assert machine.exporter.post("/-/resume") == 200
    wait_for_helper(machine, pids)
    goes_on(machine, before, 0)
    assert machine.exporter.stop() == 0
    assert alive(pids) == []


@pytest.mark.parametrize("action", ["pause", "release", "resume"])
def test_a_recording_has_nothing_to_pause(tmp_path: Path, action: str) -> None:
    """The answer is a conflict, and the command fails with the reason."""
    with run_exporter(tmp_path, "--source=replay") as exporter:
        assert exporter.ask(f"/-/{action}") == (409, "a recording is played: there is nothing to pause\n")
        result = command(action, "--address=" + exporter.url.removeprefix("http://"))
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr == "gpu-hpc-exporter: a recording is played: there is nothing to pause\n"


@pytest.mark.parametrize("action", ["pause", "release", "resume"])
def test_no_exporter_answers(action: str) -> None:
    """One line says where was asked and what to look at; a proxy in the environment is not asked instead."""
    place = f"127.0.0.1:{free_port()}"
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}
    result = command(action, f"--address={place}", env={**proxy, "LD_LIBRARY_PATH": ""})
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"gpu-hpc-exporter: no exporter answers at {place}: is it running? see --address\n"


def test_something_else_answers() -> None:
    """What is no HTTP server is told as such."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}"
        line = [sys.executable, "-m", "gpu_hpc_exporter", "resume", f"--address={place}"]
        with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as client:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"SSH-2.0-OpenSSH_9.9\r\n")
            assert client.communicate(timeout=60)[1] == (
                f"gpu-hpc-exporter: what answers at {place} is no exporter: see --address\n"
            )
        assert client.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "status", "problem"),
    [
        (["pause", "--for", "soon"], 2, "duration `soon`: expected a form like 90s, 3m or 1h30m"),
        (["resume", "--address=9836"], 2, "listen address `9836`: expected HOST:PORT, :PORT or [IPV6]:PORT"),
        (["pause", "--for=0s"], 1, "expected ?seconds=N, a whole number from 1 to 86400 (default 600)"),
        (["release", "--for=2h"], 1, "expected ?seconds=N, a whole number from 1 to 3600 (default 60)"),
    ],
)
def test_wrong_arguments(start: Start, arguments: list[str], status: int, problem: str) -> None:
    """What the user has to change is told in one line."""
    machine = start(ONE)
    result = command(*arguments, *([] if "--address" in arguments[-1] else [address(machine)]))
    assert (result.returncode, result.stdout) == (status, "")
    assert result.stderr == f"gpu-hpc-exporter: {problem}\n"
