"""A world for groups: coordinator shards, consumers of both protocols, topics, a network, and faults, out of one seed.

Real code: the coordinator with all its machines, the shard that runs it, its partition and the handlers, the members'
machines and shell, the fetcher, the records and the messages, encoded. Time (`virtual_time`), the log (`groups_log`),
the network (`groups_network`), the topics with their records (`groups_records`) and the applications (`groups_client`)
are imitated. What must hold after every step is in `groups_rules`, and what applications are handed keeps the promise
of ordering.md (`groups_records.GroupEdge`); after quiet time every group must converge, with everything read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import UUID

from anabranch.machines.clients.membership.steps import Owned, Subscription
from anabranch.machines.groups.classic import ClassicState
from anabranch.machines.groups.consumer.group import ConsumerGroup, GroupState
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, common, union
from anabranch.machines.progress import NEVER_REWRITTEN
from tests.simulation.groups_client import Client, SimAssignor
from tests.simulation.groups_clock import Chance
from tests.simulation.groups_incidents import INCIDENTS
from tests.simulation.groups_keys import keys_of
from tests.simulation.groups_network import Connection
from tests.simulation.groups_reader import LongPolls
from tests.simulation.groups_records import GroupEdge, StockEdge, Topic
from tests.simulation.groups_rules import ANSWERED_IN_MS, PACKET_MAX_MS, Rules
from tests.simulation.groups_shard import Broker
from tests.simulation.groups_shared_topics import SharedEdge, SharedTopic
from tests.simulation.groups_sharers import SharingClient
from tests.simulation.groups_theme import NAMES, PATTERNS, Theme
from tests.simulation.groups_transactions import Transactions
from tests.simulation.groups_transcript import shown
from tests.simulation.virtual_time import VirtualLoop

BEGIN_MS = 1_000_000
QUIET_MAX_MS = 240_000
CHECK_EVERY_MS = 500
LOGS_EVERY_MS = 10_000
STEPS_MAX = 10_000_000
"""Records of a partition in the layout that rules."""


class World:
    """Everything, and one source of chance. With `show` it keeps a transcript."""

    def __init__(self, seed: int, *, show: bool = False, **changed: Any) -> None:
        """`changed` is of the theme."""
        self.seed = seed
        self.chance = Chance(seed)
        self.theme = replace(Theme.of_seed(seed, self.chance), **changed)
        self.loop = VirtualLoop(seed, steps_max=STEPS_MAX)
        self.transcript: list[str] | None = [] if show else None
        self._disturbed_until_ms = 0
        self.answered_until_ms = 0
        """When the last question about topics and coordinators that is under way is answered."""
        self.upheavals = 0
        """Members that began, were removed, or lost their partitions: after each, groups have to converge once more."""
        self.newest_connection = 0
        self._tickets = 0
        self._names = 0
        self._incidents = True
        self.quiet_since_ms = 1 << 60
        self.assignor_data = b"0"
        self.wrong_assignors = self.chance.choice((0.0, 0.2))
        self.slow_assignors = self.chance.choice((0.0, 0.2))
        self.stuck = self.chance.choice((0.0, 0.02))
        self.slow_syncs = self.theme.slow_syncs
        self.topics: dict[str, Topic] = {}
        self.topics_by_life: dict[str, Topic] = {}
        """With those that were deleted."""
        self._topics_by_id: dict[UUID, Topic] = {}
        self._made_again: set[UUID] = set()
        self.connections: list[Connection] = []
        self.long_polls = LongPolls()
        self.clients: list[Client] = []
        self.dead: list[object] = []
        """Processes that have ended: their tasks are kept, to be cancelled at the end."""
        self._unreachable: dict[str, int] = {}
        self.group_configs: dict[str, dict[str, str]] = {}
        self.rules = Rules(self)
        self.transactions = Transactions(self)
        self.groups = [f"g{number}" for number in range(self.theme.groups)]
        self.latest = frozenset(group_id for group_id in self.groups if self.chance.random() < self.theme.latest)
        """The groups that begin at the end."""
        stock = random.Random(f"stock groups {seed}")
        self.stock = frozenset(group_id for group_id in self.groups if stock.random() < self.theme.stock_groups)
        """The groups whose members are stock consumers."""
        self.edges = {group_id: self._edge(group_id) for group_id in self.groups}
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
            offsets_retention_ms=7 * 24 * 3_600_000 if self.latest else self.theme.retention_ms,
            offsets_retention_check_interval_ms=7_000,
            group_configs=lambda group_id: self.group_configs.get(group_id, {}),
            ranges_per_partition_max=self.theme.ranges_max,
        )
        self.brokers = [Broker(self, number) for number in range(min(2, len(self.groups)))]
        self.run_until(self.now_ms)

    # -- time ----------------------------------------------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """The time."""
        return BEGIN_MS + self.loop.now_ms

    def at(self, at_ms: int, do: Callable[..., object], *given: Any) -> None:
        """Call a function at that time."""
        if getattr(do, "__func__", None) in _DISTURBING:
            self._disturbed_until_ms = max(self._disturbed_until_ms, at_ms)
        self.loop.call_at((at_ms - BEGIN_MS) / 1000, do, *given, context=self.loop.outside)

    def after(self, ms: int, do: Callable[..., object], *given: Any) -> None:
        """Call a function after a delay."""
        self.at(BEGIN_MS + self.loop.now_ms + ms, do, *given)

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
        return self.loop.now_ms

    def say(self, text: str, *given: Any) -> None:
        """Write a line of the transcript, if one is kept."""
        if self.transcript is not None:
            self.transcript.append(f"{self.lived_ms:>7} {text % tuple(map(shown, given))}")

    # -- unique numbers ------------------------------------------------------------------------------------------------

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
            return chance.randint(20, ANSWERED_IN_MS)
        return chance.randint(1, PACKET_MAX_MS)

    @property
    def is_disturbed(self) -> bool:
        """Whether faults happen now."""
        return self._incidents

    def reaches(self, client: Client) -> bool:
        """Whether a client can connect to its coordinator now."""
        return client.broker.shard is not None and self._unreachable.get(client.name, 0) <= self.now_ms

    def cut_off(self, broker: Broker) -> None:
        """A broker is gone: its connections are, too."""
        for connection in list(self.connections):
            if connection.broker is broker:
                self.after(self.delay_ms(), connection.close, "the broker is gone")

    # -- topics --------------------------------------------------------------------------------------------------------

    def _edge(self, group_id: str) -> GroupEdge:
        edge = SharedEdge if self.theme.sharing else StockEdge if group_id in self.stock else GroupEdge
        return edge(self, group_id, reads_latest=group_id in self.latest)

    def some_image(self) -> Image:
        """Metadata as some broker has it."""
        return self.chance.choice(self.images[-2:]) if self._incidents else self.image

    def _new_topic(self, name: str) -> None:
        self._topic_ids += 1
        topic_id = UUID(int=self._topic_ids << 96 | ord(name[0]))
        ordered = self.chance.random() < self.theme.ordered
        count, news = self.chance.randint(1, 2 if self.theme.sharing else 5), self.long_polls.news
        make = SharedTopic.by_chance(self.chance, self.theme) if self.theme.sharing else Topic
        topic = make(topic_id, name, count, self.theme.keys, ordered=ordered, on_append=news)
        compacted = random.Random(f"compacted {self.seed} {topic.life}").random()
        topic.is_compacted = compacted < self.theme.compacted
        self.topics[name] = self.topics_by_life[topic.life] = self._topics_by_id[topic_id] = topic
        if any(other.name == name and other is not topic for other in self.topics_by_life.values()):
            self._made_again.add(topic_id)
        self._put_topic(topic)

    def _give_up_order(self, name: str) -> None:
        """An administrator sets `enable.ordered.delivery` to false."""
        self.topics[name].ordered = False
        self.say("%s keeps no order any more", name)
        self._put_topic(self.topics[name])

    def _delete_topic(self, name: str) -> None:
        del self.topics[name]
        self._set_image({other: known for other, known in self.image.by_name.items() if other != name})
        self.long_polls.news(name)

    def topic_of(self, topic_id: UUID) -> Topic | None:
        """A topic, also one that was deleted."""
        return self._topics_by_id.get(topic_id)

    def is_ambiguous(self, topic: Topic) -> bool:
        """Whether members of a classic group may commit offsets of an earlier topic of the same name in it."""
        return topic.topic_id in self._made_again and self.theme.classic > 0

    def _resize(self, image: TopicImage, count: int) -> None:
        """Another partition count rules: retiring partitions come back first, and those that go are read to the end."""
        topic = self.topics[image.name]
        topic.resize(count, self.now_ms)
        self._put_topic(topic)

    def _delete_records(self, image: TopicImage, number: int) -> None:
        """Retention, or DeleteRecords."""
        log = self.topics[image.name].logs[number]
        log.delete_before(self.chance.choice((log.end, self.chance.randint(log.start, log.end))))
        self.say("%s-%d starts at %d", image.name, number, log.start)

    def _clean(self, name: str) -> None:
        """The cleaner drops records that have a newer one; it leaves the newest segments alone."""
        logs = sorted(self.topics[name].logs.items())
        ends = {number: self.chance.choice((log.end, self.chance.randint(log.start, log.end))) for number, log in logs}
        dropped = self.topics[name].compact(ends)
        self.rules.counts["compacted"] += dropped
        self.say("%s is compacted up to %s: %d records go", name, ends, dropped)

    def _reap(self, image: TopicImage) -> None:
        """The last of the retiring partitions is emptied, and goes with those before it that are empty."""
        topic = self.topics[image.name]
        log = topic.logs[max(topic.logs)]
        log.delete_before(log.end)
        topic.reap()
        self._put_topic(topic)

    def _produce(self) -> None:
        """Some records, or the end of a transaction; and the same again after a while."""
        if not self._incidents:
            return
        for _ in range(self.chance.randint(1, 3) if self.topics else 0):
            topic = self.chance.choice(sorted(self.topics.values(), key=lambda topic: topic.name))
            if self.chance.random() < self.theme.markers:
                topic.mark(self.chance.randrange(topic.count))
            else:
                topic.send(self.chance.randrange(topic.keys))
        self.after(self.chance.randint(1, 2 * self.theme.records_ms), self._produce)

    def was_assigned(self, client: Client, partitions: Iterable[Owned]) -> None:
        """Show the edge that a client was given partitions."""
        edge = self.edges[client.group]
        for owned in partitions:
            topic = self.topic_of(owned.topic_id) if owned.topic_id.int else self.topics.get(owned.topic)
            if topic is not None:
                edge.granted(client, topic, owned)

    def _put_topic(self, topic: Topic) -> None:
        self._set_image({**self.image.by_name, topic.name: image_of(topic)})
        self.long_polls.news(topic.name)

    def _set_image(self, topics: Mapping[str, TopicImage]) -> None:
        self.image = Image(self.image.version + 1, dict(sorted(topics.items())))
        self.images.append(self.image)
        self.say(
            "topics: %s",
            " ".join(f"{t.name}={len(t.partitions)}+{len(t.retiring)}" for t in self.image.by_name.values()),
        )
        for broker in getattr(self, "brokers", ()):
            self.after(self.chance.choice((0, 0, 300, 1_500)), broker.tell_topics)

    # -- the inhabitants -----------------------------------------------------------------------------------------------

    def broker_of(self, group_id: str) -> Broker:
        return self.brokers[self.groups.index(group_id) % len(self.brokers)]

    def clients_of(self, group_id: str) -> Iterator[Client]:
        """The processes that are, by name, of a group."""
        return iter([client for client in self.clients if client.group == group_id])

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
        self.upheavals += 1
        chance, theme = self.chance, self.theme
        if classic is None:
            classic = chance.random() < theme.classic
        local: tuple[SimAssignor, ...] = ()
        if not classic and chance.random() < theme.local_assignors:
            names = chance.choice((("mine",), ("mine",), ("mine", "yours"), ("yours", "mine")))
            local = tuple(SimAssignor(self, name) for name in names)
        self._names += 1
        make: Callable[..., Client] = Client
        if theme.sharing:
            make = partial(SharingClient, shares=not classic and chance.random() < theme.sharing)
        client = make(
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
        self.edges[group_id].began(is_classic=classic)
        self.say(
            "%s begins in %s: %s%s", client.name, group_id, client.subscription, f" as {instance}" * bool(instance)
        )
        return client

    def subscription(self) -> Subscription:
        """Records appear at the end of a partition."""
        chance = self.chance
        if chance.random() < self.theme.patterns:
            return Subscription(pattern=chance.choice(PATTERNS))
        if chance.random() < 0.6:
            return Subscription(frozenset(NAMES[:2]))
        return Subscription(frozenset(chance.sample(NAMES, chance.randint(1, 3))))

    # -- incidents -----------------------------------------------------------------------------------------------------

    def incident(self) -> None:
        """Begin one incident, and schedule the next one."""
        if not self._incidents:
            return
        weights = [weight(self.theme) for weight, _ in INCIDENTS]
        _, happen = self.chance.choices(INCIDENTS, weights)[0]
        happen(self)
        self.after(self.chance.randint(1, 2 * self.theme.pace_ms), self.incident)

    def _bounced(self, client: Client, classic: bool) -> None:
        client.kill()
        if self._incidents or not self._is_used(client.group, client.instance):
            self.start(client.group, instance=client.instance, classic=classic)

    def _is_used(self, group_id: str, instance: str | None) -> bool:
        return instance is not None and any(client.instance == instance for client in self.clients_of(group_id))

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
        self.after(1, self._produce)
        end_ms = self.now_ms + self.theme.length_ms
        while self.now_ms < end_ms:
            self.run_until(self.now_ms + LOGS_EVERY_MS)
            self._check_logs()
        self.heal()
        # Messages under way arrive, clients that have not begun begin, and clients learn the topics.
        late = [self.answered_until_ms, *(connection.stalled_until_ms for connection in self.connections)]
        self.run_until(max([self.now_ms + self.theme.metadata_age_ms, self._disturbed_until_ms, *late]))
        self._converge()
        if self.theme.classic:
            self._rebalance_once_more()
        self._check_logs()

    def _converge(self) -> None:
        """Wait until all groups have what they are to have, and have read everything."""
        deadline_ms = self.now_ms + QUIET_MAX_MS
        upheavals = -1
        while (missing := self.missing() or self._in_doubt()) is not None or upheavals != self.upheavals:
            assert self.now_ms < deadline_ms, missing
            if missing is not None:
                self.run_until(self.now_ms + CHECK_EVERY_MS)
                continue
            self.say("all groups have converged")
            upheavals = self.upheavals
            self.run_until(self.now_ms + 3 * self.theme.heartbeat_interval_ms)
            missing = self.missing()
            assert missing is None or upheavals != self.upheavals, f"converged, and then: {missing}"

    def _in_doubt(self) -> str | None:
        """What may go on when all has been read: an application that went back commits it a second time."""
        doubtful = [client.name for client in self.clients if client.is_in_doubt]
        if doubtful or self.transactions.open():
            return f"transactions of {sorted(self.transactions.open())} are open, and {doubtful} have yet to commit"
        return None

    def _rebalance_once_more(self) -> None:
        """Give every group another member for a while, then send some records; nothing else happens that mends a fault.

        Eager members lose all partitions twice, and what they have been told of others' partitions with them, when
        nothing is left to read; what is read then depends on what they know again.
        """
        passing = [self.start(group_id) for group_id in self.groups if any(self.clients_of(group_id))]
        self.run_until(self.now_ms + self.theme.metadata_age_ms)  # They begin, and learn the topics of their patterns.
        self._converge()
        for client in passing:
            client.leave()
        self._converge()
        for _, topic in sorted(self.topics.items()):
            for key in range(topic.keys):
                if self.chance.random() < 0.5:
                    topic.send(key)
        self._converge()

    def _check_logs(self) -> None:
        for broker in self.brokers:
            broker.check_replay()
            if broker.machine is not None and broker.machine.is_loaded:
                self.rules.check_machine(broker, broker.machine)

    def heal(self) -> None:
        """From now on nothing happens."""
        self.say("quiet")
        self._incidents, self.quiet_since_ms = False, self.now_ms
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
            # A restarted static leader learns the changes of the meantime with the next rebalance only (KIP-814).
            if any(client.is_classic and client.instance for client in self.clients_of(group_id)):
                self.start(group_id, classic=True)

    def missing(self) -> str | None:
        """Return the first thing that has not converged; None when all groups have."""
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
        for client in self.clients_of(group_id):
            learns_ms = max(client.begun_ms + self.theme.metadata_age_ms, client.told_ms)
            if client.has_nothing_to_read and self.now_ms <= learns_ms:
                return f"{client.name} has just begun, and does not know the topics yet"
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
                told = [one.metadata for one in group.members[member_id].described.client_assignors]
                if any(data != self.assignor_data for data in told):  # Its request was lost: the next one changes that.
                    return f"{client.name} has yet to tell what its assignor says"
                if not client.is_classic and client.keys != keys_of(group.members[member_id]):
                    return f"{client.name} has {client.keys} of {group.members[member_id]}"
        elif group.state is not ClassicState.STABLE:
            return f"it is {group.state}"
        else:
            for client in clients:
                if client.machine.epoch != group.generation:
                    return f"{client.name} is at generation {client.machine.epoch} of {group.generation}"
            if not any(client.machine._leads for client in clients):  # type: ignore[attr-defined]
                # A static leader that was started anew, with JoinGroup before v9, does not learn that it leads: no
                # member watches the topics until the next rebalance (why KIP-814 added `skip_assignment`).
                return None
        return self._missing_partitions(clients)

    def _unread(self, clients: list[Client]) -> str | None:
        """What the applications of a group have not been handed."""
        edge = self.edges[clients[0].group]
        for topic in self.topics.values():
            subscribed = any(reads(client.reads, topic.name) for client in clients)
            if subscribed and topic.ordered and not self.is_ambiguous(topic):
                unread = edge.unread(topic)
                if unread is not None:
                    return unread
        return None

    def _missing_partitions(self, clients: list[Client]) -> str | None:
        """By name: classic clients do not notice that a topic is another one if it has as many partitions."""
        wanted: set[tuple[str, int]] = set()
        held: dict[tuple[str, int], Ranges] = {}
        twice: set[tuple[str, int]] = set()
        for client in clients:
            topics = [topic for topic in self.image.by_name.values() if reads(client.reads, topic.name)]
            mine = {(topic.name, number) for topic in topics for number in (*topic.partitions, *topic.retiring)}
            wanted |= mine
            if client.names.keys() - mine:
                return f"{client.name} has {sorted(client.names.keys() - mine)}, to which it does not subscribe"
            for name, keys in client.names.items():
                if common(held.get(name, NONE), keys):
                    twice.add(name)
                held[name] = union(held.get(name, NONE), keys)
        unread = self._unread(clients)
        if unread is not None:
            return unread
        whole = {name for name, keys in held.items() if keys == WHOLE}
        if twice or whole != wanted:
            return f"partitions {sorted(wanted - whole)} are nobody's, {sorted(twice)} are two members'"
        return None


def image_of(topic: Topic) -> TopicImage:
    """A topic as a coordinator sees it now."""
    logs = topic.logs
    return TopicImage(
        topic.topic_id,
        topic.name,
        tuple(range(topic.count)),
        tuple(range(topic.count, max(topic.logs) + 1)),
        topic.lineage if topic.ordered else None,
        lambda number: logs[number].start if number in logs else 0,
        lambda number: logs[number].end if number in logs else 0,
        topic.initial if len(topic.counts) > 1 else 0,
        max(*topic.counts, max(topic.logs) + 1),
        topic.accepts_ranges,
        lambda number, _: topic.loads(number),
        rewritten=lambda number: logs[number].rewritten if number in logs else NEVER_REWRITTEN,
    )


def reads(wanted: Subscription | None, name: str) -> bool:
    """Whether a topic is subscribed to."""
    import re2

    if wanted is None:
        return False
    if wanted.pattern is not None:
        return re2.compile(wanted.pattern).fullmatch(name) is not None
    return name in wanted.topics


_DISTURBING = (Connection._arrive, World._bounced, World._again)

__all__ = ["Theme", "World", "shown"]
