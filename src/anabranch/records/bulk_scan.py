"""The positions of the keys and values of many small batches, found by NumPy: for the logs of coordinators.

A coordinator's log has about as many batches as records, and the compiled kernels take longer to load than they would
save. So the headers are walked in Python, and then the first records of all batches are taken apart at once, then the
second ones, and so on. The module is imported where it is needed: a broker starts without NumPy.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from anabranch.base.errors import DecodeError
from anabranch.records.batch import CONTROL, HEADER_SIZE, LENGTH_END, MAGIC, TRANSACTIONAL, ChecksumError
from anabranch.records.checksum import crc32c
from anabranch.records.compression import COMPRESSION_MASK

_LENGTH = Struct(">i")
_MAGIC_AT, _CRC_AT, _ATTRIBUTES_AT, _COUNT_AT = 16, 17, 21, 57
_NOT_PLAIN = TRANSACTIONAL | CONTROL | COMPRESSION_MASK
_LENGTH_SHIFT_MAX = 28

Positions = NDArray[np.int64]


class Walked(NamedTuple):
    """The batches that are whole in some bytes, their checksums compared."""

    starts: Positions
    base_offsets: Positions
    counts: Positions
    end: int
    """Behind the last one."""
    special: Positions
    """The numbers of those that are compressed, part of a transaction, or a marker."""


class Spans(NamedTuple):
    """Of every record, in order: where its key and its value begin and end; an end of -1 says that it is null."""

    key_starts: Positions
    key_ends: Positions
    value_starts: Positions
    value_ends: Positions


def walk(data: bytes | memoryview) -> Walked:
    """Find the batches in `data`; an incomplete last one is left out. DecodeError where the bytes are no batch."""
    starts: list[int] = []
    position, last = 0, len(data) - HEADER_SIZE
    length_at = _LENGTH.unpack_from
    while position <= last:
        starts.append(position)
        (length,) = length_at(data, position + 8)
        if length < HEADER_SIZE - LENGTH_END:
            raise DecodeError(f"after {len(starts) - 1} batches there is none: length {length}")
        position += length + LENGTH_END
    if position > len(data):
        position = starts.pop()
    at, octets = np.array(starts, np.int64), np.frombuffer(data, np.uint8)
    if (octets[at + _MAGIC_AT] != MAGIC).any():
        raise DecodeError("record batches of an unknown format")
    view = memoryview(data)
    checksums = _numbers(octets, at + _CRC_AT, 4).tolist()
    for start, end, checksum in zip(starts, [*starts, position][1:], checksums, strict=True):
        if crc32c(view[start + _ATTRIBUTES_AT : end]) != checksum:
            raise ChecksumError(f"the record batch at position {start} has not the checksum that its header says")
    special = np.flatnonzero(_numbers(octets, at + _ATTRIBUTES_AT, 2) & _NOT_PLAIN)
    return Walked(at, _numbers(octets, at, 8), _numbers(octets, at + _COUNT_AT, 4), position, special)


def spans(data: bytes | memoryview, walked: Walked) -> Spans:
    """Take the records of batches apart that are not compressed; DecodeError where they are malformed."""
    octets = np.frombuffer(data, np.uint8)
    starts, counts = walked.starts, walked.counts
    ends = np.append(starts[1:], walked.end)
    if (counts > ends - starts).any():
        raise DecodeError("a record batch that claims more records than it can have")
    rows = np.cumsum(counts) - counts
    found = Spans(*(np.empty(int(counts.sum()), np.int64) for _ in range(4)))
    lanes = np.flatnonzero(counts)
    at = starts[lanes] + HEADER_SIZE
    index = 0
    try:
        while len(lanes):
            length, at = _lengths(octets, at)
            record_ends = at + length
            if (length > ends[lanes] - at).any() or (length < 0).any():
                raise DecodeError("a record that is cut off")
            at = _skip_varints(octets, _skip_varints(octets, at + 1))
            row = rows[lanes] + index
            for begin, stop in ((found.key_starts, found.key_ends), (found.value_starts, found.value_ends)):
                size, at = _lengths(octets, at)
                if (size < -1).any() or (size > record_ends - at).any():
                    raise DecodeError("a record that is cut off")
                begin[row] = at
                behind = at + np.maximum(size, 0)
                stop[row] = np.where(size < 0, -1, behind)
                at = behind
            if (at >= record_ends).any():
                raise DecodeError("a record that is cut off")
            index += 1
            more = counts[lanes] > index
            if (record_ends[~more] != ends[lanes[~more]]).any():
                raise DecodeError("a batch that goes on behind its records")
            lanes, at = lanes[more], record_ends[more]
    except IndexError as error:
        raise DecodeError("a record that is cut off") from error
    return found


def _numbers(octets: NDArray[np.uint8], at: Positions, size: int) -> Positions:
    """Read a number of `size` bytes, without a sign, at each position."""
    found = np.zeros(len(at), np.int64)
    for index in range(size):
        found = found << 8 | octets[at + index]
    return found


def _lengths(octets: NDArray[np.uint8], at: Positions) -> tuple[Positions, Positions]:
    """Read a length at each position: the lengths, and the positions behind them."""
    first = octets[at].astype(np.int64)
    value = first & 0x7F
    at = at + 1
    going = np.flatnonzero(first >= 0x80)
    shift = 7
    while len(going):
        if shift > _LENGTH_SHIFT_MAX:
            raise DecodeError("a length of more than 5 bytes")
        octet = octets[at[going]].astype(np.int64)
        value[going] |= (octet & 0x7F) << shift
        at[going] += 1
        going = going[octet >= 0x80]
        shift += 7
    return (value >> 1) ^ -(value & 1), at


def _skip_varints(octets: NDArray[np.uint8], at: Positions) -> Positions:
    going = np.flatnonzero(octets[at] >= 0x80)
    at = at + 1
    while len(going):
        octet = octets[at[going]]
        at[going] += 1
        going = going[octet >= 0x80]
    return at
