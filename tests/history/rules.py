"""What alert-rules/ says: alerts and recorded series, read as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

RULES = Path(__file__).parents[2] / "alert-rules"
RECORDED = (RULES / "owner.yml", RULES / "recording.yml")
"""Files of recording rules: they read the exporter's series alone."""


@dataclass(frozen=True)
class Rule:
    """An alert or a recorded series (`is_alert`), with the labels that its rule sets."""

    name: str
    expr: str
    labels: Mapping[str, str]
    is_alert: bool

    def __str__(self) -> str:
        return self.name


def files() -> list[Path]:
    """Every file that a user loads."""
    return sorted(RULES.glob("*.yml"))


def rules() -> Iterator[Rule]:
    """Every rule of every file."""
    for file in files():
        for group in yaml.safe_load(file.read_text())["groups"]:
            for rule in group["rules"]:
                name = rule.get("alert") or rule["record"]
                yield Rule(name, rule["expr"], rule.get("labels", {}), "alert" in rule)


def alerts() -> list[Rule]:
    """Every alert."""
    return [rule for rule in rules() if rule.is_alert]
