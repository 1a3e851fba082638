"""Options that all tests share."""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

BUNDLE = "tests/bundle/"
LONG = (BUNDLE, "tests/e2e/test_soak.py")
"""What begins first, that nobody waits for it alone in the end: few tests that take minutes."""
FOREIGN = re.compile(r"(CUDA|NVTX|GPU_HPC_AGENT|COMPOSE)_.*")
"""The caller's variables that would reach the programs under test, and are none of theirs."""

with suppress(ImportError):  # machines with a GPU may lack it
    from hypothesis import HealthCheck, settings

    # The same examples each time; however long one takes: a machine that is busy is no finding.
    settings.register_profile(
        "tests",
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """Whatever the caller's environment has; a machine's GPUs are those that the caller means."""
    if config.getoption("markexpr") == "gpu":
        return
    for name in filter(FOREIGN.fullmatch, [*os.environ]):
        del os.environ[name]
    for name in ("no_proxy", "NO_PROXY"):  # what listens here is not asked by way of another host
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1")))


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

    config.option.loadscopereorder = False  # by the number of tests, which is not how long they take
    return FilesTogether(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long first, then files with many tests."""
    files = [item.nodeid.partition("::")[0] for item in items]
    counts = Counter(files)
    order = {file: (not file.startswith(LONG), -counts[file], file) for file in counts}
    items.sort(key=lambda item: order[item.nodeid.partition("::")[0]])


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` rewrites the golden expositions; the diff is the review."""
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden from what is served now")
