"""What becomes of the records of one partition in a produce request (ordering.md, section 5).

The order, which is what keeps a key's records once and in order:

    1. the batch is what it says it is: whole, checksum, size, counts, timestamps
    2. appended before: answered with the offsets it was given then, whatever the partition count says
    3. the count that its sender used is not ours: INVALID_PARTITION_METADATA, nothing appended
    4. its sequence does not follow: refused
    5. it begins a transaction here that its coordinator does not know of: refused (KIP-890, part 1)
    6. append

Nothing here awaits, so that no resize comes between. A sender that says no count and reaches a retiring partition, or
one that is removed, is redirected to the partition that has its keys now, under a producer id that keeps its sequence
apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from anabranch.base.errors import DecodeError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, TopicPartition
from anabranch.base.limits import ABORTED_TRANSACTIONS_MAX, DECOMPRESSION_RATIO_MAX, PRODUCER_ID_BITS
from anabranch.machines.controller.leadership import Leadership, refuse_produce
from anabranch.machines.partition.producers import (
    Accept,
    Duplicate,
    ProducerTable,
    Refuse,
    check_redirected,
    redirected,
)
from anabranch.machines.placement import ancestor
from anabranch.records.batch import (
    BatchHeader,
    ChecksumError,
    UnsupportedCompressionError,
    UnsupportedFormatError,
    check,
    headers,
    parse_header,
    recompress,
    stamp_log_append_time,
    with_producer,
)
from anabranch.runtime.events import EventLogger
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.partitions.topic_settings import TopicSettings

events = EventLogger("produce")
BATCHES_PER_PARTITION_MAX = 1_000


class Produced(NamedTuple):
    """The answer for one partition."""

    error: ErrorCode
    base_offset: int = -1
    log_append_time_ms: int = -1
    message: str | None = None
    awaits: Partition | None = None
    """The partition whose log holds the records and has not synced them yet."""
    unverified: bool = False
    """Whether it was refused only because the coordinator of its transaction cannot tell now."""


class _RefusalError(Exception):
    """A batch that is refused for what it is."""

    def __init__(self, error: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.error = error


Verify = Callable[[TopicPartition, int, int], ErrorCode]
"""Whether a partition is part of the transaction of a producer (id, epoch): why not, or NONE."""


def no_transaction(partition: TopicPartition, producer_id: int, producer_epoch: int) -> ErrorCode:
    """The `Verify` of a request that names no transactional id."""
    return ErrorCode.INVALID_TXN_STATE


def produce(
    replicas: Replicas,
    partition: Partition,
    data: memoryview,
    count_said: int,
    now_ms: int,
    verify: Verify = no_transaction,
) -> Produced:
    """Append the batches in `data` to `partition`, or to the one that its keys live in now."""
    try:
        batches = _checked(data, partition.settings, now_ms)
    except _RefusalError as refusal:
        return Produced(refusal.error, message=str(refusal))
    first: Produced | None = None
    for position, header in batches:
        produced = _produce_one(
            replicas, partition, data[position : position + header.size], header, count_said, now_ms, verify
        )
        if produced.error is not ErrorCode.NONE:
            return produced
        first = first or produced
    assert first is not None
    return first


def produce_removed(
    replicas: Replicas,
    name: TopicPartition,
    data: memoryview,
    count_said: int,
    now_ms: int,
    verify: Verify = no_transaction,
) -> Produced:
    """As `produce`, to a partition that has retired and is removed.

    Its sender may not have heard of it yet. One that says a count is told so, unless the batch was appended while the
    partition was there; one that says none may keep for the partition what was once meant for it, and is redirected.
    """
    first = replicas.get(name.topic, 0)
    role = None if first is None else first.leadership
    if first is None or role is None:
        return Produced(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    table = replicas.producers_of_removed(name, role.topic_id)
    if table is None:
        return Produced(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    if count_said != COUNT_NOT_SAID:
        return _answer_removed(table, data, first.settings, role, now_ms)
    ancestors = replicas.ancestors_of(name.topic, name.partition, role.initial_partition_count)
    number = ancestor(name.partition, role.undeleted_partition_count, role.initial_partition_count)
    survivor = next((other for other in ancestors if other.name.partition == number), None)
    if survivor is None or not _serves(survivor, role):
        return Produced(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    try:
        batches = _checked(data, survivor.settings, now_ms)
        for other in ancestors:
            other.log.settle(now_ms)
    except _RefusalError as refusal:
        return Produced(refusal.error, message=str(refusal))
    except OSError as failure:
        survivor.storage_failed(failure)
        return Produced(ErrorCode.KAFKA_STORAGE_ERROR, message=f"The disk refuses: {failure.strerror}.")
    produced: list[Produced] = []
    for position, header in batches:
        batch = data[position : position + header.size]
        verdict = check_redirected(header, name.partition, table, [other.table for other in ancestors])
        if isinstance(verdict, Duplicate):
            produced.append(_again(_holder(survivor, name.partition, ancestors, header), verdict))
            continue
        if isinstance(verdict, Refuse):
            return Produced(verdict.error, message="The batch does not follow the last one of its producer.")
        produced.append(_redirect(name, survivor, batch, header, now_ms, verify))
        if produced[-1].error is not ErrorCode.NONE:
            return produced[-1]
    return produced[0]


def _answer_removed(
    table: ProducerTable, data: memoryview, settings: TopicSettings, role: Leadership, now_ms: int
) -> Produced:
    """Tell a sender whose count is not the topic's what its partition, which is removed, knew of its batches."""
    try:
        batches = _checked(data, settings, now_ms)
    except _RefusalError as refusal:
        return Produced(refusal.error, message=str(refusal))
    first: Produced | None = None
    for _, header in batches:
        duplicate = table.duplicate(header)
        if duplicate is None:
            if isinstance(table.check(header), Accept):
                table.refused(header)
            return Produced(
                ErrorCode.INVALID_PARTITION_METADATA,
                message=f"The topic has {role.undeleted_partition_count} partitions.",
            )
        append_time = duplicate.timestamp if settings.log_append_time else -1
        first = first or Produced(ErrorCode.NONE, duplicate.base_offset, append_time)
    assert first is not None
    return first


