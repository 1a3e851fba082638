"""Samples every GPU through NVML: one owner thread per GPU, and one for the library.

The library's owner opens NVML, lists the GPUs and starts their owners. When a GPU came, went, was lost or
re-partitioned it stops them, opens NVML anew and starts again; totals are kept by UUID and know nothing of
it. A thread that is stuck in the driver is abandoned and named: its GPU is not asked by anybody else until it
returns, and the other GPUs go on.

Released, it has nothing of the driver open, so that a GPU can be reset, unbound or re-partitioned.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gpu_hpc_exporter.model import DriverError, Gpu, Inventory, Sink, State, StateChange, XidError
from gpu_hpc_exporter.samplers.gpu_owner import GpuOwner, Pace
from gpu_hpc_exporter.samplers.lister import GpuLister, Listing
from gpu_hpc_exporter.samplers.watch import LIBRARY_DEADLINE_NS, CallWatch, CallWatches
from gpu_hpc_exporter.sources.nvml.events import XidEvents
from gpu_hpc_exporter.sources.nvml.gpm import FLOOR_NS
from gpu_hpc_exporter.sources.nvml.inventory import HUNG, Device, take_fingerprint
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
RELEASED: Final = "released"
"""Why nothing is read while the driver is closed on request."""
_RELEASE_RETRY_S: Final = 0.2


class NvmlSampler:
    """Feeds a sink from NVML until stopped. A missing or broken driver is a state, never an exception."""

    def __init__(self, sink: Sink, pace: Pace, driver_root: Path, watches: CallWatches) -> None:
        """`watches` tells others which driver calls are under way."""
        self._sink = sink
        self._driver_root = driver_root
        self._pace = replace(pace, interval_ns=_above_floor(pace.interval_ns))
        self._release_lock = threading.Lock()
        self._released_until_s = 0.0
        self._is_closed = threading.Event()
        self._openings = 0
        self._watches = watches
        self._library_watch = watches.watch("", deadline_ns=LIBRARY_DEADLINE_NS)
        self._shutdown_watch = watches.watch("")
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._list_anew = threading.Event()
        self._lister = GpuLister(watches, self._list_again)
        self._abandoned: list[_Owned] = []
        self._events: threading.Thread | None = None
        self._lost_retry_s = _MAX_BACKOFF_S
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def start(self) -> None:
        """Begin sampling in the background."""
        self._thread.start()

    def change_interval(self, interval_ns: int) -> None:
        """Sample at another interval, in a new session. A GPU whose thread is stuck keeps out of it."""
        interval_ns = _above_floor(interval_ns)
        if interval_ns != self._pace.interval_ns:
            self._pace = replace(self._pace, interval_ns=interval_ns)
            self._list_again()

    def release(self, seconds: float) -> None:
        """Close the driver, for so long or until a release before this one ends; answers at once."""
        with self._release_lock:
            self._released_until_s = max(self._released_until_s, time.monotonic() + seconds)
        self._wake.set()

    def wait_until_closed(self, timeout: float) -> str:
        """Wait until nothing of the driver is open; if that does not come in time, who keeps it open."""
        return "" if self._is_closed.wait(timeout) else self._holder()

    def resume(self) -> None:
        """Open the driver again; answers at once."""
        with self._release_lock:
            self._released_until_s = 0.0
        self._wake.set()

    def stop(self) -> bool:
        """End sampling within about a second; False where a thread is stuck in the driver and stays."""
        self._stop.set()
        self._wake.set()
        self._thread.join(_JOIN_S + 0.3)
        return not self._thread.is_alive() and not self._abandoned

    def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        last_reason = ""
        while not self._stop.is_set():
            if self._is_released():
                self._stay_released()
                backoff, last_reason = _FIRST_BACKOFF_S, ""
                continue
            began = time.monotonic()
            try:
                self._begin_call("nvmlInit")
                open_library(self._driver_root)
                self._openings += 1
                session = self._open_session()
            except DriverUnavailableError as error:
                self._down(error.reason, str(error), last_reason)
                last_reason = error.reason
            except DriverCallError as error:
                self._take_back_opening()
                self._sink.put(DriverError(time.monotonic_ns(), error.name))
                self._down(error.name, f"the GPUs cannot be listed ({error.name})", last_reason)
                last_reason = error.name
            except Exception:
                log.exception("sampling ended by an unexpected error: beginning anew")
                self._take_back_opening()
                self._state("failed", "internal_error")
                last_reason = "internal_error"
            else:
                if last_reason:
                    log.info("the driver can be read again")
                last_reason = ""
                self._supervise(session)
                if self._end(session):
                    backoff = _FIRST_BACKOFF_S
                    continue
            self._library_watch.current = None
            if time.monotonic() - began > _MAX_BACKOFF_S:
                backoff = _FIRST_BACKOFF_S
            self._rest(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_S)

    def _rest(self, seconds: float) -> None:
        """Wait before the driver is opened again; a stop or a release ends it."""
        self._wake.clear()
        if not (self._stop.is_set() or self._is_released()):
            self._wake.wait(seconds)

    def _is_released(self) -> bool:
        return time.monotonic() < self._released_until_s

    def _stay_released(self) -> None:
        """Keep the driver closed until the time is over, a resume or a stop.

        Where a thread is stuck in the driver, that is done when it returns.
        """
        self._library_watch.current = None
        self._state("paused", RELEASED)
        log.info("released: the driver is closed")
        while not self._stop.is_set():
            for freed in self._forget_freed():
                freed.owner.tell_paused(RELEASED)
            if not (self._is_closed.is_set() or self._is_in_driver() or self._lister.stuck):
                self._close()
                self._is_closed.set()
            with self._release_lock:
                left = self._released_until_s - time.monotonic()
                if left <= 0:
                    self._is_closed.clear()
                    break
            self._wake.wait(left if self._is_closed.is_set() else min(left, _RELEASE_RETRY_S))
            self._wake.clear()
        log.info("the release has ended: the driver is opened again")

    def _holder(self) -> str:
        """Who keeps the driver open: the threads that do not return from it, by GPU and call."""
        stuck = [(owned.owner.label, owned.watch.current) for owned in list(self._abandoned)]
        calls = [f"{gpu} does not return from: {call[0] if call else 'its last call'}" for gpu, call in stuck]
        calls += [f"GPU {index} does not answer while it is listed" for index in sorted(self._lister.stuck)]
        for watch in (self._library_watch, self._shutdown_watch):
            if watch.current is not None:
                calls.append(f"the driver does not return from: {watch.current[0]}")
        if not calls and self._events is not None and self._events.is_alive():
            calls.append("the driver does not return from its Xid events")
        return "; ".join(calls) or "the threads in the driver have not ended yet"

    def _is_in_driver(self) -> bool:
        """Whether a thread of an ended session is still in the driver."""
        return bool(self._abandoned) or (self._events is not None and self._events.is_alive())

    def _close(self) -> None:
        """Take back every opening, those too that were left beside a thread stuck in the driver."""
        while self._openings:
            self._take_back_opening()

    def _take_back_opening(self) -> None:
        if self._openings:
            self._openings -= 1
            self._shutdown_watch.current = ("nvmlShutdown", time.monotonic_ns())
            close_library()
            self._shutdown_watch.current = None

    def _open_session(self) -> _Session:
        self._begin_call("list GPUs")
        self._list_anew.clear()
        listing = self._lister.list_devices(self._stuck_owners())
        self._sink.put(Inventory(time.monotonic_ns(), _rows(listing.devices), driver_versions(), listing.counted))
        if listing.refusal:  # as in a container without its device files: the library opens, counts and reads nothing
            self._take_back_opening()
            raise DriverUnavailableError(listing.refusal)
        self._state("active", "")
        if not listing.counted:
            log.warning("the driver is up and shows no GPU")
        session = _Session(self._sink, self._pace, self._watches, self._wake, listing)
        if self._events is None or not self._events.is_alive():
            arguments = (listing.devices, session.stopped)
            self._events = threading.Thread(target=self._follow_events, args=arguments, name="nvml-events", daemon=True)
            self._events.start()
        return session

    def _list_again(self) -> None:
        self._list_anew.set()
        self._wake.set()

    def _supervise(self, session: _Session) -> None:
        """Sleep until the session has to end: a stop, other GPUs, all lost, or time to look for a lost one."""
        self._library_watch.current = None
        retry_at = time.monotonic() + self._lost_retry_s
        while not self._stop.is_set():
            self._wake.wait(CHECK_PERIOD_S)
            self._wake.clear()
            if self._stop.is_set() or self._is_released() or session.is_over or self._list_anew.is_set():
                return
            if self._has_changed(session):
                log.info("the GPUs have changed: listing them anew")
                return
            if session.lacks_some and time.monotonic() >= retry_at:
                self._lost_retry_s = min(2 * self._lost_retry_s, _MAX_LOST_RETRY_S)
                return
            if not session.lacks_some:
                self._lost_retry_s = _MAX_BACKOFF_S

    def _has_changed(self, session: _Session) -> bool:
        """Whether there are other GPUs than the session's. One behind a hung call is not asked: it is unchanged."""
        freed = self._forget_freed()
        hung = session.hung(time.monotonic_ns()) | self._stuck_owners() | self._lister.stuck
        self._begin_call("list GPUs")
        try:
            now = take_fingerprint(hung)
        except DriverCallError:
            return True
        finally:
            self._library_watch.current = None
        before = session.listing.fingerprint
        same = len(now) == len(before) and all(n == b for n, b in zip(now, before, strict=True) if n != HUNG)
        return bool(freed) or not same

    def _forget_freed(self) -> list[_Owned]:
        """The abandoned threads that have returned from the driver after all and ended."""
        freed = [owned for owned in self._abandoned if owned.owner.ticker.ended]
        for owned in freed:
            self._abandoned.remove(owned)
            self._watches.drop(owned.watch)
        return freed

    def _stuck_owners(self) -> frozenset[int]:
        return frozenset(owned.owner.index for owned in self._abandoned if not owned.owner.ticker.ended)

    def _end(self, session: _Session) -> bool:
        """Stop the session; whether to open the next one at once rather than after a pause."""
        is_released = self._is_released()
        every_gpu_lost = session.is_over and not self._stop.is_set() and not is_released
        self._lister.expect(session.lost())
        self._abandoned += session.stop()
        if self._events is not None:
            self._events.join(_JOIN_S)
        if not self._is_in_driver():
            self._close()
        if is_released:
            session.tell_paused(RELEASED)
        if every_gpu_lost:
            log.error("access to every GPU is lost (%s): opening the driver anew", session.reason)
            self._state("failed", session.reason)
        return not every_gpu_lost

    def _follow_events(self, devices: tuple[Device, ...], stopped: threading.Event) -> None:
        """Count Xids until the session ends. In a thread of its own: what hangs here costs no samples."""
        watch = self._watches.watch("")
        try:
            watch.current = ("nvmlEventSetCreate", time.monotonic_ns())
            events = XidEvents(devices)
            while True:
                watch.current = None
                if stopped.wait(_EVENT_PERIOD_S):
                    break
                watch.current = ("nvmlEventSetWait", time.monotonic_ns())
                self._take_events(events)
            watch.current = ("nvmlEventSetFree", time.monotonic_ns())
            events.close()
        except DriverCallError as error:
            log.info("the driver offers no Xid events (%s)", error.name)
        finally:
            self._watches.drop(watch)

    def _take_events(self, events: XidEvents) -> None:
        try:
            for uuid, xid in events.take():
                log.warning("Xid %d on %s", xid, uuid)
                self._sink.put(XidError(time.monotonic_ns(), xid, "nvml", uuid=uuid))
        except DriverCallError as error:
            self._sink.put(DriverError(time.monotonic_ns(), error.name))

    def _down(self, reason: str, message: str, last_reason: str) -> None:
        if reason != last_reason:
            log.error("no GPU can be read, trying again up to every %d s: %s", _MAX_BACKOFF_S, message)
        self._state("failed", reason)

    def _begin_call(self, call: str) -> None:
        self._library_watch.current = (call, time.monotonic_ns())

    def _state(self, state: State, reason: str) -> None:
        self._sink.put(StateChange(time.monotonic_ns(), "nvml", "", state, reason))


