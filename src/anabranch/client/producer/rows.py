"""Rows on their way out, as single records or as columns: choose their partitions and encode them into batches.

The placement is `machines.placement.place` on an elastic topic, and the Java client's modulo on any other. A record
without a key gets a random hash, shared by about a batch of such records. The rule: the records of a partition keep
their input order, so rows that are extracted and placed again keep the order of every key.

Kernels hash, place and encode whole columns; records that were sent one by one come as columns, too (`records`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.clients.sending import Encoded, Placement, Refused
from anabranch.machines.placement import place
from anabranch.records.batch import RECORD_OVERHEAD_MAX
from anabranch.records.compression import Compression

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

    from anabranch.records.arrow.encode import EncodedBatch

Header = tuple[str, bytes | None]
Chance = Callable[[], int]
"""A random placement hash, 0 to 2**31 - 1."""
NOT_CHOSEN = -(1 << 63)
"""Stands for the partition of a record whose sender chose none."""


class RecordMetadata(NamedTuple):
    """The partition and offset of a record; `offset` is -1 if the broker did not return one (acks=0)."""

    topic: str
    partition: int
    offset: int
    timestamp: int


class Fate(NamedTuple):
    """What became of a batch's records that were sent one by one."""

    topic: str
    partition: int
    offsets: NDArray[np.int64] | int
    """The offset of each, or -1 for all if the broker did not return one."""


class Delivery(Protocol):
    """Takes the outcomes of columns."""

    @property
    def generation(self) -> int:
        """The flush generation of the rows (`OpenRecords`)."""
        ...

    def complete(self, part: ColumnsPart, topic: str, base_offset: int, append_time_ms: int) -> None:
        """Take in that a part of the rows was appended from `base_offset` on (-1: unknown offset).

        `append_time_ms` is the time that the broker gave the records, or -1.
        """
        ...

    def reject(self, rows: Columns | ColumnsPart, error: Exception) -> None:
        """Take in that all of the rows, or a part of them, failed."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Records as columns."""

    keys: pa.Array | None
    values: pa.Array
    timestamps: NDArray[np.int64] | int
    headers: pa.Array | None
    partition: NDArray[np.int64] | int | None
    """The partition for all rows, or of each (or NOT_CHOSEN), if the sender chose one."""
    delivery: Delivery
    rows: NDArray[np.int64] | None = None
    """The rows by the delivery's numbers, if these are not 0, 1, and so on."""

    @property
    def record_count(self) -> int:
        """The number of records."""
        return len(self.values)

    @property
    def generation(self) -> int:
        """The flush generation of the rows."""
        return self.delivery.generation

    def fail(self, error: Exception) -> None:
        """Fail all rows."""
        self.delivery.reject(self, error)

    def taken(self, rows: NDArray[np.int64]) -> Columns:
        """Return some of the rows as columns of their own."""
        chosen = self.partition
        return replace(
            self,
            keys=None if self.keys is None else self.keys.take(rows),
            values=self.values.take(rows),
            timestamps=self.timestamps if isinstance(self.timestamps, int) else self.timestamps[rows],
            headers=None if self.headers is None else self.headers.take(rows),
            partition=chosen if chosen is None or isinstance(chosen, int) else chosen[rows],
            rows=rows if self.rows is None else self.rows[rows],
        )

    def numbers(self) -> NDArray[np.int64]:
        """Return the numbers of all rows, as the delivery counts them."""
        import numpy as np

        return np.arange(self.record_count) if self.rows is None else self.rows


class Placed:
    """The rows of columns with their partitions."""

    __slots__ = ("_firsts", "_order", "partitions")

    def __init__(self, partitions: NDArray[np.int32] | NDArray[np.int64]) -> None:
        self.partitions = partitions
        self._order: NDArray[np.int64] | None = None
        self._firsts: dict[int, int] = {}

    def rows(self, partition: int, first: int, count: int) -> NDArray[np.int64]:
        """Return `count` of the rows in a partition, in their order, behind the `first` ones."""
        import numpy as np

        if self._order is None:
            partitions = self.partitions
            small = 0 <= int(partitions.min()) <= int(partitions.max()) < 1 << 16
            # Numbers of 16 bits are sorted in linear time.
            order = np.argsort(partitions.astype(np.uint16) if small else partitions, kind="stable")
            found, firsts = np.unique(partitions[order], return_index=True)
            self._firsts = dict(zip(found.tolist(), firsts.tolist(), strict=True))
            self._order = order
        first += self._firsts[partition]
        return self._order[first : first + count]


@dataclass(frozen=True, slots=True, eq=False)
class ColumnsPart:
    """A part of the rows of columns: rows `first` to `first + record_count` of those placed in `partition`."""

    columns: Columns
    placed: Placed
    partition: int
    first: int
    record_count: int

    @property
    def generation(self) -> int:
        """The flush generation of the rows."""
        return self.columns.generation

    def fail(self, error: Exception) -> None:
        """Fail the rows."""
        self.columns.delivery.reject(self, error)

    def delivered(self, topic: str, base_offset: int, append_time_ms: int) -> None:
        """Complete the rows: they were appended from `base_offset` on."""
        self.columns.delivery.complete(self, topic, base_offset, append_time_ms)

    def places(self) -> NDArray[np.int64]:
        """Return the places of the rows in the columns."""
        return self.placed.rows(self.partition, self.first, self.record_count)

    def numbers(self) -> NDArray[np.int64]:
        """Return the numbers of the rows, as the delivery counts them."""
        numbers = self.columns.rows
        return self.places() if numbers is None else numbers[self.places()]

    def times(self) -> NDArray[np.int64] | int:
        """Return the timestamps of the rows, or the one of all."""
        times = self.columns.timestamps
        return times if isinstance(times, int) else times[self.places()]


