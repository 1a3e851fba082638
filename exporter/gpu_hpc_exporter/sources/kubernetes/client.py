"""HTTP to the API server: bounded in time and size, whatever is at the other end."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp

from gpu_hpc_exporter.model import State
from gpu_hpc_exporter.sources.kubernetes.objects import ErrorStatus, decode
from gpu_hpc_exporter.sources.kubernetes.text import clean

_MAX_ANSWER: Final = 32 << 20
"""500 pods of 64 kB; usual ones have 10 kB."""
_MAX_LINE: Final = 8 << 20
"""etcd takes no object above 1.5 MB; JSON may be several times as long."""
_MAX_FILE: Final = 65_536
_MAX_ERROR: Final = 8_192
_CONNECT_S: Final = 10.0
_ANSWER_S: Final = 30.0
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4))
"""A watch may be silent for minutes: the kernel finds out whether anybody is left."""

_DENIED_WAIT_S: Final = 300.0
_UNKNOWN_WAIT_S: Final = 60.0
"""A token that is not accepted may have been renewed since."""


@dataclass(frozen=True, slots=True)
class Server:
    """Where the API server is. `token_file` is read for each request: its content changes every hour."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None


class ApiError(Exception):
    """The server told nothing that can be used. `wait_s`: ask again no earlier."""

    def __init__(self, state: State, reason: str, *, status: int = 0, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.state: State = state
        self.status = status
        self.wait_s = wait_s


class ApiClient:
    """Reads from the API server, each time over a new connection: it is seldom, and nothing old is left over."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def read(self, path: str, parameters: Mapping[str, str]) -> bytes:
        """A whole answer. Raises ApiError."""
        pieces: list[bytes] = []
        size = 0
        async for chunk in self._chunks(path, parameters, _ANSWER_S):
            size += len(chunk)
            if size > _MAX_ANSWER:
                raise ApiError("failed", f"{path}: an answer above {_MAX_ANSWER >> 20} MB")
            pieces.append(chunk)
        return b"".join(pieces)

    async def follow(self, path: str, parameters: Mapping[str, str], lasts_s: float) -> AsyncGenerator[list[bytes]]:
        """Lines of an answer that goes on, as many at a time as have come. Raises ApiError."""
        rest = bytearray()
        async for chunk in self._chunks(path, parameters, lasts_s):
            searched = len(rest)
            rest += chunk
            if (end := rest.rfind(b"\n", searched)) >= 0:
                yield bytes(rest[:end]).split(b"\n")
                del rest[: end + 1]
            if len(rest) > _MAX_LINE:
                raise ApiError("failed", f"{path}: a line above {_MAX_LINE >> 20} MB")

    async def _chunks(self, path: str, parameters: Mapping[str, str], seconds: float) -> AsyncGenerator[bytes]:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_S)
        try:
            async with (
                # An answer that grows when it is unpacked would pass the limits.
                aiohttp.ClientSession(timeout=timeout, auto_decompress=False, headers=self._headers()) as session,
                session.get(
                    self._server.url + path, params=parameters, ssl=self._context(), allow_redirects=False
                ) as response,
            ):
                if response.status != 200:
                    raise await _refusal(response, path)
                _keep_alive(response)
                async for chunk in response.content.iter_any():
                    yield chunk
        except TimeoutError as error:
            raise ApiError("failed", f"{self._server.url}{path} has not answered within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ApiError(
                "failed", f"{self._server.url}{path}: {clean(str(error) or type(error).__name__)}"
            ) from error

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "gpu-hpc-exporter"}
        if self._server.token_file is not None:
            headers["Authorization"] = f"Bearer {_read_token(self._server.token_file)}"
        return headers

    def _context(self) -> ssl.SSLContext | bool:
        if not self._server.url.startswith("https:"):
            return True
        context = ssl.create_default_context(cafile=self._server.ca_file)
        # Since Python 3.13; many clusters' authorities lack the key identifier that it asks for.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        return context


def _read_token(path: Path) -> str:
    """Raises OSError, and ValueError for what is no token."""
    with path.open("rb") as file:
        token = file.read(_MAX_FILE).decode("latin-1").strip()
    if not re.fullmatch("[!-~]+", token):
        raise ValueError(f"{path} holds no token")
    return token


async def _refusal(response: aiohttp.ClientResponse, path: str) -> ApiError:
    detail = ""
    try:
        async with asyncio.timeout(_CONNECT_S):
            detail = clean(decode(await response.content.read(_MAX_ERROR), ErrorStatus).message)
    except (ValueError, TimeoutError, aiohttp.ClientError):
        pass  # not every server explains itself
    status = response.status
    if status == 403:
        return ApiError("no_permission", detail, status=status, wait_s=_DENIED_WAIT_S)
    if status == 401:
        reason = "the API server does not accept the token (401)"
        return ApiError("no_permission", reason, status=status, wait_s=_UNKNOWN_WAIT_S)
    reason = f"{path} answers {status} {detail}".rstrip()
    return ApiError("failed", reason, status=status, wait_s=_retry_after(response.headers.get("Retry-After", "")))


def _retry_after(text: str) -> float:
    """Seconds; the API server never sends the other form, a date."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0.0


def _keep_alive(response: aiohttp.ClientResponse) -> None:
    transport = response.connection.transport if response.connection else None
    connection = transport.get_extra_info("socket") if transport else None
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
