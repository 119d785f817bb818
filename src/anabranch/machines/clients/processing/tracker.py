"""The tracker: which records of each partition the application has, which are done, which wait.

Records are taken from the fetcher in the order of a partition. A taken record is ready once all earlier records of its
key in the partition are done; without a key at once. Records of a key in other partitions are not its concern: gates
keep those back until this partition's are done. So

    WAITING -> READY -> RUNNING -> FINISHED           `next` makes READY records RUNNING, `done` finishes them
                 ^---- REJECTED <-'                   `reject`: again at its time; later records of its key wait

The stable offset of a partition is that of its first unfinished record, or the position behind all taken ones: all
below it is done. Above it, `fresh` ranges are what was done since the last commit took them. A range includes offsets
without a record, so that neighbors meet; it does not include what others had done before, and the consumer skipped.

Bounds: unfinished records and their bytes, for all partitions and for each its equal part; and how far a partition runs
ahead of its stable offset, in offsets and in bytes: what may be delivered again after a crash, and, because ranges lie
between unfinished records, how many ranges exist. A record is taken while the bytes before it are below the bound.

Of a shared partition the member has some of the keys (`exact`): other members finish the records between, so a range is
of its own records alone. Where ranges of keys are added (`stands`), the position may go back: records of added keys are
taken behind others of the partition, and come before those. Where some are taken away, their records leave (`part`),
also those that are done and not committed: committed later, without those that the stable offset has passed meanwhile,
they would have an earlier record of a key come again, and a later one not.

A forgotten partition (revoked, lost, or its position was moved) takes its records along. Those that run may be left as
orphans (`orphaning`): until an orphan ends, records of its key wait if the partition comes back, and its end counts for
nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.processing.values import Entry, Item, Ranges, Room, Stage, TrackerSettings

UNFINISHED = frozenset({Stage.WAITING, Stage.READY, Stage.RUNNING, Stage.REJECTED})


class _Tracked:
    """A partition with taken records."""

    __slots__ = ("ends", "held", "keys", "name", "order", "parked", "position", "size", "starts", "taken", "unfinished")

    def __init__(self, name: TopicPartition, position: int) -> None:
        self.name = name
        self.position = position
        """The offset after all that was taken."""
        self.order: deque[Entry] = deque()
        """Taken records in order, from the first unfinished one on."""
        self.keys: dict[bytes, Entry] = {}
        """The last unfinished record of each key."""
        self.starts: dict[int, int] = {}
        """Fresh ranges, first to last offset."""
        self.ends: dict[int, int] = {}
        """The same, last to first offset."""
        self.unfinished = 0
        self.size = 0
        """The bytes of unfinished records."""
        self.taken = 0
        """The bytes of all taken records."""
        self.parked: list[Entry] = []
        """Ready records of a held partition."""
        self.held = False

    @property
    def stable(self) -> int:
        return min(self.order[0].offset, self.position) if self.order else self.position

    def add(self, first: int, last: int) -> int:
        """Add a fresh range, merged with its neighbors; return by how many the number of ranges grew."""
        grown = 1
        before = self.ends.pop(first - 1, None)
        if before is not None:
            first = before
            grown -= 1
        after = self.starts.pop(last + 1, None)
        if after is not None:
            last = after
            grown -= 1
        self.starts[first] = last
        self.ends[last] = first
        return grown


class _Cut:
    """Takes the entries of an order between two offsets out, from the nearer end, and puts others in their place."""

    def __init__(self, order: deque[Entry], first: int, last: int) -> None:
        self._order = order
        self._beside: list[Entry] = []
        self.within: list[Entry] = []
        self._is_front = first - order[0].offset < order[-1].offset - last
        if self._is_front:
            while order and order[0].offset <= last:
                entry = order.popleft()
                (self._beside if entry.offset < first else self.within).append(entry)
        else:
            while order and order[-1].offset >= first:
                entry = order.pop()
                (self._beside if entry.offset > last else self.within).append(entry)

    def close(self, entries: Iterable[Entry]) -> None:
        """Put entries there, in any order."""
        within = sorted(entries, key=lambda entry: entry.offset)
        if self._is_front:
            self._order.extendleft(reversed([*self._beside, *within]))
        else:
            self._order.extend([*within, *reversed(self._beside)])


class Tracker:
    """The taken records of one consumer."""

    def __init__(self, settings: TrackerSettings, *, ordered: bool = True) -> None:
        """`ordered`: records of a key run one after the other."""
        self._ordered = ordered
        self.orphaning = False
        """Whether records that run when their partition is forgotten become orphans; else they are forgotten, too."""
        self._settings = settings
        self._partitions: dict[TopicPartition, _Tracked] = {}
        self._ready: list[tuple[int, Entry]] = []
        """A heap: what was taken first runs first, so that few gaps are left behind."""
        self._rejected: list[tuple[int, int, Entry]] = []
        self._running: dict[int, Entry] = {}
        self._orphans: dict[TopicPartition, dict[bytes, Entry]] = {}
        self._holds: set[TopicPartition] = set()
        self._moved: set[TopicPartition] = set()
        self._turn = 0
        self.unfinished = 0
        """Records that were taken and are not finished."""
        self.size = 0
        """Their bytes."""
        self.fresh = 0
        """Ranges done since the last commit."""

    # -- records in ---------------------------------------------------------------------------------------------------

    def room(self, tp: TopicPartition, position: int, partitions: int = 1) -> Room | None:
        """Return how much may be taken of a partition at `position`, where there are `partitions` in all.

        None if it has no room. If the position is not where the last records ended, the partition begins anew.
        """
        tracked = self._partitions.get(tp)
        if tracked is None or tracked.position != position:
            tracked = self._begin(tp, position)
        settings, share = self._settings, max(1, partitions)
        records = min(
            max(1, settings.max_unfinished_records // share) - tracked.unfinished,
            settings.max_unfinished_records - self.unfinished,
        )
        size = min(
            max(1, settings.max_unfinished_bytes // share) - tracked.size, settings.max_unfinished_bytes - self.size
        )
        end = tracked.stable + settings.max_offsets_ahead
        if tracked.order:
            size = min(size, settings.max_bytes_ahead - (tracked.taken - tracked.order[0].before))
        if records <= 0 or size <= 0 or end <= position:
            return None
        return Room(records, size, end)

    def _begin(self, tp: TopicPartition, position: int) -> _Tracked:
        self.forget(tp)
        tracked = self._partitions[tp] = _Tracked(tp, position)
        tracked.held = tp in self._holds
        tracked.keys.update(self._orphans.get(tp, {}))
        return tracked

    def begin(self, tp: TopicPartition, position: int) -> None:
        """Begin to track a partition at a position, whatever room there is."""
        self._begin(tp, position)

    def take(
        self, tp: TopicPartition, records: Sequence[Item], end: int, skipped: Ranges = (), *, exact: bool = False
    ) -> None:
        """Take the next records of a partition, in order; `end` is the position behind them.

        `skipped`: the ranges between them that were done before, ascending; they are not committed again. With `exact`
        nothing between them is: others have those records. Nor is it of records before others that were taken: those
        are of their own ranges. A record that is here already does not come again, though the position has gone back
        before it: a late commit of another member may have put the group back. Others of its key come before it.
        """
        tracked = self._partitions[tp]
        behind = bool(records) and bool(tracked.order) and records[0].offset <= tracked.order[-1].offset
        cut = _Cut(tracked.order, records[0].offset, records[-1].offset) if behind else None
        here = {entry.offset for entry in cut.within} if cut is not None else ()
        position, taken, entries = tracked.position, tracked.taken, list[Entry]()
        skips = iter(skipped)
        skip = next(skips, None)
        for record in records:
            if record.offset in here:
                position = record.offset + 1
                continue
            while skip is not None and skip[0] < record.offset:
                position = max(position, skip[1] + 1)
                skip = next(skips, None)
            size = len(record.key or b"") + len(record.value or b"")
            entry = Entry(tp, record, record.offset if exact or behind else position, taken, size)
            taken += size
            position = entry.offset + 1
            entries.append(entry)
        assert position <= end, (tp, position, end)
        if cut is None:
            tracked.order.extend(entries)
        else:
            cut.close([*cut.within, *entries])
        chains = self._chains_behind(tracked, entries) if cut is not None else {}
        displaced: list[Entry] = []
        for entry in entries:
            if entry.key is None or not self._ordered or self._is_first(tracked, entry, chains, displaced):
                self._make_ready(tracked, entry)
        if displaced:
            self._wait(tracked, displaced)
        self.unfinished += len(entries)
        tracked.unfinished += len(entries)
        self.size += taken - tracked.taken
        tracked.size += taken - tracked.taken
        tracked.position, tracked.taken = end, taken
        self._advance(tracked)

    def _chains_behind(self, tracked: _Tracked, entries: Sequence[Entry]) -> dict[bytes, list[Entry]]:
        """The unfinished records of the keys of which some of `entries` come before others, in the order they run."""
        last, chains = tracked.keys, dict[bytes, list[Entry]]()
        for entry in entries:
            key = entry.key
            if key is not None and key in last and last[key].offset > entry.offset:
                orphan = self._orphans.get(tracked.name, {}).get(key)
                chains.setdefault(key, [] if orphan is None else [orphan])
        if chains:
            added = set(map(id, entries))
            some = [it for it in tracked.order if it.key in chains and it.stage in UNFINISHED and id(it) not in added]
            for entry in sorted(some, key=lambda it: it.deliveries == 0):  # Of a key one at the most has.
                assert entry.key is not None
                chains[entry.key].append(entry)
        return chains

    def _is_first(
        self, tracked: _Tracked, entry: Entry, chains: Mapping[bytes, list[Entry]], displaced: list[Entry]
    ) -> bool:
        """Have a record run in its turn of its key; whether it is the first. `chains`: those before and behind it.

        It comes before others that lie behind it, but not before one that runs, or has run. A ready one that has to
        wait now is `displaced`.
        """
        key = entry.key
        assert key is not None
        before, chain = tracked.keys.get(key), chains.get(key)
        if chain is not None:
            at = next((n for n, it in enumerate(chain) if it.offset > entry.offset and not it.deliveries), len(chain))
            before, behind = chain[at - 1] if at else None, chain[at] if at < len(chain) else None
            chain.insert(at, entry)
            if behind is not None:
                entry.following = behind
                if before is None and behind.stage is Stage.READY:
                    behind.stage = Stage.WAITING
                    displaced.append(behind)
        if entry.following is None:
            tracked.keys[key] = entry
        if before is None:
            return True
        before.following, entry.stage = entry, Stage.WAITING
        return False

    def _wait(self, tracked: _Tracked, displaced: Iterable[Entry]) -> None:
        """Have records that were ready run no more before others."""
        leases = {entry.lease for entry in displaced}
        tracked.parked = [entry for entry in tracked.parked if entry.lease not in leases]
        self._keep_ready(lambda entry: entry.lease not in leases)

    def stands(self, tp: TopicPartition, position: int) -> None:
        """Go on at another position of a shared partition, without forgetting what was taken of it."""
        tracked = self._partitions.get(tp)
        if tracked is not None and tracked.position != position:
            tracked.position = position
            self._advance(tracked)

    def _make_ready(self, tracked: _Tracked, entry: Entry) -> None:
        entry.stage = Stage.READY
        if entry.leaving:
            return
        if tracked.held:
            tracked.parked.append(entry)
        else:
            heapq.heappush(self._ready, (entry.lease, entry))

    # -- records out --------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """The number of ready records."""
        return len(self._ready)

    def next(self, now_ms: int) -> Entry | None:
        """Return the next ready record, which runs from now on; None without any."""
        if self._rejected and self._rejected[0][0] <= now_ms:
            self.mature(now_ms)
        if not self._ready:
            return None
        entry = heapq.heappop(self._ready)[1]
        entry.stage = Stage.RUNNING
        entry.deliveries += 1
        entry.started_ms = now_ms
        self._running[entry.lease] = entry
        return entry

    def mature(self, now_ms: int) -> None:
        """Make rejected records ready whose time has come."""
        while self._rejected and self._rejected[0][0] <= now_ms:
            _, _, entry = heapq.heappop(self._rejected)
            if entry.stage is Stage.REJECTED:
                self._make_ready(self._partitions[entry.partition], entry)

    @property
    def wake_ms(self) -> int | None:
        """The time at which the next rejected record comes again."""
        while self._rejected and self._rejected[0][2].stage is not Stage.REJECTED:
            heapq.heappop(self._rejected)
        return self._rejected[0][0] if self._rejected else None

    def hold(self, tp: TopicPartition) -> None:
        """Make no record of a partition run until `release`; what runs goes on."""
        self._holds.add(tp)
        tracked = self._partitions.get(tp)
        if tracked is not None and not tracked.held:
            tracked.held = True
            tracked.parked = [entry for _, entry in self._ready if entry.partition == tp]
            if tracked.parked:
                self._keep_ready(lambda entry: entry.partition != tp)

    def release(self, tp: TopicPartition) -> None:
        """Let records of a held partition run again."""
        self._holds.discard(tp)
        tracked = self._partitions.get(tp)
        if tracked is not None and tracked.held:
            tracked.held = False
            parked, tracked.parked = tracked.parked, []
            for entry in parked:
                self._make_ready(tracked, entry)

    def _keep_ready(self, stays: Callable[[Entry], bool]) -> None:
        """Take other records out of the ready ones."""
        self._ready = [each for each in self._ready if stays(each[1])]
        heapq.heapify(self._ready)

    def is_running(self, lease: int, deliveries: int) -> bool:
        """Whether the application has a record, in its delivery of that number, and its end would count."""
        entry = self._running.get(lease)
        return entry is not None and entry.deliveries == deliveries and entry.stage is Stage.RUNNING

    # -- the application's word ---------------------------------------------------------------------------------------

    def done(self, lease: int, deliveries: int) -> bool:
        """Finish a record in its delivery of that number; False if the application does not have it any more."""
        entry = self._running.get(lease)
        if entry is None or entry.deliveries != deliveries:
            return False
        del self._running[lease]
        if entry.stage is Stage.DROPPED:
            self._end_orphan(entry)
            return False
        entry.stage = Stage.FINISHED
        entry.record = None
        tracked = self._partitions[entry.partition]
        self.unfinished -= 1
        self.size -= entry.size
        tracked.unfinished -= 1
        tracked.size -= entry.size
        self._moved.add(tracked.name)
        if entry is tracked.order[0] and entry.offset < tracked.position:
            self._advance(tracked)
        else:
            self.fresh += tracked.add(entry.first, entry.offset)
        self._end_of_turn(tracked, entry)
        return True

    def _advance(self, tracked: _Tracked) -> None:
        """Move the stable offset behind all finished records at the front: the plain offset covers their ranges."""
        order, last = tracked.order, None
        while order and order[0].stage is Stage.FINISHED and order[0].offset < tracked.position:
            ended = tracked.starts.pop(order.popleft().first, None)
            if ended is not None:
                last = ended
                del tracked.ends[last]
                self.fresh -= 1
        if last is not None and order and order[0].first <= last:  # The position is in the middle of a range.
            self.fresh += tracked.add(order[0].first, last)
        self._moved.add(tracked.name)

    def _end_of_turn(self, tracked: _Tracked, entry: Entry) -> None:
        """Let the next record of the key run."""
        key = entry.key
        if key is None:
            return
        following = entry.following
        if following is not None:
            entry.following = None
            self._make_ready(tracked, following)
        elif tracked.keys.get(key) is entry:
            del tracked.keys[key]

    def reject(self, lease: int, deliveries: int, due_ms: int) -> bool:
        """Have a record come again at `due_ms`; False if the application does not have it any more."""
        entry = self._running.get(lease)
        if entry is None or entry.deliveries != deliveries:
            return False
        del self._running[lease]
        if entry.stage is Stage.DROPPED:
            self._end_orphan(entry)
            return False
        entry.stage = Stage.REJECTED
        self._turn += 1
        heapq.heappush(self._rejected, (due_ms, self._turn, entry))
        return True

    # -- progress -----------------------------------------------------------------------------------------------------

    def stable(self, tp: TopicPartition, position: int) -> int:
        """Return the offset below which all is done, of a partition at `position`."""
        tracked = self._partitions.get(tp)
        return position if tracked is None or tracked.position != position else tracked.stable

    def moved(self) -> set[TopicPartition]:
        """Return the partitions of which more is done, or whose position has changed, since the last call."""
        moved, self._moved = self._moved, set()
        return moved

    @property
    def partitions(self) -> set[TopicPartition]:
        """The partitions with a state here."""
        return set(self._partitions)

    def finished(self, tp: TopicPartition, position: int) -> Ranges:
        """Return all that is done above the stable offset of a partition at `position`, ascending."""
        tracked = self._partitions.get(tp)
        if tracked is None or tracked.position != position:
            return []
        found: list[tuple[int, int]] = []
        for entry in tracked.order:
            if entry.stage is not Stage.FINISHED:
                continue
            if found and found[-1][1] + 1 == entry.first:
                found[-1] = (found[-1][0], entry.offset)
            else:
                found.append((entry.first, entry.offset))
        return found

    def take_fresh(self, partitions: Iterable[TopicPartition] | None = None) -> dict[TopicPartition, Ranges]:
        """Return the ranges above the stable offset done since the last call, ascending; to be committed."""
        found: dict[TopicPartition, Ranges] = {}
        for tp in list(self._partitions) if partitions is None else partitions:
            tracked = self._partitions.get(tp)
            if tracked is not None and tracked.starts:
                found[tp] = sorted(tracked.starts.items())
                self.fresh -= len(tracked.starts)
                tracked.starts, tracked.ends = {}, {}
        return found

    def give_back(self, ranges: Mapping[TopicPartition, Ranges]) -> None:
        """Take back ranges of `take_fresh` whose commit failed, without what the stable offset has passed, or has left.

        Nothing is taken back of a partition that was forgotten meanwhile: nobody commits for it.
        """
        for tp, given in ranges.items():
            tracked = self._partitions.get(tp)
            if tracked is not None:
                self._set_fresh(tracked, [*tracked.starts.items(), *given])

    def _set_fresh(self, tracked: _Tracked, ranges: Ranges) -> None:
        """Have as fresh what of some ranges is done by records that are here."""
        self.fresh -= len(tracked.starts)
        tracked.starts, tracked.ends = {}, {}
        left = deque(sorted(ranges))
        end = -1
        for entry in tracked.order:
            while left and left[0][0] <= entry.offset:
                end = max(end, left.popleft()[1])
            if entry.offset <= end and entry.stage is Stage.FINISHED:
                self.fresh += tracked.add(entry.first, entry.offset)

    # -- the end of a partition ---------------------------------------------------------------------------------------

    def entries(self, tp: TopicPartition) -> list[Entry]:
        """Return the records of a partition from the first unfinished one on, in order."""
        tracked = self._partitions.get(tp)
        return [] if tracked is None else list(tracked.order)

    def part(self, tp: TopicPartition, leaving: Iterable[Entry]) -> None:
        """Let records of a partition run no more, whose keys go to others. What runs goes on; then `part_with`."""
        tracked = self._partitions.get(tp)
        if tracked is None:
            return
        for entry in leaving:
            entry.leaving = True
        self._keep_ready(lambda entry: not entry.leaving)
        tracked.parked = [entry for entry in tracked.parked if not entry.leaving]

    def part_with(self, tp: TopicPartition) -> list[Entry]:
        """Drop the records that leave a partition (`part`); return those that run."""
        tracked = self._partitions.get(tp)
        if tracked is None:
            return []
        running: list[Entry] = []
        kept: deque[Entry] = deque()
        for entry in tracked.order:
            if not entry.leaving:
                kept.append(entry)
                continue
            if entry.stage is Stage.FINISHED:
                continue
            self.unfinished -= 1
            tracked.unfinished -= 1
            self.size -= entry.size
            tracked.size -= entry.size
            if entry.stage is Stage.RUNNING:
                running.append(entry)
            elif entry.key is not None and tracked.keys.get(entry.key) is entry:
                del tracked.keys[entry.key]
            entry.stage = Stage.DROPPED
            entry.following = None
        for entry in running:
            if not self.orphaning:
                del self._running[entry.lease]
                if entry.key is not None:
                    tracked.keys.pop(entry.key, None)
            elif entry.key is not None:
                self._orphans.setdefault(tp, {})[entry.key] = tracked.keys[entry.key] = entry
        tracked.order = kept
        self._set_fresh(tracked, list(tracked.starts.items()))
        self._advance(tracked)
        return running

    def running(self, partitions: Iterable[TopicPartition] | None = None, *, leaving: bool = False) -> list[Entry]:
        """Return the records that the application has, of these partitions or of all; without orphans.

        With `leaving` only those whose keys go to others, of partitions that stay.
        """
        wanted = None if partitions is None else set(partitions)
        return [
            entry
            for entry in self._running.values()
            if entry.stage is Stage.RUNNING
            and (wanted is None or entry.partition in wanted)
            and (entry.leaving or not leaving)
        ]

    @property
    def oldest_started_ms(self) -> int | None:
        """The time at which the record that runs for the longest was handed out; None if none runs."""
        for entry in self._running.values():
            if entry.stage is Stage.RUNNING:
                return entry.started_ms
        return None

    def forget(self, *partitions: TopicPartition) -> list[Entry]:
        """Drop all records of partitions; return those that run."""
        running: list[Entry] = []
        ready: set[TopicPartition] = set()
        for tp in partitions:
            running += self._forget(tp, ready)
        if ready:  # Once for many slices; and where all is done, none takes a look at all that is ready.
            self._keep_ready(lambda entry: entry.partition not in ready)
        return running

    def _forget(self, tp: TopicPartition, ready: set[TopicPartition]) -> list[Entry]:
        tracked = self._partitions.pop(tp, None)
        self._moved.discard(tp)
        for orphan in self._orphans.get(tp, {}).values():
            orphan.following = None
        if tracked is None:
            return []
        running = [entry for entry in tracked.order if entry.stage is Stage.RUNNING]
        for entry in tracked.order:
            if entry.stage is Stage.FINISHED:
                continue
            if entry.stage is Stage.READY and not tracked.held:
                ready.add(tp)
            entry.stage = Stage.DROPPED
            entry.following = None
        for entry in running:
            if not self.orphaning:
                del self._running[entry.lease]
            elif entry.key is not None and self._ordered:
                self._orphans.setdefault(tp, {})[entry.key] = entry
        self.unfinished -= tracked.unfinished
        self.size -= tracked.size
        self.fresh -= len(tracked.starts)
        return running

    def _end_orphan(self, entry: Entry) -> None:
        orphans = self._orphans.get(entry.partition, {})
        if entry.key is None or orphans.get(entry.key) is not entry:
            return
        del orphans[entry.key]
        if not orphans:
            del self._orphans[entry.partition]
        tracked = self._partitions.get(entry.partition)
        if tracked is not None:
            self._end_of_turn(tracked, entry)
