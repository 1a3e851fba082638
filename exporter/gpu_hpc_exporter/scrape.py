"""One exposition: runs the collectors over a snapshot, keeps their faults apart, renders and caches it."""

from __future__ import annotations

import asyncio
import functools
import gzip
import logging
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from gpu_hpc_exporter import __version__, metrics
from gpu_hpc_exporter.collectors import Collector
from gpu_hpc_exporter.exposition import OPENMETRICS, TEXT, Family, Format, encode
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot

log = logging.getLogger(__name__)

FRESH_S: Final = 0.8
"""An exposition of this age is served as it is."""
MAX_AGE_S: Final = 1.0
"""One of this age is served too while a new one is made; an older one never."""
DEFAULT_DEADLINE_S: Final = 8.0
"""Prometheus gives up after 10 s by default."""
_MIN_DEADLINE_S: Final = 0.2
_MAX_DEADLINE_S: Final = 30.0
_SECOND_TRY_S: Final = 1.0
_GZIP_LEVEL: Final = 6


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
    if not timeout > 0:  # NaN included
        return DEFAULT_DEADLINE_S
    return min(max(0.8 * timeout, _MIN_DEADLINE_S), _MAX_DEADLINE_S)


@dataclass(slots=True)
class ExpositionSettings:
    """What a configuration says of expositions; replaced as a whole at a reload."""

    series_limit: int
    reload_succeeded: bool = True
    loaded_at: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class _Outcome:
    families: tuple[Family, ...]
    success: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class Rendered:
    """One exposition in one format and encoding."""

    body: bytes
    content_type: str
    is_gzip: bool
    made_at: float
    is_whole: bool


@dataclass(slots=True)
class _Run:
    """One exposition in the making, in a worker thread; `current` is the collector that it is in."""

    skipped: frozenset[str]
    outcomes: dict[str, _Outcome] = field(default_factory=dict)
    current: str = ""
    is_abandoned: bool = False


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
        # One worker does it all; the others are for what a stuck one leaves undone.
        self._executor = ThreadPoolExecutor(len(collectors) + 2, thread_name_prefix="scrape")
        self._stuck: dict[str, Future[Rendered | None]] = {}
        self._rendered: dict[tuple[str, bool], Rendered] = {}
        self._refreshing: dict[tuple[str, bool], asyncio.Task[Rendered]] = {}
        self._dropped = {"series_limit": 0, "duplicate": 0}

    def close(self) -> None:
        """Let go of tasks and threads; a thread that is stuck is left behind."""
        for task in self._refreshing.values():
            task.cancel()
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
            task = asyncio.create_task(self._refresh(wanted, deadline, compress=compress))
            self._refreshing[key] = task
            task.add_done_callback(lambda ended: self._forget(key, ended))
        if cached is not None and age < MAX_AGE_S:
            return cached
        return await asyncio.shield(task)

    def _forget(self, key: tuple[str, bool], ended: asyncio.Task[Rendered]) -> None:
        """Nobody may wait for a task whose page was only to be ready for the next scrape: look at its error here."""
        self._refreshing.pop(key, None)
        if not ended.cancelled() and ended.exception() is not None:
            log.debug("a rendering failed", exc_info=ended.exception())

    async def _refresh(self, wanted: Format, deadline: float, *, compress: bool) -> Rendered:
        made_at = time.monotonic()
        self._stuck = {name: future for name, future in self._stuck.items() if not future.done()}
        run = _Run(frozenset(self._stuck))
        rendered: Rendered | None = None
        # A second worker does what a stuck collector kept the first one from.
        for patience in (deadline, min(deadline, _SECOND_TRY_S)):
            make = functools.partial(self._make, run, wanted, made_at, deadline, compress=compress)
            future = self._executor.submit(make)
            await asyncio.wait([asyncio.wrap_future(future)], timeout=patience)
            if future.done():
                rendered = future.result()
                break
            run = self._abandon(run, future, deadline)
        if rendered is None:
            render = functools.partial(self._render, run.outcomes, wanted, made_at, deadline, compress=compress)
            rendered = await asyncio.get_running_loop().run_in_executor(self._executor, render)
        if rendered.is_whole:  # what one client's short deadline left out must not be missing for the others
            self._rendered[wanted.media_type, compress] = rendered
        return rendered

    def _make(self, run: _Run, wanted: Format, made_at: float, deadline: float, *, compress: bool) -> Rendered | None:
        """The exposition, or None where it took so long that nobody waits for it any more."""
        snapshot = self._snapshot()
        for collector in self._collectors:
            if run.is_abandoned:
                return None
            if collector.name not in run.skipped and collector.name not in run.outcomes:
                run.current = collector.name
                run.outcomes[collector.name] = _collect(collector, snapshot)
        run.current = ""
        return self._render(run.outcomes, wanted, made_at, deadline, compress=compress)

    def _abandon(self, run: _Run, future: Future[Rendered | None], deadline: float) -> _Run:
        """Leave a stuck run to itself; what is left to do, without the collector it is stuck in."""
        run.is_abandoned = True
        if run.current:
            self._stuck[run.current] = future
            name = run.current
            log.warning("collector %s did not finish in %g s: its series are missing until it does", name, deadline)
        return _Run(run.skipped | {run.current}, run.outcomes.copy())

    def _render(
        self, outcomes: dict[str, _Outcome], wanted: Format, made_at: float, deadline: float, *, compress: bool
    ) -> Rendered:
        missing = _Outcome((), success=False, seconds=deadline)
        families = self._assemble({c.name: outcomes.get(c.name, missing) for c in self._collectors})
        body = encode(families, wanted)
        if compress:
            body = gzip.compress(body, _GZIP_LEVEL, mtime=0)
        is_whole = all(c.name in outcomes for c in self._collectors)
        return Rendered(body, wanted.content_type, compress, made_at, is_whole)

    def _assemble(self, outcomes: dict[str, _Outcome]) -> list[Family]:
        """All families within the limit, each name once, then what there is to say of this scrape."""
        settings = self._settings()
        families: list[Family] = []
        names: set[str] = set()
        room = settings.series_limit
        for outcome in outcomes.values():
            for family in outcome.families:
                self._dropped["duplicate"] += family.drop_duplicates()
                name, size = family.spec.name, len(family.samples)
                if name in names or size > room:
                    self._dropped["duplicate" if name in names else "series_limit"] += size
                    continue
                names.add(name)
                room -= size
                families.append(family)
        return [*families, *self._self_metrics(outcomes, settings, settings.series_limit - room)]

    def _self_metrics(self, outcomes: dict[str, _Outcome], settings: ExpositionSettings, series: int) -> list[Family]:
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
        own = [success, duration, reload_success, loaded_at, limit, dropped, build]
        exposed = metrics.EXPOSED_SERIES.family()
        exposed.add(series + sum(len(family.samples) for family in own) + 1)
        return [*own, exposed]


def _collect(collector: Collector, snapshot: FleetSnapshot) -> _Outcome:
    begin = time.perf_counter()
    try:
        families = tuple(collector.collect(snapshot))
    except Exception:
        log.exception("collector %s failed: its series are missing from this scrape", collector.name)
        return _Outcome((), success=False, seconds=time.perf_counter() - begin)
    return _Outcome(families, success=True, seconds=time.perf_counter() - begin)