class ColumnNames(NamedTuple):
    """The table's columns with the records' key, value, headers and timestamp; None for a missing column."""

    key: str | None = "key"
    value: str | None = "value"
    headers: str | None = None
    timestamp: str | None = None


@dataclass(frozen=True, slots=True)
class EncodeSettings:
    """The producer's settings for building batches, by Kafka's names."""

    compression: Compression = Compression.NONE
    batch_size: int = 1_000_000
    max_request_size: int = 1_048_576


def headers_size(headers: Sequence[Header]) -> int:
    """Return an upper bound of the bytes that headers take. Raises `TypeError` for what are no headers."""
    try:
        return sum(10 + 4 * len(name) + (len(content) if content else 0) for name, content in headers)
    except (TypeError, ValueError):
        raise TypeError(f"headers are pairs of a name, and bytes or None; they are {headers!r}") from None


def encode_columns(
    columns: Columns | ColumnsPart, placement: Placement, settings: EncodeSettings, chance: Chance
) -> tuple[list[Encoded], list[Refused]]:
    """Place rows and encode them into batches; each partition keeps the order of its rows."""
    import numpy as np

    if isinstance(columns, ColumnsPart):
        columns = columns.columns.taken(columns.places())
    chosen = columns.partition
    refused: list[Refused] = []
    if chosen is None:
        partitions = _partitions(columns, placement, settings, chance)
    elif not isinstance(chosen, int):
        wrong = (chosen != NOT_CHOSEN) & ((chosen < 0) | (chosen >= placement.count))
        if wrong.any():
            refused = _refused(columns, chosen, wrong, placement.count)
            right = (~wrong).nonzero()[0]
            if not len(right):
                return [], refused
            columns, chosen = columns.taken(right), chosen[right]
        hashed = _partitions(columns, placement, settings, chance)
        partitions = np.where(chosen == NOT_CHOSEN, hashed, chosen).astype(np.int32)
    elif 0 <= chosen < placement.count:
        partitions = np.full(columns.record_count, chosen, np.int32)
    else:
        return [], [Refused(columns, _no_partition(chosen, placement.count))]
    placed = Placed(partitions)
    encoded: list[Encoded] = []
    taken: dict[int, int] = {}
    for batch in _batches(columns, partitions, settings):
        first = taken.get(batch.partition, 0)
        taken[batch.partition] = first + batch.record_count
        part = ColumnsPart(columns, placed, batch.partition, first, batch.record_count)
        if len(batch.data) > settings.max_request_size:
            refused.append(Refused(part, _too_large(len(batch.data), settings)))
        else:
            encoded.append(Encoded(batch.partition, part, batch.data))
    return encoded, refused


def _refused(columns: Columns, chosen: NDArray[np.int64], wrong: NDArray[np.bool_], count: int) -> list[Refused]:
    """Return the rows for partitions that take no records, by partition."""
    import numpy as np

    placed = Placed(chosen)
    numbers, counts = np.unique(chosen[wrong], return_counts=True)
    return [
        Refused(ColumnsPart(columns, placed, partition, 0, rows), _no_partition(partition, count))
        for partition, rows in zip(numbers.tolist(), counts.tolist(), strict=True)
    ]


def _batches(columns: Columns, partitions: NDArray[np.int32], settings: EncodeSettings) -> list[EncodedBatch]:
    from anabranch.records.arrow.encode import encode_partitioned

    return encode_partitioned(
        columns.keys,
        columns.values,
        columns.timestamps,
        columns.headers,
        partitions,
        compression=settings.compression,
        batch_size_max=settings.max_request_size,
    )


def _partitions(columns: Columns, placement: Placement, settings: EncodeSettings, chance: Chance) -> NDArray[np.int32]:
    """Return the partition of every row; rows without a key share a random hash for about a batch."""
    import numpy as np

    from anabranch.records.arrow.encode import hash_keys

    count = columns.record_count
    keys = columns.keys
    hashes: NDArray[np.int32]
    if keys is not None and keys.null_count == 0:
        hashes = hash_keys(keys)
    else:
        row_size = columns.values.nbytes // max(1, count) + RECORD_OVERHEAD_MAX
        run = max(1, settings.batch_size // row_size)
        hashes = np.repeat(np.array([chance() for _ in range(0, count, run)], np.int32), run)[:count]
        if keys is not None and keys.null_count < count:
            of_keys = hash_keys(keys)
            hashes = np.where(of_keys < 0, hashes, of_keys)
    if placement.elastic:
        return place(hashes, placement.initial, placement.count)
    return hashes % placement.count


def _too_large(size: int, settings: EncodeSettings) -> ApiError:
    text = f"a record takes {size} bytes, and max.request.size is {settings.max_request_size}"
    return ApiError(ErrorCode.MESSAGE_TOO_LARGE, f"{text}; send smaller records or allow more")


def _no_partition(partition: int | None, count: int) -> ApiError:
    text = f"partition {partition} takes no records: the topic has {count} that do, 0 to {count - 1}"
    return ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
