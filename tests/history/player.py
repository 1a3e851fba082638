"""The exporter in simulated time: events go in, real expositions come out."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from gpu_hpc_exporter.collectors import COLLECTORS
from gpu_hpc_exporter.config import Config
from gpu_hpc_exporter.model import NS, Event, SourceName
from gpu_hpc_exporter.samplers.fleet import Fleet, FleetSnapshot
from gpu_hpc_exporter.scrape import ExpositionSettings, Scrape
from gpu_hpc_exporter.sources.replay import time_of

Samples = list[tuple[str, str]]
"""One exposition: series (name and labels) and value, as they are written."""


def expositions(
    events: Iterable[Event], start: int, seconds: int, step: int, required: frozenset[SourceName] = frozenset()
) -> Iterator[tuple[int, Samples]]:
    """What Prometheus gets of an exporter that starts at `start` (Unix time), every `step` seconds: time and samples.

    Events begin at time 0; the first exposition is served a step after the start, the last one after `seconds`.
    `required`: sources that the configuration requires.
    """
    config = Config()
    now = 0
    fleet = Fleet(lambda: now, round(config.gauge_window_seconds * NS))
    fleet.configure(round(config.gauge_window_seconds * NS), config.expected_gpus, required)

    def snapshot() -> FleetSnapshot:
        return replace(fleet.snapshot(), wall_ns=start * NS + now)

    settings = ExpositionSettings(config.series_limit, loaded_at=float(start))
    coming = iter(events)
    event = next(coming, None)
    with asyncio.Runner() as runner:
        for due in range(step, seconds + 1, step):
            while event is not None and time_of(event) <= due * NS:
                now = time_of(event)
                fleet.put(event)
                event = next(coming, None)
            now = due * NS
            # A Scrape of its own for each one: it keeps expositions for a second of real time.
            scrape = Scrape(snapshot, COLLECTORS, lambda: settings)
            body = runner.run(scrape.render("text/plain")).body
            scrape.close()
            yield start + due, parse(body.decode())


def parse(text: str) -> Samples:
    """Series and values of an exposition, without its comments."""
    split = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return [(sys.intern(series), value) for series, _, value in split]  # a series comes in every scrape
