"""A coordinator with commits by ranges, against a set of (offset, key), through crashes between its two logs."""

from __future__ import annotations

import random

import pytest

from anabranch.base.errors import ErrorCode
from tests.support.ranged_group import PLACES, RangedGroup, keys

SIZE = 40


def of_ranges(ranges: list[tuple[int, int]]) -> set[tuple[int, int]]:
    return {(offset, place) for start, end in ranges for offset in range(start, end + 1) for place in PLACES}


def up_to(offset: int, first: int = 0, last: int = 7) -> set[tuple[int, int]]:
    return {(below, place) for below in range(offset) for place in PLACES[first : last + 1]}


def some_ranges(chance: random.Random, from_: int) -> list[tuple[int, int]]:
    at, found = from_, []
    while at < SIZE and len(found) < 4:
        start = at + chance.choice((0, 1, 1, 2, 6))
        end = start + chance.choice((0, 0, 1, 3))
        if end < SIZE:
            found.append((start, end))
        at = end + 1 + chance.choice((0, 1))
    return chance.sample(found, chance.randint(0, len(found)))


@pytest.mark.parametrize("seed", range(250))
def test_what_was_answered_counts_and_nothing_else_through_crashes_between_the_two_logs(seed: int) -> None:
    chance = random.Random(seed)
    group = RangedGroup()
    answered, submitted = set[tuple[int, int]](), set[tuple[int, int]]()
    group.committed(0)
    for _ in range(40):
        group.now_ms += 1
        stable = group.fetched().committed_offset
        action = chance.random()
        if action < 0.35 and (ranges := some_ranges(chance, stable)):
            assert group.commit(ranges=ranges).error_code == ErrorCode.NONE
            submitted |= of_ranges(ranges)
        elif action < 0.6:
            first, last = sorted((chance.randrange(8), chance.randrange(8)))
            offset = chance.randint(stable, min(SIZE, stable + 12))
            assert group.commit(shares=[keys(first, last, offset)]).error_code == ErrorCode.NONE
            submitted |= up_to(offset, first, last)
        elif action < 0.64:  # by no member: exactly there, whatever was done above
            offset = chance.randint(0, SIZE // 2)
            assert group.commit(offset).error_code == ErrorCode.NONE
            submitted, answered = up_to(offset), up_to(offset)
            group.sync()
        elif action < 0.8:
            group.sync()
            answered = set(submitted)
        elif action < 0.85:
            group.settle()
            group.ring()
            answered = set(submitted)
        elif action < 0.95:
            group.crash(chance)
            if chance.random() < 0.5:
                group.ring()
            found = group.processed(SIZE)
            assert answered <= found <= submitted
            submitted = set(found)
        assert group.processed(SIZE) == submitted
    group.settle()
    group.ring()
    assert group.processed(SIZE) == submitted
    live = group.coordinator
    kept = {key for batch in group.logs[1] for key, _ in batch}
    last = {key: value for batch in group.logs[1] for key, value in batch}
    assert sum(last[key] is not None for key in kept) == live.offsets.individual.count == len(group.ranges())
    group.load()
    group.ring()
    assert group.processed(SIZE) == submitted
    assert group.coordinator.offsets.individual == live.offsets.individual
    assert group.coordinator.positions == live.positions


@pytest.mark.parametrize("seed", range(40))
def test_losing_the_second_log_costs_what_lies_above_the_frontier_and_nothing_below(seed: int) -> None:
    chance = random.Random(seed)
    group = RangedGroup()
    group.committed(3)
    for _ in range(10):
        stable = group.fetched().committed_offset
        group.commit(ranges=some_ranges(chance, stable), shares=[keys(0, chance.randrange(8), stable)])
        first = chance.randrange(8)
        group.commit(shares=[keys(first, 7, group.fetched().committed_offset + chance.randrange(3))])
    group.settle()
    before = group.fetched()
    group.crash(lose_second=True)
    group.ring()
    after = group.fetched()
    assert (after.committed_offset, after.key_range_offsets) == (before.committed_offset, before.key_range_offsets)
    assert not after.committed_range_offsets
    stable = after.committed_offset
    assert group.committed(ranges=[(stable, stable + 1), (stable + 5, stable + 6)]) >= stable + 2
    assert len(group.ranges()) <= 1


@pytest.mark.parametrize("seed", range(150))
def test_transactions_count_exactly_when_they_are_committed_through_crashes(seed: int) -> None:
    chance = random.Random(seed)
    group = RangedGroup()
    group.committed(0)
    counts = set[tuple[int, int]]()
    pending: dict[int, set[tuple[int, int]]] = {}
    waiting: dict[int, tuple[int, set[tuple[int, int]]]] = {}
    for _ in range(40):
        group.now_ms += 1
        stable = group.fetched().committed_offset
        producer, action = chance.randrange(3), chance.random()
        if action < 0.4 and producer not in waiting:
            first, last = sorted((chance.randrange(8), chance.randrange(8)))
            offset = min(SIZE, stable + chance.randrange(8))
            ranges = some_ranges(chance, stable)[:1] if chance.random() < 0.6 else []
            shares = [] if ranges else [keys(first, last, offset)]
            added = of_ranges(ranges) | (up_to(offset, first, last) if shares else set())
            found = group.commit_later(producer, ranges, shares)
            if isinstance(found, int):
                waiting[producer] = found, added
            else:
                assert found.error_code == ErrorCode.NONE
                pending.setdefault(producer, set()).update(added)
        elif action < 0.65:
            committed = chance.random() < 0.6
            ticket = waiting.pop(producer, (None, set()))[0]
            group.end(producer, committed=committed)
            if ticket is not None:
                assert group.code_of(ticket) == ErrorCode.INVALID_PRODUCER_EPOCH
            ended = pending.pop(producer, set())
            counts |= ended if committed else set()
        elif action < 0.8:
            if ranges := some_ranges(chance, stable):
                assert group.commit(ranges=ranges).error_code == ErrorCode.NONE
                counts |= of_ranges(ranges)
        elif action < 0.9:
            group.sync()
        else:
            group.settle()
            group.crash()  # requests that wait are gone; their clients ask again, or their transactions end
            waiting.clear()
        for name, (ticket, added) in list(waiting.items()):
            if (code := group.code_of(ticket)) is not None:
                # What has moved past it meanwhile needs no commit any more.
                assert code in (ErrorCode.NONE, ErrorCode.INDIVIDUAL_COMMIT_TOO_OLD)
                if code == ErrorCode.NONE:
                    pending.setdefault(name, set()).update(added)
                del waiting[name]
        assert group.processed(SIZE) == counts
    group.settle()
    for producer in range(3):
        group.end(producer, committed=True)
        counts |= pending.pop(producer, set())
    group.settle()
    assert group.processed(SIZE) == counts
    group.load()
    group.ring()
    assert group.processed(SIZE) == counts
    assert not group.coordinator.offsets.in_transactions.decided
