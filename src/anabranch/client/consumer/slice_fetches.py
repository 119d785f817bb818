"""The fetches of a member that consumes without keys (ADR 0053): one at a time for each leader, of its partitions.

The ledger (`machines.clients.slices`) says which claim comes next, and takes the slices. A further slice is claimed
while fewer records wait for the application than one poll hands out, so that others have the rest. Topics are named by
their ids: where a group begins in one is nowhere to begin in another of its name.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING
from uuid import UUID

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.base.patterns import compile_pattern
from anabranch.client.cluster.metadata import Cluster, TopicInfo
from anabranch.client.consumer.group_context import EPOCH_STALE, OUT_OF_GROUP, GroupContext
from anabranch.client.consumer.handout import Handout
from anabranch.client.consumer.member_driver import MemberDriver
from anabranch.client.settings import ConsumerSettings
from anabranch.machines.clients.fetching import EARLIEST, LATEST, Deliverable
from anabranch.machines.clients.fetching.values import Fetched
from anabranch.machines.clients.membership.steps import Subscription
from anabranch.machines.clients.slices import BEGIN_ANEW, Session, SliceLedger
from anabranch.protocol.messages.fetch import Claim, FetchPartition, FetchRequest, FetchTopic, PartitionData

if TYPE_CHECKING:
    from anabranch.client.consumer.driver import FetchingDriver

PURPOSE = "claims"
END_SESSION = -1
END_TIMEOUT_MS = 2_000
Claims = Mapping[TopicPartition, tuple[Session, int]]
"""The claims of a fetch, each with its number."""


class SliceFetches:
    """Claims the slices of one member."""

    def __init__(
        self,
        settings: ConsumerSettings,
        cluster: Cluster,
        driver: FetchingDriver,
        handout: Handout,
        context: GroupContext,
        ledger: SliceLedger,
        member: MemberDriver,
        commit: Callable[[], Awaitable[None]],
    ) -> None:
        """`commit` commits what is done, and raises nothing."""
        self.failure: AnabranchError | None = None
        """The error to raise in the next poll."""
        self.pairs: frozenset[TopicPartition] | None = None
        """The partitions that are assigned by hand; None for all of the subscription."""
        self.whole: frozenset[str] = frozenset()
        """The topics that are assigned by hand with all their partitions."""
        self._settings = settings
        self._cluster = cluster
        self._driver = driver
        self._handout = handout
        self._context = context
        self._ledger = ledger
        self._member = member
        self._commit = commit
        self._leases = itertools.count(1)
        self._topics: dict[str, TopicInfo] = {}
        self._known_for: Subscription | None = None
        self._refresh_at_ms = 0
        self._refreshing = False
        self._busy: set[int] = set()
        self._served: dict[int, TopicPartition] = {}
        """By leader: the last partition that it gave a slice of. The next request begins behind it: an answer that is
        full has nothing of the last partitions."""

    @property
    def partitions(self) -> tuple[TopicPartition, ...]:
        """The partitions whose slices are claimed."""
        return tuple(
            tp
            for name, info in sorted(self._topics.items())
            for tp in (TopicPartition(name, number) for number in sorted(info.partitions))
            if self._wants(tp)
        )

    @property
    def topic_ids(self) -> dict[str, UUID]:
        """The ids of the topics that slices are in hand of: what is done of one is done of no other of its name."""
        return {name: info.topic_id for name, info in self._topics.items()}

    def _wants(self, tp: TopicPartition) -> bool:
        return self.pairs is None or tp in self.pairs or tp.topic in self.whole

    def changed(self) -> None:
        """Look at the subscription and the topics again."""
        self._refresh_at_ms = 0

    # -- what is fetched -----------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Claim, where there is room."""
        context, tracker, settings = self._context, self._ledger.tracker, self._settings
        if context.subscription is None or not context.member.is_member:
            return
        if context.subscription != self._known_for or context.now_ms() >= self._refresh_at_ms:
            if not self._refreshing:
                self._refreshing = True
                self._driver.run(self._refresh(context.subscription))
            if context.subscription != self._known_for:
                return
        if (
            tracker.ready >= settings.max_poll_records
            or tracker.unfinished >= settings.max_unfinished_records
            or tracker.size >= settings.max_unfinished_bytes
        ):
            return
        by_node: dict[int, list[TopicPartition]] = {}
        for tp in self.partitions:
            leader = self._topics[tp.topic].partitions[tp.partition].leader
            if leader >= 0 and leader not in self._busy:
                by_node.setdefault(leader, []).append(tp)
        for node, partitions in by_node.items():
            self._busy.add(node)
            first = bisect_right(partitions, self._served.get(node, partitions[-1]))
            self._driver.run(self._fetch(node, [*partitions[first:], *partitions[:first]]))

    async def _refresh(self, subscription: Subscription) -> None:
        context = self._context
        try:
            names = None if subscription.pattern is not None else sorted(subscription.topics)
            found = await self._cluster.topics(names)
        except (AnabranchError, OSError):
            self._refresh_at_ms = context.now_ms() + self._settings.retry_backoff_ms
            await asyncio.sleep(self._settings.retry_backoff_ms / 1000)
        else:
            matches = None if subscription.pattern is None else compile_pattern(subscription.pattern)
            topics = {
                name: info
                for name, info in found.items()
                if isinstance(info, TopicInfo) and (matches is None or (matches(name) and not info.is_internal))
            }
            for name, info in topics.items():
                self._drop_other_topic(name, info)
            self._topics, self._known_for = topics, subscription
            missing = len(topics) < len(found) and matches is None
            age_ms = self._settings.retry_backoff_max_ms if missing else self._settings.metadata_max_age_ms
            self._refresh_at_ms = context.now_ms() + age_ms
            wanted = set(self.partitions)
            await self.end(self._ledger.leave_out(wanted.__contains__))
        finally:
            self._refreshing = False
        self._driver.happened()

    async def _fetch(self, node: int, partitions: Iterable[TopicPartition]) -> None:
        """Fetch the next slices of partitions from their leader."""
        settings, context = self._settings, self._context
        asked_as = context.identity()
        try:
            there = [tp for tp in partitions if tp.topic in self._topics]  # They may have been looked at again since.
            if not there:
                return
            claims = {tp: (session := self._ledger.session(tp), session.sequence) for tp in there}
            request = self._request(claims, settings.fetch_max_wait_ms)
            names = {self._topics[name].topic_id: name for name in {tp.topic for tp in claims}}
            pause = False
            try:
                connection = await self._cluster.connection(node, PURPOSE)
                timeout_ms = settings.request_timeout_ms + settings.fetch_max_wait_ms
                response = await connection.send(request, timeout_ms=timeout_ms)
                if response.error_code:
                    raise ApiError(ErrorCode.of(response.error_code), f"{connection.name} refused to hand out slices")
            except (AnabranchError, OSError):
                self._refresh_at_ms, pause = 0, True
            else:
                for topic in response.responses:
                    for data in topic.partitions:
                        tp = TopicPartition(names.get(topic.topic_id, ""), data.partition_index)
                        if data.slice is not None:
                            self._served[node] = tp
                        if tp in claims:
                            pause = await self._answered(tp, claims[tp], data) or pause
            if pause:
                await context.epoch_or_pause(asked_as)
        finally:
            self._busy.discard(node)
            self._driver.happened()

    def _request(self, claims: Claims, wait_ms: int) -> FetchRequest:
        settings = self._settings
        identity = self._context.identity()
        topics: dict[str, list[FetchPartition]] = {}
        for tp, (session, sequence) in claims.items():
            topics.setdefault(tp.topic, []).append(
                FetchPartition(
                    partition=tp.partition,
                    fetch_offset=session.offset,
                    partition_max_bytes=settings.max_partition_fetch_bytes,
                    claim=Claim(session=session.number, sequence=sequence, records_max=settings.max_poll_records),
                )
            )
        return FetchRequest(
            replica_id=-1,
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=settings.fetch_max_bytes,
            isolation_level=int(settings.read_committed),
            session_id=0,
            session_epoch=-1,
            topics=[
                FetchTopic(
                    topic_id=self._topics[name].topic_id,
                    partitions=parts,
                    undeleted_partition_count=self._topics[name].partition_count,
                )
                for name, parts in topics.items()
            ],
            forgotten_topics_data=[],
            group_id=self._context.group_id,
            member_id=identity.member_id,
            generation_id_or_member_epoch=identity.epoch,
        )

    async def _answered(self, tp: TopicPartition, claim: tuple[Session, int], data: PartitionData) -> bool:
        """Take the answer to a claim; return whether to wait before the next one."""
        code, ledger = ErrorCode.of(data.error_code), self._ledger
        session, sequence = claim
        if code is ErrorCode.NONE:
            session.offset = -1  # The group has begun. Where it has not, it is another topic, with another begin.
            if data.slice is not None:
                await self._take(tp, session.number, sequence, data)
            return False
        if code is ErrorCode.OFFSET_OUT_OF_RANGE:
            refused, session.offset = session.offset, await self._begin_at(tp)
            if refused < 0 or session.offset != refused:  # The log may have begun, or ended, there a moment ago.
                return refused >= 0
        if code in BEGIN_ANEW:
            if await self._was_made_again(tp.topic):
                return False
            await self._commit()
            if ledger.session(tp) is session:
                ledger.begin_anew(tp)
                ledger.session(tp).offset = -1
            return False
        if code in OUT_OF_GROUP:
            ledger.fenced()
            self._context.member.heartbeat_now()
            self._context.changed.set()
        elif code.retriable:
            self._refresh_at_ms = 0
        elif code not in EPOCH_STALE:
            self.failure = ApiError(code, data.error_message or f"slices of {tp} are refused")
        return True

    async def _was_made_again(self, name: str) -> bool:
        """Whether a topic is another one than that of which slices are in hand, which are dropped then."""
        try:
            info = await self._cluster.topic(name)
        except (AnabranchError, OSError):
            return False
        return self._drop_other_topic(name, info)

    def _drop_other_topic(self, name: str, info: TopicInfo) -> bool:
        """Drop what is in hand of a topic that was created again: nothing of it is done in the new one."""
        before = self._topics.get(name)
        if before is None or before.topic_id == info.topic_id or NO_TOPIC_ID in (before.topic_id, info.topic_id):
            return False
        self._ledger.leave_out(lambda tp: tp.topic != name)
        self._topics[name] = info
        return True

    async def _take(self, tp: TopicPartition, session: int, sequence: int, data: PartitionData) -> None:
        from anabranch.client.consumer.tables import RECORD_COLUMNS, records_of

        assert data.slice is not None
        start, end = data.slice.start, data.slice.end
        aborted = tuple((each.producer_id, each.first_offset) for each in data.aborted_transactions or ())
        part = Deliverable(
            tp.topic, tp.partition, Fetched(memoryview(data.records or b""), end + 1, aborted), start, end + 1
        )
        try:
            rows = await self._handout.table_beside([part], RECORD_COLUMNS, None)
            records = records_of(part, rows, self._leases) if rows.num_rows else []
        except AnabranchError as error:
            self.failure = error
            return
        self._ledger.got(tp, session, sequence, start, end, records)

    async def _begin_at(self, tp: TopicPartition) -> int:
        """Where the group begins that has committed nothing of a partition; -1 if that could not be found."""
        reset = self._settings.auto_offset_reset
        try:
            now = (await self._cluster.topic(tp.topic)).topic_id
        except (AnabranchError, OSError):
            return -1
        if not self._member.was_there(tp, now):
            reset = "earliest"
        if reset == "none":
            text = f"group '{self._context.group_id}' has committed nothing of {tp}, and auto.offset.reset is none"
            self.failure = ApiError(ErrorCode.OFFSET_OUT_OF_RANGE, text)
            return -1
        try:
            at = EARLIEST if reset == "earliest" else LATEST
            found = await self._cluster.offsets({tp: at}, read_committed=self._settings.read_committed)
        except (AnabranchError, OSError):
            return -1
        return found[tp].offset

    async def end(self, sessions: Iterable[tuple[TopicPartition, Session]]) -> None:
        """Give back what is in hand of partitions; where that fails, the leader finds out by itself."""
        by_node: dict[int, dict[TopicPartition, tuple[Session, int]]] = {}
        for tp, session in sessions:
            info = self._topics.get(tp.topic)
            leader = -1 if info is None or tp.partition not in info.partitions else info.partitions[tp.partition].leader
            if leader >= 0:
                by_node.setdefault(leader, {})[tp] = session, END_SESSION
        requests = {node: self._request(claims, 0) for node, claims in by_node.items()}
        for node, request in requests.items():
            try:
                connection = await self._cluster.connection(node, PURPOSE)
                await connection.send(request, timeout_ms=END_TIMEOUT_MS)
            except (AnabranchError, OSError):
                continue
