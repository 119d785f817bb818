"""A partition's producer state outlives its records, kills and power losses: random runs against a model."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_LEADER_EPOCH, TopicPartition
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.partition.producers import ProducerTable
from anabranch.records.batch import parse_header
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.removed import RemovedPartitions
from anabranch.server.partitions.topic_settings import topic_settings
from anabranch.storage.directory import DataDirectory
from anabranch.storage.log.config import Durability
from anabranch.storage.log.log import LocalLog
from tests.simulation.virtual_time import run
from tests.support.batches import make_batch
from tests.support.disks import FaultyDisk

DATA = Path("/data")
HISTORIES = 200
PRODUCERS = 3
NAME = TopicPartition("t", 0)
TOPIC = UUID(int=7)


LEADING = Leadership(TOPIC, 0, 0, NO_LEADER_EPOCH, 1, 1, retiring=False)


def _flushed(log: LocalLog) -> asyncio.Future[None]:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    log.flush()
    done.set_result(None)
    return done


class History:
    """One random life of a partition. The model: every producer's last batch, and the last that is durable."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = FaultyDisk(seed)
        self.disk.make_directory(DATA)
        self.disk.safe_directories |= self.disk.directories
        settings = topic_settings({}, NOT_SET, "fsync")
        config = dataclasses.replace(
            settings.log,
            durability=self.chance.choice(list(Durability)),
            segment_bytes=self.chance.choice((300, 2_000, 100_000)),
            retention_ms=self.chance.choice((-1, 50)),
        )
        self.settings = dataclasses.replace(settings, log=config)
        self.last: dict[int, tuple[int, int]] = {}
        """Producer to the sequence and offset of its last batch."""
        self.durable: dict[int, tuple[int, int]] = {}
        self.now_ms = 0
        self.start_offset = 0
        """Where the controller remembers that the partition began when it was last made."""
        self.open()

    def open(self) -> None:
        log = LocalLog.open(
            DATA / str(NAME),
            self.settings.log,
            disk=self.disk,
            start_offset=self.start_offset,
            power_lost=self.disk.boots > 0,
        )
        log.commit = lambda: _flushed(log)  # type: ignore[method-assign]
        amount = Metrics().counter("amount", "Anything.")
        self.partition = Partition(
            NAME, TOPIC, log, self.settings, bytes_in=amount, bytes_out=amount, messages_in=amount
        )
        self.partition.leadership = LEADING
        self.partition.rebuild_table(self.now_ms)

    def step(self) -> None:
        self.now_ms += self.chance.randint(0, 20)
        steps = {
            self.append: 50,
            self.sync: 10,
            self.delete: 6,
            self.retain: 4,
            self.prepare: 8,
            self.snapshot: 2,
            self.stop: 2,
            self.kill: 4,
            self.lose_power: 4,
            self.remove: 2,
        }
        self.chance.choices(list(steps), list(steps.values()))[0]()

    def append(self) -> None:
        producer = self.chance.randrange(PRODUCERS)
        sequence = self.last.get(producer, (-1, 0))[0] + 1
        data = make_batch(1, timestamp=self.now_ms, producer_id=producer, producer_epoch=0, base_sequence=sequence)
        header = parse_header(data)
        assert self.partition.table.follows(header, producer) is ErrorCode.NONE
        self.last[producer] = sequence, self.partition.append(data, header, self.now_ms).base_offset

    def sync(self) -> None:
        self.partition.log.flush()
        self.durable = dict(self.last)

    def delete(self) -> None:
        log = self.partition.log
        log.delete_before(
            self.chance.choice((log.high_watermark, self.chance.randint(log.log_start, log.high_watermark)))
        )
        self.note_synced()

    def retain(self) -> None:
        self.partition.log.retain(self.now_ms)
        self.note_synced()

    def prepare(self) -> None:
        """Write ahead what a deletion needs, while records are appended; delete, or end at any point before."""
        log = self.partition.log
        start = self.chance.randint(log.log_start, log.high_watermark)
        ends_after_ms = self.chance.choice((1, 3, 6, 10, 1_000))

        async def story() -> bool:
            preparing = asyncio.create_task(self.partition.prepare_delete(start))
            for _ in range(ends_after_ms):
                if preparing.done():
                    break
                if self.chance.random() < 0.2:
                    self.append()
                await asyncio.sleep(0.001)
            if preparing.done():
                preparing.result()
                return True
            preparing.cancel()
            return False

        if run(story(), self.chance.randrange(1 << 30)) and self.chance.random() < 0.7:
            log.delete_before(max(start, log.log_start))
            self.note_synced()

    def note_synced(self) -> None:
        if self.partition.log.flushed == self.partition.log.end:
            self.durable = dict(self.last)

    def snapshot(self) -> None:
        self.partition.snapshot()

    def stop(self) -> None:
        self.partition.close()
        self.durable = dict(self.last)
        self.open()

    def kill(self) -> None:
        self.open()

    def lose_power(self) -> None:
        self.disk = self.disk.crash()
        self.open()
        log = self.partition.log
        survived = {
            producer: last
            for producer, last in self.last.items()
            if log.log_start <= last[1] < log.end or last == self.durable.get(producer)
        }
        lost = self.last.keys() - survived.keys()
        for producer in lost:
            known = self.partition.table.known(producer)
            sequence = -1 if known is None else known.last_sequence
            assert sequence >= self.durable.get(producer, (-1, 0))[0], "a synced batch is forgotten"
            assert sequence <= self.last[producer][0]
            if known is not None and known.batches:
                survived[producer] = sequence, known.batches[-1].base_offset
        self.last = survived
        self.sync()

    def remove(self) -> None:
        """The partition is removed, and made again where it ended; the broker may be killed in between."""
        self.start_offset = self.partition.log.end
        removed = RemovedPartitions(DATA, self.disk)
        removed.remember(NAME, TOPIC, self.partition.table)
        removed.save(NAME)
        self.partition.log.close()
        DataDirectory(DATA, self.disk).remove_log(NAME)
        if self.chance.random() < 0.5:
            removed = RemovedPartitions(DATA, self.disk)
        self.open()
        earlier = removed.table(NAME, TOPIC)
        if self.last:
            assert earlier is not None
            assert removed.table(NAME, UUID(int=8)) is None
            self.partition.table = earlier
            self.partition.save_inherited()
        if self.chance.random() < 0.5:
            self.open()
        removed.forget(NAME)
        assert not len(RemovedPartitions(DATA, self.disk))
        self.durable = dict(self.last)

    def check(self) -> None:
        """Every producer's last batch is known, the next one is taken, the one after that is not."""
        for producer, (sequence, offset) in self.last.items():
            again, following, beyond = (
                parse_header(make_batch(1, producer_id=producer, producer_epoch=0, base_sequence=sequence + ahead))
                for ahead in range(3)
            )
            table = self.partition.table
            known = table.known(producer)
            found = None if known is None else known.repetition(again)
            assert found is not None, "a batch would be appended twice"
            assert found.base_offset == offset
            assert table.follows(following, producer) is ErrorCode.NONE
            assert table.follows(beyond, producer) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


