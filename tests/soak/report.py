"""A soak's outcome as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from soak.checks import Check, Outcome, quantile
from soak.week import WEEK_S

_MOST_TOLD = 5


def report(outcome: Outcome, found: Sequence[Check]) -> str:
    """Tables of what happened, how long answers took, and what was checked; then what was wrong."""
    return "\n".join([*_events(outcome), "", *_latencies(outcome), "", *_process(outcome), "", *_checks(found), ""])


def _events(outcome: Outcome) -> Iterator[str]:
    truth = outcome.truth
    yield f"{outcome.seconds:.0f} s, with the events of {outcome.seconds / WEEK_S:.3g} weeks.\n"
    yield "| what came and went | times |"
    yield "|---|---|"
    for kind, count in sorted(truth.happened.items()):
        yield f"| {kind} | {count} |"
    yield f"| kernel names | {truth.kernel_names} |"
    for kind, count in sorted(outcome.clients.came.items()):
        yield f"| client: {kind} | {count} |"
    yield f"| frames of live pages | {outcome.clients.frames} |"
    anew, hidden = (max(getattr(one, key) for one in outcome.scrapers) for key in ("begun_anew", "hidden"))
    yield f"| series of jobs that began anew; not lower, so that no Prometheus can tell | {anew}; {hidden} |"


def _latencies(outcome: Outcome) -> Iterator[str]:
    yield "| answer | count | median, ms | p99, ms | maximum, ms |"
    yield "|---|---|---|---|---|"
    kinds = [(f"/metrics, {one.kind}", one.seconds) for one in outcome.scrapers]
    for name, seconds in [*kinds, ("/-/healthy: how busy the event loop is", outcome.clients.probes_s)]:
        median, p99, most = (f"{1000 * quantile(seconds, share):.2f}" for share in (0.5, 0.99, 1.0))
        yield f"| {name} | {len(seconds)} | {median} | {p99} | {most} |"


def _process(outcome: Outcome) -> Iterator[str]:
    before, after, figures = outcome.before, outcome.after, outcome.figures
    middle = figures[len(figures) // 2] if figures else after
    yield "| the process | before | in the middle | afterwards | most |"
    yield "|---|---|---|---|---|"
    for name, key in (
        ("RSS, MiB", "rss"),
        ("threads", "threads"),
        ("descriptors", "descriptors"),
        ("child processes", "children"),
        ("RSS of the helper, MiB", "helper_rss"),
    ):
        most = max((getattr(figure, key) for figure in figures), default=0)
        yield (
            "| "
            + " | ".join([name, *(f"{getattr(f, key):.4g}" for f in (before, middle, after)), f"{most:.4g}"])
            + " |"
        )
    yield f"| CPU, percent of a core | | {100 * outcome.cpu_share:.1f} | | |"


def _checks(found: Sequence[Check]) -> Iterator[str]:
    yield "| check | value | bound | |"
    yield "|---|---|---|---|"
    for check in found:
        verdict = "" if check.holds else "missed" if check.is_goal else "FAILED"
        yield f"| {check.name} | {check.value} | {check.bound} | {verdict} |"
    for check in found:
        for problem in check.problems[:_MOST_TOLD]:
            yield f"\n{check.name}: {problem}"
