"""Rows on their way out, as single records or as columns: choose their partitions and encode them into batches.

The placement is `machines.placement.place` on an elastic topic, and the Java client's modulo on any other. A record
without a key gets a random hash, shared by about a batch of such records. The rule: the records of a partition keep
their input order, so rows that are extracted and placed again keep the order of every key.

Kernels hash, place and encode whole columns; single records are first gathered into columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.clients.sending import Encoded, Placement, Refused, Rows
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


class RecordMetadata(NamedTuple):
    """The partition and offset of a record; `offset` is -1 if the broker did not return one (acks=0)."""

    topic: str
    partition: int
    offset: int
    timestamp: int


class Promise(Protocol):
    """A future, of asyncio or of a thread."""

    def set_result(self, result: RecordMetadata, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...
    def done(self) -> bool: ...


Outgoing: TypeAlias = tuple[str, bytes | None, bytes | None, int, Sequence[Header], int | None, Promise, int]
"""One record: topic, key, value, timestamp, headers, partition, the promise of its outcome, its flush generation.

A plain tuple, which is made for every record in a tenth of the time of a named one; `OpenRecords` has the generations.
"""


class Records(list[Outgoing]):
    """Records that were sent one by one."""

    @property
    def record_count(self) -> int:
        """The number of records."""
        return len(self)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Records that were sent as columns; `delivery` counts those with an outcome."""

    keys: pa.Array | None
    values: pa.Array
    timestamps: NDArray[np.int64] | int
    headers: pa.Array | None
    partition: int | None
    """The partition for all rows, if the sender chose one."""
    delivery: Any

    @property
    def record_count(self) -> int:
        """The number of records."""
        return len(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class ColumnsPart:
    """A part of the rows of columns: rows `first` to `first + record_count` of those placed in `partition`."""

    columns: Columns
    partitions: NDArray[np.int32]
    partition: int
    first: int
    record_count: int

    @property
    def delivery(self) -> Any:
        """The outcome of the table of these rows."""
        return self.columns.delivery

    def taken_out(self) -> Columns:
        """Return the rows as columns of their own."""
        columns = self.columns
        rows = (self.partitions == self.partition).nonzero()[0][self.first : self.first + self.record_count]
        return replace(
            columns,
            keys=None if columns.keys is None else columns.keys.take(rows),
            values=columns.values.take(rows),
            timestamps=columns.timestamps if isinstance(columns.timestamps, int) else columns.timestamps[rows],
            headers=None if columns.headers is None else columns.headers.take(rows),
        )


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


def record_size(record: Outgoing) -> int:
    """Return an upper bound of the bytes a record takes in a batch, close to its real size."""
    _, key, value, _, headers, _, _, _ = record
    size = RECORD_OVERHEAD_MAX
    if key is not None:
        size += len(key)
    if value is not None:
        size += len(value)
    return size + headers_size(headers)


def headers_size(headers: Sequence[Header]) -> int:
    """Return an upper bound of the bytes that headers take. Raises `TypeError` for what are no headers."""
    try:
        return sum(10 + 4 * len(name) + (len(content) if content else 0) for name, content in headers)
    except (TypeError, ValueError):
        raise TypeError(f"headers are pairs of a name, and bytes or None; they are {headers!r}") from None


def encode_rows(
    rows: Any, placement: Placement, settings: EncodeSettings, chance: Chance
) -> tuple[list[Encoded], list[Refused]]:
    """Place rows and encode them into batches; each partition keeps the order of its rows."""
    if isinstance(rows, Records):
        return _encode_records(rows, placement, settings, chance)
    return _encode_columns(rows.taken_out() if isinstance(rows, ColumnsPart) else rows, placement, settings, chance)


def _encode_records(
    records: Records, placement: Placement, settings: EncodeSettings, chance: Chance
) -> tuple[list[Encoded], list[Refused]]:
    import numpy as np
    import pyarrow as pa

    chosen = [record[5] for record in records]
    headers = [record[4] for record in records]
    some_chosen = chosen.count(None) < len(chosen)
    refused: list[Refused] = []
    if some_chosen:
        for record, partition in zip(records, chosen, strict=True):
            if partition is not None and not 0 <= partition < placement.count:
                refused.append(Refused(Records([record]), _no_partition(partition, placement.count)))
    if refused:
        left = Records(
            record
            for record, partition in zip(records, chosen, strict=True)
            if partition is None or 0 <= partition < placement.count
        )
        encoded, too_large = _encode_records(left, placement, settings, chance) if left else ([], [])
        return encoded, [*refused, *too_large]
    columns = Columns(
        pa.array([record[1] for record in records], pa.binary()),
        pa.array([record[2] for record in records], pa.binary()),
        np.array([record[3] for record in records], np.int64),
        _listed(headers) if any(headers) else None,
        None,
        None,
    )
    partitions = _partitions(columns, placement, settings, chance)
    if some_chosen:
        for row, partition in enumerate(chosen):
            if partition is not None:
                partitions[row] = partition
    rows_of: dict[int, list[int]] = {}
    encoded = []
    for batch in _batches(columns, partitions, settings):
        rows = rows_of.get(batch.partition)
        if rows is None:
            rows = rows_of[batch.partition] = (partitions == batch.partition).nonzero()[0].tolist()
        part = Records(map(records.__getitem__, rows[: batch.record_count]))
        del rows[: batch.record_count]
        _keep(batch, part, settings, encoded, refused)
    return encoded, refused


def _encode_columns(
    columns: Columns, placement: Placement, settings: EncodeSettings, chance: Chance
) -> tuple[list[Encoded], list[Refused]]:
    import numpy as np

    if columns.partition is None:
        partitions = _partitions(columns, placement, settings, chance)
    elif 0 <= columns.partition < placement.count:
        partitions = np.full(columns.record_count, columns.partition, np.int32)
    else:
        return [], [Refused(columns, _no_partition(columns.partition, placement.count))]
    encoded: list[Encoded] = []
    refused: list[Refused] = []
    taken: dict[int, int] = {}
    for batch in _batches(columns, partitions, settings):
        first = taken.get(batch.partition, 0)
        taken[batch.partition] = first + batch.record_count
        part = ColumnsPart(columns, partitions, batch.partition, first, batch.record_count)
        _keep(batch, part, settings, encoded, refused)
    return encoded, refused


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


def _keep(
    batch: EncodedBatch, part: Rows, settings: EncodeSettings, encoded: list[Encoded], refused: list[Refused]
) -> None:
    if len(batch.data) > settings.max_request_size:
        refused.append(Refused(part, _too_large(len(batch.data), settings)))
    else:
        encoded.append(Encoded(batch.partition, part, batch.data))


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


def _listed(headers: Sequence[Sequence[Header]]) -> pa.Array:
    import pyarrow as pa

    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.array([[{"key": key, "value": value} for key, value in entries] for entries in headers], kind)


def _too_large(size: int, settings: EncodeSettings) -> ApiError:
    text = f"a record takes {size} bytes, and max.request.size is {settings.max_request_size}"
    return ApiError(ErrorCode.MESSAGE_TOO_LARGE, f"{text}; send smaller records or allow more")


def _no_partition(partition: int | None, count: int) -> ApiError:
    text = f"partition {partition} takes no records: the topic has {count} that do, 0 to {count - 1}"
    return ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text)
