"""The HTTP server over real connections: what it answers to whom, and what it refuses."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import pytest
from aiohttp.test_utils import TestClient, TestServer, make_mocked_request
from aiohttp.web import Application, Request

from exporter_process import parse
from gpu_hpc_exporter.app import _is_loopback, build_app, not_ready_reason, serve
from gpu_hpc_exporter.collectors import COLLECTORS
from gpu_hpc_exporter.config import ConfigError
from gpu_hpc_exporter.exporter import Outcome
from gpu_hpc_exporter.exposition import Family
from gpu_hpc_exporter.samplers.fleet import Fleet, FleetSnapshot
from gpu_hpc_exporter.samplers.kernel_recent import RecentActivity
from gpu_hpc_exporter.samplers.window_history import WindowSlice
from gpu_hpc_exporter.scrape import ExpositionSettings
from unit.objects import G0, G1, GAUGE_WINDOW_NS, M1, Clock, inventory, readings, running_fleet, state

T = TypeVar("T")
Client = TestClient[Request, Application]

TEXT = "text/plain; version=0.0.4; charset=utf-8"


def read_fleet() -> Fleet:
    """One GPU that was read."""
    fleet = running_fleet(G0)
    fleet.put(state("nvml", G0.uuid, "active"))
    fleet.put(readings(9, {"power_gpu_watts": 300.0}))
    return fleet


class Scripted:
    """An exporter that notes what it is asked for and answers as told."""

    def __init__(self, fleet: Fleet | None = None, problem: str = "", outcome: Outcome | None = None) -> None:
        self._fleet = fleet or read_fleet()
        self._problem = problem
        self._outcome = outcome or Outcome("done", "so be it")
        self.asked: list[tuple[str, float]] = []
        self.until = ""

    def snapshot(self) -> FleetSnapshot:
        """The fleet's."""
        return self._fleet.snapshot()

    def windows_since(self, sequences: Mapping[str, int]) -> tuple[int, Mapping[str, WindowSlice]]:
        """The fleet's."""
        return self._fleet.windows_since(sequences)

    def windows(self, uuid: str, length_ns: int) -> tuple[int, WindowSlice] | None:
        """The fleet's."""
        return self._fleet.windows(uuid, length_ns)

    def recent_kernels(self) -> Mapping[tuple[str, str], RecentActivity]:
        """The fleet's."""
        return self._fleet.recent_kernels()

    def settings(self) -> ExpositionSettings:
        """The usual ones."""
        return ExpositionSettings(20_000)

    def released(self) -> str:
        """As set."""
        return self.until

    async def reload(self) -> str:
        """The problem, if any."""
        return self._problem

    async def pause(self, seconds: float) -> Outcome:
        """Note it."""
        return self._note("pause", seconds)

    async def release(self, seconds: float) -> Outcome:
        """Note it."""
        return self._note("release", seconds)

    async def resume(self) -> Outcome:
        """Note it."""
        return self._note("resume", 0)

    def _note(self, what: str, seconds: float) -> Outcome:
        self.asked.append((what, seconds))
        return self._outcome


@asynccontextmanager
async def client(backend: Scripted, path: str = "/metrics") -> AsyncIterator[Client]:
    """A client of a server for `backend`."""
    async with TestClient(TestServer(build_app(backend, path))) as connected:
        yield connected


async def ask(client: Client, method: str, path: str, **more: Any) -> tuple[int, str]:
    """Status and text of one answer."""
    async with client.request(method, path, **more) as answer:
        return answer.status, await answer.text()


def run(what: Callable[[Client], Awaitable[T]], backend: Scripted | None = None, path: str = "/metrics") -> T:
    """The result of `what` with a client."""

    async def connected() -> T:
        async with client(backend or Scripted(), path) as opened:
            return await what(opened)

    return asyncio.run(connected())


