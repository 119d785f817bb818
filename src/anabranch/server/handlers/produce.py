"""Produce (API 0): translates; `server.partitions.appending` appends. Since v13 a request gives topics by id (KIP-516).

Everything up to the append happens before the handler returns; only durability is awaited. Where the check of the
batches takes longer than the event loop can wait, a thread does it first, and another one writes a batch that is too
large for the loop; where there are many partitions, they are appended to in steps. The connection waits meanwhile
(`Apart`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import INTERNAL_TOPICS, NO_TOPIC_ID, TopicPartition
from anabranch.machines.partition.appending import UNKNOWN_TOPIC
from anabranch.machines.partition.checking import BATCHES_PER_PARTITION_MAX, TooLongError
from anabranch.protocol.messages.produce import (
    BatchIndexAndErrorMessage,
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from anabranch.runtime.syncs import Told
from anabranch.runtime.turns import turn_end
from anabranch.server.context import Apart, BrokerContext, CloseConnectionError, Large, RequestContext
from anabranch.server.handlers.in_parts import Parts
from anabranch.server.partitions.appending import (
    Appender,
    Produced,
    TransactionCheck,
    UnstagedError,
    no_transaction,
)
from anabranch.server.partitions.checks import Checked, Copies, Unchecked
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.removed import RemovedPartition

NO_ACKS, LEADER_ACK, ALL_ACKS = 0, 1, -1
ACKS = (NO_ACKS, LEADER_ACK, ALL_ACKS)
TOPIC_IDS_SINCE = 13
ABORTABLE_SINCE = 11
"""The first version of Produce with the error TRANSACTION_ABORTABLE."""


AT_A_TIME = 4
"""Partitions of a request that are checked together, and appended to together where that is little work."""
AT_ONCE = 30
"""Partitions of a request that is not taken apart, if that is little work."""
OPENED_AT_ONCE = 1
"""Partitions that open their files, or make them: three, of which the kernel takes up to a millisecond for each."""
BATCHES_AT_ONCE = BATCHES_PER_PARTITION_MAX
"""Batches that are appended together: 2 ms, and on a slow machine twice as long."""
BYTES_AT_ONCE = 2 << 20
"""Bytes that are appended together: 1 ms, and on a slow machine 5 ms."""
PARTS = Parts("topic_data", "responses", "partition_data", "partition_responses")
Answer = ProduceResponse | Awaitable[ProduceResponse] | None


def handle_produce(broker: BrokerContext, request: ProduceRequest, call: RequestContext) -> Answer | Apart:
    """Append every partition's batches in order; None where the client wants no answer (acks=0)."""
    topics = request.topic_data
    try:
        if len(topics) == 1 and len(topics[0].partition_data) == 1:  # Checked on the way to being appended.
            checked: Mapping[int, Checked] | None = None
        elif _is_long(broker, topics, call):
            return Apart(lambda copy: _append_in_steps(broker, copy, call))
        else:
            sent = _sent(broker, request, call)
            checked = _by_data(sent, broker.checks.all_now(sent.values(), _latest_ms(broker)))
            if _is_much(checked):
                return Apart(lambda copy: _append_in_steps(broker, copy, call))
        response, unsynced = _append_all(broker, request, call, checked)
    except TooLongError:  # Nothing has been appended.
        return Apart(lambda copy: _append_in_steps(broker, copy, call))
    return _answer(request, response, [] if unsynced is None else [unsynced])


def _is_long(broker: BrokerContext, topics: Sequence[TopicProduceData], call: RequestContext) -> bool:
    """Whether a request is appended in steps."""
    named = len(topics) + sum(len(topic.partition_data) for topic in topics)
    return named > AT_ONCE or _opens_many(broker, topics, call)


def _opens_many(broker: BrokerContext, topics: Sequence[TopicProduceData], call: RequestContext) -> bool:
    """Whether more partitions have to open their files than are appended to together."""
    opened, now_ms = 0, broker.replicas.time.now_ms()
    for topic in topics:
        name = _name_of(broker, topic, call) or ""
        opened += sum(_opens_file(broker.replicas.get(name, data.index), data, now_ms) for data in topic.partition_data)
    return opened > OPENED_AT_ONCE


