"""Topics whose records can be fetched by ranges of keys, and the edge of groups that share their partitions.

The log keeps whole record batches, one for each record; a fetch of some ranges is filtered by the rules that ship
(`records.filtering`, and the selection of `machines.partition.sharing`). The edge says by key what `GroupEdge` says by
partition: what was committed before a member began with a key is not handed to it again, nor is a record of a key of
which a later one was.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

from anabranch.base.limits import EXPANDED_SIZE_MAX
from anabranch.machines.key_ranges import WHOLE, Ranges
from anabranch.machines.keyspace import spread
from anabranch.machines.partition.sharing import Asked, selection_of
from anabranch.records.batch import build
from anabranch.records.filtering import Spread, scatter
from anabranch.records.hashing import murmur2
from anabranch.records.key_values import encode_pairs
from tests.simulation.groups_records import GroupEdge, Log, Sent, Topic
from tests.support.application_edge import Handed, OrderError, Partition

if TYPE_CHECKING:
    from anabranch.machines.clients.membership.steps import Owned
    from tests.simulation.groups_client import Client
    from tests.simulation.groups_theme import Theme

LOAD_PARTS = 8
EPOCH_AT = 12
"""Where a batch has its leader epoch."""


def below(offset: int) -> int:
    """The set of the offsets below one, as bits."""
    return (1 << offset) - 1


@dataclass(slots=True)
class SharedLog(Log):
    """One partition."""

    batches: dict[int, bytes] = field(default_factory=dict)

    def append(self, record: Sent | None) -> int:
        """Append a record, or a batch without any."""
        if record is None:
            batch = build(b"", record_count=0, last_offset_delta=0, base_timestamp=0, max_timestamp=0)
        else:
            batch = encode_pairs([(b"%d" % record.key, b"%d" % record.number)], 0)
        batch[:8] = self.end.to_bytes(8, "big")
        batch[EPOCH_AT : EPOCH_AT + 4] = self.epoch.to_bytes(4, "big")
        self.batches[self.end] = bytes(batch)
        return Log.append(self, record)

    def fetch(self, offset: int, size_max: int) -> memoryview:
        """Return the batches from `offset` on."""
        return memoryview(b"".join(self.batches[at] for at in range(offset, min(self.end, offset + size_max))))

    def fetch_some(
        self, offset: int, size_max: int, asked: Asked, spread_in: Callable[[int], Spread]
    ) -> tuple[memoryview, int]:
        """Return the batches of what is asked for from `offset` on, and up to where was looked.

        `spread_in` tells how keys were spread in the layout of an epoch: a pass is within one.
        """
        found, end = b"", min(self.end, offset + size_max)
        while offset < end:
            epoch, first = self.entries[offset][0], offset
            while offset < end and self.entries[offset][0] == epoch:
                offset += 1
            block = memoryview(b"".join(self.batches[at] for at in range(first, offset)))
            scattered = scatter(
                block,
                selection_of([asked]),
                spread_in(epoch),
                record_size_max=EXPANDED_SIZE_MAX,
                work_size_max=EXPANDED_SIZE_MAX,
            )
            found += scattered.data[0]
        return memoryview(found), end


class SharedTopic(Topic):
    """A topic whose partitions members may share, as long as it accepts that."""

    log_class = SharedLog
    logs: dict[int, SharedLog]  # type: ignore[assignment]
    tells_load = False

    @classmethod
    def by_chance(cls, chance: random.Random, theme: Theme) -> Callable[..., SharedTopic]:
        """Return what makes one."""
        accepts, tells = chance.random() < 0.9, chance.random() < theme.by_load
        return partial(cls._made, accepts, tells)

    @classmethod
    def _made(cls, accepts: bool, tells: bool, *given: object, **more: object) -> SharedTopic:
        topic = cls(*given, **more)  # type: ignore[arg-type]
        topic.accepts_ranges, topic.tells_load = accepts, tells
        topic.refused_ms = -1
        return topic

    refused_ms: int
    """Until when its records were not to be fetched by ranges; now where they are not."""

    def accept(self, now_ms: int) -> None:
        """Switch `accept.range.fetch`."""
        self.accepts_ranges = not self.accepts_ranges
        self.refused_ms = now_ms

    def hash_of(self, key: int) -> int:
        return murmur2(b"%d" % key) & 0x7FFFFFFF

    @cached_property
    def places_of_keys(self) -> Sequence[int]:
        """Where each key lies in the key space."""
        return [spread(murmur2(b"%d" % key), self.initial) for key in range(self.keys)]

    def spread_in(self, number: int, epoch: int) -> Spread:
        """How keys were spread when the layout of an epoch ruled."""
        return Spread(self.initial, self.lineage.held(number, epoch))

    def loads(self, number: int) -> Sequence[float]:
        if not self.tells_load or number not in self.logs:
            return ()
        held = self.lineage.held(number, self.lineage.current)
        loads = [0.0] * LOAD_PARTS
        for _, record in self.logs[number].entries.values():
            if record is not None:
                part = (self.places_of_keys[record.key] - held.start) * LOAD_PARTS // held.size
                loads[min(max(part, 0), LOAD_PARTS - 1)] += 1
        return loads

    def offsets_of(self, number: int, keys: Ranges) -> int:
        """The offsets of records of some keys, as bits."""
        log = self.logs.get(number)
        found = 0
        for offset, (_, record) in () if log is None else log.entries.items():
            if record is not None and (keys == WHOLE or self.has(keys, record.key)):
                found |= 1 << offset
        return found

    def has(self, keys: Ranges, key: int) -> bool:
        """Whether a key lies in ranges."""
        place = self.places_of_keys[key]
        return any(start <= place <= end for start, end in keys)


@dataclass(slots=True)
class _Floor:
    """What was done of a partition when a member began with its keys, as bits of offsets."""

    done: int = 0
    below_stable: int = 0
    """Of that what lies below the stable offset: all that counts for members that know of nothing else."""
    since_ms: int = 0


class SharedEdge(GroupEdge):
    """The edge of one group whose members share partitions."""

    def __init__(self, *given: object, **more: object) -> None:
        super().__init__(*given, **more)  # type: ignore[arg-type]
        self._begun: dict[tuple[str, Partition], _Floor] = {}
        self.finished: dict[Partition, int] = {}
        """What applications have processed, as bits of offsets."""
        self._plain: set[str] = set()
        """Members that know of stable offsets only."""

    def granted(self, client: Client, topic: Topic, owned: Owned) -> None:
        assert isinstance(topic, SharedTopic)
        place = topic.life, owned.partition
        if client.knows_stable_only:
            self._plain.add(client.name)
        done = self._world.rules.done
        assert done is not None
        known, stable = done.done(self._group_id, place), below(self.committed_offset(place) or 0)
        floor = self._begun.setdefault((client.name, place), _Floor())
        keys = topic.offsets_of(owned.partition, owned.keys or WHOLE)
        floor.done = floor.done & ~keys | known & keys
        floor.below_stable = floor.below_stable & ~keys | known & stable & keys
        floor.since_ms = self._world.now_ms
        if not owned.keys:
            self.assigned(client.name, [place])

    def done_by(self, topic: Topic, number: int, offsets: Iterable[int]) -> None:
        """Note that an application has processed records."""
        place = topic.life, number
        found = self.finished.get(place, 0)
        for offset in offsets:
            found |= 1 << offset
        self.finished[place] = found

    def is_finished(self, topic: Topic, number: int, offsets: int) -> bool:
        """Whether applications have processed all of some offsets, as far as they had to."""
        place = topic.life, number
        return not offsets & ~self.finished.get(place, 0) & ~below(self._reset_to.get(place, 0))

    def _delivered_again(self, member: str, record: Handed, now_ms: int) -> None:
        del now_ms  # What comes again is judged by what is done, not by time.
        floor = self._begun.get((member, record.partition), _Floor())
        topic = self._topic(record.partition[0])
        assert isinstance(topic, SharedTopic)
        refused_ms = topic.refused_ms if topic.accepts_ranges else self._world.now_ms
        if refused_ms >= floor.since_ms:  # Clients hash no keys: what they cannot leave out they read again.
            self.repetitions += 1
            return
        done = floor.below_stable if member in self._plain else floor.done
        if done >> record.offset & 1:
            raise OrderError(f"{member} was handed {record} again, which was committed before it began with the key")
        log = topic.logs[record.partition[1]]
        rules = self._world.rules.done
        assert rules is not None
        if (self._group_id, *record.partition) in rules.put_back:
            self.repetitions += 1
            return
        later = done & ~below(record.offset + 1)
        for offset in range(record.offset + 1, later.bit_length()):
            entry = log.entries.get(offset)
            if later >> offset & 1 and entry is not None and entry[1] is not None and str(entry[1].key) == record.key:
                raise OrderError(f"{member} was handed {record} again, although {offset} of the key was committed")
        self.repetitions += 1

    def _predecessor_committed(
        self, member: str, record: Handed, partition: Partition, offset: int, now_ms: int
    ) -> None:
        done = self._world.rules.done
        assert done is not None
        if not done.ever(self._group_id, partition) >> offset & 1:
            super()._predecessor_committed(member, record, partition, offset, now_ms)
