"""Between the protocols, online (KIP-848, Supporting Online Consumer Group Upgrade).

The first member that speaks the consumer protocol turns a classic group into one of that protocol; when the last one
leaves, the group is a classic one again. The epoch goes on from the generation, and the generation from the epoch.

In between, classic members are reconciled one by one, by the same engine; each goes round a loop of its own:

    PrepareRebalance ──JoinGroup──► CompletingRebalance ──SyncGroup──► Stable ──Heartbeat: it must rejoin──► Prepare...

JoinGroup reports owned partitions and takes one step towards the target, SyncGroup answers the assignment, and
Heartbeat is answered REBALANCE_IN_PROGRESS when a step is due. A member that does not join, or sync, within its
rebalance timeout is removed. One that says it owns what it does not hold was left behind by a generation: it is told
that it is unknown, which has every client let go of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

from anabranch.base.errors import ApiError, DecodeError, ErrorCode
from anabranch.base.limits import PENDING_MEMBERS_PER_GROUP_MAX
from anabranch.machines.groups import embedded
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.classic import ClassicGroup, ClassicMember, group_of, tombstone
from anabranch.machines.groups.consumer.group import (
    NOTHING,
    Assignment,
    Classic,
    ConsumerGroup,
    Member,
    MemberMetadata,
    MemberState,
    assignment_of,
    current_record,
    gone_records,
    group_record,
    member_record,
    target_epoch_record,
    target_record,
)
from anabranch.machines.groups.consumer.heartbeat import (
    calls_for_assignment,
    check_names,
    check_room,
    follow,
    replace_member,
    unknown,
)
from anabranch.machines.groups.consumer.reconcile import reconcile
from anabranch.machines.groups.consumer.step import Step
from anabranch.machines.groups.embedded import CONSUMER_PROTOCOL
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.records import ConsumerGroupPartitionMetadataKey, CoordinatorRecord
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.outcome import Draft
from anabranch.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from anabranch.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from anabranch.protocol.messages.leave_group import (
    LeaveGroupRequest,
    LeaveGroupResponse,
    MemberIdentity,
    MemberResponse,
)
from anabranch.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse

MEMBER_ID_REQUIRED_SINCE = 4
"""Version of JoinGroup whose new members join again with the id they got."""
LEAVES_IN_BATCHES = 3
PROTOCOL_SAID_SINCE = 5
COOPERATIVE = "cooperative-sticky"


# -- conversions ------------------------------------------------------------------------------------------------------


def upgrade(
    classic: ClassicGroup, settings: GroupSettings, image: Image
) -> tuple[ConsumerGroup, Draft[CoordinatorRecord]]:
    """Convert the members to a group of the consumer protocol, and its records. ApiError where they cannot be."""
    group_id = classic.group_id
    refusal = f"Group {group_id} cannot be moved to the consumer protocol: "
    if classic.members and not settings.upgrades:
        policy = settings.consumer_migration_policy
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"{refusal}group.consumer.migration.policy is {policy}.")
    if classic.members and classic.protocol_type != CONSUMER_PROTOCOL:
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"{refusal}its protocol type is '{classic.protocol_type}'.")
    if len(classic.members) >= settings.consumer_max_size:
        raise ApiError(ErrorCode.GROUP_MAX_SIZE_REACHED, f"{refusal}it has {len(classic.members)} members.")
    try:
        members = _from_classic(classic, image)
    except DecodeError as error:
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"{refusal}a subscription is unreadable, {error}.") from None
    records = [group_record(group_id, classic.generation)]
    for member in members:
        records.append(member_record(group_id, member.member_id, member.described))
        records.append(target_record(group_id, member.member_id, member.assigned))
    records.append(target_epoch_record(group_id, classic.generation))
    records += (current_record(group_id, member.member_id, member) for member in members)
    group = ConsumerGroup(group_id)
    for record in records:
        group.apply(record)
    draft: Draft[CoordinatorRecord] = Draft()
    if classic.is_stored:
        draft.write(tombstone(group_id))
    draft.write(*records)
    return group, draft


def _from_classic(classic: ClassicGroup, image: Image) -> list[Member]:
    """The members as they are. A member has yet to revoke partitions that it owned at its join and was not assigned."""
    assigned = {member_id: embedded.assigned(member.assignment, image) for member_id, member in classic.members.items()}
    revoking = _unrevoked(classic, assigned, image)
    members = []
    for member_id, member in classic.members.items():
        said = described(member.protocols, member.session_timeout_ms)
        said = replace(
            said,
            client_id=member.client_id,
            client_host=member.client_host,
            instance_id=member.instance_id,
            rebalance_timeout_ms=member.rebalance_timeout_ms,
        )
        left = revoking.get(member_id, NOTHING)
        state = MemberState.UNREVOKED_PARTITIONS if left else MemberState.STABLE
        generation = classic.generation
        members.append(Member(member_id, said, generation, generation, state, assigned[member_id], left))
    return members


def _unrevoked(classic: ClassicGroup, assigned: Mapping[str, Assignment], image: Image) -> dict[str, Assignment]:
    """What members said they own, and nobody is assigned. What two said, the one of the later generation has."""
    taken = {(topic_id, number) for has in assigned.values() for topic_id, numbers in has for number in numbers}
    subscriptions = [
        (embedded.subscription(metadata)[1], member_id)
        for member_id, member in classic.members.items()
        for _, metadata in member.protocols
    ]
    left: dict[str, dict[UUID, set[int]]] = {}
    for said, member_id in sorted(subscriptions, key=lambda one: -one[0].generation_id):
        mine = left.setdefault(member_id, {})
        for topic_id, numbers in embedded.by_id(said.owned_partitions, image):
            free = {number for number in numbers if (topic_id, number) not in taken}
            mine.setdefault(topic_id, set()).update(free)
            taken.update((topic_id, number) for number in free)
    return {member_id: assignment_of(mine) for member_id, mine in left.items()}


def described(protocols: tuple[tuple[str, bytes], ...], session_timeout_ms: int) -> MemberMetadata:
    """A classic member's metadata, from its protocols. DecodeError for protocols of a client that cannot migrate."""
    if not protocols:
        raise DecodeError("it offers no protocol")
    version, said = embedded.subscription(protocols[0][1])
    for name, metadata in protocols:
        if COOPERATIVE in name and embedded.subscription(metadata)[0] < embedded.OWNED_SINCE:
            raise DecodeError(f"{name} is cooperative, but version {version} does not say what is owned")
    return MemberMetadata(
        topics=tuple(sorted(set(said.topics))),
        rack_id=said.rack_id or None,
        classic=Classic(session_timeout_ms, protocols),
    )


