"""The slices that a member fetched without keys (ADR 0053): what of them is done, and which claim comes next.

The records of a slice are in a tracker, under a name of their own: slices have no order among each other, and their
records have none either. A slice is in hand until all of it is done and committed. It is dropped, with what is not
done, where its leader says that another member has it, and when this one is fenced.

The rule: an offset that is not committed is in hand once. A slice that was held for too long may be offered again to
the member that still has it: what is in hand stays as it is, and only the rest of the slice comes in. So no record is
handed out beside itself, and work that takes longer than the hold time counts when it is done.

Offsets without a record (markers, what was aborted or compacted away) belong to the next record of their slice, and
those behind its last record to that one: they are committed with it, also where an application names the offsets of
its records alone. So all of a slice is done when its records are.

A claim is repeated, under the same number, until its slice has come. A leader that does not know the session (it is a
new one) has it begun anew; what is done of slices in hand should be committed before, as they are offered again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.processing import Ranges, Tracker
from anabranch.machines.clients.processing.values import Item

BEGIN_ANEW = frozenset({ErrorCode.SHARE_SESSION_NOT_FOUND, ErrorCode.INVALID_SHARE_SESSION_EPOCH})
"""The leader has not followed this session: another one begins."""


class Part(NamedTuple):
    """Offsets of a slice in hand that are done and not committed, both inclusive."""

    tp: TopicPartition
    slice: int
    start: int
    end: int


@dataclass(slots=True)
class Held:
    """A slice in hand: offsets `start` to `end`, both inclusive."""

    name: TopicPartition
    """Its name in the tracker."""
    tp: TopicPartition
    start: int
    end: int
    committed: list[tuple[int, int]] = field(default_factory=list)
    """Ascending, no two of them neighbors."""
    gaps: array[int] = field(default_factory=lambda: array("q"))
    """Where offsets without a record begin, and the offset behind them, by turns."""

    def around(self, first: int, last: int) -> tuple[int, int]:
        """Widen a range of these offsets by those without a record that belong to its records."""
        gaps, start, end = self.gaps, first, last
        at = bisect_right(gaps, first - 1)
        if at % 2 and gaps[at] <= last:
            start = gaps[at - 1]
        if gaps and gaps[-1] > self.end and first < gaps[-2] <= last + 1:
            end = self.end
        return start, end


@dataclass(slots=True)
class Session:
    """The claims of one partition."""

    number: int
    sequence: int = 0
    """The number of the next claim."""
    offset: int = -1
    """Where the group begins if it has committed nothing; -1 while the leader has not asked for it."""
    not_before_ms: int = 0


class _Spans:
    """The slices in hand of one partition, by their offsets: of 10,000 those between two offsets are found at once.

    They may overlap: of offsets that are in two of them, all but the later one has committed them.
    """

    __slots__ = ("_lengths", "_starts")

    def __init__(self) -> None:
        self._starts: list[tuple[int, int, int]] = []
        """Start, number, end; ascending."""
        self._lengths: Counter[int] = Counter()
        """How many there are below each power of two in length: how far before an offset one may begin."""

    def __bool__(self) -> bool:
        return bool(self._starts)

    def put(self, number: int, start: int, end: int) -> None:
        """Add a slice."""
        insort(self._starts, (start, number, end))
        self._lengths[(end - start + 1).bit_length()] += 1

    def remove(self, number: int, start: int, end: int) -> None:
        """Remove a slice."""
        del self._starts[bisect_left(self._starts, (start, number, end))]
        length = (end - start + 1).bit_length()
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]

    def between(self, first: int, last: int) -> list[int]:
        """The slices that have some of these offsets, the latest first."""
        before = (1 << max(self._lengths, default=0)) - 1
        found: list[int] = []
        for at in range(bisect_left(self._starts, (first - before, -1, -1)), len(self._starts)):
            start, number, end = self._starts[at]
            if start > last:
                break
            if end >= first:
                found.append(number)
        return sorted(found, reverse=True)


class SliceLedger:
    """The slices of one member, of all partitions."""

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self._held: dict[int, Held] = {}
        self._spans: dict[TopicPartition, _Spans] = {}
        """The same by partition."""
        self._touched: dict[int, None] = {}
        """Those of which something may be done and not committed."""
        self._without_records: dict[int, None] = {}
        """Those of them that came without any record."""
        self._sessions: dict[TopicPartition, Session] = {}
        self._numbers = 0

    # -- claims --------------------------------------------------------------------------------------------------------

    def session(self, tp: TopicPartition) -> Session:
        """The claims of a partition."""
        found = self._sessions.get(tp)
        if found is None:
            found = self._sessions[tp] = self._begun(-1)
        return found

    def _begun(self, offset: int) -> Session:
        self._numbers += 1
        return Session(self._numbers, offset=offset)

    def begin_anew(self, tp: TopicPartition) -> None:
        """Begin another session, and drop what is in hand of the partition: it will be offered again."""
        self.drop([tp])
        self._sessions[tp] = self._begun(-1 if tp not in self._sessions else self._sessions[tp].offset)

    def got(
        self, tp: TopicPartition, session: int, sequence: int, start: int, end: int, records: Sequence[Item]
    ) -> bool:
        """Take what is not in hand of a slice that a claim got; False if it is not the one that was claimed.

        `records` are those of the slice, ascending.
        """
        known = self._sessions.get(tp)
        if known is None or (known.number, known.sequence) != (session, sequence):
            return False
        known.sequence += 1
        for first, last in without([(start, end)], self._in_hand(tp, start, end)):
            begin = bisect_left(records, first, key=_offset_of)
            behind = bisect_left(records, last + 1, begin, key=_offset_of)
            self._hold(tp, first, last, records[begin:behind])
        return True

    def _in_hand(self, tp: TopicPartition, start: int, end: int) -> list[tuple[int, int]]:
        """The offsets between two that are in hand and not committed, ascending."""
        found: list[tuple[int, int]] = []
        for number in self._between(tp, start, end):
            held = self._held[number]
            found += without([(held.start, held.end)], held.committed)
        return sorted(found)

    def _between(self, tp: TopicPartition, start: int, end: int) -> list[int]:
        spans = self._spans.get(tp)
        return [] if spans is None else spans.between(start, end)

    def _hold(self, tp: TopicPartition, start: int, end: int, records: Sequence[Item]) -> None:
        self._numbers += 1
        name = TopicPartition(tp.topic, self._numbers)
        self._held[self._numbers] = Held(name, tp, start, end, gaps=_gaps(start, end, records))
        self._spans.setdefault(tp, _Spans()).put(self._numbers, start, end)
        if not records:
            self._without_records[self._numbers] = None
        self.tracker.begin(name, start)
        self.tracker.take(name, records, end + 1)

    # -- what is done --------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._held)

    def slices(self) -> Iterator[tuple[TopicPartition, int, int]]:
        """The slices in hand: partition, first and last offset."""
        return ((held.tp, held.start, held.end) for held in self._held.values())

    @property
    def has_passed(self) -> bool:
        """Whether there are slices in hand without any record."""
        return bool(self._without_records)

    def passed(self) -> list[Part]:
        """The slices without any record, which are done whatever the application does: deleted offsets, for example."""
        return self._done_of(self._without_records)

    def done(self) -> list[Part]:
        """All that is done and not committed, slice by slice."""
        self.note_done()
        found: list[Part] = []
        for number in list(self._touched):
            parts = self._done_of([number])
            found += parts
            if not parts:
                del self._touched[number]
        return found

    def note_done(self) -> None:
        """Note of which slices more is done, so that nobody has to look at all of them."""
        self._touched.update((name.partition, None) for name in self.tracker.moved() if name.partition in self._held)

    def _done_of(self, numbers: Iterable[int]) -> list[Part]:
        found: list[Part] = []
        for number in numbers:
            held = self._held[number]
            stable = self.tracker.stable(held.name, held.end + 1)
            done = [(held.start, stable - 1)] if stable > held.start else []
            for first, last in without([*done, *self.tracker.finished(held.name, held.end + 1)], held.committed):
                found.append(Part(held.tp, number, first, last))
        return found

    def parts_of(self, ranges: Mapping[TopicPartition, Ranges]) -> list[Part]:
        """These ranges of offsets, and what belongs to their records, as parts of slices in hand.

        ApiError where one is not in hand.
        """
        found: dict[int, list[tuple[int, int]]] = {}
        for tp, some in ranges.items():
            for first, last in some:
                left = [(first, last)]
                for number in self._between(tp, first, last):  # The latest has what is committed in no other.
                    held = self._held[number]
                    rest = without(left, [(held.start, held.end)])
                    for bounds in without(left, rest):
                        beside = without([held.around(*bounds)], held.committed)
                        found.setdefault(number, []).extend([bounds, *beside])
                    left = rest
                if left:
                    text = f"offsets {first} to {last} of {tp} are not all in hand: commit those of records polled"
                    raise ApiError(ErrorCode.INVALID_RECORD_STATE, text)
        return [Part(self._held[number].tp, number, *bounds) for number in found for bounds in joined(found[number])]

    def ranges_of(self, offsets: Iterable[tuple[TopicPartition, int]]) -> dict[TopicPartition, Ranges]:
        """The offsets of records in hand, and what belongs to them, as ranges. ApiError where one is not in hand."""
        given: dict[TopicPartition, list[tuple[int, int]]] = {}
        for tp, offset in offsets:
            given.setdefault(tp, []).append((offset, offset))
        found: dict[TopicPartition, list[tuple[int, int]]] = {tp: [] for tp in given}
        for part in self.parts_of({tp: joined(some) for tp, some in given.items()}):
            found[part.tp].append((part.start, part.end))
        return {tp: joined(some) for tp, some in found.items()}

    def committed(self, *parts: Part) -> None:
        """Note that parts are committed; slices of which all is leave."""
        whole: dict[int, None] = {}
        for part in parts:
            held = self._held.get(part.slice)
            if held is None:
                continue
            held.committed = joined([*held.committed, (part.start, part.end)])
            if held.committed == [(held.start, held.end)]:
                whole[part.slice] = None
        self._drop(whole)

    def drop_below(self, tp: TopicPartition, stable: int) -> None:
        """Note that all offsets of a partition below the stable one are committed."""
        some = [(number, self._held[number]) for number in self._between(tp, 0, stable - 1)]
        self.committed(*(Part(tp, number, held.start, min(held.end, stable - 1)) for number, held in some))

    def refused(self, *parts: Part) -> None:
        """Drop slices of which other members hold something."""
        self._drop(dict.fromkeys(part.slice for part in parts if part.slice in self._held))

    def drop(self, partitions: Iterable[TopicPartition] | None = None) -> None:
        """Drop the slices of these partitions, or all: their records count for nothing."""
        wanted = None if partitions is None else set(partitions)
        self._drop([number for number, held in self._held.items() if wanted is None or held.tp in wanted])

    def leave_out(self, is_wanted: Callable[[TopicPartition], bool]) -> list[tuple[TopicPartition, Session]]:
        """Drop partitions that are not wanted any more; return their sessions, which should be ended."""
        gone = [(tp, session) for tp, session in self._sessions.items() if not is_wanted(tp)]
        if gone:
            self.drop(tp for tp, _ in gone)
        for tp, _ in gone:
            del self._sessions[tp]
        return gone

    def fenced(self) -> None:
        """Drop everything: the group has given this member up."""
        self.drop()
        for tp, session in list(self._sessions.items()):
            self._sessions[tp] = self._begun(session.offset)

    def _drop(self, numbers: Iterable[int]) -> None:
        names: list[TopicPartition] = []
        for number in numbers:
            held = self._held.pop(number)
            self._without_records.pop(number, None)
            self._touched.pop(number, None)
            self._spans[held.tp].remove(number, held.start, held.end)
            if not self._spans[held.tp]:
                del self._spans[held.tp]
            names.append(held.name)
        self.tracker.forget(*names)


def _offset_of(record: Item) -> int:
    return record.offset


def _gaps(start: int, end: int, records: Sequence[Item]) -> array[int]:
    found, at = array("q"), start
    if len(records) == end - start + 1:
        return found
    for record in records:
        if record.offset > at:
            found.extend((at, record.offset))
        at = record.offset + 1
    if at <= end:
        found.extend((at, end + 1))
    return found


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that meet or overlap, ascending."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def without(ranges: Ranges, taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The offsets of ranges that are in no range taken away; both ascending, both bounds inclusive."""
    found: list[tuple[int, int]] = []
    for first, last in joined(ranges):
        at = max(0, bisect_left(taken, first, key=lambda bounds: bounds[1]))
        for start, end in taken[at:]:
            if start > last:
                break
            if start > first:
                found.append((first, start - 1))
            first = max(first, end + 1)
        if first <= last:
            found.append((first, last))
    return found
