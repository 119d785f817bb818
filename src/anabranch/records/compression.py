"""The codecs of record batches: gzip, snappy (in xerial framing, as Java writes it), lz4 frames, zstd.

The rule it keeps: no input makes it hold more than `size_max` bytes of output, whatever the input claims of itself.
A frame's claim about its content is a hint only, believed as far as the input's own size makes it plausible; from
there the output grows as it is really needed, up to the bound.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, TypeAlias

import cramjam

from anabranch.base.errors import DecodeError

Bytes: TypeAlias = bytes | bytearray | memoryview
"""Bytes that the caller owns; memoryviews are of single bytes."""


class Compression(IntEnum):
    """A codec, by its number in the attributes of a batch."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


COMPRESSION_MASK = 0b111
"""The bits of a batch's attributes that hold the codec."""

LEVEL_DEFAULT = {Compression.GZIP: 6, Compression.ZSTD: 3}
"""Kafka's own defaults of `compression.gzip.level` and `compression.zstd.level`; the rest have none."""

_XERIAL = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
_XERIAL_BLOCK_SIZE = 32 * 1024
_SNAPPY_RATIO_MAX = 22
"""A copy of 64 bytes takes 3: what a block claims beyond that is a lie."""
_LZ4_HEADER = bytes.fromhex("04224d18 60 40 82")
"""Magic, version 1 with independent blocks (all that Java reads) and no checksums, 64 KiB blocks, header checksum."""
_LZ4_BLOCK_SIZE = 64 * 1024
_LZ4_STORED = 1 << 31
_GZIP_FIELDS = 0x1C
"""The flags of extra fields, a name and a comment, whose length readers bound in different ways."""
_GZIP_HEAD_SIZE = 2_048
_GROWTH = 4
_HINT_RATIO_MAX = 32
_OUTPUT_SIZE_MIN = 4 * 1024

_UINT32 = struct.Struct("<I")
_INT32 = struct.Struct(">i")


class OutputTooSmallError(DecodeError):
    """The content does not fit in the output that was given for it."""


class ExpandsTooFarError(DecodeError):
    """The content is longer than the bound that its reader allows."""


def compress(codec: Compression, data: Bytes, level: int | None = None) -> bytes | bytearray:
    """Compress the records of one batch, in the framing that every Kafka client reads."""
    if level is None:
        level = LEVEL_DEFAULT.get(codec)
    match codec:
        case Compression.NONE:
            return bytes(data)
        case Compression.GZIP:
            return bytes(cramjam.gzip.compress(data, level))
        case Compression.SNAPPY:
            return _compress_snappy(memoryview(data).cast("B"))
        case Compression.LZ4:
            return _compress_lz4(memoryview(data).cast("B"))
        case Compression.ZSTD:
            return bytes(cramjam.zstd.compress(data, level))


def decompress(codec: Compression, data: Bytes, size_max: int) -> bytearray:
    """Expand the records of one batch into at most `size_max` bytes.

    ExpandsTooFarError where they are more, DecodeError where they are garbage.
    """
    view = memoryview(data).cast("B")
    size = min(max(size_hint(codec, view), _OUTPUT_SIZE_MIN), size_max)
    while True:
        output = bytearray(size)
        try:
            used = decompress_into(codec, view, output)
        except OutputTooSmallError:
            if size == size_max:
                raise ExpandsTooFarError(
                    f"{len(view)} bytes of {codec.name} records expand to more than the {size_max} bytes allowed"
                ) from None
            size = grown(size, size_max)
        else:
            del output[used:]
            return output


def grown(size: int, size_max: int) -> int:
    """The output to try next when `size` bytes were too few."""
    return min(max(size, _OUTPUT_SIZE_MIN) * _GROWTH, size_max)


