"""One running exporter: start, reload, stop, and the end after access to the GPUs was lost."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_hpc_exporter import exporter as exporter_module
from gpu_hpc_exporter.config import DEFAULT_RECORDING, Config, ConfigError, load_config
from gpu_hpc_exporter.exporter import LOST_STATUS, Exporter, HardwareSource, Outcome, ReplaySource
from gpu_hpc_exporter.model import Event, Readings, Window
from gpu_hpc_exporter.samplers.fleet import Fleet
from gpu_hpc_exporter.sources.replay import Recording
from unit.objects import G0, NS, Clock, inventory, readings, state, window

SPEED = 1000.0


@pytest.fixture(scope="module")
def recording() -> Recording:
    """Ten seconds in which one GPU works more from second to second, and its energy grows."""
    events: list[Event] = [inventory(G0, at=0), state("nvml", "", "active", at=0)]
    for second in range(1, 11):
        events.append(readings(second, {"energy_joules": 1e6 + 100 * second}))
        events.append(window(second, {"sm_active": second / 10}))
    return replace(Recording.load(DEFAULT_RECORDING), events=tuple(events), duration_ns=10 * NS)


class HandFed:
    """A source whose events a test puts, on a clock that a test sets; told how often it was started."""

    def __init__(self, problem: str = "") -> None:
        self.clock = Clock(10)
        self.started: list[Config] = []
        self.is_running = False
        self._problem = problem
        self.until = ""
        self.requests: list[str] = []
        self._busy = threading.Lock()

    def fleet(self, config: Config) -> Fleet:
        """A fleet of one GPU."""
        self.fed = Fleet(self.clock, round(config.gauge_window_seconds * NS), config.expected_gpus)
        return self.fed

    def start(self, config: Config) -> None:
        """Note with which settings."""
        assert not self.is_running
        self.started.append(config)
        self.is_running = True

    def apply(self, config: Config) -> str:
        """Begin anew for another interval, unless there is a problem."""
        intervals = [started.sampling_interval_ms for started in self.started[-1:]]
        if not self._problem and intervals not in ([], [config.sampling_interval_ms]):
            self.stop()
            self.start(config)
        return self._problem

    def pause(self, seconds: float) -> Outcome:
        """Note it, one at a time."""
        return self._note(f"pause {seconds:g}")

    def release(self, seconds: float) -> Outcome:
        """Note it, and be released until told otherwise."""
        self.until = "released until tomorrow"
        return self._note(f"release {seconds:g}")

    def resume(self) -> Outcome:
        """Note it."""
        self.until = ""
        return self._note("resume")

    def released(self) -> str:
        """Until when."""
        return self.until

    def _note(self, request: str) -> Outcome:
        assert self._busy.acquire(blocking=False), "two requests at a time"
        try:
            time.sleep(0.001)
            self.requests.append(request)
            return Outcome("failed" if self._problem else "done", self._problem or request)
        finally:
            self._busy.release()

    def stop(self) -> bool:
        """End."""
        self.is_running = False
        return True


class File:
    """A configuration file that is rewritten."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "config.yaml"
        self.write("")

    def write(self, text: str) -> None:
        """Replace the file."""
        self.path.write_text(text)

    def load(self) -> Config:
        """What the exporter reads."""
        return load_config(self.path)


@pytest.fixture
def file(tmp_path: Path) -> File:
    """A file without content."""
    return File(tmp_path)


@contextmanager
def started(exporter: Exporter) -> Iterator[Exporter]:
    """The exporter while it runs."""
    exporter.start()
    try:
        yield exporter
    finally:
        assert exporter.stop()


def reload(exporter: Exporter) -> str:
    """What a reload answers."""
    return asyncio.run(exporter.reload())


def test_a_bad_configuration_at_the_start_ends_it(file: File) -> None:
    """There is nothing to go on with: the mistake comes out."""
    file.write("sampling_interval_ms: 0")
    with pytest.raises(ConfigError, match="line 1"):
        Exporter(file.load, HandFed())


def test_a_good_reload_takes_effect(file: File) -> None:
    """Limit, expectation and time of loading are the new ones; sampling goes on without a break."""
    source = HandFed()
    exporter = Exporter(file.load, source)
    before = exporter.settings()
    with started(exporter):
        file.write("series_limit: 500\nexpected_gpus: 8")
        assert reload(exporter) == ""
        after = exporter.settings()
        assert (before.series_limit, after.series_limit, after.reload_succeeded) == (20_000, 500, True)
        assert after.loaded_at > before.loaded_at
        assert exporter.snapshot().expected == 8
        assert source.started == [Config()]


