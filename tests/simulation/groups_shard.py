"""A broker with one coordinator shard: the handlers, the `Shard` and the `Partition` that ship, over a false log.

`WatchedShard` and `WatchedCoordinator` change nothing: they show every decision to the rules. `fold` is a second
machine, which applies nothing but the records in the log: after every step the stored state of the machine must equal
the fold, so decisions change stored state by records alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import INDIVIDUAL_COMMITS_TOPIC, TopicPartition
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.classic import ClassicGroup, ClassicState
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.gate_effects import AskNextRecords
from anabranch.machines.groups.ranged import DURABLE_EFFECTS
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.outcome import Outcome
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequest, OffsetFetchResponseGroup
from anabranch.protocol.registry import api_of
from anabranch.runtime.clock import Clock
from anabranch.runtime.metrics import Counter, Metrics
from anabranch.server.context import CloseConnectionError, Large, RequestContext
from anabranch.server.coordinators import shard as shards
from anabranch.server.coordinators.groups import TOPIC, _codec
from anabranch.server.coordinators.member_metadata import MetadataAdmission
from anabranch.server.coordinators.record_codec import Encoded
from anabranch.server.coordinators.shard import Shard
from anabranch.server.handlers import ENDPOINTS
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.slices import SliceBooks
from anabranch.server.partitions.topic_settings import topic_settings
from tests.simulation.groups_clock import WorldClock
from tests.simulation.groups_log import Batch, Entry, FalseLog
from tests.simulation.groups_transactions import EPOCH, coordinators

if TYPE_CHECKING:
    from tests.simulation.groups_world import World

SETTINGS = topic_settings({"cleanup.policy": "compact"}, NOT_SET, "fsync")
OFFSETS_TOPIC_ID, RANGES_TOPIC_ID = UUID(int=1), UUID(int=2)


class Cause(NamedTuple):
    """The cause of a coordinator's decision."""

    kind: str
    """request, timer, topics, loaded, or admin."""
    group: str | None = None
    """None: it may concern all groups."""
    request: Any = None
    key: Any = None
    caller: Caller | None = None
    ticket: int | None = None


@dataclass(slots=True)
class Seen:
    """A group as it was before a step."""

    group: ConsumerGroup | ClassicGroup | None
    kind: type | None
    epoch: int
    target_epoch: int
    members: dict[str, Any]
    joining: frozenset[str] = frozenset()
    unsynced: frozenset[str] = frozenset()
    state: Any = None


def see(group: ConsumerGroup | ClassicGroup | None) -> Seen:
    """Copy the state that may change."""
    if group is None:
        return Seen(None, None, 0, 0, {})
    if isinstance(group, ConsumerGroup):
        return Seen(group, ConsumerGroup, group.epoch, group.target_epoch, dict(group.members))
    return Seen(
        group,
        ClassicGroup,
        group.generation,
        0,
        dict(group.members),
        frozenset(group.joining),
        frozenset(group.unsynced),
        group.state,
    )


class Step(NamedTuple):
    """A decision."""

    cause: Cause
    before: dict[str, Seen]
    outcome: Outcome[Any, CoordinatorRecord]
    decided_ms: int
    """When it was made, which may be before it is applied."""


class Written(NamedTuple):
    """Records of a decision that are in the log."""

    end: int
    """Of the log, with them."""
    records: Sequence[CoordinatorRecord]


# -- watching ----------------------------------------------------------------------------------------------------------


def _watched(name: str, cause_of: Callable[..., Cause]) -> Callable[..., Outcome[Any, CoordinatorRecord]]:
    def decide(self: WatchedCoordinator, *given: Any) -> Outcome[Any, CoordinatorRecord]:
        cause = cause_of(*given)
        touched = list(self.groups) if cause.group is None else [cause.group]
        before = {group_id: see(self.groups.get(group_id)) for group_id in touched}
        decided_ms = min(self.broker.world.now_ms, given[-1])
        outcome = getattr(Coordinator, name)(self, *given)
        self.step = Step(cause, before, outcome, decided_ms)
        return outcome  # type: ignore[no-any-return]

    return decide


