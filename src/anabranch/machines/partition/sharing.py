"""Readers that share a partition: what each asks for, whom one pass over the log serves, and what is kept for others.

A fetch may ask for the records of some ranges of keys (`Asked`). The leader remembers what was lately asked of a
partition and up to where each asker has read. A pass over a block of the log is made for one of them and scatters the
block to all others, too, that have not read that far; their pieces are kept (`KeptPieces`) until they are asked for.

The rules: ranges of one pass never overlap; a piece goes when it is sent, and the oldest ones go when there are too
many; no asker is served a piece of another log, or an offset twice. What is kept only saves work: whatever is missing
is read again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.nodes import Topic
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval, interval
from anabranch.machines.lineage import Cuts
from anabranch.records.filtering import SIZE_MAX, Cell, Gathered, Selection, in_one_piece, within

RANGES_MAX = 1_000
"""Ranges of keys in one fetch of a partition."""
KEYS_MAX = 1_000
"""Keys wanted or refused in one fetch of a partition."""
KEYS_SIZE_MAX = 64 * 1024
"""Bytes of those keys."""
SHARERS_MAX = 64
"""What is remembered of a partition; the one that asked least lately is forgotten first."""
TARGETS_MAX = 16
"""Askers that one pass serves."""
PASS_RANGES_MAX = 2_000
"""Ranges of one pass, over all askers that it serves."""
ASKED_LATELY_MS = 10_000
"""Who has not asked for so long gets nothing kept."""
KEPT_PARTS = 4
"""What is kept for one asker is at most this part of all that may be kept."""


class Asked(NamedTuple):
    """What a reader wants of a partition."""

    ranges: tuple[Interval, ...] = (SPACE,)
    """Places of the key space, ascending."""
    keys_wanted: tuple[bytes, ...] = ()
    keys_refused: tuple[bytes, ...] = ()
    size_min: int = 0
    size_max: int = SIZE_MAX

    @property
    def is_share(self) -> bool:
        """Whether it is nothing but ranges of keys: then others are served by the same pass."""
        return not self.keys_wanted and not self.keys_refused and self.size_min == 0 and self.size_max == SIZE_MAX

    @property
    def size(self) -> int:
        """Bytes of memory, about."""
        keys = sum(map(len, self.keys_wanted)) + sum(map(len, self.keys_refused))
        return 200 + 150 * len(self.ranges) + 50 * (len(self.keys_wanted) + len(self.keys_refused)) + keys


def asked_of(
    ranges: Sequence[tuple[int, int]],
    keys_wanted: Sequence[bytes] = (),
    keys_refused: Sequence[bytes] = (),
    size_min: int = 0,
    size_max: int = SIZE_MAX,
) -> Asked | ErrorCode:
    """Take what a fetch says; INVALID_REQUEST for a range that ends before it starts, or overlaps, or for too many.

    No range means all keys.
    """
    if len(ranges) > RANGES_MAX or len(keys_wanted) + len(keys_refused) > KEYS_MAX or size_max < 0:
        return ErrorCode.INVALID_REQUEST
    if sum(map(len, keys_wanted)) + sum(map(len, keys_refused)) > KEYS_SIZE_MAX:
        return ErrorCode.INVALID_REQUEST
    wanted = sorted(Interval(*each) for each in ranges) or [SPACE]
    if any(not 0 <= start <= end <= SPACE_END for start, end in wanted):
        return ErrorCode.INVALID_REQUEST
    if any(one.end >= two.start for one, two in pairwise(wanted)) or size_min > size_max:
        return ErrorCode.INVALID_REQUEST
    return Asked(tuple(wanted), tuple(keys_wanted), tuple(keys_refused), size_min, size_max)


class Stretch(NamedTuple):
    """Offsets of a log that one layout ruled: the partition's interval then, and where they end, None for nowhere."""

    initial: int
    held: Interval
    end: int | None


def selection_of(everyone: Sequence[Asked]) -> Selection:
    """The selection of one pass: the records of each asker's ranges go to the target of its place in the list."""
    cells = [Cell(start, end, target) for target, asked in enumerate(everyone) for start, end in asked.ranges]
    first = everyone[0]
    filters = (first.keys_wanted, first.keys_refused, first.size_min, first.size_max)
    return Selection(tuple(sorted(cells)), len(everyone), *filters)


def stretch_of(topic: Topic, partition: int, cuts: Cuts, offset: int) -> Stretch:
    """The stretch of a partition's log that has `offset`; all keys where the partition took none by itself."""
    place = bisect_right(cuts.ends, offset)
    layout, end = (cuts.layouts[place], cuts.ends[place]) if place < len(cuts.ends) else (topic.newest, None)
    layouts = topic.published
    count = layouts[max(0, bisect_right(layouts, layout, key=lambda each: each.number) - 1)].count
    initial = topic.initial_partition_count
    return Stretch(initial, interval(partition, count, initial) if partition < count else SPACE, end)


class Sharer:
    """One thing that is asked of a partition, however many ask it."""

    __slots__ = ("asked_ms", "pending", "position")

    def __init__(self) -> None:
        self.position = 0
        """The offset up to which it was answered last."""
        self.asked_ms = 0
        self.pending = 0
        """Fetches that wait for it."""


