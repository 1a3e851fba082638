"""Samples every GPU through NVML: one owner thread per GPU, and one for the library.

The library's owner opens NVML, lists the GPUs and starts their owners. When a GPU came, went, was lost or
re-partitioned it stops them, opens NVML anew and starts again; totals are kept by UUID and know nothing of
it. While a call hangs in the driver nothing is stopped: the other GPUs go on, and nobody joins the stuck thread.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.model import DriverError, Gpu, Inventory, Sink, State, StateChange, XidError
from gpu_hpc_exporter.samplers.gpu_owner import GpuOwner
from gpu_hpc_exporter.samplers.lister import GpuLister, Listing
from gpu_hpc_exporter.samplers.watch import LIBRARY_DEADLINE_NS, CallWatch, CallWatches
from gpu_hpc_exporter.sources.nvml.events import XidEvents
from gpu_hpc_exporter.sources.nvml.gpm import FLOOR_NS
from gpu_hpc_exporter.sources.nvml.inventory import Device, take_fingerprint
from gpu_hpc_exporter.sources.nvml.library import (
    DriverCallError,
    DriverUnavailableError,
    close_library,
    driver_versions,
    open_library,
)

log = logging.getLogger(__name__)

_FIRST_BACKOFF_S: Final = 1.0
_MAX_BACKOFF_S: Final = 60.0
CHECK_PERIOD_S: Final = 10.0
"""How often the library's owner looks whether the GPUs are still the same."""
_MAX_LOST_RETRY_S: Final = 600.0
_JOIN_S: Final = 1.2
_EVENT_PERIOD_S: Final = 2.0


