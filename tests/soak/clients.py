"""Everybody else who connects to the exporter: probes, live pages, slow, rude and broken clients.

    python -m soak.clients HOST PORT SEED

Ends with its standard input; what it met is one line of JSON. A broken client may be answered or cut off; nobody may be
left without either, and no answer may be a server's error but that it is not ready while the driver is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from soak.week import WEEK_S

WEEKLY: Final = {
    "garbage": 2_000,
    "half a request": 2_000,
    "huge header": 2_000,
    "many headers": 1_000,
    "gone before the answer": 3_000,
    "connects and goes": 2_000,
    "body": 1_000,
    "no such path": 1_000,
    "slow reader": 350,
    "live page": 350,
    "stuck live page": 70,
    "api": 1_000,
    "readiness": 1_000,
}
"""How many of each come in a week: some two thousand broken ones a day, fifty pages, ten of which forget to read."""
PROBES_S: Final = 0.05
_PATIENCE_S: Final = 20.0
"""Above every limit of the server's but that of a page that reads nothing."""
_SOURCE: Final = ("127.0.0.2", 0)
"""Another host than the scrapers', as the exporter sees it."""
_RESET: Final = struct.pack("ii", 1, 0)
_MOST_TOLD: Final = 20
_GET: Final = "GET {} HTTP/1.1\r\nHost: soak\r\nConnection: close\r\n{}\r\n"


@dataclass
class Met:
    """What happened. came: clients by kind. answers: by kind and status, "cut off" where there was none."""

    came: dict[str, int] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    probes_s: list[float] = field(default_factory=list)
    frames: int = 0


