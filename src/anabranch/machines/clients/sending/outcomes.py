"""From the broker's results to outcomes: delivered, to be sent again, uncertain, or failed.

A batch that is certainly not in the log returns its sequence number. One that may be in the log keeps its number, and
if such a batch fails, the producer needs a new epoch before it sends anything else.
"""

from __future__ import annotations

from bisect import insort

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_SEQUENCE
from anabranch.machines.clients.sending.state import SEQUENCES, Partition, SendingState, Topic
from anabranch.machines.clients.sending.values import Batch, BatchState, Delivered, Failed, ProduceResult, order_of

DEFINITE = frozenset(
    {
        ErrorCode.MESSAGE_TOO_LARGE,
        ErrorCode.RECORD_LIST_TOO_LARGE,
        ErrorCode.INVALID_RECORD,
        ErrorCode.INVALID_TIMESTAMP,
        ErrorCode.INVALID_TOPIC_EXCEPTION,
        ErrorCode.INVALID_REQUIRED_ACKS,
        ErrorCode.INVALID_REQUEST,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.POLICY_VIOLATION,
    }
)
"""Errors that precede the append: the batch fails, and its sequence number can be used again."""
STALE_LEADER = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.KAFKA_STORAGE_ERROR,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.REPLICA_NOT_AVAILABLE,
    }
)
FENCED = frozenset({ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.PRODUCER_FENCED})


def take_request(state: SendingState, request_id: int) -> tuple[Batch, ...]:
    """Remove a request from those on the wire and return its batches; none if the request is unknown."""
    request = state.requests.pop(request_id, None)
    if request is None:
        return ()
    state.load[request.node] -= 1
    return request.batches


def judge(state: SendingState, batch: Batch, result: ProduceResult, now_ms: int) -> None:
    """Apply a broker's result to a batch."""
    topic, partition = state.owner(batch)
    code = result.error
    if code in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
        _deliver(state, batch, partition, result)
    elif code is ErrorCode.INVALID_PARTITION_METADATA:
        take_back(batch, partition)
        topic.moving = topic.needs_metadata = topic.refused = True
    elif code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and state.settings.enable_idempotence:
        _judge_gap(state, batch, partition, result, now_ms)
    elif code in FENCED:
        stop(state, _refusal(batch, result, "another producer has taken this producer's id; make a new producer"))
    elif code is ErrorCode.UNKNOWN_PRODUCER_ID and not batch.maybe_appended and not state.settings.transactional:
        take_back(batch, partition)
        state.new_epoch_needed = True
    elif code is ErrorCode.UNKNOWN_TOPIC_ID and not batch.maybe_appended:
        take_back(batch, partition)
        topic.moving = topic.needs_metadata = True
    elif code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and not batch.maybe_appended and topic.elastic:
        take_back(batch, partition)
        state.back_off(partition, now_ms)
        topic.needs_metadata = True
    elif code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and batch.partition in topic.removed:
        reason = "the partition was removed before it was known whether they were appended: look for them, or resend"
        _give_up(state, batch, partition, _refusal(batch, result, reason))
    elif code in DEFINITE or not code.retriable:
        _give_up(state, batch, partition, _refusal(batch, result))
    else:
        mark_uncertain(state, batch, now_ms)
        if code in STALE_LEADER:
            topic.needs_metadata = True


def _deliver(state: SendingState, batch: Batch, partition: Partition, result: ProduceResult) -> None:
    partition.sent.remove(batch)
    partition.failures = 0
    if batch.sequence != NO_SEQUENCE and batch.order > partition.acked_order:
        partition.acked_order = batch.order
        partition.acked_sequence = (batch.sequence + batch.rows.record_count - 1) % SEQUENCES
    state.buffered_size -= batch.size
    state.outcomes.append(Delivered(batch, result.base_offset, result.log_append_time_ms))


def _judge_gap(state: SendingState, batch: Batch, partition: Partition, result: ProduceResult, now_ms: int) -> None:
    """Handle a sequence gap: ours if an earlier batch is open or was rejected; otherwise the log lost records."""
    if partition.rolling_back:
        take_back(batch, partition)
    elif any(other.order < batch.order for other in (*partition.sent, *partition.uncertain)):
        mark_uncertain(state, batch, now_ms)
    else:
        reason = "the partition's log lacks records that it acknowledged to this producer before"
        state.new_epoch_needed = True
        _give_up(state, batch, partition, _refusal(batch, result, reason))


def take_back(batch: Batch, partition: Partition) -> None:
    """Make a batch fresh again that is certainly not in the log; its sequence number and later ones are reused."""
    (partition.sent if batch.state is BatchState.SENT else partition.uncertain).remove(batch)
    batch.state, batch.sequence, batch.maybe_appended = BatchState.FRESH, NO_SEQUENCE, False
    partition.rolling_back = True
    place = next((i for i, other in enumerate(partition.fresh) if other.order > batch.order), len(partition.fresh))
    partition.fresh.insert(place, batch)


