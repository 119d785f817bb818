"""A group's committed offsets: which commits are tried again, which are final, and where partitions begin."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, cast
from uuid import UUID

import pytest

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.cluster.metadata import Cluster
from anabranch.client.consumer.commits import Commits, Processed
from anabranch.client.consumer.group_context import AGAIN, EPOCH_STALE, OUT_OF_GROUP, GroupContext, is_final
from anabranch.client.consumer.member_driver import MemberDriver
from anabranch.client.consumer.offsets import MemberIdentity, OffsetAndMetadata
from anabranch.client.consumer.positions import Positions
from anabranch.client.settings import ConsumerSettings
from anabranch.machines.clients.fetching import Fetcher, FetcherSettings, TopicView
from anabranch.machines.clients.membership.steps import Subscription
from anabranch.machines.lineage import Lineage
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock
from tests.support.hosts import InOrder

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
VIEW = TopicView("t", UUID(int=1), Lineage.of_ends(1, (1, 2), ({0: 4},)), {0: 1, 1: 1}, {0: 0, 1: 0}, True)
Result = Mapping[TopicPartition, Any] | Exception


class SteppingClock(Clock):
    """Every look at it takes a tenth of a second."""

    def __init__(self) -> None:
        self.ms = 0

    def monotonic_ms(self) -> int:
        self.ms += 100
        return self.ms


class Coordinator:
    """Answers what it was told to answer, and remembers what it was asked."""

    def __init__(self, results: Iterable[Result]) -> None:
        self.results = list(results)
        self.asked: list[dict[TopicPartition, int]] = []
        self.ranges: list[dict[TopicPartition, Any]] = []
        self.takes_ranges: bool | None = None
        self.stable: dict[TopicPartition, int] = {}
        self.before: Callable[[], None] = lambda: None
        """What happens before it answers."""

    def _next(self) -> Any:
        self.before()
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result() if callable(result) else result

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], ids: Mapping[str, UUID], member: MemberIdentity
    ) -> Any:
        self.asked.append({tp: at.offset for tp, at in offsets.items()})
        self.ranges.append({tp: at.ranges for tp, at in offsets.items() if at.ranges})
        return self._next()

    async def fetch(
        self, partitions: Iterable[TopicPartition], ids: Mapping[str, UUID], member: MemberIdentity, *, stable: bool
    ) -> Any:
        self.asked.append(dict.fromkeys(partitions, -1))
        return self._next()


class Host(InOrder):
    """A consumer that has handed records out."""

    def __init__(self) -> None:
        self.positions = {P0: 5, P1: 7}

    def happened(self) -> None:
        """Nothing waits."""

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        """Nothing is held."""

    def consumed(self) -> Mapping[TopicPartition, int]:
        return self.positions


class Topics:
    async def view(self, topic: str) -> TopicView:
        return VIEW


class World:
    def __init__(self, *results: Result, **settings: Any) -> None:
        self.coordinator = Coordinator(results)
        self.fetcher = Fetcher(FetcherSettings())
        chosen = ConsumerSettings(group_id="g", retry_backoff_ms=0, **settings)
        topics = cast(Cluster, Topics())
        self.clock = SteppingClock()
        self.context = GroupContext(chosen, topics, self.fetcher, Host(), self.clock, Chance(1))
        self.context.offsets = cast(Any, self.coordinator)
        self.commits = Commits(self.context)
        self.driver = MemberDriver(self.context)
        self.positions = Positions(self.context, self.driver, self.commits.ended)


def member(*results: Result) -> World:
    """A world whose consumer is a member of its group."""
    world = World(*results)
    world.context.subscription = Subscription(frozenset({"t"}))
    world.context.member._epoch = 7  # type: ignore[union-attr]
    return world


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def codes(p0: ErrorCode, p1: ErrorCode = ErrorCode.NONE) -> dict[TopicPartition, ErrorCode]:
    return {P0: p0, P1: p1}


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_error_is_either_final_or_tried_again(code: ErrorCode) -> None:
    error = ApiError(code, "refused")
    again = code.retriable or code in EPOCH_STALE | OUT_OF_GROUP | AGAIN
    assert is_final(error) == (not again)
    assert not is_final(ConnectionError())


def test_a_commit_is_tried_again_for_the_partitions_that_are_left() -> None:
    async def scenario() -> None:
        world = World(codes(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS), ConnectionError(), {P0: ErrorCode.NONE})
        await world.commits.commit(None)
        assert world.coordinator.asked == [{P0: 5, P1: 7}, {P0: 5}, {P0: 5}]
        assert world.context.committed == {P0: 5, P1: 7}

    run(scenario)


@pytest.mark.parametrize("code", sorted(OUT_OF_GROUP | EPOCH_STALE))
def test_a_commit_of_no_member_any_more_is_refused_with_what_to_do(code: ErrorCode) -> None:
    async def scenario() -> None:
        with pytest.raises(ApiError, match=r"no member of group 'g' any more.*Poll more often") as refused:
            await World(codes(code)).commits.commit(None)
        assert refused.value.code is code

    run(scenario)


def test_what_was_processed_before_a_partition_was_dropped_is_not_committed_afterwards(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Others may be further since: also where this member holds it again, with an epoch that is accepted."""

    async def scenario() -> None:
        for result in (codes(ErrorCode.STALE_MEMBER_EPOCH), ConnectionError()):
            for offsets in (None, {P0: OffsetAndMetadata(5), P1: OffsetAndMetadata(7)}):
                world = member(result, codes(ErrorCode.NONE))
                world.coordinator.before = lambda world=world: world.context.note_drop([P0], [P0])  # type: ignore[misc]
                with pytest.raises(ApiError, match=r"t-0 were not committed: this member of group 'g' gave up") as late:
                    await world.commits.commit(offsets)
                assert late.value.code is ErrorCode.STALE_MEMBER_EPOCH
                assert len(world.coordinator.asked) == 1
        waiting = member(codes(ErrorCode.NONE))
        processed = waiting.commits.processed()
        waiting.context.note_drop([P1], [P1])
        await waiting.commits.commit_processed(processed, 1_000)  # Its turn came late.
        assert waiting.coordinator.asked == [] and "positions were not committed" in caplog.text
        await waiting.commits.commit(None)  # What it has processed since counts.
        assert waiting.coordinator.asked == [{P0: 5, P1: 7}]

    run(scenario)


