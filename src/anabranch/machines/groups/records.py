"""The records of `__consumer_offsets` and `__individual_commit_offsets`: a key, and a value or nothing (a tombstone).

Keys, versions and fields are those of Apache Kafka 4's own schemas, which are the proposal's Records chapter as it was
built, so that its tools read the log; the proposal's further fields (client-side assignors) and ours travel in tagged
fields from 10000 up. A key begins with its version, which is its kind; so does a value, which has versions of its own.

Only the last value of a key counts. State derived from several records is computed, never stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

from anabranch.base.errors import DecodeError
from anabranch.base.ids import NO_LEADER_EPOCH, NO_TOPIC_ID
from anabranch.codec import (
    Blob,
    array,
    boolean,
    bytes_,
    decode,
    encode,
    int8,
    int16,
    int32,
    int64,
    message,
    nested,
    string,
    struct,
    uuid,
)


@message(versions="0-1")
class OffsetCommitKey:
    """A group's progress in a partition."""

    group: str = string()
    topic: str = string()
    partition: int = int32()


@message(versions="0-4", flexible="4+")
class OffsetCommitValue:
    """The next offset to read; v4 adds the id of the topic that it is an offset of."""

    offset: int = int64()
    leader_epoch: int = int32(since=3, default=NO_LEADER_EPOCH)
    metadata: str = string()
    commit_timestamp: int = int64()
    expire_timestamp: int = int64(since=1, until=1, default=-1)
    topic_id: UUID = uuid(since=4, tag=0, default=NO_TOPIC_ID)
    opened: int = int32(since=4, tag=10000, default=-1)
    """Ours: the newest layout whose gate was open when the partition was handed out; -1 for none. Of a position that no
    client has committed, -2 for none, and -3, -4 ... for the layouts 0, 1 ..."""
    frontier_starts: Sequence[int] = array(int64, since=4, tag=10001)
    """Ours: where the steps of the group's frontier begin in the key space; none where `offset` is that of all keys."""
    frontier_offsets: Sequence[int] = array(int64, since=4, tag=10002)
    """Ours: the next offset to read of the keys of each step; `offset` is the lowest."""
    ranges_since: int = int64(since=4, tag=10003, default=0)
    """Ours: names the ranges in `__individual_commit_offsets` that go with this offset; 0 where none do."""
    passed_starts: Sequence[int] = array(int64, since=4, tag=10004)
    """Ours: where the steps begin of how far owners of keys are known to have come; none where that is the frontier."""
    passed_offsets: Sequence[int] = array(int64, since=4, tag=10005)
    """Ours: the offset of each of those."""


@message(versions="2")
class GroupMetadataKey:
    """A group of the classic protocol."""

    group: str = string()


@struct()
class MemberMetadata:
    """A member of a classic group's generation."""

    member_id: str = string()
    group_instance_id: str | None = string(since=3, nullable=True, default=None)
    client_id: str = string()
    client_host: str = string()
    rebalance_timeout: int = int32(since=1)
    session_timeout: int = int32()
    subscription: Blob = bytes_()
    assignment: Blob = bytes_()


@message(versions="0-4", flexible="4+")
class GroupMetadataValue:
    """A completed generation of a classic group, or an empty one."""

    protocol_type: str = string()
    generation: int = int32()
    protocol: str | None = string(nullable=True, default=None)
    leader: str | None = string(nullable=True, default=None)
    current_state_timestamp: int = int64(since=2, default=-1)
    members: Sequence[MemberMetadata] = array(MemberMetadata)


@message(versions="3")
class ConsumerGroupMetadataKey:
    """A group of the consumer protocol."""

    group_id: str = string()


@message(versions="0", flexible="0+")
class ConsumerGroupMetadataValue:
    """Its epoch."""

    epoch: int = int32()
    metadata_hash: int = int64(tag=0)
    """Of the metadata of the topics it subscribes to: what a change is told by."""


@message(versions="4")
class ConsumerGroupPartitionMetadataKey:
    """The topics of a group, as earlier versions kept them."""

    group_id: str = string()


@struct()
class TopicMetadata:
    """A topic's partitions."""

    topic_id: UUID = uuid()
    topic_name: str = string()
    num_partitions: int = int32()
    partition_metadata: Sequence[int] = array(int32)


@message(versions="0", flexible="0+")
class ConsumerGroupPartitionMetadataValue:
    """Replaced by the hash in `ConsumerGroupMetadataValue`; only its tombstones are written."""

    topics: Sequence[TopicMetadata] = array(TopicMetadata)


@message(versions="5")
class ConsumerGroupMemberMetadataKey:
    """A member."""

    group_id: str = string()
    member_id: str = string()


