"""From fetched batches to returned records and tables; the consumer's positions move as the application takes them.

Decoded records that did not fit into a poll are kept. While the application iterates over records, the position to
commit is that of the first record not yet reached, so that a loop may stop at any record.

Offsets above the stable offset that were committed one by one (`skip`) are left out: their records are done.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.record import COLUMNS, Record
from anabranch.machines.clients.fetching import Deliverable, Fetcher
from anabranch.machines.clients.processing import Ranges, Tracker
from anabranch.machines.lineage import Lineage

if TYPE_CHECKING:
    import pyarrow as pa

THREAD_SIZE_MIN = 256 * 1024
"""Larger parts are decoded in a thread: kernels do not hold the interpreter lock."""


@dataclass(slots=True)
class _Decoded:
    """A decoded part with undelivered `rows` from index `first` on; `position` is the offset of that row."""

    part: Deliverable
    rows: pa.Table
    first: int
    position: int


class Handout:
    """The records of one consumer between the fetcher and the application."""

    def __init__(self, fetcher: Fetcher, *, check_crcs: bool) -> None:
        self.lineages: dict[str, Lineage] = {}
        """The lineage of each topic, for the sequence of its records."""
        self._fetcher = fetcher
        self._check_crcs = check_crcs
        self._kernels_loaded = False
        self._decoded: dict[TopicPartition, _Decoded] = {}
        self._skips: dict[TopicPartition, Ranges] = {}
        """Committed ranges above the stable offset, ascending."""
        self._unyielded: dict[TopicPartition, int] = {}
        """Per partition, the offset of the first record that a poll has yet to return, or a loop to reach."""

    async def hand_out_some(self, part: Deliverable, room: int, found: list[Record]) -> None:
        """Append at most `room` records of a part to `found`; keep the remaining rows decoded.

        They are returned to the application with the call of `returned`: until then, commits leave them out, and
        another poll begins with them.
        """
        from anabranch.client.consumer.tables import records_of

        left = await self._left_of(part)
        if left is not None:
            rows = left.rows.slice(left.first, room)
            records = records_of(part, rows)
            self._pass(part, left, rows)
            if records:
                self._unyielded.setdefault(TopicPartition(part.topic, part.partition), records[0].offset)
                found += records

    async def take_some(
        self, part: Deliverable, tracker: Tracker, records_max: int, leases: Iterator[int]
    ) -> int | None:
        """Have the tracker take at most `records_max` records of a part; return how many, None for lack of room."""
        from anabranch.client.consumer.tables import fitting, records_of

        left = await self._left_of(part)
        if left is None:
            return None
        tp = TopicPartition(part.topic, part.partition)
        room = tracker.room(tp, part.start, len(self._fetcher.assignment))
        rows = left.rows.slice(left.first, 0 if room is None else min(room.records, records_max))
        if room is not None:
            rows = rows.slice(0, fitting(rows, room.size, room.end))
        if room is None or (rows.num_rows == 0 and left.first < left.rows.num_rows):
            self._decoded[tp] = left
            return None
        end = self._pass(part, left, rows)
        exact = self._fetcher.is_read_by_key(tp)
        tracker.take(tp, records_of(part, rows, leases), end, self._skipped(tp, part.start, end), exact=exact)
        self._fetcher.finished(tp, tracker.stable(tp, end))
        return int(rows.num_rows)

    async def _left_of(self, part: Deliverable) -> _Decoded | None:
        """Return the rows of a part that are left, decoded; None if the position was moved meanwhile."""
        from anabranch.client.consumer.tables import RECORD_COLUMNS

        left = self._decoded.pop(TopicPartition(part.topic, part.partition), None)
        is_it = left is not None and left.part.fetched is part.fetched and left.position == part.start
        # A gate may have closed since: `part` then ends before what was decoded.
        if left is None or not is_it or left.part.end > part.end:
            left = _Decoded(part, await self.table_beside([part], RECORD_COLUMNS, None), 0, part.start)
        return left if self._fetcher.is_next(part) else None

    def _pass(self, part: Deliverable, left: _Decoded, rows: pa.Table) -> int:
        """Move the position behind rows of a part, and return it; keep the rows that are left."""
        records_end = rows.column("offset")[-1].as_py() + 1 if rows.num_rows else -1
        left.first += rows.num_rows
        if left.first == left.rows.num_rows:
            left.position = left.part.end  # A gate may have opened since: `part` then ends behind what was decoded.
        else:
            left.position = left.rows.column("offset")[left.first].as_py()
            self._decoded[TopicPartition(part.topic, part.partition)] = left
        self._fetcher.handed_out(part, left.position, records_end)
        return left.position

    def skip(self, tp: TopicPartition, ranges: Ranges) -> None:
        """Leave out the records in these ranges of offsets, and in no others: they are done."""
        self._skips.pop(tp, None)
        if ranges:
            self._skips[tp] = sorted(ranges)

    def skip_too(self, tp: TopicPartition, ranges: Ranges) -> None:
        """Leave out the records in these ranges of offsets, too."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted((*self._skips.get(tp, ()), *ranges)):
            if joined and first <= joined[-1][1] + 1:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        self.skip(tp, joined)

    def forget_skips(self, tp: TopicPartition, offset: int) -> None:
        """Forget the skipped ranges below an offset, as far as all before them is handed out.

        The group's stable offset may be further, moved by the very ranges that this consumer has yet to leave out.
        """
        ranges = self._skips.get(tp)
        position = None if ranges is None else self.consumed_of(tp)
        if ranges is not None and position is not None and ranges[0][1] < min(offset, position):
            self.skip(tp, ranges[bisect_left(ranges, min(offset, position), key=lambda bounds: bounds[1]) :])

    def _skipped(self, tp: TopicPartition, start: int, end: int) -> Ranges:
        ranges = self._skips.get(tp, ())
        first = bisect_left(ranges, start, key=lambda bounds: bounds[1])
        return ranges[first : bisect_right(ranges, end, key=lambda bounds: bounds[0])]

    async def table_beside(
        self, parts: Sequence[Deliverable], columns: Sequence[str], key_range: tuple[int, int] | None
    ) -> pa.Table:
        """Decode small parts in place, once the kernels are loaded, and others in a thread."""
        is_small = sum(len(part.fetched.data) for part in parts) < THREAD_SIZE_MIN
        if self._kernels_loaded and is_small and not any(part.floor for part in parts):
            return self.table(parts, columns, key_range)
        table = await asyncio.get_running_loop().run_in_executor(None, self.table, parts, columns, key_range)
        self._kernels_loaded = True
        return table

    def table(
        self, parts: Sequence[Deliverable], columns: Sequence[str] = COLUMNS, key_range: tuple[int, int] | None = None
    ) -> pa.Table:
        """Decode gathered parts; callable from any thread."""
        from anabranch.client.consumer.tables import table_of

        return table_of(parts, columns, key_range, self.lineages, self._skips, check_crcs=self._check_crcs)

    def one_by_one(self, records: Sequence[Record]) -> Iterator[Record]:
        """Yield polled records and move the positions to commit with them, so that a loop may stop at any record."""
        following: list[int | None] = []
        later: dict[tuple[str, int], int] = {}
        for record in reversed(records):
            following.append(later.get(record[:2]))
            later[record[:2]] = record.offset
        unyielded = self._unyielded = {TopicPartition(*tp): offset for tp, offset in later.items()}
        for record, offset in zip(records, reversed(following), strict=True):
            tp = TopicPartition(record.topic, record.partition)
            if tp in unyielded:  # Otherwise it was dropped meanwhile.
                if offset is None:
                    del unyielded[tp]
                else:
                    unyielded[tp] = offset
            yield record

    def returned(self) -> None:
        """Note that the poll returns what was handed out."""
        self._unyielded = {}

    def go_back(self) -> None:
        """Move the positions back to the records that an abandoned loop did not reach, or a poll did not return."""
        unyielded, self._unyielded = self._unyielded, {}
        for tp, offset in unyielded.items():
            if tp in self._fetcher.assignment:
                self._decoded.pop(tp, None)
                self._fetcher.restart(tp, offset)

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the decoded records of these partitions, what is skipped of them, and where to go back to."""
        for tp in partitions:
            self._decoded.pop(tp, None)
            self._skips.pop(tp, None)
            self._unyielded.pop(tp, None)

    def consumed(self) -> dict[TopicPartition, int]:
        """Return the position after all records returned to the application, for every partition with a position."""
        return {**self._fetcher.positions(), **self._unyielded}

    def consumed_of(self, tp: TopicPartition) -> int | None:
        """Return that position of one partition."""
        offset = self._unyielded.get(tp)
        return self._fetcher.position(tp) if offset is None else offset
