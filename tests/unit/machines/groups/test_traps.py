"""Real bugs of other systems (groups.md, section 6), each shown not to be ours, as far as a coordinator decides it."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup, MemberState
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.records import decode_record
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup, OffsetFetchRequestTopics
from tests.support.groups import GROUP, Entry, GroupWorld, topics
from tests.unit.machines.groups.test_migration import stable_classic


def commit(world: GroupWorld, member: str, epoch: int, partition: int, offset: int, topic: str = "foo") -> ErrorCode:
    request = OffsetCommitRequest(
        group_id=GROUP,
        member_id=member,
        generation_id_or_member_epoch=epoch,
        topics=[
            OffsetCommitRequestTopic(
                name=topic,
                partitions=[OffsetCommitRequestPartition(partition_index=partition, committed_offset=offset)],
            )
        ],
    )
    answer = world.submit(lambda machine: machine.offset_commit(request, Caller(version=9), world.now_ms))
    return ErrorCode.of(answer.topics[0].partitions[0].error_code)


def fetch(world: GroupWorld, member: str | None, epoch: int, partition: int, topic: str = "foo") -> int | ErrorCode:
    asked = OffsetFetchRequestGroup(
        group_id=GROUP,
        member_id=member,
        member_epoch=epoch,
        topics=[OffsetFetchRequestTopics(name=topic, partition_indexes=[partition])],
    )
    answer = world.coordinator.offset_fetch(asked, True, 9, world.now_ms)
    if answer.error_code:
        assert not answer.topics
        return ErrorCode.of(answer.error_code)
    (part,) = answer.topics[0].partitions
    return part.committed_offset if not part.error_code else ErrorCode.of(part.error_code)


def moved_about() -> GroupWorld:
    """Partitions that have gone from one member to the other and back."""
    world = GroupWorld(topics(foo=4))
    world.join("A")
    world.join("B")
    world.beat("A", 1)
    world.beat("A", 1, "foo-0 foo-1")
    world.beat("B", 2)
    world.join("C")
    world.beat("A", 2)
    world.beat("B", 2)
    world.beat("B", 2, "foo-2")
    world.beat("C", 3)
    world.leave("B")
    world.beat("A", 3)
    world.beat("C", 3)
    commit(world, "A", world.group.members["A"].epoch, 0, 7)
    return world


def compacted(log: list[Entry]) -> list[Entry]:
    last = {key: at for at, (key, _, _) in enumerate(log)}
    return [entry for at, entry in enumerate(log) if last[entry[0]] == at]


def load(world: GroupWorld, log: list[Entry]) -> Coordinator:
    machine = Coordinator(world.settings, world.image)
    for key, value, _ in log:
        record = decode_record(key, value)
        assert record is not None
        machine.apply(record)
    return machine


def test_compaction_while_loading_loses_no_unassignment() -> None:
    """KAFKA-19862: a record that takes a partition away was compacted between two reads of the loader."""
    world = moved_about()
    for cut in range(len(world.log) + 1):
        for again in range(cut, len(world.log) + 1, 3):
            # The loader has read up to `cut`, when everything before `again` is compacted.
            rest = [entry for entry in compacted(world.log[:again]) if world.log.index(entry) >= cut]
            loaded = load(world, world.log[:cut] + rest + world.log[again:])
            assert loaded.groups == world.coordinator.groups
            assert loaded.positions == world.coordinator.positions


def test_a_fenced_member_rejoins_with_epoch_zero() -> None:
    """apache/kafka#21305: it was refused, for its member id was known at another epoch."""
    world = moved_about()
    assert world.beat("A", 99).error_code == ErrorCode.FENCED_MEMBER_EPOCH
    answer = world.join("A")
    assert answer.error_code == ErrorCode.NONE
    assert answer.member_epoch == world.group.epoch
    assert world.told(answer)


