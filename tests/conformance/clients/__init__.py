"""Other people's Kafka clients behind one interface, so that a test can be asked of each of them.

An adapter translates and decides nothing: what a client is asked for here is what one of its users would ask.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
FETCH_TIMEOUT_S = 30.0


class RefusedError(Exception):
    """The broker said no; the message carries what the client made of it."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a producer sends; without a timestamp the client takes the time of day."""

    key: bytes | None
    value: bytes | None
    timestamp: int | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()


@dataclass(frozen=True, slots=True)
class Fetched:
    """A record as a consumer got it."""

    offset: int
    record: Record


class Client(ABC):
    """One kind of client, connected to one broker."""

    name: str
    compressions: Sequence[str] = COMPRESSIONS
    chooses_timestamps = True
    sends_binary = True
    """Whether keys, values and headers may hold any byte."""
    sends_empty_bytes = True
    """Whether a key or value may be empty, which is not the same as absent."""
    sends_null_headers = True
    """Whether a header may have no value at all, rather than an empty one."""
    sends_falling_timestamps = True
    """Whether a record may be older than the one before it."""
    frames_snappy = False
    """Whether it writes Xerial's frames around snappy, as the Java client does."""
    reads_framed_snappy = True
    shows_header = staticmethod(lambda value: value)
    """What a reader gets to see of a header's value."""

    @abstractmethod
    def produce(
        self, topic: str, partition: int, records: Sequence[Record], *, compression: str, idempotent: bool
    ) -> Sequence[int]:
        """Produce with acks=all; return the offsets the client was told, in order of the records."""

    @abstractmethod
    def fetch(
        self, topic: str, ends: Mapping[int, int], *, starts: Mapping[int, int] | None = None
    ) -> dict[int, list[Fetched]]:
        """Fetch by assignment from `starts` (0 by default) until each partition's end."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""

    @classmethod
    def reads(cls, writer: type[Client], compression: str) -> bool:
        """Tell whether this client can decompress what that one writes."""
        framed = compression == "snappy" and writer.frames_snappy
        return compression in cls.compressions and (cls.reads_framed_snappy or not framed)


class Admin(ABC):
    """What a client can administer; each call raises RefusedError when the broker says no."""

    can_create_partitions = True
    can_delete_records = True
    can_alter_configs = True
    can_look_up_timestamps = True

    @abstractmethod
    def create_topic(self, topic: str, partitions: int, configs: Mapping[str, str]) -> None: ...

    @abstractmethod
    def delete_topic(self, topic: str) -> None: ...

    @abstractmethod
    def topics(self) -> set[str]: ...

    @abstractmethod
    def partitions(self, topic: str) -> list[int]:
        """Return the partitions that the topic's metadata shows."""

    @abstractmethod
    def configs(self, topic: str) -> Mapping[str, str | None]: ...

    def create_partitions(self, topic: str, count: int) -> None:
        raise AssertionError("this client cannot create partitions")

    def delete_records(self, topic: str, partition: int, before: int) -> None:
        raise AssertionError("this client cannot delete records")

    def alter_config(self, topic: str, name: str, value: str) -> None:
        raise AssertionError("this client cannot alter configs")

    def offsets(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return the first and the next offset of each partition."""
        raise AssertionError("this client cannot list offsets")

    def offset_at(self, topic: str, partition: int, timestamp: int) -> int:
        """Return the offset of the first record at or after the timestamp."""
        raise AssertionError("this client cannot look up timestamps")


class Waiting:
    """Collect what a consumer gets until every partition is complete, or say what is missing."""

    def __init__(self, name: str, ends: Mapping[int, int], starts: Mapping[int, int] | None) -> None:
        self._name = name
        self._ends = ends
        self._deadline = time.monotonic() + FETCH_TIMEOUT_S
        self.next = {partition: (starts or {}).get(partition, 0) for partition in ends}
        self.found: dict[int, list[Fetched]] = {partition: [] for partition in ends}

    def add(self, partition: int, offset: int, record: Record) -> None:
        """Take a record; one past the end that was asked for is dropped."""
        if offset < self._ends[partition] and offset >= self.next[partition]:
            self.found[partition].append(Fetched(offset, record))
            self.next[partition] = offset + 1

    @property
    def missing(self) -> dict[int, int]:
        """Return the next offset of each partition that is not complete."""
        if time.monotonic() > self._deadline:
            late = {p: f"{self.next[p]} of {end}" for p, end in self._ends.items() if self.next[p] < end}
            if late:
                raise AssertionError(f"{self._name} did not get all records within {FETCH_TIMEOUT_S} s: {late}")
        return {partition: self.next[partition] for partition, end in self._ends.items() if self.next[partition] < end}