class _Clients:
    def __init__(self, host: str, port: int, seed: int) -> None:
        self._place = (host, port)
        self._chance = Random(seed)
        self._came: Counter[str] = Counter()
        self._answers: Counter[str] = Counter()
        self.met = Met()
        self._clients: dict[str, Callable[[], Awaitable[str]]] = {
            "garbage": lambda: self._send(self._chance.randbytes(self._chance.randrange(1, 3000)) + b"\r\n\r\n"),
            "half a request": self._half,
            "huge header": lambda: self._ask("/metrics", f"X: {'a' * 20_000}\r\n"),
            "many headers": lambda: self._ask("/metrics", "".join(f"X-{n}: a\r\n" for n in range(100))),
            "gone before the answer": self._gone,
            "connects and goes": self._connect,
            "body": lambda: self._send(
                b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 5000\r\n\r\n" + bytes(5000)
            ),
            "no such path": lambda: self._ask(f"/{'../' * self._chance.randrange(5)}etc/passwd"),
            "slow reader": self._slow,
            "readiness": lambda: self._ask("/-/ready"),
            "live page": lambda: self._page(self._chance.uniform(2, 15)),
            "stuck live page": self._stuck_page,
            "api": lambda: self._ask(self._chance.choice(("/api/v1/gpus", "/api/v1/history?gpu=0", "/"))),
        }

    async def run(self, told: asyncio.Event) -> Met:
        """All of them, until told to end."""
        async with asyncio.TaskGroup() as group:
            arrivals = [group.create_task(self._arrive(group, kind)) for kind in WEEKLY]
            probe = group.create_task(self._probe())
            await told.wait()
            for task in (*arrivals, probe):
                task.cancel()
        self.met.came, self.met.answers = dict(self._came), dict(self._answers)
        return self.met

    async def _arrive(self, group: asyncio.TaskGroup, kind: str) -> None:
        while True:
            await asyncio.sleep(self._chance.expovariate(WEEKLY[kind] / WEEK_S))
            group.create_task(self._come(kind))

    async def _come(self, kind: str) -> None:
        self._came[kind] += 1
        try:
            async with asyncio.timeout(_PATIENCE_S):
                outcome = await self._clients[kind]()
        except TimeoutError:
            outcome = "nothing"
        except OSError:
            outcome = "cut off"
        self._answers[f"{kind}: {outcome}"] += 1
        is_wrong = outcome == "nothing" or (outcome.startswith("5") and kind != "readiness")
        if is_wrong and len(self.met.problems) < _MOST_TOLD:
            self.met.problems.append(f"{kind}: {outcome}")

    async def _probe(self) -> None:
        """Ask for what costs nothing: the answer takes as long as the event loop is busy with other things."""
        reader, writer = await asyncio.open_connection(*self._place)
        try:
            while True:
                began_s = time.monotonic()
                writer.write(b"GET /-/healthy HTTP/1.1\r\nHost: soak\r\n\r\n")
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                await reader.readexactly(length)
                self.met.probes_s.append(time.monotonic() - began_s)
                if not head.startswith(b"HTTP/1.1 200 "):
                    self.met.problems.append(f"probe: {head[:100]!r}")
                await asyncio.sleep(PROBES_S)
        except (OSError, EOFError) as error:
            self.met.problems.append(f"probe: {error!r}")
        finally:
            writer.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self._place, local_addr=_SOURCE)

    async def _ask(self, path: str, headers: str = "") -> str:
        return await self._send(_GET.format(path, headers).encode())

    async def _send(self, data: bytes) -> str:
        reader, writer = await self._open()
        try:
            writer.write(data)
            return _status(await reader.read())
        finally:
            writer.close()

    async def _half(self) -> str:
        """A request that does not go on; the server gives it ten seconds."""
        reader, writer = await self._open()
        try:
            writer.write(b"GET /metrics HTTP/1.1\r\nHos")
            return _status(await reader.read())
        finally:
            writer.close()

    async def _gone(self) -> str:
        """With a reset while the answer is made or sent."""
        _, writer = await self._open()
        writer.write(_GET.format("/metrics", "").encode())
        await asyncio.sleep(self._chance.uniform(0, 0.01))
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        writer.transport.abort()
        return "gone"

    async def _connect(self) -> str:
        _, writer = await self._open()
        writer.close()
        return "gone"

    async def _slow(self) -> str:
        """Takes 8 KiB at a time, for seconds."""
        received = b""
        async with self._narrow("/metrics") as client:
            while more := await asyncio.get_running_loop().sock_recv(client, 8192):
                received += more
                await asyncio.sleep(0.1)
        return _status(received)

    async def _page(self, seconds: float) -> str:
        """Follows the events for a while."""
        reader, writer = await self._open()
        try:
            writer.write(_GET.format("/api/v1/events", "").encode())
            head = await reader.readuntil(b"\r\n\r\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while line := await reader.readline():
                        self.met.frames += line == b"event: windows\n"
            return _status(head)
        finally:
            writer.close()

    async def _stuck_page(self) -> str:
        """Reads nothing; goes after a while."""
        async with self._narrow("/api/v1/events"):
            await asyncio.sleep(self._chance.uniform(2, 15))
        return "gone"

    @contextlib.asynccontextmanager
    async def _narrow(self, path: str) -> AsyncIterator[socket.socket]:
        """A connection that has asked, and whose kernel takes no more than 4 KiB of the answer by itself."""
        loop = asyncio.get_running_loop()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(0)
            client.bind(_SOURCE)
            await loop.sock_connect(client, self._place)
            await loop.sock_sendall(client, _GET.format(path, "").encode())
            yield client


def _status(answer: bytes) -> str:
    return answer[9:12].decode() if answer.startswith(b"HTTP/1.1 ") else "cut off"


class Clients:
    """That process."""

    def __init__(self, host: str, port: int, seed: int, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "soak.clients", host, str(port), str(seed)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    def end(self) -> Met:
        """Stop it, when the last ones have been answered."""
        output, _ = self._process.communicate(timeout=60)
        return Met(**json.loads(output))

    def kill(self) -> None:
        """Whatever state it is in."""
        self._process.kill()
        self._process.communicate()


async def _run_until_told(host: str, port: int, seed: int) -> Met:
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, told.set)
    return await _Clients(host, port, seed).run(told)


if __name__ == "__main__":
    json.dump(vars(asyncio.run(_run_until_told(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))), sys.stdout)
