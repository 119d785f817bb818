"""The partitions of one topic on a real data directory; tests assign their roles in place of the controller."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator, Sequence
from itertools import repeat
from pathlib import Path
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.controller.effects import Role, SendLeaderAndIsr, SendStopReplica
from anabranch.machines.lineage import Lineage
from anabranch.runtime.clock import Clock
from anabranch.runtime.disk import Disk, File
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions.compaction import Compaction, TopicShape
from anabranch.server.partitions.offsets import delete_records
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.partitions.topic_settings import topic_settings
from anabranch.storage.directory import DataDirectory

TOPIC = "t"
TOPIC_ID = UUID(int=1)
NOW_MS = 1_000_000


class RefusingDisk(Disk):
    """A disk that writes and syncs until a test makes it fail."""

    def __init__(self) -> None:
        self.full = False
        self.broken = False
        self.short: Iterator[bool] = repeat(False)
        """Whether there are too few descriptors for the next file, and the one after it, and so on."""

    def open(self, path: Path, *, create: bool = False) -> File:
        self._take_descriptor()
        file = super().open(path, create=create)
        refusing = _RefusingFile(path, file.fd, self)
        file.fd = -1
        return refusing

    def read(self, path: Path) -> bytes:
        self._take_descriptor()
        return super().read(path)

    def names(self, directory: Path) -> Sequence[str]:
        self._take_descriptor()
        return super().names(directory)

    def replace(self, path: Path, data: bytes) -> None:
        self._take_descriptor()
        super().replace(path, data)

    def _take_descriptor(self) -> None:
        if next(self.short, False):
            raise OSError(errno.EMFILE, "Too many open files")


class _RefusingFile(File):
    __slots__ = ("_disk",)

    def __init__(self, path: Path, fd: int, disk: RefusingDisk) -> None:
        super().__init__(path, fd)
        self._disk = disk

    def write(self, data: bytes | bytearray | memoryview, position: int) -> None:
        if self._disk.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(data, position)

    def sync(self) -> None:
        if self._disk.broken:
            raise OSError(errno.EIO, "Input/output error")
        super().sync()


class SetClock(Clock):
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.ms = NOW_MS

    def now_ms(self) -> int:
        return self.ms

    monotonic_ms = now_ms


class LocalReplicas:
    """Partitions of a topic with `initial` partitions at first; `resize` changes roles in the controller's order."""

    def __init__(self, path: Path, *, initial: int = 1, durability: str = "os", **configs: str) -> None:
        self.initial, self.count, self.layout, self.epoch = initial, 0, -1, 0
        self.runner = asyncio.Runner()
        self.disk = RefusingDisk()
        self.clock = SetClock()
        self.configs = {name.replace("_", "."): value for name, value in configs.items()}
        self._directory = DataDirectory(path / "data", self.disk)
        self.checkpoints = self._directory.checkpoints
        self.metrics = Metrics()
        self.replicas = Replicas(
            self._directory,
            disk=self.disk,
            clock=self.clock,
            metrics=self.metrics,
            settings_of=lambda topic: topic_settings(self.configs, NOT_SET, durability),
        )
        self.counts: list[int] = []
        self.emptied: list[str] = []
        """The topics of which the upkeep said that a retiring partition is empty."""
        self.compaction = Compaction(self.replicas, self._shape_of, self.metrics, self.emptied.append, self.clock)

    def resize(self, count: int, *, survivors: bool = True) -> None:
        """Give every partition its role in the next layout; without `survivors` stop after retiring ones are closed."""
        before, self.count = self.count, count
        self.layout += 1
        self.epoch += 1
        self.counts.append(count)
        self._take(range(count, before), retiring=True)
        if survivors:
            self._take(range(count), retiring=False)

    def _take(self, numbers: range, *, retiring: bool) -> None:
        roles = tuple(Role(n, 1, self.epoch, self.layout, retiring, (1,), (1,)) for n in numbers)
        order = SendLeaderAndIsr(1, 1, 1, TOPIC, TOPIC_ID, self.initial, self.count, roles)
        errors = self.runner.run(self.replicas.take_roles(order))
        assert all(error is ErrorCode.NONE for error in errors.values()), errors

    def lineage(self) -> Lineage:
        """The layouts so far; with each of them one leader epoch ended."""
        ends = [
            {
                each.name.partition: each.log.end_offset_for_epoch(layout + 1)[1]
                for each in self.replicas
                if each.log.end_offset_for_epoch(layout + 1)[1] >= 0
            }
            for layout in range(self.layout)
        ]
        return Lineage.of_ends(self.initial, self.counts or [1], ends if self.counts else ())

    def _shape_of(self, topic: str) -> TopicShape:
        return TopicShape(self.lineage(), [each.name.partition for each in self.replicas])

    def apply_settings(self) -> None:
        """Have the configs apply to the topic's partitions."""
        self.runner.run(self.replicas.apply_settings(TOPIC))

    def remove(self, number: int) -> None:
        """Delete a retiring partition, as the reaper has it done."""
        order = SendStopReplica(1, 1, 1, TOPIC, TOPIC_ID, ((number, self.epoch),))
        assert self.runner.run(self.replicas.stop(order)) == {number: ErrorCode.NONE}

    def __getitem__(self, number: int) -> Partition:
        partition = self.replicas.get(TOPIC, number)
        assert partition is not None
        return partition

    def sync(self, number: int) -> None:
        """Make a partition's appended records durable. Raises `OSError`."""

        async def commit() -> None:
            await self.replicas.commit(self[number])

        self.runner.run(commit())

    def name(self, number: int) -> TopicPartition:
        """The partition's name."""
        return TopicPartition(TOPIC, number)

    def close(self) -> None:
        """Close the logs, and let another have the directory."""
        self.disk.full = self.disk.broken = False
        self.runner.run(self.replicas.close())
        self.runner.close()
        self._directory.release()


async def delete_while_it_stops(partition: Partition, offset: int) -> int | ErrorCode:
    """Begin to delete the records before an offset, and stop the replica before the deletion is made."""
    deleting = asyncio.ensure_future(delete_records(partition, offset))
    await asyncio.sleep(0)
    partition.leadership = None
    return await deleting
