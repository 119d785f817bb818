"""The part of a coordinator that keeps commits by ranges in order beside the positions (`ranged_commits`, ADR 0048).

- Tombstones of ranges that positions have passed are written when those positions are durable, some at a time.
- Ranges that were loaded are compared with their positions, some at a time: what is void or passed is buried, and a
  frontier that a range touches moves.
- When a group has too many ranges in a partition it is assigned anew, at most every `ASSIGNED_ANEW_MS`, so that a gap
  that nobody works on gets an owner.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import NamedTuple, TypeVar

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import shares
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.gatekeeper import Gatekeeper
from anabranch.machines.groups.individual import Range
from anabranch.machines.groups.individual_store import BuriedRanges, IndividualCommits
from anabranch.machines.groups.offsets import Offsets, RangesFull
from anabranch.machines.groups.positions import Partition, position_record
from anabranch.machines.groups.records import CoordinatorRecord, OffsetCommitKey
from anabranch.machines.groups.transaction_ranges import Change, FoldedRanges, tombstone
from anabranch.machines.outcome import Draft, Outcome
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)

TOMBSTONES_AT_A_TIME = 500
PARTITIONS_AT_A_TIME = 100
"""Partitions whose loaded ranges one step compares with their positions."""
PAUSE_MS = 1
ASSIGNED_ANEW_MS = 30_000
KEY = ("ranges",)
FOLDED = "folded"
FOLD_KEY = ("fold",)
DURABLE_EFFECTS = (BuriedRanges, FoldedRanges)
Group = ConsumerGroup | ClassicGroup
Reply = TypeVar("Reply")


class TooManyRanges(NamedTuple):
    """Effect: log that commits of a group are refused, the gap below its ranges, and the member that owns it."""

    group_id: str
    topic: str
    partition: int
    gap: Range
    ranges: int
    owner: str
    """Of a shared partition, a sharer whose keys have the lowest offset. Empty if no member owns the gap."""


def refused(request: TxnOffsetCommitRequest, code: ErrorCode) -> TxnOffsetCommitResponse:
    """The answer to a request of which nothing counts."""
    return TxnOffsetCommitResponse(
        topics=[
            TxnOffsetCommitResponseTopic(
                name=topic.name,
                partitions=[
                    TxnOffsetCommitResponsePartition(partition_index=it.partition_index, error_code=code)
                    for it in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


class RangesLost(NamedTuple):
    """Effect: log that a group has committed ranges, and that their log has none; once for all groups of a shard."""

    group_id: str
    topic: str
    partition: int


class RangedCommits:
    """Commits by ranges of all groups of a shard."""

    def __init__(self, groups: dict[str, Group], offsets: Offsets, keeper: Gatekeeper) -> None:
        self._groups = groups
        self._offsets = offsets
        self._keeper = keeper
        self._assigned_anew: dict[str, int] = {}
        """By group: when it was last assigned anew for its ranges."""
        self.due: dict[str, None] = {}
        """Groups to be assigned anew after the present decision."""
        self._unstable: dict[tuple[str, Partition], None] = {}
        """Partitions that are compared when the transactions have ended that have committed an offset there."""
        self.is_log_empty = False
        """Whether the log of ranges has never had a record, as far as could be seen when it was loaded."""
        self._unsearched: list[str] = []
        """Groups that may tell, by a position that ranges go with, that the log is gone."""

    @property
    def _held(self) -> IndividualCommits:
        return self._offsets.individual

    def burying(self, outcome: Outcome[Reply, CoordinatorRecord]) -> Outcome[Reply, CoordinatorRecord]:
        """The outcome, with the effect that writes the tombstones of ranges that its positions bury."""
        if not self._held or not outcome.records:
            return outcome
        groups = [record.key.group for record in outcome.records if type(record.key) is OffsetCommitKey]
        if not groups or outcome.producer is not None:
            return outcome
        effect = BuriedRanges(groups[0], self._held.applied + len(groups))
        return replace(outcome, effects=(*outcome.effects, effect))

    def decide_durable(self, effect: BuriedRanges | FoldedRanges) -> Outcome[None, CoordinatorRecord]:
        """Delete what is not needed any more, as all that was decided before an effect is durable."""
        return self._tombstones(effect) if isinstance(effect, BuriedRanges) else self._folded(effect)

    def _tombstones(self, buried: BuriedRanges) -> Outcome[None, CoordinatorRecord]:
        draft: Draft[CoordinatorRecord] = Draft()
        draft.write(*self._held.tombstones(buried.number, TOMBSTONES_AT_A_TIME))
        if self._held.has_graves(buried.number):
            draft.perform(buried)
        return draft.outcome(None)

    def loaded(self, draft: Draft[CoordinatorRecord], now_ms: int) -> None:
        """Begin to compare the ranges that were loaded with their positions."""
        self._held.loaded()
        if self.is_log_empty:
            self._unsearched = sorted(self._offsets.positions.groups())
        if self._held or self._unsearched:
            draft.set_timer(KEY, now_ms)
        if self._offsets.in_transactions.decided:
            draft.set_timer(FOLD_KEY, now_ms)

    def decide_checks(self, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """Compare some loaded ranges with their positions."""
        draft: Draft[CoordinatorRecord] = Draft()
        held, offsets = self._held, self._offsets
        some = list(islice(held.unchecked, PARTITIONS_AT_A_TIME))
        for group_id, partition in some:
            del held.unchecked[group_id, partition]
            position = offsets.current(group_id, *partition)
            held.follow(group_id, partition, position)
            ranges = held.of(group_id, partition, position)
            if position is None or not ranges:
                continue
            after = position.at(shares.through(position.stands, ranges.reaches), position.passes)
            if after != position and offsets.positions.unstable(group_id, *partition):
                self._unstable[group_id, partition] = None  # What is written would overtake that.
            elif after != position:
                draft.write(position_record(group_id, *partition, after))
        self._search(draft)
        if held.unchecked or self._unsearched:
            draft.set_timer(KEY, now_ms + PAUSE_MS)
        buried = held.buried()
        if buried is not None:
            draft.perform(buried)
        return draft.outcome(None)

    # -- transactions --------------------------------------------------------------------------------------------------

    def moved_by_marker(self, group_id: str, partition: Partition) -> None:
        """Note that a transaction's marker has changed a position: ranges may touch it now."""
        if self._held.count_of(group_id, partition):
            self._held.unchecked[group_id, partition] = None

    def decide_marked(self, producer_id: int, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """After a transaction's end: refuse what waits for it, look at what others wait for. `decide_folds` follows."""
        draft: Draft[CoordinatorRecord] = Draft()
        purgatory = self._offsets.in_transactions.purgatory
        for group_id in list(purgatory.groups):
            for it in [it for it in purgatory.of(group_id) if it.request.producer_id == producer_id]:
                purgatory.remove(it)
                draft.answer(it.ticket, refused(it.request, ErrorCode.INVALID_PRODUCER_EPOCH))
            if group_id in purgatory:
                draft.set_timer(("purgatory", group_id), now_ms)
        self._held.unchecked |= self._unstable
        self._unstable.clear()
        if self._held.unchecked:
            draft.set_timer(KEY, now_ms)
        return draft.outcome(None)

    def decide_fold(self, change: Change, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """Fold a change of a committed transaction into its position, and into ranges.

        Ranges lie in another log: the change is deleted when what it has made is durable. The next one is folded at
        once, upon what this one has made; the timer that says so is not set if a log refuses the records.
        """
        draft: Draft[CoordinatorRecord] = Draft()
        self._offsets.fold(change, draft, now_ms)
        if change.value.offset_ranges:
            draft.perform(FoldedRanges(change.group_id, change.name))
            draft.set_timer((FOLDED, *change.name), now_ms)
        else:
            draft.write(tombstone(change))
            draft.set_timer(FOLD_KEY, now_ms)
        return draft.outcome(None)

    def _folded(self, folded: FoldedRanges) -> Outcome[None, CoordinatorRecord]:
        draft: Draft[CoordinatorRecord] = Draft()
        changes = self._offsets.in_transactions
        change = changes.folded.get(folded.name) or changes.decided.get(folded.name)
        if change is not None:
            draft.write(tombstone(change))
        return draft.outcome(None)

    def _search(self, draft: Draft[CoordinatorRecord]) -> None:
        """Look whether a group has committed ranges that are not there."""
        looked = 0
        while self._unsearched and looked < PARTITIONS_AT_A_TIME:
            group_id = self._unsearched.pop()
            for (topic, partition), position in self._offsets.positions.entries(group_id):
                looked += 1
                if position.ranges_since:
                    draft.perform(RangesLost(group_id, topic, partition))
                    self._unsearched = []
                    return

    # -- too many ------------------------------------------------------------------------------------------------------

    def full(self, group_id: str, full: RangesFull, draft: Draft[CoordinatorRecord], now_ms: int) -> None:
        """Have a group assigned anew that has too many ranges, and say who holds what lies below them."""
        last_ms = self._assigned_anew.get(group_id)
        if last_ms is not None and now_ms - last_ms < ASSIGNED_ANEW_MS:
            return
        self._assigned_anew = {it: at for it, at in self._assigned_anew.items() if now_ms - at < ASSIGNED_ANEW_MS}
        self._assigned_anew[group_id] = now_ms
        group = self._groups.get(group_id)
        owner = ""
        if group is not None:
            at = full.topic.topic_id, full.partition
            was = self._offsets.current(group_id, full.topic.name, full.partition)
            owner, _ = self._keeper.holds_up(group, self._keeper.of(group_id), at, was)
            self.due[group_id] = None
        draft.perform(TooManyRanges(group_id, full.topic.name, full.partition, full.gap, full.ranges, owner))
