"""A world for groups: coordinator shards, consumers of both protocols, topics, a network, and faults, out of one seed.

Real code: the coordinator with all its machines, the shard that runs it, its partition and the handlers, the members'
machines, the records and the messages, encoded. Time (`virtual_time`), the log (`groups_log`), the network
(`groups_network`), the members' shell and the applications (`groups_client`) are imitated. What must hold after every
step is in `groups_rules`; after quiet time every group must converge.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from typing import Any
from uuid import UUID

from anabranch.codec.declaration import is_declared, schema_of
from anabranch.machines.clients.membership.steps import Owned, Subscription
from anabranch.machines.groups.classic import State
from anabranch.machines.groups.consumer.group import ConsumerGroup, GroupState
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.records import Record
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.lineage import Lineage
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from anabranch.protocol.messages.consumer_group_heartbeat import TopicPartitions as BeatPartitions
from anabranch.protocol.messages.delete_groups import DeleteGroupsRequest
from anabranch.protocol.messages.heartbeat import HeartbeatRequest
from anabranch.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from tests.simulation.groups_client import Client, SimAssignor
from tests.simulation.groups_network import Connection
from tests.simulation.groups_rules import Rules
from tests.simulation.groups_shard import Broker
from tests.simulation.virtual_time import VirtualLoop

NAMES = ("a", "b", "ab", "c")
PATTERNS = ("a.*", ".*b", "[a-c]", ".*")
PARTITIONS_MAX = 8
BEGIN_MS = 1_000_000
QUIET_MAX_MS = 240_000
CHECK_EVERY_MS = 500
LOGS_EVERY_MS = 10_000
STEPS_MAX = 10_000_000


@dataclass(frozen=True, slots=True)
class Theme:
    """What a life is about; every seed has another one."""

    groups: int
    classic: float
    """The share of clients that speak the classic protocol."""
    strategies: tuple[tuple[str, ...], ...]
    static: float
    patterns: float
    local_assignors: float
    clients: int
    """How many there are at most, in each group."""
    length_ms: int
    pace_ms: int
    """Between two things that happen."""
    session_timeout_ms: int
    heartbeat_interval_ms: int
    poll_interval_ms: int
    initial_delay_ms: int
    faults: float
    """How bad the network is."""
    slow_syncs: float
    """The share of syncs that take long."""
    crashes: int
    topics: int
    """Weights of what happens."""
    ordered: float
    """The share of topics that keep keys in order when they are resized: some of their partitions wait for others."""
    silence: float
    """The share of partitions without records."""
    metadata_age_ms: int
    """How old what clients know of topics may be."""
    retention_ms: int
    """How long positions stay that nobody uses."""

    @classmethod
    def of(cls, chance: random.Random) -> Theme:
        heartbeat_ms = chance.choice((1_000, 2_000))
        return cls(
            groups=chance.choice((1, 1, 2, 3)),
            classic=chance.choice((0.0, 0.0, 0.0, 0.5, 0.5, 0.3, 1.0)),
            strategies=chance.choice(
                (
                    (("range",),),
                    (("cooperative-sticky",),),
                    (("range", "cooperative-sticky"), ("cooperative-sticky",)),
                    (("range",), ("range", "cooperative-sticky"), ("roundrobin", "range")),
                    (("sticky", "range"), ("range",)),
                    (("range",), ("cooperative-sticky",)),
                )
            ),
            static=chance.choice((0.0, 0.3, 0.8)),
            patterns=chance.choice((0.0, 0.3)),
            local_assignors=chance.choice((0.0, 0.0, 0.0, 1.0, 0.7)),
            clients=chance.choice((2, 3, 4, 6)),
            length_ms=chance.choice((15_000, 30_000, 50_000)),
            pace_ms=chance.choice((300, 800, 2_000)),
            session_timeout_ms=chance.choice((3, 5, 8)) * heartbeat_ms,
            heartbeat_interval_ms=heartbeat_ms,
            poll_interval_ms=chance.choice((4_000, 8_000, 20_000)),
            initial_delay_ms=chance.choice((0, 500, 3_000)),
            faults=chance.choice((0.0, 1.0, 1.0, 2.0)),
            slow_syncs=chance.choice((0.0, 0.02, 0.1)),
            crashes=chance.choice((0, 3, 8)),
            topics=chance.choice((0, 6, 15)),
            ordered=chance.choice((0.0, 0.6)),
            silence=chance.choice((0.0, 0.2)),
            metadata_age_ms=2_500,
            retention_ms=chance.choice((20_000, 7 * 24 * 3_600_000)),
        )


class World:
    """Everything, and one source of chance. With `show` it keeps a transcript."""

    def __init__(self, seed: int, *, show: bool = False, **changed: Any) -> None:
        """`changed` is of the theme."""
        self.seed = seed
        self.chance = random.Random(seed)
        self.theme = replace(Theme.of(self.chance), **changed)
        self.loop = VirtualLoop(seed, steps_max=STEPS_MAX)
        self.transcript: list[str] | None = [] if show else None
        self._disturbed_until_ms = 0
        self.newest_connection = 0
        self._tickets = 0
        self._names = 0
        self._incidents = True
        self.assignor_data = b"0"
        self.wrong_assignors = self.chance.choice((0.0, 0.2))
        self.slow_assignors = self.chance.choice((0.0, 0.2))
        self.stuck = self.chance.choice((0.0, 0.02))
        self.slow_syncs = self.theme.slow_syncs
        self.silent: set[tuple[UUID, int]] = set()
        """Partitions without records."""
        self._log_starts: dict[tuple[UUID, int], int] = {}
        self.connections: list[Connection] = []
        self.clients: list[Client] = []
        self.dead: list[object] = []
        """Processes that have ended: their tasks are kept, to be cancelled at the end."""
        self._unreachable: dict[str, int] = {}
        self.group_configs: dict[str, dict[str, str]] = {}
        self.rules = Rules(self)
        self._topic_ids = 0
        self.image = Image(1, {})
        self.images: list[Image] = [self.image]
        for name in NAMES[: self.chance.randint(1, len(NAMES))]:
            self._new_topic(name)
        self.settings = GroupSettings(
            consumer_session_timeout_ms=self.theme.session_timeout_ms,
            consumer_heartbeat_interval_ms=self.theme.heartbeat_interval_ms,
            min_session_timeout_ms=1_000,
            initial_rebalance_delay_ms=self.theme.initial_delay_ms,
            offsets_retention_ms=self.theme.retention_ms,
            offsets_retention_check_interval_ms=7_000,
            group_configs=lambda group_id: self.group_configs.get(group_id, {}),
        )
        self.groups = [f"g{number}" for number in range(self.theme.groups)]
        self.brokers = [Broker(self, number) for number in range(min(2, len(self.groups)))]
        self.run_until(self.now_ms)

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """The time."""
        return BEGIN_MS + round(self.loop.time() * 1000)

    def at(self, at_ms: int, do: Callable[..., object], *given: Any) -> None:
        """Let something happen then."""
        if getattr(do, "__func__", None) in _DISTURBING:
            self._disturbed_until_ms = max(self._disturbed_until_ms, at_ms)
        self.loop.call_at((at_ms - BEGIN_MS) / 1000, do, *given, context=self.loop.outside)

    def after(self, ms: int, do: Callable[..., object], *given: Any) -> None:
        """Let something happen so much later."""
        self.at(self.now_ms + ms, do, *given)

    def run_until(self, at_ms: int) -> None:
        """Let time pass."""
        self.at(at_ms, self.loop.stop)
        self.loop.run_forever()

    def failed_with(self, error: Exception) -> None:
        """End the simulation with an error that some shell would cope with."""
        self.loop.failure = self.loop.failure or error

    def end(self) -> None:
        """Close the loop."""
        self.loop.end()

    @property
    def lived_ms(self) -> int:
        """For how long."""
        return self.now_ms - BEGIN_MS

    def say(self, text: str, *given: Any) -> None:
        """Write a line of the transcript, if there is one."""
        if self.transcript is not None:
            self.transcript.append(f"{self.lived_ms:>7} {text % tuple(map(shown, given))}")

    # -- what is unique ------------------------------------------------------------------------------------------------

    def next_connection(self) -> int:
        self.newest_connection += 1
        return self.newest_connection

    def is_open(self, number: int) -> bool:
        """Whether a client still uses a connection."""
        return any(connection.number == number for connection in self.connections)

    def fresh_id(self) -> str:
        """An id as shells and clients make them; short, since it is random only to the machines."""
        self._names += 1
        return f"{self.chance.randrange(1 << 16):04x}-{self._names}"

    def next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    # -- the network ---------------------------------------------------------------------------------------------------

    def delay_ms(self) -> int:
        """How long a packet takes."""
        chance = self.chance
        if self._incidents and chance.random() < 0.03 * self.theme.faults:
            return chance.randint(20, 8_000)
        return chance.randint(1, 10)

    def reaches(self, client: Client) -> bool:
        """Whether a client can connect to its coordinator now."""
        return client.broker.shard is not None and self._unreachable.get(client.name, 0) <= self.now_ms

    def cut_off(self, broker: Broker) -> None:
        """A broker is gone: its connections are, too."""
        for connection in list(self.connections):
            if connection.broker is broker:
                self.after(self.delay_ms(), connection.close, "the broker is gone")

    # -- topics --------------------------------------------------------------------------------------------------------

    def some_image(self) -> Image:
        """Metadata as some broker has it."""
        return self.chance.choice(self.images[-2:]) if self._incidents else self.image

    def _new_topic(self, name: str) -> None:
        self._topic_ids += 1
        topic_id = UUID(int=self._topic_ids << 96 | ord(name[0]))
        count = self.chance.randint(1, 5)
        lineage = Lineage.flat(count) if self.chance.random() < self.theme.ordered else None
        for number in range(PARTITIONS_MAX):
            if self.chance.random() < self.theme.silence:
                self.silent.add((topic_id, number))
        self._put_topic(self._topic(topic_id, name, range(count), (), lineage))

    def _topic(
        self, topic_id: UUID, name: str, live: Iterable[int], retiring: Iterable[int], lineage: Lineage | None
    ) -> TopicImage:
        starts = self._log_starts
        return TopicImage(
            topic_id, name, tuple(live), tuple(retiring), lineage, lambda number: starts.get((topic_id, number), 0)
        )

    def _resize(self, topic: TopicImage, count: int) -> None:
        """Another partition count rules: retiring partitions come back first, and those that go are read to the end."""
        size = max(topic.size, count)
        lineage = topic.lineage
        if lineage is not None:
            ends = {number: self.chance.randint(0, 9) + _last_end(lineage, number) for number in range(topic.size)}
            lineage = Lineage(lineage.initial, (*lineage.counts, count), (*lineage.ends, ends))
        self._put_topic(self._topic(topic.topic_id, topic.name, range(count), range(count, size), lineage))

    def _reap(self, topic: TopicImage) -> None:
        """The last of the retiring partitions is empty, and goes."""
        *retiring, gone = topic.retiring
        lineage = topic.lineage
        if lineage is not None:
            ends = tuple({number: end for number, end in ends.items() if number != gone} for ends in lineage.ends)
            lineage = Lineage(lineage.initial, lineage.counts, ends)
        self._put_topic(self._topic(topic.topic_id, topic.name, topic.partitions, retiring, lineage))

    def _put_topic(self, topic: TopicImage) -> None:
        self._set_image({**self.image.by_name, topic.name: topic})

    def _set_image(self, topics: Mapping[str, TopicImage]) -> None:
        self.image = Image(self.image.version + 1, dict(sorted(topics.items())))
        self.images.append(self.image)
        self.say(
            "topics: %s",
            " ".join(f"{t.name}={len(t.partitions)}+{len(t.retiring)}" for t in self.image.by_name.values()),
        )
        for broker in getattr(self, "brokers", ()):
            self.after(self.chance.choice((0, 0, 300, 1_500)), broker.tell_topics)

    # -- who is there --------------------------------------------------------------------------------------------------

    def broker_of(self, group_id: str) -> Broker:
        return self.brokers[self.groups.index(group_id) % len(self.brokers)]

    def clients_of(self, group_id: str) -> Iterator[Client]:
        """The processes that are, by name, of a group."""
        return (client for client in self.clients if client.group == group_id)

    def gone(self, client: Client) -> None:
        """A process has ended."""
        self.clients.remove(client)
        self.dead.append(client)

    def failed(self, client: Client) -> None:
        """The group refuses it: whoever runs it starts it anew after a while."""
        self.after(self.chance.randint(500, 3_000), self._again, client)

    def _again(self, client: Client) -> None:
        if client.is_alive:
            self._bounced(client, client.is_classic)

    def start(self, group_id: str, *, instance: str | None = None, classic: bool | None = None) -> Client:
        """A process begins."""
        chance, theme = self.chance, self.theme
        if classic is None:
            classic = chance.random() < theme.classic
        local: tuple[SimAssignor, ...] = ()
        if not classic and chance.random() < theme.local_assignors:
            names = chance.choice((("mine",), ("mine",), ("mine", "yours"), ("yours", "mine")))
            local = tuple(SimAssignor(self, name) for name in names)
        self._names += 1
        client = Client(
            self,
            f"{'k' if classic else 'c'}{self._names}",
            group_id,
            classic=classic,
            instance=instance,
            subscription=self.subscription(),
            strategies=chance.choice(theme.strategies),
            server_assignor=None if local else chance.choice((None, None, "uniform", "range")),
            local_assignors=local,
        )
        self.clients.append(client)
        self.say(
            "%s begins in %s: %s%s", client.name, group_id, client.subscription, f" as {instance}" * bool(instance)
        )
        return client

    def subscription(self) -> Subscription:
        """Something to read."""
        chance = self.chance
        if chance.random() < self.theme.patterns:
            return Subscription(pattern=chance.choice(PATTERNS))
        if chance.random() < 0.6:
            return Subscription(frozenset(NAMES[:2]))
        return Subscription(frozenset(chance.sample(NAMES, chance.randint(1, 3))))

    # -- what happens --------------------------------------------------------------------------------------------------

    def incident(self) -> None:
        """Something happens; and later something else."""
        if not self._incidents:
            return
        weights = [weight(self.theme) for weight, _ in _INCIDENTS]
        _, happen = self.chance.choices(_INCIDENTS, weights)[0]
        happen(self)
        self.after(self.chance.randint(1, 2 * self.theme.pace_ms), self.incident)

    def a_client(self) -> Client | None:
        return self.chance.choice(self.clients) if self.clients else None

    def join(self) -> None:
        group_id = self.chance.choice(self.groups)
        there = list(self.clients_of(group_id))
        if len(there) >= self.theme.clients:
            return
        instance = None
        if self.chance.random() < self.theme.static:
            used = {client.instance for client in there}
            free = [name for name in ("i1", "i2", "i3") if name not in used]
            # Now and then two processes are given the same name.
            instance = self.chance.choice(free or ["i1"]) if self.chance.random() < 0.95 else "i1"
        self.start(group_id, instance=instance)

    def leave(self) -> None:
        client = self.a_client()
        if client is not None:
            client.leave(stay=self.chance.choice((None, None, True, False)))

    def bounce(self) -> None:
        """A process ends, well or badly, and another one takes its place, perhaps of the other protocol."""
        client = self.a_client()
        if client is None or client.is_leaving:
            return
        if self.chance.random() < 0.5:
            client.kill()
        else:
            client.leave()
        classic = client.is_classic
        if self.chance.random() < 0.3 and self.theme.classic:
            classic = not classic
        self.after(self.chance.randint(50, 6_000), self._bounced, client, classic)

    def _bounced(self, client: Client, classic: bool) -> None:
        client.kill()
        if self._incidents or not self._is_used(client.group, client.instance):
            self.start(client.group, instance=client.instance, classic=classic)

    def _is_used(self, group_id: str, instance: str | None) -> bool:
        return instance is not None and any(client.instance == instance for client in self.clients_of(group_id))

    def pause(self) -> None:
        client = self.a_client()
        if client is not None:
            client.pause(self.chance.choice((500, 3_000, self.theme.session_timeout_ms * 2)))

    def subscribe(self) -> None:
        client = self.a_client()
        if client is not None:
            client.subscribe(self.subscription())

    def choose_assignor(self) -> None:
        self.assignor_data = str(self.chance.randrange(5)).encode()

    def stall(self) -> None:
        if self.connections:
            connection = self.chance.choice(self.connections)
            connection.stall(self.chance.choice((1_000, 3_000, 8_000)), up=self.chance.random() < 0.7)

    def reset(self) -> None:
        if self.connections:
            self.chance.choice(self.connections).close("reset")

    def isolate(self) -> None:
        """A client reaches nobody for a while, and what it has sent is stuck."""
        client = self.a_client()
        if client is not None:
            ms = self.chance.choice((1_000, 4_000, 2 * self.theme.session_timeout_ms))
            self.say("%s is cut off for %d ms", client.name, ms)
            self._unreachable[client.name] = self.now_ms + ms
            for connection in self.connections:
                if connection.client_id == client.name:
                    connection.stall(ms, up=True)
                    connection.stall(ms, up=False)

    def crash(self) -> None:
        broker = self.chance.choice(self.brokers)
        happens = self.chance.random()
        if happens < 0.6:
            broker.crash()
        elif happens < 0.8:
            broker.log.refuses = True
        else:
            broker.fails_sync = True

    def compact(self) -> None:
        self.chance.choice(self.brokers).compact()

    def change_topics(self) -> None:
        """Topics come, go, come again, grow and shrink."""
        chance = self.chance
        name = chance.choice(NAMES)
        topic = self.image.by_name.get(name)
        if topic is None:
            self._new_topic(name)
            return
        count = len(topic.partitions)
        least = 1 if topic.lineage is None else topic.lineage.initial
        match chance.choice(("grow", "grow", "shrink", "shrink", "reap", "delete", "again", "forget")):
            case "grow" if topic.size < PARTITIONS_MAX:
                self._resize(topic, count + chance.randint(1, 3))
            case "shrink" if count > least:
                self._resize(topic, chance.randint(least, count - 1))
            case "reap" if topic.retiring:
                self._reap(topic)
            case "delete":
                self._set_image({other: known for other, known in self.image.by_name.items() if other != name})
            case "again":
                self._new_topic(name)
            case "forget" if topic.lineage is not None:
                number = chance.randrange(topic.size)
                self._log_starts[topic.topic_id, number] = _last_end(topic.lineage, number)
                self.say("%s-%d starts at %d", name, number, topic.log_start(number))
            case _:
                pass

    def configure(self) -> None:
        """A group's config changes: it counts from each member's next heartbeat on."""
        chance = self.chance
        factor = chance.choice((3, 5, 8))
        configs = {"consumer.session.timeout.ms": str(factor * self.theme.heartbeat_interval_ms)}
        group_id = chance.choice(self.groups)
        self.group_configs[group_id] = configs if chance.random() < 0.7 else {}
        self.say("%s has configs %s", group_id, self.group_configs[group_id])

    def expel(self) -> None:
        """An administrator takes a member out."""
        group_id = self.chance.choice(self.groups)
        broker = self.broker_of(group_id)
        group = None if broker.machine is None else broker.machine.groups.get(group_id)
        if group is not None and group.members:
            identity = MemberIdentity(member_id=self.chance.choice(sorted(group.members)))
            request = LeaveGroupRequest(group_id=group_id, members=[identity])
            self.say("an administrator says %s", request)
            broker.administrate(request, 5)

    def forget_offsets(self) -> None:
        """An administrator deletes what a group has committed of a topic that nobody reads."""
        group_id, name = self.chance.choice(self.groups), self.chance.choice(NAMES)
        parts = [OffsetDeleteRequestPartition(partition_index=number) for number in range(PARTITIONS_MAX)]
        request = OffsetDeleteRequest(group_id=group_id, topics=[OffsetDeleteRequestTopic(name=name, partitions=parts)])
        self.broker_of(group_id).administrate(request, 0)

    def delete_group(self) -> None:
        group_id = self.chance.choice(self.groups)
        broker = self.broker_of(group_id)
        if broker.machine is not None:
            group = broker.machine.groups.get(group_id)
            if self.chance.random() < 0.7 and group is not None and group.members:
                return
            self.say("an administrator deletes %s", group_id)
            broker.administrate(DeleteGroupsRequest(groups_names=[group_id]), 2)

    def stranger(self) -> None:
        """Somebody who is no member, or not any more, says something: it changes nothing."""
        chance = self.chance
        group_id = chance.choice(self.groups)
        broker = self.broker_of(group_id)
        if broker.machine is None:
            return
        group = broker.machine.groups.get(group_id)
        member_id, epoch = "stranger", chance.choice((1, 5, 1 << 30))
        if group is not None and group.members and chance.random() < 0.7:
            member_id = chance.choice(sorted(group.members))
            epoch = 1 << 30
            if isinstance(group, ConsumerGroup):
                member = group.members[member_id]
                old = [one for one in range(1, member.epoch) if one != member.previous_epoch]
                epoch = chance.choice([*old, epoch])
        topics = [BeatPartitions(topic_id=topic_id, partitions=[0]) for topic_id in self.image.by_id]
        part = OffsetCommitRequestPartition(partition_index=0, committed_offset=1 << 40)
        request = chance.choice(
            (
                ConsumerGroupHeartbeatRequest(
                    group_id=group_id, member_id=member_id, member_epoch=epoch, topic_partitions=topics
                ),
                ConsumerGroupHeartbeatRequest(group_id=group_id, member_id="stranger", member_epoch=-1),
                ConsumerGroupHeartbeatRequest(
                    group_id=group_id, member_id="stranger", member_epoch=-2, instance_id="i1"
                ),
                HeartbeatRequest(group_id=group_id, member_id=member_id, generation_id=epoch),
                OffsetCommitRequest(
                    group_id=group_id,
                    member_id=member_id,
                    generation_id_or_member_epoch=epoch,
                    topics=[OffsetCommitRequestTopic(name=name, partitions=[part]) for name in self.image.by_name],
                ),
            )
        )
        version = 9 if isinstance(request, OffsetCommitRequest) else 1
        end = broker.log.end
        self.say("a stranger says %s", request)

        def answered(reply: Any) -> None:
            self.say("  answer to a stranger: %s", reply)
            if isinstance(request, OffsetCommitRequest):
                assert all(part.error_code for topic in reply.topics for part in topic.partitions), (request, reply)
            else:
                assert reply.error_code, (request, reply)

        broker.handle(request, version, "stranger", 1 << 40, answered)
        assert broker.log.end == end, request

    # -- a life --------------------------------------------------------------------------------------------------------

    def live(self) -> None:
        """A life with incidents, then quiet; then everything is checked."""
        try:
            self._live()
        finally:
            self.end()

    def _live(self) -> None:
        for group_id in self.groups:
            for _ in range(self.chance.randint(1, self.theme.clients)):
                self.start(group_id)
        self.after(self.chance.randint(1, 3_000), self.incident)
        end_ms = self.now_ms + self.theme.length_ms
        while self.now_ms < end_ms:
            self.run_until(self.now_ms + LOGS_EVERY_MS)
            self._check_logs()
        self.heal()
        deadline_ms = self.now_ms + QUIET_MAX_MS
        # What is under way may yet arrive, who is yet to begin begins, and clients hear what topics there are.
        late = [connection.stalled_until_ms for connection in self.connections]
        self.run_until(max([self.now_ms + self.theme.metadata_age_ms, self._disturbed_until_ms, *late]))
        while (missing := self.missing()) is not None:
            assert self.now_ms < deadline_ms, missing
            self.run_until(self.now_ms + CHECK_EVERY_MS)
        self.say("all groups have converged")
        until_ms = self.now_ms + 3 * self.theme.heartbeat_interval_ms
        self.run_until(until_ms)
        assert self.missing() is None, f"converged, and then: {self.missing()}"
        self._check_logs()

    def _check_logs(self) -> None:
        for broker in self.brokers:
            broker.check_replay()
            if broker.machine is not None:
                self.rules.check_machine(broker, broker.machine)

    def heal(self) -> None:
        """From now on nothing happens."""
        self.say("quiet")
        self._incidents = False
        self._unreachable.clear()
        self.wrong_assignors = self.slow_assignors = self.stuck = self.slow_syncs = 0.0
        self.assignor_data = b"well"
        for broker in self.brokers:
            broker.log.refuses = broker.fails_sync = False
            self.after(0, broker.tell_topics)
        for client in list(self.clients):
            client.resume()
            namesakes = [one for one in self.clients_of(client.group) if one.instance == client.instance]
            if client.instance is not None and len(namesakes) > 1:
                client.kill()
        for group_id in self.groups:
            # A static leader that was started anew does not learn what had changed while it was away (KIP-814): as
            # soon as the group rebalances it does.
            if any(client.is_classic and client.instance for client in self.clients_of(group_id)):
                self.start(group_id, classic=True)

    def missing(self) -> str | None:
        """What is not yet as it should be; None when all groups have converged."""
        for group_id in self.groups:
            reason = self._missing_in(group_id)
            if reason is not None:
                return f"{group_id}: {reason}"
        return None

    def _missing_in(self, group_id: str) -> str | None:
        machine = self.broker_of(group_id).machine
        if machine is None:
            return f"{self.broker_of(group_id)} is not there"
        group = machine.groups.get(group_id)
        clients = [client for client in self.clients_of(group_id) if not client.has_nothing_to_read]
        for client in clients:
            if not client.is_in or client.is_leaving or client.stuck_until_ms > self.now_ms:
                return f"{client.name} is not in: {client.machine.phase}"  # type: ignore[attr-defined]
            if client.due is not None:
                return f"{client.name} has yet to carry out {client.due}"
        ids = {client.machine.member_id: client for client in clients}
        members = {} if group is None else group.members
        if ids.keys() != members.keys():
            return f"the members are {sorted(ids)}, to the coordinator {sorted(members)}"
        if group is None or not clients:
            return None
        if isinstance(group, ConsumerGroup):
            if group.state() is not GroupState.STABLE:
                return f"it is {group.state()}: {group}"
            for member_id, client in ids.items():
                if client.machine.epoch != group.epoch:
                    return f"{client.name} is at epoch {client.machine.epoch} of {group.epoch}"
                if not client.is_classic and client.holds != frozenset(group.members[member_id].holds):
                    return f"{client.name} has {client.holds} of {group.members[member_id]}"
        elif group.state is not State.STABLE:
            return f"it is {group.state}"
        else:
            for client in clients:
                if client.machine.epoch != group.generation:
                    return f"{client.name} is at generation {client.machine.epoch} of {group.generation}"
        return self._missing_partitions(clients)

    def _missing_partitions(self, clients: list[Client]) -> str | None:
        """By name: classic clients do not notice that a topic is another one if it has as many partitions."""
        wanted: set[tuple[str, int]] = set()
        held: list[tuple[str, int]] = []
        for client in clients:
            topics = [topic for topic in self.image.by_name.values() if reads(client.reads, topic.name)]
            mine = {(topic.name, number) for topic in topics for number in (*topic.partitions, *topic.retiring)}
            wanted |= mine
            held += client.names
            if client.names - mine:
                return f"{client.name} has {sorted(client.names - mine)}, to which it does not subscribe"
        twice = [name for name, count in Counter(held).items() if count > 1]
        if twice or set(held) != wanted:
            return f"partitions {sorted(wanted - set(held))} are nobody's, {sorted(twice)} are two members'"
        return None


def _last_end(lineage: Lineage, partition: int) -> int:
    """Where the newest segment of a partition begins."""
    return max((ends[partition] for ends in lineage.ends if partition in ends), default=0)


def reads(wanted: Subscription | None, name: str) -> bool:
    """Whether a topic is subscribed to."""
    import re2

    if wanted is None:
        return False
    if wanted.pattern is not None:
        return re2.compile(wanted.pattern).fullmatch(name) is not None
    return name in wanted.topics


_DISTURBING = (Connection._arrive, World._bounced, World._again)
_INCIDENTS: tuple[tuple[Callable[[Theme], float], Callable[[World], object]], ...] = (
    (lambda theme: 10, World.join),
    (lambda theme: 4, World.leave),
    (lambda theme: 8, World.bounce),
    (lambda theme: 3, World.pause),
    (lambda theme: 4, World.subscribe),
    (lambda theme: 2 * theme.local_assignors, World.choose_assignor),
    (lambda theme: 12 * theme.faults, World.stall),
    (lambda theme: 6 * theme.faults, World.reset),
    (lambda theme: 3 * theme.faults, World.isolate),
    (lambda theme: theme.crashes, World.crash),
    (lambda theme: 4, World.compact),
    (lambda theme: theme.topics, World.change_topics),
    (lambda theme: 1, World.delete_group),
    (lambda theme: 1, World.configure),
    (lambda theme: 1, World.expel),
    (lambda theme: 1, World.forget_offsets),
    (lambda theme: 3, World.stranger),
)


def shown(value: Any) -> Any:
    """A value for the transcript: what is default left out, sets in order, nothing that differs from run to run."""
    match value:
        case Enum():
            return value.name
        case bool() | int() | str() | None:
            return value
        case UUID():
            return f"#{value.int >> 96}" if value.int >> 96 < 1 << 24 else value.bytes.decode().strip()
        case frozenset() | set():
            return "{" + ", ".join(sorted(str(shown(one)) for one in value)) + "}"
        case bytes() | memoryview():
            return bytes(value).hex() or "-"
        case Record(key, body):
            return f"{shown(key)} = {shown(body)}"
        case Mapping():
            return "{" + ", ".join(f"{shown(key)}: {shown(one)}" for key, one in value.items()) + "}"
        case Owned(topic, partition, topic_id):
            return f"{topic}-{partition}" + (f" ({shown(topic_id)})" if topic_id.int else "")
        case list() | tuple():
            return "[" + ", ".join(str(shown(one)) for one in value) + "]"
        case _ if is_declared(type(value)):
            names = [
                name
                for name, field in schema_of(type(value)).fields.items()
                if getattr(value, name) not in (field.default, [], ()) or name in _ALWAYS
            ]
        case _ if is_dataclass(value):
            names = [one.name for one in fields(value)]
        case _:
            return str(value)
    return f"{type(value).__name__}({', '.join(f'{name}={shown(getattr(value, name))}' for name in names)})"


_ALWAYS = ("member_epoch", "topic_partitions", "assigned_partitions")

__all__ = ["Theme", "World", "shown"]
