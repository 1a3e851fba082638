"""Asks kubelet and API server in threads of its own and keeps what they tell at hand."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final

from gpu_hpc_exporter.model import Gpu, State
from gpu_hpc_exporter.sources.kubernetes.apiserver import ApiWatch
from gpu_hpc_exporter.sources.kubernetes.devices import DeviceNames, SliceDevice, SliceKey
from gpu_hpc_exporter.sources.kubernetes.objects import PodRecord
from gpu_hpc_exporter.sources.kubernetes.podresources import KubeletError, PodResourcesClient
from gpu_hpc_exporter.sources.kubernetes.refresh import Asked, RefreshPlan
from gpu_hpc_exporter.sources.kubernetes.settings import ApiSettings, KubernetesSettings
from gpu_hpc_exporter.sources.kubernetes.view import PARTS, KubernetesLookups, Part, PartState, Told, build, unresolved

log = logging.getLogger(__name__)

OnState = Callable[[Part, State, str], None]

_SLICES_AGAIN_S: Final = 600.0
"""Devices may have got other UUIDs under the same name."""
_STOP_S: Final = 2.0
_MAX_TOLD: Final = 64


class KubernetesSource:
    """Who holds which GPU on this node. `view` is always at hand; nothing that is asked for here waits for a peer.

    on_state: called from this source's threads at each change of one of its two parts.
    """

    def __init__(self, settings: KubernetesSettings, on_state: OnState) -> None:
        self._settings = settings
        self._on_state = on_state
        self._client = PodResourcesClient(settings.socket, settings.deadline_s)
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._plan = RefreshPlan(settings.refresh_s, settings.gap_s)
        self._names = DeviceNames(gpu_resources=settings.gpu_resources)
        self._told = Told()
        self._parts: dict[Part, PartState] = {part: PartState("stale", "not asked yet") for part in PARTS}
        self._unknown_told: set[str] = set()
        self._slices_asked = Asked(_SLICES_AGAIN_S)
        self._is_stopping = False
        self._api = _ApiThread(settings.api, self) if settings.api is not None else None
        self._kubelet = threading.Thread(target=self._ask_kubelet, name="kubelet", daemon=True)
        self.view = KubernetesLookups(parts=dict(self._parts))
        """What is known now; replaced, never changed."""

    def start(self) -> None:
        """Begin to ask."""
        self._kubelet.start()
        if self._api is None:
            self._set_state("apiserver", "unsupported", self._settings.no_api_reason)
        else:
            self._api.start()

    def stop(self) -> None:
        """End, within seconds even where a peer hangs."""
        with self._lock:
            self._is_stopping = True
            self._wake.notify_all()
        self._client.abandon()
        if self._api is not None:
            self._api.stop()
        self._kubelet.join(_STOP_S)

    def poke(self, key: str) -> None:
        """A container or pod with this id appeared that nobody knows: ask at once, unless it was asked for lately."""
        with self._lock:
            if self._plan.ask(key, time.monotonic()):
                self._wake.notify_all()

    def set_gpus(self, gpus: Iterable[Gpu], minors: Mapping[str, int]) -> None:
        """The GPUs are these now: what containers hold is resolved anew, without asking anybody.

        minors: number of `/dev/nvidia<n>` by UUID, as far as known.
        """
        names = DeviceNames(gpus, minors, self._settings.gpu_resources)
        with self._lock:
            self._names = names
            self._slices_asked = Asked(_SLICES_AGAIN_S)
            self._rebuild()

    # From the API server's thread

    def take_pods(self, pods: Mapping[str, PodRecord]) -> None:
        """All pods of the node."""
        with self._lock:
            self._told = replace(self._told, records=pods)
            self._hear("apiserver")
            self._rebuild()

    def take_slices(self, slices: Mapping[SliceKey, SliceDevice]) -> None:
        """All devices of the node that ResourceSlices tell of."""
        with self._lock:
            self._told = replace(self._told, slices=slices)
            self._rebuild()

    def take_state(self, state: State, reason: str) -> None:
        """How the API server tells from now on."""
        self._set_state("apiserver", state, reason)

    def hear(self) -> None:
        """The API server is there."""
        with self._lock:
            self._hear("apiserver")

    # The kubelet's thread

    def _ask_kubelet(self) -> None:
        try:
            while self._wait_for_turn():
                self._refresh()
        except Exception as error:
            log.exception("the kubelet is no longer asked, by an unexpected error")
            self._set_state("kubelet", "failed", type(error).__name__)

    def _wait_for_turn(self) -> bool:
        """Whether to ask again."""
        with self._lock:
            while not self._is_stopping and (wait_s := self._plan.wait_s(time.monotonic())) > 0:
                self._wake.wait(wait_s)
            self._plan.begin(time.monotonic())
            return not self._is_stopping

    def _refresh(self) -> None:
        try:
            holdings = self._client.list()
        except KubeletError as error:
            self._take_failure(error)
            return
        with self._lock:
            self._told = replace(self._told, holdings=holdings)
            self._hear("kubelet")
            self._rebuild()
        self._set_state("kubelet", "active", "")
        self._ask_for_slices()

    def _take_failure(self, error: KubeletError) -> None:
        if self._is_stopping:
            return
        with self._lock:
            if not self._is_recent("kubelet"):
                self._told = replace(self._told, holdings=())
            self._rebuild()
        self._set_state("kubelet", error.state, str(error))

    def _ask_for_slices(self) -> None:
        """Where a container holds dynamic devices: when one is not explained, and every now and then."""
        with self._lock:
            told, names = self._told, self._names
        if self._api is None or not any(holding.dynamic for holding in told.holdings):
            return
        devices = {f"{device.driver} {device.pool}/{device.name}" for device in unresolved(told, names)}
        now_s = time.monotonic()
        with self._lock:
            news = [key for key in ("", *devices) if self._slices_asked.is_news(key, now_s)]
        if news:
            self._api.want_slices()

    # With the lock held

    def _hear(self, part: Part) -> None:
        self._parts[part] = replace(self._parts[part], told_s=time.monotonic())
        self.view = replace(self.view, parts=dict(self._parts))

    def _is_recent(self, part: Part) -> bool:
        told_s = self._parts[part].told_s
        return told_s is not None and time.monotonic() - told_s < self._settings.keep_s

    def _rebuild(self) -> None:
        names_hold = self._parts["apiserver"].state == "active" or self._is_recent("apiserver")
        self._told = replace(self._told, names_hold=names_hold)
        self.view = build(self._told, self._names, self._parts)
        self._tell_unknown(self.view.unknown_devices)

    def _tell_unknown(self, devices: frozenset[str]) -> None:
        """Once for each, and not without end; before the driver has told of a GPU all are unknown."""
        if not self._names.has_gpus:
            return
        for device in sorted(devices - self._unknown_told):
            if len(self._unknown_told) < _MAX_TOLD:
                self._unknown_told.add(device)
                log.warning("a container holds %s, which is none of the GPUs here as far as anybody tells", device)

    # Without it

    def _set_state(self, part: Part, state: State, reason: str) -> None:
        with self._lock:
            before = self._parts[part]
            self._parts[part] = replace(before, state=state, reason=reason)
            self.view = replace(self.view, parts=dict(self._parts))
        if (before.state, before.reason) != (state, reason):
            self._on_state(part, state, reason)


class _ApiThread:
    """Runs the watch in an event loop of its own."""

    def __init__(self, settings: ApiSettings, source: KubernetesSource) -> None:
        self._settings = settings
        self._source = source
        self._loop: asyncio.AbstractEventLoop | None = None
        self._main: asyncio.Task[None] | None = None
        self._watch: ApiWatch | None = None
        self._lock = threading.Lock()
        self._is_stopping = False
        self._wants_slices = False
        self._thread = threading.Thread(target=self._run, name="apiserver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._is_stopping = True
            if self._loop is not None and self._main is not None:
                self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(_STOP_S)

    def want_slices(self) -> None:
        with self._lock:
            self._wants_slices = True  # also for a loop that has yet to begin
            if self._loop is not None and self._watch is not None:
                self._loop.call_soon_threadsafe(self._watch.want_slices)

    def _run(self) -> None:
        try:
            asyncio.run(self._follow())
        except asyncio.CancelledError:
            pass
        except Exception as error:
            log.exception("the API server is no longer asked, by an unexpected error")
            self._source.take_state("failed", type(error).__name__)

    async def _follow(self) -> None:
        watch = ApiWatch(self._settings, self._source)
        with self._lock:
            if self._is_stopping:
                return
            self._loop, self._main, self._watch = asyncio.get_running_loop(), asyncio.current_task(), watch
            if self._wants_slices:
                watch.want_slices()
        try:
            await watch.run()
        finally:
            with self._lock:
                self._loop = self._main = self._watch = None
