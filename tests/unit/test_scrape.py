"""A scrape: which format, one rendering for all, one collector's fault its own."""

from __future__ import annotations

import asyncio
import gzip
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from exporter_process import parse
from gpu_hpc_exporter.collectors import COLLECTORS, Collector
from gpu_hpc_exporter.exposition import OPENMETRICS, TEXT, Family, Spec
from gpu_hpc_exporter.metrics import CATALOGUE, SM_ACTIVE, UP
from gpu_hpc_exporter.model import READINGS, IntervalInForce, StateChange
from gpu_hpc_exporter.samplers.fleet import Fleet, FleetSnapshot
from gpu_hpc_exporter.scrape import (
    DEFAULT_DEADLINE_S,
    FRESH_S,
    MAX_AGE_S,
    ExpositionSettings,
    Rendered,
    Scrape,
    accepts_gzip,
    choose_format,
    parse_deadline,
)
from unit.objects import G0, G1, GAUGE_WINDOW_NS, NS, Clock, readings, running_fleet, window

PROMETHEUS_2_42 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3_0 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3_PROTOBUF_FIRST = (
    f"application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.7,{PROMETHEUS_3_0}"
)


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (PROMETHEUS_2_42, OPENMETRICS),
        (PROMETHEUS_3_0, OPENMETRICS),
        (PROMETHEUS_3_PROTOBUF_FIRST, OPENMETRICS),
        ("", TEXT),
        ("*/*", TEXT),  # curl
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", TEXT),  # a browser
        ("application/openmetrics-text", OPENMETRICS),
        ("Application/OpenMetrics-Text ; Q=0.3 , */*", OPENMETRICS),
        ("text/plain;version=0.0.4", TEXT),
        ("text/plain;version=0.0.4,application/openmetrics-text;version=1.0.0;q=0.5", TEXT),
        ("text/plain;q=0.5,application/openmetrics-text;q=0.5", TEXT),
        ("text/plain;q=0.4,application/openmetrics-text;q=0.5", OPENMETRICS),
        ("application/openmetrics-text;q=0", TEXT),
        ("application/openmetrics-text;q=0,text/plain;q=0.1", TEXT),
        ("application/openmetrics-text;q=high", TEXT),
        ("application/openmetrics-text;q=", TEXT),
        pytest.param("application/openmetrics-text;q=nan", TEXT),
        (",;q=1,;;,application/openmetrics-text;;", OPENMETRICS),
        ("\0\xff", TEXT),
    ],
)
def test_format(accept: str, expected: object) -> None:
    """OpenMetrics where the Accept header prefers it, text in every other case."""
    assert choose_format(accept) is expected


@pytest.mark.parametrize(
    ("accept_encoding", "expected"),
    [
        ("gzip", True),
        ("gzip, deflate, br", True),
        ("deflate, GZIP;q=1.0, *;q=0.5", True),
        ("gzip;q=0.001", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("gzip;q=-1", False),
        ("gzip;q=some", False),
        ("identity", False),
        ("br", False),
        ("gzipped", False),
        ("*", False),
        ("", False),
        pytest.param("gzip;q=nan", False),
    ],
)
def test_gzip_is_used_only_where_it_is_accepted(accept_encoding: str, *, expected: bool) -> None:
    """The body is packed exactly where the header names gzip with a quality above 0, and says the same."""
    assert accepts_gzip(accept_encoding) == expected
    (rendered,) = render(accept_encoding=accept_encoding)
    assert rendered.is_gzip == expected
    body = gzip.decompress(rendered.body) if expected else rendered.body
    assert body.startswith(b"# HELP gpu_hpc_up ")


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, DEFAULT_DEADLINE_S),
        ("", DEFAULT_DEADLINE_S),
        ("0.5", 0.4),
        ("10", 8.0),
        (" 15.000 ", 12.0),
        ("1e1", 8.0),
        ("junk", DEFAULT_DEADLINE_S),
        ("10s", DEFAULT_DEADLINE_S),
        ("nan", DEFAULT_DEADLINE_S),
        ("inf", 30.0),
        ("-inf", DEFAULT_DEADLINE_S),
        ("-1", DEFAULT_DEADLINE_S),
        ("0", DEFAULT_DEADLINE_S),
        ("1e9", 30.0),
        ("9" * 5000, 30.0),
    ],
)
def test_deadline(header: str | None, seconds: float) -> None:
    """Four fifths of what Prometheus says it waits; its default where it says nothing that can be true."""
    assert parse_deadline(header) == pytest.approx(seconds)


