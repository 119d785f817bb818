"""Where groups began in topics that were resized: what existed then is written down with the group, not guessed.

`auto.offset.reset` of a client applies to a partition that existed when its group first subscribed to the topic. A
partition that appeared later begins at its log start for every client, because the coordinator writes that position
itself (ordering.md, section 8). A group without a record began while the topic had the partitions of its creation.
A partition that was removed and made again appeared later, whether anybody has seen it gone or not: a beginning names
the lives that partitions had then (`image.Life`; ADR 0033).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import NamedTuple
from uuid import UUID

from anabranch.machines.groups.image import FIRST_LIFE, TopicImage
from anabranch.machines.groups.positions import Position, position_record
from anabranch.machines.groups.records import CoordinatorRecord, GroupTopicStartKey, GroupTopicStartValue

NOT_NOTED = -1


class Start(NamedTuple):
    """The partitions of one topic when a group began in it, each with its log end then (-1: not noted)."""

    ends: dict[int, int]
    latest: frozenset[int] = frozenset()
    """Some partitions whose owners' resets asked for the latest offset (`resets`)."""
    other: bool = False
    """Whether the reset of an owner asked for any other offset."""
    waited: frozenset[int] = frozenset()
    """The partitions that waited at a gate while the group had no committed offset of them."""
    lives: Mapping[int, int] = {}
    """Which life of a partition existed, where that was not the first (`image.Life.born`)."""

    def has(self, topic: TopicImage, partition: int) -> bool:
        """Whether a partition existed then, in the life that it has now."""
        return partition in self.ends and self.lives.get(partition, 0) == topic.life(partition).born

    def trimmed(self, topic: TopicImage) -> Start:
        """The same without partitions that are no more: one that is made again appeared later."""
        ends = {number: end for number, end in self.ends.items() if topic.has(number) and self.has(topic, number)}
        if len(ends) == len(self.ends):
            return self
        lives = {number: born for number, born in self.lives.items() if number in ends}
        return Start(ends, self.latest & ends.keys(), self.other, self.waited & ends.keys(), lives)


