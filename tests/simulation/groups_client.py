"""A consumer in the world: the group driver that ships, on a false network and with an application made of chance.

The driver sends, computes, waits, learns topics, carries out events inside polls, and commits before partitions are
revoked; the fetcher that ships decides what is read (`groups_reader`). Simulated are the cluster's metadata, the
connections (`groups_network`), and the application: it polls, works for a while, sometimes for too long, commits in its
own way or leaves that to the driver, and may end at any time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.client.cluster.connection import ConnectError
from anabranch.client.cluster.metadata import OffsetAndTimestamp, PartitionInfo, TopicInfo
from anabranch.client.consumer.group import Group
from anabranch.client.consumer.group_context import Host
from anabranch.client.consumer.listeners import GroupMetadata
from anabranch.client.consumer.offsets import OffsetAndMetadata
from anabranch.client.settings import ConsumerSettings
from anabranch.machines.clients.fetching import EARLIEST, TopicView
from anabranch.machines.clients.key_ranges import KeyRanges, places
from anabranch.machines.clients.membership.assignors import (
    AssignmentSpec,
    AssignorMetadata,
    GroupAssignment,
    MemberAssignment,
    PartitionAssignor,
    TopicIdPartition,
)
from anabranch.machines.clients.membership.classic import Phase as ClassicPhase
from anabranch.machines.clients.membership.consumer import Phase as ConsumerPhase
from anabranch.machines.clients.membership.steps import (
    Assign,
    Event,
    Lost,
    Member,
    Owned,
    Revoke,
    Send,
    Step,
    Subscription,
)
from anabranch.machines.key_ranges import union
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatResponse
from anabranch.protocol.messages.consumer_group_position import ConsumerGroupPositionRequest
from anabranch.protocol.messages.find_coordinator import Coordinator as FoundCoordinator
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest, FindCoordinatorResponse
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from anabranch.protocol.messages.offset_commit import OffsetCommitRequest
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequest
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from anabranch.protocol.registry import api_of
from tests.simulation.groups_clock import WorldClock
from tests.simulation.groups_network import Connection
from tests.simulation.groups_reader import Reader
from tests.simulation.groups_records import Topic
from tests.simulation.groups_transactions import Transactional
from tests.support.application_edge import OrderError
from tests.support.hosts import InOrder

if TYPE_CHECKING:
    from anabranch.machines.groups.image import TopicImage
    from tests.simulation.groups_world import World

ATTEND_LEAST_MS = 100
"""The interval between two checks of a driver without news."""
Partition = tuple[UUID, int]


def nameless(topic: str) -> UUID:
    """Return the substitute id of a topic that a classic leader knew before the coordinator."""
    return UUID(bytes=topic.encode().ljust(16))


class Standing(NamedTuple):
    """The identity of a client at the coordinator, in the last reply that the client has read."""

    member_id: str
    incarnation: int
    """The number of times the coordinator has removed a member of this id."""


class SimAssignor(PartitionAssignor):
    """A client-side assignor: the least loaded subscriber gets the next partition; or it does something wrong."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    def metadata(self) -> AssignorMetadata:
        return AssignorMetadata(0, self._world.assignor_data)

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        chance = self._world.chance
        wrong = (
            chance.choice(("raises", "error", "forgets", "doubles", "invents", "ignores"))
            if (chance.random() < self._world.wrong_assignors)
            else ""
        )
        if wrong == "raises":
            raise ValueError("the assignor is broken")
        if wrong == "error":
            return GroupAssignment(error=7)
        given: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in spec.members}
        for topic_id, topic in sorted(spec.topics.items()):
            takers = sorted(m for m, said in spec.members.items() if topic_id in said.subscribed_topic_ids)
            if wrong == "ignores":
                takers = sorted(spec.members)
            for number in range(topic.partition_count):
                one = TopicIdPartition(topic_id, number)
                owners = [m for m in takers if one in spec.members[m].partitions]
                least = min(takers, key=lambda m: (len(given[m]), m))
                owner = owners[0] if owners and len(given[owners[0]]) <= len(given[least]) else least
                given[owner].add(one)
        if wrong == "forgets" and any(given.values()):
            next(partitions for partitions in given.values() if partitions).pop()
        if wrong == "doubles" and len(given) > 1:
            first, second = sorted(given)[:2]
            given[first] |= given[second]
        if wrong == "invents":
            given["nobody"] = set()
        return GroupAssignment({m: MemberAssignment(frozenset(partitions)) for m, partitions in given.items()})


