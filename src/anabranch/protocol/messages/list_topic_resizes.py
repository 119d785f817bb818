"""ListTopicResizes (API 10004), ours: the resizes that run, and what holds them up. The controller serves it."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, boolean, int16, int32, int64, message, string, struct, uuid


@message(api_key=10004, versions="0", flexible="0+")
class ListTopicResizesRequest:
    """List the resizes of these topics; null: of all topics."""

    topics: Sequence[str] | None = array(string, nullable=True, default=None)


@struct()
class TopicResizeWait:
    """A partition whose leader refuses the resize, or cannot be told of it."""

    partition: int = int32()
    broker_id: int = int32()
    error_code: int = int16()
    """Of the leader; LEADER_NOT_AVAILABLE where its broker is not running."""
    waiting_ms: int = int64()
    reason: str = string()


@struct()
class TopicResize:
    """A resize that runs."""

    name: str = string()
    topic_id: UUID = uuid()
    from_count: int = int32()
    to_count: int = int32()
    phase: str = string()
    """`close`, `cut` or `open`: docs/elastic-topics.md."""
    cancelable: bool = boolean()
    wait_count: int = int32()
    """How many partitions hold the resize up; `waits` may name fewer."""
    waits: Sequence[TopicResizeWait] = array(TopicResizeWait)


@message(api_key=10004, versions="0", flexible="0+")
class ListTopicResizesResponse:
    """The resizes that run, by topic name; a topic that is not being resized, or does not exist, is left out."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    topics: Sequence[TopicResize] = array(TopicResize)
