"""A compacted topic on a failing disk: producers, resizes, transactions, upkeep, kills and power losses, from a seed.

The partitions, the upkeep and the cleaner are those that ship; the world plays the controller, and the awaits of the
upkeep are where other things happen. The model is the list of writes of each key, in the order of their appends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.controller.effects import Role, SendLeaderAndIsr, SendStopReplica
from anabranch.machines.controller.roles import phase_of, phases
from anabranch.machines.lineage import Lineage
from anabranch.machines.placement import place
from anabranch.records.batch import end_transaction_marker, headers, parse_header
from anabranch.records.compression import Compression
from anabranch.records.hashing import placement_hash
from anabranch.runtime.clock import Clock
from anabranch.runtime.metrics import Metrics
from anabranch.runtime.syncs import Told
from anabranch.server.cluster.peers import retiring_ranges
from anabranch.server.partitions.appending import Appender
from anabranch.server.partitions.compaction import Compaction, TopicShape
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.partitions.topic_settings import topic_settings
from anabranch.storage.directory import DataDirectory
from anabranch.storage.log.batch_files import Aborted, records
from anabranch.storage.log.group_commit import GroupCommit
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_keyed_batch
from tests.support.disks import FaultyDisk, Node

DATA = Path("/data")
TOPIC = "t"
TOPIC_ID = UUID(int=3)
KEYS = tuple(b"key-%d" % number for number in range(9))
CARELESS = KEYS[-2:]
"""Keys that stock producers place by old counts at any time, also after a growth: their order is not promised."""
LARGEST = 7
START_MS = 1_000_000


class PowerLossError(BaseException):
    """The power goes, whatever the broker survives."""


class FailingDisk(FaultyDisk):
    """Loses the power at a chosen sync."""

    fails_at: int | None = None

    def _count(self) -> None:
        if self.fails_at is not None and self.syncs >= self.fails_at:
            raise PowerLossError

    def sync(self, node: Node) -> None:
        self._count()
        super().sync(node)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)


class CommitAtOnce(GroupCommit):
    """Syncs while the caller waits: the world has no threads."""

    def commit_then(self, log: LocalLog, done: Told, flushed: Callable[[], None] | None = None) -> None:
        try:
            log.flush()
        except OSError as error:
            done(error)
            return
        if flushed is not None:
            flushed()
        done(None)


class AtOnce(ThreadPoolExecutor):
    """Does work while the caller waits."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class SetClock(Clock):
    """The world's clock."""

    def __init__(self) -> None:
        self.ms = START_MS

    def now_ms(self) -> int:
        return self.ms

    monotonic_ms = now_ms


@dataclass(slots=True)
class Write:
    """One write of a key."""

    number: int
    value: bytes | None
    partition: int
    offset: int
    at_ms: int
    state: str = "committed"


class Open(NamedTuple):
    """An open transaction."""

    partition: int
    writes: list[tuple[bytes, Write]]


