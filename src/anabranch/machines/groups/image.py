"""The topics of the cluster for a coordinator: a snapshot that the shell replaces when the metadata changes."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import NamedTuple
from uuid import UUID

from anabranch.base.ids import NO_TOPIC_ID
from anabranch.machines.keyspace import Interval, interval
from anabranch.machines.lineage import BEYOND, Lineage
from anabranch.machines.progress import NEVER_REWRITTEN, Rewritten

CHANGES_REMEMBERED_MAX = 20_000


class Change(NamedTuple):
    """What became of the image before it."""

    version: int
    names: frozenset[str]
    """The topics that came, went or changed."""


class Life(NamedTuple):
    """A partition that was removed, and made again."""

    born: int
    """Tells it from its former lives: ascending, 0 of the first."""
    begins: int
    """The offset at which the former life ended: positions below it are of that."""


FIRST_LIFE = Life(0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class TopicImage:
    """One topic; a new object whenever anything in it changed."""

    topic_id: UUID
    name: str
    partitions: Sequence[int]
    """The live partitions, ascending."""
    retiring: Sequence[int] = ()
    """Partitions that take no more appends and are read until they are empty, ascending."""
    lineage: Lineage | None = None
    """Of a topic that was resized and keeps keys in order; None where no partition waits for another."""
    log_start: Callable[[int], int] = field(default=lambda _: 0)
    """The log start of a partition: the position of a partition without a committed offset."""
    log_end: Callable[[int], int] = field(default=lambda _: 0)
    """The log end of a partition."""
    initial: int = 0
    """Partition count at the creation of a topic that was resized, with or without ordered delivery; otherwise 0."""

    highest_count: int = 0
    """The most partitions that the topic ever had at a time; 0 where it is as many as it has now."""

    accepts_ranges: bool = False
    """Whether its records may be fetched by ranges of keys, so that members can share its partitions."""
    loads: Callable[[int, Interval], Sequence[float]] = field(default=lambda *_: ())
    """The load of a partition in equal parts of an interval, ascending, in any unit; empty where none was measured."""
    stable_end: Callable[[int], int] = field(default=lambda _: BEYOND)
    """Where the first open transaction of a partition begins, or the log end: nobody who reads what is committed is
    given a record from there on."""
    is_open: Callable[[int], bool] = field(default=lambda _: True)
    """Whether the log of a partition is open: otherwise its start and end are not known, and told as 0."""
    lives: Mapping[int, Life] = field(default_factory=dict)
    """Of partitions that were removed, and made again."""
    rewritten: Callable[[int], Rewritten] = field(default=lambda _: NEVER_REWRITTEN)
    """Which records of a partition compaction may have dropped."""

    @property
    def was_resized(self) -> bool:
        """Whether some of its partitions may have appeared after its creation."""
        return self.initial > 0 or (self.lineage is not None and self.lineage.current > 0)

    @property
    def first_partitions(self) -> range:
        """The partitions that the topic was created with."""
        return range(self.initial or (len(self.partitions) if self.lineage is None else self.lineage.initial))

    def life(self, partition: int) -> Life:
        """The present life of a partition."""
        return self.lives.get(partition, FIRST_LIFE)

    @property
    def reopened(self) -> range:
        """A range with all partitions that have retired and come back, as far as layouts are known; empty if none."""
        high = top = 0
        low: int | None = None
        for count in () if self.lineage is None else self.lineage.counts:
            if low is not None and count > low:
                top = max(top, count)
            if count < high:
                low = count if low is None else min(low, count)
            high = max(high, count)
        return range(low or 0, top)

    @property
    def is_gated(self) -> bool:
        """Whether partitions may wait for others."""
        return self.lineage is not None and self.lineage.current > 0

    def interval(self, partition: int) -> Interval:
        """The keys that a partition holds, or held when it was the newest that still took records."""
        initial = len(self.first_partitions)
        return interval(partition, max(len(self.partitions), partition + 1, initial), max(1, initial))

    def load(self, partition: int) -> Sequence[float]:
        """The load of a partition in equal parts of its interval."""
        return self.loads(partition, self.interval(partition))

    @property
    def readable(self) -> tuple[int, ...]:
        """The live and the retiring partitions."""
        return (*self.partitions, *self.retiring)

    @property
    def size(self) -> int:
        """The number of readable partitions."""
        return len(self.partitions) + len(self.retiring)

    def has(self, partition: int) -> bool:
        """Whether a partition is readable."""
        return _holds(self.partitions, partition) or _holds(self.retiring, partition)

    def ever_had(self, partition: int) -> bool:
        """Whether there is such a partition, or was one that is removed: a commit in it may be late."""
        return 0 <= partition < self.highest_count or self.has(partition)

    @property
    def signature(self) -> tuple[object, ...]:
        """The parts of a topic that assignments depend on."""
        return (self.topic_id, tuple(self.partitions), tuple(self.retiring))


def _holds(numbers: Sequence[int], number: int) -> bool:
    """Whether an ascending sequence has a number: a search by halves, as a topic may have 100,000 partitions."""
    at = bisect_left(numbers, number)
    return at < len(numbers) and numbers[at] == number


@dataclass(frozen=True, eq=False)
class Image:
    """All topics. Versions grow; equal versions are equal images."""

    version: int = 0
    by_name: Mapping[str, TopicImage] = field(default_factory=dict)
    history: deque[Change] = field(
        default_factory=lambda: deque(maxlen=CHANGES_REMEMBERED_MAX), compare=False, repr=False
    )
    """The latest changes, shared by all images that follow each other."""

    def next(self, topics: Mapping[str, TopicImage | None]) -> Image:
        """The image after a change of some topics; None for those that are gone. Copies, but compares nothing."""
        by_name, by_id = dict(self.by_name), dict(self.by_id)
        for name, topic in topics.items():
            before = by_name.pop(name, None) if topic is None else by_name.get(name)
            if before is not None:
                del by_id[before.topic_id]
            if topic is not None:
                by_name[name] = by_id[topic.topic_id] = topic
        self.history.append(Change(self.version + 1, frozenset(topics)))
        after = Image(self.version + 1, by_name, self.history)
        after.__dict__["by_id"] = by_id
        return after

    def since(self, version: int) -> frozenset[str] | None:
        """The names of the topics that came, went or changed since an earlier version; None if that is not known."""
        if version == self.version:
            return frozenset()
        if not self.history or not self.history[0].version <= version + 1 <= self.version <= self.history[-1].version:
            return None
        first = version + 1 - self.history[0].version
        # At once: another thread may add to the history, which drops the oldest change then.
        changes = list(islice(self.history, first, first + self.version - version))
        if [change.version for change in (*changes[:1], *changes[-1:])] != [version + 1, self.version]:
            return None
        names = [change.names for change in changes]
        return names[0] if len(names) == 1 else frozenset().union(*names)

    def differences(self, before: Image) -> frozenset[str]:
        """The names of the topics that are not the same as in an earlier image."""
        known = self.since(before.version) if before.history is self.history else None
        if known is not None:
            return known
        return frozenset(
            name
            for name in self.by_name.keys() | before.by_name.keys()
            if self.by_name.get(name) is not before.by_name.get(name)
        )

    @cached_property
    def by_id(self) -> Mapping[UUID, TopicImage]:
        """The topics by id."""
        return {topic.topic_id: topic for topic in self.by_name.values()}

    def id_of(self, name: str) -> UUID:
        """The id of the topic that has a name now; NO_TOPIC_ID if none has."""
        topic = self.by_name.get(name)
        return NO_TOPIC_ID if topic is None else topic.topic_id

    def name_of(self, topic_id: UUID) -> str:
        """A topic's name, empty if it is gone."""
        topic = self.by_id.get(topic_id)
        return "" if topic is None else topic.name