def test_no_topic_of_a_group_is_remembered_after_its_downgrade() -> None:
    """KAFKA-21176: an index of subscribed topics outlived the group, which was then looked for in vain."""
    world = GroupWorld(topics(1, foo=2))
    stable_classic(world, 1, A="foo-0 foo-1")
    world.join("N")
    world.leave("N")
    log = len(world.log)
    world.set_topics(topics(2, foo=3, bar=1))
    assert isinstance(world.coordinator.groups[GROUP], ClassicGroup)
    assert len(world.log) == log
    world.join("N")
    epoch = world.group.epoch
    world.set_topics(topics(3, foo=4))
    assert world.group.epoch == epoch + 1


def test_a_stale_epoch_at_offset_fetch_is_an_error_and_not_no_offset() -> None:
    """platformatic/kafka#267: STALE_MEMBER_EPOCH was taken for "nothing committed", and reading began at the end."""
    world = GroupWorld(topics(foo=1))
    world.join("A")
    assert commit(world, "A", 1, 0, 42) is ErrorCode.NONE
    assert fetch(world, "A", 1, 0) == 42
    assert fetch(world, "A", 0, 0) is ErrorCode.STALE_MEMBER_EPOCH
    assert fetch(world, "Z", 1, 0) is ErrorCode.UNKNOWN_MEMBER_ID
    assert commit(world, "A", 0, 0, 50) is ErrorCode.STALE_MEMBER_EPOCH
    assert fetch(world, None, -1, 0) == 42


def test_a_member_that_leaves_before_it_revoked_sets_everything_free() -> None:
    """confluentinc/librdkafka#5541: the leave heartbeat came first, and the partitions stayed behind."""
    world = GroupWorld(topics(foo=2))
    world.join("A")
    world.join("B")
    world.beat("A", 1)
    assert world.group.members["A"].state is MemberState.UNREVOKED_PARTITIONS
    world.leave("A")
    assert world.told(world.beat("B", 2)) == "foo-0 foo-1"
    assert not [key for key in world.timers if isinstance(key, tuple) and "A" in key]


def test_a_member_that_does_not_know_its_topics_names_yet_may_still_take_all_that_it_was_given() -> None:
    """Apache Kafka's consumer: it says to own nothing, learns the names before the answer, and takes what is another's.

    Both then read the same records, and commit them at their epochs.
    """
    world = GroupWorld(topics(foo=4))
    assert world.told(world.join("A")) == "foo-0 foo-1 foo-2 foo-3"
    assert world.told(world.join("B")) == ""
    answer = world.beat("A", 1, "")
    assert (answer.member_epoch, world.told(answer)) == (1, "foo-0 foo-1")
    assert not world.told(world.beat("B", 2, "")), "A may be taking these"
    assert world.told(world.beat("A", 1, "foo-0 foo-1 foo-2 foo-3")) == "foo-0 foo-1"
    assert not world.told(world.beat("B", 2)), "A has them"
    assert world.beat("A", 1, "foo-0 foo-1").member_epoch == 2
    assert world.told(world.beat("B", 2)) == "foo-2 foo-3"
    assert fetch(world, "A", 1, 3) is ErrorCode.STALE_MEMBER_EPOCH


def test_a_member_that_comes_back_has_let_go_of_all_that_it_had() -> None:
    world = GroupWorld(topics(foo=4))
    world.join("A")
    world.join("B")
    answer = world.join("A")
    assert (answer.member_epoch, world.told(answer)) == (2, "foo-0 foo-1")
    assert world.told(world.beat("B", 2)) == "foo-2 foo-3"


def test_a_late_unassignment_does_not_undo_the_assignment_after_it() -> None:
    """scality/backbeat#2818: a deferred unassign ran after the partition had been assigned again."""
    world = GroupWorld(topics(foo=2))
    world.join("A")
    world.join("B")
    assert world.told(world.beat("A", 1)) == "foo-0"
    world.leave("B")
    # foo-1 is A's again, and A has not said yet that it let it go: it must say so before it has it once more.
    assert world.told(world.beat("A", 1)) is None
    answer = world.beat("A", 1, "foo-0")
    assert (answer.member_epoch, world.told(answer)) == (3, "foo-0 foo-1")
    assert world.beat("A", 3, "foo-0 foo-1").error_code == ErrorCode.NONE
    assert world.named(world.group.members["A"].assigned) == "foo-0 foo-1"


