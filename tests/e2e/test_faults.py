"""GPUs that come, go and are re-partitioned; Xids; the kernel log; reload; the ways out."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from e2e.machine import Start, mig_uuid_of, observed, run_machine, state, uuid_of, value_series
from exporter_process import Samples, run_exporter
from fake_nvml import Scenario, build

TWO = "device 0 sm 0.5\ndevice 1 sm 0.25\n"


def visible(samples: Samples) -> float:
    """GPUs that can be read."""
    return samples.one("gpu_hpc_gpus", state="visible")


def test_a04_a_lost_gpu_returns(start: Start) -> None:
    """A04: a GPU that answers again after a reset is taken up without a restart; its counters go on."""
    machine = start(TWO)
    before = machine.wait_until_observed(1.0, 0, 1)
    machine.scenario.rewrite(TWO + "fault * device 1 15")
    lost = machine.exporter.wait_for(lambda s: visible(s) == 1)
    assert lost.one("gpu_hpc_gpus", state="expected") == 2
    assert lost.one("gpu_hpc_gpu_lost", uuid=uuid_of(1), gpu="1", pci_bus_id="00000000:1e:00.0") == 1
    machine.scenario.rewrite(TWO)
    after = machine.exporter.wait_for(
        lambda s: visible(s) == 2 and observed(s, uuid_of(1)) > observed(before, uuid_of(1)) + 0.5
    )
    assert after.all("gpu_hpc_gpu_lost") == {}
    assert state(after, "gpm", uuid_of(1)) == "active"
    assert after.one("gpu_hpc_sm_active_seconds_total", uuid=uuid_of(1)) / observed(after, uuid_of(1)) == pytest.approx(
        0.25, abs=1e-6
    )
    assert machine.scenario.stats().stale_handles == 0


def test_a04_a_gpu_vanishes_from_the_count(start: Start) -> None:
    """A04, A06: one GPU less in the list, indices packed anew: the missing one is lost, the other keeps its label."""
    machine = start(TWO)
    before = machine.wait_until_observed(1.0, 0, 1)
    machine.scenario.rewrite(TWO + "order 1")
    after = machine.exporter.wait_for(  # the one is lost before the other is listed anew
        lambda s: visible(s) == 1 and s.get("gpu_hpc_gpu_info", uuid=uuid_of(1), index="0") == 1
    )
    assert after.one("gpu_hpc_gpus", state="expected") == 2
    assert after.one("gpu_hpc_gpu_lost", uuid=uuid_of(0), gpu="0") == 1
    assert value_series(after, uuid_of(0)) == set()
    assert after.one("gpu_hpc_gpu_info", uuid=uuid_of(1)) == 1
    assert after.one("gpu_hpc_gpu_info", uuid=uuid_of(1), gpu="1", index="0") == 1
    later = machine.exporter.wait_for(lambda s: observed(s, uuid_of(1)) > observed(before, uuid_of(1)) + 0.5)
    assert later.one("gpu_hpc_sm_active_ratio", uuid=uuid_of(1)) == pytest.approx(0.25, abs=1e-6)


EIGHT = "".join(f"device {index} sm 0.5\n" for index in range(8))


def test_c05_one_thread_at_a_time_where_the_driver_stands_no_two(start: Start) -> None:
    """C05: samples of eight GPUs are due on the same beat, and never taken at once; none is lost for it."""
    machine = start(EIGHT + "fault nvmlGpm* latency 0.002\nfault nvmlDeviceGetFieldValues latency 0.002\n")
    machine.wait_until_observed(3.0, *range(8))
    stats = machine.scenario.stats()
    assert stats.gpm_together == stats.fields_together == 0
    assert stats.gpm_max_inside == dict.fromkeys(range(8), 1)


def test_c05_a_gpu_that_hangs_keeps_the_turn_from_nobody(start: Start) -> None:
    """C05, A12: the others' samples wait a second for the one that does not come back, and then no longer."""
    machine = start(EIGHT)
    machine.wait_until_observed(1.0, *range(8))
    machine.scenario.rewrite(EIGHT + "fault nvmlGpmSampleGet device 3 hang\n")
    hung = {"uuid": uuid_of(3), "call": "GPM sample"}
    machine.exporter.wait_for(lambda s: s.get("gpu_hpc_driver_call_hung_seconds", **hung) is not None)
    before = machine.exporter.scrape()
    others = [uuid_of(index) for index in range(8) if index != 3]
    after = machine.exporter.wait_for(lambda s: all(observed(s, u) > observed(before, u) + 1 for u in others))
    assert all(state(after, "gpm", uuid) == "active" for uuid in others)
    stats = machine.scenario.stats()
    assert (stats.hangs, stats.gpm_together) == (1, 0)


