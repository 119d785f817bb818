"""DeleteRecords and retention: what they make durable is written in threads, in an order that survives crashes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.effects import SendStopReplica
from anabranch.machines.partition.aborted import AbortedTransaction
from anabranch.records.batch import parse_header
from anabranch.runtime.disk import Disk, File
from anabranch.server.partitions.offsets import delete_records
from anabranch.server.partitions.partition import Partition
from anabranch.storage.checkpoints import LOG_STARTS_FILE
from anabranch.storage.log.snapshots import Snapshots
from tests.support.batches import make_batch
from tests.support.replicas import TOPIC, TOPIC_ID, LocalReplicas, delete_while_it_stops

IDLE_MAX_MS = 1 << 40


@pytest.fixture
def world(tmp_path: Path) -> Iterator[LocalReplicas]:
    made = LocalReplicas(tmp_path, durability="fsync", segment_bytes="1024", retention_ms="1000")
    made.resize(1)
    yield made
    made.close()


def fill(world: LocalReplicas, batches: int = 20) -> Partition:
    """Append batches of one producer, and make them durable."""
    partition = world[0]
    for sequence in range(batches):
        data = make_batch(1, timestamp=world.clock.ms, producer_id=7, producer_epoch=0, base_sequence=sequence)
        partition.append(data, parse_header(data), world.clock.ms)
    partition.log.flush()
    return partition


class Writes:
    """The durable writes of small files, and how many of them were made in the loop's thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.in_loop = 0
        ours, replace, sync = threading.get_ident(), Disk.replace, File.sync

        def replaced(disk: Disk, path: Path, data: bytes) -> None:
            self.names.append(path.name)
            self.in_loop += threading.get_ident() == ours
            replace(disk, path, data)

        def synced(file: File) -> None:
            self.in_loop += threading.get_ident() == ours
            sync(file)

        monkeypatch.setattr(Disk, "replace", replaced)
        monkeypatch.setattr(File, "sync", synced)


def test_delete_records_writes_nothing_in_the_loop(world: LocalReplicas, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = fill(world)
    partition.log.checkpoint()
    writes = Writes(monkeypatch)
    assert world.runner.run(delete_records(partition, 15)) == 15
    assert partition.log.log_start == 15
    assert any(name.endswith(".snapshot") for name in writes.names) and LOG_STARTS_FILE in writes.names
    assert writes.in_loop == 0


@pytest.mark.parametrize("by", ["DeleteRecords", "retention"])
def test_aborted_transactions_of_deleted_records_are_forgotten_at_once(world: LocalReplicas, by: str) -> None:
    """A partition takes no transactions of producers any more when it knows of too many."""
    partition = fill(world)
    for marker in (3, 18):
        partition.table.aborted.add(AbortedTransaction(7, marker - 1, marker, marker - 1))
    if by == "DeleteRecords":
        assert world.runner.run(delete_records(partition, 10)) == 10
    else:
        world.clock.ms += 10_000
        world.runner.run(world.replicas.maintain(IDLE_MAX_MS))
        assert partition.log.log_start > 3
    assert 3 not in {line.last_offset for line in partition.table.aborted}
    assert len(partition.table.aborted) == (partition.log.log_start <= 18)


def test_a_partition_is_not_made_again_while_a_thread_removes_deleted_segments_of_its_name(
    world: LocalReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a file of the new log could go for one of the old log."""
    partition = fill(world, 80)
    begun, go_on, unlink = threading.Event(), threading.Event(), Disk.unlink

    def wait_and_unlink(disk: Disk, path: Path) -> None:
        if path.suffix == ".log" and not begun.is_set():
            begun.set()
            assert go_on.wait(10)
        unlink(disk, path)

    monkeypatch.setattr(Disk, "unlink", wait_and_unlink)

    async def story() -> None:
        deleting = asyncio.ensure_future(delete_records(partition, 80))
        assert await asyncio.to_thread(begun.wait, 10)
        assert partition.log.log_start == 80, "that is done already"
        order = SendStopReplica(1, 1, 1, TOPIC, TOPIC_ID, ((0, world.epoch),), topic_deleted=True)
        stopping = asyncio.ensure_future(world.replicas.stop(order))
        await asyncio.wait([stopping], timeout=0.5)
        assert not stopping.done()
        go_on.set()
        assert await stopping == {0: ErrorCode.NONE}
        assert await deleting == 80

    world.runner.run(story())
    world.resize(1)
    partition = fill(world, 3)
    assert [header.base_offset for header in partition.log.headers_from(0)] == [0, 1, 2]


@pytest.mark.parametrize("first", [0, 1])
def test_a_directory_that_several_hold_is_removed_after_the_last_of_them(
    tmp_path: Path, world: LocalReplicas, first: int
) -> None:
    """A compaction and a scrub, for one."""
    partition, directory = fill(world), tmp_path / "data" / f"{TOPIC}-0"

    async def hold(until: asyncio.Event) -> None:
        with world.replicas.held(partition):
            await until.wait()

    async def story() -> None:
        ends = [asyncio.Event(), asyncio.Event()]
        holding = [asyncio.ensure_future(hold(end)) for end in ends]
        await asyncio.sleep(0)
        order = SendStopReplica(1, 1, 1, TOPIC, TOPIC_ID, ((0, world.epoch),), topic_deleted=True)
        stopping = asyncio.ensure_future(world.replicas.stop(order))
        ends[first].set()
        await holding[first]
        await asyncio.wait([stopping], timeout=0.2)
        assert not stopping.done() and any(directory.glob("*.log"))
        ends[1 - first].set()
        await holding[1 - first]
        assert await stopping == {0: ErrorCode.NONE}
        assert not directory.exists()

    world.runner.run(story())


def test_retention_writes_nothing_in_the_loop(world: LocalReplicas, monkeypatch: pytest.MonkeyPatch) -> None:
    partition = fill(world)
    partition.log.checkpoint()
    world.clock.ms += 10_000
    writes = Writes(monkeypatch)
    world.runner.run(world.replicas.maintain(IDLE_MAX_MS))
    assert partition.log.log_start == partition.log.end == 20
    assert any(name.endswith(".snapshot") for name in writes.names) and LOG_STARTS_FILE in writes.names
    assert writes.in_loop == 0


def test_nothing_is_deleted_of_a_replica_that_was_stopped_meanwhile(world: LocalReplicas) -> None:
    partition = fill(world)
    assert world.runner.run(delete_while_it_stops(partition, 15)) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert partition.log.log_start == 0
    assert world.checkpoints.log_start("t-0") != 15, "a log that is made again must not start there"


def test_a_snapshot_from_a_thread_replaces_no_newer_one_and_none_of_a_log_that_was_cut(tmp_path: Path) -> None:
    snapshots = Snapshots(Disk(), tmp_path)
    old, same = (snapshots.writer(lambda: b"old", end, flushed=5) for end in (5, 9))
    snapshots.write(b"new", 9, flushed=9, only=True)
    assert not old() and not same()
    assert list(snapshots.newest_first(99)) == [(9, b"new")]
    later = snapshots.writer(lambda: b"later", 12, flushed=9)
    snapshots.forget_above(9)
    assert not later()
    assert list(snapshots.newest_first(99)) == [(9, b"new")]
    assert snapshots.writer(lambda: b"later", 12, flushed=12)()
    assert next(iter(snapshots.newest_first(99))) == (12, b"later")
