"""CRC-32C within kernels: with the processor's instruction, and by folding where the processor can.

Three ways, the first that fits: lines of 256 bytes by multiplication without carries (x86-64 with AVX-512 and
VPCLMULQDQ), the first one behind as many zeros as it lacks; three pieces at a time by the CRC instruction; eight bytes
at a time. Pieces are joined by one multiplication without carries, whatever their size (x86-64), or by tables, in two
sizes. Without the instruction CHECKS_CRC is False, and callers take checksums with the `crc32c` library.
docs/adr/0023-crc-within-the-kernels.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic

from anabranch.records.checksum import joining_tables, past
from anabranch.records.kernels.compiled import inlined
from anabranch.records.kernels.memory import MASK_32, PROCESSOR, declare, i64, prefetch_to_read, u32

CRC_FROM = 21
_FOLDED_AHEAD = 2048
_CRC_FEATURE = {"x86_64": "sse4.2", "aarch64": "crc"}.get(PROCESSOR, "")
_LINE = 256
LATE_AT, LATE_SIZE_MIN = 32, 256
_BEFORE_LATE = past(MASK_32, LATE_AT)
FOLDING = ("avx512f", "avx512bw", "vpclmulqdq")
CHECKS_CRC = bool(get_host_cpu_features().get(_CRC_FEATURE)) and getattr(config, "CPU_NAME", None) is None
"""Whether kernels can compute checksums: the processor has an instruction for it, and code is compiled for it."""
JOINS_CRC = CHECKS_CRC and PROCESSOR == "x86_64" and bool(get_host_cpu_features().get("pclmul"))
"""Whether they multiply without carries, 8 bytes at a time, to join pieces of any size."""
FOLDS_CRC = JOINS_CRC and all(map(get_host_cpu_features().get, FOLDING))
"""Whether they do so 64 bytes at a time, for the checksum itself."""


def _crc_step(_: Any, crc: Any, data: Any) -> Any:
    """Make a function that takes a CRC-32C over 64 bits more, with the processor's own instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, wide = ir.IntType(32), ir.IntType(64)
        if not CHECKS_CRC:  # Never called then, but compiled.
            return arguments[0]
        name, state = {"x86_64": ("llvm.x86.sse42.crc32.64.64", wide), "aarch64": ("llvm.aarch64.crc32cx", word)}[
            PROCESSOR
        ]
        function = declare(builder.module, ir.FunctionType(state, (state, wide)), name)
        crc, data = arguments
        if state is wide:
            return builder.call(function, (crc, data))
        return builder.zext(builder.call(function, (builder.trunc(crc, state), data)), wide)

    return types.int64(types.int64, types.int64), generate