@pytest.mark.parametrize(
    ("text", "problem"), [("series_limit: 1", "series_limit"), ("\0", "config.yaml"), ("x: y", "unknown key `x`")]
)
def test_a_bad_reload_changes_nothing(file: File, caplog: pytest.LogCaptureFixture, text: str, problem: str) -> None:
    """The old settings stay, the answer and the log say why, the metric falls until a good reload."""
    file.write("series_limit: 500\nexpected_gpus: 8")
    source = HandFed()
    exporter = Exporter(file.load, source)
    before = exporter.settings()
    with started(exporter):
        for _ in range(2):
            file.write(text)
            assert problem in reload(exporter)
            assert exporter.settings() == replace(before, reload_succeeded=False)
            assert (exporter.snapshot().expected, len(source.started)) == (8, 1)
        assert caplog.text.count("the configuration stays as it was") == 2
        file.write("series_limit: 600")
        assert reload(exporter) == ""
        assert (exporter.settings().series_limit, exporter.settings().reload_succeeded) == (600, True)


def test_a_file_that_is_gone_is_a_bad_reload(file: File) -> None:
    """Deleting the file in force does not fall back to the defaults."""
    exporter = Exporter(file.load, HandFed())
    file.path.unlink()
    assert "No such file" in reload(exporter)
    assert not exporter.settings().reload_succeeded


def test_a_new_gauge_window_takes_effect(file: File) -> None:
    """Gauges are means over the new span from the next snapshot on."""
    source = HandFed()
    exporter = Exporter(file.load, source)
    source.fed.put(inventory(G0))
    for end in range(1, 11):
        source.fed.put(window(end, {"sm_active": float(end > 8)}))
    assert exporter.snapshot().gpus[0].gauges["sm_active"] == pytest.approx(0.2)
    file.write("gauge_window_seconds: 2")
    assert reload(exporter) == ""
    assert exporter.snapshot().gpus[0].gauges["sm_active"] == 1.0


@pytest.mark.parametrize(("interval", "times"), [(100, 1), (200, 2)])
def test_sampling_begins_anew_only_for_a_new_interval(file: File, interval: int, times: int) -> None:
    """Another interval needs other threads; anything else leaves them alone."""
    source = HandFed()
    exporter = Exporter(file.load, source)
    with started(exporter):
        file.write(f"sampling_interval_ms: {interval}\ngauge_window_seconds: 3")
        assert reload(exporter) == ""
        assert [c.sampling_interval_ms for c in source.started] == [100, interval][:times]
        assert source.is_running


def test_what_a_source_cannot_take_over_changes_nothing(file: File) -> None:
    """Where a driver call hangs, nothing is stopped, the old settings stay and the reload has failed."""
    source = HandFed("a driver call hangs")
    exporter = Exporter(file.load, source)
    exporter.start()
    before = exporter.settings()
    file.write("sampling_interval_ms: 200\nseries_limit: 500")
    assert reload(exporter) == "a driver call hangs"
    assert source.is_running
    assert exporter.settings() == replace(before, reload_succeeded=False)


def test_concurrent_reloads_come_one_after_the_other(file: File) -> None:
    """Forty reloads of good and bad files at once: each answers for what it read, and the source ends up running."""
    texts = [f"sampling_interval_ms: {100 + n}\nseries_limit: {100 + n}" if n % 4 else "nonsense: 1" for n in range(40)]
    left = iter(["", *texts])
    busy = threading.Lock()

    def load() -> Config:
        assert busy.acquire(blocking=False), "two reloads at a time"
        try:
            file.write(next(left))
            return file.load()
        finally:
            busy.release()

    source = HandFed()
    exporter = Exporter(load, source)

    async def reloads() -> list[str]:
        exporter.reload_soon()
        return await asyncio.gather(*(exporter.reload() for _ in range(39)))

    exporter.start()
    answers = asyncio.run(reloads())
    assert sum(bool(answer) for answer in answers) in (9, 10)  # the one in the background answers nobody
    assert exporter.settings().series_limit == 139
    assert (source.is_running, source.started[-1].sampling_interval_ms) == (True, 139)
    assert exporter.stop()


