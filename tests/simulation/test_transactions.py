"""Histories of transactional producers, their coordinator and their partitions under one seed.

The coordinator is the shard that ships, on virtual time, with its log on a disk that loses unsynced records; the
tables and the decision about a batch are the machines that ship, and the logs of partitions are lists. Any message may
be late, lost or doubled, any producer replaced by another of its id, partitions retire and open again. A record's value
is the transaction that wrote it, so the promise is read off the logs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_TOPIC_ID, TopicPartition
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.outcome import Outcome
from anabranch.machines.partition.appending import VERIFY, Duplicate, Redirect, Refuse, decide_append
from anabranch.machines.partition.markers import aliases, decide_marker
from anabranch.machines.partition.producers import Marker, ProducerTable
from anabranch.machines.transactions.coordinator import Coordinator, WriteMarkers
from anabranch.machines.transactions.records import TransactionRecord, decode_record, encode_record
from anabranch.machines.transactions.settings import TransactionSettings
from anabranch.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic
from anabranch.protocol.messages.end_txn import EndTxnRequest
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest
from anabranch.runtime.metrics import Metrics
from anabranch.server.coordinators.durable_replies import DurableReplies
from anabranch.server.coordinators.record_codec import RecordCodec
from anabranch.server.coordinators.shard import Shard
from anabranch.server.partitions import partition as shipped
from anabranch.server.partitions.topic_settings import topic_settings
from anabranch.storage.interface import Slice
from anabranch.storage.log.group_commit import GroupCommit
from anabranch.storage.log.log import LocalLog
from tests.simulation.virtual_time import VirtualClock, VirtualLoop, VirtualSyncs, run, running_loop
from tests.support.disks import FaultyDisk
from tests.support.thorough import thorough

HISTORIES = thorough(60, 40)
STEPS = 1_200
TIMEOUT_MS = 4_000
REQUEST_TIMEOUT_MS = 400
PARTITIONS = 4
INITIAL = 2
ANCESTOR = {2: 0, 3: 1}
OK = ErrorCode.NONE
STATE = TopicPartition("__transaction_state", 0)
DATA = Path("/data")
SETTINGS = topic_settings({"segment.bytes": "4000"}, NOT_SET, "fsync")
SYNC_MAX_S = 0.1


class Entry(NamedTuple):
    """A batch in a log: one record of a transaction, or a marker."""

    base_offset: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    transaction: int
    marker: Marker | None = None
    last_offset_delta: int = 0
    max_timestamp: int = 0
    is_transactional: bool = True

    @property
    def is_control(self) -> bool:
        return self.marker is not None


@dataclass
class Partition:
    number: int
    retiring: bool = False
    log: list[Entry] = field(default_factory=list)
    synced: int = 0
    table: ProducerTable = field(default_factory=ProducerTable)
    stable_before: int = 0

    @property
    def leadership(self) -> Leadership:
        """Its role; a partition that retires moves its keys to the one of the first two that is its ancestor."""
        if self.retiring:
            return Leadership(NO_TOPIC_ID, self.number, 1, 0, INITIAL, INITIAL, retiring=True)
        return Leadership(NO_TOPIC_ID, self.number, 2, 0, INITIAL, PARTITIONS, retiring=False)

    def append(self, entry: Entry) -> None:
        entry = entry._replace(base_offset=len(self.log))
        self.log.append(entry)
        self.table.apply(entry, 0, entry.marker)

    def folded(self) -> ProducerTable:
        table = ProducerTable()
        for entry in self.log:
            table.apply(entry, 0, entry.marker)
        return table

    def crash(self) -> None:
        del self.log[self.synced :]
        self.table = self.folded()

    def visible(self) -> list[int]:
        """The transactions of the records that a reader of committed records gets, from the start of the log."""
        stable = self.table.last_stable_offset(self.synced)
        assert stable >= self.stable_before, "the last stable offset went back"
        self.stable_before = stable
        waiting = sorted(self.table.aborted.between(0, stable), key=lambda line: line.first_offset)
        void: set[int] = set()
        found: list[int] = []
        for entry in self.log[:stable]:
            while waiting and waiting[0].first_offset <= entry.base_offset:
                void.add(waiting.pop(0).producer_id)
            if entry.marker is not None:
                if not entry.marker.commit:
                    void.discard(entry.producer_id)
            elif entry.producer_id not in void:
                found.append(entry.transaction)
        return found


@dataclass
class Transaction:
    """The state of the transaction, as its producer knows it."""

    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    """Partition that was named, and how many records."""
    asked_to_commit: bool = False
    committed: bool = False


Decide = Callable[[Coordinator, int], Outcome[Any, TransactionRecord]]


class Write(NamedTuple):
    """A produce request: its producer, its partition, and the batch."""

    name: str
    at: int
    entry: Entry


Request = Decide | Write
Step = Generator[Request, Any, None]


class SlowSyncs(VirtualSyncs):
    """Syncs that take a while, so that decisions wait for them."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(loop)
        self.failures_untold = 0
        """Syncs that have failed, of which the process has not heard yet."""

    def run(self, work: Callable[[], None], done: Callable[[OSError | None], None]) -> None:
        def noting_failure() -> None:
            try:
                work()
            except OSError:
                self.failures_untold += 1
                raise

        def told(error: OSError | None) -> None:
            self.failures_untold -= error is not None
            done(error)

        self._loop.call_later(self._loop.chance.uniform(0, SYNC_MAX_S), super().run, noting_failure, told)