def test_mig_instances_are_taken_up_and_given_up(start: Start) -> None:
    """A GPU that is partitioned while we run shows its instances; what was an instance once is not a lost GPU."""
    machine = start("device 0 sm 0.5")
    machine.wait_until_observed(0.5, 0)
    machine.scenario.rewrite("device 0 sm 0.5\nmig 0 gi 1 sm 0.75")
    instance = mig_uuid_of(0, 1)
    partitioned = machine.exporter.wait_for(lambda s: observed(s, instance) > 0.2)
    assert partitioned.one("gpu_hpc_gpu_info", uuid=instance, gpu="0", gpu_instance="1", parent_uuid=uuid_of(0)) == 1
    assert state(partitioned, "gpm", uuid_of(0)) == "unsupported"
    machine.scenario.rewrite("device 0 sm 0.5")
    whole = machine.exporter.wait_for(lambda s: s.get("gpu_hpc_gpu_info", uuid=instance) is None)
    assert whole.all("gpu_hpc_gpu_lost") == {}
    assert {labels for (name, labels) in whole.values if ("uuid", instance) in labels} == set()


def test_a12_a_stuck_gpu_comes_back(start: Start) -> None:
    """A12: when the hung call returns at last, the GPU is served again by the same thread."""
    machine = start(TWO)
    machine.wait_until_observed(0.5, 0, 1)
    machine.scenario.rewrite(TWO + "fault nvmlDeviceGetPowerUsage device 1 hang\n")
    machine.exporter.wait_for(
        lambda s: s.get("gpu_hpc_driver_call_hung_seconds", uuid=uuid_of(1), call="power") is not None
    )
    machine.scenario.rewrite(TWO)
    samples = machine.exporter.wait_for(lambda s: visible(s) == 2)
    assert samples.all("gpu_hpc_driver_call_hung_seconds") == {}
    assert machine.exporter.wait_for(lambda s: state(s, "nvml", uuid_of(1)) == "active")


def test_xid_events_are_counted(start: Start) -> None:
    """N01: every Xid is counted per GPU and number, zeros of the critical ones are there before."""
    machine = start(TWO + "xid 1 31 at 1.0\nxid 1 31 at 1.5\nxid 0 94 at 1.0")
    samples = machine.exporter.wait_for(lambda s: s.get("gpu_hpc_xid_errors_total", uuid=uuid_of(1), xid="31") == 2)
    assert samples.one("gpu_hpc_xid_errors_total", uuid=uuid_of(0), xid="94") == 1
    assert samples.one("gpu_hpc_xid_errors_total", uuid=uuid_of(1), xid="79") == 0
    assert abs(samples.one("gpu_hpc_xid_last_timestamp_seconds", uuid=uuid_of(1), xid="31") - time.time()) < 60


KERNEL_LOG = {
    "Xid": "4,1,1,-;NVRM: Xid (PCI:0000:1e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
    "three lines": (
        "4,1,1,-;NVRM: The NVIDIA GPU 0000:1e:00.0\n4,2,1,-;NVRM: (PCI ID: 10de:2335) installed in this system has\n"
        "4,3,1,-;NVRM: fallen off the bus and is not responding to commands."
    ),
}


