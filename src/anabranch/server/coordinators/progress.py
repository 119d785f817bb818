"""What leaders ask a group's coordinator for members that fetch without keys (ADR 0053).

Whether a member is one, at its epoch; and what its group has committed of a partition. One broker holds both today; the
questions are the seam between them. ApiError where the coordinator is not there, or still reads its log.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID
from weakref import WeakKeyDictionary

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.groups.caller import Caller
from anabranch.machines.outcome import Outcome
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from anabranch.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest
from anabranch.server.coordinators.groups import Groups

if TYPE_CHECKING:  # They are loaded with the first log.
    from anabranch.machines.groups.coordinator import Coordinator
    from anabranch.machines.groups.individual import OffsetRanges
    from anabranch.machines.groups.positions import Position
    from anabranch.machines.groups.records import CoordinatorRecord
    from anabranch.machines.groups.taken import Taken

BY_NAME_VERSION = 9
"""The last version of OffsetCommit that names topics."""
FOLLOWED_MAX = 10_000
"""Partitions of groups of which one machine's transactions are followed; of the others, claims look anew at each."""


class Committed:
    """What a group has committed of a partition (`machines.partition.slices.Progress`)."""

    __slots__ = ("_ranges", "_taken", "is_known", "stable", "version")

    def __init__(
        self,
        position: Position,
        ranges: OffsetRanges,
        taken: OffsetRanges | None,
        version: Hashable,
        log_start: int,
        *,
        is_known: bool = True,
    ) -> None:
        """`taken`: what is in transactions; None without any."""
        self.stable = position.told(log_start).offset
        self.version = version
        self.is_known = is_known
        """Whether nothing is in transactions beside what was looked at; ask again otherwise."""
        self._ranges = ranges
        self._taken = taken

    def reaches(self, offset: int) -> int:
        """The lowest offset, at or above this one, that is not committed as far as one range tells."""
        return max(self.stable, self._ranges.reaches(offset))

    def passes(self, offset: int) -> int:
        """The same of what is neither committed nor in a transaction."""
        offset = self.reaches(offset)
        return offset if self._taken is None else self._taken.reaches(offset)

    def next_passed(self, offset: int) -> int | None:
        """The first offset of the first range behind an offset that is committed, or in a transaction."""
        found = self._ranges.after(offset)
        taken = None if self._taken is None else self._taken.after(offset)
        if found is None or taken is None:
            found = found or taken
            return None if found is None else found[0]
        return min(found[0], taken[0])


class _Followed(NamedTuple):
    """What is in transactions of a partition of a group, and a number of its own."""

    number: int
    taken: Taken


class _Known(NamedTuple):
    """A machine that was asked."""

    number: int
    taken: dict[tuple[str, tuple[str, int]], _Followed]
    """By group and partition, those that were asked for last at the end."""


