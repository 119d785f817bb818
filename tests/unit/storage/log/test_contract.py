"""The contract of a partition log, run against every implementation; what is not near is waited for (`fetched`)."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from anabranch.base.errors import DecodeError
from anabranch.records.batch import HEADER_SIZE, build, end_transaction_marker, headers
from anabranch.records.key_values import encode_pairs
from anabranch.records.rows import iterate
from anabranch.runtime.disk import Disk
from anabranch.runtime.syncs import Syncs
from anabranch.storage.interface import OffsetOutOfRangeError, PartitionLog, fetched
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.group_commit import GroupCommit
from anabranch.storage.log.log import LocalLog
from anabranch.storage.next_record import JUDGED_AT_A_TIME
from tests.support.batches import make_batch
from tests.support.cold_log import ColdLog

FSYNC = LogConfig(segment_bytes=400, durability=Durability.FSYNC)
SYSTEM = LogConfig(segment_bytes=400, durability=Durability.OS)


class Observer:
    """Notes what a log tells."""

    def __init__(self) -> None:
        self.cut: list[int] = []
        self.deleted: list[int] = []
        self.moved = 0
        self.refusing = False

    def log_cut(self, end: int) -> None:
        self.cut.append(end)

    def before_delete(self, start: int) -> None:
        if self.refusing:
            raise OSError(errno.EIO, "not now")
        self.deleted.append(start)

    def high_watermark_moved(self) -> None:
        self.moved += 1


class World:
    """A log that may be closed and opened again."""

    def __init__(self, open_log: Callable[..., PartitionLog], path: Path, config: LogConfig) -> None:
        self.commits = GroupCommit(Syncs(native=False))
        self.open_log = partial(open_log, path / "t-0", config, disk=Disk(), commits=self.commits)
        self.log = self.open_log()
        self.observer = Observer()
        self.log.observe(self.observer)

    def append(self, batches: int = 1, *, records: int = 2, timestamp: int = 1_000, epoch: int = 0) -> None:
        for _ in range(batches):
            self.log.append(make_batch(records, timestamp=timestamp), epoch, 0)

    async def reopen(self) -> None:
        await self.commits.drain()
        self.log.close()
        self.log = self.open_log()
        self.log.observe(self.observer)

    async def read(self, offset: int, size_max: int = 1 << 20, *, end: int | None = None) -> list[int]:
        """The base offsets of what is found."""
        found = await fetched(self.log.read(offset, size_max, end=end))
        return [] if found is None else [header.base_offset for _, header in headers(found.view())]


Play = Callable[[Callable[[World], Awaitable[None]]], None]


@pytest.fixture(params=[LocalLog.open, ColdLog.open], ids=["local", "cold"])
def open_log(request: pytest.FixtureRequest) -> Callable[..., PartitionLog]:
    found: Callable[..., PartitionLog] = request.param
    return found


@pytest.fixture(params=[FSYNC, SYSTEM], ids=["fsync", "os"])
def play(request: pytest.FixtureRequest, open_log: Callable[..., PartitionLog], tmp_path: Path) -> Play:
    """Run a story on a new log, under either promise of durability."""

    async def run(story: Callable[[World], Awaitable[None]]) -> None:
        world = World(open_log, tmp_path, request.param)
        try:
            await story(world)
        finally:
            await world.commits.drain()
            world.commits.close()

    return lambda story: asyncio.run(run(story))


def test_offsets_are_given_at_once_and_go_on_after_a_restart(play: Play) -> None:
    async def story(world: World) -> None:
        assert world.log.append(make_batch(3), 0, 0) == (0, 2)
        assert world.log.append(make_batch(3) + make_batch(1), 0, 0) == (3, 6)
        assert (world.log.log_start, world.log.end) == (0, 7)
        await world.reopen()
        assert world.log.append(make_batch(1), 0, 0) == (7, 7)

    play(story)


def test_what_was_appended_is_durable_when_a_commit_is_done_and_may_then_be_read(play: Play) -> None:
    async def story(world: World) -> None:
        world.append(2)
        await world.log.commit()
        assert world.log.flushed == world.log.high_watermark == world.log.end == 4
        assert world.observer.moved
        assert await world.read(0) == [0, 2]
        told: list[OSError | None] = []
        world.append(1)
        world.log.commit_then(told.append)
        assert not told
        await world.log.commit()
        assert told == [None]

    play(story)


def test_without_a_commit_readers_see_what_the_durability_promises(play: Play) -> None:
    async def story(world: World) -> None:
        world.append(2)
        promised = 4 if world.log.high_watermark == world.log.end else 0
        assert world.log.high_watermark == promised
        assert await world.read(0) == [0, 2][:promised]
        assert await world.read(0, end=world.log.end) == [0, 2]
        world.log.flush()
        assert world.log.flushed == 4

    play(story)


def test_a_failed_sync_is_told_to_all_who_wait_and_the_log_goes_on_when_it_is_resumed(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EIO, "the disk refuses")

    async def story(world: World) -> None:
        world.append(1)
        await world.log.commit()
        told: list[OSError | None] = []
        with monkeypatch.context() as patch:
            patch.setattr("os.fdatasync", refuse)
            world.append(1)
            world.log.commit_then(told.append)
            with pytest.raises(OSError, match="refuses"):
                await world.log.commit()
            assert [type(error) for error in told] == [OSError]
            with pytest.raises(OSError, match="refuses"):
                world.log.resume(1)
        world.log.resume(5_000)
        if world.observer.cut:
            assert world.observer.cut == [world.log.end] == [2]
        assert world.log.high_watermark <= world.log.end
        end = world.log.end
        assert world.log.append(make_batch(1), 0, 5_000).base_offset == end
        await world.log.commit()
        assert world.log.flushed == end + 1

    play(story)


def test_reads_give_whole_batches_below_the_limit_and_at_least_one(play: Play) -> None:
    async def story(world: World) -> None:
        world.append(20)
        world.log.flush()
        size = len(make_batch(2))
        assert await world.read(0, 0) == [0]
        assert await world.read(1, 2 * size) in ([0], [0, 2])  # Not more; how much less is the log's choice.
        assert (await world.read(11, 1 << 20, end=14))[0] == 10
        assert max(await world.read(10, 1 << 20, end=14)) == 12
        assert await world.read(14, end=14) == []
        assert await world.read(40) == []
        seen, offset = list[int](), 0
        while found := await world.read(offset, 3 * size):
            seen += found
            offset = found[-1] + 2
        assert seen == list(range(0, 40, 2))
        for outside in (-1, 41):
            with pytest.raises(OffsetOutOfRangeError):
                await world.read(outside)

    play(story)


def test_all_slices_together_are_the_log(play: Play) -> None:
    async def story(world: World) -> None:
        assert sum(len(piece) for piece in await fetched(world.log.slices())) == 0
        world.append(20)
        pieces = await fetched(world.log.slices())
        found = [header.base_offset for piece in pieces for _, header in headers(piece.view())]
        assert found == list(range(0, 40, 2))
        assert sum(len(piece) for piece in pieces) == sum(piece.size for piece in pieces) == world.log.size

    play(story)


def test_a_slice_stays_as_it_is_whatever_becomes_of_the_log(play: Play) -> None:
    async def story(world: World) -> None:
        world.append(20)
        world.log.flush()
        found = await fetched(world.log.read(0, 1 << 20))
        assert found is not None
        before = bytes(found.view())
        await fetched(world.log.delete_before(40))
        assert bytes(found.view()) == before

    play(story)


def test_records_are_found_by_time(play: Play) -> None:
    async def story(world: World) -> None:
        assert await fetched(world.log.batch_of_max_timestamp()) is None
        for timestamp in (100, 300, 200):
            world.append(5, timestamp=timestamp)
        world.log.flush()

        async def first(timestamp: int | None) -> int | None:
            log = world.log
            found = log.batch_of_max_timestamp() if timestamp is None else log.batch_for_timestamp(timestamp)
            batch = await fetched(found)
            return None if batch is None else next(headers(batch.view()))[1].base_offset

        assert [await first(timestamp) for timestamp in (0, 100, 101, 300, 301, None)] == [0, 0, 10, 10, None, 10]

    play(story)


def test_what_is_deleted_is_gone_also_after_a_restart_and_the_observer_comes_first(play: Play) -> None:
    async def story(world: World) -> None:
        world.append(20)
        world.log.flush()
        world.observer.refusing = True
        with pytest.raises(OSError, match="not now"):
            await fetched(world.log.delete_before(7))
        assert world.log.log_start == 0
        world.observer.refusing = False
        await fetched(world.log.delete_before(7))
        assert (world.observer.deleted, world.log.log_start) == ([7], 7)
        with pytest.raises(OffsetOutOfRangeError):
            await fetched(world.log.delete_before(41))
        await world.reopen()
        assert (world.log.log_start, world.log.end) == (7, 40)
        assert (await world.read(7))[0] == 6
        with pytest.raises(OffsetOutOfRangeError):
            await world.read(6)

    play(story)


def test_retention_deletes_whole_segments_that_are_too_old(play: Play) -> None:
    async def story(world: World) -> None:
        world.append(20, timestamp=1_000)
        world.append(1, timestamp=9_000)
        world.log.flush()
        assert world.log.retain(5_000) == 0
        world.log.configure(LogConfig(segment_bytes=400, retention_ms=5_000))
        assert world.log.retain(9_000) > 0
        assert 0 < world.log.log_start <= 40

    play(story)


def test_epochs_have_the_end_that_the_next_one_gave_them_also_after_a_restart(play: Play) -> None:
    async def story(world: World) -> None:
        world.log.start_epoch(3)
        world.append(2, epoch=3)
        world.log.start_epoch(5)
        world.append(1, epoch=5)
        for _ in range(2):
            log = world.log
            ends = [log.end_offset_for_epoch(epoch) for epoch in (3, 4, 5, 6)]
            assert ends == [(3, 4), (3, 4), (5, 6), (-1, -1)]
            assert (log.epochs.latest, log.epochs.epoch_at(4)) == (5, 5)
            await world.reopen()

    play(story)


def test_snapshots_are_read_newest_first_and_only_those_of_records_that_are_there(play: Play) -> None:
    async def story(world: World) -> None:
        world.append(1)
        world.log.write_snapshot(b"two")
        assert not world.log.has_snapshot_from(1) or world.log.flushed >= 2
        world.log.flush()
        assert world.log.has_snapshot_from(2)
        assert not world.log.has_snapshot_from(3)
        world.append(1)
        world.log.write_snapshot(b"four")
        assert world.log.newest_snapshot(bytes) == (4, b"four")

        def restore(data: bytes) -> bytes:
            if data == b"four":
                raise DecodeError("damaged")
            return data

        assert world.log.newest_snapshot(restore) == (2, b"two")
        assert world.log.newest_snapshot(bytes) == (2, b"two"), "the damaged one is out of the way"
        world.log.write_snapshot(b"only", only=True)
        assert world.log.newest_snapshot(bytes) == (4, b"only")
        assert world.log.newest_snapshot(restore) == (4, b"only")
        assert [header.base_offset for header in world.log.headers_from(2)] == [2]

    play(story)


# -- the next record -------------------------------------------------------------------------------------------------


MARKER = 0x30
"""The attributes of a control batch, which is transactional."""
TRANSACTIONAL = 0x10


async def next_of(world: World, offset: int, void: Callable[[int, int], bool] = lambda *_: False) -> int:
    return await fetched(world.log.next_record(offset, void))


def marker(producer_id: int = 7) -> bytearray:
    return end_transaction_marker(producer_id, 0, commit=False, coordinator_epoch=0, timestamp_ms=1_000)


def test_the_next_record_is_the_one_asked_about_where_there_is_one(play: Play) -> None:
    async def story(world: World) -> None:
        assert await next_of(world, 0) == 0
        world.append(20)
        assert [await next_of(world, offset) for offset in (0, 7, 39, 40, 50)] == [0, 7, 39, 40, 50]

    play(story)


def test_markers_and_void_records_are_no_records_to_a_reader(play: Play) -> None:
    async def story(world: World) -> None:
        world.append(2)
        world.log.append(make_batch(3, producer_id=7, attributes=TRANSACTIONAL), 0, 0)
        world.log.append(marker(), 0, 0)
        void = lambda producer_id, offset: producer_id == 7 and 4 <= offset < 7  # noqa: E731
        assert await next_of(world, 3, void) == 3
        assert await next_of(world, 4) == 4, "an open transaction may yet be committed"
        assert [await next_of(world, offset, void) for offset in (4, 5, 7)] == [8, 8, 8]
        world.append(1)
        assert [await next_of(world, offset, void) for offset in (4, 7, 8)] == [8, 8, 8]
        for _ in range(300):
            world.log.append(make_batch(1, producer_id=9, attributes=TRANSACTIONAL), 0, 0)
        end = world.log.end
        world.log.append(marker(9), 0, 0)
        assert await next_of(world, 10, lambda producer_id, _: producer_id == 9) == end + 1

    play(story)


def test_deleted_records_are_none_left_to_read(play: Play) -> None:
    async def story(world: World) -> None:
        world.append(20)
        world.log.flush()
        await fetched(world.log.delete_before(13))
        assert [await next_of(world, offset) for offset in (0, 12, 13)] == [13, 13, 13]
        await fetched(world.log.delete_before(40))
        assert await next_of(world, 5) == 40

    play(story)


def test_a_record_that_was_compacted_away_is_skipped(play: Play) -> None:
    async def story(world: World) -> None:
        world.append(1, records=1)
        whole = memoryview(encode_pairs([(b"k", b"v")] * 4, 1_000))[HEADER_SIZE:]
        first, *_, last = iterate(whole, 4, 0)
        kept = build(
            bytes(whole[: first.end]) + bytes(whole[last.start :]),
            record_count=2,
            base_timestamp=1_000,
            max_timestamp=1_000,
            last_offset_delta=3,
        )
        world.log.append(kept, 0, 0)
        assert [await next_of(world, offset) for offset in (1, 2, 3, 4, 5)] == [1, 4, 4, 4, 5]

    play(story)


def test_other_work_has_its_turn_while_transactions_are_judged(play: Play) -> None:
    """Of each it is asked whether it was aborted, which takes as long as transactions were open beside it."""
    judged = 0

    def void(producer_id: int, offset: int) -> bool:
        nonlocal judged
        judged += 1
        return True

    async def story(world: World) -> None:
        world.log.configure(LogConfig())  # One segment, which is read at a time.
        for sequence in range(100):
            world.log.append(make_batch(attributes=TRANSACTIONAL, producer_id=7, base_sequence=sequence), 0, 0)
        asking = asyncio.ensure_future(next_of(world, 0, void))
        counts = [0]
        while not asking.done():
            await asyncio.sleep(0)
            counts.append(judged)
        assert (asking.result(), judged) == (100, 100)
        assert max(after - before for before, after in pairwise(counts)) <= JUDGED_AT_A_TIME

    play(story)
    judged = 0


def test_an_answer_looks_at_a_bounded_part_of_the_log(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.storage.next_record.PIECE_SIZE", 200)
    monkeypatch.setattr("anabranch.storage.next_record.SCAN_MAX", 1_000)

    async def story(world: World) -> None:
        for _ in range(100):
            world.log.append(marker(), 0, 0)
        first = await next_of(world, 0)
        assert 0 < first < 100
        offset, asked = first, 1
        while offset < 100:
            offset, asked = await next_of(world, offset), asked + 1
        assert offset == 100 and asked > 3

    play(story)
