"""Prometheus's own tool takes the rules and runs their tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

RULES = Path(__file__).parents[2] / "alert-rules"
TESTS = sorted((RULES / "tests").glob("*.yml"))


def promtool(*arguments: str | Path) -> None:
    """Run promtool, whose output is the failure."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", sorted(RULES.glob("*.yml")), ids=lambda path: path.name)
def test_rules_are_valid(file: Path) -> None:
    """Each file of rules is one that Prometheus loads, and has a file of tests."""
    promtool("check", "rules", file)
    assert (RULES / "tests" / file.name).exists()


@pytest.mark.parametrize("file", TESTS, ids=lambda path: path.name)
def test_rules_do_what_their_tests_say(file: Path) -> None:
    """`promtool test rules`."""
    promtool("test", "rules", file)
