"""Options that all tests share."""

from __future__ import annotations

from typing import Any

import pytest

BUNDLE = "tests/bundle/"


@pytest.hookimpl(optionalhook=True)  # machines with a GPU may lack pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Tests of a file stay together where several run at a time: they share what it starts. So do the bundle's.

    Groups by marks, xdist's own way, do nothing with pytest 9.2: xdist 3.8 renames tests behind its back.
    """
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415  as said

    class FilesTogether(LoadScopeScheduling):  # type: ignore[misc]  # has no types
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return BUNDLE if file.startswith(BUNDLE) else file

    return FilesTogether(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites the golden expositions; the diff is the review."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what is served now")
