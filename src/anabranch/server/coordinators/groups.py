"""The group coordinators of this broker: shards over `__consumer_offsets` that follow every change of topics.

Individual commits are in a second topic with as many partitions, which is made when a client first commits some.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Iterator, Mapping
from importlib import import_module
from threading import Lock
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import UUID

from anabranch.base.errors import ApiError
from anabranch.base.ids import INDIVIDUAL_COMMITS_TOPIC, TopicPartition
from anabranch.codec import prepare
from anabranch.machines.controller.group_configs import (
    HEARTBEAT_INTERVAL,
    SESSION_TIMEOUT,
    SHARES_MAX,
    GroupConfig,
    within_bounds,
)
from anabranch.machines.controller.topics import CreateTopic
from anabranch.runtime.collector import collector_paused
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.net.acceptor import ConnectionNumbers
from anabranch.server.cluster.peers import Peers
from anabranch.server.cluster.view import ClusterUpdate
from anabranch.server.coordinators import weights
from anabranch.server.coordinators.assignor_plug_ins import OURS, assignor_plug_ins, names_of, report_assignor
from anabranch.server.coordinators.member_metadata import WARNING_INTERVAL_S, MetadataAdmission, held_by
from anabranch.server.coordinators.record_codec import RecordCodec
from anabranch.server.coordinators.shard import Shard
from anabranch.server.coordinators.shard_set import ShardServices, ShardSet, coordinator_partition
from anabranch.server.partitions.partition import Partition
from anabranch.server.settings import Settings

if TYPE_CHECKING:  # Imported when the first log is read, so that a broker without groups starts without them.
    from anabranch.machines.groups.coordinator import Coordinator
    from anabranch.machines.groups.gate_effects import AskNextRecords
    from anabranch.machines.groups.records import CoordinatorRecord
    from anabranch.machines.groups.regex import Matching, Regexes
    from anabranch.machines.groups.settings import GroupSettings
    from anabranch.machines.groups.unread import Unread
    from anabranch.protocol.messages.list_groups import ListedGroup
    from anabranch.server.cluster.images import Images

events = EventLogger("groups")
TOPIC = "__consumer_offsets"
ASSIGNORS = ("anabranch.machines.groups.assignors.planner", "anabranch.machines.groups.assignors.uniform")
MINUTE_MS = 60_000
SHARES_BOUND = 100
POSITIONS_STEP = 100
COLD = 1 << 30
"""The weight of a decision whose modules are still being loaded, which takes 100 ms."""
IMAGES = "anabranch.server.cluster.images"
TOPICS_AT_A_TIME = 100
"""Topics that are looked at before other work has its turn: 5 ms when they are looked at first."""
NAMES_AT_A_TIME = 200
"""Names that a pattern is tried on before other work has its turn: 2 ms."""


class Groups(ShardSet["Coordinator", "CoordinatorRecord"]):
    """All shards that coordinate groups."""

    def __init__(
        self,
        settings: Settings,
        services: ShardServices,
        *,
        peers: Peers,
        connections: ConnectionNumbers,
    ) -> None:
        super().__init__(
            TOPIC,
            partition_count=settings.offsets_topic_num_partitions,
            configs={
                "cleanup.policy": "compact",
                "compression.type": "producer",
                "segment.bytes": str(settings.offsets_topic_segment_bytes),
            },
            make=self._make_coordinator,
            codec=self._weighing_codec,
            modules=(
                "anabranch.machines.groups.coordinator",
                "anabranch.server.coordinators.assignor_plug_ins",
                IMAGES,
            ),
            services=services,
        )
        self.configs = group_configs(settings)
        self.consumer_protocol = "consumer" in settings.group_coordinator_rebalance_protocols.split(",")
        self._broker_settings = settings
        self._group_settings: GroupSettings | None = None
        self._images: Images | None = None
        self._refreshing: asyncio.Task[None] | None = None
        self._outdated = False
        """Whether there was an update since the shards were told last."""
        self._regexes: Regexes | None = None
        self._matching = asyncio.Lock()
        self._warming: asyncio.Future[None] | None = None
        self._tickets = 0
        self._asking: set[asyncio.Task[None]] = set()
        self._creating_individual: asyncio.Task[None] | None = None
        self.gates_opened_by_time = 0
        """Counts partitions that were handed out although a position that they waited on had records left."""
        self._peers = peers
        self._connections = connections
        self._former: dict[int, int] = {}
        """By partition: up to which connection members have spoken to a machine that was thrown away."""
        self._former_newest = 0
        """The largest of these."""
        self._full_warnings = EventLimit(WARNING_INTERVAL_S)
        self._view.watch(self._on_update)
        self.metadata = MetadataAdmission(
            settings.group_member_metadata_max_bytes,
            settings.group_metadata_max_bytes,
            lambda: held_by([shard.machine for shard in self if shard.active]),
            monotonic,
        )

    def is_newcomer(self, group_id: str, member_id: str) -> bool:
        """Whether a group is not known to have this member."""
        with contextlib.suppress(ApiError):
            group = self.shard_of(group_id).machine.groups.get(group_id)
            return group is None or member_id not in group.members
        return True

    # -- individual commits --------------------------------------------------------------------------------------------

    @property
    def takes_individual(self) -> bool:
        """Whether the topic of individual commits exists, or is not needed because none are accepted."""
        return (
            not self._broker_settings.accept_individual_commit or self._view.find(INDIVIDUAL_COMMITS_TOPIC) is not None
        )

    async def ensure_individual(self) -> None:
        """Create the topic of individual commits if it does not exist. ApiError if that fails."""
        if not self.takes_individual:
            await asyncio.shield(self._create_individual())

    def _create_individual(self) -> asyncio.Task[None]:
        if self._creating_individual is None:
            command = CreateTopic(
                INDIVIDUAL_COMMITS_TOPIC,
                self._new_id(),
                self.count(),
                configs={
                    "cleanup.policy": "compact",
                    "compression.type": "producer",
                    "segment.bytes": str(self._broker_settings.individual_commit_log_segment_bytes),
                },
            )
            work = self._create_topic(command)
            self._creating_individual = asyncio.get_running_loop().create_task(
                work, name=f"create {INDIVIDUAL_COMMITS_TOPIC}"
            )
            self._creating_individual.add_done_callback(self._individual_created)
        return self._creating_individual

    def _want_beside(self) -> None:
        self._create_individual()

    def _individual_created(self, task: asyncio.Task[None]) -> None:
        self._creating_individual = None
        if not task.cancelled():
            task.exception()  # Its callers raise it.

    def _beside(self, number: int) -> Partition | None:
        if self._view.find(INDIVIDUAL_COMMITS_TOPIC) is None:
            return None
        return self._replicas.get(INDIVIDUAL_COMMITS_TOPIC, number)

    def ranges_held(self) -> int:
        """The number of individual commits that the loaded groups hold."""
        return sum(shard.machine.offsets.individual.count for shard in self if shard.active)

    def offsets_size(self) -> int:
        """The bytes of memory that the committed offsets of the loaded groups take, and the commits that wait."""
        machines = [shard.machine for shard in self if shard.active]
        return sum(it.positions.size + it.offsets.in_transactions.purgatory.size for it in machines)

    def ticket(self) -> int:
        """A ticket under which a request can be parked."""
        self._tickets += 1
        return self._tickets

    def has_begun_anew(self, group_id: str, connection: int) -> bool:
        """Whether something may be on the way on a connection that was meant for an earlier coordinator (ADR 0016).

        Such a request may be older than one that the same client has sent on a newer connection.
        """
        if connection > self._former_newest:  # As nearly always.
            return False
        return connection <= self._former.get(coordinator_partition(group_id, self.count()), 0)

    def machines(self) -> Iterator[Coordinator]:
        """All machines, to be read; none before the topic exists. ApiError if one of them is not active."""
        if self.exists:
            for number in range(self.count()):
                yield self.shard(number).machine

    async def listed(self) -> AsyncIterator[Iterable[ListedGroup]]:
        """Every group, by shard. ApiError as for `machines`. A caller may let other work go on in between.

        Offsets that a shard still has to read are read in its line: a thread may be about it.
        """
        for number in range(self.count() if self.exists else 0):
            shard = self.shard(number)
            if shard.machine.positions.unread is None:
                yield shard.machine.list_groups()
            else:
                found = shard.read(lambda machine, _: list(machine.list_groups()), lambda _: weights.MUCH)
                yield await found if isinstance(found, asyncio.Future) else found

    def warm(self) -> None:
        """Load in a thread what the first heartbeat needs: a client is about to join a group."""
        if self._warming is None:
            self._warming = asyncio.get_running_loop().run_in_executor(None, _warmed)

    def weighed(self, weigh: Callable[[Coordinator], int]) -> Callable[[Coordinator], int]:
        """What weighs a decision that may compute an assignment: it is for a thread until what it needs is loaded."""
        if self._warming is None:
            self.warm()
        assert self._warming is not None
        return weigh if self._warming.done() else lambda coordinator: COLD

    def _weighing_codec(self) -> RecordCodec[CoordinatorRecord]:
        def weight(coordinator: Coordinator, key: Hashable) -> int:
            return self.weighed(lambda coordinator: weights.of_timer(coordinator, key))(coordinator)

        return _codec()._replace(timer_weight=weight)

    # -- machines ----------------------------------------------------------------------------------------------------

    def _make_coordinator(self, partition: int) -> Coordinator:
        from anabranch.machines.groups.coordinator import Coordinator
        from anabranch.machines.groups.regex import Regexes

        if self._group_settings is None:
            self._group_settings = self._read_settings()
        former = self._former[partition] = self._connections.newest if partition in self._former else 0
        self._former_newest = max(self._former_newest, former)
        if self._regexes is None:
            self._regexes = Regexes(
                self._group_settings.consumer_regex_length_max,
                self._broker_settings.group_regex_matches_max_bytes,
                alone=Lock(),
            )
        return Coordinator(self._group_settings, regexes=self._regexes)

    def _prepare(self, machine: Coordinator) -> None:
        machine.image = self._newest_images().newest()

    def _read_settings(self) -> GroupSettings:
        from anabranch.machines.groups.assignors import Assignors
        from anabranch.machines.groups.settings import GroupSettings

        settings = self._broker_settings
        offered = names_of(settings)
        plug_ins = {} if OURS.issuperset(offered) else assignor_plug_ins()
        return GroupSettings(
            consumer_session_timeout_ms=settings.group_consumer_session_timeout_ms,
            consumer_heartbeat_interval_ms=settings.group_consumer_heartbeat_interval_ms,
            consumer_max_size=settings.group_consumer_max_size,
            consumer_names_max=settings.group_consumer_max_subscribed_names,
            consumer_assignors=offered,
            assignors=Assignors(plug_ins, collector_paused),
            consumer_migration_policy=settings.group_consumer_migration_policy,
            min_session_timeout_ms=settings.group_min_session_timeout_ms,
            max_session_timeout_ms=settings.group_max_session_timeout_ms,
            max_size=settings.group_max_size,
            initial_rebalance_delay_ms=settings.group_initial_rebalance_delay_ms,
            offset_metadata_max_bytes=settings.offset_metadata_max_bytes,
            consumer_shares_max=settings.max_shares_per_partition,
            balance_interval_ms=settings.key_range_balance_interval_ms,
            individual_commits=settings.accept_individual_commit,
            gaps_are_waited_for=settings.gaps_are_waited_for,
            ranges_per_partition_max=settings.individual_commit_max_ranges_per_partition,
            ranges_max=settings.individual_commit_max_ranges,
            ranges_held=self.ranges_held,
            offsets_size_max=settings.offsets_max_bytes,
            offsets_size=self.offsets_size,
            offsets_retention_ms=settings.offsets_retention_minutes * MINUTE_MS,
            offsets_retention_check_interval_ms=settings.offsets_retention_check_interval_ms,
            group_configs=self._configs_of,
        )

    def _configs_of(self, group_id: str) -> Mapping[str, str]:
        """A group's configs, within the bounds that the broker has now."""
        found = self._view.group_configs(group_id)
        return within_bounds(found, self.configs) if found else found

    def reset_heard(
        self, asked: Mapping[UUID, Mapping[int, int]], client_id: str, client_host: str
    ) -> list[asyncio.Future[None]]:
        """Tell the coordinators of a ListOffsets request: of timestamps by partition, by topic.

        The answer to it is to wait for these futures.
        """
        waits = []
        for shard in self:
            for topic_id in shard.machine.awaiting_resets(asked) if shard.active else ():
                with contextlib.suppress(ApiError):
                    waits.append(_reset_heard(shard, topic_id, asked[topic_id], client_id, client_host))
        return [wait for wait in waits if wait is not None]

    # -- effects -----------------------------------------------------------------------------------------------------

    def _perform(self, effect: Any) -> None:
        from anabranch.machines.groups.consumer.target import AssignorFailed
        from anabranch.machines.groups.gate_effects import AskNextRecords, GateOpenedByTime

        if isinstance(effect, AssignorFailed):
            report_assignor(effect)
        elif not isinstance(effect, (AskNextRecords, GateOpenedByTime)):
            self._perform_of_ranges(effect)
        elif isinstance(effect, AskNextRecords):
            task = asyncio.get_running_loop().create_task(self._next_records(effect), name=f"next of {effect.topic}")
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)
        else:
            self.gates_opened_by_time += 1
            events.warning(
                "gate opened by time",
                group=effect.group_id,
                partition=TopicPartition(effect.topic, effect.partition),
                waited_on=effect.waited_on,
                records_left=effect.records_left,
            )

    def _perform_of_ranges(self, effect: Any) -> None:
        from anabranch.machines.groups.offset_room import OffsetsFull
        from anabranch.machines.groups.offsets import RangesRepeated
        from anabranch.machines.groups.ranged import DURABLE_EFFECTS, RangesLost

        if isinstance(effect, OffsetsFull):
            suppressed = self._full_warnings.admit(monotonic())
            if suppressed is not None:
                reason = f"All of them take as much memory as offsets.max.bytes allows: {effect.size_max}."
                events.warning("offset refused", group=effect.group_id, reason=reason, suppressed=suppressed)
            return
        if isinstance(effect, DURABLE_EFFECTS):
            with contextlib.suppress(ApiError):
                self.shard_of(effect.group_id).tell(lambda machine, _: machine.ranged.decide_durable(effect))
            return
        partition = TopicPartition(effect.topic, effect.partition)
        if isinstance(effect, RangesLost):
            events.error(
                f"the log of {INDIVIDUAL_COMMITS_TOPIC} is gone: work above committed offsets will be delivered again",
                group=effect.group_id,
                partition=partition,
            )
        elif isinstance(effect, RangesRepeated):
            first, last = effect.repeated
            events.warning(
                "offsets committed again", group=effect.group_id, partition=partition, offsets=f"{first}-{last}"
            )
        else:
            first, last = effect.gap
            events.warning(
                "too many individual commits: group is assigned anew",
                group=effect.group_id,
                partition=partition,
                ranges=effect.ranges,
                missing=f"{first}-{last}",
                owner=effect.owner or "no member",
            )

    async def _next_records(self, ask: AskNextRecords) -> None:
        """Tell the group's coordinator what the leaders answer."""
        found: Mapping[int, int] = {}
        try:
            found = await self._peers.next_records(ask.topic, ask.offsets)
        except Exception as error:  # The group's coordinator asks again.
            events.error("next records not found", topic=ask.topic, reason=error, exception=error)
        with contextlib.suppress(ApiError):
            self.shard_of(ask.group_id).tell(
                lambda machine, now_ms: machine.next_records(ask.group_id, ask.topic_id, ask.offsets, found, now_ms)
            )

    def unload(self) -> None:
        """Decide nothing more, and wait for no leader."""
        super().unload()
        if self._refreshing is not None:
            self._refreshing.cancel()
        for task in self._asking:
            task.cancel()

    # -- topics ------------------------------------------------------------------------------------------------------

    def _newest_images(self) -> Images:
        from anabranch.server.cluster.images import Images

        if self._images is None:
            self._images = Images(self._view, self._peers)
        return self._images

    def _on_update(self, update: ClusterUpdate) -> None:
        """Refresh the image of every shard, soon: updates often come several in a row."""
        if self._images is None:
            return
        self._outdated = True
        if self._refreshing is None:
            self._begin_refresh()

    def _begin_refresh(self) -> None:
        self._refreshing = asyncio.get_running_loop().create_task(self._refresh(), name="refresh images")
        self._refreshing.add_done_callback(self._refreshed)

    async def _refresh(self) -> None:
        """Look at some topics, and tell one shard, at a time: there may be thousands of topics, and of groups."""
        while self._outdated:
            self._outdated = False
            await self._look_at_topics()
            self._newest_images().newest()
            for shard in list(self):
                if self._tell(shard):
                    await asyncio.sleep(0)

    def _tell(self, shard: Shard[Coordinator, CoordinatorRecord]) -> bool:
        """Tell a shard of changed topics, unless it knows of them; whether that was done."""
        if self._images is None or not shard.active or shard.machine.image.version >= self._images.latest.version:
            return False
        image = self._images.latest
        shard.tell(
            lambda coordinator, now_ms: coordinator.topics_changed(image, now_ms),
            lambda coordinator: coordinator.weight_of_topics(image),
        )
        return True

    def shard_of(self, key: str) -> Shard[Coordinator, CoordinatorRecord]:
        """The shard that coordinates a group, told of all topics that Metadata shows. ApiError before it exists.

        While very many topics have changed, it hears of them as soon as they have been looked at, and their image made.
        """
        shard = super().shard_of(key)
        if self._refreshing is not None:
            if not self._newest_images().look(TOPICS_AT_A_TIME):
                self._newest_images().newest()
            self._tell(shard)
        return shard

    def _refreshed(self, task: asyncio.Task[None]) -> None:
        self._refreshing = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            events.error("coordinators not told of changed topics", exception=error)
        if self._outdated:
            self._begin_refresh()

    async def _look_at_topics(self) -> None:
        while self._newest_images().look(TOPICS_AT_A_TIME):
            await asyncio.sleep(0)
        await self._newest_images().make()

    async def _load_all(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, import_module, IMAGES)
        await self._look_at_topics()
        await super()._load_all()

    # -- regular expressions -------------------------------------------------------------------------------------------

    def to_be_matched(self, pattern: str) -> Matching | None:
        """The work of finding the topics of a pattern; None where they are known, or the pattern is invalid."""
        if self._regexes is None or self._images is None or not self._images.latest.version:
            return None
        try:
            return self._regexes.begin(pattern, self._images.latest)
        except ApiError:
            return None

    async def match(self, matching: Matching) -> None:
        """Find the topics of a pattern: one pattern, and some topics, at a time."""
        async with self._matching:
            assert self._regexes is not None
            while self._regexes.match_some(matching, NAMES_AT_A_TIME):
                await asyncio.sleep(0)

    @property
    def matches_size(self) -> int:
        """Bytes of memory that the names of the topics take that patterns match."""
        return 0 if self._regexes is None else self._regexes.names_size


