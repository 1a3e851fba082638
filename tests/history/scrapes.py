"""What Prometheus makes of an exposition: target labels, its own series, and copies that stand for other GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from history.player import Samples

JOB = "gpu-hpc-exporter"
"""The scrape job."""
_JOB_LABEL = re.compile(r'(?<![^,])job="((?:[^"\\]|\\.)*)"')
_UUID_LABEL = re.compile(r'(?<=[{,])uuid="[^"]+"')
_RISING = re.compile(r"[a-z0-9_]+(_total|_bucket|_count|_sum|_timestamp_seconds)(\{|$)")
"""Counters, and times of what happens again and again."""
_GPU_LABEL = re.compile(r'(?<=[{,])(gpu|index)="[0-9]+"')


@dataclass(frozen=True)
class Target:
    """A target of the scrape configuration."""

    instance: str
    job: str = JOB
    honor_labels: bool = True

    def store(self, series: str) -> str:
        """The series that Prometheus stores for an exposed one."""
        name, _, rest = series.partition("{")
        labels = rest.removesuffix("}")
        own = _JOB_LABEL.search(labels)
        if own is None:
            labels = _joined(labels, f'job="{self.job}"')
        elif not self.honor_labels:
            kept = _joined(f'job="{self.job}"', f'exported_job="{own[1]}"' if own[1] else "")
            labels = labels[: own.start()] + kept + labels[own.end() :]
        instance = f'instance="{self.instance}"'
        return f"{name}{{{_joined(labels, instance)}}}"

    def series(self, name: str) -> str:
        """One of the series that Prometheus itself adds, such as `up`."""
        return f'{name}{{instance="{self.instance}",job="{self.job}"}}'


def _joined(*labels: str) -> str:
    return ",".join(part for part in labels if part)


Rename = Callable[[str], str | None]
"""Gives an exposed series another name, or None to leave it out."""


def stored(target: Target, scrapes: Iterable[tuple[int, Samples]], rename: Rename = str) -> Iterator[str]:
    """Lines of OpenMetrics for a series of scrapes, `up` included."""
    names: dict[str, str | None] = {}
    for time, samples in scrapes:
        for series, value in samples:
            if series not in names:
                renamed = rename(series)
                names[series] = renamed and target.store(renamed)
            if name := names[series]:
                yield f"{name} {value} {time}\n"
        if rename("") is not None:
            yield from _own(target, time, len(samples))


def _own(target: Target, time: int, samples: int) -> Iterator[str]:
    yield f"{target.series('up')} 1 {time}\n"
    yield f"{target.series('scrape_duration_seconds')} 0.005 {time}\n"
    yield f"{target.series('scrape_samples_scraped')} {samples} {time}\n"
    yield f"{target.series('scrape_samples_post_metric_relabeling')} {samples} {time}\n"


def down(target: Target, times: Iterable[int]) -> Iterator[str]:
    """Lines of OpenMetrics for scrapes that failed."""
    for time in times:
        yield f"{target.series('up')} 0 {time}\n"


def as_gpu(number: int, uuid: str, *, with_host: bool = True) -> Rename:
    """Renames the series of a node's only GPU into those of another one; the host's stay, or are left out."""

    def renamed(series: str) -> str | None:
        if not _UUID_LABEL.search(series):
            return series if with_host else None
        return _UUID_LABEL.sub(f'uuid="{uuid}"', _GPU_LABEL.sub(rf'\g<1>="{number}"', series))

    return renamed


def prolonged(scrapes: Iterable[tuple[int, Samples]], seconds: int, times: int) -> Iterator[tuple[int, Samples]]:
    """Scrapes that span so many seconds, `times` as long: counters go on as they went, gauges repeat.

    So do counters that began anew within the time, as those of a job that comes back.
    """
    played = list(scrapes)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    renewed: set[str] = set()
    for _, samples in played:
        for series, value in samples:
            if _RISING.match(series):
                before, last[series] = last.get(series, 0.0), float(value)
                first.setdefault(series, last[series])
                if last[series] < before:
                    renewed.add(series)
    share = seconds / (played[-1][0] - played[0][0])
    growths = {series: (value - first[series]) * share for series, value in last.items() if series not in renewed}
    for number in range(times):
        for time, samples in played:
            later = [
                (series, str(float(value) + number * growths[series]) if growths.get(series) else value)
                for series, value in samples
            ]
            yield time + number * seconds, later
