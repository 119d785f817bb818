"""Records that were sent one by one, gathered into columns, and the way back: from batches to the outcomes of each.

A chunk of the batcher is `Records`: parts, in the order of their records. A part is one record with a promise of its
own, or the columns of many that other threads handed over (`intake`). They become one set of columns when the chunk is
encoded. A `RecordDelivery` knows which receiver each row of these columns belongs to.

The rule: a record that cannot be put into a column fails alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from operator import index
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client.producer.delivery import fail_promise
from anabranch.client.producer.rows import NOT_CHOSEN, Columns, ColumnsPart, Fate, Header, RecordMetadata, headers_size
from anabranch.records.batch import RECORD_OVERHEAD_MAX

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray

_INT64_END = 1 << 63


NO_NAME = "the name of a topic is a str that has a form in UTF-8"


class Promise(Protocol):
    """A future, of asyncio or of a thread."""

    def set_result(self, result: RecordMetadata, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...
    def done(self) -> bool: ...


class Receiver(Protocol):
    """Takes the outcomes of records, by their places: 0 for the first of them, and so on."""

    def delivered(self, places: NDArray[np.int64], fate: Fate, times: NDArray[np.int64] | int) -> None:
        """Take in what became of records of one batch, in the order of the batch."""
        ...

    def failed(self, places: NDArray[np.int64], error: Exception) -> None:
        """Take in that records failed."""
        ...


class Options:
    """What most records lack: a timestamp of the sender's, headers, a chosen partition."""

    __slots__ = ("headers", "partition", "timestamp")

    def __init__(self, timestamp: int, headers: Sequence[Header], partition: int | None) -> None:
        """Raises `TypeError` or `ValueError` for values that no record can have."""
        self.timestamp = _int64(timestamp, "timestamp")
        self.headers = tuple(headers) if headers else ()
        self.partition = NOT_CHOSEN if partition is None else _int64(partition, "partition")
        headers_size(self.headers)


Outgoing: TypeAlias = tuple[str, bytes | None, bytes | None, int, Sequence[Header], int | None, Promise]
"""One record: topic, key, value, timestamp in ms, headers, partition, the promise of its outcome.

A plain tuple, which is made for every record in a tenth of the time of a named one.
"""


def is_name(topic: object) -> bool:
    """Whether a request can name a topic so; otherwise no request could be made for it and the topics beside it."""
    if not isinstance(topic, str):
        return False
    try:
        topic.encode()
    except UnicodeEncodeError:
        return False
    return True


def record_size(record: Outgoing) -> int:
    """Return an upper bound of the bytes a record takes in a batch, close to its real size."""
    _, key, value, _, headers, _, _ = record
    size = RECORD_OVERHEAD_MAX
    if key is not None:
        size += len(key)
    if value is not None:
        size += len(value)
    return size + headers_size(headers) if headers else size