@pytest.mark.parametrize("block", range(4))
def test_producers_are_remembered_through_everything(block: int) -> None:
    for seed in range(block * HISTORIES // 4, (block + 1) * HISTORIES // 4):
        history = History(seed)
        try:
            for _ in range(60):
                history.step()
                history.check()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_what_is_remembered_of_a_removed_partition_goes_with_its_producers() -> None:
    disk = FaultyDisk(1)
    disk.make_directory(DATA)
    removed = RemovedPartitions(DATA, disk)
    table = ProducerTable()
    table.apply(parse_header(make_batch(1, producer_id=5, producer_epoch=0, base_sequence=0)), 1_000)
    removed.remember(NAME, TOPIC, table)
    removed.save(NAME)
    asyncio.run(removed.expire(1_500, 600))
    assert len(RemovedPartitions(DATA, disk)) == 1
    asyncio.run(removed.expire(2_000, 600))
    assert not len(removed)
    assert not len(RemovedPartitions(DATA, disk))


def test_a_damaged_file_of_a_removed_partition_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyDisk(1)
    disk.make_directory(DATA)
    disk.replace(DATA / "t-3.producers", TOPIC.bytes + b"not a snapshot")
    assert not len(RemovedPartitions(DATA, disk))
    assert "producers of a removed partition skipped" in caplog.text
