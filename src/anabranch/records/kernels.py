"""Loops over the bytes of records, compiled by Numba: scan, hash, filter, gather, encode.

Kernels take plain addresses: the caller owns the memory, keeps it alive, and says how far it may be read and written.
The rule they keep: no byte outside those bounds is touched, whatever the bytes inside say. A kernel raises nothing; it
answers a negative number, and the caller finds the words.

`copy` may write up to `SLACK` bytes beyond the end, so targets are followed by that much room. Bytes are moved
before the next ones are, in ascending order, so what is written too far is overwritten in its turn.
Nothing is compiled at import: the first call loads from the cache or compiles, `warm` does it for all at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from crc32c import crc32c
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name, get_process_triple
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic
from numpy.typing import NDArray

from anabranch.records.batch import CONTROL, HEADER_SIZE, LENGTH_END, LOG_APPEND_TIME, MAGIC, RECORD_OVERHEAD_MAX
from anabranch.records.compiled import called, inlined, kernel
from anabranch.records.compression import COMPRESSION_MASK

SLACK = 64
"""Room that must follow every target, in bytes."""
ALIGNMENT = 64
"""Of buffers, as Arrow recommends."""
RECORD_SIZE_MIN = 7
"""The fewest bytes of a record: six fields of one byte and the attributes."""
HEADER_OVERHEAD_MAX = 10
"""A record header's bytes beside its key and value, at most."""

MALFORMED = -1
"""The answer of a kernel that met bytes that cannot be."""
CORRUPT = -2
"""The answer of a kernel that met bytes that their checksum was not made of."""

# Columns of the table of batches, one row each: where its records lie in memory, and its header.
START, END, LIMIT, BASE_OFFSET, LAST_OFFSET_DELTA, LEADER_EPOCH, ATTRIBUTES = 0, 1, 2, 3, 4, 5, 6
BASE_TIMESTAMP, MAX_TIMESTAMP, PRODUCER_ID, RECORD_COUNT, POSITION, SIZE, CRC = 7, 8, 9, 10, 11, 12, 13
BATCH_FIELDS = 14

# What `decode_records` is told: bounds, and the address of every column it fills (0: not wanted).
FROM_OFFSET, TO_OFFSET, RANGED, RANGE_START, RANGE_END = 0, 1, 2, 3, 4
TO_OFFSETS, TO_TIMESTAMPS, TO_TIMESTAMP_TYPES, TO_LEADER_EPOCHS, TO_HASHES = 5, 6, 7, 8, 9
TO_KEY_ENDS, TO_KEY_DATA, TO_KEY_VALIDITY, TO_VALUE_ENDS, TO_VALUE_DATA, TO_VALUE_VALIDITY = 10, 11, 12, 13, 14, 15
TO_HEADERS_AT, CHECKED_BY, RECORDS_MAX = 16, 17, 18
DECODE_FIELDS = 19

# A row of a layout, which says for each buffer of an answer the field of the plan, bits for each record, bytes beside,
# and whether it is the data of values, of a size that only the records tell.
BUFFER_FIELD, RECORD_BITS, BYTES_BESIDE, IS_DATA = 0, 1, 2, 3

# What `decode_records` is told of the message in front of the buffers (`envelope`): where a copy of it is and its size,
# and where in it the numbers are.
MESSAGE_AT, MESSAGE_SIZE, BODY_SIZE_AT, ROWS_AT, NODES_AT, BUFFERS_AT = 0, 1, 2, 3, 4, 5
MESSAGE_FIELDS = 6
# Behind that for each column: the fields of the plan that its buffers have (0: none), the bytes of data for each record
# (0: it is the data of values), and the fields of what is answered that tell its nulls and its size.
COLUMN_VALIDITY, COLUMN_ENDS, COLUMN_DATA, RECORD_SIZE, NULLS_AT, SIZE_AT = 0, 1, 2, 3, 4, 5
MESSAGE_COLUMN_FIELDS = 6

# What `decode_records` answers.
ROWS, KEY_SIZE, KEY_NULLS, VALUE_SIZE, VALUE_NULLS, HEADER_COUNT, HEADER_SIZES, AT_BATCH = 0, 1, 2, 3, 4, 5, 6, 7
DECODED_FIELDS = 8
_BLOCK = 128
"""Records that are scanned before they are moved."""
DECODED_SIZE = DECODED_FIELDS + 6 * _BLOCK
"""Numbers that the answer has room for: behind its fields lies what is known of a block of records."""

# A column of variable-length values, as `encode_batches` and `hash_keys` read it: 8 numbers each.
OFFSETS_AT, OFFSETS_WIDE, DATA_AT, DATA_END, VALIDITY_AT, VALIDITY_FIRST = 0, 1, 2, 3, 4, 5
COLUMN_FIELDS = 6

# What `encode_batches` is told beside the columns (keys, values, header keys, header values).
ROWS, PARTITIONS_AT, SHARES_AT, TIMESTAMPS_AT, TIMESTAMP, TARGET, BATCH_SIZE_MAX, STAMPED_BY = 0, 1, 2, 3, 4, 5, 6, 7
LISTS_AT, LISTS_WIDE, LISTS_VALIDITY, LISTS_FIRST, SIZE_IN_ALL = 8, 9, 10, 11, 12
ENCODE_FIELDS = 13
KEYS, VALUES, HEADER_KEYS, HEADER_VALUES = 0, 1, 2, 3

# What is known of each partition while rows are encoded: the bytes and rows that are its share, and its present batch.
SHARE, SHARE_ROWS, WRITTEN_TO, BATCH_AT, BATCH_ROWS, BATCH_FIRST, BATCH_BASE, BATCH_MAX = 0, 1, 2, 3, 4, 5, 6, 7
SHARE_FIELDS = 8

# Columns of the table of batches that `encode_batches` answers.
AT, BYTES, PARTITION, FIRST, COUNT = 0, 1, 2, 3, 4
ENCODED_FIELDS = 5

_MASK_32 = 0xFFFF_FFFF
_INT64_MAX = 0x7FFF_FFFF_FFFF_FFFF
_MULTIPLIER = 0x5BD1_E995
_SEED = 0x9747_B28C
_LOW_31 = 0x7FFF_FFFF
_MIX_1 = 0xFF51_AFD7_ED55_8CCD - (1 << 64)
_MIX_2 = 0xC4CE_B9FE_1A85_EC53 - (1 << 64)
_CODEC_MAX = 4
_CRC_FROM = 21
_FOLDED_AHEAD = 2048
_POLYNOMIAL = 0x1_1EDC_6F41
_NOWHERE = 1 << 62
_READ_AHEAD = 16 * 1024
"""How far behind what is copied memory is brought near: about a batch, as producers make them."""
_COPIED_INLINE = 2048
"""Bytes that are not worth a call."""
_SMALL = 1 << 14
"""Numbers below this have one byte or two."""
_WORD = 8
_CONTINUED = 0x8080_8080_8080_8080 - (1 << 64)
"""The bit of every byte that says that a number goes on in the next one."""
_CARRIED = 0x7F7F_7F7F_7F7F_7F7F
"""The bits of every byte that are part of a number."""
_PLANE = 8 * _BLOCK
"""Of a block, the lengths of keys, then, so many bytes further, where they are; the same of values; then the deltas of
offsets, and those of timestamps, zigzag."""

_PROCESSOR = get_process_triple().partition("-")[0]
_CRC_FEATURE = {"x86_64": "sse4.2", "aarch64": "crc"}.get(_PROCESSOR, "")
CHECKS_CRC = bool(get_host_cpu_features().get(_CRC_FEATURE)) and getattr(config, "CPU_NAME", None) is None
"""Whether kernels can compute checksums: the processor has an instruction for it, and code is compiled for it."""

