"""Committed offsets: for each group and partition the next offset to read.

A position is of a topic, not of a name: it keeps the topic's id, and a topic that was made again under the same name
begins without any. Positions of a transaction wait until its marker says whether they count; until then a fetch of
stable offsets is answered UNSTABLE_OFFSET_COMMIT. Of two records of one partition the later one in the log counts,
whenever their transactions end: compaction keeps that one, too.

A log may hold millions of positions, and few of them are asked for soon after it was loaded: those it was loaded with
stay in the log until a request for their group, or idle time (`read_some`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol
from uuid import UUID

from anabranch.base.ids import NO_LEADER_EPOCH, NO_TOPIC_ID
from anabranch.base.memory import text_size
from anabranch.machines.groups import shares
from anabranch.machines.groups.records import CoordinatorRecord, OffsetCommitKey, OffsetCommitValue, decode_record
from anabranch.machines.lineage import Frontier

NO_LAYOUT = -1
POSITION_SIZE = 400
"""Bytes of memory for a position, with its place; a little more than was measured."""


class Position(NamedTuple):
    """A committed offset."""

    offset: int
    leader_epoch: int = NO_LEADER_EPOCH
    metadata: str = ""
    committed_at_ms: int = 0
    topic_id: UUID = NO_TOPIC_ID
    opened: int = NO_LAYOUT
    """The newest layout whose gate was open when the coordinator handed the partition out (ADR 0033)."""
    frontier: Frontier | None = None
    """The next offset by key, where it is not `offset` for all keys; `offset` is the lowest (ADR 0048)."""
    ranges_since: int = 0
    """Names the individual commits above `offset` that count; 0 where none do."""
    passed: Frontier | None = None
    """By key, how far owners are known to have come, through which gates; None: as far as the frontier (ADR 0048)."""
    is_begun: bool = True
    """Whether a client has committed there; otherwise the coordinator wrote where the group is to begin."""

    @property
    def stands(self) -> Frontier:
        """The next offset to read, by key."""
        return shares.constant(self.offset) if self.frontier is None else self.frontier

    @property
    def passes(self) -> Frontier:
        """How far owners are known to have come, by key."""
        return self.stands if self.passed is None else self.passed

    @property
    def gone_through(self) -> int:
        """The offset to which owners of all keys are known to have come: gates before it were open once."""
        return self.offset if self.passed is None else shares.stable(self.passed)

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        return _size(self.metadata, sum(len(it.starts) for it in (self.frontier, self.passed) if it is not None))

    def told(self, log_start: int) -> Position:
        """The position as clients are told it: one that no client has committed is at least the log start."""
        if self.is_begun or self.offset >= log_start:
            return self
        if self.frontier is None:
            return self._replace(offset=log_start)
        return self.at(shares.at_least(self.frontier, log_start), self.passes)

    def at(self, frontier: Frontier, passed: Frontier) -> Position:
        """The position with another frontier."""
        kept = None if shares.is_constant(frontier) else frontier
        behind = None if passed == frontier else passed
        return self._replace(offset=shares.stable(frontier), frontier=kept, passed=behind)


Partition = tuple[str, int]


class Unread(Protocol):
    """The positions that a log was loaded with (`unread.Unread`)."""

    def count(self, group_id: str) -> int:
        """About how many records that are; 0 when they were taken."""

    def take(self, group_id: str) -> Mapping[bytes, bytes | None]:
        """The last value of every key of a group, once."""

    def __len__(self) -> int:
        """How many records of positions there are, with those that were taken."""

    def names(self) -> set[str]:
        """The groups that were not taken."""

    def doubtful(self) -> set[str]:
        """Those of them that may have no position any more."""

    def next_names(self) -> set[str]:
        """Some groups that were not taken; none when all were."""


@dataclass(slots=True, eq=False)
class Positions:
    """All positions of a shard; `apply` and `end_transaction` change them, decisions look."""

    _of_group: dict[str, dict[Partition, Position]] = field(default_factory=dict)
    _pending: dict[int, dict[str, dict[Partition, tuple[int, OffsetCommitValue]]]] = field(default_factory=dict)
    """By producer id: the commits of its open transaction, by group, numbered in the order of the log."""
    _pending_in: dict[str, dict[Partition, dict[int, None]]] = field(default_factory=dict)
    """By group and partition: the producers whose open transactions have committed an offset."""
    _applied: int = 0
    size: int = 0
    """Bytes of memory for the positions that were read and the ids of their groups, open transactions included."""
    unread: Unread | None = None
    """The positions of the loaded log that no request has needed yet."""
    alone: AbstractContextManager[object] = field(default_factory=nullcontext)
    """Held while those of a group are read; a lock, where threads share them."""

    def __eq__(self, other: object) -> bool:
        """Whether the same is committed, and the same is pending."""
        return isinstance(other, Positions) and self._comparable() == other._comparable()

    __hash__ = None  # type: ignore[assignment]

    def _comparable(self) -> tuple[object, object]:
        while self.read_some(1_000):
            pass
        pending = {
            (producer_id, group, at): position
            for producer_id, groups in self._pending.items()
            for group, waiting in groups.items()
            for at, (_, position) in waiting.items()
        }
        return self._of_group, pending

    # -- looking -------------------------------------------------------------------------------------------------------

    def get(self, group_id: str, topic: str, partition: int) -> Position | None:
        """A group's position."""
        return self._of(group_id).get((topic, partition))

    def unstable(self, group_id: str, topic: str, partition: int, *, but: int = -1) -> bool:
        """Whether an open transaction, of another producer than `but`, has committed another position."""
        pending = self._pending_in.get(group_id, {}).get((topic, partition), {})
        return len(pending) > (but in pending)

    def pending_in(self, group_id: str, topic: str, partition: int) -> tuple[int, ...]:
        """The producers whose open transactions have committed a position."""
        return tuple(self._pending_in.get(group_id, {}).get((topic, partition), ()))

    def pending(self, group_id: str, topic: str, partition: int, producer_id: int) -> Position | None:
        """The position that the open transaction of a producer has committed."""
        found = self._pending.get(producer_id, {}).get(group_id, {}).get((topic, partition))
        return None if found is None else _position(found[1])

    def id_size(self, group_id: str, producer_id: int = -1) -> int:
        """The memory that a group's id would take with a commit, of a producer's transaction or plain; 0 if it does."""
        if producer_id >= 0:
            return 0 if group_id in self._pending.get(producer_id, ()) else _pending_size(group_id)
        return 0 if group_id in self._of_group else text_size(group_id)

    def has_pending(self, group_id: str) -> bool:
        """Whether an open transaction has committed anything for the group."""
        return group_id in self._pending_in

    def pending_count(self, producer_id: int) -> int:
        """How many commits the open transaction of a producer holds."""
        return sum(map(len, self._pending.get(producer_id, {}).values()))

    def of_group(self, group_id: str) -> Mapping[Partition, Position]:
        """Everything that a group has committed, by topic and partition: to be looked at, as it changes."""
        return self._of(group_id)

    def entries(self, group_id: str) -> Iterator[tuple[Partition, Position]]:
        """Everything that a group has committed."""
        yield from self._of(group_id).items()

    def groups(self) -> set[str]:
        """The groups that have committed anything."""
        if self.unread is None:
            return set(self._of_group)
        for group_id in self.unread.doubtful():
            self._of(group_id)
        return self._of_group.keys() | self.unread.names()

    def names(self) -> set[str]:
        """The groups that have committed anything, and some that may have no position any more: nothing is read."""
        return self._of_group.keys() | (set() if self.unread is None else self.unread.names())

    @property
    def groups_most(self) -> int:
        """So many groups at the most have committed anything."""
        return len(self._of_group) + (0 if self.unread is None else len(self.unread))

    def __contains__(self, group_id: str) -> bool:
        """Whether a group has committed anything."""
        return bool(self._of(group_id))

    def _of(self, group_id: str) -> dict[Partition, Position]:
        if self.unread is not None:
            with self.alone:
                self._read(group_id)
        return self._of_group.get(group_id, {})

    def _read(self, group_id: str) -> None:
        for raw_key, raw_value in () if self.unread is None else self.unread.take(group_id).items():
            record = decode_record(raw_key, raw_value)
            assert record is not None
            self._put(group_id, (record.key.topic, record.key.partition), record.value)

    def read_of_group(self, group_id: str) -> Mapping[Partition, Position]:
        """What was read of a group, or committed since."""
        return self._of_group.get(group_id, {})

    def unread_count(self, group_id: str) -> int:
        """About how many positions of a group are still to be read: the next look at any of them reads all."""
        return 0 if self.unread is None else self.unread.count(group_id)

    def read_some(self, count: int) -> bool:
        """Read about `count` of the unread positions; whether more are left."""
        while self.unread is not None and count > 0:
            names = self.unread.next_names()
            if not names:
                self.unread = None
            for group_id in names:
                count -= len(self._of(group_id))
        return self.unread is not None

    # -- the fold ------------------------------------------------------------------------------------------------------

    def apply(self, key: OffsetCommitKey, value: OffsetCommitValue | None, producer_id: int = -1) -> None:
        """Fold a record; one of a producer's transaction waits for its marker."""
        at = (key.topic, key.partition)
        if producer_id >= 0:
            assert value is not None
            self._applied += 1
            groups = self._pending.setdefault(producer_id, {})
            if key.group not in groups:
                self.size += _pending_size(key.group)
            waiting = groups.setdefault(key.group, {})
            self._pending_in.setdefault(key.group, {}).setdefault(at, {})[producer_id] = None
            if at in waiting:
                self.size -= _size_of(waiting[at][1])
            waiting[at] = self._applied, value
            self.size += _size_of(value)
            return
        self._overtake(key.group, at, self._applied)
        self._of(key.group)
        self._put(key.group, at, value)

    def end_transaction(self, producer_id: int, *, committed: bool) -> list[tuple[str, Partition]]:
        """A producer's transaction has ended; return the groups and partitions of which it changes the position."""
        changed: list[tuple[str, Partition]] = []
        for group_id, positions in self._pending.pop(producer_id, {}).items():
            self.size -= _pending_size(group_id) + sum(_size_of(value) for _, value in positions.values())
            for at in positions:
                self._ended(group_id, at, producer_id)
            for at, (number, value) in positions.items() if committed else ():
                self._overtake(group_id, at, number)
                self._of(group_id)
                self._put(group_id, at, value)
                changed.append((group_id, at))
        return changed

    def _put(self, group_id: str, at: Partition, value: OffsetCommitValue | None) -> None:
        committed = self._of_group.get(group_id, {})
        before = committed.pop(at, None)
        if before is not None:
            self.size -= before.size
        if value is not None:
            after = _position(value)
            self.size += after.size
            if group_id not in self._of_group:
                self.size += text_size(group_id)
            self._of_group.setdefault(group_id, {})[at] = after
        elif not committed and self._of_group.pop(group_id, None) is not None:
            self.size -= text_size(group_id)

    def _overtake(self, group_id: str, at: Partition, number: int) -> None:
        """Drop the earlier commits of open transactions for this partition."""
        for producer_id in list(self._pending_in.get(group_id, {}).get(at, ())):
            waiting = self._pending[producer_id][group_id]
            if waiting[at][0] <= number:
                self.size -= _size_of(waiting.pop(at)[1])
                self._ended(group_id, at, producer_id)

    def _ended(self, group_id: str, at: Partition, producer_id: int) -> None:
        """A producer's transaction has no offset of a partition any more."""
        partitions = self._pending_in[group_id]
        del partitions[at][producer_id]
        if not partitions[at]:
            del partitions[at]
        if not partitions:
            del self._pending_in[group_id]


