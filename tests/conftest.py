"""Options that all tests share."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites the golden expositions; the diff is the review."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what is served now")
