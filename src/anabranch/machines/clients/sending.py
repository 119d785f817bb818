"""The producer's mind, without clock or socket: what is sent to which partition, in which order, under which sequence.

Records arrive as rows of a topic, in order. They wait in the topic's backlog, are placed and encoded into batches under
one placement (`Encode`), and a batch then goes through

    FRESH ── sent ──► SENT ── appended ──► delivered             FRESH: nothing of it is in any log
      ▲                │ └──── refused for good ──► failed        SENT: on the wire
      └── rejected ────┤                                          DOUBTFUL: an answer was lost; may be in the log
                       └─ no answer ─► DOUBTFUL ── sent ──► SENT (same partition, same sequence)

A transactional producer sends to a partition only once its transaction holds that partition (`add_partitions`), and
takes its epochs from whoever runs its transactions.

The rule it keeps (ordering.md, section 5): every placed record of a topic is placed under one and the same count, and
is handed to another partition only while FRESH. So a new count first empties SENT and DOUBTFUL, then places all anew.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Protocol

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE
from anabranch.base.limits import PRODUCER_BATCHES_REMEMBERED
from anabranch.records.compression import Bytes

SEQUENCES = 1 << 31
"""Sequence numbers wrap here, as every Kafka client and broker has it."""
SPAN_PER_PARTITION_MAX = PRODUCER_BATCHES_REMEMBERED
"""Batches of a partition from the oldest without an outcome to the last one sent: a broker recognises that many."""
ENCODING_MAX = 2
"""Chunks of a topic that are encoded at the same time, each by a thread."""
REQUEST_SIZE_MIN = 4 * 1024 * 1024
"""A produce request takes on batches until it is this large."""

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
"""Refusals that come before the append: the batch fails, and its sequence is free again."""
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


class Rows(Protocol):
    """Records that travel together; what they are made of is the encoder's business."""

    @property
    def record_count(self) -> int:
        """How many records they are."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """How keys find their partition: by linear hashing on an elastic topic, by modulo on any other."""

    initial: int
    count: int
    elastic: bool = True

    @property
    def said(self) -> int:
        """What a produce request says of the count."""
        return self.count if self.elastic else COUNT_NOT_SAID


@dataclass(frozen=True, slots=True)
class Encoded:
    """A part of some rows as one finished batch of one partition."""

    partition: int
    rows: Rows
    data: Bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """A part of some rows that cannot be sent at all."""

    rows: Rows
    error: ApiError


class State(Enum):
    """What is known of a batch's being in the log."""

    FRESH = auto()
    SENT = auto()
    DOUBTFUL = auto()


@dataclass(slots=True, eq=False)
class Batch:
    """One record batch on its way to one partition."""

    topic: str
    partition: int
    rows: Rows
    data: Bytes
    order: int
    deadline_ms: int
    state: State = State.FRESH
    sequence: int = NO_SEQUENCE
    index: int = -1
    doubted: bool = False
    """An answer was lost once since the batch was last known not to be in the log."""

    @property
    def size(self) -> int:
        """Bytes of the batch."""
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Send:
    """Send `batches` to `node` in one produce request, the topics' counts said beside them."""

    request_id: int
    node: int
    batches: tuple[Batch, ...]
    counts: Mapping[str, int]
    producer_id: int
    producer_epoch: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Place `rows` under `placement` and make batches of them; report with `Batcher.encoded`."""

    job: int
    topic: str
    rows: Rows
    placement: Placement


@dataclass(frozen=True, slots=True)
class InitProducer:
    """Ask for a producer id, or for the next epoch of this one."""

    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """`batch` is in the log from `base_offset` on (-1 where the broker did not say)."""

    batch: Batch
    base_offset: int
    log_append_time_ms: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The records are given up, for the reason `error` says."""

    rows: Rows
    error: ApiError


