"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import fake_cupti
from e2e.machine import Start, run_machine
from fake_nvml import build


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake driver library, built once."""
    return build(tmp_path_factory.mktemp("fake_nvml"))


@pytest.fixture(scope="session")
def cupti(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake CUDA and CUPTI libraries, built once."""
    return fake_cupti.build(tmp_path_factory.mktemp("fake_cupti"))


@pytest.fixture
def start(tmp_path: Path, library: Path) -> Iterator[Start]:
    """Start a machine from a scenario's text and exporter flags; it ends with the test."""
    with ExitStack() as stack:
        yield lambda text, *flags: stack.enter_context(run_machine(tmp_path, library, text, *flags))
