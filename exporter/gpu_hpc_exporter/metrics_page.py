"""Generates METRICS.md from the catalogue: `python -m gpu_hpc_exporter.metrics_page > METRICS.md`."""

from __future__ import annotations

import sys

from gpu_hpc_exporter import metrics
from gpu_hpc_exporter.exposition import Spec
from gpu_hpc_exporter.metrics import SECTIONS

_HEAD = """# Metrics

Generated from `exporter/gpu_hpc_exporter/metrics.py` by `python -m gpu_hpc_exporter.metrics_page`; a test keeps
it current. Names are a contract. Ratios are 0-1, units are base units, and a value that was not measured is
absent, never 0: `gpu_hpc_source_state` says why.

Ratios over any range: divide two counters, so that a pause is not a 0, for example

    rate(gpu_hpc_sm_active_seconds_total[5m])
      / on(instance,gpu,uuid) group_left() (rate(gpu_hpc_observed_seconds_total[5m]) > 0)
"""


def render() -> str:
    """The whole page. Raises ValueError for a family without a section: nobody could read of it."""
    listed = {spec.name for specs in SECTIONS.values() for spec in specs}
    for name, spec in vars(metrics).items():
        if isinstance(spec, Spec) and spec.name not in listed:
            raise ValueError(
                f"{name} ({spec.name}) stands in none of metrics.SECTIONS: put it where people look for it"
            )
    return _HEAD + "".join(_section(title, specs) for title, specs in SECTIONS.items())


def _section(title: str, specs: tuple[Spec, ...]) -> str:
    rows = "".join(_row(spec) for spec in specs)
    return f"\n## {title}\n\n| series | type | labels | meaning |\n|---|---|---|---|\n{rows}"


def _row(spec: Spec) -> str:
    meaning = " ".join(part for part in (spec.help, f"({spec.values})" if spec.values else "") if part)
    if spec.needs:
        meaning += f" **Needs {spec.needs}.**"
    labels = ", ".join(f"`{label}`" for label in spec.labels) or "none"
    return f"| `{spec.name}` | {spec.kind} | {labels} | {meaning} |\n"


if __name__ == "__main__":
    try:
        sys.stdout.write(render())
    except ValueError as error:
        sys.exit(f"metrics_page: {error}")