class Starts:
    """The starts of a shard's groups; `apply` changes them, decisions look."""

    def __init__(self) -> None:
        self._of: dict[str, dict[UUID, Start]] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Starts) and self._of == other._of

    __hash__ = None  # type: ignore[assignment]

    def apply(self, key: GroupTopicStartKey, value: GroupTopicStartValue | None) -> None:
        """Fold a record."""
        known = self._of.setdefault(key.group_id, {})
        if value is None:
            known.pop(key.topic_id, None)
        else:
            ends = dict(zip(value.partitions, value.ends, strict=True))
            lives = {number: born for number, born in zip(value.partitions, value.lives, strict=False) if born}
            known[key.topic_id] = Start(ends, frozenset(value.latest), value.other, frozenset(value.waited), lives)
        if not known:
            del self._of[key.group_id]

    def groups(self) -> Set[str]:
        """The groups whose beginnings are written down."""
        return self._of.keys()

    def get(self, group_id: str, topic_id: UUID) -> Start | None:
        """Where a group began in a topic, if the topic was resized since or before."""
        return self._of.get(group_id, {}).get(topic_id)

    def topics_of(self, group_id: str) -> Set[UUID]:
        """The topics that a group's beginnings are written down of."""
        return self._of.get(group_id, {}).keys()

    def existed(self, group_id: str, topic: TopicImage, partition: int) -> bool:
        """Whether a partition existed when the group first subscribed to its topic."""
        start = self.get(group_id, topic.topic_id)
        if start is None:
            return partition in topic.first_partitions and topic.life(partition) == FIRST_LIFE
        return start.has(topic, partition)

    def noted_end(self, group_id: str, topic: TopicImage, partition: int) -> int:
        """The log end of a partition when the group began; -1 where it was not noted."""
        start = self.get(group_id, topic.topic_id)
        return start.ends[partition] if start is not None and start.has(topic, partition) else NOT_NOTED

    def waited(self, group_id: str, topic: TopicImage, partition: int) -> bool:
        """Whether a partition is known to have waited at a gate while the group had no committed offset of it."""
        start = self.get(group_id, topic.topic_id)
        return start is not None and partition in start.waited and start.has(topic, partition)

    def reads_from_end(
        self, group_id: str, topic_id: UUID, has_committed: Callable[[int], bool], *, stands_late: bool
    ) -> bool:
        """Whether the group is known to read a topic from its end (`resets`).

        `stands_late`: an owner without a commit was found behind the log start. That alone says nothing: it may have
        found no record there, or not have begun for all of its time.
        """
        start = self.get(group_id, topic_id)
        if start is None or start.other or not start.latest:
            return False
        return stands_late or any(has_committed(number) for number in start.latest)

    def reads_from_beginning(self, group_id: str, topic_id: UUID) -> bool:
        """Whether the group is known not to read a topic from its end (`resets`)."""
        start = self.get(group_id, topic_id)
        return start is not None and start.other and not start.latest

    def settle(
        self,
        group_id: str,
        topic: TopicImage,
        lacks: Callable[[int], bool],
        lifted: Callable[[int], Position | None],
        now_ms: int,
        *,
        begun: bool,
    ) -> Iterator[CoordinatorRecord]:
        """Write down where a group begins in a resized topic, and its positions in partitions that appeared later.

        `lacks`: whether a partition has no position, and one is to be written if it appeared later. `lifted`: where the
        group goes on in one that has come back after it retired, if it was emptied before the group had read it.
        `begun`: the group subscribed to the topic, or committed offsets in it, before.
        """
        if not topic.was_resized:
            return
        start = self.get(group_id, topic.topic_id)
        existing = topic.readable
        if start is None:
            lives = {number: life.born for number, life in topic.lives.items() if not begun and topic.has(number)}
            ends = (
                {number: NOT_NOTED for number in existing if self.existed(group_id, topic, number)}
                if begun
                else {number: topic.log_end(number) for number in existing}
            )
            yield start_record(group_id, topic.topic_id, Start(ends, lives=lives))
        else:
            yield from self.trim(group_id, topic)
            ends = start.trimmed(topic).ends
        reopened = topic.reopened
        if reopened or len(ends) < len(existing):
            for number in existing:
                position = lifted(number) if number in reopened else None
                if number not in ends and lacks(number):
                    position = Position(topic.log_start(number), topic_id=topic.topic_id)
                if position is not None:
                    position = position._replace(committed_at_ms=now_ms, is_begun=False)
                    yield position_record(group_id, topic.name, number, position)

    def trim(self, group_id: str, topic: TopicImage) -> Iterator[CoordinatorRecord]:
        """Drop removed partitions from a beginning."""
        start = self.get(group_id, topic.topic_id)
        if start is not None and (kept := start.trimmed(topic)) is not start:
            yield start_record(group_id, topic.topic_id, kept)

    def of_topics_gone(self, topic_ids: Iterable[UUID]) -> Iterator[CoordinatorRecord]:
        """The tombstones of starts in all topics but these."""
        kept = set(topic_ids)
        for group_id in sorted(self._of):
            for topic_id in [topic_id for topic_id in self._of[group_id] if topic_id not in kept]:
                yield start_record(group_id, topic_id, None)

    def all_of(self, group_id: str) -> Iterator[CoordinatorRecord]:
        """The tombstones of all starts of a group."""
        for topic_id in self._of.get(group_id, {}):
            yield start_record(group_id, topic_id, None)


def start_record(group_id: str, topic_id: UUID, start: Start | None) -> CoordinatorRecord:
    """The record of a group's start in a topic; None: the group has none any more."""
    key = GroupTopicStartKey(group_id=group_id, topic_id=topic_id)
    if start is None:
        return CoordinatorRecord(key)
    value = GroupTopicStartValue(
        partitions=list(start.ends),
        ends=list(start.ends.values()),
        latest=sorted(start.latest),
        other=start.other,
        waited=sorted(start.waited),
        lives=[start.lives.get(number, 0) for number in start.ends] if start.lives else [],
    )
    return CoordinatorRecord(key, value)
