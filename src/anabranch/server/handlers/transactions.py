"""Transactions: InitProducerId (22), AddPartitionsToTxn (24), AddOffsetsToTxn (25), EndTxn (26), WriteTxnMarkers (27),
TxnOffsetCommit (28), DescribeProducers (61), DescribeTransactions (65), ListTransactions (66).

Decisions before the first await are made in the order in which the requests arrived.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import INTERNAL_TOPICS, TopicPartition
from anabranch.base.patterns import compile_client_pattern
from anabranch.machines.outcome import Outcome
from anabranch.machines.partition.appending import Newcomers, refuse_newcomer
from anabranch.protocol.messages.add_offsets_to_txn import AddOffsetsToTxnRequest, AddOffsetsToTxnResponse
from anabranch.protocol.messages.add_partitions_to_txn import AddPartitionsToTxnRequest, AddPartitionsToTxnResponse
from anabranch.protocol.messages.describe_producers import (
    DescribeProducersRequest,
    DescribeProducersResponse,
    PartitionResponse,
    ProducerState,
    TopicResponse,
)
from anabranch.protocol.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
)
from anabranch.protocol.messages.describe_transactions import TransactionState as Described
from anabranch.protocol.messages.end_txn import EndTxnRequest, EndTxnResponse
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from anabranch.protocol.messages.list_transactions import ListTransactionsRequest, ListTransactionsResponse
from anabranch.protocol.messages.list_transactions import TransactionState as Listed
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from anabranch.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerPartitionResult,
    WritableTxnMarkerResult,
    WritableTxnMarkerTopicResult,
    WriteTxnMarkersRequest,
    WriteTxnMarkersResponse,
)
from anabranch.runtime.events import EventLogger
from anabranch.server.context import PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext, large_or_not
from anabranch.server.coordinators.transactions import TransactionFilter
from anabranch.server.handlers.groups import caller_of, submit
from anabranch.server.handlers.in_parts import gather_in_steps, split
from anabranch.server.handlers.in_ranges import in_ranges, ranges_of
from anabranch.server.handlers.unheld import Unheld

if TYPE_CHECKING:
    from anabranch.machines.transactions.coordinator import Coordinator
    from anabranch.machines.transactions.records import TransactionRecord
    from anabranch.machines.transactions.transaction import Transaction

events = EventLogger("transactions")
Response = TypeVar("Response")
ABORTABLE_SINCE = 4
"""The first version of TxnOffsetCommit with the error TRANSACTION_ABORTABLE."""
LENGTH_AT_ONCE = 160
"""A pattern takes as long for so many characters of a transactional id as all else does: RE2 has 0.15 us for each."""


async def handle_init_producer_id(
    broker: BrokerContext, request: InitProducerIdRequest, call: RequestContext
) -> InitProducerIdResponse:
    """Give a producer its id and epoch. Without a transactional id that is a new id, whatever it has now."""
    ids = broker.producer_ids
    try:
        await ids.reserve()
    except OSError as error:
        events.error("no producer id given", peer=call.peer, reason=error)

    def failed(error: ErrorCode) -> InitProducerIdResponse:
        return InitProducerIdResponse(error_code=error, producer_id=-1, producer_epoch=-1)

    name = request.transactional_id
    if name is None:
        given = ids.take()
        return failed(ErrorCode.KAFKA_STORAGE_ERROR) if given is None else InitProducerIdResponse(producer_id=given)
    answer = _decide(
        broker, name, lambda it, now_ms: it.init_producer_id(request, call.api_version, now_ms, ids.take), failed
    )
    return answer if isinstance(answer, InitProducerIdResponse) else await answer


def handle_add_partitions_to_txn(
    broker: BrokerContext, request: AddPartitionsToTxnRequest, call: RequestContext
) -> AddPartitionsToTxnResponse | Awaitable[AddPartitionsToTxnResponse | Large]:
    """Add partitions to a transaction: all of them, or none if one of them does not exist."""
    from anabranch.machines.transactions.coordinator import partitions_response

    topics = request.v3_and_below_topics
    if len(topics) + sum(len(topic.partitions) for topic in topics) >= PARTITIONS_AT_A_TIME:
        return _add_in_steps(broker, request, call)
    named = list(_named(request))
    missing = {it for it in named if _is_missing(broker, it)}
    if missing:
        return partitions_response(request, ErrorCode.OPERATION_NOT_ATTEMPTED, missing)
    error = _added(broker, request, call, named)
    if isinstance(error, ErrorCode):
        return partitions_response(request, error)

    async def answered() -> AddPartitionsToTxnResponse:
        return partitions_response(request, await error)

    return answered()


async def _add_in_steps(broker: BrokerContext, request: AddPartitionsToTxnRequest, call: RequestContext) -> Large:
    """As `handle_add_partitions_to_txn`, for so many partitions that other work must have its turn meanwhile."""
    from anabranch.machines.transactions.coordinator import partitions_response

    held = await asyncio.get_running_loop().run_in_executor(None, lambda: frozenset(_named(request)))
    checked = await gather_in_steps((it, _is_missing(broker, it)) for it in held)
    missing = {it for it, is_missing in checked if is_missing}
    if missing:
        return Large(lambda: partitions_response(request, ErrorCode.OPERATION_NOT_ATTEMPTED, missing))
    error = _added(broker, request, call, held)
    told = error if isinstance(error, ErrorCode) else await error
    return Large(lambda: partitions_response(request, told))


def _named(request: AddPartitionsToTxnRequest) -> Iterator[TopicPartition]:
    return (TopicPartition(it.name, number) for it in request.v3_and_below_topics for number in it.partitions)


def _added(
    broker: BrokerContext, request: AddPartitionsToTxnRequest, call: RequestContext, held: Collection[TopicPartition]
) -> ErrorCode | Awaitable[ErrorCode]:
    return _decide(
        broker,
        request.v3_and_below_transactional_id,
        lambda it, now_ms: it.add_partitions(request, held, call.api_version, now_ms),
        lambda error: error,
    )


def _is_missing(broker: BrokerContext, name: TopicPartition) -> bool:
    """Whether there is no such partition, and never was: batches for removed ones are redirected (ADR 0013)."""
    there = broker.replicas.get(*name) is not None or broker.view.has_removed(*name)
    return name.topic in INTERNAL_TOPICS or not there


def handle_add_offsets_to_txn(
    broker: BrokerContext, request: AddOffsetsToTxnRequest, call: RequestContext
) -> AddOffsetsToTxnResponse | Awaitable[AddOffsetsToTxnResponse]:
    """Let a transaction hold the partition that has a group's offsets."""
    try:
        partition = broker.groups.shard_of(request.group_id).partition.name
    except ApiError as error:
        return AddOffsetsToTxnResponse(error_code=error.code)
    return _decide(
        broker,
        request.transactional_id,
        lambda it, now_ms: it.add_offsets(request, partition, call.api_version, now_ms),
        lambda error: AddOffsetsToTxnResponse(error_code=error),
    )


