"""The values of the tracker: a taken record, the room for more, and the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

from anabranch.base.ids import TopicPartition

Ranges = Sequence[tuple[int, int]]
"""Ranges of offsets, both bounds inclusive."""


class Item(Protocol):
    """A record, as the tracker sees it."""

    @property
    def offset(self) -> int:
        """The offset in the partition."""

    @property
    def key(self) -> bytes | None:
        """The key; None for a record without order."""

    @property
    def value(self) -> bytes | None:
        """The value; its size counts."""

    @property
    def lease(self) -> int:
        """The number of the record among all that were taken; unique."""


class Stage(Enum):
    """Where a taken record is."""

    WAITING = auto()
    """An earlier record of its key is not finished."""
    READY = auto()
    """To be given to the application next."""
    RUNNING = auto()
    """The application has it."""
    REJECTED = auto()
    """The application gave it back; it comes again at its time."""
    FINISHED = auto()
    """Done."""
    DROPPED = auto()
    """Forgotten with its partition, before it was finished."""


class Entry:
    """A taken record. `following` is the next record of its key, `first` the offset after the record before."""

    __slots__ = (
        "before",
        "deliveries",
        "first",
        "following",
        "key",
        "lease",
        "leaving",
        "offset",
        "partition",
        "record",
        "size",
        "stage",
        "started_ms",
    )

    def __init__(self, partition: TopicPartition, record: Item, first: int, before: int, size: int) -> None:
        self.partition = partition
        self.record: Any = record
        self.offset = record.offset
        self.key = record.key
        self.lease = record.lease
        self.first = first
        self.before = before
        """The bytes that were taken of the partition before this record."""
        self.size = size
        self.stage = Stage.READY
        self.leaving = False
        """Its key goes to another member: it does not run any more."""
        self.deliveries = 0
        self.started_ms = 0
        self.following: Entry | None = None


class Room(NamedTuple):
    """How much more may be taken of a partition: records before `end`, while fewer than `size` bytes are taken."""

    records: int
    size: int
    end: int


@dataclass(frozen=True, slots=True)
class TrackerSettings:
    """The bounds, by the names of the consumer's settings."""

    max_unfinished_records: int = 10_000
    max_unfinished_bytes: int = 64 * 1024 * 1024
    max_offsets_ahead: int = 100_000
    max_bytes_ahead: int = 256 * 1024 * 1024