def _reset_heard(
    shard: Shard[Coordinator, CoordinatorRecord],
    topic_id: UUID,
    asked: Mapping[int, int],
    client_id: str,
    client_host: str,
) -> asyncio.Future[None] | None:
    heard: asyncio.Future[None] | None = shard.ask(
        lambda machine, now_ms: machine.reset_heard(topic_id, asked, client_id, client_host),
        weigh=lambda machine: machine.weight_of_reset(topic_id, asked),
    )
    return heard


def group_configs(settings: Settings) -> Mapping[str, GroupConfig]:
    """The configs that a group can have on a broker with these settings."""
    return {
        SESSION_TIMEOUT: GroupConfig(
            SESSION_TIMEOUT,
            settings.group_consumer_session_timeout_ms,
            settings.group_consumer_min_session_timeout_ms,
            settings.group_consumer_max_session_timeout_ms,
            "The time without a heartbeat after which a member is removed.",
            "group.consumer.session.timeout.ms",
        ),
        HEARTBEAT_INTERVAL: GroupConfig(
            HEARTBEAT_INTERVAL,
            settings.group_consumer_heartbeat_interval_ms,
            settings.group_consumer_min_heartbeat_interval_ms,
            settings.group_consumer_max_heartbeat_interval_ms,
            "The interval between heartbeats that members are asked for.",
            "group.consumer.heartbeat.interval.ms",
        ),
        SHARES_MAX: GroupConfig(
            SHARES_MAX,
            settings.max_shares_per_partition,
            1,
            SHARES_BOUND,
            "How many members may share one partition of a topic with accept.range.fetch.",
            SHARES_MAX,
        ),
    }


