"""An ordinary scraper as a process of its own, so that nothing but the server can slow it down.

    python scraper.py URL CA_FILE AUTHORIZATION keep|renew

Scrapes until its standard input ends; a line of JSON for each scrape. CA_FILE and AUTHORIZATION may be "".
"""

from __future__ import annotations

import http.client
import json
import select
import ssl
import subprocess
import sys
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

_PAUSE_S = 0.01
_TIMEOUT_S = 60


def scrape_until_told(url: str, ca_file: str, authorization: str, how: str) -> None:
    """Scrape on one connection, or on a new one each time."""
    headers = {"Authorization": authorization} if authorization else {}
    tls = ssl.create_default_context(cafile=ca_file) if ca_file else None
    place = urllib.parse.urlsplit(url).netloc
    connection: http.client.HTTPConnection | None = None
    connections = 0
    while not select.select([sys.stdin], [], [], _PAUSE_S)[0]:
        began, problem = time.monotonic(), ""
        try:
            if connection is None:
                connections += 1
                connection = (
                    http.client.HTTPSConnection(place, timeout=_TIMEOUT_S, context=tls)
                    if tls
                    else http.client.HTTPConnection(place, timeout=_TIMEOUT_S)
                )
            connection.request("GET", "/metrics", headers=headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK or b"gpu_hpc_up 1" not in answer.read():
                problem = f"status {answer.status}"
        except (OSError, http.client.HTTPException) as error:
            problem = repr(error)
        seconds = time.monotonic() - began
        if connection is not None and (problem or how == "renew"):
            connection.close()
            connection = None
        sys.stdout.write(json.dumps({"seconds": seconds, "problem": problem, "connections": connections}) + "\n")
        sys.stdout.flush()


@dataclass(frozen=True)
class Scraped:
    """What came of it. seconds: of each scrape, the shortest first."""

    seconds: list[float]
    problems: list[str]
    connections: int

    @property
    def p90_s(self) -> float:
        """What one in ten takes longer than."""
        return self.seconds[int(len(self.seconds) * 0.9)]


class Scraper:
    """That process."""

    def __init__(self, directory: Path, url: str, authorization: str, *, ca_file: str = "", keeps: bool = True) -> None:
        self._output = directory / f"scrapes-{time.monotonic_ns()}.jsonl"
        arguments = [url, ca_file, authorization, "keep" if keeps else "renew"]
        with self._output.open("wb") as output:
            command = [sys.executable, __file__, *arguments]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output)

    def wait_for_more(self, count: int, timeout: float = 60.0) -> None:
        """Wait until so many more scrapes have ended."""
        target, deadline = len(self._lines()) + count, time.monotonic() + timeout
        while len(self._lines()) < target:
            assert self._process.poll() is None, "the scraper ended"
            assert time.monotonic() < deadline, "the scraper does not go on"
            time.sleep(0.02)

    def end(self) -> Scraped:
        """Stop it."""
        self._process.communicate(timeout=30)
        lines = [json.loads(line) for line in self._lines()]
        problems = [line["problem"] for line in lines if line["problem"]]
        return Scraped(sorted(line["seconds"] for line in lines), problems, lines[-1]["connections"])

    def kill(self) -> None:
        """Whatever state it is in."""
        self._process.kill()
        self._process.communicate()

    def _lines(self) -> list[str]:
        return [line for line in self._output.read_text().splitlines(keepends=True) if line.endswith("\n")]


if __name__ == "__main__":
    scrape_until_told(*sys.argv[1:])
