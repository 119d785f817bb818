"""ConsumerGroupPosition (API 10001), ours, from KIP-253 (Protocol 3 and 4): how far each member of a group is."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct


@struct()
class ConsumerGroupPositionRequestPartition:
    """A partition that the member owns and its position (-1: none), or one whose position the member needs."""

    partition: int = int32()
    need_position: bool = boolean()
    position: int = int64(default=-1)


@struct()
class ConsumerGroupPositionRequestTopic:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[ConsumerGroupPositionRequestPartition] = array(ConsumerGroupPositionRequestPartition)


@message(api_key=10001, versions="0", flexible="0+")
class ConsumerGroupPositionRequest:
    """Report committed positions, and ask for those that gates wait on."""

    group_id: str = string()
    generation_id: int = int32()
    member_id: str = string()
    topics: Sequence[ConsumerGroupPositionRequestTopic] = array(ConsumerGroupPositionRequestTopic)


@struct()
class ConsumerGroupPositionResponsePartition:
    """The group's position in a partition, -1 if unknown, or the wish that this member report its own."""

    partition: int = int32()
    need_position: bool = boolean()
    position: int = int64(default=-1)


@struct()
class ConsumerGroupPositionResponseTopic:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[ConsumerGroupPositionResponsePartition] = array(ConsumerGroupPositionResponsePartition)


@message(api_key=10001, versions="0", flexible="0+")
class ConsumerGroupPositionResponse:
    """Positions of the group, and the partitions whose positions other members need."""

    throttle_time_ms: int = int32()
    topics: Sequence[ConsumerGroupPositionResponseTopic] = array(ConsumerGroupPositionResponseTopic)
    error_code: int = int16()