def _redirect(
    name: TopicPartition, survivor: Partition, data: memoryview, sent: BatchHeader, now_ms: int, verify: Verify
) -> Produced:
    """Append a batch for partition `name` to the one that has its keys now; its sequence has been checked."""
    header = sent
    if sent.producer_id >= 0:
        rewritten = with_producer(
            data,
            redirected(sent.producer_id, name.partition),
            sent.producer_epoch,
            sent.base_sequence,
            transactional=sent.is_transactional,
        )
        data, header = memoryview(rewritten), parse_header(rewritten)
    return _append_verified(name, survivor, data, sent, header, now_ms, verify)


def _checked(data: memoryview, settings: TopicSettings, now_ms: int) -> list[tuple[int, BatchHeader]]:
    """Step 1: every batch is sound, and they fill the data."""
    batches: list[tuple[int, BatchHeader]] = []
    position = 0
    try:
        for position, header in headers(data):
            _check_batch(data, position, header, settings, now_ms)
            batches.append((position, header))
            position += header.size
            if len(batches) > BATCHES_PER_PARTITION_MAX:
                raise _RefusalError(ErrorCode.INVALID_RECORD, f"more than {BATCHES_PER_PARTITION_MAX} batches")
        if position != len(data) or not batches:
            parse_header(data, position)
            raise _RefusalError(ErrorCode.CORRUPT_MESSAGE, "a batch is cut off")
    except UnsupportedFormatError as error:
        raise _RefusalError(ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT, str(error)) from None
    except UnsupportedCompressionError as error:
        raise _RefusalError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, str(error)) from None
    except DecodeError as error:
        raise _RefusalError(ErrorCode.CORRUPT_MESSAGE, str(error)) from None
    return batches


