"""Client-side assignors (KIP-848, Client Side Mode): a chosen member receives the group and installs the target.

    chosen ──heartbeat: should_compute──► told ──Prepare──► prepared ──Install──► the target is installed
       ▲                                    └──────── rebalance timeout ────────────┘ another member is chosen

An installed target is checked against the answer to Prepare, not against the group's present state: a group at a later
epoch gets this target first, and the next computation after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.groups.consumer.group import (
    NOTHING,
    Assignment,
    AssignmentMetadata,
    ConsumerGroup,
    Member,
    assignment_of,
    target_epoch_record,
    target_record,
)
from anabranch.machines.groups.consumer.heartbeat import unknown
from anabranch.machines.groups.consumer.shares import NO_SHARES, At, Shares, key_ranges, shares_named
from anabranch.machines.groups.consumer.step import Step
from anabranch.machines.groups.consumer.target import Computation, offers_of, subscription, subscriptions
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.key_ranges import NONE, WHOLE, Ranges, WrongKeyRangesError, common, complement, union
from anabranch.protocol.messages import consumer_group_prepare_assignment as prepare_messages
from anabranch.protocol.messages.consumer_group_install_assignment import (
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
)
from anabranch.protocol.messages.consumer_group_prepare_assignment import (
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
)

Part = tuple[str, Assignment, AssignmentMetadata, Shares]
"""The id of a member as it was at Prepare, its partitions, the metadata for it, and what it has in part."""


def check_request(request: ConsumerGroupPrepareAssignmentRequest | ConsumerGroupInstallAssignmentRequest) -> None:
    """Raise INVALID_REQUEST for a request that no group could accept."""
    for holds, message in (
        (bool(request.group_id), "GroupId is empty."),
        (bool(request.member_id), "MemberId is empty."),
        (request.member_epoch >= 0, f"MemberEpoch is {request.member_epoch}; it is at least 0."),
    ):
        if not holds:
            raise ApiError(ErrorCode.INVALID_REQUEST, message)


def prepare(step: Step, request: ConsumerGroupPrepareAssignmentRequest) -> ConsumerGroupPrepareAssignmentResponse:
    """Answer Prepare: the input of the chosen member's assignor."""
    computation = _chosen(step, request.member_id, request.member_epoch)
    group, image = step.group, step.image
    topics = [
        topic
        for name in sorted(subscriptions(group, image, step.regexes))
        if (topic := image.by_name.get(name)) is not None
    ]
    step.expect_target(computation)
    computation.group_epoch = group.epoch
    computation.members = _subscribed(step)
    computation.instances = {member_id: instance for instance, member_id in group.static_members.items()}
    computation.willing = frozenset(
        member_id for member_id, member in group.members.items() if member.described.allow_key_share
    )
    most = step.settings.shares_max(step.group_id)
    computation.shares_max = {topic.topic_id: most for topic in topics if topic.accepts_ranges and most}
    computation.partitions = {topic.topic_id: frozenset([*topic.partitions, *topic.retiring]) for topic in topics}
    return ConsumerGroupPrepareAssignmentResponse(
        group_epoch=group.epoch,
        assignor_name=computation.assignor.name,
        members=[_member(step, member, computation) for _, member in sorted(group.members.items())],
        topics=[_topic(topic, computation.shares_max.get(topic.topic_id, 0)) for topic in topics],
    )


def _subscribed(step: Step) -> dict[str, frozenset[UUID]]:
    """The ids of the topics that each member subscribes to; equal subscriptions share one set."""
    ids: dict[frozenset[str], frozenset[UUID]] = {}
    found: dict[str, frozenset[UUID]] = {}
    for member_id, member in step.group.members.items():
        names = subscription(member.described, step.image, step.regexes)
        mine = ids.get(names)
        if mine is None:
            known = map(step.image.by_name.get, names)
            mine = ids[names] = frozenset(topic.topic_id for topic in known if topic is not None)
        found[member_id] = mine
    return found


def _topic(topic: TopicImage, shares_max: int) -> prepare_messages.TopicMetadata:
    intervals = {(topic.topic_id, number): (topic.interval(number),) for number in topic.readable if shares_max}
    return prepare_messages.TopicMetadata(
        topic_id=topic.topic_id,
        topic_name=topic.name,
        num_partitions=topic.size,
        retiring_partitions=list(topic.retiring),
        shares_max=shares_max,
        intervals=key_ranges(topic.topic_id, topic.readable, intervals),
    )