class Sharers:
    """What was lately asked of one partition."""

    def __init__(self) -> None:
        self._known: OrderedDict[Asked, Sharer] = OrderedDict()
        """Who asked last comes last."""

    def __len__(self) -> int:
        return len(self._known)

    def began(self, asked: Asked, offset: int, now_ms: int) -> None:
        """A fetch wants the records from `offset` on."""
        sharer = self._known.pop(asked, None) or Sharer()
        sharer.position, sharer.asked_ms = offset, now_ms
        sharer.pending += 1
        self._known[asked] = sharer
        while len(self._known) > SHARERS_MAX:
            idle = next((each for each, known in self._known.items() if not known.pending), None)
            if idle is None:
                return
            del self._known[idle]

    def reached(self, asked: Asked, offset: int) -> None:
        """The fetch has all records below `offset`."""
        sharer = self._known.get(asked)
        if sharer is not None:
            sharer.position = max(sharer.position, offset)

    def ended(self, asked: Asked) -> None:
        """The fetch is over."""
        sharer = self._known.get(asked)
        if sharer is not None:
            sharer.pending -= 1

    def others(self, asked: Asked, offset: int, now_ms: int, *, idle: bool) -> Iterator[Asked]:
        """Whom a pass from `offset` on, made for `asked`, can serve, too; with `idle` also those without a fetch now.

        Those who asked last come first. Nobody whose position is behind `offset` needs the pass.
        """
        if not asked.is_share:
            return
        for each, sharer in reversed(self._known.items()):
            if each == asked or not each.is_share or sharer.position > offset:
                continue
            if sharer.pending or (idle and now_ms - sharer.asked_ms <= ASKED_LATELY_MS):
                yield each


def disjoint(asked: Asked, others: Iterable[Asked]) -> list[Asked]:
    """Those whom one pass can serve: `asked`, and of the others as many as overlap with none before them."""
    chosen = [asked]
    taken = list(asked.ranges)
    """Ascending."""
    for each in others:
        if len(chosen) == TARGETS_MAX:
            break
        if len(taken) + len(each.ranges) > PASS_RANGES_MAX:
            continue
        together = sorted([*taken, *each.ranges])
        if all(one.end < two.start for one, two in pairwise(together)):
            chosen.append(each)
            taken = together
    return chosen


class Piece(NamedTuple):
    """What someone asked for, of the offsets from `start` to `end`, `end` exclusive."""

    start: int
    end: int
    data: memoryview | Gathered

    def part(self, offset: int, limit: int, size_max: int) -> tuple[Piece, Piece | None]:
        """Divide it: the batches from `offset` on, below `limit`, at most `size_max` bytes but one batch; the rest."""
        if offset == self.start and self.end <= limit and len(self.data) <= size_max:
            return self, None  # As a rule; its batches need not be looked at.
        end = min(self.end, limit)
        data = in_one_piece(self.data)
        found, before = within(data, offset, end, size_max)
        if before + len(found) == len(data):
            return Piece(offset, end, found), None if end == self.end else Piece(end, self.end, memoryview(b""))
        rest = data[before + len(found) :]
        end = min(end, first_offset(rest))
        return Piece(offset, end, found), Piece(end, self.end, rest)


def first_offset(batches: memoryview) -> int:
    """The base offset of the first of some batches."""
    return int.from_bytes(batches[:8], "big")


class Log(NamedTuple):
    """The partition of which pieces are kept."""

    topic_id: UUID
    partition: int
    leader_epoch: int
    cuts: int = 0
    """How often records were cut from its end: pieces of before are never given again, nor looked at."""


class KeptPieces:
    """Pieces that were made for askers who have not asked for them yet: at most `size_max` bytes of them."""

    def __init__(self, size_max: int) -> None:
        self.size_max = size_max
        self.size = 0
        """Bytes."""
        self.evictions = 0
        self._pieces: OrderedDict[tuple[Log, Asked, int], Piece] = OrderedDict()
        """By where they start; the oldest come first."""
        self._of: dict[tuple[Log, Asked], dict[int, Piece]] = {}
        self._logs: dict[Log, set[Asked]] = {}

    def room_for(self, log: Log, asked: Asked) -> bool:
        """Whether more may be kept for someone."""
        held = sum(len(piece.data) for piece in self._of.get((log, asked), {}).values())
        return held * KEPT_PARTS < self.size_max

    def keep(self, log: Log, asked: Asked, piece: Piece) -> None:
        """Keep a piece, in place of the oldest ones if there is no room. One that is too large is not kept."""
        self._drop(log, asked, piece.start)
        cost = len(piece.data) + asked.size
        if cost > self.size_max:
            return
        while self.size + cost > self.size_max:
            oldest = next(iter(self._pieces))
            self._drop(*oldest)
            self.evictions += 1
        self._pieces[log, asked, piece.start] = piece
        self._of.setdefault((log, asked), {})[piece.start] = piece
        self._logs.setdefault(log, set()).add(asked)
        self.size += cost

    def take(self, log: Log, asked: Asked, offset: int) -> Piece | None:
        """Take the piece that has `offset`, if there is one: it goes. Those before it go, too."""
        pieces = self._of.get((log, asked))
        if pieces is None:
            return None
        found = next((piece for piece in pieces.values() if piece.start <= offset < piece.end), None)
        for start in [start for start, piece in pieces.items() if piece is found or piece.end <= offset]:
            self._drop(log, asked, start)
        return found

    def forget(self, topic_id: UUID, partitions: Collection[int]) -> None:
        """Drop everything of some partitions of a topic."""
        for log in [log for log in self._logs if log.topic_id == topic_id and log.partition in partitions]:
            for asked in list(self._logs[log]):
                for start in list(self._of[log, asked]):
                    self._drop(log, asked, start)

    def _drop(self, log: Log, asked: Asked, start: int) -> None:
        piece = self._pieces.pop((log, asked, start), None)
        if piece is not None:
            self.size -= len(piece.data) + asked.size
            of = self._of[log, asked]
            del of[start]
            if not of:
                del self._of[log, asked]
                self._logs[log].discard(asked)
                if not self._logs[log]:
                    del self._logs[log]
