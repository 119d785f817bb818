"""ConsumerGroupHeartbeat (KIP-848): join, keep the session, report owned partitions, receive the assignment, leave.

The checks and their errors are the proposal's, in its order; a request that fails any of them changes nothing. Where
the proposal removes a member whose epoch is wrong, it stays here: a late request must not end a session.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.limits import CLIENT_ASSIGNORS_MAX
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.consumer.group import (
    LEFT_FOR_A_WHILE,
    NOTHING,
    Assignment,
    AssignmentMetadata,
    Assignor,
    ConsumerGroup,
    Member,
    MemberMetadata,
    MemberState,
    assignment,
    current_record,
    gone_records,
    member_record,
    same,
    target_record,
)
from anabranch.machines.groups.consumer.reconcile import is_subset, pending_parts, reconcile
from anabranch.machines.groups.consumer.shares import NO_SHARES, Shares, key_ranges, shares_named
from anabranch.machines.groups.consumer.step import Step
from anabranch.machines.groups.consumer.target import client_assignor, offers_of
from anabranch.machines.groups.quiet import describes_nothing, says_nothing
from anabranch.machines.key_ranges import WrongKeyRangesError
from anabranch.protocol.messages.consumer_group_heartbeat import (
    Assignment as AssignmentMessage,
)
from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)

JOINING = 0


def check_request(request: ConsumerGroupHeartbeatRequest, version: int, assignors: tuple[str, ...]) -> None:
    """Raise an error for a request that no group could accept; `assignors` are the server-side ones on offer."""
    joining = request.member_epoch == JOINING
    _need(bool(request.group_id), "GroupId is empty.")
    _need(bool(request.member_id) or (joining and version == 0), "MemberId is empty; clients make their own.")
    _need(request.instance_id != "", "InstanceId is empty; leave it out instead.")
    if says_nothing(request):
        return
    _need(request.member_epoch >= LEFT_FOR_A_WHILE, f"MemberEpoch is {request.member_epoch}; it is at least -2.")
    _need(request.rack_id != "", "RackId is empty; leave it out instead.")
    if request.member_epoch == LEFT_FOR_A_WHILE:
        _need(request.instance_id is not None, "MemberEpoch is -2, but only a member with an InstanceId will be back.")
    if request.member_epoch < JOINING:
        return  # a leaving client may empty its other fields
    if joining:
        _need(not request.topic_partitions, "TopicPartitions is not empty, but who joins owns nothing.")
    if request.topic_partitions:
        try:
            shares_named(request.topic_partitions)
        except WrongKeyRangesError as error:
            _need(False, f"TopicPartitions has key ranges that cannot be: {error}.")
    _need(request.rebalance_timeout_ms == -1 or request.rebalance_timeout_ms > 0, "RebalanceTimeoutMs must be above 0.")
    _need(all(request.subscribed_topic_names or ()), "SubscribedTopicNames has an empty name.")
    _need(
        request.server_assignor is None or not request.client_assignors,
        "ServerAssignor and ClientAssignors cannot be used together.",
    )
    offers = request.client_assignors or ()
    _need(
        len(offers) <= CLIENT_ASSIGNORS_MAX, f"ClientAssignors are {len(offers)}; {CLIENT_ASSIGNORS_MAX} are allowed."
    )
    for offer in offers:
        _need(bool(offer.name), "An assignor has an empty name.")
        _need(offer.minimum_version >= -1, f"Assignor {offer.name}: MinimumVersion is below -1.")
        _need(
            offer.maximum_version >= max(0, offer.minimum_version),
            f"Assignor {offer.name}: MaximumVersion {offer.maximum_version} is below 0 or MinimumVersion.",
        )
        _need(
            offer.minimum_version <= offer.metadata_version <= offer.maximum_version,
            f"Assignor {offer.name}: version {offer.metadata_version} is not in its range.",
        )
    if request.server_assignor is not None and request.server_assignor not in assignors:
        raise ApiError(
            ErrorCode.UNSUPPORTED_ASSIGNOR,
            f"The server-side assignor '{request.server_assignor}' is not offered; choose of {', '.join(assignors)}.",
        )


def _check_first(request: ConsumerGroupHeartbeatRequest) -> None:
    """Raise INVALID_REQUEST for a join without the required fields."""
    _need(request.rebalance_timeout_ms > 0, "RebalanceTimeoutMs must be above 0 in the first heartbeat.")
    _need(
        request.subscribed_topic_names is not None or bool(request.subscribed_topic_regex),
        "The first heartbeat says what is subscribed to: SubscribedTopicNames or SubscribedTopicRegex.",
    )


def _need(holds: bool, message: str) -> None:
    if not holds:
        raise ApiError(ErrorCode.INVALID_REQUEST, message)


def heartbeat(step: Step, request: ConsumerGroupHeartbeatRequest, caller: Caller) -> ConsumerGroupHeartbeatResponse:
    """Decide about a heartbeat of a member that stays or joins. ApiError refuses it; nothing changed then."""
    group = step.group
    if request.subscribed_topic_regex:
        step.regexes.check(request.subscribed_topic_regex)
    member_id = request.member_id or caller.member_id
    replaced, member = find_member(group, member_id, request.instance_id, request.member_epoch)
    check_late(step, member_id, caller, fences=request.member_epoch == JOINING)
    owned = None if request.topic_partitions is None else assignment(request.topic_partitions)
    owned_shares = shares_named(request.topic_partitions) if request.topic_partitions else NO_SHARES
    if request.member_epoch == JOINING:
        owned = NOTHING
    elif member is not None:
        check_epoch(member, request.member_epoch, owned, owned_shares)
    most = step.settings.consumer_names_max
    if request.subscribed_topic_names is not None and len(request.subscribed_topic_names) > most:
        raise ApiError(
            ErrorCode.GROUP_MAX_SIZE_REACHED,
            f"{len(request.subscribed_topic_names)} names of topics are subscribed to; "
            f"group.consumer.max.subscribed.names allows {most}.",
        )
    said = _merged(MemberMetadata() if member is None else member.described, request, caller)
    changed = member is None or (said is not member.described and said != member.described)
    if changed:
        check_names(step, None if member is None else member.described, said)
        _check_versions(group, member_id, said)
    if member is None:
        _check_first(request)
        check_room(step, group)
        step.put(member_record(step.group_id, member_id, said))
        step.put(current_record(step.group_id, member_id, Member(member_id, said)))
        calls = True
    else:
        was_classic = replaced is not None and member.described.classic is not None
        # Its assignment may be of long before.
        calls = was_classic or (changed and calls_for_assignment(member.described, said))
        if replaced is not None:
            replace_member(step, member, member_id, said)
        elif changed:
            step.put(member_record(step.group_id, member_id, said))
    if request.member_epoch == JOINING:
        step.gate.forget(member_id)
        if member is not None:
            step.gate.begins_anew(member_id, member.assigned)
    anew = step.spoke(member_id, caller)
    step.gate.speak(member_id, heard=not anew)
    if calls:
        step.next_epoch()
    step.assign()
    after = follow(step, member_id, owned, owned_shares, may_be_taking=request.member_epoch != JOINING)
    return _answer(step, after, request, owned, owned_shares, member, anew=anew)


def find_member(
    group: ConsumerGroup, member_id: str, instance_id: str | None, epoch: int
) -> tuple[str | None, Member | None]:
    """The member that speaks, and the id of the one that it replaces; none of either if it is new."""
    if instance_id is None:
        member = group.members.get(member_id)
        if member is None and epoch != JOINING:
            raise unknown(group.group_id, member_id)
        return None, member
    present = group.static_members.get(instance_id)
    if present is None:
        member = group.members.get(member_id)
        if epoch != JOINING or member is not None:
            raise unknown(group.group_id, member_id)
        return None, None
    member = group.members[present]
    if present == member_id:
        return None, member
    if epoch != JOINING:
        raise ApiError(
            ErrorCode.FENCED_INSTANCE_ID, f"Instance id {instance_id} belongs to member {present} now, not {member_id}."
        )
    if member.epoch != LEFT_FOR_A_WHILE and member.described.classic is None:
        raise ApiError(
            ErrorCode.UNRELEASED_INSTANCE_ID,
            f"Instance id {instance_id} is in use by member {present}, which has not left yet.",
        )
    return present, member


def unknown(group_id: str, member_id: str) -> ApiError:
    """The error for an unknown member."""
    return ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"Group {group_id} has no member {member_id}.")


def check_epoch(member: Member, epoch: int, owned: Assignment | None, shares: Shares = NO_SHARES) -> None:
    """Refuse another epoch than the member's, but for the one before, if the answer that moved it on was lost."""
    if epoch == member.epoch:
        return
    lost_answer = epoch == member.previous_epoch and epoch < member.epoch
    if lost_answer and (owned is None or is_subset(owned, member.assigned, shares, member.shares)):
        return
    raise ApiError(
        ErrorCode.FENCED_MEMBER_EPOCH,
        f"Member {member.member_id} is at epoch {member.epoch}, not {epoch}. Give up all partitions and join again.",
    )


