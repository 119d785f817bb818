"""The load of one partition over the key space: how many records and bytes are appended to each part of its interval.

The interval is cut into LOAD_BUCKETS equal parts. What was counted fades with a half-life of HALF_LIFE_MS: a record
counts half as much after that time. A rate is what is left of a count, divided by what a steady rate of one a second
would have left in the time that the partition was observed; so rates are right from the first sample on, and follow a
change of load within some half-lives.

Not every record is looked at: a sample stands for all records that were appended since the sample before
(`server.partitions.load`). After a resize that halved the interval the parts are cut in two; after any other change
counting begins anew, as what the other half held is not known here.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple

from anabranch.machines.keyspace import Interval
from anabranch.records.filtering import LOAD_BUCKETS, Load

HALF_LIFE_MS = 300_000
OBSERVED_MIN_MS = 5_000
RECORDS_MIN = 1_000
"""Fewer records, or a shorter time, say nothing about where to cut."""
RECORD_COST = 1_024
"""Bytes that cost a reader as much as a record does by itself."""
_MEAN_LIFE_MS = HALF_LIFE_MS / log(2)


class PartitionLoad(NamedTuple):
    """What is appended to a partition, by equal parts of its interval, ascending."""

    held: Interval
    observed_ms: int
    """For how long the partition has been observed; 0 for not at all."""
    records: tuple[float, ...]
    """Per second."""
    bytes: tuple[float, ...]
    """Per second, of records that are not compressed."""

    def for_cuts(self, held: Interval) -> tuple[float, ...]:
        """Return what equal parts of `held` cost a reader, in records of RECORD_COST bytes a second.

        None where the figures are no good, or of an interval of which `held` is no half, quarter and so on: a resize
        is told here a moment later than to who cuts.
        """
        window_s = min(self.observed_ms, _MEAN_LIFE_MS) / 1000
        if self.observed_ms < OBSERVED_MIN_MS or sum(self.records) * window_s < RECORDS_MIN:
            return ()
        costs = tuple(count + size / RECORD_COST for count, size in zip(self.records, self.bytes, strict=True))
        if held == self.held:
            return costs
        if self.held.overlap(held) != held or self.held.size > held.size * len(costs):
            return ()
        parts = len(costs) * held.size // self.held.size
        first = (held.start - self.held.start) // held.size * parts
        return costs[first : first + parts]


UNOBSERVED = PartitionLoad(Interval(0, -1), 0, (), ())


class LoadHistogram:
    """The counts of one partition."""

    __slots__ = ("_began_ms", "_bytes", "_counted_ms", "_records", "held")

    def __init__(self, held: Interval, now_ms: int) -> None:
        self._begin(held, now_ms)

    def _begin(self, held: Interval, now_ms: int) -> None:
        self.held = held
        self._began_ms = self._counted_ms = now_ms
        self._records = [0.0] * LOAD_BUCKETS
        self._bytes = [0.0] * LOAD_BUCKETS

    def add(self, sample: Load, appended: int, now_ms: int) -> None:
        """Count `appended` records, which are spread, and as large, as those of a sample of the same interval."""
        assert sample.start == self.held.start, "a sample of another interval"
        sampled = sum(sample.records)
        if not sampled:
            return
        left, weight = _left(now_ms - self._counted_ms), appended / sampled
        self._counted_ms = max(now_ms, self._counted_ms)
        self._records = [left * old + weight * new for old, new in zip(self._records, sample.records, strict=True)]
        self._bytes = [left * old + weight * new for old, new in zip(self._bytes, sample.bytes, strict=True)]

    def cover(self, held: Interval, now_ms: int) -> None:
        """Go on with another interval: keep the counts of a half of this one, begin anew otherwise."""
        if held == self.held:
            return
        if 2 * held.size == self.held.size and self.held.overlap(held) == held:
            first = 0 if held.start == self.held.start else LOAD_BUCKETS // 2
            self._records = _halves(self._records[first : first + LOAD_BUCKETS // 2])
            self._bytes = _halves(self._bytes[first : first + LOAD_BUCKETS // 2])
            self.held = held
        else:
            self._begin(held, now_ms)

    def rates(self, now_ms: int) -> PartitionLoad:
        """What is appended per second, now."""
        observed_ms = max(0, now_ms - self._began_ms)
        if not observed_ms:
            return UNOBSERVED
        window_s = _MEAN_LIFE_MS / 1000 * (1 - _left(observed_ms))
        scale = _left(now_ms - self._counted_ms) / window_s
        records, sizes = tuple(scale * it for it in self._records), tuple(scale * it for it in self._bytes)
        return PartitionLoad(self.held, observed_ms, records, sizes)


def _left(elapsed_ms: int) -> float:
    """The part of a count that has not faded."""
    return float(2 ** (-max(0, elapsed_ms) / HALF_LIFE_MS))


def _halves(counts: list[float]) -> list[float]:
    return [half for count in counts for half in (count / 2, count / 2)]
