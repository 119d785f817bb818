"""The effects of responses: batches are kept, positions set, and stale topics marked.

Batches of leader epochs up to that of the fetch are kept: their layout is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, TopicPartition
from anabranch.machines.clients.fetching import sharing
from anabranch.machines.clients.fetching.gating import is_layered
from anabranch.machines.clients.fetching.state import FetchingState, Partition
from anabranch.machines.clients.fetching.values import EARLIEST, LATEST, Fetched, FetchFrom, FetchResult

ACCEPTS = "accept.range.fetch"
EPOCH_MAX = (1 << 31) - 1
STALE = frozenset(
    {
        ErrorCode.INVALID_PARTITION_METADATA,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.KAFKA_STORAGE_ERROR,
    }
)
"""Errors that show outdated metadata of the topic."""

_BATCH = Struct(">qiiBIhi")
"""The fields of a batch header: base offset, length, leader epoch, magic, CRC, attributes, last offset delta."""
_BATCH_HEADER_SIZE = 61
_LENGTH_END = 12


def take(state: FetchingState, partition: Partition, origin: FetchFrom, result: FetchResult, now_ms: int) -> None:
    """Keep the fetched batches of a partition, or handle its error."""
    code = result.error
    if code is ErrorCode.NONE:
        partition.failures = 0
        partition.high_watermark = result.high_watermark
        if partition.log_start != result.log_start_offset:
            partition.log_start = result.log_start_offset
            partition.topic.limits = None
        if origin.asked is not None:
            _hold_some(state, partition, origin, result)
        elif result.data is not None and len(result.data) > 0:
            _hold(state, partition, origin, result, now_ms)
    elif code is ErrorCode.OFFSET_OUT_OF_RANGE and partition.held:
        partition.retry_at_ms = now_ms + state.settings.retry_backoff_ms
    elif code is ErrorCode.OFFSET_OUT_OF_RANGE and result.folded:
        partition.forget()
        partition.stand(result.log_start_offset)  # Nothing is left out, whatever `auto.offset.reset` says.
    elif code is ErrorCode.OFFSET_OUT_OF_RANGE:
        _reset(state, partition, result.log_start_offset)
    elif code is ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED and origin.asked is not None and _is_given(partition):
        # The coordinator takes the share back, as soon as it has heard that the topic is not to be shared any more.
        partition.failures += 1
        partition.retry_at_ms = now_ms + state.backoff_ms(partition.failures)
    elif code is ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED and origin.asked is not None:
        _refused(state, partition, f"Set {ACCEPTS}=true on topic {partition.topic.name} to allow that")
    elif code in STALE:
        state.mark_stale(partition, now_ms)
    elif code.retriable and code is not ErrorCode.CORRUPT_MESSAGE:
        partition.failures += 1
        partition.retry_at_ms = now_ms + state.backoff_ms(partition.failures)
    else:
        state.tell(ApiError(code, f"{partition.name} cannot be read at offset {partition.fetch_offset}"))
        partition.retry_at_ms = now_ms + state.settings.retry_backoff_max_ms


def _hold(state: FetchingState, partition: Partition, origin: FetchFrom, result: FetchResult, now_ms: int) -> None:
    assert result.data is not None
    elastic = origin.count != COUNT_NOT_SAID
    size, next_offset, later = _known_batches(result.data, origin.leader_epoch if elastic else EPOCH_MAX)
    if later:
        partition.topic.stale = True
    if next_offset > partition.fetch_offset:
        data = result.data[:size]
        partition.held.append(Fetched(data, next_offset, tuple(result.aborted)))
        partition.held_size += size
        partition.fetch_offset = next_offset
    elif not later:
        text = f"{partition.name} has no whole record batch at offset {partition.fetch_offset}"
        state.tell(ApiError(ErrorCode.CORRUPT_MESSAGE, f"{text}, as far as the broker sent it"))
        partition.retry_at_ms = now_ms + state.settings.retry_backoff_max_ms


def _hold_some(state: FetchingState, partition: Partition, origin: FetchFrom, result: FetchResult) -> None:
    """Keep the batches that were asked for, perhaps none, of all records below an offset."""
    if result.filtered_to < 0:
        _refused(state, partition, "Its broker knows no such fetches")
        return
    data = memoryview(b"") if result.data is None else result.data
    elastic = origin.count != COUNT_NOT_SAID
    size, behind, later = _known_batches(data, origin.leader_epoch if elastic else EPOCH_MAX)
    next_offset = result.filtered_to
    if later:
        partition.topic.stale = True
        next_offset = behind
    if partition.asked_until is not None:  # Of keys that are to be read from there on, nothing was asked.
        next_offset = min(next_offset, partition.asked_until)
    if next_offset <= partition.fetch_offset:
        return
    if not size and partition.held and not len(partition.held[-1].data):
        partition.held.pop()
    partition.held.append(Fetched(data[:size], next_offset, tuple(result.aborted)))
    partition.held_size += size
    partition.fetch_offset = next_offset
    partition.ask_from_here()


def _is_given(partition: Partition) -> bool:
    """Whether the coordinator of the group gave a share of the partition, and no filter is asked for."""
    return partition.topic.granted and partition.wanted is not None and bool(partition.share)


def _refused(state: FetchingState, partition: Partition, remedy: str) -> None:
    """Stop reading a partition of which the broker gives no part of the records.

    Where all of it is wanted, and some keys were read before, the consumer leaves their records out by itself.
    """
    if partition.wanted is None:
        partition.is_sifted = True
        partition.ask_from_here()
        return
    text = f"{partition.name} gives no records by key or size to this consumer. {remedy}, or read whole partitions."
    state.tell(ApiError(ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED, text))
    partition.refused = True


def _has_waited(partition: Partition, log_start: int) -> bool:
    """Whether records were deleted that a member of a group may have waited with at a gate: it misses no others."""
    topic = partition.topic
    return topic.granted and is_layered(topic) and partition.fetch_offset < log_start


def _begins_anew(partition: Partition, log_start: int) -> bool:
    """Whether it was to begin where it did before, or where its group has committed, and its log begins behind that."""
    is_anew = partition.anew_from is not None and not partition.is_sought
    is_behind = log_start < 0 or partition.fetch_offset < log_start  # A stock Kafka does not say where its log begins.
    return is_anew and is_behind and partition.handed_end <= (partition.start or 0)


def _reset(state: FetchingState, partition: Partition, log_start: int) -> None:
    """Handle a nonexistent offset: begin again as `auto.offset.reset` defines (all kept batches have been returned)."""
    if state.settings.auto_offset_reset in ("earliest", "latest"):
        sharing.reset(partition, log_start)
        missed = _has_waited(partition, log_start) or _begins_anew(partition, log_start)
        partition.wanted_timestamp = EARLIEST if missed else state.reset_timestamp
        return
    text = (
        f"offset {partition.fetch_offset} of {partition.name} is not in its log, and auto.offset.reset is "
        f"'{state.settings.auto_offset_reset}'. Seek to an offset that is there, or set it to earliest or latest."
    )
    state.tell(ApiError(ErrorCode.OFFSET_OUT_OF_RANGE, text))
    partition.is_nowhere = True


def take_found(
    state: FetchingState, request_id: int, results: Mapping[TopicPartition, tuple[ErrorCode, int]], now_ms: int
) -> None:
    """Set the positions found by a lookup; -1 means that no record is that late: begin at the log end."""
    lookup = state.lookups.pop(request_id, None)
    if lookup is None:
        return
    for tp in lookup.partitions:
        partition = state.find(tp)
        if partition is None or partition.looking_up != request_id:
            continue
        partition.looking_up = 0
        error, offset = results.get(tp, (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1))
        if error is ErrorCode.NONE and offset >= 0:
            partition.stand(sharing.found(partition, offset))
            if partition.committed is None:
                partition.reset_at = offset
            partition.failures = 0
            state.milestone = True
        elif error is ErrorCode.NONE:
            partition.wanted_timestamp = LATEST
        elif error in STALE or error.retriable:
            state.mark_stale(partition, now_ms)
        else:
            state.tell(ApiError(error, f"no offset could be found for {tp}"))
            partition.retry_at_ms = now_ms + state.settings.retry_backoff_max_ms


def _known_batches(data: memoryview, epoch_max: int) -> tuple[int, int, bool]:
    """Scan the whole batches of leader epochs up to `epoch_max`.

    Return their size, the offset after the last of them, and whether a batch of a later epoch follows.
    """
    position, last, size = 0, -1, len(data)
    later = False
    while position + _BATCH_HEADER_SIZE <= size:
        _, length, leader_epoch, _, _, _, _ = _BATCH.unpack_from(data, position)
        if position + _LENGTH_END + length > size or length < _BATCH_HEADER_SIZE - _LENGTH_END:
            break
        if leader_epoch > epoch_max:
            later = True
            break
        last = position
        position += _LENGTH_END + length
    if last < 0:
        return 0, -1, later
    base_offset, _, _, _, _, _, last_delta = _BATCH.unpack_from(data, last)
    return position, base_offset + last_delta + 1, later