class FalseCluster:
    """The cluster for a driver: metadata, and connections to the coordinator's broker."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._world = client.world
        self._ways: dict[str, Way] = {}

    async def any_connection(self) -> Way:
        return Way(self._client, None)

    async def ask(self, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
        await self._delay()
        await self._reach()
        broker = self._client.broker
        found = FoundCoordinator(key=request.key, node_id=broker.number, host="broker", port=broker.number)
        return FindCoordinatorResponse(coordinators=[found])

    async def connection_to(self, host: str, port: int, purpose: str) -> Way:
        way = self._ways.get(purpose)
        if way is None or not way.is_open:
            await self._reach()
            way = self._ways.get(purpose)
            if way is None or not way.is_open:
                connection = Connection(self._world, self._client.name, self._client.broker)
                way = self._ways[purpose] = Way(self._client, connection)
        return way

    async def _reach(self) -> None:
        if not self._world.reaches(self._client):
            await asyncio.sleep(self._world.chance.choice((0.005, 1.0)))
            raise ConnectError("the broker cannot be reached")

    async def _delay(self) -> None:
        delay_ms = self._world.delay_ms()
        self._client.told_ms = self._client.told_ms or self._world.now_ms + delay_ms
        self._world.answered_until_ms = max(self._world.answered_until_ms, self._world.now_ms + delay_ms)
        await asyncio.sleep(delay_ms / 1000)

    async def topics(self, names: Sequence[str] | None = None) -> dict[str, TopicInfo | ApiError]:
        await self._delay()
        known = {name: _info(topic) for name, topic in self._world.some_image().by_name.items()}
        missing = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return {name: known.get(name, missing) for name in (known if names is None else names)}

    async def topics_by_id(self, topic_ids: Iterable[UUID]) -> dict[UUID, TopicInfo]:
        await self._delay()
        known = self._world.some_image().by_id
        return {topic_id: _info(known[topic_id]) for topic_id in sorted(topic_ids) if topic_id in known}

    async def view(self, name: str) -> TopicView:
        await self._delay()
        topic = self._world.topics.get(name)
        if topic is None:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return topic.view(ordered=topic.ordered and not self._client.is_stock)

    async def offsets(self, wanted: Mapping[TopicPartition, int], **_: object) -> dict[TopicPartition, Any]:
        await self._delay()
        found = {}
        for tp, timestamp in wanted.items():
            topic = self._world.topics.get(tp.topic)
            if topic is None or tp.partition not in topic.logs:
                raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            log = topic.logs[tp.partition]
            self._client.asks_leader(tp, timestamp)
            if timestamp != EARLIEST:
                self._client.begins_at_end(topic, tp.partition, log.end)
            found[tp] = OffsetAndTimestamp(log.start if timestamp == EARLIEST else log.end, -1, log.epoch)
        return found

    def close(self) -> None:
        """Handle the end of the process."""
        for way in self._ways.values():
            way.close("the process is gone")


def _info(topic: TopicImage) -> TopicInfo:
    parts = {number: PartitionInfo(number, 0, 0) for number in (*topic.partitions, *topic.retiring)}
    return TopicInfo(topic.name, topic.topic_id, parts, len(parts), len(topic.partitions), (len(parts),), True)


class Way:
    """One connection for a driver."""

    name = "broker"

    def __init__(self, client: Client, connection: Connection | None) -> None:
        self._client = client
        self.connection = connection

    @property
    def is_open(self) -> bool:
        return self.connection is not None and self.connection.is_open

    def close(self, reason: str) -> None:
        if self.connection is not None:
            self.connection.close(reason)

    def serves(self, request_class: type[Any]) -> bool:
        return not (request_class is ConsumerGroupPositionRequest and self._client.is_stock)

    def version_of(self, request_class: type[Any]) -> int:
        old = self._client.is_classic and self._client.version < 9
        if request_class is JoinGroupRequest and self._client.is_classic:
            return self._client.version
        if request_class is SyncGroupRequest and old:
            return 3 if self._client.version == 5 else 4
        if request_class in (OffsetCommitRequest, OffsetFetchRequest):
            return 10
        return api_of(request_class).versions[-1]

    def send(self, message: Any, *, timeout_ms: int, version: int | None = None) -> asyncio.Future[Any]:
        assert self.connection is not None
        version = self.version_of(type(message)) if version is None else version
        return self.connection.send(message, version, timeout_ms, self._client.noted)


class Listener:
    """A rebalance listener with slow callbacks."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def _called(self, partitions: Any) -> None:
        chance = self._client.world.chance
        await asyncio.sleep(chance.randint(0, 1_500 if self._client.is_slow else 20) / 1000)

    async def on_partitions_revoked(self, partitions: Any) -> None:
        if self._client.commits_by_hand:
            await self._client.commit_handed(partitions)
        await self._called(partitions)

    on_partitions_assigned = on_partitions_lost = _called
    on_partition_key_assigned = on_partition_key_maybe_revoked = _called


