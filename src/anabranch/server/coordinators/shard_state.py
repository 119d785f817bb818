"""The states of a coordinator shard, and what its clients are told in each."""

from __future__ import annotations

from enum import Enum

from anabranch.base.errors import ApiError, ErrorCode


class ShardState(Enum):
    """The states of a shard, each with the error code of requests in it."""

    LOADING = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    ACTIVE = ErrorCode.NONE
    FAILED = ErrorCode.COORDINATOR_NOT_AVAILABLE
    UNLOADED = ErrorCode.NOT_COORDINATOR


MESSAGES = {
    ShardState.LOADING: "The coordinator is still reading its log; try again.",
    ShardState.FAILED: "The coordinator could not read or write its log; try again.",
    ShardState.UNLOADED: "The broker is stopping.",
}


def refusal(state: ShardState) -> ApiError:
    """The error of a request to a shard in this state."""
    return ApiError(state.value, MESSAGES[state])