def size_hint(codec: Compression, data: memoryview) -> int:
    """Guess how many bytes `data` expands to: what it says of itself, as far as that is plausible."""
    plausible = _HINT_RATIO_MAX * len(data) + _OUTPUT_SIZE_MIN
    match codec:
        case Compression.NONE:
            return len(data)
        case Compression.GZIP:
            said = _UINT32.unpack_from(data, len(data) - 4)[0] if len(data) >= 18 else 0
        case Compression.SNAPPY:
            said = _snappy_size(data)
        case Compression.LZ4:
            said = 0
        case Compression.ZSTD:
            said = _zstd_size(data)
    return min(said, plausible) if said else min(4 * len(data), plausible)


def decompress_into(codec: Compression, data: Bytes, output: Any) -> int:
    """Expand into a writable buffer and return the size of the content.

    Raises OutputTooSmallError when the content is longer than `output`, DecodeError when it is no such content.
    """
    match codec:
        case Compression.NONE:
            size = len(memoryview(data).cast("B"))
            if size > len(output):
                raise OutputTooSmallError(f"{size} bytes do not fit in {len(output)}")
            memoryview(output)[:size] = data
            return size
        case Compression.GZIP:
            return _into(codec, cramjam.gzip.decompress_into, data, output)
        case Compression.SNAPPY:
            view = memoryview(data).cast("B")
            if view[: len(_XERIAL) - 8] == _XERIAL[:-8]:
                return _decompress_xerial(view, memoryview(output).cast("B"))
            return _decompress_snappy_block(view, output)
        case Compression.LZ4:
            return _into(codec, cramjam.lz4.decompress_into, data, output)
        case Compression.ZSTD:
            return _into(codec, cramjam.zstd.decompress_into, data, output)


def _into(codec: Compression, function: Callable[[Any, Any], int], data: Any, output: Any) -> int:
    try:
        return function(data, output)
    except cramjam.DecompressionError as error:
        if "whole buffer" in str(error) and "fill" not in str(error):
            raise OutputTooSmallError(f"{codec.name} records do not fit in {len(output)} bytes") from None
        raise DecodeError(f"malformed {codec.name} records: {error}") from None


def _compress_snappy(data: memoryview) -> bytearray:
    output = bytearray(_XERIAL)
    for start in range(0, len(data), _XERIAL_BLOCK_SIZE):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK_SIZE]))
        output += _INT32.pack(len(block))
        output += block
    return output


def _xerial_blocks(data: memoryview) -> Iterator[memoryview]:
    position = len(_XERIAL)
    if len(data) < position:
        raise DecodeError("malformed SNAPPY records: the stream's header is cut off")
    while position < len(data):
        if position + 4 > len(data):
            raise DecodeError("malformed SNAPPY records: a block's length is cut off")
        size = _INT32.unpack_from(data, position)[0]
        position += 4
        if not 0 <= size <= len(data) - position:
            raise DecodeError(
                f"malformed SNAPPY records: a block of {size} bytes where {len(data) - position} are left"
            )
        yield data[position : position + size]
        position += size


def _snappy_block_size(data: memoryview) -> int:
    try:
        size = cramjam.snappy.decompress_raw_len(data)
    except cramjam.DecompressionError as error:
        raise DecodeError(f"malformed SNAPPY records: {error}") from None
    if size > _SNAPPY_RATIO_MAX * len(data):
        raise DecodeError(f"malformed SNAPPY records: {len(data)} bytes cannot hold the {size} that they claim")
    return size


def _snappy_size(data: memoryview) -> int:
    if data[: len(_XERIAL) - 8] == _XERIAL[:-8]:
        return sum(map(_snappy_block_size, _xerial_blocks(data)))
    return _snappy_block_size(data)


def _decompress_snappy_block(data: memoryview, output: Any) -> int:
    size = _snappy_block_size(data)
    if size > len(output):
        raise OutputTooSmallError(f"SNAPPY records do not fit in {len(output)} bytes")
    if not len(data):
        raise DecodeError("malformed SNAPPY records: no bytes at all")
    try:
        return cramjam.snappy.decompress_raw_into(data, output)
    except cramjam.DecompressionError as error:
        raise DecodeError(f"malformed SNAPPY records: {error}") from None


