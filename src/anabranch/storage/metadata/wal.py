"""What shows that SQLite's write-ahead log is as it was written.

    metadata.sqlite-wal   a header, then frames: a page each, with a checksum over all frames up to this one
    metadata.sqlite-shm   beside others, how many frames were there after the last commit

SQLite reads the log up to the first frame that does not fit its checksum, and takes all later changes back without a
word: to it this is the end that a crash has torn. It is not where the index beside the log counts more frames, because
SQLite notes them there when they are synced. After a loss of power that file is as old as the disk has it, and is
believed only if it names the same generation of the log (its salts). Then the frames themselves tell: a transaction
begins when the one before is synced, so no frame follows a damaged transaction, unless that was damaged later, or a
sync of it failed; and the header is synced before the first frame.

The formats are those of https://www.sqlite.org/walformat.html.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from enum import Enum, auto
from functools import lru_cache, partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

MAGIC = 0x377F0682
"""The last bit says that checksums are of big-endian words."""
FRAMES_AT_A_TIME = 1_000
_LOOKED_AT = 1 << 16
"""Bytes behind a header of zeros that are looked at at a time."""
_MASK = 0xFFFF_FFFF
_HEADER = struct.Struct(">IIIIIIII")
_FRAME = struct.Struct(">IIIIII")
_INDEX = struct.Struct("=IIIBBHIIIIIIII")
"""Version, unused, changes, flag, byte order, page size, frames, pages, checksum of frames, salts, checksum of this."""
_BACKFILLED_AT = 2 * _INDEX.size
_ATTEMPTED_AT = 128
_INDEX_READ = _ATTEMPTED_AT + 4

Words = NDArray[np.uint32]


class Generation(NamedTuple):
    """The log since SQLite began it anew."""

    salts: bytes
    page_size: int
    is_big: bool
    checksum: tuple[int, int]


class Counted(NamedTuple):
    """What the index of the log says."""

    salts: bytes
    frames: int
    """Those up to the last commit."""
    backfilled: int
    """Those whose pages are in the database, too."""
    attempted: int
    """Those of which some pages may be there."""


class Remains(Enum):
    """What is left of a database whose log is damaged."""

    ALL = auto()
    """All is in the database, which is to be read without the log."""
    BEFORE = auto()
    """The database and what is sound of the log are as all was before the last transactions."""
    NOTHING = auto()
    """The database may have pages of transactions that the log has lost, beside older ones: it never was so."""


class Sound(NamedTuple):
    """The frames of a log that fit their checksums."""

    committed: int
    """Those up to the last commit."""
    followed: bool
    """Whether frames of the same generation follow a transaction that does not fit."""


def check(path: Path) -> None:
    """Compare the write-ahead log of the database at `path`, which nobody has open. sqlite3.DatabaseError, OSError."""
    wal = path.with_name(path.name + "-wal")
    counted = _counted(path.with_name(path.name + "-shm"))
    if not wal.exists() or not wal.stat().st_size:
        if counted is not None and counted.frames > counted.backfilled:
            raise sqlite3.DatabaseError(
                f"{wal.name} is {'empty' if wal.exists() else 'missing'}, and had changes; if {path.name} was put here "
                f"without it, remove {path.name}-shm"
            )
        return
    with wal.open("rb") as file:
        header = file.read(_HEADER.size)
        generation = _generation(header)
        if generation is None:
            had_changes = counted is not None and counted.frames > counted.backfilled
            # It is written and synced before the first frame: one of zeros has none behind it.
            if any(header) or had_changes or any(any(data) for data in iter(partial(file.read, _LOOKED_AT), b"")):
                raise sqlite3.DatabaseError(f"the header of {wal.name} is damaged")
            return
        sound = _sound(generation, file)
    named = counted.frames if counted is not None and counted.salts == generation.salts else 0
    if sound.committed < named or sound.followed:
        raise sqlite3.DatabaseError(
            f"{wal.name} is damaged behind frame {sound.committed}: the changes of later transactions are lost"
        )


def remains(path: Path, *, index_is_old: bool) -> Remains:
    """Tell what is left of a database whose log is damaged, and which nobody has open. OSError.

    SQLite copies pages into the database in their order in the file, not in that of the transactions. `index_is_old`:
    the power was lost since, so that the index may not tell of the last such copying.
    """
    counted = _counted(path.with_name(path.name + "-shm"))
    if counted is None or index_is_old:
        return Remains.NOTHING
    wal, committed = path.with_name(path.name + "-wal"), 0
    if wal.exists():
        with wal.open("rb") as file:
            generation = _generation(file.read(_HEADER.size))
            if generation is not None and generation.salts != counted.salts:
                return Remains.NOTHING
            committed = 0 if generation is None else _sound(generation, file).committed
    if counted.backfilled == counted.frames:
        return Remains.ALL
    return Remains.NOTHING if counted.attempted > committed else Remains.BEFORE


def _generation(header: bytes) -> Generation | None:
    if len(header) < _HEADER.size:
        return None
    magic, _, page_size, _, salt_1, salt_2, *checksum = _HEADER.unpack(header)
    is_big = bool(magic & 1)
    if magic & ~1 != MAGIC or page_size < 512 or page_size > 65_536 or page_size & (page_size - 1):
        return None
    found = _continued((0, 0), _words(header[:24], is_big)[None, :])
    if found != [tuple(checksum)]:
        return None
    return Generation(struct.pack(">II", salt_1, salt_2), page_size, is_big, found[0])


def _counted(shm: Path) -> Counted | None:
    """Read the index of a log; None where it is not there, or not as SQLite leaves it."""
    if not shm.exists():
        return None
    with shm.open("rb") as file:
        data = file.read(_INDEX_READ)
    if len(data) < _INDEX_READ or data[: _INDEX.size] != data[_INDEX.size : _BACKFILLED_AT]:
        return None
    *_, frames, _, _, _, _, _, sum_1, sum_2 = _INDEX.unpack_from(data)
    if _continued((0, 0), np.frombuffer(data, np.uint32, 10)[None, :]) != [(sum_1, sum_2)]:
        return None
    (backfilled,) = struct.unpack_from("=I", data, _BACKFILLED_AT)
    (attempted,) = struct.unpack_from("=I", data, _ATTEMPTED_AT)
    return Counted(data[32:40], frames, backfilled, attempted)


def _sound(generation: Generation, file: BinaryIO) -> Sound:
    committed = number = 0
    checksum: tuple[int, int] | None = generation.checksum
    has_ended = False  # Whether a transaction has ended behind what fits.
    for frames in _chunks(file, _FRAME.size + generation.page_size):
        heads = [_FRAME.unpack_from(frame) for frame in frames]
        sums: list[tuple[int, int]] = []
        if checksum is not None:
            words = np.stack([_words(frame[:8] + frame[_FRAME.size :], generation.is_big) for frame in frames])
            sums = _continued(checksum, words)
        for at, (_, pages, salt_1, salt_2, *its) in enumerate(heads):
            is_of_now = struct.pack(">II", salt_1, salt_2) == generation.salts
            if checksum is not None and is_of_now and sums[at] == tuple(its):
                number, checksum = number + 1, sums[at]
                committed = number if pages else committed
                continue
            checksum = None
            if is_of_now and has_ended:
                return Sound(committed, True)
            has_ended |= is_of_now and pages > 0
    return Sound(committed, False)


def _chunks(file: BinaryIO, size: int) -> Iterator[list[bytes]]:
    """Read frames, so many at a time; what follows the last whole one is none."""
    while data := file.read(size * FRAMES_AT_A_TIME):
        whole = len(data) // size
        if whole:
            yield [data[at * size : (at + 1) * size] for at in range(whole)]


def _words(data: bytes, is_big: bool) -> Words:
    return np.frombuffer(data, ">u4" if is_big else "<u4").astype(np.uint32)


def _continued(checksum: tuple[int, int], rows: Words) -> list[tuple[int, int]]:
    """Continue a checksum over rows of an even number of words; the checksum after each.

    Over two words, x and y, it goes from (a, b) to (a + b + x, a + 2b + x + y), modulo 2^32: linear in all of them.
    """
    weights, (power_aa, power_ab, power_bb) = _weights(rows.shape[1] // 2)
    of_x, of_y = rows[:, 0::2], rows[:, 1::2]
    own_a = (of_x * weights[0] + of_y * weights[1]).sum(axis=1, dtype=np.uint32).tolist()
    own_b = (of_x * weights[2] + of_y * weights[3]).sum(axis=1, dtype=np.uint32).tolist()
    found, (a, b) = [], checksum
    for more_a, more_b in zip(own_a, own_b, strict=True):
        a, b = power_aa * a + power_ab * b + more_a & _MASK, power_ab * a + power_bb * b + more_b & _MASK
        found.append((a, b))
    return found


@lru_cache(maxsize=8)
def _weights(pairs: int) -> tuple[Words, tuple[int, int, int]]:
    """What each pair of words adds to both parts of a checksum, and what the checksum before all of them adds."""
    weights = np.empty((4, pairs), np.uint32)
    aa, ab, bb = 1, 0, 1  # The power of a symmetric matrix: [[1, 1], [1, 2]].
    for pair in reversed(range(pairs)):
        weights[:, pair] = aa + ab & _MASK, ab, ab + bb & _MASK, bb
        aa, ab, bb = aa + ab & _MASK, aa + 2 * ab & _MASK, ab + 2 * bb & _MASK
    return weights, (aa, ab, bb)
