"""The HTTP server: metrics, health, readiness, the landing page and control. Nothing here touches hardware."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Final, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler

from gpu_hpc_exporter.collectors import COLLECTORS
from gpu_hpc_exporter.config import ConfigError
from gpu_hpc_exporter.exporter import Outcome
from gpu_hpc_exporter.page import render_page
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot
from gpu_hpc_exporter.scrape import ExpositionSettings, Scrape, parse_deadline

log = logging.getLogger(__name__)


DEFAULT_PAUSE_S: Final = 600
MAX_PAUSE_S: Final = 86_400
DEFAULT_RELEASE_S: Final = 60
MAX_RELEASE_S: Final = 3600
_STATUS: Final = {"done": 200, "refused": 409, "failed": 503}


class Backend(Protocol):
    """What the server needs of the exporter."""

    def snapshot(self) -> FleetSnapshot:
        """The GPUs now."""

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


def build_app(backend: Backend, telemetry_path: str = "/metrics") -> web.Application:
    """The application; every answer but control's comes from a snapshot."""
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

    async def ready(_: web.Request) -> web.Response:
        reason = backend.released() or not_ready_reason(backend.snapshot())
        return web.Response(text=f"not ready: {reason}\n" if reason else "ready\n", status=503 if reason else 200)

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=render_page(backend.snapshot(), telemetry_path), content_type="text/html")

    async def close_scrape(_: web.Application) -> None:
        scrape.close()

    app = web.Application(middlewares=[_refuse_bodies, _guard_control])
    app.router.add_get(telemetry_path, metrics)
    app.router.add_get("/-/healthy", healthy)
    app.router.add_get("/-/ready", ready)
    app.router.add_get("/", page)
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


@web.middleware
async def _guard_control(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Who may control the exporter: this machine, though no page that a browser on it shows."""
    is_control = request.method == "POST" and request.path.startswith("/-/")
    if is_control and not (_is_loopback(request) and "Origin" not in request.headers):
        return web.Response(text="control is open to this machine only\n", status=403)
    return await handler(request)


@web.middleware
async def _refuse_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """No request of ours has a body: one that brings one is refused before any of it is read."""
    if request.body_exists:
        refusal = web.Response(text="requests with a body are refused\n", status=413)
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


async def serve(app: web.Application, addresses: Sequence[tuple[str | None, int]], stop: asyncio.Event) -> None:
    """Serve `app` on every address until `stop` is set. Raises ConfigError for an address that is taken."""
    async with AsyncExitStack() as stack:
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.5)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        for host, port in addresses:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                place = f"{host or ''}:{port}"
                why = os.strerror(error.errno) if error.errno else str(error)
                raise ConfigError(f"cannot listen on {place}: {why}; see --web.listen-address") from error
        for address in runner.addresses:
            log.info("listening on %s port %d", address[0], address[1])
        await stop.wait()
