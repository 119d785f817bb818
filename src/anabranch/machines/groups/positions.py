"""What groups have committed: for each group and partition the next offset to read.

A position is of a topic, not of a name: it keeps the topic's id, and a topic that was made again under the same name
begins without any. Positions of a transaction wait until its marker says whether they count; until then readers that
ask for stable offsets are told to wait. Of two records of one partition the later one in the log counts, whenever the
transactions end that they are part of: compaction, too, knows nothing else.

A log may hold millions of positions, and few of them are asked for soon after it was loaded: those it was loaded with
stay as bytes until somebody asks for their group, or there is time (`read_some`).
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import DecodeError
from anabranch.base.ids import NO_LEADER_EPOCH, NO_TOPIC_ID
from anabranch.machines.groups.records import OffsetCommitKey, OffsetCommitValue, Record, decode_record


class Position(NamedTuple):
    """A committed offset."""

    offset: int
    leader_epoch: int = NO_LEADER_EPOCH
    metadata: str = ""
    committed_at_ms: int = 0
    topic_id: UUID = NO_TOPIC_ID


Partition = tuple[str, int]
KIND_MAX = 1
"""Keys of the kinds 0 and 1 are those of positions."""
SIZE_MIN = 2 + 2 + 2 + 4
"""Of a key: its kind, the sizes of two names, a partition."""


@dataclass(slots=True, eq=False)
class Positions:
    """All positions of a shard; `apply` and `end_transaction` change them, decisions look."""

    _of_group: dict[str, dict[Partition, Position]] = field(default_factory=dict)
    _pending: dict[int, dict[str, dict[Partition, tuple[int, Position]]]] = field(default_factory=dict)
    """By producer id: what its open transaction has committed, by group, numbered in the order of the log."""
    _applied: int = 0
    _unread: dict[bytes, list[bytes]] = field(default_factory=dict)
    """By group: the keys of those that were loaded and that nobody has asked for."""
    _raw: MutableMapping[bytes, bytes] = field(default_factory=dict)
    """Their values."""

    def __eq__(self, other: object) -> bool:
        """Whether the same is committed, and the same is pending."""
        return isinstance(other, Positions) and self._comparable() == other._comparable()

    __hash__ = None  # type: ignore[assignment]

    def _comparable(self) -> tuple[object, object]:
        while self.read_some(1_000):
            pass
        pending = {
            producer_id: {
                group: {at: position for at, (_, position) in waiting.items()}
                for group, waiting in groups.items()
                if waiting
            }
            for producer_id, groups in self._pending.items()
        }
        return self._of_group, pending

    # -- looking -------------------------------------------------------------------------------------------------------

    def get(self, group_id: str, topic: str, partition: int) -> Position | None:
        """A group's position."""
        return self._of(group_id).get((topic, partition))

    def unstable(self, group_id: str, topic: str, partition: int) -> bool:
        """Whether an open transaction has committed another position."""
        return any((topic, partition) in groups.get(group_id, {}) for groups in self._pending.values())

    def has_pending(self, group_id: str) -> bool:
        """Whether an open transaction has committed anything for the group."""
        return any(groups.get(group_id) for groups in self._pending.values())

    def entries(self, group_id: str) -> Iterator[tuple[Partition, Position]]:
        """Everything that a group has committed."""
        yield from self._of(group_id).items()

    def groups(self) -> set[str]:
        """The groups that have committed anything."""
        return self._of_group.keys() | {group.decode() for group in self._unread}

    def __contains__(self, group_id: str) -> bool:
        """Whether a group has committed anything."""
        return group_id in self._of_group or group_id.encode() in self._unread

    def _of(self, group_id: str) -> dict[Partition, Position]:
        if self._unread:
            keys = self._unread.pop(group_id.encode(), None)
            if keys is not None:
                self._read(keys)
        return self._of_group.get(group_id, {})

    # -- the fold ------------------------------------------------------------------------------------------------------

    def apply(self, key: OffsetCommitKey, value: OffsetCommitValue | None, producer_id: int = -1) -> None:
        """Fold a record; one of a producer's transaction waits for its marker."""
        at = (key.topic, key.partition)
        if producer_id >= 0:
            assert value is not None
            self._applied += 1
            groups = self._pending.setdefault(producer_id, {})
            groups.setdefault(key.group, {})[at] = self._applied, _position(value)
            return
        self._overtake(key.group, at, self._applied)
        self._put(key.group, at, None if value is None else _position(value))

    def end_transaction(self, producer_id: int, *, committed: bool) -> None:
        """A producer's transaction has ended."""
        for group_id, positions in self._pending.pop(producer_id, {}).items():
            for at, (number, position) in positions.items() if committed else ():
                self._overtake(group_id, at, number)
                self._put(group_id, at, position)

    def _put(self, group_id: str, at: Partition, position: Position | None) -> None:
        committed = self._of(group_id)
        if position is not None:
            committed[at] = position
            self._of_group[group_id] = committed
        else:
            committed.pop(at, None)
            if not committed:
                self._of_group.pop(group_id, None)

    def _overtake(self, group_id: str, at: Partition, number: int) -> None:
        """What open transactions wrote before counts no more, even if they are committed."""
        for groups in self._pending.values():
            waiting = groups.get(group_id, {})
            if at in waiting and waiting[at][0] <= number:
                del waiting[at]

    # -- loading -------------------------------------------------------------------------------------------------------

    def restore(self, raw: MutableMapping[bytes, bytes], others: list[bytes], step: int) -> Iterator[None]:
        """Take the positions of a log: the last value of every key, as bytes; yields after every `step` of them.

        `raw` is kept, and emptied as they are read. The keys of other kinds are put into `others`. DecodeError where a
        key cannot be one of a position.
        """
        self._raw = raw
        unread, left = self._unread, step
        for key in raw:
            if len(key) < 2 or key[0] or key[1] > KIND_MAX:
                others.append(key)
                continue
            end = 4 + (key[2] << 8 | key[3]) if len(key) >= SIZE_MIN else 0
            if not SIZE_MIN - 6 < end <= len(key) - (SIZE_MIN - 4):
                raise DecodeError(f"the key of a position has {len(key)} bytes: {key[:40]!r}")
            group = key[4:end]
            keys = unread.get(group)
            if keys is None:
                unread[group] = [key]
            else:
                keys.append(key)
            left -= 1
            if not left:
                left = step
                yield

    def read_some(self, count: int) -> bool:
        """Read about `count` of those that nobody has asked for; whether there are more."""
        unread = self._unread
        while unread and count > 0:
            group, keys = unread.popitem()
            now, later = keys[-count:], keys[:-count]
            self._read(now)
            count -= len(now)
            if later:
                unread[group] = later
        return bool(unread)

    def _read(self, keys: list[bytes]) -> None:
        for raw_key in keys:
            record = decode_record(raw_key, self._raw.pop(raw_key))
            assert record is not None and record.value is not None
            key = record.key
            self._of_group.setdefault(key.group, {}).setdefault((key.topic, key.partition), _position(record.value))


def _position(value: OffsetCommitValue) -> Position:
    return Position(
        value.offset,
        value.leader_epoch,
        value.metadata,
        value.commit_timestamp,
        value.topic_id,
    )


def position_record(group_id: str, topic: str, partition: int, position: Position | None) -> Record:
    """A group's position; None: it has none any more."""
    key = OffsetCommitKey(group=group_id, topic=topic, partition=partition)
    if position is None:
        return Record(key)
    value = OffsetCommitValue(
        offset=position.offset,
        leader_epoch=position.leader_epoch,
        metadata=position.metadata,
        commit_timestamp=position.committed_at_ms,
        topic_id=position.topic_id,
    )
    return Record(key, value)
