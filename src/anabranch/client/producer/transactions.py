"""A producer's side of its transactions: the requests to their coordinator, and the calls that each phase allows.

    NEW ──init──► READY ──begin──► OPEN ──commit──► FLUSHING ──► COMMITTING ──► READY    FENCED is the end
                                    ├─ a record failed, abort ─► SPOILT ──► READY
                                    └─ prepare ─► FLUSHING ──► PREPARED: another process ends it (`end_prepared`)

The rule: a transaction ends when none of its records is open, and a record that comes later is not sent. So nothing is
sent from FLUSHING on; a `send` that began before, in another thread or waiting for room, is taken until the end of
FLUSHING. One that is later still fails.

Requests are repeated until `max.block.ms` are over: the coordinator recognizes those that it has carried out. Every
coordinator request is safe to repeat, so a lost response never decides anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_LEADER_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, TopicPartition
from anabranch.client.cluster.connection import ConnectError, DisconnectedError
from anabranch.client.cluster.coordinator import GROUP, TRANSACTION, Coordinator
from anabranch.client.cluster.metadata import Cluster
from anabranch.client.consumer.listeners import GroupMetadata
from anabranch.client.consumer.offsets import OffsetAndMetadata
from anabranch.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from anabranch.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnTopic
from anabranch.protocol.messages.end_txn import EndTxnRequest
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest
from anabranch.protocol.messages.offset_commit import KeyRangeOffset, OffsetRange
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)

PURPOSE = "transactions"
RETRY_S = 0.01
RETRY_MAX_S = 0.5
NO_GENERATION = -1
FENCED = frozenset(
    {
        ErrorCode.PRODUCER_FENCED,
        ErrorCode.INVALID_PRODUCER_EPOCH,
        ErrorCode.INVALID_PRODUCER_ID_MAPPING,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
AGAIN = frozenset(
    {
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.NOT_COORDINATOR,
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.KAFKA_STORAGE_ERROR,
    }
)


VERSIONS_MAX = {AddPartitionsToTxnRequest: 3, EndTxnRequest: 4, TxnOffsetCommitRequest: 4, InitProducerIdRequest: 5}
"""Higher versions are for requests between brokers, or for epochs that grow with each transaction (KIP-890, part 2)."""


class Phase(Enum):
    """The phase of a producer's transactions."""

    NEW = auto()
    READY = auto()
    OPEN = auto()
    FLUSHING = auto()
    """The commit waits until all records are delivered."""
    COMMITTING = auto()
    """The commit was requested, and its outcome may be unknown: only the commit can be requested again."""
    SPOILT = auto()
    FENCED = auto()
    PREPARED = auto()
    """All is delivered, and whoever has the `PreparedTransaction` commits or aborts it."""


class Producing(NamedTuple):
    """The producer id and epoch."""

    producer_id: int
    producer_epoch: int


class PreparedTransaction(NamedTuple):
    """An open transaction with everything delivered, to be committed or aborted by any process (as in KIP-939).

    Nothing else may use the transactional id before: a new producer would abort it. So does the coordinator, when
    `transaction.timeout.ms` are over.
    """

    transactional_id: str
    producer_id: int
    producer_epoch: int


WHY_NOT = {
    (Phase.NEW, "begin"): "call init_transactions first",
    (Phase.NEW, "send"): "call init_transactions, then begin_transaction",
    (Phase.READY, "send"): "call begin_transaction first",
    (Phase.READY, "commit"): "no transaction is open: call begin_transaction first",
    (Phase.NEW, "commit"): "no transaction is open: call init_transactions, then begin_transaction",
    (Phase.OPEN, "begin"): "a transaction is open already: commit or abort it first",
    (Phase.OPEN, "init"): "a transaction is open: commit or abort it first",
    (Phase.FLUSHING, "begin"): "the last transaction is being committed: call commit_transaction until it is",
    (Phase.FLUSHING, "init"): "a transaction is being committed: call commit_transaction until it is",
    (Phase.FLUSHING, "send"): "the transaction is being committed",
    (Phase.COMMITTING, "take"): "the transaction was committed meanwhile",
    (Phase.READY, "take"): "the transaction has ended meanwhile",
    (Phase.PREPARED, "take"): "the transaction is prepared, for another process to end",
    (Phase.SPOILT, "take"): "the transaction cannot be committed any more",
    (Phase.COMMITTING, "begin"): "the last transaction is being committed: call commit_transaction until it is",
    (Phase.COMMITTING, "send"): "the transaction is being committed",
    (Phase.COMMITTING, "abort"): "the transaction may be committed already: call commit_transaction until it is",
    (Phase.PREPARED, "begin"): "the last transaction is prepared, for another process to end: make a new producer",
    (Phase.PREPARED, "send"): "the transaction is prepared, for another process to end",
    (Phase.PREPARED, "commit"): "the transaction is prepared: end it with Admin.end_transaction",
    (Phase.PREPARED, "abort"): "the transaction is prepared: end it with Admin.end_transaction",
    (Phase.SPOILT, "begin"): "the open transaction cannot be committed any more: abort it first",
    (Phase.SPOILT, "send"): "the open transaction cannot be committed any more: abort it",
    (Phase.SPOILT, "commit"): "the transaction cannot be committed any more: abort it",
    (Phase.SPOILT, "init"): "the open transaction cannot be committed any more: abort it first",
}
MAY = {
    "init": {Phase.NEW, Phase.READY},
    "begin": {Phase.READY},
    "send": {Phase.OPEN},
    "take": {Phase.OPEN, Phase.FLUSHING},
    "commit": {Phase.OPEN, Phase.FLUSHING, Phase.COMMITTING},
    "abort": {Phase.OPEN, Phase.FLUSHING, Phase.SPOILT},
}


