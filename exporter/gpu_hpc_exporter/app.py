"""The HTTP server: /metrics, health, readiness and the landing page. Nothing here touches hardware."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from aiohttp import web

from gpu_hpc_exporter.collectors import COLLECTORS
from gpu_hpc_exporter.config import ConfigError
from gpu_hpc_exporter.page import render_page
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot
from gpu_hpc_exporter.scrape import Exposition, Scrape

log = logging.getLogger(__name__)

_MAX_BODY = 1024


def build_app(snapshot: Callable[[], FleetSnapshot]) -> web.Application:
    """The application over a function that gives the newest snapshot."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="render")
    scrape = Scrape(Exposition(snapshot, COLLECTORS), executor)

    async def metrics(request: web.Request) -> web.Response:
        rendered = await scrape.render(request.headers.get("Accept", ""))
        # Set as a header: aiohttp's content_type argument would reorder the parameters.
        return web.Response(body=rendered.body, headers={"Content-Type": rendered.content_type})

    async def healthy(_: web.Request) -> web.Response:
        return web.Response(text="healthy\n")

    async def ready(_: web.Request) -> web.Response:
        reason = not_ready_reason(snapshot())
        return web.Response(text=f"not ready: {reason}\n" if reason else "ready\n", status=503 if reason else 200)

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=render_page(snapshot()), content_type="text/html")

    async def close_executor(_: web.Application) -> None:
        executor.shutdown(wait=False, cancel_futures=True)

    app = web.Application(client_max_size=_MAX_BODY)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/-/healthy", healthy)
    app.router.add_get("/-/ready", ready)
    app.router.add_get("/", page)
    app.on_cleanup.append(close_executor)
    return app


def not_ready_reason(snapshot: FleetSnapshot) -> str:
    """Why the exporter has nothing true to say yet, "" when it has: every GPU needs its first readings."""
    if not snapshot.is_up:
        return snapshot.down_reason
    waiting = [totals.gpu.uuid for totals in snapshot.gpus if not totals.readings]
    return f"no readings yet of {', '.join(waiting)}" if waiting else ""


async def serve(app: web.Application, addresses: Sequence[tuple[str | None, int]], stop: asyncio.Event) -> None:
    """Serve `app` on every address until `stop` is set. Raises ConfigError for an address that is taken."""
    async with AsyncExitStack() as stack:
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        for host, port in addresses:
            try:
                await web.TCPSite(runner, host, port).start()
            except OSError as error:
                raise ConfigError(
                    f"cannot listen on {host or ''}:{port}: {error.strerror}; see --web.listen-address"
                ) from error
        for address in runner.addresses:
            log.info("listening on %s port %d", address[0], address[1])
        await stop.wait()
