"""Options that all tests share."""

from __future__ import annotations

import pytest

BUNDLE = "tests/bundle/"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a file stay together where several run at a time: they share what it starts. So do the bundle's."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(BUNDLE if file.startswith(BUNDLE) else file))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites the golden expositions; the diff is the review."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what is served now")
