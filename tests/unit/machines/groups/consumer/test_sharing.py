"""Groups whose members share partitions: hand-over by key, fencing, commits, fail-over, mixed and classic members."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.assignors.shares import PARTITIONS_BY_LOAD_MAX
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.classic import ClassicGroup, ClassicState
from anabranch.machines.groups.consumer.group import MemberState
from anabranch.machines.groups.consumer.sharing import SHARED_TOPICS_MAX
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.records import decode_record
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.key_ranges import NONE, WHOLE, common, size
from anabranch.machines.keyspace import SPACE_END, Interval
from anabranch.protocol.messages import consumer_group_install_assignment as install_messages
from anabranch.protocol.messages.consumer_group_heartbeat import Assignor, KeyRange, PartitionKeyRanges
from anabranch.protocol.messages.consumer_group_prepare_assignment import ConsumerGroupPrepareAssignmentRequest
from anabranch.protocol.messages.sync_group import SyncGroupRequestAssignment
from tests.support.groups import GROUP, GroupWorld, assigned, assignment, subscription, topic_id, topics
from tests.support.sharing import Sharer, SharingWorld, shared_topics

HALF = (SPACE_END + 1) // 2
LOWER, UPPER = (Interval(0, HALF - 1),), (Interval(HALF, SPACE_END),)
FOO = topic_id("foo")


def two() -> SharingWorld:
    world = SharingWorld()
    world.enter("A", "B")
    return world


def test_a_second_member_gets_half_of_the_only_partition_when_the_first_has_revoked_it() -> None:
    world = SharingWorld()
    world.enter("A")
    assert world.owners() == {0: {"A": WHOLE}}
    world.members["B"] = Sharer(world, "B")
    a, b = world.members["A"], world.members["B"]
    b.beat()
    assert b.told == {}, "B waits for the half that A has"
    a.beat()
    assert a.told == {(FOO, 0): LOWER}
    b.beat()
    assert b.told == {}, "A was told, and has not acknowledged"
    a.beat()
    b.beat()
    assert b.told == {}, "A still reports the whole partition"
    a.follow()
    a.beat()
    b.beat()
    assert b.told == {(FOO, 0): UPPER}
    assert world.group.members["A"].state is MemberState.STABLE
    world.settle()


def test_a_member_is_told_which_keys_it_waits_for() -> None:
    world = SharingWorld()
    world.enter("A")
    joins = world.beat_owning("B", 0, [], rebalance_timeout_ms=60_000, topics=["foo"], allow_key_share=True)
    assert joins.assignment is not None
    (pending,) = joins.assignment.pending_topic_partitions
    assert (list(pending.partitions), pending.key_ranges) == (
        [0],
        [PartitionKeyRanges(partition=0, ranges=[KeyRange(start=HALF, end=SPACE_END)])],
    )


def test_who_goes_frees_its_keys_and_the_others_keep_theirs() -> None:
    world = two()
    world.enter("C", "D")
    before = world.owners()[0]
    world.leave_group("D")
    world.settle()
    after = world.owners()[0]
    assert set(after) == {"A", "B", "C"}
    assert all(common(after[name], before[name]) for name in after)
    world.kill("A")
    world.settle()
    assert set(world.owners()[0]) == {"B", "C"}
    world.kill("B")
    world.settle()
    assert world.owners() == {0: {"C": WHOLE}}
    assert not world.group.sharers and not world.group.target_shares


def test_with_as_many_partitions_as_members_nothing_is_cut() -> None:
    world = SharingWorld(shared_topics(foo=3))
    world.enter("A", "B", "C")
    assert all(ranges == WHOLE for owners in world.owners().values() for ranges in owners.values())
    world.enter("D")
    assert sorted(len(owners) for owners in world.owners().values()) == [1, 1, 2]
    world.leave_group("D")
    world.settle()
    assert sorted(len(owners) for owners in world.owners().values()) == [1, 1, 1]


@pytest.mark.parametrize("which", ["topic", "broker", "member", "most"])
def test_each_switch_keeps_partitions_whole(which: str) -> None:
    settings = GroupSettings(individual_commits=which != "broker", consumer_shares_max=1 if which == "most" else 16)
    world = SharingWorld(topics(foo=1) if which == "topic" else shared_topics(foo=1), settings=settings)
    world.enter("A", "B", willing=which != "member")
    assert world.owners() == {0: {"A": WHOLE}}


def test_a_topic_that_is_switched_on_and_off_is_shared_and_whole_again() -> None:
    world = SharingWorld(topics(1, foo=1))
    world.enter("A", "B")
    assert world.owners() == {0: {"A": WHOLE}}
    world.set_topics(shared_topics(2, foo=1))
    world.settle()
    assert world.owners() == {0: {"A": LOWER, "B": UPPER}}
    world.set_topics(topics(3, foo=1))
    world.settle()
    assert list(world.owners()[0].values()) == [WHOLE]


def test_who_does_not_allow_it_gets_whole_partitions_among_sharers() -> None:
    world = SharingWorld(shared_topics(foo=3))
    world.enter("A", "B", "C", "D")
    world.enter("X", "Y", willing=False)
    owners = world.owners()
    wholes = [set(held) for held in owners.values() if set(held) & {"X", "Y"}]
    assert wholes in ([{"X"}], [{"Y"}]), "one of three partitions is due to two of six members"
    assert sum(len(held) for held in owners.values()) == 5


def test_a_member_that_withdraws_its_consent_gives_up_its_part() -> None:
    world = two()
    world.members["B"].willing = False
    world.members["B"].beat(full=True)
    world.members["B"].follow()
    world.settle()
    assert [set(held) for held in world.owners().values()] == [{"A"}]


def test_a_member_that_withdraws_its_consent_has_no_part_while_it_waits_for_the_rest() -> None:
    """Its target is the whole partition of which it had a part: it is told nothing of it until all is free."""
    world = SharingWorld(shared_topics(foo=2))
    world.enter("A", "B", "C")
    owners = world.owners()
    (number,) = (number for number, held in owners.items() if len(held) == 2)
    largest = max(owners[number], key=lambda name: (size(owners[number][name]), name != "C"))
    world.members[largest].willing = False
    world.members[largest].beat(full=True)
    assert world.group.members[largest].state is MemberState.UNREVOKED_PARTITIONS, "it still works on its part"
    assert (FOO, number) in [(topic, n) for topic, numbers in world.group.target(largest) for n in numbers]
    world.members[largest].follow()
    world.settle()
    assert all(ranges == WHOLE for held in world.owners().values() for ranges in held.values())


def test_another_instance_that_takes_over_for_a_static_member_keeps_its_keys() -> None:
    world = SharingWorld()
    world.enter("A")
    said = {"rebalance_timeout_ms": 60_000, "topics": ["foo"], "allow_key_share": True, "instance_id": "i"}
    world.beat_owning("S", 0, [], **said)
    a = world.members["A"]
    for _ in range(3):
        a.beat()
        a.follow()
    assert world.beat_owning("S", world.group.members["S"].epoch, [], instance_id="i").error_code == 0
    before = world.group.members["S"].shares
    assert before
    world.beat_owning("S", -2, [], instance_id="i")
    answer = world.beat_owning("S2", 0, [], **said)
    assert answer.error_code == ErrorCode.NONE and answer.assignment is not None
    assert answer.assignment.topic_partitions[0].key_ranges[0].ranges
    assert world.group.members["S2"].shares == world.group.target_shares["S2"] == before
    world.check()


def test_a_static_member_that_has_left_for_a_while_commits_no_keys_of_others() -> None:
    world = SharingWorld()
    world.enter("A")
    said = {"rebalance_timeout_ms": 60_000, "topics": ["foo"], "allow_key_share": True, "instance_id": "i"}
    world.beat_owning("S", 0, [], **said)
    for _ in range(3):
        world.members["A"].beat()
        world.members["A"].follow()
    world.beat_owning("S", -2, [], instance_id="i")
    away = Sharer(world, "S")
    away.epoch = -2
    others = world.owners()[0]["A"]
    assert others != WHOLE
    assert away.commit(70, {(FOO, 0): others}) == [ErrorCode.STALE_MEMBER_EPOCH]


# -- reports -----------------------------------------------------------------------------------------------------------


def test_ranges_that_cannot_be_are_refused() -> None:
    world = two()
    a = world.members["A"]
    for start, end in ((5, 4), (-1, 4)):
        wrong = [PartitionKeyRanges(partition=0, ranges=[KeyRange(start=start, end=end)])]
        answer = world.beat_owning("A", a.epoch, [replace_ranges(wrong)])
        assert answer.error_code == ErrorCode.INVALID_REQUEST and "keys" in (answer.error_message or "")
    twice = [PartitionKeyRanges(partition=0, ranges=[KeyRange(start=0, end=4), KeyRange(start=4, end=9)])]
    assert world.beat_owning("A", a.epoch, [replace_ranges(twice)]).error_code == ErrorCode.INVALID_REQUEST
    assert world.owners() == {0: {"A": LOWER, "B": UPPER}}


def replace_ranges(ranges: list[PartitionKeyRanges]) -> object:
    from anabranch.protocol.messages.consumer_group_heartbeat import TopicPartitions

    return TopicPartitions(topic_id=FOO, partitions=[0], key_ranges=ranges)


def test_a_zombie_of_the_epoch_before_that_reports_more_than_it_has_is_fenced() -> None:
    """The answer that moved it on took keys from it: what it reports is of before, and cannot count as let go."""
    world = SharingWorld()
    world.enter("A")
    a = world.members["A"]
    stale = Sharer(world, "A", joined=True, epoch=a.epoch, owned=dict(a.owned))
    world.members["B"] = Sharer(world, "B")
    world.settle()
    assert stale.beat() is not None
    assert not stale.joined, "fenced"
    assert world.owners() == {0: {"A": LOWER, "B": UPPER}}


def test_the_answer_that_moved_a_member_on_may_be_lost() -> None:
    world = two()
    world.members["C"] = Sharer(world, "C")
    for _ in range(6):
        for member in world.members.values():
            member.beat(lose_answer=True)
            member.beat()
            world.check_owners()
            member.follow()
            world.check_owners()
    world.settle()
    assert len(world.owners()[0]) == 3


# -- commits -----------------------------------------------------------------------------------------------------------


def test_a_member_commits_its_own_keys_and_no_others() -> None:
    world = two()
    a, b = world.members["A"], world.members["B"]
    assert a.commit(50) == [ErrorCode.NONE]
    assert b.commit(70, {(FOO, 0): LOWER}) == [ErrorCode.STALE_MEMBER_EPOCH]
    assert b.commit(70, {(FOO, 0): WHOLE}) == [ErrorCode.STALE_MEMBER_EPOCH]
    assert b.commit(70) == [ErrorCode.NONE]
    position = world.coordinator.offsets.current(GROUP, "foo", 0)
    assert position is not None and position.offset == 50
    assert position.frontier is not None and position.frontier.offsets == (50, 70)


def test_a_member_that_revokes_keys_commits_them_until_it_acknowledges() -> None:
    world = SharingWorld()
    world.enter("A")
    a = world.members["A"]
    world.members["B"] = b = Sharer(world, "B")
    b.beat()
    a.beat()
    assert a.commit(40) == [ErrorCode.NONE], "what it is revoking, it may commit"
    upper = {(FOO, 0): UPPER}
    a.follow()
    a.beat()
    assert a.commit(60, upper) == [ErrorCode.STALE_MEMBER_EPOCH], "what it has let go of, it may not"
    b.beat()
    b.follow()
    assert a.commit(60, upper) == [ErrorCode.STALE_MEMBER_EPOCH]
    assert b.commit(45) == [ErrorCode.NONE]
    position = world.coordinator.offsets.current(GROUP, "foo", 0)
    assert position is not None and position.frontier is not None
    assert position.frontier.offsets == (40, 45)


def plain(world: SharingWorld, member: str, epoch: int, offset: int) -> tuple[int, int]:
    """A commit that names no ranges: its error, and the group's stable offset then."""
    from anabranch.protocol.messages.offset_commit import (
        OffsetCommitRequest,
        OffsetCommitRequestPartition,
        OffsetCommitRequestTopic,
    )

    part = OffsetCommitRequestPartition(partition_index=0, committed_offset=offset, committed_metadata="")
    request = OffsetCommitRequest(
        group_id=GROUP,
        generation_id_or_member_epoch=epoch,
        member_id=member,
        topics=[OffsetCommitRequestTopic(topic_id=FOO, name="foo", partitions=[part])],
    )
    answer = world.submit(lambda machine: machine.offset_commit(request, Caller("c", "/h", 10), world.now_ms))
    position = world.coordinator.offsets.current(GROUP, "foo", 0)
    return answer.topics[0].partitions[0].error_code, -1 if position is None else position.offset


