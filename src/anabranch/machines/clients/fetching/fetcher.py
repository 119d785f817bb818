"""The fetcher: report events, `drain` the work, carry it out, and return the `deliverable` records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import assigning, delivering, gating, receiving, requesting, sharing
from anabranch.machines.clients.fetching.places import place_of
from anabranch.machines.clients.fetching.state import FetchingState, Partition
from anabranch.machines.clients.fetching.values import (
    LATEST,
    ConsumerWork,
    Deliverable,
    FetcherSettings,
    FetchResult,
    RecordFilter,
    TopicView,
)
from anabranch.machines.clients.key_ranges import KeyRanges, Piece, frontier_of, pieces, places, share
from anabranch.machines.key_ranges import union
from anabranch.machines.keyspace import Interval


class Fetcher:
    """Decides the fetches and deliveries of a consumer; see the package for the theory."""

    def __init__(self, settings: FetcherSettings) -> None:
        self._state = FetchingState(settings)

    # -- calls of the application -------------------------------------------------------------------------------------

    def assign(
        self,
        partitions: Iterable[TopicPartition],
        whole_topics: Iterable[str] = (),
        *,
        awaiting: bool = False,
        shares: assigning.Shares = assigning.NO_SHARES,
    ) -> None:
        """Replace the assignment; a partition that stays assigned keeps its position.

        With `awaiting`, new partitions begin after a call of `begin` for each, as granted partitions do. `shares`: by
        partition, or by topic for all its partitions, the places of the key space that are read; all by default.
        """
        assigning.assign(self._state, partitions, whole_topics, awaiting=awaiting, shares=shares)

    def begin_anew(self, tp: TopicPartition) -> bool:
        """As `assigning.begin_anew`; it begins after a call of `begin`."""
        return assigning.begin_anew(self._state, tp)

    def anew_from(self, tp: TopicPartition) -> int | None:
        """Return where a partition that begins anew does so if nothing is committed."""
        partition = self._state.find(tp)
        return None if partition is None else partition.anew_from

    def filter(self, wanted: RecordFilter | None) -> None:
        """Fetch only some records from now on; None for all. Fetches for another filter are dropped."""
        if wanted != self._state.filter:
            self._state.filter = wanted
            for partition in self._state.partitions():
                partition.ask(wanted)

    def grant(
        self,
        partitions: Iterable[tuple[TopicPartition, UUID | None]],
        shares: Mapping[TopicPartition, KeyRanges] = assigning.NO_RANGES,
    ) -> None:
        """Add granted partitions, as a member of a group; each begins after a call of `begin`.

        `shares`: the ranges that are granted of those that are shared. Ranges of a partition that has begun begin after
        a call of `arrive`; its others are read on.
        """
        assigning.grant(self._state, partitions, shares)

    def withdraw(
        self, partitions: Iterable[TopicPartition], shares: Mapping[TopicPartition, KeyRanges] = assigning.NO_RANGES
    ) -> None:
        """Remove partitions from the assignment, or ranges of those in `shares`, and drop their fetched records."""
        assigning.withdraw(self._state, partitions, shares)

    def awaiting(self) -> tuple[TopicPartition, ...]:
        """Return the partitions that wait for `begin`, or for `arrive`."""
        return tuple(
            [
                part.name
                for topic in self._state.topics.values()
                for part in topic.partitions.values()
                if part.awaiting or part.arriving
            ]
        )

    def arriving(self, tp: TopicPartition) -> KeyRanges:
        """Return the ranges of a partition that wait for `arrive`."""
        partition = self._state.find(tp)
        return () if partition is None else partition.arriving

    def arrivals(self, tp: TopicPartition) -> int:
        """Return a number that changes when a partition is assigned, or ranges of it granted: -1 if it is not.

        What was asked before, or known, is outdated.
        """
        partition = self._state.find(tp)
        return -1 if partition is None else partition.arrivals

    def begin(
        self,
        tp: TopicPartition,
        *,
        offset: int | None = None,
        timestamp: int = LATEST,
        steps: Sequence[Piece] = (),
    ) -> None:
        """Set the starting position of a waiting partition, unless the application has called `seek` meanwhile.

        `steps`: by key the offset at which to begin, where it is not the same for all; `offset` is the lowest.
        """
        partition = self._state.find(tp)
        if partition is None or not partition.awaiting:
            return
        partition.gone = partition.passed
        if offset is None:
            self._look_up(partition, timestamp)
        else:
            partition.forget()
            partition.stand(sharing.begin(partition, steps, offset))

    def arrive(self, tp: TopicPartition, offset: int | None, steps: Sequence[Piece], processed: int) -> None:
        """Begin to read granted ranges of a partition that is read: at `offset`, or by key where there are `steps`.

        None: the group has committed nothing. `processed`: the offset below which the other keys are processed.
        """
        partition = self._state.find(tp)
        if partition is not None and partition.arriving:
            sharing.arrive(self._state, partition, offset, steps, processed)

    def share(self, tp: TopicPartition) -> KeyRanges:
        """Return the ranges of an assigned partition that are read, none if it is whole; without those that arrive."""
        partition = self._state.find(tp)
        return () if partition is None else partition.share

    def is_read_by_key(self, tp: TopicPartition) -> bool:
        """Whether a partition is shared, or was: some of its keys may have been read further than others."""
        partition = self._state.find(tp)
        return partition is not None and (bool(partition.share) or partition.floor is not None)

    def asks_for_some(self, tp: TopicPartition) -> bool:
        """Whether only some records of an assigned partition are wanted, or others were read before."""
        partition = self._state.find(tp)
        return partition is not None and (partition.wanted is not None or partition.floor is not None)

    def granted_share(self, tp: TopicPartition) -> KeyRanges:
        """Return the ranges of an assigned partition, none if it is whole; with those that arrive."""
        partition = self._state.find(tp)
        if partition is None or not partition.arriving:
            return () if partition is None else partition.share
        return share(union(places(partition.share), partition.arriving))

    def to_commit(self, tp: TopicPartition, offset: int) -> list[Piece]:
        """Return the next offsets by key of a partition of which all is processed below `offset`.

        None of a whole partition: a plain offset says it.
        """
        partition = self._state.find(tp)
        return [] if partition is None else sharing.processed(partition, offset)

    def has_gone(self, tp: TopicPartition, offset: int) -> bool:
        """Whether this member has come to an offset, with any key: to where others have finished, it says nothing."""
        partition = self._state.find(tp)
        return partition is None or partition.gone is None or bool(sharing.processed(partition, offset))

    def to_commit_as_said(self, tp: TopicPartition, offset: int) -> list[Piece]:
        """Return the same where an application says the offset, which may be older than keys that were added since."""
        partition = self._state.find(tp)
        return [] if partition is None else sharing.said(partition, offset)

    def first_position(self, tp: TopicPartition) -> int:
        """Return where this member began in a partition, 0 if it has not."""
        partition = self._state.find(tp)
        return 0 if partition is None or partition.start is None else partition.start

    def restart(self, tp: TopicPartition, offset: int) -> None:
        """Go back to `offset`, below which all is processed; of a share, what is processed above is not read again."""
        sharing.restart(self._state.partition(tp), offset)

    def place(self, tp: TopicPartition, key: bytes | None, offset: int) -> int | None:
        """Return where a record counts in the key space; None while the topic is not known."""
        partition = self._state.find(tp)
        if partition is None or partition.topic.view is None:
            return None
        return place_of(partition.topic.view.lineage, tp.partition, key, offset)

    # -- gates of a group's member ------------------------------------------------------------------------------------

    def committed(self, tp: TopicPartition, offset: int, *, by_owner: bool = True) -> None:
        """Note the group's committed offset in an assigned partition; `by_owner`: the owner of all keys is there."""
        partition = self._state.find(tp)
        if partition is not None:
            sharing.committed_whole(partition, offset, by_owner=by_owner)

    def passed(self, tp: TopicPartition, steps: Sequence[Piece]) -> None:
        """Note how far owners of keys have come, where that is not as far as the group has committed; none: it is."""
        partition = self._state.find(tp)
        if partition is not None:
            partition.passed = frontier_of(steps) if steps else None
            partition.topic.limits = None

    def begun(self, tp: TopicPartition, offset: int) -> None:
        """Note that the committed offset is where a reset made an earlier owner begin: it had read nothing before."""
        partition = self._state.find(tp)
        if partition is not None:
            partition.reset_at = offset
            partition.topic.limits = None

    def begins_behind_gate(self, tp: TopicPartition, offset: int) -> bool:
        """Whether a reset made the group begin at `offset`, behind a gate that is closed."""
        partition = self._state.find(tp)
        if partition is None or not 0 < partition.reset_at == offset:
            return False
        limit = gating.limits(partition.topic).get(partition.number)
        return limit is not None and limit <= offset

    def committed_by_key(
        self, tp: TopicPartition, steps: Iterable[Piece], outside: int | None = None, *, by_owner: bool = True
    ) -> None:
        """Note the group's committed offsets by key; `outside`: that of all other keys, None: as before."""
        partition = self._state.find(tp)
        if partition is not None:
            sharing.committed(partition, list(steps), outside, by_owner=by_owner)

    def told(self, tp: TopicPartition, offset: int) -> None:
        """Note the group's progress in a partition of a granted topic, as told by the coordinator."""
        topic = self._state.topics.get(tp.topic)
        if topic is None or self.known(tp) == offset:
            return
        topic.limits = None
        topic.unsure.discard(tp.partition)
        partition = topic.partitions.get(tp.partition)
        if partition is None:
            topic.elsewhere[tp.partition] = offset
        else:
            partition.told = offset

    def known(self, tp: TopicPartition) -> int | None:
        """Return the group's progress that gates count for a partition beside what this member reads and commits.

        None also where the coordinator would keep silent about a gate that opens by time.
        """
        topic = self._state.topics.get(tp.topic)
        if topic is None or tp.partition in topic.unsure or gating.is_lifted_too_little(topic, tp.partition):
            return None
        partition = topic.partitions.get(tp.partition)
        return topic.elsewhere.get(tp.partition) if partition is None else partition.told

    def lift(self, tp: TopicPartition, offset: int | None, is_bound: bool = False) -> None:
        """Count a partition as read up to an offset, because a gate opens by time; None takes that back.

        `is_bound`: it counts no further, and the coordinator tells when it does.
        """
        topic = self._state.topics.get(tp.topic)
        if topic is None:
            return
        before = topic.lifted.pop(tp.partition, None)
        if offset is not None:
            topic.lifted[tp.partition] = max(offset, before or 0)
        (topic.bound.add if offset is not None and is_bound else topic.bound.discard)(tp.partition)
        if topic.lifted.get(tp.partition) != before:
            topic.limits = None

    def needs(self) -> dict[TopicPartition, int]:
        """Return what the closed gates of this member wait on: the offset up to which the group must read next."""
        found: dict[TopicPartition, int] = {}
        for topic in self._state.topics.values():
            if topic.granted and gating.is_layered(topic):
                gating.limits(topic)
                for number in topic.needs:
                    if (offset := gating.need(topic, number)) is not None:
                        found[TopicPartition(topic.name, number)] = offset
        return found

    @property
    def is_layered(self) -> bool:
        """Whether gates may concern this member: a granted topic is ordered, and has more than one layout."""
        return any(topic.granted and gating.is_layered(topic) for topic in self._state.topics.values())

    def standing(self, tp: TopicPartition) -> gating.Standing | None:
        """Return how far this member is in a granted partition of an ordered topic; None for any other."""
        partition = self._state.find(tp)
        if partition is None or not partition.topic.granted:
            return None
        view = partition.topic.view
        if view is None or not view.ordered or not view.elastic:
            return None
        ends = gating.ends_of(view.lineage, tp.partition)
        return gating.Standing(
            partition.processed,
            gating.progress(partition),
            partition.flushed,
            partition.high_watermark,
            ends,
            is_shared=bool(partition.share),
        )

    def unflushed(self, tp: TopicPartition) -> int | None:
        """Return the position of a partition if the application has not flushed its state up to there, else None."""
        partition = self._state.find(tp)
        if partition is None or partition.processed is None or partition.processed <= partition.flushed:
            return None
        return partition.processed

    def flushed(self, tp: TopicPartition, position: int) -> None:
        """Note that the application has flushed its state of the records before `position`, unless it has gone back."""
        partition = self._state.find(tp)
        if partition is not None and partition.processed is not None:
            partition.flushed = min(position, partition.processed)

    def finished(self, tp: TopicPartition, offset: int) -> None:
        """Note that the application has processed all records before `offset`, and not the one there."""
        delivering.finished(self._state, tp, offset)

    def announce(self, *, enabled: bool) -> None:
        """Choose whether `openings` must be reported before the first record of a segment with a gate is delivered."""
        self._state.announcing = enabled

    def openings(self) -> tuple[TopicPartition, ...]:
        """Return the partitions whose next record begins a segment with an open gate, and was not announced."""
        return gating.openings(self._state)

    def announced(self, tp: TopicPartition) -> None:
        """Note that the application was told of the segment at the position."""
        partition = self._state.find(tp)
        if partition is not None and partition.position is not None:
            partition.announced = partition.position

    def milestone(self) -> bool:
        """Whether a position passed the end of a layout since the last call: other members may wait for its commit."""
        milestone, self._state.milestone = self._state.milestone, False
        return milestone

    def view(self, topic: str) -> TopicView | None:
        """Return the last view of an assigned topic."""
        found = self._state.topics.get(topic)
        return None if found is None else found.view

    def open_at(self, tp: TopicPartition) -> int | None:
        """Return the position of a partition if no gate is closed there; None without one."""
        partition = self._state.find(tp)
        if partition is None or partition.position is None or partition.topic.view is None:
            return None
        limit = gating.limits(partition.topic).get(partition.number)
        return partition.position if limit is None or limit > partition.position else None

    def share_of(self, tp: TopicPartition) -> tuple[Interval, ...]:
        """Return the places of the key space that are read of a partition; empty for all."""
        partition = self._state.find(tp)
        return () if partition is None else partition.share

    def floor_of(self, tp: TopicPartition) -> list[Piece]:
        """Return the offsets at which keys of a partition are read on, where some were read further than others."""
        partition = self._state.find(tp)
        if partition is None or partition.floor is None:
            return []
        return pieces(partition.floor, places(partition.share))

    def positions(self) -> dict[TopicPartition, int]:
        """Return the next offset of every partition with a position."""
        return {part.name: part.position for part in self._state.partitions() if part.position is not None}

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Set the position to `offset`."""
        partition = self._state.partition(tp)
        partition.forget()
        partition.floor = partition.done = partition.gone = None
        partition.is_sought = True
        if partition.committed is None:
            partition.reset_at = offset
        partition.stand(offset)

    def seek_to_timestamp(self, tp: TopicPartition, timestamp: int) -> None:
        """Set the position to the first record at or after a timestamp in ms, or to `EARLIEST` or `LATEST`."""
        partition = self._state.partition(tp)
        partition.is_sought = True
        self._look_up(partition, timestamp)

    def _look_up(self, partition: Partition, timestamp: int) -> None:
        partition.forget()
        partition.floor = partition.done = partition.gone = None
        partition.position = None
        partition.wanted_timestamp = timestamp

    def is_sought_past_gate(self, tp: TopicPartition) -> bool:
        """Whether the application has sought a place behind a closed gate; to commit it would say that it was open."""
        partition = self._state.find(tp)
        return partition is not None and gating.is_sought_past_gate(partition)

    def pause(self, tp: TopicPartition) -> None:
        """Return no records of this partition; its position stays, and still counts for the gates of others."""
        self._state.partition(tp).paused = True

    def resume(self, tp: TopicPartition) -> None:
        """Resume a paused partition. One that is not read because of an error is tried again."""
        partition = self._state.partition(tp)
        partition.paused = partition.refused = partition.is_nowhere = False

    @property
    def assignment(self) -> tuple[TopicPartition, ...]:
        """The assigned partitions."""
        return tuple(partition.name for partition in self._state.partitions())

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of the assigned partitions."""
        return tuple(self._state.topics)

    @property
    def all_known(self) -> bool:
        """Whether every topic has a view."""
        return all(topic.view is not None for topic in self._state.topics.values())

    @property
    def paused(self) -> tuple[TopicPartition, ...]:
        """The partitions that the application has paused."""
        return tuple(partition.name for partition in self._state.partitions() if partition.paused)

    def position(self, tp: TopicPartition) -> int | None:
        """Return the next offset, or None while its lookup is pending."""
        return self._state.partition(tp).position

    def high_watermark(self, tp: TopicPartition) -> int:
        """Return the high watermark of the last fetch response, or -1."""
        return self._state.partition(tp).high_watermark

    # -- reports of the driver ----------------------------------------------------------------------------------------

    def topic_known(self, view: TopicView, now_ms: int) -> None:
        """Apply a topic's new metadata: add new partitions, drop removed ones, and evaluate the gates again."""
        topic = self._state.topics.get(view.name)
        if topic is not None:
            assigning.learn(self._state, topic, view, now_ms)

    def topic_unknown(self, name: str, error: ApiError, now_ms: int) -> None:
        """Handle a failed metadata request."""
        topic = self._state.topics.get(name)
        if topic is not None:
            assigning.learn_unknown(self._state, topic, error, now_ms)

    def answered(
        self,
        request_id: int,
        error: ErrorCode,
        session_id: int,
        results: Mapping[TopicPartition, FetchResult],
        now_ms: int,
    ) -> None:
        """Handle a broker's response to a fetch."""
        state = self._state
        closed = requesting.session_answered(state, request_id, error, session_id, now_ms)
        if closed is None:
            return
        session, asked = closed
        for tp, result in results.items():
            partition, origin = state.find(tp), asked.get(tp)
            if partition is None or origin is None or partition.topic_id not in (None, origin.topic_id):
                continue
            if origin.asked is not partition.asked:
                session.ask_anew(tp)
            elif partition.position is not None and origin.offset == partition.fetch_offset:
                receiving.take(state, partition, origin, result, now_ms)
                if result.error is not ErrorCode.NONE:
                    session.ask_anew(tp)

    def lost(self, request_id: int, now_ms: int) -> None:
        """Handle the loss of a fetch or lookup: no response will arrive."""
        requesting.lost(self._state, request_id, now_ms)

    def found(self, request_id: int, results: Mapping[TopicPartition, tuple[ErrorCode, int]], now_ms: int) -> None:
        """Handle the result of a lookup; -1 means that no record is that late: begin at the log end."""
        receiving.take_found(self._state, request_id, results, now_ms)

    def is_next(self, part: Deliverable) -> bool:
        """Whether `part` begins at the position of its partition."""
        return delivering.is_next(self._state, part)

    def all_handed_out(self, parts: Sequence[Deliverable]) -> bool:
        """Move the positions past `parts`. Return False, and move none, after a seek meanwhile."""
        return delivering.all_handed_out(self._state, parts)

    def handed_out(self, part: Deliverable, offset: int, records_end: int | None = None) -> None:
        """Move the position from the start of `part` to `offset`.

        `records_end`: the offset after the last record of them, -1 without any; by default `offset`.
        """
        delivering.handed_out(self._state, part, offset, records_end)

    def refresh(self, topic: str) -> None:
        """Have a topic's metadata asked for again: it names a partition that is not there."""
        known = self._state.topics.get(topic)
        if known is not None:
            known.stale = True

    def refresh_all(self) -> None:
        """Refresh the metadata of every topic, stale or not, to find new partitions."""
        for topic in self._state.topics.values():
            topic.stale = True

    # -- work and records ---------------------------------------------------------------------------------------------

    def errors(self) -> list[ApiError]:
        """Return the errors to raise in the application, each once."""
        errors, self._state.errors = self._state.errors, {}
        return list(errors.values())

    def drain(self, now_ms: int) -> ConsumerWork:
        """Return all work due at `now_ms`, each item once."""
        return requesting.request(self._state, now_ms)

    def deliverable(self) -> list[Deliverable]:
        """Return the deliverable records at these positions; the gates are evaluated once for all of them.

        A partition's parts are in order; the first partition differs from call to call.
        """
        return delivering.deliverable(self._state)