@dataclass
class Roles:
    """The controller's knowledge: what survives every crash."""

    count: int
    layout: int = 0
    counts: list[int] = field(default_factory=list)
    epochs: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    removed: dict[int, tuple[int, int]] = field(default_factory=dict)
    ended: list[dict[int, int]] = field(default_factory=list)
    taken: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By partition: the layout and the count that it serves."""


class World:
    """One random history."""

    def __init__(self, seed: int, *, policy: str = "compact", retention_ms: int = -1) -> None:
        self.chance = random.Random(seed)
        chance = self.chance
        self.runner = asyncio.Runner()
        self.initial = chance.choice((1, 1, 2))
        self.delete_retention_ms = chance.choice((0, 300))
        self.configs = {
            "cleanup.policy": policy,
            "retention.ms": str(retention_ms),
            "segment.bytes": str(chance.choice((150, 150, 400, 2_000))),
            "min.cleanable.dirty.ratio": chance.choice(("0", "0.3")),
            "delete.retention.ms": str(self.delete_retention_ms),
            "min.compaction.lag.ms": chance.choice(("0", "0", "100")),
            "message.timestamp.type": chance.choice(("CreateTime", "CreateTime", "LogAppendTime")),
        }
        self.disk = FailingDisk(seed)
        self.disk.make_directory(DATA)
        self.disk.safe_directories |= self.disk.directories
        self.clock = SetClock()
        self.roles = Roles(self.initial, counts=[self.initial])
        for number in range(self.initial):
            self.roles.epochs[number], self.roles.starts[number] = 0, 0
            self.roles.taken[number] = (0, self.initial)
        self.writes: dict[bytes, list[Write]] = {key: [] for key in KEYS}
        self.unordered: set[bytes] = set()
        """Careless keys with records that have no order."""
        self.transactions: dict[int, Open] = {}
        self.begun: dict[int, Open] = {}
        """All transactions, ended ones too."""
        self.numbers = 0
        self.resizing = False
        self.busy = False
        self.folded = self.saved = self.emptied = self.failures = 0
        self.readers = [Reader(self) for _ in range(2)]
        self.start()

    # -- lives -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.directory = DataDirectory(DATA, self.disk)
        metrics = Metrics()
        self.replicas = Replicas(
            self.directory,
            disk=self.disk,
            clock=self.clock,
            metrics=metrics,
            settings_of=lambda topic: topic_settings(self.configs, NOT_SET, "fsync"),
            commits=CommitAtOnce(),
        )
        self.replicas._threads.shutdown()
        self.replicas._threads = AtOnce()
        self.replicas.in_thread = self.replicas.in_cleaner = self._in_thread  # type: ignore[method-assign]
        self.compaction = Compaction(
            self.replicas, self._shape_of, metrics, emptied=lambda topic: None, clock=self.clock
        )
        self.order(sorted(self.roles.taken))

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        """A thread's work, with other things happening before and after."""
        self.meanwhile()
        result = work()
        self.meanwhile()
        return result

    def meanwhile(self) -> None:
        if not self.busy and self.chance.random() < 0.2:
            self.busy = True
            try:
                for _ in range(self.chance.randint(1, 3)):
                    self.chance.choice((self.produce, self.produce, self.begin, self.end))()
            finally:
                self.busy = False

    def run(self, awaitable: Awaitable[Any]) -> Any:
        async def story() -> Any:
            return await awaitable

        return self.runner.run(story())

    def crash(self) -> None:
        """The power goes: what was not synced may be lost."""
        self.disk = self._after_power_loss()
        self.restart()

    def _after_power_loss(self) -> FailingDisk:
        found = self.disk.crash()
        after = FailingDisk(0)
        after.__dict__.update(found.__dict__)
        return after

    def kill(self) -> None:
        """The process ends."""
        self.restart()

    def restart(self) -> None:
        self._count()
        self.synced = {each.name.partition: each.log.flushed for each in self.replicas}
        self.start()
        for key, writes in self.writes.items():
            self.writes[key] = [write for write in writes if not self._lost(write)]
        for producer, opened in self.begun.items():
            # A lost marker leaves its transaction open.
            partition = self.replicas.get(TOPIC, opened.partition)
            if partition is None or partition.table.open_transaction(producer) is None:
                self.transactions.pop(producer, None)
            else:
                self.transactions[producer] = opened
                for _, write in opened.writes:
                    write.state = "open"

    def _lost(self, write: Write) -> bool:
        partition = self.replicas.get(TOPIC, write.partition)
        if partition is None:
            return False
        # Of a log that was never synced any file may be lost, the first one too.
        unsynced = write.offset >= self.synced.get(write.partition, 0)
        return write.offset >= partition.log.end or (unsynced and write.offset < partition.log.log_start)

    def _count(self) -> None:
        compaction = self.compaction
        self.folded += int(compaction._folded.value)
        self.saved += int(compaction._saved.value)
        self.emptied += int(compaction._emptied_partitions.value)
        self.failures += int(compaction._failures._count.value)

    def close(self) -> None:
        self._count()
        self.runner.close()

    # -- the controller ----------------------------------------------------------------------------------------------

    def order(self, numbers: list[int]) -> None:
        """Have partitions take their roles; all of one order serve one layout."""
        roles = self.roles
        for layout, count in sorted({roles.taken[number] for number in numbers}):
            chosen = [number for number in numbers if roles.taken[number] == (layout, count)]
            order = SendLeaderAndIsr(
                *(1, 1, 1, TOPIC, TOPIC_ID, self.initial, count),
                tuple(
                    Role(number, 1, roles.epochs[number], layout, number >= count, (1,), (1,), roles.starts[number])
                    for number in chosen
                ),
            )
            self.busy = True  # Logs are opened in threads, and nobody writes to a log that is not open.
            errors = self.run(self.replicas.take_roles(order))
            self.busy = False
            assert all(error is ErrorCode.NONE for error in errors.values()), errors

    def resize(self) -> None:
        if self.resizing:
            return
        old = self.roles.count
        new = self.chance.choice([count for count in range(self.initial, LARGEST + 1) if count != old])
        roles = self.roles
        ended = dict(roles.epochs)
        for number in range(new):
            if number not in roles.epochs:
                start, epoch = roles.removed.pop(number, (0, -1))
                roles.epochs[number], roles.starts[number] = epoch, start
        everyone = sorted(roles.epochs)
        self.resizing = True
        for phase in phases(old, new):
            chosen = [number for number in everyone if phase_of(number, old, new) is phase]
            for number in chosen:
                roles.epochs[number] += 1
                roles.taken[number] = (roles.layout + 1, new)
            self.order(chosen)
            for _ in range(self.chance.randint(0, 2)):
                self.produce()
            if self.chance.random() < 0.3:
                self.upkeep()
            if self.chance.random() < 0.1:
                self.chance.choice((self.kill, self.crash))()
        roles.count, roles.layout = new, roles.layout + 1
        roles.counts.append(new)
        roles.ended.append(ended)
        self.resizing = False

    def reap(self) -> None:
        """Remove the highest retiring partitions that are empty."""
        roles = self.roles
        while not self.resizing and (number := max(roles.epochs)) >= roles.count:
            ranges = retiring_ranges(self.replicas.of_topic(TOPIC))
            if number not in ranges or ranges[number].start != ranges[number].end:
                return
            roles.removed[number] = (ranges[number].end, roles.epochs[number])
            stop = SendStopReplica(1, 1, 1, TOPIC, TOPIC_ID, ((number, roles.epochs[number]),))
            assert self.run(self.replicas.stop(stop)) == {number: ErrorCode.NONE}
            del roles.epochs[number], roles.taken[number], roles.starts[number]
            for ended in roles.ended:
                ended.pop(number, None)

    def lineage(self) -> Lineage:
        ends = [
            {
                number: partition.log.end_offset_for_epoch(epoch)[1]
                for number, epoch in ended.items()
                if (partition := self.replicas.get(TOPIC, number)) is not None
            }
            for ended in self.roles.ended
        ]
        return Lineage.of_ends(self.initial, self.roles.counts, ends)

    def _shape_of(self, topic: str) -> TopicShape:
        return TopicShape(self.lineage(), tuple(self.roles.epochs))

    # -- producers ---------------------------------------------------------------------------------------------------

    def produce(self) -> None:
        """One of our producers, or a stock producer, which may not have heard of the last resizes."""
        key = self.chance.choice(KEYS)
        value = None if self.chance.random() < 0.35 else b"%d" % self.numbers + bytes(self.chance.randint(0, 60))
        ours = self.chance.random() < 0.6
        counts = [*self.roles.counts[-2:]]
        count = self.roles.counts[-1] if ours else self.chance.choice(counts)
        number = place(placement_hash(key), self.initial, count)
        if not ours and key not in CARELESS:
            # In order only where the batch ends up where the key is placed now: as from a retiring partition.
            right = place(placement_hash(key), self.initial, self.roles.count)
            if self.resizing or (number < self.roles.count and number != right):
                return
        codec = self.chance.choice((Compression.NONE, Compression.NONE, Compression.LZ4))
        batch = make_keyed_batch([(key, value)], timestamp=self.clock.ms, compression=codec)
        self._append(key, value, number, batch, count if ours else COUNT_NOT_SAID)

    def _append(self, key: bytes, value: bytes | None, number: int, batch: bytearray, count: int) -> Write | None:
        before = {each.name.partition: each.log.end for each in self.replicas}
        partition = self.replicas.get(TOPIC, number) or self.replicas.removed_partition(
            next(iter(self.replicas)).name._replace(partition=number)
        )
        appender = Appender(self.replicas, self.clock.ms, lambda *_: ErrorCode.NONE)
        produced = appender.produce(partition, memoryview(batch), count)
        if produced.error is not ErrorCode.NONE:
            assert produced.error in (ErrorCode.INVALID_PARTITION_METADATA, ErrorCode.NOT_LEADER_OR_FOLLOWER), produced
            return None
        (target,) = (each for each in self.replicas if each.log.end != before[each.name.partition])
        role = target.leadership
        assert role is not None
        right = place(placement_hash(key), self.initial, role.undeleted_partition_count)
        if target.name.partition != right or (count == COUNT_NOT_SAID and self.resizing):
            self.unordered.add(key)
        write = Write(self.numbers, value, target.name.partition, produced.base_offset, self.clock.ms)
        self.numbers += 1
        self.writes[key].append(write)
        return write

    def begin(self) -> None:
        """A producer writes a key in a transaction."""
        if len(self.transactions) > 2 or self.resizing:
            return
        key, producer = self.chance.choice(KEYS), 1_000 + self.numbers
        number = place(placement_hash(key), self.initial, self.roles.count)
        value = None if self.chance.random() < 0.3 else b"%d" % self.numbers
        batch = make_keyed_batch(
            [(key, value)], timestamp=self.clock.ms, producer_id=producer, base_sequence=0, transactional=True
        )
        write = self._append(key, value, number, batch, self.roles.count)
        if write is not None:
            write.state = "open"
            self.transactions[producer] = self.begun[producer] = Open(write.partition, [(key, write)])

    def end(self) -> None:
        """A transaction ends."""
        if not self.transactions:
            return
        producer = self.chance.choice(sorted(self.transactions))
        opened = self.transactions.pop(producer)
        partition = self.replicas.get(TOPIC, opened.partition)
        assert partition is not None, "a partition with an open transaction is not removed"
        commit = self.chance.random() < 0.6
        marker = end_transaction_marker(producer, 0, commit=commit, coordinator_epoch=0, timestamp_ms=self.clock.ms)
        partition.append(marker, parse_header(marker), self.clock.ms)
        for _, write in opened.writes:
            write.state = "committed" if commit else "aborted"

    def sync(self) -> None:
        for partition in self.replicas:
            partition.log.flush()

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def upkeep(self) -> None:
        if self.busy:
            return
        if self.chance.random() < 0.15:
            self.disk.fails_at = self.disk.syncs + self.chance.randint(0, 30)
        try:
            self.run(self.replicas.maintain(1 << 60))
            self.run(self.compaction.run_topic(TOPIC))
        except PowerLossError:
            self.disk.fails_at = None
            self.crash()
        self.disk.fails_at = None

    def step(self) -> None:
        self.clock.ms += self.chance.randint(0, 60)
        steps: dict[Callable[[], None], int] = {
            self.produce: 50,
            self.begin: 4,
            self.end: 5,
            self.sync: 10,
            self.resize: 5,
            self.upkeep: 20,
            self.reap: 8,
            self.kill: 2,
            self.crash: 2,
            self.read: 10,
        }
        self.chance.choices(list(steps), list(steps.values()))[0]()

    def read(self) -> None:
        self.chance.choice(self.readers).read(self.chance.randint(1, 12))

    # -- what holds --------------------------------------------------------------------------------------------------

    def expected(self) -> dict[bytes, Write]:
        """The last committed write of each key."""
        return {
            key: committed[-1]
            for key, writes in self.writes.items()
            if (committed := [write for write in writes if write.state == "committed"])
        }

    def check(self) -> None:
        """Whoever reads the topic from its start ends with the last value of each key.

        An open transaction holds readers back, and unsynced records are not read: then there is no end.
        """
        if self.transactions or self.resizing:
            return
        if self.chance.random() < 0.7:
            self.sync()
        elif any(each.log.flushed < each.log.end for each in self.replicas):
            return
        found = Reader(self).read(1 << 30)
        expired = "delete" in self.configs["cleanup.policy"]
        for key, last in self.expected().items():
            if key in self.unordered:
                continue
            got = found.get(key)
            if expired and got is None:
                continue
            assert (None if got is None else got[0]) == last.value, (key, got, last)
            young = self.clock.ms - last.at_ms < self.delete_retention_ms
            assert got is not None or last.value is None
            assert got is not None or not young, "a tombstone is gone too early"