@pytest.mark.parametrize("form", KERNEL_LOG)
def test_a05_the_kernel_log_tells_of_a_lost_gpu(tmp_path: Path, library: Path, form: str) -> None:
    """A05: what NVML never reports is read from the kernel log, with and without an Xid."""
    log = tmp_path / "kmsg"
    os.mkfifo(log)
    with run_machine(tmp_path, library, TWO, f"--path.kmsg={log}") as machine:
        machine.wait_until_observed(0.2, 0, 1)
        with log.open("w") as kernel:
            kernel.write(KERNEL_LOG[form] + "\n")
            kernel.flush()
            samples = machine.exporter.wait_for(lambda s: s.get("gpu_hpc_gpu_lost", uuid=uuid_of(1)) == 1)
            assert samples.get("gpu_hpc_gpu_lost", uuid=uuid_of(0)) is None
            assert state(samples, "kmsg") == "active"
            expected = 1 if form == "Xid" else 0
            assert samples.one("gpu_hpc_xid_errors_total", uuid=uuid_of(1), xid="79") == expected


def test_kernel_log_that_is_not_there(tmp_path: Path, library: Path) -> None:
    """A container without /dev/kmsg says so as a state, and nothing else changes."""
    with run_machine(tmp_path, library, TWO, f"--path.kmsg={tmp_path / 'none'}") as machine:
        samples = machine.wait_until_observed(0.2, 0, 1)
        assert state(samples, "kmsg") == "unsupported"
        assert machine.exporter.fetch("/-/ready")[0] == 200


def test_c08_a_vgpu_guest_is_not_asked_for_the_physical_board(start: Start) -> None:
    """C08: calls that fill a vGPU guest's kernel log are never made."""
    machine = start("device 0 virtualization 2\nfault nvmlGpmSampleGet 999")
    machine.scenario.wait_for_calls("nvmlDeviceGetUtilizationRates", 3)
    forbidden = ("Pcie", "NvLink", "Ecc", "Remapped")
    assert {name for name in machine.scenario.calls(0) if any(word in name for word in forbidden)} == set()


def test_c07_gpm_that_never_delivers(start: Start) -> None:
    """C07: GPM that claims support and fails always is asked ever more seldom; the readings go on."""
    machine = start("device 0 virtualization 2\nfault nvmlGpmSampleGet 999")
    machine.scenario.wait_for_calls("nvmlDeviceGetUtilizationRates", 6)
    samples = machine.exporter.scrape()
    assert state(samples, "gpm", uuid_of(0)) == "failed"
    assert samples.get("gpu_hpc_observed_seconds_total", uuid=uuid_of(0)) is None
    assert machine.scenario.calls(0)["nvmlGpmSampleGet"] <= 5
    assert len([line for line in machine.log_lines("warning", "error") if "gpm" in line["msg"]]) == 1


HASTY = """
import sys
from gpu_hpc_exporter import cli
from gpu_hpc_exporter.samplers import gpu_owner
gpu_owner._MAX_GPM_BACKOFF_NS = 50_000_000  # half a minute and an hour are long for a test
gpu_owner._GPM_REPROBE_NS = 8_000_000_000
sys.exit(cli.main())
"""


def test_c07_gpm_that_never_delivers_is_given_up_and_tried_again(tmp_path: Path, library: Path) -> None:
    """C07: after 20 failures it is asked hourly, of this GPU only; once it delivers there are windows."""
    two = "device 0 virtualization 2 sm 0.5\ndevice 1 sm 0.25\n"
    scenario = Scenario(tmp_path, library, two + "fault nvmlGpmSampleGet device 0 999\n")
    with run_exporter(tmp_path, env=scenario.env, program=("-c", HASTY)) as exporter:
        deadline = time.monotonic() + 60
        while scenario.calls(0).get("nvmlGpmSampleGet", 0) < 21:
            assert time.monotonic() < deadline
        samples = exporter.scrape()
        assert state(samples, "gpm", uuid_of(0)) == "failed"
        readings = scenario.calls(0)["nvmlDeviceGetUtilizationRates"]
        while scenario.calls(0)["nvmlDeviceGetUtilizationRates"] < readings + 2:
            assert time.monotonic() < deadline
        assert scenario.calls(0)["nvmlGpmSampleGet"] == 21
        assert observed(exporter.scrape(), uuid_of(1)) > observed(samples, uuid_of(1)) + 0.5
        scenario.rewrite(two)
        exporter.wait_for(lambda s: observed(s, uuid_of(0)) > 0.5 and state(s, "gpm", uuid_of(0)) == "active")


