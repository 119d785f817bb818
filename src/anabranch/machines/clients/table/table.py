"""The table: ask whether records may be handed out, carry out loads and flushes, get and put in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.key_ranges import has
from anabranch.machines.clients.table.values import (
    Change,
    Changes,
    KeyLoadingError,
    KeyNotOwnedError,
    Load,
    Piece,
    Write,
    without,
)
from anabranch.machines.keyspace import SPACE, Interval, spread
from anabranch.machines.lineage import Lineage
from anabranch.records.hashing import PLACEMENT_HASH_MAX, murmur2

Step = tuple[int, int, int]
"""The offset up to which the records of keys between two places are processed: (start, end, offset)."""
AT_A_TIME = 500
"""Entries of one slice of a flush: a step of a loop stays short."""
KNOWN_PLACES = 65_536


@lru_cache(KNOWN_PLACES)
def place_of(key: bytes, initial: int) -> tuple[int, int]:
    """Return the family of a key, and its place in the key space of the family."""
    murmur = murmur2(key)
    return (murmur & PLACEMENT_HASH_MAX) % initial, spread(murmur, initial)


def held(lineage: Lineage, partition: int, layout: int) -> Interval | None:
    """Return the keys whose records a partition took in a layout; None where it took none, or that is forgotten."""
    if layout < lineage.first or partition >= lineage.count_in(layout):
        return None
    return lineage.held(partition, layout)


class Table:
    """The entries of the keys that one consumer owns of one topic."""

    def __init__(self) -> None:
        self.initial = 0
        """The topic's partition count at creation; 0 before it is known."""
        self.entries = 0
        """Flushed entries in memory."""
        self.size = 0
        """The bytes of their keys and values."""
        self.unflushed_size = 0
        """The bytes of the keys and values of changes that are not flushed."""
        self.flush_wanted = False
        """Whether an interval can be loaded only after a flush."""
        self._families: dict[int, list[Piece]] = {}
        """The pieces, by family."""
        self._behind: list[Piece] = []
        """Pieces with entries that have not been looked through."""
        self._loads: list[Load] = []
        self._changes: dict[TopicPartition, dict[bytes, Changes]] = {}
        self._sending: list[Write] = []
        self._garbage: list[dict[bytes, bytes]] = []

    # -- what is owned ------------------------------------------------------------------------------------------------

    def advance(self, lineage: Lineage, processed: Mapping[TopicPartition, int]) -> set[TopicPartition]:
        """Drop the keys that partitions have left behind: all records before these offsets are processed.

        Return the partitions that have passed into another layout.
        """
        self.initial = lineage.initial
        self.flush_wanted = False
        passed: set[TopicPartition] = set()
        for pieces in tuple(self._families.values()):
            for piece in tuple(pieces):
                tp = piece.partition
                if tp not in processed:
                    continue
                now = lineage.layout_at(tp.partition, processed[tp])
                if now > piece.layout:
                    for layout in range(piece.layout + 1, now + 1):
                        self._narrow(piece, held(lineage, tp.partition, layout))
                    piece.layout = now
                    passed.add(tp)
        return passed

    def _relatives(self, partition: int) -> list[Piece]:
        """The pieces of the family of a partition."""
        return self._families.get(partition % self.initial, []) if self.initial else []

    def _of(self, tp: TopicPartition) -> list[Piece]:
        return [piece for piece in self._relatives(tp.partition) if piece.partition == tp]

    def admit(
        self,
        lineage: Lineage,
        tp: TopicPartition,
        start: int,
        end: int,
        share: Sequence[Interval] = (),
        floor: Sequence[Step] = (),
    ) -> bool:
        """Return whether records at offsets `start` to `end`, `end` exclusive, may be handed out now.

        They could be without the table: their gates are open. What is missing of their keys becomes loads; ask again
        once these are carried out. `share`: the keys that this member reads of the partition; empty for all. `floor`:
        the offsets from which it reads keys that it has read further than others. In segments that end below, these
        keys are not wanted: they may be those of another partition since, and of another member.
        """
        self.initial = lineage.initial
        own = self._of(tp)
        admitted = True
        for segment in lineage.segments(tp.partition, start):
            if segment.start >= end:
                break
            keys = held(lineage, tp.partition, segment.layout)
            read = [Interval(first, last) for first, last, at in floor if segment.end is not None and at >= segment.end]
            wanted = without(
                (both for one in share or (SPACE,) if keys and (both := keys.overlap(one)) is not None), read
            )
            for gap in without(wanted, [piece.interval for piece in own]):
                if self._is_unflushed(tp.partition % lineage.initial, gap):
                    self.flush_wanted = True
                    return False
                own.append(self._begin(tp, gap, segment.layout))
            needed = [piece for piece in own if any(piece.interval.overlap(one) for one in wanted)]
            admitted = admitted and all(piece.ready for piece in needed)
        return admitted

    def _begin(self, tp: TopicPartition, keys: Interval, layout: int) -> Piece:
        """Begin to load keys; another partition of this member that had them before has them no more."""
        for piece in tuple(self._relatives(tp.partition)):
            if piece.partition != tp:
                self._cut_out(piece, keys)
        piece = Piece(tp, keys, layout)
        self._families.setdefault(tp.partition % self.initial, []).append(piece)
        self._loads.append(Load(tp.partition % self.initial, piece))
        return piece

    def keep_to(self, tp: TopicPartition, share: Sequence[Interval]) -> None:
        """Drop the keys of a partition outside of a share, which was another one before; empty for all keys."""
        outside = without((SPACE,), share) if share else []
        for gap in outside:
            for piece in self._of(tp):
                self._cut_out(piece, gap)

    def part(self, tp: TopicPartition, ranges: Sequence[Interval]) -> None:
        """Drop the keys of a partition in ranges that went to others, and changes of them that are not flushed.

        Their records are not committed: the next owner makes these changes again, and others after them.
        """
        for gone in ranges:
            for piece in self._of(tp):
                self._cut_out(piece, gone)
        changes_of = self._changes.get(tp, {})
        for key in [key for key in changes_of if has(ranges, place_of(key, self.initial)[1])]:
            self._forget(key, changes_of.pop(key).all)

    def release(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the keys of partitions that were revoked or lost, and changes of them that are not flushed."""
        for tp in partitions:
            for piece in self._of(tp):
                self._drop(piece)
            for key, changes in self._changes.pop(tp, {}).items():
                self._forget(key, changes.all)

    def _is_unflushed(self, family: int, keys: Interval) -> bool:
        """Whether changes of some of these keys are not flushed."""
        for tp, changes in self._changes.items():
            if tp.partition % self.initial == family:
                for key in changes:
                    if keys.start <= place_of(key, self.initial)[1] <= keys.end:
                        return True
        return False

    def _narrow(self, piece: Piece, keys: Interval | None) -> None:
        """Keep only these keys of a piece: one interval, since of two that a partition held one lies in the other."""
        kept = None if keys is None else piece.interval.overlap(keys)
        if kept is None:
            self._drop(piece)
        elif kept != piece.interval:
            if not piece.ready:
                self._drop(piece)  # Its load is of no use; what is left of it is asked for again.
                return
            piece.interval = kept
            if not piece.behind:
                self._behind.append(piece)
            # What is left of a narrowing before has not been looked through yet; no key is in both.
            fewer, more = sorted((piece.behind, piece.values), key=len)
            more.update(fewer)
            piece.behind, piece.values = more, {}

    def _cut_out(self, piece: Piece, keys: Interval) -> None:
        """Drop some keys of a piece; what lies above them becomes a piece of its own."""
        if piece.interval.overlap(keys) is None:
            return
        above = Interval(keys.end + 1, piece.interval.end)
        below = Interval(piece.interval.start, keys.start - 1)
        if above.size > 0 and below.size > 0:
            if piece.ready:
                upper = Piece(piece.partition, above, piece.layout, ready=True)
                for key, value in (*piece.behind.items(), *piece.values.items()):
                    if above.start <= place_of(key, self.initial)[1] <= above.end:
                        upper.values[key] = value
                        self._count(key, value, 1)
                self._relatives(piece.partition.partition).append(upper)
            self._narrow(piece, below)
        else:
            self._narrow(piece, above if above.size > 0 else below if below.size > 0 else None)

    def _drop(self, piece: Piece) -> None:
        pieces = self._relatives(piece.partition.partition)
        if piece in pieces:
            pieces.remove(piece)
            self._garbage += [piece.values, piece.behind]
            piece.values, piece.behind = {}, {}
            self._loads = [load for load in self._loads if load.piece is not piece]

    def sweep(self, most: int = AT_A_TIME) -> bool:
        """Free at most `most` dropped entries; return whether more are left."""
        while self._garbage and most > 0:
            last = self._garbage[-1]
            while last and most > 0:
                key, value = last.popitem()
                self._count(key, value, -1)
                most -= 1
            if not last:
                self._garbage.pop()
        while self._behind and most > 0:
            piece = self._behind[-1]
            while piece.behind and most > 0:
                key, value = piece.behind.popitem()
                most -= 1
                if key in piece.values or not self._holds(piece, key):
                    self._count(key, value, -1)
                else:
                    piece.values[key] = value
            if not piece.behind:
                self._behind.pop()
        return bool(self._garbage or self._behind)

    def _count(self, key: bytes, value: bytes, by: int) -> None:
        self.entries += by
        self.size += by * (len(key) + len(value))

    # -- loads --------------------------------------------------------------------------------------------------------

    def take_loads(self) -> list[Load]:
        """Return the loads to begin; each ends with `loaded` or `failed`."""
        loads, self._loads = self._loads, []
        return loads

    def wants(self, load: Load) -> bool:
        """Whether a load is still wanted."""
        return load.piece in self._relatives(load.family)

    def restart(self, load: Load) -> None:
        """Forget what a load has brought: it begins again."""
        self._garbage.append(load.piece.values)
        load.piece.values = {}

    def fill(self, load: Load, entries: Iterable[tuple[bytes, bytes | None]]) -> bool:
        """Take records of the changelog, in their order; return whether the load is still wanted."""
        piece = load.piece
        if not self.wants(load):
            return False
        for key, value in entries:
            if not self._holds(piece, key):
                continue
            self._store(piece, key, value)
        return True

    def loaded(self, load: Load) -> None:
        """Note that everything was read."""
        load.piece.ready = True

    def failed(self, load: Load) -> None:
        """Note that a load has failed: its keys are asked for again."""
        self._drop(load.piece)

    def _holds(self, piece: Piece, key: bytes) -> bool:
        family, place = place_of(key, self.initial)
        return (
            family == piece.partition.partition % self.initial and piece.interval.start <= place <= piece.interval.end
        )

    def _store(self, piece: Piece, key: bytes, value: bytes | None) -> None:
        for entries in (piece.values, piece.behind):
            old = entries.pop(key, None)
            if old is not None:
                self._count(key, old, -1)
        if value is not None:
            piece.values[key] = value
            self._count(key, value, 1)

    # -- entries ------------------------------------------------------------------------------------------------------

    def holder(self, key: bytes) -> Piece:
        """Return the piece with a key. Raises `KeyNotOwnedError`, or `KeyLoadingError` while it is being loaded."""
        loading = False
        if self.initial:
            family, place = place_of(key, self.initial)
            for piece in self._families.get(family, ()):
                start, end = piece.interval
                if start <= place <= end:
                    if piece.ready:
                        return piece
                    loading = True
        if loading:
            raise KeyLoadingError(f"the entry of key {key!r} is being loaded; wait for wait_ready")
        raise KeyNotOwnedError(f"key {key!r} is not owned by this member; owner_of(key) tells whose it is")

    def get(self, key: bytes) -> bytes | None:
        """Return the value of an owned key, with all changes; None without one. Raises as `holder`."""
        piece = self.holder(key)
        changes = self._changes.get(piece.partition, {}).get(key)
        if changes is not None:
            return changes.all[-1].value
        value = piece.values.get(key)
        return piece.behind.get(key) if value is None else value

    def put(self, key: bytes, value: bytes | None, mark: int) -> None:
        """Change the value of an owned key, None to delete it; `mark` as in the package. Raises as `holder`."""
        tp = self.holder(key).partition
        changes = self._changes.setdefault(tp, {}).get(key)
        if changes is None:
            changes = self._changes[tp][key] = Changes()
        if len(changes.all) > changes.sending and changes.all[-1].mark == mark:
            self._forget(key, [changes.all.pop()])
        changes.all.append(Change(mark, value))
        self.unflushed_size += len(key) + len(value or b"")

    def undo(self, tp: TopicPartition, key: bytes, mark: int) -> None:
        """Undo the change of a record that was not finished."""
        changes = self._changes.get(tp, {}).get(key)
        if changes is not None and len(changes.all) > changes.sending and changes.all[-1].mark == mark:
            self._forget(key, [changes.all.pop()])
            if not changes.all:
                del self._changes[tp][key]

    def _forget(self, key: bytes, changes: Sequence[Change]) -> None:
        self.unflushed_size -= sum(len(key) + len(change.value or b"") for change in changes)

    def items(self) -> list[tuple[bytes, bytes]]:
        """Return all owned entries that are loaded, with all changes, in no order."""
        found: dict[bytes, bytes] = {}
        for pieces in self._families.values():
            for piece in pieces:
                if piece.ready:
                    found.update((key, value) for key, value in piece.behind.items() if self._holds(piece, key))
                    found.update(piece.values)
        for tp, changes_of in self._changes.items():
            for key, changes in changes_of.items():
                value = changes.all[-1].value
                if any(piece.ready and self._holds(piece, key) for piece in self._of(tp)):
                    if value is None:
                        found.pop(key, None)
                    else:
                        found[key] = value
        return list(found.items())

    # -- flushes ------------------------------------------------------------------------------------------------------

    def unflushed(self) -> set[TopicPartition]:
        """Return the partitions with changes that are not flushed."""
        return {tp for tp, changes in self._changes.items() if changes}

    def writes(self, offsets: Mapping[TopicPartition, int | Sequence[Step]]) -> Iterator[list[Write]]:
        """Yield, in slices, the changes that a commit of these offsets takes along; `flushed` or `not_flushed` end it.

        Steps commit an offset of the keys between two places each, both inclusive, and nothing of other keys.
        One flush at a time; changes may be made between the slices.
        """
        assert not self._sending
        for tp, offset in offsets.items():
            keys = iter(tuple(self._changes.get(tp, {}).items()))
            while some := list(islice(keys, AT_A_TIME)):
                writes: list[Write] = []
                for key, changes in some:
                    if self._changes.get(tp, {}).get(key) is not changes:
                        continue
                    upto = offset if isinstance(offset, int) else self._upto(key, offset)
                    changes.sending = sum(change.mark <= upto for change in changes.all)
                    if changes.sending:
                        writes.append(Write(tp, key, changes.all[changes.sending - 1].value, changes))
                self._sending += writes
                yield writes

    def _upto(self, key: bytes, steps: Sequence[Step]) -> int:
        place = place_of(key, self.initial)[1]
        return next((offset for start, end, offset in steps if start <= place <= end), -1)

    def flushed(self) -> Iterator[None]:
        """Take over, in slices, what was written: it is durable together with the offsets."""
        sent, self._sending = self._sending, []
        for number, (tp, key, value, changes) in enumerate(sent, 1):
            if self._changes.get(tp, {}).get(key) is changes:
                self._forget(key, changes.all[: changes.sending])
                del changes.all[: changes.sending]
                if not changes.all:
                    del self._changes[tp][key]
                for piece in self._of(tp):
                    if piece.ready and self._holds(piece, key):
                        self._store(piece, key, value)
            changes.sending = 0
            if number % AT_A_TIME == 0:
                yield

    def not_flushed(self) -> None:
        """Keep the changes for the next flush."""
        sent, self._sending = self._sending, []
        for write in sent:
            write.changes.sending = 0
