"""CreatePartitions (API 37). v2 is flexible."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, boolean, int16, int32, message, string, struct


@struct()
class CreatePartitionsAssignment:
    """The brokers of one new partition, chosen by hand."""

    broker_ids: Sequence[int] = array(int32)


@struct()
class CreatePartitionsTopic:
    """The count a topic is to have. With us it may be smaller than the present one."""

    name: str = string()
    count: int = int32()
    assignments: Sequence[CreatePartitionsAssignment] | None = array(
        CreatePartitionsAssignment, nullable=True, default=None
    )


@message(api_key=37, versions="0-3", flexible="2+")
class CreatePartitionsRequest:
    """Resize topics, or only check that they could be."""

    topics: Sequence[CreatePartitionsTopic] = array(CreatePartitionsTopic)
    timeout_ms: int = int32()
    validate_only: bool = boolean()


@struct()
class CreatePartitionsTopicResult:
    """The result for one topic."""

    name: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)


@message(api_key=37, versions="0-3", flexible="2+")
class CreatePartitionsResponse:
    """The results for the topics."""

    throttle_time_ms: int = int32()
    results: Sequence[CreatePartitionsTopicResult] = array(CreatePartitionsTopicResult)