def test_kept_state_learns_that_what_it_is_to_commit_was_dropped_meanwhile() -> None:
    """Its changes are gone, and the coordinator would take the offsets: it has not heard yet of the revocation."""

    class State:
        committed = False

        async def commit(self, offsets: Any, group: Any, check_held: Callable[[], None]) -> None:
            check_held()
            world.context.note_drop([P0], [])
            check_held()
            self.committed = True

    world = member()

    async def scenario() -> None:
        state = State()
        world.context.host.state = cast(Any, state)
        with pytest.raises(ApiError, match=r"t-0 were not committed: this member of group 'g' gave up"):
            await world.commits.commit(None)
        assert not state.committed
        assert world.context.member.is_member

    run(scenario)


def test_a_commit_is_tried_again_under_a_new_epoch_where_nothing_was_dropped() -> None:
    async def scenario() -> None:
        world = member(codes(ErrorCode.STALE_MEMBER_EPOCH), {P0: ErrorCode.NONE})
        world.context.note_drop([P0], [P0])
        await world.commits.commit(None)
        assert world.coordinator.asked == [{P0: 5, P1: 7}, {P0: 5}]

    run(scenario)


def test_a_final_refusal_is_raised_at_once() -> None:
    async def scenario() -> None:
        with pytest.raises(ApiError, match="the offset of t-0 could not be committed"):
            await World(codes(ErrorCode.OFFSET_METADATA_TOO_LARGE)).commits.commit(None)

    run(scenario)


