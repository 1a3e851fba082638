"""The landing page: nothing from outside becomes markup, and what is not known is not 0."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.exposition import clean_label
from gpu_hpc_exporter.model import Quantity, StateChange
from gpu_hpc_exporter.page import render_page
from gpu_hpc_exporter.samplers.fleet import Fleet, FleetSnapshot
from unit.objects import G0, GAUGE_WINDOW_NS, M1, NS, Clock, inventory, readings, running_fleet, window

IDLE: dict[Quantity, float] = {"sm_active": 0.0, "pipe_tensor": 0.0, "dram_active": 0.0}


class Page(HTMLParser):
    """Tags, attributes, table cells and the text of the page, as a browser would see them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.cells: list[str] = []
        self.is_in_cell = False
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)
        if tag == "td":
            self.cells.append("")
            self.is_in_cell = True

    def handle_endtag(self, tag: str) -> None:
        """Note a cell's end."""
        self.is_in_cell = self.is_in_cell and tag != "td"

    def handle_data(self, data: str) -> None:
        """Note text."""
        self.text += data
        if self.is_in_cell:
            self.cells[-1] += data


def page_of(snapshot: FleetSnapshot) -> Page:
    """The page of a snapshot."""
    return Page(render_page(snapshot, "/metrics"))


@given(
    st.sampled_from(["<script>alert(1)</script>", "'\" onload=x ", "</td></table><img src=x>", "&lt;", "\n\0\ud800"])
)
@settings(max_examples=10)
def test_hostile_names_stay_text(name: str) -> None:
    """Model, profile, UUID, reason and recording name from elsewhere are shown, never interpreted."""
    fleet = Fleet(Clock(), GAUGE_WINDOW_NS)
    fleet.put(inventory(replace(G0, name=name, profile=name, uuid=name)))
    fleet.put(StateChange(NS, "gpm", name, "failed", name))
    plain = page_of(running_fleet(G0).snapshot())
    for state in ("active", "failed"):
        fleet.put(StateChange(NS, "replay", "", state, name))
        page = page_of(fleet.snapshot())
        assert set(page.tags) <= set(plain.tags)
        assert page.attributes <= plain.attributes
        assert page.text.count(clean_label(name)) >= 4


def test_text_from_outside_is_bounded() -> None:
    """A name of a megabyte does not make a page of a megabyte."""
    fleet = running_fleet(replace(G0, name="N" * 1_000_000))
    assert len(render_page(fleet.snapshot(), "/metrics")) < 10_000


def test_what_was_not_measured_is_a_dash() -> None:
    """A GPU without windows and readings has dashes, not zeros."""
    cells = page_of(running_fleet(G0).snapshot()).cells
    assert cells[:10] == ["0", f"NVIDIA H200{G0.uuid}", "not measured", *["-"] * 7]


def test_what_was_measured_as_zero_is_zero() -> None:
    """An idle GPU has zeros where it was measured and dashes for the units that nobody measures."""
    fleet = running_fleet(replace(G0, links=()))
    fleet.put(readings(10, {"nvml_utilization_ratio": 1.0}))
    fleet.put(window(10, IDLE))
    cells = page_of(fleet.snapshot()).cells
    assert cells[2:10] == ["idle (100%)", "100%", "0%", "0%", "-", "0%", "-", "-"]


def test_the_class_that_took_most_of_the_time_is_named() -> None:
    """One busy second of four is not what the GPU mostly did."""
    fleet = running_fleet(replace(G0, links=()))
    for second in (7, 8, 9):
        fleet.put(window(second, IDLE))
    fleet.put(window(10, {"sm_active": 1.0, "pipe_tensor": 0.9, "dram_active": 0.1}))
    assert "idle (75%)" in page_of(fleet.snapshot()).cells


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (None, "No GPU can be read: starting"),
        (StateChange(NS, "nvml", "", "failed", "driver_not_loaded"), "No GPU can be read: driver_not_loaded"),
        (StateChange(NS, "replay", "", "active", "h200.jsonl.gz"), "Playing the recording h200.jsonl.gz: not this"),
    ],
)
def test_banner(change: StateChange | None, expected: str) -> None:
    """A page without GPUs says why, a page of a recording says that it is one."""
    fleet = Fleet(Clock(), GAUGE_WINDOW_NS)
    if change is not None:
        fleet.put(change)
    page = page_of(fleet.snapshot())
    assert expected in page.text
    # Without a driver nobody can say that it shows none.
    assert ("The driver shows no GPU." in page.text) == fleet.snapshot().is_up


def test_no_banner_while_all_is_well() -> None:
    """A healthy exporter on its own hardware raises no eyebrow."""
    assert "banner'" not in render_page(running_fleet(G0).snapshot(), "/metrics").partition("</style>")[2]
    assert "banner>" not in render_page(running_fleet(G0).snapshot(), "/metrics")


def test_sources_are_listed_with_state_and_reason() -> None:
    """Each source is shown per GPU label, or for the host, with why it is not active."""
    fleet = running_fleet(G0, replace(M1, parent_uuid=G0.uuid))
    fleet.put(StateChange(NS, "gpm", M1.uuid, "unsupported", "needs Hopper"))
    cells = page_of(fleet.snapshot()).cells
    assert cells[-8:] == ["nvml", "host", "active", "", "gpm", "0", "unsupported", "needs Hopper"]