@dataclass(slots=True)
class Work:
    """What the shell is to do now; `wake_at_ms` is when to ask again if nothing happens before."""

    sends: list[Send] = field(default_factory=list)
    encodes: list[Encode] = field(default_factory=list)
    outcomes: list[Delivered | Failed] = field(default_factory=list)
    refresh: list[str] = field(default_factory=list)
    init_producer: InitProducer | None = None
    add_partitions: list[tuple[str, int]] = field(default_factory=list)
    """Partitions that the transaction is to hold before anything is sent to them; report with `partitions_added`."""
    wake_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a broker said about one batch."""

    error: ErrorCode = ErrorCode.NONE
    base_offset: int = -1
    log_append_time_ms: int = -1
    message: str | None = None


@dataclass(frozen=True, slots=True)
class BatcherSettings:
    """The producer's settings that decide what is sent when, by Kafka's names."""

    acks: int = -1
    enable_idempotence: bool = True
    transactional: bool = False
    linger_ms: int = 5
    batch_size: int = 1_000_000
    max_in_flight_requests_per_connection: int = 5
    delivery_timeout_ms: int = 120_000
    request_timeout_ms: int = 30_000
    max_block_ms: int = 60_000
    """How long records wait for a topic that nobody knows."""
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000


@dataclass(slots=True)
class _Chunk:
    """Rows that are not placed."""

    rows: Rows
    size: int
    deadline_ms: int
    ready_at_ms: int


@dataclass(slots=True)
class _Encoding:
    """A chunk that is being placed and encoded, and what came of it once that is known."""

    job: int
    chunk: _Chunk
    result: tuple[Sequence[Encoded], Sequence[Refused]] | None = None


@dataclass(slots=True)
class _Partition:
    number: int
    fresh: deque[Batch] = field(default_factory=deque)
    doubtful: list[Batch] = field(default_factory=list)
    sent: list[Batch] = field(default_factory=list)
    next_sequence: int = 0
    acked_sequence: int = NO_SEQUENCE
    """The last sequence number that is known to be in the log."""
    acked_order: int = -1
    rolling_back: bool = False
    """A sequence number was rejected: the next one is given only when every outcome is known."""
    retry_at_ms: int = 0
    failures: int = 0

    departed: int = 0
    """Batches that left under a sequence of their own."""

    @property
    def unresolved(self) -> int:
        return len(self.sent) + len(self.doubtful)

    @property
    def span(self) -> int:
        """Batches that left since, and with, the oldest one without an outcome."""
        return self.departed - min((batch.index for batch in (*self.sent, *self.doubtful)), default=self.departed)


@dataclass(slots=True)
class _Topic:
    name: str
    placement: Placement | None = None
    leaders: Mapping[int, int] = field(default_factory=dict)
    removed: frozenset[int] = frozenset()
    """Partitions that are not there any more, while batches for them are in doubt; their last leaders are asked."""
    backlog: deque[_Chunk] = field(default_factory=deque)
    open: _Chunk | None = None
    """The last chunk of the backlog, while records may still join it."""
    encoding: deque[_Encoding] = field(default_factory=deque)
    """What is being placed and encoded, in order."""
    partitions: dict[int, _Partition] = field(default_factory=dict)
    moving: bool = False
    target: Placement | None = None
    """The placement to move to, once it is known."""
    needs_metadata: bool = True
    asked: bool = False
    ask_at_ms: int = 0
    failures: int = 0
    last_error: ApiError | None = None

    @property
    def idle(self) -> bool:
        return (
            not self.backlog
            and not self.encoding
            and not any(part.fresh or part.unresolved for part in self.partitions.values())
        )

    @property
    def unresolved(self) -> bool:
        return any(part.unresolved for part in self.partitions.values())


@dataclass(slots=True)
class _Request:
    node: int
    batches: tuple[Batch, ...]


def _order(batch: Batch) -> int:
    return batch.order


class Batcher:
    """Feed it what happens, then `drain` it and do what it says."""

    def __init__(self, settings: BatcherSettings, rows_of: Callable[[list[Any]], Rows]) -> None:
        self._settings = settings
        self._rows_of = rows_of
        self._topics: dict[str, _Topic] = {}
        self._requests: dict[int, _Request] = {}
        self._load: dict[int, int] = {}
        self._outcomes: list[Delivered | Failed] = []
        self._request_ids = 0
        self._jobs = 0
        self._orders = 0
        self._turn = 0
        self._wake_at_ms: int | None = None
        self._producer_id = NO_PRODUCER_ID
        self._producer_epoch = NO_PRODUCER_EPOCH
        self._new_epoch_needed = settings.enable_idempotence
        self._asked_for_producer = False
        self._ask_producer_at_ms = 0
        self._producer_failures = 0
        self._held: set[tuple[str, int]] = set()
        """Partitions that the transaction holds."""
        self._asked_for: set[tuple[str, int]] = set()
        """Partitions that it was asked to hold."""
        self.fatal: ApiError | None = None
        """Once set, nothing can be sent any more."""
        self.buffered_size = 0
        """Bytes of records that have no outcome yet."""

    # -- what happens -------------------------------------------------------------------------------------------------

    def append(self, topic: str, record: object, size: int, now_ms: int) -> bool:
        """Take one record of about `size` bytes; True when `drain` should be called for it."""
        state = self._topics.get(topic)
        if state is None:
            state = self._topics[topic] = _Topic(topic)
        chunk = state.open
        self.buffered_size += size
        if chunk is not None:
            chunk.rows.append(record)  # type: ignore[attr-defined]
            chunk.size += size
            if chunk.size < self._settings.batch_size:
                return False
            state.open = None
            return True
        settings = self._settings
        chunk = _Chunk(
            self._rows_of([record]), size, now_ms + settings.delivery_timeout_ms, now_ms + settings.linger_ms
        )
        state.backlog.append(chunk)
        if size < settings.batch_size and settings.linger_ms > 0:
            state.open = chunk
        return True

    def append_rows(self, topic: str, rows: Rows, size: int, now_ms: int) -> None:
        """Take rows that came together; they do not linger."""
        state = self._topics.setdefault(topic, _Topic(topic))
        state.open = None
        state.backlog.append(_Chunk(rows, size, now_ms + self._settings.delivery_timeout_ms, now_ms))
        self.buffered_size += size

    def flush(self) -> None:
        """Let nothing that is here linger."""
        for topic in self._topics.values():
            if topic.open is not None:
                topic.open.ready_at_ms = 0
                topic.open = None

    def topic_known(self, name: str, placement: Placement, leaders: Mapping[int, int], now_ms: int) -> None:
        """Learn a topic's placement and the leaders of its partitions."""
        topic = self._topics.get(name)
        if topic is None:
            return
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
        if any(part.number not in topic.leaders for part in self._waiting(topic)):
            self._ask_later(topic, now_ms)
        else:
            topic.failures = 0

    def topic_unknown(self, name: str, error: ApiError, now_ms: int) -> None:
        """Learn that metadata of a topic could not be had."""
        topic = self._topics.get(name)
        if topic is None:
            return
        topic.asked = False
        topic.last_error = error
        if error.retriable:
            self._ask_later(topic, now_ms)
        else:
            self._fail_unsent(topic, error)

    def encoded(self, job: int, topic: str, parts: Sequence[Encoded], refused: Sequence[Refused] = ()) -> None:
        """Learn what became of an `Encode`; one that the topic has moved away from in the meantime is forgotten."""
        state = self._topics[topic]
        encoding = next((encoding for encoding in state.encoding if encoding.job == job), None)
        if encoding is None:
            return
        encoding.result = (parts, refused)
        while state.encoding and state.encoding[0].result is not None:
            done = state.encoding.popleft()
            assert done.result is not None
            self._take_encoded(state, done.chunk, *done.result)

    def producer_known(self, producer_id: int, producer_epoch: int) -> None:
        """Learn the producer id and epoch under which sequences start anew."""
        assert not any(topic.unresolved for topic in self._topics.values())
        self._producer_id, self._producer_epoch = producer_id, producer_epoch
        self._new_epoch_needed = self._asked_for_producer = False
        self._producer_failures = 0
        for topic in self._topics.values():
            for partition in topic.partitions.values():
                partition.next_sequence, partition.acked_sequence = 0, NO_SEQUENCE
                partition.rolling_back = False

    def producer_unknown(self, error: ApiError, now_ms: int) -> None:
        """Learn that a producer id could not be had."""
        self._asked_for_producer = False
        if error.retriable:
            self._producer_failures += 1
            self._ask_producer_at_ms = now_ms + self._backoff(self._producer_failures)
        else:
            self._break(error)

    def partitions_added(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Learn that the transaction holds these partitions."""
        added = set(partitions)
        self._held |= added
        self._asked_for -= added

    def partitions_missing(self, partitions: Iterable[tuple[str, int]], now_ms: int) -> None:
        """Learn that one of these partitions is not there: look at their topics again, then ask again."""
        for name, number in partitions:
            self._asked_for.discard((name, number))
            topic = self._topics[name]
            topic.needs_metadata = True
            if number in topic.partitions:
                self._back_off(topic.partitions[number], now_ms)

    def stop(self, error: ApiError) -> None:
        """Learn that nothing can be sent any more, because of `error`."""
        self._break(error)

    def transaction_ended(self) -> None:
        """Learn that the transaction is over: the next one holds nothing yet."""
        assert not self.unresolved
        self._held.clear()
        self._asked_for.clear()

    @property
    def new_epoch_needed(self) -> bool:
        """Whether nothing more is sent before the producer has another epoch: sequences went astray."""
        return self._new_epoch_needed

    def answered(self, request_id: int, answers: Mapping[tuple[str, int], Answer], now_ms: int) -> None:
        """Learn what the broker says about each batch of a request; one it is silent about is in doubt."""
        for batch in self._closed(request_id):
            answer = answers.get((batch.topic, batch.partition))
            if answer is None:
                self._doubt(batch, now_ms)
            else:
                self._judge(batch, answer, now_ms)

    def lost(self, request_id: int, now_ms: int) -> None:
        """Learn that a request will not be answered: any of its batches may be in the log, or none."""
        for batch in self._closed(request_id):
            self._doubt(batch, now_ms)
            topic = self._topics[batch.topic]
            topic.needs_metadata = True

    def not_sent(self, request_id: int, now_ms: int) -> None:
        """Learn that a request never left: the connection could not be made."""
        for batch in self._closed(request_id):
            topic, partition = self._of(batch)
            if batch.doubted:
                self._doubt(batch, now_ms)
            else:
                self._take_back(batch, partition)
                self._back_off(partition, now_ms)
            topic.needs_metadata = True

    def abandon(self, error: ApiError) -> int:
        """Give up everything that has no outcome; return how many records that were."""
        given_up = 0
        for topic in self._topics.values():
            given_up += self._fail_unsent(topic, error)
            for partition in topic.partitions.values():
                for batch in (*partition.doubtful, *partition.sent):
                    self._fail(batch, error)
                    given_up += batch.rows.record_count
                if partition.unresolved:
                    self._new_epoch_needed = self._settings.enable_idempotence
                partition.doubtful.clear()
                partition.sent.clear()
        self._requests.clear()
        self._load.clear()
        return given_up

    # -- what to do ---------------------------------------------------------------------------------------------------

    def drain(self, now_ms: int) -> Work:
        """Say everything there is to do at `now_ms`; what was said once is not said again."""
        work = Work()
        self._wake_at_ms = None
        if self.fatal is None:
            for topic in self._topics.values():
                if not topic.idle:
                    self._expire(topic, now_ms)
                    self._advance(topic, now_ms, work)
            work.init_producer = self._init_producer(now_ms)
            self._send(now_ms, work)
        work.outcomes, self._outcomes = self._outcomes, []
        work.wake_at_ms = self._wake_at_ms
        return work

    @property
    def unresolved(self) -> bool:
        """Whether any batch is on the wire or in doubt."""
        return any(topic.unresolved for topic in self._topics.values())

    @property
    def idle(self) -> bool:
        """Whether every record taken has an outcome."""
        return not self._outcomes and all(topic.idle for topic in self._topics.values())

    def _wake(self, at_ms: int) -> None:
        if self._wake_at_ms is None or at_ms < self._wake_at_ms:
            self._wake_at_ms = at_ms

    def _backoff(self, failures: int) -> int:
        return min(self._settings.retry_backoff_ms << min(failures - 1, 16), self._settings.retry_backoff_max_ms)

    def _advance(self, topic: _Topic, now_ms: int, work: Work) -> None:
        """Move to a new placement if it is time, ask for metadata, and encode the next chunk."""
        if topic.moving and not topic.unresolved:
            if topic.target is None:
                topic.needs_metadata = True
            else:
                self._move(topic, now_ms)
        if topic.needs_metadata and not topic.asked:
            if now_ms >= topic.ask_at_ms:
                topic.asked = True
                work.refresh.append(topic.name)
            else:
                self._wake(topic.ask_at_ms)
        while topic.backlog and len(topic.encoding) < ENCODING_MAX and topic.placement and not topic.moving:
            chunk = self._next_chunk(topic, now_ms)
            if chunk is None:
                return
            self._jobs += 1
            topic.encoding.append(_Encoding(self._jobs, chunk))
            work.encodes.append(Encode(self._jobs, topic.name, chunk.rows, topic.placement))

    def _next_chunk(self, topic: _Topic, now_ms: int) -> _Chunk | None:
        """The first chunk of the backlog, unless it lingers."""
        chunk = topic.backlog[0]
        if chunk is topic.open:
            if now_ms < chunk.ready_at_ms:
                self._wake(chunk.ready_at_ms)
                return None
            if topic.encoding or any(partition.fresh for partition in topic.partitions.values()):
                return None
            topic.open = None
        return topic.backlog.popleft()

    def _move(self, topic: _Topic, now_ms: int) -> None:
        """Put every unacknowledged record back in its original order, to be placed under the new placement."""
        assert topic.target is not None and not topic.unresolved
        topic.moving = False
        moved, topic.target = topic.target, None
        if moved == topic.placement:
            for partition in topic.partitions.values():
                if partition.fresh:
                    self._back_off(partition, now_ms)
            return
        topic.placement = moved
        topic.backlog.extendleft(encoding.chunk for encoding in reversed(topic.encoding))
        topic.encoding.clear()
        batches = sorted((b for part in topic.partitions.values() for b in part.fresh), key=_order)
        for partition in topic.partitions.values():
            partition.fresh.clear()
            partition.failures = partition.retry_at_ms = 0
        for batch in reversed(batches):
            topic.backlog.appendleft(_Chunk(batch.rows, batch.size, batch.deadline_ms, now_ms))

    def _init_producer(self, now_ms: int) -> InitProducer | None:
        if self._settings.transactional or not self._new_epoch_needed or self._asked_for_producer or self.unresolved:
            return None
        if now_ms < self._ask_producer_at_ms:
            self._wake(self._ask_producer_at_ms)
            return None
        self._asked_for_producer = True
        return InitProducer(self._producer_id, self._producer_epoch)

    def _send(self, now_ms: int, work: Work) -> None:
        while self._send_round(now_ms, work):
            pass

    def _send_round(self, now_ms: int, work: Work) -> bool:
        """Send the first batch of every partition that may send one."""
        ready: dict[int, list[tuple[_Topic, _Partition, Batch]]] = {}
        for topic in self._topics.values():
            for partition in self._waiting(topic):
                node = topic.leaders.get(partition.number, -1)
                if node < 0:
                    if not topic.needs_metadata:
                        self._ask_later(topic, now_ms)
                        self._wake(topic.ask_at_ms)
                    continue
                if self._load.get(node, 0) < self._settings.max_in_flight_requests_per_connection:
                    batch = self._next(topic, partition, now_ms, work)
                    if batch is not None:
                        ready.setdefault(node, []).append((topic, partition, batch))
        for node, candidates in ready.items():
            self._turn += 1
            first = self._turn % len(candidates)
            work.sends.extend(self._requests_of(node, candidates[first:] + candidates[:first], now_ms))
        return bool(ready)

    def _requests_of(
        self, node: int, candidates: Iterable[tuple[_Topic, _Partition, Batch]], now_ms: int
    ) -> Iterable[Send]:
        settings = self._settings
        chosen: list[Batch] = []
        counts: dict[str, int] = {}
        size = 0
        rest = iter(candidates)
        while self._load.get(node, 0) < settings.max_in_flight_requests_per_connection:
            for topic, partition, batch in rest:
                self._depart(partition, batch)
                assert topic.placement is not None
                counts[topic.name] = topic.placement.said
                chosen.append(batch)
                size += batch.size
                if size >= REQUEST_SIZE_MIN:
                    break
            if not chosen:
                return
            self._request_ids += 1
            batches = tuple(chosen)
            self._requests[self._request_ids] = _Request(node, batches)
            self._load[node] = self._load.get(node, 0) + 1
            remaining = min(batch.deadline_ms for batch in batches) - now_ms
            timeout_ms = max(1, min(settings.request_timeout_ms, remaining))
            yield Send(self._request_ids, node, batches, counts, self._producer_id, self._producer_epoch, timeout_ms)
            chosen, counts, size = [], {}, 0

    def _next(self, topic: _Topic, partition: _Partition, now_ms: int, work: Work) -> Batch | None:
        """The batch that this partition may send now: what is in doubt first, and nothing new beside a move.

        A producer's first batch in a partition travels alone: brokers take any sequence from a producer they do not
        know, so one that overtook a refused first batch would shut it out for ever.
        """
        if now_ms < partition.retry_at_ms:
            self._wake(partition.retry_at_ms)
            return None
        if partition.doubtful:
            return partition.doubtful[0]
        if not partition.fresh or topic.moving:
            return None
        if not self._settings.enable_idempotence:
            return None if partition.unresolved else partition.fresh[0]
        if self._new_epoch_needed or partition.span >= self._span_max(partition):
            return None
        if self._settings.transactional and not self._holds(topic, partition, work):
            return None
        if partition.rolling_back:
            if partition.unresolved:
                return None
            partition.rolling_back = False
            partition.next_sequence = (partition.acked_sequence + 1) % SEQUENCES
        return partition.fresh[0]

    def _holds(self, topic: _Topic, partition: _Partition, work: Work) -> bool:
        """Whether the transaction holds the partition; if not, it is asked to."""
        at = (topic.name, partition.number)
        if at in self._held:
            return True
        if at not in self._asked_for:
            self._asked_for.add(at)
            work.add_partitions.append(at)
        return False

    @staticmethod
    def _span_max(partition: _Partition) -> int:
        return 1 if partition.acked_sequence == NO_SEQUENCE else SPAN_PER_PARTITION_MAX

    def _depart(self, partition: _Partition, batch: Batch) -> None:
        if batch.state is State.DOUBTFUL:
            partition.doubtful.remove(batch)
        else:
            assert partition.fresh[0] is batch
            partition.fresh.popleft()
            batch.index = partition.departed
            partition.departed += 1
            if self._settings.enable_idempotence:
                batch.sequence = partition.next_sequence
                partition.next_sequence = (batch.sequence + batch.rows.record_count) % SEQUENCES
        batch.state = State.SENT
        partition.sent.append(batch)

    def _take_encoded(self, topic: _Topic, chunk: _Chunk, parts: Sequence[Encoded], refused: Sequence[Refused]) -> None:
        self.buffered_size -= chunk.size
        for part in parts:
            batch = Batch(topic.name, part.partition, part.rows, part.data, self._orders, chunk.deadline_ms)
            self._orders += 1
            self.buffered_size += batch.size
            partition = topic.partitions.get(part.partition)
            if partition is None:
                partition = topic.partitions[part.partition] = _Partition(part.partition)
            partition.fresh.append(batch)
            if part.partition not in topic.leaders:
                topic.needs_metadata = True
        self._outcomes.extend(Failed(part.rows, part.error) for part in refused)

    # -- judging answers ----------------------------------------------------------------------------------------------

    def _closed(self, request_id: int) -> tuple[Batch, ...]:
        request = self._requests.pop(request_id, None)
        if request is None:
            return ()
        self._load[request.node] -= 1
        return request.batches

    def _of(self, batch: Batch) -> tuple[_Topic, _Partition]:
        topic = self._topics[batch.topic]
        return topic, topic.partitions[batch.partition]

    def _judge(self, batch: Batch, answer: Answer, now_ms: int) -> None:
        topic, partition = self._of(batch)
        code = answer.error
        if code in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
            self._delivered(batch, partition, answer)
        elif code is ErrorCode.INVALID_PARTITION_METADATA:
            self._take_back(batch, partition)
            topic.moving = topic.needs_metadata = True
        elif code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and self._settings.enable_idempotence:
            self._out_of_order(batch, partition, answer, now_ms)
        elif code in FENCED:
            self._break(_refusal(batch, answer, "another producer has taken this producer's id; make a new producer"))
        elif code is ErrorCode.UNKNOWN_PRODUCER_ID and not batch.doubted and not self._settings.transactional:
            self._take_back(batch, partition)
            self._new_epoch_needed = True
        elif code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and not batch.doubted and self._elastic(topic):
            self._take_back(batch, partition)
            self._back_off(partition, now_ms)
            topic.needs_metadata = True
        elif code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and batch.partition in topic.removed:
            reason = (
                "the partition was removed before it was known whether they were appended: look for them, or resend"
            )
            self._refuse(batch, partition, _refusal(batch, answer, reason))
        elif code in DEFINITE or not code.retriable:
            self._refuse(batch, partition, _refusal(batch, answer))
        else:
            self._doubt(batch, now_ms)
            if code in STALE_LEADER:
                topic.needs_metadata = True

    def _elastic(self, topic: _Topic) -> bool:
        return topic.placement is not None and topic.placement.elastic

    def _delivered(self, batch: Batch, partition: _Partition, answer: Answer) -> None:
        partition.sent.remove(batch)
        partition.failures = 0
        if batch.sequence != NO_SEQUENCE and batch.order > partition.acked_order:
            partition.acked_order = batch.order
            partition.acked_sequence = (batch.sequence + batch.rows.record_count - 1) % SEQUENCES
        self.buffered_size -= batch.size
        self._outcomes.append(Delivered(batch, answer.base_offset, answer.log_append_time_ms))

    def _out_of_order(self, batch: Batch, partition: _Partition, answer: Answer, now_ms: int) -> None:
        """A gap before this batch. Ours, if an earlier one is open or was rejected; otherwise the broker lost some."""
        if partition.rolling_back:
            self._take_back(batch, partition)
        elif any(other.order < batch.order for other in (*partition.sent, *partition.doubtful)):
            self._doubt(batch, now_ms)
        else:
            reason = "the partition's log lacks records that it acknowledged to this producer before"
            self._new_epoch_needed = True
            self._refuse(batch, partition, _refusal(batch, answer, reason))

    def _take_back(self, batch: Batch, partition: _Partition) -> None:
        """The batch is certainly not in the log: its sequence number and those after it will be given again."""
        partition.sent.remove(batch)
        batch.state, batch.sequence, batch.doubted = State.FRESH, NO_SEQUENCE, False
        partition.rolling_back = True
        place = next((i for i, other in enumerate(partition.fresh) if other.order > batch.order), len(partition.fresh))
        partition.fresh.insert(place, batch)

    def _doubt(self, batch: Batch, now_ms: int) -> None:
        _, partition = self._of(batch)
        partition.sent.remove(batch)
        batch.state, batch.doubted = State.DOUBTFUL, True
        insort(partition.doubtful, batch, key=_order)
        self._back_off(partition, now_ms)

    def _refuse(self, batch: Batch, partition: _Partition, error: ApiError) -> None:
        """The batch is given up. If it may be in the log all the same, its sequence number must not be given again."""
        (partition.sent if batch.state is State.SENT else partition.doubtful).remove(batch)
        partition.rolling_back = True
        if batch.doubted and self._settings.enable_idempotence:
            self._new_epoch_needed = True
        self._fail(batch, error)

    def _fail(self, batch: Batch, error: ApiError) -> None:
        self.buffered_size -= batch.size
        self._outcomes.append(Failed(batch.rows, error))

    def _fail_unsent(self, topic: _Topic, error: ApiError) -> int:
        """Fail every record of the topic that is not in any log; return how many."""
        failed = 0
        chunks = [*(encoding.chunk for encoding in topic.encoding), *topic.backlog]
        topic.encoding.clear()
        topic.backlog.clear()
        topic.open = None
        for chunk in chunks:
            self.buffered_size -= chunk.size
            failed += chunk.rows.record_count
            self._outcomes.append(Failed(chunk.rows, error))
        for partition in topic.partitions.values():
            for batch in partition.fresh:
                failed += batch.rows.record_count
                self._fail(batch, error)
            partition.fresh.clear()
        return failed

    def _break(self, error: ApiError) -> None:
        self.fatal = error
        self.abandon(error)

    def _expire(self, topic: _Topic, now_ms: int) -> None:
        """Give up what is older than `delivery.timeout.ms`; what is on the wire is answered or lost first."""
        settings = self._settings
        unknown = max(0, settings.delivery_timeout_ms - settings.max_block_ms) if topic.placement is None else 0
        while topic.backlog and topic.backlog[0].deadline_ms - unknown <= now_ms:
            chunk = topic.backlog.popleft()
            if chunk is topic.open:
                topic.open = None
            self.buffered_size -= chunk.size
            why = f" ({topic.last_error})" if topic.last_error is not None else ""
            timeout_ms = settings.delivery_timeout_ms - unknown
            self._outcomes.append(Failed(chunk.rows, _expired(topic.name, timeout_ms, "", why)))
        if topic.backlog:
            self._wake(topic.backlog[0].deadline_ms - unknown)
        for partition in topic.partitions.values():
            name = f"{topic.name}-{partition.number}"
            while partition.doubtful and partition.doubtful[0].deadline_ms <= now_ms:
                doubt = " They may or may not be in the log."
                self._refuse(partition.doubtful[0], partition, _expired(name, settings.delivery_timeout_ms, doubt, ""))
            while partition.fresh and partition.fresh[0].deadline_ms <= now_ms:
                self._fail(partition.fresh.popleft(), _expired(name, settings.delivery_timeout_ms, "", ""))
            for first in (*partition.doubtful[:1], *([partition.fresh[0]] if partition.fresh else ())):
                self._wake(first.deadline_ms)

    def _back_off(self, partition: _Partition, now_ms: int) -> None:
        if partition.retry_at_ms <= now_ms:
            partition.failures += 1
            partition.retry_at_ms = now_ms + self._backoff(partition.failures)

    def _ask_later(self, topic: _Topic, now_ms: int) -> None:
        topic.needs_metadata = True
        topic.failures += 1
        topic.ask_at_ms = now_ms + self._backoff(topic.failures)

    @staticmethod
    def _waiting(topic: _Topic) -> Iterable[_Partition]:
        return (part for part in topic.partitions.values() if part.fresh or part.doubtful)


def _refusal(batch: Batch, answer: Answer, reason: str = "") -> ApiError:
    said = "; ".join(part for part in (answer.message, reason) if part)
    text = f"{batch.rows.record_count} records for {batch.topic}-{batch.partition} were refused"
    return ApiError(answer.error, f"{text}: {said}" if said else text)


def _expired(target: str, timeout_ms: int, doubt: str, why: str) -> ApiError:
    text = f"records for {target} could not be delivered within {timeout_ms} ms{why}."
    hint = " Check that the brokers run and that the topic exists, or allow more time."
    return ApiError(ErrorCode.REQUEST_TIMED_OUT, text + doubt + hint)
