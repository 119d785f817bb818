"""PartitionLeaderEpochsForPartitions (API 10000), ours, from KIP-253 (Protocol 5): the cuts of a topic's lineage.

The proposal has one leader epoch per partition; since partitions may be added again while they retire, a cut here
also names the layout that it began. Those lists name every other partition each time, and grow with partitions times
layouts. Our clients ask for cuts instead: of each partition only its own, as offsets, of the layouts in which it has
records (ordering.md, 6.3; ADR 0032).
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, bytes_, int16, int32, int64, message, string, struct, uuid
from anabranch.codec.types import Blob


@struct()
class PartitionLeaderEpochsForPartitionsRequestTopic:
    """Partitions of one topic; ours: cuts of layouts below `first_layout` are known."""

    topic: str = string()
    partitions: Sequence[int] = array(int32)
    first_layout: int = int32(tag=10000)


@message(api_key=10000, versions="0", flexible="0+")
class PartitionLeaderEpochsForPartitionsRequest:
    """Ask which leader epochs ended when partitions were created, and when they began to retire.

    Ours: with `cuts`, ask the leader for the partitions' own cuts and for nothing else; with `epochs`, beside them for
    the leader epochs that ended with the layouts.
    """

    topics: Sequence[PartitionLeaderEpochsForPartitionsRequestTopic] = array(
        PartitionLeaderEpochsForPartitionsRequestTopic
    )
    cuts: bool = boolean(tag=10000)
    epochs: bool = boolean(tag=10001)


@struct()
class LayoutLeaderEpoch:
    """The leader epoch that `partition` ended when `layout` began."""

    layout: int = int32()
    partition: int = int32()
    leader_epoch: int = int32()


@struct()
class LayoutLeaderEpochs:
    """A partition's leader epochs from `leader_epoch` on, one of which ended with each of `count` layouts (ours)."""

    layout: int = int32()
    leader_epoch: int = int32()
    count: int = int32()


@struct()
class PartitionLeaderEpochsForPartitionsResponsePartition:
    """One partition: one list for every layout that created it, one for every layout that retired it.

    Ours, instead, where cuts were asked for: the ended layouts in which the partition has records, ascending, and the
    offsets at which those records end, exclusive; big-endian numbers of 64 bits, as many of the one as of the other.
    `log_start` is the first offset that may be read.
    """

    partition: int = int32()
    error_code: int = int16()
    leader_epoch_after_creation: Sequence[LayoutLeaderEpoch] = array(LayoutLeaderEpoch)
    leader_epoch_before_deletion: Sequence[LayoutLeaderEpoch] = array(LayoutLeaderEpoch)
    cut_layouts: Blob = bytes_(tag=10000)
    cut_ends: Blob = bytes_(tag=10001)
    log_start: int = int64(tag=10002, default=-1)
    ended_epochs: Sequence[LayoutLeaderEpochs] = array(LayoutLeaderEpochs, tag=10003)


@struct()
class PartitionLeaderEpochsForPartitionsResponseTopic:
    """The answers for one topic; ours: its id, and the number of the layout that rules, which is not cut yet."""

    topic: str = string()
    error_code: int = int16()
    partitions: Sequence[PartitionLeaderEpochsForPartitionsResponsePartition] = array(
        PartitionLeaderEpochsForPartitionsResponsePartition
    )
    topic_id: UUID = uuid(tag=10000)
    layout: int = int32(tag=10001, default=-1)


@message(api_key=10000, versions="0", flexible="0+")
class PartitionLeaderEpochsForPartitionsResponse:
    """The cuts; with the layouts of MetadataResponse they are the whole lineage.

    An answer is bounded: partitions that it leaves out are to be asked for again. It answers one at least.
    """

    throttle_time_ms: int = int32()
    topics: Sequence[PartitionLeaderEpochsForPartitionsResponseTopic] = array(
        PartitionLeaderEpochsForPartitionsResponseTopic
    )
