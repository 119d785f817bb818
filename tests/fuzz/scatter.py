"""The scatter kernel, byte by byte: whatever batches hold and however little room there is, it keeps to its memory.

Machine code has no sanitizer, so the kernel runs here as the plain Python that it is compiled from. Its reads and
writes are done by functions that know which memory it was given, and for what: the batches, records that were expanded,
the tables, the targets and what each of them may be written to. FoundError at any byte beside those, at memory given
for two things, at a piece that points elsewhere, and where the reference in `records.filtering` says something else.

`python -m tests.fuzz.scatter` scatters many blocks; some of their bytes are damaged, and the room is cut at random.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from random import Random
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import crc32c
from numba.core.dispatcher import Dispatcher

from anabranch.base.errors import DecodeError
from anabranch.machines.keyspace import SPACE, cuts
from anabranch.records import hashing
from anabranch.records.batch import headers
from anabranch.records.filtering import SIZE_MAX, Cell, Load, Selection, Spread, in_one_piece, scatter
from anabranch.records.kernels import crc32c as crc_kernels
from anabranch.records.kernels import memory
from anabranch.records.kernels import scatter as kernel
from anabranch.records.kernels.crc32c import CRC_TABLES, LATE_AT, LATE_SIZE_MIN
from anabranch.runtime import native_scatter
from anabranch.runtime.gathered import Gathered
from tests.properties import record_model as model

MASK_32, MASK_64 = (1 << 32) - 1, (1 << 64) - 1
KEYS_MAX = 40


class FoundError(AssertionError):
    """The kernel did what it may not."""


class Given(NamedTuple):
    """Memory that the kernel was given, from `start` to `end`."""

    start: int
    end: int
    writable: bool
    name: str


class Memory:
    """The memory of one call, and all that a kernel does with it."""

    def __init__(self) -> None:
        self._given: list[Given] = []
        self._starts: list[int] = []
        self._last = Given(0, 0, False, "nothing")

    def give(self, given: Iterable[Given]) -> None:
        """Have this memory, and no other."""
        self._given = sorted(each for each in given if each.end > each.start)
        self._starts = [each.start for each in self._given]
        self._last = Given(0, 0, False, "nothing")
        for one, two in pairwise(self._given):
            if one.end > two.start and (one.writable or two.writable):
                raise FoundError(f"{one.name} ends behind where {two.name} begins")

    def check(self, at: int, size: int, *, write: bool) -> None:
        """Whether some bytes lie in memory that was given."""
        last = self._last
        if not (last.start <= at and at + size <= last.end):
            place = bisect_right(self._starts, at) - 1
            last = self._given[place] if place >= 0 else last
            if not (last.start <= at and at + size <= last.end):
                raise FoundError(
                    f"{size} bytes are {'written' if write else 'read'} {at - last.end} behind {last.name}"
                )
            self._last = last
        if write and not last.writable:
            raise FoundError(f"{last.name} is written")

    def read(self, at: int, size: int) -> bytes:
        self.check(at, size, write=False)
        return ctypes.string_at(at, size)

    def write(self, at: int, data: bytes) -> None:
        self.check(at, len(data), write=True)
        ctypes.memmove(at, data, len(data))

    # -- what kernels do -----------------------------------------------------------------------------------------------

    def _reader(self, size: int, *, big: bool, signed: bool) -> Callable[[int], int]:
        order = "big" if big else "little"
        return lambda at: int.from_bytes(self.read(at, size), order, signed=signed)  # type: ignore[arg-type]

    def _writer(self, size: int, *, big: bool) -> Callable[[int, int], None]:
        order, mask = "big" if big else "little", (1 << 8 * size) - 1
        return lambda at, value: self.write(at, (value & mask).to_bytes(size, order))  # type: ignore[arg-type]

    def _crc(self, at: int, end: int, tables: int, late: int) -> int:
        self.check(min(at, end - 8), max(end - at, 8), write=False)  # The last eight bytes are read at once.
        data = bytearray(self.read(at, end - at))
        if kernel.FOLDS_CRC and len(data) >= LATE_SIZE_MIN:
            word = int.from_bytes(data[LATE_AT : LATE_AT + 8], "little") ^ late & (1 << 64) - 1
            data[LATE_AT : LATE_AT + 8] = word.to_bytes(8, "little")
        return crc32c.crc32c(data)

    def operations(self) -> dict[str, Any]:
        """The functions that the kernel calls, by name."""
        found: dict[str, Any] = {}
        for name, size in (("u8", 1), ("u32", 4)):
            found[name] = self._reader(size, big=False, signed=False)
        for name, size in (("i32", 4), ("i64", 8)):
            found[name] = self._reader(size, big=False, signed=True)
        for name, size in (("16", 2), ("32", 4), ("64", 8)):
            found[f"be{name}"] = self._reader(size, big=True, signed=True)
            found[f"put_be{name}"] = self._writer(size, big=True)
            found[f"put{name}"] = self._writer(size, big=False)
        found["put8"] = self._writer(1, big=False)
        for size in (32, 64):
            found[f"copy_{size}"] = lambda to, at, size=size: self.write(to, self.read(at, size))
        found["prefetch_to_read_later"] = found["prefetch_to_write"] = lambda at: None
        found["reverse_bits"] = lambda value: int(f"{value & MASK_64:064b}"[::-1], 2)
        found["trailing_zeros"] = lambda value: (value & -value & MASK_64 or 1 << 64).bit_length() - 1
        found["murmur2"] = lambda at, size: hashing.murmur2(self.read(at, size))
        found["mixed"] = hashing.fmix64
        found["take_crc_and"] = self._crc
        found["take_crc"] = lambda at, end, tables: self._crc(at, end, tables, 0)
        found["crc_step"] = _crc_step
        found["crc_times"] = lambda crc, factor: _crc_step(0, _product(crc, factor))
        return found


def _crc_step(crc: int, word: int) -> int:
    return crc32c.crc32c((word & MASK_64).to_bytes(8, "little"), crc ^ MASK_32) ^ MASK_32


def _product(one: int, other: int) -> int:
    """Multiply without carries."""
    product = 0
    for place in range(other.bit_length()):
        product ^= one << place if other >> place & 1 else 0
    return product


def interpreted(memory_: Memory) -> Callable[[int], int]:
    """The kernel in plain Python, with its reads and writes done by `memory_`."""
    names = {**vars(crc_kernels), **vars(memory), **vars(kernel), **memory_.operations()}
    for name, found in list(names.items()):
        if isinstance(found, Dispatcher) and name not in memory_.operations():
            names[name] = FunctionType(found.py_func.__code__, names)
    return names["scatter"]  # type: ignore[no-any-return]


class Checked(native_scatter.NativeScatter):
    """What calls the kernel in a broker, with the kernel interpreted."""

    def __init__(self) -> None:
        super().__init__(0, checksums=True, joins=True)
        self._memory = Memory()
        self._interpreted = interpreted(self._memory)
        self._run = self._checked
        self.calls = Counter[int]()
        self.refers = 0

    def _checked(self, sheet_at: int) -> int:
        size = 8 * kernel.SHEET_SIZE
        sheet = list((ctypes.c_int64 * kernel.SHEET_SIZE).from_address(sheet_at))
        count = sheet[kernel.TARGET_COUNT]
        given = [
            Given(sheet_at, sheet_at + size, True, "the sheet"),
            Given(sheet[kernel.AT], sheet[kernel.END], False, "the batches"),
            _table(sheet[kernel.TABLES_AT], len(CRC_TABLES)),
            Given(sheet[kernel.GUIDE_AT], sheet[kernel.GUIDE_AT] + (1 << kernel.GUIDE_BITS), False, "the guide"),
            _table(sheet[kernel.CELLS_AT], kernel.CELL_SIZE * sheet[kernel.CELL_GROUPS] * sheet[kernel.CELLS_IN_GROUP]),
            Given(sheet[kernel.TARGETS_AT], sheet[kernel.TARGETS_AT] + kernel.TARGET_SIZE * count, True, "the targets"),
        ]
        if sheet[kernel.RECORDS_AT]:
            given.append(Given(sheet[kernel.RECORDS_AT], sheet[kernel.RECORDS_END], False, "the records"))
        for at, mask in ((kernel.WANTED_AT, kernel.WANTED_MASK), (kernel.REFUSED_AT, kernel.REFUSED_MASK)):
            if sheet[at]:
                entries = (ctypes.c_int64 * (3 * (sheet[mask] + 1))).from_address(sheet[at])
                given.append(_table(sheet[at], 8 * len(entries)))
                keys = zip(entries[1::3], entries[2::3], strict=True)
                given += [Given(key_at, key_at + key_size, False, "a key") for key_at, key_size in keys if key_size > 0]
        if sheet[kernel.HISTOGRAM_AT]:
            at = sheet[kernel.HISTOGRAM_AT]
            given.append(Given(at, at + 16 * (sheet[kernel.HISTOGRAM_LAST] + 1), True, "the histogram"))
        pieces = []
        for number in range(count):
            at = sheet[kernel.TARGETS_AT] + number * kernel.TARGET_SIZE
            target = (ctypes.c_int64 * (kernel.TARGET_SIZE // 8)).from_address(at)
            of = {name: target[getattr(kernel, name) // 8] for name in _OF_TARGETS}
            given.append(Given(of["TARGET_AT"], of["TARGET_END"], True, f"the room of target {number}"))
            if sheet[kernel.REFERS]:
                room = (of["PIECES_END"] - of["PIECES_AT"]) // kernel.PIECE_SIZE * kernel.END_SIZE
                pieces.append((number, of["PIECES_AT"]))
                given += [
                    Given(of["PIECES_AT"], of["PIECES_END"], True, f"the pieces of target {number}"),
                    Given(of["ENDS_AT"], of["ENDS_AT"] + room, True, f"the ends of target {number}"),
                    Given(of["OWN_AT"], of["OWN_END"], True, f"the own memory of target {number}"),
                ]
        self._memory.give(given)
        outcome = self._interpreted(sheet_at)
        self.calls[outcome] += 1
        self.refers += bool(pieces)
        for number, first in pieces:
            at = sheet[kernel.TARGETS_AT] + number * kernel.TARGET_SIZE
            behind = ctypes.c_int64.from_address(at + kernel.PIECES_AT).value
            for place in range(first, behind, kernel.PIECE_SIZE):
                start, length = (ctypes.c_int64 * 2).from_address(place)
                if length <= 0:
                    raise FoundError(f"a piece of target {number} has {length} bytes")
                self._memory.check(start, length, write=False)
        return outcome


_OF_TARGETS = ("TARGET_AT", "TARGET_END", "PIECES_AT", "PIECES_END", "OWN_AT", "OWN_END", "ENDS_AT")


def _table(at: int, size: int) -> Given:
    return Given(at, at + size, False, "a table")


# -- what is scattered -----------------------------------------------------------------------------------------------


def block(chance: Random) -> bytes:
    """Batches of long and short records, most often as long as those of which pieces are sent."""
    found, offset = b"", chance.choice([0, 1 << 33])
    long = chance.random() < 0.8
    sizes = chance.choice([[0, 1, 7, 63, 300, 490, 500, 505, 510, 515, 900, 1_500], [900, 1_000], [0, 515], [0, 5]])
    for number in range(chance.choice([1, 1, 3, 9, 25])):
        rows, at = [], offset
        for _ in range(chance.choice([1, 2, 5, 5, 40]) if number else chance.choice([1, 2, 16])):
            at += chance.choice([0, 0, 0, 200])
            key = chance.choice(
                [None, b"", b"k%d" % chance.randrange(KEYS_MAX), chance.randbytes(chance.randrange(12))]
            )
            size = 1_000 if number == 0 and long else chance.choice(sizes)
            value = None if chance.random() < 0.05 else chance.randbytes(size)
            more = (("h", b"1"), ("n", None)) if chance.random() < 0.1 else ()
            rows.append(model.Row(at, chance.randrange(1 << 41), key, value, more))
            at += 1
        batch = model.Batch(offset, tuple(rows), last_offset=at - 1)
        if number and chance.random() < 0.1:
            batch = model.Batch(offset, (), control=True, abort=True, last_offset=at - 1)
        elif chance.random() < (0.15 if number else 0.02):
            batch = replace(batch, codec=chance.choice([1, 4]))
        found += model.encode(batch)
        offset = at
    return found


def selection(chance: Random) -> Selection:
    """Some ranges, and sometimes further filters."""
    targets = chance.choice([1, 2, 3, 7])
    cells = [Cell(start, end, place) for place, (start, end) in enumerate(cuts(SPACE, targets))]
    cells = [each for each in cells if chance.random() < 0.9]
    keys = tuple(sorted({b"k%d" % chance.randrange(KEYS_MAX) for _ in range(20)}))
    wanted, refused = (keys if chance.random() < 0.1 else () for _ in "12")
    return Selection(
        tuple(cells), targets, wanted, refused, chance.choice([0, 0, 0, 2]), chance.choice([SIZE_MAX, SIZE_MAX, 600])
    )


ROOMS = {"_MARGIN": (0.3, 1.05), "_DEVIATIONS": (0, 3), "_BATCHES_MORE": (0.2, 1.25), "_OWN_PART": (5_000, 32)}
"""Less room than there is in brokers, and as much."""


DAMAGED = (*range(75), *range(57, 70), *range(57, 70), *range(57, 70))
"""Places in a batch: more often the number of its records, and the numbers of the first one."""


class Fuzz:
    """Scatters blocks, and counts what became of them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()

    def run(self, numbers: Iterable[int]) -> None:
        """Scatter blocks; FoundError at the first that is not as it must be."""
        for number in numbers:
            try:
                self.judge(Random(f"{self.seed}/{number}"))
            except Exception as error:
                raise FoundError(f"block {self.seed}/{number}: {error!r}") from error

    def judge(self, chance: Random) -> None:
        """Scatter one block."""
        data, chosen, load = block(chance), selection(chance), Load(SPACE) if chance.random() < 0.15 else None
        is_damaged = chance.random() < 0.3
        if is_damaged:
            damaged = bytearray(data)
            starts = [position for position, _ in headers(data)]
            if chance.random() < 0.5:  # The last record ends behind its batch, and what there is.
                del damaged[-chance.randrange(1, 40) :]
                damaged[starts[-1] + 8 : starts[-1] + 12] = (len(damaged) - starts[-1] - 12).to_bytes(4, "big")
            else:
                for _ in range(chance.randrange(1, 6)):
                    place = chance.choice([chance.randrange(len(data)), chance.choice(starts) + chance.choice(DAMAGED)])
                    damaged[min(place, len(data) - 1)] = chance.choice([0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)])
                del damaged[chance.choice([len(data), chance.randrange(len(data) + 1)]) :]
            data = bytes(model.restamped(damaged) if chance.random() < 0.9 else damaged)
        checked = Checked()
        rooms: dict[str, float] = {name: values[chance.random() < 0.5] for name, values in ROOMS.items()}
        spread, limits = (
            Spread(chance.choice([1, 3, 99_991]), SPACE),
            {"record_size_max": 1 << 20, "work_size_max": 1 << 20},
        )
        with mock.patch.multiple(
            native_scatter, _REFERRED_FROM=chance.choice([1_000, 1_000, 1_000, 64 * 1024]), **rooms
        ):
            try:
                found = checked(memoryview(data), chosen, spread, load=load, **limits)
            except DecodeError:
                if not is_damaged:
                    raise
                self.counts["malformed"] += 1
                return
        self.counts["referred"] += bool(checked.refers)
        self.counts["lay in pieces"] += any(isinstance(each, Gathered) for each in found.data)
        self.counts["had no room"] += checked.calls[kernel.FULL] > 0
        self.counts["had none for pieces"] += checked.calls[kernel.FULL] > 0 and checked.refers > 0
        self.counts["compressed"] += checked.calls[kernel.COMPRESSED] > 0
        made = [bytes(in_one_piece(each)) for each in found.data]
        if is_damaged:
            self.counts["damaged"] += 1
            return
        expected = Load(SPACE)
        plain = scatter(memoryview(data), chosen, spread, load=expected, **limits)
        assert load is None or (load.records, load.bytes) == (expected.records, expected.bytes)
        assert made == list(plain.data)
        assert (found.records, found.next_offset, found.size) == (plain.records, plain.next_offset, plain.size)
        self.counts["right"] += 1


def main() -> int:
    """Run for long, and say how it goes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    options = parser.parse_args()
    fuzz = Fuzz(options.seed)
    try:
        for first in range(0, options.count, 1_000):
            fuzz.run(range(first, min(first + 1_000, options.count)))
    except FoundError as error:
        print(error)
        return 1
    said = ", ".join(f"{name} {count}" for name, count in fuzz.counts.most_common())
    print(f"seed {options.seed}: {options.count} blocks; {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
