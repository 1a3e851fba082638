"""The command line: what a user sees of right and wrong usage, and `record`."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from exporter_process import free_port, run_exporter
from fake_nvml import Scenario
from gpu_hpc_exporter import __version__

NO_DRIVER = {"LD_LIBRARY_PATH": ""}
HEADER = {
    "type": "header",
    "format": 1,
    "project_version": "0.1.0",
    "driver": {},
    "sources": ["gpm", "nvml"],
    "gpus": ["GPU-0"],
}
INVENTORY = {
    "type": "inventory",
    "t": 0.0,
    "driver": {},
    "gpus": [{"uuid": "GPU-0", "index": 0, "name": "NVIDIA H200"}],
}
WINDOW = {"type": "reading", "t": 1.0, "gpu": "GPU-0", "source": "gpm", "v": {"sm_active": 0.5}, "dt": 0.1}


def run(*arguments: str | Path, env: Mapping[str, str] = NO_DRIVER) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "gpu_hpc_exporter", *map(str, arguments)]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that says what to change, of a command that ended with status 2."""
    *log, line = result.stderr.splitlines()
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert line.startswith("gpu-hpc-exporter: ")
    for entry in log:
        assert re.match(r"ts=\S+ level=(info|warning) logger=\S+ msg=", entry), entry
    return line.removeprefix("gpu-hpc-exporter: ")


def write_recording(path: Path, *lines: Mapping[str, object]) -> Path:
    """A recording of these lines."""
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode()))
    return path


def test_version() -> None:
    """--version is one line on standard output."""
    result = run("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"gpu-hpc-exporter {__version__}\n", "")


def test_help() -> None:
    """--help lists every flag with its default, and the commands."""
    result = run("--help")
    assert (result.returncode, result.stderr) == (0, "")
    for word in (
        "--config.file",
        "--web.listen-address",
        "--source",
        "--replay.file",
        "--log.format",
        "9836",
        "record",
    ):
        assert word in result.stdout
    assert "--duration" in run("record", "--help").stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "gauge_window_seconds: 15\nsampling_intervall_ms: 100\n",
            "line 2: unknown key `sampling_intervall_ms`; did you mean `sampling_interval_ms`?",
        ),
        ("gauge_window_seconds: 0\n", "line 1: gauge_window_seconds: "),
        ("sampling_interval_ms: often\n", "line 1: sampling_interval_ms: "),
        ("a: [1\n", "line 2: "),
        ("- 1\n", "line 1: "),
        ("\u0000", ""),
    ],
    ids=["unknown key", "out of range", "wrong type", "not YAML", "not a mapping", "control character"],
)
def test_a_bad_configuration_file(tmp_path: Path, text: str, problem: str) -> None:
    """A mistake in the configuration is told with its file and line in one line; the status is 2."""
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    assert complaint(run("--source=replay", "--config.file", file)).startswith(f"{file}: {problem}")


def test_a_missing_configuration_file(tmp_path: Path) -> None:
    """A configuration file that was named must exist."""
    file = tmp_path / "none.yaml"
    assert complaint(run("--source=replay", "--config.file", file)) == f"{file}: No such file or directory"


@pytest.mark.parametrize("address", ["9836", "localhost", "[::1", "1.2.3.4:99999", "host:port", ""])
def test_a_bad_listen_address(address: str) -> None:
    """A listen address that is none is quoted with the forms that are."""
    text = complaint(run("--source=replay", f"--web.listen-address={address}"))
    assert text == f"listen address `{address}`: expected HOST:PORT, :PORT or [IPV6]:PORT"


def test_a_listen_address_of_another_machine() -> None:
    """An address that cannot be listened on is told with the flag that changes it."""
    text = complaint(run("--source=replay", "--web.listen-address=192.0.2.1:9836"))
    assert text.startswith("cannot listen on 192.0.2.1:9836: ")
    assert "--web.listen-address" in text


