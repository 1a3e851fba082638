"""The verdict: right for each recorded workload, in the words of the alerts.

That its thresholds are the alerts', test_alert_thresholds.py holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpu_hpc_exporter.diagnosis.classify import CLASSES, BottleneckClass
from gpu_hpc_exporter.diagnosis.intensity import UNITS, Unit
from gpu_hpc_exporter.diagnosis.verdict import ADVICE, Seen, Verdict, verdict
from gpu_hpc_exporter.diagnosis.waits import Copying, Waits, waits
from gpu_hpc_exporter.model import (
    NS,
    RECORDABLES,
    CopyAmount,
    Durations,
    GpuActivity,
    KernelAmount,
    Recordable,
    StateChange,
)
from gpu_hpc_exporter.samplers.fleet import Fleet
from gpu_hpc_exporter.sources.replay import time_of
from gpu_hpc_exporter.web.answers import gpus
from history.phases import recording

RULES: Final = Path(__file__).parents[2] / "alert-rules"
ALERTS: Final[Mapping[str, Mapping[str, str]]] = {
    rule["alert"].removeprefix("GpuHpc"): rule["annotations"]
    for file in ("bottleneck.yml", "jobs.yml", "kernels.yml", "hardware.yml")
    for group in yaml.safe_load((RULES / file).read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
}

OF_PHASE: Final = {
    "idle": "idle",
    "gemm": "compute_bound",
    "copy": "dram_saturated",
    "h2d": "pcie_saturated",
    "d2h": "pcie_saturated",
    "h2d_pageable": "pageable_copies",
    "embedding_cpu_index": "small_copy_storm",
    "embedding_gpu_index": "launch_bound",
    "launch_bound": "launch_bound",
    "shared": "compute_bound",
    "train": "mixed",
    "inference_graph": "launch_bound",
}
NONE: Final = Waits(
    job="bert",
    executions=100.0,
    copying=Copying(),
    many_short=None,
    queue_s=None,
    host_wait=0.0,
    busy=0.5,
    exposed=None,
)
STARVED: Final = Seen({"starved": 1.0}, {"sm": 0.01}, sm_active=0.05, job="bert")
HUNG: Final = Seen(
    {"starved": 1.0},
    {"sm": 0.0, "dram": 0.0},
    sm_active=0.12,
    job="bert",
    nvml_utilization=1.0,
    job_gpus=8,
    deviation=0.001,
)
"""NCCL's kernels spin on an eighth of the SMs, and have for ten minutes."""
BESIDE: Final[Mapping[str, Seen]] = {
    "KernelJitter": replace(STARVED, waits=(replace(NONE, jittery=0.4, jittery_kernel="gather"),)),
    "MemoryNearlyFull": replace(STARVED, memory=0.98, memory_before=0.85),
}
"""What stands beside the verdict, whatever that is."""
CLASS_SHARE: Final[Mapping[str, Mapping[BottleneckClass, float]]] = {
    "starved": {"starved": 1.0},
    "compute_bound": {"compute_bound": 1.0},
    "idle": {"idle": 1.0},
}
EXAMPLES: Final[Mapping[str, Seen]] = {
    "DramSaturatedSmIdle": Seen({"dram_bound": 1.0}, {"dram": 0.95, "sm": 0.1}, job="bert"),
    "PcieSaturated": Seen({"pcie_bound": 1.0}, {"pcie": 0.95, "sm": 0.0}, to_gpu=5e10, to_host=0.0, job="bert"),
    "L2Thrashing": Seen({"l2_thrash": 1.0}, {"dram": 0.6, "sm": 0.1, "l2": 0.9}, l2_to_dram=0.9, job="bert"),
    "NvlinkSaturated": Seen({"nvlink_bound": 1.0}, {"nvlink": 0.95, "sm": 0.1}, job="bert"),
    "GpuStarved": STARVED,
    "SmallCopyStorm": replace(STARVED, waits=(replace(NONE, copying=Copying(count=2e4, bytes=2e7)),)),
    "PageableCopies": replace(STARVED, waits=(replace(NONE, copying=Copying(pageable_bytes=7e9, pinned_bytes=1e9)),)),
    "LaunchBound": replace(STARVED, waits=(replace(NONE, many_short=0.9),)),
    "LaunchQueueing": replace(STARVED, waits=(replace(NONE, queue_s=0.05),)),
    "SyncStorm": replace(STARVED, waits=(replace(NONE, host_wait=0.7),)),
    "CommunicationExposed": replace(STARVED, waits=(replace(NONE, exposed=0.5),)),
    "CollectiveHung": HUNG,
}
"""One for each alert whose summary a verdict repeats."""


