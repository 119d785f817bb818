"""`records.filtering.scatter`, compiled: memory for the targets, and the calls of the kernel.

Targets are written into memory that is lent, with room for a little more than their part of the run before. Where that
is not enough, not known, or too little to be lent, they are written into regions of one mapping, each as large as
all of the input: pages that are not written take no memory. What is there is then copied out, exactly as much as it is.
Long records stay where they are instead, and targets are given pieces of memory (`runtime.gathered`); where something
does not fit into what was prepared for that, the rest of the block is copied.
Where the processor has no instruction for checksums, they are taken here.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import struct
import threading
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from anabranch.records.batch import (
    CONTROL,
    HEADER_SIZE,
    LENGTH_END,
    ChecksumError,
    check,
    expanded,
    headers,
    parse_header,
    stamp_crc,
)
from anabranch.records.checksum import joining_tables
from anabranch.records.compression import COMPRESSION_MASK
from anabranch.records.filtering import (
    LOAD_BUCKETS,
    Cell,
    Gathered,
    Load,
    Scattered,
    Selection,
    Spread,
    in_one_piece,
    malformed,
)
from anabranch.records.hashing import murmur2
from anabranch.runtime import gathered
from anabranch.runtime.lent_memory import SIZE_MAX, SIZE_MIN, Shelf

# As in `records.kernels.scatter`, which needs Numba.
_FIRST = struct.Struct(">8xI9xH34xI")
"""What the first batch says of its length, attributes and count."""
_RECORDS_AT, _RECORDS_END = 2, 3
_REFERS, _STOPPED_AT, _NEXT_OFFSET, _SHEET_SIZE = 26, 27, 28, 29
_GUIDE_BITS, _NOBODYS, _MIXED = 10, 0xFE, 0xFF
_PLACE_BITS = 63 - _GUIDE_BITS
_BACKWARDS = itemgetter(*(int(f"{number:0{_GUIDE_BITS}b}"[::-1], 2) for number in range(1 << _GUIDE_BITS)))
_CELLS_IN_GROUP_MAX = 8
_PIECES_AT, _LAST_END, _TARGET_FIELDS = 5, 12, 16
_REFERRING = struct.Struct(f"={5 * 8}x3q3qqq{3 * 8}x")
"""The fields of a target that is given pieces, before it is given any."""
_DONE, _COMPRESSED, _FULL, _MALFORMED, _DAMAGED = 0, 1, 2, -1, -2
_SLACK = 64
_NO_CELL = Cell(1, 0, -1)
_PLACE_MAX = (1 << 63) - 1
_KEPT_SIZE = 16 * 1024 * 1024
"""Bytes written into a mapping up to which it is kept as it is."""
_STAGGER = 1088
"""Bytes between the places in a page at which regions begin: alike places would drive each other from caches."""
_MARGIN, _DEVIATIONS = 1.05, 3
"""What a target is given room for: by how much its part may have grown, and by how many standard deviations chance may
give it more records than that."""
_USED_MIN = 0.6
"""The part of lent memory that must be used, or what is in it is copied into less."""
_REFERRED_SIZE = 800
"""Bytes of a block's first records, on average, from which on they are sent from where they lie: the system needs about
as long for a piece as for copying half as many bytes."""
_REFERRED_FROM = 64 * 1024
"""Bytes of a block for each target, or of what a target was given of it, from which on that is worth it."""
_BATCHES_MORE = 1.25
"""How many more batches there may be than the size of the first one says."""
_OWN_PART = 32
"""Room for short records is for this part of what a target is given."""
_CRC_PIECES = 1024, 128

_Number = ctypes.c_int64
_SHEET = struct.Struct(f"={_SHEET_SIZE}q")


class _Prepared(NamedTuple):
    """A selection as the kernel reads it."""

    cells: tuple[int, int, int]
    """Where they are, how many groups, and how many in each."""
    guide_at: int
    wanted: tuple[int, int]
    """Where the entries of a set of keys are, and its mask."""
    refused: tuple[int, int]
    kept: tuple[Any, ...]
    """What lies at these addresses, and at those in the entries."""
    parts: list[float]
    """What part of the last run each target was given; at first, as much as the others."""


class _Mapping:
    """Memory for targets."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self.memory = mmap.mmap(-1, size, flags=flags)
        self.size = size
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.view = memoryview(self.memory)


