"""Hostile record batches: each field of header and records mutated, under a right checksum, with every codec.

    python -m tests.fuzz.batches --count 1000000 --seed 7

Each batch is judged by a strict decoder (`strict`), by the broker's check in plain Python, and by the same with machine
code. All must agree, and both checks in every word. What is accepted is read back by the compiled kernels of our
consumers, which must find what the strict decoder found. Of what is refused some are read, too, as if they lay in a log
from before batches were checked: no reader knows another error than DecodeError. No check may raise, or take longer
than STEP_MAX_S.

A batch is made by `Random(f"{seed}/{number}")`, so that a failure names what repeats it.
"""

from __future__ import annotations

import argparse
import contextlib
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any, NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.machines.partition.appending import Refuse
from anabranch.machines.partition.checking import CheckedBatch, check_batches, expanded_size_max
from anabranch.records.arrow.decode import decode
from anabranch.records.batch import BatchHeader, parse_end_transaction_marker, parse_header, stamp, stamp_crc
from anabranch.records.compression import Compression, compress
from anabranch.records.examination import Examine, examine
from anabranch.records.key_values import decode_pairs
from anabranch.records.timestamps import TimestampAndOffset, first_at_or_after, first_of_max
from anabranch.runtime import native
from anabranch.storage.log.batch_files import records as keyed
from anabranch.storage.next_record import first_record
from tests.fuzz.strict import ObjectionError, Record
from tests.fuzz.strict import decode as strictly

NOW_MS = 1_700_000_000_000
STEP_MAX_S = 0.010
READ_MAX_S = 1.0
READ_TOGETHER = 200
READ_ANYWAY_EVERY = 5
"""Of the refused batches one of so many is shown to every reader."""
_HEADER = struct.Struct(">qiibIhiqqqhii")
_SIZES = (8, 4, 4, 1, 4, 2, 4, 8, 8, 8, 2, 4, 4)
"""Bytes of each field of the header."""
_CRC = 4
_NUMBERS = [0, 1, -1, 2, -2, 5, 6, 7, 63, 64, -64, -65, 127, 128, 2**15, 2**31 - 1, -(2**31), 2**31, 2**32, 2**32 + 1]
_NUMBERS += [2**62, 2**63 - 1, -(2**63), 1_000_000, 1_000_001, NOW_MS]


@dataclass
class Limits:
    """The configs of a topic."""

    keyed: bool = False
    log_append_time: bool = False
    timestamp_before_max_ms: int = 2**63 - 1
    timestamp_after_max_ms: int = 3_600_000
    message_size_max: int = 100_000
    compression: None = None


