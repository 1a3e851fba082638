"""The README's story of a loop whose index is made on the CPU, held to the recording: its figures and its alerts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import yaml

from bundle.conftest import History
from bundle.dashboard_pictures import STORY, STORY_PHASES
from history.expected import BERT, EXPECTED
from history.fleet_data import Played, Run
from history.phases import looped
from history.rules import RECORDED, alerts, files
from history.scrapes import Target, stored

README = Path(__file__).resolve().parents[2] / "README.md"
TITLE = "## The case that made people buy profilers"
NODE = "node-7"
MINUTES = 75
"""Longer than any alert waits."""
LOOP, MENDED = STORY_PHASES


def story() -> str:
    """The section."""
    text = README.read_text(encoding="utf-8")
    assert text.count(TITLE) == 1
    return text.partition(TITLE)[2].partition("\n## ")[0]


FIGURES = re.findall(r"^\| .*? `([^|`]+)` \| (\S.*?) \| (\S.*?) \|$", story(), flags=re.MULTILINE)
"""Query, and what it says of the loop and of the mended one."""


def number(text: str) -> tuple[float, float]:
    """`19,859`, `18 %`, `1,024 B`: the value, and what one more in the last digit is."""
    digits, _, unit = text.replace(",", "").partition(" ")
    assert unit in ("", "%", "B")
    whole = 100 if unit == "%" else 1
    return float(digits) / whole, 10 ** -len(digits.partition(".")[2]) / whole


def firing(phase: str, directory: Path) -> Mapping[str, list[str]]:
    """By alert that fires when a GPU has done this phase for MINUTES: its summaries, as promtool renders them."""
    played = Played(Run(phase, partial(looped, phase), 0, MINUTES * 60, 60), directory / f"{phase}.txt")
    played.run.write(played.file)
    values: dict[str, dict[int, str]] = {}
    for line in stored(Target(NODE), played.scrapes()):
        series, value, time = line.rsplit(" ", 2)
        values.setdefault(series, {})[int(time) // 60] = f"{float(value):.9f}"
    groups = [
        group["name"]
        for file in sorted(files(), key=lambda file: file not in RECORDED)
        for group in yaml.safe_load(file.read_text())["groups"]
    ]
    test = {
        "interval": "1m",
        "input_series": [
            {"series": series, "values": " ".join(at.get(minute, "_") for minute in range(MINUTES + 1))}
            for series, at in values.items()
        ],
        "alert_rule_test": [
            {"eval_time": f"{MINUTES}m", "alertname": alert.name, "exp_alerts": []} for alert in alerts()
        ],
    }
    file = directory / f"{phase}.yml"
    document = {"rule_files": [str(file) for file in files()], "group_eval_order": groups, "tests": [test]}
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    # Nothing is expected: promtool says what it got instead.
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False, timeout=280)
    said = done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for part in said.split("alertname: ")[1:]:
        assert f'job="{BERT}"' in part, part
        found[part.partition(",")[0]] = re.findall(r'summary="((?:[^"\\]|\\.)*)"', part)
    assert found, said
    return found


@pytest.mark.parametrize(("query", "of_loop", "of_mended"), FIGURES)
def test_figures_are_those_of_the_recording(history: History, query: str, of_loop: str, of_mended: str) -> None:
    """Each query of the table says of the hour of each phase what the table says, to 3 percent or the last digit."""
    for phase, told in ((LOOP, of_loop), (MENDED, of_mended)):
        instance = f'instance="{history.phases[phase].instance}"'
        asked = re.sub(r"(gpu(?::|_hpc_)[\w:]+)(?:\{([^}]*)\})?", rf"\1{{{instance},\2}}", query)
        rows = history.prometheus.query_range(asked, history.end, history.end, 1)
        if told == "none":
            assert not rows, asked
            continue
        ((_, value),) = next(iter(rows.values()))
        wanted, digit = number(told)
        assert value == pytest.approx(wanted, rel=0.03, abs=1.01 * digit), f"{asked}: {value}"


def test_it_has_figures() -> None:
    """A table that nobody can read would hold nothing."""
    assert len(FIGURES) >= 8


@pytest.mark.parametrize("phase", STORY_PHASES)
def test_alerts_are_those_of_the_recording(phase: str, tmp_path: Path) -> None:
    """The loop fires all that are listed, in these words; mended, those of which the text says so are left."""
    told = dict(re.findall(r"^(GpuHpc\w+): (.*)$", story(), flags=re.MULTILINE))
    found = firing(phase, tmp_path)
    assert found.keys() == EXPECTED[phase][1]
    if phase == LOOP:
        assert found == {name: [summary] for name, summary in told.items()}
    else:
        left = re.search(r"What is left: (.*?)\.\s", story(), flags=re.DOTALL)
        assert left
        assert set(re.findall(r"GpuHpc\w+", left[1])) == found.keys()


def test_the_picture_is_there() -> None:
    """It is drawn with the dashboards'."""
    assert f"docs/img/{STORY}" in story()