class _Own(threading.local):
    """What each thread has of its own."""

    def __init__(self) -> None:
        self.sheet = (_Number * _SHEET_SIZE)()
        self.sheet_at = ctypes.addressof(self.sheet)
        self.targets: Any = (_Number * _TARGET_FIELDS)()
        self.mapping = _Mapping(mmap.PAGESIZE)

    def blank_targets(self, count: int) -> Any:
        """Room for the fields of `count` targets, all 0."""
        size = ctypes.sizeof(_Number) * _TARGET_FIELDS * max(1, count)
        if ctypes.sizeof(self.targets) < size:
            self.targets = (_Number * (_TARGET_FIELDS * count))()
        else:
            ctypes.memset(self.targets, 0, size)
        return self.targets


class NativeScatter:
    """`records.filtering.scatter`, compiled; callable from any thread."""

    def __init__(self, code_at: int, *, checksums: bool, joins: bool) -> None:
        """`checksums`: whether the code takes them; `joins`: whether it makes those of batches of those of records."""
        self._run: Any = ctypes.CFUNCTYPE(_Number, ctypes.c_void_p)(code_at)
        self._tables = _crc_tables() if checksums else None
        self._refers = joins
        self._own = _Own()
        self._shelf = Shelf()

    def __call__(
        self,
        batches: memoryview,
        selection: Selection,
        spread: Spread,
        *,
        record_size_max: int,
        work_size_max: int,
        load: Load | None = None,
    ) -> Scattered:
        """As `records.filtering.scatter`."""
        if self._tables is None and selection.targets:
            batches = batches[: _sound(batches)]
        own = self._own
        pass_ = _Pass(own, self._shelf, batches, selection, spread, self._tables, load, refers=self._refers)
        expanded_size = 0
        while True:
            outcome = self._run(own.sheet_at)
            position = own.sheet[_STOPPED_AT] - pass_.at
            if outcome == _DONE or (outcome == _DAMAGED and position):
                break
            if outcome == _DAMAGED:
                check(batches, 0, parse_header(batches, 0))
            if outcome in (_DAMAGED, _MALFORMED):
                raise malformed(batches, position)
            if outcome == _COMPRESSED:
                if expanded_size > work_size_max:
                    break
                header = parse_header(batches, position)
                plain = expanded(batches[position : position + header.size], header, record_size_max)
                expanded_size += len(plain)
                pass_.give(position, plain)
            else:
                pass_.make_room(position)
        return pass_.finish(position, expanded_size)