@pytest.fixture(scope="module")
def verdicts() -> Mapping[str, Verdict]:
    """What the page says at the end of each phase of the recording."""
    now_ns, fleet = 0, Fleet(lambda: now_ns, 15 * NS)
    fleet.put(StateChange(0, "replay", "", "active"))
    found: dict[str, Verdict] = {}
    phases = [*recording().phases]
    current = ""
    for event in recording().events:
        while phases and phases[0].start * NS <= time_of(event):
            if current:
                row = gpus(fleet.snapshot(), fleet.recent_kernels(), fleet.windows).gpus[0].verdict
                found[current] = Verdict(row.cause, row.sentence, row.advice, row.alert or "")
            current = phases.pop(0).name
        now_ns = time_of(event)
        fleet.put(event)
    return found


def test_every_phase_is_judged(verdicts: Mapping[str, Verdict]) -> None:
    assert verdicts.keys() - {"between"} == OF_PHASE.keys()


@pytest.mark.parametrize(("phase", "cause"), OF_PHASE.items())
def test_each_recorded_workload_gets_its_verdict(verdicts: Mapping[str, Verdict], phase: str, cause: str) -> None:
    assert verdicts[phase].cause == cause, verdicts[phase]


def test_nvidia_smi_is_contradicted_where_it_misleads(verdicts: Mapping[str, Verdict]) -> None:
    """Copies read 100 % there; a GEMM does too, and rightly so."""
    claim = "it says 100% while 0.0% of the SMs had work"
    assert [phase for phase in OF_PHASE if claim in verdicts[phase].sentence] == ["h2d", "d2h"]


def words(text: str) -> list[str]:
    """The fixed words of a template or of a sentence: neither figures nor punctuation, nor where it is."""
    known = re.sub(r"\{\{ else[^}]*\}\}[^{]*\{\{ end \}\}", " ", " ".join(text.split()))  # what is said of the unknown
    known = re.sub(r"\{\{ else[^}]*\}\}[^{]*\{\{ end \}\}", " ", known)
    fixed = re.sub(r"\{\{.*?\}\}", " ", known)
    return [
        word
        for word in re.findall(r"[a-z][a-z'0-9-]*", fixed.lower())
        if word not in {"on", "gpu", "b", "s", "unknown"}
    ]


@pytest.mark.parametrize("alert", EXAMPLES)
def test_sentences_are_the_alerts_summaries(alert: str) -> None:
    """Every fixed word of the summary is there and in its order; only figures and the direction are filled in."""
    found = verdict(EXAMPLES[alert])
    assert found.alert == alert
    said = iter(words(found.sentence))
    missing = [word for word in words(ALERTS[alert]["summary"]) if word not in said]
    assert not missing, found.sentence


@pytest.mark.parametrize("alert", BESIDE)
@pytest.mark.parametrize("job", ["bert", ""])
def test_what_else_is_wrong_is_in_the_alerts_words(alert: str, job: str) -> None:
    """It stands beside the verdict, which stays what it was; the same for a GPU that computes as it should."""
    for name in ("starved", "compute_bound", "idle"):
        seen = replace(BESIDE[alert], class_share=CLASS_SHARE[name], job=job)
        found = verdict(seen)
        assert replace(found, also=()) == verdict(replace(seen, waits=(), memory=None))
        (other,) = found.also
        assert (other.alert, other.advice) == (alert, ADVICE[alert])
        said = iter(words(other.sentence))
        summary = [word for word in words(ALERTS[alert]["summary"]) if job or word != "in"]
        assert not [word for word in summary if word not in said], other.sentence


