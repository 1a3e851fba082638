"""The dashboards' queries as Grafana asks them: variables looked up and substituted, panels repeated, results named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from prometheus_process import Prometheus

Json = dict[str, Any]
DASHBOARDS = Path(__file__).resolve().parent.parent.parent / "dashboards"
UIDS = ("gpu-hpc-bottleneck", "gpu-hpc-fleet", "gpu-hpc-job", "gpu-hpc-kernels", "gpu-hpc-exporter")

PAGE_PIXELS = 1800
"""Width of the browser's window: what decides the resolution of a panel."""
SCRAPE_S = 15
"""The scrape interval that the data source is told (`timeInterval`)."""
_NICE_S = (1, 2, 5, 10, 15, 20, 30, 60, 120, 300, 600, 900, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
_VARIABLE = re.compile(r"\$(\w+)|\$\{(\w+)(?::(\w+))?\}")
_LABEL_VALUES = re.compile(r"label_values\((?P<series>.+), (?P<label>\w+)\)")
_UNITS = {"s": 1, "m": 60, "h": 3600}

Choice = str | list[str]
"""What a person chose for a variable: one value or several."""
_NOTHING: Mapping[str, Choice] = MappingProxyType({})


@cache
def board(uid: str) -> Json:
    """A dashboard's JSON."""
    loaded: Json = json.loads((DASHBOARDS / f"{uid}.json").read_text(encoding="utf-8"))
    return loaded


def escaped(value: str) -> str:
    """A value inside a regular expression inside a PromQL string, as Grafana's Prometheus data source escapes it."""
    return re.sub(r"[$^*{}\[\]+?.()|]", r"\\\\\g<0>", value.replace("\\", "\\\\\\\\"))


@dataclass(frozen=True)
class Result:
    """What one query returned: rows as the HTTP API has them, `values` over time or `value` at the end."""

    target: Json
    expr: str
    rows: list[Json]
    step: int

    def name(self, row: Json) -> str:
        """The legend of a row."""
        labels: Mapping[str, str] = row["metric"]
        return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), self.target["legendFormat"])


class View:
    """A dashboard that a person has opened: time range in Unix seconds, and values chosen for some variables.

    A variable without a choice is what Grafana takes by itself: All, or the first value.
    """

    def __init__(
        self,
        prometheus: Prometheus,
        uid: str,
        start: int,
        end: int,
        chosen: Mapping[str, Choice] = _NOTHING,
    ) -> None:
        self.prometheus, self.board, self.start, self.end = prometheus, board(uid), start, end
        self.values: dict[str, str] = {}
        """How each variable reads in a query."""
        self.options: dict[str, list[str]] = {}
        for variable in self.board["templating"]["list"]:
            if variable["type"] == "query":
                self._choose(variable, chosen.get(variable["name"]))

    def _choose(self, variable: Json, chosen: Choice | None) -> None:
        """As Grafana: only variables that may have several values are escaped for a regular expression."""
        name = variable["name"]
        options = self.options[name] = self.label_values(variable["query"]["query"])
        if not variable["multi"]:
            value = chosen or options[0]
            assert isinstance(value, str), f"{name} has one value"
            self.values[name] = value.replace("\\", "\\\\").replace("'", "\\\\'")
        elif isinstance(chosen, str):
            self.values[name] = escaped(chosen)
        elif chosen is None and "allValue" in variable:
            self.values[name] = variable["allValue"]
        else:
            self.values[name] = f"({'|'.join(map(escaped, chosen or options))})"

    def label_values(self, query: str) -> list[str]:
        """The values of a variable's query."""
        match = _LABEL_VALUES.fullmatch(self.substituted(query, {}))
        assert match, query
        window: dict[str, str | float] = {"match[]": match["series"], "start": self.start, "end": self.end}
        found: list[str] = self.prometheus.api(f"label/{match['label']}/values", **window)
        return found

    def substituted(self, text: str, more: Mapping[str, str]) -> str:
        """A text with its variables replaced; one that nobody defines is an error."""
        values = {**self.values, **more}

        def value(match: re.Match[str]) -> str:
            assert match[3] is None, f"{match[0]}: no format is used in queries, the data source escapes by itself"
            return values[match[1] or match[2]]

        return _VARIABLE.sub(value, text)

    def panels(self) -> Iterator[tuple[Json, Mapping[str, str]]]:
        """Every panel, a repeated one once for each value, with the variables of its own."""
        for panel in self.board["panels"]:
            repeat = panel.get("repeat")
            for value in self.options[repeat] if repeat else [""]:
                own = {repeat: escaped(value)} if repeat else {}
                yield {**panel, "title": self.substituted(panel["title"], own)}, own

    def step(self, panel: Json) -> int:
        """Seconds between two points, as Grafana chooses them."""
        points = panel.get("maxDataPoints") or panel["gridPos"]["w"] * PAGE_PIXELS // 24
        wanted = max((self.end - self.start) / points, _seconds(panel.get("interval", f"{SCRAPE_S}s")))
        return next(nice for nice in _NICE_S if nice >= wanted)

    def expr(self, panel: Json, own: Mapping[str, str], target: Json) -> str:
        """A target's expression, ready to be asked."""
        step = self.step(panel)
        return self.substituted(
            target["expr"],
            {
                **own,
                "__interval": f"{step}s",
                "__interval_ms": str(step * 1000),
                "__rate_interval": f"{max(step + SCRAPE_S, 4 * SCRAPE_S)}s",
                "__range": f"{self.end - self.start}s",
            },
        )

    def results(self, panel: Json, own: Mapping[str, str]) -> list[Result]:
        """What a panel's queries return."""
        step = self.step(panel)
        exprs = [(target, self.expr(panel, own, target)) for target in panel["targets"]]
        return [
            Result(target, expr, self.at_end(expr) if target["instant"] else self.over_time(expr, step), step)
            for target, expr in exprs
        ]

    def at_end(self, expr: str) -> list[Json]:
        """Rows of an expression at the end of the time range."""
        rows: list[Json] = self.prometheus.api("query", query=expr, time=self.end)["result"]
        return rows

    def over_time(self, expr: str, step: int) -> list[Json]:
        """Rows of an expression over the time range."""
        start, end = (at // step * step for at in (self.start, self.end))
        rows: list[Json] = self.prometheus.api("query_range", query=expr, start=start, end=end, step=step)["result"]
        return rows


def _seconds(duration: str) -> int:
    return int(duration[:-1]) * _UNITS[duration[-1]]
