"""Draws dashboards into pictures, about as Grafana shows them, from what their queries return."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MultipleLocator

from bundle.dashboard_queries import Choice, Json, Result, View
from history.fleet_data import TOUR_S as PHASE_S
from history.phases import names
from prometheus_process import Prometheus

COLUMNS, DPI = 24, 80
UNIT_WIDTH, UNIT_HEIGHT = 60, 34
"""Pixels of one unit of Grafana's grid."""
BACK, PANEL, EDGE, TEXT, FAINT = "#111217", "#181b1f", "#2c2f36", "#d5d6de", "#8e9096"
NAMED = {
    "green": "#73bf69",
    "red": "#f2495c",
    "orange": "#ff9830",
    "blue": "#5794f2",
    "purple": "#b877d9",
    "dark-red": "#c4162a",
    "text": TEXT,
}
PALETTE = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#8ab8ff", "#b877d9", "#ffb357", "#fade2a", "#37872d")
SMALL, BIG = 8, 17
"""Sizes of letters, in points."""


def draw(view: View, file: Path) -> None:
    """One dashboard into a PNG."""
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in view.board["panels"])
    width, height = COLUMNS * UNIT_WIDTH, (rows + 1) * UNIT_HEIGHT
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=BACK)
    FigureCanvasAgg(figure)
    page = Page(figure, width, height)
    chosen = ", ".join(f"{name}: {_shown(value)}" for name, value in view.values.items() if name not in _hidden(view))
    page.text(8, 21, f"{view.board['title']}    {chosen}", size=13, weight="bold")
    page.text(width - 8, 21, f"{_clock(view.start)} to {_clock(view.end)} UTC", size=9, ha="right", color=FAINT)
    for panel, own, box in _placed(view):
        page.frame(box, panel["title"])
        results = view.results(panel, own)
        if any(result.rows for result in results):
            DRAWERS[panel["type"]](page, box, view, panel, results)
        else:
            _draw_nothing(page, box, panel)
    figure.savefig(file, metadata={"Software": None})


def _hidden(view: View) -> set[str]:
    return {variable["name"] for variable in view.board["templating"]["list"] if variable["hide"]}


def _shown(value: str) -> str:
    return "All" if value == ".+" else value.replace("\\", "")


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M")


class Box:
    """A rectangle on the page in pixels, from the top left."""

    def __init__(self, x: float, y: float, width: float, height: float) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height

    def inner(self, left: float, top: float, right: float, bottom: float) -> Box:
        """What these margins leave."""
        return Box(self.x + left, self.y + top, self.width - left - right, self.height - top - bottom)


def _placed(view: View) -> Iterator[tuple[Json, Mapping[str, str], Box]]:
    """Panels with their variables and places; repeated ones share the place of the one that they repeat."""
    found = list(view.panels())
    for panel, own in found:
        grid = panel["gridPos"]
        twins = [other["title"] for other, _ in found if other["id"] == panel["id"]]
        width = grid["w"] * UNIT_WIDTH / len(twins)
        x = grid["x"] * UNIT_WIDTH + twins.index(panel["title"]) * width
        yield panel, own, Box(x + 3, (grid["y"] + 1) * UNIT_HEIGHT + 3, width - 6, grid["h"] * UNIT_HEIGHT - 6)


