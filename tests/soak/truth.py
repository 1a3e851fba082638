"""What has really happened to the node: the totals that the exporter's counters have to reach."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Truth:
    """Totals since the exporter's start.

    executions: of kernels, by the UUID of the GPU or instance. records: of agents, by what became of them. xids: by
    UUID. failed_readings: driver calls that answered the one code that nothing else answers. rejected: agents' files,
    by reason. happened: events by kind. released_s: how long the driver was closed on request.
    """

    executions: Counter[str] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)
    xids: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    failed_readings: int = 0
    helpers_killed: int = 0
    released_s: float = 0.0
    kernel_names: int = 0
