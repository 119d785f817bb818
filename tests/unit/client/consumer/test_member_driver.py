"""The member machine's driver on false transports and virtual time: lost coordinators, late responses,
closing, errors.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.group_context import GroupContext
from anabranch.client.consumer.member_driver import TOPICS_INTERVAL_MS, MemberDriver
from anabranch.client.settings import ConsumerSettings
from anabranch.machines.clients.fetching import Fetcher, FetcherSettings
from anabranch.machines.clients.membership.steps import Assign, Failed, Lost, Owned, Subscription
from anabranch.machines.clients.membership.strategies import assignment_of
from anabranch.protocol.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse, JoinGroupResponseMember
from anabranch.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse
from anabranch.protocol.messages.metadata import MetadataRequest
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from anabranch.runtime.chance import Chance
from tests.simulation.virtual_time import VirtualClock, run, running_loop
from tests.support.hosts import InOrder
from tests.support.scripted_broker import HANG_UP, SILENT, Late, ScriptedBroker, topic_id

INTERVAL_MS = 1_000
REQUEST_TIMEOUT_MS = 2_000
HEARTBEAT_KEY = 68


class Host(InOrder):
    """Counts the changes that a driver reports."""

    def __init__(self) -> None:
        self.changes = 0

    def happened(self) -> None:
        self.changes += 1

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        """Nothing is held."""

    def consumed(self) -> Mapping[TopicPartition, int]:
        return {}


class World:
    """A driver and its broker, which knows no group but what a test scripts."""

    def __init__(
        self, topics: Mapping[str, int] | None = None, *, without: Iterable[int] = (), **settings: Any
    ) -> None:
        chosen: dict[str, Any] = {
            "group_id": "g",
            "group_protocol": "consumer",
            "request_timeout_ms": REQUEST_TIMEOUT_MS,
            "retry_backoff_ms": 100,
            **settings,
        }
        self.broker = ScriptedBroker({"t": 2} if topics is None else topics, without=without)
        self.broker.on(ConsumerGroupHeartbeatRequest, beaten)
        self.cluster = self.broker.cluster(request_timeout_ms=REQUEST_TIMEOUT_MS)
        self.host = Host()
        clock = VirtualClock(running_loop())
        self.context = GroupContext(
            ConsumerSettings(**chosen), self.cluster, Fetcher(FetcherSettings()), self.host, clock, Chance(1)
        )
        self.driver = MemberDriver(self.context)
        self.member = self.context.member

    def begin(self, subscription: Subscription | None = None) -> None:
        self.context.subscription = subscription or Subscription(frozenset({"t"}))
        self.member.poll_began(0)
        self.context.job("drive", self.driver.drive)

    async def event(self, within_s: float = 60) -> Any:
        """The next event of the machine; it is carried out."""
        deadline = running_loop().time() + within_s
        while (event := self.member.take()) is None:
            assert running_loop().time() < deadline, "no event came"
            await asyncio.sleep(0.01)
        self.member.done(event, self.context.now_ms())
        self.context.changed.set()
        return event

    def beats(self) -> list[ConsumerGroupHeartbeatRequest]:
        return self.broker.requests(ConsumerGroupHeartbeatRequest)

    async def end(self) -> None:
        await self.context.close()
        await self.cluster.close()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, "a closed group leaves no task behind"


def beaten(request: ConsumerGroupHeartbeatRequest, *, assigned: Iterable[int] = (0, 1)) -> Any:
    """A coordinator that gives a new member its partitions, and every other one its epoch."""
    assignment = Assignment(topic_partitions=[TopicPartitions(topic_id=topic_id("t"), partitions=list(assigned))])
    return ConsumerGroupHeartbeatResponse(
        member_id=request.member_id,
        member_epoch=max(1, request.member_epoch) if request.member_epoch >= 0 else request.member_epoch,
        heartbeat_interval_ms=INTERVAL_MS,
        assignment=assignment if request.member_epoch == 0 else None,
    )


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(story(), 1)


BOTH = Assign(frozenset(Owned("t", number, topic_id("t")) for number in (0, 1)))


def test_a_member_joins_learns_its_topics_and_beats_at_the_interval() -> None:
    async def story() -> None:
        world = World()
        world.begin()
        assert await world.event() == BOTH
        await asyncio.sleep(10)
        times = world.broker.times(ConsumerGroupHeartbeatRequest)[2:]
        assert 8 <= len(times) <= 11
        assert all(
            later - sooner == pytest.approx(INTERVAL_MS / 1000, abs=0.02) for sooner, later in itertools.pairwise(times)
        )
        assert [beat.member_epoch for beat in world.beats()] == [0] + [1] * (len(world.beats()) - 1)
        assert len(world.broker.requests(FindCoordinatorRequest)) == 1
        await world.end()

    play(story)


@pytest.mark.parametrize("loss", ["hang up", "silence", "moved"])
def test_a_lost_coordinator_is_found_again_and_told_the_same(loss: str) -> None:
    async def story() -> None:
        world = World()
        failure = {
            "hang up": HANG_UP,
            "silence": SILENT,
            "moved": ConsumerGroupHeartbeatResponse(error_code=ErrorCode.NOT_COORDINATOR),
        }[loss]
        world.broker.script(ConsumerGroupHeartbeatRequest, beaten, beaten, failure, beaten)
        world.begin()
        await world.event()
        await asyncio.sleep(10)
        assert len(world.broker.requests(FindCoordinatorRequest)) == 2
        assert len({beat.member_id for beat in world.beats()}) == 1
        assert world.member.epoch == 1 and world.member.owned == BOTH.partitions
        assert len(world.beats()) > 6
        await world.end()

    play(story)


def test_a_response_that_comes_too_late_changes_nothing() -> None:
    async def story() -> None:
        world = World()
        late = ConsumerGroupHeartbeatResponse(member_epoch=99, heartbeat_interval_ms=INTERVAL_MS)
        world.broker.script(
            ConsumerGroupHeartbeatRequest, beaten, beaten, Late(REQUEST_TIMEOUT_MS / 1000 + 0.5, late), beaten
        )
        world.begin()
        await world.event()
        await asyncio.sleep(10)
        assert world.member.epoch == 1
        await world.end()

    play(story)


def test_a_coordinator_that_cannot_be_found_is_looked_for_until_it_is() -> None:
    async def story() -> None:
        world = World()
        world.broker.reachable = False
        world.begin()
        await asyncio.sleep(5)
        assert not world.member.is_member
        world.broker.reachable = True
        assert await world.event(5) == BOTH
        await world.end()

    play(story)


def test_topics_of_an_assignment_that_are_not_known_yet_are_asked_for_until_they_are() -> None:
    async def story() -> None:
        world = World()
        world.broker.topics.clear()
        metadata = world.broker._metadata
        world.broker.script(MetadataRequest, HANG_UP, metadata)
        world.begin()
        await asyncio.sleep(1)
        assert world.member.is_member and world.member.event() is None
        assert world.member.wanted_ids == {topic_id("t")}
        world.broker.topics["t"] = 2
        assert await world.event(TOPICS_INTERVAL_MS / 1000 * 2) == BOTH
        assert not world.member.wanted_ids
        await world.end()

    play(story)


def test_an_event_is_reported_to_the_consumer_while_it_does_not_poll() -> None:
    async def story() -> None:
        world = World()
        world.begin()
        await asyncio.sleep(1)
        assert world.member.event() == BOTH
        assert world.host.changes > 0
        await world.end()

    play(story)


@pytest.mark.parametrize(
    ("subscription", "without", "version", "text"),
    [
        (None, (HEARTBEAT_KEY,), 1, "set group.protocol to 'classic'"),
        (Subscription(pattern="t.*"), (), 0, "subscribe to topics by their names"),
    ],
)
def test_a_broker_that_cannot_serve_the_member_fails_it_with_what_to_do(
    subscription: Subscription | None, without: tuple[int, ...], version: int, text: str
) -> None:
    async def story() -> None:
        world = World(without=without)
        world.broker.limit(HEARTBEAT_KEY, version)
        world.begin(subscription)
        event = await world.event()
        assert isinstance(event, Failed) and text in str(event.error)
        assert event.error.code is ErrorCode.UNSUPPORTED_VERSION
        await asyncio.sleep(60)
        assert not world.beats(), "it does not try again by itself"
        await world.end()

    play(story)


def test_a_fenced_member_loses_its_partitions_and_joins_again() -> None:
    async def story() -> None:
        world = World()
        fenced = ConsumerGroupHeartbeatResponse(error_code=ErrorCode.FENCED_MEMBER_EPOCH)
        world.broker.script(ConsumerGroupHeartbeatRequest, beaten, beaten, fenced, beaten)
        world.begin()
        assert await world.event() == BOTH
        assert await world.event() == Lost(BOTH.partitions)
        assert await world.event() == BOTH
        await world.end()

    play(story)


@pytest.mark.parametrize("waiting_for", ["connection", "coordinator", "heartbeat", "interval", "topics"])
def test_close_ends_every_wait(waiting_for: str) -> None:
    async def story() -> None:
        world = World()
        if waiting_for == "connection":
            world.broker.reachable = False
        elif waiting_for == "coordinator":
            world.broker.script(FindCoordinatorRequest, SILENT)
        elif waiting_for == "heartbeat":
            world.broker.script(ConsumerGroupHeartbeatRequest, SILENT)
        elif waiting_for == "topics":
            world.broker.topics.clear()
        world.begin()
        await asyncio.sleep(1.3)
        began = running_loop().time()
        await world.end()
        assert running_loop().time() - began < 0.1
        asked = len(world.broker.asked)
        await asyncio.sleep(60)
        assert len(world.broker.asked) == asked, "a closed group sends nothing"

    play(story)


# -- reading from the end ----------------------------------------------------------------------------------------------


def by(*names: str) -> Subscription:
    return Subscription(frozenset(names))


@pytest.mark.parametrize("wider", [by("t", "u"), Subscription(pattern="[tu]")])
def test_a_member_does_not_join_before_it_knows_what_exists_of_what_it_subscribes_to(wider: Subscription) -> None:
    """What it has not recorded counts as appeared later, and was read from its beginning."""

    async def story() -> None:
        world = World({"t": 2, "u": 1}, auto_offset_reset="latest")
        world.broker.reachable = False
        world.begin()
        await asyncio.sleep(1)
        world.context.subscription = wider
        world.driver.resubscribe()
        await asyncio.sleep(5)
        world.broker.reachable = True
        await world.event()
        assert world.driver.first_seen == {"t": {0, 1}, "u": {0}}
        await world.end()

    play(story)


def test_a_member_that_subscribes_again_before_it_has_joined_joins_with_what_it_has_recorded() -> None:
    async def story() -> None:
        world = World({"t": 2, "u": 1}, auto_offset_reset="latest")
        metadata = world.broker._metadata
        world.broker.on(MetadataRequest, lambda request: Late(1, metadata(request)))
        unknown: list[str] = []

        def beat(request: ConsumerGroupHeartbeatRequest) -> Any:
            unknown.extend(set(request.subscribed_topic_names or ()) - (world.driver.first_seen or {}).keys())
            return beaten(request)

        world.broker.on(ConsumerGroupHeartbeatRequest, beat)
        world.begin()
        await asyncio.sleep(0.5)
        world.context.subscription = by("t", "u")
        world.driver.resubscribe()
        await world.event()
        assert not unknown
        assert world.driver.first_seen == {"t": {0, 1}, "u": {0}}
        await world.end()

    play(story)


def test_a_pattern_records_the_topics_that_it_matches_only() -> None:
    """Another topic may grow before it is subscribed to: its new partitions were read from their beginning."""

    async def story() -> None:
        world = World({"t": 2, "u": 1}, auto_offset_reset="latest")
        world.begin(Subscription(pattern="t.*"))
        await world.event()
        assert world.driver.first_seen == {"t": {0, 1}}
        world.broker.topics |= {"u": 3, "t2": 1}
        world.context.subscription = by("t", "u", "t2")
        world.driver.resubscribe()
        await asyncio.sleep(1)
        assert world.driver.first_seen == {"t": {0, 1}, "u": {0, 1, 2}}, "t2 matched the pattern when it was made"
        await world.end()

    play(story)


@pytest.mark.parametrize("protocol", ["consumer", "classic"])
def test_a_member_that_leaves_while_it_looks_for_topics_does_not_join_again(protocol: str) -> None:
    """It joined while it left, and `unsubscribe` waited for its timeout, and left it in the group."""

    async def story() -> None:
        world = World({"t": 2, "u": 1}, auto_offset_reset="latest", group_protocol=protocol)
        world.broker.script(JoinGroupRequest, SILENT)
        world.begin()
        await asyncio.sleep(1)
        metadata = world.broker._metadata
        world.broker.script(MetadataRequest, lambda request: Late(0.5, metadata(request)))
        world.context.subscription = Subscription(pattern="[tu]")
        world.driver.resubscribe()
        await asyncio.sleep(0.1)
        world.driver.leave(stay=None)
        while world.member.take() is not None:
            pass
        await asyncio.sleep(5)
        assert not world.member.is_member and world.member._phase.name in ("LEAVING", "OUT")  # type: ignore[attr-defined]
        assert "record" not in world.context.jobs and "pattern" not in world.context.jobs
        await world.end()

    play(story)


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_a_member_that_unsubscribed_before_it_began_is_not_failed(reset: str) -> None:
    async def story() -> None:
        world = World(auto_offset_reset=reset)
        world.begin()
        world.driver.leave(stay=None)
        world.context.subscription = None
        await asyncio.sleep(1)
        assert world.context.error is None and world.member.has_left
        world.context.subscription = by("t")
        world.driver.begin()
        assert await world.event() == BOTH
        assert world.driver.first_seen == ({"t": {0, 1}} if reset == "latest" else None)
        await world.end()

    play(story)


# -- the classic protocol ----------------------------------------------------------------------------------------------


def test_a_classic_member_subscribes_to_the_topics_that_match_and_to_later_ones() -> None:
    async def story() -> None:
        world = World({"ta": 1, "u": 1, "__t": 1}, group_protocol="classic", metadata_max_age_ms=5_000)
        world.broker.script(JoinGroupRequest, SILENT)
        world.begin(Subscription(pattern="(__)?t.*"))
        await asyncio.sleep(1)
        assert world.member._subscription == Subscription(frozenset({"ta"}))  # type: ignore[attr-defined]
        world.broker.topics["tb"] = 1
        await asyncio.sleep(6)
        assert world.member._subscription == Subscription(frozenset({"ta", "tb"}))  # type: ignore[attr-defined]
        await world.end()

    play(story)


def test_another_pattern_is_matched_at_once() -> None:
    """It was when the metadata was older than `metadata_max_age_ms`, and the same one after names never."""

    async def story() -> None:
        world = World({"ta": 1, "u": 1}, group_protocol="classic")
        world.broker.script(JoinGroupRequest, SILENT)
        world.begin(Subscription(pattern="t.*"))
        await asyncio.sleep(1)
        wanted = [(Subscription(pattern="u"), "u"), (by("ta"), "ta"), (Subscription(pattern="u"), "u")]
        for subscription, name in wanted:
            world.context.subscription = subscription
            world.driver.resubscribe()
            if name != "ta":
                await asyncio.sleep(1)
            assert world.member._subscription == by(name)  # type: ignore[attr-defined]
        await world.end()

    play(story)


def test_a_pattern_without_matches_is_matched_again_soon() -> None:
    async def story() -> None:
        world = World({}, group_protocol="classic")
        world.begin(Subscription(pattern="t.*"))
        await asyncio.sleep(2)
        assert not world.broker.requests(JoinGroupRequest)
        assert len(world.broker.requests(MetadataRequest)) == pytest.approx(2_000 / TOPICS_INTERVAL_MS, abs=3)
        await world.end()

    play(story)


def test_leaving_does_not_wait_behind_a_join() -> None:
    async def story() -> None:
        world = World(group_protocol="classic")
        needed = JoinGroupResponse(error_code=ErrorCode.MEMBER_ID_REQUIRED, member_id="m")
        world.broker.script(JoinGroupRequest, needed, SILENT)
        world.broker.script(LeaveGroupRequest, LeaveGroupResponse())
        world.begin()
        await asyncio.sleep(1)
        assert len(world.broker.requests(JoinGroupRequest)) == 2
        world.member.leave()
        world.context.changed.set()
        await asyncio.sleep(0.1)
        assert world.member.has_left
        (left,) = (asked for asked in world.broker.asked if isinstance(asked.request, LeaveGroupRequest))
        assert {left.link} & {a.link for a in world.broker.asked if isinstance(a.request, JoinGroupRequest)} == set()
        await world.end()

    play(story)


def test_a_local_assignor_that_raises_is_logged_and_the_group_computes_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from anabranch.machines.clients.membership.steps import Compute

    async def story() -> None:
        world = World()
        reports: list[tuple[int, str]] = []
        world.member.on_error = lambda ticket, error, now_ms: reports.append((ticket, str(error)))  # type: ignore[method-assign]
        results: list[tuple[int, Any]] = []
        world.member.on_response = lambda ticket, result, now_ms: results.append((ticket, result))  # type: ignore[method-assign]

        def broken() -> None:
            raise ZeroDivisionError("ours")

        with caplog.at_level(logging.ERROR):
            await world.driver._compute(Compute(3, broken))
            await world.driver._compute(Compute(4, lambda: "planned"))
        assert reports == [(3, "ours")] and results == [(4, "planned")]
        assert "the assignor of group 'g' failed" in caplog.text
        assert world.context.changed.is_set()
        await world.end()

    play(story)


def test_a_classic_leader_learns_the_partitions_and_which_are_retiring_and_syncs() -> None:
    async def story() -> None:
        world = World({"t": 4}, group_protocol="classic")
        world.broker.initial["t"] = 1
        world.broker.retiring["t"] = 2
        others: list[list[int]] = []

        def join(request: JoinGroupRequest) -> JoinGroupResponse:
            chosen = request.protocols[0]
            return JoinGroupResponse(
                generation_id=1,
                protocol_type="consumer",
                protocol_name=chosen.name,
                leader="m",
                member_id="m",
                members=[JoinGroupResponseMember(member_id=m, metadata=bytes(chosen.metadata)) for m in ("m", "n")],
            )

        def sync(request: SyncGroupRequest) -> SyncGroupResponse:
            mine, other = sorted(request.assignments, key=lambda one: one.member_id)
            others.append(sorted(tp.partition for tp in assignment_of(other.assignment)))
            return SyncGroupResponse(
                protocol_type="consumer", protocol_name=request.protocol_name, assignment=bytes(mine.assignment)
            )

        world.broker.on(JoinGroupRequest, join)
        world.broker.on(SyncGroupRequest, sync)
        world.begin()
        event = await world.event()
        assert event == Assign(frozenset({Owned("t", 0), Owned("t", 2)}))
        assert others == [[1, 3]]
        await world.end()

    play(story)