def _of_request(request: Any, caller: Caller, *given: int) -> Cause:
    return Cause("request", request.group_id, request, caller=caller, ticket=given[0] if len(given) > 1 else None)


def _of_timer(key: Any, now_ms: int) -> Cause:
    return Cause("timer", None if len(key) == 1 else key[1], key=key)


class WatchedCoordinator(Coordinator):
    """Records every decision with its cause and the groups before it."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker.world.settings)
        self.broker = broker
        self.step: Step | None = None
        self.is_loaded = False
        """Whether it has decided what follows from being loaded, which a thread may do."""

    consumer_group_heartbeat = _watched("consumer_group_heartbeat", _of_request)
    prepare_assignment = _watched("prepare_assignment", _of_request)
    install_assignment = _watched("install_assignment", _of_request)
    join_group = _watched("join_group", _of_request)
    sync_group = _watched("sync_group", _of_request)
    heartbeat = _watched("heartbeat", _of_request)
    leave_group = _watched("leave_group", _of_request)
    offset_commit = _watched("offset_commit", _of_request)
    txn_offset_commit = _watched("txn_offset_commit", _of_request)
    marked = _watched("marked", lambda producer_id, now_ms: Cause("marker"))
    offset_delete = _watched("offset_delete", lambda request, now_ms: Cause("admin", request.group_id, request))
    delete_group = _watched("delete_group", lambda group_id, now_ms: Cause("admin", group_id))
    on_timer = _watched("on_timer", _of_timer)
    topics_changed = _watched("topics_changed", lambda image, now_ms: Cause("topics"))
    consumer_group_position = _watched(
        "consumer_group_position",
        lambda request, ticket, now_ms: Cause("request", request.group_id, request, ticket=ticket),
    )
    decide_loaded = _watched("loaded", lambda now_ms: Cause("loaded"))

    def loaded(self, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        broker = self.broker
        assert_stored_equal(self, broker.fold)
        broker.fold.image = self.image
        broker.world.rules.after_load(broker, self)
        self.is_loaded = True
        return self.decide_loaded(now_ms)

    def apply(self, record: CoordinatorRecord, *, producer_id: int = -1) -> None:
        try:
            super().apply(record, producer_id=producer_id)
        except Exception as error:
            self.broker.world.failed_with(error)
            raise

    def apply_marker(self, producer_id: int, producer_epoch: int, committed: bool) -> None:
        super().apply_marker(producer_id, producer_epoch, committed)
        if self.broker.machine is self:
            self.broker.world.rules.after_marker(self.broker, self, producer_id, committed=committed)

    def offset_fetch(self, *given: Any, **said: Any) -> OffsetFetchResponseGroup:
        answer = super().offset_fetch(*given, **said)
        self.broker.world.rules.positions.after_fetch(self, answer, require_stable=given[1])
        return answer


class WatchedShard(Shard[Coordinator, CoordinatorRecord]):
    """Shows the rules every decision that was carried out. An error in deciding or applying, which the shell would
    survive by loading again, ends the simulation."""

    broker: Broker

    def ask(
        self,
        decide: Callable[[Coordinator, int], Outcome[Any, CoordinatorRecord]],
        weigh: Callable[[Coordinator], int] | None = None,
        look: Callable[[], None] | None = None,
    ) -> Any:
        broker, world = self.broker, self.broker.world
        if broker.shard is not self:  # Its process is dead, and thawed at the end of the simulation to be cancelled.
            raise ApiError(ErrorCode.NOT_COORDINATOR)
        try:
            machine = self._machine
            assert machine is None or isinstance(machine, WatchedCoordinator)
            return super().ask(decide, weigh, look)
        except ApiError:
            raise
        except Exception as error:
            world.failed_with(error)
            raise

    async def _decided_in_turn(self, machine: Coordinator, *given: Any) -> Any:
        try:
            return await super()._decided_in_turn(machine, *given)
        except ApiError:
            raise
        except Exception as error:
            self.broker.world.failed_with(error)
            raise

    def _write(self, encoded: Encoded, now_ms: int) -> None:
        super()._write(encoded, now_ms)
        machine = self._machine
        if isinstance(machine, WatchedCoordinator) and machine.step is not None:
            self.broker.written = Written(self.broker.log.end, machine.step.outcome.records)

    def _follow_up(self, outcome: Outcome[Any, CoordinatorRecord]) -> Any:
        broker, world, machine = self.broker, self.broker.world, self._machine
        assert isinstance(machine, WatchedCoordinator)
        broker.written = None
        step, machine.step = machine.step, None
        reply = super()._follow_up(outcome)
        if step is not None and step.outcome is outcome:
            if step.cause.kind == "timer":
                world.say("%s: timer %s", broker, step.cause.key)
            for record in outcome.records:
                world.say("    %s", record)
            world.rules.decided_ms = step.decided_ms
            world.rules.after_step(broker, step.cause, step.before, step.outcome)
            world.rules.decided_ms = None
        return reply

    def _stop(self, state: shards.ShardState) -> None:
        if self.broker.shard is self:
            self.broker.world.say("%s: stops, %s", self.broker, state)
            self.broker.world.rules.before_stop(self.broker)
        super()._stop(state)


# -- the broker --------------------------------------------------------------------------------------------------------


class Groups:
    """The group coordinators of a broker, as the handlers see them: one shard."""

    consumer_protocol = True
    takes_individual = True

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.metadata = MetadataAdmission(1 << 20, 1 << 30, lambda: (), lambda: 0.0)

    def shard_of(self, group_id: str) -> Shard[Coordinator, CoordinatorRecord]:
        assert self._broker.shard is not None
        return self._broker.shard

    def is_newcomer(self, group_id: str, member_id: str) -> bool:
        return False

    def has_begun_anew(self, group_id: str, connection: int) -> bool:
        return connection <= self._broker.former

    def ticket(self) -> int:
        return self._broker.world.next_ticket()

    def weighed(self, weigh: Callable[[Coordinator], int]) -> Callable[[Coordinator], int]:
        """All that decisions need is loaded."""
        return weigh

    def to_be_matched(self, pattern: str) -> None:
        """There are few topics: the machine finds those that a pattern matches."""


class Broker:
    """One partition of `__consumer_offsets`, on a broker of its own, which can crash and come back."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.log = FalseLog(self._appended, self._cut)
        self.ranges_log = FalseLog(lambda _: None, self._ranges_cut) if world.theme.sharing else None
        """Of individual commits; None where nobody shares anything."""
        self.fold = Coordinator(world.settings, world.image)
        self.shard: WatchedShard | None = None
        """None while the broker is down."""
        self.lives = 0
        """Counts processes: connections to an earlier one are dead."""
        self.former = -1
        """Connections up to this one may bring requests meant for an earlier machine of the same process."""
        self.fails_sync = False
        """The next sync fails."""
        self.expired_ms = 0
        """When the machine last checked for expired offsets, or was loaded."""
        self.written: Written | None = None
        """What the machine has decided and not applied yet, which a thread does."""
        self.lost: dict[str, Seen] = {}
        """The groups of the last machine when it was thrown away."""
        chance = SimpleNamespace(uuid=world.fresh_id)
        nobodys = SliceBooks(lambda group_id: lambda member_id: False, Clock(), Metrics(), hold_ms=1)
        settings = SimpleNamespace(group_consumer_max_subscribed_names=GroupSettings().consumer_names_max)
        time, producers = SimpleNamespace(now_ms=lambda: world.now_ms), SimpleNamespace(has_room=lambda: True)
        self._context: Any = SimpleNamespace(
            settings=settings,
            replicas=SimpleNamespace(time=time, producers=producers),
            groups=Groups(self),
            chance=chance,
            slices=nobodys,
            transactions=coordinators(world),
        )
        self.start(0)

    @property
    def machine(self) -> WatchedCoordinator | None:
        """The machine of the active shard; None while the shard is not active."""
        if self.shard is None or not self.shard.active:
            return None
        machine = self.shard.machine
        assert isinstance(machine, WatchedCoordinator)
        return machine

    # -- its lives -----------------------------------------------------------------------------------------------------

    def start(self, load_in_ms: int) -> None:
        """Run a process. Its shard waits a while for its turn to be loaded."""
        self.process = self.world.loop.process(str(self))
        self.former = -1
        partition = self._partition(TOPIC, OFFSETS_TOPIC_ID, self.log)
        ranges = None
        if self.ranges_log is not None:
            ranges = self._partition(INDIVIDUAL_COMMITS_TOPIC, RANGES_TOPIC_ID, self.ranges_log)
        self.shard = WatchedShard(
            partition,
            self._make,
            _codec(),
            commit=self._commit,
            clock=WorldClock(self.world),
            prepare=self._prepare,
            perform=self._perform,
            beside=lambda: ranges,
        )
        self.shard.broker = self
        self.world.after(load_in_ms, self._load, self.lives)

    def _partition(self, topic: str, topic_id: UUID, log: FalseLog) -> Partition:
        count = Counter()
        partition = Partition(
            TopicPartition(topic, self.number),
            topic_id,
            log,  # type: ignore[arg-type]
            SETTINGS,
            bytes_in=count,
            bytes_out=count,
            messages_in=count,
        )
        partition.leadership = Leadership(topic_id, 0, 0, 0, 1, 1, retiring=False)
        partition.rebuild_table(self.world.now_ms)
        return partition

    def _load(self, life: int) -> None:
        if life == self.lives and self.shard is not None:
            self.process.call(self.shard.load_soon)

    def _make(self) -> Coordinator:
        self.former = self.world.newest_connection if self.former >= 0 else 0
        self.world.say("%s: loads %d records", self, sum(len(batch.entries) for batch in self.log.batches))
        return WatchedCoordinator(self)

    def _prepare(self, machine: Coordinator) -> None:
        machine.image = self.world.image
        self.expired_ms = self.world.now_ms  # Also where the machine decides later, in a thread, that it is loaded.

    def _perform(self, effect: Any) -> None:
        """Ask the leaders, which answer later, or not at all."""
        if isinstance(effect, AskNextRecords):
            self.world.after(self.world.delay_ms(), self._leaders_answer, effect, self.lives)
        elif isinstance(effect, DURABLE_EFFECTS) and self.shard is not None:
            self.process.call(self.shard.tell, lambda machine, _: machine.ranged.decide_durable(effect))

    def _leaders_answer(self, ask: AskNextRecords, life: int) -> None:
        if life != self.lives or self.shard is None:
            return
        topic = self.world.topic_of(ask.topic_id)
        logs = {} if topic is None else topic.logs
        found = {
            number: logs[number].next_record(at)
            for number, at in ask.offsets.items()
            if number in logs and at >= logs[number].start
        }
        self.process.call(
            self.shard.tell,
            lambda machine, now_ms: machine.next_records(ask.group_id, ask.topic_id, ask.offsets, found, now_ms),
        )

    def crash(self) -> None:
        """The broker dies: requests under way are lost with their connections, and some unsynced records are lost."""
        if self.shard is None:
            return
        world = self.world
        world.say("%s: crashes", self)
        world.rules.before_stop(self)
        self.process.kill()
        world.dead.append(self.shard)
        self.lives += 1
        self.shard = None
        world.cut_off(self)
        for log in filter(None, (self.log, self.ranges_log)):
            unsynced = [batch.end for batch in log.batches if batch.end > log.flushed]
            log.lose_power(world.chance.choice([log.flushed, *unsynced, log.end]))
        world.after(world.chance.randint(10, 5_000), self.start, world.chance.choice((0, 0, 200, 1_500)))

    def tell_topics(self) -> None:
        """The metadata changed: pass the change to the machine, as `Groups` does."""
        shard, image = self.shard, self.world.image
        if shard is not None and shard.active and shard.machine.image is not image:
            self.fold.image = image
            self.process.call(shard.tell, lambda machine, now_ms: machine.topics_changed(image, now_ms))

    def hear_reset(self, topic_id: UUID, asked: Mapping[int, int], client_id: str) -> None:
        """Tell the coordinator of a ListOffsets request, as the handler does."""
        if self.machine is not None and self.machine.awaiting_resets([topic_id]):
            assert self.shard is not None
            self.process.call(
                self.shard.tell, lambda machine, now_ms: machine.reset_heard(topic_id, asked, client_id, "/host")
            )

    # -- requests ------------------------------------------------------------------------------------------------------

    def handle(
        self, request: Any, version: int, client_id: str, connection: int, on_reply: Callable[[Any], None]
    ) -> asyncio.Task[Any] | None:
        """Have a handler answer, now or when the task ends that is given back. CloseConnectionError.

        The coordinator has heard of all topics that clients can know: `Groups.shard_of` tells it before each request.
        """
        self.tell_topics()
        handler = ENDPOINTS[api_of(type(request)).key].handler
        context = RequestContext("User:ANONYMOUS", client_id, "host:1", connection, version)
        answer: Any = self.process.call(handler, self._context, request, context)
        if not hasattr(answer, "__await__"):
            on_reply(_made(answer))
            return None

        def answered(task: asyncio.Task[Any]) -> None:
            if not task.cancelled():
                on_reply(_made(task.result()))

        task: asyncio.Task[Any] = self.process.create_task(answer)
        task.add_done_callback(answered)
        return task

    def administrate(self, request: Any, version: int, on_reply: Callable[[Any], None] = lambda reply: None) -> None:
        """Take a request of an administrator, on a connection of its own."""
        if self.shard is not None:
            self.handle(request, version, "admin", 1 << 40, on_reply)

    # -- the log -------------------------------------------------------------------------------------------------------

    def _commit(self, partition: Partition) -> asyncio.Future[None]:
        world = self.world
        future: asyncio.Future[None] = world.loop.create_future()
        ms = world.chance.randint(0, 2)
        if world.chance.random() < world.slow_syncs:
            ms = world.chance.randint(20, 800)
        world.after(ms, self._synced, partition, self._log_of(partition).begin_sync(), future, self.lives)
        return future

    def _synced(self, partition: Partition, begun: tuple[int, int], future: asyncio.Future[None], life: int) -> None:
        if life != self.lives:
            return
        log = self._log_of(partition)
        if self.fails_sync:
            self.fails_sync = False
            self.world.say("%s: a sync fails", self)
            log.failure = OSError(5, "the disk does not write")
        if log.failure is not None:
            self.process.call(future.set_exception, log.failure)
            return
        log.synced(begun)
        self.world.rules.durable(self)
        self.process.call(partition.high_watermark_moved)
        self.process.call(future.set_result, None)

    def _log_of(self, partition: Partition) -> FalseLog:
        return self.log if self.ranges_log is None or partition.name.topic == TOPIC else self.ranges_log

    def _appended(self, batch: Batch) -> None:
        _fold(self.fold, batch, batch.entries)

    def _cut(self, end: int) -> None:
        self.world.say("%s: its log is cut to %d", self, end)
        self.fold = self._folded(lambda offset, last: True)
        self.world.rules.cut(self, end)

    def _ranges_cut(self, end: int) -> None:
        self.world.say("%s: its log of ranges is cut to %d", self, end)
        self.world.rules.counts["ranges cut"] += 1

    def compact(self) -> None:
        """Clean the log up to somewhere."""
        end = self.world.chance.randint(0, self.log.end)
        stay = self.log.compact(end)
        self.world.say("%s: compacts up to %d, %d records stay", self, end, stay)
        if self.ranges_log is not None:
            self.ranges_log.compact(self.world.chance.randint(0, self.ranges_log.end))

    # -- comparing -----------------------------------------------------------------------------------------------------

    def _folded(self, keep: Callable[[int, bool], bool]) -> Coordinator:
        """Fold the records of the log whose offset, and whether they are the last of their key, `keep` wants."""
        standing = self.log.standing()
        last = {entry.key: entry.offset for it in standing if it.counts for entry in it.batch.entries}
        machine = Coordinator(self.world.settings, self.world.image)
        for batch, counts in standing:
            kept = [
                entry
                for entry in batch.entries
                if counts is None or keep(entry.offset, last.get(entry.key) == entry.offset)
            ]
            _fold(machine, batch, kept)
        return machine

    def check_replay(self) -> None:
        """Replay equals live: of the log as it stands, as if it were compacted, and as if it were meanwhile."""
        overtaken = self.world.chance.randint(0, self.log.end)
        for begin in (0, overtaken, self.log.end):
            machine = self._folded(lambda offset, last, begin=begin: offset < begin or last)  # type: ignore[misc]
            assert_stored_equal(machine, self.fold)

    def check_stored(self, machine: Coordinator, group_id: str) -> None:
        """The stored group equals the fold of its records."""
        assert_same_group(machine.groups.get(group_id), self.fold.groups.get(group_id), live=True)

    def __str__(self) -> str:
        return f"broker {self.number}"