def test_a_plain_commit_of_a_sharer_counts_for_its_own_keys() -> None:
    world = two()
    a, b = world.members["A"], world.members["B"]
    assert plain(world, "A", a.epoch, 90) == (ErrorCode.NONE, 0), "B has committed nothing"
    assert plain(world, "B", b.epoch, 30) == (ErrorCode.NONE, 30)
    position = world.coordinator.offsets.current(GROUP, "foo", 0)
    assert position is not None and position.frontier is not None and position.frontier.offsets == (90, 30)


def test_a_plain_commit_of_a_member_without_keys_of_a_shared_partition_is_refused() -> None:
    world = SharingWorld(shared_topics(foo=1), settings=GroupSettings(consumer_shares_max=2))
    world.enter("A", "B", "C")
    assert "C" not in world.owners()[0]
    assert plain(world, "C", world.members["C"].epoch, 90) == (ErrorCode.STALE_MEMBER_EPOCH, -1)


def test_a_commit_by_no_member_sets_all_keys() -> None:
    world = two()
    world.members["A"].commit(50)
    world.leave_group("A")
    world.leave_group("B")
    assert plain(world, "", -1, 20) == (ErrorCode.NONE, 20)


# -- fail-over, description, records -----------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
def test_a_coordinator_that_takes_over_knows_who_has_which_keys(compact: bool) -> None:
    world = two()
    world.members["C"] = Sharer(world, "C")
    world.members["C"].beat()
    world.members["A"].beat()
    before = world.group
    world.reload(compact=compact)
    assert world.group == before
    world.settle()
    assert len(world.owners()[0]) == 3


