"""Commits of a group's offsets, one after the other: those the application requests, and automatic ones.

A commit is retried until its deadline; a member with a stale epoch waits for the next heartbeat. Automatic commits
write the positions after all records returned by earlier polls.

Where work is finished out of order, a commit has the stable offset, and the ranges done above it since the last one. A
coordinator that knows ranges says so in its answer to the first commit; of any other only the stable offset is asked.
In a partition with ranges the stable offset is committed as that of all keys: a plain offset from a consumer that is no
member of the group would have its coordinator forget the ranges above, and a range does not say whose keys it is of.

Of a shared partition the offsets of this member's ranges of keys are committed, and never a plain one: that would say
of other members' keys, too, that they are processed.

A commit is tried again under a new epoch only while the member has held its partitions all the time. A member that was
put out of its group joins again with the same id: its epoch is new, and others may have been further since. What it had
processed before would set the group back, and records would count twice whose state is committed already.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import BEGUN_HERE, OFFSET_NOT_SAID, TopicPartition
from anabranch.base.limits import RANGES_PER_COMMIT_MAX
from anabranch.client.consumer.group_context import (
    AGAIN,
    EPOCH_STALE,
    OUT_OF_GROUP,
    TOPIC_GONE,
    GroupContext,
    is_final,
)
from anabranch.client.consumer.listeners import GroupMetadata
from anabranch.client.consumer.offsets import MemberIdentity, OffsetAndMetadata
from anabranch.machines.clients.key_ranges import Piece
from anabranch.machines.clients.processing import Ranges
from anabranch.machines.keyspace import SPACE

TOPIC_GONE_TIMEOUT_MS = 2_000

_log = logging.getLogger("anabranch.client")


class Processed(NamedTuple):
    """What the application has processed: below the offsets all, above them the ranges done since the last commit."""

    offsets: Mapping[TopicPartition, int]
    ranges: Mapping[TopicPartition, Ranges]
    shares: Mapping[TopicPartition, Sequence[Piece]] = {}
    """Of shared partitions, the offsets of this member's ranges of keys."""
    drops: int = 0
    """`GroupContext.drops` when this was true."""
    returns: int = 0
    """How often commits had given ranges back by then."""


