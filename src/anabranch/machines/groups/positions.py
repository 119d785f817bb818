"""What groups have committed: for each group and partition the next offset to read.

A position is of a topic, not of a name: it keeps the topic's id, and a topic that was made again under the same name
begins without any. Positions of a transaction wait until its marker says whether they count; until then readers that
ask for stable offsets are told to wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from anabranch.base.ids import NO_LEADER_EPOCH, NO_TOPIC_ID
from anabranch.machines.groups.records import OffsetCommitKey, OffsetCommitValue, Record


class Position(NamedTuple):
    """A committed offset."""

    offset: int
    leader_epoch: int = NO_LEADER_EPOCH
    metadata: str = ""
    committed_at_ms: int = 0
    topic_id: UUID = NO_TOPIC_ID


Partition = tuple[str, int]


@dataclass(slots=True)
class Positions:
    """All positions of a shard; `apply` and `end_transaction` change them, decisions look."""

    of_group: dict[str, dict[Partition, Position]] = field(default_factory=dict)
    pending: dict[int, dict[str, dict[Partition, Position]]] = field(default_factory=dict)
    """By producer id: what its open transaction has committed, by group."""

    def get(self, group_id: str, topic: str, partition: int) -> Position | None:
        """A group's position."""
        return self.of_group.get(group_id, {}).get((topic, partition))

    def unstable(self, group_id: str, topic: str, partition: int) -> bool:
        """Whether an open transaction has committed another position."""
        return any((topic, partition) in groups.get(group_id, {}) for groups in self.pending.values())

    def has_pending(self, group_id: str) -> bool:
        """Whether an open transaction has committed anything for the group."""
        return any(group_id in groups for groups in self.pending.values())

    def entries(self, group_id: str) -> Iterator[tuple[Partition, Position]]:
        """Everything that a group has committed."""
        yield from self.of_group.get(group_id, {}).items()

    def apply(self, key: OffsetCommitKey, value: OffsetCommitValue | None, producer_id: int = -1) -> None:
        """Fold a record; one of a producer's transaction waits for its marker."""
        at = (key.topic, key.partition)
        if producer_id >= 0:
            assert value is not None
            self.pending.setdefault(producer_id, {}).setdefault(key.group, {})[at] = _position(value)
        elif value is not None:
            self.of_group.setdefault(key.group, {})[at] = _position(value)
        else:
            committed = self.of_group.get(key.group)
            if committed is not None:
                committed.pop(at, None)
                if not committed:
                    del self.of_group[key.group]

    def end_transaction(self, producer_id: int, *, committed: bool) -> None:
        """A producer's transaction has ended."""
        for group_id, positions in self.pending.pop(producer_id, {}).items():
            if committed:
                self.of_group.setdefault(group_id, {}).update(positions)


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
