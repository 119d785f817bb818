"""Brokers and a controller as they ship, on virtual time: `Controller`, `Replicas`, logs; disks and a wire that fail.

Imitated are the metadata tree (it refuses a transaction, or its session dies in the middle of one and leaves any prefix
of it), the connections from the controller to the brokers (requests and answers late, twice, or never; requests of a
dead controller that arrive after its successor's election) and the check of a request's epochs at its receiver.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.controller.effects import Decision, SendLeaderAndIsr, SendStopReplica
from anabranch.machines.controller.folding import HeldLayouts
from anabranch.machines.controller.nodes import BrokerNode, Topic
from anabranch.machines.controller.reaper import LogRange
from anabranch.machines.controller.resize import decide_leader_and_isr_answered
from anabranch.machines.controller.state import ControllerState
from anabranch.machines.controller.terms import decide_broker_left, decide_register_broker
from anabranch.machines.controller.topics import decide_stop_replica_answered
from anabranch.machines.keyspace import Interval
from anabranch.machines.lineage import Cuts
from anabranch.machines.progress import Rewritten
from anabranch.runtime.metrics import Metrics
from anabranch.server.cluster.controller import Controller
from anabranch.server.cluster.peers import Peers, retiring_ranges
from anabranch.server.cluster.view import ClusterUpdate
from anabranch.server.partitions.cutting import held_layouts
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.partitions.topic_settings import topic_settings
from anabranch.storage.directory import DataDirectory
from anabranch.storage.interface import Create, Delete, MetadataStore, NoNodeError, Operation, Set, StoredNode, Watch
from anabranch.storage.log.group_commit import GroupCommit
from tests.simulation.virtual_time import KilledError, Pipe, Process, VirtualClock, VirtualLoop, VirtualSyncs
from tests.support.disks import FaultyDisk

T = TypeVar("T")
Order = SendLeaderAndIsr | SendStopReplica
Errors = Mapping[int, ErrorCode]
DATA = Path("/data")
ANSWER_TIMEOUT_S = 0.15
_DEFAULTS = topic_settings({}, NOT_SET, "fsync")
SETTINGS = replace(_DEFAULTS, log=replace(_DEFAULTS.log, segment_bytes=1_500, index_interval_bytes=300))


class Tree:
    """The metadata tree: it outlives every session."""

    def __init__(self) -> None:
        self.nodes: dict[str, bytes] = {}
        self.owners: dict[str, int] = {}
        """Path to session of ephemeral nodes."""
        self.sessions = 0
        self.journal: list[Operation] = []
        self.tear_in: int | None = None
        """The number of operations after which the session dies."""

    def perform(self, operation: Operation, session: int) -> None:
        path = operation.path
        parent = path.rpartition("/")[0]
        match operation:
            case Create(_, data, ephemeral):
                assert path not in self.nodes and (not parent or parent in self.nodes), path
                self.nodes[path] = data
                if ephemeral:
                    self.owners[path] = session
            case Set(_, data):
                assert path in self.nodes, path
                self.nodes[path] = data
            case Delete():
                assert not any(other.startswith(path + "/") for other in self.nodes), f"{path} has children"
                del self.nodes[path]
                self.owners.pop(path, None)
        self.journal.append(operation)


class Session(MetadataStore):
    """One session on the tree, of one controller; its ephemeral nodes go when the next session begins."""

    def __init__(self, tree: Tree, process: Process, loop: VirtualLoop, refuses: Callable[[], bool]) -> None:
        tree.sessions += 1
        self.session = tree.sessions
        self._tree = tree
        self._process = process
        self._loop = loop
        self._refuses = refuses
        self._worker = ThreadPoolExecutor(1)
        for path in sorted(tree.owners):
            tree.perform(Delete(path), self.session)

    async def _in_turn(self, work: Callable[[], T]) -> T:
        """Operations take time, and take effect in the order of the calls."""
        return await self._loop.run_in_executor(self._worker, work)

    async def get(self, path: str) -> tuple[bytes, int]:
        nodes = await self.subtree(path)
        if not nodes:
            raise NoNodeError(path)
        return nodes[0].data, nodes[0].version

    async def exists(self, path: str) -> bool:
        return bool(await self.existing([path]))

    async def existing(self, paths: Collection[str]) -> frozenset[str]:
        return await self._in_turn(lambda: frozenset(self._tree.nodes.keys() & set(paths)))

    async def owner(self, path: str) -> int | None:
        return await self._in_turn(lambda: self._tree.owners.get(path))

    async def children(self, path: str) -> Sequence[str]:
        below = (node.path.removeprefix(path + "/") for node in await self.subtree(path))
        return sorted(name for name in below if "/" not in name)

    async def subtree(self, path: str) -> Sequence[StoredNode]:
        def read() -> list[StoredNode]:
            inside = (name for name in sorted(self._tree.nodes) if name == path or name.startswith(path + "/"))
            return [StoredNode(name, self._tree.nodes[name], 0) for name in inside]

        return await self._in_turn(read)

    async def ensure(self, path: str) -> None:
        parents = [path[:end] for end in range(1, len(path)) if path[end] == "/"]
        missing = [Create(name) for name in (*parents, path) if name not in self._tree.nodes]
        if missing:
            await self.multi(missing)

    async def multi(self, operations: Sequence[Operation]) -> None:
        await self._in_turn(lambda: self._perform(operations))

    def _perform(self, operations: Sequence[Operation]) -> None:
        tree = self._tree
        if self._refuses():
            raise OSError(errno.EIO, "the metadata store refuses")
        for operation in operations:
            if tree.tear_in is not None:
                tree.tear_in -= 1
                if tree.tear_in < 0:
                    tree.tear_in = None
                    self._process.kill()
                    return
            tree.perform(operation, self.session)

    async def create(self, path: str, data: bytes = b"", *, ephemeral: bool = False) -> None:
        await self.multi([Create(path, data, ephemeral)])

    async def set(self, path: str, data: bytes, expected_version: int = -1) -> int:
        await self.multi([Set(path, data)])
        return 0

    async def delete(self, path: str, expected_version: int = -1) -> None:
        await self.multi([Delete(path)])

    def watch(self, path: str, watch: Watch) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class Machine:
    """A broker's machine: the disk outlives its processes."""

    def __init__(self, cluster: Cluster, broker_id: int) -> None:
        self.broker_id = broker_id
        self.epoch = 0
        self.disk_fails_until_s = 0.0
        """Until when syncs take long; the power may go meanwhile."""
        self.disk = FaultyDisk(cluster.loop.chance.randrange(2**32))
        self.disk.make_directory(DATA)
        self.disk.safe_directories |= self.disk.directories
        self._cluster = cluster
        self.start()

    def start(self) -> None:
        """Start a process, without any roles."""
        self.epoch += 1
        self.controller_epoch = -1
        self.process = self._cluster.loop.process(f"broker {self.broker_id}")
        self.process.call(self._make)

    def _make(self) -> None:
        loop = self._cluster.loop
        self._turn = asyncio.Lock()
        self.replicas = Replicas(
            DataDirectory(DATA, self.disk),
            disk=self.disk,
            clock=VirtualClock(loop),
            metrics=Metrics(),
            settings_of=lambda topic: SETTINGS,
            commits=GroupCommit(_Syncs(loop, self)),
        )

    @property
    def up(self) -> bool:
        return self.process.alive

    def crash(self, *, power: bool = False) -> None:
        """Lose the memory, or also the unsynced disk contents; requests on the wire may still arrive later."""
        self.process.kill()
        if power:
            self.disk = self.disk.crash()

    def partition(self, topic: str, number: int) -> Partition | None:
        """Return a partition with a role here, if the broker is up."""
        found = self.replicas.get(topic, number) if self.up else None
        return found if found is not None and found.leadership is not None else None

    async def take(self, order: Order, *, local: bool = False) -> Errors | None:
        """Carry out a request, one after the other; None if it is fenced."""
        async with self._turn:
            fenced = not local and order.broker_epoch != self.epoch
            if fenced or order.controller_epoch < self.controller_epoch:
                return None
            self.controller_epoch = order.controller_epoch
            try:
                if isinstance(order, SendLeaderAndIsr):
                    return await self.replicas.take_roles(order)
                return await self.replicas.stop(order)
            except Exception as error:  # The controller would only log it and try again.
                self._cluster.loop.failure = error
                raise


