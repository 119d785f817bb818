"""Bytes at addresses, as all kernels read, write and copy them; and the numbers and bitmaps in them.

Kernels take plain addresses: the caller owns the memory, keeps it alive, and passes how far it may be read and written.
The rule of all kernels: no byte outside those bounds is touched, whatever the bytes inside are. A kernel raises
nothing; it returns a negative number, and the caller makes the error.

`copy` may write up to `SLACK` bytes beyond the end, so that much room follows every target. Bytes are moved before the
next ones are, in ascending order, so bytes written too far are overwritten in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name, get_process_triple
from numba import types
from numba.core import config
from numba.extending import intrinsic

from anabranch.records.kernels.compiled import inlined

SLACK = 64
"""Room that must follow every target, in bytes."""
ALIGNMENT = 64
"""Of buffers, as Arrow recommends."""

# A column of variable-length values, as `encode_batches` and `hash_keys` read it: 8 numbers each.
OFFSETS_AT, OFFSETS_WIDE, DATA_AT, DATA_END, VALIDITY_AT, VALIDITY_FIRST = 0, 1, 2, 3, 4, 5
COLUMN_FIELDS = 6
MASK_32 = 0xFFFF_FFFF
INT64_MAX = 0x7FFF_FFFF_FFFF_FFFF
NOWHERE = 1 << 62
"""An address above any end, to which a number leads that cannot be read."""
COPIED_INLINE = 2048
"""Bytes that are not worth a call."""
PROCESSOR = get_process_triple().partition("-")[0]
SQUEEZES = (
    PROCESSOR == "x86_64"
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


u8 = _reader(8, big=False, signed=False)
u32 = _reader(32, big=False, signed=False)
i32 = _reader(32, big=False, signed=True)
i64 = _reader(64, big=False, signed=True)
be16 = _reader(16, big=True, signed=True)
be32 = _reader(32, big=True, signed=True)
be64 = _reader(64, big=True, signed=True)
put8 = _writer(8, big=False)
put16 = _writer(16, big=False)
put32 = _writer(32, big=False)
put64 = _writer(64, big=False)
put_be16 = _writer(16, big=True)
put_be32 = _writer(32, big=True)
put_be64 = _writer(64, big=True)


def _squeeze_bits(_: Any, word: Any, mask: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(64)
        word, mask = arguments
        if SQUEEZES:
            kind = ir.FunctionType(wide, (wide, wide))
            return builder.call(declare(builder.module, kind, "llvm.x86.bmi.pext.64"), (word, mask))
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


def _reverse_bits(_: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitreverse(arguments[0])

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


def declare(module: Any, kind: Any, name: str) -> Any:
    """Find a function of LLVM's own in a module, or make it known there."""
    return module.globals.get(name) or ir.Function(module, kind, name)


def _prefetcher(*, write: bool, level: int = 1) -> Callable[[int], None]:
    """Make a function that has the line at an address brought into a cache of some level.

    Any address will do, it is never accessed.
    """

    def prefetch(_: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), (pointer, word, word, word))
            function = declare(builder.module, kind, "llvm.prefetch.p0")
            options = (ir.Constant(word, number) for number in (int(write), 4 - level, 1))
            builder.call(function, (builder.inttoptr(arguments[0], pointer), *options))
            return context.get_dummy_value()

        return types.void(types.int64), generate

    return cast(Callable[[int], None], intrinsic(prefetch))


def _count_leading_zeros(_: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


def _count_trailing_zeros(_: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


copy_32 = _mover(32)
copy_64 = _mover(64)
copy_bytes = cast(Callable[[int, int, int], None], intrinsic(_move_bytes))
prefetch_to_read = _prefetcher(write=False)
prefetch_to_read_later = _prefetcher(write=False, level=2)
prefetch_to_write = _prefetcher(write=True)
squeeze = cast(Callable[[int, int], int], intrinsic(_squeeze_bits))
"""The bits of a number that the mask chooses, side by side; the mask is whole bytes side by side but for their 8th."""
count_ones = cast(Callable[[int], int], intrinsic(_count_ones))
reverse_bits = cast(Callable[[int], int], intrinsic(_reverse_bits))
"""The bits of a number in the opposite order, the lowest one in the place of the sign."""
leading_zeros = cast(Callable[[int], int], intrinsic(_count_leading_zeros))
trailing_zeros = cast(Callable[[int], int], intrinsic(_count_trailing_zeros))
"""64 of zero."""


@inlined
def copy(target: int, source: int, size: int, limit: int) -> None:
    """Copy `size` bytes; up to `SLACK` more are written, and none at or above `limit` is read."""
    if size <= COPIED_INLINE and source + size + 64 <= limit:
        if size <= 32:
            copy_32(target, source)
        else:
            copy_64(target, source)
            if size > 64:
                copy_64(target + 64, source + 64)
                moved = 128
                while moved < size:
                    copy_64(target + moved, source + moved)
                    moved += 64
    else:
        copy_bytes(target, source, size)


@inlined
def equal(left: int, right: int, size: int) -> bool:
    """Whether as many bytes are the same."""
    place = 0
    while place + 8 <= size:
        if i64(left + place) != i64(right + place):
            return False
        place += 8
    while place < size:
        if u8(left + place) != u8(right + place):
            return False
        place += 1
    return True


@inlined
def to_zigzag(value: int) -> int:
    return (value << 1) ^ (value >> 63)


@inlined
def from_zigzag(value: int) -> int:
    """Return the number that a zigzag number stands for."""
    return ((value >> 1) & INT64_MAX) ^ -(value & 1)


@inlined
def read_varint(at: int, end: int) -> tuple[int, int]:
    """Read a zigzag number: value and the address behind it.

    A number that does not end is 0 and leads nowhere: to an address above any end, from which nothing is read.
    """
    value = 0
    shift = 0
    while at < end and shift < 70:
        byte = u8(at)
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return from_zigzag(value), at
        shift += 7
    return 0, NOWHERE


@inlined
def clear_bit(bitmap: int, bit: int) -> None:
    at = bitmap + (bit >> 3)
    put8(at, u8(at) & ~(1 << (bit & 7)))


@inlined
def is_valid(bitmap: int, bit: int) -> bool:
    return bitmap == 0 or (u8(bitmap + (bit >> 3)) >> (bit & 7)) & 1 == 1


@inlined
def bounds(offsets: int, wide: int, row: int) -> tuple[int, int]:
    if wide:
        return i64(offsets + 8 * row), i64(offsets + 8 * row + 8)
    return i32(offsets + 4 * row), i32(offsets + 4 * row + 4)
