"""The documents hold: links, commands, flags, paths, series, alerts, figures and settings in them are the code's own.

.venv/bin/python -m pytest tests/unit/test_docs.py --update-golden rewrites the table of docs/concepts.md that comes
from tests/golden and the recording.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import pytest
import yaml

from exporter_process import Samples, parse
from gpu_hpc_exporter import metrics
from gpu_hpc_exporter.cli import build_parser
from gpu_hpc_exporter.config import DEFAULT_RECORDING, Config, load_config
from gpu_hpc_exporter.diagnosis import thresholds as th
from gpu_hpc_exporter.diagnosis.classify import CLASSES, BottleneckClass
from gpu_hpc_exporter.diagnosis.intensity import UNITS
from gpu_hpc_exporter.exposition import Spec
from gpu_hpc_exporter.jobs.lookups import SlurmJob
from gpu_hpc_exporter.model import NS, Readings
from gpu_hpc_exporter.sources.replay import Recording
from gpu_hpc_exporter.sources.slurm.map_directory import MapDirectory
from unit.objects import G0, G1

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "exporter/gpu_hpc_exporter"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LISTED = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
PAGES = [
    ROOT / name
    for name in subprocess.run(LISTED, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    if (ROOT / name).is_file()
]
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)


@cache
def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return FENCE.sub("", read(page))


def blocks(page: Path, language: str = "") -> list[str]:
    """Its blocks of code in a language, without their indentation."""
    found = [match for match in FENCE.finditer(read(page)) if match["language"] == language]
    return [re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE) for match in found]


def code(page: Path) -> Iterator[str]:
    """All code, line by line: blocks with what is continued joined, and what stands between backquotes."""
    for match in FENCE.finditer(read(page)):
        yield from re.sub(r"\\\n\s*", " ", match["text"]).splitlines()
    yield from (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page)))


def section(page: Path, title: str) -> str:
    """What stands below a heading, without those of its kind or higher."""
    text = read(page)
    heading = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert heading, f"{page} has no section {title}"
    rest = text[heading.end() :]
    end = re.search(rf"^#{{1,{len(heading[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """Cells of each row of the tables in a text, headings left out."""
    lines = text.splitlines()
    tables = [line for line, after in pairwise([*lines, ""]) if line.startswith("|") and not after.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in tables if not line.startswith("|---")]


# --- links ------------------------------------------------------------------------------------------------------------


@cache
def anchors(page: Path) -> frozenset[str]:
    """Those of its headings, as Git hosts make them."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
        name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        found[name] = found.get(name, -1) + 1
        if found[name]:
            found[f"{name}-{found[name]}"] = 0
    return frozenset(found)


def test_the_pages_are_found() -> None:
    """Or everything below would hold of nothing."""
    assert {ROOT / "README.md", DOCS / "concepts.md", ROOT / "alert-rules/RUNBOOKS.md"} <= set(PAGES)
    assert "why-gpu-util-lies" in anchors(DOCS / "concepts.md")


