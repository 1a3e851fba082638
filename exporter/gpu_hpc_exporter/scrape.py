"""One exposition: runs the collectors over a snapshot, keeps their faults apart, renders and caches it."""

from __future__ import annotations

import asyncio
import gzip
import logging
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector as Registry

from gpu_hpc_exporter import __version__, metrics
from gpu_hpc_exporter.collectors import Collector
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot

log = logging.getLogger(__name__)

FRESH_S: Final = 0.8
"""An exposition of this age is served as it is."""
MAX_AGE_S: Final = 1.0
"""One of this age is served too while a new one is made; an older one never."""
DEFAULT_DEADLINE_S: Final = 8.0
"""Prometheus gives up after 10 s by default."""
_GZIP_LEVEL: Final = 6


@dataclass(frozen=True, slots=True)
class Format:
    """One exposition format: its media type for negotiation, its exact content type, its encoder."""

    media_type: str
    content_type: str
    encode: Callable[[Registry], bytes]


TEXT: Final = Format("text/plain", CONTENT_TYPE_PLAIN_0_0_4, generate_latest)
OPENMETRICS: Final = Format(
    "application/openmetrics-text", openmetrics.CONTENT_TYPE_LATEST, openmetrics.generate_latest
)


def choose_format(accept: str) -> Format:
    """OpenMetrics where the Accept header prefers it to text, text otherwise."""
    return OPENMETRICS if _quality(accept, OPENMETRICS.media_type) > _quality(accept, TEXT.media_type) else TEXT


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether the Accept-Encoding header allows gzip."""
    return _quality(accept_encoding, "gzip") > 0


def _quality(header: str, wanted: str) -> float:
    """The highest q with which a header names `wanted` itself; wildcards do not count."""
    best = 0.0
    for part in header.split(","):
        name, *parameters = (piece.strip() for piece in part.split(";"))
        if name.lower() == wanted:
            best = max(best, _q_value(parameters))
    return best


def _q_value(parameters: list[str]) -> float:
    for parameter in parameters:
        key, _, value = parameter.partition("=")
        if key.strip().lower() == "q":
            try:
                quality = float(value)
            except ValueError:
                return 0.0
            return quality if 0 <= quality <= 1 else 0.0
    return 1.0


def parse_deadline(timeout_header: str | None) -> float:
    """Seconds for collecting, from X-Prometheus-Scrape-Timeout-Seconds, with a fifth kept for the rest."""
    try:
        timeout = float(timeout_header or "")
    except ValueError:
        return DEFAULT_DEADLINE_S
    return 0.8 * timeout if 0 < timeout < 3600 else DEFAULT_DEADLINE_S  # NaN fails both comparisons


@dataclass(slots=True)
class ExpositionSettings:
    """What a configuration says of expositions; replaced as a whole at a reload."""

    series_limit: int
    reload_succeeded: bool = True
    loaded_at: float = field(default_factory=time.time)


class _Families(Registry):
    """Families that are there already, in the shape of a registry that an encoder takes."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


@dataclass(frozen=True, slots=True)
class _Outcome:
    families: tuple[Metric, ...]
    success: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Rendered:
    """One exposition in one format and encoding."""

    body: bytes
    content_type: str
    is_gzip: bool
    made_at: float


