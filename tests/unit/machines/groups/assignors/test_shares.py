"""Cutting partitions for more members than there are: the proposal's examples, tiling, sizes, stickiness."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.machines.groups.assignors.shares import (
    Divided,
    Shared,
    deal_whole,
    divide_in_runs,
    divide_in_turn,
    imbalance,
    is_worth_a_move,
)
from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, common, size, union
from anabranch.machines.keyspace import SPACE_END, Interval, interval
from tests.support.thorough import thorough

HALF = (SPACE_END + 1) // 2
"""The proposal's N/2: it counts the key space from 0 to N, which are N + 1 places."""


def whole_topic(partitions: int) -> dict[int, Interval]:
    """The intervals of a topic that never grew."""
    return {number: interval(number, partitions, partitions) for number in range(partitions)}


def names(count: int) -> list[str]:
    return [f"M{number:03}" for number in range(1, count + 1)]


def by_partition(divided: Divided) -> dict[int, list[str]]:
    found: dict[int, list[tuple[Ranges, str]]] = {}
    for member, parts in divided.items():
        for partition, ranges in parts.items():
            found.setdefault(partition, []).append((ranges, member))
    return {partition: [member for _, member in sorted(found[partition])] for partition in sorted(found)}


def test_the_proposal_5_consumers_share_a_topic_of_3_partitions() -> None:
    found = divide_in_turn(Shared(whole_topic(3), ["M1", "M2", "M3", "M4", "M5"], {}, 16))
    lower, upper = (Interval(0, HALF - 1),), (Interval(HALF, SPACE_END),)
    assert found == {
        "M1": {0: lower},
        "M2": {1: lower},
        "M3": {2: WHOLE},
        "M4": {0: upper},
        "M5": {1: upper},
    }
    assert by_partition(found) == {0: ["M1", "M4"], 1: ["M2", "M5"], 2: ["M3"]}


def test_the_proposal_5_consumers_share_topics_of_2_and_3_partitions_by_range() -> None:
    members = ["c1", "c2", "c3", "c4", "c5"]
    assert by_partition(divide_in_runs(Shared(whole_topic(2), members, {}, 16))) == {
        0: ["c1", "c2", "c3"],
        1: ["c4", "c5"],
    }
    assert by_partition(divide_in_runs(Shared(whole_topic(3), members, {}, 16))) == {
        0: ["c1", "c2"],
        1: ["c3", "c4"],
        2: ["c5"],
    }


def test_topics_with_as_many_partitions_are_cut_alike_by_range() -> None:
    one = divide_in_runs(Shared(whole_topic(3), names(7), {}, 16))
    other = divide_in_runs(Shared(whole_topic(3), names(7), {"M001": {2: WHOLE}}, 16))
    assert one == other


def test_a_partition_has_no_more_sharers_than_allowed_and_those_that_have_something_keep_it() -> None:
    before = divide_in_turn(Shared(whole_topic(2), names(9)[3:], {}, 3))
    after = divide_in_turn(Shared(whole_topic(2), names(9), before, 3))
    assert after == before and len(after) == 6