def _warmed() -> None:
    """Load the modules that compute assignments, and compile the messages of a heartbeat and what it writes."""
    for module in ASSIGNORS:
        import_module(module)
    from anabranch.machines.groups.records import KINDS
    from anabranch.protocol.messages.consumer_group_heartbeat import (
        ConsumerGroupHeartbeatRequest,
        ConsumerGroupHeartbeatResponse,
    )

    prepare(ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse)
    prepare(*(written for key, value, _ in KINDS.values() for written in (key, value) if written is not None))


def _codec() -> RecordCodec[CoordinatorRecord]:
    from anabranch.machines.groups.ranged import FOLD_KEY
    from anabranch.machines.groups.records import decode_record, encode_record, is_individual

    def make_index() -> Unread:
        from anabranch.machines.groups.unread import Unread

        return Unread()

    def adopt(coordinator: Coordinator, unread: Unread) -> None:
        coordinator.positions.unread, coordinator.positions.alone = unread, Lock()

    def beside_empty(coordinator: Coordinator) -> None:
        coordinator.ranged.is_log_empty = True

    return RecordCodec(
        encode_record,
        decode_record,
        make_index=make_index,
        adopt=adopt,
        catch_up=lambda coordinator: coordinator.positions.read_some(POSITIONS_STEP),
        marked=lambda coordinator, producer_id, now_ms: coordinator.marked(producer_id, now_ms),
        after_marker=FOLD_KEY,
        is_beside=is_individual,
        beside_empty=beside_empty,
        timer_weight=weights.of_timer,
        marker_weight=lambda coordinator, producer_id: coordinator.weight_of_marker(producer_id),
        loaded_weight=weights.of_loading,
    )
