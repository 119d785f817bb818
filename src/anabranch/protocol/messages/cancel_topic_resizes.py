"""CancelTopicResizes (API 10005), ours: undo resizes that run, where that is possible. The controller serves it."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.codec import array, int16, int32, message, string, struct


@message(api_key=10005, versions="0", flexible="0+")
class CancelTopicResizesRequest:
    """Cancel the resizes of these topics."""

    topics: Sequence[str] = array(string)


@struct()
class CancelTopicResizesResult:
    """The result for one topic.

    NO_REASSIGNMENT_IN_PROGRESS: no resize runs. REASSIGNMENT_IN_PROGRESS: it cannot be canceled any more.
    """

    name: str = string()
    error_code: int = int16()
    error_message: str | None = string(nullable=True, default=None)


@message(api_key=10005, versions="0", flexible="0+")
class CancelTopicResizesResponse:
    """The results for the topics, in their order."""

    throttle_time_ms: int = int32()
    results: Sequence[CancelTopicResizesResult] = array(CancelTopicResizesResult)
