"""Pods of a node by list and watch, against a real HTTP server that fails in every way."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from fake_apiserver import Answer, FakeApiServer, Request, pod, running, slice_of
from gpu_hpc_exporter.model import State
from gpu_hpc_exporter.sources.kubernetes import client as client_module
from gpu_hpc_exporter.sources.kubernetes.apiserver import ApiWatch
from gpu_hpc_exporter.sources.kubernetes.backoff import Backoff
from gpu_hpc_exporter.sources.kubernetes.client import Server
from gpu_hpc_exporter.sources.kubernetes.devices import SliceDevice, SliceKey
from gpu_hpc_exporter.sources.kubernetes.objects import PodRecord, Wanted
from gpu_hpc_exporter.sources.kubernetes.settings import ApiSettings

EXPIRED = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}


class Watching:
    """An ApiWatch in a thread, with a clock that runs only while it waits; takes what it tells."""

    def __init__(self, server: Server) -> None:
        self.now_s = 0.0
        self.pods: list[str] = []
        self.states: list[tuple[State, str]] = []
        self.slices: Mapping[SliceKey, SliceDevice] | None = None
        self.waits: list[float] = []
        self.changed = threading.Condition()
        self._watch: ApiWatch | None = None
        self._settings = ApiSettings(server, "node-1", Wanted(("job-name",)))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._task = self._loop.create_task(self._follow())
        with pytest.raises(asyncio.CancelledError):
            self._loop.run_until_complete(self._task)
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _follow(self) -> None:
        self._watch = ApiWatch(self._settings, self, self._sleep, lambda: self.now_s)
        await self._watch.run()

    async def _sleep(self, seconds: float) -> None:
        with self.changed:
            self.now_s += seconds
            self.waits.append(seconds)
            self.changed.notify_all()
        await asyncio.sleep(0)

    def stop(self) -> None:
        """Cancel it; it ends in order."""
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(60)
        assert not self._thread.is_alive()

    def want_slices(self) -> None:
        """Ask for them."""
        assert self._watch
        self._loop.call_soon_threadsafe(self._watch.want_slices)

    def take_pods(self, pods: Mapping[str, PodRecord]) -> None:
        """Names of the pods."""
        with self.changed:
            self.pods = sorted(record.pod.name for record in pods.values())
            self.changed.notify_all()

    def take_slices(self, slices: Mapping[SliceKey, SliceDevice]) -> None:
        """As they are."""
        with self.changed:
            self.slices = slices
            self.changed.notify_all()

    def take_state(self, state: State, reason: str) -> None:
        """Each, repeated ones too."""
        assert len(reason) < 500
        with self.changed:
            self.states.append((state, reason))
            self.changed.notify_all()

    def hear(self) -> None:
        """Nothing to do."""

    def wait_for_pods(self, *names: str) -> None:
        """Until just these are told."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.pods == sorted(names), 60), self.pods

    def wait_for_state(self, state: State, text: str = "") -> str:
        """Until this state has been told with this text; the reason."""
        with self.changed:
            assert self.changed.wait_for(lambda: any(one == state and text in why for one, why in self.states), 60), (
                self.states
            )
            return next(why for one, why in self.states if one == state and text in why)


@pytest.fixture
def api() -> Iterator[FakeApiServer]:
    """A server with one pod."""
    with running() as server:
        server.put(pod("u1", "one"))
        yield server


@pytest.fixture
def watching(api: FakeApiServer) -> Iterator[Watching]:
    """Somebody who watches it."""
    watching = Watching(Server(api.url))
    yield watching
    watching.stop()


def test_pods_come_change_and_go(api: FakeApiServer, watching: Watching) -> None:
    """A list, then one watch that tells of each change."""
    watching.wait_for_pods("one")
    api.wait_for(lambda: api.watches == 1)
    api.put(pod("u2", "two"))
    watching.wait_for_pods("one", "two")
    api.delete("u1")
    watching.wait_for_pods("two")
    assert [request.kind for request in api.requests] == ["list", "watch"]
    assert watching.states == [("active", "")]


