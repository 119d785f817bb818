"""The batcher: report events, `drain` the work, and carry it out.

A transactional producer sends to a partition only after the partition was added to the transaction
(`ProducerWork.add_partitions`), and gets its producer id and epoch from `producer_known`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from anabranch.base.errors import ApiError
from anabranch.base.ids import NO_SEQUENCE
from anabranch.machines.clients.sending import departing, outcomes, placing
from anabranch.machines.clients.sending.state import Chunk, SendingState, Topic
from anabranch.machines.clients.sending.values import (
    BatcherSettings,
    Encoded,
    Placement,
    ProduceResult,
    ProducerWork,
    Refused,
    Rows,
)


class Batcher:
    """Decides the requests of a producer; see the package for the theory."""

    def __init__(self, settings: BatcherSettings, rows_of: Callable[[list[Any]], Rows]) -> None:
        self._settings = settings
        self._rows_of = rows_of
        self.state = SendingState(settings, new_epoch_needed=settings.enable_idempotence)
        """For reading only."""
        self._topics = self.state.topics

    # -- reports of the driver ----------------------------------------------------------------------------------------

    def append(self, topic: str, records: list[Any], size: int, now_ms: int) -> bool:
        """Append records of about `size` bytes together. Return True if `drain` should be called for them."""
        found = self._topics.get(topic)
        if found is None:
            found = self._topics[topic] = Topic(topic)
        chunk = found.open
        self.state.buffered_size += size
        if chunk is not None:
            chunk.rows.extend(records)  # type: ignore[attr-defined]
            chunk.size += size
            if chunk.size < self._settings.batch_size:
                return False
            found.open = None
            return True
        settings = self._settings
        chunk = Chunk(self._rows_of(records), size, now_ms + settings.delivery_timeout_ms, now_ms + settings.linger_ms)
        found.backlog.append(chunk)
        if size < settings.batch_size and settings.linger_ms > 0:
            found.open = chunk
        return True

    def append_rows(self, topic: str, rows: Rows, size: int, now_ms: int) -> None:
        """Append rows of one table; they do not linger."""
        found = self._topics.setdefault(topic, Topic(topic))
        found.open = None
        found.backlog.append(Chunk(rows, size, now_ms + self._settings.delivery_timeout_ms, now_ms))
        self.state.buffered_size += size

    def flush(self) -> None:
        """End the lingering of all records so far."""
        for topic in self._topics.values():
            if topic.open is not None:
                topic.open.ready_at_ms = 0
                topic.open = None

    def topic_known(self, name: str, placement: Placement, leaders: Mapping[int, int], now_ms: int) -> None:
        """Apply a topic's placement and the leaders of its partitions."""
        topic = self._topics.get(name)
        if topic is not None:
            placing.learn(self.state, topic, placement, leaders, now_ms)

    def topic_unknown(self, name: str, error: ApiError, now_ms: int) -> None:
        """Handle a failed metadata request."""
        topic = self._topics.get(name)
        if topic is None:
            return
        topic.asked = False
        topic.last_error = error
        if error.retriable:
            self.state.ask_later(topic, now_ms)
        else:
            outcomes.fail_unsent(self.state, topic, error)

    def encoded(self, job: int, topic: str, parts: Sequence[Encoded], refused: Sequence[Refused] = ()) -> None:
        """Handle the result of an `Encode`; ignore the result if the topic has another placement by now."""
        placing.take_encoded(self.state, self._topics[topic], job, parts, refused)

    def producer_known(self, producer_id: int, producer_epoch: int) -> None:
        """Set the producer id and epoch; sequences start again at 0."""
        state = self.state
        assert not state.unresolved
        state.producer_id, state.producer_epoch = producer_id, producer_epoch
        state.new_epoch_needed = state.asked_for_producer = False
        state.producer_failures = 0
        for topic in self._topics.values():
            for partition in topic.partitions.values():
                partition.next_sequence, partition.acked_sequence = 0, NO_SEQUENCE
                partition.rolling_back = False

    def producer_unknown(self, error: ApiError, now_ms: int) -> None:
        """Handle a failed request for a producer id."""
        state = self.state
        state.asked_for_producer = False
        if error.retriable:
            state.producer_failures += 1
            state.ask_producer_at_ms = now_ms + state.backoff_ms(state.producer_failures)
        else:
            outcomes.stop(state, error)

    def partitions_added(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Mark these partitions as added to the transaction."""
        added = set(partitions)
        self.state.held |= added
        self.state.asked_to_hold -= added

    def partitions_missing(self, partitions: Iterable[tuple[str, int]], now_ms: int) -> None:
        """Handle missing partitions of the transaction: refresh their topics, then add the partitions again."""
        for name, number in partitions:
            self.state.asked_to_hold.discard((name, number))
            topic = self._topics[name]
            topic.needs_metadata = True
            if number in topic.partitions:
                self.state.back_off(topic.partitions[number], now_ms)

    def stop(self, error: ApiError) -> None:
        """Stop sending for good, because of `error`."""
        outcomes.stop(self.state, error)

    def transaction_ended(self) -> None:
        """Handle the end of the transaction: the next one starts without partitions."""
        assert not self.unresolved
        self.state.held.clear()
        self.state.asked_to_hold.clear()

    def answered(self, request_id: int, results: Mapping[tuple[str, int], ProduceResult], now_ms: int) -> None:
        """Handle the broker's result for each batch of a request; a batch without a result is uncertain."""
        for batch in outcomes.take_request(self.state, request_id):
            result = results.get((batch.topic, batch.partition))
            if result is None:
                outcomes.mark_uncertain(self.state, batch, now_ms)
            else:
                outcomes.judge(self.state, batch, result, now_ms)

    def lost(self, request_id: int, now_ms: int) -> None:
        """Handle the loss of a request: each of its batches may or may not be in the log."""
        for batch in outcomes.take_request(self.state, request_id):
            outcomes.mark_uncertain(self.state, batch, now_ms)
            self._topics[batch.topic].needs_metadata = True

    def connection_lost(self, node: int) -> None:
        """Handle the end of a connection over which batches were sent that no response acknowledges (acks=0).

        The broker refuses a batch by closing the connection, so each topic with a leader there may have changed:
        nothing of it is sent before its metadata is refreshed, and looked at again as after a refusal, since metadata
        may not show the change yet.
        """
        for topic in self._topics.values():
            if node in topic.leaders.values():
                topic.moving = topic.needs_metadata = topic.refused = True

    def not_sent(self, request_id: int, now_ms: int) -> None:
        """Handle a request that was never sent: the connection could not be made."""
        state = self.state
        for batch in outcomes.take_request(state, request_id):
            topic, partition = state.owner(batch)
            if batch.maybe_appended:
                outcomes.mark_uncertain(state, batch, now_ms)
            else:
                outcomes.take_back(batch, partition)
                state.back_off(partition, now_ms)
            topic.needs_metadata = True

    def abandon(self, error: ApiError) -> int:
        """Fail every record without an outcome; return their number."""
        return outcomes.fail_all(self.state, error)

    # -- work ---------------------------------------------------------------------------------------------------------

    def drain(self, now_ms: int) -> ProducerWork:
        """Return all work due at `now_ms`, each item once."""
        state = self.state
        work = ProducerWork()
        state.wake_at_ms = None
        if state.fatal is None:
            for topic in self._topics.values():
                if not topic.idle:
                    outcomes.expire(state, topic, now_ms)
                    placing.advance(state, topic, now_ms, work)
            work.init_producer = departing.init_producer(state, now_ms)
            departing.send(state, now_ms, work)
        work.outcomes, state.outcomes = state.outcomes, []
        work.wake_at_ms = state.wake_at_ms
        return work

    @property
    def unresolved(self) -> bool:
        """Whether any batch is on the wire or uncertain."""
        return self.state.unresolved

    @property
    def idle(self) -> bool:
        """Whether every record has an outcome."""
        return not self.state.outcomes and all(topic.idle for topic in self._topics.values())

    @property
    def new_epoch_needed(self) -> bool:
        """Whether sending waits for a new producer epoch, after a break in the sequences."""
        return self.state.new_epoch_needed

    @property
    def fatal(self) -> ApiError | None:
        """The error after which nothing can be sent any more, or None."""
        return self.state.fatal

    @property
    def buffered_size(self) -> int:
        """The size of all records without an outcome, in bytes."""
        return self.state.buffered_size
