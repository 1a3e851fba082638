"""What anybody on the network sends: bytes that are requests or none, headers, queries."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import bcrypt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_hpc_exporter.access import Users
from gpu_hpc_exporter.app import MAX_PAUSE_S, build_app, serve
from gpu_hpc_exporter.connections import MAX_HEAD
from gpu_hpc_exporter.exposition import OPENMETRICS, TEXT
from gpu_hpc_exporter.scrape import accepts_gzip, choose_format, parse_deadline
from unit.fuzz.foreign import foreign, fuzz, soon
from unit.objects import G0
from unit.test_app import Scripted

PATIENCE_S = 20.0
ACCEPT = (
    b"application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    b"text/html,application/xhtml+xml;q=0.9,*/*;q=0.8",
)
WORDS = (b"q=", b";q=1", b"application/openmetrics-text", b"text/plain", b"gzip", b",", b";", b"q=1e-1", b"q=\xd9\xa3")


@given(
    foreign(*ACCEPT, b"gzip;q=1.0, deflate", tokens=WORDS).map(lambda header: header.decode("utf-8", "surrogateescape"))
)
@fuzz(300)
@example("gzip;q=0")
@example("gzip;q=0.0, identity")
@example("xgzip")
def test_what_is_accepted(header: str) -> None:
    """Any header: one of the two formats, and gzip only where it stands there and is not refused."""
    assert choose_format(header) in {OPENMETRICS, TEXT}
    if choose_format(header) is OPENMETRICS:
        assert OPENMETRICS.media_type in header.lower()
    if accepts_gzip(header):
        assert "gzip" in header.lower()


@pytest.mark.parametrize("piece", [",", ";", "text/plain;q=1,", "gzip;q=0,", ";q=", " "])
def test_a_long_header(piece: str) -> None:
    """In linear time, up to what a request may have and far beyond."""
    with soon():
        choose_format(piece * (1 << 18))
        accepts_gzip(piece * (1 << 18))


@given(
    foreign(b"10.0", b"0.5", tokens=(b"inf", b"nan", b"1e308", b"_", b"-")).map(lambda header: header.decode("latin-1"))
)
@fuzz(150)
@example("1" * 5000)
@example("-nan")
def test_deadlines(header: str) -> None:
    """Any header: some seconds that are neither none nor for ever."""
    assert 0.2 <= parse_deadline(header) <= 30


USER = b"scraper:secret"
CREDENTIALS = (b"Basic " + base64.b64encode(USER), b"basic " + base64.b64encode(USER[:-1]), b"Bearer x")


@pytest.fixture(scope="module")
def users() -> Iterator[Users]:
    """One user whose password is cheap to check."""
    made = Users({"scraper": bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()})
    yield made
    made.close()


@given(
    foreign(*CREDENTIALS, tokens=(b"Basic ", b"==", b"Og==", b" "))
    | foreign(USER, tokens=(b":", b"\0")).map(lambda pair: b"Basic " + base64.b64encode(pair))
)
@fuzz(150)
@example(b"Basic " + base64.b64encode(b"scraper:secret\0"))
@example(b"Basic " + base64.b64encode(b"scraper:" + b"x" * 5000))
def test_who_is_admitted(users: Users, header: bytes) -> None:
    """Any header: nobody, but for the one user with the one password."""
    admitted = asyncio.run(users.admits(header.decode("utf-8", "surrogateescape"), "127.0.0.1"))
    if admitted:
        scheme, _, encoded = header.partition(b" ")
        assert (scheme.lower(), base64.b64decode(encoded.strip())) == (b"basic", USER)


class Site:
    """A server with nothing behind it, which is asked byte by byte."""

    def __init__(self) -> None:
        self.backend = Scripted()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        with suppress(asyncio.CancelledError):
            self._loop.run_until_complete(serve(build_app(self.backend), [("127.0.0.1", self.port)], self._stop))
        self._loop.close()

    def start(self) -> None:
        """Until it answers."""
        self._thread.start()
        while True:
            with suppress(ConnectionRefusedError):
                assert self.send(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").endswith(
                    b"healthy\n"
                )
                return

    def is_healthy(self) -> bool:
        """Whether it answers an honest request."""
        return self.send(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").endswith(b"healthy\n")

    def stop(self) -> None:
        """And wait until it has ended."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def send(self, data: bytes, *, is_last: bool = False, is_slow: bool = False) -> bytes:
        """All that is answered until the server closes.

        is_last: it is told that nothing more is to come, at once or (is_slow) when it has answered another client.
        """
        with socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S) as connection:
            answer = b""
            with suppress(ConnectionError):
                connection.sendall(data)
                if is_slow:
                    assert self.is_healthy()
                if is_last:
                    connection.shutdown(socket.SHUT_WR)
                while more := connection.recv(1 << 16):
                    answer += more
            return answer


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """For all examples."""
    made = Site()
    made.start()
    yield made
    made.stop()


def check_answers(answer: bytes) -> int:
    """The first answer's status, 0 where there is none: neither ours to be ashamed of, nor half an answer."""
    if not answer:
        return 0
    head, separator, _ = answer.partition(b"\r\n\r\n")
    assert head.startswith((b"HTTP/1.0 ", b"HTTP/1.1 "))
    assert separator
    status = int(head[9:12])
    assert 200 <= status < 500
    return status