class Page:
    """The figure, in pixels from the top left."""

    def __init__(self, figure: Figure, width: int, height: int) -> None:
        self.figure, self.width, self.height = figure, width, height

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        """Text whose middle is at y."""
        style = {"size": SMALL, "color": TEXT, "va": "center", **style}
        self.figure.text(x / self.width, 1 - y / self.height, text, parse_math=False, **style)

    def rectangle(self, box: Box, color: str, edge: str = "none", alpha: float = 1.0) -> None:
        """A filled rectangle."""
        corner = (box.x / self.width, 1 - (box.y + box.height) / self.height)
        size = (box.width / self.width, box.height / self.height)
        face = to_rgba(color, alpha)
        self.figure.add_artist(Rectangle(corner, *size, facecolor=face, edgecolor=edge, zorder=-1))

    def frame(self, box: Box, title: str) -> None:
        """A panel's background and title."""
        self.rectangle(box, PANEL, EDGE)
        self.text(box.x + 8, box.y + 12, title, size=9, weight="bold")

    def axes(self, box: Box) -> Axes:
        """Axes in a box."""
        bounds = (box.x / self.width, 1 - (box.y + box.height) / self.height)
        axes = self.figure.add_axes((*bounds, box.width / self.width, box.height / self.height), facecolor=PANEL)
        axes.tick_params(colors=FAINT, labelsize=7, length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return axes


def properties(panel: Json, name: str) -> Json:
    """What the panel says of the field with this name: properties by their id."""
    defaults = panel["fieldConfig"]["defaults"]
    found = {key: value for key, value in defaults.items() if key != "custom"}
    found |= {f"custom.{key}": value for key, value in defaults["custom"].items()}
    for change in panel["fieldConfig"]["overrides"]:
        if change["matcher"]["options"] == name:
            found |= {item["id"]: item["value"] for item in change["properties"]}
    return found


def shown(value: str | float, field: Json) -> tuple[str, str]:
    """Text and color of a value by mappings, else by unit and thresholds."""
    key = value if isinstance(value, str) else f"{value:g}"
    for mapping in field.get("mappings", []):
        if key in mapping["options"]:
            return mapping["options"][key]["text"], color_of(mapping["options"][key]["color"])
    if isinstance(value, str):
        return value, TEXT
    return formatted(value, field.get("unit", "short"), field.get("decimals")), threshold_color(value, field)


def threshold_color(value: float, field: Json) -> str:
    """Color of the band that a value is in."""
    steps = field.get("thresholds", {}).get("steps", [])
    bands = [step["color"] for step in steps if step["value"] is None or value >= step["value"]]
    return color_of(bands[-1]) if bands else TEXT


def color_of(name: str) -> str:
    """A color that matplotlib knows."""
    return NAMED.get(name, name)


def formatted(value: float, unit: str, decimals: int | None = None) -> str:
    """A value with its unit, as short as Grafana writes it."""
    if unit == "percentunit":
        return f"{_digits(value * 100, decimals)} %"
    if unit.startswith("suffix:"):
        return f"{_digits(value, decimals)}{unit.removeprefix('suffix:')}"
    if unit == "celsius":
        return f"{value:.0f} °C"
    if unit == "s" and value < 1:
        return f"{_digits(value * 1e6)} µs" if value < 1e-3 else f"{_digits(value * 1000)} ms"
    base = 1024 if unit == "bytes" else 1000
    ending = {"Bps": "B/s", "bytes": "iB", "hertz": "Hz", "watt": "W", "s": "s", "cps": "/s"}.get(unit, "")
    power = 0
    while abs(value) >= base and unit != "none":
        value, power = value / base, power + 1
    prefix = ("", "K" if base == 1024 else "k", "M", "G", "T")[power]
    ending = "B" if unit == "bytes" and not power else ending
    return f"{_digits(value, decimals)} {prefix}{ending}".strip()


def _digits(value: float, decimals: int | None = None) -> str:
    """Three digits, or that many behind the point."""
    return f"{value:.{decimals}f}" if decimals is not None else f"{value:.3g}" if abs(value) < 999 else f"{value:.0f}"


def _cut(text: str, pixels: float) -> str:
    """What of a small text fits into so much space."""
    fitting = max(int(pixels / 5.2), 3)
    return text if len(text) <= fitting else text[: fitting - 1] + "…"


def _series(results: Sequence[Result]) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, times and values of every series, with a hole (NaN) where a step has no value."""
    for result in results:
        for row in result.rows:
            values = {int(at): float(value) for at, value in row["values"]}
            times = np.arange(min(values), max(values) + 1, result.step)
            yield result.name(row), times, np.array([values.get(int(at), np.nan) for at in times])


def _time_axis(axes: Axes, view: View, width: float) -> None:
    """Clock times below axes that are so many pixels wide."""
    axes.set_xlim(view.start, view.end)
    every = next(step for step in (300, 600, 1200, 1800, 3600, 7200) if (view.end - view.start) / step <= width / 45)
    ticks = np.arange(-(-view.start // every) * every, view.end + 1, every)
    axes.set_xticks(ticks, [_clock(float(tick)) for tick in ticks])


def draw_timeseries(page: Page, box: Box, view: View, panel: Json, results: Sequence[Result]) -> None:
    """Lines or stacked areas, and the legend's table beside them."""
    legend_width = min(0.36 * box.width, 250)
    plot = box.inner(62, 26, legend_width + 14, 22)
    axes = page.axes(plot)
    unit = panel["fieldConfig"]["defaults"]["unit"]
    legend: list[tuple[str, str, float, float]] = []
    floor: dict[int, float] = {}
    for number, (name, times, values) in enumerate(_series(results)):
        field = properties(panel, name)
        color = color_of(field.get("color", {}).get("fixedColor", PALETTE[number % len(PALETTE)]))
        legend.append((name, color, float(np.nanmean(values)), float(np.nanmax(values))))
        if field.get("custom.stacking", {}).get("mode") == "normal":
            below = np.array([floor.get(int(at), 0.0) for at in times])
            axes.fill_between(times, below, below + values, color=color, linewidth=0, alpha=0.85)
            floor |= {int(at): top for at, top in zip(times, below + values, strict=True) if not np.isnan(top)}
            continue
        style = "--" if "custom.lineStyle" in field else "-"
        axes.plot(times, values, color=color, linewidth=1.3, linestyle=style)
        if field["custom.fillOpacity"]:
            axes.fill_between(times, 0, values, color=color, linewidth=0, alpha=0.1)
    _time_axis(axes, view, plot.width)
    axes.grid(color=EDGE, linewidth=0.6)
    if scale := panel["fieldConfig"]["defaults"]["custom"].get("scaleDistribution"):
        axes.set_yscale("log", base=scale["log"])
    axes.set_ylim(panel["fieldConfig"]["defaults"].get("min"), panel["fieldConfig"]["defaults"].get("max"))
    axes.yaxis.set_major_formatter(lambda value, _: formatted(value, unit))
    if unit == "bytes" and axes.get_yscale() == "linear":
        axes.yaxis.set_major_locator(MultipleLocator(2 ** np.ceil(np.log2(axes.get_ylim()[1] / 6))))
    _legend(page, box.inner(box.width - legend_width, 24, 0, 4), unit, legend)


def _legend(page: Page, box: Box, unit: str, legend: Sequence[tuple[str, str, float, float]]) -> None:
    right = box.x + box.width - 8
    columns = [("max", right, 3), ("mean", right - 58, 2)][: 2 if box.width > 200 else 1]
    for title, x, _ in columns:
        page.text(x, box.y + 2, title, ha="right", color=FAINT, size=7)
    fitting = int((box.height - 10) // 15)
    for number, item in enumerate(sorted(legend, key=lambda item: -item[2])[:fitting]):
        y = box.y + 17 + number * 15
        page.rectangle(Box(box.x, y - 2, 12, 4), item[1])
        page.text(box.x + 17, y, _cut(item[0], box.width - 25 - len(columns) * 55), size=7)
        for _, x, index in columns:
            page.text(x, y, formatted(float(item[index]), unit), ha="right", size=7)


def draw_state_timeline(page: Page, box: Box, view: View, panel: Json, results: Sequence[Result]) -> None:
    """A row of colored cells for each series, with the value where it fits."""
    series = list(_series(results))
    longest = max(len(name) for name, _, _ in series)
    plot = box.inner(14 + 5.6 * longest, 26, 14, 22)
    axes = page.axes(plot)
    step = results[0].step
    for row, (name, times, values) in enumerate(series):
        field = properties(panel, name)
        for begin, end, value in _runs(times, values, lambda value, field=field: shown(value, field)[1]):  # type: ignore[misc]  # mypy does not infer a lambda with a default
            text, color = shown(value, field)
            axes.add_patch(Rectangle((begin, row + 0.05), end - begin + step, 0.9, color=color, linewidth=0))
            if (end - begin) / (view.end - view.start) * plot.width > 8 * len(text):
                red, green, blue, alpha = to_rgba(color)
                dark = red + green + blue < 1.6 or alpha < 0.5
                middle = ((begin + end + step) / 2, row + 0.5)
                ink = "#ffffff" if dark else "#1b1b1b"
                axes.annotate(text, middle, ha="center", va="center", size=7, color=ink)
    _time_axis(axes, view, plot.width)
    axes.set_ylim(len(series), 0)
    axes.set_yticks(np.arange(len(series)) + 0.5, [name for name, _, _ in series])


def _runs(times: np.ndarray, values: np.ndarray, color: Callable[[float], str]) -> Iterator[tuple[int, int, float]]:
    """Neighbours of one color: first and last time, and the first value."""
    run: tuple[int, int, float] | None = None
    for at, value in zip(times, values, strict=True):
        if run and (np.isnan(value) or color(value) != color(run[2])):
            yield run
            run = None
        if not np.isnan(value):
            run = (run[0], int(at), run[2]) if run else (int(at), int(at), float(value))
    if run:
        yield run


def draw_heatmap(page: Page, box: Box, view: View, panel: Json, results: Sequence[Result]) -> None:
    """Cells of a histogram: each bucket less the one below it."""
    (result,) = results
    plot = box.inner(50, 26, 12, 22)
    axes = page.axes(plot)
    unit = panel["options"]["yAxis"]["unit"]
    buckets = sorted(_series(results), key=lambda item: float(item[0]))
    times = buckets[0][1]
    cumulative = np.array([np.interp(times, at, values) for _, at, values in buckets])
    cells = np.diff(cumulative, axis=0, prepend=0)
    cells[cells <= panel["options"]["filterValues"]["le"]] = np.nan
    edges = np.append(times - result.step / 2, times[-1] + result.step / 2)
    scheme = panel["options"]["color"]["scheme"] + "_r"  # as Grafana does on a dark page
    scale = PowerNorm(panel["options"]["color"]["exponent"], vmin=0, vmax=1)
    axes.pcolormesh(edges, np.arange(len(buckets) + 1), cells, cmap=scheme, norm=scale)
    _time_axis(axes, view, plot.width)
    axes.set_yticks(np.arange(len(buckets)) + 1, [formatted(float(le), unit) for le, _, _ in buckets])


def _draw_nothing(page: Page, box: Box, panel: Json) -> None:
    """Why there is nothing."""
    lines = textwrap.wrap(panel["fieldConfig"]["defaults"].get("noValue", "No data"), max(int(box.width / 6), 1))
    for number, line in enumerate(lines):
        y = box.y + box.height / 2 + (number - (len(lines) - 1) / 2) * 14
        page.text(box.x + box.width / 2, y, line, ha="center", color=FAINT)


def draw_stat(page: Page, box: Box, _view: View, panel: Json, results: Sequence[Result]) -> None:
    """One value or text."""
    row = results[0].rows[0]
    pattern = panel["options"]["reduceOptions"]["fields"].strip("/^$")
    value = row["metric"][pattern] if pattern else float(row["value"][1])
    text, color = shown(value, properties(panel, pattern))
    lines = textwrap.wrap(text, max(int(box.width / (BIG * 0.62)), 1))
    for number, line in enumerate(lines):
        y = box.y + box.height / 2 + 8 + (number - (len(lines) - 1) / 2) * BIG * 1.7
        page.text(box.x + box.width / 2, y, line, size=BIG, ha="center", color=color)


def draw_table(page: Page, box: Box, _view: View, panel: Json, results: Sequence[Result]) -> None:
    """Rows merged on the labels that all results share, the columns that have an override."""
    columns = [(change["matcher"]["options"], properties(panel, change["matcher"]["options"])) for change in
               panel["fieldConfig"]["overrides"]]  # fmt: skip
    rows = merged(results)
    by = panel["options"]["sortBy"][0]
    key = next(name for name, field in columns if field["displayName"] == by["displayName"])
    rows.sort(key=lambda row: (row.get(key) is not None, row.get(key)), reverse=by["desc"])
    texts = [[shown(row.get(name, ""), field) for name, field in columns] for row in rows]
    lengths = [
        max(len(field["displayName"]), *(len(text[number][0]) for text in texts)) + 3
        for number, (_, field) in enumerate(columns)
    ]
    widths = [(box.width - 16) * length / sum(lengths) for length in lengths]
    fitting = int((box.height - 46) // 19)
    x = box.x + 8
    for number, (name, field) in enumerate(columns):
        page.text(x, box.y + 34, field["displayName"], weight="bold", color="#6e9fff")
        cell = field["custom.cellOptions"]["type"]
        top = max((row[name] for row in rows if isinstance(row.get(name), float)), default=0)
        for line, row in enumerate(rows[:fitting]):
            y = box.y + 54 + line * 19
            text, color = texts[line][number]
            if cell == "gauge" and isinstance(row.get(name), float):
                bar = max(widths[number] - 80, 10) * row[name] / (field.get("max") or top or 1)
                fixed = field["color"].get("fixedColor")
                page.rectangle(Box(x + 62, y - 6, bar, 12), color_of(fixed) if fixed else color, alpha=0.8)
            colored = cell == "color-text" or field.get("mappings")
            page.text(x, y, _cut(text, widths[number]), color=color if colored else TEXT)
        x += widths[number]


def merged(results: Sequence[Result]) -> list[Json]:
    """Grafana's merge transformation of tables: one row for each set of the labels that all results have."""
    shared = set.intersection(*({label for row in result.rows for label in row["metric"]} for result in results))
    rows: dict[tuple[str, ...], Json] = {}
    for result in results:
        name = f"Value #{result.target['refId']}" if len(results) > 1 else "Value"
        for row in result.rows:
            key = tuple(row["metric"][label] for label in sorted(shared))
            rows.setdefault(key, {}).update({**row["metric"], name: float(row["value"][1])})
    return list(rows.values())


DRAWERS: Mapping[str, Callable[[Page, Box, View, Json, Sequence[Result]], None]] = {
    "timeseries": draw_timeseries,
    "state-timeline": draw_state_timeline,
    "heatmap": draw_heatmap,
    "stat": draw_stat,
    "table": draw_table,
}


SHOWN: Mapping[str, Mapping[str, Choice]] = {
    "gpu-hpc-bottleneck": {"instance": "h200-tour"},
    "gpu-hpc-fleet": {},
    "gpu-hpc-job": {
        "job": "bert_finetune",
        "node": [f"h200-{name}" for name in ("tour", "gemm", "copy", "h2d", "launch_bound", "shared")],
    },
    "gpu-hpc-kernels": {"instance": "h200-tour"},
    "gpu-hpc-exporter": {"instance": "h200-demo"},
}
"""What is chosen in the pictures: where the phases of the recording can be seen, one after the other."""
TOUR_S = len(names()) * PHASE_S
"""How long the node h200-tour takes for all phases."""
STORY = "index-on-the-cpu.png"
STORY_PHASES = ("embedding_cpu_index", "embedding_gpu_index")
"""A loop, and the same one mended."""
STORY_PANELS = ("Copies", "Host time in CUDA")
STORY_HEAD_S = 2 * 60
"""In which rates still tell of the phase before."""


def draw_all(prometheus: Prometheus, end: int, directory: Path) -> list[Path]:
    """The pictures of the documentation, from the history that ends at this Unix time."""
    files = {uid: directory / f"{uid.replace('gpu-hpc', 'dashboard')}.png" for uid in SHOWN}
    for uid, file in files.items():
        draw(View(prometheus, uid, end - TOUR_S, end, SHOWN[uid]), file)
    draw(_story(prometheus, end), directory / STORY)
    return [*files.values(), directory / STORY]


def _story(prometheus: Prometheus, end: int) -> View:
    """Two panels of the kernels' dashboard, side by side, over the phases of the story."""
    first, last = map(names().index, STORY_PHASES)
    start = end - TOUR_S
    span = (start + first * PHASE_S + STORY_HEAD_S, start + (last + 1) * PHASE_S)
    view = View(prometheus, "gpu-hpc-kernels", *span, {"instance": "h200-tour", "job": "bert_finetune"})
    found = {panel["title"]: panel for panel in view.board["panels"]}
    width = COLUMNS // len(STORY_PANELS)
    placed = [
        {**found[title], "gridPos": {"x": number * width, "y": 0, "w": width, "h": 8}}
        for number, title in enumerate(STORY_PANELS)
    ]
    view.board = {**view.board, "panels": placed}
    return view
