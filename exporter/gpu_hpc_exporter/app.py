"""The HTTP server: metrics, health, readiness, the landing page and control. Nothing here touches hardware."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Final, Protocol, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from gpu_hpc_exporter.access import Access, BusyError
from gpu_hpc_exporter.collectors import COLLECTORS
from gpu_hpc_exporter.connections import Connection, Connections, peer_of
from gpu_hpc_exporter.exporter import Outcome
from gpu_hpc_exporter.logs import SeldomLog
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot
from gpu_hpc_exporter.scrape import ExpositionSettings, Scrape, parse_deadline
from gpu_hpc_exporter.web.hub import Live
from gpu_hpc_exporter.web.routes import add_routes

log = logging.getLogger(__name__)


DEFAULT_PAUSE_S: Final = 600
MAX_PAUSE_S: Final = 86_400
DEFAULT_RELEASE_S: Final = 60
MAX_RELEASE_S: Final = 3600
_STATUS: Final = {"done": 200, "refused": 409, "failed": 503}
_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "deny",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Nothing that the exporter does not serve itself, nothing inline, and no page around it.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}
_CHALLENGE: Final = {"WWW-Authenticate": 'Basic realm="gpu-hpc-exporter", charset="UTF-8"'}
_FORWARDED: Final = ("Forwarded", "Via", "X-Forwarded-For", "X-Real-Ip")
_HEALTHY: Final = "/-/healthy"
_READY: Final = "/-/ready"
_IS_STRANGER: Final = web.RequestKey("is_stranger", bool)
"""Whether users are configured, and the request is of none."""
_IS_USER: Final = web.RequestKey("is_user", bool)
"""Whether the request is of a user or of a client with a verified certificate."""


class Backend(Live, Protocol):
    """What the server needs of the exporter."""

    def settings(self) -> ExpositionSettings:
        """What the configuration says of expositions."""

    def released(self) -> str:
        """Until when the driver is released, "" when it is not."""

    async def reload(self) -> str:
        """Read the configuration again; why it could not be, or ""."""

    async def pause(self, seconds: float) -> Outcome:
        """End PM sampling for so long."""

    async def release(self, seconds: float) -> Outcome:
        """Close the driver for so long."""

    async def resume(self) -> Outcome:
        """End a pause and a release."""


def build_app(backend: Backend, telemetry_path: str = "/metrics", access: Access | None = None) -> web.Application:
    """The application; every answer but control's comes from a snapshot. Without `access` everybody may ask."""
    access = access or Access(None)
    scrape = Scrape(backend.snapshot, COLLECTORS, backend.settings)

    async def metrics(request: web.Request) -> web.Response:
        headers = request.headers
        rendered = await scrape.render(
            headers.get("Accept", ""),
            headers.get("Accept-Encoding", ""),
            parse_deadline(headers.get("X-Prometheus-Scrape-Timeout-Seconds")),
        )
        # Set as headers: aiohttp's own arguments would reorder the content type's parameters.
        answer = {"Content-Type": rendered.content_type, "Vary": "Accept, Accept-Encoding"}
        if rendered.is_gzip:
            answer["Content-Encoding"] = "gzip"
        return web.Response(body=rendered.body, headers=answer)

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="healthy\n")

    async def ready(request: web.Request) -> web.Response:
        reason = backend.released() or not_ready_reason(backend.snapshot())
        text = f"not ready: {'only users are told why' if request.get(_IS_STRANGER) else reason}\n"
        return web.Response(text=text if reason else "ready\n", status=503 if reason else 200)

    async def close_scrape(_: web.Application) -> None:
        scrape.close()

    async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
        response.headers["Server"] = "gpu-hpc-exporter"  # not the versions of what it is made of
        for name, value in {**_HEADERS, **access.rules.headers}.items():
            response.headers.setdefault(name, value)

    app = web.Application(middlewares=[_refuse_bodies, _limit_rate(access), _authenticate(access), _guard_control])
    app.on_response_prepare.append(add_headers)
    app.router.add_get(telemetry_path, metrics)
    app.router.add_get(_HEALTHY, healthy)
    app.router.add_get(_READY, ready)
    add_routes(app, backend, telemetry_path)
    _add_control(app, backend)
    app.on_cleanup.append(close_scrape)
    return app


def _add_control(app: web.Application, backend: Backend) -> None:
    """What changes something: POST only, below /-/, which `_guard_control` watches over."""

    async def reload(_: web.Request) -> web.Response:
        problem = await backend.reload()
        return web.Response(text=f"{problem}\n" if problem else "reloaded\n", status=500 if problem else 200)

    async def pause(request: web.Request) -> web.Response:
        return _answer(await backend.pause(_seconds(request, DEFAULT_PAUSE_S, MAX_PAUSE_S)))

    async def release(request: web.Request) -> web.Response:
        return _answer(await backend.release(_seconds(request, DEFAULT_RELEASE_S, MAX_RELEASE_S)))

    async def resume(_: web.Request) -> web.Response:
        return _answer(await backend.resume())

    for action in (reload, pause, release, resume):
        app.router.add_post(f"/-/{action.__name__}", action)


