"""Describing groups when their shard cannot answer: the answer says so for each group, and no connection is closed."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.groups.classic import ClassicGroupView, ClassicMember
from anabranch.machines.groups.consumer.group import Member
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.views import ConsumerGroupView
from anabranch.protocol.messages.consumer_group_describe import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
)
from anabranch.protocol.messages.consumer_group_describe import (
    DescribedGroup as DescribedConsumerGroup,
)
from anabranch.protocol.messages.delete_groups import DeleteGroupsRequest, DeleteGroupsResponse
from anabranch.protocol.messages.describe_groups import DescribedGroup, DescribeGroupsRequest, DescribeGroupsResponse
from anabranch.server.context import ANONYMOUS, BrokerContext, Large, RequestContext
from anabranch.server.handlers.describe_groups import (
    handle_consumer_group_describe,
    handle_delete_groups,
    handle_describe_groups,
)

CALL = RequestContext(ANONYMOUS, None, "peer:1", 1, 6)


class Groups:
    """Shards of which one is sound, one waits for its disk, and one is still loading."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[Any]] = []

    def shard_of(self, group_id: str) -> Groups:
        if group_id == "loading":
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "still loading")
        return self

    def read(self, read: Callable[[Any, int], Any], weigh: Callable[[Any], int] | None = None) -> Any:
        machine = SimpleNamespace(view_group=lambda group_id, _: ClassicGroupView(DescribedGroup(group_id=group_id)))
        found: ClassicGroupView = read(machine, 0)
        if found.group.group_id != "waits":
            return found
        self.waiting.append(asyncio.get_running_loop().create_future())
        return self.waiting[-1]


