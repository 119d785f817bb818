"""Gates of a group's member: flushes and commits that gates wait for, announcements, and the question kept open.

Listeners are called inside `poll`. The question (ConsumerGroupPosition) is kept open also while the application does
not poll; `machines.clients.positions` decides what it holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterable

from anabranch.base.errors import AnabranchError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.commits import Commits
from anabranch.client.consumer.group_context import GroupContext
from anabranch.client.consumer.offsets import MemberIdentity
from anabranch.machines.clients.positions import NOTHING, Answer, PositionReports, Question
from anabranch.protocol.messages.consumer_group_position import (
    ConsumerGroupPositionRequest,
    ConsumerGroupPositionRequestPartition,
    ConsumerGroupPositionRequestTopic,
    ConsumerGroupPositionResponse,
)

PURPOSE = "positions"
"""A question that waits must not hold up heartbeats or commits."""
WAIT_MS = 15_000
"""The time in ms for which the coordinator may park a question."""
OPEN_MAX = 2
"""Questions open at a time: the parked one, and the one that ends it."""

CallListener = Callable[[str, tuple[TopicPartition, ...]], Awaitable[None]]


class Gates:
    """The gates of one member."""

    def __init__(self, context: GroupContext, commits: Commits, call: CallListener) -> None:
        self._context = context
        self._fetcher = context.fetcher
        self._settings = context.settings
        self._commits = commits
        self._call = call
        self._reports = PositionReports(auto_commit=self._settings.enable_auto_commit)
        self._moved = asyncio.Event()
        """Set when the question may have to be another one."""
        self._last = Question()
        """Of the questions that are open, the one sent last."""

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget revoked or lost partitions."""
        self._reports.drop(partitions)

    # -- inside poll --------------------------------------------------------------------------------------------------

    def is_due(self) -> bool:
        """Whether `attend` has something to do; asks and answers go on meanwhile."""
        self._keep_asking()
        return self._commits.is_due() or bool(self._flush_due()) or bool(self._fetcher.openings())

    async def attend(self) -> None:
        """Flush and commit what is due, then announce segments with open gates. May call listeners."""
        due = self._flush_due()
        if self._settings.enable_auto_commit:
            if self._commits.is_due() or (due and self._commits.may_begin()):
                processed = self._commits.processed()
                await self.flush(self._fetcher.assignment, processed.ranges)
                self._commits.begin(processed)
        else:
            await self.flush(due)
        for tp in self._fetcher.openings():
            await self._call("on_partition_key_assigned", (tp,))
            self._fetcher.announced(tp)
        self._keep_asking()

    def _flush_due(self) -> tuple[TopicPartition, ...]:
        due = self._reports.flush_due(self._fetcher.needs(), self._fetcher.standing)
        return () if self._settings.enable_auto_commit and not self._commits.may_begin() else due

    async def flush(self, partitions: Iterable[TopicPartition], ranged: Container[TopicPartition] = ()) -> None:
        """Have the application flush its state of partitions of ordered topics, as far as it has records of them.

        `ranged`: partitions of which the application has finished records above the stable offset.
        """
        positions: dict[TopicPartition, int] = {}
        for tp in partitions:
            standing = self._fetcher.standing(tp)
            if standing is None and self._settings.allow_key_share and (at := self._fetcher.unflushed(tp)) is not None:
                positions[tp] = at
            if standing is None or standing.position is None:
                continue
            if tp in ranged or not standing.is_flushed:
                positions[tp] = standing.position
        if positions:
            await self._call("on_partition_key_maybe_revoked", tuple(sorted(positions)))
            for tp, position in positions.items():
                self._fetcher.flushed(tp, position)

    # -- beside it ----------------------------------------------------------------------------------------------------

    def _keep_asking(self) -> None:
        if not self._may_ask():
            return
        if "positions-asked" not in self._context.jobs:
            self._context.job("positions-asked", self._ask_on)
        elif self._question().adds_to(self._last):
            self._moved.set()

    def _may_ask(self) -> bool:
        context = self._context
        return context.subscription is not None and context.member.is_member and self._fetcher.is_layered

    def _question(self) -> Question:
        self._reports.begin_epoch(self._context.member.epoch)
        return self._reports.question(self._fetcher.needs(), self._fetcher.standing, self._fetcher.known)

    async def _ask_on(self) -> None:
        """Keep one question open while gates may concern this member; ask again when there is more to ask or report."""
        asked: dict[asyncio.Task[None], Question] = {}
        try:
            while self._may_ask():
                question = self._question()
                if not asked or (len(asked) < OPEN_MAX and question.adds_to(self._last)):
                    self._last = question
                    asked[asyncio.create_task(self._ask(question))] = question
                self._moved.clear()
                moved = asyncio.create_task(self._wait())
                try:
                    await asyncio.wait([*asked, moved], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    moved.cancel()
                for task in [task for task in asked if task.done()]:
                    del asked[task]
                    task.result()
                for left in asked.values():  # It may have come later than the one sent after it, and ask for less.
                    self._last = left
        finally:
            for task in asked:
                task.cancel()

    async def _wait(self) -> None:
        await self._moved.wait()

    async def _ask(self, question: Question) -> None:
        """Ask once; return after the answer was taken, or, where it was of no use, a moment later."""
        context = self._context
        asked_as = context.identity()
        try:
            connection = await context.coordinator.connection(PURPOSE)
            code = ErrorCode.UNSUPPORTED_VERSION
            if connection.serves(ConsumerGroupPositionRequest):
                timeout_ms = WAIT_MS + self._settings.request_timeout_ms
                request = self._request(question, asked_as)
                response = await context.coordinator.ask(request, PURPOSE, timeout_ms=timeout_ms)
                code = ErrorCode.of(response.error_code)
        except (AnabranchError, OSError):
            self._reports.restart()
        else:
            if code is ErrorCode.NONE:
                if self._take(question, response):
                    context.host.happened()
                    return
            elif code is ErrorCode.REBALANCE_IN_PROGRESS:
                context.member.heartbeat_now()
                context.changed.set()
            else:
                self._reports.restart()
        await context.epoch_or_pause(asked_as)

    def _request(self, question: Question, identity: MemberIdentity) -> ConsumerGroupPositionRequest:
        topics: dict[str, list[ConsumerGroupPositionRequestPartition]] = {}
        for asked, positions in ((True, question.asks), (False, question.reports)):
            for tp, position in positions.items():
                topics.setdefault(tp.topic, []).append(
                    ConsumerGroupPositionRequestPartition(
                        partition=tp.partition,
                        need_position=asked,
                        position=position,
                        flushed=question.flushed.get(tp, NOTHING),
                    )
                )
        ids = self._context.topic_ids([*question.asks, *question.reports])
        return ConsumerGroupPositionRequest(
            group_id=self._context.group_id,
            generation_id=identity.epoch,
            member_id=identity.member_id,
            topics=[
                ConsumerGroupPositionRequestTopic(topic=name, topic_id=ids[name], partitions=partitions)
                for name, partitions in topics.items()
            ],
            max_wait_ms=WAIT_MS,
        )

    def _take(self, question: Question, response: ConsumerGroupPositionResponse) -> bool:
        """Pass an answer to the fetcher; return whether it, or its question, held anything."""
        answers = [
            Answer(TopicPartition(topic.topic, p.partition), p.need_position, p.position, p.overdue, p.overdue_to)
            for topic in response.topics
            for p in topic.partitions
        ]
        news = self._reports.answered(question, answers)
        for tp, position in news.told.items():
            self._fetcher.told(tp, position)
        for tp, lift in news.lifted.items():
            self._fetcher.lift(tp, *(lift or (None,)))
        for tp in news.missing:
            self._fetcher.refresh(tp.topic)
        return news.is_new
