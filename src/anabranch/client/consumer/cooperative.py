"""Consuming without keys (ADR 0053): several members of a group read one partition, in no order.

The member joins its group as any member does, for its heartbeats and its epoch, and what it is assigned does not
matter: it claims slices of all partitions of its subscription, or of those that were assigned by hand. What is done of
a slice is committed as ranges of offsets; a range that another member holds is refused, and dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from uuid import UUID

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.cluster.metadata import Cluster
from anabranch.client.consumer.commits import TOPIC_GONE_TIMEOUT_MS
from anabranch.client.consumer.driver import FetchingDriver
from anabranch.client.consumer.group import Group
from anabranch.client.consumer.group_context import AGAIN, EPOCH_STALE, OUT_OF_GROUP, TOPIC_GONE, is_final
from anabranch.client.consumer.offsets import OffsetAndMetadata
from anabranch.client.consumer.record import Record
from anabranch.client.consumer.slice_fetches import SliceFetches
from anabranch.client.consumer.unfinished import Unfinished, record_of
from anabranch.client.settings import ConsumerSettings, taken
from anabranch.machines.clients.membership.steps import Event, Failed, Lost
from anabranch.machines.clients.processing import Ranges, Tracker, TrackerSettings
from anabranch.machines.clients.slices import Part, SliceLedger
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock

PARTS_AT_A_TIME = 1_000
"""Parts of slices in one commit."""
REFUSED_AT_A_TIME = 100
"""Slices that are dropped at a time: each drop looks at all records that are ready."""
SLICES_MANY = 1_000
"""With so many slices in hand, automatic commits are not put off for long: a leader gives a member at most 10,000."""
MANY_COMMIT_INTERVAL_MS = 500

_log = logging.getLogger("anabranch.client")


class _Refused:
    """The parts of one commit that other members hold. Their slices are dropped many at a time."""

    def __init__(self, ledger: SliceLedger) -> None:
        self.parts: list[Part] = []
        self._ledger = ledger
        self._dropped = 0

    def add(self, part: Part) -> None:
        """Note a part, whose slice is dropped soon."""
        self.parts.append(part)
        if len(self.parts) - self._dropped >= REFUSED_AT_A_TIME:
            self.drop()

    def drop(self) -> None:
        """Drop the slices: before the commit waits, and at its end."""
        self._ledger.refused(*self.parts[self._dropped :])
        self._dropped = len(self.parts)


class CooperativeGroup(Group):
    """A membership whose assignment is not read, and the commits of slices."""

    def __init__(
        self, settings: ConsumerSettings, cluster: Cluster, driver: FetchingDriver, *, clock: Clock, chance: Chance
    ) -> None:
        settings = replace(settings, share="any")  # Where that is said of an assignment, too.
        super().__init__(settings, cluster, driver.fetcher, driver, clock=clock, chance=chance)
        self.ledger = SliceLedger(Tracker(taken(TrackerSettings, settings), ordered=False))
        self.fetches = SliceFetches(
            settings, cluster, driver, driver.handout, self._context, self.ledger, self._driver, self._commit_quietly
        )
        self._committing = asyncio.Lock()
        self._committed_ms = 0
        """When the last automatic commit began."""
        self._passed_ms = 0
        """When the last commit of slices without records began."""

    # -- membership ----------------------------------------------------------------------------------------------------

    async def _carry_out(self, event: Event) -> None:
        try:
            if isinstance(event, Lost):
                self.ledger.fenced()
            elif isinstance(event, Failed):
                raise event.error
        finally:
            self._member.done(event, self._context.now_ms())
            self._context.changed.set()

    async def attend(self) -> None:
        """Carry out events, and begin to commit when that is due."""
        await self._carry_out_events()
        self.raise_error()
        if self.fetches.failure is not None:
            failure, self.fetches.failure = self.fetches.failure, None
            raise failure
        self._begin_commits(self._context.now_ms())

    def _begin_commits(self, now_ms: int) -> None:
        if not self._member.is_member:
            return
        if self._settings.enable_auto_commit and now_ms >= self._commit_due_ms:
            self._committed_ms = now_ms
            self._context.job("commit", self._commit_quietly)
        elif self.ledger.has_passed and now_ms >= self._passed_due_ms:
            self._passed_ms = now_ms
            self._context.job("passed", self._commit_passed)

    @property
    def _commit_due_ms(self) -> int:
        """When the next automatic commit is due."""
        interval_ms = self._settings.auto_commit_interval_ms
        if len(self.ledger) >= SLICES_MANY:
            interval_ms = min(interval_ms, MANY_COMMIT_INTERVAL_MS)
        return self._committed_ms + interval_ms

    @property
    def _passed_due_ms(self) -> int:
        """When the next commit of slices without records is due: they say nothing of the application's work."""
        return self._passed_ms + self._settings.retry_backoff_max_ms

    def next_attendance_ms(self) -> int | None:
        """Return the time at which `attend` is due even without a change."""
        jobs, due = self._context.jobs, []
        if self._member.is_member:
            if self._settings.enable_auto_commit and "commit" not in jobs:
                due.append(self._commit_due_ms)
            if self.ledger.has_passed and "passed" not in jobs:
                due.append(self._passed_due_ms)
        return min(due, default=None)

    async def unsubscribe(self) -> None:
        """Commit what is done, and leave; what is not done goes to others."""
        if self._settings.enable_auto_commit and self._context.subscription is not None:
            await self._commit_quietly()
        self.ledger.fenced()
        await super().unsubscribe()

    async def close(self, *, leave: bool | None, timeout_ms: int) -> None:
        """Commit what is done, give the rest back, and leave."""
        if self._settings.enable_auto_commit and self._member.is_member:
            await self._commit_quietly(timeout_ms)
        if self._member.is_member:
            await self.fetches.end(self.ledger.leave_out(lambda tp: False))
        await super().close(leave=leave, timeout_ms=timeout_ms)

    # -- commits -------------------------------------------------------------------------------------------------------

    def to_commit(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Refuse: after an abort, what is done could not be undone here, and would go with the next transaction."""
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            "a consumer with share 'any' has no offsets to commit: send the ranges_of the records that you have "
            "processed, OffsetAndMetadata(-1, ranges=...), and once the transaction is committed, commit(ranges=...)",
        )

    def ranges_of(self, records: Iterable[Record]) -> dict[TopicPartition, Ranges]:
        """Return the offsets of records in hand, with those without a record that belong to them."""
        return self.ledger.ranges_of((TopicPartition(it.topic, it.partition), it.offset) for it in records)

    async def commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata] | None,
        ranges: Mapping[TopicPartition, Ranges] | None = None,
    ) -> None:
        """Commit what is done, or these ranges of slices in hand.

        Raises INVALID_RECORD_STATE, after all else is committed, if some of it is with other members.
        """
        if offsets is not None:
            text = "a consumer with share 'any' commits what is done, or ranges of its slices, and no offsets"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        refused = await self.commit_parts(self.ledger.done() if ranges is None else self.ledger.parts_of(ranges))
        if refused:
            text = ", ".join(f"{part.start} to {part.end} of {part.tp}" for part in refused[:5])
            raise ApiError(
                ErrorCode.INVALID_RECORD_STATE,
                f"offsets {text} were not committed: other members have them, as this one held them for too long",
            )

    async def commit_processed(self, timeout_ms: int | None = None) -> None:
        """With automatic commits, commit what is done."""
        if self._settings.enable_auto_commit and self._member.is_member:
            await self._commit_quietly(timeout_ms)

    async def _commit_quietly(self, timeout_ms: int | None = None) -> None:
        """Commit what is done; a failure is logged: at worst some records come twice."""
        await self._commit_parts_quietly(self.ledger.done(), timeout_ms)

    async def _commit_passed(self) -> None:
        """Commit what had no records, also where the application commits by hand: it was handed nothing of that."""
        await self._commit_parts_quietly(self.ledger.passed())

    async def _commit_parts_quietly(self, parts: Sequence[Part], timeout_ms: int | None = None) -> None:
        try:
            refused = await self.commit_parts(parts, timeout_ms)
        except (AnabranchError, OSError) as error:
            _log.warning("group '%s': slices were not committed: %s", self._context.group_id, error)
            return
        for part in refused:
            text = "group '%s': offsets %d to %d of %s are with another member, and come twice"
            _log.warning(text, self._context.group_id, part.start, part.end, part.tp)

    async def commit_parts(self, parts: Sequence[Part], timeout_ms: int | None = None) -> list[Part]:
        """Commit parts of slices; return those that other members hold, which are dropped.

        Raises `ApiError` if it fails.
        """
        context = self._context
        ids = self.fetches.topic_ids  # While this waits for its turn, a topic may be created again.
        deadline = context.now_ms() + (self._settings.default_api_timeout_ms if timeout_ms is None else timeout_ms)
        refused = _Refused(self.ledger)
        async with self._committing:
            try:
                await self._commit_in_turn(parts, ids, deadline, refused)
            finally:
                refused.drop()
        return refused.parts

    async def _commit_in_turn(
        self, parts: Sequence[Part], ids: Mapping[str, UUID], deadline: int, refused: _Refused
    ) -> None:
        context = self._context
        began_ms = context.now_ms()
        work = deque(_requests(parts))
        while work:
            pending = work.popleft()
            identity = context.identity()
            failure: AnabranchError | OSError
            if not self._member.is_member:
                raise _not_committed(ErrorCode.UNKNOWN_MEMBER_ID, context.group_id)
            commits = {tp: OffsetAndMetadata(-1, ranges=_ranges(some)) for tp, some in pending.items()}
            try:
                codes = await context.offsets.commit(commits, ids, identity)
            except (AnabranchError, OSError) as error:
                if is_final(error):
                    raise
                failure, codes = error, {}
            else:
                failure = ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, "the coordinator's response lacks partitions")
            for tp, code in codes.items():
                some = pending.pop(tp)
                if code is ErrorCode.NONE:
                    self.ledger.committed(*some)
                elif code is ErrorCode.INDIVIDUAL_COMMIT_TOO_OLD:
                    self.ledger.drop_below(tp, context.offsets.stable[tp])
                    again = [part for part in some if part.end >= context.offsets.stable[tp]]
                    work.extend(_requests(_from(again, context.offsets.stable[tp])))
                elif code is ErrorCode.INVALID_RECORD_STATE:
                    if len(some) > 1:  # By halves, to find out which.
                        middle = len(some) // 2
                        work.extend({tp: half} for half in (some[:middle], some[middle:]))
                    else:
                        refused.add(some[0])
                elif code in OUT_OF_GROUP:
                    raise _not_committed(code, context.group_id)
                else:
                    failure = ApiError(code, f"slices of {tp} could not be committed")
                    if code in TOPIC_GONE:
                        deadline = min(deadline, began_ms + TOPIC_GONE_TIMEOUT_MS)
                    if not (code.retriable or code in EPOCH_STALE or code in AGAIN):
                        raise failure
                    pending[tp] = some
            context.host.happened()
            if pending:
                if context.now_ms() > deadline:
                    raise failure
                refused.drop()
                await context.epoch_or_pause(identity)
                work.appendleft(pending)


class SliceRecords(Unfinished):
    """The records of slices that the application has, or will have."""

    def __init__(
        self, settings: ConsumerSettings, driver: FetchingDriver, group: CooperativeGroup, *, explicit: bool
    ) -> None:
        super().__init__(settings, driver.fetcher, driver.handout, driver.now_ms)
        self.tracker = group.ledger.tracker
        self._group = group
        self._explicit = explicit
        self._now = driver.now_ms
        self._handed: list[tuple[int, int]] = []
        """Leases and deliveries of the records that the last poll returned, where polling again finishes them."""

    async def fill(self, records_max: int = 0) -> bool:
        """Claim slices, as far as there is room."""
        self._group.fetches.pump()
        return False

    def hand_out(self, records_max: int) -> list[Record]:
        """Return records, and note them."""
        found: list[Record] = []
        while len(found) < records_max and (entry := self.tracker.next(self._now())) is not None:
            found.append(record_of(entry))
            if not self._explicit:
                self._handed.append((entry.lease, entry.deliveries))
        return found

    def finish_handed(self) -> int:
        """Finish what the last poll returned; return how many records do not count, as other members may have them."""
        handed, self._handed = self._handed, []
        return sum(not self.tracker.done(lease, deliveries) for lease, deliveries in handed)

    def note_progress(self) -> None:
        """Note of which slices more is done: nothing else depends on it."""
        self._group.ledger.note_done()

    def consumed(self) -> dict[TopicPartition, int]:
        """Return no positions: members with slices have none."""
        return {}

    def retain(self, assignment: Iterable[TopicPartition]) -> None:
        """Keep all slices: they do not depend on what is assigned."""

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the slices of these partitions."""
        self._group.ledger.drop(partitions)

    def wind_up(self) -> None:
        """Keep what is in hand for later polls."""


def _requests(parts: Iterable[Part]) -> Iterable[dict[TopicPartition, list[Part]]]:
    """Divide parts into commits."""
    ordered = list(parts)
    for begin in range(0, len(ordered), PARTS_AT_A_TIME):
        found: dict[TopicPartition, list[Part]] = {}
        for part in ordered[begin : begin + PARTS_AT_A_TIME]:
            found.setdefault(part.tp, []).append(part)
        yield found


def _ranges(parts: Iterable[Part]) -> Ranges:
    return sorted((part.start, part.end) for part in parts)


def _from(parts: Iterable[Part], stable: int) -> list[Part]:
    return [part._replace(start=max(part.start, stable)) for part in parts]


def _not_committed(code: ErrorCode, group_id: str) -> ApiError:
    text = f"slices were not committed: this consumer is no member of group '{group_id}' any more"
    return ApiError(code, f"{text}, and others have them. Poll more often, or raise max.poll.interval.ms.")
