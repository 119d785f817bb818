"""When a fetch that claims slices looks again, and what it answers where it has to wait for turns."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.protocol.messages.fetch import Claim, FetchedSlice, FetchPartition, FetchRequest, FetchTopic
from anabranch.runtime import turns
from anabranch.runtime.clock import Clock
from anabranch.server.coordinators.turns import Turns
from anabranch.server.handlers import claims
from anabranch.server.partitions.slice_waits import SliceWaits

LONG_S = 3_600.0


class Watched:
    """A partition that tells of no change."""

    topic_id = UUID(int=1)
    leadership = object()
    offline_reason = None
    settings = SimpleNamespace(accepts_range_fetch=True)
    last_stable_offset = 5

    def __init__(self, number: int = 0) -> None:
        self.name = TopicPartition("t", number)
        self.log = SimpleNamespace(high_watermark=5, log_start=0, end=5)

    def watch(self, watcher: object) -> None:
        pass

    def unwatch(self, watcher: object) -> None:
        pass


def fetching(topics: list[FetchTopic]) -> FetchRequest:
    return FetchRequest(
        max_wait_ms=int(LONG_S * 1000),
        min_bytes=1,
        max_bytes=1 << 24,
        session_id=0,
        session_epoch=-1,
        topics=topics,
        forgotten_topics_data=[],
        group_id="g",
        member_id="m",
        generation_id_or_member_epoch=1,
    )


def test_a_fetch_looks_again_at_once_if_records_came_during_its_look_while_nobody_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition = Watched()
    looks: list[int] = []

    async def make(attempt: Any, waited_for: Iterable[Any]) -> None:
        looks.append(partition.log.high_watermark)
        attempt.looked_at[partition] = partition.log.high_watermark
        attempt.urgent = len(looks) == 2
        if len(looks) == 1:
            partition.log.high_watermark = 6

    monkeypatch.setattr(claims._Attempt, "make", make)
    monkeypatch.setattr(claims, "RECHECK_S", LONG_S)
    broker = cast(
        Any,
        SimpleNamespace(
            slices=SimpleNamespace(waits=SliceWaits()), fetches=SimpleNamespace(stopping=False, waiting=set())
        ),
    )
    asyncio.run(asyncio.wait_for(claims._handle_claims(broker, fetching([])), 10))
    assert looks == [5, 6]


class Leader:
    """A broker of a topic with many partitions, whose coordinator decides apart, one decision behind the other.

    Only of the partitions in `full` is there anything to claim.
    """

    def __init__(self, full: Iterable[int]) -> None:
        self.turns = Turns("a shard", Clock())
        self.full = set(full)
        self.first, self.decided = asyncio.Event(), asyncio.Event()
        """The ends of the decision that the fetch comes behind, and of the next one."""
        self.waits = SliceWaits()
        self.passed_on: list[Any] = []
        self.partitions = [Watched(number) for number in range(claims.CLAIMS_MAX)]
        self.waits.pass_on = lambda group_id, partitions: self.passed_on.extend(partitions)  # type: ignore[method-assign]

    def of(self, group_id: str, partition: Any) -> Any:
        """A book with a slice, or without."""
        number = partition.name.partition
        found = SimpleNamespace(start=0, end=4, sequence=0) if number in self.full else None
        return SimpleNamespace(
            claim=lambda *asked: found,
            work=0,
            is_behind=False,
            may_have_open=lambda limit: False,
            cancel=lambda found: None,
        )

    async def fetch(self, count: int, waited_for: Iterable[int] = ()) -> list[bool]:
        """Claim of so many partitions; of which of them there is a slice in the answer."""
        slices = SimpleNamespace(waits=self.waits, of=self.of, now_ms=0)
        memberships = SimpleNamespace(
            undisturbed=lambda group_id: self.turns.between(),
            check_member=lambda *given: None,
            committed=lambda *given: SimpleNamespace(is_known=True, stable=0),
            live=lambda group_id: bool,
        )
        fetches = SimpleNamespace(locate=lambda target: self.partitions[target.partition], size_max=1 << 20)
        broker = cast(Any, SimpleNamespace(slices=slices, memberships=memberships, fetches=fetches))
        claim = Claim(session=1, sequence=0, records_max=5)
        parts = [
            FetchPartition(partition=it, fetch_offset=0, partition_max_bytes=1_000, claim=claim) for it in range(count)
        ]
        attempt = claims._Attempt(broker, fetching([FetchTopic(topic="t", partitions=parts)]), 0.0)
        self.turns.take(self.first.wait)
        made = asyncio.ensure_future(attempt.make([self.partitions[it] for it in waited_for]))
        await asyncio.sleep(0.01)
        self.turns.take(self.decided.wait)
        self.first.set()
        await asyncio.wait_for(made, 5)
        return [it.slice is not None for it in attempt.response().responses[0].partitions]


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(attempt: Any, claimed: dict[tuple[int, int], Any]) -> None:
        for at, each in list(claimed.items()):
            attempt._answers[at] = answer = attempt._nothing(each.partition)
            answer.slice = FetchedSlice(start=each.found.start, end=each.found.end, sequence=0)
            del claimed[at]

    monkeypatch.setattr(claims._Attempt, "_read", read)
    monkeypatch.setattr(claims, "refuse_read", lambda *given: ErrorCode.NONE)


@pytest.mark.usefixtures("nothing_is_read")
def test_the_claims_of_a_fetch_have_one_turn_together() -> None:
    """With a turn for each, a fetch of 16 partitions waited for 16 decisions of 2 s: its client gave up, for ever."""

    async def story() -> None:
        assert await Leader(range(40)).fetch(40) == [True] * 40

    asyncio.run(story())


@pytest.mark.usefixtures("nothing_is_read")
def test_a_fetch_whose_time_is_over_answers_with_what_it_has_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "CLAIMING_S", 0.0)
    monkeypatch.setattr(turns, "TURN_S", 60.0)

    async def story() -> None:
        leader, many = Leader(range(120)), claims.AT_A_TIME
        assert await leader.fetch(120, waited_for=[0, 119]) == [True] * many + [False] * (120 - many)
        assert leader.passed_on == [leader.partitions[119]], "it has not looked there: the next one does"

    asyncio.run(story())


@pytest.mark.usefixtures("nothing_is_read")
def test_a_fetch_that_has_claimed_nothing_looks_at_all_partitions_though_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(claims, "CLAIMING_S", 0.0)

    async def story() -> None:
        leader = Leader([119])
        leader.decided.set()
        assert await leader.fetch(120) == [False] * 119 + [True]

    asyncio.run(story())
