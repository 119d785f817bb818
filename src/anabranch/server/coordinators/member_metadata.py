"""The memory of groups, of their members and of members' metadata: a bound for each request and one for all groups.

A member's strings, metadata and assignment are whatever its client sends, and stay as long as the member does; a group
stays longer, and so may an id that was given to a member that never joins with it. Admission adds up what was let in
since the groups were last counted, which is more than they hold, for a member sends its metadata again and again; when
half of the bound is passed the groups are counted anew, at most once in COUNT_INTERVAL_S, and in steps where they are
many. The rule: what clients add never passes the bound. Partitions that members are assigned are found by the next
count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from anabranch.base.limits import CLIENT_ASSIGNORS_MAX
from anabranch.base.memory import text_size
from anabranch.runtime.events import EventLimit, EventLogger

if TYPE_CHECKING:
    from anabranch.machines.groups.consumer.group import Assignment
    from anabranch.machines.groups.coordinator import Coordinator
    from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
    from anabranch.protocol.messages.join_group import JoinGroupRequest
    from anabranch.protocol.messages.sync_group import SyncGroupRequest

events = EventLogger("groups")
COUNT_INTERVAL_S = 1.0
COUNT_INTERVAL_MAX_S = 60.0
"""How long the groups are not counted although there is room enough: groups may have been loaded."""
COUNTED_AT_ONCE_MAX = 5_000
COUNTED_PER_STEP = 1_000
GROUP_SIZE = 2_500
MEMBER_SIZE = 2_500
"""Bytes of memory for a group and for a member, without metadata."""
PENDING_SIZE = 1_000
"""Bytes of memory for an id that a member has yet to join with, and for the timer of its session."""
MEMBER_ID_COPIES = 5
"""The id of a member, which its client may choose, comes with each request: its metadata, its target, what it has, its
timers and its connection may each have one of their own."""
ASSIGNED_SIZE = 48
"""Bytes of memory for an assigned partition, at most."""
WARNING_INTERVAL_S = 10.0
SMALL_SIZE = 1024
"""Metadata of a member that is there is always admitted up to this size: the number of members is its bound."""


def join_size(request: JoinGroupRequest, client_id: str | None) -> int:
    """The bytes that a JoinGroup leaves with its group."""
    said = (client_id, request.group_instance_id, request.protocol_type)
    return sum(map(text_size, said)) + sum(text_size(it.name) + len(it.metadata) for it in request.protocols)


def sync_size(request: SyncGroupRequest) -> int:
    """The bytes that a SyncGroup leaves with its group."""
    return sum(len(it.assignment) for it in request.assignments)


def heartbeat_size(request: ConsumerGroupHeartbeatRequest, client_id: str | None, *, names_max: int) -> int:
    """The bytes that a ConsumerGroupHeartbeat leaves with its group: none where it names too much, and is refused."""
    names, assignors = request.subscribed_topic_names or (), request.client_assignors or ()
    if len(names) > names_max or len(assignors) > CLIENT_ASSIGNORS_MAX:
        return 0
    ids = MEMBER_ID_COPIES * text_size(request.member_id) + text_size(client_id)
    said = (request.instance_id, request.rack_id, request.subscribed_topic_regex, request.server_assignor)
    if not (names or assignors or any(said)):  # As nearly always.
        return ids
    texts = (*said, *names, *(it.name for it in assignors))
    return ids + sum(map(text_size, texts)) + sum(len(it.metadata_bytes) for it in assignors)


def held_by(machines: Iterable[Coordinator]) -> Iterator[int]:
    """The bytes that each group takes and each of its members, one after the other, those that join yet included."""
    for machine in machines:
        for group in list(machine.groups.values()):
            yield GROUP_SIZE + text_size(group.group_id) + text_size(getattr(group, "protocol_type", None))
            for member_id in list(getattr(group, "pending", ())):
                yield PENDING_SIZE + text_size(member_id)
            members: Any = group.members
            targets: Any = getattr(group, "targets", {})
            for member_id, member in list(members.items()):
                yield MEMBER_SIZE + _member_size(member, targets.get(member_id, ()))


def _member_size(member: Any, target: Assignment) -> int:
    protocols = getattr(member, "protocols", None)
    if protocols is not None:
        held = sum(map(text_size, (member.member_id, member.client_id, member.instance_id)))
        return held + len(member.assignment) + _protocols_size(protocols)
    said = member.described
    strings = (said.client_id, said.instance_id, said.rack_id, said.regex, said.server_assignor)
    held = MEMBER_ID_COPIES * text_size(member.member_id) + sum(map(text_size, (*strings, *said.topics)))
    held += sum(text_size(it.name) + len(it.metadata) for it in said.client_assignors)
    if said.classic is not None:
        held += _protocols_size(said.classic.protocols)
    partitions = sum(len(numbers) for part in (member.assigned, member.revoking, target) for _, numbers in part)
    return held + ASSIGNED_SIZE * partitions


def _protocols_size(protocols: Iterable[tuple[str, bytes]]) -> int:
    return sum(text_size(name) + len(metadata) for name, metadata in protocols)


class MetadataAdmission:
    """Admits groups, members and their metadata, as long as there is room."""

    def __init__(
        self, request_max: int, total_max: int, count: Callable[[], Iterable[int]], clock: Callable[[], float]
    ) -> None:
        """`count` gives what is held, group by group and member by member; `clock` gives seconds."""
        self._request_max = request_max
        self._total_max = total_max
        self._count = count
        self._clock = clock
        self._estimate = 0
        """No less than what is held."""
        self._things = 0
        """Groups and members, at most."""
        self._counted_at = float("-inf")
        self._counting: asyncio.Task[None] | None = None
        self._warnings = EventLimit(WARNING_INTERVAL_S)

    @property
    def held(self) -> int:
        """The bytes that are held: counted now where these are few, else at most so many."""
        if self._things <= COUNTED_AT_ONCE_MAX:
            self._count_anew(self._clock())
        return self._estimate

    def refuses(self, size: int, group_id: str, *, newcomer: bool = False) -> str:
        """The sentence that refuses metadata of `size` bytes; empty where it is admitted.

        A `newcomer` becomes a member with it, and perhaps founds its group.
        """
        if size > self._request_max:
            return self._refused(
                group_id,
                f"The metadata of a member has {size} bytes; group.member.metadata.max.bytes is {self._request_max}.",
            )
        if newcomer:
            size += GROUP_SIZE + MEMBER_SIZE + text_size(group_id)
        elif size <= SMALL_SIZE:
            return ""
        since = self._clock() - self._counted_at
        if since >= (COUNT_INTERVAL_S if 2 * (self._estimate + size) > self._total_max else COUNT_INTERVAL_MAX_S):
            self._count_anew(self._clock())
        if self._estimate + size > self._total_max:
            return self._refused(
                group_id,
                f"All groups and their members hold {self._estimate} bytes, and {size} more are refused; "
                f"group.metadata.max.bytes is {self._total_max}.",
            )
        self._estimate += size
        self._things += 2 * newcomer
        return ""

    def _count_anew(self, now: float) -> None:
        """Count what is held: at once where that is little work, else beside other work."""
        self._counted_at = now
        steps = self._steps(self._estimate, self._things)
        if self._things <= COUNTED_AT_ONCE_MAX:
            for _ in steps:
                pass
        elif self._counting is None:
            self._counting = asyncio.get_running_loop().create_task(self._count_beside(steps), name="count groups")

    async def _count_beside(self, steps: Iterator[None]) -> None:
        try:
            for _ in steps:
                await asyncio.sleep(0)
        finally:
            self._counting = None

    def _steps(self, before: int, things_before: int) -> Iterator[None]:
        held = things = 0
        for size in self._count():
            held += size
            things += 1
            if not things % COUNTED_PER_STEP:
                yield
        self._estimate += held - before  # With what was admitted meanwhile.
        self._things += things - things_before

    def _refused(self, group_id: str, reason: str) -> str:
        suppressed = self._warnings.admit(self._clock())
        if suppressed is not None:
            events.warning("member refused", group=group_id, reason=reason, suppressed=suppressed)
        return reason
