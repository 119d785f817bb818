"""PartitionLeaderEpochsForPartitions (API 10000), ours, from KIP-253 (Protocol 5): the cuts of a topic's lineage.

The proposal has one leader epoch per partition; since partitions may be added again while they retire, a cut here
also names the layout that it began.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, message, string, struct


@struct()
class PartitionLeaderEpochsForPartitionsRequestTopic:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[int] = array(int32)


@message(api_key=10000, versions="0", flexible="0+")
class PartitionLeaderEpochsForPartitionsRequest:
    """Ask which leader epochs ended when partitions were created, and when they began to retire."""

    topics: Sequence[PartitionLeaderEpochsForPartitionsRequestTopic] = array(
        PartitionLeaderEpochsForPartitionsRequestTopic
    )


@struct()
class LayoutLeaderEpoch:
    """The leader epoch that `partition` ended when `layout` began."""

    layout: int = int32()
    partition: int = int32()
    leader_epoch: int = int32()


@struct()
class PartitionLeaderEpochsForPartitionsResponsePartition:
    """The cuts of one partition: one list for every layout that created it, one for every layout that retired it."""

    partition: int = int32()
    error_code: int = int16()
    leader_epoch_after_creation: Sequence[LayoutLeaderEpoch] = array(LayoutLeaderEpoch)
    leader_epoch_before_deletion: Sequence[LayoutLeaderEpoch] = array(LayoutLeaderEpoch)


@struct()
class PartitionLeaderEpochsForPartitionsResponseTopic:
    """The answers for one topic."""

    topic: str = string()
    error_code: int = int16()
    partitions: Sequence[PartitionLeaderEpochsForPartitionsResponsePartition] = array(
        PartitionLeaderEpochsForPartitionsResponsePartition
    )


@message(api_key=10000, versions="0", flexible="0+")
class PartitionLeaderEpochsForPartitionsResponse:
    """The cuts; with the layouts of MetadataResponse they are the whole lineage."""

    throttle_time_ms: int = int32()
    topics: Sequence[PartitionLeaderEpochsForPartitionsResponseTopic] = array(
        PartitionLeaderEpochsForPartitionsResponseTopic
    )