class Scrape:
    """Makes expositions off the event loop; concurrent scrapers share them.

    A collector that raises or does not finish in time costs its own families only. One that is still stuck
    from an earlier scrape is skipped, so that stuck threads never pile up.
    """

    def __init__(
        self,
        snapshot: Callable[[], FleetSnapshot],
        collectors: Sequence[Collector],
        settings: Callable[[], ExpositionSettings],
    ) -> None:
        self._snapshot = snapshot
        self._collectors = collectors
        self._settings = settings
        self._executor = ThreadPoolExecutor(len(collectors) + 2, thread_name_prefix="scrape")
        self._running: dict[str, tuple[Future[_Outcome], float]] = {}
        self._told_stuck: set[str] = set()
        self._rendered: dict[tuple[str, bool], Rendered] = {}
        self._refreshing: dict[tuple[str, bool], asyncio.Task[Rendered]] = {}
        self._dropped = {"series_limit": 0, "duplicate": 0}

    def close(self) -> None:
        """Let go of the threads; one that is stuck is left behind."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def render(self, accept: str, accept_encoding: str = "", deadline: float = DEFAULT_DEADLINE_S) -> Rendered:
        """The exposition in the form that the request's headers ask for, at most a second old."""
        wanted, compress = choose_format(accept), accepts_gzip(accept_encoding)
        key = (wanted.media_type, compress)
        cached = self._rendered.get(key)
        age = time.monotonic() - cached.made_at if cached else MAX_AGE_S
        if cached is not None and age < FRESH_S:
            return cached
        task = self._refreshing.get(key)
        if task is None:
            task = asyncio.create_task(self._refresh(wanted, compress, deadline))
            self._refreshing[key] = task
            task.add_done_callback(lambda _: self._refreshing.pop(key, None))
        if cached is not None and age < MAX_AGE_S:
            return cached
        return await asyncio.shield(task)

    async def _refresh(self, wanted: Format, compress: bool, deadline: float) -> Rendered:  # noqa: FBT001  private
        loop = asyncio.get_running_loop()
        made_at = time.monotonic()
        families = await self._collect(deadline)
        body = await loop.run_in_executor(self._executor, _encode, wanted, families, compress)
        rendered = Rendered(body, wanted.content_type, compress, made_at)
        self._rendered[wanted.media_type, compress] = rendered
        return rendered

    async def _collect(self, deadline: float) -> list[Metric]:
        loop = asyncio.get_running_loop()
        snapshot = await loop.run_in_executor(self._executor, self._snapshot)
        started = {c.name: self._start(c, snapshot, deadline) for c in self._collectors}
        waiting = [asyncio.wrap_future(future) for future in started.values() if future is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=deadline)
        outcomes = {name: self._outcome(name, future, deadline) for name, future in started.items()}
        return self._assemble(outcomes)

    def _start(self, collector: Collector, snapshot: FleetSnapshot, deadline: float) -> Future[_Outcome] | None:
        """A collector's run, shared with a scrape that began it just now, or None while it is stuck."""
        now = time.monotonic()
        earlier = self._running.get(collector.name)
        if earlier is not None and not earlier[0].done():
            return earlier[0] if now < earlier[1] else None
        future = self._executor.submit(_run, collector, snapshot)
        self._running[collector.name] = (future, now + deadline)
        return future

    def _outcome(self, name: str, future: Future[_Outcome] | None, deadline: float) -> _Outcome:
        if future is not None and future.done():
            self._told_stuck.discard(name)
            return future.result()
        if name not in self._told_stuck:
            self._told_stuck.add(name)
            log.warning("collector %s did not finish in %.3g s: its series are missing until it does", name, deadline)
        return _Outcome((), success=False, seconds=deadline)

    def _assemble(self, outcomes: dict[str, _Outcome]) -> list[Metric]:
        """All families within the limit, each name once, then what there is to say of this scrape."""
        settings = self._settings()
        families: list[Metric] = []
        names: set[str] = set()
        room = settings.series_limit
        for outcome in outcomes.values():
            for family in outcome.families:
                size = _unique(family)
                self._dropped["duplicate"] += size - len(family.samples)
                if family.name in names or len(family.samples) > room:
                    self._dropped["duplicate" if family.name in names else "series_limit"] += len(family.samples)
                    continue
                names.add(family.name)
                room -= len(family.samples)
                families.append(family)
        return [*families, *self._self_metrics(outcomes, settings, settings.series_limit - room)]

    def _self_metrics(self, outcomes: dict[str, _Outcome], settings: ExpositionSettings, series: int) -> list[Metric]:
        success = metrics.COLLECTOR_SUCCESS.family()
        duration = metrics.COLLECTOR_DURATION.family()
        for name, outcome in outcomes.items():
            success.add(1 if outcome.success else 0, name)
            duration.add(outcome.seconds, name)
        reload_success = metrics.CONFIG_RELOAD_SUCCESS.family()
        reload_success.add(1 if settings.reload_succeeded else 0)
        loaded_at = metrics.CONFIG_RELOAD_TIMESTAMP.family()
        loaded_at.add(settings.loaded_at)
        limit = metrics.SERIES_LIMIT.family()
        limit.add(settings.series_limit)
        dropped = metrics.DROPPED_SERIES.family()
        for reason, count in self._dropped.items():
            dropped.add(count, reason)
        build = metrics.BUILD_INFO.family()
        build.add(1, __version__, "", platform.python_version())
        own = [f.metric for f in (success, duration, reload_success, loaded_at, limit, dropped, build)]
        exposed = metrics.EXPOSED_SERIES.family()
        exposed.add(series + sum(len(metric.samples) for metric in own) + 1)
        return [*own, exposed.metric]


def _run(collector: Collector, snapshot: FleetSnapshot) -> _Outcome:
    begin = time.perf_counter()
    try:
        families = tuple(collector.collect(snapshot))
    except Exception:
        log.exception("collector %s failed: its series are missing from this scrape", collector.name)
        return _Outcome((), success=False, seconds=time.perf_counter() - begin)
    return _Outcome(families, success=True, seconds=time.perf_counter() - begin)


def _unique(family: Metric) -> int:
    """Leave the first of samples that are one series; two would lose the whole scrape. How many there were."""
    before = len(family.samples)
    first = {(sample.name, tuple(sample.labels.items())): sample for sample in reversed(family.samples)}
    if len(first) < before:
        family.samples = list(reversed(first.values()))
    return before


def _encode(wanted: Format, families: Sequence[Metric], compress: bool) -> bytes:  # noqa: FBT001  private
    body = wanted.encode(_Families(families))
    return gzip.compress(body, _GZIP_LEVEL, mtime=0) if compress else body
