"""Committed offsets in memory are those that another coordinator reads from the logs, at any moment.

Random histories of one group: offsets, ranges of offsets and of keys, of members and of tools, in transactions and out
of them; offsets and the group deleted, the topic made again, its partition made again; and a crash between a marker
and what is decided upon it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from anabranch.machines.groups.image import Image, Life
from anabranch.machines.groups.ranged import FOLD_KEY
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from tests.support.ranged_group import RangedGroup, keys
from tests.support.thorough import thorough
from tests.unit.machines.groups.test_ranged_commits import member

HISTORIES = thorough(5_000, 200)
OFFSETS = 30
SETTLE = ("settle",)
AT = ("foo", 0)


class History:
    """One group, and what happens to it."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.group = RangedGroup()
        self.topics = 0
        self.has_member = chance.random() < 0.5
        self.who: dict[str, Any] = {"member": "one", "epoch": 3} if self.has_member else {}
        if self.has_member:
            member(self.group, one=3)
        self.acts: list[tuple[int, Callable[[], object]]] = [
            (12, lambda: self.group.commit(self.offset(), **self.who)),
            (18, lambda: self.group.commit(ranges=self.ranges(), **self.who)),
            (10, lambda: self.group.commit_later(self.producer(), offset=self.offset(), **self.who)),
            (14, lambda: self.group.commit_later(self.producer(), ranges=self.ranges(), **self.who)),
            (12, self.end),
            (4, self.delete_offsets),
            (2, self.make_topic_again),
            (2, self.make_partition_again),
            (4, lambda: self.group.settle()),
        ]
        if not self.has_member:
            self.acts += [
                (8, lambda: self.group.commit(shares=[self.share()])),
                (8, lambda: self.group.commit_later(self.producer(), shares=[self.share()])),
                (2, lambda: self.group.submit(lambda it: it.delete_group("g", self.group.now_ms))),
            ]

    # -- what may happen -----------------------------------------------------------------------------------------------

    def producer(self) -> int:
        return self.chance.randint(1, 3)

    def offset(self) -> int:
        """Now and then one of a former life of the partition."""
        return max(0, self.begins + self.chance.randint(-3, OFFSETS))

    def ranges(self) -> list[tuple[int, int]]:
        first, last = sorted(self.chance.sample(range(self.begins, self.begins + OFFSETS), 2))
        return [(first, last)]

    def share(self) -> Any:
        return keys(self.chance.randint(0, 3), self.chance.randint(4, 7), self.offset())

    @property
    def begins(self) -> int:
        return self.group.image.by_name["foo"].life(0).begins

    def end(self) -> None:
        """End a transaction; another coordinator may find the marker, and nothing that was decided upon it."""
        producer, committed = self.producer(), self.chance.random() < 0.7
        waits = bool(self.group.coordinator.offsets.in_transactions.purgatory.groups)
        after = self.copied()
        after.logs[0].append(((b"", b"1" if committed else b"0"),))
        after.producers.append(producer)
        self.group.end(producer, committed=committed)
        if not waits:  # What waits for the end of a transaction is answered, and sent again.
            self.go_on(self.group)
            after.load()
            self.go_on(after)
            assert state(self.group) == state(after)

    def delete_offsets(self) -> None:
        topics = [OffsetDeleteRequestTopic(name="foo", partitions=[OffsetDeleteRequestPartition(partition_index=0)])]
        request = OffsetDeleteRequest(group_id="g", topics=topics)
        self.group.submit(lambda it: it.offset_delete(request, self.group.now_ms))

    def make_topic_again(self) -> None:
        self.topics += 1
        self.change(topic_id=UUID(int=self.topics + 1_000), lives={}, log_start=lambda _: 0)

    def make_partition_again(self) -> None:
        born, begins = self.group.image.by_name["foo"].life(0)
        begins = max(begins, self.chance.randint(0, OFFSETS))
        self.change(initial=2, log_start=lambda number: 0 if number else begins, lives={0: Life(born + 2, begins)})

    def change(self, **fields: Any) -> None:
        topic = replace(self.group.image.by_name["foo"], **fields)
        self.group.image = Image(self.group.image.version + 1, {"foo": topic})
        self.group.submit(lambda it: it.topics_changed(self.group.image, self.group.now_ms))

    # -- looking -------------------------------------------------------------------------------------------------------

    def copied(self) -> RangedGroup:
        """The group as another coordinator may find it: the same logs, and nothing in memory."""
        other = RangedGroup(self.group.image)
        other.now_ms = self.group.now_ms
        other.logs = ([*self.group.logs[0]], [*self.group.logs[1]])
        other.producers = [*self.group.producers]
        return other

    def go_on(self, group: RangedGroup) -> None:
        """Let everything be decided that is due."""
        if self.has_member and not group.coordinator.groups:
            member(group, one=3)
        while group.timers.pop(SETTLE, None) is not None:
            group.submit(lambda it: it.on_timer(SETTLE, group.now_ms))
        group.submit(lambda it: it.on_timer(FOLD_KEY, group.now_ms))
        group.settle()
        group.ring()

    def live(self) -> None:
        for _ in range(self.chance.randint(5, 40)):
            self.group.now_ms += self.chance.randint(1, 5)
            (act,) = self.chance.choices([act for _, act in self.acts], [weight for weight, _ in self.acts])
            act()
            if self.chance.random() < 0.3:
                self.go_on(self.group)
                other = self.copied()
                other.load()
                self.go_on(other)
                assert state(self.group) == state(other)


def state(group: RangedGroup) -> dict[str, Any]:
    """What a coordinator knows of committed offsets: when they were committed is not compared."""
    offsets = group.coordinator.offsets
    committed, pending = offsets.positions._comparable()
    assert isinstance(committed, dict) and isinstance(pending, dict)
    changes = offsets.in_transactions
    return {
        "committed": {
            (name, at): position._replace(committed_at_ms=0)
            for name, positions in committed.items()
            for at, position in positions.items()
        },
        "pending": {
            (producer, name, at): offsets.positions.pending(name, *at, producer)._replace(committed_at_ms=0)  # type: ignore[union-attr]
            for producer, name, at in pending
        },
        "ranges": [*offsets.individual.of("g", AT, offsets.current("g", *AT))],
        "open": {producer: found for producer, found in changes._open.items() if found},
        "decided": changes.decided,
    }


@pytest.mark.parametrize("first", range(0, HISTORIES, 100))
def test_offsets_in_memory_are_those_of_the_logs(first: int) -> None:
    for seed in range(first, first + 100):
        try:
            History(seed).live()
        except AssertionError as error:
            raise AssertionError(f"history {seed}") from error
