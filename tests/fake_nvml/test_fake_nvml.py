"""The fake driver library, seen through the real pynvml: one process for each test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from . import Scenario, ScenarioError, build, functions

if TYPE_CHECKING:
    from pathlib import Path

PRELUDE = """
import ctypes, json, math, os, sys, threading, time
from pynvml import *
def code(function, *args):
    try:
        function(*args)
    except NVMLError as error:
        return error.value
    return 0
def until(check, seconds=60):
    end = time.monotonic() + seconds
    while not (value := check()):
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.002)
    return value
def mean(first, second, *ids):
    get = c_nvmlGpmMetricsGet_t()
    get.version, get.numMetrics, get.sample1, get.sample2 = 1, len(ids), first, second
    for metric, id in zip(get.metrics, ids):
        metric.metricId = id
    nvmlGpmMetricsGet(get)
    return {m.metricId: m.value if m.nvmlReturn == 0 else f"!{m.nvmlReturn}"
            for m in get.metrics[:len(ids)]}
def window(take, *ids):
    'The means over one window that has seen a refresh (DRAM is not NaN).'
    first, second = take(nvmlGpmSampleAlloc()), nvmlGpmSampleAlloc()
    until(lambda: not math.isnan(mean(first, take(second), 10)[10]))
    return mean(first, second, *ids)
def say(value):
    print(json.dumps(value), flush=True)
"""

Make = Callable[[str], Scenario]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the complete library once."""
    return build(tmp_path_factory.mktemp("fake_nvml"))


@pytest.fixture
def make(tmp_path: Path, library: Path) -> Make:
    """Write a scenario."""
    return lambda text: Scenario(tmp_path, library, textwrap.dedent(text))


def command(script: str) -> list[str]:
    """Return the command of a process that runs a script with real pynvml."""
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(script)]


