"""Commits by ranges, decision by decision: the proposal's examples, refusals, plain commits beside them, limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import BEGUN_HERE, OFFSET_NOT_SAID
from anabranch.machines.groups.consumer.group import ConsumerGroup, Member, MemberMetadata
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.offsets import RangesRepeated
from anabranch.machines.groups.ranged import ASSIGNED_ANEW_MS, TooManyRanges
from anabranch.machines.groups.ranged_commits import REFRESHED_AFTER_MS
from anabranch.machines.groups.records import IndividualCommitKey, OffsetCommitKey, decode_record
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval
from anabranch.protocol.messages.offset_commit import KeyRangeOffset
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from tests.support.groups import topics
from tests.support.ranged_group import PLACES, RangedGroup, keys


def written(group: RangedGroup, number: int, since: int = 0) -> list[str]:
    """The records of one log as `position offset`, `start-end` or `start gone`, batches with bars between."""
    shown = []
    for batch in group.logs[number][since:]:
        parts = []
        for key, value in batch:
            record = decode_record(key, value)
            assert record is not None
            if isinstance(record.key, OffsetCommitKey):
                parts.append("no position" if record.value is None else f"position {record.value.offset}")
            elif isinstance(record.key, IndividualCommitKey):
                start = record.key.start
                parts.append(f"{start} gone" if record.value is None else f"{start}-{record.value.end}")
        shown.append(", ".join(parts))
    return shown


def member(group: RangedGroup, **epochs: int) -> None:
    made = ConsumerGroup("g")
    for name, epoch in epochs.items():
        made.members[name] = Member(name, MemberMetadata(topics=("foo",)), epoch=epoch)
    group.coordinator.groups["g"] = made


def started(**settings: int) -> RangedGroup:
    """The proposal's picture: all below 43 is processed, and 45-47 and 50."""
    group = RangedGroup(**settings)
    group.committed(43)
    group.committed(ranges=[(45, 47), (50, 50)])
    return group


def test_a_range_between_two_joins_them_in_one_batch_with_the_tombstones() -> None:
    group = started()
    assert group.committed(ranges=[(48, 49)]) == 43
    assert group.ranges() == [(45, 50)]
    assert written(group, 1) == ["45-47, 50-50", "45-50, 50 gone"]


def test_a_range_that_touches_the_stable_offset_moves_it_through_those_behind_and_they_go_when_that_is_durable() -> (
    None
):
    group = started()
    before = len(group.logs[0])
    answer = group.commit(ranges=[(43, 44)])
    assert (answer.error_code, answer.last_stable_offset) == (ErrorCode.NONE, 48)
    assert group.ranges() == [(50, 50)]
    assert written(group, 0, before) == ["position 48"]
    assert written(group, 1) == ["45-47, 50-50"]
    group.sync()
    assert written(group, 1) == ["45-47, 50-50", "45 gone"]


def test_the_tombstone_of_a_range_waits_for_the_position_that_has_passed_it_and_for_no_other() -> None:
    group = started()
    group.commit(ranges=[(43, 44)])
    (first,) = group.waiting
    group.commit(ranges=[(48, 49)])
    assert group.fetched().committed_offset == 51
    group.submit(lambda machine: machine.ranged.decide_durable(first))
    assert written(group, 1)[-1] == "45 gone"
    group.settle()
    assert written(group, 1)[-1] == "50 gone"


def test_gap_amending() -> None:
    group = RangedGroup()
    group.committed(41)
    group.committed(ranges=[(43, 45), (48, 49)])
    assert group.committed(ranges=[(41, 42), (46, 47), (50, 50)]) == 51
    assert group.ranges() == []
    assert group.fetched().committed_offset == 51


def test_sharers_of_a_partition_commit_one_offset_each_and_the_lowest_is_the_stable_one() -> None:
    group = RangedGroup()
    group.committed(10)
    assert group.committed(shares=[keys(4, 7, 900)]) == 10
    found = group.fetched()
    assert found.committed_offset == 10
    assert [(it.start, it.end, it.offset) for it in found.key_range_offsets] == [
        (0, PLACES[4] - 1, 10),
        (PLACES[4], SPACE_END, 900),
    ]
    assert not group.logs[1]
    assert group.committed(shares=[keys(0, 3, 500), keys(7, 7, 950)]) == 10
    group.load()
    assert group.fetched().key_range_offsets != found.key_range_offsets


