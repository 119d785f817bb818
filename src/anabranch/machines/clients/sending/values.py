"""What goes into the batcher and comes out of it, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_SEQUENCE
from anabranch.records.compression import Bytes


class Rows(Protocol):
    """Records that travel together; their representation is the encoder's business."""

    @property
    def record_count(self) -> int:
        """The number of records."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """How keys find their partition: by linear hashing on an elastic topic, by modulo on any other."""

    initial: int
    count: int
    elastic: bool = True

    @property
    def sent_count(self) -> int:
        """The partition count that a produce request carries."""
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


class BatchState(Enum):
    """Whether a batch is in the log, as far as the producer knows."""

    FRESH = auto()
    SENT = auto()
    UNCERTAIN = auto()


@dataclass(slots=True, eq=False)
class Batch:
    """One record batch on its way to one partition."""

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
    """A response was lost once since the batch was last known not to be in the log."""

    @property
    def size(self) -> int:
        """Bytes of the batch."""
        return len(self.data)


def order_of(batch: Batch) -> int:
    """The place of a batch among all batches of its topic; a sort key."""
    return batch.order


@dataclass(frozen=True, slots=True)
class Send:
    """Send `batches` to `node` in one produce request, with the partition counts of their topics."""

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
    """`batch` is in the log from `base_offset` on (-1 where the broker gave no offset)."""

    batch: Batch
    base_offset: int
    log_append_time_ms: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The records are given up; `error` is the reason."""

    rows: Rows
    error: ApiError


@dataclass(slots=True)
class ProducerWork:
    """What the driver carries out now, field by field in this order, each list from its first entry to its last."""

    outcomes: list[Delivered | Failed] = field(default_factory=list)
    encodes: list[Encode] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    """In the order in which requests must be written to each node's connection."""
    refresh: list[str] = field(default_factory=list)
    """Topics whose metadata is to be asked for; report with `topic_known` or `topic_unknown`."""
    init_producer: InitProducer | None = None
    add_partitions: list[tuple[str, int]] = field(default_factory=list)
    """Partitions to add to the transaction before anything is sent to them; report with `partitions_added`."""
    wake_at_ms: int | None = None
    """When to drain again if nothing happens before."""


@dataclass(frozen=True, slots=True)
class ProduceResult:
    """The broker's result for one batch of a produce request."""

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
    """How long records wait for a topic whose metadata cannot be had."""
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000