class Client(InOrder):
    """One process with one consumer; a process that comes back is another client."""

    knows_stable_only = False
    """Whether it knows committed offsets only, and neither ranges nor keys."""

    def __init__(
        self,
        world: World,
        name: str,
        group: str,
        *,
        classic: bool,
        instance: str | None,
        subscription: Subscription,
        strategies: tuple[str, ...] = ("range",),
        server_assignor: str | None = None,
        local_assignors: tuple[PartitionAssignor, ...] = (),
        **more: Any,
    ) -> None:
        """`more`: settings of the consumer."""
        self.world = world
        self.name = name
        self.group = group
        self.instance = instance
        self.is_classic = classic
        self.is_stock = group in world.stock
        """Whether it keeps to no gates, and tells no positions."""
        self.subscription = subscription
        self.reads = None if classic and subscription.pattern is not None else subscription
        """The machine's subscription: names for a classic member, unchanged while a pattern has no match."""
        self.is_alive = True
        self.is_leaving = False
        self.is_closing = False
        """Whether the driver is leaving."""
        self.stuck_until_ms = 0
        self.begun_ms = world.now_ms
        self.told_ms = 0
        """When the first answer about topics arrives, or has arrived; 0 before the question."""
        self.has_given_up = False
        """Whether the member has left with its partitions, because its application is stuck."""
        self.standing = Standing("", 0)
        self._outlived: frozenset[Partition] = frozenset()
        """What it was given as a member that is no more: its own join, arriving late, made another one in its name.

        KIP-848 cannot tell the two where the target's epoch has not moved, which takes a client-side assignor that is
        late as well. What it held it is then told to revoke, and nobody else was given it by that target.
        """
        self.given: frozenset[Partition] | None = None
        """The member's assignment at the coordinator, in the last reply that was read."""
        self.assigning: frozenset[Owned] = frozenset()
        self.stamps: dict[Owned, UUID] = {}
        """Ids of topics that the member identifies by name, as of the assignment of the partition."""
        self._ids: dict[str, UUID] = {}
        self._notes: dict[int, tuple[Any, Any]] = {}
        self._carrying: Event | None = None
        self._stay: bool | None = None
        self._paused = False
        self._waiter: asyncio.Future[None] = world.loop.create_future()
        """Done with the next change that the application waits for."""
        self._started_anew: asyncio.Future[None] = world.loop.create_future()
        """Never done: the process of a consumer that was refused waits to be ended."""
        self.broker = world.broker_of(group)
        chance = world.chance
        self.is_slow = chance.random() < world.theme.slow
        self.version = chance.choice((5, 8, 9))
        """Of JoinGroup; SyncGroup as at that time."""
        self._cluster = FalseCluster(self)
        self._process = world.loop.process(name)
        self._commits = chance.choice(world.theme.commits)
        """How the application commits: `auto`, at `each` poll by hand, after some records, or `never`."""
        self._transactional: Transactional | None = None
        if world.theme.transactional and chance.random() < world.theme.transactional:
            self._commits, self._transactional = "each", Transactional(self)
        self._handed: dict[TopicPartition, int] = {}
        """The offsets that the application would commit by hand."""
        self._since: dict[TopicPartition, int] = {}
        """Where it began to be handed what it has not committed, in transactions."""
        self._handed_count = 0
        self._settings = ConsumerSettings(
            group_id=group,
            group_protocol="classic" if classic else "consumer",
            group_instance_id=instance,
            group_remote_assignor=server_assignor,
            group_local_assignors=local_assignors,
            partition_assignment_strategy=strategies,
            session_timeout_ms=world.theme.session_timeout_ms,
            heartbeat_interval_ms=world.theme.heartbeat_interval_ms,
            enable_auto_commit=self._commits == "auto",
            auto_commit_interval_ms=chance.choice((1_000, 3_000)),
            max_poll_interval_ms=world.theme.poll_interval_ms,
            auto_offset_reset="latest" if group in world.latest else "earliest",
            request_timeout_ms=chance.choice((800, 1_500, 5_000)),
            default_api_timeout_ms=2_000,
            metadata_max_age_ms=world.theme.metadata_age_ms,
            isolation_level="read_committed" if world.theme.transactional else "read_uncommitted",
            retry_backoff_ms=chance.choice((50, 200)),
            **more,
        )
        self.reader = self._made_reader()
        self._driver = self._process.call(self._made)
        self.machine = self._driver._context.member
        self._watch(self.machine)
        self._task = self._process.create_task(self._live(), name=name)
        self._task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the simulation where the application has failed: a member that has gone looks like one that is stuck."""
        if not task.cancelled() and (error := task.exception()) is not None and isinstance(error, Exception):
            self.world.failed_with(error)

    def _made_reader(self) -> Reader:
        return Reader(self, self._settings)

    @property
    def _host(self) -> Host:
        return self

    def _made(self) -> Group:
        return Group(
            self._settings,
            self._cluster,  # type: ignore[arg-type]
            self.reader.fetcher,
            self._host,
            clock=WorldClock(self.world),
            chance=SimpleNamespace(uuid=self.world.fresh_id),  # type: ignore[arg-type]
        )

    # -- the client's state --------------------------------------------------------------------------------------------

    @property
    def commits_by_hand(self) -> bool:
        """Whether the application commits what it was handed, sooner or later."""
        return self._commits not in ("auto", "never")

    @property
    def is_in_doubt(self) -> bool:
        """Whether the application has yet to commit, in a transaction, what it was handed."""
        return self._transactional is not None and bool(self._handed)

    @property
    def is_standing_still(self) -> bool:
        """Whether the process is stopped for a while."""
        return self._paused

    @property
    def holds(self) -> frozenset[Partition]:
        """The partitions that the application has, or is about to take: no other client may have them."""
        return frozenset(
            (owned.topic_id if owned.topic_id != NO_TOPIC_ID else self.stamps[owned], owned.partition)
            for owned in self.machine.owned | self.assigning
        )

    @property
    def keys(self) -> dict[Partition, KeyRanges]:
        """The same with the keys of each: none of them may another client have."""
        found: dict[Partition, KeyRanges] = {}
        for owned in self.machine.owned | self.assigning:
            at = (owned.topic_id if owned.topic_id != NO_TOPIC_ID else self.stamps[owned], owned.partition)
            found[at] = union(found.get(at, ()), places(owned.keys))
        return found

    @property
    def names(self) -> dict[tuple[str, int], KeyRanges]:
        """The partitions of `holds`, by topic name, with their keys."""
        found: dict[tuple[str, int], KeyRanges] = {}
        for owned in self.machine.owned | self.assigning:
            at = owned.topic, owned.partition
            found[at] = union(found.get(at, ()), places(owned.keys))
        return found

    @property
    def is_void(self) -> bool:
        """Whether the coordinator has removed this client's member, or the member has left."""
        if self.has_given_up:
            return True
        incarnation = self.world.rules.incarnations.get((self.group, self.standing.member_id), 0)
        return incarnation != self.standing.incarnation or bool(self._outlived & self.holds)

    @property
    def has_nothing_to_read(self) -> bool:
        """Whether the member has not joined because a subscribed topic was never found."""
        return self.reads is None

    @property
    def is_in(self) -> bool:
        """Whether the member considers itself settled."""
        phase = self.machine.phase  # type: ignore[attr-defined]
        return phase in (ConsumerPhase.JOINED, ClassicPhase.STABLE)

    @property
    def due(self) -> Event | None:
        """The current or next rebalance event of the application."""
        event = self._carrying or self.machine.event()
        return event if isinstance(event, Assign | Revoke | Lost) else None

    @property
    def has_failed(self) -> bool:
        """Whether the group refuses the member."""
        phase = self.machine.phase  # type: ignore[attr-defined]
        return phase in (ConsumerPhase.FAILED, ClassicPhase.FAILED)

    # -- its life ------------------------------------------------------------------------------------------------------

    def subscribe(self, subscription: Subscription) -> None:
        """Change the subscription."""
        if not self.is_leaving and not self._paused:
            self.subscription = subscription
            self.world.say("%s subscribes to %s", self.name, subscription)
            self._process.call(self._driver.subscribe, subscription, Listener(self), Listener(self))

    def leave(self, *, stay: bool | None = None) -> None:
        """Have the application close the consumer; its process ends when it has left, or after a while."""
        if not self.is_leaving:
            self.world.say("%s leaves", self.name)
            self.is_leaving, self._stay = True, stay
            self._wake()
            self.world.after(20_000, self.kill)

    def kill(self) -> None:
        """End the process at once, and with it the ownership of its partitions."""
        if self.is_alive:
            self.world.say("%s is gone", self.name)
            self.is_alive = False
            self._process.kill()
            self._cluster.close()
            self.world.gone(self)

    def pause(self, ms: int) -> None:
        """Stop the process for a while: it keeps its partitions, and reads nothing from its connections."""
        if not self._paused:
            self.world.say("%s stands still for %d ms", self.name, ms)
            self._paused = True
            self._process.alive = False
            self.world.after(ms, self.resume)

    def resume(self) -> None:
        """Let a paused process go on where it was stopped."""
        if self._paused and self.is_alive:
            self.world.say("%s goes on", self.name)
            self._paused = False
            self._process.thaw()

    # -- the application -----------------------------------------------------------------------------------------------

    async def _live(self) -> None:
        chance, theme = self.world.chance, self.world.theme
        await asyncio.sleep(chance.randint(0, 50) / 1000)
        listener = Listener(self)
        self._driver.subscribe(self.subscription, listener, listener if chance.random() < 0.5 else None)
        self._driver.start()
        polls_ms = chance.randint(100, 1_500)
        while not self.is_leaving:
            await self._poll(polls_ms)
            if self._commits == "auto" and chance.random() < 0.15:
                with suppress(AnabranchError, OSError):
                    await self._driver.commit(None)
            elif self._commits == "each" or (self._commits.isdigit() and self._handed_count >= int(self._commits)):
                await self.commit_handed(frozenset(self._handed))
            ms = chance.randint(1, 3_000 if self.is_slow else 200)
            if chance.random() < self.world.stuck:
                self.world.say("%s is stuck", self.name)
                ms = theme.poll_interval_ms + chance.randint(0, theme.poll_interval_ms)
                self.stuck_until_ms = self.world.now_ms + ms
            await self._wait(ms)
            polls_ms = chance.randint(300, 2_000)
        self.is_closing = True
        await self._driver.close(leave=None if self._stay is None else not self._stay, timeout_ms=20_000)
        self.world.after(0, self.kill)

    async def _poll(self, ms: int) -> None:
        end_ms = self.world.now_ms + ms
        self._driver.poll_began()
        while not self.is_leaving:
            try:
                await self._driver.attend()
            except AnabranchError as error:
                self.world.say("%s: %s", self.name, error)
                if self.has_failed:
                    self.world.failed(self)
                    await self._started_anew
            self.reader.pump()
            if await self._take():
                self.reader.pump()
                break
            if self.world.now_ms >= end_ms:
                break
            due_ms = self._driver.next_attendance_ms()
            ms = end_ms - self.world.now_ms
            await self._wait(ms if due_ms is None else min(ms, max(ATTEND_LEAST_MS, due_ms - self.world.now_ms)))
        self._driver.poll_ended()

    async def _take(self) -> bool:
        """Take what can be delivered; return whether there was any."""
        parts = self.reader.fetcher.deliverable()
        self._say_errors()
        if parts:
            ends = self.reader.hand_out(parts)
            self._handed |= ends
            self._handed_count += len(ends)
        return bool(parts)

    def _say_errors(self) -> None:
        for error in self.reader.fetcher.errors():
            self.world.say("%s: %s", self.name, error)

    async def _wait(self, ms: int) -> None:
        """Wait for the next change, up to a limit."""
        loop = self.world.loop
        self._waiter = loop.create_future()
        timer = loop.call_later(ms / 1000, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()

    def _wake(self) -> None:
        """End a wait."""
        if not self._waiter.done():
            self._waiter.set_result(None)

    async def commit_handed(self, partitions: Collection[TopicPartition]) -> None:
        """Commit by hand: the offset after the last record of each partition."""
        offsets = {tp: OffsetAndMetadata(end) for tp, end in self._handed.items() if tp in partitions}
        self._handed_count = 0
        if offsets and self._transactional is not None:
            await self._commit_in_transaction(self._transactional, {tp: at.offset for tp, at in offsets.items()})
        elif offsets:
            with suppress(AnabranchError, OSError):
                await self._driver.commit(offsets)
                self._handed = {tp: end for tp, end in self._handed.items() if tp not in offsets}

    async def _commit_in_transaction(self, way: Transactional, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit; or go back to where the transaction began, in what the member still has."""
        begun = {tp: self._since.pop(tp) for tp in offsets if tp in self._since}
        self._handed = {tp: end for tp, end in self._handed.items() if tp not in offsets}
        if await way.commit(offsets):
            return
        positions = self.consumed()
        for tp, offset in begun.items():
            if tp in positions:
                self.world.say("%s goes back to %d in %s-%d", self.name, offset, tp.topic, tp.partition)
                self._process.call(self.reader.fetcher.seek, tp, offset)

    def group_metadata(self) -> GroupMetadata:
        """What a producer tells of the member whose offsets it commits."""
        return self._driver.metadata()

    async def send_beside(self, request: Any) -> Any:
        """Have the coordinator answer a request of the application's producer."""
        way = await self._cluster.connection_to("broker", self.broker.number, "producer")
        return await way.send(request, timeout_ms=1_500)

    def handed(self, tp: TopicPartition, start: int, end: int) -> None:
        """Show the edge records that the application is handed; a member that was removed may break the order."""
        topic = self._topic_read(tp)
        self._since.setdefault(tp, start)
        self.world.say("%s is handed %s-%d from %d to %d", self.name, tp.topic, tp.partition, start, end)
        self.world.upheavals += 1  # What is read again when all has been read moves gates again.
        if topic is not None and self._counts_for(topic):
            edge = self.world.edges[self.group]
            try:
                held = self.reader.held(topic, tp.partition)
                edge.handed(self.name, topic, tp.partition, range(start, end), self.world.now_ms, held)
            except OrderError as error:
                if not self.is_void:
                    self.world.failed_with(error)
                    raise

    def done_to(self, tp: TopicPartition, start: int, end: int) -> int:
        """What the application knows to be done when it was handed a part: in a compacted topic, up to the last record.

        Of what it is not handed it knows nothing, so it commits the offset behind that record.
        """
        topic = self._topic_read(tp)
        log = None if topic is None else topic.logs.get(tp.partition)
        if topic is None or log is None or not topic.is_compacted:
            return end
        held = self.reader.held(topic, tp.partition)
        return max((at + 1 for at in range(start, end) if at in held or log.sent(at)[1] is not None), default=start)

    def _topic_read(self, tp: TopicPartition) -> Topic | None:
        """Return the topic, in one of its lives, that a partition is of."""
        view = self.reader.fetcher.view(tp.topic)
        return None if view is None else self.world.topic_of(view.topic_id)

    def asks_leader(self, tp: TopicPartition, timestamp: int) -> None:
        """Have the coordinators hear of a question for a first offset, as leaders tell them."""
        topic = self.world.topics.get(tp.topic)
        for broker in self.world.brokers if topic is not None else ():
            broker.hear_reset(topic.topic_id, {tp.partition: timestamp}, self.name)

    def begins_at_end(self, topic: Topic, number: int, end: int) -> None:
        """Show the edge that a partition without a committed offset is read from its end."""
        gone = TopicPartition(topic.name, number) in self.reader.gone or not self._counts_for(topic)
        try:
            self.world.edges[self.group].begins_at_end(topic, number, end, gone=gone)
        except AssertionError as error:
            if not self.is_void:
                self.world.failed_with(error)
                raise

    def _counts_for(self, topic: Topic) -> bool:
        return topic.ordered and not self.world.is_ambiguous(topic)

    def perform(self, work: Callable[..., None], *given: Any) -> None:
        """Do something in the client's process."""
        self._process.call(work, *given)

    def happened(self) -> None:
        """Carry out the fetcher's work, and note work for the next `attend`."""
        self._driver.look_for_positions()
        self.reader.pump()
        self._wake()

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget what the application could have committed of these partitions."""
        self._since = {tp: start for tp, start in self._since.items() if tp not in set(partitions)}
        self._handed = {tp: end for tp, end in self._handed.items() if tp not in set(partitions)}

    def consumed(self) -> Mapping[TopicPartition, int]:
        """Return the positions after all records that were handed out."""
        return self.reader.fetcher.positions()

    def stamp(self, topic: str) -> UUID:
        """Return a classic member's substitute for a topic id."""
        return self._ids.get(topic) or nameless(topic)

    # -- watching the member -------------------------------------------------------------------------------------------

    def noted(self, reply: Any, note: Any) -> None:
        """Note the values that the rules need of the receiver of a reply."""
        self._notes[id(reply)] = reply, note

    def _watch(self, member: Member) -> None:
        """Show the rules the member's requests, answers and events. The member's decisions stay the same."""
        machine: Any = member
        step, take, done, subscribe = machine.next, machine.take, machine.done, machine.subscribe
        on_response, on_error = machine.on_response, machine.on_error

        def watched_next(now_ms: int) -> Step:
            next_step: Step = step(now_ms)
            if isinstance(next_step, Send):
                self.world.rules.before_send(self, next_step.request)
            return next_step

        def watched_take() -> Event | None:
            event: Event | None = take()
            if event is not None:
                self._took(event)
            return event

        def watched_done(event: Event, now_ms: int) -> None:
            self._carrying = None
            self.assigning = frozenset()
            self.world.say("%s did %s", self.name, type(event).__name__)
            done(event, now_ms)
            if self.is_classic and not machine.owned:
                self.has_given_up = False
            for owned in [owned for owned in self.stamps if owned not in machine.owned]:
                del self.stamps[owned]

        def watched_subscribe(subscription: Subscription) -> None:
            self.reads = subscription
            subscribe(subscription)

        def watched_response(ticket: int, reply: Any, now_ms: int) -> None:
            _, note = self._notes.pop(id(reply), (None, _NO_REPLY))
            if note is _NO_REPLY:
                on_response(ticket, reply, now_ms)
            else:
                self._heard(on_response, ticket, reply, note, now_ms)

        def watched_error(ticket: int, error: Exception, now_ms: int) -> None:
            self.given = None
            on_error(ticket, error, now_ms)

        machine.next, machine.take, machine.done = watched_next, watched_take, watched_done
        machine.subscribe = watched_subscribe
        machine.on_response, machine.on_error = watched_response, watched_error

    def _took(self, event: Event) -> None:
        self._carrying = event
        self.world.say("%s carries out %s", self.name, event)
        self.world.upheavals += isinstance(event, Lost)
        if isinstance(event, Assign):
            for owned in event.partitions:
                if owned.topic_id == NO_TOPIC_ID:
                    self.stamps[owned] = self.stamp(owned.topic)
            self.assigning = event.partitions
            self.world.was_assigned(self, event.partitions)
            self.world.rules.after_assign(self)

    def _heard(self, on_response: Any, ticket: int, reply: Any, note: Any, now_ms: int) -> None:
        before = self.standing
        if note is not None:
            self.standing, self.given, ids = note
            if isinstance(reply, SyncGroupResponse):
                self._ids = ids
        else:
            self.given = None
        if self.standing.member_id == before.member_id and self.standing.incarnation != before.incarnation:
            self._outlived = self.holds if isinstance(reply, ConsumerGroupHeartbeatResponse) else frozenset()
        awaited = ticket == self.machine._flight  # type: ignore[attr-defined]
        on_response(ticket, reply, now_ms)
        if isinstance(reply, JoinGroupResponse) and not self.machine.is_member:
            self.standing = before  # It has learned that a generation went on without it: what it has is lost.
        if awaited and self.is_classic and isinstance(reply, SyncGroupResponse):
            # A partition that stays assigned is, by its name, now one of whatever topic has that name. A member that
            # began to leave ignores the answer: its partitions are still those of the earlier assignment.
            for owned in self.machine.owned & (getattr(self.machine, "_target", None) or frozenset()):
                self.stamps[owned] = self.stamp(owned.topic)
        self.world.rules.after_reply(self, reply)

    def __str__(self) -> str:
        return self.name


_NO_REPLY: Any = object()
