"""TxnOffsetCommit (API 28). v2 adds `committed_leader_epoch`; v3 adds `generation_id`, `member_id`,
`group_instance_id` and is flexible.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, int64, message, string, struct
from anabranch.protocol.messages.offset_commit import KeyRangeOffset, OffsetRange


@struct()
class TxnOffsetCommitRequestPartition:
    """Progress in one partition; ours: as in OffsetCommit."""

    partition_index: int = int32()
    committed_offset: int = int64()
    committed_leader_epoch: int = int32(since=2, default=-1)
    committed_metadata: str | None = string(nullable=True)
    offset_ranges: Sequence[OffsetRange] = array(OffsetRange, tag=10000)
    key_range_offsets: Sequence[KeyRangeOffset] = array(KeyRangeOffset, tag=10001)


@struct()
class TxnOffsetCommitRequestTopic:
    """Partitions of one topic."""

    name: str = string()
    partitions: Sequence[TxnOffsetCommitRequestPartition] = array(TxnOffsetCommitRequestPartition)


@message(api_key=28, versions="0-5", flexible="3+")
class TxnOffsetCommitRequest:
    """Commit a group's progress with the transaction."""

    transactional_id: str = string()
    group_id: str = string()
    producer_id: int = int64()
    producer_epoch: int = int16()
    generation_id: int = int32(since=3, default=-1)
    member_id: str = string(since=3)
    group_instance_id: str | None = string(since=3, nullable=True, default=None)
    topics: Sequence[TxnOffsetCommitRequestTopic] = array(TxnOffsetCommitRequestTopic)


@struct()
class TxnOffsetCommitResponsePartition:
    """The result for one commit; ours: the stable offset before the transaction's end, and as in OffsetCommit."""

    partition_index: int = int32()
    error_code: int = int16()
    last_stable_offset: int = int64(tag=10000, default=-1)
    error_message: str | None = string(tag=10001, nullable=True, default=None)


@struct()
class TxnOffsetCommitResponseTopic:
    """The answers for one topic."""

    name: str = string()
    partitions: Sequence[TxnOffsetCommitResponsePartition] = array(TxnOffsetCommitResponsePartition)


@message(api_key=28, versions="0-5", flexible="3+")
class TxnOffsetCommitResponse:
    """The results for the commits."""

    throttle_time_ms: int = int32()
    topics: Sequence[TxnOffsetCommitResponseTopic] = array(TxnOffsetCommitResponseTopic)
