"""One exposition: runs the collectors over a snapshot, keeps their faults apart, renders and caches it."""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from gpu_hpc_exporter import __version__, metrics
from gpu_hpc_exporter.collectors import Collector
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot

log = logging.getLogger(__name__)

MAX_AGE_S: Final = 1.0
"""A scrape may be answered from a snapshot of this age, so that two scrapers cost one rendering."""


class Exposition:
    """All families of one snapshot, as prometheus_client's registry wants them."""

    def __init__(self, snapshot: Callable[[], FleetSnapshot], collectors: Sequence[Collector]) -> None:
        self._snapshot = snapshot
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        """Families of every collector that works; a fault costs its collector's families and is shown."""
        snapshot = self._snapshot()
        success = metrics.COLLECTOR_SUCCESS.family()
        duration = metrics.COLLECTOR_DURATION.family()
        series = 0
        for collector in self._collectors:
            begin = time.perf_counter()
            families = self._run(collector, snapshot)
            success.add(0 if families is None else 1, collector.name)
            duration.add(time.perf_counter() - begin, collector.name)
            for family in families or ():
                series += len(family.samples)
                yield family
        yield success.metric
        yield duration.metric
        build = metrics.BUILD_INFO.family()
        build.add(1, __version__, "", platform.python_version())
        yield build.metric
        exposed = metrics.EXPOSED_SERIES.family()
        exposed.add(series + 2 * len(self._collectors) + 1)
        yield exposed.metric

    @staticmethod
    def _run(collector: Collector, snapshot: FleetSnapshot) -> tuple[Metric, ...] | None:
        try:
            return tuple(collector.collect(snapshot))
        except Exception:
            log.exception("collector %s failed: its series are missing from this scrape", collector.name)
            return None


@dataclass(frozen=True, slots=True)
class Format:
    """One exposition format: its media type for negotiation, its exact content type, its encoder."""

    media_type: str
    content_type: str
    encode: Callable[[CollectorRegistry], bytes]


TEXT: Final = Format("text/plain", CONTENT_TYPE_PLAIN_0_0_4, generate_latest)
OPENMETRICS: Final = Format(
    "application/openmetrics-text", openmetrics.CONTENT_TYPE_LATEST, openmetrics.generate_latest
)


def choose_format(accept: str) -> Format:
    """OpenMetrics where the Accept header prefers it to text, text otherwise."""
    return OPENMETRICS if _quality(accept, OPENMETRICS) > _quality(accept, TEXT) else TEXT


def _quality(accept: str, wanted: Format) -> float:
    """The highest q that names the format itself; wildcards are content with text."""
    best = 0.0
    for part in accept.split(","):
        media_type, *parameters = (piece.strip() for piece in part.split(";"))
        if media_type.lower() != wanted.media_type:
            continue
        quality = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip().lower() == "q":
                try:
                    quality = float(value)
                except ValueError:
                    quality = 0.0
        best = max(best, quality)
    return best


@dataclass(frozen=True, slots=True)
class Rendered:
    """One exposition in one format."""

    body: bytes
    content_type: str
    made_at: float


class Scrape:
    """Renders expositions off the event loop and keeps each format's newest one for a second."""

    def __init__(self, exposition: Exposition, executor: Executor) -> None:
        self._executor = executor
        self._registry = CollectorRegistry()
        self._registry.register(exposition)
        ProcessCollector(registry=self._registry)
        self._lock = asyncio.Lock()
        self._rendered: dict[str, Rendered] = {}

    async def render(self, accept: str) -> Rendered:
        """The exposition in the format that `accept` (the Accept header) asks for."""
        wanted = choose_format(accept)
        async with self._lock:  # concurrent scrapers share one rendering
            cached = self._rendered.get(wanted.media_type)
            if cached is None or time.monotonic() - cached.made_at > MAX_AGE_S:
                loop = asyncio.get_running_loop()
                body = await loop.run_in_executor(self._executor, wanted.encode, self._registry)
                cached = Rendered(body, wanted.content_type, time.monotonic())
                self._rendered[wanted.media_type] = cached
        return cached