@struct()
class ClassicProtocol:
    """A protocol that a classic member can follow, and its subscription."""

    name: str = string()
    metadata: Blob = bytes_()


@struct()
class ClassicMemberMetadata:
    """The fields that only a member of the classic protocol has."""

    session_timeout_ms: int = int32()
    supported_protocols: Sequence[ClassicProtocol] = array(ClassicProtocol)


@struct()
class ClientAssignor:
    """A client-side assignor that a member offers."""

    name: str = string()
    minimum_version: int = int16()
    maximum_version: int = int16()
    reason: int = int8()
    version: int = int16()
    metadata: Blob = bytes_()


@message(versions="0", flexible="0+")
class ConsumerGroupMemberMetadataValue:
    """The metadata of a member."""

    instance_id: str | None = string(nullable=True, default=None)
    rack_id: str | None = string(nullable=True, default=None)
    client_id: str = string()
    client_host: str = string()
    subscribed_topic_names: Sequence[str] = array(string)
    subscribed_topic_regex: str | None = string(nullable=True, default=None)
    rebalance_timeout_ms: int = int32(default=-1)
    server_assignor: str | None = string(nullable=True, default=None)
    classic_member_metadata: ClassicMemberMetadata | None = nested(ClassicMemberMetadata, nullable=True, tag=0)
    client_assignors: Sequence[ClientAssignor] = array(ClientAssignor, tag=10000)
    allow_key_share: bool = boolean(tag=10001)
    """Ours: whether the member takes partitions in part."""


@message(versions="6")
class ConsumerGroupTargetAssignmentMetadataKey:
    """A group's target assignment."""

    group_id: str = string()


@message(versions="0", flexible="0+")
class ConsumerGroupTargetAssignmentMetadataValue:
    """The group epoch that the target was computed for."""

    assignment_epoch: int = int32()


@struct()
class TopicPartitions:
    """Partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[int] = array(int32)


@struct()
class SharedPartition:
    """Ours: the keys of a partition that a member has in part, as ranges of the key space, ascending."""

    topic_id: UUID = uuid()
    partition: int = int32()
    starts: Sequence[int] = array(int64)
    ends: Sequence[int] = array(int64)


@message(versions="7")
class ConsumerGroupTargetAssignmentMemberKey:
    """A member's part of the target."""

    group_id: str = string()
    member_id: str = string()


@message(versions="0", flexible="0+")
class ConsumerGroupTargetAssignmentMemberValue:
    """The member's target; ours: the metadata of its client-side assignor."""

    topic_partitions: Sequence[TopicPartitions] = array(TopicPartitions)
    error: int = int8(tag=10000)
    metadata_version: int = int16(tag=10001)
    metadata_bytes: Blob = bytes_(tag=10002)
    shares: Sequence[SharedPartition] = array(SharedPartition, tag=10003)
    """Of `topic_partitions` those that the member is to have in part."""


@message(versions="8")
class ConsumerGroupCurrentMemberAssignmentKey:
    """What a member has."""

    group_id: str = string()
    member_id: str = string()


@message(versions="0", flexible="0+")
class ConsumerGroupCurrentMemberAssignmentValue:
    """The member's epoch, its assignment, and the partitions it has yet to revoke."""

    member_epoch: int = int32()
    previous_member_epoch: int = int32()
    state: int = int8()
    assigned_partitions: Sequence[TopicPartitions] = array(TopicPartitions)
    partitions_pending_revocation: Sequence[TopicPartitions] = array(TopicPartitions)
    assigned_shares: Sequence[SharedPartition] = array(SharedPartition, tag=10000)
    """Ours: of `assigned_partitions` those that the member has in part."""
    shares_pending_revocation: Sequence[SharedPartition] = array(SharedPartition, tag=10001)
    """Ours: of `partitions_pending_revocation` those of which it has to revoke a part."""


@message(versions="10000")
class GroupTopicStartKey:
    """Ours: the beginning of a group in a topic that was resized (ADR 0033)."""

    group_id: str = string()
    topic_id: UUID = uuid()


@message(versions="0", flexible="0+")
class GroupTopicStartValue:
    """The partitions that existed when the group first subscribed to the topic, and where their logs ended then."""

    partitions: Sequence[int] = array(int32)
    ends: Sequence[int] = array(int64)
    """In the order of the partitions; -1 where it was not noted."""
    latest: Sequence[int] = array(int32, tag=0)
    """Partitions whose owners asked for the latest offset when they were given them without a committed one."""
    other: bool = boolean(tag=1)
    """Whether an owner asked for any other offset then."""
    waited: Sequence[int] = array(int32, tag=2)
    """Partitions that waited at a gate while the group had no committed offset of them."""
    lives: Sequence[int] = array(int32, tag=3)
    """In their order, which life of each existed (`PartitionNode.born`); none where all were the first."""


