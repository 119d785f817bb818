"""The member machine's driver: keeps the member in its group, even while the application does not poll.

The machine's steps are requests to the coordinator, computations of local assignors, and waits. For a classic member
with a pattern, the driver matches topic names; in the consumer protocol the coordinator matches them.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any
from uuid import UUID

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.base.patterns import compile_pattern
from anabranch.client.cluster.connection import Connection
from anabranch.client.cluster.metadata import TopicInfo
from anabranch.client.consumer.group_context import GroupContext, is_final
from anabranch.machines.clients.membership.steps import Compute, Send, Subscription, TopicFacts, WaitUntil
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from anabranch.protocol.messages.leave_group import LeaveGroupRequest
from anabranch.runtime.wakeup import Wakeup

PURPOSE, LEAVING_PURPOSE = "group", "group-leave"
"""A LeaveGroup must not wait behind a JoinGroup: its response comes only when the whole group has joined."""
TOPICS_INTERVAL_MS = 200
REGEX_VERSION = 1

_log = logging.getLogger("anabranch.client")


class MemberDriver:
    """Runs one member on sockets."""

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._settings = context.settings
        self._member = context.member
        self._now_ms = context.now_ms
        self._waits_until_ms: int | None = None
        """The end of the member's present wait, or the last one; None for one without an end."""
        self.first_seen: dict[str, frozenset[int]] | None = None
        """The partitions of each topic when this member first subscribed to it; None before the first metadata."""
        self.first_ids: dict[str, UUID] = {}
        """The ids of these topics: one that is created again is another one."""
        self._patterns: set[str] = set()
        """The patterns of which `first_seen` has the topics."""
        self._is_leaving = False
        self._joins = 0
        self._rejoined = Wakeup()
        """Set when the member joins with another subscription, and when it leaves."""

    async def drive(self) -> None:
        self._is_leaving = False
        if self._records_first:
            await self._record_and_join()
        elif self._wanted() is not None:
            self.join()
        while True:
            step = self._member.next(self._now_ms())
            match step:
                case Send():
                    self._context.run(self._send(step))
                case Compute():
                    self._context.run(self._compute(step))
                case WaitUntil(at_ms):
                    if self._member.wanted_ids or self._member.wanted_topics:
                        self._context.job("topics", self._learn_topics)
                    if self._member.event() is not None:
                        self._context.host.happened()
                    self._context.changed.clear()
                    self._waits_until_ms = at_ms
                    await self._context.changed.wait(None if at_ms is None else max(0, at_ms - self._now_ms()) / 1000)

    def begin(self) -> None:
        """Join anew after the member had unsubscribed."""
        self.first_seen = None
        self._patterns.clear()
        self._is_leaving = False
        self.resubscribe()

    def leave(self, *, stay: bool | None) -> None:
        """Leave the group: what looks for the topics of a subscription does not join any more."""
        self._is_leaving = True
        self._rejoined.set()
        self._member.leave(stay=stay)
        self._context.changed.set()

    def resubscribe(self) -> None:
        """Join with another subscription: not before it is recorded what exists of the topics that are new in it."""
        wanted = self._context.subscription
        assert wanted is not None
        seen = () if self.first_seen is None else self.first_seen
        is_known = wanted.topics <= set(seen) and wanted.pattern in {None, *self._patterns}
        if is_known or not self._records_first:
            self.join()
        else:
            self._context.job("record", self._record_and_join)

    @property
    def _records_first(self) -> bool:
        """Whether it matters what existed before the member joined.

        With `none` the coordinator knows of assigned partitions which are new to the group. Slices need no assignment.
        """
        reset = self._settings.auto_offset_reset
        return reset == "latest" or (reset == "none" and self._settings.share == "any")

    def was_there(self, tp: TopicPartition, topic_id: UUID) -> bool:
        """Whether a partition of the topic with this id existed when this member first subscribed to it.

        What came later is new to the group, and read from its start. True where that was not recorded.
        """
        if self.first_seen is None:
            return True
        return self.first_ids.get(tp.topic) == topic_id and tp.partition in self.first_seen.get(tp.topic, ())

    async def _record_and_join(self) -> None:
        recorded: Subscription | None = None
        while recorded != (wanted := self._wanted()) and wanted is not None:
            if await self._record_partitions(wanted):
                recorded = wanted
            else:
                await asyncio.sleep(TOPICS_INTERVAL_MS / 1000)
        if wanted is not None:
            self.join()

    def _wanted(self) -> Subscription | None:
        """The subscription of a member that stays."""
        return None if self._is_leaving else self._context.subscription

    def poll_due(self, deadline_ms: int) -> None:
        """Have the member look at the deadline of the next poll, if it would wait for longer."""
        if self._waits_until_ms is None or deadline_ms < self._waits_until_ms:
            self._context.changed.set()

    def join(self) -> None:
        """Pass the subscription to the machine; a classic member with a pattern gets the matching names."""
        assert self._context.subscription is not None
        self._joins += 1
        self._rejoined.set()
        if self._context.subscription.pattern is not None and self._settings.group_protocol == "classic":
            self._context.job("pattern", self._match)
        else:
            self._member.subscribe(self._context.subscription)
        self._context.changed.set()

    async def _match(self) -> None:
        """Keep the subscription of a classic member equal to the topics that match its pattern."""
        matched: tuple[int, frozenset[str]] | None = None
        while (wanted := self._wanted()) is not None and wanted.pattern is not None:
            matches, joins = compile_pattern(wanted.pattern), self._joins
            self._rejoined.clear()
            with suppress(AnabranchError, OSError):
                topics = await self._context.cluster.topics()
                names = frozenset(
                    name
                    for name, info in topics.items()
                    if isinstance(info, TopicInfo) and not info.is_internal and matches(name)
                )
                if names and (joins, names) != matched and joins == self._joins and not self._is_leaving:
                    matched = joins, names
                    self._member.subscribe(Subscription(names))
                    self._context.changed.set()
            age_ms = (
                TOPICS_INTERVAL_MS if matched is None or matched[0] != joins else self._settings.metadata_max_age_ms
            )
            await self._rejoined.wait(age_ms / 1000)

    async def _send(self, send: Send) -> None:
        purpose = LEAVING_PURPOSE if isinstance(send.request, LeaveGroupRequest) else PURPOSE
        try:
            version = _version(await self._context.coordinator.connection(purpose), send.request)
            timeout_ms = send.timeout_ms or self._settings.request_timeout_ms
            response = await self._context.coordinator.ask(
                send.request, purpose, timeout_ms=timeout_ms, version=version
            )
        except (AnabranchError, OSError) as error:
            self._member.on_error(send.ticket, error, self._now_ms())
        else:
            self._member.on_response(send.ticket, response, self._now_ms())
        self._context.changed.set()

    async def _compute(self, compute: Compute) -> None:
        try:
            result = await asyncio.get_running_loop().run_in_executor(None, compute.work)
        except Exception as error:
            _log.exception("the assignor of group '%s' failed", self._context.group_id)
            self._member.on_error(compute.ticket, error, self._now_ms())
        else:
            self._member.on_response(compute.ticket, result, self._now_ms())
        self._context.changed.set()

    async def _learn_topics(self) -> None:
        while self._member.wanted_ids or self._member.wanted_topics:
            with suppress(AnabranchError, OSError):
                facts: list[TopicFacts] = []
                if self._member.wanted_ids:
                    facts += map(_facts, (await self._context.cluster.topics_by_id(self._member.wanted_ids)).values())
                if self._member.wanted_topics:
                    topics = await self._context.cluster.topics(sorted(self._member.wanted_topics))
                    facts += [
                        _facts(info) if isinstance(info, TopicInfo) else TopicFacts(name, NO_TOPIC_ID, 0)
                        for name, info in topics.items()
                    ]
                self._member.on_topics(facts)
                self._context.changed.set()
            if self._member.wanted_ids or self._member.wanted_topics:
                await asyncio.sleep(TOPICS_INTERVAL_MS / 1000)

    async def _record_partitions(self, wanted: Subscription) -> bool:
        """Record what exists of topics that were not subscribed to: what appears later is read from its log start.

        Whether that is done; False where it can be tried again.
        """
        try:
            topics = await self._context.cluster.topics(None if wanted.pattern is not None else sorted(wanted.topics))
        except (AnabranchError, OSError) as error:
            return is_final(error)
        known = [compile_pattern(pattern) for pattern in sorted(self._patterns)]
        is_wanted = wanted.topics.__contains__ if wanted.pattern is None else compile_pattern(wanted.pattern)
        seen = {} if self.first_seen is None else self.first_seen
        for name, info in topics.items():
            if name not in seen and is_wanted(name) and not any(matches(name) for matches in known):
                seen[name] = frozenset(info.partitions) if isinstance(info, TopicInfo) else frozenset()
                if isinstance(info, TopicInfo):
                    self.first_ids[name] = info.topic_id
        self.first_seen = seen
        if wanted.pattern is not None:
            self._patterns.add(wanted.pattern)
        return True


def _version(connection: Connection, request: Any) -> int:
    if isinstance(request, ConsumerGroupHeartbeatRequest):
        if not connection.serves(ConsumerGroupHeartbeatRequest):
            text = f"{connection.name} does not serve the consumer group protocol (KIP-848)"
            raise ApiError(ErrorCode.UNSUPPORTED_VERSION, f"{text}; set group.protocol to 'classic'")
        version = connection.version_of(ConsumerGroupHeartbeatRequest)
        if request.subscribed_topic_regex and version < REGEX_VERSION:
            text = f"{connection.name} knows no subscriptions by pattern in the consumer protocol"
            raise ApiError(ErrorCode.UNSUPPORTED_VERSION, f"{text}; subscribe to topics by their names")
        return version
    return connection.version_of(type(request))


def _facts(info: TopicInfo) -> TopicFacts:
    retiring = sum(partition.retiring for partition in info.partitions.values())
    return TopicFacts(info.name, info.topic_id, len(info.partitions), retiring)
