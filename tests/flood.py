"""The two sides of a flood of connections, each a process of its own, so that neither slows down who measures it.

    python flood.py connect PORT PEERS COUNT
    python flood.py refuse

`connect` opens COUNT connections to the port of 127.0.0.1, in turn from PEERS addresses after 127.1.0.0, writes when it
began and ended by CLOCK_MONOTONIC, and leaves them alone. `refuse` is another program that is flooded: it writes its
port and closes what it accepts. Both go on until their standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import resource
import socket
import sys
import time

_BIND_ADDRESS_NO_PORT = 24  # the socket module lacks it: a port for each destination, so that few peers have enough
_FIRST_PEER = ipaddress.IPv4Address("127.1.0.1")
_OTHER_DESCRIPTORS = 50
_BACKLOG = 4096
_ACCEPTS_AT_ONCE = 16
"""Both as of the exporter: it is that program's place that this one takes."""


def connect(port: int, peers: int, count: int) -> None:
    """Open so many connections and hold them."""
    _allow_descriptors(count + _OTHER_DESCRIPTORS)
    sources = [str(_FIRST_PEER + number) for number in range(peers)]
    began = time.monotonic()
    held = [_open(port, sources[number % peers]) for number in range(count)]
    print(began, time.monotonic(), flush=True)  # noqa: T201  the answer
    sys.stdin.read()
    for connection in held:
        connection.close()


def _open(port: int, source: str) -> socket.socket:
    connection = socket.socket()
    connection.settimeout(0)
    connection.setsockopt(socket.IPPROTO_IP, _BIND_ADDRESS_NO_PORT, 1)
    connection.bind((source, 0))
    problem = connection.connect_ex(("127.0.0.1", port))
    if problem not in (0, errno.EINPROGRESS):
        sys.exit(f"cannot connect from {source} to port {port}: {os.strerror(problem)}")
    return connection


def _allow_descriptors(count: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < count:
        sys.exit(f"a flood needs {count} descriptors: the hard limit is {hard}; flood with fewer connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def refuse() -> None:
    """Close what is accepted; without asyncio's transports, so that it costs no more than what it stands beside."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG) as listening:
        listening.settimeout(0)
        loop.add_reader(listening, _accept_and_close, listening)
        loop.add_reader(sys.stdin, ended.set)
        print(listening.getsockname()[1], flush=True)  # noqa: T201  the answer
        await ended.wait()
        loop.remove_reader(listening)


def _accept_and_close(listening: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
        for _ in range(_ACCEPTS_AT_ONCE):
            listening.accept()[0].close()


if __name__ == "__main__":
    if sys.argv[1] == "connect":
        connect(*map(int, sys.argv[2:]))
    else:
        asyncio.run(refuse())