@pytest.mark.parametrize(
    ("method", "path", "status", "start"),
    [
        ("GET", "/metrics", 200, "# HELP gpu_hpc_up "),
        ("GET", "/metrics?name[]=up&x=%ff", 200, "# HELP gpu_hpc_up "),
        ("GET", "/", 200, "<!doctype html>"),
        ("GET", "/-/healthy", 200, "healthy\n"),
        ("GET", "/-/ready", 200, "ready\n"),
        ("POST", "/-/reload", 200, "reloaded\n"),
        ("GET", "/-/reload", 405, "405"),
        ("PUT", "/-/reload", 405, "405"),
        ("POST", "/metrics", 405, "405"),
        ("DELETE", "/metrics", 405, "405"),
        ("POST", "/", 405, "405"),
        ("GET", "/metrics/", 404, "404"),
        ("GET", "/Metrics", 404, "404"),
        ("POST", "/-/pause", 200, "so be it\n"),
        ("POST", "/-/pause?seconds=5", 200, "so be it\n"),
        ("POST", "/-/resume", 200, "so be it\n"),
        ("POST", "/-/release?seconds=5", 200, "so be it\n"),
        ("GET", "/-/pause", 405, "405"),
        ("HEAD", "/-/release", 405, ""),
        ("PUT", "/-/resume", 405, "405"),
        ("POST", "/-/pause/", 404, "404"),
        ("GET", "/-/quit", 404, "404"),
        ("GET", "/../etc/passwd", 404, "404"),
        ("GET", "/%2e%2e/x", 404, "404"),
        ("GET", "/debug/pprof/", 404, "404"),
    ],
)
def test_answers(method: str, path: str, status: int, start: str) -> None:
    """What there is is answered, other methods are refused, other paths are not there."""
    answered = run(lambda client: ask(client, method, path))
    assert (answered[0], answered[1][: len(start)]) == (status, start)


