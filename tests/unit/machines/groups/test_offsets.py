"""OffsetCommit, OffsetFetch, OffsetDelete and expiry, decision by decision."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.consumer.group import ConsumerGroup, Member, MemberMetadata
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.offset_fetches import OffsetFetches
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.positions import POSITION_SIZE
from anabranch.machines.groups.records import CoordinatorRecord, OffsetCommitKey
from anabranch.machines.groups.settings import GroupSettings
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup, OffsetFetchRequestTopics
from tests.support.groups import topic_id, topics

DAY_MS = 24 * 60 * 60 * 1_000
IMAGE = topics(foo=2, bar=1)


def group_of(**epochs: int) -> ConsumerGroup:
    group = ConsumerGroup("g")
    group.members.update(
        {name: Member(name, MemberMetadata(topics=("foo",)), epoch=epoch) for name, epoch in epochs.items()}
    )
    return group


def commit(
    offsets: Offsets,
    group: ConsumerGroup | None,
    offset: int,
    *,
    member: str = "",
    epoch: int = -1,
    topic: str = "foo",
    partition: int = 0,
    version: int = 9,
    group_id: str = "g",
    metadata: str = "",
    now_ms: int = 0,
) -> int:
    request = OffsetCommitRequest(
        group_id=group_id,
        member_id=member,
        generation_id_or_member_epoch=epoch,
        topics=[
            OffsetCommitRequestTopic(
                name=topic,
                topic_id=topic_id(topic),
                partitions=[
                    OffsetCommitRequestPartition(
                        partition_index=partition, committed_offset=offset, committed_metadata=metadata
                    )
                ],
            )
        ],
    )
    outcome = offsets.commit(group, request, version, now_ms)
    fold(offsets, outcome.records)
    return outcome.reply.topics[0].partitions[0].error_code


def fold(offsets: Offsets, records: tuple[CoordinatorRecord, ...] | list[CoordinatorRecord]) -> None:
    for key, value in records:
        assert isinstance(key, OffsetCommitKey)
        offsets.positions.apply(key, value)


def fetch(
    offsets: Offsets, group: ConsumerGroup | None, *, member: str = "", epoch: int = -1, stable: bool = False
) -> tuple[int, int, int]:
    """The group's error, the partition's error, the offset of foo-0."""
    asked = OffsetFetchRequestGroup(
        group_id="g",
        member_id=member,
        member_epoch=epoch,
        topics=[OffsetFetchRequestTopics(name="foo", partition_indexes=[0])],
    )
    fetches = OffsetFetches(offsets, lambda *_: False)
    answer = fetches.fetch(group, asked, require_stable=stable, version=9)
    if answer.error_code:
        return answer.error_code, 0, -1
    found = answer.topics[0].partitions[0]
    return 0, found.error_code, found.committed_offset


@pytest.mark.parametrize(
    ("group", "said", "code"),
    [
        (None, {}, "NONE"),
        (None, {"epoch": 3, "member": "A"}, "GROUP_ID_NOT_FOUND"),
        (None, {"epoch": 3, "member": "A", "version": 8}, "ILLEGAL_GENERATION"),
        (None, {"group_id": ""}, "INVALID_GROUP_ID"),
        (group_of(), {}, "NONE"),
        (group_of(), {"epoch": 3, "member": "A"}, "UNKNOWN_MEMBER_ID"),
        (group_of(A=3), {"epoch": 3, "member": "A"}, "NONE"),
        (group_of(A=3), {"epoch": 2, "member": "A"}, "STALE_MEMBER_EPOCH"),
        (group_of(A=3), {"epoch": 2, "member": "A", "version": 8}, "UNSUPPORTED_VERSION"),
        (group_of(A=3), {"epoch": 3, "member": "B"}, "UNKNOWN_MEMBER_ID"),
        (group_of(A=3), {}, "UNKNOWN_MEMBER_ID"),
        (None, {"topic": "none"}, "UNKNOWN_TOPIC_OR_PARTITION"),
        (None, {"topic": "none", "version": 10}, "UNKNOWN_TOPIC_ID"),
        (None, {"metadata": "x" * 4_097}, "OFFSET_METADATA_TOO_LARGE"),
    ],
)
def test_who_may_commit_and_what(group: ConsumerGroup | None, said: dict[str, object], code: str) -> None:
    offsets = Offsets(GroupSettings(), IMAGE)
    assert ErrorCode(commit(offsets, group, 5, **said)).name == code  # type: ignore[arg-type]
    assert ("g" in offsets.positions) is (code == "NONE")


@pytest.mark.parametrize(
    ("group", "member", "epoch", "answer"),
    [
        (group_of(A=3), "", -1, (0, 0, 5)),
        (group_of(A=3), "A", 3, (0, 0, 5)),
        (group_of(A=3), "A", 2, (ErrorCode.STALE_MEMBER_EPOCH, 0, -1)),
        (group_of(A=3), "B", 3, (ErrorCode.UNKNOWN_MEMBER_ID, 0, -1)),
        (None, "A", 3, (ErrorCode.GROUP_ID_NOT_FOUND, 0, -1)),
    ],
)
def test_a_stale_member_is_never_told_that_nothing_is_committed(
    group: ConsumerGroup | None, member: str, epoch: int, answer: tuple[int, int, int]
) -> None:
    offsets = Offsets(GroupSettings(), IMAGE)
    commit(offsets, None, 5)
    assert fetch(offsets, group, member=member, epoch=epoch) == answer


def test_an_open_transaction_makes_an_offset_unstable_for_those_who_ask_for_stable_ones() -> None:
    offsets = Offsets(GroupSettings(), IMAGE)
    commit(offsets, None, 5)
    key = OffsetCommitKey(group="g", topic="foo", partition=0)
    value = next(iter(offsets.commit(None, _request(9), 9, 0).records)).value
    offsets.positions.apply(key, value, producer_id=1)
    assert fetch(offsets, None, stable=True) == (0, ErrorCode.UNSTABLE_OFFSET_COMMIT, -1)
    assert fetch(offsets, None) == (0, 0, 5)


def _request(offset: int) -> OffsetCommitRequest:
    part = OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
    return OffsetCommitRequest(group_id="g", topics=[OffsetCommitRequestTopic(name="foo", partitions=[part])])


def test_offsets_of_a_topic_do_not_apply_to_another_topic_of_its_name() -> None:
    offsets = Offsets(GroupSettings(), IMAGE)
    commit(offsets, None, 5)
    before = offsets.image
    again = replace(before.by_name["foo"], topic_id=UUID(int=9))
    offsets.image = Image(2, {**before.by_name, "foo": again})
    assert fetch(offsets, None) == (0, 0, -1)
    fold(offsets, list(offsets.of_topics_gone(before)))
    assert "g" not in offsets.positions


def _delete(topic: str, partition: int = 0) -> OffsetDeleteRequest:
    parts = [OffsetDeleteRequestPartition(partition_index=partition)]
    return OffsetDeleteRequest(group_id="g", topics=[OffsetDeleteRequestTopic(name=topic, partitions=parts)])


def test_offsets_are_deleted_but_not_of_topics_that_members_subscribe_to() -> None:
    offsets = Offsets(GroupSettings(), IMAGE)
    commit(offsets, None, 5)
    commit(offsets, None, 6, topic="bar")
    refused = offsets.delete(group_of(A=1), _delete("foo"), frozenset({"foo"}))
    assert refused.records == ()
    assert refused.reply.topics[0].partitions[0].error_code == ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC
    deleted = offsets.delete(group_of(A=1), _delete("bar"), frozenset({"foo"}))
    fold(offsets, deleted.records)
    assert offsets.current("g", "bar", 0) is None and offsets.current("g", "foo", 0) is not None
    assert offsets.delete(group_of(A=1), _delete("foo"), None).reply.error_code == ErrorCode.NON_EMPTY_GROUP
    empty = Offsets(GroupSettings(), IMAGE)
    assert empty.delete(None, _delete("foo"), frozenset()).reply.error_code == ErrorCode.GROUP_ID_NOT_FOUND


def test_offsets_expire_after_the_retention_unless_a_member_subscribes_to_their_topic() -> None:
    offsets = Offsets(GroupSettings(offsets_retention_ms=7 * DAY_MS), IMAGE)
    commit(offsets, None, 5, now_ms=0)
    commit(offsets, None, 6, topic="bar", now_ms=DAY_MS)
    assert offsets.expired(None, "g", frozenset(), 7 * DAY_MS - 1, 9) == ([], 2)
    assert offsets.expired(None, "g", frozenset({"foo"}), 7 * DAY_MS, 9) == ([], 2)
    assert offsets.expired(None, "g", frozenset(), 7 * DAY_MS, 0) == ([], 2)
    records, count = offsets.expired(None, "g", frozenset(), 7 * DAY_MS, 9)
    assert [record.key.topic for record in records] == ["foo"] and count == 2
    fold(offsets, records)
    records, count = offsets.expired(None, "g", frozenset(), 8 * DAY_MS, 9)
    assert [record.key.topic for record in records] == ["bar"] and count == 1


def test_commits_are_taken_of_partitions_that_are_or_were_there() -> None:
    """A commit in a partition that was removed may be late; one in a partition to come would skip its records."""
    offsets = Offsets(GroupSettings(), IMAGE)
    offsets.image = topics(foo=2)
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert [commit(offsets, None, 5, partition=number) for number in (-1, 0, 1, 2, 999)] == [
        unknown,
        0,
        0,
        unknown,
        unknown,
    ]
    shrunk = replace(offsets.image.by_name["foo"], highest_count=3)
    offsets.image = Image(2, {"foo": shrunk})
    assert [commit(offsets, None, 5, partition=number) for number in (-1, 2, 3)] == [unknown, 0, unknown]


def test_without_memory_new_offsets_are_refused_and_those_that_are_there_go_on() -> None:
    full = ErrorCode.INVALID_COMMIT_OFFSET_SIZE
    offsets = Offsets(GroupSettings(offsets_size_max=1_000, offsets_size=lambda: offsets.positions.size), IMAGE)
    assert commit(offsets, None, 1, metadata="x" * 100) == ErrorCode.NONE
    assert commit(offsets, None, 1, partition=1) == ErrorCode.NONE
    assert commit(offsets, None, 1, group_id="other") == full
    assert commit(offsets, None, 2, metadata="x" * 100) == commit(offsets, None, 2, partition=1) == ErrorCode.NONE
    assert commit(offsets, None, 2, partition=1, metadata="x" * 101) == full
    assert "other" not in offsets.positions
    assert commit(offsets, None, 3) == ErrorCode.NONE, "less memory than before"
    assert commit(offsets, None, 3, partition=1, metadata="x" * 101) == ErrorCode.NONE


def test_the_id_of_a_group_takes_memory_once() -> None:
    full, name = ErrorCode.INVALID_COMMIT_OFFSET_SIZE, "x" * 1_000
    offsets = Offsets(GroupSettings(offsets_size_max=2_000, offsets_size=lambda: offsets.positions.size), IMAGE)
    assert commit(offsets, None, 1, group_id=name * 2) == full
    assert commit(offsets, None, 1, group_id=name) == ErrorCode.NONE
    assert commit(offsets, None, 1, group_id=name, partition=1) == ErrorCode.NONE
    assert offsets.positions.size == 2 * POSITION_SIZE + len(name)


@pytest.mark.parametrize("count", [3, 30], ids=["fewer partitions than positions", "more"])
def test_a_group_has_begun_in_a_topic_where_it_has_a_position_in_one_of_its_partitions(count: int) -> None:
    image = topics(foo=count, bar=8)
    offsets = Offsets(GroupSettings(), image)
    foo = image.by_name["foo"]
    assert not offsets.has_begun("g", foo)
    for partition in range(8):
        commit(offsets, None, 5, topic="bar", partition=partition)
    assert not offsets.has_begun("g", foo) and offsets.has_begun("g", image.by_name["bar"])
    commit(offsets, None, 5, partition=2)
    assert offsets.has_begun("g", foo) and not offsets.has_begun("h", foo)
    for left in ((0, 1), tuple(range(3, 30))):
        assert not offsets.has_begun("g", replace(foo, partitions=left)), "the partition is gone"
    assert not offsets.has_begun("g", replace(foo, topic_id=topic_id("anew"))), "the topic was made anew"
