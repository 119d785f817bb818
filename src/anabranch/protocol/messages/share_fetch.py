"""ShareFetch (API 78). v2 adds the acquire mode, and renewals."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import (
    Records,
    array,
    boolean,
    int8,
    int16,
    int32,
    int64,
    message,
    nested,
    records,
    string,
    struct,
    uuid,
)


@struct()
class AcknowledgementBatch:
    """Acknowledgements of successive records."""

    first_offset: int = int64()
    last_offset: int = int64()
    acknowledge_types: Sequence[int] = array(int8)


@struct()
class FetchPartition:
    """One partition to read, and acknowledgements of its records."""

    partition_index: int = int32()
    acknowledgement_batches: Sequence[AcknowledgementBatch] = array(AcknowledgementBatch)


@struct()
class FetchTopic:
    """Partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[FetchPartition] = array(FetchPartition)


@struct()
class ForgottenTopic:
    """Partitions that leave the share session."""

    topic_id: UUID = uuid()
    partitions: Sequence[int] = array(int32)


@message(api_key=78, versions="1-2", flexible="1+")
class ShareFetchRequest:
    """Acquire records as a member of a share group, and acknowledge earlier ones."""

    group_id: str | None = string(nullable=True, default=None)
    member_id: str | None = string(nullable=True)
    share_session_epoch: int = int32()
    max_wait_ms: int = int32()
    min_bytes: int = int32()
    max_bytes: int = int32(default=2147483647)
    max_records: int = int32()
    batch_size: int = int32()
    share_acquire_mode: int = int8(since=2)
    is_renew_ack: bool = boolean(since=2)
    topics: Sequence[FetchTopic] = array(FetchTopic)
    forgotten_topics_data: Sequence[ForgottenTopic] = array(ForgottenTopic)


@struct()
class LeaderIdAndEpoch:
    """The leader of a partition."""

    leader_id: int = int32()
    leader_epoch: int = int32()


@struct()
class AcquiredRecords:
    """Records that the member has acquired."""

    first_offset: int = int64()
    last_offset: int = int64()
    delivery_count: int = int16()


@struct()
class PartitionData:
    """The records of one partition."""

    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    acknowledge_error_code: int = int16()
    acknowledge_error_message: str | None = string(nullable=True, default=None)
    current_leader: LeaderIdAndEpoch = nested(LeaderIdAndEpoch)
    records: Records = records()
    acquired_records: Sequence[AcquiredRecords] = array(AcquiredRecords)


@struct()
class ShareFetchableTopicResponse:
    """The records of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionData] = array(PartitionData)


@struct()
class NodeEndpoint:
    """Where a node is found."""

    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable=True, default=None)


@message(api_key=78, versions="1-2", flexible="1+")
class ShareFetchResponse:
    """The records."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    acquisition_lock_timeout_ms: int = int32()
    responses: Sequence[ShareFetchableTopicResponse] = array(ShareFetchableTopicResponse)
    node_endpoints: Sequence[NodeEndpoint] = array(NodeEndpoint)
