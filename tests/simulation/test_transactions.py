"""Histories of transactional producers, their coordinator and their partitions under one seed.

The coordinator, the tables and the decision about a batch are the machines that ship; logs are lists of which a crash
keeps the synced part. Any message may be late, lost or doubled, any producer replaced by another of its id, partitions
retire and open again. A record's value is the transaction that wrote it, so the promise is read off the logs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_TOPIC_ID, TopicPartition
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.outcome import Outcome, SetTimer
from anabranch.machines.partition.appending import VERIFY, Duplicate, Redirect, Refuse, decide_append
from anabranch.machines.partition.markers import aliases, decide_marker
from anabranch.machines.partition.producers import Marker, ProducerTable
from anabranch.machines.transactions.coordinator import Coordinator, WriteMarkers
from anabranch.machines.transactions.records import Record, decode_record, encode_record
from anabranch.machines.transactions.settings import TransactionSettings
from anabranch.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic
from anabranch.protocol.messages.end_txn import EndTxnRequest
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest

HISTORIES = 60
STEPS = 1_500
TIMEOUT_MS = 4_000
REQUEST_TIMEOUT_MS = 400
PARTITIONS = 4
INITIAL = 2
ANCESTOR = {2: 0, 3: 1}
OK = ErrorCode.NONE


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
        count = INITIAL if self.retiring else PARTITIONS
        return Leadership(NO_TOPIC_ID, self.number, 0, 0, INITIAL, count, self.retiring)

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
    """What its producer knows of it."""

    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    """Partition that was named, and how many records."""
    asked_to_commit: bool = False
    committed: bool = False


Step = Generator[Callable[[], Any], Any, None]


class World:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_ms = 0
        self.settings = TransactionSettings(timed_out_interval_ms=500, expired_interval_ms=10**9)
        self.journal: list[tuple[bytes, bytes | None]] = []
        self.synced = 0
        self.ids = 0
        self.partitions = [Partition(number) for number in range(PARTITIONS)]
        self.transactions: list[Transaction] = []
        self.actors: list[tuple[str, Step]] = []
        self.network: list[tuple[Callable[[], Any], Callable[[Any], None] | None]] = []
        self.after_sync: list[tuple[int, Callable[[], None]]] = []
        self.deliveries: list[tuple[WriteMarkers, set[TopicPartition]]] = []
        self.waiting: list[tuple[int, Callable[[], None]]] = []
        """Until when producers wait for their answers."""
        self.faults = True
        self.load()

    # -- the coordinator -------------------------------------------------------------------------------------------

    def load(self) -> None:
        self.machine = Coordinator(self.settings)
        for line in self.journal:
            record = decode_record(*line)
            assert record is not None
            self.machine.apply(record)
        self.timers: dict[Any, int] = {}
        self.after_sync = []
        self.deliveries = []
        self.perform(self.machine.loaded(self.now_ms), lambda reply: None)

    def perform(self, outcome: Outcome[Any, Record], answer: Callable[[Any], None]) -> None:
        for record in outcome.records:
            self.journal.append(encode_record(record))
            self.machine.apply(record)
        for timer in outcome.timers:
            assert isinstance(timer, SetTimer)
            self.timers[timer.key] = timer.at_ms
        for effect in outcome.effects:
            self.after_sync.append((len(self.journal), lambda it=effect: self.deliver(it)))
        self.after_sync.append((len(self.journal), lambda: answer(outcome.reply)))

    def deliver(self, effect: WriteMarkers) -> None:
        if all(known is not effect and known != effect for known, _ in self.deliveries):
            self.deliveries.append((effect, set(effect.partitions)))

    def sync_journal(self) -> None:
        self.synced = len(self.journal)
        due = [action for at, action in self.after_sync if at <= self.synced]
        self.after_sync = [(at, action) for at, action in self.after_sync if at > self.synced]
        for action in due:
            action()

    def crash_coordinator(self) -> None:
        del self.journal[self.synced :]
        self.load()

    def wake(self) -> None:
        for key in [key for key, at_ms in self.timers.items() if at_ms <= self.now_ms]:
            del self.timers[key]
            self.perform(self.machine.on_timer(key, self.now_ms), lambda reply: None)

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
            self.perform(self.machine.markers_written(effect, self.now_ms), lambda reply: None)

    # -- the partitions --------------------------------------------------------------------------------------------

    def produce(self, name: str, at: int, entry: Entry) -> ErrorCode | int:
        """The code, or the number of the partition whose sync acknowledges it."""
        named = self.partitions[at]
        ancestors = [self.partitions[ANCESTOR[at]]] if at in ANCESTOR else []
        role = named.leadership
        decision = decide_append(role, named.table, ancestors, entry, COUNT_NOT_SAID)
        if decision is VERIFY:
            held = self.machine.verify(name, entry.producer_id, entry.producer_epoch, TopicPartition("t", at))
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

    # -- producers -------------------------------------------------------------------------------------------------

    def producer(self, name: str) -> Step:
        """One instance of a producer, for as long as nobody fences it."""
        producer_id = epoch = -1
        while True:
            request = InitProducerIdRequest(
                transactional_id=name,
                transaction_timeout_ms=TIMEOUT_MS,
                producer_id=producer_id,
                producer_epoch=epoch,
            )
            reply = yield lambda it=request: self.machine.init_producer_id(it, 5, self.now_ms, self.new_id)
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
    ) -> Generator[Callable[[], Any], Any, tuple[bool, bool]]:
        """Whether the producer is fenced, and whether its sequences go on."""
        transaction = Transaction()
        self.transactions.append(transaction)
        number = len(self.transactions) - 1
        held: set[int] = set()
        clean = True
        for _ in range(self.chance.randint(1, 4)):
            at = self.chance.randrange(PARTITIONS)
            if at not in held:
                error = yield from self.until_known(lambda it=at: self.add(name, producer_id, epoch, it))
                if error is not OK:
                    return True, False
                held.add(at)
            count = 0
            entry = Entry(0, producer_id, epoch, sequences[at], number)
            for attempt in range(8):
                error = yield lambda it=entry, to=at: ("produce", name, to, it)
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
        error = yield from self.until_known(lambda: self.end(name, producer_id, epoch, commit=commit))
        if error is not OK:
            return True, False
        transaction.committed = commit
        return False, clean

    def until_known(self, ask: Callable[[], Any]) -> Generator[Callable[[], Any], Any, ErrorCode]:
        while True:
            code = yield ask
            if code is not None and code is not ErrorCode.CONCURRENT_TRANSACTIONS:
                return code

    def add(self, name: str, producer_id: int, epoch: int, at: int) -> Outcome[Any, Record]:
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=producer_id,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name="t", partitions=[at])],
        )
        return self.machine.add_partitions(request, 3, self.now_ms)

    def end(self, name: str, producer_id: int, epoch: int, *, commit: bool) -> Outcome[Any, Record]:
        request = EndTxnRequest(transactional_id=name, producer_id=producer_id, producer_epoch=epoch, committed=commit)
        return self.machine.end(request, 3, self.now_ms)

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
                self.network.append((lambda: reply, lambda it: self.advance(actor, it)))

        def arrive() -> Any:
            """What a producer gave up is not decided upon any more: its connection is closed (docs/adr/0014)."""
            result = request()
            return None if told and isinstance(result, Outcome) else result

        self.network.append((arrive, answer))
        if self.faults and self.chance.random() < 0.1:
            self.network.append((arrive, lambda reply: None))
        self.waiting.append((self.now_ms + REQUEST_TIMEOUT_MS, lambda: answer(None)))

    def carry(self) -> None:
        """One message arrives, or is lost."""
        if not self.network:
            return
        late = min(len(self.network), 6)
        request, answer = self.network.pop(self.chance.randrange(late))
        result = request()
        lost = self.faults and self.chance.random() < 0.08
        if isinstance(result, Outcome):
            self.perform(result, lambda reply: None if lost or answer is None else answer(_code(reply)))
        elif isinstance(result, tuple) and result and result[0] == "produce":
            _, name, at, entry = result
            found = self.produce(name, at, entry)
            if isinstance(found, ErrorCode):
                code = found
            else:
                code = OK
                for partition in self.partitions:
                    partition.synced = len(partition.log)
            if not lost and answer is not None:
                answer(code)
        elif answer is not None:
            answer(result)

    # -- running ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        self.now_ms += self.chance.randint(0, 20)
        while self.waiting and self.waiting[0][0] <= self.now_ms:
            self.waiting.pop(0)[1]()
        steps: dict[Callable[[], None], int] = {
            self.carry: 80,
            self.sync_journal: 25,
            self.write_a_marker: 25,
            self.wake: 5,
            self.replace_a_producer: 1,
            self.resize: 2,
            self.crash_coordinator: 2,
            self.crash_a_partition: 2,
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

    def check(self) -> None:
        for partition in self.partitions:
            for number in partition.visible():
                assert self.transactions[number].asked_to_commit, "a record that nobody committed is visible"

    def quiesce(self) -> None:
        """Nothing fails any more, producers go away, and what they left open takes too long."""
        self.faults = False
        self.network.clear()
        self.actors.clear()
        for _ in range(60):
            self.now_ms += TIMEOUT_MS
            self.wake()
            self.sync_journal()
            while self.deliveries:
                self.write_a_marker()
            for partition in self.partitions:
                partition.synced = len(partition.log)

    def judge(self) -> None:
        live = self.machine
        self.load()
        assert self.machine == live, "what was replayed is not what lived"
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
    """What a producer's steps look at."""
    if hasattr(reply, "results_by_topic_v3_and_below"):
        return ErrorCode(reply.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code)
    return reply if hasattr(reply, "producer_epoch") and hasattr(reply, "ongoing_txn_producer_id") else _end(reply)


def _end(reply: Any) -> Any:
    return None if reply is None else ErrorCode(reply.error_code)


def history(seed: int, steps: int = STEPS) -> World:
    world = World(seed)
    for name in ("a", "b", "c"):
        world.begin(name)
    for _ in range(steps):
        world.step()
    world.quiesce()
    world.judge()
    return world


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_what_is_committed_is_whole_and_what_is_aborted_is_never_seen(seed: int) -> None:
    """Replay one with: pytest tests/simulation/test_transactions.py -k '[SEED]'."""
    history(seed)


def test_a_seed_gives_the_same_history_again() -> None:
    assert history(7).journal == history(7).journal


def test_histories_are_worth_something() -> None:
    """They commit, abort, time out, redirect, and end transactions after crashes."""
    worlds = [history(seed) for seed in range(12)]
    transactions = [it for world in worlds for it in world.transactions]
    assert sum(it.committed for it in transactions) > 50
    assert sum(not it.asked_to_commit for it in transactions) > 20
    aliases = [e for world in worlds for p in world.partitions for e in p.log if e.producer_id >= 1 << 40]
    assert sum(entry.marker is None for entry in aliases) > 20
    assert any(entry.marker is not None and entry.marker.commit for entry in aliases)
