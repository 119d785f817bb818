"""The collector of a broker, and its pause."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections.abc import Iterator, Mapping

import pytest

from anabranch.runtime.collector import (
    LARGE_BYTES,
    OLDEST,
    THRESHOLDS,
    WAIT_MAX_S,
    YOUNG_SIZED,
    YOUNGEST,
    Collector,
    collector_paused,
    largest_young,
)

BLOCKS = 200_000
"""Of memory, in a small process."""


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


@pytest.fixture(autouse=True)
def small_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the memory of this process, with all its tests, count as that of a small one."""
    gc.collect()
    blocks = sys.getallocatedblocks
    others = blocks() - BLOCKS
    monkeypatch.setattr(sys, "getallocatedblocks", lambda: blocks() - others)
    yield
    gc.freeze()


@pytest.fixture
def collector() -> Iterator[Collector]:
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


def test_few_objects_are_looked_at_whenever_the_oldest_generation_is_collected(collector: Collector) -> None:
    looked_at: list[int] = []

    def note(phase: str, info: Mapping[str, int]) -> None:
        if phase == "stop" and info["generation"] == OLDEST:
            looked_at.append(len(gc.get_objects(OLDEST)))

    gc.callbacks.insert(0, note)
    try:
        kept = [Node() for _ in range(100_000)]
        gc.collect()  # Whether one begins by itself meanwhile depends on what else lives in this process.
    finally:
        gc.callbacks.remove(note)
    assert len(kept) == 100_000 and looked_at
    assert max(looked_at) <= 20_000


def test_young_objects_do_not_gather_where_as_many_others_are_freed(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.runtime.collector.YOUNG_INTERVAL_S", 0.001)
    others = [Node() for _ in range(30_000)]
    gc.collect()
    kept: list[Node] = []

    async def story() -> int:
        running = asyncio.create_task(collector.run(lambda: False))
        young = 0
        while others:
            for _ in range(1_000):
                kept.append(Node())
                others.pop()
            young = max(young, len(gc.get_objects(YOUNGEST)))
            await asyncio.sleep(0.003)
        running.cancel()
        return young

    assert asyncio.run(story()) < 10_000
    assert len(kept) == 30_000


@pytest.mark.parametrize(("looked_max_s", "set_aside"), [(0.0, True), (10.0, False)])
def test_survivors_that_took_long_to_look_at_are_not_looked_at_again(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, looked_max_s: float, set_aside: bool
) -> None:
    gc.collect()
    monkeypatch.setattr("anabranch.runtime.collector.LOOKED_MAX_S", looked_max_s)
    kept = [Node() for _ in range(400)]
    gc.collect(YOUNGEST)
    assert (len(gc.get_objects(1)) < len(kept)) is set_aside


@pytest.mark.parametrize(("count", "seen"), [(100, True), (20_000, False)])
def test_a_large_young_object_is_set_aside_unseen(collector: Collector, count: int, seen: bool) -> None:
    gc.collect()
    looked_at: list[bool] = []

    def note(phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            looked_at.append(any(it is many for it in gc.get_objects(YOUNGEST)))

    gc.callbacks.append(note)
    try:
        many = [collector] * count
        gc.collect(YOUNGEST)
    finally:
        gc.callbacks.remove(note)
    assert looked_at == [seen]


def test_the_first_of_the_young_are_sized(collector: Collector) -> None:
    gc.collect()
    gc.disable()
    try:
        large = [collector] * 20_000
        others = [Node() for _ in range(3 * YOUNG_SIZED)]
        with_it, size = largest_young(), sys.getsizeof(large)
        del large
        without = largest_young()
    finally:
        gc.enable()
    assert with_it == size > LARGE_BYTES > without
    assert others


def test_cycles_that_become_garbage_after_they_were_set_aside_are_found_when_nobody_waits(
    collector: Collector,
) -> None:
    node = Node()
    node.other = node
    there = weakref.ref(node)
    gc.collect()
    del node
    gc.collect()
    assert there() is not None
    collector.look(0.0, quiet=True, alone=True)
    assert there() is not None and not collector.completed  # Too little was made.
    grown = _grown(2)
    collector.look(1.0, quiet=False, alone=True)
    collector.look(1.0, quiet=True, alone=False)
    assert there() is not None and not collector.completed
    collector.look(2.0, quiet=True, alone=True)
    assert there() is None and collector.completed == 1
    collector.look(3.0, quiet=True, alone=True)
    assert collector.completed == 1
    del grown


def test_a_collection_that_did_not_take_place_beside_that_of_another_thread_is_made_up_for(
    collector: Collector,
) -> None:
    grown = _grown(8)

    def look(phase: str, info: Mapping[str, int]) -> None:
        collector.look(1.0, quiet=True, alone=True)

    gc.callbacks.append(look)
    try:
        gc.collect(YOUNGEST)  # Meanwhile none begins, in whichever thread.
    finally:
        gc.callbacks.remove(look)
    assert not collector.completed
    collector.look(2.0, quiet=True, alone=True)
    assert collector.completed == 1
    del grown


def test_clients_are_kept_waiting_only_after_memory_has_grown_eightfold(collector: Collector) -> None:
    grown = _grown(8)
    collector.look(10.0, quiet=False, alone=False)
    assert not collector.completed
    collector.look(11.0, quiet=True, alone=False)
    assert collector.completed == 1
    del grown


def test_memory_that_is_known_to_be_in_use_is_no_growth(collector: Collector) -> None:
    known = 0

    async def begin() -> None:
        running = asyncio.create_task(collector.run(lambda: False, lambda: known))
        await asyncio.sleep(0)
        running.cancel()

    asyncio.run(begin())
    before = sys.getallocatedblocks()
    grown = _grown(8)
    known = sys.getallocatedblocks() - before
    collector.look(10.0, quiet=True, alone=False)
    assert not collector.completed
    known = 0
    collector.look(11.0, quiet=True, alone=False)
    assert collector.completed == 1
    del grown


def test_a_process_that_is_never_quiet_collects_all_after_an_hour(collector: Collector) -> None:
    grown = _grown(8)
    collector.look(10.0, quiet=False, alone=False)
    collector.look(10.0 + WAIT_MAX_S - 1, quiet=False, alone=False)
    assert not collector.completed
    collector.look(10.0 + WAIT_MAX_S, quiet=False, alone=False)
    assert collector.completed == 1
    del grown


def _grown(factor: int) -> list[bytes]:
    """So many times as many blocks of memory, and some."""
    return [number.to_bytes(9, "big") for number in range(int((factor - 0.8) * sys.getallocatedblocks()))]


def test_the_collector_of_others_is_left_as_it_was() -> None:
    before = gc.get_threshold(), list(gc.callbacks)
    with Collector().installed():
        assert gc.get_threshold() == THRESHOLDS
    assert (gc.get_threshold(), list(gc.callbacks), gc.get_freeze_count()) == (*before, 0)