def test_a_port_in_use() -> None:
    """A port that is taken is told with the flag that changes it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = complaint(run("--source=replay", f"--web.listen-address=127.0.0.1:{port}"))
    assert text.startswith(f"cannot listen on 127.0.0.1:{port}: ")
    assert "in use" in text
    assert "--web.listen-address" in text


def test_a_missing_recording(tmp_path: Path) -> None:
    """A recording that does not exist is named, once."""
    file = tmp_path / "none.jsonl.gz"
    text = complaint(run("--source=replay", "--replay.file", file))
    assert text.startswith(f"{file}: ")
    assert "there is no such file; see --replay.file" in text


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], "line 1: "),
        ([INVENTORY, WINDOW], "line 1: a recording begins with a header"),
        ([{**HEADER, "format": 99}, INVENTORY, WINDOW], "line 1: format 99"),
        ([HEADER, WINDOW], "no inventory line"),
        ([HEADER, INVENTORY], "every line is at t=0"),
        ([HEADER], ""),
        ([HEADER, INVENTORY, {"type": "surprise"}], "line 3: "),
        ([HEADER, INVENTORY, {**WINDOW, "t": -1}], "line 3: "),
        ([HEADER, INVENTORY, {**WINDOW, "v": {"sm_active": "much"}}], "line 3: "),
        ([HEADER, INVENTORY, {**WINDOW, "v": {"temperature_of_the_room": 1.0}}], ""),
    ],
)
def test_a_broken_recording(tmp_path: Path, lines: list[Mapping[str, object]], problem: str) -> None:
    """A recording that cannot be played is told with its file and the line that is wrong."""
    file = write_recording(tmp_path / "broken.jsonl.gz", *lines)
    assert complaint(run("--source=replay", "--replay.file", file)).startswith(f"{file}: {problem}")


@pytest.mark.parametrize("kind", ["text", "truncated", "directory", "binary line"])
def test_a_file_that_is_no_recording(tmp_path: Path, kind: str) -> None:
    """A file that is not gzip, ends too early or holds bytes is told with its name."""
    file = write_recording(tmp_path / "broken.jsonl.gz", HEADER, INVENTORY, *[WINDOW] * 100)
    if kind == "text":
        file.write_text(json.dumps(HEADER), encoding="utf-8")
    elif kind == "truncated":
        file.write_bytes(file.read_bytes()[:-20])
    elif kind == "binary line":
        file.write_bytes(gzip.compress(json.dumps(HEADER).encode() + b"\n\xff\xfe\x00\n"))
    else:
        file = tmp_path
    assert complaint(run("--source=replay", "--replay.file", file)).startswith(f"{file}: ")


def test_json_log_lines_are_json(tmp_path: Path) -> None:
    """--log.format=json makes every line of the log an object with the same fields."""
    with run_exporter(tmp_path, "--source=replay", "--replay.speed=50", "--log.format=json") as exporter:
        assert exporter.stop() == 0
    lines = [json.loads(line) for line in exporter.log.read_text().splitlines()]
    assert len(lines) >= 3
    assert all(set(line) == {"ts", "level", "logger", "msg"} for line in lines)
    assert [line["msg"] for line in lines][-1] == "stopped"


def test_interrupt_ends_like_sigterm(tmp_path: Path) -> None:
    """Ctrl-C ends the exporter with 0 and without a traceback."""
    with run_exporter(tmp_path, "--source=replay") as exporter:
        exporter.process.send_signal(2)
        assert exporter.process.wait(30) == 0
    assert "Traceback" not in exporter.log.read_text()


RECORDED = """
device 0 sm 0.625 tensor 0.5 dram 0.125 pcie_rx 1e9 power_mw 345678 temperature 55 memory_used 3000000000
device 1 sm 0.25 fp32 0.125 dram 0.75 ecc_corrected_volatile 3
"""


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Path:
    """What `record` wrote in some seconds of the fake driver, with two marks."""
    directory = tmp_path_factory.mktemp("record")
    scenario = Scenario(directory, library, RECORDED)
    marks, file = directory / "marks", directory / "out" / "fake.jsonl.gz"
    file.parent.mkdir()
    command = [sys.executable, "-m", "gpu_hpc_exporter", "record", "--duration=2.5s", "--marks"]
    with subprocess.Popen(
        [*command, marks, file], env={**os.environ, **scenario.env}, stderr=subprocess.PIPE, text=True
    ) as recorder:
        scenario.wait_for_calls("nvmlGpmSampleGet", 1, timeout=30)
        begin = time.monotonic()
        marks.write_text(f"{begin} warm up\n{begin + 1} steady\n", encoding="utf-8")
        _, log = recorder.communicate(timeout=60)
    assert recorder.returncode == 0, log
    assert scenario.stats().live_samples == 0
    assert list(file.parent.iterdir()) == [file]
    return file


def test_record_masks_the_machine(recording: Path) -> None:
    """A recording begins with its header, keeps model and driver, holds the marks, and no identifier of the machine."""
    text = gzip.decompress(recording.read_bytes()).decode()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[0]["type"] == "header"
    assert lines[0]["driver"]["driver_version"] == "580.159.04"
    phases = {line["name"]: line["t"] for line in lines if line["type"] == "phase"}
    assert set(phases) == {"warm up", "steady"}
    assert phases["steady"] - phases["warm up"] == pytest.approx(1.0)
    assert 0 < phases["warm up"] < 2.5
    assert "NVIDIA H200" in text
    assert "aaaa-bbbb-cccc" not in text
    assert "16500000000" not in text


def test_record_is_played_back_with_the_same_values(recording: Path, tmp_path: Path) -> None:
    """What was recorded serves the driver's values again, per GPU."""
    with run_exporter(tmp_path, "--source=replay", "--replay.file", str(recording)) as exporter:
        samples = exporter.wait_for(
            lambda now: all((now.get("gpu_hpc_observed_seconds_total", gpu=gpu) or 0) > 0.5 for gpu in "01")
        )
    expected = [
        ("gpu_hpc_sm_active_ratio", "0", {}, 0.625),
        ("gpu_hpc_sm_utilization_ratio", "0", {}, 0.5),
        ("gpu_hpc_dram_bandwidth_utilization", "0", {}, 0.125),
        ("gpu_hpc_power_watts", "0", {"scope": "gpu"}, 345.678),
        ("gpu_hpc_temperature_celsius", "0", {"sensor": "gpu"}, 55),
        ("gpu_hpc_memory_used_bytes", "0", {}, 3e9),
        ("gpu_hpc_sm_active_ratio", "1", {}, 0.25),
        ("gpu_hpc_sm_utilization_ratio", "1", {}, 0.125),
        ("gpu_hpc_dram_bandwidth_utilization", "1", {}, 0.75),
        ("gpu_hpc_ecc_errors_total", "1", {"severity": "corrected", "scope": "volatile"}, 3),
    ]
    for name, gpu, labels, value in expected:
        assert samples.one(name, gpu=gpu, **labels) == pytest.approx(value, abs=1e-6)
    moved = samples.one("gpu_hpc_pcie_host_to_gpu_bytes_total", gpu="0")
    assert moved / samples.one("gpu_hpc_observed_seconds_total", gpu="0") == pytest.approx(1e9, rel=1e-3)
    assert samples.one("gpu_hpc_bottleneck_seconds_total", gpu="1", **{"class": "dram_bound"}) > 0