@pytest.mark.parametrize(
    ("code", "seconds"), [(ErrorCode.COORDINATOR_NOT_AVAILABLE, 5), (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, 2)]
)
def test_a_commit_is_tried_until_its_deadline_and_for_a_topic_that_is_gone_less_long(
    code: ErrorCode, seconds: int
) -> None:
    async def scenario() -> None:
        world = World(*({P0: code} for _ in range(100)))
        with pytest.raises(ApiError, match="could not be committed"):
            await world.commits.commit({P0: OffsetAndMetadata(1)}, timeout_ms=5_000)
        assert (seconds - 1) * 1_000 < world.context.now_ms() < (seconds + 1) * 1_000

    run(scenario)


def test_automatic_commits_write_what_changed_when_it_is_time(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(codes(ErrorCode.NONE), {P0: ErrorCode.NONE}, codes(ErrorCode.INVALID_GROUP_ID))
        host = cast(Host, world.context.host)
        await world.commits.commit_processed(Processed(host.positions, {}), 1_000)
        await world.commits.commit_processed(Processed(host.positions, {}), 1_000)
        host.positions = {P0: 6, P1: 7}
        await world.commits.commit_processed(Processed(host.positions, {}), 1_000)
        assert world.coordinator.asked == [{P0: 5, P1: 7}, {P0: 6}]
        with caplog.at_level(logging.WARNING):
            await world.commits.commit_processed(Processed({P0: 8}, {}), 1_000)
        assert "group 'g': positions were not committed" in caplog.text

    run(scenario)


def test_an_automatic_commit_is_due_by_its_interval_and_at_the_end_of_a_layout() -> None:
    async def scenario() -> None:
        world = World(codes(ErrorCode.NONE), auto_commit_interval_ms=60_000)
        assert world.commits.is_due()
        world.commits.begin(world.commits.processed())
        due_ms = world.commits.due_ms
        assert "commit" in world.context.jobs and due_ms > 60_000 and not world.commits.may_begin()
        await world.context.jobs["commit"]
        await asyncio.sleep(0)
        assert not world.commits.is_due() and world.commits.may_begin(), "not yet"
        world.fetcher._state.milestone = True
        assert world.commits.is_due()
        await world.context.close()

    run(scenario)


async def begun(world: World) -> None:
    """Begin an automatic commit, and wait for its end."""
    world.commits.begin(world.commits.processed())
    await world.context.jobs["commit"]
    await asyncio.sleep(0)


def test_after_a_failed_commit_what_gates_wait_for_is_committed_soon_and_not_at_once() -> None:
    async def scenario() -> None:
        failures = [codes(ErrorCode.INVALID_GROUP_ID)] * 2
        world = World(*failures, codes(ErrorCode.NONE), auto_commit_interval_ms=600_000, retry_backoff_max_ms=5_000)
        clock = world.clock
        await begun(world)
        assert not world.commits.is_due()
        assert clock.ms < (world.commits.next_ms() or 0) <= clock.ms + 5_000
        clock.ms += 5_000
        assert world.commits.may_begin() and not world.commits.is_due(), "nothing waits for it"
        world.fetcher._state.milestone = True
        assert world.commits.is_due()
        await begun(world)
        assert not world.commits.is_due(), "nor at once"
        clock.ms += 5_000
        assert world.commits.is_due(), "still what gates wait for"
        await begun(world)
        assert len(world.coordinator.asked) == 3 and not world.commits.is_due()
        assert world.commits.next_ms() == world.commits.due_ms > 600_000
        await world.context.close()

    run(scenario)


def test_what_is_left_of_a_commit_that_was_given_up_is_committed_at_once_if_gates_wait_for_it() -> None:
    async def scenario() -> None:
        for is_awaited in (True, False):
            world = World(codes(ErrorCode.NONE), auto_commit_interval_ms=600_000)
            processed = world.commits.processed()
            world.context.note_drop([P1], [P1])
            world.fetcher._state.milestone = is_awaited
            assert world.commits.is_due()
            world.commits.begin(processed)
            await world.context.jobs["commit"]
            await asyncio.sleep(0)
            assert world.coordinator.asked == []
            assert world.commits.may_begin() and world.commits.is_due() == is_awaited
            await world.context.close()

    run(scenario)


def test_committed_offsets_are_none_where_nothing_is_committed_and_never_because_they_cannot_be_read() -> None:
    async def scenario() -> None:
        unreadable = {P0: ErrorCode.UNSTABLE_OFFSET_COMMIT, P1: OffsetAndMetadata(3)}
        world = World(unreadable, ConnectionError(), {P0: OffsetAndMetadata(-1), P1: OffsetAndMetadata(3)})
        assert await world.commits.committed([P0, P1]) == {P0: None, P1: OffsetAndMetadata(3)}
        with pytest.raises(ApiError, match="the committed offset of t-0 cannot be read"):
            await World({P0: ErrorCode.GROUP_AUTHORIZATION_FAILED}).commits.committed([P0])

    run(scenario)


def granted(*results: Result, **settings: Any) -> World:
    world = World(*results, **settings)
    world.fetcher.grant([(P0, None), (P1, None)])
    world.fetcher.topic_known(VIEW, 0)
    return world


def starts(world: World) -> dict[int, int]:
    """The timestamps at which partitions without a committed offset begin."""
    (lookup,) = world.fetcher.drain(0).lookups
    return {tp.partition: timestamp for tp, (timestamp, _) in lookup.partitions.items()}


NOTHING = {P0: OffsetAndMetadata(-1), P1: OffsetAndMetadata(-1)}


def test_a_granted_partition_begins_at_its_committed_offset_once_that_can_be_read() -> None:
    async def scenario() -> None:
        world = granted({P0: ErrorCode.UNSTABLE_OFFSET_COMMIT, P1: OffsetAndMetadata(9)}, {P0: OffsetAndMetadata(4)})
        await world.positions.find()
        assert world.fetcher.positions() == {P0: 4, P1: 9}

    run(scenario)


def test_where_state_is_kept_a_position_is_read_after_the_commit_that_runs() -> None:
    """Read before, it would be followed by records whose changes that commit has counted."""

    class State:
        committing, committed = asyncio.Event(), asyncio.Event()

        async def commit(self, offsets: Any, group: Any, check_held: Callable[[], None]) -> None:
            self.committing.set()
            await self.committed.wait()

    async def scenario() -> None:
        world, state = World({P0: OffsetAndMetadata(5)}), State()
        world.context.host.state = cast(Any, state)
        world.fetcher.assign([P0], awaiting=True)
        world.fetcher.topic_known(VIEW, 0)
        commit = asyncio.create_task(world.commits.commit({P0: OffsetAndMetadata(5)}))
        await state.committing.wait()
        finding = asyncio.create_task(world.positions.find())
        await asyncio.sleep(0.01)
        assert not world.coordinator.asked, "the answer might be of before the commit"
        state.committed.set()
        await asyncio.gather(commit, finding)
        assert world.fetcher.positions() == {P0: 5}

    run(scenario)


def test_offsets_read_before_the_member_had_another_epoch_are_dropped() -> None:
    """A partition that was lost and assigned again between was read by another member: its offset has moved."""

    async def scenario() -> None:
        epochs = [7]

        def late() -> Result:
            epochs.append(10)
            return {P0: OffsetAndMetadata(4), P1: OffsetAndMetadata(9)}

        for results in (
            [late, {P0: OffsetAndMetadata(6), P1: OffsetAndMetadata(11)}],
            [NOTHING, late, {P0: OffsetAndMetadata(6), P1: OffsetAndMetadata(11)}],
        ):
            epochs[:] = [7]
            world = granted(*cast(list[Result], results))
            world.context.identity = lambda: MemberIdentity("m", epochs[-1])  # type: ignore[method-assign]
            await world.positions.find()
            assert world.fetcher.positions() == {P0: 6, P1: 11}

    run(scenario)


@pytest.mark.parametrize("moves", ["epoch", "grant"])
def test_a_reset_that_waited_for_metadata_is_dropped_when_the_partition_was_given_away_meanwhile(moves: str) -> None:
    """Another member has read it and committed: what is committed now is asked for again."""

    async def scenario() -> None:
        world = granted(NOTHING, {P0: OffsetAndMetadata(4), P1: OffsetAndMetadata(9)})
        world.context.subscription = Subscription(frozenset({"t"}))
        epochs = [7]
        world.context.identity = lambda: MemberIdentity("m", epochs[-1])  # type: ignore[method-assign]

        async def slowly(topic: str) -> TopicView:
            if moves == "epoch":
                epochs.append(8)
            world.fetcher.withdraw([P0, P1])
            world.fetcher.grant([(P0, None), (P1, None)])
            world.fetcher.topic_known(VIEW, 0)
            return VIEW

        world.context.cluster.view = slowly  # type: ignore[method-assign]
        await world.positions.find()
        assert world.fetcher.positions() == {P0: 4, P1: 9}

    run(scenario)


def test_without_a_committed_offset_the_reset_decides() -> None:
    async def scenario() -> None:
        early = granted(NOTHING, auto_offset_reset="earliest")
        await early.positions.find()
        assert starts(early) == {0: -2, 1: -2}
        late = granted(NOTHING, NOTHING)
        await late.positions.find()
        assert starts(late) == {0: -1, 1: -1}
        none = granted(NOTHING, auto_offset_reset="none")
        await none.positions.find()
        assert isinstance(none.context.error, ApiError)
        assert "committed no offset of t-0, t-1, and auto.offset.reset is 'none'" in str(none.context.error)

    run(scenario)


def test_a_partition_that_appeared_after_the_group_began_is_read_from_its_beginning() -> None:
    async def scenario() -> None:
        found = {P0: OffsetAndMetadata(4), P1: OffsetAndMetadata(-1)}
        world = granted(found, found)
        await world.positions.find()
        assert world.fetcher.positions() == {P0: 4} and starts(world) == {1: -2}

    run(scenario)


def test_where_the_coordinator_writes_down_where_groups_begin_the_reset_holds_for_what_it_did_not_write() -> None:
    async def scenario() -> None:
        world = granted({P0: OffsetAndMetadata(4), P1: OffsetAndMetadata(-1)})
        world.context.subscription = Subscription(frozenset({"t"}))
        await world.positions.find()
        assert starts(world) == {1: -1}, "resized before the group existed"
        world = granted({P0: OffsetAndMetadata(4), P1: OffsetAndMetadata(-1)})
        world.context.subscription = Subscription(frozenset({"t"}))
        world.driver.first_seen = {"t": frozenset({0})}
        await world.positions.find()
        assert starts(world) == {1: -2}, "this member has seen it appear"

    run(scenario)


def test_an_error_that_no_repetition_helps_is_for_the_next_poll() -> None:
    async def scenario() -> None:
        world = granted(ApiError(ErrorCode.GROUP_AUTHORIZATION_FAILED, "not yours"))
        await world.positions.find()
        assert isinstance(world.context.error, AnabranchError) and world.fetcher.awaiting() == (P0, P1)

    run(scenario)


def test_results_of_partitions_that_were_not_committed_are_ignored() -> None:
    async def scenario() -> None:
        world = World({P0: ErrorCode.NONE, P1: ErrorCode.NONE})
        await world.commits.commit({P0: OffsetAndMetadata(4)})
        assert world.context.committed == {P0: 4}

    run(scenario)


def test_a_commit_without_a_result_for_its_partition_is_tried_again_and_named_at_the_deadline() -> None:
    async def scenario() -> None:
        world = World({}, {P0: ErrorCode.NONE})
        await world.commits.commit({P0: OffsetAndMetadata(4)})
        assert len(world.coordinator.asked) == 2
        silent = World(*({} for _ in range(100)))
        with pytest.raises(ApiError, match="no result for t-0"):
            await silent.commits.commit({P0: OffsetAndMetadata(4)}, timeout_ms=1_000)

    run(scenario)