def _decompress_xerial(data: memoryview, output: memoryview) -> int:
    position = 0
    for block in _xerial_blocks(data):
        position += _decompress_snappy_block(block, output[position:])
    return position


def _compress_lz4(data: memoryview) -> bytearray:
    output = bytearray(_LZ4_HEADER)
    for start in range(0, len(data), _LZ4_BLOCK_SIZE):
        plain = data[start : start + _LZ4_BLOCK_SIZE]
        block = bytes(cramjam.lz4.compress_block(plain, store_size=False))
        if len(block) < len(plain):
            output += _UINT32.pack(len(block))
            output += block
        else:
            output += _UINT32.pack(len(plain) | _LZ4_STORED)
            output += plain
    output += _UINT32.pack(0)
    return output


def lz4_blocks(data: memoryview) -> Iterator[int]:
    """Check that LZ4 records are one frame that every Kafka client reads; yields the size of each block. DecodeError.

    Java's client reads one frame, of independent blocks, without a dictionary; what is behind the frame it leaves out.
    """
    if len(data) < 7 or data[:4] != _LZ4_HEADER[:4]:
        raise DecodeError("malformed LZ4 records: no frame of LZ4")
    flags, size = data[4], len(data)
    if flags & 0xC3 != 0x40:
        raise DecodeError("LZ4 records in a frame of another version, or with a dictionary, which Kafka does not have")
    if not flags & 0x20:
        raise DecodeError("LZ4 records in blocks that depend on each other, which Java's client does not read")
    position = 7 + (8 if flags & 0x08 else 0)
    while position + 4 <= size:
        length = _UINT32.unpack_from(data, position)[0] & (_LZ4_STORED - 1)
        position += 4
        if length == 0:
            position += 4 if flags & 0x04 else 0
            break
        yield length
        position += length + (4 if flags & 0x10 else 0)
    if position != size:
        raise DecodeError("malformed LZ4 records: they are not where their one frame ends")


def snappy_blocks(data: memoryview) -> Iterator[int]:
    """Check that every block of SNAPPY records has content; yields the size of it. DecodeError.

    Java's client calls itself again for each block without any, until its stack is full.
    """
    for block in _xerial_blocks(data) if data[: len(_XERIAL) - 8] == _XERIAL[:-8] else [data]:
        size = _snappy_block_size(block)
        if not size:
            raise DecodeError("SNAPPY records with a block without content")
        yield size


def gunzip(data: Bytes, size_max: int) -> bytes:
    """Expand GZIP records that every Kafka client reads: one member, with nothing behind it.

    librdkafka reads no more than one, and Java's client calls itself again for each. ExpandsTooFarError, DecodeError.
    """
    member = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        if data[3:4] and data[3] & _GZIP_FIELDS:
            begun = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(memoryview(data)[:_GZIP_HEAD_SIZE], 1)
            if not begun:
                raise DecodeError("malformed GZIP records: the fields before them are too long")
        plain = member.decompress(data, size_max + 1)
    except zlib.error as error:
        raise DecodeError(f"malformed GZIP records: {error}") from None
    if len(plain) > size_max:
        raise ExpandsTooFarError(f"{len(data)} bytes of GZIP records expand to more than the {size_max} bytes allowed")
    if not member.eof:
        raise DecodeError("malformed GZIP records: they are cut off")
    if member.unused_data:
        raise DecodeError("GZIP records in several members, or with bytes behind one, which librdkafka does not read")
    return plain


def _zstd_size(data: memoryview) -> int:
    """The frame's content size, 0 when it does not say."""
    if len(data) < 6:
        return 0
    descriptor = data[4]
    single_segment = descriptor >> 5 & 1
    width = (single_segment, 2, 4, 8)[descriptor >> 6]
    start = 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3]
    if not width or len(data) < start + width:
        return 0
    return int.from_bytes(data[start : start + width], "little") + (256 if width == 2 else 0)