class NvmlSampler:
    """Feeds a sink from NVML until stopped. A missing or broken driver is a state, never an exception."""

    def __init__(self, sink: Sink, interval_ns: int, driver_root: Path, watches: CallWatches) -> None:
        """`watches` tells others which driver calls are under way."""
        self._sink = sink
        self._driver_root = driver_root
        self._interval_ns = max(interval_ns, FLOOR_NS)
        if interval_ns < FLOOR_NS:
            log.warning(
                "sampling_interval_ms %g is below GPM's floor: it samples every %d ms",
                interval_ns / 1e6,
                FLOOR_NS // 1_000_000,
            )
        self._watches = watches
        self._library_watch = watches.watch("", deadline_ns=LIBRARY_DEADLINE_NS)
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._lost_retry_s = _MAX_BACKOFF_S
        self._late = threading.Event()
        self._lister = GpuLister(watches, self._list_again)
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def start(self) -> None:
        """Begin sampling in the background."""
        self._thread.start()

    def stop(self) -> bool:
        """End sampling within about a second; False where a thread is stuck in the driver and stays."""
        self._stop.set()
        self._wake.set()
        self._thread.join(_JOIN_S + 0.3)
        if not self._thread.is_alive():
            self._watches.drop(self._library_watch)
        return not self._thread.is_alive() and not self._watches.hung(time.monotonic_ns())

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        last_reason = ""
        while not self._stop.is_set():
            try:
                self._begin_call("nvmlInit")
                open_library(self._driver_root)
                session = _Session(self._sink, self._interval_ns, self._watches, self._wake, self._list())
            except DriverUnavailableError as error:
                self._down(error.reason, str(error), last_reason)
                last_reason = error.reason
            except DriverCallError as error:
                close_library()
                self._sink.put(DriverError(time.monotonic_ns(), error.name))
                self._down(error.name, f"the GPUs cannot be listed ({error.name})", last_reason)
                last_reason = error.name
            except Exception:
                log.exception("sampling ended by an unexpected error: beginning anew")
                close_library()
                self._state("failed", "internal_error")
                last_reason = "internal_error"
            else:
                if last_reason:
                    log.info("the driver can be read again")
                last_reason, backoff = "", _FIRST_BACKOFF_S
                self._supervise(session)
                if self._end(session):
                    continue
            self._library_watch.current = None
            self._stop.wait(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    def _list(self) -> Listing:
        self._begin_call("list GPUs")
        self._late.clear()
        listing = self._lister.list_devices()
        self._sink.put(Inventory(time.monotonic_ns(), _rows(listing.devices), driver_versions(), listing.counted))
        self._state("active", "")
        if not listing.counted:
            log.warning("the driver is up and shows no GPU")
        return listing

    def _list_again(self) -> None:
        self._late.set()
        self._wake.set()

    def _supervise(self, session: _Session) -> None:
        """Sleep until the session has to end: a stop, other GPUs, all lost, or time to look for a lost one."""
        self._library_watch.current = None
        retry_at = time.monotonic() + self._lost_retry_s
        while not self._stop.is_set():
            self._wake.wait(CHECK_PERIOD_S)
            self._wake.clear()
            if self._stop.is_set() or session.is_over:
                return
            if self._late.is_set():
                return
            if self._watches.hung(time.monotonic_ns()):
                continue
            if self._has_changed(session.listing):
                log.info("the GPUs have changed: listing them anew")
                return
            if session.lacks_some and time.monotonic() >= retry_at:
                self._lost_retry_s = min(2 * self._lost_retry_s, _MAX_LOST_RETRY_S)
                return
            if not session.lacks_some:
                self._lost_retry_s = _MAX_BACKOFF_S

    def _has_changed(self, listing: Listing) -> bool:
        self._begin_call("list GPUs")
        try:
            return take_fingerprint() != listing.fingerprint
        except DriverCallError:
            return True
        finally:
            self._library_watch.current = None

    def _end(self, session: _Session) -> bool:
        """Stop the session; whether to open the next one at once rather than after a pause."""
        every_gpu_lost = session.is_over and not self._stop.is_set()
        self._lister.expect(session.lost())
        if session.stop():
            self._begin_call("nvmlShutdown")
            close_library()
            self._library_watch.current = None
        if every_gpu_lost:
            log.error("access to every GPU is lost (%s): opening the driver anew", session.reason)
            self._state("failed", session.reason)
        return not every_gpu_lost

    def _down(self, reason: str, message: str, last_reason: str) -> None:
        if reason != last_reason:
            log.error("no GPU can be read, trying again up to every %d s: %s", _MAX_BACKOFF_S, message)
        self._state("failed", reason)

    def _begin_call(self, call: str) -> None:
        self._library_watch.current = (call, time.monotonic_ns())

    def _state(self, state: State, reason: str) -> None:
        self._sink.put(StateChange(time.monotonic_ns(), "nvml", "", state, reason))


class _Session:
    """The threads that live between one opening of the library and the next."""

    def __init__(
        self, sink: Sink, interval_ns: int, watches: CallWatches, wake: threading.Event, listing: Listing
    ) -> None:
        self.listing = listing
        self._sink = sink
        self._watches = watches
        self._stop = threading.Event()
        self._owners: list[tuple[GpuOwner, CallWatch]] = []
        for device in listing.devices:
            watch = watches.watch(device.gpu.uuid, *(instance.gpu.uuid for instance in device.instances))
            owner = GpuOwner(device, sink, interval_ns, watch, wake.set)
            self._owners.append((owner, watch))
            owner.ticker.start()
        self._events = threading.Thread(target=self._follow_events, name="nvml-events", daemon=True)
        self._events.start()

    @property
    def is_over(self) -> bool:
        """Whether every GPU of the session is lost."""
        return bool(self._owners) and all(owner.ticker.ended for owner, _ in self._owners)

    @property
    def lacks_some(self) -> bool:
        """Whether a GPU that the driver counts cannot be read."""
        return len(self._owners) < self.listing.counted or any(owner.ticker.ended for owner, _ in self._owners)

    def lost(self) -> dict[int, str]:
        """Index and reason of the GPUs that were lost in this session."""
        return {owner.index: owner.lost_reason for owner, _ in self._owners if owner.lost_reason}

    @property
    def reason(self) -> str:
        """Why the session's GPUs were lost."""
        return next((owner.lost_reason for owner, _ in self._owners if owner.lost_reason), "access_lost")

    def stop(self) -> bool:
        """End all threads; False where one is stuck in the driver, so that the library must stay open."""
        self._stop.set()
        for owner, _ in self._owners:
            owner.ticker.stop()
        deadline = time.monotonic() + _JOIN_S
        stuck = [owner for owner, _ in self._owners if not owner.ticker.join(max(0.0, deadline - time.monotonic()))]
        self._events.join(max(0.0, deadline - time.monotonic()))
        for owner, watch in self._owners:
            if owner not in stuck:
                owner.close()
                self._watches.drop(watch)
        return not stuck and not self._events.is_alive()

    def _follow_events(self) -> None:
        try:
            events = XidEvents(self.listing.devices)
        except DriverCallError as error:
            log.info("the driver offers no Xid events (%s)", error.name)
            return
        while not self._stop.wait(_EVENT_PERIOD_S):
            try:
                for uuid, xid in events.take():
                    log.warning("Xid %d on %s", xid, uuid)
                    self._sink.put(XidError(time.monotonic_ns(), xid, "nvml", uuid=uuid))
            except DriverCallError as error:
                self._sink.put(DriverError(time.monotonic_ns(), error.name))
        events.close()


def _rows(devices: tuple[Device, ...]) -> tuple[Gpu, ...]:
    rows: list[Gpu] = []
    for device in devices:
        rows.append(device.gpu)
        rows.extend(instance.gpu for instance in device.instances)
    return tuple(rows)
