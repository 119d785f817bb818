"""What an application reads: the fetcher that ships, over the records of the world, and the edge where records arrive.

Fetches, lookups and metadata take a while, get lost, and are refused with an old count or epoch as leaders refuse them.
A fetch without news waits at the leaders until one of its partitions has some, or its time is over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.settings import ConsumerSettings, taken
from anabranch.machines.clients.fetching import (
    EARLIEST,
    Deliverable,
    Fetch,
    Fetcher,
    FetcherSettings,
    FetchFrom,
    FetchResult,
    Lookup,
    TopicView,
)
from tests.simulation.groups_records import NOTHING_HELD, Log, Sent, Topic

if TYPE_CHECKING:
    from tests.simulation.groups_client import Client

FETCH_MAX_WAIT_MS = 500
FETCH_RECORDS_MAX = 20
SESSION = 1
NO_TOPIC = FetchResult(ErrorCode.UNKNOWN_TOPIC_ID)


@dataclass(slots=True, eq=False)
class LongPoll:
    """A fetch that waits at the leaders."""

    reader: Reader
    fetch: Fetch
    until_ms: int
    partitions: frozenset[TopicPartition]


class LongPolls:
    """The fetches that wait at the leaders."""

    def __init__(self) -> None:
        self._by_topic: dict[str, list[LongPoll]] = {}

    def park(self, poll: LongPoll) -> None:
        """Let a fetch wait for news of its partitions."""
        for name in sorted({tp.topic for tp in poll.partitions}):
            self._by_topic.setdefault(name, []).append(poll)

    def end(self, poll: LongPoll) -> bool:
        """End the wait of a fetch; return whether it waited."""
        found = False
        for polls in self._by_topic.values():
            if poll in polls:
                polls.remove(poll)
                found = True
        return found

    def news(self, topic: str, number: int | None = None) -> None:
        """Wake the fetches of a partition that was appended to; without `number`, of a topic that changed."""
        for poll in list(self._by_topic.get(topic, ())):
            if number is None or (topic, number) in poll.partitions:
                self.end(poll)
                poll.reader.woken(poll)


class Reader:
    """The fetcher of one consumer, and how its work is done."""

    def __init__(self, client: Client, settings: ConsumerSettings) -> None:
        self.fetcher = Fetcher(taken(FetcherSettings, settings))
        self._client = client
        self._world = client.world
        self.gone: set[TopicPartition] = set()
        """Partitions in which a position was deleted."""
        self._held: dict[tuple[UUID, int], dict[int, Sent]] = {}
        """The records of compacted topics by their offsets, as they were fetched last."""
        self.room = 0
        """How many records a poll returns at the most; 0: as chance wants it."""
        self._wakes_at_ms = 0
        self._session: dict[tuple[TopicPartition, UUID], FetchFrom] = {}
        """The partitions of the leader's fetch session, and of which topic of that name each is."""

    # -- the application -----------------------------------------------------------------------------------------------

    def hand_out(self, parts: list[Deliverable]) -> dict[TopicPartition, int]:
        """Hand out records of these parts; return the offset after the last one of each partition."""
        room = self.room or self._world.chance.choice((1, 5, 500))
        ends: dict[TopicPartition, int] = {}
        for part in parts:
            if room <= 0:
                break
            if not self.fetcher.is_next(part):
                continue
            end = min(part.end, part.start + room)
            room -= end - part.start
            self.fetcher.handed_out(part, end)
            self._client.handed(TopicPartition(part.topic, part.partition), part.start, end)
            tp = TopicPartition(part.topic, part.partition)
            done = self._client.done_to(tp, part.start, end)
            if done > part.start:
                ends[tp] = done
        return ends

    def held(self, topic: Topic, number: int) -> Mapping[int, Sent]:
        """The records of a partition of a compacted topic as they were fetched: some of them may be gone since."""
        return self._held.get((topic.topic_id, number), NOTHING_HELD)

    def _hold(self, topic: Topic, number: int, log: Log, start: int) -> None:
        held = self._held.setdefault((topic.topic_id, number), {})
        for offset in range(start, min(log.end, start + FETCH_RECORDS_MAX)):
            record = log.entries[offset][1]
            if record is None:
                held.pop(offset, None)
            else:
                held[offset] = record

    # -- its work ------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Begin the work that is due."""
        now_ms = self._world.now_ms
        work = self.fetcher.drain(now_ms)
        for fetch in work.fetches:
            self._after(self._fetched, fetch, now_ms + FETCH_MAX_WAIT_MS)
        for lookup in work.lookups:
            self._after(self._looked_up, lookup)
        for name in work.refresh:
            self._after(self._refreshed, name)
        if work.wake_at_ms is not None and (self._wakes_at_ms <= now_ms or work.wake_at_ms < self._wakes_at_ms):
            self._wakes_at_ms = work.wake_at_ms
            self._world.at(max(work.wake_at_ms, now_ms + 1), self._perform, self._woken)

    def _woken(self) -> None:
        self._wakes_at_ms = 0
        self._client.happened()

    def _after(self, answer: Callable[..., None], *given: Any, ms: int | None = None) -> None:
        self._world.after(self._world.delay_ms() if ms is None else ms, self._perform, answer, *given)

    def _perform(self, answer: Callable[..., None], *given: Any) -> None:
        client = self._client
        if not client.is_alive:
            return
        if client.is_standing_still:
            self._world.after(100, self._perform, answer, *given)
            return
        client.perform(answer, *given)

    def _is_lost(self) -> bool:
        return self._world.is_disturbed and self._world.chance.random() < 0.02 * self._world.theme.faults

    def _refreshed(self, name: str) -> None:
        topic = self._world.topics.get(name)
        if topic is None or self._is_lost():
            code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else ErrorCode.NETWORK_EXCEPTION
            self.fetcher.topic_unknown(name, ApiError(code, "metadata"), self._world.now_ms)
        else:
            ordered = topic.ordered and not self._client.is_stock
            self._known(topic.view(ordered=ordered))
        self._client.happened()

    def _known(self, view: TopicView) -> None:
        self.fetcher.topic_known(view, self._world.now_ms)

    def _log_of(self, tp: TopicPartition) -> tuple[Topic | None, Log | None]:
        topic = self._world.topics.get(tp.topic)
        return topic, None if topic is None else topic.logs.get(tp.partition)

    def _looked_up(self, lookup: Lookup) -> None:
        if self._is_lost():
            self.fetcher.lost(lookup.request_id, self._world.now_ms)
            self._client.happened()
            return
        answers = {}
        for tp, (timestamp, epoch) in lookup.partitions.items():
            self._client.asks_leader(tp, timestamp)
            topic, log = self._log_of(tp)
            if topic is None or log is None:
                answers[tp] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1
            elif epoch != log.epoch:
                answers[tp] = ErrorCode.FENCED_LEADER_EPOCH, -1
            elif timestamp == EARLIEST:
                answers[tp] = ErrorCode.NONE, log.start
            else:
                waits = self.fetcher._state.find(tp)
                # Otherwise it was revoked meanwhile, or is of the topic of this name that was there before.
                is_meant = waits is not None and waits.topic_id in (None, topic.topic_id)
                if waits is not None and is_meant and waits.looking_up == lookup.request_id:
                    self._client.begins_at_end(topic, tp.partition, log.end)
                answers[tp] = ErrorCode.NONE, log.end
        self.fetcher.found(lookup.request_id, answers, self._world.now_ms)
        self._client.happened()

    def _fetched(self, fetch: Fetch, until_ms: int) -> None:
        """A fetch arrives."""
        if fetch.session_id == 0:
            self._session = {}
        if not self._is_lost():
            self._session.update({(tp, wanted.topic_id): wanted for tp, wanted in fetch.partitions.items()})
            for at in fetch.forgotten:
                self._session.pop(at, None)
            self._answer(fetch, until_ms)
        else:
            self._lost(fetch)

    def _answer(self, fetch: Fetch, until_ms: int) -> None:
        """Answer a fetch, or let it wait."""
        now_ms = self._world.now_ms
        news = [at for at, wanted in self._session.items() if self._has_news(at[0], wanted)]
        if not news and now_ms < until_ms:
            poll = LongPoll(self, fetch, until_ms, frozenset([tp for tp, _ in self._session]))
            self._world.long_polls.park(poll)
            self._world.at(until_ms, self._waited, poll)
            return
        answers = {}
        for at, wanted in self._session.items():
            tp, topic_id = at
            view = self.fetcher.view(tp.topic)
            if view is not None and view.topic_id == topic_id and (tp in fetch.partitions or at in news):
                answers[tp] = self._fetched_of(tp, wanted)
        self.fetcher.answered(fetch.request_id, ErrorCode.NONE, SESSION, answers, now_ms)
        self._client.happened()

    def _lost(self, fetch: Fetch) -> None:
        self.fetcher.lost(fetch.request_id, self._world.now_ms)
        self._client.happened()

    def woken(self, poll: LongPoll) -> None:
        """Let the answer to a fetch that waits arrive after a while, or get lost."""
        if self._is_lost():
            self._after(self._lost, poll.fetch)
        else:
            self._after(self._answer, poll.fetch, poll.until_ms)

    def _waited(self, poll: LongPoll) -> None:
        if self._world.long_polls.end(poll):
            if self._is_lost():
                self._perform(self._lost, poll.fetch)
            else:
                self._perform(self._answer, poll.fetch, poll.until_ms)

    def _has_news(self, tp: TopicPartition, wanted: FetchFrom) -> bool:
        """Whether the answer for a partition is not empty: it has records, or an error."""
        topic = self._world.topics.get(tp.topic)
        if topic is None or (topic.topic_id is not wanted.topic_id and topic.topic_id != wanted.topic_id):
            return True
        log = topic.logs.get(tp.partition)
        return (
            log is None or log.end != wanted.offset or log.epoch != wanted.leader_epoch or topic.count != wanted.count
        )

    def _fetched_of(self, tp: TopicPartition, wanted: FetchFrom) -> FetchResult:
        topic, log = self._log_of(tp)
        if topic is None or topic.topic_id != wanted.topic_id:
            return NO_TOPIC
        if log is None:
            return FetchResult(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if wanted.count != topic.count:
            return FetchResult(ErrorCode.INVALID_PARTITION_METADATA)
        if wanted.leader_epoch != log.epoch:
            return FetchResult(ErrorCode.FENCED_LEADER_EPOCH)
        if not log.start <= wanted.offset <= log.end:
            self.gone.add(tp)
            return FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE, log_start_offset=log.start)
        data = log.fetch(wanted.offset, FETCH_RECORDS_MAX)
        if topic.is_compacted:
            self._hold(topic, tp.partition, log, wanted.offset)
        return FetchResult(ErrorCode.NONE, data, log.end, log.end, log.start)
