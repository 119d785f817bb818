"""CRC-32C: of bytes, and of bytes that change in one place, without reading the bytes that follow.

A CRC is linear: that of a change among zeros, added to that of the bytes before the change, is that of the bytes after
it. What zeros make of a CRC is a matrix of bits, and of twice as many zeros, its square.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import Any, cast

_POLYNOMIAL = 0x82F6_3B78
_ONE = 1 << 31
"""The polynomial 1."""
Checksum = Callable[..., int]
Matrix = tuple[tuple[int, ...], ...]
"""Of each byte of a CRC, what becomes of each value that it can have."""


def _compiled() -> Checksum:
    """Return the function of the `crc32c` package, without the package's own start.

    The package asks for its version and imports its command line, which takes 9 ms of every start of a broker.
    """
    package = find_spec("crc32c")
    assert package is not None, "crc32c is not installed"
    spec = PathFinder.find_spec("crc32c._crc32c", package.submodule_search_locations)
    if spec is None or spec.loader is None:
        from crc32c import crc32c as found

        return cast("Checksum", found)
    extension: Any = module_from_spec(spec)
    spec.loader.exec_module(extension)
    return cast("Checksum", extension.crc32c)


crc32c = _compiled()
"""`crc32c(data, value=0)`: the checksum of any buffer, continued from `value`."""


def changed(crc: int, before: bytes | memoryview, after: bytes | memoryview, behind: int) -> int:
    """Return what a CRC-32C becomes when `before`, with `behind` more bytes behind it, becomes `after`, as long."""
    return crc ^ past(crc32c(before) ^ crc32c(after), behind)


def joining_tables(sizes: tuple[int, int]) -> bytes:
    """What kernels need to take checksums in pieces (`kernels.crc32c`), in the order of bytes of this machine.

    For each size, what so many bytes of zeros make of a CRC, by each of its four bytes: 1,024 numbers of 32 bits. Then
    the factors that take four lanes of 16 bytes 256 bytes further, 192, 128 and 64 bytes, and to the last lane: 40 of
    64 bits. Then the factors that take a CRC further by no bytes and by that many times eight, up to twice the first
    size; and by none to seven: of 64 bits.
    """
    numbers = array("I")
    for size in sizes:
        for sums in _zeros((size - 1).bit_length()):
            numbers.extend(sums)
    factors = array("q")
    for distances in (*([each] * 4 for each in (256, 192, 128, 64)), (48, 32, 16, 0)):
        for distance in distances:
            factors.extend((_factor(distance + 4), _factor(distance - 4)) if distance else (0, 0))
    none = _before(_ONE, 4)
    for size, count in ((8, 2 * sizes[0] // 8 + 1), (1, 8)):
        zeros, factor = _zeros(size.bit_length() - 1), none
        for _ in range(count):
            factors.append(factor << 1)
            factor = _times(zeros, factor)
    return numbers.tobytes() + factors.tobytes()


def _factor(size: int) -> int:
    """x to the 8 times `size`, modulo the polynomial of CRC-32C, for numbers whose first bit is the lowest."""
    return past(_ONE, size) << 1


def past(crc: int, zeros: int) -> int:
    """What so many bytes of zeros make of a CRC."""
    doublings = 0
    while zeros:
        if zeros & 1:
            crc = _times(_zeros(doublings), crc)
        zeros >>= 1
        doublings += 1
    return crc


def _before(crc: int, zeros: int) -> int:
    """Of what so many bytes of zeros make `crc`."""
    for _ in range(8 * zeros):
        crc = (crc ^ _POLYNOMIAL) << 1 | 1 if crc >> 31 else crc << 1
    return crc


def _times(matrix: Matrix, vector: int) -> int:
    lowest, low, high, highest = matrix
    return lowest[vector & 0xFF] ^ low[vector >> 8 & 0xFF] ^ high[vector >> 16 & 0xFF] ^ highest[vector >> 24]


@cache
def _zeros(doublings: int) -> Matrix:
    """What 2 ** `doublings` bytes of zeros make of a CRC."""
    if doublings:
        half = _zeros(doublings - 1)
        columns = [_times(half, _times(half, 1 << bit)) for bit in range(32)]
    else:
        columns = [_zero_byte(1 << bit) for bit in range(32)]
    return tuple(_sums(columns[first : first + 8]) for first in range(0, 32, 8))


def _zero_byte(crc: int) -> int:
    for _ in range(8):
        crc = _zero_bit(crc)
    return crc


def _zero_bit(crc: int) -> int:
    return (crc >> 1) ^ (_POLYNOMIAL if crc & 1 else 0)


def _sums(columns: list[int]) -> tuple[int, ...]:
    """The sum of those columns whose bits a byte has, for every byte."""
    sums = [0]
    for column in columns:
        sums += [column ^ other for other in sums]
    return tuple(sums)
