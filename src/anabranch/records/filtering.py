"""Record batches filtered by key, for several readers in one pass: the rules, and their reference in plain Python.

The key space is cut into cells, each of one reader (a target). A record goes to the reader in whose cell the place of
its key lies, a record without a key by its offset (keyspace.md, sections 1 and 5); further filters look at the key and
at the size of key and value. Of a batch a reader is given nothing if it wants none of the records, and otherwise a
batch that keeps base offset, last offset delta, timestamps, producer and attributes, with records that are unchanged
and keep their deltas; record count and checksum are new, and the records are not compressed. Control batches are given
to all readers, whole.

`kernels.scatter` does the same compiled; `runtime.native_scatter` calls that. Batches were examined when they were
appended; nothing outside of them is touched all the same, whatever they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from anabranch.base.errors import DecodeError
from anabranch.records.batch import (
    HEADER_SIZE,
    LENGTH_END,
    BatchHeader,
    ChecksumError,
    build,
    check,
    expanded,
    headers,
    parse_header,
)
from anabranch.records.compression import COMPRESSION_MASK, Bytes
from anabranch.records.hashing import fmix64, murmur2
from anabranch.records.rows import RecordSpan, iterate

PLACE_MAX = (1 << 63) - 1
SIZE_MAX = (1 << 31) - 1
_LOW_31, _LOW_32 = 0x7FFF_FFFF, 0xFFFF_FFFF
LOAD_BUCKETS = 64
"""The parts of a partition's interval whose load is counted."""


class Cell(NamedTuple):
    """The places of the key space from `start` to `last`, and the target of their records."""

    start: int
    last: int
    target: int


class Selection(NamedTuple):
    """Which records go where: `cells` ascend and do not overlap."""

    cells: tuple[Cell, ...]
    targets: int
    keys_wanted: tuple[bytes, ...] = ()
    """Only records with one of these keys, unless there is none."""
    keys_refused: tuple[bytes, ...] = ()
    size_min: int = 0
    """The fewest bytes of key and value together."""
    size_max: int = SIZE_MAX

    @property
    def asks_sizes(self) -> bool:
        """Whether some size is not accepted."""
        return self.size_min > 0 or self.size_max < SIZE_MAX


class Spread(NamedTuple):
    """What tells where a record counts: the topic's partition count at creation, and the partition's interval.

    The interval is that of the layout in which the record was appended; its size is a power of two.
    """

    initial: int
    held: tuple[int, int]

    def of(self, key: bytes | None, offset: int) -> int:
        """The place of a record in the key space (`machines.keyspace`)."""
        if key is None:
            return (fmix64(offset) & self.held[1] - self.held[0]) + self.held[0]
        murmur = murmur2(key)
        return int(f"{(murmur & _LOW_31) // self.initial:031b}"[::-1], 2) << 32 | fmix64(murmur) & _LOW_32


class Gathered(Protocol):
    """Batches that lie in many pieces."""

    def __len__(self) -> int:
        """Give their bytes."""

    def joined(self) -> memoryview:
        """Copy them into one piece."""


def in_one_piece(data: bytes | memoryview | Gathered) -> memoryview:
    """Give batches in one piece; they are copied if they are not."""
    return memoryview(data) if isinstance(data, bytes | memoryview) else data.joined()


class Scattered(NamedTuple):
    """What became of a run of batches."""

    data: Sequence[bytes | memoryview | Gathered]
    """The batches of each target."""
    records: Sequence[int]
    """The records of each target, those of control batches left out."""
    next_offset: int
    """The offset behind the last batch that was scattered; -1 without any."""
    size: int
    """Bytes of the batches that were scattered; those behind are left for the next call."""
    expanded_size: int
    """Bytes that compressed records among them expanded to."""


class Load:
    """How many records, and bytes of them, were seen in each part of an interval."""

    __slots__ = ("bytes", "records", "shift", "start")

    def __init__(self, held: tuple[int, int]) -> None:
        self.start = held[0]
        self.shift = max(0, (held[1] - held[0]).bit_length() - (LOAD_BUCKETS - 1).bit_length())
        self.records = [0] * LOAD_BUCKETS
        self.bytes = [0] * LOAD_BUCKETS

    def bucket(self, place: int) -> int:
        """The part in which a place lies, the first or the last for those outside of the interval."""
        return min(max(place - self.start >> self.shift, 0), LOAD_BUCKETS - 1)


