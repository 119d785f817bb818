"""Views of groups: ListGroups, DescribeGroups, ConsumerGroupDescribe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import classic
from anabranch.machines.groups.classic import ClassicGroup, ClassicGroupView
from anabranch.machines.groups.consumer.group import NOTHING, Assignment, ConsumerGroup, GroupState, Member
from anabranch.machines.groups.consumer.shares import NO_SHARES, Shares, key_ranges
from anabranch.machines.groups.consumer.target import assignor_name
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.positions import Positions
from anabranch.machines.groups.settings import GroupSettings
from anabranch.protocol.messages import consumer_group_describe as described_messages
from anabranch.protocol.messages.consumer_group_describe import DescribedGroup as DescribedConsumerGroup
from anabranch.protocol.messages.describe_groups import DescribedGroup
from anabranch.protocol.messages.list_groups import ListedGroup

CONSUMER_MEMBER, CLASSIC_MEMBER = 1, 0
PARTITIONS_PER_MEMBER = 100
"""Partitions of an assignment that take as long to describe as a member."""
Group = ConsumerGroup | ClassicGroup


def list_groups(groups: Mapping[str, Group], positions: Positions) -> Iterator[ListedGroup]:
    """All groups, those that only have positions included."""
    for group_id, group in list(groups.items()):
        if isinstance(group, ConsumerGroup):
            yield ListedGroup(
                group_id=group_id, protocol_type="consumer", group_state=group.state().value, group_type="consumer"
            )
        else:
            yield ListedGroup(
                group_id=group_id,
                protocol_type=group.protocol_type or "",
                group_state=group.state.value,
                group_type="classic",
            )
    for group_id in positions.groups() - groups.keys():
        yield ListedGroup(group_id=group_id, group_state=classic.ClassicState.EMPTY.value, group_type="classic")


def states(groups: Mapping[str, Group]) -> Iterator[tuple[tuple[str, str], int]]:
    """The protocol and state of each group, and how many members were looked at for that; groups may come and go."""
    for group in list(groups.values()):
        if isinstance(group, ConsumerGroup):
            yield ("consumer", group.state().value), 1 + len(group.members)
        else:
            yield ("classic", group.state.value), 1


def view_group(group: Group | None, group_id: str, positions: Positions) -> ClassicGroupView:
    """A classic group and its members."""
    if isinstance(group, ClassicGroup):
        return classic.view(group)
    if group is None and group_id in positions:
        return ClassicGroupView(DescribedGroup(group_id=group_id, group_state=classic.ClassicState.EMPTY.value))
    missing = DescribedGroup(
        error_code=ErrorCode.GROUP_ID_NOT_FOUND,
        error_message=f"Group {group_id} is not a classic group."
        if group is not None
        else f"Group {group_id} does not exist.",
        group_id=group_id,
        group_state=classic.ClassicState.DEAD.value,
    )
    return ClassicGroupView(missing)


class ConsumerGroupView(NamedTuple):
    """A group of the consumer protocol as it is now: values that do not change, of which there may be many."""

    group: DescribedConsumerGroup
    """Without its members."""
    members: Sequence[Member] = ()
    targets: Mapping[str, Assignment] = {}
    shares: Mapping[str, Shares] = {}
    """Those of the targets, by member, as these are."""
    image: Image | None = None

    @property
    def size(self) -> int:
        """The members, and as many more as there are stretches of `PARTITIONS_PER_MEMBER` partitions."""
        held = sum(len(numbers) for it in self.members for _, numbers in it.assigned)
        targets = sum(len(numbers) for target in self.targets.values() for _, numbers in target)
        return len(self.members) + (held + targets) // PARTITIONS_PER_MEMBER

    def described(self) -> DescribedConsumerGroup:
        """Describe the members, too: to be called once, in any thread."""
        if self.image is not None:
            targets, shares = self.targets, self.shares
            self.group.members = [
                _described(it, targets.get(it.member_id, NOTHING), shares.get(it.member_id, NO_SHARES), self.image)
                for it in sorted(self.members, key=lambda it: it.member_id)
            ]
        return self.group


def view_consumer_group(group: Group | None, group_id: str, image: Image, settings: GroupSettings) -> ConsumerGroupView:
    """A group of the consumer protocol and its members: current and target assignments."""
    if not isinstance(group, ConsumerGroup):
        reason = "does not exist" if group is None else "is a classic group"
        missing = DescribedConsumerGroup(
            error_code=ErrorCode.GROUP_ID_NOT_FOUND,
            error_message=f"Group {group_id} {reason}.",
            group_id=group_id,
            group_state=GroupState.DEAD.value,
        )
        return ConsumerGroupView(missing)
    described = DescribedConsumerGroup(
        group_id=group_id,
        group_state=group.state().value,
        group_epoch=group.epoch,
        assignment_epoch=group.target_epoch,
        assignor_name=assignor_name(group, settings.consumer_assignors),
    )
    members = tuple(group.members.values())
    return ConsumerGroupView(described, members, dict(group.targets), dict(group.target_shares), image)


def _described(member: Member, target: Assignment, shares: Shares, image: Image) -> described_messages.Member:
    said = member.described
    return described_messages.Member(
        member_id=member.member_id,
        instance_id=said.instance_id,
        rack_id=said.rack_id,
        member_epoch=member.epoch,
        client_id=said.client_id,
        client_host=said.client_host,
        subscribed_topic_names=list(said.topics),
        subscribed_topic_regex=said.regex,
        assignment=_named(member.assigned, member.shares, image),
        target_assignment=_named(target, shares, image),
        member_type=CONSUMER_MEMBER if said.classic is None else CLASSIC_MEMBER,
    )


def _named(partitions: Assignment, shares: Shares, image: Image) -> described_messages.Assignment:
    ranges = dict(shares)
    return described_messages.Assignment(
        topic_partitions=[
            described_messages.TopicPartitions(
                topic_id=topic_id,
                topic_name=image.name_of(topic_id),
                partitions=list(numbers),
                key_ranges=key_ranges(topic_id, numbers, ranges),
            )
            for topic_id, numbers in partitions
        ]
    )