class Transactions:
    """The transactions of one producer, one after the other."""

    def __init__(
        self,
        cluster: Cluster,
        transactional_id: str,
        *,
        timeout_ms: int,
        request_timeout_ms: int,
        max_block_ms: int,
    ) -> None:
        self.transactional_id = transactional_id
        self.phase = Phase.NEW
        self.why: Exception | None = None
        """The error that spoilt the transaction, or that fenced the producer."""
        self.begun = False
        """Whether a request of the open transaction may have reached the coordinator."""
        self._cluster = cluster
        self._coordinator = Coordinator(cluster, transactional_id, TRANSACTION)
        self._groups: dict[str, Coordinator] = {}
        self._timeout_ms = timeout_ms
        self._request_timeout_ms = request_timeout_ms
        self._max_block_ms = max_block_ms
        self._as = Producing(NO_PRODUCER_ID, NO_PRODUCER_EPOCH)

    def check(self, action: str) -> None:
        """Raise the error for an action that this phase does not allow."""
        if self.phase in MAY[action]:
            return
        if self.phase is Phase.FENCED:
            assert self.why is not None
            raise self.why
        text = WHY_NOT.get((self.phase, action), "no transaction is open")
        because = f" ({self.why})" if self.phase is Phase.SPOILT and self.why is not None else ""
        raise ApiError(ErrorCode.INVALID_TXN_STATE, text + because)

    def spoil(self, error: Exception) -> None:
        """Mark the open transaction as abort-only: one of its records is lost."""
        if self.phase in (Phase.OPEN, Phase.FLUSHING, Phase.COMMITTING):
            self.phase, self.why = Phase.SPOILT, error

    def fence(self, error: Exception) -> None:
        """Mark the producer as fenced: another producer has acquired the transactional id."""
        self.phase, self.why = Phase.FENCED, error

    # -- requests -----------------------------------------------------------------------------------------------------

    async def init(self) -> Producing:
        """Get the producer id and the next epoch; an older producer is fenced, its open transaction aborted."""
        request = InitProducerIdRequest(
            transactional_id=self.transactional_id,
            transaction_timeout_ms=self._timeout_ms,
            producer_id=self._as.producer_id,
            producer_epoch=self._as.producer_epoch,
        )
        response = await self._until_done(lambda: self._ask(request), "init_transactions")
        self._as = Producing(response.producer_id, response.producer_epoch)
        return self._as

    async def add_partitions(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Add partitions to the transaction. Raises `ApiError` UNKNOWN_TOPIC_OR_PARTITION if one does not exist."""
        topics: dict[str, list[int]] = {}
        for topic, number in partitions:
            topics.setdefault(topic, []).append(number)
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=self._as.producer_id,
            v3_and_below_producer_epoch=self._as.producer_epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnTopic(name=name, partitions=numbers) for name, numbers in topics.items()
            ],
        )

        def code_of(response: Any) -> ErrorCode:
            codes = [
                ErrorCode.of(result.partition_error_code)
                for topic in response.results_by_topic_v3_and_below
                for result in topic.results_by_partition
            ]
            return _worst(codes)

        self.begun = True
        await self._until_done(lambda: self._ask(request), "adding partitions to the transaction", code_of)

    async def commit_offsets(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], group: GroupMetadata) -> None:
        """Add a group's offsets to the transaction; they take effect with its commit."""
        added = AddOffsetsToTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self._as.producer_id,
            producer_epoch=self._as.producer_epoch,
            group_id=group.group_id,
        )
        topics: dict[str, list[TxnOffsetCommitRequestPartition]] = {}
        for tp, at in offsets.items():
            partition = TxnOffsetCommitRequestPartition(
                partition_index=tp.partition,
                committed_offset=at.offset,
                committed_leader_epoch=NO_LEADER_EPOCH if at.leader_epoch is None else at.leader_epoch,
                committed_metadata=at.metadata,
                offset_ranges=[OffsetRange(start=first, end=last) for first, last in at.ranges],
                key_range_offsets=[KeyRangeOffset(start=start, end=end, offset=upto) for start, end, upto in at.shares],
            )
            topics.setdefault(tp.topic, []).append(partition)
        committed = TxnOffsetCommitRequest(
            transactional_id=self.transactional_id,
            group_id=group.group_id,
            producer_id=self._as.producer_id,
            producer_epoch=self._as.producer_epoch,
            generation_id=group.generation_id,
            member_id=group.member_id,
            group_instance_id=group.group_instance_id,
            topics=[
                TxnOffsetCommitRequestTopic(name=name, partitions=partitions) for name, partitions in topics.items()
            ],
        )
        coordinator = self._groups.setdefault(group.group_id, Coordinator(self._cluster, group.group_id, GROUP))

        async def add() -> Any:
            await coordinator.connection(PURPOSE)  # A group that was never looked up has no coordinator yet.
            return await self._ask(added)

        def code_of(response: Any) -> ErrorCode:
            code = _worst([ErrorCode.of(it.error_code) for topic in response.topics for it in topic.partitions])
            if code in AGAIN:
                coordinator.forget()
            return code

        self.begun = True
        await self._until_done(add, "adding offsets to the transaction")
        await self._until_done(
            lambda: self._ask(committed, coordinator),
            f"committing offsets of group '{group.group_id}' with the transaction",
            code_of,
        )

    async def end(self, *, commit: bool) -> None:
        """Commit or abort the open transaction. When the call returns, the decision is durable."""
        if self.begun:
            request = EndTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=self._as.producer_id,
                producer_epoch=self._as.producer_epoch,
                committed=commit,
            )
            try:
                await self._until_done(lambda: self._ask(request), "commit" if commit else "abort")
            except ApiError as error:
                # No request of the transaction has reached the coordinator, so an abort has no effect.
                if commit or error.code is not ErrorCode.INVALID_TXN_STATE:
                    raise
        self.begun = False

    def prepare(self) -> PreparedTransaction | None:
        """Leave the open transaction to whoever ends it; None if it holds nothing."""
        self.phase = Phase.PREPARED
        return PreparedTransaction(self.transactional_id, *self._as) if self.begun else None

    @classmethod
    async def end_prepared(
        cls,
        cluster: Cluster,
        prepared: PreparedTransaction,
        *,
        commit: bool,
        request_timeout_ms: int,
        max_block_ms: int,
    ) -> None:
        """Commit or abort a prepared transaction. Repeating it has no effect.

        Raises `ApiError` PRODUCER_FENCED (or another code of `FENCED`) if it was aborted, by its timeout or by a later
        producer of the transactional id.
        """
        it = cls(
            cluster,
            prepared.transactional_id,
            timeout_ms=0,
            request_timeout_ms=request_timeout_ms,
            max_block_ms=max_block_ms,
        )
        it._as = Producing(prepared.producer_id, prepared.producer_epoch)
        it.begun = True
        await it.end(commit=commit)

    async def _ask(self, request: Any, coordinator: Coordinator | None = None) -> Any:
        coordinator = coordinator or self._coordinator
        connection = await coordinator.connection(PURPOSE)
        version = connection.version_of(type(request))
        capped = min(version, VERSIONS_MAX.get(type(request), version))
        return await coordinator.ask(request, PURPOSE, timeout_ms=self._request_timeout_ms, version=capped)

    async def _until_done(
        self,
        ask: Callable[[], Any],
        what: str,
        code_of: Callable[[Any], ErrorCode] = lambda response: ErrorCode.of(response.error_code),
    ) -> Any:
        """Ask until the response is final, or the deadline is over."""
        loop = asyncio.get_running_loop()
        deadline, delay_s = loop.time() + self._max_block_ms / 1000, RETRY_S
        while True:
            why: Exception
            try:
                response = await ask()
                code = code_of(response)
                if code is ErrorCode.NONE:
                    return response
                why = ApiError(code, f"{what} of transactional id '{self.transactional_id}' was refused")
            except (ConnectError, DisconnectedError, OSError) as error:
                code, why = ErrorCode.NETWORK_EXCEPTION, error
            except ApiError as error:  # No coordinator could be found.
                code, why = error.code, error
            if code in FENCED:
                text = f"transactional id '{self.transactional_id}' belongs to another producer now; make a new one"
                fenced = ApiError(code, text)
                self.fence(fenced)
                raise fenced from why
            if code not in AGAIN and code is not ErrorCode.NETWORK_EXCEPTION:
                raise why
            if code is ErrorCode.NOT_COORDINATOR or code is ErrorCode.COORDINATOR_NOT_AVAILABLE:
                self._coordinator.forget()
            if loop.time() + delay_s > deadline:
                text = f"{what} took longer than {self._max_block_ms} ms (max.block.ms): {why}; it can be tried again"
                raise ApiError(ErrorCode.REQUEST_TIMED_OUT, text) from why
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RETRY_MAX_S)


def _worst(codes: Iterable[ErrorCode]) -> ErrorCode:
    """Return the decisive code of several: an error that retries cannot clear before one that they can."""
    bad = [code for code in codes if code not in (ErrorCode.NONE, ErrorCode.OPERATION_NOT_ATTEMPTED)]
    return next((code for code in bad if code not in AGAIN), bad[0] if bad else ErrorCode.NONE)


def group_of(group: GroupMetadata | str) -> GroupMetadata:
    """The committing member of a group, or just the group's id where the group has no members."""
    return GroupMetadata(group, NO_GENERATION, "", None) if isinstance(group, str) else group