def test_what_is_asked(api: FakeApiServer, watching: Watching) -> None:
    """Only this node's pods, from the server's memory, not from the database; the watch from where the list ended."""
    watching.wait_for_pods("one")
    api.wait_for(lambda: api.watches == 1)
    listed, watched = (request.query for request in api.requests)
    assert listed == {"fieldSelector": "spec.nodeName=node-1", "resourceVersion": "0"}
    assert watched["fieldSelector"] == "spec.nodeName=node-1"
    assert (watched["resourceVersion"], watched["allowWatchBookmarks"]) == (str(api.version), "true")
    assert 300 <= int(watched["timeoutSeconds"]) <= 600


def test_pods_of_other_nodes_are_left_out(api: FakeApiServer, watching: Watching) -> None:
    """Even if the server tells of them."""
    api.wait_for(lambda: api.watches == 1)
    api.put(pod("u9", "far", node="node-2"))
    api.put(pod("u2", "two"))
    watching.wait_for_pods("one", "two")


def test_a_watch_goes_on_from_the_last_version(api: FakeApiServer, watching: Watching) -> None:
    """Without another list; a bookmark counts as well."""
    api.wait_for(lambda: api.watches == 1)
    api.emit({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "777"}}})
    api.end_watches()
    api.wait_for(lambda: api.count("watch") == 2)
    assert [request.kind for request in api.requests] == ["list", "watch", "watch"]
    assert api.requests[-1].query["resourceVersion"] == "777"
    assert watching.states == [("active", "")]


def test_f10_410_in_the_stream(api: FakeApiServer, watching: Watching) -> None:
    """F10: the pods are listed anew, so that what no watch told of is seen."""
    api.wait_for(lambda: api.watches == 1)
    api.pods.pop("u1")
    api.put_quietly(pod("u2", "two"))
    api.emit(EXPIRED)
    watching.wait_for_pods("two")
    assert "failed" not in dict(watching.states)


def test_f10_410_as_status(api: FakeApiServer) -> None:
    """F10: the same; a second one in a row is a server whose memory is too old, so it reads the database."""
    api.answers["watch"] += [Answer(410, b'{"code":410}'), Answer(410)]
    watching = Watching(Server(api.url))
    api.wait_for(lambda: api.watches == 1)
    watching.stop()
    assert [request.query.get("resourceVersion") for request in api.requests if request.kind == "list"] == [
        "0",
        "0",
        None,
    ]


def test_f10_a_watch_that_ends_at_once(api: FakeApiServer) -> None:
    """F10: 200 and the end, 100 times: at most 10 reconnections in any 30 s, and what has changed is seen."""
    api.always["watch"] = Answer()
    asked_at: list[float] = []
    watching: list[Watching] = []

    def note(request: Request) -> None:
        if request.kind == "watch" and watching:
            asked_at.append(watching[0].now_s)

    api.on_request = note
    watching.append(Watching(Server(api.url)))
    api.wait_for(lambda: api.count("watch") >= 100)
    api.put_quietly(pod("u2", "two"))
    watching[0].wait_for_pods("one", "two")
    watching[0].stop()
    assert max(sum(begin <= other <= begin + 30 for other in asked_at) for begin in asked_at) <= 10


def test_f10_batched_events_are_one_level(api: FakeApiServer, watching: Watching) -> None:
    """F10: what is there at the end counts, not what came in between."""
    api.wait_for(lambda: api.watches == 1)
    lines = [
        b'{"type":"%s","object":{"metadata":{"uid":"u2","name":"two"},"spec":{"nodeName":"node-1"}}}' % kind
        for kind in (b"ADDED", b"DELETED", b"MODIFIED", b"ADDED")
    ]
    api.emit_raw(b"\n".join(lines))
    watching.wait_for_pods("one", "two")


