"""The collector of a broker, and its pause."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from anabranch.runtime.collector import OLDEST, THRESHOLDS, Collector, collector_paused


def _fail_while_paused() -> None:
    with collector_paused():
        assert not gc.isenabled()
        raise KeyError


def test_nothing_is_collected_inside_and_again_afterwards_even_if_the_work_fails() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError):
        _fail_while_paused()
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()


# -- the collector of a broker ---------------------------------------------------------------------------------------


class Node:
    """An object that may refer to itself."""

    def __init__(self) -> None:
        self.other: Node | None = None


@pytest.fixture
def collector() -> Iterator[Collector]:
    gc.collect()
    made = Collector()
    with made.installed():
        yield made


def test_a_collection_of_the_oldest_generation_looks_at_no_survivor_of_an_earlier_one(collector: Collector) -> None:
    kept = [Node() for _ in range(5_000)]
    gc.collect()
    assert len(gc.get_objects(OLDEST)) < 100 and gc.get_freeze_count() > len(kept)
    kept.append(Node())
    looked_at: list[int] = []
    gc.callbacks.insert(0, lambda phase, info: looked_at.append(len(gc.get_objects(OLDEST))))
    try:
        gc.collect()
    finally:
        del gc.callbacks[0]
    assert max(looked_at) < 1_000


def test_few_objects_are_made_until_the_oldest_generation_is_collected(collector: Collector) -> None:
    made_until: list[int] = []
    kept: list[Node] = []
    collector._on_collection("stop", {"generation": OLDEST})
    before = collector._set_aside
    for _ in range(100_000):
        kept.append(Node())
        if collector._set_aside > before:
            made_until.append(collector._set_aside - before)
            before = collector._set_aside
    assert len(made_until) > 3
    assert max(made_until) <= 20_000


def test_cycles_that_become_garbage_after_they_were_set_aside_are_found_at_a_quiet_moment(collector: Collector) -> None:
    collector._count()
    node = Node()
    node.other = node
    there = weakref.ref(node)
    gc.collect()
    del node
    gc.collect()
    assert there() is not None
    grown = _grow(collector, 2.5)
    collector.look(quiet=False)
    assert there() is not None and not collector.completed
    collector.look(quiet=True)
    assert there() is None and collector.completed == 1
    collector.look(quiet=True)
    assert collector.completed == 1
    del grown


def test_a_process_that_is_never_quiet_collects_once_its_objects_have_quadrupled(collector: Collector) -> None:
    collector._count()
    grown = _grow(collector, 4.5)
    collector.look(quiet=False)
    assert collector.completed == 1
    del grown


def _grow(collector: Collector, factor: float) -> list[Node]:
    grown = [Node() for _ in range(int(collector._left * (factor - 1)))]
    gc.collect()
    return grown


def test_the_collector_of_others_is_left_as_it_was() -> None:
    before = gc.get_threshold(), list(gc.callbacks)
    with Collector().installed():
        assert gc.get_threshold() == THRESHOLDS
    assert (gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()) == (*before, 0)