def _answer(outcome: Outcome) -> web.Response:
    return web.Response(text=f"{outcome.text}\n", status=_STATUS[outcome.kind])


def _seconds(request: web.Request, default: int, most: int) -> int:
    """The query's `seconds`. Raises HTTPBadRequest for anything else that stands there."""
    values = request.query.getall("seconds", [str(default)])
    is_clear = len(values) == 1 and not request.query.keys() - {"seconds"}
    if not (is_clear and re.fullmatch("[0-9]{1,6}", values[0]) and 1 <= int(values[0]) <= most):
        raise web.HTTPBadRequest(text=f"expected ?seconds=N, a whole number from 1 to {most} (default {default})\n")
    return int(values[0])


def _limit_rate(access: Access) -> Middleware:
    """`rate_limit` of --web.config.file. A probe of liveness is no load, and must not fail for that of others."""

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path != _HEALTHY and not access.rules.bucket.take():
            return web.Response(text="too many requests\n", status=429)
        return await handler(request)

    return limit


def _authenticate(access: Access) -> Middleware:
    """Who asks, where users are configured: none of them is a stranger's 401."""
    refusals = SeldomLog(log)

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        users = access.rules.users
        request[_IS_USER] = bool(request.get_extra_info("peercert"))
        if users is None:
            return await handler(request)
        header = request.headers.get("Authorization", "")
        if not header and request.method in ("GET", "HEAD") and request.path in (_HEALTHY, _READY):
            # Probes have no password; all that they learn is the status.
            request[_IS_STRANGER] = True
            return await handler(request)
        peer = peer_of(request.remote or "::")
        try:
            request[_IS_USER] = await users.admits(header, peer)
        except BusyError:
            text = "too many passwords of this address are being checked: try again\n"
            return web.Response(text=text, status=429, headers={"Retry-After": "1"})
        if request[_IS_USER]:
            return await handler(request)
        if header:
            refusals.warning(f"wrong user or password from {peer}")
        return web.Response(text="a user and a password are needed\n", status=401, headers=_CHALLENGE)

    return authenticate


@web.middleware
async def _guard_control(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Who may control the exporter: this machine and users, though no page that a browser of theirs shows."""
    is_control = request.method not in ("GET", "HEAD") and request.path.startswith("/-/")
    if is_control and not (_may_control(request) and "Origin" not in request.headers):
        return web.Response(text="control is open to this machine and to authenticated users only\n", status=403)
    return await handler(request)


def _may_control(request: web.Request) -> bool:
    # A proxy on this machine asks for others.
    is_forwarded = any(name in request.headers for name in _FORWARDED)
    return request.get(_IS_USER, False) or (_is_loopback(request) and not is_forwarded)


@web.middleware
async def _refuse_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """No request of ours has a body: one that brings one is refused before any of it is read, or unpacked."""
    is_packed = "Content-Encoding" in request.headers
    if is_packed or request.body_exists:
        text = "requests with a body are refused\n"
        refusal = web.Response(text=text, status=415 if is_packed else 413)
        refusal.force_close()
        return refusal
    return await handler(request)


def _is_loopback(request: web.Request) -> bool:
    try:
        address = ipaddress.ip_address(request.remote or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def not_ready_reason(snapshot: FleetSnapshot) -> str:
    """Why the exporter has nothing true to say yet, "" when it has: every GPU has been asked once."""
    if not snapshot.is_up:
        return snapshot.down_reason
    if snapshot.expected and not snapshot.gpus:
        return f"none of {snapshot.expected} GPUs can be read"
    waiting = [totals.gpu.uuid for totals in snapshot.gpus if not snapshot.has_state("nvml", totals.gpu.uuid)]
    return f"no readings yet of {', '.join(waiting)}" if waiting else ""


@web.middleware
async def _bound_time(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The connection's clock runs while an answer is made and until the client has taken it."""
    connection = cast("Connection", request.protocol)  # serve() makes no other
    with connection.answering():
        answer = await handler(request)
        if isinstance(answer, web.Response):
            with suppress(ConnectionError):  # aiohttp meets it again, and knows what to do
                await answer.prepare(request)
                await answer.write_eof()
                await request.writer.drain()  # before the next one is made, which may be here already
        return answer


async def _note_streams(request: web.Request, response: web.StreamResponse) -> None:
    if not isinstance(response, web.Response) and isinstance(request.protocol, Connection):
        request.protocol.stream()


async def serve(
    app: web.Application, addresses: Sequence[tuple[str | None, int]], stop: asyncio.Event, access: Access | None = None
) -> None:
    """Serve `app` on every address until `stop` is set. Raises ConfigError for an address that is taken."""
    app.middlewares.insert(0, _bound_time)
    app.on_response_prepare.append(_note_streams)
    async with AsyncExitStack() as stack:
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        server = cast("web.Server", runner.server)  # there since setup
        connections = Connections(server, (access or Access(None)).fresh_rules)
        stack.callback(connections.close)
        await connections.listen(addresses)
        await stop.wait()