def test_a_topic_made_again_is_another_topic() -> None:
    """Old offsets do not apply to it, and its partitions are handed out anew."""
    world = GroupWorld(topics(1, foo=1))
    world.join("A")
    commit(world, "A", 1, 0, 42)
    again = TopicImage(UUID(int=7), "foo", (0,))
    world.set_topics(Image(2, {"foo": again}))
    answer = world.beat("A", 1)
    while world.group.state().value != "Stable":
        answer = world.beat("A", answer.member_epoch, "")
    assert world.group.members["A"].assigned == ((UUID(int=7), (0,)),)
    assert fetch(world, None, -1, 0) == -1
    assert world.coordinator.positions.get(GROUP, "foo", 0) is None


def test_partitions_that_appear_are_found_by_every_member_that_must_know() -> None:
    """awslabs/amazon-kinesis-client#339: children of a split were never discovered."""
    world = GroupWorld(topics(1, foo=1))
    for member in ("A", "B", "C"):
        world.join(member)
    for version, count in ((2, 2), (3, 3), (4, 6)):
        world.set_topics(topics(version, foo=count))
        epochs = {name: member.epoch for name, member in world.group.members.items()}
        for _ in range(4):
            for name in world.group.members:
                member = world.group.members[name]
                world.beat(name, epochs[name], world.named(member.assigned))
                epochs[name] = world.group.members[name].epoch
        held = sorted(world.named(member.assigned) for member in world.group.members.values())
        assert sorted(" ".join(held).split()) == sorted(f"foo-{number}" for number in range(count))


def test_a_new_partition_waits_until_the_group_has_read_what_its_keys_left_behind() -> None:
    """ordering.md, section 8: so that a stock consumer keeps the order of keys across an expansion."""
    from anabranch.machines.lineage import Lineage

    world = GroupWorld(topics(1, foo=1))
    world.join("A")
    grown = TopicImage(
        topics(foo=1).by_name["foo"].topic_id, "foo", (0, 1), lineage=Lineage.of_ends(1, (1, 2), ({0: 10},))
    )
    world.set_topics(Image(2, {"foo": grown}))
    answer = world.beat("A", 1, "foo-0")
    assert world.told(answer) is None or world.told(answer) == "foo-0"
    assert commit(world, "A", 2, 0, 9) is ErrorCode.NONE
    assert world.told(world.beat("A", 2)) is None
    group = world.coordinator.groups[GROUP]
    assert isinstance(group, ConsumerGroup)
    assert group.members["A"].state is MemberState.UNRELEASED_PARTITIONS
    assert commit(world, "A", 2, 0, 10) is ErrorCode.NONE
    assert world.told(world.beat("A", 2)) == "foo-0 foo-1"


def test_a_partition_of_which_nothing_is_committed_is_waited_for_as_long_as_its_owner_may_take_for_a_batch() -> None:
    """ADR 0033: its owner may have begun at the end, and commits nothing while nothing comes (librdkafka does not)."""
    from anabranch.machines.lineage import Lineage

    one = TopicImage(topics(foo=1).by_name["foo"].topic_id, "foo", (0,), log_end=lambda _: 10)
    world = GroupWorld(Image(1, {"foo": one}))
    world.join("A", rebalance_timeout_ms=60_000)
    grown = replace(one, partitions=(0, 1), lineage=Lineage.of_ends(1, (1, 2), ({0: 10},)))
    world.set_topics(Image(2, {"foo": grown}))
    world.beat("A", 1, "foo-0")
    for _ in range(2):
        world.advance(29_000)
        assert world.told(world.beat("A", 2)) is None
    world.advance(2_000)
    assert world.told(world.beat("A", 2)) is None, "nobody knew until now that the owner is alive after its time"
    world.advance(1_000)
    assert world.told(world.beat("A", 2)) == "foo-0 foo-1"
