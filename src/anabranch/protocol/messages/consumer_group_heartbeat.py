"""ConsumerGroupHeartbeat (API 68). v1 adds `subscribed_topic_regex`."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import (
    Blob,
    array,
    boolean,
    bytes_,
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


@struct()
class KeyRange:
    """Keys whose place in the key space (docs/hashing.md) lies between two bounds, both inclusive (ours)."""

    start: int = int64()
    end: int = int64()


@struct()
class PartitionKeyRanges:
    """The key ranges of one partition (ours); a partition without an entry is meant whole."""

    partition: int = int32()
    ranges: Sequence[KeyRange] = array(KeyRange)


@struct()
class Assignor:
    """A client-side assignor that a member offers (ours, KIP-848's original form)."""

    name: str = string()
    minimum_version: int = int16()
    maximum_version: int = int16()
    reason: int = int8()
    metadata_version: int = int16()
    metadata_bytes: Blob = bytes_()


@struct()
class TopicPartitions:
    """Partitions of one topic; ours: the key ranges of those that are shared."""

    topic_id: UUID = uuid()
    partitions: Sequence[int] = array(int32)
    key_ranges: Sequence[PartitionKeyRanges] = array(PartitionKeyRanges, tag=10000)


@message(api_key=68, versions="0-1", flexible="0+")
class ConsumerGroupHeartbeatRequest:
    """Join, keep the session, report owned partitions, leave; ours: client-side assignors, consent to share."""

    group_id: str = string()
    member_id: str = string()
    member_epoch: int = int32()
    instance_id: str | None = string(nullable=True, default=None)
    rack_id: str | None = string(nullable=True, default=None)
    rebalance_timeout_ms: int = int32(default=-1)
    subscribed_topic_names: Sequence[str] | None = array(string, nullable=True, default=None)
    subscribed_topic_regex: str | None = string(since=1, nullable=True, default=None)
    server_assignor: str | None = string(nullable=True, default=None)
    topic_partitions: Sequence[TopicPartitions] | None = array(TopicPartitions, nullable=True, default=None)
    client_assignors: Sequence[Assignor] | None = array(Assignor, nullable=True, default=None, tag=10000)
    allow_key_share: bool = boolean(tag=10001)


@struct()
class Assignment:
    """The partitions assigned now; ours: those pending until others revoke them, and the assignor's metadata."""

    topic_partitions: Sequence[TopicPartitions] = array(TopicPartitions)
    pending_topic_partitions: Sequence[TopicPartitions] = array(TopicPartitions, tag=10001)
    error: int = int8(tag=10002)
    metadata_version: int = int16(tag=10003)
    metadata_bytes: Blob = bytes_(tag=10004)


@message(api_key=68, versions="0-1", flexible="0+")
class ConsumerGroupHeartbeatResponse:
    """The member's epoch and assignment; ours: whether it is asked to compute the group's."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    member_id: str | None = string(nullable=True, default=None)
    member_epoch: int = int32()
    heartbeat_interval_ms: int = int32()
    assignment: Assignment | None = nested(Assignment, nullable=True)
    should_compute_assignment: bool = boolean(tag=10000)
