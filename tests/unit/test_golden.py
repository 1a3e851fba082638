"""Byte-exact expositions of every recording, at the end of each of its phases.

pytest tests/unit/test_golden.py --update-golden
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpu_hpc_exporter.collectors import COLLECTORS
from gpu_hpc_exporter.config import DEFAULT_RECORDING
from gpu_hpc_exporter.exposition import TEXT, encode
from gpu_hpc_exporter.samplers.fleet import Fleet, FleetSnapshot
from gpu_hpc_exporter.sources.replay import Recording, play, time_of

HERE = Path(__file__).parent.parent
GOLDEN = HERE / "golden"
CAPTURES = (DEFAULT_RECORDING, *sorted((HERE / "captures").glob("*.jsonl.gz")))
GAUGE_WINDOW_NS = 15_000_000_000


def expositions(capture: Path) -> dict[str, bytes]:
    """Golden file name → exposition at the moment when a phase ends."""
    recording = Recording.load(capture)
    stem = capture.name.removesuffix(".jsonl.gz")
    starts = [round(phase.start * 1e9) for phase in recording.phases]
    ends = [*starts[1:], recording.duration_ns]
    moments = [(end, phase.name) for phase, end in zip(recording.phases, ends, strict=True) if phase.name != "between"]
    now = 0
    fleet = Fleet(lambda: now, GAUGE_WINDOW_NS)
    rendered = {}
    for event in play(recording, 0):
        while moments and time_of(event) > moments[0][0]:
            now, name = moments.pop(0)
            rendered[f"{stem}__{name}.prom"] = render(fleet.snapshot())
        now = time_of(event)
        fleet.put(event)
    for now, name in moments:  # noqa: B007  the fleet's clock reads it
        rendered[f"{stem}__{name}.prom"] = render(fleet.snapshot())
    return rendered


def render(snapshot: FleetSnapshot) -> bytes:
    """What is served of a snapshot, without what changes from run to run."""
    frozen = replace(snapshot, wall_ns=snapshot.now_ns)
    collectors = [collector for collector in COLLECTORS if collector.name != "process"]
    return encode((family for collector in collectors for family in collector.collect(frozen)), TEXT)


@pytest.mark.parametrize("capture", CAPTURES, ids=lambda path: path.name)
def test_exposition_is_the_golden_one(capture: Path, request: pytest.FixtureRequest) -> None:
    """The same recording gives the same bytes; a change of them is a change to review."""
    rendered = expositions(capture)
    assert rendered
    for name, body in rendered.items():
        if request.config.getoption("--update-golden"):
            (GOLDEN / name).write_bytes(body)
        assert (GOLDEN / name).exists(), f"no golden {name}: run with --update-golden and review the diff"
        assert body.decode() == (GOLDEN / name).read_text(), f"{name} differs"


def test_no_golden_is_left_over() -> None:
    """Every golden file belongs to a phase of a recording."""
    wanted = {name for capture in CAPTURES for name in expositions(capture)}
    assert {path.name for path in GOLDEN.glob("*.prom")} == wanted
