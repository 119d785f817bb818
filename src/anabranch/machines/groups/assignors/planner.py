"""From a coordinator's own state to the targets that change, one `Planner` per group.

The coordinator keeps plain mappings; the planner caches them as arrays and compares by identity, so that only changed
objects are read. The cache is a memo: a new planner, after fail-over for example, gives the same answers. The rule:
the answer follows from the arguments alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, compress, count, repeat
from operator import is_, is_not, itemgetter, not_
from typing import cast

import numpy as np
from numpy.typing import NDArray

from anabranch.machines.groups.assignors.model import Assignment, Subscriber, Topic
from anabranch.machines.groups.assignors.spec import (
    ABSENT,
    NOBODY,
    Assignor,
    Ints,
    Longs,
    Partitions,
    Spec,
    Subscriptions,
    check,
    ordered,
)


class Planner:
    """The cached state of a group, in arrays: members and partitions are numbered as in `Spec`."""

    def __init__(self, uninterrupted: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._uninterrupted = uninterrupted
        self._subscribers: dict[str, Subscriber] = {}
        self._static: dict[str, str] = {}
        """The instance ids of static members."""
        self._order: list[str] = []
        self._number: dict[str, int] = {}
        self._sets: dict[frozenset[str], int] = {}
        self._set_of: Ints = np.empty(0, np.int32)
        """Per member the number of its topics in `_sets`."""

        self._subscribed: list[str] = []
        self._partitions = Partitions.of(())
        self._sets_used: Ints = np.empty(0, np.int32)
        self._topics_of_set: dict[int, tuple[bytes, Ints]] = {}
        """Per set its topics' numbers, ascending, and the same as bytes."""
        self._class_of_set: Ints = np.empty(0, np.int32)
        self._subscriptions: Subscriptions | None = None

        self._target: dict[str, Assignment] = {}
        self._owner: Ints = np.empty(0, np.int32)
        """Per partition its owner in `_target`."""
        self._wrong: set[str] = set()
        """Members whose target holds a missing, unsubscribed or doubly assigned partition."""
        self._answer: tuple[dict[str, Assignment], Ints] = {}, self._owner
        """The last answer, and the owners if the targets become that answer."""

    def plan(
        self,
        assignor: Assignor,
        subscribers: Mapping[str, Subscriber],
        topics: Mapping[str, Topic],
        target: Mapping[str, Assignment],
    ) -> dict[str, Assignment]:
        """Return the new target of each member whose target changes, or that has none yet, in the members' order.

        `topics` is by name, as the metadata has it. `target` may still have members that are gone: what they had is
        free, and nothing is returned for them. Nothing changes but the memo. AssignorError is the assignor's fault.
        """
        with self._uninterrupted():
            self._adopt_answer(target)
            resubscribed = self._look_at_members(subscribers)
            self._look_at_topics(topics)
            self._look_at_subscriptions()
            self._release(resubscribed)
            self._look_at_target(target)
            if not self._order or self._subscriptions is None:
                return {}
            spec = Spec(self._partitions, self._subscriptions, self._class_of_set[self._set_of], self._owner)
            owner = assignor(spec) if len(self._owner) else self._owner
            check(spec, owner)
            changes = self._assignments(owner, self._changed(owner, target))
            self._answer = changes, owner
            return changes

    def _changed(self, owner: Ints, target: Mapping[str, Assignment]) -> Ints:
        """Return the members that gain or lose a partition, that have no target yet, or a wrong one."""
        if not target:
            return np.arange(len(self._order), dtype=np.int32)
        moved = np.flatnonzero(owner != self._owner)
        changed = np.zeros(len(self._order) + 1, np.bool_)
        changed[self._owner[moved]] = True
        changed[owner[moved]] = True
        changed[list(compress(count(), map(not_, map(target.__contains__, self._order))))] = True
        changed[[self._number[member] for member in self._wrong]] = True
        return np.flatnonzero(changed[:NOBODY]).astype(np.int32)

    def _adopt_answer(self, target: Mapping[str, Assignment]) -> None:
        """If the last answer has become the target, take its arrays, so that it need not be read back."""
        changes, owner = self._answer
        self._answer = {}, owner
        if changes and all(target.get(member, new) == new for member, new in changes.items()):
            self._owner = owner
            self._target.update({member: target.get(member, new) for member, new in changes.items()})
            self._wrong -= changes.keys()

    def _look_at_members(self, subscribers: Mapping[str, Subscriber]) -> Ints:
        """Renumber the members after a change; return those that stay with another subscription."""
        seen = self._subscribers
        changed = list(compress(subscribers, map(is_not, subscribers.values(), map(seen.get, subscribers))))
        joined = [member for member in changed if member not in seen]
        left = seen.keys() - subscribers.keys() if len(seen) + len(joined) > len(subscribers) else set()
        if not changed and not left:
            return np.empty(0, np.int32)
        if len(self._sets) > 2 * len(self._sets_used) + 16:
            self._forget_unused_sets()
        static = self._static
        for member in left:
            static.pop(member, None)
            self._target.pop(member, None)
            self._wrong.discard(member)
        subscriptions = list(map(subscribers.__getitem__, changed))
        for member, subscriber in zip(changed, subscriptions, strict=True):
            if subscriber.instance_id is not None:
                static[member] = subscriber.instance_id
            elif static:
                static.pop(member, None)
        self._subscribers = dict(subscribers)

        before = self._order
        members = [member for member in before if member not in left] + joined if left else before + joined
        dynamic = sorted(member for member in members if member not in static) if static else sorted(members)
        self._order = sorted(static, key=lambda member: (static[member], member)) + dynamic
        self._number = dict(zip(self._order, range(len(self._order)), strict=True))
        now = np.fromiter(map(self._number.get, before, repeat(NOBODY)), np.int32, len(before))
        self._owner = np.append(now, np.int32(NOBODY))[self._owner]

        set_of = np.full(len(self._order) + 1, NOBODY, np.int32)
        set_of[now] = self._set_of
        numbers = np.fromiter(map(self._number.__getitem__, changed), np.int32, len(changed))
        sets = [self._sets.setdefault(subscriber.topics, len(self._sets)) for subscriber in subscriptions]
        other = (set_of[numbers] != NOBODY) & (set_of[numbers] != sets)
        set_of[numbers] = sets
        self._set_of = set_of[:-1]
        resubscribed: Ints = numbers[other]
        return resubscribed

    def _forget_unused_sets(self) -> None:
        names = list(self._sets)
        self._sets = {names[old]: number for number, old in enumerate(self._sets_used.tolist())}
        self._set_of = np.searchsorted(self._sets_used, self._set_of).astype(np.int32)
        self._sets_used = np.empty(0, np.int32)
        self._topics_of_set = {}

    def _look_at_topics(self, topics: Mapping[str, Topic]) -> None:
        """Number the partitions anew if the topics that are subscribed to are others, or other than they were."""
        used = np.flatnonzero(np.bincount(self._set_of)).astype(np.int32)
        if not np.array_equal(used, self._sets_used):
            names = list(self._sets)
            self._subscribed = sorted(frozenset().union(*(names[number] for number in used.tolist())))
            self._sets_used = used
            self._subscriptions = None
        there = [topic for topic in map(topics.get, self._subscribed) if topic is not None]
        before = self._partitions
        if len(there) == len(before.topics) and all(map(is_, there, before.topics)):
            return
        self._subscriptions = None
        self._topics_of_set = {}
        self._partitions = now = Partitions.of(there)
        numbers = {topic.topic_id.int: number for number, topic in enumerate(there)}
        topic = np.array([numbers.get(old.topic_id.int, -1) for old in before.topics], np.int32)[before.topic_of]
        moved = np.where(topic >= 0, now.first[topic] + before.index, 0)
        stays = (topic >= 0) & (moved < now.first[topic + 1])
        stays[stays] = now.kind[moved[stays]] != ABSENT
        owner = np.full(len(now.kind), NOBODY, np.int32)
        owner[moved[stays]] = self._owner[stays]
        self._mark_wrong(self._owner[~stays])
        self._owner = owner

    def _look_at_subscriptions(self) -> None:
        """Recompute the classes of members and their topics after a change of subscriptions or topics."""
        if self._subscriptions is not None or not self._order:
            return
        topics = len(self._partitions.topics)
        self._number_new_sets()
        sets_of: dict[bytes, list[int]] = {}
        for used in self._sets_used.tolist():
            sets_of.setdefault(self._topics_of_set[used][0], []).append(used)
        by_content = [sets_of[content] for content in sorted(sets_of)]
        self._class_of_set = np.zeros(len(self._sets), np.int32)
        self._class_of_set[list(chain.from_iterable(by_content))] = np.repeat(
            np.arange(len(by_content), dtype=np.int32), list(map(len, by_content))
        )
        self._subscriptions = Subscriptions.of([self._topics_of_set[sets[0]][1] for sets in by_content], topics)

    def _number_new_sets(self) -> None:
        """Find the topics' numbers of sets of names that are new."""
        number_of = {topic.name: number for number, topic in enumerate(self._partitions.topics)}
        new = [(names, number) for names, number in self._sets.items() if number not in self._topics_of_set]
        there = [[number_of[name] for name in names if name in number_of] for names, _ in new]
        lengths = np.fromiter(map(len, there), np.int32, len(there))
        topics = np.fromiter(chain.from_iterable(there), np.int32, int(lengths.sum()))
        topics = topics[ordered(np.repeat(np.arange(len(new), dtype=np.int32), lengths), topics)]
        end = 0
        for (_, number), length in zip(new, lengths.tolist(), strict=True):
            begin, end = end, end + length
            self._topics_of_set[number] = topics[begin:end].tobytes(), topics[begin:end]

    def _release(self, members: Ints) -> None:
        """Take the partitions of unsubscribed topics from their members."""
        if len(members) and self._subscriptions is not None:
            theirs = self._of(members, self._owner)
            lost = theirs[~self._may_own(theirs, self._owner[theirs])]
            self._mark_wrong(self._owner[lost])
            self._owner[lost] = NOBODY

    def _look_at_target(self, target: Mapping[str, Assignment]) -> None:
        """Read the new targets, and the invalid ones again, since they may be valid by now."""
        seen, wrong = self._target, self._wrong
        new = list(compress(self._order, map(is_not, map(target.get, self._order), map(seen.get, self._order))))
        new += wrong.difference(new)
        if not new:
            return
        for member in new:
            if member in target:
                seen[member] = target[member]
            else:
                seen.pop(member, None)
        wrong.difference_update(new)
        numbers = np.fromiter(map(self._number.__getitem__, new), np.int32, len(new))
        self._owner[self._of(numbers, self._owner)] = NOBODY

        assignments = [seen.get(member, ()) for member in new]
        entries = list(chain.from_iterable(assignments))
        number_of = {topic.topic_id.int: number for number, topic in enumerate(self._partitions.topics)}
        topic = np.fromiter((number_of.get(topic_id.int, -1) for topic_id, _ in entries), np.int32, len(entries))
        lists = list(map(itemgetter(1), entries))
        lengths = np.fromiter(map(len, lists), np.int32, len(lists))
        index = np.fromiter(chain.from_iterable(lists), np.int32, int(lengths.sum()))
        owners = np.repeat(np.repeat(numbers, np.fromiter(map(len, assignments), np.int32, len(new))), lengths)
        topic = np.repeat(topic, lengths)
        partition = np.where((topic >= 0) & (index >= 0), self._partitions.first[topic] + index, 0)
        right = (topic >= 0) & (index >= 0) & (partition < self._partitions.first[topic + 1])
        right[right] = self._partitions.kind[partition[right]] != ABSENT
        right[right] = self._may_own(partition[right], owners[right])
        self._mark_wrong(owners[~right])

        partition, owners = partition[right], owners[right]
        others = self._owner[partition]
        np.maximum.at(self._owner, partition, owners)
        owner = self._owner[partition]
        self._mark_wrong(others[others != owner])
        self._mark_wrong(owners[owners != owner])

    def _of(self, members: Ints, owner: Ints) -> Longs:
        """Return the partitions that the members own, ascending."""
        theirs = np.zeros(len(self._order) + 1, np.bool_)
        theirs[members] = True
        return np.flatnonzero(theirs[owner])

    def _may_own(self, partitions: Ints | Longs, members: Ints) -> NDArray[np.bool_]:
        assert self._subscriptions is not None
        bundle = self._subscriptions.bundle_of[self._partitions.topic_of[partitions]]
        return self._subscriptions.pair(bundle, self._class_of_set[self._set_of[members]]) >= 0

    def _mark_wrong(self, members: Ints) -> None:
        # Not np.unique, which imports numpy.ma.
        self._wrong.update(self._order[member] for member in set(members.tolist()) if member != NOBODY)

    def _assignments(self, owner: Ints, members: Ints) -> dict[str, Assignment]:
        """Write the members' partitions as assignments."""
        theirs = self._of(members, owner)
        if not len(theirs):
            return {self._order[member]: () for member in members.tolist()}
        owners = owner[theirs]
        by_owner = ordered(owners)
        theirs, owners = theirs[by_owner], owners[by_owner]
        topic = self._partitions.topic_of[theirs]
        begins = np.empty(len(theirs), np.bool_)
        begins[0] = True
        begins[1:] = (topic[1:] != topic[:-1]) | (owners[1:] != owners[:-1])
        start = np.flatnonzero(begins)
        end = np.append(start[1:], len(theirs))

        ids = np.fromiter((topic.topic_id for topic in self._partitions.topics), np.object_)
        runs = self._runs(self._partitions.index[theirs], start, end)
        entries = tuple(zip(ids[topic[start]].tolist(), runs, strict=True))
        first = np.searchsorted(owners[start], members).tolist()
        each = map(entries.__getitem__, map(slice, first, [*first[1:], len(entries)]))
        return dict(zip(map(self._order.__getitem__, members.tolist()), each, strict=True))

    def _runs(self, index: Ints, start: Longs, end: Longs) -> list[tuple[int, ...]]:
        """Cut the column into tuples; if all are of consecutive partitions, equal ones are one object."""
        first, length = index[start], end - start
        most = int(length.max())
        span = (int(index.max()) + 1) * (most + 1)
        if span > 4 * len(index) + 1_000 or (index[end - 1] - first != length - 1).any():
            column = tuple(index.tolist())
            return list(map(column.__getitem__, map(slice, start.tolist(), end.tolist())))
        key = first * (most + 1) + length
        wanted = np.zeros(span, np.bool_)
        wanted[key] = True
        keys = np.flatnonzero(wanted)
        runs = np.empty(span, np.object_)
        for number in keys.tolist():
            begin, size = divmod(number, most + 1)
            runs[number] = tuple(range(begin, begin + size))
        return cast("list[tuple[int, ...]]", runs[key].tolist())
