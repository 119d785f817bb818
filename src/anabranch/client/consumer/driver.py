"""The fetcher's driver: performs fetches, offset lookups and metadata refreshes on sockets.

A driver belongs to the event loop of its first use. With a `group.id`, the driver owns the consumer's group, which
grants partitions to the fetcher. The group's events are carried out only inside `gather`, that is, while the
application polls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from uuid import UUID

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.client.cluster.metadata import Cluster, offsets_request
from anabranch.client.consumer.asked import wanted_fields
from anabranch.client.consumer.group import Group
from anabranch.client.consumer.handout import Handout
from anabranch.client.consumer.listeners import Shares
from anabranch.client.consumer.record import Record
from anabranch.client.consumer.state import KeptState
from anabranch.client.consumer.unfinished import Unfinished
from anabranch.client.settings import ConsumerSettings, taken
from anabranch.machines.clients.fetching import Deliverable, Fetch, Fetcher, FetcherSettings, FetchResult, Lookup
from anabranch.machines.clients.fetching.assigning import NO_RANGES
from anabranch.machines.clients.key_ranges import KeyRanges, places
from anabranch.machines.clients.processing import Ranges
from anabranch.machines.key_ranges import without
from anabranch.protocol.messages.fetch import (
    FetchPartition,
    FetchRequest,
    FetchTopic,
    ForgottenTopic,
)
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock

PURPOSE = "fetch"
T = TypeVar("T")

TOPIC_ID_VERSION = 13
"""From this version on, Fetch identifies topics by id."""


class FetchingDriver:
    """The fetcher of one consumer with its connections, and the group, if any."""

    def __init__(self, settings: ConsumerSettings, cluster: Cluster, clock: Clock | None = None) -> None:
        clock = clock or Clock()
        self._settings = settings
        self.now_ms = clock.monotonic_ms
        """The clock of the fetcher, in ms."""
        self.fetcher = Fetcher(taken(FetcherSettings, settings))
        self.handout = Handout(self.fetcher, check_crcs=settings.check_crcs)
        self.unfinished: Unfinished | None = None
        """The records that the application has not finished, where it says of each when it is done."""
        self.state: KeptState | None = None
        """State that is kept beside the consumer, and committed with its offsets."""
        if settings.acknowledgement_mode == "explicit":
            self.track()
        self.group: Group | None = None
        if settings.group_id is not None:
            self.group = Group(settings, cluster, self.fetcher, self, clock=clock, chance=Chance())
        self.is_cooperative = False
        """Whether the records come in slices, whatever is assigned (`cooperative`)."""
        self.closed = False
        self.cluster = cluster
        self._names: dict[UUID, str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._aging: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def started(self) -> bool:
        """Whether the driver has been used."""
        return self._loop is not None

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the decoded records of revoked or lost partitions."""
        self.handout.dropped(partitions)
        if self.unfinished is not None:
            self.unfinished.forget(partitions)
        if self.state is not None:
            self.state.released(partitions)

    def assigned_anew(self, before: Shares) -> None:
        """Drop what was assigned by hand before and is not now, with changes of its state: they are not committed.

        A partition of a group's consumer that gets further keys begins anew if it has state of them: they may be behind
        the others.
        """
        now = {tp: self.fetcher.granted_share(tp) for tp in self.fetcher.assignment}
        grown = [tp for tp, share in before.items() if tp in now and without(places(now[tp]), places(share))]
        state = None if self.group is None else self.state
        anew = [tp for tp in grown if state is not None and state.is_of(tp.topic) and self.fetcher.begin_anew(tp)]
        whole = (*(tp for tp in before if tp not in now), *anew)
        left = {tp: without(places(share), places(now[tp])) for tp, share in before.items() if tp not in whole}
        partly = {tp: keys for tp, keys in left.items() if keys}
        self.dropped(whole)
        if self.group is not None:
            self.group.given_up((*whole, *partly), whole)
        for tp, keys in partly.items():
            self.narrowed(tp, keys)

    def deliverable(self) -> list[Deliverable]:
        """Return the records that can be handed out: their gates are open, and the state of their keys is there."""
        parts = self.fetcher.deliverable()
        return parts if self.state is None else self.state.admit(parts)

    async def attend(self) -> None:
        """Carry out the group's events and commits, or, without a group, those of kept state."""
        if self.group is not None:
            await self.group.attend()
        elif self.state is not None:
            await self.state.attend()

    def undo(self, record: Record) -> None:
        """Undo what was done to the state of a record's key: the record is not finished."""
        if self.state is not None:
            self.state.undo(record)

    def consumed(self) -> dict[TopicPartition, int]:
        """Return the offset before which all records are processed, for every partition with a position.

        Processed is what was returned to the application, or, where it says so of each record, what is done.
        """
        return self.handout.consumed() if self.unfinished is None else self.unfinished.consumed()

    # -- work that is finished out of order ---------------------------------------------------------------------------

    def track(self) -> Unfinished:
        """Track the records of this consumer from now on, one by one."""
        if self.unfinished is None:
            self.unfinished = Unfinished(self._settings, self.fetcher, self.handout, self.now_ms, self.deliverable)
        return self.unfinished

    def narrowed(self, tp: TopicPartition, keys: KeyRanges) -> None:
        """Drop the records of ranges of a partition that went to others, after `settle`; go on with the others.

        Their state last: a change is made for a record that counts, and those of these ranges count no more then.
        """
        if self.unfinished is not None:
            self.unfinished.narrowed(tp)
        if self.state is not None:
            self.state.narrowed(tp, keys)

    def stands(self, tp: TopicPartition) -> None:
        """Go on at another position of a partition: ranges of keys were added."""
        if self.unfinished is not None:
            self.unfinished.stands(tp)

    async def settle(
        self, partitions: Sequence[TopicPartition], shares: Mapping[TopicPartition, KeyRanges] = NO_RANGES
    ) -> None:
        """Have the running work on partitions, or on these ranges of their keys, finished before they are revoked."""
        if self.unfinished is None:
            return
        for tp, keys in shares.items():
            await self.unfinished.part(tp, keys)
        if self.unfinished.owner is not None:
            await self.unfinished.owner.settle(partitions, shares)

    @property
    def fresh(self) -> int:
        """The number of ranges above the stable offsets that were done since the last commit."""
        return 0 if self.unfinished is None else self.unfinished.tracker.fresh

    def take_fresh(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, Ranges]:
        """Return these ranges, to be committed, or given back."""
        return {} if self.unfinished is None else self.unfinished.tracker.take_fresh(partitions)

    def give_back(self, ranges: Mapping[TopicPartition, Ranges]) -> None:
        """Take back ranges that could not be committed."""
        if self.unfinished is not None:
            self.unfinished.tracker.give_back(ranges)

    def skip(self, tp: TopicPartition, ranges: Ranges) -> None:
        """Hand out no records in these ranges of offsets: they are done."""
        self.handout.skip(tp, ranges)

    def forget_skips(self, tp: TopicPartition, stable: int) -> None:
        """Forget the ranges below the group's stable offset, as far as this consumer has processed all before them."""
        if self.unfinished is not None and tp in self.fetcher.assignment:
            position = self.fetcher.position(tp)
            stable = stable if position is None else min(stable, self.unfinished.tracker.stable(tp, position))
        self.handout.forget_skips(tp, stable)

    async def poll(self, timeout_s: float | None, records_max: int) -> list[Record]:
        """Return records that may be worked on at the same time, as soon as there are some."""
        unfinished = self.track()

        async def find() -> list[Record]:
            unfinished.note_progress()
            tracker = unfinished.tracker
            await unfinished.fill(max(0, records_max - tracker.ready))
            return unfinished.hand_out(records_max)

        return await self._polled(self._within(timeout_s, find, lambda: unfinished.tracker.wake_ms))

    def moved_by_hand(self, tp: TopicPartition) -> None:
        """Forget what was handed out of a partition, or is to be: the application sets its position."""
        self.handout.dropped([tp])
        if self.unfinished is not None:
            self.unfinished.forget([tp])

    def end_of_run(self) -> None:
        """Return to the acknowledgements of the settings after a handler has run."""
        if self._settings.acknowledgement_mode != "explicit" and not self.is_cooperative:
            self.unfinished = None

    def begin_turn(self) -> None:
        """Begin to look at what has changed: changes from now on end the next wait."""
        self.start()
        assert self._changed is not None
        self._changed.clear()

    async def wait_for_turn(self, due_ms: int | None) -> None:
        """Wait for a change since `begin_turn`, at most until a time in ms, or until commits or polls are due."""
        self.pump()
        self.raise_errors()
        assert self._changed is not None
        until_ms = self.now_ms() + self._settings.max_poll_interval_ms // 4
        for at_ms in (due_ms, None if self.group is None else self.group.next_attendance_ms()):
            if at_ms is not None:
                until_ms = min(until_ms, at_ms)
        try:
            async with asyncio.timeout(max(0.001, (until_ms - self.now_ms()) / 1000)):
                await self._changed.wait()
        except TimeoutError:
            return

    def nudge(self) -> None:
        """End the wait for a change."""
        if self._changed is not None:
            self._changed.set()

    # -- for the consumer ---------------------------------------------------------------------------------------------

    async def gather(self, timeout_s: float | None) -> list[Deliverable]:
        self.start()
        self.handout.go_back()

        async def find() -> list[Deliverable]:
            return self.deliverable()

        return await self._polled(self._within(timeout_s, find))

    async def _polled(self, found: Coroutine[Any, Any, list[T]]) -> list[T]:
        group = self.group
        if group is None:
            return await found
        try:
            group.refuse_in_callback()
        except ApiError:
            found.close()
            raise
        group.start()
        group.poll_began()
        try:
            return await found
        finally:
            group.poll_ended()

    async def _within(
        self,
        timeout_s: float | None,
        find: Callable[[], Awaitable[list[T]]],
        wake_ms: Callable[[], int | None] = lambda: None,
    ) -> list[T]:
        """Carry out the group's events and the fetcher's work until `find` finds something, or the time is over."""
        loop = self.start()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        if not self.fetcher.topics and (self.group is None or self.group.subscription is None):
            raise ApiError(ErrorCode.INVALID_REQUEST, "nothing is assigned to this consumer; assign a topic first")
        while True:
            await self.attend()
            self.pump()
            self.raise_errors()
            found = await find()
            if found:
                return found
            self.pump()
            if deadline is not None and loop.time() >= deadline:
                return []
            until = deadline
            for due_ms in (wake_ms(), None if self.group is None else self.group.next_attendance_ms()):
                if due_ms is not None:
                    due = loop.time() + max(0.01, (due_ms - self.now_ms()) / 1000)
                    until = due if until is None else min(until, due)
            await self.wait(until)

    async def close(self) -> None:
        """Cancel all tasks; calls that wait raise."""
        self.closed = True
        if self._changed is not None:
            self._changed.set()
        for timer in (self._timer, self._aging):
            if timer is not None:
                timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self) -> asyncio.AbstractEventLoop:
        if self.closed:
            raise ApiError(ErrorCode.INVALID_REQUEST, "this consumer is closed; make a new one")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._changed = asyncio.Event()
            self._age()
        return self._loop

    def _age(self) -> None:
        assert self._loop is not None
        self._aging = self._loop.call_later(self._settings.metadata_max_age_ms / 1000, self._refresh_all)

    def _refresh_all(self) -> None:
        self.fetcher.refresh_all()
        self._age()
        self.pump()

    async def know(self, partitions: Sequence[TopicPartition]) -> None:
        """Wait until the metadata of all assigned topics has arrived."""
        while not (partitions and all(tp in self.fetcher.assignment for tp in partitions)):
            self.pump()
            self.raise_errors()
            if self.fetcher.all_known:
                return
            await self.wait(None)

    async def position(self, tp: TopicPartition) -> int:
        """Wait until an assigned partition has a position, and return that of the next record to be returned."""
        await self.know([tp])
        while (position := self.handout.consumed_of(tp)) is None:
            if self.group is not None:
                self.group.raise_error()
            await self.wait(None)
        return position

    async def wait(self, until_s: float | None) -> None:
        """Wait for the next change, at most until a time of the event loop."""
        self.start()
        assert self._changed is not None
        self.pump()
        self.raise_errors()
        self._changed.clear()
        try:
            async with asyncio.timeout_at(until_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def raise_errors(self) -> None:
        errors = self.fetcher.errors()
        if errors:
            for other in errors[1:]:
                errors[0].add_note(str(other))
            raise errors[0]

    def happened(self) -> None:
        """Handle a change: carry out the fetcher's work, and wake the waiting call."""
        self.pump()
        if self._changed is not None:
            self._changed.set()

    def pump(self) -> None:
        """Carry out the fetcher's work, in the order defined by `ConsumerWork`."""
        if self.closed:
            return
        loop = self.start()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.group is not None:
            self.group.look_for_positions()
        work = self.fetcher.drain(self.now_ms())
        for fetch in work.fetches:
            self.run(self._fetch(fetch))
        for lookup in work.lookups:
            self.run(self._lookup(lookup))
        for topic in work.refresh:
            self.run(self._refresh(topic))
        if work.wake_at_ms is not None:
            self._timer = loop.call_later(max(0, work.wake_at_ms - self.now_ms()) / 1000, self.happened)

    def run(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.start().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _fetch(self, fetch: Fetch) -> None:
        try:
            connection = await self.cluster.connection(fetch.node, PURPOSE)
            version = connection.version_of(FetchRequest)
            nameless = any(origin.topic_id == NO_TOPIC_ID for origin in fetch.partitions.values())
            if version >= TOPIC_ID_VERSION and nameless:
                version = TOPIC_ID_VERSION - 1
            request = self._fetch_request(fetch, version)
            timeout_ms = self._settings.request_timeout_ms + self._settings.fetch_max_wait_ms
            response = await connection.send(request, timeout_ms=timeout_ms, version=version)
        except (AnabranchError, OSError):
            self.fetcher.lost(fetch.request_id, self.now_ms())
        else:
            answers = {
                TopicPartition(name, data.partition_index): FetchResult(
                    ErrorCode.of(data.error_code),
                    data.records,
                    data.high_watermark,
                    data.last_stable_offset,
                    data.log_start_offset,
                    [(entry.producer_id, entry.first_offset) for entry in data.aborted_transactions or ()],
                    data.folded,
                    data.filtered_to,
                )
                for topic in response.responses
                if (name := topic.topic or self._names.get(topic.topic_id))
                for data in topic.partitions
            }
            error = ErrorCode.of(response.error_code)
            self.fetcher.answered(fetch.request_id, error, response.session_id, answers, self.now_ms())
        self.happened()

    def _fetch_request(self, fetch: Fetch, version: int) -> FetchRequest:
        by_id = version >= TOPIC_ID_VERSION
        topics: dict[tuple[str, UUID], list[FetchPartition]] = {}
        counts: dict[str, int] = {}
        for tp, origin in fetch.partitions.items():
            counts[tp.topic] = origin.count
            topics.setdefault((tp.topic, origin.topic_id), []).append(
                FetchPartition(
                    partition=tp.partition,
                    current_leader_epoch=origin.leader_epoch,
                    fetch_offset=origin.offset,
                    partition_max_bytes=origin.size_max,
                    **({} if origin.asked is None else wanted_fields(origin.asked)),
                )
            )
        forgotten: dict[tuple[str, UUID], list[int]] = {}
        for tp, topic_id in fetch.forgotten:
            if by_id or tp not in fetch.partitions:  # By name, the session has a topic that was created again once.
                forgotten.setdefault((tp.topic, topic_id), []).append(tp.partition)
        return FetchRequest(
            replica_id=-1,
            max_wait_ms=self._settings.fetch_max_wait_ms,
            min_bytes=self._settings.fetch_min_bytes,
            max_bytes=self._settings.fetch_max_bytes,
            isolation_level=int(self._settings.read_committed),
            session_id=fetch.session_id,
            session_epoch=fetch.session_epoch,
            topics=[
                FetchTopic(
                    topic_id=topic_id if by_id else NO_TOPIC_ID,
                    topic="" if by_id else name,
                    partitions=partitions,
                    undeleted_partition_count=counts[name],
                )
                for (name, topic_id), partitions in topics.items()
            ],
            forgotten_topics_data=[
                ForgottenTopic(
                    topic_id=topic_id if by_id else NO_TOPIC_ID, topic="" if by_id else name, partitions=partitions
                )
                for (name, topic_id), partitions in forgotten.items()
            ],
        )

    async def _lookup(self, lookup: Lookup) -> None:
        request = offsets_request(lookup.partitions, read_committed=self._settings.read_committed)
        try:
            response = await self.cluster.ask(request, node_id=lookup.node)
        except (AnabranchError, OSError):
            self.fetcher.lost(lookup.request_id, self.now_ms())
        else:
            answers = {
                TopicPartition(topic.name, partition.partition_index): (
                    ErrorCode.of(partition.error_code),
                    partition.offset,
                )
                for topic in response.topics
                for partition in topic.partitions
            }
            self.fetcher.found(lookup.request_id, answers, self.now_ms())
        self.happened()

    async def _refresh(self, name: str) -> None:
        try:
            view = await self.cluster.view(name)
        except ApiError as error:
            self.fetcher.topic_unknown(name, error, self.now_ms())
        except OSError as error:
            self.fetcher.topic_unknown(name, ApiError(ErrorCode.NETWORK_EXCEPTION, str(error)), self.now_ms())
        except AnabranchError as error:  # A response that cannot be read: waiting helps nobody.
            text = f"the metadata of topic {name} cannot be read: {error}"
            self.fetcher.topic_unknown(name, ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, text), self.now_ms())
        else:
            if self._settings.ordering == "none":
                view = replace(view, ordered=False)
            if self._names.get(view.topic_id) != name:
                self._names = {topic_id: other for topic_id, other in self._names.items() if other != name}
                self._names[view.topic_id] = name
            self.handout.lineages[name] = view.lineage
            before = self.fetcher.view(name)
            ids = set() if before is None else {before.topic_id, view.topic_id}
            if len(ids) == 2 and NO_TOPIC_ID not in ids:
                # What was handed out of the topic before says nothing of the one that has its name now.
                partitions = tuple(tp for tp in self.fetcher.assignment if tp.topic == name)
                self.dropped(partitions)
                if self.group is not None:
                    self.group.topic_made_again(partitions)
            self.fetcher.topic_known(view, self.now_ms())
            if self.group is not None and before is not None and before.lineage.current != view.lineage.current:
                self.group.layout_changed()
        self.happened()