class Wire(Peers):
    """The controller's requests to the brokers: directly to its own, over connections to the others."""

    def __init__(self, cluster: Cluster, process: Process, home: Machine) -> None:
        self.cluster = cluster
        self.home = home
        self.controller: Controller
        self._process = process
        self._pipes: dict[int, Pipe[Callable[[], None]]] = {}

    async def take_roles(self, broker: int, order: SendLeaderAndIsr) -> Errors:
        """Send roles to a broker; return an empty result without a response in time."""
        return await self._send(order)

    async def stop_replicas(self, broker: int, order: SendStopReplica) -> Errors:
        """Send a deletion of replicas to a broker; return an empty result without a response in time."""
        return await self._send(order)

    async def prepare(self, update: ClusterUpdate) -> None:
        """Prepare nothing: the brokers of the world look nothing up."""

    def publish(self, update: ClusterUpdate) -> None:
        """Report a persisted and applied decision to the world."""
        self.cluster.on_published(update)

    async def apply_configs(self, update: ClusterUpdate) -> None:
        """Apply nothing: the brokers of the world have no logs of their own."""

    async def retiring_ranges(self, topic: str) -> Mapping[int, LogRange]:
        """Return the leaders' reports on their retiring partitions, possibly old ones."""
        await asyncio.sleep(self.cluster.delay_s())
        return self.cluster.report(topic)

    async def held_layouts(self, topic: str) -> HeldLayouts | None:
        """Return the leaders' report on the layouts that their logs hold, possibly an old one."""
        await asyncio.sleep(self.cluster.delay_s())
        return self.cluster.report_layouts(topic)

    def cuts(self, topic: Topic, partition: int) -> Cuts | None:
        raise NotImplementedError

    def opened(self, topic: str) -> int:
        raise NotImplementedError

    def is_open(self, topic: str, partition: int) -> bool:
        raise NotImplementedError

    def log_start(self, topic: str, partition: int) -> int:
        raise NotImplementedError

    def rewritten(self, topic: str, partition: int) -> Rewritten:
        raise NotImplementedError

    def log_end(self, topic: str, partition: int) -> int:
        raise NotImplementedError

    def load(self, topic: str, partition: int, held: Interval) -> Sequence[float]:
        raise NotImplementedError

    async def next_records(self, topic: str, offsets: Mapping[int, int]) -> Mapping[int, int]:
        raise NotImplementedError

    async def _send(self, order: Order) -> Errors:
        machine = self.cluster.machines[order.broker_id]
        self.cluster.sent += 1
        if machine is self.home:
            try:
                return await machine.process.perform(machine.take(order, local=True)) or {}
            except KilledError:
                return {}
        answer: asyncio.Future[Errors] = self.cluster.loop.create_future()
        pipe = self._pipes.get(order.broker_id)
        if pipe is None:
            pipe = Pipe(self.cluster.loop, lambda call: call(), delay_s=self.cluster.delay_s)
            self._pipes[order.broker_id] = pipe
        for _ in range(self.cluster.copies()):
            pipe.send(functools.partial(self._arrived, machine, order, answer))
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError:
            return {}

    def _arrived(self, machine: Machine, order: Order, answer: asyncio.Future[Errors]) -> None:
        self.cluster.begin(self._deliver(machine, order, answer))

    async def _deliver(self, machine: Machine, order: Order, answer: asyncio.Future[Errors]) -> None:
        cluster = self.cluster
        errors = await machine.process.perform(machine.take(order))
        lost = cluster.faults and cluster.chance.random() < 0.08
        await asyncio.sleep(cluster.delay_s())
        if not self._process.alive or lost:
            return
        if not answer.done():
            answer.set_result(errors or {})
        else:
            await self._process.perform(self.controller.submit(_answered(order, errors or {})))

    def lose(self) -> None:
        """Lose all messages in flight from the dead controller."""
        for pipe in self._pipes.values():
            pipe.close()

    def delay(self) -> None:
        """Deliver the messages in flight from the dead controller, long after its death."""
        for pipe in self._pipes.values():
            pipe.stall(self.cluster.chance.uniform(0, 2))

    @property
    def in_flight(self) -> bool:
        """Whether a request has not arrived."""
        return any(pipe.in_flight for pipe in self._pipes.values())


