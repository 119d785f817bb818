"""Snapshots of topics, the offsets of a query, and the records lost between the two."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.machines.lineage import BEYOND, Lineage
from anabranch.machines.placement import ancestor
from anabranch.machines.progress import progress

NOTHING: Mapping[int, int] = MappingProxyType({})
NOT_ASSIGNED = "the option assign does not name the partition any more"
LOG_STARTS_LATER = "the log starts later, by retention or DeleteRecords"


@dataclass(frozen=True, slots=True)
class TopicSnapshot:
    """A topic at one moment: no resize happened between reading the lineage and the log ends."""

    topic: str
    topic_id: str
    lineage: Lineage
    starts: Mapping[int, int]
    """The log start of every existing partition."""
    ends: Mapping[int, int]
    """Where reading ends in every existing partition: the last stable offset, or the high watermark if records that
    are not committed are read, too."""
    ordered: bool = True
    """Whether gates apply: false if the topic or the query declares that order does not matter."""
    high_watermarks: Mapping[int, int] | None = None
    """Where the logs end; None if they end at `ends`, or that was not asked for."""
    removed: Mapping[int, int] = field(default_factory=dict)
    """Partitions that were removed and have not been created again, to the offset at which each ended."""
    cleanup: frozenset[str] = frozenset()
    """The topic's `cleanup.policy`; empty where it is not known."""
    elastic: bool = False
    """Whether each change of the partition count is a layout of the lineage; not so on brokers of a stock Kafka."""

    def may_have_existed(self, partition: int, layouts: int) -> bool:
        """Whether a partition may have been one of the topic's when the topic had so many layouts.

        Any may where the lineage has forgotten all of these layouts; none where no lineage is kept.
        """
        lineage = self.lineage
        known = lineage.counts[: max(0, layouts - lineage.first)]
        return self.elastic and layouts > 0 and (not known or partition < max(known))

    def folded_to(self, partition: int, layouts: int, assigned: Container[int] | None = None) -> int:
        """The offset up to which what has gone since the topic had so many layouts was folded back; BEYOND: all of it.

        That is how retiring partitions of compacted topics are emptied: each record is superseded, or at the end of the
        log that has its key now (ADR 0036), which a query with these partitions `assigned` may not read. One that
        retired since, and takes records again, was emptied up to where it retired. If it was removed and created
        again, nobody knows where that was. From other partitions records go for good, also before the topic was
        compacted.
        """
        if "compact" not in self.cleanup:
            return 0
        lineage = self.lineage
        since = range(max(layouts - 1, lineage.first), lineage.current + 1)
        retired = next((layout for layout in reversed(since) if lineage.count_in(layout) <= partition), None)
        if retired is None:
            return 0
        if assigned is not None and ancestor(partition, lineage.count_in(retired), lineage.initial) not in assigned:
            return 0
        return BEYOND if retired == lineage.current else lineage.start(partition, retired + 1) or BEYOND

    def may_fold_back(self, partition: int, assigned: Container[int] | None = None) -> bool:
        """Whether a partition that retires is folded back to where a query reads on, whichever that will be."""
        initial = self.lineage.initial
        if "compact" not in self.cleanup or partition < initial:
            return False
        while assigned is not None and partition >= initial:
            partition = ancestor(partition, partition, initial)
            if partition not in assigned:
                return False
        return True

    def noted(
        self,
        offsets: Mapping[int, int],
        seen: Mapping[int, int] = NOTHING,
        left: Mapping[int, int] = NOTHING,
    ) -> TopicOffsets:
        """Return the progress of a query that stands at `offsets` now, and has seen log ends beyond them.

        `left`: where it stands in partitions that it does not read any more.
        """
        layouts, partitions = self.lineage.current + 1, max(self.starts, default=-1) + 1
        removed = dict(self.removed)
        return TopicOffsets(offsets, self.topic_id, layouts, seen, removed, partitions=partitions, left=left)


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """A query's progress in one topic."""

    offsets: Mapping[int, int]
    """The next offset of each existing partition that is read."""
    topic_id: str = ""
    layouts: int = 0
    """The number of layouts the topic had."""
    seen: Mapping[int, int] = field(default_factory=dict)
    """Log ends that were seen but not reached: records below them must not vanish unread."""
    removed: Mapping[int, int] | None = None
    """Partitions that are removed, to the offset up to which they count as read; None if that was not noted.

    A partition without an entry here or in `offsets` is new to the topic, and owes its records from offset 0 on; unless
    it existed: then the query did not read it, by `assign`, and begins at its log start.
    """
    begun: Mapping[int, int] | None = None
    """At the end of a query's first micro-batch, where it began; None at all others.

    Spark notes where micro-batches end, not where the first one began: to run it again, it asks the source, and by then
    the latest offsets are others.
    """
    partitions: int | None = None
    """One more than the highest partition that existed; None if that was not noted, and the lineage must tell."""
    left: Mapping[int, int] = field(default_factory=dict)
    """The next offset of each partition that the query has read, and that its options leave out since."""

    @property
    def standing(self) -> Mapping[int, int]:
        """The next offset of each partition that is read, or was."""
        return {**self.left, **self.offsets} if self.left else self.offsets

    def left_out(self) -> TopicOffsets:
        """The same of a query whose options leave out the topic."""
        return self if not self.offsets else replace(self, offsets={}, seen={}, left=self.standing, begun=None)

    def is_of(self, snapshot: TopicSnapshot) -> bool:
        """Whether these are offsets of the topic itself, not of one of this name that was deleted."""
        return self.is_of_id(snapshot.topic_id)

    def is_of_id(self, topic_id: str) -> bool:
        """The same by the id that brokers name."""
        return not self.topic_id or not topic_id or self.topic_id == topic_id


