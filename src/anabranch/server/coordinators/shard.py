"""The shell of one coordinator shard: a pure machine over one partition of an internal topic.

    LOADING -> ACTIVE -> FAILED -> LOADING -> ...            UNLOADED is the end

- `submit` decides, appends the outcome's records as one batch, applies them and sets timers without awaiting; replies
  and answers are given once everything that they were decided upon is durable.
- The machine is a fold over the log. When the log refuses records, or loses those that were applied, the machine is
  dropped, waiting requests are answered COORDINATOR_NOT_AVAILABLE, and the log is read anew.
- Some records may go to a second log, which is beside the first one as soon as its topic exists. It is a help, not a
  promise: a machine whose second log cannot be read begins without it, and what follows is said in a line of the log.
- A request that is parked waits for the `Answer` with its ticket; when its connection is closed the ticket is dropped.
- A timer's decision whose records cannot be encoded, a fault of ours, concerns one group: nothing of it is written, and
  the timer rings again later. The other groups of the shard go on.
- A decision that looks at much is made, and its records are applied, in a thread; what comes meanwhile waits (`turns`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from anabranch.base.errors import ApiError, DecodeError, ErrorCode
from anabranch.codec import EncodeError
from anabranch.machines.outcome import CancelTimer, Outcome, Parked, ParkedReply, SetTimer
from anabranch.records.batch import end_transaction_marker, parse_header
from anabranch.records.key_values import encode_pairs
from anabranch.runtime.clock import Clock, SteadyTime
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.loop_steps import timed
from anabranch.runtime.timers import Timers
from anabranch.server.coordinators.durable_replies import AppendedLog, DurableReplies, refuse
from anabranch.server.coordinators.follow_ups import FollowUps
from anabranch.server.coordinators.loading import Loading
from anabranch.server.coordinators.record_codec import Encoded, Machine, RecordCodec, apply_outcome
from anabranch.server.coordinators.second_log import SecondLog
from anabranch.server.coordinators.shard_state import ShardState, refusal
from anabranch.server.coordinators.turns import APART_MAX, Turns, in_thread
from anabranch.server.partitions.partition import Partition
from anabranch.storage.interface import OfflineLogError

events = EventLogger("shard")
RELOAD_DELAY_MS = 1_000
"""Between a failure and the next attempt to load; doubled with every failure that follows, up to the maximum."""
RELOAD_DELAY_MAX_MS = 30_000
RING_AGAIN_MS = 30_000
"""After this a timer rings again whose decision could not be written."""
WARNING_INTERVAL_S = 10.0
_RELOAD = object()
"""The key of the timer that ends the delay."""
CATCH_UP_PAUSE_S = 0.01
"""The pause between two steps of applying the records deferred by loading."""
ON_LOOP_MAX = 300
"""What a decision that is made on the loop may look at: partitions, at 5 to 10 microseconds each."""

RecordT = TypeVar("RecordT")
Reply = TypeVar("Reply")
MachineT = TypeVar("MachineT", bound=Machine[Any])


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
        want_beside: Callable[[], None] = lambda: None,
        room: asyncio.Semaphore | None = None,
    ) -> None:
        """`make` returns an empty machine; `commit` makes a partition's records durable (`Replicas.commit`).

        `prepare` is called with the machine when its log is applied, before it decides anything. `perform` is given
        every effect of an outcome once its records are durable. `beside` finds the partition of the second log, and
        `want_beside` has it made if it is missing. `room` bounds what all shards do in threads.
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
        self._second = SecondLog(beside, want_beside, self._durable, clock, self._on_changed)
        self._parked: dict[Hashable, asyncio.Future[Any]] = {}
        self._timers = Timers(self.now_ms, self._on_timer)
        self._follow_ups = FollowUps(self._order_timer, self._answer_parked)
        self._failures = 0
        self._warnings = EventLimit(WARNING_INTERVAL_S)
        self._loading: asyncio.Task[None] | None = None
        self._catching_up: asyncio.Task[None] | None = None
        self._turns = Turns(str(partition.name), clock)
        self._room = room or asyncio.Semaphore(APART_MAX)

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether the shard takes requests."""
        return self.state is ShardState.ACTIVE

    @property
    def machine(self) -> MachineT:
        """The machine, to be read. ApiError when the shard is not active."""
        if self.state is not ShardState.ACTIVE:
            raise refusal(self.state)
        assert self._machine is not None
        return self._machine

    @property
    def is_deciding(self) -> bool:
        """Whether something is decided apart: what comes now waits in line, and the machine may be amid a change."""
        return self._turns.busy

    def ask(
        self,
        decide: Callable[[MachineT, int], Outcome[Any, RecordT]],
        weigh: Callable[[MachineT], int] | None = None,
        look: Callable[[], None] | None = None,
    ) -> Any:
        """Decide, append, apply; the reply, or a future of it where it has to wait: for the disk, in line, or parked.

        Raises ApiError where the shard is not active or the log refuses the records; the future fails with it too.
        `weigh`: how much the decision looks at; it is made in a thread where that is more than `ON_LOOP_MAX`.
        `look` is called once, on the loop, directly before the decision: at what the loop alone may look at.
        """
        if self._turns.busy or (weigh is not None and weigh(self.machine) > ON_LOOP_MAX):
            return self._turns.take(partial(self._decided_in_turn, self.machine, decide, weigh, look))
        return self._decide(decide, look)

    async def submit(
        self,
        decide: Callable[[MachineT, int], Outcome[Reply | Parked, RecordT]],
        weigh: Callable[[MachineT], int] | None = None,
    ) -> Reply:
        """Decide, append, apply, and wait until the reply may be sent. Raises `ApiError` as `ask` does."""
        answer = self.ask(decide, weigh)
        return await answer if isinstance(answer, asyncio.Future) else answer  # type: ignore[no-any-return]

    def read(
        self, look: Callable[[MachineT, int], Reply], weigh: Callable[[MachineT], int] | None = None
    ) -> Reply | asyncio.Future[Reply]:
        """Read the machine; a future where that has to wait, or what is read is not durable. Otherwise as `ask`."""
        if self._turns.busy or (weigh is not None and weigh(self.machine) > ON_LOOP_MAX):
            return self._turns.take(partial(self._read_in_turn, self.machine, look, weigh))
        reply = look(self.machine, self.now_ms())
        return self._durable.when(reply)

    def undisturbed(self) -> AbstractAsyncContextManager[None]:
        """For a block that awaits nothing, and reads the machine: nothing is decided apart meanwhile."""
        return self._turns.between()

    def tell(
        self, decide: Callable[[MachineT, int], Outcome[None, RecordT]], weigh: Callable[[MachineT], int] | None = None
    ) -> None:
        """Submit a decision without a reply; a shard that is not active makes it when it is loaded."""
        if self.state is ShardState.ACTIVE:
            self._decide_alone(decide, weigh)

    async def end_transaction(
        self, producer_id: int, producer_epoch: int, *, committed: bool, coordinator_epoch: int
    ) -> None:
        """Append the marker that ends a producer's transaction here, if it has one. ApiError as for `ask`."""
        machine = self.machine
        write = partial(self._write_marker, machine, producer_id, producer_epoch, committed, coordinator_epoch)
        end = partial(machine.apply_marker, producer_id, producer_epoch, committed)
        if self._turns.busy or self._marker_is_large(machine, producer_id):
            await self._turns.take(partial(self._ended_in_turn, machine, producer_id, write, end))
            return
        write()
        end()
        done = self._ended(machine, producer_id)
        if done is not None:
            await done

    def _marker_is_large(self, machine: MachineT, producer_id: int) -> bool:
        weigh = self._codec.marker_weight
        return weigh is not None and weigh(machine, producer_id) > ON_LOOP_MAX

    def _write_marker(
        self, machine: MachineT, producer_id: int, producer_epoch: int, committed: bool, coordinator_epoch: int
    ) -> None:
        self._resume_log()
        self._check_is(machine)
        if self.partition.table.known(producer_id) is None:
            return  # It wrote nothing here, and nothing of it is in line before this (`machines.partition.markers`).
        wall_ms = self._clock.now_ms()
        marker = end_transaction_marker(
            producer_id, producer_epoch, commit=committed, coordinator_epoch=coordinator_epoch, timestamp_ms=wall_ms
        )
        self._append(marker, self.now_ms())

    def _ended(self, machine: MachineT, producer_id: int) -> asyncio.Future[None] | None:
        """Decide what follows from a marker that is applied; a future where that or the marker is not durable yet."""
        marked, key = self._codec.marked, self._codec.after_marker
        if marked is not None:
            self._guarded(lambda: self._decide(lambda machine, now_ms: marked(machine, producer_id, now_ms)))
        self._check_is(machine)
        if key is not None:
            self._guarded(lambda: self.ask(*self._of_timer(key)), key)
            self._check_is(machine)
        return self._durable.when(None)

    # -- in line -------------------------------------------------------------------------------------------------------

    async def _decided_in_turn(
        self,
        machine: MachineT,
        decide: Callable[[MachineT, int], Outcome[Any, RecordT]],
        weigh: Callable[[MachineT], int] | None,
        look: Callable[[], None] | None = None,
    ) -> Any:
        """Decide when the turn has come: in a thread if it is much, which only what waits in line can tell."""
        self._check_is(machine)
        if weigh is None or weigh(machine) <= ON_LOOP_MAX:
            return self._decide(decide, look)
        async with self._room:
            return await self._decided_apart(machine, decide, look)

    async def _decided_apart(
        self,
        machine: MachineT,
        decide: Callable[[MachineT, int], Outcome[Any, RecordT]],
        look: Callable[[], None] | None,
    ) -> Any:
        self._check_is(machine)
        self._resume_log()
        if look is not None:
            look()

        def decided() -> tuple[Outcome[Any, RecordT], Encoded, int]:
            now_ms = self.now_ms()
            outcome = decide(machine, now_ms)
            return outcome, self._encoded(outcome), now_ms

        outcome, encoded, now_ms = await self._apart(machine, decided)
        self._write(encoded, now_ms)
        if outcome.records:
            try:
                await self._apart(machine, partial(apply_outcome, machine, outcome))
            except ApiError:
                raise
            except Exception as error:
                self._fail("a record could not be applied", error)
                raise
        return self._follow_up(outcome)

    async def _read_in_turn(
        self, machine: MachineT, look: Callable[[MachineT, int], Any], weigh: Callable[[MachineT], int] | None
    ) -> Any:
        self._check_is(machine)
        if weigh is None or weigh(machine) <= ON_LOOP_MAX:
            return self._durable.when(look(machine, self.now_ms()))
        async with self._room:
            self._check_is(machine)
            return self._durable.when(await self._apart(machine, partial(look, machine, self.now_ms())))

    async def _ended_in_turn(
        self, machine: MachineT, producer_id: int, write: Callable[[], None], end: Callable[[], None]
    ) -> asyncio.Future[None] | None:
        self._check_is(machine)
        if self._marker_is_large(machine, producer_id):
            async with self._room:
                write()
                await self._apart(machine, end)
        else:
            write()
            end()
        return self._ended(machine, producer_id)

    async def _timer_in_turn(self, machine: MachineT, key: Hashable, mark: object) -> None:
        if self._machine is machine and self._turns.still_rings(key, mark) and not self._follow_ups.holds(key):
            await self._decided_in_turn(machine, *self._of_timer(key))

    async def _apart(self, machine: MachineT, work: Callable[[], Reply]) -> Reply:
        """Do something with the machine in a thread; ApiError if the shard has dropped the machine meanwhile."""
        try:
            return await in_thread(work)
        finally:  # What was raised about a dropped machine tells nothing of the one that there may be now.
            self._check_is(machine)

    def _check_is(self, machine: MachineT) -> None:
        """ApiError unless this is the machine still."""
        if self._machine is not machine:
            raise refusal(ShardState.FAILED if self.active else self.state)

    def _resume_log(self) -> None:
        """Resume the log after a failed sync, which cuts its unsynced records, before the next decision."""
        try:
            self.partition.log.resume(self._clock.now_ms())
        except OSError as failure:
            self._refused_by_disk(failure)

    # -- performing --------------------------------------------------------------------------------------------------

    def _decide(
        self, decide: Callable[[MachineT, int], Outcome[Any, RecordT]], look: Callable[[], None] | None = None
    ) -> Any:
        """Decide, append, apply, follow up, at once."""
        self._resume_log()
        machine, now_ms = self.machine, self.now_ms()
        if look is not None:
            look()
        outcome = decide(machine, now_ms)
        if outcome.records:
            self._write(self._encoded(outcome), now_ms)
            try:
                apply_outcome(machine, outcome)
            except Exception as error:
                self._fail("a record could not be applied", error)
                raise
        return self._follow_up(outcome)

    def _encoded(self, outcome: Outcome[Any, RecordT]) -> Encoded:
        """Encode the records of an outcome: those of the second log as pairs, the others as a batch."""
        producer_id, producer_epoch = outcome.producer or (-1, -1)
        encode, is_beside = self._codec.encode, self._codec.is_beside
        records: Sequence[RecordT] = outcome.records
        beside: Sequence[RecordT] = ()
        if is_beside is not None and any(map(is_beside, records)):
            beside = [record for record in records if is_beside(record)]
            records = [record for record in records if not is_beside(record)]
        batch = None
        if records:
            batch = encode_pairs(
                list(map(encode, records)),
                self._clock.now_ms(),
                producer_id=producer_id,
                producer_epoch=producer_epoch,
            )
        return Encoded(list(map(encode, beside)), batch)

    def _write(self, encoded: Encoded, now_ms: int) -> None:
        if encoded.beside:
            self._second.append(encoded.beside, now_ms)
        if encoded.batch is not None:
            self._append(encoded.batch, now_ms)

    def _follow_up(self, outcome: Outcome[Any, RecordT]) -> Any:
        """The reply of an outcome whose records are applied, or a future of it; effects, timers, answers."""
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
        self._turns.ordered(order.key)
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

    def _refused_by_disk(self, failure: OSError) -> NoReturn:
        self.partition.storage_failed(failure)
        if self.state is ShardState.ACTIVE:
            self._fail("append refused", failure)
        raise refusal(self.state) from failure

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
        elif self._follow_ups.holds(key):
            pass
        elif self._turns.busy and self._machine is not None:
            work = partial(self._timer_in_turn, self._machine, key, self._turns.rings(key))
            self._guard(self._turns.take(work), key)
        else:
            self._guarded(lambda: self.ask(*self._of_timer(key)), key)

    def _of_timer(
        self, key: Hashable
    ) -> tuple[Callable[[MachineT, int], Outcome[None, RecordT]], Callable[[MachineT], int] | None]:
        """The decision of a timer, and what weighs it."""
        weigh = self._codec.timer_weight
        return lambda machine, now_ms: machine.on_timer(key, now_ms), None if weigh is None else (
            lambda machine: weigh(machine, key)
        )

    def _decide_alone(
        self, decide: Callable[[MachineT, int], Outcome[None, RecordT]], weigh: Callable[[MachineT], int] | None = None
    ) -> None:
        """Make a decision that no request asked for; reload the shard if that fails, as no client would retry."""
        self._guarded(lambda: self.ask(decide, weigh))

    def _guarded(self, act: Callable[[], Any], timer: Hashable = None) -> None:
        """Make a decision that no client would retry, of a `timer` if it is one's."""
        try:
            done = act()
        except Exception as error:
            self._not_decided(error, timer)
        else:
            if isinstance(done, asyncio.Task):
                self._guard(done, timer)

    def _guard(self, turn: asyncio.Future[Any], timer: Hashable = None) -> None:
        """As `_guarded`, for a decision in line."""

        def done(turn: asyncio.Future[Any]) -> None:
            error = None if turn.cancelled() else turn.exception()
            if error is not None:
                self._not_decided(error, timer)

        turn.add_done_callback(timed(asyncio.get_running_loop(), "coordinator", done))

    def _not_decided(self, error: BaseException, timer: Hashable) -> None:
        """Decide later what the second log has refused, or what cannot be written; otherwise load the shard anew."""
        if isinstance(error, ApiError):  # Where the first log has refused, the shard is being reloaded.
            self._ring_again(timer, RELOAD_DELAY_MS)
            return
        if timer is None or not isinstance(error, EncodeError):
            self._fail("decision failed", error)
            return
        suppressed = self._warnings.admit(self.now_ms() / 1000)
        if suppressed is not None:
            name, shown = self.partition.name, str(timer)[:200]
            events.error("decision not written", partition=name, timer=shown, exception=error, suppressed=suppressed)
        self._ring_again(timer, RING_AGAIN_MS)

    def _ring_again(self, timer: Hashable, in_ms: int) -> None:
        if timer is not None and self.active and timer not in self._timers:
            self._order_timer(SetTimer(timer, self.now_ms() + in_ms))

    # -- loading and failing -----------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the log and become active; a failed attempt is repeated later."""
        began_ms = self._clock.monotonic_ms()
        try:
            loading = Loading(self.partition, self._second.find, self._make(), self._codec, self._clock)
            machine = await loading.machine()
        except (OSError, OfflineLogError, DecodeError) as error:
            self._fail("log not read", error)
            return
        except Exception as error:  # ours
            self._fail("log not applied", error)
            return
        if self.state is ShardState.UNLOADED:
            return
        self._machine, self.state = machine, ShardState.ACTIVE
        self.records_loaded = loading.records
        self.partition.watch(self._on_changed)
        self._durable.log.written = self.partition.log.end
        if self._codec.is_beside is not None:
            self._second.open()
        for log in filter(None, (self._durable.log, self._durable.beside)):
            if not log.is_durable:
                self._durable.hasten(log)
        self.load_ms = self._clock.monotonic_ms() - began_ms
        self._prepare(machine)
        self._decide_alone(lambda machine, now_ms: machine.loaded(now_ms), self._codec.loaded_weight)
        if self.active:
            self._failures = 0
        if self._codec.catch_up is not None and loading.is_deferred:
            work = self._catch_up(machine, self._codec.catch_up)
            self._catching_up = asyncio.get_running_loop().create_task(work, name=f"catch up {self.partition.name}")

    async def _catch_up(self, machine: MachineT, step: Callable[[MachineT], bool]) -> None:
        """Apply the records deferred by loading, one step at a time, while the shard has this machine.

        In a thread: those of a group, of which there may be many, are applied together.
        """
        try:
            while await self._turns.take(lambda: self._apart(machine, partial(step, machine))):
                await asyncio.sleep(CATCH_UP_PAUSE_S)
        except ApiError:
            pass  # The shard has dropped this machine.
        except Exception as error:
            self._fail("what was loaded is not sound", error)

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
            refuse(future, refusal(ShardState.FAILED))

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
        self._second.close()
        self._durable.beside = None
        self._timers.cancel_all()
        self._follow_ups.drop()
        parked, self._parked = self._parked, {}
        for future in parked.values():
            refuse(future, refusal(state))
