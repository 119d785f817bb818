"""Lent memory comes back when the last reference to it is gone, whatever kind it is, and never earlier."""

from __future__ import annotations

import gc
from collections.abc import Callable
from threading import Thread

import numpy as np
import pyarrow as pa
import pytest

from anabranch.records.arrow import decode as decoding
from anabranch.records.arrow import encode as encoding
from anabranch.records.arrow import slabs
from anabranch.records.arrow.decode import decode
from anabranch.records.arrow.encode import encode_partitioned, encode_records
from anabranch.records.arrow.slabs import Shelf, Slab

SIZE = 100_000


def numbers(slab: Slab) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), SIZE // 8, [None, slab.buffer])


HOLDERS: dict[str, Callable[[Slab], object]] = {
    "slab": lambda slab: slab,
    "buffer": lambda slab: slab.buffer,
    "slice of a buffer": lambda slab: slab.buffer.slice(8, 8),
    "memoryview of a buffer": lambda slab: memoryview(slab.buffer)[:8],
    "array": numbers,
    "slice of an array": lambda slab: numbers(slab).slice(5, 1),
    "array of NumPy": lambda slab: np.frombuffer(slab.buffer, np.int64)[3:4],
    "column of a table": lambda slab: pa.table({"n": numbers(slab)}).slice(3).column("n"),
    "stream": lambda slab: pa.BufferReader(slab.buffer).read_buffer(8),
    "view": lambda slab: slab.data,
    "slice of a view": lambda slab: slab.data[10:20],
    "view cast": lambda slab: slab.data.cast("B").toreadonly(),
    "buffer of a view": lambda slab: pa.py_buffer(slab.data[:16]).slice(8),
    "array of a view": lambda slab: np.frombuffer(slab.data, np.uint8)[1:][1:],
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_memory_is_lent_again_after_its_release_and_not_before(holder: Callable[[Slab], object]) -> None:
    shelf = Shelf()
    slab = shelf.take(SIZE)
    address = slab.address
    held = holder(slab)
    del slab
    gc.collect()
    other = shelf.take(SIZE)
    assert other.address != address
    del held
    assert shelf.take(SIZE - 1).address == address


def test_memory_that_came_back_last_is_lent_first_and_only_for_its_size() -> None:
    shelf = Shelf()
    lent = [shelf.take(size) for size in (SIZE, SIZE, 4 * SIZE, SIZE)]
    first, second, large, _ = (slab.address for slab in lent)
    del lent[2], lent[0], lent[0]
    assert [shelf.take(SIZE).address for _ in range(1)] == [second]
    again = [shelf.take(SIZE), shelf.take(4 * SIZE), shelf.take(SIZE)]
    assert [slab.address for slab in again[:2]] == [second, large]
    assert again[2].address == first


@pytest.mark.parametrize("view_of", [lambda slab: slab.data, lambda slab: memoryview(slab.buffer)])
def test_an_object_that_reads_memory_when_a_cycle_is_collected_finds_it_as_it_was(
    view_of: Callable[[Slab], memoryview],
) -> None:
    shelf = Shelf()
    found = []

    class Reader:
        def __init__(self, view: memoryview) -> None:
            self.view, self.itself = view, self

        def __del__(self) -> None:
            shelf.take(SIZE).data[:4] = b"else"
            found.append(bytes(self.view[:4]))

    slab = shelf.take(SIZE)
    slab.data[:4] = b"mine"
    Reader(view_of(slab))
    del slab
    gc.collect()
    assert found == [b"mine"]


@pytest.mark.parametrize(("size", "count"), [(16 << 20, 8), (70_000, 100), (3 << 20, 40)])
def test_a_shelf_keeps_no_more_than_its_bounds(size: int, count: int) -> None:
    shelf = Shelf()
    lent = [shelf.take(size) for _ in range(count)]
    lent.clear()
    assert 1 < len(shelf._idle) <= slabs.SHELF_COUNT_MAX
    assert sum(memory.size for memory in shelf._idle) <= slabs.LARGE_SHELF_SIZE_MAX


@pytest.mark.parametrize("size", [0, 1, slabs.SLAB_SIZE_MIN - 1, slabs.SLAB_SIZE_MAX + 1])
def test_small_views_and_what_is_larger_than_any_slab_are_not_kept(size: int) -> None:
    shelf = Shelf()
    view, address = shelf.take_view(size)
    assert len(view) == size and pa.py_buffer(view).address == address
    del view
    assert shelf._idle == []


def test_no_memory_is_lent_to_two_threads_at_once() -> None:
    shelf = Shelf()
    handed_over: list[object] = []
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(2_000):
            slab = shelf.take(SIZE if turn % 5 else 3 * SIZE)
            slab.data[:8] = bytes([number]) * 8
            kept = memoryview(slab.buffer)[:8] if turn % 3 else slab.data[:8]
            del slab
            if turn % 7 == 0:
                handed_over.append(kept)  # Another thread releases it.
            if turn % 11 == 0 and handed_over:
                handed_over.pop(0)
            if bytes(kept) != bytes([number]) * 8:
                wrong.append(turn)

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    handed_over.clear()
    assert 0 < len(shelf._idle) <= slabs.SHELF_COUNT_MAX
    assert len({memory.address for memory in shelf._idle}) == len(shelf._idle)


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """The shelf that columns and batches get their memory from."""
    shelf = Shelf()
    for module in (decoding, encoding):
        monkeypatch.setattr(module, "shelf", shelf)
    return shelf


def test_columns_that_are_gone_leave_their_memory_to_the_next_ones(shelf: Shelf) -> None:
    data = bytes(encode_records([(b"key", b"value", 0, ())] * 5_000))
    shelf._idle.clear()
    records = decode(data).records
    address = records.column("key").buffers()[1].address
    kept = records.column("key").slice(4_990)
    del records
    other = decode(data.replace(b"key", b"yek"), check_crc=False).records
    assert other.column("key").buffers()[1].address != address
    assert kept.to_pylist() == [b"key"] * 10
    del kept
    assert decode(data).records.column("key").buffers()[1].address == address


def test_batches_that_are_gone_leave_their_memory_to_the_next_ones(shelf: Shelf) -> None:
    values = pa.array([b"v" * 100] * 1000)
    *gone, kept = [batch.data for batch in encode_partitioned(None, values, 0, batch_size_max=16 << 10)]
    assert len(gone) > 3
    before, address = bytes(kept), pa.py_buffer(gone[0]).address
    gone.clear()
    (other,) = encode_partitioned(None, values, 1)
    assert pa.py_buffer(other.data).address != address
    assert bytes(kept) == before
    del kept
    (again,) = encode_partitioned(None, values, 2)
    assert pa.py_buffer(again.data).address == address
