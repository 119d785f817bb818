"""The shell of one coordinator shard: a pure machine over one partition of an internal topic.

    LOADING -> ACTIVE -> FAILED -> LOADING -> ...            UNLOADED is the end

- `submit` decides, appends the outcome's records as one batch, applies them and sets timers without awaiting; replies
  and answers are given once everything that they were decided upon is durable.
- The machine is a fold over the log. When the log refuses records, or loses those that were applied, the machine is
  dropped, waiting requests are answered COORDINATOR_NOT_AVAILABLE, and the log is read anew.
- Some records may go to a second log, which is beside the first one as soon as its topic exists. It is a help, not a
  promise: a machine whose second log cannot be read begins without it, and what follows is said in a line of the log.
- A request that is parked waits for the `Answer` with its ticket; when its connection is closed the ticket is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

from anabranch.base.errors import ApiError, DecodeError, ErrorCode
from anabranch.machines.outcome import CancelTimer, Outcome, Parked, ParkedReply, SetTimer
from anabranch.records.batch import end_transaction_marker, parse_header
from anabranch.records.key_values import encode_pairs
from anabranch.runtime.clock import Clock, SteadyTime
from anabranch.runtime.events import EventLogger
from anabranch.runtime.loop_steps import timed
from anabranch.runtime.timers import Timers
from anabranch.server.coordinators.durable_replies import AppendedLog, DurableReplies
from anabranch.server.coordinators.follow_ups import FollowUps
from anabranch.server.coordinators.replay import BULK_FROM_SIZE, Replay
from anabranch.server.partitions.partition import Partition
from anabranch.storage.interface import OfflineLogError, Slice, fetched

if TYPE_CHECKING:  # It needs NumPy, which a broker does without until a log is large.
    from anabranch.server.coordinators.bulk_replay import BulkReplay

events = EventLogger("shard")
RELOAD_DELAY_MS = 1_000
"""Between a failure and the next attempt to load; doubled with every failure that follows, up to the maximum."""
RELOAD_DELAY_MAX_MS = 30_000
_RELOAD = object()
"""The key of the timer that ends the delay."""
CATCH_UP_PAUSE_S = 0.01
"""The pause between two steps of applying the records deferred by loading."""
APPLY_STEP = 500
"""Records that are applied before the loop runs other tasks."""

RecordT = TypeVar("RecordT")
Taken = TypeVar("Taken", contravariant=True)
Reply = TypeVar("Reply")


class Machine(Protocol[Taken]):
    """The pure machine of a shard: reads no clock and does no I/O."""

    def apply(self, record: Taken, *, producer_id: int = -1) -> None:
        """Fold a record; one with a producer id is pending until that producer's marker."""

    def apply_marker(self, producer_id: int, producer_epoch: int, committed: bool) -> None:
        """End a producer's transaction: its pending records count from now on, or never."""

    def loaded(self, now_ms: int) -> Outcome[None, Any]:
        """Handle the end of loading: set timers, and do the overdue work."""

    def on_timer(self, key: Any, now_ms: int) -> Outcome[None, Any]:
        """Decide as the timer of `key` is due."""


MachineT = TypeVar("MachineT", bound=Machine[Any])


class RecordCodec(NamedTuple, Generic[RecordT]):
    """Translates records to keys and values and back; `decode` returns None for unknown kinds."""

    encode: Callable[[RecordT], tuple[bytes, bytes | None]]
    decode: Callable[[bytes, bytes | None], RecordT | None]
    make_index: Callable[[], Any] | None = None
    """Make a `bulk_replay.Index` of records that a machine need not apply when it is loaded from a large log."""
    adopt: Callable[[Any, Any], None] | None = None
    """Give that index to the machine."""
    catch_up: Callable[[Any], bool] | None = None
    marked: Callable[[Any, int, int], Outcome[None, RecordT]] | None = None
    """What the machine decides after a marker is applied, by the producer id and the time."""
    is_beside: Callable[[RecordT], bool] | None = None
    """Whether a record is one of the second log; None where there is none."""
    beside_empty: Callable[[Any], None] | None = None
    """Tell the machine, before `loaded`, that its second log has never had a record, as far as can be seen."""
    """Have the machine apply a millisecond's worth of the index's records; return whether more are left."""