def check_late(step: Step, member_id: str, caller: Caller, *, fences: bool) -> None:
    """Refuse a late request, on a connection that the member no longer uses: its state is stale.

    The member would not receive the answer, so the answer must not carry an assignment. A member that does receive
    it sends the request again.
    """
    if step.is_late(member_id, caller):
        code = ErrorCode.FENCED_MEMBER_EPOCH if fences else ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        raise ApiError(code, f"Member {member_id} speaks on a newer connection.")


def check_room(step: Step, group: ConsumerGroup) -> None:
    """Refuse one member too many."""
    if len(group.members) >= step.settings.consumer_max_size:
        raise ApiError(
            ErrorCode.GROUP_MAX_SIZE_REACHED,
            f"Group {group.group_id} has {len(group.members)} members; group.consumer.max.size allows no more.",
        )


def check_names(step: Step, before: MemberMetadata | None, said: MemberMetadata) -> None:
    """Refuse more names of topics than a group may subscribe to: every decision about it looks at all of them."""
    group, most = step.group, step.settings.consumer_names_max
    if said.topics in group.topic_lists:
        return
    used = None if before is None else group.topic_lists.get(before.topics)
    freed = len(used.topics) if used is not None and used.members == 1 else 0
    count = group.names - freed + len(said.topics)
    if count > most:
        raise ApiError(
            ErrorCode.GROUP_MAX_SIZE_REACHED,
            f"The members of group {group.group_id} would subscribe to {count} names of topics; "
            f"group.consumer.max.subscribed.names allows {most}. Subscribe by a regular expression.",
        )


