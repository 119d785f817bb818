"""ConsumerGroupPosition (API 10001), ours, from KIP-253 (Protocol 3 and 4): how far each member of a group is.

A member keeps one such question open while gates may wait in its group. The coordinator answers at once when it has
news, and parks the question up to `max_wait_ms` otherwise; a later question of the same member ends the parked one,
which is answered with what is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct, uuid


@struct()
class ConsumerGroupPositionRequestPartition:
    """A partition that the member owns and its position (-1: nothing new), or one whose position the member needs.

    With `need_position`, `position` is what the member knows already; -1: nothing.
    """

    partition: int = int32()
    need_position: bool = boolean()
    position: int = int64(default=-1)
    flushed: int = int64(tag=10000, default=-1)
    """Of an owned partition: below, the member holds no record that is not processed yet. -1: nothing new."""


@struct()
class ConsumerGroupPositionRequestTopic:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[ConsumerGroupPositionRequestPartition] = array(ConsumerGroupPositionRequestPartition)
    topic_id: UUID = uuid(tag=10000)


@message(api_key=10001, versions="0", flexible="0+")
class ConsumerGroupPositionRequest:
    """Report positions, and ask for those that gates wait on."""

    group_id: str = string()
    generation_id: int = int32()
    """The member epoch of the consumer protocol, the generation of the classic one."""
    member_id: str = string()
    topics: Sequence[ConsumerGroupPositionRequestTopic] = array(ConsumerGroupPositionRequestTopic)
    max_wait_ms: int = int32(tag=10000, default=0)


@struct()
class ConsumerGroupPositionResponsePartition:
    """The group's position in a partition, -1 if unknown, or the wish that this member report its own."""

    partition: int = int32()
    need_position: bool = boolean()
    position: int = int64(default=-1)
    overdue: bool = boolean(tag=10000)
    """The gate may open by time: the position has not changed for its owner's rebalance timeout."""
    overdue_to: int = int64(tag=10001, default=-1)
    """If it may: up to which offset; -1: for all records."""


@struct()
class ConsumerGroupPositionResponseTopic:
    """Partitions of one topic."""

    topic: str = string()
    partitions: Sequence[ConsumerGroupPositionResponsePartition] = array(ConsumerGroupPositionResponsePartition)


@message(api_key=10001, versions="0", flexible="0+")
class ConsumerGroupPositionResponse:
    """Positions of the group, and the partitions whose positions other members need.

    REBALANCE_IN_PROGRESS asks for a heartbeat at once: the member has something to reconcile.
    """

    throttle_time_ms: int = int32()
    topics: Sequence[ConsumerGroupPositionResponseTopic] = array(ConsumerGroupPositionResponseTopic)
    error_code: int = int16()
