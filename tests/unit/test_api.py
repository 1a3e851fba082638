"""The API and the stream behind the live page, over real connections: bounded, in one line of JSON where it refuses."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from aiohttp import ClientResponse, ClientSession
from aiohttp.web import AppRunner, SockSite

from gpu_hpc_exporter.app import build_app
from gpu_hpc_exporter.diagnosis.classify import CLASSES
from gpu_hpc_exporter.model import NS, GpuJobs, Job, JobOnGpu, JobsInForce, Quantity, StateChange
from gpu_hpc_exporter.samplers.fleet import Fleet
from gpu_hpc_exporter.web.hub import MAX_PAGES, MAX_WAITING, RESYNC, Hub, Page
from unit.objects import G0, G1, M1, readings, running_fleet, window
from unit.test_app import Client, Scripted, run

T = TypeVar("T")
BARE = replace(G0, links=())


def busy_fleet() -> Fleet:
    """A GPU with three windows."""
    fleet = running_fleet(BARE)
    fleet.put(readings(9, {"nvml_utilization_ratio": 1.0, "memory_total_bytes": 100.0}))
    for second in (8, 9, 10):
        fleet.put(window(second, {"sm_active": 1.0, "pipe_tensor": 0.9, "dram_active": 0.1}))
    return fleet


def asked(fleet: Fleet, what: Callable[[Client], Awaitable[T]]) -> T:
    """The result of `what` with a client of this fleet's exporter."""
    return run(what, Scripted(fleet))


def get(fleet: Fleet, path: str, **headers: str) -> tuple[int, Any]:
    """Status and JSON of an answer, which is JSON whatever the status."""

    async def fetch(client: Client) -> tuple[int, Any]:
        async with client.get(path, headers=headers) as answer:
            assert answer.content_type == "application/json"
            text = await answer.text()
            assert text.count("\n") <= 1
            return answer.status, json.loads(text)

    return asked(fleet, fetch)


def test_gpus() -> None:
    """A GPU with its verdict; what nobody measures is null, what is 0 is 0."""
    status, told = get(busy_fleet(), "/api/v1/gpus")
    assert (status, told["up"], told["down_reason"], told["recording"]) == (200, True, None, None)
    (gpu,) = told["gpus"]
    assert (gpu["gpu"], gpu["uuid"], gpu["verdict"]["cause"]) == ("0", G0.uuid, "compute_bound")
    assert gpu["intensity_ratio"] == {"sm": 0.9, "l2": None, "dram": 0.125, "pcie": None, "nvlink": None}
    assert (gpu["nvml_utilization_ratio"], gpu["power_watts"], gpu["processes"]) == (1.0, None, None)


def hanging_fleet(length_s: int = 620, step: float = 0.0) -> Fleet:
    """Two GPUs of one job on which a tenth of the SMs spins, more by `step` in the second half."""
    gpus = [replace(BARE, uuid=f"GPU-{number}", index=number) for number in range(2)]
    fleet = running_fleet(*gpus, now=length_s)
    fleet.put(JobsInForce((length_s - 1) * NS, {g.uuid: GpuJobs((JobOnGpu(Job("bert")),), 1) for g in gpus}, {}, {}))
    for gpu in gpus:
        for end in range(1, length_s + 1):
            active = 0.1 + (step if end > length_s - 300 else 0.0)
            values: dict[Quantity, float] = {"sm_active": active, "pipe_tensor": 0.0, "dram_active": 0.0}
            fleet.put(replace(window(end, values), uuid=gpu.uuid))
    return fleet


def test_a_collective_that_hangs() -> None:
    """Ten minutes of the same, on one of the job's two GPUs: the alert's words, which ask no less."""
    _, told = get(hanging_fleet(), "/api/v1/gpus")
    verdict = told["gpus"][0]["verdict"]
    assert (verdict["cause"], verdict["alert"]) == ("collective_hung", "GpuHpcCollectiveHung")
    assert "the same 10% of the SMs spin" in verdict["sentence"]
    assert "one of the job's 2 GPUs" in verdict["sentence"]