@dataclass
class Row:
    """The fields of one record, and how each is written."""

    attributes: int = 0
    timestamp_delta: int = 0
    offset_delta: int = 0
    key: bytes | None = None
    value: bytes | None = None
    headers: list[tuple[bytes | None, bytes | None]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Sizes and counts that are lies."""
    padded: dict[str, int] = field(default_factory=dict)
    """Numbers with so many bytes more than they need."""

    def written(self) -> bytes:
        """The record."""
        body = struct.pack(">b", self.attributes)
        body += self._number("timestamp", self.timestamp_delta) + self._number("offset", self.offset_delta)
        body += self._sized("key", self.key) + self._sized("value", self.value)
        body += self._number("headers", len(self.headers))
        for name, value in self.headers:
            body += self._sized("name", name) + self._sized("header", value)
        return self._number("length", len(body)) + body

    def _sized(self, name: str, data: bytes | None) -> bytes:
        return self._number(name, -1 if data is None else len(data)) + (data or b"")

    def _number(self, name: str, value: int) -> bytes:
        value = self.sizes.get(name, value)
        folded = value * 2 if value >= 0 else -value * 2 - 1
        digits = bytearray()
        while folded >= 128:
            digits.append(folded % 128 + 128)
            folded //= 128
        digits.append(folded)
        for _ in range(self.padded.get(name, 0)):
            digits[-1] += 128
            digits.append(0)
        return bytes(digits)


_NAMES = ("timestamp", "offset", "key", "value", "headers", "name", "header", "length")


class Hostile(NamedTuple):
    """A batch, and what its topic takes."""

    data: bytearray
    limits: Limits
    comparable: bool
    """Whether codecs of other people need agree: not about damaged content."""


def make(chance: Random) -> Hostile:
    """Make a batch, in about a third of all cases one that is sound."""
    rows = [_row(chance, place) for place in range(chance.choice([1, 1, 2, 3, 8, 20]))]
    limits = Limits(keyed=chance.random() < 0.3, log_append_time=chance.random() < 0.1)
    if chance.random() < 0.2:
        limits.timestamp_before_max_ms = chance.choice([0, 50, 1_000])
        limits.timestamp_after_max_ms = chance.choice([0, 50, 1_000])
    if limits.keyed and chance.random() < 0.8:
        for row in rows:
            row.key = row.key or b""
    for _ in range(chance.choice([0, 0, 1, 1, 2])):
        _mutate_row(chance, chance.choice(rows), rows)
    plain = bytearray(b"".join(row.written() for row in rows))
    if chance.random() < 0.2:
        _mutate_bytes(chance, plain)
    codec = chance.choice(list(Compression))
    content = bytearray(compress(codec, plain))
    comparable = True
    if codec and chance.random() < 0.1:
        _mutate_bytes(chance, content)
        comparable = False
    times = [NOW_MS + row.timestamp_delta for row in rows]
    fields = [0, 49 + len(content), -1, 2, 0, int(codec), len(rows) - 1, NOW_MS, max(times), -1, -1, -1, len(rows)]
    fields[8] = min(max(fields[8], -(2**63)), 2**63 - 1)
    if chance.random() < 0.2:
        fields[9:12] = [chance.randrange(2**40), chance.randrange(2**15), chance.randrange(2**31)]
        fields[5] += 16 * chance.randrange(2)
    if chance.random() < 0.25:
        _mutate_field(chance, fields)
    data = bytearray(_HEADER.pack(*fields)) + content
    if fields[1] == 49 + len(content):
        stamp_crc(data)
    if chance.random() < 0.01:
        data[chance.randrange(17, len(data))] ^= 1 << chance.randrange(8)
    return Hostile(data, limits, comparable)


def _mutate_field(chance: Random, fields: list[int]) -> None:
    """Change a field of the header, but for the checksum."""
    place = chance.choice([place for place in range(len(_SIZES)) if place != _CRC])
    bits, value = 8 * _SIZES[place], fields[place]
    wished = chance.choice([chance.choice(_NUMBERS), value + 1, value - 1, value ^ 1 << chance.randrange(bits)])
    half = 1 << bits - 1
    fields[place] = (wished + half) % (2 * half) - half


def _row(chance: Random, place: int) -> Row:
    row = Row(offset_delta=place, timestamp_delta=chance.choice([0, 0, 1, -1, 50, 70, -70, 1_001, -1_001]))
    row.key = chance.choice([None, b"", b"k", chance.randbytes(70)])
    row.value = chance.choice([None, b"", b"value", chance.randbytes(chance.choice([10, 100, 300]))])
    for _ in range(chance.choice([0, 0, 0, 1, 3])):
        row.headers.append((chance.choice([b"", b"h", b"\xff\xfe"]), chance.choice([None, b"", b"x" * 70])))
    return row


def _mutate_row(chance: Random, row: Row, rows: list[Row]) -> None:
    match chance.randrange(8):
        case 0 | 1:
            name = chance.choice(_NAMES)
            row.sizes[name] = chance.choice(_NUMBERS)
        case 2:
            row.padded[chance.choice(_NAMES)] = chance.choice([1, 2, 4, 8, 9])
        case 3:
            row.timestamp_delta = chance.choice([-1 - NOW_MS, -NOW_MS, 2**63 - 1 - NOW_MS, 2**63 - NOW_MS, *_NUMBERS])
        case 4:
            row.offset_delta = chance.choice([row.offset_delta + 1, row.offset_delta - 1, *_NUMBERS])
        case 5:
            row.attributes = chance.randrange(-128, 128)
        case 6:
            row.headers.append((None, b"without a name"))
        case _:
            rows.append(rows[0]) if chance.random() < 0.5 else rows.pop(0) if len(rows) > 1 else None


def _mutate_bytes(chance: Random, data: bytearray) -> None:
    match chance.randrange(4):
        case 0 if data:
            data[chance.randrange(len(data))] = chance.randrange(256)
        case 1 if data:
            del data[chance.randrange(len(data)) :]
        case 2:
            data += chance.randbytes(chance.choice([1, 7, 50]))
        case _ if data:
            del data[chance.randrange(len(data))]


class FoundError(Exception):
    """The property does not hold."""


class Fuzz:
    """A run."""

    def __init__(self, seed: int, machine: Examine) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._machine = machine
        self._accepted: list[tuple[int, bytes, list[Record]]] = []

    def run(self, numbers: Iterator[int] | range) -> None:
        """Judge batches; FoundError at the first of which the judges disagree."""
        for number in numbers:
            hostile = make(Random(f"{self.seed}/{number}"))
            try:
                self.judge(number, hostile)
            except FoundError:
                raise
            except Exception as error:
                raise FoundError(f"batch {self.seed}/{number}: {error!r}") from error
        self.read_back()

    def judge(self, number: int, hostile: Hostile) -> None:
        """Judge one batch."""
        limits = hostile.limits
        records = expected(hostile)
        plainly = self._check(hostile, examine)
        quickly = self._check(hostile, self._machine, timed=True)
        if _comparable(plainly) != _comparable(quickly):
            raise FoundError(f"batch {self.seed}/{number}: in plain Python {plainly}, by machine code {quickly}")
        if isinstance(quickly, Refuse):
            self.counts[quickly.code.name] += 1
            assert quickly.message
        else:
            self.counts["accepted"] += 1
        if hostile.comparable and isinstance(quickly, Refuse) is not isinstance(records, ObjectionError):
            raise FoundError(f"batch {self.seed}/{number}: the decoder says {records!r}, the check {quickly}")
        if not isinstance(quickly, Refuse):
            ((header, data),) = quickly
            if not isinstance(records, ObjectionError):
                greatest = max(record.timestamp for record in records)
                if not limits.log_append_time and header.max_timestamp != greatest:
                    raise FoundError(f"batch {self.seed}/{number}: largest timestamp {header.max_timestamp}")
                self._accepted.append((number, bytes(data), records))
            else:
                decode(bytearray(data))
        elif number % READ_ANYWAY_EVERY == 0:
            read_anyway(hostile.data)
        if len(self._accepted) >= READ_TOGETHER:
            self.read_back()

    def read_back(self) -> None:
        """Read what was accepted by the kernels of consumers."""
        offset, buffer, wanted = 0, bytearray(), []
        for _, data, records in self._accepted:
            batch = bytearray(data)
            stamp(batch, 0, offset, 0)
            buffer += batch
            wanted += [(offset + place, *seen(record)) for place, record in enumerate(records)]
            offset += len(records)
        numbers = [number for number, _, _ in self._accepted]
        self._accepted.clear()
        if not buffer:
            return
        rows = decode(buffer, decoded_size_max=2**31 - 1).records.to_pylist()
        found = [(row["offset"], row["timestamp"], row["key"], row["value"], _pairs(row["headers"])) for row in rows]
        if found != wanted:
            span = f"{self.seed}/{numbers[0]} to {numbers[-1]}"
            raise FoundError(f"batches {span} are read otherwise than they were sent")

    def _check(self, hostile: Hostile, judge: Examine, *, timed: bool = False) -> list[CheckedBatch] | Refuse:
        for _ in range(3):
            began = time.thread_time()
            found = check_batches(memoryview(bytearray(hostile.data)), hostile.limits, NOW_MS, judge)
            took = time.thread_time() - began
            if not timed or took <= STEP_MAX_S:
                break
        else:
            raise FoundError(f"a check of {len(hostile.data)} bytes takes {took:.3f} s")
        if timed:
            self.slowest_s = max(self.slowest_s, took)
        return found


def read_anyway(data: bytearray) -> None:
    """Read a batch that was refused as if it were in a log of before: every reader ends, and knows one error."""
    view = memoryview(data)
    try:
        header = parse_header(view)
    except DecodeError:
        return
    for _ in range(3):  # A kernel that has never run is compiled first.
        began = time.thread_time()
        _read_by_all(data, view, header)
        if time.thread_time() - began < READ_MAX_S:
            return
    raise FoundError(f"to read {len(data)} bytes takes {time.thread_time() - began:.1f} s")


def _read_by_all(data: bytearray, view: memoryview, header: BatchHeader) -> None:
    for reader in (
        lambda: decode(bytearray(data), check_crc=False),
        lambda: decode_pairs(view, header),
        lambda: list(keyed(header, view)),
        lambda: first_of_max(view, 0),
        lambda: first_at_or_after(view, NOW_MS + 1, 0),
        lambda: first_of_max(view, 0, machine_code().search),
        lambda: first_record(view, header, header.last_offset),
        lambda: parse_end_transaction_marker(view) if header.is_control else None,
    ):
        with contextlib.suppress(DecodeError):
            found = reader()
            if isinstance(found, TimestampAndOffset):
                assert -(2**63) <= found.timestamp < 2**63


def expected(hostile: Hostile) -> list[Record] | ObjectionError:
    """What the strict decoder makes of a batch."""
    limits = hostile.limits
    bounds = (
        {}
        if limits.log_append_time
        else {
            "earliest": NOW_MS - limits.timestamp_before_max_ms,
            "latest": NOW_MS + limits.timestamp_after_max_ms,
        }
    )
    try:
        return strictly(
            bytes(hostile.data), size_max=expanded_size_max(limits.message_size_max), keyed=limits.keyed, **bounds
        )
    except ObjectionError as objection:
        return objection


def _pairs(headers: list[dict[str, Any]]) -> list[tuple[str, bytes | None]]:
    return [(header["key"], header["value"]) for header in headers]


def seen(record: Record) -> tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]:
    """A record as consumers see it: names of headers are text."""
    headers = [(name.decode(errors="replace"), value) for name, value in record.headers]
    return record.timestamp, record.key, record.value, headers


def _comparable(found: list[CheckedBatch] | Refuse) -> object:
    return found if isinstance(found, Refuse) else [(header, bytes(data)) for header, data in found]


@cache
def machine_code() -> native.Native:
    """The kernels as brokers run them."""
    found = native.load()
    if found is None:
        native.build()
        found = native.load()
    assert found is not None
    return found


def main() -> int:
    """Run for long, and say how it goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    fuzz, began, step = Fuzz(options.seed, machine_code().examine), time.monotonic(), 20_000
    last = options.first + options.count
    for first in range(options.first, last, step):
        end = min(first + step, last)
        try:
            fuzz.run(range(first, end))
        except FoundError as error:
            print(error)
            return 1
        took = time.monotonic() - began
        said = ", ".join(f"{name} {count}" for name, count in fuzz.counts.most_common())
        print(
            f"seed {options.seed}: {end} batches, {(end - options.first) / took:.0f} per second, "
            f"slowest check {fuzz.slowest_s * 1e3:.1f} ms; {said}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