class Reader:
    """A reader of committed records that keeps to the gates; it materialises the topic, and checks each key's order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.positions: dict[int, int] = {}
        self.state: dict[bytes, tuple[bytes | None, int]] = {}
        """By key: its last value, and the number of the write."""

    def read(self, count: int) -> dict[bytes, tuple[bytes | None, int]]:
        """Read some records, wherever the gates let it."""
        world, lineage = self.world, self.world.lineage()
        logs = {each.name.partition: each for each in world.replicas}
        self.positions = {
            number: min(max(self.positions.get(number, 0), each.log.log_start), each.log.end)
            for number, each in logs.items()
        }
        left = {number: list(_committed(logs[number], self.positions[number])) for number in logs}
        while count > 0:
            limits = lineage.deliverable(self.positions)
            moved = False
            for number in world.chance.sample(sorted(logs), len(logs)):
                limit = logs[number].last_stable_offset if limits[number] is None else limits[number]
                assert limit is not None
                limit = min(limit, logs[number].last_stable_offset)
                if left[number] and left[number][0][0] < limit:
                    offset, key, value = left[number].pop(0)
                    self.take(key, value)
                    self.positions[number] = offset + 1
                    count -= 1
                    moved = True
                    break
                if self.positions[number] < limit:
                    self.positions[number] = limit
                    moved = True
                    break
            if not moved:
                break
        return self.state

    def take(self, key: bytes, value: bytes | None) -> None:
        """Find the write of a record: a value names it; tombstones are told apart by what was read before."""
        writes = self.world.writes[key]
        before = self.state.get(key, (None, -1))[1]
        if value is not None:
            (number,) = (write.number for write in writes if write.value == value)
        else:
            later = [write.number for write in writes if write.value is None and write.number >= before]
            number = later[0] if later else -1
        if key not in self.world.unordered:
            assert number >= before, f"{key!r}: write {number} after {before}"
        self.state[key] = (value, number)


def _committed(partition: Partition, start: int) -> Iterator[tuple[int, bytes, bytes | None]]:
    """The committed records of a partition below its last stable offset, from `start` on."""
    aborted = Aborted(partition.table.aborted)
    for piece in partition.log.slices():  # type: ignore[union-attr]
        view = piece.view()
        for position, header in headers(view):
            if header.is_control or aborted.has(header) or header.base_offset >= partition.last_stable_offset:
                continue
            batch = view[position : position + header.size]
            for record in records(header, batch):
                if record.offset >= start and record.key is not None:
                    yield record.offset, record.key, _value(record.data)


def _value(data: memoryview) -> bytes | None:
    from anabranch.records.rows import iterate

    (span,) = iterate(data, 1, 0)
    return None if span.value_end < 0 else bytes(data[span.value_start : span.value_end])
