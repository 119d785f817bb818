"""Which offsets a batch reads and which task reads what, such that every key's records come in order.

The rule: no micro-batch holds two segments of which one must come before the other (ordering.md, section 3). A batch
starts at the query's positions and ends, in each partition, at the log end or at the first gate that is closed for a
reader that stands there, whichever comes first. So a key's records come from one partition within a batch, in offset
order, and batch after batch otherwise; a backlog over k layouts takes at most k batches more.

A batch query reads all layouts at once, so there a task reads a whole family, the partitions that any layout could move
a key between, layout after layout. Tasks are split by key range, which keeps the order of keys, or by offset.

Everything here is a function of what was looked at: no clock, no socket, no Spark. `verify` checks a logged plan
against the definition of placement alone, not against the gates that made it.
"""

from __future__ import annotations

import heapq
import json
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, permutations
from typing import Any, NamedTuple

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.machines.lineage import BEYOND, Lineage, sequence_cuts
from anabranch.machines.placement import level_size, place

KEY_RANGE_MAX = (1 << 63) - 1
PLAN_VERSION = 1


class KeyRange(NamedTuple):
    """Keys by range hash (wire.md, section 4), both ends inclusive."""

    start: int
    end: int


WHOLE = KeyRange(0, KEY_RANGE_MAX)


@dataclass(frozen=True, slots=True)
class TopicLook:
    """What a topic looked like at one moment: no resize between the lineage and the ends of the logs."""

    topic: str
    topic_id: str
    lineage: Lineage
    starts: Mapping[int, int]
    """The log start of every partition there is."""
    ends: Mapping[int, int]
    """The high watermark of every partition there is."""
    ordered: bool = True
    """Whether gates apply: false where the topic or the query says that order does not matter."""


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    """How far a query has read one topic."""

    offsets: Mapping[int, int]
    """The next offset of each partition. One that is not here has not been begun: it starts at its log start."""
    topic_id: str = ""
    layouts: int = 0
    """How many layouts the topic had."""
    seen: Mapping[int, int] = field(default_factory=dict)
    """Log ends that were seen and not reached: what must not vanish unread."""


Offsets = Mapping[str, TopicOffsets]


def offsets_to_json(offsets: Offsets) -> dict[str, Any]:
    """Write offsets as Spark keeps them: equal offsets give equal text."""
    return {
        topic: {
            "id": known.topic_id,
            "layouts": known.layouts,
            "offsets": {str(p): known.offsets[p] for p in sorted(known.offsets)},
            "seen": {str(p): known.seen[p] for p in sorted(known.seen)},
        }
        for topic, known in sorted(offsets.items())
    }


def offsets_from_json(value: Mapping[str, Any]) -> dict[str, TopicOffsets]:
    """Read what `offsets_to_json` wrote."""
    return {
        topic: TopicOffsets(
            {int(p): int(offset) for p, offset in known["offsets"].items()},
            str(known["id"]),
            int(known["layouts"]),
            {int(p): int(offset) for p, offset in known["seen"].items()},
        )
        for topic, known in value.items()
    }


@dataclass(frozen=True, slots=True)
class Loss:
    """Records that the query was to read and that are not there any more."""

    topic: str
    partition: int | None
    """None: the whole topic."""
    wanted: int
    available: int | None
    """The offset at which reading can go on; None where the partition or topic is gone."""
    why: str

    def __str__(self) -> str:
        name = self.topic if self.partition is None else str(TopicPartition(self.topic, self.partition))
        if self.available is None:
            return f"{name}: {self.why}"
        return f"{name}: wanted offset {self.wanted}, available from offset {self.available}: {self.why}"


class DataLossError(AnabranchError):
    """Records are gone that the query has not read, and `failOnDataLossError` is true."""

    def __init__(self, losses: Sequence[Loss]) -> None:
        what = "; ".join(str(loss) for loss in losses[:10])
        more = f"; and {len(losses) - 10} more" if len(losses) > 10 else ""
        super().__init__(
            f"Records were lost before this query read them: {what}{more}. "
            "To go on with what is there, set the option failOnDataLossError to false."
        )
        self.losses = tuple(losses)