FOLDS_CRC = CHECKS_CRC and _PROCESSOR == "x86_64" and all(map(get_host_cpu_features().get, ("avx512f", "vpclmulqdq")))
"""Whether they multiply without carries, 64 bytes at a time, to that end."""
SQUEEZES = (
    _PROCESSOR == "x86_64"
    and bool(get_host_cpu_features().get("bmi2"))
    and getattr(config, "CPU_NAME", None) is None
    and get_host_cpu_name() not in ("znver1", "znver2")
)
"""Whether kernels use the processor's instruction to squeeze bits; there are some where it takes ages."""


def _reader(bits: int, *, big: bool, signed: bool) -> Callable[[int], int]:
    """Make a function that reads `bits` at an address, unaligned, as an int64."""

    def read(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(bits)
            value = builder.load(builder.inttoptr(arguments[0], kind.as_pointer()), align=1)
            if big and bits > 8:
                value = builder.bswap(value)
            wide = ir.IntType(64)
            if bits == 64:
                return value
            return builder.sext(value, wide) if signed else builder.zext(value, wide)

        return types.int64(types.int64), generate

    return cast(Callable[[int], int], intrinsic(read))


def _writer(bits: int, *, big: bool) -> Callable[[int, int], None]:
    """Make a function that writes the low `bits` of an int64 at an address, unaligned."""

    def write(_: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.IntType(bits)
            value = arguments[1] if bits == 64 else builder.trunc(arguments[1], kind)
            if big and bits > 8:
                value = builder.bswap(value)
            builder.store(value, builder.inttoptr(arguments[0], kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return cast(Callable[[int, int], None], intrinsic(write))


_u8 = _reader(8, big=False, signed=False)
_u16 = _reader(16, big=False, signed=False)
_u32 = _reader(32, big=False, signed=False)
_i32 = _reader(32, big=False, signed=True)
_i64 = _reader(64, big=False, signed=True)
_be16 = _reader(16, big=True, signed=True)
_be32 = _reader(32, big=True, signed=True)
_be64 = _reader(64, big=True, signed=True)
_put8 = _writer(8, big=False)
_put16 = _writer(16, big=False)
_put32 = _writer(32, big=False)
_put64 = _writer(64, big=False)
_put_be16 = _writer(16, big=True)
_put_be32 = _writer(32, big=True)
_put_be64 = _writer(64, big=True)


def _squeeze_bits(_: Any, word: Any, mask: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(64)
        word, mask = arguments
        if SQUEEZES:
            kind = ir.FunctionType(wide, (wide, wide))
            return builder.call(_declare(builder.module, kind, "llvm.x86.bmi.pext.64"), (word, mask))
        zeros = builder.cttz(mask, ir.Constant(ir.IntType(1), 0))
        value = builder.lshr(builder.and_(word, mask), builder.and_(zeros, ir.Constant(wide, 56)))
        for low, width in ((0x007F_007F_007F_007F, 7), (0x0000_3FFF_0000_3FFF, 14), (0x0FFF_FFFF, 28)):
            high = low << 8 * width // 7
            shifted = builder.lshr(builder.and_(value, ir.Constant(wide, high)), ir.Constant(wide, width // 7))
            value = builder.or_(builder.and_(value, ir.Constant(wide, low)), shifted)
        return builder.lshr(value, builder.and_(zeros, ir.Constant(wide, 7)))

    return types.int64(types.int64, types.int64), generate


def _count_ones(_: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), generate


def _mover(size: int) -> Callable[[int, int], None]:
    """Make a function that copies `size` bytes at once, to a target from a source."""

    def move(_: Any, target: Any, source: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = ir.VectorType(ir.IntType(8), size)
            value = builder.load(builder.inttoptr(arguments[1], kind.as_pointer()), align=1)
            builder.store(value, builder.inttoptr(arguments[0], kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return cast(Callable[[int, int], None], intrinsic(move))


def _move_bytes(_: Any, target: Any, source: Any, size: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer, size, flag = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(1)
        memcpy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, size])
        addresses = [builder.inttoptr(address, pointer) for address in arguments[:2]]
        builder.call(memcpy, [*addresses, arguments[2], ir.Constant(flag, 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _declare(module: Any, kind: Any, name: str) -> Any:
    """Find a function of LLVM's own in a module, or make it known there."""
    return module.globals.get(name) or ir.Function(module, kind, name)


def _crc_step(bits: int) -> Callable[[int, int], int]:
    """Make a function that takes a CRC-32C over `bits` more, with the processor's own instruction."""

    def step(_: Any, crc: Any, data: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            byte, word, wide = ir.IntType(8), ir.IntType(32), ir.IntType(64)
            if not CHECKS_CRC:  # Never called then, but compiled.
                return arguments[0]
            name, state, data_type = {
                ("x86_64", 64): ("llvm.x86.sse42.crc32.64.64", wide, wide),
                ("x86_64", 8): ("llvm.x86.sse42.crc32.32.8", word, byte),
                ("aarch64", 64): ("llvm.aarch64.crc32cx", word, wide),
                ("aarch64", 8): ("llvm.aarch64.crc32cb", word, word),
            }[_PROCESSOR, bits]
            function = _declare(builder.module, ir.FunctionType(state, (state, data_type)), name)
            crc, data = arguments
            if state is not wide:
                crc = builder.trunc(crc, state)
            if data_type is not wide:
                data = builder.trunc(data, data_type)
            crc = builder.call(function, (crc, data))
            return crc if state is wide else builder.zext(crc, wide)

        return types.int64(types.int64, types.int64), generate

    return cast(Callable[[int, int], int], intrinsic(step))


def _power(exponent: int) -> int:
    """x to the `exponent`, modulo the polynomial of CRC-32C, as a factor for numbers whose first bit is the lowest."""
    value = 1
    for _ in range(exponent):
        value = (value << 1) ^ (_POLYNOMIAL if value >> 31 else 0)
    return int(f"{value:032b}"[::-1], 2) << 1


def _fold_lines(_: Any, crc: Any, at: Any, lines: Any) -> Any:
    """Take a CRC-32C over `lines` times 256 bytes, at least one time, by multiplication without carries.

    Sixteen lanes of 16 bytes are each taken 256 bytes further, at which they are congruent to themselves times a power
    of x, and added to what is there. What is left in the end is folded into one lane, and that taken the usual way.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, byte = ir.IntType(64), ir.IntType(8)
        if not FOLDS_CRC:  # Never called then, but compiled.
            return arguments[0]
        kind = ir.VectorType(wide, 8)
        multiply = _declare(builder.module, ir.FunctionType(kind, (kind, kind, byte)), "llvm.x86.pclmulqdq.512")

        def factors(*distances: int) -> Any:
            """What takes each of four lanes so many bytes further; 0 drops the lane."""
            pairs = ((_power(8 * d + 32), _power(8 * d - 32)) if d else (0, 0) for d in distances)
            return ir.Constant(kind, [factor for pair in pairs for factor in pair])

        def moved(lanes: Any, by: Any) -> Any:
            low, high = (builder.call(multiply, (lanes, by, ir.Constant(byte, which))) for which in (0x00, 0x11))
            return builder.xor(low, high)

        def loaded(address: Any, place: int) -> Any:
            pointer = builder.inttoptr(builder.add(address, ir.Constant(wide, 64 * place)), kind.as_pointer())
            return builder.load(pointer, align=1)

        crc, first, lines = arguments
        lanes = [cast(Any, cgutils).alloca_once(builder, kind) for _ in range(4)]
        for place, lane in enumerate(lanes):
            value = loaded(first, place)
            if place == 0:
                begin = builder.insert_element(ir.Constant(kind, None), crc, ir.Constant(ir.IntType(32), 0))
                value = builder.xor(value, begin)
            builder.store(value, lane)
        pointer, word = byte.as_pointer(), ir.IntType(32)
        prefetch = _declare(
            builder.module, ir.FunctionType(ir.VoidType(), (pointer, word, word, word)), "llvm.prefetch.p0"
        )
        further = factors(256, 256, 256, 256)
        one = ir.Constant(wide, 1)
        with cgutils.for_range_slice(builder, one, lines, one, intp=wide) as (line, _):
            address = builder.add(first, builder.shl(line, ir.Constant(wide, 8)))
            for place, lane in enumerate(lanes):
                ahead = builder.inttoptr(builder.add(address, ir.Constant(wide, _FOLDED_AHEAD + 64 * place)), pointer)
                builder.call(prefetch, (ahead, *(ir.Constant(word, number) for number in (0, 3, 1))))
                builder.store(builder.xor(moved(builder.load(lane), further), loaded(address, place)), lane)
        rest = builder.load(lanes[0])
        for lane in lanes[1:]:
            rest = builder.xor(moved(rest, factors(64, 64, 64, 64)), builder.load(lane))
        ends = moved(rest, factors(48, 32, 16, 0))
        crc = ir.Constant(wide, 0)
        step = _declare(builder.module, ir.FunctionType(wide, (wide, wide)), "llvm.x86.sse42.crc32.64.64")
        for half in range(2):
            word = builder.extract_element(rest, ir.Constant(ir.IntType(32), 6 + half))
            for lane in range(3):
                place = ir.Constant(ir.IntType(32), 2 * lane + half)
                word = builder.xor(word, builder.extract_element(ends, place))
            crc = builder.call(step, (crc, word))
        return crc

    return types.int64(types.int64, types.int64, types.int64), generate


def _prefetcher(*, write: bool, level: int = 1) -> Callable[[int], None]:
    """Make a function that has the line at an address brought into a cache of some level.

    Any address will do, it is never accessed.
    """

    def prefetch(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), (pointer, word, word, word))
            function = _declare(builder.module, kind, "llvm.prefetch.p0")
            options = (ir.Constant(word, number) for number in (int(write), 4 - level, 1))
            builder.call(function, (builder.inttoptr(arguments[0], pointer), *options))
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return cast(Callable[[int], None], intrinsic(prefetch))


def _count_leading_zeros(_: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


_copy_32 = _mover(32)
_copy_64 = _mover(64)
_copy_bytes = cast(Callable[[int, int, int], None], intrinsic(_move_bytes))
_prefetch_to_read = _prefetcher(write=False)
_prefetch_to_read_later = _prefetcher(write=False, level=2)
_prefetch_to_write = _prefetcher(write=True)
_crc_lines = cast(Callable[[int, int, int], int], intrinsic(_fold_lines))
_crc_8 = _crc_step(8)
_crc_64 = _crc_step(64)
_squeeze = cast(Callable[[int, int], int], intrinsic(_squeeze_bits))
"""The bits of a number that the mask chooses, side by side; the mask is whole bytes side by side but for their 8th."""
_ones = cast(Callable[[int], int], intrinsic(_count_ones))
_leading_zeros = cast(Callable[[int], int], intrinsic(_count_leading_zeros))


@inlined
def _copy(target: int, source: int, size: int, limit: int) -> None:
    """Copy `size` bytes; up to `SLACK` more are written, and none at or above `limit` is read."""
    if size <= _COPIED_INLINE and source + size + 64 <= limit:
        if size <= 32:
            _copy_32(target, source)
        else:
            _copy_64(target, source)
            if size > 64:
                _copy_64(target + 64, source + 64)
                moved = 128
                while moved < size:
                    _copy_64(target + moved, source + moved)
                    moved += 64
    else:
        _copy_bytes(target, source, size)


@inlined
def _zigzag(value: int) -> int:
    return (value << 1) ^ (value >> 63)


@inlined
def _unzigzag(value: int) -> int:
    """What a zigzag number stands for."""
    return ((value >> 1) & _INT64_MAX) ^ -(value & 1)


@inlined
def _varint(at: int, end: int) -> tuple[int, int]:
    """Read a zigzag number: value and the address behind it.

    A number that does not end is 0 and leads nowhere: to an address above any end, from which nothing is read.
    """
    value = 0
    shift = 0
    while at < end and shift < 70:
        byte = _u8(at)
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return _unzigzag(value), at
        shift += 7
    return 0, _NOWHERE


@inlined
def _front(word: int) -> tuple[int, int, int, int, int, int, int]:
    """Find the numbers in the first eight bytes of a record: its size, attributes, the deltas of timestamp and offset.

    Answers how far behind the record's start the key's length comes, 0 if the numbers do not fit or are negative; the
    width of the size; what `word` shares with all words that are laid out alike, and in which bits; and the bits that
    hold the size, the zigzag delta of the timestamp, and the delta of the offset.
    """
    # A number ends at the first byte that does not go on, so all ends are known before any number is.
    ends = ~word & _CONTINUED
    to_size = ends ^ (ends - 1)
    ends &= ends - 1
    to_attributes = ends ^ (ends - 1)
    ends &= ends - 1
    to_timestamp = ends ^ (ends - 1)
    ends &= ends - 1
    to_offset = ends ^ (ends - 1)
    offset_bits = to_offset & ~to_timestamp & _CARRIED
    signs = 1 | (offset_bits & -offset_bits)
    fits = ends != 0 and to_attributes == to_size << 8 | 0xFF and word & signs == 0
    mask = (to_offset & _CONTINUED) | signs
    return (
        _ones(to_offset) >> 3 if fits else 0,
        _ones(to_size) >> 3,
        word & mask,
        mask,
        to_size & _CARRIED & ~1,
        to_timestamp & ~to_attributes & _CARRIED,
        offset_bits & ~signs,
    )


@inlined
def _length(word: int) -> tuple[int, int, int, int, int]:
    """Find the length of a key or a value in the eight bytes where it begins.

    Answers its width, 0 if it is longer or less than -1; what `word` shares with all words that are laid out alike,
    and in which bits; the bits that hold the length; and whether it is -1, with none of them.
    """
    ends = ~word & _CONTINUED
    to_end = ends ^ (ends - 1)
    if word & 1:
        return 1 if word & 0xFF == 1 else 0, 1, 0xFF, 0, 1
    mask = (to_end & _CONTINUED) | 1
    return _ones(to_end) >> 3 if ends else 0, word & mask, mask, to_end & _CARRIED & ~1, 0


_LONG, _SHORT = 1024, 128


def _zeros_table(size: int) -> NDArray[np.uint32]:
    """What `size` bytes of zeros make of a CRC, by each of its four bytes: the CRC is linear in its bits."""
    bits = [crc32c(bytes(size), _MASK_32 ^ 1 << bit) ^ _MASK_32 for bit in range(32)]
    table = np.zeros((4, 256), np.uint32)
    for bit, effect in enumerate(bits):
        chosen = np.arange(256) >> (bit & 7) & 1 == 1
        table[bit >> 3, chosen] ^= np.uint32(effect)
    return table


CRC_TABLES = np.stack([_zeros_table(_LONG), _zeros_table(_SHORT)])
"""How to join checksums of neighbouring pieces: a kernel that checks them is given the address."""


@inlined
def _crc_shift(tables: int, crc: int) -> int:
    """The CRC behind as many bytes of zeros as the table is for."""
    return (
        _u32(tables + 4 * (crc & 0xFF))
        ^ _u32(tables + 1024 + 4 * ((crc >> 8) & 0xFF))
        ^ _u32(tables + 2048 + 4 * ((crc >> 16) & 0xFF))
        ^ _u32(tables + 3072 + 4 * (crc >> 24))
    )


@inlined
def _crc_thirds(crc: int, at: int, third: int, tables: int) -> int:
    """Take a CRC over three pieces at once, because the instruction takes three times as long as it occupies."""
    second, last = 0, 0
    for line in range(at, at + third, 64):
        for place in range(line, line + 64, 8):
            crc = _crc_64(crc, _i64(place))
            second = _crc_64(second, _i64(place + third))
            last = _crc_64(last, _i64(place + 2 * third))
        if third == _LONG:
            _prefetch_to_read(line + 3 * third)
            _prefetch_to_read(line + 4 * third)
            _prefetch_to_read(line + 5 * third)
    return _crc_shift(tables, _crc_shift(tables, crc) ^ second) ^ last


@inlined
def _crc(at: int, end: int, tables: int) -> int:
    """The CRC-32C of the bytes from `at` to `end`."""
    crc = _MASK_32
    if FOLDS_CRC and end - at >= 256:
        lines = (end - at) >> 8
        crc = _crc_lines(crc, at, lines)
        at += lines << 8
    while end - at >= 3 * _LONG:
        crc = _crc_thirds(crc, at, _LONG, tables)
        at += 3 * _LONG
    while end - at >= 3 * _SHORT:
        crc = _crc_thirds(crc, at, _SHORT, tables + 4096)
        at += 3 * _SHORT
    while end - at >= 8:
        crc = _crc_64(crc, _i64(at))
        at += 8
    while at < end:
        crc = _crc_8(crc, _u8(at))
        at += 1
    return crc ^ _MASK_32


@inlined
def _murmur2(at: int, size: int) -> int:
    """Kafka's hash of a key, as an unsigned 32-bit number (`hashing.murmur2`)."""
    value = (_SEED ^ size) & _MASK_32
    whole = at + (size & ~3)
    while at < whole:
        word = (_u32(at) * _MULTIPLIER) & _MASK_32
        word = ((word ^ (word >> 24)) * _MULTIPLIER) & _MASK_32
        value = ((value * _MULTIPLIER) & _MASK_32) ^ word
        at += 4
    rest = size & 3
    if rest:
        if rest == 3:
            value ^= _u8(at + 2) << 16
        if rest >= 2:
            value ^= _u8(at + 1) << 8
        value = ((value ^ _u8(at)) * _MULTIPLIER) & _MASK_32
    value = ((value ^ (value >> 13)) * _MULTIPLIER) & _MASK_32
    return value ^ (value >> 15)


@inlined
def _range_hash(murmur: int) -> int:
    """Where in the key range a murmur2, or an offset, lies (`hashing.range_hash`).

    In signed numbers throughout: Numba compares a signed one with an unsigned one as floats.
    """
    value = murmur
    value ^= (value >> 33) & _LOW_31
    value *= _MIX_1
    value ^= (value >> 33) & _LOW_31
    value *= _MIX_2
    value ^= (value >> 33) & _LOW_31
    return value & _INT64_MAX


@inlined
def _clear_bit(bitmap: int, bit: int) -> None:
    at = bitmap + (bit >> 3)
    _put8(at, _u8(at) & ~(1 << (bit & 7)))


@inlined
def _is_valid(bitmap: int, bit: int) -> bool:
    return bitmap == 0 or (_u8(bitmap + (bit >> 3)) >> (bit & 7)) & 1 == 1


@kernel
def count_batches(address: int, size: int) -> int:
    """Count the whole batches in `size` bytes; a length that cannot be counts as one, for `read_headers` to find."""
    position = 0
    count = 0
    while size - position >= LENGTH_END:
        batch_size = _be32(address + position + 8) + LENGTH_END
        if batch_size < HEADER_SIZE:
            return count + 1
        if batch_size > size - position:
            break
        position += batch_size
        count += 1
    return count


@kernel
def read_headers(address: int, size: int, table: NDArray[np.int64]) -> int:
    """Fill the table of batches; answers how many are sound, which is fewer than its rows if one is not."""
    position = 0
    limit = address + size
    for row in range(len(table)):
        if size - position < HEADER_SIZE:
            return row
        at = address + position
        batch_size = _be32(at + 8) + LENGTH_END
        attributes = _be16(at + 21)
        last_offset_delta = _be32(at + 23)
        base_offset = _be64(at)
        count = _be32(at + 57)
        if (
            batch_size < HEADER_SIZE
            or batch_size > size - position
            or _u8(at + 16) != MAGIC
            or attributes & COMPRESSION_MASK > _CODEC_MAX
            or base_offset < 0
            or last_offset_delta < 0
            or base_offset > _INT64_MAX - last_offset_delta
            or count < 0
            or count > last_offset_delta + 1
        ):
            return row
        table[row, START] = at + HEADER_SIZE
        table[row, END] = at + batch_size
        table[row, LIMIT] = limit
        table[row, BASE_OFFSET] = base_offset
        table[row, LAST_OFFSET_DELTA] = last_offset_delta
        table[row, LEADER_EPOCH] = _be32(at + 12)
        table[row, ATTRIBUTES] = attributes
        table[row, BASE_TIMESTAMP] = _be64(at + 27)
        table[row, MAX_TIMESTAMP] = _be64(at + 35)
        table[row, PRODUCER_ID] = _be64(at + 43)
        table[row, RECORD_COUNT] = count
        table[row, POSITION] = position
        table[row, SIZE] = batch_size
        table[row, CRC] = _be32(at + 17) & _MASK_32
        position += batch_size
    return len(table)


@kernel
def choose_batches(table: NDArray[np.int64], from_offset: int, to_offset: int) -> tuple[int, int]:
    """Move the rows of batches to decode to the front of the table: all but control batches and those out of bounds.

    Answers how many they are, and the highest offset of all batches, -1 if there are none.
    """
    count = 0
    highest = -1
    for row in range(len(table)):
        last_offset = table[row, BASE_OFFSET] + table[row, LAST_OFFSET_DELTA]
        highest = max(highest, last_offset)
        if last_offset < from_offset or table[row, BASE_OFFSET] >= to_offset or table[row, ATTRIBUTES] & CONTROL:
            continue
        if row != count:
            for field in range(BATCH_FIELDS):
                table[count, field] = table[row, field]
        count += 1
    return count, highest


@kernel
def next_batches(table: NDArray[np.int64], first: int, count: int, size_max: int) -> tuple[int, int]:
    """Take rows from `first` on, below `count`: at most `size_max` bytes or one batch.

    Answers the first row that is not taken, and whether any that is taken is compressed.
    """
    size = 0
    compressed = 0
    for row in range(first, count):
        size += table[row, SIZE]
        if size > size_max and row > first:
            return row, compressed
        compressed |= table[row, ATTRIBUTES] & COMPRESSION_MASK
    return count, compressed


@kernel
def lay_out(table: NDArray[np.int64], first: int, end: int, layout: NDArray[np.int64], plan: NDArray[np.int64]) -> int:
    """Find room for all buffers of an answer, each aligned and followed by `SLACK`; answers where they end.

    Puts down in the plan where each buffer is, none at 0, and how many records the batches claim. MALFORMED if one of
    them claims more than its bytes can hold.
    """
    count = 0
    size = 0
    for row in range(first, end):
        claimed = table[row, RECORD_COUNT]
        held = table[row, END] - table[row, START]
        if claimed * RECORD_SIZE_MIN > held:
            return MALFORMED
        count += claimed
        size += held
    plan[:] = 0
    plan[RECORDS_MAX] = count
    place = ALIGNMENT
    for buffer in range(len(layout)):
        plan[layout[buffer, BUFFER_FIELD]] = place
        place += size if layout[buffer, IS_DATA] else (layout[buffer, RECORD_BITS] * count + 7) >> 3
        place = (place + layout[buffer, BYTES_BESIDE] + SLACK + ALIGNMENT - 1) & -ALIGNMENT
    return place


@inlined
def _prepare(validity: int, ends: int, rows: int) -> None:
    """Make a column of variable-length values start at 0 with nothing null; 7 bytes too many are set."""
    if validity:
        for place in range(0, (rows + 7) >> 3, 8):
            _put64(validity + place, -1)
    if ends:
        _put32(ends, 0)


@called
def _gather(
    lengths: int, rows: int, row: int, data: int, size: int, ends: int, validity: int, limit: int
) -> tuple[int, int]:
    """Move a block of one column, behind the `size` bytes that are there; answers the new size and the nulls."""
    nulls = 0
    ends += 4 * row + 4
    for place in range(rows):
        length = _i64(lengths + 8 * place)
        if length >= 0:
            if data:
                if length > 32:
                    _prefetch_to_write(data + size + 1024)
                    _prefetch_to_write(data + size + 1088)
                _copy(data + size, _i64(lengths + _PLANE + 8 * place), length, limit)
                size += length
        else:
            nulls += 1
            _clear_bit(validity, row + place)
        if data:
            _put32(ends + 4 * place, size)
    return size, nulls


@called
def _take_plain(
    at: int,
    safe_end: int,
    rows_max: int,
    previous: int,
    deltas: int,
    row: int,
    key_data: int,
    key_size: int,
    key_ends: int,
    value_data: int,
    value_size: int,
    value_ends: int,
) -> tuple[int, int, int, int, int]:
    """Scan and move at once the records of a block, as long as they are plain.

    They have a key, a value of at most 2 KiB and no headers, numbers of few bytes, and end so far before the end of
    memory that whole words can be read and copied: the processor copies one while it finds the next, where two
    loops would each wait for themselves. Columns whose data is at 0 are not wanted. Answers how many
    records were taken, the address behind them, the offset delta of the last one, and the sizes of keys and values.
    """
    key_ends += 4 * row + 4
    value_ends += 4 * row + 4
    rows = 0
    taken = -1
    while taken != rows and rows < rows_max and at < safe_end:
        taken = rows
        # What the next record is like holds for those that follow, as a rule: the inner loop has no other case.
        key_size_after, size_width, shape, shape_mask, size_mask, timestamp_mask, offset_mask = _front(_i64(at))
        key_word = _i64(at + key_size_after)
        key_width, key_shape, key_shape_mask, key_mask, is_null = _length(key_word)
        key_after = key_size_after + key_width
        value_size_at = at + key_after + _squeeze(key_word, key_mask)
        if key_size_after == 0 or key_width == 0 or is_null or value_size_at >= safe_end:
            break
        value_width, value_shape, value_shape_mask, value_mask, is_null = _length(_i64(value_size_at))
        if value_width == 0 or is_null:
            break
        while rows < rows_max and at < safe_end:
            word = _i64(at)
            key_word = _i64(at + key_size_after)
            record_end = at + size_width + _squeeze(word, size_mask)
            if (word ^ shape) & shape_mask != 0 or (key_word ^ key_shape) & key_shape_mask != 0:
                break
            key_at = at + key_after
            key_length = _squeeze(key_word, key_mask)
            value_size_at = key_at + key_length
            if record_end > safe_end or value_size_at >= record_end:
                break
            value_word = _i64(value_size_at)
            value_at = value_size_at + value_width
            value_length = _squeeze(value_word, value_mask)
            if (value_word ^ value_shape) & value_shape_mask != 0 or value_length > _COPIED_INLINE:
                break
            offset_delta = _squeeze(word, offset_mask)
            if value_at + value_length + 1 != record_end or _u8(record_end - 1) != 0 or offset_delta <= previous:
                break
            previous = offset_delta
            _put64(deltas + 8 * rows, offset_delta)
            _put64(deltas + _PLANE + 8 * rows, _squeeze(word, timestamp_mask))
            if key_data:
                target = key_data + key_size
                _copy_32(target, key_at)
                moved = 32
                while moved < key_length:
                    _copy_32(target + moved, key_at + moved)
                    moved += 32
                key_size += key_length
                _put32(key_ends + 4 * rows, key_size)
            if value_data:
                target = value_data + value_size
                _prefetch_to_write(target + 1024)
                _prefetch_to_write(target + 1088)
                _prefetch_to_read_later(value_at + _READ_AHEAD)
                _copy_64(target, value_at)
                if value_length > 64:
                    _prefetch_to_read_later(value_at + _READ_AHEAD + 64)
                    _copy_64(target + 64, value_at + 64)
                    if value_length > 128:
                        moved = 128
                        while moved < value_length:
                            _copy_64(target + moved, value_at + moved)
                            moved += 64
                value_size += value_length
                _put32(value_ends + 4 * rows, value_size)
            at = record_end
            rows += 1
    return rows, at, previous, key_size, value_size


@inlined
def _seal(
    base: int, size: int, rows: int, plan: NDArray[np.int64], message: NDArray[np.int64], answer: NDArray[np.int64]
) -> None:
    """Write the message in front of the buffers, which end `size` bytes behind `base`, and its numbers."""
    start = base - message[MESSAGE_SIZE]
    _copy_bytes(start, message[MESSAGE_AT], message[MESSAGE_SIZE])
    _put64(start + message[BODY_SIZE_AT], size)
    _put64(start + message[ROWS_AT], rows)
    node = start + message[NODES_AT]
    buffer = start + message[BUFFERS_AT]
    for column in range(MESSAGE_FIELDS, len(message), MESSAGE_COLUMN_FIELDS):
        validity = message[column + COLUMN_VALIDITY]
        ends = message[column + COLUMN_ENDS]
        nulls = answer[message[column + NULLS_AT]] if validity else 0
        record_size = message[column + RECORD_SIZE]
        _put64(node, rows)
        _put64(node + 8, nulls)
        node += 16
        _put64(buffer, plan[validity] - base if nulls else 0)
        _put64(buffer + 8, (rows + 7) >> 3 if nulls else 0)
        buffer += 16
        if ends:
            _put64(buffer, plan[ends] - base)
            _put64(buffer + 8, 4 * rows + 4)
            buffer += 16
        _put64(buffer, plan[message[column + COLUMN_DATA]] - base)
        _put64(buffer + 8, record_size * rows if record_size else answer[message[column + SIZE_AT]])
        buffer += 16


@kernel
def decode_records(
    table: NDArray[np.int64],
    first: int,
    end_row: int,
    plan: NDArray[np.int64],
    base: int,
    body_size: int,
    message: NDArray[np.int64],
    answer: NDArray[np.int64],
) -> int:
    """Read the records of some rows of the table, keep those within the bounds, and gather them into columns.

    The plan is that of `lay_out` and the bounds; its places are counted from `base`, and `body_size` is where they end.
    Records are taken a block at a time. As long as they are plain and all wanted, they are scanned and moved at once
    (`_take_plain`); of others one tight loop finds out where everything is, then one for each column moves it while
    the block is in the nearest cache. Where there is a message, it is written in front of `base`.
    """
    for field in range(TO_OFFSETS, TO_HEADERS_AT + 1):
        if plan[field]:
            plan[field] += base
    from_offset = plan[FROM_OFFSET]
    to_offset = plan[TO_OFFSET]
    ranged = plan[RANGED] != 0
    range_start = plan[RANGE_START]
    range_end = plan[RANGE_END]
    to_offsets = plan[TO_OFFSETS]
    to_timestamps = plan[TO_TIMESTAMPS]
    to_headers_at = plan[TO_HEADERS_AT]
    _prepare(plan[TO_KEY_VALIDITY], plan[TO_KEY_ENDS], plan[RECORDS_MAX])
    _prepare(plan[TO_VALUE_VALIDITY], plan[TO_VALUE_ENDS], plan[RECORDS_MAX])
    # The caller's memory: an array of one's own would go with its last mention, before the addresses are used.
    keys = answer.ctypes.data + 8 * DECODED_FIELDS
    values = keys + 2 * _PLANE
    deltas = keys + 4 * _PLANE
    row = 0
    key_size = 0
    key_nulls = 0
    value_size = 0
    value_nulls = 0
    header_count = 0
    header_sizes = 0
    # What the last record was like: where its numbers end, and which bits hold them.
    key_size_after, size_width, shape, shape_mask, size_mask, timestamp_mask, offset_mask = _front(0)
    key_width, key_shape, key_shape_mask, key_mask, key_is_null = _length(0)
    value_width, value_shape, value_shape_mask, value_mask, value_is_null = _length(0)
    for batch in range(first, end_row):
        answer[AT_BATCH] = batch
        at = table[batch, START]
        end = table[batch, END]
        limit = table[batch, LIMIT]
        base_offset = table[batch, BASE_OFFSET]
        last_delta = table[batch, LAST_OFFSET_DELTA]
        least_delta = from_offset - base_offset
        most_delta = to_offset - base_offset - 1
        base_timestamp = table[batch, BASE_TIMESTAMP]
        append_time = table[batch, ATTRIBUTES] & LOG_APPEND_TIME != 0
        delta_bits = -1
        if append_time:
            base_timestamp = table[batch, MAX_TIMESTAMP]
            delta_bits = 0
        filtered = ranged or least_delta > 0 or most_delta < last_delta
        left = table[batch, RECORD_COUNT]
        previous = -1
        safe_end = limit - 2 * _WORD
        plain = not filtered and plan[TO_HASHES] == 0
        plain_end = min(end, limit - SLACK)
        # The checksum of expanded batches was of other bytes, and has been looked at.
        checked = plan[CHECKED_BY] != 0 and table[batch, ATTRIBUTES] & COMPRESSION_MASK == 0
        if checked and _crc(at - HEADER_SIZE + _CRC_FROM, end, plan[CHECKED_BY]) != table[batch, CRC]:
            return CORRUPT
        while left > 0:
            rows = 0
            if plain:
                rows, at, previous, key_size, value_size = _take_plain(
                    at,
                    plain_end,
                    min(left, _BLOCK),
                    previous,
                    deltas,
                    row,
                    plan[TO_KEY_DATA],
                    key_size,
                    plan[TO_KEY_ENDS],
                    plan[TO_VALUE_DATA],
                    value_size,
                    plan[TO_VALUE_ENDS],
                )
            taken = rows
            scanned = 0 if taken else min(left, _BLOCK)
            left -= taken + scanned
            for place in range(row, row + taken if to_headers_at else row):
                # They have none, which is what the last byte of any of them says.
                _put64(to_headers_at + 24 * place, at - 1)
                _put64(to_headers_at + 24 * place + 8, at)
                _put64(to_headers_at + 24 * place + 16, limit)
            for _ in range(scanned):
                fits = False
                headers = 0
                if at <= safe_end:
                    word = _i64(at)
                    alike = (word ^ shape) & shape_mask == 0
                    if not alike:
                        front = _front(word)
                        alike = front[0] != 0
                        if alike:
                            key_size_after, size_width, shape, shape_mask = front[:4]
                            size_mask, timestamp_mask, offset_mask = front[4:]
                    if alike:
                        record_end = at + size_width + _squeeze(word, size_mask)
                        timestamp_delta = _squeeze(word, timestamp_mask)
                        offset_delta = _squeeze(word, offset_mask)
                        key_size_at = at + key_size_after
                        word = _i64(key_size_at)
                        alike = (word ^ key_shape) & key_shape_mask == 0
                        if not alike:
                            found = _length(word)
                            alike = found[0] != 0
                            if alike:
                                key_width, key_shape, key_shape_mask, key_mask, key_is_null = found
                        key_length = _squeeze(word, key_mask)
                        key_at = key_size_at + key_width
                        value_size_at = key_at + key_length
                        key_length -= key_is_null
                        if alike and value_size_at <= safe_end:
                            word = _i64(value_size_at)
                            alike = (word ^ value_shape) & value_shape_mask == 0
                            if not alike:
                                found = _length(word)
                                alike = found[0] != 0
                                if alike:
                                    value_width, value_shape, value_shape_mask, value_mask, value_is_null = found
                            value_length = _squeeze(word, value_mask)
                            value_at = value_size_at + value_width
                            headers_at = value_at + value_length
                            value_length -= value_is_null
                            rest = record_end - headers_at - 1
                            if alike and rest >= 0 and record_end <= end:
                                headers = _u8(headers_at)
                                if headers == 0:
                                    fits = rest == 0
                                else:
                                    fits = headers & 0x81 == 0 and headers <= rest
                                    headers >>= 1
                if not fits:
                    size, at = _varint(at, end)
                    if size < RECORD_SIZE_MIN - 1 or size > end - at:
                        return MALFORMED
                    record_end = at + size
                    timestamp_at = at + 1
                    timestamp_delta, offset_at = _varint(timestamp_at, record_end)
                    timestamp_delta = _zigzag(timestamp_delta)
                    offset_delta, key_size_at = _varint(offset_at, record_end)
                    key_length, key_at = _varint(key_size_at, record_end)
                    if key_at > record_end or key_length < -1 or key_length > record_end - key_at:
                        return MALFORMED
                    value_size_at = key_at + max(key_length, 0)
                    value_length, value_at = _varint(value_size_at, record_end)
                    if value_at > record_end or value_length < -1 or value_length > record_end - value_at:
                        return MALFORMED
                    headers_at = value_at + max(value_length, 0)
                    headers, at = _varint(headers_at, record_end)
                    if at > record_end or headers < 0 or headers > (record_end - at) >> 1:
                        return MALFORMED
                    if headers == 0 and at != record_end:
                        return MALFORMED
                at = record_end
                if offset_delta <= previous:
                    return MALFORMED
                previous = offset_delta
                if filtered:
                    if offset_delta < least_delta or offset_delta > most_delta:
                        continue
                    if ranged:
                        place = _murmur2(key_at, key_length) if key_length >= 0 else base_offset + offset_delta
                        place = _range_hash(place)
                        if place < range_start or place > range_end:
                            continue
                _put64(keys + 8 * rows, key_length)
                _put64(keys + _PLANE + 8 * rows, key_at)
                _put64(values + 8 * rows, value_length)
                _put64(values + _PLANE + 8 * rows, value_at)
                _put64(deltas + 8 * rows, offset_delta)
                _put64(deltas + _PLANE + 8 * rows, timestamp_delta)
                if to_headers_at:
                    _put64(to_headers_at + 24 * (row + rows), headers_at)
                    _put64(to_headers_at + 24 * (row + rows) + 8, record_end)
                    _put64(to_headers_at + 24 * (row + rows) + 16, limit)
                    header_count += headers
                    header_sizes += record_end - headers_at
                rows += 1
            if to_offsets:
                for place in range(rows):
                    _put64(to_offsets + 8 * (row + place), base_offset + _i64(deltas + 8 * place))
            if to_timestamps:
                for place in range(rows):
                    delta = _unzigzag(_i64(deltas + _PLANE + 8 * place)) & delta_bits
                    _put64(to_timestamps + 8 * (row + place), base_timestamp + delta)
            if plan[TO_KEY_VALIDITY] and not taken:
                key_size, nulls = _gather(
                    keys, rows, row, plan[TO_KEY_DATA], key_size, plan[TO_KEY_ENDS], plan[TO_KEY_VALIDITY], limit
                )
                key_nulls += nulls
            if plan[TO_VALUE_VALIDITY] and not taken:
                value_size, nulls = _gather(
                    values,
                    rows,
                    row,
                    plan[TO_VALUE_DATA],
                    value_size,
                    plan[TO_VALUE_ENDS],
                    plan[TO_VALUE_VALIDITY],
                    limit,
                )
                value_nulls += nulls
            if plan[TO_HASHES]:
                for place in range(rows):
                    length = _i64(keys + 8 * place)
                    key_hash = _murmur2(_i64(keys + _PLANE + 8 * place), length) & 0x7FFF_FFFF if length >= 0 else -1
                    _put32(plan[TO_HASHES] + 4 * (row + place), key_hash)
            if plan[TO_TIMESTAMP_TYPES]:
                for place in range(rows):
                    _put8(plan[TO_TIMESTAMP_TYPES] + row + place, 1 if append_time else 0)
            if plan[TO_LEADER_EPOCHS]:
                for place in range(rows):
                    _put32(plan[TO_LEADER_EPOCHS] + 4 * (row + place), table[batch, LEADER_EPOCH])
            row += rows
        if at != end or previous > last_delta:
            return MALFORMED
    answer[ROWS] = row
    answer[KEY_SIZE] = key_size
    answer[KEY_NULLS] = key_nulls
    answer[VALUE_SIZE] = value_size
    answer[VALUE_NULLS] = value_nulls
    answer[HEADER_COUNT] = header_count
    answer[HEADER_SIZES] = header_sizes
    if len(message):
        _seal(base, body_size, row, plan, message, answer)
    return row


@kernel
def decode_headers(
    headers_at: int,
    rows: int,
    list_ends: int,
    key_ends: int,
    key_data: int,
    value_ends: int,
    value_data: int,
    value_validity: int,
    answer: NDArray[np.int64],
) -> int:
    """Gather the headers of the records that `decode_records` kept, from where it found them."""
    count = 0
    key_size = 0
    value_size = 0
    nulls = 0
    for row in range(rows):
        at = _i64(headers_at + 24 * row)
        end = _i64(headers_at + 24 * row + 8)
        limit = _i64(headers_at + 24 * row + 16)
        headers, at = _varint(at, end)
        for _ in range(headers):
            length, at = _varint(at, end)
            if at > end or length < 0 or length > end - at:
                return MALFORMED
            _copy(key_data + key_size, at, length, limit)
            key_size += length
            at += length
            length, at = _varint(at, end)
            if at > end or length < -1 or length > end - at:
                return MALFORMED
            if length >= 0:
                _copy(value_data + value_size, at, length, limit)
                value_size += length
                at += length
            else:
                nulls += 1
                _clear_bit(value_validity, count)
            _put32(key_ends + 4 * count, key_size)
            _put32(value_ends + 4 * count, value_size)
            count += 1
        if at != end:
            return MALFORMED
        _put32(list_ends + 4 * row, count)
    answer[KEY_SIZE] = key_size
    answer[VALUE_SIZE] = value_size
    answer[VALUE_NULLS] = nulls
    return count


@kernel
def hash_keys(column: NDArray[np.int64], rows: int, target: int) -> None:
    """Write the placement hash of every key, -1 for those that are null."""
    for row in range(rows):
        if _is_valid(column[VALIDITY_AT], column[VALIDITY_FIRST] + row):
            start, end = _bounds(column[OFFSETS_AT], column[OFFSETS_WIDE], row)
            _put32(target + 4 * row, _murmur2(column[DATA_AT] + start, end - start) & 0x7FFF_FFFF)
        else:
            _put32(target + 4 * row, -1)


@inlined
def _bounds(offsets: int, wide: int, row: int) -> tuple[int, int]:
    if wide:
        return _i64(offsets + 8 * row), _i64(offsets + 8 * row + 8)
    return _i32(offsets + 4 * row), _i32(offsets + 4 * row + 4)


@kernel
def share_rows(columns: NDArray[np.int64], plan: NDArray[np.int64], partition_count: int) -> tuple[int, int]:
    """Find out which room each partition's batches need at most, and where in the target it begins, as WRITTEN_TO.

    Answers the room and the number of batches in all.
    """
    shares_at = plan[SHARES_AT]
    if plan[PARTITIONS_AT]:
        _sum_shares(columns, plan)
    else:
        _put64(shares_at, plan[SIZE_IN_ALL])
        _put64(shares_at + 8 * SHARE_ROWS, plan[ROWS])
    batch_size_max = plan[BATCH_SIZE_MAX]
    room = 0
    batches = 0
    for partition in range(partition_count):
        share = shares_at + 8 * SHARE_FIELDS * partition
        rows = _i64(share + 8 * SHARE_ROWS)
        size = _i64(share) + RECORD_OVERHEAD_MAX * rows
        count = rows
        if batch_size_max >= 1024:
            # Two that follow each other are larger than one may be; their headers are less than a sixth of that.
            count = min(rows, ((2 * size // batch_size_max + 1) * 6) // 5 + 2)
        _put64(share + 8 * WRITTEN_TO, room)
        if rows:
            room += size + HEADER_SIZE * count + SLACK
        batches += count
    return room, batches


@inlined
def _sum_shares(columns: NDArray[np.int64], plan: NDArray[np.int64]) -> None:
    """Sum up the bytes of keys, values and headers, and the rows, of each partition."""
    key_offsets, value_offsets, lists_at = columns[KEYS, OFFSETS_AT], columns[VALUES, OFFSETS_AT], plan[LISTS_AT]
    key_wide, value_wide = columns[KEYS, OFFSETS_WIDE], columns[VALUES, OFFSETS_WIDE]
    partitions = plan[PARTITIONS_AT]
    shares_at = plan[SHARES_AT]
    for row in range(plan[ROWS]):
        share = shares_at + 8 * SHARE_FIELDS * _i32(partitions + 4 * row)
        size = _i64(share)
        if key_offsets:
            start, end = _bounds(key_offsets, key_wide, row)
            size += end - start
        if value_offsets:
            start, end = _bounds(value_offsets, value_wide, row)
            size += end - start
        if lists_at:
            first, last = _bounds(lists_at, plan[LISTS_WIDE], row)
            for header in range(first, last):
                size += _field(columns, HEADER_KEYS, header)[2] + _field(columns, HEADER_VALUES, header)[2]
            size += HEADER_OVERHEAD_MAX * (last - first)
        _put64(share, size)
        _put64(share + 8 * SHARE_ROWS, _i64(share + 8 * SHARE_ROWS) + 1)


@inlined
def _varint_size(zigzag: int) -> int:
    return ((64 - _leading_zeros(zigzag | 1)) * 9 + 64) >> 6


@inlined
def _put_varint(at: int, zigzag: int) -> int:
    """Write a number that is zigzag already; answers the address behind it."""
    while zigzag & ~0x7F:
        _put8(at, (zigzag & 0x7F) | 0x80)
        zigzag = (zigzag >> 7) & (_INT64_MAX >> 6)
        at += 1
    _put8(at, zigzag)
    return at + 1


@inlined
def _small_size(number: int) -> int:
    """As `_varint_size`, of a number below `_SMALL`."""
    return 1 + (number > 0x7F)


@inlined
def _put_small(at: int, number: int) -> int:
    """As `_put_varint`, of a number below `_SMALL`, without a branch; a byte too many is written."""
    more = number > 0x7F
    _put16(at, (number & 0x7F) | (more << 7) | ((number & 0x3F80) << 1))
    return at + 1 + more


@inlined
def _put_bytes(at: int, present: bool, source: int, size: int, limit: int) -> int:
    """Write a length and that many bytes, or the length -1; answers the address behind them."""
    if not present:
        _put8(at, 1)
        return at + 1
    at = _put_varint(at, size << 1)
    _copy(at, source, size, limit)
    return at + size


@kernel
def encode_batches(
    columns: NDArray[np.int64], plan: NDArray[np.int64], partition_count: int, table: NDArray[np.int64]
) -> int:
    """Write rows as batches of their partitions, each at most BATCH_SIZE_MAX bytes unless one record is more.

    Rows are read in their order, and each is written where its partition's present batch ends: memory that is read
    here and there is waited for, memory that is written here and there is not. Every batch gets its header, with the
    checksum if there are tables for it. WRITTEN_TO of a partition's share says where its batches begin; there must be
    room for the sum of all its bytes, the overheads and the slack. The table has a row for every batch that
    can come out. Answers how many did.
    """
    timestamps_at = plan[TIMESTAMPS_AT]
    partitions = plan[PARTITIONS_AT]
    lists_at = plan[LISTS_AT]
    batch_size_max = plan[BATCH_SIZE_MAX]
    key_offsets, key_wide, key_data = columns[KEYS, OFFSETS_AT], columns[KEYS, OFFSETS_WIDE], columns[KEYS, DATA_AT]
    key_limit, key_bitmap = columns[KEYS, DATA_END], columns[KEYS, VALIDITY_AT]
    key_first = columns[KEYS, VALIDITY_FIRST]
    value_offsets, value_wide = columns[VALUES, OFFSETS_AT], columns[VALUES, OFFSETS_WIDE]
    value_data, value_limit = columns[VALUES, DATA_AT], columns[VALUES, DATA_END]
    value_bitmap, value_first = columns[VALUES, VALIDITY_AT], columns[VALUES, VALIDITY_FIRST]
    timestamp = plan[TIMESTAMP]
    # No headers, nothing null, offsets of 32 bits: so it is mostly, and then much need not be asked of each row.
    plain = (
        lists_at | key_wide | value_wide | key_bitmap | value_bitmap == 0 and key_offsets != 0 and value_offsets != 0
    )
    shares_at = plan[SHARES_AT]
    for partition in range(partition_count):
        share = shares_at + 8 * SHARE_FIELDS * partition
        _put64(share + 8 * WRITTEN_TO, _i64(share + 8 * WRITTEN_TO) + plan[TARGET])
    share = shares_at
    batches = 0
    for row in range(plan[ROWS]):
        if partitions:
            share = shares_at + 8 * SHARE_FIELDS * _i32(partitions + 4 * row)
        at = _i64(share + 8 * WRITTEN_TO)
        count = _i64(share + 8 * BATCH_ROWS)
        if timestamps_at:
            timestamp = _i64(timestamps_at + 8 * row)
        if plain and count:
            key_start, key_end = _bounds(key_offsets, 0, row)
            value_start, value_end = _bounds(value_offsets, 0, row)
            key_size, value_size = key_end - key_start, value_end - value_start
            delta = _zigzag(timestamp - _i64(share + 8 * BATCH_BASE))
            numbers = delta | count << 1 | key_size << 1 | value_size << 1
            size = 2 + _small_size(delta) + _small_size(count << 1) + _small_size(key_size << 1) + key_size
            size += _small_size(value_size << 1) + value_size
            end = at + _small_size(size << 1) + size
            if 0 <= numbers | size << 1 < _SMALL and end - _i64(share + 8 * BATCH_AT) <= batch_size_max:
                at = _put_small(at, size << 1)
                _put8(at, 0)
                at = _put_small(at + 1, delta)
                at = _put_small(at, count << 1)
                at = _put_small(at, key_size << 1)
                _copy(at, key_data + key_start, key_size, key_limit)
                at = _put_small(at + key_size, value_size << 1)
                _copy(at, value_data + value_start, value_size, value_limit)
                _put8(at + value_size, 0)
                _put64(share + 8 * WRITTEN_TO, end)
                _put64(share + 8 * BATCH_ROWS, count + 1)
                if timestamp > _i64(share + 8 * BATCH_MAX):
                    _put64(share + 8 * BATCH_MAX, timestamp)
                continue
        has_key = key_offsets != 0 and _is_valid(key_bitmap, key_first + row)
        has_value = value_offsets != 0 and _is_valid(value_bitmap, value_first + row)
        key_start, key_size = 0, 0
        if has_key:
            key_start, key_end = _bounds(key_offsets, key_wide, row)
            key_size = key_end - key_start
        value_start, value_size = 0, 0
        if has_value:
            value_start, value_end = _bounds(value_offsets, value_wide, row)
            value_size = value_end - value_start
        payload = (_varint_size(key_size << 1) + key_size if has_key else 1) + (
            _varint_size(value_size << 1) + value_size if has_value else 1
        )
        header_first, header_last = 0, 0
        if lists_at and _is_valid(plan[LISTS_VALIDITY], plan[LISTS_FIRST] + row):
            header_first, header_last = _bounds(lists_at, plan[LISTS_WIDE], row)
        payload += _varint_size((header_last - header_first) << 1)
        for header in range(header_first, header_last):
            payload += _field_size(columns, HEADER_KEYS, header) + _field_size(columns, HEADER_VALUES, header)
        delta = _zigzag(timestamp - _i64(share + 8 * BATCH_BASE))
        size = 1 + _varint_size(delta) + _varint_size(count << 1) + payload
        if count and at - _i64(share + 8 * BATCH_AT) + _varint_size(size << 1) + size > batch_size_max:
            batches = _end_batch(table, batches, plan, share)
            count = 0
        if count == 0:
            _put64(share + 8 * BATCH_AT, at)
            _put64(share + 8 * BATCH_FIRST, row)
            _put64(share + 8 * BATCH_BASE, timestamp)
            _put64(share + 8 * BATCH_MAX, timestamp)
            at += HEADER_SIZE
            delta = 0
            size = 3 + payload
        at = _put_varint(at, size << 1)
        _put8(at, 0)
        at = _put_varint(at + 1, delta)
        at = _put_varint(at, count << 1)
        at = _put_bytes(at, has_key, key_data + key_start, key_size, key_limit)
        at = _put_bytes(at, has_value, value_data + value_start, value_size, value_limit)
        at = _put_varint(at, (header_last - header_first) << 1)
        for header in range(header_first, header_last):
            at = _put_field(at, columns, HEADER_KEYS, header)
            at = _put_field(at, columns, HEADER_VALUES, header)
        _put64(share + 8 * WRITTEN_TO, at)
        _put64(share + 8 * BATCH_ROWS, count + 1)
        if timestamp > _i64(share + 8 * BATCH_MAX):
            _put64(share + 8 * BATCH_MAX, timestamp)
    for partition in range(partition_count):
        share = shares_at + 8 * SHARE_FIELDS * partition
        if _i64(share + 8 * BATCH_ROWS):
            batches = _end_batch(table, batches, plan, share)
    return batches


@called
def _end_batch(table: NDArray[np.int64], row: int, plan: NDArray[np.int64], share: int) -> int:
    """Give a partition's present batch its header, and enter it in the table; answers the next row of that."""
    at, end, count = _i64(share + 8 * BATCH_AT), _i64(share + 8 * WRITTEN_TO), _i64(share + 8 * BATCH_ROWS)
    base_timestamp, max_timestamp = _i64(share + 8 * BATCH_BASE), _i64(share + 8 * BATCH_MAX)
    _put_header(at, end, count, base_timestamp, max_timestamp, plan[STAMPED_BY])
    table[row, AT] = at - plan[TARGET]
    table[row, BYTES] = end - at
    table[row, PARTITION] = (share - plan[SHARES_AT]) // (8 * SHARE_FIELDS)
    table[row, FIRST] = _i64(share + 8 * BATCH_FIRST)
    table[row, COUNT] = count
    return row + 1


@inlined
def _field(columns: NDArray[np.int64], field: int, row: int) -> tuple[bool, int, int]:
    """Find one value of a column: whether it is there, its start and its size; no offsets say that all are null."""
    if columns[field, OFFSETS_AT] and _is_valid(columns[field, VALIDITY_AT], columns[field, VALIDITY_FIRST] + row):
        start, end = _bounds(columns[field, OFFSETS_AT], columns[field, OFFSETS_WIDE], row)
        return True, start, end - start
    return False, 0, 0


@inlined
def _field_size(columns: NDArray[np.int64], field: int, row: int) -> int:
    present, _, size = _field(columns, field, row)
    return _varint_size(size << 1) + size if present else 1


@inlined
def _put_field(at: int, columns: NDArray[np.int64], field: int, row: int) -> int:
    present, start, size = _field(columns, field, row)
    return _put_bytes(at, present, columns[field, DATA_AT] + start, size, columns[field, DATA_END])


@inlined
def _put_header(at: int, end: int, count: int, base_timestamp: int, max_timestamp: int, crc_tables: int) -> None:
    """Write the header of the batch from `at` to `end`: no place in a log yet, and no producer."""
    _put_be64(at, 0)
    _put_be32(at + 8, end - at - LENGTH_END)
    _put_be32(at + 12, -1)
    _put8(at + 16, MAGIC)
    _put_be32(at + 17, 0)
    _put_be16(at + 21, 0)
    _put_be32(at + 23, count - 1)
    _put_be64(at + 27, base_timestamp)
    _put_be64(at + 35, max_timestamp)
    _put_be64(at + 43, -1)
    _put_be16(at + 51, -1)
    _put_be32(at + 53, -1)
    _put_be32(at + 57, count)
    if crc_tables:
        _put_be32(at + 17, _crc(at + _CRC_FROM, end, crc_tables))
