"""A partition log on a disk that fails, against a model: what was synced is there, what was not appended is not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from anabranch.records.batch import headers
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.log import PartitionLog
from tests.support.batches import make_batch
from tests.support.disks import FaultyDisk

HERE = Path("/data/t-0")
HISTORIES = 600


class History:
    """One random life of a log: `batches` is the model, batch bytes by base offset."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.disk = FaultyDisk(seed)
        self.config = LogConfig(
            durability=Durability.FSYNC, segment_bytes=self.chance.choice((400, 2_000)), index_interval_bytes=150
        )
        self.start_offset = self.chance.choice((0, 500))
        self.batches: dict[int, bytes] = {}
        self.epoch = 0
        self.cuts: list[tuple[int, int]] = []
        self.log = self.open()

    def open(self) -> PartitionLog:
        return PartitionLog.open(HERE, self.config, disk=self.disk, start_offset=self.start_offset)

    def step(self) -> None:
        act = self.chance.random()
        if act < 0.55:
            self.append()
        elif act < 0.75:
            self.log.flush()
        elif act < 0.82:
            self.end_epoch()
        elif act < 0.87:
            self.delete_before()
        elif act < 0.90:
            self.fill_up()
        elif act < 0.93:
            self.fail_to_sync()
        elif act < 0.96:
            self.log.close()
            self.log = self.open()
        else:
            self.crash()

    def append(self) -> None:
        batch = make_batch(self.chance.randint(1, 4), self.chance.randbytes(self.chance.randint(1, 300)))
        appended = self.log.append(batch, self.epoch, 0)
        self.batches[appended.base_offset] = bytes(batch)

    def end_epoch(self) -> None:
        self.cuts.append((self.epoch, self.log.end))
        self.epoch += 1
        self.log.start_epoch(self.epoch)

    def delete_before(self) -> None:
        start = self.chance.randint(self.log.log_start, self.log.high_watermark)
        self.log.delete_before(start)

    def fill_up(self) -> None:
        self.disk.capacity = sum(len(node.data) for node in self.disk.nodes.values()) + self.chance.randint(0, 200)
        for _ in range(20):
            end, size = self.log.end, self.log.size
            try:
                self.append()
            except OSError:
                break
        else:
            raise AssertionError("the disk never filled up")
        assert (self.log.end, self.log.size) == (end, size)
        self.disk.capacity = None

    def fail_to_sync(self) -> None:
        self.append()
        self.disk.fail_sync = True
        with pytest.raises(OSError, match="Input/output"):
            self.log.flush()
        self.disk.fail_sync = False
        flushed = self.log.flushed
        self.forget_from(flushed)
        self.append()

    def crash(self) -> None:
        flushed, start = self.log.flushed, self.log.log_start
        self.disk = self.disk.crash()
        self.log = self.open()
        assert self.log.end >= flushed, "synced records are missing"
        assert self.log.log_start >= start
        self.forget_from(self.log.end)
        self.log.start_epoch(self.epoch)

    def forget_from(self, end: int) -> None:
        self.batches = {base: batch for base, batch in self.batches.items() if base < end}
        self.cuts = [(epoch, min(cut, end)) for epoch, cut in self.cuts]

    def check(self) -> None:
        offset, found = self.log.log_start, {}
        while part := self.log.read(offset, self.chance.randint(1, 1_000), end=self.log.end):
            view = part.view()
            for position, header in headers(view):
                found[header.base_offset] = bytes(view[position : position + header.size])
                offset = header.next_offset
        assert offset == self.log.end
        for base, batch in found.items():
            assert self.batches[base] == batch
        expected = [base for base in self.batches if base >= self.log.log_start]
        assert set(expected) <= set(found)
        for epoch, cut in self.cuts:
            if cut > self.log.log_start:
                assert self.log.end_offset_for_epoch(epoch)[1] == cut


def run(seed: int) -> None:
    history = History(seed)
    for _ in range(history.chance.randint(5, 60)):
        history.step()
        history.check()


@pytest.mark.parametrize("block", range(4))
def test_what_was_synced_survives_everything(block: int) -> None:
    for seed in range(block * HISTORIES // 4, (block + 1) * HISTORIES // 4):
        try:
            run(seed)
        except BaseException:
            print(f"replay with: run({seed})")
            raise
