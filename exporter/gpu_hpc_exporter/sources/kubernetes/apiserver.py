"""Keeps up with the pods of this node, and reads its ResourceSlices when somebody needs them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Final, Protocol

from gpu_hpc_exporter.model import State
from gpu_hpc_exporter.sources.kubernetes.backoff import Backoff
from gpu_hpc_exporter.sources.kubernetes.client import ApiClient, ApiError
from gpu_hpc_exporter.sources.kubernetes.devices import SliceDevice, SliceKey
from gpu_hpc_exporter.sources.kubernetes.objects import (
    ErrorStatus,
    PodRecord,
    WatchEvent,
    decode,
    read_pod,
    read_pods,
    read_slices,
    read_version,
)
from gpu_hpc_exporter.sources.kubernetes.settings import ApiSettings
from gpu_hpc_exporter.sources.kubernetes.text import clean

_PODS: Final = "/api/v1/pods"
_SLICE_VERSIONS: Final = ("v1", "v1beta2", "v1beta1")
_SLICES_GAP_S: Final = 30.0
_NO_SLICES_WAIT_S: Final = 300.0
_WATCH_S: Final = (300, 600)
_WATCH_GRACE_S: Final = 30.0
_EMPTY_WATCH_S: Final = 1.0
"""A watch that ends earlier without a word may be one that never told anything."""
_MAX_PODS: Final = 4_096


class Receiver(Protocol):
    """Takes what the API server tells, quickly and without raising."""

    def take_pods(self, pods: Mapping[str, PodRecord]) -> None: ...

    def take_slices(self, slices: Mapping[SliceKey, SliceDevice]) -> None: ...

    def take_state(self, state: State, reason: str) -> None: ...

    def hear(self) -> None:
        """The server is there, with no news."""


class _ExpiredError(Exception):
    """The server no longer knows the version from which we watch."""


class ApiWatch:
    """Lists the pods of one node and watches them from there on, for ever; after any doubt it lists again.

    `sleep` and `clock` are asyncio's and the system's but in tests.
    """

    def __init__(
        self,
        settings: ApiSettings,
        receiver: Receiver,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = ApiClient(settings.server)
        self._node = settings.node
        self._wanted = settings.wanted
        self._receiver = receiver
        self._sleep = sleep
        self._clock = clock
        self._version = ""
        self._expirations = 0
        self._pods: dict[str, PodRecord] = {}
        self._slice_versions: tuple[str, ...] = _SLICE_VERSIONS
        self._slices_wanted = asyncio.Event()
        self._slices_problem = ""

    async def run(self) -> None:
        """Go on until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_up())
            tasks.create_task(self._answer_for_slices())

    def want_slices(self) -> None:
        """Read the ResourceSlices, once it is time; to be called in the loop's thread."""
        self._slices_wanted.set()

    async def _keep_up(self) -> None:
        backoff = Backoff()
        while True:
            began = self._clock()
            asked_s = await self._list_and_watch()
            await self._sleep(backoff.wait_s(self._clock() - began, asked_s))

    async def _list_and_watch(self) -> float:
        """Seconds that the server asks us to wait."""
        try:
            if not self._version:
                await self._list()
            await self._watch()
        except _ExpiredError:
            self._version = ""
            self._expirations += 1
        except ApiError as error:
            self._version = ""
            self._receiver.take_state(error.state, str(error))
            return error.wait_s
        return 0.0

    async def _list(self) -> None:
        # Version 0 is whatever the server has at hand. Without it each node's list would read all pods of the
        # cluster from the database; that is for a server whose memory is itself older than what it can watch.
        version = {"resourceVersion": "0"} if self._expirations < 2 else {}
        raw = await self._ask("list", _PODS, version)
        try:
            pods, self._version = read_pods(raw, self._wanted)
        except ValueError as error:
            raise ApiError("failed", f"{_PODS} answers no list of pods: {error}") from error
        self._version = clean(self._version)
        self._pods = {uid: record for uid, record in pods.items() if record.node == self._node}
        self._receiver.take_pods(dict(self._pods))
        self._tell_state()

    def _tell_state(self) -> None:
        if self._pods:
            self._receiver.take_state("active", self._slices_problem)
        else:
            reason = f"the API server knows no pod on a node {self._node}: set NODE_NAME to spec.nodeName"
            self._receiver.take_state("failed", reason)

    async def _watch(self) -> None:
        """Until the server ends it, as it does after some minutes. Raises _ExpiredError, ApiError."""
        lasts_s = random.randint(*_WATCH_S)  # noqa: S311  no secret
        parameters = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(lasts_s),
            "fieldSelector": self._selector,
        }
        began, has_told = self._clock(), False
        try:
            async with aclosing(self._client.follow(_PODS, parameters, lasts_s + _WATCH_GRACE_S)) as batches:
                async for lines in batches:
                    has_told = True
                    self._take(lines)
        except ApiError as error:
            raise _translated(error, "watch", "pods") from error
        if not has_told and self._clock() - began < _EMPTY_WATCH_S:
            self._version = ""

    def _take(self, lines: list[bytes]) -> None:
        has_changed = False
        try:
            for line in lines:
                if line.strip():
                    has_changed = self._take_event(line) or has_changed
        except ValueError as error:
            raise ApiError("failed", f"the watch of pods tells what is no event: {error}") from error
        finally:
            if has_changed:
                self._receiver.take_pods(dict(self._pods))
            self._receiver.hear()
        self._expirations = 0

    def _take_event(self, line: bytes) -> bool:
        """Whether a pod has changed. Raises ValueError for what is no event."""
        event = decode(line, WatchEvent)
        match event.type:
            case "ADDED" | "MODIFIED" | "DELETED":
                return self._take_pod(event)
            case "BOOKMARK":
                self._version = clean(read_version(event.object)) or self._version
                return False
            case "ERROR":
                status = decode(event.object, ErrorStatus)
                if status.code == 410:
                    raise _ExpiredError
                reason = f"the watch of pods ended with {status.code} {clean(status.message)}"
                raise ApiError("failed", reason)
        raise ValueError(f"type {clean(event.type)}")

    def _take_pod(self, event: WatchEvent) -> bool:
        record = read_pod(event.object, self._wanted)
        if record is None:
            return False
        self._version = clean(record.version) or self._version
        uid = record.pod.uid
        if event.type == "DELETED" or record.node != self._node:
            return self._pods.pop(uid, None) is not None
        if uid not in self._pods and len(self._pods) >= _MAX_PODS:
            return False
        self._pods[uid] = record
        return True

    async def _answer_for_slices(self) -> None:
        while True:
            await self._slices_wanted.wait()
            self._slices_wanted.clear()
            await self._sleep(await self._take_slices())

    async def _take_slices(self) -> float:
        """Seconds until they may be read again."""
        wait_s, problem = _SLICES_GAP_S, ""
        try:
            self._receiver.take_slices(await self._read_slices())
        except _ExpiredError:
            pass  # nothing is asked for by version
        except ApiError as error:
            wait_s, problem = max(wait_s, error.wait_s), str(error)
            self._slices_wanted.set()
        if problem != self._slices_problem:
            self._slices_problem = problem
            if self._version:
                self._tell_state()
        return wait_s

    async def _read_slices(self) -> dict[SliceKey, SliceDevice]:
        """Raises ApiError."""
        for version in self._slice_versions:
            path = f"/apis/resource.k8s.io/{version}/resourceslices"
            try:
                slices = read_slices(await self._ask("list", path, {"resourceVersion": "0"}))
            except ApiError as error:
                if error.status != 404:
                    raise
            except ValueError as error:
                raise ApiError("failed", f"{path} answers no list: {error}") from error
            else:
                self._slice_versions = (version,)
                return slices
        self._slice_versions = _SLICE_VERSIONS
        raise ApiError("unsupported", "the API server has no ResourceSlices", wait_s=_NO_SLICES_WAIT_S)

    async def _ask(self, verb: str, path: str, parameters: Mapping[str, str]) -> bytes:
        try:
            return await self._client.read(path, {**parameters, "fieldSelector": self._selector})
        except ApiError as error:
            raise _translated(error, verb, path.rpartition("/")[2]) from error

    @property
    def _selector(self) -> str:
        return f"spec.nodeName={self._node}"


def _translated(error: ApiError, verb: str, resource: str) -> Exception:
    """What the status means for a request of this verb."""
    if error.status == 410:
        return _ExpiredError()
    if error.status == 403:
        reason = (
            f"may not {verb} {resource}: give the exporter's service account a ClusterRole with list and watch on it"
        )
        detail = f" ({error})" if str(error) else ""
        return ApiError(error.state, reason + detail, status=403, wait_s=error.wait_s)
    return error