def test_429_is_waited_for_as_asked(api: FakeApiServer) -> None:
    """And 503, with Retry-After; without it the waits double."""
    api.answers["list"] += [Answer(429, headers={"Retry-After": "77"}), Answer(503, headers={"Retry-After": "9" * 50})]
    api.answers["list"] += [Answer(500, b'{"message":"etcd is away"}')] * 3
    watching = Watching(Server(api.url))
    watching.wait_for_pods("one")
    watching.stop()
    first, *others = watching.waits[:5]
    assert 77 <= first <= 85
    assert others[:4] >= [0.5, 1, 2, 4]
    assert all(wait <= 16 for wait in others)
    assert "etcd is away" in watching.wait_for_state("failed", "500")


def test_403_names_the_missing_right(api: FakeApiServer) -> None:
    """In one line, and the server is asked rarely."""
    api.answers["list"].append(Answer(403, b'{"message":"pods is forbidden: User \\"x\\" cannot list"}'))
    watching = Watching(Server(api.url))
    watching.wait_for_pods("one")
    watching.stop()
    reason = watching.wait_for_state("no_permission")
    assert "may not list pods" in reason
    assert "ClusterRole with list and watch" in reason
    assert watching.waits[0] >= 300


def test_403_for_the_watch_alone(api: FakeApiServer) -> None:
    """The pods are listed at each try."""
    api.answers["watch"].append(Answer(403))
    watching = Watching(Server(api.url))
    api.wait_for(lambda: api.watches == 1)
    watching.stop()
    assert "may not watch pods" in watching.wait_for_state("no_permission")
    assert api.count("list") == 2


def test_401_may_pass(api: FakeApiServer) -> None:
    """A token that has expired is renewed by the kubelet."""
    api.answers["list"].append(Answer(401))
    watching = Watching(Server(api.url))
    watching.wait_for_pods("one")
    watching.stop()
    assert "token" in watching.wait_for_state("no_permission")
    assert 60 <= watching.waits[0] <= 66


@pytest.mark.parametrize(
    "answer",
    [
        Answer(body=b"<html>"),
        Answer(body=b"[]"),
        Answer(body=b'{"metadata":1}'),
        Answer(body=b'{"items":{}}'),
        Answer(body=b"[" * 100_000),
        Answer(body=b"\xff\xfe\x00"),
        Answer(body=b'{"metadata":{}', length=99),  # and then the connection ends
        Answer(301, headers={"Location": "http://127.0.0.1:9/"}),
        Answer(204),
        Answer(404, b"page not found"),
        Answer(418, b"x" * 100_000),
        Answer(500, b"\xff" * 100),
    ],
)
def test_a_list_that_is_none(api: FakeApiServer, answer: Answer) -> None:
    """The state says so, and the next try succeeds."""
    api.answers["list"].append(answer)
    watching = Watching(Server(api.url))
    watching.wait_for_pods("one")
    watching.stop()
    watching.wait_for_state("failed")
    assert watching.waits[0] >= 0.5


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"{}",
        b'{"type":"ADDED"}',
        b'{"type":"EXPLODED","object":{}}',
        b'{"type":"ERROR","object":{"code":500,"message":"\\ud800"}}',
        b'{"type":"ERROR","object":[]}',
        b'{"type":"BOOKMARK","object":5}',
    ],
)
def test_a_watch_that_tells_no_event(api: FakeApiServer, watching: Watching, line: bytes) -> None:
    """Something was lost: the pods are listed anew."""
    api.wait_for(lambda: api.watches == 1)
    api.put_quietly(pod("u2", "two"))
    api.emit_raw(line)
    watching.wait_for_state("failed")
    watching.wait_for_pods("one", "two")


