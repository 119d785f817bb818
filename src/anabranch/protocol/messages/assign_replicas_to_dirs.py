"""AssignReplicasToDirs (API 73)."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, int64, message, struct, uuid


@struct()
class PartitionData:
    """One partition."""

    partition_index: int = int32()


@struct()
class TopicData:
    """Partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionData] = array(PartitionData)


@struct()
class DirectoryData:
    """The partitions in one directory."""

    id_: UUID = uuid()
    topics: Sequence[TopicData] = array(TopicData)


@message(api_key=73, versions="0", flexible="0+")
class AssignReplicasToDirsRequest:
    """Tell the controller which directories hold the replicas of a broker."""

    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    directories: Sequence[DirectoryData] = array(DirectoryData)


@struct()
class PartitionDataResult:
    """The result for one partition."""

    partition_index: int = int32()
    error_code: int = int16()


@struct()
class TopicDataResult:
    """The results for partitions of one topic."""

    topic_id: UUID = uuid()
    partitions: Sequence[PartitionDataResult] = array(PartitionDataResult)


@struct()
class DirectoryDataResult:
    """The results for one directory."""

    id_: UUID = uuid()
    topics: Sequence[TopicDataResult] = array(TopicDataResult)


@message(api_key=73, versions="0", flexible="0+")
class AssignReplicasToDirsResponse:
    """The results for the directories."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    directories: Sequence[DirectoryDataResult] = array(DirectoryDataResult)
