"""What happened in a run of the demo, computed from what the run left behind: plans and clock times.

A topic is seen as its key space, 0 to 1: the family of partition p, by the partition count at creation, holds one
equal part of it, and the partition's interval (machines.keyspace) lies within. A micro-batch reads pieces: offsets of
one partition and one layout. A piece is late for keys of which an earlier micro-batch read records of a later layout.
Everything here is a function of events: no clock, no Spark, no file.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.demo.flights import Result
from anabranch.machines.keyspace import SPACE_END
from anabranch.machines.lineage import Lineage


class Resize(NamedTuple):
    """A resize of the topic that was done."""

    begin_s: float
    """Unix time."""
    took_ms: float
    before: int
    after: int


class Difference(NamedTuple):
    """An aircraft whose result differs from the plain pass; None where one of them has no such aircraft."""

    tailnum: str
    expected: Result | None
    found: Result | None


class Followed(NamedTuple):
    """Every record of one aircraft, in the order in which they were sent: its partition and offset."""

    tailnum: str
    records: Sequence[tuple[int, int]]


@dataclass(slots=True)
class Events:
    """What a run left behind."""

    ordering: str
    """`key` or `none`, the source's option."""
    begin_s: float
    """Unix time; the times of a story count from here."""
    sent: list[tuple[float, int]] = field(default_factory=list)
    """(Unix time, records handed to the producer by then)."""
    resizes: list[Resize] = field(default_factory=list)
    plans: Sequence[str] = ()
    """The lines of the query's `planLog`."""
    batches: Sequence[tuple[float, float]] = ()
    """(Unix time, seconds) of each micro-batch of the same query, as Spark reports them."""
    differences: Sequence[Difference] = ()
    followed: Followed | None = None


class Span(NamedTuple):
    """An interval of the key space, from 0 to 1."""

    low: float
    high: float

    @property
    def size(self) -> float:
        """The share of the key space."""
        return self.high - self.low

    def overlap(self, other: Span) -> Span | None:
        """The keys in both, None if there are none."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return Span(low, high) if low < high else None


class Layout(NamedTuple):
    """A layout of the topic, while it ruled."""

    number: int
    partitions: int
    begin_s: float
    end_s: float


class Segment(NamedTuple):
    """The records of a partition that were appended while a layout ruled."""

    partition: int
    layout: int
    records: int
    keys: Span


class Batch(NamedTuple):
    """A micro-batch."""

    number: int
    begin_s: float
    end_s: float
    records: int


class Piece(NamedTuple):
    """What a micro-batch read of a segment."""

    batch: int
    partition: int
    layout: int
    start: int
    end: int
    keys: Span
    late: tuple[Span, ...]
    """The keys of which an earlier micro-batch read later records; parts may overlap."""


class Wait(NamedTuple):
    """A closed gate with records behind it, from the micro-batch that first met it to the one that passed it."""

    partition: int
    layout: int
    begin_s: float
    end_s: float
    on: tuple[int, ...]
    """The partitions that had to be read first."""
    records: int
    """The most records that were seen behind it."""


@dataclass(frozen=True, slots=True)
class Story:
    """A run, ready to be drawn; times in seconds from its beginning."""

    ordering: str
    took_s: float
    layouts: tuple[Layout, ...]
    resizes: tuple[Resize, ...]
    """With times from the beginning of the run."""
    segments: tuple[Segment, ...]
    batches: tuple[Batch, ...]
    pieces: tuple[Piece, ...]
    waits: tuple[Wait, ...]
    sent: tuple[tuple[float, int], ...]
    read: tuple[tuple[float, int], ...]
    lag: tuple[tuple[float, int], ...]
    """Records sent and not yet read to the end of a micro-batch."""
    differences: tuple[Difference, ...]
    tailnum: str | None
    """The aircraft that was followed."""
    followed: tuple[int, ...]
    """For each of its records, in the order in which they were sent, the micro-batch that read it."""

    @property
    def records(self) -> int:
        """The records that were read."""
        return sum(batch.records for batch in self.batches)

    @property
    def is_late(self) -> bool:
        """Whether any record was read after later ones of the same keys."""
        return any(piece.late for piece in self.pieces)

    @property
    def overtaken(self) -> int:
        """How many records of the followed aircraft were read after one that was sent later."""
        return sum(batch > min(self.followed[at:]) for at, batch in enumerate(self.followed))


def tell(events: Events) -> Story:
    """Compute the story of a run of at least one micro-batch.

    Raises `ValueError` if there is not one plan for each micro-batch.
    """
    plans = [_topic_of(line) for line in events.plans]
    if len(plans) != len(events.batches) or not plans:
        raise ValueError(f"{len(plans)} plans of {len(events.batches)} micro-batches: they are not those of one run")
    lineage = _lineage_of(plans)
    batches = tuple(
        Batch(number, at - events.begin_s, at - events.begin_s + took_s, _count(plan))
        for number, (plan, (at, took_s)) in enumerate(zip(plans, events.batches, strict=True))
    )
    sent = ((0.0, 0), *((at - events.begin_s, count) for at, count in events.sent))
    read = ((0.0, 0), *_summed((batch.end_s, batch.records) for batch in batches))
    took_s = max(read[-1][0], sent[-1][0])
    resizes = tuple(resize._replace(begin_s=resize.begin_s - events.begin_s) for resize in events.resizes)
    pieces = tuple(_pieces(plans, lineage))
    return Story(
        ordering=events.ordering,
        took_s=took_s,
        layouts=tuple(_layouts(lineage, resizes, took_s)),
        resizes=resizes,
        segments=tuple(_segments(plans, lineage)),
        batches=batches,
        pieces=pieces,
        waits=tuple(_waits(plans, lineage, batches, took_s)),
        sent=sent,
        read=read,
        lag=tuple(_lag(sent, read)),
        differences=tuple(sorted(events.differences)),
        tailnum=events.followed.tailnum if events.followed else None,
        followed=tuple(_batches_of(events.followed.records, pieces)) if events.followed else (),
    )


def _topic_of(line: str) -> dict[str, Any]:
    """Return what a plan says about its only topic."""
    (topic,) = json.loads(line)["topics"].values()
    return dict(topic)


def _lineage_of(plans: Sequence[Mapping[str, Any]]) -> Lineage:
    """Join the layouts and cuts of all plans: later ones do not know the partitions that were removed on the way."""
    counts: dict[int, int] = {}
    cuts: dict[int, dict[int, int]] = {}
    for plan in plans:
        counts.update(enumerate(plan["counts"], plan["first"]))
        for partition, found in plan["cuts"].items():
            cuts.setdefault(int(partition), {}).update(found)
    in_order = {partition: sorted(found.items()) for partition, found in cuts.items()}
    return Lineage.of_cuts(plans[-1]["initial"], [counts[n] for n in sorted(counts)], in_order, first=min(counts))


def _count(plan: Mapping[str, Any]) -> int:
    return sum(end - plan["start"][partition] for partition, end in plan["end"].items())


def _layouts(lineage: Lineage, resizes: Sequence[Resize], took_s: float) -> Iterator[Layout]:
    """Yield the layouts; each begins at the end of its resize. A resize that no plan has seen is left out."""
    begins = [0.0, *(resize.begin_s + resize.took_ms / 1000 for resize in resizes)]
    for number, count in enumerate(lineage.counts, lineage.first):
        end_s = begins[number + 1] if number + 1 < len(begins) else took_s
        yield Layout(number, count, begins[number], end_s)


def _keys(lineage: Lineage, partition: int, layout: int) -> Span:
    held = lineage.held(partition, layout)
    family = partition % lineage.initial
    low, high = held.start / (SPACE_END + 1), (held.end + 1) / (SPACE_END + 1)
    return Span((family + low) / lineage.initial, (family + high) / lineage.initial)


def _segments(plans: Sequence[Mapping[str, Any]], lineage: Lineage) -> Iterator[Segment]:
    """Yield the segments with records, as far as they were read."""
    read: dict[int, int] = {}
    for plan in plans:
        read |= {int(partition): end for partition, end in plan["end"].items()}
    for partition, end in sorted(read.items()):
        for start, stop, layout in _by_layout(lineage, partition, 0, end):
            yield Segment(partition, layout, stop - start, _keys(lineage, partition, layout))


def _by_layout(lineage: Lineage, partition: int, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Cut offsets at the ends of segments: the first offset, the end, and the layout of each part."""
    cuts = lineage.cuts.get(partition)
    bounds = [cut for cut in cuts.ends if start < cut < end] if cuts else []
    at = start
    for stop in (*bounds, end):
        if at < stop:
            yield at, stop, lineage.layout_at(partition, at)
        at = stop


