"""What a soak must have shown: each check is a figure, its bound, and whether it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from soak.clients import Met
from soak.counters import gains_of
from soak.figures import Figure, Slope, slope
from soak.scrapes import Found
from soak.truth import Truth
from soak.week import WEEK_S

RSS_OF_WEEK_MIB = 7.0
"""A mebibyte a day."""
RSS_OF_START_MIB = 60.0
"""What caches may take while they fill, in a run too short for a slope."""
WARM_UP_S = 1200.0
"""Until what is bounded is full: the histories of ten minutes, and the names of 32,768 kernels, which take longest."""
SLOPE_FROM_S = 1800.0
"""Runs of this length have a slope, of what comes after the warm-up."""
_POOL_THREADS = 12
"""Those of the pools for scrapes and files, which come when they are first needed, all at the same time if need be."""
_FEW = 3
P99_MS = 10.0
LOOP_P99_MS = 20.0
MOST_SERIES = 20_000
_LISTING_S = 2.0
"""Time without windows each time that the GPUs are listed anew, or the driver was closed, on a busy machine."""


@dataclass(frozen=True)
class Check:
    """One row of the report. problems: what was not as it must be. is_goal: a speed, which a busy machine misses."""

    name: str
    value: str
    bound: str
    problems: tuple[str, ...] = ()
    is_goal: bool = False

    @property
    def holds(self) -> bool:
        """Whether nothing was wrong."""
        return not self.problems


@dataclass
class Outcome:
    """Everything that is known of a run when it has ended.

    before, after: calm, without clients. answers: to requests for control, that were not as they must be. log: lines of
    the exporter's own mistakes. left: files and processes that should be gone. status: the exit's. relisted: how often
    the exporter has begun its sampling anew. unended: what it still tells of what has ended.
    """

    seconds: float
    truth: Truth
    scrapers: list[Found]
    clients: Met
    figures: list[Figure]
    before: Figure
    after: Figure
    windows: Mapping[str, Windows]
    answers: list[str]
    log: list[str]
    left: list[str]
    status: int
    cpu_share: float = 0.0
    relisted: int = 0
    unended: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Windows:
    """Of one GPU: time between two expositions, and the time that windows cover or that is told as lost meanwhile."""

    elapsed_s: float
    covered_s: float


def checks(outcome: Outcome) -> Iterator[Check]:
    """All of them."""
    yield from _scrapes(outcome)
    yield from _totals(outcome)
    yield _windows(outcome)
    yield from _process(outcome)
    yield from _end(outcome)
    yield from _speed(outcome)


def _scrapes(outcome: Outcome) -> Iterator[Check]:
    found = outcome.scrapers
    problems = tuple(f"{one.kind}: {problem}" for one in found for problem in one.problems)
    count = sum(len(one.seconds) for one in found)
    yield Check("scrapes answered whole, in the form asked for", f"{count}", "all", problems)
    pages = sum(one.pages for one in found)
    backward = tuple(f"{one.kind}: {what}" for one in found for what in one.backward)
    yield Check("different expositions in which no counter went back", f"{pages}", "all", backward)
    most = max(one.most_series for one in found)
    yield _bounded("most series", most, MOST_SERIES)
    problems = tuple(outcome.clients.problems)
    came = sum(outcome.clients.came.values())
    yield Check("other clients answered or cut off", f"{came}", "all", problems)
    yield Check("requests for control answered as they must", "", "all", tuple(outcome.answers))


def _totals(outcome: Outcome) -> Iterator[Check]:
    truth, scrapers = outcome.truth, outcome.scrapers
    for what, name, label, true in (
        ("kernel executions", "gpu_hpc_kernel_executions_total", "", truth.executions),
        ("Xids", "gpu_hpc_xid_errors_total", "", truth.xids),
        ("agents' records", "gpu_hpc_agent_records_total", "result", truth.records),
        ("rejected agents' files", "gpu_hpc_agent_files_rejected_total", "reason", truth.rejected),
    ):
        yield _total(what, name, {_key(name, label, of): count for of, count in true.items()}, scrapers)
    yield _total("helpers restarted", _HELPERS, {_HELPERS: truth.helpers_killed}, scrapers)
    yield _total("failed driver calls", _FAILED, {_FAILED: truth.failed_readings}, scrapers)


_HELPERS = "gpu_hpc_helper_restarts_total"
_FAILED = 'gpu_hpc_driver_errors_total{code="unknown"}'


def _key(name: str, label: str, of: str) -> str:
    return f'{name}{{{label}="{of}"}}' if label else gains_of(name, of)


def _total(what: str, name: str, true: Mapping[str, int], scrapers: Sequence[Found]) -> Check:
    """Every scraper's gains are what has happened."""
    problems = tuple(
        f"{one.kind}: {key}: {have:.15g} of {true.get(key, 0)}"
        for one in scrapers
        for key in sorted({*true, *(key for key in one.gained if key.startswith(name))})
        if (have := one.gained.get(key, 0.0)) != true.get(key, 0)
    )
    return Check(f"{what} counted", f"{sum(true.values())}", "as many as there were", problems)