def _fold(_: Any, at: Any, size: Any, factors: Any) -> Any:
    """Take the CRC-32C of `size` bytes, at least one, that begins with 0, by multiplication without carries.

    Sixteen lanes of 16 bytes are each taken 256 bytes further, at which they are congruent to themselves times a power
    of x, and added to what is there. In the end they are folded into four, and these into one, which is taken the usual
    way. Zeros before a CRC of 0 are nothing: so the bytes begin with as many as make lines of 256, and there is no rest
    of a size that no processor could foretell. What is read as zeros is not touched.
    The factors are read from memory that the caller gives, for code that has none (`ahead`).
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, byte, word = ir.IntType(64), ir.IntType(8), ir.IntType(32)
        if not FOLDS_CRC:  # Never called then, but compiled.
            return arguments[0]
        kind, parts = ir.VectorType(wide, 8), ir.VectorType(byte, 64)
        chosen = ir.VectorType(ir.IntType(1), 64)
        multiply = declare(builder.module, ir.FunctionType(kind, (kind, kind, byte)), "llvm.x86.pclmulqdq.512")
        read = declare(
            builder.module,
            ir.FunctionType(parts, (parts.as_pointer(), word, chosen, parts)),
            "llvm.masked.load.v64i8.p0",
        )

        def moved(lanes: Any, by: Any) -> Any:
            low, high = (builder.call(multiply, (lanes, by, ir.Constant(byte, which))) for which in (0x00, 0x11))
            return builder.xor(low, high)

        def loaded(address: Any, place: int) -> Any:
            pointer = builder.inttoptr(builder.add(address, ir.Constant(wide, 64 * place)), kind.as_pointer())
            return builder.load(pointer, align=1)

        def without(address: Any, place: int, zeros: Any) -> Any:
            before = builder.sub(zeros, ir.Constant(wide, 64 * place))
            before = builder.select(builder.icmp_signed("<", before, zero), zero, before)
            mask = builder.shl(ir.Constant(wide, -1), builder.and_(before, ir.Constant(wide, 63)))
            mask = builder.select(builder.icmp_signed(">", before, ir.Constant(wide, 63)), zero, mask)
            pointer = builder.inttoptr(builder.add(address, ir.Constant(wide, 64 * place)), parts.as_pointer())
            none = ir.Constant(parts, [0] * 64)
            found = builder.call(read, (pointer, ir.Constant(word, 1), builder.bitcast(mask, chosen), none))
            return builder.bitcast(found, kind)

        zero, one = ir.Constant(wide, 0), ir.Constant(wide, 1)
        at, size, factors_at = arguments
        further, *by_quarters, to_end = (loaded(factors_at, place) for place in range(5))
        zeros = builder.and_(builder.neg(size), ir.Constant(wide, _LINE - 1))
        first = builder.sub(at, zeros)
        lines = builder.lshr(builder.add(size, zeros), ir.Constant(wide, _LINE.bit_length() - 1))
        lanes = [cast(Any, cgutils).alloca_once(builder, kind) for _ in range(4)]
        for place, lane in enumerate(lanes):
            builder.store(without(first, place, zeros), lane)
        pointer = byte.as_pointer()
        prefetch = declare(
            builder.module, ir.FunctionType(ir.VoidType(), (pointer, word, word, word)), "llvm.prefetch.p0"
        )
        with cgutils.for_range_slice(builder, one, lines, one, intp=wide) as (line, _):
            address = builder.add(first, builder.mul(line, ir.Constant(wide, _LINE)))
            for place, lane in enumerate(lanes):
                ahead = builder.inttoptr(builder.add(address, ir.Constant(wide, _FOLDED_AHEAD + 64 * place)), pointer)
                builder.call(prefetch, (ahead, *(ir.Constant(word, number) for number in (0, 3, 1))))
                builder.store(builder.xor(moved(builder.load(lane), further), loaded(address, place)), lane)
        *before, rest = map(builder.load, lanes)
        for quarter, by in zip(before, by_quarters, strict=True):
            rest = builder.xor(moved(quarter, by), rest)
        ends = moved(rest, to_end)
        crc = zero
        step = declare(builder.module, ir.FunctionType(wide, (wide, wide)), "llvm.x86.sse42.crc32.64.64")
        for half in range(2):
            found = builder.extract_element(rest, ir.Constant(word, 6 + half))
            for lane in range(3):
                found = builder.xor(found, builder.extract_element(ends, ir.Constant(word, 2 * lane + half)))
            crc = builder.call(step, (crc, found))
        return crc

    return types.int64(*[types.int64] * 3), generate


def _product(_: Any, one: Any, other: Any) -> Any:
    """Make a function that multiplies without carries; the lower 64 bits of the product."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide, word = ir.IntType(64), ir.IntType(32)
        if not JOINS_CRC:  # Never called then, but compiled.
            return arguments[0]
        kind = ir.VectorType(wide, 2)
        multiply = declare(builder.module, ir.FunctionType(kind, (kind, kind, ir.IntType(8))), "llvm.x86.pclmulqdq")
        first = ir.Constant(word, 0)
        lanes = [builder.insert_element(ir.Constant(kind, [0, 0]), each, first) for each in arguments]
        return builder.extract_element(builder.call(multiply, (*lanes, ir.Constant(ir.IntType(8), 0))), first)

    return types.int64(types.int64, types.int64), generate


_multiplied = cast(Callable[[int, int], int], intrinsic(_product))
_crc_folded = cast(Callable[[int, int, int], int], intrinsic(_fold))
_crc_64 = cast(Callable[[int, int], int], intrinsic(_crc_step))
_LONG, _SHORT = 1024, 128
_PIECE_MIN = 32
"""Bytes of a piece below which joining takes longer than three times as many steps."""
_FACTORS_AT, _JOINTS_AT = 8192, 8512
_ODD_JOINTS_AT = _JOINTS_AT + 8 + 2 * _LONG
CRC_TABLES = np.frombuffer(joining_tables((_LONG, _SHORT)), np.uint8)
"""How to join checksums of neighbouring pieces: a kernel that takes them is given the address."""


