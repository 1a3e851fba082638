"""What Slurm's side writes: a prolog's files, `scontrol`'s lines, slurmrestd's JSON."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gpu_hpc_exporter.jobs.lookups import SlurmJob
from gpu_hpc_exporter.sources.slurm.controller import ControllerError, _parse_rest, parse_scontrol
from gpu_hpc_exporter.sources.slurm.map_directory import MAX_FILE_BYTES, MAX_JOBS, MapDirectory
from gpu_hpc_exporter.text import bounded
from unit.fuzz.foreign import crooked, foreign, fuzz, is_label, soon
from unit.objects import G0, G1, M1

GPUS = (G0, G1, M1)
UUIDS = {gpu.uuid for gpu in GPUS}
MAX_TEXT = 200

PLAIN = b"4711\n4712 anything\n"
KEYED = (
    b"job_id=4711\nsluid=s3S9PZVB6G1X01\nname=bert\nuser=alice\naccount=hpc\npartition=gpu\nkind=batch\n"
    b"gpus=0,1.3,GPU-00000000-aaaa-bbbb-cccc-000000000001\njob_id=4712\nname=gpt\n"
)
KEYS = (b"job_id=", b"name=", b"user=", b"gpus=", b"sluid=", b"kind=", b"4711", b"\r\n")


def check_job(job: SlurmJob) -> None:
    """Whatever a job's fields are, they are short."""
    for text in (job.name, job.user, job.account, job.partition):
        assert len(text.encode("utf-8", "surrogatepass")) <= 4 * MAX_TEXT
    assert len(job.job_id) <= 64
    assert job.kind in {"", "batch", "service", "interactive"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A map directory for all examples."""
    return tmp_path_factory.mktemp("map")


@given(foreign(PLAIN, KEYED, tokens=KEYS), foreign(PLAIN, KEYED, tokens=KEYS))
@fuzz(150)
@example(b"job_id=1\n" * 30_000, b"1\n" * 30_000)
@example(b"job_id=1\nname=" + b"x" * 60_000, b"")
def test_map_files(folder: Path, by_gpu: bytes, by_job: bytes) -> None:
    """Any files: jobs with short fields, on GPUs that there are; a file that is too long counts as skipped."""
    (folder / "0").write_bytes(by_gpu)
    (folder / "job-1").write_bytes(by_job)
    reading = MapDirectory(folder).read(GPUS)
    assert reading.skipped == sum(len(content) > MAX_FILE_BYTES for content in (by_gpu, by_job))
    assert not reading.reason
    assert len(reading.jobs) <= MAX_JOBS
    for job_id, job in reading.jobs.items():
        assert job.job_id == job_id
        check_job(job)
        assert set(job.device_uuids) <= UUIDS
    assert set(reading.sluids.values()) <= reading.jobs.keys()


@given(st.text(max_size=30).filter(lambda name: "\n" not in name) | st.sampled_from(["x", "a b"]))
@fuzz(150)
@example("x\x0buser=root\x0bjob_id=1\x0bgpus=0")
@example("x\N{LINE SEPARATOR}user=root")
@example("x\ruser=root")
def test_a_name_is_one_value(folder: Path, name: str) -> None:
    """A job's own user chooses its name, and with it nothing else of what a prolog writes."""
    (folder / "0").unlink(missing_ok=True)
    text = f"job_id=4711\nname={name}\nuser=alice\n"
    (folder / "job-1").write_text(text, encoding="utf-8", errors="replace", newline="")
    reading = MapDirectory(folder).read(GPUS)
    expected = name.encode("utf-8", "replace").decode().strip()[:MAX_TEXT]
    assert reading.jobs == {"4711": SlurmJob("4711", name=expected, user="alice")}


LINE = (
    b"JobId=4711 ArrayJobId=4711 ArrayTaskId=3 JobName=bert large UserId=alice(1000) GroupId=users(100) "
    b"MCS_label=N/A Priority=1 Account=hpc QOS=normal Partition=gpu BatchFlag=1 Comment=(null)\n"
)
FIELDS = (b" JobName=", b" UserId=", b" GroupId=", b"JobId=4711 ", b" Account=", b" BatchFlag=", b"(1000)", b"JobName=")


@given(foreign(LINE, LINE * 2, tokens=FIELDS), st.sampled_from(["4711", "s3S9PZVB6G1X01"]))
@fuzz(300)
@example(b"JobId=4711 JobName=x\x0bJobId=4711 JobName=y UserId=root(0) GroupId=root(0)\n", "4711")
def test_scontrol(output: bytes, wanted: str) -> None:
    """Any output: no job, or one whose id stands at the beginning of a line."""
    job = parse_scontrol(output.decode("utf-8", "replace"), wanted)
    if job is not None:
        assert f"JobId={job.job_id} ".encode() in output
        assert job.job_id == wanted or not wanted.isdigit()
        check_job(job)


@given(st.text(string.printable + "\x85\u2028=()", max_size=40).filter(lambda name: "\n" not in name))
@fuzz(200)
@example(" UserId=root(0) GroupId=root(0) ")
@example("x\x0bJobId=4711 JobName=y UserId=root(0) GroupId=root(0)")
def test_a_name_in_scontrol_makes_nobody_else(name: str) -> None:
    """Whatever a user calls a job, it is told with its true user or without any."""
    line = LINE.decode().replace("bert large", name)
    job = parse_scontrol(line, "4711")
    assert job is not None
    assert (job.job_id, job.user) in {("4711", "alice"), ("4711", "")}
    assert job.name == bounded(name, MAX_TEXT) or not job.user


@pytest.mark.parametrize(
    "text",
    [
        "JobId=1 " + "JobName= UserId=a " * 50_000,
        "JobId=1 JobName=x" + " UserId=a(1)" * 80_000 + " GroupId=",
        "JobId=1 x" + "JobName=" * 120_000 + " JobName=a UserId=b(",
        "JobId=1 " * 120_000,
        "JobId=1 \n" * 100_000,
    ],
)
def test_scontrol_of_a_megabyte(text: str) -> None:
    """In linear time, also where what it looks for stands there ten thousand times."""
    with soon():
        assert parse_scontrol(text, "1") in {None, SlurmJob("1")}


JOB = {"job_id": 4711, "name": "bert", "user_name": "alice", "account": "hpc", "partition": "gpu"}
ANSWERS = [
    {"meta": {"Slurm": {}}, "errors": [], "jobs": [{**JOB, "batch_flag": flag}]}
    for flag in (True, {"set": True, "infinite": False, "number": 1}, None)
]
BODIES = [json.dumps(answer).encode() for answer in ANSWERS]
NAMES = (b'"jobs":', b'"job_id":', b'"name":', b'"batch_flag":', b'{"number":', b"[[", b"]]")


@given(foreign(*BODIES, tokens=NAMES) | crooked(*ANSWERS).map(json.dumps).map(str.encode))
@fuzz(300)
@example(b'{"x":' + b"[" * 100_000)
@example(b'{"jobs":[{"job_id":1,"batch_flag":' + b"[" * 100_000)
@example(b'{"jobs":[{"job_id":' + b"9" * 5000 + b"}]}")
@example(b'{"jobs":[{"job_id":' + b"9" * 400 + b"}]}")
@example(b'{"jobs":[{"job_id":-1}]}')
@example(b'{"jobs":[{"job_id":1,"name":"' + b"x" * 90_000 + b'"}]}')
def test_slurmrestd(body: bytes) -> None:
    """Any answer: one job with short fields, none, or an error that says what it is."""
    with suppress(ControllerError):
        job = _parse_rest(body)
        if job is not None:
            check_job(job)
            assert job.job_id.isdecimal()


@pytest.mark.parametrize("parse", [parse_scontrol, lambda text, _: _parse_rest(text.encode())])
def test_long_texts_of_a_controller_stay_two(parse: Callable[[str, str], SlurmJob | None]) -> None:
    """What is cut is no other user's name."""
    users = []
    for end in "ab":
        user = "x" * 70_000 + end
        text = f"JobId=1 JobName=n UserId={user}(1) GroupId=g(1)\n"
        if parse is not parse_scontrol:
            text = json.dumps({"jobs": [{"job_id": 1, "user_name": user}]})
        job = parse(text, "1")
        assert job is not None
        assert is_label(job.user, MAX_TEXT)
        users.append(job.user)
    assert users[0] != users[1]
