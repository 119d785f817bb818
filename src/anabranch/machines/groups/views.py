"""Views of groups: ListGroups, DescribeGroups, ConsumerGroupDescribe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups import classic
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import Assignment, ConsumerGroup, GroupState, Member
from anabranch.machines.groups.consumer.shares import NO_SHARES, Shares, key_ranges
from anabranch.machines.groups.consumer.target import assignor_name
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.positions import Positions
from anabranch.protocol.messages import consumer_group_describe as described_messages
from anabranch.protocol.messages.consumer_group_describe import DescribedGroup as DescribedConsumerGroup
from anabranch.protocol.messages.describe_groups import DescribedGroup
from anabranch.protocol.messages.list_groups import ListedGroup

CONSUMER_MEMBER, CLASSIC_MEMBER = 1, 0
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


def states(groups: Mapping[str, Group]) -> Counter[tuple[str, str]]:
    """The number of groups, by protocol and state."""
    return Counter(
        ("consumer", group.state().value) if isinstance(group, ConsumerGroup) else ("classic", group.state.value)
        for group in groups.values()
    )


def describe_group(group: Group | None, group_id: str, positions: Positions) -> DescribedGroup:
    """A classic group; for the consumer protocol, the fields in common with classic groups."""
    if isinstance(group, ClassicGroup):
        return classic.describe(group)
    if group is None and group_id in positions:
        return DescribedGroup(group_id=group_id, group_state=classic.ClassicState.EMPTY.value)
    return DescribedGroup(
        error_code=ErrorCode.GROUP_ID_NOT_FOUND,
        error_message=f"Group {group_id} is not a classic group."
        if group is not None
        else f"Group {group_id} does not exist.",
        group_id=group_id,
        group_state=classic.ClassicState.DEAD.value,
    )


def describe_consumer_group(
    group: Group | None, group_id: str, image: Image, assignors: tuple[str, ...]
) -> DescribedConsumerGroup:
    """A group of the consumer protocol and its members: current and target assignments."""
    if not isinstance(group, ConsumerGroup):
        reason = "does not exist" if group is None else "is a classic group"
        return DescribedConsumerGroup(
            error_code=ErrorCode.GROUP_ID_NOT_FOUND,
            error_message=f"Group {group_id} {reason}.",
            group_id=group_id,
            group_state=GroupState.DEAD.value,
        )
    return DescribedConsumerGroup(
        group_id=group_id,
        group_state=group.state().value,
        group_epoch=group.epoch,
        assignment_epoch=group.target_epoch,
        assignor_name=assignor_name(group, assignors),
        members=[_described(group, member, image) for _, member in sorted(group.members.items())],
    )


def _described(group: ConsumerGroup, member: Member, image: Image) -> described_messages.Member:
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
        target_assignment=_named(
            group.target(member.member_id), group.target_shares.get(member.member_id, NO_SHARES), image
        ),
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
