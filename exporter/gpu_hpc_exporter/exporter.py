"""One running exporter: its configuration, its samplers and the fleet they feed; start, reload, stop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, Protocol

from gpu_hpc_exporter.config import Config, ConfigError
from gpu_hpc_exporter.model import NS, SourceName
from gpu_hpc_exporter.samplers.fleet import Fleet, FleetSnapshot
from gpu_hpc_exporter.samplers.gpu_owner import Pace
from gpu_hpc_exporter.samplers.job_parts import JobParts
from gpu_hpc_exporter.samplers.kernel_recent import RecentActivity
from gpu_hpc_exporter.samplers.kernels import KernelSampler
from gpu_hpc_exporter.samplers.kmsg import KernelLogSampler
from gpu_hpc_exporter.samplers.nvml import RELEASED, NvmlSampler
from gpu_hpc_exporter.samplers.pm_sampling import PmSampler
from gpu_hpc_exporter.samplers.replay import ReplayClock, ReplaySampler
from gpu_hpc_exporter.samplers.watch import CallWatches
from gpu_hpc_exporter.samplers.window_history import WindowSlice
from gpu_hpc_exporter.scrape import ExpositionSettings
from gpu_hpc_exporter.sources.device_files import held_by_children, held_here
from gpu_hpc_exporter.sources.replay import Recording

log = logging.getLogger(__name__)

LOST_STATUS: Final = 3
"""Exit status after `exit_after_lost_minutes`."""
_STOP_PATIENCE_S: Final = 0.5
_MAX_PROBLEM: Final = 400
_CONTROL_PATIENCE_S: Final = 5.0
_LOST_CHECK_S: Final = 1.0
_IDLE_CHECK_S: Final = 10.0
"""How often to look whether a reload has configured it; each wake-up costs 100 us with cold caches."""


_PAUSED: Final = "paused on request"
_RELEASE_S: Final = 2.8
"""A release answers within three seconds, also where a driver call does not return."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a request for control: `kind` for programs, `text` for people, one line."""

    kind: Literal["done", "refused", "failed"]
    text: str


_BUSY: Final = Outcome("failed", "a reload or another request is under way: try again")


class Source(Protocol):
    """Where a fleet's events come from."""

    def fleet(self, config: Config) -> Fleet:
        """The fleet that this source feeds, made once."""

    def start(self, config: Config) -> None:
        """Begin sampling."""

    def apply(self, config: Config) -> str:
        """Go on with other settings; why not, or ""."""

    def pause(self, seconds: float) -> Outcome:
        """Leave the counters of PM sampling to others for so long."""

    def release(self, seconds: float) -> Outcome:
        """Close the driver for so long, so that GPUs can be reset, unbound or re-partitioned."""

    def resume(self) -> Outcome:
        """End a pause and a release."""

    def released(self) -> str:
        """Until when the driver is released, "" when it is not."""

    def stop(self) -> bool:
        """End sampling; False where a thread is stuck in the driver."""


class WebFiles(Protocol):
    """The configuration of the server, which is reloaded with the exporter's and by itself."""

    @property
    def problem(self) -> str:
        """Why the newest is not in force, "" where it is."""

    def reload(self) -> str:
        """Read it again; why it could not be, or "". Called in a thread."""


