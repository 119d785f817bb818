"""What becomes of a transaction's offsets and ranges when it ends, and of what was decided meanwhile.

Each state in memory is compared with what another coordinator reads from the logs, and with what is read of what a
power cut leaves of them.
"""

from __future__ import annotations

import random
from dataclasses import replace
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import shares
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.individual import OffsetRanges, checked
from anabranch.machines.groups.positions import Position
from anabranch.machines.groups.transaction_ranges import TransactionRanges
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from anabranch.server.coordinators.shard import ON_LOOP_MAX
from tests.support.ranged_group import RangedGroup, keys
from tests.unit.machines.groups.test_ranged_commits import member

ONE, OTHER = 1, 2
MEMBER = {"member": "one", "epoch": 3}
AT = ("foo", 0)


def shared(offset: int, *ranges: tuple[int, int]) -> RangedGroup:
    """A group of which one member has committed an offset, and ranges."""
    group = RangedGroup()
    member(group, one=3)
    group.committed(offset, **MEMBER)
    group.committed(ranges=ranges, **MEMBER)
    group.settle()
    return group


def stands(group: RangedGroup) -> tuple[int, list[tuple[int, int]]]:
    answer = group.fetched()
    return answer.committed_offset, [(it.start, it.end) for it in answer.committed_range_offsets]


def deleted(group: RangedGroup) -> ErrorCode:
    topics = [OffsetDeleteRequestTopic(name="foo", partitions=[OffsetDeleteRequestPartition(partition_index=0)])]
    request = OffsetDeleteRequest(group_id="g", topics=topics)
    answer = group.submit(lambda machine: machine.offset_delete(request, group.now_ms))
    return ErrorCode(answer.topics[0].partitions[0].error_code)


def test_an_offset_that_comes_to_touch_a_range_goes_on_behind_it() -> None:
    group = shared(3, (10, 11))
    group.commit_later(ONE, offset=5, **MEMBER)
    group.committed(ranges=[(5, 8)], **MEMBER)
    group.end(ONE, committed=True)
    group.ring()
    assert stands(group) == (9, [(10, 11)])
    group.load()
    group.ring()
    assert stands(group) == (9, [(10, 11)])


def test_a_range_that_is_touched_overtakes_nothing_that_a_transaction_has_committed() -> None:
    group = shared(3, (10, 11))
    group.commit_later(ONE, offset=5, **MEMBER)
    group.committed(ranges=[(5, 8)], **MEMBER)
    group.end(ONE, committed=True)
    group.commit_later(OTHER, offset=20, **MEMBER)
    group.load()
    group.ring()
    assert group.fetched(stable=True).error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
    group.end(OTHER, committed=True)
    group.ring()
    assert stands(group) == (20, [])


@pytest.mark.parametrize("committed", [False, True])
def test_what_a_range_touches_is_compared_when_the_transaction_in_its_way_has_ended(*, committed: bool) -> None:
    group = shared(3, (10, 11))
    group.commit_later(ONE, offset=5, **MEMBER)
    group.committed(ranges=[(5, 8)], **MEMBER)
    group.end(ONE, committed=True)
    group.commit_later(OTHER, offset=6, **MEMBER)
    group.load()
    group.ring()
    group.end(OTHER, committed=committed)
    group.ring()
    assert stands(group) == (9, [(10, 11)])


@pytest.mark.parametrize("named", [False, True])
def test_a_transaction_goes_on_from_what_it_has_said_itself(*, named: bool) -> None:
    group = RangedGroup()
    member(group, one=3)
    group.committed(5, **MEMBER)
    if named:
        group.committed(ranges=[(40, 41)], **MEMBER)
    for said in ({"offset": 10}, {"ranges": [(10, 12)]}, {"offset": 11}):
        assert group.commit_later(ONE, **said, **MEMBER).error_code == ErrorCode.NONE
    group.end(ONE, committed=True)
    assert stands(group) == (13, [(40, 41)] if named else [])