@pytest.mark.parametrize(
    "less",
    [
        {"deviation": None},
        {"deviation": 0.01},
        {"job_gpus": 1},
        {"job": ""},
        {"sm_active": 0.02},
        {"sm_active": 0.5},
        {"nvml_utilization": 0.9},
        {"intensity": {"sm": 0.05, "dram": 0.0}},
        {"intensity": {"sm": 0.0, "dram": 0.01}},
        {"intensity": {"sm": 0.0, "dram": 0.0, "nvlink": 0.01}},
        {"intensity": {"sm": 0.0}},
    ],
    ids=str,
)
def test_a_job_that_does_something_does_not_hang(less: Mapping[str, Any]) -> None:
    """Each of the signs must be there."""
    assert verdict(HUNG).alert == "CollectiveHung"
    assert verdict(replace(HUNG, **less)).alert != "CollectiveHung"


@pytest.mark.parametrize(("now", "before"), [(0.97, 0.85), (0.98, 0.8), (0.98, 0.976), (0.98, None), (None, 0.85)])
def test_memory_that_is_full_and_flat_is_no_finding(now: float | None, before: float | None) -> None:
    """A server that reserves all of it at its start is well; what is not known accuses nobody."""
    assert not verdict(replace(STARVED, memory=now, memory_before=before)).also


@pytest.mark.parametrize("key", ADVICE)
def test_advice_is_the_alerts_description(key: str) -> None:
    """To the letter; where the description depends on the direction, as one of its branches."""
    description = ALERTS[key.partition(" ")[0]]["description"]
    if "{{" in description:
        branches = re.split(r"\{\{.*?\}\}", description, flags=re.DOTALL)
        assert ADVICE[key] in branches
    else:
        assert " ".join(description.split()) == ADVICE[key]


@pytest.mark.parametrize("alert", [name for name in EXAMPLES if EXAMPLES[name].waits])
def test_half_of_it_is_no_cause(alert: str) -> None:
    """Below its threshold nothing but starvation is said."""
    (seen,) = EXAMPLES[alert].waits
    assert seen.copying is not None
    assert seen.host_wait is not None
    half = replace(
        seen,
        copying=replace(
            seen.copying, count=seen.copying.count and 99.0, pageable_bytes=seen.copying.pageable_bytes / 10
        ),
        many_short=seen.many_short and 0.3,
        queue_s=seen.queue_s and 0.01,
        host_wait=min(seen.host_wait, 0.1),
        exposed=seen.exposed and 0.3,
    )
    assert verdict(replace(EXAMPLES[alert], waits=(half,))).alert == "GpuStarved"


@given(
    shares=st.dictionaries(st.sampled_from(CLASSES), st.floats(0.01, 1.0)),
    intensity=st.dictionaries(st.sampled_from(UNITS), st.floats(0.0, 1.0)),
    active=st.none() | st.floats(0.0, 1.0),
    job=st.sampled_from(["", "bert", "{job} {0} %s"]),
)
def test_whatever_is_seen_there_is_a_sentence(
    shares: dict[BottleneckClass, float], intensity: dict[Unit, float], active: float | None, job: str
) -> None:
    """One line, whole, and of the job that has the GPU."""
    total = sum(shares.values())
    seen = Seen({name: part / total for name, part in shares.items()}, intensity, active, active, job=job)
    found = verdict(seen)
    assert found.sentence
    assert "\n" not in found.sentence
    assert found.cause == "not_measured" or not job or job in found.sentence or found.cause == "idle"
    assert not found.alert or found.alert in ALERTS


def test_what_is_not_measured_has_no_verdict() -> None:
    """It says why, and accuses nobody."""
    found = verdict(Seen({}, {}, gap="gpm no_permission: run as root"))
    assert (found.cause, found.alert) == ("not_measured", "")
    assert "run as root" in found.sentence


def activity(**more: object) -> GpuActivity:
    """A look of a second."""
    return GpuActivity("GPU-0", "bert", sums={"traced_ns": NS}, **more)  # type: ignore[arg-type]  # fields of it


