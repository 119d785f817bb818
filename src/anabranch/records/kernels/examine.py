"""The records of a produced batch examined by a kernel, as `records.examination` does in plain Python.

Numba compiles the kernel for callers that have Numba, and ahead of time (`ahead`) for brokers, which have not.
"""

from __future__ import annotations

from anabranch.records.examination import (
    BODY_SIZE_MIN,
    INT64_MIN,
    NO_TIMESTAMP,
    REFUSED_RECORDS_REPORTED_MAX,
    Flaw,
    Malformed,
)
from anabranch.records.kernels.compiled import inlined, kernel
from anabranch.records.kernels.memory import NOWHERE, from_zigzag, i64, put64, u8

# The only argument is the address of numbers of 64 bits, as calls with many arguments take long. First the question:
AT, END, COUNT, BASE_TIMESTAMP, SAID_MAX_TIMESTAMP, EARLIEST, LATEST, KEYED = 0, 1, 2, 3, 4, 5, 6, 7
QUESTION_FIELDS = 8
# Then the answer, with the refused records behind its fields, as 2 * place + flaw.
MAX_TIMESTAMP, PLACE, UNTIMELY_COUNT, KEYLESS_COUNT, REFUSED_COUNT = 8, 9, 10, 11, 12
ANSWER_END = 13
SHEET_SIZE = ANSWER_END + REFUSED_RECORDS_REPORTED_MAX
SOUND = -1
# Numba takes members of enumerations for objects of their own.
_CUT_OFF, _NUMBER, _OFFSET, _TIMESTAMP = (
    int(Malformed.CUT_OFF),
    int(Malformed.NUMBER),
    int(Malformed.OFFSET),
    int(Malformed.TIMESTAMP),
)
_KEY, _VALUE, _HEADERS, _BYTES_BEHIND = (
    int(Malformed.KEY),
    int(Malformed.VALUE),
    int(Malformed.HEADERS),
    int(Malformed.BYTES_BEHIND),
)
_UNTIMELY, _KEYLESS = int(Flaw.UNTIMELY), int(Flaw.KEYLESS)


@inlined
def _number(at: int, end: int, bits: int) -> tuple[int, int]:
    """Read a zigzag number of 32 or 64 bits: the number and the address behind it, NOWHERE if it breaks a rule."""
    if at < end:
        byte = u8(at)
        if byte < 0x80:
            return (byte >> 1) ^ -(byte & 1), at + 1
    value = 0
    shift = 0
    while at < end and shift < bits:
        byte = u8(at)
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            # Numbers of 64 bits end with a tenth byte of one bit, those of 32 bits with a fifth byte of four.
            if (shift == 63 and byte > 1) or (bits == 32 and shift == 28 and byte > 15):
                return 0, NOWHERE
            return from_zigzag(value), at
        shift += 7
    return 0, NOWHERE


@inlined
def _behind(at: int, end: int, least: int) -> tuple[int, int]:
    """Pass over a length and as many bytes: the length and the address behind the bytes, NOWHERE if there is none."""
    length, at = _number(at, end, 32)
    if at > end or length < least or length > end - at:
        return 0, NOWHERE
    return length, at + max(length, 0)


@kernel
def examine(sheet: int) -> int:
    """Examine the records from AT to END; return the rule that they break, 0 or SOUND for none.

    SOUND: no record is refused, the largest timestamp is the one that was said, and the answer means nothing. Otherwise
    its fields mean what those of `Examined` do. `sheet` is the address of SHEET_SIZE numbers.
    """
    at = i64(sheet + 8 * AT)
    end = i64(sheet + 8 * END)
    base_timestamp = i64(sheet + 8 * BASE_TIMESTAMP)
    earliest = i64(sheet + 8 * EARLIEST)
    latest = i64(sheet + 8 * LATEST)
    keyed = i64(sheet + 8 * KEYED)
    greatest = INT64_MIN
    untimely = 0
    keyless = 0
    reported = 0
    for place in range(i64(sheet + 8 * COUNT)):
        put64(sheet + 8 * PLACE, place)
        length, at = _number(at, end, 32)
        if at > end or length < BODY_SIZE_MIN or length > end - at:
            return _CUT_OFF
        record_end = at + length
        timestamp_delta, at = _number(at + 1, record_end, 64)
        if at > record_end:
            return _NUMBER
        offset_delta, at = _number(at, record_end, 32)
        if at > record_end:
            return _NUMBER
        if offset_delta != place:
            return _OFFSET
        timestamp = base_timestamp + timestamp_delta
        if (base_timestamp ^ timestamp) & (timestamp_delta ^ timestamp) < 0:
            return _TIMESTAMP
        key_size, at = _behind(at, record_end, -1)
        if at > record_end:
            return _KEY
        _, at = _behind(at, record_end, -1)
        if at > record_end:
            return _VALUE
        headers, at = _number(at, record_end, 32)
        if at > record_end or headers < 0 or headers > (record_end - at) >> 1:
            return _HEADERS
        for _ in range(headers):
            _, at = _behind(at, record_end, 0)
            _, at = _behind(at, record_end, -1)
        if at != record_end:
            return _HEADERS
        greatest = max(greatest, timestamp)
        if timestamp != NO_TIMESTAMP and (timestamp < earliest or timestamp > latest):
            untimely += 1
            if reported < REFUSED_RECORDS_REPORTED_MAX:
                put64(sheet + 8 * (ANSWER_END + reported), 2 * place + _UNTIMELY)
                reported += 1
        if key_size < 0 and keyed != 0:
            keyless += 1
            if reported < REFUSED_RECORDS_REPORTED_MAX:
                put64(sheet + 8 * (ANSWER_END + reported), 2 * place + _KEYLESS)
                reported += 1
    if at != end:
        return _BYTES_BEHIND
    if reported == 0 and greatest == i64(sheet + 8 * SAID_MAX_TIMESTAMP):
        return SOUND
    put64(sheet + 8 * MAX_TIMESTAMP, greatest)
    put64(sheet + 8 * UNTIMELY_COUNT, untimely)
    put64(sheet + 8 * KEYLESS_COUNT, keyless)
    put64(sheet + 8 * REFUSED_COUNT, reported)
    return 0
