"""The facts of keyspace.md, section 2, on which gates, shares and Spark's tasks rest, and the cuts of section 5."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.machines.keyspace import (
    HOT_FROM,
    SPACE,
    SPACE_BITS,
    SPACE_END,
    Interval,
    balanced_cuts,
    cuts,
    cuts_by_load,
    interval,
    keyless_spread,
    reverse_31,
    spread,
)
from anabranch.machines.placement import ancestor, place

murmurs = st.integers(0, 2**32 - 1)
hashes = st.integers(0, 2**31 - 1)
initials = st.integers(1, 12)
growths = st.integers(0, 120)


@settings(deadline=None)
@given(hashes)
def test_reversing_is_that_of_the_digits(value: int) -> None:
    assert reverse_31(value) == int(f"{value:031b}"[::-1], 2)


@settings(deadline=None)
@given(initials, growths)
def test_the_intervals_of_a_family_tile_the_space(initial: int, growth: int) -> None:
    count = initial + growth
    for root in range(initial):
        family = sorted(interval(p, count, initial) for p in range(root, count, initial))
        assert (family[0].start, family[-1].end) == (0, SPACE_END)
        assert all(one.end + 1 == two.start for one, two in pairwise(family))


@settings(deadline=None)
@given(murmurs, initials, growths)
def test_a_partition_holds_a_key_exactly_if_its_interval_does(murmur: int, initial: int, growth: int) -> None:
    key_hash, at = murmur & 0x7FFF_FFFF, spread(murmur, initial)
    count = initial + growth
    placed = place(key_hash, initial, count)
    assert 0 <= at <= SPACE_END
    for p in range(count):
        held = interval(p, count, initial)
        assert (p == placed) == (p % initial == key_hash % initial and held.start <= at <= held.end)


@settings(deadline=None)
@given(hashes, st.integers(1, 1 << 20), st.integers(0, 1 << 24))
def test_that_holds_for_the_largest_topics_too(key_hash: int, initial: int, growth: int) -> None:
    count = min(initial + growth, 1 << 31)
    held = interval(place(key_hash, initial, count), count, initial)
    assert held.start <= spread(key_hash, initial) <= held.end


@settings(deadline=None)
@given(initials, growths)
def test_one_partition_more_halves_exactly_one_interval_and_one_less_puts_it_back(initial: int, growth: int) -> None:
    count = initial + growth
    before = {p: interval(p, count, initial) for p in range(count)}
    after = {p: interval(p, count + 1, initial) for p in range(count + 1)}
    (changed,) = (p for p in before if before[p] != after[p])
    assert changed == ancestor(count, count, initial)
    assert (after[changed].start, after[count].end) == before[changed]
    assert after[changed].end + 1 == after[count].start
    assert after[changed].size == after[count].size == before[changed].size // 2


@settings(deadline=None)
@given(initials, growths, growths, st.data())
def test_intervals_overlap_exactly_if_one_partition_is_the_others_ancestor(
    initial: int, a: int, b: int, data: st.DataObject
) -> None:
    p = data.draw(st.integers(0, initial + a - 1))
    q = data.draw(st.sampled_from(range(p % initial, initial + b, initial)))
    one, other = interval(p, initial + a, initial), interval(q, initial + b, initial)
    common = one.overlap(other)
    assert common in (None, one, other)
    related = ancestor(p, initial + b, initial) == q or ancestor(q, initial + a, initial) == p
    assert (common is not None) == related


@settings(deadline=None)
@given(initials, growths, st.integers(1, 40), st.data())
def test_shares_are_even_and_leave_no_key_out(initial: int, growth: int, readers: int, data: st.DataObject) -> None:
    p = data.draw(st.integers(0, initial + growth - 1))
    held = interval(p, initial + growth, initial)
    shares = cuts(held, readers)
    assert len(shares) == readers
    assert (shares[0].start, shares[-1].end) == (0, SPACE_END)
    assert all(one.end + 1 == two.start for one, two in pairwise(shares))
    sizes = [common.size for share in shares if (common := share.overlap(held))]
    assert len(sizes) == readers
    assert max(sizes) - min(sizes) <= 1
    assert [share.start for share in shares[1:]] == [held.start + held.size * i // readers for i in range(1, readers)]


loads = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 10**9)), max_size=8)


@settings(max_examples=300, deadline=None)
@given(initials, loads, st.integers(1, 50))
def test_shares_of_several_segments_carry_the_same_load(
    initial: int, drawn: list[tuple[int, int, int]], readers: int
) -> None:
    loads = [(interval(p, p + 1 + more if p + 1 + more > initial else initial, initial), n) for p, more, n in drawn]
    shares = balanced_cuts(loads, readers)
    assert (shares[0].start, shares[-1].end) == (0, SPACE_END)
    assert all(one.end + 1 == two.start for one, two in pairwise(shares))
    total = sum(n for _, n in loads)
    assert len(shares) == (readers if total else 1)
    for share in shares:
        carried = sum(n * common.size / held.size for held, n in loads if (common := held.overlap(share)))
        assert abs(carried - total / len(shares)) <= total * 1e-6 + 1e-6


parts = st.lists(st.one_of(st.just(0.0), st.floats(0, 1e12)), max_size=64)


def test_a_load_of_less_than_a_share_in_weight_is_cut_all_the_same() -> None:
    """Loads decay, and one of a trillionth of the largest weighed less than there were readers left for it."""
    assert len(cuts_by_load(interval(0, 1, 1), [0.0, 0.0, 504760548509.0, 0.0, 1.751239946490282e-06], 5)) == 5


@settings(max_examples=300, deadline=None)
@given(initials, growths, parts, st.integers(1, 64), st.data())
def test_shares_by_load_carry_the_same_load_and_none_is_empty(
    initial: int, growth: int, loads: list[float], readers: int, data: st.DataObject
) -> None:
    held = interval(data.draw(st.integers(0, initial + growth - 1)), initial + growth, initial)
    shares = cuts_by_load(held, loads, readers)
    assert shares == cuts_by_load(held, tuple(loads), readers)
    assert len(shares) == readers
    assert (shares[0].start, shares[-1].end) == (0, SPACE_END)
    assert all(one.end + 1 == two.start for one, two in pairwise(shares))
    assert all(share.overlap(held) for share in shares)
    if not any(loads):
        assert shares == cuts(held, readers)
        return
    size = held.size // len(loads)
    bounds = [held.start + held.size * part // len(loads) for part in range(len(loads) + 1)]
    parts = [Interval(start, after - 1) for start, after in pairwise(bounds)]
    mean, total = sum(loads) / len(loads), sum(loads)
    hot = {part: load > mean * HOT_FROM and load > total / readers / 2 for part, load in zip(parts, loads, strict=True)}
    found = [
        sum(
            load * (share.start <= part.start <= share.end if hot[part] else common.size / part.size)
            for part, load in zip(parts, loads, strict=True)
            if (common := share.overlap(part))
        )
        for share in shares
    ]
    tolerance = max(loads) * (len(loads) * 2**-39 + 4 / size) + total * 1e-9
    heaviest = max((load for part, load in zip(parts, loads, strict=True) if hot[part]), default=0.0)
    assert max(found) <= max(heaviest, total / readers) + heaviest + 2 * tolerance
    if not heaviest:
        assert max(found) - min(found) <= 2 * tolerance


@pytest.mark.parametrize("hot", [0, 9, 31, 63])
@pytest.mark.parametrize("readers", [2, 3, 4, 7, 12, 16])
def test_a_hot_key_is_not_cut_off_and_nobody_is_without_work(hot: int, readers: int) -> None:
    """The key lies anywhere in its part; the readers of the other parts have as equal work as there can be."""
    loads = [1.0] * 64
    loads[hot] = 64.0
    shares = cuts_by_load(SPACE, loads, readers)
    assert len(shares) == readers
    first, last = hot << SPACE_BITS - 6, (hot + 1 << SPACE_BITS - 6) - 1
    (owner,) = (share for share in shares if share.overlap(Interval(first, last)))
    others = [share.size for share in shares if share != owner]
    below, above = hot, 63 - hot
    if readers == 2 or not (below and above):
        best = max(below, above) / max(1, readers - 1)
    else:
        best = min(max(below / left, above / (readers - 1 - left)) for left in range(1, readers - 1))
    assert max(others) <= best * (1 << SPACE_BITS - 6) + 4_096
    if readers > 2:
        assert owner.size == 1 << SPACE_BITS - 6


@pytest.mark.parametrize("first", [0, 62])
def test_a_side_with_nothing_but_a_hot_key_takes_one_reader(first: int) -> None:
    """A second one found no work there, and was missing where the other parts are read."""
    loads = [1.0] * 64
    loads[first] = loads[first + 1] = 30.0
    shares = cuts_by_load(SPACE, loads, 7)
    assert len(shares) == 7
    part = 1 << SPACE_BITS - 6
    assert sum(share.size == part for share in shares) == 2
    assert max(share.size for share in shares) <= 62 / 5 * part + 4_096


def test_with_more_readers_than_hot_keys_each_of_these_has_one() -> None:
    loads = [0.0] * 64
    loads[3] = loads[4] = loads[40] = 5.0
    for readers in (3, 5, 16):
        shares = cuts_by_load(SPACE, loads, readers)
        parts = [Interval(at << SPACE_BITS - 6, (at + 1 << SPACE_BITS - 6) - 1) for at in (3, 4, 40)]
        assert len(shares) == readers
        if readers == 3:
            assert [[part for part in parts if share.overlap(part)] for share in shares] == [[part] for part in parts]


def test_shares_by_load_are_even_where_the_load_is_no_number() -> None:
    held = interval(1, 3, 1)
    assert cuts_by_load(held, [float("nan"), float("inf"), -1.0, 0.0], 5) == cuts(held, 5)
    assert cuts_by_load(held, [], 5) == cuts(held, 5)


def test_a_part_that_has_nearly_all_of_the_load_is_cut_itself() -> None:
    shares = cuts_by_load(SPACE, [0.0, 95.0, 0.0, 5.0], 10)
    assert sum(SPACE.size // 4 <= share.start < SPACE.size // 2 for share in shares) == 9


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1), initials, growths, st.data())
def test_a_record_without_a_key_lies_in_its_partitions_interval(
    offset: int, initial: int, growth: int, data: st.DataObject
) -> None:
    held = interval(data.draw(st.integers(0, initial + growth - 1)), initial + growth, initial)
    assert held.start <= keyless_spread(offset, held) <= held.end


def test_keys_and_records_without_a_key_fall_evenly_into_shares() -> None:
    initial, count = 6, 40
    held = interval(13, count, initial)
    shares = cuts(held, 10)
    mine = [h for h in range(0, 2**31, 40_009) if place(h, initial, count) == 13]
    keyed = [sum(share.start <= spread(h, initial) <= share.end for h in mine) for share in shares]
    assert sum(keyed) == len(mine) > 1000
    assert min(keyed) > 0.7 * len(mine) / 10
    keyless = [sum(share.start <= keyless_spread(o, held) <= share.end for o in range(10_000)) for share in shares]
    assert sum(keyless) == 10_000
    assert min(keyless) > 850


def test_an_interval_says_its_overlap_and_size() -> None:
    assert Interval(3, 9).overlap(Interval(9, 12)) == Interval(9, 9)
    assert Interval(3, 8).overlap(Interval(9, 12)) is None
    assert (Interval(3, 9).size, SPACE.size) == (7, 1 << 63)