def test_a_range_moves_only_the_keys_that_it_touches() -> None:
    group = RangedGroup()
    group.committed(0)
    group.committed(shares=[keys(3, 7, 10)])
    assert group.committed(ranges=[(10, 14)]) == 0
    shares = {(it.start, it.offset) for it in group.fetched().key_range_offsets}
    assert (PLACES[3], 15) in shares and (0, 0) in shares
    assert group.ranges() == [(10, 14)]
    assert group.committed(ranges=[(0, 9)]) == 15
    assert group.ranges() == [] and not group.fetched().key_range_offsets


# -- how far owners have come ----------------------------------------------------------------------------------------


def passed(group: RangedGroup) -> tuple[int, dict[int, int]]:
    """How far the owners of all keys have come, and by key what a member is told of that."""
    position = group.coordinator.positions.get("g", "foo", 0)
    assert position is not None
    return position.gone_through, {it.start: it.offset for it in group.fetched().passed_key_ranges}


@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_others_finish_moves_keys_on_and_no_owner_of_theirs(is_loaded: bool) -> None:
    group = RangedGroup()
    group.committed(5)
    group.committed(ranges=[(9, 14)])
    assert group.committed(shares=[keys(4, 7, 11)]) == 5
    assert passed(group) == (5, {0: 5, PLACES[4]: 11})
    below = KeyRangeOffset(end=PLACES[4] - 1, offset=13)
    assert group.committed(shares=[below]) == 15 and not group.ranges()
    if is_loaded:
        group.load()
    assert passed(group) == (11, {0: 13, PLACES[4]: 11})
    assert group.committed(shares=[keys(0, 7, 15)]) == 15
    assert passed(group) == (15, {}), "the owners have come as far as all is done"


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_range_of_offsets_says_nothing_of_owners(in_transaction: bool) -> None:
    group = RangedGroup()
    group.committed(5)
    if in_transaction:
        group.commit_later(1, [(5, 8)])
        group.end(1, committed=True)
    else:
        group.committed(ranges=[(5, 8)])
    assert group.fetched().committed_offset == 9 and passed(group) == (5, {0: 5})


def test_a_plain_commit_says_how_far_the_owner_of_all_keys_has_come() -> None:
    group = RangedGroup()
    group.committed(5)
    group.committed(ranges=[(5, 8), (12, 13)])
    member(group, one=3)
    assert group.committed(10, member="one", epoch=3) == 10
    assert passed(group) == (10, {})
    assert group.committed(12, member="one", epoch=3) == 14
    assert passed(group) == (12, {0: 12})
    assert group.committed(3, member="one", epoch=3) == 3
    assert passed(group) == (3, {}), "a rewind"


@pytest.mark.parametrize("in_transaction", [False, True])
def test_a_plain_commit_of_where_the_group_stands_does_not_say_that_its_member_has_come_there(
    in_transaction: bool,
) -> None:
    group = RangedGroup()
    group.committed(5)
    group.committed(ranges=[(5, 9)])
    member(group, one=3)
    if in_transaction:
        group.commit_later(1, offset=10, member="one", epoch=3, metadata="said")
        group.end(1, committed=True)
    else:
        group.committed(10, member="one", epoch=3, metadata="said")
    assert passed(group) == (5, {0: 5}) and group.fetched().metadata == "said"


def test_metadata_alone_can_be_committed_for_ranges_of_keys() -> None:
    group = RangedGroup()
    group.committed(5)
    group.committed(ranges=[(5, 9)])
    assert group.committed(shares=[keys(0, 3, OFFSET_NOT_SAID)], metadata="said") == 10
    assert passed(group) == (5, {0: 5}) and group.fetched().metadata == "said"
    group.commit_later(1, shares=[keys(0, 3, OFFSET_NOT_SAID)], metadata="again")
    group.end(1, committed=True)
    assert passed(group) == (5, {0: 5}) and group.fetched().metadata == "again"