class Scatter(Protocol):
    """Scatters the whole batches of a buffer; see `scatter`."""

    def __call__(
        self,
        batches: memoryview,
        selection: Selection,
        spread: Spread,
        *,
        record_size_max: int,
        work_size_max: int,
        load: Load | None = None,
    ) -> Scattered: ...


def scatter(
    batches: memoryview,
    selection: Selection,
    spread: Spread,
    *,
    record_size_max: int,
    work_size_max: int,
    load: Load | None = None,
) -> Scattered:
    """Scatter the whole batches of a buffer, all of one layout, in order.

    An incomplete last batch is left. `record_size_max` bounds what the records of one batch may expand to;
    ExpandsTooFarError beyond. Compressed batches are left as soon as more than `work_size_max` bytes were expanded, the
    first one excepted. `load` is counted, too. DecodeError at a malformed batch. A batch that is not what its checksum
    was made of ends the run; ChecksumError if it is the first.
    """
    made = [bytearray() for _ in range(selection.targets)]
    counts = [0] * selection.targets
    next_offset, done, expanded_size = -1, 0, 0
    for position, header in headers(batches):
        batch = batches[position : position + header.size]
        if made:
            try:
                check(batches, position, header)
            except ChecksumError:
                if done:
                    break
                raise
        if header.is_control:
            for each in made:
                each += batch
        elif header.record_count:
            if header.attributes & COMPRESSION_MASK and expanded_size > work_size_max:
                break
            plain = expanded(batch, header, record_size_max)
            if header.attributes & COMPRESSION_MASK:
                expanded_size += len(plain)
            _scatter_one(memoryview(plain), header, selection, spread, load, made, counts)
        next_offset, done = header.next_offset, position + header.size
    return Scattered([bytes(each) for each in made], counts, next_offset, done, expanded_size)


def _scatter_one(
    plain: memoryview,
    header: BatchHeader,
    selection: Selection,
    spread: Spread,
    load: Load | None,
    made: list[bytearray],
    counts: list[int],
) -> None:
    chosen: list[list[RecordSpan]] = [[] for _ in made]
    for record in iterate(plain, header.record_count, header.base_offset):
        key = None if record.key_end < 0 else bytes(plain[record.key_start : record.key_end])
        place = spread.of(key, header.base_offset + record.offset_delta)
        if load is not None:
            bucket = load.bucket(place)
            load.records[bucket] += 1
            load.bytes[bucket] += record.end - record.start
        target = next((cell.target for cell in selection.cells if cell.start <= place <= cell.last), None)
        if target is None or (selection.keys_wanted and key not in selection.keys_wanted):
            continue
        if key is not None and key in selection.keys_refused:
            continue
        value_size = max(0, record.value_end - record.value_start)
        if not selection.size_min <= value_size + (0 if key is None else len(key)) <= selection.size_max:
            continue
        chosen[target].append(record)
    for target, found in enumerate(chosen):
        if found:
            made[target] += with_records(header, b"".join(plain[each.start : each.end] for each in found), len(found))
            counts[target] += len(found)


def with_records(header: BatchHeader, records: Bytes, count: int) -> bytearray:
    """Make a batch like the one of `header`, of some of its records, which are not compressed."""
    return build(
        records,
        record_count=count,
        attributes=header.attributes & ~COMPRESSION_MASK,
        base_timestamp=header.base_timestamp,
        max_timestamp=header.max_timestamp,
        base_offset=header.base_offset,
        last_offset_delta=header.last_offset_delta,
        leader_epoch=header.leader_epoch,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
    )


def within(batches: memoryview, start: int, end: int, size_max: int = SIZE_MAX) -> tuple[memoryview, int]:
    """Take those batches, of a run in order, that end at `start` or behind it and begin below `end`.

    At most `size_max` bytes of them, but at least one batch if there is one. Returns them, and the bytes of those that
    end before `start`.
    """
    first = last = 0
    for position, header in headers(batches):
        if header.next_offset <= start:
            first = last = position + header.size
            continue
        if header.base_offset >= end or (last > first and position + header.size - first > size_max):
            break
        last = position + header.size
    return batches[first:last], first


def malformed(batches: memoryview, position: int) -> DecodeError:
    """The error about a batch whose records a kernel could not read."""
    if len(batches) - position < LENGTH_END + HEADER_SIZE:
        return DecodeError("a record batch is cut off")
    header = parse_header(batches, position)
    return DecodeError(f"the record batch at offset {header.base_offset} holds a malformed record")