# -- where a query stands ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Standing:
    """A query's positions in one topic, made to fit what is there now."""

    positions: Mapping[int, int]
    """Of every partition that is read."""
    losses: tuple[Loss, ...]


def stand(look: TopicLook, known: TopicOffsets | None, assigned: frozenset[int] | None = None) -> Standing:
    """Say where a query stands in a topic, and what it lost.

    A partition that is not in `known` has not been begun. One that was removed has left; that is no loss if it was
    read up to the end that was last seen. `assigned` limits what is read, None for all partitions.
    """
    losses: list[Loss] = []
    if known is not None and known.topic_id and look.topic_id and known.topic_id != look.topic_id:
        losses.append(Loss(look.topic, None, 0, None, "the topic was deleted and created again since"))
        known = None
    offsets: Mapping[int, int] = {} if known is None else known.offsets
    positions: dict[int, int] = {}
    for partition, start in look.starts.items():
        if assigned is not None and partition not in assigned:
            continue
        offset = offsets.get(partition, start)
        end = look.ends[partition]
        if offset < start:
            why = "the log starts later, by retention or DeleteRecords"
            losses.append(Loss(look.topic, partition, offset, start, why))
        elif offset > end:
            why = "the log ends before, as after a crash of a broker that does not flush"
            losses.append(Loss(look.topic, partition, offset, end, why))
        positions[partition] = min(max(offset, start), max(start, end))
    if known is not None:
        for partition, end in known.seen.items():
            if partition not in look.starts and offsets.get(partition, 0) < end:
                why = f"the partition was removed before its records up to offset {end} were read"
                losses.append(Loss(look.topic, partition, offsets.get(partition, 0), None, why))
    return Standing(positions, tuple(losses))


def lost_between(looks: Mapping[str, TopicLook], start: Offsets, end: Offsets) -> list[Loss]:
    """What is gone of a micro-batch that was planned before, and is now to be read."""
    losses: list[Loss] = []
    for topic, known in end.items():
        look = looks.get(topic)
        begun = start.get(topic, TopicOffsets({}))
        if look is None or (known.topic_id and look.topic_id and known.topic_id != look.topic_id):
            losses.append(Loss(topic, None, 0, None, "the topic was deleted"))
            continue
        for partition, finish in known.offsets.items():
            first = look.starts.get(partition)
            wanted = begun.offsets.get(partition, 0 if first is None else first)
            if wanted < finish and first is None:
                losses.append(Loss(topic, partition, wanted, None, "the partition was removed"))
            elif wanted < finish and first is not None and wanted < first:
                why = "the log starts later, by retention or DeleteRecords"
                losses.append(Loss(topic, partition, wanted, first, why))
    return losses


# -- how far a batch goes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Extent:
    """How far the next batch goes, and what was lost before it."""

    end: Offsets
    losses: tuple[Loss, ...]
    advances: bool
    """False: there is nothing to read now, and the batch is not worth running."""


def extent(
    looks: Mapping[str, TopicLook],
    start: Offsets,
    limit: int | None = None,
    *,
    assigned: Mapping[str, frozenset[int]] | None = None,
    horizon: Mapping[str, Mapping[int, int]] | None = None,
) -> Extent:
    """Choose the end of the micro-batch that begins at `start`, of at most `limit` offsets.

    `horizon` holds the log ends not to read beyond; what is not in it is not read. The limit is shared in proportion
    to what may be read; a partition that has something gets one offset at least, in turn if the limit is that small.
    """
    losses: list[Loss] = []
    standings: dict[str, Standing] = {}
    open_: dict[TopicPartition, int] = {}
    for topic, look in sorted(looks.items()):
        standing = stand(look, start.get(topic), None if assigned is None else assigned.get(topic, frozenset()))
        standings[topic] = standing
        losses += standing.losses
        limits = _gates(look, standing.positions)
        for partition, position in standing.positions.items():
            end = look.ends[partition]
            if horizon is not None:
                end = min(end, horizon.get(topic, {}).get(partition, position))
            gate = limits[partition]
            open_[TopicPartition(topic, partition)] = (end if gate is None else min(end, gate)) - position
    for topic in sorted(start.keys() - looks.keys()):
        losses.append(Loss(topic, None, 0, None, "the topic was deleted"))
    read_so_far = sum(position for standing in standings.values() for position in standing.positions.values())
    taken = share(open_, limit, turn=read_so_far)
    end_offsets: dict[str, TopicOffsets] = {}
    for topic, standing in standings.items():
        look = looks[topic]
        ends = {
            partition: position + taken.get(TopicPartition(topic, partition), 0)
            for partition, position in standing.positions.items()
        }
        seen = {partition: look.ends[partition] for partition, end in ends.items() if end < look.ends[partition]}
        end_offsets[topic] = TopicOffsets(ends, look.topic_id, len(look.lineage.counts), seen)
    return Extent(end_offsets, tuple(losses), bool(losses) or any(taken.values()))


