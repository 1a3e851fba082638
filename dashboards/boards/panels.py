"""Pieces of Grafana's dashboard JSON, with the defaults that all dashboards here share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

Json = dict[str, Any]
"""A JSON object of Grafana's; tests/dashboards_types checks it against Grafana's own types."""

DATASOURCE: Json = {"type": "prometheus", "uid": "${datasource}"}
TAG = "gpu-hpc"
COLUMNS = 24
"""Of Grafana's grid."""


def query(expr: str, legend: str = "__auto") -> Json:
    """Values over time."""
    return {"expr": expr, "legendFormat": legend, "range": True, "instant": False, "format": "time_series"}


def now(expr: str) -> Json:
    """Values at the end of the time range, labels as columns of a table."""
    return {"expr": expr, "legendFormat": "", "range": False, "instant": True, "format": "table"}


def latest(expr: str, legend: str = "__auto") -> Json:
    """Values at the end of the time range, one series each."""
    return {**now(expr), "legendFormat": legend, "format": "time_series"}


def steps(*bands: tuple[float | None, str]) -> Json:
    """Thresholds: each band begins at its value; the first one's is None."""
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in bands]}


def texts(values: Mapping[str, tuple[str, str]]) -> list[Json]:
    """Value mappings: text and color for each value."""
    options = {
        value: {"index": index, "text": text, "color": color}
        for index, (value, (text, color)) in enumerate(values.items())
    }
    return [{"type": "value", "options": options}]


def override(name: str, **properties: object) -> Json:
    """Properties of the field with this name; `custom__width` is the property custom.width."""
    changes = [{"id": key.replace("__", "."), "value": value} for key, value in properties.items()]
    return {"matcher": {"id": "byName", "options": name}, "properties": changes}


def colored(colors: Mapping[str, str]) -> list[Json]:
    """Each series has its own color wherever it appears."""
    return [override(name, color={"mode": "fixed", "fixedColor": color}) for name, color in colors.items()]


def link(title: str, uid: str, **variables: str) -> Json:
    """A data link to another dashboard that keeps time range and data source."""
    chosen = {"datasource": "${datasource}", **variables}
    parts = "&".join(f"var-{name}={value}" for name, value in chosen.items())
    return {"title": title, "url": f"/d/{uid}?${{__url_time_range}}&{parts}"}


def _panel(kind: str, title: str, description: str, targets: Iterable[Json], **rest: Any) -> Json:
    numbered = [
        {"refId": letter, "datasource": DATASOURCE, "editorMode": "code", **target}
        for letter, target in zip(ascii_uppercase, targets, strict=False)
    ]
    head = {"type": kind, "title": title, "description": description, "datasource": DATASOURCE}
    return {**head, "targets": numbered, **rest}


def _fields(unit: str, custom: Json, overrides: Sequence[Json], **defaults: Any) -> Json:
    return {"defaults": {"unit": unit, "custom": custom, **defaults}, "overrides": list(overrides)}