def test_a_coordinator_that_takes_no_commits_by_ranges_ends_the_sharing_that_it_finds() -> None:
    world = two()
    world.settings = GroupSettings(individual_commits=False)
    world.reload()
    world.settle()
    assert [list(held.values()) for held in world.owners().values()] == [[WHOLE]]
    assert not world.group.target_shares


def test_a_group_that_does_not_share_writes_records_as_before() -> None:
    """Byte for byte what the records were before there were shares: no tagged field is written."""
    ours, stock = SharingWorld(shared_topics(foo=2)), GroupWorld(topics(foo=2))
    ours.enter("A", "B", willing=False)
    for member in ("A", "B"):
        stock.join(member)
    for world in (ours, stock):
        for key, value, _ in world.log:
            if value is not None:
                record = decode_record(key, value)
                assert record is not None
                for name in ("shares", "assigned_shares", "shares_pending_revocation", "allow_key_share"):
                    assert not getattr(record.value, name, None)
    lengths = {len(value) for key, value, _ in stock.log if value and key[1] in (5, 7)}
    assert lengths == {len(value) for key, value, _ in ours.log if value and key[1] in (5, 7)}


def test_a_description_tells_the_keys_of_each_member() -> None:
    world = two()
    described = world.coordinator.describe_consumer_group(GROUP, world.now_ms)
    told = {
        member.member_id: [(it.start, it.end) for it in member.assignment.topic_partitions[0].key_ranges[0].ranges]
        for member in described.members
    }
    assert told == {"A": [(0, HALF - 1)], "B": [(HALF, SPACE_END)]}
    assert described.members[0].target_assignment == described.members[0].assignment


