"""The exporter's life with a driver that is missing, breaks, hangs and comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from e2e.machine import Machine, Start, mean, observed, run_machine, state, uuid_of, value_series
from exporter_process import Exporter, Samples, run_exporter
from fake_nvml import Scenario

BOOT = """
device 0 sm 0.5 dram 0.25 energy_start_mj 4000000
device 1 sm 0.75 dram 0.25 energy_start_mj 9000000
"""
THREE = "device 0 sm 0.5\ndevice 1 sm 0.6\ndevice 2 sm 0.7\n"


def down(reason: str) -> Callable[[Samples], bool]:
    """A condition: the driver cannot be read, for this reason."""
    return lambda samples: samples.get("gpu_hpc_up") == 0 and samples.get("gpu_hpc_down_info", reason=reason) == 1


def up(samples: Samples) -> bool:
    """A condition: the driver is read."""
    return samples.get("gpu_hpc_up") == 1 and not samples.all("gpu_hpc_down_info")


def gone(*devices: int) -> Callable[[Samples], bool]:
    """A condition: no gauge and no reading of these GPUs is left."""
    current = {"gpu_hpc_power_watts", "gpu_hpc_sm_active_ratio", "gpu_hpc_energy_joules_total"}
    return lambda samples: not any(current & value_series(samples, uuid_of(device)) for device in devices)


def test_d05_no_driver_library(tmp_path: Path) -> None:
    """D05: without a driver the exporter stays up, healthy and not ready, says why, and logs it in one line."""
    with run_exporter(tmp_path, env={"LD_LIBRARY_PATH": ""}) as exporter:
        exporter.wait_for(down("library_not_found"))
        assert exporter.fetch("/-/healthy")[0] == 200
        status, _, text = exporter.fetch("/-/ready")
        assert status == 503
        assert "library_not_found" in text
        status, _, told = exporter.fetch("/api/v1/gpus")
        assert status == 200
        assert "library_not_found" in told
        assert exporter.process.poll() is None
        assert exporter.log.read_text().count("libnvidia-ml.so.1 was not found") == 1
        assert exporter.log.read_text().count("level=error") == 1
        assert exporter.stop() == 0
        assert exporter.log.read_text().count("level=error") == 1


def test_a01_driver_and_library_differ_at_the_start(start: Start) -> None:
    """A01: a version mismatch is a reason, told once; the driver is tried again and taken when it is back."""
    began = time.monotonic()
    machine = start("device 0 sm 0.5\nfault nvmlInit* 18")
    samples = machine.exporter.wait_for(down("lib_rm_version_mismatch"))
    assert samples.one("process_resident_memory_bytes") > 0
    assert samples.all("gpu_hpc_exporter_build_info") != {}
    assert machine.exporter.fetch("/-/healthy")[0] == 200
    assert machine.exporter.fetch("/-/ready")[0] == 503
    machine.scenario.wait_for_calls("nvmlInitWithFlags", 4)
    assert time.monotonic() - began > 1 + 2 + 4, "the waits grow: the first is a second"
    machine.scenario.rewrite("device 0 sm 0.5")
    machine.exporter.wait_for(up)
    samples = machine.wait_until_observed(0.1, 0)
    assert mean(samples, "gpu_hpc_sm_active_seconds_total", uuid_of(0)) == pytest.approx(0.5, abs=1e-6)
    assert machine.exporter.fetch("/-/ready")[0] == 200
    (line,) = machine.log_lines("error", "warning")
    assert "kernel module differ" in line["msg"]


def test_a01_driver_lost_and_replaced_under_the_exporter(start: Start) -> None:
    """A01, A06: all GPUs lost, init refused, then both back in another order: no series swaps, no counter goes back."""
    machine = start(BOOT)
    before = machine.wait_until_observed(1.0, 0, 1)
    machine.scenario.rewrite(BOOT + "fault * device 0 15\nfault * device 1 15\nfault nvmlInit* 18")
    machine.exporter.wait_for(down("lib_rm_version_mismatch"))
    machine.scenario.wait_for_calls("nvmlInitWithFlags", 3)  # the first one, and two that were refused
    assert sum("kernel module differ" in line["msg"] for line in machine.log_lines("warning", "error")) == 1
    machine.scenario.rewrite(BOOT + "order 1 0")
    machine.exporter.wait_for(up)
    # More than the windows of before the loss: those that were not published yet count as well.
    after = machine.wait_until_observed(max(observed(before, uuid_of(d)) for d in (0, 1)) + 2.5, 0, 1)
    for device, sm in ((0, 0.5), (1, 0.75)):
        uuid = uuid_of(device)
        assert after.one("gpu_hpc_gpu_info", uuid=uuid, gpu=str(device), index=str(1 - device)) == 1
        assert mean(after, "gpu_hpc_sm_active_seconds_total", uuid) == pytest.approx(sm, abs=1e-6)
        assert after.one("gpu_hpc_sm_active_ratio", uuid=uuid) == pytest.approx(sm, abs=1e-6)
        grown = after.one("gpu_hpc_energy_joules_total", uuid=uuid) - before.one(
            "gpu_hpc_energy_joules_total", uuid=uuid
        )
        assert 0 <= grown < 76 * 60
    assert machine.scenario.stats().stale_handles == 0
    assert machine.scenario.stats().freed_sample_uses == 0


def test_a01_gpus_that_cannot_be_counted(start: Start) -> None:
    """A01: init that works while nothing can be listed is one state with its reason and one log line, not a flood."""
    machine = start("device 0\nfault nvmlDeviceGetCount* 999")
    machine.exporter.wait_for(down("unknown"))
    machine.scenario.wait_for_calls("nvmlDeviceGetCount_v2", 3)
    machine.exporter.wait_for(down("unknown"))
    assert len(machine.log_lines("warning", "error")) == 1


DENIED = "fault * device 0 999\nfault * device 1 999\n"


@pytest.mark.parametrize("library_too", ["fault nvmlInit* 999", ""], ids=["init refused", "init works"])
def test_a02_access_to_all_devices_is_lost(start: Start, library_too: str) -> None:
    """A02: Unknown Error from every device is a lost driver: up 0 with that reason until one answers, no value left."""
    machine = start(BOOT)
    machine.wait_until_observed(0.5, 0, 1)
    machine.scenario.rewrite(BOOT + DENIED + library_too)
    machine.exporter.wait_for(gone(0, 1))
    machine.exporter.wait_for(down("unknown"))
    tried = machine.scenario.calls()["nvmlInitWithFlags"]
    machine.scenario.wait_for_calls("nvmlInitWithFlags", tried + 2)
    samples = machine.exporter.scrape()
    assert down("unknown")(samples)
    assert [value_series(samples, uuid_of(device)) for device in (0, 1)] == [set(), set()]
    assert machine.exporter.fetch("/-/healthy")[0] == 200
    assert machine.exporter.fetch("/-/ready")[0] == 503
    (line,) = [line["msg"] for line in machine.log_lines("error") if "no GPU can be read" in line["msg"]]
    assert "restart the container" in line
    machine.scenario.rewrite(BOOT)
    machine.exporter.wait_for(lambda now: up(now) and bool(now.get("gpu_hpc_sm_active_ratio", uuid=uuid_of(0))))


def test_a02_access_was_lost_before_the_start(start: Start) -> None:
    """A02: a library that opens and counts while every device refuses is no driver that can be read."""
    machine = start(BOOT + DENIED)
    samples = machine.exporter.wait_for(down("unknown"))
    assert samples.get("gpu_hpc_gpus", state="visible") == 0
    assert samples.get("gpu_hpc_gpus", state="expected") == 2
    machine.scenario.rewrite(BOOT)
    machine.exporter.wait_for(up)


def test_d05_no_gpu(start: Start) -> None:
    """D05: a driver without a GPU is up and ready; there is no series of a GPU."""
    machine = start("count 0")
    samples = machine.exporter.wait_for(up)
    assert machine.exporter.fetch("/-/ready")[0] == 200
    assert not any(dict(labels).get("uuid") for _, labels in samples.values)
    assert samples.one("gpu_hpc_source_state", source="nvml", state="active", uuid="") == 1
    assert machine.exporter.stop() == 0


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nvmlInit* 12", "library_not_found"),
        ("nvmlInit* 9", "driver_not_loaded"),
        ("nvmlDevice*ByIndex* 3", "not_supported"),
    ],
)
def test_d03_a_driver_that_is_a_stub(start: Start, fault: str, reason: str) -> None:
    """D03: no driver, none loaded, one that answers nothing: health 0 with its reason, told once, no crash loop."""
    machine = start(f"device 0\nfault {fault}")
    machine.exporter.wait_for(down(reason))
    machine.scenario.wait_for_calls("nvmlInitWithFlags", 3)
    assert machine.exporter.process.poll() is None
    assert machine.exporter.fetch("/-/healthy")[0] == 200
    assert len([line for line in machine.log_lines("error") if "no GPU can be read" in line["msg"]]) == 1
    assert machine.exporter.stop() == 0


def test_a04_one_gpu_is_dead_from_the_start(start: Start) -> None:
    """A04: a GPU that was lost before the start has no series; the other two are served in full."""
    machine = start(THREE + "fault * device 1 15")
    samples = machine.wait_until_observed(1.0, 0, 2)
    for device, sm in ((0, 0.5), (2, 0.7)):
        assert mean(samples, "gpu_hpc_sm_active_seconds_total", uuid_of(device)) == pytest.approx(sm, abs=1e-6)
        assert samples.one("gpu_hpc_power_watts", uuid=uuid_of(device), gpu=str(device), scope="gpu") == 76
    assert value_series(samples, uuid_of(1)) == set()
    assert up(samples)
    assert machine.exporter.fetch("/-/ready")[0] == 200
    (line,) = machine.log_lines("warning", "error")
    assert "GPU 1 " in line["msg"]


def test_a04_gpus_expected_and_visible(start: Start) -> None:
    """A04: two of three GPUs that the driver counts answer: expected 3, visible 2 (catalogue: gpu_hpc_gpus)."""
    machine = start(THREE + "fault * device 1 15")
    samples = machine.wait_until_observed(0.1, 0, 2)
    assert samples.get("gpu_hpc_gpus", state="visible") == 2
    assert samples.get("gpu_hpc_gpus", state="expected") == 3


EIGHT = "".join(f"device {index} sm 0.5\n" for index in range(8))


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (EIGHT + "fault nvmlDeviceGetHandleByIndex* device 3 15", ""),
        (EIGHT + "order 0 1 2 4 5 6 7", "expected_gpus: 8"),
    ],
    ids=["it has no handle", "it is not counted"],
)
def test_a04_a_gpu_that_was_lost_before_the_start(tmp_path: Path, library: Path, text: str, config: str) -> None:
    """A04: 8 expected, 7 visible: from the driver's own count, or from the configuration where that is less."""
    file = tmp_path / "config.yaml"
    file.write_text(f"pm_sampling: {{mode: off}}\n{config}\n")
    with run_machine(tmp_path, library, text, f"--config.file={file}") as machine:
        seven = [index for index in range(8) if index != 3]
        samples = machine.wait_until_observed(0.5, *seven)
        assert samples.get("gpu_hpc_gpus", state="expected") == 8
        assert samples.get("gpu_hpc_gpus", state="visible") == 7
        assert up(samples)
        assert value_series(samples, uuid_of(3)) == set()
        assert all(samples.one("gpu_hpc_power_watts", uuid=uuid_of(one), scope="gpu") == 76 for one in seven)


