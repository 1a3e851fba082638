"""One running exporter: its configuration, its samplers and the fleet they feed; start, reload, stop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final, Protocol

from gpu_hpc_exporter.config import Config, ConfigError
from gpu_hpc_exporter.model import NS
from gpu_hpc_exporter.samplers.fleet import Fleet, FleetSnapshot
from gpu_hpc_exporter.samplers.kmsg import KernelLogSampler
from gpu_hpc_exporter.samplers.nvml import NvmlSampler
from gpu_hpc_exporter.samplers.replay import ReplayClock, ReplaySampler
from gpu_hpc_exporter.samplers.watch import CallWatches
from gpu_hpc_exporter.scrape import ExpositionSettings
from gpu_hpc_exporter.sources.replay import Recording

log = logging.getLogger(__name__)

LOST_STATUS: Final = 3
"""Exit status after `exit_after_lost_minutes`."""
_STOP_PATIENCE_S: Final = 0.5
_LOST_CHECK_S: Final = 1.0
_IDLE_CHECK_S: Final = 10.0
"""How often to look whether a reload has configured it; each wake-up costs 100 us with cold caches."""


class Source(Protocol):
    """Where a fleet's events come from."""

    def fleet(self, config: Config) -> Fleet:
        """The fleet that this source feeds, made once."""

    def start(self, config: Config) -> None:
        """Begin sampling."""

    def apply(self, config: Config) -> str:
        """Go on with other settings; why not, or ""."""

    def stop(self) -> bool:
        """End sampling; False where a thread is stuck in the driver."""


class HardwareSource:
    """This machine's GPUs: NVML, and the kernel log for what NVML does not tell."""

    def __init__(self, driver_root: Path, kmsg: Path) -> None:
        self._driver_root = driver_root
        self._kmsg = kmsg
        self._watches = CallWatches()

    def fleet(self, config: Config) -> Fleet:
        """Keeps time by the monotonic clock; knows of calls that hang."""
        self._fleet = Fleet(
            time.monotonic_ns, round(config.gauge_window_seconds * NS), config.expected_gpus, self._watches.hung
        )
        return self._fleet

    def start(self, config: Config) -> None:
        """Start NVML's threads and the kernel log's."""
        KernelLogSampler(self._fleet, self._kmsg).start()
        interval_ns = round(config.sampling_interval_ms * 1e6)
        self._nvml = NvmlSampler(self._fleet, interval_ns, self._driver_root, self._watches)
        self._nvml.start()

    def apply(self, config: Config) -> str:
        """Sample at another interval, from the next session of the same sampler on."""
        self._nvml.change_interval(round(config.sampling_interval_ms * 1e6))
        return ""

    def stop(self) -> bool:
        """Stop NVML; the kernel log's thread sleeps in a read and holds nothing."""
        return self._nvml.stop()


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

    def stop(self) -> bool:
        """Stop playing."""
        self._sampler.stop()
        return True


class Exporter:
    """Holds the parts together over reloads. A configuration that cannot be loaded changes nothing."""

    def __init__(self, load: Callable[[], Config], source: Source) -> None:
        """`load` reads the configuration anew. Raises ConfigError at the start only."""
        self._load = load
        self._source = source
        self._config = load()
        self._settings = ExpositionSettings(self._config.series_limit)
        self._fleet = source.fleet(self._config)
        self._lock = threading.Lock()
        self._reloads: set[asyncio.Task[str]] = set()
        self.exit_status = 0

    def snapshot(self) -> FleetSnapshot:
        """The GPUs now."""
        return self._fleet.snapshot()

    def settings(self) -> ExpositionSettings:
        """What the configuration says of expositions."""
        return self._settings

    def start(self) -> None:
        """Begin sampling."""
        _warn_of_idle_sections(self._config)
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

    def _reload(self) -> str:
        with self._lock:
            try:
                config = self._load()
            except ConfigError as error:
                problem = str(error)
            else:
                problem = self._source.apply(config)
            if problem:
                log.error("the configuration stays as it was: %s", problem)
                self._settings = replace(self._settings, reload_succeeded=False)
                return problem
            _warn_of_idle_sections(config)
            self._config = config
            self._settings = ExpositionSettings(config.series_limit)
            self._fleet.configure(round(config.gauge_window_seconds * NS), config.expected_gpus)
            log.info("configuration reloaded")
            return ""

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
            if minutes is None or not self._has_lost_all():
                lost_since = None
                continue
            lost_since = lost_since or time.monotonic()
            if time.monotonic() - lost_since >= 60 * minutes:
                log.error("no GPU could be read for %g minutes: ending, as configured", minutes)
                self.exit_status = LOST_STATUS
                stop.set()
                return


def _warn_of_idle_sections(config: Config) -> None:
    for section in config.without_effect():
        log.warning("configuration section `%s` has no effect in this version", section)