def _check_batch(data: memoryview, position: int, header: BatchHeader, settings: TopicSettings, now_ms: int) -> None:
    if header.size > settings.message_size_max:
        raise _RefusalError(
            ErrorCode.MESSAGE_TOO_LARGE,
            f"The batch has {header.size} bytes, max.message.bytes allows {settings.message_size_max}.",
        )
    try:
        check(data, position, header)
    except ChecksumError as error:
        raise _RefusalError(ErrorCode.CORRUPT_MESSAGE, str(error)) from None
    if header.is_control:
        raise _RefusalError(ErrorCode.INVALID_RECORD, "Clients may not send control batches.")
    if header.record_count < 1 or header.last_offset_delta != header.record_count - 1:
        raise _RefusalError(
            ErrorCode.INVALID_RECORD,
            f"The batch has {header.record_count} records, and {header.last_offset_delta} as its last offset delta.",
        )
    if header.producer_id >= 0 and (header.base_sequence < 0 or header.producer_epoch < 0):
        raise _RefusalError(ErrorCode.INVALID_RECORD, "The batch has a producer id, but no sequence.")
    if header.producer_id >= 1 << PRODUCER_ID_BITS or header.producer_id < -1:
        raise _RefusalError(
            ErrorCode.INVALID_PRODUCER_ID_MAPPING, f"Nobody was given producer id {header.producer_id}."
        )
    if header.is_transactional and header.producer_id < 0:
        raise _RefusalError(ErrorCode.INVALID_RECORD, "The batch is transactional, but has no producer id.")
    if not settings.log_append_time:
        _check_timestamps(header, settings, now_ms)


def _check_timestamps(header: BatchHeader, settings: TopicSettings, now_ms: int) -> None:
    if header.max_timestamp - now_ms > settings.timestamp_after_max_ms:
        raise _RefusalError(
            ErrorCode.INVALID_TIMESTAMP,
            f"Timestamp {header.max_timestamp} is more than {settings.timestamp_after_max_ms} ms ahead of the broker's "
            f"clock, {now_ms}.",
        )
    if header.base_timestamp >= 0 and now_ms - header.base_timestamp > settings.timestamp_before_max_ms:
        raise _RefusalError(
            ErrorCode.INVALID_TIMESTAMP,
            f"Timestamp {header.base_timestamp} is more than {settings.timestamp_before_max_ms} ms behind the broker's "
            f"clock, {now_ms}.",
        )


