"""DeleteTopics (API 20). v4 is flexible; v5 adds `error_message`; v6 adds `topics`, `topic_id`."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from anabranch.codec import array, int16, int32, message, string, struct, uuid


@struct()
class DeleteTopicState:
    """A topic, by name or by id."""

    name: str | None = string(nullable=True, default=None)
    topic_id: UUID = uuid()


@message(api_key=20, versions="1-6", flexible="4+")
class DeleteTopicsRequest:
    """Delete topics."""

    topics: Sequence[DeleteTopicState] = array(DeleteTopicState, since=6)
    topic_names: Sequence[str] = array(string, until=5)
    timeout_ms: int = int32()


@struct()
class DeletableTopicResult:
    """The result for one topic."""

    name: str | None = string(nullable="6+")
    topic_id: UUID = uuid(since=6)
    error_code: int = int16()
    error_message: str | None = string(since=5, nullable=True, default=None)


@message(api_key=20, versions="1-6", flexible="4+")
class DeleteTopicsResponse:
    """The results for the topics."""

    throttle_time_ms: int = int32()
    responses: Sequence[DeletableTopicResult] = array(DeletableTopicResult)