def _opens_file(partition: Partition | None, data: PartitionProduceData, now_ms: int) -> bool:
    """Whether a file may have to be opened, or made: that of another partition where this one takes no records."""
    if partition is None or partition.leadership is None or partition.leadership.retiring:
        return True
    size = 0 if data.records is None else len(data.records)
    return partition.offline_reason is None and partition.log.opens_file(size, now_ms)


async def _append_in_steps(
    broker: BrokerContext, request: ProduceRequest, call: RequestContext
) -> Answer | Awaitable[Large]:
    """As `handle_produce`, for so many partitions, or records, that other work must have its turn meanwhile."""
    whole = ProduceResponse(responses=[])
    unsynced: list[_Unsynced] = []
    parts, now, over = 0, asyncio.get_running_loop().time, turn_end()
    for continued, part in PARTS.split(request, AT_A_TIME):
        checked: dict[int, Checked] = {}
        with broker.checks.copies() as copies:
            await _check(broker, part, call, checked, copies)
            for place, (again, few) in enumerate(_appended_at_once(broker, part, call, checked)):
                await _check(broker, few, call, checked, copies)
                response, waits = await _append_staged(broker, few, call, checked)
                PARTS.join(whole, response, continued=again if place else continued)
                if waits is not None:
                    unsynced.append(waits)
                parts += 1
                if now() >= over:
                    await asyncio.sleep(0)
                    over = turn_end()
            checked.clear()
    answer = _answer(request, whole, unsynced)
    return answer if parts == 1 or answer is None else _large(answer)


async def _append_staged(
    broker: BrokerContext, few: ProduceRequest, call: RequestContext, checked: Mapping[int, Checked]
) -> tuple[ProduceResponse, _Unsynced | None]:
    """As `_append_all`; a batch that is too large for the loop is written beside it before. Such a one comes alone."""
    unstaged: UnstagedError | None = None
    while True:
        async with nullcontext() if unstaged is None else _staged(unstaged):
            try:
                return _append_all(broker, few, call, checked)
            except UnstagedError as found:  # Again where a resize has come between.
                assert [len(topic.partition_data) for topic in few.topic_data] == [1], "nothing has been appended"
                unstaged = found.with_traceback(None)  # Its frames would keep the batch longer than the request.


def _staged(unstaged: UnstagedError) -> AbstractAsyncContextManager[None]:
    log = unstaged.partition.log
    return log.staging.hold(unstaged.batch, log.epochs)


async def _check(
    broker: BrokerContext, request: ProduceRequest, call: RequestContext, checked: dict[int, Checked], copies: Copies
) -> None:
    """Check what was sent and is not in `checked` yet; then what was for partitions that have come meanwhile."""
    while sent := {key: each for key, each in _sent(broker, request, call).items() if key not in checked}:
        now_ms = _latest_ms(broker)
        try:
            outcomes = broker.checks.all_now(sent.values(), now_ms)
        except TooLongError:
            await asyncio.sleep(0)  # Others have their turn before it is begun again.
            outcomes = await broker.checks.beside(sent.values(), now_ms, copies)
        checked |= _by_data(sent, outcomes)


def _appended_at_once(
    broker: BrokerContext, part: ProduceRequest, call: RequestContext, checked: Mapping[int, Checked]
) -> Iterable[tuple[bool, ProduceRequest]]:
    """Cut a part of a request into what is appended together, as `Parts.split`."""
    if _is_much(checked) or _opens_many(broker, part.topic_data, call):
        return PARTS.split(part, 1)
    return ((False, part),)


def _is_much(checked: Mapping[int, Checked]) -> bool:
    """Whether the batches that were found sound are more than are appended together."""
    sound = [batches for batches in checked.values() if isinstance(batches, list)]
    if sum(map(len, sound)) > BATCHES_AT_ONCE:
        return True
    return sum(len(batch.data) for batches in sound for batch in batches) > BYTES_AT_ONCE