Offsets = Mapping[str, TopicOffsets]


def missing_of(known: TopicOffsets | None, topic_id: str, existing: Collection[int], *, elastic: bool) -> Sequence[int]:
    """Return the partitions that a query knows of a topic and metadata do not name, where none is ever removed.

    Elastic topics lose partitions, and the leaders refuse who asks with metadata of before.
    """
    if known is None or elastic or not known.is_of_id(topic_id):
        return ()
    return sorted({*known.offsets, *range(known.partitions or 0)} - {*existing})


def offsets_to_json(offsets: Offsets) -> dict[str, Any]:
    """Write offsets as JSON for Spark: equal offsets give equal text."""
    return {
        topic: {
            "id": known.topic_id,
            "layouts": known.layouts,
            "offsets": _named(known.offsets),
            "seen": _named(known.seen),
            **({} if known.removed is None else {"removed": _named(known.removed)}),
            **({} if known.begun is None else {"begun": _named(known.begun)}),
            **({} if known.partitions is None else {"partitions": known.partitions}),
            **({"left": _named(known.left)} if known.left else {}),
        }
        for topic, known in sorted(offsets.items())
    }


def _named(offsets: Mapping[int, int]) -> dict[str, int]:
    return {str(p): offsets[p] for p in sorted(offsets)}


def _numbered(offsets: Mapping[str, Any]) -> dict[int, int]:
    return {int(p): int(offset) for p, offset in offsets.items()}


def offsets_from_json(value: Mapping[str, Any]) -> dict[str, TopicOffsets]:
    """Parse the JSON of `offsets_to_json`."""
    return {
        topic: TopicOffsets(
            _numbered(known["offsets"]),
            str(known["id"]),
            int(known["layouts"]),
            _numbered(known["seen"]),
            _numbered(known["removed"]) if "removed" in known else None,
            _numbered(known["begun"]) if "begun" in known else None,
            int(known["partitions"]) if "partitions" in known else None,
            _numbered(known.get("left", {})),
        )
        for topic, known in value.items()
    }


def with_begun(end: Offsets, start: Offsets) -> dict[str, TopicOffsets]:
    """Note at the end of a query's first micro-batch where it began: a topic that `start` lacks, at its log start."""
    return {topic: replace(known, begun=start[topic].offsets if topic in start else {}) for topic, known in end.items()}


def begun_of(start: Offsets, end: Offsets) -> Offsets:
    """Return where the micro-batch that ends at `end` begins: at `start`, unless it is the first, which says so."""
    if any(known.begun is not None for known in end.values()):
        return {topic: TopicOffsets(known.begun or {}, known.topic_id, known.layouts) for topic, known in end.items()}
    return start


@dataclass(frozen=True, slots=True)
class Loss:
    """Records that were deleted before the query read them."""

    topic: str
    partition: int | None
    """None: the whole topic."""
    wanted: int
    available: int | None
    """The first offset that can still be read; None if the partition or topic was deleted."""
    why: str

    def __str__(self) -> str:
        name = self.topic if self.partition is None else str(TopicPartition(self.topic, self.partition))
        if self.available is None:
            return f"{name}: {self.why}"
        return f"{name}: wanted offset {self.wanted}, available from offset {self.available}: {self.why}"


class DataLossError(AnabranchError):
    """Unread records were deleted, and `failOnDataLoss` is true."""

    def __init__(self, losses: Sequence[Loss]) -> None:
        what = "; ".join(str(loss) for loss in losses[:10])
        more = f"; and {len(losses) - 10} more" if len(losses) > 10 else ""
        super().__init__(
            f"Records were lost before this query read them: {what}{more}. "
            "To go on with what is there, set the option failOnDataLoss to false."
        )
        self.losses = tuple(losses)


@dataclass(frozen=True, slots=True)
class QueryPositions:
    """A query's positions in one topic, adjusted to the existing logs."""

    positions: Mapping[int, int]
    """The position of every partition to read."""
    losses: tuple[Loss, ...]
    left: Mapping[int, int] = field(default_factory=dict)
    """The positions of those that it has read and does not read any more."""


