"""Commits of work that is finished out of order: a stable offset for every coordinator, ranges where it knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, cast
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.cluster.metadata import Cluster
from anabranch.client.consumer.commits import Commits, Processed, _parts
from anabranch.client.consumer.group_context import GroupContext
from anabranch.client.consumer.offsets import OffsetAndMetadata, ranges_of
from anabranch.client.settings import ConsumerSettings
from anabranch.machines.clients.fetching import Fetcher, FetcherSettings
from anabranch.machines.clients.processing import Ranges
from anabranch.machines.keyspace import SPACE_END
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock
from tests.support.hosts import InOrder

P0, P1 = TopicPartition("t", 0), TopicPartition("u", 1)
Asked = tuple[TopicPartition, int, list[tuple[int, int]]]


class Coordinator:
    """A group's progress, kept as a set of offsets; `knows`: whether it knows ranges."""

    def __init__(self, *, knows: bool = True, refuses: Iterable[str] = ()) -> None:
        self.knows = knows
        self.refuses = set(refuses)
        self.refusals: list[ErrorCode] = []
        """Of the next commits of ranges."""
        self.offsets: dict[TopicPartition, int] = {}
        self.above: dict[TopicPartition, set[int]] = {}
        self.asked: list[Asked] = []
        self.takes_ranges: bool | None = None
        self.stable: dict[TopicPartition, int] = {}

    async def commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], ids: Any, member: Any) -> Any:
        codes: dict[TopicPartition, ErrorCode] = {}
        for tp, at in offsets.items():
            self.asked.append((tp, at.offset, list(at.ranges)))
            codes[tp] = self._commit(tp, at)
            self.stable[tp] = self.offsets.get(tp, -1) if self.knows else -1
            if codes[tp] is ErrorCode.NONE:
                self.takes_ranges = self.knows
        return codes

    def _commit(self, tp: TopicPartition, at: OffsetAndMetadata) -> ErrorCode:
        if not (at.ranges or at.shares) or not self.knows:
            self.offsets[tp] = at.offset
            self.above[tp] = set()  # As for a commit by no member.
            return ErrorCode.NONE
        if self.refusals:
            return self.refusals.pop()
        if tp.topic in self.refuses:
            return ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED
        ((start, end, offset),) = at.shares or [(0, SPACE_END, self.offsets[tp])]
        assert (start, end) == (0, SPACE_END), "this group shares nothing"
        if min(offset, *(first for first, _ in at.ranges), offset) < self.offsets[tp]:
            return ErrorCode.INDIVIDUAL_COMMIT_TOO_OLD
        self.offsets[tp] = offset
        for first, last in at.ranges:
            self.above[tp] |= set(range(first, last + 1))
        while self.offsets[tp] in self.above[tp]:
            self.above[tp].discard(self.offsets[tp])
            self.offsets[tp] += 1
        return ErrorCode.NONE


class Host(InOrder):
    """A consumer with processed records."""

    def __init__(self) -> None:
        self.positions: dict[TopicPartition, int] = {}
        self.ranges: dict[TopicPartition, Ranges] = {}
        self.returned: dict[TopicPartition, Ranges] = {}

    def happened(self) -> None:
        """Nothing waits."""

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        """Nothing is held."""

    def consumed(self) -> Mapping[TopicPartition, int]:
        return self.positions

    def take_fresh(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, Ranges]:
        return {tp: self.ranges.pop(tp) for tp in list(partitions) if tp in self.ranges}

    def give_back(self, ranges: Mapping[TopicPartition, Ranges]) -> None:
        for tp, given in ranges.items():
            self.returned[tp] = [*self.returned.get(tp, ()), *given]


class World:
    def __init__(self, coordinator: Coordinator, **settings: Any) -> None:
        self.coordinator = coordinator
        self.host = Host()
        chosen = ConsumerSettings(group_id="g", retry_backoff_ms=0, **settings)
        self.context = GroupContext(
            chosen, cast(Cluster, None), Fetcher(FetcherSettings()), self.host, Clock(), Chance(1)
        )
        self.context.offsets = cast(Any, coordinator)
        self.commits = Commits(self.context)

    def commit(self, stable: int, *ranges: tuple[int, int], tp: TopicPartition = P0) -> None:
        """Commit automatically: all below `stable` is processed, and these ranges above."""
        self.host.positions[tp] = stable
        if ranges:
            self.host.ranges[tp] = ranges
        asyncio.run(self.commits.commit_processed(self.commits.processed(), 1_000))


