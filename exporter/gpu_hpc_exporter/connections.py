"""Accepts connections, bounds how many there are, of whom and for how long, and lets nobody keep others out."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import resource
import socket
import ssl
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, Literal, Protocol

from aiohttp import HttpVersion10, HttpVersion11, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from gpu_hpc_exporter.logs import SeldomLog
from gpu_hpc_exporter.yaml_file import ConfigError

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 512
MAX_OF_PEER: Final = 64
"""A peer is an IPv4 address, or an IPv6 network of 64 bits, since a host may have all of that."""
MAX_HEAD: Final = 16 << 10
"""Bytes of a request's line and headers together."""
MAX_HEADERS: Final = 64
MAX_AHEAD: Final = 64 << 10
"""Bytes that a client may send ahead while its request is answered; then it has to wait."""
REQUEST_S: Final = 10.0
"""For the TLS handshake and the first request together, and for every later request from its first byte on."""
IDLE_S: Final = 180.0
"""Between requests: longer than the scrape intervals in use, which keeps a scraper's connection."""
ANSWER_S: Final = 45.0
"""For making and sending an answer: collecting takes up to 30 s of it."""
MIN_AGE_S: Final = 1.0
"""A connection is not closed in favour of a newer one of the same peer before; so a flood is refused, not served."""
_BACKLOG: Final = 4096
_ACCEPTS_AT_ONCE: Final = 16
_FULL_S: Final = 0.02
_RETRY_S: Final = 0.5
_UNSENT_MS: Final = 30_000
_LINGER_S: Final = 1.0
_NEVER_S: Final = 86_400.0
_RESET: Final = struct.pack("ii", 1, 0)
_END_OF_HEAD: Final = b"\r\n\r\n"
_TOO_LARGE: Final = "request headers are too large\n"

Phase = Literal["waiting", "reading", "answering", "streaming"]


