"""What jobs' kernels have done on each GPU, added up from reports, and a frozen copy of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from gpu_hpc_exporter.model import (
    ACTIVITY_SUMS,
    COPY_BUCKETS,
    DURATION_BUCKETS,
    NEEDED_FOR,
    NS,
    SUMS_WITH_COPIES,
    ActivitySum,
    AgentState,
    Category,
    CopyAmount,
    CopyKind,
    Durations,
    GpuActivity,
    KernelAmount,
    KernelReport,
    RecordResult,
)
from gpu_hpc_exporter.samplers.kernel_recent import RecentActivity, RecentReports

MAX_REPORT_AGE_NS: Final = 20 * NS
"""What was told of kernels vanishes when nobody has told it anew for so long: four times its period."""


@dataclass(frozen=True, slots=True)
class JobActivity:
    """What a job's kernels have done on a GPU since it was first seen; `now`: what the newest report says of now.

    What is not recorded now is not there, queue None; recorded again, it goes on from where it was.
    """

    uuid: str
    job: str
    kernels: Mapping[str, KernelAmount]
    durations: Mapping[Category, Durations]
    queue: Durations | None
    copies: Mapping[CopyKind, CopyAmount]
    sums: Mapping[ActivitySum, int]
    now: GpuActivity


@dataclass(frozen=True, slots=True)
class KernelSnapshot:
    """All of it at one moment. agents: None where no report is fresh; pids: as in KernelReport."""

    jobs: tuple[JobActivity, ...] = ()
    agents: Mapping[AgentState, int] | None = None
    reasons: tuple[str, ...] = ()
    overhead_ratio: float | None = None
    records: Mapping[RecordResult, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)
    pids: frozenset[int] | None = None


class KernelTotals:
    """Adds up reports. Not thread-safe: the fleet serialises access."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], _JobTotals] = {}
        self._records: dict[RecordResult, int] = {}
        self._rejected: dict[str, int] = {}
        self._report: KernelReport | None = None

    def add(self, report: KernelReport) -> None:
        """Add what was gained; what the report does not name is gone."""
        before, self._jobs = self._jobs, {}
        for activity in report.activities:
            key = (activity.uuid, activity.job)
            totals = self._jobs[key] = self._jobs.get(key) or before.get(key) or _JobTotals()
            totals.add(activity)
            totals.recent.add(report.time_ns, activity)
        for result, gain in report.records.items():
            self._records[result] = self._records.get(result, 0) + gain
        for reason, count in report.rejected.items():
            self._rejected[reason] = self._rejected.get(reason, 0) + count
        self._report = report

    def recent(self) -> Mapping[tuple[str, str], RecentActivity]:
        """Of each (GPU, job) what was told in the last minutes; for the live page, not for scrapes."""
        return {key: totals.recent.frozen() for key, totals in self._jobs.items()}

    def snapshot(self, now_ns: int) -> KernelSnapshot:
        """A frozen copy; empty where reports have stopped."""
        report = self._report
        if report is None or now_ns - report.time_ns > MAX_REPORT_AGE_NS:
            return KernelSnapshot()
        return KernelSnapshot(
            tuple(totals.frozen() for totals in self._jobs.values()),
            report.agents,
            report.reasons,
            report.overhead_ratio,
            self._records.copy(),
            self._rejected.copy(),
            report.pids,
        )


class _JobTotals:
    """The sums of one (GPU, job)."""

    def __init__(self) -> None:
        self._kernels: dict[str, KernelAmount] = {}
        self._durations: dict[Category, Durations] = {}
        self._queue = Durations(0, (0,) * DURATION_BUCKETS)
        self._copies: dict[CopyKind, CopyAmount] = {}
        self._sums: dict[ActivitySum, int] = dict.fromkeys(ACTIVITY_SUMS, 0)
        self.recent = RecentReports()

    def add(self, gained: GpuActivity) -> None:
        for name, amount in gained.kernels.items():
            self._kernels[name] = self._kernels.get(name, KernelAmount()) + amount
        for category, durations in gained.durations.items():
            have = self._durations.get(category)
            self._durations[category] = durations if have is None else have + durations
        self._queue += gained.queue
        for kind, copies in gained.copies.items():
            self._copies[kind] = self._copies.get(kind, _NO_COPIES) + copies
        for name, value in gained.sums.items():
            self._sums[name] += value
        self._now = gained

    def frozen(self) -> JobActivity:
        unrecorded = self._now.unrecorded

        def is_known(name: ActivitySum) -> bool:
            has_copies = name not in SUMS_WITH_COPIES or self._now.has_all_copies
            return has_copies and unrecorded.isdisjoint(NEEDED_FOR.get(name, ()))

        return JobActivity(
            self._now.uuid,
            self._now.job,
            self._kernels.copy(),
            self._durations.copy(),
            self._queue if "launches" not in unrecorded else None,
            self._copies.copy() if "copies" not in unrecorded else {},
            {name: value for name, value in self._sums.items() if is_known(name)},
            self._now,
        )


_NO_COPIES: Final = CopyAmount(0, 0, 0, (0,) * COPY_BUCKETS)