class World:
    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.chance = loop.chance
        self.settings = TransactionSettings(timed_out_interval_ms=500, expired_interval_ms=10**9)
        self.disk = FaultyDisk(self.chance.randrange(2**32))
        self.disk.make_directory(DATA)
        self.disk.safe_directories |= self.disk.directories
        self.ids = 0
        self.partitions = [Partition(number) for number in range(PARTITIONS)]
        self.transactions: list[Transaction] = []
        self.actors: list[tuple[str, Step]] = []
        self.network: list[Callable[[], None]] = []
        """The handlers of messages that arrive."""
        self.faults = True
        self.journal_read = b""
        self.start_coordinator()

    # -- the coordinator -------------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        self.disk.fail_sync = False
        self.process = self.loop.process("coordinator")
        self.process.call(self._load)

    def _load(self) -> None:
        self.syncs = SlowSyncs(self.loop)
        commits = GroupCommit(self.syncs)
        log = LocalLog.open(
            DATA / str(STATE), SETTINGS.log, disk=self.disk, commits=commits, power_lost=self.disk.boots > 0
        )
        amount = Metrics().counter("amount", "Anything.")
        partition = shipped.Partition(
            STATE, NO_TOPIC_ID, log, SETTINGS, bytes_in=amount, bytes_out=amount, messages_in=amount
        )
        partition.leadership = Leadership(NO_TOPIC_ID, 0, 0, 0, 1, 1, retiring=False)
        self.deliveries: list[tuple[WriteMarkers, set[TopicPartition]]] = []
        self.shard = Shard(
            partition,
            lambda: Coordinator(self.settings),
            RecordCodec(encode_record, decode_record),
            commit=lambda partition: partition.log.commit(),
            clock=VirtualClock(self.loop),
            perform=self.deliver,
        )
        self.shard.load_soon()

    @property
    def journal(self) -> bytes:
        """Everything in the coordinator's log."""
        slices = self.shard.partition.log.slices()
        assert isinstance(slices, list)
        return b"".join(bytes(part.view()) for part in slices if isinstance(part, Slice))

    def deliver(self, effect: WriteMarkers) -> None:
        if self.shard.machine.awaits(effect) and all(known != effect for known, _ in self.deliveries):
            self.deliveries.append((effect, set(effect.partitions)))

    def crash_coordinator(self) -> None:
        self.process.kill()
        log = self.shard.partition.log
        assert isinstance(log, LocalLog)
        # After a failed sync the cache holds what no disk has, and the next process takes it for written: a double
        # fault that no log survives. So the cache is lost at the same time, also where nobody has heard of the failure.
        if self.chance.random() < 0.5 or log._failure is not None or self.syncs.failures_untold:
            self.disk = self.disk.crash()
        self.start_coordinator()

    def write_a_marker(self) -> None:
        """One marker reaches one partition, and perhaps is heard to be durable."""
        if not self.deliveries:
            return
        effect, left = self.chance.choice(self.deliveries)
        at = self.chance.choice(sorted(left))
        named = self.partitions[at.partition]
        ancestors = [self.partitions[ANCESTOR[at.partition]]] if at.partition in ANCESTOR else []
        targets = [*aliases(effect.producer_id, at.partition, INITIAL, ancestors), (named, effect.producer_id)]
        for partition, producer_id in targets:
            verdict = decide_marker(
                partition.table,
                retiring=partition.retiring,
                producer_id=producer_id,
                producer_epoch=effect.producer_epoch,
                coordinator_epoch=0,
            )
            assert verdict.error is OK
            if verdict.append:
                marker = Marker(effect.commit, 0)
                partition.append(Entry(0, producer_id, effect.producer_epoch, -1, -1, marker))
        if self.faults and self.chance.random() < 0.3:
            return
        for partition, _ in targets:
            partition.synced = len(partition.log)
        left.discard(at)
        if not left:
            self.deliveries = [known for known in self.deliveries if known[0] is not effect]
            self.process.call(self.shard.tell, lambda machine, now_ms: machine.markers_written(effect, now_ms))

    # -- the partitions --------------------------------------------------------------------------------------------

    def produce(self, name: str, at: int, entry: Entry) -> ErrorCode | int:
        """The code, or the number of the partition whose sync acknowledges it."""
        named = self.partitions[at]
        ancestors = [self.partitions[ANCESTOR[at]]] if at in ANCESTOR else []
        role = named.leadership
        decision = decide_append(role, named.table, ancestors, entry, COUNT_NOT_SAID)
        if decision is VERIFY:
            held = self.verify(name, entry, at)
            decision = decide_append(role, named.table, ancestors, entry, COUNT_NOT_SAID, held)
        if isinstance(decision, Duplicate):
            return (decision.ancestor or named).number
        if isinstance(decision, Refuse):
            if decision.remember:
                named.table.refused(entry)
            return decision.code
        target = named
        if isinstance(decision, Redirect):
            named.table.forget_refusal(entry.producer_id)
            target, entry = decision.to, entry._replace(producer_id=decision.producer_id)
        target.append(entry)
        return target.number

    def verify(self, name: str, entry: Entry, at: int) -> ErrorCode:
        """Ask the coordinator as a broker does; the coordinator may be unable to answer."""
        try:
            machine = self.shard.machine
        except ApiError as error:
            return error.code
        return machine.verify(name, entry.producer_id, entry.producer_epoch, TopicPartition("t", at))

    # -- producers -------------------------------------------------------------------------------------------------

    def producer(self, name: str) -> Step:
        """One instance of a producer, until another instance fences it."""
        producer_id = epoch = -1
        while True:
            request = InitProducerIdRequest(
                transactional_id=name,
                transaction_timeout_ms=TIMEOUT_MS,
                producer_id=producer_id,
                producer_epoch=epoch,
            )
            reply = yield self.initialize(request)
            if reply is None or reply.error_code == ErrorCode.CONCURRENT_TRANSACTIONS:
                continue
            if reply.error_code:
                return
            producer_id, epoch = reply.producer_id, reply.producer_epoch
            sequences = dict.fromkeys(range(PARTITIONS), 0)
            clean = True
            while clean:
                fenced, clean = yield from self.one_transaction(name, producer_id, epoch, sequences)
                if fenced:
                    return

    def one_transaction(
        self, name: str, producer_id: int, epoch: int, sequences: dict[int, int]
    ) -> Generator[Request, Any, tuple[bool, bool]]:
        """Whether the producer is fenced, and whether its sequences go on."""
        transaction = Transaction()
        self.transactions.append(transaction)
        number = len(self.transactions) - 1
        held: set[int] = set()
        clean = True
        for _ in range(self.chance.randint(1, 4)):
            at = self.chance.randrange(PARTITIONS)
            if at not in held:
                error = yield from self.until_known(self.add(name, producer_id, epoch, at))
                if error is not OK:
                    return True, False
                held.add(at)
            count = 0
            entry = Entry(0, producer_id, epoch, sequences[at], number)
            for attempt in range(8):
                error = yield Write(name, at, entry)
                if error is OK:
                    sequences[at] += 1
                    count += 1
                    break
                if error is not None and not error.retriable:
                    clean = False
                    break
                if attempt == 7:
                    clean = False
            if not clean:
                break
            transaction.acknowledged.append((at, count))
        commit = clean and self.chance.random() < 0.7
        transaction.asked_to_commit = commit
        error = yield from self.until_known(self.end(name, producer_id, epoch, commit=commit))
        if error is not OK:
            return True, False
        transaction.committed = commit
        return False, clean

    def until_known(self, ask: Decide) -> Generator[Request, Any, ErrorCode]:
        while True:
            code: ErrorCode | None = yield ask
            if code is not None and code is not ErrorCode.CONCURRENT_TRANSACTIONS:
                return code

    def initialize(self, request: InitProducerIdRequest) -> Decide:
        return lambda machine, now_ms: machine.init_producer_id(request, 5, now_ms, self.new_id)

    def add(self, name: str, producer_id: int, epoch: int, at: int) -> Decide:
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name="t", partitions=[at])],
        )
        return lambda machine, now_ms: machine.add_partitions(request, [TopicPartition("t", at)], 3, now_ms)

    def end(self, name: str, producer_id: int, epoch: int, *, commit: bool) -> Decide:
        request = EndTxnRequest(transactional_id=name, producer_id=producer_id, producer_epoch=epoch, committed=commit)
        return lambda machine, now_ms: machine.end(request, 3, now_ms)

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    # -- the network -----------------------------------------------------------------------------------------------

    def begin(self, name: str) -> None:
        actor = self.producer(name)
        self.actors.append((name, actor))
        self.advance(actor, None, first=True)

    def advance(self, actor: Step, reply: Any, *, first: bool = False) -> None:
        try:
            request = next(actor) if first else actor.send(reply)
        except StopIteration:
            self.actors = [known for known in self.actors if known[1] is not actor]
            return
        told = False

        def answer(reply: Any) -> None:
            nonlocal told
            if not told:
                told = True
                self.network.append(lambda: self.advance(actor, reply))

        def arrive() -> None:
            lost = self.faults and self.chance.random() < 0.08
            give: Callable[[Any], None] = (lambda reply: None) if lost else answer
            if isinstance(request, Write):
                give(self.write(request))
            elif not told:  # A request that its producer gave up is not decided: its connection is closed.
                self.ask(request, give)

        self.network.append(arrive)
        if self.faults and self.chance.random() < 0.1:
            self.network.append(arrive)
        self.loop.call_later(REQUEST_TIMEOUT_MS / 1000, answer, None)

    def ask(self, decide: Decide, give: Callable[[Any], None]) -> None:
        """Have the coordinator decide; the answer comes when the decision is durable, or leaves the outcome open."""
        try:
            found = self.process.call(self.shard.ask, decide)
        except ApiError:
            give(None)
            return
        if not isinstance(found, asyncio.Future):
            give(_code(found))
            return

        def done(reply: asyncio.Future[Any]) -> None:
            give(None if reply.exception() is not None else _code(reply.result()))

        found.add_done_callback(done)

    def write(self, request: Write) -> ErrorCode:
        found = self.produce(*request)
        if isinstance(found, ErrorCode):
            return found
        for partition in self.partitions:
            partition.synced = len(partition.log)
        return OK

    def carry(self) -> None:
        """One message arrives."""
        if self.network:
            late = min(len(self.network), 6)
            self.network.pop(self.chance.randrange(late))()

    # -- running ---------------------------------------------------------------------------------------------------

    async def step(self) -> None:
        await asyncio.sleep(self.chance.randint(0, 20) / 1000)
        steps: dict[Callable[[], None], int] = {
            self.carry: 80,
            self.write_a_marker: 25,
            self.replace_a_producer: 1,
            self.resize: 2,
            self.crash_coordinator: 2,
            self.crash_a_partition: 2,
            self.fail_syncs: 1,
        }
        self.chance.choices(list(steps), list(steps.values()))[0]()
        self.check()

    def replace_a_producer(self) -> None:
        self.begin(self.chance.choice(["a", "b", "c"]))

    def resize(self) -> None:
        partition = self.partitions[self.chance.choice(sorted(ANCESTOR))]
        partition.retiring = not partition.retiring

    def crash_a_partition(self) -> None:
        self.chance.choice(self.partitions).crash()

    def fail_syncs(self) -> None:
        """The coordinator's disk takes nothing for a moment: the last decision of its shard is cut, and made again."""
        disk = self.disk
        disk.fail_sync = True

        def heal() -> None:
            disk.fail_sync = False

        self.loop.call_later(0.05, heal)

    def check(self) -> None:
        for partition in self.partitions:
            for number in partition.visible():
                assert self.transactions[number].asked_to_commit, "a record that nobody committed is visible"

    async def quiesce(self) -> None:
        """Nothing fails any more, producers stop, and their open transactions time out."""
        self.faults = False
        self.disk.fail_sync = False
        self.network.clear()
        self.actors.clear()
        for _ in range(60):
            await asyncio.sleep(TIMEOUT_MS / 1000)
            while self.deliveries:
                self.write_a_marker()
            for partition in self.partitions:
                partition.synced = len(partition.log)

    async def judge(self) -> None:
        live = self.shard.machine
        self.process.kill()
        self.start_coordinator()
        await asyncio.sleep(1)
        assert self.shard.machine == live, "what was replayed is not what lived"
        seen: dict[int, int] = {}
        for partition in self.partitions:
            assert partition.table == partition.folded()
            assert partition.table.last_stable_offset(partition.synced) == len(partition.log), "something hangs"
            for number in partition.visible():
                seen[number] = seen.get(number, 0) + 1
        for number, transaction in enumerate(self.transactions):
            whole = sum(count for _, count in transaction.acknowledged)
            if transaction.committed:
                assert seen.get(number, 0) == whole, "a committed transaction is not whole"
            elif transaction.asked_to_commit:
                assert seen.get(number, 0) in (0, whole), "a transaction is seen in part"
            else:
                assert number not in seen