def test_control_comes_one_after_the_other(file: File, caplog: pytest.LogCaptureFixture) -> None:
    """Requests at the same time do not meet in the source; each is in the log with what came of it."""
    caplog.set_level(logging.INFO, logger="gpu_hpc_exporter.exporter")
    source = HandFed()
    exporter = Exporter(file.load, source)

    async def ask() -> list[Outcome]:
        return await asyncio.gather(*(exporter.pause(n) for n in range(1, 9)), exporter.release(5), exporter.resume())

    outcomes = asyncio.run(ask())
    assert [outcome.text for outcome in outcomes] == [*(f"pause {n}" for n in range(1, 9)), "release 5", "resume"]
    assert sorted(source.requests) == sorted(outcome.text for outcome in outcomes)
    assert "pause for 8 s: pause 8" in caplog.text


def test_control_that_failed_is_a_warning(file: File, caplog: pytest.LogCaptureFixture) -> None:
    """The reason is in the log too."""
    exporter = Exporter(file.load, HandFed("GPU 1 hangs"))
    assert asyncio.run(exporter.release(60)) == Outcome("failed", "GPU 1 hangs")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("WARNING", "release for 60 s: GPU 1 hangs")]


def test_control_while_a_reload_hangs(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for ever, and says why it did nothing."""
    monkeypatch.setattr(exporter_module, "_CONTROL_PATIENCE_S", 0.01)
    source = HandFed()
    go_on, loading, started = threading.Event(), threading.Event(), threading.Event()

    def load() -> Config:
        if started.is_set():
            loading.set()
            go_on.wait(60)
        return file.load()

    exporter = Exporter(load, source)
    started.set()

    async def ask() -> Outcome:
        reload = asyncio.create_task(exporter.reload())
        await asyncio.to_thread(loading.wait, 60)
        outcome = await exporter.pause(1)
        go_on.set()
        await reload
        return outcome

    assert asyncio.run(ask()).kind == "failed"
    assert source.requests == []


@pytest.mark.parametrize("action", ["pause", "release", "resume"])
def test_a_recording_has_nothing_to_pause(recording: Recording, action: str) -> None:
    """It is refused rather than ignored: whoever asks has the wrong exporter."""
    source = ReplaySource(recording, SPEED)
    outcome = source.resume() if action == "resume" else getattr(source, action)(60)
    assert outcome == Outcome("refused", "a recording is played: there is nothing to pause")
    assert source.released() == ""


class Sampler:
    """Stands in for both samplers of the hardware: notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, float, str]] = []
        self.problem = ""
        self.ends = True

    @property
    def sampler(self) -> Sampler:
        """Of the parts that jobs take."""
        return self

    @property
    def processes(self) -> Sampler:
        """Of whom nothing can be told."""
        return self

    can_tell = False

    @staticmethod
    def has_finer_windows(_: str) -> bool:
        """PM sampling's."""
        return False

    def pause(self, seconds: float, reason: str) -> bool:
        """PM sampling's."""
        self.told.append(("pause", round(seconds, 1), reason))
        return self.ends

    def release(self, seconds: float) -> None:
        """NVML's."""
        self.told.append(("release", round(seconds, 1), ""))

    def wait_until_closed(self, timeout: float) -> str:
        """NVML's."""
        assert 0 <= timeout <= 3
        return self.problem

    def resume(self) -> None:
        """Of both."""
        self.told.append(("resume", 0, ""))

    def start(self) -> None:
        """Of both."""


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """What device files are held, by whom; nothing at first."""
    files: dict[str, set[str]] = {"here": set(), "by_children": set()}
    monkeypatch.setattr(exporter_module, "held_here", lambda: files["here"])
    monkeypatch.setattr(exporter_module, "held_by_children", lambda: files["by_children"])
    return files


@pytest.fixture
def hardware(held: dict[str, set[str]], monkeypatch: pytest.MonkeyPatch) -> tuple[HardwareSource, Sampler]:
    """A source that was started with a stand-in for all its samplers."""
    assert not any(held.values())
    source, sampler = HardwareSource(Path("/nowhere"), Path("/nowhere"), Path("/nowhere")), Sampler()
    for name in ("KernelLogSampler", "NvmlSampler", "PmSampler", "JobParts"):
        monkeypatch.setattr(exporter_module, name, lambda *_, **__: sampler)
    source.fleet(Config())
    source.start(Config())
    return source, sampler


