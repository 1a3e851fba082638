"""One soak: the real exporter on the node, scraped and bothered while all comes and goes, and what came of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Final

from e2e.machine import observed, uuid_of
from exporter_process import Exporter, Samples, parse, run_exporter
from soak.checks import Outcome, Windows
from soak.churn import TICK_S, Churn
from soak.clients import Clients, Met
from soak.figures import Figure, Watch, children, look
from soak.node import GPUS, STEADY, Node
from soak.scrapes import Found, Scraper
from soak.truth import Truth

KINDS: Final = (("text", "gzip"), ("openmetrics", "gzip"))
SCRAPES_PER_S: Final = 20
PATIENCE_S: Final = 180.0
"""Until the exporter has noticed that nothing goes on; an agent's file and its job's series stay for a minute."""
_PRODUCT: Final = ("-m", "gpu_hpc_exporter")


def soak(
    directory: Path,
    libraries: Path,
    seconds: float,
    *,
    seed: int = 1,
    program: Sequence[str] = _PRODUCT,
    whole: bool = True,
    patience_s: float = PATIENCE_S,
) -> Outcome:
    """Run it. `whole`: wait in the end until agents' files and what they told are gone too, at most `patience_s`.

    `program`: another one than the product.
    """
    node = Node(directory, libraries)
    with node.running(), run_exporter(directory, *node.flags, env=node.env, program=program) as exporter:
        first = exporter.wait_for(lambda samples: all(observed(samples, uuid_of(device)) > 0 for device in STEADY))
        first_s = time.monotonic()
        churn = Churn(node, exporter, seconds, seed)
        before = look(exporter.process.pid)
        try:
            with Watch(exporter.process.pid) as watch, _visitors(exporter, seed) as visitors:
                while not churn.is_over:
                    churn.tick()
                    _wait_for_tick(exporter)
                cpu_share = watch.cpu_share()
                last, unended = _wait_until_forgotten(node, exporter, churn, patience_s, whole=whole)
                last_s = time.monotonic()
                scrapers, met = visitors.end()
            after = _calm(exporter, before)
        finally:
            churn.close()
        pids = [exporter.process.pid, *children(exporter.process.pid)]
        status = exporter.stop(30)
        log = [json.loads(line) for line in exporter.log.read_text().splitlines()]
        return Outcome(
            seconds=seconds,
            truth=churn.truth,
            scrapers=scrapers,
            clients=met,
            figures=watch.figures,
            before=before,
            after=after,
            windows=_windows(first, last, last_s - first_s),
            answers=churn.answers,
            log=_exceptions(log),
            left=[*_processes_left(pids), *map(str, node.temporary.iterdir())],
            status=status,
            cpu_share=cpu_share,
            relisted=sum(line["msg"].startswith(_RELISTING) for line in log),
            unended=unended,
        )


_RELISTING: Final = ("the GPUs have changed", "configuration reloaded")


class _Visitors:
    """The scrapers and the other clients."""

    def __init__(self, exporter: Exporter, seed: int) -> None:
        host, _, port = exporter.url.rpartition("/")[2].partition(":")
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        interval_s = len(KINDS) / SCRAPES_PER_S
        self._scrapers = [Scraper(exporter.url, *kind, interval_s, env) for kind in KINDS]
        self._clients = Clients(host, int(port), seed, env)

    def end(self) -> tuple[list[Found], Met]:
        """Let them end; what they have seen."""
        met = self._clients.end()
        return [scraper.end() for scraper in self._scrapers], met

    def kill(self) -> None:
        """Whatever state they are in."""
        self._clients.kill()
        for scraper in self._scrapers:
            scraper.kill()


@contextmanager
def _visitors(exporter: Exporter, seed: int) -> Iterator[_Visitors]:
    visitors = _Visitors(exporter, seed)
    try:
        yield visitors
    finally:
        visitors.kill()


def _wait_until_forgotten(
    node: Node, exporter: Exporter, churn: Churn, patience_s: float, *, whole: bool
) -> tuple[Samples, list[str]]:
    """The last exposition, and what of all that has ended is still told in it."""
    deadline_s = time.monotonic() + patience_s
    while True:
        goes_on = [] if churn.calm() else ["the churn"]
        status, _, text = exporter.fetch()
        if status == HTTPStatus.OK:
            samples = parse(text)
            goes_on += [*_uncounted(samples, churn.truth), *_unended(samples, node, whole=whole)]
            if not goes_on or time.monotonic() > deadline_s:
                return samples, goes_on
        _wait_for_tick(exporter)


def _wait_for_tick(exporter: Exporter) -> None:
    """An exporter that has ended by itself is the end of the soak, whatever else it has shown."""
    time.sleep(TICK_S)
    status = exporter.process.poll()
    assert status is None, f"the exporter has ended with {status}; log:\n{exporter.log.read_text()[-_LOG_END:]}"


_LOG_END: Final = 5000


def _uncounted(samples: Samples, truth: Truth) -> Iterator[str]:
    """What the exporter has yet to notice. Kernels are looked at together with their agents' records."""
    xids = sum(samples.all("gpu_hpc_xid_errors_total").values())
    visible = samples.one("gpu_hpc_gpus", state="visible")
    for what, counted, true in (
        ("GPUs", visible, GPUS),
        ("records", sum(samples.all("gpu_hpc_agent_records_total").values()), sum(truth.records.values())),
        ("files", sum(samples.all("gpu_hpc_agent_files_rejected_total").values()), sum(truth.rejected.values())),
        ("Xids", xids, sum(truth.xids.values())),
    ):
        if counted < true:
            yield f"{what}: {counted:g} of {true} counted"


def _unended(samples: Samples, node: Node, *, whole: bool) -> Iterator[str]:
    """Rows of jobs and processes that have ended, and what agents have left."""
    rows = [dict(labels) for labels in samples.all("gpu_hpc_job_info")]
    yield from (f"job {row['job']} on {row['uuid']}" for row in rows)
    for labels, count in samples.all("gpu_hpc_gpu_processes").items():
        if count:
            yield f"{count:g} processes on {dict(labels)['uuid']}"
    if whole:
        yield from (f"kernels of {dict(labels)['job']}" for labels in samples.all(_TRACED))
        yield from map(str, node.agents.iterdir())


_TRACED: Final = "gpu_hpc_kernel_traced_seconds_total"


def _windows(first: Samples, last: Samples, elapsed_s: float) -> Mapping[str, Windows]:
    uuids = map(uuid_of, sorted(STEADY))
    return {uuid: Windows(elapsed_s, observed(last, uuid) - observed(first, uuid)) for uuid in uuids}


def _calm(exporter: Exporter, before: Figure) -> Figure:
    """The process when the last connection has been closed; or after a while, where that does not happen."""
    deadline_s = time.monotonic() + _CLOSING_S
    while (now := look(exporter.process.pid)).descriptors > before.descriptors and time.monotonic() < deadline_s:
        time.sleep(TICK_S)
    return now


_CLOSING_S: Final = 15.0


def _exceptions(log: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines with a traceback: the exporter's own mistakes, since those of others are told in one line without."""
    return [f"{line['msg']}: {line['traceback'].splitlines()[-1]}" for line in log if "traceback" in line]


def _processes_left(pids: Sequence[int]) -> Iterator[str]:
    yield from (f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists())