def can_downgrade(group: ConsumerGroup, leaving: frozenset[str], settings: GroupSettings) -> bool:
    """Whether only classic members are left, and may be a classic group again."""
    left = [member for member_id, member in group.members.items() if member_id not in leaving]
    return (
        settings.downgrades
        and 0 < len(left) <= settings.max_size
        and all(member.described.classic is not None for member in left)
    )


def downgrade(
    group: ConsumerGroup, leaving: frozenset[str], image: Image, now_ms: int
) -> tuple[tuple[CoordinatorRecord, ...], ClassicGroup]:
    """The classic group of the remaining members, and the other group's tombstones; `generation_record` follows."""
    members = [
        _to_classic(member, image) for member_id, member in sorted(group.members.items()) if member_id not in leaving
    ]
    classic = group_of(group.group_id, members, generation=group.epoch, protocol_type=CONSUMER_PROTOCOL, now_ms=now_ms)
    return end_records(group), classic


def end_records(group: ConsumerGroup) -> tuple[CoordinatorRecord, ...]:
    """The tombstones of a group of the consumer protocol."""
    group_id = group.group_id
    return (
        *(record for member_id in sorted(group.members) for record in gone_records(group_id, member_id)),
        *(
            target_record(group_id, member_id, None)
            for member_id in sorted(group.targets.keys() - group.members.keys())
        ),
        target_epoch_record(group_id, None),
        CoordinatorRecord(ConsumerGroupPartitionMetadataKey(group_id=group_id)),
        group_record(group_id, None),
    )


def _to_classic(member: Member, image: Image) -> ClassicMember:
    said, classic = member.described, member.described.classic
    assert classic is not None
    version, _ = embedded.subscription(classic.protocols[0][1])
    return ClassicMember(
        member_id=member.member_id,
        instance_id=said.instance_id,
        client_id=said.client_id,
        client_host=said.client_host,
        session_timeout_ms=classic.session_timeout_ms,
        rebalance_timeout_ms=said.rebalance_timeout_ms,
        protocols=classic.protocols,
        assignment=embedded.assignment_data(member.assigned, image, version),
    )


# -- classic members in a group of the consumer protocol --------------------------------------------------------------


