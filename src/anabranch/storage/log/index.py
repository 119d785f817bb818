"""The sparse index of a segment: where some of its batches begin, and the largest timestamp before each.

Two files with an entry each per indexed batch: `.index` (offset - base offset, position; int32 both) and `.timeindex`
(largest timestamp of all batches before it, int64; the last offset of the first batch that has it - base offset,
int32; -1 and 0 where there is none). The newest entries are kept in memory until there is a page of them, the older
ones are searched in the files, so that an index costs the same memory whatever the size of its segment.

An index is a shortcut, not a source. It is synced when its segment is finished, and believed at the next start as
far as the recovery point has passed it; a reader that follows an entry checks the batch, and has a wrong index
rebuilt. A timestamp is compared with the batch that it is of before anything is decided by it.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from array import array
from bisect import bisect_right
from pathlib import Path

from anabranch.runtime.disk import Disk, File

INDEX_SUFFIX = ".index"
TIME_INDEX_SUFFIX = ".timeindex"
PAGE_ENTRIES = 512
PAGES_MAX = 4
_PLACE, _TIME = struct.Struct(">ii"), struct.Struct(">qi")
NO_TIMESTAMP = -1


class _Entries:
    """A growing sequence of pairs of integers; the older part of it in a file."""

    __slots__ = ("_disk", "_layout", "_newest", "_pages", "_stored", "path")

    def __init__(self, disk: Disk, path: Path, layout: struct.Struct) -> None:
        self.path = path
        self._disk = disk
        self._layout = layout
        self._stored = 0
        self._newest: list[tuple[int, int]] = []
        self._pages: dict[int, tuple[array[int], array[int]]] = {}

    def __len__(self) -> int:
        return self._stored + len(self._newest)

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index >= self._stored:
            return self._newest[index - self._stored]
        page = self._page(index // PAGE_ENTRIES)
        return page[0][index % PAGE_ENTRIES], page[1][index % PAGE_ENTRIES]

    def _page(self, number: int) -> tuple[array[int], array[int]]:
        """Read a page of the file: the two columns of its entries. The last few are kept."""
        first = number * PAGE_ENTRIES
        count = min(PAGE_ENTRIES, self._stored - first)
        page = self._pages.get(number)
        if page is None or len(page[0]) != count:
            data = self.open().read(count * self._layout.size, first * self._layout.size)
            data += bytes(count * self._layout.size - len(data))
            page = self._pages[number] = self._columns(data)
            if len(self._pages) > PAGES_MAX:
                del self._pages[next(iter(self._pages))]
        return page

    def open(self) -> File:
        """Open the file; nobody keeps it open, for a page of it is read or written once in megabytes of log."""
        return self._disk.open(self.path, create=True)

    def move(self, path: Path) -> None:
        """Give the file another name."""
        if self._disk.exists(self.path):
            self._disk.rename(self.path, path)
        self.path = path

    def append(self, entry: tuple[int, int]) -> None:
        newest = self._newest
        newest.append(entry)
        if len(newest) % PAGE_ENTRIES == 0:
            with contextlib.suppress(OSError):  # They stay in memory, and are tried again with the next page.
                self.store()

    def store(self) -> None:
        if self._newest:
            data = b"".join(self._layout.pack(*entry) for entry in self._newest)
            self.open().write(data, self._stored * self._layout.size)
            self._stored += len(self._newest)
            self._newest = []

    def last_not_above(self, value: int, item: int) -> int:
        """The number of the last entry whose `item` is not above `value`; -1 without one."""
        if self._newest and self._newest[0][item] <= value:
            return self._stored + bisect_right(self._newest, value, key=lambda entry: entry[item]) - 1
        for number, page in self._pages.items():
            if page[item][0] <= value < page[item][-1]:
                return number * PAGE_ENTRIES + bisect_right(page[item], value) - 1
        low, high = 0, (self._stored + PAGE_ENTRIES - 1) // PAGE_ENTRIES
        file = self.open() if self._stored else None
        while low < high:
            middle = (low + high) // 2
            assert file is not None
            if self._first_of(file, middle)[item] <= value:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return -1
        return (low - 1) * PAGE_ENTRIES + bisect_right(self._page(low - 1)[item], value) - 1

    def _columns(self, data: bytes) -> tuple[array[int], array[int]]:
        if self._layout is not _PLACE:
            first, second = zip(*self._layout.iter_unpack(data), strict=True)
            return array("q", first), array("q", second)
        numbers = array("i", data)
        if sys.byteorder == "little":
            numbers.byteswap()
        return numbers[::2], numbers[1::2]

    def _first_of(self, file: File, page: int) -> tuple[int, int]:
        size = self._layout.size
        data = file.read(size, page * PAGE_ENTRIES * size)
        first, second = self._layout.unpack(data) if len(data) == size else (0, 0)
        return first, second

    def load(self) -> None:
        self._newest = []
        self._pages.clear()
        self._stored = self.open().size() // self._layout.size if self._disk.exists(self.path) else 0

    def cut(self, count: int) -> None:
        if count >= self._stored:
            del self._newest[count - self._stored :]
        else:
            self._newest = []
            self._pages.clear()
            self._stored = count
            with contextlib.suppress(OSError):  # What is left is overwritten, or found wrong at the next start.
                self.open().truncate(count * self._layout.size)

    def release(self) -> None:
        self._pages.clear()


class SparseIndex:
    """The index of the segment `<base offset>.log` in `directory`."""

    __slots__ = ("_base", "_places", "_times", "unsynced")

    def __init__(self, disk: Disk, directory: Path, base_offset: int, suffix: str = "") -> None:
        self.unsynced = False
        """Whether it has unsynced entries."""
        self._base = base_offset
        self._places = _Entries(disk, directory / f"{base_offset:020d}{INDEX_SUFFIX}{suffix}", _PLACE)
        self._times = _Entries(disk, directory / f"{base_offset:020d}{TIME_INDEX_SUFFIX}{suffix}", _TIME)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def paths(self) -> tuple[Path, Path]:
        """The files."""
        return self._places.path, self._times.path

    def append(self, offset: int, position: int, timestamp: int, timestamp_offset: int) -> None:
        """Add a batch: its first offset and position, and the largest timestamp before it with its offset."""
        self.unsynced = True
        self._places.append((offset - self._base, position))
        behind = timestamp_offset - self._base
        self._times.append((timestamp, behind if behind > 0 else 0))

    def floor(self, offset: int) -> tuple[int, int]:
        """The offset and position of the last indexed batch that begins at or before `offset`."""
        found = self._places.last_not_above(offset - self._base, 0)
        return self._place(found)

    def floor_of_position(self, position: int) -> tuple[int, int]:
        """The offset and position of the last indexed batch whose position is not above `position`."""
        return self._place(self._places.last_not_above(position, 1))

    def floor_of_timestamp(self, timestamp: int) -> tuple[int, int, int, int] | None:
        """The last entry, as given to `append`, before whose batch none reaches `timestamp`; None without one."""
        found = self._times.last_not_above(timestamp - 1, 0)
        return None if found < 0 else self._entry(found)

    def last(self) -> tuple[int, int, int, int]:
        """The last entry, as it was given to `append`; there must be one."""
        return self._entry(len(self) - 1)

    def _entry(self, number: int) -> tuple[int, int, int, int]:
        (offset, position), (timestamp, timestamp_offset) = self._places[number], self._times[number]
        return self._base + offset, position, timestamp, self._base + timestamp_offset

    def load(self) -> bool:
        """Load the files; False if they are empty or do not fit together."""
        self._places.load()
        self._times.load()
        return 0 < len(self._places) == len(self._times)

    def cut_from_position(self, position: int) -> None:
        """Forget the batches that begin at or behind `position`."""
        count = self._places.last_not_above(position - 1, 1) + 1
        if count < len(self):
            self.unsynced = True
            self._places.cut(count)
            self._times.cut(count)

    def clear(self) -> None:
        """Forget everything, to be built anew."""
        self.unsynced = True
        self._places.cut(0)
        self._times.cut(0)

    def store(self) -> tuple[File, ...]:
        """Write the entries missing in the files; return the files, for a sync."""
        self._places.store()
        self._times.store()
        return self._places.open(), self._times.open()

    def move(self, paths: tuple[Path, Path]) -> None:
        """Give the files other names. OSError."""
        self._places.move(paths[0])
        self._times.move(paths[1])

    def release(self) -> None:
        """Forget the pages of the files that were read."""
        self._places.release()
        self._times.release()

    def _place(self, number: int) -> tuple[int, int]:
        if number < 0:
            return self._base, 0
        offset, position = self._places[number]
        return self._base + offset, position
