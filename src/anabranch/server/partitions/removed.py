"""The producer tables of removed partitions, until a partition of that name is made again or the producers expire.

A producer repeats batches without a response, which may have been appended, also to a partition that has been removed.
Only the table distinguishes a repetition from a new batch (ordering.md, section 5, rule 1), so the table outlives the
log (docs/adr/0021): in memory from the removal of the partition, and in a file `<topic>-<partition>.producers` of the
data directory, topic id and snapshot, each with its checksum, before the log is deleted. A recreated partition inherits
the table, and with it the refusals that were noted meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from uuid import UUID

from anabranch.base.errors import DecodeError
from anabranch.base.ids import TopicPartition
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.partition.producers import ProducerTable
from anabranch.records.checksum import crc32c
from anabranch.runtime.disk import NAME_MAX, Disk
from anabranch.runtime.events import EventLogger
from anabranch.runtime.turns import in_turns
from anabranch.server.partitions.producer_budget import expire_producers
from anabranch.server.partitions.topic_settings import TopicSettings

events = EventLogger("removed")
SUFFIX = ".producers"
LONG_NAMES = ".producers"
"""Holds the files of partitions whose name leaves no room for the suffix."""
FORGOTTEN_AT_A_TIME = 100
"""Partitions that are forgotten before other work has its turn: their files are looked for."""
_KIND = b"PRODUCERS\0\0\1"
_HEAD = Struct(f">{len(_KIND)}s16sI")
"""What the file is, the id of the topic and its checksum. Files of earlier versions begin with the id."""
_EARLIER_HEAD_SIZE = 16
Watcher = Callable[[UUID, Collection[int]], None]
"""Hears the id of a topic, and the numbers of its partitions that were removed."""


@dataclass(frozen=True, slots=True)
class RemovedPartition:
    """A removed partition as seen by produce requests: its producers, and the role it would have."""

    name: TopicPartition
    leadership: Leadership | None
    """None while its log is being deleted, or while no other partition of its topic here has a role."""
    table: ProducerTable
    settings: TopicSettings


class RemovedPartitions:
    """The producer tables of removed partitions, by name."""

    def __init__(self, path: Path, disk: Disk) -> None:
        """Read the files of the data directory; one that cannot be read is skipped with a warning. OSError."""
        self._path = path
        self._disk = disk
        self._tables: dict[TopicPartition, tuple[UUID, ProducerTable]] = {}
        self._saved: set[TopicPartition] = set()
        """Those that may have a file: the disk is not asked about the others, of which there may be 100,000."""
        self._watchers: list[Watcher] = []
        files = [path / name for name in disk.names(path) if name.endswith(SUFFIX)]
        if disk.exists(path / LONG_NAMES):
            files += [path / LONG_NAMES / name for name in disk.names(path / LONG_NAMES)]
        for file in files:
            name = TopicPartition.named(file.name.removesuffix(SUFFIX))
            if name is None:
                continue
            try:
                held = _restored(disk.read(file))
            except (OSError, DecodeError) as error:
                events.warning("producers of a removed partition skipped", file=file, reason=error)
                continue
            self._tables[name] = held
            self._saved.add(name)

    def __len__(self) -> int:
        return len(self._tables)

    def watch(self, watcher: Watcher) -> None:
        """Call `watcher` with partitions that were removed: what was kept for their readers may go."""
        self._watchers.append(watcher)

    def tell(self, removed: Mapping[UUID, Collection[int]]) -> None:
        """Tell the watchers of removed partitions, by the ids of their topics."""
        for topic_id, numbers in removed.items():
            for watcher in self._watchers:
                watcher(topic_id, numbers)

    def remember(self, name: TopicPartition, topic_id: UUID, table: ProducerTable) -> None:
        """Remember the table of a partition, in memory."""
        self._tables[name] = topic_id, table

    def table(self, name: TopicPartition, topic_id: UUID) -> ProducerTable | None:
        """Find the table of a removed partition; None if none is remembered, or that of another topic of this name."""
        found = self._tables.get(name)
        return None if found is None or found[0] != topic_id else found[1]

    def tables(self) -> list[ProducerTable]:
        """All tables."""
        return [table for _, table in self._tables.values()]

    def save(self, name: TopicPartition) -> None:
        """Make the table of a partition durable, unless it is empty. Blocks; OSError."""
        topic_id, table = self._tables[name]
        if len(table):
            self._saved.add(name)
            self._disk.make_directory(self._file(name).parent)
            head = _HEAD.pack(_KIND, topic_id.bytes, crc32c(topic_id.bytes))
            self._disk.replace(self._file(name), head + table.snapshot())

    def forget(self, name: TopicPartition) -> None:
        """Forget a partition that has been made again."""
        try:
            self._forget(name)
        except OSError as error:
            events.warning("file of a removed partition not deleted", partition=name, reason=error)

    async def forget_topic(self, topic: str) -> None:
        """Forget all partitions of a topic that is deleted; other work has its turn in between. OSError."""
        async for name in in_turns([name for name in self._tables if name.topic == topic], FORGOTTEN_AT_A_TIME):
            self._forget(name)

    async def expire(self, now_ms: int, idle_max_ms: int) -> None:
        """Forget producers that were idle for longer, and partitions without any producer left. OSError.

        Other work has its turn in between.
        """
        async for name in in_turns([*self._tables], FORGOTTEN_AT_A_TIME):
            held = self._tables.get(name)
            if held is None:
                continue
            await expire_producers(held[1], now_ms, idle_max_ms)
            if not len(held[1]) and self._tables.get(name) is held:  # And was not removed again meanwhile.
                self._forget(name)

    def _forget(self, name: TopicPartition) -> None:
        if self._tables.pop(name, None) is None or name not in self._saved:
            return
        if self._disk.exists(self._file(name)):
            self._disk.unlink(self._file(name))
        self._saved.discard(name)

    def _file(self, name: TopicPartition) -> Path:
        text = str(name)
        return self._path / LONG_NAMES / text if len(text + SUFFIX) > NAME_MAX else self._path / f"{text}{SUFFIX}"


def _restored(data: bytes) -> tuple[UUID, ProducerTable]:
    """Read a file. DecodeError where it is damaged."""
    if not data.startswith(_KIND):
        return UUID(bytes=data[:_EARLIER_HEAD_SIZE].ljust(16)), ProducerTable.restore(data[_EARLIER_HEAD_SIZE:])
    if len(data) < _HEAD.size:
        raise DecodeError(f"the file is cut off after {len(data)} bytes")
    _, topic_id, checksum = _HEAD.unpack_from(data)
    if crc32c(topic_id) != checksum:
        raise DecodeError("the id of the topic does not fit its checksum")
    return UUID(bytes=topic_id), ProducerTable.restore(data[_HEAD.size :])