def test_a_transaction_does_not_go_on_from_a_topic_that_was_made_again() -> None:
    group = RangedGroup()
    group.commit_later(ONE, offset=50)
    topic = replace(group.image.by_name["foo"], topic_id=UUID(int=99))
    group.image = Image(group.image.version + 1, {"foo": topic})
    group.submit(lambda machine: machine.topics_changed(group.image, group.now_ms))
    answer = group.commit_later(ONE, shares=[keys(0, 7, 3)])
    assert answer.error_code != ErrorCode.INDIVIDUAL_COMMIT_TOO_OLD and answer.last_stable_offset < 50


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_request_that_waits_is_looked_at_when_what_it_goes_with_is_gone(*, is_deleted: bool) -> None:
    """It is to be sent again, and goes with what there is then."""
    group = RangedGroup(gaps_are_waited_for=True)
    group.committed(5)
    waits = group.commit_later(ONE, [(8, 9)])
    assert isinstance(waits, int) and group.code_of(waits) is None
    if is_deleted:
        assert deleted(group) is ErrorCode.NONE
    else:
        group.committed(8)
    assert group.code_of(waits) is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    assert group.commit_later(ONE, [(8, 9)], offset=8 if is_deleted else -1).error_code == ErrorCode.NONE
    group.committed(0)
    group.end(ONE, committed=True)
    assert stands(group) == (0, []), "the group is to begin anew, with all records"


def test_a_request_that_waits_is_looked_at_when_its_group_is_deleted() -> None:
    group = RangedGroup(gaps_are_waited_for=True)
    group.committed(5)
    waits = group.commit_later(ONE, [(8, 9)])
    assert group.submit(lambda machine: machine.delete_group("g", group.now_ms)) is ErrorCode.NONE
    assert group.code_of(waits) is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS


def test_a_refused_request_says_nothing_of_where_its_group_begins() -> None:
    group = RangedGroup(individual_commits=False)
    code = group.commit_later(ONE, shares=[keys(0, 7, 50)], offset=50).error_code
    assert code == ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED
    assert group.coordinator.positions.get("g", *AT) is None


def test_what_a_transaction_has_committed_outlives_a_power_cut_between_the_logs() -> None:
    """The change is the last to know of the ranges, until these are on the disk."""
    group = RangedGroup()
    group.committed(5)
    group.settle()
    assert group.commit_later(OTHER, [(5, 7)]).error_code == ErrorCode.NONE
    assert group.commit_later(ONE, [(8, 9)]).error_code == ErrorCode.NONE
    group.settle()
    group.end(ONE, committed=True, durable=False)
    group.durable[0] = len(group.logs[0])
    group.crash()
    group.end(OTHER, committed=False)
    assert stands(group) == (5, [(8, 9)])
    assert not group.coordinator.offsets.has_pending("g")


def test_the_gates_of_a_group_are_looked_at_when_ranges_are_folded() -> None:
    group = RangedGroup()
    group.committed(5)
    group.commit_later(ONE, shares=[keys(0, 7, 9)])
    rung: list[str] = []
    group.coordinator.keeper.ring = lambda draft, group_id, now_ms, **_: rung.append(group_id)  # type: ignore[method-assign]
    group.coordinator.apply_marker(ONE, 0, True)
    outcome = group.coordinator.decide_fold(group.now_ms)
    assert outcome.records and rung == ["g"]


def leaves_gap(
    position: Position, held: OffsetRanges, changes: TransactionRanges, added: list[tuple[int, int]]
) -> bool:
    """The rule as it is told: join everything, and see where each key's reader is led."""
    ranges = [*held, *added]
    frontier = position.stands
    for change in changes.of("g", AT):
        if change.value.since == position.ranges_since:
            ranges += [(it.start, it.end) for it in change.value.offset_ranges]
            frontier = shares.raised(frontier, [(it.start, it.end, it.offset) for it in change.value.key_ranges])
    done = {offset for start, end in ranges for offset in range(start, end + 1)}

    def reaches(offset: int) -> int:
        while offset in done:
            offset += 1
        return offset

    return shares.stable(shares.through(frontier, reaches)) <= added[-1][1]


