"""Ranges and frontiers against plain sets: of offsets, and of (offset, key)."""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import pairwise

import pytest

from anabranch.machines.groups import individual, shares
from anabranch.machines.groups.individual import OffsetRanges, Range, WrongRangesError, gaps
from anabranch.machines.keyspace import SPACE_END
from anabranch.machines.lineage import Frontier

PLACES = [SPACE_END // 7 * number for number in range(8)]
"""Keys of the model; intervals of keys begin and end at them."""


def ranges_of(offsets: set[int]) -> list[Range]:
    """The longest ranges that a set consists of."""
    found: list[Range] = []
    for offset in sorted(offsets):
        if found and found[-1][1] == offset - 1:
            found[-1] = found[-1][0], offset
        else:
            found.append((offset, offset))
    return found


def some_ranges(chance: random.Random, size: int, most: int, *, from_: int = 0) -> list[Range]:
    """Disjoint ranges, in no order."""
    found: list[Range] = []
    at = from_
    while len(found) < most:
        start = at + chance.choice((0, 0, 1, 2, 5))
        end = start + chance.choice((0, 0, 1, 3))
        if end >= size:
            break
        found.append((start, end))
        at = end + 1
    chance.shuffle(found)
    return chance.sample(found, chance.randint(0, len(found)))


def add(ranges: OffsetRanges, added: list[Range]) -> individual.Merge:
    merge = ranges.merged(individual.checked(added))
    for start in merge.removed:
        ranges.remove(start)
    for start, end in merge.put:
        ranges.put(start, end)
    return merge


@pytest.mark.parametrize("seed", range(100))
def test_ranges_are_those_of_a_set_of_offsets(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr(individual, "BUCKET_SIZE", chance.choice((1, 2, 512)))
    size = chance.choice((20, 200))
    ranges, model = OffsetRanges(), set[int]()
    for _ in range(60):
        if chance.random() < 0.1:
            below = chance.randrange(size)
            ends = dict(ranges)
            assert ranges.remove_below(below) == [start for start, end in ends.items() if end < below]
            model = {offset for start, end in ranges for offset in range(start, end + 1)}
        added = some_ranges(chance, size, chance.choice((1, 3, 20)))
        again = {offset for start, end in added for offset in range(start, end + 1)} & model
        merge = add(ranges, added)
        model |= {offset for start, end in added for offset in range(start, end + 1)}
        assert [*ranges] == ranges_of(model) == ranges.copied()
        assert (merge.repeated is not None) == bool(again)
        if merge.repeated is not None:
            assert set(range(merge.repeated[0], merge.repeated[1] + 1)) <= again
        for offset in range(size + 2):
            following = ranges.after(offset)
            assert ranges.at_or_before(offset) == max((it for it in ranges if it[0] <= offset), default=None)
            assert following == min((it for it in ranges if it[0] > offset), default=None)
            reached = offset
            while reached in model:
                reached += 1
            assert ranges.reaches(offset) == reached
    assert ranges == OffsetRanges(ranges_of(model))


def below(frontier: Frontier, size: int) -> set[tuple[int, int]]:
    """The (offset, key) that a frontier says are processed."""
    at = [frontier.offsets[bisect_right(frontier.starts, place) - 1] for place in PLACES]
    return {(offset, place) for place, end in zip(PLACES, at, strict=True) for offset in range(min(size, end))}


@pytest.mark.parametrize("seed", range(100))
def test_frontier_and_ranges_say_what_a_set_of_offsets_and_keys_says(seed: int) -> None:
    chance = random.Random(seed)
    size = 40
    frontier, ranges, model = shares.constant(0), OffsetRanges(), set[tuple[int, int]]()
    for _ in range(30):
        stable = shares.stable(frontier)
        if chance.random() < 0.5:
            added = some_ranges(chance, size, 5, from_=stable)
            add(ranges, added)
            model |= {(offset, place) for start, end in added for offset in range(start, end + 1) for place in PLACES}
        else:
            first, last = sorted((chance.randrange(8), chance.randrange(8)))
            keys = (PLACES[first], PLACES[last], chance.randint(stable, size))
            frontier = shares.raised(frontier, [keys])
            model |= {(offset, place) for place in PLACES[first : last + 1] for offset in range(keys[2])}
        frontier = shares.through(frontier, ranges.reaches)
        ranges.remove_below(shares.stable(frontier))
        done = {offset for start, end in ranges for offset in range(start, end + 1)}
        said = below(frontier, size) | {(offset, place) for offset in done for place in PLACES}
        assert said == model
        assert all(start > shares.stable(frontier) for start, _ in ranges)
        assert all(one != other for one, other in pairwise(frontier.offsets))
        # As far as a frontier can be: the next record of no key is known to be processed.
        at = [frontier.offsets[bisect_right(frontier.starts, place) - 1] for place in PLACES]
        assert all((offset, place) not in model for offset, place in zip(at, PLACES, strict=True))


def test_gaps_are_what_lies_between() -> None:
    assert list(gaps(40, [(43, 45), (48, 49)])) == [(40, 42), (46, 47)]
    assert not list(gaps(40, []))


def test_shares_tile_the_space_and_are_read_again_as_they_were() -> None:
    frontier = shares.raised(shares.constant(3), [(10, 19, 7), (20, 29, 5), (30, 30, 5)])
    assert shares.shares(frontier) == [(0, 9, 3), (10, 19, 7), (20, 30, 5), (31, SPACE_END, 3)]
    assert shares.frontier_of(frontier.starts, frontier.offsets, 3) == frontier
    assert shares.at_least(frontier, 6) == Frontier((0, 10, 20), (6, 7, 6))
    assert shares.at_least(frontier, 7) == shares.constant(7)
    assert shares.is_constant(shares.constant(7)) and not shares.is_constant(frontier)


@pytest.mark.parametrize(
    ("starts", "offsets"), [((), ()), ((1,), (5,)), ((0, 3), (5,)), ((0, 3, 3), (5, 6, 7)), ((0,), (2,))]
)
def test_a_frontier_that_cannot_be_is_the_stable_offset(starts: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    assert shares.frontier_of(starts, offsets, 4) == shares.constant(4)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(5, 4)], "ends before it starts"),
        ([(-1, 4)], "out of bounds"),
        ([(0, (1 << 63) - 1)], "out of bounds"),
        ([(8, 9), (1, 8)], "overlaps the one that ends at 8"),
        ([(2 * it, 2 * it) for it in range(60_001)], "60001 ranges are committed at once; 60000 can be"),
    ],
)
def test_ranges_of_offsets_that_cannot_be_are_refused_with_a_sentence(ranges: list[Range], message: str) -> None:
    with pytest.raises(WrongRangesError, match=message):
        individual.checked(ranges)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(5, 4, 0)], "end before they start"),
        ([(-1, 4, 0)], "are none"),
        ([(8, 9, 0), (1, 8, 0)], "overlap those that end at 8"),
        ([(8, 9, -2)], "has the offset|have the offset -2"),
        ([(it, it, 0) for it in range(60_001)], "60001 ranges are committed at once"),
    ],
)
def test_ranges_of_keys_that_cannot_be_are_refused_with_a_sentence(ranges: list[shares.KeyRange], message: str) -> None:
    with pytest.raises(WrongRangesError, match=message):
        shares.checked(ranges)


def test_ranges_that_touch_are_one() -> None:
    assert individual.checked([(5, 6), (1, 2), (3, 4)]) == [(1, 6)]