class HardwareSource:
    """This machine's GPUs: NVML, PM sampling, whose they are, their kernels, and the kernel log for what NVML lacks."""

    def __init__(self, driver_root: Path, kmsg: Path, procfs: Path) -> None:
        self._driver_root = driver_root
        self._kmsg = kmsg
        self._procfs = procfs
        self._watches = CallWatches()
        self._paused = _Span()
        self._released = _Span()

    def fleet(self, config: Config) -> Fleet:
        """Keeps time by the monotonic clock; knows of calls that hang."""
        self._fleet = Fleet(
            time.monotonic_ns, round(config.gauge_window_seconds * NS), config.expected_gpus, self._watches.hung
        )
        return self._fleet

    def start(self, config: Config) -> None:
        """Start the threads. Jobs and PM sampling learn of the GPUs from the events that NVML's send through them.

        Raises ConfigError for a rule for jobs that cannot be used.
        """
        KernelLogSampler(self._fleet, self._kmsg).start()
        interval_ns = round(config.sampling_interval_ms * 1e6)
        self._kernels = KernelSampler(self._fleet, config.agent)
        self._jobs = JobParts(self._kernels, config.jobs, self._procfs)
        self._kernels.use_owners(lambda: self._jobs.processes)
        self._pm = PmSampler(self._jobs.sampler, config.pm_sampling, interval_ns, procfs=self._procfs)
        pace = Pace(interval_ns, self._pm.has_finer_windows, self._fleet.is_watched)
        self._nvml = NvmlSampler(self._pm, pace, self._driver_root, self._watches)
        self._kernels.start()
        self._jobs.start()
        self._pm.start()
        self._nvml.start()

    def apply(self, config: Config) -> str:
        """Sample at another interval, from the next session of the same samplers on."""
        try:
            self._jobs.apply(config.jobs)
        except ConfigError as problem:
            return str(problem)
        self._kernels.apply(config.agent)
        interval_ns = round(config.sampling_interval_ms * 1e6)
        self._pm.apply(config.pm_sampling, interval_ns)
        self._nvml.change_interval(interval_ns)
        return ""

    def pause(self, seconds: float) -> Outcome:
        """End PM sampling's helper process for so long. GPM goes on: it disturbs no profiler."""
        self._paused.begin(seconds)
        has_ended = self._pause_pm()
        until = f"until {self._paused.end_text}"
        problem = _still_open(held_by_children()) or ("" if has_ended else "it cannot be ended")
        if problem:
            return Outcome("failed", f"the helper process has not ended: {problem}; no new one starts {until}")
        return Outcome("done", f"paused {until}: PM sampling has ended")

    def release(self, seconds: float) -> Outcome:
        """Close every file of the driver, here and in the helper process, and look whether it is true."""
        deadline = time.monotonic() + _RELEASE_S
        if seconds > self._released.left:
            self._released.begin(seconds)
        self._nvml.release(self._released.left)
        has_ended = self._pause_pm()
        until = f"until {self._released.end_text}"
        problem = self._nvml.wait_until_closed(max(0.0, deadline - time.monotonic()))
        problem = problem or _still_open(held_here() | held_by_children())
        problem = problem or ("" if has_ended else "PM sampling's helper process cannot be ended")
        if problem:
            return Outcome("failed", f"not released: {problem}; whatever else could be closed stays so {until}")
        return Outcome("done", f"released {until}: NVML is closed, PM sampling has ended, no /dev/nvidia* is open")

    def resume(self) -> Outcome:
        """Open everything again, at once where a failure is being waited out; counters go on from where they were."""
        was_away = self._paused.left or self._released.left
        self._paused.end()
        self._released.end()
        self._pm.resume()
        self._nvml.resume()
        return Outcome("done", "resumed" if was_away else "nothing was paused or released")

    def released(self) -> str:
        """Such as "released until 2026-01-31T12:00:00Z"."""
        return f"released until {self._released.end_text}" if self._released.left else ""

    def _pause_pm(self) -> bool:
        """Until both the pause and the release are over, the one that ends last is the reason; whether it has ended."""
        last, reason = max((self._paused.left, _PAUSED), (self._released.left, RELEASED))
        return self._pm.pause(last, reason)

    def stop(self) -> bool:
        """Stop PM sampling, then the others; the kernel log's thread sleeps in a read and holds nothing."""
        ended = [self._pm.stop(), self._nvml.stop(), self._jobs.stop(), self._kernels.stop()]
        return all(ended)


def _still_open(files: set[str]) -> str:
    return f"{', '.join(sorted(files))} still open" if files else ""


class _Span:
    """A span of time that began on request, 0 s long at first."""

    def __init__(self) -> None:
        self._end_s = 0.0
        self.end_text = ""
        """When it ends, in UTC, for people."""

    @property
    def left(self) -> float:
        """Seconds until it ends, 0 when it has."""
        return max(0.0, self._end_s - time.monotonic())

    def begin(self, seconds: float) -> None:
        """From now on for so long."""
        self._end_s = time.monotonic() + seconds
        self.end_text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))

    def end(self) -> None:
        """Now."""
        self._end_s = 0.0


_NO_HARDWARE: Final = Outcome("refused", "a recording is played: there is nothing to pause")


class ReplaySource:
    """A recording, in a loop."""

    def __init__(self, recording: Recording, speed: float) -> None:
        self._recording = recording
        self._clock = ReplayClock(speed)

    def fleet(self, config: Config) -> Fleet:
        """Keeps time by the replay's clock."""
        self._fleet = Fleet(self._clock, round(config.gauge_window_seconds * NS), config.expected_gpus)
        return self._fleet

    def start(self, _: Config) -> None:
        """Play from the beginning."""
        self._sampler = ReplaySampler(self._fleet, self._recording, self._clock)
        self._sampler.start()

    def apply(self, _: Config) -> str:
        """A recording has its own interval."""
        return ""

    def pause(self, _: float) -> Outcome:
        """Nothing of the machine is in use."""
        return _NO_HARDWARE

    def release(self, _: float) -> Outcome:
        """As above."""
        return _NO_HARDWARE

    def resume(self) -> Outcome:
        """As above."""
        return _NO_HARDWARE

    def released(self) -> str:
        """Never."""
        return ""

    def stop(self) -> bool:
        """Stop playing."""
        self._sampler.stop()
        return True


