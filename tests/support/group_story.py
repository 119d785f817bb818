"""What became of a group's members before something went wrong: as they told it, and as the coordinator recorded it.

An application that was given a partition which another one still has may be the victim of a coordinator that hands out
too early, or of an owner that does not know yet that it was removed. The records of the group in `__consumer_offsets`
tell which: they say, with their times, what the coordinator took each member to own, and when it removed one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from anabranch.client.sync import Consumer
from anabranch.machines.groups.consumer.group import MemberState
from anabranch.machines.groups.embedded import assigned_by_name
from anabranch.machines.groups.records import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupMemberMetadataKey,
    CoordinatorRecord,
    GroupMetadataKey,
    OffsetCommitKey,
    decode_record,
)
from anabranch.server.coordinators.shard_set import coordinator_partition

OFFSETS = "__consumer_offsets"
OFFSETS_PARTITIONS = 50
EVENTS_KEPT = 2_000
STORY_S = 30.0
"""How much of the past is told."""
READING_S = 20.0
NOBODY = "-"
"""In the place of a member: only the partitions are concerned."""


class Line(NamedTuple):
    """One thing that happened."""

    at_ns: int
    """By the monotonic clock of this machine, in ns."""
    member: str
    """The member concerned; empty for all of them."""
    numbers: frozenset[int]
    """The partitions concerned."""
    text: str


class GroupStory:
    """The newest events of one group, and what its coordinator has recorded."""

    def __init__(self, address: str, group: str, topic: str) -> None:
        self._address = address
        self._group = group
        self._topic = topic
        self._events: deque[Line] = deque(maxlen=EVENTS_KEPT)

    def note(self, at_ns: int, member: str, what: str, numbers: Iterable[int] = ()) -> None:
        """Remember what a member told, or what was done to it."""
        found = frozenset(numbers)
        told = f"{member or 'the test'}: {what}{f' {sorted(found)}' if found else ''}"
        self._events.append(Line(at_ns, member, found, told))

    def before(self, at_ns: int, *, numbers: Iterable[int] = (), members: Iterable[str] = ()) -> str:
        """Return what happened in the last `STORY_S` before a time, line by line, told and recorded, in order.

        Of members and partitions that are not named only what concerns the named ones is told; with none named, all.
        """
        wanted, named = set(numbers), set(members)
        try:
            lines = [*self._events, *self._recorded()]
        except Exception as error:  # The failure that is explained here counts more.
            lines = [*self._events, Line(at_ns, "", frozenset(), f"the coordinator's records cannot be read: {error}")]
        since_ns = at_ns - int(STORY_S * 1e9)
        told = [
            f"  {(line.at_ns - at_ns) / 1e9:+9.3f} s  {line.text}"
            for line in sorted(lines)
            if line.at_ns >= since_ns
            and (not (wanted or named) or not line.member or line.member in named or line.numbers & wanted)
        ]
        return "\n".join([f"{self._group}, as its members and its coordinator tell it:", *told])

    def _recorded(self) -> Iterator[Line]:
        """Read the group's records; of the consumer protocol each member's, of the classic one each generation."""
        wall_ns = time.time_ns() - time.monotonic_ns()
        names: dict[str, str] = {}
        for timestamp_ms, record in self._records():
            at_ns = timestamp_ms * 1_000_000 - wall_ns
            key: Any = record.key
            if isinstance(key, ConsumerGroupMemberMetadataKey) and record.value is not None:
                names[key.member_id] = record.value.client_id
            elif isinstance(key, ConsumerGroupMemberMetadataKey):
                name = names.get(key.member_id, key.member_id)
                yield Line(at_ns, name, frozenset(), f"coordinator: {name} is removed from the group")
            elif isinstance(key, ConsumerGroupCurrentMemberAssignmentKey) and record.value is not None:
                yield _owned(at_ns, names.get(key.member_id, key.member_id), record.value)
            elif isinstance(key, GroupMetadataKey) and record.value is not None:
                yield self._generation(at_ns, record.value)
            elif isinstance(key, OffsetCommitKey) and record.value is not None:
                opened = record.value.opened
                text = f"coordinator: {key.topic}-{key.partition} stands at {record.value.offset}, opened {opened}"
                yield Line(at_ns, NOBODY, frozenset([key.partition]), text)

    def _generation(self, at_ns: int, value: Any) -> Line:
        shares = {
            member.client_id: sorted(assigned_by_name(bytes(member.assignment)).get(self._topic, ()))
            for member in value.members
        }
        return Line(at_ns, "", frozenset(), f"coordinator: generation {value.generation}: {shares}")

    def _records(self) -> Iterator[tuple[int, CoordinatorRecord]]:
        number = coordinator_partition(self._group, OFFSETS_PARTITIONS)
        deadline = time.monotonic() + READING_S
        with Consumer(self._address, auto_offset_reset="earliest") as consumer:
            consumer.assign([(OFFSETS, number)])
            (end,) = consumer.end_offsets((OFFSETS, number)).values()
            while consumer.position(OFFSETS, number) < end and time.monotonic() < deadline:
                for each in consumer.poll(1.0):
                    record = decode_record(each.key or b"", each.value)
                    if record is not None and self._group in (
                        getattr(record.key, "group_id", None),
                        getattr(record.key, "group", None),
                    ):
                        yield each.timestamp, record


def _owned(at_ns: int, name: str, value: Any) -> Line:
    assigned = {number for topic in value.assigned_partitions for number in topic.partitions}
    revoking = {number for topic in value.partitions_pending_revocation for number in topic.partitions}
    text = f"coordinator: {name} owns {sorted(assigned)}" + (f", has yet to revoke {sorted(revoking)}" * bool(revoking))
    state = MemberState(value.state).name.lower().replace("_", " ")
    return Line(at_ns, name, frozenset(assigned | revoking), f"{text}; epoch {value.member_epoch}, {state}")