@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy", "/nothing"])
@pytest.mark.parametrize(
    "body", [{"data": b"x"}, {"json": {}}, {"data": b"x" * 1_000_000}], ids=["byte", "JSON", "1 MB"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_bodies_are_refused(method: str, path: str, body: dict[str, Any]) -> None:
    """No request of ours has a body: one that brings one is refused unread, and the connection ends."""

    async def asked(client: Client) -> tuple[int, str, str]:
        async with client.request(method, path, **body) as answer:
            return answer.status, await answer.text(), answer.headers.get("Connection", "")

    assert run(asked) == (413, "requests with a body are refused\n", "close")


def test_a_body_in_chunks_is_refused() -> None:
    """A length need not be told to be refused; the control path refuses it too, and does nothing."""

    async def chunks() -> AsyncIterator[bytes]:
        yield b"x"

    assert run(lambda client: ask(client, "POST", "/-/reload", data=chunks()))[0] == 413


def test_the_server_answers_after_refusals() -> None:
    """A client that sends bodies does not keep others from being served."""

    async def asked(client: Client) -> list[int]:
        return [
            (await ask(client, method, "/metrics", data=data))[0] for method, data in [("POST", b"x"), ("GET", None)]
        ]

    assert run(asked) == [413, 200]


@pytest.mark.parametrize(
    ("headers", "content_type", "is_gzip"),
    [
        ({"Accept-Encoding": "identity"}, TEXT, False),
        ({"Accept-Encoding": "gzip"}, TEXT, True),
        ({"Accept-Encoding": "br, deflate"}, TEXT, False),
        (
            {"Accept": "application/openmetrics-text;version=1.0.0", "Accept-Encoding": "gzip"},
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
            True,
        ),
        ({"X-Prometheus-Scrape-Timeout-Seconds": "junk", "Accept-Encoding": ""}, TEXT, False),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_headers_of_an_exposition(method: str, headers: dict[str, str], content_type: str, *, is_gzip: bool) -> None:
    """The exact content type, the encoding, and what an answer depends on; HEAD says the same without a body."""

    async def asked(client: Client) -> tuple[int, str | None, str | None, str | None, bytes]:
        client.session._auto_decompress = False  # noqa: SLF001  the body as it comes
        async with client.request(method, "/metrics", headers=headers) as answer:
            got = answer.headers
            named = (got.get("Content-Type"), got.get("Content-Encoding"), got.get("Vary"))
            return answer.status, *named, await answer.read()

    status, kind, encoding, vary, body = run(asked)
    assert (status, kind, encoding) == (200, content_type, "gzip" if is_gzip else None)
    assert vary == "Accept, Accept-Encoding"
    if method == "HEAD":
        assert body == b""
    else:
        text = (gzip.decompress(body) if is_gzip else body).decode()
        assert parse(text).one("gpu_hpc_up") == 1


def test_another_telemetry_path() -> None:
    """Metrics are where they were configured to be, the page links there, and /metrics is not there."""

    async def asked(client: Client) -> list[tuple[int, str]]:
        return [await ask(client, "GET", path) for path in ("/gpu/m", "/metrics", "/")]

    (found, _), (missing, _), (_, page) = run(asked, path="/gpu/m")
    assert (found, missing, 'href="gpu/m"' in page) == (200, 404, True)


class Sick:
    """A collector that fails, or that waits until it is let go."""

    def __init__(self, name: str, leave: threading.Event | None = None) -> None:
        self.name = name
        self._leave = leave

    def collect(self, _: FleetSnapshot) -> Iterator[Family]:
        """Nothing. Raises RuntimeError where it has nothing to wait for."""
        if self._leave is None:
            raise RuntimeError
        self._leave.wait(60)
        yield from ()


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("*/*", TEXT),
        ("application/openmetrics-text;version=1.0.0", "application/openmetrics-text; version=1.0.0; charset=utf-8"),
    ],
)
@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_h06_i01_a_page_that_lacks_something_is_one_too(
    monkeypatch: pytest.MonkeyPatch, method: str, accept: str, content_type: str, encoding: str
) -> None:
    """H06, I01: with a collector that fails and one that takes longer than Prometheus waits, behind a proxy's path."""
    leave = threading.Event()
    collectors = (Sick("broken"), Sick("slow", leave), *COLLECTORS)
    monkeypatch.setattr("gpu_hpc_exporter.app.COLLECTORS", collectors)
    headers = {"Accept": accept, "Accept-Encoding": encoding, "X-Prometheus-Scrape-Timeout-Seconds": "1"}

    async def asked(client: Client) -> tuple[int, str | None, str]:
        try:
            async with asyncio.timeout(30), client.request(method, "/gpu/metrics", headers=headers) as answer:
                return answer.status, answer.headers.get("Content-Type"), await answer.text()
        finally:
            assert not leave.is_set()
            leave.set()

    status, kind, text = run(asked, path="/gpu/metrics")
    assert (status, kind) == (200, content_type)
    if method == "GET":
        for name, success in (("broken", 0), ("slow", 0), ("gpus", 1)):
            assert f'gpu_hpc_scrape_collector_success{{collector="{name}"}} {success}.0\n' in text
        assert f'uuid="{G0.uuid}"' in text


class Unserved(Scripted):
    """An exporter of which nothing can be rendered."""

    def settings(self) -> ExpositionSettings:
        """None. Raises RuntimeError."""
        raise RuntimeError


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize(("path", "expected"), [("/metrics", 500), ("/metrics/", 404), ("/gpu/metrics", 404)])
def test_h06_errors_are_neither_200_nor_html(method: str, path: str, expected: int) -> None:
    """H06: Prometheus takes what is no 2xx for a failed scrape, and nothing else."""

    async def asked(client: Client) -> tuple[int, str | None]:
        headers = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"}
        async with client.request(method, path, headers=headers) as answer:
            return answer.status, answer.headers.get("Content-Type")

    assert run(asked, Unserved()) == (expected, "text/plain; charset=utf-8")


def test_a_failed_reload_says_why() -> None:
    """A reload that changed nothing is an error with the reason in the body."""
    answered = run(lambda client: ask(client, "POST", "/-/reload"), Scripted(problem="config.yaml: line 2: no"))
    assert answered == (500, "config.yaml: line 2: no\n")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/-/pause", ("pause", 600)),
        ("/-/pause?seconds=1", ("pause", 1)),
        ("/-/pause?seconds=86400", ("pause", 86400)),
        ("/-/release", ("release", 60)),
        ("/-/release?seconds=3600", ("release", 3600)),
        ("/-/resume", ("resume", 0)),
    ],
)
def test_control_asks_the_exporter(path: str, expected: tuple[str, float]) -> None:
    """For so many seconds as the query says, or the default."""
    backend = Scripted()
    assert run(lambda client: ask(client, "POST", path), backend) == (200, "so be it\n")
    assert backend.asked == [expected]


