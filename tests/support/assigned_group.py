"""A group with its assignment, as in a coordinator: plain mappings, and the invariants of a target assignment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from uuid import UUID, uuid5

from anabranch.machines.groups.assignors import Assignment, Assignors, Subscriber
from anabranch.machines.groups.assignors.planner import Planner

TopicPartition = tuple[str, int]


@dataclass(frozen=True)
class FakeTopic:
    """A topic's metadata."""

    name: str
    topic_id: UUID
    partitions: Sequence[int]
    retiring: Sequence[int] = ()


def topic(name: str, partitions: int, retiring: int = 0, life: int = 0) -> FakeTopic:
    """A topic with so many live partitions and then so many retiring ones; another life is another topic id."""
    topic_id = uuid5(UUID(int=life), name)
    return FakeTopic(name, topic_id, range(partitions), tuple(range(partitions, partitions + retiring)))


@dataclass
class AssignedGroup:
    """Members, topics and the target assignment; `plan` runs the planner and installs its result."""

    assignor: str = "uniform"
    topics: dict[str, FakeTopic] = field(default_factory=dict)
    subscribers: dict[str, Subscriber] = field(default_factory=dict)
    target: dict[str, Assignment] = field(default_factory=dict)
    planner: Planner = field(default_factory=Planner)
    assignors: Assignors = field(default_factory=Assignors)

    def put(self, *topics: FakeTopic) -> None:
        self.topics = {**self.topics, **{each.name: each for each in topics}}

    def join(self, member: str, topics: Iterable[str], instance_id: str | None = None) -> None:
        self.subscribers[member] = Subscriber(frozenset(topics), instance_id)

    def leave(self, member: str) -> None:
        del self.subscribers[member]
        self.target.pop(member, None)

    def ask(self, planner: Planner | None = None) -> dict[str, Assignment]:
        return (planner or self.planner).plan(
            self.assignors.get(self.assignor), self.subscribers, self.topics, self.target
        )

    def plan(self) -> dict[str, Assignment]:
        changes = self.ask()
        self.target.update(changes)
        return changes

    def owned(self, member: str) -> set[TopicPartition]:
        names = {each.topic_id: each.name for each in self.topics.values()}
        return {(names[topic_id], index) for topic_id, indexes in self.target[member] for index in indexes}

    def owners(self) -> dict[TopicPartition, str]:
        return {partition: member for member in self.target for partition in self.owned(member)}

    def assignable(self, *, live: bool = True, retiring: bool = True) -> Iterator[TopicPartition]:
        subscribed = set().union(*(subscriber.topics for subscriber in self.subscribers.values()))
        for name in sorted(subscribed & self.topics.keys()):
            if live:
                yield from ((name, index) for index in self.topics[name].partitions)
            if retiring:
                yield from ((name, index) for index in self.topics[name].retiring)

    def loads(self, *, live: bool) -> Counter[str]:
        """How many live, or retiring, partitions each member owns."""
        counted = set(self.assignable(live=live, retiring=not live))
        return Counter({member: len(self.owned(member) & counted) for member in self.subscribers})

    def check(self) -> None:
        """Everything once, to a subscriber, written as an assignment should be."""
        assert self.target.keys() == self.subscribers.keys()
        given = [partition for member in self.target for partition in self.owned(member)]
        assert sorted(given) == sorted(self.assignable())
        order = {each.topic_id: each.name for each in self.topics.values()}
        for member, assignment in self.target.items():
            assert {name for name, _ in self.owned(member)} <= self.subscribers[member].topics
            names = [order[topic_id] for topic_id, _ in assignment]
            assert names == sorted(set(names))
            assert all(indexes and list(indexes) == sorted(set(indexes)) for _, indexes in assignment)
            assert all(type(index) is int for _, indexes in assignment for index in indexes)
