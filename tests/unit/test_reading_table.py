"""When the slow readings of a GPU are asked for, and what is said of those that cannot be had."""

from __future__ import annotations

import logging

import pynvml
import pytest

from gpu_hpc_exporter.model import NS
from gpu_hpc_exporter.sources.nvml.library import Handle
from gpu_hpc_exporter.sources.nvml.readings import (
    BOARD_GROUPS,
    REPROBE,
    SECOND,
    VGPU_GROUPS,
    Group,
    ReadingTable,
    Values,
)


class Board:
    """A GPU with two readings, one of which fails as it is told to."""

    def __init__(self) -> None:
        self.code = 0
        self.fan = 31.0
        self.calls: list[str] = []
        groups = (Group("temperature", SECOND, self._temperature), Group("power", SECOND, lambda _: {}))
        self.table = ReadingTable(1, "GPU 0", groups, self.calls.append)

    def _temperature(self, _: Handle) -> Values:
        if self.code:
            raise pynvml.NVMLError(self.code)
        return {"temperature_gpu_celsius": self.fan}


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND])
def test_a07_what_is_not_supported_is_asked_again_after_an_hour(caplog: pytest.LogCaptureFixture, code: int) -> None:
    """A07: once, at the level of information, and absent until it is there; its neighbour goes on each second."""
    caplog.set_level(logging.INFO)
    board = Board()
    board.code = code
    for second in range(60):
        found = board.table.read(second * NS)
        assert (dict(found.values), found.errors) == ({}, ())
    assert board.calls.count("temperature") == 1
    assert board.calls.count("power") == 60
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "INFO",
        "GPU 0 does not offer temperature: its series are absent",
    )
    board.code = 0
    assert dict(board.table.read(REPROBE - 1).values) == {}
    assert dict(board.table.read(REPROBE).values) == {"temperature_gpu_celsius": 31}
    assert REPROBE == 3600 * NS


@pytest.mark.parametrize("code", [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_UNKNOWN])
def test_a07_what_was_read_once_does_not_stay(code: int) -> None:
    """A07: a reading that is refused from now on, for good or for a while, is absent and not what it was last."""
    board = Board()
    assert dict(board.table.read(0).values) == {"temperature_gpu_celsius": 31}
    board.code = code
    assert dict(board.table.read(NS).values) == {}


def test_what_cannot_be_true_is_counted_each_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """One line with the GPU, the reading and the number; the series is absent as long as it lasts."""
    board = Board()
    board.fan = 2**32 - 1
    for second in range(5):
        found = board.table.read(second * NS)
        assert (dict(found.values), found.problems) == ({}, (("temperature_gpu_celsius", "sentinel"),))
    (record,) = caplog.records
    assert record.getMessage() == (
        "GPU 0: temperature_gpu_celsius reads 4.29497e+09 (sentinel): it is absent and counted"
    )
    board.fan = 31
    assert dict(board.table.read(5 * NS).values) == {"temperature_gpu_celsius": 31}


@pytest.mark.parametrize("groups", [BOARD_GROUPS, VGPU_GROUPS])
def test_b08_utilization_is_sampled_every_second(groups: tuple[Group, ...]) -> None:
    """B08: the driver's own average is over a second at most: what is read less often misses whole bursts."""
    (period,) = [group.period_ns for group in groups if group.name == "utilization"]
    assert period <= NS
