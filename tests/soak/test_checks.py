"""Every check of the soak can fail, and none does where nothing was wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from soak.checks import Outcome, Windows, checks, quantile
from soak.clients import Met
from soak.counters import Counters, MalformedError, disagreements, samples_of
from soak.figures import Figure, slope
from soak.report import report
from soak.scrapes import Found
from soak.truth import Truth
from soak.week import EVENTS, WEEK_S, Calendar

GPU = "GPU-0"
CALM = Figure(0.0, rss=80.0, threads=20, descriptors=13, children=1, helper_rss=20.0)
GAINED = {
    f"gpu_hpc_kernel_executions_total {GPU}": 100.0,
    f"gpu_hpc_xid_errors_total {GPU}": 2.0,
    'gpu_hpc_agent_records_total{result="kept"}': 7.0,
    'gpu_hpc_agent_records_total{result="dropped"}': 0.0,
    'gpu_hpc_agent_files_rejected_total{reason="torn"}': 1.0,
    "gpu_hpc_helper_restarts_total": 1.0,
    'gpu_hpc_driver_errors_total{code="unknown"}': 3.0,
}


def scraper() -> Found:
    """One that met nothing bad."""
    return Found("text, gzip", [0.001] * 1000, gained=GAINED.copy(), pages=50, most_series=4000)


def figures(seconds: float, **rises: float) -> list[Figure]:
    """One a second; what is named rises by so much in all."""
    return [
        replace(CALM, at_s=float(n), **{name: getattr(CALM, name) + rise * n / seconds for name, rise in rises.items()})
        for n in range(int(seconds))
    ]


def good(seconds: float = 2400.0, **rises: float) -> Outcome:
    """A run in which everything was as it must be, but for what rises."""
    truth = Truth(
        executions=Counter({GPU: 100}),
        records=Counter(kept=7),
        xids=Counter({GPU: 2}),
        rejected=Counter(torn=1),
        happened=Counter(release=1),
        failed_readings=3,
        helpers_killed=1,
        released_s=3.0,
    )
    return Outcome(
        seconds=seconds,
        truth=truth,
        scrapers=[scraper(), scraper()],
        clients=Met(probes_s=[0.001] * 100),
        figures=figures(seconds, **rises),
        before=CALM,
        after=CALM,
        windows={GPU: Windows(seconds, seconds - 5)},
        answers=[],
        log=[],
        left=[],
        status=0,
    )


def failed(outcome: Outcome) -> set[str]:
    """Names of the checks that do not hold."""
    return {check.name for check in checks(outcome) if not check.holds}


@pytest.mark.parametrize("seconds", [60.0, 2400.0])
def test_a_good_run_passes(seconds: float) -> None:
    """As a short one does."""
    assert failed(good(seconds)) == set()


def lacks(name: str) -> Callable[[Outcome], object]:
    """One of the scrapers has seen one event less."""

    def change(outcome: Outcome) -> None:
        gained = outcome.scrapers[1].gained
        gained[name] -= 1

    return change


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda o: o.scrapers[0].problems.append("500"), "scrapes answered whole, in the form asked for"),
        (lambda o: o.scrapers[1].backward.append("x"), "different expositions in which no counter went back"),
        (lambda o: setattr(o.scrapers[0], "most_series", 20_001), "most series"),
        (lambda o: o.clients.problems.append("garbage: nothing"), "other clients answered or cut off"),
        (lambda o: o.answers.append("/-/reload: 500"), "requests for control answered as they must"),
        (lacks(f"gpu_hpc_kernel_executions_total {GPU}"), "kernel executions counted"),
        (lambda o: o.truth.executions.update({"GPU-1": 1}), "kernel executions counted"),
        (lambda o: o.scrapers[0].gained.update({"gpu_hpc_xid_errors_total GPU-1": 1.0}), "Xids counted"),
        (lacks(f"gpu_hpc_xid_errors_total {GPU}"), "Xids counted"),
        (lacks('gpu_hpc_agent_records_total{result="kept"}'), "agents' records counted"),
        (lacks('gpu_hpc_agent_files_rejected_total{reason="torn"}'), "rejected agents' files counted"),
        (lacks("gpu_hpc_helper_restarts_total"), "helpers restarted counted"),
        (lacks('gpu_hpc_driver_errors_total{code="unknown"}'), "failed driver calls counted"),
        (lambda o: setattr(o, "windows", {GPU: Windows(1200, 1190)}), "seconds without windows, steady GPUs, most"),
        (lambda o: setattr(o, "windows", {GPU: Windows(1200, 1203)}), "seconds without windows, steady GPUs, most"),
        (lambda o: setattr(o, "after", replace(CALM, threads=33)), "threads more than before"),
        (lambda o: setattr(o, "after", replace(CALM, descriptors=17)), "descriptors more than before"),
        (lambda o: setattr(o, "after", replace(CALM, children=3)), "child processes more than before"),
        (lambda o: setattr(o, "status", 1), "exit status after SIGTERM"),
        (lambda o: o.left.append("process 1"), "files and processes left behind"),
        (lambda o: o.unended.append("job 1"), "series and rows of what has ended"),
        (lambda o: o.log.append("KeyError"), "log lines of errors in the exporter itself"),
        (lambda o: o.scrapers[0].seconds.extend([0.02] * 20), "scrape p99, text, gzip, ms"),
        (lambda o: o.clients.probes_s.extend([0.03] * 10), "event loop p99, ms"),
    ],
)
def test_a_check_fails(change: Callable[[Outcome], object], name: str) -> None:
    """For what it is about, and no other one does."""
    outcome = good()
    change(outcome)
    assert failed(outcome) == {name}
    assert name in report(outcome, list(checks(outcome)))


@pytest.mark.parametrize(
    ("key", "rise", "name"),
    [
        ("rss", 16.0, "RSS in a week's events, MiB"),
        ("threads", 14.0, "threads more in the end than after the warm-up"),
        ("descriptors", 14.0, "descriptors more in the end than after the warm-up"),
        ("children", 14.0, "child processes more in the end than after the warm-up"),
    ],
)
def test_what_rises_all_the_time(key: str, rise: float, name: str) -> None:
    """So much in a run that has the events of a week."""
    assert failed(good(**{key: rise})) == {name}
    assert failed(good(**{key: rise / 7})) == set()


def test_a_short_run_has_no_slope_but_a_bound() -> None:
    """What caches take at first is no leak; far more is."""
    outcome = good(60.0)
    outcome.after = replace(CALM, rss=CALM.rss + 200)
    assert failed(outcome) == {"RSS more than before, MiB"}


def test_a_step_is_not_a_slope_for_sure() -> None:
    """One step of a few MiB in the middle, as of an allocator, is within the doubt of the line."""
    points = [(float(n), 4.0 if n > 300 else 0.0) for n in range(600)]
    rise = slope(points)
    assert (
        rise.per_second * WEEK_S - rise.uncertainty * WEEK_S < 7 < rise.per_second * WEEK_S + rise.uncertainty * WEEK_S
    )


def test_slopes() -> None:
    """A line is itself; noise about a level is none; a few points tell nothing."""
    line = slope([(float(n), 0.5 * n) for n in range(100)])
    assert line.per_second == pytest.approx(0.5)
    assert line.uncertainty == pytest.approx(0, abs=1e-9)
    chance = Random(1)
    noise = slope([(float(n), chance.gauss(80, 1)) for n in range(1000)])
    assert abs(noise.per_second) < noise.uncertainty < 0.01
    assert slope([(0.0, 1.0), (1.0, 2.0)]).uncertainty == float("inf")


def feed(*scrapes: dict[str, float]) -> Counters:
    """Counters that have seen these."""
    counters = Counters()
    for samples in scrapes:
        counters.feed(samples)
    return counters


@pytest.mark.parametrize("suffix", ["total", "bucket", "count", "sum"])
def test_a_counter_that_goes_back(suffix: str) -> None:
    """Whatever form it has; a gauge may."""
    name = f'gpu_hpc_x_{suffix}{{gpu="0",uuid="GPU-0"}}'
    assert feed({name: 5.0}, {name: 4.0}).backward == [f"{name}: 5.0 to 4.0"]
    assert feed({name: 5.0}, {}, {name: 4.0}).backward != []
    assert feed({name: 5.0}, {name: 5.0}, {name: 6.0}).backward == []
    assert feed({"gpu_hpc_power_watts": 5.0}, {"gpu_hpc_power_watts": 4.0}).backward == []


def test_a_job_may_begin_anew_only_when_it_had_ended() -> None:
    """A scrape of its GPU and of agents without the series must lie between; what it then has is a gain."""
    name = 'gpu_hpc_kernel_executions_total{gpu="0",job="web",uuid="GPU-0"}'
    info, agents = 'gpu_hpc_gpu_info{gpu="0",uuid="GPU-0"}', 'gpu_hpc_agents{state="off"}'
    ended = {info: 1.0, agents: 0.0}
    assert feed({name: 5.0}, {name: 4.0}).backward != []
    for not_ended in ({info: 1.0}, {agents: 0.0}, {}):
        assert feed({name: 5.0}, not_ended, {name: 4.0}).backward != []
        assert feed({name: 5.0}, not_ended, {name: 6.0}).gained == {"gpu_hpc_kernel_executions_total GPU-0": 6.0}
    counters = feed({name: 5.0}, ended, ended, {name: 4.0}, {name: 6.0})
    assert (counters.backward, counters.begun_anew, counters.hidden) == ([], 1, 0)
    assert counters.gained == {"gpu_hpc_kernel_executions_total GPU-0": 11.0}
    counters = feed({name: 5.0}, ended, {name: 9.0})
    assert (counters.begun_anew, counters.hidden) == (1, 1)
    assert counters.gained == {"gpu_hpc_kernel_executions_total GPU-0": 14.0}


def test_gains_by_gpu_and_of_the_host() -> None:
    """Series of a GPU are one account; those of the host one each."""
    first = {'a_total{uuid="GPU-0",xid="1"}': 1.0, 'a_total{uuid="GPU-0",xid="2"}': 2.0, 'b_total{code="x"}': 3.0}
    assert feed(first, first).gained == {"a_total GPU-0": 3.0, 'b_total{code="x"}': 3.0}


def test_expositions_are_read() -> None:
    """In both formats; a series that stands twice and a line that is no sample are told."""
    assert samples_of('# HELP a b\na{b="c d"} 1\nb 2.5e+07\n# EOF\n') == {'a{b="c d"}': 1.0, "b": 2.5e7}
    for text in ("a 1\na 2\n", "a\n", "a 1\n\nb 2\n"):
        with pytest.raises(MalformedError):
            samples_of(text)


def test_what_cannot_be_true_within_a_scrape() -> None:
    """Classes add up to the time; a load that is half of it is not all of it."""
    samples = {
        'gpu_hpc_observed_seconds_total{uuid="G"}': 100.0,
        'gpu_hpc_bottleneck_seconds_total{class="idle",uuid="G"}': 40.0,
        'gpu_hpc_bottleneck_seconds_total{class="mixed",uuid="G"}': 60.0,
        'gpu_hpc_sm_active_seconds_total{uuid="G"}': 51.0,
    }
    assert list(disagreements(samples, 0.5)) == []
    more = {**samples, 'gpu_hpc_bottleneck_seconds_total{class="idle",uuid="G"}': 41.0}
    assert len(list(disagreements(more, 0.5))) == 1
    assert len(list(disagreements({**samples, 'gpu_hpc_sm_active_seconds_total{uuid="G"}': 53.0}, 0.5))) == 1


def test_a_week_has_its_events() -> None:
    """In the length of a week about as many as there are in a week; in a short run each once at least."""
    week = Counter(Calendar(WEEK_S, Random(1)).due(WEEK_S))
    assert week.keys() == EVENTS.keys()
    assert all(abs(week[kind] - count) <= 5 * count**0.5 for kind, count in EVENTS.items())
    assert Counter(Calendar(20, Random(1)).due(8)).keys() == EVENTS.keys()
    calendar = Calendar(WEEK_S, Random(1))
    calendar.end()
    assert list(calendar.due(WEEK_S)) == []


def test_quantiles() -> None:
    """By rank."""
    assert [quantile([1.0, 2.0, 3.0, 4.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 3.0, 4.0, 4.0]
