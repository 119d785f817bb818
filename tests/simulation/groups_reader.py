"""What an application reads: the fetcher that ships, over the records of the world, and the edge where records arrive.

Fetches, lookups and metadata take a while, get lost, and are refused with an old count or epoch as leaders refuse them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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
)
from tests.simulation.groups_records import Log, Topic

if TYPE_CHECKING:
    from tests.simulation.groups_client import Client

FETCH_MAX_WAIT_MS = 500
FETCH_RECORDS_MAX = 20
SESSION = 1


class Reader:
    """The fetcher of one consumer, and how its work is done."""

    def __init__(self, client: Client, settings: ConsumerSettings) -> None:
        self.fetcher = Fetcher(taken(FetcherSettings, settings))
        self._client = client
        self._world = client.world
        self.gone: set[TopicPartition] = set()
        """Partitions in which a position was deleted."""
        self._wakes_at_ms = 0
        self._session_fetches: dict[TopicPartition, FetchFrom] = {}

    # -- the application -----------------------------------------------------------------------------------------------

    def hand_out(self, parts: list[Deliverable]) -> dict[TopicPartition, int]:
        """Hand out records of these parts; return the offset after the last one of each partition."""
        room = self._world.chance.choice((1, 5, 500))
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
            ends[TopicPartition(part.topic, part.partition)] = end
        return ends

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
            self.fetcher.topic_known(topic.view(), self._world.now_ms)
        self._client.happened()

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
            topic, log = self._log_of(tp)
            if topic is None or log is None:
                answers[tp] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1
            elif epoch != log.epoch:
                answers[tp] = ErrorCode.FENCED_LEADER_EPOCH, -1
            elif timestamp == EARLIEST:
                answers[tp] = ErrorCode.NONE, log.start
            else:
                self._client.begins_at_end(topic, tp.partition, log.end)
                answers[tp] = ErrorCode.NONE, log.end
        self.fetcher.found(lookup.request_id, answers, self._world.now_ms)
        self._client.happened()

    def _fetched(self, fetch: Fetch, until_ms: int) -> None:
        now_ms = self._world.now_ms
        if fetch.session_id == 0:
            self._session_fetches = {}
        if self._is_lost():
            self.fetcher.lost(fetch.request_id, now_ms)
            self._client.happened()
            return
        self._session_fetches.update(fetch.partitions)
        for tp in fetch.forgotten:
            self._session_fetches.pop(tp, None)
        answers = {}
        for tp, wanted in self._session_fetches.items():
            answer = self._fetched_of(tp, wanted)
            if answer.error is not ErrorCode.NONE or answer.data or tp in fetch.partitions:
                answers[tp] = answer
        if now_ms < until_ms and not any(answer.error or answer.data for answer in answers.values()):
            self._after(self._fetched, fetch, until_ms, ms=max(1, min(200, until_ms - now_ms)))
            return
        self.fetcher.answered(fetch.request_id, ErrorCode.NONE, SESSION, answers, now_ms)
        self._client.happened()

    def _fetched_of(self, tp: TopicPartition, wanted: FetchFrom) -> FetchResult:
        topic, log = self._log_of(tp)
        if topic is None or topic.topic_id != wanted.topic_id:
            return FetchResult(ErrorCode.UNKNOWN_TOPIC_ID)
        if log is None:
            return FetchResult(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        if wanted.count != topic.count:
            return FetchResult(ErrorCode.INVALID_PARTITION_METADATA)
        if wanted.leader_epoch != log.epoch:
            return FetchResult(ErrorCode.FENCED_LEADER_EPOCH)
        if not log.start <= wanted.offset <= log.end:
            self.gone.add(tp)
            return FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE)
        data = log.fetch(wanted.offset, FETCH_RECORDS_MAX)
        return FetchResult(ErrorCode.NONE, data, log.end, log.end, log.start)