def test_a_pause_and_a_release_run_side_by_side(hardware: tuple[HardwareSource, Sampler]) -> None:
    """PM sampling rests until both are over, for the reason of the longer one; NVML knows of the release only."""
    source, sampler = hardware
    assert source.pause(600).kind == "done"
    assert source.released() == ""
    assert source.release(60).kind == "done"
    assert source.released().startswith("released until 2")
    assert source.release(30).kind == "done"  # ends no sooner than the one before it
    assert source.release(1200).kind == "done"
    assert sampler.told == [
        ("pause", 600, "paused on request"),
        ("release", 60, ""),
        ("pause", 600, "paused on request"),
        ("release", 60, ""),
        ("pause", 600, "paused on request"),
        ("release", 1200, ""),
        ("pause", 1200, "released"),
    ]
    sampler.told.clear()
    assert source.resume() == Outcome("done", "resumed")
    assert source.released() == ""
    assert source.resume() == Outcome("done", "nothing was paused or released")
    assert sampler.told == [("resume", 0, "")] * 4


def test_a_release_says_what_is_still_open(hardware: tuple[HardwareSource, Sampler], held: dict[str, set[str]]) -> None:
    """Neither a thread that hangs nor a file that stayed open is called released, though the release is in force."""
    source, sampler = hardware
    held["here"] = {"/dev/nvidia1", "/dev/nvidia0"}
    held["by_children"] = {"/dev/nvidia0 (process 7)"}
    outcome = source.release(60)
    assert outcome.kind == "failed"
    assert outcome.text.startswith("not released: /dev/nvidia0, /dev/nvidia0 (process 7), /dev/nvidia1 still open; ")
    sampler.problem = "GPU 1 (GPU-1) does not return from: power"
    assert source.release(60).text.startswith("not released: GPU 1 (GPU-1) does not return from: power; ")
    assert source.released()


def test_a_pause_minds_the_helper_only(hardware: tuple[HardwareSource, Sampler], held: dict[str, set[str]]) -> None:
    """What NVML has open does not keep a profiler from running; a helper that did not end does."""
    source, _ = hardware
    held["here"] = {"/dev/nvidia0"}
    assert source.pause(60).kind == "done"
    held["by_children"] = {"/dev/nvidia0 (process 7)"}
    outcome = source.pause(60)
    assert (outcome.kind, outcome.text[:74]) == (
        "failed",
        "the helper process has not ended: /dev/nvidia0 (process 7) still open; no ",
    )


def wait_for_windows(exporter: Exporter, count: int) -> int:
    """Wait until so many windows were played; how many there are."""
    beat = threading.Event()
    for _ in range(12_000):
        snapshot = exporter.snapshot()
        windows = sum(gpu.windows.get(("gpm", "valid"), 0) for gpu in snapshot.gpus)
        if windows >= count:
            return windows
        beat.wait(0.005)
    raise AssertionError(f"{windows} windows after a minute")


def test_a_replay_runs_until_it_is_stopped(file: File, recording: Recording) -> None:
    """It plays, loop after loop, is up and says that it is a replay; after the stop nothing plays."""
    exporter = Exporter(file.load, ReplaySource(recording, SPEED))
    with started(exporter):
        wait_for_windows(exporter, 15)
        assert exporter.snapshot().is_up
        assert exporter.snapshot().host_state("replay") is not None
    assert "replay" not in {thread.name for thread in threading.enumerate()}


def test_a_replay_goes_on_after_a_reload(file: File, recording: Recording) -> None:
    """Reloads with and without another interval keep the totals, and windows keep coming."""
    exporter = Exporter(file.load, ReplaySource(recording, SPEED))
    with started(exporter):
        for text in ("gauge_window_seconds: 5", "sampling_interval_ms: 200", "sampling_interval_ms: 100", "bad"):
            before = wait_for_windows(exporter, 1)
            file.write(text)
            assert bool(reload(exporter)) == (text == "bad")
            assert wait_for_windows(exporter, before + 12) > before


