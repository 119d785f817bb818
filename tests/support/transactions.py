"""A transactional producer and a reader of committed records, spoken on the wire by hand: every step can be seen."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID
from anabranch.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from anabranch.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic
from anabranch.protocol.messages.describe_transactions import DescribeTransactionsRequest
from anabranch.protocol.messages.end_txn import EndTxnRequest
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest
from anabranch.protocol.messages.offset_commit import OffsetRange
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from anabranch.records.batch import TRANSACTIONAL, headers, parse_end_transaction_marker
from tests.support.wire import WireClient, batch, values_of

TRANSACTIONS = 1
COMMITTED, UNCOMMITTED = 1, 0
WAIT = frozenset(
    {
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
    }
)
TIMEOUT_S = 20.0


class TransactionalProducer:
    """One producer; it counts its sequences as clients do: per partition that it names."""

    def __init__(self, client: WireClient, name: str = "tx", timeout_ms: int = 60_000) -> None:
        self.client = client
        self.name = name
        self.timeout_ms = timeout_ms
        self.producer_id = -1
        self.epoch = -1
        self.sequences: dict[tuple[str, int], int] = {}
        self.added: set[tuple[str, int]] = set()

    def init(self) -> TransactionalProducer:
        """Find the coordinator and become the one producer of the id."""
        found = self.client.call(FindCoordinatorRequest(key_type=TRANSACTIONS, coordinator_keys=[self.name]), 4)
        assert found.coordinators[0].error_code == ErrorCode.NONE, found
        request = InitProducerIdRequest(
            transactional_id=self.name,
            transaction_timeout_ms=self.timeout_ms,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
        )
        answer = retried(lambda: self.client.call(request))
        assert answer.error_code == ErrorCode.NONE, answer
        self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
        self.sequences, self.added = {}, set()
        return self

    def add(self, topic: str, *partitions: int) -> ErrorCode:
        """AddPartitionsToTxn."""
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.name,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.epoch,
            v3_and_below_topics=[AddPartitionsToTxnTopic(name=topic, partitions=list(partitions))],
        )

        def call() -> Any:
            return self.client.call(request).results_by_topic_v3_and_below[0].results_by_partition[0]

        error = ErrorCode(retried(call, "partition_error_code").partition_error_code)
        if error is ErrorCode.NONE:
            self.added |= {(topic, partition) for partition in partitions}
        return error

    def send(
        self,
        topic: str,
        partition: int,
        *values: bytes,
        count: int = COUNT_NOT_SAID,
        add: bool = True,
        transactional: bool = True,
        name: str | None = "",
        version: int = 10,
    ) -> ErrorCode:
        """Produce one batch; the partition is added before, if need be."""
        if add and (topic, partition) not in self.added:
            assert self.add(topic, partition) is ErrorCode.NONE
        sequence = self.sequences.get((topic, partition), 0)
        data = batch(
            values,
            producer=(self.producer_id, self.epoch, sequence),
            attributes=TRANSACTIONAL if transactional else 0,
        )
        request = self.client.produce_request(topic, partition, data, count=count)
        request.transactional_id = self.name if name == "" else name
        answer = self.client.call(request, version).responses[0].partition_responses[0]
        error = ErrorCode(answer.error_code)
        if error is ErrorCode.NONE:
            self.sequences[topic, partition] = sequence + len(values)
        return error

    def commit_offset(
        self,
        group: str,
        topic: str,
        partition: int,
        offset: int,
        *,
        add: bool = True,
        ranges: Sequence[tuple[int, int]] = (),
        member: tuple[str, int] = ("", -1),
    ) -> ErrorCode:
        """AddOffsetsToTxn and TxnOffsetCommit; `member` has its id and its epoch."""
        who: dict[str, Any] = {"producer_id": self.producer_id, "producer_epoch": self.epoch}
        if add:
            added = AddOffsetsToTxnRequest(transactional_id=self.name, group_id=group, **who)
            assert retried(lambda: self.client.call(added)).error_code == ErrorCode.NONE
        told = TxnOffsetCommitRequestPartition(
            partition_index=partition,
            committed_offset=offset,
            committed_metadata="",
            offset_ranges=[OffsetRange(start=start, end=end) for start, end in ranges],
        )
        request = TxnOffsetCommitRequest(
            transactional_id=self.name,
            group_id=group,
            member_id=member[0],
            generation_id=member[1],
            topics=[TxnOffsetCommitRequestTopic(name=topic, partitions=[told])],
            **who,
        )
        return ErrorCode(retried(lambda: self.client.call(request).topics[0].partitions[0]).error_code)

    def end(self, *, commit: bool, wait: bool = True) -> ErrorCode:
        """EndTxn, and wait until every partition has its marker."""
        request = EndTxnRequest(
            transactional_id=self.name,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=commit,
        )
        error = ErrorCode(retried(lambda: self.client.call(request)).error_code)
        self.added = set()
        if wait and error is ErrorCode.NONE:
            self.until("CompleteCommit" if commit else "CompleteAbort")
        return error

    def commit(self) -> None:
        assert self.end(commit=True) is ErrorCode.NONE

    def abort(self) -> None:
        assert self.end(commit=False) is ErrorCode.NONE

    def describe(self) -> Any:
        """DescribeTransactions."""
        answer = self.client.call(DescribeTransactionsRequest(transactional_ids=[self.name]))
        return answer.transaction_states[0]

    def until(self, state: str) -> None:
        """Wait for a state."""
        deadline = time.monotonic() + TIMEOUT_S
        while (found := self.describe()).transaction_state != state:
            assert time.monotonic() < deadline, f"{state} expected, it is {found}"
            time.sleep(0.01)


def retried(call: Any, field: str = "error_code") -> Any:
    """Call again while the coordinator is not ready."""
    deadline = time.monotonic() + TIMEOUT_S
    while (answer := call()) is not None and ErrorCode(getattr(answer, field)) in WAIT:
        assert time.monotonic() < deadline, answer
        time.sleep(0.01)
    return answer


def fetch(client: WireClient, topic: str, partition: int = 0, offset: int = 0, isolation_level: int = COMMITTED) -> Any:
    """One fetch of one partition."""
    request = client.fetch_request(topic, {partition: offset}, isolation_level=isolation_level)
    return client.call(request, 12).responses[0].partitions[0]


def committed(client: WireClient, topic: str, partition: int = 0, offset: int = 0) -> list[bytes]:
    """The values that a reader of committed records sees, as Kafka's consumers find them."""
    answer = fetch(client, topic, partition, offset)
    assert answer.error_code == ErrorCode.NONE, answer
    return [value for _, value in without_aborted(bytes(answer.records or b""), answer.aborted_transactions)]


def without_aborted(records: bytes, aborted: Iterable[Any]) -> list[tuple[int, bytes]]:
    """Return the values without control batches and records of aborted transactions."""
    waiting = sorted(aborted, key=lambda line: line.first_offset)
    void: set[int] = set()
    found: list[tuple[int, bytes]] = []
    for position, header in headers(records):
        piece = records[position : position + header.size]
        while waiting and waiting[0].first_offset <= header.last_offset:
            void.add(waiting.pop(0).producer_id)
        if header.is_control:
            marker = parse_end_transaction_marker(piece)
            if marker is not None and not marker.commit:
                void.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in void):
            found += values_of(piece)
    return found
