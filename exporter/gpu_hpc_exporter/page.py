"""The landing page: devices, sources and their states as plain HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from gpu_hpc_exporter import __version__
from gpu_hpc_exporter.diagnosis.intensity import Unit
from gpu_hpc_exporter.exposition import clean_label
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot
from gpu_hpc_exporter.samplers.totals import GpuSnapshot

_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; min-width: 100% }
th, td { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid #8884; white-space: nowrap }
td { font-variant-numeric: tabular-nums }
small { opacity: .7 }
.banner { padding: .6rem 1rem; border-left: 4px solid #d80; background: #d801 }
.down { border-color: #c22; background: #c221 }
"""

_UNITS: dict[Unit, str] = {"sm": "SM", "l2": "L2", "dram": "DRAM", "pcie": "PCIe", "nvlink": "NVLink"}


def render_page(snapshot: FleetSnapshot, telemetry_path: str) -> str:
    """The whole page. All text from outside is bounded and escaped."""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>gpu-hpc-exporter</title><style>{_STYLE}</style></head><body>"
        f"<h1>gpu-hpc-exporter {escape(__version__)}</h1>{_banner(snapshot)}"
        f"<p><a href='{escape(telemetry_path[1:])}'>metrics</a> · "
        "<a href='-/healthy'>healthy</a> · <a href='-/ready'>ready</a></p>"
        f"<h2>GPUs</h2>{_gpus(snapshot)}<h2>Sources</h2>{_sources(snapshot)}</body></html>"
    )


def _banner(snapshot: FleetSnapshot) -> str:
    if not snapshot.is_up:
        return f"<p class='banner down'>No GPU can be read: {_text(snapshot.down_reason)}</p>"
    replay = snapshot.host_state("replay")
    if replay is not None:
        return f"<p class=banner>Playing the recording {_text(replay.reason)}: not this machine's GPUs.</p>"
    return ""


def _gpus(snapshot: FleetSnapshot) -> str:
    if not snapshot.gpus:
        return "<p>The driver shows no GPU.</p>" if snapshot.is_up else "<p>None; the log says what to do.</p>"
    head = (
        "<tr><th rowspan=2>GPU<th rowspan=2>Model<th rowspan=2>Now, mostly<th rowspan=2>nvidia-smi"
        "<th rowspan=2>SM active<th colspan=5>Intensity</tr><tr>"
        f"{''.join(f'<th>{name}' for name in _UNITS.values())}</tr>"
    )
    return _table(head, (_gpu_row(snapshot, totals) for totals in snapshot.gpus))


def _gpu_row(snapshot: FleetSnapshot, totals: GpuSnapshot) -> list[str]:
    gpu = totals.gpu
    return [
        _text(snapshot.label(gpu.uuid)),
        f"{_text(f'{gpu.name} {gpu.profile}'.strip())}<br><small>{_text(gpu.uuid)}</small>",
        _text(_main_class(totals)),
        _percent(totals.readings.get("nvml_utilization_ratio")),
        _percent(totals.gauges.get("sm_active")),
        *(_percent(totals.intensities.get(unit)) for unit in _UNITS),
    ]


def _main_class(totals: GpuSnapshot) -> str:
    """The class that took the most time of the gauge window, with its share."""
    recent_ns = sum(totals.recent_class_ns.values())
    if not recent_ns:
        return "not measured"
    name, class_ns = max(totals.recent_class_ns.items(), key=lambda item: item[1])
    return f"{name} ({class_ns / recent_ns:.0%})"


def _sources(snapshot: FleetSnapshot) -> str:
    head = "<tr><th>Source<th>GPU<th>State<th>Why</tr>"
    cells = ([s.source, snapshot.label(s.uuid) or "host", s.state, s.reason] for s in snapshot.states)
    return _table(head, ([_text(cell) for cell in row] for row in cells))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _table(head: str, rows: Iterable[Sequence[str]]) -> str:
    """A table from a ready header and rows of ready, escaped cells."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead>{head}</thead><tbody>{body}</tbody></table></div>"


def _text(untrusted: str) -> str:
    return escape(clean_label(untrusted))
