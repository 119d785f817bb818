"""ConsumerProtocolAssignment, which travels inside JoinGroup and SyncGroup."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import Blob, array, bytes_, int32, message, string, struct


@struct()
class TopicPartition:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[int] = array(int32)


@message(versions="0-3")
class ConsumerProtocolAssignment:
    """The assignment of a member of a classic consumer group."""

    assigned_partitions: Sequence[TopicPartition] = array(TopicPartition)
    user_data: Blob | None = bytes_(nullable=True, default=None)