def _code(reply: Any) -> Any:
    """The state that a producer's steps read."""
    if isinstance(reply, ErrorCode):
        return reply
    return reply if hasattr(reply, "producer_epoch") and hasattr(reply, "ongoing_txn_producer_id") else _end(reply)


def _end(reply: Any) -> Any:
    return None if reply is None else ErrorCode(reply.error_code)


async def _history(steps: int) -> World:
    world = World(running_loop())
    await asyncio.sleep(0.1)
    for name in ("a", "b", "c"):
        world.begin(name)
    for _ in range(steps):
        await world.step()
    await world.quiesce()
    await world.judge()
    world.journal_read = world.journal
    return world


def history(seed: int, steps: int = STEPS) -> World:
    return run(_history(steps), seed)


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_what_is_committed_is_whole_and_what_is_aborted_is_never_seen(seed: int) -> None:
    """Replay one with: pytest tests/simulation/test_transactions.py -k '[SEED]'."""
    history(seed)


def test_a_seed_gives_the_same_history_again() -> None:
    assert history(7).journal_read == history(7).journal_read


def test_histories_are_worth_something() -> None:
    """They commit, abort, time out, redirect, and end transactions after crashes."""
    worlds = [history(seed) for seed in range(12)]
    transactions = [it for world in worlds for it in world.transactions]
    assert sum(it.committed for it in transactions) > 50
    assert sum(not it.asked_to_commit for it in transactions) > 20
    aliases = [e for world in worlds for p in world.partitions for e in p.log if e.producer_id >= 1 << 40]
    assert sum(entry.marker is None for entry in aliases) > 20
    assert any(entry.marker is not None and entry.marker.commit for entry in aliases)


def test_a_shard_that_answers_before_its_records_are_durable_is_found_out() -> None:
    def histories() -> None:
        for seed in range(HISTORIES):
            history(seed)

    answering_early = mock.patch.object(DurableReplies, "when", lambda replies, reply: reply)
    with answering_early, pytest.raises(AssertionError, match=r"is not whole|is visible|hangs"):
        histories()
