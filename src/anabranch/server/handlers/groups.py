"""Being in a group: ConsumerGroupHeartbeat (68), ConsumerGroupPosition (10001), ConsumerGroupPrepareAssignment (10002),
ConsumerGroupInstallAssignment (10003), JoinGroup (11), SyncGroup (14), Heartbeat (12), LeaveGroup (13).

The coordinator's machine handles the request and returns the response. The handlers find its shard, copy out of the
request's frame what that retains as it is, and return the API's error when no shard can answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.quiet import says_nothing
from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from anabranch.protocol.messages.consumer_group_install_assignment import (
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
)
from anabranch.protocol.messages.consumer_group_position import (
    ConsumerGroupPositionRequest,
    ConsumerGroupPositionResponse,
)
from anabranch.protocol.messages.consumer_group_prepare_assignment import (
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
)
from anabranch.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from anabranch.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from anabranch.runtime.loop_steps import timed
from anabranch.runtime.turns import in_turns
from anabranch.server.context import (
    PARTITIONS_AT_A_TIME,
    Apart,
    BrokerContext,
    CloseConnectionError,
    Large,
    RequestContext,
)
from anabranch.server.coordinators import weights
from anabranch.server.coordinators.member_metadata import heartbeat_size, join_size, sync_size

if TYPE_CHECKING:
    from anabranch.machines.groups.regex import Matching

Response = TypeVar("Response")
Refuse = Callable[[ErrorCode, str], Response]
Weigh = Callable[[Any], int]
COPIED_MAX = 20_000
"""Elements copied out of a frame before a decision that may wait in line; requests of more are refused by number."""
PARTITIONS_ENCODED_MAX = 1_000
"""Partitions of an assignment that are encoded on the loop."""
ASSIGNMENTS_AT_ONCE = 1_000
"""Assignments of a leader that are looked at before other work has its turn; more come in requests decoded apart."""
PEERS_REMEMBERED_MAX = 4_096
NO_CONSUMER_PROTOCOL = "This broker's group.coordinator.rebalance.protocols does not name consumer."


def caller_of(broker: BrokerContext, call: RequestContext, member_id: str) -> Caller:
    """Describe the sender to the machine; a member without an id may take the one that is given here."""
    fresh = "" if member_id else str(broker.chance.uuid())
    return Caller(call.client_id or "", _host_of(call.peer), call.api_version, fresh, call.connection)


@lru_cache(PEERS_REMEMBERED_MAX)
def _host_of(peer: str) -> str:
    return f"/{peer.rpartition(':')[0].strip('[]')}"


def as_member(
    broker: BrokerContext,
    group_id: str,
    call: RequestContext,
    decide: Callable[[Any, int], Any],
    refuse: Refuse[Response],
    dropped: Callable[[], None] | None = None,
    weigh: Weigh | None = None,
    large: Callable[[Response], bool] | None = None,
) -> Response | Awaitable[Response]:
    """Submit a member's request, unless the request may be older than another to an earlier coordinator.

    A response that is `large` is encoded in a thread: a `Large` stands in its place.
    """
    try:
        if broker.groups.has_begun_anew(group_id, call.connection):
            raise CloseConnectionError("the coordinator of its group has begun anew")
    except ApiError as error:
        return refuse(error.code, error.message)
    return submit(broker, group_id, decide, refuse, dropped, weigh, large)


def submit(
    broker: BrokerContext,
    group_id: str,
    decide: Callable[[Any, int], Any],
    refuse: Refuse[Response],
    dropped: Callable[[], None] | None = None,
    weigh: Weigh | None = None,
    large: Callable[[Response], bool] | None = None,
    whole: Callable[[Response], Response] | None = None,
    look: Callable[[], None] | None = None,
) -> Response | Awaitable[Response]:
    """Have the group's shard decide; `refuse` makes the response, with the reason, when the shard cannot.

    `dropped` is called if the connection ends while the response is awaited. `weigh` and `look` are as for `Shard.ask`;
    without a weight the decision weighs what must be read of the group's offsets. `whole` makes the response of what
    was decided.
    """
    try:
        answer: Any = broker.groups.shard_of(group_id).ask(
            decide, weigh or (lambda groups: groups.weight_of_offsets(group_id)), look
        )
    except ApiError as error:
        answer = refuse(error.code, error.message)
    else:
        if isinstance(answer, asyncio.Future):
            return awaited(answer, refuse, dropped, large, whole)
        if large is not None:
            answer = _maybe_large(answer, large)
    response: Response = answer
    return response if whole is None else whole(response)


async def awaited(
    answer: Awaitable[Response],
    refuse: Refuse[Response],
    dropped: Callable[[], None] | None = None,
    large: Callable[[Response], bool] | None = None,
    whole: Callable[[Response], Response] | None = None,
) -> Response:
    """Wait for a response, or make one of the reason why there is none; call `dropped` if the wait is cancelled."""
    try:
        response = await answer if large is None else _maybe_large(await answer, large)
    except ApiError as error:
        response = refuse(error.code, error.message)
    except asyncio.CancelledError:
        if dropped is not None:
            dropped()
        raise
    return response if whole is None else whole(response)


def _maybe_large(answer: Response, large: Callable[[Response], bool]) -> Response:
    return cast("Response", Large(lambda: answer)) if large(answer) else answer


JOINING = 0
"""The epoch of a member that joins (KIP-848)."""


# -- the consumer protocol -------------------------------------------------------------------------------------------


def handle_consumer_group_heartbeat(
    broker: BrokerContext, request: ConsumerGroupHeartbeatRequest, call: RequestContext
) -> ConsumerGroupHeartbeatResponse | Awaitable[ConsumerGroupHeartbeatResponse] | Apart:
    """Join, stay, report, leave."""
    if not broker.groups.consumer_protocol:
        return _heartbeat_refused(ErrorCode.UNSUPPORTED_VERSION, NO_CONSUMER_PROTOCOL)
    if says_nothing(request):
        return _heartbeat(broker, request, call)
    groups = broker.groups
    newcomer = request.member_epoch == JOINING and groups.is_newcomer(request.group_id, request.member_id)
    size = heartbeat_size(request, call.client_id, names_max=broker.settings.group_consumer_max_subscribed_names)
    refused = groups.metadata.refuses(size, request.group_id, newcomer=newcomer)
    if refused:
        return _heartbeat_refused(ErrorCode.GROUP_MAX_SIZE_REACHED, refused)
    if request.subscribed_topic_regex:
        matching = groups.to_be_matched(request.subscribed_topic_regex)
        if matching is not None:
            return Apart(lambda copy: _heartbeat_matched(broker, copy, call, matching))
    return _heartbeat(broker, request, call)


async def _heartbeat_matched(
    broker: BrokerContext, request: ConsumerGroupHeartbeatRequest, call: RequestContext, matching: Matching
) -> ConsumerGroupHeartbeatResponse | Awaitable[ConsumerGroupHeartbeatResponse]:
    """Find the topics of a new pattern before the coordinator, which does not wait, asks for them."""
    await broker.groups.match(matching)
    return _heartbeat(broker, request, call)


def _heartbeat(
    broker: BrokerContext, request: ConsumerGroupHeartbeatRequest, call: RequestContext
) -> ConsumerGroupHeartbeatResponse | Awaitable[ConsumerGroupHeartbeatResponse]:
    for offer in islice(request.client_assignors or (), COPIED_MAX):
        offer.metadata_bytes = bytes(offer.metadata_bytes)
    caller = caller_of(broker, call, request.member_id)
    answer = as_member(
        broker,
        request.group_id,
        call,
        lambda groups, now_ms: groups.consumer_group_heartbeat(request, caller, now_ms),
        _heartbeat_refused,
        weigh=broker.groups.weighed(weights.of_heartbeat(request)),
        large=_assigns_much,
    )
    if request.member_epoch >= 0:
        return answer
    if hasattr(answer, "__await__"):
        return _then_freed(broker, request.group_id, answer)
    broker.slices.waits.freed(request.group_id)
    return answer


async def _then_freed(broker: BrokerContext, group_id: str, answer: Awaitable[Response]) -> Response:
    """Wait for the answer to a member that leaves, perhaps in line: then what it held is free."""
    try:
        return await answer
    finally:
        broker.slices.waits.freed(group_id)


def _assigns_much(answer: ConsumerGroupHeartbeatResponse) -> bool:
    told = answer.assignment
    if told is None:  # As nearly always.
        return False
    parts = (told.topic_partitions, told.pending_topic_partitions)
    return sum(len(it.partitions) for part in parts for it in part) > PARTITIONS_ENCODED_MAX


def _heartbeat_refused(code: ErrorCode, message: str) -> ConsumerGroupHeartbeatResponse:
    return ConsumerGroupHeartbeatResponse(error_code=code, error_message=message, assignment=None)


def handle_prepare_assignment(
    broker: BrokerContext, request: ConsumerGroupPrepareAssignmentRequest, call: RequestContext
) -> ConsumerGroupPrepareAssignmentResponse | Awaitable[ConsumerGroupPrepareAssignmentResponse]:
    """Return the input for the member's computation of the group's assignment."""
    caller = caller_of(broker, call, request.member_id)
    return as_member(
        broker,
        request.group_id,
        call,
        lambda groups, now_ms: groups.prepare_assignment(request, caller, now_ms),
        lambda code, message: ConsumerGroupPrepareAssignmentResponse(error_code=code, error_message=message),
        weigh=weights.of_change(request.group_id),
    )


def handle_install_assignment(
    broker: BrokerContext, request: ConsumerGroupInstallAssignmentRequest, call: RequestContext
) -> ConsumerGroupInstallAssignmentResponse | Awaitable[ConsumerGroupInstallAssignmentResponse]:
    """Take the assignment that the member has computed."""
    for assigned in islice(request.members, COPIED_MAX):
        assigned.metadata_bytes = bytes(assigned.metadata_bytes)
    caller = caller_of(broker, call, request.member_id)
    return as_member(
        broker,
        request.group_id,
        call,
        lambda groups, now_ms: groups.install_assignment(request, caller, now_ms),
        lambda code, message: ConsumerGroupInstallAssignmentResponse(error_code=code, error_message=message),
        weigh=weights.of_change(request.group_id),
    )


def handle_consumer_group_position(
    broker: BrokerContext, request: ConsumerGroupPositionRequest, call: RequestContext
) -> ConsumerGroupPositionResponse | Awaitable[ConsumerGroupPositionResponse]:
    """Take a member's positions, and answer those that it needs as soon as they are other than it knows.

    The coordinator keeps of a question what it will compare: the request, of which nothing is read, is freed meanwhile.
    """
    ticket = broker.groups.ticket()
    group_id, member_id = request.group_id, request.member_id
    loop = asyncio.get_running_loop()
    is_taken = is_in_line = False

    def take(groups: Any, now_ms: int) -> Any:
        nonlocal is_taken
        outcome = groups.consumer_group_position(request, ticket, now_ms)
        is_taken = True
        if is_in_line:  # Perhaps in a thread.
            loop.call_soon_threadsafe(timed(loop, "ConsumerGroupPosition", call.release))
        return outcome

    def dropped() -> None:
        with contextlib.suppress(ApiError):
            broker.groups.shard_of(group_id).tell(
                lambda groups, now_ms: groups.position_dropped(group_id, member_id, ticket)
            )

    answer = as_member(
        broker,
        group_id,
        call,
        take,
        lambda code, message: ConsumerGroupPositionResponse(error_code=code),
        dropped,
        weigh=lambda groups: groups.weight_of_position(request),
        large=lambda answer: sum(len(topic.partitions) for topic in answer.topics) > PARTITIONS_AT_A_TIME,
    )
    is_in_line = True
    if is_taken and hasattr(answer, "__await__"):
        call.release()
    return answer


# -- the classic protocol --------------------------------------------------------------------------------------------


def handle_join_group(
    broker: BrokerContext, request: JoinGroupRequest, call: RequestContext
) -> JoinGroupResponse | Awaitable[JoinGroupResponse]:
    """Join the next generation; the answer comes when it is complete."""

    def refuse(code: ErrorCode, message: str) -> JoinGroupResponse:
        return JoinGroupResponse(
            error_code=code, member_id=request.member_id, protocol_name=None if call.api_version >= 7 else ""
        )

    newcomer = broker.groups.is_newcomer(request.group_id, request.member_id)
    refused = broker.groups.metadata.refuses(join_size(request, call.client_id), request.group_id, newcomer=newcomer)
    if refused:
        return refuse(ErrorCode.GROUP_MAX_SIZE_REACHED, refused)
    for protocol in request.protocols:
        protocol.metadata = bytes(protocol.metadata)
    caller = caller_of(broker, call, request.member_id)
    ticket = broker.groups.ticket()
    return as_member(
        broker,
        request.group_id,
        call,
        lambda groups, now_ms: groups.join_group(request, caller, ticket, now_ms),
        refuse,
        weigh=lambda groups: groups.weight_of_join(request),
    )


def handle_sync_group(
    broker: BrokerContext, request: SyncGroupRequest, call: RequestContext
) -> SyncGroupResponse | Awaitable[SyncGroupResponse] | Apart:
    """Give or take the generation's assignment; the answer comes when the leader has given it."""
    if len(request.assignments) > ASSIGNMENTS_AT_ONCE:
        return Apart(lambda copy: _sync_in_steps(broker, copy, call))
    size = sync_size(request)
    if broker.groups.metadata.refuses(size, request.group_id):
        return SyncGroupResponse(error_code=ErrorCode.GROUP_MAX_SIZE_REACHED)
    for assignment in request.assignments:
        assignment.assignment = bytes(assignment.assignment)
    return _sync(broker, request, call, size)