def _fold(machine: Coordinator, batch: Batch, entries: Sequence[Entry]) -> None:
    """Apply what is left of a batch."""
    for entry in entries:
        machine.apply(entry.record, producer_id=batch.producer_id)
    if batch.is_committed is not None:
        machine.apply_marker(batch.producer_id, EPOCH, batch.is_committed)


def assert_stored_equal(one: Coordinator, other: Coordinator) -> None:
    """Two machines that have read the same records are the same."""
    assert one.positions == other.positions
    for group_id in one.groups.keys() | other.groups.keys():
        assert_same_group(one.groups.get(group_id), other.groups.get(group_id))


def assert_same_group(
    one: ConsumerGroup | ClassicGroup | None, other: ConsumerGroup | ClassicGroup | None, *, live: bool = False
) -> None:
    """The same stored state; `live`: the first one may have more that is not stored."""
    if live and isinstance(one, ClassicGroup):
        if not one.is_stored:
            assert other is None, (one, other)
            return
        assert isinstance(other, ClassicGroup), (one, other)
        assert one.generation >= other.generation
        if one.state is ClassicState.STABLE:
            assert stored(one) == stored(other)
        return
    if isinstance(one, ClassicGroup) and isinstance(other, ClassicGroup):
        assert stored(one) == stored(other)
        return
    assert one == other, f"\n{one}\n{other}"


def stored(group: ClassicGroup) -> tuple[object, ...]:
    """Return the classic group that the log's records describe."""
    members = [
        (
            member.member_id,
            member.instance_id,
            member.assignment,
            member.session_timeout_ms,
            member.metadata(group.protocol_name),
        )
        for member in group.members.values()
    ]
    return group.generation, group.protocol_type, group.protocol_name, group.leader, members


def group_of(request: Any) -> str:
    """The group that a request concerns."""
    if isinstance(request, OffsetFetchRequest):
        return request.groups[0].group_id
    group_id = request.group_id
    assert isinstance(group_id, str)
    return group_id


__all__ = ["Broker", "Cause", "CloseConnectionError", "Seen", "WatchedCoordinator", "see"]


def _made(answer: Any) -> Any:
    return answer.make() if isinstance(answer, Large) else answer
