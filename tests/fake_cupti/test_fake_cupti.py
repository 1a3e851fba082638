"""The fake CUDA and CUPTI libraries, driven through ctypes: one process for each client."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

import fake_nvml

from . import CuptiScenario, ScenarioError, build, functions

if TYPE_CHECKING:
    from pathlib import Path

PRELUDE = """
import ctypes, json, math, os, sys, threading, time
from ctypes import c_char_p, c_double, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p, byref

cuda = ctypes.CDLL("libcuda.so.1")
cupti = ctypes.CDLL(os.environ.get("SONAME", "libcupti.so.12"))
KINDS = {"z": c_size_t, "p": c_void_p, "i": c_int, "u": c_uint32, "q": c_uint64, "b": c_uint8, "s": c_char_p}
FIELDS = {  # after structSize and pPriv
    "cuptiProfilerInitialize": "",
    "cuptiProfilerDeInitialize": "",
    "cuptiDeviceGetChipName": "z:device s:chip",
    "cuptiProfilerHostInitialize": "i:type s:chip p:availability p:host",
    "cuptiProfilerHostDeinitialize": "p:host",
    "cuptiProfilerHostGetSupportedChips": "z:count p:names",
    "cuptiProfilerHostConfigAddMetrics": "p:host p:metrics z:count",
    "cuptiProfilerHostGetConfigImageSize": "p:host z:image_size",
    "cuptiProfilerHostGetConfigImage": "p:host z:image_size p:image",
    "cuptiProfilerHostGetNumOfPasses": "z:image_size p:image z:passes",
    "cuptiProfilerHostGetMaxNumHardwareMetricsPerPass": "i:type s:chip p:availability z:max",
    "cuptiProfilerHostEvaluateToGpuValues": "p:host p:image z:image_size z:index p:metrics z:count p:values",
    "cuptiPmSamplingEnable": "z:device p:sampler",
    "cuptiPmSamplingDisable": "p:sampler",
    "cuptiPmSamplingSetConfig": "p:sampler z:config_size p:config z:buffer_size q:interval i:trigger i:append",
    "cuptiPmSamplingStart": "p:sampler",
    "cuptiPmSamplingStop": "p:sampler",
    "cuptiPmSamplingDecodeData": "p:sampler p:image z:image_size i:stop_reason b:overflow",
    "cuptiPmSamplingGetCounterAvailability": "z:device z:image_size p:image",
    "cuptiPmSamplingGetCounterDataSize": "p:sampler p:metrics z:count u:max_samples z:image_size",
    "cuptiPmSamplingCounterDataImageInitialize": "p:sampler z:image_size p:image",
    "cuptiPmSamplingGetCounterDataInfo": "p:image z:image_size z:total z:populated z:completed",
    "cuptiPmSamplingCounterDataGetSampleInfo": "p:sampler p:image z:image_size z:index q:start q:end",
}
def struct(name):
    fields = [("size", c_size_t), ("priv", c_void_p)]
    fields += [(field, KINDS[kind]) for kind, field in (word.split(":") for word in FIELDS[name].split())]
    return type(name, (ctypes.Structure,), {"_fields_": fields})
STRUCTS = {name: struct(name) for name in FIELDS}

def call(name, **values):
    'The code and the parameters after a call.'
    params = STRUCTS[name](**values)
    last = params._fields_[-1][0]
    params.size = getattr(type(params), last).offset + getattr(type(params), last).size
    return getattr(cupti, name)(byref(params)), params

def good(name, **values):
    code, params = call(name, **values)
    assert code == 0, (name, code)
    return params

def pointer(thing):
    return ctypes.cast(thing, c_void_p).value

def until(check, seconds=60):
    end = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < end, "nothing came"
        time.sleep(0.001)
    return value

def say(value):
    print(json.dumps(value), flush=True)

def begin():
    assert cuda.cuInit(0) == 0
    good("cuptiProfilerInitialize")

