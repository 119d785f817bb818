"""Produce (API 0). v5 adds `log_start_offset`; v8 adds `record_errors`, `error_message`; v9 is flexible; v10 adds
`current_leader`, `node_endpoints`; v13 adds `topic_id`.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import Blob, array, int16, int32, int64, message, nested, records, string, struct, uuid


@struct()
class PartitionProduceData:
    """One record batch for one partition."""

    index: int = int32()
    records: Blob | None = records(nullable=True)


@struct()
class TopicProduceData:
    """Batches for one topic; ours: the partition count by which the sender placed the records."""

    name: str = string(until=12)
    topic_id: UUID = uuid(since=13)
    partition_data: Sequence[PartitionProduceData] = array(PartitionProduceData)
    undeleted_partition_count: int = int32(tag=10000, default=-1)


@message(api_key=0, versions="3-13", flexible="9+")
class ProduceRequest:
    """Append records."""

    transactional_id: str | None = string(nullable=True, default=None)
    acks: int = int16()
    timeout_ms: int = int32()
    topic_data: Sequence[TopicProduceData] = array(TopicProduceData)


@struct()
class BatchIndexAndErrorMessage:
    """Which record of a batch was refused, and why."""

    batch_index: int = int32()
    batch_index_error_message: str | None = string(nullable=True, default=None)


@struct()
class LeaderIdAndEpoch:
    """The leader that a refused client should turn to."""

    leader_id: int = int32(default=-1)
    leader_epoch: int = int32(default=-1)


@struct()
class PartitionProduceResponse:
    """Where the batch was put, or why it was not."""

    index: int = int32()
    error_code: int = int16()
    base_offset: int = int64()
    log_append_time_ms: int = int64(default=-1)
    log_start_offset: int = int64(since=5, default=-1)
    record_errors: Sequence[BatchIndexAndErrorMessage] = array(BatchIndexAndErrorMessage, since=8)
    error_message: str | None = string(since=8, nullable=True, default=None)
    current_leader: LeaderIdAndEpoch | None = nested(LeaderIdAndEpoch, since=10, tag=0)


@struct()
class TopicProduceResponse:
    """The answers for one topic."""

    name: str = string(until=12)
    topic_id: UUID = uuid(since=13)
    partition_responses: Sequence[PartitionProduceResponse] = array(PartitionProduceResponse)


@struct()
class NodeEndpoint:
    """Where a leader named in this response listens."""

    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable=True, default=None)


@message(api_key=0, versions="3-13", flexible="9+")
class ProduceResponse:
    """One answer for each batch."""

    responses: Sequence[TopicProduceResponse] = array(TopicProduceResponse)
    throttle_time_ms: int = int32()
    node_endpoints: Sequence[NodeEndpoint] = array(NodeEndpoint, since=10, tag=0)
