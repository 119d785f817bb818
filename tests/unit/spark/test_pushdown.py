"""Filters that Spark pushes down: what they leave to read, and which ones Spark still evaluates."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from anabranch.machines.keyspace import Interval, spread
from anabranch.machines.partition.sharing import KEYS_MAX, KEYS_SIZE_MAX, Asked
from anabranch.records.hashing import murmur2
from anabranch.spark.plan import WHOLE, Read, Task, keys_within
from anabranch.spark.pushdown import Pushed
from anabranch.spark.reader import asked_for

KEY, PARTITION, OFFSET, TIMESTAMP = ("key",), ("partition",), ("offset",), ("timestamp",)
SOME_TIME = datetime(2026, 1, 2, 3, 4, 5, 678_900, UTC)


def left_by(*filters: Filter) -> tuple[frozenset[bytes] | None, list[Filter]]:
    """The keys wanted, and the filters that Spark evaluates."""
    pushed = Pushed()
    left = list(pushed.push(filters))
    return pushed.keys, left


@pytest.mark.parametrize(
    ("filters", "keys"),
    [
        ([EqualTo(KEY, b"a")], {b"a"}),
        ([IsNotNull(KEY), EqualTo(KEY, b"")], {b""}),
        ([EqualNullSafe(KEY, b"a")], {b"a"}),
        ([In(KEY, (b"a", b"b", None))], {b"a", b"b"}),
        ([In(KEY, (b"a", b"b")), In(KEY, (b"b", b"c"))], {b"b"}),
        ([EqualTo(KEY, b"a"), EqualTo(KEY, b"b")], set()),
        ([EqualTo(KEY, None)], set()),
    ],
)
def test_filters_on_keys_are_kept_and_none_of_them_is_spark_s(filters: list[Filter], keys: set[bytes]) -> None:
    assert left_by(*filters) == (keys, [])


@pytest.mark.parametrize(
    "filter_",
    [
        IsNull(KEY),
        IsNotNull(KEY),
        EqualNullSafe(KEY, None),
        Not(EqualTo(KEY, b"a")),
        GreaterThan(KEY, b"a"),
        EqualTo(KEY, "a"),
        In(KEY, (b"a", "b")),
        EqualTo(("value",), b"a"),
        EqualTo(("headers", "key"), "a"),
    ],
)
def test_other_filters_are_left_to_spark(filter_: Filter) -> None:
    assert left_by(filter_) == (None, [filter_])


@pytest.mark.parametrize(
    ("filter_", "first", "last"),
    [
        (EqualTo(PARTITION, 1), {0: 9, 1: 5}, {0: 9, 1: 20}),
        (In(PARTITION, (0, 7)), {0: 2, 1: 5}, {0: 9, 1: 5}),
        (LessThan(PARTITION, 1), {0: 2, 1: 5}, {0: 9, 1: 5}),
        (GreaterThanOrEqual(OFFSET, 7), {0: 7, 1: 7}, {0: 9, 1: 20}),
        (GreaterThan(OFFSET, 7), {0: 8, 1: 8}, {0: 9, 1: 20}),
        (LessThanOrEqual(OFFSET, 7), {0: 2, 1: 5}, {0: 8, 1: 8}),
        (LessThan(OFFSET, 7), {0: 2, 1: 5}, {0: 7, 1: 7}),
        (EqualTo(OFFSET, 7), {0: 7, 1: 7}, {0: 8, 1: 8}),
        (GreaterThanOrEqual(OFFSET, 15), {0: 9, 1: 15}, {0: 9, 1: 20}),
    ],
)
def test_filters_on_partitions_and_offsets_leave_fewer_offsets(
    filter_: Filter, first: dict[int, int], last: dict[int, int]
) -> None:
    pushed = Pushed()
    assert list(pushed.push([filter_])) == []
    starts, ends = {0: 2, 1: 5}, {0: 9, 1: 20}
    for range_ in pushed.ranges:
        range_.narrow(lambda _: {}, starts, ends)
    read = {p: (starts[p], ends[p]) for p in starts if starts[p] < ends[p]}
    assert read == {p: (first[p], last[p]) for p in first if first[p] < last[p]}
    assert starts[0] <= 9 and starts[1] <= 20, "nothing begins beyond the end of what is to be read"


def test_a_filter_on_time_says_where_to_begin_and_is_evaluated_by_spark_too() -> None:
    asked: list[int] = []

    def at(timestamp: int) -> Mapping[int, int]:
        asked.append(timestamp)
        return {0: 6, 1: -1}

    pushed = Pushed()
    filters = [GreaterThan(TIMESTAMP, SOME_TIME), LessThan(TIMESTAMP, SOME_TIME)]
    assert list(pushed.push(filters)) == filters
    first, last = {0: 2, 1: 5}, {0: 9, 1: 20}
    for range_ in pushed.ranges:
        range_.narrow(at, first, last)
    assert (first, last) == ({0: 6, 1: 20}, {0: 9, 1: 20})
    assert asked == [int(SOME_TIME.timestamp() * 1000)]


@pytest.mark.parametrize("ms", [-2_208_988_800_000, -1_000, -3, -2, -1, 0])
def test_a_time_at_or_before_the_epoch_leaves_every_record_and_is_not_looked_up(ms: int) -> None:
    """ListOffsets takes -1 for the latest offset, -2 for the earliest, -3 for that of the largest timestamp."""
    pushed = Pushed()
    list(pushed.push([GreaterThanOrEqual(TIMESTAMP, datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms))]))
    first, last = {0: 2, 1: 5}, {0: 9, 1: 20}
    for range_ in pushed.ranges:
        range_.narrow(lambda at: {-1: {0: 9, 1: 20}, -3: {0: 8, 1: 19}}.get(at, {}), first, last)
    assert (first, last) == ({0: 2, 1: 5}, {0: 9, 1: 20})


def test_a_task_has_the_keys_of_its_range() -> None:
    places = {key: spread(murmur2(key), 3) for key in (b"a", b"b", b"c", b"d")}
    low, *_, high = sorted(places.values())
    read = Read("t", 0, 0, 10, initial=3)
    for keys in (WHOLE, Interval(0, low), Interval(low + 1, high - 1), Interval(high, WHOLE.end)):
        expected = tuple(key for key, place in places.items() if keys.start <= place <= keys.end)
        assert keys_within(Task((read,), keys), places) == expected


def test_brokers_are_asked_for_keys_that_a_fetch_can_name() -> None:
    assert asked_for(WHOLE, ()) is None
    assert asked_for(WHOLE, (b"a",)) == Asked((WHOLE,), (b"a",))
    assert asked_for(Interval(3, 5), ()) == Asked((Interval(3, 5),))
    many = tuple(b"%d" % number for number in range(KEYS_MAX + 1))
    assert asked_for(WHOLE, many[1:]) == Asked((WHOLE,), many[1:])
    assert asked_for(WHOLE, many) is None
    assert asked_for(Interval(3, 5), (bytes(KEYS_SIZE_MAX + 1),)) == Asked((Interval(3, 5),))
