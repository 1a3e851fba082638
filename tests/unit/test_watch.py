"""Driver calls under way: which of them hang, for whom, and for how long."""

from __future__ import annotations

import pytest

from gpu_hpc_exporter.samplers.watch import CALL_DEADLINE_NS, LIBRARY_DEADLINE_NS, CallWatch, CallWatches, HungCall
from unit.objects import G0, G1, M1, NS

BEGAN = 100 * NS


@pytest.mark.parametrize(
    ("after_ns", "seconds"),
    [(0, None), (5 * NS, None), (5 * NS + 1, 5.000000001), (60 * NS, 60.0), (-NS, None)],
)
def test_a_call_hangs_only_after_its_deadline(after_ns: int, seconds: float | None) -> None:
    """Up to the deadline a call is slow, after it it hangs, with the whole time since it began."""
    watch = CallWatch((G0.uuid,), 5 * NS)
    watch.current = ("GPM sample", BEGAN)
    expected = [] if seconds is None else [HungCall(G0.uuid, "GPM sample", seconds)]
    assert watch.hung(BEGAN + after_ns) == expected


def test_a_thread_that_is_in_no_call_hangs_nowhere() -> None:
    """Neither before the first call nor after the last one, however long that was."""
    watch = CallWatch((G0.uuid,), 5 * NS)
    assert watch.hung(10**18) == []
    watch.current = ("GPM sample", BEGAN)
    watch.current = None
    watch.current = None
    assert watch.hung(10**18) == []


def test_the_next_call_has_its_own_deadline() -> None:
    """Many calls of four seconds are no hang, and the name is that of the call under way."""
    watch = CallWatch((G0.uuid,), 5 * NS)
    for number in range(5):
        watch.current = (f"call {number}", BEGAN + 4 * number * NS)
        assert watch.hung(BEGAN + 4 * (number + 1) * NS) == []
    assert watch.hung(BEGAN + 30 * NS) == [HungCall(G0.uuid, "call 4", 14.0)]


def test_a_hanging_thread_hangs_for_all_its_gpus() -> None:
    """One thread reads a GPU and its MIG instances: none of them is read while one call hangs."""
    watch = CallWatch((G1.uuid, M1.uuid), 5 * NS)
    watch.current = ("memory", BEGAN)
    assert [call.uuid for call in watch.hung(BEGAN + 6 * NS)] == [G1.uuid, M1.uuid]


def test_each_thread_has_its_own_watch() -> None:
    """Calls of all threads that hang are told, in the order of the watches; the others are not."""
    watches = CallWatches()
    library, first, second = watches.watch(""), watches.watch(G0.uuid), watches.watch(G1.uuid, M1.uuid)
    assert watches.hung(10**18) == ()
    second.current = ("memory", BEGAN)
    library.current = ("nvmlInit", BEGAN + NS)
    first.current = ("power", BEGAN + 9 * NS)
    assert watches.hung(BEGAN + 10 * NS) == (
        HungCall("", "nvmlInit", 9.0),
        HungCall(G1.uuid, "memory", 10.0),
        HungCall(M1.uuid, "memory", 10.0),
    )


def test_the_library_has_a_longer_deadline() -> None:
    """Opening the library may take as long as it takes to initialise every GPU; a call for one GPU may not."""
    watches = CallWatches()
    for watch in (watches.watch("", deadline_ns=LIBRARY_DEADLINE_NS), watches.watch(G0.uuid)):
        watch.current = ("call", BEGAN)
    assert watches.hung(BEGAN + CALL_DEADLINE_NS) == ()
    assert [call.uuid for call in watches.hung(BEGAN + CALL_DEADLINE_NS + 1)] == [G0.uuid]
    assert [call.uuid for call in watches.hung(BEGAN + LIBRARY_DEADLINE_NS + 1)] == ["", G0.uuid]


def test_a_dropped_watch_is_gone() -> None:
    """What a thread did last does not hang after the thread's end; other threads' calls stay."""
    watches = CallWatches()
    ended, other = watches.watch(G0.uuid), watches.watch(G0.uuid)
    for watch in (ended, other):
        watch.current = ("power", BEGAN)
    watches.drop(ended)
    assert watches.hung(BEGAN + 10 * NS) == (HungCall(G0.uuid, "power", 10.0),)
    watches.drop(other)
    assert watches.hung(BEGAN + 10 * NS) == ()
