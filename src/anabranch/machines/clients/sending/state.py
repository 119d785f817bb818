"""The batcher's state: topics with their backlogs and partitions, requests on the wire, and the producer's identity.

The functions of `placing`, `departing` and `outcomes` change the state; shared steps are methods here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.base.errors import ApiError
from anabranch.base.ids import NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE
from anabranch.machines.clients.sending.values import (
    Batch,
    BatcherSettings,
    Delivered,
    Encoded,
    Failed,
    Placement,
    Refused,
    Rows,
)

SEQUENCES = 1 << 31
"""Sequence numbers wrap here, as in every Kafka client and broker."""


@dataclass(slots=True)
class Chunk:
    """Rows without a placement."""

    rows: Rows
    size: int
    deadline_ms: int
    ready_at_ms: int


@dataclass(slots=True)
class Encoding:
    """A chunk being placed and encoded, with the result once known."""

    job: int
    chunk: Chunk
    result: tuple[Sequence[Encoded], Sequence[Refused]] | None = None


@dataclass(slots=True)
class Partition:
    """The batches of one partition and its sequence numbers."""

    number: int
    fresh: deque[Batch] = field(default_factory=deque)
    uncertain: list[Batch] = field(default_factory=list)
    sent: list[Batch] = field(default_factory=list)
    next_sequence: int = 0
    acked_sequence: int = NO_SEQUENCE
    """The last sequence number known to be in the log."""
    acked_order: int = -1
    rolling_back: bool = False
    """A sequence number was rejected: the next one is assigned only when every outcome is known."""
    retry_at_ms: int = 0
    failures: int = 0
    departed: int = 0
    """The number of batches sent with a sequence of their own."""

    @property
    def unresolved(self) -> int:
        """The number of batches on the wire or uncertain."""
        return len(self.sent) + len(self.uncertain)

    @property
    def span(self) -> int:
        """The number of batches sent since, and including, the oldest one without an outcome."""
        return self.departed - min((batch.index for batch in (*self.sent, *self.uncertain)), default=self.departed)


@dataclass(slots=True)
class Topic:
    """A topic with records to send."""

    name: str
    placement: Placement | None = None
    leaders: Mapping[int, int] = field(default_factory=dict)
    removed: frozenset[int] = frozenset()
    """Removed partitions with uncertain batches; these go to the partitions' last leaders."""
    backlog: deque[Chunk] = field(default_factory=deque)
    open: Chunk | None = None
    """The last chunk of the backlog, while open for more records."""
    encoding: deque[Encoding] = field(default_factory=deque)
    """Chunks being placed and encoded, in order."""
    partitions: dict[int, Partition] = field(default_factory=dict)
    moving: bool = False
    target: Placement | None = None
    """The placement to switch to, once known."""
    refused: bool = False
    """A leader has refused the partition count: a resize runs, whose count metadata shows when it ends."""
    looks: int = 0
    """How often metadata has not shown it since."""
    needs_metadata: bool = True
    asked: bool = False
    ask_at_ms: int = 0
    failures: int = 0
    last_error: ApiError | None = None

    @property
    def idle(self) -> bool:
        """Whether every record of the topic has an outcome."""
        return (
            not self.backlog
            and not self.encoding
            and not any(part.fresh or part.unresolved for part in self.partitions.values())
        )

    @property
    def unresolved(self) -> bool:
        """Whether any batch is on the wire or uncertain."""
        return any(part.unresolved for part in self.partitions.values())

    @property
    def replaced(self) -> bool:
        """Whether the placement to switch to is that of another topic: this one was deleted and created again."""
        return self.target is not None and self.placement is not None and self.target.replaces(self.placement)

    @property
    def elastic(self) -> bool:
        """Whether the topic is known to be elastic."""
        return self.placement is not None and self.placement.elastic

    def waiting(self) -> Iterator[Partition]:
        """The partitions with batches to send."""
        return (part for part in self.partitions.values() if part.fresh or part.uncertain)


@dataclass(slots=True)
class Request:
    """A produce request on the wire."""

    node: int
    batches: tuple[Batch, ...]


@dataclass(slots=True)
class SendingState:
    """The sending state of one producer."""

    settings: BatcherSettings
    topics: dict[str, Topic] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)
    load: dict[int, int] = field(default_factory=dict)
    """Requests on the wire by node."""
    outcomes: list[Delivered | Failed] = field(default_factory=list)
    request_ids: int = 0
    jobs: int = 0
    orders: int = 0
    turn: int = 0
    wake_at_ms: int | None = None
    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = NO_PRODUCER_EPOCH
    new_epoch_needed: bool = False
    asked_for_producer: bool = False
    ask_producer_at_ms: int = 0
    producer_failures: int = 0
    held: set[tuple[str, int]] = field(default_factory=set)
    """The partitions of the transaction."""
    asked_to_hold: set[tuple[str, int]] = field(default_factory=set)
    """Partitions with a pending addition to the transaction."""
    fatal: ApiError | None = None
    """The error after which nothing can be sent any more."""
    buffered_size: int = 0
    """The size of all records without an outcome, in bytes."""

    @property
    def unresolved(self) -> bool:
        """Whether any batch is on the wire or uncertain."""
        return any(topic.unresolved for topic in self.topics.values())

    def owner(self, batch: Batch) -> tuple[Topic, Partition]:
        """Return the topic and the partition of a batch."""
        topic = self.topics[batch.topic]
        return topic, topic.partitions[batch.partition]

    def wake(self, at_ms: int) -> None:
        """Drain again at `at_ms` at the latest."""
        if self.wake_at_ms is None or at_ms < self.wake_at_ms:
            self.wake_at_ms = at_ms

    def backoff_ms(self, failures: int) -> int:
        """Return the delay in ms after a number of failures in a row."""
        return min(self.settings.retry_backoff_ms << min(failures - 1, 16), self.settings.retry_backoff_max_ms)

    def back_off(self, partition: Partition, now_ms: int) -> None:
        """Send nothing to the partition for a while."""
        if partition.retry_at_ms <= now_ms:
            partition.failures += 1
            partition.retry_at_ms = now_ms + self.backoff_ms(partition.failures)

    def ask_later(self, topic: Topic, now_ms: int) -> None:
        """Refresh the topic's metadata after a delay."""
        topic.needs_metadata = True
        topic.failures += 1
        topic.ask_at_ms = now_ms + self.backoff_ms(topic.failures)