def handle_end_txn(
    broker: BrokerContext, request: EndTxnRequest, call: RequestContext
) -> EndTxnResponse | Awaitable[EndTxnResponse]:
    """Commit or abort."""
    return _decide(
        broker,
        request.transactional_id,
        lambda it, now_ms: it.end(request, call.api_version, now_ms),
        lambda error: EndTxnResponse(error_code=error),
    )


def handle_txn_offset_commit(
    broker: BrokerContext, request: TxnOffsetCommitRequest, call: RequestContext
) -> TxnOffsetCommitResponse | Awaitable[TxnOffsetCommitResponse]:
    """Let a group's progress count when the transaction is committed; it must hold the group's partition already."""
    try:
        partition = broker.groups.shard_of(request.group_id).partition
    except ApiError as error:
        return _offsets_refused(request, error.code)
    transactions, name = broker.transactions, request.transactional_id
    begun_ms = transactions.begun_ms(name)

    def verified() -> ErrorCode:
        """The error of what is not, or not any more, part of the transaction in which the request came."""
        code = transactions.verify(name, partition.name, request.producer_id, request.producer_epoch)
        if code is ErrorCode.NONE and transactions.begun_ms(name) != begun_ms:
            code = ErrorCode.INVALID_TXN_STATE
        abortable = code is ErrorCode.INVALID_TXN_STATE and call.api_version >= ABORTABLE_SINCE
        return ErrorCode.TRANSACTION_ABORTABLE if abortable else _OF_OFFSETS.get(code, code)

    if (refused := verified()) is not ErrorCode.NONE:
        return _offsets_refused(request, refused)
    if partition.table.known(request.producer_id) is None:
        newcomers = Newcomers(now_ms=broker.replicas.time.now_ms(), has_room=broker.replicas.producers.has_room)
        full = refuse_newcomer(partition.table, request.producer_id, newcomers)
        if full is not None:
            return _offsets_refused(request, full.code, full.message or "")
    caller = caller_of(broker, call, request.member_id or "-")

    def commit(part: TxnOffsetCommitRequest) -> TxnOffsetCommitResponse | Awaitable[TxnOffsetCommitResponse]:
        """Commit a part: verified as it takes its place in line, before any marker that ends the transaction."""
        if (refused := verified()) is not ErrorCode.NONE:
            return _offsets_refused(part, refused)
        unheld = Unheld(broker, part, _offsets_refused)
        with contextlib.suppress(ApiError):  # What follows fails, too.
            broker.groups.shard_of(part.group_id).tell(
                lambda groups, now_ms: groups.name_ranges(part, now_ms),
                lambda groups: groups.weight_of_offsets(part.group_id),
            )
        ticket = broker.groups.ticket()
        return submit(
            broker,
            part.group_id,
            lambda groups, now_ms: groups.txn_offset_commit(unheld.rest, caller, ticket, now_ms),
            unheld.refused,
            weigh=lambda groups: groups.weight_of_txn_commit(part),
            whole=unheld.whole,
            look=unheld.look,
        )

    return in_ranges(broker, request, commit, _offsets_refused)