def _size(metadata: str, steps: int) -> int:
    return POSITION_SIZE + text_size(metadata) + 80 * steps


def _pending_size(group_id: str) -> int:
    """The memory for the id of a group for which an open transaction commits: by its producer, and by its group."""
    return 2 * text_size(group_id)


def _size_of(value: OffsetCommitValue) -> int:
    return _size(value.metadata, len(value.frontier_starts) + len(value.passed_starts))


def _position(value: OffsetCommitValue) -> Position:
    return Position(
        value.offset,
        value.leader_epoch,
        value.metadata,
        value.commit_timestamp,
        value.topic_id,
        layout_of(value.opened),
        shares.frontier_of(value.frontier_starts, value.frontier_offsets, value.offset)
        if value.frontier_starts
        else None,
        value.ranges_since,
        shares.frontier_of(value.passed_starts, value.passed_offsets, 0) if value.passed_starts else None,
        value.opened >= NO_LAYOUT,
    )


def layout_of(opened: int) -> int:
    """The layout of `OffsetCommitValue.opened`, which of a position that no client has committed is below -1."""
    return opened if opened >= NO_LAYOUT else _mirrored(opened)


def _mirrored(layout: int) -> int:
    """-1, 0, 1 ... as -2, -3, -4 ..., and back."""
    return 2 * NO_LAYOUT - 1 - layout


def position_record(group_id: str, topic: str, partition: int, position: Position | None) -> CoordinatorRecord:
    """A group's position; None: it has none any more."""
    key = OffsetCommitKey(group=group_id, topic=topic, partition=partition)
    if position is None:
        return CoordinatorRecord(key)
    value = OffsetCommitValue(
        offset=position.offset,
        leader_epoch=position.leader_epoch,
        metadata=position.metadata,
        commit_timestamp=position.committed_at_ms,
        topic_id=position.topic_id,
        opened=position.opened if position.is_begun else _mirrored(position.opened),
        ranges_since=position.ranges_since,
    )
    if position.frontier is not None:
        value.frontier_starts = position.frontier.starts
        value.frontier_offsets = position.frontier.offsets
    if position.passed is not None:
        value.passed_starts = position.passed.starts
        value.passed_offsets = position.passed.offsets
    return CoordinatorRecord(key, value)