# -- the classic protocol ----------------------------------------------------------------------------------------------


def test_a_sharing_group_that_goes_back_to_the_classic_protocol_has_whole_partitions() -> None:
    world = SharingWorld(shared_topics(foo=2))
    joined = world.join_classic("", {"range": subscription("foo")})
    member_id = joined.member_id  # type: ignore[union-attr]
    world.join_classic(member_id, {"range": subscription("foo")})
    world.advance(5_000)
    leader = next(it for it in world.answers.values() if it.error_code == 0)
    given = SyncGroupRequestAssignment(member_id=member_id, assignment=assignment("foo-0 foo-1"))
    world.sync_classic(member_id, leader.generation_id, [given])
    for name in "ABC":
        world.members[name] = Sharer(world, name)
    owned = "foo-0 foo-1"
    for _ in range(8):
        for member in world.members.values():
            member.beat()
            world.check_owners()
            member.follow()
        generation = world.group.members[member_id].epoch
        if world.beat_classic(member_id, generation) == ErrorCode.REBALANCE_IN_PROGRESS:
            data = subscription("foo", owned=owned, generation=generation)
            answer = world.join_classic(member_id, {"range": data})
            synced = world.sync_classic(member_id, answer.generation_id)  # type: ignore[union-attr]
            owned = assigned(synced.assignment)  # type: ignore[union-attr]
    assert owned == "" and len(world.members) == 3
    assert world.group.sharers, "the three share two partitions; nothing is due to one of four"
    for name in "ABC":
        world.leave_group(name)
    group = world.coordinator.groups[GROUP]
    assert isinstance(group, ClassicGroup) and list(group.members) == [member_id]
    assert assigned(group.members[member_id].assignment) == "", "what the others had, no member is said to have"
    assert group.state is ClassicState.PREPARING_REBALANCE
    loaded = world.replayed().groups[GROUP]
    assert isinstance(loaded, ClassicGroup)