@pytest.mark.parametrize(
    "query",
    [
        "seconds=",
        "seconds=0",
        "seconds=-1",
        "seconds=86401",
        "seconds=1e3",
        "seconds=1.5",
        "seconds=10m",
        "seconds=%D9%A3",
        "seconds=nan",
        "seconds=9" + "9" * 5000,
        "seconds=1&seconds=2",
        "second=5",
        "seconds=5&force=1",
    ],
)
def test_a_bad_span_is_refused(query: str) -> None:
    """One line says what is expected, and nothing happens; a misspelt parameter is no default."""
    backend = Scripted()
    answer = run(lambda client: ask(client, "POST", f"/-/pause?{query}"), backend)
    assert answer == (400, "expected ?seconds=N, a whole number from 1 to 86400 (default 600)\n")
    assert backend.asked == []


def test_a_release_is_shorter_than_a_pause() -> None:
    """The limit told is the action's own."""
    answer = run(lambda client: ask(client, "POST", "/-/release?seconds=3601"))
    assert answer == (400, "expected ?seconds=N, a whole number from 1 to 3600 (default 60)\n")


@pytest.mark.parametrize(("kind", "status"), [("done", 200), ("refused", 409), ("failed", 503)])
@pytest.mark.parametrize("action", ["pause", "resume", "release"])
def test_statuses_of_control(action: str, kind: Literal["done", "refused", "failed"], status: int) -> None:
    """What came of it is told in words and as a status."""
    backend = Scripted(outcome=Outcome(kind, "GPU 1 hangs"))
    assert run(lambda client: ask(client, "POST", f"/-/{action}"), backend) == (status, "GPU 1 hangs\n")


@pytest.mark.parametrize("action", ["pause", "resume", "release", "reload"])
def test_control_by_another_method(action: str) -> None:
    """The answer to a GET names the method there is."""

    async def asked(client: Client) -> tuple[int, str]:
        async with client.get(f"/-/{action}") as answer:
            return answer.status, answer.headers["Allow"]

    assert run(asked) == (405, "POST")


@pytest.mark.parametrize("action", ["pause", "resume", "release", "reload"])
def test_a_web_page_cannot_control(action: str) -> None:
    """A page in a browser on this machine comes from loopback too; browsers say which page it was."""
    backend = Scripted()
    headers = {"Origin": "http://evil.example"}
    answer = run(lambda client: ask(client, "POST", f"/-/{action}", headers=headers), backend)
    assert answer == (403, "control is open to this machine and to authenticated users only\n")
    assert backend.asked == []


@pytest.mark.parametrize("header", ["Forwarded", "Via", "X-Forwarded-For", "X-Real-IP"])
def test_a_proxy_on_this_machine_cannot_control(header: str) -> None:
    """It asks for others, who are not on this machine."""
    backend = Scripted()
    answer = run(lambda client: ask(client, "POST", "/-/release", headers={header: "127.0.0.1"}), backend)
    assert answer == (403, "control is open to this machine and to authenticated users only\n")
    assert backend.asked == []


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity"])
def test_encoded_requests_are_refused(encoding: str) -> None:
    """With a body or without: nothing is unpacked."""
    headers = {"Content-Encoding": encoding}
    assert run(lambda client: ask(client, "GET", "/metrics", headers=headers))[0] == 415


