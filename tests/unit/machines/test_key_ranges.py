"""Sets of places of the key space against plain sets."""

from __future__ import annotations

import random
from itertools import islice

from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, common, complement, ranges_of, union, without

PLACES = 40


def places(ranges: Ranges) -> set[int]:
    return {place for it in ranges for place in range(it.start, min(it.end, PLACES - 1) + 1)}


def some(chance: random.Random) -> Ranges:
    bounds = sorted(chance.sample(range(PLACES), 2 * chance.randrange(8)))
    return ranges_of(zip(islice(bounds, 0, None, 2), islice(bounds, 1, None, 2), strict=True))


def test_what_is_common_added_and_left_out_is_that_of_sets() -> None:
    chance = random.Random(5)
    for _ in range(2_000):
        one, other = some(chance), some(chance)
        for found, expected in (
            (common(one, other), places(one) & places(other)),
            (union(one, other), places(one) | places(other)),
            (without(one, other), places(one) - places(other)),
            (complement(one), {*range(PLACES)} - places(one)),
        ):
            assert places(found) == expected
            assert found == NONE or ranges_of(found) == found, "ascending, disjoint and not adjacent"
        assert common(one, WHOLE) == common(WHOLE, one) == one
