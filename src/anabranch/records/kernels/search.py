"""The record of a time searched by a kernel, as `records.timestamps` does in plain Python; compiled as `examine` is."""

from __future__ import annotations

from anabranch.records.kernels.compiled import kernel
from anabranch.records.kernels.memory import i64, put64, read_varint

# The only argument is the address of numbers of 64 bits: the question, then the answer.
AT, END, COUNT, BASE_TIMESTAMP, LEAST_DELTA, TIMESTAMP, WANTS_LARGEST = 0, 1, 2, 3, 4, 5, 6
QUESTION_FIELDS = 7
FOUND_DELTA, FOUND_TIMESTAMP = 7, 8
SHEET_SIZE = 9
FOUND, NOT_FOUND, MALFORMED = 1, 0, -1


@kernel
def search(sheet: int) -> int:
    """Search the records from AT to END; return FOUND, NOT_FOUND, or MALFORMED at a record that is cut off."""
    at = i64(sheet + 8 * AT)
    end = i64(sheet + 8 * END)
    base_timestamp = i64(sheet + 8 * BASE_TIMESTAMP)
    least_delta = i64(sheet + 8 * LEAST_DELTA)
    wanted = i64(sheet + 8 * TIMESTAMP)
    wants_largest = i64(sheet + 8 * WANTS_LARGEST) != 0
    found = NOT_FOUND
    largest = 0
    for _ in range(i64(sheet + 8 * COUNT)):
        length, at = read_varint(at, end)
        if at > end or length < 1 or length > end - at:
            return MALFORMED
        record_end = at + length
        timestamp_delta, at = read_varint(at + 1, record_end)
        if at > record_end:
            return MALFORMED
        offset_delta, at = read_varint(at, record_end)
        if at > record_end:
            return MALFORMED
        at = record_end
        if offset_delta < least_delta:
            continue
        timestamp = base_timestamp + timestamp_delta
        if wants_largest:
            fits = found == NOT_FOUND or timestamp > largest
        else:
            fits = timestamp >= wanted
        if fits:
            found = FOUND
            largest = timestamp
            put64(sheet + 8 * FOUND_DELTA, offset_delta)
            put64(sheet + 8 * FOUND_TIMESTAMP, timestamp)
            if not wants_largest:
                break
    return found