@pytest.mark.parametrize(("length_s", "step"), [(570, 0.0), (620, 0.05)])
def test_what_is_too_young_or_not_steady_does_not_hang(length_s: int, step: float) -> None:
    """Nine and a half minutes are not ten, and SM activity that has changed is work."""
    _, told = get(hanging_fleet(length_s, step), "/api/v1/gpus")
    assert told["gpus"][0]["verdict"]["cause"] != "collective_hung"


@pytest.mark.parametrize(("minutes", "is_told"), [(29, False), (31, True), (120, True)])
def test_memory_that_fills_up(minutes: int, is_told: bool) -> None:  # noqa: FBT001  a column of the table
    """From 85 % to 98 % in the last half hour; of a GPU that has been seen for less nobody knows whether it rose."""
    fleet = running_fleet(BARE, now=60 * minutes)
    for minute in range(minutes + 1):
        used = 98.0 if minute > minutes - 20 else 85.0
        fleet.put(readings(60 * minute, {"memory_used_bytes": used, "memory_total_bytes": 100.0}))
    fleet.put(window(60 * minutes, {"sm_active": 1.0, "pipe_tensor": 0.9, "dram_active": 0.1}))
    _, told = get(fleet, "/api/v1/gpus")
    found = told["gpus"][0]["verdict"]
    assert found["cause"] == "compute_bound"
    assert [other["alert"] for other in found["also"]] == (["GpuHpcMemoryNearlyFull"] if is_told else [])


@pytest.mark.parametrize("change", [None, StateChange(NS, "nvml", "", "failed", "driver_not_loaded")])
def test_no_driver_is_said(change: StateChange | None) -> None:
    """Why there is no GPU stands there, also before anything was asked."""
    fleet = Fleet(lambda: NS, 15 * NS)
    if change is not None:
        fleet.put(change)
    _, told = get(fleet, "/api/v1/gpus")
    assert (told["up"], told["down_reason"], told["gpus"]) == (False, change.reason if change else "starting", [])
    assert ("modprobe nvidia" if change else "is being asked") in told["down_advice"]


def test_text_from_outside_is_bounded() -> None:
    """A name of a megabyte does not make an answer of a megabyte."""
    fleet = running_fleet(replace(G0, name="N" * 1_000_000))
    job = Job("J" * 1_000_000, user="\0<b>")
    fleet.put(JobsInForce(9 * NS, {G0.uuid: GpuJobs((JobOnGpu(job),), 1)}, {}, {}))
    _, told = get(fleet, "/api/v1/gpus")
    assert len(json.dumps(told)) < 10_000
    assert "\0" not in told["gpus"][0]["jobs"][0]["user"]


@pytest.mark.parametrize("wanted", [G0.uuid, "0"])
def test_history(wanted: str) -> None:
    """By UUID or by the `gpu` label: columns of one length, the window's end on the exporter's clock."""
    status, told = get(busy_fleet(), f"/api/v1/history?gpu={wanted}&seconds=2")
    windows = told["windows"]
    assert (status, told["uuid"], told["now_seconds"]) == (200, G0.uuid, 10.0)
    assert windows["end_seconds"] == [9.0, 10.0]
    assert windows["duration_seconds"] == [1.0, 1.0]
    assert windows["bottleneck"] == ["compute_bound"] * 2
    assert (windows["sm"], windows["pcie"], windows["nvml_utilization"]) == ([0.9] * 2, [None] * 2, [1.0] * 2)
    assert set(windows["bottleneck"]) <= set(CLASSES)


