"""METRICS.md has every family, or is not made."""

from __future__ import annotations

import pytest

from gpu_hpc_exporter import metrics, metrics_page
from gpu_hpc_exporter.exposition import Spec


def test_a_family_without_a_section_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the constant that somebody has just written, so that scripts/check shows what to do."""
    forgotten = Spec("gpu_hpc_forgotten_ratio", "gauge", "Nobody listed it.")
    monkeypatch.setattr(metrics, "FORGOTTEN", forgotten, raising=False)
    with pytest.raises(ValueError, match=r"^FORGOTTEN \(gpu_hpc_forgotten_ratio\) stands in none of metrics\.SECTIONS"):
        metrics_page.render()
