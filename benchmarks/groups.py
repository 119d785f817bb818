"""The group coordinator: how long it is kept from its heartbeats.

Sections: assignors. A bound in milliseconds is a side that always takes as long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from anabranch.machines.groups.assignors import Assignment, Subscriber, assignor
from anabranch.machines.groups.assignors.planner import Planner
from benchmarks.harness import Bar, Result, Round, Scale, compare

# Assignors: from the coordinator's members, topics and target to the members whose target changes.

ASSIGNMENT_MS_MAX = 50.0


@dataclass(frozen=True)
class _Topic:
    name: str
    topic_id: UUID
    partitions: Sequence[int]
    retiring: Sequence[int] = ()


class _Group:
    """What a coordinator keeps of a group: members in the order of their joining, with random ids."""

    def __init__(self, members: int, topics: int, partitions: int) -> None:
        self.chance = random.Random(3)
        self.topics = {
            name: _Topic(name, self.uuid(), tuple(range(partitions)))
            for name in (f"topic-{number:04}" for number in range(topics))
        }
        self.ids = [str(self.uuid()) for _ in range(members)]

    def uuid(self) -> UUID:
        return UUID(int=self.chance.getrandbits(128))


Subscribe = Callable[[_Group], Iterator[Subscriber]]
"""Gives one member's subscription after the other, without end."""


def _all(group: _Group) -> Iterator[Subscriber]:
    everything = frozenset(group.topics)
    while True:
        yield Subscriber(everything)


def _classes(count: int, group: _Group) -> Iterator[Subscriber]:
    """So many different sets of half of the topics, one member after the other."""
    names = list(group.topics)
    sets = [frozenset(group.chance.sample(names, len(names) // 2)) for _ in range(count)]
    while True:
        yield from map(Subscriber, sets)


def _each_its_own(group: _Group) -> Iterator[Subscriber]:
    names = list(group.topics)
    while True:
        yield Subscriber(frozenset(group.chance.sample(names, max(1, len(names) // 10))))


def _assign(name: str, subscribe: Subscribe, sizes: tuple[int, int, int]) -> Mapping[str, float]:
    """Take a group from nothing to a target; then, each for itself, let members join and leave, and reload it."""
    group = _Group(*sizes)
    subscriptions = subscribe(group)
    members = dict(zip(group.ids, subscriptions, strict=False))
    target: dict[str, Assignment] = {}
    chosen = assignor(name)

    def milliseconds(planner: Planner) -> float:
        began = time.thread_time()
        changes = planner.plan(chosen, members, group.topics, target)
        taken = time.thread_time() - began
        target.update(changes)
        return taken * 1_000

    planner = Planner()
    full = milliseconds(planner)
    joins, leaves = [], []
    for _ in range(5):
        members[str(group.uuid())] = next(subscriptions)
        joins.append(milliseconds(planner))
        leaver = group.chance.choice(list(members))
        del members[leaver], target[leaver]
        leaves.append(milliseconds(planner))
    reload = milliseconds(Planner())
    return {"full": full, "join": max(joins), "leave": max(leaves), "reload": reload}


def _always(milliseconds: float) -> Round:
    return lambda: dict.fromkeys(("full", "join", "leave", "reload"), milliseconds)


def _assigned(name: str, label: str, subscribe: Subscribe, bound: float | None, scale: Scale) -> list[Result]:
    sizes = scale.choose((10_000, 100, 1_000), (20, 10, 5))
    members, topics, partitions = sizes
    return compare(
        f"groups.{name}_{label}",
        what=f"{members:,} members, {topics:,} topics of {partitions:,} partitions, {label} subscriptions: CPU time of "
        "the one thread from the coordinator's mappings to the assignments that change. From nothing; the slowest of 5 "
        "joins and of 5 leaves; with a planner that is new to a target that stands, as after fail-over",
        sides={"anabranch": partial(_assign, name, subscribe, sizes), "allowed": _always(ASSIGNMENT_MS_MAX)},
        bars=[Bar(figure, "ms", "less", bound) for figure in ("full", "join", "leave")] + [Bar("reload", "ms", "less")],
        scale=scale,
    )


def uniform(scale: Scale) -> list[Result]:
    """The uniform assignor: all members subscribe to the same topics."""
    return _assigned("uniform", "equal", _all, 1.0, scale)


def range_(scale: Scale) -> list[Result]:
    """The range assignor: all members subscribe to the same topics."""
    return _assigned("range", "equal", _all, 1.0, scale)


def mixed(scale: Scale) -> list[Result]:
    """Both assignors: 100 different subscriptions, each to half of the topics."""
    return [
        result
        for name in ("uniform", "range")
        for result in _assigned(name, "100", partial(_classes, 100), None, scale)
    ]


def own(scale: Scale) -> list[Result]:
    """Both assignors: each member subscribes to a tenth of the topics, no two alike."""
    return [result for name in ("uniform", "range") for result in _assigned(name, "own", _each_its_own, None, scale)]


BENCHMARKS = {"uniform": uniform, "range": range_, "mixed": mixed, "own": own}