def join(step: Step, request: JoinGroupRequest, caller: Caller) -> JoinGroupResponse:
    """JoinGroup: store the member's subscription and owned partitions, take one step towards its target."""
    group, settings = step.group, step.settings
    if request.member_id in group.members and step.is_late(request.member_id, caller):
        raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS, f"Member {request.member_id} speaks on a newer connection.")
    if not settings.min_session_timeout_ms <= request.session_timeout_ms <= settings.max_session_timeout_ms:
        raise ApiError(ErrorCode.INVALID_SESSION_TIMEOUT, "The session timeout is out of the broker's bounds.")
    protocols = tuple((protocol.name, bytes(protocol.metadata)) for protocol in request.protocols)
    if request.protocol_type != CONSUMER_PROTOCOL:
        raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "The group's members are consumers.")
    try:
        said = described(protocols, request.session_timeout_ms)
        version, subscribed = embedded.subscription(protocols[0][1])
    except DecodeError as error:
        raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, f"The subscription is unreadable: {error}.") from None
    timeout_ms = request.rebalance_timeout_ms if request.rebalance_timeout_ms > 0 else request.session_timeout_ms
    instance_id = request.group_instance_id
    said = replace(
        said,
        client_id=caller.client_id,
        client_host=caller.client_host,
        instance_id=instance_id,
        rebalance_timeout_ms=timeout_ms,
    )
    member_id = request.member_id
    if not member_id and instance_id is None and caller.version >= MEMBER_ID_REQUIRED_SINCE:
        return _give_id(step, caller)
    member_id, member = _who_joins(step, member_id, instance_id, caller)
    _check_protocols(group, protocols, None if member is None else member.member_id)
    check_names(step, None if member is None else member.described, said)
    owned = NOTHING
    if version >= embedded.OWNED_SINCE:
        owned = embedded.by_id(subscribed.owned_partitions, step.image)
    if member is None:
        check_room(step, group)
        step.put(member_record(step.group_id, member_id, said))
        step.put(current_record(step.group_id, member_id, Member(member_id, said)))
        calls = True
    else:
        calls = calls_for_assignment(member.described, said)
        if member.member_id != member_id:
            replace_member(step, member, member_id, said)
            owned = NOTHING
        elif not _is_within(owned, member):
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"Member {member_id} owns what it was not given; begin anew.")
        elif said != member.described:
            step.put(member_record(step.group_id, member_id, said))
    if calls:
        step.next_epoch()
    step.assign()
    after = follow(step, member_id, owned)
    step.stop_expecting("join", member_id)
    step.live.pending.pop(member_id, None)
    step.spoke(member_id, caller)
    step.live.rejoining.discard(member_id)
    step.expect_within_rebalance_timeout("sync", after)
    return JoinGroupResponse(
        generation_id=after.epoch,
        protocol_type=CONSUMER_PROTOCOL,
        protocol_name=protocols[0][0],
        member_id=member_id,
    )


def _give_id(step: Step, caller: Caller) -> JoinGroupResponse:
    """Answer MEMBER_ID_REQUIRED to a new member; an id that the coordinator did not give is no new member."""
    member_id = f"{caller.client_id}-{caller.member_id}"
    pending = step.live.pending
    if len(pending) >= PENDING_MEMBERS_PER_GROUP_MAX:
        del pending[next(iter(pending))]
    pending[member_id] = None
    return JoinGroupResponse(error_code=ErrorCode.MEMBER_ID_REQUIRED, member_id=member_id, protocol_name="")


def _who_joins(step: Step, member_id: str, instance_id: str | None, caller: Caller) -> tuple[str, Member | None]:
    """The member id of a join, and its present member; a static one without an id replaces the former one."""
    group = step.group
    if instance_id is None:
        member = group.members.get(member_id)
        if member_id and member is None and member_id not in step.live.pending:
            raise unknown(group.group_id, member_id)
        return member_id or f"{caller.client_id}-{caller.member_id}", member
    present = group.static_members.get(instance_id)
    if not member_id:
        fresh = f"{instance_id}-{caller.member_id}"
        return fresh, None if present is None else group.members[present]
    _check_instance(group, member_id, instance_id)
    return member_id, group.members[member_id]


def _is_within(owned: Assignment, member: Member) -> bool:
    """Whether a member holds all that it says it owns: of a generation that left it behind, others may have some."""
    held = set(member.holds)
    return all((topic_id, number) in held for topic_id, numbers in owned for number in numbers)


def _check_protocols(group: ConsumerGroup, protocols: tuple[tuple[str, bytes], ...], joins_as: str | None) -> None:
    """Refuse a member that shares no protocol with all other classic members: they could not be a classic group."""
    shared = {name for name, _ in protocols}
    for other in group.classic_members:
        if other.member_id != joins_as and other.described.classic is not None:
            shared &= {name for name, _ in other.described.classic.protocols}
    if not shared:
        raise ApiError(
            ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "The group's classic members have none of these protocols in common."
        )