def test_m07_library_below_the_driver_root(tmp_path: Path) -> None:
    """M07: a library that the loader does not know is found below the driver container's root."""
    library = build(tmp_path / "driver" / "usr" / "lib" / "x86_64-linux-gnu")
    scenario = Scenario(tmp_path, library, "device 0 sm 0.5")
    env = {key: value for key, value in scenario.env.items() if key != "LD_LIBRARY_PATH"}
    with run_exporter(tmp_path, f"--path.driver-root={tmp_path / 'driver'}", env=env) as exporter:
        exporter.wait_for(lambda s: observed(s, uuid_of(0)) > 0)


def test_exit_after_lost_minutes(tmp_path: Path, library: Path) -> None:
    """A02: where configured, the exporter ends with status 3 once access has been lost for so long."""
    config = tmp_path / "config.yaml"
    config.write_text("exit_after_lost_minutes: 0.05\n")
    with run_machine(tmp_path, library, TWO, f"--config.file={config}") as machine:
        machine.wait_until_observed(0.2, 0, 1)
        machine.scenario.rewrite(TWO + "fault * device 0 999\nfault * device 1 999\nfault nvmlInit* 999")
        assert machine.exporter.process.wait(60) == 3
        assert any("ending, as configured" in line["msg"] for line in machine.log_lines("error"))


def test_without_it_the_exporter_stays_up(start: Start) -> None:
    """A node that never had a driver never ends by itself, whatever is configured."""
    machine = start("device 0\nfault nvmlInit* 9")
    machine.exporter.wait_for(lambda s: s.get("gpu_hpc_down_info", reason="driver_not_loaded") == 1)
    assert machine.exporter.process.poll() is None


@pytest.mark.parametrize("way", ["SIGHUP", "POST"])
def test_reload(tmp_path: Path, library: Path, way: str) -> None:
    """A good file is applied, a broken one changes nothing and is told by a metric and one line."""
    config = tmp_path / "config.yaml"
    config.write_text("expected_gpus: 4\nsampling_interval_ms: 100\n")
    with run_machine(tmp_path, library, TWO, f"--config.file={config}") as machine:
        exporter = machine.exporter

        def reload() -> int | None:
            if way == "SIGHUP":
                exporter.process.send_signal(signal.SIGHUP)
                return None
            return exporter.post("/-/reload")

        machine.wait_until_observed(0.5, 0, 1)
        assert exporter.scrape().one("gpu_hpc_gpus", state="expected") == 4
        config.write_text("expected_gpu: 8\n")
        assert reload() in (None, 500)
        samples = exporter.wait_for(lambda s: s.one("gpu_hpc_config_reload_success") == 0)
        assert samples.one("gpu_hpc_gpus", state="expected") == 4
        (line,) = machine.log_lines("error")
        assert f"{config}: line 1: unknown key `expected_gpu`; did you mean `expected_gpus`?" in line["msg"]
        before = observed(samples, uuid_of(0))
        config.write_text("expected_gpus: 8\nsampling_interval_ms: 200\n")
        assert reload() in (None, 200)
        samples = exporter.wait_for(lambda s: s.one("gpu_hpc_config_reload_success") == 1)
        exporter.wait_for(lambda s: s.one("gpu_hpc_gpus", state="expected") == 8)
        samples = exporter.wait_for(lambda s: s.get("gpu_hpc_window_seconds", uuid=uuid_of(0)) == 0.2)
        samples = exporter.wait_for(lambda s: observed(s, uuid_of(0)) > before + 1)
        assert samples.one("gpu_hpc_sm_active_ratio", uuid=uuid_of(0)) == pytest.approx(0.5, abs=1e-6)


