"""The consumer's side of a group: carries out what its member machine says, on sockets and in the application.

A task of its own keeps the member alive, whether the application polls or not. What concerns the application (revoke,
assign, lost) is carried out inside `poll`, so that nothing is being processed meanwhile: what was handed out by earlier
polls counts as processed, is committed, and only then are partitions given up. Positions come from committed offsets;
one that cannot be read is asked for again, and never taken for one that is not there.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeGuard
from uuid import UUID, uuid4

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.client.cluster.connection import Connection
from anabranch.client.cluster.coordinator import Coordinator
from anabranch.client.cluster.metadata import Cluster, TopicInfo
from anabranch.client.consumer.offsets import MemberIdentity, OffsetAndMetadata, Offsets
from anabranch.client.consumer.patterns import compiled
from anabranch.machines.clients.fetching import EARLIEST, LATEST, Fetcher, TopicView
from anabranch.machines.clients.membership.assignors import PartitionAssignor
from anabranch.machines.clients.membership.classic import ClassicMember
from anabranch.machines.clients.membership.consumer import ConsumerMember
from anabranch.machines.clients.membership.steps import (
    Assign,
    Compute,
    Event,
    Explain,
    Failed,
    Lost,
    Member,
    MemberSettings,
    Owned,
    Revoke,
    Send,
    Subscription,
    TopicFacts,
    WaitUntil,
)
from anabranch.machines.clients.membership.strategies import COOPERATIVE_STICKY, RANGE
from anabranch.machines.lineage import BEYOND
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from anabranch.protocol.messages.leave_group import LeaveGroupRequest

PURPOSE, LEAVING_PURPOSE = "group", "group-leave"
"""A LeaveGroup must not wait behind a JoinGroup, which is answered when the whole group has joined."""
GATE_INTERVAL_MS = 300
"""How often members that wait for others ask how far those have committed."""
TOPICS_INTERVAL_MS = 200
CLOSE_TIMEOUT_MS = 30_000
REGEX_VERSION = 1

EPOCH_STALE = frozenset({ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.ILLEGAL_GENERATION})
"""The group has moved on, and this member may be about to hear of it."""
OUT_OF_GROUP = frozenset({ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID})
TOPIC_GONE = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})
"""The topic was deleted, or its coordinator has yet to hear of it."""
TOPIC_GONE_TIMEOUT_MS = 2_000
AGAIN = TOPIC_GONE | {ErrorCode.REBALANCE_IN_PROGRESS}

_log = logging.getLogger("anabranch.client")


class SubscriptionPattern(NamedTuple):
    """Topics whose whole name matches an RE2 regular expression; matched by the group's coordinator."""

    pattern: str


class GroupMetadata(NamedTuple):
    """Who this consumer is in its group; a transaction that commits its offsets needs it."""

    group_id: str
    generation_id: int
    member_id: str
    group_instance_id: str | None