def mark_uncertain(state: SendingState, batch: Batch, now_ms: int) -> None:
    """Mark a batch that may be in the log: send it again to the same partition with the same sequence number."""
    _, partition = state.owner(batch)
    partition.sent.remove(batch)
    batch.state, batch.maybe_appended = BatchState.UNCERTAIN, True
    insort(partition.uncertain, batch, key=order_of)
    state.back_off(partition, now_ms)


def _give_up(state: SendingState, batch: Batch, partition: Partition, error: ApiError) -> None:
    """Fail the batch. If it may be in the log, its sequence number must not be used again."""
    (partition.sent if batch.state is BatchState.SENT else partition.uncertain).remove(batch)
    partition.rolling_back = True
    if batch.maybe_appended and state.settings.enable_idempotence:
        state.new_epoch_needed = True
    _fail(state, batch, error)


def _fail(state: SendingState, batch: Batch, error: ApiError) -> None:
    state.buffered_size -= batch.size
    state.outcomes.append(Failed(batch.rows, error))


def fail_unsent(state: SendingState, topic: Topic, error: ApiError) -> int:
    """Fail every record of the topic that is not in any log; return their number."""
    failed = 0
    chunks = [*(encoding.chunk for encoding in topic.encoding), *topic.backlog]
    topic.encoding.clear()
    topic.backlog.clear()
    topic.open = None
    for chunk in chunks:
        state.buffered_size -= chunk.size
        failed += chunk.rows.record_count
        state.outcomes.append(Failed(chunk.rows, error))
    for partition in topic.partitions.values():
        for batch in partition.fresh:
            failed += batch.rows.record_count
            _fail(state, batch, error)
        partition.fresh.clear()
    return failed


def fail_all(state: SendingState, error: ApiError) -> int:
    """Fail every record without an outcome; return their number."""
    failed = 0
    for topic in state.topics.values():
        failed += fail_unsent(state, topic, error)
        for partition in topic.partitions.values():
            for batch in (*partition.uncertain, *partition.sent):
                _fail(state, batch, error)
                failed += batch.rows.record_count
            if partition.unresolved:
                state.new_epoch_needed = state.settings.enable_idempotence
            partition.uncertain.clear()
            partition.sent.clear()
    state.requests.clear()
    state.load.clear()
    return failed


def stop(state: SendingState, error: ApiError) -> None:
    """Stop sending for good, because of `error`."""
    state.fatal = error
    fail_all(state, error)


def expire(state: SendingState, topic: Topic, now_ms: int) -> None:
    """Fail records older than `delivery.timeout.ms`; a batch on the wire first gets its response or is lost."""
    settings = state.settings
    unknown = max(0, settings.delivery_timeout_ms - settings.max_block_ms) if topic.placement is None else 0
    while topic.backlog and topic.backlog[0].deadline_ms - unknown <= now_ms:
        chunk = topic.backlog.popleft()
        if chunk is topic.open:
            topic.open = None
        state.buffered_size -= chunk.size
        why = f" ({topic.last_error})" if topic.last_error is not None else ""
        timeout_ms = settings.delivery_timeout_ms - unknown
        state.outcomes.append(Failed(chunk.rows, _expired(topic.name, timeout_ms, "", why)))
    if topic.backlog:
        state.wake(topic.backlog[0].deadline_ms - unknown)
    for partition in topic.partitions.values():
        name = f"{topic.name}-{partition.number}"
        while partition.uncertain and partition.uncertain[0].deadline_ms <= now_ms:
            doubt = " They may or may not be in the log."
            error = _expired(name, settings.delivery_timeout_ms, doubt, "")
            _give_up(state, partition.uncertain[0], partition, error)
        while partition.fresh and partition.fresh[0].deadline_ms <= now_ms:
            _fail(state, partition.fresh.popleft(), _expired(name, settings.delivery_timeout_ms, "", ""))
        for first in (*partition.uncertain[:1], *([partition.fresh[0]] if partition.fresh else ())):
            state.wake(first.deadline_ms)


def _refusal(batch: Batch, result: ProduceResult, reason: str = "") -> ApiError:
    details = "; ".join(part for part in (result.message, reason) if part)
    text = f"{batch.rows.record_count} records for {batch.topic}-{batch.partition} were refused"
    return ApiError(result.error, f"{text}: {details}" if details else text)


def _expired(target: str, timeout_ms: int, doubt: str, why: str) -> ApiError:
    text = f"records for {target} could not be delivered within {timeout_ms} ms{why}."
    hint = " Check that the brokers run and that the topic exists, or allow more time."
    return ApiError(ErrorCode.REQUEST_TIMED_OUT, text + doubt + hint)