def _pieces(plans: Sequence[Mapping[str, Any]], lineage: Lineage) -> Iterator[Piece]:
    before: set[tuple[int, Span]] = set()
    for number, plan in enumerate(plans):
        mine: list[Piece] = []
        for partition, end in sorted((int(text), end) for text, end in plan["end"].items()):
            for low, high, layout in _by_layout(lineage, partition, plan["start"][str(partition)], end):
                keys = _keys(lineage, partition, layout)
                shared = {keys.overlap(others) for newer, others in before if newer > layout}
                late = tuple(sorted(part for part in shared if part is not None))
                mine.append(Piece(number, partition, layout, low, high, keys, late))
        yield from mine
        before.update((piece.layout, piece.keys) for piece in mine)


def _waits(
    plans: Sequence[Mapping[str, Any]], lineage: Lineage, batches: Sequence[Batch], took_s: float
) -> Iterator[Wait]:
    open_: dict[tuple[int, int], Wait] = {}
    for plan, batch in zip(plans, batches, strict=True):
        for text, end in plan["end"].items():
            passed = [key for key in open_ if key[0] == int(text) and key[1] < end]
            for key in passed:
                yield open_.pop(key)._replace(end_s=batch.begin_s)
        for text, gate in plan["closed"].items():
            partition, at = int(text), gate["at"]
            behind = plan["log_end"][text] - at
            if behind > 0:
                layout = lineage.layout_at(partition, at)
                known = open_.get((partition, at), Wait(partition, layout, batch.begin_s, took_s, (), 0))
                on = tuple(sorted({*known.on, *(other for other, _ in gate["waits"])}))
                open_[partition, at] = known._replace(on=on, records=max(known.records, behind))
    yield from open_.values()


def _summed(counts: Iterable[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    total = 0
    for at, count in counts:
        total += count
        yield at, total


def _lag(sent: Sequence[tuple[float, int]], read: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """Yield the lag at each moment at which it changes: before the change where records were read, and after it."""
    sent_at, read_at = [at for at, _ in sent], [at for at, _ in read]

    def lag(sends: int, reads: int) -> int:
        return max(0, sent[max(0, sends - 1)][1] - read[max(0, reads - 1)][1])

    for at in sorted({*sent_at, *read_at}):
        sends, reads = bisect_right(sent_at, at), bisect_right(read_at, at)
        if at in read_at and reads > 1:
            yield at, lag(sends, reads - 1)
        yield at, lag(sends, reads)


def _batches_of(records: Sequence[tuple[int, int]], pieces: Sequence[Piece]) -> Iterator[int]:
    """Yield the micro-batch that read each record; records that none has read are left out."""
    for partition, offset in records:
        for piece in pieces:
            if piece.partition == partition and piece.start <= offset < piece.end:
                yield piece.batch
                break
