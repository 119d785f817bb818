"""The records of a world's topics: logs with starts, markers, layouts and removed partitions; and what groups got.

Producers are right by construction, as `test_controller` proves theirs: every record of a key lies where the layout at
the time of its sending places the key. What may go wrong is reading, and `GroupEdge` says when it does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from anabranch.base.ids import NO_LEADER_EPOCH
from anabranch.machines.clients.fetching import TopicView
from anabranch.machines.lineage import Lineage
from anabranch.machines.placement import place
from anabranch.machines.progress import NEVER_REWRITTEN, Rewritten
from anabranch.records.batch import build
from tests.support.application_edge import ApplicationEdge, Handed, Partition, Stream

if TYPE_CHECKING:
    from anabranch.machines.clients.membership.steps import Owned
    from tests.simulation.groups_client import Client
    from tests.simulation.groups_world import World

BROKER = 0
KEY_STEP = 2_654_435_761


class Sent(NamedTuple):
    """A record."""

    key: int
    number: int


NOTHING_HELD: Mapping[int, Sent] = MappingProxyType({})


@dataclass(slots=True)
class Log:
    """One partition."""

    epoch: int = 0
    """The number of the layout that rules: every layout begins a leader epoch."""
    start: int = 0
    end: int = 0
    entries: dict[int, tuple[int, Sent | None]] = field(default_factory=dict)
    """By offset: the leader epoch, and the record; None for a marker."""
    gone: dict[int, tuple[int, Sent | None]] = field(default_factory=dict)
    """The records that were deleted, or compacted away: members that had fetched them hand them out."""
    rewritten: Rewritten = NEVER_REWRITTEN

    def append(self, record: Sent | None) -> int:
        """Append a record, or a marker."""
        self.entries[self.end] = self.epoch, record
        self.end += 1
        return self.end - 1

    def delete_before(self, offset: int) -> None:
        """Delete the records before an offset."""
        for gone in range(self.start, offset):
            self.gone[gone] = self.entries.pop(gone)  # Nobody could fetch any more what was compacted away before.
        self.start = max(self.start, offset)

    def compact_away(self, offset: int) -> None:
        """Drop a record that has a newer one: nothing can be read at its offset any more."""
        self.gone[offset] = self.entries[offset]
        self.entries[offset] = self.entries[offset][0], None

    def is_compacted_away(self, offset: int) -> bool:
        """Whether there was a record at an offset, which compaction has dropped."""
        return offset in self.gone and offset in self.entries

    def sent(self, offset: int) -> tuple[int, Sent | None]:
        """Return the leader epoch and the record at an offset, deleted or not; None for a marker."""
        return self.entries.get(offset) or self.gone.get(offset, (NO_LEADER_EPOCH, None))

    def next_record(self, offset: int, has: Callable[[int], bool] = lambda _: True) -> int:
        """Return the first offset from `offset` on with a record, of a key that `has` tells of; the end without one."""
        for at in range(max(offset, self.start), self.end):
            record = self.entries[at][1]
            if record is not None and has(record.key):
                return at
        return self.end

    def fetch(self, offset: int, size_max: int) -> memoryview:
        """Return the headers of batches from `offset` on: a batch has records of one epoch."""
        data = bytearray()
        end = min(self.end, offset + size_max)
        while offset < end:
            epoch = self.entries[offset][0]
            last = offset
            while last + 1 < end and self.entries[last + 1][0] == epoch:
                last += 1
            data += build(
                b"",
                record_count=0,
                last_offset_delta=last - offset,
                base_timestamp=0,
                max_timestamp=0,
                base_offset=offset,
                leader_epoch=epoch,
            )
            offset = last + 1
        return memoryview(data)


class Topic:
    """A topic in one of its lives."""

    log_class = Log
    accepts_ranges = False
    """Whether its records may be fetched by ranges of keys."""

    def __init__(
        self,
        topic_id: UUID,
        name: str,
        count: int,
        keys: int,
        *,
        ordered: bool,
        on_append: Callable[[str, int], None],
    ) -> None:
        """`on_append` is called with the name and the partition."""
        self.topic_id = topic_id
        self.name = name
        self.keys = keys
        self.ordered = ordered
        self.on_append = on_append
        self.is_compacted = False
        self.initial = count
        self.counts = [count]
        self.layouts_ms = [0]
        """When each layout began."""
        self.ends: list[dict[int, int]] = []
        self.logs = {number: self.log_class() for number in range(count)}
        self.removed: dict[int, int] = {}
        """Partition to the offset at which its log begins when it is made again."""
        self.sent: Counter[int] = Counter()
        """By key: how many records."""
        self.places: dict[tuple[int, int], tuple[int, int]] = {}
        """(key, number) to partition and offset."""
        self.layouts: dict[tuple[int, int], int] = {}
        """(key, number) to the layout in which the record was appended."""

    @property
    def count(self) -> int:
        return self.counts[-1]

    @property
    def life(self) -> str:
        """The name of this life of the topic, for the edge."""
        return f"{self.name}#{self.topic_id.int >> 96}"

    def place_of(self, key: int) -> int:
        """Return the partition that holds a key now."""
        return place(self.hash_of(key), self.initial, self.count)

    def hash_of(self, key: int) -> int:
        """Return the placement hash of a key."""
        return key * KEY_STEP & 0x7FFFFFFF

    def loads(self, number: int) -> Sequence[float]:
        """Return the load in parts of a partition's interval; none as long as nobody has measured any."""
        return ()

    def send(self, key: int) -> None:
        """Append the next record of a key."""
        number = self.place_of(key)
        record = Sent(key, self.sent[key])
        self.sent[key] += 1
        self.places[record] = number, self.logs[number].append(record)
        self.layouts[record] = len(self.counts) - 1
        self.on_append(self.name, number)

    def compact(self, ends: Mapping[int, int]) -> int:
        """Drop all records below these ends of partitions but the last one of each key; return how many."""
        dropped = 0
        for number, end in ends.items():
            log = self.logs[number]
            for offset in range(log.start, end):
                record = log.entries[offset][1]
                if record is not None and record.number < self.sent[record.key] - 1:
                    log.compact_away(offset)
                    log.rewritten = Rewritten(log.rewritten.stamp + 1, max(log.rewritten.to, end))
                    dropped += 1
        return dropped

    def mark(self, number: int) -> None:
        """Append a transaction marker, or a record of an aborted transaction."""
        self.logs[number].append(None)
        self.on_append(self.name, number)

    def resize(self, count: int, now_ms: int) -> None:
        """End the layout: every partition that exists ends its leader epoch."""
        self.layouts_ms.append(now_ms)
        self.ends.append({number: log.end for number, log in self.logs.items()})
        self.counts.append(count)
        for number in range(count):
            if number not in self.logs:
                start = self.removed.pop(number, 0)
                self.logs[number] = self.log_class(start=start, end=start)
        for log in self.logs.values():
            log.epoch = len(self.counts) - 1

    def reap(self) -> None:
        """Remove the retiring partitions at the end that hold nothing."""
        while (last := max(self.logs)) >= self.count and self.logs[last].start == self.logs[last].end:
            self.removed[last] = self.logs.pop(last).end
            for ended in self.ends:
                ended.pop(last, None)

    @property
    def lineage(self) -> Lineage:
        """The lineage as the leaders' logs give it: of the partitions that exist."""
        ends = [{number: end for number, end in ended.items() if number in self.logs} for ended in self.ends]
        return Lineage.of_ends(self.initial, tuple(self.counts), ends)

    def view(self, *, ordered: bool) -> TopicView:
        """The metadata of a consumer; `ordered`: whether it keeps to gates."""
        epochs = {number: log.epoch for number, log in self.logs.items()}
        return TopicView(
            self.name, self.topic_id, self.lineage, dict.fromkeys(self.logs, BROKER), epochs, True, ordered
        )