REQUESTS = (
    b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: text/plain\r\nAccept-Encoding: gzip\r\n\r\n",
    b"GET /api/v1/history?gpu=0&seconds=60 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"POST /-/pause?seconds=5 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
    b"POST /-/reload HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Encoding: gzip\r\n\r\nabc",
    b"POST /-/release HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
    b'GET /web/page/main.js HTTP/1.1\r\nHost: x\r\nIf-None-Match: "x"\r\nConnection: close\r\n\r\n',
)
PARTS = (
    b"\r\n",
    b"\n",
    b" HTTP/1.1",
    b" HTTP/9.9",
    b"Content-Length: ",
    b"Transfer-Encoding: chunked\r\n",
    b"%00",
    b"%zz",
    b"Upgrade: websocket\r\n",
    b"Expect: 100-continue\r\n",
    b"Host: [::\r\n",
    b"//",
    b"/..",
    b"Authorization: Basic \r\n",
)


@given(foreign(*REQUESTS, b"".join(REQUESTS), tokens=PARTS))
@fuzz(150)
@example(b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 20_000)
@example(b"GET /" + b"x" * (2 * MAX_HEAD) + b" HTTP/1.1\r\n\r\n")
@example(b"GET http://[/ HTTP/1.1\r\nHost: [\r\n\r\n")
@example(b"GET http://x:y/ HTTP/1.1\r\nHost: x\r\n\r\n")
@example(b"GET //[/ HTTP/1.1\r\nHost: x\r\n\r\n")
@example(b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n")
@example(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n")
@example(b"POST /-/x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
def test_bytes(site: Site, caplog: pytest.LogCaptureFixture, data: bytes) -> None:
    """Any bytes: answers that are whole, or an end; nothing that reads as a fault of ours."""
    caplog.clear()
    answer = site.send(data, is_last=True)
    check_answers(answer)
    assert b"aiohttp" not in answer.partition(b"\r\n\r\n")[0]  # nor what it is made of
    assert site.is_healthy()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"GET /-/healthy HTTP/1.0\r\n\r\n", b"200 OK"),
        (b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n", b"200 OK"),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", b"200 OK"),
        (b"POST /-/pause HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf", b""),
        (b"GET /-/healthy HTTP/1.1\r\nHo", b""),
        (b"", b""),
    ],
)
def test_a_client_that_closes_its_side_is_answered(site: Site, data: bytes, answer: bytes, *, is_slow: bool) -> None:
    """What it has asked for whole; and the connection ends soon, whatever it has asked for."""
    begin = time.monotonic()
    told = site.send(data, is_last=True, is_slow=is_slow)
    assert (answer in told[:30]) if answer else (b" 200 " not in told[:30])
    assert time.monotonic() - begin < PATIENCE_S / 2


@pytest.mark.parametrize("version", [b"", b" HTTP/0.9", b" HTTP/2.0"])
def test_versions_that_nobody_speaks_here(site: Site, version: bytes) -> None:
    """Are answered in one that is spoken, once: a server must not send a version that it does not speak (RFC 9110)."""
    head, _, body = site.send(b"GET /-/healthy%s\r\nHost: x\r\n\r\n" % version).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nConnection: close" in head
    assert body == b"healthy\n"


QUERIES = foreign(
    b"gpu=0&seconds=60", b"seconds=1", G0.uuid.encode(), tokens=(b"gpu=", b"seconds=", b"%ff", b"+", b"%26")
)
TARGETS = QUERIES.map(lambda query: bytes(octet for octet in query if 0x20 < octet < 0x7F)[:2000])


@given(TARGETS, st.sampled_from(["gpus", "history"]), foreign(*ACCEPT, b"gzip;q=0", tokens=WORDS))
@fuzz(120)
@example(b"gpu=%00%f0%9f&seconds=600", "history", b"")
@example(b"seconds=0", "history", b"")
def test_queries(site: Site, query: bytes, what: str, encoding: bytes) -> None:
    """Any query and any wish: figures as JSON, or a line of JSON that says what is wrong."""
    encoding = encoding.translate(None, bytes([*range(32), 127]))[:2000]
    head = b"GET /api/v1/%s?%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAccept-Encoding: %s\r\n\r\n"
    answer = site.send(head % (what.encode(), query, encoding))
    status = check_answers(answer)
    assert status in {200, 400, 404}
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"content-encoding: gzip" in head.lower():
        assert accepts_gzip(encoding.decode("utf-8", "surrogateescape"))
        body = gzip.decompress(body)
    if b"application/json" in head:
        told = json.loads(body)
        assert status == 200 or (set(told) == {"error"} and len(told["error"]) < 400)
    else:
        assert status == 400


@given(TARGETS)
@fuzz(100)
@example(b"seconds=5&seconds=6")
@example(b"seconds=%d" % (MAX_PAUSE_S + 1))
@example(b"seconds=%D9%A7")
def test_orders_to_pause(site: Site, query: bytes) -> None:
    """Any query: a pause of a length that is allowed, or a line that says what is expected."""
    site.backend.asked.clear()
    answer = site.send(b"POST /-/pause?%s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % query)
    if check_answers(answer) == 200:
        ((what, seconds),) = site.backend.asked
        assert what == "pause"
        assert 1 <= seconds <= MAX_PAUSE_S
    else:
        assert site.backend.asked == []
        assert b"\r\n\r\nexpected ?seconds=N" in answer or b" 400 " in answer[:20]
