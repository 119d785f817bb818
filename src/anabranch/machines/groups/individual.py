"""Individual commits: the ranges of offsets that a group has processed above its frontier (cooperative.md, section 1).

The rule: ranges are disjoint and no two are neighbors, so that each is as long as it can be, and a gap lies between any
two. A range is known by its start. `merged` says what becomes of ranges that are added; nothing but `put` and `remove`
changes anything, so that a decision looks at a state that the records of the decision change afterwards.

Starts are kept in buckets of some hundreds: of 100,000 ranges one is found, put and removed in a few microseconds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from anabranch.base.limits import RANGES_PER_COMMIT_MAX

BUCKET_SIZE = 512
"""A bucket of twice as many starts is halved."""
OFFSET_MAX = (1 << 63) - 2
"""The largest offset of a record: the next one must be an offset, too."""
Range = tuple[int, int]
"""The first and the last offset."""


class Merge(NamedTuple):
    """What adding ranges changes."""

    put: Sequence[Range]
    """New or longer ranges, ascending; one with the start of an older range replaces it."""
    removed: Sequence[int]
    """Starts of ranges that went into others, ascending."""
    repeated: Range | None
    """The first offsets that were added again; None where none were."""


class OffsetRanges:
    """The ranges of one group and partition."""

    __slots__ = ("_buckets", "_ends", "_firsts")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._ends: dict[int, int] = dict(ranges)
        starts = sorted(self._ends)
        self._buckets = [starts[at : at + BUCKET_SIZE] for at in range(0, len(starts), BUCKET_SIZE)]
        self._firsts = [bucket[0] for bucket in self._buckets]

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Range]:
        ends = self._ends
        for bucket in self._buckets:
            for start in bucket:
                yield start, ends[start]

    def __contains__(self, start: int) -> bool:
        """Whether a range begins at an offset."""
        return start in self._ends

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OffsetRanges) and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]

    def copied(self) -> list[Range]:
        """All ranges, ascending; a snapshot of 100,000 takes a few milliseconds less than they take to be looked at."""
        return sorted(self._ends.items())

    def first(self) -> Range | None:
        """The lowest range."""
        return (self._firsts[0], self._ends[self._firsts[0]]) if self._firsts else None

    def end_of(self, start: int) -> int | None:
        """The last offset of the range that begins at an offset."""
        return self._ends.get(start)

    def at_or_before(self, offset: int) -> Range | None:
        """The last range that begins at or before an offset."""
        number = bisect_right(self._firsts, offset) - 1
        if number < 0:
            return None
        bucket = self._buckets[number]
        start = bucket[bisect_right(bucket, offset) - 1]
        return start, self._ends[start]

    def after(self, offset: int) -> Range | None:
        """The first range that begins behind an offset."""
        number = max(bisect_right(self._firsts, offset) - 1, 0)
        while number < len(self._buckets):
            bucket = self._buckets[number]
            at = bisect_right(bucket, offset)
            if at < len(bucket):
                return bucket[at], self._ends[bucket[at]]
            number += 1
        return None

    def starts_within(self, first: int, last: int) -> Iterator[int]:
        """Where the ranges begin that lie between two offsets, or reach into what is between them."""
        number = max(bisect_right(self._firsts, first) - 1, 0)
        if number >= len(self._buckets):
            return
        at = max(bisect_right(self._buckets[number], first) - 1, 0)
        if self._ends[self._buckets[number][at]] < first:
            at += 1
        while number < len(self._buckets):
            bucket = self._buckets[number]
            end = bisect_right(bucket, last)
            yield from bucket[at:end]
            if end < len(bucket):
                return
            number, at = number + 1, 0

    def count_below(self, offset: int) -> int:
        """The number of ranges that begin before an offset."""
        number = bisect_left(self._firsts, offset)
        return (
            sum(map(len, self._buckets[: number - 1])) + bisect_left(self._buckets[number - 1], offset) if number else 0
        )

    def reaches(self, offset: int) -> int:
        """The next offset to read of a reader at `offset`: behind the range that holds or touches it."""
        found = self.at_or_before(offset)
        return offset if found is None else max(offset, found[1] + 1)

    def merged(self, added: Sequence[Range]) -> Merge:
        """Say what adding ranges would change. They are ascending and disjoint (`checked`)."""
        put: list[Range] = []
        removed: list[int] = []
        repeated: Range | None = None
        low, high = -1, -2
        for start, end in added:
            if low >= 0 and start <= high + 1:
                if start <= high:
                    repeated = repeated or (start, min(end, high))
                high = max(high, end)
            else:
                self._finish(put, low, high)
                low, high = start, end
                before = self.at_or_before(start)
                if before is not None and before[1] >= start - 1:
                    if before[1] >= start:
                        repeated = repeated or (start, min(end, before[1]))
                    low, high = before[0], max(high, before[1])
            behind = self.after(removed[-1] if removed and removed[-1] > low else low)
            while behind is not None and behind[0] <= high + 1:
                if max(behind[0], start) <= min(behind[1], end):
                    repeated = repeated or (max(behind[0], start), min(behind[1], end))
                removed.append(behind[0])
                high = max(high, behind[1])
                behind = self.after(behind[0])
        self._finish(put, low, high)
        return Merge(put, removed, repeated)

    def _finish(self, put: list[Range], low: int, high: int) -> None:
        if low >= 0 and self._ends.get(low) != high:
            put.append((low, high))

    # -- changes -------------------------------------------------------------------------------------------------------

    def put(self, start: int, end: int) -> None:
        """Set the range that begins at `start`."""
        known = start in self._ends
        self._ends[start] = end
        if known:
            return
        number = bisect_right(self._firsts, start) - 1
        if number < 0:
            number = 0
            if not self._buckets:
                self._buckets.append([])
                self._firsts.append(start)
        bucket = self._buckets[number]
        insort(bucket, start)
        self._firsts[number] = bucket[0]
        if len(bucket) >= 2 * BUCKET_SIZE:
            self._buckets.insert(number + 1, bucket[BUCKET_SIZE:])
            del bucket[BUCKET_SIZE:]
            self._firsts.insert(number + 1, self._buckets[number + 1][0])

    def remove(self, start: int) -> None:
        """Remove the range that begins at `start`, if there is one."""
        if self._ends.pop(start, None) is None:
            return
        number = bisect_right(self._firsts, start) - 1
        bucket = self._buckets[number]
        del bucket[bisect_left(bucket, start)]
        if bucket:
            self._firsts[number] = bucket[0]
        else:
            del self._buckets[number], self._firsts[number]

    def remove_below(self, offset: int) -> list[int]:
        """Remove the ranges that end before an offset; return their starts."""
        gone: list[int] = []
        while self._buckets and self._ends[self._firsts[0]] < offset:
            bucket = self._buckets[0]
            last = bisect_left(bucket, offset)
            if last and self._ends[bucket[last - 1]] >= offset:
                last -= 1
            for start in bucket[:last]:
                del self._ends[start]
            gone += bucket[:last]
            if last < len(bucket):
                del bucket[:last]
                self._firsts[0] = bucket[0]
                break
            del self._buckets[0], self._firsts[0]
        return gone


class WrongRangesError(ValueError):
    """Ranges that no commit may have; the text is a sentence for the client."""


def checked(ranges: Iterable[Range]) -> list[Range]:
    """Sort ranges, and join those that touch. WrongRangesError where one is none, or two overlap, or they are many."""
    found = sorted(ranges)
    if len(found) > RANGES_PER_COMMIT_MAX:
        raise WrongRangesError(f"{len(found)} ranges are committed at once; {RANGES_PER_COMMIT_MAX} can be.")
    joined: list[Range] = []
    last = -2
    for start, end in found:
        if not 0 <= start <= end <= OFFSET_MAX:
            raise WrongRangesError(f"The range {start}-{end} is none: it ends before it starts, or is out of bounds.")
        if start <= last:
            raise WrongRangesError(f"The range {start}-{end} overlaps the one that ends at {last}.")
        if start == last + 1:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
        last = end
    return joined


def gaps(stable: int, ranges: Iterable[Range]) -> Iterator[Range]:
    """The offsets from the stable offset on that are between ranges: not processed, or not by all keys."""
    begin = stable
    for start, end in ranges:
        if start > begin:
            yield begin, start - 1
        begin = max(begin, end + 1)