class Faulty:
    """A collector that gives one family and then fails."""

    name = "faulty"

    def collect(self, snapshot: FleetSnapshot) -> Iterator[Family]:
        """Half of what it promised."""
        family = UP.family()
        family.add(len(snapshot.gpus))
        yield family
        raise RuntimeError("no such sensor")


class FaultyAtOnce:
    """A collector that does not even begin."""

    name = "faulty_at_once"

    def collect(self, snapshot: FleetSnapshot) -> Iterator[Family]:
        """Nothing."""
        raise KeyError(snapshot.now_ns)


def busy_fleet() -> Fleet:
    """Two GPUs of which every reading is known and both had windows, of which one is in trouble."""
    fleet = running_fleet(G0, G1)
    for gpu in (G0, G1):
        fleet.put(IntervalInForce(NS, gpu.uuid, "gpm", NS // 10))
        for second in (9, 10):
            fleet.put(readings(second, dict.fromkeys(READINGS, 1.0), gpu.uuid))
            fleet.put(window(second, {"sm_active": 0.96, "pipe_tensor": 0.93, "dram_active": 0.17}, uuid=gpu.uuid))
    fleet.put(StateChange(2 * NS, "gpm", G1.uuid, "failed", 'gpu "is"\nlost'))
    return fleet


@asynccontextmanager
async def scraping(
    snapshot: Callable[[], FleetSnapshot] | None = None,
    collectors: Sequence[Collector] = COLLECTORS,
    series_limit: int = 20_000,
) -> AsyncIterator[Scrape]:
    """A Scrape, closed at the end."""
    settings = ExpositionSettings(series_limit)
    scrape = Scrape(snapshot or busy_fleet().snapshot, collectors, lambda: settings)
    try:
        yield scrape
    finally:
        scrape.close()


def render(
    accept: str = "",
    snapshot: Callable[[], FleetSnapshot] | None = None,
    collectors: Sequence[Collector] = COLLECTORS,
    *,
    times: int = 1,
    accept_encoding: str = "",
    series_limit: int = 20_000,
) -> list[Rendered]:
    """What as many concurrent scrapes get."""

    async def scrapes() -> list[Rendered]:
        async with scraping(snapshot, collectors, series_limit) as scrape:
            return await asyncio.gather(*(scrape.render(accept, accept_encoding) for _ in range(times)))

    return asyncio.run(scrapes())


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [("", "text/plain; version=0.0.4; charset=utf-8"), (PROMETHEUS_3_0, CONTENT_TYPE_LATEST)],
)
def test_content_type(accept: str, content_type: str) -> None:
    """The exact content types that Prometheus 3 insists on."""
    (rendered,) = render(accept)
    assert rendered.content_type == content_type
    assert CONTENT_TYPE_PLAIN_0_0_4 == "text/plain; version=0.0.4; charset=utf-8"


def test_the_text_exposition_parses_without_duplicates() -> None:
    """All of it is valid, no series comes twice, and every family is in the catalogue or the process's own."""
    (rendered,) = render()
    text = rendered.body.decode("utf-8")
    samples = parse(text)
    assert samples.one("gpu_hpc_up") == 1
    assert samples.one("gpu_hpc_bottleneck_seconds_total", gpu="0", **{"class": "throttled"}) == 2
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(set(families)) == len(families)
    known = {spec.name.removesuffix("_total") for spec in CATALOGUE}
    assert {name for name in families if not name.startswith("process_")} <= known


def openmetrics_families(text: str) -> Iterable[Metric]:
    """What prometheus_client's strict parser makes of an OpenMetrics exposition."""
    return list(parse_openmetrics(text))  # type: ignore[no-untyped-call]  # the library has no types


def test_the_openmetrics_exposition_parses() -> None:
    """The strict OpenMetrics parser takes all of it, and it says the same as the text."""
    (rendered,) = render(PROMETHEUS_3_0)
    text = rendered.body.decode("utf-8")
    assert text.endswith("# EOF\n")
    names = {sample.name for family in openmetrics_families(text) for sample in family.samples}
    assert names == {name for name, _ in parse(render()[0].body.decode()).values}


def test_an_empty_fleet_is_served() -> None:
    """Before the first inventory there is an exposition in both formats, which says that nothing is up."""
    fleet = Fleet(Clock(), GAUGE_WINDOW_NS)
    for accept, parser in (("", text_string_to_metric_families), (PROMETHEUS_2_42, openmetrics_families)):
        (rendered,) = render(accept, fleet.snapshot)
        samples = {s.name: s for family in parser(rendered.body.decode()) for s in family.samples}
        assert samples["gpu_hpc_up"].value == 0
        assert samples["gpu_hpc_down_info"].labels == {"reason": "starting"}


def test_a_faulty_collector_costs_only_its_own_families(caplog: pytest.LogCaptureFixture) -> None:
    """The others are served, success 0 names the faulty one, the log has the cause, half a result is dropped."""
    caplog.set_level(logging.ERROR, logger="gpu_hpc_exporter.scrape")
    others = [collector for collector in COLLECTORS if collector.name != "sources"]
    (rendered,) = render(collectors=[Faulty(), *others, FaultyAtOnce()])
    samples = parse(rendered.body.decode())
    success = {
        dict(labels)["collector"]: value for labels, value in samples.all("gpu_hpc_scrape_collector_success").items()
    }
    assert success == {"faulty": 0, "faulty_at_once": 0, **{collector.name: 1 for collector in others}}
    assert samples.get("gpu_hpc_up") is None
    assert len(samples.all("gpu_hpc_sm_active_ratio")) == 2
    assert len(samples.all("gpu_hpc_scrape_collector_duration_seconds")) == len(success)
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "collector faulty failed",
        "collector faulty_at_once failed",
    ]
    assert all(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("accept", ["", PROMETHEUS_3_0])
@pytest.mark.parametrize("series_limit", [20_000, 100])
def test_exposed_series_counts_all_samples(accept: str, series_limit: int) -> None:
    """The exposition says how many samples it really has, itself included, so that one sees a limit coming."""
    text = render(accept, series_limit=series_limit)[0].body.decode()
    samples = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert f"gpu_hpc_exposed_series {float(len(samples))}" in samples


class Counting:
    """A source of snapshots that counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self._fleet = busy_fleet()

    def __call__(self) -> FleetSnapshot:
        self.asked += 1
        return self._fleet.snapshot()


def test_concurrent_scrapes_share_one_rendering() -> None:
    """Two Prometheus servers cost one rendering."""
    snapshot = Counting()
    first, *others = render(PROMETHEUS_2_42, snapshot, times=5)
    assert snapshot.asked == 1
    assert all(other is first for other in others)


def test_each_form_is_rendered_for_itself() -> None:
    """A text scrape is not answered with the OpenMetrics or the packed rendering of the moment before."""
    snapshot = Counting()

    async def scrapes() -> list[Rendered]:
        async with scraping(snapshot) as scrape:
            wanted = [("", ""), (PROMETHEUS_3_0, ""), ("", "gzip"), ("", "br"), ("*/*", "gzip;q=1")]
            return [await scrape.render(accept, encoding) for accept, encoding in wanted]

    text, openmetrics, packed, text_again, packed_again = asyncio.run(scrapes())
    assert snapshot.asked <= 3
    assert (text_again is text, packed_again is packed) == (True, True)
    assert (text.is_gzip, packed.is_gzip, openmetrics.is_gzip) == (False, True, False)
    assert openmetrics.content_type == CONTENT_TYPE_LATEST


@pytest.mark.parametrize("accept", ["", PROMETHEUS_3_0])
def test_the_packed_body_says_the_same(accept: str) -> None:
    """Unpacked, the gzip body is an exposition like the plain one, and smaller on the way."""
    fleet = busy_fleet()
    collectors = [c for c in COLLECTORS if c.name != "process"]
    (plain,) = render(accept, fleet.snapshot, collectors)
    (packed,) = render(accept, fleet.snapshot, collectors, accept_encoding="gzip")
    unpacked = gzip.decompress(packed.body)
    varying = ("gpu_hpc_scrape_collector_duration", "gpu_hpc_last_window", "gpu_hpc_config_reload_timestamp")
    lines = [[ln for ln in b.decode().splitlines() if not ln.startswith(varying)] for b in (plain.body, unpacked)]
    assert lines[0] == lines[1]
    assert len(packed.body) < len(plain.body) / 4
    assert packed.content_type == plain.content_type


@pytest.mark.parametrize(
    ("age", "is_same", "asked"),
    [
        (0.0, True, 1),
        (FRESH_S - 0.01, True, 1),
        (FRESH_S + 0.01, True, 2),
        (MAX_AGE_S - 0.01, True, 2),
        (MAX_AGE_S + 0.01, False, 2),
        (3600.0, False, 2),
    ],
)
def test_age_of_what_is_served(monkeypatch: pytest.MonkeyPatch, age: float, asked: int, *, is_same: bool) -> None:
    """Fresh: as it is. Up to a second old: at once, while a new one is made. Older: never."""
    snapshot = Counting()
    monkeypatch.setattr("gpu_hpc_exporter.scrape.time", clock := FrozenTime())

    async def scrapes() -> tuple[Rendered, Rendered, Rendered]:
        async with scraping(snapshot) as scrape:
            first = await scrape.render("")
            clock.now += age
            second = await scrape.render("")
            await settled()
            return first, second, await scrape.render("")

    first, second, third = asyncio.run(scrapes())
    assert (second is first, snapshot.asked) == (is_same, asked)
    assert (third is first) == (asked == 1)


class FrozenTime:
    """The time module as a Scrape uses it, with a monotonic clock that is set by hand."""

    perf_counter = staticmethod(time.perf_counter)
    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """The time set."""
        return self.now


async def settled() -> None:
    """Wait for what was begun in the background."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=10)


def test_a_failed_rendering_is_not_kept() -> None:
    """When a snapshot cannot be taken the scrape fails, and the next one is tried again."""
    fleet = busy_fleet()
    attempts = iter([RuntimeError("first"), None])

    def snapshot() -> FleetSnapshot:
        problem = next(attempts)
        if problem:
            raise problem
        return fleet.snapshot()

    async def scrapes() -> Rendered:
        async with scraping(snapshot) as scrape:
            with pytest.raises(RuntimeError, match="first"):
                await scrape.render("")
            return await scrape.render("")

    assert b"gpu_hpc_up 1" in asyncio.run(scrapes()).body


class Blocking:
    """A collector that waits for leave, as one does whose data comes from a stuck driver."""

    name = "blocking"

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.leave = threading.Event()
        self.started = 0

    def collect(self, _: FleetSnapshot) -> Iterator[Family]:
        """One family, late."""
        self.started += 1
        self.begun.set()
        assert self.leave.wait(30)
        family = SM_ACTIVE.family()
        family.add(self.started, "0", G0.uuid)
        yield family


SOURCES = COLLECTORS[0]


def test_a12_a_stuck_collector_costs_its_own_families(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A12: each answer comes at its deadline without the families, and the stuck collector is not started twice."""
    blocking = Blocking()
    deadline_s = 0.4  # which the other collector must keep on a busy machine too
    monkeypatch.setattr("gpu_hpc_exporter.scrape.time", clock := FrozenTime())

    async def scrapes() -> list[Rendered]:
        async with scraping(None, [blocking, SOURCES]) as scrape:
            answers = []
            for _ in range(8):
                clock.now += 10
                begin = time.monotonic()
                answers.append(await scrape.render("", "", deadline_s))
                assert time.monotonic() - begin < 15  # the collector would wait 30 s
            return answers

    threads = threading.active_count()
    try:
        answers = asyncio.run(scrapes())
        assert threading.active_count() <= threads + 4
    finally:
        blocking.leave.set()
    assert blocking.started == 1
    for rendered in answers:
        samples = parse(rendered.body.decode())
        assert samples.one("gpu_hpc_scrape_collector_success", collector="blocking") == 0
        assert samples.one("gpu_hpc_scrape_collector_success", collector="sources") == 1
        assert samples.one("gpu_hpc_scrape_collector_duration_seconds", collector="blocking") == deadline_s
        assert (samples.one("gpu_hpc_up"), samples.all("gpu_hpc_sm_active_ratio")) == (1, {})
    assert "collector blocking did not finish in 0.4 s" in caplog.text


def test_a_collector_that_was_stuck_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has let go, a later scrape starts it again and has its families."""
    blocking = Blocking()
    monkeypatch.setattr("gpu_hpc_exporter.scrape.time", clock := FrozenTime())

    async def scrapes() -> list[Rendered]:
        async with scraping(None, [blocking, SOURCES]) as scrape:
            answers = [await scrape.render("", "", 0.01)]
            blocking.leave.set()
            while b"gpu_hpc_sm_active_ratio{" not in answers[-1].body and len(answers) < 1000:
                clock.now += 10
                answers.append(await scrape.render("", "", 10))
            return answers

    try:
        answers = asyncio.run(scrapes())
    finally:
        blocking.leave.set()
    samples = parse(answers[-1].body.decode())
    assert samples.one("gpu_hpc_sm_active_ratio", gpu="0") == blocking.started == 2
    assert samples.one("gpu_hpc_scrape_collector_success", collector="blocking") == 1


def test_a_stuck_collector_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A collector that stays stuck for days does not fill the log."""
    blocking = Blocking()
    monkeypatch.setattr("gpu_hpc_exporter.scrape.time", clock := FrozenTime())

    async def scrapes() -> None:
        async with scraping(None, [blocking, SOURCES]) as scrape:
            for _ in range(5):
                clock.now += 10
                await scrape.render("", "", 0.01)

    try:
        asyncio.run(scrapes())
    finally:
        blocking.leave.set()
    assert len(caplog.records) == 1


def test_a_scrape_in_another_form_meanwhile_is_whole() -> None:
    """While Prometheus's scrape is being made, one by curl gets all families too: nothing is stuck."""
    blocking = Blocking()

    async def scrapes() -> list[Rendered]:
        async with scraping(None, [blocking, SOURCES]) as scrape:
            first = asyncio.create_task(scrape.render(PROMETHEUS_3_0, "", 10))
            await asyncio.to_thread(blocking.begun.wait, 60)
            second = asyncio.create_task(scrape.render("", "", 10))
            await asyncio.wait([second], timeout=0.2)
            blocking.leave.set()
            return [await first, await second]

    try:
        answers = asyncio.run(scrapes())
    finally:
        blocking.leave.set()
    assert [b"gpu_hpc_sm_active_ratio{" in rendered.body for rendered in answers] == [True, True]


class Fixed:
    """A collector of these samples: per family the label values."""

    def __init__(self, name: str, *families: tuple[Spec, list[tuple[str, ...]]]) -> None:
        self.name = name
        self._families = families

    def collect(self, _: FleetSnapshot) -> Iterator[Family]:
        """Each sample's value is its position."""
        for spec, samples in self._families:
            family = spec.family()
            for position, labels in enumerate(samples):
                family.add(position, *labels)
            yield family


def gpus(count: int) -> list[tuple[str, ...]]:
    """Labels of so many GPUs."""
    return [(str(n), f"GPU-{n}") for n in range(count)]


def test_h03_duplicates_are_dropped_and_counted() -> None:
    """H03: of equal series the first stays, of equal families the first; an exposition with two would be refused."""
    twice = Fixed("twice", (SM_ACTIVE, [("0", "G"), ("1", "H"), ("0", "G"), ("0", "G")]))
    again = Fixed("again", (SM_ACTIVE, [("2", "I"), ("3", "K")]), (UP, [()]))
    (rendered,) = render("", None, [twice, again])
    samples = parse(rendered.body.decode())
    values = {dict(labels)["gpu"]: value for labels, value in samples.all("gpu_hpc_sm_active_ratio").items()}
    assert values == {"0": 0, "1": 1}
    assert samples.get("gpu_hpc_up") == 0
    assert samples.one("gpu_hpc_dropped_series_total", reason="duplicate") == 4
    assert samples.one("gpu_hpc_dropped_series_total", reason="series_limit") == 0
    assert rendered.body.count(b"# TYPE gpu_hpc_sm_active_ratio ") == 1


@pytest.mark.parametrize(
    ("limit", "kept", "dropped"),
    [
        (8, ["gpu_hpc_sm_active_ratio", "gpu_hpc_up", "gpu_hpc_replay"], 0),
        (7, ["gpu_hpc_sm_active_ratio", "gpu_hpc_up"], 2),
        (6, ["gpu_hpc_sm_active_ratio", "gpu_hpc_up"], 2),
        (5, ["gpu_hpc_sm_active_ratio"], 3),
        (4, ["gpu_hpc_up", "gpu_hpc_replay"], 5),
        (0, [], 8),
    ],
)
def test_the_series_limit_drops_whole_families(limit: int, kept: list[str], dropped: int) -> None:
    """I06: a family is served whole or not at all; one that still fits is, and what was left out is counted."""
    replay = Spec("gpu_hpc_replay", "gauge", "Two.", ("a",))
    first = Fixed("first", (SM_ACTIVE, gpus(5)))
    second = Fixed("second", (UP, [()]), (replay, [("a",), ("b",)]))
    (rendered,) = render("", None, [first, second], series_limit=limit)
    samples = parse(rendered.body.decode())
    wanted = ("gpu_hpc_sm_active_ratio", "gpu_hpc_up", "gpu_hpc_replay")
    assert [name for name in wanted if samples.all(name)] == kept
    assert samples.one("gpu_hpc_dropped_series_total", reason="series_limit") == dropped
    assert samples.one("gpu_hpc_dropped_series_total", reason="duplicate") == 0
    assert samples.one("gpu_hpc_series_limit") == limit


def test_dropped_series_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a counter: every exposition adds what it left out."""
    monkeypatch.setattr("gpu_hpc_exporter.scrape.time", clock := FrozenTime())

    async def scrapes() -> list[float]:
        counts = []
        async with scraping(None, [Fixed("five", (SM_ACTIVE, gpus(5)))], 1) as scrape:
            for _ in range(3):
                clock.now += 10
                samples = parse((await scrape.render("")).body.decode())
                counts.append(samples.one("gpu_hpc_dropped_series_total", reason="series_limit"))
        return counts

    assert asyncio.run(scrapes()) == [5, 10, 15]


def test_a_reload_shows() -> None:
    """Whether the newest configuration is in force, since when, and its limit."""
    for settings in (ExpositionSettings(7, loaded_at=123.5), ExpositionSettings(8, reload_succeeded=False)):

        async def scrape(settings: ExpositionSettings = settings) -> Rendered:
            scrape = Scrape(busy_fleet().snapshot, [SOURCES], lambda: settings)
            rendered = await scrape.render("")
            scrape.close()
            return rendered

        samples = parse(asyncio.run(scrape()).body.decode())
        assert samples.one("gpu_hpc_config_reload_success") == settings.reload_succeeded
        assert samples.one("gpu_hpc_config_reload_timestamp_seconds") == pytest.approx(settings.loaded_at)
        assert samples.one("gpu_hpc_series_limit") == settings.series_limit
