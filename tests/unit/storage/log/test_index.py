"""The sparse index, entry by entry against a list."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from anabranch.runtime.disk import File
from anabranch.storage.log.index import PAGE_ENTRIES, SparseIndex
from tests.support.disks import FaultyDisk

HERE = Path("/data/t-0")


def filled(disk: FaultyDisk, count: int) -> SparseIndex:
    """Batches of 10 offsets and 100 bytes from offset 1000 on; every second one has a new largest timestamp."""
    index = SparseIndex(disk, HERE, 1_000)
    for number in range(count):
        latest = number // 2 * 2
        index.append(1_000 + number * 10, number * 100, latest, 1_000 + latest * 10)
    return index


@pytest.mark.parametrize("count", [1, 5, PAGE_ENTRIES - 1, PAGE_ENTRIES, 3 * PAGE_ENTRIES + 7, 8 * PAGE_ENTRIES])
@pytest.mark.parametrize("stored", [False, True])
def test_every_lookup_answers_as_a_list_would(count: int, stored: bool) -> None:
    disk = FaultyDisk(0)
    index = filled(disk, count)
    if stored:
        index.store()
        index = SparseIndex(disk, HERE, 1_000)
        assert index.load()
    assert len(index) == count
    for number in {0, 1, count // 2, count - 1, min(count - 1, PAGE_ENTRIES), max(0, count - PAGE_ENTRIES)}:
        if number < count:
            assert index.floor(1_000 + number * 10 + 9) == (1_000 + number * 10, number * 100)
            assert index.floor_of_position(number * 100 + 99)[1] == number * 100
            last = number // 2 * 2 + 1
            entry = index.floor_of_timestamp(number // 2 * 2 + 1)
            assert entry is not None and entry[1] == min(last, count - 1) * 100
    assert index.floor(999) == (1_000, 0)
    assert index.last()[:2] == (1_000 + (count - 1) * 10, (count - 1) * 100)


def test_cutting_forgets_what_is_behind_in_memory_and_in_the_files() -> None:
    disk = FaultyDisk(0)
    index = filled(disk, 2 * PAGE_ENTRIES + 5)
    for count in (2 * PAGE_ENTRIES + 2, PAGE_ENTRIES + 1, 3):
        index.cut_from_position((count - 1) * 100 + 1)
        assert len(index) == count
        assert index.floor(10**6)[1] == (count - 1) * 100
        index.store()
        again = SparseIndex(disk, HERE, 1_000)
        assert again.load()
        assert len(again) == count
    index.clear()
    assert len(index) == 0


def test_files_that_do_not_fit_together_are_not_taken() -> None:
    disk = FaultyDisk(0)
    index = filled(disk, 10)
    index.store()
    disk.open(index.paths[1]).truncate(20)
    assert not SparseIndex(disk, HERE, 1_000).load()
    assert not SparseIndex(disk, HERE, 7).load()


def test_a_full_disk_costs_memory_and_nothing_else() -> None:
    disk = FaultyDisk(0, capacity=0)
    index = filled(disk, 3 * PAGE_ENTRIES)
    assert index.floor(1_000 + 700 * 10)[1] == 70_000
    disk.capacity = None
    index.store()
    again = SparseIndex(disk, HERE, 1_000)
    assert again.load()
    assert len(again) == 3 * PAGE_ENTRIES


def test_where_a_file_cannot_be_cut_the_two_still_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One was cut, and the other one never: every later entry was two halves of different ones."""
    disk = FaultyDisk(0)
    index = filled(disk, 2 * PAGE_ENTRIES)
    opened = disk.open

    def refuse(path: Path, *, create: bool = False) -> File:
        if path.name.endswith(".timeindex"):
            raise OSError(errno.EIO, "Input/output error")
        return opened(path, create=create)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "open", refuse)
        index.cut_from_position(301)
    index.append(1_040, 400, 7, 1_030)
    assert index.last() == (1_040, 400, 7, 1_030)
    entry = index.floor_of_timestamp(8)
    assert entry == (1_040, 400, 7, 1_030)
