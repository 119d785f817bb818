"""Transactions through kills: committed ones are read whole and once, others never, and none stays open.

One transactional id at a time. After a kill its producer goes on in its transaction, or a new one takes the id over,
which ends the transaction. An id may also be given up within a transaction; its timeout must end that.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field

from anabranch.base.errors import ErrorCode
from anabranch.machines.placement import place
from anabranch.records.batch import headers
from tests.crash.work import INITIAL, Stopped, read_to_the_end, turns
from tests.support.broker import BrokerProcess
from tests.support.transactions import COMMITTED, TransactionalProducer, without_aborted
from tests.support.wire import WireClient

SLOTS = 4
"""Keys: each writes at most one batch in a transaction."""
PATIENT_MS, IMPATIENT_MS = 60_000, 1_000


@dataclass
class _Transaction:
    number: int
    slots: list[int]
    """Those that are still to be written."""
    values: set[bytes] = field(default_factory=set)
    pending: tuple[int, int, tuple[bytes, ...]] | None = None
    """Slot, partition and values of the batch without an outcome."""
    commits: bool | None = None
    """How EndTxn was asked to end it; None before."""


class Transactions:
    """One transaction after the other."""

    def __init__(self, seed: int, topic: str = "transactions") -> None:
        self.topic = topic
        self.chance = random.Random(f"transactions {seed}")
        self.hashes = [self.chance.getrandbits(31) for _ in range(SLOTS)]
        self.count = INITIAL
        self.ids = self.begun = 0
        self.producer: TransactionalProducer | None = None
        self.given_up = False
        """Whether the transactional id is to be left in its transaction."""
        self.current: _Transaction | None = None
        self.ended: dict[str, list[_Transaction]] = {"committed": [], "aborted": [], "abandoned": [], "taken over": []}
        self.whole: dict[int, bool] = {}
        """Of transactions that were taken over while they were committed: whether they can be read."""

    def prepare(self, client: WireClient) -> None:
        client.create(self.topic, INITIAL, retention_ms="-1")

    def run(self, client: WireClient, stopped: Stopped) -> None:
        if self.producer is not None and self.chance.random() < 0.4:
            self._begin_producer(client, self.producer.name)
        while not stopped():
            self._step(client)

    def settle(self, client: WireClient) -> None:
        if self.producer is not None and self.producer.epoch < 0:
            self._begin_producer(client, self.producer.name)
        if self.current is not None and self.current.values == set() and self.current.pending is None:
            self.current = None
        while self.current is not None:
            self.current.slots.clear()
            self._step(client)

    def _step(self, client: WireClient) -> None:
        if self.producer is None or self.producer.epoch < 0:
            if self.producer is None:
                self.ids += 1
                self.given_up = self.chance.random() < 0.15
            self._begin_producer(client, f"tx-{self.ids}")
        assert self.producer is not None
        self.producer.client = client
        if self.current is None:
            slots = self.chance.sample(range(SLOTS), self.chance.randint(1, SLOTS))
            self.begun += 1
            self.current = _Transaction(self.begun, slots)
        transaction = self.current
        if transaction.commits is None and transaction.pending is None and transaction.slots:
            slot = transaction.slots.pop()
            values = tuple(b"%d:%d:%d" % (slot, self.begun, it) for it in range(self.chance.randint(1, 3)))
            transaction.pending = slot, place(self.hashes[slot], INITIAL, self.count), values
            transaction.values.update(values)
        if transaction.pending is not None:
            self._send(client, self.producer, transaction)
        elif self.given_up:
            self._abandon()
        else:
            self._end(self.producer, transaction)

    def _begin_producer(self, client: WireClient, name: str) -> None:
        """Take the transactional id (over): the transaction that is open there is ended."""
        timeout_ms = IMPATIENT_MS if self.given_up else PATIENT_MS
        self.producer = TransactionalProducer(client, name, timeout_ms)
        self.producer.init()
        if self.current is not None:
            commits = self.current.commits
            self.ended["taken over" if commits else "aborted"].append(self.current)
            self.current = None

    def _abandon(self) -> None:
        assert self.current is not None
        self.ended["abandoned"].append(self.current)
        self.producer = self.current = None

    def _send(self, client: WireClient, producer: TransactionalProducer, transaction: _Transaction) -> None:
        assert transaction.pending is not None
        slot, partition, values = transaction.pending
        error = ErrorCode.NONE
        if (self.topic, partition) not in producer.added:
            error = producer.add(self.topic, partition)
        if error is ErrorCode.NONE:
            error = producer.send(self.topic, partition, *values, count=self.count, add=False)
        if error is ErrorCode.NONE:
            transaction.pending = None
        elif error in (ErrorCode.INVALID_PARTITION_METADATA, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION):
            self.count = client.metadata(self.topic).undeleted_partition_count
            transaction.pending = slot, place(self.hashes[slot], INITIAL, self.count), values
        elif self.given_up and not error.retriable:
            self._abandon()  # Its timeout has ended it already.
        else:
            assert error.retriable, error
            time.sleep(0.01)

    def _end(self, producer: TransactionalProducer, transaction: _Transaction) -> None:
        if transaction.commits is None:
            transaction.commits = self.chance.random() < 0.7
        error = producer.end(commit=transaction.commits, wait=self.chance.random() < 0.3)
        assert error is ErrorCode.NONE, error
        self.ended["committed" if transaction.commits else "aborted"].append(transaction)
        self.current = None

    async def verify(self, broker: BrokerProcess, client: WireClient) -> None:
        for _ in turns("a transaction stays open"):
            found, is_open = self._committed(client)
            if not is_open:
                break
        doubled = sorted(value for value, times in found.items() if times > 1)
        assert not doubled, f"more than once: {doubled[:10]}"
        for transaction in self.ended["committed"]:
            assert transaction.values <= found.keys(), f"committed and lost: {transaction}"
        for way in ("aborted", "abandoned"):
            for transaction in self.ended[way]:
                assert not transaction.values & found.keys(), f"{way} and read: {transaction}"
        for transaction in self.ended["taken over"]:
            there = transaction.values & found.keys()
            assert there in (set(), transaction.values), f"committed in part: {transaction}, {there} of it"
            assert self.whole.setdefault(transaction.number, bool(there)) is bool(there), f"{transaction} has changed"
        read = await read_to_the_end(broker, self.topic, "read_committed")
        assert Counter(record.value for record in read) == found
        last: dict[int, tuple[int, int]] = {}
        for record in read:
            slot, number, place_in_batch = map(int, (record.value or b"").split(b":"))
            assert (number, place_in_batch) > last.get(slot, (0, 0)), f"{record} after {last[slot]}"
            last[slot] = number, place_in_batch

    def _committed(self, client: WireClient) -> tuple[Counter[bytes], bool]:
        """Read what is committed; whether a transaction is open."""
        found: Counter[bytes] = Counter()
        for partition in range(len(client.metadata(self.topic).partitions)):
            offset = 0
            while True:
                answer = client.fetch(self.topic, partition, offset, isolation_level=COMMITTED)
                assert answer.error_code == ErrorCode.NONE, answer
                if answer.last_stable_offset < answer.high_watermark:
                    return found, True
                if not answer.records:
                    break
                rows = without_aborted(bytes(answer.records), answer.aborted_transactions)
                found.update(value for at, value in rows if at >= offset)
                offset = max(header.next_offset for _, header in headers(answer.records))
        return found, False

    def summary(self) -> str:
        return ", ".join(f"{len(them)} {way}" for way, them in self.ended.items()) + " transactions"