def test_an_instance_is_asked_for_by_its_uuid() -> None:
    """Its parent's label means the parent."""
    fleet = running_fleet(G1, M1)
    assert get(fleet, f"/api/v1/history?gpu={M1.uuid}")[1]["uuid"] == M1.uuid
    assert get(fleet, "/api/v1/history?gpu=1")[1]["uuid"] == G1.uuid


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/v1/history", 404, "no GPU has"),
        ("/api/v1/history?gpu=" + "x" * 5000, 404, "no GPU has"),
        ("/api/v1/history?gpu=%0a%22", 404, "no GPU has"),
        ("/api/v1/history?gpu=0&gpu=1", 400, "each once"),
        ("/api/v1/history?gpu=0&second=5", 400, "only gpu and seconds"),
        ("/api/v1/history?gpu=0&seconds=0", 400, "1 to 600"),
        ("/api/v1/history?gpu=0&seconds=601", 400, "1 to 600"),
        ("/api/v1/history?gpu=0&seconds=99999999999999999999", 400, "1 to 600"),
        ("/api/v1/history?gpu=0&seconds=%D9%A3", 400, "1 to 600"),
        ("/api/v1/history?gpu=0&seconds=", 400, "1 to 600"),
        ("/api/v1/gpus?x=1", 400, "no parameters"),
        ("/api/v1/events?x=1", 400, "no parameters"),
    ],
)
def test_refusals_are_one_line_of_json(path: str, status: int, says: str) -> None:
    """What was wrong, without what was sent at length."""
    found, told = get(busy_fleet(), path)
    assert (found, list(told)) == (status, ["error"])
    assert says in told["error"]
    assert len(told["error"]) < 400


def test_a_long_history_is_compressed_where_that_is_accepted() -> None:
    """Ten minutes of a GPU are some hundred kilobytes of digits."""
    fleet = running_fleet(BARE, now=600)
    for number in range(3000):
        fleet.put(window(0.1 * number + 0.1, {"sm_active": 0.5}, seconds=0.1))

    async def sizes(client: Client) -> tuple[int, int]:
        path = f"/api/v1/history?gpu={G0.uuid}"
        async with client.get(path, headers={"Accept-Encoding": "identity"}) as answer:
            plain = await answer.read()
        async with client.request("GET", path, auto_decompress=False, headers={"Accept-Encoding": "gzip"}) as answer:
            packed = await answer.read()
        assert gzip.decompress(packed).partition(b"windows")[2] == plain.partition(b"windows")[2]
        return len(plain), len(packed)

    plain, packed = asked(fleet, sizes)
    assert packed < plain / 4


def test_files_are_kept_by_the_browser_until_they_change() -> None:
    """A second visit costs a 304; what is not of the page is not found, wherever it may lie."""

    async def visit(client: Client) -> list[int]:
        async with client.get("/web/page/main.js") as answer:
            assert answer.content_type == "text/javascript"
            tag = answer.headers["ETag"]
        again = {"If-None-Match": tag}
        found = []
        paths = ("/web/page/main.js", "/web/page/index.html", "/web/routes.py", "/web/page/", "/web/%2e%2e/app.py")
        for path in paths:
            async with client.get(path, headers=again) as answer:
                found.append(answer.status)
        return found

    assert asked(busy_fleet(), visit) == [304, 404, 404, 404, 404]


async def next_event(answer: ClientResponse) -> tuple[str, Any]:
    """Name and data of the next event."""
    name, data, end = [(await answer.content.readline()).decode() for _ in range(3)]
    assert end == "\n"
    return name.removeprefix("event: ").strip(), json.loads(data.removeprefix("data: "))


def test_events() -> None:
    """First the GPUs, then new windows as they come; nothing is said of those that were there before."""
    fleet = busy_fleet()

    async def follow(client: Client) -> list[tuple[str, Any]]:
        async with client.get("/api/v1/events") as answer, asyncio.timeout(60):
            assert (answer.status, answer.content_type) == (200, "text/event-stream")
            events = [await next_event(answer) for _ in range(2)]
            fleet.put(window(11, {"sm_active": 1.0, "pipe_tensor": 0.9, "dram_active": 0.1}))
            while not events[-1][1].get("windows"):
                events.append(await next_event(answer))
            return events

    events = asked(fleet, follow)
    (first, gpus), (second, nothing), (last, told) = events[0], events[1], events[-1]
    assert (first, [gpu["uuid"] for gpu in gpus["gpus"]]) == ("gpus", [G0.uuid])
    assert (second, nothing) == ("windows", {"now_seconds": 10.0, "windows": {}})
    assert (last, told["windows"][G0.uuid]["end_seconds"]) == ("windows", [11.0])