class ShardState(Enum):
    """The states of a shard, each with the error code of requests in it."""

    LOADING = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
    ACTIVE = ErrorCode.NONE
    FAILED = ErrorCode.COORDINATOR_NOT_AVAILABLE
    UNLOADED = ErrorCode.NOT_COORDINATOR


MESSAGES = {
    ShardState.LOADING: "The coordinator is still reading its log; try again.",
    ShardState.FAILED: "The coordinator could not read or write its log; try again.",
    ShardState.UNLOADED: "The broker is stopping.",
}


class Shard(Generic[MachineT, RecordT]):
    """One coordinator shard; `load` it before anything else."""

    def __init__(
        self,
        partition: Partition,
        make: Callable[[], MachineT],
        codec: RecordCodec[RecordT],
        *,
        commit: Callable[[Partition], asyncio.Future[None]],
        clock: Clock,
        prepare: Callable[[MachineT], None] = lambda machine: None,
        perform: Callable[[Any], None] | None = None,
        beside: Callable[[], Partition | None] = lambda: None,
    ) -> None:
        """`make` returns an empty machine; `commit` makes a partition's records durable (`Replicas.commit`).

        `prepare` is called with the machine when its log is applied, before it decides anything. `perform` is given
        every effect of an outcome once its records are durable. `beside` finds the partition of the second log.
        """
        self.partition = partition
        self.state = ShardState.LOADING
        self.load_ms = 0
        """How long the last loading took."""
        self.records_loaded = 0
        self._machine: MachineT | None = None
        self._make = make
        self._codec = codec
        self._clock = clock
        self._prepare = prepare
        self._effect = perform
        self.now_ms = SteadyTime(clock).now_ms
        """The clock of the machines, in ms."""
        self._durable = DurableReplies(
            AppendedLog(partition), commit, lambda error: self._fail("records not synced", error)
        )
        self._find_beside = beside
        self._parked: dict[Hashable, asyncio.Future[Any]] = {}
        self._timers = Timers(self.now_ms, self._on_timer)
        self._follow_ups = FollowUps(self._order_timer, self._answer_parked)
        self._failures = 0
        self._loading: asyncio.Task[None] | None = None
        self._catching_up: asyncio.Task[None] | None = None

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the shard takes requests."""
        return self.state is ShardState.ACTIVE

    @property
    def machine(self) -> MachineT:
        """The machine, to be read. ApiError when the shard is not active."""
        if self.state is not ShardState.ACTIVE:
            raise ApiError(self.state.value, MESSAGES[self.state])
        assert self._machine is not None
        return self._machine

    def ask(self, decide: Callable[[MachineT, int], Outcome[Any, RecordT]]) -> Any:
        """Decide, append, apply; the reply, or a future of it where it has to wait: for the disk, or parked.

        Raises ApiError where the shard is not active or the log refuses the records; the future fails with it too.
        """
        self._resume_log()
        machine, now_ms = self.machine, self.now_ms()
        return self._perform(decide(machine, now_ms), now_ms)

    async def submit(self, decide: Callable[[MachineT, int], Outcome[Reply | Parked, RecordT]]) -> Reply:
        """Decide, append, apply, and wait until the reply may be sent. Raises `ApiError` as `ask` does."""
        answer = self.ask(decide)
        return await answer if isinstance(answer, asyncio.Future) else answer  # type: ignore[no-any-return]

    def read(self, look: Callable[[MachineT, int], Reply]) -> Reply | asyncio.Future[Reply]:
        """Read the machine; returns a future where the state read is not durable yet. ApiError as for `ask`."""
        reply = look(self.machine, self.now_ms())
        return self._durable.when(reply)

    def tell(self, decide: Callable[[MachineT, int], Outcome[None, RecordT]]) -> None:
        """Submit a decision without a reply; a shard that is not active makes it when it is loaded."""
        if self.state is ShardState.ACTIVE:
            self._decide_alone(decide)

    async def end_transaction(
        self, producer_id: int, producer_epoch: int, *, committed: bool, coordinator_epoch: int
    ) -> None:
        """Append the marker that ends a producer's transaction in this partition. ApiError as for `ask`."""
        self._resume_log()
        machine, now_ms = self.machine, self.now_ms()
        marker = end_transaction_marker(
            producer_id,
            producer_epoch,
            commit=committed,
            coordinator_epoch=coordinator_epoch,
            timestamp_ms=self._clock.now_ms(),
        )
        self._append(marker, now_ms)
        machine.apply_marker(producer_id, producer_epoch, committed)
        if self._codec.marked is not None:
            marked = self._codec.marked
            self._decide_alone(lambda machine, now_ms: marked(machine, producer_id, now_ms))
        done = self._durable.when(None)
        if done is not None:
            await done

    def _resume_log(self) -> None:
        """Resume the log after a failed sync, which cuts its unsynced records, before the next decision."""
        try:
            self.partition.log.resume(self._clock.now_ms())
        except OSError as failure:
            self._refused_by_disk(failure)

    # -- performing --------------------------------------------------------------------------------------------------

    def _perform(self, outcome: Outcome[Any, RecordT], now_ms: int) -> Any:
        machine = self._machine
        assert machine is not None
        if outcome.records:
            producer_id, producer_epoch = outcome.producer or (-1, -1)
            is_beside = self._codec.is_beside
            records: Sequence[RecordT] = outcome.records
            if is_beside is not None and any(map(is_beside, records)):
                self._append_beside([record for record in records if is_beside(record)], now_ms)
                records = [record for record in records if not is_beside(record)]
            if records:
                pairs = [self._codec.encode(record) for record in records]
                batch = encode_pairs(
                    pairs, self._clock.now_ms(), producer_id=producer_id, producer_epoch=producer_epoch
                )
                self._append(batch, now_ms)
            try:
                for record in outcome.records:
                    machine.apply(record, producer_id=producer_id)
            except Exception as error:
                self._fail("a record could not be applied", error)
                raise
        reply = outcome.reply
        if isinstance(reply, Parked):
            reply = self._park(reply.ticket)
        else:
            reply = self._durable.when(reply)
        for effect in outcome.effects:
            self._perform_when_durable(effect)
        self._follow_ups.carry_out(outcome.timers, outcome.answers)
        return reply

    def _order_timer(self, order: SetTimer | CancelTimer) -> None:
        if isinstance(order, SetTimer):
            self._timers.set(order.key, order.at_ms)
        else:
            self._timers.cancel(order.key)

    def _answer_parked(self, answer: ParkedReply) -> None:
        parked = self._parked.pop(answer.ticket, None)
        if parked is not None and not parked.done():
            self._durable.give(parked, answer.reply)

    def _append(self, batch: bytearray, now_ms: int) -> None:
        partition = self.partition
        error = partition.unavailable()
        try:
            if error is not ErrorCode.NONE:
                raise OSError(0, error.name)
            header = parse_header(batch)
            self._durable.log.written = partition.append(batch, header, now_ms).last_offset + 1
        except OSError as failure:
            self._refused_by_disk(failure)
        if partition.settings.fsync or partition.log.flush_due:
            self._durable.hasten(self._durable.log)

    def _append_beside(self, records: Sequence[RecordT], now_ms: int) -> None:
        """Append to the second log, before anything to the first. ApiError where it takes no records.

        Tombstones need no log: what they delete is gone with it.
        """
        pairs = [self._codec.encode(record) for record in records]
        log = self._open_beside()
        if log is None:
            if any(value is not None for _, value in pairs):
                raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "The log beside the coordinator's is missing.")
            return
        partition = log.partition
        try:
            partition.log.resume(self._clock.now_ms())
            error = partition.unavailable()
            if error is not ErrorCode.NONE:
                raise OSError(0, error.name)
            batch = encode_pairs(pairs, self._clock.now_ms())
            log.written = partition.append(batch, parse_header(batch), now_ms).last_offset + 1
        except OSError as failure:
            partition.storage_failed(failure)
            raise ApiError(
                ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{partition.name} takes no records: {failure}"
            ) from failure
        if partition.settings.fsync or partition.log.flush_due:
            self._durable.hasten(log)

    def _open_beside(self) -> AppendedLog | None:
        """The second log, as it is now: its topic may have been made, or made anew."""
        partition = self._find_beside()
        if partition is None or (self._durable.beside is not None and self._durable.beside.partition is partition):
            return None if partition is None else self._durable.beside
        if self._durable.beside is not None:
            self._durable.beside.partition.unwatch(self._on_changed)
            self._durable.beside.is_replaced = True
        self._durable.beside = AppendedLog(partition)
        self._durable.beside.written = partition.log.end
        partition.watch(self._on_changed)
        return self._durable.beside

    def _refused_by_disk(self, failure: OSError) -> NoReturn:
        self.partition.storage_failed(failure)
        if self.state is ShardState.ACTIVE:
            self._fail("append refused", failure)
        raise ApiError(self.state.value, MESSAGES[self.state]) from failure

    def _on_changed(self) -> None:
        """Reload if a log has lost records that are applied."""
        lost = self._durable.log if self._durable.log.has_lost else self._durable.beside
        if lost is not None and lost.has_lost:
            reason = OSError(0, f"{lost.partition.name} ends at {lost.partition.log.end} now")
            self._fail("records were cut from the log", reason)

    # -- durability --------------------------------------------------------------------------------------------------

    def _perform_when_durable(self, effect: Any) -> None:
        assert self._effect is not None, effect
        perform, durable = self._effect, self._durable.when(None)
        if durable is None:
            perform(effect)
            return

        def done(waited: asyncio.Future[None]) -> None:
            if not waited.cancelled() and waited.exception() is None:
                perform(effect)

        durable.add_done_callback(timed(asyncio.get_running_loop(), "coordinator", done))

    # -- parking -----------------------------------------------------------------------------------------------------

    def _park(self, ticket: Hashable) -> asyncio.Future[Any]:
        assert ticket not in self._parked, ticket
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._parked[ticket] = future

        def drop(_: asyncio.Future[Any]) -> None:
            if self._parked.get(ticket) is future:
                del self._parked[ticket]

        future.add_done_callback(drop)
        return future

    @property
    def parked(self) -> int:
        """How many requests are parked."""
        return len(self._parked)

    @property
    def waiting(self) -> int:
        """How many replies wait for the disk."""
        return len(self._durable)

    # -- timers ------------------------------------------------------------------------------------------------------

    def _on_timer(self, key: Hashable) -> None:
        if key is _RELOAD:
            self.load_soon()
        elif not self._follow_ups.holds(key):
            self._decide_alone(lambda machine, now_ms: machine.on_timer(key, now_ms))

    def _decide_alone(self, decide: Callable[[MachineT, int], Outcome[None, RecordT]]) -> None:
        """Make a decision that no request asked for; reload the shard if that fails, as no client would retry."""
        try:
            self.ask(decide)
        except ApiError:
            pass  # The log refused, and the shard is being reloaded.
        except Exception as error:
            self._fail("decision failed", error)

    # -- loading and failing -----------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the log and become active; a failed attempt is repeated later."""
        began_ms = self._clock.monotonic_ms()
        try:
            machine = await self._replayed()
        except (OSError, OfflineLogError, DecodeError) as error:
            self._fail("log not read", error)
            return
        except Exception as error:  # ours
            self._fail("log not applied", error)
            return
        if self.state is ShardState.UNLOADED:
            return
        self._machine, self.state = machine, ShardState.ACTIVE
        self.partition.watch(self._on_changed)
        self._durable.log.written = self.partition.log.end
        if self._codec.is_beside is not None:
            self._open_beside()
        for log in filter(None, (self._durable.log, self._durable.beside)):
            if not log.is_durable:
                self._durable.hasten(log)
        self.load_ms = self._clock.monotonic_ms() - began_ms
        self._prepare(machine)
        self._decide_alone(lambda machine, now_ms: machine.loaded(now_ms))
        if self.active:
            self._failures = 0
        if self._codec.catch_up is not None:
            work = self._catch_up(machine, self._codec.catch_up)
            self._catching_up = asyncio.get_running_loop().create_task(work, name=f"catch up {self.partition.name}")

    async def _catch_up(self, machine: MachineT, step: Callable[[MachineT], bool]) -> None:
        """Apply the records deferred by loading, one step at a time, while the shard has this machine."""
        try:
            while self._machine is machine and step(machine):
                await asyncio.sleep(CATCH_UP_PAUSE_S)
        except Exception as error:
            self._fail("what was loaded is not sound", error)

    async def _replayed(self) -> MachineT:
        machine = self._make()
        self.records_loaded = await self._read(self.partition, machine)
        if self._codec.is_beside is not None:
            beside = self._find_beside()
            if beside is not None:
                await self._read_beside(beside, machine)
                if beside.log.end == 0 and self._codec.beside_empty is not None:
                    self._codec.beside_empty(machine)
        return machine

    async def _read_beside(self, partition: Partition, machine: MachineT) -> None:
        """Apply the second log, or go on without it."""
        try:
            self.records_loaded += await self._read(partition, machine)
        except (OSError, OfflineLogError, DecodeError) as error:
            events.error(
                "log beside the coordinator's not read: work above committed offsets will be delivered again",
                partition=partition.name,
                reason=error,
            )

    async def _read(self, partition: Partition, machine: MachineT) -> int:
        """Apply a log; return the number of its records. Nothing is applied of one that cannot be read."""
        if partition.offline_reason is not None:
            raise OSError(0, partition.offline_reason)
        partition.log.resume(self._clock.now_ms())
        codec = self._codec
        slices = await fetched(partition.log.slices())
        replay: Replay | BulkReplay | None = None
        if sum(len(piece) for piece in slices) >= BULK_FROM_SIZE:
            replay = await self._in_bulk(machine, slices, partition)
        if replay is None:
            replay = Replay()
            for _ in replay.scan(slices):
                await asyncio.sleep(0)
        for applied, (key, value) in enumerate(replay.latest.items(), start=1):
            record = codec.decode(key, value)
            if record is not None:
                machine.apply(record)
            if not applied % APPLY_STEP:
                await asyncio.sleep(0)
        for held in replay.held():
            record = codec.decode(held.key, held.value)
            if record is not None:
                machine.apply(record, producer_id=held.producer_id)
        return replay.records

    async def _in_bulk(self, machine: MachineT, slices: Sequence[Slice], partition: Partition) -> BulkReplay | None:
        """Read a large log; None if it cannot be read in this way."""
        bulk = await asyncio.get_running_loop().run_in_executor(
            None, import_module, "anabranch.server.coordinators.bulk_replay"
        )
        is_first = partition is self.partition
        index = None if self._codec.make_index is None or not is_first else self._codec.make_index()
        replay: BulkReplay = bulk.BulkReplay(index)
        try:
            for _ in replay.scan(slices):
                await asyncio.sleep(0)
        except bulk.UnsuitedError:
            return None
        if self._codec.adopt is not None and is_first:
            self._codec.adopt(machine, index)
        return replay

    def _not_synced(self, error: BaseException) -> None:
        self._fail("records not synced", error)

    def _fail(self, what: str, error: BaseException) -> None:
        """Drop the machine and load again after a delay."""
        ours = None if isinstance(error, (OSError, OfflineLogError, DecodeError)) else error
        events.error(f"coordinator stopped: {what}", partition=self.partition.name, reason=error, exception=ours)
        waiting = self._durable.drop()
        if self.state is not ShardState.UNLOADED:
            self._stop(ShardState.FAILED)
            delay_ms = min(RELOAD_DELAY_MS * 2**self._failures, RELOAD_DELAY_MAX_MS)
            self._failures += 1
            self._timers.set(_RELOAD, self.now_ms() + delay_ms)
        for future in waiting:
            _refuse(future, ShardState.FAILED)

    def load_soon(self) -> None:
        """Begin to load."""
        self.state = ShardState.LOADING
        self._loading = asyncio.get_running_loop().create_task(self.load(), name=f"load {self.partition.name}")

    def unload(self) -> None:
        """Take no more requests: parked ones are answered NOT_COORDINATOR, those that wait for the disk go on."""
        self._stop(ShardState.UNLOADED)
        if self._loading is not None:
            self._loading.cancel()

    def _stop(self, state: ShardState) -> None:
        self.state = state
        self._machine = None
        self.partition.unwatch(self._on_changed)
        if self._durable.beside is not None:
            self._durable.beside.partition.unwatch(self._on_changed)
            self._durable.beside = None
        self._timers.cancel_all()
        self._follow_ups.drop()
        parked, self._parked = self._parked, {}
        for future in parked.values():
            _refuse(future, state)


def _refuse(future: asyncio.Future[Any], state: ShardState) -> None:
    if not future.done():
        future.set_exception(ApiError(state.value, MESSAGES[state]))
        future.add_done_callback(_consume)


def _consume(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of a canceled request's reply, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()
