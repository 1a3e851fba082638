"""A real Chromium, driven over its own protocol (Chrome DevTools) through two pipes: no driver, no port."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE_S = 60.0
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # tests may run as root, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--lang=en-GB",
)


class Tab:
    """One page. Everything that it logs as an error is kept."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []

    def call(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        """One command of the protocol; raises AssertionError with what the browser says."""
        return self._browser.call(method, self._session, **parameters)

    def open(self, url: str) -> None:
        """Go there; returns when the document has loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, a promise's once it is there."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout: float = PATIENCE_S) -> None:
        """Ask 20 times a second until an expression is true."""
        deadline = time.monotonic() + timeout
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"{expression} did not become true; errors: {self.errors}"
            self.evaluate("new Promise(done => setTimeout(done, 50))")

    def press(self, key: str) -> None:
        """A key, as from a keyboard."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **_key_code(key), **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, **_key_code(key))

    def size(self, width: int, height: int, scale: float = 1, *, is_phone: bool = False) -> None:
        """The window's size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=is_phone,
        )

    def prefer(self, scheme: str) -> None:
        """Light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """What is on the screen, or the whole document, as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def text(self, selector: str) -> str:
        """The text of the first element that matches, "" without one."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''"))


class Chromium:
    """A running browser."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self.process = process
        self._out = os.fdopen(to_browser, "wb", buffering=0)
        self._in = os.fdopen(from_browser, "rb", buffering=0)
        self._rest = b""
        self._number = 0
        self._tabs: dict[str, Tab] = {}

    def tab(self) -> Tab:
        """A new page."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = self._tabs[session] = Tab(self, session)
        for domain in ("Page", "Runtime", "Log"):
            tab.call(f"{domain}.enable")
        return tab

    def call(self, method: str, session: str = "", **parameters: Any) -> Mapping[str, Any]:
        """Send a command and wait for its answer; events that come before it are looked at in passing."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        self._out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                found: Mapping[str, Any] = answer["result"]
                return found
            self._take(answer)

    def _read(self) -> Mapping[str, Any]:
        while b"\0" not in self._rest:
            more = self._in.read(1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        raw, _, self._rest = self._rest.partition(b"\0")
        found: Mapping[str, Any] = json.loads(raw)
        return found

    def _take(self, event: Mapping[str, Any]) -> None:
        tab = self._tabs.get(event.get("sessionId", ""))
        if tab is None:
            return
        if event["method"] == "Runtime.exceptionThrown":
            tab.errors.append(str(event["params"]["exceptionDetails"]))
        elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            tab.errors.append(event["params"]["entry"]["text"])

    def close(self) -> None:
        """End it."""
        self._out.close()
        self.process.kill()
        self.process.wait()
        self._in.close()


@contextmanager
def run_chromium() -> Iterator[Chromium]:
    """A browser with a profile of its own, gone afterwards."""
    program = shutil.which("chromium")
    assert program, "Chromium is needed: apt-get install chromium"
    browser_in, to_browser = os.pipe()
    from_browser, browser_out = os.pipe()
    profile = tempfile.mkdtemp(prefix="chromium-")
    # The protocol's pipes are descriptors 3 and 4; from 10 on nothing is in the way. Not every sh knows two digits.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (browser_in, browser_out)]
    script = f'exec 3<&{ends[0]} 4>&{ends[1]}; exec "$@"'
    command = ["bash", "-c", script, "bash", program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, pass_fds=ends, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for end in ends:
        os.close(end)
    os.close(browser_in)
    os.close(browser_out)
    browser = Chromium(process, to_browser, from_browser)
    try:
        yield browser
    finally:
        browser.close()
        shutil.rmtree(profile, ignore_errors=True)


def _key_code(key: str) -> Mapping[str, int]:
    codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
    return {"windowsVirtualKeyCode": codes.get(key, ord(key[0].upper()))}
