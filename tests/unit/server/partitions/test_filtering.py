"""Passes over a real log with long records: what is kept for others lies in the log's file, and is not copied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from anabranch.machines.keyspace import SPACE, SPACE_END, Interval
from anabranch.machines.partition.sharing import Asked, Stretch
from anabranch.records.batch import parse_header
from anabranch.records.filtering import Cell, Selection, Spread, scatter
from anabranch.runtime import native
from anabranch.runtime.gathered import Gathered
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions.filtering import BLOCK_SIZE, FilteredSlice, Filters
from anabranch.server.partitions.partition import Partition
from tests.fuzz.batches import machine_code
from tests.properties import record_model as model
from tests.support.replicas import NOW_MS, LocalReplicas, SetClock

LOW, HIGH = Asked((Interval(0, SPACE_END // 2),)), Asked((Interval(SPACE_END // 2 + 1, SPACE_END),))
VALUE_SIZE, RECORDS = 1_000, 16

pytestmark = pytest.mark.skipif(not native.variant().suffix, reason="all is copied where the processor has no CRC-32C")


class World:
    """A partition that two readers share."""

    def __init__(self, path: Path) -> None:
        self.local = LocalReplicas(path, reserve_message_value_range_fetch="true")
        self.local.resize(1)
        self.made = b""
        """The batches of the log."""
        compiled = machine_code().scatter
        stretch = Stretch(1, SPACE, None)
        limits = {"work_size_max": 1 << 26, "kept_size_max": 1 << 26}
        self.filters = Filters(lambda: compiled, lambda partition, offset: stretch, SetClock(), Metrics(), **limits)

    @property
    def partition(self) -> Partition:
        return self.local[0]

    def append(self, size: int, seed: int) -> None:
        """Append batches of records of random keys and values until they have a size."""
        chance = Random(seed)
        while size > 0:
            first = self.partition.log.end
            rows = tuple(
                model.Row(at, NOW_MS, chance.randbytes(8), chance.randbytes(VALUE_SIZE))
                for at in range(first, first + RECORDS)
            )
            data = bytearray(model.encode(model.Batch(first, rows, last_offset=first + RECORDS - 1)))
            self.partition.append(data, parse_header(data), NOW_MS)
            self.made += bytes(data)
            size -= len(data)

    def cut(self, records: int) -> None:
        """Cut the log, as is done after a failed sync when the file's end cannot be read."""
        batch_size = len(self.made) * RECORDS // self.partition.log.end
        self.partition.log.truncate(records)
        self.partition.log_cut(records)
        self.made = self.made[: records // RECORDS * batch_size]

    def read(self, asked: Asked, offset: int, size_max: int) -> FilteredSlice:
        """Read; without any room it is noted only that a reader is there."""
        end = self.partition.log.end if size_max else offset
        return self.local.runner.run(self.filters.read(self.partition, asked, offset, end, size_max))

    @property
    def passes(self) -> float:
        return self.filters._passes.value

    @property
    def kept_sizes(self) -> list[int]:
        return [
            len(piece.data) for piece in self.filters.kept._of[self.filters._book_of(self.partition)[0], HIGH].values()
        ]

    def expected(self, asked: Asked, end: int) -> bytes:
        """What a reader is given of all below an offset."""
        cells = Selection(tuple(Cell(start, last, 0) for start, last in asked.ranges), 1)
        batch_size = len(self.made) * RECORDS // self.partition.log.end
        whole = memoryview(self.made)[: end // RECORDS * batch_size]
        (found,) = scatter(whole, cells, Spread(1, SPACE), record_size_max=1 << 22, work_size_max=1 << 22).data
        return bytes(found)  # type: ignore[arg-type]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    found.filters.close()
    found.local.close()


def test_what_is_kept_for_another_reader_is_given_as_it_lies_and_whole(world: World) -> None:
    """The first pass may guess wrong, from what others in this process had of the same ranges, and copy."""
    world.append(12 * BLOCK_SIZE, seed=1)
    at, got, kept, lie = 0, b"", 0, 0
    world.read(HIGH, 0, 0)
    while at < world.partition.log.end:
        world.read(LOW, at, BLOCK_SIZE // 4)
        passes = world.passes
        found = world.read(HIGH, at, BLOCK_SIZE // 2)
        kept += world.passes == passes
        lie += isinstance(found.parts[0], Gathered)
        got, at = got + bytes(found.view()), found.filtered_to
    assert got == world.expected(HIGH, at)
    assert kept > 1 and lie > 1


def test_a_kept_piece_that_an_answer_has_no_room_for_is_not_cut(world: World) -> None:
    world.append(4 * BLOCK_SIZE, seed=2)
    world.read(HIGH, 0, 0)
    place = 0
    while place < 3 * BLOCK_SIZE // VALUE_SIZE:
        place = world.read(LOW, place, BLOCK_SIZE // 4).filtered_to
    sizes, passes = world.kept_sizes, world.passes
    assert len(sizes) > 1 and sizes[0] < (sum(sizes[:2]) - 1) * 7 // 8
    first = world.read(HIGH, 0, sum(sizes[:2]) - 1)
    assert [len(part) for part in first.parts] == sizes[:1], "there is room for more, and not for all of the second one"
    second = world.read(HIGH, first.filtered_to, sizes[1])
    assert [len(part) for part in second.parts] == sizes[1:2]
    assert isinstance(second.parts[0], Gathered), "it is kept for the next answer as it is"
    assert world.passes == passes
    assert bytes(first.view()) + bytes(second.view()) == world.expected(HIGH, second.filtered_to)


def test_what_was_kept_is_not_looked_at_when_the_log_was_cut_meanwhile(world: World) -> None:
    world.append(2 * BLOCK_SIZE, seed=3)
    world.read(HIGH, 0, 0)
    world.read(LOW, 0, BLOCK_SIZE // 4)
    assert len(world.kept_sizes) == 1
    world.cut(RECORDS)
    world.append(2 * BLOCK_SIZE, seed=4)
    found = world.read(HIGH, 0, BLOCK_SIZE // 2)
    assert bytes(found.view()) == world.expected(HIGH, found.filtered_to)


def test_what_is_given_back_is_kept_for_the_next_answer(world: World) -> None:
    world.append(BLOCK_SIZE, seed=5)
    found = world.read(LOW, 0, BLOCK_SIZE)
    world.filters.give_back(world.partition, LOW, 0, found)
    passes = world.passes
    again = world.read(LOW, 0, BLOCK_SIZE)
    assert world.passes == passes
    assert bytes(again.view()) == world.expected(LOW, again.filtered_to)


def test_what_is_given_back_after_the_log_was_cut_is_readable_and_not_given_again(world: World) -> None:
    world.append(BLOCK_SIZE, seed=6)
    found = world.read(LOW, 0, BLOCK_SIZE)
    assert isinstance(found.parts[0], Gathered), "it lies in the file"
    lost = world.expected(LOW, found.filtered_to)
    world.cut(RECORDS)
    assert bytes(found.view()) == lost, "its pages are behind the end of the file"
    world.append(BLOCK_SIZE, seed=7)
    world.filters.give_back(world.partition, LOW, 0, found)
    again = world.read(LOW, 0, BLOCK_SIZE)
    assert bytes(again.view()) == world.expected(LOW, again.filtered_to)
    assert bytes(found.view()) == lost
