"""Key ranges of Spark's tasks over real record batches: every record in exactly one piece, and even pieces."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.range_reader import FetchedRange, decode_range
from anabranch.client.consumer.tables import table_of
from anabranch.machines.clients.fetching import Deliverable, Fetched
from anabranch.machines.keyspace import cuts, keyless_spread
from anabranch.machines.lineage import Lineage
from anabranch.machines.placement import place
from anabranch.records.arrow.encode import encode_records
from anabranch.records.batch import stamp
from anabranch.records.hashing import placement_hash
from anabranch.records.shares import KeyShare
from anabranch.spark.plan import Read, Splitting, Task, TopicSnapshot, plan_tasks
from anabranch.spark.reader import _shares

INITIAL, PARTITION = 3, 4
COUNTS = (8, 5, 40)
EACH = 4_000
"""Records of the partition in each layout."""
LINEAGE = Lineage.of_cuts(INITIAL, COUNTS, {PARTITION: [(0, EACH), (1, 2 * EACH)]})


def own_keys() -> Iterator[bytes | None]:
    """Keys of the partition, layout after layout."""
    for count in COUNTS:
        mine = (
            key for key in map(b"%d".__mod__, range(10**9)) if place(placement_hash(key), INITIAL, count) == PARTITION
        )
        for _ in range(EACH):
            yield next(mine)


def foreign_keys() -> Iterator[bytes | None]:
    """Keys that another partitioner placed without regard to linear hashing."""
    yield from (b"foreign-%d" % number for number in range(3 * EACH))


def no_keys() -> Iterator[bytes | None]:
    yield from [None] * (3 * EACH)


def log_of(keys: Iterator[bytes | None]) -> memoryview:
    """A log of batches of 500 records."""
    rows, data = list(keys), bytearray()
    for base in range(0, len(rows), 500):
        batch = encode_records([(key, b"v", 0, ()) for key in rows[base : base + 500]])
        stamp(batch, 0, base, 0)
        data += batch
    return memoryview(bytes(data))


def tasks_of(start: int, end: int, pieces: int) -> list[Task]:
    look = TopicSnapshot("t", "id", LINEAGE, {PARTITION: 0}, {PARTITION: 3 * EACH})
    return plan_tasks({"t": look}, {"t": {PARTITION: start}}, {"t": {PARTITION: end}}, Splitting(min_partitions=pieces))


def offsets_in(data: memoryview, start: int, end: int, share: KeyShare | None) -> list[int]:
    tp = TopicPartition("t", PARTITION)
    batches = decode_range(tp, data, start, end, columns=("offset",), share=share)
    return [offset for batch in batches for offset in batch.column("offset").to_pylist()]


def offsets_of(task: Task, data: memoryview) -> list[int]:
    found: list[int] = []
    for read in task.reads:
        for start, end, share in _shares(task.key_range, FetchedRange(read, read.start, data)):
            found += offsets_in(data, start, end, share)
    return found


@pytest.mark.parametrize("keys", [own_keys, foreign_keys, no_keys])
@pytest.mark.parametrize(("start", "end"), [(0, 3 * EACH), (0, EACH), (EACH + 123, 3 * EACH - 7), (2 * EACH, 3 * EACH)])
@pytest.mark.parametrize("pieces", [2, 7])
def test_pieces_cover_every_record_once_and_are_even(keys, start: int, end: int, pieces: int) -> None:  # type: ignore[no-untyped-def]
    data = log_of(keys())
    tasks = tasks_of(start, end, pieces)
    read = [offsets_of(task, data) for task in tasks]
    assert len(tasks) == pieces
    assert Counter(offset for part in read for offset in part) == Counter(range(start, end))
    if keys is not foreign_keys:
        sizes = [len(part) for part in read]
        assert min(sizes) > 0.8 * (end - start) / pieces
        assert max(sizes) < 1.2 * (end - start) / pieces


@pytest.mark.parametrize("keys", [own_keys, foreign_keys, no_keys])
def test_tables_of_a_consumer_by_key_range_cover_every_record_once(keys) -> None:  # type: ignore[no-untyped-def]
    part = Deliverable("t", PARTITION, Fetched(log_of(keys()), 3 * EACH), 100, 3 * EACH)
    tables = [
        table_of([part], ("offset", "sequence"), share, {"t": LINEAGE}, check_crcs=True)
        for share in cuts(LINEAGE.held(PARTITION, 0), 3)
    ]
    found = sorted((row["offset"], row["sequence"]) for table in tables for row in table.to_pylist())
    assert found == [(offset, LINEAGE.sequence(PARTITION, offset)) for offset in range(100, 3 * EACH)]


def test_what_a_fetch_holds_before_its_start_is_not_read_again() -> None:
    data = log_of(own_keys())
    for task in tasks_of(0, 3 * EACH, 3):
        (read,) = task.reads
        whole = offsets_of(task, data)
        for begin in (250, EACH + 250):
            parts = list(_shares(task.key_range, FetchedRange(read, begin, data)))
            assert parts[0][0] == begin
            found = [offset for start, end, share in parts for offset in offsets_in(data, start, end, share)]
            assert found == [offset for offset in whole if offset >= begin]


def test_a_record_without_a_key_is_in_the_share_of_its_place_in_its_own_layout() -> None:
    part = Deliverable("t", PARTITION, Fetched(log_of(no_keys()), 3 * EACH), 0, 3 * EACH)
    for share in cuts(LINEAGE.held(PARTITION, 2), 3):
        table = table_of([part], ("offset",), share, {"t": LINEAGE}, check_crcs=True)
        held = [LINEAGE.held(PARTITION, LINEAGE.layout_at(PARTITION, offset)) for offset in range(3 * EACH)]
        places = [keyless_spread(offset, interval) for offset, interval in enumerate(held)]
        expected = [offset for offset, at in enumerate(places) if share.start <= at <= share.end]
        assert table.column("offset").to_pylist() == expected


def test_a_fetch_of_a_few_layouts_is_not_searched_for_the_others() -> None:
    data = log_of(own_keys())
    first_half = data[: len(data) // 2]
    (task, *_) = tasks_of(0, 3 * EACH, 2)
    fetched: FetchedRange[Read] = FetchedRange(task.reads[0], 0, first_half)
    assert [(start, end) for start, end, _ in _shares(task.key_range, fetched)] == [(0, EACH), (EACH, 2 * EACH)]