@pytest.mark.parametrize("by_key", [False, True])
@pytest.mark.parametrize("before", [None, 5])
def test_a_commit_of_where_a_reader_began_does_not_say_that_it_has_come_there(by_key: bool, before: int | None) -> None:
    group = RangedGroup()
    if before is not None:
        group.committed(before)
    shares = [keys(0, 7, 40)] if by_key else []
    group.committed(-1 if by_key else 40, shares=shares, metadata=BEGUN_HERE)
    came = before if before is not None and by_key else 0
    assert passed(group)[0] == came and not group.fetched().metadata
    assert group.coordinator.positions.get("g", "foo", 0).stands.lowest(SPACE) == 40  # type: ignore[union-attr]
    group.load()
    assert passed(group)[0] == came
    group.committed(-1 if by_key else 45, shares=[keys(0, 7, 45)] if by_key else [])
    assert passed(group)[0] == 45, "the gate was open: what is behind it is committed"


def test_where_a_group_begins_says_nothing_of_the_keys_of_others() -> None:
    group = RangedGroup()
    assert group.committed(2, shares=[keys(0, 3, 2)]) == 2
    assert passed(group) == (0, {0: 2, PLACES[3] + 1: 0})


def test_so_does_a_member_that_was_made_to_begin_behind_a_committed_offset() -> None:
    group = RangedGroup()
    group.committed(5)
    member(group, one=3)
    group.committed(40, member="one", epoch=3, metadata=BEGUN_HERE)
    assert passed(group) == (5, {0: 5}) and group.fetched().committed_offset == 40
    group.committed(45, member="one", epoch=3)
    assert passed(group) == (45, {})


def test_ranges_that_are_compared_with_a_position_after_a_crash_say_nothing_of_owners() -> None:
    group = RangedGroup()
    group.committed(5)
    group.committed(ranges=[(7, 8)])
    group.settle()
    group.commit(ranges=[(5, 6)])
    group.durable[0] -= 0
    group.crash()
    group.ring()
    assert passed(group)[0] == 5


@pytest.mark.parametrize(
    ("ranges", "shares", "code", "sentence"),
    [
        ([(46, 44)], [], "INVALID_REQUEST", "ends before it starts"),
        ([(45, 48), (48, 50)], [], "INVALID_REQUEST", "overlaps"),
        ([], [keys(5, 3, 50)], "INVALID_REQUEST", "end before they start"),
        ([], [keys(0, 5, 50), keys(5, 7, 50)], "INVALID_REQUEST", "overlap"),
        ([(42, 44)], [], "INDIVIDUAL_COMMIT_TOO_OLD", "Offset 42 lies below the stable offset 43"),
        ([(60, 61), (20, 21)], [], "INDIVIDUAL_COMMIT_TOO_OLD", "Offset 20 lies below"),
        ([], [keys(0, 3, 42)], "INDIVIDUAL_COMMIT_TOO_OLD", "Offset 42 lies below"),
        ([(2 * it, 2 * it) for it in range(30, 60_031)], [], "INVALID_REQUEST", "60001 ranges"),
    ],
)
def test_what_cannot_be_is_refused_with_the_stable_offset_and_a_sentence_and_changes_nothing(
    ranges: list[tuple[int, int]], shares: list[object], code: str, sentence: str
) -> None:
    group = started()
    before = [len(log) for log in group.logs]
    answer = group.commit(ranges=ranges, shares=shares)  # type: ignore[arg-type]
    assert ErrorCode(answer.error_code).name == code
    assert sentence in answer.error_message
    assert answer.last_stable_offset == 43
    assert [len(log) for log in group.logs] == before


def test_a_broker_that_takes_no_individual_commits_says_so_and_takes_plain_ones() -> None:
    group = RangedGroup(individual_commits=False)
    assert group.commit(7).error_code == ErrorCode.NONE
    for fields in ({"ranges": [(8, 9)]}, {"shares": [keys(0, 7, 9)]}):
        answer = group.commit(**fields)  # type: ignore[arg-type]
        assert answer.error_code == ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED
        assert "accept.individual.commit is false" in answer.error_message