@pytest.mark.parametrize("told", [{}, [], 5, {"metadata": {"uid": 5}}, {"metadata": {"uid": "x" * 9}}])
def test_a_pod_that_is_none_is_skipped(api: FakeApiServer, watching: Watching, told: object) -> None:
    """The watch goes on."""
    api.wait_for(lambda: api.watches == 1)
    api.emit({"type": "ADDED", "object": told})
    api.put(pod("u2", "two"))
    watching.wait_for_pods("one", "two")
    assert watching.states == [("active", "")]


def test_huge_answers(api: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a list nor a line is taken into memory whatever its size."""
    monkeypatch.setattr(client_module, "_MAX_ANSWER", 100_000)
    monkeypatch.setattr(client_module, "_MAX_LINE", 100_000)
    api.answers["list"].append(Answer(body=b" " * 1_000_000))
    watching = Watching(Server(api.url))
    api.wait_for(lambda: api.watches == 1)
    assert "an answer above" in watching.wait_for_state("failed")
    api.emit_raw(b"x" * 1_000_000)
    watching.wait_for_state("failed", "a line above")
    api.wait_for(lambda: api.count("list") == 3)
    watching.stop()


def test_more_pods_than_a_node_has(api: FakeApiServer) -> None:
    """Some thousands are kept."""
    for number in range(5_000):
        api.pods[f"x{number}"] = pod(f"x{number}", f"n{number}")
    watching = Watching(Server(api.url))
    api.wait_for(lambda: api.watches == 1)
    api.put(pod("late", "late"))
    api.delete("x0")
    with watching.changed:
        assert watching.changed.wait_for(lambda: len(watching.pods) == 4_095, 60)
    watching.stop()


def test_a_server_that_stalls(api: FakeApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a list: it is left after the deadline."""
    monkeypatch.setattr(client_module, "_ANSWER_S", 0.2)
    api.answers["list"].append(Answer(body=b'{"metadata":', length=99, stalls=True))
    watching = Watching(Server(api.url))
    assert "has not answered within 0.2 s" in watching.wait_for_state("failed")
    watching.wait_for_pods("one")
    watching.stop()


def test_nobody_listens() -> None:
    """The state says where."""
    watching = Watching(Server("http://127.0.0.1:9"))
    assert "127.0.0.1:9" in watching.wait_for_state("failed")
    watching.stop()


def test_a_node_without_pods_is_the_wrong_node(api: FakeApiServer) -> None:
    """Where NODE_NAME is wrong the API server answers happily, with nothing."""
    api.pods.clear()
    watching = Watching(Server(api.url))
    assert "set NODE_NAME" in watching.wait_for_state("failed")
    watching.stop()


def test_the_token_is_read_for_each_request(api: FakeApiServer, tmp_path: Path) -> None:
    """The kubelet replaces it every hour."""
    token = tmp_path / "token"
    token.write_text("first\n")
    watching = Watching(Server(api.url, token))
    api.wait_for(lambda: api.watches == 1)
    token.write_text("second\n")
    api.emit(EXPIRED)
    api.wait_for(lambda: api.count("list") == 2)
    watching.stop()
    assert [api.requests[place].headers["Authorization"] for place in (0, 2)] == ["Bearer first", "Bearer second"]


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"a\nb", b"\x00"])
def test_a_token_that_is_none(api: FakeApiServer, tmp_path: Path, content: bytes | None) -> None:
    """The state says so without telling it."""
    token = tmp_path / "token"
    if content is not None:
        token.write_bytes(content)
    watching = Watching(Server(api.url, token))
    watching.wait_for_state("failed")
    watching.stop()
    assert not api.requests


def test_an_authority_that_is_none(tmp_path: Path) -> None:
    """Neither a missing file nor one without a certificate ends the thread."""
    (tmp_path / "ca.crt").write_text("no certificate")
    for name in ("ca.crt", "missing.crt"):
        watching = Watching(Server("https://127.0.0.1:9", None, tmp_path / name))
        watching.wait_for_state("failed")
        watching.stop()


