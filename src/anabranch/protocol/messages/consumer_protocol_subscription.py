"""ConsumerProtocolSubscription, which travels inside JoinGroup and SyncGroup. v1 adds `owned_partitions`; v2 adds
`generation_id`; v3 adds `rack_id`.
"""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import Blob, array, bytes_, int32, message, string, struct


@struct()
class TopicPartition:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[int] = array(int32)


@message(versions="0-3")
class ConsumerProtocolSubscription:
    """The subscription of a member of a classic consumer group, and the partitions it owned."""

    topics: Sequence[str] = array(string)
    user_data: Blob | None = bytes_(nullable=True, default=None)
    owned_partitions: Sequence[TopicPartition] = array(TopicPartition, since=1)
    generation_id: int = int32(since=2, default=-1)
    rack_id: str | None = string(since=3, nullable=True, default=None)