def run(scenario: Scenario, script: str) -> Any:
    """Return what a script says in JSON."""
    result = subprocess.run(
        command(script), env=os.environ | scenario.env, capture_output=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr.decode()
    return json.loads(result.stdout)


class Running:
    """A script that runs beside the test; `say` and `hear` are its two ends."""

    def __init__(self, scenario: Scenario, script: str) -> None:
        self.process = subprocess.Popen(
            command(script),
            env=os.environ | scenario.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> Any:
        """Return the next thing that the script says, within 20 s."""
        assert self.process.stdout is not None
        alarm = threading.Timer(20, self.process.kill)
        alarm.start()
        line = self.process.stdout.readline()
        alarm.cancel()
        assert line, "the script ended or said nothing"
        return json.loads(line)

    def go_on(self) -> None:
        """Let the script's next `input()` return."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


Start = Callable[[Scenario, str], Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start scripts, and end them with the test."""
    started: list[Running] = []

    def starter(scenario: Scenario, script: str) -> Running:
        started.append(Running(scenario, script))
        return started[-1]

    yield starter
    for running in started:
        running.process.kill()
        running.process.communicate()


def test_inventory_of_two_devices(make: Make) -> None:
    """Defaults are an H200; keys override them; indices, UUIDs and PCI ids find devices."""
    scenario = make("""
        driver_version 550.54.15
        device 0
        device 1
          name NVIDIA H100 80GB HBM3
          memory_total 85520809984
          power_mw !3
    """)
    said = run(
        scenario,
        """
        nvmlInit()
        hs = [nvmlDeviceGetHandleByIndex(i) for i in range(nvmlDeviceGetCount())]
        m = nvmlDeviceGetMemoryInfo(hs[1], nvmlMemory_v2)
        v1 = nvmlDeviceGetMemoryInfo(hs[1])
        say({
            "system": [nvmlSystemGetDriverVersion(), nvmlSystemGetNVMLVersion(),
                       nvmlSystemGetCudaDriverVersion(), nvmlSystemGetCudaDriverVersion_v2()],
            "names": [nvmlDeviceGetName(h) for h in hs],
            "uuids": [nvmlDeviceGetUUID(h) for h in hs],
            "pci": [nvmlDeviceGetPciInfo(h).busId for h in hs],
            "back": [nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(hs[1]))),
                     nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId("0000:17:00.0"))],
            "arch": [nvmlDeviceGetArchitecture(hs[0]), *nvmlDeviceGetCudaComputeCapability(hs[0])],
            "power": [nvmlDeviceGetPowerUsage(hs[0]), code(nvmlDeviceGetPowerUsage, hs[1])],
            "fan": code(nvmlDeviceGetFanSpeed, hs[0]),
            "total": m.total, "sum": m.used + m.free + m.reserved,
            "v1": v1.used - m.used - m.reserved,
            "beyond": code(nvmlDeviceGetHandleByIndex, 2),
            "nobody": code(nvmlDeviceGetHandleByUUID, "GPU-nobody"),
        })
        """,
    )
    assert said == {
        "system": ["550.54.15", "13.580.159.04", 13000, 13000],
        "names": ["NVIDIA H200", "NVIDIA H100 80GB HBM3"],
        "uuids": [f"GPU-00000000-aaaa-bbbb-cccc-00000000000{i}" for i in range(2)],
        "pci": ["00000000:17:00.0", "00000000:1E:00.0"],
        "back": [1, 0],
        "arch": [9, 9, 0],
        "power": [76000, 3],
        "fan": 3,
        "total": 85520809984,
        "sum": 85520809984,
        "v1": 0,
        "beyond": 2,
        "nobody": 6,
    }
    assert scenario.calls()["nvmlDeviceGetName"] == 2
    assert scenario.calls(device=1)["nvmlDeviceGetName"] == 1


def test_every_pynvml_wrapper_reaches_the_fake(make: Make) -> None:
    """No wrapper that the exporter may use fails on a plain H200, but for what it lacks."""
    scenario = make("device 0\nprocess 0 pid 4101 memory 5 sm 10")
    said = run(
        scenario,
        """
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(0)
        plain = '''nvmlDeviceGetSerial nvmlDeviceGetVbiosVersion nvmlDeviceGetMigMode
            nvmlDeviceGetMaxMigDeviceCount nvmlDeviceGetVirtualizationMode
            nvmlDeviceGetUtilizationRates nvmlDeviceGetEncoderUtilization
            nvmlDeviceGetDecoderUtilization nvmlDeviceGetEnforcedPowerLimit
            nvmlDeviceGetTotalEnergyConsumption nvmlDeviceGetCurrentClocksEventReasons
            nvmlDeviceGetCurrentClocksThrottleReasons nvmlDeviceGetCurrPcieLinkGeneration
            nvmlDeviceGetMaxPcieLinkGeneration nvmlDeviceGetGpuMaxPcieLinkGeneration
            nvmlDeviceGetCurrPcieLinkWidth nvmlDeviceGetMaxPcieLinkWidth
            nvmlDeviceGetMemoryBusWidth nvmlDeviceGetPcieReplayCounter nvmlDeviceGetRemappedRows
            nvmlDeviceGetComputeRunningProcesses nvmlDeviceGetGraphicsRunningProcesses
            nvmlDeviceGetMPSComputeRunningProcesses nvmlDeviceGetBAR1MemoryInfo
            nvmlDeviceGetPersistenceMode nvmlDeviceGetPerformanceState nvmlDeviceGetEccMode
            nvmlDeviceGetSupportedEventTypes nvmlGpmQueryDeviceSupport nvmlDeviceGetMinorNumber
            nvmlDeviceGetRowRemapperHistogram nvmlDeviceIsMigDeviceHandle'''.split()
        bad = {f: c for f in plain if (c := code(globals()[f], h))}
        more = [(nvmlDeviceGetTemperature, 0), (nvmlDeviceGetTemperatureV, 0),
                (nvmlDeviceGetTemperatureThreshold, 1), (nvmlDeviceGetClockInfo, 1),
                (nvmlDeviceGetMaxClockInfo, 2), (nvmlDeviceGetPcieThroughput, 1),
                (nvmlDeviceGetNvLinkState, 17), (nvmlDeviceGetNvLinkVersion, 0),
                (nvmlDeviceGetNvLinkErrorCounter, 0, 4), (nvmlDeviceGetTotalEccErrors, 1, 0),
                (nvmlDeviceGetProcessUtilization, 0)]
        bad |= {f.__name__: c for f, *a in more if (c := code(f, h, *a))}
        say([bad, nvmlDeviceGetTemperatureV(h, 0), nvmlDeviceGetTemperatureThreshold(h, 1),
             nvmlDeviceGetMaxClockInfo(h, 2), code(nvmlDeviceGetNvLinkState, h, 18),
             code(nvmlDeviceGetAttributes, h), nvmlGpmQueryDeviceSupport(h).isSupportedDevice])
        """,
    )
    assert said == [{}, 31, 89, 3201, 3, 3, 1]


def test_gpm_means_are_exact(make: Make) -> None:
    """Ratios become percent, bytes per second MiB/s, and absent units a code each."""
    scenario = make("""
        device 0
          sm 0.96 tensor 0.93 dram 0.17
          pcie_rx 58900000000 nvlink_rx 377487360 nvlink_links 18
        gpm 13 !3
        gpm 4 137.0
    """)
    said = run(
        scenario,
        """
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(0)
        say(window(lambda s: nvmlGpmSampleGet(h, s), 2, 5, 10, 21, 20, 60, 62, 100, 13, 4, 999))
        """,
    )
    assert said == {
        "2": pytest.approx(96),
        "5": pytest.approx(93),
        "10": pytest.approx(17),
        "21": pytest.approx(58.9e9 / 2**20),
        "20": 0,
        "60": pytest.approx(360),
        "62": pytest.approx(20),
        "100": "!3",
        "13": "!3",
        "4": 137.0,
        "999": "!3",
    }


def test_no_refresh_between_samples(make: Make) -> None:
    """Two samples of one refresh period read 0 for the SMs and NaN for DRAM."""
    scenario = make("gpm_refresh 3600\ndevice 0\n  sm 0.9 dram 0.5 occupancy 0.4")
    said = run(
        scenario,
        """
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(0)
        a, b = (nvmlGpmSampleGet(h, nvmlGpmSampleAlloc()) for _ in range(2))
        say({k: str(v) for k, v in mean(a, b, 2, 3, 10).items()})
        """,
    )
    assert said == {"2": "0.0", "3": "0.0", "10": "nan"}


def test_phases_and_waves_over_time(make: Make) -> None:
    """Values change at the scenario's times, and integrals know when."""
    scenario = make("""
        gpm_refresh 0
        device 0
          sm 1.0 power_mw 1000000 energy_start_mj 5
        phase 0.5 device 0 sm 0.0 temperature 88 fan_speed 30
        wave device 0 utilization_gpu step 0.05 100 0
    """)
    said = run(
        scenario,
        """
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(0)
        first = nvmlGpmSampleGet(h, nvmlGpmSampleAlloc())
        begin = [nvmlDeviceGetTemperature(h, 0), code(nvmlDeviceGetFanSpeed, h)]
        started, energy = time.monotonic(), nvmlDeviceGetTotalEnergyConsumption(h)
        least = time.monotonic()
        utils = {nvmlDeviceGetUtilizationRates(h).gpu for _ in iter(
            lambda: nvmlDeviceGetTemperature(h, 0), 88)}
        utils |= {until(lambda: nvmlDeviceGetUtilizationRates(h).gpu)}
        changed = nvmlGpmSampleGet(h, nvmlGpmSampleAlloc())
        least = time.monotonic() - least
        gained = nvmlDeviceGetTotalEnergyConsumption(h) - energy
        most = time.monotonic() - started
        until(lambda: time.monotonic() - started > most + 0.01)
        last = nvmlGpmSampleGet(h, nvmlGpmSampleAlloc())
        say([begin, sorted(utils), nvmlDeviceGetFanSpeed(h), [least * 1e6, gained, most * 1e6],
             mean(first, changed, 2)[2], mean(changed, last, 2)[2]])
        """,
    )
    begin, utils, fan, (least, gained, most), before, after = said
    assert begin == [31, 3]
    assert utils == [0, 100]
    assert fan == 30
    assert least - 1 <= gained <= most + 1
    assert 0 < before < 100
    assert after == 0


def test_faults_by_count_and_target(make: Make) -> None:
    """Codes for the first calls, after some calls, on one device, with exemptions."""
    scenario = make("""
        device 0
        device 1
        fault nvmlInit* 18 times 3
        fault nvmlDeviceGetHandleBy* device 1 0
        fault * device 1 15 after_calls 5
        fault nvmlDeviceGetName device 0 latency 0.05
    """)
    said = run(
        scenario,
        """
        inits = [code(nvmlInit) for _ in range(4)]
        a, b = map(nvmlDeviceGetHandleByIndex, range(2))
        lost = [code(nvmlDeviceGetPowerUsage, b) for _ in range(7)]
        begin = time.monotonic()
        nvmlDeviceGetName(a)
        slow = time.monotonic() - begin
        say([inits, lost, code(nvmlDeviceGetPowerUsage, a), slow,
             code(nvmlDeviceGetHandleByIndex, 1)])
        """,
    )
    assert said[:3] == [[18, 18, 18, 0], [0, 0, 0, 0, 0, 15, 15], 0]
    assert said[3] >= 0.05
    assert said[4] == 0


def test_hang_ignores_signals_until_released(make: Make, start: Start) -> None:
    """A hanging call blocks one thread only, and a rewrite frees it."""
    text = "device 0\ndevice 1\n"
    scenario = make(text + "fault nvmlDeviceGetTemperature device 1 hang\n")
    running = start(
        scenario,
        """
        import signal
        signal.signal(signal.SIGUSR1, lambda *_: None)
        nvmlInit()
        a, b = map(nvmlDeviceGetHandleByIndex, range(2))
        stuck = threading.Thread(target=lambda: say(["freed", nvmlDeviceGetTemperature(b, 0)]))
        stuck.start()
        say("started")
        input()
        signal.pthread_kill(stuck.ident, signal.SIGUSR1)
        say([nvmlDeviceGetTemperature(a, 0), nvmlDeviceGetPowerUsage(b), stuck.is_alive()])
        stuck.join()
        """,
    )
    assert running.hear() == "started"
    scenario.wait_for_calls("nvmlDeviceGetTemperature", 1)
    running.go_on()
    assert running.hear() == [31, 76000, True]
    assert scenario.stats().hangs == 1
    scenario.rewrite(text)
    assert running.hear() == ["freed", 31]
    assert running.process.wait(60) == 0
    assert scenario.stats().max_inside == {0: 1, 1: 2}


def test_crash(make: Make) -> None:
    """A crash fault aborts the process."""
    scenario = make("device 0\nfault nvmlGpmSampleGet crash")
    script = "nvmlInit(); nvmlGpmSampleGet(nvmlDeviceGetHandleByIndex(0), nvmlGpmSampleAlloc())"
    result = subprocess.run(
        command(script), env=os.environ | scenario.env, capture_output=True, timeout=60, check=False
    )
    assert result.returncode == -6


@pytest.mark.parametrize(
    ("stride", "expected"),
    [
        (24, [[4101, 2**30], [4102, 2**31], [4103, None]]),
        (32, [[4101, 2**30], [0, 4102], [2**32 - 1, 0]]),
    ],
)
def test_process_entries_and_their_stride(make: Make, stride: int, expected: list[list[int | None]]) -> None:
    """A09: entries of 32 bytes read as 24-byte ones are scrambled, without an error."""
    scenario = make(f"""
        process_stride {stride}
        device 0
        process 0 pid 4101 memory 1073741824
        process 0 pid 4102 memory 2147483648
        process 0 pid 4103 memory {"U64NA" if stride == 24 else "3221225472"}
        process 0 pid 4200 memory 7 type graphics
        process 0 pid 4300 memory 7 until 0
    """)
    said = run(
        scenario,
        """
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(0)
        say([[[p.pid, p.usedGpuMemory] for p in f(h)] for f in (
            nvmlDeviceGetComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses)])
        """,
    )
    assert said[0] == expected
    assert said[1] == [[4200, 7]]


def test_mig_instances(make: Make) -> None:
    """Instances have identity, memory, attributes, processes and GPM windows of their own."""
    scenario = make("""
        device 0
          sm 0.5
        mig 0 gi 1 profile_slices 1 sm 0.25
        mig 0 gi 2
          profile_slices 3
          memory_total 75161927680
          dram 0.5
        fault nvmlDeviceGetMemoryInfo* device 0 4
        fault nvmlGpmMigSampleGet mig 0 gi 2 999 after_calls 1
        gpm 3 100.0001 mig 0 gi 1
        process 0 pid 4101 memory 5 gi 1 ci 0
    """)
    said = run(
        scenario,
        """
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(0)
        ms = [nvmlDeviceGetMigDeviceHandleByIndex(h, i) for i in range(2)]
        mig = lambda gi: window(lambda s: nvmlGpmMigSampleGet(h, gi, s), 2, 3)
        say([nvmlDeviceGetMigMode(h), nvmlDeviceGetMaxMigDeviceCount(h),
             code(nvmlDeviceGetMigDeviceHandleByIndex, h, 2),
             [nvmlDeviceGetUUID(m) for m in ms], [nvmlDeviceGetName(m) for m in ms],
             [[nvmlDeviceGetGpuInstanceId(m), nvmlDeviceGetComputeInstanceId(m)] for m in ms],
             [nvmlDeviceGetAttributes(m).gpuInstanceSliceCount for m in ms],
             [nvmlDeviceGetMemoryInfo(m).total for m in ms],
             [code(nvmlDeviceGetMemoryInfo, h), code(nvmlDeviceGetUtilizationRates, h)],
             [len(nvmlDeviceGetComputeRunningProcesses(x)) for x in (h, *ms)],
             mig(1), code(mig, 2), code(mig, 5),
             nvmlDeviceGetIndex(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(ms[1])),
             nvmlDeviceGetIndex(nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(ms[1]))),
             code(nvmlDeviceGetPowerUsage, ms[0])])
        """,
    )
    assert said == [
        [1, 1],
        7,
        6,
        [f"MIG-00000000-aaaa-bbbb-cccc-0000000000a{gi}" for gi in (1, 2)],
        ["NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 MIG 3g.70gb"],
        [[1, 0], [2, 0]],
        [1, 3],
        [150754820096 // 8, 75161927680],
        [4, 3],
        [1, 1, 0],
        {"2": pytest.approx(25), "3": 100.0001},
        999,
        2,
        0,
        1,
        3,
    ]


def test_field_values_and_links(make: Make) -> None:
    """Known fields have values; unknown ones and overridden ones a code each."""
    scenario = make("""
        device 0
          recovery_action 77 nvlink_tx 1024000000
        link 3 state 0 replay 5 version 99
        field 82 !3
        field 164 scope 2 U32NA
        field 300 2.5 type double
    """)
    said = run(
        scenario,
        """
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(0)
        ids = [82, 91, 90, 230, (164, 2), (164, 3), (165, 3), (165, 4), (166, 3), 52, 170, 299, 300,
               186, (138, 0xffffffff)]
        values = nvmlDeviceGetFieldValues(h, ids)
        say([[v.nvmlReturn or (v.value.dVal if v.valueType == 0 else v.value.ullVal)
              for v in values][:-1], values[-1].value.ullVal > 0,
              nvmlDeviceGetNvLinkState(h, 3), nvmlDeviceGetNvLinkErrorCounter(h, 3, 0)])
        """,
    )
    fields = [3, 18, 3, 77, 2**32 - 1, 26562, 0, 1, 99, 5, 3, 3, 2.5, 76000]
    assert said == [fields, True, 0, 5]


def test_missing_symbol(tmp_path: Path) -> None:
    """A symbol left out reads as Function Not Found, the rest stays."""
    missing = ["nvmlDeviceGetMemoryInfo_v2", "nvmlGpmSampleGet"]
    scenario = Scenario(tmp_path, build(tmp_path / "old", missing=missing), "device 0")
    said = run(
        scenario,
        """
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(0)
        say([code(nvmlDeviceGetMemoryInfo, h, nvmlMemory_v2), code(nvmlDeviceGetMemoryInfo, h),
             code(nvmlGpmSampleGet, h, nvmlGpmSampleAlloc())])
        """,
    )
    assert said == [13, 0, 13]
    with pytest.raises(ValueError, match="nvmlNoSuchThing"):
        build(tmp_path, missing=["nvmlNoSuchThing"])


def test_freed_samples_and_stale_handles_are_noticed(make: Make) -> None:
    """Uses of a freed sample fail and count; so do handles from before a shutdown."""
    scenario = make("device 0")
    said = run(
        scenario,
        """
        nvmlInit()
        h = nvmlDeviceGetHandleByIndex(0)
        sample, other = nvmlGpmSampleAlloc(), nvmlGpmSampleAlloc()
        nvmlGpmSampleGet(h, sample)
        nvmlGpmSampleGet(h, other)
        nvmlGpmSampleFree(sample)
        uses = [code(nvmlGpmSampleGet, h, sample), code(mean, sample, other, 2),
                code(nvmlGpmSampleFree, sample)]
        nvmlShutdown()
        after = code(nvmlDeviceGetName, h)
        nvmlInit()
        nvmlDeviceGetName(h)
        nvmlDeviceGetName(nvmlDeviceGetHandleByIndex(0))
        say([uses, after])
        """,
    )
    assert said == [[2, 2, 2], 1]
    stats = scenario.stats()
    assert (stats.freed_sample_uses, stats.live_samples, stats.stale_handles) == (3, 1, 1)


def test_threads_inside_one_device_are_counted(make: Make) -> None:
    """Two threads in one device's GPM calls are seen, one thread for each device is fine."""
    scenario = make("device 0\ndevice 1\nfault nvmlGpmSampleGet latency 0.5")
    run(
        scenario,
        """
        nvmlInit()
        a, b = map(nvmlDeviceGetHandleByIndex, range(2))
        threads = [threading.Thread(target=nvmlGpmSampleGet, args=(h, nvmlGpmSampleAlloc()))
                   for h in (a, a, a, b)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        say(None)
        """,
    )
    assert scenario.stats().gpm_max_inside == {0: 3, 1: 1}
    assert scenario.stats().gpm_together == 3


def test_old_architecture_has_no_gpm(make: Make) -> None:
    """Ampere says that GPM is not supported; a vGPU may say yes and fail (C07)."""
    scenario = make("""
        device 0
          architecture 8
        device 1
          virtualization 2
        fault nvmlGpmSampleGet device 1 999
    """)
    said = run(
        scenario,
        """
        nvmlInit()
        hs = [nvmlDeviceGetHandleByIndex(i) for i in range(2)]
        say([[nvmlGpmQueryDeviceSupport(h).isSupportedDevice for h in hs],
             [code(nvmlGpmSampleGet, h, nvmlGpmSampleAlloc()) for h in hs],
             nvmlDeviceGetVirtualizationMode(hs[1])])
        """,
    )
    assert said == [[0, 1], [3, 999], 2]


def test_rewrite_while_running(make: Make, start: Start) -> None:
    """Order, counts, faults and Xids change under a running process; integrals only grow."""
    text = "device 0\ndevice 1\nfault nvmlDeviceGetName 999 times 1\n"
    scenario = make(text + "  \nxid 0 45 at 0.4\n")
    running = start(
        scenario,
        """
        nvmlInit()
        events = nvmlEventSetCreate()
        hs = [nvmlDeviceGetHandleByIndex(i) for i in range(2)]
        for h in hs:
            nvmlDeviceRegisterEvents(h, nvmlEventTypeXidCriticalError, events)
        first = nvmlEventSetWait_v2(events, 10000)
        idle = code(nvmlEventSetWait_v2, events, 1)
        energy = nvmlDeviceGetTotalEnergyConsumption(hs[0])
        say([code(nvmlDeviceGetName, hs[0]), code(nvmlDeviceGetName, hs[0]), first.eventData, idle])
        got = [nvmlEventSetWait_v2(events, 10000) for _ in range(2)]
        grown = nvmlDeviceGetTotalEnergyConsumption(hs[0]) >= energy
        say([[nvmlDeviceGetUUID(e.device)[-1] + f" {e.eventData}" for e in got],
             nvmlDeviceGetCount(), nvmlDeviceGetUUID(nvmlDeviceGetHandleByIndex(0))[-1],
             code(nvmlDeviceGetName, hs[0]), grown])
        input()
        say(until(lambda: code(nvmlDeviceGetName, hs[0])))
        """,
    )
    assert running.hear() == [999, 0, 45, 10]
    scenario.rewrite(text + "order 1 0\ncount 1\nxid 1 79\nxid 0 31\nphase 0 power_mw 0\n")
    assert running.hear() == [["1 79", "0 31"], 1, "1", 0, True]
    scenario.rewrite(text + "order 1\n")
    running.go_on()
    assert running.hear() == 15
    assert scenario.stats().reloads == 2


def test_bad_scenarios_name_their_line(make: Make, library: Path, tmp_path: Path) -> None:
    """The writer hears of a mistake at once; a process without a scenario has no driver."""
    for text, message in {
        "device 0\nsmm 1": "2: unknown key 'smm'",
        "phase 1 device 3 sm 0": "device 3 is not declared",
        "device 0\nfault nvmlNothing 3": "no function 'nvmlNothing'",
        "device 0\nfault * device 0": "expected",
        "device 0\nsm x": "no value",
        "hello": "unknown word",
        "order 5": "not declared",
    }.items():
        with pytest.raises(ScenarioError, match=message):
            make(text)
    scenario = Scenario(tmp_path, library, "")
    assert run(scenario, "nvmlInit(); say(nvmlDeviceGetCount())") == 0
    scenario.path.unlink()
    assert run(scenario, "say(code(nvmlInit))") == 9


def test_function_list_is_what_is_exported(library: Path) -> None:
    """Every listed function is defined, and nothing else but the checker is."""
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(library / "libnvidia-ml.so.1")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = {line.split()[-1] for line in listing.splitlines()}
    assert exported == functions() | {"fake_nvml_check"}
