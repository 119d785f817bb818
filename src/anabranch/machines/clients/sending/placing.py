"""From rows to batches: all unsent records of a topic are placed under the same partition count.

When the count changes, `advance` waits until no batch of the topic is on the wire or uncertain; then all fresh batches
go back to the backlog in the order of their records, to be placed again.

A topic of the same name with another id is another topic: the earlier one was deleted with every record that it had.
Its uncertain batches are in no log any more, so they are placed again with the others (docs/adr/0035), and the
sequence numbers of each partition start again at 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.base.ids import NO_SEQUENCE
from anabranch.machines.clients.sending.outcomes import take_back
from anabranch.machines.clients.sending.state import Chunk, Encoding, Partition, SendingState, Topic
from anabranch.machines.clients.sending.values import (
    Batch,
    Encode,
    Encoded,
    Failed,
    Placement,
    ProducerWork,
    Refused,
    order_of,
)

ENCODING_MAX = 2
"""The maximum number of a topic's chunks encoded at the same time, each in a thread."""
LOOK_BACKOFF_MS = 10
"""The first delay before metadata is requested again that did not show another count; each next one is half longer."""
LOOKS_MAX = 9
"""Metadata requests before records are sent by the old count again: the resize may have been canceled."""


def learn(state: SendingState, topic: Topic, placement: Placement, leaders: Mapping[int, int], now_ms: int) -> None:
    """Apply a topic's placement and the leaders of its partitions."""
    topic.asked = topic.needs_metadata = False
    unresolved = {part.number for part in topic.partitions.values() if part.unresolved}
    topic.removed = frozenset(unresolved - leaders.keys()) if placement.elastic else frozenset()
    topic.leaders = {**{number: topic.leaders.get(number, -1) for number in topic.removed}, **leaders}
    topic.last_error = None
    if topic.placement is None:
        topic.placement = placement
    elif topic.moving or placement != topic.placement:
        topic.moving = True
        topic.target = placement
    if any(part.number not in topic.leaders for part in topic.waiting()):
        state.ask_later(topic, now_ms)
    else:
        topic.failures = 0


def advance(state: SendingState, topic: Topic, now_ms: int, work: ProducerWork) -> None:
    """Switch to a new placement if possible, request metadata, and encode the next chunks."""
    if topic.moving and topic.replaced:
        _forget_deleted(topic)
    if topic.moving and not topic.unresolved:
        if topic.target is None:
            topic.needs_metadata = True
        else:
            _move(state, topic, now_ms)
    if topic.needs_metadata and not topic.asked:
        if now_ms >= topic.ask_at_ms:
            topic.asked = True
            work.refresh.append(topic.name)
        else:
            state.wake(topic.ask_at_ms)
    while topic.backlog and len(topic.encoding) < ENCODING_MAX and topic.placement and not topic.moving:
        chunk = _next_chunk(state, topic, now_ms)
        if chunk is None:
            return
        state.jobs += 1
        topic.encoding.append(Encoding(state.jobs, chunk))
        work.encodes.append(Encode(state.jobs, topic.name, chunk.rows, topic.placement))


def _forget_deleted(topic: Topic) -> None:
    """Take back the uncertain batches of a deleted topic; those on the wire follow with their answers."""
    for partition in topic.partitions.values():
        for batch in tuple(partition.uncertain):
            take_back(batch, partition)


def _next_chunk(state: SendingState, topic: Topic, now_ms: int) -> Chunk | None:
    """Return the first chunk of the backlog, unless the chunk lingers."""
    chunk = topic.backlog[0]
    if chunk is topic.open:
        if now_ms < chunk.ready_at_ms:
            state.wake(chunk.ready_at_ms)
            return None
        if topic.encoding or any(partition.fresh for partition in topic.partitions.values()):
            return None
        topic.open = None
    return topic.backlog.popleft()


def _move(state: SendingState, topic: Topic, now_ms: int) -> None:
    """Return every unacknowledged record to the backlog in its original order, to be placed under the new placement."""
    assert topic.target is not None and not topic.unresolved
    topic.moving, replaced = False, topic.replaced
    moved, topic.target = topic.target, None
    if moved == topic.placement:
        if topic.refused and topic.looks < LOOKS_MAX:
            topic.moving = topic.needs_metadata = True
            backoff_ms = LOOK_BACKOFF_MS * 3**topic.looks // 2**topic.looks
            topic.ask_at_ms = now_ms + min(backoff_ms, state.settings.retry_backoff_ms)
            topic.looks += 1
            return
        topic.refused, topic.looks = False, 0
        for partition in topic.partitions.values():
            if partition.fresh:
                state.back_off(partition, now_ms)
        return
    topic.placement = moved
    topic.refused, topic.looks = False, 0
    topic.backlog.extendleft(encoding.chunk for encoding in reversed(topic.encoding))
    topic.encoding.clear()
    batches = sorted((batch for part in topic.partitions.values() for batch in part.fresh), key=order_of)
    for partition in topic.partitions.values():
        partition.fresh.clear()
        partition.failures = partition.retry_at_ms = 0
        if replaced:
            partition.next_sequence, partition.acked_sequence = 0, NO_SEQUENCE
            partition.rolling_back = False
    for batch in reversed(batches):
        topic.backlog.appendleft(Chunk(batch.rows, batch.size, batch.deadline_ms, now_ms))


def take_encoded(
    state: SendingState, topic: Topic, job: int, parts: Sequence[Encoded], refused: Sequence[Refused]
) -> None:
    """Queue the batches of an `Encode` behind earlier ones; drop them if the topic has another placement by now."""
    encoding = next((encoding for encoding in topic.encoding if encoding.job == job), None)
    if encoding is None:
        return
    encoding.result = (parts, refused)
    while topic.encoding and topic.encoding[0].result is not None:
        done = topic.encoding.popleft()
        assert done.result is not None
        _queue(state, topic, done.chunk, *done.result)


def _queue(
    state: SendingState, topic: Topic, chunk: Chunk, parts: Sequence[Encoded], refused: Sequence[Refused]
) -> None:
    state.buffered_size -= chunk.size
    for part in parts:
        batch = Batch(topic.name, part.partition, part.rows, part.data, state.orders, chunk.deadline_ms)
        state.orders += 1
        state.buffered_size += batch.size
        partition = topic.partitions.get(part.partition)
        if partition is None:
            partition = topic.partitions[part.partition] = Partition(part.partition)
        partition.fresh.append(batch)
        if part.partition not in topic.leaders:
            topic.needs_metadata = True
    state.outcomes.extend(Failed(part.rows, part.error) for part in refused)