def test_record_invents_no_time(recording: Path) -> None:
    """A recording's windows cover each GPU once: no more than its length, and the first second at least."""
    lines = [json.loads(line) for line in gzip.decompress(recording.read_bytes()).splitlines()]
    windows = [line for line in lines if line.get("source") == "gpm" and "dt" in line]
    for gpu in lines[0]["gpus"]:
        covered = sum(window["dt"] for window in windows if window["gpu"] == gpu)
        assert 0.8 <= covered <= max(line["t"] for line in lines if "t" in line)


def test_record_without_a_driver(tmp_path: Path) -> None:
    """Without a driver `record` ends with 2, says that nothing was recorded, and leaves no file at all."""
    result = run("record", "--duration=1s", tmp_path / "none.jsonl.gz")
    assert result.returncode == 2
    assert "library_not_found" in result.stderr or "libnvidia-ml.so.1 was not found" in result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"gpu-hpc-exporter: {tmp_path / 'none.jsonl.gz'}: ")
    assert list(tmp_path.iterdir()) == []


def test_record_of_a_driver_that_is_slow_to_start(tmp_path: Path, library: Path) -> None:
    """A mark that comes before the driver answers does not spoil the recording: the header stays its first line."""
    scenario = Scenario(tmp_path, library, "device 0 sm 0.5\nfault nvmlInit* latency 1")
    marks, file = tmp_path / "marks", tmp_path / "slow.jsonl.gz"
    marks.write_text(f"{time.monotonic()} early\n", encoding="utf-8")
    result = run("record", "--duration=2s", "--marks", marks, file, env=scenario.env)
    assert result.returncode == 0, result.stderr
    with run_exporter(tmp_path, "--source=replay", "--replay.file", str(file)) as exporter:
        exporter.wait_for(lambda samples: samples.get("gpu_hpc_up") == 1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--duration=soon", "{}/file.jsonl.gz"], "duration `soon`: expected a form like 90s, 3m or 1h30m"),
        (["--duration=0", "{}/file.jsonl.gz"], ""),
        (["--duration=1s", "{}/missing/file.jsonl.gz"], "{}/missing/file.jsonl.gz: "),
        (["--duration=1s", "{}"], "{}: "),
    ],
    ids=["not a duration", "no time at all", "no such directory", "is a directory"],
)
def test_record_with_wrong_arguments(tmp_path: Path, library: Path, arguments: list[str], problem: str) -> None:
    """What the user has to change is told in one line with status 2, and no file is left."""
    target = tmp_path / "target"
    target.mkdir()
    scenario = Scenario(tmp_path / "driver", library, "device 0 sm 0.5")
    result = run("record", *(argument.format(target) for argument in arguments), env=scenario.env)
    assert complaint(result).startswith(problem.format(target))
    assert list(target.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["driver", "target"]


def test_two_listen_addresses(tmp_path: Path) -> None:
    """--web.listen-address can be repeated: every address answers."""
    port = free_port()
    flags = ("--source=replay", "--replay.speed=50", f"--web.listen-address=127.0.0.1:{port}")
    with run_exporter(tmp_path, *flags) as exporter, socket.create_connection(("127.0.0.1", port), 5):
        assert exporter.fetch("/-/healthy")[0] == 200
