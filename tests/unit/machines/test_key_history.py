"""Where a key lived: from linear hashing, the cuts of the logs, and what is left of them."""

from __future__ import annotations

import random
from typing import Any

from anabranch.machines.controller.layouts import EpochRun, Layout
from anabranch.machines.cuts import lineage_of
from anabranch.machines.key_history import KeyHistory, Log, State, Stay, history_of, homes
from anabranch.machines.keyspace import Interval, spread
from anabranch.machines.lineage import Cuts
from anabranch.machines.placement import place
from anabranch.records.hashing import murmur2, placement_hash


def key_of(*partitions: tuple[int, int]) -> bytes:
    """A key that lies in these partitions by these counts; of a topic that was created with one partition."""
    return next(
        key
        for key in (b"%d" % number for number in range(10_000))
        if all(place(placement_hash(key), 1, count) == partition for count, partition in partitions)
    )


LAYOUTS = (Layout(3, 1), Layout(4, 2), Layout(6, 4), Layout(7, 3))
KEY = key_of((1, 0), (2, 1), (4, 3), (3, 1))
CUTS = {0: Cuts((3, 4), (10, 15)), 1: Cuts((4,), (7,))}
EPOCHS = {0: (EpochRun(3, 5, 4),), 1: (EpochRun(4, 0, 1), EpochRun(5, 3, 2)), 3: (EpochRun(6, 0, 1),)}


def history(logs: dict[int, Log], unknown: dict[int, int] | None = None) -> KeyHistory:
    return history_of(KEY, lineage_of(1, LAYOUTS, CUTS, unknown or {}), LAYOUTS, logs, EPOCHS)


def spans(found: KeyHistory) -> list[tuple[int, State, int | None, int | None]]:
    return [(stay.partition, stay.state, stay.start, stay.end) for stay in found.stays]


def test_a_key_is_followed_through_every_layout() -> None:
    found = history({0: Log(0, 20, 9), 1: Log(0, 30, 5), 3: Log(0, 0, 1)})
    assert found.stays == (
        Stay(3, 1, 0, State.ENDED, 0, 10, 5, 5),
        Stay(4, 2, 1, State.ENDED, 0, 7, 0, 0),
        Stay(6, 4, 3, State.EMPTY, 0, 0, 0, 0),
        Stay(7, 3, 1, State.CURRENT, 7, 30, 5, 5),
    )
    assert (found.partition, found.family, found.hash) == (1, 0, placement_hash(KEY))
    assert found.spread == spread(murmur2(KEY), 1)
    assert found.interval.start <= found.spread <= found.interval.end
    assert found.interval == Interval(1 << 62, (1 << 63) - 1)


def test_what_is_below_the_log_start_is_not_there_any_more() -> None:
    found = history({0: Log(8, 20, 9), 1: Log(7, 30, 5), 3: Log(0, 0, 1)})
    assert spans(found)[:2] == [(0, State.ENDED, 8, 10), (1, State.EMPTY, 7, 7)]
    found = history({0: Log(12, 20, 9), 1: Log(28, 30, 5), 3: Log(0, 0, 1)})
    assert spans(found)[0] == (0, State.EMPTY, 12, 12)
    assert spans(found)[3] == (1, State.CURRENT, 28, 30)


def test_of_a_removed_partition_and_an_offline_log_no_offsets_are_told() -> None:
    found = history({1: Log(0, 30, 5)}, {0: 3})
    assert spans(found) == [
        (0, State.OFFLINE, None, None),
        (1, State.ENDED, 0, 7),
        (3, State.REMOVED, None, None),
        (1, State.CURRENT, 7, 30),
    ]


def test_the_homes_of_keys_are_the_partitions_that_producers_choose() -> None:
    chance = random.Random(1)
    for _ in range(200):
        key = chance.randbytes(chance.randrange(12))
        counts = [chance.randrange(3, 50) for _ in range(5)]
        layouts = [Layout(number, count) for number, count in enumerate(counts)]
        assert homes(key, 3, layouts) == tuple(place(placement_hash(key), 3, count) for count in counts)


def test_every_record_of_a_key_lies_in_one_of_its_stays() -> None:
    """A model: records of random keys are appended while the topic is resized, then logs lose their heads."""
    chance = random.Random(7)
    for _ in range(100):
        counts = [2, *(chance.randrange(2, 9) for _ in range(6))]
        layouts = [Layout(number, count) for number, count in enumerate(counts)]
        keys = [b"%d" % number for number in range(6)]
        logs: dict[int, list[tuple[bytes, int]]] = {partition: [] for partition in range(10)}
        cuts: dict[int, list[tuple[int, int]]] = {partition: [] for partition in range(10)}
        for layout in layouts:
            for _ in range(chance.randrange(5)):
                key = chance.choice(keys)
                logs[place(placement_hash(key), 2, layout.count)].append((key, layout.number))
            if layout is not layouts[-1]:
                for partition, log in logs.items():
                    cuts[partition].append((layout.number, len(log)))
        starts = {partition: chance.randrange(len(log) + 1) for partition, log in logs.items()}
        lineage = lineage_of(2, layouts, {p: Cuts.of(found) for p, found in cuts.items()}, {})
        spans_of: dict[int, Any] = {p: Log(starts[p], len(log), 0) for p, log in logs.items()}
        for key in keys:
            told = {
                (stay.partition, offset)
                for stay in history_of(key, lineage, layouts, spans_of, {}).stays
                for offset in range(stay.start or 0, stay.end or 0)
            }
            there = {(p, o) for p, log in logs.items() for o, (k, _) in enumerate(log) if k == key and o >= starts[p]}
            assert there <= told
