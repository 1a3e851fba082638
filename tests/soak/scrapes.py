"""A Prometheus of the soak as a process of its own: scrapes at its rate, and looks at all that it gets.

    python -m soak.scrapes URL text|openmetrics identity|gzip SECONDS_BETWEEN

Ends with its standard input; what it found is one line of JSON. A page that is the same as the one before is not looked
at again, and looking takes no part in the time of a scrape.
"""

from __future__ import annotations

import gzip
import http.client
import json
import select
import subprocess
import sys
import time
import urllib.parse
from array import array
from dataclasses import dataclass, field

from soak.counters import Counters, MalformedError, disagreements, samples_of
from soak.node import SM_ACTIVE

ACCEPT = {
    "text": "text/plain;version=0.0.4",
    "openmetrics": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
}
_TYPES = {"text": "text/plain", "openmetrics": "application/openmetrics-text"}
_TIMEOUT_S = 10
_MOST_TOLD = 20


@dataclass
class Found:
    """What one scraper saw. gained: as `Counters` has it."""

    kind: str
    seconds: list[float]
    problems: list[str] = field(default_factory=list)
    backward: list[str] = field(default_factory=list)
    gained: dict[str, float] = field(default_factory=dict)
    pages: int = 0
    most_series: int = 0
    begun_anew: int = 0
    hidden: int = 0


class _Scraper:
    def __init__(self, url: str, form: str, encoding: str) -> None:
        self._place = urllib.parse.urlsplit(url).netloc
        self._form, self._encoding = form, encoding
        self._headers = {"Accept": ACCEPT[form], "Accept-Encoding": encoding}
        self._connection: http.client.HTTPConnection | None = None
        self._counters = Counters()
        self._last = b""
        self.seconds = array("d")
        self.found = Found(f"{form}, {encoding}", [])

    def scrape(self) -> None:
        """Once."""
        began_s = time.monotonic()
        try:
            if self._connection is None:
                self._connection = http.client.HTTPConnection(self._place, timeout=_TIMEOUT_S)
            self._connection.request("GET", "/metrics", headers=self._headers)
            answer = self._connection.getresponse()
            body = answer.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection = None
            self._tell(repr(error))
            return
        finally:
            self.seconds.append(time.monotonic() - began_s)
        content_type, encoding = (
            answer.headers["Content-Type"] or "",
            answer.headers.get("Content-Encoding", "identity"),
        )
        if (answer.status, content_type.partition(";")[0], encoding) != (200, _TYPES[self._form], self._encoding):
            self._tell(f"{answer.status} {content_type} {encoding}")
        elif body != self._last:
            self._last = body
            self._look(body)

    def _look(self, body: bytes) -> None:
        try:
            text = (gzip.decompress(body) if self._encoding == "gzip" else body).decode()
            if (self._form == "openmetrics") is not text.endswith("# EOF\n"):
                raise MalformedError("the end is not that of the format")
            samples = samples_of(text)
        except ValueError as error:
            self._tell(repr(error))
            return
        self._counters.feed(samples)
        self.found.pages += 1
        self.found.most_series = max(self.found.most_series, len(samples))
        if samples.get("gpu_hpc_exposed_series") != len(samples):
            self._tell(f"{len(samples)} samples, told: {samples.get('gpu_hpc_exposed_series')}")
        for problem in disagreements(samples, SM_ACTIVE):
            self._tell(problem)

    def _tell(self, problem: str) -> None:
        if len(self.found.problems) < _MOST_TOLD:
            self.found.problems.append(problem)

    def end(self) -> Found:
        """Everything."""
        self.found.seconds = list(self.seconds)
        self.found.backward = self._counters.backward
        self.found.begun_anew, self.found.hidden = self._counters.begun_anew, self._counters.hidden
        self.found.gained = self._counters.gained
        return self.found


class Scraper:
    """That process."""

    def __init__(self, url: str, form: str, encoding: str, interval_s: float, env: dict[str, str]) -> None:
        command = [sys.executable, "-m", "soak.scrapes", url, form, encoding, str(interval_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)

    def end(self) -> Found:
        """Stop it."""
        output, _ = self._process.communicate(timeout=60)
        return Found(**json.loads(output))

    def kill(self) -> None:
        """Whatever state it is in."""
        self._process.kill()
        self._process.communicate()


def _scrape_until_told(url: str, form: str, encoding: str, interval_s: float) -> None:
    scraper = _Scraper(url, form, encoding)
    due_s = time.monotonic()
    while True:
        due_s = max(due_s + interval_s, time.monotonic())  # none is made up for
        if select.select([sys.stdin], [], [], max(0.0, due_s - time.monotonic()))[0]:
            break
        scraper.scrape()
    json.dump(vars(scraper.end()), sys.stdout)


if __name__ == "__main__":
    _scrape_until_told(sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4]))
