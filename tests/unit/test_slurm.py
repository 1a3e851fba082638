"""Slurm's jobs from a prolog's files and from the controller, whatever these are."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gpu_hpc_exporter.config import Slurm, Slurmrestd
from gpu_hpc_exporter.jobs.lookups import SlurmJob
from gpu_hpc_exporter.model import JobKind
from gpu_hpc_exporter.sources.slurm.controller import ControllerError, Rest, Scontrol, controllers, parse_scontrol
from gpu_hpc_exporter.sources.slurm.map_directory import MAX_FILE_BYTES, MapDirectory
from gpu_hpc_exporter.sources.slurm.source import SlurmSource
from unit.objects import G0, G1, M1, Clock

GPUS = (G0, G1, M1)
SLUID = "s0EXAMPLE0SLU00"


def jobs_in(folder: Path) -> dict[str, SlurmJob]:
    """What a directory says."""
    return dict(MapDirectory(folder).read(GPUS).jobs)


@pytest.mark.parametrize(
    ("name", "held"),
    [
        ("0", (G0.uuid,)),
        ("1.3", (M1.uuid,)),
        (G1.uuid, (G1.uuid,)),
        (M1.uuid.upper(), (M1.uuid,)),
        ("7", ()),
        ("GPU-unknown", None),
        ("notes.txt", None),
        (".0.swp", None),
    ],
)
def test_files_of_dcgm_exporters_form(tmp_path: Path, name: str, held: tuple[str, ...] | None) -> None:
    """A file for each GPU, an id a line; other files are nobody's."""
    (tmp_path / name).write_text("123\n\n124 1000\r\n")
    expected = {} if held is None else {i: SlurmJob(i, device_uuids=held) for i in ("123", "124")}
    assert jobs_in(tmp_path) == expected


def test_files_of_the_richer_form(tmp_path: Path) -> None:
    """Keys, in a file of the job's own or the GPU's; what several files tell of a job adds up."""
    (tmp_path / "0").write_text("123\n")
    (tmp_path / "1").write_text("job_id=124\nname=web\njob_id=125\nname=a=b\nkind=odd\nsize=3\n")
    text = "job_id=123\nname = bert large\nuser=ann\naccount=ml\npartition=gpu\nkind=batch\ngpus=1, 0,x,9\n"
    (tmp_path / "job-123").write_text(f"{text}sluid={SLUID}\n")
    reading = MapDirectory(tmp_path).read(GPUS)
    assert reading.jobs == {
        "123": SlurmJob("123", "bert large", "ann", "ml", "gpu", "batch", (G0.uuid, G1.uuid)),
        "124": SlurmJob("124", "web", device_uuids=(G1.uuid,)),
        "125": SlurmJob("125", "a=b", device_uuids=(G1.uuid,)),
    }
    assert reading.sluids == {SLUID: "123"}


def test_files_that_are_traps(tmp_path: Path) -> None:
    """FIFOs, links, folders, huge files and odd bytes: none hangs, none is followed, all are counted."""
    folder = tmp_path / "map"
    folder.mkdir()
    (tmp_path / "secret").write_text("job_id=1\nname=root\n")
    os.mkfifo(folder / "0")
    (folder / "1").symlink_to(tmp_path / "secret")
    (folder / "job-dir").mkdir()
    (folder / "job-huge").write_bytes(b"job_id=2\n" + b"x" * MAX_FILE_BYTES)
    (folder / "job-odd").write_bytes(b"\0\xff=\xff\njob_id=3\nname=\xff\n\x85job_id=$(id)\njob_id=-1\njob_id=../4\n")
    reading = MapDirectory(folder).read(GPUS)
    assert reading.jobs == {"3": SlurmJob("3", "\N{REPLACEMENT CHARACTER}")}
    assert reading.skipped == 4


