"""The input and output of an assignor, as arrays: no Python object per partition or per pair.

Topics are numbered in the order of their names, members in Kafka's order (static ones first, by instance id, then the
others by member id), and every partition of every topic has one number: `first[topic] + partition`. Members that
subscribe to the same topics form a class, topics that the same classes subscribe to form a bundle. Every number
follows from the group's present state, not from its history: equal groups get equal assignments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from anabranch.base.errors import AnabranchError
from anabranch.machines.groups.assignors.model import Topic

Ints: TypeAlias = NDArray[np.int32]
Longs: TypeAlias = NDArray[np.int64]

NOBODY = -1
ABSENT, LIVE, RETIRING = 0, 1, 2
"""Kinds of a partition's number: a gap in the topic's numbering, live, retiring."""
TABLE_SIZE_MAX = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Partitions:
    """Every partition of the topics that the group subscribes to."""

    topics: tuple[Topic, ...]
    first: Ints
    """Per topic the number of its partition 0, and one more entry: the count of numbers."""
    kind: NDArray[np.int8]
    topic_of: Ints
    index: Ints
    """Per number the partition's own index in its topic."""

    @classmethod
    def of(cls, topics: Sequence[Topic]) -> Partitions:
        """Number the partitions of topics, which are in the order of their names."""
        spans = np.fromiter((_span(topic) for topic in topics), np.int32, len(topics))
        first = np.zeros(len(topics) + 1, np.int32)
        np.cumsum(spans, out=first[1:])
        kind = np.full(int(first[-1]), ABSENT, np.int8)
        for topic, start in zip(topics, first.tolist(), strict=False):
            for sort, partitions in ((LIVE, topic.partitions), (RETIRING, topic.retiring)):
                if not partitions:
                    continue
                if partitions[-1] - partitions[0] < len(partitions):
                    kind[start + partitions[0] : start + partitions[-1] + 1] = sort
                else:
                    kind[start + np.fromiter(partitions, np.int32, len(partitions))] = sort
        topic_of = np.repeat(np.arange(len(topics), dtype=np.int32), spans)
        index = np.arange(int(first[-1]), dtype=np.int32) - first[topic_of]
        return cls(tuple(topics), first, kind, topic_of, index)


def _span(topic: Topic) -> int:
    return 1 + max(topic.partitions[-1] if topic.partitions else -1, topic.retiring[-1] if topic.retiring else -1)