class Commits:
    """The committed offsets of one group, as read and written by this member."""

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._settings = context.settings
        self._member = context.member
        self._in_turn = asyncio.Lock()
        self._milestone = False
        self._refused: set[str] = set()
        """Topics without individual commits."""
        self._returns = 0
        """How often commits have given ranges back."""
        self._again_ms = 0
        """The time before which no automatic commit begins, whatever is due: the last one has failed."""
        self.due_ms = 0
        """The time of the next automatic commit."""

    async def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the committed offsets of the group; None for a partition without one."""
        wanted = list(partitions)
        deadline = self._context.now_ms() + self._settings.default_api_timeout_ms
        while True:
            try:
                identity = self._context.identity() if self._member.is_member else MemberIdentity()
                found = await self._context.offsets.fetch(
                    wanted, self._context.topic_ids(wanted), identity, stable=self._context.reads_stable
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
                if is_final(error) or self._context.now_ms() > deadline:
                    raise
            await self._context.epoch_or_pause(identity)

    async def commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata] | None,
        timeout_ms: int | None = None,
        ranges: Mapping[TopicPartition, Ranges] | None = None,
    ) -> None:
        """Commit offsets, then ranges of offsets that are done; by default what is processed.

        Commits run one after another.
        """
        if offsets is None and ranges is None:
            await self.commit_all(self.processed(), timeout_ms)
            return
        deadline, drops = self._deadline(timeout_ms), self._context.drops
        mine = {tp: self._of_mine(tp, at) for tp, at in (offsets or {}).items() if not self._is_said(tp, at)}
        async with self._in_turn:
            await self._commit(mine, deadline, drops)
            if ranges:
                await self._commit_ranges(ranges, deadline, drops)

    async def ended(self) -> None:
        """Wait for the commits that run: each is answered, or given up."""
        async with self._in_turn:
            pass

    def _is_said(self, tp: TopicPartition, at: OffsetAndMetadata) -> bool:
        """Whether an offset of an application is what others have committed of the keys of this member, and no more.

        To say it again would be to say that this member has come there, through which gates.
        """
        context = self._context
        if at.metadata or at.shares or at.ranges or context.fetcher.has_gone(tp, at.offset):
            return False
        if context.fetcher.share(tp):
            return not context.fetcher.to_commit_as_said(tp, at.offset)
        return context.committed.get(tp) == at.offset

    def _of_mine(self, tp: TopicPartition, at: OffsetAndMetadata) -> OffsetAndMetadata:
        """What an application's offset says of a shared partition: that of its own keys."""
        if at.shares:
            return at
        fetcher = self._context.fetcher
        steps = fetcher.to_commit_as_said(tp, at.offset)
        if not steps:  # Of a share it is never of the keys of others; others have finished these: metadata only.
            steps = [(start, end, OFFSET_NOT_SAID) for start, end in fetcher.share(tp)]
        return self._with_shares(tp, self._with_beginning(tp, at), steps)

    def _with_beginning(self, tp: TopicPartition, at: OffsetAndMetadata) -> OffsetAndMetadata:
        """Tell the next owner that the gate before an offset is closed; what an application says itself stays."""
        if at.metadata or not self._context.fetcher.begins_behind_gate(tp, at.offset):
            return at
        return at._replace(metadata=BEGUN_HERE)

    def _with_shares(self, tp: TopicPartition, at: OffsetAndMetadata, steps: Sequence[Piece]) -> OffsetAndMetadata:
        """Commit an offset for ranges of keys; a group that has committed nothing begins where this member began."""
        if not steps:
            return at
        base = self._context.committed.get(tp)
        first = self._context.fetcher.first_position(tp) if base is None else base
        return at._replace(offset=first, shares=steps)

    def _deadline(self, timeout_ms: int | None) -> int:
        return self._context.now_ms() + (self._settings.default_api_timeout_ms if timeout_ms is None else timeout_ms)

    def processed(self, partitions: Iterable[TopicPartition] | None = None) -> Processed:
        """Return what is processed, of these partitions or of all, to be committed or given back."""
        wanted, shares = self._processed(partitions)
        if not self._commits_ranges:
            return Processed(wanted, {}, shares, self._context.drops, self._returns)
        fresh = self._context.host.take_fresh(tp for tp in wanted if tp.topic not in self._refused)
        return Processed(wanted, fresh, shares, self._context.drops, self._returns)

    def to_commit(self) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return the offsets below which all is processed, of this member's keys."""
        return self._said(*self._processed(None))

    def _processed(
        self, partitions: Iterable[TopicPartition] | None
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, Sequence[Piece]]]:
        """The offsets below which all is processed, and of shared partitions those of this member's keys."""
        passed_over, has_gone = self._context.fetcher.is_sought_past_gate, self._context.fetcher.has_gone
        said = self._context.host.consumed().items()
        consumed = {tp: at for tp, at in said if not passed_over(tp) and has_gone(tp, at)}
        wanted = consumed if partitions is None else {tp: consumed[tp] for tp in partitions if tp in consumed}
        to_commit = self._context.fetcher.to_commit
        return wanted, {tp: steps for tp, offset in wanted.items() if (steps := to_commit(tp, offset))}

    def _said(
        self, offsets: Mapping[TopicPartition, int], shares: Mapping[TopicPartition, Sequence[Piece]]
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        return {
            tp: self._with_shares(tp, self._with_beginning(tp, OffsetAndMetadata(offset)), shares.get(tp, ()))
            for tp, offset in offsets.items()
        }

    @property
    def _commits_ranges(self) -> bool:
        allowed = self._settings.allow_individual_commit and self._context.host.state is None
        return allowed and self._context.offsets.takes_ranges is not False

    async def commit_all(self, processed: Processed, timeout_ms: int | None = None) -> None:
        """Commit what is processed; ranges that this coordinator, or a topic, does not take are given back.

        So are all where a commit before has given back some since these were taken: they go together the next time.
        Otherwise a later record of a key would be committed and an earlier one not, and the earlier one alone be
        delivered again.
        """
        offsets, left, drops = processed.offsets, dict(processed.ranges), processed.drops
        deadline = self._deadline(timeout_ms)
        try:
            async with self._in_turn:
                shares = processed.shares
                if processed.returns != self._returns and left:
                    self._give_back(left)
                    left = {}
                ranged = {tp for tp in offsets if tp not in shares and self._is_ranged(tp, left)}
                plain = {tp: offset for tp, offset in offsets.items() if tp not in ranged}
                await self._commit(self._said(plain, shares), deadline, drops)
                later = [tp for tp in offsets if tp in ranged or self._is_ranged(tp, left)]
                for tp in later:
                    self._check_held([tp], drops)
                    is_whole = tp not in shares and not self._context.fetcher.share(tp)
                    await self._commit_or_refuse(tp, offsets[tp], left.get(tp, ()), deadline, drops, is_whole=is_whole)
                    if tp.topic not in self._refused:
                        left.pop(tp, None)
        finally:
            if left:
                self._give_back(left)

    def _give_back(self, ranges: Mapping[TopicPartition, Ranges]) -> None:
        self._returns += 1
        self._context.host.give_back(ranges)

    def _is_ranged(self, tp: TopicPartition, fresh: Mapping[TopicPartition, Ranges]) -> bool:
        """Whether a partition's progress is committed as ranges."""
        context = self._context
        takes = context.offsets.takes_ranges is True and tp.topic not in self._refused
        return takes and tp in context.committed and (tp in fresh or tp in context.ranged)

    def _above(self, tp: TopicPartition, ranges: Ranges) -> Ranges:
        """Leave out of ranges what lies below the stable offset."""
        stable = self._context.committed[tp]
        return [(max(first, stable), last) for first, last in ranges if last >= stable]

    async def _commit_or_refuse(
        self, tp: TopicPartition, stable: int, ranges: Ranges, deadline: int, drops: int, *, is_whole: bool
    ) -> None:
        """Commit the stable offset of a partition that is no share, as that of all keys, and ranges above it."""
        committed = self._context.committed[tp]
        try:
            if is_whole and committed < stable:
                everything = [(SPACE.start, SPACE.end, stable)]
                await self._commit({tp: OffsetAndMetadata(committed, shares=everything)}, deadline, drops)
                self._check_held([tp], drops)
            if above := self._above(tp, ranges):
                await self._commit_ranges({tp: above}, deadline, drops)
        except ApiError as error:
            if error.code is not ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED:
                raise
            _log.warning("group '%s': %s; it is committed without ranges", self._context.group_id, error)
            self._refused.add(tp.topic)
            if is_whole:
                await self._commit({tp: OffsetAndMetadata(stable)}, deadline, drops)

    async def _commit_ranges(self, ranges: Mapping[TopicPartition, Ranges], deadline: int, drops: int) -> None:
        """Commit ranges on top of the committed offsets."""
        context = self._context
        missing = [tp for tp in ranges if tp not in context.committed]
        if missing:
            text = f"ranges of {', '.join(map(str, missing))} cannot be committed before an offset is"
            raise ApiError(ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED, f"{text}: commit the offset that they are above")
        if context.offsets.takes_ranges is None:  # The answer to any commit tells.
            await self._commit({tp: OffsetAndMetadata(context.committed[tp]) for tp in ranges}, deadline, drops)
        if not context.offsets.takes_ranges:
            text = f"the coordinator of group '{context.group_id}' does not take ranges of offsets"
            raise ApiError(ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED, f"{text}; commit offsets only")
        for part in _parts(ranges):
            self._check_held(part, drops)
            context.ranged.update(part)
            await self._commit(
                {tp: OffsetAndMetadata(context.committed[tp], ranges=some) for tp, some in part.items()},
                deadline,
                drops,
            )

    async def _commit(self, pending: dict[TopicPartition, OffsetAndMetadata], deadline: int, drops: int) -> None:
        """Commit what was processed when so many `drops` had been; raise if a partition was dropped since then."""
        began, said = self._context.now_ms(), dict(pending)
        while pending:
            self._check_held(pending, drops)
            identity = self._context.identity()
            failure: AnabranchError | OSError
            if self._context.subscription is not None and not self._member.is_member:
                raise _not_committed(ErrorCode.UNKNOWN_MEMBER_ID, self._context.group_id)
            try:
                codes = await self._send(pending, identity, drops)
            except (AnabranchError, OSError) as error:
                if is_final(error):
                    raise
                failure = error
            else:
                failure = _unanswered(pending)
                for tp, code in codes.items():
                    if tp not in pending:
                        continue  # Not requested.
                    is_held = not self._context.dropped_whole_since(tp, drops)
                    if code is ErrorCode.NONE:
                        at = pending.pop(tp)
                        if is_held:  # Otherwise it may say nothing of the topic that has its name now.
                            self._note(tp, at, said[tp])
                        continue
                    if code is ErrorCode.INDIVIDUAL_COMMIT_TOO_OLD and is_held:
                        self._adjust(pending, tp)
                        failure = ApiError(code, f"ranges of {tp} lie below its stable offset")
                        continue
                    if code in OUT_OF_GROUP or code in EPOCH_STALE:
                        self._member.commit_refused(code, identity.epoch, self._context.now_ms())
                        self._context.changed.set()
                    if code in OUT_OF_GROUP or (code in EPOCH_STALE and self._context.subscription is None):
                        raise _not_committed(code, self._context.group_id)
                    failure = ApiError(code, f"the offset of {tp} could not be committed")
                    if not (code.retriable or code in EPOCH_STALE or code in AGAIN):
                        raise failure
                    if code in TOPIC_GONE:
                        deadline = min(deadline, began + TOPIC_GONE_TIMEOUT_MS)
            self._context.host.happened()
            if pending:
                if self._context.now_ms() > deadline:
                    raise failure
                await self._context.epoch_or_pause(identity)

    def _check_held(self, partitions: Iterable[TopicPartition], drops: int) -> None:
        """Raise if a partition was dropped since so many `drops` had been: what is known of it is not of then."""
        dropped = [tp for tp in partitions if self._context.dropped_since(tp, drops)]
        if dropped:
            raise _given_up(dropped, self._context.group_id)

    async def _send(
        self, pending: Mapping[TopicPartition, OffsetAndMetadata], identity: MemberIdentity, drops: int
    ) -> Mapping[TopicPartition, ErrorCode]:
        """Commit offsets once; where state is kept, with its changes, all or nothing."""
        context, state = self._context, self._context.host.state
        if state is None:
            return await context.offsets.commit(pending, context.topic_ids(pending), identity)
        group = GroupMetadata(context.group_id, identity.epoch, identity.member_id, identity.instance_id)
        try:
            await state.commit(pending, group, lambda: self._check_held(pending, drops))
        except ApiError as error:
            self._check_held(pending, drops)
            if error.code in OUT_OF_GROUP or error.code in EPOCH_STALE:
                return dict.fromkeys(pending, error.code)
            raise
        return dict.fromkeys(pending, ErrorCode.NONE)

    def _note(self, tp: TopicPartition, at: OffsetAndMetadata, said: OffsetAndMetadata) -> None:
        """Note a commit that counts; `said`: what it was before parts of it were left out."""
        context, stable = self._context, self._context.offsets.stable.get(tp, -1)
        if at.shares:
            context.committed_shares[tp] = said.shares
            said_of = [step for step in at.shares if step[2] != OFFSET_NOT_SAID]
            context.note_committed_by_key(tp, max(stable, 0), said_of)
        elif at.ranges and context.fetcher.share(tp):
            context.committed[tp] = stable
        elif at.ranges:
            context.note_committed(tp, stable, by_owner=False)
        else:
            context.note_committed(tp, at.offset)

    def _adjust(self, pending: dict[TopicPartition, OffsetAndMetadata], tp: TopicPartition) -> None:
        """Leave out of a commit what lies below the stable offset that its answer told: all of that is done.

        Keys that stand below it may wait at a gate: what others have finished there does not have them go through it.
        """
        context, at, stable = self._context, pending.pop(tp), self._context.offsets.stable[tp]
        if at.shares:
            steps = [step for step in at.shares if step[2] >= stable]
            if steps:
                pending[tp] = at._replace(offset=stable, shares=steps)
            else:
                context.committed_shares[tp] = at.shares
                done = [(start, end, stable) for start, end, _ in at.shares]
                context.note_committed_by_key(tp, stable, done, by_owner=False)
            return
        if context.fetcher.share(tp):
            context.committed[tp] = stable
        else:
            context.note_committed(tp, stable, by_owner=False)
        ranges = [(max(first, stable), last) for first, last in at.ranges if last >= stable]
        if ranges:
            pending[tp] = OffsetAndMetadata(stable, ranges=ranges)

    def is_due(self) -> bool:
        """Whether an automatic commit is due: its interval is over, or a position has passed the end of a layout."""
        self._milestone = self._context.fetcher.milestone() or self._milestone
        many = self._context.host.fresh >= self._settings.max_num_ranges_to_commit and self._commits_ranges
        state = self._context.host.state
        many = many or (state is not None and state.is_due)
        return self.may_begin() and (self._milestone or many or self._context.now_ms() >= self.due_ms)

    def may_begin(self) -> bool:
        """Whether an automatic commit can begin now."""
        return self._can_begin and self._context.now_ms() >= self._again_ms

    def next_ms(self) -> int | None:
        """Return the time at which an automatic commit may be due without a change; None while none can begin."""
        if not self._can_begin:
            return None
        return self._again_ms if self._context.now_ms() < self._again_ms else self.due_ms

    @property
    def _can_begin(self) -> bool:
        return (
            self._settings.enable_auto_commit
            and (self._context.subscription is None or self._member.is_member)
            and "commit" not in self._context.jobs
        )

    def begin(self, processed: Processed) -> None:
        """Begin an automatic commit of what is processed."""
        self.due_ms = self._context.now_ms() + self._settings.auto_commit_interval_ms
        milestone, self._milestone = self._milestone, False

        async def commit() -> None:
            if not await self.commit_processed(processed, self._settings.auto_commit_interval_ms):
                self._milestone = self._milestone or milestone

        self._context.job("commit", commit)

    async def commit_processed(self, processed: Processed, timeout_ms: int) -> bool:
        """Commit what has changed; return whether that is done. A failure is logged: at worst some records come twice.

        Gates of other members may wait for the commit: it is tried again soon, and at once if it was given up since
        this member has some of the partitions no more.
        """
        state = self._context.host.state
        ahead = set(processed.ranges) if state is None else state.unflushed()
        changed = {
            tp: offset
            for tp, offset in processed.offsets.items()
            if self._is_news(tp, offset, processed) or tp in ahead
        }
        if not changed:
            return True
        shares = {tp: steps for tp, steps in processed.shares.items() if tp in changed}
        try:
            await self.commit_all(processed._replace(offsets=changed, shares=shares), timeout_ms)
        except (AnabranchError, OSError) as error:
            _log.warning("group '%s': positions were not committed: %s", self._context.group_id, error)
            if not any(self._context.dropped_since(tp, processed.drops) for tp in changed):
                pause_ms = min(self._settings.retry_backoff_max_ms, self._settings.auto_commit_interval_ms)
                self._again_ms = self._context.now_ms() + pause_ms
            return False
        return True

    def _is_news(self, tp: TopicPartition, offset: int, processed: Processed) -> bool:
        steps = processed.shares.get(tp)
        if steps is None:
            return self._context.committed.get(tp) != offset or tp in processed.ranges
        return self._context.committed_shares.get(tp) != steps or tp in processed.ranges


def _parts(ranges: Mapping[TopicPartition, Ranges]) -> Iterator[dict[TopicPartition, Ranges]]:
    """Divide ranges into requests."""
    part: dict[TopicPartition, Ranges] = {}
    room = RANGES_PER_COMMIT_MAX
    for tp, each in ranges.items():
        first = 0
        while first < len(each):
            part[tp] = each[first : first + room]
            room -= len(part[tp])
            first += len(part[tp])
            if room == 0:
                yield part
                part, room = {}, RANGES_PER_COMMIT_MAX
    if part:
        yield part


def _unanswered(partitions: Iterable[TopicPartition]) -> ApiError:
    text = f"the coordinator's response has no result for {', '.join(map(str, partitions))}"
    return ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, text)


def _given_up(partitions: Iterable[TopicPartition], group_id: str) -> ApiError:
    text = f"offsets of {', '.join(map(str, partitions))} were not committed: this member of group '{group_id}' gave"
    text += " up the partitions meanwhile, and others may be further; or their topic was created again."
    return ApiError(ErrorCode.STALE_MEMBER_EPOCH, text)


def _not_committed(code: ErrorCode, group_id: str) -> ApiError:
    text = f"offsets were not committed: this consumer is no member of group '{group_id}' any more"
    return ApiError(code, f"{text}, and its partitions may be others'. Poll more often, or raise max.poll.interval.ms.")
