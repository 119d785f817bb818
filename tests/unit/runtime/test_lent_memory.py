"""Memory that is lent: it comes back with its last view, is lent again, and there is a bound to what is kept."""

from __future__ import annotations

import mmap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from anabranch.runtime import lent_memory
from anabranch.runtime.lent_memory import SHELF_SIZE_MAX, SIZE_MAX, SIZE_MIN, Shelf, size_lent

SIZE = 400_000


def test_memory_comes_back_with_its_last_view_and_is_lent_again() -> None:
    shelf = Shelf()
    lent = shelf.take(SIZE)
    assert (lent.format, lent.nbytes, lent.readonly) == ("B", SIZE, False)
    lent[:5] = b"abcde"
    part = lent[1:4]
    del lent
    assert shelf.size == 0
    assert bytes(part) == b"bcd"
    del part
    assert shelf.size == size_lent(SIZE)
    again, other = shelf.take(SIZE - 100), shelf.take(SIZE)
    assert bytes(again[:5]) == b"abcde"
    assert bytes(other[:5]) == bytes(5)
    assert shelf.size == 0


def test_little_and_very_much_is_not_lent() -> None:
    shelf = Shelf()
    for size in (0, 1, SIZE_MIN - 1, SIZE_MAX + 1):
        assert shelf.take(size).nbytes == size
    assert shelf.size == 0


def test_copies_are_lent_where_they_are_large() -> None:
    shelf = Shelf()
    for size in (0, SIZE_MIN - 1, SIZE_MIN, SIZE):
        data = bytes(range(256)) * (size // 256 + 1)
        copied = shelf.copy(memoryview(data)[:size])
        assert copied == data[:size]
        del copied
        assert (shelf.size > 0) == (size >= SIZE_MIN)


def test_a_shelf_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_memory, "SHELF_SIZE_MAX", 3 * SIZE)
    shelf = Shelf()
    lent = [shelf.take(SIZE) for _ in range(20)]
    lent.clear()
    assert 0 < shelf.size < SHELF_SIZE_MAX
    assert shelf.size <= 3 * SIZE + size_lent(SIZE)


def test_what_comes_back_to_a_full_shelf_gives_its_pages_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_memory, "SHELF_SIZE_MAX", 0)
    shelf = Shelf()
    kept = []
    before, addresses = _mapped()
    for _ in range(20):
        lent = [shelf.take(SIZE_MAX // 8) for _ in range(8)]  # A stretch.
        for number, each in enumerate(lent):
            each[:] = bytes([number]) * len(each)
        kept.append(lent[3])
        del lent, each
    held, _ = _mapped()
    assert held - before < 2 * 20 * SIZE_MAX // 8, "what is lent holds the pages of its neighbours"
    assert all(each == bytes([3]) * len(each) for each in kept)
    kept.clear()
    _, left = _mapped()
    assert left - addresses < 2 * SIZE_MAX


def _mapped() -> tuple[int, int]:
    """Bytes of this process that have pages, and of its addresses."""
    addresses, resident, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return resident * mmap.PAGESIZE, addresses * mmap.PAGESIZE


def test_a_shelf_that_is_full_of_other_sizes_takes_what_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lent_memory, "SHELF_SIZE_MAX", 4 * SIZE)
    shelf = Shelf()
    others = [shelf.take(2 * SIZE) for _ in range(5)]
    others.clear()
    lent = shelf.take(SIZE)
    lent[:3] = b"abc"
    del lent
    assert bytes(shelf.take(SIZE)[:3]) == b"abc"
    assert shelf.size <= 4 * SIZE + size_lent(2 * SIZE)


def test_pieces_do_not_overlap() -> None:
    shelf = Shelf()
    for size, count in ((SIZE_MIN, 100), (SIZE, 30), (SIZE_MAX, 2)):
        lent = [shelf.take(size) for _ in range(count)]
        for number, each in enumerate(lent):
            each[:] = bytes([number]) * size
        assert all(each == bytes([number]) * size for number, each in enumerate(lent))


def test_at_most_a_quarter_of_what_is_lent_is_not_used() -> None:
    for size in range(SIZE_MIN, SIZE_MAX, 7919):
        assert size <= size_lent(size) <= max(1.25 * size, size + 4096)


def test_threads_that_lend_and_give_back_never_share_memory() -> None:
    shelf = Shelf()

    def use(mark: int) -> None:
        for _ in range(300):
            lent = shelf.take(SIZE_MIN)
            lent[:] = bytes([mark]) * SIZE_MIN
            assert bytes(lent) == bytes([mark]) * SIZE_MIN

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
