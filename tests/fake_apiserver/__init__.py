"""A fake Kubernetes API server: real HTTP, lists and watches of pods, and every way to fail."""

from __future__ import annotations

import json
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final
from urllib.parse import parse_qs, urlsplit

__all__ = ["Answer", "FakeApiServer", "Request", "pod", "running", "slice_of"]

Json = dict[str, Any]

END: Final = None
"""In place of a line: the watch ends."""


@dataclass(frozen=True)
class Answer:
    """What to answer in place of the truth. `stalls`: after the body nothing comes, and the connection stays."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    stalls: bool = False
    length: int | None = None


@dataclass(frozen=True)
class Request:
    """What was asked."""

    kind: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


def pod(uid: str, name: str, *, node: str = "node-1", **more: Any) -> Json:
    """A pod as the API tells it; `more` is metadata and status."""
    status = {key: more.pop(key) for key in ("phase", "containerStatuses", "initContainerStatuses") if key in more}
    metadata = {"uid": uid, "name": name, "namespace": "default", "managedFields": [{"f": "x" * 200}], **more}
    return {"metadata": metadata, "spec": {"nodeName": node, "containers": []}, "status": status}


def slice_of(devices: Mapping[str, Json], *, version: str = "v1", generation: int = 1, pool: str = "node-1") -> Json:
    """A ResourceSlice with these devices' attributes, in the form of a version of the API."""
    told = {name: {"attributes": attributes} for name, attributes in devices.items()}
    listed = [{"name": name, **({"basic": one} if version == "v1beta1" else one)} for name, one in told.items()]
    spec = {"driver": "gpu.nvidia.com", "pool": {"name": pool, "generation": generation}, "devices": listed}
    return {"metadata": {"name": f"{pool}-{generation}"}, "spec": spec}


class FakeApiServer:
    """Holds `pods` by UID. `answers`: per kind of request (list, watch, slices) what to answer instead, in turn."""

    def __init__(self) -> None:
        self.pods: dict[str, Json] = {}
        self.slices: list[Json] = []
        self.slice_version = "v1"
        self.version = 100
        self.answers: dict[str, deque[Answer]] = {"list": deque(), "watch": deque(), "slices": deque()}
        self.always: dict[str, Answer] = {}
        self.requests: list[Request] = []
        self.on_request: Callable[[Request], None] = lambda _request: None
        self.changed = threading.Condition()
        self.stopping = threading.Event()
        self._watches: list[queue.Queue[bytes | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def stop(self) -> None:
        """End all connections."""
        self.stopping.set()
        self.end_watches()
        self._server.shutdown()
        self._server.server_close()

    def put(self, told: Json) -> None:
        """Add or change a pod, and tell the watches."""
        kind = "MODIFIED" if told["metadata"]["uid"] in self.pods else "ADDED"
        self.put_quietly(told)
        self.emit({"type": kind, "object": told})

    def put_quietly(self, told: Json) -> None:
        """Add or change a pod that no watch tells of."""
        self.version += 1
        told["metadata"]["resourceVersion"] = str(self.version)
        self.pods[told["metadata"]["uid"]] = told

    def delete(self, uid: str) -> None:
        """Remove a pod, and tell the watches."""
        self.emit({"type": "DELETED", "object": self.pods.pop(uid)})

    def emit(self, event: Json) -> None:
        """A line to each watch."""
        self.emit_raw(json.dumps(event).encode())

    def emit_raw(self, line: bytes) -> None:
        """The same, whatever it is."""
        with self.changed:
            for watch in self._watches:
                watch.put(line)

    def end_watches(self) -> None:
        """Each watch ends in order."""
        with self.changed:
            for watch in self._watches:
                watch.put(END)

    def count(self, kind: str) -> int:
        """Requests of a kind so far."""
        return sum(request.kind == kind for request in self.requests)

    def wait_for(self, predicate: Callable[[], bool], timeout: float = 60) -> None:
        """Until it holds after a request; fails otherwise."""
        with self.changed:
            assert self.changed.wait_for(predicate, timeout)

    def note(self, request: Request) -> Answer | None:
        """A request has come: what to answer, None for the truth."""
        with self.changed:
            self.requests.append(request)
            answers = self.answers[request.kind]
            answer = answers.popleft() if answers else self.always.get(request.kind)
            self.changed.notify_all()
        self.on_request(request)
        return answer

    def listed(self) -> bytes:
        """The list of pods."""
        return json.dumps({"metadata": {"resourceVersion": str(self.version)}, "items": [*self.pods.values()]}).encode()

    @contextmanager
    def watch(self) -> Iterator[queue.Queue[bytes | None]]:
        """Lines for one watch."""
        lines: queue.Queue[bytes | None] = queue.Queue()
        with self.changed:
            self._watches.append(lines)
            self.changed.notify_all()
        try:
            yield lines
        finally:
            with self.changed:
                self._watches.remove(lines)
                self.changed.notify_all()

    @property
    def watches(self) -> int:
        """Watches that are open."""
        return len(self._watches)


def _handler_of(server: FakeApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        api = server

    return Handler


class _Handler(BaseHTTPRequestHandler):
    api: ClassVar[FakeApiServer]
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        """Answer."""
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query, keep_blank_values=True).items()}
        kind = "slices" if url.path.endswith("/resourceslices") else "watch" if "watch" in query else "list"
        answer = self.api.note(Request(kind, url.path, query, dict(self.headers)))
        self.close_connection = True
        try:
            if answer is not None:
                self._send(answer)
            elif kind == "watch":
                self._watch()
            else:
                self._send(Answer(body=self.api.listed()) if kind == "list" else self._slices(url.path))
        except (BrokenPipeError, ConnectionResetError):
            return

    def _slices(self, path: str) -> Answer:
        if f"/{self.api.slice_version}/" not in path:
            return Answer(404, b"404 page not found\n")
        return Answer(body=json.dumps({"metadata": {"resourceVersion": "1"}, "items": self.api.slices}).encode())

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer.body) if answer.length is None else answer.length))
        self.end_headers()
        self.wfile.write(answer.body)
        self.wfile.flush()
        if answer.stalls:
            self.api.stopping.wait()

    def _watch(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with self.api.watch() as lines:
            while (line := lines.get()) is not END:
                self.wfile.write(b"%x\r\n%s\n\r\n" % (len(line) + 1, line))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in the library
        """Say nothing."""


@contextmanager
def running() -> Iterator[FakeApiServer]:
    """A fake API server that listens."""
    server = FakeApiServer()
    server.start()
    try:
        yield server
    finally:
        server.stop()
