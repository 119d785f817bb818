"""The inputs and outputs of the batcher, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_SEQUENCE, NO_TOPIC_ID
from anabranch.records.compression import Bytes


class Rows(Protocol):
    """Records that are placed together; the encoder defines their representation."""

    @property
    def record_count(self) -> int:
        """The number of records."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """The mapping of keys to partitions: linear hashing on an elastic topic, modulo on any other.

    A topic that was deleted and created again is another topic: its placement differs by the topic's id at least.
    """

    initial: int
    count: int
    elastic: bool = True
    topic_id: UUID = NO_TOPIC_ID
    """NO_TOPIC_ID where the broker gives topics no ids."""

    @property
    def sent_count(self) -> int:
        """The partition count that a produce request carries."""
        return self.count if self.elastic else COUNT_NOT_SAID

    def replaces(self, other: Placement) -> bool:
        """Whether this is the placement of another topic of the same name: the topic of `other` is deleted."""
        return NO_TOPIC_ID not in (self.topic_id, other.topic_id) and self.topic_id != other.topic_id


@dataclass(frozen=True, slots=True)
class Encoded:
    """A part of some rows, encoded as one batch of one partition."""

    partition: int
    rows: Rows
    data: Bytes


@dataclass(frozen=True, slots=True)
class Refused:
    """A part of some rows that cannot be sent."""

    rows: Rows
    error: ApiError


class BatchState(Enum):
    """Whether a batch is in the log, to the producer's knowledge."""

    FRESH = auto()
    SENT = auto()
    UNCERTAIN = auto()


@dataclass(slots=True, eq=False)
class Batch:
    """One record batch for one partition."""

    topic: str
    partition: int
    rows: Rows
    data: Bytes
    order: int
    deadline_ms: int
    state: BatchState = BatchState.FRESH
    sequence: int = NO_SEQUENCE
    index: int = -1
    maybe_appended: bool = False
    """A response was lost since the batch was last known not to be in the log."""

    @property
    def size(self) -> int:
        """The size of the batch in bytes."""
        return len(self.data)


def order_of(batch: Batch) -> int:
    """Return the order of a batch among all batches of its topic; a sort key."""
    return batch.order


@dataclass(frozen=True, slots=True)
class Send:
    """Send `batches` to `node` in one produce request, with the partition counts and the ids of their topics."""

    request_id: int
    node: int
    batches: tuple[Batch, ...]
    counts: Mapping[str, int]
    topic_ids: Mapping[str, UUID]
    """By topic name; NO_TOPIC_ID where the id is not known."""
    producer_id: int
    producer_epoch: int
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class Encode:
    """Place `rows` under `placement` and encode them into batches; report with `Batcher.encoded`."""

    job: int
    topic: str
    rows: Rows
    placement: Placement


@dataclass(frozen=True, slots=True)
class InitProducer:
    """Request a producer id, or the next epoch of this one."""

    producer_id: int
    producer_epoch: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """`batch` is in the log from `base_offset` on (-1 if the broker returned no offset)."""

    batch: Batch
    base_offset: int
    log_append_time_ms: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The records failed with `error`."""

    rows: Rows
    error: ApiError


@dataclass(slots=True)
class ProducerWork:
    """The work for the driver, to be done field by field in this order, each list from first to last."""

    outcomes: list[Delivered | Failed] = field(default_factory=list)
    encodes: list[Encode] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    """In the order in which requests must be written to each node's connection."""
    refresh: list[str] = field(default_factory=list)
    """Topics with metadata to refresh; report with `topic_known` or `topic_unknown`."""
    init_producer: InitProducer | None = None
    add_partitions: list[tuple[str, int]] = field(default_factory=list)
    """Partitions to add to the transaction before the first produce request to them; report with `partitions_added`."""
    wake_at_ms: int | None = None
    """The time of the next `drain` if nothing is reported before."""


@dataclass(frozen=True, slots=True)
class ProduceResult:
    """The broker's result for one batch of a produce request."""

    error: ErrorCode = ErrorCode.NONE
    base_offset: int = -1
    log_append_time_ms: int = -1
    message: str | None = None


@dataclass(frozen=True, slots=True)
class BatcherSettings:
    """The producer's settings for sending, by Kafka's names."""

    acks: int = -1
    enable_idempotence: bool = True
    transactional: bool = False
    linger_ms: int = 5
    batch_size: int = 1_000_000
    max_in_flight_requests_per_connection: int = 5
    delivery_timeout_ms: int = 120_000
    request_timeout_ms: int = 30_000
    max_block_ms: int = 60_000
    """How long records wait for a topic without metadata."""
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000
