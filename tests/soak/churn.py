"""Lets things come and go on the soaking node as the calendar says, and notes what has truly happened."""

from __future__ import annotations

import heapq
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from random import Random
from typing import Final

import grpc

from e2e.machine import mig_uuid_of, uuid_of
from exporter_process import Exporter
from fake_kubelet import Container, Pod
from soak.figures import children
from soak.hostile import TORN_S, HostileFiles
from soak.jobs import Jobs
from soak.node import DIVIDED, FRAGILE, GPUS, STEADY, Instance, Node
from soak.truth import Truth
from soak.week import Calendar

TICK_S: Final = 0.5
_WINDOW_S: Final = 1.0
JOB_S: Final = 28.6
"""Mean length of a job: four hours of life."""
_NOTICED_S: Final = 16.0
"""Within which the exporter has listed the GPUs anew and looked at the agents' files."""
_XIDS: Final = (13, 31, 43, 94)
_LOST: Final = 15
_FAILED: Final = 999
"""NVML's `unknown`, which nothing but failed readings answers here."""
_RELEASED_S: Final = 3
_PAUSED_S: Final = 4
_RECOVERY_S: Final = 4.0
"""After a request for control, before the next one."""
_RELOADS: Final = (
    ("gauge_window_seconds: 20\n", 200),
    ("no_such_key: 1\n", 500),
    ("sampling_interval_ms: 200\n", 200),
    ("sampling_interval_ms: [\n", 500),
)