def test_only_trusted_owners_are_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root, our own user and the directory's owner; everybody else's files are skipped and counted."""
    original = os.fstat
    owners: dict[int, int] = {}

    def owned(descriptor: int) -> os.stat_result:
        told = original(descriptor)
        return os.stat_result([*told[:4], owners.get(told.st_ino, 4000), *told[5:]])

    monkeypatch.setattr(os, "fstat", owned)
    for uid in (0, os.geteuid(), 4000, 4001):
        (tmp_path / f"job-{uid}").write_text(f"job_id=1{uid}\nuser=ann\n")
        owners[(tmp_path / f"job-{uid}").stat().st_ino] = uid
    folder = MapDirectory(tmp_path)
    reading = folder.read(GPUS)
    assert reading.jobs.keys() == {"10", f"1{os.geteuid()}", "14000"}
    assert (reading.skipped, reading.problem) == (1, "job-4001: owned by user 4001, who is not trusted")
    owners[tmp_path.stat().st_ino] = 4001
    assert folder.read(GPUS).jobs.keys() == {"10", f"1{os.geteuid()}", "14001"}


def test_files_that_contradict_each_other(tmp_path: Path) -> None:
    """What they differ in is not known; the rest is, and GPUs add up."""
    (tmp_path / "0").write_text(f"job_id=123\nname=bert\nuser=ann\nkind=batch\nsluid={SLUID}\n")
    (tmp_path / "1").write_text(f"job_id=123\nname=bert\nuser=bob\njob_id=124\nsluid={SLUID}\n")
    reading = MapDirectory(tmp_path).read(GPUS)
    assert reading.jobs["123"] == SlurmJob("123", "bert", kind="batch", device_uuids=(G0.uuid, G1.uuid))
    assert reading.sluids == {}


def test_files_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    """How many, and the first one's reason; the others count, so the source is active."""
    (tmp_path / "0").write_text("123\n")
    (tmp_path / "1").symlink_to("0")
    (tmp_path / ("job-\n" + "x" * 200)).mkdir()
    source = SlurmSource(Slurm(map_directory=str(tmp_path)))
    source.refresh()
    assert source.view.state == "active"
    assert source.view.reason == "2 files of the map directory cannot be used: 1: no regular file"
    assert len(source.view.jobs) == 1
    (tmp_path / "1").unlink()
    source.refresh()
    assert source.view.reason.startswith("1 file of the map directory cannot be used: job-\N{REPLACEMENT CHARACTER}x")
    assert len(source.view.reason) < 160


def test_only_so_many_files_are_read(tmp_path: Path) -> None:
    """A directory that somebody fills costs a bounded time."""
    for number in range(5000):
        (tmp_path / f"job-{number}").write_text(f"job_id={number}\n")
    assert len(jobs_in(tmp_path)) == 4096


