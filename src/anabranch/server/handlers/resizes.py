"""ListTopicResizes (10004) and CancelTopicResizes (10005), ours: what resizes wait for, and commands that undo them."""

from __future__ import annotations

import asyncio

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.protocol.messages.cancel_topic_resizes import (
    CancelTopicResizesRequest,
    CancelTopicResizesResponse,
    CancelTopicResizesResult,
)
from anabranch.protocol.messages.list_topic_resizes import (
    ListTopicResizesRequest,
    ListTopicResizesResponse,
    TopicResize,
    TopicResizeWait,
)
from anabranch.server.cluster.resize_waits import RunningResize
from anabranch.server.context import BrokerContext, Large, RequestContext, large_or_not
from anabranch.server.handlers.in_parts import gather_in_steps

WAITS_MAX = 100
"""How many partitions that hold a resize up a response names."""
CANCELED_MAX = 100
"""How many topics a request may name: each is a step of the controller."""


async def handle_list_topic_resizes(
    broker: BrokerContext, request: ListTopicResizesRequest, call: RequestContext
) -> ListTopicResizesResponse | Large:
    """List the running resizes of the topics asked for, or of all, by name."""
    found = await gather_in_steps(broker.commands.resizes(request.topics))
    return large_or_not(
        lambda: ListTopicResizesResponse(topics=[_listed(it) for it in sorted(found, key=_name)]), len(found)
    )


def _name(running: RunningResize) -> str:
    return running.topic


def _listed(running: RunningResize) -> TopicResize:
    return TopicResize(
        name=running.topic,
        topic_id=running.topic_id,
        from_count=running.from_count,
        to_count=running.to_count,
        phase=running.phase.value,
        cancelable=running.cancelable,
        wait_count=len(running.waits),
        waits=[
            TopicResizeWait(
                partition=it.wait.partition,
                broker_id=it.wait.broker_id,
                error_code=it.wait.error,
                waiting_ms=running.now_ms - it.since_ms,
                reason=it.reason,
            )
            for it in running.waits[:WAITS_MAX]
        ],
    )


async def handle_cancel_topic_resizes(
    broker: BrokerContext, request: CancelTopicResizesRequest, call: RequestContext
) -> CancelTopicResizesResponse:
    """Cancel the resize of each topic; refuse a request that names too many."""
    if len(request.topics) > CANCELED_MAX:
        message = f"{len(request.topics)} topics are too many: name at most {CANCELED_MAX}."
        refused = [
            CancelTopicResizesResult(name=name, error_code=ErrorCode.INVALID_REQUEST, error_message=message)
            for name in request.topics
        ]
        return CancelTopicResizesResponse(results=refused)

    async def cancel(name: str) -> CancelTopicResizesResult:
        try:
            await broker.commands.cancel_resize(name)
        except ApiError as error:
            return CancelTopicResizesResult(name=name, error_code=error.code, error_message=error.message)
        return CancelTopicResizesResult(name=name)

    return CancelTopicResizesResponse(results=list(await asyncio.gather(*(cancel(name) for name in request.topics))))
