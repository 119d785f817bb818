"""A strict decoder of produced record batches, written from Kafka's protocol guide alone, with other people's codecs.

The fuzzers' judge: what this takes apart without an objection is what a broker must accept, and nothing else. It shares
nothing with the package: numbers are read one digit at a time into Python's unbounded integers, and every rule is a
sentence of its own. https://kafka.apache.org/documentation/#messageformat, KIP-98, KIP-82 (headers), KIP-32.
"""

from __future__ import annotations

import gzip
import io
import struct
import zlib
from dataclasses import dataclass, field

import crc32c
import lz4.frame
import snappy
import zstandard

INT32, INT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)
MAX_RECORDS = 1_000_000


class ObjectionError(Exception):
    """The batch is none that a client may send."""


@dataclass
class Record:
    """One record, as a reader is to see it."""

    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[bytes, bytes | None]] = field(default_factory=list)


class Bytes:
    """Bytes that are read from the front."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, size: int) -> bytes:
        """Take the next bytes."""
        if not 0 <= size <= len(self.data):
            raise ObjectionError(f"{size} bytes where {len(self.data)} are left")
        taken, self.data = self.data[:size], self.data[size:]
        return taken

    def number(self, bounds: tuple[int, int]) -> int:
        """Take a number: digits to the base of 128, the lowest first, then 0, -1, 1, -2 and so on."""
        digits: list[int] = []
        most = 5 if bounds is INT32 else 10
        while True:
            (digit,) = self.take(1)
            digits.append(digit % 128)
            if digit < 128:
                break
            if len(digits) == most:
                raise ObjectionError("a number of too many digits")
        folded = sum(digit * 128**place for place, digit in enumerate(digits))
        value = -(folded + 1) // 2 if folded % 2 else folded // 2
        if not bounds[0] <= value <= bounds[1]:
            raise ObjectionError(f"the number {value} is out of range")
        return value

    def nullable(self) -> bytes | None:
        """Take bytes that follow their size; -1 is null."""
        size = self.number(INT32)
        return None if size == -1 else self.take(size)


def decode(
    batch: bytes, *, size_max: int, earliest: int = INT64[0], latest: int = INT64[1], keyed: bool = False
) -> list[Record]:
    """Take one batch apart. ObjectionError, whatever is wrong with it."""
    whole = Bytes(batch)
    header = whole.take(61)
    base_offset, length, _, magic, crc = struct.unpack(">qiibI", header[:21])
    attributes, last_delta, base_timestamp, _ = struct.unpack(">hiqq", header[21:43])
    producer_id, epoch, sequence, count = struct.unpack(">qhii", header[43:])
    if magic != 2 or length != len(batch) - 12 or base_offset < 0:
        raise ObjectionError("another format, or another size")
    if crc32c.crc32c(batch[21:]) != crc:
        raise ObjectionError("the checksum is of other bytes")
    if attributes not in range(5) and attributes - 16 not in range(5):
        raise ObjectionError("attributes that are no client's")
    if not 1 <= count <= MAX_RECORDS or last_delta != count - 1:
        raise ObjectionError("a count that does not fit")
    if base_offset + last_delta > INT64[1]:
        raise ObjectionError("offsets that are too large")
    if producer_id == -1:
        if attributes >= 16:
            raise ObjectionError("a transaction of nobody")
    elif not 0 <= producer_id < 2**40 or epoch < 0 or sequence < 0:
        raise ObjectionError("a producer that there cannot be")
    rows = Bytes(expand(attributes % 16, whole.data, size_max))
    records = [_record(rows, place, base_timestamp) for place in range(count)]
    if rows.data:
        raise ObjectionError("bytes behind the last record")
    for record in records:
        if record.timestamp != -1 and not earliest <= record.timestamp <= latest:
            raise ObjectionError("a time that the topic does not take")
        if keyed and record.key is None:
            raise ObjectionError("no key")
    return records


def _record(rows: Bytes, place: int, base_timestamp: int) -> Record:
    one = Bytes(rows.take(rows.number(INT32)))
    one.take(1)
    timestamp = base_timestamp + one.number(INT64)
    if not INT64[0] <= timestamp <= INT64[1]:
        raise ObjectionError("a time beyond 64 bits")
    if one.number(INT32) != place:
        raise ObjectionError("offsets with holes, or out of order")
    record = Record(timestamp, one.nullable(), one.nullable())
    headers = one.number(INT32)
    if headers < 0:
        raise ObjectionError("fewer than no headers")
    for _ in range(headers):
        name = one.nullable()
        if name is None:
            raise ObjectionError("a header without a name")
        record.headers.append((name, one.nullable()))
    if one.data:
        raise ObjectionError("bytes behind the headers")
    return record


def expand(codec: int, data: bytes, size_max: int) -> bytes:
    """Decompress the records of a batch."""
    try:
        plain = _CODECS[codec](data)
    except _REFUSALS as error:
        raise ObjectionError(f"no content of codec {codec}: {error}") from None
    if codec and len(plain) > size_max:
        raise ObjectionError("a bomb")
    return plain


def _snappy(data: bytes) -> bytes:
    if data[:8] != b"\x82SNAPPY\0":
        return bytes(snappy.uncompress(data))
    blocks, plain = Bytes(data), b""
    blocks.take(16)
    while blocks.data:
        (size,) = struct.unpack(">i", blocks.take(4))
        plain += snappy.uncompress(blocks.take(size))
    return plain


def _zstd(data: bytes) -> bytes:
    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)) as reader:
        return bytes(reader.read())


_REFUSALS = (OSError, EOFError, RuntimeError, zlib.error, snappy.UncompressError, zstandard.ZstdError)
_CODECS = {0: bytes, 1: gzip.decompress, 2: _snappy, 3: lz4.frame.decompress, 4: _zstd}