def test_cut_points_follow_the_measured_load() -> None:
    loads = {0: [900.0, 0.0, 100.0, 0.0]}
    found = divide_in_turn(Shared(whole_topic(1), names(2), {}, 16, lambda number: loads[number]))
    share = found["M001"][0][0]
    assert share.start == 0 and abs(share.end - HALF // 2 * 5 // 9) < HALF >> 10


HALF_BUSY = [9.0] * 4 + [1.0] * 4


def cut_points(divided: Divided) -> list[int]:
    return sorted(ranges[0].start for parts in divided.values() for ranges in parts.values())


def divide_again(before: Divided, loads: list[float], members: list[str] | None = None) -> Divided:
    return divide_in_turn(Shared(whole_topic(1), members or [*before], before, 16, lambda _: loads))


def test_cuts_of_the_same_sharers_stay_until_a_share_has_half_as_much_again_as_the_mean() -> None:
    even = divide_again({}, [], names(2))
    assert divide_again(even, [1.49, 0.51]) == even
    moved = divide_again(even, [1.55, 0.45])
    assert moved != even
    held = whole_topic(1)[0]
    assert imbalance(held, [1.55, 0.45], [parts[0] for parts in moved.values()]) < 1.001
    assert divide_again(moved, [1.4, 0.6]) == moved, "noise moves nothing"
    assert divide_again(moved, [1.4, 0.6], names(3)) != moved


def test_a_load_that_cannot_be_divided_better_moves_no_cuts() -> None:
    hot = [0.0] * 8
    hot[3], hot[7] = 7.0, 3.0  # What is in one part counts as spread over it: neither half can be made lighter.
    before = divide_again({}, hot, names(2))
    for noise in range(1, 20):
        loads = [load + 0.01 * noise * (part == 1) for part, load in enumerate(hot)]
        assert divide_again(before, loads) == before


def test_range_cuts_topics_of_equal_size_alike_whatever_their_load() -> None:
    found = [
        divide_in_runs(Shared(whole_topic(1), names(2), {}, 16, lambda _, loads=loads: loads))
        for loads in (HALF_BUSY, [])
    ]
    assert found[0] == found[1]


@settings(max_examples=thorough(500, 100))
@given(
    loads=st.lists(st.lists(st.integers(0, 20), min_size=8, max_size=8), min_size=1, max_size=4),
    count=st.integers(2, 6),
)
def test_after_any_loads_shares_tile_and_cuts_rest_once_they_were_moved(loads: list[list[int]], count: int) -> None:
    found = divide_again({}, [], names(count))
    for each in loads:
        load = [float(it) for it in each]
        found = divide_again(found, load)
        shares = sorted(parts[0] for parts in found.values())
        assert union_of(shares) == WHOLE and sum(map(size, shares)) == size(WHOLE)
        if any(load):
            assert not is_worth_a_move(whole_topic(1)[0], load, shares)
            assert divide_again(found, load) == found


def union_of(shares: list[Ranges]) -> Ranges:
    whole: Ranges = NONE
    for ranges in shares:
        whole = union(whole, ranges)
    return whole


def test_without_a_measured_load_cuts_are_even() -> None:
    for loads in ([], [0.0, 0.0]):
        found = divide_in_turn(Shared(whole_topic(1), names(4), {}, 16, lambda _, loads=loads: loads))
        assert {size(parts[0]) for parts in found.values()} == {(SPACE_END + 1) // 4}


def test_a_partition_that_was_split_is_cut_within_its_interval_and_who_has_keys_of_it_stays() -> None:
    before = divide_in_turn(Shared(whole_topic(1), names(4), {}, 16))
    grown = {number: interval(number, 2, 1) for number in range(2)}
    after = divide_in_turn(Shared(grown, names(4), before, 16))
    assert by_partition(after) == {0: ["M001", "M002"], 1: ["M003", "M004"]}
    assert after["M001"][0][0].end < grown[0].end < after["M002"][0][0].end == SPACE_END


def test_whole_partitions_stay_with_those_that_have_most_of_them() -> None:
    held = {"a": {0: (Interval(0, 9),)}, "b": {0: (Interval(10, SPACE_END),), 1: WHOLE}}
    assert deal_whole([0, 1], ["a", "b"], held) == {"b": {0: WHOLE}, "a": {1: WHOLE}}
    assert deal_whole([0, 1, 2], ["a", "b"], {}) == {"a": {0: WHOLE, 2: WHOLE}, "b": {1: WHOLE}}
    assert deal_whole([0], [], {}) == {}


def check(shared: Shared, found: Divided) -> None:
    """Every key has exactly one owner; ranges are even; no member is without a share, nor has two."""
    sharers = dict.fromkeys(shared.intervals, 0)
    for partition, interval_ in shared.intervals.items():
        has: Ranges = NONE
        inside = []
        for parts in found.values():
            ranges = parts.get(partition, NONE)
            assert not common(has, ranges)
            has = union(has, ranges)
            sharers[partition] += bool(ranges)
            if ranges:
                inside.append(size(common(ranges, (interval_,))))
        assert has == WHOLE
        assert max(inside) - min(inside) <= 1 + interval_.size // 1000
    assert all(len(parts) == 1 for parts in found.values())
    assert len(found) == min(len(shared.members), shared.sharers_max * len(shared.intervals))
    assert max(sharers.values()) - min(sharers.values()) <= 1
    assert max(sharers.values()) <= shared.sharers_max


def moved(before: Divided, after: Divided, intervals: dict[int, Interval]) -> float:
    """How much of the key space changed hands, in partitions."""
    lost = 0.0
    for partition, held in intervals.items():
        stays = sum(
            size(common(common(parts.get(partition, NONE), after.get(member, {}).get(partition, NONE)), (held,)))
            for member, parts in before.items()
        )
        lost += 1 - stays / held.size
    return lost


sizes = st.tuples(st.integers(1, 6), st.integers(0, 30)).map(lambda it: (it[0], it[0] + it[1]))


@given(sizes, st.integers(1, 20), st.integers(0, 5))
def test_every_key_has_one_owner_and_shares_are_even(case: tuple[int, int], most: int, grown: int) -> None:
    partitions, members = case
    intervals = {number: interval(number, partitions + grown, partitions) for number in range(partitions)}
    for divide in (divide_in_turn, divide_in_runs):
        shared = Shared(intervals, names(members), {}, most)
        found = divide(shared)
        check(shared, found)
        assert found == divide(shared), "the same input gives the same answer"


@settings(deadline=None)
@given(sizes, st.lists(st.tuples(st.booleans(), st.integers(0, 100)), max_size=8))
def test_joins_and_leaves_move_few_keys(case: tuple[int, int], moves: list[tuple[bool, int]]) -> None:
    """One that joins takes its share; the order of the others stays, so neighbors move by at most a share each."""
    partitions, count = case
    intervals = whole_topic(partitions)
    members = names(count)
    held = divide_in_turn(Shared(intervals, members, {}, 64))
    for number, (joins, which) in enumerate(moves):
        before = list(members)
        if joins:
            members = sorted([*members, f"N{which:03}-{number}"])
        elif len(members) > partitions:
            members = [member for member in members if member != members[which % len(members)]]
        shared = Shared(intervals, members, held, 64)
        found = divide_in_turn(shared)
        check(shared, found)
        stayed = {member: parts for member, parts in held.items() if member in members}
        gone = sum(
            size(common(parts.get(partition, NONE), (intervals[partition],))) / intervals[partition].size
            for member, parts in held.items()
            for partition in intervals
            if member not in members
        )
        # What the leaver had, or the joiner gets, and at most a quarter of a partition between the others; where the
        # numbers of sharers were uneven, a member may have to change its partition, which cuts two anew.
        changed = moved(stayed, found, intervals) - gone
        sharers = len(members) // partitions
        assert changed <= 2 * (1 / 4 + 1 / max(1, sharers)) + 1e-9, (before, members, changed)
        held = found
    again = divide_in_turn(Shared(intervals, members, held, 64))
    assert again == held, "nothing moves when nothing changes"
