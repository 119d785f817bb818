"""The consumer's side of a group: membership, rebalances and committed offsets.

Revoke, assign and lost events are carried out inside `poll`, so that the application processes no records meanwhile:
records returned by earlier polls count as processed, and their positions are committed before partitions are
revoked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.client.cluster.metadata import Cluster
from anabranch.client.consumer.commits import Commits, Processed
from anabranch.client.consumer.gates import Gates
from anabranch.client.consumer.group_context import GroupContext, Host
from anabranch.client.consumer.listeners import GroupMetadata, Invoke, Shares, in_callback, invoke_here
from anabranch.client.consumer.member_driver import MemberDriver
from anabranch.client.consumer.offsets import OffsetAndMetadata
from anabranch.client.consumer.positions import Positions
from anabranch.client.consumer.record import Record
from anabranch.client.settings import ConsumerSettings
from anabranch.machines.clients.fetching import Fetcher
from anabranch.machines.clients.key_ranges import KeyRanges, places
from anabranch.machines.clients.membership.steps import (
    Assign,
    Event,
    Explain,
    Failed,
    Lost,
    Owned,
    Revoke,
    Subscription,
)
from anabranch.machines.clients.processing import Ranges
from anabranch.machines.key_ranges import without
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock

CLOSE_TIMEOUT_MS = 30_000


class Group:
    """A consumer's membership and offsets. Belongs to one event loop."""

    def __init__(
        self,
        settings: ConsumerSettings,
        cluster: Cluster,
        fetcher: Fetcher,
        host: Host,
        *,
        clock: Clock,
        chance: Chance,
    ) -> None:
        self.invoke: Invoke = invoke_here
        self._settings = settings
        self._context = GroupContext(settings, cluster, fetcher, host, clock, chance)
        self._member = self._context.member
        self._driver = MemberDriver(self._context)
        self._commits = Commits(self._context)
        self._positions = Positions(self._context, self._driver, self._commits.ended)
        self._gates = Gates(self._context, self._commits, self._flush_or_announce)
        self._listener: Any = None
        self._key_listener: Any = None
        self._carrying: asyncio.Task[None] | None = None

    # -- membership ---------------------------------------------------------------------------------------------------

    @property
    def subscription(self) -> Subscription | None:
        """Return the subscription, if any."""
        return self._context.subscription

    def subscribe(self, subscription: Subscription, listener: Any, key_listener: Any = None) -> None:
        """Subscribe as a member of the group."""
        first = self._context.subscription is None
        self._context.subscription, self._listener, self._key_listener = subscription, listener, key_listener
        self._context.fetcher.announce(enabled=hasattr(key_listener, "on_partition_key_assigned"))
        if "drive" in self._context.jobs:
            if first:
                self._driver.begin()
            else:
                self._driver.resubscribe()

    def start(self) -> None:
        """Join, if a subscription exists and the member is not running yet."""
        if self._context.subscription is not None and not self._context.closed:
            self._context.job("drive", self._driver.drive)

    async def unsubscribe(self) -> None:
        """Commit, revoke all partitions, and leave the group."""
        if self._context.subscription is None:
            return
        try:
            await self._leave(stay=None, timeout_ms=self._settings.default_api_timeout_ms)
        finally:
            self._context.subscription = None

    async def close(self, *, leave: bool | None, timeout_ms: int) -> None:
        """Commit, revoke all partitions, and leave; stop at the timeout."""
        try:
            if "drive" in self._context.jobs:
                await self._leave(stay=None if leave is None else not leave, timeout_ms=timeout_ms)
            elif self._context.subscription is None and self._settings.enable_auto_commit:
                await self._commits.commit_processed(self._commits.processed(), timeout_ms)
        finally:
            await self._context.close()

    async def _leave(self, *, stay: bool | None, timeout_ms: int) -> None:
        """Leave the group; what a listener raises meanwhile is raised when that is done."""
        self._driver.leave(stay=stay)
        failure: Exception | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_ms / 1000):
                while not self._member.has_left:
                    try:
                        await self._carry_out_events()
                    except Exception as error:
                        failure = failure or error
                    if not self._member.has_left:
                        await self._wait_for_change()
        if failure is not None:
            raise failure

    async def _wait_for_change(self) -> None:
        """Wait a moment for a change."""
        if await self._context.changed.wait(0.05):
            self._context.changed.clear()

    def poll_began(self) -> None:
        """Report that the application has called `poll`."""
        if self._member.poll_began(self._context.now_ms()):
            self._context.changed.set()

    def poll_ended(self, since_ms: int | None = None) -> None:
        """Report that `poll` has returned, or that a handler began to work on a record at `since_ms`."""
        self._driver.poll_due(self._member.poll_ended(self._context.now_ms() if since_ms is None else since_ms))

    def refuse_in_callback(self) -> None:
        """Raise if called from within a rebalance listener: listeners must not poll."""
        if in_callback.get():
            raise ApiError(ErrorCode.INVALID_REQUEST, "a rebalance listener must not poll; return first")

    async def attend(self) -> None:
        """Carry out events, commit when due, attend to gates, and look up starting positions."""
        await self._carry_out_events()
        self.raise_error()
        self._positions.apply()
        self.look_for_positions()
        if self._gates.is_due():
            await self._carried(self._gates.attend)

    def raise_error(self) -> None:
        """Raise the error of a job, once; a position that could not be found is looked for again afterwards."""
        error, self._context.error = self._context.error, None
        if error is not None:
            raise error

    def layout_changed(self) -> None:
        """Have a member that assigns partitions learn of those that appeared or retire."""
        self._member.layout_changed()
        self._context.changed.set()

    def look_for_positions(self) -> None:
        """Look up the missing starting positions of granted partitions."""
        if self._context.error is None and self._positions.wanted():  # Otherwise that is for the application first.
            self._context.job("positions", self._positions.find)

    def next_attendance_ms(self) -> int | None:
        """Return the time at which `attend` is due even without a change."""
        return self._commits.next_ms()

    def metadata(self) -> GroupMetadata:
        """Return the consumer's identity in its group."""
        member_id, epoch, instance_id = self._context.identity()
        return GroupMetadata(self._context.group_id, epoch, member_id, instance_id)

    # -- the application's side ---------------------------------------------------------------------------------------

    async def _carry_out_events(self) -> None:
        while True:
            if self._carrying is None:
                event = self._member.take()
                if event is None:
                    return
                await self._carried(partial(self._carry_out, event))
            else:
                await self._carried(None)

    async def _carried(self, work: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        """Do work that calls listeners; if this call is cancelled, the next one waits for the end of the work."""
        if self._carrying is None:
            assert work is not None
            self._carrying = asyncio.ensure_future(self._in_callback(work))
        carrying = self._carrying
        try:
            await asyncio.shield(carrying)
        finally:
            if carrying.done():
                self._carrying = None

    async def _in_callback(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        in_callback.set(True)
        await work()

    async def _carry_out(self, event: Event) -> None:
        try:
            match event:
                case Revoke(partitions):
                    await self._revoke(_units(partitions))
                case Lost(partitions):
                    units = _units(partitions)
                    self._drop(tuple(units), {})
                    await self._call_listener("on_partitions_lost", units)
                case Assign(partitions):
                    units = _units(partitions)
                    self._context.fetcher.grant(
                        (
                            (owned.name, owned.topic_id if owned.topic_id != NO_TOPIC_ID else None)
                            for owned in sorted(partitions)
                        ),
                        {tp: keys for tp, keys in units.items() if keys},
                    )
                    await self._call_listener("on_partitions_assigned", units)
                    if self._settings.allow_key_share:
                        await self._call_key_listener("on_partition_key_assigned", units)
                case Explain(error, assignment, member_epoch):
                    for assignor in self._settings.local_assignors:
                        await self.invoke(assignor.on_assignment, (error, assignment, member_epoch))
                case Failed(error):
                    raise error
        finally:
            self._member.done(event, self._context.now_ms())
            self._context.changed.set()

    async def _revoke(self, units: Shares) -> None:
        names, fetcher = tuple(units), self._context.fetcher
        partly = {
            tp: keys for tp, keys in units.items() if keys and without(places(fetcher.granted_share(tp)), places(keys))
        }
        try:
            await self._context.host.settle(names, partly)
            await self._commit_processed(names)
            await self._call_listener("on_partitions_revoked", units)
            if self._settings.acknowledgement_mode == "explicit":  # The listener may have finished some records.
                await self._commit_processed(names)
        finally:
            self._drop(names, partly)

    async def _commit_processed(self, names: tuple[TopicPartition, ...]) -> None:
        if self._settings.enable_auto_commit:
            processed = self._commits.processed(names)
            await self._gates.flush(names, processed.ranges)
            await self._commits.commit_processed(processed, self._settings.default_api_timeout_ms)

    def _drop(self, names: tuple[TopicPartition, ...], partly: Mapping[TopicPartition, KeyRanges]) -> None:
        """Drop partitions, and of those in `partly` some ranges only."""
        context = self._context
        context.fetcher.withdraw(names, partly)
        whole = tuple(name for name in names if name not in partly)
        context.host.dropped(whole)
        self.given_up(names, whole)
        for name, keys in partly.items():
            context.host.narrowed(name, keys)

    def topic_made_again(self, partitions: tuple[TopicPartition, ...]) -> None:
        """Forget what was committed, or was to be, in partitions whose topic is another one now."""
        self.given_up(partitions, partitions)

    def given_up(self, names: tuple[TopicPartition, ...], whole: tuple[TopicPartition, ...]) -> None:
        """Forget what was committed, or was to be, in these partitions, or ranges of them; all of those in `whole`."""
        context = self._context
        context.note_drop(names, whole)
        self._gates.dropped(whole)
        for name in names:
            context.committed_shares.pop(name, None)
            self._positions.forget(name)
        for name in whole:
            context.committed.pop(name, None)
            context.ranged.discard(name)

    async def _call_listener(self, method: str, units: Shares) -> None:
        function = getattr(self._listener, method, None)
        if function is None and method == "on_partitions_lost":
            function = getattr(self._listener, "on_partitions_revoked", None)
        if function is not None and units:
            await self.invoke(function, (units if self._settings.allow_key_share else tuple(units),))

    async def _flush_or_announce(self, method: str, names: tuple[TopicPartition, ...]) -> None:
        await self._call_key_listener(method, {tp: self._context.fetcher.granted_share(tp) for tp in names})

    async def _call_key_listener(self, method: str, units: Shares) -> None:
        function = getattr(self._key_listener, method, None)
        if function is not None and units:
            await self.invoke(function, (units if self._settings.allow_key_share else tuple(units),))

    # -- offsets ------------------------------------------------------------------------------------------------------

    def to_commit(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the offsets below which all is processed, of this member's keys."""
        return self._commits.to_commit()

    def ranges_of(self, records: Iterable[Record]) -> dict[TopicPartition, Ranges]:
        """Refuse: offsets without a record belong to no member alone here, and are below a committed offset."""
        text = "ranges_of is for a consumer with share 'any'; this one has offsets_to_commit"
        raise ApiError(ErrorCode.INVALID_REQUEST, text)

    async def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the committed offsets of the group; None for a partition without one."""
        return await self._commits.committed(partitions)

    async def commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata] | None,
        ranges: Mapping[TopicPartition, Ranges] | None = None,
    ) -> None:
        """Commit offsets and ranges of them, by default what is processed. Commits run one after another."""
        await self._commits.commit(offsets, ranges=ranges)

    def processed(self) -> Processed:
        """Return what is processed now, to be committed."""
        return self._commits.processed()

    async def commit_all(self, processed: Processed) -> None:
        """Commit what was processed."""
        await self._commits.commit_all(processed)

    async def commit_processed(self, timeout_ms: int | None = None) -> None:
        """With automatic commits, commit what is processed, if this consumer is a member, or needs not be one."""
        if self._settings.enable_auto_commit and (self._context.subscription is None or self._member.is_member):
            timeout = self._settings.default_api_timeout_ms if timeout_ms is None else timeout_ms
            processed = self._commits.processed()
            await self._gates.flush(self._context.fetcher.assignment, processed.ranges)
            await self._commits.commit_processed(processed, timeout)


def _units(partitions: Iterable[Owned]) -> Shares:
    return {owned.name: owned.keys for owned in sorted(partitions)}
