"""The memory of members' metadata: a bound for each request and one for all groups of a broker.

A member's metadata and assignment are whatever its client sends, and stay as long as the member does. Admission adds up
the requests that were let through since the groups were last counted, which is more than they hold, for a member sends
its metadata again and again; when that sum passes the bound the groups are counted anew, at most once in
COUNT_INTERVAL_S. The rule: what is held never passes the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from anabranch.runtime.events import EventLimit, EventLogger

if TYPE_CHECKING:
    from anabranch.machines.groups.coordinator import Coordinator
    from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
    from anabranch.protocol.messages.join_group import JoinGroupRequest
    from anabranch.protocol.messages.sync_group import SyncGroupRequest

events = EventLogger("groups")
COUNT_INTERVAL_S = 1.0
WARNING_INTERVAL_S = 10.0
SMALL_SIZE = 1024
"""Metadata up to this size is always admitted: the number of members is its bound."""


def join_size(request: JoinGroupRequest) -> int:
    """The bytes that a JoinGroup leaves with its group."""
    return sum(len(it.name) + len(it.metadata) for it in request.protocols)


def sync_size(request: SyncGroupRequest) -> int:
    """The bytes that a SyncGroup leaves with its group."""
    return sum(len(it.assignment) for it in request.assignments)


def heartbeat_size(request: ConsumerGroupHeartbeatRequest) -> int:
    """The bytes that a ConsumerGroupHeartbeat leaves with its group."""
    named = sum(map(len, request.subscribed_topic_names or ()))
    return named + sum(len(it.metadata_bytes) for it in request.client_assignors or ())


def held_by(machines: Iterable[Coordinator]) -> int:
    """The bytes that the members of all groups hold."""
    return sum(
        _member_size(member) for machine in machines for group in machine.groups.values() for member in _members(group)
    )


def _members(group: Any) -> Iterable[Any]:
    members: Iterable[Any] = group.members.values()
    return members


def _member_size(member: Any) -> int:
    protocols = getattr(member, "protocols", None)
    if protocols is not None:
        return len(member.assignment) + sum(len(name) + len(metadata) for name, metadata in protocols)
    said = member.described
    held = sum(map(len, said.topics)) + sum(len(it.metadata) for it in said.client_assignors)
    if said.classic is not None:
        held += sum(len(name) + len(metadata) for name, metadata in said.classic.protocols)
    return held


class MetadataAdmission:
    """Admits metadata of members, as long as there is room."""

    def __init__(self, request_max: int, total_max: int, count: Callable[[], int], clock: Callable[[], float]) -> None:
        """`count` adds up what is held; `clock` gives seconds."""
        self._request_max = request_max
        self._total_max = total_max
        self._count = count
        self._clock = clock
        self._estimate = 0
        """No less than what is held."""
        self._counted_at = float("-inf")
        self._warnings = EventLimit(WARNING_INTERVAL_S)

    def refuses(self, size: int, group_id: str) -> str:
        """The sentence that refuses metadata of `size` bytes; empty where it is admitted."""
        if size <= SMALL_SIZE:
            return ""
        if size > self._request_max:
            return self._refused(
                group_id,
                f"The metadata of a member has {size} bytes; group.member.metadata.max.bytes is {self._request_max}.",
            )
        now = self._clock()
        if self._estimate + size > self._total_max and now >= self._counted_at + COUNT_INTERVAL_S:
            self._estimate, self._counted_at = self._count(), now
        if self._estimate + size > self._total_max:
            return self._refused(
                group_id,
                f"The members of all groups hold {self._estimate} bytes of metadata, and {size} more are refused; "
                f"group.metadata.max.bytes is {self._total_max}.",
            )
        self._estimate += size
        return ""

    def _refused(self, group_id: str, reason: str) -> str:
        suppressed = self._warnings.admit(self._clock())
        if suppressed is not None:
            events.warning("member refused", group=group_id, reason=reason, suppressed=suppressed)
        return reason
