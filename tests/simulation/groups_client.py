"""A consumer in the world: the member machine that ships, carried out by a shell and an application made of chance.

The shell does what `client.consumer.group` does: sends, computes, waits, learns topics, carries out events inside
polls only, commits before it lets go. The application polls, works for a while, sometimes too long, and sometimes stops
existing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.client.cluster.connection import ConnectError
from anabranch.machines.clients.membership.assignors import (
    AssignmentSpec,
    AssignorMetadata,
    GroupAssignment,
    MemberAssignment,
    PartitionAssignor,
    TopicIdPartition,
)
from anabranch.machines.clients.membership.classic import ClassicMember
from anabranch.machines.clients.membership.classic import Phase as ClassicPhase
from anabranch.machines.clients.membership.consumer import ConsumerMember
from anabranch.machines.clients.membership.consumer import Phase as ConsumerPhase
from anabranch.machines.clients.membership.steps import (
    Assign,
    Compute,
    Event,
    Failed,
    Lost,
    Member,
    MemberSettings,
    Owned,
    Revoke,
    Send,
    Subscription,
    TopicFacts,
    WaitUntil,
)
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from anabranch.protocol.messages.join_group import JoinGroupRequest
from anabranch.protocol.messages.leave_group import LeaveGroupRequest
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopics,
)
from anabranch.protocol.messages.sync_group import SyncGroupRequest
from tests.simulation.groups_network import Connection

if TYPE_CHECKING:
    from tests.simulation.groups_world import World

STEPS_MAX = 40
"""What a machine may want at one moment."""
Partition = tuple[UUID, int]


def nameless(topic: str) -> UUID:
    """What stands for the id of a topic that a classic leader knew before the coordinator did."""
    return UUID(bytes=topic.encode().ljust(16))


class Standing(NamedTuple):
    """Who the client is to the coordinator, by the last answer that it has read."""

    member_id: str
    incarnation: int
    """Counts how often the coordinator has forgotten a member of this id."""


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


class Client:
    """One process with one consumer; a process that comes back is another client."""

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
    ) -> None:
        self.world = world
        self.name = name
        self.group = group
        self.instance = instance
        self.is_classic = classic
        self.subscription = subscription
        self.reads: Subscription | None = None
        """What the machine was told: a classic one is told names, and keeps to them while a pattern has no match."""
        self.is_alive = True
        self.is_leaving = False
        self.stuck_until_ms = 0
        self.has_given_up = False
        """It has left, since its application is stuck, with what that still holds."""
        self.standing = Standing("", 0)
        self.given: frozenset[Partition] | None = None
        """What the coordinator had down for it when it gave the last answer that was read."""
        self.assigning: frozenset[Owned] = frozenset()
        self.positions: dict[Owned, int] = {}
        self._begun: dict[Owned, int] = {}
        """Where it has begun to read: who was given no record commits nothing."""
        self.stamps: dict[Owned, UUID] = {}
        """Ids of topics that are known by name, as they were when the partition was given."""
        self._ids: dict[str, UUID] = {}
        chance = world.chance
        settings = MemberSettings(
            group,
            instance,
            max_poll_interval_ms=world.theme.poll_interval_ms,
            retry_backoff_ms=chance.choice((50, 200)),
        )
        self.machine: Member
        if classic:
            self.machine = ClassicMember(
                settings,
                strategies=strategies,
                session_timeout_ms=world.theme.session_timeout_ms,
                heartbeat_interval_ms=world.theme.heartbeat_interval_ms,
                metadata_max_age_ms=world.theme.metadata_age_ms,
            )
        else:
            self.machine = ConsumerMember(
                settings, world.fresh_id(), server_assignor=server_assignor, local_assignors=local_assignors
            )
        self.request_timeout_ms = chance.choice((800, 1_500, 5_000))
        self.is_slow = chance.random() < 0.3
        self.broker = world.broker_of(group)
        self._channels: dict[str, Connection] = {}
        self._paused = False
        self._deferred: list[Callable[[], None]] = []
        self._wake_at: int | None = None
        self._polling = True
        self._carrying: Event | None = None
        self._is_refused = False
        self._learning = False
        self._looking = False
        self._matched: frozenset[str] = frozenset()
        self._fetching = False
        self._committing = False
        self.version = chance.choice((5, 8, 9)) if classic else 1
        """Of JoinGroup; SyncGroup and the others as at that time."""
        self._subscribe()
        self._in(chance.randint(0, 50), self._pump)
        self._in(chance.randint(100, 1_500), self._work)

    # -- what it is ----------------------------------------------------------------------------------------------------

    @property
    def holds(self) -> frozenset[Partition]:
        """What the application has, or is about to take: until it has let go, nobody else may have it."""
        return frozenset(
            (owned.topic_id if owned.topic_id != NO_TOPIC_ID else self.stamps[owned], owned.partition)
            for owned in self.machine.owned | self.assigning
        )

    @property
    def names(self) -> frozenset[tuple[str, int]]:
        """What it holds, by name."""
        return frozenset((owned.topic, owned.partition) for owned in self.machine.owned | self.assigning)

    @property
    def is_void(self) -> bool:
        """Whether the coordinator has forgotten the member that this client takes itself for, or it has left."""
        if self.has_given_up:
            return True
        incarnation = self.world.rules.incarnations.get((self.group, self.standing.member_id), 0)
        return incarnation != self.standing.incarnation

    @property
    def has_nothing_to_read(self) -> bool:
        """Whether it has never found a topic that it wants, and has not joined therefore."""
        return self.reads is None

    @property
    def is_in(self) -> bool:
        """Whether it takes itself for a settled member."""
        phase = self.machine.phase  # type: ignore[attr-defined]
        return phase in (ConsumerPhase.JOINED, ClassicPhase.STABLE)

    @property
    def due(self) -> Event | None:
        """The change of its partitions that the application carries out, or is to carry out in its next poll."""
        event = self._carrying or self.machine.event()
        return event if isinstance(event, Assign | Revoke | Lost) else None

    @property
    def has_failed(self) -> bool:
        """Whether the group refuses it."""
        phase = self.machine.phase  # type: ignore[attr-defined]
        return phase in (ConsumerPhase.FAILED, ClassicPhase.FAILED)

    # -- its life ------------------------------------------------------------------------------------------------------

    def _subscribe(self) -> None:
        if self.is_classic and self.subscription.pattern is not None:
            if not self._looking:
                self._looking = True
                self._match()
        else:
            self.reads = self.subscription
            self.machine.subscribe(self.subscription)

    def _match(self) -> None:
        """Keep a classic member subscribed to the topics that match."""
        import re2

        pattern = self.subscription.pattern
        if pattern is None:
            self._looking = False
            return
        image = self.world.some_image()
        names = frozenset(name for name in image.by_name if re2.compile(pattern).fullmatch(name))
        if names and names != self._matched and not self.is_leaving:
            self._matched = names
            self.reads = Subscription(names)
            self.machine.subscribe(self.reads)
            self._pump()
        self._in(self.world.theme.metadata_age_ms if self._matched else 500, self._match)

    def subscribe(self, subscription: Subscription) -> None:
        """Want something else."""
        if self.is_leaving:
            return
        self.subscription = subscription
        self._matched = frozenset()
        self.world.say("%s subscribes to %s", self.name, subscription)
        self._subscribe()
        self._pump()

    def leave(self, *, stay: bool | None = None) -> None:
        """Close the consumer; its process ends when it has left, or after a while."""
        if self.is_leaving:
            return
        self.world.say("%s leaves", self.name)
        self.is_leaving = True
        self.machine.leave(stay=stay)
        if not self._polling:
            self._polling = True
            self.machine.poll_began(self.world.now_ms)
        self._pump()
        self._in(20_000, self.kill)

    def kill(self) -> None:
        """The process is gone, and with it what it held."""
        if self.is_alive:
            self.world.say("%s is gone", self.name)
            self.is_alive = False
            for connection in list(self._channels.values()):
                connection.close("the process is gone")
            self.world.gone(self)

    def pause(self, ms: int) -> None:
        """The process stands still: it holds what it holds, and hears nothing."""
        if not self._paused:
            self.world.say("%s stands still for %d ms", self.name, ms)
            self._paused = True
            self.world.after(ms, self.resume)

    def resume(self) -> None:
        """It goes on where it stood."""
        if self._paused and self.is_alive:
            self.world.say("%s goes on", self.name)
            self._paused = False
            deferred, self._deferred = self._deferred, []
            for do in deferred:
                self._do(do)

    def _in(self, ms: int, do: Callable[[], None]) -> None:
        self.world.after(ms, self._do, do)

    def _do(self, do: Callable[[], None]) -> None:
        if self._paused:
            self._deferred.append(do)
        elif self.is_alive:
            do()

    # -- the shell -----------------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Do all that the machine wants now."""
        for _ in range(STEPS_MAX):
            now_ms = self.world.now_ms
            step = self.machine.next(now_ms)
            match step:
                case Send():
                    self._send(step)
                case Compute():
                    self._compute(step)
                case WaitUntil(at_ms):
                    if at_ms is not None and (self._wake_at is None or at_ms < self._wake_at or self._wake_at < now_ms):
                        assert at_ms > now_ms, f"{self.name}, {self.machine.phase}, waits for {at_ms - now_ms} ms"  # type: ignore[attr-defined]
                        self._wake_at = at_ms
                        self._in(at_ms - now_ms, self._woken)
                    break
        else:
            raise AssertionError(f"{self.name} does not come to rest")
        if (self.machine.wanted_ids or self.machine.wanted_topics) and not self._learning:
            self._learning = True
            self._in(self.world.delay_ms(), self._learn)
        self._attend()
        if self.is_leaving and self.machine.has_left:
            self.kill()

    def _woken(self) -> None:
        if self._wake_at is not None and self._wake_at <= self.world.now_ms:
            self._wake_at = None
        self._pump()

    def _send(self, send: Send) -> None:
        request = send.request
        channel = "group-leave" if isinstance(request, LeaveGroupRequest) else "group"
        self.world.rules.before_send(self, request)
        self._request(
            channel,
            request,
            send.timeout_ms or self.request_timeout_ms,
            partial(self._replied, send),
            partial(self._unanswered, send),
        )

    def _version_of(self, request: Any) -> int:
        old = self.is_classic and self.version < 9
        match request:
            case JoinGroupRequest():
                return self.version
            case OffsetCommitRequest() | OffsetFetchRequest():
                return 9 if self.is_classic else 10
            case SyncGroupRequest() if old:
                return 3 if self.version == 5 else 4
            case _:
                from anabranch.protocol.registry import api_of

                return api_of(type(request)).versions[-1]

    def _request(
        self,
        channel: str,
        request: Any,
        timeout_ms: int,
        on_reply: Callable[[Any, Any], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        connection = self._channels.get(channel)
        if connection is None or not connection.is_open:
            if not self.world.reaches(self):
                delay_ms = self.world.chance.choice((5, 1_000))
                self._in(delay_ms, lambda: on_error(ConnectError("nobody there")))
                return
            connection = self._channels[channel] = Connection(self.world, self.name, self.broker)
        connection.send(
            request,
            self._version_of(request),
            timeout_ms,
            lambda reply, note: self._do(lambda: on_reply(reply, note)),
            lambda error: self._do(lambda: on_error(error)),
        )

    def _replied(self, send: Send, reply: Any, note: Any) -> None:
        if note is not None:
            self.standing, self.given, ids = note
            if isinstance(send.request, SyncGroupRequest):
                self._ids = ids
        else:
            self.given = None
        awaited = send.ticket == self.machine._flight  # type: ignore[attr-defined]
        self.machine.on_response(send.ticket, reply, self.world.now_ms)
        if awaited and self.is_classic and isinstance(send.request, SyncGroupRequest):
            # A partition that stays assigned is, by its name, now one of whatever topic has that name. A member that
            # began to leave ignores the answer: what it still holds is what it was given before.
            for owned in self.machine.owned & (getattr(self.machine, "_target", None) or frozenset()):
                self.stamps[owned] = self._stamp(owned)
        self.world.rules.after_reply(self, send.request, reply)
        self._pump()

    def _unanswered(self, send: Send, error: Exception) -> None:
        self.given = None
        self.machine.on_error(send.ticket, error, self.world.now_ms)
        self._pump()

    def _compute(self, compute: Compute) -> None:
        chance = self.world.chance
        try:
            result = compute.work()
        except ValueError as error:
            answer = partial(self.machine.on_error, compute.ticket, error)
        else:
            answer = partial(self.machine.on_response, compute.ticket, result)
        ms = chance.randint(0, 50)
        if chance.random() < self.world.slow_assignors:
            ms = chance.randint(500, 2 * self.world.theme.poll_interval_ms)

        def computed() -> None:
            answer(self.world.now_ms)
            self._pump()

        self._in(ms, computed)

    def _learn(self) -> None:
        self._learning = False
        image = self.world.some_image()
        facts = [
            TopicFacts(topic.name, topic.topic_id, topic.size)
            for topic_id in self.machine.wanted_ids
            if (topic := image.by_id.get(topic_id)) is not None
        ]
        for name in sorted(self.machine.wanted_topics):
            known = image.by_name.get(name)
            facts.append(TopicFacts(name, NO_TOPIC_ID if known is None else known.topic_id, known.size if known else 0))
        self.machine.on_topics(facts)
        if self.machine.wanted_ids or self.machine.wanted_topics:
            self._learning = True
            self._in(300, self._learn)
        self._pump()

    # -- the application -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        """Poll returned: work on what came, commit now and then, poll again."""
        if self.is_leaving:
            return
        if self._carrying is not None:
            self._in(20, self._work)
            return
        chance, theme = self.world.chance, self.world.theme
        self._polling = False
        self.machine.poll_ended(self.world.now_ms)
        for owned in sorted(self.positions):
            if (self._id_of(owned), owned.partition) not in self.world.silent:
                self.positions[owned] += chance.randint(0, 3)
        if chance.random() < 0.3:
            self._commit(lambda: None)
        ms = chance.randint(1, 3_000 if self.is_slow else 200)
        if chance.random() < self.world.stuck:
            self.world.say("%s is stuck", self.name)
            ms = theme.poll_interval_ms + chance.randint(0, theme.poll_interval_ms)
            self.stuck_until_ms = self.world.now_ms + ms
        self._in(ms, self._poll)
        self._pump()

    def _poll(self) -> None:
        if not self.is_leaving:
            self._polling = True
            self.machine.poll_began(self.world.now_ms)
            self._in(self.world.chance.randint(300, 2_000), self._work)
            self._pump()

    def _attend(self) -> None:
        """Carry out what the member is told, in poll."""
        if not self._polling or self._carrying is not None or self._is_refused:
            return
        event = self.machine.take()
        if event is None:
            return
        self._carrying = event
        self.world.say("%s carries out %s", self.name, event)
        chance = self.world.chance
        ms = chance.randint(0, 1_500 if self.is_slow else 20)
        match event:
            case Assign(partitions):
                for owned in partitions:
                    if owned.topic_id == NO_TOPIC_ID:
                        self.stamps[owned] = self._stamp(owned)
                self.assigning = partitions
                self.world.rules.after_assign(self)
            case Revoke(partitions) if not chance.randrange(4) or not self.positions.keys() & partitions:
                pass
            case Revoke():
                self._in(ms, lambda: self._commit(lambda: self._did(event)))
                return
            case Failed():
                self._is_refused = True
                self.world.failed(self)
            case _:
                pass
        self._in(ms, lambda: self._did(event))

    def _stamp(self, owned: Owned) -> UUID:
        return self._ids.get(owned.topic) or nameless(owned.topic)

    def _did(self, event: Event) -> None:
        if self._carrying is not event:
            return
        self._carrying = None
        self.assigning = frozenset()
        match event:
            case Revoke(partitions) | Lost(partitions):
                for owned in partitions:
                    self.positions.pop(owned, None)
                    self._begun.pop(owned, None)
            case _:
                pass
        self.world.say("%s did %s", self.name, type(event).__name__)
        self.machine.done(event, self.world.now_ms)
        if self.is_classic and not self.machine.owned:
            self.has_given_up = False
        for owned in [owned for owned in self.stamps if owned not in self.machine.owned]:
            del self.stamps[owned]
        if self.machine.owned - self.positions.keys() and not self._fetching:
            self._fetching = True
            self._in(0, self._fetch)
        self._pump()

    # -- positions -----------------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        wanted = self.machine.owned - self.positions.keys()
        if not wanted or self.is_leaving:
            self._fetching = False
            return
        topics: dict[tuple[str, UUID], list[int]] = {}
        for owned in sorted(wanted):
            topics.setdefault((owned.topic, owned.topic_id), []).append(owned.partition)
        asked = OffsetFetchRequestGroup(
            group_id=self.group,
            member_id=self.machine.member_id,
            member_epoch=self.machine.epoch,
            topics=[
                OffsetFetchRequestTopics(name=name, topic_id=topic_id, partition_indexes=numbers)
                for (name, topic_id), numbers in topics.items()
            ],
        )

        def fetched(reply: Any, _: Any) -> None:
            group = reply.groups[0]
            if not group.error_code:
                for topic in group.topics:
                    for part in topic.partitions:
                        for owned in wanted & self.machine.owned:
                            same = (
                                owned.topic_id == topic.topic_id if not self.is_classic else owned.topic == topic.name
                            )
                            if same and owned.partition == part.partition_index and not part.error_code:
                                self._began(owned, part.committed_offset)
            self._in(100, self._fetch)

        self._request(
            "offsets",
            OffsetFetchRequest(groups=[asked]),
            self.request_timeout_ms,
            fetched,
            lambda _: self._in(200, self._fetch),
        )

    def _began(self, owned: Owned, committed: int) -> None:
        """Begin where the group stands, or else at the log start."""
        topic = self.world.image.by_id.get(self._id_of(owned))
        start = 0 if topic is None else topic.log_start(owned.partition)
        self.positions[owned] = self._begun[owned] = start if committed < 0 else committed

    def _id_of(self, owned: Owned) -> UUID:
        return self._stamp(owned) if self.is_classic else owned.topic_id

    def _commit(self, then: Callable[[], None], attempts: int = 3) -> None:
        """Commit what is held; go on when it is done, or cannot be."""
        known = {
            owned: offset
            for owned, offset in self.positions.items()
            if owned in self.machine.owned and offset > self._begun[owned]
        }
        if not known or not self.machine.is_member:
            then()
            return
        topics: dict[tuple[str, UUID], list[OffsetCommitRequestPartition]] = {}
        for owned, offset in sorted(known.items()):
            topics.setdefault((owned.topic, owned.topic_id), []).append(
                OffsetCommitRequestPartition(partition_index=owned.partition, committed_offset=offset)
            )
        request = OffsetCommitRequest(
            group_id=self.group,
            generation_id_or_member_epoch=self.machine.epoch,
            member_id=self.machine.member_id,
            group_instance_id=self.instance,
            topics=[
                OffsetCommitRequestTopic(name=name, topic_id=topic_id, partitions=parts)
                for (name, topic_id), parts in topics.items()
            ],
        )

        def committed(reply: Any, _: Any) -> None:
            codes = {part.error_code for topic in reply.topics for part in topic.partitions}
            if codes <= {0} or attempts <= 1:
                then()
            else:
                self._in(100, lambda: self._commit(then, attempts - 1))

        def failed(_: Exception) -> None:
            if attempts > 1:
                self._in(100, lambda: self._commit(then, attempts - 1))
            else:
                then()

        self._request("offsets", request, self.request_timeout_ms, committed, failed)

    def __str__(self) -> str:
        return self.name


__all__ = ["ApiError", "Client", "ConsumerGroupHeartbeatRequest", "ErrorCode", "SimAssignor", "Standing"]