def test_a_shard_that_fails_while_its_answer_waits_for_the_disk_is_said_for_its_group() -> None:
    async def story() -> None:
        groups = Groups()
        broker = cast(BrokerContext, SimpleNamespace(groups=groups))
        asked = DescribeGroupsRequest(groups=["sound", "waits", "loading"])
        answer = handle_describe_groups(broker, asked, CALL)
        assert hasattr(answer, "__await__")
        task = asyncio.ensure_future(cast(Awaitable[DescribeGroupsResponse], answer))
        await asyncio.sleep(0)
        groups.waiting[0].set_exception(ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "failed"))
        response = await task
        assert [(it.group_id, it.error_code) for it in response.groups] == [
            ("sound", ErrorCode.NONE),
            ("waits", ErrorCode.COORDINATOR_NOT_AVAILABLE),
            ("loading", ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
        ]

    asyncio.run(story())


class Sized:
    """Groups of the consumer protocol, named after their number of members; each is looked at in a step of the loop."""

    consumer_protocol = True

    def __init__(self) -> None:
        self.looked: list[int] = []
        self.turns = 0

    def shard_of(self, group_id: str) -> Sized:
        return self

    def read(self, read: Callable[[Any, int], Any], weigh: Callable[[Any], int] | None = None) -> Any:
        return read(SimpleNamespace(view_consumer_group=self.view, view_group=self.view_classic), 0)

    def view(self, group_id: str, now_ms: int) -> ConsumerGroupView:
        self.looked.append(self.turns)
        members = [Member(f"{number:06d}") for number in reversed(range(int(group_id)))]
        return ConsumerGroupView(DescribedConsumerGroup(group_id=group_id), members, image=Image())

    def view_classic(self, group_id: str, now_ms: int) -> ClassicGroupView:
        self.looked.append(self.turns)
        members = [ClassicMember(f"{number}", None, "", "", 0, 0, ()) for number in range(int(group_id))]
        return ClassicGroupView(DescribedGroup(group_id=group_id), members)


async def described(
    groups: Sized, group_ids: list[str], *, classic: bool = False
) -> ConsumerGroupDescribeResponse | DescribeGroupsResponse | Large:
    broker = cast(BrokerContext, SimpleNamespace(groups=groups))
    if classic:
        answer = handle_describe_groups(broker, DescribeGroupsRequest(groups=group_ids), CALL)
    else:
        answer = handle_consumer_group_describe(broker, ConsumerGroupDescribeRequest(group_ids=group_ids), CALL)
    if not hasattr(answer, "__await__"):
        return answer
    task = asyncio.ensure_future(answer)
    while not task.done():
        groups.turns += 1
        await asyncio.sleep(0)
    return task.result()


def test_many_members_of_a_classic_group_are_described_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands took more than 10 ms of the event loop."""
    makers: set[str] = set()
    make = ClassicGroupView.described

    def noted(view: ClassicGroupView) -> DescribedGroup:
        makers.add(view.group.group_id)
        return make(view)

    monkeypatch.setattr(ClassicGroupView, "described", noted)
    few = asyncio.run(described(Sized(), ["2", "3"], classic=True))
    assert isinstance(few, DescribeGroupsResponse) and makers == {"2", "3"}
    assert [[it.member_id for it in group.members] for group in few.groups] == [["0", "1"], ["0", "1", "2"]]
    many = asyncio.run(described(Sized(), ["800"], classic=True))
    assert isinstance(many, Large) and "800" not in makers
    assert [it.member_id for it in many.make().groups[0].members] == [f"{number}" for number in range(800)]


def test_many_members_are_described_in_a_thread() -> None:
    few = asyncio.run(described(Sized(), ["2", "3"]))
    assert isinstance(few, ConsumerGroupDescribeResponse)
    assert [[it.member_id for it in group.members] for group in few.groups] == [
        ["000000", "000001"],
        ["000000", "000001", "000002"],
    ]
    many = asyncio.run(described(Sized(), ["800"]))
    assert isinstance(many, Large)
    members = [it.member_id for it in many.make().groups[0].members]
    assert len(members) == 800 and members == sorted(members)


def test_other_work_has_its_turn_between_groups_of_many_members() -> None:
    groups = Sized()
    asyncio.run(described(groups, ["1500"] * 6))
    assert [groups.looked.count(turn) for turn in sorted(set(groups.looked))] == [2, 2, 2]


class Weighed:
    """Groups named after the number of their offsets; each is deleted in a step of the loop, and waits for the disk."""

    def __init__(self) -> None:
        self.deleted: list[int] = []
        self.turns = 0

    def shard_of(self, group_id: str) -> Weighed:
        return self

    def ask(self, decide: Callable[[Any, int], Any], weigh: Callable[[Any], int], look: object = None) -> Any:
        weigh(SimpleNamespace(weight_of_deletion=lambda group_id: int(group_id.partition("-")[0])))
        self.deleted.append(self.turns)
        durable: asyncio.Future[ErrorCode] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.01, durable.set_result, ErrorCode.NONE)
        return durable


@pytest.mark.parametrize(("offsets", "at_a_time"), [(1, 28), (140, 2), (295, 1)])
def test_other_work_has_its_turn_between_groups_that_are_deleted(offsets: int, at_a_time: int) -> None:
    """A hundred groups of 250 offsets took 129 ms of the event loop."""
    groups, names = Weighed(), [f"{offsets}-{number}" for number in range(60)]

    async def story() -> None:
        broker = cast(BrokerContext, SimpleNamespace(groups=groups))
        answer = handle_delete_groups(broker, DeleteGroupsRequest(groups_names=names), CALL)
        task = asyncio.ensure_future(cast(Awaitable[DeleteGroupsResponse], answer))
        while len(groups.deleted) < len(names):
            groups.turns += 1
            await asyncio.sleep(0)
        assert [(it.group_id, it.error_code) for it in (await task).results] == [(it, ErrorCode.NONE) for it in names]
        assert max(map(groups.deleted.count, groups.deleted)) == at_a_time

    asyncio.run(story())


def test_a_client_that_hangs_up_while_groups_are_deleted_leaves_nothing_unawaited() -> None:
    async def story() -> None:
        broker = cast(BrokerContext, SimpleNamespace(groups=Weighed()))
        request = DeleteGroupsRequest(groups_names=[f"295-{number}" for number in range(60)])
        task = asyncio.ensure_future(cast(Awaitable[DeleteGroupsResponse], handle_delete_groups(broker, request, CALL)))
        for _ in range(5):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        asyncio.run(story())
        gc.collect()
