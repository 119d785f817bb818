"""The batches to send now, their requests and their sequence numbers.

Uncertain batches go first; no fresh batch is sent while the topic is being repartitioned. The first batch of a producer
in a partition travels alone: brokers accept any first sequence of a new producer, so a later batch that overtook a
refused first one would shut out the first one for ever.
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.base.ids import NO_SEQUENCE
from anabranch.base.limits import PRODUCER_BATCHES_REMEMBERED
from anabranch.machines.clients.sending.state import SEQUENCES, Partition, Request, SendingState, Topic
from anabranch.machines.clients.sending.values import Batch, BatchState, InitProducer, Placement, ProducerWork, Send

SPAN_PER_PARTITION_MAX = PRODUCER_BATCHES_REMEMBERED
"""Maximum number of batches per partition from the oldest open one to the last sent: as many as a broker recognizes."""
REQUEST_SIZE_MIN = 4 * 1024 * 1024
"""A produce request is filled up to at least this size."""


def init_producer(state: SendingState, now_ms: int) -> InitProducer | None:
    """Return a request for a producer id or epoch, if one is needed and no batch is on the wire or uncertain."""
    if state.settings.transactional or not state.new_epoch_needed or state.asked_for_producer or state.unresolved:
        return None
    if now_ms < state.ask_producer_at_ms:
        state.wake(state.ask_producer_at_ms)
        return None
    state.asked_for_producer = True
    return InitProducer(state.producer_id, state.producer_epoch)


def send(state: SendingState, now_ms: int, work: ProducerWork) -> None:
    """Send all batches that may leave, in rounds."""
    while _send_round(state, now_ms, work):
        pass


def _send_round(state: SendingState, now_ms: int, work: ProducerWork) -> bool:
    """Send the first batch of every partition that may send one."""
    ready: dict[int, list[tuple[Topic, Partition, Batch]]] = {}
    for topic in state.topics.values():
        for partition in topic.waiting():
            node = topic.leaders.get(partition.number, -1)
            if node < 0:
                if not topic.needs_metadata:
                    state.ask_later(topic, now_ms)
                    state.wake(topic.ask_at_ms)
                continue
            if state.load.get(node, 0) < state.settings.max_in_flight_requests_per_connection:
                batch = _next_batch(state, topic, partition, now_ms, work)
                if batch is not None:
                    ready.setdefault(node, []).append((topic, partition, batch))
    for node, candidates in ready.items():
        state.turn += 1
        first = state.turn % len(candidates)
        work.sends.extend(_requests(state, node, candidates[first:] + candidates[:first], now_ms))
    return bool(ready)


def _requests(
    state: SendingState, node: int, candidates: Iterable[tuple[Topic, Partition, Batch]], now_ms: int
) -> Iterable[Send]:
    settings = state.settings
    chosen: list[Batch] = []
    placements: dict[str, Placement] = {}
    size = 0
    rest = iter(candidates)
    while state.load.get(node, 0) < settings.max_in_flight_requests_per_connection:
        for topic, partition, batch in rest:
            _depart(partition, batch, sequenced=settings.enable_idempotence)
            assert topic.placement is not None
            placements[topic.name] = topic.placement
            chosen.append(batch)
            size += batch.size
            if size >= REQUEST_SIZE_MIN:
                break
        if not chosen:
            return
        state.request_ids += 1
        batches = tuple(chosen)
        state.requests[state.request_ids] = Request(node, batches)
        state.load[node] = state.load.get(node, 0) + 1
        remaining = min(batch.deadline_ms for batch in batches) - now_ms
        timeout_ms = max(1, min(settings.request_timeout_ms, remaining))
        yield Send(
            request_id=state.request_ids,
            node=node,
            batches=batches,
            counts={name: placement.sent_count for name, placement in placements.items()},
            topic_ids={name: placement.topic_id for name, placement in placements.items()},
            producer_id=state.producer_id,
            producer_epoch=state.producer_epoch,
            timeout_ms=timeout_ms,
        )
        chosen, placements, size = [], {}, 0


def _next_batch(
    state: SendingState, topic: Topic, partition: Partition, now_ms: int, work: ProducerWork
) -> Batch | None:
    """Return the next batch that this partition may send now."""
    if now_ms < partition.retry_at_ms:
        state.wake(partition.retry_at_ms)
        return None
    if partition.uncertain:
        return partition.uncertain[0]
    if not partition.fresh or topic.moving:
        return None
    if not state.settings.enable_idempotence:
        return None if partition.unresolved else partition.fresh[0]
    if state.new_epoch_needed or partition.span >= _span_max(partition):
        return None
    if state.settings.transactional and not _holds(state, topic, partition, work):
        return None
    if partition.rolling_back:
        if partition.unresolved:
            return None
        partition.rolling_back = False
        partition.next_sequence = (partition.acked_sequence + 1) % SEQUENCES
    return partition.fresh[0]


def _holds(state: SendingState, topic: Topic, partition: Partition, work: ProducerWork) -> bool:
    """Whether the transaction contains the partition; if not, request its addition."""
    key = (topic.name, partition.number)
    if key in state.held:
        return True
    if key not in state.asked_to_hold:
        state.asked_to_hold.add(key)
        work.add_partitions.append(key)
    return False


def _span_max(partition: Partition) -> int:
    return 1 if partition.acked_sequence == NO_SEQUENCE else SPAN_PER_PARTITION_MAX


def _depart(partition: Partition, batch: Batch, *, sequenced: bool) -> None:
    if batch.state is BatchState.UNCERTAIN:
        partition.uncertain.remove(batch)
    else:
        assert partition.fresh[0] is batch
        partition.fresh.popleft()
        batch.index = partition.departed
        partition.departed += 1
        if sequenced:
            batch.sequence = partition.next_sequence
            partition.next_sequence = (batch.sequence + batch.rows.record_count) % SEQUENCES
    batch.state = BatchState.SENT
    partition.sent.append(batch)
