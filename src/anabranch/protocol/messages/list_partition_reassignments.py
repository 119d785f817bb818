"""ListPartitionReassignments (API 46)."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, message, string, struct


@struct()
class ListPartitionReassignmentsTopics:
    """Partitions of one topic."""

    name: str = string()
    partition_indexes: Sequence[int] = array(int32)


@message(api_key=46, versions="0", flexible="0+")
class ListPartitionReassignmentsRequest:
    """Ask which partitions are being reassigned; null means all."""

    timeout_ms: int = int32(default=60000)
    topics: Sequence[ListPartitionReassignmentsTopics] | None = array(
        ListPartitionReassignmentsTopics, nullable=True, default=None
    )


@struct()
class OngoingPartitionReassignment:
    """A partition that is being moved, and its brokers."""

    partition_index: int = int32()
    replicas: Sequence[int] = array(int32)
    adding_replicas: Sequence[int] = array(int32)
    removing_replicas: Sequence[int] = array(int32)


@struct()
class OngoingTopicReassignment:
    """Partitions of one topic."""

    name: str = string()
    partitions: Sequence[OngoingPartitionReassignment] = array(OngoingPartitionReassignment)


@message(api_key=46, versions="0", flexible="0+")
class ListPartitionReassignmentsResponse:
    """The reassignments in progress."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    topics: Sequence[OngoingTopicReassignment] = array(OngoingTopicReassignment)