def test_files_are_read_again_when_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not otherwise; what the epilog removes is gone."""
    folder = MapDirectory(tmp_path)
    (tmp_path / "0").write_text("123\n")
    assert folder.read(GPUS).jobs.keys() == {"123"}
    opened: list[str] = []
    original = os.open

    def noted(path: str | Path, flags: int, *, dir_fd: int | None = None) -> int:
        opened.append(str(path))
        return original(path, flags, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", noted)
    assert folder.read(GPUS).jobs.keys() == {"123"}
    assert opened == [str(tmp_path)]
    (tmp_path / "new").write_text("124\n")
    (tmp_path / "new").rename(tmp_path / "0")
    assert folder.read(GPUS).jobs.keys() == {"124"}
    (tmp_path / "0").unlink()
    assert folder.read(GPUS).jobs == {}


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    """A state with a reason; it may come later, at the first job."""
    reading = MapDirectory(tmp_path / "none").read(GPUS)
    assert (reading.jobs, reading.reason) == ({}, f"{tmp_path}/none: No such file or directory")


LINE = (
    "JobId={} JobName={} UserId=ann(1000) GroupId=ann(1000) MCS_label=N/A Priority=1 Account={} QOS=normal "
    "JobState=RUNNING BatchFlag=1 Partition=gpu Command=/home/ann/{} WorkDir=/home/ann"
)


def test_scontrols_line() -> None:
    """All that it tells; the task of an array by its own id."""
    expected = SlurmJob("123", "bert large", "ann", "ml", "gpu", "batch")
    assert parse_scontrol(LINE.format(123, "bert large", "ml", "x.sh") + "\n", "123") == expected
    task = "JobId=124 ArrayJobId=123 ArrayTaskId=1 JobName=a UserId=b(1) GroupId=b(1) Account=(null) BatchFlag=0"
    both = LINE.format(123, "bert", "ml", "x") + "\n" + task + "\n"
    assert parse_scontrol(both, "124") == SlurmJob("124", "a", "b", kind="interactive")
    assert parse_scontrol(both, SLUID) is None


@pytest.mark.parametrize(
    ("name", "command", "expected"),
    [
        ("x UserId=root(0) GroupId=root(0)", "x", SlurmJob("123")),
        ("x Account=secret", "x", SlurmJob("123", "x Account=secret", "ann", "", "gpu", "batch")),
        ("x", "x UserId=root(0)", SlurmJob("123")),
        ("x", "x BatchFlag=0 Partition=p", SlurmJob("123", "x", "ann", "ml", "", "")),
        ("x JobName=y", "x", SlurmJob("123")),
    ],
)
def test_names_that_look_like_fields_fool_nobody(name: str, command: str, expected: SlurmJob) -> None:
    """A field that stands twice is no field."""
    assert parse_scontrol(LINE.format(123, name, "ml", command), "123") == expected


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error: Invalid job id specified", "JobId=9 JobName=x", "\0"])
def test_what_is_no_line_of_scontrols(text: str) -> None:
    """No job."""
    assert parse_scontrol(text, "9") is None


def script(path: Path, body: str) -> str:
    """A program."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_scontrol_is_run_within_bounds(tmp_path: Path) -> None:
    """An answer, none, one that never comes, one without end; no id gets onto a command line that is none."""
    good = Scontrol(script(tmp_path / "good", f'echo "{LINE.format("$4", "bert", "ml", "x")}"'))
    assert good.ask("123") == SlurmJob("123", "bert", "ann", "ml", "gpu", "batch")
    assert good.ask("--help") is None
    assert Scontrol(script(tmp_path / "bad", "exit 1")).ask("123") is None
    began = time.monotonic()
    with pytest.raises(ControllerError, match=r"hangs gave no answer within 0\.3 s"):
        Scontrol(script(tmp_path / "hangs", "sleep 60 & sleep 60"), 0.3).ask("123")
    assert time.monotonic() - began < 30  # neither it nor what it started is waited for
    assert Scontrol(script(tmp_path / "floods", "yes JobId=123 | head -c 30000000"), 60).ask("123") is None
    with pytest.raises(ControllerError, match="no such program"):
        Scontrol(str(tmp_path / "none")).ask("123")


