"""Members that share partitions, against the real coordinator machine: what each believes to own, by key.

A `Sharer` is a model of a client: it processes records of keys that it owns from their committed offset on, reports
what it owns, and gives up keys before it says so. Nothing here reads the coordinator's state: the rules are checked
on what members were told, and on what they did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, common, ranges_of, union, without
from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    KeyRange,
    PartitionKeyRanges,
    TopicPartitions,
)
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tests.support.groups import GROUP, GroupWorld, topic_id

At = tuple[UUID, int]
Owned = dict[At, Ranges]


def shared_topics(version: int = 1, **counts: int) -> Image:
    """Topics whose partitions can be shared."""
    return Image(
        version,
        {
            name: TopicImage(
                topic_id(name),
                name,
                tuple(range(count)),
                accepts_ranges=True,
                highest_count=100,
                log_end=lambda _: 10**6,
            )
            for name, count in counts.items()
        },
    )


def message(owned: Mapping[At, Ranges]) -> list[TopicPartitions]:
    """What a member reports: the partitions that it has, and the keys of those that it has in part."""
    by_topic: dict[UUID, list[int]] = {}
    for topic, number in sorted(owned):
        by_topic.setdefault(topic, []).append(number)
    return [
        TopicPartitions(
            topic_id=topic,
            partitions=numbers,
            key_ranges=[
                PartitionKeyRanges(
                    partition=number,
                    ranges=[KeyRange(start=it.start, end=it.end) for it in owned[topic, number]]
                    if owned[topic, number] != WHOLE
                    else [],
                )
                for number in numbers
            ],
        )
        for topic, numbers in by_topic.items()
    ]


def owned_in(topics: Iterable[TopicPartitions]) -> Owned:
    """Read an assignment: a partition without ranges is whole."""
    found: Owned = {}
    for topic in topics:
        named = {it.partition: it.ranges for it in topic.key_ranges}
        assert not named or list(named) == list(topic.partitions), "ranges are parallel to the partitions, or absent"
        for number in topic.partitions:
            ranges = ranges_of((it.start, it.end) for it in named.get(number, ()))
            found[topic.topic_id, number] = ranges or WHOLE
    return found


@dataclass
class Sharer:
    """One member."""

    world: SharingWorld
    name: str
    willing: bool = True
    topics: tuple[str, ...] = ("foo",)
    epoch: int = 0
    owned: Owned = field(default_factory=dict)
    """The keys that the application may be given records of."""
    joined: bool = False
    told: Owned | None = None
    """An assignment that the member has received, and not followed yet."""

    def beat(self, *, lose_answer: bool = False, full: bool = False) -> ConsumerGroupHeartbeatResponse | None:
        """Send a heartbeat that reports what is owned, and take its answer, unless it is lost."""
        said: dict[str, Any] = {}
        if not self.joined or full:
            said = {"rebalance_timeout_ms": 60_000, "topics": self.topics, "allow_key_share": self.willing}
        epoch = self.epoch if self.joined else 0
        owned = self.owned if self.joined else {}
        answer = self.world.beat_owning(self.name, epoch, message(owned), **said)
        if lose_answer:
            return None
        if answer.error_code in (ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID):
            self.owned, self.joined, self.told, self.epoch = {}, False, None, 0
            return answer
        assert answer.error_code == ErrorCode.NONE, answer
        self.joined, self.epoch = True, answer.member_epoch
        if answer.assignment is not None:
            self.told = owned_in(answer.assignment.topic_partitions)
            for at, ranges in self.told.items():
                is_new = without(ranges, self.owned.get(at, NONE))
                assert self.willing or ranges == WHOLE or not is_new, "who does not allow it is given no part"
            # What is new it owns at once, so that no report of later lacks it; what is gone it owns until it follows.
            self.owned = {
                at: union(self.owned.get(at, NONE), self.told.get(at, NONE)) for at in {*self.owned, *self.told}
            }
        return answer

    def follow(self) -> None:
        """Give up what is no longer assigned, after committing it, and begin with what is new."""
        if self.told is None:
            return
        self.owned, self.told = self.told, None

    def commit(self, offset: int, keys: Mapping[At, Ranges] | None = None) -> list[ErrorCode]:
        """Commit an offset for keys, by default for all that it owns."""
        answers = []
        for (topic, number), ranges in (self.owned if keys is None else keys).items():
            request = OffsetCommitRequest(
                group_id=GROUP,
                generation_id_or_member_epoch=self.epoch,
                member_id=self.name,
                topics=[
                    OffsetCommitRequestTopic(
                        topic_id=topic,
                        name=self.world.image.name_of(topic),
                        partitions=[
                            OffsetCommitRequestPartition(
                                partition_index=number,
                                committed_offset=-1,
                                committed_metadata="",
                                key_range_offsets=[
                                    KeyRangeOffset(start=it.start, end=it.end, offset=offset) for it in ranges
                                ],
                            )
                        ],
                    )
                ],
            )
            answer = self.world.submit(
                lambda machine, request=request: machine.offset_commit(
                    request, Caller("client", "/host", 10), self.world.now_ms
                )
            )
            answers.append(ErrorCode(answer.topics[0].partitions[0].error_code))
        return answers


class SharingWorld(GroupWorld):
    """A coordinator and members that share."""

    def __init__(self, image: Image | None = None, **said: Any) -> None:
        super().__init__(image or shared_topics(foo=1), **said)
        self.members: dict[str, Sharer] = {}

    def beat_owning(
        self, member: str, epoch: int, owned: list[TopicPartitions], **said: Any
    ) -> ConsumerGroupHeartbeatResponse:
        """A heartbeat that reports partitions with their keys."""
        topics = said.pop("topics", None)
        request = ConsumerGroupHeartbeatRequest(
            group_id=GROUP,
            member_id=member,
            member_epoch=epoch,
            subscribed_topic_names=None if topics is None else list(topics),
            topic_partitions=owned,
            **said,
        )
        caller = Caller("client", "/host", 1, "fresh")
        answer = self.submit(lambda machine: machine.consumer_group_heartbeat(request, caller, self.now_ms))
        assert isinstance(answer, ConsumerGroupHeartbeatResponse)
        return answer

    def enter(self, *names: str, willing: bool = True, topics: tuple[str, ...] = ("foo",)) -> None:
        """Let members join, each until nothing moves any more."""
        for name in names:
            self.members[name] = Sharer(self, name, willing, topics)
            self.settle()

    def settle(self, rounds: int = 12) -> None:
        """Let all members beat and follow until nothing changes."""
        for _ in range(rounds):
            for member in self.members.values():
                member.beat()
                self.check_owners()
                member.follow()
                self.check_owners()
        self.check_all_owned()
        self.check()

    def kill(self, name: str) -> None:
        """A member dies; its session ends."""
        del self.members[name]
        for _ in range(10):
            self.advance(5_000)
            for member in self.members.values():
                member.beat()
                self.check_owners()
                member.follow()
                self.check_owners()

    def leave_group(self, name: str) -> None:
        """A member leaves."""
        del self.members[name]
        answer = self.beat(name, -1)
        assert answer.error_code == ErrorCode.NONE

    def owners(self, topic: str = "foo") -> dict[int, dict[str, Ranges]]:
        """By partition what its owners have."""
        found: dict[int, dict[str, Ranges]] = {}
        for name, member in self.members.items():
            for (topic_id_, number), ranges in member.owned.items():
                if topic_id_ == topic_id(topic):
                    found.setdefault(number, {})[name] = ranges
        return found

    def check_owners(self) -> None:
        """No key has two owners among the members that may still speak for it.

        A member that was removed from the group, and does not know, is a zombie: what it commits is refused.
        """
        taken: dict[At, Ranges] = {}
        for member in self.members.values():
            if not member.joined or not self.knows(member):
                continue
            for at, ranges in member.owned.items():
                assert not common(taken.get(at, NONE), ranges), (at, member.name)
                taken[at] = union(taken.get(at, NONE), ranges)

    def knows(self, member: Sharer) -> bool:
        """Whether the coordinator still has a member, under the epoch that it speaks with."""
        group = self.coordinator.groups.get(GROUP)
        known = None if group is None else group.members.get(member.name)
        return known is not None and member.epoch in (known.epoch, getattr(known, "previous_epoch", -1))

    def check_all_owned(self) -> None:
        """In quiet time every key of every partition has an owner."""
        for name, topic in self.image.by_name.items():
            if not any(name in member.topics for member in self.members.values()):
                continue
            for number in topic.readable:
                has: Ranges = NONE
                for ranges in self.owners(name).get(number, {}).values():
                    has = union(has, ranges)
                assert has == WHOLE, (name, number, without(WHOLE, has))
