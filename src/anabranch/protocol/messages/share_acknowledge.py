"""ShareAcknowledge (API 79). v2 adds renewals."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int8, int16, int32, int64, message, nested, string, struct, uuid


@struct()
class AcknowledgementBatch:
    """Acknowledgements of successive records."""

    first_offset: int = int64()
    last_offset: int = int64()
    acknowledge_types: Sequence[int] = array(int8)


@struct()
class AcknowledgePartition:
    """Acknowledgements of one partition."""

    partition_index: int = int32()
    acknowledgement_batches: Sequence[AcknowledgementBatch] = array(AcknowledgementBatch)


@struct()
class AcknowledgeTopic:
    """Acknowledgements of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[AcknowledgePartition] = array(AcknowledgePartition)


@message(api_key=79, versions="1-2", flexible="1+")
class ShareAcknowledgeRequest:
    """Acknowledge records as a member of a share group."""

    group_id: str | None = string(nullable=True, default=None)
    member_id: str | None = string(nullable=True)
    share_session_epoch: int = int32()
    is_renew_ack: bool = boolean(since=2)
    topics: Sequence[AcknowledgeTopic] = array(AcknowledgeTopic)


@struct()
class LeaderIdAndEpoch:
    """The leader of a partition."""

    leader_id: int = int32()
    leader_epoch: int = int32()


@struct()
class PartitionData:
    """The result for one partition."""

    partition_index: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    current_leader: LeaderIdAndEpoch = nested(LeaderIdAndEpoch)


@struct()
class ShareAcknowledgeTopicResponse:
    """The results for partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionData] = array(PartitionData)


@struct()
class NodeEndpoint:
    """Where a node is found."""

    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable=True, default=None)


@message(api_key=79, versions="1-2", flexible="1+")
class ShareAcknowledgeResponse:
    """The results for the partitions."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)
    acquisition_lock_timeout_ms: int = int32(since=2)
    responses: Sequence[ShareAcknowledgeTopicResponse] = array(ShareAcknowledgeTopicResponse)
    node_endpoints: Sequence[NodeEndpoint] = array(NodeEndpoint)
