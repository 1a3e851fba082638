"""What the doctor says is what runbooks and rules say; and its own small parts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpu_hpc_exporter.config import Config, ConfigError, load_config
from gpu_hpc_exporter.doctor import remedies
from gpu_hpc_exporter.doctor.check import Check, Checks, in_time, worst
from gpu_hpc_exporter.doctor.prometheus import GROUPS, parse_server
from gpu_hpc_exporter.sources.kernels.layout import REASONS
from gpu_hpc_exporter.yaml_file import list_mistakes

ROOT = Path(__file__).parents[2]
RULES = ROOT / "alert-rules"
WANTED = {"configured", "stopped", "profiler", "budget", "no_context", ""}
"""Reasons of agents that do as they should."""


def rules() -> Iterator[dict[str, Any]]:
    for file in RULES.glob("*.yml"):
        yield from yaml.safe_load(file.read_text())["groups"]


def text_of(runbook: str) -> str:
    return " ".join((RULES / "runbooks" / f"{runbook}.md").read_text(encoding="utf-8").split())


def test_groups_are_those_of_the_rule_files() -> None:
    """N04: a file of rules that is forgotten is missed by name."""
    assert sorted(GROUPS) == sorted(group["name"] for group in rules())


@pytest.mark.parametrize("runbook", remedies.RUNBOOKS)
def test_remedies_are_those_of_the_runbooks(runbook: str) -> None:
    assert remedies.RUNBOOKS[runbook] in text_of(runbook)


def test_honor_labels_has_the_words_of_its_alert() -> None:
    (alert,) = (rule for group in rules() for rule in group["rules"] if rule.get("alert") == "GpuHpcHonorLabelsMissing")
    assert alert["annotations"]["description"] == remedies.HONOR_LABELS


def test_each_reason_of_an_agent_has_its_remedy() -> None:
    """K09: in the runbook's words."""
    assert remedies.AGENT_REASONS.keys() == {*REASONS, "no_heartbeat", "unknown"} - WANTED
    runbook = text_of("GpuHpcAgentPaused")
    for reason, remedy in remedies.AGENT_REASONS.items():
        assert f"`{reason}`" in runbook
        assert remedy in runbook


def test_a_check_is_one_line() -> None:
    """What drivers, files and servers say is bounded and cannot write to the terminal."""
    check = Check("driver", "ok", "a\nb\x1b[31m\t" + "x" * 5000)
    assert check.finding.startswith("a b\N{REPLACEMENT CHARACTER}[31m x")
    assert len(check.finding.encode()) <= 1024
    assert check.finding.isprintable()


def test_a_check_that_hangs_or_fails() -> None:
    """A12: what came before is told, then that nothing more comes; others go on."""
    forever = threading.Event()

    def hang() -> Checks:
        yield Check("one", "ok", "fine")
        forever.wait()

    def fail() -> Checks:
        yield from ()
        raise OSError("odd")

    assert [(c.name, c.status) for c in in_time("group", hang, 0.2)] == [("one", "ok"), ("group", "broken")]
    (failed,) = in_time("group", fail, 5)
    assert (failed.status, "odd" in failed.finding) == ("degraded", True)
    assert worst([Check("a", "ok", ""), failed]) == "degraded"
    forever.set()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://prometheus:9090", "http://prometheus:9090"),
        ("https://prometheus.example.org/p/", "https://prometheus.example.org:443/p"),
        ("http://[::1]:9090", "http://[::1]:9090"),
    ],
)
def test_urls(url: str, shown: str) -> None:
    assert parse_server(url).url == shown


@given(st.text(max_size=40) | st.from_regex(r"(https?://)?[^/]*@[^/]*/?", fullmatch=True))
def test_any_url_is_taken_or_refused(url: str) -> None:
    """One that may hold a password is refused, and not repeated."""
    try:
        parse_server(url)
        problem = ""
    except ConfigError as error:
        problem = str(error)
    if "@" in url:
        assert problem.startswith("--prometheus: user and password in a URL")


KEYS = st.sampled_from([*Config.__struct_fields__, "nonsense", "mode", "directory"])
TREES = st.recursive(
    st.text(max_size=5) | st.integers(), lambda inner: st.dictionaries(KEYS, inner) | st.lists(inner), max_leaves=8
)


@given(tree=st.dictionaries(KEYS, TREES))
def test_mistakes_begin_with_the_one_that_stops_the_start(
    tree: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A file with none can be loaded; else the first one told is what loading it tells."""
    file = tmp_path_factory.getbasetemp() / "tree.yaml"
    file.write_text(yaml.safe_dump(tree), encoding="utf-8")
    try:
        load_config(file)
        first = []
    except ConfigError as error:
        first = [str(error)]
    assert list_mistakes(file, Config)[:1] == first
