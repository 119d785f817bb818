"""The inputs and outputs of the fetcher, as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, TopicPartition
from anabranch.machines.clients.key_ranges import Piece
from anabranch.machines.lineage import Lineage
from anabranch.machines.partition.sharing import Asked
from anabranch.records.filtering import SIZE_MAX

EARLIEST, LATEST = -2, -1
"""Timestamps that ask ListOffsets for the log start and the log end."""


@dataclass(frozen=True, slots=True)
class TopicView:
    """A topic at one moment: its layouts, leaders and epochs, consistent with each other."""

    name: str
    topic_id: UUID
    lineage: Lineage
    leaders: Mapping[int, int]
    """Partition to leader node, for every partition of the topic; -1 without a leader."""
    epochs: Mapping[int, int]
    elastic: bool
    ordered: bool = True
    """Whether gates apply: false if the topic or the consumer is configured without order."""
    removed: Mapping[int, int] = field(default_factory=dict)
    """Partitions that were removed and have not been created again, to the offset at which each ended."""
    cleanup: frozenset[str] = frozenset()
    """The topic's `cleanup.policy`; empty where it is not known."""

    @property
    def sent_count(self) -> int:
        """The partition count that a fetch request carries."""
        return self.lineage.count if self.elastic else COUNT_NOT_SAID


@dataclass(frozen=True, slots=True)
class FetchFrom:
    """A partition in a fetch request."""

    offset: int
    leader_epoch: int
    size_max: int
    topic_id: UUID
    count: int
    asked: Asked | None = None
    """What is wanted of the records; None for all."""


@dataclass(frozen=True, slots=True)
class RecordFilter:
    """Which records a poll wants: those with one of these keys, or with none of those, of a size in bytes."""

    keys: tuple[bytes, ...] = ()
    """The keys wanted; none: all."""
    keys_refused: tuple[bytes, ...] = ()
    size_min: int = 0
    """Of key and value together."""
    size_max: int = SIZE_MAX


class Fetch(NamedTuple):
    """Send a fetch to `node`; unchanged partitions of the session are left out."""

    request_id: int
    node: int
    session_id: int
    session_epoch: int
    partitions: Mapping[TopicPartition, FetchFrom]
    forgotten: Sequence[tuple[TopicPartition, UUID]]
    """Partitions that the session has and that are not fetched any more, each with the id of its topic."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask `node` for the offset at a timestamp, of each partition: (timestamp, leader epoch)."""

    request_id: int
    node: int
    partitions: Mapping[TopicPartition, tuple[int, int]]


class FetchResult(NamedTuple):
    """The broker's result for one fetched partition."""

    error: ErrorCode
    data: memoryview | None = None
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted: Sequence[tuple[int, int]] = ()
    """(producer id, first offset) of aborted transactions; only with read_committed."""
    folded: bool = False
    """Whether the records below the log start were folded back into another partition."""
    filtered_to: int = -1
    """The records are those that were asked for of all below this offset; -1 if the broker did not filter."""


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """Whole record batches of one partition, perhaps none; `data` may end with a partial batch."""

    data: memoryview
    next_offset: int
    aborted: tuple[tuple[int, int], ...] = ()
    """(producer id, first offset) of aborted transactions; their records must be skipped."""


@dataclass(frozen=True, slots=True)
class Deliverable:
    """Deliverable records: those of `fetched` at offsets `start` to `end`, `end` exclusive."""

    topic: str
    partition: int
    fetched: Fetched
    start: int
    end: int
    floor: Sequence[Piece] = ()
    """The next offsets to hand out, by key, where records of some keys are to be left out; none where all count."""


@dataclass(slots=True)
class ConsumerWork:
    """The work for the driver, to be done field by field in this order; responses may be reported in any order."""

    fetches: list[Fetch] = field(default_factory=list)
    """Report with `answered` or `lost`."""
    lookups: list[Lookup] = field(default_factory=list)
    """Report with `found` or `lost`."""
    refresh: list[str] = field(default_factory=list)
    """Topics with metadata to refresh; report with `topic_known` or `topic_unknown`."""
    wake_at_ms: int | None = None
    """The time of the next `drain` if nothing is reported before."""


@dataclass(frozen=True, slots=True)
class FetcherSettings:
    """The consumer's settings for fetching, by Kafka's names."""

    fetch_max_bytes: int = 50 * 1024 * 1024
    max_partition_fetch_bytes: int = 8 * 1024 * 1024
    auto_offset_reset: str = "latest"
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000