@every_page
def test_links_and_pictures(page: Path) -> None:
    """Each goes to a file of the repository, in its spelling, and to a heading that it has."""
    for text, target in re.findall(r"\[([^\]]*)\]\(<?([^)\s>]+)>?\)", re.sub(r"`[^`]*`", "", prose(page))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = Path(os.path.normpath(page.parent / name)) if name else page
        assert file.is_relative_to(ROOT), f"{target} is outside of the repository"
        assert file.exists(), f"{target} is not there"
        is_name = re.fullmatch(r"[\w./-]+\.(md|ya?ml|service|sh|toml)", text)
        assert not is_name or Path(text).name == file.name, f"{text} leads to {target}"
        assert file in file.parent.iterdir(), f"{target} is spelt otherwise"
        assert not anchor or anchor in anchors(file), f"{target}: no such heading"


def test_every_picture_is_shown() -> None:
    """Or it is drawn for nobody."""
    shown = {name for page in PAGES for name in re.findall(r"\]\((?:docs/)?img/([\w.-]+)\)", read(page))}
    assert shown == {picture.name for picture in (DOCS / "img").iterdir()}


def test_the_index_has_every_page() -> None:
    """Who looks into docs finds all of it."""
    linked = set(re.findall(r"\]\(([\w.-]+)\)", read(DOCS / "README.md")))
    assert linked == {page.name for page in DOCS.glob("*.md")} - {"README.md"}


# --- commands, flags and paths ----------------------------------------------------------------------------------------


def flags_of(parser: argparse.ArgumentParser) -> frozenset[str]:
    return frozenset(flag for action in parser._actions for flag in action.option_strings)  # noqa: SLF001  no other way


@cache
def commands() -> Mapping[str, frozenset[str]]:
    """The flags of each command, of "" those that stand before all."""
    parser = build_parser()
    actions = parser._actions  # noqa: SLF001  argparse tells of them nowhere else
    (found,) = (action for action in actions if isinstance(action, argparse._SubParsersAction))  # noqa: SLF001  as above
    return {"": flags_of(parser), **{name: flags_of(command) for name, command in found.choices.items()}}


def calls(line: str) -> Iterator[str]:
    """What follows the command's name wherever a line of code calls it."""
    for match in re.finditer(r"(?:^|[\s/(])gpu-hpc-exporter(?=\s|$)", line):
        before = line[: match.start() + 1].split()
        is_a_name = line[match.start()] != "/" and before and before[-1].startswith("-") and before[-1] != "--"
        rest = re.split(r"\s(?:--|#|\|\|?|&&)(?:\s|$)|[;)]", line[match.end() :])[0]
        if not is_a_name and not rest.strip().startswith("gpu-hpc-exporter"):
            yield rest


@every_page
def test_commands_and_their_flags(page: Path) -> None:
    """As the parser has them; what stands in capitals is for the reader to fill in."""
    for line in code(page):
        for call in calls(line):
            words = [word.strip("[]") for word in call.split()]
            # The word behind a flag that stands alone is its value.
            bare = [word for last, word in pairwise(["", *words]) if not re.match(r"--[^=]+$", last)]
            name = next((word for word in bare if not word.startswith("-")), "")
            if not name.islower():
                name = ""
            assert name in commands(), f"`{line}`: no command {name}"
            given = set(re.findall(r"(?<!\S)\[?(--?[a-z][a-z.-]*)", call))
            assert given <= commands()[name] | commands()[""], f"`{line}`: {given - commands()[name]}"


@every_page
def test_dotted_flags(page: Path) -> None:
    """Those with a dot are ours wherever they stand, but for Prometheus's own."""
    ours = frozenset().union(*commands().values())
    named = {flag for line in code(page) for flag in re.findall(r"(?<!\S)--[a-z]+\.[a-z.-]+[a-z]", line)}
    assert named <= ours


@every_page
def test_scripts(page: Path) -> None:
    """Each is there, and can be run."""
    for name in re.findall(r"\bscripts/([a-z][a-z-]*)\b", read(page)):
        script = ROOT / "scripts" / name
        assert script.is_file(), name
        assert os.access(script, os.X_OK), name


@every_page
def test_paths(page: Path) -> None:
    """What looks like a path of the repository, or of the package, is one; history may name what has gone."""
    if page.name == "CHANGELOG.md":
        return
    top = (
        r"alert-rules|collectors|dashboards|deploy|diagnosis|docs|doctor|examples|exporter|jobs|samplers|sources|tests"
    )
    for line in code(page):
        for path, more in re.findall(rf"(?<![\w./-])((?:{top})/[\w./*-]*[\w*])([<…]?)", line):
            if more or "NAME" in path:
                continue
            places = (ROOT, PACKAGE, ROOT / "alert-rules", page.parent)
            assert any(list(place.glob(path)) for place in places), f"`{line}`: {path}"


# --- series, alerts, settings -----------------------------------------------------------------------------------------


@cache
def series() -> frozenset[str]:
    """Every name that a sample can have."""
    specs = [spec for spec in vars(metrics).values() if isinstance(spec, Spec)]
    histograms = [spec.name for spec in specs if spec.kind == "histogram"]
    ends = ("_bucket", "_sum", "_count")
    return frozenset({spec.name for spec in specs} | {name + end for name in histograms for end in ends})


@every_page
def test_series(page: Path) -> None:
    """Those of the catalogue; `gpu_hpc_pcie_…` stands for all that begin so."""
    others = {"gpu_hpc_exporter", "gpu_hpc_agent", "libgpu_hpc_agent"}
    for name, more in re.findall(r"(?<![\w-])(gpu_hpc_\w*\w)(…|\{\w+,\w+\}_)?", read(page)):
        if page.name == "CHANGELOG.md" or name in others:
            continue
        prefix = name.endswith("_") or more
        known = any(one.startswith(name) for one in series()) if prefix else name in series()
        assert known, name


@cache
def alerts() -> Mapping[str, tuple[Path, Mapping[str, Any]]]:
    """File and rule of every alert, by name."""
    found = {}
    for file in sorted((ROOT / "alert-rules").glob("**/*.yml")):
        document = yaml.safe_load(read(file)) if file.parent.name != "tests" else {}
        for rule in (rule for group in document.get("groups", ()) for rule in group["rules"] if "alert" in rule):
            found[rule["alert"]] = (file, rule)
    return found


@every_page
def test_alerts(page: Path) -> None:
    """Whoever is named by its whole name exists."""
    assert set(re.findall(r"\bGpuHpc[A-Z]\w+", read(page))) <= alerts().keys()


def test_the_table_of_alerts() -> None:
    """Each once, below its file, with the severities that it can have, its `for`, and its runbook."""
    page = DOCS / "alerts.md"
    told = {}
    file = ""
    for line in read(page).splitlines():
        named = re.match(r"`([\w./]+\.yml)`(?: and `([\w./]+\.yml)`)?[;,.]", line)
        file = f"{named[1]} {named[2]}" if named else file
        for link, severity, after, means, first in rows(line) if line.startswith("| [") else ():
            named = re.fullmatch(r"\[(\w+)\]\(\.\./alert-rules/runbooks/\1\.md\)", link)
            assert named, link
            assert named[1] not in told, f"{named[1]} is there twice"
            told[named[1]] = (severity, after)
            assert str(alerts()[named[1]][0].relative_to(ROOT / "alert-rules")) in file.split()
            assert means
            assert first
    assert told.keys() == alerts().keys()
    for name, (severity, after) in told.items():
        rule = alerts()[name][1]
        assert after == rule.get("for", "at once"), name
        words = r"\b(?:critical|warning|info)\b"
        assert set(re.findall(words, severity)) == set(re.findall(words, rule["labels"]["severity"])), name
        assert ("service" in severity) == ('"service"' in rule["labels"]["severity"]), name


def keys(kind: Any) -> Iterator[str]:
    """Every key of the configuration, those of its parts too."""
    for field in msgspec.structs.fields(kind):
        yield field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from keys(field.type)


def test_the_configuration_is_whole(tmp_path: Path) -> None:
    """What stands there without a comment is the default, and no key is missing."""
    (text,) = blocks(DOCS / "configuration.md", "yaml")
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    assert load_config(file) == Config()
    named = set(re.findall(r"^[ #]*(\w+):", text, re.MULTILINE))
    assert set(keys(Config)) <= named
    # What stands behind a comment is no less valid.
    file.write_text(re.sub(r"^( {0,4})# (?=\w+:|  [- ])", r"\1", text, flags=re.MULTILINE), encoding="utf-8")
    assert load_config(file).expected_gpus == 8
    assert load_config(file).jobs.rules


@pytest.mark.parametrize("name", ["jobs.md", "privileges.md", "quick-start.md"])
def test_fragments_of_the_configuration(name: str, tmp_path: Path) -> None:
    """Are taken."""
    fragments = blocks(DOCS / name, "yaml")
    assert fragments
    for text in fragments:
        file = tmp_path / "config.yaml"
        file.write_text(text, encoding="utf-8")
        assert load_config(file) != Config()


def test_the_prolog_of_slurm(tmp_path: Path) -> None:
    """What it writes is read, whatever Slurm tells it; the epilog removes it."""
    prolog, epilog = (text.replace("/run/gpu-jobs", str(tmp_path)) for text in blocks(DOCS / "jobs.md", "sh"))
    variables = {"SLURM_JOB_ID": "4242", "SLURM_JOB_USER": "ann", "SLURM_JOB_GPUS": "0,1"}
    for name in ("", "bert finetune"):
        env = {**variables, **({"SLURM_JOB_NAME": name} if name else {})}
        subprocess.run(["sh", "-euc", prolog.replace("$SLURM_JOB_NAME", "${SLURM_JOB_NAME-}")], env=env, check=True)
        jobs = MapDirectory(tmp_path).read((G0, G1)).jobs
        assert jobs == {"4242": SlurmJob("4242", name, "ann", device_uuids=(G0.uuid, G1.uuid))}
    subprocess.run(["sh", "-euc", epilog], env=variables, check=True)
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_dcgms_fields() -> None:
    """It has each field that our rules read; what stands beside it is a series with these labels and values."""
    table = rows(section(DOCS / "dcgm.md", "From DCGM's fields to the exporter's series"))
    fields = {field for cells in table for field in re.findall(r"`(\w+)`", cells[0])}
    counters = read(ROOT / "alert-rules/compat/dcgm-counters.csv")
    read_by_rules = re.findall(r"^(?:DCGM_FI_(?:DEV|PROF)_)?(\w+),", counters, re.MULTILINE)
    assert len(read_by_rules) > 20
    assert set(read_by_rules) <= fields
    catalogue = {spec.name: spec for spec in metrics.CATALOGUE}
    for _, told, _ in table:
        if told == "none":
            continue
        match = re.fullmatch(r"`(\w+)(?:\{(.+)\})?`", told)
        assert match, told
        spec = catalogue[match[1]]
        for label, value in re.findall(r'(\w+)="(\w+)"', match[2] or ""):
            assert label in spec.labels, told
            assert re.search(rf"\b{value}\b", spec.values), told


# --- architecture and concepts ----------------------------------------------------------------------------------------


def test_the_layers_are_those_that_are_enforced() -> None:
    """Line by line."""
    (contract,) = (one for one in PROJECT["tool"]["importlinter"]["contracts"] if one["type"] == "layers")
    enforced = [layer.replace("gpu_hpc_exporter.", "") for layer in contract["layers"]]
    assert enforced in [block.splitlines() for block in blocks(DOCS / "architecture.md")]


def test_the_threads_are_there() -> None:
    """Each by the name that it has in the process."""
    source = "".join(read(file) for file in PACKAGE.rglob("*.py"))
    told = [
        name
        for cells in rows(section(DOCS / "architecture.md", "Processes and threads"))
        for name in re.findall(r"`([a-z-]+)(?:N|…)?`", cells[1])
    ]
    assert len(told) > 10
    for name in told:
        assert re.search(rf"name(?:_prefix)?=f?\"{name}[\"{{]", source), name


def test_every_class_and_unit_is_told() -> None:
    """In the order in which they are decided."""
    page = DOCS / "concepts.md"
    assert [cells[0] for cells in rows(section(page, "Classes: where the time went"))] == [f"`{c}`" for c in CLASSES]
    told = {cells[0]: cells[1] for cells in rows(section(page, "Intensities"))}
    assert list(told) == [f"`{unit}`" for unit in UNITS]
    assert f"bytes over {th.DRAM_REACHABLE} of the peak" in told["`dram`"]
    assert f"less than {th.L2_MIN_TRAFFIC * 100:g} % of the DRAM peak" in told["`l2`"]
    assert all(f"over {th.LINK_REACHABLE} of the" in told[link] for link in ("`pcie`", "`nvlink`"))


@pytest.mark.parametrize(
    ("phase", "quantity", "told"),
    [
        ("h2d", "SM active", "host-to-GPU copies: {}"),
        ("gemm", "SM active", "a matrix product: {}"),
        ("copy", "SM active", "holds warps on {} of the SMs"),
        ("copy", "integer pipe", "uses {} of a pipe"),
        ("gemm", "tensor pipe", "the product uses {}"),
        ("copy", "DRAM", "moves {} of the peak of DRAM"),
        ("gemm", "occupancy", "has an occupancy of\n{}"),
    ],
)
def test_figures_of_the_concepts_are_the_measured_ones(phase: str, quantity: str, told: str) -> None:
    """Those of the table that compares the exporter with other tools."""
    measured = section(DOCS / "benchmarks.md", "What the exporter says of an H200, against what is true")
    (value,) = (cells[2] for cells in rows(measured) if cells[:2] == [phase, quantity])
    assert told.format(value) in read(DOCS / "concepts.md")


@pytest.mark.parametrize(
    ("page", "told", "measured"),
    [
        ("docs/concepts.md", "9.999985 to 9.999987 ms long", "9.999985-9.999987 ms"),
        ("docs/concepts.md", "(95 % interval 0.995 to 1.000)", "median 0.9967, 95 % interval 0.9946-0.9997"),
        ("docs/concepts.md", "0.9 to 1.2 % of a core with PM sampling, 3 ms a scrape", "| 0.87-1.06 | 1 | 76 + 129 |"),
        ("docs/concepts.md", "0.9 to 1.2 % of a core with PM sampling, 3 ms a scrape", "| 0.97-1.23 | 1 | 76 + 129 |"),
        ("docs/concepts.md", "0.9 to 1.2 % of a core with PM sampling, 3 ms a scrape", "| scrape, ms | 3.0 | 3.4 | |"),
        ("docs/concepts.md", "windows of 10 ms cost 1.6 to 2.0 %", "| 1.62-1.85 | 1.5 | 76 + 144 |"),
        ("docs/concepts.md", "windows of 10 ms cost 1.6 to 2.0 %", "| 1.86-2.04 | 1.5 | 76 + 144 |"),
        ("docs/concepts.md", "of 1 ms 7 %", "| 6.58-7.48 | 8 | 76 + 165 |"),
        ("docs/concepts.md", "an empty kernel took 4 µs", "of 4,216 ns"),
        ("docs/kernel-agent.md", "| 5 to 30 % | 33 s | 0.2 to 0.9 % |", "| 33 s | 0.0015, 0.0068, 0.0091 |"),
        (
            "docs/kernel-agent.md",
            "| 5 to 15 % | 14 s | 0.3 to 1.1 % |",
            "| 14 s | 0.0080, 0.0034, 0.0091, 0.0106, 0.0088 |",
        ),
        ("README.md", "0.9 to 1.2 % of one core", "| 0.97-1.23 | 1 | 76 + 129 |"),
        ("README.md", "0.997 of its rate (0.995 to 1.000)", "median 0.9967, 95 % interval 0.9946-0.9997"),
    ],
)
def test_costs_are_the_measured_ones(page: str, told: str, measured: str) -> None:
    """Whoever measures anew finds here what has to follow."""
    assert told in " ".join(read(ROOT / page).split())
    assert measured in " ".join(read(DOCS / "benchmarks.md").split())


BEGIN = "<!-- from tests/golden: .venv/bin/python -m pytest tests/unit/test_docs.py --update-golden -->\n"
END = "<!-- end -->"
WORKLOADS = {
    "idle": "nothing",
    "gemm": "matrix products",
    "copy": "copies within the GPU",
    "h2d": "copies from pinned memory to the GPU",
    "d2h": "copies to the host",
    "h2d_pageable": "copies from pageable memory to the GPU",
    "embedding_cpu_index": "lookups whose index is made on the CPU",
    "embedding_gpu_index": "the same, made on the GPU",
    "launch_bound": "launches of tiny kernels",
    "shared": "matrix products beside another job",
    "train": "training of a transformer",
    "inference_graph": "inference in a CUDA graph",
}


def table_of_the_recording() -> str:
    """Of the last 15 s of each workload: what nvidia-smi says, and what is true."""
    folder = ROOT / "tests" / "golden"
    found = {file.stem.split("__")[-1]: parse(read(file)) for file in folder.glob("nvidia-h200__*.prom")}
    nvidia_smi = nvidia_smi_of_the_recording()
    assert found.keys() == nvidia_smi.keys() == WORKLOADS.keys()
    header = "| workload | nvidia-smi | SMs with work | busiest pipe | DRAM of its peak | PCIe intensity | class |\n"
    lines = [header, f"|{'---|' * 7}\n"]
    before: dict[BottleneckClass, float] = dict.fromkeys(CLASSES, 0.0)
    for name, samples in sorted(found.items(), key=lambda item: item[1].one("gpu_hpc_observed_seconds_total")):
        ratios = (
            nvidia_smi[name],
            samples.one("gpu_hpc_sm_active_ratio"),
            samples.one("gpu_hpc_sm_utilization_ratio"),
            samples.one("gpu_hpc_dram_bandwidth_utilization_ratio"),
            samples.one("gpu_hpc_bottleneck_intensity_ratio", unit="pcie"),
        )
        now = seconds_by_class(samples)
        longest = max(CLASSES, key=lambda one: now[one] - before[one])
        before = now
        cells = [f"`{name}`: {WORKLOADS[name]}", *(f"{percent(ratio)} %" for ratio in ratios), f"`{longest}`"]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def nvidia_smi_of_the_recording() -> Mapping[str, float]:
    """The mean of what nvidia-smi showed, second by second, in the 15 s that gauges cover at each workload's end."""
    recording = Recording.load(DEFAULT_RECORDING)
    ends = [*(round(phase.start * NS) for phase in recording.phases[1:]), recording.duration_ns]
    shown = [
        (event.time_ns, event.values["nvml_utilization_ratio"])
        for event in recording.events
        if isinstance(event, Readings) and "nvml_utilization_ratio" in event.values
    ]
    return {
        phase.name: mean(ratio for time_ns, ratio in shown if end - 15 * NS < time_ns <= end)
        for phase, end in zip(recording.phases, ends, strict=True)
        if phase.name != "between"
    }


def seconds_by_class(samples: Samples) -> dict[BottleneckClass, float]:
    return {name: samples.one("gpu_hpc_bottleneck_seconds_total", **{"class": name}) for name in CLASSES}


def percent(ratio: float) -> str:
    """0 is what was exactly 0."""
    if 0 < ratio < 0.0001:
        return "under 0.01"
    return f"{ratio * 100:.0f}" if ratio >= 0.0095 or not ratio else f"{ratio * 100:.1g}"


def test_the_table_of_the_recording(request: pytest.FixtureRequest) -> None:
    """That of docs/concepts.md is what tests/golden, and so the recording, says."""
    page = DOCS / "concepts.md"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    told, _, after = rest.partition(END)
    assert after
    if request.config.getoption("--update-golden"):
        page.write_text(f"{before}{BEGIN}{table_of_the_recording()}{END}{after}", encoding="utf-8")
        told = table_of_the_recording()
    assert told == table_of_the_recording()
