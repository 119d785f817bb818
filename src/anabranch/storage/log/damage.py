"""Telling a torn tail from damage, and setting bytes aside instead of removing them.

A process that is killed leaves at most a prefix of its last write: the file ends within a batch. Whatever else is
unsound was sound once. So an unsound place is a torn tail only if no sound batch lies behind it, in this segment or a
later one, and if it is no whole batch itself. After a power loss unsynced sectors are lost in any order, so that
above the synced end sound batches behind an unsound place prove nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from anabranch.base.errors import DecodeError
from anabranch.records.batch import HEADER_SIZE, LENGTH_END, check, parse_header
from anabranch.records.checksum import crc32c
from anabranch.runtime.disk import Disk, File

ASIDE_SUFFIX = ".torn"
"""Bytes that were cut from the end of a log: `<offset at which the log went on>[.n].torn`."""
DAMAGED_SUFFIX = ".damaged"
"""A damaged file that was rebuilt from other files: `<its name>[.n].damaged`."""
_WINDOW_SIZE = 4 << 20
BATCH_SIZE_MAX = 1 << 31
"""Bytes of a batch: its size is a signed 32-bit number."""
MAGIC_POSITION, _CRC_POSITION, _CRC_START = 16, 17, 21
OFFSETS_AHEAD_MAX = 1 << 40
"""How far above the expected offset a batch behind damage may begin; a bound on accidental checksums to compare."""
COMPARED_MAX = 16 << 30
"""Bytes of which checksums are compared, some seconds: records that look like many batches could make it hours."""


class TooManyError(DecodeError):
    """Whether a sound batch lies behind a place would take too long to find out."""


def sound_batch_behind(file: File, position: int, size: int, next_offset: int) -> int | None:
    """Find a sound batch at any byte behind `position` that begins at `next_offset` or later; return its position.

    TooManyError where too much looks like one.
    """
    compared = 0
    for at in _possible(file, position + 1, size):
        header_bytes = file.read(HEADER_SIZE, at)
        base = int.from_bytes(header_bytes[:8], "big")
        if len(header_bytes) < HEADER_SIZE or not next_offset <= base < next_offset + OFFSETS_AHEAD_MAX:
            continue
        try:
            header = parse_header(header_bytes, 0, size - at)
            compared += header.size
            if compared > COMPARED_MAX:
                break
            check(file.read(header.size, at), 0, header)
        except DecodeError:
            continue
        return at
    if compared > COMPARED_MAX:
        raise TooManyError(f"{file.path} has too much behind position {position} that looks like batches")
    return None


def _possible(file: File, position: int, size: int) -> Iterator[int]:
    """The positions from which on the bytes could be a batch: magic 2 and a small codec where these are expected."""
    while position + HEADER_SIZE <= size:
        position = max(position, file.data_from(position) - MAGIC_POSITION)  # A hole of a terabyte is passed over.
        window = file.read(min(_WINDOW_SIZE, size - position), position)
        found = window.find(b"\x02", MAGIC_POSITION)
        while found >= 0:
            at = found - MAGIC_POSITION
            if position + at + HEADER_SIZE <= size and window[at] == window[at + 1] == 0:
                yield position + at
            found = window.find(b"\x02", found + 1)
        if position + len(window) >= size:
            return
        position += max(len(window) - MAGIC_POSITION, 1)


def is_whole_batch(file: File, position: int, size: int) -> bool:
    """Whether a batch at `position` was written whole, and has changed since.

    By the size that it says it has; or by its checksum, which covers neither size nor magic, where that fits the bytes
    up to the size that it says, to one that differs in a bit, or to the file's end.
    """
    data = file.read(HEADER_SIZE, position)
    if len(data) < HEADER_SIZE:
        return False
    left = min(size - position, BATCH_SIZE_MAX)
    length = int.from_bytes(data[8:12], "big")
    if HEADER_SIZE <= length + LENGTH_END <= left and data[MAGIC_POSITION] == 2:
        return True
    lengths = (length, *(length ^ 1 << bit for bit in range(32)))
    sizes = {left, *(said for each in lengths if HEADER_SIZE <= (said := each + LENGTH_END) <= left)}
    crc, at = 0, _CRC_START
    for said in sorted(sizes):
        while at < said:
            window = file.read(min(_WINDOW_SIZE, said - at), position + at)
            if not window:
                return False
            crc = crc32c(window, crc)
            at += len(window)
        if crc == int.from_bytes(data[_CRC_POSITION:_CRC_START], "big"):
            return True
    return False


def aside(disk: Disk, path: Path, suffix: str) -> Path:
    """Choose a name beside `path` that no file has: `path` with `suffix`, and a number if need be."""
    for number in range(1_000_000):
        chosen = path.with_name(f"{path.name}{f'.{number}' if number else ''}{suffix}")
        if not disk.exists(chosen):
            return chosen
    raise AssertionError(f"a million files beside {path}")


def keep_bytes(disk: Disk, file: File, position: int, size: int, path: Path) -> None:
    """Copy the bytes from `position` to `size` into a new file at `path`, durably. Blocks; OSError."""
    if position >= size:
        return
    copy = disk.open(path, create=True)
    try:
        _copy(file, position, size, copy)
        disk.sync_directory(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            disk.unlink(path)  # It is no copy, and the next attempt makes another one.
        raise


def _copy(file: File, position: int, size: int, copy: File) -> None:
    at = position
    while (at := file.data_from(at)) < size:
        data = file.read(min(_WINDOW_SIZE, size - at), at)
        if not data:
            break
        copy.write(data, at - position)
        at += len(data)
    if size - position > copy.size():  # It ends in a hole.
        copy.truncate(size - position)
    copy.sync()


def keep_damaged(disk: Disk, path: Path) -> Path:
    """Rename a damaged file that is about to be written anew; return its new name. Blocks; OSError."""
    away = aside(disk, path, DAMAGED_SUFFIX)
    disk.rename(path, away)
    disk.sync_directory(path.parent)
    return away
