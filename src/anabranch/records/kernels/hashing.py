"""The placement and the spread of a key within kernels, tested against `records.hashing` and `machines.keyspace`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from anabranch.records.kernels.compiled import inlined, kernel
from anabranch.records.kernels.memory import (
    DATA_AT,
    MASK_32,
    OFFSETS_AT,
    OFFSETS_WIDE,
    VALIDITY_AT,
    VALIDITY_FIRST,
    bounds,
    is_valid,
    put32,
    reverse_bits,
    u8,
    u32,
)

_MULTIPLIER = 0x5BD1_E995
_SEED = 0x9747_B28C
_LOW_31 = 0x7FFF_FFFF
_MIX_1 = 0xFF51_AFD7_ED55_8CCD - (1 << 64)
_MIX_2 = 0xC4CE_B9FE_1A85_EC53 - (1 << 64)


@inlined
def murmur2(at: int, size: int) -> int:
    """Kafka's hash of a key, as an unsigned 32-bit number (`hashing.murmur2`)."""
    value = (_SEED ^ size) & MASK_32
    whole = at + (size & ~3)
    while at < whole:
        word = (u32(at) * _MULTIPLIER) & MASK_32
        word = ((word ^ (word >> 24)) * _MULTIPLIER) & MASK_32
        value = ((value * _MULTIPLIER) & MASK_32) ^ word
        at += 4
    rest = size & 3
    if rest:
        if rest == 3:
            value ^= u8(at + 2) << 16
        if rest >= 2:
            value ^= u8(at + 1) << 8
        value = ((value ^ u8(at)) * _MULTIPLIER) & MASK_32
    value = ((value ^ (value >> 13)) * _MULTIPLIER) & MASK_32
    return value ^ (value >> 15)


@inlined
def spread(murmur: int, initial: int, start: int, end: int) -> int:
    """Where a key lies in the key space, by its murmur2 (`machines.keyspace.spread`).

    The low bits are left out where they do not decide whether that is between `start` and `end`: hardly ever.
    """
    value = reverse_bits((murmur & _LOW_31) // initial << 1)
    if value ^ start <= MASK_32 or value ^ end <= MASK_32:
        value |= mixed(murmur) & MASK_32
    return value


@inlined
def mixed(number: int) -> int:
    """Spread the bits of a number (`records.hashing.fmix64`).

    In signed numbers throughout: Numba compares a signed one with an unsigned one as floats.
    """
    value = number
    value ^= (value >> 33) & _LOW_31
    value *= _MIX_1
    value ^= (value >> 33) & _LOW_31
    value *= _MIX_2
    return value ^ (value >> 33) & _LOW_31


@kernel
def hash_keys(column: NDArray[np.int64], rows: int, target: int) -> None:
    """Write the placement hash of every key, -1 for those that are null."""
    for row in range(rows):
        if is_valid(column[VALIDITY_AT], column[VALIDITY_FIRST] + row):
            start, end = bounds(column[OFFSETS_AT], column[OFFSETS_WIDE], row)
            put32(target + 4 * row, murmur2(column[DATA_AT] + start, end - start) & 0x7FFF_FFFF)
        else:
            put32(target + 4 * row, -1)
