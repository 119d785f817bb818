"""The part of a coordinator that takes the requests for committed offsets, and ends transactions (`offsets`)."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import classic
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.consumer.step import Step
from anabranch.machines.groups.gatekeeper import Gatekeeper
from anabranch.machines.groups.offset_fetches import OffsetFetches
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.positions import Partition
from anabranch.machines.groups.purgatory import Waiting, size_of
from anabranch.machines.groups.ranged import RangedCommits, refused
from anabranch.machines.groups.records import CoordinatorRecord, OffsetCommitKey
from anabranch.machines.groups.settling import Settling
from anabranch.machines.groups.shared_commits import bounded
from anabranch.machines.groups.transaction_ranges import Name
from anabranch.machines.outcome import Draft, Outcome, Parked, SetTimer
from anabranch.protocol.messages.offset_commit import OffsetCommitRequest, OffsetCommitResponse
from anabranch.protocol.messages.offset_delete import OffsetDeleteRequest, OffsetDeleteResponse
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup, OffsetFetchResponseGroup
from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest, TxnOffsetCommitResponse

Group = ConsumerGroup | ClassicGroup
Reply = TypeVar("Reply")


class OffsetRequests:
    """OffsetCommit, TxnOffsetCommit, OffsetFetch, OffsetDelete, and what follows from the ends of transactions."""

    groups: dict[str, Group]
    offsets: Offsets
    keeper: Gatekeeper
    settling: Settling
    ranged: RangedCommits
    rebalances: Counter[str]

    @abstractmethod
    def _follow(self, group_id: str, partition: Partition) -> None: ...

    @abstractmethod
    def _step(self, group: ConsumerGroup, now_ms: int) -> Step: ...

    @abstractmethod
    def _read_topics(self, group: Group | None) -> frozenset[str] | None: ...

    def offset_commit(
        self, request: OffsetCommitRequest, caller: Caller, now_ms: int
    ) -> Outcome[OffsetCommitResponse, CoordinatorRecord]:
        """Make a group's progress durable."""
        group = self.groups.get(request.group_id)
        request = bounded(group, self.offsets.image, request)
        outcome = self.offsets.commit(group, request, caller.version, now_ms)
        if self.ranged.due:
            outcome = self._assigned_anew(outcome, now_ms)
        outcome = self._looking_at_purgatory(self.ranged.burying(outcome), request.group_id, now_ms)
        return self.keeper.rung(outcome, request.group_id, now_ms)

    def _assigned_anew(
        self, outcome: Outcome[Reply, CoordinatorRecord], now_ms: int
    ) -> Outcome[Reply, CoordinatorRecord]:
        """The outcome, with a new assignment of the groups that have too many ranges in a partition."""
        draft: Draft[CoordinatorRecord] = Draft()
        draft.add(outcome)
        for group_id in list(self.ranged.due):
            del self.ranged.due[group_id]
            group = self.groups.get(group_id)
            if isinstance(group, ClassicGroup):
                draft.add(classic.decide_kick(group, now_ms))
            elif group is not None and group.members:
                step = self._step(group, now_ms)
                step.next_epoch()
                step.assign()
                draft.add(step.draft)
                self.rebalances["consumer"] += 1
        return draft.outcome(outcome.reply)

    def name_ranges(self, request: TxnOffsetCommitRequest, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """Write, outside of the transaction, the positions that the request's ranges go with."""
        draft: Draft[CoordinatorRecord] = Draft()
        group = self.groups.get(request.group_id)
        draft.write(*self.offsets.named(group, bounded(group, self.offsets.image, request), now_ms))
        return draft.outcome(None)

    def txn_offset_commit(
        self, request: TxnOffsetCommitRequest, caller: Caller, ticket: Hashable, now_ms: int
    ) -> Outcome[TxnOffsetCommitResponse | Parked, CoordinatorRecord]:
        """Make a group's progress part of a producer's transaction; ranges of offsets wait for gaps below them."""
        del caller
        group = self.groups.get(request.group_id)
        request = bounded(group, self.offsets.image, request)
        if self.offsets.must_wait(group, request):
            purgatory = self.offsets.in_transactions.purgatory
            if purgatory.is_full(request.group_id) or self.offsets.room.is_short_of(size_of(request)):
                return Outcome(refused(request, ErrorCode.INVALID_COMMIT_OFFSET_SIZE))
            purgatory.add(Waiting(ticket, request))
            return Outcome(Parked(ticket))
        outcome = self.offsets.commit_in_transaction(group, request, now_ms)
        return self._looking_at_purgatory(outcome, request.group_id, now_ms)

    def _looking_at_purgatory(
        self, outcome: Outcome[Reply, CoordinatorRecord], group_id: str, now_ms: int
    ) -> Outcome[Reply, CoordinatorRecord]:
        """The outcome, with a look at the requests that may wait for it."""
        if not outcome.records or group_id not in self.offsets.in_transactions.purgatory:
            return outcome
        return replace(outcome, timers=(*outcome.timers, SetTimer(("purgatory", group_id), now_ms)))

    def _look_at_purgatory(
        self, draft: Draft[CoordinatorRecord], now_ms: int, group_ids: Collection[str] | None = None
    ) -> None:
        """Have the requests that wait looked at after this decision, of some groups or of all.

        Who sent them may be no member now, or not at that epoch, and what they are about may be deleted.
        """
        purgatory = self.offsets.in_transactions.purgatory
        for group_id in purgatory.groups if group_ids is None else group_ids:
            if group_id in purgatory:
                draft.set_timer(("purgatory", group_id), now_ms)

    def decide_purgatory(self, group_id: str, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """Answer the first request of a group that need not wait any longer."""
        purgatory = self.offsets.in_transactions.purgatory
        group = self.groups.get(group_id)
        ready = next((it for it in purgatory.of(group_id) if not self.offsets.must_wait(group, it.request)), None)
        if ready is None:
            return Outcome(None)
        purgatory.remove(ready)
        outcome = self.offsets.commit_in_transaction(group, ready.request, now_ms)
        draft: Draft[CoordinatorRecord] = Draft()
        draft.add(outcome)
        draft.producer = outcome.producer
        draft.answer(ready.ticket, outcome.reply)
        if group_id in purgatory:
            draft.set_timer(("purgatory", group_id), now_ms)
        return draft.outcome(None)

    def apply_marker(self, producer_id: int, producer_epoch: int, committed: bool) -> None:
        """End a producer's transaction."""
        del producer_epoch
        for group_id, partition in self.offsets.positions.end_transaction(producer_id, committed=committed):
            self._follow(group_id, partition)
            self.ranged.moved_by_marker(group_id, partition)
            self.settling.moved_by_marker(group_id, partition)
            self.keeper.moved_by_marker(group_id, *partition)
        self.offsets.in_transactions.end(producer_id, committed=committed)

    def marked(self, producer_id: int, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """After the marker of a transaction: go on with what waited for it. The timer `FOLD_KEY` is due then."""
        outcome = self.ranged.burying(self.ranged.decide_marked(producer_id, now_ms))
        return self.keeper.rung_by_marker(self.settling.marked(outcome, now_ms), now_ms)

    def decide_fold(self, now_ms: int, folded: Name | None = None) -> Outcome[None, CoordinatorRecord]:
        """Fold the next commit by ranges of a transaction that is committed; `folded`: the one before, if it is."""
        changes = self.offsets.in_transactions
        if folded is not None:
            changes.set_folded(folded)
        change = changes.next_decided()
        if change is None:
            return Outcome(None)
        outcome = self.ranged.burying(self.ranged.decide_fold(change, now_ms))
        return self.keeper.rung(outcome, change.group_id, now_ms)

    def offset_fetch(
        self, asked: OffsetFetchRequestGroup, require_stable: bool, version: int, now_ms: int, *, is_part: bool = False
    ) -> OffsetFetchResponseGroup:
        """Return the committed offsets of a group; `is_part` as in `OffsetFetches.fetch`."""
        group = self.groups.get(asked.group_id)
        fetches = OffsetFetches(self.offsets, partial(self.settling.is_owed, now_ms=now_ms))
        return fetches.fetch(group, asked, require_stable=require_stable, version=version, is_part=is_part)

    def committed(self, group_id: str) -> list[tuple[str, int]]:
        """Topic and partition of everything that a group has committed."""
        return [at for at, _ in self.offsets.positions.entries(group_id)]

    def offset_delete(
        self, request: OffsetDeleteRequest, now_ms: int
    ) -> Outcome[OffsetDeleteResponse, CoordinatorRecord]:
        """Forget positions, but not of topics that members read."""
        group = self.groups.get(request.group_id)
        outcome = self.offsets.delete(group, request, self._read_topics(group))
        by_name, keys = self.offsets.image.by_name, (record.key for record in outcome.records)
        gone = [(key.topic, key.partition) for key in keys if isinstance(key, OffsetCommitKey)]
        self.keeper.deleted(request.group_id, [(by_name[name].topic_id, it) for name, it in gone if name in by_name])
        return self._looking_at_purgatory(self.ranged.burying(outcome), request.group_id, now_ms)