class Rules(Protocol):
    """What a connection is accepted with."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """None for plain HTTP."""

    def is_allowed_certificate(self, certificate: Mapping[str, object] | None) -> bool:
        """Whether a client with this verified certificate may ask."""


class Connection(web.RequestHandler):
    """aiohttp's side of a connection, with clocks and counts of our own.

    aiohttp bounds a header's size and the number of headers, and neither their sum nor the time they take.
    """

    def __init__(self, server: web.Server, peer: str, on_end: Callable[[Connection], None]) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # none is what aiohttp's own runner passes on
            keepalive_timeout=_NEVER_S,  # our own clock is what counts
            max_headers=MAX_HEADERS,
            lingering_time=_LINGER_S,
            auto_decompress=False,  # a request's body is refused, not unpacked
        )
        self.peer = peer
        self.is_served = False
        self.rules: Rules | None = None
        self.task: asyncio.Task[None] | None = None
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = None
        self._begin_head()
        self._enter("reading", REQUEST_S)

    def _enter(self, phase: Phase, seconds: float | None) -> None:
        self.phase = phase
        self.since = time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self.drop)

    def _begin_head(self) -> None:
        self._head = self._ahead = 0
        self._tail = b""
        self._is_in_head = True

    def drop(self) -> None:
        """End it now, whatever is not sent yet."""
        self._end()
        if self.transport is not None:
            if self.phase != "waiting":
                # With a reset: else the kernel would keep what a client does not take.
                self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()

    def _end(self) -> None:
        self._on_end(self)
        if self._timer is not None:
            self._timer.cancel()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While a request is answered."""
        self._enter("answering", ANSWER_S)
        try:
            yield
        finally:
            self.is_served = True
            self._begin_head()
            if self.transport is not None:
                self._enter("waiting", IDLE_S)
                self.transport.resume_reading()

    def stream(self) -> None:
        """The answer goes on until the client goes: only a client that takes nothing for 30 s is ended."""
        self._enter("streaming", None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Refuse a client whose certificate is verified and yet not of somebody who may ask."""
        super().connection_made(transport)
        if self.rules and not self.rules.is_allowed_certificate(transport.get_extra_info("peercert")):
            log.debug("a client of %s has a certificate with none of the client_allowed_sans", self.peer)
            self.drop()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it."""
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Start the clock with the first byte of a request; refuse one whose headers do not end."""
        if self.phase == "waiting":
            self._enter("reading", REQUEST_S)
        if self._is_in_head and not self._measure(data):
            self._refuse_head()
        if self.phase in ("answering", "streaming"):
            self._ahead += len(data)
            if self._ahead > MAX_AHEAD and self.transport is not None:
                self.transport.pause_reading()
        super().data_received(data)  # does nothing once refused

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's ends the connection at once, and answers nothing
        """Answer who closes their side once they have asked, as `nc -N` and `socat` do; then the connection ends.

        Where nothing is asked for, or a stream goes on, it ends at once; so does TLS, where asyncio knows no half of a
        connection.
        """
        self.close()
        is_plain = self.transport is not None and self.transport.get_extra_info("sslcontext") is None
        is_asked = self.phase == "answering" or (self.phase == "reading" and not self._is_in_head)
        return is_plain and is_asked

    def _measure(self, data: bytes) -> bool:
        """Count the bytes of a head; whether they are few enough."""
        window = self._tail + data
        end = window.find(_END_OF_HEAD)
        self._is_in_head = end < 0
        self._head += len(data) if end < 0 else max(0, end - len(self._tail))
        self._tail = window[1 - len(_END_OF_HEAD) :]
        return self._head <= MAX_HEAD

    def _refuse_head(self) -> None:
        """Answer, and read on for a moment, since closing at once would take the answer away from a busy sender."""
        self._is_in_head = False
        self.close()
        self._enter("reading", _LINGER_S)
        if self.transport is not None:
            head = "HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Type: text/plain"
            self.transport.write(f"{head}\r\nContent-Length: {len(_TOO_LARGE)}\r\n\r\n{_TOO_LARGE}".encode())

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """The answer to what is no request; a line of the log only where the mistake is ours."""
        if not isinstance(exc, BadHttpMessage):
            return super().handle_error(request, status, exc, message)
        log.debug("%s sent no HTTP request: %s", self.peer, type(exc).__name__)
        is_too_large = isinstance(exc, LineTooLong) or "Too many headers" in exc.message
        text = _TOO_LARGE if is_too_large else "this is no HTTP request\n"
        answer = web.Response(status=431 if is_too_large else 400, text=text)
        answer.headers["Server"] = "gpu-hpc-exporter"  # as of all answers: the application has not seen this one
        answer.force_close()
        return answer


class Connections:
    """All that are open. Where there are too many, those that wait longest without having been served go first."""

    def __init__(self, server: web.Server, fresh_rules: Callable[[], Awaitable[Rules]]) -> None:
        self._server = server
        server.request_factory = _in_a_version_of_ours(server.request_factory)
        self._fresh_rules = fresh_rules
        self._loop = asyncio.get_running_loop()
        self._limit = _limit()
        self._peers: dict[str, dict[Connection, None]] = {}
        self._count = 0
        self._full_until = 0.0
        self._full_from = 0
        self._listening: list[socket.socket] = []
        self._refused = 0
        self._log = SeldomLog(log)

    async def listen(self, addresses: Iterable[tuple[str | None, int]]) -> None:
        """Accept on every address. Raises ConfigError for one that cannot be had."""
        for host, port in addresses:
            try:
                self._listening += await self._bind(host, port)
            except OSError as error:
                place = f"{host or ''}:{port}"
                why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
                raise ConfigError(f"cannot listen on {place}: {why}; see --web.listen-address") from error
        for listening in self._listening:
            self._accept_from(listening)
            name = listening.getsockname()
            log.info("listening on %s port %d", name[0], name[1])

    async def _bind(self, host: str | None, port: int) -> list[socket.socket]:
        """Sockets of every address that a name has; of "all addresses" those of the kinds that the machine has."""
        infos = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        sockets: list[socket.socket] = []
        problem: OSError | None = None
        for family, address in dict.fromkeys((info[0], info[4]) for info in infos):
            try:
                sockets.append(_listening_socket(family, address))
            except OSError as error:
                problem = error
                if host is not None or error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                    break
        else:
            if sockets:
                return sockets
        for bound in sockets:
            bound.close()
        raise problem or OSError(f"{host} has no address")

    def close(self) -> None:
        """Accept no more."""
        for listening in self._listening:
            self._loop.remove_reader(listening)
            listening.close()

    def _accept_from(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:  # not closed meanwhile
            self._loop.add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        """A few at a time, so that a flood does not hold up those that are being served."""
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor or no memory for one more
                self._log.warning(f"cannot accept connections for now: {error.strerror}")
                self._loop.remove_reader(listening)
                self._loop.call_later(_RETRY_S, self._accept_from, listening)
                return
            self._admit(accepted, peer_of(address[0]))

    def _admit(self, accepted: socket.socket, peer: str) -> None:
        if not self._make_room(peer):
            accepted.close()
            self._refused += 1
            self._log.warning(
                f"connections refused so far: {self._refused}, the last one of {peer};"
                f" {MAX_OF_PEER} of a peer may be open, {self._limit} in all"
            )
            return
        connection = Connection(self._server, peer, self._forget)
        self._peers.setdefault(peer, {})[connection] = None
        self._count += 1
        connection.task = self._loop.create_task(self._open(accepted, connection))

    def _make_room(self, peer: str) -> bool:
        """Whether one more of a peer may be open, perhaps in place of another one."""
        of_peer = self._peers.get(peer, {})
        if len(of_peer) < MAX_OF_PEER and self._count < self._limit:
            return True
        now = time.monotonic()
        if now < self._full_until and len(of_peer) >= self._full_from:
            return False
        most = of_peer if len(of_peer) >= MAX_OF_PEER else max(self._peers.values(), key=len)
        has_room = _drop_one(most, 0.0 if len(most) > len(of_peer) + 1 else MIN_AGE_S)
        if not has_room:
            # Others with as many get the same answer for a moment: to look again for each would be what a flood costs.
            self._full_until, self._full_from = now + _FULL_S, len(of_peer)
        return has_room

    async def _open(self, accepted: socket.socket, connection: Connection) -> None:
        """Up to the end of the TLS handshake, where there is one; what follows is the connection's own."""
        try:
            accepted.settimeout(0)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNSENT_MS)
            rules = connection.rules = await self._fresh_rules()
            more: dict[str, Any] = {"ssl": rules.tls, "ssl_handshake_timeout": REQUEST_S} if rules.tls else {}
            await self._loop.connect_accepted_socket(lambda: connection, accepted, **more)
        except OSError as error:  # TLS's errors too
            log.debug("a connection of %s did not come about: %s", connection.peer, error)
        finally:
            connection.task = None
            if connection.transport is None:
                accepted.close()
                connection.drop()

    def _forget(self, connection: Connection) -> None:
        of_peer = self._peers.get(connection.peer, {})
        if connection in of_peer:
            del of_peer[connection]
            self._count -= 1
        if not of_peer:
            self._peers.pop(connection.peer, None)