def _gates(look: TopicLook, positions: Mapping[int, int]) -> Mapping[int, int | None]:
    if not look.ordered:
        return dict.fromkeys(positions)
    everywhere = {partition: positions.get(partition, BEYOND) for partition in look.starts}
    return look.lineage.deliverable(everywhere)


def share(open_: Mapping[TopicPartition, int], limit: int | None, *, turn: int) -> dict[TopicPartition, int]:
    """Share `limit` offsets out over partitions in proportion to what each has open.

    `turn` is the number of offsets read so far. The first to get something of what cannot be shared moves on with it,
    around all partitions, so that each has its turn after at most len(open_) / limit batches.
    """
    some = {tp: count for tp, count in open_.items() if count > 0}
    total = sum(some.values())
    if limit is None or total <= limit:
        return some
    assert limit > 0
    names = sorted(open_)
    first = turn % len(names)
    in_turn = [tp for tp in (*names[first:], *names[:first]) if tp in some]
    if limit <= len(some):
        return dict.fromkeys(in_turn[:limit], 1)
    taken = {tp: 1 + (count - 1) * (limit - len(some)) // (total - len(some)) for tp, count in some.items()}
    rest = limit - sum(taken.values())
    for tp in in_turn:
        more = min(rest, 1, some[tp] - taken[tp])
        taken[tp] += more
        rest -= more
    assert rest == 0
    return taken


# -- tasks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Read:
    """Read `topic`-`partition` from offset `start` to `end`, `end` exclusive."""

    topic: str
    partition: int
    start: int
    end: int
    cuts: tuple[int, ...] = ()
    """Ends of its ended segments, ascending (`sequence_cuts`)."""
    layouts: tuple[int, ...] = (0,)

    @property
    def count(self) -> int:
        """How many offsets it spans."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Task:
    """What one Spark task reads, in this order, and of it the keys of `key_range` only."""

    reads: tuple[Read, ...]
    key_range: KeyRange = WHOLE

    @property
    def count(self) -> int:
        """How many offsets it spans, keys of others included."""
        return sum(read.count for read in self.reads)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How a batch is cut into tasks; the names are the options'."""

    min_partitions: int = 0
    max_records_per_partition: int = 0
    """0: no limit."""
    by_key: bool = True


def plan_tasks(
    looks: Mapping[str, TopicLook],
    start: Mapping[str, Mapping[int, int]],
    end: Mapping[str, Mapping[int, int]],
    splitting: Splitting,
    *,
    whole: bool = False,
) -> list[Task]:
    """Cut what lies between two positions into tasks, in the order of their names.

    `whole` says that it may span layouts whose segments wait on each other, as a batch query does; without it each
    partition stands alone, as `extent` sees to. A partition without a start position begins at its log start.
    """
    units: list[tuple[Read, ...]] = []
    for topic, look in sorted(looks.items()):
        reads = list(_reads(look, start.get(topic, {}), end.get(topic, {})))
        if whole and splitting.by_key and look.ordered and len(look.lineage.counts) > 1:
            units += _families(look.lineage, reads)
        else:
            units += ((read,) for read in reads)
    counts = [sum(read.count for read in unit) for unit in units]
    tasks: list[Task] = []
    for unit, pieces in zip(units, _pieces(counts, splitting), strict=True):
        if pieces == 1:
            tasks.append(Task(unit))
        elif splitting.by_key:
            tasks += (Task(unit, keys) for keys in key_ranges(pieces))
        else:
            (read,) = unit
            tasks += (Task((part,)) for part in _by_offset(read, pieces))
    return tasks


def key_ranges(pieces: int) -> list[KeyRange]:
    """Cut all keys into ranges of nearly one size."""
    bounds = [(KEY_RANGE_MAX + 1) * i // pieces for i in range(pieces + 1)]
    return [KeyRange(low, high - 1) for low, high in pairwise(bounds)]


def _reads(look: TopicLook, start: Mapping[int, int], end: Mapping[int, int]) -> Iterator[Read]:
    for partition in sorted(end):
        first = look.starts.get(partition, 0)
        begin = max(first, start.get(partition, first))
        if begin < end[partition]:
            cuts, layouts = _cuts_between(look.lineage, partition, begin, end[partition])
            yield Read(look.topic, partition, begin, end[partition], cuts, layouts)


def _cuts_between(lineage: Lineage, partition: int, start: int, end: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    cuts, layouts = sequence_cuts(lineage, partition)
    low, high = bisect_right(cuts, start), bisect_right(cuts, end - 1)
    return tuple(cuts[low:high]), tuple(layouts[low : high + 1])


def _families(lineage: Lineage, reads: Sequence[Read]) -> Iterator[tuple[Read, ...]]:
    """The partitions that share keys, each family as one run of reads in layout order."""
    families: dict[int, list[Read]] = {}
    for read in reads:
        families.setdefault(read.partition % lineage.initial, []).append(read)
    for _, family in sorted(families.items()):
        segments = [segment for read in family for segment in _by_segment(read)]
        segments.sort(key=lambda read: (read.layouts[0], read.partition))
        yield tuple(_joined(segments))


def _by_segment(read: Read) -> Iterator[Read]:
    bounds = (read.start, *read.cuts, read.end)
    for (low, high), layout in zip(pairwise(bounds), read.layouts, strict=True):
        yield Read(read.topic, read.partition, low, high, (), (layout,))


def _joined(segments: Iterable[Read]) -> Iterator[Read]:
    """Reads that follow each other in one partition, as one."""
    last: Read | None = None
    for read in segments:
        if last is not None and last.partition == read.partition and last.end == read.start:
            last = Read(
                last.topic, last.partition, last.start, read.end, (*last.cuts, last.end), (*last.layouts, *read.layouts)
            )
            continue
        if last is not None:
            yield last
        last = read
    if last is not None:
        yield last


def _by_offset(read: Read, pieces: int) -> Iterator[Read]:
    bounds = [read.start + read.count * i // pieces for i in range(pieces + 1)]
    for low, high in pairwise(bounds):
        first, last = bisect_right(read.cuts, low), bisect_right(read.cuts, high - 1)
        yield Read(read.topic, read.partition, low, high, read.cuts[first:last], read.layouts[first : last + 1])


def _pieces(counts: Sequence[int], splitting: Splitting) -> list[int]:
    """Into how many tasks each run of reads is cut: by its size, then the largest pieces until there are enough."""
    size = splitting.max_records_per_partition
    pieces = [max(1, -(-count // size)) if size else 1 for count in counts]
    missing = splitting.min_partitions - sum(pieces)
    if missing > 0:
        largest = [(-count / piece, i) for i, (count, piece) in enumerate(zip(counts, pieces, strict=True))]
        heapq.heapify(largest)
        while missing > 0 and largest:
            _, i = heapq.heappop(largest)
            if pieces[i] < counts[i]:
                pieces[i] += 1
                missing -= 1
                heapq.heappush(largest, (-counts[i] / pieces[i], i))
    return pieces


# -- the plan on record, and its proof ---------------------------------------------------------------------------------


def plan_to_json(
    looks: Mapping[str, TopicLook],
    start: Mapping[str, Mapping[int, int]],
    end: Mapping[str, Mapping[int, int]],
    tasks: Sequence[Task],
    *,
    by_key: bool,
    whole: bool = False,
) -> str:
    """Write a batch's plan as one line: what was known, what is read, and which gates were closed and why."""
    topics: dict[str, Any] = {}
    for topic, look in sorted(looks.items()):
        begin, finish = start.get(topic, {}), end.get(topic, {})
        read = sorted(look.starts.keys() & finish.keys())
        positions = {p: max(look.starts[p], begin.get(p, look.starts[p])) for p in read}
        topics[topic] = {
            "ordered": look.ordered,
            "initial": look.lineage.initial,
            "counts": look.lineage.counts,
            "ends": [{str(p): ends[p] for p in sorted(ends)} for ends in look.lineage.ends],
            "log_start": {str(p): look.starts[p] for p in sorted(look.starts)},
            "log_end": {str(p): look.ends[p] for p in sorted(look.ends)},
            "start": {str(p): offset for p, offset in positions.items()},
            "end": {str(p): max(offset, finish[p]) for p, offset in positions.items()},
            "closed": {} if whole else _closed_gates(look, positions),
        }
    plan = {
        "version": PLAN_VERSION,
        "kind": "batch" if whole else "micro-batch",
        "split": "key" if by_key else "offset",
        "topics": topics,
        "tasks": [
            {"keys": task.key_range, "reads": [(r.topic, r.partition, r.start, r.end) for r in task.reads]}
            for task in tasks
        ],
    }
    return json.dumps(plan, separators=(",", ":"))


def _closed_gates(look: TopicLook, positions: Mapping[int, int]) -> dict[str, Any]:
    if not look.ordered:
        return {}
    gates = look.lineage.gates({partition: positions.get(partition, BEYOND) for partition in look.starts})
    closed = ((partition, gates.limit(partition), gates.waits(partition)) for partition in positions)
    return {str(partition): {"at": at, "waits": waits} for partition, at, waits in closed if at is not None}


class _Piece(NamedTuple):
    """Part of a segment that some task of the plan reads."""

    task: int
    turn: int
    partition: int
    layout: int
    keys: KeyRange
    start: int
    end: int


def verify(line: str) -> list[str]:
    """Check a plan that `plan_to_json` wrote; give back what is wrong with it, one sentence each, nothing if it holds.

    The check is by brute force over the classes of keys that every layout places alike: for each class, in which
    segments its records can be, and whether a task, or this batch, gets at them out of turn.
    """
    plan = json.loads(line)
    if plan.get("version") != PLAN_VERSION:
        return [f"this is not a plan of version {PLAN_VERSION}"]
    tasks = [(KeyRange(*task["keys"]), [tuple(read) for read in task["reads"]]) for task in plan["tasks"]]
    problems: list[str] = []
    for topic, known in plan["topics"].items():
        problems += _verify_topic(topic, known, tasks, whole=plan["kind"] == "batch", by_key=plan["split"] == "key")
    return problems


def _verify_topic(
    topic: str, known: Mapping[str, Any], tasks: Sequence[tuple[KeyRange, list[Any]]], *, whole: bool, by_key: bool
) -> list[str]:
    log_start, log_end, start, end = (
        {int(p): offset for p, offset in known[name].items()} for name in ("log_start", "log_end", "start", "end")
    )
    problems = [
        f"{topic}-{p}: offsets {start.get(p)} to {offset} are not within the log, {log_start[p]} to {log_end[p]}"
        for p, offset in end.items()
        if not log_start[p] <= start.get(p, -1) <= offset <= log_end[p]
    ]
    segments = _segments(known["counts"], known["ends"], log_start, log_end)
    pieces = [
        _Piece(number, turn, partition, layout, keys, max(low, begin), min(high, finish))
        for number, (keys, reads) in enumerate(tasks)
        for turn, (name, partition, low, high) in enumerate(reads)
        if name == topic
        for layout, (begin, finish) in enumerate(segments.get(partition, ()))
        if max(low, begin) < min(high, finish)
    ]
    problems += _verify_cover(topic, pieces, start, end)
    if not known["ordered"]:
        return problems
    initial, counts = known["initial"], known["counts"]
    wrong: dict[str, None] = {}
    for key_class in range(2 * level_size(max(counts), initial)):
        path = [place(key_class, initial, count) for count in counts]
        mine = [piece for piece in pieces if path[piece.layout] == piece.partition]
        if not whole:
            wrong.update(dict.fromkeys(_verify_batch(topic, path, mine, segments, start)))
        if by_key:
            wrong.update(dict.fromkeys(_verify_tasks(topic, mine)))
    return problems + list(wrong)


def _segments(
    counts: Sequence[int], ends: Sequence[Mapping[str, int]], log_start: Mapping[int, int], log_end: Mapping[int, int]
) -> dict[int, list[tuple[int, int]]]:
    """Of every partition there is, its segment in each layout, as offsets."""
    segments: dict[int, list[tuple[int, int]]] = {}
    for partition, low in log_start.items():
        cuts = [low]
        for layout_ends in ends:
            cuts.append(max(cuts[-1], layout_ends.get(str(partition), cuts[-1])))
        cuts.append(max(cuts[-1], log_end[partition]))
        segments[partition] = list(pairwise(cuts))
        assert len(segments[partition]) == len(counts)
    return segments


def _verify_cover(
    topic: str, pieces: Sequence[_Piece], start: Mapping[int, int], end: Mapping[int, int]
) -> Iterator[str]:
    """Every (offset, key range) between start and end is read exactly once."""
    for partition in sorted({piece.partition for piece in pieces} | end.keys()):
        mine = [piece for piece in pieces if piece.partition == partition]
        bounds = sorted({offset for piece in mine for offset in (piece.start, piece.end)})
        low, high = start.get(partition, 0), end.get(partition, 0)
        if low < high and (not bounds or bounds[0] > low or bounds[-1] < high):
            yield f"{topic}-{partition}: not all of offsets {low} to {high} are read by a task"
        if bounds and (bounds[0] < low or bounds[-1] > high):
            yield f"{topic}-{partition}: a task reads beyond offsets {low} to {high}"
        for first, last in pairwise(bounds):
            ranges = sorted(piece.keys for piece in mine if piece.start <= first and last <= piece.end)
            follow = [keys.end + 1 for keys in ranges]
            if [keys.start for keys in ranges] != [0, *follow[:-1]] or follow[-1:] != [KEY_RANGE_MAX + 1]:
                yield f"{topic}-{partition}: offsets {first} to {last} are not read once, by one task for each key"


def _verify_batch(
    topic: str,
    path: Sequence[int],
    mine: Sequence[_Piece],
    segments: Mapping[int, list[tuple[int, int]]],
    start: Mapping[int, int],
) -> Iterator[str]:
    """What a micro-batch hands out of a class of keys waits on no other partition."""
    for piece in mine:
        for layout in range(piece.layout):
            earlier = path[layout]
            if earlier == piece.partition or earlier not in segments:
                continue
            low, high = segments[earlier][layout]
            if low < high and earlier in start and start[earlier] < high:
                yield (
                    f"{topic}-{piece.partition}: offset {piece.start}, of layout {piece.layout}, is read before "
                    f"{topic}-{earlier} was read up to offset {high}, the end of layout {layout}"
                )


def _verify_tasks(topic: str, mine: Sequence[_Piece]) -> Iterator[str]:
    """A class of keys is read by one task for each key, and by it in layout order."""
    for one, other in permutations(mine, 2):
        both = f"{topic}-{one.partition} and {topic}-{other.partition}"
        if one.task < other.task and one.keys.start <= other.keys.end and other.keys.start <= one.keys.end:
            yield f"tasks {one.task} and {other.task} both read some keys of {both}"
        earlier = (one.layout, one.start) < (other.layout, other.start)
        if one.task == other.task and earlier and (one.turn, one.start) > (other.turn, other.start):
            yield f"task {one.task} reads {both} in layouts {other.layout}, {one.layout}: the wrong way round"