def test_an_interval_below_the_floor(tmp_path: Path, library: Path) -> None:
    """An interval that GPM cannot keep runs at the floor, says so once and is exported as it is."""
    config = tmp_path / "config.yaml"
    config.write_text("sampling_interval_ms: 10\n")
    with run_machine(tmp_path, library, TWO, f"--config.file={config}") as machine:
        samples = machine.wait_until_observed(0.5, 0, 1)
        assert samples.one("gpu_hpc_window_seconds", uuid=uuid_of(0)) == 0.1
        assert len([line for line in machine.log_lines("info") if "floor" in line["msg"]]) == 1


IMPATIENT = """
import sys
from gpu_hpc_exporter import cli
from gpu_hpc_exporter.samplers import gpu_owner
gpu_owner._SILENCE_NS = 1_000_000_000  # a minute is long for a test
sys.exit(cli.main())
"""


def test_b11_counters_that_fall_silent_under_load(tmp_path: Path, library: Path) -> None:
    """B11: all zeros while NVML calls the GPU busy: GPM is opened anew once, then there is no window, no false idle."""
    silent = "device 0 utilization_gpu 100\n"
    scenario = Scenario(tmp_path, library, silent)
    with run_exporter(tmp_path, env=scenario.env, program=("-c", IMPATIENT)) as exporter:
        samples = exporter.wait_for(
            lambda s: state(s, "gpm", uuid_of(0)) == "failed" and not s.all("gpu_hpc_sm_active_ratio")
        )
        assert samples.one("gpu_hpc_nvml_utilization_ratio", uuid=uuid_of(0)) == 1
        reasons = samples.all("gpu_hpc_source_state_info", uuid=uuid_of(0), source="gpm")
        assert "every counter reads 0" in dict(next(iter(reasons)))["reason"]
        assert scenario.calls(0)["nvmlGpmQueryDeviceSupport"] == 2
        assert scenario.stats().live_samples == 0


def test_b11_copies_are_not_silence(tmp_path: Path, library: Path) -> None:
    """B11: pinned copies leave the SMs at exactly 0 with nvidia-smi at 100 %, and are believed."""
    scenario = Scenario(tmp_path, library, "device 0 utilization_gpu 100 pcie_rx 58e9 dram 0.01\n")
    with run_exporter(tmp_path, env=scenario.env, program=("-c", IMPATIENT)) as exporter:
        samples = exporter.wait_for(lambda s: observed(s, uuid_of(0)) > 4)
        assert state(samples, "gpm", uuid_of(0)) == "active"
        assert samples.one("gpu_hpc_bottleneck_seconds_total", **{"class": "pcie_bound"}) == observed(
            samples, uuid_of(0)
        )


def test_b10_nvlinks_are_counted_or_absent(start: Start) -> None:
    """B10: links that are down are counted as present, links that do not exist are not; without any, no series."""
    machine = start(
        """
        device 0 nvlink_links 3
        link 0 device 0 state 1
        link 1 device 0 state 0
        link 2 device 0 state !3
        device 1 nvlink_links 1
        link 0 device 1 state !3
        """
    )
    samples = machine.wait_until_observed(0.2, 0, 1)
    assert samples.one("gpu_hpc_nvlink_links", uuid=uuid_of(0), state="present") == 2
    assert samples.one("gpu_hpc_nvlink_links", uuid=uuid_of(0), state="active") == 1
    assert samples.one("gpu_hpc_nvlink_received_bytes_total", uuid=uuid_of(0)) == 0
    assert samples.all("gpu_hpc_nvlink_links", uuid=uuid_of(1)) == {}
    assert samples.get("gpu_hpc_nvlink_received_bytes_total", uuid=uuid_of(1)) is None