def test_a_coordinator_that_knows_ranges_gets_them_from_its_first_answer_on() -> None:
    world = World(Coordinator())
    world.commit(40, (43, 45), (48, 49))
    assert world.coordinator.offsets == {P0: 40}
    assert world.coordinator.above == {P0: {43, 44, 45, 48, 49}}
    assert world.host.returned == {}


def test_the_stable_offset_moves_as_that_of_all_keys_so_that_ranges_above_stay() -> None:
    world = World(Coordinator())
    world.commit(40, (43, 45), (48, 49))
    world.commit(43)
    assert world.coordinator.offsets == {P0: 46}, "through the range that it touches"
    assert world.coordinator.above == {P0: {48, 49}}
    asked = len(world.coordinator.asked)
    world.commit(47)
    assert world.coordinator.asked[asked:] == [(P0, 46, [])]
    assert world.coordinator.above == {P0: {48, 49}} and world.context.committed == {P0: 47}


def test_ranges_wait_for_those_before_them_which_a_commit_before_gave_back() -> None:
    coordinator = Coordinator()
    world = World(coordinator)
    world.commit(40)

    async def two_commits() -> None:
        world.host.ranges[P0] = [(43, 43)]
        first = world.commits.processed()
        world.host.ranges[P0] = [(45, 45)]
        second = world.commits.processed()
        coordinator.refusals = [ErrorCode.INVALID_REQUEST]
        await asyncio.gather(*(world.commits.commit_processed(each, 0) for each in (first, second)))

    asyncio.run(two_commits())
    assert coordinator.above == {P0: set()}, "a record of a key counted before an earlier one"
    assert world.host.returned == {P0: [(43, 43), (45, 45)]}
    world.host.ranges = dict(world.host.returned)
    world.commit(40)
    assert coordinator.above == {P0: {43, 45}}


@pytest.mark.parametrize("settings", [{}, {"allow_individual_commit": False}])
def test_any_other_coordinator_and_a_consumer_that_must_not_get_the_stable_offset(settings: dict[str, Any]) -> None:
    world = World(Coordinator(knows=bool(settings)), **settings)
    world.commit(40, (43, 45))
    world.commit(42, (48, 49))
    assert world.coordinator.offsets == {P0: 42}
    assert all(ranges == [] for _, _, ranges in world.coordinator.asked)
    assert not world.host.returned or world.host.returned == {P0: [(43, 45)]}


def test_a_topic_without_individual_commits_gets_its_stable_offset(caplog: pytest.LogCaptureFixture) -> None:
    world = World(Coordinator(refuses={"t"}))
    world.commit(40)
    world.host.positions[P1] = 7
    world.host.ranges[P1] = [(9, 9)]
    world.commit(41, (43, 45))
    world.commit(42, (48, 49))
    assert world.coordinator.offsets == {P0: 42, P1: 7}
    assert world.coordinator.above == {P0: set(), P1: {9}}
    assert caplog.text.count("without ranges") == 1


def test_a_commit_below_the_stable_offset_is_adjusted_to_it() -> None:
    world = World(Coordinator())
    world.commit(40)
    world.coordinator.offsets[P0] = 50
    world.commit(41, (45, 52), (54, 54))
    assert world.coordinator.offsets == {P0: 53}
    assert world.coordinator.above == {P0: {54}}
    assert world.context.committed == {P0: 53}


def test_what_could_not_be_committed_is_given_back() -> None:
    world = World(Coordinator())
    world.commit(40)
    world.coordinator.refuses = {"t"}
    refused: Any = ApiError(ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED, "too many")

    async def refuse(*_: Any) -> Any:
        raise refused

    cast(Any, world.coordinator).commit = refuse
    world.commit(41, (43, 45))
    assert world.host.returned == {P0: [(43, 45)]}


def test_many_ranges_make_a_commit_due() -> None:
    async def story() -> None:
        world = World(Coordinator(), max_num_ranges_to_commit=5)
        world.commits.due_ms = 1 << 60
        cast(Any, world.host).fresh = 4
        assert not world.commits.is_due()
        cast(Any, world.host).fresh = 5
        assert world.commits.is_due()
        world.coordinator.takes_ranges = False
        assert not world.commits.is_due()

    asyncio.run(story())