def test_a_zombie_commits_no_ranges() -> None:
    group = started()
    member(group, A=5)
    before = [len(log) for log in group.logs]
    for fields in ({"ranges": [(60, 61)]}, {"shares": [keys(0, 7, 60)]}):
        stale = group.commit(member="A", epoch=4, **fields)  # type: ignore[arg-type]
        gone = group.commit(member="B", epoch=5, **fields)  # type: ignore[arg-type]
        assert (stale.error_code, gone.error_code) == (ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID)
    assert [len(log) for log in group.logs] == before
    assert group.committed(ranges=[(60, 61)], member="A", epoch=5) == 43


def test_ranges_that_are_committed_again_are_fine_and_said_once() -> None:
    group = started()
    for _ in range(3):
        assert group.committed(ranges=[(46, 48)]) == 43
        assert group.ranges() == [(45, 48), (50, 50)]
    assert group.effects == [RangesRepeated("g", "foo", 0, (46, 47))]
    again = group.commit(ranges=[(46, 47)])
    assert again.error_code == ErrorCode.NONE
    assert len(group.logs[1]) == 2  # a repetition writes nothing


def test_a_partition_can_be_named_once_beside_ranges() -> None:
    group = RangedGroup()
    twice = group.commit  # two entries of one request would be decided upon the same state
    assert twice(5).error_code == ErrorCode.NONE
    answer = _twice(group)
    assert [ErrorCode(it.error_code) for it in answer] == [ErrorCode.INVALID_REQUEST] * 2


def _twice(group: RangedGroup) -> list[object]:
    from anabranch.machines.groups.caller import Caller
    from anabranch.protocol.messages.offset_commit import (
        OffsetCommitRequest,
        OffsetCommitRequestPartition,
        OffsetCommitRequestTopic,
        OffsetRange,
    )

    part = OffsetCommitRequestPartition(
        partition_index=0,
        committed_offset=-1,
        committed_metadata="",
        offset_ranges=[OffsetRange(start=9, end=9)],
    )
    request = OffsetCommitRequest(
        wants_stable_offset=True, group_id="g", topics=[OffsetCommitRequestTopic(name="foo", partitions=[part, part])]
    )
    reply = group.submit(lambda machine: machine.offset_commit(request, Caller("c", "/h", 9, "", 0), group.now_ms))
    return list(reply.topics[0].partitions)


# -- where a group begins ----------------------------------------------------------------------------------------------


def test_a_group_that_has_committed_nothing_begins_where_its_first_commit_by_ranges_says() -> None:
    group = RangedGroup()
    answer = group.commit(1_000, ranges=[(1_001, 1_005)])
    assert (answer.error_code, answer.last_stable_offset) == (ErrorCode.NONE, 1_000)
    assert group.fetched().committed_offset == 1_000
    assert group.committed(7, ranges=[(1_000, 1_000)]) == 1_006  # the offset beside ranges is of no meaning then


def test_without_a_word_about_it_the_group_begins_at_the_log_start() -> None:
    image = topics(foo=2)
    foo = replace(image.by_name["foo"], log_start=lambda _: 400)
    group = RangedGroup(Image(1, {"foo": foo}))
    assert group.committed(ranges=[(410, 419)]) == 400
    group.load()
    assert group.fetched().committed_offset == 400 and group.ranges() == [(410, 419)]


# -- plain commits beside ranges ---------------------------------------------------------------------------------------


def test_a_plain_commit_of_a_member_keeps_what_others_did_above_it() -> None:
    group = started()
    member(group, A=5)
    group.committed(44, member="A", epoch=5)
    assert group.fetched().committed_offset == 44 and group.ranges() == [(45, 47), (50, 50)]
    assert group.committed(46, member="A", epoch=5) == 48
    assert group.fetched().committed_offset == 48 and group.ranges() == [(50, 50)]


def test_a_member_that_commits_below_the_stable_offset_rewinds_the_group() -> None:
    group = started()
    member(group, A=5)
    group.committed(42, member="A", epoch=5)
    assert group.fetched().committed_offset == 42 and group.ranges() == []
    assert written(group, 1)[-1] == "45 gone, 50 gone"


