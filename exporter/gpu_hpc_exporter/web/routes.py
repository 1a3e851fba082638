"""Routes of the live page and of the API: files of the package, JSON, and a stream of events."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
import string
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Final

import msgspec
from aiohttp import web

from gpu_hpc_exporter import __version__
from gpu_hpc_exporter.model import NS
from gpu_hpc_exporter.scrape import accepts_gzip
from gpu_hpc_exporter.web import answers
from gpu_hpc_exporter.web.hub import MAX_PAGES, Hub, Live

MAX_SECONDS: Final = 600
_STALL_S: Final = 20.0
"""A page that takes nothing for so long is gone."""
_MAX_NAME: Final = 100
_GZIP_FROM: Final = 16_384
_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_FILES: Final = (
    "page/page.css",
    "page/main.js",
    "page/card.js",
    "page/chart.js",
    "page/dom.js",
    "page/heatmap.js",
    "page/live.js",
    "page/windows.js",
    "page/icon.svg",
    "vendor/uPlot.esm.js",
    "vendor/uPlot.min.css",
)
"""All that is served: there is no directory to look around in."""


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    content_type: str
    tag: str


def add_routes(app: web.Application, live: Live, telemetry_path: str) -> None:
    """The page at /, its files, and /api/v1/."""
    _add_files(app, telemetry_path)
    _add_figures(app, live)
    _add_events(app, Hub(live))


def _add_files(app: web.Application, telemetry_path: str) -> None:
    pages = {name: _file(name) for name in _FILES}
    index = _index(telemetry_path)

    async def page(request: web.Request) -> web.Response:
        return _answer_file(request, index)

    async def file(request: web.Request) -> web.Response:
        found = pages.get(request.match_info["name"])
        if found is None:
            raise web.HTTPNotFound
        return _answer_file(request, found)

    app.router.add_get("/", page)
    app.router.add_get("/web/{name:.+}", file)


def _add_figures(app: web.Application, live: Live) -> None:
    async def gpus(request: web.Request) -> web.Response:
        _check_query(request, ())
        found = await asyncio.to_thread(lambda: answers.gpus(live.snapshot(), live.recent_kernels(), live.windows))
        return await _json(request, found)

    async def history(request: web.Request) -> web.Response:
        _check_query(request, ("gpu", "seconds"))
        uuid, seconds = request.query.get("gpu", ""), _seconds(request)
        found = await asyncio.to_thread(_history, live, uuid, seconds)
        if found is None:
            raise _problem(web.HTTPNotFound, f"no GPU has the UUID or index {uuid[:_MAX_NAME]!r}: see api/v1/gpus")
        return await _json(request, found)

    app.router.add_get("/api/v1/gpus", gpus)
    app.router.add_get("/api/v1/history", history)


def _add_events(app: web.Application, hub: Hub) -> None:
    async def events(request: web.Request) -> web.StreamResponse:
        _check_query(request, ())
        opened = hub.open()
        if opened is None:
            raise _problem(web.HTTPServiceUnavailable, f"{MAX_PAGES} pages are open already: close one and try again")
        try:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            while (frames := await opened.next()) is not None:
                async with asyncio.timeout(_STALL_S):
                    await response.write(frames)
        except (ConnectionError, TimeoutError):
            _abort(request)
        finally:
            hub.leave(opened)
        return response

    async def close(_: web.Application) -> None:
        hub.close()

    app.router.add_get("/api/v1/events", events, allow_head=False)
    app.on_shutdown.append(close)


def _abort(request: web.Request) -> None:
    """What waits in the connection's buffer will never be read: give it up at once."""
    if request.transport is not None:
        request.transport.abort()


def _index(telemetry_path: str) -> _File:
    template = string.Template((files(__package__) / "page/index.html").read_text(encoding="utf-8"))
    text = template.substitute(version=escape(__version__), metrics=escape(telemetry_path[1:]))
    return _of(text.encode(), "text/html")


def _file(name: str) -> _File:
    return _of((files(__package__) / name).read_bytes(), _TYPES[name.rpartition(".")[2]])


def _of(body: bytes, content_type: str) -> _File:
    return _File(body, content_type, hashlib.sha256(body).hexdigest()[:32])


def _answer_file(request: web.Request, found: _File) -> web.Response:
    """The file, or that the browser has it already."""
    headers = {"ETag": f'"{found.tag}"', "Cache-Control": "no-cache"}
    if any(tag.value == found.tag for tag in request.if_none_match or ()):
        return web.Response(status=304, headers=headers)
    return web.Response(body=found.body, content_type=found.content_type, charset="utf-8", headers=headers)


def _history(live: Live, wanted: str, seconds: int) -> answers.History | None:
    snapshot = live.snapshot()
    by_index = {snapshot.label(gpu.uuid): gpu.uuid for gpu in snapshot.known if not gpu.parent_uuid}
    uuid = by_index.get(wanted, wanted)
    found = live.windows(uuid, seconds * NS)
    if found is None:
        return None
    now_ns, part = found
    return answers.History(
        now_seconds=round(now_ns / NS, 3),
        unix_seconds=round(snapshot.wall_ns / NS, 3),
        gpu=snapshot.label(uuid),
        uuid=uuid,
        windows=answers.columns(part),
    )


async def _json(request: web.Request, data: msgspec.Struct) -> web.Response:
    body, headers = await asyncio.to_thread(_encode, data, accepts_gzip(request.headers.get("Accept-Encoding", "")))
    return web.Response(body=body, content_type="application/json", headers=headers)


def _encode(data: msgspec.Struct, is_gzip_wanted: bool) -> tuple[bytes, dict[str, str]]:  # noqa: FBT001  passed through to_thread
    body = msgspec.json.encode(data)
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if is_gzip_wanted and len(body) >= _GZIP_FROM:
        return gzip.compress(body, 1, mtime=0), {**headers, "Content-Encoding": "gzip"}
    return body, headers


def _check_query(request: web.Request, known: Iterable[str]) -> None:
    """Raises HTTPBadRequest for parameters that nobody knows, or that stand twice."""
    names = [name for name, _ in request.query.items()]
    expected = tuple(known)
    if len(names) != len(set(names)) or set(names) - set(expected):
        which = f"only {' and '.join(expected)}, each once" if expected else "no parameters"
        raise _problem(web.HTTPBadRequest, f"expected {which}")


def _seconds(request: web.Request) -> int:
    text = request.query.get("seconds", str(MAX_SECONDS))
    if not (re.fullmatch("[0-9]{1,4}", text) and 1 <= int(text) <= MAX_SECONDS):
        raise _problem(web.HTTPBadRequest, f"expected seconds=N, a whole number from 1 to {MAX_SECONDS}")
    return int(text)


def _problem(kind: type[web.HTTPException], text: str) -> web.HTTPException:
    """One line of JSON that says what is wrong."""
    return kind(text=msgspec.json.encode({"error": text}).decode() + "\n", content_type="application/json")