def test_ranges_by_hand_go_above_a_committed_offset_and_to_whom_knows_them() -> None:
    world = World(Coordinator())
    with pytest.raises(ApiError, match="before an offset is") as refused:
        asyncio.run(world.commits.commit(None, ranges={P0: [(5, 6)]}))
    assert refused.value.code is ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED
    asyncio.run(world.commits.commit({P0: OffsetAndMetadata(3)}, ranges={P0: [(5, 6)]}))
    assert (world.coordinator.offsets, world.coordinator.above) == ({P0: 3}, {P0: {5, 6}})
    stock = World(Coordinator(knows=False))
    with pytest.raises(ApiError, match="does not take ranges"):
        asyncio.run(stock.commits.commit({P0: OffsetAndMetadata(3)}, ranges={P0: [(5, 6)]}))
    assert stock.coordinator.offsets == {P0: 3}


def test_requests_have_at_most_so_many_ranges() -> None:
    many: dict[TopicPartition, Ranges] = {tp: [(2 * n, 2 * n) for n in range(80_000)] for tp in (P0, P1)}
    parts = list(_parts(many))
    assert [sum(map(len, part.values())) for part in parts] == [60_000, 60_000, 40_000]
    assert {tp: [each for part in parts for each in part.get(tp, ())] for tp in many} == many


@pytest.mark.parametrize("ranges", [[(3, 2)], [(-1, 4)], [(1, 5), (5, 6)]])
def test_ranges_that_cannot_be_are_refused_with_a_sentence(ranges: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match=r"overlap|no range"):
        ranges_of({("t", 0): ranges})
    assert ranges_of({("t", 0): [(7, 9), (1, 2)]}) == {P0: [(1, 2), (7, 9)]}


def make_again(world: World, *, at_commit: int) -> None:
    """Have the topic of P0 created again while that commit is answered."""
    commit, left = world.coordinator.commit, [at_commit]

    async def meanwhile(*given: Any) -> Any:
        found = await commit(*given)
        left[0] -= 1
        if left[0] == 0:
            world.context.note_drop([P0], [P0])
            world.context.committed.pop(P0, None)
            world.context.ranged.discard(P0)
        return found

    cast(Any, world.coordinator).commit = meanwhile


@pytest.mark.parametrize("at_commit", [1, 2, 3])
def test_a_commit_of_ranges_is_given_up_where_the_topic_is_created_again_meanwhile(
    caplog: pytest.LogCaptureFixture, at_commit: int
) -> None:
    world = World(Coordinator())
    world.commit(40, (43, 45))
    make_again(world, at_commit=at_commit)
    world.host.positions[P1] = 7
    world.commit(41, (48, 49))
    assert world.context.committed == {P1: 7}, "what is known of the topic before counted"
    assert ("gave up the partitions" in caplog.text) == (at_commit < 3)
    assert world.host.returned == ({P0: [(48, 49)]} if at_commit < 3 else {})


@pytest.mark.parametrize("count", [1, 80_000])
def test_ranges_by_hand_are_given_up_where_the_topic_is_created_again_meanwhile(count: int) -> None:
    world = World(Coordinator())
    world.context.committed[P0] = 3
    world.coordinator.offsets[P0] = 3
    world.coordinator.above[P0] = set()
    world.coordinator.takes_ranges = True if count > 1 else None
    make_again(world, at_commit=1)
    with pytest.raises(ApiError, match="gave up the partitions"):
        asyncio.run(world.commits.commit(None, ranges={P0: [(5 + 2 * n, 5 + 2 * n) for n in range(count)]}))
    assert world.context.committed == {}


def test_only_what_changed_is_committed() -> None:
    world = World(Coordinator())
    world.commit(40, (43, 45))
    asked = len(world.coordinator.asked)
    world.commit(40)
    assert len(world.coordinator.asked) == asked
    asyncio.run(world.commits.commit_processed(Processed({}, {}), 1_000))
    assert len(world.coordinator.asked) == asked


@pytest.mark.parametrize(("metadata", "is_sent"), [("", False), ("mark", True)])
def test_an_offset_that_others_have_committed_is_said_again_for_its_metadata_alone(
    metadata: str, is_sent: bool
) -> None:
    """To say it again would be to say that this member has come there; what an application notes is not dropped."""
    world = World(Coordinator())
    fetcher = world.context.fetcher
    fetcher.grant([(P0, UUID(int=1))], {})
    world.context.note_committed(P0, 3)
    fetcher.passed(P0, ((0, SPACE_END, 2),))
    fetcher.begin(P0, offset=3)
    asyncio.run(world.commits.commit({P0: OffsetAndMetadata(3, metadata)}))
    assert [offset for _, offset, _ in world.coordinator.asked] == ([3] if is_sent else [])
    asyncio.run(world.commits.commit({P0: OffsetAndMetadata(1)}))
    assert world.coordinator.offsets == {P0: 1}, "a rewind"