def _member(step: Step, member: Member, computation: Computation) -> prepare_messages.Member:
    said = member.described
    shares = dict(step.group.target_shares.get(member.member_id, NO_SHARES))
    offer = next(offer for offer in offers_of(said) if offer.name == computation.assignor.name)
    topics = sorted(subscription(said, step.image, step.regexes))
    return prepare_messages.Member(
        member_id=member.member_id,
        member_epoch=member.epoch,
        instance_id=said.instance_id,
        rack_id=said.rack_id,
        subscribed_topic_ids=[topic.topic_id for name in topics if (topic := step.image.by_name.get(name)) is not None],
        assignor=prepare_messages.Assignor(
            reason=offer.reason, metadata_version=offer.version, metadata_bytes=offer.metadata
        ),
        topic_partitions=[
            prepare_messages.TopicPartition(
                topic_id=topic_id, partitions=list(numbers), key_ranges=key_ranges(topic_id, numbers, shares)
            )
            for topic_id, numbers in step.group.target(member.member_id)
        ],
        allow_key_share=said.allow_key_share,
    )


def install(step: Step, request: ConsumerGroupInstallAssignmentRequest) -> ConsumerGroupInstallAssignmentResponse:
    """Take the target that the chosen member computed, if it is one."""
    computation = _chosen(step, request.member_id, request.member_epoch)
    if computation.members is None or request.group_epoch != computation.group_epoch:
        raise ApiError(
            ErrorCode.INVALID_ASSIGNMENT,
            f"The assignment is for group epoch {request.group_epoch}, which was not what the assignor was told last.",
        )
    group = step.group
    if request.error:
        for member_id in sorted(group.members):
            step.put(
                target_record(
                    step.group_id,
                    member_id,
                    group.target(member_id),
                    AssignmentMetadata(error=request.error),
                    group.target_shares.get(member_id, NO_SHARES),
                )
            )
    else:
        for member_id, (target, told, shares) in _parts(group, computation, _checked(request, computation)).items():
            before = group.target(member_id), group.told.get(member_id), group.target_shares.get(member_id, NO_SHARES)
            if before != (target, told, shares):
                step.put(target_record(step.group_id, member_id, target, told, shares))
    step.put(target_epoch_record(step.group_id, computation.group_epoch))
    step.live.computation = None
    step.draft.cancel_timer(("compute", step.group_id))
    step.assign()
    return ConsumerGroupInstallAssignmentResponse()


def _parts(
    group: ConsumerGroup, computation: Computation, checked: Iterable[Part]
) -> dict[str, tuple[Assignment, AssignmentMetadata, Shares]]:
    """The computed parts by present members: all have one, so that no partition of theirs stays in a former target.

    A static member that was replaced since Prepare has kept its target under another id: its part goes there.
    """
    parts: dict[str, tuple[Assignment, AssignmentMetadata, Shares]] = dict.fromkeys(
        group.members, (NOTHING, AssignmentMetadata(), NO_SHARES)
    )
    for member_id, target, told, shares in checked:
        now = member_id
        if now not in group.members:
            now = group.static_members.get(computation.instances.get(member_id, ""), "")
        if now in parts:
            parts[now] = target, told, shares
    return parts


def overdue(step: Step) -> None:
    """The chosen member did not deliver in time: choose another one. It is not fenced; only its session does that."""
    computation = step.live.computation
    if computation is None:
        return
    computation.tried.add(computation.member_id)
    step.live.computation = Computation("", computation.group_epoch, computation.assignor, computation.tried)
    step.assign()


def _chosen(step: Step, member_id: str, epoch: int) -> Computation:
    """The computation that this member was asked for."""
    member = step.group.members.get(member_id)
    if member is None:
        raise unknown(step.group_id, member_id)
    if member.epoch != epoch:
        raise ApiError(
            ErrorCode.STALE_MEMBER_EPOCH,
            f"Member {member_id} is at epoch {member.epoch}, not {epoch}.",
        )
    computation = step.live.computation
    if computation is None or computation.member_id != member_id:
        raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"Member {member_id} was not asked to compute an assignment.")
    return computation


