"""The variable-length numbers of records: zigzag, seven bits a byte, the lowest first, at most ten bytes."""

from __future__ import annotations

from anabranch.base.errors import DecodeError
from anabranch.records.compression import Bytes

_MASK_64 = (1 << 64) - 1
_SHIFT_MAX = 63
_SMALL = tuple(bytes((value << 1,)) for value in range(0x40))
"""The most frequent numbers, written."""


def read_varint(data: Bytes, position: int) -> tuple[int, int]:
    """Read a signed number of up to 64 bits: the number, and the position behind it.

    DecodeError where the number is cut off or longer than ten bytes; bits beyond the 64th are dropped, as in Kafka.
    """
    try:
        byte = data[position]
        position += 1
        value, shift = byte & 0x7F, 7
        while byte >= 0x80:
            if shift > _SHIFT_MAX:
                raise DecodeError("a variable-length number of more than 10 bytes")
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
    except IndexError:
        raise DecodeError("a record is cut off within a number") from None
    value &= _MASK_64
    return value >> 1 ^ -(value & 1), position


def encode_varint(value: int) -> bytes:
    """Write a signed number of up to 64 bits."""
    if 0 <= value < len(_SMALL):
        return _SMALL[value]
    value = (value << 1 ^ value >> 63) & _MASK_64
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