def _in_a_version_of_ours(make: Callable[..., web.BaseRequest]) -> Callable[..., web.BaseRequest]:
    """Take HTTP/0.9 and HTTP/2.0 for the last request of HTTP/1.1: aiohttp would answer as if it spoke them."""

    def make_request(message: RawRequestMessage, *more: Any) -> web.BaseRequest:
        if message.version not in (HttpVersion10, HttpVersion11):
            message = message._replace(version=HttpVersion11, should_close=True)
        return make(message, *more)

    return make_request


def _drop_one(connections: Iterable[Connection], min_age_s: float) -> bool:
    """End the one that nobody will miss: one that was never served before one that was, the longest waiting first."""
    latest = time.monotonic() - min_age_s
    idle = [c for c in connections if c.phase in ("waiting", "reading") and c.since <= latest]
    if not idle:
        return False
    min(idle, key=lambda c: (c.is_served, c.since)).drop()
    return True


def _listening_socket(family: int, address: Any) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
        listening.settimeout(0)
    except OSError:
        listening.close()
        raise
    return listening


def _limit() -> int:
    """Half of the descriptors at most, since the others are for files and the driver."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_CONNECTIONS, max(MAX_OF_PEER, soft // 2))


@lru_cache(maxsize=1024)
def peer_of(host: str) -> str:
    """Who is at an address, for counting."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