@pytest.mark.parametrize("seed", range(30))
def test_what_open_transactions_leave_is_known_without_looking_at_all_of_it_again(seed: int) -> None:
    chance = random.Random(seed)
    group = RangedGroup()
    group.committed(3)
    group.committed(ranges=[(60, 61)])
    changes, looked = group.coordinator.offsets.in_transactions, 0
    for _ in range(60):
        group.now_ms += 1
        start, share = chance.randint(3, 40), sorted(chance.sample(range(8), 2))
        added = [(start, start + chance.randint(0, 4))]
        act, producer = chance.random(), chance.randint(1, 3)
        if act < 0.5:
            group.commit_later(producer, added)
        elif act < 0.65:
            group.commit_later(producer, shares=[keys(share[0], share[1], chance.randint(3, 40))])
        elif act < 0.8:
            group.commit(ranges=added)
        elif act < 0.95:
            group.end(producer, committed=chance.random() < 0.5)
        else:
            group.committed(chance.randint(0, 10))
            group.committed(ranges=[(60, 61)])
        position = group.coordinator.offsets.current("g", *AT)
        assert position is not None
        held = group.coordinator.offsets.individual.of("g", AT, position)
        added = checked([(chance.randint(3, 45), 50)])
        looked += 1
        assert changes.leaves_gap("g", AT, position, held, added) == leaves_gap(position, held, changes, added)
    assert looked == 60


def test_ranges_of_many_commits_are_joined_once_and_beside_the_loop() -> None:
    group = RangedGroup(gaps_are_waited_for=True, ranges_per_partition_max=100_000, ranges_max=1_000_000)
    group.committed(5)
    for begin in range(0, 3_000, 300):
        group.commit(ranges=[(6 + 2 * number, 6 + 2 * number) for number in range(begin, begin + 300)])
        group.commit_later(ONE, [(5 + 2 * number, 5 + 2 * number) for number in range(begin, begin + 300)])
    changes = group.coordinator.offsets.in_transactions
    joined = changes._of("g", AT).joined(group.coordinator.positions.get("g", *AT).ranges_since)  # type: ignore[union-attr]
    assert len(joined.ranges) == 3_000
    group.load()
    ticket = group.commit_later(OTHER, [(9_000, 9_000)])
    assert isinstance(ticket, int)
    changes = group.coordinator.offsets.in_transactions
    waiting = changes.purgatory.of("g")[0].request
    assert group.coordinator.weight_of_txn_commit(waiting) <= ON_LOOP_MAX
    changes._of("g", AT)._joined.clear()
    assert group.coordinator.weight_of_txn_commit(waiting) > ON_LOOP_MAX
    assert group.coordinator.weight_of_timer(("purgatory", "g")) > ON_LOOP_MAX


def test_ranges_are_folded_one_after_another_whatever_is_durable() -> None:
    group = RangedGroup()
    group.committed(5)
    for number in range(10):
        assert group.commit_later(OTHER, shares=[keys(0, 0, 6)]).error_code == ErrorCode.NONE
        assert group.commit_later(ONE, [(5 + number, 5 + number)]).error_code == ErrorCode.NONE
    group.end(ONE, committed=True, durable=False)
    assert stands(group) == (15, []) and not group.coordinator.offsets.in_transactions.decided
    assert group.fetched(stable=True).error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
    group.end(OTHER, committed=False)
    group.settle()
    assert not group.coordinator.offsets.has_pending("g")


def test_what_a_log_refuses_keeps_no_other_change_from_being_folded() -> None:
    group = RangedGroup()
    for partition in (0, 1):
        group.committed(5, partition=partition)
    group.commit_later(ONE, [(5, 7)])
    group.commit_later(ONE, shares=[keys(0, 7, 20)])
    coordinator = group.coordinator
    coordinator.apply_marker(ONE, 0, True)
    refused = [coordinator.decide_fold(group.now_ms).effects for _ in range(3)]
    assert [bool(effects) for effects in refused] == [True, False, True], "each has its turn, of which nothing comes"
    while coordinator.offsets.in_transactions.decided:
        group.submit(lambda machine: machine.decide_fold(group.now_ms))
    assert stands(group) == (20, [])