class Memberships:
    """The members and the progress of groups."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._known: WeakKeyDictionary[Coordinator, _Known] = WeakKeyDictionary()
        """The machines that were asked: one that was loaded later may know less."""
        self._numbers = itertools.count(1)

    def check_member(self, group_id: str, member_id: str, epoch: int) -> None:
        """ApiError with a sentence unless this is a member of the group, at its epoch."""
        from anabranch.machines.groups.committers import STALE_EPOCH_SINCE, commit_error

        if not group_id or not member_id or epoch < 0:
            raise ApiError(
                ErrorCode.UNKNOWN_MEMBER_ID,
                "Slices are claimed by members of a group: the fetch names no group, no member, or no epoch.",
            )
        group = self._machine(group_id).groups.get(group_id)
        error = commit_error(group, group_id, member_id, None, epoch, STALE_EPOCH_SINCE)
        if error in (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.GROUP_ID_NOT_FOUND):
            text = (
                f"{member_id} is no member of group {group_id}, or is none any more: join, and begin another session."
            )
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, text)
        if error is not ErrorCode.NONE:
            text = f"Epoch {epoch} of member {member_id} in group {group_id} is not its present one: send a heartbeat."
            raise ApiError(error, text)

    def commit_error(self, request: OffsetCommitRequest | TxnOffsetCommitRequest) -> ErrorCode:
        """The error with which the coordinator refuses all of a commit; NONE if it accepts it."""
        from anabranch.machines.groups.committers import request_error

        return request_error(self._machine(request.group_id).groups.get(request.group_id), request)

    def undisturbed(self, group_id: str) -> AbstractAsyncContextManager[None]:
        """For a block that asks about a group, and awaits nothing: what is decided of it in a thread is done before."""
        return self._groups.shard_of(group_id).undisturbed()

    def live(self, group_id: str) -> Callable[[str], bool]:
        """A function that tells whether a member is still in the group."""
        group = self._machine(group_id).groups.get(group_id)
        members = {} if group is None else group.members
        return members.__contains__

    def committed(self, group_id: str, topic: str, topic_id: UUID, partition: int, log_start: int) -> Committed | None:
        """What the group has committed; None where it has committed nothing. ApiError where it shares by key.

        A position that the coordinator wrote is the log start at least, as commits and fetches of offsets take it.
        """
        from anabranch.machines.groups.classic import ClassicGroup
        from anabranch.machines.groups.taken import Taken

        machine = self._machine(group_id)
        if not machine.settings.individual_commits:
            raise ApiError(
                ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED,
                "This broker takes no commits by ranges, which slices need: accept.individual.commit is false.",
            )
        position = machine.offsets.current(group_id, topic, partition)
        group = machine.groups.get(group_id)
        sharers = {} if group is None or isinstance(group, ClassicGroup) else group.sharers.get((topic_id, partition))
        if sharers:
            raise ApiError(
                ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
                f"Members of group {group_id} share {topic}-{partition} by key, as {min(sharers)}: either all share "
                "without keys, or none.",
            )
        if position is None:
            return None
        if position.frontier is not None:
            raise ApiError(
                ErrorCode.INCONSISTENT_GROUP_PROTOCOL,
                f"Group {group_id} has shared {topic}-{partition} by key: its keys stand at different offsets. Use "
                "another group, or reset its offsets.",
            )
        known = self._known.get(machine)
        if known is None:
            known = self._known[machine] = _Known(next(self._numbers), {})
        at = topic, partition
        ranges = machine.offsets.individual.of(group_id, at, position)
        followed = known.taken.pop((group_id, at), None)
        if followed is None:
            if not machine.offsets.may_be_taken(group_id, at):
                return Committed(position, ranges, None, (known.number, position.ranges_since, 0), log_start)
            followed = _Followed(next(self._numbers), Taken())
            while len(known.taken) >= FOLLOWED_MAX:
                del known.taken[next(iter(known.taken))]
        known.taken[group_id, at] = followed
        number, taken = followed
        members = () if group is None else group.members
        is_known = taken.look(machine.offsets, group_id, at, position, members)
        version = known.number, position.ranges_since, number, taken.lapses
        return Committed(position, ranges, taken.ranges, version, log_start, is_known=is_known)

    async def begin(self, group_id: str, member_id: str, epoch: int, at: TopicPartition, offset: int) -> None:
        """Have a group that has committed nothing of a partition begin at an offset, durably; the first call counts."""
        await self._groups.ensure_individual()
        part = OffsetCommitRequestPartition(
            partition_index=at.partition, committed_offset=offset, committed_metadata=""
        )
        request = OffsetCommitRequest(
            group_id=group_id,
            generation_id_or_member_epoch=epoch,
            member_id=member_id,
            topics=[OffsetCommitRequestTopic(name=at.topic, partitions=[part])],
        )

        def decide(machine: Coordinator, now_ms: int) -> Outcome[OffsetCommitResponse | None, CoordinatorRecord]:
            if machine.offsets.current(group_id, at.topic, at.partition) is not None:
                return Outcome(None)
            return machine.offset_commit(request, Caller("", "", BY_NAME_VERSION, "", 0), now_ms)

        answer = await self._groups.shard_of(group_id).submit(decide)
        code = ErrorCode.NONE if answer is None else ErrorCode.of(answer.topics[0].partitions[0].error_code)
        if code is not ErrorCode.NONE:
            raise ApiError(code, f"Group {group_id} could not begin at offset {offset} of {at}.")

    def _machine(self, group_id: str) -> Coordinator:
        return self._groups.shard_of(group_id).machine
