"""Incremental fetch sessions (KIP-227)."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.server.partitions.fetch_sessions import (
    EPOCH_MAX,
    EVICTION_AGE_MS,
    OBJECTS_MAX,
    PACKED_SIZE,
    TOPIC_SIZE,
    FetchContext,
    FetchSessions,
    Key,
    Target,
)


def target(partition: int = 0, topic: str = "t", offset: int = 0) -> Target:
    return Target(topic, NO_TOPIC_ID, partition, offset, 1000)


class World:
    def __init__(self, slots: int = 10, size_max: int = 1 << 30) -> None:
        ids = itertools.count()
        self.sessions = FetchSessions(slots, lambda bound: next(ids) % bound, size_max)
        self.now_ms = 0

    def begin(
        self,
        session_id: int,
        epoch: int,
        *targets: Target,
        forgotten: tuple[Key, ...] = (),
        uses_topic_ids: bool = False,
    ) -> FetchContext | ErrorCode:
        return self.sessions.begin(
            session_id, epoch, targets, forgotten, uses_topic_ids=uses_topic_ids, now_ms=self.now_ms
        )

    def context(self, session_id: int, epoch: int, *targets: Target, forgotten: tuple[Key, ...] = ()) -> FetchContext:
        context = self.begin(session_id, epoch, *targets, forgotten=forgotten)
        assert isinstance(context, FetchContext)
        return context

    def open(self, partitions: int = 1) -> int:
        return self.context(0, 0, *(target(p) for p in range(partitions))).session_id


def test_a_fetch_without_a_session_gets_everything_and_leaves_nothing_behind() -> None:
    world = World()
    context = world.context(0, -1, target(0), target(1))
    assert (context.session_id, context.incremental, len(context.targets)) == (0, False, 2)
    assert len(world.sessions) == 0


def test_a_session_remembers_its_partitions_and_takes_changes() -> None:
    world = World()
    made = world.context(0, 0, target(0), target(1))
    context = world.context(made.session_id, 1)
    assert context.incremental
    assert [it.partition for it in context.targets] == [0, 1]
    context = world.context(made.session_id, 2, target(1, offset=7), target(2), forgotten=(("t", 0),))
    assert [(it.partition, it.offset) for it in context.targets] == [(1, 7), (2, 0)]


def test_an_unknown_session_and_a_wrong_epoch_are_told_apart() -> None:
    world = World()
    session_id = world.open()
    assert world.begin(session_id + 1, 1) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert world.begin(session_id, 2) is ErrorCode.INVALID_FETCH_SESSION_EPOCH
    assert world.begin(session_id, 1, uses_topic_ids=True) is ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
    assert isinstance(world.begin(session_id, 1), FetchContext)


def test_the_last_epoch_is_followed_by_the_first_one() -> None:
    world = World()
    session = world.context(0, 0, target()).session
    assert session is not None
    session.epoch = EPOCH_MAX
    world.context(session.id, EPOCH_MAX)
    assert session.epoch == 1


def test_epoch_0_replaces_the_session_and_the_final_epoch_ends_it() -> None:
    world = World()
    first = world.open()
    second = world.context(first, 0, target()).session_id
    assert second != first
    assert world.begin(first, 1) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert world.context(second, -1, target()).session_id == 0
    assert len(world.sessions) == 0


def test_a_session_without_partitions_ends() -> None:
    world = World()
    session_id = world.open()
    context = world.context(session_id, 1, forgotten=(("t", 0),))
    assert (context.session_id, list(context.targets)) == (0, [])
    assert len(world.sessions) == 0


def test_only_news_are_told_and_an_error_is_told_again_until_it_is_over() -> None:
    it = target()
    news = {"size": 0, "error": 0, "high_watermark": 5, "log_start": 0}
    assert it.note_sent(**news)
    assert not it.note_sent(**news)
    assert it.note_sent(**{**news, "high_watermark": 6})
    assert it.note_sent(**{**news, "high_watermark": 6, "log_start": 1})
    assert it.note_sent(**{**news, "high_watermark": 6, "log_start": 1, "size": 10})
    failed = {"size": 0, "error": int(ErrorCode.NOT_LEADER_OR_FOLLOWER), "high_watermark": -1, "log_start": -1}
    assert it.note_sent(**failed)
    assert it.note_sent(**failed)
    assert it.note_sent(**{**news, "high_watermark": 6})


def test_what_was_told_survives_a_changed_offset_and_the_order_moves_to_the_back() -> None:
    world = World()
    made = world.context(0, 0, target(0), target(1))
    assert made.session is not None
    made.targets[0].note_sent(size=10, error=0, high_watermark=3, log_start=0)
    made.session.to_the_back(made.targets[0])
    context = world.context(made.session_id, 1, target(0, offset=3))
    assert [it.partition for it in context.targets] == [1, 0]
    assert not context.targets[1].note_sent(size=0, error=0, high_watermark=3, log_start=0)


def test_slots_are_bounded_and_a_long_unused_session_makes_room() -> None:
    world = World(slots=2)
    old, busy = world.open(), world.open()
    assert world.context(0, 0, target()).session_id == 0
    world.now_ms = EVICTION_AGE_MS + 1
    world.context(busy, 1)
    assert world.open() != 0
    assert world.begin(old, 1) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert world.sessions.evictions == 1
    assert len(world.sessions) == 2


def test_a_larger_session_takes_the_place_of_a_smaller_one_that_is_not_young() -> None:
    world = World(slots=1)
    small = world.open()
    world.now_ms = EVICTION_AGE_MS + 1
    world.context(small, 1)
    assert world.open(partitions=1) == 0
    assert world.open(partitions=2) != 0


def test_no_slots_no_sessions() -> None:
    world = World(slots=0)
    assert world.open() == 0


@pytest.mark.parametrize("epoch", [0, -1])
def test_an_empty_full_fetch_makes_no_session(epoch: int) -> None:
    world = World()
    assert world.context(0, epoch).session_id == 0


def test_sessions_hold_bounded_memory_the_largest_goes_first_and_a_larger_one_gets_none() -> None:
    one, topic = target().size, TOPIC_SIZE + len("t")
    world = World(size_max=10 * one + 3 * topic)
    small, large = world.open(3), world.open(6)
    assert world.sessions.size == 9 * one + 2 * topic
    assert world.context(0, 0, *(target(p) for p in range(7))).session_id == 0
    assert len(world.sessions) == 2
    third = world.open(4)
    assert world.begin(large, 1) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert (world.sessions.size, world.sessions.evictions) == (7 * one + 2 * topic, 1)
    grown = world.context(small, 1, *(target(p) for p in range(8)))
    assert len(grown.targets) == 8
    assert world.begin(small, 2) is ErrorCode.FETCH_SESSION_ID_NOT_FOUND
    assert world.context(third, 1, target(0)).session_id == third
    assert world.context(third, 2, forgotten=tuple(("t", p) for p in range(4))).session_id == 0
    assert (world.sessions.size, len(world.sessions)) == (0, 0)


@pytest.mark.parametrize("uses_topic_ids", [False, True])
def test_a_large_session_keeps_of_each_partition_what_a_small_one_does(uses_topic_ids: bool) -> None:
    world, count = World(), 3 * OBJECTS_MAX
    ids = [UUID(int=7 + number) if uses_topic_ids else NO_TOPIC_ID for number in range(3)]

    def asked(number: int, offset: int) -> Target:
        topic = "" if uses_topic_ids else f"t{number % 3}"
        partition = (-1, 2**31 - 1, -(2**31))[number] if number < 3 else number
        return Target(topic, ids[number % 3], partition, offset, number, number, -number, number - 1)

    made = world.begin(0, 0, *(asked(it, 2**62 + it) for it in range(count)), uses_topic_ids=uses_topic_ids)
    assert isinstance(made, FetchContext) and made.session is not None
    for it in made.targets:
        assert it.note_sent(size=0, error=0, high_watermark=2**60 + it.size_max, log_start=it.size_max)
        made.session.sent(it)
    made.session.to_the_back(made.targets[count // 2])
    changed = [asked(count - 1, 5), asked(0, 6), asked(count, 7)]
    forgotten = (made.targets[1].key, made.targets[count - 2].key, ("none", 1))
    found = world.begin(made.session_id, 1, *changed, forgotten=forgotten, uses_topic_ids=uses_topic_ids)
    assert isinstance(found, FetchContext)
    last = found.targets[-2]
    assert (last.key, last.offset) == (asked(count // 2, 0).key, 2**62 + count // 2), (
        "it is read last, but for new ones"
    )
    by_key = {it.key: it for it in found.targets}
    assert len(by_key) == len(found.targets) == count - 1
    for number in range(count):
        wanted = asked(number, {count - 1: 5, 0: 6}.get(number, 2**62 + number))
        wanted.sent_high_watermark, wanted.sent_log_start = 2**60 + number, number
        assert by_key.get(wanted.key) == (None if wanted.key in forgotten else wanted)


def test_partitions_beyond_the_first_ones_of_a_session_take_half_of_the_memory() -> None:
    world = World()
    world.open(OBJECTS_MAX)
    before = world.sessions.size
    session_id = world.open(OBJECTS_MAX + 1_000)
    assert world.sessions.size - 2 * before == 1_000 * PACKED_SIZE
    tracemalloc.start()
    context = world.context(0, 0, *(target(2**20 + p, offset=2**40 + p) for p in range(20_000)))
    session = context.session
    assert session is not None
    for number, it in enumerate(context.targets):
        it.note_sent(size=0, error=0, high_watermark=2**50 + number, log_start=2**41 + number)
        session.sent(it)
    del context, it
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert session.size / 2 < held < session.size
    assert session_id


def test_a_fetch_reads_a_partition_once_however_often_it_is_named() -> None:
    world = World()
    for epoch in (0, -1):
        context = world.context(0, epoch, target(0, offset=1), target(1), target(0, offset=2))
        assert [(it.partition, it.offset) for it in context.targets] == [(0, 2), (1, 0)]


def test_what_a_session_held_is_freed_when_it_ends() -> None:
    freed: list[dict[object, object]] = []
    sessions = FetchSessions(10, lambda bound: 5, free=freed.append)
    made = sessions.begin(0, 0, [target()], (), uses_topic_ids=False, now_ms=0)
    assert isinstance(made, FetchContext) and not freed
    sessions.begin(made.session_id, -1, [], (), uses_topic_ids=False, now_ms=0)
    assert len(freed) == 1 and len(freed[0]) == 1
