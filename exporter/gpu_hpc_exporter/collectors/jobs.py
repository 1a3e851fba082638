"""Whose the GPUs are: what joins jobs to device series, and what a job has of each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from gpu_hpc_exporter import metrics
from gpu_hpc_exporter.exposition import Family
from gpu_hpc_exporter.model import NS, GpuJobs, JobOnGpu
from gpu_hpc_exporter.samplers.fleet import FleetSnapshot
from gpu_hpc_exporter.samplers.totals import GpuSnapshot, attributed_bytes


class JobsCollector:
    """Jobs in force. Of a GPU that cannot be read now, only whose it is."""

    name = "jobs"

    def collect(self, snapshot: FleetSnapshot) -> Iterator[Family]:
        """A job that ended is in no family, so that its series end with the next scrape."""
        parts = (self._shares(snapshot), self._processes(snapshot), self._sources(snapshot))
        yield from (family for family in chain([self._info(snapshot)], *parts) if family.samples)

    @staticmethod
    def _info(snapshot: FleetSnapshot) -> Family:
        info = metrics.JOB_INFO.family()
        for gpu in snapshot.known:
            for row in _rows(snapshot, gpu.uuid):
                job = row.job
                identity = (job.job, job.job_id, job.kind, job.user, job.namespace, job.pod, job.container)
                info.add(1, snapshot.label(gpu.uuid), gpu.uuid, *identity, job.rank, job.source)
        return info

    @staticmethod
    def _shares(snapshot: FleetSnapshot) -> Iterator[Family]:
        jobs = metrics.GPU_JOBS.family()
        processes = metrics.JOB_PROCESSES.family()
        memory = metrics.JOB_MEMORY_USED.family()
        sm = metrics.JOB_SM.family()
        libraries = metrics.PROCESS_LIBRARY_INFO.family()
        for uuid, known in _of_readable(snapshot):
            gpu = (snapshot.label(uuid), uuid)
            jobs.add(known.count, *gpu)
            for row in known.jobs:
                processes.add(row.processes, *gpu, row.job.job)
                if row.memory_bytes is not None:
                    memory.add(row.memory_bytes, *gpu, row.job.job)
                if row.sm_ratio is not None:
                    sm.add(row.sm_ratio, *gpu, row.job.job)
                for library in row.libraries:
                    libraries.add(1, *gpu, row.job.job, library.name, library.version)
        yield from (jobs, processes, memory, sm, libraries)

    @staticmethod
    def _processes(snapshot: FleetSnapshot) -> Iterator[Family]:
        counts = metrics.GPU_PROCESSES.family()
        unattributed = metrics.MEMORY_UNATTRIBUTED.family()
        for totals in snapshot.gpus:
            gpu = (snapshot.label(totals.gpu.uuid), totals.gpu.uuid)
            if totals.processes is not None:
                counts.add(len(totals.processes), *gpu)
            left = _unattributed(totals)
            if left is not None:
                unattributed.add(left, *gpu)
        yield from (counts, unattributed)

    @staticmethod
    def _sources(snapshot: FleetSnapshot) -> Iterator[Family]:
        ages = metrics.JOB_MAP_AGE.family()
        for source, told_ns in snapshot.jobs_told_ns.items():
            ages.add(max(0, snapshot.now_ns - told_ns) / NS, source)
        unknown = metrics.UNKNOWN_CGROUPS.family()
        for form, count in snapshot.unknown_cgroups.items():
            unknown.add(count, form)
        check = metrics.HONOR_LABELS_CHECK.family()
        check.add(1, "check")
        yield from (ages, unknown, check)


def _rows(snapshot: FleetSnapshot, uuid: str) -> tuple[JobOnGpu, ...]:
    known = snapshot.jobs.get(uuid)
    return known.jobs if known is not None else ()


def _of_readable(snapshot: FleetSnapshot) -> Iterator[tuple[str, GpuJobs]]:
    for totals in snapshot.gpus:
        known = snapshot.jobs.get(totals.gpu.uuid)
        if known is not None:
            yield totals.gpu.uuid, known


def _unattributed(totals: GpuSnapshot) -> float | None:
    used = totals.readings.get("memory_used_bytes")
    attributed = attributed_bytes(totals.processes)
    return None if used is None or attributed is None else max(0, used - attributed)