def _check_versions(group: ConsumerGroup, member_id: str, said: MemberMetadata) -> None:
    """Refuse a version range that excludes the assignor that the others use (KIP-268)."""
    if not said.client_assignors:
        return
    others = [offers_of(other.described) for other in group.members.values() if other.member_id != member_id]
    used = client_assignor(others) if others else None
    if used is None:
        return
    mine = [offer for offer in said.client_assignors if offer.name == used.name]
    if mine and client_assignor([*others, tuple(mine)]) is None:
        offer = mine[0]
        raise ApiError(
            ErrorCode.UNSUPPORTED_ASSIGNOR,
            f"Assignor {used.name}: the group's members do not understand versions {offer.minimum_version} to "
            f"{offer.maximum_version}.",
        )


def _merged(before: MemberMetadata, request: ConsumerGroupHeartbeatRequest, caller: Caller) -> MemberMetadata:
    """The member's metadata now: null fields, and a timeout of -1, keep their values.

    A join at epoch 0 resets them instead. (At epoch 0 a member may also just wait for a target.)
    """
    said = before
    names, regex = request.subscribed_topic_names, request.subscribed_topic_regex
    if (
        describes_nothing(request)
        and request.instance_id in (None, before.instance_id)
        and before.allow_key_share >= request.allow_key_share
    ):
        return before
    joining = request.member_epoch == JOINING and request.rebalance_timeout_ms != -1
    return replace(
        said,
        client_id=caller.client_id,
        client_host=caller.client_host,
        instance_id=request.instance_id if request.instance_id is not None else said.instance_id,
        rack_id=request.rack_id if joining or request.rack_id is not None else said.rack_id,
        rebalance_timeout_ms=said.rebalance_timeout_ms
        if request.rebalance_timeout_ms == -1
        else request.rebalance_timeout_ms,
        topics=tuple(sorted(set(names))) if names is not None else () if joining else said.topics,
        regex=(regex or None) if joining or regex is not None else said.regex,
        server_assignor=request.server_assignor
        if joining or request.server_assignor is not None
        else said.server_assignor,
        client_assignors=said.client_assignors
        if request.client_assignors is None and not joining
        else tuple(
            Assignor(
                offer.name,
                offer.minimum_version,
                offer.maximum_version,
                offer.reason,
                offer.metadata_version,
                bytes(offer.metadata_bytes),
            )
            for offer in request.client_assignors or ()
        ),
        classic=None,
        allow_key_share=request.allow_key_share or (said.allow_key_share and request.rebalance_timeout_ms == -1),
    )


def calls_for_assignment(before: MemberMetadata, said: MemberMetadata) -> bool:
    """Whether a change of a member's metadata calls for a new assignment."""
    return (
        before.topics != said.topics
        or before.regex != said.regex
        or before.server_assignor != said.server_assignor
        or before.client_assignors != said.client_assignors
        or before.rack_id != said.rack_id
        or before.allow_key_share != said.allow_key_share
    )


def replace_member(step: Step, member: Member, new_id: str, said: MemberMetadata) -> None:
    """A static member returns under another id and keeps its assignment."""
    group_id, old_id = step.group_id, member.member_id
    target, told = step.group.target(old_id), step.group.told.get(old_id, AssignmentMetadata())
    shares = step.group.target_shares.get(old_id, NO_SHARES)
    step.put(*gone_records(group_id, old_id))
    step.put(member_record(group_id, new_id, said))
    step.put(target_record(group_id, new_id, target, told, shares))
    step.put(current_record(group_id, new_id, replace(member, member_id=new_id, described=said, epoch=JOINING)))
    step.live.connections.pop(old_id, None)
    step.gate.forget(old_id)
    step.stop_expecting("session", old_id)


