"""The leader's side of the controller's protocol: the role of a partition's leader, and the requests it serves.

The rule: a role is taken under the same lock as an append, so that every record lies in the segment of the layout
whose count its producer sent. Roles only go forward: a change of the layout comes with a new leader epoch, which never
falls (the layout falls by one where a resize was canceled); an older role is refused with FENCED_LEADER_EPOCH, and an
equal role changes nothing, so a LeaderAndIsr may arrive late or twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_LEADER_EPOCH
from anabranch.machines.controller.effects import Role, SendLeaderAndIsr
from anabranch.machines.placement import ancestor


@dataclass(frozen=True, slots=True)
class Leadership:
    """The role taken by the leader of one partition. In memory only: the controller sends it again after a start."""

    topic_id: UUID
    partition: int
    layout: int
    leader_epoch: int
    initial_partition_count: int
    undeleted_partition_count: int
    retiring: bool

    @property
    def survivor(self) -> int:
        """Where the keys of this partition live now: itself, unless it is retiring."""
        return ancestor(self.partition, self.undeleted_partition_count, self.initial_partition_count)

    def of_removed(self, partition: int) -> Leadership:
        """The role that a removed partition of the same topic would have: that of a retiring one."""
        return replace(self, partition=partition, retiring=True)


@dataclass(frozen=True, slots=True)
class Taken:
    """The effect of a LeaderAndIsr on one partition: take `leadership`, after starting `start_epoch` at the end."""

    leadership: Leadership | None
    error: ErrorCode = ErrorCode.NONE
    start_epoch: int | None = None
    """Assign this epoch at the log end before anything is appended; durable before the answer."""

    @property
    def final_end(self) -> bool:
        """Whether the log's end, as it is now, becomes the end of a segment: the log is synced before the answer.

        A power loss could else move an end that readers of the new layout already wait for.
        """
        return self.start_epoch is not None or (self.leadership is not None and self.leadership.retiring)


def take_role(
    current: Leadership | None, order: SendLeaderAndIsr, role: Role, latest_epoch: int = NO_LEADER_EPOCH
) -> Taken:
    """Decide how the leader of `role.partition` changes with a LeaderAndIsr.

    `latest_epoch` is the newest epoch in the partition's log, -1 for none: the log outlives the role. A log that is
    missing, or empty and ending below `role.start_offset`, is made anew at `role.start_offset` first.
    """
    if current is not None and current.topic_id != order.topic_id:
        return Taken(current, ErrorCode.INCONSISTENT_TOPIC_ID)
    taken = (NO_LEADER_EPOCH, role.layout) if current is None else (current.leader_epoch, current.layout)
    if role.leader_epoch < latest_epoch or (role.leader_epoch, role.layout) < taken:
        return Taken(current, ErrorCode.FENCED_LEADER_EPOCH)
    return Taken(
        Leadership(
            topic_id=order.topic_id,
            partition=role.partition,
            layout=role.layout,
            leader_epoch=role.leader_epoch,
            initial_partition_count=order.initial_partition_count,
            undeleted_partition_count=order.undeleted_partition_count,
            retiring=role.retiring,
        ),
        start_epoch=role.leader_epoch if role.leader_epoch > latest_epoch else None,
    )


def refuse_read(leadership: Leadership, count_said: int, epoch_said: int) -> ErrorCode:
    """Check the count and the `current_leader_epoch` of a fetch partition (or the epoch of a ListOffsets one)."""
    if epoch_said != NO_LEADER_EPOCH:
        if epoch_said < leadership.leader_epoch:
            return ErrorCode.FENCED_LEADER_EPOCH
        if epoch_said > leadership.leader_epoch:
            return ErrorCode.UNKNOWN_LEADER_EPOCH
    if count_said not in (COUNT_NOT_SAID, leadership.undeleted_partition_count):
        return ErrorCode.INVALID_PARTITION_METADATA
    return ErrorCode.NONE