def test_a_released_exporter_is_not_ready() -> None:
    """Whatever the fleet says, the release is the reason, and until when."""
    backend = Scripted()
    backend.until = "released until 2026-01-31T12:00:00Z"
    answer = run(lambda client: ask(client, "GET", "/-/ready"), backend)
    assert answer == (503, "not ready: released until 2026-01-31T12:00:00Z\n")


@pytest.mark.parametrize(
    ("remote", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("0.0.0.0", False),  # noqa: S104 - compared, not bound
        ("::", False),
        ("fe80::1%eth0", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_control_is_open_to_this_machine_only(remote: str, *, expected: bool) -> None:
    """Loopback addresses in every form, by the connection's address alone and not by what a header claims."""
    headers = {"X-Forwarded-For": "127.0.0.1", "Forwarded": "for=127.0.0.1", "Host": "localhost"}
    request = make_mocked_request("POST", "/-/reload", headers).clone(remote=remote)
    assert _is_loopback(request) == expected


def test_a01_a_fleet_that_is_down_is_healthy_and_not_ready() -> None:
    """A01: without a driver the process is alive, says why it is not ready, and serves its exposition."""
    fleet = Fleet(Clock(), GAUGE_WINDOW_NS)
    fleet.put(state("nvml", "", "failed"))

    async def asked(client: Client) -> list[tuple[int, str]]:
        return [await ask(client, "GET", path) for path in ("/-/healthy", "/-/ready", "/metrics")]

    healthy, ready, metrics = run(asked, Scripted(fleet))
    assert (healthy, ready, metrics[0]) == ((200, "healthy\n"), (503, "not ready: failed\n"), 200)
    assert parse(metrics[1]).one("gpu_hpc_up") == 0


def test_readiness_waits_until_every_gpu_was_asked() -> None:
    """Each GPU and instance has to have been asked once, with whatever outcome; GPUs that all went are not ready."""
    fleet = running_fleet(G0, G1, M1)
    assert not_ready_reason(fleet.snapshot()) == f"no readings yet of {G0.uuid}, {G1.uuid}, {M1.uuid}"
    fleet.put(state("nvml", G1.uuid, "active"))
    fleet.put(state("nvml", M1.uuid, "unsupported"))
    assert not_ready_reason(fleet.snapshot()) == f"no readings yet of {G0.uuid}"
    fleet.put(state("nvml", G0.uuid, "failed"))
    assert not_ready_reason(fleet.snapshot()) == ""
    fleet.put(inventory())
    assert not_ready_reason(fleet.snapshot()) == "none of 2 GPUs can be read"


def test_a_gpu_without_values_is_not_waited_for() -> None:
    """A lost GPU, or one behind a hung call, does not keep the node from being ready for the others."""
    fleet = running_fleet(G0, G1)
    fleet.put(state("nvml", G0.uuid, "active"))
    fleet.put(state("nvml", G1.uuid, "lost"))
    assert not_ready_reason(fleet.snapshot()) == ""


def test_many_requests_at_once() -> None:
    """Twenty scrapes, health and the page at the same time are all answered."""

    async def asked(client: Client) -> list[int]:
        answers = await asyncio.gather(
            *(ask(client, "GET", path) for path in ["/metrics"] * 20 + ["/-/healthy", "/", "/-/ready"])
        )
        return [status for status, _ in answers]

    assert run(asked) == [200] * 23


def test_an_address_that_is_taken_is_a_config_error() -> None:
    """The message names the address and the flag."""

    async def serve_twice() -> None:
        async with client(Scripted()) as opened:
            await serve(build_app(Scripted()), [("127.0.0.1", opened.port or 0)], asyncio.Event())

    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: .*; see --web\.listen-address"):
        asyncio.run(serve_twice())


def test_serving_ends_when_asked() -> None:
    """With the stop set, the server comes up on every address and goes down again."""

    async def serve_shortly() -> None:
        stop = asyncio.Event()
        stop.set()
        await serve(build_app(Scripted()), [("127.0.0.1", 0), ("localhost", 0)], stop)

    asyncio.run(asyncio.wait_for(serve_shortly(), 60))