class Gathered(NamedTuple):
    """Many records as columns, with the receiver of their outcomes."""

    keys: pa.Array
    values: pa.Array
    timestamps: NDArray[np.int64]
    headers: pa.Array | None
    """Of each record, if any has some."""
    partitions: NDArray[np.int64] | None
    """Of each record, or NOT_CHOSEN, if any partition is chosen."""
    sizes: NDArray[np.int64]
    """An upper bound of the bytes that each takes in a batch, close to its real size."""
    receiver: Receiver
    places: NDArray[np.int64]
    """The number of each record, as the receiver counts them."""

    @property
    def record_count(self) -> int:
        """The number of records."""
        return len(self.values)

    def cut(self, size_max: int) -> Iterator[tuple[Gathered, int]]:
        """Yield the records in slices, which share their memory, with the size of each.

        Slices are about as large as each other, and smaller than twice `size_max` bytes as far as records allow.
        """
        import numpy as np

        ends = np.cumsum(self.sizes)
        total = int(ends[-1])
        slices = max(1, total // size_max)
        bounds = np.searchsorted(ends, np.arange(1, slices) * (total // slices)).tolist()
        first, size = 0, 0
        for end in (*bounds, len(ends)):
            if end > first:
                rows = slice(first, end)
                below = int(ends[end - 1])
                yield (
                    Gathered(
                        self.keys[rows],
                        self.values[rows],
                        self.timestamps[rows],
                        None if self.headers is None else self.headers[rows],
                        None if self.partitions is None else self.partitions[rows],
                        self.sizes[rows],
                        self.receiver,
                        self.places[rows],
                    ),
                    below - size,
                )
                first, size = end, below


def gather(
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
    times: Sequence[float | Options],
    receiver: Receiver,
    places: NDArray[np.int64],
) -> Iterator[Gathered | tuple[NDArray[np.int64], ApiError]]:
    """Put records into columns, in order; those that fit into none are yielded as places with an error.

    `times` are seconds since 1970, or the options of a record that has some.
    """
    import numpy as np

    try:
        headers: Sequence[Sequence[Header]] | None = None
        partitions: NDArray[np.int64] | None = None
        try:
            timestamps = (np.fromiter(times, np.float64, len(times)) * 1000).astype(np.int64)
        except TypeError:
            options = [one if isinstance(one, Options) else Options(int(one * 1000), (), None) for one in times]
            timestamps = np.array([one.timestamp for one in options], np.int64)
            headers = [one.headers for one in options]
            partitions = np.array([one.partition for one in options], np.int64)
        yield _columns(keys, values, timestamps, headers, partitions, receiver, places)
    except Exception as error:
        if len(places) == 1:
            yield places, ApiError(ErrorCode.INVALID_RECORD, f"the record cannot be encoded: {error}")
            return
        middle = len(places) // 2
        for part in (slice(None, middle), slice(middle, None)):
            yield from gather(keys[part], values[part], times[part], receiver, places[part])


def _columns(
    keys: Sequence[bytes | None],
    values: Sequence[bytes | None],
    timestamps: NDArray[np.int64],
    headers: Sequence[Sequence[Header]] | None,
    partitions: NDArray[np.int64] | None,
    receiver: Receiver,
    places: NDArray[np.int64],
) -> Gathered:
    import numpy as np

    sizes = np.full(len(places), RECORD_OVERHEAD_MAX, np.int64)
    columns = []
    for contents in (keys, values):
        column = _binary(contents)
        offsets = np.frombuffer(column.buffers()[1], np.int32, len(places) + 1)
        sizes += offsets[1:] - offsets[:-1]
        columns.append(column)
    listed = None
    if headers is not None and any(headers):
        listed = _listed(headers)
        sizes += np.fromiter(map(headers_size, headers), np.int64, len(headers))
    if partitions is not None and (partitions == NOT_CHOSEN).all():
        partitions = None
    return Gathered(columns[0], columns[1], timestamps, listed, partitions, sizes, receiver, places)


def _binary(contents: Sequence[bytes | None]) -> pa.Array:
    """Return a column of bytes. Raises `OverflowError` for more than fit into one."""
    import pyarrow as pa

    column = pa.array(contents, pa.binary())
    if isinstance(column, pa.ChunkedArray):
        raise OverflowError("more than 2 GiB")
    return column


class Promises:
    """Receives the outcomes of records that have a promise each."""

    __slots__ = ("_promises",)

    def __init__(self, promises: Sequence[Promise]) -> None:
        self._promises = promises

    def delivered(self, places: NDArray[np.int64], fate: Fate, times: NDArray[np.int64] | int) -> None:
        """Keep the promises of records of one batch."""
        topic, partition, offsets = fate
        each = places.tolist()
        known = repeat(offsets) if isinstance(offsets, int) else offsets.tolist()
        when = repeat(times) if isinstance(times, int) else times.tolist()
        for place, offset, time in zip(each, known, when, strict=False):
            promise = self._promises[place]
            if not promise.done():
                promise.set_result(RecordMetadata(topic, partition, offset, time))

    def failed(self, places: NDArray[np.int64], error: Exception) -> None:
        """Fail the promises of records."""
        for place in places.tolist():
            fail_promise(self._promises[place], error)


class RecordDelivery:
    """The outcomes of a chunk of records that were sent one by one, for their receivers."""

    __slots__ = ("_firsts", "_parts", "generation")

    def __init__(self, generation: int, parts: Sequence[Gathered]) -> None:
        self.generation = generation
        self._parts = [(part.receiver, part.places) for part in parts]
        self._firsts = list(accumulate((part.record_count for part in parts), initial=0))

    def complete(self, part: ColumnsPart, topic: str, base_offset: int, append_time_ms: int) -> None:
        """Complete records of one batch."""
        import numpy as np

        times = part.times() if append_time_ms < 0 else append_time_ms
        offsets = np.arange(base_offset, base_offset + part.record_count) if base_offset >= 0 else base_offset
        for receiver, places, rows in self._shares(part.numbers()):
            fate = Fate(topic, part.partition, offsets if isinstance(offsets, int) else offsets[rows])
            receiver.delivered(places, fate, times if isinstance(times, int) else times[rows])

    def reject(self, rows: Columns | ColumnsPart, error: Exception) -> None:
        """Fail records."""
        for receiver, places, _ in self._shares(rows.numbers()):
            receiver.failed(places, error)

    def _shares(self, numbers: NDArray[np.int64]) -> Iterator[tuple[Receiver, NDArray[np.int64], slice]]:
        """Yield each receiver that has some of the rows, by its own numbers, and where they are among `numbers`."""
        if len(self._parts) == 1:
            ((receiver, places),) = self._parts
            yield receiver, places[numbers], slice(None)
            return
        import numpy as np

        bounds = np.searchsorted(numbers, self._firsts).tolist()
        for (receiver, places), first, lo, hi in zip(self._parts, self._firsts, bounds, bounds[1:], strict=False):
            if lo < hi:
                yield receiver, places[numbers[lo:hi] - first], slice(lo, hi)


class Records:
    """A chunk of records that were sent one by one: single ones with their promises, and columns of many, in order."""

    __slots__ = ("_parts", "generation", "record_count")

    def __init__(self, parts: Sequence[Outgoing | Gathered], generation: int) -> None:
        self.generation = generation
        self.record_count = 0
        self._parts: list[Outgoing | Gathered] = []
        self.extend(parts)

    def extend(self, parts: Sequence[Outgoing | Gathered]) -> None:
        """Append records."""
        self._parts.extend(parts)
        for part in parts:
            self.record_count += part.record_count if isinstance(part, Gathered) else 1

    def fail(self, error: Exception) -> None:
        """Fail all records."""
        for part in self._parts:
            if isinstance(part, Gathered):
                part.receiver.failed(part.places, error)
            else:
                fail_promise(part[6], error)

    def columns(self) -> Columns:
        """Put all records into columns. Raises an exception if one of them does not fit."""
        parts: list[Gathered] = []
        single: list[Outgoing] = []
        for part in self._parts:
            if not isinstance(part, Gathered):
                single.append(part)
                continue
            if single:
                parts.append(_single(single))
                single = []
            parts.append(part)
        if single:
            parts.append(_single(single))
        delivery = RecordDelivery(self.generation, parts)
        return _joined(parts, delivery)


def _single(records: Sequence[Outgoing]) -> Gathered:
    """Put records with promises into columns."""
    import numpy as np

    _, keys, values, timestamps, headers, partitions, promises = zip(*records, strict=True)
    chosen = np.array([NOT_CHOSEN if one is None else one for one in partitions], np.int64)
    times = np.array(timestamps, np.int64)
    places = np.arange(len(records))
    return _columns(keys, values, times, headers, chosen, Promises(promises), places)


def _joined(parts: Sequence[Gathered], delivery: RecordDelivery) -> Columns:
    import numpy as np
    import pyarrow as pa

    if len(parts) == 1:
        (part,) = parts
        return Columns(part.keys, part.values, part.timestamps, part.headers, part.partitions, delivery)
    headers: pa.Array | None = None
    partitions: NDArray[np.int64] | None = None
    if any(part.headers is not None for part in parts):
        headers = pa.concat_arrays(
            [_listed([()] * part.record_count) if part.headers is None else part.headers for part in parts]
        )
    if any(part.partitions is not None for part in parts):
        partitions = np.concatenate(
            [np.full(part.record_count, NOT_CHOSEN) if part.partitions is None else part.partitions for part in parts]
        )
    return Columns(
        pa.concat_arrays([part.keys for part in parts]),
        pa.concat_arrays([part.values for part in parts]),
        np.concatenate([part.timestamps for part in parts]),
        headers,
        partitions,
        delivery,
    )


def _listed(headers: Sequence[Sequence[Header]]) -> pa.Array:
    import pyarrow as pa

    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    return pa.array([[{"key": key, "value": value} for key, value in entries] for entries in headers], kind)


def _int64(number: object, name: str) -> int:
    try:
        found = index(number)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"a {name} is an integer, not {type(number).__name__}") from None
    if not -_INT64_END < found < _INT64_END:
        raise ValueError(f"a {name} is an integer of 64 bits, not {found}")
    return found