class Config:
    'A host object with its config image.'
    def __init__(self, *metrics, chip=b"GH100"):
        self.names = (c_char_p * len(metrics))(*(metric.encode() for metric in metrics))
        self.host = good("cuptiProfilerHostInitialize", type=1, chip=chip).host
        self.code, _ = call("cuptiProfilerHostConfigAddMetrics", host=self.host, metrics=pointer(self.names),
                            count=len(metrics))
        if self.code:
            return
        self.size = good("cuptiProfilerHostGetConfigImageSize", host=self.host).image_size
        self.image = (c_uint8 * self.size)()
        good("cuptiProfilerHostGetConfigImage", host=self.host, image_size=self.size, image=pointer(self.image))

    def passes(self):
        return good("cuptiProfilerHostGetNumOfPasses", image_size=self.size, image=pointer(self.image)).passes

class Sampler:
    'What a client does with one GPU; `code` is that of the first step that failed.'
    def __init__(self, *metrics, ordinal=0, chip=b"GH100", interval=100_000, trigger=1, append=0,
                 buffer=1 << 28, samples=10_000, start=True):
        self.config = Config(*(metrics or ["m"]), chip=chip)
        self.code, enabled = call("cuptiPmSamplingEnable", device=ordinal)
        if self.code:
            return
        self.it = enabled.sampler
        self.code, _ = call("cuptiPmSamplingSetConfig", sampler=self.it, config_size=self.config.size,
                            config=pointer(self.config.image), buffer_size=buffer, interval=interval,
                            trigger=trigger, append=append)
        if self.code:
            return
        names = self.config.names
        self.size = good("cuptiPmSamplingGetCounterDataSize", sampler=self.it, metrics=pointer(names),
                         count=len(names), max_samples=samples).image_size
        self.image = (c_uint8 * self.size)()
        self.where = {"image": pointer(self.image), "image_size": self.size}
        self.reset()
        if start:
            self.code, _ = call("cuptiPmSamplingStart", sampler=self.it)

    def reset(self):
        good("cuptiPmSamplingCounterDataImageInitialize", sampler=self.it, **self.where)

    def decode(self):
        code, params = call("cuptiPmSamplingDecodeData", sampler=self.it, **self.where)
        return code, params.stop_reason, params.overflow

    def info(self):
        info = good("cuptiPmSamplingGetCounterDataInfo", **self.where)
        assert info.populated == info.completed
        return info.total, info.populated

    def window(self, index):
        sample = good("cuptiPmSamplingCounterDataGetSampleInfo", sampler=self.it, index=index, **self.where)
        names = self.config.names
        values = (c_double * len(names))()
        good("cuptiProfilerHostEvaluateToGpuValues", host=self.config.host, index=index, metrics=pointer(names),
             count=len(names), values=pointer(values), **self.where)
        return [sample.start, sample.end, *values]

    def windows(self):
        return [self.window(index) for index in range(self.info()[1])]

    def take(self):
        'Decodes into an empty image; the windows.'
        self.reset()
        code, _, _ = self.decode()
        assert code == 0, code
        return self.windows()

    def take_some(self, count):
        'Decodes until there are so many windows.'
        taken = []
        until(lambda: taken.extend(self.take()) or len(taken) >= count)
        return taken

    def call(self, name):
        return call("cuptiPmSampling" + name, sampler=self.it)[0]
"""

PLAIN = "costs none\nfirst_sample clean\nfull_image keeps\nbusy_at enable\n"

Make = Callable[[str], CuptiScenario]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the complete libraries once."""
    return build(tmp_path_factory.mktemp("fake_cupti"))


@pytest.fixture
def make(tmp_path: Path, library: Path) -> Make:
    """Write a scenario; less what an H200 does to all clients, which has tests of its own."""
    return lambda text: CuptiScenario(tmp_path, library, PLAIN + textwrap.dedent(text))


def command(script: str) -> list[str]:
    """Return the command of a process that runs a script with the libraries."""
    return [sys.executable, "-c", PRELUDE + textwrap.dedent(script)]