def test_a_client_that_does_not_read_holds_up_nobody() -> None:
    """Its connection is full at once; others get every frame, and when it reads again it is told what it missed."""
    many = [replace(BARE, uuid=f"GPU-{number}", index=number) for number in range(64)]
    fleet = running_fleet(*many)

    async def both() -> tuple[int, bytes]:
        runner = AppRunner(build_app(Scripted(fleet)), shutdown_timeout=0.5)  # as serve() does
        await runner.setup()
        with socket.socket() as listening, socket.socket() as slow:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            listening.bind(("127.0.0.1", 0))
            await SockSite(runner, listening).start()
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect(listening.getsockname())
            slow.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: x\r\n\r\n")
            url = f"http://127.0.0.1:{listening.getsockname()[1]}/api/v1/events"
            async with ClientSession() as session, session.get(url) as quick, asyncio.timeout(120):
                windows = 0
                while windows < 15:
                    windows += (await next_event(quick))[0] == "windows"
                slow.settimeout(0)
                read = b""
                while RESYNC not in read:
                    read += await asyncio.get_running_loop().sock_recv(slow, 1 << 16)
            await runner.cleanup()
        return windows, read

    windows, read = asyncio.run(both())
    assert read.count(b"event: windows") < windows


def test_one_page_too_many_is_told_so() -> None:
    """The cap is a clear 503; a page that goes makes room."""

    async def crowd(client: Client) -> tuple[int, str, int]:
        pages = [await client.get("/api/v1/events") for _ in range(MAX_PAGES)]
        async with client.get("/api/v1/events") as refused:
            status, text = refused.status, await refused.text()
        pages.pop().close()
        for _ in range(200):
            async with client.get("/api/v1/events") as again:
                if again.status == 200:
                    break
            await asyncio.sleep(0.05)
        for page in pages:
            page.close()
        return status, text, again.status

    status, text, again = asked(busy_fleet(), crowd)
    assert (status, again) == (503, 200)
    assert "16 pages are open" in json.loads(text)["error"]


def test_a_page_that_does_not_keep_up_skips_frames_and_is_told() -> None:
    """At most two frames wait; what it gets then says that it missed some."""

    async def slow() -> list[bytes | None]:
        page = Page()
        for number in range(MAX_WAITING):
            page.push(b"%d;" % number)
        before = await page.next()
        for number in range(10 * MAX_WAITING):
            page.push(b"%d;" % number)
        after = await page.next()
        page.close()
        return [before, after, await page.next()]

    before, after, end = asyncio.run(slow())
    assert before == b"0;1;"
    assert after is not None
    assert after.startswith(RESYNC)
    assert len(after) < len(RESYNC) + 10
    assert end is None


def test_pages_share_frames_and_nobody_works_for_none() -> None:
    """However many look, each frame is made once; without a page none is made."""
    calls: list[int] = []

    class Counting(Scripted):
        def recent_kernels(self) -> Any:
            calls.append(1)
            return super().recent_kernels()

    async def look() -> tuple[set[bytes | None], int, bool]:
        hub = Hub(Counting(busy_fleet()))
        pages = [page for page in (hub.open() for _ in range(5)) if page is not None]
        frames = {await page.next() for page in pages}
        made = len(calls)
        for page in pages:
            hub.leave(page)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(tasks)
        return frames, made, all(task.cancelled() for task in tasks)

    frames, made, has_ended = asyncio.run(look())
    assert (len(frames), made, has_ended) == (1, 1, True)


def test_a_frame_that_cannot_be_made_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """It costs the pages that frame; they stay, and get the next one that can be made."""
    failures = [RuntimeError("first"), RuntimeError("second")]

    class Failing(Scripted):
        def recent_kernels(self) -> Any:
            if failures:
                raise failures.pop()
            return super().recent_kernels()

    async def look() -> bytes | None:
        hub = Hub(Failing(busy_fleet()))
        page = hub.open()
        assert page is not None
        async with asyncio.timeout(60):
            frame = None
            while frame is None or b"event: gpus" not in frame:
                frame = await page.next()
        hub.leave(page)
        return frame

    assert asyncio.run(look())
    assert not failures
    assert [record.message for record in caplog.records] == ["a frame of the live page cannot be made"]