def test_a_server_of_another_authority(api: FakeApiServer) -> None:
    """Its certificate is checked: a plain server is not even spoken to."""
    watching = Watching(Server(api.url.replace("http:", "https:")))
    watching.wait_for_state("failed")
    watching.stop()
    assert not api.requests


def test_tls_is_verified(api: FakeApiServer) -> None:
    """By name and by chain."""
    context = client_module.ApiClient(Server(api.url.replace("http:", "https:")))._context()  # noqa: SLF001  no TLS server to show it
    assert isinstance(context, ssl.SSLContext)
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.check_hostname


def test_f05_slices_are_read_when_somebody_wants_them(api: FakeApiServer, watching: Watching) -> None:
    """F05: and no more often than twice a minute, however often they are wanted."""
    api.slices = [slice_of({"gpu-0": {"uuid": {"string": "GPU-0"}}})]
    api.wait_for(lambda: api.watches == 1)
    assert api.count("slices") == 0
    watching.want_slices()
    with watching.changed:
        assert watching.changed.wait_for(lambda: watching.slices is not None, 60)
    assert watching.slices == {("gpu.nvidia.com", "node-1", "gpu-0"): SliceDevice("GPU-0")}
    assert watching.waits == [30.0]
    assert api.requests[-1].query["fieldSelector"] == "spec.nodeName=node-1"


@pytest.mark.parametrize(("version", "asked"), [("v1", 1), ("v1beta2", 2), ("v1beta1", 3)])
def test_f07_every_version_of_resource_slices(api: FakeApiServer, watching: Watching, version: str, asked: int) -> None:
    """F07: the newest that the server has is found once."""
    api.slice_version = version
    api.slices = [slice_of({"gpu-0": {}}, version=version)]
    api.wait_for(lambda: api.watches == 1)
    for wanted in (asked, asked + 1):
        watching.want_slices()
        api.wait_for(partial(lambda wanted: api.count("slices") == wanted, wanted))
        with watching.changed:
            assert watching.changed.wait_for(lambda: watching.slices is not None, 60)
        watching.slices = None


def test_f07_slices_are_read_again_after_a_failure(api: FakeApiServer, watching: Watching) -> None:
    """F07: without being wanted again, once it is time; also where the cluster has no such thing yet."""
    api.answers["slices"] += [Answer(429, headers={"Retry-After": "50"}), *[Answer(404)] * 3, Answer(body=b"{")]
    api.slices = [slice_of({"gpu-0": {}})]
    api.wait_for(lambda: api.watches == 1)
    watching.want_slices()
    with watching.changed:
        assert watching.changed.wait_for(lambda: watching.slices is not None, 60)
    first, second, *_ = watching.waits
    assert (first, second) == (50.0, 300.0)
    watching.wait_for_state("active", "no ResourceSlices")
    watching.wait_for_state("active", "answers no list")
    assert watching.states[-1] == ("active", "")


def test_f07_slices_that_may_not_be_read(api: FakeApiServer, watching: Watching) -> None:
    """F07: the pods stay, and the reason names the right."""
    api.always["slices"] = Answer(403)
    api.wait_for(lambda: api.watches == 1)
    watching.want_slices()
    assert "may not list resourceslices" in watching.wait_for_state("active", "may not")
    assert watching.slices is None


def test_stopping_ends_an_open_watch(api: FakeApiServer) -> None:
    """At once, and the server sees it end."""
    watching = Watching(Server(api.url))
    api.wait_for(lambda: api.watches == 1)
    watching.stop()


def test_the_backoff() -> None:
    """From 0.5 to 1 s at first, doubled up to 30; a connection that has lasted begins anew; nobody waits for hours."""
    backoff = Backoff()
    waits = [backoff.wait_s(0.0) for _ in range(10)]
    for wait, most in zip(waits, [1, 2, 4, 8, 16, 30, 30, 30, 30, 30], strict=True):
        assert most / 2 <= wait <= most
    assert backoff.wait_s(31.0) <= 1
    assert 600 <= backoff.wait_s(0.0, 1e9) <= 660
