"""The live page in a real Chromium, served by the real exporter."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chromium import Chromium, Tab, run_chromium
from e2e.machine import Start, uuid_of
from exporter_process import Exporter, free_port, run_exporter
from gpu_hpc_exporter.config import DEFAULT_RECORDING
from web_files import basic, make_site, with_users

FIRST_PAINT_MS = 1000
CAUSES = {
    "idle",
    "compute_bound",
    "dram_saturated",
    "pcie_saturated",
    "pageable_copies",
    "small_copy_storm",
    "launch_bound",
    "mixed",
}
"""What the recorded workloads suffer from; tests/unit/test_verdict.py has which suffers from what."""
HOSTILE = "<img src=x onerror=\"document.title='taken'\"></td><script>document.title='taken'</script>"
HAS_WINDOWS = "document.querySelector('.legend li') !== null"
TIP = "document.querySelector('.tip')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    """One browser for all tests."""
    with run_chromium() as running:
        yield running


@pytest.fixture
def tab(browser: Chromium) -> Iterator[Tab]:
    """A page on which nothing may fail: no error of a script, nothing that the policy refuses."""
    opened = browser.tab()
    opened.size(1280, 1000)
    yield opened
    opened.call("Page.navigate", url="about:blank")


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exporter]:
    """The recording at ten times its speed."""
    with run_exporter(tmp_path_factory.mktemp("live"), "--source=replay", "--replay.speed=10") as running:
        yield running


def test_every_workload_gets_its_verdict(tab: Tab, replay: Exporter) -> None:
    """Over the recording the page names each cause, and nvidia-smi's 100 % beside the SMs' 0 % while copies run."""
    tab.open(replay.url)
    tab.wait_for(HAS_WINDOWS)
    seen: dict[str, str] = {}
    numbers: dict[str, set[str]] = {}
    deadline = time.monotonic() + 180
    look = "(c => [c.dataset.cause, c.querySelector('.sentence').textContent, c.querySelector('.numbers').textContent])"
    while not seen.keys() >= CAUSES or not any("says100 %SMs with work0 %" in n for n in numbers["pcie_saturated"]):
        assert time.monotonic() < deadline, f"not seen: {CAUSES - seen.keys()}; {numbers}"
        cause, sentence, shown = tab.evaluate(f"{look}(document.querySelector('.card'))")
        seen[cause] = sentence
        numbers.setdefault(cause, set()).add(shown)
    assert seen["pcie_saturated"].startswith("Host link saturated")
    assert tab.text("#banner").startswith(f"Playing the recording {DEFAULT_RECORDING.name}")
    assert tab.errors == []


def test_first_paint(browser: Chromium, replay: Exporter) -> None:
    """Something is to be seen within a second: the best of some visits, since other programs run beside."""
    times: list[float] = []
    while len(times) < 10 and min(times, default=FIRST_PAINT_MS) >= FIRST_PAINT_MS:
        tab = browser.tab()
        tab.open(replay.url)
        tab.wait_for("performance.getEntriesByName('first-contentful-paint').length")
        times.append(tab.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        tab.call("Page.navigate", url="about:blank")
    assert min(times) < FIRST_PAINT_MS


def test_kernels_copies_jobs_and_sources(tab: Tab, replay: Exporter) -> None:
    """All of them are shown in the course of the recording."""
    tab.open(replay.url)
    tab.wait_for("document.querySelector('.card .spark polyline')?.getAttribute('points').includes(' ')", 90)
    for head in ("Job", "Kernel, last minute", "Copies, last minute", "Source"):
        table = f"[...document.querySelectorAll('.card th')].find(h => h.textContent === '{head}').closest('table')"
        tab.wait_for(f"{table}.tBodies[0].rows.length", 90)
    tab.wait_for("document.querySelector('.chart canvas') !== null")
    assert tab.errors == []


def test_kernels_are_told_apart_by_job(tab: Tab, replay: Exporter) -> None:
    """Their job has a column where there are several, and only there; a launch latency that is missing says why."""
    tab.open(replay.url)
    alone, together, beside = tab.evaluate(KERNELS_OF_JOBS)
    assert alone == [["Kernel, last minute", "Kind"], ["k0", "gemm"], ["k1", "gemm"]]
    assert together == [["Kernel, last minute", "Job"], ["k0", "a"], ["k1", "b"]]
    assert beside == [["Kernel, last minute", "Job"], ["k0", "a"]]
    titles = tab.evaluate(
        "[...document.querySelectorAll('#made .latency')].map(cell => [cell.textContent, cell.title])"
    )
    assert titles[0] == ["2.0 µs", ""]
    assert titles[1][0] == "\N{EN DASH}"
    assert "no launch of it was traced lately" in titles[1][1]
    assert tab.errors == []


def test_keyboard(tab: Tab, replay: Exporter) -> None:
    """Tab reaches the heatmap; its cursor tells what was there; Enter shows a second, Escape all of it."""
    replay.wait_for(lambda samples: samples.one("gpu_hpc_observed_seconds_total") > 60)  # steps are of 6 s
    tab.open(replay.url)
    tab.wait_for(HAS_WINDOWS)
    for _ in range(30):
        tab.press("Tab")
        if tab.evaluate("document.activeElement.tagName") == "CANVAS":
            break
    assert tab.evaluate("document.activeElement.tagName") == "CANVAS"
    tab.press("End")
    tab.wait_for(f"!{TIP}.hidden")
    for _ in range(3):
        tab.press("ArrowLeft")
    tab.wait_for(f"{TIP}.textContent.includes('SM active')")
    tab.press("Enter")
    pressed = "document.querySelector('button[aria-pressed=true]').textContent"
    assert tab.evaluate(pressed) == "1 s"
    assert tab.evaluate("document.getElementById('live').getAttribute('aria-pressed')") == "false"
    shown = tab.text("#shown")
    tab.press("-")
    assert tab.text("#shown") != shown
    tab.press("Escape")
    assert tab.evaluate(pressed) == "10 min"
    assert tab.evaluate(f"{TIP}.hidden")
    assert tab.errors == []


def test_hostile_names_stay_text(tab: Tab, tmp_path: Path) -> None:
    """GPU, job and kernels are called as an attacker would: the page shows the names and does nothing that they say."""
    text = gzip.decompress(DEFAULT_RECORDING.read_bytes()).decode()
    for name in ("NVIDIA H200", "bert_finetune", "llama_pretrain", "vectorized_gather_kernel"):
        assert json.dumps(name) in text
        text = text.replace(json.dumps(name), json.dumps(HOSTILE + name))
    recording = tmp_path / "hostile.jsonl.gz"
    recording.write_bytes(gzip.compress(text.encode()))
    flags = ("--source=replay", f"--replay.file={recording}", "--replay.speed=20")
    with run_exporter(tmp_path, *flags) as exporter:
        tab.open(exporter.url)
        sentence = json.dumps(f"{HOSTILE}bert_finetune")
        tab.wait_for(f"document.querySelector('.sentence')?.textContent.includes({sentence})", 90)
        kernel = json.dumps(f"{HOSTILE}vectorized_gather_kernel")
        tab.wait_for(f"[...document.querySelectorAll('.card td')].some(cell => cell.textContent === {kernel})", 90)
        assert tab.text(".card h2 small") == f"{HOSTILE}NVIDIA H200"
        assert tab.evaluate("document.querySelectorAll('.card img, .card script').length") == 0
        assert tab.evaluate("document.title") == "gpu-hpc-exporter"
        assert tab.errors == []


def test_it_comes_back_after_a_restart(tab: Tab, tmp_path: Path) -> None:
    """While the exporter is away the page says so; then it goes on by itself, with what the new one knows."""
    port = free_port()
    flags = ("--source=replay", "--replay.speed=10", f"--web.listen-address=127.0.0.1:{port}")
    with run_exporter(tmp_path, *flags):
        tab.open(f"http://127.0.0.1:{port}/")
        tab.wait_for(HAS_WINDOWS)
        tab.wait_for("document.getElementById('connection').textContent === 'live'")
    tab.wait_for("document.getElementById('connection').classList.contains('away')")
    with run_exporter(tmp_path, *flags):
        tab.wait_for("document.getElementById('connection').textContent === 'live'")
        tab.wait_for(HAS_WINDOWS)


def test_users(tab: Tab, tmp_path: Path) -> None:
    """Behind a password everything works as without, also where the password stands in the address."""
    site = make_site(tmp_path, with_users(viewer="secret"))
    flags = ("--source=replay", "--replay.speed=10", site.flag)
    with run_exporter(tmp_path, *flags, authorization=basic("viewer", "secret")) as exporter:
        tab.open(exporter.url.replace("//", "//viewer:secret@"))
        tab.wait_for(HAS_WINDOWS)
        tab.wait_for("document.getElementById('connection').textContent === 'live'")
        assert tab.errors == []


def test_sixty_four_gpus(tab: Tab, start: Start) -> None:
    """Each has a tile and a card, and only those on the screen are asked for and drawn; a jump shows the last one."""
    machine = start("\n".join(f"device {n} sm 0.96 tensor 0.93 dram 0.17" for n in range(64)))
    machine.wait_until_observed(1, 0, 63)
    tab.open(machine.exporter.url)
    tab.wait_for("document.querySelectorAll('.card').length === 64")
    tab.wait_for(HAS_WINDOWS)
    asked = "performance.getEntriesByType('resource').filter(e => e.name.includes('history')).map(e => e.name)"
    assert 1 <= len(tab.evaluate(asked)) <= 16
    tab.evaluate("document.querySelectorAll('.tile')[63].click()")
    last = f"document.getElementById('gpu-{uuid_of(63)}')"
    tab.wait_for(f"{last}.querySelector('.legend li') !== null")
    assert "Compute-bound" in tab.evaluate(f"{last}.querySelector('.sentence').textContent")
    assert len(tab.evaluate(asked)) < 48
    assert tab.errors == []


def test_windows_come_with_each_frame(tab: Tab, start: Start) -> None:
    """While a page is open GPM's windows are not kept for a second: most frames bring some, and none is shown late."""
    machine = start("device 0 sm 0.96 tensor 0.93 dram 0.17")
    machine.wait_until_observed(2, 0)
    tab.open(machine.exporter.url)
    tab.wait_for(HAS_WINDOWS)
    frames = tab.evaluate(FRAMES)
    assert sum(count > 0 for count, _ in frames) > len(frames) / 2
    assert sorted(lag for _, lag in frames)[len(frames) // 2] < 0.5
    assert tab.errors == []


def test_a_machine_without_a_driver_is_told_what_to_do(tab: Tab, tmp_path: Path) -> None:
    """The page says why there is no GPU, and names the doctor."""
    with run_exporter(tmp_path, env={"LD_LIBRARY_PATH": ""}) as exporter:
        tab.open(exporter.url)
        tab.wait_for("document.getElementById('banner').textContent.includes('library_not_found')")
        assert "install the NVIDIA driver" in tab.text("#banner")
        assert "gpu-hpc-exporter doctor" in tab.text("#banner")
        assert "--source=replay" in tab.text("#banner")
        assert tab.errors == []


@pytest.mark.parametrize(
    ("scenario", "says"),
    [
        ("device 0\nfault nvmlInit* 18", "reboot, or reload the kernel module"),
        ("count 0", "The driver is up and shows no GPU"),
        ("device 0\ndevice 1\nfault * device 1 15", "1 of 2 GPUs can be read"),
    ],
)
def test_a_sick_machine_is_told_what_to_do(tab: Tab, start: Start, scenario: str, says: str) -> None:
    """What is wrong in plain words, and the doctor; on a phone too nothing is cut off."""
    tab.size(360, 740, 2, is_phone=True)
    tab.open(start(scenario).exporter.url)
    tab.wait_for(f"document.getElementById('banner').textContent.includes({json.dumps(says)})")
    assert "gpu-hpc-exporter doctor" in tab.text("#banner")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    assert tab.errors == []


def test_what_is_shown_is_as_late_as_windows_come(tab: Tab, replay: Exporter) -> None:
    """Soon behind windows that come with each frame, later where they come once a second; never in leaps."""
    tab.open(replay.url)
    quick, handfuls, steps = tab.evaluate(DELAY)
    assert quick == pytest.approx(0.15)
    assert handfuls == pytest.approx(1.2)
    assert max(steps) < 0.11
    assert min(steps) >= -0.05


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_scrolling_sideways(tab: Tab, replay: Exporter, scheme: str) -> None:
    """Everything fits 360 pixels, and the text stands out from its ground in either scheme (WCAG: 4.5 to 1)."""
    tab.size(360, 740, 2, is_phone=True)
    tab.prefer(scheme)
    tab.open(replay.url)
    tab.wait_for(HAS_WINDOWS)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360
    for name in ("--text", "--faint", "--lie", "--truth"):
        assert tab.evaluate(CONTRAST.replace("NAME", name)) >= 4.5


KERNELS_OF_JOBS = """Promise.all([
  import('./web/page/card.js'), import('./web/page/windows.js'), fetch('api/v1/gpus').then(answer => answer.json()),
]).then(([{ Card }, { View }, { gpus: [gpu] }]) => {
  const card = new Card(gpu, new View(), true);
  card.node.id = 'made';
  card.isVisible = true;
  document.body.append(card.node);
  const shown = (jobs, job_count) => {
    const kernels = jobs.map((job, n) => ({
      job, kernel: `k${n}`, category: 'gemm', share_ratio: 1, executions_per_second: 1, mean_seconds: 1e-3,
      launch_latency_seconds: n ? null : 2e-6, launch_latency_history_seconds: [2e-6], pattern: null,
    }));
    card.update({ ...gpu, job_count, kernels, copies: [] });
    const rows = [...card.node.querySelectorAll('.kernels tr')];
    return rows.map(row => [...row.cells].filter(c => c.getClientRects().length).slice(0, 2).map(c => c.textContent));
  };
  return [shown(['a', 'a'], 1), shown(['a', 'b'], 1), shown(['a'], 2), shown(['a', 'b'], 2)].slice(0, 3);
})"""
"""The first two columns of the kernels of one job, of two, and of one that shares the GPU with another."""


FRAMES = """new Promise(done => {
  const events = new EventSource('api/v1/events');
  const frames = [];
  let newest = -Infinity;
  events.addEventListener('windows', ({ data }) => {
    const { now_seconds, windows } = JSON.parse(data);
    const ends = Object.values(windows).flatMap(columns => columns.end_seconds);
    newest = Math.max(newest, ...ends);
    frames.push([ends.length, now_seconds - newest]);
    if (frames.length < 25) return;
    events.close();
    done(frames.slice(5).map(([count, lag]) => [count, Math.min(lag, 100)]));
  });
})"""
"""Of frames of the stream: how many windows, and how long before the frame the newest had ended."""


DELAY = """import('./web/page/windows.js').then(({ Delay }) => {
  const delay = new Delay();
  const steps = [];
  const follow = lags => lags.forEach(lag => {
    const before = delay.seconds;
    delay.note([lag, 0.01, 100]);
    steps.push(delay.seconds - before);
  });
  follow(Array(100).fill(0.05));
  const quick = delay.seconds;
  follow(Array(100).fill(0).map((_, n) => 0.1 + 0.2 * (n % 6)));
  return [quick, delay.seconds, steps];
})"""
"""How late the page is after twenty seconds of frames of either kind; a third GPU has stopped."""


CONTRAST = """(() => {
  const style = getComputedStyle(document.documentElement);
  const light = name => {
    const probe = document.createElement('i');
    probe.style.color = style.getPropertyValue(name);
    document.body.append(probe);
    const parts = getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255);
    probe.remove();
    const [r, g, b] = parts.map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [high, low] = [light('NAME'), light('--card')].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
})()"""