async def _sync_in_steps(
    broker: BrokerContext, request: SyncGroupRequest, call: RequestContext
) -> SyncGroupResponse | Awaitable[SyncGroupResponse]:
    """As `handle_sync_group`, for so many assignments that to look at each takes long."""
    size = 0
    async for assignment in in_turns(request.assignments, ASSIGNMENTS_AT_ONCE):
        size += len(assignment.assignment)
    if broker.groups.metadata.refuses(size, request.group_id):
        return SyncGroupResponse(error_code=ErrorCode.GROUP_MAX_SIZE_REACHED)
    async for assignment in in_turns(request.assignments, ASSIGNMENTS_AT_ONCE):
        assignment.assignment = bytes(assignment.assignment)
    return _sync(broker, request, call, size)


def _sync(
    broker: BrokerContext, request: SyncGroupRequest, call: RequestContext, size: int
) -> SyncGroupResponse | Awaitable[SyncGroupResponse]:
    caller = caller_of(broker, call, request.member_id)
    ticket = broker.groups.ticket()
    return as_member(
        broker,
        request.group_id,
        call,
        lambda groups, now_ms: groups.sync_group(request, caller, ticket, now_ms),
        lambda code, message: SyncGroupResponse(error_code=code),
        weigh=weights.of_sync(request, size),
    )


def handle_heartbeat(
    broker: BrokerContext, request: HeartbeatRequest, call: RequestContext
) -> HeartbeatResponse | Awaitable[HeartbeatResponse]:
    """Stay in the generation."""
    caller = caller_of(broker, call, request.member_id)
    return as_member(
        broker,
        request.group_id,
        call,
        lambda groups, now_ms: groups.heartbeat(request, caller, now_ms),
        lambda code, message: HeartbeatResponse(error_code=code),
        weigh=lambda groups: groups.weight_of_classic(request.group_id, request.member_id),
    )


def handle_leave_group(
    broker: BrokerContext, request: LeaveGroupRequest, call: RequestContext
) -> LeaveGroupResponse | Awaitable[LeaveGroupResponse]:
    """Leave at once."""
    caller = caller_of(broker, call, request.member_id or "-")
    return as_member(
        broker,
        request.group_id,
        call,
        lambda groups, now_ms: groups.leave_group(request, caller, now_ms),
        lambda code, message: LeaveGroupResponse(error_code=code),
        weigh=weights.of_change(request.group_id),
    )