@contextmanager
def rest(status: int, body: bytes) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A slurmrestd that answers this."""
    seen: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append({"path": self.path, **self.headers})
            self.send_response(status)
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


JOB = {"job_id": 123, "name": "bert", "user_name": "ann", "account": "ml", "partition": "gpu", "more": [1]}


@pytest.mark.parametrize(
    ("flag", "kind"),
    [({"batch_flag": True}, "batch"), ({"batch_flag": {"set": True, "number": 0}}, "interactive"), ({}, "")],
)
def test_slurmrestd(tmp_path: Path, flag: dict[str, object], kind: JobKind) -> None:
    """One GET with the token of the file."""
    (tmp_path / "token").write_text("SLURM_JWT=secret\n")
    with rest(200, json.dumps({"jobs": [JOB | flag]}).encode()) as (url, seen):
        asked = Rest(Slurmrestd(f"{url}/", str(tmp_path / "token"), "exporter")).ask("123")
    assert asked == replace(SlurmJob("123", "bert", "ann", "ml", "gpu"), kind=kind)
    (request,) = seen
    assert request["path"] == "/slurm/v0.0.40/job/123"
    headers = {name.lower(): value for name, value in request.items()}
    assert (headers["x-slurm-user-token"], headers["x-slurm-user-name"]) == ("secret", "exporter")


@pytest.mark.parametrize(
    ("status", "body", "problem"),
    [
        (404, b"", ""),
        (200, b'{"jobs": []}', ""),
        (200, b"<html>", "not what its API says"),
        (200, b'{"jobs": [{"job_id": "x"}]}', "not what its API says"),
        (500, b"", "answers 500"),
        (401, b"", "answers 401"),
        (302, b"", "answers 302"),
    ],
)
def test_slurmrestd_that_has_no_answer(status: int, body: bytes, problem: str) -> None:
    """No job, or an error that says what; a token is taken nowhere else."""
    with rest(status, body) as (url, _):
        controller = Rest(Slurmrestd(url))
        if problem:
            with pytest.raises(ControllerError, match=problem):
                controller.ask("123")
        else:
            assert controller.ask("123") is None
    with pytest.raises(ControllerError, match="slurmrestd: "):
        controller.ask("123")
    assert controller.ask("../../x") is None


def test_which_controllers_are_asked() -> None:
    """None unless it is configured."""
    assert controllers(Slurm()) == ()
    both = controllers(Slurm(scontrol="true", slurmrestd=Slurmrestd("http://x")))
    assert [type(one) for one in both] == [Rest, Scontrol]


class Asked:
    """A controller that notes what it is asked."""

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.jobs = {"123": SlurmJob("123", "bert", "ann"), SLUID: SlurmJob("125", "sl", "bob")}
        self.problem = ""

    def ask(self, job: str) -> SlurmJob | None:
        self.questions.append(job)
        if self.problem:
            raise ControllerError(self.problem)
        return self.jobs.get(job)


def test_the_controller_is_asked_in_the_background_and_seldom(tmp_path: Path) -> None:
    """Files come first; a job that nobody knows is asked for once a minute; answers change the version."""
    (tmp_path / "0").write_text("123\n")
    clock, asked = Clock(1000.0), Asked()
    source = SlurmSource(Slurm(map_directory=str(tmp_path)), clock, (asked,))
    source.use_gpus(GPUS)
    source.refresh()
    version = source.view.version
    assert source.slurm_job("123") == SlurmJob("123", device_uuids=(G0.uuid,))
    assert source.slurm_job("124") is None
    assert source.slurm_job_of_sluid(SLUID) is None
    assert asked.questions == []
    source.refresh()
    assert asked.questions == ["123", "124", SLUID]
    assert source.view.version > version
    assert source.slurm_job("123") == SlurmJob("123", "bert", "ann", device_uuids=(G0.uuid,))
    assert source.slurm_job_of_sluid(SLUID) == SlurmJob("125", "sl", "bob")
    assert source.view.holders == {G0.uuid: (SlurmJob("123", "bert", "ann", device_uuids=(G0.uuid,)),)}
    version = source.view.version
    for _ in range(5):
        source.slurm_job("124")
        source.refresh()
    assert (len(asked.questions), source.view.version) == (3, version)
    clock.now_s += 61
    source.slurm_job("124")
    source.refresh()
    assert asked.questions[3:] == ["124"]


def test_a_controller_that_fails_is_left_alone_for_a_while() -> None:
    """And the state says why."""
    clock, asked = Clock(1000.0), Asked()
    source = SlurmSource(Slurm(), clock, (asked,))
    asked.problem = "gone"
    for _ in range(5):
        source.slurm_job("123")
        source.refresh()
    assert asked.questions == ["123"]
    assert (source.view.state, source.view.reason) == ("failed", "gone")
    clock.now_s += 11
    asked.problem = ""
    source.slurm_job("123")
    source.refresh()
    assert (source.view.state, source.view.reason, source.view.jobs["123"].name) == ("active", "", "bert")


def test_without_configuration_there_is_nothing() -> None:
    """No thread, no state."""
    source = SlurmSource(Slurm())
    source.start()
    assert source.slurm_job("1") is None
    assert source.view.state is None
    source.stop()


def test_the_thread_follows_the_directory(tmp_path: Path) -> None:
    """Within its period, and it ends."""
    source = SlurmSource(Slurm(map_directory=str(tmp_path)))
    source.use_gpus(GPUS)
    source.start()
    (tmp_path / "0").write_text("123\n")
    deadline = time.monotonic() + 60
    while not source.view.holders:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    source.stop()
    assert not any(thread.name == "slurm" for thread in threading.enumerate())
