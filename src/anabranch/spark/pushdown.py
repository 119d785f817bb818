"""Filters that Spark pushes down, and what they leave to read: of the offsets a part, of the records some keys'.

Filters are joined by AND, so each narrows what the ones before it left. A filter on `partition` or `offset` is kept by
the offsets that are planned, one on `key` by brokers and readers together; these Spark need not evaluate again. A
filter on `timestamp` gives only where to begin. Spark pushes down comparisons of a column with a literal: `key = 'a'`
and `key in ('a', 'b')`, but not `cast(key AS string) = 'a'`. Streaming queries of PySpark push nothing down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

AtTimestamp = Callable[[int], Mapping[int, int]]
"""Finds each partition's first offset at a time (ms, above 0) or later, -1 without one."""


@dataclass(frozen=True, slots=True)
class Range:
    """A filter as an inclusive range of a column, or as a set of values."""

    column: str
    low: int | None = None
    high: int | None = None
    values: frozenset[int] | None = None

    def holds(self, value: int) -> bool:
        """Whether the filter accepts a value."""
        above = self.low is None or value >= self.low
        below = self.high is None or value <= self.high
        return above and below and (self.values is None or value in self.values)

    def narrow(self, at: AtTimestamp, first: dict[int, int], last: dict[int, int]) -> None:
        """Narrow the offsets to read, `first` to `last` of every partition of a topic; none leaves these bounds.

        A time at or before the epoch narrows nothing: no record is older, and ListOffsets takes times below 0 for
        names of other offsets (-1 is the latest).
        """
        if self.column == "timestamp" and self.low is not None and self.low > 0:
            found = at(self.low)
            for partition in first:
                offset = found.get(partition, -1)
                known = offset >= 0
                first[partition] = max(first[partition], min(offset, last[partition])) if known else last[partition]
        for partition in list(first):
            if self.column == "partition" and not self.holds(partition):
                last[partition] = first[partition]
            elif self.column == "offset":
                if self.low is not None:
                    first[partition] = max(first[partition], min(self.low, last[partition]))
                if self.high is not None:
                    last[partition] = min(last[partition], self.high + 1)


@dataclass
class Pushed:
    """What the filters pushed so far leave to read."""

    ranges: list[Range] = field(default_factory=list)
    keys: frozenset[bytes] | None = None
    """The keys wanted; None: all, and records without a key."""

    def push(self, filters: Iterable[Filter]) -> Iterator[Filter]:
        """Take the filters that leave less to read; yield those that Spark must evaluate all the same."""
        left: list[Filter] = []
        for filter_ in filters:
            keys = _keys_of(filter_)
            if keys is not None:
                self.keys = keys if self.keys is None else self.keys & keys
            elif (range_ := _range_of(filter_)) is not None:
                self.ranges.append(range_)
                if range_.column == "timestamp":
                    left.append(filter_)
            else:
                left.append(filter_)
        # Spark says `key IS NOT NULL` beside `key = ...`, which implies it.
        return (each for each in left if self.keys is None or each != IsNotNull(("key",)))


def _column_of(filter_: Filter) -> str:
    path: tuple[str, ...] = getattr(filter_, "attribute", ())
    return path[0] if len(path) == 1 else ""


def _keys_of(filter_: Filter) -> frozenset[bytes] | None:
    """Parse a filter that wants some keys; None for any other."""
    if _column_of(filter_) != "key" or not isinstance(filter_, EqualTo | EqualNullSafe | In):
        return None
    values = list(filter_.value) if isinstance(filter_, In) else [filter_.value]
    if isinstance(filter_, EqualNullSafe) and filter_.value is None:
        return None  # It wants the records without a key.
    wanted = [value for value in values if value is not None]
    return frozenset(map(bytes, wanted)) if all(isinstance(each, bytes | bytearray) for each in wanted) else None


def _range_of(filter_: Filter) -> Range | None:
    """Parse a filter that limits the offset ranges; None for any other."""
    column = _column_of(filter_)
    if column not in ("partition", "offset", "timestamp"):
        return None
    if isinstance(filter_, IsNotNull):
        return Range(column)
    if isinstance(filter_, In):
        numbers = [_number(value) for value in filter_.value if value is not None]
        if column != "partition" or not numbers:
            return None
        return Range(column, values=frozenset(numbers))
    value = _number(getattr(filter_, "value", None))
    if value is None:
        return None
    match filter_:
        case EqualTo() | EqualNullSafe():
            return Range(column, value, value)
        case GreaterThan():
            return Range(column, low=value if column == "timestamp" else value + 1)
        case GreaterThanOrEqual():
            return Range(column, low=value)
        case LessThan():
            return Range(column, high=value if column == "timestamp" else value - 1)
        case LessThanOrEqual():
            return Range(column, high=value)
    return None


def _number(value: Any) -> Any:
    """Return a filter's value as an offset, a partition or, rounded down, a time in ms."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return int(value.timestamp() * 1000 // 1)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
