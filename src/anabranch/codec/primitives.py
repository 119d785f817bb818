"""The rare cases of compiled readers and writers: long varints, unknown tags, refusals."""

from __future__ import annotations

from functools import lru_cache
from uuid import UUID

from anabranch.base.errors import AnabranchError, DecodeError
from anabranch.base.limits import STRING_SIZE_MAX, TAGGED_FIELDS_MAX
from anabranch.codec.types import Blob

INLINE_SIZE_MAX = 1024
"""Records up to this size are copied beside their neighbours; a gather list of tiny parts costs more than the copy."""

_COPIED = (bytes, bytearray, memoryview)


class EncodeError(AnabranchError, ValueError):
    """A message of ours that its version cannot carry: null in a field without null, or a number out of range."""


class TooManyElementsError(DecodeError):
    """A message of more elements than its reader takes."""


def refuse(what: str, length: int, left: int) -> DecodeError:
    """Raise DecodeError for a length that exceeds the buffer."""
    return DecodeError(f"{what}: length {length} where {left} bytes are left")


def check_string_size(what: str, size: int) -> None:
    """Bound the bytes of a string of a peer."""
    if size > STRING_SIZE_MAX:
        raise DecodeError(f"{what}: a string of {size} bytes; at most {STRING_SIZE_MAX} are read")


def too_many(what: str) -> DecodeError:
    """Raise TooManyElementsError for the array that exceeds the limit on elements."""
    return TooManyElementsError(f"{what}: the message has more elements than its API allows")


def uvarint_rest(view: memoryview, position: int, first: int) -> tuple[int, int]:
    """Read the rest of an unsigned varint whose first byte has its high bit set: value, position after it."""
    value = first & 0x7F
    for shift in (7, 14, 21, 28):
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise DecodeError("a varint is longer than five bytes")


def read_uvarint(view: memoryview, position: int) -> tuple[int, int]:
    """Read an unsigned varint: value, position after it."""
    byte = view[position]
    return (byte, position + 1) if byte < 0x80 else uvarint_rest(view, position + 1, byte)


def uvarint(value: int) -> bytes:
    """Write an unsigned varint."""
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def check_tag_count(count: int) -> int:
    """Bound the number of tagged fields of one struct."""
    if count > TAGGED_FIELDS_MAX:
        raise DecodeError(f"{count} tagged fields in one struct; at most {TAGGED_FIELDS_MAX} are read")
    return count


def read_tags(view: memoryview, position: int, count: int, left: int) -> tuple[dict[int, bytes], int, int]:
    """Read the tagged fields of a struct that declares none, after their `count`'s first byte.

    `left` is how many elements the message may still have; returns the fields, the position after them, and `left`.
    """
    if count > 127:
        count, position = uvarint_rest(view, position, count)
    left -= count
    if left < 0:
        raise too_many("tagged fields")
    tags: dict[int, bytes] = {}
    for _ in range(check_tag_count(count)):
        tag, position = read_uvarint(view, position)
        size, position = read_uvarint(view, position)
        keep_tag(tags, tag, view, position, size)
        position += size
    return tags, position, left


def keep_tag(tags: dict[int, bytes], tag: int, view: memoryview, position: int, size: int) -> None:
    """Keep an unknown tagged field as it is."""
    if size > len(view) - position:
        raise refuse(f"tagged field {tag}", size, len(view) - position)
    if tag in tags:
        raise DecodeError(f"tagged field {tag} appears twice")
    tags[tag] = bytes(view[position : position + size])


def write_tags(out: bytearray, tags: dict[int, bytes]) -> None:
    """Write tagged fields in the order of their tags."""
    out += uvarint(len(tags))
    for tag in sorted(tags):
        out += uvarint(tag) + uvarint(len(tags[tag])) + tags[tag]


def put_records(out: bytearray, splices: list[tuple[int, object]], part: Blob, size: int) -> None:
    """Copy small records into `out`; leave a mark where anything else is to be spliced in."""
    if size <= INLINE_SIZE_MAX and isinstance(part, _COPIED):
        out += part
    else:
        splices.append((len(out), part))


@lru_cache(maxsize=4096)
def uuid_of(raw: bytes) -> UUID:
    """Make a UUID; topic ids come again and again, and `UUID()` is slow."""
    return UUID(bytes=raw)
