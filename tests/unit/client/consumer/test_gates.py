"""A member's gates on false transports and virtual time: one open question, reports, lost coordinators, listeners."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.commits import Commits
from anabranch.client.consumer.gates import WAIT_MS, Gates
from anabranch.client.consumer.group_context import GroupContext
from anabranch.client.settings import ConsumerSettings
from anabranch.machines.clients.fetching import Fetcher, FetcherSettings, TopicView
from anabranch.machines.clients.fetching.values import Fetched
from anabranch.machines.clients.membership.steps import Subscription
from anabranch.machines.lineage import Lineage
from anabranch.protocol.messages.consumer_group_position import (
    ConsumerGroupPositionRequest,
    ConsumerGroupPositionResponse,
    ConsumerGroupPositionResponsePartition,
    ConsumerGroupPositionResponseTopic,
)
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from anabranch.runtime.chance import Chance
from tests.simulation.virtual_time import VirtualClock, run, running_loop
from tests.support.hosts import InOrder
from tests.support.scripted_broker import HANG_UP, Late, ScriptedBroker, topic_id

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
PARKED = Late(WAIT_MS / 1000, ConsumerGroupPositionResponse())
POSITION_KEY = 10001


def told(position: int, *, overdue: bool = False) -> ConsumerGroupPositionResponse:
    """Partition 0 is at `position`."""
    part = ConsumerGroupPositionResponsePartition(partition=0, need_position=False, position=position, overdue=overdue)
    return ConsumerGroupPositionResponse(topics=[ConsumerGroupPositionResponseTopic(topic="t", partitions=[part])])


def wanted(number: int) -> ConsumerGroupPositionResponse:
    part = ConsumerGroupPositionResponsePartition(partition=number, need_position=True)
    return ConsumerGroupPositionResponse(topics=[ConsumerGroupPositionResponseTopic(topic="t", partitions=[part])])


class World(InOrder):
    """A member in epoch 5 of a topic that grew from one partition to two when it had ten records."""

    def __init__(self, *begins: TopicPartition, without: Iterable[int] = (), **settings: Any) -> None:
        self.broker = ScriptedBroker({"t": 2}, without=without)
        self.answers: list[Any] = []
        self.broker.on(ConsumerGroupPositionRequest, lambda _: self.answers.pop(0) if self.answers else PARKED)
        self.broker.on(OffsetCommitRequest, _committed)
        self.fetcher = Fetcher(FetcherSettings())
        self.calls: list[tuple[str, tuple[TopicPartition, ...]]] = []
        self.failing: set[str] = set()
        chosen = ConsumerSettings(group_id="g", retry_backoff_ms=100, auto_commit_interval_ms=3_600_000, **settings)
        clock = VirtualClock(running_loop())
        self.context = GroupContext(chosen, self.broker.cluster(), self.fetcher, self, clock, Chance(1))
        self.context.subscription = Subscription(frozenset({"t"}))
        self.context.member._epoch = 5  # type: ignore[attr-defined]
        self.commits = Commits(self.context)
        self.commits.due_ms = 3_600_000
        self.gates = Gates(self.context, self.commits, self._call)
        self.fetcher.announce(enabled=True)
        self.give(*begins)
        self.events = 0

    def give(self, *begins: TopicPartition) -> None:
        """Grant partitions; nothing is committed in them, and each has records to hand out."""
        self.fetcher.grant((tp, None) for tp in begins)
        view = TopicView("t", topic_id("t"), Lineage.of_ends(1, (1, 2), ({0: 10},)), {0: 1, 1: 1}, {0: 0, 1: 0}, True)
        self.fetcher.topic_known(view, 0)
        for tp in begins:
            self.fetcher.begin(tp, offset=0)
            self.context.note_committed(tp, 0)
            self.fetcher._state.partition(tp).held.append(Fetched(memoryview(b"x"), 10))
        self.fetcher.milestone()

    def happened(self) -> None:
        self.events += 1

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        """Nothing is held."""

    def consumed(self) -> Mapping[TopicPartition, int]:
        return self.fetcher.positions()

    async def _call(self, method: str, partitions: tuple[TopicPartition, ...]) -> None:
        name = method.removeprefix("on_partition_key_")
        self.calls.append((name, partitions))
        if name in self.failing:
            self.failing.remove(name)
            raise ValueError(name)

    async def poll(self, seconds: float = 0.5) -> list[int]:
        """Attend as polls do, for some time; return the partitions with deliverable records."""
        until = running_loop().time() + seconds
        while running_loop().time() < until:
            if self.gates.is_due():
                await self.gates.attend()
            await asyncio.sleep(0.01)
        return [part.partition for part in self.fetcher.deliverable()]

    def questions(self) -> list[dict[int, tuple[bool, int]]]:
        return [
            {part.partition: (part.need_position, part.position) for topic in asked.topics for part in topic.partitions}
            for asked in self.broker.requests(ConsumerGroupPositionRequest)
        ]


def _committed(request: OffsetCommitRequest) -> OffsetCommitResponse:
    topics = [
        OffsetCommitResponseTopic(
            name=topic.name,
            topic_id=topic.topic_id,
            partitions=[OffsetCommitResponsePartition(partition_index=p.partition_index) for p in topic.partitions],
        )
        for topic in request.topics
    ]
    return OffsetCommitResponse(topics=topics)


def scenario(made: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(made(), 0)


def test_one_question_is_kept_open_and_its_answer_opens_the_gate_after_an_announcement() -> None:
    async def main() -> None:
        world = World(P1)
        world.answers = [told(4), Late(2, told(10))]
        assert await world.poll(1) == []
        assert world.questions() == [{0: (True, -1)}, {0: (True, 4)}]
        assert await world.poll(3) == [1] and world.calls == [("assigned", (P1,))]
        assert world.questions()[2:] == [{}], "it stays open for what the coordinator wants"
        await world.context.close()

    scenario(main)


def test_a_group_that_is_closed_while_a_question_is_parked_leaves_no_task_behind() -> None:
    """The one that waited for another question was for ever pending."""

    async def main() -> None:
        world = World(P1)
        world.answers = [told(4)]
        assert await world.poll(1) == [] and "positions-asked" in world.context.jobs
        await world.context.close()
        await asyncio.sleep(0.1)
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        assert not [name for name in names if name.startswith("Gates.")]

    scenario(main)


def test_a_wanted_partition_is_flushed_committed_and_reported_while_a_question_is_parked() -> None:
    async def main() -> None:
        world = World(P0)
        world.answers = [Late(1, wanted(0))]
        await world.poll(2)
        assert world.questions() == [{}, {0: (False, 0)}] and world.calls == []
        (part,) = world.fetcher.deliverable()
        world.fetcher.handed_out(part, 10, 10)
        world.fetcher.milestone()
        await world.poll(0.3)
        assert world.calls == [("maybe_revoked", (P0,))]
        (commit,) = world.broker.requests(OffsetCommitRequest)
        assert [part.committed_offset for topic in commit.topics for part in topic.partitions] == [10]
        assert world.questions()[2:] == [{0: (False, 10)}]
        await world.context.close()

    scenario(main)


def test_after_a_lost_connection_everything_is_reported_again() -> None:
    async def main() -> None:
        world = World(P0)
        world.answers = [wanted(0), HANG_UP, PARKED]
        await world.poll(2)
        assert world.questions() == [{}, {0: (False, 0)}, {0: (False, 0)}]
        await world.context.close()

    scenario(main)


def test_a_topic_that_was_revoked_and_granted_again_is_asked_about_although_a_question_is_parked() -> None:
    """The parked question says that the member knows a position, which it lost with the topic: nothing would end it."""

    async def main() -> None:
        world = World(P1)
        world.answers = [told(4)]
        assert await world.poll(1) == [] and world.questions() == [{0: (True, -1)}, {0: (True, 4)}]
        world.fetcher.withdraw([P1])
        world.gates.dropped([P1])
        world.give(P1)
        world.answers = [told(10)]
        assert await world.poll(1) == [1] and world.questions()[2] == {0: (True, -1)}
        await world.context.close()

    scenario(main)


def test_a_question_that_arrived_behind_the_one_sent_after_it_is_not_the_one_kept_open() -> None:
    """Two questions waited for one connection: the second was answered first, and the first asks for nothing."""

    async def main() -> None:
        world = World(P0)
        await world.poll()
        assert world.questions() == [{}]
        world.fetcher.withdraw([P0])
        world.answers = [told(4), PARKED]
        world.give(P1)
        await world.poll()
        assert world.questions() == [{}, {0: (True, -1)}, {0: (True, 4)}]
        await world.context.close()

    scenario(main)


def test_a_coordinator_with_something_to_reconcile_gets_a_heartbeat_at_once_and_is_not_pressed() -> None:
    async def main() -> None:
        world = World(P1)
        refused = ConsumerGroupPositionResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS)
        world.answers = [refused] * 100
        await world.poll(1)
        assert world.context.member._urgent  # type: ignore[attr-defined]
        assert 5 < len(world.questions()) < 15
        await world.context.close()

    scenario(main)


def test_an_answer_without_news_is_not_followed_by_a_storm_of_questions() -> None:
    async def main() -> None:
        world = World(P1)
        world.answers = [told(4)] * 100
        await world.poll(1)
        assert 5 < len(world.questions()) < 15
        await world.context.close()

    scenario(main)


def test_a_gate_that_may_open_by_time_opens() -> None:
    async def main() -> None:
        world = World(P1)
        world.answers = [told(4, overdue=True)]
        assert await world.poll() == [1]
        await world.context.close()

    scenario(main)


def test_a_listener_that_fails_is_called_again_and_nothing_is_committed_or_delivered_meanwhile() -> None:
    async def main() -> None:
        world = World(P0, P1)
        (part,) = (part for part in world.fetcher.deliverable() if part.partition == 0)
        world.fetcher.handed_out(part, 10, 10)
        world.failing = {"maybe_revoked", "assigned"}
        for commits, expected in enumerate(("maybe_revoked", "assigned")):
            with pytest.raises(ValueError, match=expected):
                await world.poll()
            assert world.fetcher.deliverable() == []
            assert len(world.broker.requests(OffsetCommitRequest)) == commits
        assert await world.poll() == [1]
        assert [name for name, _ in world.calls] == ["maybe_revoked", "maybe_revoked", "assigned", "assigned"]
        await world.context.close()

    scenario(main)


def test_a_coordinator_that_does_not_know_the_question_is_asked_for_nothing() -> None:
    async def main() -> None:
        world = World(P1, without=[POSITION_KEY])
        assert await world.poll() == [] and world.questions() == []
        await world.context.close()

    scenario(main)
