"""tests/FIELD_CASES.md says which tests are whose case, and the tests say the same."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "tests" / "FIELD_CASES.md").read_text(encoding="utf-8")
CASES, BY_HAND = TABLE.split("## On hardware")
ROWS = {
    case: (re.findall(r"`([^`]+)`", tests), note.strip())
    for case, tests, note in re.findall(r"^\| ([A-Z]\d\d) \| [^|]+ \|([^|]*)\|([^|]*)\|$", CASES, re.MULTILINE)
}
LEAD = re.compile(r"(?:(?:[A-Z]\d\d|DESIGN [\d.]+)(?:, |: ))+")


def python_tests(file: Path) -> Iterator[tuple[str, set[str]]]:
    """Each test of a file of Python and the cases that its name or the start of its docstring names."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            lead = LEAD.match(ast.get_docstring(node) or "")
            named = re.findall(r"(?<=_)[a-z]\d\d(?=_)", node.name)
            yield node.name, {*map(str.upper, named), *re.findall(r"[A-Z]\d\d", lead[0] if lead else "")}


def rule_tests(file: Path) -> Iterator[tuple[str, set[str]]]:
    """Each test of promtool's and the cases that its name names."""
    for name in re.findall(r'^  - name: "?(.+?)"?$', file.read_text(encoding="utf-8"), re.MULTILINE):
        yield name, set(re.findall(r"\b[A-Z]\d\d\b", name))


@cache
def named() -> dict[str, set[str]]:
    """Every test that there is, as the table writes it, and the cases that it names."""
    python = [(file, test) for file in (ROOT / "tests").glob("*/test_*.py") for test in python_tests(file)]
    rules = [(file, test) for file in (ROOT / "alert-rules" / "tests").glob("*.yml") for test in rule_tests(file)]
    return {f"{file.relative_to(ROOT)}::{name}": cases for file, (name, cases) in (*python, *rules)}


def test_every_row_is_read() -> None:
    """No case is there twice, and none is written so that it would not be looked at."""
    written = re.findall(r"^\| ([A-Z]\d\d)", CASES, re.MULTILINE)
    assert written == sorted(ROWS)
    assert "A01" in ROWS


@pytest.mark.parametrize("case", ROWS)
def test_the_case_has_tests_that_name_it(case: str) -> None:
    """Or the table says why not: what does not apply, and what is open."""
    tests, note = ROWS[case]
    assert tests or note.startswith(("not applicable: ", "open: "))
    assert re.fullmatch(r"((not applicable|open): \S.+|on hardware|)", note), "a remark of another kind"
    assert [test for test in tests if case not in named().get(test, set())] == []
    assert not (note.startswith("not applicable") and any(case in cases for cases in named().values()))


def test_the_cases_of_the_tests_are_listed() -> None:
    """A test that names a case nobody knows is of another one."""
    assert {case for cases in named().values() for case in cases} <= ROWS.keys()


def test_what_is_done_by_hand_has_a_command() -> None:
    """Cases with the note are those of the second table."""
    commands = re.findall(r"^\| ([A-Z]\d\d) \| [^|]+ \| (`.+?`.*?) \| [^|]+ \|$", BY_HAND, re.MULTILINE)
    assert {case for case, _ in commands} == {case for case, (_, note) in ROWS.items() if "on hardware" in note}
    assert len(commands) == BY_HAND.count("\n| ") - 1, "a row is not read"
    for file in re.findall(r"(?:tests|deploy)/[\w/.-]+", BY_HAND):
        assert (ROOT / file).exists(), file
