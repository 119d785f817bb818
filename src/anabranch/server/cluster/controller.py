"""The shell of the controller: it decides, persists, applies, and performs effects, which come back as events.

One decision at a time: `decide` reads the state, its records go to the metadata store in one transaction, only then
are they applied and published, and the reply is given. Effects are performed one after the other, in their order; their
answers are submitted like commands. Requests that wait for a condition check it after every change.

A decision about a topic of 10,000 partitions takes 100 ms. From the first large topic on, a thread decides, applies and
checks: the state of a decision is not changed any more then, but replaced by the next one (`applied`). What a step
leaves behind is freed in a thread, too: 100,000 records take longer than a step may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.controller import nodes, views
from anabranch.machines.controller.effects import (
    Accepted,
    ApplyConfigs,
    CommandReply,
    Decision,
    Effect,
    InspectLayouts,
    InspectRetiring,
    PublishMetadata,
    Refused,
    SendLeaderAndIsr,
    SendStopReplica,
    Validated,
    WaitForResize,
)
from anabranch.machines.controller.folding import decide_fold_layouts
from anabranch.machines.controller.nodes import BrokerNode, DeleteNode, MetadataRecord, PutNode, Topic
from anabranch.machines.controller.reaper import decide_reap
from anabranch.machines.controller.resize import decide_leader_and_isr_answered, decide_retry
from anabranch.machines.controller.state import ControllerState, applied, apply
from anabranch.machines.controller.terms import decide_elected, decide_register_broker
from anabranch.machines.controller.topics import decide_stop_replica_answered
from anabranch.machines.outcome import SetTimer
from anabranch.runtime.clock import Clock, SteadyTime
from anabranch.runtime.events import EventLimit, EventLogger
from anabranch.runtime.freeing import free_one_by_one
from anabranch.runtime.timers import Timers
from anabranch.runtime.turns import in_turns
from anabranch.server.cluster.feed import everything, update_after
from anabranch.server.cluster.peers import Peers
from anabranch.server.cluster.resize_waits import Found, ResizeWaits, RunningResize, waits_after
from anabranch.server.cluster.view import ClusterUpdate
from anabranch.storage.interface import Create, Delete, MetadataStore, Operation, Set

events = EventLogger("controller")
Reply = TypeVar("Reply")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
RETRY_AFTER_FAILURE_MS = 500
EFFECTS_MAX = 1_000_000
DELETED_AT_A_TIME = 5_000
"""Nodes that are deleted in one transaction, where a decision deletes more and does nothing else."""
TOPICS_AT_A_TIME = 1_000
"""Topics that are looked at before other work has its turn."""
LINES_INTERVAL_S, LINES_MAX = 10.0, 10
"""Lines of the log about topics whose inspection fails: at most so many in the interval."""
LARGE_TOPIC = 200
"""Partitions of a topic from which on decisions are made in a thread: about 4 ms."""


class Controller:
    """The controller of a cluster. No other component reads its state; they read the updates that it publishes."""

    def __init__(self, store: MetadataStore, peers: Peers, clock: Clock) -> None:
        self.state = ControllerState()
        self._store = store
        self._peers = peers
        self._turn = asyncio.Lock()
        self._effects: asyncio.Queue[Effect] = asyncio.Queue(EFFECTS_MAX)
        self._worker: asyncio.Task[None] | None = None
        self._now_ms = SteadyTime(clock).now_ms
        self._timers = Timers(self._now_ms, self._on_timer)
        self.waits = ResizeWaits(self._now_ms)
        self._failed: dict[int, Effect] = {}
        """Effects that could not be performed, to be tried again, by the number of the failure."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[str | None, set[asyncio.Future[None]]] = {}
        """Who waits for a change of a topic; under None, of anything."""
        self._failures = 0
        self.inspections_failed = 0
        """Topics that rounds of inspection have left out."""
        self._lines = EventLimit(LINES_INTERVAL_S, LINES_MAX)
        self._refuses = False
        """Whether the broker is about to stop, so that no command begins."""
        self._large = False
        """Whether there has been a large topic, so that decisions are made in a thread."""

    # -- its term ----------------------------------------------------------------------------------------------------

    async def start(self, node_id: int, rack: str | None, endpoints: tuple[str, ...], *, unclean: bool) -> None:
        """Load the tree, begin a term, register this broker, and have every partition take its role."""
        for path in nodes.TREE:
            await self._store.ensure(path)
            for node in await self._store.subtree(path):
                if node.data:
                    apply(self.state, PutNode(node.path, node.data))
        self._large = any(len(topic.partitions) >= LARGE_TOPIC for topic in self.state.topics.values())
        epoch = await self.submit(decide_elected)
        self._peers.publish(everything(self.state, node_id))
        broker = BrokerNode(node_id, epoch, rack, endpoints)
        await self.submit(lambda state: decide_register_broker(state, broker, unclean=unclean))
        deletions: list[Effect] = []
        while not self._effects.empty():
            effect = self._effects.get_nowait()
            if isinstance(effect, SendStopReplica) and effect.topic_deleted:
                deletions.append(effect)
            else:
                await self._perform([effect])
        for effect in deletions:  # They may take minutes, and nobody waits for them.
            self._effects.put_nowait(effect)
        self._worker = asyncio.create_task(self._work(), name="controller")

    def refuse_commands(self) -> None:
        """Begin no further command, and have those that wait answered: the broker is about to stop."""
        self._refuses = True
        self._wake([*self._waiting])

    async def stop(self) -> None:
        """End the term; the next term continues the unfinished changes."""
        self._timers.cancel_all()
        for task in [self._worker, *self._tasks]:
            if task is not None:
                task.cancel()
        self._wake([*self._waiting])
        async with self._turn:
            pass  # The step that was begun has ended.

    # -- deciding ----------------------------------------------------------------------------------------------------

    async def submit(
        self, decide: Callable[[ControllerState], Decision[Reply]], *, partitions: int = 0, asked: bool = False
    ) -> Reply:
        """Decide, persist, apply, answer. OSError when the store refuses: then nothing has changed.

        `partitions`: of the topic that the decision makes or resizes. `asked`: by a client; ApiError where the broker
        is about to stop. A step that has begun runs to its end even if its caller is cancelled: persisted records are
        always applied.
        """
        self._large |= partitions >= LARGE_TOPIC
        step = asyncio.get_running_loop().create_task(self._freed(partial(self._step, decide, asked=asked), []))
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            step.add_done_callback(_log_failure)
            raise
        finally:
            del step  # Or what it failed with holds this frame, and the frame holds it.

    async def _freed(self, work: Callable[[list[Any]], Awaitable[T]], spent: list[Any]) -> T:
        """Do work, then free what it has put into `spent`, if there may be much of it in a thread.

        In the next turn of the loop: in this one the future that has woken the task up holds what it has brought.
        """
        try:
            return await work(spent)
        finally:
            if self._large:
                asyncio.get_running_loop().call_soon(_clear_apart, spent)

    async def _step(
        self, decide: Callable[[ControllerState], Decision[Reply]], spent: list[Any], *, asked: bool
    ) -> Reply:
        async with self._turn:
            if asked and self._refuses:  # Perhaps hundreds wait for their turn.
                raise ApiError(ErrorCode.NOT_CONTROLLER, "The broker is stopping.")
            decision, paths = await self._work_out(_decided, decide, self.state)
            spent += (decision, paths)
            if paths:
                known = await self._store.existing(paths)
                operations = await self._work_out(_operations, decision.records, known)
                spent += (known, operations)
                await self._persist(operations)
            change = await self._work_out(_changed, self.state, decision.records, not self._large, self.waits)
            await self._peers.prepare(change.update)
            spent += (change, self.state)
            self.state = change.state
            for timer in decision.timers:
                if isinstance(timer, SetTimer):
                    self._timers.set(timer.key, timer.at_ms)
                else:
                    self._timers.cancel(timer.key)
            for effect in decision.effects:
                self._effects.put_nowait(effect)
            if decision.records:
                self.waits.note(self.state, change.waits)
                self._peers.publish(change.update)
                await self._peers.apply_configs(change.update)
        if decision.records:
            self._wake([None, *change.update.topics])
        return decision.reply

    async def _persist(self, operations: Sequence[Operation]) -> None:
        """Make changes of the tree, all or none; many deletions some at a time, which stop with the broker.

        The nodes of a deleted topic go in an order in which the next term finds the rest, whichever are gone.
        """
        if len(operations) <= DELETED_AT_A_TIME or not all(isinstance(it, Delete) for it in operations):
            await self._store.multi(operations)
            return
        for begin in range(0, len(operations), DELETED_AT_A_TIME):
            if self._refuses:
                raise ApiError(ErrorCode.NOT_CONTROLLER, "The broker is stopping.")
            await self._store.multi(operations[begin : begin + DELETED_AT_A_TIME])

    async def _work_out(self, work: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Do work that only reads: in a thread, if there may be much of it."""
        if self._large:
            return await asyncio.get_running_loop().run_in_executor(None, work, *arguments)
        return work(*arguments)

    async def command(
        self, decide: Callable[[ControllerState], Decision[CommandReply]], timeout_ms: int, *, partitions: int = 0
    ) -> Accepted | Validated:
        """Submit a command, again after each `WaitForResize`, and wait until the change has been carried out.

        `partitions`: as for `submit`. Raises ApiError: the refusal, or REQUEST_TIMED_OUT when it is accepted but
        `timeout_ms` was too short.
        """
        deadline = self._loop_time() + max(timeout_ms, 0) / 1000
        while True:
            reply = await self.submit(decide, partitions=partitions, asked=True)
            if not isinstance(reply, WaitForResize):
                break
            waiting = reply
            if not await self.wait_until(partial(_idle, name=waiting.topic), deadline, waiting.topic):
                raise ApiError(reply.code, " ".join((reply.message, *self.waits.text(reply.topic))))
        if isinstance(reply, Refused):
            raise ApiError(reply.code, reply.message)
        if isinstance(reply, Accepted):
            accepted = reply
            if not await self.wait_until(lambda state: views.settled(state, accepted), deadline, accepted.topic):
                raise ApiError(ErrorCode.REQUEST_TIMED_OUT, self._still_going_on(accepted))
            if views.canceled(self.state, accepted):
                message = f"The resize of topic {accepted.topic!r} to {accepted.count} partitions was canceled."
                raise ApiError(ErrorCode.NO_REASSIGNMENT_IN_PROGRESS, message)
        return reply

    async def wait_at_most(self, true: Callable[[ControllerState], bool], timeout_ms: int) -> bool:
        """As `wait_until`, for a time."""
        return await self.wait_until(true, self._loop_time() + timeout_ms / 1000)

    def resizes(self, topics: Iterable[str] | None) -> Iterator[RunningResize]:
        """The resizes that run, in any order: of these topics, or of all; bears changes meanwhile."""
        return self.waits.running(self.state, topics)

    def _still_going_on(self, accepted: Accepted) -> str:
        waits = self.waits.text(accepted.topic)
        return " ".join(("The change was accepted and is still being carried out; it will be finished.", *waits))

    async def wait_until(
        self, true: Callable[[ControllerState], bool], deadline: float, topic: str | None = None
    ) -> bool:
        """Wait until `true` of the state, at most until `deadline` on the loop's clock; return whether it came true.

        `topic`: the only one that the condition depends on, so that changes of others need no look at it.
        """
        loop = asyncio.get_running_loop()
        while True:
            change: asyncio.Future[None] = loop.create_future()
            # Before the state is looked at, as it may change meanwhile.
            self._waiting.setdefault(topic, set()).add(change)
            try:
                if await self._work_out(true, self.state):
                    return True
                left = deadline - loop.time()
                if left <= 0 or self._refuses:
                    return False
                async with asyncio.timeout(left):
                    await change
            except TimeoutError:
                return await self._work_out(true, self.state)
            finally:
                others = self._waiting.get(topic, set())
                others.discard(change)
                if not others:
                    self._waiting.pop(topic, None)

    def _wake(self, topics: Iterable[str | None]) -> None:
        for topic in topics:
            for change in self._waiting.pop(topic, ()):
                if not change.done():
                    change.set_result(None)

    # -- effects and events --------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            spent: list[Any] = [await self._effects.get()]
            await self._freed(self._perform, spent)

    async def _perform(self, spent: list[Any]) -> None:
        """Perform the effect in `spent`."""
        effect: Effect = spent[0]
        try:
            match effect:
                case SendLeaderAndIsr():
                    roles = await self._peers.take_roles(effect.broker_id, effect)
                    spent.append(roles)
                    now_ms = self._now_ms()
                    await self.submit(lambda state: decide_leader_and_isr_answered(state, effect, roles, now_ms))
                case SendStopReplica():
                    stopped = await self._peers.stop_replicas(effect.broker_id, effect)
                    spent.append(stopped)
                    now_ms = self._now_ms()
                    await self.submit(lambda state: decide_stop_replica_answered(state, effect, stopped, now_ms))
                case ApplyConfigs() | PublishMetadata():
                    pass  # Published with the change itself (`submit`).
                case InspectRetiring(topics):
                    for topic in topics:
                        await self.inspect_retiring(topic)
                case InspectLayouts(topics):
                    for topic in topics:
                        await self.inspect_layouts(topic)
        except ApiError as error:
            events.info("controller step left to the next term", effect=type(effect).__name__, reason=error)
        except OSError as error:
            events.error("controller step failed, it will be tried again", effect=type(effect).__name__, reason=error)
            self._again(effect)
        except Exception as error:  # A defect: nothing but the controller would finish the effect.
            events.error(
                "controller step failed, it will be tried again", effect=type(effect).__name__, exception=error
            )
            self._again(effect)

    def _again(self, effect: Effect) -> None:
        due_ms = self._now_ms() + RETRY_AFTER_FAILURE_MS
        if isinstance(effect, SendLeaderAndIsr | SendStopReplica):
            # Not the same order: by then it may be outdated, and its partition removed.
            self._timers.set(("retry", effect.topic), due_ms)
            return
        self._failures += 1
        self._failed[self._failures] = effect
        self._timers.set(("again", self._failures), due_ms)

    async def inspect_retiring(self, topic: str) -> None:
        """Remove the retiring partitions of a topic that are empty."""
        ranges = await self._peers.retiring_ranges(topic)
        if ranges:
            await self.submit(lambda state: decide_reap(state, topic, ranges))

    def inspect_soon(self, topic: str) -> None:
        """Inspect a topic's retiring partitions after the effects in the queue: some may be empty now."""
        found = self.state.topics.get(topic)
        if found is not None and _has_retiring(found):
            self._effects.put_nowait(InspectRetiring((topic,)))

    async def inspect_layouts(self, topic: str) -> None:
        """Fold away the layouts of a topic that have no records."""
        report = await self._peers.held_layouts(topic)
        if report is not None:
            await self.submit(lambda state: decide_fold_layouts(state, topic, report))

    async def inspect_all_layouts(self) -> None:
        """Inspect the layouts of every topic that has more than one."""
        await self._inspect_all(lambda topic: len(topic.layouts) > 1, self.inspect_layouts)

    async def inspect_all_retiring(self) -> None:
        """Inspect the retiring partitions of every topic: the reaper's round."""
        await self._inspect_all(_has_retiring, self.inspect_retiring)

    async def _inspect_all(self, concerns: Callable[[Topic], bool], inspect: Callable[[str], Awaitable[None]]) -> None:
        """Inspect topics one after the other; a failure is logged, and leaves out its topic alone."""
        async for topic in in_turns(list(self.state.topics.values()), TOPICS_AT_A_TIME):
            if not concerns(topic):
                continue
            try:
                await inspect(topic.name)
            except Exception as error:
                self.inspections_failed += 1
                suppressed = self._lines.admit(self._now_ms() / 1000)
                if suppressed is None:
                    continue
                if isinstance(error, OSError):
                    events.warning("topic not inspected", topic=topic.name, reason=error, suppressed=suppressed)
                else:  # A defect.
                    events.error("topic not inspected", topic=topic.name, exception=error, suppressed=suppressed)

    def _on_timer(self, key: Hashable) -> None:
        match key:
            case ("again", int(failure)):
                self._effects.put_nowait(self._failed.pop(failure))
            case ("retry", str(topic)):
                task = asyncio.get_running_loop().create_task(self._retry(topic))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case _:
                raise AssertionError(key)

    async def _retry(self, topic: str) -> None:
        try:
            await self.submit(lambda state: decide_retry(state, topic))
        except OSError as error:
            events.error("retry failed", topic=topic, reason=error)
            self._timers.set(("retry", topic), self._now_ms() + RETRY_AFTER_FAILURE_MS)

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()


class _Change(NamedTuple):
    """The consequences of a decision's records."""

    state: ControllerState
    update: ClusterUpdate
    waits: Mapping[str, Found]


def _decided(
    decide: Callable[[ControllerState], Decision[Reply]], state: ControllerState
) -> tuple[Decision[Reply], frozenset[str]]:
    """Decide; add the paths of the nodes that the records change, and of those above."""
    decision = decide(state)
    paths = {record.path for record in decision.records if isinstance(record, PutNode | DeleteNode)}
    above = {path.rpartition("/")[0] for path in paths}
    while above := {path for path in above if path and path not in paths}:
        paths |= above
        above = {path.rpartition("/")[0] for path in above}
    return decision, frozenset(paths)


def _operations(records: Iterable[MetadataRecord], existing: Collection[str]) -> Sequence[Operation]:
    """Translate records into changes of the tree as it now is; parents that are missing are made."""
    known = set(existing)
    operations: list[Operation] = []
    for record in records:
        match record:
            case PutNode(path, data) if path in known:
                operations.append(Set(path, data))
            case PutNode(path, data):
                there = path.rpartition("/")[0] in known
                missing = [] if there else [above for above in _parents(path) if above not in known]
                operations += [Create(above) for above in missing]
                operations.append(Create(path, data, ephemeral=path.rpartition("/")[0] == nodes.BROKERS))
                known.update(missing, [path])
            case DeleteNode(path) if path in known:
                operations.append(Delete(path))
                known.discard(path)
    return operations


def _changed(state: ControllerState, records: Sequence[MetadataRecord], in_place: bool, waits: ResizeWaits) -> _Change:
    """Apply records, to the state itself or to another one."""
    state = reduce(apply, records, state) if in_place else applied(state, records)
    update = update_after(state, records)
    for topic in update.topics.values():
        if topic is not None and not topic.deleting and len(topic.nodes) >= LARGE_TOPIC:
            topic.view  # noqa: B018 - made here, and not when they are asked for first
            topic.visible_partitions  # noqa: B018
    return _Change(state, update, waits.compare(waits_after(state, records)))


def _parents(path: str) -> list[str]:
    """The paths of the nodes above one, from the top; without the root, which no tree is without."""
    parts = path.split("/")[1:-1]
    return ["/" + "/".join(parts[: length + 1]) for length in range(len(parts))]


def _idle(state: ControllerState, name: str) -> bool:
    return views.idle(state, name)


def _clear_apart(spent: list[Any]) -> None:
    """Clear a list in a thread; at the end of the loop, which takes no more work, here."""
    with suppress(RuntimeError):
        asyncio.get_running_loop().run_in_executor(None, free_one_by_one, spent)


def _log_failure(step: asyncio.Task[Any]) -> None:
    """Log the error of a step whose caller was cancelled; a refusal is none."""
    if not step.cancelled() and (error := step.exception()) is not None and not isinstance(error, ApiError):
        defect = None if isinstance(error, OSError) else error
        events.error("step of a cancelled request failed", reason=error, exception=defect)


def _has_retiring(topic: Topic) -> bool:
    return len(topic.partitions) > topic.undeleted_partition_count