@message(versions="10001")
class IndividualCommitKey:
    """Ours, in `__individual_commit_offsets`: where a range of processed offsets begins, above the committed offset."""

    group: str = string()
    topic: str = string()
    partition: int = int32()
    start: int = int64()


@message(versions="0", flexible="0+")
class IndividualCommitValue:
    """Where the range ends; it counts while the group's committed offset says `since`."""

    end: int = int64()
    since: int = int64()


@struct()
class CommittedRange:
    """A range of offsets that a transaction commits."""

    start: int = int64()
    end: int = int64()


@struct()
class CommittedKeyRange:
    """The next offset to read of a range of keys that a transaction commits."""

    start: int = int64()
    end: int = int64()
    offset: int = int64()


@message(versions="10002")
class TransactionRangesKey:
    """Ours: a commit by ranges in a transaction of a producer, until it is part of the group's committed offset."""

    group: str = string()
    topic: str = string()
    partition: int = int32()
    producer_id: int = int64()
    number: int = int64()
    """Tells the commits of one transaction apart."""


@message(versions="0", flexible="0+")
class TransactionRangesValue:
    """What is committed."""

    base: int = int64()
    """The committed offset of a group without one; -2: it was said as an offset, which counts for the member's keys."""
    since: int = int64()
    """As in the committed offset when this was written: a later rewind voids it."""
    topic_id: UUID = uuid()
    offset_ranges: Sequence[CommittedRange] = array(CommittedRange)
    key_ranges: Sequence[CommittedKeyRange] = array(CommittedKeyRange)
    metadata: str = string(since=0, tag=0, default="")
    """What the client said with it."""


KeyValue: TypeAlias = tuple[type, type | None, int]

KINDS: Mapping[int, KeyValue] = {
    0: (OffsetCommitKey, OffsetCommitValue, 4),
    1: (OffsetCommitKey, OffsetCommitValue, 4),
    2: (GroupMetadataKey, GroupMetadataValue, 3),
    3: (ConsumerGroupMetadataKey, ConsumerGroupMetadataValue, 0),
    4: (ConsumerGroupPartitionMetadataKey, ConsumerGroupPartitionMetadataValue, 0),
    5: (ConsumerGroupMemberMetadataKey, ConsumerGroupMemberMetadataValue, 0),
    6: (ConsumerGroupTargetAssignmentMetadataKey, ConsumerGroupTargetAssignmentMetadataValue, 0),
    7: (ConsumerGroupTargetAssignmentMemberKey, ConsumerGroupTargetAssignmentMemberValue, 0),
    8: (ConsumerGroupCurrentMemberAssignmentKey, ConsumerGroupCurrentMemberAssignmentValue, 0),
    10000: (GroupTopicStartKey, GroupTopicStartValue, 0),
    10001: (IndividualCommitKey, IndividualCommitValue, 0),
    10002: (TransactionRangesKey, TransactionRangesValue, 0),
}
"""By the version of the key: the classes, and the version that values are written in."""

_VERSION_OF: Mapping[type, int] = {classes[0]: version for version, classes in KINDS.items()}


class CoordinatorRecord(NamedTuple):
    """One entry of the log; a tombstone without a value."""

    key: Any
    value: Any | None = None


def is_individual(record: CoordinatorRecord) -> bool:
    """Whether a record is one of `__individual_commit_offsets`."""
    return type(record.key) is IndividualCommitKey


def encode_record(record: CoordinatorRecord) -> tuple[bytes, bytes | None]:
    """Write a record as key and value, each with its version before it."""
    version = _VERSION_OF[type(record.key)]
    key = version.to_bytes(2) + b"".join(encode(record.key, version))
    if record.value is None:
        return key, None
    written = KINDS[version][2]
    return key, written.to_bytes(2) + b"".join(encode(record.value, written))


def decode_record(key: Blob, value: Blob | None) -> CoordinatorRecord | None:
    """Read a record; None for a kind that is not ours. DecodeError when it is damaged."""
    if len(key) < 2:
        raise DecodeError("a key of a coordinator record is at least its version")
    version = int.from_bytes(key[:2])
    kind = KINDS.get(version)
    if kind is None:
        return None
    key_class, value_class, _ = kind
    read_key: Any = decode(key_class, memoryview(key)[2:], version)
    if value is None:
        return CoordinatorRecord(read_key)
    assert value_class is not None
    if len(value) < 2:
        raise DecodeError("a value of a coordinator record is at least its version")
    return CoordinatorRecord(read_key, decode(value_class, memoryview(value)[2:], int.from_bytes(value[:2])))