def test_a_tool_sets_the_offset_of_a_group_and_everything_from_there_is_delivered_again() -> None:
    group = started()
    group.committed(shares=[keys(0, 3, 60)])
    group.committed(44)
    found = group.fetched()
    assert (found.committed_offset, found.key_range_offsets, group.ranges()) == (44, [], [])
    group.load()
    group.ring()
    assert group.fetched().committed_offset == 44 and group.ranges() == []


def test_ranges_from_before_a_rewind_stay_void_when_their_tombstones_were_not_written() -> None:
    group = started()
    group.commit(43)
    group.durable = [len(log) for log in group.logs]
    group.crash()
    assert group.ranges() == []
    group.now_ms += 1
    assert group.committed(ranges=[(60, 60)]) == 43
    group.load()
    assert group.ranges() == [(60, 60)]
    group.ring()
    assert sorted(written(group, 1)[-1].split(", ")) == ["45 gone", "50 gone"]


def test_a_range_that_is_committed_again_after_a_rewind_is_not_buried_with_the_old_one() -> None:
    group = started()
    group.commit(43)
    group.now_ms += 1
    group.commit(ranges=[(45, 46)])
    group.settle()
    assert group.ranges() == [(45, 46)]
    group.load()
    group.ring()
    assert group.ranges() == [(45, 46)]


# -- the ends of groups, topics and offsets ----------------------------------------------------------------------------


def assert_nothing_is_left(group: RangedGroup) -> None:
    group.settle()
    last = {key: value for log in group.logs for batch in log for key, value in batch}
    assert not any(last.values())
    assert group.coordinator.offsets.individual.count == 0
    assert group.fetched().committed_offset == -1


def test_ranges_go_with_their_group() -> None:
    group = started()
    assert group.submit(lambda machine: machine.delete_group("g", group.now_ms)) == ErrorCode.NONE
    assert_nothing_is_left(group)


def test_ranges_go_with_their_topic_and_do_not_apply_to_another_of_its_name() -> None:
    group = started()
    foo = group.image.by_name["foo"]
    anew = replace(foo, topic_id=type(foo.topic_id)(int=77))
    image = Image(2, {"foo": anew})
    group.submit(lambda machine: machine.topics_changed(image, group.now_ms))
    assert_nothing_is_left(group)


def test_ranges_go_with_deleted_offsets() -> None:
    group = started()
    request = OffsetDeleteRequest(
        group_id="g",
        topics=[OffsetDeleteRequestTopic(name="foo", partitions=[OffsetDeleteRequestPartition(partition_index=0)])],
    )
    reply = group.submit(lambda machine: machine.offset_delete(request, group.now_ms))
    assert reply.topics[0].partitions[0].error_code == ErrorCode.NONE
    assert_nothing_is_left(group)


def test_ranges_expire_with_their_offset_which_commits_by_ranges_keep_alive() -> None:
    retention_ms = 3 * REFRESHED_AFTER_MS
    group = RangedGroup(offsets_retention_ms=retention_ms)
    group.committed(43)
    for number in range(5):
        group.now_ms += REFRESHED_AFTER_MS
        group.committed(ranges=[(50 + 2 * number, 50 + 2 * number)])
        group.submit(lambda machine: machine.on_timer(("expire",), group.now_ms))
    assert len(group.ranges()) == 5
    group.now_ms += retention_ms + 1
    group.submit(lambda machine: machine.on_timer(("expire",), group.now_ms))
    assert_nothing_is_left(group)


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_group_with_too_many_ranges_is_assigned_anew_and_the_owner_of_the_gap_is_named() -> None:
    group = started(ranges_per_partition_max=3)
    member(group, A=5)
    made = group.coordinator.groups["g"]
    assert isinstance(made, ConsumerGroup)
    made.holders[group.image.by_name["foo"].topic_id, 0] = "A"
    epoch = made.epoch
    assert group.committed(ranges=[(60, 60)], member="A", epoch=5) == 43
    refused = group.commit(ranges=[(70, 70)], member="A", epoch=5)
    assert refused.error_code == ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED
    assert "3 ranges above the stable offset 43" in refused.error_message
    group.settle()
    assert group.effects == [TooManyRanges("g", "foo", 0, (43, 44), 3, "A")]
    now = group.coordinator.groups["g"]
    assert isinstance(now, ConsumerGroup) and now.epoch == epoch + 1
    # What makes fewer of them, or no more, is taken.
    assert group.committed(ranges=[(48, 49)], member="A", epoch=5) == 43
    assert group.committed(ranges=[(70, 70)], member="A", epoch=5) == 43
    assert group.commit(ranges=[(80, 80)], member="A", epoch=5).error_code
    group.settle()
    assert len(group.effects) == 1  # not with every commit
    group.now_ms += ASSIGNED_ANEW_MS
    assert group.commit(ranges=[(80, 80)], member="A", epoch=5).error_code
    group.settle()
    assert len(group.effects) == 2
    assert group.committed(ranges=[(43, 44), (90, 90)], member="A", epoch=5) == 51