def follow(
    step: Step, member_id: str, owned: Assignment | None, shares: Shares = NO_SHARES, *, may_be_taking: bool = False
) -> Member:
    """Move a member one step towards its target, with the timers that go with it."""
    before = step.group.members[member_id]
    if step.is_unchanged and step.gate.is_idle(member_id):
        step.keep_session(before)
        return before
    gate = step.gate
    after = reconcile(step.group, before, owned, gate, gate.takes, gate.free, shares, may_be_taking)
    if after is before and step.is_unchanged and after.state is not MemberState.UNREVOKED_PARTITIONS:
        step.gate.note_idle(member_id)
    if after is not before:
        step.draft.write(*step.gate.handed_out(before, after))
        step.put_last(after)
        step.gate.forget(member_id, but=after.owns if after.shares or after.revoking_shares else after.holds)
    if after.state is MemberState.UNREVOKED_PARTITIONS:
        if before.state is not MemberState.UNREVOKED_PARTITIONS or _revokes_more(before, after):
            step.expect_within_rebalance_timeout("rebalance", after)
    elif before.state is MemberState.UNREVOKED_PARTITIONS:
        step.stop_expecting("rebalance", member_id)
    step.keep_session(after)
    return after


def _revokes_more(before: Member, after: Member) -> bool:
    return before.revoking != after.revoking or before.revoking_shares != after.revoking_shares


def _answer(
    step: Step,
    member: Member,
    request: ConsumerGroupHeartbeatRequest,
    owned: Assignment | None,
    owned_shares: Shares,
    before: Member | None,
    *,
    anew: bool,
) -> ConsumerGroupHeartbeatResponse:
    """Answer with the member's epoch, and its assignment where the member may not have it.

    On a new connection (`anew`) the answer is complete, whatever was sent on another connection.
    """
    whole = (
        request.topic_partitions is not None
        and request.rebalance_timeout_ms != -1
        and (request.subscribed_topic_names is not None or request.subscribed_topic_regex is not None)
    )
    tell = (
        whole
        or anew
        or before is None
        or request.member_epoch != member.epoch
        or not same(before.assigned, member.assigned)
        or before.shares != member.shares
        or (owned is not None and not (same(owned, member.assigned) and owned_shares == member.shares))
    )
    response = ConsumerGroupHeartbeatResponse(
        member_id=member.member_id,
        member_epoch=member.epoch,
        heartbeat_interval_ms=step.configs.heartbeat_interval_ms,
        should_compute_assignment=_asked(step, member),
    )
    if tell:
        told = step.group.told.get(member.member_id, AssignmentMetadata())
        response.assignment = AssignmentMessage(
            topic_partitions=_message(member.assigned, member.shares),
            pending_topic_partitions=_message(*pending_parts(step.group, member)),
            error=told.error,
            metadata_version=told.version,
            metadata_bytes=told.metadata,
        )
    return response


def _asked(step: Step, member: Member) -> bool:
    """Whether the member is to compute the target."""
    computation = step.live.computation
    if computation is None or computation.member_id != member.member_id or computation.members is not None:
        return False
    step.expect_target(computation)
    return True


def _message(partitions: Assignment, shares: Shares) -> list[TopicPartitions]:
    ranges = dict(shares)
    return [
        TopicPartitions(topic_id=topic_id, partitions=list(numbers), key_ranges=key_ranges(topic_id, numbers, ranges))
        for topic_id, numbers in partitions
    ]


def leaver(step: Step, request: ConsumerGroupHeartbeatRequest, caller: Caller) -> Member:
    """The member that leaves. ApiError for an unknown member, or a connection that it no longer uses."""
    group = step.group
    member = group.members.get(request.member_id)
    if member is None and request.instance_id is not None:
        holder = group.static_members.get(request.instance_id)
        if holder is not None:
            raise ApiError(
                ErrorCode.FENCED_INSTANCE_ID, f"Instance id {request.instance_id} belongs to member {holder} now."
            )
    if member is None or (
        request.member_epoch == LEFT_FOR_A_WHILE and member.described.instance_id != request.instance_id
    ):
        raise unknown(group.group_id, request.member_id)
    check_late(step, member.member_id, caller, fences=True)
    return member


def leave_for_a_while(step: Step, member: Member) -> None:
    """A static member leaves temporarily: it keeps its assignment until its session ends."""
    step.put_last(
        replace(member, epoch=LEFT_FOR_A_WHILE, state=MemberState.STABLE, revoking=NOTHING, revoking_shares=NO_SHARES)
    )
    step.stop_expecting("rebalance", member.member_id)
    step.keep_session(member)