def _checked(request: ConsumerGroupInstallAssignmentRequest, computation: Computation) -> list[Part]:
    """Every member is known, and every key of every partition is assigned exactly once, to a subscriber of its topic.

    A partition is given whole to one member, or in part to members that take parts.
    """
    assert computation.members is not None
    if len(request.members) > len(computation.members):
        raise _wrong(f"it names {len(request.members)} members, and the group has {len(computation.members)}")
    found: list[Part] = []
    given = _Given(computation)
    for member in request.members:
        if member.member_id not in computation.members:
            raise _wrong(f"it names member {member.member_id}, whom the group has not")
        try:
            shares = shares_named(member.partitions)
        except WrongKeyRangesError as error:
            raise _wrong(f"of member {member.member_id} {error}") from None
        parts = dict(shares)
        mine: dict[UUID, list[int]] = {}
        for entry in member.partitions:
            if entry.topic_id not in computation.partitions:
                raise _wrong(f"it names topic {entry.topic_id}, to which nobody subscribes")
            if entry.topic_id not in computation.members[member.member_id]:
                raise _wrong(f"member {member.member_id} does not subscribe to topic {entry.topic_id}")
            for partition in entry.partitions:
                at = entry.topic_id, partition
                if at in parts:
                    given.give_part(member.member_id, at, parts[at])
                else:
                    given.give(at)
            mine.setdefault(entry.topic_id, []).extend(entry.partitions)
        told = AssignmentMetadata(0, member.metadata_version, bytes(member.metadata_bytes))
        found.append((member.member_id, assignment_of(mine), told, shares))
    given.check_all()
    unnamed = computation.members.keys() - {member_id for member_id, *_ in found}
    return [*found, *((member_id, (), AssignmentMetadata(), NO_SHARES) for member_id in sorted(unnamed))]


class _Given:
    """The partitions, and the keys of partitions, that an assignment has given to members so far."""

    def __init__(self, computation: Computation) -> None:
        self._computation = computation
        self._free = {topic_id: set(numbers) for topic_id, numbers in computation.partitions.items()}
        self._parts: dict[At, Ranges] = {}
        self._takers: dict[At, set[str]] = {}

    def give(self, at: At) -> None:
        """Give a partition whole. ApiError where it is given already, or does not exist."""
        if at[1] not in self._free[at[0]]:
            known = at[1] in self._computation.partitions[at[0]]
            reason = "is assigned twice" if known else "does not exist"
            raise _wrong(f"partition {at[1]} of topic {at[0]} {reason}")
        self._free[at[0]].remove(at[1])

    def give_part(self, member_id: str, at: At, ranges: Ranges) -> None:
        """Give keys of a partition. ApiError where they are given already, or may not be given to the member."""
        most = self._computation.shares_max.get(at[0], 0)
        if member_id not in self._computation.willing:
            raise _wrong(f"member {member_id} takes no part of a partition, as of {at[1]} of topic {at[0]}")
        if not most:
            raise _wrong(f"partitions of topic {at[0]} cannot be shared, as partition {at[1]} is")
        if at not in self._parts:
            self.give(at)
        if common(self._parts.get(at, NONE), ranges):
            raise _wrong(f"keys of partition {at[1]} of topic {at[0]} are assigned twice")
        self._parts[at] = union(self._parts.get(at, NONE), ranges)
        takers = self._takers.setdefault(at, set())
        takers.add(member_id)
        if len(takers) > most:
            raise _wrong(f"partition {at[1]} of topic {at[0]} is shared by more than {most} members")

    def check_all(self) -> None:
        """ApiError where a partition, or any key of one, is given to nobody."""
        for topic_id, left in self._free.items():
            if left:
                raise _wrong(f"partition {min(left)} of topic {topic_id} is assigned to nobody")
        for at, ranges in self._parts.items():
            if ranges != WHOLE:
                first = complement(ranges)[0]
                raise _wrong(
                    f"the keys {first.start}-{first.end} of partition {at[1]} of topic {at[0]} are assigned to nobody"
                )


def _wrong(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_ASSIGNMENT, f"The assignment is not valid: {reason}.")
