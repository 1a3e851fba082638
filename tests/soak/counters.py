"""Counters as a Prometheus sees them: whether one went back, and what they have gained."""

from __future__ import annotations

import re
from collections.abc import Iterable

_COUNTER = re.compile(r"(?P<name>[a-z0-9_]+_(?:total|bucket|count|sum))(?:\{|$)")
_UUID = re.compile(r'[{,]uuid="(?P<uuid>[^"]*)"')
_JOB = re.compile(r'[{,]job="')
_MOST_TOLD = 20
_UNCLASSIFIED_S = 5.0
"""Windows of PM sampling wait so long for their class, if GPM's are late, while their values are counted at once."""


class MalformedError(ValueError):
    """An exposition that a Prometheus would refuse."""


def samples_of(text: str) -> dict[str, float]:
    """Values by series, as the lines name them. Raises MalformedError."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        series, _, value = line.rpartition(" ")
        if not series or series in samples:
            raise MalformedError(f"no sample, or the second one of its series: {line[:200]!r}")
        samples[series] = float(value)
    return samples


class Counters:
    """Follows all counters of one process's life from scrape to scrape.

    A series that goes and comes again must not come lower. Only those of a job's kernels begin anew at nothing, when
    all of the job had ended: they have then been missing while their GPU could be read and agents were looked at.
    """

    def __init__(self) -> None:
        self.backward: list[str] = []
        """What went back, the first of them."""
        self.gained: dict[str, float] = {}
        """By name and UUID, of series without one by the whole series; what one has at first is a gain too."""
        self.begun_anew = 0
        self.hidden = 0
        """Series that began anew and were not lower when they were seen again: no Prometheus can tell."""
        self._series: dict[str, _Series] = {}
        self._of_jobs: set[str] = set()
        """Series of jobs that have been there and not ended."""

    def feed(self, samples: dict[str, float]) -> None:
        """Take the samples of the next scrape."""
        self._note_ends(samples)
        for name, value in samples.items():
            series = self._series.get(name)
            if series is None:
                series = self._series[name] = _Series(name)
            if series.key:
                self._add(name, series, value)

    def _note_ends(self, samples: dict[str, float]) -> None:
        if not any(name.startswith("gpu_hpc_agents{") for name in samples):
            return
        readable = {_uuid_in(name) for name in samples if name.startswith("gpu_hpc_gpu_info{")}
        ended = {name for name in self._of_jobs - samples.keys() if self._series[name].uuid in readable}
        self._of_jobs -= ended
        for name in ended:
            self._series[name].has_ended = True

    def _add(self, name: str, series: _Series, value: float) -> None:
        before = series.value
        if series.is_of_job:
            self._of_jobs.add(name)
        if series.has_ended:
            self.begun_anew += 1
            self.hidden += 0 < before <= value
            series.has_ended, before = False, 0.0
        elif value < before:
            if len(self.backward) < _MOST_TOLD:
                self.backward.append(f"{name}: {before!r} to {value!r}")
            before = 0.0
        if value != before:
            self.gained[series.key] = self.gained.get(series.key, 0.0) + value - before
        series.value = value


def gains_of(name: str, uuid: str) -> str:
    """The key of what all of a GPU's series of a name have gained."""
    return f"{name} {uuid}"


class _Series:
    __slots__ = ("has_ended", "is_of_job", "key", "uuid", "value")

    def __init__(self, name: str) -> None:
        match = _COUNTER.match(name)
        self.uuid = _uuid_in(name)
        self.key = "" if match is None else gains_of(match["name"], self.uuid) if self.uuid else name
        self.is_of_job = bool(match and _JOB.search(name))
        self.has_ended = False
        self.value = 0.0


def _uuid_in(name: str) -> str:
    match = _UUID.search(name)
    return match["uuid"] if match else ""


def disagreements(samples: dict[str, float], sm_active: float) -> Iterable[str]:
    """What cannot be true within one scrape: classes do not add up, or a steady load is not what it is."""
    observed = _by_uuid(samples, "gpu_hpc_observed_seconds_total")
    classes = _by_uuid(samples, "gpu_hpc_bottleneck_seconds_total")
    active = _by_uuid(samples, "gpu_hpc_sm_active_seconds_total")
    for uuid, seconds in observed.items():
        if abs(classes.get(uuid, 0.0) - seconds) > 1e-6 * max(1.0, seconds):
            yield f"{uuid}: classes add up to {classes.get(uuid)!r} of {seconds!r} s observed"
        if uuid in active and abs(active[uuid] - sm_active * seconds) > sm_active * _UNCLASSIFIED_S + 1e-3 * seconds:
            yield f"{uuid}: SMs active for {active[uuid]!r} of {seconds!r} s observed"


def _by_uuid(samples: dict[str, float], wanted: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for name, value in samples.items():
        if name.startswith(wanted + "{"):
            uuid = _uuid_in(name)
            sums[uuid] = sums.get(uuid, 0.0) + value
    return sums