class Cluster:
    """Machines, the tree, and at most one controller."""

    def __init__(self, loop: VirtualLoop, brokers: int, *, faults: bool) -> None:
        self.loop = loop
        self.chance = loop.chance
        self.faults = faults
        self.tree = Tree()
        self.machines = {broker_id: Machine(self, broker_id) for broker_id in range(1, brokers + 1)}
        self.controller: Controller | None = None
        self.process: Process | None = None
        self.wire: Wire | None = None
        self.reports: list[dict[int, LogRange]] = []
        self.held: list[HeldLayouts] = []
        self.crashes = 0
        self.wire_lost: bool | None = None
        """Whether the messages of a dead controller are lost; None: at random."""
        self.sent = 0
        """The number of orders sent by controllers."""
        self.on_published: Callable[[ClusterUpdate], None] = lambda update: None
        self._begun: set[asyncio.Task[Any]] = set()

    # -- chance --------------------------------------------------------------------------------------------------------

    def delay_s(self) -> float:
        """Return the travel time of a message."""
        if not self.faults:
            return 0.001
        return self.chance.uniform(0, 0.02) if self.chance.random() < 0.9 else self.chance.uniform(0, 0.5)

    def copies(self) -> int:
        """Return the number of times a request arrives."""
        if not self.faults:
            return 1
        return self.chance.choices((0, 1, 2), (10, 70, 20))[0]

    def begin(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T | None]:
        """Run a coroutine in the background; it ends without an error if its process dies or a disk fails."""

        async def attempt() -> T | None:
            try:
                return await coroutine
            except (KilledError, OSError):
                return None
            except BaseException as error:
                if not isinstance(error, asyncio.CancelledError):
                    self.loop.failure = error
                raise

        task = self.loop.create_task(attempt(), context=self.loop.outside.copy())
        self._begun.add(task)
        task.add_done_callback(self._begun.discard)
        return task

    # -- the controller ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ControllerState | None:
        """Return the state of the controller, if one has started."""
        return None if self.controller is None else self.controller.state

    async def elect(self, home: Machine) -> None:
        """Start a controller on a machine: it loads the tree and registers its own broker."""
        assert self.process is None
        self.process = process = self.loop.process("controller")
        process.killed.add_done_callback(lambda _: self.crash_controller(process), context=self.loop.outside.copy())
        self.wire = wire = Wire(self, process, home)
        controller = wire.controller = process.call(self._make_controller, wire)
        try:
            await process.perform(controller.start(home.broker_id, None, (), unclean=False))
        except (KilledError, OSError):
            self.crash_controller(process)
        if self.process is process:
            self.controller = controller

    def _make_controller(self, wire: Wire) -> Controller:
        assert self.process is not None
        session = Session(self.tree, self.process, self.loop, lambda: self.faults and self.chance.random() < 0.01)
        return Controller(session, wire, VirtualClock(self.loop))

    def crash_controller(self, process: Process | None = None) -> None:
        """End the controller; its orders on the wire are lost, or arrive late."""
        if self.process is None or process not in (None, self.process):
            return
        assert self.wire is not None
        self.process.kill()
        if self.chance.random() < 0.5 if self.wire_lost is None else self.wire_lost:
            self.wire.lose()
        elif self.faults:
            self.wire.delay()
        self.controller = self.process = None
        self.crashes += 1

    async def submit(self, decide: Callable[[ControllerState], Decision[T]]) -> T | None:
        """Submit a decision to the controller; None without a controller, after its death, or if the tree refuses."""
        if self.controller is None or self.process is None:
            return None
        try:
            return await self.process.perform(self.controller.submit(decide))
        except (KilledError, OSError):
            return None

    async def register(self, machine: Machine, *, unclean: bool) -> None:
        """Register a broker's current incarnation with the controller, if necessary."""
        if self.state is not None and machine.up and not self._is_registered(machine):
            node = BrokerNode(machine.broker_id, machine.epoch)
            await self.submit(lambda state: decide_register_broker(state, node, unclean=unclean))

    def _is_registered(self, machine: Machine) -> bool:
        assert self.state is not None and self.wire is not None
        known = self.state.brokers.get(machine.broker_id)
        return machine is self.wire.home or (known is not None and known.epoch == machine.epoch)

    @property
    def all_registered(self) -> bool:
        """Whether every broker's current incarnation is registered with the controller."""
        return self.state is not None and all(map(self._is_registered, self.machines.values()))

    async def broker_left(self, machine: Machine) -> None:
        """Report the loss of a broker to the controller."""
        if self.wire is not None and self.wire.home is not machine:
            await self.submit(lambda state: decide_broker_left(state, machine.broker_id))

    # -- reports -------------------------------------------------------------------------------------------------------

    def note_report(self, topic: str) -> None:
        """Send the leaders' reports on their retiring partitions; they may arrive much later."""
        seen: dict[int, LogRange] = {}
        for machine in self.machines.values():
            if machine.up:
                seen.update(retiring_ranges(machine.replicas.of_topic(topic)))
        self.reports.append(seen)

    def report(self, topic: str) -> Mapping[int, LogRange]:
        """Deliver one of the pending reports."""
        return self.reports.pop(self.chance.randrange(len(self.reports))) if self.reports else {}

    async def note_layouts(self, name: str) -> None:
        """Send the leaders' reports on the layouts that their logs hold; they may arrive much later."""
        topic = None if self.state is None else self.state.topics.get(name)
        if topic is None:
            return
        led = {}
        for machine in self.machines.values():
            found = ((partition, machine.partition(name, partition)) for partition in topic.partitions)
            led.update({partition: it for partition, it in found if machine.up and it is not None and it.leadership})
        report = await held_layouts(topic, led.get)
        if report is not None:
            self.held.append(report)

    def report_layouts(self, name: str) -> HeldLayouts | None:
        """Deliver one of the pending reports, or none."""
        return self.held.pop(self.chance.randrange(len(self.held))) if self.held else None


class _Syncs(VirtualSyncs):
    """Syncs of a disk that is slow when it begins to fail."""

    def __init__(self, loop: VirtualLoop, machine: Machine) -> None:
        super().__init__(loop)
        self._machine = machine

    def run(self, work: Callable[[], None], done: Callable[[OSError | None], None]) -> None:
        slow_s = max(0.0, self._machine.disk_fails_until_s - self._loop.time())
        self._loop.call_later(self._loop.chance.uniform(0, slow_s), super().run, work, done)


class _Failures(logging.Handler):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(logging.ERROR)
        self._loop = loop

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._loop.failure = self._loop.failure or record.exc_info[1]


@contextlib.contextmanager
def no_error_of_ours(loop: VirtualLoop) -> Iterator[None]:
    """End the simulation on an exception that a shell logs and retries."""
    logger, handler = logging.getLogger("anabranch"), _Failures(loop)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _answered(order: Order, errors: Errors) -> Callable[[ControllerState], Decision[None]]:
    if isinstance(order, SendLeaderAndIsr):
        return lambda state: decide_leader_and_isr_answered(state, order, errors, now_ms=0)
    return lambda state: decide_stop_replica_answered(state, order, errors, now_ms=0)