class Churn:
    """Events of one run. Its `tick` is to be called again and again."""

    def __init__(self, node: Node, exporter: Exporter, seconds: float, seed: int) -> None:
        self.truth = Truth()
        self.answers: list[str] = []
        """Answers to requests for control that were not as expected."""
        self._node = node
        self._exporter = exporter
        self._seconds = seconds
        self._chance = Random(seed)
        self._calendar = Calendar(seconds, self._chance)
        self._jobs = Jobs(node, self.truth, self._chance)
        self._hostile = HostileFiles(node.agents)
        self._kmsg = os.open(node.kmsg, os.O_RDWR)
        self._numbers = count()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._failing: dict[int, tuple[str, int]] = {}
        self._away: set[int] = set()
        """GPUs on which no job may begin."""
        self._controls: deque[str] = deque()
        self._control_free_s = 0.0
        self._profiled: deque[int] = deque()
        """GPUs whose counters the exporter has just left to others."""
        self._asked: list[Future[None]] = []
        self._operator = ThreadPoolExecutor(1, thread_name_prefix="operator")
        self._began_s = time.monotonic()
        self._next_window_s = self._began_s
        self._written = node.driver.text()
        self._events: dict[str, Callable[[], bool]] = {
            "job": self._begin_job,
            "short process": self._short_process,
            "pod": self._pod,
            "xid": self._xid,
            "failed reading": self._failed_reading,
            "hung call": self._hung_call,
            "lost GPU": self._lose,
            "MIG change": self._divide,
            "kubelet trouble": self._trouble_kubelet,
            "hostile agent file": self._hostile_file,
        }

    @property
    def is_over(self) -> bool:
        """Whether the time of the calendar has come to its end."""
        return time.monotonic() - self._began_s >= self._seconds

    def tick(self) -> None:
        """Do what is due, and tell the driver of it at once."""
        now_s = time.monotonic()
        while self._later and self._later[0][0] <= now_s:
            heapq.heappop(self._later)[2]()
        for kind in self._calendar.due(now_s - self._began_s):
            self._begin(kind)
        self._end_failures()
        self._control(now_s)
        if now_s >= self._next_window_s:
            self._next_window_s = now_s + _WINDOW_S
            self._jobs.work()
        self._tell_driver()

    def calm(self) -> bool:
        """End what runs, and let what goes on come to its end; whether the node is as it was at first."""
        for job in list(self._jobs.running):
            self._jobs.end(job)
        for process in list(self._node.driver.processes.values()):
            self._jobs.end_process(process)
        self._node.kubelet.pods = ()
        self._controls.clear()
        self._calendar.end()
        self.tick()
        goes_on = self._node.driver.processes or self._node.driver.lines or self._kubelet_suffers
        return not (goes_on or self._is_asked)

    def close(self) -> None:
        """Let go of everything."""
        self._operator.shutdown()
        os.close(self._kmsg)
        for asked in self._asked:
            asked.result()

    def _begin(self, kind: str) -> None:
        act = self._events.get(kind)
        if act is None:
            self._controls.append(kind)
        else:
            self.truth.happened[kind] += act()

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._numbers), action))

    def _tell_driver(self) -> None:
        text = self._node.driver.text()
        if text != self._written:
            self._node.nvml.rewrite(text)
            self._written = text

    def _line(self, line: str, seconds: float) -> None:
        """A line of the scenario that holds for so long."""
        lines = self._node.driver.lines
        lines[line] = None
        self._after(seconds, lambda: lines.pop(line, None))

    # What jobs do

    def _begin_job(self) -> bool:
        places = [place for place in self._node.places() if place[0] not in self._away]
        wanted = self._chance.choice((1, 1, 1, 2, 4))
        job = self._jobs.begin(self._chance.sample(places, min(wanted, len(places))))
        self._after(min(self._chance.expovariate(1 / JOB_S), 4 * JOB_S), lambda: self._jobs.end(job))
        return True

    def _short_process(self) -> bool:
        device, instance, _ = self._chance.choice([p for p in self._node.places() if p[0] not in self._away])
        process = self._jobs.process(device, instance)
        self._after(self._chance.uniform(0.5, 4), lambda: self._jobs.end_process(process))
        return True

    def _pod(self) -> bool:
        number = next(self._numbers)
        gpu = uuid_of(self._chance.randrange(GPUS))
        devices = [("nvidia.com/gpu", [gpu])] if number % 3 == 0 else []
        pod = Pod(f"pod-{number}", [Container("main", devices)], namespace=f"team-{number % 5}")
        self._node.kubelet.pods = [*self._node.kubelet.pods, pod]
        self._after(self._chance.uniform(5, 60), lambda: self._end_pod(pod))
        return True

    def _end_pod(self, pod: Pod) -> None:
        self._node.kubelet.pods = [other for other in self._node.kubelet.pods if other is not pod]

    # What befalls GPUs

    def _xid(self) -> bool:
        device, xid = self._chance.randrange(GPUS), self._chance.choice(_XIDS)
        line = f"xid {device} {xid}"
        if line in self._node.driver.lines:
            return False
        self._line(line, 6)
        pci = f"0000:{0x17 + 7 * device:02x}:00"
        text = f"4,1,1,-;NVRM: Xid (PCI:{pci}): {xid}, pid=1234, name=python, Ch 00000001\n"
        os.write(self._kmsg, text.encode())
        self.truth.xids[uuid_of(device)] += 1
        return True

    def _failed_reading(self) -> bool:
        free = [device for device in STEADY if device not in self._failing]
        if not free:
            return False
        device = self._chance.choice(free)
        # The time only tells it from other lines of its kind, whose count would go on.
        line = f"fault nvmlDeviceGetPowerUsage device {device} {_FAILED} times 1 from {next(self._numbers) / 1e6:.6f}"
        self._node.driver.lines[line] = None
        self._failing[device] = (line, self._power_calls(device))
        self.truth.failed_readings += 1
        return True

    def _end_failures(self) -> None:
        """Take back the faults that must have been met."""
        for device, (line, calls) in list(self._failing.items()):
            if self._power_calls(device) >= calls + 3:  # one may have come before the scenario was read again
                del self._failing[device], self._node.driver.lines[line]

    def _power_calls(self, device: int) -> int:
        return self._node.nvml.calls(device).get("nvmlDeviceGetPowerUsage", 0)

    def _hung_call(self) -> bool:
        device = None if self._is_asked else self._take(FRAGILE)
        if device is None:
            return False
        self._line(f"fault nvmlDeviceGetPowerUsage device {device} hang from {next(self._numbers) / 1e6:.6f}", 6)
        self._give_back(device, _NOTICED_S + 6)
        return True

    def _lose(self) -> bool:
        device = self._take(FRAGILE)
        if device is None:
            return False
        self._jobs.end_those_on(device)
        self._line(f"fault * device {device} {_LOST}", 8)
        self._give_back(device, _NOTICED_S + 8)
        return True

    def _divide(self) -> bool:
        """Partition a GPU, or make it whole again once what ran there has been looked at."""
        device = self._take(DIVIDED)
        if device is None:
            return False
        self._jobs.end_those_on(device)
        if device in self._node.driver.instances:
            self._after(_NOTICED_S, lambda: self._make_whole(device))
            self._give_back(device, 2 * _NOTICED_S)
        else:
            number = next(self._numbers)
            uuids = [mig_uuid_of(device, gi) for gi in range(1, self._chance.choice((2, 3, 7)) + 1)]
            if number % 2:  # as in life, where a new instance has a new UUID
                uuids = [f"MIG-{number:08x}-dddd-eeee-ffff-{gi:012x}" for gi in range(1, len(uuids) + 1)]
            self._node.driver.instances[device] = [Instance(gi, uuid) for gi, uuid in enumerate(uuids, 1)]
            self._give_back(device, _NOTICED_S)
        return True

    def _make_whole(self, device: int) -> None:
        del self._node.driver.instances[device]

    def _take(self, devices: tuple[int, ...]) -> int | None:
        """A GPU that nothing befalls yet; no job begins there until it is given back."""
        free = [device for device in devices if device not in self._away]
        device = self._chance.choice(free) if free else None
        if device is not None:
            self._away.add(device)
        return device

    def _give_back(self, device: int, seconds: float) -> None:
        self._after(seconds, lambda: self._away.discard(device))

    # What befalls the exporter's neighbours

    def _trouble_kubelet(self) -> bool:
        kubelet = self._node.kubelet
        kind = next(self._numbers) % 3
        if kind == 0:
            kubelet.stop()
            kubelet.start()
        elif kind == 1:
            kubelet.code = grpc.StatusCode.UNAVAILABLE
            self._after(4, lambda: setattr(kubelet, "code", None))
        else:
            kubelet.hangs = True
            self._after(4, self._unhang_kubelet)
        return True

    @property
    def _is_asked(self) -> bool:
        """Whether a request for control has not been answered yet."""
        return not all(asked.done() for asked in self._asked)

    @property
    def _hangs(self) -> bool:
        """Whether a driver call does: then the driver cannot be released, and the answer would rightly be a refusal."""
        return any(" hang " in line for line in self._node.driver.lines)

    @property
    def _kubelet_suffers(self) -> bool:
        return self._node.kubelet.hangs or self._node.kubelet.code is not None

    def _unhang_kubelet(self) -> None:
        kubelet = self._node.kubelet
        with kubelet.asked:
            kubelet.hangs = False
            kubelet.asked.notify_all()

    def _hostile_file(self) -> bool:
        left_s = self._began_s + self._seconds - time.monotonic()
        reason, seconds, remove = self._hostile.make(has_time=left_s > TORN_S)
        self.truth.rejected[reason] += 1
        self._after(seconds, remove)
        return True

    # What administrators do

    def _control(self, now_s: float) -> None:
        """One request at a time, each with time to show."""
        while self._profiled:
            self._profile(self._profiled.popleft())
        if not self._controls or now_s < self._control_free_s or self._hangs:
            return
        kind = self._controls.popleft()
        self.truth.happened[kind] += 1
        self._control_free_s = now_s + _RECOVERY_S
        if kind == "helper killed":
            self._kill_helper()
        elif kind == "reload":
            self._reload()
        elif kind == "profiler":
            self._control_free_s += _PAUSED_S
            device = self._chance.randrange(GPUS)
            self._ask(f"/-/pause?seconds={_PAUSED_S}", 200, lambda: self._profiled.append(device))
        else:
            self._control_free_s += _RELEASED_S
            self.truth.released_s += _RELEASED_S
            self._ask(f"/-/release?seconds={_RELEASED_S}", 200)

    def _profile(self, device: int) -> None:
        """Somebody else has a GPU's counters, for longer than the exporter was asked to leave them."""
        owner = ExitStack()
        owner.enter_context(self._node.cupti.other_owner(device))
        self._after(_PAUSED_S + 2, owner.close)

    def _kill_helper(self) -> None:
        for pid, command in children(self._exporter.process.pid).items():
            if "gpu_hpc_exporter.pm_helper" in command:
                os.kill(pid, signal.SIGKILL)
                self.truth.helpers_killed += 1

    def _reload(self) -> None:
        number = next(self._numbers)
        settings, status = _RELOADS[number % len(_RELOADS)]
        self._node.configure(settings)
        if number % 8 < len(_RELOADS):
            self._ask("/-/reload", status)
        else:
            self._exporter.process.send_signal(signal.SIGHUP)

    def _ask(self, path: str, expected: int, then: Callable[[], None] = lambda: None) -> None:
        """In a thread, since an answer may take seconds; `then`: what to do where it is as expected."""

        def ask() -> None:
            try:
                status, text = self._exporter.ask(path)
            except OSError as error:
                status, text = 0, repr(error)
            if status == expected:
                then()
            else:
                self.answers.append(f"{path}: {status} {text.strip()[:200]}")

        self._asked = [asked for asked in self._asked if not asked.done()]
        self._asked.append(self._operator.submit(ask))