def test_b10_the_speed_of_nvlinks_is_common_or_each_ones(start: Start) -> None:
    """B10: Hopper's driver answers for single links alone, and for none that is down; others answer for all."""
    machine = start(
        """
        device 0 nvlink_links 2
        link 0 device 0 state 0 speed 0
        device 1 nvlink_links 2
        field 90 50000 type u32 device 1
        device 2 nvlink_links 2 nvlink_speed !3
        """
    )
    samples = machine.wait_until_observed(0.2, 0, 1, 2)
    limits = {
        gpu: samples.get("gpu_hpc_nvlink_bandwidth_limit_bytes_per_second", uuid=uuid_of(gpu)) for gpu in range(3)
    }
    assert limits == {0: pytest.approx(2 * 26.562e9), 1: pytest.approx(100e9), 2: None}


def test_b10_links_between_which_some_are_missing(start: Start) -> None:
    """B10: 0, 3 and values in one list: what is there counts; an error counter that is not read of all is absent."""
    machine = start(
        """
        device 0 nvlink_links 4
        link 0 device 0 state !3
        link 1 device 0 state 0 replay !3
        link 2 device 0 state 1 replay 3 crc_flit !3 recovery 1
        link 3 device 0 state 1 replay 2 crc_flit 7 recovery 0
        device 1 nvlink_links 2
        fault nvmlDeviceGetNvLinkState device 1 999 after_calls 4
        device 2 nvlink_links 1
        link 0 device 2 state 0 replay !3
        """
    )
    samples = machine.wait_until_observed(0.2, 0, 1, 2)
    uuid = uuid_of(0)
    assert samples.one("gpu_hpc_nvlink_links", uuid=uuid, state="present") == 3
    assert samples.one("gpu_hpc_nvlink_links", uuid=uuid, state="active") == 2
    errors = {dict(row)["error"]: count for row, count in samples.all("gpu_hpc_nvlink_errors_total", uuid=uuid).items()}
    assert errors == {"replay": 5, "recovery": 1, "crc_data": 0}
    assert samples.get("gpu_hpc_nvlink_received_bytes_total", uuid=uuid) == 0
    # Counters of no link at all are no 0.
    assert samples.get("gpu_hpc_nvlink_errors_total", uuid=uuid_of(2), error="replay") is None
    # The speed of one that is up holds for all that are there.
    assert samples.one("gpu_hpc_nvlink_bandwidth_limit_bytes_per_second", uuid=uuid) == pytest.approx(3 * 26.562e9)
    # A link that fails is no smaller number of links.
    assert samples.all("gpu_hpc_nvlink_links", uuid=uuid_of(1)) == {}
    assert samples.one("gpu_hpc_driver_errors_total", code="unknown") >= 1


READS_OFTEN = """
import sys
from dataclasses import replace
from gpu_hpc_exporter.sources.nvml import readings
readings.BOARD_GROUPS = tuple(replace(group, period_ns=readings.SECOND) for group in readings.BOARD_GROUPS)
from gpu_hpc_exporter import cli
sys.exit(cli.main())
"""


def test_b10_a_link_that_comes_and_goes_brings_no_errors_but_new_ones(tmp_path: Path, library: Path) -> None:
    """B10: while a link is down its counter may be missing: that takes no error back, and its return is none."""
    down = "state 0 replay !3"

    def links(*states: str) -> str:
        lines = (f"link {link} device 0 {state}" for link, state in enumerate(states))
        return "\n".join(("device 0 nvlink_links 3", *lines))

    scenario = Scenario(tmp_path, library, links("replay 3", "replay 7", down))
    with run_exporter(tmp_path, env=scenario.env, program=("-c", READS_OFTEN)) as exporter:

        def after(count: float) -> float:
            """The first other count."""
            name = "gpu_hpc_nvlink_errors_total"
            samples = exporter.wait_for(lambda s: s.get(name, error="replay") not in {None, count})
            return samples.one(name, error="replay")

        assert after(-1) == 10
        scenario.rewrite(links("replay 4", down, down))
        assert after(10) == 11
        scenario.rewrite(links("replay 4", "replay 9", "replay 100"))
        assert after(11) == 13
        # One counter is set back.
        scenario.rewrite(links("replay 0", "replay 9", "replay 101"))
        assert after(13) == 14
        scenario.rewrite(links("replay 1", f"replay {2**32 - 1}", "replay 101"))
        exporter.wait_for(lambda s: s.get("gpu_hpc_nvlink_errors_total", error="replay") is None)
        scenario.rewrite(links("replay 1", "replay 9", "replay 101"))
        assert after(14) == 15