@dataclass(frozen=True, slots=True)
class _Owned:
    owner: GpuOwner
    watch: CallWatch


class _Session:
    """The owners of all GPUs between one opening of the library and the next."""

    def __init__(self, sink: Sink, pace: Pace, watches: CallWatches, wake: threading.Event, listing: Listing) -> None:
        self.listing = listing
        self.stopped = threading.Event()
        self._watches = watches
        self._owned: list[_Owned] = []
        for device in listing.devices:
            watch = watches.watch(device.gpu.uuid, *(instance.gpu.uuid for instance in device.instances))
            owner = GpuOwner(device, sink, pace, watch, wake.set)
            self._owned.append(_Owned(owner, watch))
            owner.ticker.start()

    @property
    def is_over(self) -> bool:
        """Whether every GPU of the session is lost."""
        return bool(self._owned) and all(owned.owner.ticker.ended for owned in self._owned)

    @property
    def lacks_some(self) -> bool:
        """Whether a GPU that the driver counts cannot be read."""
        return len(self._owned) < self.listing.counted or any(owned.owner.ticker.ended for owned in self._owned)

    def hung(self, now_ns: int) -> frozenset[int]:
        """Indices of the GPUs of which a call does not return."""
        return frozenset(owned.owner.index for owned in self._owned if owned.watch.hung(now_ns))

    def lost(self) -> dict[int, str]:
        """Index and reason of the GPUs that were lost in this session."""
        return {owned.owner.index: owned.owner.lost_reason for owned in self._owned if owned.owner.lost_reason}

    @property
    def reason(self) -> str:
        """Why the session's GPUs were lost."""
        return next(iter(self.lost().values()), "access_lost")

    def tell_paused(self, reason: str) -> None:
        """Say that the GPUs whose threads have ended are not read for now."""
        for owned in self._owned:
            if owned.owner.ticker.ended:
                owned.owner.tell_paused(reason)

    def stop(self) -> list[_Owned]:
        """End all owners; those that are stuck in the driver are the answer, and must not be joined or replaced."""
        self.stopped.set()
        for owned in self._owned:
            owned.owner.ticker.stop()
        deadline = time.monotonic() + _JOIN_S
        stuck = [o for o in self._owned if not o.owner.ticker.join(max(0.0, deadline - time.monotonic()))]
        for owned in self._owned:
            if owned not in stuck:
                self._watches.drop(owned.watch)
        return stuck


def _above_floor(interval_ns: int) -> int:
    if interval_ns < FLOOR_NS:
        floor_ms = FLOOR_NS // 1_000_000
        log.info("sampling_interval_ms %g is below GPM's floor: its windows are %d ms", interval_ns / 1e6, floor_ms)
    return max(interval_ns, FLOOR_NS)


def _rows(devices: tuple[Device, ...]) -> tuple[Gpu, ...]:
    rows: list[Gpu] = []
    for device in devices:
        rows.append(device.gpu)
        rows.extend(instance.gpu for instance in device.instances)
    return tuple(rows)
