"""AlterReplicaLogDirs (API 34). v2 is flexible."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, message, string, struct


@struct()
class AlterReplicaLogDirTopic:
    """Partitions of one topic."""

    name: str = string()
    partitions: Sequence[int] = array(int32)


@struct()
class AlterReplicaLogDir:
    """The replicas that go to one directory."""

    path: str = string()
    topics: Sequence[AlterReplicaLogDirTopic] = array(AlterReplicaLogDirTopic)


@message(api_key=34, versions="1-2", flexible="2+")
class AlterReplicaLogDirsRequest:
    """Move replicas to other data directories of their broker."""

    dirs: Sequence[AlterReplicaLogDir] = array(AlterReplicaLogDir)


@struct()
class AlterReplicaLogDirPartitionResult:
    """The result for one partition."""

    partition_index: int = int32()
    error_code: int = int16()


@struct()
class AlterReplicaLogDirTopicResult:
    """The results for one topic."""

    topic_name: str = string()
    partitions: Sequence[AlterReplicaLogDirPartitionResult] = array(AlterReplicaLogDirPartitionResult)


@message(api_key=34, versions="1-2", flexible="2+")
class AlterReplicaLogDirsResponse:
    """A result for each partition."""

    throttle_time_ms: int = int32()
    results: Sequence[AlterReplicaLogDirTopicResult] = array(AlterReplicaLogDirTopicResult)