def _produce_one(
    replicas: Replicas,
    partition: Partition,
    data: memoryview,
    header: BatchHeader,
    count_said: int,
    now_ms: int,
    verify: Verify,
) -> Produced:
    role = partition.leadership
    if role is None:
        return Produced(ErrorCode.NOT_LEADER_OR_FOLLOWER)
    ancestors: list[Partition] = []
    if count_said == COUNT_NOT_SAID and role.layout and header.producer_id >= 0:
        ancestors = replicas.ancestors(partition)
    try:
        for each in (partition, *ancestors):
            each.log.settle(now_ms)
    except OSError as failure:
        partition.storage_failed(failure)
        return Produced(ErrorCode.KAFKA_STORAGE_ERROR, message=f"The disk refuses: {failure.strerror}.")
    duplicate = partition.table.duplicate(header)
    if duplicate is not None:
        return _again(partition, duplicate)
    error = refuse_produce(role, count_said)
    if error is not ErrorCode.NONE and count_said != COUNT_NOT_SAID:
        if isinstance(partition.table.check(header), Accept):
            partition.table.refused(header)
        return Produced(error, message=f"The topic has {role.undeleted_partition_count} partitions.")
    if ancestors:
        verdict = check_redirected(header, role.partition, partition.table, [other.table for other in ancestors])
        if isinstance(verdict, Duplicate):
            return _again(_holder(partition, role.partition, ancestors, header), verdict)
    else:
        verdict = partition.table.check(header)
    if isinstance(verdict, Refuse):
        return Produced(verdict.error, message="The batch does not follow the last one of its producer.")
    if role.retiring:
        survivor = replicas.get(partition.name.topic, role.survivor)
        if survivor is None or not _serves(survivor, role):
            return Produced(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        produced = _redirect(partition.name, survivor, data, header, now_ms, verify)
    else:
        produced = _append_verified(partition.name, partition, data, header, header, now_ms, verify)
    if produced.error is not ErrorCode.NONE and produced.unverified:
        partition.table.refused(header)
    return produced


def _append_verified(
    name: TopicPartition,
    target: Partition,
    data: memoryview,
    sent: BatchHeader,
    header: BatchHeader,
    now_ms: int,
    verify: Verify,
) -> Produced:
    """Steps 5 and 6. `sent` is the batch as its producer named it, `header` as it will be appended to `target`."""
    error = _refuse_transaction(name, target, sent, header, verify)
    if error is not ErrorCode.NONE:
        message = "The partition is not part of a transaction that its producer has open."
        return Produced(error, message=message, unverified=error.retriable)
    return _append(target, data, header, now_ms)


def _refuse_transaction(
    name: TopicPartition, target: Partition, sent: BatchHeader, header: BatchHeader, verify: Verify
) -> ErrorCode:
    """The coordinator is asked once per transaction and partition: then the transaction is open in the table."""
    if sent.producer_id < 0:
        return ErrorCode.NONE
    known = target.table.known(header.producer_id)
    opened = known is not None and known.transaction_start is not None
    if not sent.is_transactional:
        return ErrorCode.INVALID_TXN_STATE if opened else ErrorCode.NONE
    if known is not None and opened and known.epoch == sent.producer_epoch:
        return ErrorCode.NONE
    if len(target.table.aborted) >= ABORTED_TRANSACTIONS_MAX:
        return ErrorCode.POLICY_VIOLATION
    return verify(name, sent.producer_id, sent.producer_epoch)


def _serves(survivor: Partition, role: Leadership) -> bool:
    """Whether the survivor has taken the role that follows the retiring one's: before that, order could be lost."""
    taken = survivor.leadership
    return taken is not None and taken.layout >= role.layout and not taken.retiring


def _holder(otherwise: Partition, number: int, ancestors: list[Partition], header: BatchHeader) -> Partition:
    """The partition whose log holds a duplicate of a batch for partition `number` that was found somewhere."""
    alias = header._replace(producer_id=redirected(header.producer_id, number))
    return next((other for other in ancestors if other.table.duplicate(alias) is not None), otherwise)


def _append(target: Partition, data: memoryview, header: BatchHeader, now_ms: int) -> Produced:
    settings = target.settings
    append_time = -1
    wire: memoryview | bytearray = data
    try:
        if settings.compression is not None and settings.compression is not header.compression:
            wire = recompress(data, settings.compression, settings.message_size_max * DECOMPRESSION_RATIO_MAX)
            if len(wire) > settings.message_size_max:
                message = f"Recompressed, the batch has {len(wire)} bytes; {settings.message_size_max} are allowed."
                return Produced(ErrorCode.MESSAGE_TOO_LARGE, message=message)
        if settings.log_append_time:
            append_time = now_ms
            stamp_log_append_time(wire, 0, now_ms)
        if wire is not data or settings.log_append_time:
            header = parse_header(wire)
    except DecodeError as error:
        return Produced(ErrorCode.CORRUPT_MESSAGE, message=str(error))
    unavailable = target.unavailable()
    if unavailable is not ErrorCode.NONE:
        return Produced(unavailable)
    try:
        appended = target.append(wire, header, now_ms)
    except OSError as error:
        target.table.refused(header)
        target.storage_failed(error)
        return Produced(ErrorCode.KAFKA_STORAGE_ERROR, message=f"The disk refuses: {error.strerror}.")
    return Produced(ErrorCode.NONE, appended.base_offset, append_time, awaits=target if settings.fsync else None)


def _again(partition: Partition, duplicate: Duplicate) -> Produced:
    """The answer that the batch was given when it was appended; it must be as durable as that promised."""
    append_time = duplicate.timestamp if partition.settings.log_append_time else -1
    durable = not partition.settings.fsync or duplicate.last_offset < partition.log.flushed
    return Produced(ErrorCode.NONE, duplicate.base_offset, append_time, awaits=None if durable else partition)