def _offsets_refused(request: TxnOffsetCommitRequest, code: ErrorCode, message: str = "") -> TxnOffsetCommitResponse:
    return TxnOffsetCommitResponse(
        topics=[
            TxnOffsetCommitResponseTopic(
                name=topic.name,
                partitions=[
                    TxnOffsetCommitResponsePartition(
                        partition_index=it.partition_index,
                        error_code=code,
                        error_message=message if ranges_of(it) else None,
                    )
                    for it in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


NO_EPOCH = -1

_OF_OFFSETS = {
    ErrorCode.PRODUCER_FENCED: ErrorCode.INVALID_PRODUCER_EPOCH,
    ErrorCode.CONCURRENT_TRANSACTIONS: ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
}
"""The substitutes, in TxnOffsetCommit, for errors that its clients expect only from other requests."""


async def handle_write_txn_markers(
    broker: BrokerContext, request: WriteTxnMarkersRequest, call: RequestContext
) -> Large:
    """End transactions in partitions, for operators: their coordinators may have lost them.

    A marker of an epoch that no coordinator has reached is refused: it would fence the coordinator for good. The same
    is true of an epoch that its producer has not, and where it has no open transaction, there is nothing to end.
    """
    if request.markers:
        broker.markers.note_client(call.peer, len(request.markers))
    newest = max((shard.partition.leader_epoch for shard in broker.transactions), default=NO_EPOCH)
    results: list[tuple[WritableTxnMarker, list[WritableTxnMarkerResult] | None]] = []
    for place, marker in enumerate(request.markers, 1):
        written = await _write_marker(broker, marker) if marker.coordinator_epoch <= newest else None
        results.append((marker, written))
        if place % PARTITIONS_AT_A_TIME == 0:
            await asyncio.sleep(0)
    return Large(
        lambda: WriteTxnMarkersResponse(
            markers=[_refused_marker(it) if parts is None else _joined(it, parts) for it, parts in results]
        )
    )


async def _write_marker(broker: BrokerContext, marker: WritableTxnMarker) -> list[WritableTxnMarkerResult]:
    """Write one marker into its partitions, some at a time; the results of each part."""
    written: list[WritableTxnMarkerResult] = []
    for _, topics in split(marker.topics, "partition_indexes"):
        part = copy(marker)
        part.topics = topics
        one = WriteTxnMarkersRequest(markers=[part])
        written += (await broker.markers.write_markers(one, by_client=True)).markers
        await asyncio.sleep(0)
    return written


def _joined(marker: WritableTxnMarker, parts: list[WritableTxnMarkerResult]) -> WritableTxnMarkerResult:
    """Join the results of the parts of one marker: each topic once."""
    found: dict[str, list[WritableTxnMarkerPartitionResult]] = {}
    for part in parts:
        for topic in part.topics:
            found.setdefault(topic.name, []).extend(topic.partitions)
    topics = [WritableTxnMarkerTopicResult(name=name, partitions=results) for name, results in found.items()]
    return WritableTxnMarkerResult(producer_id=marker.producer_id, topics=topics)


def _refused_marker(marker: WritableTxnMarker) -> WritableTxnMarkerResult:
    return WritableTxnMarkerResult(
        producer_id=marker.producer_id,
        topics=[
            WritableTxnMarkerTopicResult(
                name=topic.name,
                partitions=[
                    WritableTxnMarkerPartitionResult(partition_index=number, error_code=ErrorCode.INVALID_REQUEST)
                    for number in topic.partition_indexes
                ],
            )
            for topic in marker.topics
        ],
    )


async def handle_describe_transactions(
    broker: BrokerContext, request: DescribeTransactionsRequest, call: RequestContext
) -> DescribeTransactionsResponse | Large:
    """Describe transactions: their states, producers and partitions."""
    from anabranch.machines.transactions.coordinator import described

    found: list[tuple[str, ErrorCode, Transaction | None]] = []
    count = 0
    for name in dict.fromkeys(request.transactional_ids):
        error, known = await _transaction(broker, name)
        found.append((name, error, known))
        count += 1 + (0 if known is None else len(known.partitions))

    def make() -> DescribeTransactionsResponse:
        return DescribeTransactionsResponse(
            transaction_states=[
                Described(error_code=error, transactional_id=name) if error else described(name, known)
                for name, error, known in found
            ]
        )

    return large_or_not(make, count)


async def _transaction(broker: BrokerContext, name: str) -> tuple[ErrorCode, Transaction | None]:
    try:
        found = broker.transactions.shard_of(name).read(lambda it, now_ms: it.transaction(name))
        return ErrorCode.NONE, await found if isinstance(found, asyncio.Future) else found
    except ApiError as error:
        return error.code, None


async def handle_list_transactions(
    broker: BrokerContext, request: ListTransactionsRequest, call: RequestContext
) -> ListTransactionsResponse | Large:
    """List transactions; every filter that is given must let one pass."""
    from anabranch.machines.transactions.states import TransactionState

    titles = {state.title: state for state in TransactionState}
    unknown = [name for name in request.state_filters if name not in titles]
    states = {titles[name] for name in request.state_filters if name in titles}
    matches = _pattern(request.transactional_id_pattern or "")
    if matches is None:
        return ListTransactionsResponse(error_code=ErrorCode.INVALID_REGULAR_EXPRESSION)
    wanted = TransactionFilter(
        states if request.state_filters else None,
        frozenset(request.producer_id_filters),
        request.duration_filter,
        matches,
    )
    try:
        listed_of = broker.transactions.listed(wanted)
        found = await gather_in_steps(listed_of, lambda each: 1 + len(each[0]) // LENGTH_AT_ONCE)
    except ApiError as error:
        return ListTransactionsResponse(error_code=error.code)
    listed = (
        Listed(transactional_id=name, producer_id=known.producer_id, transaction_state=known.state.title)
        for name, known in found
        if known is not None
    )
    return Large(lambda: ListTransactionsResponse(unknown_state_filters=unknown, transaction_states=list(listed)))


def _pattern(pattern: str) -> Callable[[str], bool] | None:
    """Return the test whether a name matches, which is true for every name if empty; None if the pattern is invalid."""
    if not pattern:
        return lambda name: True
    try:
        return compile_client_pattern(pattern)
    except ApiError:
        return None


async def handle_describe_producers(
    broker: BrokerContext, request: DescribeProducersRequest, call: RequestContext
) -> DescribeProducersResponse | Large:
    """Describe the producers that partitions remember, and their open transactions."""
    response = DescribeProducersResponse(
        topics=[
            TopicResponse(
                name=topic.name,
                partitions=[await _producers(broker, topic.name, number) for number in topic.partition_indexes],
            )
            for topic in request.topics
        ]
    )
    return Large(lambda: response)


async def _producers(broker: BrokerContext, topic: str, number: int) -> PartitionResponse:
    partition = broker.replicas.get(topic, number)
    error = broker.replicas.missing(topic, number) if partition is None else partition.unavailable()
    if partition is None or error is not ErrorCode.NONE:
        return PartitionResponse(partition_index=number, error_code=error)
    return PartitionResponse(
        partition_index=number,
        active_producers=await gather_in_steps(
            ProducerState(
                producer_id=producer_id,
                producer_epoch=known.epoch,
                last_sequence=known.last_sequence,
                last_timestamp=known.batches[-1].timestamp if known.batches else -1,
                coordinator_epoch=known.coordinator_epoch,
                current_txn_start_offset=-1 if known.transaction_start is None else known.transaction_start,
            )
            for producer_id, known in list(partition.table)
        ),
    )


def _decide(
    broker: BrokerContext,
    transactional_id: str,
    decide: Callable[[Coordinator, int], Outcome[Response, TransactionRecord]],
    failed: Callable[[ErrorCode], Response],
) -> Response | Awaitable[Response]:
    """Submit to the shard of a transactional id, now; `failed` makes the answer where it cannot decide."""
    try:
        answer: Any = broker.transactions.shard_of(transactional_id).ask(decide)
    except ApiError as error:
        return failed(error.code)
    if isinstance(answer, asyncio.Future):
        return _answered(answer, failed)
    decided: Response = answer
    return decided


async def _answered(answer: asyncio.Future[Response], failed: Callable[[ErrorCode], Response]) -> Response:
    try:
        return await answer
    except ApiError as error:
        return failed(error.code)
