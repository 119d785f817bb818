"""The topics of the cluster for a coordinator: a snapshot that the shell replaces when the metadata changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from uuid import UUID

from anabranch.machines.keyspace import Interval, interval
from anabranch.machines.lineage import Lineage


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
    loads: Callable[[int], Sequence[float]] = field(default=lambda _: ())
    """The load of a partition in equal parts of its interval, ascending, in any unit; empty where none was measured."""

    @property
    def was_resized(self) -> bool:
        """Whether some of its partitions may have appeared after its creation."""
        return self.initial > 0 or (self.lineage is not None and self.lineage.current > 0)

    @property
    def first_partitions(self) -> range:
        """The partitions that the topic was created with."""
        return range(self.initial or (len(self.partitions) if self.lineage is None else self.lineage.initial))

    @property
    def is_gated(self) -> bool:
        """Whether partitions may wait for others."""
        return self.lineage is not None and self.lineage.current > 0

    def interval(self, partition: int) -> Interval:
        """The keys that a partition holds, or held when it was the newest that still took records."""
        initial = len(self.first_partitions)
        return interval(partition, max(len(self.partitions), partition + 1, initial), max(1, initial))

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
        return partition in self.partitions or partition in self.retiring

    def ever_had(self, partition: int) -> bool:
        """Whether there is such a partition, or was one that is removed: a commit in it may be late."""
        return 0 <= partition < self.highest_count or self.has(partition)

    @property
    def signature(self) -> tuple[object, ...]:
        """The parts of a topic that assignments depend on."""
        return (self.topic_id, tuple(self.partitions), tuple(self.retiring))


@dataclass(frozen=True)
class Image:
    """All topics. Versions grow; equal versions are equal images."""

    version: int = 0
    by_name: Mapping[str, TopicImage] = field(default_factory=dict)

    @cached_property
    def by_id(self) -> Mapping[UUID, TopicImage]:
        """The topics by id."""
        return {topic.topic_id: topic for topic in self.by_name.values()}

    def name_of(self, topic_id: UUID) -> str:
        """A topic's name, empty if it is gone."""
        topic = self.by_id.get(topic_id)
        return "" if topic is None else topic.name
