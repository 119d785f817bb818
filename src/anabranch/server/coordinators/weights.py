"""What decisions of group coordinators look at beside what they weigh themselves (`machines.groups.weights`).

The machine weighs the partitions that a request or a timer concerns. Some decisions cost by the group's members, or by
what a group has committed:

    a member comes, goes, or changes    all members of the group are looked at; where it changes the protocol of the
                                        group, each of them is written
    a leader's assignments              are read; where the group subscribes to a resized topic for the first time, its
                                        positions in all partitions that appeared later are written
    offsets expire                      a group's are looked at together
    a resize                            1,000 positions of groups are written at a time

As there, an estimate that decides nothing, and is too large rather than too small.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any

from anabranch.machines.groups.quiet import describes_nothing, says_nothing
from anabranch.server.coordinators.shard import ON_LOOP_MAX

if TYPE_CHECKING:  # Imported when the first log is read.
    from anabranch.machines.groups.coordinator import Coordinator
    from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
    from anabranch.protocol.messages.sync_group import SyncGroupRequest

MUCH = ON_LOOP_MAX + 1
"""The weight of what is decided in a thread, however much it is."""
LOOKED_AT = 5
"""Members, or positions, that are looked at in the time in which a partition is handed out: each takes 1 to 1.6 us."""
CONVERTED = 15
"""The weight of a member of a group that changes its protocol: it takes 120 us."""
BYTES_READ = 100
"""Bytes of a leader's assignments that are read in the time in which a partition is handed out."""


def of_heartbeat(request: ConsumerGroupHeartbeatRequest) -> Callable[[Coordinator], int]:
    """The weight of a ConsumerGroupHeartbeat."""
    if says_nothing(request):
        return lambda machine: machine.weight_of_quiet(request.group_id, request.member_id)
    changes = request.member_epoch <= 0 or not describes_nothing(request)
    named = len(request.subscribed_topic_names or ()) + len(request.topic_partitions or ())

    def weigh(machine: Coordinator) -> int:
        if named > ON_LOOP_MAX:  # To weigh each of them takes long itself.
            return named
        members = of_members(machine, request.group_id) if changes else 0
        return machine.weight_of_heartbeat(request) + members + len(request.topic_partitions or ())

    return weigh


def of_sync(request: SyncGroupRequest, size: int) -> Callable[[Coordinator], int]:
    """The weight of a SyncGroup whose assignments have so many bytes."""

    def weigh(machine: Coordinator) -> int:
        led = machine.weight_of_group(request.group_id) if request.assignments else 0
        return machine.weight_of_sync(request) + led + size // BYTES_READ

    return weigh


def of_change(group_id: str) -> Callable[[Coordinator], int]:
    """The weight of whatever has a group assigned anew, or members leave."""

    def weigh(machine: Coordinator) -> int:
        group = machine.groups.get(group_id)
        members = 0 if group is None or _is_classic(group) else of_members(machine, group_id)
        return machine.weight_of_classic(group_id, None) + members

    return weigh


def of_members(machine: Coordinator, group_id: str) -> int:
    """The weight of a look at all members of a group, as one of the consumer protocol comes, goes, or changes."""
    group: Any = machine.groups.get(group_id)
    if group is None:
        return 0
    count = len(group.members)
    if _is_classic(group):  # It is converted.
        return CONVERTED * count
    ours = (member for member in group.members.values() if member.described.classic is None)
    return CONVERTED * count if len(list(islice(ours, 2))) < 2 < count else count // LOOKED_AT


def _is_classic(group: object) -> bool:
    return not hasattr(group, "target_epoch")


def of_timer(machine: Coordinator, key: Any) -> int:
    """The weight of what is decided when a timer rings."""
    match key:
        case ("settle",):
            return MUCH
        case ("expire",):
            from anabranch.machines.groups.positions import POSITION_SIZE

            positions = machine.positions
            return MUCH if positions.unread is not None else positions.size // POSITION_SIZE // LOOKED_AT
        case ("classic", str(group_id), *_):
            return machine.weight_of_timer(key) + machine.weight_of_group(group_id)
        case ("compute" | "balance", str(group_id)) | (str(), str(group_id), str()):
            return machine.weight_of_timer(key) + of_members(machine, group_id)
    return machine.weight_of_timer(key)


def of_loading(machine: Coordinator) -> int:
    """The weight of what is decided when the log is read: groups of resized topics are settled."""
    return MUCH if machine.groups or machine.positions.groups_most else machine.weight_of_loading()