class GroupEdge(ApplicationEdge):
    """The edge of one group, with the commits that its coordinator has applied."""

    def __init__(self, world: World, group_id: str, *, reads_latest: bool) -> None:
        super().__init__(
            deleted=self._is_excused,
            place_of=self._find,
            patience_ms=world.theme.poll_interval_ms,
        )
        self.reads_latest = reads_latest
        self._world = world
        self._group_id = group_id
        self._owned: set[Partition] = set()
        """The partitions that the coordinator counts as some member's."""
        self._reset_to: dict[Partition, int] = {}
        """Partitions without a commit whose owner began at the end, as `auto.offset.reset` says."""
        self._freed_ms: dict[Partition, int] = {}
        """When partitions became nobody's."""
        self._freed_at: dict[Partition, int] = {}
        """The log ends of partitions when they were last nobody's."""
        self._waits_from: dict[Partition, int] = {}
        """The log ends of partitions without a commit when members were first told that they wait."""

    def _topic(self, life: str) -> Topic | None:
        return self._world.topics_by_life.get(life)

    def _is_excused(self, partition: Partition, offset: int) -> bool:
        topic = self._topic(partition[0])
        log = None if topic is None else topic.logs.get(partition[1])
        if log is None or offset < max(log.start, self._reset_to.get(partition, 0)):
            return True
        return log.is_compacted_away(offset)

    def _is_late_by_right(self, record: Handed, last: Handed, now_ms: int) -> bool:
        passed_over = record.offset < self._reset_to.get(record.partition, 0)  # No reset is told to the next owner.
        return passed_over or super()._is_late_by_right(record, last, now_ms)

    def _find(self, stream: Stream, number: int) -> tuple[Partition, int] | None:
        topic = self._topic(stream[0])
        found = None if topic is None else topic.places.get((int(stream[1]), number))
        return None if found is None else ((stream[0], found[0]), found[1])

    def _gate_began_ms(self, record: Handed) -> int | None:
        topic = self._topic(record.partition[0])
        assert topic is not None
        layout = topic.layouts[int(record.stream[1]), record.number]
        return topic.layouts_ms[layout] if layout > 0 else None

    def _is_quiet(self, partition: Partition, now_ms: int) -> bool:
        return partition in self._owned and super()._is_quiet(partition, now_ms)

    def owned(self, partition: Partition, *, is_owned: bool, again: bool = False) -> None:
        """Note that the coordinator counts a partition as another member's from now on, or as no member's.

        `again`: of the member of a classic group that had it before the rebalance: its time goes on (ADR 0062).
        """
        now_ms = self._world.now_ms
        if again:
            parted_ms = max(self._freed_ms.get(partition, 0), self._changed_ms.get(partition, 0))
            self._changed_ms[partition] = self._changed_ms.get(partition, now_ms) + now_ms - min(parted_ms, now_ms)
        elif is_owned:
            self.progressed(partition, now_ms)
        else:
            if self._is_quiet(partition, now_ms):
                self._stalled_ms[partition] = now_ms
            self._freed_ms[partition] = now_ms
        topic = self._topic(partition[0])
        if not is_owned and topic is not None and partition[1] in topic.logs:
            self._freed_at[partition] = topic.logs[partition[1]].end
        (self._owned.add if is_owned else self._owned.discard)(partition)

    def committed_offset(self, partition: Partition) -> int | None:
        return self._world.rules.positions.committed_offset(self._group_id, *partition)

    def highest_commit(self, partition: Partition) -> int:
        return self._world.rules.positions.highest.get((self._group_id, *partition), 0)

    def assigned(self, member: str, partitions: Iterable[Partition], now_ms: int = 0) -> None:
        """Note that a member begins; that no other one has the partition is checked by `groups_rules`."""
        self._owners.clear()
        super().assigned(member, partitions, now_ms or self._world.now_ms)

    def began(self, *, is_classic: bool) -> None:
        """Note that a process begins that will be a member."""

    def granted(self, client: Client, topic: Topic, owned: Owned) -> None:
        """Note that a member begins with a partition."""
        self.assigned(client.name, [(topic.life, owned.partition)])

    def done_by(self, topic: Topic, number: int, offsets: Iterable[int]) -> None:
        """Note that an application has processed records."""

    def read_up_to(self, topic_id: UUID, number: int, *, is_committed: bool) -> int:
        """Return the highest commit of a partition, or without any the log end at which the group began; or 0."""
        topic = self._world.topic_of(topic_id)
        if topic is None:
            return 0
        place = topic.life, number
        return self.highest_commit(place) if is_committed else self._reset_to.get(place, 0)

    def _existed(self, topic: Topic, number: int) -> bool:
        """Whether a partition existed when the group first subscribed to its topic."""
        return number in self._world.rules.positions.begun.get((self._group_id, topic.life), ())

    def begins_at_end(self, topic: Topic, number: int, offset: int, *, gone: bool) -> None:
        """Check that a member that begins at the log end may: the partition was there when the group first came.

        `gone`: the member stood at an offset that was deleted, so `auto.offset.reset` applies in any case; or the topic
        may be another one to a classic member.
        """
        assert self.reads_latest
        place = topic.life, number
        if not gone:
            assert self._existed(topic, number), f"{place} appeared later, and is read from the end"
            committed = self.committed_offset(place)
            assert committed is None, f"{place} is committed at {committed}, and is read from the end"
            waits_from = self._waits_from.get(place, offset)
            assert offset <= waits_from, f"{place} waits since its log ended at {waits_from}, and is read from {offset}"
        self._reset_to[place] = max(offset, self._reset_to.get(place, 0))

    def waits(self, topic: Topic, number: int) -> None:
        """Note that a partition waits at a gate."""
        place = topic.life, number
        log = topic.logs.get(number)
        if self.reads_latest and log is not None and self._existed(topic, number) and not self.committed_offset(place):
            self._waits_from.setdefault(place, log.end)

    def is_gone(self, life: str) -> None:
        """Note that nothing is left of the group in a topic: it may begin again, at an end of then."""
        for waiting in [waiting for waiting in self._waits_from if waiting[0] == life]:
            del self._waits_from[waiting]

    def written(self, topic: Topic, number: int, offset: int) -> None:
        """Check a position that the coordinator wrote for a group that begins at the end.

        What the group has seen come is not skipped: what came after it began, or after an owner began at the end or
        let go of the partition; but for what is compacted away by now, which nobody can be given.
        """
        place = topic.life, number
        if self._existed(topic, number):
            log = topic.logs.get(number)
            begun = self._world.rules.positions.begun[self._group_id, topic.life][number]
            known = begun, self._reset_to.get(place, 0), self._freed_at.get(place, 0), 0 if log is None else log.start
            first = max(known) if log is None else log.next_record(max(known))
            assert offset <= first, f"{place} is begun at {offset}, of which the group has seen the end at {known}"
            self._reset_to[place] = max(offset, self._reset_to.get(place, 0))
        elif number in topic.logs:
            assert offset <= topic.logs[number].start, (
                f"{place} appeared later, and its position is written at {offset}"
            )

    def handed(
        self,
        member: str,
        topic: Topic,
        number: int,
        offsets: Iterable[int],
        now_ms: int,
        held: Mapping[int, Sent] = NOTHING_HELD,
    ) -> None:
        """Check records that an application is handed. OrderError.

        `held`: those that the member had fetched, also where they were compacted away since.
        """
        for offset in offsets:
            record = held.get(offset)
            if record is None and number in topic.logs:
                record = topic.logs[number].sent(offset)[1]
            if record is not None:
                handed = Handed(topic.life, str(record.key), record.number, (topic.life, number), offset)
                self.delivered(member, handed, now_ms)

    def unread(self, topic: Topic) -> str | None:
        """What of a topic the group has not been handed yet."""
        missing = self.missing({(topic.life, str(key)): count for key, count in topic.sent.items()})
        return None if not missing else f"{topic.life} is not read to the end: {sorted(missing.items())[:3]}"


