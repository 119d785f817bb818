"""Fetch (API 1). v5 adds `log_start_offset`; v7 adds `session_id`, `session_epoch`, `forgotten_topics_data`,
`error_code`; v9 adds `current_leader_epoch`; v11 adds `rack_id`, `preferred_read_replica`; v12 adds
`last_fetched_epoch`, `cluster_id`, `diverging_epoch`, `current_leader`, `snapshot_id` and is flexible; v13 adds
`topic_id`; v15 adds `replica_state`; v16 adds `node_endpoints`; v17 adds `replica_directory_id`; v18 adds
`high_watermark`.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import (
    Blob,
    Records,
    array,
    boolean,
    bytes_,
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
class KeyRange:
    """Keys whose place in the key space (docs/hashing.md) lies between two bounds, both inclusive (ours)."""

    start: int = int64()
    end: int = int64()


@struct()
class RecordFilter:
    """Which records are wanted beside their key ranges (ours): any key when none is wanted, any size by default."""

    keys_wanted: Sequence[Blob] = array(bytes_)
    keys_refused: Sequence[Blob] = array(bytes_)
    size_min: int = int32()
    size_max: int = int32(default=2147483647)


@struct()
class Claim:
    """The next slice of a partition is wanted, whichever it is (ours): the claims of a member are numbered.

    `sequence`: within the session, 0 or one more than that of the last slice that was received; the same again where no
    slice was; -1 ends the session, and gives back what is not committed. `records_max`: offsets of the slice.
    """

    session: int = int64()
    sequence: int = int32()
    records_max: int = int32(default=500)


@struct()
class FetchedSlice:
    """The slice that a member got: its offsets, both inclusive. What is sent beside them is not the member's."""

    start: int = int64()
    end: int = int64()
    sequence: int = int32()


@struct()
class FetchPartition:
    """Where to read in one partition; ours: the key ranges wanted, all when empty, and further filters.

    With a `claim` the leader chooses where to read, and `fetch_offset` is where a group begins that has committed
    nothing; -1 where the member does not know.
    """

    partition: int = int32()
    current_leader_epoch: int = int32(since=9, default=-1)
    fetch_offset: int = int64()
    last_fetched_epoch: int = int32(since=12, default=-1)
    log_start_offset: int = int64(since=5, default=-1)
    partition_max_bytes: int = int32()
    replica_directory_id: UUID = uuid(since=17, tag=0)
    high_watermark: int = int64(since=18, default=9223372036854775807, tag=1)
    key_ranges: Sequence[KeyRange] = array(KeyRange, tag=10001)
    filter: RecordFilter | None = nested(RecordFilter, tag=10005)
    claim: Claim | None = nested(Claim, tag=10006)


@struct()
class FetchTopic:
    """Partitions of one topic to read; ours: the partition count in the reader's metadata."""

    topic: str = string(until=12)
    topic_id: UUID = uuid(since=13)
    partitions: Sequence[FetchPartition] = array(FetchPartition)
    undeleted_partition_count: int = int32(tag=10000, default=-1)


@struct()
class ForgottenTopic:
    """Partitions that leave the fetch session."""

    topic: str = string(until=12)
    topic_id: UUID = uuid(since=13)
    partitions: Sequence[int] = array(int32)


@struct()
class ReplicaState:
    """The follower that fetches, if it is one."""

    replica_id: int = int32(default=-1)
    replica_epoch: int = int64(default=-1)


@message(api_key=1, versions="4-18", flexible="12+")
class FetchRequest:
    """Read records, waiting for some to come; ours: the member that reads, when its group shares partitions."""

    cluster_id: str | None = string(nullable=True, default=None, tag=0)
    replica_id: int = int32(until=14, default=-1)
    replica_state: ReplicaState | None = nested(ReplicaState, since=15, tag=1)
    max_wait_ms: int = int32()
    min_bytes: int = int32()
    max_bytes: int = int32(default=2147483647)
    isolation_level: int = int8()
    session_id: int = int32(since=7)
    session_epoch: int = int32(since=7, default=-1)
    topics: Sequence[FetchTopic] = array(FetchTopic)
    forgotten_topics_data: Sequence[ForgottenTopic] = array(ForgottenTopic, since=7)
    rack_id: str = string(since=11)
    generation_id_or_member_epoch: int = int32(tag=10002, default=-1)
    member_id: str = string(tag=10003)
    group_id: str = string(tag=10004)


@struct()
class AbortedTransaction:
    """A transaction whose records from this offset on are aborted."""

    producer_id: int = int64()
    first_offset: int = int64()


@struct()
class EpochEndOffset:
    """Where the follower's log departs from the leader's."""

    epoch: int = int32(default=-1)
    end_offset: int = int64(default=-1)


@struct()
class LeaderIdAndEpoch:
    """The leader that a refused client should turn to."""

    leader_id: int = int32(default=-1)
    leader_epoch: int = int32(default=-1)


@struct()
class SnapshotId:
    """The snapshot to fetch in place of records that are gone."""

    end_offset: int = int64(default=-1)
    epoch: int = int32(default=-1)


@struct()
class PartitionData:
    """Records of one partition, and how far it goes; ours: why there are none below the log start, and filtering.

    `folded`: the partition is being folded back (ADR 0036). Whoever has read up to an offset below the log start reads
    the rest of it elsewhere, and may go on at the log start. `filtered_to`: the records are those that were asked for
    of all below this offset, at which the reader goes on; -1 without filtering. `slice`: what a claim got;
    `error_message`: why it got nothing.
    """

    partition_index: int = int32()
    error_code: int = int16()
    high_watermark: int = int64()
    last_stable_offset: int = int64(default=-1)
    log_start_offset: int = int64(since=5, default=-1)
    diverging_epoch: EpochEndOffset | None = nested(EpochEndOffset, tag=0)
    current_leader: LeaderIdAndEpoch | None = nested(LeaderIdAndEpoch, tag=1)
    snapshot_id: SnapshotId | None = nested(SnapshotId, tag=2)
    aborted_transactions: Sequence[AbortedTransaction] | None = array(AbortedTransaction, nullable=True)
    preferred_read_replica: int = int32(since=11, default=-1)
    records: Records = records(nullable=True)
    folded: bool = boolean(tag=10000)
    filtered_to: int = int64(tag=10001, default=-1)
    slice: FetchedSlice | None = nested(FetchedSlice, tag=10002)
    error_message: str | None = string(tag=10003, nullable=True, default=None)


@struct()
class FetchableTopicResponse:
    """The answers for one topic."""

    topic: str = string(until=12)
    topic_id: UUID = uuid(since=13)
    partitions: Sequence[PartitionData] = array(PartitionData)


@struct()
class NodeEndpoint:
    """Where a leader named in this response listens."""

    node_id: int = int32()
    host: str = string()
    port: int = int32()
    rack: str | None = string(nullable=True, default=None)


@message(api_key=1, versions="4-18", flexible="12+")
class FetchResponse:
    """Whole batches, as they lie on disk."""

    throttle_time_ms: int = int32()
    error_code: int = int16(since=7)
    session_id: int = int32(since=7)
    responses: Sequence[FetchableTopicResponse] = array(FetchableTopicResponse)
    node_endpoints: Sequence[NodeEndpoint] = array(NodeEndpoint, since=16, tag=0)
