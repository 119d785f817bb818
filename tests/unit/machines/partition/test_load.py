"""The load of a partition by key: counts that fade, against the sum over all that was counted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.machines.keyspace import SPACE, Interval, interval
from anabranch.machines.partition.load import HALF_LIFE_MS, UNOBSERVED, LoadHistogram, PartitionLoad
from anabranch.records.filtering import LOAD_BUCKETS, Load

LOWER, UPPER = interval(0, 2, 1), interval(1, 2, 1)


def sample(held: Interval, **parts: int) -> Load:
    """A sample with so many records in each part, of 10 bytes each: `p3=5`."""
    load = Load(held)
    for name, count in parts.items():
        load.records[int(name[1:])] = count
        load.bytes[int(name[1:])] = 10 * count
    return load


counted = st.lists(
    st.tuples(st.integers(1, HALF_LIFE_MS), st.integers(0, LOAD_BUCKETS - 1), st.integers(1, 1000)), max_size=20
)


@settings(deadline=None)
@given(counted, st.integers(1, 10 * HALF_LIFE_MS))
def test_counts_fade_by_half_in_each_half_life(steps: list[tuple[int, int, int]], later_ms: int) -> None:
    histogram, now_ms = LoadHistogram(SPACE, 0), 0
    events = []
    for passed_ms, place, appended in steps:
        now_ms += passed_ms
        histogram.add(sample(SPACE, **{f"p{place}": 7}), appended, now_ms)
        events.append((now_ms, place, appended))
    end_ms = now_ms + later_ms
    found = histogram.rates(end_ms)
    steady = sum(2 ** (-s / HALF_LIFE_MS) for s in range(0, end_ms, 1000))  # One record a second since the begin.
    for place in range(LOAD_BUCKETS):
        left = sum(count * 2 ** ((at - end_ms) / HALF_LIFE_MS) for at, where, count in events if where == place)
        assert found.records[place] == pytest.approx(left / steady, rel=0.01 + 1000 / end_ms, abs=1e-9)
        assert found.bytes[place] == pytest.approx(10 * found.records[place])


def test_a_steady_load_has_its_rate_from_the_begin_and_after_long() -> None:
    histogram = LoadHistogram(SPACE, 0)
    for second in range(1, 4000):
        histogram.add(sample(SPACE, p1=1, p5=3), 400, second * 1000)
        if second in (5, 60, 3999):
            found = histogram.rates(second * 1000)
            assert found.records[1] == pytest.approx(100, rel=0.01)
            assert found.bytes[5] == pytest.approx(3000, rel=0.01)
            assert found.observed_ms == second * 1000


def test_a_halved_interval_keeps_the_counts_of_its_half() -> None:
    histogram = LoadHistogram(SPACE, 0)
    histogram.add(sample(SPACE, p3=1, p40=1), 2000, 1000)
    histogram.cover(LOWER, 1000)
    found = histogram.rates(1000)
    assert found.held == LOWER
    assert [place for place, rate in enumerate(found.records) if rate] == [6, 7]
    assert sum(found.records) == pytest.approx(1000, rel=0.01)
    upper = LoadHistogram(SPACE, 0)
    upper.add(sample(SPACE, p3=1, p40=1), 2000, 1000)
    upper.cover(UPPER, 1000)
    assert [place for place, rate in enumerate(upper.rates(1000).records) if rate] == [16, 17]


def test_any_other_interval_begins_anew() -> None:
    for before, after in ((LOWER, SPACE), (SPACE, interval(0, 4, 1)), (LOWER, UPPER)):
        histogram = LoadHistogram(before, 0)
        histogram.add(sample(before, p3=1), 1000, 1000)
        histogram.cover(after, 2000)
        assert histogram.rates(3000) == (after, 1000, (0.0,) * LOAD_BUCKETS, (0.0,) * LOAD_BUCKETS)


def test_nothing_is_said_before_time_has_passed_and_nothing_counts_without_records() -> None:
    histogram = LoadHistogram(SPACE, 5)
    assert histogram.rates(5) is UNOBSERVED
    histogram.add(sample(SPACE), 100, 10)
    assert sum(histogram.rates(10).records) == 0


def test_cuts_are_made_by_good_figures_alone_and_by_those_of_a_half_after_a_resize() -> None:
    flat = (1.0,) * LOAD_BUCKETS
    load = PartitionLoad(SPACE, 10_000, tuple(map(float, range(LOAD_BUCKETS))), (1_024.0,) * LOAD_BUCKETS)
    assert load.for_cuts(SPACE) == tuple(count + 1.0 for count in range(LOAD_BUCKETS))
    for bits in (1, 2, 3):
        parts = LOAD_BUCKETS >> bits
        for number in range(1 << bits):
            held = Interval(number * (SPACE.size >> bits), (number + 1) * (SPACE.size >> bits) - 1)
            assert load.for_cuts(held) == load.for_cuts(SPACE)[number * parts : (number + 1) * parts]
    assert load._replace(held=Interval(0, SPACE.end // 2)).for_cuts(SPACE) == ()
    assert load._replace(observed_ms=4_000).for_cuts(SPACE) == ()
    assert PartitionLoad(SPACE, 10_000, flat, flat).for_cuts(SPACE) == (), "640 records"
    assert UNOBSERVED.for_cuts(SPACE) == ()