def timeseries(
    title: str,
    description: str,
    unit: str,
    *targets: Json,
    stack: bool = False,
    overrides: Sequence[Json] = (),
    **defaults: Any,
) -> Json:
    """Lines, or areas one on the other."""
    custom: Json = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 10, "showPoints": "never", "spanNulls": False}
    if stack:
        custom |= {"fillOpacity": 75, "lineWidth": 0, "stacking": {"mode": "normal", "group": "A"}}
    legend = {"displayMode": "table", "placement": "right", "showLegend": True, "calcs": ["mean", "max"]}
    return _panel(
        "timeseries",
        title,
        description,
        targets,
        fieldConfig=_fields(unit, custom, overrides, **{"min": 0, **defaults}),
        options={
            "legend": {**legend, "sortBy": "Mean", "sortDesc": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    )


def state_timeline(
    title: str, description: str, unit: str, *targets: Json, overrides: Sequence[Json] = (), **defaults: Any
) -> Json:
    """A row for each series whose color tells the value."""
    return _panel(
        "state-timeline",
        title,
        description,
        targets,
        maxDataPoints=300,
        fieldConfig=_fields(
            unit,
            {"fillOpacity": 85, "lineWidth": 0},
            overrides,
            **{"color": {"mode": "thresholds"}, **defaults},
        ),
        options={
            "rowHeight": 0.9,
            "showValue": "auto",
            "mergeValues": True,
            "alignValue": "left",
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
            "tooltip": {"mode": "single", "sort": "none"},
        },
    )


def heatmap(title: str, description: str, expr: str, *, unit: str, cells: str, **rest: Any) -> Json:
    """Buckets of a histogram over time; `cells` is the unit of what is counted in them."""
    target = {**query(expr, "{{le}}"), "format": "heatmap"}
    color = {"mode": "scheme", "scheme": "Oranges", "scale": "exponential", "exponent": 0.5, "steps": 64}
    return _panel(
        "heatmap",
        title,
        description,
        [target],
        maxDataPoints=150,
        fieldConfig=_fields(unit, {"scaleDistribution": {"type": "linear"}}, ()),
        options={
            "calculate": False,
            "cellGap": 1,
            "cellValues": {"unit": cells},
            "color": {**color, "fill": "dark-orange", "reverse": False, "min": 0, "max": 1},
            "exemplars": {"color": "rgba(255,0,255,0.7)"},
            "filterValues": {"le": 1e-9},
            "legend": {"show": True},
            "rowsFrame": {"layout": "auto"},
            "showValue": "never",
            "tooltip": {"mode": "single", "yHistogram": False},
            "yAxis": {"axisPlacement": "left", "unit": unit, "reverse": False},
        },
        **rest,
    )


def stat(title: str, description: str, unit: str, *targets: Json, fields: str = "", **defaults: Any) -> Json:
    """One number, or one text where `fields` is a pattern of a text field's name, colored by thresholds or mappings."""
    return _panel(
        "stat",
        title,
        description,
        targets,
        fieldConfig=_fields(unit, {}, (), **{"color": {"mode": "thresholds"}, **defaults}),
        options={
            "orientation": "horizontal",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": fields, "values": False},
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "center",
            "textMode": "value",
            "showPercentChange": False,
            "wideLayout": True,
            **({"text": {"valueSize": 22}} if fields else {}),
        },
    )


def table(
    title: str, description: str, columns: Sequence[Json], sort: str, *targets: Json, ascending: bool = False
) -> Json:
    """Results merged on their common labels; only `columns` are shown, in their order, the highest of `sort` first."""
    names = [column["matcher"]["options"] for column in columns]
    hidden = ["Time", "uuid", *(f"Value #{letter}" for letter in ascii_uppercase[: len(targets)])]
    organize = {
        "excludeByName": {name: True for name in hidden if name not in names},
        "indexByName": {name: index for index, name in enumerate(names)},
        "renameByName": {},
    }
    return _panel(
        "table",
        title,
        description,
        targets,
        fieldConfig=_fields(
            "short",
            {"align": "auto", "cellOptions": {"type": "auto"}, "inspect": False, "filterable": True},
            columns,
            color={"mode": "thresholds"},
            thresholds=steps((None, "text")),
        ),
        options={
            "showHeader": True,
            "cellHeight": "sm",
            "frameIndex": 0,
            "footer": {"show": False, "reducer": ["sum"], "countRows": False, "enablePagination": True, "fields": []},
            "sortBy": [{"displayName": sort, "desc": not ascending}],
        },
        transformations=[{"id": "merge", "options": {}}, {"id": "organize", "options": organize}],
    )


def column(name: str, title: str, unit: str = "", **properties: object) -> Json:
    """A column of a table, named by its label or by `Value #` and its target's letter."""
    shown = {"unit": unit} if unit else {}
    return override(name, displayName=title, **shown, **properties)


BAR: Json = {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"}
"""Cell of a table: a bar beside the number."""
COLORED: Json = {"type": "color-text"}
"""Cell of a table: text in the color of its threshold or mapping."""


def variable(name: str, label: str, values: str, *, multi: bool, hidden: bool = False, **rest: Any) -> Json:
    """A variable whose values Prometheus knows, asked again for each time range."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": {"query": values, "refId": name},
        "refresh": 2,
        "sort": 7,
        "multi": multi,
        "includeAll": multi,
        "hide": 2 if hidden else 0,
        **rest,
    }


DATASOURCE_VARIABLE: Json = {
    "type": "datasource",
    "name": "datasource",
    "label": "Data source",
    "query": "prometheus",
    "hide": 0,
    "refresh": 1,
    "multi": False,
    "includeAll": False,
}


def dashboard(uid: str, title: str, description: str, variables: Sequence[Json], rows: Sequence[Row]) -> Json:
    """The whole dashboard: rows from top to bottom, each a height and panels with their widths."""
    return {
        "uid": uid,
        "title": f"GPU HPC / {title}",
        "description": description,
        "tags": [TAG],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "refresh": "30s",
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "title": "GPU HPC",
                "tags": [TAG],
                "asDropdown": False,
                "icon": "external link",
                "includeVars": True,
                "keepTime": True,
                "targetBlank": False,
                "tooltip": "",
                "url": "",
            }
        ],
        "templating": {"list": [DATASOURCE_VARIABLE, *variables]},
        "panels": list(_placed(rows)),
    }


Row = tuple[int, Sequence[tuple[int, Json]]]
"""Height, and each panel with its width."""


def _placed(rows: Sequence[Row]) -> Iterable[Json]:
    y, number = 0, 0
    for height, panels in rows:
        x = 0
        for width, panel in panels:
            number += 1
            yield {"id": number, "gridPos": {"x": x, "y": y, "w": width, "h": height}, **panel}
            x += width
        y += height
