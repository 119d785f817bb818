"""Whether the records of a produced batch are sound: the rules, and their reference in plain Python.

Every byte belongs to exactly one of the records that the header counts. All lengths and counts are numbers of 32 bits,
timestamp deltas of 64, none longer than it may be (`read_number`). Offset deltas are 0, 1, 2 and so on; no timestamp
leaves the range of int64; every header has a key. A record that breaks one of these rules makes its batch malformed.
A record of a batch that is not malformed can still be refused: for its timestamp, or for a key that it lacks.

`kernels.examine` does the same compiled. The two are tested against each other and against a third one
(tests/fuzz/strict.py); `Malformed`, the order of the rules and the meaning of `Examined` are the same for both.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from anabranch.records.compression import Bytes

REFUSED_RECORDS_REPORTED_MAX = 1_000
"""Records of one refused batch that an answer names (KIP-467)."""
INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
NO_TIMESTAMP = -1
"""The timestamp of a record that has none; no bound applies to it."""
BODY_SIZE_MIN = 6
"""The fewest bytes of a record behind its length: five numbers of one byte, and the attributes."""


class Malformed(IntEnum):
    """The rule that the records of a batch break."""

    NOTHING = 0
    CUT_OFF = 1
    NUMBER = 2
    OFFSET = 3
    TIMESTAMP = 4
    KEY = 5
    VALUE = 6
    HEADERS = 7
    BYTES_BEHIND = 8


class Flaw(IntEnum):
    """Why one record of a well-formed batch is refused."""

    UNTIMELY = 0
    KEYLESS = 1


class Accepted(NamedTuple):
    """What a topic takes, of timestamps and keys."""

    earliest: int = INT64_MIN
    """The lowest timestamp."""
    latest: int = INT64_MAX
    keyed: bool = False
    """Whether every record must have a key."""


class Examined(NamedTuple):
    """The outcome of an examination."""

    max_timestamp: int
    """The largest timestamp of the records; 0 in a malformed batch."""
    malformed: Malformed = Malformed.NOTHING
    place: int = 0
    """Of a malformed batch: the record that breaks the rule, counted from 0."""
    counts: tuple[int, int] = (0, 0)
    """How many records are refused, for each `Flaw`; both are 0 in a malformed batch."""
    refused: tuple[tuple[int, Flaw], ...] = ()
    """The first REFUSED_RECORDS_REPORTED_MAX of them, ascending."""

    @property
    def sound(self) -> bool:
        return not self.malformed and self.counts == (0, 0)


Examine = Callable[[Bytes, int, int, int, Accepted], Examined | None]
"""Examines the records of a batch, which are not compressed: bytes, count, base timestamp, the largest timestamp as the
header has it, what the topic takes. None where they are sound and the largest timestamp is right."""


class _MalformedError(Exception):
    def __init__(self, rule: Malformed) -> None:
        self.rule = rule


def examine(records: Bytes, count: int, base_timestamp: int, max_timestamp: int, accepted: Accepted) -> Examined | None:
    """Examine records in plain Python, a few microseconds each (`Examine`). `count` is at least 1."""
    view, end = memoryview(records), len(records)
    greatest, counts = INT64_MIN, [0, 0]
    refused: list[tuple[int, Flaw]] = []
    at = place = 0
    try:
        for place in range(count):
            length, at = read_number(view, at, end, 32, Malformed.CUT_OFF)
            if not BODY_SIZE_MIN <= length <= end - at:
                raise _MalformedError(Malformed.CUT_OFF)
            timestamp, keyless = _examine_record(view, at, at + length, place, base_timestamp)
            at += length
            greatest = max(greatest, timestamp)
            flaws = []
            if timestamp != NO_TIMESTAMP and not accepted.earliest <= timestamp <= accepted.latest:
                flaws.append(Flaw.UNTIMELY)
            if keyless and accepted.keyed:
                flaws.append(Flaw.KEYLESS)
            for flaw in flaws:
                counts[flaw] += 1
                if len(refused) < REFUSED_RECORDS_REPORTED_MAX:
                    refused.append((place, flaw))
        if at != end:
            raise _MalformedError(Malformed.BYTES_BEHIND)
    except _MalformedError as error:
        return Examined(0, error.rule, place)
    if not refused and greatest == max_timestamp:
        return None
    return Examined(greatest, counts=(counts[0], counts[1]), refused=tuple(refused))


def _examine_record(view: memoryview, at: int, end: int, place: int, base_timestamp: int) -> tuple[int, bool]:
    """Examine one record behind its length; return its timestamp, and whether it has no key."""
    timestamp_delta, at = read_number(view, at + 1, end, 64, Malformed.NUMBER)
    offset_delta, at = read_number(view, at, end, 32, Malformed.NUMBER)
    if offset_delta != place:
        raise _MalformedError(Malformed.OFFSET)
    timestamp = base_timestamp + timestamp_delta
    if not INT64_MIN <= timestamp <= INT64_MAX:
        raise _MalformedError(Malformed.TIMESTAMP)
    key_size, at = _skip(view, at, end, -1, Malformed.KEY)
    _, at = _skip(view, at, end, -1, Malformed.VALUE)
    headers, at = read_number(view, at, end, 32, Malformed.HEADERS)
    if not 0 <= headers <= (end - at) >> 1:
        raise _MalformedError(Malformed.HEADERS)
    for _ in range(headers):
        _, at = _skip(view, at, end, 0, Malformed.HEADERS)
        _, at = _skip(view, at, end, -1, Malformed.HEADERS)
    if at != end:
        raise _MalformedError(Malformed.HEADERS)
    return timestamp, key_size < 0


def _skip(view: memoryview, at: int, end: int, least: int, rule: Malformed) -> tuple[int, int]:
    """Pass over a length and as many bytes: the length, at least `least`, and the position behind the bytes."""
    length, at = read_number(view, at, end, 32, rule)
    if not least <= length <= end - at:
        raise _MalformedError(rule)
    return length, at + max(length, 0)


def read_number(view: memoryview, at: int, end: int, bits: int, rule: Malformed) -> tuple[int, int]:
    """Read a zigzag number of 32 or 64 bits: in at most 5 or 10 bytes, without bits that some readers would drop."""
    value = shift = 0
    while at < end and shift < bits:
        byte = view[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> bits:
                break
            return value >> 1 ^ -(value & 1), at
        shift += 7
    raise _MalformedError(rule)