def _windows(outcome: Outcome) -> Check:
    truth = outcome.truth
    interruptions = outcome.relisted + truth.happened["release"]
    allowed_s = truth.released_s + _LISTING_S * (interruptions + 1)
    missing = {uuid: one.elapsed_s - one.covered_s for uuid, one in outcome.windows.items()}
    problems = tuple(f"{uuid}: {gap_s:.1f} s are not covered" for uuid, gap_s in missing.items() if gap_s > allowed_s)
    problems += tuple(f"{uuid}: {-gap_s:.1f} s too much" for uuid, gap_s in missing.items() if gap_s < -_LISTING_S)
    worst_s = max(missing.values(), default=0.0)
    return Check("seconds without windows, steady GPUs, most", f"{worst_s:.1f}", f"{allowed_s:.0f}", problems)


def _process(outcome: Outcome) -> Iterator[Check]:
    before, after, figures = outcome.before, outcome.after, outcome.figures
    yield _bounded("threads more than before", after.threads - before.threads, _POOL_THREADS)
    yield _bounded("descriptors more than before", after.descriptors - before.descriptors, _FEW)
    yield _bounded("child processes more than before", after.children - before.children, 1)
    late = [figure for figure in figures if WARM_UP_S <= figure.at_s - figures[0].at_s <= outcome.seconds]
    if outcome.seconds >= SLOPE_FROM_S:
        for name, values in (
            ("threads", [figure.threads for figure in late]),
            ("descriptors", [figure.descriptors for figure in late]),
            ("child processes", [figure.children for figure in late]),
        ):
            half = len(values) // 2
            yield _bounded(
                f"{name} more in the end than after the warm-up", median(values[half:]) - median(values[:half]), _FEW
            )
        yield _memory("RSS", slope([(figure.at_s, figure.rss) for figure in late]))
    else:
        yield _bounded("RSS more than before, MiB", after.rss - before.rss, RSS_OF_START_MIB)


def _memory(name: str, rise: Slope) -> Check:
    """Its growth in the events of a week."""
    week, doubt = rise.per_second * WEEK_S, rise.uncertainty * WEEK_S
    problem = (f"{name} grows by {week:.2f} MiB in a week's events",) if week - doubt > RSS_OF_WEEK_MIB else ()
    return Check(f"{name} in a week's events, MiB", f"{week:+.2f} ± {doubt:.2f}", f"{RSS_OF_WEEK_MIB:g}", problem)


def _end(outcome: Outcome) -> Iterator[Check]:
    status = () if outcome.status == 0 else (f"status {outcome.status}",)
    yield Check("exit status after SIGTERM", f"{outcome.status}", "0", status)
    yield Check("files and processes left behind", f"{len(outcome.left)}", "0", tuple(outcome.left))
    yield Check("series and rows of what has ended", f"{len(outcome.unended)}", "0", tuple(outcome.unended))
    yield Check("log lines of errors in the exporter itself", f"{len(outcome.log)}", "0", tuple(outcome.log))


def _speed(outcome: Outcome) -> Iterator[Check]:
    for one in outcome.scrapers:
        yield _fast(f"scrape p99, {one.kind}, ms", one.seconds, P99_MS)
    yield _fast("event loop p99, ms", outcome.clients.probes_s, LOOP_P99_MS)


def _fast(name: str, seconds: Sequence[float], bound_ms: float) -> Check:
    value_ms = 1000 * quantile(seconds, 0.99)
    problem = (f"{value_ms:.1f} ms",) if value_ms > bound_ms else ()
    return Check(name, f"{value_ms:.1f}", f"{bound_ms:g}", problem, is_goal=True)


def quantile(values: Sequence[float], share: float) -> float:
    """What this share of the values is not above."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def _bounded(name: str, value: float, bound: float) -> Check:
    return Check(name, f"{value:g}", f"{bound:g}", (f"{value:g}",) if value > bound else ())