# -- client-side assignors ---------------------------------------------------------------------------------------------


def chosen() -> SharingWorld:
    """Two members that offer an assignor of theirs; A is asked."""
    world = SharingWorld()
    offers = [Assignor(name="mine", minimum_version=0, maximum_version=0)]
    said = {"rebalance_timeout_ms": 60_000, "topics": ["foo"], "client_assignors": offers}
    for name, willing in (("A", True), ("B", True), ("C", False)):
        world.beat_owning(name, 0, [], allow_key_share=willing, **said)
    return world


def install(world: SharingWorld, parts: dict[str, tuple[tuple[int, int], ...] | None]) -> tuple[int, str]:
    """Install an assignment of foo-0: by member its ranges; none of them for the whole partition."""
    epoch = world.group.members["A"].epoch
    world.beat_owning("A", epoch, [])
    asked = ConsumerGroupPrepareAssignmentRequest(group_id=GROUP, member_id="A", member_epoch=epoch)
    told = world.submit(lambda machine: machine.prepare_assignment(asked, Caller(), world.now_ms))
    assert told.error_code == ErrorCode.NONE, told
    assert {it.member_id: it.allow_key_share for it in told.members} == {"A": True, "B": True, "C": False}
    (topic,) = told.topics
    assert topic.shares_max == 16
    assert [(it.partition, [(r.start, r.end) for r in it.ranges]) for it in topic.intervals] == [(0, [(0, SPACE_END)])]
    members = [
        install_messages.Member(
            member_id=name,
            partitions=[
                install_messages.TopicPartition(
                    topic_id=FOO,
                    partitions=[0],
                    key_ranges=[]
                    if ranges is None
                    else [
                        PartitionKeyRanges(partition=0, ranges=[KeyRange(start=one, end=end) for one, end in ranges])
                    ],
                )
            ],
        )
        for name, ranges in parts.items()
    ]
    request = install_messages.ConsumerGroupInstallAssignmentRequest(
        group_id=GROUP, member_id="A", member_epoch=epoch, group_epoch=told.group_epoch, members=members
    )
    answer = world.submit(lambda machine: machine.install_assignment(request, Caller(), world.now_ms))
    return answer.error_code, answer.error_message or ""


def test_an_assignor_of_the_members_may_cut_a_partition() -> None:
    world = chosen()
    assert install(world, {"A": ((0, 9),), "B": ((10, SPACE_END),)}) == (ErrorCode.NONE, "")
    assert world.group.target_shares == {
        "A": (((FOO, 0), (Interval(0, 9),)),),
        "B": (((FOO, 0), (Interval(10, SPACE_END),)),),
    }
    world.check()


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"A": ((0, 9),), "B": ((9, SPACE_END),)}, "are assigned twice"),
        ({"A": ((0, 9),), "B": ((11, SPACE_END),)}, "the keys 10-10 of partition 0"),
        ({"A": ((0, 9),), "C": ((10, SPACE_END),)}, "member C takes no part"),
        ({"A": ((0, 9),), "B": None}, "is assigned twice"),
        ({"A": ((9, 0),), "B": ((10, SPACE_END),)}, "the keys 9-0 are none"),
        ({"A": ((0, 9), (9, 10)), "B": ((11, SPACE_END),)}, "overlap"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts: dict[str, tuple[tuple[int, int], ...] | None], reason: str) -> None:
    code, message = install(chosen(), parts)
    assert code == ErrorCode.INVALID_ASSIGNMENT and reason in message, message


# -- resizes -----------------------------------------------------------------------------------------------------------


