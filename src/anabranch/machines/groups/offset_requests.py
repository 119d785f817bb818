"""The part of a coordinator that takes the requests for committed offsets (`offsets`)."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from typing import TypeVar

from anabranch.machines.groups import classic
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.consumer.step import Step
from anabranch.machines.groups.gatekeeper import Gatekeeper
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.ranged import RangedCommits
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.outcome import Draft, Outcome
from anabranch.protocol.messages.offset_commit import OffsetCommitRequest, OffsetCommitResponse
from anabranch.protocol.messages.offset_delete import OffsetDeleteRequest, OffsetDeleteResponse
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup, OffsetFetchResponseGroup
from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest, TxnOffsetCommitResponse

Group = ConsumerGroup | ClassicGroup
Reply = TypeVar("Reply")


class OffsetRequests:
    """OffsetCommit, TxnOffsetCommit, OffsetFetch, OffsetDelete."""

    groups: dict[str, Group]
    offsets: Offsets
    keeper: Gatekeeper
    ranged: RangedCommits
    rebalances: Counter[str]

    @abstractmethod
    def _step(self, group: ConsumerGroup, now_ms: int) -> Step: ...

    @abstractmethod
    def _read_topics(self, group: Group | None) -> frozenset[str] | None: ...

    def offset_commit(
        self, request: OffsetCommitRequest, caller: Caller, now_ms: int
    ) -> Outcome[OffsetCommitResponse, CoordinatorRecord]:
        """Make a group's progress durable."""
        outcome = self.offsets.commit(self.groups.get(request.group_id), request, caller.version, now_ms)
        if self.ranged.due:
            outcome = self._assigned_anew(outcome, now_ms)
        return self.keeper.rung(self.ranged.burying(outcome), request.group_id, now_ms)

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

    def txn_offset_commit(
        self, request: TxnOffsetCommitRequest, caller: Caller, now_ms: int
    ) -> Outcome[TxnOffsetCommitResponse, CoordinatorRecord]:
        """Make a group's progress part of a producer's transaction."""
        del caller
        return self.offsets.commit_in_transaction(self.groups.get(request.group_id), request, now_ms)

    def offset_fetch(
        self, asked: OffsetFetchRequestGroup, require_stable: bool, version: int, now_ms: int
    ) -> OffsetFetchResponseGroup:
        """Return the committed offsets of a group."""
        del now_ms
        group = self.groups.get(asked.group_id)
        return self.offsets.fetch(group, asked, require_stable=require_stable, version=version)

    def offset_delete(
        self, request: OffsetDeleteRequest, now_ms: int
    ) -> Outcome[OffsetDeleteResponse, CoordinatorRecord]:
        """Forget positions, but not of topics that members read."""
        del now_ms
        group = self.groups.get(request.group_id)
        self.keeper.positions_gone(request.group_id)
        return self.ranged.burying(self.offsets.delete(group, request, self._read_topics(group)))