class RebalanceListener:
    """Told when partitions come and go, in `poll`. Methods may be plain or `async`; override what you need."""

    def on_partitions_assigned(self, partitions: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Take these in addition; `seek` now decides where to begin."""

    def on_partitions_revoked(self, partitions: Collection[TopicPartition]) -> Awaitable[None] | None:
        """Let go of these; work on them can still be committed."""

    def on_partitions_lost(self, partitions: Collection[TopicPartition]) -> Awaitable[None] | None:
        """These may be others' already; nothing of them can be committed. By default as if they were revoked."""
        return self.on_partitions_revoked(partitions)


@dataclass(frozen=True, slots=True)
class _Functions:
    """A listener made of functions."""

    on_partitions_assigned: Callable[..., Any] | None
    on_partitions_revoked: Callable[..., Any] | None
    on_partitions_lost: Callable[..., Any] | None


def listener_of(
    listener: Any,
    assigned: Callable[..., Any] | None,
    revoked: Callable[..., Any] | None,
    lost: Callable[..., Any] | None,
) -> Any:
    """One listener, from an object or from functions."""
    if assigned is None and revoked is None and lost is None:
        return listener
    if listener is not None:
        raise ValueError("give subscribe a listener, or functions, not both")
    return _Functions(assigned, revoked, lost)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The consumer's settings about its group, by Kafka's names."""

    group_id: str
    group_protocol: str = "consumer"
    group_instance_id: str | None = None
    group_remote_assignor: str | None = None
    group_local_assignors: tuple[PartitionAssignor, ...] = ()
    partition_assignment_strategy: tuple[str, ...] = (RANGE, COOPERATIVE_STICKY)
    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 3_000
    client_rack: str | None = None
    enable_auto_commit: bool = True
    auto_commit_interval_ms: int = 5_000
    max_poll_interval_ms: int = 300_000
    auto_offset_reset: str = "latest"
    read_committed: bool = False
    request_timeout_ms: int = 30_000
    default_api_timeout_ms: int = 60_000
    metadata_max_age_ms: int = 300_000
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000


class Host(Protocol):
    """What a group needs of its consumer."""

    def happened(self) -> None:
        """Look again: something has changed."""

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget what was fetched of these."""

    def consumed(self) -> Mapping[TopicPartition, int]:
        """The position after everything that the application has been given, of every partition that has one."""


in_callback: ContextVar[bool] = ContextVar("in_callback", default=False)
"""Whether this is the task, or the thread, of a rebalance listener."""
Invoke = Callable[[Callable[..., Any], tuple[Any, ...]], Awaitable[None]]


async def invoke_here(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Call a plain or an async function."""
    result = function(*arguments)
    if inspect.isawaitable(result):
        await result


class Group:
    """A consumer's membership and offsets. Belongs to one event loop."""

    def __init__(self, settings: GroupSettings, cluster: Cluster, fetcher: Fetcher, host: Host) -> None:
        self.settings = settings
        self.invoke: Invoke = invoke_here
        self._cluster = cluster
        self._fetcher = fetcher
        self._host = host
        self._coordinator = Coordinator(cluster, settings.group_id)
        self._offsets = Offsets(self._coordinator, settings.group_id, settings.request_timeout_ms)
        self._member = _member(settings)
        self._subscription: Subscription | None = None
        self._listener: Any = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._jobs: dict[str, asyncio.Task[None]] = {}
        self._carrying: asyncio.Task[None] | None = None
        self._committing = asyncio.Lock()
        self._committed: dict[TopicPartition, int] = {}
        self._commit_at_ms = 0
        self._milestone = False
        self._first_seen: dict[str, frozenset[int]] | None = None
        self._error: AnabranchError | None = None
        self._closed = False

    # -- membership ---------------------------------------------------------------------------------------------------

    @property
    def subscription(self) -> Subscription | None:
        """What is subscribed to, if anything is."""
        return self._subscription

    @property
    def member(self) -> Member:
        """The machine."""
        return self._member

    def subscribe(self, subscription: Subscription, listener: Any) -> None:
        """Be a member that reads this."""
        first = self._subscription is None
        self._subscription, self._listener = subscription, listener
        if "drive" in self._jobs:
            if first:
                self._first_seen = None
            self._join()

    def start(self) -> None:
        """Join, if something is subscribed to and this is not under way yet."""
        if self._subscription is not None and not self._closed:
            self._job("drive", self._drive)

    async def unsubscribe(self) -> None:
        """Leave the group, having let go of everything."""
        if self._subscription is None:
            return
        await self._leave(stay=None, timeout_ms=self.settings.default_api_timeout_ms)
        self._subscription = None

    async def close(self, *, leave: bool | None, timeout_ms: int) -> None:
        """Commit, let go, leave; whatever of it does not succeed in time is given up."""
        try:
            if "drive" in self._jobs:
                await self._leave(stay=None if leave is None else not leave, timeout_ms=timeout_ms)
            elif self._subscription is None and self.settings.enable_auto_commit:
                await self._commit_processed(self._host.consumed(), timeout_ms)
        finally:
            self._closed = True
            tasks = [*self._tasks, *self._jobs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _leave(self, *, stay: bool | None, timeout_ms: int) -> None:
        self._member.leave(stay=stay)
        self._changed.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                while not self._member.has_left:
                    await self._carry_out_events()
                    if not self._member.has_left:
                        await self._news()

    async def _news(self) -> None:
        """Wait a little for something to change."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await self._changed.wait()
            self._changed.clear()

    def poll_began(self) -> None:
        """The application has come back."""
        self._member.poll_began(_now_ms())
        self._changed.set()

    def poll_ended(self) -> None:
        """The application works."""
        self._member.poll_ended(_now_ms())
        self._changed.set()

    def refuse_in_callback(self) -> None:
        """Raise if this is called from within a rebalance listener, which must not poll."""
        if in_callback.get():
            raise ApiError(ErrorCode.INVALID_REQUEST, "a rebalance listener must not poll; return first")

    async def attend(self) -> None:
        """Do what falls to the application's side: rebalance, commit when it is time, find out where to begin."""
        self._auto_commit()
        await self._carry_out_events()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        self.look_for_positions()
        if "gates" not in self._jobs and self._subscription is not None and self._fetcher.waits():
            self._job("gates", self._watch_gates)

    def look_for_positions(self) -> None:
        """Find out where granted partitions begin, where that is not known."""
        if self._fetcher.awaiting():
            self._job("positions", self._find_positions)

    def next_attendance_ms(self) -> int | None:
        """When `attend` is due though nothing happens."""
        return self._commit_at_ms if self.settings.enable_auto_commit else None

    def identity(self) -> MemberIdentity:
        """Who commits."""
        if self._subscription is None:
            return MemberIdentity()
        return MemberIdentity(self._member.member_id, self._member.epoch, self.settings.group_instance_id)

    def metadata(self) -> GroupMetadata:
        """Who this consumer is in its group."""
        member_id, epoch, instance_id = self.identity()
        return GroupMetadata(self.settings.group_id, epoch, member_id, instance_id)

    # -- the application's side ---------------------------------------------------------------------------------------

    async def _carry_out_events(self) -> None:
        while True:
            if self._carrying is None:
                event = self._member.take()
                if event is None:
                    return
                self._carrying = asyncio.ensure_future(self._carry_out(event))
            carrying = self._carrying
            try:
                await asyncio.shield(carrying)
            finally:
                if carrying.done():
                    self._carrying = None

    async def _carry_out(self, event: Event) -> None:
        in_callback.set(True)
        try:
            match event:
                case Revoke(partitions):
                    await self._revoke(_names(partitions))
                case Lost(partitions):
                    names = _names(partitions)
                    self._drop(names)
                    await self._tell("on_partitions_lost", names)
                case Assign(partitions):
                    self._fetcher.grant(
                        (owned.name, owned.topic_id if owned.topic_id != NO_TOPIC_ID else None) for owned in partitions
                    )
                    await self._tell("on_partitions_assigned", _names(partitions))
                case Explain(error, assignment, member_epoch):
                    for assignor in self.settings.group_local_assignors:
                        await self.invoke(assignor.on_assignment, (error, assignment, member_epoch))
                case Failed(error):
                    raise error
        finally:
            self._member.done(event, _now_ms())
            self._changed.set()

    async def _revoke(self, names: tuple[TopicPartition, ...]) -> None:
        try:
            if self.settings.enable_auto_commit:
                consumed = self._host.consumed()
                processed = {tp: consumed[tp] for tp in names if tp in consumed}
                await self._commit_processed(processed, self.settings.default_api_timeout_ms)
            await self._tell("on_partitions_revoked", names)
        finally:
            self._drop(names)

    def _drop(self, names: tuple[TopicPartition, ...]) -> None:
        self._fetcher.withdraw(names)
        self._host.dropped(names)
        for name in names:
            self._committed.pop(name, None)

    async def _tell(self, method: str, names: tuple[TopicPartition, ...]) -> None:
        function = getattr(self._listener, method, None)
        if function is None and method == "on_partitions_lost":
            function = getattr(self._listener, "on_partitions_revoked", None)
        if function is not None and names:
            await self.invoke(function, (names,))

    # -- keeping the member alive -------------------------------------------------------------------------------------

    async def _drive(self) -> None:
        assert self._subscription is not None
        if self.settings.auto_offset_reset == "latest":
            await self._look_first()
        self._join()
        while True:
            step = self._member.next(_now_ms())
            match step:
                case Send():
                    self._run(self._send(step))
                case Compute():
                    self._run(self._compute(step))
                case WaitUntil(at_ms):
                    if self._member.wanted_ids or self._member.wanted_topics:
                        self._job("topics", self._learn_topics)
                    if self._member.event() is not None:
                        self._host.happened()
                    self._changed.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(None if at_ms is None else max(0, at_ms - _now_ms()) / 1000):
                            await self._changed.wait()

    def _join(self) -> None:
        """Tell the machine what is subscribed to; a classic one is told the names that match a pattern."""
        assert self._subscription is not None
        if self._subscription.pattern is not None and self.settings.group_protocol == "classic":
            self._job("pattern", self._match)
        else:
            self._member.subscribe(self._subscription)
        self._changed.set()

    async def _match(self) -> None:
        """Keep a classic member subscribed to the topics that match."""
        matched: frozenset[str] = frozenset()
        while (wanted := self._subscription) is not None and wanted.pattern is not None:
            matches = compiled(wanted.pattern)
            with suppress(AnabranchError, OSError):
                topics = await self._cluster.topics()
                names = frozenset(
                    name
                    for name, info in topics.items()
                    if isinstance(info, TopicInfo) and not info.is_internal and matches(name)
                )
                if names and names != matched and wanted == self._subscription:
                    matched = names
                    self._member.subscribe(Subscription(matched))
                    self._changed.set()
            age_ms = self.settings.metadata_max_age_ms if matched else TOPICS_INTERVAL_MS
            await asyncio.sleep(age_ms / 1000)

    async def _send(self, send: Send) -> None:
        purpose = LEAVING_PURPOSE if isinstance(send.request, LeaveGroupRequest) else PURPOSE
        try:
            version = _version(await self._coordinator.connection(purpose), send.request)
            timeout_ms = send.timeout_ms or self.settings.request_timeout_ms
            response = await self._coordinator.ask(send.request, purpose, timeout_ms=timeout_ms, version=version)
        except (AnabranchError, OSError) as error:
            self._member.on_error(send.ticket, error, _now_ms())
        else:
            self._member.on_response(send.ticket, response, _now_ms())
        self._changed.set()

    async def _compute(self, compute: Compute) -> None:
        try:
            result = await asyncio.get_running_loop().run_in_executor(None, compute.work)
        except Exception as error:
            _log.exception("the assignor of group '%s' failed", self.settings.group_id)
            self._member.on_error(compute.ticket, error, _now_ms())
        else:
            self._member.on_response(compute.ticket, result, _now_ms())
        self._changed.set()

    async def _learn_topics(self) -> None:
        while self._member.wanted_ids or self._member.wanted_topics:
            with suppress(AnabranchError, OSError):
                facts: list[TopicFacts] = []
                if self._member.wanted_ids:
                    facts += map(_facts, (await self._cluster.topics_by_id(self._member.wanted_ids)).values())
                if self._member.wanted_topics:
                    topics = await self._cluster.topics(sorted(self._member.wanted_topics))
                    facts += [
                        _facts(info) if isinstance(info, TopicInfo) else TopicFacts(name, NO_TOPIC_ID, 0)
                        for name, info in topics.items()
                    ]
                self._member.on_topics(facts)
                self._changed.set()
            if self._member.wanted_ids or self._member.wanted_topics:
                await asyncio.sleep(TOPICS_INTERVAL_MS / 1000)

    async def _look_first(self) -> None:
        """Remember which partitions there are now: those that appear later are read from their beginning."""
        assert self._subscription is not None
        names = None if self._subscription.pattern is not None else sorted(self._subscription.topics)
        try:
            topics = await self._cluster.topics(names)
        except (AnabranchError, OSError):
            return
        self._first_seen = {
            name: frozenset(info.partitions) for name, info in topics.items() if isinstance(info, TopicInfo)
        }

    # -- where to begin -----------------------------------------------------------------------------------------------

    async def _find_positions(self) -> None:
        while awaiting := self._fetcher.awaiting():
            identity = self.identity()
            again = False
            try:
                found = await self._offsets.fetch(
                    awaiting, self._ids(awaiting), identity, stable=self.settings.read_committed
                )
                without: list[TopicPartition] = []
                for tp, result in found.items():
                    if isinstance(result, ErrorCode):
                        if not result.retriable:
                            raise ApiError(result, f"the committed offset of {tp} cannot be read")
                        again = True
                    elif result.offset >= 0:
                        self._committed[tp] = result.offset
                        self._fetcher.begin(tp, offset=result.offset)
                    else:
                        without.append(tp)
                if without:
                    await self._begin_without(without)
            except (AnabranchError, OSError) as error:
                if _is_final(error):
                    self._error = error
                    self._host.happened()
                    return
                again = True
            self._host.happened()
            if again or self._fetcher.awaiting() == awaiting:
                await self._epoch_or_pause(identity)

    async def _begin_without(self, partitions: list[TopicPartition]) -> None:
        """Begin where nothing is committed."""
        reset = self.settings.auto_offset_reset
        if reset == "none":
            names = ", ".join(map(str, partitions))
            text = (
                f"group '{self.settings.group_id}' has committed no offset of {names}, and auto.offset.reset is 'none'"
            )
            raise ApiError(ErrorCode.OFFSET_OUT_OF_RANGE, f"{text}. Seek, or set it to earliest or latest.")
        if reset == "earliest":
            for tp in partitions:
                self._fetcher.begin(tp, timestamp=EARLIEST)
            return
        for topic in {tp.topic for tp in partitions}:
            view = await self._cluster.view(topic)
            every = [TopicPartition(topic, number) for number in sorted(view.leaders)]
            found = await self._offsets.fetch(
                every, self._ids(every), self.identity(), stable=self.settings.read_committed
            )
            committed = {
                tp.partition for tp, at in found.items() if isinstance(at, OffsetAndMetadata) and at.offset >= 0
            }
            seen = None if self._first_seen is None else self._first_seen.get(topic, frozenset())
            for tp in partitions:
                if tp.topic == topic:
                    later = appeared_later(tp.partition, view, committed, seen)
                    self._fetcher.begin(tp, timestamp=EARLIEST if later else LATEST)

    async def _watch_gates(self) -> None:
        """Ask how far the group has come in partitions that gates of ours wait on, until they are open."""
        silent: dict[TopicPartition, int] = {}
        while waits := self._fetcher.waits():
            with suppress(AnabranchError, OSError):
                found = await self._offsets.fetch(
                    waits, self._ids(waits), self.identity(), stable=self.settings.read_committed
                )
                reached = {tp: at.offset for tp, at in found.items() if isinstance(at, OffsetAndMetadata)}
                self._heard({tp: offset for tp, offset in reached.items() if offset >= 0})
                # Where nothing is committed, there is nothing to read before the start of the log, nor at all if its
                # reader has had it for as long as it may take between two polls (ADR 0018).
                now_ms = _now_ms()
                silent = {tp: silent.get(tp, now_ms) for tp, offset in reached.items() if offset < 0}
                overdue = [tp for tp in silent if now_ms - silent[tp] >= self.settings.max_poll_interval_ms]
                self._heard(dict.fromkeys(overdue, BEYOND))
                if starts := dict.fromkeys(silent.keys() - overdue, EARLIEST):
                    self._heard({tp: at.offset for tp, at in (await self._cluster.offsets(starts)).items()})
            await asyncio.sleep(GATE_INTERVAL_MS / 1000)

    def _heard(self, reached: Mapping[TopicPartition, int]) -> None:
        """Take in how far others have come."""
        positions: dict[str, dict[int, int]] = {}
        for tp, offset in reached.items():
            positions.setdefault(tp.topic, {})[tp.partition] = offset
        for topic, known in positions.items():
            self._fetcher.committed_elsewhere(topic, known)
        if positions:
            self._host.happened()

    # -- offsets ------------------------------------------------------------------------------------------------------

    async def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """What the group has committed; None where nothing is."""
        wanted = list(partitions)
        deadline = _now_ms() + self.settings.default_api_timeout_ms
        while True:
            try:
                identity = self.identity() if self._member.is_member else MemberIdentity()
                found = await self._offsets.fetch(
                    wanted, self._ids(wanted), identity, stable=self.settings.read_committed
                )
                codes = [(tp, result) for tp, result in found.items() if isinstance(result, ErrorCode)]
                if not codes:
                    return {
                        tp: at if isinstance(at, OffsetAndMetadata) and at.offset >= 0 else None
                        for tp, at in found.items()
                    }
                tp, code = codes[0]
                raise ApiError(code, f"the committed offset of {tp} cannot be read")
            except (AnabranchError, OSError) as error:
                if _is_final(error) or _now_ms() > deadline:
                    raise
            await self._epoch_or_pause(identity)

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata] | None, timeout_ms: int | None = None
    ) -> None:
        """Make offsets durable, by default the positions after everything that was handed out. One after another."""
        if offsets is None:
            offsets = {tp: OffsetAndMetadata(offset) for tp, offset in self._host.consumed().items()}
        deadline = _now_ms() + (self.settings.default_api_timeout_ms if timeout_ms is None else timeout_ms)
        async with self._committing:
            await self._commit(dict(offsets), deadline)

    async def _commit(self, pending: dict[TopicPartition, OffsetAndMetadata], deadline: int) -> None:
        began = _now_ms()
        while pending:
            identity = self.identity()
            failure: AnabranchError | OSError
            if self._subscription is not None and not self._member.is_member:
                raise _not_committed(ErrorCode.UNKNOWN_MEMBER_ID, self.settings.group_id)
            try:
                codes = await self._offsets.commit(pending, self._ids(pending), identity)
            except (AnabranchError, OSError) as error:
                if _is_final(error):
                    raise
                failure = error
            else:
                for tp, code in codes.items():
                    if code is ErrorCode.NONE:
                        self._committed[tp] = pending.pop(tp).offset
                        continue
                    if code in OUT_OF_GROUP or (code in EPOCH_STALE and self._subscription is None):
                        raise _not_committed(code, self.settings.group_id)
                    failure = ApiError(code, f"the offset of {tp} could not be committed")
                    if not (code.retriable or code in EPOCH_STALE or code in AGAIN):
                        raise failure
                    if code in TOPIC_GONE:
                        deadline = min(deadline, began + TOPIC_GONE_TIMEOUT_MS)
            if pending:
                if _now_ms() > deadline:
                    raise failure
                await self._epoch_or_pause(identity)

    def _auto_commit(self) -> None:
        if not self.settings.enable_auto_commit or (self._subscription is not None and not self._member.is_member):
            return
        now_ms = _now_ms()
        self._milestone = self._fetcher.milestone() or self._milestone
        if now_ms < self._commit_at_ms and not self._milestone:
            return
        if "commit" in self._jobs:
            return
        self._commit_at_ms = now_ms + self.settings.auto_commit_interval_ms
        self._milestone = False
        processed = self._host.consumed()
        self._job("commit", lambda: self._commit_processed(processed, self.settings.auto_commit_interval_ms))

    async def _commit_processed(self, positions: Mapping[TopicPartition, int], timeout_ms: int) -> None:
        """Commit what has changed; if it fails, say so and go on: at worst some records come twice."""
        changed = {
            tp: OffsetAndMetadata(offset) for tp, offset in positions.items() if self._committed.get(tp) != offset
        }
        if not changed:
            return
        try:
            await self.commit(changed, timeout_ms)
        except (AnabranchError, OSError) as error:
            _log.warning("group '%s': positions were not committed: %s", self.settings.group_id, error)

    def _ids(self, partitions: Iterable[TopicPartition]) -> dict[str, UUID]:
        owned = {one.topic: one.topic_id for one in self._member.owned if one.topic_id != NO_TOPIC_ID}
        found: dict[str, UUID] = {}
        for topic in {tp.topic for tp in partitions}:
            view = self._fetcher.view(topic)
            found[topic] = owned.get(topic) or (NO_TOPIC_ID if view is None else view.topic_id)
        return found

    async def _epoch_or_pause(self, asked_as: MemberIdentity) -> None:
        """Wait a little; less, if a heartbeat changes the member's epoch."""
        until = _now_ms() + self.settings.retry_backoff_ms
        while _now_ms() < until and self.identity() == asked_as:
            await asyncio.sleep(min(0.02, self.settings.retry_backoff_ms / 1000))

    # -- tasks --------------------------------------------------------------------------------------------------------

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _job(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` unless work of that name is under way."""
        if name in self._jobs or self._closed:
            return
        task = self._jobs[name] = asyncio.get_running_loop().create_task(work())

        def ended(task: asyncio.Task[None]) -> None:
            del self._jobs[name]
            if not task.cancelled() and (error := task.exception()) is not None:
                self._error = error if isinstance(error, AnabranchError) else AnabranchError(repr(error))
                self._error.__cause__ = error
                self._host.happened()

        task.add_done_callback(ended)


def appeared_later(partition: int, view: TopicView, committed: Collection[int], seen: Collection[int] | None) -> bool:
    """Whether a partition without a committed offset appeared after its group first subscribed to the topic.

    `committed`: partitions of the topic with an offset of the group; `seen`: those there were when this member began.
    """
    if seen is not None and partition not in seen:
        return True
    if not committed:
        return False
    if view.elastic:
        return partition >= view.lineage.initial
    return partition > max(committed)


def _member(settings: GroupSettings) -> Member:
    common = MemberSettings(
        settings.group_id,
        settings.group_instance_id,
        settings.client_rack,
        settings.max_poll_interval_ms,
        settings.retry_backoff_ms,
        settings.retry_backoff_max_ms,
    )
    if settings.group_protocol == "classic":
        return ClassicMember(
            common,
            strategies=settings.partition_assignment_strategy,
            session_timeout_ms=settings.session_timeout_ms,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            metadata_max_age_ms=settings.metadata_max_age_ms,
        )
    return ConsumerMember(
        common,
        str(uuid4()),
        server_assignor=settings.group_remote_assignor,
        local_assignors=settings.group_local_assignors,
    )


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


def _is_final(error: Exception) -> TypeGuard[ApiError]:
    """Whether asking again cannot help."""
    if not isinstance(error, ApiError):
        return False
    return not (error.retriable or error.code in EPOCH_STALE or error.code in OUT_OF_GROUP or error.code in AGAIN)


def _not_committed(code: ErrorCode, group_id: str) -> ApiError:
    text = f"offsets were not committed: this consumer is no member of group '{group_id}' any more"
    return ApiError(code, f"{text}, and its partitions may be others'. Poll more often, or raise max.poll.interval.ms.")


def _names(partitions: Iterable[Owned]) -> tuple[TopicPartition, ...]:
    return tuple(owned.name for owned in sorted(partitions))


def _facts(info: TopicInfo) -> TopicFacts:
    return TopicFacts(info.name, info.topic_id, len(info.partitions))


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