class StockEdge(GroupEdge):
    """The edge of a group of stock consumers: nothing is skipped, and order is kept where stock members keep it.

    They cannot be stopped within a partition, so the records of which keys are in order are those that were written
    before a topic first shrank: each partition that appears is handed out when the group has read what comes before.
    Members of the classic protocol assign the partitions themselves: with them there is no order any more
    (docs/elastic-topics.md).
    """

    def __init__(self, world: World, group_id: str, *, reads_latest: bool) -> None:
        super().__init__(world, group_id, reads_latest=reads_latest)
        self._seen: defaultdict[Stream, set[int]] = defaultdict(set)
        self._has_been_classic = False

    def began(self, *, is_classic: bool) -> None:
        self._has_been_classic |= is_classic

    def _is_in_order(self, record: Handed) -> bool:
        """Whether a record is promised to come after those of its key that were written before it."""
        topic = self._topic(record.partition[0])
        assert topic is not None
        counts = topic.counts[: topic.layouts[int(record.stream[1]), record.number] + 1]
        return not self._has_been_classic and all(before < count for before, count in pairwise(counts))

    def delivered(self, member: str, record: Handed, now_ms: int = 0) -> None:
        """Check a record that an application is handed, where its order is promised. OrderError."""
        seen = self._seen[record.stream]
        is_new = record.number not in seen
        seen.add(record.number)
        if self._is_in_order(record):
            super().delivered(member, record, now_ms)
        elif is_new:
            self.by_partition[record.partition] += 1

    def missing(self, sent: Mapping[Stream, int], since: Mapping[Stream, int] | None = None) -> dict[Stream, list[int]]:
        """Return the numbers up to `sent` that were neither handed out nor deleted, by key."""
        found: dict[Stream, list[int]] = {}
        for stream, count in sent.items():
            left = [
                number
                for number in range(count)
                if number not in self._seen[stream] and not self._is_deleted(stream, number)
            ]
            if left:
                found[stream] = left
        return found