def _answer(request: ProduceRequest, response: ProduceResponse, unsynced: Sequence[_Unsynced]) -> Answer:
    """Answer when everything that is acknowledged is durable."""
    if request.acks == NO_ACKS:
        if any(answer.error_code for topic in response.responses for answer in topic.partition_responses):
            raise CloseConnectionError("a produce without acks went wrong")
        return None
    return _when_synced(response, unsynced) if unsynced else response


async def _when_synced(response: ProduceResponse, unsynced: Sequence[_Unsynced]) -> ProduceResponse:
    for each in unsynced:
        await each.synced
    return response


async def _large(answer: ProduceResponse | Awaitable[ProduceResponse]) -> Large:
    response = answer if isinstance(answer, ProduceResponse) else await answer
    return Large(lambda: response)


def _sent(broker: BrokerContext, request: ProduceRequest, call: RequestContext) -> dict[int, Unchecked]:
    """Find the records that may be appended once they are checked, by the identity of the data."""
    found: dict[int, Unchecked] = {}
    if request.acks not in ACKS:
        return found
    replicas = broker.replicas
    for topic in request.topic_data:
        name = _name_of(broker, topic, call)
        if name is None or name in INTERNAL_TOPICS:
            continue
        for data in topic.partition_data:
            partition: Partition | RemovedPartition | None = replicas.get(name, data.index)
            if partition is None and broker.view.has_removed(name, data.index):
                partition = replicas.removed_partition(TopicPartition(name, data.index))
            if partition is not None and data.records is not None and len(data.records):
                found[id(data)] = Unchecked(_view(data), partition.settings)
    return found


def _latest_ms(broker: BrokerContext) -> int:
    """The time by which timestamps lie in the future: a clock that was set back makes no record one of the future."""
    return max(broker.clock.now_ms(), broker.replicas.time.now_ms())


def _by_data(sent: Iterable[int], checked: list[Checked]) -> Mapping[int, Checked]:
    return dict(zip(sent, checked, strict=True))


def _append_all(
    broker: BrokerContext, request: ProduceRequest, call: RequestContext, checked: Mapping[int, Checked] | None
) -> tuple[ProduceResponse, _Unsynced | None]:
    """Append every partition's batches; give the answer, and the syncs that it waits for.

    `checked`: the outcomes of checks, by the identity of the data. With None they are made here: TooLongError where
    that takes longer than the loop can wait.
    """
    replicas = broker.replicas
    unsynced: _Unsynced | None = None
    topics: list[TopicProduceResponse] = []
    refusal = ErrorCode.NONE if request.acks in ACKS else ErrorCode.INVALID_REQUIRED_ACKS
    check_transaction = _transaction_check(broker, request.transactional_id, call.api_version)
    now_ms = broker.clock.now_ms()
    appender = Appender(replicas, now_ms, check_transaction, broker.checks.now, broker.producer_ids.given_below)
    by_id = call.api_version >= TOPIC_IDS_SINCE
    for topic in request.topic_data:
        name = _name_of(broker, topic, call) if by_id else topic.name
        answers: list[PartitionProduceResponse] = []
        for data in topic.partition_data:
            if refusal is not ErrorCode.NONE:
                answers.append(PartitionProduceResponse(index=data.index, error_code=refusal, base_offset=-1))
                continue
            number, records = data.index, data.records
            partition = None if name is None else replicas.get(name, number)
            if name is None:
                produced = Produced(UNKNOWN_TOPIC.code, message=UNKNOWN_TOPIC.message)
            elif name in INTERNAL_TOPICS:
                produced = Produced(ErrorCode.INVALID_TOPIC_EXCEPTION, message="Only the broker writes to this topic.")
            elif partition is None and not broker.view.has_removed(name, number):
                produced = Produced(replicas.missing(name, number))
            elif partition is not None and partition.offline_reason is not None:
                produced = Produced(ErrorCode.KAFKA_STORAGE_ERROR, message=partition.offline_reason)
            elif records is None or not len(records):
                produced = Produced(ErrorCode.INVALID_RECORD, message="There are no records.")
            else:
                assert isinstance(records, memoryview)
                addressed = partition or replicas.removed_partition(TopicPartition(name, number))
                outcome = None if checked is None else checked[id(data)]
                produced = appender.produce(
                    addressed, records, topic.undeleted_partition_count, outcome, topic.topic_id
                )
            answer = PartitionProduceResponse(
                index=number,
                error_code=produced.error,
                base_offset=produced.base_offset,
                log_append_time_ms=produced.log_append_time_ms,
                log_start_offset=-1 if partition is None else partition.log.log_start,
                error_message=produced.message,
                record_errors=[
                    BatchIndexAndErrorMessage(batch_index=place, batch_index_error_message=reason)
                    for place, reason in produced.refused_records
                ]
                if produced.refused_records
                else [],
            )
            answers.append(answer)
            for appended_to in produced.unsynced:
                if request.acks != NO_ACKS:  # Acknowledged is visible, and visible is what no crash takes back.
                    unsynced = unsynced or _Unsynced()
                    replicas.commit_then(appended_to, unsynced.wait_for(answer))
                else:
                    replicas.commit(appended_to)
            if (
                partition is not None
                and produced.error is ErrorCode.NONE
                and partition.log.flush_due
                and not produced.unsynced
            ):
                replicas.commit(partition)  # A segment was finished, and no request waits for it.
        topics.append(TopicProduceResponse(name=topic.name, topic_id=topic.topic_id, partition_responses=answers))
    return ProduceResponse(responses=topics), unsynced