def test_a_resize_spreads_the_sharers_and_a_shrink_brings_them_together() -> None:
    world = SharingWorld(shared_topics(1, foo=1))
    world.enter(*"ABCD")
    world.set_topics(shared_topics(2, foo=2))
    world.settle()
    assert [len(held) for held in world.owners().values()] == [2, 2]
    one = world.image.by_name["foo"]
    image = replace(world.image, version=3, by_name={"foo": replace(one, partitions=(0,), retiring=(1,))})
    world.set_topics(image)
    world.settle()
    owners = world.owners()
    assert set(owners) == {0, 1} and sum(map(len, owners.values())) >= 5, "the retiring one is shared by itself"


# -- stories -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(16))
def test_no_key_has_two_owners_through_joins_leaves_kills_resizes_lost_answers_and_fail_overs(seed: int) -> None:
    chance = random.Random(seed)
    world = SharingWorld(shared_topics(1, foo=chance.randint(1, 3), bar=chance.randint(1, 2)))
    counter = 0
    for _ in range(80):
        match chance.choice(("join", "join", "leave", "kill", "resize", "reload", "off", "consent", *(["beat"] * 12))):
            case "join" if len(world.members) < 9:
                counter += 1
                topics_ = chance.choice((("foo",), ("foo", "bar")))
                willing = chance.random() < 0.8
                world.members[f"m{counter}"] = Sharer(world, f"m{counter}", willing, topics_)
            case "leave" if len(world.members) > 1:
                name = chance.choice(sorted(world.members))
                if world.members[name].joined and world.knows(world.members[name]):
                    world.leave_group(name)
            case "kill" if len(world.members) > 2:
                world.kill(chance.choice(sorted(world.members)))
            case "resize":
                counts = {"foo": chance.randint(1, 4), "bar": chance.randint(1, 3)}
                world.set_topics(shared_topics(world.image.version + 1, **counts))
            case "off":
                made = topics(world.image.version + 1, **{n: len(t.partitions) for n, t in world.image.by_name.items()})
                world.set_topics(made)
            case "consent" if world.members:
                member = world.members[chance.choice(sorted(world.members))]
                member.willing = not member.willing
                if member.joined:
                    member.beat(full=True)
            case "reload":
                world.reload(compact=chance.random() < 0.5)
            case _:
                for member in world.members.values():
                    if chance.random() < 0.7:
                        member.beat(lose_answer=chance.random() < 0.3)
                        world.check_owners()
                    if chance.random() < 0.7:
                        member.follow()
                    if member.joined and member.owned and chance.random() < 0.4:
                        member.commit(chance.randint(0, 10**6))
        world.check_owners()
    world.set_topics(shared_topics(world.image.version + 1, foo=2, bar=1))
    world.settle(rounds=30)
    sizes = [size(ranges) for held in world.owners().values() for ranges in held.values()]
    assert NONE not in sizes


def test_members_of_more_shared_topics_than_a_heartbeat_may_name_are_not_refused() -> None:
    """Each would report a range of every topic: those beyond the bound are whole."""
    names = [f"t{number:04}" for number in range(1_100)]
    world = SharingWorld(shared_topics(**dict.fromkeys(names, 1)))
    members = [Sharer(world, name, topics=tuple(names)) for name in "AB"]
    for member in (*members, *members, *members):
        member.beat()
        member.follow()
    for member in members:
        member.beat()
        assert member.owned
    parts = [sum(ranges != WHOLE for ranges in member.owned.values()) for member in members]
    assert parts == [SHARED_TOPICS_MAX] * 2
    assert len({*members[0].owned, *members[1].owned}) == len(names)


@pytest.mark.parametrize(("topics", "by_load"), [(PARTITIONS_BY_LOAD_MAX, True), (PARTITIONS_BY_LOAD_MAX + 1, False)])
def test_a_group_that_shares_many_partitions_has_even_cuts(topics: int, *, by_load: bool) -> None:
    names = [f"t{number:04}" for number in range(topics)]
    image = shared_topics(**dict.fromkeys(names, 1))
    loaded = {name: replace(topic, loads=lambda *_: [3.0, 1.0]) for name, topic in image.by_name.items()}
    world = SharingWorld(Image(1, loaded))
    members = [Sharer(world, name, topics=tuple(names)) for name in "AB"]
    for member in (*members, *members, *members):
        member.beat()
        member.follow()
    sizes = {size(ranges) for member in members for ranges in member.owned.values()}
    assert (sizes == {size(WHOLE) // 2}) is not by_load