def test_waits_are_per_second_that_was_looked() -> None:
    """Two looks of a second, between which a minute may lie."""
    copies = CopyAmount(4096, 10, NS // 4, (100, 100, 0, 0, 0, 0, 0))
    seen = activity(
        copies={"h2d_pageable": copies},
        kernels={"k": KernelAmount(2000, 2000, 2_000_000)},
        queue=Durations(3_000_000, (0, 0, 3, 0, 0, 0, 0, 0, 0)),
    )
    found = waits((seen, seen))
    assert found is not None
    assert found.copying == Copying(200, 4096, pageable_bytes=4096)
    assert found.executions == 2000
    assert (found.host_wait, found.queue_s, found.many_short, found.exposed) == (0.25, 0.001, 1.0, None)


def test_no_look_no_waits() -> None:
    """Neither without a report nor with one of no traced time."""
    assert waits(()) is None
    assert waits((GpuActivity("GPU-0", "bert"),)) is None


@pytest.mark.parametrize(
    ("unrecorded", "copying", "host_wait", "queue_s"),
    [
        (frozenset[Recordable](), Copying(200, 4096, pageable_bytes=4096), 0.35, 0.001),
        (frozenset[Recordable]({"copies"}), None, 0.1, 0.001),
        (frozenset[Recordable]({"waits"}), Copying(200, 4096, pageable_bytes=4096), None, 0.001),
        (frozenset[Recordable]({"launches"}), Copying(200, 4096, pageable_bytes=4096), 0.1, None),
        (frozenset(RECORDABLES), None, None, None),
    ],
    ids=["all recorded", "no copies", "no waits", "no launches", "kernels alone"],
)
def test_what_is_not_recorded_is_not_known(
    unrecorded: frozenset[Recordable], copying: Copying | None, host_wait: float | None, queue_s: float | None
) -> None:
    """Whatever stands there: a look that does not record it thins out none of the others' rates either."""
    seen = replace(
        activity(
            copies={"h2d_pageable": CopyAmount(4096, 10, NS // 4, (100, 100, 0, 0, 0, 0, 0))},
            queue=Durations(3_000_000, (0, 0, 3, 0, 0, 0, 0, 0, 0)),
        ),
        sums={"traced_ns": NS, "sync_stream_ns": NS // 10, "device_traced_ns": NS, "busy_ns": NS // 2},
        unrecorded=unrecorded,
    )
    blind = replace(activity(), unrecorded=frozenset(RECORDABLES))
    for activities in ((seen,), (seen, blind), (blind, seen)):
        found = waits(activities)
        assert found is not None
        assert (found.copying, found.host_wait, found.queue_s) == (copying, host_wait, queue_s)
        assert found.busy == (None if copying is None else 0.5)


def test_how_long_the_gpu_ran_is_known_where_all_processes_record_copies() -> None:
    """At most: two that ran half of the time may have taken turns."""
    seen = replace(activity(), sums={"traced_ns": NS, "device_traced_ns": NS, "busy_ns": NS // 2})
    for told, busy in (
        (seen, 0.5),
        (replace(seen, processes=2), 1.0),
        (replace(seen, processes=9), 1.0),
        (replace(seen, incomplete=frozenset[Recordable]({"copies"})), None),
        (replace(seen, incomplete=frozenset[Recordable]({"waits"})), 0.5),
    ):
        found = waits((told,))
        assert found is not None
        assert found.busy == busy


def test_what_is_not_recorded_accuses_nobody() -> None:
    """Neither of copies nor of waits; what kernels alone tell is told all the same."""
    blind = replace(NONE, copying=None, host_wait=None, queue_s=None)
    assert verdict(replace(STARVED, waits=(blind,))).alert == "GpuStarved"
    assert verdict(Seen({"pcie_bound": 1.0}, {"pcie": 0.95}, waits=(blind,))).alert == "PcieSaturated"
    assert verdict(replace(STARVED, waits=(replace(blind, many_short=0.9),))).alert == "LaunchBound"