def _name_of(broker: BrokerContext, topic: TopicProduceData, call: RequestContext) -> str | None:
    """Return the name of a topic; None if it is given by an id that no topic has, or of one that is being deleted."""
    if call.api_version < TOPIC_IDS_SINCE:
        return topic.name
    name = None if topic.topic_id == NO_TOPIC_ID else broker.view.name_of(topic.topic_id)
    return None if name is None or broker.view.topic(name) is None else name


def _transaction_check(broker: BrokerContext, transactional_id: str | None, version: int) -> TransactionCheck:
    """Make the check of the request's transaction: it asks the coordinator, and words a refusal for the producer."""
    if transactional_id is None:
        return no_transaction
    named = transactional_id
    unknown = ErrorCode.TRANSACTION_ABORTABLE if version >= ABORTABLE_SINCE else ErrorCode.INVALID_TXN_STATE

    def check(partition: TopicPartition, producer_id: int, producer_epoch: int) -> ErrorCode:
        error = broker.transactions.verify(named, partition, producer_id, producer_epoch)
        return {
            ErrorCode.INVALID_TXN_STATE: unknown,
            ErrorCode.PRODUCER_FENCED: ErrorCode.INVALID_PRODUCER_EPOCH,
            # A producer expects these from its coordinator only; for this code it repeats the batch.
            ErrorCode.CONCURRENT_TRANSACTIONS: ErrorCode.NOT_ENOUGH_REPLICAS,
            ErrorCode.COORDINATOR_LOAD_IN_PROGRESS: ErrorCode.NOT_ENOUGH_REPLICAS,
            ErrorCode.COORDINATOR_NOT_AVAILABLE: ErrorCode.NOT_ENOUGH_REPLICAS,
            ErrorCode.NOT_COORDINATOR: ErrorCode.NOT_ENOUGH_REPLICAS,
        }.get(error, error)

    return check


def _view(data: PartitionProduceData) -> memoryview:
    assert isinstance(data.records, memoryview)
    return data.records


class _Unsynced:
    """The syncs after which all records that a response acknowledges are durable."""

    __slots__ = ("_syncs", "synced")

    def __init__(self) -> None:
        self._syncs = 0
        """The syncs that are not over."""
        self.synced: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def wait_for(self, answer: PartitionProduceResponse) -> Told:
        """Wait for one more sync; give the function to be called when it is over, or has failed."""
        self._syncs += 1

        def on_synced(error: OSError | None) -> None:
            if error is not None:
                answer.error_code = ErrorCode.KAFKA_STORAGE_ERROR
                answer.base_offset = -1
                answer.error_message = f"The disk refuses: {error.strerror}."
            self._syncs -= 1
            if not self._syncs and not self.synced.done():
                self.synced.set_result(None)

        return on_synced