@pytest.mark.parametrize("code", [13, 25])
def test_b06_memory_by_a_driver_of_another_version(start: Start, code: int) -> None:
    """B06: the second version is missing, or its structure is refused: the first one's values, without the reserve."""
    machine = start(f"device 0 memory_used 1000000000\nfault nvmlDeviceGetMemoryInfo_v2 device 0 {code}")
    samples = machine.exporter.wait_for(lambda s: s.get("gpu_hpc_memory_used_bytes", uuid=uuid_of(0)) is not None)
    assert samples.get("gpu_hpc_memory_reserved_bytes", uuid=uuid_of(0)) is None
    used, free = (samples.one(f"gpu_hpc_memory_{what}_bytes", uuid=uuid_of(0)) for what in ("used", "free"))
    assert used + free == samples.one("gpu_hpc_memory_total_bytes", uuid=uuid_of(0))
    assert used == 1_000_000_000 + 640_679_936, "the reserve is in it, as HELP says"


def test_d01_an_integrated_gpu_that_answers_zeros(start: Start) -> None:
    """D01: a total of 0 is no memory: absent, without the host's in its place, which a lost GPU does not get either."""
    two = 'device 0 memory_total 0 memory_used 0\n  name "NVIDIA GB10"\ndevice 1\nprocess 0 pid 7 memory 4096\n'
    machine = start(two)
    samples = machine.exporter.wait_for(lambda s: s.get("gpu_hpc_gpu_processes", uuid=uuid_of(0)) == 1)
    memory = {name for name in value_series(samples, uuid_of(0)) if re.match("gpu_hpc_memory_.*_bytes", name)}
    assert memory == set()
    machine.scenario.rewrite(two + "fault nvmlDeviceGetMemoryInfo* device 1 15\n")
    samples = machine.exporter.wait_for(lambda s: s.get("gpu_hpc_gpu_lost", uuid=uuid_of(1)) == 1)
    assert value_series(samples, uuid_of(1)) == set()


def test_a12_a_reload_during_a_hang_piles_nothing_up(tmp_path: Path, library: Path) -> None:
    """A12: new intervals while a call hangs never put a second thread into the stuck GPU; the other one goes on."""
    config = tmp_path / "config.yaml"
    config.write_text("sampling_interval_ms: 100\n")
    hang = TWO + "fault nvmlDeviceGetTemperature* device 0 hang\n"
    with run_machine(tmp_path, library, TWO, f"--config.file={config}") as machine:
        before = machine.wait_until_observed(0.5, 0, 1)
        machine.scenario.rewrite(hang)
        machine.scenario.wait_for_calls("nvmlDeviceGetTemperature", 6)
        for interval in (110, 120, 130):
            config.write_text(f"sampling_interval_ms: {interval}\n")
            assert machine.exporter.post("/-/reload") == 200
        hung = {"uuid": uuid_of(0), "call": "temperature"}
        machine.exporter.wait_for(lambda s: s.get("gpu_hpc_driver_call_hung_seconds", **hung) is not None)
        machine.exporter.wait_for(lambda s: s.get("gpu_hpc_window_seconds", uuid=uuid_of(1)) == 0.13)
        machine.exporter.wait_for(lambda s: observed(s, uuid_of(1)) > observed(before, uuid_of(1)) + 2)
        assert machine.scenario.stats().hangs == 1
        machine.scenario.rewrite(TWO)
        machine.exporter.wait_for(lambda s: observed(s, uuid_of(0)) > observed(before, uuid_of(0)) + 1)


