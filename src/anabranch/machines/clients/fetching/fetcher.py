"""The fetcher: report what happens, `drain` it, carry out the work, and hand out what is `deliverable`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import assigning, delivering, receiving, requesting
from anabranch.machines.clients.fetching.state import FetchingState
from anabranch.machines.clients.fetching.values import (
    LATEST,
    ConsumerWork,
    Deliverable,
    FetcherSettings,
    FetchResult,
    TopicView,
)


class Fetcher:
    """Decides what a consumer fetches and hands out; see the package for the theory."""

    def __init__(self, settings: FetcherSettings) -> None:
        self._state = FetchingState(settings)

    # -- what the application wants -----------------------------------------------------------------------------------

    def assign(
        self, partitions: Iterable[TopicPartition], whole_topics: Iterable[str] = (), *, awaiting: bool = False
    ) -> None:
        """Read exactly these; a partition that was read before keeps its position.

        With `awaiting`, the others begin when `begin` has been called for them, as granted partitions do.
        """
        assigning.assign(self._state, partitions, whole_topics, awaiting=awaiting)

    def grant(self, partitions: Iterable[tuple[TopicPartition, UUID | None]]) -> None:
        """Read these too, as a member of a group, each as soon as `begin` has been called for it."""
        assigning.grant(self._state, partitions)

    def withdraw(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these, and drop what was fetched of them."""
        assigning.withdraw(self._state, partitions)

    def awaiting(self) -> tuple[TopicPartition, ...]:
        """The partitions that wait for `begin`."""
        return tuple(partition.name for partition in self._state.partitions() if partition.awaiting)

    def begin(self, tp: TopicPartition, *, offset: int | None = None, timestamp: int = LATEST) -> None:
        """Start reading a partition that waits for it, unless the application has called `seek` meanwhile."""
        partition = self._state.find(tp)
        if partition is None or not partition.awaiting:
            return
        if offset is None:
            self.seek_to_timestamp(tp, timestamp)
        else:
            self.seek(tp, offset)

    def committed_elsewhere(self, topic: str, positions: Mapping[int, int]) -> None:
        """Learn the group's positions in partitions of a granted topic that other members read."""
        found = self._state.topics.get(topic)
        if found is not None:
            found.elsewhere.update(positions)
            found.limits = None

    def waits(self) -> tuple[TopicPartition, ...]:
        """The partitions of other members that gates of granted ones wait on."""
        return delivering.waits(self._state)

    def milestone(self) -> bool:
        """Whether a position passed the end of a layout since the last call: others may wait for its commit."""
        milestone, self._state.milestone = self._state.milestone, False
        return milestone

    def view(self, topic: str) -> TopicView | None:
        """The last view of a topic that is read."""
        found = self._state.topics.get(topic)
        return None if found is None else found.view

    def positions(self) -> dict[TopicPartition, int]:
        """The next offset to hand out of every partition that has one."""
        return {part.name: part.position for part in self._state.partitions() if part.position is not None}

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Go on at `offset`."""
        partition = self._state.partition(tp)
        partition.forget()
        partition.position = partition.fetch_offset = offset

    def seek_to_timestamp(self, tp: TopicPartition, timestamp: int) -> None:
        """Go on at the first record at or after a timestamp in ms, or at `EARLIEST` or `LATEST`."""
        partition = self._state.partition(tp)
        partition.forget()
        partition.position = None
        partition.wanted_timestamp = timestamp

    def pause(self, tp: TopicPartition) -> None:
        """Hand out no records of this partition; its position stays, and still counts for the gates of others."""
        self._state.partition(tp).paused = True

    def resume(self, tp: TopicPartition) -> None:
        """Undo `pause`."""
        self._state.partition(tp).paused = False

    @property
    def assignment(self) -> tuple[TopicPartition, ...]:
        """The partitions that are read now."""
        return tuple(partition.name for partition in self._state.partitions())

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are read."""
        return tuple(self._state.topics)

    @property
    def all_known(self) -> bool:
        """Whether there is a view of every topic."""
        return all(topic.view is not None for topic in self._state.topics.values())

    @property
    def paused(self) -> tuple[TopicPartition, ...]:
        """The partitions that are paused."""
        return tuple(partition.name for partition in self._state.partitions() if partition.paused)

    def position(self, tp: TopicPartition) -> int | None:
        """The next offset to hand out, or None while it is being looked up."""
        return self._state.partition(tp).position

    def high_watermark(self, tp: TopicPartition) -> int:
        """The high watermark in the last fetch response, or -1."""
        return self._state.partition(tp).high_watermark

    # -- what happens -------------------------------------------------------------------------------------------------

    def topic_known(self, view: TopicView, now_ms: int) -> None:
        """Learn a topic anew: partitions that appeared join, removed ones leave, gates are evaluated again."""
        topic = self._state.topics.get(view.name)
        if topic is not None:
            assigning.learn(self._state, topic, view, now_ms)

    def topic_unknown(self, name: str, error: ApiError, now_ms: int) -> None:
        """Learn that metadata of a topic could not be had."""
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
        """Learn a broker's response to a fetch."""
        state = self._state
        closed = requesting.session_answered(state, request_id, error, session_id, now_ms)
        if closed is None:
            return
        session, asked = closed
        for tp, result in results.items():
            partition, origin = state.find(tp), asked.get(tp)
            if partition is None or origin is None or partition.topic_id not in (None, origin.topic_id):
                continue
            if partition.position is not None and origin.offset == partition.fetch_offset:
                receiving.take(state, partition, origin, result, now_ms)
                if result.error is not ErrorCode.NONE:
                    session.known.pop(tp, None)

    def lost(self, request_id: int, now_ms: int) -> None:
        """Learn that a request, fetch or lookup, will not be answered."""
        requesting.lost(self._state, request_id, now_ms)

    def found(self, request_id: int, results: Mapping[TopicPartition, tuple[ErrorCode, int]], now_ms: int) -> None:
        """Learn the offsets that a lookup found; -1 means that no record is that young: begin at the log end."""
        receiving.take_found(self._state, request_id, results, now_ms)

    def is_next(self, part: Deliverable) -> bool:
        """Whether the first record of `part` is still the next one to hand out of its partition."""
        return delivering.is_next(self._state, part)

    def all_handed_out(self, parts: Sequence[Deliverable]) -> bool:
        """Report that all records of `parts` were handed out; False, and no position moves, after a seek meanwhile."""
        return delivering.all_handed_out(self._state, parts)

    def handed_out(self, part: Deliverable, offset: int) -> None:
        """Report that the records of `part`, at whose start its partition is, were handed out below `offset`."""
        delivering.handed_out(self._state, part, offset)

    def refresh_all(self) -> None:
        """Refresh the metadata of every topic, though none seems stale: partitions may have appeared."""
        for topic in self._state.topics.values():
            topic.stale = True

    # -- what to do ---------------------------------------------------------------------------------------------------

    def errors(self) -> list[ApiError]:
        """The errors to raise in the application; each is returned once."""
        errors, self._state.errors = self._state.errors, []
        return errors

    def drain(self, now_ms: int) -> ConsumerWork:
        """Return everything to do at `now_ms`; nothing is returned twice."""
        return requesting.request(self._state, now_ms)

    def deliverable(self) -> list[Deliverable]:
        """The records that may be handed out at these positions; the gates are evaluated once for all of them.

        A partition's parts are in order; the first partition changes from call to call.
        """
        return delivering.deliverable(self._state)