class _Pass:
    """One run of batches on its way through the kernel."""

    def __init__(
        self,
        own: _Own,
        shelf: Shelf,
        batches: memoryview,
        selection: Selection,
        spread: Spread,
        tables: Any,
        load: Load | None,
        *,
        refers: bool,
    ) -> None:
        self._own = own
        self._shelf = shelf
        self._batches = batches
        self._held = Held(batches)
        self.at = self._held.at
        self._prepared = prepared = _prepare(selection)
        self._count = selection.targets
        self._targets = own.blank_targets(self._count)
        self._parts: list[list[bytes | memoryview | Gathered]] = [[] for _ in range(self._count)]
        self._lent: list[memoryview] = []
        self._referred: list[tuple[memoryview, int, int]] = []
        """For each target memory for its pieces, where they end, and its own bytes: its address; where the ends are."""
        self._takes_checksums = tables is None
        self._plain: Any = None
        self._load = load
        self._histogram = None if load is None else (_Number * (2 * LOAD_BUCKETS))()
        self._written = 0
        self._room = len(batches) + HEADER_SIZE + _SLACK
        if self._takes_checksums or not ((refers and self._refer()) or self._lend()):
            self._regions(self._room)
        factor, shift = _divides_by(spread.initial)
        _SHEET.pack_into(
            own.sheet,
            0,
            self.at,
            self.at + len(batches),
            0,
            0,
            factor,
            spread.held[0],
            spread.held[1] - spread.held[0],
            0 if tables is None else ctypes.addressof(tables),
            *prepared.cells,
            ctypes.addressof(self._targets),
            self._count,
            selection.asks_sizes,
            selection.size_min,
            selection.size_max,
            *prepared.wanted,
            *prepared.refused,
            0 if self._histogram is None else ctypes.addressof(self._histogram),
            0 if load is None else load.start,
            0 if load is None else load.shift,
            LOAD_BUCKETS - 1,
            shift,
            prepared.guide_at,
            bool(self._referred),
            self.at,
            -1,
        )

    def _refer(self) -> bool:
        """Have long records stay where they are."""
        size, parts = len(self._batches), self._prepared.parts
        if self._load is not None or size < _REFERRED_FROM * len(parts) or not parts:
            return False
        batch_size, attributes, record_size = _first(self._batches)
        if record_size < _REFERRED_SIZE or attributes & (COMPRESSION_MASK | CONTROL):
            return False
        batches = int(size / batch_size * _BATCHES_MORE) + 2
        rooms: list[tuple[int, int]] = []
        for part in parts:
            records = part * size / record_size
            pieces = int(records * _MARGIN + _DEVIATIONS * math.sqrt(records)) + batches
            own = HEADER_SIZE * batches + int(part * size / _OWN_PART) + 2 * (HEADER_SIZE + _SLACK)
            rooms.append((pieces, -(-own // 8) * 8))
        piece_size = gathered.PIECE_SIZE + gathered.END_SIZE
        memory = self._shelf.take(sum(piece_size * pieces + own for pieces, own in rooms))
        at, start = _at(memory), 0
        for target, (pieces, own) in enumerate(rooms):
            ends_at = gathered.PIECE_SIZE * pieces
            own_at, behind = piece_size * pieces, piece_size * pieces + own
            fields = at, at + ends_at, 0, at + own_at, at + behind, 0, at + ends_at, 0
            _REFERRING.pack_into(self._targets, target * _REFERRING.size, *fields)
            self._referred.append((memory[start : start + behind], at, ends_at))
            start += behind
            at += behind
        return True

    def _lend(self) -> bool:
        """Give each target memory that is lent, if that is likely to do."""
        size = len(self._batches)
        if size < LENGTH_END + HEADER_SIZE:
            return False
        *_, record_size = _first(self._batches)
        rooms = [
            int(part * size * _MARGIN + _DEVIATIONS * math.sqrt(part * size * record_size)) + 2 * mmap.PAGESIZE
            for part in self._prepared.parts
        ]
        if not rooms or min(rooms) < SIZE_MIN or max(rooms) > SIZE_MAX:
            return False
        for target, room in enumerate(rooms):
            lent = self._shelf.take(room)[target * _STAGGER % mmap.PAGESIZE :]
            self._lent.append(lent)
            start = _at(lent)
            self._targets[target * _TARGET_FIELDS] = start
            self._targets[target * _TARGET_FIELDS + 1] = start + len(lent)
        return True

    def _regions(self, room: int) -> None:
        """Give each target a region of `room` bytes, in place of the ones before."""
        room = -(-room // mmap.PAGESIZE) * mmap.PAGESIZE + _STAGGER
        mapping = self._own.mapping
        if mapping.size < room * self._count:
            mapping = self._own.mapping = _Mapping(room * self._count)
        self._mapping, self._room = mapping, room
        for target in range(self._count):
            start = mapping.at + target * room
            self._targets[target * _TARGET_FIELDS] = start
            self._targets[target * _TARGET_FIELDS + 1] = start + room

    def give(self, position: int, plain: Any) -> None:
        """Go on at a compressed batch, with its records."""
        sheet = self._own.sheet
        self._plain = Held(plain)
        sheet[0] = self.at + position
        sheet[_RECORDS_AT] = self._plain.at
        sheet[_RECORDS_END] = sheet[_RECORDS_AT] + len(plain)

    def make_room(self, position: int) -> None:
        """Go on at a batch that does not fit into what is left: with regions as large as all of the input."""
        sheet = self._own.sheet
        self._drain()
        sheet[0] = self.at + position
        sheet[_REFERS] = 0
        given = sheet[_RECORDS_END] - sheet[_RECORDS_AT] if sheet[_RECORDS_AT] else 0
        self._regions(max(given, len(self._batches)) + HEADER_SIZE + _SLACK)

    def _drain(self) -> None:
        if self._referred:
            for target, (memory, at, ends_at) in enumerate(self._referred):
                fields = target * _TARGET_FIELDS
                count = (self._targets[fields + _PIECES_AT] - at) // gathered.PIECE_SIZE
                if count:
                    size = self._targets[fields + _LAST_END]
                    self._parts[target].append(gathered.Gathered(memory, at, count, ends_at, size, self._held))
            self._referred = []
            return
        if self._lent:
            for target, (lent, parts) in enumerate(zip(self._lent, self._parts, strict=True)):
                size = len(lent) - self._targets[target * _TARGET_FIELDS + 1] + self._targets[target * _TARGET_FIELDS]
                if size:
                    parts.append(lent[:size] if size >= _USED_MIN * len(lent) else self._shelf.copy(lent[:size]))
            self._lent = []
            return
        for target, parts in enumerate(self._parts):
            start = target * self._room
            size = self._targets[target * _TARGET_FIELDS] - self._mapping.at - start
            if size:
                data = bytearray(self._mapping.view[start : start + size]) if self._takes_checksums else None
                if data is None:
                    parts.append(self._shelf.copy(self._mapping.view[start : start + size]))
                else:
                    for position, _ in headers(data):
                        stamp_crc(data, position)
                    parts.append(bytes(data))
            self._written += size

    def finish(self, position: int, expanded_size: int) -> Scattered:
        """Collect what was written."""
        self._drain()
        if self._written > _KEPT_SIZE:
            self._own.mapping = _Mapping(mmap.PAGESIZE)
        if self._load is not None and self._histogram is not None:
            found = self._histogram[:]
            self._load.records = [a + b for a, b in zip(self._load.records, found[::2], strict=True)]
            self._load.bytes = [a + b for a, b in zip(self._load.bytes, found[1::2], strict=True)]
        data = [self._joined(parts) for parts in self._parts]
        if position:
            self._prepared.parts[:] = [len(each) / position for each in data]
        records = [self._targets[target * _TARGET_FIELDS + 2] for target in range(self._count)]
        return Scattered(data, records, self._own.sheet[_NEXT_OFFSET], position, expanded_size)

    def _joined(self, parts: list[bytes | memoryview | Gathered]) -> bytes | memoryview | Gathered:
        if len(parts) == 1 and (isinstance(parts[0], bytes | memoryview) or len(parts[0]) >= _REFERRED_FROM):
            return parts[0]
        if not parts:
            return b""
        joined = self._shelf.take(sum(map(len, parts)))
        at = 0
        for part in parts:
            joined[at : at + len(part)] = in_one_piece(part)
            at += len(part)
        return joined


def _sound(batches: memoryview) -> int:
    """The bytes of batches before the first that is not what its checksum was made of; ChecksumError if that is one."""
    for position, header in headers(batches):
        try:
            check(batches, position, header)
        except ChecksumError:
            if position:
                return position
            raise
    return len(batches)


def _first(batches: memoryview) -> tuple[int, int, float]:
    """The size of the first batch, as it says, its attributes, and the bytes of a record, on average."""
    length, attributes, count = _FIRST.unpack_from(batches)
    return length + LENGTH_END, attributes, length / max(1, count)


def _at(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@lru_cache(maxsize=256)
def _prepare(selection: Selection) -> _Prepared:
    cells = list(selection.cells) or [_NO_CELL]
    group_size = min(len(cells), _CELLS_IN_GROUP_MAX)
    groups = -(-len(cells) // group_size)
    numbers = [number for cell in cells for number in cell]
    numbers += [_PLACE_MAX, -1, -1] * (groups * group_size - len(cells))
    table, guide = (_Number * len(numbers))(*numbers), _guide(selection.cells)
    wanted, refused = _key_set(selection.keys_wanted), _key_set(selection.keys_refused)
    return _Prepared(
        (ctypes.addressof(table), groups, group_size),
        ctypes.addressof(guide),
        _set_fields(wanted),
        _set_fields(refused),
        (table, guide, wanted, refused, *selection.keys_wanted, *selection.keys_refused),
        [1 / max(1, selection.targets)] * selection.targets,
    )


def _set_fields(entries: tuple[Any, int]) -> tuple[int, int]:
    table, mask = entries
    return (0, 0) if table is None else (ctypes.addressof(table), mask)


def _guide(cells: tuple[Cell, ...]) -> Any:
    """The target of all places that begin with the same bits, by those bits backwards."""
    guide = bytearray([_NOBODYS]) * (1 << _GUIDE_BITS)
    for start, last, target in cells:
        for bound in (start, last):
            guide[bound >> _PLACE_BITS] = _MIXED
        first, behind = -(-start >> _PLACE_BITS), last + 1 >> _PLACE_BITS
        if first < behind:
            guide[first:behind] = bytes([target]) * (behind - first)
    return (ctypes.c_ubyte * len(guide))(*_BACKWARDS(guide))


@lru_cache(maxsize=256)
def _divides_by(divisor: int) -> tuple[int, int]:
    """A factor and a shift, in place of a divisor of numbers of 31 bits: neither they nor the product are rounded.

    The factor is too large by less than 2 to the (shift - 31) over the divisor, so that the quotient is right.
    """
    shift = 31 + (divisor - 1).bit_length()
    return -(-(1 << shift) // divisor), shift


def _key_set(keys: tuple[bytes, ...]) -> tuple[Any, int]:
    """An open hash table of keys, at most half full; the kernel compares the keys themselves, too."""
    if not keys:
        return None, 0
    size = 1 << (2 * len(keys)).bit_length()
    table = (_Number * (3 * size))(*([0, 0, -1] * size))
    for key in keys:
        murmur = murmur2(key)
        place = murmur & size - 1
        while table[3 * place + 2] >= 0:
            place = (place + 1) & size - 1
        at = ctypes.cast(ctypes.c_char_p(key), ctypes.c_void_p).value
        table[3 * place : 3 * place + 3] = [murmur, at or 0, len(key)]
    return table, size - 1


class _PyBuffer(ctypes.Structure):
    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


class Held:
    """Bytes that stay where they are, also those that may not be written, until this is dropped."""

    def __init__(self, data: Any) -> None:
        self._buffer = _PyBuffer()
        _get_buffer(data, ctypes.byref(self._buffer), 0)
        self.at: int = self._buffer.buf or 0

    def __del__(self) -> None:
        _release_buffer(ctypes.byref(self._buffer))


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None


def _crc_tables() -> Any:
    """As `records.kernels.crc32c.CRC_TABLES`."""
    tables = joining_tables(_CRC_PIECES)
    return (ctypes.c_ubyte * len(tables)).from_buffer_copy(tables)