class Exporter:
    """Holds the parts together over reloads. A configuration that cannot be loaded changes nothing."""

    def __init__(self, load: Callable[[], Config], source: Source, web_files: WebFiles | None = None) -> None:
        """`load` reads the configuration anew. Raises ConfigError at the start only."""
        self._load = load
        self._web_files = web_files
        self._source = source
        self._config = load()
        self._settings = ExpositionSettings(self._config.series_limit)
        self._fleet = source.fleet(self._config)
        self._configure_fleet(self._config)
        self._lock = threading.Lock()
        self._reloads: set[asyncio.Task[str]] = set()
        self.exit_status = 0

    def snapshot(self) -> FleetSnapshot:
        """The GPUs now."""
        return self._fleet.snapshot()

    def windows_since(self, sequences: Mapping[str, int]) -> tuple[int, Mapping[str, WindowSlice]]:
        """As the fleet's."""
        return self._fleet.windows_since(sequences)

    def windows(self, uuid: str, length_ns: int) -> tuple[int, WindowSlice] | None:
        """As the fleet's."""
        return self._fleet.windows(uuid, length_ns)

    def recent_kernels(self) -> Mapping[tuple[str, str], RecentActivity]:
        """As the fleet's."""
        return self._fleet.recent_kernels()

    def settings(self) -> ExpositionSettings:
        """What the configuration says of expositions."""
        if self._web_files is not None and self._web_files.problem:
            return replace(self._settings, reload_succeeded=False)
        return self._settings

    def start(self) -> None:
        """Begin sampling."""
        self._source.start(self._config)

    def stop(self) -> bool:
        """End sampling; False where a thread is stuck, in the driver or in a reload."""
        if not self._lock.acquire(timeout=_STOP_PATIENCE_S):
            return False
        try:
            return self._source.stop()
        finally:
            self._lock.release()

    def reload_soon(self) -> None:
        """Reload in the background, as a signal handler must."""
        task = asyncio.get_running_loop().create_task(self.reload())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)

    async def reload(self) -> str:
        """Read the configuration again and apply it; why it could not be, or ""."""
        return await asyncio.to_thread(self._reload)

    async def pause(self, seconds: float) -> Outcome:
        """End PM sampling for so long, so that a profiler finds the counters free."""
        return await self._control(f"pause for {seconds:g} s", lambda: self._source.pause(seconds))

    async def release(self, seconds: float) -> Outcome:
        """Close the driver for so long."""
        return await self._control(f"release for {seconds:g} s", lambda: self._source.release(seconds))

    async def resume(self) -> Outcome:
        """End a pause and a release."""
        return await self._control("resume", self._source.resume)

    def released(self) -> str:
        """Until when the driver is released, "" when it is not."""
        return self._source.released()

    async def _control(self, request: str, act: Callable[[], Outcome]) -> Outcome:
        outcome = await asyncio.to_thread(self._one_at_a_time, act)
        log.log(logging.INFO if outcome.kind == "done" else logging.WARNING, "%s: %s", request, outcome.text)
        return outcome

    def _one_at_a_time(self, act: Callable[[], Outcome]) -> Outcome:
        if not self._lock.acquire(timeout=_CONTROL_PATIENCE_S):
            return _BUSY
        try:
            return act()
        finally:
            self._lock.release()

    def _reload(self) -> str:
        with self._lock:
            problems = [self._reload_config(), self._web_files.reload() if self._web_files is not None else ""]
        problem = "; ".join(filter(None, problems))
        if problem:
            log.error("the configuration stays as it was: %s", problem)
        else:
            log.info("configuration reloaded")
        return problem

    def _reload_config(self) -> str:
        try:
            config = self._load()
            problem = self._source.apply(config)
        except ConfigError as error:
            problem = str(error)
        except Exception as error:
            log.exception("the configuration cannot be applied")
            problem = f"internal error: {error!r}"[:_MAX_PROBLEM]
        if problem:
            self._settings = replace(self._settings, reload_succeeded=False)
            return problem
        self._config = config
        self._settings = ExpositionSettings(config.series_limit)
        self._configure_fleet(config)
        return ""

    def _configure_fleet(self, config: Config) -> None:
        required = frozenset[SourceName](["pm_sampling"] if config.pm_sampling.mode == "required" else [])
        self._fleet.configure(round(config.gauge_window_seconds * NS), config.expected_gpus, required)

    def _has_lost_all(self) -> bool:
        """Whether there were GPUs and none can be read."""
        snapshot = self.snapshot()
        return bool(snapshot.known) and not (snapshot.is_up and snapshot.gpus)

    async def stop_when_lost(self, stop: asyncio.Event) -> None:
        """Set `stop` once access to GPUs that were there has been lost for as long as configured."""
        lost_since: float | None = None
        while True:
            minutes = self._config.exit_after_lost_minutes
            await asyncio.sleep(_IDLE_CHECK_S if minutes is None else _LOST_CHECK_S)
            if minutes is None or self.released() or not self._has_lost_all():
                lost_since = None
                continue
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since >= 60 * minutes:
                log.error("no GPU could be read for %g minutes: ending, as configured", minutes)
                self.exit_status = LOST_STATUS
                stop.set()
                return