@dataclass(frozen=True, slots=True, eq=False)
class Subscriptions:
    """Eligible owners: pairs of a bundle of topics and a class of members, ordered by bundle, then class."""

    classes: int
    bundle_of: Ints
    """Per topic its bundle; every topic has a subscriber."""
    start: Ints
    """Per bundle its first pair, and one more entry: the count of pairs."""
    class_of: Ints
    """Per pair the class."""
    bundle: Ints
    """Per pair the bundle."""
    key: Longs
    """Per pair `bundle * classes + class`, ascending."""
    table: Ints | None
    """Per such key the pair or -1, unless that were too large."""

    @classmethod
    def of(cls, subscribed: Sequence[Ints], topics: int) -> Subscriptions:
        """Bundle topics; `subscribed` has per class its topics, ascending."""
        classes = len(subscribed)
        if classes == 1 and topics:
            one, none = np.zeros(1, np.int32), np.zeros(topics, np.int32)
            return cls(1, none, np.array([0, 1], np.int32), one, one, np.zeros(1, np.int64), one)
        sizes = np.fromiter(map(len, subscribed), np.int64, classes)
        topic = np.concatenate([*subscribed, np.empty(0, np.int32)])
        by_topic = ordered(topic)
        subscriber = np.repeat(np.arange(classes, dtype=np.int32), sizes)[by_topic]
        bounds = np.searchsorted(topic[by_topic], np.arange(topics + 1)).tolist()
        bundles: dict[bytes, int] = {}
        first_of: list[Ints] = []
        bundle_of = np.empty(topics, np.int32)
        for number in range(topics):
            mine = subscriber[bounds[number] : bounds[number + 1]]
            bundle = bundles.setdefault(mine.tobytes(), len(bundles))
            if bundle == len(first_of):
                first_of.append(mine)
            bundle_of[number] = bundle
        start = np.zeros(len(bundles) + 1, np.int32)
        np.cumsum([len(mine) for mine in first_of], out=start[1:])
        class_of = np.concatenate([*first_of, np.empty(0, np.int32)])
        bundle_of_pair = np.repeat(np.arange(len(bundles), dtype=np.int32), np.diff(start))
        key = bundle_of_pair.astype(np.int64) * classes + class_of
        table = None
        if len(bundles) * classes <= TABLE_SIZE_MAX:
            table = np.full(len(bundles) * classes, -1, np.int32)
            table[key] = np.arange(len(key), dtype=np.int32)
        return cls(classes, bundle_of, start, class_of, bundle_of_pair, key, table)

    def pair(self, bundle: Ints, of_class: Ints) -> Ints:
        """Find the pairs of bundles and classes, -1 where the class does not subscribe to the bundle."""
        if self.classes == 1:
            return bundle
        key = bundle.astype(np.int64) * self.classes + of_class
        if self.table is not None:
            found: Ints = self.table[key]
            return found
        at = np.minimum(np.searchsorted(self.key, key), len(self.key) - 1)
        return np.where(self.key[at] == key, at, -1).astype(np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """A group to assign: its partitions, its members' classes, and the present owners."""

    partitions: Partitions
    subscriptions: Subscriptions
    class_of: Ints
    """Per member its class."""
    owner: Ints
    """Per partition the member that has it in the present target, or NOBODY."""
    class_size: Longs = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "class_size", np.bincount(self.class_of, minlength=self.subscriptions.classes))

    @property
    def members(self) -> int:
        return len(self.class_of)

    def numbers(self, kind: int) -> Ints:
        """Return the partitions of a kind, ascending."""
        return np.flatnonzero(self.partitions.kind == kind).astype(np.int32)

    def bundle_of(self, numbers: Ints) -> Ints:
        """Return the bundle of each partition."""
        return self.subscriptions.bundle_of[self.partitions.topic_of[numbers]]


Assignor: TypeAlias = Callable[[Spec], Ints]
"""Gives each partition of the spec a member that subscribes to its topic, each gap NOBODY. It must not change the
spec's arrays and must depend on nothing but the spec. A spec has at least one member and one partition."""


class AssignorError(AnabranchError):
    """An assignor left a partition, or gave it to a member that does not subscribe to its topic."""


def check(spec: Spec, owner: Ints) -> None:
    """Raise AssignorError unless every partition has an owner that subscribes to it, and every gap has none."""
    if owner.shape != spec.owner.shape or owner.dtype != np.int32:
        raise AssignorError(f"expected {spec.owner.shape} int32, got {owner.shape} {owner.dtype}")
    there = spec.partitions.kind != ABSENT
    if not np.array_equal(owner != NOBODY, there):
        raise AssignorError("a partition without owner, or an owner of what is not there")
    numbers = np.flatnonzero(there).astype(np.int32)
    members = owner[numbers]
    if members.min(initial=0) < 0 or members.max(initial=0) >= spec.members:
        raise AssignorError("an owner that is no member")
    if (spec.subscriptions.pair(spec.bundle_of(numbers), spec.class_of[members]) < 0).any():
        raise AssignorError("an owner that does not subscribe")


def ordered(*keys: Ints | Longs) -> Longs:
    """Sort by the first key, then the next, stably: the positions in order. Small keys take NumPy's radix sort."""
    order: Longs | None = None
    for key in reversed(keys):
        lowest, highest = int(key.min(initial=0)), int(key.max(initial=0))
        narrow = key.astype(np.uint16) if lowest >= 0 and highest < 1 << 16 else key
        order = (
            np.argsort(narrow if order is None else narrow[order], kind="stable")
            if order is None
            else (order[np.argsort(narrow[order], kind="stable")])
        )
    assert order is not None
    return order


def places(sorted_groups: Ints) -> Longs:
    """Number the elements of each run of equal values from 0."""
    count = len(sorted_groups)
    if not count:
        return np.empty(0, np.int64)
    position = np.arange(count)
    begins = np.empty(count, np.bool_)
    begins[0] = True
    np.not_equal(sorted_groups[1:], sorted_groups[:-1], out=begins[1:])
    return position - np.maximum.accumulate(np.where(begins, position, 0))