@pytest.fixture(scope="module")
def with_a_dead_gpu(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Iterator[tuple[Machine, Samples]]:
    """Three GPUs, the second of which fell off the bus and whose values have gone; what was served then."""
    with run_machine(tmp_path_factory.mktemp("dead"), library, THREE) as machine:
        machine.wait_until_observed(0.5, 0, 1, 2)
        machine.scenario.rewrite(THREE + "fault * device 1 15")
        machine.exporter.wait_for(lambda samples: state(samples, "nvml", uuid_of(1)) == "lost")
        yield machine, machine.exporter.wait_for(gone(1))


def test_a04_one_gpu_dies(with_a_dead_gpu: tuple[Machine, Samples]) -> None:
    """A04: a GPU that falls off the bus is lost and its gauges end; the others go on; it is told once."""
    machine, then = with_a_dead_gpu
    assert state(then, "gpm", uuid_of(1)) == "lost"
    assert then.get("gpu_hpc_source_state_info", uuid=uuid_of(1), source="nvml", reason="gpu_is_lost") == 1
    assert then.one("gpu_hpc_driver_errors_total", code="gpu_is_lost") == 1
    later = machine.wait_until_observed(observed(then, uuid_of(0)) + 1, 0, 2)
    for device, sm in ((0, 0.5), (2, 0.7)):
        assert mean(later, "gpu_hpc_sm_active_seconds_total", uuid_of(device)) == pytest.approx(sm, abs=1e-6)
        assert later.one("gpu_hpc_power_watts", uuid=uuid_of(device), scope="gpu") == 76
    assert observed(later, uuid_of(1)) == observed(then, uuid_of(1))
    assert up(later)
    (line,) = machine.log_lines("warning", "error")
    assert uuid_of(1) in line["msg"]
    calls = machine.scenario.calls(1)["nvmlGpmSampleGet"]
    machine.wait_until_observed(observed(later, uuid_of(0)) + 1, 0)
    assert machine.scenario.calls(1)["nvmlGpmSampleGet"] == calls


def test_a04_a_dead_gpu_keeps_no_value(with_a_dead_gpu: tuple[Machine, Samples]) -> None:
    """A04, DESIGN 3.3: the value series of a lost GPU are absent, its counters too; gpu_hpc_gpu_lost stays."""
    _, samples = with_a_dead_gpu
    assert value_series(samples, uuid_of(1)) == set()
    assert samples.get("gpu_hpc_gpu_lost", uuid=uuid_of(1)) == 1


def test_a04_one_dead_gpu_does_not_make_the_exporter_unready(with_a_dead_gpu: tuple[Machine, Samples]) -> None:
    """A04: a node that is unready for one dead GPU would lose the other GPUs' scrapes behind a Service."""
    machine, _ = with_a_dead_gpu
    status, _, text = machine.exporter.fetch("/-/ready")
    assert (status, text) == (200, "ready\n")


def test_h01_a_name_that_is_not_utf8(tmp_path: Path, library: Path) -> None:
    """H01: bytes of the driver that are no UTF-8 are replaced; they cost neither that GPU nor the others."""
    scenario = Scenario(tmp_path, library, "device 0 sm 0.5\ndevice 1 sm 0.5")
    with scenario.path.open("ab") as file:
        file.write(b'\nname "NVIDIA \xff"\n')
    with run_exporter(tmp_path, env=scenario.env) as exporter:
        exporter.wait_for(lambda samples: all(observed(samples, uuid_of(device)) > 0 for device in (0, 1)))


def test_h03_two_gpus_of_one_uuid(start: Start) -> None:
    """H03: the first is served alone, with nothing of the other's in it; that one is missing is counted and told."""
    machine = start('device 0 sm 0.25 uuid "N/A"\ndevice 1 sm 0.75 uuid "N/A"')
    samples = machine.exporter.wait_for(lambda samples: observed(samples, "N/A") > 2)
    assert mean(samples, "gpu_hpc_sm_active_seconds_total", "N/A") == pytest.approx(0.25, abs=1e-6)
    assert samples.one("gpu_hpc_gpu_info", uuid="N/A", index="0") == 1
    assert samples.one("gpu_hpc_gpus", state="expected") == 2
    assert samples.one("gpu_hpc_gpus", state="visible") == 1
    assert samples.one("gpu_hpc_dropped_series_total", reason="duplicate") == 0
    (line,) = machine.log_lines("warning")
    assert "has the UUID of another" in line["msg"]


def test_n08_a_restart_repeats_nothing(tmp_path: Path, library: Path) -> None:
    """N08: what the driver counts is served as it counts it; what we count begins at 0, whatever files are left."""
    counted = ("gpu_hpc_observed_seconds_total", "gpu_hpc_sm_active_seconds_total", "gpu_hpc_windows_total")
    found = []
    for start_mj in (9_000_000_000, 9_000_100_000):
        with run_machine(tmp_path, library, f"device 0 sm 0.5 energy_start_mj {start_mj} pcie_replay 7") as machine:
            began = time.monotonic()
            samples = machine.wait_until_observed(2, 0)
            spent = time.monotonic() - began + 5
            assert machine.exporter.stop() == 0
        found.append(samples.one("gpu_hpc_energy_joules_total", uuid=uuid_of(0)))
        assert samples.one("gpu_hpc_pcie_replays_total", uuid=uuid_of(0)) == 7
        for name in counted:
            assert all(value < 20 * spent for value in samples.all(name, uuid=uuid_of(0)).values()), name
        assert observed(samples, uuid_of(0)) < spent
    before, after = found
    assert before >= 9_000_000
    assert 0 < after - before < 100 + 700 * spent


def test_windows_without_a_refresh_are_extended(start: Start) -> None:
    """Counters that refresh every 250 ms: windows are extended and late, means stay right, no false 0, no time lost."""
    machine = start("gpm_refresh 0.25\ndevice 0 sm 0.96 tensor 0.93 dram 0.17")
    samples = machine.wait_until_observed(3.0, 0)
    uuid = uuid_of(0)
    assert samples.one("gpu_hpc_windows_total", uuid=uuid, result="late") >= 3
    assert samples.one("gpu_hpc_windows_total", uuid=uuid, result="lost") == 0
    assert samples.one("gpu_hpc_windows_total", uuid=uuid, result="rejected") == 0
    assert mean(samples, "gpu_hpc_sm_active_seconds_total", uuid) == pytest.approx(0.96, abs=1e-6)
    assert samples.one("gpu_hpc_sm_active_ratio", uuid=uuid) == pytest.approx(0.96, abs=1e-6)
    low = samples.one("gpu_hpc_bottleneck_intensity_window_ratio_bucket", uuid=uuid, unit="sm", le="0.9")
    assert low == 0
    assert samples.all("gpu_hpc_rejected_readings_total", uuid=uuid) == {}


def test_gpm_fails_for_a_while(start: Start) -> None:
    """Failing samples and failing evaluations are counted; windows come back by themselves; no time is invented."""
    healthy = "device 0 sm 0.5 dram 0.25 pcie_rx 1e9\ndevice 1 sm 0.75\ndevice 2 sm 0.25\n"
    errors = "gpu_hpc_driver_errors_total"
    began = time.monotonic()
    machine = start(healthy)
    machine.wait_until_observed(0.5, 0, 1, 2)
    machine.scenario.rewrite(f"{healthy}fault nvmlGpmSampleGet device 0 999\nfault nvmlGpmMetricsGet device 1 10\n")
    failed = machine.exporter.wait_for(
        lambda samples: (
            state(samples, "gpm", uuid_of(0)) == "failed"
            and all((samples.get(errors, code=code) or 0) >= 2 for code in ("unknown", "timeout"))
        )
    )
    assert failed.one("gpu_hpc_source_state_info", uuid=uuid_of(0), source="gpm", reason="unknown") == 1
    assert failed.one("gpu_hpc_power_watts", uuid=uuid_of(0), scope="gpu") == 76
    machine.scenario.rewrite(healthy)
    machine.exporter.wait_for(lambda samples: all(state(samples, "gpm", uuid_of(d)) == "active" for d in (0, 1)))
    samples = machine.wait_until_observed(max(observed(failed, uuid_of(d)) for d in (0, 1)) + 1.0, 0, 1)
    for device, sm in ((0, 0.5), (1, 0.75), (2, 0.25)):
        assert mean(samples, "gpu_hpc_sm_active_seconds_total", uuid_of(device)) == pytest.approx(sm, abs=1e-6)
        assert observed(samples, uuid_of(device)) <= time.monotonic() - began
    assert samples.one("gpu_hpc_windows_total", uuid=uuid_of(2), result="lost") == 0
    assert mean(samples, "gpu_hpc_pcie_host_to_gpu_bytes_total", uuid_of(0)) == pytest.approx(1e9, rel=1e-3)
    assert samples.one("gpu_hpc_windows_total", uuid=uuid_of(1), result="lost") >= 1
    assert machine.scenario.stats().freed_sample_uses == 0


def test_c05_h10_scrapes_never_reach_the_driver(start: Start) -> None:
    """C05, H10: eight scrapers change neither the rate of driver calls nor who is inside GPM."""
    machine = start("device 0 sm 0.5\ndevice 1 sm 0.5")
    clock = "nvmlDeviceGetPowerUsage"  # once a second for each GPU

    def calls_per_second() -> float:
        machine.scenario.wait_for_calls(clock, machine.scenario.calls()[clock] + 1)
        began, before = time.monotonic(), machine.scenario.calls()
        machine.scenario.wait_for_calls(clock, before[clock] + 4)
        calls = sum(machine.scenario.calls().values()) - sum(before.values())
        return calls / (time.monotonic() - began)

    machine.scenario.wait_for_calls(clock, 4)
    before = calls_per_second()
    ended = threading.Event()
    statuses: list[int] = []
    threads = [
        threading.Thread(target=_scrape_until, args=(machine.exporter, path, ended, statuses))
        for path in ("/metrics", "/metrics", "/metrics", "/metrics", "/metrics", "/", "/-/ready", "/-/healthy")
    ]
    for thread in threads:
        thread.start()
    crowded = calls_per_second()
    ended.set()
    for thread in threads:
        thread.join()
    alone = before
    for _ in range(10):  # a busy machine may have held up some of them
        alone = max(alone, calls_per_second())
        if crowded < 1.2 * alone:
            break
    with ThreadPoolExecutor(50) as pool:
        statuses += pool.map(lambda _: machine.exporter.fetch()[0], range(50))
    assert len(statuses) > 100
    assert set(statuses) == {200}
    assert crowded < 1.2 * alone
    stats = machine.scenario.stats()
    assert stats.gpm_max_inside == {0: 1, 1: 1}
    assert stats.freed_sample_uses == 0


def _scrape_until(exporter: Exporter, path: str, ended: threading.Event, statuses: list[int]) -> None:
    while not ended.is_set():
        statuses.append(exporter.fetch(path)[0])


def test_sigterm_frees_what_was_allocated(start: Start) -> None:
    """SIGTERM soon ends the process with 0, with every GPM sample freed and the library shut down."""
    machine = start("device 0 sm 0.5\ndevice 1 sm 0.5")
    machine.wait_until_observed(0.1, 0, 1)
    assert machine.scenario.stats().live_samples > 0
    assert machine.exporter.stop() == 0
    assert machine.scenario.stats().live_samples == 0
    assert machine.scenario.stats().freed_sample_uses == 0
    assert machine.scenario.calls()["nvmlShutdown"] == 1


@pytest.mark.parametrize(
    "function",
    ["nvmlInitWithFlags", "nvmlDeviceGetName", "nvmlDeviceGetTemperature*", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"],
)
def test_a12_sigterm_does_not_wait_for_a_call_that_never_returns(start: Start, function: str) -> None:
    """A12: with a call stuck in the driver the exporter answers, and SIGTERM soon ends it with 0 all the same."""
    machine = start(f"device 0 sm 0.5\nfault {function} hang")
    deadline = time.monotonic() + 60
    while machine.scenario.stats().hangs == 0:
        assert time.monotonic() < deadline
        assert machine.exporter.fetch("/-/healthy")[0] == 200
    assert machine.exporter.fetch("/metrics")[0] == 200
    assert machine.exporter.stop() == 0


@pytest.fixture(scope="module")
def with_a_stuck_gpu(tmp_path_factory: pytest.TempPathFactory, library: Path) -> Iterator[tuple[Machine, Samples]]:
    """Two GPUs, the second stuck in a call for ever and its values gone; what was served then."""
    text = "device 0 sm 0.5\ndevice 1 sm 0.5\n"
    with run_machine(tmp_path_factory.mktemp("stuck"), library, text) as machine:
        machine.wait_until_observed(0.5, 0, 1)
        machine.scenario.rewrite(text + "fault nvmlDeviceGetTemperature* device 1 hang\n")
        yield machine, machine.exporter.wait_for(gone(1))


def test_a12_a_stuck_gpu_leaves_the_others_alone(with_a_stuck_gpu: tuple[Machine, Samples]) -> None:
    """A12: the stuck GPU's values end, the other GPU goes on, no scrape waits for it, threads do not pile up."""
    machine, then = with_a_stuck_gpu
    tasks = Path(f"/proc/{machine.exporter.process.pid}/task")
    threads = len(list(tasks.iterdir()))
    for _ in range(100):
        began = time.monotonic()
        samples = machine.exporter.scrape()
        assert time.monotonic() - began < 5  # the call would be waited for without end
        assert {*samples.all("gpu_hpc_scrape_collector_success").values()} == {1}
    assert machine.exporter.fetch("/-/healthy")[0] == 200
    later = machine.wait_until_observed(observed(then, uuid_of(0)) + 1.5, 0)
    assert later.one("gpu_hpc_power_watts", uuid=uuid_of(0), scope="gpu") == 76
    assert gone(1)(later)
    assert len(list(tasks.iterdir())) == threads
    assert machine.scenario.stats().hangs == 1


def test_a12_a_stuck_gpu_is_told(with_a_stuck_gpu: tuple[Machine, Samples]) -> None:
    """A12, DESIGN 3.5: a stuck call is named in gpu_hpc_driver_call_hung_seconds, and its source is not active."""
    _, samples = with_a_stuck_gpu
    assert state(samples, "nvml", uuid_of(1)) != "active"
    assert value_series(samples, uuid_of(1)) == set()
    assert samples.one("gpu_hpc_driver_call_hung_seconds", uuid=uuid_of(1), call="temperature") > 0


def test_a12_a_gpu_that_hangs_while_it_is_listed(start: Start) -> None:
    """A12: a GPU that hangs from the first call on does not keep the others from being served."""
    machine = start("device 0 sm 0.5\ndevice 1 sm 0.5\nfault nvmlDeviceGetName device 1 hang")
    machine.exporter.wait_for(lambda samples: observed(samples, uuid_of(0)) > 0)
