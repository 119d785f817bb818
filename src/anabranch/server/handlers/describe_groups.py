"""Describing, listing and deleting groups.

ConsumerGroupDescribe (69), DescribeGroups (15), ListGroups (16), DeleteGroups (42).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.protocol.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
)
from anabranch.protocol.messages.consumer_group_describe import DescribedGroup as DescribedConsumerGroup
from anabranch.protocol.messages.delete_groups import (
    DeletableGroupResult,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
)
from anabranch.protocol.messages.describe_groups import DescribedGroup, DescribeGroupsRequest, DescribeGroupsResponse
from anabranch.protocol.messages.list_groups import ListGroupsRequest, ListGroupsResponse
from anabranch.server.context import BrokerContext, Large, RequestContext
from anabranch.server.coordinators.shard import ON_LOOP_MAX
from anabranch.server.handlers.authorized import ON_GROUP
from anabranch.server.handlers.groups import NO_CONSUMER_PROTOCOL, awaited, submit
from anabranch.server.handlers.in_parts import gather_in_steps

if TYPE_CHECKING:  # Imported with the first group.
    from anabranch.machines.groups.classic import ClassicGroupView
    from anabranch.machines.groups.coordinator import Coordinator
    from anabranch.machines.groups.views import ConsumerGroupView

View: TypeAlias = "ConsumerGroupView | _Refused[DescribedConsumerGroup]"
ClassicView: TypeAlias = "ClassicGroupView | _Refused[DescribedGroup]"
Result = TypeVar("Result")
Response = TypeVar("Response")
Described = TypeVar("Described", DescribedGroup, DescribedConsumerGroup)
Shown = TypeVar("Shown")
DEAD = "Dead"
GROUP_DELETED = 10
"""The weight of the deletion of a group, beside its offsets (`Shard.ask`)."""
MEMBERS_AT_A_TIME = 2_000
"""Members of groups that are looked at before other work has its turn: a millisecond."""
MEMBERS_ON_LOOP_MAX = 50
"""Of more members an answer is made and encoded in a thread."""
NOT_FOUND_SINCE = 6
"""The version of DescribeGroups with an error for a missing group (KIP-1043)."""


class _Refused(NamedTuple, Generic[Shown]):
    """In place of the view of a group."""

    group: Shown
    members: tuple[()] = ()
    size: int = 0

    def described(self) -> Shown:
        return self.group


def handle_consumer_group_describe(
    broker: BrokerContext, request: ConsumerGroupDescribeRequest, call: RequestContext
) -> ConsumerGroupDescribeResponse | Large | Awaitable[ConsumerGroupDescribeResponse | Large]:
    """Describe groups of the consumer protocol."""

    def refuse(group_id: str, code: ErrorCode, message: str) -> _Refused[DescribedConsumerGroup]:
        return _Refused(DescribedConsumerGroup(error_code=code, error_message=message, group_id=group_id))

    def view(group_id: str) -> View | Awaitable[View]:
        if not broker.groups.consumer_protocol:
            return refuse(group_id, ErrorCode.UNSUPPORTED_VERSION, NO_CONSUMER_PROTOCOL)
        return _read(
            broker,
            group_id,
            lambda groups, now_ms: groups.view_consumer_group(group_id, now_ms),
            lambda code, message: refuse(group_id, code, message),
            lambda groups: groups.weight_of_view(group_id) + groups.weight_of_offsets(group_id),
        )

    def respond(views: list[View]) -> ConsumerGroupDescribeResponse | Large:
        def make() -> ConsumerGroupDescribeResponse:
            groups = [each.described() for each in views]
            return ConsumerGroupDescribeResponse(groups=_authorized(groups, request.include_authorized_operations))

        return _large_or_not(make, sum(each.size for each in views))

    return _look_in_steps(request.group_ids, view, _members, respond)


def handle_describe_groups(
    broker: BrokerContext, request: DescribeGroupsRequest, call: RequestContext
) -> DescribeGroupsResponse | Large | Awaitable[DescribeGroupsResponse | Large]:
    """Describe groups of the classic protocol; early versions describe an unknown group as dead."""

    def view_one(groups: Any, group_id: str, now_ms: int) -> ClassicView:
        found: ClassicView = groups.view_group(group_id, now_ms)
        if call.api_version < NOT_FOUND_SINCE and found.group.error_code == ErrorCode.GROUP_ID_NOT_FOUND:
            return _Refused(DescribedGroup(group_id=group_id, group_state=DEAD))
        return found

    def view(group_id: str) -> ClassicView | Awaitable[ClassicView]:
        return _read(
            broker,
            group_id,
            lambda groups, now_ms: view_one(groups, group_id, now_ms),
            lambda code, message: _Refused(
                DescribedGroup(error_code=code, error_message=message, group_id=group_id, group_state=DEAD)
            ),
            lambda groups: groups.weight_of_view(group_id) + groups.weight_of_offsets(group_id),
        )

    def respond(views: list[ClassicView]) -> DescribeGroupsResponse | Large:
        def make() -> DescribeGroupsResponse:
            groups = [each.described() for each in views]
            return DescribeGroupsResponse(groups=_authorized(groups, request.include_authorized_operations))

        return _large_or_not(make, sum(len(each.members) for each in views))

    return _look_in_steps(request.groups, view, _members, respond)


async def handle_list_groups(
    broker: BrokerContext, request: ListGroupsRequest, call: RequestContext
) -> ListGroupsResponse | Large:
    """List the groups of all shards that pass the filters."""
    states = {state.lower() for state in request.states_filter}
    types = {kind.lower() for kind in request.types_filter}
    try:
        found = [group async for part in broker.groups.listed() for group in await gather_in_steps(part)]
    except ApiError as error:
        return ListGroupsResponse(error_code=error.code)
    passed = (
        group
        for group in found
        if (not states or group.group_state.lower() in states) and (not types or group.group_type.lower() in types)
    )
    return Large(lambda: ListGroupsResponse(groups=list(passed)))


def handle_delete_groups(
    broker: BrokerContext, request: DeleteGroupsRequest, call: RequestContext
) -> DeleteGroupsResponse | Awaitable[DeleteGroupsResponse]:
    """Delete groups that have no members, with all their offsets."""
    weight = 0

    def delete(group_id: str) -> ErrorCode | Awaitable[ErrorCode]:
        nonlocal weight
        weight = 0

        def weigh(groups: Coordinator) -> int:
            nonlocal weight
            weight = groups.weight_of_deletion(group_id)
            return weight

        return submit(
            broker,
            group_id,
            lambda groups, now_ms: groups.delete_group(group_id, now_ms),
            lambda code, message: code,
            weigh=weigh,
        )

    names = list(dict.fromkeys(request.groups_names))
    return _look_in_steps(
        names,
        delete,
        lambda _: GROUP_DELETED + weight,
        lambda codes: DeleteGroupsResponse(
            results=[
                DeletableGroupResult(group_id=name, error_code=code) for name, code in zip(names, codes, strict=True)
            ]
        ),
        at_a_time=ON_LOOP_MAX,
    )


def _large_or_not(make: Callable[[], Response], members: int) -> Response | Large:
    return make() if members < MEMBERS_ON_LOOP_MAX else Large(make)


def _look_in_steps(
    group_ids: Iterable[str],
    look: Callable[[str], Result | Awaitable[Result]],
    size: Callable[[Result | Awaitable[Result]], int],
    make: Callable[[list[Result]], Response],
    at_a_time: int = MEMBERS_AT_A_TIME,
) -> Response | Awaitable[Response]:
    """Make the response of what is seen of groups; other work has its turn in between where that is of much `size`."""
    found: list[Result | Awaitable[Result]] = []
    left = deque(group_ids)

    def look_at_some() -> None:
        looked = 0
        while left and looked < at_a_time:
            seen = look(left.popleft())
            looked += size(seen)
            found.append(seen)

    async def go_on() -> Response:
        try:
            while left:
                await asyncio.sleep(0)
                look_at_some()
        except asyncio.CancelledError:
            for seen in found:  # Nobody will wait for them.
                if isinstance(seen, Coroutine):
                    seen.close()
            raise
        answer = _gathered(found, make)
        return await answer if hasattr(answer, "__await__") else answer

    look_at_some()
    return go_on() if left else _gathered(found, make)


def _members(found: Any) -> int:
    return 1 if hasattr(found, "__await__") else len(found.members)


def _authorized(groups: list[Described], asked: bool) -> list[Described]:
    """Add the operations on each group that was found, if they are asked for."""
    for group in groups:
        if asked and group.error_code == ErrorCode.NONE:
            group.authorized_operations = ON_GROUP
    return groups


def _read(
    broker: BrokerContext,
    group_id: str,
    read: Callable[[Any, int], Any],
    refuse: Callable[[ErrorCode, str], Result],
    weigh: Callable[[Any], int] | None = None,
) -> Result | Awaitable[Result]:
    """Read a group's machine, at once or when the state read is durable; `refuse` makes the result of an `ApiError`."""
    try:
        found = broker.groups.shard_of(group_id).read(read, weigh)
    except ApiError as error:
        return refuse(error.code, error.message)
    return awaited(found, refuse) if isinstance(found, asyncio.Future) else found


def _gathered(
    found: Sequence[Result | Awaitable[Result]], make: Callable[[list[Result]], Response]
) -> Response | Awaitable[Response]:
    """Make the response of the results in their order, when the last of them is given."""
    waiting: list[Awaitable[Result]] = [it for it in found if hasattr(it, "__await__")]
    if not waiting:
        return make(list(found))  # type: ignore[arg-type]

    async def gathered() -> Response:
        given = iter(await asyncio.gather(*waiting))
        return make([next(given) if hasattr(it, "__await__") else it for it in found])

    return gathered()
