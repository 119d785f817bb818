"""The fold of committed offsets: plain ones, those of transactions, and which of two counts."""

from __future__ import annotations

import random

from anabranch.machines.groups.positions import Position, Positions, position_record
from anabranch.machines.groups.records import OffsetCommitKey, OffsetCommitValue


def commit(positions: Positions, offset: int | None, *, partition: int = 0, producer_id: int = -1) -> None:
    key, value = position_record("g", "t", partition, None if offset is None else Position(offset))
    assert isinstance(key, OffsetCommitKey) and isinstance(value, OffsetCommitValue | None)
    positions.apply(key, value, producer_id)


def offset(positions: Positions, partition: int = 0) -> int | None:
    found = positions.get("g", "t", partition)
    return None if found is None else found.offset


def test_the_last_commit_counts_and_a_tombstone_forgets_it() -> None:
    positions = Positions()
    commit(positions, 5)
    commit(positions, 3)
    assert offset(positions) == 3 and "g" in positions and positions.groups() == {"g"}
    commit(positions, None)
    assert offset(positions) is None and "g" not in positions and positions.groups() == set()


def test_an_offset_of_a_transaction_waits_for_its_marker() -> None:
    positions = Positions()
    commit(positions, 5)
    commit(positions, 9, producer_id=1)
    assert offset(positions) == 5 and positions.unstable("g", "t", 0) and positions.has_pending("g")
    positions.end_transaction(1, committed=True)
    assert offset(positions) == 9 and not positions.unstable("g", "t", 0) and not positions.has_pending("g")


def test_an_aborted_transaction_leaves_what_was_committed_before() -> None:
    positions = Positions()
    commit(positions, 5)
    commit(positions, 9, producer_id=1)
    positions.end_transaction(1, committed=False)
    assert offset(positions) == 5 and not positions.has_pending("g")


def test_a_later_plain_commit_overtakes_an_open_transaction() -> None:
    positions = Positions()
    commit(positions, 9, producer_id=1)
    commit(positions, 5)
    positions.end_transaction(1, committed=True)
    assert offset(positions) == 5


def test_of_two_transactions_the_later_record_counts_whichever_ends_last() -> None:
    for first, second in ((1, 2), (2, 1)):
        positions = Positions()
        commit(positions, 7, producer_id=1)
        commit(positions, 8, producer_id=2)
        positions.end_transaction(first, committed=True)
        positions.end_transaction(second, committed=True)
        assert offset(positions) == 8, (first, second)


def test_partitions_of_one_transaction_are_apart() -> None:
    positions = Positions()
    commit(positions, 7, partition=0, producer_id=1)
    commit(positions, 4, partition=1)
    assert positions.unstable("g", "t", 0) and not positions.unstable("g", "t", 1)
    positions.end_transaction(1, committed=True)
    assert dict(positions.entries("g")).keys() == {("t", 0), ("t", 1)}


def test_the_memory_of_positions_is_counted_through_replacement_transactions_and_deletion() -> None:
    positions = Positions()
    chance = random.Random(7)
    for _ in range(2_000):
        match chance.randrange(5):
            case 0:
                positions.end_transaction(chance.randrange(3), committed=chance.random() < 0.5)
            case 1:
                commit(positions, None, partition=chance.randrange(4))
            case _:
                metadata = "m" * chance.randrange(100)
                key, value = position_record("g", "t", chance.randrange(4), Position(5, metadata=metadata))
                assert isinstance(key, OffsetCommitKey) and isinstance(value, OffsetCommitValue)
                positions.apply(key, value, chance.choice((-1, -1, 0, 1, 2)))
        held = [position.size for _, position in positions.entries("g")]
        waiting = [
            Position(value.offset, metadata=value.metadata).size
            for groups in positions._pending.values()
            for found in groups.values()
            for _, value in found.values()
        ]
        ids = bool(held) + 2 * sum("g" in groups for groups in positions._pending.values())
        assert positions.size == sum(held) + sum(waiting) + ids * len("g")
    for producer_id in range(3):
        positions.end_transaction(producer_id, committed=False)
    for partition in range(4):
        commit(positions, None, partition=partition)
    assert positions.size == 0