def finish(scenario: CuptiScenario, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, whatever that is."""
    return subprocess.run(
        command(script), env=os.environ | scenario.env | env, capture_output=True, text=True, timeout=60, check=False
    )


def run(scenario: CuptiScenario, script: str, **env: str) -> Any:
    """Return what a script says in JSON."""
    result = finish(scenario, script, **env)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


class Running:
    """A script that runs beside the test."""

    def __init__(self, scenario: CuptiScenario, script: str) -> None:
        self.process = subprocess.Popen(
            command(script), env=os.environ | scenario.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
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


Start = Callable[[CuptiScenario, str], Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start scripts, and end them with the test."""
    started: list[Running] = []

    def starter(scenario: CuptiScenario, script: str) -> Running:
        started.append(Running(scenario, script))
        return started[-1]

    yield starter
    for running in started:
        running.process.kill()
        running.process.communicate()


def wait_for_hangs(scenario: CuptiScenario, count: int) -> None:
    """Wait until a call is inside a `hang` fault."""
    deadline = time.monotonic() + 60
    while scenario.stats().hangs < count:
        assert time.monotonic() < deadline, "nothing hangs"
        time.sleep(0.005)


def touch(windows: list[list[Any]]) -> bool:
    """Whether each window begins where the one before it ends."""
    return all(before[1] == after[0] for before, after in pairwise(windows))


UUIDS = [f"GPU-{digit * 8}-1111-2222-3333-444444444444" for digit in "abc"]
THREE_GPUS = "driver_cuda 12080\n" + "".join(
    f'device {index} uuid {uuid} name "GPU {index}"\n' for index, uuid in enumerate(UUIDS)
)
INVENTORY = """
code = cuda.cuInit(0)
count, version, uuid, name = c_int(-1), c_int(), (c_uint8 * 16)(), ctypes.create_string_buffer(64)
cuda.cuDriverGetVersion(byref(version))
cuda.cuDeviceGetCount(byref(count))
found = []
for ordinal in range(count.value):
    device = c_int()
    assert cuda.cuDeviceGet(byref(device), ordinal) == 0
    assert cuda.cuDeviceGetUuid_v2(uuid, device) == cuda.cuDeviceGetUuid(uuid, device) == 0
    assert cuda.cuDeviceGetName(name, len(name), device) == 0
    found.append([bytes(uuid).hex(), name.value.decode()])
say([code, version.value, found, cuda.cuDeviceGet(byref(device), 7) if found else None])
"""


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, [0, 1, 2]),
        ({"CUDA_VISIBLE_DEVICES": f"{UUIDS[2]},{UUIDS[0]}"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": f"{UUIDS[2]},{UUIDS[0]}", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0, 2]),
        ({"CUDA_VISIBLE_DEVICES": f"{UUIDS[1]},GPU-unknown,{UUIDS[0]}"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, [1, 0]),
    ],
)
def test_cuda_sees_the_visible_devices(make: Make, env: dict[str, str], expected: list[int]) -> None:
    """UUIDs are the bytes of their text; a list entry that names nothing ends the list."""
    found = [[UUIDS[index][4:].replace("-", ""), f"GPU {index}"] for index in expected]
    assert run(make(THREE_GPUS), INVENTORY, **env) == [0, 12080, found, 101]


def test_cuda_without_devices(make: Make) -> None:
    """Nothing is visible: cuInit says so and the rest is not initialised."""
    said = run(make(THREE_GPUS), INVENTORY.replace("count.value", "max(0, count.value)"), CUDA_VISIBLE_DEVICES="")
    assert said == [100, 12080, [], None]


def test_versions_and_texts(make: Make) -> None:
    """Versions come from the scenario; error texts are NVIDIA's names."""
    said = run(
        make("version 130100\ndevice 0 chip GB100"),
        """
        version, text, seen = c_uint32(), c_char_p(), []
        for function, code in [(cupti.cuptiGetResultString, 26), (cuda.cuGetErrorName, 100),
                               (cuda.cuGetErrorString, 999)]:
            assert function(code, byref(text)) == 0
            seen.append(text.value.decode())
        before = call("cuptiPmSamplingEnable")[0]
        begin()
        chips = good("cuptiProfilerHostGetSupportedChips")
        names = ctypes.cast(chips.names, ctypes.POINTER(c_char_p))[:chips.count]
        size = good("cuptiPmSamplingGetCounterAvailability", device=0).image_size
        image = (c_uint8 * size)()
        good("cuptiPmSamplingGetCounterAvailability", device=0, image_size=size, image=pointer(image))
        good("cuptiProfilerHostInitialize", type=1, chip=b"GB100", availability=pointer(image))
        say([cupti.cuptiGetVersion(byref(version)), version.value, seen, before,
             good("cuptiDeviceGetChipName", device=0).chip.decode(), call("cuptiDeviceGetChipName", device=1)[0],
             b"GH100" in names, cupti.cuptiGetResultString(1234, byref(text))])
        """,
    )
    names = ["CUPTI_ERROR_HARDWARE_BUSY", "CUDA_ERROR_NO_DEVICE", "unknown error"]
    assert said == [0, 130100, names, 15, "GB100", 1, True, 1]


def test_windows_come_exactly_once_and_touch(make: Make) -> None:
    """Over several decodes windows are contiguous, as long as asked, and have the scenario's values."""
    scenario = make("""
        device 0 offset_ns -5000000000
        value 0 dram__bytes_*.sum 2.1e12/s
        value 0 dram__bytes_write.sum 1e12/s
        value * sm__cycles_active.avg.pct_of_peak_sustained_elapsed 96.5 odd nan
        value 0 other 1 from 3600
    """)
    said = run(
        scenario,
        """
        begin()
        sampler = Sampler("dram__bytes_read.sum", "dram__bytes_write.sum",
                          "sm__cycles_active.avg.pct_of_peak_sustained_elapsed", "odd", "other")
        started = time.time_ns()
        decodes = [sampler.take_some(40) for _ in range(5)]
        assert sampler.call("Stop") == 0
        decodes.append(sampler.take())
        say([started, decodes, sampler.take(), sampler.call("Disable")])
        """,
    )
    started, decodes, rest, disabled = said
    windows = [window for decode in decodes for window in decode]
    assert len(windows) >= 200
    assert {end - begin for begin, end, *_ in windows} == {100_000}
    assert touch(windows)
    assert abs(windows[0][0] - (started - 5_000_000_000)) < 1_000_000_000
    read, write, active, odd, other = windows[0][2:]
    assert (read, write, active, other) == (pytest.approx(2.1e8), pytest.approx(1e8), 96.5, 0)
    assert math.isnan(odd)
    assert (rest, disabled) == ([], 0)
    stats = scenario.stats()
    assert (stats.windows, stats.lost_windows, stats.live_samplers) == ({0: len(windows)}, {}, 0)
    assert stats.max_inside == {0: 1}
    assert scenario.calls(device=0)["cuptiPmSamplingStart"] == 1


def test_full_image(make: Make) -> None:
    """A full image stops the decode, what is left waits, and a decode appends to what is there."""
    said = run(
        make("device 0"),
        """
        begin()
        sampler = Sampler(samples=50)
        first = until(lambda: sampler.decode()[1] == 1 and sampler.windows())
        info, again = sampler.info(), sampler.decode()
        sampler.call("Stop")
        rest = []
        while True:
            sampler.reset()
            reason = sampler.decode()[1]
            rest += sampler.windows()
            if reason == 2:
                break
        say([first, info, again, rest])
        """,
    )
    first, info, again, rest = said
    assert (len(first), info, again) == (50, [50, 50], [0, 1, 0])
    windows = first + rest
    assert touch(windows)


def test_full_image_that_drops(make: Make) -> None:
    """What does not fit is gone, and the next decode answers 0 with what came since."""
    said = run(
        make("device 0\nfull_image drops"),
        """
        begin()
        sampler = Sampler(samples=10)
        begun = time.monotonic()
        until(lambda: time.monotonic() - begun > 0.005)
        sampler.call("Stop")
        say([sampler.decode()[1], sampler.info()[1], sampler.decode()[1], sampler.take(), sampler.decode()[1]])
        """,
    )
    assert said == [1, 10, 0, [], 2]


def test_a_session_of_an_h200(make: Make) -> None:
    """What each client meets: a first sample from long ago, a gap after it, calls that take their time."""
    said = run(
        make("device 0\nfirst_sample garbage\ncosts real"),
        """
        begin()
        def took(action):
            begun = time.monotonic()
            return action(), time.monotonic() - begun
        sampler, setup = took(lambda: Sampler(interval=1_000_000))
        before = time.monotonic_ns()
        windows = sampler.take_some(10)
        _, stopping = took(lambda: sampler.call("Stop"))
        sampler.call("Start")
        again = sampler.take_some(1)
        most = time.monotonic_ns() - before
        say([[[w[0] - windows[0][1], w[1] - windows[0][1]] for w in windows], again[0][0] - windows[-1][1], most,
             setup, stopping, took(lambda: sampler.call("Disable"))[1]])
        """,
    )
    windows, again, most, setup, stopping, disabling = said
    assert windows[0][0] < -180e9
    assert windows[1] == [1400, 1_001_400]
    assert touch(windows[1:])
    assert 0 < again < most
    assert (setup > 0.24, stopping > 0.0035, disabling > 0.065) == (True, True, True)


def test_overflow_keeps_the_latest(make: Make) -> None:
    """A hardware buffer for ten windows holds the latest ten."""
    scenario = make("device 0 bytes_per_window 1000")
    said = run(
        scenario,
        """
        begin()
        sampler = Sampler(append=1, buffer=10_999)
        begun = time.time_ns()
        until(lambda: time.time_ns() - begun > 50_000_000)
        sampler.call("Stop")
        decoded, windows = sampler.decode(), sampler.windows()
        numbers = [[round((w[0] - windows[0][0]) / 1e5), w[1] - w[0]] for w in windows]
        say([decoded, numbers, sampler.decode()[2], windows[0][0] - begun > 45_000_000])
        """,
    )
    assert said == [[0, 2, 1], [[number, 100_000] for number in range(10)], 0, True]
    assert scenario.stats().lost_windows[0] >= 40


def test_overflow_of_the_oldest_ends_the_session(make: Make) -> None:
    """With KEEP_OLDEST no decode succeeds after an overflow, until Stop and Start."""
    said = run(
        make("device 0 bytes_per_window 1000"),
        """
        begin()
        begun, sampler = time.monotonic(), Sampler(interval=1_000_000, buffer=10_000)
        until(lambda: time.monotonic() - begun > 0.05)
        codes = [sampler.decode()[0], *sampler.decode(), sampler.info()[1]]
        codes += [sampler.call("Stop"), sampler.decode()[0], sampler.call("Start")]
        until(lambda: sampler.decode()[0] == 0 and sampler.info()[1])
        say(codes)
        """,
    )
    assert said == [8, 8, 2, 1, 0, 0, 8, 0]


def test_one_owner_for_each_gpu(make: Make, start: Start) -> None:
    """A second process is refused until the first one dies, even by SIGKILL."""
    scenario = make("device 0\ndevice 1")
    client = """
        begin()
        say([Sampler(ordinal=0).code, call("cuptiPmSamplingEnable", device=0)[0]])
        input()
    """
    first = start(scenario, client)
    assert first.hear() == [0, 7]
    second = "begin(); say([Sampler(ordinal=0).code, Sampler(ordinal=1).code])"
    assert run(scenario, second) == [26, 0]
    first.process.send_signal(signal.SIGKILL)
    first.process.wait()
    assert run(scenario, second) == [0, 0]
    with scenario.other_owner(1):
        assert run(scenario, second) == [0, 26]
    with scenario.other_owner(0):
        scenario.rewrite("device 0\nbusy_at start")
        script = "begin(); s = Sampler(start=False); say([s.code, s.call('Start'), s.call('Stop')])"
        assert run(scenario, script) == [0, 26, 7]
        scenario.rewrite("device 0")
        calls = scenario.calls().get("cuptiPmSamplingSetConfig", 0)
        assert run(scenario, "begin(); say(Sampler().code)") == 26
        assert scenario.calls()["cuptiPmSamplingSetConfig"] == calls + 1


def test_fault_codes(make: Make) -> None:
    """The first due line wins; calls before `after_calls` and beyond `times` go through."""
    scenario = make("""
        device 0
        device 1
        fault cuptiPmSamplingDecodeData device 1 35
        fault cuptiPmSamplingDecodeData after_calls 1 times 2 999
        fault cuptiProfilerHost*Passes latency 0.05
    """)
    said = run(
        scenario,
        """
        begin()
        samplers = [Sampler(ordinal=ordinal) for ordinal in range(2)]
        codes = [[sampler.decode()[0] for _ in range(4)] for sampler in samplers]
        begun = time.monotonic()
        samplers[0].config.passes()
        say([codes, time.monotonic() - begun >= 0.05])
        """,
    )
    assert said == [[[0, 999, 999, 0], [35, 35, 35, 35]], True]


@pytest.mark.parametrize(("action", "status"), [("crash", -signal.SIGSEGV), ("oom", -signal.SIGKILL), ("exit 3", 3)])
def test_fault_ends_the_process(make: Make, action: str, status: int) -> None:
    """Each kind of sudden death can be had."""
    scenario = make(f"device 0\nfault cuptiPmSamplingStart {action}")
    assert finish(scenario, "begin(); Sampler()").returncode == status


def test_hang_ends_with_its_line(make: Make, start: Start) -> None:
    """A hanging call ignores SIGTERM and goes on once the scenario lets it; SIGKILL ends it before."""
    hanging = "device 0\nfault cuptiPmSamplingGetCounterDataInfo hang\n"
    scenario = make(hanging)
    client = start(scenario, "begin(); s = Sampler(); say(s.info()[1])")
    wait_for_hangs(scenario, 1)
    scenario.rewrite("device 0")
    assert client.hear() == 0
    client.process.wait()  # it owns the GPU
    scenario.rewrite(hanging)
    client = start(scenario, "begin(); Sampler().info()")
    wait_for_hangs(scenario, 2)
    client.process.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        client.process.wait(0.1)
    client.process.kill()
    assert client.process.wait(60) == -signal.SIGKILL


def test_no_samples_and_flood(make: Make) -> None:
    """A metric of an absent unit silences a GPU for ever, or floods its buffer."""
    scenario = make("""
        device 0
        device 1
        no_samples device 0 when nvl*__l2*
        flood pcie__flood*
    """)
    said = run(
        scenario,
        """
        begin()
        silent, fine = Sampler("a", "nvlrx__l2"), Sampler("nvlrx__l2", ordinal=1)
        assert fine.take_some(5)
        seen = [silent.decode(), silent.info()[1]]
        silent.call("Disable")
        flooded = Sampler("pcie__flood.sum")
        until(lambda: len(fine.take()))
        code, _, overflow = flooded.decode()
        say([*seen, code, overflow, flooded.info()[1]])
        """,
    )
    assert said == [[0, 2, 0], 0, 8, 1, 0]


def test_missing_and_double_windows(make: Make) -> None:
    """`drop` makes gaps, `duplicate` brings windows again with the next decode, `stop_reason` lies."""
    said = run(
        make("device 0\ndrop every 5\nduplicate every 7\nstop_reason 99"),
        """
        begin()
        sampler = Sampler()
        windows = sampler.take_some(40)
        sampler.call("Stop")
        windows += sampler.take()
        windows += sampler.take()
        reason = sampler.decode()[1]
        first = min(windows)[0]
        say([reason, [round((start - first) / 1e5) for start, *_ in windows]])
        """,
    )
    reason, numbers = said
    expected = [number for number in range(max(numbers) + 1) if number % 5 != 4]
    assert reason == 99
    assert sorted(set(numbers)) == expected
    assert {n for n in numbers if numbers.count(n) == 2} == {n for n in expected if n % 7 == 6}


CONFIGURE = """
begin()
def code(*args, **kwargs):
    sampler = Sampler(*args, start=False, **kwargs)
    assert sampler.call("Disable") == 0
    return sampler.code
say([code(ordinal=o, trigger=t, append=a) for o in range(3) for t in (0, 1) for a in (0, 1)])
"""


def test_trigger_modes_of_old_chips(make: Make) -> None:
    """Turing has neither a time trigger nor KEEP_LATEST; GA100 lacks the trigger only."""
    scenario = make("device 0 chip TU102\ndevice 1 chip GA100\ndevice 2 chip GH100")
    assert run(scenario, CONFIGURE) == [0, 27, 27, 27, 0, 0, 27, 27, 0, 0, 0, 0]


def test_sysclk_windows_jitter_but_touch(make: Make) -> None:
    """An interval in clocks becomes time through the scenario's clock, nearly evenly."""
    said = run(
        make("device 0 sysclk 1e9"),
        """
        begin()
        say(Sampler(trigger=0, interval=200_000).take_some(50))
        """,
    )
    widths = {end - begin for begin, end, _ in said}
    assert touch(said)
    assert len(widths) > 1
    assert all(abs(width - 200_000) <= 201 for width in widths)


def test_metric_names_and_passes(make: Make) -> None:
    """Unknown names are refused with the line's code and spoil their object; some sets need several passes."""
    scenario = make("""
        max_metrics 3
        device 0
        unknown_metric gone*
        unknown_metric newer* chip TU* code 17
        passes 4 when heavy*
    """)
    said = run(
        scenario,
        """
        begin()
        heavy = Sampler("heavy", start=False)
        spoilt = Config("gone").host
        fine = (c_char_p * 1)(b"fine")
        say([Config("a", "gone.sum").code, Config("newer").code, Config("newer", chip=b"TU102").code,
             Config(*"abc").passes(), Config(*"abcd").passes(), heavy.config.passes(), heavy.code,
             call("cuptiProfilerHostInitialize", type=1, chip=b"XX100")[0],
             call("cuptiProfilerHostConfigAddMetrics", host=spoilt, metrics=pointer(fine), count=1)[0],
             call("cuptiProfilerHostGetConfigImageSize", host=spoilt)[0],
             good("cuptiProfilerHostGetMaxNumHardwareMetricsPerPass", type=1, chip=b"GH100").max])
        """,
    )
    assert said == [1, 0, 17, 1, 2, 4, 27, 1, 999, 999, 3]


def test_values_follow_time_and_rewrites(make: Make, start: Start) -> None:
    """`phase`, `from` and `until` change values in time; a rewrite does not change the past."""
    scenario = make("""
        device 0
        value 0 m 1
        value 0 n 5 from 0.01 until 0.02
        phase 0.01 0 m 2 k 7
    """)
    client = start(
        scenario,
        """
        begin()
        sampler = Sampler("m", "n", "k")
        say(sampler.take_some(300))
        input()
        say(until(lambda: [w for w in sampler.take() if w[2] == 3]))
        """,
    )
    seen = [values for _, _, *values in client.hear()]
    assert seen[:99] == [[1, 0, 0]] * 99
    assert seen[101:199] == [[2, 5, 7]] * 98
    assert seen[201:299] == [[2, 0, 7]] * 98
    scenario.rewrite("device 0\nvalue 0 m 3")
    client.go_on()
    assert client.hear()[0][2:] == [3, 0, 0]
    assert scenario.stats().reloads == 1


MISUSES = {
    "was not initialised": "s = Sampler(start=False); s.image[0] ^= 1; s.decode()",
    "the config image changed": "s = Sampler(); s.config.image[-9] ^= 1; s.decode()",
    "was disabled before": "s = Sampler(); s.call('Disable'); s.decode()",
    "was deinitialised before": "h = Config('m').host; [good('cuptiProfilerHostDeinitialize', host=h) for _ in '12']",
}


@pytest.mark.parametrize("message", MISUSES)
def test_misuse_ends_the_process(make: Make, message: str) -> None:
    """What corrupts memory in life aborts here, with a message."""
    scenario = make("device 0")
    result = finish(scenario, f"begin()\n{MISUSES[message]}")
    assert result.returncode == -signal.SIGABRT
    assert message in result.stderr


def test_bad_calls_get_codes(make: Make) -> None:
    """Calls that CUPTI refuses are refused."""
    said = run(
        make("device 0"),
        """
        begin()
        s = Sampler(start=False)
        params = STRUCTS["cuptiPmSamplingStart"](size=16, sampler=s.it)
        values = (c_double * 1)()
        other = (c_char_p * 1)(b"other")
        say({
            "stop before start": s.call("Stop"),
            "decode before start": s.decode()[0],
            "short struct": cupti.cuptiPmSamplingStart(byref(params)),
            "start": s.call("Start"),
            "start twice": s.call("Start"),
            "not configured": call("cuptiPmSamplingSetConfig", sampler=s.it)[0],
            "strange object": call("cuptiPmSamplingStart", sampler=pointer(values))[0],
            "no such device": call("cuptiPmSamplingEnable", device=1)[0],
            "no such sample": call("cuptiPmSamplingCounterDataGetSampleInfo", sampler=s.it, index=0, **s.where)[0],
            "other metric": until(lambda: s.take()) and call(
                "cuptiProfilerHostEvaluateToGpuValues", host=s.config.host, index=0, metrics=pointer(other),
                count=1, values=pointer(values), **s.where)[0],
        })
        """,
    )
    assert said == {
        "stop before start": 7,
        "decode before start": 7,
        "short struct": 1,
        "start": 0,
        "start twice": 7,
        "not configured": 7,
        "strange object": 1,
        "no such device": 1,
        "no such sample": 1,
        "other metric": 17,
    }


def test_threads_inside_one_gpu_are_counted(make: Make) -> None:
    """Two threads that call at once show in the statistics."""
    scenario = make("device 0\nfault cuptiDeviceGetChipName latency 0.2")
    run(
        scenario,
        """
        begin()
        threads = [threading.Thread(target=call, args=["cuptiDeviceGetChipName"]) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        say(0)
        """,
    )
    assert scenario.stats().max_inside == {0: 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device 0\nfoo", "2: unknown word 'foo'"),
        ("device 0 uuid GPU-1", "1: 'GPU-1' is no UUID"),
        ("value 0 m 1", "1: device 0 is not declared above"),
        ("device 0\nvalue 0 m x", "2: value: 'x' is no number"),
        ("device 0\nfault cuptiNothing 1", "2: the fake has no function"),
        ("device 0\nfault cuInit", "2: code, hang, crash"),
        ("device 0\npasses 2 device 0", "2: 'device' not understood"),
        ("device 0\n\ndrop 3", "3: 'every' expected"),
        ("version x", "1: version: 'x' is no number"),
        ("busy_at noon", "1: 'setconfig' expected"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, library: Path, text: str, message: str) -> None:
    """A scenario that cannot be read is refused at once."""
    with pytest.raises(ScenarioError, match=message):
        CuptiScenario(tmp_path, library, text)


def test_other_version_without_a_function(tmp_path: Path) -> None:
    """The soname can be another one and functions can lack; fake_nvml fits into the same directory."""
    library = build(tmp_path / "lib", soname="libcupti.so.13", missing=["cuptiPmSamplingGetCounterAvailability"])
    fake_nvml.build(library)
    assert {"libcupti.so.13", "libnvperf_host.so", "libnvidia-ml.so.1"} <= {p.name for p in library.iterdir()}
    nvml = fake_nvml.Scenario(tmp_path, library, "device 0")
    cupti = CuptiScenario(tmp_path, library, "device 0")
    said = run(
        cupti,
        """
        import pynvml
        pynvml.nvmlInit()
        begin()
        uuid = (c_uint8 * 16)()
        cuda.cuDeviceGetUuid(uuid, 0)
        say([pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)), bytes(uuid).hex(),
             hasattr(cupti, "cuptiPmSamplingGetCounterAvailability"), Sampler().code])
        """,
        **nvml.env,
        SONAME="libcupti.so.13",
    )
    assert said[0].replace("-", "") == "GPU" + said[1]
    assert said[2:] == [False, 0]
    with pytest.raises(ValueError, match="never exports cuptiNothing"):
        build(tmp_path, missing=["cuptiNothing"])
    assert "cuptiNothing" not in functions()


def test_function_list_is_what_is_exported(library: Path) -> None:
    """Every listed function is defined, and nothing else is."""
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", str(library / "libcuda.so.1"), str(library / "libcupti.so.12")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    exported = {line.split()[-1] for line in listing.splitlines() if " T " in line}
    assert exported == functions()


def test_no_scenario_no_driver(make: Make) -> None:
    """A process without a scenario finds no device."""
    scenario = make("device 0")
    scenario.path.unlink()
    assert run(scenario, "say([cuda.cuInit(0), call('cuptiProfilerInitialize')[0]])") == [100, 15]