@pytest.mark.parametrize(
    ("sharers", "named"),
    [({"A": (0, 3), "B": (3, 7)}, "B"), ({"B": (0, 3), "A": (3, 7)}, "A"), ({"A": (0, 3), "B": (3, 5)}, "")],
)
def test_of_a_shared_partition_the_sharer_that_is_furthest_back_is_named(
    sharers: dict[str, tuple[int, int]], named: str
) -> None:
    """The keys from the fifth place on are furthest back; the third case has no member for them."""
    group = started(ranges_per_partition_max=3)
    group.committed(shares=[keys(0, 5, 100)])
    group.committed(ranges=[(70, 70)])
    member(group, A=5, B=5)
    made = group.coordinator.groups["g"]
    assert isinstance(made, ConsumerGroup)
    at = group.image.by_name["foo"].topic_id, 0
    made.sharers[at] = {name: (Interval(PLACES[first], PLACES[last] - 1),) for name, (first, last) in sharers.items()}
    made.holders[at] = min(sharers, key=lambda name: sharers[name])
    for name, ranges in made.sharers[at].items():
        made.members[name] = replace(made.members[name], assigned=((at[0], (0,)),), shares=((at, ranges),))
    assert group.commit(ranges=[(60, 60)], member="A", epoch=5).error_code == ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED
    group.settle()
    assert [effect.owner for effect in group.effects] == [named]


def test_the_ranges_of_all_groups_are_bounded_too() -> None:
    held = [10]
    group = RangedGroup(ranges_max=10, ranges_held=lambda: held[0])
    group.committed(43)
    assert group.commit(ranges=[(50, 50)]).error_code == ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED
    held[0] = 9
    assert group.committed(ranges=[(50, 50)]) == 43


def test_a_frontier_has_a_bounded_number_of_steps() -> None:
    group = RangedGroup()
    group.committed(0)
    shares = [keys(0, 0, 0)]
    shares = [type(shares[0])(start=4 * it, end=4 * it, offset=5) for it in range(600)]
    answer = group.commit(shares=shares)
    assert answer.error_code == ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED
    assert "offsets of their own" in answer.error_message
    assert group.commit(shares=shares[:400]).error_code == ErrorCode.NONE


# -- transactions ------------------------------------------------------------------------------------------------------


def test_ranges_of_a_transaction_count_when_it_is_committed() -> None:
    group = started()
    answer = group.commit_later(7, [(43, 44)], [keys(4, 7, 90)])
    assert (answer.error_code, answer.last_stable_offset) == (ErrorCode.NONE, 43)
    assert group.fetched().committed_offset == 43
    assert group.fetched(stable=True).error_code == ErrorCode.UNSTABLE_OFFSET_COMMIT
    group.end(7, committed=True)
    assert group.fetched().committed_offset == 48 and group.ranges() == [(50, 50)]
    assert group.fetched(stable=True).error_code == ErrorCode.NONE


def test_ranges_of_an_aborted_transaction_do_not_count() -> None:
    group = started()
    group.commit_later(7, [(43, 44)], [keys(4, 7, 90)])
    group.end(7, committed=False)
    group.settle()
    assert group.fetched().committed_offset == 43 and not group.fetched().key_range_offsets
    group.load()
    group.ring()
    assert group.fetched().committed_offset == 43 and group.ranges() == [(45, 47), (50, 50)]