def query_positions(
    snapshot: TopicSnapshot, known: TopicOffsets | None, assigned: frozenset[int] | None = None
) -> QueryPositions:
    """Return the positions of a query in a topic, and the records it lost.

    A partition that is new to the topic begins at offset 0, and one that was removed and created again where it ended;
    where neither is known, or it was not assigned before, at its log start. A removed partition is no loss if the query
    read it up to its end, as the controller remembers it. A position beyond the last stable offset stays: a query that
    read records before they were committed reads none twice. `assigned` limits the partitions to read; None reads all.
    One that was read before and is not now is a loss once, and keeps its position: assigned again, it is read on there.
    Batches are ranges of offsets, with or without records, so they pass markers by themselves: no next record is asked
    for (ordering.md 6.1).
    """
    losses: list[Loss] = []
    if known is not None and not known.is_of(snapshot):
        losses.append(Loss(snapshot.topic, None, 0, None, "the topic was deleted and created again since"))
        known = None
    positions: dict[int, int] = {}
    for partition, start in snapshot.starts.items():
        if assigned is not None and partition not in assigned:
            continue
        offset = _position(snapshot, known, partition, start)
        end = snapshot.ends[partition]
        if snapshot.high_watermarks is not None:
            end = max(end, snapshot.high_watermarks.get(partition, end))
        if offset < start:
            owed = max(offset, snapshot.folded_to(partition, 0 if known is None else known.layouts, assigned))
            if owed < start:
                losses.append(Loss(snapshot.topic, partition, owed, start, LOG_STARTS_LATER))
        elif offset > end:
            why = "the log ends before, as after a crash of a broker that does not flush"
            losses.append(Loss(snapshot.topic, partition, offset, end, why))
        positions[partition] = min(progress(offset, start), max(start, end))
    if known is not None:
        gone = {p: end for p, end in known.seen.items() if p not in snapshot.starts} | dict(snapshot.removed)
        for partition, end in sorted(gone.items()):
            offset = _position(snapshot, known, partition, end)
            wanted = assigned is None or partition in assigned
            if wanted and max(offset, snapshot.folded_to(partition, known.layouts, assigned)) < end:
                why = f"the partition was removed before its records up to offset {end} were read"
                losses.append(Loss(snapshot.topic, partition, offset, None, why))
    if known is None or assigned is None:
        return QueryPositions(positions, tuple(losses))
    left = {partition: offset for partition, offset in known.standing.items() if partition not in assigned}
    out = sorted(left.keys() & known.offsets.keys())
    unread = (p for p in out if p in snapshot.starts or left[p] < snapshot.removed.get(p, BEYOND))
    losses += (Loss(snapshot.topic, partition, left[partition], None, NOT_ASSIGNED) for partition in unread)
    return QueryPositions(positions, tuple(losses), left)


def is_folded_back(
    snapshot: TopicSnapshot, known: TopicOffsets | None, ends: Mapping[int, int], assigned: frozenset[int] | None = None
) -> bool:
    """Whether records of a topic before these ends are folded back that a query reads and has not read yet."""
    if known is not None and not known.is_of(snapshot):
        return False
    layouts = 0 if known is None else known.layouts
    for partition, end in ends.items():
        offset = _position(snapshot, known, partition, end)
        gone_to = min(end, snapshot.starts.get(partition, end))
        is_read = assigned is None or partition in assigned
        if is_read and offset < min(gone_to, snapshot.folded_to(partition, layouts, assigned)):
            return True
    return False


def _position(snapshot: TopicSnapshot, known: TopicOffsets | None, partition: int, otherwise: int) -> int:
    """Return the next offset of a partition that exists or did exist; `otherwise` where it was not noted."""
    if known is None:
        return otherwise
    offset = known.offsets.get(partition, known.left.get(partition))
    if offset is not None:
        return offset
    if known.removed is None:
        return otherwise
    if partition in known.removed:
        return known.removed[partition]
    if known.partitions is None:
        existed = snapshot.may_have_existed(partition, known.layouts)
    else:
        existed = partition < known.partitions
    return otherwise if existed else 0


def lost_between(
    snapshots: Mapping[str, TopicSnapshot],
    start: Offsets,
    end: Offsets,
    assigned: Mapping[str, frozenset[int]] | None = None,
) -> list[Loss]:
    """Return the records of an already planned micro-batch that can no longer be read."""
    losses: list[Loss] = []
    for topic, known in end.items():
        snapshot = snapshots.get(topic)
        if not known.offsets:
            continue
        if snapshot is None or not known.is_of(snapshot):
            losses.append(Loss(topic, None, 0, None, "the topic was deleted"))
            continue
        begun = start.get(topic)
        for partition, finish in known.offsets.items():
            first = snapshot.starts.get(partition)
            wanted = _position(snapshot, begun, partition, 0 if first is None else first)
            if wanted >= finish or (first is not None and wanted >= first):
                continue
            read = None if assigned is None else assigned.get(topic)
            wanted = max(wanted, snapshot.folded_to(partition, 0 if begun is None else begun.layouts, read))
            if wanted < finish and first is None:
                losses.append(Loss(topic, partition, wanted, None, "the partition was removed"))
            elif wanted < finish and first is not None and wanted < first:
                losses.append(Loss(topic, partition, wanted, first, LOG_STARTS_LATER))
    return losses