def _check_instance(group: ConsumerGroup, member_id: str, instance_id: str | None) -> None:
    if instance_id is None:
        return
    present = group.static_members.get(instance_id)
    if present is None:
        raise unknown(group.group_id, member_id)
    if present != member_id:
        raise ApiError(ErrorCode.FENCED_INSTANCE_ID, f"Instance id {instance_id} belongs to member {present} now.")


def _member(step: Step, member_id: str, instance_id: str | None, generation: int) -> Member:
    group = step.group
    _check_instance(group, member_id, instance_id)
    member = group.members.get(member_id)
    if member is None or member.described.classic is None:
        raise unknown(group.group_id, member_id)
    if generation != member.epoch:
        raise ApiError(ErrorCode.ILLEGAL_GENERATION, f"Member {member_id} is at {member.epoch}, not {generation}.")
    return member


def sync(step: Step, request: SyncGroupRequest, caller: Caller) -> SyncGroupResponse:
    """SyncGroup: answer the member's current assignment."""
    if caller.version >= PROTOCOL_SAID_SINCE and (request.protocol_type is None or request.protocol_name is None):
        raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, "The request does not say its protocol.")
    member = _member(step, request.member_id, request.group_instance_id, request.generation_id)
    classic = member.described.classic
    assert classic is not None
    name, metadata = classic.protocols[0]
    if request.protocol_type not in (None, CONSUMER_PROTOCOL) or request.protocol_name not in (None, name):
        raise ApiError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, f"The member's protocol is {name}.")
    if step.group.target_epoch > member.epoch and member.state is not MemberState.UNREVOKED_PARTITIONS:
        raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS, "A new epoch has begun; join again.")
    step.stop_expecting("sync", member.member_id)
    step.keep_session(member)
    version, _ = embedded.subscription(metadata)
    return SyncGroupResponse(
        protocol_type=CONSUMER_PROTOCOL,
        protocol_name=name,
        assignment=embedded.assignment_data(member.assigned, step.image, version),
    )


def heartbeat(step: Step, request: HeartbeatRequest) -> HeartbeatResponse:
    """Heartbeat: keep the session, and have the member rejoin when a step is due."""
    member = _member(step, request.member_id, request.group_instance_id, request.generation_id)
    step.keep_session(member)
    step.gate.speak(member.member_id)
    waits = member.epoch < step.group.target_epoch or member.state is MemberState.UNREVOKED_PARTITIONS
    if not waits and not step.gate.is_idle(member.member_id):
        waits = reconcile(step.group, member, None, step.gate, step.gate.takes, step.gate.free) is not member
        if not waits:
            step.gate.note_idle(member.member_id)
    if not waits:
        return HeartbeatResponse()
    if member.member_id not in step.live.rejoining:
        step.live.rejoining.add(member.member_id)
        step.expect_within_rebalance_timeout("join", member)
    return HeartbeatResponse(error_code=ErrorCode.REBALANCE_IN_PROGRESS)


def leaving(
    group: ConsumerGroup, request: LeaveGroupRequest, version: int
) -> tuple[LeaveGroupResponse, frozenset[str]]:
    """The answer to LeaveGroup, and the members that leave: classic ones, and any that an administrator removes."""
    batched = version >= LEAVES_IN_BATCHES
    named = request.members if batched else [MemberIdentity(member_id=request.member_id)]
    gone: set[str] = set()
    answers = []
    for identity in named:
        member_id, error = identity.member_id, ErrorCode.NONE
        try:
            if not member_id and identity.group_instance_id is not None:
                member_id = group.static_members.get(identity.group_instance_id, "")
            _check_instance(group, member_id, identity.group_instance_id)
            if member_id not in group.members or member_id in gone:
                raise unknown(group.group_id, member_id)
            gone.add(member_id)
        except ApiError as refusal:
            error = refusal.code
        answers.append(
            MemberResponse(member_id=identity.member_id, group_instance_id=identity.group_instance_id, error_code=error)
        )
    if not batched:
        return LeaveGroupResponse(error_code=answers[0].error_code), frozenset(gone)
    return LeaveGroupResponse(members=answers), frozenset(gone)


def none_left(request: LeaveGroupRequest, version: int) -> LeaveGroupResponse:
    """The answer to LeaveGroup of a group that does not exist."""
    if version < LEAVES_IN_BATCHES:
        return LeaveGroupResponse(error_code=ErrorCode.UNKNOWN_MEMBER_ID)
    return LeaveGroupResponse(
        members=[
            MemberResponse(
                member_id=identity.member_id,
                group_instance_id=identity.group_instance_id,
                error_code=ErrorCode.UNKNOWN_MEMBER_ID,
            )
            for identity in request.members
        ]
    )