def test_the_proposals_two_threads() -> None:
    group = RangedGroup(gaps_are_waited_for=True)
    group.committed(40)
    second = group.commit_later(2, [(45, 49)])
    assert isinstance(second, int) and group.code_of(second) is None
    assert group.commit_later(1, [(40, 44)]).error_code == ErrorCode.NONE
    assert group.code_of(second) == ErrorCode.NONE
    group.end(2, committed=True)
    assert group.fetched().committed_offset == 40 and group.ranges() == [(45, 49)]
    group.end(1, committed=True)
    assert group.fetched().committed_offset == 50 and group.ranges() == []


def test_a_commit_by_key_range_waits_for_nobody() -> None:
    group = started()
    assert group.commit_later(7, shares=[keys(4, 7, 500)]).error_code == ErrorCode.NONE


def test_a_plain_commit_of_others_closes_a_gap_too_and_a_transaction_that_ends_waits_no_longer() -> None:
    group = started(gaps_are_waited_for=True)
    first, second = group.commit_later(1, [(60, 61)]), group.commit_later(2, [(70, 71)])
    group.committed(ranges=[(43, 44), (48, 49), (51, 59)])
    assert (group.code_of(first), group.code_of(second)) == (ErrorCode.NONE, None)
    group.end(2, committed=False)
    assert group.code_of(second) == ErrorCode.INVALID_PRODUCER_EPOCH
    group.end(1, committed=True)
    assert group.fetched().committed_offset == 62


def test_a_rewind_voids_what_open_transactions_have_committed_by_ranges() -> None:
    group = started()
    group.commit_later(7, shares=[keys(0, 7, 90)])
    group.committed(20)
    group.end(7, committed=True)
    assert group.fetched().committed_offset == 20


@pytest.mark.parametrize("is_committed", [True, False])
def test_ranges_do_not_overtake_what_another_transaction_has_committed(is_committed: bool) -> None:
    """The position that names what goes with them was written at once, and the other one's offset dropped."""
    group = RangedGroup()
    group.committed(40)
    assert group.commit_later(1, offset=45).error_code == ErrorCode.NONE
    assert group.commit_later(2, shares=[keys(0, 7, 60)]).error_code == ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    group.end(1, committed=is_committed)
    stable = 45 if is_committed else 40
    assert group.fetched().committed_offset == stable
    assert group.commit_later(2, [(stable, 52)]).error_code == ErrorCode.NONE
    group.end(2, committed=True)
    assert group.fetched().committed_offset == 53


@pytest.mark.parametrize("begun", [None, 40])
def test_ranges_of_a_transaction_go_with_an_offset_that_it_has_committed_before(begun: int | None) -> None:
    group = RangedGroup()
    if begun is not None:
        group.committed(begun)
    assert group.commit_later(1, offset=45).error_code == ErrorCode.NONE
    assert group.commit_later(1, shares=[keys(0, 7, 60)]).error_code == ErrorCode.NONE
    group.end(1, committed=True)
    told = group.fetched()
    assert told.committed_offset >= 45 and (told.key_range_offsets or told.committed_offset == 60)


def test_a_zombie_says_nothing_of_where_a_group_begins() -> None:
    """Its offset was written as the group's first one, though its commit was refused."""
    group = RangedGroup()
    member(group, A=5)
    answer = group.commit_later(7, [(90, 92)], offset=90, member="A", epoch=4)
    assert answer.error_code == ErrorCode.STALE_MEMBER_EPOCH
    assert group.fetched().committed_offset == -1


def test_a_zombies_transaction_commits_no_ranges_and_wrong_ones_are_refused() -> None:
    group = started()
    member(group, A=5)
    before = [len(log) for log in group.logs]
    zombie = group.commit_later(7, [(43, 44)], member="A", epoch=4)
    assert zombie.error_code == ErrorCode.STALE_MEMBER_EPOCH
    old = group.commit_later(7, [(42, 44)], member="A", epoch=5)
    assert (old.error_code, old.last_stable_offset) == (ErrorCode.INDIVIDUAL_COMMIT_TOO_OLD, 43)
    assert group.commit_later(7, [(44, 43)], member="A", epoch=5).error_code == ErrorCode.INVALID_REQUEST
    assert [len(log) for log in group.logs] == before
