"""Transactions of several producers that commit in one partition: offsets, and ranges, of which none is lost.

An offset is a state of all keys, and ranges are a change. What one transaction has said must not be overtaken by what
is made of another one when that ends: so an offset waits for ranges of others, and ranges for an offset of others.
"""

from __future__ import annotations

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import BEGUN_HERE
from anabranch.base.limits import FRONTIER_STEPS_MAX
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.positions import Position
from anabranch.machines.groups.ranged import FOLD_KEY
from anabranch.machines.groups.ranged_commits import checked
from anabranch.machines.groups.transaction_ranges import TransactionRanges
from anabranch.machines.keyspace import SPACE
from anabranch.machines.lineage import Frontier
from anabranch.protocol.messages.offset_commit import KeyRangeOffset
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from tests.support.ranged_group import PLACES, RangedGroup, keys

ONE, OTHER = 1, 2


def started() -> RangedGroup:
    group = RangedGroup()
    group.committed(5)
    group.committed(ranges=[(8, 9)])
    return group


def stands(group: RangedGroup) -> Frontier:
    position = group.coordinator.positions.get("g", "foo", 0)
    assert position is not None
    return position.stands


def is_refused(answer: object) -> bool:
    code = ErrorCode(answer.error_code)  # type: ignore[attr-defined]
    assert code in (ErrorCode.NONE, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    return code is not ErrorCode.NONE


@pytest.mark.parametrize("committed", [False, True])
def test_an_offset_waits_for_ranges_of_another_transaction(committed: bool) -> None:
    group = started()
    assert not is_refused(group.commit_later(ONE, shares=[keys(0, 3, 40)]))
    assert is_refused(group.commit_later(OTHER, offset=30))
    group.end(ONE, committed=committed)
    assert not is_refused(group.commit_later(OTHER, offset=30))
    group.end(OTHER, committed=True)
    assert stands(group).lowest(SPACE) == 30
    assert not group.coordinator.offsets.has_pending("g")


def test_an_offset_waits_until_ranges_of_a_committed_transaction_are_part_of_the_position() -> None:
    group = started()
    group.commit_later(ONE, shares=[keys(0, 3, 40)])
    group.logs[0].append(((b"", b"1"),))
    group.producers.append(ONE)
    group.coordinator.apply_marker(ONE, 0, True)
    assert is_refused(group.commit_later(OTHER, offset=100)), "it would be overtaken by that"
    assert is_refused(group.commit_later(ONE, offset=100)), "also by the transaction before of the same producer"
    group.submit(lambda machine: machine.marked(ONE, group.now_ms))
    group.submit(lambda machine: machine.on_timer(FOLD_KEY, group.now_ms))
    assert not is_refused(group.commit_later(ONE, offset=100))
    group.end(ONE, committed=True)
    assert stands(group) == Frontier((0,), (100,))


def test_ranges_wait_for_an_offset_of_another_transaction() -> None:
    group = started()
    assert not is_refused(group.commit_later(OTHER, offset=100))
    assert is_refused(group.commit_later(ONE, shares=[keys(0, 3, 40)]))
    assert not is_refused(group.commit_later(OTHER, shares=[keys(0, 3, 140)])), "its own are one with it"
    group.end(OTHER, committed=True)
    assert stands(group).lowest(SPACE) == 100 and max(stands(group).offsets) == 140
    assert not is_refused(group.commit_later(ONE, shares=[keys(4, 7, 120)]))


def test_what_is_pending_is_found_after_the_coordinator_was_loaded() -> None:
    group = started()
    group.commit_later(ONE, shares=[keys(0, 3, 40)])
    group.load()
    assert is_refused(group.commit_later(OTHER, offset=30))
    group.end(ONE, committed=True)
    assert not is_refused(group.commit_later(OTHER, offset=30))


def many(first: int) -> list[KeyRangeOffset]:
    count = FRONTIER_STEPS_MAX * 3 // 10
    width = PLACES[7] // FRONTIER_STEPS_MAX // 2
    return [
        KeyRangeOffset(start=2 * at * width, end=(2 * at + 1) * width - 1, offset=40)
        for at in range(first, first + count)
    ]


def test_what_would_be_too_many_steps_with_open_transactions_is_refused_and_never_dropped() -> None:
    group = started()
    assert not is_refused(group.commit_later(ONE, shares=many(0)))
    assert not is_refused(group.commit_later(ONE, shares=many(0))), "the same once more is no more"
    answer = group.commit_later(OTHER, shares=many(500))
    assert answer.error_code == ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED and "Too many" in answer.error_message
    group.end(ONE, committed=True)
    assert stands(group).offsets.count(40) == len(many(0))
    group.end(OTHER, committed=True)


def test_the_metadata_of_ranges_is_that_of_the_position_when_the_transaction_is_committed() -> None:
    group = started()
    group.committed(6, metadata="before")
    group.commit_later(ONE, shares=[keys(0, 3, 40)], metadata="said")
    assert group.fetched().metadata == "before"
    group.load()
    group.end(ONE, committed=True)
    assert group.fetched().metadata == "said"


def test_each_change_of_a_transaction_has_a_name_of_its_own_however_many_come_at_once() -> None:
    changes, commit, position = TransactionRanges(), checked(-1, [], [(0, 9, 40)]), Position(5, ranges_since=1)
    records = [changes.record("g", ("foo", number), ONE, commit, position, 7) for number in range(1_500)]
    assert len({record.key.number for record in records}) == 1_500
    for record in records:
        changes.apply(record.key, record.value, ONE)
    changes.end(ONE, committed=True)
    assert len(changes.decided) == 1_500 and changes.of_group("g")
    for record in records:
        changes.apply(record.key, None, -1)
    assert not changes.of_group("g") and not changes.decided


@pytest.mark.parametrize("named", [False, True])
def test_ranges_that_go_with_the_offset_of_their_transaction_are_void_after_a_reset(*, named: bool) -> None:
    group = RangedGroup()
    group.committed(20)
    if named:
        group.committed(ranges=[(25, 26)])
    group.commit_later(ONE, offset=30)
    group.commit_later(ONE, shares=[keys(0, 7, 40)])
    group.committed(3)
    group.end(ONE, committed=True)
    assert stands(group) == Frontier((0,), (3,))


def test_ranges_in_one_transaction_go_with_its_offset_one_after_the_other() -> None:
    group = RangedGroup()
    group.commit_later(ONE, offset=5)
    assert not is_refused(group.commit_later(ONE, [(5, 7)])), "they leave no gap: nothing is waited for"
    assert not is_refused(group.commit_later(ONE, [(8, 9)]))
    group.end(ONE, committed=True)
    assert stands(group) == Frontier((0,), (10,))


def test_nothing_counts_of_a_request_that_has_to_wait_in_one_partition() -> None:
    """Otherwise two transactions could wait for each other, each with what the other one waits for."""
    group = started()
    group.commit_later(OTHER, offset=30)
    parts = [
        TxnOffsetCommitRequestPartition(partition_index=1, committed_offset=7, committed_metadata=""),
        TxnOffsetCommitRequestPartition(
            partition_index=0, committed_offset=-1, committed_metadata="", key_range_offsets=[keys(0, 3, 40)]
        ),
    ]
    request = TxnOffsetCommitRequest(
        group_id="g",
        producer_id=ONE,
        generation_id=-1,
        topics=[TxnOffsetCommitRequestTopic(name="foo", partitions=parts)],
    )
    caller = Caller("client", "/host", 4, "fresh", 0)
    answer = group.submit(lambda machine: machine.txn_offset_commit(request, caller, 1, group.now_ms))
    assert all(is_refused(part) for part in answer.topics[0].partitions)
    assert not group.coordinator.positions.unstable("g", "foo", 1)


def test_a_group_that_begins_in_a_transaction_has_come_through_no_gate() -> None:
    group = RangedGroup()
    group.commit_later(ONE, shares=[keys(0, 7, 100)], offset=100, metadata=BEGUN_HERE)
    for committed in (False, True):
        position = group.coordinator.positions.get("g", "foo", 0)
        assert position is not None and position.gone_through == 0
        group.end(ONE, committed=committed)