@inlined
def crc_factor(size: int, tables: int) -> int:
    """What takes a CRC as many bytes further (`crc_times`). Only where JOINS_CRC."""
    joints = tables + _JOINTS_AT
    factor = i64(joints + (size & 2 * _LONG - 8))
    if size & 7 != 0:
        factor = crc_times(factor >> 1, i64(tables + _ODD_JOINTS_AT + 8 * (size & 7))) << 1
    for _ in range(size // (2 * _LONG)):
        factor = crc_times(factor >> 1, i64(joints + 2 * _LONG)) << 1
    return factor


@inlined
def crc_times(crc: int, factor: int) -> int:
    """A CRC behind as many bytes of zeros as the factor is for: to join pieces, add the CRC of the second to it.

    Half of a factor is what becomes of another: the two together are for as many bytes as both. Only where JOINS_CRC.
    """
    return _crc_64(0, _multiplied(crc, factor))


@inlined
def crc_step(crc: int, word: int) -> int:
    """A CRC, without the changes at its begin and at its end, over eight bytes more."""
    return _crc_64(crc, word)


@inlined
def take_crc(at: int, end: int, tables: int) -> int:
    """The CRC-32C of the bytes from `at` to `end`. The eight bytes before `end` can be read, however few there are."""
    return take_crc_and(at, end, tables, 0)


@inlined
def take_crc_and(at: int, end: int, tables: int, late: int) -> int:
    """As `take_crc`, with `late` added to the eight bytes from LATE_AT on, if there are `LATE_SIZE_MIN` bytes.

    What was just written in small parts cannot be read in large ones before all that was written is in the cache.
    """
    if FOLDS_CRC and end - at >= LATE_SIZE_MIN:
        begun = crc_times(crc_step(_BEFORE_LATE, late), crc_factor(end - at - LATE_AT - 8, tables))
        return begun ^ _crc_folded(at, end - at, tables + _FACTORS_AT) ^ MASK_32
    if JOINS_CRC:
        return _by_joined_pieces(MASK_32, at, end, tables + _JOINTS_AT) ^ MASK_32
    return _by_pieces(MASK_32, at, end, tables) ^ MASK_32


@inlined
def _by_joined_pieces(crc: int, at: int, end: int, joints: int) -> int:
    """Take a CRC on to `end`: by thirds of `_LONG`, and thirds of the rest, the last of which is a little longer."""
    while end - at >= 3 * _LONG:
        crc, second, last = _crc_thirds(crc, at, _LONG)
        crc = _joined(joints, crc, second, _LONG) ^ last
        at += 3 * _LONG
    if end - at >= 3 * _PIECE_MIN:
        third = (end - at) // 24 << 3
        second, last = 0, 0
        for place in range(at, at + third, 8):
            crc = _crc_64(crc, i64(place))
            second = _crc_64(second, i64(place + third))
            last = _crc_64(last, i64(place + 2 * third))
        longer = (end - at & -8) - 3 * third
        at += 3 * third
        further = _multiplied(crc, i64(joints + 2 * third + longer)) ^ _multiplied(second, i64(joints + third + longer))
        for place in range(at, at + longer, 8):
            last = _crc_64(last, i64(place))
        crc = _crc_64(0, further) ^ last
        at += longer
    return _by_steps(crc, at, end)


@inlined
def _joined(joints: int, first: int, second: int, size: int) -> int:
    """The CRC of a piece, and of a second one behind it, behind as many zeros: pieces have `size` bytes, of eights."""
    further = _multiplied(second, i64(joints + size))
    return _crc_64(0, _multiplied(first, i64(joints + 2 * size)) ^ further)


@inlined
def _by_pieces(crc: int, at: int, end: int, tables: int) -> int:
    """As `_by_joined_pieces`, where nothing multiplies without carries."""
    while end - at >= 3 * _LONG:
        crc, second, last = _crc_thirds(crc, at, _LONG)
        crc = _crc_shift(tables, _crc_shift(tables, crc) ^ second) ^ last
        at += 3 * _LONG
    while end - at >= 3 * _SHORT:
        crc, second, last = _crc_thirds(crc, at, _SHORT)
        crc = _crc_shift(tables + 4096, _crc_shift(tables + 4096, crc) ^ second) ^ last
        at += 3 * _SHORT
    return _by_steps(crc, at, end)


@inlined
def _crc_thirds(crc: int, at: int, third: int) -> tuple[int, int, int]:
    """Take a CRC over three pieces at once, because the instruction takes three times as long as it occupies."""
    second, last = 0, 0
    for line in range(at, at + third, 64):
        for place in range(line, line + 64, 8):
            crc = _crc_64(crc, i64(place))
            second = _crc_64(second, i64(place + third))
            last = _crc_64(last, i64(place + 2 * third))
        if third == _LONG:
            prefetch_to_read(line + 3 * third)
            prefetch_to_read(line + 4 * third)
            prefetch_to_read(line + 5 * third)
    return crc, second, last


@inlined
def _crc_shift(tables: int, crc: int) -> int:
    """The CRC behind as many bytes of zeros as the table is for."""
    return (
        u32(tables + 4 * (crc & 0xFF))
        ^ u32(tables + 1024 + 4 * ((crc >> 8) & 0xFF))
        ^ u32(tables + 2048 + 4 * ((crc >> 16) & 0xFF))
        ^ u32(tables + 3072 + 4 * (crc >> 24))
    )


@inlined
def _by_steps(crc: int, at: int, end: int) -> int:
    while end - at >= 8:
        crc = _crc_64(crc, i64(at))
        at += 8
    if at < end:  # Without a loop, the end of which no processor could foretell: zeros before a CRC of 0 are nothing.
        before = 64 - 8 * (end - at)
        crc = (crc >> (64 - before)) ^ _crc_64(0, ((i64(end - 8) >> before) ^ crc) << before)
    return crc