@pytest.mark.parametrize("function", ["nvmlGpmSampleFree", "nvmlShutdown", "nvmlEventSet*"])
def test_a12_a_hang_outside_of_sampling_is_told(start: Start, function: str) -> None:
    """A12: also what hangs while threads end is named, and never looks healthy while nothing is sampled."""
    machine = start(TWO)
    before = machine.wait_until_observed(0.5, 0, 1)
    machine.scenario.rewrite(TWO + f"mig 1 gi 1 sm 0.75\nfault {function} hang\n")
    samples = machine.exporter.wait_for(lambda s: s.all("gpu_hpc_driver_call_hung_seconds") != {})
    if function == "nvmlShutdown":
        samples = machine.exporter.wait_for(lambda s: s.one("gpu_hpc_up") == 0)
        assert machine.exporter.fetch("/-/ready")[0] == 503
    elif function == "nvmlEventSet*":
        machine.exporter.wait_for(lambda s: observed(s, uuid_of(0)) > observed(before, uuid_of(0)) + 1)
    else:
        assert state(samples, "nvml", uuid_of(0)) != "active"


def test_mig_counters_go_on_after_their_parent_was_away(start: Start) -> None:
    """DESIGN 3.7: state is keyed by UUID, so an instance that returns with its parent goes on counting."""
    text = "device 0\nmig 0 gi 1 sm 0.5\n"
    machine = start(text)
    instance = mig_uuid_of(0, 1)
    before = machine.exporter.wait_for(lambda s: observed(s, instance) > 1)
    machine.scenario.rewrite(text + "fault * board 0 15\n")
    machine.exporter.wait_for(lambda s: s.get("gpu_hpc_gpu_lost", uuid=uuid_of(0)) == 1)
    machine.scenario.rewrite(text)
    after = machine.exporter.wait_for(lambda s: observed(s, instance) > 0)
    assert observed(after, instance) >= observed(before, instance)


def test_a_lost_gpu_returns_while_another_one_hangs(start: Start) -> None:
    """A12: one GPU behind a hung call does not keep another one, which was lost, from being taken up again."""
    three = TWO + "device 2 sm 0.75\n"
    machine = start(three)
    before = machine.wait_until_observed(0.5, 0, 1, 2)
    hang = "fault nvmlDeviceGetTemperature* device 0 hang\n"
    machine.scenario.rewrite(three + hang + "fault * device 1 15\n")
    machine.exporter.wait_for(lambda s: visible(s) == 1)
    machine.scenario.rewrite(three + hang)
    samples = machine.exporter.wait_for(lambda s: visible(s) == 2)
    assert samples.get("gpu_hpc_driver_call_hung_seconds", uuid=uuid_of(0), call="temperature") is not None
    machine.exporter.wait_for(lambda s: observed(s, uuid_of(1)) > observed(before, uuid_of(1)) + 1)
    assert machine.scenario.stats().hangs == 1


def test_n08_driver_counters_never_go_back(start: Start) -> None:
    """N08, B03: a driver that sets its counters back does not make ours fall, which rate() would take for growth."""
    machine = start("device 0 pcie_replay 50 ecc_corrected_volatile 10")
    first = machine.wait_until_observed(1, 0)
    assert first.one("gpu_hpc_ecc_errors_total", severity="corrected", scope="volatile") == 10
    machine.scenario.rewrite("device 0 pcie_replay 50 ecc_corrected_volatile 8")
    later = machine.wait_until_observed(observed(first, uuid_of(0)) + 16, 0)  # it is read every 15 s
    assert later.one("gpu_hpc_ecc_errors_total", severity="corrected", scope="volatile") == 10


def test_sigterm_while_a_reload_waits_for_the_file(tmp_path: Path, library: Path) -> None:
    """A configuration file that became a FIFO is refused at once, and does not keep the exporter from ending."""
    config = tmp_path / "config.yaml"
    config.write_text("sampling_interval_ms: 100\n")
    with run_machine(tmp_path, library, TWO, f"--config.file={config}") as machine:
        machine.wait_until_observed(0.2, 0, 1)
        config.unlink()
        os.mkfifo(config)
        assert machine.exporter.post("/-/reload") == 500
        machine.exporter.process.send_signal(signal.SIGHUP)
        assert machine.exporter.stop() == 0
