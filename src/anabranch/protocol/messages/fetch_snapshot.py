"""FetchSnapshot (API 59). v1 adds directories of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import Records, array, int16, int32, int64, message, nested, records, string, struct, uint16, uuid


@struct()
class SnapshotId:
    """The end of a snapshot."""

    end_offset: int = int64()
    epoch: int = int32()


@struct()
class PartitionSnapshot:
    """Where to read the snapshot of one partition."""

    partition: int = int32()
    current_leader_epoch: int = int32()
    snapshot_id: SnapshotId = nested(SnapshotId)
    position: int = int64()
    replica_directory_id: UUID = uuid(since=1, tag=0)


@struct()
class TopicSnapshot:
    """Snapshots of partitions of one topic."""

    name: str = string()
    partitions: Sequence[PartitionSnapshot] = array(PartitionSnapshot)


@message(api_key=59, versions="0-1", flexible="0+")
class FetchSnapshotRequest:
    """Read a snapshot of the cluster's metadata."""

    cluster_id: str | None = string(nullable=True, default=None, tag=0)
    replica_id: int = int32(default=-1)
    max_bytes: int = int32(default=2147483647)
    topics: Sequence[TopicSnapshot] = array(TopicSnapshot)


@struct()
class LeaderIdAndEpoch:
    """The leader of a partition."""

    leader_id: int = int32()
    leader_epoch: int = int32()


@struct()
class PartitionSnapshotResult:
    """A piece of the snapshot of one partition."""

    index: int = int32()
    error_code: int = int16()
    snapshot_id: SnapshotId = nested(SnapshotId)
    current_leader: LeaderIdAndEpoch | None = nested(LeaderIdAndEpoch, tag=0)
    size: int = int64()
    position: int = int64()
    unaligned_records: Records = records()


@struct()
class TopicSnapshotResult:
    """Pieces of snapshots of partitions of one topic."""

    name: str = string()
    partitions: Sequence[PartitionSnapshotResult] = array(PartitionSnapshotResult)


@struct()
class NodeEndpoint:
    """Where a node is found."""

    node_id: int = int32(since=1)
    host: str = string(since=1)
    port: int = uint16(since=1)


@message(api_key=59, versions="0-1", flexible="0+")
class FetchSnapshotResponse:
    """Pieces of snapshots."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    topics: Sequence[TopicSnapshotResult] = array(TopicSnapshotResult)
    node_endpoints: Sequence[NodeEndpoint] = array(NodeEndpoint, since=1, tag=0)
