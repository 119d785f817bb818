"""A partition log on a disk that fails, against a model: synced records are present, and only appended ones."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path

import pytest

from anabranch.records.batch import headers
from anabranch.storage.checkpoints import Checkpoints
from anabranch.storage.interface import Slice
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.log import Flush, LocalLog
from tests.support.batches import make_batch
from tests.support.disks import FaultyDisk
from tests.support.dropped import remove_some
from tests.support.thorough import thorough

DATA = Path("/data")
HISTORIES = thorough(1_200, 800)
BLOCKS = 4


class History:
    """One random life of a log. The model: batches by base offset, with their timestamps, and where epochs ended."""

    def __init__(self, seed: int, *, stages: bool = True) -> None:
        """`stages`: some of what is appended is written beside the log before."""
        self.chance = random.Random(seed)
        self.staged = random.Random(seed) if stages else None
        self.only_appends = False
        self.disk = FaultyDisk(seed)
        self.disk.make_directory(DATA)
        self.disk.safe_directories |= self.disk.directories
        self.config = LogConfig(
            durability=self.chance.choice((Durability.FSYNC, Durability.OS)),
            segment_bytes=self.chance.choice((400, 2_000, 100_000)),
            index_interval_bytes=self.chance.choice((1, 150, 1_000)),
            retention_ms=self.chance.choice((-1, 50)),
            retention_bytes=self.chance.choice((-1, 1_500)),
        )
        self.shared = self.chance.random() < 0.5
        self.start_offset = self.chance.choice((0, 500))
        self.batches: dict[int, bytes] = {}
        self.timestamps: dict[int, int] = {}
        self.epoch = 0
        self.cuts: list[tuple[int, int]] = []
        self.now_ms = 0
        self.flush: Flush | None = None
        self.flush_error: OSError | None = None
        self.open()

    def open(self, *, power_lost: bool = False) -> None:
        self.checkpoints = Checkpoints(self.disk, DATA) if self.shared else None
        self.log = LocalLog.open(
            DATA / "t-0",
            self.config,
            disk=self.disk,
            start_offset=self.start_offset,
            checkpoints=self.checkpoints,
            power_lost=power_lost,
        )
        self.log.observe(self)
        self.flush = None
        assert not any(name.endswith(".tmp") for name in self.disk.names(DATA / "t-0")), "left by a kill"

    def step(self) -> None:
        self.now_ms += self.chance.randint(0, 20)
        steps = {
            self.append: 50,
            self.flush_now: 10,
            self.begin_flush: 8,
            self.end_flush: 8,
            self.end_epoch: 7,
            self.delete_before: 4,
            self.retain: 4,
            self.remove_dropped: 6,
            self.truncate: 2,
            self.change_durability: 2,
            self.checkpoint: 3,
            self.fill_up: 3,
            self.fail_to_sync: 3,
            self.stop: 3,
            self.kill: 3,
            self.kill_unheard: 2,
            self.crash: 4,
        }
        (step,) = self.chance.choices(list(steps), list(steps.values()))
        self.only_appends = step == self.append
        step()

    # -- steps

    def append(self) -> None:
        data = bytearray()
        counts = [self.chance.randint(1, 4) for _ in range(self.chance.choice((1, 1, 2, 3)))]
        stamps = [max(0, self.now_ms + self.chance.randint(-30, 5)) for _ in counts]
        for count, stamp in zip(counts, stamps, strict=True):
            data += make_batch(count, self.chance.randbytes(self.chance.randint(1, 300)), timestamp=stamp)
        if self.staged is not None and len(counts) == 1 and self.staged.random() < 0.2:
            asyncio.run(self.put_staged(data, stamps))
        else:
            self.put(data, stamps)

    async def put_staged(self, data: bytearray, stamps: list[int]) -> None:
        """Append what was written beside the log before; anything may happen to the log meanwhile."""
        view = memoryview(data)
        async with self.log.staging.hold(view, self.log.epochs):
            if self.only_appends and self.staged is not None and self.staged.random() < 0.5:
                stages, self.staged = self.staged, None
                self.step()
                self.staged = stages
            self.put(view, stamps)

    def put(self, data: bytearray | memoryview, stamps: list[int]) -> None:
        base = self.log.append(data, self.epoch, self.now_ms).base_offset
        for stamp, (position, header) in zip(stamps, headers(data), strict=True):
            assert header.base_offset == base
            self.batches[base] = bytes(data[position : position + header.size])
            self.timestamps[base] = stamp
            base = header.next_offset
        assert base == self.log.end

    def flush_now(self) -> None:
        self.log.flush()
        assert self.log.flushed == self.log.end

    def begin_flush(self) -> None:
        if self.flush is None:
            self.flush = self.log.begin_flush()

    def end_flush(self) -> None:
        if self.flush is not None:
            self.flush.run()
            self.log.end_flush(self.flush)
            self.flush = None

    def end_epoch(self) -> None:
        self.cuts.append((self.epoch, self.log.end))
        self.epoch += 1
        self.log.start_epoch(self.epoch)
        if self.chance.random() < 0.5:
            self.log.flush()
            assert self.log.flushed == self.log.end

    def delete_before(self) -> None:
        self.log.delete_before(self.chance.randint(self.log.log_start, self.log.high_watermark))

    def remove_dropped(self) -> None:
        remove_some(self.log, self.chance.randint(0, len(self.log.dropped)))

    def retain(self) -> None:
        start, size = self.log.log_start, self.log.size
        dropped = self.log.retain(self.now_ms)
        assert self.log.size == size - dropped
        for base, stamp in self.timestamps.items():
            if start <= base < self.log.log_start and not self.config.retention_bytes >= 0:
                assert 0 <= self.config.retention_ms < self.now_ms - stamp

    def truncate(self) -> None:
        offset = self.chance.randint(self.log.log_start, self.log.end)
        self.log.truncate(offset)
        assert self.log.end <= max(offset, self.log.log_start)
        self.forget_from(self.log.end)
        self.log.start_epoch(self.epoch)

    def change_durability(self) -> None:
        before = self.log.high_watermark
        other = Durability.OS if self.config.durability is Durability.FSYNC else Durability.FSYNC
        self.config = dataclasses.replace(self.config, durability=other)
        self.log.configure(self.config)
        assert self.log.high_watermark >= before

    def checkpoint(self) -> None:
        self.log.checkpoint()

    def fill_up(self) -> None:
        self.disk.capacity = self.disk.used + self.chance.randint(0, 200)
        for _ in range(100):
            end, size = self.log.end, self.log.size
            stamp = self.now_ms
            try:
                self.put(make_batch(1, self.chance.randbytes(150), timestamp=stamp), [stamp])
            except OSError:
                break
        else:
            raise AssertionError("the disk never filled up")
        assert (self.log.end, self.log.size) == (end, size)
        self.check()
        self.disk.capacity = None
        self.append()

    def fail_to_sync(self) -> None:
        self.append()
        end, flushed = self.log.end, self.log.flushed
        self.disk.fail_sync = True
        with pytest.raises(OSError, match="Input/output"):
            self.log.flush()
        with pytest.raises(OSError, match="Input/output"):
            self.append()
        assert self.log.flushed == flushed
        self.disk.fail_sync = False
        self.now_ms += 1_000
        self.append()
        if self.config.durability is Durability.OS:
            assert self.log.end > end
        self.check()
        self.log.flush()

    def stop(self) -> None:
        self.log.close()
        if self.checkpoints is not None:
            self.checkpoints.save()
        end, entries, start = self.log.end, self.log.epochs.entries, self.log.log_start
        power_lost = self.chance.random() < 0.5
        if not self.disk.exists(self.log.directory):  # Nothing was written: the leader begins its epoch there again.
            entries = []
        if power_lost:
            self.disk = self.disk.crash()
            entries = [entry for entry in entries if entry[1] < end]
        self.open(power_lost=power_lost)
        assert (self.log.end, self.log.log_start) == (end, start)
        assert self.log.epochs.entries[: len(entries)] == entries
        self.log.start_epoch(self.epoch)

    def kill(self) -> None:
        end, start = self.log.end, self.log.log_start
        self.open()
        assert (self.log.end, self.log.log_start) == (end, start)
        self.log.start_epoch(self.epoch)

    def kill_unheard(self) -> None:
        """Kill the process between a sync that fails and its hearing of that."""
        self.append()
        self.disk.fail_sync = True
        with pytest.raises(OSError, match="Input/output"):
            self.log.begin_flush().run()
        self.disk.fail_sync = False
        self.kill()

    def crash(self) -> None:
        flushed, start = self.log.flushed, self.log.log_start
        self.disk = self.disk.crash()
        self.open(power_lost=True)
        assert self.log.end >= flushed, "synced records are missing"
        assert self.log.log_start >= start
        self.forget_from(self.log.end)
        self.log.start_epoch(self.epoch)

    def log_cut(self, end: int) -> None:
        self.forget_from(end)

    def before_delete(self, start: int) -> None:
        pass

    def high_watermark_moved(self) -> None:
        pass

    def forget_from(self, end: int) -> None:
        self.batches = {base: batch for base, batch in self.batches.items() if base < end}
        self.timestamps = {base: stamp for base, stamp in self.timestamps.items() if base < end}
        self.cuts = [(epoch, min(cut, end)) for epoch, cut in self.cuts]

    # -- the rules after every step

    def check(self) -> None:
        log = self.log
        assert log.log_start <= log.high_watermark <= log.end
        assert log.flushed <= log.end
        offset, found = log.log_start, {}
        while part := log.read(offset, self.chance.randint(1, 1_000), end=log.end):
            view = part.view()
            for position, header in headers(view):
                found[header.base_offset] = bytes(view[position : position + header.size])
                offset = header.next_offset
        assert offset == log.end
        expected = {base: batch for base, batch in self.batches.items() if base >= log.log_start}
        assert {base: batch for base, batch in found.items() if base >= log.log_start} == expected
        for base, batch in found.items():
            assert self.batches[base] == batch
        self.check_read(found)
        self.check_times(found)
        for epoch, cut in self.cuts:
            if cut > log.log_start:
                assert log.end_offset_for_epoch(epoch)[1] == cut

    def check_read(self, found: dict[int, bytes]) -> None:
        log = self.log
        offset, end = sorted((self.chance.randint(log.log_start, log.end), self.chance.randint(log.log_start, log.end)))
        part = log.read(offset, self.chance.randint(1, 2_000), end=end)
        holds = max((base for base in found if base <= offset), default=None)
        last = max((base for base in found if base <= end), default=None)
        if offset < end and holds is not None and (holds != last or end == log.end):
            assert part is not None
            read = [header for _, header in headers(part.view())]
            assert read[0].base_offset == holds
            assert read[-1].next_offset <= end
        else:
            assert part is None

    def check_times(self, found: dict[int, bytes]) -> None:
        time = self.chance.randint(0, self.now_ms + 5)
        at = min((base for base in found if self.timestamps[base] >= time), default=None)
        batch = self.log.batch_for_timestamp(time)
        assert batch is None or isinstance(batch, Slice)
        if at is None or at >= self.log.high_watermark:
            assert batch is None
        else:
            assert batch is not None
            assert bytes(batch.view()) == found[at]


def run(seed: int, steps_max: int = 40, *, stages: bool = True) -> History:
    history = History(seed, stages=stages)
    for _ in range(history.chance.randint(5, steps_max)):
        history.step()
        history.check()
    return history


@pytest.mark.parametrize("block", range(BLOCKS))
def test_what_was_synced_survives_everything(block: int) -> None:
    for seed in range(block * HISTORIES // BLOCKS, (block + 1) * HISTORIES // BLOCKS):
        try:
            run(seed)
        except BaseException:
            print(f"replay with: run({seed})")
            raise


def test_a_power_loss_that_took_the_first_file_is_remembered_by_the_next_kill() -> None:
    run(5391, stages=False)


def test_a_seed_reproduces() -> None:
    one, two = run(7), run(7)
    assert one.batches == two.batches
    assert {path: bytes(node.data) for path, node in one.disk.nodes.items()} == {
        path: bytes(node.data) for path, node in two.disk.nodes.items()
    }
