"""The lineage rule against models that keep every record and every layout (ordering.md, section 3; keyspace.md, 4).

The model is a topic as it really is: logs of records, resizes that cut them, retention, partitions that are removed
and created again, and a reader that delivers one record at a time, wherever a gate lets it, in random order, and
that crashes back to what it committed. It is asked one question only: did a key's records come in the order sent?
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.machines.lineage import Lineage, sequence_cuts
from anabranch.machines.placement import level_size, place
from tests.properties.recursive_gates import before, direct_parent_rule, moves, recursive_rule
from tests.support.delivery import Delivery
from tests.support.thorough import thorough

Rule = Callable[[Lineage, Mapping[int, int]], Callable[[int, int], bool]]
"""For a lineage and a reader's positions: whether (partition, layout) may be delivered."""

HISTORIES = thorough(20_000, 4_000)
"""Of up to 60 steps each; with the direct-parent rule about one in twenty breaks, with ours none may."""


@dataclass
class Log:
    """A partition's records as (key, number), from offset `start` on."""

    start: int = 0
    records: list[tuple[int, int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.records)


class Topic:
    """A topic that can be resized at any time; a record is (key, the number of the send)."""

    def __init__(self, initial: int) -> None:
        self.initial = initial
        self.first = 0
        self.counts = [initial]
        self.logs = {p: Log() for p in range(initial)}
        self.removed: dict[int, int] = {}
        self.ends: list[dict[int, int]] = []
        self.sent: dict[int, list[int]] = {}
        self._numbers = 0
        self._lineage: Lineage | None = None

    def send(self, key: int) -> None:
        self.logs[place(key, self.initial, self.counts[-1])].records.append((key, self._numbers))
        self.sent.setdefault(key, []).append(self._numbers)
        self._numbers += 1

    def resize(self, count: int) -> None:
        self.ends.append({p: log.end for p, log in self.logs.items()})
        for p in range(count):
            if p not in self.logs:
                self.logs[p] = Log(self.removed.pop(p, 0))
        self.counts.append(count)
        self._lineage = None

    def expire(self, partition: int, upto: int) -> list[tuple[int, int]]:
        """Retention: the records below `upto` are gone, and no reader owes them to anybody any more."""
        log = self.logs[partition]
        cut = max(0, min(upto, log.end) - log.start)
        gone, log.records = log.records[:cut], log.records[cut:]
        log.start += cut
        return gone

    def reap(self) -> None:
        """Remove empty retiring partitions, from the highest index down, and fold layouts without records away."""
        for p in sorted(self.logs, reverse=True):
            if p < self.counts[-1] or self.logs[p].records:
                break
            self.removed[p] = self.logs.pop(p).end
            self._lineage = None
        while self.ends and all(self.logs[p].start >= end for p, end in self.ends[0].items() if p in self.logs):
            del self.ends[0], self.counts[0]
            self.first += 1
            self._lineage = None

    def lineage(self) -> Lineage:
        if self._lineage is None:
            existing = self.logs.keys()
            ends = tuple({p: end for p, end in ends.items() if p in existing} for ends in self.ends)
            self._lineage = Lineage.of_ends(self.initial, self.counts, ends, first=self.first)
        return self._lineage


class Reader(Delivery[int]):
    """Delivers what a rule allows, in the most adverse order chance finds; commits now and then; crashes."""

    def __init__(self, topic: Topic, rule: Rule, chance: random.Random) -> None:
        super().__init__()
        self.topic = topic
        self.rule = rule
        self.chance = chance
        self.delivered: dict[int, list[int]] = {}

    def _positions(self, of: Mapping[int, int]) -> dict[int, int]:
        return {p: max(of.get(p, log.start), log.start) for p, log in self.topic.logs.items()}

    def _choices(self) -> Iterator[int]:
        lineage = self.topic.lineage()
        committed, progress = self._positions(self.committed), self._positions(self.progress)
        may_deliver = self.rule(lineage, committed)
        for p, log in self.topic.logs.items():
            if progress[p] < log.end and may_deliver(p, lineage.layout_at(p, progress[p])):
                yield p

    def step(self) -> bool:
        choices = list(self._choices())
        if not choices:
            return False
        p = self.chance.choice(choices)
        log = self.topic.logs[p]
        at = max(self.progress.get(p, 0), log.start)
        run = self.chance.randint(1, 3)
        lineage = self.topic.lineage()
        for offset in range(at, min(at + run, log.end)):
            if lineage.layout_at(p, offset) != lineage.layout_at(p, at):
                break
            key, number = log.records[offset - log.start]
            self.delivered.setdefault(key, []).append(number)
            self.progress[p] = offset + 1
        return True

    def is_done(self) -> bool:
        return all(self._positions(self.progress)[p] == log.end for p, log in self.topic.logs.items())


def our_rule(lineage: Lineage, positions: Mapping[int, int]) -> Callable[[int, int], bool]:
    return lineage.gates(positions).may_deliver


def first_deliveries(numbers: list[int]) -> list[int]:
    """A crash re-delivers; order is about the first time that each record was delivered."""
    return list(dict.fromkeys(numbers))


def history(seed: int, rule: Rule) -> tuple[bool, bool]:
    """Run one random history; say whether order held, and whether the reader got everything."""
    chance = random.Random(seed)
    initial = chance.randint(1, 3)
    topic = Topic(initial)
    reader = Reader(topic, rule, chance)
    keys = chance.randint(1, 8)
    expired: set[int] = set()
    for _ in range(chance.randint(5, 60)):
        act = chance.random()
        if act < 0.45:
            topic.send(chance.randrange(keys) * 7919 % 2**31)
        elif act < 0.60:
            count = chance.randint(initial, initial * 8)
            if count != topic.counts[-1]:
                topic.resize(count)
        elif act < 0.85:
            reader.step()
        elif act < 0.92:
            reader.commit()
        elif act < 0.95:
            reader.crash()
        elif act < 0.97:
            p = chance.choice(sorted(topic.logs))
            expired.update(n for _, n in topic.expire(p, reader.committed.get(p, 0)))
            topic.reap()
        else:
            p = chance.choice(sorted(topic.logs))
            expired.update(n for _, n in topic.expire(p, chance.randint(0, topic.logs[p].end)))
            topic.reap()
    drained = reader.drain()
    in_order, complete = True, drained
    for key, sent in topic.sent.items():
        got = first_deliveries(reader.delivered.get(key, []))
        in_order &= got == sorted(got)
        complete &= set(sent) - expired <= set(got)
    return in_order, complete


@pytest.mark.parametrize("block", range(4))
def test_no_history_breaks_the_order_of_a_key_or_gets_stuck(block: int) -> None:
    for seed in range(block * HISTORIES // 4, (block + 1) * HISTORIES // 4):
        in_order, complete = history(seed, our_rule)
        assert in_order, f"order broken: history({seed}, our_rule)"
        assert complete, f"stuck or lost: history({seed}, our_rule)"


def one_layout_too_low(lineage: Lineage, positions: Mapping[int, int]) -> Callable[[int, int], bool]:
    """A reader that asks for the gate of the segment before the one that it is at."""
    gates = lineage.gates(positions)
    return lambda partition, layout: gates.may_deliver(partition, max(layout - 1, lineage.first))


def no_rule(_lineage: Lineage, _positions: Mapping[int, int]) -> Callable[[int, int], bool]:
    return lambda _partition, _layout: True


@pytest.mark.parametrize("rule", [direct_parent_rule, one_layout_too_low, no_rule])
def test_a_laxer_rule_breaks_order(rule: Rule) -> None:
    broken = (seed for seed in range(3_000) if not history(seed, rule)[0])
    assert len(list(islice(broken, 11))) == 11


def test_the_recursive_rule_is_right_too_but_waits_more_often() -> None:
    assert all(history(seed, recursive_rule) == (True, True) for seed in range(thorough(1_000, 400)))
    stricter = decided = 0
    for seed in range(thorough(1_000, 400)):
        chance = random.Random(seed)
        topic = grown_topic(chance)
        lineage = topic.lineage()
        positions = {p: chance.randint(log.start, log.end) for p, log in topic.logs.items()}
        exact, recursive = lineage.gates(positions).may_deliver, recursive_rule(lineage, positions)
        for p in topic.logs:
            for layout in range(lineage.first, lineage.current + 1):
                assert exact(p, layout) or not recursive(p, layout), f"seed {seed}: ({p}, {layout})"
                stricter += exact(p, layout) and not recursive(p, layout)
                decided += 1
    assert 0 < stricter < decided


def grown_topic(chance: random.Random, resizes_max: int = 8) -> Topic:
    """A topic after sends, resizes, retention and removals."""
    topic = Topic(chance.randint(1, 3))
    for _ in range(chance.randint(1, resizes_max)):
        for _ in range(chance.randint(0, 12)):
            topic.send(chance.randrange(2**31))
        topic.resize(chance.randint(topic.initial, topic.initial * 8))
        for p in sorted(topic.logs):
            if chance.random() < 0.1:
                topic.expire(p, chance.randint(0, topic.logs[p].end))
        topic.reap()
    return topic


def test_the_example_of_the_design_waits_for_the_grandparent() -> None:
    lineage = Lineage.of_ends(1, (1, 2, 4), ({0: 3}, {0: 3, 1: 0}))
    assert before(lineage, 3, 2) == (1,)
    unread = {0: 0, 1: 0, 2: 0, 3: 0}
    assert direct_parent_rule(lineage, unread)(3, 2)
    assert not lineage.may_deliver(3, 2, unread)
    assert [(wait.partition, wait.offset) for wait in lineage.waits(3, unread)] == [(0, 3)]
    assert lineage.may_deliver(3, 2, {**unread, 0: 3})
    assert lineage.waits(3, {**unread, 0: 3}) == ()


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 90), st.integers(0, 90))
def test_moves_name_exactly_the_partitions_whose_keys_came(initial: int, a: int, b: int) -> None:
    old, new = initial + a, initial + b
    sources: dict[int, set[int]] = {p: set() for p in range(max(old, new))}
    for h in range(4 * level_size(max(old, new), initial)):
        before, after = place(h, initial, old), place(h, initial, new)
        if before != after:
            sources[after].add(before)
    for partition, expected in sources.items():
        assert set(moves(old, new, initial).get(partition, ())) == expected


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_the_limits_the_waits_and_the_gates_agree(seed: int) -> None:
    chance = random.Random(seed)
    topic = grown_topic(chance)
    lineage = topic.lineage()
    positions = {p: chance.randint(log.start, log.end) for p, log in topic.logs.items()}
    gates = lineage.gates(positions)
    for p in topic.logs:
        limit = gates.limit(p)
        here = list(lineage.segments(p, positions[p]))
        closed = [segment for segment in here if not gates.may_deliver(p, segment.layout)]
        assert limit == (closed[0].start if closed else None)
        assert (limit is None) == (not lineage.waits(p, positions))
        for wait in lineage.waits(p, positions):
            assert positions[wait.partition] < wait.offset
        reached = positions | {wait.partition: wait.offset for wait in gates.waits(p)}
        assert not closed or lineage.may_deliver(p, closed[0].layout, reached)
    whole = {p: log.end for p, log in topic.logs.items()}
    assert all(limit is None for limit in lineage.deliverable(whole).values())


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_the_sequence_of_a_keys_records_only_grows(seed: int) -> None:
    chance = random.Random(seed)
    topic = Topic(chance.randint(1, 3))
    for _ in range(60):
        if chance.random() < 0.85:
            topic.send(chance.randrange(12))
        else:
            topic.resize(chance.randint(topic.initial, topic.initial * 6))
    lineage = topic.lineage()
    sequences: dict[int, list[tuple[int, int]]] = {}
    for p, log in topic.logs.items():
        ends, layouts = sequence_cuts(lineage, p)
        for offset, (key, number) in enumerate(log.records, log.start):
            sequences.setdefault(key, []).append((number, lineage.sequence(p, offset)))
            assert layouts[sum(end <= offset for end in ends)] == lineage.layout_at(p, offset)
    for pairs in sequences.values():
        in_order = [sequence for _, sequence in sorted(pairs)]
        assert in_order == sorted(set(in_order))
