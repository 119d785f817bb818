"""Commits of slices: in which topic what is done counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client import Consumer
from anabranch.client.cluster.metadata import Cluster, TopicInfo
from anabranch.client.consumer.cooperative import MANY_COMMIT_INTERVAL_MS, SLICES_MANY, CooperativeGroup
from anabranch.client.consumer.driver import FetchingDriver
from anabranch.client.consumer.offsets import MemberIdentity, OffsetAndMetadata
from anabranch.client.settings import ConsumerSettings
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock

P0 = TopicPartition("t", 0)
OLD, NEW = UUID(int=1), UUID(int=2)


class Coordinator:
    """Knows the topic that exists; what it is asked first, it answers when it is told to."""

    def __init__(self) -> None:
        self.exists = OLD
        self.asked: list[UUID] = []
        self.first = asyncio.Event()

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], ids: Mapping[str, UUID], member: MemberIdentity
    ) -> Any:
        self.asked.append(ids["t"])
        if len(self.asked) == 1:
            await self.first.wait()
        return dict.fromkeys(offsets, ErrorCode.NONE if ids["t"] == self.exists else ErrorCode.UNKNOWN_TOPIC_ID)


def topic(topic_id: UUID) -> TopicInfo:
    return cast(TopicInfo, SimpleNamespace(topic_id=topic_id, partitions={}))


def test_automatic_commits_are_due_earlier_where_many_slices_are_in_hand() -> None:
    async def scenario() -> None:
        settings = ConsumerSettings(group_id="g", share="any", auto_commit_interval_ms=60_000)
        driver = FetchingDriver(settings, cast(Cluster, None))
        group = CooperativeGroup(settings, cast(Cluster, None), driver, clock=Clock(), chance=Chance(1))
        group._member = cast(Any, SimpleNamespace(is_member=True))
        due: list[int | None] = []
        for offset in range(SLICES_MANY):
            due.append(group.next_attendance_ms())
            record = SimpleNamespace(key=None, value=b"v", offset=offset, lease=offset)
            session = group.ledger.session(P0)
            assert group.ledger.got(P0, session.number, session.sequence, offset, offset, [cast(Any, record)])
        assert set(due) == {60_000}
        assert group.next_attendance_ms() == MANY_COMMIT_INTERVAL_MS

    asyncio.run(scenario())


def test_what_is_done_of_slices_counts_in_their_topic_alone_where_its_commit_had_to_wait() -> None:
    async def scenario() -> None:
        settings = ConsumerSettings(group_id="g", share="any", retry_backoff_ms=0)
        driver = FetchingDriver(settings, cast(Cluster, None))
        driver.happened = lambda: None  # type: ignore[method-assign]
        group = CooperativeGroup(settings, cast(Cluster, None), driver, clock=Clock(), chance=Chance(1))
        group._member = cast(Any, SimpleNamespace(is_member=True))
        coordinator = Coordinator()
        group._context.offsets = cast(Any, coordinator)
        group.fetches._topics = {"t": topic(OLD)}
        session = group.ledger.session(P0)
        assert group.ledger.got(P0, session.number, session.sequence, 0, 9, [])  # Without records, all is done.
        commits = [asyncio.create_task(group.commit_parts(group.ledger.done(), timeout_ms=-1)) for _ in range(2)]
        await asyncio.sleep(0)
        coordinator.exists = NEW
        assert group.fetches._drop_other_topic("t", topic(NEW)) and len(group.ledger) == 0
        coordinator.first.set()
        for commit in commits:
            with pytest.raises(ApiError) as refused:
                await commit
            assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_ID
        assert coordinator.asked == [OLD, OLD]

    asyncio.run(scenario())


class Refusing:
    """A coordinator of which another member holds some offsets."""

    def __init__(self, held: set[int]) -> None:
        self.held = held
        self.committed: set[int] = set()
        self.requests = 0

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], ids: Mapping[str, UUID], member: MemberIdentity
    ) -> Any:
        self.requests += 1
        said = {it for first, last in offsets[P0].ranges for it in range(first, last + 1)}
        if said & self.held:
            return {P0: ErrorCode.INVALID_RECORD_STATE}
        self.committed |= said
        return {P0: ErrorCode.NONE}


def test_a_few_parts_that_are_refused_among_many_are_found_by_halves_and_dropped_at_once() -> None:
    async def scenario() -> None:
        settings = ConsumerSettings(group_id="g", share="any", retry_backoff_ms=0)
        driver = FetchingDriver(settings, cast(Cluster, None))
        driver.happened = lambda: None  # type: ignore[method-assign]
        group = CooperativeGroup(settings, cast(Cluster, None), driver, clock=Clock(), chance=Chance(1))
        group._member = cast(Any, SimpleNamespace(is_member=True))
        coordinator = Refusing({20, 1_400})
        group._context.offsets = cast(Any, coordinator)
        group.fetches._topics = {"t": topic(OLD)}
        for offset in range(0, 2_000, 2):
            session = group.ledger.session(P0)
            assert group.ledger.got(P0, session.number, session.sequence, offset, offset, [])
        drops, drop = list[int](), group.ledger.refused
        group.ledger.refused = lambda *parts: (drops.append(len(parts)), drop(*parts))[1]  # type: ignore[method-assign]
        refused = await group.commit_parts(group.ledger.done())
        assert sorted(part.start for part in refused) == [20, 1_400]
        assert coordinator.committed == set(range(0, 2_000, 2)) - coordinator.held
        assert coordinator.requests < 50
        assert drops == [2]
        assert len(group.ledger) == 0

    asyncio.run(scenario())


def test_a_consumer_of_slices_names_no_offsets_to_commit() -> None:
    async def scenario() -> None:
        settings = ConsumerSettings(group_id="g", share="any")
        driver = FetchingDriver(settings, cast(Cluster, None))
        group = CooperativeGroup(settings, cast(Cluster, None), driver, clock=Clock(), chance=Chance(1))
        with pytest.raises(ApiError, match="send the ranges"):
            group.to_commit()

    asyncio.run(scenario())


def test_a_consumer_of_whole_partitions_names_no_ranges_of_records() -> None:
    async def scenario() -> None:
        async with Consumer("localhost:1", group_id="g") as consumer:
            with pytest.raises(ApiError, match="this one has offsets_to_commit"):
                consumer.ranges_of([])

    asyncio.run(scenario())
