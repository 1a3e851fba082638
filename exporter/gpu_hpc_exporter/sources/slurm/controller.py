"""What Slurm's controller says of a job: through scontrol or slurmrestd, each answer bounded in size and time."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

import msgspec

from gpu_hpc_exporter.config import Slurm, Slurmrestd
from gpu_hpc_exporter.jobs.lookups import SlurmJob
from gpu_hpc_exporter.model import JobKind
from gpu_hpc_exporter.text import bounded

DEADLINE_S: Final = 5.0
_MAX_BYTES: Final = 1 << 20
_MAX_TOKEN_BYTES: Final = 65_536
ASKABLE: Final = re.compile(r"[0-9]{1,10}|s[0-9A-Z]{8,32}")
"""Ids and SLUIDs that may stand on a command line or in a URL."""


class ControllerError(Exception):
    """The controller cannot be asked now; the text says why."""


class Controller(Protocol):
    """Whoever knows Slurm's jobs."""

    def ask(self, job: str) -> SlurmJob | None:
        """A job by id or SLUID, None where there is none. Raises ControllerError."""


def controllers(settings: Slurm) -> tuple[Controller, ...]:
    """Those that the configuration allows, the cheaper first."""
    found: list[Controller] = []
    if settings.slurmrestd.url:
        found.append(Rest(settings.slurmrestd))
    if settings.scontrol != "false":
        found.append(Scontrol("scontrol" if settings.scontrol == "true" else settings.scontrol))
    return tuple(found)


class Scontrol:
    """The program of that name."""

    def __init__(self, program: str, deadline_s: float = DEADLINE_S) -> None:
        self._program = program
        self._deadline_s = deadline_s

    def ask(self, job: str) -> SlurmJob | None:
        """Run it once."""
        if not ASKABLE.fullmatch(job):
            return None
        program = shutil.which(self._program)
        if program is None:
            raise ControllerError(f"{self._program}: no such program")
        try:
            process = subprocess.Popen(  # noqa: S603  the program is the administrator's, the id is checked
                [program, "show", "job", "-o", job],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ControllerError(f"{program}: {error.strerror}") from error
        output, status = self._read(process)
        if status < 0:
            raise ControllerError(f"{program} gave no answer within {self._deadline_s:g} s")
        return parse_scontrol(output.decode("utf-8", "replace"), job) if status == 0 else None

    def _read(self, process: subprocess.Popen[bytes]) -> tuple[bytes, int]:
        """What it writes, up to the limit, and how it ends; whatever it started ends with it."""
        timer = threading.Timer(self._deadline_s, _kill, [process])
        timer.start()
        output = b""
        try:
            if process.stdout is not None:
                with process.stdout as pipe:
                    output = pipe.read(_MAX_BYTES)
            return output, process.wait()
        finally:
            timer.cancel()
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


_USER: Final = re.compile(r"([^\s()=]+)\([0-9]+\)")


def parse_scontrol(text: str, wanted: str) -> SlurmJob | None:
    """The line of `scontrol show job -o` about this job; an array's first id brings those of all its tasks.

    Names, comments and paths are what users make them and may look like fields: where a field stands twice nobody can
    tell which is true, and it is left out.
    """
    lines = [line for line in text.split("\n") if line.startswith("JobId=")]
    if wanted.isdigit():
        lines = [line for line in lines if line.startswith(f"JobId={wanted} ")]
    if len(lines) != 1:
        return None
    line = lines[0]
    job_id, counts = line[6:].partition(" ")[0], [line.count(f" {key}=") for key in ("JobName", "UserId", "GroupId")]
    if not _NUMBER.fullmatch(job_id) or not all(counts):
        return None
    if counts != [1, 1, 1]:
        return SlurmJob(job_id)
    name, _, rest = line.partition(" JobName=")[2].partition(" UserId=")
    user = _USER.fullmatch(rest.partition(" GroupId=")[0])
    if user is None:
        return None
    return SlurmJob(
        job_id,
        name=bounded(name, _MAX_VALUE),
        user=bounded(user[1], _MAX_VALUE),
        account=bounded(_only(line, "Account"), _MAX_VALUE),
        partition=bounded(_only(line, "Partition"), _MAX_VALUE),
        kind=_KINDS.get(_only(line, "BatchFlag"), ""),
    )


_NUMBER: Final = re.compile(r"[0-9]{1,10}")
_MAX_VALUE: Final = 200
"""Answers are kept, thousands of them."""
_KINDS: Final[Mapping[str, JobKind]] = {"1": "batch", "0": "interactive"}


def _only(line: str, key: str) -> str:
    values = re.findall(rf" {key}=(\S*)", line)
    return values[0] if len(values) == 1 and values[0] != "(null)" else ""


class _RestJob(msgspec.Struct):
    job_id: Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
    name: str = ""
    user_name: str = ""
    account: str = ""
    partition: str = ""
    batch_flag: Any = None


class _RestAnswer(msgspec.Struct):
    jobs: list[_RestJob] = []


class Rest:
    """slurmrestd."""

    def __init__(self, settings: Slurmrestd, deadline_s: float = DEADLINE_S) -> None:
        self._settings = settings
        self._deadline_s = deadline_s
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())

    def ask(self, job: str) -> SlurmJob | None:
        """One GET."""
        if not ASKABLE.fullmatch(job):
            return None
        url = f"{self._settings.url.rstrip('/')}/slurm/{self._settings.version}/job/{job}"
        request = urllib.request.Request(url, headers=self._headers())  # noqa: S310  the configuration allows http(s) only
        try:
            with self._opener.open(request, timeout=self._deadline_s) as answer:
                body = answer.read(_MAX_BYTES)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise ControllerError(f"slurmrestd answers {error.code}") from error
        except (OSError, ValueError) as error:
            raise ControllerError(f"slurmrestd: {error}") from error
        return _parse_rest(body)

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._settings.user:
            headers["X-SLURM-USER-NAME"] = self._settings.user
        if self._settings.token_file:
            try:
                with Path(self._settings.token_file).open(encoding="utf-8", errors="replace") as file:
                    text = file.read(_MAX_TOKEN_BYTES).strip()
            except OSError as error:
                raise ControllerError(f"{self._settings.token_file}: {error.strerror}") from error
            headers["X-SLURM-USER-TOKEN"] = text.removeprefix("SLURM_JWT=")  # as `scontrol token` prints it
        return headers


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A token goes to the service that was configured and nowhere else."""

    def redirect_request(self, *_: Any) -> None:
        """Never."""
        return


def _parse_rest(body: bytes) -> SlurmJob | None:
    try:
        answer = msgspec.json.decode(body, type=_RestAnswer)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ControllerError("slurmrestd's answer is not what its API says") from error
    if len(answer.jobs) != 1:
        return None
    job = answer.jobs[0]
    flag = job.batch_flag
    is_batch = flag.get("number") if isinstance(flag, dict) else flag
    kind: JobKind = "" if is_batch is None else "batch" if is_batch else "interactive"
    return SlurmJob(
        str(job.job_id),
        name=bounded(job.name, _MAX_VALUE),
        user=bounded(job.user_name, _MAX_VALUE),
        account=bounded(job.account, _MAX_VALUE),
        partition=bounded(job.partition, _MAX_VALUE),
        kind=kind,
    )