def test_b03_no_counter_goes_back_at_a_reload(file: File, recording: Recording) -> None:
    """B03: what the driver counts goes on over a reload, as it does over a loop."""
    source = Overheard(recording, SPEED)
    exporter = Exporter(file.load, source)
    with started(exporter):
        wait_for_windows(exporter, 25)
        file.write("sampling_interval_ms: 200")
        assert reload(exporter) == ""
        wait_for_windows(exporter, wait_for_windows(exporter, 1) + 2)
    assert source.energies == sorted(source.energies)


class Overheard(ReplaySource):
    """A replay that notes every energy it plays, also those between two snapshots."""

    def fleet(self, config: Config) -> Fleet:
        """The fleet, with an ear at its door."""
        fleet = super().fleet(config)
        self.energies: list[float] = []
        put = fleet.put

        def overhear(event: Event) -> None:
            if isinstance(event, Readings):
                self.energies.append(event.values["energy_joules"])
            put(event)

        fleet.put = overhear  # type: ignore[method-assign]  # it only looks on
        return fleet


def run_guard(source: HandFed, file: File, events: list[list[Event]], monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Exit status after these events, one batch a check of the guard; None if it did not end."""
    monkeypatch.setattr("gpu_hpc_exporter.exporter._LOST_CHECK_S", 0)
    exporter = Exporter(file.load, source)

    async def guarded() -> int | None:
        stop = asyncio.Event()
        guard = asyncio.create_task(exporter.stop_when_lost(stop))
        for batch in events:
            for event in batch:
                source.fed.put(event)
            for _ in range(20):
                await asyncio.sleep(0)
        ended = guard.done()
        guard.cancel()
        assert stop.is_set() == ended
        return exporter.exit_status if ended else None

    return asyncio.run(guarded())


UP: list[Event] = [inventory(G0), state("nvml", "", "active")]
DOWN: list[Event] = [state("nvml", "", "failed")]
GPU_LOST: list[Event] = [state("nvml", G0.uuid, "lost")]


@pytest.mark.parametrize(
    ("text", "events", "status"),
    [
        ("exit_after_lost_minutes: 1e-9", [UP, DOWN], LOST_STATUS),
        ("exit_after_lost_minutes: 1e-9", [UP, GPU_LOST], LOST_STATUS),
        ("exit_after_lost_minutes: 1e-9", [UP, [inventory()]], LOST_STATUS),
        ("exit_after_lost_minutes: 1e-9", [UP], None),
        ("exit_after_lost_minutes: 1e-9", [DOWN], None),  # a node that never had a GPU
        ("exit_after_lost_minutes: 1e-9", [[]], None),
        ("exit_after_lost_minutes: 60", [UP, DOWN], None),
        ("exit_after_lost_minutes: 60", [UP, DOWN, UP, DOWN], None),
        ("", [UP, DOWN], None),
    ],
)
def test_a02_the_end_after_access_was_lost(
    file: File, monkeypatch: pytest.MonkeyPatch, text: str, events: list[list[Event]], status: int | None
) -> None:
    """A02: only where configured, only after GPUs could be read, and only when none can for so long."""
    file.write(text)
    assert run_guard(HandFed(), file, events, monkeypatch) == status


def test_a_release_is_no_loss(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver that was closed on request does not end the exporter, however long that is."""
    file.write("exit_after_lost_minutes: 1e-9")
    source = HandFed()
    source.until = "released until tomorrow"
    assert run_guard(source, file, [UP, DOWN], monkeypatch) is None


def test_the_recording_has_windows(recording: Recording) -> None:
    """The tests above rest on one window a second."""
    assert sum(isinstance(event, Window) for event in recording.events) == 10


def test_a_reload_that_breaks_is_told_too(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody foresaw is an answer and a series like any other refusal, not a 500 without a reason."""
    source = HandFed()
    exporter = Exporter(file.load, source)
    with started(exporter):
        monkeypatch.setattr(source, "apply", lambda _: [].pop())
        assert reload(exporter) == "internal error: IndexError('pop from empty list')"
        assert not exporter.settings().reload_succeeded


def test_a_helper_that_cannot_be_ended_is_told(hardware: tuple[HardwareSource, Sampler]) -> None:
    """Though it holds no file of ours any more, nobody is told that the counters are free."""
    source, sampler = hardware
    sampler.ends = False
    assert source.pause(60).kind == "failed"
    assert "cannot be ended" in source.pause(60).text
    assert "cannot be ended" in source.release(60).text
